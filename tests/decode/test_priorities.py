"""Requests of a higher priority are served first, equal ones in their order; the first of all always gets on."""

import random
from typing import Any

import pytest
import torch

from regard.decode.engine import Engine
from regard.decode.runners.slots import GraphBatch
from regard.decode.settings import Settings
from regard.errors import UsageError
from tests.decode.tiny import answers, full, model, prompts, request

WAYS: dict[str, dict[str, Any]] = {
    "contiguous": {"layout": "contiguous"},
    "paged": {"page": 2, "pages": 24, "chunk": 4},
    "graph": {"runner": "graph", "page": 2, "pages": 24, "chunk": 4},
}
ways = pytest.mark.parametrize("way", WAYS)


@ways
def test_higher_priorities_end_first_and_equal_ones_in_their_order(way: str) -> None:
    engine, ended = Engine(model("gqa_rope"), rows=1, **WAYS[way]), []
    for priority in (0, 5, -3, 5, 0, 1):
        engine.submit(request("gqa_rope", [1, 2], Settings(max_new_tokens=3), priority=priority))
    while not engine.idle:
        ended += [e.request for e in engine.step() if e.done]
    assert ended == [1, 3, 5, 0, 4, 2]
    full(engine.pool)


@ways
@pytest.mark.parametrize("kind", [{}, {"beams": 2}])
def test_higher_priority_takes_the_rows_of_lower_ones(way: str, kind: dict) -> None:
    """They go on afterwards, with the same text."""
    s, asked = Settings(max_new_tokens=24, **kind), prompts((3, 5, 9))
    options = WAYS[way] | ({} if way == "contiguous" else {"pages": 120})
    engine, ended, texts = Engine(model("gqa_rope"), rows=2 * s.rows, **options), [], {}
    for i in (0, 1):
        engine.submit(request("gqa_rope", asked[i], s, key=i))
    engine.step()
    engine.submit(request("gqa_rope", asked[2], s, key=2, priority=1))
    while not engine.idle:
        for e in engine.step():
            if e.done:
                ended.append(e.request)
                texts[e.request] = [r.ids for r in e.done]
    # The youngest of the lower ones made room.
    assert ended.index(2) < ended.index(1)
    assert [texts[i] for i in range(3)] == answers("gqa_rope", [(p, s) for p in asked])
    full(engine.pool)


def test_prompt_that_is_read_makes_way_for_a_higher_priority() -> None:
    engine = Engine(model("gqa_rope"), chunk=2, layout="contiguous")
    engine.submit(request("gqa_rope", prompts((60,))[0], Settings(max_new_tokens=1)))
    engine.step()
    engine.submit(request("gqa_rope", [1], Settings(max_new_tokens=1), priority=1))
    assert [e.request for e in engine.step() if e.done] == [1]
    assert [e.request for e in engine.run() if e.done] == [0]


def measure(engine: Engine, number: int) -> int:
    """What of a request's text has been read or said; more with each step that serves it. -1: it waits."""
    for batch in engine.scheduler.batches.values():
        for slot in batch.slots:
            if slot.sequence.request.number == number:
                graph = isinstance(batch, GraphBatch)
                return slot.fed + (slot.scheduled if graph else len(slot.sequence.ids))
    return -1


@ways
@pytest.mark.parametrize("seed", range(3))
def test_first_in_rank_gets_on_with_every_step(way: str, seed: int) -> None:
    """Arrivals without end, pages for few: whoever is first in rank reads or says something in each step, until it is
    done; so nobody of the highest priority waits for ever."""
    rng = random.Random(seed)
    engine, open_, came = Engine(model("gqa_rope"), rows=4, **WAYS[way]), {}, 0
    for _ in range(120):
        while came < 40 and len(open_) < 6:
            size, new = rng.randint(1, 9), rng.randint(1, 8)
            r = request(
                "gqa_rope", prompts((size,), came)[0], Settings(max_new_tokens=new), key=came
            )
            r.priority = rng.choice([0, 0, 1])
            open_[engine.submit(r)] = r.priority
            came += 1
        if not open_:
            break
        first = min(open_, key=lambda n: (-open_[n], n))
        before = measure(engine, first)
        events = engine.step()
        for event in events:
            if event.done is not None:
                del open_[event.request]
        assert first not in open_ or measure(engine, first) > before, f"request {first} waits"
    assert came == 40 and not open_
    full(engine.pool)


def test_preemption_takes_the_lowest_and_then_the_youngest() -> None:
    engine = Engine(model("gqa_rope"), page=4, pages=60)
    for priority in (0, 2, 0, 1):
        engine.submit(request("gqa_rope", [1, 2], Settings(max_new_tokens=30), priority=priority))
    engine.step()
    engine.step()
    gone = []
    for _ in range(3):
        with torch.inference_mode():
            engine.scheduler.preempt_last()
        gone.append([r.number for r in engine.waiting])
    assert gone == [[2], [0, 2], [3, 0, 2]]


def test_priority_is_a_whole_number() -> None:
    with pytest.raises(UsageError, match="priority is 1.5; give a whole number"):
        Engine(model("gqa_rope")).submit(request("gqa_rope", [1], Settings(), priority=1.5))
