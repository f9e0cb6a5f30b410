"""The layout of texts without end: the first tokens and the last ones (StreamingLLM, Xiao et al. 2023,
arXiv:2309.17453)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.cache.base import Cache, CacheSpec, _common, check_sizes
from regard.cache.rows import Contiguous
from regard.errors import UsageError
from regard.mask import Span
from regard.position import Rope

FIRST = 4  # tokens that stay: attention leans on them, whatever they say


class Sinks(Contiguous):
    """The first `FIRST` tokens of a row and its last ones, `window` in all, at the positions 0 to window - 1 that they
    have among themselves. A longer row takes one token a call.

    Scores depend on distances. Those between the last tokens stay as they are when the window moves on; only the first
    ones have to follow, and are turned anew for each token. There is room for two windows; when it is full, what is
    still seen goes to its front, and is turned back by as much."""

    endless = True

    def __init__(self, specs: Sequence[CacheSpec], batch: int, *, window: int, **where: object):
        check_sizes(window=window - FIRST)
        super().__init__(specs, batch, capacity=2 * window, **where)
        self.size = window
        # The first tokens' turned entries as they were written.
        self.first = [
            {name: self.slots[i][name][:, :FIRST].clone() for name in spec.turned or ()}
            for i, spec in enumerate(self.specs)
        ]

    @property
    def _past(self) -> Tensor:
        """How many tokens of each row are not seen (b)."""
        return (self.lengths - self.size).clamp(min=0)

    def begin(self, size: int, lengths: Tensor | None = None) -> Span:
        added = torch.full_like(self.lengths, size) if lengths is None else lengths.to(self.lengths)
        if bool(((self.lengths + added > self.size) & (added > 1)).any()):
            raise UsageError(f"past {self.size} tokens this cache takes one at a time")
        full = (self.lengths + added > self.capacity).nonzero()[:, 0]
        if len(full):
            self._move(full)
        return super().begin(size, lengths)

    def _move(self, rows: Tensor) -> None:
        """The tokens that are still seen to the front of these rows, which are full."""
        back = torch.full_like(rows, -self.size)
        for spec, store in zip(self.specs, self.slots, strict=True):
            for name, x in store.items():
                last = x[rows, self.size + FIRST :]
                rope = (spec.turned or {}).get(name)
                x[rows, FIRST : self.size] = last if rope is None else _shift(rope, last, back)
        self.lengths = self.lengths.index_fill(0, rows, self.size)
        self.even = _common(self.lengths)

    def _positions(self) -> Span:
        last = int(self.lengths.max()) if self.batch else 0
        if last <= self.size:
            return super()._positions()
        slot, past = torch.arange(last, device=self.device)[None], self._past[:, None]
        seen = (slot < self.lengths[:, None]) & ((slot < FIRST) | (slot >= past + FIRST))
        return Span(torch.where(seen, torch.where(slot < FIRST, slot + past, slot), -1))

    def _write(self, layer: int, entries: dict[str, Tensor]) -> None:
        super()._write(layer, entries)
        past, first = self._past, self.first[layer]
        for name, rope in (self.specs[layer].turned or {}).items():
            x = self.slots[layer][name]
            still = (past == 0).view(-1, *[1] * (x.dim() - 1))
            first[name] = torch.where(still, x[:, :FIRST], first[name])
            if self._all.start is None:
                x[:, :FIRST] = _shift(rope, first[name], past)

    def take(self, rows: Tensor, common: int = 0) -> Cache:
        return Cache.take(self, rows)

    def _check_rewind(self, drop: Tensor) -> None:
        if bool((self.lengths > self.size).any()):
            raise UsageError("a cache that has forgotten tokens cannot be rewound")

    def _fork_from(self, old: Cache, rows: Tensor) -> None:
        super()._fork_from(old, rows)
        assert isinstance(old, Sinks)
        self.first = [{n: x[rows] for n, x in first.items()} for first in old.first]

    def _join_from(self, a: Cache, b: Cache) -> None:
        super()._join_from(a, b)
        assert isinstance(a, Sinks) and isinstance(b, Sinks)
        self.first = [
            {n: torch.cat([x, y[n]]) for n, x in first.items()}
            for first, y in zip(a.first, b.first, strict=True)
        ]


def _shift(rope: Rope, x: Tensor, by: Tensor) -> Tensor:
    """x (b n h d), or (b n d) of one head."""
    return rope.shift(x, by) if x.dim() == 4 else rope.shift(x[:, :, None], by)[:, :, 0]
