"""Packed linear layers are F.linear, as exactly as their bits allow; without the ops they are still right."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels import linear
from regard.kernels.c.linear import NativeLinear, usable
from regard.kernels.linear import PRECISIONS, Int4, Int8, Packed, Plain, pack

# Gaussian weights and inputs: |y - xW| / |xW|. int8: steps of max/127 in W and x; int4: steps of range/15 in W
BOUND = {"fp32": 1e-6, "bf16": 5e-3, "int8": 0.015, "int4": 0.1}
precisions = pytest.mark.parametrize("precision", PRECISIONS)


def weights(n: int = 70, k: int = 96, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    return torch.randn(n, k) * k**-0.5, torch.randn(n) if bias else None


def error(y: Tensor, want: Tensor) -> float:
    return ((y.float() - want).norm() / want.norm()).item()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has no C code, and none of torch's ops."""
    monkeypatch.setattr(linear, "usable", lambda precision: False)
    monkeypatch.setattr(linear, "reads_nibbles", lambda: False)


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


@pytest.mark.usefixtures("bare")
def test_int8_plain_form_turns_the_weight_back() -> None:
    w, b = weights()
    layer, x = Int8(w, b), torch.randn(3, 96)
    back = layer.q.float() * layer.scale[:, None]
    assert (back - w).abs().amax(1).le(layer.scale * 0.501).all()  # half a step
    torch.testing.assert_close(layer(x), F.linear(x, back, b))


# --- 4 bits ---


def test_int4_weight_comes_back_within_half_a_step() -> None:
    w, b = weights(n=130)
    layer = Int4(w, b, None)
    back = layer.dense().t()[:130].float()
    step = w.unflatten(1, (-1, linear.GROUP)).aminmax(dim=-1)
    step = ((step.max - step.min) / 15)[..., None].expand(-1, -1, linear.GROUP).flatten(1)
    assert ((back - w).abs() <= 0.6 * step).all()  # 0.1: scale and zero are bf16


@pytest.mark.skipif(not linear.reads_nibbles(), reason="torch's 4-bit kernel needs AVX-512")
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_int4_kernel_equals_the_weight_turned_back(rows: int) -> None:
    layer = Int4(*weights(n=130), None)
    x = torch.randn(rows, 96)
    fast = layer(x)
    layer.fast = False
    assert error(fast, layer(x)) < 0.01  # both sum bf16 products, in another order


def test_int4_of_a_width_that_groups_do_not_divide_is_int8() -> None:
    assert type(pack(*weights(k=97), "int4")) is type(pack(*weights(k=97), "int8"))


def test_int4_of_a_constant_weight_is_exact() -> None:
    layer = Int4(torch.full((64, 32), 0.5), None, None)
    torch.testing.assert_close(layer.dense(), torch.full((32, 64), 0.5).bfloat16())
