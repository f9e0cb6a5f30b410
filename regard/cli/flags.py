"""Flags made of the settings of decoding that they set: name and type are the setting's, the help is the first
sentence of its comment. A filter that was added to FILTERS has its docstring's."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Callable
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeVar

from tyro.conf import UseAppendAction, arg

from regard.decode.filters import FILTERS
from regard.decode.settings import Settings

T = TypeVar("T")
Early = Literal["heuristic", "never", "first"]
BESIDE = re.compile(r"  # (?!fmt: )(.*?)(?:  # fmt: skip)?$")
# How a setting of each type is written on a command line: as what, and what stands for it in the help.
FORMS: dict[Any, tuple[Any, str | None]] = {
    bool: (bool, None),
    int: (int, "N"),
    int | None: (int, "ID"),
    float: (float, "X"),
    str: (Early, None),
    tuple[int, float] | None: (tuple[int, float], "N FACTOR"),
}
# The same of settings that are lists, whose flags are given once for each item.
LISTS: dict[Any, tuple[Any, str]] = {
    tuple[int, ...]: (tuple[int, ...], "ID"),
    tuple[tuple[int, float], ...]: (tuple[str, ...], "ID=BIAS"),
    tuple[tuple[tuple[int, ...], float], ...]: (tuple[str, ...], "ID,ID=BIAS"),
}


def setting_flags(names: str, **helps: str) -> Callable[[type[T]], type[T]]:
    """A class decorator: a frozen dataclass with a flag for each of the settings named, beside the fields of its own
    that are named, in this order; `filters` stands for those that were added. What is not given has no value: it is
    left to the model's folder."""

    def made(cls: Any) -> Any:
        own, flags = cls.__annotations__, dict[str, Any]()
        for name in names.split():
            for each in added_filters() if name == "filters" else [name]:
                flags[each] = own.get(each) or _flag(each, helps.get(each))
                if each not in own:
                    setattr(cls, each, () if _hints().get(each) in LISTS else None)
        cls.__annotations__ = flags
        return dataclasses.dataclass(frozen=True)(cls)

    return made


def added_filters() -> list[str]:
    """Those that are not fields of Settings."""
    return [name for name in FILTERS if name not in _hints()]


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Settings)


def _flag(name: str, text: str | None) -> Any:
    if name not in _hints():
        return _optional(float, "X", text or first_sentence(FILTERS[name].keep.__doc__ or ""))
    text, hint = text or first_sentence(meanings(Settings)[name]), _hints()[name]
    if hint in LISTS:
        kind, place = LISTS[hint]
        return Annotated[UseAppendAction[kind], arg(metavar=place, help=text)]  # type: ignore[valid-type]
    return _optional(*FORMS[hint], text)


def _optional(kind: Any, metavar: str | None, text: str) -> Any:
    return Annotated[kind | None, arg(metavar=metavar, help=text)]


def first_sentence(text: str) -> str:
    """As the help of a flag: with a small letter, and without its full stop."""
    sentence = text.partition(". ")[0].removesuffix(".")
    return sentence[:1].lower() + sentence[1:]


@functools.cache
def meanings(cls: type) -> dict[str, str]:
    """Of each field that the class itself declares: the comment beside it, or the lines of comment above it."""
    try:
        text = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    lines, found = text.splitlines(), {}
    (defined,) = ast.parse(text).body
    for node in getattr(defined, "body", []):
        if not isinstance(getattr(node, "target", None), ast.Name):
            continue
        beside = map(BESIDE.search, lines[node.lineno - 1 : node.end_lineno])
        said = [match[1] for match in beside if match]
        above = takewhile(re.compile(" *#").match, reversed(lines[: node.lineno - 1]))
        found[node.target.id] = " ".join(said or [x.strip(" #") for x in reversed([*above])])
    return found
