"""A step is all or nothing: whatever interrupts it, no request loses a token, and every page comes back. What raises is
the fault of a request: see test_blame.py."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from regard.decode.engine import Engine
from regard.decode.settings import Event, Settings
from tests.decode.test_faults import settings_at_random
from tests.decode.tiny import VOCAB, Counted, answers, full, model, prompts, request, tokens_of

LONG = Settings(max_new_tokens=8)


class Fragile(Counted):
    """A model that raises after some of its passes, when the caches were written: see `faults`."""

    def __init__(self, inner: Any, faults: Callable[[], BaseException | None]):
        super().__init__(inner)
        self.faults = faults

    def _count(self, ids: Tensor, lengths: Any, logits: Tensor) -> Tensor:
        fault = self.faults()
        if fault is not None:
            raise fault
        return super()._count(ids, lengths, logits)


def raising(at: int, fault: type[BaseException] = ValueError) -> Callable[[int, list[int]], bool]:
    def stop(sample: int, ids: list[int]) -> bool:
        if len(ids) >= at:
            raise fault("my callback broke")
        return False

    return stop


def events_of(engine: Engine, raised: list[BaseException]) -> list[Event]:
    """All events; what steps raise is noted, and the engine is stepped again."""
    events: list[Event] = []
    for _ in range(500):
        if engine.idle:
            return events
        try:
            events += engine.step()
        except (SystemExit, KeyboardInterrupt) as error:
            raised.append(error)
            assert sum(engine.pool.users) == 0 if engine.pool else True
    raise AssertionError("the engine does not come to an end")


# --- a callback that raises ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("when", [1, 3, 8])
def test_stop_that_raises_ends_its_request_alone(when: int, prefix: bool) -> None:
    many = prompts((3, 5, 3))
    engine = Engine(model("gqa_rope"), page=4, pages=50, prefix=prefix)
    for i, prompt in enumerate(many):
        stop = raising(when) if i == 1 else None
        engine.submit(request("gqa_rope", prompt, LONG, key=i, stop=stop))
    events = list(engine.run())
    done = {e.request: e.done[0] for e in events if e.done}
    want = [text for (text,) in answers("gqa_rope", [(p, LONG) for p in many])]
    want[1] = want[1][:when]
    assert [done[i].ids for i in range(3)] == want
    assert [tokens_of(events, i) for i in range(3)] == want
    assert [done[i].finish for i in range(3)] == ["length", "error", "length"]
    assert done[1].error == "its stop raised ValueError: my callback broke"
    full(engine.pool)


def test_stop_that_raises_for_one_sample_leaves_the_others() -> None:
    s = Settings(max_new_tokens=6, temperature=1.0, samples=3)

    def stop(sample: int, ids: list[int]) -> bool:
        return bool([][0]) if sample == 1 and len(ids) == 2 else False

    engine = Engine(model("gqa_rope"), page=4)
    engine.submit(request("gqa_rope", [1, 2], s, stop=stop))
    ((found),) = [e.done for e in engine.run() if e.done]
    (want,) = answers("gqa_rope", [([1, 2], s)])
    assert [r.ids for r in found] == [want[0], want[1][:2], want[2]]
    assert [r.finish for r in found] == ["length", "error", "length"]


# --- a forward that raises ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_step_that_raises_is_as_if_it_had_not_been(layout: str, fault: type) -> None:
    """Passes fail, at first often and then less: nothing is lost, shown twice or changed."""
    passes, bad = iter(range(10**6)), {n * (n + 1) // 2 for n in range(40)}
    fragile = Fragile(model("gqa_rope"), lambda: fault("no") if next(passes) in bad else None)
    engine = Engine(fragile, layout=layout, page=4, pages=60, chunk=12)
    kinds = [
        LONG,
        Settings(max_new_tokens=7, temperature=1.0, samples=3, eos=(3, 5)),
        Settings(max_new_tokens=6, beams=3, n_best=2),
        Settings(max_new_tokens=9, lookup=3),
    ]
    asked = list(zip(prompts((9, 3, 4, 6)), kinds, strict=True))
    for i, (prompt, settings) in enumerate(asked):
        engine.submit(request("gqa_rope", prompt, settings, key=i))
    raised: list[BaseException] = []
    events = events_of(engine, raised)
    assert raised and {type(x) for x in raised} == {fault}
    done = {e.request: e.done for e in events if e.done}
    assert [[r.ids for r in done[i]] for i in range(4)] == answers("gqa_rope", asked)
    for i, (_, s) in enumerate(asked):
        if s.beams == 1:
            shown = [tokens_of(events, i, k) for k in range(s.samples)]
            assert shown == [r.ids for r in done[i]]
    full(engine.pool)


def test_ctrl_c_in_a_callback_is_not_an_error_of_the_request() -> None:
    """It is raised, and the engine can go on: the callback is asked again about the same token."""
    asked: list[int] = []

    def stop(sample: int, ids: list[int]) -> bool:
        asked.append(len(ids))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return False

    engine = Engine(model("gqa_rope"), page=4)
    engine.submit(request("gqa_rope", [4, 5], LONG, key=0))
    engine.submit(request("gqa_rope", [1, 2], LONG, key=1, stop=stop))
    raised: list[BaseException] = []
    events = events_of(engine, raised)
    assert len(raised) == 1 and asked[:5] == [1, 2, 3, 3, 4]
    want = [text for (text,) in answers("gqa_rope", [([4, 5], LONG), ([1, 2], LONG)])]
    assert [tokens_of(events, i) for i in (0, 1)] == want


def test_request_that_came_during_a_step_that_raised_is_kept() -> None:
    engine = Engine(model("gqa_rope"), page=4)

    def stop(sample: int, ids: list[int]) -> bool:
        if len(ids) == 2 and engine.scheduler.count == 1:
            engine.submit(request("gqa_rope", [7], LONG, key=1))
            raise KeyboardInterrupt
        return False

    engine.submit(request("gqa_rope", [1, 2], LONG, key=0, stop=stop))
    done = {e.request: e.done[0].ids for e in events_of(engine, []) if e.done}
    want = answers("gqa_rope", [([1, 2], LONG), ([7], LONG)])
    assert [[done[i]] for i in (0, 1)] == want


# --- anything, at any time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["gqa_rope", "mla", "lstm_attention", "pair"])
def test_random_faults_change_no_innocent_text(name: str, seed: int) -> None:
    """Callbacks and passes raise at random, pages are few, some have deadlines or share prompts. Who raises nothing
    gets the text of an engine without faults, and at the end the engine is idle and every page free."""
    rng = random.Random(seed)
    fragile = Fragile(
        model(name),
        lambda: rng.choice([KeyboardInterrupt, SystemExit])() if rng.random() < 0.1 else None,
    )
    options: dict[str, Any] = {"rows": 8, "chunk": 7, "page": 2, "pages": 60}
    engine = Engine(fragile, **options, prefix=bool(seed % 2))
    shared, asked, guilty = prompts((9,), seed)[0], [], {}
    for i in range(14):
        prompt = shared[: rng.randint(0, 9)] + [
            rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))
        ]
        settings = settings_at_random(rng)
        if name == "lstm_attention":
            settings = replace(settings, lookup=0)
        asked.append((prompt, settings))
        if settings.beams == 1 and rng.random() < 0.3:
            guilty[i] = rng.randint(1, settings.max_new_tokens)
        late = time.monotonic() + 3600 if rng.random() < 0.3 else None
        stop = raising(guilty[i]) if i in guilty else None
        engine.submit(request(name, prompt, settings, key=i, stop=stop, deadline=late))
    raised: list[BaseException] = []
    events = events_of(engine, raised)
    done = {e.request: e.done for e in events if e.done}
    want = answers(name, asked)
    assert raised and sorted(done) == list(range(len(asked)))
    for i, (_, s) in enumerate(asked):
        got = [r.ids for r in done[i]]
        assert got == [text[: guilty.get(i)] for text in want[i]]
        if s.beams == 1:
            assert got == [tokens_of(events, i, k) for k in range(s.samples)]
        ends = {r.finish for r, text in zip(done[i], want[i]) if len(text) >= guilty.get(i, 99)}
        assert ends <= {"error"}
    assert engine.idle and not (
        engine.scheduler.finished or engine.scheduler.resumed or engine.scheduler.deadlines
    )
    full(engine.pool)


# --- deadlines ----------------------------------------------------------------------------------------------------


def test_deadlines_of_what_is_done_are_forgotten() -> None:
    engine, later = Engine(model("gqa_rope")), time.monotonic() + 3600
    one = Settings(max_new_tokens=1)
    numbers = [engine.submit(request("gqa_rope", [1], one, deadline=later)) for _ in range(5)]
    engine.cancel(numbers[-1])
    list(engine.run())
    assert not engine.scheduler.deadlines


# --- prefill ------------------------------------------------------------------------------------------------------


class Measured(Counted):
    """Notes the shape of every pass."""

    def next_logits(self, ids: Tensor, lengths: Any = None, **rest: Any) -> Tensor:
        self.__dict__.setdefault("shapes", []).append(tuple(ids.shape))
        return super().next_logits(ids, lengths, **rest)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("name", ["gqa_rope", "mla", "lstm_attention"])
def test_prefill_feeds_no_more_than_a_chunk_padding_included(name: str, layout: str) -> None:
    """Fifteen short prompts beside a long one: the short ones begin after one pass, and the long one's passes hold
    nothing else."""
    sizes = [2] * 15 + [60]
    asked = [(p, Settings(max_new_tokens=2)) for p in prompts(sizes)]
    measured = Measured(model(name))
    engine = Engine(measured, layout=layout, page=4, pages=300, chunk=32, prefix=False)
    for i, (prompt, settings) in enumerate(asked):
        engine.submit(request(name, prompt, settings, key=i))
    first = {e.request for e in engine.step() if e.token is not None}
    assert first == set(range(15))
    found = {e.request: e.done[0].ids for e in engine.run() if e.done}
    assert 15 in found
    assert measured.shapes[:4] == [(16, 2), (15, 1), (1, 32), (1, 26)]
    assert max(a * b for a, b in measured.shapes) <= 32
    want = answers(name, asked, pages=300)
    assert all([found[i]] == want[i] for i in found)
    full(engine.pool)
