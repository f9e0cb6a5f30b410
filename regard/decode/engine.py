"""The one decoding loop: requests come in, batches of rows advance, events come out.

The scheduler (scheduler.py) says who is served; a request joins the batch of its kind (batch.py), which reads its
prompt in chunks while the others go on, so that every step serves whatever is there. What computes a batch is a runner
(runners): CUDA graphs, if the model is on a GPU and has them, for what fits its context; else the model itself. With a
paged cache rows come and go freely, and texts that begin alike share pages: choices depend on (seed, request, position)
alone.
"""

from __future__ import annotations

import gc
import logging
import math
from collections import abc
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from regard.cache import CacheSpec, OutOfPages, Pool, alike, taken_back
from regard.decode.batch import Batch, Reading
from regard.decode.check import check, check_draft, check_drafted, check_pages, context_of
from regard.decode.runners import Runner
from regard.decode.runners.graph import GraphRunner
from regard.decode.runners.rows import Forward, Where
from regard.decode.runners.steps import GraphSteps, steps_of, unused, why_plain
from regard.decode.runners.torch import TorchRunner
from regard.decode.scheduler import Scheduler, Snapshot
from regard.decode.sequence import Sequence
from regard.decode.settings import OWN, Event, Request, Settings
from regard.decode.sources import source_length, source_size
from regard.errors import UsageError
from regard.fast.cpu import Prepared
from regard.fast.cuda.record import Recorder
from regard.kernels.c.threads import SHARED, threads_for
from regard.kernels.triton.measured import measure, put_off, unmeasured
from regard.machine import free_memory
from regard.models.base import Model, border

SHORT = "out of memory on {}: make the engine with fewer rows=, a smaller memory= or chunk=, or shorten the request"
FAILED = "the model failed: {}"
LOG = logging.getLogger("regard.decode")
UNBOUND = 1 << 20  # tokens of a text in states alone, where the model names no length
# Rows of a batch if it is not said how many; in a CUDA graph as many up to `MANY` as have room for `TYPICAL` tokens.
ROWS, MANY, TYPICAL = 64, 256, 1024


class Engine:
    """`submit` requests, then `step` until it is idle. Everything happens inside `step`; one thread owns an engine.

    `rows` bounds the batch (64 if it is not said; in a CUDA graph up to 256, as many as have room for 1,024 tokens
    each), `chunk` the tokens of a prefill step (16,384 in a CUDA graph, else 512). `pages` of `page` tokens make the
    pool; or `memory`, in bytes or as a share of what is free, says how many (see `pages_in`). `runner`:
    auto takes a CUDA graph where the model is on a GPU and has one, torch never, graph always; `explain` says which it
    is and why. The model decodes in evaluation mode; after each step it is in the mode in which it was."""

    def __init__(
        self, model: Model, *, runner: str = "auto", layout: str = "paged", rows: int | None = None,
        chunk: int | None = None, pages: int | None = None, page: int = 16, memory: float | None = None,
        prefix: bool = True, backend: str = "sdpa", draft: Model | str | None = None, patience: float = math.inf
    ):  # fmt: skip
        _check_options(
            {"layout": layout, "runner": runner},
            {"rows": rows, "chunk": chunk, "pages": pages, "page": page},
        )
        check_draft(draft, model)
        # Its own layers, or a model.
        self.own = isinstance(draft, str)
        self.model, self.draft = model, None if isinstance(draft, str) else draft
        self.longest = context_of(model)
        self.modules = [*model.modules(), *([] if self.draft is None else self.draft.modules())]
        self.specs = model.cache_specs()
        weight = next(model.parameters())
        self.where: Where = {"device": weight.device, "dtype": weight.dtype}
        # Packed weights are no parameters; models worth packing are worth all threads.
        packed = isinstance(model, Prepared)
        self.weights = SHARED if packed else sum(p.numel() for p in model.parameters())
        # Why there is no graph; nothing where there is one.
        asked = [
            ("runner", runner, "torch"),
            ("layout", layout, "contiguous"),
            ("draft", draft, OWN),
        ]
        why = next((f"{name}={x!r} was asked for" for name, x, plain in asked if x == plain), "")
        why = why or why_plain(model, backend, self.draft, runner == "graph")
        if why and runner == "graph":
            raise UsageError(f"this model has no CUDA graph: {why}; leave runner out")
        self.pool: Pool | None = None
        steps, rows = self._reserve(rows, layout == "paged", pages, page, memory, not why)
        # A state that takes nothing back is known at the end of a text alone, not at the end of a page.
        whole = bool(taken_back(self.specs)) and not model.reads_source
        prefix = prefix and whole and self.pool is not None
        self.chunk = chunk or (512 if steps is None else 16384)
        self.scheduler = Scheduler(
            rows,
            pool=self.pool,
            prefix=prefix,
            patience=patience,
            longest=self.longest,
            border=border(model),
            source_pages=partial(source_pages, model, page) if self.sources else None,
        )
        self.reading = Reading(prefix, self.chunk, self.scheduler.scores)
        self.graph = None if steps is None else GraphRunner(steps, rows)
        forward = Forward(
            model, self.specs, self.where, backend, self.pool, draft, self.longest or 0
        )
        self.runners: list[Runner[Any]] = [TorchRunner(forward, why)]
        if self.graph is not None:
            # The memory of its slots is this engine's from now on.
            self.graph.batch(None, self.reading)
            self.runners.insert(0, self.graph)

    def _reserve(
        self,
        rows: int | None,
        paged: bool,
        pages: int | None,
        page: int,
        memory: float | None,
        graph: bool,
    ) -> tuple[GraphSteps | None, int]:
        """The memory of all rows: the pool, and the steps of a graph where there is one; and how many rows."""
        model, device, dtype = self.model, self.where["device"], self.where["dtype"]
        exact = pages is not None
        # A state takes its room whether there is a text or not.
        stateful = any(spec.state for spec in self.specs)
        most = rows or (MANY if graph and not stateful else ROWS)
        if not any(spec.token for spec in self.specs):
            # States alone: a graph gives each row a page that holds nothing, others need none.
            paged, page, pages = False, self.longest or UNBOUND, 2 * most if graph else None
        # Whether sources lie in pages too.
        self.sources = paged and model.reads_source and alike(model.source_specs(), self.specs)
        if paged and pages is None:
            far = (source_length(model) or 0) if self.sources else None
            # In a graph a draft model has its part of every page.
            own = self.draft.cache_specs() if graph and self.draft is not None else []
            specs = [*self.specs, *own]
            spare = unused(model) if graph else 0
            pages = pages_in(memory, device, specs, page, dtype, most, self.longest, far, spare)
        if graph and pages is not None:
            rows = rows or (most if stateful else rows_in(pages * page))
            longest = self.longest or pages * page
            steps = steps_of(model, rows, pages, page, longest, exact, self.draft)
            self.pool = steps.pool
            return steps, rows
        if paged and pages is not None:
            self.pool = Pool(self.specs, pages, page, **self.where)
        return None, most

    # --- what a user calls ---

    def explain(self) -> str:
        """Which runner serves, which parts are fast, which are not, and why."""
        # An engine runs without a package for texts.
        from regard.decode.defaults import described

        # What `regard.generate`, the commands and the server ask for, unless they are told otherwise.
        return "\n".join(filter(None, [*self.runners[0].explain(), described(self.model)]))

    def submit(self, request: Request) -> int:
        """Queue a request; its number names it in events."""
        check(request, self.model)
        if request.settings.draft and not self.own:
            check_drafted(request, self.draft, self.model)
        if self.pool is not None:
            slots = self.graph is not None and self.graph.takes(request, long=False)
            apart = slots and request.settings.beams > 1
            check_pages(request, self.pool, self.model, self.scheduler.source_pages(request), apart)
        if request.number >= 0:  # given before: the same words, another request
            request = replace(request, cached=None)
        return self.scheduler.submit(request)

    @torch.inference_mode()
    def cancel(self, number: int) -> list[Event]:
        """Take a request out, wherever it is; what it has so far is its result."""
        with self._whole():
            return self.scheduler.done(self.scheduler.stop(number, "cancelled"))

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def check(self) -> None:
        """Assert that nothing holds a page of an idle engine; what was lost is free again in any case."""
        if self.pool is None or not self.idle:
            return
        try:
            self.pool.check()
        except AssertionError:
            self.pool.clear()
            raise

    @property
    def waiting(self) -> list[Request]:
        """Requests in the queue, in the order in which they will be served."""
        return self.scheduler.waiting

    def put_off(self, kinds: abc.Sequence[Settings] = ()) -> None:
        """From now on a step measures no kernel and records no graph: `warm` does, when nobody waits, for the usual
        settings and these before they are met."""
        if self.graph is not None:
            self.graph.steps.put_off(self.graph.stepped(kinds))

    @property
    def cold(self) -> bool:
        """Whether something was put off."""
        return unmeasured() or any(recorder.wanted for recorder in self._recorders())

    @torch.inference_mode()
    def warm(self, measuring: bool = True) -> bool:
        """One piece of what was put off: a kernel to measure, which takes its time, or else a graph to record. Whether
        something was done."""
        recorders = [recorder for recorder in self._recorders() if recorder.wanted]
        if unmeasured() and measuring:
            measure()
        elif recorders and not unmeasured():
            with evaluation(self.modules), uncollected():
                recorders[0].warm()
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
            if not self.scheduler.trials.tried:
                raise
            cause, short = error, isinstance(error, torch.OutOfMemoryError)
        if not short:
            return self._blame(cause)
        # Its frames held memory.
        del cause
        torch.cuda.empty_cache()
        return self._blame(None)

    def run(self) -> Iterator[Event]:
        """Events until nothing is left to do."""
        while not self.idle:
            yield from self.step()

    # --- a step ---

    @torch.inference_mode()
    def _step(self) -> list[Event]:
        scheduler = self.scheduler
        puts_off = self.graph is not None and self.graph.steps.recorder.puts_off
        with self._whole(), evaluation(self.modules), uncollected(), put_off(puts_off):
            events = scheduler.expired() if scheduler.deadlines else []
            for request, rows, keys in scheduler.admit():
                self._enter(request, rows, keys)
            for batch in scheduler.batches.values():
                batch.waiting = bool(scheduler.waiting)
            running, unread = scheduler.load()
            with threads_for(self.weights * max(running, min(self.chunk, unread))):
                for key, batch in list(scheduler.batches.items()):
                    # An earlier batch may have put its requests back.
                    if scheduler.batches.get(key) is batch:
                        events += self._advance(key[1], batch)
            if scheduler.trials.groups:
                scheduler.judge()
            return scheduler.done(events)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """All or nothing: what raises inside leaves every request in the queue, as it was before."""
        before = Snapshot.of(self.scheduler)
        try:
            yield
        except BaseException:
            before.restore(self.scheduler)
            # What raised may have left caches and pages in any state.
            if self.pool is not None:
                self.pool.clear()
            if self.graph is not None:
                self.graph.clear()
            raise

    def _blame(self, cause: Exception | None) -> list[Event]:
        """After a step that raised, for want of memory where there is no other cause: the end of the one that ran
        alone; or nothing, and others are tried in the next steps."""
        number = self.scheduler.blame(short=cause is None)
        if number is None:
            return []
        why = SHORT.format(self.where["device"])
        if cause is not None:
            mistake = isinstance(cause, UsageError)
            why = str(cause) if mistake else FAILED.format(type(cause).__name__)
            if not mistake:
                LOG.warning("a step of one request raised, which ends", exc_info=cause)
        events = self.scheduler.stop(number, "error", why)
        for event in events:
            event.cause = cause
        return self.scheduler.done(events)

    def _advance(self, kind: Hashable, batch: Batch) -> list[Event]:
        events: list[Event] = []
        for part in (batch.prepare, batch.step):
            # Requests of which a row has outgrown the context change batches, all their rows together; for a cache that
            # forgets they are read once more.
            long = self.longest if kind is None and self.longest is not None else math.inf
            for request in batch.outgrown(long):
                rows, _ = self.scheduler.take(request)
                self._enter(request, rows)
            while batch.slots:
                try:
                    part()
                    break
                except OutOfPages:
                    self.scheduler.preempt_last()
            said, batch.events = batch.events, []
            events += said + self.scheduler.settle(batch)
        return events

    # --- batches ---

    def _enter(
        self, request: Request, rows: list[Sequence], keys: abc.Sequence[bytes] = ()
    ) -> None:
        """Rows of a request into the batch of its kind, which is made with its first request."""
        long = self.scheduler.outgrown(rows)
        runner = next(r for r in self.runners if r.takes(request, long))
        kind = runner.kind(request, long)
        batch = self.scheduler.batches.get((runner.name, kind))
        if batch is None:
            batch = runner.batch(kind, self.reading)
        self.scheduler.enter((runner.name, kind), batch, rows, keys)

    def _recorders(self) -> list[Recorder]:
        return [] if self.graph is None else self.graph.recorders()


def rows_in(tokens: int) -> int:
    """Rows of a graph over a pool of so many tokens: a power of two."""
    return min(MANY, 1 << max(ROWS, tokens // TYPICAL).bit_length() - 1)


def source_pages(model: Model, page: int, request: Request) -> int:
    """Pages that a request's source takes."""
    return -(-source_size(model, request) // page)


def _check_options(choices: dict[str, str], sizes: dict[str, int | None]) -> None:
    known = {"layout": ("paged", "contiguous"), "runner": ("auto", "torch", "graph")}
    for name, value in choices.items():
        if value not in known[name]:
            raise UsageError(
                f"an engine has no {name} {value!r}; choose {' or '.join(known[name])}"
            )
    for name, n in sizes.items():
        if n is not None and n < 1:
            raise UsageError(f"{name} is {n}; give 1 or more")


@contextmanager
def evaluation(modules: abc.Sequence[torch.nn.Module]) -> Iterator[None]:
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
    memory: float | None,
    device: torch.device,
    specs: abc.Sequence[CacheSpec],
    page: int,
    dtype: torch.dtype,
    rows: int,
    longest: int | None,
    far: int | None = None,
    spare: int = 0,
) -> int:
    """How many pages a memory holds: so many bytes, or (up to 1) a share of what is free, `spare` bytes besides what
    the device says; 0.9 on a GPU, and 1,024 pages elsewhere, if it is not said. No more than `rows` texts as long as
    the context need. Where sources lie in them too, of `far` tokens at most (0: of any length), these have as many
    again."""
    if memory is not None and not memory > 0:
        raise UsageError(f"memory is {memory}; give bytes, or a share of what is free such as 0.9")
    source = -(-(far or 0) // page)
    most = None if longest is None else rows * (-(-longest // page) + source)
    if memory is None and device.type != "cuda":
        return 1024 + (0 if far is None else max(1024, source))
    share = 0.9 if memory is None else memory
    if share <= 1:
        share *= free_memory(device) + spare
    # States lie beside the pages, one for each row, in float32 at least.
    states = sum(torch.Size(size).numel() for spec in specs for size in spec.state.values())
    share = max(0.0, share - states * max(4, dtype.itemsize) * (1 << (rows - 1).bit_length()))
    have = int(share) // (page * dtype.itemsize * max(1, sum(spec.numbers() for spec in specs)))
    if have < 1:
        raise UsageError(f"{int(share):,} bytes hold no page of {page} tokens; give more memory")
    return have if most is None else min(have, most)
