"""Weights of 4 bits turned back into bf16 on a GPU, in one pass: what a product on many rows reads.

The bytes lie as regard.kernels.linear.Int4 packs them, whose `unpacked` is the plain form. A program has 64 outputs and
a stretch of inputs: the low halves of its bytes are the first 32 outputs, the high halves the others.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
from torch import Tensor

from regard.kernels.triton.usable import jit, triton

if triton is not None:
    import triton.language as tl

BLOCK = 64  # inputs a program


@jit
def _unpack(q, scales, out, K, N, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    block, start = tl.program_id(0), tl.program_id(1) * BLOCK
    k, n = start + tl.arange(0, BLOCK)[:, None], tl.arange(0, 32)[None, :]
    real = k < K
    pairs = tl.load(q + (block.to(tl.int64) * K + k) * 32 + n, mask=real, other=0).to(tl.int32)
    for half in tl.static_range(2):
        at = block * 64 + half * 32 + n
        pair = scales + (k // GROUP * N + at) * 2
        scale = tl.load(pair, mask=real, other=0.0).to(tl.float32)
        zero = tl.load(pair + 1, mask=real, other=0.0).to(tl.float32)
        w = ((pairs >> (4 * half)) & 15).to(tl.float32) - 8
        tl.store(out + k.to(tl.int64) * N + at, (w * scale + zero).to(tl.bfloat16), mask=real)


def unpacked(q: Tensor, scales: Tensor) -> Tensor:
    """q (N/64 k 32), scales (k/group N 2) -> W^T (k N) in bf16."""
    k, n = q.shape[1], len(q) * 64
    out = torch.empty(k, n, dtype=torch.bfloat16, device=q.device)
    _unpack[(len(q), triton.cdiv(k, BLOCK))](
        q, scales, out, k, n, GROUP=k // len(scales), BLOCK=BLOCK
    )
    return out
