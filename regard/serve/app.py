"""The server itself: an ASGI app of the table of endpoints, with the page at `/`, and `serve`, which runs it until it
is told to end. The page's own files are in web/; its style, colours and maps are those of `regard look`."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from regard.errors import ENVIRONMENT, Fault, UsageError, nearest
from regard.see import page
from regard.serve.edge import LOG, Bound, Gone, Held, HTTPError, HTTPRequest
from regard.serve.endpoints import ENDPOINTS, Endpoint, described
from regard.serve.model_worker import Models
from regard.serve.sandbox import GRAMMARS, TEXTS
from regard.serve.schemas import refused, taken
from regard.text.chat import TEMPLATES

LOCAL = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?")
# Nothing comes from elsewhere, nothing goes elsewhere, nothing runs that is not a file of ours.
POLICY: dict[str, Any] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",
}
WAITING = 2048  # connections that the system holds for us
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# Of the tokens that are counted: our word, and vLLM's.
COUNTED = {"prompt": "prompt", "new": "generation"}
# Of regard/see/web.
SHARED = "base.css colours.css look.css "
SHARED += "data.js dom.js map.js overview.js palette.js row.js scale.js"


def own_name(host: str) -> bool:
    """Whether a Host header is an address, or this machine's name."""
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    with suppress(ValueError):
        return bool(ip_address(name.strip("[]")))
    return name.lower() in own_names()


@functools.cache
def own_names() -> set[str]:
    """What this machine is called; asked once, since a name server may take seconds for it."""
    return {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}


def page_files() -> dict[str, tuple[bytes, str]]:
    """By path: body and content type."""
    found = {"ramps.js": page.colours().encode(), "series.css": page.both().encode()}
    own = (Path(__file__).parent / "web").iterdir()
    for path in (*(page.WEB / name for name in SHARED.split()), *own):
        found[path.name] = path.read_bytes()
    kinds = {name: TYPES[name.rpartition(".")[2]] + "; charset=utf-8" for name in found}
    files = {f"/static/{name}": (body, kinds[name]) for name, body in found.items()}
    return {**files, "/": files["/static/index.html"]}


class App(Models):
    """An ASGI app."""

    def __init__(self, folders: Mapping[str, str | Path], **more: Any):
        super().__init__(folders, **more)
        self.files = page_files()
        self.held = Held()
        # What takes its time is made now, and not in front of a request.
        self.bodies = {path: taken(e.body) for path, e in ENDPOINTS.items() if e.body is not None}
        self.described = described(self.bodies)
        if not self.local and self.guard.path is None:
            own_names()
        # Workers and processes begin now: later there may be no file left for their pipes.
        for _ in range(2):
            self.pool.submit(time.sleep, 0.01)
        TEMPLATES.begin()
        GRAMMARS.begin()
        TEXTS.begin()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            for worker in self.workers.values():
                worker.close()
            self.pool.shutdown(wait=False, cancel_futures=True)
            await send({"type": "lifespan.shutdown.complete"})
            return
        http = HTTPRequest(scope, receive, send, self.limits, self.held)
        self.active += 1
        try:
            try:
                await self.answer(http)
            except HTTPError as error:
                await http.refuse(error)
            except UsageError as error:
                # A mistake that the library found, whatever found it.
                await http.refuse(refused(error))
            except Gone:
                raise
            except Exception as error:
                fault = HTTPError(500, "the server failed; its log says why", code="internal_error")
                fault.__cause__ = error
                await http.refuse(fault)
        except (Gone, asyncio.CancelledError) as gone:
            http.note["gone"] = True
            if isinstance(gone, asyncio.CancelledError):
                raise
        finally:
            self.active -= 1
            http.release()
            self.count(http)

    async def answer(self, http: HTTPRequest) -> None:
        path, method = http.scope["path"], http.scope["method"]
        fields = len(http.scope["headers"])
        host = http.headers.get("host", "")
        origin = http.headers.get("origin")
        if fields > self.limits.headers:
            raise HTTPError(431, f"{fields} header fields; send at most {self.limits.headers}")
        if self.local and not LOCAL.fullmatch(host):
            raise HTTPError(403, "this server answers to localhost alone")
        if origin is not None and origin.partition("://")[2] != host:
            raise HTTPError(403, "requests from other pages are not answered")
        if origin is not None and self.guard.path is None and not own_name(host):
            # Its page may be a stranger's, who has given a name of theirs this machine's address.
            raise HTTPError(
                403, "without keys, pages are answered by this machine's address or name"
            )
        if path in self.files and method in ("GET", "HEAD"):
            content, kind = self.files[path]
            await http.reply(content, kind, **POLICY)
            return
        known = "/v1/models" if path.startswith("/v1/models/") else path
        endpoint = ENDPOINTS.get(known)
        if endpoint is not None:
            http.bound = endpoint.bound
        self.guard.admit(http)
        if self.active > 2 * (self.limits.streams + self.limits.queue):
            raise HTTPError(503, "too many connections", code="overloaded", wait=1)
        if endpoint is None:
            raise HTTPError(404, f"there is no {path!r:.80}; {nearest(path, ENDPOINTS)}")
        if method not in endpoint.methods:
            takes = ", ".join(endpoint.methods)
            why = f"{path} takes {takes}, not {method:.20}"
            raise HTTPError(405, why, headers={"allow": takes})
        if endpoint.bound is Bound.ADMIN and not (http.user and http.user.admin):
            raise HTTPError(403, "loading and unloading need a key that is an admin's")
        http.note["path"] = known
        if endpoint.body is None:
            await self.run(http, endpoint, self)
            return
        body: Any = await http.read(self.bodies[known])
        name = getattr(body, "model", "")
        if name in self.folders:
            http.note["model"] = name
        about = self.serving(name, endpoint.serves) if endpoint.serves else self
        await http.unless_gone(self.run(http, endpoint, about, body))

    async def run(self, http: HTTPRequest, endpoint: Endpoint, *given: Any) -> None:
        """Send what an endpoint returns."""
        answer = await endpoint.run(http, *given)
        if answer is not None:
            await http.json(answer)

    def count(self, http: HTTPRequest) -> None:
        """Metrics and one line of log; neither holds a word of a prompt."""
        note = http.note
        seconds = asyncio.get_running_loop().time() - http.began
        path = note.pop("path", "other")
        status = http.status or 499
        model = note.get("model", "")
        self.metrics.add("regard_requests_total", model=model, path=path, status=status)
        self.metrics.time("regard_request_seconds", seconds, model=model)
        if http.first is not None:
            first = http.first - http.began
            self.metrics.time("regard_first_token_seconds", first, model=model)
            self.metrics.time("vllm:time_to_first_token_seconds", first, model_name=model)
            self.metrics.time("vllm:e2e_request_latency_seconds", seconds, model_name=model)
        for name, theirs in COUNTED.items():
            if name in note:
                self.metrics.add("regard_tokens_total", note[name], model=model, kind=name)
                self.metrics.add(f"vllm:{theirs}_tokens_total", note[name], model_name=model)
        if "cached" in note:
            self.metrics.add("vllm:prefix_cache_queries_total", note["prompt"], model_name=model)
            self.metrics.add("vllm:prefix_cache_hits_total", note["cached"], model_name=model)
        more = "".join(f" {k}={v}" for k, v in note.items())
        what = (http.scope["method"], path, status, seconds * 1e3, more)
        LOG.info("%s %s %s %d %.0f ms%s", http.id, *what)


class Protocol(H11Protocol):
    """uvicorn's, with a limit on how long the head of a request may take, the first and those after it, and on how
    long an answer may lie unread."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.unread = 0
        self.limits = self.config.app.limits  # type: ignore[union-attr]
        self.waiting = self.loop.call_later(self.limits.read_timeout / 3, self.hurry)

    def on_response_complete(self) -> None:
        self.wait()
        super().on_response_complete()

    def wait(self) -> None:
        self.waiting.cancel()
        self.unread = self.transport.get_write_buffer_size()
        self.waiting = self.loop.call_later(self.limits.write_timeout, self.hurry)

    def hurry(self) -> None:
        if 0 < self.transport.get_write_buffer_size() < self.unread:
            # A client that reads, if slowly, has time.
            self.wait()
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.cancel()
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """uvicorn's; when it is told to end, the app says that it is not ready, and what runs is finished."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio takes as many connections at once as may wait for it: few, since others wait for that, of many.
        for sock in sockets or ():
            sock.listen(WAITING)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.config.app.draining = True  # type: ignore[union-attr]
        super().handle_exit(sig, frame)
        # What is kept here is raised again at the end; one that ends it well is not: the exit code is 0.
        if not self.force_exit:
            self._captured_signals.clear()


def server_for(app: App) -> Server:
    # A step lets go of Python's lock at each call of C, a hundred times, and may wait so long to have it back.
    sys.setswitchinterval(0.0002)
    more: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
    more |= {"h11_max_incomplete_event_size": 64 << 10, "timeout_keep_alive": 30, "backlog": 16}
    more |= {"http": Protocol, "ws": "none", "lifespan": "on", "proxy_headers": False}
    return Server(uvicorn.Config(app, timeout_graceful_shutdown=round(app.limits.drain), **more))


def listen(host: str, port: int) -> socket.socket:
    """A socket, or a sentence that says why there is none."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=WAITING)
    except (OSError, OverflowError) as error:
        # Without the address, which Python says again.
        why = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0]
        what = f"{host}:{port} cannot be listened on: {why}"
        raise Fault(f"{what}; choose another with --port or --host", ENVIRONMENT) from None


def serve(app: App, sock: socket.socket) -> int:
    """Run until SIGTERM or Ctrl-C, then finish what runs."""
    # A log that cannot be written is no reason to stop.
    logging.raiseExceptions = False
    # Where no file is left, asyncio tells so, with frames, for each connection that it tries.
    for name in ("uvicorn", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    server_for(app).run([sock])
    if app.active:
        # What could not be finished in time is dropped with its threads.
        os._exit(1)
    return 0
