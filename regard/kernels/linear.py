"""Linear layers for inference, y = x W^T + b: W packed once for the CPU's matrix units, in 32, 16, 8 or 4 bits.

    python bench/linear.py      times them against F.linear

Everything that torch calls private is in this file. Where an op is missing, or the weight is not on the CPU, `pack`
gives the plain form: F.linear, on weights turned back from 8 or 4 bits at each call. A layer takes x of any dtype and
returns `out`, or else the dtype of x.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PRECISIONS = ("fp32", "bf16", "int8", "int4")
FEW = 2  # fp32 rows up to which F.linear reads W as fast as memory gives it
SOME = 32  # bf16 rows up to which W x^T is faster than x W^T when W is not packed
LIGHT = 2**23  # int8 multiplications up to which fbgemm's quick start beats oneDNN
DENSE = 40  # rows above which a 4-bit W is better turned back first
GROUP = 32  # inputs that share a scale in 4 bits


def pack(
    weight: Tensor,
    bias: Tensor | None,
    precision: str,
    *,
    rows: int = 1,
    out: torch.dtype | None = None,
    alike: bool = False,
) -> Layer:
    """A layer for W (n k) and b (n) that is fast at about `rows` rows of x. W is not copied where it stays as it is.
    `alike`: the rows of x are of one size, as after a norm, and may share one scale in int8."""
    assert precision in PRECISIONS, precision
    if precision == "int4" and weight.shape[1] % GROUP == 0:
        return Int4(weight, bias, out)
    if precision in ("int4", "int8"):
        return Int8(weight, bias, rows, out, alike)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    weight, bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
    if not packs(weight.device.type, dtype):
        return Plain(weight, bias, out)
    if dtype == torch.float32:
        return Packed(weight, bias, out) if rows > FEW else Plain(weight, bias, out)
    return Packed(weight, bias, out) if rows > 1 else Half(weight.contiguous(), bias, out)


class Layer(nn.Module):
    """A call is a call: no hooks, which would cost as much as a small product."""

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Plain(Layer):
    """F.linear in W's dtype: the best there is for one or two fp32 rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out: torch.dtype | None = None):
        super().__init__()
        self.weight, self.bias, self.out = weight, bias, out

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(self.out or x.dtype)


class Half(Plain):
    """bf16, W as it lies: few rows as W x^T, for which oneDNN reads W in order, as fast as memory gives it. For one row
    that is as fast as `Packed`, and needs no other copy of W."""

    def __call__(self, x: Tensor) -> Tensor:
        flat, dtype = x.to(torch.bfloat16).reshape(-1, x.shape[-1]), self.out or x.dtype
        if flat.shape[0] > SOME:
            return super().__call__(x)
        if flat.shape[0] == 1:
            y = torch.mv(self.weight, flat[0]).to(dtype)
        else:
            y = torch.mm(self.weight, flat.t()).t()
            y = torch.empty(y.shape, dtype=dtype).copy_(y)
        y = y if self.bias is None else y.add_(self.bias)
        return y.view(*x.shape[:-1], -1)


class Packed(Layer):
    """oneDNN's own order of W, fp32 or bf16: as many bytes as W, and none of the copying that F.linear does."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out: torch.dtype | None = None):
        super().__init__()
        self.dtype, self.bias, self.out = weight.dtype, bias, out
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 32)
        self.then = NOTHING

    def __call__(self, x: Tensor) -> Tensor:
        y = _pointwise()(x.to(self.dtype), self.packed, self.bias, *self.then)
        return y.to(self.out or x.dtype)


class Fused(Layer):
    """Packed float32 with what follows: act(x W^T + b) + add; `gated`: W is [gate ; up], act(gate x) * up x."""

    def __init__(self, weight: Tensor, bias: Tensor | None, act: str = "", gated: bool = False):
        super().__init__()
        parts = 2 if gated else 1
        weights = weight.detach().float().chunk(parts)
        biases = [None] * parts if bias is None else bias.detach().float().chunk(parts)
        self.first, *rest = (Packed(w, b) for w, b in zip(weights, biases, strict=True))
        self.first.then = THEN[act] if act else NOTHING
        self.up = rest[0] if gated else None

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        x = x.float()
        y = self.first(x) if self.up is None else self.first(x).mul_(self.up(x))
        return y if add is None else y.add_(add)


@functools.cache
def _pointwise() -> Callable[..., Tensor]:
    return torch.ops.mkldnn._linear_pointwise.default


NOTHING: tuple[str, list, str] = ("none", [], "")
THEN: dict[str, tuple[str, list, str]] = {  # activations that a packed layer can do on its way
    "relu": ("relu", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"),
    "silu": ("swish", [], ""),
}


def gelu_tanh(x: Tensor) -> Tensor:
    """F.gelu(x, approximate="tanh") as x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)): half the time from 8 rows on."""
    y = torch.addcmul(_constant(C, x.dtype, x.device), x, x, value=0.044715 * C)
    return y.mul_(x).sigmoid_().mul_(x)


C = math.sqrt(8 / math.pi)


@functools.cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


@functools.cache
def packs(device: str, dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype here."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    w = torch.eye(16, dtype=dtype)
    try:
        return torch.equal(Packed(w, None)(w), w)
    except (AttributeError, RuntimeError):
        return False


# --- 8 bits -------------------------------------------------------------------------------------------------------


class Int8(Layer):
    """W in int8, one scale an output; x is rounded to 8 bits as it comes, each row by its own largest number (unless
    they are `alike`): no row suffers from another's outliers.

    fbgemm starts sooner and reads W faster, oneDNN multiplies faster: where `rows` call for the first, both packings
    are kept (2 bytes a weight), the second for prompts; otherwise oneDNN's alone. Without these engines W is turned
    back at each call and x stays exact."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        rows: int,
        out: torch.dtype | None,
        alike: bool = False,
    ):
        super().__init__()
        w = weight.detach().float()
        scale = w.abs().amax(1).clamp(min=1e-12) / 127
        self.out, self.alike, self.few, self.many = out, alike, None, None
        self.light = max(1, LIGHT // w.numel())  # rows
        self.bias = w.new_zeros(len(w)) if bias is None else bias.detach().float()
        if w.is_cpu and quantizes():
            inside = self.bias if alike and bias is not None else None
            self.many = _prepack(w, scale, inside, "onednn")
            self.few = _prepack(w, scale, inside, "x86") if rows <= self.light else self.many
            # oneDNN keeps what it sets up for the first shape it sees
            _dynamic()(w.new_zeros(rows, w.shape[1]), self.many, _narrow())
        else:
            self.q, self.scale = (w / scale[:, None]).round().to(torch.int8), scale

    def __call__(self, x: Tensor) -> Tensor:
        dtype, rows = self.out or x.dtype, x.numel() // x.shape[-1]
        if self.many is None:
            y = F.linear(x, self.q.to(x.dtype)) * self.scale + self.bias
            return y.to(dtype)
        flat, w = x.reshape(rows, -1).float(), self.few if rows <= self.light else self.many
        if self.alike:
            y = _dynamic()(flat, w, _narrow())
        elif rows == 1:
            y = _dynamic()(flat, w, _narrow()).add_(self.bias)
        else:
            size = torch.maximum(flat.amax(1, keepdim=True), flat.amin(1, keepdim=True).neg_())
            size.clamp_(min=1e-30)
            y = _dynamic()(flat * size.reciprocal(), w, _narrow())
            y = torch.addcmul(self.bias, y, size, out=y)
        return y.view(*x.shape[:-1], -1).to(dtype)


def _prepack(w: Tensor, scale: Tensor, bias: Tensor | None, engine: str) -> torch.ScriptObject:
    before, zeros = torch.backends.quantized.engine, torch.zeros(len(w), dtype=torch.long)
    torch.backends.quantized.engine = engine
    try:
        with warnings.catch_warnings():  # torch means to give this up; `quantizes` will notice
            warnings.simplefilter("ignore")
            q = torch.quantize_per_channel(w, scale.double(), zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(q, bias)
    finally:
        torch.backends.quantized.engine = before


@functools.cache
def quantizes() -> bool:
    """Whether both 8-bit engines are here and work."""
    if not {"x86", "onednn"} <= set(torch.backends.quantized.supported_engines):
        return False
    w, scale = torch.eye(16), torch.full((16,), 1 / 127)
    try:
        ys = [_dynamic()(w, _prepack(w, scale, None, e)) for e in ("x86", "onednn")]
        return all(torch.allclose(y, w, atol=0.02) for y in ys)
    except (AttributeError, RuntimeError):
        return False


@functools.cache
def _dynamic() -> Callable[..., Tensor]:
    return torch.ops.quantized.linear_dynamic.default._op


@functools.cache
def _narrow() -> bool:
    """Without VNNI, sums of two 8-bit products overflow 16 bits unless x has 7 bits."""
    return not torch.cpu._is_vnni_supported()


# --- 4 bits -------------------------------------------------------------------------------------------------------


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
        q = torch.cat([self.q & 15, self.q >> 4], -1).view(torch.int8).sub_(8)  # N/64 k 64
        q = q.transpose(0, 1).reshape(-1, GROUP, len(self.q) * 64)  # k/group group N
        scale, zero = (s.contiguous() for s in self.scales[:, None].unbind(-1))
        return torch.addcmul(zero, w := q.to(torch.bfloat16), scale, out=w).flatten(0, 1)

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
