"""Chat messages -> the prompt, by the template that the model folder carries (never one from a request); and what of it
the assistant said, which is what training on chats learns.

A template is a program: regard.text.template runs it in a sandbox, in a process with limits of time and memory.
"""

from __future__ import annotations

import importlib.util
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

from regard.errors import UsageError, nearest
from regard.text import template as program
from regard.text.template import CLOSE, MEMORY, OPEN
from regard.text.tokenizer import Located, Tokenizer, check_unicode
from regard.text.worker import Worker

MAX_SOURCE = 1_000_000  # characters of a template
MAX_LENGTH = 4_000_000  # characters of a prompt
MAX_SECONDS = 5.0
# Levels of lists and objects in what a template is given; not Python's own bound, which anything may raise.
DEEPEST = 200
KEYS = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")
# Variables of a template that nobody else may set.
RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}
# Who may speak in training data; and what ShareGPT calls them.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant"}
SHAREGPT |= {"observation": "tool", "function_response": "tool"}
# Where a message spells a special token, a character stands for it that no text holds.
MARKS = 0x10F000
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Texts that a template looks for in others: 'x' in content, content.split('x').
LOOKS = re.compile(
    r"""(['"])([^'"]+)\1\s+(?:not\s+)?in\s|\.(?:r?split|r?partition|(?:start|end)swith|replace|r?find|index|"""
    r"""count|[lr]?strip|remove(?:pre|suf)fix)\(\s*(['"])([^'"]+)\3"""
)
# For models that come without a template.
CHATML = """{% for m in messages %}
{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Where templates run; one for all, begun when it is first needed, or by a server when that begins.
TEMPLATES = Worker("-P", program.__file__)

Message = Mapping[str, Any]
# Ids, and which of them the assistant said.
Learned = tuple[list[int], list[bool]]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[int]:
    """The ids of the prompt that `render_chat` makes. A special token is one where the template says it; where a
    message, a tool or a variable spells it, it stays text, so that no message can pose as another's turn. But marks of
    the assistant's own, such as </think>, are what they are where the template looks for them."""
    name = options.get("template", "default")
    chat = _Shielded(tokenizer, check_messages(messages), tools, variables, name)
    given: Any = {"tools": chat.tools, "variables": chat.variables, **options}
    return chat.located(render_chat(tokenizer, chat.messages, **given))[0]


def learned_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    hidden: set[str] | None = None,
) -> list[Learned]:
    """A conversation as rows to learn from, mostly one: ids, and which of them the assistant said."""
    return learned_rows(rendered_chat(tokenizer, messages, tools, hidden=hidden))


def rendered_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    first: int | None = None,
    hidden: set[str] | None = None,
) -> list[Rendered]:
    """A conversation as texts to learn from, mostly one, and what of each the assistant said, by the template's own
    {% generation %} blocks where it has them.

    Elsewhere a turn is what the template adds to the prompt that asks for it. Where it writes an earlier turn otherwise
    once the talk has gone on (without its thoughts, say), that turn is a row of its own: as it was said. So it is done
    too where turns before the `first` are only read. `hidden` gets the special tokens that are spelt and stay text."""
    chat = _Shielded(tokenizer, check_messages([_turn(m) for m in listed(messages)]), tools)
    if hidden is not None:
        hidden.update(chat.marks.values())
    said_by = enumerate(m["role"] for m in chat.messages)
    turns = [i for i, role in said_by if role == "assistant" and i >= (first or 0)]
    if not turns:
        raise UsageError("no message is the assistant's, so nothing can be learned from it")
    render = partial(render_chat, tokenizer, tools=chat.tools)
    whole = render(chat.messages, reply=False, marked=True)
    calls = [call for m in chat.messages for call in m.get("tool_calls", [])]
    for part in (*calls, *(chat.tools or [])):
        name = part.get("function", part).get("name") if isinstance(part, dict) else None
        if not isinstance(name, str) or name not in whole:
            how = "take another template, or leave tools and tool calls out"
            raise UsageError(f"the chat template does not show the tool {name!r:.60}; {how}")
    blocks = MARKED.search(tokenizer.templates["default"]) is not None
    if first is None and blocks:
        parts = re.split(f"[{OPEN}{CLOSE}]", whole)
        places = [*accumulate(map(len, parts))]
        if not (spans := [*zip(places[::2], places[1::2])]):
            raise UsageError("the chat template's generation blocks mark nothing of this")
        return [Rendered(chat, "".join(parts), spans)]
    spans = []
    rows = []
    for i in turns:
        last = i + 1 == len(chat.messages) and not blocks
        said = whole if last else render(chat.messages[: i + 1], reply=False)
        if i:
            start = chat.common(render(chat.messages[:i]), said)
        else:
            # What asks for an answer, wherever it stands.
            user = [{"role": "user", "content": "?"}]
            asking = render(user)[len(render(user, reply=False)) :]
            start = said.find(asking) + len(asking) if asking in said else 0
        end = chat.common(said, whole)
        if start < end and not chat.special.sub("", said[end:]).strip():
            spans.append((start, end))
        else:
            rows.append(Rendered(chat, said, [(start, len(said))]))
    return [*([Rendered(chat, whole, spans)] if spans else []), *rows]


def learned_rows(rows: Sequence[Rendered]) -> list[Learned]:
    """The ids of rendered texts, and which of them the assistant said. Those that spell no special token are encoded
    together, on every core."""
    plain = [row.text for row in rows if not row.chat.marks]
    encoded = iter(rows[0].chat.tokenizer.located_all(plain) if plain else ())
    return [
        row.chat.learned(*row[1:], next(encoded) if not row.chat.marks else None) for row in rows
    ]


def strange_marks(tokenizer: Tokenizer) -> list[str]:
    """Marks around turns, such as <|im_end|>, that the template writes and the tokenizer has no token for."""
    talk = [{"role": role, "content": "?"} for role in ("user", "assistant")]
    marks = re.findall(r"<[^<>\s]+>", render_chat(tokenizer, talk, reply=False))
    return [m for m in dict.fromkeys(marks) if tokenizer.core.token_to_id(m) is None]


class Rendered(NamedTuple):
    """A text that a chat was written as, and the characters of it that the assistant said."""

    chat: _Shielded
    text: str
    spans: list[tuple[int, int]]


class _Shielded:
    """Messages, tools and variables in which a private character stands for every special token that they spell: all
    but those of the assistant that the template looks for, and so must see."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: list[dict[str, Any]],
        tools: Any = None,
        variables: Any = None,
        template: str = "default",
    ):
        self.tokenizer = tokenizer
        added = tokenizer.core.get_added_tokens_decoder()
        self.ids = {token.content: (i, token) for i, token in added.items() if token.special}
        self.special = _any_of(token.content for token in added.values())
        own = self._looked_for(tokenizer.templates.get(template, ""))
        said = [m for m in messages if m["role"] == "assistant"]
        others = [[m for m in messages if m["role"] != "assistant"], tools, variables]
        both = ((texts_of(said), self.ids.keys() - own), (texts_of(others), self.ids.keys()))
        spelt = {s for texts, names in both for text in texts for s in names if s in text}
        self.marks = {chr(MARKS + i): text for i, text in enumerate(sorted(spelt, key=len))}
        for mark in (*self.marks, OPEN, CLOSE):
            if any(mark in text for texts, _ in both for text in texts):
                raise UsageError(
                    f"a message holds the private character U+{ord(mark):X}; leave it out"
                )

        def hide(text: str, shown: Container[str] = ()) -> str:
            # The longest first: one special token may be a part of another.
            for mark, special in reversed(self.marks.items()):
                text = text if special in shown else text.replace(special, mark)
            return text

        seen = partial(hide, shown=own)
        self.messages = [_each(m, seen if m["role"] == "assistant" else hide) for m in messages]
        self.tools, self.variables = _each([tools, variables], hide)

    def _looked_for(self, source: str) -> set[str]:
        """The special tokens that a template looks for in texts; never those that end one."""
        texts = [match[2] or match[4] for match in LOOKS.finditer(source)]
        ends = self.tokenizer.special.eos
        return {s for s, (i, _) in self.ids.items() if i not in ends and any(s in x for x in texts)}

    def shown(self, text: str) -> str:
        for mark, special in self.marks.items():
            text = text.replace(mark, special)
        return text

    def located(self, text: str) -> Located:
        """The ids of a rendered text, and the characters of `shown(text)` that each comes from."""
        if not self.marks:
            return self.tokenizer.located(text)
        parts = re.split(f"({_any_of(self.ids).pattern})", text)
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        at = 0
        for i, part in enumerate(parts):
            here = at
            part = self.shown(part)
            at += len(part)
            if i % 2:
                ids.append(self.ids[part][0])
                places.append((here, at))
                continue
            if i and self.ids[parts[i - 1]][1].rstrip:
                part = part.lstrip()
                here = at - len(part)
            if i + 1 < len(parts) and self.ids[parts[i + 1]][1].lstrip:
                part = part.rstrip()
            literal = any(mark in parts[i] for mark in self.marks)
            if part:
                more, spans = self.tokenizer.located(part, literal=literal)
                ids += more
                places += [(here + a, here + b) for a, b in spans]
        return ids, places

    def learned(
        self, text: str, spans: Sequence[tuple[int, int]], found: Located | None
    ) -> Learned:
        """The ids of a rendered text, as they may be `found` already, and which of them have a character of these
        spans, which follow one another."""
        ids, places = self.located(text) if found is None else found
        said = [False] * len(ids)
        first = 0
        for a, b in spans:
            start = len(self.shown(text[:a]))
            end = len(self.shown(text[:b]))
            # Tokens end where later ones do, or before.
            first = bisect_right(places, start, first, key=lambda place: place[1])
            last = bisect_left(places, end, first, key=lambda place: place[0])
            said[first:last] = [True] * (last - first)
        return ids, said

    def common(self, one: str, other: str) -> int:
        """Characters that two texts begin with, without a part of a special token."""
        size = 0
        most = min(len(one), len(other))
        while size < most:
            # The half of what is left, if they agree there.
            half = (size + most + 1) // 2
            size, most = (half, most) if one[size:half] == other[size:half] else (size, half - 1)
        for text in (one, other):
            cuts = (m.span() for m in self.special.finditer(text, max(0, size - 200)))
            size = next((a for a, b in cuts if a < size < b), size)
        return size


@cache
def _has_jinja() -> bool:
    return importlib.util.find_spec("jinja2") is not None


def _any_of(texts: Any) -> re.Pattern[str]:
    """Any of these texts, the longest first; of none, nothing."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else "(?!)")


def _each(x: Any, change: Callable[[str], str]) -> Any:
    """Plain data with every text in it changed."""
    if isinstance(x, str):
        return change(x)
    if isinstance(x, Mapping):
        return {key: _each(value, change) for key, value in x.items()}
    return [_each(value, change) for value in x] if isinstance(x, list | tuple) else x


def texts_of(x: Any, depth: int = 0) -> list[str]:
    """Every text in plain data."""
    if isinstance(x, str):
        return [x]
    if depth > DEEPEST:
        raise UsageError(f"it is nested more than {DEEPEST} levels deep; give it flatter")
    inner = x.values() if isinstance(x, Mapping) else x if isinstance(x, list | tuple) else ()
    return [text for value in inner for text in texts_of(value, depth + 1)]


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str = "default",
    tools: Sequence[Any] | None = None,
    reply: bool = True,
    marked: bool = False,
    variables: Mapping[str, Any] | None = None,
    max_length: int = MAX_LENGTH,
    max_seconds: float = MAX_SECONDS,
) -> str:
    """The prompt for a list of {"role": ..., "content": ...} as text; `encode_chat` gives its ids.
    `template` is the name of one that the folder carries; `tools` are shown to it, `variables` too; `reply` opens the
    assistant's turn; `marked`: what the template wrote to be learned stands between OPEN and CLOSE of
    regard.text.template."""
    if not _has_jinja():
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
    check_variables(tokenizer, variables or {})
    given = {"tools": tools or None, "documents": None, "add_generation_prompt": reply}
    request = {"source": known[template], "max_length": max_length, "marked": marked}
    chat = check_messages(messages)
    # Some templates want the arguments of a call as data, some as text.
    for form in (chat, [_worded(m) for m in chat]):
        told = {**given, **tokenizer.tokens, **(variables or {}), "messages": form}
        answer = TEMPLATES.ask({**request, "variables": told}, max_seconds)
        if "text" in answer:
            return answer["text"]
        if "error" not in answer or not any("tool_calls" in m for m in chat):
            break
    why = {
        "long": f"made more than {max_length:,} characters; send less, or pass max_length",
        "late": f"ran longer than {max_seconds:g} s: an endless loop",
        "memory": f"took more than {MEMORY >> 30} GiB of memory",
        "error": f"refuses these messages or fails: {answer.get('error')}",
    }
    raise UsageError(f"the model folder's chat template {why[next(iter(answer))]}")


def check_variables(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
    if taken := sorted({*RESERVED, *tokenizer.tokens} & variables.keys()):
        raise UsageError(
            f"a variable of the chat template cannot be called {taken[0]}; leave it out"
        )


def listed(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(
            f'messages must be a list such as [{{"role": "user", "content": "Hello"}}], got {messages!r:.60}'
        )
    return messages


def _turn(message: Any) -> Any:
    """A message of training data, which may be of ShareGPT's form."""
    if not isinstance(message, Mapping):
        return message
    if "from" in message:
        role = SHAREGPT.get(message["from"], message["from"])
        message = {**message, "role": role, "content": message.get("value")}
        del message["from"], message["value"]
    role = message.get("role")
    if isinstance(role, str) and role not in ROLES:
        raise UsageError(f"the role {role!r:.40} is unknown; {nearest(role, (*ROLES, *SHAREGPT))}")
    return message


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as plain data of our own; a list of text parts becomes one text, one part per line."""
    checked = []
    for i, message in enumerate(listed(messages)):
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
        given = {"content": None, **{k: x for k, x in message.items() if x is not None}}
        calls = given.pop("tool_calls", None)
        plain: dict[str, Any] = {
            key: None if key == "content" and x is None and calls else _text(x, f"{where}.{key}")
            for key, x in given.items()
        }
        if calls:
            plain["tool_calls"] = _calls(calls, f"{where}.tool_calls")
        checked.append({**plain, "role": role})
    return checked


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls of tools with their arguments as data, as templates have them; OpenAI's form has them as a text of JSON."""
    plain = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            form = '[{"type": "function", "function": {"name": ..., "arguments": ...}}]'
            raise UsageError(f"{where} must be a list such as {form}, got {calls!r:.60}")
        arguments = function.get("arguments")
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise UsageError(f"{where}: arguments are not JSON: {arguments!r:.60}") from None
        more = {} if function is call else {"type": "function", **(call or {})}
        plain.append({**more, "function": {**function, "arguments": arguments}})
    for text in texts_of(plain):
        check_unicode(text, where)
    return plain


def _worded(message: dict[str, Any]) -> dict[str, Any]:
    """The same with the arguments of calls as text."""
    calls = []
    for call in message.get("tool_calls", []):
        function = call["function"]
        worded = {**function, "arguments": json.dumps(function["arguments"])}
        calls.append({**call, "function": worded})
    return {**message, "tool_calls": calls} if calls else message


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
