"""The kinds of rule that hf_tables.py is made of. Each runs both ways: Hugging Face's words to ours, and back.

Config rules work on plain nested data (`to_dict` of a config); tensor rules name tensors on both sides and the
operation between them. A rule whose place does not exist in this model (a bias it lacks, a head it has not) does
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.errors import UsageError

Data = dict[str, Any]
REQUIRED: Any = object()
ABSENT: Any = object()


def get(data: Any, path: str) -> Any:
    """The value at a dotted path (a number picks from a list), or ABSENT."""
    for name in path.split("."):
        if isinstance(data, list) and name.isdigit():
            data = data[int(name)]
        elif isinstance(data, dict) and name in data:
            data = data[name]
        else:
            return ABSENT
    return data


def put(data: Any, path: str, value: Any) -> None:
    """Set the value at a dotted path, if there is such a place."""
    parents, _, last = path.rpartition(".")
    place = get(data, parents) if parents else data
    if isinstance(place, dict) and last in place:
        place[last] = value


def need(data: Any, path: str) -> Any:
    """The value at a dotted path of a config of ours that a rule cannot be written without."""
    value = get(data, path)
    if value is ABSENT:
        raise UsageError(f"the model has no {path}")
    return value


# --- config -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """One key of theirs, one place (or several) of ours. `default` stands in for a missing key, and for a null one
    unless `null` says otherwise; a function makes it from the other keys. `words` translates values; several of theirs
    may mean one of ours."""

    name: str
    path: str
    default: Any = REQUIRED
    words: dict[Any, Any] | None = None
    also: tuple[str, ...] = ()
    null: Any = ABSENT

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def value(self, theirs: Data) -> Any:
        value = theirs.get(self.name)
        if value is None:
            value = self.default if self.name not in theirs or self.null is ABSENT else self.null
            value = value(theirs) if callable(value) else value
            if value is REQUIRED:
                raise UsageError(
                    f"config.json: {self.name} is missing; a {theirs.get('model_type')} model needs it"
                )
        if self.words is None or value not in self.words:
            if self.words is not None and value is not None:
                known = ", ".join(map(str, self.words))
                raise UsageError(f"config.json: {self.name} is {value!r}; known: {known}")
            return value
        return self.words[value]

    def read(self, theirs: Data, ours: Data) -> None:
        for path in (self.path, *self.also):
            put(ours, path, self.value(theirs))

    def write(self, ours: Data, theirs: Data) -> None:
        value = get(ours, self.path)
        if value is ABSENT or (self.name in theirs and self.value(theirs) == value):
            return
        if self.words is not None:
            value = next((k for k, v in self.words.items() if v == value), value)
        theirs[self.name] = value


@dataclass(frozen=True)
class Fixed:
    """A key that may only have the values listed; the first is also what a missing key means."""

    name: str
    values: tuple[Any, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, theirs: Data, ours: Data) -> None:
        value = theirs.get(self.name)
        if value is not None and value not in self.values:
            known = " or ".join(map(repr, self.values))
            raise UsageError(f"config.json: {self.name} is {value!r}, Regard can only do {known}")

    def write(self, ours: Data, theirs: Data) -> None: ...


@dataclass(frozen=True)
class Inert:
    """Keys that decide nothing in a forward pass: kept as they are and written back."""

    names: tuple[str, ...]

    def read(self, theirs: Data, ours: Data) -> None: ...

    def write(self, ours: Data, theirs: Data) -> None: ...


@dataclass(frozen=True)
class Custom:
    """Keys that only make sense together: a pair of functions, each the inverse of the other."""

    names: tuple[str, ...]
    read: Callable[[Data, Data], None]
    write: Callable[[Data, Data], None]


ConfigRule = Key | Fixed | Inert | Custom


# --- tensors ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """Their tensors -> ours, and ours -> theirs, given how many there are on each side and their sizes."""

    load: Callable[[list[Tensor], list[torch.Size]], list[Tensor]]
    save: Callable[[list[Tensor], int], list[Tensor]]


SAME = Op(lambda theirs, _: theirs, lambda ours, _: ours)
TRANSPOSED = Op(
    lambda theirs, _: [theirs[0].t()], lambda ours, _: [ours[0].t()]
)  # Conv1D: (in, out)
JOINED = Op(  # rows of several of ours in one of theirs
    lambda theirs, sizes: list(theirs[0].split([s[0] for s in sizes])),
    lambda ours, _: [torch.cat(ours)],
)
JOINED_TRANSPOSED = Op(
    lambda theirs, sizes: list(theirs[0].t().split([s[0] for s in sizes])),
    lambda ours, _: [torch.cat(ours).t()],
)
STACKED = Op(  # one of theirs for each expert
    lambda theirs, _: [torch.stack(theirs)],
    lambda ours, _: list(ours[0].unbind()),
)
ROW = Op(
    lambda theirs, _: [theirs[0][0]], lambda ours, _: [ours[0][None]]
)  # theirs has a leading 1
TOKENS = Op(  # theirs (1 1 m) each, ours (n m)
    lambda theirs, _: [torch.cat([t[0] for t in theirs])],
    lambda ours, _: [row[None, None] for row in ours[0]],
)


@dataclass(frozen=True)
class Rule:
    """Names on both sides; `{i}` runs over layers, `{e}` over experts, a last `*` over weight and bias. The rule holds
    where the model has our name, has `needs` and lacks `unless`."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    op: Op = SAME
    needs: str = ""
    unless: str = ""

    def steps(self, shapes: dict[str, torch.Size]) -> Iterator[Step]:
        """The rule for every layer, weight and bias that the model has."""
        layers = (
            range(1 + max((_layer(n) for n in shapes), default=0)) if "{i}" in self.ours[0] else [0]
        )
        for i in layers:
            for end in ("weight", "bias") if self.ours[0].endswith("*") else ("",):
                ours = [n.replace("{i}", str(i)).replace("*", end) for n in self.ours]
                needs, unless = (n.replace("{i}", str(i)) for n in (self.needs, self.unless))
                if ours[0] not in shapes or (needs and needs not in shapes) or unless in shapes:
                    continue
                theirs = [n.replace("{i}", str(i)).replace("*", end) for n in self.theirs]
                if "{e}" in theirs[0]:
                    theirs = [theirs[0].replace("{e}", str(e)) for e in range(shapes[ours[0]][0])]
                yield Step(theirs, ours, [shapes[n] for n in ours], self.op)


def _layer(name: str) -> int:
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


@dataclass(frozen=True)
class Step:
    """One rule for one layer: these tensors of theirs are those of ours."""

    theirs: list[str]
    ours: list[str]
    shapes: list[torch.Size]
    op: Op

    def their_shapes(self) -> list[tuple[int, ...]]:
        blank = [torch.empty(s, device="meta") for s in self.shapes]
        return [tuple(t.shape) for t in self.op.save(blank, len(self.theirs))]


def rule(
    theirs: str | tuple[str, ...],
    ours: str | tuple[str, ...],
    op: Op = SAME,
    *,
    needs: str = "",
    unless: str = "",
) -> Rule:
    first, second = ((x,) if isinstance(x, str) else x for x in (theirs, ours))
    return Rule(first, second, op, needs, unless)


# --- a family -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Everything about one of Hugging Face's model types, as data."""

    name: str
    base: str  # what their tensor names begin with when a head sits on the body
    blank: Any  # a config of ours with this family's fixed choices; rules fill in the rest
    heads: dict[str, Any]  # their class name -> our head; None: the bare body
    config: tuple[ConfigRule, ...]
    tensors: tuple[Rule, ...]
    head_tensors: Mapping[str, tuple[Rule, ...]]  # by kind of head
    aliases: Mapping[str, str] = field(default_factory=dict)  # their other words for a key
    pooler: str = ""  # the tensor that shows that the bare body has a pooler
    twins: tuple[
        tuple[str, tuple[str, ...], str], ...
    ] = ()  # (tensor, what it repeats, our switch for that)
    apart: bool = False  # nothing tied means that each side has its own table, be it a copy
    derived: tuple[str, ...] = ()  # patterns of stored tensors that follow from the config
    carried: tuple[
        str, ...
    ] = ()  # patterns of tensors this model does not use, kept and written back
