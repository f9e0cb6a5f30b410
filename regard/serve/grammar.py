"""Answers of a given form, by llguidance: a grammar says at every step which tokens may come, so the form is certain.

A tool call is written as <tool_call>, a JSON object on a line of its own, </tool_call>: what models of this kind learn.
The grammar fixes every character around the name and the arguments, so reading a call back is slicing, not guessing."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from regard.decode.check import written
from regard.decode.generate import special_of
from regard.serve import shapes
from regard.serve.edge import Limits, Refusal
from regard.serve.host import Host
from regard.text import needed

OPEN, CLOSE = "<tool_call>\n", "}\n</tool_call>"
KEPT = 64  # grammars that are compiled, for each model
COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TOLD = "You can call these tools, one JSON object for each:\nTOOLS\nTo call one, answer with nothing but\n"
TOLD += OPEN + '{"name": NAME, "arguments": OBJECT' + CLOSE
MAKING = threading.Lock()


class Grammars:
    """The compiled grammars of a model, for workers; and its tokenizer as llguidance reads one."""

    bos_token_id = None

    def __init__(self, host: Host):
        self.plain, self.vocab = needed(host.tokenizer), written(host.model).vocab
        eos = list(special_of(host.model).eos)
        if not eos:
            raise Refusal(400, f"{host.name} has no end token, which a grammar needs")
        self.eos_token_id = eos[0]
        self.tokens = [self.plain.token_bytes(i) for i in range(self.vocab)]
        added = self.plain.core.get_added_tokens_decoder().items()
        self.special_token_ids = [i for i, token in added if token.special and i < self.vocab]
        tokenizer = LLTokenizer(TokenizerWrapper(self), n_vocab=self.vocab, eos_token=eos)
        self.made = lru_cache(KEPT)(lambda text: [LLMatcher(tokenizer, text, log_level=0), None])

    def __call__(self, text: str) -> list[int]:
        return self.plain.encode(text, special=False, literal=True)


class Matching:
    """The mask of one request by where its samples stand, until asked again. `root`: a matcher, its first mask."""

    def __init__(self, root: list[Any], vocab: int):
        self.root, self.words = root, np.zeros(-(-vocab // 32), np.int32)
        self.samples: dict[int, tuple[Any, list[int]]] = {}

    def __call__(self, sample: int, ids: list[int]) -> Any:
        if not ids and self.root[1] is not None:
            return self.root[1]
        matcher, seen = self.samples.get(sample) or (self.root[0].deep_copy(), [])
        if seen and (len(ids) < len(seen) or ids[len(seen) - 1] != seen[-1]):
            # It was put back, and is told from its beginning.
            matcher, seen = self.root[0].deep_copy(), []
        matcher.consume_tokens(ids[len(seen) :])
        self.samples[sample] = matcher, ids
        self.words.fill(0)
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)
        if matcher.is_error():
            raise ValueError("the grammar could not be followed, or became too large")
        if not ids:
            self.root[1] = self.words.copy()
        return self.words


def grammar_for(
    limits: Limits, host: Host, form: shapes.Format | None, tools: Sequence[shapes.Tool], choice: str | None,
    parallel: bool,
) -> Callable[[], Matching] | None:  # fmt: skip
    """What makes the masks of a request, if its form is given; in a worker."""
    kind, given, param = "text", None, "response_format"
    if form is not None:
        kind, given = form.type, form.json_schema
    if choice not in (None, "none", "auto", "required") and choice not in [t.name for t in tools]:
        raise Refusal(400, f"tool_choice names {choice!r:.70}, which is no tool", "tool_choice")
    if choice in ("auto", "required") and not tools:
        raise Refusal(400, f"tool_choice is {choice}, but there are no tools", "tool_choice")
    if tools and choice != "none":
        if kind != "text":
            raise Refusal(400, "response_format cannot be joined with tools", param)
        grammar, param = tool_grammar(tools, choice or "auto", parallel), "tools"
    elif kind == "text":
        return None
    elif (kind == "json_schema") != (given is not None):
        raise Refusal(400, f"response_format {kind}: json_schema has the schema", param)
    else:
        wanted = {"type": "object"} if given is None else given.schema
        grammar = LLMatcher.grammar_from_json_schema(wanted, overrides=COMPACT)
    if len(grammar) > limits.schema:
        most = f"{limits.schema:,} bytes are taken"
        raise Refusal(400, f"the schema has {len(grammar):,} bytes, at most {most}", param)
    with MAKING:
        host.grammars = compiled = host.grammars or Grammars(host)
    root: list[Any] = compiled.made(grammar)
    if root[0].is_error():
        why = root[0].get_error().partition("\n")[0]
        raise Refusal(400, f"this schema cannot be compiled: {why:.200}", param)
    return lambda: Matching(root, compiled.vocab)


def tool_grammar(tools: Sequence[shapes.Tool], choice: str, parallel: bool) -> str:
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
    template: str, messages: list[dict[str, Any]], tools: Sequence[shapes.Tool]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages, and tools as templates read them; where a template does not say how tools are called, the first
    message does."""
    data = [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in tools]
    if not data or "<tool_call>" in template:
        return messages, data
    text = TOLD.replace("TOOLS", "\n".join(json.dumps(tool["function"]) for tool in data))
    if messages[0]["role"] == "system":
        text, messages = f"{messages[0]['content']}\n\n{text}", messages[1:]
    return [{"role": "system", "content": text}, *messages], data


class Reader:
    """An answer's text, piece by piece, as changes of a message: content, or whole calls of tools."""

    def __init__(self, tools: bool):
        self.plain, self.held = not tools, ""
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
