"""Who is served next. It knows neither a model nor a device: requests, rows, and the books of the pages.

Requests wait by their rank: those of the highest priority first, of them the oldest. The next ones enter as long as
rows and pages have room for them; where they have none, whoever is of a later rank is put back into the queue, and goes
on later with the same text. The first is never put back for pages, so there is always progress. With `patience`, where
all rows are taken and somebody has waited for so long, the one that has had its row the longest waits instead, if it
has come further since: long answers take turns, and short ones need not wait for their end.

A step is all or nothing: after one that raised, everything is as a `Snapshot` found it, and who is at fault is found
out by trials (trials.py).
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import abc
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from regard.cache import PagePool
from regard.decode.batch import Batch
from regard.decode.sequence import Scores, Sequence, Slot, State, page_keys, unscored
from regard.decode.settings import Event, Request, Result
from regard.decode.trials import Trials

RANK = attrgetter("rank")
LATEST = 6  # turn up to which patience doubles


class Scheduler:
    """The queue, the batches of those that run, and the room that is left: `rows`, and pages of `pool` where there are
    any. `longest` is the model's context, `source_pages` says how many pages a request's source takes."""

    def __init__(
        self,
        rows: int,
        *,
        pool: PagePool | None = None,
        prefix: bool = False,
        patience: float = math.inf,
        longest: int | None = None,
        border: int | None = None,
        source_pages: Callable[[Request], int] | None = None,
    ) -> None:
        self.rows, self.pool, self.prefix, self.patience = rows, pool, prefix, patience
        self.longest, self.border = longest, border
        self.source_pages = source_pages or (lambda request: 0)
        self.waiting: list[Request] = []  # by rank
        self.batches: dict[tuple[str, Hashable], Batch] = {}  # by runner and kind
        # Rows of preempted requests, to go on where they were.
        self.resumed: dict[int, list[Sequence]] = {}
        self.finished: dict[int, dict[int, Result]] = {}  # samples of requests whose others go on
        self.deadlines: dict[int, float] = {}  # of requests that are not done
        self.scores: dict[int, Scores] = {}  # of prompts whose log probabilities are asked for
        self.count = 0
        self.cap = rows  # fewer after memory was short
        # Since a step raised: nobody comes before what is through has been read.
        self.careful = False
        self.trials = Trials()

    # --- the queue ---

    def submit(self, request: Request) -> int:
        """Queue a request; its number names it from now on."""
        request.number, request.since = self.count, time.monotonic()
        self.count += 1
        insort(self.waiting, request, key=RANK)
        if request.deadline is not None:
            self.deadlines[request.number] = request.deadline
        return request.number

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.batches)

    def running(self) -> Iterator[Request]:
        """Each request that has rows, once for each batch."""
        for batch in self.batches.values():
            yield from batch.requests()

    def slots(self) -> Iterator[Slot]:
        """Of every batch."""
        for batch in self.batches.values():
            yield from batch.slots

    def load(self) -> tuple[int, int]:
        """Rows that run, and tokens of prompts that are not through."""
        rows = sum(slot.times for slot in self.slots())
        waiting = [slot for batch in self.batches.values() for slot in batch.unread()]
        return rows, sum(len(slot.text) - slot.fed for slot in waiting)

    def expired(self) -> list[Event]:
        """The ends of requests whose deadline has passed."""
        now = time.monotonic()
        late = [number for number, deadline in self.deadlines.items() if deadline <= now]
        return [event for number in late for event in self.stop(number, "deadline")]

    # --- who enters ---

    def admit(self) -> Iterator[tuple[Request, list[Sequence], list[bytes]]]:
        """The next requests, as many as fit, each with its rows and the keys of the pages that their texts have in
        common. Each has entered a batch before the next one is asked for."""
        if not self.waiting:
            return
        if not self.trials.groups:
            self._make_room()
        rows, pages = self.room()
        # Keys of the pages that others will publish.
        reading = (slot for slot in self.slots() if slot.state is State.PREFILL)
        coming = {key for slot in reading for key in slot.keys}
        for request in list(self.waiting):
            if not self.trials.admit(request.number):
                continue
            # Alone it may enter however large.
            if not self.fits(request, rows, pages) and self.batches:
                break
            keys, lacks = self._keys(request)
            # If that page is about to be read for another, it waits, and takes the page over.
            if lacks in coming and not unscored(request, self.scores):
                continue
            coming.update(keys)
            rows, pages = rows - self.row_count(request), pages - self.page_count(request)
            self.waiting.remove(request)
            yield request, self.resumed.pop(request.number, []) or self._rows(request), keys

    def enter(
        self,
        key: tuple[str, Hashable],
        batch: Batch,
        rows: list[Sequence],
        keys: abc.Sequence[bytes],
    ) -> None:
        """Rows of a request into a batch, which this is the name of from its first request to its last."""
        request = rows[0].request
        request.since, request.had = time.monotonic(), max(len(row.ids) for row in rows)
        self.batches[key] = batch
        batch.admit(rows, keys)

    def _keys(self, request: Request) -> tuple[list[bytes], bytes | None]:
        """Keys of the full pages of what all its rows are fed first; and the first that nobody has published, of those
        that may be taken over."""
        if not self.prefix or self.pool is None or self._outgrown(request):
            return [], None
        rows, page = self.resumed.get(request.number, []), self.pool.page
        text = request.ids + (rows[0].ids if len(rows) == 1 else [])
        keys = page_keys(text, page, (rows or self._rows(request))[0].salt)
        wanted = keys[: (len(text) - 1) // page]
        known = self.pool.known(wanted)
        return keys, wanted[known] if known < len(wanted) else None

    def _make_room(self) -> None:
        """Put back who is of a later rank than those who wait, or has been served for long: room for all of these, so
        that nobody who comes behind many waits for as many steps."""
        rows, pages = self.room()
        for request in list(self.waiting):
            while not self.fits(request, rows, pages):
                later = [r for r in self.running() if r.rank[:2] > request.rank[:2]]
                later = later or long_served(request, self.slots(), self.patience)
                if not later:
                    return
                before = self.room()
                self.preempt(max(later, key=RANK))
                now = self.room()
                rows, pages = rows + now[0] - before[0], pages + now[1] - before[1]
            rows, pages = rows - self.row_count(request), pages - self.page_count(request)

    # --- rows and pages ---

    def room(self) -> tuple[int, int]:
        """Rows that are free, and pages. Every row that runs will soon want a page, and prompts that are read some:
        what is left is for those that come."""
        draining = None if self.careful else State.DRAINING
        taken = sum(slot.times for slot in self.slots() if slot.state is not draining)
        owed = taken + sum(batch.owed(self.source_pages) for batch in self.batches.values())
        return self.cap - taken, 0 if self.pool is None else self.pool.available - owed

    def fits(self, request: Request, rows: int, pages: int) -> bool:
        return self.row_count(request) <= rows and self.page_count(request) <= pages

    def row_count(self, request: Request) -> int:
        """Rows that a waiting request will have."""
        return len(self.resumed.get(request.number, ())) or request.settings.rows

    def page_count(self, request: Request) -> int:
        """Pages that a waiting request will take."""
        if self.pool is None or self._outgrown(request):
            return 0
        said = sum(len(row.ids) for row in self.resumed.get(request.number, ()))
        text = (len(request.ids) + said) // self.pool.page + 1 + self.row_count(request)
        return text + self.source_pages(request)

    def outgrown(self, rows: list[Sequence]) -> bool:
        """Whether a text is longer than the context."""
        return self.longest is not None and any(row.size > self.longest for row in rows)

    def _outgrown(self, request: Request) -> bool:
        return self.outgrown(self.resumed.get(request.number) or self._rows(request))

    def _rows(self, request: Request) -> list[Sequence]:
        count = request.settings.samples
        return [Sequence(request, i, window=self.longest, border=self.border) for i in range(count)]

    def progress(self) -> dict[int, int]:
        """How many tokens every running request has asked for, the fewest of its rows."""
        found: dict[int, int] = {}
        for slot in self.slots():
            number = slot.request.number
            asked = max(slot.said + slot.scheduled, len(slot.sequence.ids))
            found[number] = min(asked, found.get(number, asked))
        return found

    # --- taking requests out ---

    def settle(self, batch: Batch) -> list[Event]:
        """Hand out what is finished and drop its rows."""
        events: list[Event] = []
        over = batch.over()
        for i in over:
            row = batch.rows[i]
            if row.request.settings.beams > 1:
                events.append(Event(row.request.number, done=batch.results(i)))
                continue
            done = self.finished.setdefault(row.request.number, {})
            done[row.sample] = row.result()
            if len(done) == row.request.settings.samples:
                del self.finished[row.request.number]
                events.append(Event(row.request.number, done=[done[k] for k in sorted(done)]))
        if over:
            self._drop(batch, over)
        return events

    def done(self, events: list[Event]) -> list[Event]:
        """Requests that are done have no deadline, and their prompts' log probabilities are handed out; where memory
        was short, more rows are tried."""
        for event in events:
            if event.done is None:
                continue
            self.deadlines.pop(event.request, None)
            if (scores := self.scores.pop(event.request, None)) is not None:
                logprobs, tops = scores
                for result in event.done:
                    result.prompt_logprobs = logprobs
                    result.prompt_top_logprobs = tops if any(tops) else []
            self.cap = min(self.rows, self.cap + len(event.done))
            self.careful = self.careful and self.cap < self.rows
        return events

    def preempt_last(self) -> None:
        """Put the request of the last rank back; its pages are free."""
        running = list(self.running())
        assert len(running) > 1, "a request that fits the pool alone ran out of pages"
        self.preempt(max(running, key=RANK))

    def preempt(self, request: Request) -> None:
        """A request into the queue, whatever it is doing."""
        rows, _ = self.take(request)
        if rows:
            self.resumed[request.number] = rows
        request.since = time.monotonic()
        insort(self.waiting, request, key=RANK)

    def take(self, request: Request, why: str = "") -> tuple[list[Sequence], list[Result]]:
        """Free what a running request holds: its rows, or the results of its beams if it is stopped."""
        batch = next(x for x in self.batches.values() if request in x.requests())
        index = [i for i, row in enumerate(batch.rows) if row.request is request]
        rows, results = [batch.rows[i] for i in index], list[Result]()
        if request.settings.beams > 1:
            rows, results = [], batch.results(index[0], why) if why else []
        self._drop(batch, index)
        return rows, results

    def stop(self, number: int, why: str, error: str | None = None) -> list[Event]:
        """The end of a request, wherever it is; nothing if it is over."""
        every = (*self.waiting, *self.running())
        request = next((r for r in every if r.number == number), None)
        if request is None:
            return []
        if request in self.waiting:
            self.waiting.remove(request)
            rows: list[Sequence] = self.resumed.get(number, [])
            results: list[Result] = []
        else:
            rows, results = self.take(request, why)
        self.resumed.pop(number, None)
        done = self.finished.pop(number, {})
        if not results:
            s = request.settings
            done |= {
                i: Result([], [], 0.0, why, error=error)
                for i in range(max(s.samples, s.n_best))
                if i not in done
            }
            for row in rows:
                row.finish, row.error = why, error
                done[row.sample] = row.result()
            results = [done[i] for i in sorted(done)]
        return [Event(number, done=results)]

    def _drop(self, batch: Batch, index: list[int]) -> None:
        batch.drop(index)
        if not batch.slots:
            self.batches = {key: x for key, x in self.batches.items() if x is not batch}

    # --- steps that raise ---

    def blame(self, short: bool) -> int | None:
        """After a step that raised, for want of memory where it was `short`: the number of the request that ran alone.
        Of several that ran, fewer are tried from now on, or halves of them apart."""
        on_trial, tried = bool(self.trials.groups), self.trials.tried
        alone = self.trials.split(short)
        if alone is not None:
            if not short:
                self.cap = self.rows
        # If nobody is found, as it takes several to fail, they meet again as fewer.
        elif not on_trial or short:
            rows = [self.row_count(r) for r in self.waiting if r.number in tried]
            self.cap = max(1, sum(rows) // 2)
        return alone

    def judge(self) -> None:
        """When all on trial have come further than where a step raised, it is the others' turn, or everybody's."""
        if self.trials.judge(self.progress(), {r.number for r in self.waiting}):
            for request in list(self.running()) if self.trials.groups else ():
                self.preempt(request)


def long_served(first: Request, slots: Iterator[Slot], patience: float) -> list[Request]:
    """If one in the queue has waited long enough, twice as long for each turn that it has had: of those whose turn is
    not after its own, who has had its row for as long and the longest, if that has come further since; its turn is the
    next one from now on. A search would begin anew, so it goes on; and the late ones of a client's many prompts are no
    reason to put others back."""
    turn = first.rank[1]
    late = time.monotonic() - patience * 2 ** min(turn, LATEST)
    served: dict[int, Request] = {}
    if first.since > late or first.turn > LATEST:
        return []
    for slot in slots:
        request, plain = slot.request, slot.settings.beams == 1
        equal = request.priority == first.priority and request.rank[1] <= turn
        if plain and equal and len(slot.sequence.ids) > request.had:
            served[request.number] = request
    longest = min(served.values(), key=attrgetter("since"), default=None)
    if longest is None or longest.since > late:
        return []
    longest.yielded = turn + 1 - longest.turn
    return [longest]


@dataclass
class Snapshot:
    """What a step that raises must leave as it was."""

    first: int  # the number of the next request
    waiting: list[Request]
    resumed: dict[int, list[Sequence]]
    lengths: list[tuple[Sequence, int]]  # how many tokens each had said
    running: dict[int, Request]
    progress: dict[int, int]
    finished: dict[int, dict[int, Result]]
    deadlines: dict[int, float]
    scores: dict[int, Scores]

    @staticmethod
    def of(scheduler: Scheduler) -> Snapshot:
        """Before a step."""
        scheduler.trials.tried = {}
        resumed = dict(scheduler.resumed)
        for slot in scheduler.slots():
            # A search begins anew.
            if slot.settings.beams == 1:
                resumed.setdefault(slot.request.number, []).append(slot.sequence)
        return Snapshot(
            first=scheduler.count,
            waiting=list(scheduler.waiting),
            resumed=resumed,
            lengths=[(each, len(each.ids)) for some in resumed.values() for each in some],
            running={request.number: request for request in scheduler.running()},
            progress=scheduler.progress(),
            finished={number: dict(done) for number, done in scheduler.finished.items()},
            deadlines=dict(scheduler.deadlines),
            scores=dict(scheduler.scores),
        )

    def restore(self, scheduler: Scheduler) -> None:
        """After a step that raised. It may have left pages in any state, so none is trusted: every request is in the
        queue, with what it had said before."""
        scheduler.careful = True
        new = [r for r in scheduler.waiting if r.number >= self.first]
        still = {r.number for r in scheduler.waiting}
        every = (*self.running.values(), *self.waiting)
        ran = [r.number for r in every if r.number not in still]
        scheduler.trials.tried = {number: self.progress.get(number, 0) for number in ran}
        scheduler.batches, scheduler.resumed = {}, self.resumed
        scheduler.finished = self.finished
        scheduler.waiting = sorted([*every, *new], key=RANK)
        scheduler.deadlines.update(self.deadlines)
        scheduler.scores.update(self.scores)
        for each, size in self.lengths:
            each.rollback(size)
