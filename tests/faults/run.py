"""Harm training in every way we know, and see that nothing is lost.

python -m tests.faults.run [FAMILY ...] [--seed N] [--short]

A line a family. A failure prints how to see it again, and the folder it left; the exit code is then 1.
"""

import argparse
import importlib
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.faults.farm import Broken, Family, warm

FAMILIES = {
    "kills": "kills",
    "chains": "kills",
    "calls": "calls",
    "power": "calls",
    "corruptions": "spoil",
    "disk": "disk",
    "memory": "disk",
    "nan": "poison",
    "command": "command",
    "starts": "starts",
    "signals": "command",
    "rivals": "command",
    "folders": "command",
    "clocks": "clocks",
    "ranks": "ranks",
    **dict.fromkeys(("chat", "prefer", "lora", "qlora", "averaged"), "tuning"),
}
IN_MEMORY = {
    "chains",
    "calls",
    "power",
    "corruptions",
    "nan",
    "memory",
    "folders",
    "starts",
    *("chat", "prefer", "lora", "qlora", "averaged"),
}  # a real disk is slow


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--seed", type=int, default=None, help="replay the same draws")
    parser.add_argument("--short", action="store_true", help="a taste of each")
    options = parser.parse_args()
    unknown = set(options.families) - FAMILIES.keys()
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(FAMILIES)}")
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    warm()
    failed = [n for n in options.families or FAMILIES if not passed(n, seed, options.short)]
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


def passed(name: str, seed: int, short: bool) -> bool:
    memory = "/dev/shm" if (short or name in IN_MEMORY) and Path("/dev/shm").is_dir() else None
    folder, start = Path(tempfile.mkdtemp("", f"faults-{name}-", memory)), time.monotonic()
    try:
        text = found(name)(Family(random.Random(f"{name}:{seed}"), folder, short))
    except Exception as error:
        if not isinstance(error, Broken):
            traceback.print_exc()
        again = f"python -m tests.faults.run {name} --seed {seed}{' --short' * short}"
        print(f"{name:12} FAILED: {error}\n{'':12} again: {again}; left: {folder}", flush=True)
        return False
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{name:12} {text}  (seed {seed}, {time.monotonic() - start:.0f} s)", flush=True)
    return True


def found(name: str) -> Callable[[Family], str]:
    return getattr(importlib.import_module(f"tests.faults.{FAMILIES[name]}"), name)


if __name__ == "__main__":
    sys.exit(main())
