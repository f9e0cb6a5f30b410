"""Linear layers in native code: y = act(x W^T + b) + add, W packed once in 32, 16, 8 or 4 bits.

    python bench/linear.py      times them against torch's

`plain` says what is computed. Few rows stream W as fast as memory gives it; one packing serves any number of rows. x
and y are float32: bf16, which not every CPU multiplies, rounds x to bf16; int8 rounds 64 inputs of x by their own
scale, as `Int8` in regard/kernels/linear.py does; int4 leaves x as it is (on a CPU that multiplies bf16, rounds it to
that).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from array import array
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.c.native import library
from regard.kernels.c.tape import RECORDING, kept

KINDS = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
GROUP = 32  # inputs that share a scale in 4 bits
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
HUGE, STRETCH = 2**21, 2**25  # bytes of a huge page, and of what is asked for at once
PART = 2048  # rows of W that are packed at once, a multiple of 32
FIXED, BEST = Struct("7q"), Struct("9q")


def usable(precision: str) -> bool:
    """Whether the C code is here and multiplies numbers of this kind."""
    found = library()
    return found is not None and bool(found.linear_kinds() >> KINDS.get(precision, 31) & 1)


def plain(
    x: Tensor, w: Tensor, b: Tensor | None, act: str = "", gated: bool = False, add: Any = None
) -> Tensor:
    """act(x w^T + b) + add; `gated`: w is [gate ; up], act(gate x) * up x."""
    y, *up = F.linear(x, w, b).chunk(2 if gated else 1, -1)
    y = ACTIVATIONS[act](y)
    y = y * up[0] if gated else y
    return y if add is None else y + add


@functools.cache
def _calls() -> Any:
    found = library()
    assert found is not None
    whole = ctypes.c_int64
    found.linear_bytes.argtypes, found.linear_bytes.restype = [whole] * 4, whole
    found.linear_pack.argtypes, found.linear_pack.restype = [ctypes.c_char_p, *[whole] * 4], None
    found.linear_room.argtypes, found.linear_room.restype = [whole, whole], None
    found.linear.argtypes, found.linear.restype = [ctypes.c_char_p, *[whole] * 4], ctypes.c_int
    found.linear_best.argtypes, found.linear_best.restype = [ctypes.c_char_p] * 2, ctypes.c_int
    return found


class Room:
    """Memory for packed weights, many layers in one stretch: huge pages of their own would be half empty."""

    def __init__(self) -> None:
        self.lock, self.left = threading.Lock(), torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """`size` bytes that begin at a multiple of 64."""
        size = -(-size // 64) * 64
        with self.lock:
            if size > len(self.left):
                room = torch.empty(max(size, STRETCH) + HUGE, dtype=torch.uint8)
                self.left = room[-room.data_ptr() % HUGE :][: max(size, STRETCH)]
                _calls().linear_room(self.left.data_ptr(), len(self.left))
            taken, self.left = self.left[:size], self.left[size:]
            return taken


ROOM = Room()


def _readable(x: Tensor) -> Tensor:
    """As C reads it; to ask first is faster than two calls that change nothing."""
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()


class Layer(nn.Module):
    """A call is a call: no hooks, which would cost as much as a small product."""

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class NativeLinear(Layer):
    """`plain` for a weight (n k) and bias (n), packed; y is `out`, or of the dtype of x. `back` is what `feedback` in
    regard/kernels/linear.py gives for int8 and int4."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, precision: str, *, act: str = "", gated: bool = False,
        out: torch.dtype | None = torch.float32, back: Tensor | None = None
    ):  # fmt: skip
        super().__init__()
        n, self.k = weight.shape
        self.n, self.gated, self.precision, self.out = n // 2 if gated else n, gated, precision, out
        self.bias = None if bias is None else bias.detach().float().contiguous()
        assert precision != "int4" or self.k % GROUP == 0
        kind, calls = KINDS[precision], _calls()
        self.weight = ROOM.take(calls.linear_bytes(kind, n, self.k, gated))
        pointers = (0 if x is None else x.data_ptr() for x in (self.weight, self.bias))
        act_number = list(ACTIVATIONS).index(act)
        self.fixed = FIXED.pack(kind, n, self.k, gated, act_number, *pointers)
        self.pack(weight.detach(), back)
        self.call = calls.linear

    def pack(self, weight: Tensor, back: Tensor | None) -> None:
        """Part by part: W in float32 may be as large as all the rest."""
        each, more = len(weight) if self.gated else PART, 0 if back is None else back.data_ptr()
        for first in range(0, len(weight), each):
            part = weight[first : first + each].float().contiguous()
            _calls().linear_pack(self.fixed, part.data_ptr(), more, first, len(part))

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        out, x = self.out or x.dtype, _readable(x)
        m = x.numel() // self.k
        y = kept(x.new_empty((*x.shape[:-1], self.n)))
        tape = RECORDING.get()
        call = self.call if tape is None else tape.recorded("linear", self.call)
        extra = None if add is None else _readable(add)
        more = 0 if extra is None else extra.data_ptr()
        if call(self.fixed, x.data_ptr(), m, more, y.data_ptr()):
            raise self.short(m)
        return y if out is torch.float32 else y.to(out)

    def best(
        self, x: Tensor, k: int, banned: Sequence[int] = (), left: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `rows.lse_and_topk` finds among the outputs for x (r k), which are not written."""
        x, bans, r = _readable(x), array("q", banned), len(x)
        assert not self.gated and 0 < k <= self.n - len(bans)
        norm, values, ids = x.new_empty(r), x.new_empty(r, k), torch.empty(r, k, dtype=torch.int64)
        given = (r, k, len(bans), left, x.data_ptr(), bans.buffer_info()[0])
        found = (norm.data_ptr(), values.data_ptr(), ids.data_ptr())
        if _calls().linear_best(self.fixed, BEST.pack(*given, *found)):
            raise self.short(r)
        return norm, values, ids

    def short(self, rows: int) -> MemoryError:
        size = f"{rows} rows of {self.k} numbers in {self.precision}"
        return MemoryError(f"linear: no memory for {size}")
