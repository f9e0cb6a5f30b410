"""What may go wrong with a request hurts it alone: cancelled, late, spoilt; and every page comes back."""

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard.decode.scheduler as scheduler_module
from regard.decode.engine import Engine
from regard.decode.settings import Event, Settings
from tests.decode.tiny import (
    VOCAB,
    Counted,
    answers,
    full,
    model,
    prompts,
    request,
    run,
    tokens_of,
)
from tests.wide import crossed

LONG = Settings(max_new_tokens=20)
KINDS = {
    "greedy": LONG,
    "drawn": Settings(max_new_tokens=20, temperature=1.0),
    "samples": Settings(max_new_tokens=12, temperature=1.0, samples=3),
    "beams": Settings(max_new_tokens=12, beams=3, n_best=2),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def finishes(events: list[Event]) -> list[list[str]]:
    return [[r.finish for r in e.done] for e in events if e.done is not None]


# --- cancelling ---------------------------------------------------------------------------------------------------


def started(kind: str, phase: str, name: str = "gqa_rope") -> tuple[Engine, int]:
    """An engine with an old request, and one of a kind in a phase of its life."""
    engine = Engine(model(name), page=4, pages=60, chunk=8)
    engine.submit(request(name, [1, 2, 3], LONG, key=0))
    engine.step()
    number = engine.submit(request(name, prompts((21,))[0], KINDS[kind], key=1))
    if phase != "waiting":
        engine.step()
        assert engine.scheduler.load()[1]
    if phase in ("running", "preempted"):
        while engine.scheduler.load()[1]:
            engine.step()
        engine.step()
    if phase == "preempted":
        with torch.inference_mode():
            engine.scheduler.preempt_last()
        assert engine.waiting[0].number == number
    return engine, number


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "running", "preempted"])
@kinds
def test_cancelled_request_returns_its_pages(kind: str, phase: str) -> None:
    engine, number = started(kind, phase)
    before = sum(engine.pool.users)
    (event,) = engine.cancel(number)
    assert event.request == number
    assert {r.finish for r in event.done} == {"cancelled"}
    assert len(event.done) == max(KINDS[kind].samples, KINDS[kind].n_best)
    assert sum(engine.pool.users) < before or phase in ("waiting", "preempted")
    alone = Engine(model("gqa_rope"), page=4, pages=60)
    alone.submit(request("gqa_rope", [1, 2, 3], LONG, key=0))
    assert [r.ids for r in run(engine)[0]] == [
        r.ids for r in run(alone)[0]
    ]  # the neighbour goes on
    full(engine.pool)
    assert engine.idle and not engine.scheduler.finished and not engine.scheduler.resumed


@pytest.mark.parametrize("phase", ["running", "preempted"])
@pytest.mark.parametrize("kind", ["greedy", "samples"])
def test_cancelled_request_keeps_what_it_said(kind: str, phase: str) -> None:
    engine, number = started(kind, "waiting")
    events = []
    while engine.scheduler.load()[1] or engine.waiting:
        events += engine.step()
    events += engine.step()
    if phase == "preempted":
        with torch.inference_mode():
            engine.scheduler.preempt_last()
    (event,) = engine.cancel(number)
    said = [tokens_of(events, number, k) for k in range(KINDS[kind].samples)]
    assert [r.ids for r in event.done] == said
    assert all(len(ids) == 3 for ids in said)
    assert all(r.score == pytest.approx(sum(r.logprobs)) for r in event.done)


def test_cancelled_beams_give_the_best_so_far() -> None:
    engine, number = started("beams", "running")
    (event,) = engine.cancel(number)
    scores = [r.score for r in event.done]
    assert scores == sorted(scores, reverse=True)
    assert all(r.ids and len(r.ids) == len(r.logprobs) for r in event.done)


def test_cancelled_sample_keeps_the_finished_ones() -> None:
    """Some samples end early; the request is cancelled while others go on."""
    s = Settings(max_new_tokens=40, temperature=1.5, samples=8, eos=(1, 2, 3))
    engine = Engine(model("gqa_rope"), page=4, pages=200)
    number = engine.submit(request("gqa_rope", [4, 5], s))
    while not engine.scheduler.finished.get(number):
        engine.step()
    (event,) = engine.cancel(number)
    assert {r.finish for r in event.done} == {"eos", "cancelled"}
    assert len(event.done) == 8
    full(engine.pool)


def test_cancelled_prompt_sets_free_those_that_were_read_with_it() -> None:
    """A short prompt is through and waits for a long one that is cancelled: it goes on with what it has."""
    engine = Engine(model("gqa_rope"), chunk=4)
    short, long = (
        engine.submit(request("gqa_rope", p, LONG, key=0)) for p in ([1], prompts((20,))[0])
    )
    engine.step()
    engine.step()
    engine.cancel(long)
    ((result,),) = run(engine).values()
    assert [[result.ids]] == answers("gqa_rope", [([1], LONG)])


def test_cancelling_what_is_not_there_does_nothing() -> None:
    engine, number = started("greedy", "running")
    assert engine.cancel(99) == []
    run(engine)
    assert engine.cancel(number) == []


@pytest.mark.parametrize(
    "name, kind", crossed(["pair", "captioner", "seq2seq", "lstm_attention", "dsa_mla"], KINDS)
)
def test_cancelled_request_leaves_other_models_in_order(name: str, kind: str) -> None:
    engine = Engine(model(name), page=4, pages=60, chunk=4)
    asked = [(p, s) for p, s in zip(prompts((5, 3, 6)), (LONG, KINDS[kind], KINDS[kind]))]
    for i, (prompt, settings) in enumerate(asked):
        engine.submit(request(name, prompt, settings, key=i))
    for _ in range(4):
        engine.step()
    engine.cancel(1)
    found = run(engine)
    expect = answers(name, asked)
    assert [[r.ids for r in found[i]] for i in (0, 2)] == [expect[0], expect[2]]
    full(engine.pool)


# --- deadlines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "running", "preempted"])
@kinds
def test_deadline_ends_a_request_in_every_phase(
    kind: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    clock = [now]
    # Not everybody's: other threads of these tests would sleep until then.
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    engine = Engine(model("gqa_rope"), page=4, pages=60, chunk=8)
    engine.submit(request("gqa_rope", [1, 2, 3], LONG, key=0))
    engine.step()
    late = request("gqa_rope", prompts((21,))[0], KINDS[kind], key=1, deadline=now + 5)
    number = engine.submit(late)
    if phase != "waiting":
        engine.step()
    while phase in ("running", "preempted") and engine.scheduler.load()[1]:
        engine.step()
    if phase == "preempted":
        with torch.inference_mode():
            engine.scheduler.preempt_last()
    clock[0] += 4.9
    events = engine.step() if phase == "running" else []
    assert finishes(events) == []
    clock[0] += 0.2
    (event,) = [e for e in engine.step() if e.request == number]
    assert {r.finish for r in event.done} == {"deadline"}
    run(engine)
    full(engine.pool)


def test_deadline_that_has_passed_answers_at_once() -> None:
    engine = Engine(model("gqa_rope"))
    engine.submit(request("gqa_rope", [1], LONG, deadline=time.monotonic() - 1))
    assert finishes(engine.step()) == [["deadline"]]
    assert engine.idle


def test_deadline_met_changes_nothing() -> None:
    engine = Engine(model("gqa_rope"))
    engine.submit(request("gqa_rope", [1], LONG, deadline=time.monotonic() + 600))
    ((result,),) = run(engine).values()
    assert [[result.ids]] == answers("gqa_rope", [([1], LONG)])


# --- logits that are no numbers -----------------------------------------------------------------------------------


def spoilt(value: float, after: int) -> Any:
    """Spoils the row that was fed token `after` last."""

    def spoil(ids: Tensor, logits: Tensor) -> Tensor:
        if logits.dim() == 2:
            hit = (ids == after).any(1)
            return torch.where(hit[:, None], value, logits)
        return torch.where((ids == after)[..., None], value, logits)

    return spoil


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@kinds
def test_spoilt_logits_end_that_request_alone(kind: str, value: float) -> None:
    """The last token of the vocabulary is banned for the others, so it is fed for one request only."""
    bad = VOCAB - 1
    clean = {"banned": (bad,)}
    asked: list[tuple[list[int], Settings]] = []
    for i, prompt in enumerate(prompts((4, 6, 3))):
        s = Settings(**{n: getattr(KINDS[kind], n) for n in Settings.__dataclass_fields__} | clean)
        asked.append(([t % bad for t in prompt] + ([bad] if i == 1 else []), s))
    counted = Counted(model("gqa_rope"))
    counted.spoil = spoilt(value, bad)
    engine = Engine(counted, page=4, pages=100)
    for i, (prompt, settings) in enumerate(asked):
        engine.submit(request("gqa_rope", prompt, settings, key=i))
    found = run(engine)
    expect = answers("gqa_rope", asked)
    assert [[r.ids for r in found[i]] for i in (0, 2)] == [expect[0], expect[2]]
    assert {r.finish for r in found[1]} == {"error"}
    assert all("not a number" in r.error for r in found[1])
    if KINDS[kind].beams > 1:
        assert {(*r.ids, r.score) for r in found[1]} == {(0.0,)}
    full(engine.pool)


@pytest.mark.parametrize("lookup", [0, 4])
def test_spoilt_logits_in_the_middle_keep_what_was_said(lookup: int) -> None:
    """Not even speculation that meets them early changes where a text breaks off."""
    s = Settings(max_new_tokens=20, frequency_penalty=0.8, lookup=lookup)
    (text,) = answers("gqa_rope", [([7, 7, 7], s)])[0]
    at = next(i for i in range(3, 20) if text[i] not in text[:i] and text[i] != 7)
    counted = Counted(model("gqa_rope"))
    counted.spoil = spoilt(float("nan"), text[at])
    engine = Engine(counted)
    engine.submit(request("gqa_rope", [7, 7, 7], s))
    ((result,),) = run(engine).values()
    assert (result.ids, result.finish) == (text[: at + 1], "error")


def test_spoilt_pages_are_not_left_to_others() -> None:
    (prompt,) = prompts((12,))
    counted = Counted(model("gqa_rope"))
    counted.spoil = lambda ids, logits: torch.full_like(logits, torch.nan)
    engine = Engine(counted, page=4)
    engine.submit(request("gqa_rope", prompt, LONG))
    run(engine)
    assert not engine.pool.published
    counted.spoil = None
    engine.submit(request("gqa_rope", prompt, LONG))
    ((result,),) = run(engine).values()
    assert [[result.ids]] == answers("gqa_rope", [(prompt, LONG)])


# --- the ledger ---------------------------------------------------------------------------------------------------


def settings_at_random(rng: random.Random) -> Settings:
    common: dict[str, Any] = {
        "max_new_tokens": rng.randint(1, 9),
        "eos": (3, 5) if rng.random() < 0.7 else (),
    }
    kind = rng.choice(["greedy", "drawn", "samples", "beams", "lookup"])
    if kind == "drawn":
        common |= {"temperature": 1.0, "top_k": rng.choice([0, 5])}
    elif kind == "samples":
        common |= {"temperature": 1.0, "samples": rng.randint(2, 4)}
    elif kind == "beams":
        common |= {"beams": rng.choice([2, 3]), "early_stopping": rng.choice(["first", "never"])}
    elif kind == "lookup":
        common |= {"lookup": 3}
    return Settings(**common)


@pytest.mark.parametrize("seed, prefix", crossed(range(2), [True, False]))
def test_ledger_is_even_after_thousands_of_random_operations(seed: int, prefix: bool) -> None:
    """Submit, step, cancel, let deadlines pass, preempt, spoil a row: at every quiet point the pool is full again, and
    each request was answered exactly once."""
    rng = random.Random(seed)
    counted = Counted(model("gqa_rope"))
    counted.spoil = lambda ids, x: (
        x.index_fill(0, torch.tensor([rng.randrange(len(x))]), torch.nan)
        if rng.random() < 0.02
        else x
    )
    engine = Engine(counted, rows=8, chunk=6, page=2, pages=44, prefix=prefix)
    open_: set[int] = set()
    operations = 0

    def note(events: list[Event]) -> None:
        for event in events:
            assert event.request in open_, "an event of a request that is not open"
            if event.done is not None:
                open_.remove(event.request)

    shared = prompts((12,), seed)[0]
    while operations < 1000:
        operations += 1
        what = rng.random()
        if what < 0.25 and len(engine.waiting) < 12:
            prompt = shared[: rng.randint(1, 12)] + [
                rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))
            ]
            late = time.monotonic() + rng.choice([0, 0.002]) if rng.random() < 0.1 else None
            s = settings_at_random(rng)
            open_.add(engine.submit(request("gqa_rope", prompt, s, key=operations, deadline=late)))
        elif what < 0.35 and open_:
            note(engine.cancel(rng.choice(sorted(open_))))
        elif what < 0.38 and len(list(engine.scheduler.running())) > 1:
            with torch.inference_mode():
                engine.scheduler.preempt_last()
        elif what < 0.40:  # a quiet point
            note(list(engine.run()))
            assert not open_
            full(engine.pool)
        else:
            note(engine.step())
        engine.pool.check(_tables(engine))
    note(list(engine.run()))
    assert not open_ and not engine.scheduler.finished and not engine.scheduler.resumed
    full(engine.pool)


def _tables(engine: Engine) -> list[list[int]]:
    caches = [cache for batch in engine.scheduler.batches.values() for cache in batch.caches()]
    return [table for cache in caches for table in cache.tables]


def test_request_given_twice_is_two_requests() -> None:
    engine = Engine(model("gqa_rope"))
    same = request("gqa_rope", [1, 2], LONG)
    assert (engine.submit(same), engine.submit(same)) == (0, 1)
    found = run(engine)
    assert found[0][0].ids == found[1][0].ids


def test_request_larger_than_the_batch_runs_when_it_is_alone() -> None:
    s = Settings(max_new_tokens=5, temperature=1.0, samples=9)
    asked = [([1, 2], LONG), ([3], s), ([4], LONG)]
    assert answers("gqa_rope", asked, rows=2) == answers("gqa_rope", asked)
