"""Prepared blocks in native code say what the plain blocks say: prompts, single steps, beams that trade places."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import Engine, Request, Settings
from regard.attention import GQA
from regard.block import Tower
from regard.cache import Cache, Contiguous, Paged, Pool
from regard.fast.cpu import prepare
from regard.fast.cpu.native import NativeAttention
from regard.fast.cpu.steps import NativeStack, Step
from regard.kernels.c import native
from regard.kernels.c.linear import NativeLinear, usable
from regard.kernels.c.rows import lse_and_topk
from regard.layers import LM, MLP, Norm
from regard.models import EncoderDecoderConfig, Model, Tokens, TransformerConfig
from regard.position import Learned, Rope, Sinusoidal, T5Bias
from tests.laws.mechanisms import stir

VOCAB, DIM = 61, 48
# |logits - original| / |original|: weights and cache rounded, each product adding to the one before
BOUND = {"fp32": 2e-6, "bf16": 0.03, "int8": 0.06}
RMS, GATED = Norm(1e-6, rms=True), MLP(80, "silu", gated=True, bias=False)

precisions = pytest.mark.parametrize("precision", [p for p in BOUND if usable(p)])
pytestmark = pytest.mark.skipif(not usable("fp32"), reason=f"no native products: {native.why()}")


def decoder(attention: GQA, ffn: MLP, norm: Norm, position: object, **more: object) -> Model:
    tower = Tower(DIM, 2, attention, ffn, norm=norm, **more)  # type: ignore[arg-type]
    return TransformerConfig(Tokens(VOCAB, position), tower, LM(), max_len=64).make()  # type: ignore[arg-type]


def pair(order: str, ffn: MLP, norm: Norm, relative: T5Bias | None, kv_heads: int = 4) -> Model:
    tokens = Tokens(VOCAB, None if relative else Sinusoidal(64))
    both = dict(norm=norm, order=order, final_norm=order == "pre")
    other = None if relative is None else T5Bias(4, causal=False)
    encoder = Tower(DIM, 1, GQA(4, bias=True), ffn, causal=False, relative=other, **both)  # type: ignore[arg-type]
    own = GQA(4, bias=True, out_bias=True)
    writer = Tower(DIM, 2, own, ffn, cross=GQA(4, kv_heads), relative=relative, **both)  # type: ignore[arg-type]
    return EncoderDecoderConfig(tokens, encoder, tokens, writer).make()


DECODERS = {
    "gpt2": lambda: decoder(GQA(4, bias=True, out_bias=True), MLP(96, "gelu_tanh"), Norm(), Learned(64)),
    "llama": lambda: decoder(GQA(4, 2, rope=Rope()), GATED, RMS, None),
    "window": lambda: decoder(GQA(4, 1, rope=Rope(), window=5), GATED, RMS, None),
    "partial": lambda: decoder(GQA(3, 3, 16, rope=Rope(layout="interleaved")), MLP(96, "gelu"), Norm(), None),
    "gemma": lambda: decoder(GQA(4, 2, rope=Rope(), qk_norm=1e-6), GATED, RMS, None, order="sandwich"),
    "olmo": lambda: decoder(GQA(4, rope=Rope(), qk_norm=1e-6, qk_norm_whole=True), GATED, RMS, None, order="inner"),
    "wide": lambda: decoder(GQA(4, 2, 20, value_dim=12, qk_norm=1e-6), MLP(50), Norm(), Learned(64), order="post"),
}  # fmt: skip
PAIRS = {
    "marian": lambda: pair("post", MLP(96, "silu"), Norm(), None),
    "bart": lambda: pair("post", MLP(96, "gelu"), Norm(), None),
    # Whose sources do not fit the pages of texts.
    "narrow": lambda: pair("post", MLP(96, "gelu"), Norm(), None, 2),
    "t5": lambda: pair("pre", MLP(96, "relu", bias=False), RMS, T5Bias(4, causal=True)),
}


def made(name: str) -> Model:
    torch.manual_seed(0)
    return stir({**DECODERS, **PAIRS}[name]()).float()


def error(y: Tensor, want: Tensor) -> float:
    assert y.shape == want.shape and y.isfinite().all()
    return ((y - want).norm() / want.norm()).item()


def story(model: Model, name: str, **layout: Any) -> Tensor:
    """A ragged prompt, then steps between which rows trade places, go and come: all logits, one after the other."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (4, 40), generator=g)
    more: dict[str, object] = {}
    lengths = torch.tensor([5, 5, 3, 3])
    if name in PAIRS:
        more = {"source": torch.randint(VOCAB, (4, 7), generator=g), "source_lengths": [7, 2, 5, 7]}
    cache: Cache = model.cache(4, **(layout or {"capacity": 8}))
    out = [model.next_logits(ids[:, :5], lengths, cache=cache, **more)]
    for step, rows in enumerate(
        [None, [1, 0, 3, 2], [0, 0, 2, 2], None, [1, 1, 3, 2], [2, 3, 0], None]
    ):
        if rows is not None:
            cache = cache.take(torch.tensor(rows))
        out.append(model.next_logits(ids[: cache.batch, 10 + step : 11 + step], cache=cache))
    return torch.cat(out)


@pytest.mark.parametrize("name", [*DECODERS, *PAIRS])
@precisions
@torch.inference_mode()
def test_lean_blocks_give_the_models_logits(name: str, precision: str) -> None:
    model = made(name)
    lean = prepare(model, precision)
    assert any(isinstance(m, NativeAttention) for m in lean.modules())
    assert error(story(lean, name), story(model, name)) < BOUND[precision]


@pytest.mark.parametrize("name", [*DECODERS, *PAIRS])
@torch.inference_mode()
def test_padding_is_not_multiplied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lean, call, rows = prepare(made(name), "fp32"), NativeLinear.__call__, []

    def counted(layer: NativeLinear, x: Tensor, *more: Any) -> Tensor:
        rows.append(x.numel() // layer.k)
        return call(layer, x, *more)

    monkeypatch.setattr(NativeLinear, "__call__", counted)
    g = torch.Generator().manual_seed(1)
    ids, lengths = torch.randint(VOCAB, (4, 9), generator=g), [9, 2, 5, 7]
    if name in PAIRS:
        both, _ = lean.encode(ids, lengths)
        alone = [lean.encode(ids[i : i + 1, :n])[0] for i, n in enumerate(lengths)]
    else:
        both = lean.hidden(ids, lengths)
        alone = [lean.hidden(ids[i : i + 1, :n]) for i, n in enumerate(lengths)]
    assert max(rows) == sum(lengths)
    for i, (n, own) in enumerate(zip(lengths, alone, strict=True)):
        torch.testing.assert_close(both[i, :n], own[0], rtol=1e-5, atol=1e-5)


@precisions
@pytest.mark.parametrize("banned", [(), (3, 17)])
@torch.inference_mode()
def test_beams_need_the_best_logits_alone(
    banned: tuple[int, ...], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a head writes all of them or finds the best at once; settings that need all of them have them."""
    lean, g = prepare(made("marian"), precision), torch.Generator().manual_seed(3)
    sources = [torch.randint(VOCAB, (n,), generator=g).tolist() for n in (6, 2, 9)]
    how: dict[str, Any] = dict(beams=3, max_new_tokens=12, eos=(5,), banned=banned)
    called, best = [], NativeLinear.best
    monkeypatch.setattr(NativeLinear, "best", lambda *a: called.append(a) or best(*a))
    found = regard.generate(lean, sources, **how)
    assert len(called) >= 11
    monkeypatch.setattr(NativeLinear, "best", lambda self, x, *how: lse_and_topk(self(x), *how))
    for a, b in zip(found, regard.generate(lean, sources, **how), strict=True):
        assert a.ids == b.ids and a.score == pytest.approx(b.score, rel=1e-5)
    called.clear()
    regard.generate(lean, sources, **how, repetition_penalty=1.2)
    assert not called


@precisions
@pytest.mark.parametrize("name", [*DECODERS, *PAIRS])
@torch.inference_mode()
def test_lean_blocks_read_pages_where_they_lie(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of rows, to the bit, and no step gathers the keys of a row."""
    lean = prepare(made(name), precision)
    want = story(lean, name)
    steps, read = [], Paged._read
    monkeypatch.setattr(Paged, "_read", lambda *args: steps.append(args) or read(*args))
    assert torch.equal(story(lean, name, layout="paged", pages=40, page=4), want)
    # Of the prompt, by each layer, and of the source where it lies in pages.
    assert len(steps) == (4 if name in PAIRS and name != "narrow" else 2)


def steps_of(model: Model, name: str, layout: dict[str, Any]) -> Tensor:
    """Steps over memory that stays, of rows that trade places in the middle and become fewer at the end."""
    g = torch.Generator().manual_seed(2)
    ids, more = torch.randint(VOCAB, (4, 24), generator=g), dict[str, Any]()
    if name in PAIRS:
        more = {"source": torch.randint(VOCAB, (4, 7), generator=g), "source_lengths": [7, 2, 5, 7]}
    cache: Cache = model.cache(4, **layout)
    out = [model.next_logits(ids[:, :5], torch.tensor([5, 5, 3, 3]), cache=cache, **more)]
    for i in range(16):
        rows = {6: [1, 0, 3, 2], 7: [0, 0, 2, 3], 8: [1, 1, 2, 2], 9: [1, 0, 2, 2], 12: [2, 3, 0]}
        if i in rows:
            cache = cache.take(torch.tensor(rows[i]))
        out.append(model.next_logits(ids[: cache.batch, 5 + i : 6 + i], cache=cache))
    return torch.cat(out)


@pytest.mark.parametrize("layout", [{"capacity": 64}, {"layout": "paged", "pages": 60, "page": 4}])
@pytest.mark.parametrize("name", [*DECODERS, *PAIRS])
@torch.inference_mode()
def test_steps_that_are_played_are_those_that_are_made(
    name: str, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; and so that this says something, steps are played where the blocks are C code alone."""
    lean, played, play = prepare(made(name), "fp32"), [], Step.play
    monkeypatch.setattr(Step, "play", lambda *args: played.append(args) or play(*args))
    got = steps_of(lean, name, layout)
    tower = lean.decoder if name in PAIRS else lean.tower
    assert isinstance(tower, NativeStack) == (name not in ("gemma", "olmo", "wide", "t5"))
    assert len(played) > 2 if isinstance(tower, NativeStack) else not played
    monkeypatch.setattr(NativeStack, "key", lambda *_: None)
    count = len(played)
    assert torch.equal(steps_of(lean, name, layout), got) and len(played) == count


@torch.inference_mode()
def test_steps_over_other_sources_in_pages_are_played_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recorded step is told where another source lies, how long it is, and to whom it belongs."""
    lean, recorded, make = prepare(made("marian"), "fp32"), [], Step.__init__
    monkeypatch.setattr(Step, "__init__", lambda *args: recorded.append(args) or make(*args))
    pool, out = lean.cache(1, layout="paged", pages=90, page=4).pool, []
    for key in (NativeStack.key, lambda *_: None):
        monkeypatch.setattr(NativeStack, "key", key)
        for seed, n in enumerate((7, 3, 12)):
            g = torch.Generator().manual_seed(seed)
            source, ids = (torch.randint(VOCAB, (2, k), generator=g) for k in (n, 5))
            where = {"dtype": torch.float32, "pool": pool}
            cache: Cache = Paged(lean.cache_specs(), 2, **where)
            more = {"source": source, "source_lengths": [n, n - 2]}
            out.append(lean.next_logits(ids, cache=cache, **more).repeat_interleave(3, 0))
            cache = cache.spread(3, shared=True)
            out += [lean.next_logits(ids[:, :1].repeat(3, 1), cache=cache) for _ in range(6)]
            cache.release()
    assert torch.equal(torch.stack(out[: len(out) // 2]), torch.stack(out[len(out) // 2 :]))
    assert len(recorded) == 1 and not any(pool.users)


@torch.inference_mode()
def test_recorded_steps_are_not_played_over_a_larger_pool_in_their_place() -> None:
    """Memory that is given back may come again as a pool of more pages."""
    lean = prepare(made("llama"), "fp32")
    g, specs = torch.Generator().manual_seed(5), lean.cache_specs()
    ids = torch.randint(VOCAB, (2, 12), generator=g)
    large, small = Pool(specs, 60, 4), Pool(specs, 10, 4)
    small.stores = [{name: x[:12] for name, x in store.items()} for store in large.stores]
    # What rows are given of the large one lies behind the small one.
    for _ in range(20):
        large.take()
    out = []
    for pool in (small, large):
        cache = Paged(specs, 2, pool=pool, dtype=torch.float32)
        out.append(lean.next_logits(ids[:, :4], cache=cache))
        out += [lean.next_logits(ids[:, i : i + 1], cache=cache) for i in range(4, 12)]
        cache.release()
    assert torch.equal(torch.stack(out[:9]), torch.stack(out[9:]))


def test_steps_of_several_threads_keep_apart() -> None:
    lean = prepare(made("llama"), "fp32")
    want = steps_of(lean, "llama", {"capacity": 64})
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda _: steps_of(lean, "llama", {"capacity": 64}), range(9))
    assert all(torch.equal(each, want) for each in found)


@pytest.mark.parametrize("how", [{}, {"pages": 60, "page": 4}])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma"])
def test_requests_that_come_and_go_have_their_solo_answers(name: str, how: dict[str, int]) -> None:
    """Rows join, leave and make room for others: recorded steps are found again, or not, as the memory says."""
    lean, g = prepare(made(name), "fp32"), torch.Generator().manual_seed(3)
    asked = [
        Request(
            torch.randint(VOCAB, (2 + i % 4,), generator=g).tolist(),
            Settings(max_new_tokens=4 + 5 * (i % 3), eos=()),
        )
        for i in range(9)
    ]
    engine, got = Engine(lean, rows=4, **how), dict[int, list[int]]()
    for i, request in enumerate(asked):
        engine.submit(request)
        for event in engine.step() if i % 2 else []:
            if event.done is not None:
                got[event.request] = event.done[0].ids
    got |= {e.request: e.done[0].ids for e in engine.run() if e.done is not None}
    alone = [
        regard.generate(lean, [r.ids], max_new_tokens=r.settings.max_new_tokens, eos=())[0].ids
        for r in asked
    ]
    assert [got[number] for number in sorted(got)] == alone


@pytest.mark.parametrize("name", ["llama", *PAIRS])
def test_lean_beams_are_the_models_beams(name: str) -> None:
    model = made(name)
    prompts = [[5, 9, 2, 7], [3, 3], [8, 1, 4]]
    asked = dict(beams=4, max_new_tokens=12, eos=(7,), n_best=2)
    want = regard.generate(model, prompts, **asked)  # type: ignore[arg-type]
    got = regard.generate(prepare(model, "fp32"), prompts, **asked)  # type: ignore[arg-type]
    assert [r.ids for r in got] == [r.ids for r in want]
    assert [r.score for r in got] == pytest.approx([r.score for r in want], abs=1e-4)


def test_rows_that_trade_places_keep_their_memory() -> None:
    lean = prepare(made("llama"), "fp32")
    cache = lean.cache(3)
    with torch.inference_mode():
        lean(torch.randint(VOCAB, (3, 4)), cache=cache)
        memory = [x.data_ptr() for store in cache.slots for x in store.values()]  # type: ignore[attr-defined]
        rows, new = torch.tensor([2, 2, 0]), torch.tensor([[1], [2], [3]])
        want = lean(new, cache=cache.fork(rows))
        moved = cache.take(rows)
        assert torch.equal(lean(new, cache=moved), want)
    assert isinstance(moved, Contiguous)
    assert [x.data_ptr() for store in moved.slots for x in store.values()] == memory
