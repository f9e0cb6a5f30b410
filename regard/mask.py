"""Who may see whom. A mask is a rule on positions, never on buffer indices.

True means "may be seen". Rules are joined with `&`. Position -1 marks a slot that holds nothing (padding,
an unwritten cache slot); no rule shows it. So rings, pages, ragged batches and chunked prefill need no mask
code, and "bottom-right alignment" (queries fewer than keys) is what positions give by themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Span:
    """Positions of n tokens in each row: `index` (b n) or (1 n). `start` is set when every row is
    start, start + 1, and so on. `place` (b n) is where each token stands in its document, where
    several share a row. `reach` (b) is how long the texts are of which these tokens are read as a
    part, where that is known."""

    index: Tensor
    start: int | None = None
    place: Tensor | None = None
    reach: Tensor | None = None

    @property
    def size(self) -> int:
        return self.index.shape[1]

    @property
    def absolute(self) -> Tensor:
        """What vectors and angles are made of; masks and distances see `index`."""
        return self.index if self.place is None else self.place

    def _part(self, index: slice) -> Span:
        """The positions of a run of these tokens."""
        start = None if self.start is None else self.start + index.indices(self.size)[0]
        return Span(self.index[:, index], start)

    @staticmethod
    def run(start: int, size: int, device: torch.device | str | None = None) -> Span:
        return Span(torch.arange(start, start + size, device=device)[None], start)

    @staticmethod
    def ragged(lengths: Tensor, size: int, start: Tensor | int = 0) -> Span:
        """Right padding: row i holds positions start.. for its first `lengths[i]` tokens, then -1."""
        steps = torch.arange(size, device=lengths.device)[None]
        first = start[:, None] if isinstance(start, Tensor) else start
        return Span(torch.where(steps < lengths[:, None], steps + first, -1))

    def within(self, mask: Mask | None) -> Span:
        """The same tokens, each with its place in the document that the mask says it is of."""
        doc = None if mask is None else mask.documents
        if doc is None:
            return self
        table = places(doc)
        index = self.index.expand(len(doc), -1)
        place = table.gather(1, index.clamp(min=0))
        return Span(self.index, self.start, torch.where(index < 0, -1, place))


def places(doc: Tensor) -> Tensor:
    """Where each position of packed rows stands in its document (b n)."""
    column = torch.arange(doc.shape[1], device=doc.device).expand_as(doc)
    begins = torch.nn.functional.pad(doc[:, 1:] != doc[:, :-1], (1, 0), value=True)
    return column - torch.where(begins, column, 0).cummax(1).values


class Mask:
    """A rule on (row of the batch, query position, key position), all broadcastable integer tensors."""

    @property
    def rows(self) -> int:
        """How many rows of the batch the rule tells apart."""
        return 1

    @property
    def documents(self) -> Tensor | None:
        """The document (b n) of each position, where the rule keeps documents of a row apart."""
        return None

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        raise NotImplementedError

    def binding(self, q: range, k: range) -> list[Mask]:
        """The rules of it that may hide one of the positions k from one of the positions q."""
        return [self]

    def __and__(self, other: Mask) -> Mask:
        return _Both(self, other)


@dataclass(frozen=True)
class Full(Mask):
    """Every token sees every token."""

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.ones_like(q >= k)

    def binding(self, q: range, k: range) -> list[Mask]:
        return []


@dataclass(frozen=True)
class Causal(Mask):
    """k <= q + ahead. `ahead` = 0 is the causal or look-ahead mask: a token sees itself and the past.
    More looks ahead; -1 hides the token itself too."""

    ahead: int = 0

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q + self.ahead

    def binding(self, q: range, k: range) -> list[Mask]:
        return [] if k[-1] <= q[0] + self.ahead else [self]


@dataclass(frozen=True)
class Window(Mask):
    """|q - k| < width: with `Causal` the last `width` tokens, the query's own among them; in an
    encoder as many to either side."""

    width: int

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() < self.width

    def binding(self, q: range, k: range) -> list[Mask]:
        return [] if max(q[-1] - k[0], k[-1] - q[0]) < self.width else [self]


@dataclass(frozen=True, eq=False)
class Chunk(Mask):
    """q and k stand in the same run of `size` positions, counted from 0 (Llama 4). Of packed rows each document is
    counted anew: `place` (b n) is where each position stands in its own (`places`)."""

    size: int
    place: Tensor | None = None

    @property
    def rows(self) -> int:
        return 1 if self.place is None else len(self.place)

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if self.place is not None:
            q, k = (self.place[row, pos.clamp(min=0)] for pos in (q, k))
        return q // self.size == k // self.size

    def binding(self, q: range, k: range) -> list[Mask]:
        whole = min(q[0], k[0]) // self.size == max(q[-1], k[-1]) // self.size
        return [] if self.place is None and whole else [self]


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """k < lengths[row]. (Models do not need it: they give padding the position -1.)"""

    lengths: Tensor

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < self.lengths[row]


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """doc[q] == doc[k] for packed rows; `doc` (b n) gives each position's document."""

    doc: Tensor

    @property
    def rows(self) -> int:
        return len(self.doc)

    @property
    def documents(self) -> Tensor:
        return self.doc

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.doc[row, q.clamp(min=0)] == self.doc[row, k.clamp(min=0)]


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """k <= q, or k within a prefix: the prefix language model. `lengths` (b): the prefix of each row; (b n) for packed
    rows: where the prefix of each position's document ends. (Join it with `Documents`, which keeps them apart.)"""

    lengths: Tensor

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if self.lengths.dim() == 1:
            return (k <= q) | (k < self.lengths[row])
        return (k <= q) | (k < self.lengths[row, k.clamp(min=0)])


@dataclass(frozen=True, eq=False)
class _Both(Mask):
    left: Mask
    right: Mask

    @property
    def rows(self) -> int:
        return max(self.left.rows, self.right.rows)

    @property
    def documents(self) -> Tensor | None:
        left = self.left.documents
        return self.right.documents if left is None else left

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.left.see(row, q, k) & self.right.see(row, q, k)

    def binding(self, q: range, k: range) -> list[Mask]:
        return self.left.binding(q, k) + self.right.binding(q, k)


class Visible:
    """A mask bound to the positions of queries and keys: what `attend` takes. It is lowered to the cheapest form:
    `everything`, the `causal` flag, a bool tensor, or a rule on indices for block masks."""

    def __init__(self, mask: Mask, q: Span, k: Span):
        self.mask, self.q, self.k = mask, q, k
        self._tensor: Tensor | None = None
        self._blocks: dict[int, Any] = {}
        # The rules that may hide something; all of them where positions are not plain runs.
        rules = [] if isinstance(mask, Full) and k.start is not None else [mask]
        if q.start is not None and k.start is not None and q.size and k.size:
            rules = mask.binding(range(q.start, q.start + q.size), range(k.start, k.start + k.size))
        self.rules = rules
        self.everything = not rules
        self.square = q.start is not None and q.start == k.start and q.size == k.size
        self.causal = self.square and rules == [Causal()]

    def tensor(self) -> Tensor:
        """(b 1 t s) bool, b may be 1."""
        if self._tensor is None:
            self._tensor = self.rows(slice(None))
        return self._tensor

    @functools.cached_property
    def packed(self) -> tuple[Tensor, int, bool] | None:
        """Where the documents of all rows, end to end, begin and where the last one ends (n + 1 numbers), the length of
        the longest, and whether they are read causally; None where the mask is anything else."""
        docs = [rule for rule in self.rules if isinstance(rule, Documents)]
        rest = [rule for rule in self.rules if not isinstance(rule, Documents)]
        if len(docs) != 1 or rest not in ([], [Causal()]) or not self.square or self.q.start:
            return None
        doc = docs[0].doc.cpu()
        later, before = doc[:, 1:], doc[:, :-1]
        # Documents lie side by side, padding (-1) behind them.
        if doc.shape[1] != self.q.size or ((later < before) & (later >= 0)).any():
            return None
        first = torch.ones(len(doc), 1, dtype=torch.bool)
        starts = torch.cat([first, later != before], 1).flatten().nonzero()[:, 0]
        ends = torch.cat([starts, torch.tensor([doc.numel()])])
        return ends.to(docs[0].doc.device, torch.int32), int(ends.diff().max()), bool(rest)

    def rows(self, index: slice | Tensor) -> Tensor:
        """The same for some queries only, so that a probe of a few rows never needs t x s."""
        q, k = self.q.index[:, index, None], self.k.index[:, None, :]
        row = torch.arange(max(len(q), len(k), self.mask.rows), device=k.device)[:, None, None]
        seen = self.mask.see(row, q, k) & (k >= 0)
        return seen.expand(-1, q.shape[1], -1)[:, None]

    def part(self, index: slice, keys: slice | None = None) -> Visible:
        """The same for a run of queries, which may be simpler: the last one sees everything that is causal. And for
        a run of keys, where one is given."""
        k = self.k if keys is None else self.k._part(keys)
        return Visible(self.mask, self.q._part(index), k)

    def blocks(self, batch: int) -> Any:
        """The same as a block mask of torch's flex attention, made once for all layers."""
        from torch.nn.attention.flex_attention import create_block_mask

        if batch not in self._blocks:
            device = str(self.k.index.device)
            self._blocks[batch] = create_block_mask(
                self.rule(), batch, None, self.q.size, self.k.size, device=device
            )
        return self._blocks[batch]

    def rule(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The same as a function of (row, head, query index, key index)."""
        q, k = self.q.index, self.k.index

        def see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            q_pos = q[b if len(q) > 1 else 0 * b, i]
            k_pos = k[b if len(k) > 1 else 0 * b, j]
            return self.mask.see(b, q_pos, k_pos) & (k_pos >= 0)

        return see
