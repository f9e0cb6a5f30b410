"""Linear layers for inference, y = x W^T + b: W packed once for this CPU, in 32, 16, 8 or 4 bits.

    python bench/linear.py      times them against F.linear

Where the C code multiplies such numbers, it does (`NativeLinear`); elsewhere the plain form is F.linear on the same
numbers, W brought back from 8 or 4 bits at each call. Everything that torch calls private is in this file. A layer
takes x of any dtype and returns `out`, or else the dtype of x.
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
from regard.kernels.c.linear import GROUP, Layer, NativeLinear, usable

PRECISIONS = ("fp32", "bf16", "int8", "int4")
TILE = 64  # inputs that are turned together, and share a scale in 8 bits
PARTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a range, that 4 bits may keep to
# Weights that stay near a core between two steps: 4 bits would make them no faster, 24 KB smaller, and small models
# much worse.
SMALL = 2**16
# Where oneDNN lacks a product, torch says so once with twenty lines of C++ frames, and goes on without it.
warnings.filterwarnings("ignore", message=".*failed, switching to (baddbmm|BLAS gemm)")


def pack(
    weight: Tensor, bias: Tensor | None, precision: str, out: torch.dtype | None = None, back: Tensor | None = None
) -> Layer:  # fmt: skip
    """A layer for W (n k) and b (n), fast at any number of rows. The plain form does not copy a W that stays so.
    `back`: how int8 and int4 round (`feedback`); without it to the nearest."""
    assert precision in PRECISIONS, precision
    precision = possible(precision, weight)
    if weight.is_cpu and usable(precision):
        return NativeLinear(weight, bias, precision, out=out, back=back)
    if precision == "int8":
        return Int8(weight, bias, out, back)
    if precision == "int4":
        return Int4(weight, bias, out, back)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return Plain(weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype), out)


def possible(precision: str, weight: Tensor) -> str:
    """4 bits need groups of inputs: a W that they do not divide has 8; so has one that is SMALL."""
    eight = weight.shape[1] % GROUP or weight.numel() < SMALL
    return "int8" if precision == "int4" and eight else precision


class Plain(Layer):
    """F.linear in W's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out: torch.dtype | None = None):
        super().__init__()
        self.weight, self.bias, self.out = weight, bias, out

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(self.out or x.dtype)


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """Kept on the device: nothing is copied there while a graph is recorded."""
    return torch.tensor([1.0 - 2.0 * (0x9B6D15E34C3A7F08 >> i & 1) for i in range(TILE)]).to(device)


def turned(x: Tensor) -> Tensor:
    """(... k) -> (... k/64 64): each TILE of inputs by an orthogonal transform, times 8. Pairs are added and
    subtracted, then pairs of pairs, after some signs are changed: a few large numbers are spread over all 64."""
    x = F.pad(x, (0, -x.shape[-1] % TILE)).unflatten(-1, (-1, TILE)) * _signs(x.device)
    for step in (1, 2, 4, 8, 16, 32):
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
    return x


def feedback(moments: Tensor, precision: str) -> Tensor:
    """How W is best rounded to int8 or int4 where inputs have these second moments, sums of h h^T over turned inputs
    (k/64 64 64): what rounding leaves out of input i of W is taken from each later input j, result[i, j] times, so
    that the error is least where inputs are large. (GPTQ's steps, within a tile.)"""
    if precision == "int4":
        # Which rounds inputs as they are: turned back, as the transform is 8 times an orthogonal one.
        basis = turned(torch.eye(TILE, device=moments.device))[:, 0]
        moments = basis @ moments @ basis.t() / TILE**2
    mean = moments.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) + 1e-20
    inverse = torch.linalg.inv((moments + torch.diag_embed(mean.expand(-1, TILE))).double())
    u = torch.linalg.cholesky(inverse, upper=True)
    u = u / u.diagonal(dim1=1, dim2=2)[..., None]
    return u.triu(1).float().contiguous()


class Int8(Layer):
    """W and x in int8, turned, with a scale for each 64 inputs: y = sum over tiles of (q_x . q_w) s_x s_w / 64. Scales
    of W are bf16, rounded up."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, out: torch.dtype | None = None, back: Tensor | None = None
    ):  # fmt: skip
        super().__init__()
        h = turned(weight.detach().float())
        scale = (h.abs().amax(-1, keepdim=True) * (1 / 127)).clamp(min=1e-30)
        wide = scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000).view(torch.float32)
        self.scale = wide.bfloat16()  # n k/64 1
        q = torch.empty_like(h, dtype=torch.int8)
        for i in range(TILE):
            q[..., i] = (h[..., i] * (1 / wide[..., 0])).round_().clamp_(-127, 127)
            if back is not None:
                off = h[..., i : i + 1] - q[..., i : i + 1] * wide
                h[..., i + 1 :] -= off * back[:, i, i + 1 :]
        self.q = q
        self.out, self.bias = out, None if bias is None else bias.detach().float()

    def rounded(self, x: Tensor) -> Tensor:
        """x as the product sees it, turned."""
        h = turned(x.float())
        most = h.abs().amax(-1, keepdim=True)
        back = torch.where(most > 1e-30, 127 / most, 0.0)
        return ((h * back).round_() * (most * (1 / 127 / TILE))).flatten(-2)

    def __call__(self, x: Tensor) -> Tensor:
        w = (self.q.to(x.dtype) * self.scale.to(x.dtype)).flatten(1)
        y = F.linear(self.rounded(x).to(x.dtype), w)
        y = y if self.bias is None else y + self.bias
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
    weight in all), turned back at each call; x stays as it is (in bf16 where that is multiplied).

    Bytes lie (n/64, k, 32), low halves for 32 outputs, high halves for the next 32."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, out: torch.dtype | None = None, back: Tensor | None = None
    ):  # fmt: skip
        super().__init__()
        self.n, self.k = weight.shape
        q, scales = fours(F.pad(weight.detach(), (0, 0, 0, -self.n % 64)), back)
        self.q = nibbles(q)
        self.scales = scales.transpose(0, 1).contiguous()  # k/group N 2
        self.out, self.bias = out, None if bias is None else bias.detach().float()

    def dense(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """W^T (k N)."""
        return unpacked(self.q, self.scales, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        half = not self.q.is_cpu or half_is_fast()
        dtype = torch.bfloat16 if half else torch.float32
        y = (x.to(dtype) @ self.dense(dtype))[..., : self.n]
        y = y if self.bias is None else y + self.bias
        return y.to(self.out or x.dtype)


def fours(w: Tensor, back: Tensor | None = None, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """W (n k) in 4 bits: w = (q - 8) scale + zero, q (n k), scale and zero (n k/group 2) in bf16. `back`: how it rounds
    (`feedback`)."""
    (n, k), count = w.shape, w.shape[1] // group
    if w.is_meta:
        return w.new_empty(n, k, dtype=torch.uint8), w.new_empty(n, count, 2, dtype=torch.bfloat16)
    rest = F.pad(w.detach().float(), (0, -k % TILE)).view(n, -1, TILE).permute(2, 0, 1).contiguous()
    q, scales = torch.empty_like(rest, dtype=torch.uint8), list[Tensor]()
    tiles = max(1, group // TILE)  # that share a scale
    for i in range(TILE):
        if i % group == 0:
            each = rest[i : i + group].unflatten(2, (-1, tiles))
            scales.append(range_of(each.permute(0, 3, 1, 2).flatten(0, 1)))
            scale, zero = scales[-1].repeat_interleave(tiles, 1).float().unbind(-1)
        step = ((rest[i] - zero) * (1 / scale)).round_().clamp_(-8, 7)
        q[i] = step + 8
        if back is not None:
            off = rest[i] - (zero + step * scale)  # n k/64
            rest[i + 1 :] -= off * back[:, i, i + 1 :].t()[:, None]
    whole = q.permute(1, 2, 0).reshape(n, -1)[:, :k].contiguous()
    return whole, torch.stack(scales, 2).flatten(1, 2)[:, :count].contiguous()


def range_of(w: Tensor) -> Tensor:
    """Scale and zero of groups (group n m), in bf16: of their whole range, or the part of it that rounds them best."""
    low, high = w.aminmax(dim=0)
    found, off = list[Tensor](), list[Tensor]()
    for part in PARTS:
        scale = ((high - low) * (part / 15)).clamp(min=1e-8).bfloat16()
        zero = ((low + high + scale) / 2).bfloat16()
        step = ((w - zero) * (1 / scale.float())).round_().clamp_(-8, 7)
        found.append(torch.stack([scale, zero], -1))
        off.append((w - (zero.float() + step * scale.float())).square_().sum(0))
    best = torch.stack(off).argmin(0)[None, ..., None].expand(1, *low.shape, 2)
    return torch.stack(found).gather(0, best)[0]


def unpacked(q: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """W^T (k N), of the bytes and scales of an `Int4`."""
    if q.is_cuda and dtype == torch.bfloat16 and not torch.compiler.is_compiling():
        from regard.kernels.triton import int4  # slow to import

        return int4.unpacked(q, scales)
    w = torch.cat([q & 15, q >> 4], -1).view(torch.int8).sub_(8)  # N/64 k 64
    w = w.transpose(0, 1).reshape(-1, GROUP, len(q) * 64)  # k/group group N
    scale, zero = (s.to(dtype).contiguous() for s in scales[:, None].unbind(-1))
    return torch.addcmul(zero, w.to(dtype), scale).flatten(0, 1)


def nibbles(q: Tensor) -> Tensor:
    """q (N k) of 0..15, N a multiple of 64 -> (N/64, k, 32) bytes."""
    low, high = q.view(-1, 2, 32, q.shape[1]).unbind(1)
    return (low | high << 4).transpose(1, 2).contiguous()
