"""Frozen dataclasses <-> plain dictionaries, strictly, and the one error type that users see.

A config is data: nested frozen dataclasses whose unions are told apart by `kind`. Nothing is ignored:
an unknown key names the nearest known one, a wrong type says what was expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class UsageError(ValueError):
    """Something the user asked for cannot be done; the text says what was asked, what is possible, what to type."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `did you mean 'heads'?`, or the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def to_dict(config: Any) -> Any:
    """A config as JSON-ready data; `from_dict` reads it back equal."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, (tuple, list)):
        return [to_dict(item) for item in config]
    return config


def from_dict(cls: type[T], data: dict[str, Any], path: str = "config") -> T:
    """Build the dataclass `cls` from plain data. Unknown keys, missing keys and wrong types are errors."""
    if not isinstance(data, dict):
        raise UsageError(f"{path} must be a table of settings, got {data!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise UsageError(
                f"{path}.{key} is not a setting of {cls.__name__}; {nearest(key, fields)}"
            )
    if "kind" in data and data["kind"] != fields["kind"].default:
        raise UsageError(f"{path}.kind is {data['kind']!r}, expected {fields['kind'].default!r}")
    missing = [
        name
        for name, f in fields.items()
        if name not in data
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UsageError(
            f"{path}.{missing[0]} is missing; {cls.__name__} needs {', '.join(missing)}"
        )
    hints = typing.get_type_hints(cls)
    return cls(**{k: _read(hints[k], v, f"{path}.{k}") for k, v in data.items()})


def _read(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _read_union(args, value, path)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_read(args[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            return value
        return from_dict(hint, value, path)  # type: ignore[arg-type]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    expected = origin or hint
    if expected is Any or (
        isinstance(value, expected) and not (hint is int and isinstance(value, bool))
    ):
        return value
    raise UsageError(f"{path} must be {getattr(hint, '__name__', hint)}, got {value!r}")


def _read_union(args: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in args:
        return None
    classes = {c.__dataclass_fields__["kind"].default: c for c in args if hasattr(c, "kind")}
    if dataclasses.is_dataclass(value) and isinstance(value, tuple(classes.values())):
        return value
    if isinstance(value, dict) and classes:
        kind = value.get("kind")
        if kind not in classes:
            raise UsageError(f"{path}.kind is {kind!r}; {nearest(str(kind), classes)}")
        return from_dict(classes[kind], value, path)
    rest = [a for a in args if a is not type(None) and a not in classes.values()]
    for hint in rest:
        try:
            return _read(hint, value, path)
        except UsageError:
            if hint is rest[-1]:
                raise
    raise UsageError(f"{path} must be one of {', '.join(classes)}, got {value!r}")


def change(config: T, path: str, value: Any) -> T:
    """A copy of `config` with the setting at the dotted `path` replaced: change(c, "tower.layers", 2)."""
    name, _, rest = path.partition(".")
    fields = {f.name for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    if name not in fields:
        raise UsageError(
            f"{type(config).__name__} has no setting {name!r}; {nearest(name, fields)}"
        )
    if rest:
        inner = getattr(config, name)
        if not dataclasses.is_dataclass(inner):
            raise UsageError(
                f"{name} is {inner!r}, which has no setting {rest!r}; set {name} itself"
            )
        value = change(inner, rest, value)
    else:
        hint = typing.get_type_hints(type(config))[name]
        value = _read(hint, value, f"{type(config).__name__}.{name}")
    return dataclasses.replace(config, **{name: value})  # type: ignore[type-var]
