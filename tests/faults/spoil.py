"""Bytes that changed on the disk: found whatever they are, and the checkpoint before is taken."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from regard.training.checkpoint import Checkpoints, fault
from tests.faults.farm import (
    Family,
    born,
    check,
    done,
    finish,
    latest,
    same,
    setup,
    undisturbed,
)

STOP, STEPS = 6, 8


def corruptions(family: Family) -> str:
    """Of the newest of three checkpoints; now and then the run goes on from what is left."""
    draw, count, often = family.draw, family.count(1000, 100), family.count(10, 50)
    changes = setup(steps=STEPS, evaluate=0, keep=3)
    want = undisturbed(family.folder / "whole", **changes)
    start, folder = family.folder / "start", family.folder / "spoiled"
    done(born(start, STOP, **changes), start / "errors.txt")
    newest = f"checkpoints/step-{STOP:08d}"
    true, resumed = content(start / newest), 0
    counts = dict.fromkeys(HARMS, 0)
    for i in range(count):
        how = list(HARMS)[i % len(HARMS)]
        while True:  # until the bytes are others
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(start, folder)
            said = HARMS[how](folder / newest, draw)
            if content(folder / newest) != true:
                break
        what = f"corruption {i}, {how} {said}"
        check(fault(folder / newest), f"{what}: not noticed")
        found = latest(folder)
        check(found is not None and not fault(found), f"{what}: nothing sound was found")
        check(found != folder / newest, f"{what}: the spoiled one was taken")
        counts[how] += 1
        if i % often == 0:
            finish(folder, **changes)
            same(folder, want, what)
            resumed += 1
    harmless(start / newest)
    said = ", ".join(f"{n} {how}" for how, n in counts.items())
    return f"{count} corruptions ({said}) all noticed; {resumed} of the runs finished, bit-equal"


def content(folder: Path) -> dict[str, object]:
    """All of a folder that can be read."""
    kinds = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*")}
    return {n: p.read_bytes() if p.is_file() else p.is_symlink() for n, p in kinds.items()}


def harmless(folder: Path) -> None:
    """What no byte depends on is not a fault: times, permissions, an empty folder."""
    os.utime(folder / "config.json", (0, 0))
    (folder / "config.json").chmod(0o600)
    (folder / "empty").mkdir()
    check(not fault(folder), "times and permissions count as a fault")


# --- harms --------------------------------------------------------------------------------------------------------


def pick(folder: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(p for p in folder.rglob("*") if p.is_file()))


def edited(change: Callable[[bytearray, random.Random], object]) -> Callable[..., str]:
    def harm(folder: Path, draw: random.Random) -> str:
        file = pick(folder, draw)
        data = bytearray(file.read_bytes())
        change(data, draw)
        file.write_bytes(data)
        return file.name

    return harm


def flip(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 1, 2, 20))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def zero(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    end = min(len(data), start + draw.choice((1, 64, 4096)))
    data[start:end] = bytes(end - start)


def grow(data: bytearray, draw: random.Random) -> None:
    data += draw.randbytes(draw.choice((1, 8, 4096)))


def turn(data: bytearray, draw: random.Random) -> None:
    """Two parts change places: the same bytes, the same length."""
    middle = draw.randrange(len(data))
    data[:] = data[middle:] + data[:middle]


def delete(folder: Path, draw: random.Random) -> str:
    file = pick(folder, draw)
    file.unlink()
    return file.name


def swap(folder: Path, draw: random.Random) -> str:
    """Two files of the checkpoint."""
    a, b = pick(folder, draw), pick(folder, draw)
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other)
    b.write_bytes(one)
    return f"{a.name}, {b.name}"


def older(folder: Path, draw: random.Random) -> str:
    """A file of the checkpoint before, or all of them."""
    before = Checkpoints(folder.parent, lambda model, path: None).steps()[-2]
    if draw.random() < 0.2:
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        return "all"
    file = pick(folder, draw)
    shutil.copy(before / file.relative_to(folder), file)
    return file.name


def odd(folder: Path, draw: random.Random) -> str:
    """A folder, a link to nowhere or deep brackets where a file was; a file where none was."""
    file, how = pick(folder, draw), draw.randrange(4)
    if how < 3:
        file.unlink()
    if how == 0:
        file.mkdir()
    elif how == 1:
        file.symlink_to("nowhere")
    elif how == 2:
        file.write_bytes(b"[" * 100_000)
    else:
        (file.parent / "more.json").write_bytes(b"{}")
    return f"{file.name} ({how})"


HARMS: dict[str, Callable[[Path, random.Random], str]] = {
    "flipped": edited(flip),
    "cut": edited(cut),
    "zeroed": edited(zero),
    "grown": edited(grow),
    "turned": edited(turn),
    "deleted": delete,
    "swapped": swap,
    "older": older,
    "odd": odd,
}
