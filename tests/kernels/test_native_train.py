"""GELU and causal attention in C: no further from float64 than torch's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

import regard
from regard.data.feed import Batch
from regard.fast.train import joined
from regard.kernels.c import train as native_train
from regard.kernels.c.train import bias_gelu, gelu_tanh, parted, takes_bias
from regard.kernels.fused import fused
from regard.training.objectives import causal

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


def three(form: object, *given: Tensor) -> list[Tensor]:
    x, bias = (each.clone().requires_grad_() for each in given[:2])
    y = form(x, bias)  # type: ignore[operator]
    return [y.detach(), *grad(y, [x, bias], given[2])]


@pytest.mark.parametrize("size", [(1, 32), (3, 50, 64), (2, 64, 96)])
def test_gelu_with_its_bias_is_as_near_to_float64_as_torchs(size: tuple[int, ...]) -> None:
    given = [torch.randn(size), torch.randn(size[-1]), torch.randn(size)]
    got, plain = three(bias_gelu, *given), lambda x, b: torch_gelu(x + b)
    peer, truth = three(plain, *given), three(plain, *(x.double() for x in given))
    for mine, theirs, want in zip(got, peer, truth):
        assert mine.shape == want.shape
        assert (mine - want).norm() <= 2 * (theirs - want).norm() + 5e-7 * want.norm()
    x, bias = given[:2]
    assert takes_bias(x, bias) and not takes_bias(x.double(), bias.double())
    with torch.no_grad():
        assert not takes_bias(x, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes_bias(x, bias)


@pytest.mark.usefixtures("threads")
def test_threads_change_no_bit_of_gelu_with_its_bias() -> None:
    given, found = [torch.randn(300, 64), torch.randn(64), torch.randn(300, 64)], []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append(three(bias_gelu, *given))
    assert all(a.equal(b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.parametrize("apart", [True, False])
def test_parted_gives_the_gradient_of_split(apart: bool) -> None:
    """Side by side in one memory, or each in its own: here with as many heads as features each."""
    x, slope = torch.randn(2, 5, 12, requires_grad=True), torch.randn(2, 5, 12)
    parts = parted(x, [4, 4, 4])
    assert all(a.equal(b) for a, b in zip(parts, x.split(4, -1)))
    given = [each.clone() if apart else each for each in slope.split(4, -1)]
    assert grad(parts, x, given)[0].equal(slope)


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 0, 2), (0, 2, 1)])
def test_parted_trusts_no_order_but_the_right_one(order: tuple[int, ...]) -> None:
    x, slope = torch.randn(2, 5, 12, requires_grad=True), torch.randn(2, 5, 12).split(4, -1)
    given = [slope[i] for i in order]
    assert grad(parted(x, [4, 4, 4]), x, given)[0].equal(torch.cat(given, -1))


def attention(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = fused(*inputs, None, causal=True, scale=scale)
    return [out.detach(), *grad(out, inputs, do)]


HEADS = [(2, 3, 64, 32), (3, 2, 1, 64), (2, 2, 37, 96), (1, 5, 100, 64), (1, 3, 33, 32)]


def laid(size: tuple[int, ...], dense: bool) -> list[Tensor]:
    """q, k, v and the slope as products leave them, or each on its own."""
    b, h, t, d = size
    if dense:
        return [torch.randn(size) for _ in range(4)]
    return [x.transpose(1, 2) for x in torch.randn(b, t, 4, h, d).unbind(2)]


def without_signs(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None) -> list[Tensor]:
    """The output and the gradients if nothing in their sums cancelled, in float64: what their
    roundings are shares of. A single token's gradients by q and k are zero, and yet a difference of
    two sums that round."""
    q, k, v, do = (x.double() for x in (q, k, v, do))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    p = (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    out = p @ v
    k, q, v, do = k.abs(), q.abs(), v.abs(), do.abs()
    ds = scale * p * (do @ v.mT + (do * out.abs()).sum(-1, keepdim=True))
    return [p @ v, ds @ k, ds.mT @ q, p.mT @ do]


@each_dtype
@pytest.mark.parametrize("size", HEADS)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("dense", [True, False])
def test_attention_is_as_near_to_float64_as_torchs(
    size: tuple[int, ...],
    scale: float | None,
    dense: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [x.to(dtype) for x in laid(size, dense)]
    got = attention(*given, scale)  # type: ignore[misc]
    truth = attention(*(x.double() for x in given), scale)  # type: ignore[misc]
    monkeypatch.setattr(native_train, "WIDE", 1000)
    peer = attention(*given, scale)  # type: ignore[misc]
    assert dtype is torch.float32 or got[0].equal(peer[0])  # forward in bf16 is torch's own
    terms = without_signs(*given, scale)  # type: ignore[misc]
    for mine, theirs, want, whole in zip(got, peer, truth, terms):
        assert mine.dtype is dtype and mine.shape == want.shape
        # the exponential is good to 5e-7, and each term of a sum is rounded once
        own = max(5e-7 * want.norm(), 2**-24 * whole.norm())
        assert (mine - want).norm() <= 2 * (theirs - want).norm() + own


@each_dtype
def test_attention_in_c_is_taken_and_a_wrong_one_would_be_seen(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, calls = [x.to(dtype) for x in laid((2, 2, 40, 32), True)], []
    real = native_train.CAUSAL.pack
    monkeypatch.setattr(
        native_train,
        "CAUSAL",
        type("Seen", (), {"pack": lambda *a: calls.append(a) or real(*a[:-1], 2 * a[-1])}),
    )
    wrong = attention(*given, None)  # type: ignore[misc]
    want = attention(*(x.double() for x in given), None)  # type: ignore[misc]
    assert len(calls) == (2 if dtype is torch.float32 else 1)  # in bf16 on the way back alone
    assert all((a - b).norm() > 0.1 * b.norm() for a, b in zip(wrong[1:], want[1:]))


def test_attention_without_gradients_is_that_of_training_but_in_bf16_torchs() -> None:
    q, k, v, _ = laid((2, 2, 40, 32), True)
    learning = fused(q, k, v, None, causal=True, scale=None)
    with torch.no_grad():
        assert fused(q, k, v, None, causal=True, scale=None).equal(learning)
        half = [x.bfloat16() for x in (q, k, v)]
        got = fused(*half, None, causal=True, scale=None)
        assert got.equal(F.scaled_dot_product_attention(*half, is_causal=True))


def test_no_number_in_one_query_stays_in_its_row() -> None:
    q, k, v, _ = laid((1, 2, 40, 32), False)
    q[0, 1, 7] = torch.nan
    # scores that overflow in the softmax only, and round by more than any exponential can hold
    q[0, 0] *= 1e30
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = fused(q, k, v, None, causal=True, scale=None)
    bad = out.isnan().any(-1)
    assert bad[0, 1, 7] and bad.sum() == 1
    assert grad(out.sum(), q)[0].isnan().any(-1).sum() == 1


@pytest.mark.usefixtures("threads")
def test_threads_change_no_bit_of_attention() -> None:
    given, found = laid((2, 3, 70, 64), False), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append(attention(*given, None))  # type: ignore[misc]
    assert all(a.equal(b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.usefixtures("threads")
@each_dtype
def test_threads_change_no_bit_of_gelu(dtype: torch.dtype) -> None:
    x, dy, found = torch.randn(50_000).to(dtype), torch.randn(50_000).to(dtype), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append(both(gelu_tanh, x, dy))
    assert all(a.equal(b) for other in found[1:] for a, b in zip(found[0], other))


def test_whole_model_learns_what_the_plain_one_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of GPT-2's layers with everything in C, against the same model in float64."""
    torch.manual_seed(0)
    plain = regard.build("gpt2", layers=2, dim=64, heads=2, vocab=50, max_len=48)
    batch, calls = Batch(*torch.randint(50, (2, 3, 40))), []
    model, real = joined(copy.deepcopy(plain)), native_train.call_of
    monkeypatch.setattr(native_train, "call_of", lambda name: calls.append(name) or real(name))

    def gradients(of: nn.Module) -> dict[str, Tensor]:
        total, count = causal(of, batch)
        (total / count).backward()
        return {name: p.grad for name, p in of.named_parameters()}

    got, want = gradients(model), gradients(plain.double())
    assert {"causal", "bias_gelu"} <= set(calls)
    for name, truth in want.items():
        torch.testing.assert_close(got[name].double(), truth, rtol=1e-4, atol=1e-6)
