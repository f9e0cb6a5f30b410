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
from regard.serve.edge import Bound, HTTPError, HTTPRequest, late
from regard.serve.grammar import Matching, Reader, masks_for
from regard.serve.model_worker import Entry, ModelWorker, Ran, RequestHandle, arrivals
from regard.serve.prompts import chat_ids, check_turns, parts, prompts_of
from regard.text.tokenizer import check_stop

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
# Of the input of /v1/responses, what each kind of item must have.
NEEDS = {"message": ["role", "content"], "function_call": ["call_id", "name", "arguments"]}
NEEDS |= {"function_call_output": ["call_id", "output"]}
# Of a chat's fields, what /v1/responses calls them.
NAMES = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
ECHOED = "user instructions max_output_tokens max_tool_calls safety_identifier "
ECHOED += "prompt_cache_key prompt_cache_retention"
DRAWN = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
MANY = 4096  # log probabilities that are written in the event loop, or by a thread at a time
# How models that think before they answer end their thoughts.
THOUGHT = b"</think>"
Data = dict[str, Any]
Said = tuple[int, str, list[Entry], str]  # number of the answer, new text, its tokens, finish or ""


class Ask:
    """Prompts for one model, and how they are answered; made in a thread, where checking may take its time."""

    def __init__(
        self, http: HTTPRequest, worker: ModelWorker, body: Any, prompts: list[list[int]], field: str,
        **more: Any,
    ):  # fmt: skip
        self.app = worker.app
        self.http = http
        self.worker = worker
        self.prompts = prompts
        self.mask = more.pop("mask", None)
        given = {k: v for k, v in msgspec.structs.asdict(body).items() if v is not None}
        if "stream_options" in given and not given.get("stream"):
            raise HTTPError(400, "stream_options are for stream=true", "stream_options")
        used = 1 if worker.model.reads_source else max(map(len, prompts), default=0)
        self.sized = settings_of(worker.model, self.asked(given, more) | more)
        self.settings = self.sized(used)
        longest = context_of(worker.model)
        new = self.settings.max_new_tokens
        if longest is not None and used + new > longest:
            why = f"{used} tokens of prompt and {new} new ones are more than the model's context of"
            raise HTTPError(400, f"{why} {longest}; send less", field, "context_length_exceeded")
        whose = (given.get(name, "") for name in ("user", "safety_identifier", "cache_salt"))
        self.salt = hashlib.sha256("\0".join((http.who, *whose)).encode()).hexdigest()
        self.priority = given.get("priority", 0)
        most = http.user.priority if http.user else 0
        if self.priority > most:
            why = f"priority is {self.priority}; the largest of this key is {most}"
            raise HTTPError(400, why, "priority")
        self.created = int(time.time())
        self.usage = {"prompt": sum(map(len, prompts)), "new": 0}
        self.cached = self.thought = 0
        # Log probabilities for each token, if they are listed, and in all.
        self.listed = 1 + self.settings.top_logprobs if "top_logprobs" in more else 0
        tokens = len(prompts) * self.n * new
        tokens += self.usage["prompt"] if self.settings.prompt_logprobs else 0
        self.numbers = tokens * self.listed
        most = self.app.limits.numbers
        if self.numbers > most:
            why = f"up to {self.numbers:,} log probabilities; this server gives {most:,}"
            raise HTTPError(400, f"{why}: ask for fewer, or of fewer tokens", "logprobs")

    def asked(self, given: Data, more: Data) -> Data:
        """The engine's settings of a body's fields, and `more` of them; else as the model's folder says; else one
        answer, drawn at temperature 1."""
        folder = folder_settings(self.worker.model)[0]
        n: int = given.get("n", 1)
        single = [given.get("stream"), given.get("stop"), self.mask, more.get("top_logprobs")]
        usual: int = 1 if any(single) or "temperature" in given else folder.get("beams", 1)
        usual = more.pop("beams", usual)
        beams: int = given.get("beams", usual if n <= usual else 1)
        self.n = n
        self.copies = 1
        self.stop = check_stop(given.get("stop", ()))
        most = self.app.limits.n
        if n > most:
            raise HTTPError(400, f"n is {n}; this server gives at most {most} answers", "n")
        if n > beams > 1:
            raise HTTPError(400, f"n is {n}, more than {beams} beams", "n")
        if sum(map(len, self.stop)) > 4096 or (self.stop and beams > 1):
            why = "not with beams" if beams > 1 else "4,096 characters in all"
            raise HTTPError(400, f"stop strings: {why}", "stop")
        if self.stop:
            self.worker.words("stop")
        size = written(self.worker.model).vocab
        for name in ("logit_bias", "stop_token_ids"):
            most = max(given.get(name, ()), default=0)
            if most >= size:
                why = f"{name} has the token {most}, the vocabulary ends with {size - 1}"
                raise HTTPError(400, why, name)
        settings: Data = {"seed": secrets.randbits(62), **schemas.drawn(given), "beams": beams}
        if given.get("ignore_eos") or "stop_token_ids" in given:
            own = () if given.get("ignore_eos") else special_of(self.worker.model).eos
            ends = [*(i for i in own if i < size), *given.get("stop_token_ids", ())]
            settings["eos"] = tuple(dict.fromkeys(ends))
        if beams > 1:
            return {**settings, "n_best": n}
        settings.setdefault("temperature", folder.get("temperature", 1.0))
        if more.get("temperature", settings["temperature"]):
            settings["samples"] = n
        else:
            # Greedy answers are all the same: one is made, and given n times.
            self.copies = n
        return settings

    @asynccontextmanager
    async def handles(self, live: bool) -> AsyncIterator[list[RequestHandle]]:
        """The requests in the engine's queue; out of it at the end, whatever happens."""
        assert self.http.bound is Bound.QUEUE, "the table says how it is bounded"
        worker = self.worker
        wake = asyncio.Event()
        handles = list[RequestHandle]()
        deadline = time.monotonic() + self.app.limits.deadline
        with worker.room(self.usage["prompt"], self.numbers):
            try:
                for i in range(len(self.prompts)):
                    request = self.request(i, deadline)
                    handles.append(RequestHandle(request, worker.tokenizer, self.stop, live, wake))
                    worker.submit(handles[-1])
                yield handles
            finally:
                for handle in handles:
                    worker.cancel(handle)
                begun = [handle.first for handle in handles if handle.first is not None]
                self.http.first = min(begun, default=None)
                self.app.spent(self.http, worker, **self.usage)
                self.http.note["cached"] = self.cached
                if all(handle.results is not None for handle in handles):
                    pairs = zip(self.prompts, handles)
                    texts = [(ids, r.ids) for ids, handle in pairs for r in handle.results or []]
                    size = sum(len(prompt) + len(answer) for prompt, answer in texts)
                    self.app.remember(self.name, Ran(self.http.who, worker.name, texts, size))

    def request(self, i: int, deadline: float) -> Request:
        """Prompt i as the engine has it."""
        ids, model = self.prompts[i], self.worker.model
        settings = self.sized(1 if model.reads_source else len(ids))
        # As many rows of this client come before it, and its own: those of others come in between.
        turn = (i + 1) * self.settings.rows - 1
        more: Data = {"salt": self.salt, "priority": self.priority, "deadline": deadline}
        more["mask"] = self.mask() if self.mask else None
        if model.reads_source:
            more["source"] = torch.tensor(ids, dtype=torch.long)
            ids = [special_of(model).start or 0]
        return Request(ids, settings, key=i, turn=turn, **more)

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
                        at = i * self.n + k
                        new = [p for p in pieces if p.sample == k]
                        text = "".join(p.text for p in new)
                        entries: list[Entry] = [p.entry for p in new]
                        finish = ""
                        if ends:
                            text = (ends[k].text or "")[sent[at] :]
                            finish = ends[k].finish
                            if not (stream and handles[i].live):
                                entries = entries_of(ends[k], self.prompts[i])
                        sent[at] += len(text)
                        batch += [(at + c, text, entries, finish) for c in range(self.copies)]
                if batch:
                    yield batch

    def head(self, kind: str, prefix: str) -> Data:
        """How every answer and every chunk of one begins."""
        self.name = prefix + self.http.id.removeprefix("req_")
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.worker.name,
            "system_fingerprint": self.worker.fingerprint,
        }

    def spent(self, prompt: str = "prompt", new: str = "completion") -> Data:
        """What was used, in the words of a path."""
        return {
            f"{prompt}_tokens": self.usage["prompt"],
            f"{new}_tokens": self.usage["new"],
            "total_tokens": sum(self.usage.values()),
            f"{prompt}_tokens_details": {"cached_tokens": self.cached},
            f"{new}_tokens_details": {"reasoning_tokens": self.thought},
        }

    async def made(
        self, batch: list[Said], choices: Callable[..., list[Data]]
    ) -> list[tuple[int, Any]]:
        """Choices by the number of their answer. Where many tokens are listed, a thread makes them, some answers at a
        time, and they are JSON at once: it takes its time to name the best tokens of each place."""
        sizes = [len(entries) * self.listed for _, _, entries, _ in batch]
        if sum(sizes) <= MANY:
            return [(each[0], choice) for each in batch for choice in choices(*each)]

        def coded(group: Sequence[Said]) -> list[tuple[int, Any]]:
            return [(each[0], Raw(json.encode(c))) for each in group for c in choices(*each)]

        groups = parts(batch, sizes, MANY)
        return [c for group in groups for c in await self.app.in_thread(partial(coded, group))]

    async def send(
        self, body: Any, head: Data, choices: Callable[..., list[Data]], first: Sequence[Data] = ()
    ) -> Data | None:
        """The answer, or a chunk for each choice, which are sent; `choices` makes them of what an answer says."""
        http = self.http
        if not body.stream:
            found = [c async for batch in self.said(False) for c in await self.made(batch, choices)]
            answers = [choice for _, choice in sorted(found, key=itemgetter(0))]
            return {**head, "choices": answers, "usage": self.spent()}
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
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
        return None


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


class Offsets:
    """Where the characters of each token begin."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.at = 0

    def of(self, token: bytes) -> int:
        before = self.at
        self.at += len(self.decoder.decode(token))
        return before


def completion_logprobs(worker: ModelWorker, entries: Sequence[Entry], offsets: Offsets) -> Data:
    """Four lists, one entry for each token."""
    names = [worker.shown(token) for token, _, _ in entries]
    tops = []
    for name, (_, logprob, best) in zip(names, entries):
        listed = {worker.shown(i): finite(p) for i, p in reversed(best)}
        tops.append(None if logprob is None else {**listed, name: finite(logprob)} if best else {})
    return {
        "tokens": names,
        "token_logprobs": [None if p is None else finite(p) for _, p, _ in entries],
        "top_logprobs": tops,
        "text_offset": [offsets.of(worker.token(token)) for token, _, _ in entries],
    }


def chat_logprobs(worker: ModelWorker, entries: Sequence[Entry]) -> Data:
    def one(token: int, logprob: float | None) -> Data:
        content = list(worker.token(token))
        return {"token": worker.shown(token), "logprob": finite(logprob), "bytes": content}

    content = [{**one(i, p), "top_logprobs": [one(*t) for t in tops]} for i, p, tops in entries]
    return {"content": content, "refusal": None}


def finite(x: float | None) -> float:
    """JSON has no infinity."""
    return -9999.0 if x is None else max(x, -9999.0)


async def completions(
    http: HTTPRequest, worker: ModelWorker, body: schemas.Completion
) -> Data | None:
    listed = body.logprobs is not None
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise HTTPError(400, "best_of: this server gives all n answers; leave it out", "best_of")
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
        more["top_logprobs"] = body.logprobs if (body.beams or 1) == 1 else 0
        more["prompt_logprobs"] = bool(body.echo)
    in_thread = worker.app.in_thread
    prompts = await prompts_of(worker, body.prompt, "prompt")
    ask = await in_thread(lambda: Ask(http, worker, body, prompts, "prompt", **more))
    offsets = defaultdict[int, Offsets](Offsets)
    echoed = dict[int, str]()
    if body.echo:
        decode = worker.words("echo").decode
        texts = await in_thread(lambda: [decode(ids) for ids in prompts])
        echoed = dict(enumerate(text for text in texts for _ in range(ask.n)))

    def choices(i: int, text: str, entries: list[Entry], finish: str) -> list[Data]:
        if most == 0:
            text = ""
            entries = entries[: len(ask.prompts[i // ask.n])]
        text = echoed.pop(i, "") + text
        logprobs = None
        if listed and (entries or not body.stream):
            logprobs = completion_logprobs(worker, entries, offsets[i])
        if not (text or finish or logprobs):
            return []
        why = FINISH.get(finish)
        return [{"index": i, "text": text, "logprobs": logprobs, "finish_reason": why}]

    return await ask.send(body, ask.head("text_completion", "cmpl-"), choices)


async def conversation(
    http: HTTPRequest, worker: ModelWorker, body: schemas.Chat
) -> tuple[Ask, list[Reader]]:
    """What a chat asks for, and a reader for each answer."""
    choice = body.tool_choice
    limits = worker.app.limits
    tools = [tool.function for tool in body.tools or []]
    wanted = choice.function.name if isinstance(choice, schemas.ChatChoice) else choice
    usable = tools if wanted != "none" else []
    more: Data = {"top_logprobs": body.top_logprobs or 0} if body.logprobs else {}

    parallel = body.parallel_tool_calls is not False
    mask = await masks_for(worker, body.response_format, tools, wanted, parallel)
    given = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    given |= body.chat_template_kwargs or {}
    ids = await chat_ids(worker, body.messages, usable, given)
    longest = context_of(worker.model) or len(ids) + limits.new_tokens
    left = max(1, longest - (1 if worker.model.reads_source else len(ids)))
    usual = min(limits.new_tokens, folder_settings(worker.model)[0].get("max_new_tokens", left))
    most = body.max_completion_tokens or body.max_tokens or min(usual, left)
    more |= {"mask": mask, "max_new_tokens": most}
    ask = await worker.app.in_thread(lambda: Ask(http, worker, body, [ids], "messages", **more))
    return ask, [Reader(bool(usable)) for _ in range(ask.n)]


async def chat(http: HTTPRequest, worker: ModelWorker, body: schemas.Chat) -> Data | None:
    if body.top_logprobs and not body.logprobs:
        raise HTTPError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    ask, readers = await conversation(http, worker, body)

    def delta(i: int, change: Any, logprobs: Any = None, why: str | None = None) -> Data:
        return {"index": i, "delta": change, "logprobs": logprobs, "finish_reason": why}

    def choices(i: int, text: str, entries: list[Entry], finish: str) -> list[Data]:
        logprobs = None
        calls = readers[i].calls
        if body.logprobs and (entries or not body.stream):
            logprobs = chat_logprobs(worker, entries)
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
    return await ask.send(body, head, choices, [delta(i, begun) for i in range(ask.n)])


def as_chat(body: schemas.Response) -> schemas.Chat:
    """Instructions and items as the messages of a chat; in a thread."""
    messages = list[schemas.Message]()
    if body.instructions is not None:
        messages.append(schemas.Message("system", body.instructions))
    items = [schemas.Item(role="user", content=x)] if isinstance(x := body.input, str) else x
    for i, item in enumerate(items):
        where = f"input[{i}]"
        needs = NEEDS[item.type]
        given: Any = [getattr(item, name) for name in needs]
        if None in given:
            raise HTTPError(400, f"{where}: a {item.type} has {' and '.join(needs)}", where)
        if item.type == "message":
            messages.append(schemas.Message(*given))
        elif item.type == "function_call":
            calls = messages[-1].tool_calls if messages else None
            if calls is None:
                calls = []
                messages.append(schemas.Message("assistant", tool_calls=calls))
            calls.append(schemas.Call(given[0], schemas.Function(*given[1:])))
        else:
            messages.append(schemas.Message("tool", given[1], tool_call_id=given[0]))
    choice: Any = body.tool_choice
    form = body.text.format if body.text else None
    schema = None
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
        self.writing = False
        part = self.items[-1]["content"][0]
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


async def responses(http: HTTPRequest, worker: ModelWorker, body: schemas.Response) -> Data | None:
    try:
        return await respond(http, worker, body)
    except HTTPError as raised:
        # It is a chat inside, whose fields have other names.
        error = raised.body["error"]
        error["param"] = NAMES.get(error["param"], error["param"])
        raise


def about_response(ask: Ask, body: schemas.Response) -> Data:
    """What an answer says beside its output: all that was asked for, and what was not, as OpenAI has it."""
    form = (body.text and body.text.format) or schemas.ResponseFormat("text")
    verbosity = {"verbosity": body.text.verbosity} if body.text and body.text.verbosity else {}
    asdict = msgspec.structs.asdict
    choice = body.tool_choice or "auto"
    return {
        **dict.fromkeys(("error", "incomplete_details", "completed_at", "previous_response_id")),
        **{name: getattr(body, name) for name in ECHOED.split()},
        "id": ask.name,
        "object": "response",
        "created_at": ask.created,
        "model": ask.worker.name,
        "store": False,
        "background": False,
        "top_logprobs": 0,
        **{name: getattr(ask.settings, name) for name in DRAWN},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "truncation": "disabled",
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "text": {"format": msgspec.to_builtins(form), **verbosity},
        "metadata": body.metadata or {},
        "tool_choice": choice if isinstance(choice, str) else asdict(choice),
        "tools": [{**asdict(tool), "strict": True} for tool in body.tools or []],
    }


async def respond(http: HTTPRequest, worker: ModelWorker, body: schemas.Response) -> Data | None:
    app, stream = worker.app, bool(body.stream)
    if not isinstance(body.input, str):
        check_turns(worker, body.input, "input")
    turns = await app.in_thread(lambda: as_chat(body))
    ask, (reader,) = await conversation(http, worker, turns)
    ask.head("response", "resp_")
    about = about_response(ask, body)
    output = Output()

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
        if stream:
            await http.done(b"")
    return None if stream else last
