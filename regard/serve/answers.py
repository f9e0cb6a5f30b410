"""/v1/completions, /v1/chat/completions and /v1/responses: from a body to the engine's requests, and from its words to
OpenAI's. What is not streamed goes the way of a stream, in one batch."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from itertools import accumulate, chain, repeat
from operator import itemgetter
from typing import Any

import msgspec
import torch
from msgspec import Raw, json

from regard.decode.check import context_of, written
from regard.decode.defaults import folder_settings, settings_of, special_of
from regard.decode.settings import Request, Result
from regard.serve import schemas
from regard.serve.edge import HTTPError, HTTPRequest, late
from regard.serve.grammar import Matching, Reader, masks_for
from regard.serve.model_worker import Entry, Models, ModelWorker, Ran, RequestHandle, arrivals
from regard.serve.prompts import chat_ids, check_turns, prompts_of
from regard.text.tokenizer import check_stop

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
# Of a body's fields, those that the engine has, and by what name.
SETTINGS = "temperature top_p top_k min_p seed logit_bias presence_penalty frequency_penalty repetition_penalty"
RENAMED = {name: name for name in SETTINGS.split()} | {"min_tokens": "min_new_tokens"}
# Of the input of /v1/responses, what each kind of item must have.
NEEDS = {"message": ["role", "content"], "function_call": ["call_id", "name", "arguments"]}
NEEDS |= {"function_call_output": ["call_id", "output"]}
# Of a chat's fields, what /v1/responses calls them.
NAMES = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
ECHOED = "user max_tool_calls prompt_cache_key prompt_cache_retention safety_identifier"
MANY = 4096  # log probabilities that are written in the event loop, or by a thread at a time
# How models that think before they answer end their thoughts.
THOUGHT = b"</think>"
Data = dict[str, Any]
Said = tuple[int, str, list[Entry], str]  # number of the answer, new text, its tokens, finish or ""


class Ask:
    """Prompts for one model, and how they are answered; made in a thread, where checking may take its time."""

    def __init__(
        self, app: Models, http: HTTPRequest, worker: ModelWorker, body: Any, prompts: list[list[int]], field: str,
        **more: Any,
    ):  # fmt: skip
        self.app, self.http, self.worker, self.prompts, self.field = (
            app,
            http,
            worker,
            prompts,
            field,
        )
        self.mask = more.pop("mask", None)
        given = {k: v for k, v in msgspec.structs.asdict(body).items() if v is not None}
        if "stream_options" in given and not given.get("stream"):
            raise HTTPError(400, "stream_options are for stream=true", "stream_options")
        used = 1 if worker.model.reads_source else max(map(len, prompts), default=0)
        self.sized = settings_of(worker.model, self.asked(given, more) | more)
        self.settings = self.sized(used)
        longest, new = context_of(worker.model), self.settings.max_new_tokens
        if longest is not None and used + new > longest:
            why = f"{used} tokens of prompt and {new} new ones are more than the model's context of"
            raise HTTPError(400, f"{why} {longest}; send less", field, "context_length_exceeded")
        whose = [
            http.who,
            *(given.get(name, "") for name in ("user", "safety_identifier", "cache_salt")),
        ]
        self.salt = hashlib.sha256("\0".join(whose).encode()).hexdigest()
        self.priority, most = given.get("priority", 0), http.user.priority if http.user else 0
        if self.priority > most:
            why = f"priority is {self.priority}; the largest of this key is {most}"
            raise HTTPError(400, why, "priority")
        self.created, self.usage = int(time.time()), {"prompt": sum(map(len, prompts)), "new": 0}
        self.cached = self.thought = 0
        # Log probabilities for each token, if they are listed, and in all.
        self.listed = 1 + self.settings.top_logprobs if "top_logprobs" in more else 0
        tokens = len(prompts) * self.n * new
        tokens += self.usage["prompt"] if self.settings.prompt_logprobs else 0
        self.numbers = tokens * self.listed
        if self.numbers > app.limits.numbers:
            why = f"up to {self.numbers:,} log probabilities; this server gives {app.limits.numbers:,}"
            raise HTTPError(400, f"{why}: ask for fewer, or of fewer tokens", "logprobs")

    def asked(self, given: Data, more: Data) -> Data:
        """The engine's settings of a body's fields, and `more` of them; else as the model's folder says; else one
        answer, drawn at temperature 1."""
        limits, folder = self.app.limits, folder_settings(self.worker.model)[0]
        n: int = given.get("n", 1)
        single = [given.get("stream"), given.get("stop"), self.mask, more.get("top_logprobs")]
        usual: int = 1 if any(single) or "temperature" in given else folder.get("beams", 1)
        usual = more.pop("beams", usual)
        beams: int = given.get("beams", usual if n <= usual else 1)
        self.n, self.copies, self.stop = n, 1, check_stop(given.get("stop", ()))
        if n > limits.n:
            raise HTTPError(400, f"n is {n}; this server gives at most {limits.n} answers", "n")
        if n > beams > 1:
            raise HTTPError(400, f"n is {n}, more than {beams} beams", "n")
        if sum(map(len, self.stop)) > 4096 or (self.stop and beams > 1):
            why = "not with beams" if beams > 1 else "4,096 characters in all"
            raise HTTPError(400, f"stop strings: {why}", "stop")
        if self.stop:
            self.worker.words("stop")
        size = written(self.worker.model).vocab
        for name in ("logit_bias", "stop_token_ids"):
            if (most := max(given.get(name, ()), default=0)) >= size:
                why = f"{name} has the token {most}, the vocabulary ends with {size - 1}"
                raise HTTPError(400, why, name)
        settings: Data = {"seed": secrets.randbits(62)}
        settings |= {ours: given[name] for name, ours in RENAMED.items() if name in given}
        if settings.get("top_k") == -1:
            settings["top_k"] = 0
        if given.get("ignore_eos") or "stop_token_ids" in given:
            own = () if given.get("ignore_eos") else special_of(self.worker.model).eos
            ends = [*(i for i in own if i < size), *given.get("stop_token_ids", ())]
            settings["eos"] = tuple(dict.fromkeys(ends))
        settings["beams"], heat = beams, folder.get("temperature", 1.0)
        if beams > 1:
            settings["n_best"] = n
        elif more.get("temperature", settings.setdefault("temperature", heat)):
            settings["samples"] = n
        else:
            # Greedy answers are all the same: one is made, and given n times.
            self.copies = n
        return settings

    @asynccontextmanager
    async def handles(self, live: bool) -> AsyncIterator[list[RequestHandle]]:
        """The requests in the engine's queue; out of it at the end, whatever happens."""
        wake, handles, model = asyncio.Event(), list[RequestHandle](), self.worker.model
        more: Data = {"salt": self.salt, "priority": self.priority}
        more["deadline"] = time.monotonic() + self.app.limits.deadline
        with self.worker.room(self.usage["prompt"], self.numbers):
            try:
                for i, ids in enumerate(self.prompts):
                    # As many rows of this client come before it, and its own: those of others come in between.
                    turn = (i + 1) * self.settings.rows - 1
                    size = 1 if model.reads_source else len(ids)
                    request = Request(ids, self.sized(size), key=i, turn=turn, **more)
                    if model.reads_source:
                        request.source = torch.tensor(ids, dtype=torch.long)
                        request.ids = [special_of(model).start or 0]
                    request.mask = self.mask() if self.mask else None
                    handles.append(
                        RequestHandle(request, self.worker.tokenizer, self.stop, live, wake)
                    )
                    self.worker.submit(handles[-1])
                yield handles
            finally:
                for handle in handles:
                    self.worker.cancel(handle)
                self.http.first = min(
                    (t.first for t in handles if t.first is not None), default=None
                )
                self.app.spent(self.http, self.worker, **self.usage)
                self.http.note["cached"] = self.cached
                if all(handle.results is not None for handle in handles):
                    pairs = zip(self.prompts, handles)
                    texts = [(ids, r.ids) for ids, handle in pairs for r in handle.results or []]
                    size = sum(len(prompt) + len(answer) for prompt, answer in texts)
                    self.app.remember(self.name, Ran(self.http.who, self.worker.name, texts, size))

    def checked(self, handle: RequestHandle) -> list[Result]:
        """Results that are answers."""
        self.cached += min(handle.request.cached or 0, len(handle.request.ids))
        for result in handle.results or []:
            self.usage["new"] += len(result.ids) * self.copies
            self.thought += thoughts(self.worker, result.ids) * self.copies
            if result.finish == "deadline":
                raise late(self.app.limits)
            mask = handle.request.mask
            if result.finish == "error" and isinstance(mask, Matching) and mask.fault is not None:
                why = f"the answer could not be held to its form: {mask.fault}"
                raise HTTPError(400, why, mask.param, "schema_too_complex")
            if result.finish not in FINISH:
                why = f"the answer could not be completed: {result.error}"
                raise HTTPError(500, why) from handle.cause
        return handle.results or []

    async def results(self) -> list[list[Result]]:
        """All answers, of each prompt."""
        async with self.handles(live=False) as handles:
            async for _ in arrivals(handles):
                pass
            return [self.checked(handle) for handle in handles]

    async def said(self, stream: bool) -> AsyncIterator[list[Said]]:
        """What the answers say while they are made, or, where it is not streamed, each when it is complete."""
        sent: dict[int, int] = defaultdict(int)
        async with self.handles(stream) as handles:
            async for come in arrivals(handles):
                batch: list[Said] = []
                for i, pieces, results in come:
                    pieces = pieces if stream else []
                    ends = self.checked(handles[i]) if results is not None else []
                    for k in sorted({p.sample for p in pieces} | set(range(len(ends)))):
                        new, at, finish = [p for p in pieces if p.sample == k], i * self.n + k, ""
                        text = "".join(p.text for p in new)
                        entries: list[Entry] = [p.entry for p in new]
                        if ends:
                            text, finish = (ends[k].text or "")[sent[at] :], ends[k].finish
                            if not (stream and handles[i].live):
                                entries = entries_of(ends[k], self.prompts[i])
                        sent[at] += len(text)
                        batch += [(at + c, text, entries, finish) for c in range(self.copies)]
                if batch:
                    yield batch

    def head(self, kind: str, prefix: str) -> Data:
        """How every answer and every chunk of one begins."""
        self.name = prefix + self.http.id.removeprefix("req_")
        about = {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.worker.name,
        }
        return {**about, "system_fingerprint": self.worker.fingerprint}

    def spent(self, prompt: str = "prompt", new: str = "completion") -> Data:
        """What was used, in the words of a path."""
        counts = self.usage["prompt"], self.usage["new"]
        return {
            **{
                f"{prompt}_tokens": counts[0],
                f"{new}_tokens": counts[1],
                "total_tokens": sum(counts),
            },
            f"{prompt}_tokens_details": {"cached_tokens": self.cached},
            f"{new}_tokens_details": {"reasoning_tokens": self.thought},
        }

    async def made(
        self, batch: list[Said], choices: Callable[..., list[Data]]
    ) -> list[tuple[int, Any]]:
        """Choices by the number of their answer. Where many tokens are listed, a thread makes them, some answers at a
        time, and they are JSON at once: it takes its time to name the best tokens of each place."""
        groups, listed = [list[Said]()], 0
        for each in batch:
            if listed > MANY:
                groups, listed = [*groups, []], 0
            groups[-1].append(each)
            listed += len(each[2]) * self.listed
        if len(groups) == 1 and listed <= MANY:
            return [(each[0], choice) for each in batch for choice in choices(*each)]

        def coded(group: list[Said]) -> list[tuple[int, Any]]:
            return [(each[0], Raw(json.encode(c))) for each in group for c in choices(*each)]

        return [c for group in groups for c in await self.app.in_thread(partial(coded, group))]

    async def send(
        self, body: Any, head: Data, choices: Callable[..., list[Data]], first: Sequence[Data] = ()
    ) -> None:
        """The answer, or a chunk for each choice; `choices` makes them of what an answer says."""
        http, options = self.http, body.stream_options
        if not body.stream:
            found = [c async for batch in self.said(False) for c in await self.made(batch, choices)]
            answers = [choice for _, choice in sorted(found, key=itemgetter(0))]
            await http.json({**head, "choices": answers, "usage": self.spent()})
            return
        usage = options is not None and bool(options.include_usage)
        more = {"usage": None} if usage else {}
        with self.app.streaming():
            async for batch in self.said(True):
                made = [choice for _, choice in await self.made(batch, choices)]
                if not http.status:
                    await http.stream()
                    made = [*first, *made]
                if made:
                    await http.events([{**head, "choices": [c], **more} for c in made])
            if usage:
                await http.events([{**head, "choices": [], "usage": self.spent()}])
            await http.done()


def thoughts(worker: ModelWorker, ids: Sequence[int]) -> int:
    """Tokens of an answer up to the end of its thoughts, where it has some."""
    told = [worker.token(i) for i in ids]
    end = b"".join(told).find(THOUGHT) + len(THOUGHT)
    if end < len(THOUGHT):
        return 0
    return next(i for i, size in enumerate(accumulate(map(len, told)), 1) if size >= end)


def entries_of(result: Result, prompt: Sequence[int] = ()) -> list[Entry]:
    """Of an answer, behind those of its prompt where they were asked for."""
    before = zip(prompt, result.prompt_logprobs, result.prompt_top_logprobs or repeat([]))
    return [*before, *zip(result.ids, result.logprobs, result.top_logprobs or repeat([]))]


def shown(token: bytes) -> str:
    """A token as text; where it is a part of a character, its bytes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in token)


class Offsets:
    """Where the characters of each token begin."""

    def __init__(self) -> None:
        self.decoder, self.at = codecs.getincrementaldecoder("utf-8")("replace"), 0

    def of(self, token: bytes) -> int:
        before, self.at = self.at, self.at + len(self.decoder.decode(token))
        return before


def completion_logprobs(worker: ModelWorker, entries: Sequence[Entry], offsets: Offsets) -> Data:
    """Four lists, one entry for each token."""
    names = [shown(worker.token(token)) for token, _, _ in entries]
    tops = []
    for name, (_, logprob, best) in zip(names, entries):
        listed = {shown(worker.token(i)): finite(p) for i, p in reversed(best)}
        tops.append(None if logprob is None else {**listed, name: finite(logprob)} if best else {})
    return {
        "tokens": names,
        "token_logprobs": [None if p is None else finite(p) for _, p, _ in entries],
        "top_logprobs": tops,
        "text_offset": [offsets.of(worker.token(token)) for token, _, _ in entries],
    }


def chat_logprobs(worker: ModelWorker, entries: Sequence[Entry]) -> Data:
    def one(token: int, logprob: float | None) -> Data:
        content = worker.token(token)
        return {"token": shown(content), "logprob": finite(logprob), "bytes": list(content)}

    content = [{**one(i, p), "top_logprobs": [one(*t) for t in tops]} for i, p, tops in entries]
    return {"content": content, "refusal": None}


def finite(x: float | None) -> float:
    """JSON has no infinity."""
    return -9999.0 if x is None else max(x, -9999.0)


async def completions(app: Models, http: HTTPRequest, body: schemas.Completion) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise HTTPError(400, "best_of: this server gives all n answers; leave it out", "best_of")
    worker, listed = app.writer(body.model), body.logprobs is not None
    if body.stream and body.echo and listed:
        raise HTTPError(400, "echo with logprobs cannot be streamed; leave one out", "echo")
    if body.echo and worker.model.reads_source:
        raise HTTPError(400, "an encoder-decoder's prompt is no part of its answer", "echo")
    # The engine says one token at least; it is dropped where none is wanted.
    most = 16 if body.max_tokens is None else body.max_tokens
    if most == 0 and not body.echo:
        why = "max_tokens is 0: only with echo is there something to give"
        raise HTTPError(400, why, "max_tokens")
    more: Data = {"max_new_tokens": max(1, most)}
    if listed:
        more |= {"top_logprobs": body.logprobs if (body.beams or 1) == 1 else 0}
        more |= {"prompt_logprobs": True} if body.echo else {}

    prompts = await prompts_of(app, worker, body.prompt, "prompt")
    ask = await app.in_thread(lambda: Ask(app, http, worker, body, prompts, "prompt", **more))
    offsets, echoed = defaultdict[int, Offsets](Offsets), dict[int, str]()
    if body.echo:
        decode = worker.words("echo").decode
        texts = await app.in_thread(lambda: [decode(ids) for ids in prompts])
        echoed = dict(enumerate(text for text in texts for _ in range(ask.n)))

    def choices(i: int, text: str, entries: list[Entry], finish: str) -> list[Data]:
        if most == 0:
            text, entries = "", entries[: len(ask.prompts[i // ask.n])]
        text, logprobs = echoed.pop(i, "") + text, None
        if listed and (entries or not body.stream):
            logprobs = completion_logprobs(worker, entries, offsets[i])
        if not (text or finish or logprobs):
            return []
        why = FINISH.get(finish)
        return [{"index": i, "text": text, "logprobs": logprobs, "finish_reason": why}]

    await ask.send(body, ask.head("text_completion", "cmpl-"), choices)


async def conversation(
    app: Models, http: HTTPRequest, body: schemas.Chat
) -> tuple[Ask, list[Reader]]:
    """What a chat asks for, and a reader for each answer."""
    worker, choice = app.writer(body.model), body.tool_choice
    tools = [tool.function for tool in body.tools or []]
    wanted = choice.function.name if isinstance(choice, schemas.ChatChoice) else choice
    usable = tools if wanted != "none" else []
    more: Data = {"top_logprobs": body.top_logprobs or 0} if body.logprobs else {}

    parallel = body.parallel_tool_calls is not False
    mask = await masks_for(app, worker, body.response_format, tools, wanted, parallel)
    given = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    given |= body.chat_template_kwargs or {}
    ids = await chat_ids(app, worker, body.messages, usable, given)
    longest = context_of(worker.model) or len(ids) + app.limits.new_tokens
    left = max(1, longest - (1 if worker.model.reads_source else len(ids)))
    usual = min(app.limits.new_tokens, folder_settings(worker.model)[0].get("max_new_tokens", left))
    most = body.max_completion_tokens or body.max_tokens or min(usual, left)
    more |= {"mask": mask, "max_new_tokens": most}
    ask = await app.in_thread(lambda: Ask(app, http, worker, body, [ids], "messages", **more))
    return ask, [Reader(bool(usable)) for _ in range(ask.n)]


async def chat(app: Models, http: HTTPRequest, body: schemas.Chat) -> None:
    if body.top_logprobs and not body.logprobs:
        raise HTTPError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    ask, readers = await conversation(app, http, body)

    def delta(i: int, change: Any, logprobs: Any = None, why: str | None = None) -> Data:
        return {"index": i, "delta": change, "logprobs": logprobs, "finish_reason": why}

    def choices(i: int, text: str, entries: list[Entry], finish: str) -> list[Data]:
        logprobs, calls = None, readers[i].calls
        if body.logprobs and (entries or not body.stream):
            logprobs = chat_logprobs(ask.worker, entries)
        changes = readers[i].push(text, bool(finish))
        why = "tool_calls" if calls else FINISH.get(finish)
        if not body.stream:
            content = "".join(change.get("content", "") for change in changes)
            message: Data = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
            return [{"index": i, "message": message, "logprobs": logprobs, "finish_reason": why}]
        if logprobs and not changes:
            changes = [{"content": ""}]
        made = [delta(i, *each) for each in zip(changes, chain([logprobs], repeat(None)))]
        return made + ([delta(i, {}, None, why)] if finish else [])

    begun = {"role": "assistant", "content": "", "refusal": None}
    head = ask.head("chat.completion.chunk" if body.stream else "chat.completion", "chatcmpl-")
    await ask.send(body, head, choices, [delta(i, begun) for i in range(ask.n)])


def as_chat(body: schemas.Response) -> schemas.Chat:
    """Instructions and items as the messages of a chat; in a thread."""
    messages = list[schemas.Message]()
    if body.instructions is not None:
        messages.append(schemas.Message("system", body.instructions))
    items = [schemas.Item(role="user", content=x)] if isinstance(x := body.input, str) else x
    for i, item in enumerate(items):
        where, needs = f"input[{i}]", NEEDS[item.type]
        given: Any = [getattr(item, name) for name in needs]
        if None in given:
            raise HTTPError(400, f"{where}: a {item.type} has {' and '.join(needs)}", where)
        if item.type == "message":
            messages.append(schemas.Message(*given))
        elif item.type == "function_call":
            calls = messages[-1].tool_calls if messages else None
            if calls is None:
                messages.append(schemas.Message("assistant", tool_calls=(calls := [])))
            calls.append(schemas.Call(given[0], schemas.Function(*given[1:])))
        else:
            messages.append(schemas.Message("tool", given[1], tool_call_id=given[0]))
    choice: Any = body.tool_choice
    form, schema = body.text.format if body.text else None, None
    if isinstance(choice, schemas.ResponseChoice):
        choice = schemas.ChatChoice(schemas.Named(choice.name))
    if form is not None and form.schema is not None:
        schema = schemas.Schema(form.name or "answer", form.schema)
    return schemas.Chat(
        messages=messages,
        max_tokens=body.max_output_tokens,
        response_format=None if form is None else schemas.Format(form.type, schema),
        tools=[schemas.ChatTool(tool) for tool in body.tools or []],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        **{name: getattr(body, name) for name in schemas.Answer.__struct_fields__},
    )


class Output:
    """The items of an answer, and the events that tell how they grow."""

    def __init__(self) -> None:
        self.items: list[Data] = []
        self.writing = False  # the last item is a message that grows

    def event(self, kind: str, **more: Any) -> Data:
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1, **more}

    def inner(self, kind: str, **more: Any) -> Data:
        return self.event(kind, item_id=self.items[-1]["id"], **more)

    def begin(self, prefix: str, **item: Any) -> Data:
        item = {"id": f"{prefix}_{secrets.token_hex(12)}", "status": "completed", **item}
        self.items.append(item)
        return self.event("output_item.added", item={**item, "status": "in_progress"})

    def text(self, text: str) -> list[Data]:
        events = []
        if not self.writing:
            self.writing = True
            events = [self.begin("msg", type="message", role="assistant", content=[])]
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self.items[-1]["content"] = [part]
            events.append(self.inner("content_part.added", content_index=0, part={**part}))
        self.items[-1]["content"][0]["text"] += text
        more = {"content_index": 0, "delta": text, "logprobs": []}
        return [*events, self.inner("output_text.delta", **more)] if text else events

    def end(self) -> list[Data]:
        """The message that is being written is complete."""
        if not self.writing:
            return []
        self.writing, part = False, self.items[-1]["content"][0]
        return [
            self.inner("output_text.done", content_index=0, text=part["text"], logprobs=[]),
            self.inner("content_part.done", content_index=0, part=part),
            self.event("output_item.done", item=self.items[-1]),
        ]

    def call(self, call: Data) -> list[Data]:
        about = {"name": call["function"]["name"], "call_id": call["id"], "arguments": ""}
        events = [*self.end(), self.begin("fc", type="function_call", **about)]
        self.items[-1] |= (function := call["function"])
        kind = "function_call_arguments"
        return [
            *events,
            self.inner(f"{kind}.delta", delta=function["arguments"]),
            self.inner(f"{kind}.done", **function),
            self.event("output_item.done", item=self.items[-1]),
        ]

    def changed(self, changes: list[Data], last: bool) -> list[Data]:
        """The events of a message's changes."""
        events = []
        for change in changes:
            events += self.text(change["content"]) if "content" in change else []
            events += [e for call in change.get("tool_calls", ()) for e in self.call(call)]
        more = [*([] if self.items else self.text("")), *self.end()] if last else []
        return [*events, *more]


async def responses(app: Models, http: HTTPRequest, body: schemas.Response) -> None:
    try:
        await respond(app, http, body)
    except HTTPError as raised:
        # It is a chat inside, whose fields have other names.
        error = raised.body["error"]
        error["param"] = NAMES.get(error["param"], error["param"])
        raise


async def respond(app: Models, http: HTTPRequest, body: schemas.Response) -> None:
    if not isinstance(body.input, str):
        check_turns(app, app.writer(body.model), body.input, "input")
    ask, (reader,) = await conversation(app, http, await app.in_thread(lambda: as_chat(body)))
    form = (body.text and body.text.format) or schemas.ResponseFormat("text")
    output, stream, settings = Output(), bool(body.stream), ask.settings
    ask.head("response", "resp_")
    chosen, asdict = body.tool_choice or "auto", msgspec.structs.asdict
    effort = body.reasoning.effort if body.reasoning else None
    verbosity = {"verbosity": body.text.verbosity} if body.text and body.text.verbosity else {}
    about: Data = {
        **dict.fromkeys(("error", "incomplete_details", "completed_at", "previous_response_id")),
        **{name: getattr(body, name) for name in ECHOED.split()},
        **{"id": ask.name, "object": "response", "created_at": ask.created},
        **{"model": ask.worker.name, "instructions": body.instructions, "store": False},
        **{"max_output_tokens": body.max_output_tokens, "background": False, "top_logprobs": 0},
        **{"temperature": settings.temperature, "presence_penalty": settings.presence_penalty},
        **{"top_p": settings.top_p, "frequency_penalty": settings.frequency_penalty},
        **{"parallel_tool_calls": body.parallel_tool_calls is not False, "truncation": "disabled"},
        **{"reasoning": {"effort": effort, "summary": None}, "service_tier": "default"},
        **{
            "text": {"format": msgspec.to_builtins(form)} | verbosity,
            "metadata": body.metadata or {},
        },
        **{"tool_choice": chosen if isinstance(chosen, str) else asdict(chosen)},
        "tools": [{**asdict(tool), "strict": True} for tool in body.tools or []],
    }

    def over(finish: str) -> Data:
        """The whole answer."""
        ended: Data = {"status": "completed", "completed_at": int(time.time())}
        if finish == "length":
            output.items[-1]["status"] = "incomplete"
            ended = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return {**about, **ended, "output": output.items, "usage": ask.spent("input", "output")}

    last: Data = {**about, "status": "in_progress", "output": [], "usage": None}
    begun = ("response.created", "response.in_progress")
    events: list[Data] = [{"type": kind, "response": last} for kind in begun]
    with app.streaming() if stream else nullcontext():
        async for batch in ask.said(stream):
            for _, text, _, finish in batch:
                events += output.changed(reader.push(text, bool(finish)), bool(finish))
                if finish:
                    last = over(finish)
                    events.append({"type": f"response.{last['status']}", "response": last})
            if stream and events:
                if not http.status:
                    await http.stream()
                await http.events(events, named=True)
                events = []
        await (http.done(b"") if stream else http.json(last))
