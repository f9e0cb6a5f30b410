"""Flags of the settings of decoding that they set: name and type are the setting's, the help is the
first sentence of its comment, or of the docstring of a filter that was added to FILTERS."""

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
from regard.decode.settings import DEFAULTS, Settings

T = TypeVar("T")
Early = Literal["heuristic", "never", "first"]
BESIDE = re.compile(r"  # (?!fmt: )(.*?)(?:  # fmt: skip)?$")
# How a setting of each type is written on a command line: as what, and what the help calls it. The
# only text among them is early_stopping.
FORMS: dict[Any, tuple[Any, str | None]] = {
    bool: (bool | None, None),
    int: (int | None, "N"),
    int | None: (int | None, "ID"),
    float: (float | None, "X"),
    str: (Early | None, None),
    tuple[int, float] | None: (tuple[int, float] | None, "N FACTOR"),
    tuple[int, ...]: (UseAppendAction[tuple[int, ...]], "ID"),
    tuple[tuple[int, float], ...]: (UseAppendAction[tuple[str, ...]], "ID=BIAS"),
    tuple[tuple[tuple[int, ...], float], ...]: (UseAppendAction[tuple[str, ...]], "ID,ID=BIAS"),
}


def setting_flags(names: str, **helps: str) -> Callable[[type[T]], type[T]]:
    """Makes a class a frozen dataclass with flags of these names, in this order: each a field of the
    class itself, or a setting, which `helps` may describe otherwise. `filters` stands for all that
    were added to FILTERS. A setting that is not given is left to the model's folder."""
    types, comments = typing.get_type_hints(Settings), meanings(Settings)
    added = {name: each.keep.__doc__ or "" for name, each in FILTERS.items() if name not in types}

    def decorate(cls: Any) -> Any:
        flags = {}
        for name in names.replace("filters", " ".join(added)).split():
            if name in cls.__annotations__:
                flags[name] = cls.__annotations__[name]
                continue
            kind, metavar = FORMS[types.get(name, float)]
            text = helps.get(name) or first_sentence((comments | added)[name])
            flags[name] = Annotated[kind, arg(metavar=metavar, help=text)]
            setattr(cls, name, () if DEFAULTS.get(name) == () else None)
        cls.__annotations__ = flags
        return dataclasses.dataclass(frozen=True)(cls)

    return decorate


def first_sentence(text: str) -> str:
    """The help of a flag: it begins with a small letter and has no full stop."""
    sentence = " ".join(text.split()).partition(". ")[0].removesuffix(".")
    return sentence[:1].lower() + sentence[1:]


@functools.cache
def meanings(cls: type) -> dict[str, str]:
    """The comment of each field that the class itself declares: beside it, or the lines above it."""
    try:
        text = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    lines, comments = text.splitlines(), {}
    (defined,) = ast.parse(text).body
    for node in getattr(defined, "body", []):
        if not isinstance(getattr(node, "target", None), ast.Name):
            continue
        matches = map(BESIDE.search, lines[node.lineno - 1 : node.end_lineno])
        beside = [match[1] for match in matches if match]
        above = takewhile(re.compile(" *#").match, reversed(lines[: node.lineno - 1]))
        comments[node.target.id] = " ".join(beside or [x.strip(" #") for x in reversed([*above])])
    return comments
