"""What the tables of families/ are made of. Every rule runs both ways: Hugging Face's words to ours, and back.

Config rules work on plain nested data (`to_dict` of a config); tensor rules name tensors on both sides and the
operation between them. A rule whose place does not exist in this model (a bias or a head that it lacks) does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.errors import UsageError
from regard.models.start import Start

Data = dict[str, Any]
REQUIRED: Any = object()
ABSENT: Any = object()


def wrong(text: str) -> UsageError:
    return UsageError(f"config.json: {text}")


def get(data: Any, path: str) -> Any:
    """The value at a dotted path, or ABSENT. A number picks from a list; a name asks the first item that has it."""
    name, _, rest = path.partition(".")
    if isinstance(data, list) and name.isdigit():
        value = data[int(name)]
    elif isinstance(data, list):
        values = (get(item, path) for item in data)
        return next((value for value in values if value is not ABSENT), ABSENT)
    elif isinstance(data, dict) and name in data:
        value = data[name]
    else:
        return ABSENT
    return get(value, rest) if rest else value


def put(data: Any, path: str, value: Any) -> None:
    """Set the value at a dotted path, if there is such a place; in every item of a list that no number picks from."""
    name, _, rest = path.partition(".")
    if isinstance(data, list):
        for item in [data[int(name)]] if name.isdigit() else data:
            put(item, rest if name.isdigit() else path, value)
    elif isinstance(data, dict) and name in data:
        if rest:
            put(data[name], rest, value)
        else:
            data[name] = value


def need(data: Any, path: str) -> Any:
    """The value at a dotted path of a config of ours that a rule cannot be written without."""
    value = get(data, path)
    if value is ABSENT:
        raise UsageError(f"the model has no {path}")
    return value


def choices(name: str) -> list[str]:
    """a.{b,c} is a.b and a.c"""
    choice = re.search(r"\{([^{}]*,[^{}]*)\}", name)
    if choice is None:
        return [name]
    return [c for part in choice[1].split(",") for c in choices(name.replace(choice[0], part, 1))]


# --- config -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """A key of theirs that fills one place of ours, or several (`places`, apart by spaces, or as {a,b}). `default`
    stands in for a missing key, and for a null one unless `null` says otherwise; a function makes it from the other
    keys. `words` translates values, several of theirs may mean one of ours; or it is a function and its inverse."""

    places: str
    default: Any = REQUIRED
    words: Mapping[Any, Any] | tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None
    null: Any = ABSENT

    def _each(self) -> list[str]:
        return [place for places in self.places.split() for place in choices(places)]

    def value(self, name: str, theirs: Data) -> Any:
        value = theirs.get(name)
        if value is None:
            value = self.default if name not in theirs or self.null is ABSENT else self.null
            value = value(theirs) if callable(value) else value
            if value is REQUIRED:
                raise wrong(f"{name} is missing; a {theirs.get('model_type')} model needs it")
        if self.words is None or value is None:
            return value
        if isinstance(self.words, tuple):
            return self.words[0](value)
        if value not in self.words:
            known = ", ".join(map(str, self.words))
            raise wrong(f"{name} is {value!r}; known: {known}")
        return self.words[value]

    def read(self, name: str, theirs: Data, ours: Data) -> None:
        for place in self._each():
            put(ours, place, self.value(name, theirs))

    def write(self, name: str, ours: Data, theirs: Data) -> None:
        values = (get(ours, place) for place in self._each())
        value = next((v for v in values if v is not ABSENT), ABSENT)
        if value is ABSENT or (name in theirs and self.value(name, theirs) == value):
            return
        if isinstance(self.words, tuple):
            value = None if value is None else self.words[1](value)
        elif self.words is not None:
            value = next((k for k, v in self.words.items() if v == value), value)
        theirs[name] = value


@dataclass(frozen=True)
class Fixed:
    """A key that may only have this value, which is also what a missing key means."""

    only: Any

    def read(self, name: str, theirs: Data, ours: Data) -> None:
        value = theirs.get(name)
        if value is not None and value != self.only:
            raise wrong(f"{name} is {value!r}, Regard can only do {self.only!r}")

    def write(self, name: str, ours: Data, theirs: Data) -> None: ...


@dataclass(frozen=True)
class Group:
    """Keys that only make sense together: a pair of functions, each the inverse of the other. A `last` one is read
    after all other rules, and written before them: what it does to layers they need not know."""

    names: tuple[str, ...]
    reader: Callable[[Data, Data], None]
    writer: Callable[[Data, Data], None]
    last: bool = False

    def read(self, name: str, theirs: Data, ours: Data) -> None:
        self.reader(theirs, ours)

    def write(self, name: str, ours: Data, theirs: Data) -> None:
        self.writer(ours, theirs)


def fixed(**only: Any) -> dict[str, ConfigRule]:
    """A `Fixed` for each key."""
    return {name: Fixed(value) for name, value in only.items()}


ConfigRule = Key | Fixed | Group
Keys = dict[str, ConfigRule]


# --- tensors ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """Their tensors -> ours, given the sizes of ours, and ours -> theirs, given how many those are;
    the config of the model tells both what the tensors do not. `turned`: their matrices are (in, out)."""

    load: Callable[[list[Tensor], list[torch.Size], Any], list[Tensor]]
    save: Callable[[list[Tensor], int, Any], list[Tensor]]
    turned: bool = False


SAME = Op(lambda theirs, *_: theirs, lambda ours, *_: ours)


def transposed(op: Op) -> Op:
    """The same, where their matrices are (in, out)."""

    def turned(tensors: list[Tensor]) -> list[Tensor]:
        return [x.mT if x.dim() > 1 else x for x in tensors]

    return Op(
        lambda theirs, *more: op.load(turned(theirs), *more),
        lambda ours, *more: turned(op.save(ours, *more)),
        turned=True,
    )


def by_head(kind: str, field: str) -> Op:
    """Several of ours in one of theirs, the rows of each head together; `field` of the attention of this kind tells how
    many heads."""

    def heads(config: Any) -> int:
        return next(getattr(a, field) for a in config.tower.each("attention") if a.kind == kind)

    def load(theirs: list[Tensor], sizes: list[torch.Size], config: Any) -> list[Tensor]:
        h = heads(config)
        rows = theirs[0].unflatten(0, (h, -1)).split([size[0] // h for size in sizes], 1)
        return [x.flatten(0, 1) for x in rows]

    def save(ours: list[Tensor], _: int, config: Any) -> list[Tensor]:
        rows = [x.unflatten(0, (heads(config), -1)) for x in ours]
        return [torch.cat(rows, 1).flatten(0, 1)]

    return Op(load, save)


# Conv1D of GPT-2, and the stacked experts of gpt-oss.
TRANSPOSED = transposed(SAME)
# The rows of several of ours in one of theirs.
JOINED = Op(
    lambda theirs, sizes, _: list(theirs[0].split([s[0] for s in sizes])),
    lambda ours, *_: [torch.cat(ours)],
)
# One of theirs for each expert.
STACKED = Op(lambda theirs, *_: [torch.stack(theirs)], lambda ours, *_: list(ours[0].unbind()))
# Gates and ups of all experts by turns (gpt-oss).
BY_TURNS = Op(
    lambda theirs, *_: [theirs[0][:, ::2], theirs[0][:, 1::2]],
    lambda ours, *_: [torch.stack(ours, 2).flatten(1, 2)],
)
# Theirs has a leading 1.
ROW = Op(lambda theirs, *_: [theirs[0][0]], lambda ours, *_: [ours[0][None]])
# Theirs (1 1 m) each, ours (n m).
TOKENS = Op(
    lambda theirs, *_: [torch.cat([t[0] for t in theirs])],
    lambda ours, *_: [row[None, None] for row in ours[0]],
)
# A convolution of every channel by itself: theirs (c 1 width).
TAPS = Op(lambda theirs, *_: [theirs[0][:, 0]], lambda ours, *_: [ours[0][:, None]])


@dataclass(frozen=True)
class To:
    """Where tensors of theirs go: our name, or several apart by spaces, and the operation between.
    The rule holds where the model has our name, has `needs` and lacks `unless`."""

    ours: str
    op: Op = SAME
    needs: str = ""
    unless: str = ""


Weights = Mapping[str, Any]


def under(theirs: str, ours: str, rows: Weights) -> dict[str, To]:
    """The rows with what both sides' names begin with."""

    def begin(prefix: str, names: str) -> str:
        return " ".join(prefix + name for name in names.split())

    out = {}
    for key, row in rows.items():
        to = To(row) if isinstance(row, str) else row
        names = {n: begin(ours, getattr(to, n)) for n in ("ours", "needs", "unless")}
        out[begin(theirs, key)] = replace(to, **names)
    return out


def written_out(table: Weights) -> dict[str, To]:
    """A table with {a,b} written out: on both sides, one row for each; on ours alone, several of ours in one of theirs.
    A table inside it is of a layer: ours begin with the tower's blocks."""
    out: dict[str, To] = {}
    for key, row in table.items():
        if isinstance(row, Mapping):
            out |= written_out(under(key, "tower.blocks.{i}.", row))
            continue
        to = To(row) if isinstance(row, str) else row
        names, places = choices(key), choices(to.ours)
        places = [" ".join(places)] if len(names) == 1 else places
        out |= {n: replace(to, ours=place) for n, place in zip(names, places, strict=True)}
    return out


@dataclass(frozen=True)
class Step:
    """One rule for one layer: these tensors of theirs are those of ours."""

    theirs: list[str]
    ours: list[str]
    shapes: list[torch.Size]
    op: Op = SAME
    config: Any = None

    def load(self, theirs: list[Tensor]) -> list[Tensor]:
        return self.op.load(theirs, self.shapes, self.config)

    def save(self, ours: list[Tensor]) -> list[Tensor]:
        return self.op.save(ours, len(self.theirs), self.config)

    def their_shapes(self) -> list[tuple[int, ...]]:
        return [
            tuple(t.shape) for t in self.save([torch.empty(s, device="meta") for s in self.shapes])
        ]


def steps(table: Mapping[str, To], shapes: dict[str, torch.Size], config: Any) -> Iterator[Step]:
    """Every row for every layer, weight and bias that the model has. {i} runs over layers, {e} over
    experts, a last * over weight and bias."""
    layers = sorted({int(p) for n in shapes for p in n.split(".")[:3] if p.isdigit()})
    for key, to in table.items():
        # Layers that share a block have one set of weights: theirs are counted, ours named after the first.
        for number, layer in enumerate(layers if "{i}" in to.ours else [0]):
            i = str(layer)
            for end in ("weight", "bias") if to.ours.endswith("*") else ("",):
                theirs = key.replace("{i}", str(number)).replace("*", end).split()
                ours = to.ours.replace("{i}", i).replace("*", end).split()
                needs, unless = (n.replace("{i}", i) for n in (to.needs, to.unless))
                if ours[0] not in shapes or (needs and needs not in shapes) or unless in shapes:
                    continue
                if "{e}" in theirs[0]:
                    theirs = [theirs[0].replace("{e}", str(e)) for e in range(shapes[ours[0]][0])]
                yield Step(theirs, ours, [shapes[n] for n in ours], to.op, config)


# A tensor, what it repeats (the first of these that is stored), our switch for that.
Twin = tuple[str, tuple[str, ...], str]

# --- a family -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Everything about one of Hugging Face's model types, as data. families/__init__.py tells how to write one."""

    name: str
    # What their tensor names begin with when a head sits on the body.
    base: str
    # A config of ours with this family's fixed choices; rules fill in the rest.
    blank: Any
    # Their class -> our head; None: the bare body. The first is what a folder without
    # `architectures` means.
    heads: Mapping[str, Any]
    # Their keys -> rules (a group under the first of its names), and the keys that decide nothing.
    config: Keys
    # Their names -> ours (`To` where more is to be said), as `written_out` and `steps` read them.
    tensors: Weights
    # By the kind of head.
    head_tensors: Mapping[str, Weights]
    inert: str = ""
    # Their other words for a key.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # How new weights are drawn.
    start: Start = Start()
    # Known models, by name: their keys, where these differ from what a missing key means. A dotted
    # key is a place of ours that none of theirs decides.
    presets: Mapping[str, Data] = field(default_factory=dict)
    # The tensor that shows that the bare body has a pooler.
    pooler: str = ""
    twins: tuple[Twin, ...] = ()
    # Nothing tied means that each side has its own table, be it a copy.
    apart: bool = False
    # Patterns of stored tensors that follow from the config, and of those kept for other programs
    # and written back.
    derived: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    # Parts of names that transformers' modules have now, where weights are still stored by the old.
    modules: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def rows(self) -> dict[str, To]:
        return written_out(self.tensors)

    @cached_property
    def head_rows(self) -> dict[str, dict[str, To]]:
        return {kind: written_out(table) for kind, table in self.head_tensors.items()}

    @cached_property
    def rules(self) -> list[tuple[str, ConfigRule]]:
        """In the order of reading."""
        return sorted(self.config.items(), key=lambda item: getattr(item[1], "last", False))

    @cached_property
    def keys(self) -> frozenset[str]:
        """All that the family has a word for."""
        names = (n for name, r in self.config.items() for n in getattr(r, "names", (name,)))
        return frozenset([*names, *self.inert.split()])
