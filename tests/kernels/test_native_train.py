"""GELU and the way back of causal attention in C: no further from float64 than torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad

from regard.kernels import native_train
from regard.kernels.fused import fused
from regard.kernels.native_train import gelu_tanh

pytestmark = pytest.mark.usefixtures("in_c")
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 7, 16, 33, 4096 * 16 + 5]  # the last one by several threads
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def torch_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def both(form: object, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = form(x)  # type: ignore[operator]
    return y.detach(), grad(y, x, dy)[0]


@each_dtype
@pytest.mark.parametrize("size", SIZES)
def test_gelu_is_as_near_to_float64_as_torchs(size: int, dtype: torch.dtype) -> None:
    x, dy = 4 * torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    truth = both(torch_gelu, x.double(), dy.double())
    got, peer = both(gelu_tanh, x, dy), both(torch_gelu, x, dy)
    for mine, theirs, want in zip(got, peer, truth):
        off, allowed = (mine - want).abs(), (theirs - want).abs().max() + 1e-6 * want.abs().max()
        assert mine.dtype is dtype and off.max() <= 2 * allowed


@each_dtype
def test_gelu_of_the_largest_and_of_what_is_no_number(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 40.0, -40.0, torch.inf, torch.nan, 1e-30]).to(dtype)
    got, want = gelu_tanh(x.requires_grad_()).detach(), torch_gelu(x.detach())
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got[5].isnan()


def test_gelu_is_torchs_where_no_gradient_is_recorded() -> None:
    x = torch.randn(100)
    frozen = gelu_tanh(x)
    with torch.no_grad():
        assert gelu_tanh(x).equal(torch_gelu(x))
    assert gelu_tanh(x.requires_grad_()).equal(frozen)  # whatever learns beside it
    strided = torch.randn(6, 8).t().requires_grad_()
    torch.testing.assert_close(gelu_tanh(strided), torch_gelu(strided))


def attention(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = fused(*inputs, None, is_causal=True, dropout_p=0.0, scale=scale)
    return [out.detach(), *grad(out, inputs, do)]


@pytest.mark.parametrize("size", [(2, 3, 64, 32), (1, 2, 1, 16), (2, 1, 37, 8), (1, 1, 100, 64)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_way_back_is_as_near_to_float64_as_torchs(
    size: tuple[int, ...], scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, h, t, d = size
    given = [torch.randn(b, t, h, d).transpose(1, 2).bfloat16() for _ in range(4)]
    got = attention(*given, scale)  # type: ignore[misc]
    truth = attention(*(x.double() for x in given), scale)  # type: ignore[misc]
    monkeypatch.setattr(native_train, "MOST", 0)
    peer = attention(*given, scale)  # type: ignore[misc]
    assert got[0].equal(peer[0])  # forward is torch's own
    for mine, theirs, want in zip(got[1:], peer[1:], truth[1:]):
        assert mine.dtype is torch.bfloat16 and mine.shape == want.shape
        assert (mine - want).norm() <= 1.2 * (theirs - want).norm() + 1e-5 * want.norm()


def test_way_back_is_taken_and_a_wrong_one_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [torch.randn(1, 2, 40, 16).bfloat16() for _ in range(4)]
    right = attention(*given, None)  # type: ignore[misc]
    whole = native_train.BACK.pack
    monkeypatch.setattr(
        native_train, "BACK", type("Wrong", (), {"pack": lambda *a: whole(*a[:-1], 2 * a[-1])})
    )
    assert not attention(*given, None)[1].equal(right[1])  # type: ignore[misc]


@pytest.mark.usefixtures("threads")
@each_dtype
def test_threads_change_no_bit_of_gelu(dtype: torch.dtype) -> None:
    x, dy, found = torch.randn(50_000).to(dtype), torch.randn(50_000).to(dtype), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append(both(gelu_tanh, x, dy))
    assert all(a.equal(b) for other in found[1:] for a, b in zip(found[0], other))
