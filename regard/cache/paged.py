"""The paged layout: rows are lists of pages from one pool, shared until one of them writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.cache.base import Cache, CacheSpec
from regard.config import UsageError
from regard.mask import Span


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
        try:
            for table, length, more in zip(self.tables, old.tolist(), added.tolist(), strict=True):
                first, end = length // self.page, -(-(length + more) // self.page)
                if more and first < len(table) and self.users[table[first]] > 1:
                    mine = self._take(copy=table[first])
                    self.users[table[first]] -= 1
                    table[first] = mine
                while len(table) < end:
                    table.append(self._take())
        except UsageError:  # out of pages: what was taken goes back
            self._trim()
            raise

    def _trim(self) -> None:
        """Give back the pages past each row's length."""
        for table, length in zip(self.tables, self.lengths.tolist(), strict=True):
            while len(table) > -(-length // self.page):
                self.users[table.pop()] -= 1

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
        self._trim()
        self._all = self._positions()

    def _free(self) -> None:
        self._trim()
