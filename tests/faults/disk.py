"""A disk that is full, at many sizes, and memory that is short: the last good checkpoint stays, and room gives the same
bits."""

import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.training import checkpoint
from tests.faults.command import again, alike, home, whole
from tests.faults.farm import (
    Broken,
    Family,
    Tell,
    check,
    events,
    finish,
    fork,
    latest,
    live,
    same,
    setup,
    undisturbed,
)

CHANGES = setup(steps=6)
PAGE = 4096
ROOM = 64 << 20


@contextmanager
def small(folder: Path, size: int) -> Iterator[None]:
    """A disk of this many bytes at `folder`; `grow` makes it larger."""
    folder.mkdir(parents=True, exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def mount(*args: str) -> None:
    done = subprocess.run(["mount", *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(done.stderr.strip())


def grow(folder: Path) -> None:
    mount("-o", f"remount,size={ROOM}", str(folder))


def disk(family: Family) -> str:
    try:
        with small(family.folder / "try", PAGE):
            pass
    except (PermissionError, FileNotFoundError) as error:
        return f"left out: needs the right to mount a file system ({error})"
    want = undisturbed(family.folder / "whole", **CHANGES)
    unit = sum(pages(p) for p in (latest(family.folder / "whole") or Path()).rglob("*"))
    count, kept, refused = family.count(16, 3), 0, 0
    for looks in (True, False):  # whether the room is looked at before a write
        most = 4 * (unit + checkpoint.SPARE if looks else unit)
        for i in range(count):
            folder = family.folder / f"run-{looks}-{i}"
            with small(folder / "checkpoints", max(PAGE, most * i // (count - 1))):
                code = starved(folder, looks)
                kept += latest(folder) is not None
                refused += code != 0
                grow(folder / "checkpoints")
                finish(folder, **CHANGES)
                same(folder, want, f"disk of {most * i // (count - 1)} bytes")
            shutil.rmtree(folder)
    told = family.count(6, 0)
    for i in range(told):
        commanded(family, i / told)
    return (
        f"{2 * count} sizes of disk, {refused} too small, {kept} with a checkpoint left, "
        f"{told} of the whole command: the last good one loads, all bit-equal after room came"
    )


def pages(path: Path) -> int:
    return -(-path.stat().st_size // PAGE) * PAGE if path.is_file() else 0


def starved(folder: Path, looks: bool) -> int:
    """Train until the disk is full; what was told as saved is there."""

    def work(told: Tell) -> None:
        if not looks:
            checkpoint.SPARE = -(1 << 60)
        live(folder, told, **CHANGES)

    code = fork(work, folder / "errors.txt").end()
    said = (folder / "errors.txt").read_text()
    if code and not ("UsageError: " in said and ("make room" in said or "No space left" in said)):
        raise Broken(f"{folder}: ended with {code}: {said[-500:]}")
    intact(folder)
    return code


def intact(folder: Path) -> int:
    """The step that was told as saved last is there; 0 if none was."""
    saved = max((e["step"] for e in events(folder) if e["kind"] == "checkpoint"), default=0)
    found = latest(folder)
    have = int(found.name[5:]) if found else 0
    check(have >= saved, f"{folder}: step {saved} was saved, {have} is there")
    return have


def commanded(family: Family, share: float) -> None:
    """The whole folder of `regard train` on a disk that is full, then is not."""
    place, want = family.folder / "command", whole(family.folder / "undisturbed")
    home(place)
    with small(place / "run", max(PAGE, int((checkpoint.SPARE + 150_000) * share))):
        child = again(place)
        code, said = child.end(), (place / "errors.txt").read_text()
        check(code in (0, 1, 2, 3), f"regard train ended with {code} on a full disk: {said[-500:]}")
        check("Traceback" not in said, f"regard train on a full disk: {said[-800:]}")
        grow(place / "run")
        alike(place, want, "a command whose disk was full")
    shutil.rmtree(place)


# --- memory -------------------------------------------------------------------------------------------------------


def memory(family: Family) -> str:
    """A limit on the process's memory, a little above what it has when it starts. What was saved stays; the bits of a
    step taken in need may differ in the last place, since libraries then choose other ways to multiply."""
    count, died, kept = family.count(16, 2), 0, 0
    for i in range(count):
        folder = family.folder / f"run-{i}"
        folder.mkdir()

        def work(told: Tell, folder: Path = folder, room: int = i << 21) -> None:
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (now + room, now + room))
            live(folder, told, **CHANGES)

        code = fork(work, folder / "errors.txt").end()
        check(code in (0, 1, -signal.SIGABRT, -signal.SIGSEGV), f"{folder}: ended with {code}")
        died += code != 0
        kept += intact(folder) > 0
        finish(folder, **CHANGES)
    check(died, "no limit was felt")
    return f"{count} limits of memory, {died} too low, {kept} with a checkpoint left: all went on"
