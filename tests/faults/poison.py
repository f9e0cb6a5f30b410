"""A loss or a gradient that is not finite: found in the same step, before it touches a weight, and counted."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.feed import Batch
from regard.training.trainer import POLICIES, Diverged
from tests.faults.farm import (
    SETUPS,
    Family,
    Tell,
    check,
    done,
    finish,
    fork,
    live,
    made,
    outcome,
    same,
    undisturbed,
)
from tests.train.toy import digest

STEPS = 10
VALUES = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def nan(family: Family) -> str:
    draw, count, told = family.draw, family.count(30, 3), dict.fromkeys(POLICIES, 0)
    names = list(SETUPS)
    truths: dict[tuple[str, str], Any] = {}
    for i in range(count):
        name, policy = names[i % len(names)], POLICIES[i % len(POLICIES)]
        changes = {**SETUPS[name], "steps": STEPS, "save": 2, "evaluate": 2, "nan": policy}
        if (name, policy) not in truths:
            whole = family.folder / f"whole-{name.replace(' ', '-')}-{policy}"
            truths[name, policy] = undisturbed(whole, **changes)
        at, value = draw.randint(3, STEPS - 1), draw.choice(list(VALUES))
        where = "loss" if draw.random() < 0.3 else draw.randrange(1000)
        folder = family.folder / f"run-{i}"
        folder.mkdir()
        what = f"{value} in {where} of step {at}, {name}, policy {policy}"
        work = partial(ill, folder, at=at, where=where, value=value, changes=changes)
        done(fork(work, folder / "e"), folder / "e")
        found = json.loads((folder / "found.json").read_text())
        check(found["broken"] == [at], f"{what}: noticed at {found['broken']}")
        check(found["before"] == found["after"], f"{what}: the weights were touched")
        check(found["stopped"] == (policy == "stop"), f"{what}: stopped is {found['stopped']}")
        if policy == "stop":
            finish(folder, **changes)
            same(folder, truths[name, policy], what)
        else:
            left_out(family.folder / "without", folder, at, what, changes)
        told[policy] += 1
    said = ", ".join(f"{n} {policy}" for policy, n in told.items())
    return f"{count} injections ({said}): all noticed in their step, no weight touched"


def left_out(without: Path, folder: Path, at: int, what: str, changes: dict[str, Any]) -> None:
    """The run ends as one does that never takes step `at`; figures are told once."""
    shutil.rmtree(without, ignore_errors=True)
    without.mkdir()

    def work(told: Tell) -> None:
        live(without, told, skipped=[at], **changes)

    done(fork(work, without / "e"), without / "e")
    want, got = outcome(without), outcome(folder)
    for name in ("digest", "at"):
        check(got[name] == want[name], f"{what}: {name} is not as without that step")
    figures = [[e for e in x["events"] if e["kind"] == "evaluation"] for x in (got, want)]
    check(figures[0] == figures[1], f"{what}: evaluations {figures[0]}, not {figures[1]}")


def ill(
    folder: Path, told: Tell, at: int, where: str | int, value: str, changes: dict[str, Any]
) -> None:
    """A run whose step `at` goes wrong: the loss, or one number of a parameter's gradient."""
    t = made(folder, told, **changes)
    found: dict[str, Any] = {"broken": [], "stopped": False}
    bad, healthy, callbacks = VALUES[value], t.objective, t.callbacks

    def objective(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        now = t.at.step == at and torch.is_grad_enabled()
        if now:
            found.setdefault("before", digest(t))
        loss, count = healthy(model, batch)
        return (loss * bad if now and where == "loss" else loss), count

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        if t.at.step == at:
            grad.view(-1)[int(where) % grad.numel()] = bad
        return grad

    def hear(event: dict[str, Any]) -> None:
        if event["kind"] == "broken":
            found["broken"].append(event["step"])
            found["after"] = digest(t)
        for callback in callbacks:
            callback(event)

    t.objective, t.callbacks = objective, [hear]
    if where != "loss":
        parameters = list(t.optimizer.named.values())
        parameters[int(where) % len(parameters)].register_hook(spoil)
    try:
        why = t.run()
        result = {"digest": digest(t), "at": vars(t.at), "why": why}
        (folder / "result.json").write_text(json.dumps(result))
    except Diverged:
        found["stopped"] = True
    (folder / "found.json").write_text(json.dumps(found))
