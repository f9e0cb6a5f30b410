"""Who may see whom. A mask is a rule on positions, never on buffer indices.

True means "may be seen". Rules are joined with `&`. Position -1 marks a slot that holds nothing (padding,
an unwritten cache slot); no rule shows it. So rings, pages, ragged batches and chunked prefill need no mask
code, and "bottom-right alignment" (queries fewer than keys) is what positions give by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Span:
    """Positions of n tokens in each row: `index` (b n) or (1 n). `start` is set when every row is start, start+1,
    ..."""

    index: Tensor
    start: int | None = None

    @property
    def size(self) -> int:
        return self.index.shape[-1]

    @staticmethod
    def run(start: int, size: int, device: torch.device | str | None = None) -> Span:
        return Span(torch.arange(start, start + size, device=device)[None], start)

    @staticmethod
    def ragged(lengths: Tensor, size: int, start: Tensor | int = 0) -> Span:
        """Right padding: row i holds positions start.. for its first `lengths[i]` tokens, then -1."""
        steps = torch.arange(size, device=lengths.device)[None]
        first = start[:, None] if isinstance(start, Tensor) else start
        return Span(torch.where(steps < lengths[:, None], steps + first, -1))


class Mask:
    """A rule on (row of the batch, query position, key position), all broadcastable integer tensors."""

    @property
    def rows(self) -> int:
        """How many rows of the batch the rule tells apart."""
        return 1

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return _Both(self, other)


@dataclass(frozen=True)
class Full(Mask):
    """Every token sees every token."""

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.ones_like(q >= k)


@dataclass(frozen=True)
class Causal(Mask):
    """k <= q + ahead. `ahead` = 0 is the causal mask (a token sees itself and the past); more looks ahead."""

    ahead: int = 0

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q + self.ahead


@dataclass(frozen=True)
class Window(Mask):
    """q - k < width: the last `width` tokens, the query's own among them."""

    width: int

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < self.width


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """k < lengths[row]. (Models need it not: they give padding the position -1.)"""

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

    def see(self, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.left.see(row, q, k) & self.right.see(row, q, k)


class Visible:
    """A mask bound to the positions of queries and keys: what `attend` takes. It is lowered to the cheapest form:
    `everything`, the `causal` flag, a bool tensor, or a rule on indices for block masks."""

    def __init__(self, mask: Mask, q: Span, k: Span):
        self.mask, self.q, self.k = mask, q, k
        self._tensor: Tensor | None = None
        q0, k0 = q.start, k.start
        plain = k0 is not None and (q0 is not None or isinstance(mask, Full))
        past = q0 is not None and k0 is not None and q0 >= k0 + k.size - 1
        self.everything = plain and (isinstance(mask, Full) or (isinstance(mask, Causal) and past))
        self.causal = (
            plain and not self.everything and mask == Causal() and q0 == k0 and q.size == k.size
        )

    def tensor(self) -> Tensor:
        """(b 1 t s) bool, b may be 1."""
        if self._tensor is None:
            self._tensor = self.rows(slice(None))
        return self._tensor

    def rows(self, index: slice | Tensor) -> Tensor:
        """The same for some queries only, so that a probe of a few rows never needs t x s."""
        q, k = self.q.index[:, index, None], self.k.index[:, None, :]
        row = torch.arange(max(len(q), len(k), self.mask.rows), device=k.device)[:, None, None]
        seen = self.mask.see(row, q, k) & (k >= 0)
        return seen.expand(-1, q.shape[1], -1)[:, None]

    def part(self, index: slice) -> Visible:
        """The same for a run of queries, which may be simpler: the last one sees everything that is causal."""
        start = None if self.q.start is None else self.q.start + index.indices(self.q.size)[0]
        return Visible(self.mask, Span(self.q.index[:, index], start), self.k)

    def rule(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The same as a function of (row, head, query index, key index)."""
        q, k = self.q.index, self.k.index

        def see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            q_pos = q[b if len(q) > 1 else 0 * b, i]
            k_pos = k[b if len(k) > 1 else 0 * b, j]
            return self.mask.see(b, q_pos, k_pos) & (k_pos >= 0)

        return see
