"""Packed linear layers are F.linear, as exactly as their bits allow; without the ops they are still right."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels import linear
from regard.kernels.c.linear import NativeLinear, usable
from regard.kernels.linear import (
    PRECISIONS,
    TILE,
    Int4,
    Int8,
    Packed,
    Plain,
    feedback,
    pack,
    possible,
    turned,
)

# |y - xW| / |xW|. int8: steps of max/127 in W and x, turned; int4: steps of range/15 in W
BOUND = {"fp32": 1e-6, "bf16": 5e-3, "int8": 0.012, "int4": 0.1}
precisions = pytest.mark.parametrize("precision", PRECISIONS)


def weights(n: int = 70, k: int = 96, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    return torch.randn(n, k) * k**-0.5, torch.randn(n) if bias else None


def error(y: Tensor, want: Tensor) -> float:
    return ((y.float() - want).norm() / want.norm()).item()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has no C code."""
    monkeypatch.setattr(linear, "usable", lambda precision: False)


@precisions
@pytest.mark.parametrize("rows", [1, 2, 7, 33, 130])
def test_packed_layer_is_linear(precision: str, rows: int) -> None:
    for bias in (True, False):
        w, b = weights(bias=bias)
        x = torch.randn(rows, 96)
        layer = pack(w, b, precision)
        assert isinstance(layer, NativeLinear) == usable(precision)
        y = layer(x)
        assert y.dtype == x.dtype and error(y, F.linear(x, w, b)) < BOUND[precision]


@precisions
@pytest.mark.usefixtures("bare")
def test_packed_layer_is_linear_without_the_ops(precision: str) -> None:
    w, b = weights()
    x = torch.randn(2, 3, 96)
    layer = pack(w, b, precision)
    assert isinstance(layer, Plain | Int8 | Int4)
    assert error(layer(x), F.linear(x, w, b)) < BOUND[precision]


@precisions
@pytest.mark.parametrize("shape", [(96,), (5, 96), (1, 1, 96), (2, 3, 96), (2, 1, 3, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_layer_takes_any_shape_and_dtype(
    precision: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    w, b = weights()
    x = torch.randn(shape).to(dtype)
    want = F.linear(x.float(), w, b)
    y = pack(w, b, precision)(x)
    assert y.shape == want.shape and y.dtype == dtype
    assert error(y, want) < BOUND[precision] + 0.005  # the result's own rounding to bf16
    assert pack(w, b, precision, out=torch.float32)(x).dtype == torch.float32


@precisions
def test_packed_layer_takes_strided_input(precision: str) -> None:
    w, b = weights()
    x = torch.randn(4, 2, 192)[:, 0, ::2]
    want = F.linear(x, w, b)
    assert error(pack(w, b, precision)(x), want) < BOUND[precision]
    assert error(pack(w.t().contiguous().t(), b, precision)(x), want) < BOUND[precision]


@pytest.mark.usefixtures("bare")
def test_plain_layer_shares_its_weight() -> None:
    w, b = weights()
    assert pack(w, b, "fp32").weight.data_ptr() == w.data_ptr()
    half = w.bfloat16()
    assert pack(half, b, "bf16").weight.data_ptr() == half.data_ptr()


@pytest.mark.skipif(not linear.packs("cpu", torch.float32), reason="needs oneDNN")
def test_order_of_onednn_is_linear() -> None:
    w, b = weights()
    x = torch.randn(5, 96)
    torch.testing.assert_close(Packed(w, b)(x), F.linear(x, w, b), atol=2e-5, rtol=1e-5)


# --- 8 bits ---


def heavy(rows: int, k: int, kind: str) -> Tensor:
    """Activations as trained models have them: most of a row lies in a few channels, the same in all rows or not."""
    x = torch.randn(rows, k)
    if kind == "channels":
        x[:, :: k // 5] *= 40
    if kind == "scattered":
        x *= 1 + 40 * (torch.rand(rows, k) < 0.02)
    if kind == "cauchy":
        x = x / torch.randn(rows, k).abs().clamp(min=0.02)
    if kind == "one":
        x[:, 7] = 1000
    return x


HEAVY = ["none", "channels", "scattered", "cauchy", "one"]


@pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
@pytest.mark.parametrize("kind", HEAVY)
def test_int8_keeps_outliers_and_what_is_beside_them(kind: str, native: bool) -> None:
    """One scale for a row would leave whatever lies beside its largest number a few of the 255 steps."""
    if native and not usable("int8"):
        pytest.skip("no native products")
    (w, b), x = weights(96, 576), heavy(40, 576, kind)
    y, want = (NativeLinear(w, b, "int8") if native else Int8(w, b))(x), F.linear(x, w, b)
    assert error(y, want) < 0.009
    # Of the channels that are not large alone, against the size of a tile of them.
    x[:, :64], w[:, :64] = 0, 0
    assert (
        error((NativeLinear(w, b, "int8") if native else Int8(w, b))(x), F.linear(x, w, b)) < 0.009
    )


@pytest.mark.skipif(not usable("int8"), reason="no native products")
@pytest.mark.parametrize("kind", HEAVY)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_int8_of_c_is_the_plain_form(rows: int, kind: str) -> None:
    for n, k in ((70, 96), (33, 576), (16, 1)):
        (w, b), x = weights(n, k), heavy(rows, max(k, 8), kind)[:, :k]
        want = Int8(w, b)(x)
        assert error(NativeLinear(w, b, "int8")(x), want) < 1e-6  # sums in another order


def test_int8_row_does_not_suffer_from_its_neighbours() -> None:
    """One scale for the whole of x would leave the small rows two of their 256 steps."""
    w, b = weights(bias=False)
    x = torch.randn(6, 96)
    x[3] *= 100
    y, want = pack(w, b, "int8")(x), F.linear(x, w)
    for mine, right in zip(y, want, strict=True):
        assert error(mine, right) < BOUND["int8"]


def test_int8_row_of_zeros_gives_the_bias() -> None:
    w, b = weights()
    x = torch.randn(3, 96)
    x[1] = 0
    torch.testing.assert_close(pack(w, b, "int8")(x)[1], b)


def test_turning_keeps_products() -> None:
    x, w = torch.randn(3, 100).double(), torch.randn(7, 100).double()
    a, b = (turned(z).flatten(1) for z in (x, w))
    torch.testing.assert_close(a @ b.t() / TILE, x @ w.t())
    one = turned(torch.eye(TILE))[:, 0]
    assert one.abs().eq(1).all()  # an outlier is spread over all of its tile


@pytest.mark.usefixtures("bare")
def test_int8_plain_form_is_within_half_a_step() -> None:
    w, b = weights()
    layer, x = Int8(w, b), torch.randn(3, 96)
    h = turned(w)
    step = layer.scale.float()
    back = layer.q * step
    assert (back - h).abs().le(step * 0.501).all()
    assert step.le(h.abs().amax(-1, keepdim=True) / 127 * 1.008).all()  # bf16, rounded up
    rounded = layer.rounded(x).unflatten(-1, (-1, TILE)) * TILE
    most = turned(x).abs().amax(-1, keepdim=True)
    assert (rounded - turned(x)).abs().le(most / 127 * 0.501).all()
    torch.testing.assert_close(layer(x), F.linear(rounded.flatten(1) / TILE, back.flatten(1), b))


# --- 4 bits ---


def test_int4_weight_comes_back_within_half_a_step_but_for_what_is_cut() -> None:
    """No further than if the whole range of a group were kept, and by at most a quarter of it where less is kept."""
    w, b = weights(n=130)
    off = (Int4(w, b, None).dense().t()[:130].float() - w).unflatten(1, (-1, linear.GROUP))
    range_ = w.unflatten(1, (-1, linear.GROUP)).aminmax(dim=-1)
    step = ((range_.max - range_.min) / 15)[..., None]
    assert (off.square().mean(-1) <= step[..., 0].square() * 0.12).all()  # 1/12 on average
    inside = (off.abs() <= 0.6 * step).float().mean()  # 0.1: scale and zero are bf16
    assert inside > 0.95 and (off.abs() <= 2.5 * step).all()


@pytest.mark.skipif(not usable("int4"), reason="no native products")
@pytest.mark.parametrize("kind", HEAVY)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_int4_of_c_is_the_plain_form(rows: int, kind: str) -> None:
    for n, k in ((70, 96), (33, 576)):
        (w, b), x = weights(n, k), heavy(rows, k, kind)
        # Sums in another order; of bf16 numbers, where the CPU multiplies those.
        bound = 0.01 if linear.half_is_fast() else 1e-5
        assert error(NativeLinear(w, b, "int4")(x), Int4(w, b)(x)) < bound


def test_int4_of_a_width_that_groups_do_not_divide_is_int8() -> None:
    assert type(pack(*weights(k=97), "int4")) is type(pack(*weights(k=97), "int8"))


def test_int4_of_a_weight_that_stays_in_the_cache_is_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SMALL", 2**16)
    large, small = torch.randn(2048, 32), torch.randn(2047, 32)
    assert [possible("int4", w) for w in (large, small)] == ["int4", "int8"]
    assert [possible(p, small) for p in ("fp32", "bf16", "int8")] == ["fp32", "bf16", "int8"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("native", [True, False])
def test_int4_of_what_is_no_number_is_no_number(native: bool, bad: float) -> None:
    if native and not usable("int4"):
        pytest.skip("no native products: int4")
    w, _ = weights(bias=False)
    w[5, 40] = bad
    y = (NativeLinear(w, None, "int4") if native else Int4(w, None))(torch.randn(2, 96))
    assert y[:, 5].isnan().all() and y[:, :5].isfinite().all() and y[:, 6:].isfinite().all()


def test_int4_of_a_constant_weight_is_exact() -> None:
    layer = Int4(torch.full((64, 32), 0.5), None, None)
    torch.testing.assert_close(layer.dense(), torch.full((32, 64), 0.5).bfloat16())


def uneven(rows: int, k: int = 200) -> Tensor:
    """Inputs that lie near a few directions, as those of trained models do."""
    return torch.randn(rows, 6) @ torch.randn(6, k) * 3 + torch.randn(rows, k) * 0.3


@pytest.mark.parametrize("native", [True, False])
def test_int8_rounds_weights_for_the_inputs_they_meet(native: bool) -> None:
    """On other inputs from the same directions the error of the weights is less than half; the form in C is the
    plain one."""
    if native and not usable("int8"):
        pytest.skip("no native products: int8")
    torch.manual_seed(3)
    directions = uneven(1064)
    seen, others = directions[:1000], directions[1000:]
    w, h = torch.randn(90, 200), turned(seen)
    back = feedback(torch.einsum("nti,ntj->tij", h, h), "int8")
    near, shaped = Int8(w, None), Int8(w, None, None, back)
    exact = turned(others).flatten(-2) / TILE
    off = [
        error(F.linear(exact, (layer.q * layer.scale).flatten(1).float()), F.linear(others, w))
        for layer in (near, shaped)
    ]
    assert off[1] < off[0] / 2
    if native:
        y = NativeLinear(w, None, "int8", back=back)(others)
        assert error(y, shaped(others)) < 1e-5
        assert error(y, NativeLinear(w, None, "int8")(others)) > 1e-3


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("k", [192, 160])
def test_int4_rounds_weights_for_the_inputs_they_meet(k: int, native: bool) -> None:
    if native and not usable("int4"):
        pytest.skip("no native products: int4")
    torch.manual_seed(3)
    directions = uneven(1064, k)
    seen, others = directions[:1000], directions[1000:]
    w, h = torch.randn(90, k), turned(seen)
    back = feedback(torch.einsum("nti,ntj->tij", h, h), "int4")
    near, shaped = Int4(w, None, torch.float32), Int4(w, None, torch.float32, back)
    want = F.linear(others, w)
    assert error(shaped(others), want) < error(near(others), want) / 1.5
    if native:
        bound = 0.01 if linear.half_is_fast() else 1e-5
        assert error(NativeLinear(w, None, "int4", back=back)(others), shaped(others)) < bound


def test_tile_that_nothing_reaches_is_rounded_to_the_nearest() -> None:
    w, h = torch.randn(40, 128), turned(uneven(50, 128))
    h[:, 1] = 0
    back = feedback(torch.einsum("nti,ntj->tij", h, h), "int8")
    shaped, near = Int8(w, None, None, back), Int8(w, None)
    assert torch.equal(shaped.q[:, 1], near.q[:, 1]) and not torch.equal(shaped.q, near.q)
