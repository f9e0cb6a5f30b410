"""The edge: one HTTP request and its answer. Bodies in, within limits; JSON or server-sent events out; errors in
OpenAI's form, from sentences that name no file and no prompt. Who may ask, and how much: keys and rates. What is
counted."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from hmac import compare_digest
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct

from regard.errors import UsageError
from regard.files import write_whole

LOG = logging.getLogger("regard.serve")
SMALL = 64 << 10  # bytes of a body that there is always room for, and of what is written at a time
T = TypeVar("T")
CHECKED = 1.0  # seconds between looks at the file of keys
# Of the times that are counted, seconds.
BOUNDS = "0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 120 300 +Inf"
KINDS = {401: "authentication_error", 403: "permission_error", 408: "timeout_error"}
KINDS |= {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
NAMED = re.compile(r"unknown field `(.*?)`|required field `(.*?)`", re.DOTALL)
AT = re.compile(r" - at `(?:key` in `)?\$\.?(.*?)`$", re.DOTALL)


class Bound(Enum):
    """How the work of an endpoint is bounded; every body, answer and key has its limits besides. What runs on a model
    has room for so many requests, tokens and numbers, and a deadline."""

    PUBLIC = "nothing is computed, no key is asked"
    AT_ONCE = "nothing is computed"
    ADMIN = "an admin's key"
    TEXT = "the length of the text"
    QUEUE = "the queue of the model's engine"
    PIECES = "pieces between the engine's steps, in turn with others"
    LOOKS = "such pieces, in a fortieth of the time while others wait"


@dataclass(frozen=True)
class Limits:
    """What a client may ask for. /v1/limits tells; those that differ between servers are flags of `regard serve`."""

    body: int = 2 << 20  # bytes of a request
    # Bytes of all requests that are being answered, and of answers on their way, but for the first 64 KiB of each.
    bodies: int = 64 << 20
    headers: int = 100  # fields of a request, which together have at most 64 KiB
    prompt: int = 131_072  # tokens of a prompt, or the model's context
    new_tokens: int = 16_384  # tokens of an answer, where the request names no number
    n: int = 16  # answers to one prompt
    prompts: int = 128  # prompts of one request
    schema: int = 65_536  # bytes of a schema
    queue: int = 256  # requests that run and wait, for each model; more are told to come back
    queue_tokens: int = 1 << 21  # of their prompts, for each model
    # Numbers in the answers that a model is making: log probabilities, maps, vectors.
    numbers: int = 1 << 22
    # Tokens of a text that is read in one piece: an encoder's, a vector's, a look's.
    whole: int = 4096
    streams: int = 1024  # streams that are open
    deadline: float = 600.0  # seconds for an answer
    read_timeout: float = 30.0  # seconds for a body to come; for the head of a request, a third
    write_timeout: float = 30.0  # seconds for an answer to be read, or a connection to be used
    drain: float = 30.0  # seconds for what runs when the server is told to end


class HTTPError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(
        self, status: int, message: str, param: Any = None, code: Any = None, wait: float = 0,
        headers: Any = (),
    ):  # fmt: skip
        super().__init__(message)
        kind = KINDS.get(status, "invalid_request_error")
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.status = status
        self.body = {"error": error}
        self.headers = dict[str, str](headers)
        if wait:
            self.headers["retry-after"] = str(max(1, round(wait)))


def late(limits: Limits) -> HTTPError:
    """Not a 408: clients would ask the same again, at once, of a server that has too much to do."""
    why = f"no answer within {limits.deadline:g} seconds; ask for less"
    return HTTPError(400, why, code="deadline_exceeded")


class Gone(Exception):
    """The client has left."""


@dataclass
class Held:
    """Bytes of the bodies of all requests."""

    bytes: int = 0


@dataclass
class HTTPRequest:
    """One request and its answer."""

    scope: dict[str, Any]
    receive: Callable[[], Awaitable[dict[str, Any]]]
    send: Callable[[dict[str, Any]], Awaitable[None]]
    limits: Limits
    all_held: Held = field(default_factory=Held)
    held: int = 0  # bytes of it, of this one's body
    id: str = field(default_factory=lambda: f"req_{secrets.token_hex(12)}")
    began: float = field(default_factory=time.monotonic)
    status: int = 0  # of the answer, once it has begun
    first: float | None = None  # when the first token came
    named: int = 0  # events that had a name
    user: Key | None = None
    bound: Bound = Bound.AT_ONCE  # of its endpoint
    note: dict[str, Any] = field(default_factory=dict)  # for the log: numbers and names of ours

    def __post_init__(self) -> None:
        pairs = self.scope["headers"]
        self.headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in pairs}

    @property
    def who(self) -> str:
        return "" if self.user is None else self.user.name

    async def body(self) -> bytes:
        """The body within the limits; the rest of a larger one is dropped, so that its sender comes to read."""
        body = bytearray()
        size = 0
        more = True
        try:
            async with asyncio.timeout(self.limits.read_timeout):
                while more:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    part = message.get("body", b"")
                    more = message.get("more_body", False)
                    size += len(part)
                    self.hold(min(size, self.limits.body) - SMALL)
                    body += part if size <= self.limits.body else b""
        except TimeoutError:
            if size <= self.limits.body:
                raise HTTPError(408, "the body did not come in time; send it at once") from None
        if size > self.limits.body:
            raise HTTPError(413, f"the body is larger than {self.limits.body:,} bytes; send less")
        return bytes(body)

    def hold(self, size: int) -> None:
        """Count so many bytes of the body until it is answered; where there is no room for them, refuse it. Alone it
        may be as large as its own limit lets it."""
        more = max(0, size - self.held)
        others = self.all_held.bytes - self.held
        if more and others and self.all_held.bytes + more > self.limits.bodies:
            why = f"other requests have {others:,} bytes; come back later"
            # The rest of it is left unread.
            closing = {"connection": "close"}
            raise HTTPError(429, why, code="queue_full", wait=1, headers=closing)
        self.held += more
        self.all_held.bytes += more

    def release(self) -> None:
        self.all_held.bytes -= self.held
        self.held = 0

    async def read(self, schema: type[T]) -> T:
        """The body as a struct; what is wrong is named by its field."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPError(415, "the body must be JSON; send Content-Type: application/json")
        try:
            return msgspec.json.decode(await self.body(), type=schema)
        except msgspec.ValidationError as error:
            text = str(error)
            at = AT.search(text)
            named = NAMED.search(text)
            last = next((x for x in named.groups() if x), "") if named else ""
            where = ".".join(x for x in (at[1] if at else "", last) if x)
            why = AT.sub("", text) + (f" - at {where}" if where else "")
            # A field may be called nothing.
            raise HTTPError(400, why, where if where or named else None) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HTTPError(400, f"the body is not JSON: {error!s:.200}") from None

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives; if the client leaves first, `work` is cancelled."""

        async def gone() -> None:
            while (await self.receive())["type"] != "http.disconnect":
                pass

        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(gone())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Gone
        finally:
            watch.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def write(self, message: dict[str, Any]) -> None:
        """Send; a client that does not read is dropped, with all that waits for it."""
        # uvicorn's side of the connection, which waits only when it has too much to send.
        cycle: Any = getattr(self.send, "__self__", None)
        if getattr(getattr(cycle, "flow", None), "write_paused", None) is False:
            return await self.send(message)
        try:
            async with asyncio.timeout(self.limits.write_timeout):
                await self.send(message)
        except TimeoutError:
            self.drop()

    def drop(self) -> NoReturn:
        """End the connection, with what lies in it."""
        transport = getattr(getattr(self.send, "__self__", None), "transport", None)
        if transport is not None:
            transport.abort()
        raise Gone from None

    async def begin(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        given = {"x-request-id": self.id, "x-content-type-options": "nosniff", **headers}
        fields = [(k.encode(), v.encode("latin-1")) for k, v in given.items()]
        await self.write({"type": "http.response.start", "status": status, "headers": fields})

    async def reply(self, content: bytes, kind: str, status: int = 200, **headers: str) -> None:
        about = {"content-type": kind, "content-length": str(len(content))}
        self.hold(self.held + len(content) - SMALL)
        await self.begin(status, about | headers)
        # A part at a time, as the client reads them: it is held until it has gone.
        last = max(0, len(content) - 1) // SMALL * SMALL
        for start in range(0, last, SMALL):
            body = content[start : start + SMALL]
            await self.write({"type": "http.response.body", "body": body, "more_body": True})
            if time.monotonic() > self.began + self.limits.deadline:
                self.drop()
        await self.done(content[last:])

    async def json(self, data: Any, status: int = 200, **headers: str) -> None:
        await self.reply(msgspec.json.encode(data), "application/json", status, **headers)

    async def refuse(self, error: HTTPError) -> None:
        """An error: as the answer, or, where that has begun, as its last event. One that is ours is in the log, with
        its frames, under the id that the answer names."""
        if error.status >= 500:
            LOG.error("%s failed with %d", self.id, error.status, exc_info=error)
            error.body["error"]["message"] += f" ({self.id})"
        if self.status:
            await self.events([{"type": "error", **error.body}], True, self.named > 0)
            return
        # Something of its body may be left unread.
        closing = {"connection": "close"} if error.status in (408, 413, 431) else {}
        await self.json(error.body, error.status, **error.headers, **closing)

    async def stream(self) -> None:
        """Begin an answer of events."""
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        await self.begin(200, headers | {"x-accel-buffering": "no"})

    async def events(self, data: list[Any], last: bool = False, named: bool = False) -> None:
        """Events, in one write; `named` by their type and numbered, as those of /v1/responses are."""
        body = b""
        for each in data:
            if named:
                body += b"event: " + each["type"].encode() + b"\n"
                each["sequence_number"] = self.named
                self.named += 1
            body += b"data: " + msgspec.json.encode(each) + b"\n\n"
        await self.write({"type": "http.response.body", "body": body, "more_body": not last})

    async def done(self, mark: bytes = b"data: [DONE]\n\n") -> None:
        await self.write({"type": "http.response.body", "body": mark})


class Key(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An entry of the file of keys: {"keys": [{"name": "ann", "sha256": "..."}]}. Rates are per minute."""

    name: str
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    admin: bool = False
    requests: Annotated[float, Meta(gt=0)] | None = None
    tokens: Annotated[float, Meta(gt=0)] | None = None
    priority: Annotated[int, Meta(ge=0, le=1000)] = 0  # the largest that its requests may have


class KeyFile(Struct, forbid_unknown_fields=True):
    keys: list[Key]


def new_key(path: Path, name: str, admin: bool) -> str:
    """Make a key and put its hash into the file; the key itself is told once."""
    key = f"rg-{secrets.token_urlsafe(32)}"
    known = [k for k in read_keys(path) if k.name != name] if path.exists() else []
    known.append(Key(name, hashlib.sha256(key.encode()).hexdigest(), admin))
    data = msgspec.json.encode(KeyFile(known))
    write_whole(path, msgspec.json.format(data, indent=2).decode() + "\n")
    os.chmod(path, 0o600)
    return key


def read_keys(path: Path) -> list[Key]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeyFile).keys
    except OSError as error:
        raise UsageError(f"the file of keys {path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"the file of keys {path} is not as it must be: {error}") from None


class Guard:
    """Keys and rates. Without a file of keys everyone may ask, and nobody may load or unload models."""

    def __init__(self, path: Path | None):
        self.path = path
        self.looked = time.monotonic()
        self.keys = [] if path is None else read_keys(path)
        self.rates: dict[tuple[str, str, float], tuple[float, float]] = {}  # left, and when

    def admit(self, http: HTTPRequest) -> None:
        """Find the key's entry; refuse a request without one, or beyond its rates."""
        if self.path is None or http.bound is Bound.PUBLIC:
            return
        if time.monotonic() - self.looked > CHECKED:
            self.looked = time.monotonic()
            try:
                self.keys = read_keys(self.path)
            except UsageError:
                LOG.warning("the file of keys cannot be read; the keys stay as they were")
        scheme, _, key = http.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).hexdigest()
        found = [k for k in self.keys if compare_digest(k.sha256, digest)]
        if scheme.lower() != "bearer" or not found:
            why = "this server needs an API key: Authorization: Bearer KEY"
            raise HTTPError(
                401, why, code="invalid_api_key", headers={"www-authenticate": "Bearer"}
            )
        http.user = found[0]
        for kind in ("requests", "tokens"):
            if (left := self.left(http.user, kind)) < 1:
                why = f"the key {http.user.name} has used its {kind} of this minute"
                wait = (1 - left) * 60 / getattr(http.user, kind)
                raise HTTPError(429, why, code="rate_limit_exceeded", wait=wait)
        self.left(http.user, "requests", 1)

    def left(self, key: Key, kind: str, taken: float = 0) -> float:
        """What is left of a rate: so many a minute, and a minute's worth at once."""
        rate = getattr(key, kind)
        now = time.monotonic()
        if rate is None:
            return math.inf
        left, at = self.rates.get((key.name, kind, rate), (rate, now))
        left = min(rate, left + (now - at) * rate / 60) - taken
        self.rates[key.name, kind, rate] = left, now
        return left


class Metrics:
    """What /metrics shows, in Prometheus' text form: by family and kind, lines and their values."""

    def __init__(self) -> None:
        self.families: dict[tuple[str, str], dict[str, float]]
        self.families = defaultdict(lambda: defaultdict(float))

    def add(self, name: str, value: float = 1, **labels: Any) -> None:
        self.families[name, "counter"][labelled(name, **labels)] += value

    def time(self, name: str, seconds: float, **labels: Any) -> None:
        rows = self.families[name, "histogram"]
        for bound in BOUNDS.split():
            rows[labelled(f"{name}_bucket", **labels, le=bound)] += seconds <= float(bound)
        rows[labelled(f"{name}_sum", **labels)] += seconds
        rows[labelled(f"{name}_count", **labels)] += 1

    def text(self, gauges: dict[str, float]) -> str:
        shown = {**self.families}
        lines = list[str]()
        for name, value in gauges.items():
            shown.setdefault((name.partition("{")[0], "gauge"), {})[name] = value
        for (name, kind), rows in shown.items():
            # In full: rates are differences of large numbers.
            numbers = ((row, int(x) if x == int(x) else x) for row, x in rows.items())
            lines += [f"# TYPE {name} {kind}", *(f"{row} {x!r}" for row, x in numbers)]
        return "\n".join(lines) + "\n"


def labelled(name: str, **labels: Any) -> str:
    """A line of /metrics, without its number."""
    marks = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    inner = ",".join(f'{k}="{str(v).translate(marks)}"' for k, v in labels.items())
    return f"{name}{{{inner}}}" if inner else name
