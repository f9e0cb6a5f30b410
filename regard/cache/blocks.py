"""Who holds which page: the books of a pool, and the pages of one row.

A row is a list of pages, shared with others until one of them writes. A full page can be published under a key (a hash
of all the tokens up to its end); a later row that begins with the same tokens takes the page over instead of computing
it. Published pages that no row holds are kept until space is needed, the least recently used goes first. Of a model
with recurrent states some pages also keep the states after their last token.

What lies in the pages, and on which device, is not known here: `Paged` and the slots of a graph keep the same books.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence

from regard.cache.base import State
from regard.errors import UsageError


class OutOfPages(UsageError):
    """The pool has no page left: free a row, preempt one, or make a larger pool."""


class PagePool:
    """How many rows hold each page, which are free, and which can be found by a key."""

    def __init__(self, pages: int, page: int):
        self.page = page  # tokens
        self.users = [0] * pages  # rows that hold a page, over all forks
        self.unused = deque(range(pages))
        self.left = set[int]()  # pages that were held; the others are as they were made
        self.keys: dict[int, Hashable] = {}  # of published pages
        self.published: dict[Hashable, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()  # published, held by no row; oldest first
        # States after the last token of published pages, by key, oldest first; and bytes for them.
        self.states: OrderedDict[Hashable, list[State]] = OrderedDict()
        self.room = 0

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

    def hold(self, page: int, times: int = 1) -> None:
        self.users[page] += times
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

    def known(self, keys: Sequence[Hashable]) -> int:
        """How many of the first pages are published."""
        return next((i for i, key in enumerate(keys) if key not in self.published), len(keys))

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

    def check(self, tables: Iterable[Iterable[int]] = ()) -> None:
        """Assert that the books are right, where these are all the tables that there are (none while nothing runs)."""
        held, pages = Counter(page for table in tables for page in table), range(len(self.users))
        wrong = {i: (self.users[i], held[i]) for i in pages if self.users[i] != held[i]}
        assert not wrong, f"users of pages, and tables that have them: {wrong}"
        found = sorted([*held, *self.unused, *self.idle])
        assert found == list(pages), f"not each page is held, unused or idle, once: {found}"
        assert {key: page for page, key in self.keys.items()} == self.published, "keys of pages"
        assert self.idle.keys() <= self.keys.keys(), "an idle page has no key"
        assert self.keys.keys().isdisjoint(self.unused), "an unused page has a key"
        assert self.states.keys() <= self.published.keys(), "states of pages that nobody finds"


class BlockTable(list[int]):
    """The pages of one row, in order. It is a list, since steps read it once a row."""

    __slots__ = ("pool",)

    def __init__(self, pool: PagePool, pages: Iterable[int] = ()):
        super().__init__(pages)
        self.pool = pool

    def adopt(self, keys: Sequence[Hashable]) -> int:
        """Begin with the published pages of the longest run of `keys`; how many there are."""
        for key in keys[: self.pool.known(keys)]:
            self.append(self.pool.published[key])
            self.pool.hold(self[-1])
        return len(self)

    def reserve(self, tokens: int) -> None:
        """Pages for so many tokens in all; if there are too few, none is taken."""
        have = len(self)
        try:
            while len(self) * self.pool.page < tokens:
                self.append(self.pool.take())
        except OutOfPages:
            self.trim(have * self.pool.page)
            raise

    def own(self, place: int) -> tuple[int, int] | None:
        """Before a page is written: no key promises what it held, and where other rows hold it, it is another page from
        here on. Gives the copy (from, to) that is still to be made."""
        page, pool = self[place], self.pool
        if pool.users[page] == 1:
            pool.withdraw(page)
            return None
        self[place] = pool.take()
        pool.drop(page)
        return page, self[place]

    def fork(self, tokens: int) -> BlockTable:
        """A row that has the first tokens of this one, in the same pages."""
        new = BlockTable(self.pool, self[: -(-tokens // self.pool.page)])
        new.hold()
        return new

    def hold(self, times: int = 1, first: int = 0) -> None:
        """Other tables have the same pages, from place `first` on."""
        hold = self.pool.hold
        for page in self[first:]:
            hold(page, times)

    def trim(self, tokens: int) -> None:
        """Give back the pages past so many tokens, back to front: of a published chain the end is forgotten before its
        beginning."""
        keep, drop = -(-tokens // self.pool.page), self.pool.drop
        while len(self) > keep:
            drop(self.pop())

    def release(self) -> None:
        self.trim(0)

    def publish(self, keys: Sequence[Hashable], first: int = 0) -> None:
        """Let later rows take over full pages, one key a page, from place `first` on."""
        for page, key in zip(self[first:], keys[first:], strict=False):
            self.pool.publish(page, key)

    def edits(self, row: int, first: int = 0) -> dict[tuple[int, int], int]:
        """The pages from place `first` on, by (row, place) of a table on a device."""
        return {(row, place): page for place, page in enumerate(self[first:], first)}
