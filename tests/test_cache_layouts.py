"""Contiguous grows, a ring forgets, pages are shared and counted."""

import pytest
import torch

from regard.cache import FIRST, Contiguous, OutOfPages, Paged, Pool, Ring, Sinks
from regard.cache.paged import LARGE, untouched
from regard.errors import UsageError
from tests.marks import SPECS, append, held, make, marks

# --- contiguous ---------------------------------------------------------------------------------------------------


def test_contiguous_grows_by_doubling() -> None:
    cache = make("contiguous")
    assert isinstance(cache, Contiguous)
    sizes = []
    for _ in range(6):
        append(cache, 1)
        sizes.append(cache.capacity)
    assert sizes == [2, 2, 4, 4, 8, 8] and held(cache) == [marks(0, 6), marks(1, 6)]


# --- ring ---------------------------------------------------------------------------------------------------------


def test_ring_holds_window_and_chunk_less_one() -> None:
    cache = Ring(SPECS, 1, window=5, chunk=3)
    assert cache.capacity == 7 and cache.slots[0]["k"].shape == (1, 7, 2, 3)


@pytest.mark.parametrize("window, chunk", [(1, 1), (5, 1), (5, 3), (2, 6)])
def test_ring_never_loses_what_a_new_token_still_sees(window: int, chunk: int) -> None:
    cache = Ring(SPECS, 1, window=window, chunk=chunk)
    for step in range(9):
        size = 1 + step % chunk
        first = append(cache, size).index[0, 0].item()
        seen = range(max(0, first - window + 1), first + size)
        found = held(cache)[0]
        assert all(found[p] == p + 1 for p in seen)


def test_ring_one_slot_smaller_would_lose_a_token() -> None:
    cache = Ring(SPECS, 1, window=5, chunk=3)
    append(cache, 3), append(cache, 3), append(cache, 3)
    assert min(held(cache)[0]) == 6 - 5 + 1  # exactly what the chunk's first token sees


def test_ring_refuses_a_larger_chunk_and_says_what_to_do() -> None:
    cache = Ring(SPECS, 1, window=5, chunk=3)
    with pytest.raises(UsageError, match="chunks of at most 3, or make it with chunk=4"):
        append(cache, 4)
    append(cache, 3)
    assert held(cache) == [marks(0, 3)]


def test_ring_rewinds_a_chunk_and_refuses_more() -> None:
    """Past its capacity it holds window + chunk - 1 tokens: the next one needs window - 1 of them."""
    for drop, allowed in ((3, True), (4, False)):
        cache = Ring(SPECS, 1, window=5, chunk=3)
        for _ in range(4):
            append(cache, 3)
        if allowed:
            cache.rewind(drop)
            first = append(cache, 3).index[0, 0].item()
            found = held(cache)[0]
            assert all(found[p] == p + 1 for p in range(first - 4, first + 3))
        else:
            with pytest.raises(UsageError, match="3 tokens to spare"):
                cache.rewind(drop)
            assert cache.lengths.tolist() == [12]


def test_ring_rewinds_do_not_add_up_past_what_was_overwritten() -> None:
    cache = Ring(SPECS, 1, window=5, chunk=3)
    for _ in range(4):
        append(cache, 3)
    cache.rewind(2)
    with pytest.raises(UsageError, match="overwritten"):
        cache.rewind(2)


def test_ring_that_never_wrapped_rewinds_to_the_start() -> None:
    cache = Ring(SPECS, 1, window=5, chunk=3)
    append(cache, 3), append(cache, 3)
    cache.rewind(6)
    append(cache, 2)
    assert held(cache) == [marks(0, 2)]


def test_ring_that_is_just_full_rewinds_to_the_start() -> None:
    """Nothing is overwritten yet; with one token more the first is, which one at place 4 would see."""
    cache = Ring(SPECS, 1, window=5, chunk=3)
    for size in (3, 3, 1):
        append(cache, size)
    cache.rewind(7)
    assert held(cache) == [{}]
    for size in (3, 3, 2):
        append(cache, size)
    with pytest.raises(UsageError, match="overwritten"):
        cache.rewind(4)
    cache.rewind(3)
    append(cache, 2)
    assert all(held(cache)[0][p] == p + 1 for p in range(1, 7))


def test_rows_of_a_ring_remember_how_long_they_were() -> None:
    """Whatever rows go on, and beside whom."""
    cache = Ring(SPECS, 2, window=5, chunk=3)
    for lengths in ([3, 3], [3, 1], [3, 0], [3, 0]):
        append(cache, 3, lengths)
    rows = torch.tensor([1, 0])
    for new in (cache.fork(rows), cache.take(rows)):
        new.fork(torch.tensor([0])).rewind(4)
        new.rewind(torch.tensor([0, 3]))
        with pytest.raises(UsageError, match="overwritten"):
            new.rewind(torch.tensor([0, 1]))
        both = new.join(Ring(SPECS, 1, window=5, chunk=3))
        assert both.lengths.tolist() == [4, 9, 0]
        with pytest.raises(UsageError, match="overwritten"):
            both.rewind(torch.tensor([0, 1, 0]))


# --- sinks --------------------------------------------------------------------------------------------------------


def sinks(batch: int, window: int = 6) -> Sinks:
    """With a layer that keeps as `tests/marks.py` has it: nothing is turned."""
    return Sinks(SPECS, batch, window=window)


@pytest.mark.parametrize("window", [1, FIRST, FIRST + 1])
def test_sinks_have_room_for_others_too(window: int) -> None:
    if window > FIRST:
        assert sinks(1, window).capacity == 2 * window
        return
    with pytest.raises(UsageError, match="holds nothing"):
        sinks(1, window)


def test_sinks_past_their_window_take_one_token_at_a_time() -> None:
    cache = sinks(1)
    cache.begin(5)
    with pytest.raises(UsageError, match="one at a time"):
        cache.begin(2)
    cache.begin(1)


def test_sinks_show_the_first_tokens_and_the_last() -> None:
    """At neighbouring places, for rows of any length; when the room for two windows is full, what is still seen goes to
    its front."""
    cache, texts = sinks(2), list[list[int]]([[], []])

    def feed(lengths: list[int]) -> None:
        """Tokens that are marked with their number."""
        size = max(lengths)
        cache.begin(size, torch.tensor(lengths))
        mark = torch.tensor([[len(text) + i for i in range(size)] for text in texts]).float()
        for i, spec in enumerate(SPECS):
            each = {n: mark.view(2, size, *[1] * len(s)) for n, s in spec.token.items()}
            cache.layer(i).update(**{n: x.expand(-1, -1, *spec.token[n]) for n, x in each.items()})
        for text, n in zip(texts, lengths, strict=True):
            text += range(len(text), len(text) + n)

    def shown() -> None:
        for text, found in zip(texts, held(cache), strict=True):
            seen = text if len(text) <= 6 else text[:FIRST] + text[FIRST - 6 :]
            assert list(found.values()) == seen
            assert list(found) == list(range(max(found) - len(seen) + 1, max(found) + 1))

    for lengths in ([6, 3], *[[1, 1]] * 5, [0, 1], *[[1, 1]] * 14, *[[1, 0]] * 9):
        feed(lengths)
        shown()
        if lengths == [6, 3]:
            cache.rewind(torch.tensor([1, 0]))
            texts[0].pop()
    rows = torch.tensor([1, 0])
    for new in (cache.fork(rows), cache.take(rows)):
        assert held(new) == held(cache)[::-1]


# --- paged --------------------------------------------------------------------------------------------------------


def paged(batch: int = 2, **more: int) -> Paged:
    cache = make("paged", batch, **more)
    assert isinstance(cache, Paged)
    return cache


def test_paged_takes_pages_as_rows_need_them() -> None:
    cache = paged()
    append(cache, 4, [4, 2])
    assert [len(t) for t in cache.tables] == [2, 1] and sum(cache.users) == 3


def test_paged_zeroes_a_page_when_it_is_taken_again() -> None:
    """0 * NaN is NaN: what a former row left behind must not reach a masked slot."""
    cache = paged(pages=2)
    append(cache, 2)
    for store in cache.pool.stores:
        for x in store.values():
            x[:2] = torch.nan
    cache.free()
    append(cache, 2, [2, 1])
    assert all(torch.isfinite(x[:2]).all() for store in cache.pool.stores for x in store.values())


def test_paged_fork_shares_pages_until_one_writes() -> None:
    cache = paged(1)
    append(cache, 4)  # one full page, one with a single token
    branch = cache.fork(torch.tensor([0, 0]))
    full, partial = cache.tables[0]
    assert cache.users[full] == cache.users[partial] == 3
    assert branch.tables == [[full, partial]] * 2
    branch.begin(1)
    branch.layer(1).update(latent=torch.full((2, 1, 5), 7.0))
    assert all(t[0] == full and t[1] != partial for t in branch.tables)
    assert cache.users[full] == 3 and cache.users[partial] == 1
    assert held(cache) == [marks(0, 4)] and held(branch) == [marks(0, 4) | {4: 7.0}] * 2


def test_paged_fork_at_a_page_border_copies_nothing() -> None:
    cache = paged(1)
    append(cache, 3)
    branch = cache.fork(torch.tensor([0]))
    append(branch, 1)
    assert branch.tables[0][0] == cache.tables[0][0] and sum(u > 0 for u in cache.users) == 2


def test_paged_pages_are_all_free_again_in_the_end() -> None:
    cache = paged()
    append(cache, 4)
    branch = cache.fork(torch.tensor([1, 0, 1]))
    append(branch, 4)
    branch.rewind(5)
    cache.free()
    assert held(branch) == [marks(r, 3) for r in (1, 0, 1)]  # freeing one leaves the other whole
    branch.free()
    assert cache.users == [0] * 20


def test_paged_rewind_gives_pages_back() -> None:
    cache = paged(1)
    append(cache, 4), append(cache, 4)
    cache.rewind(5)
    assert sum(cache.users) == 1 and held(cache) == [marks(0, 3)]


def test_paged_out_of_pages_says_so_and_loses_nothing() -> None:
    cache = paged(1, pages=2)
    append(cache, 4)
    with pytest.raises(UsageError, match="all 2 pages of 3 tokens are in use; free a row, or make"):
        cache.begin(4)
    assert held(cache) == [marks(0, 4)] and cache.lengths.tolist() == [4]
    append(cache, 2)
    assert held(cache) == [marks(0, 6)]


def test_paged_out_of_pages_while_copying_keeps_the_counts_right() -> None:
    """A shared page that cannot be copied stays shared: the other row must not see what is written later."""
    cache = paged(1, pages=2)
    append(cache, 4)
    branch = cache.fork(torch.tensor([0]))
    with pytest.raises(UsageError, match="pages"):
        branch.begin(1)
    assert cache.users == [2, 2]
    branch.free()
    assert cache.users == [1, 1] and held(cache) == [marks(0, 4)]


def test_paged_out_of_pages_past_the_width_of_the_table() -> None:
    """A row has taken a page that the table had no place for when another finds none."""
    cache = paged(pages=3, page=128)
    append(cache, 128)
    with pytest.raises(OutOfPages):
        cache.begin(1)
    assert held(cache) == [marks(0, 128), marks(1, 128)] and cache.users == [1, 1, 0]


@pytest.mark.parametrize("page", [1, 16])
def test_paged_table_grows_with_the_text(page: int) -> None:
    """Past the places that it has at first, and past twice as many."""
    cache = paged(1, pages=600 // page, page=page)
    for size in (100, 28, 1, 127, 1, 200):
        append(cache, size)
        assert held(cache) == [marks(0, int(cache.lengths))]
        assert cache.table[0, : len(cache.tables[0])].tolist() == cache.tables[0]


def test_paged_row_adopts_beside_others() -> None:
    cache = paged(1, pages=6)
    append(cache, 6)
    cache.publish(0, ["a", "b"])
    one, two = (Paged(SPECS, batch, pool=cache.pool) for batch in (1, 2))
    assert one.adopt(0, ["a", "b"]) == two.adopt(1, ["a", "b"]) == 6
    assert one.even == 6 and two.even is None
    assert held(one) == [marks(0, 6)] and held(two) == [{}, marks(0, 6)]
    assert two.adopt(0, ["a", "b"]) == 6 and two.even == 6


@pytest.mark.parametrize("back", [1, 2, 3])
def test_paged_write_after_rewind_leaves_what_was_published_true(back: int) -> None:
    """Publish two pages, rewind into the second, write other tokens, adopt: the first page alone is found."""
    cache = paged(1, pages=4)
    append(cache, 6)
    cache.publish(0, ["a", "b"])
    cache.rewind(back)
    cache.begin(back)
    cache.layer(1).update(latent=torch.full((1, back, 5), 9.0))
    other = Paged(SPECS, 1, pool=cache.pool)
    found = other.adopt(0, ["a", "b"])
    assert held(other) == [marks(0, found)] and found >= 3
    written = {p: 9.0 for p in range(6 - back, 6)}
    assert held(cache) == [marks(0, 6) | written]


def test_paged_write_into_a_page_that_was_adopted_leaves_it_to_the_others() -> None:
    cache = paged(1, pages=4)
    append(cache, 6)
    cache.publish(0, ["a", "b"])
    other = Paged(SPECS, 1, pool=cache.pool)
    assert other.adopt(0, ["a", "b"]) == 6
    other.rewind(1)
    other.begin(1)
    other.layer(1).update(latent=torch.full((1, 1, 5), 9.0))
    third = Paged(SPECS, 1, pool=cache.pool)
    assert third.adopt(0, ["a", "b"]) == 6
    assert held(cache) == held(third) == [marks(0, 6)]


# --- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, LARGE // 4 - 1, LARGE // 4, LARGE // 4 + 5])
def test_memory_of_a_pool_is_zero_and_aligned(size: int) -> None:
    x = untouched((size, 1), "cpu", torch.float32)
    assert x.shape == (size, 1) and x.dtype == torch.float32 and x.data_ptr() % 64 == 0
    assert not x.count_nonzero()
    x[0], x[-1] = 1, 2
    assert x.sum() == 3


def test_two_pages_of_a_pool_are_nobodys() -> None:
    """A row that takes all that there are has neither of them; their memory is there."""
    pool = Pool(SPECS, 4, 3)
    taken = {pool.take() for _ in range(4)}
    assert taken == {0, 1, 2, 3} and {pool.blank, pool.scratch} == {4, 5}
    assert {len(x) for store in pool.stores for x in store.values()} == {6}


def test_memory_of_a_large_pool_is_counted_in_bytes() -> None:
    """Most of it is never touched."""
    x = untouched((2 * LARGE, 1), "cpu", torch.float16)
    assert x.shape == (2 * LARGE, 1) and x[-1] == 0


def test_ring_and_pages_hold_less_than_the_text() -> None:
    ring = Ring(SPECS, 1, window=4, chunk=1, dtype=torch.float16)
    for _ in range(50):
        append(ring, 1)
    assert sum(x.nbytes for store in ring.slots for x in store.values()) == 4 * 15 * 2
    pages = paged(1)
    append(pages, 4), append(pages, 3)
    assert sum(pages.users) * pages.page == 9  # 7 tokens, rounded up to pages
