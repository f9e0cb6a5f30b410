"""Rows that come, go and trade places: every layout holds the same, whatever the order of operations."""

import random

import pytest
import torch
from torch import Tensor

from regard.cache import Cache, CacheSpec, Contiguous, OutOfPages, Paged, Pool

SPECS = [CacheSpec(token={"k": (2,), "v": (3,)}), CacheSpec(token={"latent": (4,)})]


def append(cache: Cache, lengths: list[int], start: int) -> None:
    """Entries that no two tokens share, the same for every layout."""
    size = max(lengths)
    cache.begin(size, torch.tensor(lengths))
    for i, spec in enumerate(SPECS):
        for name, shape in spec.token.items():
            n = cache.batch * size * torch.Size(shape).numel()
            x = torch.arange(n, dtype=torch.float64).view(cache.batch, size, *shape)
            cache._write(i, {name: x + 1000 * start})


def held(cache: Cache) -> list[list[Tensor]]:
    """For every row: all that is stored of its tokens, in order."""
    found = []
    for row, n in enumerate(cache.lengths.tolist()):
        found.append([x[row, :n].clone() for i in range(2) for x in cache._read(i).values()])
    return found


def same(a: Cache, b: Cache) -> bool:
    return all(
        torch.equal(x, y) for r, s in zip(held(a), held(b), strict=True) for x, y in zip(r, s)
    )


@pytest.mark.parametrize("seed", range(6))
def test_layouts_agree_after_any_operations(seed: int) -> None:
    """Append, rewind, reorder, copy, drop and join rows; paged and contiguous caches hold the same, and pages are
    counted right."""
    rng = random.Random(seed)
    pool = Pool(SPECS, 400, 3, dtype=torch.float64)
    where = {"dtype": torch.float64}

    def fresh(batch: int) -> list[Cache]:
        return [
            Paged(SPECS, batch, pool=pool, **where),
            Contiguous(SPECS, batch, capacity=2, **where),
        ]

    pair = fresh(3)
    for step in range(120):
        batch, lengths = pair[0].batch, pair[0].lengths.tolist()
        what = rng.choice(["append", "append", "rewind", "reorder", "fewer", "join", "fork"])
        if what == "append" and max(lengths) < 40:
            more = [rng.randint(0, 4) for _ in range(batch - 1)] + [rng.randint(1, 4)]
            for cache in pair:
                append(cache, more, step)
        elif what == "rewind":
            drop = torch.tensor([rng.randint(0, min(n, 5)) for n in lengths])
            for cache in pair:
                cache.rewind(drop)
        elif what in ("reorder", "fewer"):
            n = batch if what == "reorder" else max(1, batch - 1)
            rows = torch.tensor([rng.randrange(batch) for _ in range(n)])
            pair = [cache.take(rows) for cache in pair]
        elif what == "join" and batch < 8:
            new = fresh(2)
            for cache in new:
                append(
                    cache,
                    [3, rng.randint(1, 3)] if cache is new[0] else [3, int(new[0].lengths[1])],
                    step,
                )
            pair = [a.join(b) for a, b in zip(pair, new)]
        elif what == "fork":
            rows = torch.tensor([rng.randrange(batch) for _ in range(batch)])
            forks = [cache.fork(rows) for cache in pair]
            for cache in forks:
                append(cache, [1] * batch, step)
            assert same(*forks)
            forks[0].release()  # the old ones stay as they were
        assert same(*pair), (step, what)
        assert isinstance(pair[0], Paged)
        assert sum(pool.users) == sum(map(len, pair[0].tables))
        for row, table in enumerate(pair[0].tables):
            assert pair[0]._table[row, : len(table)].tolist() == table
            assert (
                pair[0]._table[row, len(table) :] == len(pool.users)
            ).all()  # blank, never stale
    pair[0].release()
    assert len(pool.unused) == 400 and not any(pool.users)


@pytest.mark.parametrize("seed", range(6))
def test_sources_follow_their_rows_and_are_counted_once(seed: int) -> None:
    """Rows come, go, trade places and share a source in groups; in pages as in rows each has its own, nothing is lost
    and nothing is given up twice."""
    rng = random.Random(seed)
    pool = Pool(SPECS, 400, 3, dtype=torch.float64)
    where = {"dtype": torch.float64}

    def fresh(step: int) -> list[Cache]:
        sizes, share, shared = [5, rng.randint(1, 5)], rng.randint(1, 3), rng.random() < 0.8
        found: list[Cache] = []
        for paged in (True, False):
            one, source = (
                Paged(SPECS, 2, pool=pool, **where) if paged else Contiguous(SPECS, 2, **where)
                for _ in range(2)
            )
            append(one, [2, 3], step)
            append(source, sizes, 1000 + step)
            source.freeze()
            one.cross = source
            found.append(one if share == 1 else one.spread(share, shared))
        return found

    def agree(a: Cache, b: Cache) -> bool:
        """The same tokens, and every row the same source."""
        assert a.cross is not None and b.cross is not None
        sources = [
            [held(c.cross)[row // (c.batch // c.cross.batch)] for row in range(c.batch)]
            for c in (a, b)
            if c.cross is not None
        ]
        pairs = zip(*sources, strict=True)
        return same(a, b) and all(torch.equal(x, y) for r, s in pairs for x, y in zip(r, s))

    pair = fresh(0)
    for step in range(60):
        batch, cross = pair[0].batch, pair[0].cross
        assert isinstance(cross, Paged)
        share = batch // cross.batch
        what = rng.choice(["append", "trade", "groups", "any", "join", "fork"])
        groups = [rng.randrange(cross.batch) for _ in range(rng.randint(1, cross.batch))]
        groups = groups if what == "groups" else list(range(cross.batch))
        rows = torch.tensor(
            [g * share + rng.randrange(share) for g in groups for _ in range(share)]
        )
        if what == "append":
            for cache in pair:
                append(cache, [1] * batch, step)
        elif what in ("trade", "groups"):
            pair = [cache.take(rows) for cache in pair]
            # Beams that trade places leave their sources alone.
            assert what == "groups" or pair[0].cross is cross
        elif what == "any" and batch > 2:
            rows = torch.tensor([rng.randrange(batch) for _ in range(batch - 1)])
            pair = [cache.take(rows) for cache in pair]
        elif what == "join" and batch < 8:
            pair = [a.join(b) for a, b in zip(pair, fresh(step))]
        elif what == "fork":
            forks = [cache.fork(rows) for cache in pair]
            assert agree(*forks)
            forks[0].release()  # the old ones stay as they were
        assert agree(*pair), (step, what)
        lists = [c.tables for c in (pair[0], pair[0].cross) if isinstance(c, Paged)]
        assert sum(pool.users) == sum(len(table) for tables in lists for table in tables)
    pair[0].release() if seed % 2 else pair[0].free()
    assert len(pool.unused) == 400 and not any(pool.users)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_take_of_beams_with_a_common_beginning_is_take(layout: str) -> None:
    """Beams trade places; their prompt need not be looked at."""
    rng = random.Random(0)

    def beams() -> Cache:
        options = {"pages": 200, "page": 3} if layout == "paged" else {"capacity": 4}
        kind = Paged if layout == "paged" else Contiguous
        cache: Cache = kind(SPECS, 2, dtype=torch.float64, **options)  # type: ignore[arg-type]
        append(cache, [8, 11], 0)
        return cache.spread(3, shared=False)

    plain, quick = beams(), beams()
    for step in range(1, 20):
        rows = torch.tensor([3 * g + rng.randrange(3) for g in (0, 1) for _ in range(3)])
        plain, quick = plain.take(rows), quick.take(rows, common=8)
        assert same(plain, quick)
        for cache in (plain, quick):
            append(cache, [1] * 6, step)
    if layout == "paged":
        assert isinstance(plain, Paged) and isinstance(quick, Paged)
        assert sorted(plain.users) == sorted(quick.users)
        quick.release()
        assert not any(quick.users)


def test_pages_that_ran_out_halfway_are_given_back() -> None:
    """Of three rows two find a page: none keeps it, and the cache reads as before."""
    cache = Paged(SPECS, 3, pages=8, page=3, dtype=torch.float64)
    append(cache, [6, 6, 6], 0)
    before = held(cache)
    with pytest.raises(OutOfPages, match="all 8 pages of 3 tokens are in use"):
        cache.begin(1)
    assert len(cache.pool.unused) == 2
    assert all(torch.equal(x, y) for r, s in zip(before, held(cache)) for x, y in zip(r, s))
    two = cache.take(torch.tensor([2, 0]))
    append(two, [1, 1], 1)
    assert two.lengths.tolist() == [7, 7]


def test_pool_forgets_the_states_that_nobody_used_the_longest() -> None:
    """As few as make room, whatever each weighs; a key that nobody finds has none, and a page that is withdrawn loses
    its own."""

    def states(count: int) -> list[dict[str, torch.Tensor]]:
        return [{}, {"h": torch.zeros(count - 1), "c": torch.zeros(1)}]

    pool = Pool([CacheSpec({"k": (1,)})], 5, 2)
    pool.room = 4 * 4
    for page, key in zip((pool.take() for _ in range(4)), "abcd", strict=True):
        pool.publish(page, key)
    for key, count, kept in (
        ("a", 3, "a"), ("b", 1, "ab"), ("c", 1, "bc"), ("b", 2, "cb"), ("d", 2, "bd"),
        ("nobody's", 1, "bd"), ("a", 4, "a"), ("c", 5, ""), ("d", 1, "d"),
    ):  # fmt: skip
        pool.remember(key, states(count))
        assert list(pool.states) == list(kept)
    pool.withdraw(pool.published["d"])
    assert not pool.states and pool.known(["d"]) == 0


def test_pool_forgets_the_end_of_a_published_chain_first() -> None:
    cache = Paged(SPECS, 1, pages=4, page=2, dtype=torch.float64)
    append(cache, [6], 0)
    cache.publish(0, ["a", "b", "c"])
    cache.release()
    for left in (["a", "b", "c"], ["a", "b"], ["a"]):
        cache.pool.take()
        assert sorted(cache.pool.published) == left
