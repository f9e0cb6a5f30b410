"""Calls on a GPU recorded as CUDA graphs that share their memory; numbers that are sent there, or read from here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Recorder:
    """Graphs by key. What they compute must stay in tensors that were there before."""

    def __init__(self) -> None:
        self.graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None

    def record(self, key: Any, call: Callable[[], Any]) -> None:
        """`call` has run before, so that nothing is compiled or chosen now."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, which serve other models, go on meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            call()
        self.pool = self.pool or graph.pool()
        self.graphs[key] = graph

    def try_and_record(self, key: Any, call: Callable[[], Any], state: Sequence[Tensor]) -> None:
        """Record a call that changes `state`, which is put back after two tries."""
        before = [x.clone() for x in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.record(key, call)
        for x, old in zip(state, before, strict=True):
            x.copy_(old)


def send(values: Any, device: torch.device) -> Tensor:
    """Numbers as a tensor on the device; from pinned memory, so that nobody waits."""
    x = torch.as_tensor(values)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


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
