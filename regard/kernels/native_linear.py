"""Linear layers in native code: y = act(x W^T + b) + add, W packed once in 32, 16 or 8 bits for AMX and AVX-512.

    python bench/linear.py      times them against torch's

`plain` says what is computed. Few rows stream W as fast as memory gives it; one packing serves any number of rows. x
and y are float32: bf16 rounds x to bf16, int8 rounds each row of x by its own largest number, sums are float32 and
int32.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from struct import Struct
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.linear import Layer
from regard.kernels.native import has_amx, library

KINDS = {"fp32": 0, "bf16": 1, "int8": 2}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
MOST = 8  # rows of float32 above which torch's product is faster
HUGE = 2**21  # bytes of a huge page
FIXED = Struct("8q")


def usable(precision: str) -> bool:
    return precision in KINDS and has_amx()


def plain(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    act: str = "",
    gated: bool = False,
    add: Tensor | None = None,
) -> Tensor:
    """act(x w^T + b) + add; `gated`: w is [gate ; up], act(gate x) * up x."""
    y = F.linear(x, w, b)
    if gated:
        gate, up = y.chunk(2, -1)
        y = ACTIVATIONS[act](gate) * up
    else:
        y = ACTIVATIONS[act](y)
    return y if add is None else y + add


@functools.cache
def _calls() -> Any:
    found = library()
    assert found is not None
    whole = ctypes.c_int64
    found.linear_bytes.argtypes, found.linear_bytes.restype = [whole] * 4, whole
    found.linear_pack.argtypes, found.linear_pack.restype = [ctypes.c_char_p, whole], None
    found.linear.argtypes, found.linear.restype = [ctypes.c_char_p, *[whole] * 4], None
    return found


class NativeLinear(Layer):
    """`plain` for a weight (n k) and bias (n), packed."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        precision: str,
        *,
        act: str = "",
        gated: bool = False,
    ):
        super().__init__()
        n, self.k = weight.shape
        self.n, self.act, self.gated, self.precision = n // 2 if gated else n, act, gated, precision
        w = weight.detach().float().contiguous()
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.scale = w.abs().amax(1).div_(127).clamp_(min=1e-30) if precision == "int8" else None
        kind, calls = KINDS[precision], _calls()
        if precision == "fp32":
            self.weight, start = w, w.data_ptr()
        else:
            self.weight = torch.empty(
                calls.linear_bytes(kind, n, self.k, gated) + HUGE, dtype=torch.uint8
            )
            start = -(-self.weight.data_ptr() // HUGE) * HUGE
        pointers = (0 if x is None else x.data_ptr() for x in (self.scale, self.bias))
        self.fixed = FIXED.pack(
            kind, n, self.k, gated, list(ACTIVATIONS).index(act), start, *pointers
        )
        if precision != "fp32":
            calls.linear_pack(self.fixed, w.data_ptr())
        self.call = calls.linear

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        x = x.float().contiguous()
        m = x.numel() // self.k
        if self.precision == "fp32" and m > MOST:
            return plain(x, self.weight, self.bias, self.act, self.gated, add)
        y = x.new_empty(*x.shape[:-1], self.n)
        self.call(
            self.fixed,
            x.data_ptr(),
            m,
            0 if add is None else add.contiguous().data_ptr(),
            y.data_ptr(),
        )
        return y
