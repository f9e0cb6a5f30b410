"""What a server says of itself: its state, its models, its numbers, what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from regard.decode.check import context_of
from regard.errors import VERSION
from regard.serve.edge import HTTPRequest, labelled
from regard.serve.model_worker import Models, ModelWorker, serves
from regard.text import needed


async def health(http: HTTPRequest, app: Models) -> None:
    dead = any(worker.dead is not None for worker in app.workers.values())
    await http.json({"status": "failed" if dead else "ok"}, 503 if dead else 200)


async def ready(http: HTTPRequest, app: Models) -> None:
    going = [w for w in app.workers.values() if w.dead is None and not w.closing]
    state = "ready" if all(worker.warm for worker in going) else "warming"
    state = "draining" if app.draining else state if going else "empty"
    await http.json({"status": state}, 200 if state == "ready" else 503)


async def version(http: HTTPRequest, app: Models) -> Any:
    return {"version": VERSION}


async def limits(http: HTTPRequest, app: Models) -> Any:
    return asdict(app.limits)


async def openapi(http: HTTPRequest, app: Models) -> None:
    await http.reply(app.described, "application/json")


async def models(http: HTTPRequest, app: Models) -> Any:
    """All models, or the one that the path names."""
    name = http.scope["path"].removeprefix("/v1/models").removeprefix("/")
    if name:
        return model_data(app.worker(name))
    return {"object": "list", "data": [model_data(worker) for worker in app.workers.values()]}


def model_data(worker: ModelWorker) -> dict[str, Any]:
    kinds = serves(worker)
    about = {
        "id": worker.name,
        "object": "model",
        "created": worker.created,
        "owned_by": "regard",
        "serves": kinds,
        "context": context_of(worker.model),
    }
    if "fill" in kinds:
        about["mask"] = needed(worker.tokenizer).tokens.get("mask_token")
    return about


async def metrics(http: HTTPRequest, app: Models) -> None:
    gauges: dict[str, float] = {"regard_streams": app.streams, "regard_exchanges": app.active}
    for name, worker in app.workers.items():
        for what, value in gauges_of(worker):
            label = "model_name" if what.startswith("vllm:") else "model"
            gauges[labelled(what, **{label: name})] = value
    await http.reply(app.metrics.text(gauges).encode(), "text/plain; version=0.0.4; charset=utf-8")


def gauges_of(worker: ModelWorker) -> Iterator[tuple[str, Any]]:
    yield "regard_requests_open", len(worker.open)
    yield "regard_memory_bytes", worker.nbytes
    if worker.engine is None:
        return
    waiting = len(worker.engine.waiting)
    yield "regard_requests_waiting", waiting
    yield "vllm:num_requests_waiting", waiting
    yield "vllm:num_requests_running", max(0, len(worker.handles) - waiting)
    pool = worker.engine.pool
    if pool is not None:
        yield "regard_pages", len(pool.users)
        yield "regard_pages_free", pool.available
        yield "vllm:kv_cache_usage_perc", 1 - pool.available / len(pool.users)
