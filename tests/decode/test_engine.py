"""A request's text is its own: whoever its neighbours are, in whatever pieces, pages and order it is made.

Models are float64, so that texts can be asked to be equal: see tiny.py.
"""

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from regard.cache import OutOfPages
from regard.decode import engine as module
from regard.decode.engine import Engine
from regard.decode.scheduler import Scheduler
from regard.decode.settings import Event, Request, Settings
from regard.errors import UsageError
from tests.decode.tiny import (
    MODELS,
    answers,
    full,
    model,
    prompts,
    request,
    run,
    tokens_of,
)
from tests.wide import crossed

ENDS = (3, 5)
GREEDY = Settings(
    max_new_tokens=12, eos=ENDS, frequency_penalty=0.8
)  # a penalty, for a text that varies
SEEDED = Settings(max_new_tokens=12, eos=ENDS, temperature=0.9, top_p=0.97, seed=4)
SAMPLES = Settings(max_new_tokens=10, eos=ENDS, temperature=1.1, samples=3, seed=2)
BEAMS = Settings(max_new_tokens=12, eos=ENDS, beams=3, n_best=3, length_penalty=0.8)
SHORT = Settings(max_new_tokens=4, eos=ENDS, beams=2, early_stopping="first")
ASKED = list(
    zip(
        [[7, 1, 2, 7, 1, 2, 9], *prompts((3, 9, 1, 6, 2, 8)), [7, 1, 2, 7, 1, 2, 9, 4]],
        [GREEDY, BEAMS, SEEDED, GREEDY, SAMPLES, SHORT, BEAMS, SEEDED],
        strict=True,
    )
)
TIGHT = {"page": 4, "pages": 14}  # what the largest request needs alone


@functools.cache
def alone(name: str) -> list[list[list[int]]]:
    """Each request by itself in an engine of its own, with a contiguous cache."""
    found = []
    for i, (prompt, settings) in enumerate(ASKED):
        engine = Engine(model(name), layout="contiguous")
        engine.submit(request(name, prompt, settings, key=i))
        found.append([r.ids for r in run(engine)[0]])
    return found


VARIED: dict[str, dict[str, Any]] = {
    "together": {},
    "shuffled": {"order": [4, 7, 0, 5, 2, 6, 1, 3]},
    "one_row": {"rows": 1},
    "chunks_of_1": {"chunk": 1},
    "pages_of_1": {"page": 1, "pages": 500},
    "contiguous": {"layout": "contiguous"},
    "contiguous_chunks": {"layout": "contiguous", "chunk": 5, "rows": 7},
    "no_prefix": {"prefix": False},
    "preempted": TIGHT,
    "preempted_pages_of_2": {"page": 2, "pages": 26, "chunk": 6, "prefix": False},
}


@pytest.mark.parametrize("name, how", crossed(MODELS, VARIED))
def test_text_is_the_same(name: str, how: str) -> None:
    assert answers(name, ASKED, **VARIED[how]) == alone(name)


def test_texts_of_the_table_vary_and_end_both_ways() -> None:
    """Else the test above would hold for an engine that mixes its rows up."""
    for name in MODELS:
        ids = [tuple(text) for each in alone(name) for text in each]
        assert len(set(ids)) >= 10
        assert len({len(text) for text in ids}) > 2


@pytest.mark.parametrize("name", ["mla", "pair", "twin", "lstm_attention"])
def test_text_is_the_same_for_late_arrivals(name: str) -> None:
    engine = Engine(model(name), page=4, pages=200, chunk=6)
    numbers, found = {}, {}
    for i, (prompt, settings) in enumerate(ASKED):
        numbers[engine.submit(request(name, prompt, settings, key=i))] = i
        for _ in range(i % 3):
            found |= {e.request: e.done for e in engine.step() if e.done}
    found |= run(engine)
    assert {numbers[n]: [r.ids for r in done] for n, done in found.items()} == dict(
        enumerate(alone(name))
    )


# --- preemption ---------------------------------------------------------------------------------------------------


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The requests that were preempted, in order."""
    found: list[int] = []
    preempt = Scheduler.preempt_last

    def noted(self: Scheduler) -> None:
        preempt(self)
        found.append(self.waiting[0].number)

    monkeypatch.setattr(Scheduler, "preempt_last", noted)
    return found


def shown(events: list[Event], asked: list[tuple[list[int], Settings]]) -> list[list[list[int]]]:
    """The ids of all results; of samples, what a reader of events saw was the same, token by token."""
    done = {e.request: [r.ids for r in e.done] for e in events if e.done is not None}
    assert sorted(done) == list(range(len(asked)))
    assert sum(e.done is not None for e in events) == len(asked)
    for number, (_, settings) in enumerate(asked):
        seen = [tokens_of(events, number, k) for k in range(settings.samples)]
        assert seen == (done[number] if settings.beams == 1 else [[]])
    return [done[i] for i in range(len(asked))]


@pytest.mark.parametrize("name, seed", crossed(MODELS, [1, 2]))
def test_text_is_the_same_when_preempted_at_any_step(
    name: str, seed: int, put_back: list[int]
) -> None:
    """The youngest request is put back at random steps: while it is read, while it writes, again and again. No token
    is shown twice."""
    rng = random.Random(seed)
    engine = Engine(model(name), page=4, pages=200, chunk=5)
    for i, (prompt, settings) in enumerate(ASKED):
        engine.submit(request(name, prompt, settings, key=i))
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
        running = len(list(engine.scheduler.running()))
        if running > 1 and rng.random() < 0.5:
            with torch.inference_mode():
                engine.scheduler.preempt_last()
    assert shown(events, ASKED) == alone(name)
    assert put_back
    full(engine.pool)


@pytest.mark.parametrize(
    "name, prefix",
    crossed(["gqa_rope", "dsa_mla", "pair", "twin", "lstm_attention"], [True, False]),
)
def test_pool_too_small_for_all_preempts_and_says_the_same(
    name: str, prefix: bool, put_back: list[int]
) -> None:
    """Prompts are short and texts long: more are let in than can be brought to an end together."""
    kinds = [
        Settings(max_new_tokens=30, frequency_penalty=0.8),
        Settings(max_new_tokens=14, temperature=1.0, samples=3),
        Settings(max_new_tokens=30, temperature=1.0),
        Settings(max_new_tokens=14, beams=3, n_best=2),
    ]
    asked = [(p, kinds[i % 4]) for i, p in enumerate(prompts((2, 3, 1, 2, 5, 2, 3, 2)))]
    engine = Engine(model(name), page=4, pages=16, prefix=prefix)
    for i, (prompt, settings) in enumerate(asked):
        engine.submit(request(name, prompt, settings, key=i))
    found = shown(list(engine.run()), asked)
    assert found == answers(name, asked)
    assert len(put_back) > 3
    assert 0 not in put_back  # the oldest always goes on, so there is an end
    full(engine.pool)


def test_source_that_finds_no_page_leaves_none_behind() -> None:
    """The text's own pages go back too; in an engine the request waits until another is through."""
    pair, settings = model("twin"), Settings(max_new_tokens=2)
    cache, ids = pair.cache(1, "paged", pages=3, page=4), torch.tensor([[0, 1]])
    with pytest.raises(OutOfPages):
        pair(ids, source=torch.arange(9)[None], cache=cache)
    assert cache.cross is None and cache.even == 0
    full(cache.pool)
    want = pair(ids, source=torch.arange(8)[None])
    torch.testing.assert_close(pair(ids, source=torch.arange(8)[None], cache=cache), want)
    assert cache.pool.available == 0
    cache.free()
    full(cache.pool)
    asked = [(p, settings) for p in prompts((8, 7, 5, 6))]
    for chunk in (1, 512):
        assert answers("twin", asked, page=4, pages=4, chunk=chunk) == answers("twin", asked)


def test_request_is_stopped_while_its_source_is_read() -> None:
    engine = Engine(model("twin"), page=4, pages=60, chunk=1)
    numbers = [
        engine.submit(Request([1, 2, 3, 4], s, source=torch.arange(5))) for s in (SAMPLES, BEAMS)
    ]
    engine.step()
    assert engine.pool is not None and sum(engine.pool.users) >= 3
    for number in numbers:
        engine.cancel(number)
    full(engine.pool)


def test_samples_that_were_put_back_read_their_source_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, read = model("twin"), []
    encode = type(pair).encode
    monkeypatch.setattr(
        type(pair), "encode", lambda self, x, *a, **k: read.append(len(x)) or encode(self, x, *a, **k)
    )  # fmt: skip
    settings = Settings(max_new_tokens=9, temperature=1.0, samples=4)
    engine = Engine(pair, page=4, pages=60)
    engine.submit(request("twin", [1, 2, 3, 4, 5], settings))
    for _ in range(3):
        engine.step()
    with torch.inference_mode():
        engine.scheduler.preempt(next(engine.scheduler.running()))
    found = run(engine)[0]
    assert read == [1, 1]
    assert [[r.ids for r in found]] == answers("twin", [([1, 2, 3, 4, 5], settings)])


@pytest.mark.parametrize("name, runner", crossed(["gqa_rope", "twin"], ["torch", "graph"]))
def test_pool_that_just_fits_a_request_runs_it_to_its_end(name: str, runner: str) -> None:
    """`check_pages` is exact: with one page fewer the request is refused, with as many it runs alone, again after it
    was put back. Of a pair the prompt is a source, which all rows share."""
    for settings in (
        Settings(max_new_tokens=9),
        Settings(max_new_tokens=9, temperature=2.0, samples=5),
        Settings(max_new_tokens=9, beams=5, n_best=5),
        Settings(max_new_tokens=9, lookup=4),
        Settings(max_new_tokens=8, beams=3),
    ):
        for size in (1, 3, 4, 5, 6) if settings.max_new_tokens == 9 else (1, 5):
            (prompt,) = prompts((size,))
            source = -(-size // 4) if name == "twin" else 0
            text = 1 if source else size
            new = settings.max_new_tokens
            full_pages, pages = text // 4, -(-(text + new - 1) // 4)
            need = source + full_pages + settings.rows * (pages - full_pages)
            if runner == "graph" and settings.beams > 1:
                # They feed the last token of the prompt, each to a page of its own.
                need = source + -(-(text - 1) // 4) + settings.beams * -(-new // 4)
            how: Any = {"runner": runner, "page": 4}
            engine = Engine(model(name), pages=need, prefix=size % 2 > 0, **how)
            if engine.graph is not None:
                engine.graph.steps.look = 1
            engine.submit(request(name, prompt, settings))
            for _ in range(4):
                engine.step()
            with torch.inference_mode():
                engine.scheduler.preempt(next(engine.scheduler.running()))
            full(engine.pool)
            # Another takes the pages that it left.
            (other,) = prompts((size,), seed=9)
            engine.submit(request(name, other, settings, priority=1))
            found = run(engine)
            want = Engine(model(name), layout="contiguous")
            want.submit(request(name, prompt, settings))
            assert [r.ids for r in found[0]] == [r.ids for r in run(want)[0]] and len(found) == 2
            full(engine.pool)
            small = Engine(model(name), pages=need - 1, **how)
            with pytest.raises(
                UsageError, match=f"need {need} pages of 4, the pool has {need - 1}"
            ):
                small.submit(request(name, prompt, settings))


def test_engine_and_trainer_ask_one_function_for_free_memory() -> None:
    """Within the limits of control groups; the engine once read the machine's whole memory."""
    from regard import machine
    from regard.decode import engine, generate
    from regard.training import plan

    assert engine.free_memory is generate.free_memory is plan.free_memory is machine.free_memory


# --- what nobody says -------------------------------------------------------------------------------------------------


def test_a_chunk_is_larger_in_a_graph() -> None:
    for runner, chunk in (("torch", 512), ("graph", 16384)):
        assert Engine(model("gqa_rope"), runner=runner, page=4, pages=20).chunk == chunk
        assert Engine(model("gqa_rope"), runner=runner, page=4, pages=20, chunk=7).chunk == 7


def test_states_alone_take_no_pages() -> None:
    """But in a graph one for each row, and one for who comes while it is given up: as large as a text may be."""
    for name in ("gru", "delta"):
        assert Engine(model(name), rows=3).pool is None
    pool = Engine(model("delta"), runner="graph", rows=3).pool
    assert pool is not None and len(pool.users) == 6 and pool.page >= 64 and pool.nbytes == 0


def test_threads_are_as_many_as_a_step_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its weights, for each row that runs or token that is read, up to a chunk."""
    asked = list[int]()

    @contextlib.contextmanager
    def threads_for(work: int) -> Iterator[None]:
        asked.append(work)
        yield

    monkeypatch.setattr(module, "threads_for", threads_for)
    made = model("gqa_rope")
    weights = sum(p.numel() for p in made.parameters())
    engine = Engine(made, chunk=8, prefix=False)
    for size in (5, 2):
        engine.submit(request("gqa_rope", [1] * size, Settings(max_new_tokens=4)))
    engine.step()
    engine.submit(request("gqa_rope", [1] * 11, Settings(max_new_tokens=3, beams=4)))
    while not engine.idle:
        engine.step()
    # 7 tokens are read; then 8 of 11; then 3, beside two rows that write and 4 beams that will; then these alone.
    assert asked[:3] == [7 * weights, 8 * weights, 6 * weights] and asked[-1] == 4 * weights
