"""Maps cost no more memory than was asked for: rows x keys, never t x s."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.attention import DSA, Context, attend
from regard.attention import sparse as select
from regard.attention.scores import Additive
from regard.mask import Causal, Span, Visible
from regard.models.recurrent import Seq2SeqConfig
from regard.see.probe import Probe, Recorder, thumbnail
from tests.laws.mechanisms import DIM, MECHANISMS, STATES, TIGHT, VOCAB, decoder, ids, layer
from tests.look.test_probe_exact import KINDS, LATENT


class Numbers(TorchDispatchMode):
    """`most`: how many numbers the largest tensor's memory held; `total`: how many were made anew, all together."""

    most = total = 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **(kwargs or {}))
        for x in _tensors(out):
            size = x.untyped_storage().nbytes() // x.element_size()
            self.most = max(self.most, size)
            self.total += 0 if _held(x, (args, kwargs)) else size
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _held(x: Tensor, tree: Any) -> bool:
    """Whether x lies in the memory of one of these."""
    at = x.untyped_storage().data_ptr()
    return any(y.untyped_storage().data_ptr() == at for y in _tensors(tree))


def inside(monkeypatch: pytest.MonkeyPatch, run: Any) -> Numbers:
    """Of all tensors that the probe makes or touches while `run`."""
    mode = Numbers()
    for name in ("see", "gathered"):
        real = getattr(Recorder, name)

        def watched(self: Recorder, *args: Any, real: Any = real) -> None:
            with mode:
                real(self, *args)

        monkeypatch.setattr(Recorder, name, watched)
    with torch.no_grad():
        run()
    return mode


def test_probe_of_one_row_makes_nothing_larger_than_its_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    t, (h, g, d) = 3000, (4, 2, 4)
    q, k = torch.randn(1, t, h, d), torch.randn(1, t, g, d)
    mask, probe = Visible(Causal(), Span.run(0, t), Span.run(0, t)), Probe(rows=[-1], what=KINDS)
    most = inside(monkeypatch, lambda: attend(q, k, k, mask, probe=probe.at("0.self"))).most
    assert probe.maps["0.self"][0].shape == (1, h, 1, t)
    assert most <= h * t * d  # q itself; t x t would be 9 million


def test_probe_of_one_row_of_sparse_attention_makes_nothing_larger_than_its_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    t, topk = 400, 8
    dsa = layer(DSA(LATENT, index_heads=2, index_dim=8, topk=topk))
    probe, x = Probe(rows=[-1], what=KINDS), torch.randn(1, t, 24).double()
    ctx = Context(Span.run(0, t), Causal(), probe=probe, site="0.self")
    most = inside(monkeypatch, lambda: dsa(x, ctx)).most
    assert probe.maps["0.self"][0].shape == (1, 3, 1, t)
    assert most <= t * topk * 14  # the gathered keys are there anyway; t x t x 3 would be 480,000


@pytest.mark.parametrize("name", [n for n in MECHANISMS if n not in STATES])
def test_probe_of_one_row_makes_less_than_one_head_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    t, probe = 512, Probe(rows=[-1], what=KINDS)
    module, x = layer(MECHANISMS[name]), torch.randn(1, t, DIM).double()
    ctx = Context(Span.run(0, t), Causal(), probe=probe, site="0.self")
    numbers = inside(monkeypatch, lambda: module(x, ctx))
    assert probe.maps["0.self"][0].shape[2:] == (1, t)
    assert 0 < numbers.total < t * t  # every step and every kind, of all heads


@pytest.mark.parametrize("name", ["gqa_rope", "partial_rope", "qk_norm"])
@torch.no_grad()
def test_probe_of_one_row_leaves_the_largest_tensor_of_a_forward_as_it_was(name: str) -> None:
    model, x, t, most = decoder(name), ids(1, 1500), 1500, []
    for probe in (None, Probe(rows=[-1], what=KINDS)):
        with Numbers() as numbers:
            model(x, probe=probe)
        most.append(numbers.most)
    assert most[1] == most[0] < t * t / 10


@torch.no_grad()
def test_probe_of_one_row_leaves_the_largest_tensor_of_bahdanau_as_it_was() -> None:
    model, x, most = Seq2SeqConfig(VOCAB, VOCAB, 64).make().eval(), ids(1, 100), []
    for probe in (None, Probe(rows=[-1], what=KINDS)):
        with Numbers() as numbers:
            model(x, source=x, probe=probe)
        most.append(numbers.most)
    assert most[1] == most[0] < 100 * 100 * 64 / 10  # t x s x dim


def test_probe_of_an_additive_score_is_wide_for_one_row_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    t, s, hidden, probe = 60, 50, 64, Probe(what=KINDS)
    q, k, score = torch.randn(1, t, 1, 8), torch.randn(1, s, 1, 8), Additive(8, 8, hidden)
    run = lambda: attend(q, k, k, score=score, probe=probe.at("0.cross"))  # noqa: E731
    assert inside(monkeypatch, run).most <= max(t * s, s * hidden)  # not t x s x hidden


def test_probe_that_reduces_holds_one_head_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    t, h, seen = 128, 16, []

    def small(a: Tensor) -> Tensor:
        seen.append(tuple(a.shape))
        return thumbnail(16)(a)

    q, probe, whole = torch.randn(1, t, h, 4), Probe(reduce=small), Probe()
    mask = Visible(Causal(), Span.run(0, t), Span.run(0, t))
    most = inside(monkeypatch, lambda: attend(q, q, q, mask, probe=probe.at("0.self"))).most
    assert most <= t * t and seen == [(1, 1, t, t)] * h
    attend(q, q, q, mask, probe=whole.at("0.self"))
    torch.testing.assert_close(probe.maps["0.self"][0], thumbnail(16)(whole.maps["0.self"][0]))


@pytest.mark.parametrize("name", ["gqa_rope", "mla", "dsa_gqa", "sinks"])
@pytest.mark.parametrize("heads", [None, [0, 2]])
@torch.no_grad()
def test_probe_that_reduces_gives_what_the_whole_maps_would(
    name: str, heads: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(select.WORK, "cpu", 1)
    model, whole = decoder(name), Probe(heads=heads, what=("weight", "norm"))
    probe = Probe(heads=heads, what=("weight", "norm"), reduce=lambda a: a.amax(-1))
    model(ids(2, 8), probe=whole), model(ids(2, 8), probe=probe)
    for kind in ("weight", "norm"):
        for site, (a,) in whole.of(kind).items():
            torch.testing.assert_close(probe.of(kind)[site][0], a.amax(-1), **TIGHT)
