"""Layouts that give each row its own stretch of memory: Contiguous; Ring and Sinks, which forget."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.cache.base import Cache, CacheSpec, _common, check_sizes
from regard.errors import UsageError
from regard.mask import Span
from regard.position import Rope

FIRST = 4  # tokens that stay in Sinks: attention leans on them, whatever they say


class Contiguous(Cache):
    """Row r's token at position p lies at [r, p]: (b, capacity, ...). Grows by doubling up to any length."""

    def __init__(
        self, specs: Sequence[CacheSpec], batch: int, *, capacity: int = 64, **where: object
    ):
        super().__init__(specs, batch, **where)  # type: ignore[arg-type]
        check_sizes(capacity=capacity)
        self.slots = [
            {name: self._zeros(batch, capacity, *shape) for name, shape in spec.token.items()}
            for spec in self.specs
        ]
        self.capacity = capacity

    def _reserve(self, old: Tensor, added: Tensor, size: int) -> None:
        need = (self.even if self.even is not None else int(old.max())) + size
        if need > self.capacity:
            self.capacity = max(need, 2 * self.capacity)
            for store in self.slots:
                for name, x in store.items():
                    store[name] = _grown(x, self.capacity)

    def _slot(self, pos: Tensor) -> Tensor:
        return pos

    def _write(self, layer: int, entries: dict[str, Tensor]) -> None:
        pos = self._new
        for name, x in entries.items():
            store = self.slots[layer][name]
            if pos.start is not None:
                store[:, pos.start : pos.start + pos.size] = x
            else:
                row, column, at = self._places()
                store[row, self._slot(at)] = x[row, column].to(store.dtype)

    def _read(self, layer: int) -> dict[str, Tensor]:
        return {name: x[:, : self._all.size] for name, x in self.slots[layer].items()}

    def take(self, rows: Tensor, common: int = 0) -> Cache:
        """In the memory that is there, where the rows stay as many; what they have in common is not moved. In layouts
        that forget, slots are no positions."""
        if len(rows) != self.batch or type(self) is not Contiguous:
            return super().take(rows)
        new = self._shell(rows, self._fork_cross(rows, moved=True))
        used = slice(common, self._all.size)
        for store in self.slots:
            for x in store.values():
                x[:, used] = x[:, used].index_select(0, rows.to(x.device))
        new._all = new._positions()
        return new

    def _fork_from(self, old: Cache, rows: Tensor) -> None:
        assert isinstance(old, Contiguous)
        used = old._all.size
        self.slots = []
        for store in old.slots:
            new = {name: x.new_zeros(len(rows), *x.shape[1:]) for name, x in store.items()}
            for name, x in store.items():
                new[name][:, :used] = x[:, :used].index_select(0, rows)
            self.slots.append(new)

    def _join_from(self, a: Cache, b: Cache) -> None:
        assert isinstance(a, Contiguous) and isinstance(b, Contiguous)
        self.capacity = max(a.capacity, b.capacity)
        self.slots = [
            {
                n: torch.cat([_grown(x, self.capacity), _grown(y[n], self.capacity)])
                for n, x in s.items()
            }
            for s, y in zip(a.slots, b.slots, strict=True)
        ]

    def _free(self) -> None:
        for store in self.slots:
            for x in store.values():
                x.zero_()


class Ring(Contiguous):
    """The last tokens only: position p lies at slot p mod capacity, capacity = window + chunk - 1, so
    that a chunk of `chunk` new tokens never overwrites what its first token still sees. No token sees
    more than the last `window`, whatever the chunk."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        batch: int,
        *,
        window: int,
        chunk: int = 64,
        **where: object,
    ):
        check_sizes(window=window, chunk=chunk)
        super().__init__(specs, batch, capacity=window + chunk - 1, **where)
        self.window: int = window
        self.chunk = chunk
        # The longest each row has ever been: what lies behind it is overwritten.
        self.high = self.lengths

    def _reserve(self, old: Tensor, added: Tensor, size: int) -> None:
        if size > self.chunk:
            raise UsageError(
                f"{size} tokens at once do not fit a ring made for chunks of {self.chunk}; feed it in "
                f"chunks of at most {self.chunk}, or make it with chunk={size}"
            )

    def _slot(self, pos: Tensor) -> Tensor:
        return pos % self.capacity

    def begin(self, size: int, lengths: Tensor | None = None) -> Span:
        span = super().begin(size, lengths)
        self.high = torch.maximum(self.high, self.lengths)
        # Slots wrap around: no plain run.
        self._new = Span(span.index.expand(self.batch, -1), reach=span.reach)
        return span

    def _positions(self) -> Span:
        """Slot s holds the newest position p < length with p mod capacity = s, or nothing."""
        slot = torch.arange(self.capacity, device=self.device)[None]
        last = self.lengths[:, None] - 1
        pos = last - (last - slot) % self.capacity
        return Span(torch.where(pos >= 0, pos, -1))

    def _check_rewind(self, drop: Tensor) -> None:
        oldest = self.lengths - drop - self.window + 1  # the next token still sees it
        lost = (self.high > self.capacity) & (oldest < self.high - self.capacity)
        if bool(lost.any()):
            raise UsageError(
                f"cannot rewind {int(drop.max())} tokens: a ring of window {self.window} and chunk {self.chunk} "
                f"has overwritten what would be seen then; it holds {self.chunk} tokens to spare"
            )

    def _fork_from(self, old: Cache, rows: Tensor) -> None:
        super()._fork_from(old, rows)
        assert isinstance(old, Ring)
        self.high = old.high[rows]

    def _join_from(self, a: Cache, b: Cache) -> None:
        super()._join_from(a, b)
        assert isinstance(a, Ring) and isinstance(b, Ring)
        self.high = torch.cat([a.high, b.high])

    def _free(self) -> None:
        super()._free()
        self.high = self.lengths


class Sinks(Contiguous):
    """Texts without end (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453): the first `FIRST` tokens of a row and its
    last ones, `window` in all, at the positions 0 to window - 1 that they have among themselves. A longer row takes one
    token a call.

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
        past = self._past[:, None]
        if not bool(past.any()):
            return super()._positions()
        slot = torch.arange(int(self.lengths.max()), device=self.device)[None]
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


def _grown(x: Tensor, capacity: int) -> Tensor:
    """x (b c ...) with room for `capacity` tokens a row."""
    if x.shape[1] == capacity:
        return x
    return torch.cat([x, x.new_zeros(len(x), capacity - x.shape[1], *x.shape[2:])], 1)
