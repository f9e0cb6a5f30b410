"""Native products say what their plain form says, on weights and inputs rounded as their precision rounds them."""

import pytest
import torch
from torch import Tensor

from regard.kernels.c import native
from regard.kernels.c.linear import ACTIVATIONS, ROOM, NativeLinear, plain, usable
from regard.kernels.c.rows import plain_lse_and_topk
from regard.kernels.linear import PRECISIONS, Int4, Int8, Packed, half_is_fast, packs, possible


@pytest.fixture(autouse=True)
def multiplied(request: pytest.FixtureRequest) -> None:
    """Numbers that the C code multiplies here."""
    precision = getattr(request.node, "callspec", None)
    kind = "fp32" if precision is None else precision.params.get("precision", "fp32")
    if not usable(kind):
        pytest.skip(f"no native products: {native.why() or f'{kind} on {native.form()}'}")


def rounded(x: Tensor, w: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """What the product sees of rows x and of W, in float64."""
    if precision == "int8":
        layer = Int8(w, None)
        return layer.rounded(x).double(), (layer.q.double() * layer.scale).flatten(1)
    if precision == "int4":
        w = (
            Int4(w, None)
            .dense(torch.bfloat16 if half_is_fast() else torch.float32)[:, : len(w)]
            .t()
        )
    half = precision == "bf16" or (precision == "int4" and half_is_fast())
    return (x.bfloat16().double(), w.bfloat16().double()) if half else (x.double(), w.double())


def made(m: int, k: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g) / k**0.5
    return x, w, torch.randn(n, generator=g)


def check(m: int, k: int, n: int, precision: str, act: str = "", gated: bool = False) -> None:
    x, w, b = made(m, k, n)
    add = torch.randn(m, n // 2 if gated else n)
    if possible(precision, w) != precision:
        return
    want = plain(*rounded(x, w, precision), b.double(), act, gated, add.double())
    got = NativeLinear(w, b, precision, act=act, gated=gated)(x, add)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)  # float32 sums


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("m", [1, 2, 7, 8, 16, 17, 33, 129])
def test_native_linear_matches_plain_in_odd_sizes(m: int, precision: str) -> None:
    for k in (1, 31, 64, 100, 768):
        for n in (1, 15, 16, 50, 257):
            check(m, k, n, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_native_linear_matches_plain_with_what_follows(
    act: str, gated: bool, precision: str
) -> None:
    for m in (1, 5, 40):
        for n in (2, 30, 32, 70, 512):
            check(m, 96, n, precision, act, gated)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_large_outputs_match_plain(precision: str) -> None:
    check(40, 32, 32000, precision)  # written past the cache


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_best_outputs_are_those_of_the_whole_product(precision: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for m, k, n, many in ((1, 32, 33, 1), (3, 96, 513, 5), (129, 64, 3000, 8)):
            x, w, b = made(m, k, n)
            # Equals, far from each other: the smaller id comes first.
            w[n - 5], b[n - 5], b[3] = w[3], 4.0, 4.0
            layer = NativeLinear(w, b, precision)
            norm, values, ids = layer.best(x, many, (0, n - 1))
            want = plain_lse_and_topk(layer(x), many, (0, n - 1))
            assert torch.equal(values, want[1]) and torch.equal(ids, want[2])
            torch.testing.assert_close(norm, want[0], rtol=3e-7, atol=0)
            assert torch.equal(layer.best(x, many, (0, n - 1))[0], norm)
        x[1, 3], x[4, 5] = torch.nan, torch.inf
        spoilt = layer.best(x, many, (0, n - 1))
        others = [i for i in range(m) if i not in (1, 4)]
        assert not spoilt[0][[1, 4]].isfinite().any()
        assert all(
            torch.equal(a[others], c[others])
            for a, c in zip(spoilt, (norm, values, ids), strict=True)
        )
        assert ((spoilt[2] > 0) & (spoilt[2] < n - 1)).all()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_that_are_no_numbers_spoil_no_others(precision: str) -> None:
    x, w, b = made(6, 64, 40)
    layer = NativeLinear(w, b, precision)
    good = layer(x)
    x[1, 3], x[4, 5] = torch.nan, torch.inf
    got = layer(x)
    assert got[1].isnan().all() and not got[4].isfinite().any()
    assert torch.equal(got[[0, 2, 3, 5]], good[[0, 2, 3, 5]])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_zero_row_gives_the_bias(precision: str) -> None:
    _, w, b = made(1, 64, 33)
    torch.testing.assert_close(NativeLinear(w, b, precision)(torch.zeros(3, 64)), b.expand(3, -1))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_residual_may_be_strided_or_of_another_dtype(precision: str) -> None:
    x, w, _ = made(4, 32, 48)
    layer, add = NativeLinear(w, None, precision), torch.randn(48, 4).t()
    assert torch.equal(layer(x, add), layer(x, add.contiguous()))
    assert torch.equal(layer(x.t().contiguous().t()), layer(x))
    assert torch.equal(layer(x.double()[None]), layer(x)[None])
    assert layer(x[:0]).shape == (0, 48)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_is_the_same_in_any_company(precision: str) -> None:
    x, w, b = made(70, 96, 64)
    layer = NativeLinear(w, b, precision)
    whole = layer(x)
    for rows in (1, 3, 16, 33):
        assert torch.equal(layer(x[:rows]), whole[:rows])


@pytest.mark.parametrize("threads", [1, 2])
def test_tiles_of_torch_are_left_as_they_were(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, w, b = made(64, 256, 512)
        ours = [NativeLinear(w, b, p) for p in PRECISIONS if usable(p)]
        first = [layer(x) for layer in ours]
        theirs = Packed(w.bfloat16(), None) if packs("cpu", torch.bfloat16) else None
        want = None if theirs is None else theirs(x.bfloat16())
        for _ in range(3):
            assert all(torch.equal(layer(x), y) for layer, y in zip(ours, first, strict=True))
            assert theirs is None or torch.equal(theirs(x.bfloat16()), want)
            torch.mm(x.bfloat16(), w.bfloat16().t())
    finally:
        torch.set_num_threads(before)


def test_layers_share_a_stretch_of_memory() -> None:
    a, b = ROOM.take(1000), ROOM.take(64)
    assert a.data_ptr() % 64 == b.data_ptr() % 64 == 0 and len(a) == 1024
    assert len(ROOM.take(2**26)) == 2**26
