"""What a training step on the CPU does beside products, in C: GELU, and in bf16 the way back of causal attention.

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

from regard.kernels.native_rows import HALF, call_of, learns

GELU, BACK = Struct("5q"), Struct("9qd")
MOST = 2**25  # scores that the way back may hold at a time
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def gelu_tanh(x: Tensor) -> Tensor:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    learning = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not (learning and x.is_cpu and x.dtype in HALF) or call_of("gelu") is None:
        return F.gelu(x, approximate="tanh")
    return _Gelu.apply(x.contiguous())


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gelu(x, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _gelu(x, dy.contiguous())


def _gelu(x: Tensor, dy: Tensor | None) -> Tensor:
    call, out = call_of("gelu"), torch.empty_like(x)
    assert call is not None
    slope = 0 if dy is None else dy.data_ptr()
    call(GELU.pack(x.numel(), HALF[x.dtype], x.data_ptr(), slope, out.data_ptr()))
    return out


def attends(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend` can: rows of bf16 that learn, as many keys as queries, not too many."""
    return (
        q.is_cpu
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and q.shape == k.shape == v.shape
        and q.shape[:-1].numel() * k.shape[-2] <= MOST
        and learns(q, k, v)
        and call_of("back") is not None
    )


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention of q, k, v (b h t d): forward by torch's flash kernel. Its way back is slow in bf16; here it is
    five products of whole maps."""
    return _Attend.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, lse = flash(q, k, v, 0.0, True, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """p = softmax(scale q.k), ds = scale p (do.v - do.o); dq = ds k, dk = ds^T q, dv = p^T do."""
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            wide = [
                x.to(torch.float32, memory_format=torch.contiguous_format) for x in (q, k, v, do)
            ]
            score, slope = wide[0] @ wide[1].mT, wide[3] @ wide[2].mT  # b h t s
            inner, lse = (wide[3] * out).sum(-1), lse.contiguous()  # b h t
            p, ds = torch.empty_like(score, dtype=q.dtype), torch.empty_like(score, dtype=q.dtype)
            call, (t, s) = call_of("back"), score.shape[-2:]
            assert call is not None
            pointers = [x.data_ptr() for x in (score, slope, lse, inner, p, ds)]
            call(BACK.pack(score.numel() // (t * s), t, s, *pointers, ctx.scale))
            return ds @ k, ds.mT @ q, p.mT @ do, None
