"""Clocks that jump: nothing of a run depends on the time of day."""

import ast
import os
import random
import time
from pathlib import Path
from typing import Any

from tests.faults.farm import (
    ROOT,
    Family,
    Tell,
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

YEARS = 10 * 365 * 86400
WALL = {"time.time", "time.time_ns", "datetime.now"}
FILES = {"st_mtime", "st_ctime", "st_mtime_ns"}


def clocks(family: Family) -> str:
    for path in sorted((ROOT / "regard/training").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            wrong = WALL | (FILES if path.stem in ("keep", "trainer") else set())
            used = wrong & {name, name.rpartition(".")[2]}
            check(not used, f"{path.name} reads the time of day: {name}")
    changes, count = setup(steps=10, evaluate=2), family.count(12, 2)
    want = undisturbed(family.folder / "whole", **changes)
    for i in range(count):
        folder = family.folder / f"run-{i}"
        for stop in sorted(family.draw.sample(range(2, 10), 2)):
            jumped(family, folder, stop, changes)
            files = sorted((folder / "checkpoints").iterdir(), reverse=True)
            for age, path in enumerate(files):  # the newest step is the oldest file
                os.utime(path, (age * YEARS, age * YEARS))
            newest = latest(folder)
            check(newest == max(files), f"{newest} was taken, not {max(files)}")
        finish(folder, **changes)
        same(folder, want, f"clock {i}")
    return f"{count} runs whose clock jumped by up to 10 years at every look: all bit-equal; steps order checkpoints"


def jumped(family: Family, folder: Path, stop: int, changes: dict[str, Any]) -> None:
    seed = family.draw.random()

    def work(told: Tell) -> None:
        draw, real = random.Random(seed), time.time
        time.time = lambda: real() + draw.uniform(-YEARS, YEARS)
        time.time_ns = lambda: int(time.time() * 1e9)
        live(folder, told, stop, **changes)

    folder.mkdir(exist_ok=True)
    done(fork(work, folder / "errors.txt"), folder / "errors.txt")
