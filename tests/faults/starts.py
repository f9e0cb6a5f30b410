"""`regard train` killed at the calls by which it makes, reads and rewrites the folder of its run."""

import os
import shutil
import signal
import sys
from pathlib import Path

from regard.cli.main import main
from tests.faults import trace
from tests.faults.command import LAST, alike, home, reach, start, whole
from tests.faults.farm import Child, Family, Tell, check, fork
from tests.faults.trace import Act, Call

FIRST = 30  # calls that are all tried; some of the rest


def starts(family: Family) -> str:
    if family.short:
        return "left out of the short form"
    if why := trace.missing():
        return f"left out: {why}"
    want, killed = whole(family.folder / "whole"), 0
    for more in ([], ["--resume"]):
        names: list[str] = []
        end(scene(family, more), more, lambda n, call, names=names: names.append(call.name))
        total = len([n for n in names if n])
        rest = family.draw.sample(range(FIRST, total), 15)
        for i in [*range(min(FIRST, total)), *sorted(rest)]:
            folder = scene(family, more)
            end(folder, more, Nth(i))
            alike(folder, want, f"killed at change {i} of {['train', *more]}")
            killed += 1
    return f"{killed} kills at changes of a run's folder, the first {FIRST} of a start and of a resume all: bit-equal"


class Nth:
    """Ends the process at its n-th change of the disk."""

    def __init__(self, n: int):
        self.left = n

    def __call__(self, number: int, call: Call) -> str | None:
        if not call.name:
            return None
        self.left -= 1
        return "kill" if self.left < 0 else None


def scene(family: Family, more: list[str]) -> Path:
    """A folder for a new run, or one with half a run."""
    base, folder = family.folder / "base", family.folder / "scene"
    shutil.rmtree(folder, ignore_errors=True)
    if not more:
        home(folder)
        return folder
    if not base.exists():
        home(base)
        child = start(base)
        reach(base, child, LAST // 2)
        child.send(signal.SIGKILL)
        child.end()
    shutil.copytree(base, folder, symlinks=True)
    return folder


def end(folder: Path, more: list[str], act: Act) -> None:
    def work(told: Tell) -> None:
        os.chdir(folder)
        trace.offer()
        code = main(["train", "story.toml", "--output-dir", "run", "--device", "cpu", *more])
        trace.over()
        sys.exit(code)

    child: Child = fork(work, folder / "errors.txt")
    trace.follow(child.pid, act)
    code = child.end()
    check(code in (0, -signal.SIGKILL), f"ended with {code}: {(folder / 'errors.txt').read_text()}")
