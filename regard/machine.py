"""What this machine has: devices, memory within the limits of the process, disks; and counts written for people."""

import ctypes
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from regard.errors import ENVIRONMENT, Fault, UsageError


def pick_device(name: str) -> tuple[torch.device, str]:
    """The device, and why it is that one."""
    if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,4})?", name):
        raise UsageError(f"device is {name!r:.60}; choose auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return (torch.device("cuda"), "auto") if count else (torch.device("cpu"), "no cuda device")
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= count:
        raise Fault(
            f"device {name}: this machine has {count} cuda devices that torch can use; take device cpu",
            ENVIRONMENT,
        )
    return torch.device(name), "as asked"


def free_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes: of a GPU, or of this machine within the limits of the process's control groups."""
    if device.type == "cuda":
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + spare
    lines = _text_of(root / "proc/meminfo").splitlines()
    available = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")]
    if not available:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([*available, *_groups(root)]))


def _groups(root: Path) -> Iterator[int]:
    """What each control group, and those above it, leave; files that are only cached can go."""
    for line in _text_of(root / "proc/self/cgroup").splitlines():
        _, kind, path = line.split(":", 2)
        if kind not in ("", "memory"):
            continue
        home, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        if kind:
            home = home / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        inside = Path(path.lstrip("/"))
        for folder in (home / part for part in (inside, *inside.parents)):
            limit, used = _text_of(folder / names[0]).strip(), _text_of(folder / names[1]).strip()
            if limit.isdigit() and used.isdigit():
                stat = dict(line.split() for line in _text_of(folder / "memory.stat").splitlines())
                yield int(limit) - int(used) + int(stat.get(names[2], 0))


def trim() -> None:
    """Give freed memory back to the system: the C library keeps it, and does not always find it again."""
    if call := getattr(ctypes.CDLL(None), "malloc_trim", None):
        call(0)


def free_disk(folder: Path) -> int:
    """Bytes where a folder is, or will be."""
    while not folder.exists():
        folder = folder.absolute().parent
    return shutil.disk_usage(folder).free


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def size(count: float) -> str:
    """Bytes for people: 512 B, 4.0 KiB, 1.2 GiB."""
    count, unit = _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{count:,.{0 if unit == 'B' or count >= 100 else 1}f} {unit}"


def number(count: float) -> str:
    """A count, to go before its unit: 837 k, 26.4 M, 1.3 T."""
    count, unit = _scaled(count, 1000, ("", "k", "M", "G", "T", "P", "E"))
    return f"{count:.3g} {unit}"


def _scaled(count: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    power = 0
    while count >= 1000 and power < len(units) - 1:
        count, power = count / base, power + 1
    return count, units[power]


def duration(seconds: float) -> str:
    """40 s, 6.5 min, 8 h, 12 days."""
    for name, length in (("days", 86400), ("h", 3600), ("min", 60)):
        count = seconds / length
        if count >= 1.5:
            return f"{count:,.0f} {name}" if count >= 10 else f"{count:.2g} {name}"
    return f"{max(seconds, 1):.0f} s"
