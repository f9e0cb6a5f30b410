"""Maps of every kind are what float64 says of the same q, k and v."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.attention import DSA, GQA, MLA, Context, attend
from regard.attention import sparse as select
from regard.attention.core import Terms
from regard.errors import UsageError
from regard.fast.cpu import native as lean
from regard.fast.cpu import prepare
from regard.fast.invariant import invariant
from regard.kernels.c.linear import usable
from regard.mask import Causal, Span, Visible
from regard.models.recurrent import RecurrentConfig, Seq2SeqConfig
from regard.position import Rope
from regard.see.probe import Probe, Recorder
from tests.checkpoint.test_native import tiny
from tests.decode.test_lean import PAIRS, made, story
from tests.laws.mechanisms import TIGHT, ids, layer, stir
from tests.look.test_probe_families import READERS, families, given

KINDS = ("weight", "score", "norm", "chosen")
LATENT = MLA(heads=3, latent=10, head_dim=6, rope_dim=4, value_dim=7, rope=Rope())


def parts(dtype: torch.dtype, size: int = 12) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, size, h, d).to(dtype) for h, d in ((6, 8), (2, 8), (2, 5))]


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, terms: Terms) -> dict[str, Tensor]:
    """All kinds in float64, of what a layer showed: q (b h t d), k and v (b g s .), seen (b h t s)."""
    assert not terms.sinks
    h, share = q.shape[1], q.shape[1] // k.shape[1]
    made: dict[str, list[Tensor]] = {kind: [] for kind in KINDS[:3]}
    for i in range(h):
        mine, key, value = (x.double()[:, i // n] for x, n in ((q, 1), (k, share), (v, share)))
        if terms.score is not None:  # Bahdanau's
            w = terms.score.__self__.wv.double()  # type: ignore[attr-defined]
            score = (torch.tanh(mine[:, :, None] + key[:, None]) * w).sum(-1)
        else:
            score = (mine[:, :, None] * key[:, None]).sum(-1) * terms.scale
        if terms.softcap is not None:
            score = terms.softcap * torch.tanh(score / terms.softcap)
        if terms.bias is not None:
            score = score + terms.bias.double()[:, i]
        if terms.up is not None:
            value = torch.einsum("bsc,ec->bse", value, terms.up[i].double())
        e = torch.where(seen[:, i], score.exp(), 0.0)
        total = e.sum(-1, keepdim=True)
        made["weight"].append(torch.where(total > 0, e / total, 0.0))
        made["score"].append(torch.where(seen[:, i], score, -torch.inf))
        made["norm"].append(made["weight"][-1] * value.square().sum(-1).sqrt()[:, None])
    return {kind: torch.stack(maps, 1) for kind, maps in made.items()}


@pytest.mark.parametrize("backend", ["reference", "online", "sdpa", "ordered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_probe_maps_are_those_of_float64(dtype: torch.dtype, backend: str) -> None:
    """Scores of a few units are sums of eight products in float32: 1e-6 is several roundings of them."""
    q, k, v = parts(dtype)
    seen, bias = torch.ones(12, 12, dtype=torch.bool).tril(), torch.randn(1, 6, 12, 12)
    probe, mask = Probe(what=KINDS), Visible(Causal(), Span.run(0, 12), Span.run(0, 12))
    attend(q, k, v, mask, bias=bias.to(dtype), backend=backend, probe=probe.at("0.self"))
    terms = Terms(8**-0.5, bias.to(dtype))
    want = by_hand(*(x.transpose(1, 2) for x in (q, k, v)), seen.expand(2, 6, 12, 12), terms)
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


# --- every family, by hand ----------------------------------------------------------------------------------------


def against_hand(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every map that a probe makes from here on is held against `by_hand`; the list names the places."""
    real, done = Recorder._maps, []

    def checked(self: Recorder, heads: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        found, (mask, terms) = real(self, heads, q, k, v, *rest), rest
        shape = (*q.shape[:3], k.shape[2])
        seen = torch.ones(shape).bool() if mask is None else mask.expand(shape)
        for kind, want in by_hand(q, k, v, seen, terms).items():
            assert found[kind].dtype == torch.float32
            torch.testing.assert_close(found[kind].double(), want, rtol=4e-6, atol=4e-6)
        assert torch.equal(found["chosen"].expand(shape), seen)
        done.append(self.site)
        return found

    monkeypatch.setattr(Recorder, "_maps", checked)
    return done


@families
@torch.no_grad()
def test_probe_maps_of_every_family_are_those_worked_out_by_hand(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward and cached steps, in float32: sums of a few dozen products of unit size."""
    done = against_hand(monkeypatch)
    torch.manual_seed(0)
    model = stir(tiny(name)).float()
    x, more = given(model)
    model(x, **more, probe=Probe(what=KINDS))
    assert done or name == "gru-lm"
    if name not in READERS.split():
        cache, count = model.cache(2), len(done)
        for i, part in enumerate(x.split([4, 1, 2], 1)):
            model(part, cache=cache, **(more if i == 0 else {}), probe=Probe(what=KINDS))
        assert len(done) >= 2 * count


@pytest.mark.skipif(not usable("fp32"), reason="no native products here")
@pytest.mark.parametrize("number", [p for p in ("fp32", "bf16") if usable(p)])
@pytest.mark.parametrize("name", ["llama", "window", "t5", "marian"])
@torch.inference_mode()
def test_probe_of_a_native_step_shows_the_weights_it_used(
    name: str, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """weights x values is what the C code gave, to float32's rounding, a bf16 cache read as it is."""
    outs, checked = [], 0
    attend_one, see = lean.attend_one, Recorder.see

    def native(*args: Any, **more: Any) -> Tensor:
        outs.append(attend_one(*args, **more))
        return outs[-1]

    def watched(self: Recorder, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
        nonlocal checked
        see(self, q, k, v, *rest)
        if outs:
            weight = self.probe.maps[self.site][-1]  # r h 1 s
            v = v.float().repeat_interleave(weight.shape[1] // v.shape[1], 1)
            torch.testing.assert_close((weight @ v)[:, :, 0], outs.pop(), rtol=1e-5, atol=3e-6)
            checked += 1

    monkeypatch.setattr(lean, "attend_one", native)
    monkeypatch.setattr(Recorder, "see", watched)
    story(Probe().on(prepare(made(name), number)), name)
    assert checked == 7 * 2 * (2 if name in PAIRS else 1) and not outs  # steps, layers, attentions


@pytest.mark.parametrize("heads", [None, [2, 0]])
def test_probe_of_absorbed_mla_equals_expanded(heads: list[int] | None) -> None:
    mla, x, found = layer(LATENT), torch.randn(2, 9, 24).double(), []
    for form in (mla.absorbed, mla.expanded):
        probe = Probe(heads=heads, what=KINDS)
        ctx = Context(Span.run(0, 9), Causal(), probe=probe, site="0.self")
        kept, pos = ctx.update_cache(**mla.entries(x, ctx))
        form(mla.queries(mla.query_input(x), ctx), kept, ctx.visible(pos), ctx)
        found.append(probe)
    for kind in KINDS:
        a, b = (probe.of(kind)["0.self"][0] for probe in found)
        torch.testing.assert_close(a, b, **TIGHT)


@torch.no_grad()
def test_probe_of_an_invariant_twin_shows_each_heads_own_values() -> None:
    model, one, other = stir(tiny("deepseek-v3")).float(), Probe(what="norm"), Probe(what="norm")
    x, _ = given(model)
    model(x, probe=one), invariant(model)(x, probe=other, backend="ordered")
    for site, (norm,) in one.of("norm").items():
        torch.testing.assert_close(other.of("norm")[site][0], norm, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inner", [GQA(6, 2, head_dim=4, rope=Rope()), LATENT])
@pytest.mark.parametrize("work", [1, select.WORK["cpu"]])
def test_probe_of_sparse_attention_marks_the_chosen_keys(
    inner: GQA | MLA, work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense maps of the same layer, restricted to the marked keys and scaled to sum to 1, are its maps."""
    monkeypatch.setitem(select.WORK, "cpu", work)  # 1: query by query
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


@torch.no_grad()
def test_probe_of_a_summed_memory_shows_ones_whichever_rows_are_asked_for() -> None:
    model, some = stir(RecurrentConfig(19, 8, 2, attention="sum").make()), Probe(rows=[1, -1])
    model(ids(2, 5), [5, 4], probe=some)
    assert some.maps["1.self"][0][0, 0].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]


# --- what is refused ----------------------------------------------------------------------------------------------


def test_probe_refuses_a_kind_it_does_not_know_or_was_not_asked_for() -> None:
    with pytest.raises(UsageError, match="no map 'wieght'.*weight"):
        Probe(what="wieght")
    with pytest.raises(UsageError, match=r"'score' was not asked for.*\('weight', 'score'\)"):
        Probe().of("score")


@torch.no_grad()
def test_probe_of_a_place_by_its_name_alone() -> None:
    model, probe, wrong = tiny("gpt2"), Probe("1.self"), Probe("2.self")
    model(ids(1, 4), probe=probe), model(ids(1, 4), probe=wrong)
    assert list(probe.maps) == ["1.self"]
    with pytest.raises(UsageError, match="no layer '2.self'; this model has 0.self, 1.self"):
        _ = wrong.maps


def test_probe_says_what_it_looks_for_and_what_it_saw() -> None:
    probe = Probe(layers=[1], rows=[-1])
    assert repr(probe) == "Probe(layers=[1], rows=[-1], what=weight): saw nothing"
    regard.build("gpt2", layers=2, dim=8, heads=2, vocab=9, max_len=8)(
        torch.ones(1, 3).long(), probe=probe
    )
    assert repr(probe).endswith("saw 1.self")
