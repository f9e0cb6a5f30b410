"""Nobody waits for a graph: a step that was never recorded runs without, and `warm` records it when nobody waits."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from regard.decode.engine import Engine
from regard.decode.runners.steps import GraphSteps
from regard.decode.settings import Request, Settings
from regard.fast.cuda.record import Recorder
from regard.kernels.triton import measured
from tests.decode.tiny import model

KINDS = {
    "greedy": Settings(max_new_tokens=6),
    "drawn": Settings(max_new_tokens=6, temperature=1.0),
    "filtered": Settings(max_new_tokens=6, temperature=1.0, top_p=0.9),
    "samples": Settings(max_new_tokens=6, temperature=1.0, samples=3),
    "beams": Settings(max_new_tokens=6, beams=3),
}


class Played:
    """A graph, as it is off a GPU: the call itself."""

    def __init__(self, call: Callable[[], Any], count: list[int]):
        self.call, self.count = call, count

    def replay(self) -> None:
        self.count[0] += 1
        self.call()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[int]]:
    """Keys of what is recorded, and how many steps were played, as if there were a GPU."""
    keys, played, init = list[Any](), [0], GraphSteps.__init__

    def record(self: Recorder, key: Any, call: Callable[[], Any]) -> None:
        keys.append(key)
        self.graphs[key] = Played(call, played)  # type: ignore[assignment]

    def begun(self: GraphSteps, *given: Any, **more: Any) -> None:
        init(self, *given, **more)
        self.recorder.records = True

    monkeypatch.setattr(Recorder, "record", record)
    monkeypatch.setattr(Recorder, "rehearse", lambda self, call: call())
    monkeypatch.setattr(GraphSteps, "__init__", begun)
    return keys, played


def said(engine: Engine, rows: int, kinds: Sequence[Settings]) -> list[list[list[int]]]:
    """Ids of what the engine answers to so many requests, in their order."""
    for i in range(rows):
        engine.submit(Request([3 + i % 5, 4, 5], kinds[i % len(kinds)], key=i))
    first = engine.scheduler.count - rows
    done = {e.request - first: e.done for e in engine.run() if e.done is not None}
    return [[r.ids for r in done[i]] for i in range(rows)]


def test_a_step_records_nothing_and_says_the_same(watched: tuple[list[Any], list[int]]) -> None:
    keys, played = watched
    net, kinds = model("gqa_rope"), list(KINDS.values())
    plain = Engine(net, runner="torch", rows=16)
    engine = Engine(net, runner="graph", rows=16, pages=200)
    engine.put_off()
    for rows in (1, 5, 11):
        assert said(engine, rows, kinds) == said(plain, rows, kinds)
    assert not keys and engine.cold
    while engine.warm():
        assert not engine.waiting
    assert not engine.cold
    # From now on every step is played.
    many, before = len(keys), played[0]
    for rows in (1, 5, 11):
        assert said(engine, rows, kinds) == said(plain, rows, kinds)
    assert played[0] > before and len(keys) == many


def test_more_rows_do_the_work_of_fewer(watched: tuple[list[Any], list[int]]) -> None:
    """The graph of all rows is the first to be recorded, and it serves any number of them."""
    keys, played = watched
    net, kinds = model("gqa_rope"), [KINDS["greedy"], KINDS["drawn"]]
    engine = Engine(net, runner="graph", rows=8, pages=200)
    engine.put_off()
    assert engine.graph is not None
    runner, plain = engine.graph.steps, Engine(net, runner="torch", rows=8)
    while len({key[-1] for key in keys}) < 2:
        assert engine.warm()
    assert {key[:3] for key in keys} >= {("step", runner.rows, runner.length)}
    before = list(keys)
    for rows in (1, 3, 8):
        for kind in kinds:
            assert said(engine, rows, [kind]) == said(plain, rows, [kind])
    assert keys == before and played[0] > 0


def test_settings_that_will_be_asked_for_are_recorded_before(
    watched: tuple[list[Any], list[int]],
) -> None:
    """Those of a model's folder. What no plain step serves is left to those who ask for it."""
    keys, _ = watched
    engine = Engine(model("gqa_rope"), runner="graph", rows=8, pages=200)
    engine.put_off([KINDS["filtered"], KINDS["beams"], Settings(lookup=2)])
    while engine.warm():
        pass
    usual = {frozenset[str](), frozenset({"temperature"})}
    assert {key[-1] for key in keys} == {*usual, frozenset({"temperature", "top_p"})}
    before = list(keys)
    said(engine, 5, [KINDS["filtered"]])
    assert keys == before and not engine.cold


def test_without_a_server_a_step_is_recorded_when_it_is_met(
    watched: tuple[list[Any], list[int]],
) -> None:
    keys, _ = watched
    engine = Engine(model("gqa_rope"), runner="graph", rows=8, pages=200)
    said(engine, 3, [KINDS["greedy"]])
    assert keys and not engine.cold


def test_what_is_first_met_is_measured_later(
    watched: tuple[list[Any], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a graph that was recorded before is recorded anew."""
    keys, _ = watched
    known, asked, step = dict[str, str](), list[str](), GraphSteps.step

    def chosen(self: GraphSteps, width: int, *rest: Any) -> None:
        if (key := f"rows {width}") not in known and measured._thread.puts_off:
            measured._thread.met[key] = torch.empty(0), {}
        elif key not in known:
            asked.append(key)
        step(self, width, *rest)

    monkeypatch.setattr(GraphSteps, "step", chosen)
    monkeypatch.setattr(measured, "_measure", lambda key, *_: known.update({key: "ours"}))
    engine = Engine(model("gqa_rope"), runner="graph", rows=4, pages=200)
    engine.put_off()
    said(engine, 3, [KINDS["greedy"]])
    assert not known and not asked and engine.cold
    # Where somebody waits, nothing is measured, nor recorded before it was.
    assert not engine.warm(measuring=False) and not keys
    while engine.warm():
        pass
    assert known.keys() == {"rows 1", "rows 2", "rows 4"} and not asked
    assert max(Counter(keys).values()) == 2
