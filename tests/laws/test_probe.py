"""A probe changes nothing and shows the exact weights, on every backend, for chosen layers, heads and rows."""

import math

import pytest
import torch
from torch import Tensor

from regard.attention import BACKENDS, GQA, attend
from regard.attention import sparse as select
from regard.attention.scores import Additive
from regard.block import Tower
from regard.cache import LAYOUTS
from regard.errors import UsageError
from regard.layers import MLP
from regard.mask import Causal, Span, Visible
from regard.models import EncoderDecoder, EncoderDecoderConfig, Tokens
from regard.position import Sinusoidal
from regard.see.probe import Probe
from tests.laws.mechanisms import DIM, FEW, TIGHT, TOWERS, VOCAB, decoder, ids, options, stir
from tests.wide import wide

mechanisms = pytest.mark.parametrize("name", wide(TOWERS, keep=FEW))
LENGTHS = [8, 5]


def maps(name: str, backend: str = "sdpa", **wish: object) -> dict[str, Tensor]:
    torch.manual_seed(0)
    probe = Probe(**wish)
    with torch.no_grad():
        decoder(name)(ids(2, 8), LENGTHS, probe=probe, backend=backend)
    return {site: calls[0] for site, calls in probe.maps.items()}


PAIRS = [(name, b) for name in TOWERS for b in BACKENDS if b != "flex"]
FLEX = [("gqa_rope", "flex"), ("dsa_mla", "flex")]  # traced anew on each call: two will do


@pytest.mark.parametrize(
    "name, backend",
    wide([*PAIRS, *FLEX], keep=[*(pair for pair in PAIRS if pair[0] in FEW), FLEX[0]]),
)
@torch.no_grad()
def test_probe_changes_no_logit(name: str, backend: str) -> None:
    model, x = decoder(name), ids(2, 8)
    want = model(x, LENGTHS, backend=backend)
    assert torch.equal(model(x, LENGTHS, probe=Probe(), backend=backend), want)


@mechanisms
def test_probe_rows_sum_to_one_and_hidden_keys_have_none(name: str) -> None:
    for weights in maps(name).values():
        assert weights.shape[2:] == (8, 8) and (weights >= 0).all()
        total = weights.sum(-1)
        assert (weights.triu(1) == 0).all() and (total[1, :, 5:] == 0).all()
        if "sinks" in name or "compressed" in name:
            assert (total[0] < 1).all()  # the rest went to the sink, or to entries of many tokens
        else:
            torch.testing.assert_close(total[0], torch.ones_like(total[0]))


@pytest.mark.parametrize("backend", ["reference", "online", "sdpa"])
@mechanisms
def test_probe_gives_the_same_weights_on_every_backend(name: str, backend: str) -> None:
    want = maps(name, "reference")
    for site, weights in maps(name, backend).items():
        torch.testing.assert_close(weights, want[site], **TIGHT)


@pytest.mark.parametrize("name", ["gqa_rope", "sinks", "softcap", "gqa_t5"])
@torch.no_grad()
def test_probe_weights_times_values_are_the_output(name: str) -> None:
    """The weights of the first layer, applied by hand to its values, give what the fused kernel gave."""
    model, x = decoder(name), ids(2, 8)
    probe = Probe(layers=[0])
    model(x, LENGTHS, probe=probe)
    block, weights = model.tower.blocks[0], probe.maps["0.self"][0]
    h = block.norm1(model.embedding(x, Span.run(0, 8)))
    v = block.attention.wv(h).unflatten(-1, (block.attention.g, -1))
    v = v.repeat_interleave(block.attention.h // block.attention.g, 2)
    by_hand = torch.einsum("bhts,bshe->bthe", weights, v).flatten(2)
    from regard.attention import Context

    ctx = Context(Span.ragged(torch.tensor(LENGTHS), 8), Causal(), relative=model.tower.relative)
    torch.testing.assert_close(block.attention.wo(by_hand), block.attention(h, ctx), **TIGHT)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gqa_rope", "mla", "dsa_gqa", "dsa_window_sinks"])
@torch.no_grad()
def test_probe_sees_the_same_rows_when_decoding_with_a_cache(name: str, layout: str) -> None:
    model, x, whole, steps = decoder(name), ids(2, 8), Probe(), Probe()
    model(x, probe=whole)
    cache = model.cache(2, layout, **options(model, layout, 8))
    for part in x.split([5, 1, 1, 1], 1):
        model(part, cache=cache, probe=steps)
    pos = cache.span.index.expand(2, -1)  # a ring's keys come in the order of its slots
    for site, (want,) in whole.maps.items():
        assert [w.shape[2] for w in steps.maps[site]] == [5, 1, 1, 1]
        last = steps.maps[site][-1] * (pos >= 0)[:, None, None]
        at = pos.clamp(min=0)[:, None, None].expand_as(last)
        by_position = torch.zeros_like(want[:, :, 7:]).scatter_add(-1, at, last)
        torch.testing.assert_close(by_position, want[:, :, 7:], **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_weights_are_those_of_float64(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 6, h, 8).to(dtype) for h in (4, 2, 2))
    mask, exact, ours = torch.rand(2, 1, 6, 6) < 0.7, Probe(), Probe()
    attend(*(x.double() for x in (q, k, v)), mask, probe=exact.at("0.self"))
    attend(q, k, v, mask, probe=ours.at("0.self"))
    difference = (ours.maps["0.self"][0] - exact.maps["0.self"][0]).abs().max()
    assert difference < (1e-6 if dtype == torch.float32 else 2e-2)  # scores to 8 bits


@pytest.mark.parametrize("name", ["gqa_rope", "mqa_alibi", "sinks", "gqa_t5", "mla", "dsa_t5"])
def test_probe_of_some_heads_and_rows_is_a_part_of_the_whole(name: str) -> None:
    whole, part = maps(name), maps(name, heads=[2, 0], rows=[-1, 3])
    for site, weights in part.items():
        torch.testing.assert_close(weights, whole[site][:, [0, 2]][:, :, [3, 7]], **TIGHT)


def test_probe_computes_only_the_rows_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    rows = Visible.rows
    monkeypatch.setattr(Visible, "tensor", lambda self: pytest.fail("t x s was built"))
    monkeypatch.setattr(Visible, "rows", lambda self, i: asked.append(i.tolist()) or rows(self, i))
    q, k = torch.randn(1, 4, 30, 8), torch.randn(1, 2, 30, 8)
    probe, mask = (
        Probe(heads=[3], rows=[7, 29]),
        Visible(Causal(), Span.run(0, 30), Span.run(0, 30)),
    )
    attend(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), mask, probe=probe.at("0.self"))
    assert asked == [[7, 29]] and probe.maps["0.self"][0].shape == (1, 1, 2, 30)
    scores = (q[0, 3, 29] @ k[0, 1].T) / math.sqrt(8)  # head 3 of 4 reads group 1 of 2
    torch.testing.assert_close(probe.maps["0.self"][0][0, 0, 1], scores.softmax(-1))


def test_probe_of_heads_works_with_a_score_of_its_own() -> None:
    q, k, v = (torch.randn(2, n, 3, 4) for n in (5, 6, 6))
    score, some, every = Additive(4, 4, 8), Probe(heads=[1], rows=[2]), Probe()
    for probe in (some, every):
        attend(q, k, v, score=score, probe=probe.at("0.self"))
    part, whole = some.maps["0.self"][0], every.maps["0.self"][0]
    torch.testing.assert_close(part, whole[:, 1:2, 2:3])
    assert not whole.requires_grad


def test_probe_joins_the_chunks_of_sparse_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = maps("dsa_mla"), maps("dsa_mla", rows=[1, 6])
    monkeypatch.setitem(select.WORK, "cpu", 1)  # one query at a time
    for site, weights in maps("dsa_mla").items():
        torch.testing.assert_close(weights, whole[site], **TIGHT)
    for site, weights in maps("dsa_mla", rows=[-2, 1]).items():
        torch.testing.assert_close(weights, part[site], **TIGHT)


def test_probe_of_sparse_attention_shows_at_most_topk_keys() -> None:
    for weights in maps("dsa_mla").values():
        assert ((weights > 0).sum(-1) <= 3).all()


def test_probe_records_only_the_layers_it_wants() -> None:
    assert list(maps("mha")) == ["0.self", "1.self"]
    assert list(maps("mha", layers=[1])) == ["1.self"]
    assert list(maps("mha", layers=["0.self"])) == ["0.self"]


def test_probe_keeps_one_map_for_each_call() -> None:
    model, probe = decoder("mha"), Probe()
    for size in (5, 3):
        model(ids(1, size), probe=probe)
    assert [w.shape[-1] for w in probe.maps["1.self"]] == [5, 3]


def test_probe_leaves_nothing_on_the_model() -> None:
    model = decoder("dsa_mla")
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    model(ids(1, 6), probe=Probe())
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before


def test_probe_rows_that_a_call_does_not_have_are_left_out() -> None:
    model, probe = decoder("mha"), Probe(rows=[4])
    for size in (6, 1):
        model(ids(1, size), probe=probe)
    assert [w.shape[2] for w in probe.maps["0.self"]] == [1, 0]


def test_probe_of_an_encoder_decoder_names_its_places() -> None:
    tokens, ffn = Tokens(VOCAB, Sinusoidal(16)), MLP(20)
    encoder = Tower(DIM, 1, GQA(3), ffn, causal=False)
    config = EncoderDecoderConfig(tokens, encoder, tokens, Tower(DIM, 2, GQA(4), ffn, cross=GQA(2)))
    model, probe = stir(EncoderDecoder(config)), Probe()
    model(ids(2, 4), source=ids(2, 6), source_lengths=[6, 3], probe=probe)
    shapes = {site: tuple(calls[0].shape) for site, calls in probe.maps.items()}
    assert shapes == {
        "encoder.0.self": (2, 3, 6, 6),
        "decoder.0.self": (2, 4, 4, 4),
        "decoder.0.cross": (2, 2, 4, 6),
        "decoder.1.self": (2, 4, 4, 4),
        "decoder.1.cross": (2, 2, 4, 6),
    }
    cross = probe.maps["decoder.1.cross"][0]
    assert (cross[1, ..., 3:] == 0).all()
    torch.testing.assert_close(cross.sum(-1), torch.ones(2, 2, 4).double())


def test_probe_of_a_missing_head_says_which_there_are() -> None:
    with pytest.raises(UsageError, match="no head 3 at 0.self; its heads are 0 to 2"):
        maps("mha", heads=[0, 3])
    with pytest.raises(UsageError, match="no head 9 at 0.self"):
        maps("dsa_mla", heads=[9])


def test_probe_of_a_missing_layer_says_which_there_are() -> None:
    with pytest.raises(UsageError, match="no layer 2; this model has 0.self, 1.self"):
        maps("mha", layers=[1, 2])
    with pytest.raises(UsageError, match="no layer '0.cross'"):
        maps("mha", layers=["0.cross"])


def test_probe_before_any_call_has_no_maps() -> None:
    assert Probe(layers=[7]).maps == {}
