"""Which examples meet and where they lie: laws of the orders and of packing."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data.feed import framed
from regard.data.read import DataError
from regard.data.samplers import (
    BucketSampler,
    PackSampler,
    ShuffleSampler,
    StreamSampler,
    best_fit,
    cut,
    draws,
    ranges,
)


def test_drawn_numbers_are_those_of_philox_whatever_numpy_does() -> None:
    # written down once: another version of numpy or another machine must not shuffle differently
    assert draws(5, 0, 3, 3).tolist() == DRAWN
    assert ShuffleSampler(8, 3, seed=5).take(2).tolist() == DEALT


DRAWN = [16588509541787650340, 7798703924310098251, 4457997086479036819]
DEALT = [6, 7]


@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 2**63 - 1))
def test_deck_deals_each_example_once_a_pass(n: int, rows: int, seed: int) -> None:
    deck = ShuffleSampler(n, rows, seed)
    for p in range(3):
        batches = [deck.take(k) for k in range(p * deck.epoch, (p + 1) * deck.epoch)]
        assert sorted(np.concatenate(batches)) == list(range(n))
        assert {len(batch) for batch in batches[:-1]} <= {min(rows, n)}
        assert 0 < len(batches[-1]) <= min(rows, n)
    assert np.concatenate(list(deck.fixed())).tolist() == list(range(n))


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=80),
    st.integers(30, 200),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(0, 9),
)
def test_buckets_keep_the_budget_and_each_example_once_a_pass(
    lengths: list[int], tokens: int, rows: int | None, seed: int
) -> None:
    sizes = np.array(lengths)
    buckets = BucketSampler(sizes, tokens, rows, seed)
    for p in range(2):
        batches = [buckets.take(p * buckets.epoch + i) for i in range(buckets.epoch)]
        assert sorted(np.concatenate(batches)) == list(range(len(sizes)))
        for batch in batches:
            assert 1 <= len(batch) <= (rows or len(sizes))
            assert len(batch) * sizes[batch].max() <= tokens
    assert sorted(np.concatenate(list(buckets.fixed()))) == list(range(len(sizes)))


def test_buckets_shuffle_what_meets_and_pad_little() -> None:
    sizes = np.random.default_rng(1).integers(5, 60, 3000)
    buckets = BucketSampler(sizes, 1000, None, seed=0)
    first, second = (
        [buckets.take(p * buckets.epoch + i) for i in range(buckets.epoch)] for p in (0, 1)
    )
    assert {tuple(sorted(b)) for b in first}.isdisjoint(tuple(sorted(b)) for b in second)
    assert [len(b) for b in first] != [len(b) for b in second]  # long and short ones come mixed
    padding = 1 - sizes.sum() / sum(len(b) * sizes[b].max() for b in first)
    assert padding < 0.06  # lengths in a bucket differ by a tenth at most


def test_budget_smaller_than_an_example_is_refused() -> None:
    with pytest.raises(DataError, match="an example has 30 tokens, a batch holds 20"):
        BucketSampler(np.array([3, 30]), 20, None, 0)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_best_fit_places_everything_and_wastes_little(sizes: list[int]) -> None:
    order, starts = best_fit(np.array(sizes), 20)
    assert sorted(order) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in order[a:b]) for a, b in pairwise(starts)]
    assert all(0 < load <= 20 for load in loads)
    simple, left = 0, 0  # next fit: a new row whenever the last one is full
    for size in sizes:
        simple, left = (simple, left - size) if size <= left else (simple + 1, 20 - size)
    assert len(loads) <= simple


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(0, 9))
def test_packs_of_every_pass_hold_each_piece_once(sizes: list[int], seed: int) -> None:
    packs = PackSampler(np.array(sizes), 20, 4, seed)
    for k in (None, 0, packs.epoch, 7 * packs.epoch):
        pieces, starts = packs.packing(k)
        assert sorted(pieces) == list(range(len(sizes))) and len(starts) == packs.n + 1
        assert all(0 < sum(sizes[i] for i in pieces[a:b]) <= 20 for a, b in pairwise(starts))


@given(st.integers(1, 70), st.integers(1, 12), st.integers(0, 1), st.integers(1, 5))
def test_tiles_of_every_pass_cover_each_token_once(
    n: int, length: int, extra: int, rows: int
) -> None:
    tiles = StreamSampler(n + extra, length, extra, rows, 3, random=False)
    for p in range(3):
        numbers = np.concatenate([tiles.take(p * tiles.epoch + i) for i in range(tiles.epoch)])
        sizes = np.minimum(length, n + tiles.first(p * tiles.epoch) - numbers)
        assert sorted(ranges(numbers, sizes) % n) == list(range(n))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(2, 9), st.integers(0, 1))
def test_split_pieces_cover_each_label_once(lengths: list[int], limit: int, overlap: int) -> None:
    pieces = cut(np.array(lengths), limit + overlap, "split", "x", overlap=overlap)
    assert pieces.size.max() <= limit + overlap
    for row, length in enumerate(lengths):
        mine = pieces.row == row
        places = ranges(pieces.start[mine] + overlap, pieces.size[mine] - overlap)
        assert places.tolist() == list(range(overlap, length))


def test_framed_rows_have_their_ends() -> None:
    rows = framed(np.arange(9), np.array([0, 4]), np.array([3, 1]), 7, -1, (70, 71), (80,))
    assert rows.tolist() == [[70, 71, 0, 1, 2, 80, -1], [70, 71, 4, 80, -1, -1, -1]]


def test_tiles_of_a_short_stream_are_one_row() -> None:
    tiles = StreamSampler(5, 10, 1, 4, 0, random=False)
    assert tiles.take(3).tolist() == [0] and [t.tolist() for t in tiles.fixed()] == [[0]]
