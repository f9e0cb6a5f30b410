"""The runner `graph` off the GPU: its steps give the tokens of the runner `torch`, in any slots, and the plain model's
logits; tests/gpu/test_graphs.py holds graphs and kernels to the same."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import regard
from regard.decode.engine import Engine
from regard.decode.settings import Request, Result, Settings
from regard.errors import UsageError
from regard.kernels.triton import prompt as gpu_prompt
from regard.kernels.triton import sample as gpu_sample
from regard.models import Tokens, TransformerConfig
from tests.kernels.plain import BOUND, FEW, answer, largest_gap, served, ties

ROPE = regard.Rope()
ODD = regard.Rope(layout="interleaved", partial=0.5)
MECHANISMS = {
    "gqa": regard.GQA(8, 2, 32, rope=ROPE),
    "qk_norm": regard.GQA(4, 2, 32, rope=ROPE, qk_norm=1e-6),
    "window": regard.GQA(4, 4, 32, rope=ROPE, window=9, bias=True),
    "interleaved": regard.GQA(4, 2, 32, rope=ODD),
    "mla": regard.MLA(4, 64, 32, 16, rope=ROPE),
    "mla_query": regard.MLA(4, 64, 32, 16, 24, 48, rope=regard.Rope(layout="interleaved")),
}


PLAIN, WIDE = regard.GQA(4, 2, 32, rope=ROPE), regard.Rope(wide=True)
RMS, GEMMA = regard.Norm(1e-5, rms=True), regard.Norm(1e-5, rms=True, plus_one=True)
SHARED = {"shared": 1, "shared_gated": True}
# Towers of other forms: their attention, and what else differs.
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (PLAIN, {"ffn": regard.MoE(8, 2, 64)}),
    "qwen3_moe": (MECHANISMS["qk_norm"], {"ffn": regard.MoE(16, 4, 32, normalized=False)}),
    "gpt_oss": (
        regard.GQA(4, 2, 32, rope=ROPE, bias=True, out_bias=True, sinks=True, window=9),
        {"ffn": regard.MoE(8, 2, 64, "quick_gelu", bias=True, limit=7.0)},
    ),
    "deepseek_moe": (
        MECHANISMS["mla"],
        {
            "ffn": regard.MoE(
                8,
                3,
                32,
                shared=1,
                score="sigmoid",
                groups=4,
                active_groups=2,
                corrected=True,
                gain=2.5,
            )
        },
    ),
    "gated": (
        regard.GQA(4, 2, 32, rope=ODD, qk_norm=1e-6, qk_norm_plus_one=True, gated=True),
        {"norm": GEMMA, "ffn": regard.MoE(8, 2, 64, **SHARED)},
    ),
    "gemma3": (
        regard.GQA(4, 2, 32, rope=ROPE, qk_norm=1e-6, qk_norm_plus_one=True, window=20),
        {"norm": GEMMA, "order": "sandwich"},
    ),
    "gemma2": (regard.GQA(4, 2, 32, rope=ROPE, softcap=5.0), {"norm": GEMMA, "order": "sandwich"}),
    "olmo2": (
        regard.GQA(4, 2, 32, rope=WIDE, qk_norm=1e-6, qk_norm_whole=True),
        {"order": "inner"},
    ),
    "neox": (
        regard.GQA(4, 4, 32, rope=regard.Rope(partial=0.25), bias=True),
        {"norm": regard.Norm(), "order": "parallel", "ffn": regard.MLP(256, "gelu")},
    ),
    "parallel_rms": (PLAIN, {"order": "parallel"}),
    "parallel_experts": (PLAIN, {"order": "parallel", "ffn": regard.MoE(4, 2, 64)}),
    "post": (PLAIN, {"norm": regard.Norm(), "order": "post", "final_norm": False}),
    "post_experts": (PLAIN, {"order": "post", "ffn": regard.MoE(4, 2, 64), "final_norm": False}),
    "sandwich_layernorm": (PLAIN, {"norm": regard.Norm(biased=False), "order": "sandwich"}),
    "other_activations": (
        PLAIN,
        {"ffn": (regard.MLP(64, "tanh"), regard.MLP(64, "quick_gelu", gated=True))},
    ),
    "value_dim": (regard.GQA(4, 2, 32, value_dim=24, rope=ROPE), {}),
}


def build(name: str, tied: bool = True) -> regard.Model:
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"layers": 2, "dim": 64, "heads": 4, "ffn_dim": 128, "vocab": 97, "max_len": 96}
        model = regard.build("gpt2", **sizes)
    else:
        ffn, norm = regard.MLP(256, "silu", gated=True, bias=False), regard.Norm(1e-5, rms=True)
        attention, more = FORMS.get(name) or (MECHANISMS[name], {})
        more = {"ffn": ffn, "norm": norm} | more
        tower = regard.Tower(128, 2, attention, **more)
        head = regard.LM(tied=tied and name != "qk_norm")
        model = TransformerConfig(Tokens(97), tower, head, max_len=96).make()
    with torch.no_grad():
        for p in model.parameters():
            # So that answers differ, and that no norm, bias or sink is one that does nothing.
            p.mul_(3) if p.dim() > 1 else p.add_(0.2 * torch.randn_like(p))
    return model.eval()


def requests(count: int = 9, **settings: object) -> list[Request]:
    g = torch.Generator().manual_seed(1)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    return [
        Request(
            torch.randint(0, 97, (number(1, 40),), generator=g).tolist(),
            Settings(max_new_tokens=number(1, 40), **settings),  # type: ignore[arg-type]
        )
        for _ in range(count)
    ]


def same(found: list[Result], wanted: list[Result]) -> None:
    assert [(r.ids, r.finish, r.error) for r in found] == [
        (r.ids, r.finish, r.error) for r in wanted
    ]
    for a, b in zip(found, wanted, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert a.score == pytest.approx(b.score, abs=1e-3)


def by_torch(model: regard.Model, asked: list[Request], **options: Any) -> list[Result]:
    return served(Engine(model, runner="torch", rows=4, **options), asked)


@pytest.mark.parametrize("name", [*MECHANISMS, *FORMS, "gpt2"])
@pytest.mark.parametrize("settings", [{}, {"eos": (5, 7, 11, 20)}], ids=["length", "eos"])
def test_graphs_give_the_engine_tokens(name: str, settings: dict) -> None:
    model, asked = build(name), requests(**settings)
    want = by_torch(model, asked)
    same(answer(model, asked, 3), want)
    same(answer(model, asked, 7), want)  # more rows: sums are left to the norms
    same(answer(model, asked, 16, chunk=24, page=8), want)  # prompts in several chunks
    same(answer(model, asked, 4, pages=12, page=8, prefix=False), want)  # rows are put back


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("name", [*MECHANISMS, *FORMS, "gpt2"])
def test_graphs_give_the_logits_of_the_plain_model(name: str, rows: int) -> None:
    engine = Engine(build(name), runner="graph", rows=rows)
    assert largest_gap(engine, [r.ids for r in requests(rows)], 6) < BOUND


DRAWN = [{"top_k": 20, "top_p": 0.8, "seed": 3}, {"min_p": 0.05}, {}]
OTHERS = [
    {"typical_p": 0.7, "temperature": 0.9},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"presence_penalty": 0.5, "temperature": 1.0},
    {"logit_bias": ((3, 5.0), (9, -4.0)), "banned": (1, 2)},
    {"min_new_tokens": 1, "eos": (5, 7, 11, 20, 33, 34)},
    {"forced_first": 8, "forced_last": 13, "eos": (13,)},
    {"temperature": 1.2, "samples": 3, "top_p": 0.9},
]


@pytest.mark.parametrize("settings", DRAWN)
def test_graphs_draw_as_the_engine_draws(settings: dict) -> None:
    model, asked = build("gqa"), requests(temperature=1.1, **settings)
    answers = answer(model, asked, 4)
    same(answers, by_torch(model, asked))
    assert ties(model, asked, answers) <= FEW


@pytest.mark.parametrize("settings", OTHERS)
def test_every_setting_is_the_same_in_slots(settings: dict) -> None:
    model, asked = build("gqa"), [*requests(**settings), *requests(3)]
    same(answer(model, asked, 4), by_torch(model, asked))


def test_samples_read_their_prompt_once_and_part_after_it() -> None:
    model = build("gqa")
    asked = [
        Request([5] * n, Settings(max_new_tokens=9, samples=3, temperature=1.0))
        for n in (7, 16, 33)
    ]
    found = {}
    for runner in ("graph", "torch"):
        engine = Engine(model, runner=runner, rows=8, prefix=False)
        for i, r in enumerate(asked):
            engine.submit(replace(r, key=i))
        done = [e for e in engine.run() if e.done is not None]
        found[runner] = sorted((e.request, [r.ids for r in e.done or ()]) for e in done)
        assert engine.pool is not None and engine.pool.available == len(engine.pool.users)
    assert found["graph"] == found["torch"]


def test_texts_that_begin_alike_are_read_once_in_slots() -> None:
    """Arriving together, and as the next turn of a chat: pages of answers are found too."""
    model, fed = build("gqa"), []
    engine = Engine(model, runner="graph", rows=8, page=8)
    assert engine.slots is not None
    read = engine.slots.runner.read

    def counted(pack: Any, used: Any) -> None:
        fed.append(int(pack.totals.sum() - pack.starts.sum()) if len(pack.totals) == 1 else -1)
        read(pack, used)

    engine.slots.runner.read = counted  # type: ignore[method-assign]
    shared = [(i * 7) % 97 for i in range(40)]
    first = served(engine, [Request([*shared, 3], Settings(max_new_tokens=20))])[0]
    later = [*shared, 3, *first.ids, 9]
    again = served(engine, [Request(later, Settings(max_new_tokens=4))])[0]
    assert fed == [41, len(later) - 56]
    want = by_torch(model, [Request(later, Settings(max_new_tokens=4))], prefix=False)[0]
    assert again.ids == want.ids
    four = [Request([*shared, i, 50], Settings(max_new_tokens=4)) for i in range(4)]
    same(served(engine, four), by_torch(model, four, prefix=False))
    assert engine.pool is not None and engine.pool.available == len(engine.pool.users)


@pytest.mark.parametrize("settings", [{}, *({"temperature": 1.1} | s for s in DRAWN)])
def test_decoder_that_is_a_little_wrong_is_noticed(settings: dict) -> None:
    model, asked = build("gqa"), requests(**settings)
    engine = Engine(model, runner="graph", rows=4)
    answers = served(engine, asked)
    assert ties(model, asked, answers) <= FEW
    assert engine.slots is not None
    for block in engine.slots.runner.fast.tower.blocks:
        block.attention.scale *= 1.01
    assert largest_gap(engine, [r.ids for r in asked[:4]], 6) > 10 * BOUND
    answers[3].ids[0] = (answers[3].ids[0] + 48) % 97
    with pytest.raises(AssertionError, match="request 3: token 0"):
        ties(model, asked, answers)


def test_what_has_no_graph_says_why() -> None:
    for model, words in (
        (regard.build("t5-small", layers=1), "not one tower on tokens"),
        (regard.Probe().on(build("gqa")), "a probe watches it"),
        (regard.prepare(build("gqa"), "bf16"), "prepared in bf16"),
    ):
        with pytest.raises(UsageError, match=f"no CUDA graph: .*{words}"):
            Engine(model, runner="graph")
        assert f"runner {'native' if 'bf16' in words else 'torch'}: no" in Engine(model).explain()
    model = build("gqa")
    assert "it is on cpu, not on a GPU" in Engine(model).explain()
    told = Engine(model, runner="graph", rows=5).explain()
    assert "8 slots over 1,024 pages of 16 tokens" in told and "SlotAttention" in told


def test_joined_weights_are_held_once_and_still_learn() -> None:
    model = build("gqa")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = Engine(model, runner="graph")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    attention = model.tower.blocks[0].attention
    assert engine.slots is not None
    product = engine.slots.runner.fast.tower.blocks[0].attention.first
    assert product.weight.data_ptr() == attention.wq.weight.data_ptr()
    again = Engine(model, runner="graph").slots
    assert again is not None
    assert (
        again.runner.fast.tower.blocks[0].attention.first.weight.data_ptr()
        == product.weight.data_ptr()
    )
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    with torch.no_grad():
        attention.wk.weight.add_(1.0)
    # What changes in place is seen.
    assert torch.equal(product.weight[attention.wq.out_features :][:1], attention.wk.weight[:1])


@pytest.mark.parametrize("k", range(1, 12, 2))
def test_fault_in_a_step_costs_no_other_answer_and_no_page(k: int) -> None:
    model, asked = build("gqa"), requests(7)
    want = by_torch(model, asked)
    engine = Engine(model, runner="graph", rows=3, prefix=False)
    assert engine.slots is not None and engine.pool is not None
    runner, calls = engine.slots.runner, 0
    hidden = runner.hidden

    def faulty(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % (7 + k) == 0:
            raise RuntimeError("out of memory")
        return hidden(*args)

    runner.hidden = faulty  # type: ignore[method-assign]
    runner.look = 3
    numbers = [engine.submit(replace(r, number=-1, key=i)) for i, r in enumerate(asked)]
    done: dict[int, Result] = {}
    for _ in range(2000):
        if engine.idle:
            break
        try:
            for event in engine.step():
                if event.done is not None:
                    done[event.request] = event.done[0]
        except RuntimeError:
            continue
    assert [done[n].ids for n in numbers] == [r.ids for r in want]
    assert engine.pool.available == len(engine.pool.users)


def test_cancelled_rows_and_deadlines_free_their_slots() -> None:
    engine = Engine(build("gqa"), runner="graph", rows=2)
    first = engine.submit(Request([1, 2, 3], Settings(max_new_tokens=60)))
    late = engine.submit(Request([4, 5], Settings(max_new_tokens=60), deadline=0.0))
    others = [engine.submit(Request([7, i], Settings(max_new_tokens=3))) for i in range(3)]
    events = [*engine.step(), *engine.step(), *engine.cancel(first), *engine.run()]
    done = {e.request: e.done[0] for e in events if e.done is not None}
    assert done[first].finish == "cancelled" and 0 < len(done[first].ids) < 60
    assert done[late].finish == "deadline"
    assert all(done[n].finish == "length" for n in others)
    assert engine.pool is not None and engine.pool.available == len(engine.pool.users)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["gqa", "window", "mla_query", "gpt2"])
def test_every_finished_answer_is_its_solo_answer(name: str, seed: int) -> None:
    """Random settings, arrivals, cancels, chunks and small pools, in float64: whoever else is there changes nothing."""
    g, model = random.Random(seed), build(name).double()
    shared = [g.randrange(97) for _ in range(24)]

    def one() -> Request:
        start = shared[: g.choice((0, 0, 7, 24))]
        ids = [*start, *(g.randrange(97) for _ in range(g.randint(1, 30)))]
        given: dict[str, Any] = {"max_new_tokens": g.randint(1, 30), "seed": g.randrange(9)}
        if g.random() < 0.5:
            given |= {"temperature": g.choice((0.7, 1.3)), "top_p": g.choice((1.0, 0.8))}
            given |= {"top_k": g.choice((0, 9)), "samples": g.choice((1, 1, 3))}
        if g.random() < 0.3:
            given |= {"repetition_penalty": 1.2, "banned": (3, 4), "logit_bias": ((8, 2.0),)}
        if g.random() < 0.4:
            given |= {"eos": (5, 7, 11, 20), "min_new_tokens": g.randint(0, 1)}
        return Request(ids, Settings(**given), key=g.randrange(100))

    asked = [one() for _ in range(18)]
    options = {"chunk": g.choice((8, 40, 999)), "page": g.choice((4, 8)), "pages": 48}
    engine = Engine(model, runner="graph", rows=g.randint(3, 9), **options)
    assert engine.slots is not None and engine.pool is not None
    engine.slots.runner.look = g.choice((1, 3, 16))
    numbers: dict[int, Request] = {}
    found: dict[int, list[Result]] = {}
    waiting, cancelled = list(asked), set()
    while waiting or not engine.idle:
        for _ in range(g.randint(0, 5) if waiting else 0):
            if waiting:
                r = waiting.pop()
                numbers[engine.submit(r)] = r
        events = engine.step()
        if numbers and g.random() < 0.05:
            n = g.choice(list(numbers))
            cancelled.add(n)
            events += engine.cancel(n)
        found |= {e.request: e.done for e in events if e.done is not None}
    assert found.keys() == numbers.keys()
    assert engine.pool.available == len(engine.pool.users)
    assert len(engine.slots.free) == engine.slots.runner.rows
    for n, r in numbers.items():
        solo = Engine(model, runner="torch", layout="contiguous")
        solo.submit(replace(r, number=-1))
        (want,) = [e.done for e in solo.run() if e.done is not None]
        for a, b in zip(found[n], want, strict=True):
            if a.finish == "cancelled":
                assert n in cancelled and a.ids == b.ids[: len(a.ids)]
            else:
                assert (a.ids, a.finish) == (b.ids, b.finish)
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_packs_hold_every_token_once() -> None:
    texts = [[4, 5, 6], [7] * 70, [8]]
    ends = [[(5, 0)], [(0, 0), (1, 0)], [(3, 2)]]
    parts = [
        gpu_prompt.Part(text, 0, range(10 * i, 10 * i + 9), end)
        for i, (text, end) in enumerate(zip(texts, ends, strict=True))
    ]
    sizes = gpu_prompt.sizes_of(parts, 8)
    assert sizes == (128, 4, 96, 0, 12, 4)
    pack = gpu_prompt.Pack.of(gpu_prompt.flat(parts, sizes), sizes)
    assert pack.ids[pack.last].tolist() == [6, 7, 7, 8] and pack.rows.tolist() == [5, 0, 1, 3]
    assert pack.said.tolist() == [0, 0, 0, 2] and pack.lengths.tolist() == [3, 70, 70, 1]
    assert torch.equal(pack.grid.flatten()[pack.back][:74], torch.arange(74))
    assert (pack.row[73:] == 2).all() and (pack.pos[73:] == 0).all() and (pack.ids[73:] == 8).all()
    assert pack.table[1].tolist() == [*range(10, 19), 18, 18, 18]
    for wide in range(1, 5000):
        up = gpu_prompt.up(wide)
        assert wide <= up <= max(wide + 63, wide * 5 // 4)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_graphs_end_a_request_without_numbers_as_the_engine_does(
    name: str, value: float, settings: dict
) -> None:
    """Requests that read a spoilt token, given or drawn; those before, beside and after them in the same slots are as
    ever."""
    model, bad = build(name, tied=False), 96
    with torch.no_grad():
        model.embedding.weight[bad] = value
    clean = [Request([i + 1, i + 2], Settings(max_new_tokens=5, **settings)) for i in range(6)]
    spoilt = [Request([3, bad, 4, 5, 6, 7], Settings(max_new_tokens=6, **settings))]
    spoilt += [Request([3, 4, 5, bad], Settings(max_new_tokens=1, **settings))]
    asked = [*clean[:2], *spoilt, *clean[2:4], *spoilt, *clean[4:]]
    for rows in (1, 3):
        found = answer(model, asked, rows)
        same(found, by_torch(model, asked))
        for r, result in zip(asked, found, strict=True):
            # The last token of a whole answer is written and not read.
            read = [*r.ids, *result.ids][: len(r.ids) + r.settings.max_new_tokens - 1]
            assert result.finish == ("error" if bad in read else "length")
            assert (result.finish == "error") == ("not a number" in str(result.error))
        assert sum(r.finish == "length" for r in found) >= 3


def test_greedy_choice_without_a_greatest_number_is_none() -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[1.0, 3.0, 3.0], [nan, 1.0, 2.0], [-inf] * 3, [inf, 0.0, 1.0], [-inf, -5.0, -inf]]
    assert gpu_sample.best(torch.tensor(rows))[0].tolist() == [1, -1, -1, -1, 1]
