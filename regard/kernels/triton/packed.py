"""Weights of 8 or 4 bits (`Packed` in regard/kernels/packed.py) as the kernels of linear.py and wide.py read them, and
brought back whole for a product on many rows."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # the plain forms need none
    triton = None

jit = triton.jit if triton is not None else lambda f: f

# Of four bytes, whose low or high halves are q, each becomes the third of a float32, 1 + q / 128.
_AS_THIRD = """lop3.b32 t, t, 0x0F0F0F0F, 0x80808080, 0xEA;
    prmt.b32 $0, t, 0x3F000000, 0x7044; prmt.b32 $1, t, 0x3F000000, 0x7144;
    prmt.b32 $2, t, 0x3F000000, 0x7244; prmt.b32 $3, t, 0x3F000000, 0x7344; }"""
if triton is not None:
    LOW = tl.constexpr("{ .reg .b32 t; mov.b32 t, $4;" + _AS_THIRD)
    HIGH = tl.constexpr("{ .reg .b32 t; shr.u32 t, $4, 4;" + _AS_THIRD)


@jit
def _halves(p, HALF: tl.constexpr, ASM: tl.constexpr):
    """The low or the high halves q of bytes as 1 + q / 128, float32. ASM: by few instructions for four bytes, which are
    not interpreted."""
    if ASM:
        code: tl.constexpr = HIGH if HALF else LOW
        return tl.inline_asm_elementwise(
            code, "=f,=f,=f,=f,r", [p], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        return ((p >> (4 * HALF)) & 15).to(tl.float32) * 0.0078125 + 1.0


@jit
def _both(p, scale, zero, kind: tl.constexpr, ASM: tl.constexpr):
    """The low and the high halves of bytes as weights, (q - 8) scale + zero, of a type."""
    if ASM:
        # Each becomes the last byte of a bf16, 128 + q; all is exact up to the last sum.
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, one, less; mov.b32 one, 0x3F803F80; mov.b32 less, 0xC308C308;
            and.b32 t, $4, 0x0F0F0F0F; shr.u32 u, $4, 4; and.b32 u, u, 0x0F0F0F0F;
            prmt.b32 $0, t, 0x43434343, 0x4140; prmt.b32 $1, t, 0x43434343, 0x4342;
            prmt.b32 $2, u, 0x43434343, 0x4140; prmt.b32 $3, u, 0x43434343, 0x4342;
            fma.rn.bf16x2 $0, $0, one, less; fma.rn.bf16x2 $1, $1, one, less;
            fma.rn.bf16x2 $2, $2, one, less; fma.rn.bf16x2 $3, $3, one, less;
            fma.rn.bf16x2 $0, $0, $5, $7; fma.rn.bf16x2 $1, $1, $6, $8;
            fma.rn.bf16x2 $2, $2, $5, $7; fma.rn.bf16x2 $3, $3, $6, $8; }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [p, scale.to(tl.bfloat16), zero.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        return low, high
    else:
        low, high = (p & 15).to(tl.float32) - 8.0, (p >> 4).to(tl.float32) - 8.0
        return (low * scale + zero).to(kind), (high * scale + zero).to(kind)


@jit
def _eight(p, kind: tl.constexpr, ASM: tl.constexpr):
    """Numbers in e4m3 as another type."""
    if ASM:
        # Sign, exponent and mantissa move to where bf16 has them, whose exponent is 120 more: a GPU widens e4m3 by way
        # of fp16, four times as slow.
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, by, none; mov.b32 by, 0x7B807B80; mov.b32 none, 0x80008000;
            prmt.b32 t, $2, 0, 0x1404; shr.u32 u, t, 4; and.b32 u, u, 0x07F007F0;
            lop3.b32 u, t, 0x80008000, u, 0xEA; fma.rn.bf16x2 $0, u, by, none;
            prmt.b32 t, $2, 0, 0x3424; shr.u32 u, t, 4; and.b32 u, u, 0x07F007F0;
            lop3.b32 u, t, 0x80008000, u, 0xEA; fma.rn.bf16x2 $1, u, by, none; }""",
            "=&r,=&r,r",
            [p],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return p.to(kind)


@jit
def _pair(scales, at, real):
    """Scales and zeros, float32, of groups; nothing where one is not `real`."""
    both = tl.load(scales + at, mask=real, other=0)
    scale = (both << 16).to(tl.float32, bitcast=True)
    return scale, (both & -65536).to(tl.float32, bitcast=True)


@jit
def _dense(q, scales, out, N, COLUMNS, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of W whole: a program has one and a stretch of its bytes."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = c < COLUMNS
    p = tl.load(q + n * COLUMNS + c, mask=real, other=0.0)
    kind = out.dtype.element_ty
    if GROUP:
        half: tl.constexpr = GROUP // 2
        scale, zero = _pair(scales, n * (COLUMNS // half) + c // half, real)
        low, high = _both(p, scale, zero, kind, False)
        to = out + n * 2 * COLUMNS + c // half * GROUP + c % half
        tl.store(to, low, mask=real)
        tl.store(to + half, high, mask=real)
    else:
        w = p.to(tl.float32) * tl.load(scales + n)
        tl.store(out + n * COLUMNS + c, w.to(kind), mask=real)


def as_read(w: Any) -> tuple[Tensor, Tensor, int]:
    """A matrix, its scales and the inputs that share one, as kernels are given them; of a full one itself."""
    if isinstance(w, Tensor):
        return w, w, 0
    scales = w.scales if w.kind == "fp8" else w.scales.view(torch.int32)
    return w.q, scales, w.group


def dense(w: Any, dtype: torch.dtype) -> Tensor:
    """`packed.unpacked` in one pass."""
    (q, scales, group), out = as_read(w), torch.empty(w.shape, dtype=dtype, device=w.device)
    n, columns = q.shape
    _dense[(n, triton.cdiv(columns, 2048))](
        q, scales, out, n, columns, GROUP=group, BLOCK=2048, num_warps=8
    )
    return out
