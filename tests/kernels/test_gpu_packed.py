"""Products with weights in fp8 and int4: what comes back, and by Triton's interpreter the kernels against the product
with what comes back. It runs no inline assembly: tests/gpu/test_graphs.py does."""

import os

import pytest
import torch
from torch import Tensor

from regard.kernels.linear import feedback, turned
from regard.kernels.packed import GROUPS, Packed, PackedLinear, possible, unpacked
from regard.kernels.rounded import LARGEST, pack
from regard.kernels.triton import linear as gpu_linear
from regard.kernels.triton import packed as gpu_packed
from regard.kernels.triton import wide as gpu_wide
from tests.kernels.test_gpu_kernels import close, each_dtype

interpreted = pytest.mark.skipif(
    gpu_linear.triton is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton and TRITON_INTERPRET=1: make test-kernels",
)
FORMS = [("fp8", 0), *(("int4", group) for group in GROUPS)]
each_form = pytest.mark.parametrize("kind, group", FORMS, ids=lambda x: str(x))


def packed(n: int, k: int, kind: str, group: int, dtype: torch.dtype) -> Packed:
    return pack((torch.randn(n, k) / 8).to(dtype), kind, group=group or None)


@each_form
def test_packed_weights_come_back_within_half_a_step(kind: str, group: int) -> None:
    w = torch.randn(24, 256) * torch.rand(24, 1)
    made = pack(w, kind, group=group or None)
    assert made.shape == w.shape and made.group == group and made.kind == kind
    off = (made.dense() - w).abs()
    if kind == "fp8":
        assert made.nbytes == w.numel() + 4 * len(w)
        # Three bits behind the first one; 2^-9 is the smallest number.
        assert (off <= w.abs() / 16 + made.scales[:, None] * 2**-10).all()
        assert torch.allclose(made.dense().abs().amax(1), w.abs().amax(1)) and LARGEST == 448
    else:
        assert made.nbytes == w.numel() // 2 + 4 * w.numel() // group
        scale = made.scales[..., 0].float().repeat_interleave(group, 1)
        low, high = (
            made.scales[..., 1].float().repeat_interleave(group, 1) + at * scale for at in (-8, 7)
        )
        inside = (w >= low) & (w <= high)
        assert inside.float().mean() > 0.9 and (off <= scale * 0.502 + 1e-6)[inside].all()


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_packed_weights_are_rounded_for_what_layers_read(kind: str) -> None:
    """A few directions of the inputs are large: errors fall beside them."""
    torch.manual_seed(0)
    w, mix = torch.randn(64, 128), torch.randn(128, 128) * torch.logspace(0, -2, 128)
    x = torch.randn(500, 128) @ mix.T
    h = turned(x)
    back = feedback(torch.einsum("nti,ntj->tij", h, h), "int4")
    errors = [(x @ (pack(w, kind, b).dense() - w).T).norm() for b in (None, back)]
    assert errors[1] < 0.8 * errors[0]


def test_what_cannot_be_packed_is_known() -> None:
    assert possible("int4", (8, 96)) and not possible("int4", (8, 80)) and possible("fp8", (8, 80))
    assert not possible("fp8", (8, 24)) and not possible("fp8", (4, 8, 32))
    assert [pack(torch.randn(4, k), "int4").group for k in (96, 192, 640)] == [32, 64, 128]


@each_form
def test_packed_linear_is_its_weight_brought_back(kind: str, group: int) -> None:
    w, bias, x = torch.randn(6, 128), torch.randn(6), torch.randn(2, 3, 128)
    layer = PackedLinear(pack(w, kind, group=group or None), bias)
    torch.testing.assert_close(layer(x), x @ layer.weight.T + bias)
    assert not list(layer.parameters(recurse=False))[1:] and layer.out_features == 6


@interpreted
@each_dtype
@each_form
def test_gpu_dense_is_the_plain_one(kind: str, group: int, dtype: torch.dtype) -> None:
    w = packed(5, 2304 if group < 256 else 256, kind, group, dtype)
    assert torch.equal(gpu_packed.dense(w, dtype), unpacked(w, dtype))


@interpreted
@each_dtype
@each_form
@pytest.mark.parametrize(
    "m, n, k, act, gated, normed, biased, added",
    [
        (1, 40, 384, "", False, True, False, False),
        (3, 50, 128, "", False, True, True, True),
        (2, 33, 640, "silu", True, True, False, False),
        (4, 20, 256, "gelu", True, False, True, False),
        (1, 20, 1152, "quick_gelu", False, False, False, True),
    ],
)
def test_gpu_linear_reads_packed_weights(
    m: int,
    n: int,
    k: int,
    act: str,
    gated: bool,
    normed: bool,
    biased: bool,
    added: bool,
    kind: str,
    group: int,
    dtype: torch.dtype,
) -> None:
    x, w = torch.randn(m, k).to(dtype), packed(n * (1 + gated), k, kind, group, dtype)
    bias = torch.randn(len(w)).to(dtype) if biased else None
    residual = torch.randn(m, n).to(dtype) if added else None
    weight = (torch.rand(k) + 0.5).to(dtype)
    norm = (weight, 1e-5, float(k == 640)) if normed else None
    more = {"act": act, "gated": gated}
    # In several steps of which the last is not full, too.
    blocks = (4, 64, 4) if m % 2 else None
    got = gpu_linear.fused(x, w, bias, norm=norm, residual=residual, blocks=blocks, **more)  # type: ignore[arg-type]
    assert got.dtype is dtype and got.shape == (m, n)

    def wide(y: Tensor | None) -> Tensor | None:
        return None if y is None else y.float()

    norm = (weight.float(), *norm[1:]) if norm else None
    whole = w.dense(torch.float32)
    want = gpu_linear.reference(
        x.float(), whole, wide(bias), norm=norm, residual=wide(residual), **more
    )  # type: ignore[arg-type]
    # Sums of up to 1,152 numbers, some of them near zero.
    scale = float(want.abs().max())
    close(got / scale, want / scale, dtype)


@interpreted
@each_dtype
@each_form
@pytest.mark.parametrize("m, k, n", [(8, 256, 40), (20, 384, 70), (64, 512, 33), (130, 128, 33)])
def test_gpu_parts_of_packed_weights_sum_to_the_product(
    m: int, k: int, n: int, kind: str, group: int, dtype: torch.dtype
) -> None:
    x, w = torch.randn(m, k).to(dtype), packed(n, k, kind, group, dtype)
    want = x.float() @ w.dense(torch.float32).T
    for split in (True, False):
        got = gpu_wide.parts(x, w, split)
        assert len(got) == 1 or split
        # W itself is rounded to float16 as it is read.
        close(got.sum(0) / 8, want / 8, dtype)


@interpreted
@each_dtype
@each_form
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_gpu_gated_product_reads_packed_weights(
    act: str, kind: str, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu_linear.SWITCH, "interpreted", True)
    x, w = torch.randn(33, 256).to(dtype), packed(2 * 70, 256, kind, group, dtype)
    got = gpu_wide.gated(x, w, None, act)
    want = gpu_wide.gated(x.float(), w.dense(torch.float32), None, act, fast=False)
    close(got / 16, want / 16, dtype)
