"""The C calls of a decoding step, recorded once and played again by one call: the same memory, other numbers in it.

    with tape.recording():
        y = step(x)             every C call is made, and written down with the memory it names
    x.copy_(other)
    tape.play()                 y is now that of the other x

What torch computes in between is not recorded: `Tape.whole` tells whether anything is missing. Memory that one call
writes and none reads any more is given to later calls (`Tape.settle`), so that little of it goes around in the caches.
"""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from regard.kernels.c.native import library

KINDS = {"linear": 0, "norm": 1, "update_cache": 2, "attend_one": 3}
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
        self.calls: list[tuple[int, ...]] = []
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

    def recorded(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        """`call`, which is written down too."""

        def made(packed: bytes, *rest: int) -> int:
            self.packed.append(ctypes.create_string_buffer(packed))
            address = ctypes.addressof(self.packed[-1])
            self.calls.append((KINDS[name], address, *(rest or (0, 0, 0, 0))))
            return call(packed, *rest)

        return made

    def settle(self, y: Tensor) -> Tensor:
        """Moves what the calls write to into one piece of memory, each output for as long as it is read, y for good;
        gives y there."""
        words = [self.words(i) for i in range(len(self.calls))]
        starts = sorted((out.data_ptr(), out.nbytes) for out in self.outputs)
        lives: dict[int, list[float]] = {}
        for i, each in enumerate(words):
            for word in each:
                if (start := self.holder(starts, word)) is not None:
                    lives.setdefault(start, [i, i])[1] = i
        lives[y.data_ptr()][1] = math.inf
        placed: dict[int, int] = {}
        taken: list[tuple[int, int, float]] = []  # from, to, the last call that reads it
        sizes = dict(starts)
        for start, (first, last) in sorted(lives.items(), key=lambda item: item[1][0]):
            taken, at = sorted(t for t in taken if t[2] >= first), 0
            for begin, end, _ in taken:
                if at + sizes[start] <= begin:
                    break
                at = max(at, -(-end // 64) * 64)
            placed[start] = at
            taken.append((at, at + sizes[start], last))
        room = max(at + sizes[start] for start, at in placed.items())
        self.outputs = [torch.empty(room // 4 + 16)]
        base = -(-self.outputs[0].data_ptr() // 64) * 64

        def moved(word: int) -> int:
            start = self.holder(starts, word)
            return word if start is None else base + placed[start] + word - start

        for i, each in enumerate(words):
            fresh = [moved(word) for word in each]
            if self.calls[i][0] == KINDS["linear"]:
                self.calls[i] = (*self.calls[i][:2], *fresh)
            else:
                ctypes.memmove(
                    self.packed[i], Struct(f"{len(fresh)}q").pack(*fresh), 8 * len(fresh)
                )
        self.all = ctypes.create_string_buffer(b"".join(CALL.pack(*call) for call in self.calls))
        skip = (base - self.outputs[0].data_ptr() + placed[y.data_ptr()]) // 4
        return self.outputs[0][skip : skip + y.numel()].view(y.shape)

    def words(self, i: int) -> tuple[int, ...]:
        """What call i is given, addresses among it, as whole numbers."""
        if self.calls[i][0] == KINDS["linear"]:
            return self.calls[i][2:]
        size = len(self.packed[i]) // 8
        return Struct(f"{size}q").unpack(self.packed[i].raw[: 8 * size])

    @staticmethod
    def holder(starts: list[tuple[int, int]], word: int) -> int | None:
        """Where the output begins in which this address lies."""
        i = bisect_right(starts, (word, math.inf)) - 1
        return starts[i][0] if i >= 0 and word < sum(starts[i]) else None

    def play(self) -> bool:
        """Whether all calls were made; the numbers are in the memory that the recorded step gave."""
        found: Any = library()
        return not found.play(self.all, ctypes.c_int64(len(self.calls)))

    def whole(self, y: Tensor, want: Tensor) -> bool:
        """Whether playing gives at y what is wanted, from nothing but the input."""
        for out in self.outputs:
            out.fill_(torch.nan)
        return self.play() and torch.equal(y, want)
