"""The real command, harmed: `regard train` killed, stopped by signals, met by a second one, its folder spoiled."""

import contextlib
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.cli.main import main
from regard.training.run import begun
from tests.faults.farm import GRACE, NAP, ROOT, Broken, Child, Family, check, fork
from tests.faults.spoil import HARMS

TEXT = "the quick brown fox jumps over the lazy dog. pack my box with five dozen jugs. " * 40
CONFIG = """
task = "lm"
[model]
preset = "gpt2"
layers = 1
dim = 16
heads = 2
max-len = 32
dropout = 0.1
[data]
train = "story.txt"
held = 0.2
length = 16
rows = 4
pack = "windows"
[tokenizer]
kind = "chars"
[train]
steps = 40
evaluate = 20
save = 5
ema = 0.9
micro-batches = 2
optim = { lr = 1e-2 }
schedule = { warmup = 10 }
"""
LAST = 40


def home(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "story.txt").write_text(TEXT, encoding="utf-8")
    (folder / "story.toml").write_text(CONFIG, encoding="utf-8")


def start(folder: Path, *more: str, real: bool = False) -> Child:
    """`regard train` in `folder`; `real`: a process that starts from nothing, as a user's does."""
    arguments = ["train", "story.toml", "--output-dir", "run", "--device", "cpu", *more]

    def work(told: Any) -> None:
        os.chdir(folder)
        if real:
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            os.execve(sys.executable, [sys.executable, "-m", "regard", *arguments], env)
        code = main(arguments)
        (folder / "modules.json").write_text(json.dumps(sorted(sys.modules)))
        sys.exit(code)

    return fork(work, folder / "errors.txt")


def again(folder: Path, real: bool = False) -> Child:
    """As a user would go on: with --resume once there is something."""
    return start(folder, *(["--resume"] if begun(folder / "run") else []), real=real)


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run/metrics.jsonl"
    return [json.loads(t) for t in path.read_text().splitlines()] if path.is_file() else []


def reach(folder: Path, child: Child, count: int) -> None:
    """Wait until metrics.jsonl has so many lines, or the process is gone."""
    path = folder / "run/metrics.jsonl"
    for _ in range(int(GRACE / NAP)):
        here = path.is_file() and path.read_bytes().count(b"\n") >= count
        if here or os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(NAP)
    raise Broken(f"no line {count} in {path}")


def result(folder: Path) -> dict[str, Any]:
    """What must be equal: weights, optimiser, the mean of the last checkpoints, and every line that was written, apart
    from times."""
    home = folder / "run/checkpoints"
    step = home / f"step-{LAST:08d}"
    files = [*sorted(step.rglob("*.safetensors")), *sorted(home.glob("average/*.safetensors"))]
    check(len(files) > 1, f"{step} has no weights or no optimiser")
    found: dict[str, Any] = {
        str(p.relative_to(home)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
    }
    samples = folder / "run/samples.jsonl"
    found["samples"] = samples.read_text() if samples.is_file() else ""
    found["told"] = [{n: x for n, x in e.items() if n != "seconds"} for e in lines(folder)]
    return found


def whole(folder: Path, settle: Callable[[Path], None] = home) -> dict[str, Any]:
    """An undisturbed run's result, of what `settle` put there; trained once. What it had to import is imported here,
    for the next ones."""
    if not folder.exists():
        settle(folder)
        code = start(folder).end()
        check(code == 0, f"regard train: {(folder / 'errors.txt').read_text()[-800:]}")
        for name in json.loads((folder / "modules.json").read_text()):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    return result(folder)


def alike(folder: Path, want: dict[str, Any], what: str, real: bool = False) -> None:
    """Go on to the end; the same result."""
    code = again(folder, real).end()
    said = (folder / "errors.txt").read_text()
    check(code == 0, f"{what}: going on ended with {code}: {said[-800:]}")
    got = result(folder)
    for name in want:
        check(got[name] == want[name], f"{what}: {name} differs, see {folder}")
    check((folder / "run/last").resolve().name == f"step-{LAST:08d}", f"{what}: last is stale")


# --- families -----------------------------------------------------------------------------------------------------


def command(family: Family) -> str:
    """kill -9 of processes that start from nothing, at any time of their life."""
    if family.short:
        return "left out of the short form"
    want, draw = whole(family.folder / "whole"), family.draw
    killed = runs = saved = 0
    while killed < 10:
        folder = family.folder / f"run-{runs}"
        home(folder)
        for _ in range(draw.randint(1, 3)):
            child = again(folder, real=True)
            before = len(lines(folder))
            reach(folder, child, before + draw.randint(0, 30))
            time.sleep(draw.random() * (0.02 if before else 2.0))
            child.send(signal.SIGKILL)
            killed += child.end() == -signal.SIGKILL
        saved += (folder / "run/checkpoints").is_dir()
        alike(folder, want, f"command {runs}, killed", real=True)
        runs += 1
    return f"{killed} kills of regard train; {runs} runs all bit-equal, {saved} from a checkpoint"


SIGNALS = {
    "SIGTERM": ([signal.SIGTERM], {143}),
    "SIGINT": ([signal.SIGINT], {130}),
    "SIGINT twice": ([signal.SIGINT, signal.SIGINT], {130}),
    "SIGHUP": ([signal.SIGHUP], {129, -signal.SIGHUP}),
}


def signals(family: Family) -> str:
    """Stopped at a random step: the promised exit code, nothing lost, the same bits."""
    want, draw, counts = whole(family.folder / "whole"), family.draw, dict.fromkeys(SIGNALS, 0)
    each = family.count(8, 1)
    for name, (numbers, codes) in SIGNALS.items():
        while counts[name] < each:
            folder = family.folder / f"run-{name.replace(' ', '-')}-{counts[name]}"
            shutil.rmtree(folder, ignore_errors=True)
            home(folder)
            child = again(folder)
            reach(folder, child, draw.randint(1, LAST - 10))
            for number in numbers:
                time.sleep(draw.random() * 0.01)
                child.send(number)
            code = child.end()
            if code == 0:  # it was done before
                continue
            said = (folder / "errors.txt").read_text()
            check(code in codes and "Traceback" not in said, f"{name}: {code}: {said[-800:]}")
            if len(numbers) == 1 and name != "SIGHUP":
                saved = sorted(p.name for p in (folder / "run/checkpoints").glob("step-*"))[-1]
                step = lines(folder)[-1]["step"]
                check(saved == f"step-{step:08d}", f"{name}: {saved}, but step {step} was made")
                check("--resume" in said, f"{name}: no word on how to go on")
            alike(folder, want, name)
            counts[name] += 1
    said = ", ".join(f"{n} {name}" for name, n in counts.items())
    return f"{said}: exit codes as promised, all bit-equal"


def rivals(family: Family) -> str:
    """A second trainer in the folder refuses, whatever it is asked for, and harms nothing."""
    want, tries = whole(family.folder / "whole"), 0
    for more in [["--overwrite"], ["--resume"], []][: family.count(3, 1)]:
        folder = family.folder / f"run{'-'.join(more)}"
        home(folder)
        first = start(folder)
        reach(folder, first, 12)
        os.kill(first.pid, signal.SIGSTOP)  # so that it is at work for sure
        errors = (folder / "errors.txt").rename(folder / "first.txt")
        code = start(folder, *more).end()
        said = (folder / "errors.txt").read_text()
        os.kill(first.pid, signal.SIGCONT)
        check(code == 2 and said.count("\n") == 1, f"second {more}: {code}: {said}")
        check(first.end() == 0, f"first, beside a second {more}: {errors.read_text()[-800:]}")
        check(result(folder) == want, f"the first run differs after a second {more}")
        tries += 1
    return f"{tries} second trainers refused, the first unharmed"


def folders(family: Family) -> str:
    """Any other file of a run's folder spoiled: refused in a sentence, or the same bits; no traceback."""
    want, draw, base = whole(family.folder / "whole"), family.draw, family.folder / "base"
    home(base)
    child = start(base)
    reach(base, child, LAST // 2)
    child.send(signal.SIGTERM)
    check(child.end() == 143, "the run was not stopped")
    names = sorted(p.relative_to(base) for p in (base / "run").rglob("*") if spoils(base, p))
    counts = {"the same bits": 0, "refused": 0}
    for i in range(family.count(60, 4)):
        folder = family.folder / "spoiled"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder, symlinks=True)
        name = names[i % len(names)]
        how = draw.choice(["flipped", "cut", "zeroed", "grown", "turned", "deleted"])
        spoil_one(folder / name, how, draw)
        child = again(folder)
        code, said = child.end(), (folder / "errors.txt").read_text()
        what = f"{name} {how}"
        check("Traceback" not in said and code in (0, 1, 2, 4), f"{what}: {code}: {said[-800:]}")
        if code == 0:
            got = result(folder)
            check(
                all(got[n] == want[n] for n in want if n not in ("told", "samples")),
                f"{what}: other weights",
            )
        counts["refused" if code else "the same bits"] += 1
    said = ", ".join(f"{n} {what}" for what, n in counts.items())
    return (
        f"{sum(counts.values())} corruptions of {len(names)} files beside the checkpoints: {said}"
    )


def spoils(base: Path, path: Path) -> bool:
    inside = path.relative_to(base / "run").parts
    return path.is_file() and inside[0] not in ("checkpoints", "last", "best")


def spoil_one(path: Path, how: str, draw: random.Random) -> None:
    """A harm of `spoil`, on one file."""
    if not path.stat().st_size and how != "deleted":
        return
    alone = path.with_name("alone")
    alone.mkdir()
    path.rename(alone / path.name)
    HARMS[how](alone, draw)
    for left in alone.iterdir():
        left.rename(path)
    alone.rmdir()
