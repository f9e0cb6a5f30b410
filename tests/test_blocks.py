"""The books of pages, alone: random operations against texts that every row must be able to read."""

import random
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest

from regard.cache.blocks import BlockTable, OutOfPages, PagePool

PAGE, ROWS = 3, 6
RARE = ["trade", "remember", "release", "clear"]


class Texts:
    """What rows have said, and slots of pages in which it must be found: a model of a cache."""

    def __init__(self, pages: int):
        self.pool, self.adopted = PagePool(pages, PAGE), 0
        self.pool.room = 40
        self.slots = [[-1] * PAGE for _ in range(pages)]
        self.rows: list[tuple[list[int], BlockTable]] = []

    def begin(self, text: list[int]) -> None:
        """A row with the pages of the longest published beginning."""
        table = BlockTable(self.pool)
        found = text[: PAGE * table.adopt(keys(text))]
        self.rows.append((found, table))
        self.adopted += len(found) > 0

    def write(self, text: list[int], table: BlockTable, new: list[int]) -> None:
        """New tokens, all or none."""
        have = len(table)
        if len(text) % PAGE and (copy := table.own(have - 1)):
            self.slots[copy[1]] = list(self.slots[copy[0]])
        table.reserve(len(text) + len(new))
        for page in table[have:]:
            assert page in self.pool.left or self.slots[page] == [-1] * PAGE
        assert table.edits(7, have) == {(7, i): table[i] for i in range(have, len(table))}
        for token in new:
            self.slots[table[len(text) // PAGE]][len(text) % PAGE] = token
            text.append(token)

    def hold(self) -> None:
        """Every row reads its own text; a key promises the tokens that its page has; the books are right."""
        self.pool.check(table for _, table in self.rows)
        for text, table in self.rows:
            assert len(table) == -(-len(text) // PAGE)
            assert [x for page in table for x in self.slots[page]][: len(text)] == text
        assert all(self.slots[page] == list(k[-PAGE:]) for k, page in self.pool.published.items())  # type: ignore[index]


def keys(text: list[int]) -> list[tuple[int, ...]]:
    """A full page is known by all the tokens up to its end."""
    return [tuple(text[:end]) for end in range(PAGE, len(text) + 1, PAGE)]


def states(size: int) -> Any:
    return [{"state": SimpleNamespace(nbytes=size)}]


def operate(rng: random.Random, found: Texts, past: list[list[int]]) -> None:
    """One operation at random. `past`: texts that were published."""
    text, table = rng.choice(found.rows) if found.rows else ([], BlockTable(found.pool))
    what = rng.choice(["write"] * 6 + ["publish"] * 3 + ["begin", "fork", "rewind"] * 2 + RARE)
    if not found.rows or (what == "begin" and len(found.rows) < ROWS):
        found.begin(rng.choice(past) if past else [])
    elif what == "write":
        # So few that rows say the same by themselves.
        found.write(text, table, rng.choices(range(3), k=rng.randint(1, 7)))
    elif what == "fork" and len(found.rows) < ROWS:
        size = rng.randint(0, len(text))
        found.rows.append((text[:size], table.fork(size)))
    elif what == "trade":
        # Rows go on from others, as beams do; a lost row's pages are free, but for what they have in common.
        chosen = [rng.choice(found.rows) for _ in found.rows]
        places = zip(*(table for _, table in found.rows))
        common = len(list(takewhile(lambda pages: len(set(pages)) == 1, places)))
        new = [(list(t), BlockTable(found.pool, pages)) for t, pages in chosen]
        for row in found.rows:
            uses = sum(x is row for x in chosen)
            row[1].hold(uses - 1, common) if uses else row[1].trim(common * PAGE)
        found.rows = new
    elif what == "rewind":
        del text[max(0, len(text) - rng.randint(0, 8)) :]
        table.trim(len(text))
    elif what == "publish":
        table.publish(keys(text), rng.randint(0, 1))
        past[:] = [*past[-4:], list(text)]
    elif what == "remember" and text[PAGE:]:
        found.pool.remember(keys(text)[0], states(rng.randint(1, 30)))
    elif what == "release":
        table.release()
        found.rows = [row for row in found.rows if row[1] is not table]
    elif what == "clear" and rng.random() < 0.05:
        found.pool.clear()
        found.rows = []


@pytest.mark.parametrize("seed", range(4))
def test_rows_read_what_they_wrote_after_any_operations(seed: int) -> None:
    rng, found, past, short = random.Random(seed), Texts(16), list[list[int]](), 0
    for _ in range(2500):
        rows = list(found.rows)
        sizes = [len(table) for _, table in rows]
        try:
            operate(rng, found, past)
        except OutOfPages:
            short += 1
            assert [len(table) for _, table in rows] == sizes and found.rows == rows
        found.hold()
    assert min(short, found.adopted) > 20
    for _, table in found.rows:
        table.release()
    found.pool.check()
    assert found.pool.available == 16


def test_a_pool_gives_what_was_never_held_first_and_published_pages_last() -> None:
    pool = PagePool(5, PAGE)
    row = BlockTable(pool)
    row.reserve(9)
    row.publish(["a", "b"])
    row.publish(["other"])
    assert row == [0, 1, 2] and pool.keys == {0: "a", 1: "b"}
    row.release()
    assert [pool.take() for _ in range(3)] == [3, 4, 2]
    # Of the published chain the end goes first.
    assert pool.take() == 1 and pool.known(["a", "b"]) == 1 and pool.published == {"a": 0}


def test_a_pool_knows_which_pages_were_held() -> None:
    pool = PagePool(4, PAGE)
    pool.take(), pool.drop(pool.take())
    assert pool.left == {1}
    pool.clear()
    assert pool.left == {0, 1} and list(pool.unused) == [0, 1, 2, 3]


def test_reserve_takes_all_or_none() -> None:
    pool = PagePool(4, PAGE)
    one, other = BlockTable(pool), BlockTable(pool)
    one.reserve(4)
    with pytest.raises(OutOfPages, match="all 4 pages of 3 tokens are in use; free a row, or make"):
        other.reserve(7)
    assert (one, other, pool.available) == ([0, 1], [], 2)
    pool.check([one, other])


def test_states_that_were_not_used_for_longest_make_room() -> None:
    pool = PagePool(4, PAGE)
    pool.room = 60
    row = BlockTable(pool)
    row.reserve(12)
    row.publish("abcd")
    for key in "abcxad":
        pool.remember(key, states(20))
    assert list(pool.states) == ["c", "a", "d"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda pool, row: row.pop(), "users of pages, and tables that have them: {2: (1, 0)}"),
        (lambda pool, row: pool.users.__setitem__(0, 2), "{0: (2, 1)}"),
        (lambda pool, row: pool.unused.pop(), "held, unused or idle, once: [0, 1, 2, 3]"),
        (lambda pool, row: pool.unused.append(0), "held, unused or idle, once: [0, 0, 1"),
        (lambda pool, row: pool.published.clear(), "keys of pages"),
        (lambda pool, row: (pool.keys.clear(), pool.published.clear()), "an idle page has no key"),
        (lambda pool, row: pool.idle.clear() or pool.unused.append(3), "an unused page has a key"),
        (lambda pool, row: pool.states.update(x=[]), "states of pages that nobody finds"),
    ],
)
def test_check_finds_books_that_are_wrong(spoil: Any, said: str) -> None:
    pool = PagePool(5, PAGE)
    row, other = BlockTable(pool), BlockTable(pool)
    row.reserve(9)
    row.publish("ab")
    other.reserve(3)
    other.publish("c")
    other.release()
    pool.check([row])
    spoil(pool, row)
    with pytest.raises(AssertionError) as error:
        pool.check([row])
    assert said in str(error.value)
