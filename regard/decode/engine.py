"""The one decoding loop: requests come in, lanes of rows advance, events come out.

Requests are served by their rank: those of the highest priority first, of them the oldest. A request joins the lane of
its kind, which reads its prompt in chunks while the others go on, so that every step serves whatever is there. A lane
(lane.py) keeps the books; what computes its steps is a runner: a CUDA graph (graphs.py, search.py), if the model is on
a GPU and has one, for what needs no guesses; else the model itself (plain.py), samples and beams in one step.

With a paged cache rows come and go freely, texts that begin alike share pages, and when pages run out the request of
the last rank is put back into the queue and goes on later: with the same text, because choices depend on (seed,
request, position) alone. The first is never put back for pages, so there is always progress. With `patience`, where
all rows are taken and somebody has waited for so long, the one that has had its row the longest waits instead, if it
has come further since: long answers take turns, and short ones need not wait for their end. A step is all or nothing:
one that raises puts everything back in the same way. If it was the device's memory that was short, fewer rows are
tried, until the one that needs too much is alone. If it was anything else, halves of those that ran are tried apart,
until the one at fault is alone: it ends with an error, and the others go on together.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from bisect import insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from regard.cache import CacheSpec, OutOfPages, Pool, alike, taken_back
from regard.decode.beam import Shape
from regard.decode.check import check, check_draft, check_drafted, check_pages, context_of
from regard.decode.graphs import SlotLane, runner_of, source_length, source_size, why_plain
from regard.decode.lane import Lane, Row, Scores, page_keys, unscored
from regard.decode.plain import PlainLane, SinksLane, WindowLane, streams
from regard.decode.search import SearchLane, search_of
from regard.decode.settings import Event, Request, Result
from regard.errors import UsageError
from regard.fast.cpu import Prepared
from regard.kernels.c.threads import SHARED, threads_for
from regard.kernels.triton.measured import measure, put_off, unmeasured
from regard.machine import free_memory
from regard.models.base import border

# Lanes: of rows that have outgrown the context and are read anew for each token, or go on in a cache that forgets; and
# that of the CUDA graph.
WINDOW, SINKS, SLOTS = "window", "sinks", "slots"
SHORT = "out of memory on {}: make the engine with fewer rows=, a smaller memory= or chunk=, or shorten the request"
FAILED = "the model failed: {}"
RANK = attrgetter("rank")
LOG = logging.getLogger("regard.decode")
LATEST = 6  # turn up to which patience doubles
UNBOUND = 1 << 20  # tokens of a text in states alone, where the model names no length


class Engine:
    """`submit` requests, then `step` until it is idle. Everything happens inside `step`; one thread owns an engine.

    `rows` bounds the batch, `chunk` the tokens of a prefill step (16,384 in a CUDA graph, else 512). `pages` of `page`
    tokens make the pool; or `memory`, in bytes or as a share of what is free, says how many (see `pages_in`). `runner`:
    auto takes a CUDA graph where the model is on a GPU and has one, torch never, graph always; `explain` says which it
    is and why. The model decodes in evaluation mode; after each step it is in the mode in which it was."""

    def __init__(
        self, model: Any, *, runner: str = "auto", layout: str = "paged", rows: int = 64, chunk: int | None = None,
        pages: int | None = None, page: int = 16, memory: float | None = None, prefix: bool = True,
        backend: str = "sdpa", draft: Any = None, patience: float = math.inf
    ):  # fmt: skip
        for name, value, known in (
            ("layout", layout, ("paged", "contiguous")),
            ("runner", runner, ("auto", "torch", "graph")),
        ):
            if value not in known:
                raise UsageError(f"an engine has no {name} {value!r}; choose {' or '.join(known)}")
        for name, n in (("rows", rows), ("chunk", chunk), ("pages", pages), ("page", page)):
            if n is not None and n < 1:
                raise UsageError(f"{name} is {n}; give 1 or more")
        self.model, self.rows, self.backend, self.patience = model, rows, backend, patience
        if draft is not None:
            check_draft(draft, model)
        self.draft, self.longest, self.border = draft, context_of(model), border(model)
        self.modules = [*model.modules(), *(draft.modules() if draft is not None else ())]
        self.specs = model.cache_specs()
        weight = next(model.parameters())
        self.where = {"device": weight.device, "dtype": weight.dtype}
        # Packed weights are no parameters; models worth packing are worth all threads.
        packed = isinstance(model, Prepared)
        self.weights = SHARED if packed else sum(p.numel() for p in model.parameters())
        # Why there is no graph; nothing where there is one.
        asked = {"runner": (runner, "torch"), "layout": (layout, "contiguous")}
        self.plain = next((f"{k}={v!r} was asked for" for k, (v, x) in asked.items() if v == x), "")
        self.plain = self.plain or why_plain(model, backend, draft, runner == "graph")
        if self.plain and runner == "graph":
            raise UsageError(f"this model has no CUDA graph: {self.plain}; leave runner out")
        paged, exact = layout == "paged", pages is not None
        if not any(spec.token for spec in self.specs):
            # States alone: a graph gives each row a page that holds nothing, others need none.
            paged, page, pages = False, self.longest or UNBOUND, None if self.plain else 2 * rows
        # Whether sources lie in pages too.
        self.sources = paged and model.reads_source and alike(model.source_specs(), self.specs)
        if paged and pages is None:
            far = (source_length(model) or 0) if self.sources else None
            how = (self.specs, page, weight.dtype, rows, self.longest, far)
            pages = pages_in(memory, weight.device, *how)
        self.pool: Pool | None = None
        slots = None
        if not self.plain and pages is not None:
            slots = runner_of(model, rows, pages, page, self.longest or pages * page, exact)
            self.pool = slots.pool
        elif paged and pages is not None:
            self.pool = Pool(self.specs, pages, page, **self.where)
        # A state that takes nothing back is known at the end of a text alone, not at the end of a page.
        whole = bool(taken_back(self.specs)) and not model.reads_source
        self.prefix = prefix and whole and self.pool is not None
        self.chunk = chunk or (512 if slots is None else 16384)
        self.scores: dict[int, Scores] = {}  # of prompts whose log probabilities are asked for
        given: Any = (self.prefix, self.chunk, self.scores)
        self.slots = None if slots is None else SlotLane(slots, *given)
        self.searches: dict[Any, SearchLane] = {}  # slots of beams, by their shape
        # Whether texts past the context go on in a cache that forgets, if they are to keep their first tokens.
        self.streams = self.longest is not None and streams(model)
        self.waiting: list[Request] = []  # by rank
        self.cap = rows  # fewer after memory was short
        # Since a step raised: nobody comes before what is through has been read.
        self.careful = False
        self.tried: dict[int, int] = {}  # who ran in the step that raised, and how far it had come
        # The same in groups that run apart, the first now, until all of it have come further.
        self.trials: list[dict[int, int]] = []
        # Rows of preempted requests, to go on where they were.
        self.resumed: dict[int, list[Row]] = {}
        self.lanes: dict[Any, Lane] = {}
        self.finished: dict[int, dict[int, Result]] = {}  # samples of requests whose others go on
        self.deadlines: dict[int, float] = {}  # of requests that are not done
        self.count = 0

    # --- what a user calls ---

    def explain(self) -> str:
        """Which runner serves, which parts are fast, which are not, and why."""
        if self.slots is not None:
            runner, pool = self.slots.runner, self.slots.pool
            how = "CUDA graphs" if runner.graph else "steps as in a CUDA graph"
            size = f"{len(pool.users):,} pages of {pool.page} tokens, {pool.nbytes / 2**30:.2f} GiB"
            first = f"runner graph: {how} of {runner.rows} slots over {size}"
            more = "guesses, rules on runs of tokens and texts past the context: runner torch"
            if runner.stateful:
                more = f"beam search, {more}; no prefix is found again, as pages hold no state"
            slow = "rows with a mask: rounds of one step, for all that run beside them"
            lines = [first, runner.fast.explain(), more, slow]
        else:
            name = "native" if isinstance(self.model, Prepared) else "torch"
            lines = [f"runner {name}: no CUDA graph, as {self.plain}", self.model.explain()]
        # An engine runs without a package for texts.
        from regard.decode.defaults import described

        # What `regard.generate`, the commands and the server ask for, unless they are told otherwise.
        return "\n".join(filter(None, [*lines, described(self.model)]))

    def submit(self, request: Request) -> int:
        """Queue a request; its number names it in events."""
        check(request, self.model)
        if request.settings.draft:
            check_drafted(request, self.draft, self.model)
        if self.pool is not None:
            slots = self.slots is not None and self.slots.takes(request)
            apart = slots and request.settings.beams > 1
            check_pages(request, self.pool, self.model, self._source(request), apart)
        if request.number >= 0:  # given before: the same words, another request
            request = replace(request, cached=None)
        request.number, request.since = self.count, time.monotonic()
        self.count += 1
        insort(self.waiting, request, key=RANK)
        if request.deadline is not None:
            self.deadlines[request.number] = request.deadline
        return request.number

    def cancel(self, number: int, error: str | None = None) -> list[Event]:
        """Take a request out, wherever it is; what it has so far is its result. `error`: what was wrong with it."""
        with self._whole():
            return self._done(self._stop(number, "error" if error else "cancelled", error))

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.lanes)

    def put_off(self) -> None:
        """From now on a step measures no kernel and records no graph: `warm` does, when nobody waits."""
        if self.slots is not None:
            self.slots.runner.put_off()

    @property
    def cold(self) -> bool:
        """Whether something was put off."""
        return unmeasured() or any(lane.runner.wanted for lane in self._graphs())

    @torch.inference_mode()
    def warm(self, measuring: bool = True) -> bool:
        """One piece of what was put off: a kernel to measure, which takes its time, or else a graph to record. Whether
        something was done."""
        runners = [lane.runner for lane in self._graphs() if lane.runner.wanted]
        if unmeasured() and measuring:
            measure()
        elif runners and not unmeasured():
            with evaluation(self.modules), uncollected():
                runners[0].warm()
        else:
            return False
        return True

    def step(self) -> list[Event]:
        """Prefill one chunk of what waits, then one token for every row.

        If it is interrupted (Ctrl-C), no event was lost: every request is as it was before the step, and is read again
        when the engine is stepped again. If it raises, a request that was alone ends with an error; of several, the one
        at fault is looked for in the next steps. If the device has too little memory, fewer rows run from then on."""
        try:
            return self._step()
        except Exception as error:
            if not self.tried:
                raise
            cause, short = error, isinstance(error, torch.OutOfMemoryError)
        if not short:
            return self._blame(cause)
        # Its frames held memory.
        del cause
        torch.cuda.empty_cache()
        return self._blame(None)

    def _blame(self, cause: Exception | None) -> list[Event]:
        """After a step that raised, for want of memory where there is no other cause: the end of the one that ran
        alone; or fewer rows, and halves on trial."""
        on_trial, tried = bool(self.trials), list(self.tried.items())
        self.trials = self.trials[1:]
        if len(tried) == 1:
            why = SHORT.format(self.where["device"])
            if cause is not None:
                mistake, self.cap = isinstance(cause, UsageError), self.rows
                why = str(cause) if mistake else FAILED.format(type(cause).__name__)
                if not mistake:
                    LOG.warning("a step of one request raised, which ends", exc_info=cause)
            events = self._stop(tried[0][0], "error", why)
            for event in events:
                event.cause = cause
            return self._done(events)
        # If nobody is found, as it takes several to fail, they meet again as fewer.
        if not on_trial or cause is None:
            rows = [self._times(r) for r in self.waiting if r.number in self.tried]
            self.cap = max(1, sum(rows) // 2)
        if cause is not None:
            half = len(tried) // 2
            self.trials = [dict(tried[:half]), dict(tried[half:]), *self.trials]
        return []

    @torch.inference_mode()
    def _step(self) -> list[Event]:
        puts_off = self.slots is not None and self.slots.runner.puts_off
        with self._whole(), evaluation(self.modules), uncollected(), put_off(puts_off):
            now = time.monotonic()
            late = [number for number, deadline in self.deadlines.items() if deadline <= now]
            events = [event for number in late for event in self._stop(number, "deadline")]
            self._admit()
            rows = sum(slot.times for lane in self.lanes.values() for slot in lane.slots)
            with threads_for(self.weights * max(rows, min(self.chunk, self._unread()))):
                for key, lane in list(self.lanes.items()):
                    # An earlier lane may have put its requests back.
                    if self.lanes.get(key) is lane:
                        events += self._advance(key, lane)
            if self.trials:
                self._judge()
            return self._done(events)

    def _judge(self) -> None:
        """Who has come further than where a step raised is not at fault. When all on trial have, it is the others'
        turn, or everybody's."""
        now, waiting = self._progress(), {request.number for request in self.waiting}
        self.trials[0] = {
            number: mark
            for number, mark in self.trials[0].items()
            if number in waiting or now.get(number, math.inf) <= mark
        }
        if not self.trials[0]:
            self.trials.pop(0)
            for request in list(self._active()) if self.trials else ():
                self._put_back(request)

    def _progress(self) -> dict[int, int]:
        """How many tokens every active request has asked for, the fewest of its rows."""
        found: dict[int, int] = {}
        for slot in (slot for lane in self.lanes.values() for slot in lane.slots):
            row, number = slot.row, slot.row.request.number
            asked = max(slot.said + slot.asked, len(row.ids))
            found[number] = min(asked, found.get(number, asked))
        return found

    def _unread(self) -> int:
        """Tokens of prompts that are not through."""
        waiting = [slot for lane in self.lanes.values() for slot in lane.unread()]
        return sum(len(slot.text) - slot.fed for slot in waiting)

    def run(self) -> Iterator[Event]:
        """Events until nothing is left to do."""
        while not self.idle:
            yield from self.step()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """All or nothing. What raises inside may have left caches and pages in any state, so none is trusted: every
        request goes back into the queue with what it had said before."""
        first, waiting, resumed = self.count, list(self.waiting), dict(self.resumed)
        self.tried, progress = {}, self._progress()
        finished = {number: dict(done) for number, done in self.finished.items()}
        deadlines, scores = dict(self.deadlines), dict(self.scores)
        active = {r.number: r for r in self._active()}
        for lane in self.lanes.values():
            for row in lane.rows:
                # A search begins anew.
                if row.request.settings.beams == 1:
                    resumed.setdefault(row.request.number, []).append(row)
        said = [(row, len(row.ids)) for rows in resumed.values() for row in rows]
        try:
            yield
        except BaseException:
            self.careful = True
            new = [r for r in self.waiting if r.number >= first]
            still = {r.number for r in self.waiting}
            ran = [r.number for r in (*active.values(), *waiting) if r.number not in still]
            self.tried = {number: progress.get(number, 0) for number in ran}
            self.lanes, self.resumed, self.finished = {}, resumed, finished
            self.waiting = sorted([*active.values(), *waiting, *new], key=RANK)
            self.deadlines.update(deadlines)
            self.scores.update(scores)
            if self.pool is not None:
                self.pool.clear()
            for slots in self._graphs():
                slots.clear()
            for row, size in said:
                row.back(size)
            raise

    def _done(self, events: list[Event]) -> list[Event]:
        for event in events:
            if event.done is not None:
                self.deadlines.pop(event.request, None)
                if (scores := self.scores.pop(event.request, None)) is not None:
                    logprobs, tops = scores
                    for result in event.done:
                        result.prompt_logprobs = logprobs
                        result.prompt_top_logprobs = tops if any(tops) else []
                self.cap = min(self.rows, self.cap + len(event.done))
                self.careful = self.careful and self.cap < self.rows
        return events

    # --- who is served, and where ---

    def _admit(self) -> None:
        """The next requests, as many as fit, into their lanes."""
        if not self.trials:
            self._make_room()
        room, pages = self._room()
        # Keys of the pages that others will publish.
        fresh = (slot for lane in self.lanes.values() for slot in lane.slots if slot.fresh)
        coming = {key for slot in fresh for key in slot.keys}
        for request in list(self.waiting):
            if self.trials and request.number not in self.trials[0]:
                continue
            # Alone it may enter however large.
            if not self._fits(request, room, pages) and self.lanes:
                break
            keys = list[bytes]()
            if self.prefix and self.pool is not None and not self._long(request):
                # What all rows are fed first.
                rows, page = self.resumed.get(request.number, []), self.pool.page
                text = request.ids + (rows[0].ids if len(rows) == 1 else [])
                keys = page_keys(text, page, (rows or self._rows(request))[0].salt)
                wanted = keys[: (len(text) - 1) // page]
                lacks = next((key for key in wanted if key not in self.pool.published), None)
                # If that page is about to be read for another, it waits, and takes the page over.
                if lacks in coming and not unscored(request, self.scores):
                    continue
                coming.update(keys)
            room, pages = room - self._times(request), pages - self._need(request)
            self.waiting.remove(request)
            self._enter(request, keys)
        for lane in self._graphs():
            lane.waiting = bool(self.waiting)

    def _make_room(self) -> None:
        """Put back who is of a later rank than those who wait, or has been served for long: room for all of these, so
        that nobody who comes behind many waits for as many steps."""
        rows, pages = self._room()
        for request in list(self.waiting):
            while not self._fits(request, rows, pages):
                lower = [r for r in self._active() if r.rank[:2] > request.rank[:2]]
                if not lower and not (lower := self._long_served(request)):
                    return
                before = self._room()
                self._put_back(max(lower, key=RANK))
                rows, pages = (x + y - z for x, y, z in zip((rows, pages), self._room(), before))
            rows, pages = rows - self._times(request), pages - self._need(request)

    def _long_served(self, first: Request) -> list[Request]:
        """If one in the queue has waited long enough, twice as long for each turn that it has had: of those whose turn
        is not after its own, who has had its row for as long and the longest, if that has come further since; its turn
        is the next one from now on. A search would begin anew, so it goes on; and the late ones of a client's many
        prompts are no reason to put others back."""
        turn = first.rank[1]
        late = time.monotonic() - self.patience * 2 ** min(turn, LATEST)
        served: dict[int, Request] = {}
        if first.since > late or first.turn > LATEST:
            return []
        for row in (row for lane in self.lanes.values() for row in lane.rows):
            request, plain = row.request, row.request.settings.beams == 1
            equal = request.priority == first.priority and request.rank[1] <= turn
            if plain and equal and len(row.ids) > request.had:
                served[request.number] = request
        longest = min(served.values(), key=attrgetter("since"), default=None)
        if longest is None or longest.since > late:
            return []
        longest.yielded = turn + 1 - longest.turn
        return [longest]

    def _enter(self, request: Request, keys: Sequence[bytes] = ()) -> None:
        """A request into the lane of its kind."""
        lane = self._lane(request)
        rows = self.resumed.pop(request.number, []) or self._rows(request)
        request.since, request.had = time.monotonic(), max(len(row.ids) for row in rows)
        lane.admit(rows, keys)

    def _lane(self, request: Request) -> Lane:
        s, long = request.settings, self._long(request)
        shape = Shape.of(s) if s.beams > 1 else None
        key: Any = None
        graph = self.slots is not None and not long and self.slots.takes(request)
        if graph:
            key = SLOTS, shape
        elif long:
            key = SINKS if self.streams and s.overflow == "sinks" else WINDOW
        if key in self.lanes:
            return self.lanes[key]
        lane: Any = self.slots
        if not graph:
            options: Any = {"backend": self.backend, "chunk": self.chunk, "scores": self.scores}
            own = {"pool": self.pool, "prefix": self.prefix, "draft": self.draft}
            options |= {"longest": self.longest} if long else own
            kind = {WINDOW: WindowLane, SINKS: SinksLane}.get(key, PlainLane)
            lane = kind(self.model, self.specs, self.where, **options)
        elif shape is not None:
            if shape not in self.searches:
                search = search_of(lane.runner, shape, max(1, self.rows // shape.beams))
                self.searches[shape] = SearchLane(search, self.prefix, self.chunk, self.scores)
            lane = self.searches[shape]
        self.lanes[key] = lane
        return lane

    def _graphs(self) -> list[SlotLane]:
        return [] if self.slots is None else [self.slots, *self.searches.values()]

    def _room(self) -> tuple[int, int]:
        """Rows that are free, and pages. Every row that runs will soon want a page, and prompts that are read some:
        what is left is for those that come."""
        slots = [slot for lane in self.lanes.values() for slot in lane.slots]
        running = sum(slot.times for slot in slots if self.careful or not slot.away)
        owed = running + sum(lane.owed(self._source) for lane in self.lanes.values())
        return self.cap - running, 0 if self.pool is None else self.pool.available - owed

    def _fits(self, request: Request, room: int, pages: int) -> bool:
        return self._times(request) <= room and self._need(request) <= pages

    def _need(self, request: Request) -> int:
        """Pages that a waiting request will take."""
        if self.pool is None or self._long(request):
            return 0
        said = sum(len(row.ids) for row in self.resumed.get(request.number, ()))
        text = (len(request.ids) + said) // self.pool.page + 1 + self._times(request)
        return text + self._source(request)

    def _long(self, request: Request) -> bool:
        return self._outgrown(self.resumed.get(request.number) or self._rows(request))

    def _times(self, request: Request) -> int:
        """Rows that a waiting request will have."""
        return len(self.resumed.get(request.number, ())) or request.settings.rows

    def _source(self, request: Request) -> int:
        """Pages that a request's source takes."""
        if self.pool is None or not self.sources:
            return 0
        return -(-source_size(self.model, request) // self.pool.page)

    def _rows(self, request: Request) -> list[Row]:
        count = request.settings.samples
        return [Row(request, i, window=self.longest, border=self.border) for i in range(count)]

    def _outgrown(self, rows: list[Row]) -> bool:
        return self.longest is not None and any(row.size > self.longest for row in rows)

    def _advance(self, key: Any, lane: Lane) -> list[Event]:
        events: list[Event] = []
        for part in (lane.ask, lane.step):
            # Requests of which a row has outgrown the context change lanes, all their rows together; for a cache that
            # forgets they are read once more.
            long = self.longest if key is None and self.longest is not None else math.inf
            for request in dict.fromkeys(row.request for row in lane.rows if row.size > long):
                self.resumed[request.number], _ = self._take(request)
                self._enter(request)
            while lane.slots:
                try:
                    part()
                    break
                except OutOfPages:
                    self._preempt()
            said, lane.events = lane.events, []
            events += said + self._settle(lane)
        return events

    def _settle(self, lane: Lane) -> list[Event]:
        """Hand out what is finished and drop its rows."""
        events: list[Event] = []
        gone = lane.over()
        for i in gone:
            row = lane.rows[i]
            if row.request.settings.beams > 1:
                events.append(Event(row.request.number, done=lane.results(i)))
                continue
            done = self.finished.setdefault(row.request.number, {})
            done[row.sample] = row.result()
            if len(done) == row.request.settings.samples:
                del self.finished[row.request.number]
                events.append(Event(row.request.number, done=[done[k] for k in sorted(done)]))
        if gone:
            self._drop(lane, gone)
        return events

    def _drop(self, lane: Lane, index: list[int]) -> None:
        lane.drop(index)
        if not lane.slots:
            self.lanes = {key: x for key, x in self.lanes.items() if x is not lane}

    # --- taking requests out ---

    def _preempt(self) -> None:
        """Put the request of the last rank back into the queue; its pages are free."""
        active = list(self._active())
        assert len(active) > 1, "a request that fits the pool alone ran out of pages"
        self._put_back(max(active, key=RANK))

    def _put_back(self, request: Request) -> None:
        """A request into the queue, whatever it is doing."""
        rows, _ = self._take(request)
        if rows:
            self.resumed[request.number] = rows
        request.since = time.monotonic()
        insort(self.waiting, request, key=RANK)

    def _take(self, request: Request, why: str = "") -> tuple[list[Row], list[Result]]:
        """Free what an active request holds: its rows, or the results of its beams if it is stopped."""
        lane = next(x for x in self.lanes.values() if request in x.requests())
        index = [i for i, row in enumerate(lane.rows) if row.request is request]
        rows, results = [lane.rows[i] for i in index], list[Result]()
        if request.settings.beams > 1:
            rows, results = [], lane.results(index[0], why) if why else []
        self._drop(lane, index)
        return rows, results

    @torch.inference_mode()
    def _stop(self, number: int, why: str, error: str | None = None) -> list[Event]:
        every = (*self.waiting, *self._active())
        request = next((r for r in every if r.number == number), None)
        if request is None:
            return []
        if request in self.waiting:
            self.waiting.remove(request)
            rows: list[Row] = self.resumed.get(number, [])
            results: list[Result] = []
        else:
            rows, results = self._take(request, why)
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

    def _active(self) -> Iterator[Request]:
        for lane in self.lanes.values():
            yield from lane.requests()


@contextmanager
def evaluation(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """These modules in evaluation mode; afterwards each is in the mode in which it was."""
    # In their own tables: this is asked before every step, of hundreds.
    training = [own for own in map(vars, modules) if own["training"]]
    for own in training:
        own["training"] = False
    try:
        yield
    finally:
        for own in training:
            own["training"] = True


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, which would take the many tokens of a step for things that stay, and then go through
    all that torch and Triton have loaded: 0.1 s, while a GPU waits. What a step makes goes with its last reference."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def pages_in(
    memory: float | None, device: torch.device, specs: Sequence[CacheSpec], page: int, dtype: torch.dtype, rows: int,
    longest: int | None, far: int | None = None
) -> int:  # fmt: skip
    """How many pages a memory holds: so many bytes, or (up to 1) a share of what is free; 0.9 on a GPU, and 1,024 pages
    elsewhere, if it is not said. No more than `rows` texts as long as the context need. Where sources lie in them too,
    of `far` tokens at most (0: of any length), these have as many again."""
    if memory is not None and not memory > 0:
        raise UsageError(f"memory is {memory}; give bytes, or a share of what is free such as 0.9")
    source = -(-(far or 0) // page)
    most = None if longest is None else rows * (-(-longest // page) + source)
    if memory is None and device.type != "cuda":
        return 1024 + (0 if far is None else max(1024, source))
    share = 0.9 if memory is None else memory
    if share <= 1:
        share *= free_memory(device)
    # States lie beside the pages, one for each row, in float32 at least.
    states = sum(torch.Size(size).numel() for spec in specs for size in spec.state.values())
    share = max(0.0, share - states * max(4, dtype.itemsize) * (1 << (rows - 1).bit_length()))
    have = int(share) // (page * dtype.itemsize * max(1, sum(spec.numbers() for spec in specs)))
    if have < 1:
        raise UsageError(f"{int(share):,} bytes hold no page of {page} tokens; give more memory")
    return have if most is None else min(have, most)
