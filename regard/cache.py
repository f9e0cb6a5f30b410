"""What decoding remembers: contents (declared by each layer) times layout (Contiguous, Ring, Paged).

A mechanism declares what one token leaves behind, such as {"k": (g, d), "v": (g, d)} or {"latent": (c,), "k_rope": (r,)};
a recurrent layer declares a fixed `state`. Any layout stores any contents. A forward pass calls `begin` once, which gives
the new tokens their positions, and each layer then calls `keep`, which stores its entries and returns all of them.
Slots are zero before they are written: 0 * NaN is NaN, so a masked slot must hold a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.config import UsageError
from regard.mask import Span


@dataclass(frozen=True)
class CacheSpec:
    """What one layer keeps: entries for every token, and a state of fixed size."""

    token: dict[str, tuple[int, ...]] = field(default_factory=dict)
    state: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def numbers(self) -> int:
        """Numbers kept for each token."""
        return sum(torch.Size(shape).numel() for shape in self.token.values())


class Layer:
    """One layer's view of a cache; what a Context calls `store`."""

    def __init__(self, cache: Cache, index: int):
        self.cache, self.index = cache, index

    def keep(self, **entries: Tensor) -> tuple[dict[str, Tensor], Span]:
        return self.cache.keep(self.index, entries)

    @property
    def frozen(self) -> bool:
        return self.cache.frozen

    @property
    def state(self) -> dict[str, Tensor]:
        return self.cache.states[self.index]


class Cache:
    """The operations; a layout adds where tokens lie. Rows may have different lengths."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        batch: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.specs, self.device, self.dtype = list(specs), torch.device(device or "cpu"), dtype
        self.lengths = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.even: int | None = (
            0  # the common length while all rows agree: no index tensors are needed then
        )
        self.frozen = False
        self.cross: Cache | None = None  # an encoder's keys and values, written once
        self.states = [
            {name: self._zeros(batch, *shape) for name, shape in spec.state.items()}
            for spec in self.specs
        ]
        self._rows: Tensor | None = (
            None  # (row, slot) of the tokens being written, when rows differ
        )
        self._new = Span.run(0, 0, self.device)
        self._all = self._new

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device, dtype=self.dtype)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def span(self) -> Span:
        """Positions of every slot that `keep` returns."""
        return self._all

    def layer(self, index: int) -> Layer:
        return Layer(self, index)

    def begin(self, size: int, lengths: Tensor | None = None) -> Span:
        """Make room for `size` more tokens (`lengths` of them in each row) and return their positions."""
        if self.frozen:
            raise UsageError(
                "this cache is frozen: it is read, not written; fork it or make a new one"
            )
        old, start = self.lengths, self.even
        added = torch.full_like(old, size) if lengths is None else lengths.to(old)
        self._reserve(old, added, size)
        self.lengths = old + added
        if start is not None and (lengths is None or bool((added == size).all())):
            self.even = start + size
            self._new = Span.run(start, size, self.device)
        else:
            self.even = None
            self._new = Span.ragged(added, size, old)
        self._all = self._positions()
        return self._new

    def rewind(self, tokens: int | Tensor) -> None:
        """Forget the last `tokens` of every row (or as many as the tensor says for each)."""
        drop = torch.as_tensor(tokens, device=self.device)
        if any(spec.state for spec in self.specs) and bool((drop > 0).any()):
            raise UsageError(
                "a recurrent state cannot be rewound: it holds only the present; fork it before"
            )
        if bool((drop > self.lengths).any()):
            raise UsageError(
                f"cannot rewind {int(drop.max())} tokens: the shortest row holds {int(self.lengths.min())}"
            )
        self._check_rewind(drop)
        self.lengths = self.lengths - drop
        first = int(self.lengths[0]) if self.batch else 0
        self.even = first if bool((self.lengths == first).all()) else None
        self._all = self._positions()

    def fork(self, rows: Tensor) -> Cache:
        """A cache whose row i continues row rows[i]: beams, samples, a shared prefix. The old one stays as it was."""
        new = self.__class__.__new__(self.__class__)
        new.__dict__.update(self.__dict__)
        rows = rows.to(self.device)
        new.lengths = self.lengths[rows]
        new.states = [{n: s[rows] for n, s in state.items()} for state in self.states]
        new.cross = None if self.cross is None else self.cross.fork(rows)
        new._fork_from(self, rows)
        new._all = new._positions()
        return new

    def freeze(self) -> None:
        """Read only from here on (an encoder's keys and values)."""
        self.frozen = True

    def free(self) -> None:
        """Give the memory back; the cache is empty afterwards."""
        self.lengths = torch.zeros_like(self.lengths)
        self.even, self.cross = 0, None
        self.states = [{n: torch.zeros_like(s) for n, s in state.items()} for state in self.states]
        self._free()
        self._all = self._positions()

    def keep(self, layer: int, entries: dict[str, Tensor]) -> tuple[dict[str, Tensor], Span]:
        """Store the entries of the tokens announced by `begin`, return all tokens' entries and positions."""
        if not self.frozen:
            self._write(layer, entries)
        return self._read(layer), self._all

    # what a layout defines
    def _reserve(self, old: Tensor, added: Tensor, size: int) -> None:
        raise NotImplementedError

    def _positions(self) -> Span:
        raise NotImplementedError

    def _write(self, layer: int, entries: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _read(self, layer: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def _fork_from(self, old: Cache, rows: Tensor) -> None:
        raise NotImplementedError

    def _free(self) -> None:
        raise NotImplementedError

    def _check_rewind(self, drop: Tensor) -> None:
        """Layouts that forget refuse what they no longer hold."""


class Contiguous(Cache):
    """Row r's token at position p lies at [r, p]: (b, capacity, ...). Grows by doubling up to any length."""

    def __init__(
        self, specs: Sequence[CacheSpec], batch: int, *, capacity: int = 64, **where: object
    ):
        super().__init__(specs, batch, **where)  # type: ignore[arg-type]
        self.slots = [
            {name: self._zeros(batch, capacity, *shape) for name, shape in spec.token.items()}
            for spec in self.specs
        ]
        self.capacity = capacity

    def _reserve(self, old: Tensor, added: Tensor, size: int) -> None:
        need = (self.even if self.even is not None else int(old.max())) + size
        if need > self.capacity:
            more = max(need, 2 * self.capacity) - self.capacity
            for store in self.slots:
                for name, x in store.items():
                    store[name] = torch.cat([x, x.new_zeros(len(x), more, *x.shape[2:])], 1)
            self.capacity += more

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
                row, column = (pos.index >= 0).nonzero(as_tuple=True)
                store[row, self._slot(pos.index[row, column])] = x[row, column].to(store.dtype)

    def _read(self, layer: int) -> dict[str, Tensor]:
        return {name: x[:, : self._all.size] for name, x in self.slots[layer].items()}

    def _fork_from(self, old: Cache, rows: Tensor) -> None:
        assert isinstance(old, Contiguous)
        self.slots = [{n: x[rows] for n, x in store.items()} for store in old.slots]

    def _free(self) -> None:
        for store in self.slots:
            for x in store.values():
                x.zero_()


class Ring(Contiguous):
    """The last tokens only: position p lies at slot p mod capacity, capacity = window + chunk - 1, so that a chunk of
    `chunk` new tokens never overwrites what its first token still sees."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        batch: int,
        *,
        window: int,
        chunk: int = 64,
        **where: object,
    ):
        super().__init__(specs, batch, capacity=window + chunk - 1, **where)
        self.window, self.chunk = window, chunk
        self.high = (
            self.lengths
        )  # the longest each row has ever been: what lies behind it is overwritten

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

    def _check_rewind(self, drop: Tensor) -> None:
        oldest = self.lengths - drop - self.window + 1  # the next token still sees it
        lost = (self.high > self.capacity) & (oldest < self.high - self.capacity)
        if bool(lost.any()):
            raise UsageError(
                f"cannot rewind {int(drop.max())} tokens: a ring of window {self.window} and chunk {self.chunk} "
                f"has overwritten what would be seen then; it holds {self.capacity - self.window} tokens to spare"
            )

    def _fork_from(self, old: Cache, rows: Tensor) -> None:
        super()._fork_from(old, rows)
        assert isinstance(old, Ring)
        self.high = old.high[rows]

    def _free(self) -> None:
        super()._free()
        self.high = self.lengths


class Paged(Cache):
    """Tokens lie in pages of `page` slots taken from one pool; a row is a list of pages. Forked rows share pages until
    one of them writes (copy on write). A page is filled with zeros when it is taken."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        batch: int,
        *,
        pages: int = 64,
        page: int = 16,
        **where: object,
    ):
        super().__init__(specs, batch, **where)  # type: ignore[arg-type]
        self.page = page
        self.pool = [
            {name: self._zeros(pages + 1, page, *shape) for name, shape in spec.token.items()}
            for spec in self.specs
        ]  # the last page stays zero: short rows point there
        self.users = [0] * pages  # rows that hold a page, over all forks
        self.tables: list[list[int]] = [[] for _ in range(batch)]

    def _take(self, copy: int | None = None) -> int:
        page = next((i for i, users in enumerate(self.users) if users == 0), None)
        if page is None:
            raise UsageError(
                f"all {len(self.users)} pages of {self.page} tokens are in use; free a row, or make more pages"
            )
        self.users[page] = 1
        for store in self.pool:
            for x in store.values():
                x[page] = 0 if copy is None else x[copy]
        return page

    def _reserve(self, old: Tensor, added: Tensor, size: int) -> None:
        for table, length, more in zip(self.tables, old.tolist(), added.tolist(), strict=True):
            first, end = length // self.page, -(-(length + more) // self.page)
            if more and first < len(table) and self.users[table[first]] > 1:
                self.users[table[first]] -= 1
                table[first] = self._take(copy=table[first])
            while len(table) < end:
                table.append(self._take())

    def _positions(self) -> Span:
        width = max((len(t) for t in self.tables), default=0)
        self._table = torch.tensor(
            [t + [len(self.users)] * (width - len(t)) for t in self.tables],
            dtype=torch.long,
            device=self.device,
        ).view(self.batch, width)
        if self.even is not None:
            return Span.run(0, self.even, self.device)
        return Span.ragged(self.lengths, int(self.lengths.max()))

    def _write(self, layer: int, entries: dict[str, Tensor]) -> None:
        pos = self._new.index.expand(self.batch, -1)
        row, column = (pos >= 0).nonzero(as_tuple=True)
        at = pos[row, column]
        page = self._table[row, at // self.page]
        for name, x in entries.items():
            store = self.pool[layer][name]
            store[page, at % self.page] = x[row, column].to(store.dtype)

    def _read(self, layer: int) -> dict[str, Tensor]:
        size = self._all.size
        return {
            name: x[self._table].flatten(1, 2)[:, :size] for name, x in self.pool[layer].items()
        }

    def _fork_from(self, old: Cache, rows: Tensor) -> None:
        assert isinstance(old, Paged)
        self.tables = [list(old.tables[r]) for r in rows.tolist()]
        for table in self.tables:
            for page in table:
                self.users[page] += 1

    def rewind(self, tokens: int | Tensor) -> None:
        super().rewind(tokens)
        for table, length in zip(self.tables, self.lengths.tolist(), strict=True):
            while len(table) > -(-length // self.page):
                self.users[table.pop()] -= 1
        self._all = self._positions()

    def _free(self) -> None:
        for table in self.tables:
            while table:
                self.users[table.pop()] -= 1


LAYOUTS: dict[str, type[Cache]] = {"contiguous": Contiguous, "ring": Ring, "paged": Paged}
