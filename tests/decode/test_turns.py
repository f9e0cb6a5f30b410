"""Nobody waits for somebody else's many prompts, long answers, long prompts or sources; and all say the same."""

from typing import Any

import pytest

from regard.decode.engine import Engine
from regard.decode.runners.rows import PlainBatch
from regard.decode.settings import Settings
from tests.decode.test_priorities import WAYS, ways
from tests.decode.tiny import answers, full, model, prompts, request
from tests.laws.mechanisms import decoder

OPTIONS = {
    way: options | {"chunk": 8} | ({} if "layout" in options else {"pages": 400})
    for way, options in WAYS.items()
}


def engine_of(way: str, **more: Any) -> Engine:
    engine = Engine(model("gqa_rope"), **OPTIONS[way], **more)
    if engine.graph is not None:
        # A round is a step, as elsewhere.
        engine.graph.steps.look = 1
    return engine


def ended(engine: Engine, asked: list[tuple[list[int], Settings]], name: str) -> list[int]:
    """The order in which they end, and that they say what each says alone."""
    order, texts = list[int](), {}
    while not engine.idle:
        for event in engine.step():
            if event.done is not None:
                order.append(event.request)
                texts[event.request] = [r.ids for r in event.done]
    assert [texts[i] for i in range(len(asked))] == answers(name, asked)
    full(engine.pool)
    return order


@ways
@pytest.mark.parametrize("kind", [{}, {"temperature": 1.0, "samples": 2}, {"beams": 2}])
def test_prompts_of_one_client_come_after_the_first_of_others(way: str, kind: Any) -> None:
    s, short = Settings(max_new_tokens=20, **kind), Settings(max_new_tokens=2)
    engine = engine_of(way, rows=2 * s.rows)
    asked = [(p, s) for p in prompts((3, 5, 4, 6, 3))] + [([1, 2], short)]
    for i, (prompt, settings) in enumerate(asked):
        if settings is short:
            for _ in range(4):
                engine.step()
        turn = 0 if settings is short else i * s.rows
        engine.submit(request("gqa_rope", prompt, settings, key=i, turn=turn))
    assert ended(engine, asked, "gqa_rope")[0] == 5


@ways
def test_who_has_waited_long_takes_the_row_of_the_longest_served(way: str) -> None:
    """Were it not for patience, the last would end last."""
    long, short = Settings(max_new_tokens=30), Settings(max_new_tokens=2)
    asked = [(p, long) for p in prompts((3, 5, 4))] + [([1, 2], short)]
    for patience in (1e9, 0.0):
        engine = engine_of(way, rows=2, patience=patience)
        for i, (prompt, settings) in enumerate(asked):
            engine.submit(request("gqa_rope", prompt, settings, key=i))
        order = ended(engine, asked, "gqa_rope")
        assert order.index(3) == (0 if patience == 0.0 else 2), order


@ways
def test_room_is_made_for_all_who_have_waited(way: str) -> None:
    """As many as there are rows at a time: one behind many does not wait for as many steps."""
    long, short = Settings(max_new_tokens=40), Settings(max_new_tokens=1)
    asked = [(p, long) for p in prompts([3] * 24)] + [([1, 2], short)]
    engine, steps = engine_of(way, rows=8, patience=0.0), 0
    for i, (prompt, settings) in enumerate(asked):
        engine.submit(request("gqa_rope", prompt, settings, key=i))
    while not any(event.done for event in engine.step()):
        steps += 1
    assert steps < 12
    while not engine.idle:
        engine.step()
    full(engine.pool)


@ways
def test_long_answers_take_turns_until_they_end(way: str) -> None:
    """Also with those who came last, for whom nobody waits who is new."""
    engine, said = engine_of(way, rows=2, patience=0.0), dict.fromkeys(range(6), 0)
    for i, prompt in enumerate(prompts((3, 5, 4, 6, 3, 5))):
        settings = Settings(max_new_tokens=24)
        engine.submit(request("gqa_rope", prompt, settings, key=i))
    done = False
    while not done:
        for event in engine.step():
            said[event.request] += event.token is not None
            done |= event.done is not None
    assert min(said.values()) > 8, said


@pytest.mark.parametrize("kind", [{"beams": 2}, {}])
def test_turns_come_to_an_end(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little patience there is: who is put back has come further, and a search is not put back."""
    s = Settings(max_new_tokens=9, **kind)
    engine, asked = Engine(model("gqa_rope"), rows=s.rows, page=2, pages=200, patience=0.0), []
    put_back, real = list[int](), engine.scheduler.preempt
    monkeypatch.setattr(engine.scheduler, "preempt", lambda r: (put_back.append(r.number), real(r)))
    for i, prompt in enumerate(prompts((3, 30, 9, 17))):
        asked.append((prompt, s))
        engine.submit(request("gqa_rope", prompt, s, key=i))
    ended(engine, asked, "gqa_rope")
    assert bool(put_back) is not bool(kind)


@ways
def test_short_prompts_do_not_wait_for_long_ones(way: str) -> None:
    s = Settings(max_new_tokens=1)
    engine = engine_of(way, rows=8)
    asked = [(p, s) for p in prompts((40, 41, 42, 43, 2))]
    for i, (prompt, settings) in enumerate(asked):
        engine.submit(request("gqa_rope", prompt, settings, key=i))
    order = ended(engine, asked, "gqa_rope")
    # The first, which has half of every chunk, is the next.
    assert order[:2] == [4, 0]


@pytest.mark.parametrize("name", ["pair", "twin", "captioner"])
def test_sources_are_read_a_chunk_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = list[int](), PlainBatch._read

    def counted(batch: PlainBatch, group: Any) -> None:
        if batch.chunk == 40:
            read.append(sum(batch._source(slot) + size for slot, size in group))
        real(batch, group)

    monkeypatch.setattr(PlainBatch, "_read", counted)
    s = Settings(max_new_tokens=2)
    engine = Engine(model(name), rows=16, chunk=40, page=2, pages=400)
    asked = [(p, s) for p in prompts([9] * 12)]
    for i, (prompt, settings) in enumerate(asked):
        engine.submit(request(name, prompt, settings, key=i))
    ended(engine, asked, name)
    assert len(read) > 1 and max(read) <= 40


# --- by a clock of the test -------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("regard.decode.scheduler.time", made)
    return made


def serving(engine: Engine, clock: Clock, now: float) -> list[int]:
    """Who has a row after a step at this time."""
    clock.now = now
    engine.step()
    return [request.number for request in engine.scheduler.running()]


def test_patience_doubles_with_each_turn_up_to_the_sixth(clock: Clock) -> None:
    engine = Engine(model("gqa_rope"), rows=1, page=4, pages=200, patience=10.0)
    for i, prompt in enumerate(prompts((3, 4))):
        engine.submit(request("gqa_rope", prompt, Settings(max_new_tokens=50), key=i))
    runs, now = 0, 0.0
    assert serving(engine, clock, now) == [runs]
    for turn in (0, 1, 2, 3, 4, 5, 6, 6, 6):
        now += 10.0 * 2**turn
        assert serving(engine, clock, now - 0.01) == [runs]
        assert serving(engine, clock, now) == [1 - runs]
        runs = 1 - runs


@pytest.mark.parametrize("turn", [0, 1, 6, 7])
def test_late_prompts_of_a_client_are_patient_or_do_not_ask(turn: int, clock: Clock) -> None:
    engine = Engine(model("gqa_rope"), rows=1, page=4, pages=200, patience=10.0)
    engine.submit(request("gqa_rope", [1, 2], Settings(max_new_tokens=50)))
    engine.submit(request("gqa_rope", [3, 4], Settings(max_new_tokens=50), key=1, turn=turn))
    assert serving(engine, clock, 0.0) == [0]
    assert serving(engine, clock, 10.0 * 2**turn - 0.01) == [0]
    assert serving(engine, clock, 10.0 * 2**turn) == [0 if turn == 7 else 1]
    if turn == 7:
        assert serving(engine, clock, 1e9) == [0]


@pytest.mark.parametrize("kind, priority", [({}, 1), ({"beams": 2}, 0)])
def test_a_higher_priority_and_a_search_keep_their_rows(
    kind: Any, priority: int, clock: Clock
) -> None:
    s = Settings(max_new_tokens=50, **kind)
    engine = Engine(model("gqa_rope"), rows=s.rows, page=4, pages=200, patience=10.0)
    engine.submit(request("gqa_rope", [1, 2], s, priority=priority))
    engine.submit(request("gqa_rope", [3, 4], Settings(max_new_tokens=50), key=1))
    assert serving(engine, clock, 0.0) == [0]
    assert serving(engine, clock, 1e6) == [0]


@pytest.mark.parametrize(
    "size, kind, pages",
    [
        (3, {}, 2),
        (4, {}, 3),
        (7, {}, 3),
        (8, {}, 4),
        (8, {"samples": 3, "temperature": 1.0}, 6),
        (8, {"beams": 3}, 6),
        # The context is 64 tokens: this one is read anew for each of its own, in no page.
        (65, {"overflow": "crop"}, 0),
    ],
)
def test_pages_that_a_prompt_will_take(size: int, kind: Any, pages: int) -> None:
    """Those of its tokens, and one more for each row."""
    engine = Engine(decoder("mha"), page=4, pages=200)
    waiting = request("mha", [1] * size, Settings(**kind))
    assert engine.scheduler.page_count(waiting) == pages
    assert engine.scheduler.row_count(waiting) == waiting.settings.rows
    assert Engine(decoder("mha"), layout="contiguous").scheduler.page_count(waiting) == 0
    for rows, most, fits in ((3, pages, True), (2, pages, waiting.settings.rows < 3)):
        assert engine.scheduler.fits(waiting, rows, most) == fits
        assert not engine.scheduler.fits(waiting, rows, most - 1)


def test_room_is_what_those_who_run_leave() -> None:
    """A page for each row that runs, and those of prompts that are not through."""
    engine = Engine(model("gqa_rope"), rows=6, page=4, pages=50, chunk=8)
    assert engine.scheduler.room() == (6, 50)
    engine.submit(request("gqa_rope", prompts((3,))[0], Settings(max_new_tokens=9)))
    two = Settings(max_new_tokens=9, samples=2, temperature=1.0)
    engine.submit(request("gqa_rope", prompts((30,))[0], two, key=1))
    engine.step()
    assert engine.pool is not None
    left = [
        len(slot.text) - slot.fed
        for batch in engine.scheduler.batches.values()
        for slot in batch.unread()
    ]
    owed = sum(-(-n // 4) for n in left)
    assert left and engine.scheduler.room() == (3, engine.pool.available - 3 - owed)
