"""Answers of a given form, by llguidance: a grammar says at every step which tokens may come, so the form is certain.

A tool call is written as <tool_call>, a JSON object on a line of its own, </tool_call>: what models of this kind learn.
The grammar fixes every character around the name and the arguments, so reading a call back is slicing, not guessing."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher

from regard.serve import schemas
from regard.serve.edge import HTTPError
from regard.serve.model_worker import ModelWorker
from regard.serve.sandbox import GRAMMARS, TRIAL, About, Vocabulary
from regard.text import needed

OPEN, CLOSE = "<tool_call>\n", "}\n</tool_call>"
# Seconds of the engine's thread that the masks of a request may take: at first, and for each token.
ONCE, EACH = 0.25, 0.004
COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TOLD = "You can call these tools, one JSON object for each:\nTOOLS\nTo call one, answer with nothing but\n"
TOLD += OPEN + '{"name": NAME, "arguments": OBJECT' + CLOSE


@dataclass
class Root:
    """A compiled grammar, before its first token, and its mask there."""

    matcher: LLMatcher
    first: Any = None


class Roots:
    """Compiled grammars, the last ones that were used, within a number of bytes; one for all models."""

    def __init__(self, most: int):
        self.most = most
        self.used = 0
        self.lock = threading.Lock()
        self.known: OrderedDict[tuple[str, str], tuple[Root, int]] = OrderedDict()

    def get(self, key: tuple[str, str]) -> Root | None:
        with self.lock:
            if key not in self.known:
                return None
            self.known.move_to_end(key)
            return self.known[key][0]

    def put(self, key: tuple[str, str], root: Root, size: int) -> None:
        with self.lock:
            self.used += size - self.known.pop(key, (None, 0))[1]
            self.known[key] = root, size
            while self.used > self.most:
                self.used -= self.known.popitem(last=False)[1][1]


ROOTS = Roots(64 << 20)


class Matching:
    """The mask of one request by where its samples stand, until asked again. What takes too long, or cannot be
    followed, is the request's own `fault`, and ends it."""

    def __init__(self, root: Root, size: int, param: str):
        self.root = root
        self.param = param
        self.words = np.zeros(-(-size // 32), np.int32)
        self.samples: dict[int, tuple[Any, list[int]]] = {}
        self.fault: str | None = None
        # A mask of a large vocabulary takes longer.
        self.each = EACH * max(1.0, size / 50_000)
        self.tokens = 0
        self.seconds = 0.0

    def __call__(self, sample: int, ids: list[int]) -> Any:
        if not ids and self.root.first is not None:
            return self.root.first
        began = time.thread_time()
        matcher, seen = self.samples.get(sample) or (self.root.matcher.deep_copy(), [])
        if seen and (len(ids) < len(seen) or ids[len(seen) - 1] != seen[-1]):
            # It was put back, and is told from its beginning.
            matcher, seen = self.root.matcher.deep_copy(), []
        matcher.consume_tokens(ids[len(seen) :])
        self.samples[sample] = matcher, ids
        self.tokens += len(ids) - len(seen)
        self.words.fill(0)
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)
        self.seconds += time.thread_time() - began
        if matcher.is_error():
            self.fault = f"it could not be followed: {why_not(matcher)}"
        elif self.seconds > ONCE + self.each * self.tokens:
            self.fault = "it takes too long to follow; make it simpler"
        if self.fault is not None:
            raise ValueError(self.fault)
        if not ids:
            self.root.first = self.words.copy()
        return self.words


def why_not(matcher: LLMatcher) -> str:
    return plainly(matcher.get_error().partition("\n")[0])


def plainly(why: str) -> str:
    """llguidance's reason, where that says little to the one who wrote a schema."""
    if why.startswith("NoExtensionBias"):
        return "no text has this form; a $ref that leads to itself?"
    return f"{why:.200}"


async def masks_for(
    worker: ModelWorker, form: schemas.Format | None, tools: Sequence[schemas.Tool], choice: str | None,
    parallel: bool,
) -> Callable[[], Matching] | None:  # fmt: skip
    """What makes the masks of a request, if its form is given."""
    if choice not in (None, "none", "auto", "required") and choice not in [t.name for t in tools]:
        raise HTTPError(400, f"tool_choice names {choice!r:.70}, which is no tool", "tool_choice")
    if choice in ("auto", "required") and not tools:
        raise HTTPError(400, f"tool_choice is {choice}, but there are no tools", "tool_choice")
    calls = bool(tools) and choice != "none"
    kind = "text" if form is None else form.type
    param = "tools" if calls else "response_format"
    if kind == "text" and not calls:
        return None
    if kind != "text" and calls:
        raise HTTPError(400, "response_format cannot be joined with tools", "response_format")
    given = None if form is None else form.json_schema
    if (kind == "json_schema") != (given is not None):
        raise HTTPError(400, f"response_format {kind}: json_schema has the schema", param)
    about = worker.about
    if about is None or not about.ends:
        raise HTTPError(400, f"{worker.name} has no end token, which a grammar needs", param)

    def written_out() -> str:
        try:
            if calls:
                return tool_grammar(tools, choice or "auto", parallel)
            wanted = {"type": "object"} if given is None else given.schema
            return LLMatcher.grammar_from_json_schema(wanted, overrides=COMPACT)
        except ValueError as error:
            raise HTTPError(400, f"this schema cannot be read: {error!s:.200}", param) from None

    grammar = await worker.app.in_thread(written_out, param)
    limits = worker.app.limits
    if len(grammar) > limits.schema:
        most = f"{limits.schema:,} bytes are taken"
        raise HTTPError(400, f"the schema has {len(grammar):,} bytes, at most {most}", param)
    root = ROOTS.get((about.key, grammar))
    if root is None:
        root = await GRAMMARS.run(lambda: compiled(worker, about, grammar, param))
    return lambda: Matching(root, about.size, param)


def compiled(worker: ModelWorker, about: About, grammar: str, param: str) -> Root:
    """A grammar that was tried in a process with limits, and found cheap; in the sandbox's thread."""
    key = about.key, grammar
    if (known := ROOTS.get(key)) is not None:
        return known
    answer = GRAMMARS.ask(about, "trial", grammar=grammar)
    seconds, memory = TRIAL
    why = plainly(answer.get("error", ""))
    if "late" in answer:
        why = f"it takes more than {seconds:g} s of the processor; make it simpler"
    if "memory" in answer:
        why = f"it takes more than {memory >> 20} MiB of memory; make it simpler"
    if why:
        raise HTTPError(400, f"this schema cannot be compiled: {why}", param, "schema_too_complex")
    if worker.grammars is None:
        worker.grammars = Vocabulary(needed(worker.tokenizer), about.size, about.ends)
    root = Root(worker.grammars.matcher(grammar))
    if root.matcher.is_error():
        why = why_not(root.matcher)
        raise HTTPError(400, f"this schema cannot be compiled: {why}", param)
    ROOTS.put(key, root, answer["bytes"])
    return root


def tool_grammar(tools: Sequence[schemas.Tool], choice: str, parallel: bool) -> str:
    """Calls of the tools that may be called; in place of them, where none is asked for, any text."""
    chosen = [t for t in tools if choice in ("auto", "required", t.name)]
    lines = ["start: calls | TEXT" if choice == "auto" else "start: calls"]
    lines += [r"TEXT: /(?s:.*)/ & ~/(?s:<tool_call>.*)/"] if choice == "auto" else []
    lines += ['calls: call ("\\n" call)*' if parallel else "calls: call"]
    lines += ["call: " + " | ".join(f"call{i}" for i in range(len(chosen)))]
    for i, tool in enumerate(chosen):
        schema = {"x-guidance": COMPACT, **(tool.parameters or {"type": "object"})}
        begin, end = json.dumps(opening(tool.name)), json.dumps(CLOSE)
        lines.append(f"call{i}: {begin} %json {json.dumps(schema)} {end}")
    return LLMatcher.grammar_from_lark("\n".join(lines))


def opening(name: str) -> str:
    return f'{OPEN}{{"name": "{name}", "arguments": '


def told_tools(
    template: str, messages: list[dict[str, Any]], tools: Sequence[schemas.Tool]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages, and tools as templates read them; where a template does not say how tools are called, the first
    message does."""
    data = [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in tools]
    if not data or "<tool_call>" in template:
        return messages, data
    text = TOLD.replace("TOOLS", "\n".join(json.dumps(tool["function"]) for tool in data))
    if messages[0]["role"] == "system":
        text = f"{messages[0]['content']}\n\n{text}"
        messages = messages[1:]
    return [{"role": "system", "content": text}, *messages], data


class Reader:
    """An answer's text, piece by piece, as changes of a message: content, or whole calls of tools."""

    def __init__(self, tools: bool):
        self.plain = not tools
        self.held = ""
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str, last: bool) -> list[dict[str, Any]]:
        if self.plain:
            return [{"content": text}] if text else []
        self.held += text
        changes: list[dict[str, Any]] = []
        while self.held.startswith(OPEN) and CLOSE in self.held:
            body, _, rest = self.held.removeprefix(OPEN).partition(CLOSE)
            name = body.removeprefix('{"name": "').partition('"')[0]
            function = {"name": name, "arguments": (OPEN + body).removeprefix(opening(name))}
            call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
            changes.append({"tool_calls": [{"index": len(self.calls), **call}]})
            self.calls.append(call)
            self.held = rest.removeprefix("\n")
        may_call = self.held[: len(OPEN)] == OPEN[: len(self.held)]
        if self.held and (last or not (may_call or self.calls)):
            self.plain = not self.calls
            changes.append({"content": self.held})
            self.held = ""
        return changes
