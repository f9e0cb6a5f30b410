"""Calls on a GPU recorded as CUDA graphs that share their memory, side by side where asked, and numbers sent there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
        with torch.cuda.graph(graph, pool=self.pool):
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


@contextmanager
def beside(x: Tensor) -> Iterator[Callable[[], None]]:
    """While a graph is recorded, what is done within runs beside what follows, until what this gives is called. What it
    reads must be held until then, what it makes may be used from then on."""
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        yield lambda: None
        return
    main, second = torch.cuda.current_stream(x.device), _second(x.device)
    second.wait_stream(main)
    with torch.cuda.stream(second):
        yield lambda: main.wait_stream(second)


@functools.cache
def _second(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def send(values: Any, device: torch.device) -> Tensor:
    """Numbers as a tensor on the device; from pinned memory, so that nobody waits."""
    x = torch.as_tensor(values)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
