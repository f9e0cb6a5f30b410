"""The one decoding loop: requests come in, lanes of rows advance, events come out.

A request is prefilled in a small lane of its own, in chunks, and then joins the lane of its kind (one for all sampling,
one for each kind of beam search), so that every step serves whatever is there. With a paged cache rows come and go
freely, prompts that begin alike share pages, and when pages run out the youngest requests are put back into the queue and
done again later: the same text, because choices depend on (seed, request, position) alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from regard.cache import Cache, Contiguous, OutOfPages, Paged, Pool
from regard.config import UsageError
from regard.decode.beam import BeamLane
from regard.decode.sample import Row, SampleLane
from regard.decode.settings import Event, Request, Result

Lane = SampleLane | BeamLane


class Engine:
    """`submit` requests, then `step` until it is idle. Everything happens inside `step`; one thread owns an engine."""

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
    ):
        self.model, self.layout, self.rows, self.chunk, self.backend = (
            model,
            layout,
            rows,
            chunk,
            backend,
        )
        self.specs = model.cache_specs()
        weight = next(model.parameters())
        self.where = {"device": weight.device, "dtype": weight.dtype}
        self.pool = Pool(self.specs, pages, page, **self.where) if layout == "paged" else None
        stateful = any(spec.state for spec in self.specs)
        self.prefix = (
            prefix and self.pool is not None and not stateful and not hasattr(model, "encode")
        )
        self.waiting: deque[Request] = deque()
        self.resumed: dict[
            int, list[Row]
        ] = {}  # rows of preempted requests, to go on where they were
        self.lanes: dict[Any, Lane] = {}
        self.loading: Prefill | None = None
        self.finished: dict[int, dict[int, Result]] = {}
        self.count = 0

    # --- what a user calls ---

    def submit(self, request: Request) -> int:
        """Queue a request; its number names it in events."""
        check(request, self.model)
        if self.pool is not None:
            need = -(-(len(request.ids) + request.settings.max_new_tokens) // self.pool.page)
            if need > len(self.pool.users):
                raise UsageError(
                    f"{len(request.ids)} + {request.settings.max_new_tokens} tokens need {need} pages, the pool has "
                    f"{len(self.pool.users)}; shorten the request, or make more pages"
                )
        request.number = self.count
        self.count += 1
        self.waiting.append(request)
        return request.number

    def cancel(self, number: int) -> list[Event]:
        """Take a request out, wherever it is; what it has so far is its result."""
        for request in list(self.waiting):
            if request.number == number:
                self.waiting.remove(request)
                rows = self.resumed.pop(number, []) or [Row(request, 0)]
                return self._close(request, rows, "cancelled")
        if self.loading is not None and any(r.number == number for r in self.loading.requests):
            kept = [r for r in self.loading.requests if r.number != number]
            gone = next(r for r in self.loading.requests if r.number == number)
            self._unload(kept)
            return self._close(gone, self.resumed.pop(number, []) or [Row(gone, 0)], "cancelled")
        for key, lane in list(self.lanes.items()):
            for request in lane.requests():
                if request.number == number:
                    return self._evict(key, lane, request, "cancelled")
        return []

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
            events += self._advance(key, lane)
        return events

    def run(self) -> Iterator[Event]:
        """Events until nothing is left to do."""
        while not self.idle:
            yield from self.step()

    # --- prefill ---

    def _admit(self) -> None:
        """Start prefilling the next requests of one kind, as many as fit."""
        free = self.rows - sum(_rows(r) for lane in self.lanes.values() for r in lane.requests())
        batch: list[Request] = []
        budget = None if self.pool is None else self.pool.available
        while self.waiting and _rows(self.waiting[0]) <= max(
            free, 0 if self.lanes or batch else self.rows * 1024
        ):
            request = self.waiting[0]
            if batch and (_kind(request) != _kind(batch[0]) or not _alike(request, batch[0])):
                break
            if budget is not None:
                need = -(-(len(self._text(request)) + 1) // self.pool.page) + 1  # type: ignore[union-attr]
                if need > budget and (batch or self.lanes):
                    break
                budget -= need
            batch.append(self.waiting.popleft())
            free -= _rows(request)
        if batch:
            self.loading = Prefill(batch, [self._text(r) for r in batch], self._cache(len(batch)))
            if self.prefix:
                self.loading.adopt()

    def _text(self, request: Request) -> list[int]:
        """All tokens whose entries a row needs: the prompt, and what a preempted row had said."""
        rows = self.resumed.get(request.number)
        return request.ids + (rows[0].ids if rows else [])

    def _cache(self, batch: int) -> Cache:
        if self.pool is not None:
            return Paged(self.specs, batch, pool=self.pool, **self.where)
        return Contiguous(self.specs, batch, capacity=128, **self.where)

    def _load(self) -> list[Event]:
        """One chunk of the prompts being prefilled; when they are through, they join their lane."""
        job = self.loading
        assert job is not None
        try:
            job.feed(self.model, self.chunk, self.backend)
        except OutOfPages:
            if not self.lanes:
                if len(job.requests) == 1:
                    raise
                self._unload(job.requests)
                self.rows = max(1, self.rows // 2)
            else:
                self._preempt(*next(reversed(self.lanes.items())))
            return []
        if not job.through:
            return []
        self.loading = None
        return self._start(job)

    def _start(self, job: Prefill) -> list[Event]:
        if self.prefix:
            job.publish()
        key, times = _kind(job.requests[0]), _rows(job.requests[0])
        cache = job.cache if times == 1 else job.cache.spread(times, self.model.shares_source)
        logits = job.logits.repeat_interleave(times, 0)
        if key is None:
            rows = [
                row
                for r in job.requests
                for row in (self.resumed.pop(r.number, None) or [Row(r, i) for i in range(times)])
            ]
            lane: Lane = SampleLane(cache, rows)
        else:
            lane = BeamLane(cache, job.requests)
        events = lane.choose(logits)
        events += self._settle(lane)
        if lane.requests():
            mine = self.lanes.get(key)
            if mine is None:
                self.lanes[key] = lane
            else:
                mine.join(lane)  # type: ignore[arg-type]
        return events

    def _unload(self, kept: list[Request]) -> None:
        assert self.loading is not None
        self.loading.cache.release()
        self.waiting.extendleft(reversed(kept))
        self.loading = None

    # --- decoding ---

    def _advance(self, key: Any, lane: Lane) -> list[Event]:
        while True:
            try:
                events = lane.step(self.model, self.backend)
                break
            except OutOfPages:
                if len(lane.requests()) == 1 and self.loading is None and len(self.lanes) == 1:
                    raise
                if self.loading is not None:
                    self._unload(self.loading.requests)
                else:
                    self._preempt(key, lane)
                    if not lane.requests():
                        return []
        events += self._settle(lane)
        if not lane.requests():
            del self.lanes[key]
        return events

    def _settle(self, lane: Lane) -> list[Event]:
        """Hand out what is finished and drop its rows."""
        events: list[Event] = []
        open_ = lane.open()
        if isinstance(lane, BeamLane):
            for i in sorted(set(range(len(lane.requests()))) - set(open_)):
                events.append(Event(lane.requests()[i].number, done=lane.results(i)))
        else:
            for i in sorted(set(range(len(lane.rows))) - set(open_)):
                row = lane.rows[i]
                done = self.finished.setdefault(row.request.number, {})
                done[row.sample] = row.result()
                if len(done) == row.request.settings.samples:
                    del self.finished[row.request.number]
                    events.append(Event(row.request.number, done=[done[k] for k in sorted(done)]))
        lane.keep(open_)
        return events

    def _preempt(self, key: Any, lane: Lane) -> None:
        """Put the youngest request of a lane back into the queue; its pages are free."""
        request = max(lane.requests(), key=lambda r: r.number)
        if isinstance(lane, SampleLane) and request.settings.samples == 1:
            self.resumed[request.number] = [row for row in lane.rows if row.request is request]
        self._drop(key, lane, request)
        self.waiting.appendleft(request)

    def _evict(self, key: Any, lane: Lane, request: Request, why: str) -> list[Event]:
        rows = (
            [row for row in lane.rows if row.request is request]
            if isinstance(lane, SampleLane)
            else []
        )
        self._drop(key, lane, request)
        return self._close(request, rows, why)

    def _drop(self, key: Any, lane: Lane, request: Request) -> None:
        owners = (
            [row.request for row in lane.rows] if isinstance(lane, SampleLane) else lane.requests()
        )
        lane.keep([i for i, owner in enumerate(owners) if owner is not request])
        if not lane.requests():
            self.lanes.pop(key, None)

    def _close(self, request: Request, rows: list[Row], why: str) -> list[Event]:
        done = self.finished.pop(request.number, {})
        for row in rows:
            row.finish = why
            done[row.sample] = row.result()
        results = [done[k] for k in sorted(done)] or [Result([], [], 0.0, why)]
        return [Event(request.number, done=results)]

    def _expire(self) -> list[Event]:
        now = time.monotonic()
        late = [
            r.number
            for r in [*self.waiting, *(r for lane in self.lanes.values() for r in lane.requests())]
            if r.deadline is not None and r.deadline < now
        ]
        events = [event for number in late for event in self.cancel(number)]
        for event in events:
            for result in event.done or []:
                result.finish = "deadline" if result.finish == "cancelled" else result.finish
        return events


class Prefill:
    """Requests of one kind on their way into a cache, `chunk` tokens a step."""

    def __init__(self, requests: list[Request], texts: list[list[int]], cache: Cache):
        self.requests, self.texts, self.cache = requests, texts, cache
        self.fed = [0] * len(texts)
        self.last: list[torch.Tensor | None] = [None] * len(texts)

    @property
    def through(self) -> bool:
        return all(x is not None for x in self.last)

    @property
    def logits(self) -> torch.Tensor:
        return torch.stack([x for x in self.last if x is not None])

    def keys(self, text: list[int]) -> list[int]:
        """A chain of hashes, one for each full page: equal keys mean equal tokens from the start."""
        page, key, keys = self.cache.page, 0, []  # type: ignore[attr-defined]
        for end in range(page, len(text) + 1, page):
            key = hash((key, *text[end - page : end]))
            keys.append(key)
        return keys

    def adopt(self) -> None:
        """Begin with pages that earlier prompts left; at least one token stays to be fed, for its logits."""
        assert isinstance(self.cache, Paged)
        for row, text in enumerate(self.texts):
            self.fed[row] = self.cache.adopt(row, self.keys(text[:-1]))

    def publish(self) -> None:
        assert isinstance(self.cache, Paged)
        for row, text in enumerate(self.texts):
            self.cache.publish(row, self.keys(text))

    def feed(self, model: Any, chunk: int, backend: str) -> None:
        device = self.cache.device
        size = max(1, chunk // len(self.texts))
        parts = [text[n : n + size] for text, n in zip(self.texts, self.fed, strict=True)]
        width = max(map(len, parts))
        lengths = torch.tensor([len(p) for p in parts], device=device)
        ids = torch.tensor([p + [0] * (width - len(p)) for p in parts], device=device)
        more = _source(self.requests, device) if self.cache.cross is None else {}
        logits = model.next_logits(ids, lengths, cache=self.cache, backend=backend, **more)
        for i, part in enumerate(parts):
            self.fed[i] += len(part)
            if part and self.fed[i] == len(self.texts[i]):
                self.last[i] = logits[i]


def _source(requests: list[Request], device: torch.device) -> dict[str, Any]:
    """The sources of encoder-decoders as one batch."""
    sources = [r.source for r in requests if r.source is not None]
    if not sources:
        return {}
    if sources[0].dim() > 1:
        return {"source": torch.stack(sources).to(device)}
    lengths = torch.tensor([len(s) for s in sources], device=device)
    width = int(lengths.max())
    ids = torch.stack([torch.nn.functional.pad(s, (0, width - len(s))) for s in sources])
    return {"source": ids.to(device), "source_lengths": lengths}


def _rows(request: Request) -> int:
    return request.settings.rows


def _kind(request: Request) -> Any:
    """Requests of one kind share a lane: all sampling; beam search by its settings."""
    return request.settings if request.settings.beams > 1 else None


def _alike(a: Request, b: Request) -> bool:
    """Whether two requests can be prefilled together."""
    return a.settings.rows == b.settings.rows


def check(request: Request, model: Any) -> None:
    """What a user can get wrong about a request, before anything is allocated."""
    s, config = request.settings, model.config
    if not request.ids:
        raise UsageError("the prompt is empty; give at least one token")
    vocab = getattr(
        getattr(config, "target", None) or getattr(config, "embedding", None) or config, "vocab"
    )
    named = [*request.ids, *s.eos, *s.banned, *(i for i, _ in s.logit_bias)]
    wrong = next((i for i in named if not 0 <= i < vocab), None)
    if wrong is not None:
        raise UsageError(f"token {wrong} is outside the vocabulary (0 to {vocab - 1})")
    longest = getattr(config, "max_len", None)
    if longest is not None and len(request.ids) + s.max_new_tokens > longest:
        raise UsageError(
            f"{len(request.ids)} tokens of prompt and {s.max_new_tokens} new ones are more than the model's context of "
            f"{longest}; shorten the prompt, or ask for at most {max(longest - len(request.ids), 0)} new tokens"
        )
    if s.lookup and any(spec.state for spec in model.cache_specs()):
        raise UsageError(
            "a recurrent model cannot take tokens back, so it cannot speculate; leave lookup out"
        )
