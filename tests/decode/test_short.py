"""Too little memory on the device: fewer rows run, who needs too much ends with an error, the others are answered."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.decode.engine import Engine
from regard.decode.settings import Settings
from tests.decode.test_steps import Fragile
from tests.decode.tiny import Counted, answers, full, model, prompts, request, tokens_of

KINDS = [
    Settings(max_new_tokens=8),
    Settings(max_new_tokens=7, temperature=1.0, samples=3, eos=(3, 5)),
    Settings(max_new_tokens=6, beams=3, n_best=2),
    Settings(max_new_tokens=9, lookup=3),
]
ASKED = list(zip(prompts((9, 3, 4, 6)), KINDS, strict=True))


class Small(Counted):
    """A device on which so many tokens at once are too many."""

    most = 0

    def _count(self, ids: Tensor, lengths: Any, logits: Tensor) -> Tensor:
        if ids.numel() > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super()._count(ids, lengths, logits)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("most", [9, 12, 24])
def test_fewer_rows_run_where_memory_is_short(most: int, layout: str) -> None:
    """Each would fit alone, all together do not: nobody ends with an error."""
    small = Small(model("gqa_rope"))
    small.most = most
    engine = Engine(small, layout=layout, page=4, pages=80, chunk=most)
    asked = [*ASKED, *ASKED, *ASKED]
    for i, (prompt, settings) in enumerate(asked):
        engine.submit(request("gqa_rope", prompt, settings, key=i))
    events = list(engine.run())
    done = {e.request: e.done for e in events if e.done}
    assert [[r.ids for r in done[i]] for i in range(len(asked))] == answers("gqa_rope", asked)
    for i, (_, s) in enumerate(asked):
        if s.beams == 1:
            assert [tokens_of(events, i, k) for k in range(s.samples)] == [r.ids for r in done[i]]
    assert engine.idle and not (engine.scheduler.finished or engine.scheduler.resumed)
    full(engine.pool)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_request_that_needs_too_much_ends_alone(layout: str) -> None:
    """A prompt that no pass can read, and beams that no step can hold; the others are answered, those that come later
    too."""
    small = Small(model("gqa_rope"))
    small.most = 8
    engine = Engine(small, layout=layout, page=4, pages=80, chunk=8)
    large = Settings(max_new_tokens=4, beams=9)
    asked = [([1, 2], KINDS[0]), ([3, 4], large), ([5], KINDS[0]), ([6, 7], KINDS[0])]
    for i, (prompt, settings) in enumerate(asked):
        engine.submit(request("gqa_rope", prompt, settings, key=i))
    done = {e.request: e.done for e in engine.run() if e.done}
    want = answers("gqa_rope", asked)
    assert [[r.ids for r in done[i]] for i in (0, 2, 3)] == [want[i] for i in (0, 2, 3)]
    (failed,) = done[1]
    assert failed.finish == "error" and failed.ids == []
    assert failed.error == (
        "out of memory on cpu: make the engine with fewer rows=, a smaller memory= or chunk=, or shorten the request"
    )
    engine.submit(request("gqa_rope", [1, 2], KINDS[0], key=0))
    assert [[r.ids for r in e.done] for e in engine.run() if e.done] == [want[0]]
    full(engine.pool)


@pytest.mark.parametrize("every", range(1, 9))
def test_short_memory_at_every_kth_pass_hurts_nobody_else(every: int) -> None:
    """Who ends with an error keeps what it had said; all others are answered as ever."""
    passes = iter(range(1, 10**6))
    fault = torch.OutOfMemoryError
    fragile = Fragile(model("gqa_rope"), lambda: fault("no") if next(passes) % every == 0 else None)
    engine = Engine(fragile, page=4, pages=60, chunk=12)
    for i, (prompt, settings) in enumerate(ASKED):
        engine.submit(request("gqa_rope", prompt, settings, key=i))
    events = list(engine.run())
    done = {e.request: e.done for e in events if e.done}
    for i, want in enumerate(answers("gqa_rope", ASKED)):
        for k, (r, ids) in enumerate(zip(done[i], want, strict=True)):
            ended = r.finish == "error"
            assert "out of memory" in r.error if ended else r.ids == ids
            assert r.ids == ids[: len(r.ids)] or ASKED[i][1].beams > 1
            assert ASKED[i][1].beams > 1 or tokens_of(events, i, k) == r.ids
    assert every > 1 or all(r.finish == "error" for each in done.values() for r in each)
    full(engine.pool)


def test_short_memory_in_a_graph_hurts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model("gqa_rope"), runner="graph", page=4, pages=60)
    runner, calls, raised = engine.graph.steps, iter(range(1, 10**6)), []
    run, runner.look = runner.run, 2

    def short(*args: Any) -> Any:
        # Alone, it would be the request's own fault.
        if len(engine.graph.batches[None].requests()) > 1 and (call := next(calls)) in (2, 3, 5):
            raised.append(call)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(*args)

    monkeypatch.setattr(runner, "run", short)
    asked = [(p, KINDS[i % 2]) for i, (p, _) in enumerate(ASKED)]
    for i, (prompt, settings) in enumerate(asked):
        engine.submit(request("gqa_rope", prompt, settings, key=i))
    done = {e.request: e.done for e in engine.run() if e.done}
    assert [[r.ids for r in done[i]] for i in range(4)] == answers("gqa_rope", asked)
    assert len(raised) == 3
    full(engine.pool)
