"""Bytes between slow and fast memory: what is counted is what the formulas say, and what is computed is attention."""

from typing import Any

import pytest
import torch

from regard.attention.core import Terms, reference
from regard.attention.online import online
from regard.errors import UsageError
from regard.learn.explain import find
from regard.learn.traffic import kept, plain, plain_bytes, tiled, tiled_bytes
from regard.mask import Causal, Span, Visible
from tests.wide import crossed

SIZES = [(48, 8), (1, 4), (50, 3), (64, 16)]
TILES = [(16, 16), (7, 5), (5, 7), (64, 64), (1, 64), (64, 1), (24, 16)]


def memory(n: int, d: int) -> dict[str, torch.Tensor]:
    return {name: torch.randn(1, 1, n, d) for name in ("q", "k", "v", "do")}


def mask(n: int, causal: bool) -> Visible | None:
    return Visible(Causal(), Span.run(0, n), Span.run(0, n)) if causal else None


@pytest.mark.parametrize("size, tile, causal", crossed(SIZES, TILES, [False, True]))
def test_traffic_of_tiles_is_what_the_formula_says(
    size: tuple[int, int], tile: tuple[int, int], causal: bool
) -> None:
    counted = tiled(memory(*size), 0.5, mask(size[0], causal), tile)
    assert tuple(traffic.total() for traffic in counted) == tiled_bytes(*size, tile, causal)


@pytest.mark.parametrize("n, d", SIZES)
def test_traffic_of_plain_attention_is_what_the_formula_says(n: int, d: int) -> None:
    assert tuple(traffic.total() for traffic in plain(memory(n, d), 0.5)) == plain_bytes(n, d)


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_counted_is_attention_with_its_gradients(causal: bool) -> None:
    """Both ways are counted while they compute; the reference and autograd say what."""
    first, visible = memory(50, 8), mask(50, causal)
    inputs = [first[name].clone().requires_grad_() for name in "qkv"]
    out = reference(*inputs, visible, Terms(0.5))
    want = [out, *torch.autograd.grad(out, inputs, first["do"])]
    for run in (plain, lambda *given: tiled(*given, (7, 16))):
        found = dict(first)
        run(found, 0.5, visible)
        for name, other in zip(("o", "dq", "dk", "dv"), want):
            torch.testing.assert_close(found[name], other)


@pytest.mark.parametrize("n, d", SIZES)
def test_tiles_keep_no_weights(n: int, d: int) -> None:
    assert kept(online, n, d) == 4 * (4 * n * d + n)
    assert kept(reference, n, d) == 4 * (3 * n * d + n * n)


def test_larger_tiles_move_less_and_hidden_ones_nothing() -> None:
    counted, formula, parts, stored = find("flash-attention").tables({"tokens": [200], "dim": [8]})
    columns = list(counted.columns)
    assert counted.rows == formula.rows and columns == list(formula.columns)

    def column(name: str) -> list[Any]:
        return [row[columns.index(name)] for row in counted.rows]

    for way in ("forward", "backward"):
        tiles, causal = column(f"{way}, tiles"), column(f"{way}, causal")
        assert tiles == sorted(tiles, reverse=True)
        # The last one holds everything: nothing is hidden from all of it.
        assert all(a < b for a, b in zip(causal[:-1], tiles[:-1])) and causal[-1] == tiles[-1]
        assert len(set(column(f"{way}, plain"))) == 1
    # Of the smallest tiles the third table has all bytes, by tensor.
    assert sum(map(sum, (row[1:3] for row in parts.rows))) == column("forward, tiles")[0]
    assert sum(map(sum, (row[3:5] for row in parts.rows))) == column("backward, tiles")[0]
    for row in stored.rows:
        assert row[1:3] == row[3:5]


def test_half_as_many_queries_in_a_tile_as_a_head_is_wide_is_no_gain() -> None:
    """K and V are then read as often as scores and weights would be written and read."""
    n, d = 4096, 64
    moved = {b: tiled_bytes(n, d, (b, b), causal=False)[0] for b in (16, 32, 128)}
    assert moved[16] > 1.9 * plain_bytes(n, d)[0] and moved[128] < 0.3 * plain_bytes(n, d)[0]
    assert moved[32] == pytest.approx(plain_bytes(n, d)[0], rel=0.02)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"block": [1]}, "--block is 1; give a whole number from 8 to 4,096"),
        ({"tokens": [10**6]}, "from 2 to 2,048"),
    ],
)
def test_sizes_that_would_take_too_long_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find("flash-attention").tables(given)
