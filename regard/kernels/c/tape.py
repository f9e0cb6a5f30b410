"""The C calls of a decoding step, recorded once and played again by one call: the same memory, other numbers in it.

    with tape.recording():
        y = step(x)             every C call is made, and written down with the memory it names
    x.copy_(other)
    tape.play()                 y is now that of the other x

What torch computes in between is not recorded: `Tape.whole` tells whether anything is missing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from regard.kernels.c.native import library

KINDS = {"linear": 0, "norm": 1, "enter": 2, "attend_one": 3}
CALL = Struct("6q")
RECORDING: ContextVar[Tape | None] = ContextVar("tape", default=None)


def kept(out: Tensor) -> Tensor:
    """What a C call writes to; a tape that records keeps it."""
    tape = RECORDING.get()
    if tape is not None:
        tape.outputs.append(out)
    return out


class Tape:
    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.outputs: list[Tensor] = []
        self.packed: list[Any] = []  # the arguments that calls point to
        self.all: Any = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        token = RECORDING.set(self)
        try:
            yield
        finally:
            RECORDING.reset(token)
        self.all = ctypes.create_string_buffer(b"".join(self.calls))

    def recorded(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        """`call`, which is written down too."""

        def made(packed: bytes, *rest: int) -> int:
            self.packed.append(ctypes.create_string_buffer(packed))
            address = ctypes.addressof(self.packed[-1])
            self.calls.append(CALL.pack(KINDS[name], address, *(rest or (0, 0, 0, 0))))
            return call(packed, *rest)

        return made

    def play(self) -> bool:
        """Whether all calls were made; the numbers are in the memory that the recorded step gave."""
        found: Any = library()
        return not found.play(self.all, ctypes.c_int64(len(self.calls)))

    def whole(self, y: Tensor) -> bool:
        """Whether playing gives y again, from nothing but the input."""
        want = y.clone()
        for out in self.outputs:
            out.fill_(torch.nan)
        return self.play() and torch.equal(y, want)
