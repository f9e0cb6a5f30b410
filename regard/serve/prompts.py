"""Texts and conversations become ids. What cannot fit is refused before it is read; the rest is read beside the event
loop and the engine's thread, short texts by a thread, long ones in the sandbox, where no short one waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from regard.decode.check import context_of, written
from regard.decode.sources import source_length
from regard.serve import schemas
from regard.serve.edge import HTTPError, HTTPRequest
from regard.serve.grammar import told_tools
from regard.serve.model_worker import ModelWorker
from regard.serve.sandbox import TEXTS
from regard.text import encode_chat, needed
from regard.text.chat import check_variables, texts_of

LONG = 1 << 14  # characters of a request that a thread reads; more are for the sandbox
TURNS = 256  # messages, in the same way
# No token is taken to have fewer: a tokenizer may drop some of a text, such as spaces.
CHARACTERS = 16
T = TypeVar("T")


def room(worker: ModelWorker) -> int:
    """Tokens that a prompt has at most: of this server, or the model's context. A source is read in one piece."""
    limits = worker.app.limits
    if worker.model.reads_source:
        return min(limits.prompt, source_length(worker.model) or limits.whole)
    return min(limits.prompt, context_of(worker.model) or limits.prompt)


def too_long(what: str, most: int, param: str) -> HTTPError:
    why = f"{param} has {what}; at most {most:,} tokens are read here, so send less"
    return HTTPError(400, why, param, "context_length_exceeded")


def check_turns(worker: ModelWorker, turns: Sequence[Any], param: str) -> None:
    """A template makes a token of each message and of each call, at least."""
    most = room(worker)
    if len(turns) > most:
        raise too_long(f"{len(turns):,} messages and calls", most, param)


def least_tokens(worker: ModelWorker, size: int) -> int:
    """So many characters are at least so many tokens."""
    return size // max(CHARACTERS, needed(worker.tokenizer).longest)


def check_size(worker: ModelWorker, size: int, most: int, param: str) -> None:
    """Refuse so many characters if they cannot be as few as `most` tokens."""
    if least_tokens(worker, size) > most:
        raise too_long(f"{size:,} characters", most, param)


async def encoded(
    worker: ModelWorker, texts: Sequence[str], most: int, param: str, **how: bool
) -> list[list[int]]:
    """The ids of texts, of which none has more than `most`."""
    tokenizer = worker.words(param)
    for text in texts:
        check_size(worker, len(text), most, param)
    if sum(map(len, texts)) <= LONG:
        return await worker.app.in_thread(
            lambda: [tokenizer.encode(text, **how) for text in texts], param
        )
    return await sandboxed(worker, param, most, "texts", texts=texts, how=how)


async def sandboxed(worker: ModelWorker, param: str, most: int, kind: str, **given: Any) -> Any:
    about = worker.about
    assert about is not None
    answer = await TEXTS.run(lambda: TEXTS.ask(about, kind, most=most, **given))
    if "count" in answer:
        raise too_long(f"{answer['count']:,} tokens", most, param)
    if "error" in answer:
        raise HTTPError(400, answer["error"], param)
    if "ids" not in answer:
        raise HTTPError(400, f"{param} takes too long to read; send less", param)
    return answer["ids"]


def parts(items: Sequence[T], sizes: Sequence[int], most: int) -> Iterator[Sequence[T]]:
    """Items as many at a time as have `most` together, with the one that has more."""
    start = total = 0
    for i, size in enumerate(sizes, 1):
        total += size
        if total >= most or i == len(items):
            yield items[start:i]
            start = i
            total = 0


def several(given: Any, what: str, param: str) -> list[Any]:
    """Texts and lists of ids; one of either is a list of one."""
    if isinstance(given, str) or all(isinstance(i, int) for i in given):
        return [given]
    if any(isinstance(i, int) for i in given):
        raise HTTPError(400, f"{what} is one text or a list of ids; these are mixed", param)
    return given


async def prompts_of(worker: ModelWorker, given: Any, param: str) -> list[list[int]]:
    """Ids of a text, of ids, or of a list of either."""
    limits, model = worker.app.limits, worker.model
    given = several(given, "a prompt", param)
    if len(given) > limits.prompts:
        raise HTTPError(400, f"{len(given)} prompts; send at most {limits.prompts}", param)
    most = room(worker) if model.reads_source else limits.prompt
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    if texts:
        found = iter(await encoded(worker, texts, room(worker), param))
        given = [next(found) if isinstance(prompt, str) else prompt for prompt in given]
    size = (model.config.source if model.reads_source else written(model)).vocab
    for ids in given:
        if not ids:
            raise HTTPError(400, "the prompt is empty; give at least one token", param)
        if len(ids) > most:
            why = f"the prompt has {len(ids):,} tokens; this server takes at most {most:,}"
            raise HTTPError(400, why, param)
        if max(ids) >= size:
            why = f"the prompt has the token {max(ids)}, the vocabulary ends with {size - 1}"
            raise HTTPError(400, why, param)
    return given


async def chat_ids(
    worker: ModelWorker, messages: Sequence[schemas.Message], tools: Sequence[schemas.Tool] = (),
    variables: dict[str, Any] | None = None,
) -> list[int]:  # fmt: skip
    """The prompt of a conversation; `variables` are for the template."""
    tokenizer, app, param = worker.tokenizer, worker.app, "messages"
    if tokenizer is None or not tokenizer.templates:
        why = f"{worker.name} has no chat template; use /v1/completions"
        raise HTTPError(400, why, param, "no_chat_template")
    if variables:

        def check() -> None:
            check_variables(tokenizer, variables)
            texts_of(variables)

        await app.in_thread(check, "chat_template_kwargs")
    check_turns(worker, [*messages, *(c for m in messages for c in m.tool_calls or ())], param)

    def told() -> tuple[dict[str, Any], int]:
        each = [plain(message) for message in messages]
        turns, data = told_tools(tokenizer.templates.get("default", ""), each, tools)
        made = {"messages": turns, "tools": data, "variables": variables or {}}
        return made, sum(map(len, texts_of(list(made.values()))))

    given, size = await app.in_thread(told, param)
    check_size(worker, size, room(worker), param)
    if size > LONG or len(messages) > TURNS:
        return await sandboxed(worker, param, room(worker), "chat", **given)
    try:
        return await app.in_thread(lambda: encode_chat(tokenizer, **given), param)
    except OSError:
        why = "no process could be begun for the chat template; come back later"
        raise HTTPError(503, why, code="overloaded", wait=1) from None


def plain(message: schemas.Message) -> dict[str, Any]:
    """A message as templates read it."""
    content: Any = message.content
    calls = message.tool_calls
    if content is None and not calls:
        raise HTTPError(400, "content is null, and there are no tool_calls", "messages")
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": content}
    if calls:
        made["tool_calls"] = msgspec.to_builtins(calls)
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    return made


async def tokenize(http: HTTPRequest, worker: ModelWorker, body: schemas.Tokenize) -> Any:
    if (body.prompt is None) == (body.messages is None):
        raise HTTPError(400, "give prompt or messages, one of them", "prompt")
    if body.messages is not None:
        ids = await chat_ids(worker, body.messages, (), body.chat_template_kwargs)
    else:
        how = {"special": body.add_special_tokens, "literal": body.literal}
        most = worker.app.limits.prompt
        (ids,) = await encoded(worker, [body.prompt or ""], most, "prompt", **how)
    texts = await worker.app.in_thread(lambda: [worker.shown(i) for i in ids])
    return {"tokens": ids, "count": len(ids), "texts": texts}


async def detokenize(http: HTTPRequest, worker: ModelWorker, body: schemas.Detokenize) -> Any:
    most = worker.app.limits.prompt
    if len(body.tokens) > most:
        raise HTTPError(400, f"{len(body.tokens):,} tokens; send at most {most:,}", "tokens")
    decode = worker.words("tokens").decode
    skip = body.skip_special_tokens
    text = await worker.app.in_thread(lambda: decode(body.tokens, skip_special=skip), "tokens")
    return {"prompt": text}
