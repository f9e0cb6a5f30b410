"""Rules for tensors: names on both sides, and the operation between them; each runs both ways. families/ has them in
tables. A rule whose place does not exist in this model (a bias or a head that it lacks) does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


def choices(name: str) -> list[str]:
    """a.{b,c} is a.b and a.c"""
    choice = re.search(r"\{([^{}]*,[^{}]*)\}", name)
    if choice is None:
        return [name]
    front = name[: choice.start()]
    back = name[choice.end() :]
    return [c for part in choice[1].split(",") for c in choices(front + part + back)]


@dataclass(frozen=True)
class Op:
    """Their tensors -> ours, given the sizes of ours, and ours -> theirs, given how many those are;
    the config of the model tells both what the tensors do not. `turned`: their matrices are (in, out). `whole`: theirs
    are whole numbers; `cut`: their rows are counted together, wherever they are cut."""

    load: Callable[[list[Tensor], list[torch.Size], Any], list[Tensor]]
    save: Callable[[list[Tensor], int, Any], list[Tensor]]
    turned: bool = False
    whole: bool = False
    cut: bool = False


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

    return in_turns(heads)


def in_turns(count: Callable[[Any], int]) -> Op:
    """Several of ours in one of theirs: a share of the rows of each, and so on, as many times as `count` says."""

    def load(theirs: list[Tensor], sizes: list[torch.Size], config: Any) -> list[Tensor]:
        h = count(config)
        rows = theirs[0].unflatten(0, (h, -1)).split([size[0] // h for size in sizes], 1)
        return [x.flatten(0, 1) for x in rows]

    def save(ours: list[Tensor], _: int, config: Any) -> list[Tensor]:
        rows = [x.unflatten(0, (count(config), -1)) for x in ours]
        return [torch.cat(rows, 1).flatten(0, 1)]

    return Op(load, save)


def halves_changed(kind: str) -> Op:
    """Rows of queries or keys whose heads turn the other way round: their first half is our second."""

    def change(tensors: list[Tensor], config: Any) -> list[Tensor]:
        attention = next(a for a in config.tower.each("attention") if a.kind == kind)
        half = attention.width(config.tower.dim) // 2
        return [x.unflatten(0, (-1, 2, half)).flip(1).flatten(0, 2) for x in tensors]

    return Op(
        lambda theirs, _, config: change(theirs, config),
        lambda ours, _, config: change(ours, config),
    )


# Conv1D of GPT-2, and the stacked experts of gpt-oss.
TRANSPOSED = transposed(SAME)
# The rows of several of ours in one of theirs.
JOINED = Op(
    lambda theirs, sizes, _: list(theirs[0].split([s[0] for s in sizes])),
    lambda ours, *_: [torch.cat(ours)],
)
# One of theirs for each expert.
STACKED = Op(lambda theirs, *_: [torch.stack(theirs)], lambda ours, *_: list(ours[0].unbind()))
# Numbers of experts.
WHOLE = Op(lambda theirs, *_: [theirs[0].float()], lambda ours, *_: [ours[0].long()], whole=True)
# Gates of all experts, and below each its up.
GATE_UP = Op(
    lambda theirs, *_: list(theirs[0].chunk(2, 1)),
    lambda ours, *_: [torch.cat(ours, 1)],
)
# Gates and ups of all experts by turns (gpt-oss).
BY_TURNS = Op(
    lambda theirs, *_: [theirs[0][:, ::2], theirs[0][:, 1::2]],
    lambda ours, *_: [torch.stack(ours, 2).flatten(1, 2)],
)
# Theirs has a leading 1.
ROW = Op(lambda theirs, *_: [theirs[0][0]], lambda ours, *_: [ours[0][None]])
# Ours has a leading 1.
OWN_ROW = Op(lambda theirs, *_: [theirs[0][None]], lambda ours, *_: [ours[0][0]])
# Theirs (1 1 m) each, ours (n m).
TOKENS = Op(
    lambda theirs, *_: [torch.cat([t[0] for t in theirs])],
    lambda ours, *_: [row[None, None] for row in ours[0]],
)
# A convolution of every channel by itself: theirs (c 1 width).
TAPS = Op(lambda theirs, *_: [theirs[0][:, 0]], lambda ours, *_: [ours[0][:, None]])


def _taps_apart(ours: list[Tensor], _: int, config: Any) -> list[Tensor]:
    delta = next(a for a in config.tower.each("attention") if a.kind == "delta")
    keys = delta.key_heads * delta.key_dim
    return [x[:, None] for x in ours[0].split([keys, keys, delta.heads * delta.value_dim])]


# One for q, k and v each, which transformers cuts into thirds whatever their sizes.
TAPS_APART = Op(lambda theirs, *_: [torch.cat(theirs)[:, 0]], _taps_apart, cut=True)
# A number for each head: theirs (1 1 h 1).
BY_HEAD = Op(
    lambda theirs, *_: [theirs[0].flatten()], lambda ours, *_: [ours[0][None, None, :, None]]
)


@dataclass(frozen=True)
class To:
    """Where tensors of theirs go: our name, or several apart by spaces, and the operation between.
    The rule holds where the model has our name, has `needs` and lacks `unless`, and `when` is true of its config."""

    ours: str
    op: Op = SAME
    needs: str = ""
    unless: str = ""
    when: Callable[[Any], bool] | None = None


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
        names = choices(key)
        places = choices(to.ours)
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


def steps(
    table: Mapping[str, To], shapes: dict[str, torch.Size], config: Any, inner: int = 1
) -> Iterator[Step]:
    """Every row for every layer, weight and bias that the model has. {i} runs over layers, {n} over those behind the
    tower's, {e} over experts, a last * over weight and bias; where their layers lie in groups of `inner`, {i} over
    groups and {j} inside one."""
    behind = getattr(getattr(config, "tower", None), "layers", 0)
    layers = sorted({int(p) for n in shapes for p in n.split(".")[:4] if p.isdigit()})
    for key, to in table.items():
        if to.when is not None and not to.when(config):
            continue
        # Layers that share a block have one set of weights: theirs are counted, ours named after the first.
        for number, layer in enumerate(layers if "{i}" in to.ours else [0]):
            i = str(layer)
            for end in ("weight", "bias") if to.ours.endswith("*") else ("",):
                at = {"{i}": str(number // inner), "{j}": str(number % inner), "*": end}
                at["{n}"] = str(behind + number)
                theirs = re.sub(r"\{[ijn]\}|\*", lambda m, at=at: at[m[0]], key).split()  # type: ignore[misc]
                ours = to.ours.replace("{i}", i).replace("*", end).split()
                needs, unless = (n.replace("{i}", i) for n in (to.needs, to.unless))
                if ours[0] not in shapes or (needs and needs not in shapes) or unless in shapes:
                    continue
                if "{e}" in theirs[0]:
                    theirs = [theirs[0].replace("{e}", str(e)) for e in range(shapes[ours[0]][0])]
                yield Step(theirs, ours, [shapes[n] for n in ours], to.op, config)
