"""The endpoints of the server. One is a row of ENDPOINTS: a line of help, its function, the struct of its body, how its
work is bounded, and what a model must serve for it.

    ENDPOINTS["/v1/count"] = Endpoint("the tokens of a text", count, Count, Bound.TEXT, "any")

From the table come the routes, the refusals (a field that the struct does not have, a body that is too large, a key
that is missing), /openapi.json, the walk of the tests over every field, and the list in docs/guides/serve.md.

The function is given the request, the model that the body names (where the row says what it must serve; else the app)
and the body. What it returns is the answer, as JSON; None, where it has answered itself. It is cancelled when its
client leaves. Work on the model goes through `ModelWorker.work`, in pieces, or through `Ask`, into the engine's queue:
both hold the limits of the server and its deadline."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from regard.errors import VERSION
from regard.serve import answers, prompts, schemas, status, tasks
from regard.serve.edge import Bound


@dataclass(frozen=True)
class Endpoint:
    """Of a path. `body`: of a POST; a GET has none. `serves`: what the model must serve (`serves` in model_worker.py);
    "any": a model, whatever it serves; "": no model."""

    help: str
    run: Callable[..., Coroutine[Any, Any, Any]]
    body: type[msgspec.Struct] | None = None
    bound: Bound = Bound.AT_ONCE
    serves: str = ""

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "HEAD") if self.body is None else ("POST",)


ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": Endpoint("chats, with tools, schemas, log probabilities",
        answers.chat, schemas.Chat, Bound.QUEUE, "completions"),
    "/v1/responses": Endpoint("the same, as OpenAI's clients ask now",
        answers.responses, schemas.Response, Bound.QUEUE, "completions"),
    "/v1/completions": Endpoint("texts that go on; `echo` with the prompt's log probabilities",
        answers.completions, schemas.Completion, Bound.QUEUE, "completions"),
    "/v1/translations": Endpoint("translations by beam search; `align`: the words that belong together",
        tasks.translations, schemas.Translation, Bound.QUEUE, "completions"),
    "/v1/embeddings": Endpoint("vectors of length 1",
        tasks.embeddings, schemas.Embedding, Bound.PIECES, "embeddings"),
    "/v1/classify": Endpoint("classes of texts, or of pictures as `data:image/png;base64,...`",
        tasks.classify, schemas.Classification, Bound.PIECES, "classify"),
    "/v1/fill": Endpoint("the words behind masks",
        tasks.fill_masks, schemas.Fill, Bound.PIECES, "fill"),
    "/v1/look": Endpoint("exact attention of a request that ran, or of a text",
        tasks.look, schemas.Look, Bound.LOOKS, "look"),
    "/tokenize": Endpoint("tokens of a text or of messages",
        prompts.tokenize, schemas.Tokenize, Bound.TEXT, "any"),
    "/detokenize": Endpoint("the text of tokens",
        prompts.detokenize, schemas.Detokenize, Bound.TEXT, "any"),
    "/v1/models": Endpoint("the models, and what each serves", status.models),
    "/v1/limits": Endpoint("all limits of this server", status.limits),
    "/openapi.json": Endpoint("every field of every body", status.openapi),
    "/metrics": Endpoint("counters for Prometheus, with vLLM's names beside ours", status.metrics),
    "/version": Endpoint("the version of Regard", status.version),
    "/health": Endpoint("whether it is alive", status.health, bound=Bound.PUBLIC),
    "/ready": Endpoint("whether it is loaded, warm, not draining", status.ready, bound=Bound.PUBLIC),
    "/admin/load": Endpoint("a model that the command line named is loaded",
        tasks.admin_load, schemas.Model, Bound.ADMIN),
    "/admin/unload": Endpoint("a model is taken out when what runs on it is done",
        tasks.admin_unload, schemas.Model, Bound.ADMIN),
}  # fmt: skip


def described(bodies: Mapping[str, type[msgspec.Struct]]) -> bytes:
    """What is taken, as OpenAPI has it; `bodies`: the structs, by path."""
    refs, parts = msgspec.json.schema_components(
        bodies.values(), ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(bodies, refs))
    wrong = {"description": "an error", "content": {"application/json": {}}}
    answered = {"200": {"description": "the answer"}, "4XX": wrong, "503": wrong}
    paths: dict[str, Any] = {}
    for path, endpoint in ENDPOINTS.items():
        about: dict[str, Any] = {"responses": answered, "summary": endpoint.help}
        if path in bodies:
            content = {"application/json": {"schema": schema_of[path]}}
            about["requestBody"] = {"required": True, "content": content}
        paths[path] = {endpoint.methods[0].lower(): about}
    head = {"openapi": "3.1.0", "info": {"title": "Regard", "version": VERSION}}
    return msgspec.json.encode({**head, "paths": paths, "components": {"schemas": parts}})
