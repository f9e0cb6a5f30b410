"""What each head of attention does, as numbers: how far it reads, how sharply, and which of the
patterns that heads are known for it shows. The formulas are here alone.

a (t s) are the weights of a head, row i reads column j; x_i and y_j are the names of their tokens.
p is a with rows that sum to 1, and a row that reads nothing does not count.

    distance   mean_i sum_j p_ij |i - j|                    in tokens; of a picture in patches
    entropy    mean_i -sum_j p_ij log p_ij                  0: one token; log n: n tokens alike
    previous   mean_i a_i,i-1                               the token before
    same       mean_i sum_j a_ij,  x_i = y_j                the same token in another place
    first      mean_i a_i,0                                 the first token
    induction  mean_i sum_j a_ij,  x_i = x_j-1, j < i       what came after the same token before
    diagonal   corr(i, j) under p                           1: the source in order; -1: backwards

A mean is of the rows that have such a column, so that a head that does nothing else has 1; it is
NaN where no row has one. Cross-attention alone has a diagonal, and neither distance nor previous
nor induction; its x_i is the token that is written. What a sink takes is missing in a; where
weights are a sum and not a mean, a is p. Distances in a picture are those of Dosovitskiy et al.
2021 (arXiv:2010.11929, figure 7), induction is the pattern of Olsson et al. 2022
(arXiv:2209.11895)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import UsageError, nearest
from regard.see.format import aligned


@dataclass(frozen=True)
class Pair:
    """The tokens of a map: what all heads of a layer read. `crossed`: rows and columns are of
    different texts. `places` (s 2): where patches lie in their picture, NaN for other tokens."""

    rows: Sequence[str]
    columns: Sequence[str]
    device: torch.device = torch.device("cpu")
    crossed: bool = False
    places: Tensor | None = None

    @cached_property
    def same(self) -> Tensor:
        """1 where the names are the same, but for a token itself; (t s)."""
        numbers: dict[str, int] = {}
        rows, columns = (
            torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])
            for names in (self.rows, self.columns)
        )
        same = (rows[:, None] == columns).float().to(self.device)
        return same if self.crossed else same.fill_diagonal_(0.0)

    @cached_property
    def same_before(self) -> Tensor:
        return self.same.tril()

    @cached_property
    def after_same(self) -> Tensor:
        """1 where the token before is one of `same_before`, and the row itself comes later."""
        return F.pad(self.same_before[:, :-1], (1, 0)).tril(-1)

    @cached_property
    def apart(self) -> Tensor:
        """How far rows are from columns, (t s); NaN where one has no place."""
        places = self.places
        if places is None:
            places = torch.arange(float(len(self.rows)), device=self.device)[:, None]
        return torch.stack([(places - row).norm(dim=-1) for row in places])


@dataclass(frozen=True)
class Read:
    """The weights of a head (t s) on its tokens."""

    a: Tensor
    tokens: Pair

    @cached_property
    def total(self) -> Tensor:
        """The sum of each row, (t)."""
        return self.a.sum(-1)

    @cached_property
    def p(self) -> Tensor:
        """Of the rows that read something."""
        return (self.a / self.total[:, None])[self.total > 0]

    def on(self, wanted: Tensor) -> float:
        """The mean weight on the wanted columns (t s), of the rows that have one."""
        has = wanted.any(-1)
        return share(_sum(self.a, wanted)[has], self.total[has])


def share(weight: Tensor, total: Tensor) -> float:
    """The mean of one weight per row, where rows sum to `total`."""
    return float((weight / total.clamp(min=1))[total > 0].double().mean())


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """sum_j a_ij b_ij, without a third map."""
    return torch.einsum("ts,ts->t", a, b.to(a))


@dataclass(frozen=True)
class Measure:
    """A column of the table: its formula, what it says in a few words, and whether the largest
    values tell most."""

    of: Callable[[Read], float]
    says: str
    largest: bool = True


def distance(read: Read) -> float:
    if read.tokens.crossed:
        return math.nan
    apart = read.tokens.apart
    placed = read.total if read.tokens.places is None else _sum(read.a, ~apart.isnan())
    far = _sum(read.a, apart.nan_to_num(0.0)) / placed
    return float(far[placed > 0].double().mean())


def entropy(read: Read) -> float:
    return float(-torch.special.xlogy(read.p, read.p).sum(-1).double().mean())


def previous(read: Read) -> float:
    return math.nan if read.tokens.crossed else share(read.a.diagonal(-1), read.total[1:])


def same(read: Read) -> float:
    # Where nothing is read ahead, a later token could not be read.
    ahead = read.tokens.crossed or bool(read.a[0, 1:].any() or read.a.diagonal(1).any())
    return read.on(read.tokens.same if ahead else read.tokens.same_before)


def first(read: Read) -> float:
    # The first row of a text has nothing before it.
    start = 0 if read.tokens.crossed else 1
    return share(read.a[start:, 0], read.total[start:])


def induction(read: Read) -> float:
    return math.nan if read.tokens.crossed else read.on(read.tokens.after_same)


def diagonal(read: Read) -> float:
    if not read.tokens.crossed or read.tokens.places is not None or len(read.p) < 2:
        return math.nan
    p = read.p.double() / len(read.p)
    i, j = (torch.arange(n).to(p) for n in read.a.shape)
    i = i[read.total > 0]
    i, j = i - i.mean(), j - p.sum(0) @ j
    spread = i.square().mean() * (p.sum(0) @ j.square())
    # Where every row reads one place, it is along nothing.
    return float(i @ p @ j / spread.sqrt()) if spread > 1e-12 else 0.0


# In the order of the table; a row more is a column more.
MEASURES = {
    "distance": Measure(distance, "how far away the read tokens are, on average", False),
    "entropy": Measure(entropy, "0 for one token, log n for n tokens alike", False),
    "previous": Measure(previous, "weight on the token before"),
    "same": Measure(same, "weight on the same token elsewhere"),
    "first": Measure(first, "weight on the first token"),
    "induction": Measure(induction, "weight on what came after the same token before"),
    "diagonal": Measure(diagonal, "1 where the source is read in order, -1 backwards"),
}


@dataclass(frozen=True)
class Head:
    """A row of the table. `view`: a kind of attention, as views are named."""

    view: str
    layer: int
    head: int
    measures: dict[str, float]


def measured(read: Read) -> dict[str, float]:
    """Every measure of a head; NaN where it does not apply."""
    return {name: measure.of(read) for name, measure in MEASURES.items()}


def checked_sort(column: str) -> str:
    if column not in ("layer", *MEASURES):
        raise UsageError(f"there is no column {column!r}; {nearest(column, ('layer', *MEASURES))}")
    return column


def ranked(heads: Sequence[Head], sort: str = "entropy") -> list[Head]:
    """The heads by a measure, those that tell most first; by "layer" in the model's own order."""
    if checked_sort(sort) == "layer":
        return list(heads)
    sign = -1 if MEASURES[sort].largest else 1

    def place(head: Head) -> tuple[bool, float]:
        value = head.measures[sort]
        return math.isnan(value), sign * value

    return sorted(heads, key=place)


def as_text(heads: Sequence[Head]) -> str:
    """The table for a terminal, without measures that apply to none of these heads."""
    views = len({head.view for head in heads}) > 1
    names = [n for n in MEASURES if not all(math.isnan(head.measures[n]) for head in heads)]
    rows = [["view"] * views + ["layer", "head", *names]]
    for head in heads:
        values = (head.measures[name] for name in names)
        cells = ("-" if math.isnan(value) else f"{value:.2f}" for value in values)
        rows.append([head.view] * views + [str(head.layer), str(head.head), *cells])
    return aligned(rows, right=range(views, len(rows[0])))
