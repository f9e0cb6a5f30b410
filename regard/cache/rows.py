"""Layouts that give each row its own stretch of memory: Contiguous and Ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.cache.base import Cache, CacheSpec, check_sizes
from regard.errors import UsageError
from regard.mask import Span


class Contiguous(Cache):
    """Row r's token at position p lies at [r, p]: (b, capacity, ...). Grows by doubling up to any length.

    Where rows trade places (beams), the tokens stay where they are and `place` (b capacity) tells the row that holds
    them, until somebody reads the memory who does not know of it."""

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
        self.place: Tensor | None = None

    def _reserve(self, old: Tensor, added: Tensor, size: int) -> None:
        need = (self.even if self.even is not None else int(old.max())) + size
        if need > self.capacity:
            self.capacity = max(need, 2 * self.capacity)
            for store in self.slots:
                for name, x in store.items():
                    store[name] = _grown(x, self.capacity)
            if self.place is not None:
                more = self.capacity - self.place.shape[1]
                self.place = torch.cat([self.place, _own(self.place).expand(-1, more)], 1)

    def _slot(self, pos: Tensor) -> Tensor:
        return pos

    def _positions(self) -> Span:
        if self.even is not None:
            return Span.run(0, self.even, self.device)
        return Span.ragged(self.lengths, int(self.lengths.max()))

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
        self._settle()
        return {name: x[:, : self._all.size] for name, x in self.slots[layer].items()}

    def _settle(self) -> None:
        """Bring every token to its own row."""
        if self.place is None:
            return
        used = self._all.size
        rows, column = self.place[:, :used].long(), torch.arange(used, device=self.device)
        for store in self.slots:
            for x in store.values():
                x[:, :used] = x[rows, column]
        self.place = None

    def take(self, rows: Tensor, common: int = 0) -> Cache:
        """Nothing is moved where the rows stay as many: `place` tells where they come from."""
        if len(rows) != self.batch:
            return super().take(rows)
        new, place = self._shell(rows), self.place
        assert isinstance(new, Contiguous)
        if place is None:
            place = torch.arange(self.batch, dtype=torch.int32, device=self.device)[:, None]
            place = place.expand(-1, self.capacity)
        written = torch.arange(self.capacity, device=self.device) < new.lengths[:, None]
        new.place = torch.where(written, place[rows], _own(place))
        new._all = new._positions()
        return new

    def _check_rewind(self, drop: Tensor) -> None:
        self._settle()

    def _fork_from(self, old: Cache, rows: Tensor) -> None:
        assert isinstance(old, Contiguous)
        old._settle()
        self.place, used = None, old._all.size
        self.slots = [{n: _rows_of(x, rows, used) for n, x in store.items()} for store in old.slots]

    def _join_from(self, a: Cache, b: Cache) -> None:
        assert isinstance(a, Contiguous) and isinstance(b, Contiguous)
        for each in (a, b):
            each._settle()
        self.place = None
        self.capacity = max(a.capacity, b.capacity)
        self.slots = [
            {
                n: torch.cat([_grown(x, self.capacity), _grown(y[n], self.capacity)])
                for n, x in s.items()
            }
            for s, y in zip(a.slots, b.slots, strict=True)
        ]

    def _free(self) -> None:
        self.place = None
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
        self._new = Span(span.index.expand(self.batch, -1))  # slots wrap around: no plain run
        return span

    def _positions(self) -> Span:
        """Slot s holds the newest position p < length with p mod capacity = s, or nothing."""
        slot = torch.arange(self.capacity, device=self.device)[None]
        last = self.lengths[:, None] - 1
        pos = last - (last - slot) % self.capacity
        return Span(torch.where(pos >= 0, pos, -1))

    def take(self, rows: Tensor, common: int = 0) -> Cache:
        return Cache.take(self, rows)  # slots are no positions here

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


def _own(place: Tensor) -> Tensor:
    """(b 1): each row's own number."""
    return torch.arange(len(place), dtype=place.dtype, device=place.device)[:, None]


def _grown(x: Tensor, capacity: int) -> Tensor:
    """x (b c ...) with room for `capacity` tokens a row."""
    if x.shape[1] == capacity:
        return x
    return torch.cat([x, x.new_zeros(len(x), capacity - x.shape[1], *x.shape[2:])], 1)


def _rows_of(x: Tensor, rows: Tensor, used: int) -> Tensor:
    """Some rows of x (b c ...), copying no more than the `used` slots."""
    new = x.new_zeros(len(rows), *x.shape[1:])
    new[:, :used] = x[:, :used].index_select(0, rows)
    return new
