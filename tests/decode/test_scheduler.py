"""The scheduler alone, without a model: random operations beside a small model of what it promises."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from regard.cache import BlockTable, OutOfPages, PagePool
from regard.decode.batch import Batch, Reading
from regard.decode.scheduler import Scheduler, Snapshot
from regard.decode.sequence import Sequence, Slot, State
from regard.decode.settings import Event, Request, Settings


class Counting(Batch):
    """Rows that say how many tokens their texts have, in pages of books without memory."""

    def _adopt(self, slot: Slot) -> None:
        keys = self._adoptable(slot)
        slot.sequence.keys = keys[: slot.pages.adopt(keys)]
        slot.fed = len(slot.pages) * self.pool.page

    def _slot(self, row: Sequence) -> Slot:
        slot = super()._slot(row)
        if self.pool is not None:
            slot.pages = BlockTable(self.pool)
        return slot

    def _reserve(self, slot: Slot, tokens: int) -> None:
        if self.pool is not None:
            slot.pages.reserve(tokens)

    def _read(self, group: list[tuple[Slot, int]]) -> None:
        for slot, size in group:
            slot.fed += size
            if slot.fed == len(slot.text):
                others, slot.siblings = slot.going(), []
                for s in (slot, *others):
                    self._reserve(s, len(s.text))
                    s.fed, s.scheduled, s.state = len(s.text), 1, State.RUNNING
                    self._say(s)

    def _say(self, slot: Slot) -> None:
        self.events += slot.sequence.append_token(slot.sequence.size, 0.0, [])

    def step(self) -> None:
        for slot in [s for s in self.slots if s.scheduled and not s.over]:
            self._reserve(slot, slot.sequence.size)
            self._say(slot)
            if self.prefix:
                self._publish(slot, slot.pages)

    def _release(self, slot: Slot) -> None:
        slot.pages.release()


class Fault(Exception):
    """Planted."""


def turn(scheduler: Scheduler, faulty: Callable[[], bool] | None = None) -> list[Event]:
    """A step as the engine makes one. `faulty` says whether it raises."""
    events = scheduler.expired()
    for _, rows, keys in scheduler.admit():
        pool: Any = scheduler.pool
        batch = scheduler.batches.get(0) or Counting(
            pool, Reading(scheduler.prefix, 16, scheduler.scores)
        )
        scheduler.enter(0, batch, rows, keys)
    for batch in list(scheduler.batches.values()):
        for part in (batch.prepare, batch.step):
            while batch.slots:
                try:
                    part()
                    break
                except OutOfPages:
                    scheduler.preempt_last()
            said, batch.events = batch.events, []
            events += said + scheduler.settle(batch)
    if faulty is not None and faulty():
        raise Fault
    if scheduler.trials.groups:
        scheduler.judge()
    return scheduler.done(events)


@dataclass
class Promise:
    """Who runs, where only rows are short: the first by rank, as many as fit, and nobody of a later rank beside one
    who waits."""

    rows: int
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)

    def free(self) -> int:
        return self.rows - sum(r.settings.rows for r in self.running)

    def admit(self) -> None:
        free = self.free()
        for request in sorted(self.waiting, key=lambda r: r.rank):
            while request.settings.rows > free:
                later = [r for r in self.running if r.rank[:2] > request.rank[:2]]
                if not later:
                    break
                last = max(later, key=lambda r: r.rank)
                self.running.remove(last)
                self.waiting.append(last)
                free += last.settings.rows
            if request.settings.rows > free:
                break
            free -= request.settings.rows
        for request in sorted(self.waiting, key=lambda r: r.rank):
            if request.settings.rows > self.free() and self.running:
                break
            self.waiting.remove(request)
            self.running.append(request)

    def over(self, number: int) -> None:
        self.waiting = [r for r in self.waiting if r.number != number]
        self.running = [r for r in self.running if r.number != number]


def asked(rng: random.Random, most: int, longest: int, tokens: int) -> Request:
    """A random request; texts begin alike at times."""
    ids = [rng.randrange(3)] * rng.randint(1, longest)
    samples = rng.randint(1, most) if rng.random() < 0.3 else 1
    settings = Settings(
        max_new_tokens=rng.randint(1, tokens), samples=samples, temperature=float(samples > 1)
    )
    return Request(ids, settings, priority=rng.choice((0, 0, 0, 1, 2)))


def whole(request: Request) -> list[list[int]]:
    """What its samples say, whenever they run."""
    size, count = len(request.ids), request.settings.max_new_tokens
    return [list(range(size, size + count))] * request.settings.samples


@pytest.mark.parametrize("seed", range(2))
def test_who_runs_is_who_the_ranks_say(seed: int) -> None:
    """Where rows alone are short."""
    rng = random.Random(seed)
    scheduler, promise = Scheduler(4), Promise(4)
    requests, done = dict[int, Request](), dict[int, Any]()
    for _ in range(2500):
        kind = rng.random()
        if kind < 0.25 and len(promise.waiting) < 12:
            request = asked(rng, 3, 20, 6)
            requests[scheduler.submit(request)] = request
            promise.waiting.append(request)
        elif kind < 0.3 and requests:
            number = rng.choice([*requests])
            events = scheduler.done(scheduler.stop(number, "cancelled"))
            assert len(events) == (number not in done)
            done |= {event.request: event.done for event in events}
            promise.over(number)
        else:
            promise.admit()
            events = turn(scheduler)
            now = {request.number for request in scheduler.running()}
            ended = {event.request for event in events if event.done is not None}
            assert now | ended == {request.number for request in promise.running}
            assert sum(slot.times for slot in scheduler.slots()) <= scheduler.rows
            for event in events:
                if event.done is not None:
                    assert [r.ids for r in event.done] == whole(requests[event.request])
                    done[event.request] = event.done
                    promise.over(event.request)
        assert [r.number for r in scheduler.waiting] == [
            r.number for r in sorted(promise.waiting, key=lambda r: r.rank)
        ]
    while not scheduler.idle:
        done |= {e.request: e.done for e in turn(scheduler) if e.done is not None}
    assert done.keys() == requests.keys()
    assert not (scheduler.resumed or scheduler.finished or scheduler.deadlines)


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_lost_where_pages_are_short_and_steps_raise(seed: int) -> None:
    """Each request ends once, with the text that it has alone; pages are held by rows that run, or by nobody."""
    rng = random.Random(100 + seed)
    pool = PagePool(32, 4)
    scheduler = Scheduler(6, pool=pool, prefix=True)
    requests, done = dict[int, Request](), dict[int, Any]()

    def take(events: list[Event]) -> None:
        for event in events:
            if event.done is not None:
                assert event.request not in done
                done[event.request] = event.done

    for _ in range(2500):
        kind = rng.random()
        if kind < 0.25 and len(scheduler.waiting) < 12:
            request = asked(rng, 3, 24, 12)
            requests[scheduler.submit(request)] = request
        elif kind < 0.28 and requests:
            take(scheduler.done(scheduler.stop(rng.choice([*requests]), "cancelled")))
        elif kind < 0.31 and len(list(scheduler.running())) > 1:
            scheduler.preempt_last()
        else:
            before = Snapshot.of(scheduler)
            said = {id(row): list(row.ids) for row, _ in before.lengths}
            try:
                take(turn(scheduler, lambda: rng.random() < 0.05))
            except Fault:
                before.restore(scheduler)
                pool.clear()
                assert all(row.ids == said[id(row)] for row, _ in before.lengths)
                fault = scheduler.blame(short=rng.random() < 0.5)
                if fault is not None:
                    take(scheduler.done(scheduler.stop(fault, "error", "planted")))
        pool.check(slot.pages for slot in scheduler.slots())
        assert sum(slot.times for slot in scheduler.slots()) <= scheduler.rows
        assert 1 <= scheduler.cap <= scheduler.rows
        ranks = [request.rank for request in scheduler.waiting]
        assert ranks == sorted(ranks)
    for _ in range(3000):
        take(turn(scheduler))
        if scheduler.idle:
            break
    assert done.keys() == requests.keys() and pool.available == len(pool.users)
    # Where as many rows are tried as ever, nothing is done otherwise than ever.
    assert scheduler.careful == (scheduler.cap < scheduler.rows)
    for number, results in done.items():
        for result, ids in zip(results, whole(requests[number]), strict=False):
            assert result.ids == ids[: len(result.ids)]
            assert result.finish != "length" or result.ids == ids
    assert not (scheduler.resumed or scheduler.finished or scheduler.deadlines)


def test_rows_are_tried_apart_until_the_one_at_fault_is_alone() -> None:
    scheduler, found = Scheduler(8), list[int | None]()
    numbers = [scheduler.submit(Request([i], Settings(max_new_tokens=50))) for i in range(8)]
    while not any(found):
        before = Snapshot.of(scheduler)
        try:
            turn(scheduler, lambda: numbers[5] in {r.number for r in scheduler.running()})
        except Fault:
            before.restore(scheduler)
            found.append(scheduler.blame(short=False))
    # Of eight, four, two and one.
    assert found == [None, None, None, numbers[5]]


# --- prompts are read a chunk at a time -----------------------------------------------------------------------------


class Noting(Counting):
    """Notes what is read together, as (number, tokens); `reads` are the lengths of sources."""

    def __init__(self, chunk: int, sources: tuple[int, ...]):
        super().__init__(None, Reading(chunk=chunk))
        self.reads, self.passes = sources, list[list[tuple[int, int]]]()

    def _source(self, slot: Slot) -> int:
        number = slot.sequence.request.number
        return self.reads[number] if self.reads and not slot.fed else 0

    def _read(self, group: list[tuple[Slot, int]]) -> None:
        self.passes.append([(slot.sequence.request.number, size) for slot, size in group])
        super()._read(group)


@pytest.mark.parametrize(
    "chunk, sizes, sources, chunks",
    [
        # One after the other, and the rest.
        (8, (20,), (), [[[(0, 8)]], [[(0, 8)]], [[(0, 4)]]]),
        # What fits is read whole; apart, where the shorter one would be padded past a chunk.
        (8, (4, 4), (), [[[(0, 4), (1, 4)]]]),
        (8, (6, 2), (), [[[(0, 6)], [(1, 2)]]]),
        # Where that is not all the first has half, and those with the least left have the rest.
        (
            8, (20, 2, 3), (),
            [[[(0, 4), (1, 2)], [(2, 2)]], [[(0, 4), (2, 1)]], [[(0, 8)]], [[(0, 4)]]],
        ),
        (
            7, (20, 9, 2), (),
            [
                [[(0, 4)], [(2, 2), (1, 1)]], [[(0, 4)], [(1, 3)]], [[(0, 4)], [(1, 3)]],
                [[(0, 4)], [(1, 2)]], [[(0, 4)]],
            ],
        ),
        (12, (5, 9, 4, 4), (), [[[(0, 5), (2, 4)], [(3, 3)]], [[(1, 9)], [(3, 1)]]]),
        # Sources are read with the first of their texts, whole: who does not fit waits.
        (10, (1, 1, 1), (6, 3, 4), [[[(0, 1)]], [[(1, 1), (2, 1)]]]),
        (10, (1, 2, 1), (15, 7, 1), [[[(0, 1)]], [[(1, 2)]], [[(2, 1)]]]),
        (12, (1, 2, 1), (15, 7, 1), [[[(0, 1)]], [[(1, 2)], [(2, 1)]]]),
    ],
)  # fmt: skip
def test_a_chunk_is_shared_by_rank_and_by_what_is_left(
    chunk: int,
    sizes: tuple[int, ...],
    sources: tuple[int, ...],
    chunks: list[list[list[tuple[int, int]]]],
) -> None:
    batch, found = Noting(chunk, sources), []
    for number, size in enumerate(sizes):
        batch.admit([Sequence(Request([1] * size, number=number), 0)])
    while batch.unread():
        batch.passes = []
        batch.prepare()
        found.append(batch.passes)
    assert found == chunks


# --- a row ------------------------------------------------------------------------------------------------------------


def test_random_numbers_of_samples_are_apart() -> None:
    """By the key of their request, or its number where it has none; 1,024 samples at most have neighbouring ones."""
    s = Settings(samples=1024, temperature=1.0)
    for request, first in (
        (Request([1], s, number=3), 3),
        (Request([1], s, number=3, key=0), 0),
        (Request([1], s, number=3, key=-7), -7),
    ):
        found = [Sequence(request, sample).key for sample in range(1024)]
        assert found == list(range(first * 1024, (first + 1) * 1024))


def test_a_row_that_is_rolled_back_is_as_it_was() -> None:
    row, events = Sequence(Request([1], Settings(max_new_tokens=4, top_logprobs=1)), 0), []
    for token in (5, 6, 7, 8):
        row.guess, row.guessed = [9], len(row.ids)
        events += row.append_token(token, -0.5 * token, [(token, -0.5), (0, -1.0)])
    assert row.finish == "length" and [e.token for e in events] == [5, 6, 7, 8]
    row.keys = [b"page"]
    row.rollback(2)
    assert (row.ids, row.logprobs, row.tops) == ([5, 6], [-2.5, -3.0], [[(5, -0.5)], [(6, -0.5)]])
    assert (row.finish, row.error, row.keys, row.index) == ("", None, [], None)
    # What it guessed is not known any more, however much it has said.
    assert row.guess == [] and row.guessed < 0
    assert row.result().ids == [5, 6] and row.result().score == -5.5
