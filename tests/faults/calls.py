"""Every system call of a checkpoint's write may be the last, may fail, and may be all that reached the disk."""

import errno
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import trace
from tests.faults.farm import (
    Broken,
    Child,
    Family,
    Tell,
    born,
    check,
    done,
    finish,
    fork,
    latest,
    live,
    same,
    setup,
    undisturbed,
)
from tests.faults.power import Disk, recorded
from tests.faults.trace import Act, Call, follow

CHANGES = setup(steps=5, evaluate=0)
STEP = 4  # whose write is harmed; those of 2 and 3 are there, and 2 is to be removed
ERRORS = (errno.ENOSPC, errno.EIO)


def calls(family: Family) -> str:
    if why := trace.missing():
        return f"left out: {why}"
    want = undisturbed(family.folder / "whole", **CHANGES)
    seen = {name: watched(family, name) for name in (["later"] if family.short else SCENES)}
    killed = failed = 0
    for name, (old, names) in seen.items():
        every = range(len(names)) if name == "later" else changing(names)
        for i in family.draw.sample(every, family.count(len(every), 5)):
            harmed(family, name, old, want, lambda n, call, i=i: "kill" if n == i else None)
            killed += 1
        for i in changing(names, "write")[: family.count(len(names), 1)]:
            harmed(family, name, old, want, lambda n, call, i=i: "tear" if n == i else None)
            killed += 1
        some = family.draw.sample(changing(names), family.count(len(changing(names)), 1))
        for i, error in ((i, e) for i in some for e in ERRORS):
            harmed(family, name, old, want, lambda n, call, i=i, e=error: e if n == i else None)
            failed += 1
    total = len(seen["later"][1])
    kept = f"a write is {total} calls, {len(changing(seen['later'][1]))} of them changing the disk"
    return f"{kept}; killed at {killed}, failed at {failed}: the old or the new one there, all bit-equal"


def changing(names: list[str], only: str = "") -> list[int]:
    return [i for i, name in enumerate(names) if name and only in name]


def power(family: Family) -> str:
    """The power goes at any call: only what was synchronised is sure, of the rest any part may be there."""
    if why := trace.missing():
        return f"left out: {why}"
    states = points = 0
    for name in SCENES:
        folder, old = scene(family, name)
        disk, steps = Disk(folder), []

        def act(n: int, call: Call, steps: list[Any] = steps) -> None:
            steps.append(recorded(call))

        child = harm(folder, act)
        done(child, folder / "errors.txt")
        new = folder / "checkpoints" / f"step-{STEP if name != 'first' else 1:08d}"
        for i, step in enumerate([None, *steps]):
            if step is not None:
                disk.apply(*step)
            end = i == len(steps)
            if i and not end and step is None:
                continue
            points += 1
            for state in disk.states():
                states += 1
                survives(family.folder / "crashed", state, {new.name} if end else old | {new.name})
        shutil.rmtree(folder)
    return f"power lost at {points} points, {states} states of the disk: the old or the new one in each"


def survives(folder: Path, state: dict[str, bytes | None], allowed: set[str]) -> None:
    """What a crash left is written down and read as a trainer would."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in state.items():
        path = folder / name
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    found = latest(folder)
    check((found.name if found else "") in allowed, f"after a crash {found}, not one of {allowed}")


# --- scenes -------------------------------------------------------------------------------------------------------


def spoiled(folder: Path) -> None:
    """The checkpoint to be written is there, but broken."""
    shutil.copytree(folder / "checkpoints/step-00000003", folder / "checkpoints/step-00000004")
    (folder / "checkpoints/step-00000004/config.json").write_text("{}")


SCENES: dict[str, Callable[[Path], object]] = {
    "later": lambda folder: None,
    "first": lambda folder: shutil.rmtree(folder / "checkpoints"),
    "broken": spoiled,
}


def scene(family: Family, name: str) -> tuple[Path, set[str]]:
    """A folder in which the write of a step is next, and the checkpoints that may be there if it fails ("": none)."""
    start, folder = family.folder / "start", family.folder / "scene"
    if not start.exists():
        done(born(start, STEP - 1, **CHANGES), start / "errors.txt")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(start, folder)
    SCENES[name](folder)
    return folder, {""} if name == "first" else {"step-00000003"}


def harm(folder: Path, act: Act) -> Child:
    """Go on in `folder`; its first write is traced."""

    def work(told: Tell) -> None:
        from regard.training.checkpoint import Checkpoints

        check, write = Checkpoints.check, Checkpoints.write

        def checked(self: Checkpoints, *args: Any) -> None:
            Checkpoints.check = check  # type: ignore[method-assign]
            trace.offer()
            try:
                return check(self, *args)
            except BaseException:
                trace.over()
                raise

        def written(self: Checkpoints, *args: Any) -> Path:
            Checkpoints.write = write  # type: ignore[method-assign]
            try:
                return write(self, *args)
            finally:
                trace.over()

        Checkpoints.check, Checkpoints.write = checked, written  # type: ignore[method-assign]
        live(folder, told, **CHANGES)

    child = fork(work, folder / "errors.txt")
    follow(child.pid, act)
    return child


def watched(family: Family, name: str) -> tuple[set[str], list[str]]:
    """The calls of a write that is let alone."""
    folder, old = scene(family, name)
    names: list[str] = []
    done(harm(folder, lambda n, call: names.append(call.name)), folder / "errors.txt")
    return old, names


def harmed(family: Family, name: str, old: set[str], want: dict[str, Any], act: Act) -> None:
    """The old checkpoint or a new one is there; what comes of it is bit-equal."""
    folder, _ = scene(family, name)
    child = harm(folder, act)
    code = child.end()
    said = (folder / "errors.txt").read_text()
    refused = code == 1 and ("UsageError: " in said or "OSError: " in said)
    if code not in (0, -signal.SIGKILL) and not refused:
        raise Broken(f"{name}: ended with {code}: {said[-500:]}")
    found = latest(folder)
    here = found.name if found else ""
    check(here in old or here > max(old), f"{name}: {here or 'nothing'} is left")
    finish(folder, **CHANGES)
    same(folder, want, f"{name}, harmed")
