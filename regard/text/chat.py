"""Chat messages -> the prompt, by the template that the model folder carries (never one from a request).

A template is a program: it runs in jinja2's immutable sandbox, for a limited time, up to a limited length. It can
still take memory before it ends: a server renders in a worker process that it can end.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any

from regard.config import UsageError, nearest
from regard.text.tokenizer import Tokenizer, check_unicode

MAX_SOURCE = 1_000_000  # characters of a template
MAX_LENGTH = 4_000_000  # characters of a prompt
MAX_SECONDS = 5.0
KEYS = ("role", "content", "name")

Message = Mapping[str, Any]


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str = "default",
    reply: bool = True,
    max_length: int = MAX_LENGTH,
    max_seconds: float = MAX_SECONDS,
) -> str:
    """The prompt for a list of {"role": ..., "content": ...}; encode it with special=False, the template has put the
    special tokens in. `template` is the name of one that the folder carries; `reply` opens the assistant's turn."""
    source = _source(tokenizer, template)
    chat = check_messages(messages)
    with _blaming_template():
        parts, length = [], 0
        rendered = _compiled(source).generate(
            messages=chat,
            tools=None,
            documents=None,
            add_generation_prompt=reply,
            **tokenizer.tokens,
        )
        with _deadline(max_seconds):
            for part in rendered:
                length += len(part)
                if length > max_length:
                    raise UsageError(
                        f"the chat template made more than {max_length:,} characters; send less, or pass max_length"
                    )
                parts.append(part)
    return "".join(parts)


def check_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as plain data of our own; a list of text parts becomes one text, a part a line."""
    if (
        isinstance(messages, (str, bytes, Mapping))
        or not isinstance(messages, Sequence)
        or not messages
    ):
        raise UsageError(
            f'messages must be a list such as [{{"role": "user", "content": "Hello"}}], got {messages!r:.60}'
        )
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Message, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} must have role and content, got {message!r:.60}")
    for key in message:
        if key not in KEYS:
            raise UsageError(f"{where}.{key} is not known; {nearest(str(key), KEYS)}")
    role = message.get("role")
    if not isinstance(role, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", role):
        raise UsageError(
            f"{where}.role must be a word such as user, assistant or system, got {role!r:.60}"
        )
    found = {"role": role, "content": _content(message.get("content"), f"{where}.content")}
    if "name" in message:
        found["name"] = _content(message["name"], f"{where}.name")
    return found


def _content(value: Any, where: str) -> str:
    if isinstance(value, list):
        for i, part in enumerate(value):
            if (
                not isinstance(part, Mapping)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                raise UsageError(
                    f'{where}[{i}] must be {{"type": "text", "text": "..."}}, got {part!r:.60}'
                )
        value = "\n".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise UsageError(f"{where} must be text or a list of text parts, got {value!r:.60}")
    check_unicode(value, where)
    return value


def _source(tokenizer: Tokenizer, name: str) -> str:
    known = tokenizer.templates
    if not known:
        raise UsageError(
            "this model folder carries no chat template; give the prompt as text, or put chat_template.jinja into it"
        )
    if name not in known:
        raise UsageError(f"the folder has no chat template {name!r}; {nearest(name, known)}")
    if len(known[name]) > MAX_SOURCE:
        raise UsageError(
            f"the chat template has {len(known[name]):,} characters, at most {MAX_SOURCE:,} are read"
        )
    return known[name]


@contextmanager
def _blaming_template() -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except (Exception, RecursionError, MemoryError) as e:
        raise UsageError(
            f"the model folder's chat template refuses these messages or fails: {e}"
        ) from None


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Ends Python code that runs on: a template's loops are Python lines, each of which is traced."""
    end, before = time.monotonic() + seconds, sys.gettrace()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if time.monotonic() > end:
            raise UsageError(
                f"the chat template ran longer than {seconds:g} s; it has a loop without end"
            )
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    """The template in the one environment that Regard has: sandboxed, nothing in it can be changed; blocks and extra
    functions as transformers' apply_chat_template has them."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
    except ImportError:
        raise UsageError("chat templates need jinja2; install it: pip install jinja2") from None

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} marks what to train on; here it is its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _size(operator, left, right) > MAX_LENGTH:
                raise SecurityError(f"{operator} would make something very large")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _size(operator: str, left: Any, right: Any) -> int:
    """How long (characters, items or bits) left * right or left ** right would be, 0 where it stays small."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * (max(right, 0) if operator == "**" else 1) + right.bit_length()
    if isinstance(right, int):
        left, right = right, left
    return (
        left * len(right)
        if isinstance(left, int) and isinstance(right, (str, bytes, list, tuple))
        else 0
    )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: jinja2's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
