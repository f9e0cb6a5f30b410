"""The runner `graph` off the GPU: its steps give the tokens of the runner `torch`, in any slots, and the plain model's
logits; tests/gpu/test_graphs.py holds graphs and kernels to the same."""

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import regard
from regard.decode import engine as engines
from regard.decode.engine import Engine
from regard.decode.runners import slots, steps
from regard.decode.runners.beams import ROOM
from regard.decode.runners.steps import GraphSteps
from regard.decode.settings import Request, Result, Settings
from regard.errors import UsageError
from regard.fast import cuda
from regard.fast.cuda import parts as cuda_parts
from regard.fast.cuda import prompts as cuda_prompts
from regard.fast.cuda import table as cuda_table
from regard.fast.cuda.record import Recorder
from regard.kernels.triton import attention as gpu_attention
from regard.kernels.triton import experts as gpu_experts
from regard.kernels.triton import measured as gpu_measured
from regard.kernels.triton import sample as gpu_sample
from regard.models import Tokens, TransformerConfig
from regard.position import LongRope
from tests.kernels.plain import BOUND, FEW, answer, largest_gap, served, ties
from tests.wide import crossed, wide

ROPE = regard.Rope()
ODD = regard.Rope(layout="interleaved", partial=0.5)
MECHANISMS = {
    "gqa": regard.GQA(8, 2, 32, rope=ROPE),
    "qk_norm": regard.GQA(4, 2, 32, rope=ROPE, qk_norm=1e-6),
    "window": regard.GQA(4, 4, 32, rope=ROPE, window=9, bias=True),
    "interleaved": regard.GQA(4, 2, 32, rope=ODD),
    "mla": regard.MLA(4, 64, 32, 16, rope=ROPE),
    "mla_query": regard.MLA(4, 64, 32, 16, 24, 48, rope=regard.Rope(layout="interleaved")),
    "dsa": regard.DSA(regard.MLA(4, 64, 32, 16, rope=ROPE), 4, 32, 12, rope_dim=16),
    "dsa_fp8": regard.DSA(
        regard.MLA(4, 64, 32, 16, 24, 48, rope=ROPE), 3, 16, 20, hadamard=True, precision="fp8"
    ),
    "dsa_gqa": regard.DSA(regard.GQA(4, 2, 32, rope=ROPE), 4, 32, 12, rope_dim=16),
}
# Post-norm with sinusoids, with learned positions and a norm on them, pre-norm with T5's bias; and ALiBi.
PAIRS = ["vaswani-base", "bart-base", "t5-small"]


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
    "qwen3_next": (
        (
            regard.DeltaRule(2, 4, 16, 32),
            regard.GQA(4, 2, 32, rope=ODD, qk_norm=1e-6, qk_norm_plus_one=True, gated=True),
        ),
        {"norm": GEMMA, "ffn": regard.MoE(8, 2, 64, **SHARED)},
    ),
    "delta_alone": (regard.DeltaRule(2, 4, 16, 32), {}),
    "longrope": (
        regard.GQA(4, 2, 32, rope=regard.Rope(scaling=LongRope((1.5,) * 16, (4.0,) * 16, 80))),
        {},
    ),
    "value_dim": (regard.GQA(4, 2, 32, value_dim=24, rope=ROPE), {}),
}


def build(name: str, tied: bool = True) -> regard.Model:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 2, "dim": 64, "heads": 4, "ffn_dim": 128, "vocab": 97}
    if name == "t5-small":
        model = regard.build(name, **sizes, head_dim=16)
    elif name in (*PAIRS, "gpt2"):
        model = regard.build(name, **sizes, max_len=96)
    elif name == "alibi":
        tower = regard.Tower(64, 2, regard.GQA(4), regard.MLP(96), relative=regard.Alibi(4))
        model = TransformerConfig(Tokens(97), tower, regard.LM(), max_len=96).make()
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
            if name in PAIRS and p.dim() > 1:
                p.add_(torch.randn_like(p), alpha=0.1)
    # Rounding to 8 bits jumps: sums of another order may choose other keys, but for float64.
    return (model.double() if name == "dsa_fp8" else model).eval()


def asked_of(name: str, request: Request) -> Request:
    """The same words as a source, where the model reads one."""
    if name not in PAIRS:
        return request
    return replace(request, ids=[0, *request.ids[:-9]], source=torch.tensor(request.ids))


def requests(count: int = 9, **settings: object) -> list[Request]:
    g = torch.Generator().manual_seed(1)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    return [
        Request(
            torch.randint(0, 97, (number(1, 40),), generator=g).tolist(),
            Settings(max_new_tokens=number(1, 28), **settings),  # type: ignore[arg-type]
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


def finished(engine: Engine, asked: list[Request]) -> list[list[Result]]:
    """All results of each request, under the keys that they have."""
    numbers = [engine.submit(replace(r, number=-1)) for r in asked]
    done = {e.request: e.done for e in engine.run() if e.done is not None}
    return [done[n] for n in numbers]


@pytest.mark.parametrize(
    "name",
    wide(
        [*MECHANISMS, "gpt2", "alibi", *PAIRS],
        keep=["gqa", "window", "dsa_fp8", "gpt2", "t5-small"],
    ),
)
def test_graphs_give_the_engine_tokens(name: str) -> None:
    """Some answers end by their length, some by a token, side by side."""
    ended = requests(eos=(5, 7, 11, 20))
    asked = [asked_of(name, r) for r in [*requests()[::2], *ended[1::2]]]
    model = build(name)
    if "dsa" in name:
        # Rounding a score may choose another key, and that is no small change.
        model = model.double()
    want = by_torch(model, asked)
    same(answer(model, asked, 3), want)
    # More rows, whose sums are left to the norms; prompts in several chunks.
    same(answer(model, asked, 7, chunk=24, page=8), want)
    # Rows are put back.
    same(answer(model, asked, 4, pages=17 if name in PAIRS else 12, page=8, prefix=False), want)


def test_rounds_reach_as_far_as_every_row_that_runs_in_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row that is through goes on until the host has read it: kernels read as far as its position."""
    monkeypatch.setattr(slots, "SHORTEST", 8)
    asked = [
        replace(r, ids=r.ids[:1] * n, settings=replace(r.settings, max_new_tokens=new))
        for r, (n, new) in zip(requests(), [(3, 24), (60, 2), (30, 5), (62, 1)], strict=False)
    ]
    engine = Engine(build("gqa"), runner="graph", rows=4)
    runner, ends = engine.graph.steps, list[tuple[int, int]]()  # type: ignore[union-attr]
    run = runner.run

    def watched(steps: int, width: int, bound: int, *more: Any) -> Any:
        found = run(steps, width, bound, *more)
        ends.append((int(runner.state.pos[:width].max()), bound))
        return found

    monkeypatch.setattr(runner, "run", watched)
    served(engine, asked)
    assert ends and all(end <= bound for end, bound in ends), ends


@pytest.mark.parametrize(
    "name", wide(FORMS, keep=["gpt_oss", "deepseek_moe", "gemma2", "qwen3_next"])
)
def test_every_form_gives_the_engine_tokens(name: str) -> None:
    """Few rows and many, whole prompts and chunks, in float64: to the token."""
    model, asked = build(name).double(), requests(4, eos=(5, 7, 11, 20))
    want = by_torch(model, asked)
    same(answer(model, asked, 3), want)
    same(answer(model, asked, 5, chunk=24, page=8), want)


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize(
    "name",
    wide(
        [*MECHANISMS, *FORMS, "gpt2"],
        keep=["gqa", "mla", "dsa_gqa", "gpt_oss", "qwen3_next", "gpt2"],
    ),
)
def test_graphs_give_the_logits_of_the_plain_model(name: str, rows: int) -> None:
    engine = Engine(build(name), runner="graph", rows=rows)
    assert largest_gap(engine, [r.ids for r in requests(rows)], 6) < BOUND


DRAWN = [{"top_k": 20, "top_p": 0.8, "seed": 3}, {"min_p": 0.05}, {}]
OTHERS = [
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


@pytest.mark.parametrize("name", ["gqa", "qwen3_next"])
def test_samples_read_their_prompt_once_and_part_after_it(name: str) -> None:
    model = build(name)
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
    assert engine.graph is not None
    read = engine.graph.steps.read

    def counted(pack: Any, used: Any) -> None:
        fed.append(int(pack.totals.sum() - pack.starts.sum()) if len(pack.totals) == 1 else -1)
        read(pack, used)

    engine.graph.steps.read = counted  # type: ignore[method-assign]
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
    assert engine.graph is not None
    for block in engine.graph.steps.fast.tower.blocks:
        block.attention.scale *= 1.01
    assert largest_gap(engine, [r.ids for r in asked[:4]], 6) > 10 * BOUND
    answers[3].ids[0] = (answers[3].ids[0] + 48) % 97
    with pytest.raises(AssertionError, match="request 3: token 0"):
        ties(model, asked, answers)


def test_what_has_no_graph_says_why() -> None:
    for model, words in (
        (regard.build("gru-lm", dim=8, vocab=9), "not a tower that writes tokens"),
        (regard.Probe().on(build("gqa")), "a probe watches it"),
        (regard.prepare(build("gqa"), "int8"), "prepared in int8"),
    ):
        with pytest.raises(UsageError, match=f"no CUDA graph: .*{words}"):
            Engine(model, runner="graph")
        assert f"runner {'native' if 'int8' in words else 'torch'}: no" in Engine(model).explain()
    model = build("gqa")
    assert "it is on cpu, not on a GPU" in Engine(model).explain()
    told = Engine(model, runner="graph", rows=5).explain()
    assert "8 slots over 1,024 pages of 16 tokens" in told and "GraphAttention" in told


def test_states_are_inside_the_memory() -> None:
    model = build("qwen3_next")
    engine = Engine(model, runner="graph", rows=6, memory=2**18)
    assert engine.graph is not None and engine.pool is not None
    states = [x for layer in engine.graph.steps.pages.states for x in layer.values()]
    size = sum(x.nbytes for x in states)
    page = 16 * sum(spec.numbers() for spec in model.cache_specs()) * 4
    assert {len(x) for x in states} == {8} and size > 2**16
    assert "beam search, guesses" in engine.explain() and "pages hold no state" in engine.explain()
    assert len(engine.pool.users) == (2**18 - size) // page < 6 * 96 // 16
    with pytest.raises(UsageError, match="hold no page"):
        Engine(model, runner="graph", rows=64, memory=2**18)


def test_states_alone_have_two_pages_for_each_row() -> None:
    told = Engine(build("delta_alone"), runner="graph", rows=3).explain()
    assert "4 slots over 6 pages of 96 tokens, 0.00 GiB" in told


def test_parts_without_a_kernel_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cuda_parts, cuda_table):
        monkeypatch.setattr(module, "ready", lambda x: True)
    monkeypatch.setattr(gpu_attention, "ready", lambda x: True)
    monkeypatch.setattr(gpu_experts, "ready", lambda x: True)
    for name, words in (
        ("value_dim", "GraphAttention, by torch's operations: heads of 32 and 24 features"),
        ("qwen3_next", "GraphDelta, by torch's operations: its state has no kernel"),
        ("deepseek_moe", "GraphExperts, by torch's operations: its router"),
    ):
        assert words in cuda.decoder(build(name)).explain()
    assert "by torch" not in cuda.decoder(build("gpt_oss")).explain()


def test_joined_weights_are_held_once_and_still_learn() -> None:
    model = build("gqa")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = Engine(model, runner="graph")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    attention = model.tower.blocks[0].attention
    assert engine.graph is not None
    product = engine.graph.steps.fast.tower.blocks[0].attention.first
    assert product.weight.data_ptr() == attention.wq.weight.data_ptr()
    again = Engine(model, runner="graph").graph
    assert again is not None
    assert (
        again.steps.fast.tower.blocks[0].attention.first.weight.data_ptr()
        == product.weight.data_ptr()
    )
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    with torch.no_grad():
        attention.wk.weight.add_(1.0)
    # What changes in place is seen.
    assert torch.equal(product.weight[attention.wq.out_features :][:1], attention.wk.weight[:1])


@cache
def before_faults(name: str) -> tuple[regard.Model, list[Request], list[Result]]:
    model, found = build(name), [*requests(5), *requests(2, beams=3, eos=(5, 7))]
    asked = [asked_of(name, r) for r in found]
    return model, asked, by_torch(model, asked)


@pytest.mark.parametrize(
    "name, k",
    wide(
        [*(("gqa", k) for k in range(1, 12, 2)), ("t5-small", 1), ("t5-small", 8)],
        keep=[("gqa", 1), ("gqa", 7), ("t5-small", 1)],
    ),
)
def test_interrupted_steps_cost_no_answer_and_no_page(
    name: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked, want = before_faults(name)
    engine = Engine(model, runner="graph", rows=3, prefix=False)
    assert engine.graph is not None and engine.pool is not None
    runner, calls = engine.graph.steps, 0
    hidden = GraphSteps.hidden

    def faulty(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        # Not for ever: a search begins anew after each.
        if calls % (7 + k) == 0 and calls < 150:
            raise KeyboardInterrupt
        return hidden(*args)

    monkeypatch.setattr(GraphSteps, "hidden", faulty)
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
        except KeyboardInterrupt:
            continue
    assert [done[n].ids for n in numbers] == [r.ids for r in want]
    assert engine.pool.available == len(engine.pool.users)


def test_cancelled_beams_give_what_the_host_knew() -> None:
    engine = Engine(build("gqa"), runner="graph", rows=6)
    assert engine.graph is not None and engine.pool is not None
    engine.graph.steps.look = 4
    beams = Settings(max_new_tokens=60, beams=3, n_best=2)
    first, other = (engine.submit(Request([1, 2, i], beams)) for i in (3, 4))
    events = [*engine.step(), *engine.step(), *engine.cancel(first)]
    assert engine.cancel(first) == []
    (done,) = [e.done for e in events if e.done is not None]
    assert [r.finish for r in done] == ["cancelled"] * 2 and [len(r.ids) for r in done] == [4, 4]
    assert done[0].score > done[1].score == pytest.approx(sum(done[1].logprobs) / 4, abs=1e-5)
    early = engine.submit(Request([1, 2, 5], beams))
    assert [e.done[0].finish for e in engine.cancel(early) if e.done] == ["cancelled"]
    (rest,) = [e for e in engine.run() if e.done is not None]
    assert rest.request == other and engine.pool.available == len(engine.pool.users)


def test_beams_that_have_room_keep_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, cleared = Engine(build("gqa"), runner="graph", rows=6), list[int]()
    sizes, clear = (5, ROOM, ROOM + 1, ROOM), Recorder.clear
    for new in sizes:
        with monkeypatch.context() as m:
            m.setattr(Recorder, "clear", lambda self, new=new: [cleared.append(new), clear(self)])
            served(engine, [Request([1, 2, 3], Settings(max_new_tokens=new, beams=3))])
    assert cleared == [ROOM + 1]


def test_beams_that_fill_their_room_wait_for_others() -> None:
    """Texts as long as there is place for, done while the host has not read that and others go on."""
    model = build("gqa").double()
    asked = [Request([1, i], Settings(max_new_tokens=ROOM, beams=2)) for i in range(3)]
    engine = Engine(model, runner="graph", rows=8)
    numbers = []
    for r in asked:
        numbers.append(engine.submit(r))
        engine.step()
    done = {e.request: e.done for e in engine.run() if e.done is not None}
    for n, r in zip(numbers, asked, strict=True):
        same(done[n], by_torch(model, [r]))


BEAMS: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 9, "banned": (7, 8, 2)},
    {"length_penalty": 2.0, "early_stopping": "never"},
    {"length_penalty": -0.5, "min_new_tokens": 5},
    {"early_stopping": "first", "eos": (4,)},
    {"logit_bias": ((6, 3.0),), "repetition_penalty": 1.5},
    {"frequency_penalty": 1.0, "forced_first": 9, "forced_last": 3},
    {"presence_penalty": 0.7, "max_new_tokens": 3},
]


@pytest.mark.parametrize(
    "name",
    wide(["gqa", "mla", "dsa", "qwen3_next", *PAIRS], keep=["gqa", "qwen3_next", "t5-small"]),
)
def test_beams_in_slots_are_the_plain_engines_beams(name: str) -> None:
    """All settings of a shape step together; in many slots with prompts in chunks, in few with few pages."""
    common = {"max_new_tokens": 12, "beams": 3, "n_best": 3, "eos": (3,)}
    model = build(name).double()
    asked = [
        asked_of(name, replace(r, settings=Settings(**common | kind)))
        for r, kind in zip(requests(len(BEAMS)), BEAMS, strict=True)
    ]

    want = finished(Engine(model, runner="torch", layout="contiguous"), asked)
    for options in ({"chunk": 24, "page": 8}, {"rows": 6, "pages": 32, "page": 8}):
        engine = Engine(model, runner="graph", **options)
        for a, b in zip(finished(engine, asked), want, strict=True):
            same(a, b)
        assert engine.pool is not None and engine.pool.available == len(engine.pool.users)


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


@pytest.mark.parametrize(
    "seed, name",
    wide(
        enumerate(["gqa", "window", "mla_query", "gpt2", "alibi", "qwen3_next", *PAIRS]),
        keep=[(0, "gqa"), (5, "qwen3_next"), (8, "t5-small")],
    ),
)
def test_every_finished_answer_is_its_solo_answer(seed: int, name: str) -> None:
    """Random settings, arrivals, cancels, chunks and small pools, in float64: whoever else is there changes nothing.
    Answers are held to the runner `torch`, whose answers to all at once are held to those of every sixth alone (and in
    tests/decode/test_storm.py to all alone)."""
    g, model = random.Random(seed), build(name).double()
    shared = [g.randrange(97) for _ in range(24)]

    def one() -> Request:
        start = shared[: g.choice((0, 0, 7, 24))]
        ids = [*start, *(g.randrange(97) for _ in range(g.randint(1, 30)))]
        given: dict[str, Any] = {"max_new_tokens": g.randint(1, 30), "seed": g.randrange(9)}
        searched = g.random() < 0.4
        if searched:
            given |= {"beams": g.choice((2, 3)), "length_penalty": g.choice((0.5, 1.0))}
            given["n_best"] = 2
            given |= {"early_stopping": g.choice(("heuristic", "never", "first"))}
        elif g.random() < 0.5:
            given |= {"temperature": g.choice((0.7, 1.3)), "top_p": g.choice((1.0, 0.8))}
            given |= {"top_k": g.choice((0, 9)), "samples": g.choice((1, 1, 3))}
        if g.random() < 0.3:
            given |= {"repetition_penalty": 1.2, "banned": (3, 4), "logit_bias": ((8, 2.0),)}
        if g.random() < 0.4:
            given |= {"eos": (5, 7, 11, 20), "min_new_tokens": g.randint(0, 1)}
        return asked_of(name, Request(ids, Settings(**given), key=g.randrange(100)))

    asked = [one() for _ in range(18)]
    options = {"chunk": g.choice((8, 40, 999)), "page": g.choice((4, 8)), "pages": 48}
    engine = Engine(model, runner="graph", rows=g.randint(3, 9), **options)
    assert engine.graph is not None and engine.pool is not None
    engine.graph.steps.look = g.choice((1, 3, 16))
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
    assert all(len(batch.free) == batch.steps.places for batch in engine.graph.batches.values())
    wanted = finished(Engine(model, runner="torch", layout="contiguous"), list(numbers.values()))
    for i, ((n, r), want) in enumerate(zip(numbers.items(), wanted, strict=True)):
        if i % 6 == 0:
            same(finished(Engine(model, runner="torch", layout="contiguous"), [r])[0], want)
        if r.settings.beams > 1 and n in cancelled:
            continue
        for a, b in zip(found[n], want, strict=True):
            if a.finish == "cancelled":
                assert n in cancelled and a.ids == b.ids[: len(a.ids)]
            else:
                assert (a.ids, a.finish) == (b.ids, b.finish)
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_place_of_a_row_is_free_when_its_last_token_is_asked_for() -> None:
    """What waits begins in the next step, not when the host has read the end of the one before it."""
    model = build("gqa")
    asked = [Request([5, 6, 7 + i], Settings(max_new_tokens=4, eos=())) for i in range(3)]
    engine, together = Engine(model, runner="graph", rows=1, pages=9), []
    numbers = [engine.submit(replace(r, number=-1, key=i)) for i, r in enumerate(asked)]
    done = dict[int, Result]()
    while not engine.idle:
        done |= {e.request: e.done[0] for e in engine.step() if e.done is not None}
        together.append([slot.sequence.request.number for slot in engine.graph.batches[None].slots])
    assert together == [[0], [1], [2], []]
    same([done[n] for n in numbers], by_torch(model, asked))
    assert engine.pool is not None and engine.pool.available == len(engine.pool.users)


def test_request_that_is_too_large_ends_and_those_beside_it_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it would begin in the place of one whose end has not been read."""
    model, few = build("gqa"), requests(3)
    large = Request([9] * 40, Settings(max_new_tokens=2, eos=()))
    read = GraphSteps.prefill

    def greedy(self: GraphSteps, parts: Any, *rest: Any) -> Any:
        if any(len(part.tokens) == 40 for part in parts):
            raise torch.OutOfMemoryError
        return read(self, parts, *rest)

    want = by_torch(model, few)
    monkeypatch.setattr(GraphSteps, "prefill", greedy)
    for rows in (1, 2, 4):
        found = answer(model, [few[0], large, *few[1:]], rows)
        same([found[i] for i in (0, 2, 3)], want)
        assert found[1].finish == "error" and "out of memory" in (found[1].error or "")


def test_packs_hold_every_token_once() -> None:
    texts = [[4, 5, 6], [7] * 70, [8]]
    ends = [[(5, 0)], [(0, 0), (1, 0)], [(3, 2)]]
    parts = [
        cuda_prompts.Part(text, 0, range(10 * i, 10 * i + 9), end)
        for i, (text, end) in enumerate(zip(texts, ends, strict=True))
    ]
    sizes = cuda_prompts.sizes_of(parts, 8)
    assert sizes == (128, 4, 96, 0, 12, 4, 0)
    pack = cuda_prompts.Pack.of(cuda_prompts.flat(parts, sizes), sizes)
    assert pack.ids[pack.last].tolist() == [6, 7, 7, 8] and pack.rows.tolist() == [5, 0, 1, 3]
    assert pack.said.tolist() == [0, 0, 0, 2] and pack.lengths.tolist() == [3, 70, 70, 1]
    assert torch.equal(pack.grid.flatten()[pack.back][:74], torch.arange(74))
    assert (pack.row[73:] == 2).all() and (pack.pos[73:] == 0).all() and (pack.ids[73:] == 8).all()
    assert pack.table[1].tolist() == [*range(10, 19), 18, 18, 18]
    assert pack.order.tolist() == [*range(74), *[73] * 54]
    assert pack.ends.tolist() == [0, 3, 73, 74, 74]
    for width in range(1, 5000):
        up = cuda_prompts.round_up(width)
        assert width <= up <= max(width + 63, width * 5 // 4)


@pytest.mark.parametrize(
    "name, value, temperature",
    crossed(["gqa", "mla", "qwen3_next"], [float("nan"), float("inf")], [0.0, 1.0]),
)
def test_graphs_end_a_request_without_numbers_as_the_engine_does(
    name: str, value: float, temperature: float
) -> None:
    """Requests that read a spoilt token, given or drawn; those before, beside and after them in the same slots are as
    ever."""
    model, bad, settings = build(name, tied=False), 96, {"temperature": temperature}
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


def test_faster_form_is_measured_once_and_kept(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    monkeypatch.setattr(gpu_measured, "card", lambda: "a card")
    times = {"ours": 1.0, "torch": 1.0, "another of ours": 2.0}
    tried: list[str] = []

    def seconds(call: Any, weight: Any) -> float:
        tried.append(call(weight))
        return times[call(weight)]

    def fastest(key: str) -> str:
        on_a_gpu: Any = SimpleNamespace(is_cuda=True)
        forms = {name: lambda w, name=name: name for name in times}
        return gpu_measured.fastest(key, on_a_gpu, forms)

    monkeypatch.setattr(gpu_measured, "seconds", seconds)
    gpu_measured.table.cache_clear()
    recording = True
    assert fastest("a") == "ours" and not tried
    recording = False
    # As fast is not faster.
    assert fastest("a") == "ours" and tried == [*times]
    times["torch"] = 0.5
    assert fastest("a") == "ours"
    assert fastest("b") == "torch" and len(tried) == 6
    times["another of ours"] = 0.4
    assert fastest("c") == "another of ours"
    # Another process finds them.
    gpu_measured.table.cache_clear()
    recording = True
    assert [fastest(key) for key in "abc"] == ["ours", "torch", "another of ours"]
    del times["another of ours"]
    # A spoilt file counts as none, a form that is there no more as not measured.
    recording = False
    for text in ("[1, 2", "[1]", '{"a card": 3}', '{"a card": {"b": "neither"}}'):
        (tmp_path / "regard" / "kernels.json").write_text(text)
        gpu_measured.table.cache_clear()
        assert fastest("b") == "torch"
    gpu_measured.table.cache_clear()


def test_what_was_measured_for_a_card_comes_along(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu_measured, "ALONG", tmp_path / "along.json")
    (tmp_path / "along.json").write_text('{"A card": {"a": "ours", "b": "torch"}}')
    (tmp_path / "regard").mkdir()
    (tmp_path / "regard/kernels.json").write_text('{"A card, torch 9, triton 9": {"b": "ours"}}')
    gpu_measured.table.cache_clear()
    # What was measured here counts more.
    assert gpu_measured.table("A card, torch 9, triton 9") == {"a": "ours", "b": "ours"}
    assert gpu_measured.table("Another card, torch 9, triton 9") == {}
    gpu_measured.table.cache_clear()


def test_table_that_comes_along_is_one_of_names() -> None:
    every = json.loads(gpu_measured.ALONG.read_text(encoding="utf-8"))
    for rows in every.values():
        assert rows and set(rows.values()) <= {"ours", "ours, deep", "torch", "hopper"}


def test_rows_of_a_graph_follow_the_memory() -> None:
    model = regard.build("gpt2", layers=1, dim=32, heads=2, vocab=64, max_len=1024)
    for pages, rows in ((4, 64), (127 * 64, 64), (128 * 64, 128), (10**5, 256)):
        engine = Engine(model, runner="graph", pages=pages, page=16)
        assert engine.graph is not None and engine.graph.rows == engine.scheduler.rows == rows
    assert Engine(model, runner="torch", pages=10**5, page=16).scheduler.rows == 64
    assert Engine(model, runner="graph", pages=10**5, page=16, rows=3).scheduler.rows == 3


def test_pages_that_were_kept_are_free_for_the_next_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where steps are kept: another engine has as many rows and pages as the first."""
    model = regard.build("gpt2", layers=1, dim=32, heads=2, vocab=64, max_len=1024)
    token, free = 2 * 32 * 4, 10**8
    monkeypatch.setattr(engines, "free_memory", lambda device: free)
    first = Engine(model, runner="graph", memory=0.9, rows=None)
    assert first.graph is not None and first.pool is not None
    monkeypatch.setitem(steps._kept, model, first.graph.steps)
    rows, pages = first.graph.rows, len(first.pool.users)
    assert (rows, pages) == (256, min(free * 9 // 10 // (16 * token), 256 * 64))
    free -= first.pool.nbytes
    steps._kept[model].owner = lambda: None
    second = Engine(model, runner="graph", memory=0.9)
    assert second.graph is not None and second.pool is not None
    assert second.graph.rows == rows and len(second.pool.users) >= 0.9 * pages
    steps._kept.pop(model, None)


def test_captions_in_slots_are_the_plain_engines() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 2, "dim": 32, "heads": 4, "ffn_dim": 64, "vocab": 97}
    model = regard.build("captioner", **sizes, size=8, patch=4).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    images = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    asked = [
        Request([i], Settings(max_new_tokens=9, beams=1 + i % 2), source=image)
        for i, image in enumerate(images)
    ]
    want = by_torch(model, asked)
    assert len({tuple(r.ids) for r in want}) > 2
    same(answer(model, asked, 4), want)
    same(answer(model, asked, 4, pages=9, page=4), want)
