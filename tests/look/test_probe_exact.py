"""Maps of every kind are what float64 says of the same q, k and v, and cost no more memory than was asked for."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.attention import DSA, GQA, MLA, Context, attend, select
from regard.config import UsageError
from regard.look.maps import thumbnail
from regard.look.probe import Probe, Recorder
from regard.mask import Causal, Span, Visible
from regard.models.recurrent import RecurrentConfig, Seq2SeqConfig
from regard.position import Rope
from tests.laws.mechanisms import TIGHT, decoder, ids, layer, stir

KINDS = ("weight", "score", "norm", "chosen")
LATENT = MLA(heads=3, latent=10, head_dim=6, rope_dim=4, value_dim=7, rope=Rope())


def parts(dtype: torch.dtype, size: int = 12) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, size, h, d).to(dtype) for h, d in ((6, 8), (2, 8), (2, 5))]


def oracle(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """All kinds in float64, head by head."""
    q, k, v = (x.double() for x in (q, k, v))
    made: dict[str, list[Tensor]] = {kind: [] for kind in KINDS[:3]}
    for i in range(q.shape[2]):
        j = i // (q.shape[2] // k.shape[2])
        score = torch.einsum("btd,bsd->bts", q[:, :, i], k[:, :, j]) * q.shape[-1] ** -0.5
        score = (score + bias[:, i]).masked_fill(~seen, -torch.inf)
        made["score"].append(score)
        made["weight"].append(score.softmax(-1))
        made["norm"].append(made["weight"][-1] * v[:, :, j].norm(dim=-1)[:, None])
    return {kind: torch.stack(maps, 1) for kind, maps in made.items()}


@pytest.mark.parametrize("backend", ["reference", "online", "sdpa", "ordered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_probe_maps_are_those_of_float64(dtype: torch.dtype, backend: str) -> None:
    """Scores of a few units are sums of eight products in float32: 1e-6 is several roundings of them."""
    q, k, v = parts(dtype)
    seen, bias = torch.ones(12, 12, dtype=torch.bool).tril(), torch.randn(1, 6, 12, 12)
    probe, mask = Probe(what=KINDS), Visible(Causal(), Span.run(0, 12), Span.run(0, 12))
    attend(q, k, v, mask, bias=bias.to(dtype), backend=backend, probe=probe.at("0.self"))
    want = oracle(q, k, v, seen, bias.to(dtype).double())
    near = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 4e-6}
    for kind, exact in want.items():
        torch.testing.assert_close(probe.of(kind)["0.self"][0].double(), exact, **near)
    assert torch.equal(probe.of("chosen")["0.self"][0], seen.expand(2, 1, 12, 12))


def test_probe_score_is_capped_and_sinks_are_no_keys() -> None:
    q, k, v = parts(torch.float64)
    plain, capped, sunk = (Probe(what=KINDS) for _ in range(3))
    attend(q, k, v, probe=plain.at("0"))
    attend(q, k, v, softcap=1.5, probe=capped.at("0"))
    attend(q, k, v, sinks=torch.full((6,), 0.7).double(), probe=sunk.at("0"))
    score = plain.of("score")["0"][0]
    torch.testing.assert_close(capped.of("score")["0"][0], 1.5 * torch.tanh(score / 1.5))
    torch.testing.assert_close(sunk.of("score")["0"][0], score)
    full = torch.cat([torch.full_like(score[..., :1], 0.7), score], -1).softmax(-1)
    torch.testing.assert_close(sunk.maps["0"][0], full[..., 1:])
    lengths = v.norm(dim=-1).repeat_interleave(3, 2).transpose(1, 2)[:, :, None]
    torch.testing.assert_close(sunk.of("norm")["0"][0], full[..., 1:] * lengths)


@pytest.mark.parametrize("heads", [None, [2, 0]])
def test_probe_of_absorbed_mla_equals_expanded(heads: list[int] | None) -> None:
    mla, x, found = layer(LATENT), torch.randn(2, 9, 24).double(), []
    for form in (mla.absorbed, mla.expanded):
        probe = Probe(heads=heads, what=KINDS)
        ctx = Context(Span.run(0, 9), Causal(), probe=probe, site="0.self")
        kept, pos = ctx.keep(**mla.entries(x, ctx))
        form(mla.queries(mla.query_input(x), ctx), kept, ctx.visible(pos), ctx)
        found.append(probe)
    for kind in KINDS:
        a, b = (probe.of(kind)["0.self"][0] for probe in found)
        torch.testing.assert_close(a, b, **TIGHT)


@pytest.mark.parametrize("inner", [GQA(6, 2, head_dim=4, rope=Rope()), LATENT])
@pytest.mark.parametrize("work", [1, select.WORK])
def test_probe_of_sparse_attention_marks_the_chosen_keys(
    inner: GQA | MLA, work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense maps of the same layer, restricted to the marked keys and scaled to sum to 1, are its maps."""
    monkeypatch.setattr(select, "WORK", work)  # 1: query by query
    dsa, x = (
        layer(DSA(inner, index_heads=2, index_dim=8, topk=3, rope_dim=2)),
        torch.randn(2, 9, 24),
    )
    sparse, dense = Probe(what=KINDS), Probe(what=KINDS)
    for module, probe in ((dsa, sparse), (dsa.attention, dense)):
        module(x.double(), Context(Span.run(0, 9), Causal(), probe=probe, site="0.self"))
    chosen = sparse.of("chosen")["0.self"][0]
    assert chosen.shape == (2, 1, 9, 9) and chosen.dtype == torch.bool
    assert chosen[:, 0].sum(-1).tolist() == [[1, 2, *[3] * 7]] * 2 and not chosen.triu(1).any()
    want = dense.maps["0.self"][0] * chosen
    want = want / want.sum(-1, keepdim=True)
    torch.testing.assert_close(sparse.maps["0.self"][0], want, **TIGHT)
    assert (sparse.maps["0.self"][0][~chosen.expand_as(want)] == 0).all()
    score = dense.of("score")["0.self"][0].masked_fill(~chosen, -torch.inf)
    torch.testing.assert_close(sparse.of("score")["0.self"][0], score, **TIGHT)
    long = (dense.of("norm")["0.self"][0] / dense.maps["0.self"][0]).nan_to_num(0.0)
    torch.testing.assert_close(sparse.of("norm")["0.self"][0], want * long, **TIGHT)


@pytest.mark.parametrize("attention", ["additive", "bilinear", "dot", "scaled_dot"])
@torch.no_grad()
def test_probe_shows_recurrent_alignments_with_and_without_a_cache(attention: str) -> None:
    config = Seq2SeqConfig(19, 19, 8, 2, "gru", attention)
    model, whole, steps = stir(config.make()), Probe(what=KINDS), Probe(what=KINDS)
    site = f"decoder.{0 if attention == 'additive' else 1}.cross"
    source, x, cache = ids(2, 6), ids(2, 4, seed=2), model.cache(2)
    model(x, source=source, source_lengths=[6, 4], probe=whole)
    for i in range(4):
        first = {"source": source, "source_lengths": [6, 4]} if i == 0 else {}
        model(x[:, i : i + 1], cache=cache, probe=steps, **first)
    for kind in KINDS:
        joined = torch.cat(steps.of(kind)[site], 2)
        torch.testing.assert_close(joined, whole.of(kind)[site][0], **TIGHT)
    weight = whole.maps[site][0]
    assert weight.shape == (2, 1, 4, 6) and (weight[1, ..., 4:] == 0).all()
    torch.testing.assert_close(weight.sum(-1), torch.ones(2, 1, 4).double())
    assert whole.of("chosen")[site][0][1, 0, 0].tolist() == [True] * 4 + [False] * 2


@torch.no_grad()
def test_probe_of_a_recurrent_language_model_looks_back_at_its_states() -> None:
    model, probe = stir(RecurrentConfig(19, 8, 2, attention="dot").make()), Probe()
    model(ids(2, 5), probe=probe)
    weight = probe.maps["1.self"][0]
    assert weight.shape == (2, 1, 5, 5) and (weight.triu(1) == 0).all()
    torch.testing.assert_close(weight.sum(-1), torch.ones(2, 1, 5).double())


# --- memory -------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most numbers that one tensor of its own memory held."""

    most = 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return out


def largest(monkeypatch: pytest.MonkeyPatch, run: Any) -> int:
    """Of all tensors that the probe makes or touches while `run`."""
    mode = Largest()
    for name in ("see", "gathered"):
        real = getattr(Recorder, name)

        def watched(self: Recorder, *args: Any, real: Any = real) -> None:
            with mode:
                real(self, *args)

        monkeypatch.setattr(Recorder, name, watched)
    with torch.no_grad():
        run()
    return mode.most


def test_probe_of_one_row_makes_nothing_larger_than_its_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    t, (h, g, d) = 3000, (4, 2, 4)
    q, k = torch.randn(1, t, h, d), torch.randn(1, t, g, d)
    mask, probe = Visible(Causal(), Span.run(0, t), Span.run(0, t)), Probe(rows=[-1], what=KINDS)
    most = largest(monkeypatch, lambda: attend(q, k, k, mask, probe=probe.at("0.self")))
    assert probe.maps["0.self"][0].shape == (1, h, 1, t)
    assert most <= h * t * d  # q itself; t x t would be 9 million


def test_probe_of_one_row_of_sparse_attention_makes_nothing_larger_than_its_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    t, topk = 400, 8
    dsa = layer(DSA(LATENT, index_heads=2, index_dim=8, topk=topk))
    probe, x = Probe(rows=[-1], what=KINDS), torch.randn(1, t, 24).double()
    ctx = Context(Span.run(0, t), Causal(), probe=probe, site="0.self")
    most = largest(monkeypatch, lambda: dsa(x, ctx))
    assert probe.maps["0.self"][0].shape == (1, 3, 1, t)
    assert (
        most <= t * topk * 14
    )  # the gathered keys, that are there anyway; t x t x 3 would be 480,000


def test_probe_that_reduces_holds_one_head_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    t, h, seen = 128, 16, []

    def small(a: Tensor) -> Tensor:
        seen.append(tuple(a.shape))
        return thumbnail(16)(a)

    q, probe, whole = torch.randn(1, t, h, 4), Probe(reduce=small), Probe()
    mask = Visible(Causal(), Span.run(0, t), Span.run(0, t))
    most = largest(monkeypatch, lambda: attend(q, q, q, mask, probe=probe.at("0.self")))
    assert most <= t * t and seen == [(1, 1, t, t)] * h
    attend(q, q, q, mask, probe=whole.at("0.self"))
    torch.testing.assert_close(probe.maps["0.self"][0], thumbnail(16)(whole.maps["0.self"][0]))


@pytest.mark.parametrize("name", ["gqa_rope", "mla", "dsa_gqa", "sinks"])
@pytest.mark.parametrize("heads", [None, [0, 2]])
@torch.no_grad()
def test_probe_that_reduces_gives_what_the_whole_maps_would(
    name: str, heads: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "WORK", 1)
    model, whole = decoder(name), Probe(heads=heads, what=("weight", "norm"))
    probe = Probe(heads=heads, what=("weight", "norm"), reduce=lambda a: a.amax(-1))
    model(ids(2, 8), probe=whole), model(ids(2, 8), probe=probe)
    for kind in ("weight", "norm"):
        for site, (a,) in whole.of(kind).items():
            torch.testing.assert_close(probe.of(kind)[site][0], a.amax(-1), **TIGHT)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_probe_refuses_a_kind_it_does_not_know_or_was_not_asked_for() -> None:
    with pytest.raises(UsageError, match="no map 'wieght'.*weight"):
        Probe(what="wieght")
    with pytest.raises(UsageError, match=r"'score' was not asked for.*\('weight', 'score'\)"):
        Probe().of("score")
