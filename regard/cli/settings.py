"""Every setting with its type, default and meaning, read from the dataclasses themselves: for
`regard train --help-all` and the reference pages of the docs."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from regard.cli.flags import meanings
from regard.config import Range, alternatives, to_dict, walk
from regard.data.train_tokenizer import Recipe
from regard.see.format import aligned
from regard.training.config import Config, _written

Named = Callable[[type], str]
Row = tuple[str, str, str, str]  # name, type, default, meaning
PLAIN = {int: "whole number", float: "number", bool: "true or false", str: "text"}
PLAIN |= {type(None): "none", Any: "anything"}
MODEL = (
    ("model.preset", "text", "needed", "a model by name, with random weights: regard presets"),
    ("model.folder", "text", "instead", "a model folder to go on from"),
    ("model.NAME", "anything", "as it is", "any setting of that model: regard presets NAME"),
)


def help_all() -> str:
    """Every key of a training config, table by table."""
    parts: dict[str, list[Row]] = {"": [], "model": list(MODEL)}
    for row in [*keys(Config), *keys(Recipe, "tokenizer.")]:
        parts.setdefault(row[0].rpartition(".")[0], []).append(row)
    lines = aligned([row for part in parts.values() for row in part]).splitlines()
    text = ["Every setting of a config: a key of its TOML file, or a flag: --train.optim.lr 3e-4"]
    for part in parts.values():
        text += ["", *lines[: len(part)]]
        del lines[: len(part)]
    return "\n".join(text)


def keys(cls: Any, where: str = "") -> Iterator[Row]:
    """Every setting of a dataclass and of those in it, by dotted name; no [model], no [tokenizer]."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for name, *words in rows(cls):
        if dataclasses.is_dataclass(hints[name]):
            yield from keys(hints[name], f"{where}{name}.")
        elif (where, name) not in (("", "model"), ("", "tokenizer")):
            yield (f"{where}{name}", *(word.replace("`", "") for word in words))  # type: ignore[misc]


def sizes_of(config: Any) -> list[str]:
    """Layers, dim, heads and vocabulary of a model, the first that are named in it."""
    parts = [part for _, part in walk(to_dict(config))]

    def first(name: str) -> str:
        named = (part.get(name) for part in parts)
        return next((str(x) for x in named if x is not None and not isinstance(x, dict)), "")

    return [first(name) for name in ("layers", "dim", "heads", "vocab")]


# --- one setting --------------------------------------------------------------------------------


def meaning(cls: type, field: dataclasses.Field, hint: Any) -> str:
    for mark in getattr(hint, "__metadata__", ()):
        if text := getattr(mark, "help", None):
            return text
    return next((text for c in cls.__mro__ if (text := meanings(c).get(field.name))), "")


def kind(hint: Any, named: Named = lambda cls: "table") -> str:
    """A type in words; a dataclass as `named` has it."""
    every = alternatives(hint)
    if every != [hint]:
        return " or ".join(dict.fromkeys(kind(each, named) for each in every))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        limits = next((x for x in hint.__metadata__ if isinstance(x, Range)), None)
        text = kind(args[0], named)
        return f"{text}, {limits}" if limits and limits.low > float("-inf") else text
    if origin is typing.Literal:
        return ", ".join(map(str, args))
    if origin is tuple:
        return f"list: {kind(args[0], named)}"
    if origin is dict:
        return "table"
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return named(hint)
    return PLAIN.get(hint, getattr(hint, "__name__", str(hint)))


def default(field: dataclasses.Field) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "needed"
    if value is None:
        return "none"
    if dataclasses.is_dataclass(value) or value == {}:
        return "its defaults"
    return f"`{_written(to_dict(value))}`" if value != () else "none"


def rows(cls: Any, named: Named = lambda cls: "table") -> list[Row]:
    """Name, type, default and meaning of each setting, but for `kind`, which names the class."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return [
        (f.name, kind(hints[f.name], named), default(f), meaning(cls, f, hints[f.name]))
        for f in dataclasses.fields(cls)
        if f.name != "kind" or cls is Recipe
    ]
