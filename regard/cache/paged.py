"""The paged layout: rows are lists of pages from one pool, shared until one of them writes; see blocks.py."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.cache.base import Cache, CacheSpec, State, check_sizes, taken_back
from regard.cache.blocks import BlockTable, OutOfPages, PagePool
from regard.mask import Span

# Tokens that a block table has places for at first, chosen for speed: steps over one of the same width are recorded
# once.
WIDTH = 128
LARGE = 2**25  # bytes that an allocator gets from the system each time; chosen for speed


class Pool(PagePool):
    """Pages, with their memory on a device. Those that were never held are zero."""

    def __init__(
        self, specs: Sequence[CacheSpec], pages: int, page: int, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None
    ):  # fmt: skip
        super().__init__(pages, page)
        self.stores = [
            {
                name: untouched((pages + 2, page, *shape), device, dtype)
                for name, shape in spec.token.items()
            }
            for spec in specs
        ]
        # Two pages are nobody's: one stays zero, short rows point there; the other is written to and never read.
        self.blank, self.scratch = pages, pages + 1
        # States take as much memory as the pages.
        self.room = self.nbytes

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for store in self.stores for x in store.values())

    def copy(self, source: int | Tensor, target: int | Tensor) -> None:
        for store in self.stores:
            for x in store.values():
                x[target] = x[source]

    def clean(self, pages: list[int]) -> None:
        """Fill with zeros what others left in pages that were taken."""
        spent = [page for page in pages if page in self.left]
        for x in (x for store in self.stores for x in store.values() if spent):
            x.index_fill_(0, torch.tensor(spent, device=x.device), 0)


class Paged(Cache):
    """Tokens lie in pages of `page` slots taken from one pool; a row is a list of pages. Forked rows share pages until
    one of them writes (copy on write). A page that is taken holds zeros."""

    def __init__(
        self, specs: Sequence[CacheSpec], batch: int, *, pages: int = 64, page: int = 16, pool: Pool | None = None,
        **where: object
    ):  # fmt: skip
        super().__init__(specs, batch, **where)  # type: ignore[arg-type]
        check_sizes(pages=pages, page=page)
        self.pool = pool or Pool(self.specs, pages, page, self.device, self.dtype)
        self.page = self.pool.page
        self.tables = [BlockTable(self.pool) for _ in range(batch)]
        # (b, pages), as the C code reads it.
        self._table = torch.zeros(batch, 0, dtype=torch.int32, device=self.device)
        # Pages by (row, place) that are not yet in _table.
        self._edits: dict[tuple[int, int], int] = {}
        self._found: dict[int, dict[str, Tensor]] = {}  # what a frozen cache has gathered, by layer

    @property
    def users(self) -> list[int]:
        return self.pool.users

    @property
    def table(self) -> Tensor:
        """The page (b, pages) of every stretch of `page` positions."""
        return self._table

    def adopt(self, row: int, keys: Sequence[Hashable]) -> int:
        """Begin an empty row with the published pages of the longest run of `keys`, up to one with states where the
        model has states; how many tokens that gives."""
        table, pool, keys = self.tables[row], self.pool, keys[: self.known(keys)]
        if any(spec.state for spec in self.specs):
            ends = [i for i, key in enumerate(keys, 1) if key in pool.states]
            keys = keys[: max(ends, default=0)]
            if keys:
                pool.states.move_to_end(keys[-1])
                for state, new in zip(self.states, pool.states[keys[-1]], strict=True):
                    for name, x in new.items():
                        # In the type of the states that were kept, which may be wider.
                        state[name] = state[name].to(x.dtype)
                        state[name][row] = x[0]
        table.adopt(keys)
        self._edits |= table.edits(row)
        lengths = self.lengths.tolist()
        lengths[row] = len(table) * self.page
        self.lengths = torch.tensor(lengths, device=self.device)
        self.even = lengths[0] if len(set(lengths)) == 1 else None
        self._all = self._positions()
        return lengths[row]

    def known(self, keys: Sequence[Hashable]) -> int:
        """How many of the first pages are published."""
        return self.pool.known(keys)

    def state_after(self, row: int, size: int) -> list[State] | None:
        """A row's states after its first `size` tokens, if the last call gives them."""
        drop = int(self.lengths[row]) - size
        if not self.pasts or not 0 <= drop <= min(int(self._fed[row]), taken_back(self.specs)):
            return None
        rows = torch.tensor([row], device=self.device)
        return self.past(rows, torch.full_like(rows, drop))

    def publish(self, row: int, keys: Sequence[Hashable]) -> None:
        """Let later rows take over this row's full pages, one key a page."""
        self.tables[row].publish(keys)

    def _reserve(self, old: Tensor, added: Tensor, size: int) -> None:
        fresh: list[int] = []
        copies: list[tuple[int, int]] = []
        try:
            for row, (length, more) in enumerate(zip(old.tolist(), added.tolist(), strict=True)):
                table = self.tables[row]
                place, have = length // self.page, len(table)
                if more and place < have and (copy := table.own(place)):
                    copies.append(copy)
                    self._edits[row, place] = copy[1]
                table.reserve(length + more)
                fresh += table[have:]
                self._edits |= table.edits(row, have)
        except OutOfPages:  # what was taken goes back
            self._trim()
            self._lay()
            raise
        finally:
            self.pool.clean(fresh)
            if copies:
                self.pool.copy(*torch.tensor(copies, device=self.device).T)

    def _trim(self) -> None:
        """Give back the pages past each row's length."""
        self._found = {}
        for row, length in enumerate(self.lengths.tolist()):
            table, end = self.tables[row], -(-length // self.page)
            if len(table) > end:
                for place in range(end, len(table)):
                    self._edits[row, place] = self.pool.blank
                table.trim(length)

    def _lay(self) -> None:
        """Bring the tensor of page numbers up to date: only what changed, for a long row has many pages."""
        if not self._edits:
            return
        width, have = max(len(t) for t in self.tables), self._table.shape[1]
        if width > have:
            width = max(1 << (width - 1).bit_length(), WIDTH // self.page)
            self._table = _padded(self._table, width, self.pool.blank)
        width = self._table.shape[1]
        at = [(*k, page) for k, page in self._edits.items() if k[1] < width]
        row, place, page = torch.tensor(at, dtype=torch.long, device=self.device).view(-1, 3).T
        self._table[row, place] = page.int()
        self._edits = {}

    def _positions(self) -> Span:
        self._lay()
        return super()._positions()

    def _write(self, layer: int, entries: dict[str, Tensor]) -> None:
        row, column, at = self._places()
        page = self._table[row, at // self.page]
        for name, x in entries.items():
            store = self.pool.stores[layer][name]
            store[page, at % self.page] = x[row, column].to(store.dtype)

    def _read(self, layer: int) -> dict[str, Tensor]:
        if layer in self._found:
            return self._found[layer]
        size, stores = self._all.size, self.pool.stores[layer]
        table = self._table[:, : -(-size // self.page)]
        found = {name: x[table].flatten(1, 2)[:, :size] for name, x in stores.items()}
        if self.frozen:
            self._found[layer] = found
        return found

    def fork(self, rows: Tensor) -> Cache:
        new = super().fork(rows)
        assert isinstance(new, Paged)
        for table in new.tables:
            table.hold()
        return new

    def take(self, rows: Tensor, common: int = 0) -> Cache:
        """A row that goes on once keeps its pages as they are; only second copies and lost rows are counted, and of
        them what is not common."""
        new = self._branch(rows, self._fork_cross(rows, moved=True))
        uses, first = Counter(rows.tolist()), common // self.page
        for row, table in enumerate(self.tables):
            if not uses[row]:
                table.trim(first * self.page)
            elif copies := uses[row] - 1:
                table.hold(copies, first)
            table.clear()
        return new

    def _fork_from(self, old: Cache, rows: Tensor) -> None:
        assert isinstance(old, Paged)
        self.tables = [BlockTable(self.pool, old.tables[r]) for r in rows.tolist()]
        self._table, self._edits, self._found = old._table[rows], {}, {}

    def _join_from(self, a: Cache, b: Cache) -> None:
        assert isinstance(a, Paged) and isinstance(b, Paged) and a.pool is b.pool
        self.tables, self._edits, self._found = a.tables + b.tables, {}, {}
        width, blank = max(a._table.shape[1], b._table.shape[1]), self.pool.blank
        self._table = torch.cat([_padded(x._table, width, blank) for x in (a, b)])

    def release(self) -> None:
        super().release()
        for table in self.tables:
            table.release()

    def rewind(self, tokens: int | Tensor) -> None:
        super().rewind(tokens)
        self._trim()
        self._all = self._positions()

    def _free(self) -> None:
        self._trim()


def untouched(
    shape: Sequence[int], device: torch.device | str | None, dtype: torch.dtype | None
) -> Tensor:
    """Zeros; in a CPU's memory those that the system gives when they are first used, so that a large pool costs what is
    held of it. Small ones are given by the process, which has used them before: that is faster."""
    like = torch.empty((), device=device, dtype=dtype)
    size = math.prod(shape) * like.element_size()
    if not like.is_cpu or size < LARGE:
        return like.new_zeros(shape)
    memory = torch.from_numpy(np.zeros(size + 64, np.uint8))
    return memory[-memory.data_ptr() % 64 :][:size].view(like.dtype).view(*shape)


def _padded(table: Tensor, width: int, blank: int) -> Tensor:
    """The table (b n) with `width` places a row."""
    return F.pad(table, (0, width - table.shape[1]), value=blank)
