"""On a GPU: in front of a request nothing is measured and no graph is recorded; `warm` does that when nobody waits."""

from typing import Any

import pytest
import torch

from regard.decode.engine import Engine
from regard.decode.settings import Request, Settings
from regard.decode.warm import warm
from regard.fast.cuda.record import Recorder
from regard.kernels.triton import measured
from tests.gpu.test_graphs import build

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: there is none here"
)


def said(engine: Engine, rows: int, **settings: Any) -> list[list[int]]:
    for i in range(rows):
        engine.submit(Request([3 + i % 5, 4, 5], Settings(max_new_tokens=9, **settings), key=i))
    first = engine.scheduler.count - rows
    done = {e.request - first: e.done[0].ids for e in engine.run() if e.done is not None}
    return [done[i] for i in range(rows)]


@pytest.mark.parametrize("name", ["gqa", "mla"])
@pytest.mark.parametrize("kind", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_nothing_is_measured_or_recorded_in_front_of_a_request(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: dict[str, Any]
) -> None:
    made, inside = list[tuple[str, bool]](), [False]
    record, measure, step = Recorder.record, measured._measure, Engine._step

    def watched(self: Engine) -> Any:
        inside[0] = True
        try:
            return step(self)
        finally:
            inside[0] = False

    def noted(what: str, call: Any) -> Any:
        return lambda *given: (made.append((what, inside[0])), call(*given))[1]

    # As on a machine that has never met anything.
    monkeypatch.setattr(measured, "table", lambda card, known={}: known)
    monkeypatch.setattr(measured, "keep", lambda *_: None)
    monkeypatch.setattr(Recorder, "record", noted("record", record))
    monkeypatch.setattr(measured, "_measure", noted("measure", measure))
    monkeypatch.setattr(Engine, "_step", watched)
    model = build(name, torch.bfloat16)
    engine = Engine(model, rows=16, pages=400)
    engine.put_off()
    cold = [said(engine, rows, **kind) for rows in (1, 5, 16)]
    assert not made and engine.cold
    while engine.warm():
        pass
    assert {what for what, _ in made} >= {"record"} and not any(waits for _, waits in made)
    # Prompts of a size are recorded when they come again: met once, wanted, recorded, played.
    for _ in range(3):
        warm = [said(engine, rows, **kind) for rows in (1, 5, 16)]
        while engine.warm():
            pass
    assert not any(waits for _, waits in made) and not engine.cold
    assert [[len(ids) for ids in each] for each in warm] == [[9] * rows for rows in (1, 5, 16)]
    # The first forms and the fastest add up in another order; most tokens are the same.
    pairs = [(a, b) for x, y in zip(cold, warm) for p, q in zip(x, y) for a, b in zip(p, q)]
    assert sum(a == b for a, b in pairs) > 0.5 * len(pairs)


def test_a_warmed_model_records_no_step_in_front_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, record = list[Any](), Recorder.record

    def noted(self: Recorder, key: Any, call: Any) -> None:
        keys.append(key)
        record(self, key, call)

    model = build("gqa", torch.bfloat16)
    done = warm(model, rows=16, memory=2**28)
    assert done.graphs > 0 and done.length == 512
    monkeypatch.setattr(Recorder, "record", noted)
    engine = Engine(model, rows=16, memory=2**28)
    for rows in (1, 5, 16):
        said(engine, rows)
        said(engine, rows, temperature=1.0)
    assert not [key for key in keys if key[0] == "step"]
    # A second time nothing is left to compile or to measure.
    assert warm(model, rows=16, memory=2**28)[:2] == (0, 0)
