"""Speculation in the runner `graph`: the tokens of the runner `torch` without guesses, in fewer passes; off where it
does not pay."""

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import regard
from regard.decode.engine import Engine
from regard.decode.runners import steps as steps_module
from regard.decode.runners.guesses import PLAIN, Guesses, Plan
from regard.decode.runners.steps import GraphSteps, marks, steps_of
from regard.decode.settings import Request, Settings
from regard.decode.speculate import Index, Rate
from regard.errors import UsageError
from tests.kernels.plain import answer, served
from tests.kernels.test_gpu_graphs import (
    DRAWN,
    FORMS,
    MECHANISMS,
    OTHERS,
    PAIRS,
    asked_of,
    build,
    by_torch,
    finished,
    requests,
    same,
)
from tests.wide import wide

# What one round brought: guesses of a row, passes, and how many tokens each row said.
Landed = list[tuple[int, int, list[int]]]


@pytest.fixture
def landed(monkeypatch: pytest.MonkeyPatch) -> Landed:
    found, real = Landed(), Guesses.landed

    def seen(self: Guesses, slots: Any, said: list[int], plan: Plan, passes: int) -> None:
        found.append((plan.ahead, passes, said))
        real(self, slots, said, plan, passes)

    monkeypatch.setattr(Guesses, "landed", seen)
    return found


def always(self: Guesses, live: list[Any], width: int, bound: int) -> Plan:
    """Guess whenever somebody asks for it, wherever it pays."""
    draft = max((s.settings.draft for s in live), default=0)
    ahead = draft or max((s.settings.lookup for s in live), default=0)
    masked = any(s.request.mask is not None for s in live)
    return Plan(ahead, bool(draft), 3, 1.5) if ahead and not masked else PLAIN


def repeating(asked: list[Request]) -> list[Request]:
    return [replace(r, ids=(r.ids * 20)[: max(20, len(r.ids))]) for r in asked]


def looked_up(asked: list[Request], every: int = 1) -> list[Request]:
    """The same with lookup, or some of them."""
    return [
        replace(r, settings=replace(r.settings, lookup=0 if i % every else 1 + i % 5))
        for i, r in enumerate(asked)
    ]


FAMILIES = [
    *MECHANISMS,
    *(name for name in FORMS if name not in ("qwen3_next", "delta_alone")),
    "gpt2",
    "alibi",
    *PAIRS,
]


@pytest.mark.parametrize(
    "name",
    wide(
        FAMILIES, keep=["gqa", "window", "mla", "dsa_gqa", "alibi", "gpt_oss", "gpt2", "t5-small"]
    ),
)
def test_lookup_in_slots_changes_no_token(
    name: str, monkeypatch: pytest.MonkeyPatch, landed: Landed
) -> None:
    """Few rows and many, prompts in chunks, few pages, beside rows that do not guess."""
    monkeypatch.setattr(Guesses, "plan", always)
    model, ended = build(name).double(), requests(eos=(5, 7, 11, 20))
    asked = [asked_of(name, r) for r in [*repeating(requests()[::2]), *repeating(ended[1::2])]]
    want = by_torch(model, asked)
    same(answer(model, looked_up(asked), 3), want)
    same(answer(model, looked_up(asked, 2), 7, chunk=24, page=8), want)
    few = {"pages": 17 if name in PAIRS else 12, "page": 8, "prefix": False}
    same(answer(model, looked_up(asked), 4, **few), want)
    assert sum(n for _, passes, said in landed for n in said) > 0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *({"temperature": 1.1} | kind for kind in DRAWN),
        *OTHERS,
        {"top_logprobs": 3, "temperature": 0.7},
        {"top_logprobs": 2},
        {"frequency_penalty": 1.0, "presence_penalty": 0.3, "temperature": 0.4},
        {"exponential_decay_length_penalty": (4, 1.2), "eos": (5, 7)},
        {"encoder_repetition_penalty": 1.3},
    ],
)
def test_lookup_in_slots_judges_every_setting(
    settings: dict, monkeypatch: pytest.MonkeyPatch, landed: Landed
) -> None:
    """Penalties too, which count the tokens of the pass itself."""
    monkeypatch.setattr(Guesses, "plan", always)
    model = build("gqa").double()
    asked = repeating([*requests(5, **settings), *requests(3)])
    want = by_torch(model, asked)
    got = answer(model, looked_up(asked), 4)
    same(got, want)
    for a, b in zip(got, want, strict=True):
        assert len(a.top_logprobs) == len(b.top_logprobs)
        for ours, theirs in zip(a.top_logprobs, b.top_logprobs, strict=True):
            assert [i for i, _ in ours] == [i for i, _ in theirs]
    assert landed


def cyclic(settings: Settings) -> tuple[regard.Model, Request]:
    """A model whose answer to a prompt goes round and round."""
    model = build("gqa").double()
    biases = replace(settings, logit_bias=tuple((i, 40.0) for i in (3, 8)))
    return model, Request([3, 8] * 6, biases)


def test_lookup_saves_passes_where_a_text_repeats(landed: Landed) -> None:
    model, request = cyclic(Settings(max_new_tokens=60))
    want = by_torch(model, [request])
    assert len(set(want[0].ids)) <= 2
    same(answer(model, looked_up([request] * 5)[4:], 1), want)
    said = sum(n for _, _, each in landed for n in each)
    passes = sum(passes for _, passes, _ in landed)
    assert said > 30 and passes < said / 3


def test_lookup_is_off_where_a_text_does_not_repeat(
    landed: Landed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain rounds run at full length then."""
    steps, run = list[int](), GraphSteps.run

    def counted(self: GraphSteps, count: int, *rest: Any) -> Any:
        steps.append(count)
        return run(self, count, *rest)

    monkeypatch.setattr(GraphSteps, "run", counted)
    model = build("gqa").double()
    ids = torch.randperm(90)[:20].tolist()
    asked = [
        Request(ids, Settings(max_new_tokens=64, temperature=3.0, top_k=0, lookup=n))
        for n in (0, 4)
    ]
    for request in asked:
        answer(model, [request], 1)
    assert not landed and steps == [16, 16, 16, 15] * 2


@pytest.mark.parametrize("seed", range(6))
def test_random_company_changes_no_guessed_answer(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random texts, settings, arrivals and cancels, small pools; rounds that guess or not, at random."""
    g = random.Random(seed)

    def sometimes(self: Guesses, live: list[Any], width: int, bound: int) -> Plan:
        plan = always(self, live, width, bound)
        chosen = plan._replace(passes=g.choice((1, 2, 8)), rate=g.choice((1.0, 2.5)))
        return chosen if plan.ahead and g.random() < 0.6 else PLAIN

    monkeypatch.setattr(Guesses, "plan", sometimes)
    model = build("gqa").double()
    draft = noisy(model, 0.02) if seed % 2 else None
    shared = [g.randrange(97) for _ in range(24)]

    def one() -> Request:
        start = shared[: g.choice((0, 0, 7, 24))]
        words = [g.randrange(97) for _ in range(g.randint(1, 5))]
        given: dict[str, Any] = {"max_new_tokens": g.randint(1, 30), "seed": g.randrange(9)}
        if g.random() < 0.5:
            given |= {"temperature": g.choice((0.3, 1.3)), "top_p": g.choice((1.0, 0.8))}
            given |= {"samples": g.choice((1, 1, 3))}
        if g.random() < 0.4:
            given |= {"frequency_penalty": g.choice((0.5, -3.0)), "banned": (3, 4)}
        if g.random() < 0.4:
            given |= {"eos": (5, 7, 11, 20), "min_new_tokens": g.randint(0, 1)}
        if g.random() < 0.3:
            given |= {"top_logprobs": 2}
        if g.random() < 0.7:
            given |= {"lookup": g.randint(1, 6)}
        if draft is not None and g.random() < 0.5:
            given |= {"draft": g.randint(1, 4)}
        ids = [*start, *(words * g.randint(1, 6))]
        request = Request(ids, Settings(**given), key=g.randrange(100))
        if g.random() < 0.15:
            request.mask = lambda sample, ids: torch.arange(97) % 2 == len(ids) % 2
        return request

    asked = [one() for _ in range(16)]
    options = {"chunk": g.choice((8, 40, 999)), "page": g.choice((4, 8)), "pages": 48}
    engine = Engine(model, runner="graph", rows=g.randint(3, 9), draft=draft, **options)
    assert engine.graph is not None and engine.pool is not None
    engine.graph.steps.look = g.choice((1, 3, 16))
    numbers, found = dict[int, Request](), dict[int, Any]()
    waiting, cancelled = list(asked), set[int]()
    while waiting or not engine.idle:
        for _ in range(g.randint(0, 5)):
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
    alone = [replace(r, settings=replace(r.settings, lookup=0, draft=0)) for r in numbers.values()]
    wanted = finished(Engine(model, runner="torch", layout="contiguous"), alone)
    for n, want in zip(numbers, wanted, strict=True):
        for a, b in zip(found[n], want, strict=True):
            if a.finish == "cancelled":
                assert n in cancelled and a.ids == b.ids[: len(a.ids)]
            else:
                assert (a.ids, a.finish) == (b.ids, b.finish)
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_device_looks_up_what_the_index_finds() -> None:
    g = torch.Generator().manual_seed(0)
    guesses = Guesses(Engine(build("gqa"), runner="graph", rows=4).graph.steps)  # type: ignore[union-attr]
    state = guesses.steps.state
    for words in (2, 4, 30):
        texts = torch.randint(words, (4, 60), generator=g)
        for end in (1, 2, 7, 30, 59):
            guesses.texts.fill_(-7)
            guesses.texts[:, :end] = texts[:, :end].int()
            state.pos.fill_(end)
            state.ids.copy_(texts[:, end])
            found = guesses.looked_up(4, 64, 4)
            for text, got in zip(texts.tolist(), found.tolist(), strict=True):
                want = Index(text[: end + 1]).after(4)
                assert got[: len(want)] == want
                # As if the text went on in a circle.
                if want:
                    assert got == (want * 4)[:4]


def noisy(model: regard.Model, noise: float) -> regard.Model:
    """The model, but for noise in its weights: a draft that is right now and then."""
    draft = copy.deepcopy(model)
    torch.manual_seed(3)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn_like(p), alpha=noise)
    return draft


def drafted(asked: list[Request], every: int = 1) -> list[Request]:
    return [
        replace(r, settings=replace(r.settings, draft=0 if i % every else 1 + i % 4))
        for i, r in enumerate(asked)
    ]


@pytest.mark.parametrize(
    "name, settings",
    [
        ("gqa", {}),
        ("gqa", {"temperature": 0.9, "top_p": 0.9}),
        ("gqa", {"temperature": 0.9, "samples": 3}),
        ("window", {"frequency_penalty": 0.5, "top_logprobs": 2}),
        ("mla", {"eos": (5, 7, 11, 20)}),
        ("gpt2", {}),
        ("t5-small", {}),
    ],
)
def test_draft_in_slots_changes_no_token(
    name: str, settings: dict, monkeypatch: pytest.MonkeyPatch, landed: Landed
) -> None:
    """Right now and then, or of another family; beside rows that ask for no guesses, in few pages."""
    monkeypatch.setattr(Guesses, "plan", always)
    model = build(name).double()
    asked = [asked_of(name, r) for r in requests(7, **settings)]
    want = by_torch(model, asked)
    for draft in (*([] if name in PAIRS else [noisy(model, 0.02)]), build("gqa").double()):
        same(answer(model, drafted(asked), 4, draft=draft), want)
        few = {"pages": 20, "page": 8, "chunk": 24}
        same(answer(model, drafted(asked, 2), 4, draft=draft, **few), want)
    assert landed


def test_draft_that_is_right_saves_passes_in_slots(
    landed: Landed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its guesses are right: after a try, and over pages that others left."""
    monkeypatch.setattr(Guesses, "expected", lambda *_: 1.2)
    model = build("gqa").double()
    engine = Engine(model, runner="graph", rows=4, draft=copy.deepcopy(model), page=8)
    asked = [replace(r, settings=replace(r.settings, max_new_tokens=40)) for r in requests(4)]
    for _ in range(2):
        same(served(engine, [replace(r, settings=replace(r.settings, draft=4)) for r in asked]),
             by_torch(model, asked))  # fmt: skip
    # A row that is through goes on until the others are, in pages that it does not have.
    said = sum(n for _, _, each in landed for n in each)
    assert said > 4.5 * sum(passes * len(each) for _, passes, each in landed) > 0
    assert len(landed) >= 3


def test_draft_that_is_wrong_is_tried_more_and_more_rarely(
    landed: Landed, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = build("gqa").double(), build("gqa").double()
    with torch.no_grad():
        for p in draft.parameters():
            p.normal_()
    steps, run = list[int](), GraphSteps.run
    monkeypatch.setattr(GraphSteps, "run", lambda *given: (steps.append(given[1]), run(*given))[1])
    asked = [Request([i], Settings(max_new_tokens=90, draft=4)) for i in range(8)]
    answer(model, asked, 1, draft=draft)
    passes = sum(passes for _, passes, _ in landed)
    assert 0 < passes <= 10 and sum(steps) > 600


def test_draft_reads_no_further_than_its_context() -> None:
    model = build("gqa").double()
    short = replace(build("gpt2").config, max_len=24).make().double()
    engine = Engine(model, runner="graph", rows=4, draft=short)
    asked = [
        Request([1] * 40, Settings(max_new_tokens=20)),
        Request([2, 3], Settings(max_new_tokens=20, draft=3)),
    ]
    same(
        served(engine, asked),
        by_torch(model, asked[:1] + [replace(asked[1], settings=Settings(max_new_tokens=20))]),
    )


@pytest.mark.parametrize("kind", ["states", "numbers"])
def test_draft_without_a_graph_leaves_to_the_runner_torch(kind: str) -> None:
    model = build("gqa").double()
    draft = {
        "states": lambda: build("qwen3_next").double(),
        "numbers": lambda: build("gqa"),
    }
    engine = Engine(model, draft=draft[kind]())
    assert engine.graph is None and "no CUDA graph" in engine.explain()
    with pytest.raises(UsageError, match="its draft model has no graph"):
        Engine(model, runner="graph", draft=draft[kind]())


def test_guesses_wait_for_a_graph_where_it_is_put_off(
    monkeypatch: pytest.MonkeyPatch, landed: Landed
) -> None:
    """Steps go on meanwhile, and the pass is wanted."""
    monkeypatch.setattr(Guesses, "plan", always)
    model, asked = build("gqa").double(), repeating(requests(3))
    engine = Engine(model, runner="graph", rows=4, draft=build("gqa").double())
    assert engine.graph is not None
    engine.put_off()
    engine.graph.steps.recorder.records = True
    same(served(engine, looked_up(asked)), by_torch(model, asked))
    assert not landed and "guess" in {key[0] for key in engine.graph.steps.recorder.wanted}
    assert all(recorder.puts_off for recorder in engine.graph.recorders())


def test_steps_are_kept_with_their_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: for calls with and without it, as long as it is there and where it was."""
    made, real = list[Any](), GraphSteps.__init__

    def marked(self: GraphSteps, *given: Any, **more: Any) -> None:
        real(self, *given, **more)
        made.append(given[0])

    model, draft = build("gqa"), build("gqa")
    monkeypatch.setattr(GraphSteps, "__init__", marked)
    monkeypatch.setattr(steps_module, "_kept", kept := {})  # type: ignore[var-annotated]

    def steps(draft: Any) -> GraphSteps:
        found = steps_of(model, 4, 64, 16, 96, True, draft)
        found.marks, kept[model] = marks(model), found
        return found

    first = steps(draft)
    assert made == [model, draft] and first.draft is not None
    assert steps(None) is first and steps(draft) is first and len(made) == 2
    other = build("gqa")
    assert steps(other) is not first and len(made) == 4
    del other, made[:]
    assert steps(None).draft is None and made == [model]


def test_rate_forgets() -> None:
    rate = Rate()
    assert rate.each == 1.0
    rate.note(40, 10)
    assert 3.2 < rate.each < 4
    rate.note(30, 30)
    assert rate.each < 1.2


def test_states_leave_guesses_to_the_runner_torch() -> None:
    model = build("qwen3_next").double()
    asked = repeating(requests(3))
    engine = Engine(model, runner="graph", rows=4)
    assert "beam search, guesses, rules on runs" in engine.explain()
    same(served(engine, looked_up(asked)), by_torch(model, asked))
    assert "several tokens of a row in a pass" in Engine(build("gqa"), runner="graph").explain()
