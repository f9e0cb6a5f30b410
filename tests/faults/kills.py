"""kill -9 at random moments; and chains of stops, for every kind of model."""

import shutil
import signal
import time

from regard.training.optim import Optim
from tests.faults.farm import (
    SETUPS,
    Family,
    born,
    check,
    done,
    finish,
    same,
    setup,
    undisturbed,
)
from tests.train.toy import KINDS

PAUSE = 0.012  # seconds: about one checkpoint


def kills(family: Family) -> str:
    """Runs that are killed again and again end as one that never was."""
    draw, wanted, within = family.draw, family.count(200, 6), family.count(60, 1)
    names = list(SETUPS) if not family.short else ["muon bf16"]
    setups = {n: {**SETUPS[n], "steps": family.count(24, 12)} for n in names}
    truths = {n: undisturbed(family.folder / n.replace(" ", "-"), **setups[n]) for n in names}
    killed = inside = runs = 0
    while killed < wanted or inside < within or runs < len(names):
        name = names[runs % len(names)]
        folder = family.folder / f"run-{runs}"
        for _ in range(draw.randint(3, 12)):
            child = born(folder, **setups[name])
            child.hear(draw.randint(0, 8))
            time.sleep(draw.random() * PAUSE)
            child.send(signal.SIGKILL)
            code = child.end()
            if code == 0:
                break
            check(code == -signal.SIGKILL, f"{folder}: ended with {code}, see errors.txt")
            killed += 1
            inside += child.writing
        finish(folder, **setups[name])
        same(folder, truths[name], f"killed run {runs} ({name})")
        shutil.rmtree(folder)
        runs += 1
    return f"{killed} kills, {inside} of them inside a write; {runs} runs all bit-equal"


def chains(family: Family) -> str:
    """Five stops at random steps and six processes, for every kind of model, optimiser and precision."""
    draw, resumes, count = family.draw, 0, 0
    kinds = list(KINDS) if not family.short else ["tuned", "vaswani"]
    for kind in kinds:
        for i, name in enumerate(SETUPS):
            if family.short and i != len(kind) % 4:
                continue
            optim, precision = name.split()
            changes = setup(precision=precision, kind=kind, steps=12, save=3)
            changes["optim"] = Optim(optim, lr=3e-3)
            whole, parts = family.folder / f"{kind}-{i}-whole", family.folder / f"{kind}-{i}-parts"
            want = undisturbed(whole, **changes)
            for stop in sorted(draw.sample(range(1, 12), 5)):
                done(born(parts, stop, **changes), parts / "errors.txt")
                resumes += 1
            finish(parts, **changes)
            same(parts, want, f"{kind} {name}")
            count += 1
    return f"{resumes} resumes in chains of 5; {count} runs ({', '.join(kinds)}) all bit-equal"
