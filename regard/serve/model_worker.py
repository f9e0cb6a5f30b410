"""Models by name, for each the one thread that owns its engine, and handles for requests that wait for its words.

Everything that touches the engine comes through the thread's inbox: requests and cancels before each step, and jobs
(vectors, labels, a look inside). A job is a generator that stops after each piece, which reads no more tokens than a
step does. Between two steps runs one piece of one job; jobs take turns, so that neither streams nor small jobs wait
for a large one; looks take a fortieth of the time at most. A job whose client has left, or that is late, ends with its
piece. What steps of a few milliseconds say goes to the event loop in one call."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import queue
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from regard.decode.check import written
from regard.decode.defaults import settings_of
from regard.decode.engine import Engine
from regard.decode.generate import special_of
from regard.decode.settings import Event, Request, Result, Tops
from regard.errors import VERSION, UsageError, nearest
from regard.evaluation.model import Opened, loaded, reads_text
from regard.fast.invariant import invariant as steady
from regard.files import resolve_model
from regard.layers import LM, MLM, Classify
from regard.machine import pick_device, trim
from regard.models import Pair
from regard.serve.edge import LOG, Bound, Guard, HTTPError, HTTPRequest, Limits, Metrics, late
from regard.serve.sandbox import About
from regard.serve.schemas import refused
from regard.text import Stream, Tokenizer

BACKLOG = 4096  # tokens of an answer that a client may leave unread
PAUSE = 39  # times as long as a look took, until the next one
PATIENCE = 0.1  # seconds that a request waits for a row before long answers take turns
REST = 2.0  # seconds without work, after which memory is given back
TIDY = 10.0  # seconds with work, after which it is given back too: that takes some milliseconds
HOLD = 0.02  # seconds: between two calls of the event loop, and to gather requests at the start
LOOKED_AT = 256  # requests that ran, kept so that they can be looked into
LOOKED_TOKENS = 1 << 16, 1 << 20  # of one of them, and of all
T = TypeVar("T")
Entry = tuple[int, float | None, Tops]  # a token, its log probability, the best ones there


@dataclass(frozen=True)
class Options:
    """How a model is made ready; flags of `regard serve`."""

    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"
    rows: int | None = None  # answers that are written together (64; in a CUDA graph up to 256)
    cache_memory: float | None = None  # bytes of the cache, or a share of what is free
    invariant: bool = False  # answers do not depend, to the bit, on what else runs


@dataclass
class Job:
    """Work between two steps, its result, and within what it must be there."""

    pieces: Generator[None, None, Any]
    limits: Limits
    began: float = field(default_factory=time.monotonic)
    result: Future[Any] = field(default_factory=Future)

    def run(self) -> bool:
        """The next piece; whether more follow."""
        try:
            if self.result.cancelled():
                self.pieces.close()
                return False
            if time.monotonic() > self.began + self.limits.deadline:
                self.pieces.close()
                raise late(self.limits)
            next(self.pieces)
            return True
        except BaseException as end:
            # Its client may leave at any time.
            with suppress(InvalidStateError):
                if isinstance(end, StopIteration):
                    self.result.set_result(end.value)
                else:
                    self.result.set_exception(end)
            return False


class Piece(NamedTuple):
    """A token of an answer, and the text that it completes."""

    sample: int
    text: str
    entry: Entry


Arrival = tuple[int, list[Piece], list[Result] | None]
Said = tuple["RequestHandle", list[Piece], list[Result] | None]


class RequestHandle:
    """One request on its way; but for `fail` its methods are for the engine's thread. `live`: its text is wanted while
    it is made, or must be to find stop strings."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, stop: Any, live: bool, wake: Any
    ):
        self.request = request
        self.tokenizer = tokenizer
        self.stop = stop
        self.wake = wake
        self.after = [] if request.source is not None else request.ids
        self.live = (live or bool(stop)) and tokenizer is not None and request.settings.beams == 1
        self.loop = asyncio.get_running_loop()
        self.pending: list[Piece] = []
        self.results: list[Result] | None = None
        self.fault: Exception | None = None
        self.first: float | None = None  # when its first token was there
        self.cause: Exception | None = None  # what the model raised, where that ended it
        # Of the engine's thread.
        self.texts: dict[int, tuple[Stream, list[str]]] = {}
        self.said: dict[int, int] = defaultdict(int)
        if self.live:
            request.stop = self.hear

    def hear(self, sample: int, ids: list[int]) -> bool:
        """One token more; whether its text is complete. After a step that failed a token comes again."""
        stream, pieces = self.texts.get(sample, (None, []))
        if stream is None or len(ids) != len(pieces) + 1:
            stream, pieces = self.stream(), []
            self.texts[sample] = stream, pieces
        for token in ids[len(pieces) :]:
            pieces.append(stream.push([token]))
        return stream.stopped is not None

    def stream(self) -> Stream:
        assert self.tokenizer is not None
        return Stream(self.tokenizer, self.stop, after=self.after)

    def piece(self, event: Event) -> Piece:
        text = self.texts[event.row][1][self.said[event.row]]
        self.said[event.row] += 1
        assert event.token is not None
        return Piece(event.row, text, (event.token, event.logprob, event.top_logprobs))

    def finish(self, results: list[Result]) -> list[Result]:
        """The results with their whole texts."""
        for sample, result in enumerate(results):
            if self.live:
                stream, pieces = self.texts.get(sample) or (self.stream(), [])
                result.text = "".join(pieces) + stream.finish()
            elif self.tokenizer is not None:
                result.text = self.tokenizer.decode(result.ids, after=self.after)
        return results

    def fail(self, fault: Exception) -> None:
        self.fault = self.fault or fault
        self.wake.set()


async def arrivals(handles: Sequence[RequestHandle]) -> AsyncIterator[list[Arrival]]:
    """What comes for handles that share their `wake`, until all is there: which handle, its pieces, its results."""
    missing = list(range(len(handles)))
    while missing:
        await handles[0].wake.wait()
        handles[0].wake.clear()
        come: list[Arrival] = []
        for i in missing:
            handle = handles[i]
            if handle.fault is not None:
                raise handle.fault
            if handle.pending or handle.results is not None:
                come.append((i, handle.pending, handle.results))
                handle.pending = []
        missing = [i for i in missing if handles[i].results is None]
        if come:
            yield come


class ModelWorker:
    """A model that is served. `submit`, `cancel` and `work` are for the event loop; what begins with _ happens in its
    thread, but for `_deliver`."""

    def __init__(self, name: str, folder: str | Path, app: Models):
        self.name = name
        self.app = app
        self.created = int(time.time())
        o = app.options
        plain = loaded(folder, pick_device(o.device)[0], o.dtype) if o.invariant else None
        self.opened = Opened(plain or folder, device=o.device, dtype=o.dtype, quantize=o.quantize)
        self.tokenizer = self.opened.tokenizer
        if self.tokenizer is not None:
            # Now, and not in front of the first request, nor in the engine's thread: the copy that takes special
            # tokens for text, which needs 0.4 s.
            self.tokenizer.encode("", literal=True)
            self.opened.coder  # noqa: B018
        self.model: Any = self.opened.model
        self.engine: Engine | None = None
        head, tower = (getattr(self.model.config, name, None) for name in ("head", "tower"))
        causal = isinstance(head, LM) and (tower is None or tower.causal)
        if self.model.reads_source or causal:
            more = dict[str, Any]()
            memory = o.cache_memory
            if memory is None and next(self.model.parameters()).device.type == "cpu":
                memory = 2.0**30
            if plain is not None:
                plain = plain.float() if self.opened.precision == "fp32" else plain
                self.model = steady(plain)
                more = {"backend": "ordered"}
            more |= {"rows": o.rows, "memory": memory, "patience": PATIENCE}
            self.engine = Engine(self.model, **more)
            # What requests ask for that leave all to the model's folder.
            self.engine.put_off([settings_of(self.model, {"temperature": 1.0, "beams": 1})(1)])
        config = self.model.origin and sorted(self.model.origin.config.items())
        about = (VERSION, torch.__version__, self.opened.precision, torch.get_num_threads(), config)
        # What an answer depends on besides the request.
        self.fingerprint = "fp_" + hashlib.sha256(repr(about).encode()).hexdigest()[:12]
        self.known: dict[int, bytes] = {}  # bytes of tokens
        self.grammars: Any = None  # its vocabulary, see regard.serve.grammar
        self.about: About | None = None  # for the sandbox
        if self.tokenizer is not None:
            ends = list(special_of(self.model).eos)
            self.about = About(self.model.origin, written(self.model).vocab, ends)
        # Of the thread: handles by the engine's numbers, what the event loop is to be told, and when it was told last.
        self.handles: dict[int, RequestHandle] = {}
        self.said: list[Said] = []
        self.told = 0.0
        # Of the event loop: handles that are not done; requests that have room here, their tokens, and the
        # numbers of their answers.
        self.open: set[RequestHandle] = set()
        self.requests = self.tokens = self.numbers = 0
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.jobs = deque[Job]()
        self.looks = deque[Job]()
        self.next_look = self.next_warm = self.next_trim = 0.0
        self.ended = self.closing = False
        # Whether what the first requests would wait for has been done: graphs of every number of rows.
        self.warm = self.engine is None or not self.engine.cold
        self.dead: str | None = None
        self.thread = threading.Thread(target=self._run, name=f"engine of {name}", daemon=True)
        self.thread.start()

    @property
    def nbytes(self) -> int:
        """Memory of its weights and of its cache."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        pool = self.engine.pool if self.engine is not None else None
        weights = {t.data_ptr(): t.nbytes for t in tensors}
        return sum(weights.values()) + (0 if pool is None else pool.nbytes)

    @property
    def places(self) -> int:
        """Tokens of a piece of work: as many as a step of the engine reads."""
        if self.engine is not None:
            return self.engine.chunk
        return 512 if next(self.model.parameters()).device.type == "cpu" else 16384

    def words(self, param: str) -> Tokenizer:
        """Its tokenizer; without one, what a field asks for cannot be."""
        if self.tokenizer is None:
            why = f"{self.name} has no tokenizer, which {param} needs; it reads ids alone"
            raise HTTPError(400, why, param)
        return self.tokenizer

    def token(self, index: int) -> bytes:
        """The bytes of a token."""
        if index not in self.known and self.tokenizer is not None:
            self.known[index] = self.tokenizer.token_bytes(index)
        return self.known.get(index, b"")

    def shown(self, index: int) -> str:
        """A token as text; where it is a part of a character, its bytes."""
        token = self.token(index)
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in token)

    @contextmanager
    def room(self, tokens: int, numbers: int = 0) -> Iterator[None]:
        """Room for a request of so many tokens, and numbers in its answer, given back at its end; or it is told to come
        back."""
        limits = self.app.limits
        if self.dead is not None or self.closing:
            raise HTTPError(503, f"{self.name} is not being served now", code="unavailable", wait=5)
        full = self.requests >= limits.queue
        # Alone a request may be as large as its own limits let it.
        full |= bool(self.tokens) and self.tokens + tokens > limits.queue_tokens
        full |= bool(self.numbers and numbers) and self.numbers + numbers > limits.numbers
        if full:
            why = f"{self.name} has {self.requests} requests of {self.tokens:,} tokens"
            raise HTTPError(429, f"{why}; come back later", code="queue_full", wait=1)
        self.requests += 1
        self.tokens += tokens
        self.numbers += numbers
        try:
            yield
        finally:
            self.requests -= 1
            self.tokens -= tokens
            self.numbers -= numbers

    def submit(self, handle: RequestHandle) -> None:
        """Put a request that has room into the engine's queue; what is wrong with it becomes its fault. Who submits
        also cancels."""
        self.open.add(handle)
        self.inbox.put(lambda: self._enter(handle))

    def cancel(self, handle: RequestHandle) -> None:
        """Take a request out, if it is not done."""
        self.open.discard(handle)
        if handle.results is None:
            self.inbox.put(lambda: self._cancel(handle))

    async def work(
        self, http: HTTPRequest, pieces: Generator[None, None, T], sizes: Sequence[int], numbers: int,
        param: str = "input", whole: bool = True,
    ) -> T:  # fmt: skip
        """What a job returns that reads texts of so many tokens and says so many numbers; a mistake in `param` is
        named. `whole`: each text is read in one piece."""
        bounds = (Bound.QUEUE, Bound.PIECES, Bound.LOOKS)
        assert http.bound in bounds, "the table says how it is bounded"
        if whole:
            self.check_whole(sizes, param)
        with self.room(sum(sizes), numbers):
            job = Job(pieces, self.app.limits)
            jobs = self.looks if http.bound is Bound.LOOKS else self.jobs
            self.inbox.put(lambda: jobs.append(job))
            try:
                return await asyncio.wrap_future(job.result)
            except UsageError as error:
                raise refused(error, param) from None

    def check_whole(self, sizes: Sequence[int], param: str = "input") -> None:
        """A text that is read in one piece has so many tokens at most: others wait for it."""
        longest = max(sizes, default=0)
        if longest > self.app.limits.whole:
            most = f"this server reads at most {self.app.limits.whole:,} in one piece"
            raise HTTPError(400, f"a text has at least {longest:,} tokens; {most}", param)

    def close(self) -> None:
        """End the thread after what it does now; those who wait are told."""
        self.closing = True
        self.inbox.put(lambda: setattr(self, "ended", True))

    def _run(self) -> None:
        try:
            while not self.ended:
                self._round()
        except BaseException as error:
            LOG.error("the engine of %s has ended", self.name, exc_info=True)
            self.dead = type(error).__name__
        fault = HTTPError(503, f"{self.name} is served no more", code="unavailable", wait=5)
        with suppress(queue.Empty):
            while True:
                self.inbox.get_nowait()()
        for handle in self.handles.values():
            handle.loop.call_soon_threadsafe(handle.fail, fault)
        for job in (*self.jobs, *self.looks):
            with suppress(InvalidStateError):
                job.result.set_exception(fault)

    def _round(self) -> None:
        if self._warmed():
            return
        with suppress(queue.Empty):
            if (self.engine is None or self.engine.idle) and not (self.jobs or self.looks):
                self._next()()
                # Requests that are on their way begin together.
                end = time.monotonic() + HOLD
                while self.app.active > len(self.open) and time.monotonic() < end:
                    self.inbox.get(timeout=HOLD / 10)()
            while True:
                self.inbox.get_nowait()()
        began = time.monotonic()
        writes = self.engine is not None and not self.engine.idle
        if began >= self.next_trim:
            self.next_trim = began + TIDY
            trim()
        if self.looks and (began >= self.next_look or not (writes or self.jobs)):
            self._piece(self.looks)
            self.next_look = time.monotonic() + PAUSE * (time.monotonic() - began)
        elif self.jobs:
            self._piece(self.jobs)
        if self.engine is not None and writes:
            self._tell(self.engine.step())

    def _next(self) -> Callable[[], None]:
        """What comes next. Once nothing has come for a while, memory that nobody uses goes back to the system, and
        the engine's books are checked."""
        with suppress(queue.Empty):
            return self.inbox.get(timeout=REST)
        trim()
        try:
            if self.engine is not None:
                self.engine.check()
        except AssertionError:
            LOG.error(
                "the pages of %s were not in order; all are free now", self.name, exc_info=True
            )
        return self.inbox.get()

    def _warmed(self) -> bool:
        """While nobody waits: a piece of what steps put off, so that nobody waits for it. Where somebody always does,
        graphs are recorded between two steps, in as little of the time as looks get."""
        if self.engine is None or not self.engine.cold:
            self.warm = True
            return False
        nobody = self.engine.idle and not (self.jobs or self.looks) and self.inbox.empty()
        if not nobody and time.monotonic() < self.next_warm:
            return False
        began = time.monotonic()
        try:
            done = self.engine.warm(measuring=nobody)
        except Exception as error:
            # It is not tried again.
            LOG.warning("a graph of %s was not recorded", self.name, exc_info=error)
            done = True
        self.next_warm = time.monotonic() + PAUSE * (time.monotonic() - began)
        return done and nobody

    def _piece(self, jobs: deque[Job]) -> None:
        """A piece of the job whose turn it is; the next one is another's."""
        job = jobs.popleft()
        if job.run():
            jobs.append(job)

    def _enter(self, handle: RequestHandle) -> None:
        assert self.engine is not None
        try:
            self.handles[self.engine.submit(handle.request)] = handle
        except Exception as error:
            fault = refused(error) if isinstance(error, UsageError) else error
            handle.loop.call_soon_threadsafe(handle.fail, fault)

    def _cancel(self, handle: RequestHandle) -> None:
        number = next((n for n, t in self.handles.items() if t is handle), None)
        if number is not None and self.engine is not None:
            del self.handles[number]
            self.engine.cancel(number)

    def _tell(self, events: list[Event]) -> None:
        """Hand what a step said to the event loop, with what was held before it."""
        now = time.monotonic()
        due = bool(self.jobs) or (bool(self.looks) and now >= self.next_look)
        for event in events:
            handle = self.handles.get(event.request)
            if handle is None:
                continue
            handle.first = handle.first or now
            handle.cause = event.cause
            if event.done is not None:
                del self.handles[event.request]
                self.said.append((handle, [], handle.finish(event.done)))
                due = True
            elif handle.live:
                self.said.append((handle, [handle.piece(event)], None))
        if self.said and (due or now - self.told >= HOLD):
            self.said[0][0].loop.call_soon_threadsafe(self._deliver, self.said)
            self.said = []
            self.told = now

    def _deliver(self, said: list[Said]) -> None:
        """In the event loop again."""
        for handle, pieces, results in said:
            handle.pending += pieces
            handle.wake.set()
            if results is not None:
                handle.results = results
                self.open.discard(handle)
            elif len(handle.pending) > BACKLOG:
                handle.fail(HTTPError(408, "the answer was not read in time", code="slow_reader"))
                self.cancel(handle)


class Ran(NamedTuple):
    """A request that ran: whose it was, its model, and the ids of each prompt with each of its answers."""

    user: str
    model: str
    texts: list[tuple[list[int], list[int]]]
    tokens: int


class Models:
    """Models by name, and what is common to all requests."""

    def __init__(
        self, folders: Mapping[str, str | Path], *, start: Sequence[str] = (), keys: Path | None = None,
        options: Options = Options(), limits: Limits = Limits(),  # noqa: B008 - they are frozen
        memory: float | None = None, local: bool = True,
    ):  # fmt: skip
        self.folders = folders
        self.options = options
        self.limits = limits
        self.memory = memory
        self.local = local
        self.streams = self.active = 0
        self.draining = False
        self.described = b""  # what it takes, as OpenAPI has it
        self.guard = Guard(keys)
        self.metrics = Metrics()
        self.workers: dict[str, ModelWorker] = {}
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="worker")
        self.ran: OrderedDict[str, Ran] = OrderedDict()
        self.changing = asyncio.Lock()
        self.changes = set[asyncio.Future[None]]()
        for name in start or folders:
            self.load(name)

    def load(self, name: str) -> None:
        """Make a model ready, within the memory that there is; the garbage collector passes over it (0.3 s)."""
        folder = resolve_model(self.folders[name])
        need = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
        used = sum(worker.nbytes for worker in self.workers.values())
        if self.memory is not None and used + need > self.memory:
            raise UsageError(
                f"{name} has {need / 2**30:.2f} GiB of weights, and of {self.memory / 2**30:.2f} GiB "
                f"{used / 2**30:.2f} are in use; unload a model, or raise --memory"
            )
        self.workers[name] = ModelWorker(name, folder, self)
        gc.freeze()

    async def change(self, work: Coroutine[Any, Any, None]) -> None:
        """Load or unload, one after the other, and each to its end, even where the one who asked for it has left:
        between a look at what is loaded and the change nothing else may change it."""

        async def alone() -> None:
            async with self.changing:
                await work

        self.changes.add(task := asyncio.ensure_future(alone()))
        task.add_done_callback(self.changes.discard)
        await asyncio.shield(task)

    async def unload(self, name: str) -> None:
        """Take a model out when what runs on it is done."""
        worker = self.worker(name)
        end = time.monotonic() + self.limits.drain
        worker.closing = True
        while worker.requests and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self.workers.pop(name).close()
        gc.unfreeze()

    def worker(self, name: str) -> ModelWorker:
        if name not in self.workers:
            if name in self.folders:
                raise HTTPError(503, f"{name} is not loaded", "model", "model_not_loaded", wait=5)
            why = f"there is no model {name!r:.80}; {nearest(name, self.workers)}"
            raise HTTPError(404, why, "model", "model_not_found")
        return self.workers[name]

    def serving(self, name: str, kind: str) -> ModelWorker:
        """A model that serves this; "any": whatever it serves."""
        worker = self.worker(name)
        kinds = serves(worker)
        if kind == "any" or kind in kinds:
            return worker
        what = f"does not serve {kind}; it serves {', '.join(kinds)}"
        if kind == "completions":
            writes = worker.engine is not None
            what = "is asked with pictures" if writes else "is an encoder and writes nothing"
            what += f"; here it serves {', '.join(kinds) or 'nothing'}"
        raise HTTPError(400, f"{name} {what}", "model")

    async def in_thread(self, job: Callable[[], T], param: str | None = None) -> T:
        """Run something that takes time beside the event loop; a mistake in `param` is named."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, job)
        except UsageError as error:
            raise refused(error, param) from None
        except RecursionError:
            raise HTTPError(400, "the body is nested too deep; send it flatter", param) from None

    @contextmanager
    def streaming(self) -> Iterator[None]:
        if self.streams >= self.limits.streams:
            raise HTTPError(
                429, f"{self.streams} streams are open", code="too_many_streams", wait=1
            )
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1

    def spent(self, http: HTTPRequest, worker: ModelWorker, **tokens: int) -> None:
        """Count the tokens of a request: for the log, and for the rate of its key."""
        http.note |= {"model": worker.name, **tokens}
        if http.user is not None:
            self.guard.left(http.user, "tokens", sum(tokens.values()))

    def remember(self, name: str, ran: Ran) -> None:
        """Keep the ids of a request for /v1/look: the last ones, if they are not too long, nor all together."""
        one, most = LOOKED_TOKENS
        if ran.tokens <= one:
            self.ran[name] = ran
        while len(self.ran) > LOOKED_AT or sum(r.tokens for r in self.ran.values()) > most:
            self.ran.popitem(last=False)


def serves(worker: ModelWorker) -> list[str]:
    """What a model can be asked for."""
    head = getattr(worker.model.config, "head", None)
    kinds = []
    if worker.engine is not None and (not worker.model.reads_source or reads_text(worker.model)):
        chats = ["chat", "responses"] if worker.tokenizer and worker.tokenizer.templates else []
        kinds += ["completions", *chats]
        kinds += ["translations"] if worker.model.reads_source else []
    kinds += ["classify"] if isinstance(head, Classify) else []
    kinds += ["fill"] if isinstance(head, MLM) else []
    if worker.tokenizer is None or not reads_text(worker.model):
        return kinds
    return [*kinds, "embeddings", *([] if isinstance(worker.model, Pair) else ["look"])]
