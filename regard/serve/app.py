"""The server itself: an ASGI app of a table of routes, with the page at `/`, and `serve`, which runs it until it is
told to end. The page's own files are in web/; its style, colours and maps are those of `regard look`."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from regard.decode.check import context_of
from regard.errors import ENVIRONMENT, VERSION, Fault, UsageError, nearest
from regard.see import page
from regard.serve import answers, schemas, tasks
from regard.serve.edge import LOG, Gone, Held, HTTPError, HTTPRequest, labelled, refused
from regard.serve.model_worker import Models, ModelWorker, serves
from regard.serve.prompts import chat_ids, encoded
from regard.serve.sandbox import GRAMMARS, TEXTS
from regard.text import needed
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
        self.draining, self.files, self.held = False, page_files(), Held()
        # What takes its time is made now, and not in front of a request.
        described()
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
        path, method, fields = http.scope["path"], http.scope["method"], len(http.scope["headers"])
        host, origin = http.headers.get("host", ""), http.headers.get("origin")
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
        self.guard.admit(http, path)
        if self.active > 2 * (self.limits.streams + self.limits.queue):
            raise HTTPError(503, "too many connections", code="overloaded", wait=1)
        known = "/v1/models" if path.startswith("/v1/models/") else path
        route = ROUTES.get(known)
        if route is None:
            raise HTTPError(404, f"there is no {path!r:.80}; {nearest(path, ROUTES)}")
        takes = "GET, HEAD" if route.schema is None else "POST"
        if method not in takes.split(", "):
            raise HTTPError(
                405, f"{path} takes {takes}, not {method:.20}", headers={"allow": takes}
            )
        if path.startswith("/admin/") and not (http.user and http.user.admin):
            raise HTTPError(403, "loading and unloading need a key that is an admin's")
        http.note["path"] = known
        if route.schema is None:
            await route.run(self, http)
        else:
            body = await http.read(route.schema)
            if body.model in self.folders:
                http.note["model"] = body.model
            await http.unless_gone(route.run(self, http, body))

    def count(self, http: HTTPRequest) -> None:
        """Metrics and one line of log; neither holds a word of a prompt."""
        note, seconds = http.note, asyncio.get_running_loop().time() - http.began
        path, status = note.pop("path", "other"), http.status or 499
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


def model_data(worker: ModelWorker) -> dict[str, Any]:
    about: dict[str, Any] = {"id": worker.name, "object": "model", "created": worker.created}
    about |= {"owned_by": "regard", "serves": serves(worker), "context": context_of(worker.model)}
    if "fill" in about["serves"]:
        about["mask"] = needed(worker.tokenizer).tokens.get("mask_token")
    return about


async def models(app: App, http: HTTPRequest) -> None:
    """All models, or the one that the path names."""
    name = http.scope["path"].removeprefix("/v1/models").removeprefix("/")
    each = [model_data(worker) for worker in ([app.worker(name)] if name else app.workers.values())]
    await http.json(each[0] if name else {"object": "list", "data": each})


async def health(app: App, http: HTTPRequest) -> None:
    dead = [worker.name for worker in app.workers.values() if worker.dead is not None]
    await http.json({"status": "failed" if dead else "ok"}, 503 if dead else 200)


async def ready(app: App, http: HTTPRequest) -> None:
    going = [
        worker for worker in app.workers.values() if worker.dead is None and not worker.closing
    ]
    state = "ready" if all(worker.warm for worker in going) else "warming"
    state = "draining" if app.draining else state if going else "empty"
    await http.json({"status": state}, 200 if state == "ready" else 503)


async def metrics(app: App, http: HTTPRequest) -> None:
    gauges: dict[str, float] = {"regard_streams": app.streams, "regard_exchanges": app.active}
    for name, worker in app.workers.items():

        def gauge(what: str, value: float, name: str = name) -> None:
            label = "model_name" if what.startswith("vllm:") else "model"
            gauges[labelled(what, **{label: name})] = value

        gauge("regard_requests_open", len(worker.open))
        gauge("regard_memory_bytes", worker.nbytes)
        if worker.engine is not None:
            waiting, pool = len(worker.engine.waiting), worker.engine.pool
            gauge("regard_requests_waiting", waiting)
            gauge("vllm:num_requests_waiting", waiting)
            gauge("vllm:num_requests_running", max(0, len(worker.handles) - waiting))
            if pool is not None:
                gauge("regard_pages", len(pool.users))
                gauge("regard_pages_free", pool.available)
                gauge("vllm:kv_cache_usage_perc", 1 - pool.available / len(pool.users))
    await http.reply(app.metrics.text(gauges).encode(), "text/plain; version=0.0.4; charset=utf-8")


async def tokenize(app: App, http: HTTPRequest, body: schemas.Tokenize) -> None:
    worker = app.worker(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise HTTPError(400, "give prompt or messages, one of them", "prompt")

    most = app.limits.prompt
    if body.messages is not None:
        ids = await chat_ids(app, worker, body.messages, (), body.chat_template_kwargs)
    else:
        how = {"special": body.add_special_tokens, "literal": body.literal}
        (ids,) = await encoded(app, worker, [body.prompt or ""], most, "prompt", **how)
    texts = await app.in_thread(lambda: [answers.shown(worker.token(i)) for i in ids])
    await http.json({"tokens": ids, "count": len(ids), "texts": texts})


async def detokenize(app: App, http: HTTPRequest, body: schemas.Detokenize) -> None:
    worker, skip = app.worker(body.model), body.skip_special_tokens
    if len(body.tokens) > app.limits.prompt:
        raise HTTPError(
            400, f"{len(body.tokens):,} tokens; send at most {app.limits.prompt:,}", "tokens"
        )
    decode = worker.words("tokens").decode
    text = await app.in_thread(lambda: decode(body.tokens, skip_special=skip), "tokens")
    await http.json({"prompt": text})


@functools.cache
def described() -> bytes:
    """What is taken, as OpenAPI has it; made once."""
    taken = [route.schema for route in ROUTES.values() if route.schema is not None]
    refs, parts = msgspec.json.schema_components(taken, ref_template="#/components/schemas/{name}")
    wrong = {"description": "an error", "content": {"application/json": {}}}
    answered = {"200": {"description": "the answer"}, "4XX": wrong, "503": wrong}
    paths: dict[str, Any] = {}
    for path, route in ROUTES.items():
        about: dict[str, Any] = {"responses": answered, "summary": route.run.__doc__ or ""}
        if route.schema is not None:
            content = {"application/json": {"schema": refs[taken.index(route.schema)]}}
            about["requestBody"] = {"required": True, "content": content}
        paths[path] = {"get" if route.schema is None else "post": about}
    head = {"openapi": "3.1.0", "info": {"title": "Regard", "version": VERSION}}
    return msgspec.json.encode({**head, "paths": paths, "components": {"schemas": parts}})


async def openapi(app: App, http: HTTPRequest) -> None:
    """What this server takes, from the same structs that check it."""
    await http.reply(described(), "application/json")


class Route(NamedTuple):
    run: Callable[..., Coroutine[Any, Any, None]]
    schema: Any = None  # of its body, if it takes one


ROUTES = {
    "/health": Route(health),
    "/ready": Route(ready),
    "/version": Route(lambda app, http: http.json({"version": VERSION})),
    "/metrics": Route(metrics),
    "/openapi.json": Route(openapi),
    "/v1/models": Route(models),
    "/v1/limits": Route(lambda app, http: http.json(dataclasses.asdict(app.limits))),
    "/tokenize": Route(tokenize, schemas.Tokenize),
    "/detokenize": Route(detokenize, schemas.Detokenize),
    "/v1/completions": Route(answers.completions, schemas.Completion),
    "/v1/chat/completions": Route(answers.chat, schemas.Chat),
    "/v1/responses": Route(answers.responses, schemas.Response),
    "/v1/embeddings": Route(tasks.embeddings, schemas.Embedding),
    "/v1/translations": Route(tasks.translations, schemas.Translation),
    "/v1/classify": Route(tasks.classify, schemas.Classification),
    "/v1/fill": Route(tasks.fill_masks, schemas.Fill),
    "/v1/look": Route(tasks.look, schemas.Look),
    "/admin/load": Route(tasks.admin_load, schemas.Model),
    "/admin/unload": Route(tasks.admin_unload, schemas.Model),
}


class Protocol(H11Protocol):
    """uvicorn's, with a limit on how long the head of a request may take, the first and those after it, and on how
    long an answer may lie unread."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.unread, self.limits = 0, self.config.app.limits  # type: ignore[union-attr]
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
