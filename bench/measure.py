"""What the benches share: interleaved medians, and the peak of resident memory over one call in a fresh process."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def medians(sides: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Seconds of each side, taken in turn (A B, B A, A B, ...) after one call of each to warm up."""
    times: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side()
    for i in range(repeats):
        order = list(range(len(sides)))
        for j in order if i % 2 else order[::-1]:
            start = time.perf_counter()
            sides[j]()
            times[j].append(time.perf_counter() - start)
    return [statistics.median(t) for t in times]


def growth(call: Callable[[], Any]) -> int:
    """Bytes by which resident memory rose above its present level during `call`. Linux only."""
    status = Path("/proc/self/status")

    def field(name: str) -> int:
        line = next(x for x in status.read_text().splitlines() if x.startswith(name + ":"))
        return int(line.split()[1]) * 1024

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is taken now
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = field("VmRSS")
    call()
    return max(0, field("VmHWM") - before)


def child(script: str, *arguments: Any) -> float:
    """The number that `python script --peak arguments` prints, in megabytes."""
    command = [sys.executable, script, "--peak", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout) / 1e6


def floats() -> list[str]:
    """The types that this machine multiplies: bf16 on a GPU, or a CPU that has it. Others widen it first, a number at a
    time: what waits for them does not end."""
    from regard.kernels.linear import half_is_fast

    return ["fp32", "bf16"] if torch.cuda.is_available() or half_is_fast() else ["fp32"]


def header() -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.2f}"
