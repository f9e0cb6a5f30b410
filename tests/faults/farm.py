"""Trainers to be harmed: each is a process forked from one that has imported torch, so that a life costs milliseconds.

The parent never computes: a process that has run threads must not be forked.
"""

import contextlib
import json
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from regard.training.checkpoint import Checkpoints, clean, locked
from regard.training.optim import Optim
from regard.training.trainer import Trainer
from tests.train.toy import digest, trainer

ROOT = Path(__file__).resolve().parents[2]
Tell = Callable[[str], None]
GRACE = 120.0  # seconds after which a process counts as hanging
NAP = 0.001


class Broken(Exception):
    """A promise that did not hold."""


def check(held: object, text: str) -> None:
    if not held:
        raise Broken(text)


@dataclass
class Family:
    """What every kind of fault is given: its random numbers, an empty folder, and whether only a taste is wanted."""

    draw: random.Random
    folder: Path
    short: bool

    def count(self, full: int, short: int) -> int:
        return short if self.short else full


# --- processes ----------------------------------------------------------------------------------------------------


@dataclass
class Child:
    """A process, and the pipe on which it tells of every event: ".", and "(" to ")" while a checkpoint is written."""

    pid: int
    pipe: int
    said: str = ""

    def hear(self, events: int) -> bool:
        """Wait for this many events; whether they came before the end."""
        while self.said.count(".") < events:
            got = os.read(self.pipe, 1)
            if not got:
                return False
            self.said += got.decode()
        return True

    @property
    def writing(self) -> bool:
        """Whether it ended inside a write."""
        return self.said.rfind("(") > self.said.rfind(")")

    def send(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def end(self) -> int:
        """Wait; the exit code, or minus the signal that ended it."""
        for _ in range(int(GRACE / NAP)):  # not by the clock: all may be suspended for a while
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.hear(1 << 62)
                os.close(self.pipe)
                return os.waitstatus_to_exitcode(status)
            time.sleep(NAP)
        self.send()
        os.waitpid(self.pid, 0)
        raise Broken(f"a process was still there after {GRACE:.0f} s")


def fork(work: Callable[[Tell], object], errors: Path) -> Child:
    """`work(tell)` in a process of its own; what it says goes to the file `errors`."""
    here, there = os.pipe()
    pid = os.fork()
    if pid:
        os.close(there)
        return Child(pid, here)
    code = 1
    try:
        os.close(here)
        file = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup and shells in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # have them ignored
        work(lambda text: heard(there, text))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def heard(pipe: int, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        os.write(pipe, text.encode())


def done(child: Child, errors: Path) -> None:
    code = child.end()
    check(code == 0, f"a process ended with {code}: {errors.read_text()[-600:]}")


# --- a run of the toy ---------------------------------------------------------------------------------------------


def setup(name: str = "adamw", precision: str = "fp32", **more: Any) -> dict[str, Any]:
    """Dropout, accumulation, a warm-up and evaluations are in all of them."""
    base = {
        "steps": 24,
        "save": 1,
        "evaluate": 5,
        "micro_batches": 2,
        "optim": Optim(name, lr=3e-3),
    }
    return {**base, "precision": precision, **more}


SETUPS = {
    f"{name} {precision}": setup(name, precision)
    for name in ("adamw", "muon")
    for precision in ("fp32", "bf16")
}


def made(folder: Path, told: Tell, **changes: Any) -> Trainer:
    """A trainer in `folder` that writes down each event."""
    file = os.open(folder / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(event: dict[str, Any]) -> None:
        plain = {n: x for n, x in event.items() if n not in ("seconds", "path")}
        os.write(file, (json.dumps(plain) + "\n").encode())
        told(".")

    def write(*args: Any) -> Path:
        told("(")
        path = real(*args)
        told(")")
        return path

    t = trainer(folder / "checkpoints", tell, **changes)
    real, t.checkpoints.write = t.checkpoints.write, write  # type: ignore[method-assign]
    return t


def live(
    folder: Path,
    told: Tell,
    stop: int | None = None,
    skipped: Iterable[int] = (),
    **changes: Any,
) -> Trainer:
    """One life of a run: goes on from what is there, to the end or to step `stop`."""
    with locked(folder):
        t = made(folder, told, **changes)
        clean(t.checkpoints.folder)
        t.resume()
        t.at.skipped.extend(skipped)
        why = t.run(lambda: stop is not None and t.at.step >= stop)
        if why != "asked":
            result = {"digest": digest(t), "at": asdict(t.at), "why": why}
            (folder / "result.json").write_text(json.dumps(result))
    return t


def born(folder: Path, stop: int | None = None, **changes: Any) -> Child:
    folder.mkdir(parents=True, exist_ok=True)
    return fork(lambda told: live(folder, told, stop, **changes), folder / "errors.txt")


def finish(folder: Path, **changes: Any) -> None:
    """Go on without harm to the end."""
    done(born(folder, **changes), folder / "errors.txt")


def undisturbed(folder: Path, **changes: Any) -> dict[str, Any]:
    """What a run comes to that nobody harms: its result and its events by (kind, step)."""
    finish(folder, **changes)
    return outcome(folder)


def outcome(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    return {**result, "events": events(folder)}


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def same(folder: Path, want: dict[str, Any], what: str) -> None:
    """The same weights, optimiser and progress; and in every life every step told what the undisturbed one told."""
    got = outcome(folder)
    for name in ("digest", "at", "why"):
        check(got[name] == want[name], f"{what}: {name} differs, see {folder}")
    told = {(e["kind"], e["step"]): e for e in want["events"] if "step" in e}
    steps = [e for e in got["events"] if e["kind"] in ("step", "evaluation")]
    for event in steps:
        true = told.get((event["kind"], event["step"]))
        check(event == true, f"{what}: told {event}, not {true}")
    count = len({e["step"] for e in steps if e["kind"] == "step"})
    check(count == len([1 for kind, _ in told if kind == "step"]), f"{what}: {count} steps told")
    left = leftovers(folder)
    check(not left, f"{what}: left behind {left}")


def leftovers(folder: Path) -> list[str]:
    """What a write that did not end has left."""
    return [p.name for p in (folder / "checkpoints").glob(".*")]


def latest(folder: Path) -> Path | None:
    return Checkpoints(folder / "checkpoints", lambda model, path: None).latest()


def warm() -> None:
    """Import all that a trainer needs, without a step."""
    torch.set_num_threads(1)
    for changes in SETUPS.values():
        trainer(Path("/nonexistent"), **changes)
