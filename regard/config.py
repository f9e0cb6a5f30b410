"""Frozen dataclasses <-> plain dictionaries, strictly.

A config is data: nested frozen dataclasses whose unions are told apart by `kind`. Where a union is open its members
are the rows of a table (`Kinds`). Nothing is ignored: an unknown key names the nearest known one, a wrong type says
what was expected, a value that breaks a rule which its field declares (`Rule`) says what to give.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, TypeVar

from regard.errors import UsageError, check_choice, nearest

T = TypeVar("T")
# Evaluating them takes longer than all else in reading a config, of which a save reads many.
type_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


def divisors(n: int) -> list[int]:
    """Of a number beyond every size of a model, such as a mistyped one may be, only some: errors list them."""
    small = [i for i in range(1, min(math.isqrt(max(n, 0)), 2**16) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


# --- rules of fields ----------------------------------------------------------------------------------------------


class Rule:
    """What a field declares beside its type, in Annotated[type, rule, ...]. None keeps to every rule."""

    def check(self, name: str, part: Part) -> None:
        """Refuse the part of a config whose field `name` breaks this rule."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Part:
    """Values of a class's fields, before there is an object of them, and where they stand in a config."""

    cls: type
    values: Mapping[str, Any]
    path: str

    def used(self, name: str) -> bool:
        """Whether a setting is not what turns it off: None or, where it cannot be None, 0, false or nothing."""
        first, *inner = name.split(".")
        value = self.values[first]
        for each in inner:
            value = None if value is None else getattr(value, each)
        optional = inner or type(None) in alternatives(type_hints(self.cls)[first])
        return value is not None if optional else bool(value)


@dataclasses.dataclass(frozen=True)
class Range(Rule):
    """The finite numbers from `low` to `high`; `above` and `below` leave out that end itself, `whole` all fractions."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    whole: bool = False
    switch: bool = False  # true and false will do too

    def holds(self, value: Any) -> bool:
        if isinstance(value, bool) and self.switch:
            return True
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        low = value > self.low if self.above else value >= self.low
        high = value < self.high if self.below else value <= self.high
        return low and high and math.isfinite(value)

    def check(self, name: str, part: Part) -> None:
        value = part.values[name]
        each = value if isinstance(value, tuple) else (value,)
        if not all(self.holds(x) for x in each):
            finite = all(isinstance(x, (int, float)) and math.isfinite(x) for x in each)
            raise UsageError(f"{part.path}.{name} = {value!r}: give {self if finite else Range()}")

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        start = f"more than {self.low}" if self.above else f"{self.low}"
        if self.high == math.inf:
            return start if self.above else f"{start} or more"
        return f"{start} to {'less than ' if self.below else ''}{self.high}"


Count = Annotated[int, Range(1, whole=True)]
Whole = Annotated[int, Range(0, whole=True)]
Positive = Annotated[float, Range(0, above=True)]
Amount = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Fraction = Annotated[float, Range(0, 1, below=True)]
Seed = Annotated[int, Range(0, 2**63 - 1, whole=True)]
Real = Annotated[float, Range()]


@dataclasses.dataclass(frozen=True, eq=False)
class Choice(Rule):
    """One of these names. A table is open: what is put into it while a program runs is a choice too."""

    known: Collection[str]

    def check(self, name: str, part: Part) -> None:
        value = part.values[name]
        for each in value if isinstance(value, tuple) else (value,):
            check_choice(f"{part.path}.{name}", each, self.known)


@dataclasses.dataclass(frozen=True)
class Divides(Rule):
    """A number that divides that of the field `other`."""

    other: str

    def check(self, name: str, part: Part) -> None:
        value = part.values[name]
        whole = part.values[self.other]
        if whole is not None and whole % value:
            both = f"{part.path}.{name}={value} must divide {part.path}.{self.other}={whole}"
            raise UsageError(f"{both}; choose one of {divisors(whole)}")


@dataclasses.dataclass(frozen=True)
class AtMost(Rule):
    """A number that is no larger than that of the field `other`."""

    other: str

    def check(self, name: str, part: Part) -> None:
        value = part.values[name]
        most = part.values[self.other]
        if most is not None and value > most:
            both = f"{part.path}.{name}={value} is more than {part.path}.{self.other}={most}"
            raise UsageError(f"{both}; give at most {most}")


@dataclasses.dataclass(frozen=True)
class Needs(Rule):
    """A setting that is of no use without another, dotted where that is inside a part; `such` says what to give."""

    other: str
    such: str = ""

    def check(self, name: str, part: Part) -> None:
        if part.used(name) and not part.used(self.other):
            give = f"give it too{self.such and f', such as {self.such}'}, or leave {name} out"
            raise UsageError(f"{part.path}.{name} needs {part.path}.{self.other}; {give}")


@dataclasses.dataclass(frozen=True)
class Excludes(Rule):
    """A setting that cannot stand beside another, dotted where that is inside a part; `why` says what keeps it."""

    other: str
    why: str

    def check(self, name: str, part: Part) -> None:
        if part.used(name) and part.used(self.other):
            raise UsageError(f"{part.path}.{name}: {self.why}; give {name} without {self.other}")


@functools.cache
def rules(cls: type) -> list[tuple[str, Rule]]:
    """What the fields of a dataclass, or the items of their tuples, declare; first what looks at one field alone."""

    def declared(hint: Any) -> list[Rule]:
        inner = typing.get_args(hint)
        found = [x for x in getattr(hint, "__metadata__", ()) if isinstance(x, Rule)]
        found += [x for each in inner for x in declared(each)]
        if bool not in inner:
            return found
        return [dataclasses.replace(x, switch=True) if isinstance(x, Range) else x for x in found]

    every = [(name, rule) for name, hint in type_hints(cls).items() for rule in declared(hint)]
    return sorted(every, key=lambda each: not isinstance(each[1], (Range, Choice)))


@functools.cache
def ranges(cls: type) -> dict[str, Range]:
    """Of the fields that are numbers, by name."""
    return {name: rule for name, rule in rules(cls) if isinstance(rule, Range)}


def _check(part: Part) -> None:
    for name, rule in rules(part.cls):
        if part.values[name] is not None:
            rule.check(name, part)


def ranged(cls: type[T]) -> type[T]:
    """Under @dataclass: fields are held against their rules before anything else uses them."""
    rest = cls.__dict__.get("__post_init__")

    def __post_init__(self: Any) -> None:
        _check(Part(cls, vars(self), cls.__name__.lower()))
        if rest is not None:
            rest(self)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return cls


@typing.dataclass_transform(frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """A frozen dataclass whose fields are held against their rules."""
    return dataclasses.dataclass(frozen=True)(ranged(cls))


# --- plain data ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Kinds:
    """In `Annotated[Protocol, Kinds(TABLE)]`: whatever TABLE has, by its `kind`. A table is open: what is put into it
    while a program runs is read, checked, saved and listed like the rest."""

    table: Mapping[str, type]


def alternatives(hint: Any) -> list[Any]:
    """What a value of this type may be: the members of a union one by one, of an open table its rows."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [one for each in typing.get_args(hint) for one in alternatives(each)]
    marks = getattr(hint, "__metadata__", ())
    for mark in marks:
        if isinstance(mark, Kinds):
            return [*mark.table.values()]
    # A part with rules is what it is without them; a number's range is a piece of its type.
    part = marks and dataclasses.is_dataclass(hint.__origin__)
    return [hint.__origin__] if part else [hint]


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
    unknown = next((key for key in data if key not in fields), None)
    if unknown is not None:
        near = nearest(unknown, fields)
        raise UsageError(f"{path}.{unknown} is not a setting of {cls.__name__}; {near}")
    hints = type_hints(cls)  # type: ignore[arg-type]
    # A kind with rules of its own is a setting; else it is the name of the class.
    if "kind" in data and hints["kind"] is str and data["kind"] != fields["kind"].default:
        raise UsageError(f"{path}.kind is {data['kind']!r}, expected {fields['kind'].default!r}")
    missing = [name for name in _required(cls) if name not in data]
    if missing:
        needed = ", ".join(missing)
        raise UsageError(f"{path}.{missing[0]} is missing; {cls.__name__} needs {needed}")
    defaults = _defaults(cls)  # type: ignore[arg-type]
    given = {k: _kinded(v, defaults.get(k)) for k, v in data.items()}
    values = {k: _read(hints[k], v, f"{path}.{k}") for k, v in given.items()}
    _check(Part(cls, defaults | values, path))
    return cls(**values)


def _kinded(value: Any, default: Any) -> Any:
    """A table that does not say its kind is of the default one."""
    kind = getattr(default, "kind", None)
    return {"kind": kind, **value} if kind is not None and isinstance(value, dict) else value


def _required(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls) if f.name not in _defaults(cls)]


@functools.cache
def _defaults(cls: Any) -> dict[str, Any]:
    missing = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not missing}
    return made | {f.name: f.default for f in fields if f.default is not missing}


def _read(hint: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is Annotated and not any(isinstance(mark, Kinds) for mark in args[1:]):
        return _read(args[0], value, path)
    every = alternatives(hint)
    if every != [hint]:
        return _read_union(every, value, path)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_read(args[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        kind: Any = hint
        return value if isinstance(value, kind) else from_dict(kind, value, path)
    boolean = isinstance(value, bool)
    if hint is float and isinstance(value, int) and not boolean:
        return float(value)
    expected = origin or hint
    if expected is Any or (isinstance(value, expected) and not (hint is int and boolean)):
        return value
    raise UsageError(f"{path} must be {getattr(hint, '__name__', hint)}, got {value!r}")


def _read_union(every: list[Any], value: Any, path: str) -> Any:
    # TOML has no word for None.
    if value in (None, "none") and type(None) in every:
        return None
    classes = {c.__dataclass_fields__["kind"].default: c for c in every if hasattr(c, "kind")}
    if dataclasses.is_dataclass(value) and isinstance(value, tuple(classes.values())):
        return value
    if isinstance(value, dict) and classes:
        kind = value.get("kind")
        if kind not in classes:
            raise UsageError(f"{path}.kind is {kind!r}; {nearest(str(kind), classes)}")
        return from_dict(classes[kind], value, path)
    if isinstance(value, str) and value in classes:
        cls = classes[value]
        if not _required(cls):
            return cls()
        names = [f"{n} = ..." for n in _required(classes[value])]
        made = f"{cls.__name__}({', '.join(names).replace(' = ', '=')})"
        table = ", ".join([f"kind = {value!r}", *names])
        give = f"give {made}, in a TOML file {{{table}}}"
        raise UsageError(f"{path} is {value!r}, a kind without its settings; {give}")
    rest = [a for a in every if a is not type(None) and a not in classes.values()]
    for hint in rest:
        try:
            return _read(hint, value, path)
        except UsageError:
            if hint is rest[-1]:
                raise
    raise UsageError(f"{path} must be one of {', '.join(classes)}, got {value!r}")


# --- changing settings by name ------------------------------------------------------------------------------------

# Words that mean the same in every kind of part. Of any other word that several kinds have (`bias`
# of attention, of a feed-forward, of a head), a plain name would say too little.
EVERYWHERE = frozenset(
    """activation dim dropout eps ffn_dim head_dim heads kv_heads layers max_len norm rope rope_dim
    value_dim vocab window""".split()  # noqa: SIM905
)


def customize(config: T, changes: dict[str, Any]) -> T:
    """`config` with settings changed, all at once: they need only fit together at the end.

    A dotted name is one place, or one per layer where layers differ; it may leave out where it begins, if that is
    clear: attention.kv_heads is tower.attention.kv_heads, or that of both towers. A plain one is changed in every place
    that has it, but where that is None: a part that this family lacks. Dotted names are stronger, in whichever order
    they come. Widths that are not given follow `dim` in the proportion that they had."""
    data = to_dict(config)
    before = to_dict(config)
    changes = {place: x for name, x in changes.items() for place in _from_the_top(data, name)}
    for name, value in sorted(changes.items(), key=lambda change: "." in change[0]):
        places = _dotted(data, name) if "." in name else _places(data, name)
        if not places:
            known = {key for _, part in walk(data) for key in part} - {"kind"}
            raise UsageError(f"no setting {name!r} to change; {nearest(name, known)}")
        for place, key in places:
            place[key] = to_dict(value)
            if key == "layers":
                _fit_layers(place)
    # from_dict says what is not a size.
    with contextlib.suppress(ArithmeticError, TypeError):
        _follow_dim(before, data, changes)
    return from_dict(type(config), data)


def _from_the_top(data: dict[str, Any], name: str) -> list[str]:
    """A dotted name with what stands before it: all places nearest to the top that its first part has."""
    first, dot, _ = name.partition(".")
    places = dict(having(data, first)) if dot else {}
    depth = min((where.count(".") for where in places), default=0)
    top = [where for where in places if where.count(".") == depth]
    used = [where for where in top if places[where][first] is not None] or top
    return [f"{where}{name}" for where in used] or [name]


def _dotted(data: Any, name: str) -> list[tuple[dict[str, Any], str]]:
    """What a dotted name means; of settings listed layer by layer, the layers that have it."""
    *path, key = name.split(".")
    level = [data]
    for i, part in enumerate([*path, key]):
        where = ".".join(path[:i])
        tables = [each for each in level if isinstance(each, dict)]
        if not tables:
            what = f"{where} is {level[0]!r}, which has no setting {part!r}"
            raise UsageError(f"{what}; set {where} itself")
        have = [each for each in tables if part in each]
        if not have or part == "kind":
            of = f" of {where}" if i else ""
            known = set().union(*tables) - {"kind"}
            if not i:
                # What has settings of its own, wherever it stands.
                every = ((key, x) for _, table in walk(data) for key, x in table.items())
                known = {key for key, x in every if any(isinstance(y, dict) for y in _listed(x))}
            raise UsageError(f"no setting {part!r}{of}; {nearest(part, known)}")
        level = [item for each in have for item in _listed(each[part])]
    return [(each, key) for each in have]


def _places(data: dict[str, Any], key: str) -> list[tuple[dict[str, Any], str]]:
    """Where a plain name is changed: all places in use, if one word can mean them all."""
    places = [] if key == "kind" else [part for _, part in having(data, key)]
    used = [part for part in places if part[key] is not None] or places
    if key not in EVERYWHERE and len({part.get("kind") for part in used}) > 1:
        near = {path + n for path, part in walk(data) for n in part if f"_{n}".endswith(f"_{key}")}
        raise UsageError(f"{key!r} is several settings; say which: {', '.join(sorted(near))}")
    return [(part, key) for part in used]


def having(data: dict[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    """The parts that have a setting, each by its dotted path; what is inside such a setting is not looked at."""
    return [(path, x) for path, x in walk(data) if key in x and key not in path.split(".")]


def walk(data: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of plain settings, each by its dotted path."""
    yield path, data
    for name, value in data.items():
        for item in _listed(value):
            if isinstance(item, dict):
                yield from walk(item, f"{path}{name}.")


def _fit_layers(tower: dict[str, Any]) -> None:
    """Settings listed layer by layer follow a new number of layers: cut, or the last one repeated. Layers that are all
    alike then are not a list."""
    for key in ("attention", "ffn", "order", "blocks"):
        each = tower.get(key)
        if isinstance(each, list):
            each = (each + each[-1:] * tower["layers"])[: tower["layers"]]
            alike = key != "blocks" and all(one == each[0] for one in each)
            tower[key] = each[0] if alike else each


def _follow_dim(
    old: dict[str, Any], new: dict[str, Any], changes: Any, path: str = "", ratio: float = 1
) -> None:
    """Widths inside a tower of another `dim`: of feed-forwards in multiples of 8; of heads, where
    they have one of their own, so that all heads together keep their share of the stream."""
    ratio = new["dim"] / old["dim"] if "dim" in new else ratio
    for name in [n for n in new if n in old and n not in changes and f"{path}{n}" not in changes]:
        if name == "ffn_dim" and ratio != 1:
            new[name] = max(8, 8 * math.ceil(old[name] * ratio / 8))
        elif name in ("head_dim", "value_dim", "key_dim") and new[name] and ratio != 1:
            heads = next(n for n in ("heads", "value_heads", "key_heads") if new.get(n))
            new[name] = max(2, 2 * round(old[name] * old[heads] * ratio / new[heads] / 2))
        for one, other in zip(_listed(old[name]), _listed(new[name]), strict=False):
            if isinstance(one, dict) and isinstance(other, dict):
                _follow_dim(one, other, changes, f"{path}{name}.", ratio)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
