"""How many threads torch should compute on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch


def use_threads(count: int | None = None) -> int:
    """Let torch compute on `count` threads; by default on OMP_NUM_THREADS if it is set, else on every physical core
    that this process may use.

    A step of decoding waits for memory and for the matrix unit, which two threads of one core share; and one thread
    more than there is processor time for makes all others wait at the end of every product."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    count = count or (int(given) if given.isdigit() and int(given) else cores())
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    return count


def cores() -> int:
    """Physical cores among the processors of this process, and no more than its container's quota."""
    mine = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    each = {
        _read(f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list") or i for i in mine
    }
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    limit = int(quota) // int(period) if quota.isdigit() and period.isdigit() else len(each)
    return max(1, min(len(each), limit))


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
