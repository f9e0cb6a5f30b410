"""Processes of a team that die, hang, or lose torchrun:  python -m tests.faults.ranks  (or tests.faults.run ranks)"""

import os
import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from tests.faults.farm import Family, check
from tests.train.ranks import Run, alive, done, gone, saved
from tests.train.test_parallel import equal

STEPS = 40
LIMIT = 10.0  # seconds in which those that live must be gone


def ranks(family: Family) -> str:
    """Whatever ends one process ends all within seconds, leaves none behind, and the next start goes on to the same
    bits."""
    said = []
    for mode in ("fsdp",) if family.short else ("ddp", "fsdp"):
        harms = ["kill"] * family.count(10, 1) + ["torchrun", "stop"] * (not family.short)
        said.append(f"{mode} {harmed(family, mode, harms)}")
    return "; ".join(said)


def harmed(family: Family, mode: str, harms: list[str]) -> str:
    train = {"steps": STEPS, "save": 1, "evaluate": 5}
    job: dict[str, Any] = {"mode": mode, "dropout": 0.1, "train": train}
    home = family.folder / mode
    done(home / "whole", [{**job, "folder": str(home / "whole" / "run")}])
    truth, slowest = saved(home / "whole" / "run", STEPS), 0.0
    left = list(harms)
    lives = 0
    while left:
        folder = home / f"run-{lives}"
        lives += 1
        hurt = {**job, "folder": str(folder / "run"), "loud": True}
        for harm in left[:3]:  # a few in a row hit one run
            run = Run(folder, [hurt])
            check(run.hear(family.draw.randint(1, 14)), f"{folder}: ended early: {run.said()}")
            slowest = max(slowest, hit(family, run, harm))
        left = left[3:]
        done(folder, [hurt])
        check(equal(saved(folder / "run", STEPS), truth), f"{folder}: other bits than undisturbed")
        check(not list((folder / "run").glob(".step-*")), f"{folder}: left behind")
        shutil.rmtree(folder)
    count = f"{harms.count('kill')} processes killed"
    if "stop" in harms:
        count += ", 1 stopped, 1 torchrun killed"
    return f"{count}: the others gone after at most {slowest:.1f} s, none left, all bit-equal"


def hit(family: Family, run: Run, harm: str) -> float:
    """Seconds until the processes that were not hit are gone."""
    pids, victim = run.pids(), family.draw.randrange(run.world)
    if harm == "torchrun":
        os.kill(run.agent.pid, signal.SIGKILL)
        rest = pids
    else:
        os.kill(pids[victim], signal.SIGKILL if harm == "kill" else signal.SIGSTOP)
        rest = [pid for pid in pids if pid != pids[victim]]
    took = gone(rest, LIMIT)
    check(took is not None, f"{harm}: after {LIMIT:.0f} s a process still runs")
    check(run.wait() != 0, f"{harm}: torchrun says all is well")  # of a stopped one it waits 30 s
    check(not any(map(alive, pids)), f"{harm}: a process is left behind")
    return took or 0.0


if __name__ == "__main__":
    where = Path(tempfile.mkdtemp(prefix="faults-ranks-"))
    print(ranks(Family(random.Random(0), where, short=False)))
    shutil.rmtree(where)
