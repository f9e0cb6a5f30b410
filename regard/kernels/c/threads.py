"""How many threads torch should compute on, and how they wait for each other. Importing this does not import torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED = 1 << 21  # products of a weight and a row in a step that are worth a second thread


def wait_asleep() -> bool:
    """Let threads that wait sleep instead of spin, unless OMP_WAIT_POLICY says otherwise; True if it takes effect, that
    is before torch is imported.

    Spinning is about a tenth faster on an idle machine. Where another process wants a core, a thread that spins keeps
    it from the one it waits for: a step of a prepared GPT-2 on two cores, one of them busy, took 734 ms spinning, 16
    asleep, and 19 on one thread."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return "torch" not in sys.modules


def use_threads(count: int | None = None) -> int:
    """Let torch compute on `count` threads; by default on OMP_NUM_THREADS if it is set, else on every physical core
    that this process may use.

    A step of decoding waits for memory and for the matrix unit, which two threads of one core share; and one thread
    more than there is processor time for makes all others wait at the end of every product."""
    import torch

    given = os.environ.get("OMP_NUM_THREADS", "")
    count = count or (int(given) if given.isdigit() and int(given) else cores())
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    return count


@contextmanager
def threads_for(work: int) -> Iterator[None]:
    """Inside, torch computes on one thread where a step's `work`, weights times rows, is too little to share: then a
    second thread makes the first one wait, on a busy machine for ten times as long as the step takes."""
    import torch

    before = torch.get_num_threads()
    few = work < SHARED and before > 1
    if few:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if few:
            torch.set_num_threads(before)


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
