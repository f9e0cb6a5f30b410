"""Chat messages -> the prompt, by the template that the model folder carries (never one from a request).

A template is a program: regard.text.template runs it in a sandbox, in a process with limits of time and memory.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any

from regard.errors import UsageError, nearest
from regard.text.template import MEMORY, WORKER
from regard.text.tokenizer import Tokenizer, check_unicode

MAX_SOURCE = 1_000_000  # characters of a template
MAX_LENGTH = 4_000_000  # characters of a prompt
MAX_SECONDS = 5.0
KEYS = ("role", "content", "name")
# Where a message spells a special token, a character stands for it that no text holds.
MARKS = 0x10F000

Message = Mapping[str, Any]


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> list[int]:
    """The ids of the prompt that `render_chat` makes. A special token is one where the template says it; where a
    message spells it, it stays text, so that no message can pose as another's turn."""
    chat = check_messages(messages)
    added = tokenizer.core.get_added_tokens_decoder()
    special = {token.content: (index, token) for index, token in added.items() if token.special}
    spelt = sorted({s for s in special for m in chat for x in m.values() if s in x}, key=len)
    if not spelt:
        return tokenizer.encode(render_chat(tokenizer, chat, **options), special=False)
    marks = {chr(MARKS + i): text for i, text in enumerate(spelt)}
    # The longest first: one special token may be a part of another.
    for mark, text in reversed(marks.items()):
        if any(mark in x for m in chat for x in m.values()):
            raise UsageError(f"a message holds the private character U+{ord(mark):X}; leave it out")
        chat = [{key: x.replace(text, mark) for key, x in m.items()} for m in chat]
    prompt = render_chat(tokenizer, chat, **options)
    cut = "|".join(re.escape(text) for text in sorted(special, key=len, reverse=True))
    parts, ids = re.split(f"({cut})", prompt), []
    for i, part in enumerate(parts):
        if i % 2:
            ids.append(special[part][0])
            continue
        if i and special[parts[i - 1]][1].rstrip:
            part = part.lstrip()
        if i + 1 < len(parts) and special[parts[i + 1]][1].lstrip:
            part = part.rstrip()
        literal = any(mark in part for mark in marks)
        for mark, text in marks.items():
            part = part.replace(mark, text)
        ids += tokenizer.encode(part, special=False, literal=literal) if part else []
    return ids


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str = "default",
    reply: bool = True,
    max_length: int = MAX_LENGTH,
    max_seconds: float = MAX_SECONDS,
) -> str:
    """The prompt for a list of {"role": ..., "content": ...} as text; `encode_chat` gives its ids.
    `template` is the name of one that the folder carries; `reply` opens the assistant's turn."""
    if importlib.util.find_spec("jinja2") is None:
        raise UsageError("chat templates need jinja2; install it: pip install jinja2")
    known = tokenizer.templates
    if not known:
        raise UsageError(
            "this model folder carries no chat template; give the prompt as text, or put chat_template.jinja into it"
        )
    if template not in known:
        raise UsageError(
            f"the folder has no chat template {template!r}; {nearest(template, known)}"
        )
    if len(known[template]) > MAX_SOURCE:
        raise UsageError(
            f"the chat template has {len(known[template]):,} characters, at most {MAX_SOURCE:,} are read"
        )
    given = {"tools": None, "documents": None, "add_generation_prompt": reply, **tokenizer.tokens}
    variables = {"messages": check_messages(messages), **given}
    request = {"source": known[template], "variables": variables, "max_length": max_length}
    answer = WORKER.ask(request, max_seconds)
    if "text" in answer:
        return answer["text"]
    why = {
        "long": f"made more than {max_length:,} characters; send less, or pass max_length",
        "late": f"ran longer than {max_seconds:g} s: an endless loop",
        "memory": f"took more than {MEMORY >> 30} GiB of memory",
        "error": f"refuses these messages or fails: {answer.get('error')}",
    }
    raise UsageError(f"the model folder's chat template {why[next(iter(answer))]}")


def check_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as plain data of our own; a list of text parts becomes one text, one part per line."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(
            f'messages must be a list such as [{{"role": "user", "content": "Hello"}}], got {messages!r:.60}'
        )
    checked = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
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
        texts = {key: message.get(key) for key in KEYS[1:] if key == "content" or key in message}
        checked.append({"role": role} | {k: _text(x, f"{where}.{k}") for k, x in texts.items()})
    return checked


def _text(value: Any, where: str) -> str:
    if isinstance(value, list):
        for i, part in enumerate(value):
            known = part if isinstance(part, Mapping) else {}
            if known.get("type") != "text" or not isinstance(known.get("text"), str):
                raise UsageError(
                    f'{where}[{i}] must be {{"type": "text", "text": "..."}}, got {part!r:.60}'
                )
        value = "\n".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise UsageError(f"{where} must be text or a list of text parts, got {value!r:.60}")
    check_unicode(value, where)
    return value
