"""The same app on Ray Serve: replicas of it, on one machine or many, more or fewer by load. Extra `ray`.

    serve run regard.serve.ray:build models=NAME=FOLDER,NAME=FOLDER replicas=2

Ray's proxy gives a request to a door, which sends it on to a replica; Ray's own router picks that by the beginning of
the text, so that conversations come back to where their pages are cached, unless that replica has too much to do.
A request whose replica dies before the first word of its answer is given to another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from regard.serve.app import App

# As ray.serve.llm has it, which however wants vLLM.
ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
DIED = "the replica that answered this died; send the request again"


@dataclass(frozen=True)
class Asked:
    """A whole request; `prompt` is what the router compares."""

    scope: dict[str, Any]
    body: bytes

    @property
    def prompt(self) -> str:
        return self.scope["path"] + self.body.decode("utf-8", "replace")


class Replica:
    """The app, with its models and its engine."""

    def __init__(self, folders: dict[str, str], options: dict[str, Any]):
        self.app = App(dict(folders), local=False, **options)

    async def __call__(self, asked: Asked) -> AsyncIterator[dict[str, Any]]:
        """The app's messages, as they come; who stops reading them cancels the request."""
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue(16)
        bodies = [{"type": "http.request", "body": asked.body}]

        async def receive() -> dict[str, Any]:
            # What comes after the body is that the client leaves, and then this task is cancelled.
            return bodies.pop() if bodies else await asyncio.Future()

        task = asyncio.create_task(self.app(asked.scope, receive, messages.put))
        try:
            going = True
            while going:
                message = await messages.get()
                going = message["type"] == "http.response.start" or message.get("more_body", False)
                yield message
        finally:
            task.cancel()

    def check_health(self) -> None:
        """Ray starts another replica for one that raises here."""
        for worker in self.app.workers.values():
            if worker.dead is not None:
                raise RuntimeError(worker.dead)


class Door:
    def __init__(self, replicas: DeploymentHandle):
        self.replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        names = ("type", "method", "path", "raw_path", "query_string", "headers", "http_version")
        asked = Asked({name: request.scope.get(name) for name in names}, await request.body())
        for _ in range(3):
            messages = aiter(self.replicas.remote(asked))
            try:
                start = await anext(messages)
            except RayError:
                continue
            answer = StreamingResponse(rest(messages), start["status"])
            answer.raw_headers = [*map(tuple, start["headers"])]
            return answer
        error = {"message": DIED, "type": "server_error", "param": None, "code": "replica_died"}
        return JSONResponse({"error": error}, 503, {"Retry-After": "1"})


async def rest(messages: Any) -> AsyncGenerator[bytes, None]:
    """The body of an answer; one that breaks off says so as our streams do."""
    try:
        async for message in messages:
            if not message.get("more_body", False):
                # The replica is through before the client is, who would cancel it.
                [_ async for _ in messages]
            yield message.get("body", b"")
    except RayError:
        yield f'data: {{"error": {{"message": "{DIED}", "type": "server_error"}}}}\n\n'.encode()


def build(args: dict[str, str]) -> serve.Application:
    """`models`: NAME=FOLDER,...; `replicas`: how many, or FEWEST-MOST by load; `requests`: that one takes at a time;
    `gpus` and `cpus`: that one has."""
    folders = dict(pair.split("=", 1) for pair in args["models"].split(","))
    fewest, _, most = args.get("replicas", "1").partition("-")
    count: dict[str, Any] = {"num_replicas": int(fewest)}
    if most:
        bounds = {"min_replicas": int(fewest), "max_replicas": int(most)}
        count = {"autoscaling_config": {**bounds, "target_ongoing_requests": 16}}
    gpus, cpus = float(args.get("gpus", "0")), float(args.get("cpus", "1"))
    replicas = serve.deployment(Replica).options(
        **count,
        max_ongoing_requests=int(args.get("requests", "256")),
        ray_actor_options={"num_gpus": gpus, "num_cpus": cpus},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        health_check_period_s=2,
    )
    door = serve.deployment(Door).options(max_ongoing_requests=4096)
    return door.bind(replicas.bind(folders, {}))
