"""The one decoding loop: requests come in, lanes of rows advance, events come out.

A request is prefilled in a small lane of its own, in chunks, and then joins the lane of its kind (one for all sampling,
one for each kind of beam search), so that every step serves whatever is there. With a paged cache rows come and go
freely, prompts that begin alike share pages, and when pages run out the youngest request is put back into the queue and
goes on later: with the same text, because choices depend on (seed, request, position) alone. The oldest is never put
back, so there is always progress.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from regard.cache import Cache, Contiguous, OutOfPages, Paged, Pool
from regard.config import UsageError
from regard.decode.beam import BeamLane
from regard.decode.check import check, check_pages, written
from regard.decode.draft import Draft
from regard.decode.prefill import Prefill
from regard.decode.sample import Row, SampleLane
from regard.decode.settings import Event, Request, Result

Lane = SampleLane | BeamLane
ROOM = 128  # tokens a row has room for at first; it doubles as texts grow


class Engine:
    """`submit` requests, then `step` until it is idle. Everything happens inside `step`; one thread owns an engine.

    `rows` bounds the batch, `chunk` the tokens of a prefill step; `pages` of `page` tokens make the pool."""

    def __init__(
        self,
        model: Any,
        *,
        layout: str = "paged",
        rows: int = 64,
        chunk: int = 512,
        pages: int = 1024,
        page: int = 16,
        prefix: bool = True,
        backend: str = "sdpa",
        draft: Any = None,
    ):
        if layout not in ("paged", "contiguous"):
            raise UsageError(f"an engine has no layout {layout!r}; choose paged or contiguous")
        for name, n in (("rows", rows), ("chunk", chunk), ("pages", pages), ("page", page)):
            if n < 1:
                raise UsageError(f"{name} is {n}; give 1 or more")
        self.model, self.rows, self.chunk, self.backend = model, rows, chunk, backend
        self.draft = draft
        self.specs = model.cache_specs()
        weight = next(model.parameters())
        self.where = {"device": weight.device, "dtype": weight.dtype}
        paged = layout == "paged" and any(
            spec.token for spec in self.specs
        )  # a state needs no page
        self.pool = Pool(self.specs, pages, page, **self.where) if paged else None
        whole = not any(spec.state for spec in self.specs) and not hasattr(model, "encode")
        self.prefix = prefix and whole and self.pool is not None
        self.waiting: deque[Request] = deque()  # oldest first, and younger than all that runs
        self.resumed: dict[
            int, list[Row]
        ] = {}  # rows of preempted requests, to go on where they were
        self.lanes: dict[Any, Lane] = {}
        self.loading: Prefill | None = None
        self.finished: dict[int, dict[int, Result]] = {}  # samples of requests whose others go on
        self.deadlines: list[tuple[float, int]] = []  # a heap
        self.count = 0

    # --- what a user calls ---

    def submit(self, request: Request) -> int:
        """Queue a request; its number names it in events."""
        check(request, self.model)
        if request.settings.draft and self.draft is None:
            raise UsageError(
                "draft asks for guesses of a draft model; give one: Engine(model, draft=small_model)"
            )
        if self.pool is not None:
            check_pages(request, self.pool)
        if request.number >= 0:  # given before: the same words, another request
            request = replace(request)
        request.number = self.count
        self.count += 1
        self.waiting.append(request)
        if request.deadline is not None:
            heapq.heappush(self.deadlines, (request.deadline, request.number))
        return request.number

    def cancel(self, number: int) -> list[Event]:
        """Take a request out, wherever it is; what it has so far is its result."""
        return self._stop(number, "cancelled")

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.loading or self.lanes)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Prefill one chunk of what waits, then one token for every row."""
        events = self._expire()
        if self.loading is None:
            self._admit()
        if self.loading is not None:
            events += self._load()
        for key, lane in list(self.lanes.items()):
            if self.lanes.get(key) is lane:  # an earlier lane may have put its requests back
                events += self._advance(key, lane)
        return events

    def run(self) -> Iterator[Event]:
        """Events until nothing is left to do."""
        while not self.idle:
            yield from self.step()

    # --- prefill ---

    def _admit(self) -> None:
        """Start prefilling the next requests of one kind, as many as fit."""
        running = sum(lane.cache.batch for lane in self.lanes.values())
        room = self.rows - running
        # every row that runs will soon want a page: what is left is for those that come
        pages = 0 if self.pool is None else self.pool.available - running
        batch: list[Request] = []
        while self.waiting:
            request = self.waiting[0]
            times = self._times(request)
            need = 0 if self.pool is None else self._text(request) // self.pool.page + 1 + times
            fits = times <= room and need <= pages
            if not fits and (batch or self.lanes):  # alone it may enter however large
                break
            if batch and not self._alike(request, batch[0]):
                break
            batch.append(self.waiting.popleft())
            room, pages = room - times, pages - need
        if batch:
            self.loading = Prefill(batch, self.resumed, self._cache(batch))
            if self.prefix:
                self.loading.adopt()

    def _times(self, request: Request) -> int:
        """Rows that a waiting request will have."""
        return len(self.resumed.get(request.number, ())) or request.settings.rows

    def _text(self, request: Request) -> int:
        """Tokens that a waiting request must be fed."""
        return len(request.ids) + sum(len(r.ids) for r in self.resumed.get(request.number, ()))

    def _alike(self, a: Request, b: Request) -> bool:
        """Whether two requests can be prefilled together."""
        alone = any(len(self.resumed.get(r.number, ())) > 1 for r in (a, b))
        return not alone and _kind(a) == _kind(b) and self._times(a) == self._times(b)

    def _cache(self, batch: list[Request]) -> Cache:
        if self.pool is not None:
            return Paged(self.specs, len(batch), pool=self.pool, **self.where)
        size = max(len(r.ids) + r.settings.max_new_tokens for r in batch)
        return Contiguous(self.specs, len(batch), capacity=min(size, ROOM), **self.where)

    def _load(self) -> list[Event]:
        """One chunk of the prompts being prefilled; when they are through, they join their lane."""
        while self.loading is not None and not self.loading.through:  # the slow ones may be gone
            try:
                self.loading.feed(self.model, self.chunk, self.backend)
                break
            except OutOfPages:
                self._preempt()
        job = self.loading
        if job is None or not job.through:
            return []
        self.loading = None
        return self._start(job)

    def _start(self, job: Prefill) -> list[Event]:
        if self.prefix:
            job.publish()
        cache, logits, times = job.cache, job.logits, job.times
        fresh = not any(job.rows)
        if times > 1 and fresh:
            cache = cache.spread(times, self.model.shares_source)
            logits = logits.repeat_interleave(times, 0)
        key = _kind(job.requests[0])
        if key is None:
            mine = [self.resumed.pop(r.number, None) for r in job.requests]
            new = [[Row(r, i) for i in range(times)] for r in job.requests]
            rows = [row for m, n in zip(mine, new, strict=True) for row in m or n]
            draft = None if self.draft is None else Draft(self.draft, written(self.model).vocab)
            lane: Lane = SampleLane(cache, rows, draft)
        else:
            lane = BeamLane(cache, job.requests, logits.shape[-1])
        events = lane.choose(logits)
        events += self._settle(lane)
        if lane.requests():
            if key in self.lanes:
                self.lanes[key].join(lane)  # type: ignore[arg-type]
            else:
                self.lanes[key] = lane
        return events

    # --- decoding ---

    def _advance(self, key: Any, lane: Lane) -> list[Event]:
        while True:
            try:
                events = lane.step(self.model, self.backend)
                break
            except OutOfPages:
                self._preempt()
                if self.lanes.get(key) is not lane:
                    return []
        events += self._settle(lane)
        if not lane.requests():
            del self.lanes[key]
        return events

    def _settle(self, lane: Lane) -> list[Event]:
        """Hand out what is finished and drop its rows."""
        events: list[Event] = []
        gone = lane.over()
        for i in gone:
            if isinstance(lane, BeamLane):
                events.append(Event(lane.requests()[i].number, done=lane.results(i)))
                continue
            row = lane.rows[i]
            done = self.finished.setdefault(row.request.number, {})
            done[row.sample] = row.result()
            if len(done) == row.request.settings.samples:
                del self.finished[row.request.number]
                events.append(Event(row.request.number, done=[done[k] for k in sorted(done)]))
        if gone:
            lane.drop(gone)
        return events

    # --- taking requests out ---

    def _preempt(self) -> None:
        """Put the youngest request back into the queue, whatever it is doing; its pages are free."""
        active = {r.number: r for lane in self.lanes.values() for r in lane.requests()}
        active |= {r.number: r for r in (self.loading.requests if self.loading else ())}
        assert len(active) > 1, "a request that fits the pool alone ran out of pages"
        request = active[max(active)]
        rows, _ = self._take(request)
        if rows:
            self.resumed[request.number] = rows
        self.waiting.appendleft(request)

    def _take(self, request: Request, why: str = "") -> tuple[list[Row], list[Result]]:
        """Free what an active request holds: its rows, or the results of its beams if it is stopped."""
        if self.loading is not None and request in self.loading.requests:
            self.loading.drop(request)
            if not self.loading.requests:
                self.loading = None
            return self.resumed.get(request.number, []), []
        key = _kind(request)
        lane = self.lanes[key]
        rows: list[Row] = []
        results: list[Result] = []
        if isinstance(lane, SampleLane):
            rows = [row for row in lane.rows if row.request is request]
            lane.drop([i for i, row in enumerate(lane.rows) if row.request is request])
        else:
            at = next(i for i, r in enumerate(lane.requests()) if r is request)
            results = lane.results(at, why) if why else []
            lane.drop([at])
        if not lane.requests():
            del self.lanes[key]
        return rows, results

    @torch.inference_mode()
    def _stop(self, number: int, why: str) -> list[Event]:
        request = next((r for r in self._all() if r.number == number), None)
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
                i: Result([], [], 0.0, why)
                for i in range(max(s.samples, s.n_best))
                if i not in done
            }
            for row in rows:
                row.finish = why
                done[row.sample] = row.result()
            results = [done[i] for i in sorted(done)]
        return [Event(number, done=results)]

    def _all(self) -> Iterator[Request]:
        yield from self.waiting
        if self.loading is not None:
            yield from self.loading.requests
        for lane in self.lanes.values():
            yield from lane.requests()

    def _expire(self) -> list[Event]:
        events: list[Event] = []
        while self.deadlines and self.deadlines[0][0] <= time.monotonic():
            events += self._stop(heapq.heappop(self.deadlines)[1], "deadline")
        return events


def _kind(request: Request) -> Any:
    """Requests of one kind share a lane: all sampling; beam search by its settings."""
    return request.settings if request.settings.beams > 1 else None
