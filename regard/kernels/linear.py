"""Linear layers for inference, y = x W^T + b: W packed once for this CPU, in 32, 16, 8 or 4 bits.

    python bench/linear.py      times them against F.linear

Where the C code multiplies such numbers, it does (`NativeLinear`); elsewhere the plain form is F.linear, on weights
turned back from 8 or 4 bits at each call. Everything that torch calls private is in this file. A layer takes x of any
dtype and returns `out`, or else the dtype of x.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.c import native
from regard.kernels.c.linear import Layer, NativeLinear, usable

PRECISIONS = ("fp32", "bf16", "int8", "int4")
DENSE = 40  # rows above which a 4-bit W is better turned back first
GROUP = 32  # inputs that share a scale in 4 bits
# Where oneDNN lacks a product, torch says so once with twenty lines of C++ frames, and goes on without it.
warnings.filterwarnings("ignore", message=".*failed, switching to (baddbmm|BLAS gemm)")


def pack(
    weight: Tensor, bias: Tensor | None, precision: str, out: torch.dtype | None = None
) -> Layer:
    """A layer for W (n k) and b (n), fast at any number of rows. The plain form does not copy a W that stays as it is.
    4 bits need groups of inputs: what they do not divide has 8."""
    assert precision in PRECISIONS, precision
    if precision == "int4" and weight.shape[1] % GROUP == 0:
        return Int4(weight, bias, out)
    precision = "int8" if precision == "int4" else precision
    if weight.is_cpu and usable(precision):
        return NativeLinear(weight, bias, precision, out=out)
    if precision == "int8":
        return Int8(weight, bias, out)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return Plain(weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype), out)


class Plain(Layer):
    """F.linear in W's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out: torch.dtype | None = None):
        super().__init__()
        self.weight, self.bias, self.out = weight, bias, out

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(self.out or x.dtype)


class Int8(Layer):
    """W in int8, one scale for each output, turned back at each call; x stays exact."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out: torch.dtype | None = None):
        super().__init__()
        w = weight.detach().float()
        self.scale = w.abs().amax(1).clamp(min=1e-12) / 127
        self.q = (w / self.scale[:, None]).round().to(torch.int8)
        self.out, self.bias = out, w.new_zeros(len(w)) if bias is None else bias.detach().float()

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.q.to(x.dtype)) * self.scale + self.bias
        return y.to(self.out or x.dtype)


class Packed(Layer):
    """oneDNN's own order of W, fp32 or bf16: as many bytes as W, and none of the copying that F.linear does."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 32)
        self.product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.packed, self.bias, "none", [], "")


@functools.cache
def packs(device: str, dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype here."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return False
    w = torch.eye(16, dtype=dtype)
    try:
        return torch.equal(Packed(w, None)(w), w)
    except (AttributeError, RuntimeError):
        return False


@functools.cache
def half_is_fast() -> bool:
    """Whether this CPU multiplies bf16, rather than widen it first."""
    if platform.machine() == "x86_64" and sys.platform == "linux":
        with contextlib.suppress(RuntimeError):  # REGARD_ISA names what is not there
            return native.form() in ("amx", "avx512bf16")
    return packs("cpu", torch.bfloat16)


def is_fast(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies numbers of this type, rather than widen them first."""
    if dtype == torch.bfloat16:
        return half_is_fast()
    return dtype.itemsize >= 4 or packs("cpu", dtype)


class Int4(Layer):
    """W in 4 bits, w = (q - 8) scale + zero with a bf16 scale and zero for each output and GROUP of inputs (5 bits a
    weight in all); x in bf16.

    Bytes lie as torch's AVX-512 kernel reads them: (n/64, k, 32), low halves for 32 outputs, high halves for the next
    32. The kernel is for few rows; for more, and where it is missing, W is turned back (`dense`)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out: torch.dtype | None):
        super().__init__()
        self.n, self.k = weight.shape
        w = F.pad(weight.detach().float(), (0, 0, 0, -self.n % 64)).unflatten(1, (-1, GROUP))
        low, high = w.aminmax(dim=-1)  # N k/group
        scale = ((high - low) / 15).clamp(min=1e-8).bfloat16()
        zero = (low + 8 * scale).bfloat16()
        q = ((w - zero[..., None]) / scale[..., None]).round_().add_(8).clamp_(0, 15)
        self.q = nibbles(q.flatten(1).to(torch.uint8))
        self.scales = torch.stack([scale, zero], -1).transpose(0, 1).contiguous()  # k/group N 2
        self.out, self.bias = out, None if bias is None else bias.detach().bfloat16()
        self.fast = w.is_cpu and reads_nibbles()

    def dense(self) -> Tensor:
        """W^T (k N) in bf16."""
        return unpacked(self.q, self.scales)

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.to(torch.bfloat16).reshape(-1, self.k).contiguous()
        if self.fast and flat.shape[0] <= DENSE:
            q = self.q.view(-1, self.k // 2)
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, q, GROUP, self.scales)
        else:
            y = flat @ self.dense()
        y = y[:, : self.n].view(*x.shape[:-1], self.n)
        y = y if self.bias is None else y + self.bias
        return y.to(self.out or x.dtype)


def unpacked(q: Tensor, scales: Tensor) -> Tensor:
    """W^T (k N) in bf16, of the bytes and scales of an `Int4`."""
    if q.is_cuda and not torch.compiler.is_compiling():
        from regard.kernels.triton import int4  # slow to import

        return int4.unpacked(q, scales)
    w = torch.cat([q & 15, q >> 4], -1).view(torch.int8).sub_(8)  # N/64 k 64
    w = w.transpose(0, 1).reshape(-1, GROUP, len(q) * 64)  # k/group group N
    scale, zero = (s.to(torch.bfloat16).contiguous() for s in scales[:, None].unbind(-1))
    return torch.addcmul(zero, w.to(torch.bfloat16), scale).flatten(0, 1)


def nibbles(q: Tensor) -> Tensor:
    """q (N k) of 0..15, N a multiple of 64 -> (N/64, k, 32) bytes."""
    low, high = q.view(-1, 2, 32, q.shape[1]).unbind(1)
    return (low | high << 4).transpose(1, 2).contiguous()


@functools.cache
def reads_nibbles() -> bool:
    """Whether torch's 4-bit kernel is here and its packing is ours (AVX-512; AVX2 has another)."""
    try:
        q = torch.arange(64 * 32).view(64, 32) * 7 % 16
        theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
        return torch.equal(theirs.view(-1), nibbles(q.to(torch.uint8)).view(-1))
    except (AttributeError, RuntimeError):
        return False
