"""Caches: what goes in comes out, in every layout; rewind, fork, freeze and free touch nothing else."""

import pytest
import torch
from torch import Tensor

from regard.cache import LAYOUTS, Cache, CacheSpec, Paged
from regard.errors import UsageError
from tests.marks import OPTIONS, SPECS, append, entries, held, layouts, make, marks


@layouts
def test_new_cache_holds_nothing(layout: str) -> None:
    cache = make(layout)
    assert held(cache) == [{}, {}] and cache.span.size == 0 and cache.even == 0
    branch = cache.fork(torch.tensor([1]))
    append(branch, 2)
    assert held(branch) == [marks(0, 2)] and held(cache) == [{}, {}]


@layouts
def test_cache_of_no_rows_goes_on_with_those_that_join(layout: str) -> None:
    """As when all are done and others come."""
    cache = make(layout)
    append(cache, 4, [4, 2])
    empty = cache.take(torch.tensor([], dtype=torch.long))
    assert held(empty) == [] and empty.even == 0
    new = make(layout, pool=cache.pool) if isinstance(cache, Paged) else make(layout)
    append(new, 3)
    both = empty.join(new)
    append(both, 1)
    assert held(both) == [marks(0, 4), marks(1, 4)]


@layouts
def test_append_gives_back_every_token_at_its_position(layout: str) -> None:
    cache = make(layout)
    for size in (3, 1, 4, 2):
        append(cache, size)
    assert held(cache) == [marks(0, 10), marks(1, 10)]
    assert cache.lengths.tolist() == [10, 10] and cache.even == 10


@layouts
def test_append_returns_the_positions_of_the_new_tokens(layout: str) -> None:
    cache = make(layout)
    append(cache, 3)
    assert append(cache, 2).index.expand(2, -1).tolist() == [[3, 4], [3, 4]]


@layouts
def test_append_keeps_the_shape_of_each_entry(layout: str) -> None:
    cache = make(layout)
    cache.begin(3)
    first, second = entries(2, 3)
    kept, span = cache.layer(0).update(**first)
    assert kept["k"].shape == (2, span.size, 2, 3) and kept["v"].shape == (2, span.size, 4)
    assert cache.layer(1).update(**second)[0]["latent"].shape == (2, span.size, 5)


@layouts
def test_append_of_ragged_rows_keeps_each_rows_own_tokens(layout: str) -> None:
    cache = make(layout)
    span = append(cache, 4, [4, 2])
    assert span.index.tolist() == [[0, 1, 2, 3], [0, 1, -1, -1]]
    span = cache.begin(2)
    assert span.index.tolist() == [[4, 5], [2, 3]]
    cache.layer(1).update(latent=torch.full((2, 2, 5), 9.0))
    assert held(cache) == [marks(0, 4) | {4: 9.0, 5: 9.0}, marks(1, 2) | {2: 9.0, 3: 9.0}]
    assert cache.even is None


@layouts
def test_append_with_full_lengths_counts_as_even(layout: str) -> None:
    cache = make(layout)
    append(cache, 3, [3, 3])
    assert cache.even == 3 and held(cache) == [marks(0, 3), marks(1, 3)]


@layouts
@pytest.mark.parametrize("lengths", [[3, 1], [3, 0]])
def test_unwritten_slots_are_zero_and_have_no_position(layout: str, lengths: list[int]) -> None:
    cache = make(layout)
    append(cache, 3, lengths)
    stored, span = cache._read(1), cache.span
    empty = (span.index < 0).expand(2, -1)
    assert empty.any() and (stored["latent"][empty] == 0).all()


@layouts
def test_rewind_forgets_the_last_tokens(layout: str) -> None:
    cache = make(layout)
    append(cache, 4)
    append(cache, 3)
    cache.rewind(2)
    assert held(cache) == [marks(0, 5), marks(1, 5)] and cache.even == 5
    append(cache, 1)
    assert held(cache) == [marks(0, 6), marks(1, 6)]


@layouts
def test_rewind_by_row_and_back_to_even(layout: str) -> None:
    cache = make(layout)
    append(cache, 4, [4, 2])
    cache.rewind(torch.tensor([2, 0]))
    assert cache.even == 2 and held(cache) == [marks(0, 2), marks(1, 2)]


@layouts
def test_rewind_of_more_than_there_is_says_both_numbers(layout: str) -> None:
    cache = make(layout)
    append(cache, 3)
    with pytest.raises(UsageError, match="rewind 4 tokens: the shortest row holds 3"):
        cache.rewind(4)
    assert held(cache) == [marks(0, 3), marks(1, 3)]


@layouts
@pytest.mark.parametrize("drop", [-3, torch.tensor([1, -1])])
def test_rewind_never_goes_forward(layout: str, drop: int | torch.Tensor) -> None:
    cache = make(layout)
    append(cache, 4)
    with pytest.raises(UsageError, match="give how many of the last to forget"):
        cache.rewind(drop)
    assert held(cache) == [marks(0, 4), marks(1, 4)]


@layouts
@pytest.mark.parametrize("size", [0, -1])
def test_layout_of_no_size_is_refused_by_name(layout: str, size: int) -> None:
    for name in OPTIONS[layout]:
        with pytest.raises(UsageError, match=f"{name}={size} holds nothing; give {name}=1"):
            make(layout, **{name: size})


@layouts
def test_fork_copies_rows_and_leaves_the_old_cache_alone(layout: str) -> None:
    cache = make(layout)
    append(cache, 4)
    branch = cache.fork(torch.tensor([1, 0, 1]))
    branch.begin(1)
    branch.layer(1).update(latent=torch.full((3, 1, 5), 7.0))
    assert held(branch) == [marks(r, 4) | {4: 7.0} for r in (1, 0, 1)]
    assert held(cache) == [marks(0, 4), marks(1, 4)] and cache.lengths.tolist() == [4, 4]
    append(cache, 1)
    assert held(branch)[0][4] == 7.0 and held(cache)[0][4] == 5.0


@layouts
def test_fork_of_ragged_rows_keeps_their_lengths(layout: str) -> None:
    cache = make(layout)
    append(cache, 4, [4, 2])
    branch = cache.fork(torch.tensor([1, 1]))
    assert branch.lengths.tolist() == [2, 2] and held(branch) == [marks(1, 2), marks(1, 2)]
    assert branch.even == 2


@layouts
def test_frozen_cache_is_read_and_not_written(layout: str) -> None:
    cache = make(layout)
    append(cache, 3)
    cache.freeze()
    assert held(cache) == [marks(0, 3), marks(1, 3)]
    with pytest.raises(UsageError, match="frozen"):
        cache.begin(1)
    kept, _ = cache.layer(1).update(latent=torch.full((2, 3, 5), 9.0))
    assert (kept["latent"] != 9).all()


@layouts
def test_free_empties_the_cache_for_use_again(layout: str) -> None:
    cache = make(layout)
    append(cache, 4)
    cache.cross = make("contiguous")
    cache.free()
    assert cache.lengths.tolist() == [0, 0] and held(cache) == [{}, {}] and cache.cross is None
    append(cache, 2)
    assert held(cache) == [marks(0, 2), marks(1, 2)]


@layouts
def test_cross_cache_forks_with_its_owner(layout: str) -> None:
    cache = make(layout)
    cache.cross = make("contiguous")
    append(cache.cross, 3)
    cache.cross.freeze()
    branch = cache.fork(torch.tensor([1]))
    assert branch.cross is not None and held(branch.cross) == [marks(1, 3)] and branch.cross.frozen


@layouts
@pytest.mark.parametrize("rows", [[0, 1], [1, 0], [1], [0, 0, 1]])
def test_source_that_goes_on_as_it_is_is_not_copied(layout: str, rows: list[int]) -> None:
    """Not where its cache is given up: `take`; a fork has its own."""
    for kind in ("take", "fork"):
        cache = make(layout)
        append(cache, 2)
        cache.cross = source = make("contiguous")
        append(source, 3)
        new = getattr(cache, kind)(torch.tensor(rows))
        assert (new.cross is source) == (kind == "take" and rows == [0, 1])
        assert held(new.cross) == [marks(row, 3) for row in rows]
        assert held(new) == [marks(row, 2) for row in rows]
        assert (cache.cross is None) == (kind == "take")


@layouts
@pytest.mark.parametrize("rows", [[0, 1], [1, 0], [1, 1]])
def test_source_that_rows_share_stays_when_they_trade_places(layout: str, rows: list[int]) -> None:
    cache = make(layout)
    append(cache, 2)
    cache.cross = source = make("contiguous").take(torch.tensor([1]))
    new = cache.take(torch.tensor(rows))
    assert new.cross is source
    assert held(new) == [marks(row, 2) for row in rows]


@layouts
def test_state_of_fixed_size_is_kept_forked_and_freed(layout: str) -> None:
    cache = LAYOUTS[layout]([CacheSpec(state={"h": (3,)})], 2, **OPTIONS.get(layout, {}))
    cache.layer(0).state["h"] = torch.tensor([[1.0] * 3, [2.0] * 3])
    branch = cache.fork(torch.tensor([1, 1, 0]))
    assert branch.layer(0).state["h"][:, 0].tolist() == [2.0, 2.0, 1.0]
    branch.layer(0).state["h"] = torch.zeros(3, 3)
    assert cache.layer(0).state["h"][:, 0].tolist() == [1.0, 2.0]
    cache.free()
    assert (cache.layer(0).state["h"] == 0).all()


@layouts
def test_state_cannot_be_rewound(layout: str) -> None:
    cache = LAYOUTS[layout]([CacheSpec(state={"h": (3,)})], 2, **OPTIONS.get(layout, {}))
    cache.begin(2)
    with pytest.raises(UsageError, match="recurrent state cannot be rewound"):
        cache.rewind(1)
    cache.rewind(0)
    assert cache.lengths.tolist() == [2, 2]


@layouts
def test_state_takes_back_what_the_last_call_fed(layout: str) -> None:
    """Up to `back` tokens of each row, in several steps, whichever rows a fork goes on with."""
    spec = CacheSpec(state={"h": (1,)}, back=3)
    cache = LAYOUTS[layout]([spec], 2, **OPTIONS.get(layout, {}))

    def feed(cache: Cache, size: int, lengths: list[int]) -> None:
        """A state tells its row and how many tokens it has read."""
        before = cache.layer(0).state["h"]
        cache.begin(size, torch.tensor(lengths))

        def past(rows: Tensor, n: Tensor) -> dict[str, Tensor]:
            return {"h": before[rows] + n[:, None]}

        cache.layer(0).put({"h": before + torch.tensor(lengths)[:, None]}, past)

    def states(cache: Cache) -> list[float]:
        return cache.layer(0).state["h"][:, 0].tolist()

    cache.layer(0).state["h"] += torch.tensor([[10.0], [20.0]])
    feed(cache, 4, [4, 2])
    assert states(cache) == [14, 22]
    for drop in ([4, 0], [0, 3]):
        with pytest.raises(UsageError, match="takes back what the last call fed, 3 tokens at most"):
            cache.past(torch.tensor([0, 1]), torch.tensor(drop))
    branch = cache.fork(torch.tensor([1, 0, 0])).fork(torch.tensor([2, 0, 1]))
    branch.rewind(torch.tensor([1, 1, 3]))
    assert states(branch) == [13, 21, 11] and branch.lengths.tolist() == [3, 1, 1]
    branch.rewind(torch.tensor([2, 1, 0]))
    assert states(branch) == [11, 20, 11]
    cache.rewind(torch.tensor([3, 2]))
    assert states(cache) == [11, 20]
    feed(cache, 1, [1, 1])
    cache.rewind(1)
    assert states(cache) == [11, 20] and cache.lengths.tolist() == [1, 0]
    with pytest.raises(UsageError, match="what the last call fed"):
        cache.rewind(torch.tensor([1, 0]))
    # Of rows that joined nothing can be taken back.
    feed(cache, 1, [1, 1])
    both = cache.join(cache.fork(torch.tensor([1, 0])))
    assert states(both) == [12, 21, 21, 12]
    with pytest.raises(UsageError, match="what the last call fed"):
        both.rewind(1)


@layouts
def test_cache_stores_in_its_own_dtype(layout: str) -> None:
    cache = make(layout, dtype=torch.bfloat16)
    for lengths in (None, [1, 2]):
        cache.begin(2, None if lengths is None else torch.tensor(lengths))
        kept, _ = cache.layer(1).update(latent=torch.ones(2, 2, 5))
        assert kept["latent"].dtype == torch.bfloat16


def test_spec_counts_numbers_for_each_token() -> None:
    assert [spec.numbers() for spec in SPECS] == [2 * 3 + 4, 5]
    assert CacheSpec(state={"h": (8,)}).numbers() == 0
