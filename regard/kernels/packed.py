"""Weights for a GPU in 8 or 4 bits: how they lie, and what comes back; regard/kernels/rounded.py makes them.

    python bench/gpu_kernels.py --part q      times products with them against full ones
    python bench/quality.py quantised         what they cost a model

The plain forms; regard/kernels/triton/packed.py reads the same bytes in the products' kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = ("fp8", "int4")
GROUPS = (128, 64, 32)  # inputs that share a scale in 4 bits: the first that divides them
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class Packed:
    """W (n k) in fewer bits. What is computed with it is what `dense` would give.

    fp8: q (n k) in e4m3, w = q scale, a float32 scale for each output (n).
    int4: w = (q - 8) scale + zero, a bf16 scale and zero for each output and group of inputs (n k/group 2). Of the
    bytes of a group, byte j holds input j in its low half, and input j + group/2 in its high half."""

    q: Tensor
    scales: Tensor
    dtype: torch.dtype  # of the weight it was made of

    @property
    def kind(self) -> str:
        return "fp8" if self.q.dtype == E4M3 else "int4"

    @property
    def group(self) -> int:
        """Inputs that share a scale and a zero; 0 where an output has one scale."""
        return 0 if self.kind == "fp8" else 2 * self.q.shape[1] // self.scales.shape[1]

    @property
    def shape(self) -> torch.Size:
        n, k = self.q.shape
        return torch.Size((n, k if self.kind == "fp8" else 2 * k))

    def __len__(self) -> int:
        return len(self.q)

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def is_cuda(self) -> bool:
        return self.q.is_cuda

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scales.nbytes

    def is_contiguous(self) -> bool:
        return self.q.is_contiguous() and self.scales.is_contiguous()

    def clone(self) -> Packed:
        return Packed(self.q.clone(), self.scales.clone(), self.dtype)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """W (n k)."""
        dtype = dtype or self.dtype
        if self.is_cuda and not torch.compiler.is_compiling():
            from regard.kernels.triton import packed  # slow to import

            return packed.dense(self, dtype)
        return unpacked(self, dtype)


def unpacked(w: Packed, dtype: torch.dtype) -> Tensor:
    """W (n k), in torch."""
    if w.kind == "fp8":
        return (w.q.float() * w.scales[:, None]).to(dtype)
    both = torch.stack([w.q & 15, w.q >> 4], 1).unflatten(-1, (-1, w.group // 2))  # n 2 k/g g/2
    scale, zero = w.scales.float()[:, :, None].unbind(-1)  # n k/g 1
    q = both.transpose(1, 2).flatten(2).float() - 8
    return (q * scale + zero).flatten(1).to(dtype)


def group_of(k: int) -> int:
    """How many of k inputs share a scale in 4 bits; 0 if no such number divides them."""
    return next((group for group in GROUPS if k % group == 0), 0)


def possible(kind: str, shape: Sequence[int]) -> bool:
    """Whether a weight of this shape can be held so."""
    return len(shape) == 2 and shape[1] % 16 == 0 and (kind == "fp8" or group_of(shape[1]) > 0)


class PackedLinear(nn.Module):
    """A linear layer that holds its weight packed, for inference. `dense` makes it whole at each call: what runs in a
    graph reads `packed`."""

    q: Tensor
    scales: Tensor

    def __init__(self, packed: Packed, bias: Tensor | None):
        super().__init__()
        self.register_buffer("q", packed.q)
        self.register_buffer("scales", packed.scales)
        self.out_features, self.in_features = packed.shape
        self.bias, self.dtype = bias, packed.dtype

    @property
    def packed(self) -> Packed:
        return Packed(self.q, self.scales, self.dtype)

    @property
    def weight(self) -> Tensor:
        return self.packed.dense()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.packed.dense(x.dtype), self.bias)


Weight = Tensor | Packed
