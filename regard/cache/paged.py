"""The paged layout: rows are lists of pages from one pool, shared until one of them writes.

A full page can be published under a key (a hash of all the tokens up to its end); a later row that begins with the same
tokens takes the page over instead of computing it. Published pages that no row holds are kept until space is needed,
the least recently used goes first. Of a model with recurrent states some pages also keep the states after their last
token, and a row begins with pages up to such a one.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.cache.base import Cache, CacheSpec, State, check_sizes, taken_back
from regard.errors import UsageError
from regard.mask import Span

# Tokens that a block table has places for at first, chosen for speed: steps over one of the same width are recorded
# once.
WIDTH = 128
LARGE = 2**25  # bytes that an allocator gets from the system each time


class OutOfPages(UsageError):
    """The pool has no page left: free a row, preempt one, or make a larger pool."""


class Pool:
    """The pages of all rows, and who holds them."""

    def __init__(
        self, specs: Sequence[CacheSpec], pages: int, page: int, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None
    ):  # fmt: skip
        self.page = page
        self.stores = [
            {
                name: untouched((pages + 2, page, *shape), device, dtype)
                for name, shape in spec.token.items()
            }
            for spec in specs
        ]
        # Two pages are nobody's: one stays zero, short rows point there; the other is written to and never read.
        self.blank, self.scratch = pages, pages + 1
        self.users = [0] * pages  # rows that hold a page, over all forks
        self.unused = deque(range(pages))
        self.left = set[int]()  # pages that were held; the others are zero, as they were made
        self.keys: dict[int, Hashable] = {}  # of published pages
        self.published: dict[Hashable, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()  # published, held by no row; oldest first
        # States after the last token of published pages, by key, oldest first; in as much memory as the pages take.
        self.states: OrderedDict[Hashable, list[State]] = OrderedDict()
        self.room = self.nbytes

    @property
    def available(self) -> int:
        return len(self.unused) + len(self.idle)

    def clear(self) -> None:
        """Nobody holds a page, and nothing is published."""
        self.left.update(page for page, users in enumerate(self.users) if users)
        self.users = [0] * len(self.users)
        self.unused = deque(range(len(self.users)))
        self.keys, self.published, self.idle = {}, {}, OrderedDict()
        self.states.clear()

    def take(self) -> int:
        """A page for one row, as it was left."""
        if self.unused:
            page = self.unused.popleft()
        elif self.idle:
            page, _ = self.idle.popitem(last=False)
            self.withdraw(page)
        else:
            raise OutOfPages(
                f"all {len(self.users)} pages of {self.page} tokens are in use; free a row, or make more pages"
            )
        self.users[page] = 1
        return page

    def copy(self, source: int | Tensor, target: int | Tensor) -> None:
        for store in self.stores:
            for x in store.values():
                x[target] = x[source]

    def clean(self, pages: list[int]) -> None:
        """Fill with zeros what others left in pages that were taken."""
        spent = [page for page in pages if page in self.left]
        for x in (x for store in self.stores for x in store.values() if spent):
            x.index_fill_(0, torch.tensor(spent, device=x.device), 0)

    def hold(self, page: int) -> None:
        self.users[page] += 1
        self.idle.pop(page, None)

    def drop(self, page: int) -> None:
        self.users[page] -= 1
        if self.users[page] == 0:
            self.left.add(page)
            if page in self.keys:
                self.idle[page] = None
            else:
                self.unused.append(page)

    def publish(self, page: int, key: Hashable) -> None:
        """Let later rows find a full page; the first to publish a key keeps it."""
        if key not in self.published and page not in self.keys:
            self.published[key], self.keys[page] = page, key

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for store in self.stores for x in store.values())

    def withdraw(self, page: int) -> None:
        """Later rows do not find the page any more."""
        if page in self.keys:
            key = self.keys.pop(page)
            del self.published[key]
            self.states.pop(key, None)

    def remember(self, key: Hashable, states: list[State]) -> None:
        """Let later rows begin after the page of this key; what was not used for longest makes room."""
        if key not in self.published:
            return
        self.states[key] = states
        self.states.move_to_end(key)
        sizes = [sum(x.nbytes for s in each for x in s.values()) for each in self.states.values()]
        while sum(sizes) > self.room:
            self.states.popitem(last=False)
            del sizes[0]


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
        self.tables: list[list[int]] = [[] for _ in range(batch)]
        # (b, pages), as the C code reads it.
        self._table = torch.zeros(batch, 0, dtype=torch.int32, device=self.device)
        self._edits: list[tuple[int, int, int]] = []  # row, place, page: not yet in _table
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
        for key in keys:
            page = pool.published[key]
            pool.hold(page)
            self._set(row, len(table), page)
        lengths = self.lengths.tolist()
        lengths[row] = len(table) * self.page
        self.lengths = torch.tensor(lengths, device=self.device)
        self.even = lengths[0] if len(set(lengths)) == 1 else None
        self._all = self._positions()
        return lengths[row]

    def known(self, keys: Sequence[Hashable]) -> int:
        """How many of the first pages are published."""
        return next((i for i, k in enumerate(keys) if k not in self.pool.published), len(keys))

    def state_after(self, row: int, size: int) -> list[State] | None:
        """A row's states after its first `size` tokens, if the last call gives them."""
        drop = int(self.lengths[row]) - size
        if not self.pasts or not 0 <= drop <= min(int(self._fed[row]), taken_back(self.specs)):
            return None
        rows = torch.tensor([row], device=self.device)
        return self.past(rows, torch.full_like(rows, drop))

    def publish(self, row: int, keys: Sequence[Hashable]) -> None:
        """Let later rows take over this row's full pages, one key a page."""
        for page, key in zip(self.tables[row], keys, strict=False):
            self.pool.publish(page, key)

    def _reserve(self, old: Tensor, added: Tensor, size: int) -> None:
        fresh: list[int] = []
        copies: list[tuple[int, int]] = []
        try:
            for row, (length, more) in enumerate(zip(old.tolist(), added.tolist(), strict=True)):
                table = self.tables[row]
                first, end = length // self.page, -(-(length + more) // self.page)
                if more and first < len(table):
                    copies += self._make_own(row, first)
                while len(table) < end:
                    fresh.append(self.pool.take())
                    self._set(row, len(table), fresh[-1])
        except OutOfPages:  # what was taken goes back
            self._trim()
            self._lay()
            raise
        finally:
            self.pool.clean(fresh)
            if copies:
                self.pool.copy(*torch.tensor(copies, device=self.device).T)

    def _make_own(self, row: int, place: int) -> list[tuple[int, int]]:
        """A page that is written now: a copy where other rows hold it, which is still to be made; and no key promises
        what it held."""
        page = self.tables[row][place]
        if self.users[page] == 1:
            self.pool.withdraw(page)
            return []
        self._set(row, place, self.pool.take())
        self.pool.drop(page)
        return [(page, self.tables[row][place])]

    def _trim(self) -> None:
        """Give back the pages past each row's length."""
        self._found = {}
        for row, length in enumerate(self.lengths.tolist()):
            table = self.tables[row]
            while len(table) > -(-length // self.page):
                self.pool.drop(table.pop())
                self._edits.append((row, len(table), self.pool.blank))

    def _set(self, row: int, place: int, page: int) -> None:
        self.tables[row][place:] = [page]  # the last page, or one more
        self._edits.append((row, place, page))

    def _lay(self) -> None:
        """Bring the tensor of page numbers up to date: only what changed, for a long row has many pages."""
        if not self._edits:
            return
        width, have = max(len(t) for t in self.tables), self._table.shape[1]
        if width > have:
            width = max(1 << (width - 1).bit_length(), WIDTH // self.page)
            self._table = _padded(self._table, width, self.pool.blank)
        last = {(row, place): page for row, place, page in self._edits}
        at = [(*k, page) for k, page in last.items() if k[1] < self._table.shape[1]]
        row, place, page = torch.tensor(at, dtype=torch.long, device=self.device).view(-1, 3).T
        self._table[row, place] = page.int()
        self._edits = []

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
            for page in table:
                self.pool.hold(page)
        return new

    def take(self, rows: Tensor, common: int = 0) -> Cache:
        """A row that goes on once keeps its pages as they are; only second copies and lost rows are counted, and of
        them what is not common."""
        new = self._branch(rows, self._fork_cross(rows, moved=True))
        uses = Counter(rows.tolist())
        for row, table in enumerate(self.tables):
            for page in reversed(table[common // self.page :]) if uses[row] != 1 else ():
                if uses[row]:
                    self.users[page] += uses[row] - 1
                else:
                    self.pool.drop(page)
            table.clear()
        return new

    def _fork_from(self, old: Cache, rows: Tensor) -> None:
        assert isinstance(old, Paged)
        self.tables = [list(old.tables[r]) for r in rows.tolist()]
        self._table, self._edits, self._found = old._table[rows], [], {}

    def _join_from(self, a: Cache, b: Cache) -> None:
        assert isinstance(a, Paged) and isinstance(b, Paged) and a.pool is b.pool
        self.tables, self._edits, self._found = a.tables + b.tables, [], {}
        width, blank = max(a._table.shape[1], b._table.shape[1]), self.pool.blank
        self._table = torch.cat([_padded(x._table, width, blank) for x in (a, b)])

    def release(self) -> None:
        """Back to front, so that of a published chain the end is forgotten before its beginning."""
        super().release()
        for table in self.tables:
            while table:
                self.pool.drop(table.pop())

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
    like = torch.empty(0, device=device, dtype=dtype)
    size = math.prod(shape) * like.element_size()
    if not like.is_cpu or size < LARGE:
        return like.new_zeros(shape)
    memory = torch.from_numpy(np.zeros(size + 64, np.uint8))
    return memory[-memory.data_ptr() % 64 :][:size].view(like.dtype).view(*shape)


def _padded(table: Tensor, width: int, blank: int) -> Tensor:
    """The table (b n) with `width` places a row."""
    return F.pad(table, (0, width - table.shape[1]), value=blank)
