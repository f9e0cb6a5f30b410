"""Calls on a GPU recorded as CUDA graphs that share their memory; numbers that are sent there, or read from here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.kernels.triton.measured import put_off, unmeasured

Key = tuple[Any, ...]
KEPT = 32  # recorded passes over prompts
# Gives what a step changes, which a try must leave as it was.
Changed = Callable[[], Sequence[Tensor]]


class Recorder:
    """Graphs by key. What they compute must stay in tensors that were there before. A step is recorded when it is first
    met; where somebody would wait for that, as in a server, it is put off: until `warm` has recorded it, a graph of
    more rows does its work, or the step runs as it is."""

    def __init__(self, records: bool = True, still: Sequence[Tensor] = ()):
        self.graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None
        self.records = records
        # What is 0 while a step is tried, so that no row moves on.
        self.still = still
        # Whether graphs are not recorded when they are first met; and what then records them, by their keys.
        self.puts_off, self.wanted = False, dict[Key, Callable[[], None]]()
        self.rooms: dict[Key, Tensor] = {}  # what the recorded calls of `again` read

    def clear(self) -> None:
        """What was recorded cannot be played any more."""
        self.graphs, self.pool, self.wanted, self.rooms = {}, None, {}, {}

    def record(self, key: Key, call: Callable[[], object]) -> None:
        """`call` has run before, so that nothing is compiled or chosen now."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, which serve other models, go on meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            call()
        self.pool = self.pool or graph.pool()
        self.graphs[key] = graph

    def try_and_record(self, key: Key, call: Callable[[], object], changed: Changed) -> None:
        """Record a call, and put back what two tries have changed."""
        state = [*self.still, *changed()]
        before = [x.clone() for x in state]
        for x in self.still:
            x.zero_()
        self.rehearse(call)
        self.record(key, call)
        for x, old in zip(state, before, strict=True):
            x.copy_(old)

    def rehearse(self, call: Callable[[], object]) -> None:
        """Twice, beside what runs, so that all is compiled and chosen."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)

    def play(self, key: Key, call: Callable[[Key], object], changed: Changed) -> None:
        """A step or a part of it, of what its key says; on a GPU as a graph."""
        if self.records and key not in self.graphs:
            if self.puts_off:
                self.want(key, call, changed)
                key = self.wider(key)
            else:
                self.try_and_record(key, lambda: call(key), changed)
        if key in self.graphs:
            self.graphs[key].replay()
        else:
            call(key)

    def has(self, *key: Any) -> bool:
        """Whether a call was recorded."""
        return key in self.graphs

    def wider(self, key: Key) -> Key:
        """The least of the recorded keys that does the work of this one, for more rows or longer texts; or itself."""
        if key[0] not in ("step", "feed", "guess"):
            return key
        same = [k for k in self.graphs if k[0] == key[0] and k[4:] == key[4:]]
        able = [k for k in same if all(has >= needs for has, needs in zip(k[1:4], key[1:4]))]
        return min(able, key=lambda k: k[1:4], default=key)

    def again(
        self, key: Key, numbers: Tensor, call: Callable[[Tensor], object], small: bool
    ) -> None:
        """A call on numbers; if it is small, as a graph that is recorded when its key comes again."""
        again, small = key in self.rooms, small and self.records
        if small and len(self.rooms) < KEPT:
            self.rooms.setdefault(key, torch.empty_like(numbers))
        if not (again and small):
            call(numbers)
            return
        room = self.rooms[key]
        if key not in self.graphs:
            if self.puts_off:
                self.wanted[key] = lambda: self.record(key, lambda: call(room))
                call(numbers)
                return
            self.record(key, lambda: call(room))
        room.copy_(numbers)
        self.graphs[key].replay()

    def want(self, key: Key, call: Callable[[Key], object], changed: Changed) -> None:
        """Have a step recorded by `warm`."""
        self.wanted[key] = lambda: self.try_and_record(key, lambda: call(key), changed)

    def warm(self) -> None:
        """Record one of the graphs that are wanted. If something in it is yet to be measured, it comes once more."""
        key = next(iter(self.wanted))
        record = self.wanted.pop(key)
        with put_off():
            record()
        if unmeasured():
            del self.graphs[key]
            self.wanted = {key: record, **self.wanted}


def send(values: Any, device: torch.device) -> Tensor:
    """Numbers as a tensor on the device; from pinned memory, so that nobody waits."""
    x = torch.as_tensor(values)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def to_host(each: Sequence[Tensor]) -> list[Tensor]:
    """Copies on their way, as they are when all that was launched before is done."""
    if not each[0].is_cuda:
        return [x.clone() for x in each]
    found = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in each]
    for x, y in zip(found, each, strict=True):
        x.copy_(y, non_blocking=True)
    return found


def arrival(device: torch.device) -> torch.cuda.Event | None:
    """What tells that copies from a GPU have arrived, and when."""
    new = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
    return new and torch.cuda.current_stream().record_event(new)


def shared(x: Tensor, device: torch.device) -> tuple[Any, Tensor]:
    """Numbers as an array of numpy, and as a tensor of the device, which reads them where they lie: in the host's
    memory, over the bus."""
    if device.type != "cuda":
        return x.numpy(), x
    pinned = x.pin_memory().numpy()
    seen = torch.as_tensor(_Seen(pinned), device=device)
    assert seen.data_ptr() == pinned.ctypes.data
    return pinned, seen


class _Seen:
    def __init__(self, pinned: Any):
        self.pinned = pinned
        self.__cuda_array_interface__ = {**pinned.__array_interface__, "version": 3}
