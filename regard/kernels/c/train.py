"""What a training step on the CPU does beside products, in C: GELU, and causal attention.

Each has a torch form, which says what it computes; the C form is taken where `native.library` has one and
gradients are recorded, so that a model which only runs has torch's bits.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.c.rows import HALF, call_of

GELU, BIAS, CAUSAL = Struct("5q"), Struct("8q"), Struct("37qd")
RUN = 64  # rows whose gradients by a bias are summed in one go
WIDE = 32  # features of a head are a multiple of two vectors, whatever the CPU's are
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def gelu_tanh(x: Tensor) -> Tensor:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    learning = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    known = x.is_cpu and x.dtype in HALF and type(x) is Tensor
    if not (learning and known) or call_of("gelu") is None:
        return F.gelu(x, approximate="tanh")
    return _Gelu.apply(x.contiguous(), None)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, bias)
        return _gelu(x, bias, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, bias = ctx.saved_tensors
        return _gelu(x, bias, dy.contiguous())


def _gelu(x: Tensor, bias: Tensor | None, dy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What it gives, and on the way back, with dy, the gradients by x and by the bias."""
    call, out = call_of("gelu" if bias is None else "bias_gelu"), torch.empty_like(x)
    assert call is not None
    slope = 0 if dy is None else dy.data_ptr()
    if bias is None:
        call(GELU.pack(x.numel(), HALF[x.dtype], x.data_ptr(), slope, out.data_ptr()))
        return out, None
    rows, width = x.numel() // len(bias), len(bias)
    sums = x.new_empty(0 if dy is None else -(-rows // RUN), width)
    given = (x.data_ptr(), bias.data_ptr(), slope)
    call(BIAS.pack(rows, width, RUN, *given, out.data_ptr(), sums.data_ptr()))
    return out, sums.sum(0)


def takes_bias(x: Tensor, bias: Tensor) -> bool:
    """Whether `bias_gelu` can, of products of x: float32 on the CPU while gradients are recorded."""
    learning = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    known = x.is_cpu and x.dtype is bias.dtype is torch.float32 and type(x) is Tensor
    fits = len(bias) % WIDE == 0 and not torch.is_autocast_enabled("cpu")
    return learning and known and fits and call_of("bias_gelu") is not None


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu_tanh(x + bias): neither the sum nor the gradient by the bias takes a pass of its own."""
    return _Gelu.apply(x.contiguous(), bias.contiguous())


def attends(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend` can: plain tensors of one shape and dtype, on the CPU, heads for every thread. In bf16 its gain
    is the way back."""
    wanted = torch.is_grad_enabled() or q.dtype is torch.float32
    if not (wanted and q.is_cpu and type(q) is type(k) is type(v) is Tensor):
        return False
    alike = q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype and q.dtype in HALF
    fits = alike and q.shape[-1] % WIDE == 0 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    shared = q.numel() > 0 and q.shape[:2].numel() >= torch.get_num_threads()
    return fits and shared and call_of("causal") is not None


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention of q, k, v (b h t d)."""
    return _Attend.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)


class _Attend(torch.autograd.Function):
    """In C, which leaves out what no query sees, where torch's kernels compute it first. Forward in bf16 is torch's: it
    multiplies bf16, C float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if q.dtype is torch.bfloat16:
            out, lse = flash(q, k, v, 0.0, True, scale=scale)
        else:
            b, h, t, d = q.shape
            out, lse = q.new_empty(b, t, h, d).transpose(1, 2), q.new_empty(b, h, t)
            _causal([q, k, v, out], lse, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        *given, lse = ctx.saved_tensors
        wide = [x.float() for x in (*given, do if do.stride(-1) == 1 else do.contiguous())]
        b, h, t, d = do.shape
        found = do.new_empty(b, t, 3, h, d, dtype=torch.float32)  # side by side, as `parted` wants
        _causal([*wide, *_heads(found)], lse.contiguous(), ctx.scale)
        dq, dk, dv = _heads(found.to(do.dtype))
        return dq, dk, dv, None


def _heads(x: Tensor) -> list[Tensor]:
    """(b t n h d) -> n times (b h t d)."""
    return [each.transpose(1, 2) for each in x.unbind(2)]


def _causal(tensors: list[Tensor], lse: Tensor, scale: float) -> None:
    call = call_of("causal")
    assert call is not None
    places = [n for x in tensors for n in (x.data_ptr(), *x.stride()[:3])]
    places += [0] * (32 - len(places))
    if call(CAUSAL.pack(*tensors[0].shape, *places, lse.data_ptr(), scale)):
        raise MemoryError("causal attention: no memory for a block of scores")


def parted(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """x.split(sizes, -1). Gradients that lie side by side already, as those of `attend` do, are one without a copy."""
    plain = torch.compiler.is_compiling() or not x.is_cpu or type(x) is not Tensor
    return x.split(sizes, -1) if plain else _Parted.apply(x, sizes)


class _Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return x.split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        first, at, width = slopes[0], slopes[0].storage_offset(), 0
        together = True
        for each in slopes:
            one = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            next_to = each.stride() == first.stride() and each.storage_offset() == at + width
            together, width = together and one and next_to, width + each.shape[-1]
        if together:
            whole = first.as_strided((*first.shape[:-1], width), first.stride())
            if whole.is_contiguous():
                return whole, None
        return torch.cat(slopes, -1), None
