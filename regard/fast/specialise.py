"""One model, its parts replaced by fast ones: a function and a table for each target.

    fast = prepare(model, "int8")      target cpu: packed products, C code where the cache lies (cpu/)
    invariant(model)                   target invariant: sums of a fixed order (invariant.py)
    joined(model), checkpointed(model) target train (train.py)
    watch(model, watcher)              every step shown to a watcher (watch.py): no faster, for parity
    print(fast.explain())              which parts are fast, which are not, and why

A fast part is another module with the same call. It overrides one step of the plain one (`project_qkv`,
`core_attention`, `project_out`, `project_up`, ...), never its forward, and decides by what it is given, never by a
model's name. One that may stand in a plain model names the class that it computes the `same_as`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from torch import nn

from regard.attention.sparse import WideLinear
from regard.kernels.packed import PackedLinear
from regard.layers import Add, RMSNorm

P = TypeVar("P", bound=nn.Module)
# A row of a table gives the fast part, or why there is none.
Row = Callable[[Any, Any], nn.Module | str]


def share(kind: type[P], plain: nn.Module, **parts: nn.Module | None) -> P:
    """A `kind` with everything that `plain` holds, the same weights among it, but for `parts`."""
    new = kind.__new__(kind)
    # Where `plain` has no such part it has an attribute None, which would hide the new one.
    new.__dict__ = {name: x for name, x in plain.__dict__.items() if name not in parts}
    new._parameters, new._buffers = dict(plain._parameters), dict(plain._buffers)
    new._modules = dict(plain._modules) | parts
    return new


def direct(kind: type[P]) -> type[P]:
    """`kind` without torch's hooks: a call is `forward` and nothing else, which a small model feels."""
    return _direct(kind)  # type: ignore[arg-type]


@functools.cache
def _direct(kind: type[nn.Module]) -> Any:
    return type(kind.__name__, (kind,), {"__call__": kind.forward, "same_as": kind})


def mixed(part: type[P], kind: type[nn.Module]) -> type[P]:
    """`kind` with the steps of `part`, a class of the same base, before its own."""
    return _mixed((part, kind))


@functools.cache
def _mixed(bases: tuple[type[nn.Module], ...]) -> Any:
    return type(bases[-1].__name__, bases, {"same_as": bases[-1]})


T = TypeVar("T")


def row_of(table: Mapping[type, T], kind: type) -> T | None:
    """The row for a part of this kind: its own, or that of the class that it computes the `same_as`. A class that only
    inherits from one of ours, as a stranger's may, computes something else: what is fast there would be wrong here."""
    while kind not in table:
        if "same_as" not in vars(kind):
            return None
        kind = vars(kind)["same_as"]
    return table[kind]


# What fast parts know the formula of, in a plain part that holds them.
HELD = (nn.Linear, PackedLinear, WideLinear, nn.LayerNorm, RMSNorm, nn.Dropout, Add)


def unlike(part: nn.Module, *kinds: type[nn.Module]) -> str:
    """Why no fast part can stand for this one, whose class has one, or nothing: it holds something of a class that is
    neither in HELD nor among `kinds`, which may do something else with its weights; or it says so (`special`)."""
    if why := getattr(part, "special", ""):
        return why
    others = [each for each in part.children() if type(each) not in (*HELD, *kinds)]
    return f"it has a {type(others[0]).__name__}" if others else ""


class Specialise:
    """Makes the parts of a model anew, each by its row in the table; what has no row is copied, its weights shared."""

    table: ClassVar[Mapping[type, Row]] = {}

    def __init__(self) -> None:
        # How often each plain part was given which fast one, or why not.
        self.rows: Counter[tuple[str, str]] = Counter()
        # A part that stands in several places (layers that share a block) stays one.
        self.made: dict[int, nn.Module] = {}

    def make(self, module: nn.Module | None) -> nn.Module | None:
        if module is None:
            return None
        if id(module) not in self.made:
            self.made[id(module)] = self.new(module)
        return self.made[id(module)]

    def new(self, module: nn.Module) -> nn.Module:
        """The fast part of its row, or a copy, whether or not one was made before (`make` remembers). What became of it
        is noted in `rows`."""
        row = self.row(type(module))
        if row is None:
            return self.copy(module)
        fast = row(self, module)
        plain = type(module).__name__
        if isinstance(fast, str):
            self.rows[plain, f"plain: {fast}"] += 1
            return self.copy(module)
        self.rows[plain, type(fast).__name__ + getattr(fast, "note", "")] += 1
        return fast

    def row(self, kind: type) -> Row | None:
        return row_of(self.table, kind)

    def copy(self, module: P, /, **parts: nn.Module | None) -> P:
        """`module` with `parts` instead of its own; the rest is made."""
        return self.copy_as(type(module), module, **parts)

    def copy_as(self, kind: type[P], module: nn.Module, /, **parts: nn.Module | None) -> P:
        """The same as a `kind`."""
        children = {n: self.make(m) for n, m in module._modules.items() if n not in parts}
        return share(self.kind(kind), module, **children, **parts)

    def kind(self, kind: type[P]) -> type[P]:
        """The class that a part of this class is made as."""
        return kind


# A row of the table of `replace`: another form of a part, given what holds it, or None.
Replacement = Callable[[Any, nn.Module], nn.Module | None]


def replace(model: nn.Module, table: Mapping[type, Replacement]) -> int:
    """In place, from the inside out: every part for which its row (of the part, and what holds it) gives another form.
    Weights and their names stay. How many there were."""
    fast: dict[int, nn.Module | None] = {}

    def walk(parent: nn.Module) -> None:
        for name, child in parent._modules.items():
            if child is None:
                continue
            if id(child) not in fast:
                walk(child)
                row = row_of(table, type(child))
                fast[id(child)] = None if row is None else row(child, parent)
            if fast[id(child)] is not None:
                parent._modules[name] = fast[id(child)]

    walk(model)
    return sum(part is not None for part in fast.values())
