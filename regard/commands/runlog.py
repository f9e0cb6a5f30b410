"""What a run writes about itself beside its checkpoints: run.json, metrics.jsonl, samples.jsonl."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard import __version__
from regard.config import UsageError
from regard.train.config import Config
from regard.train.keep import sync
from regard.train.trainer import Progress, Trainer

if TYPE_CHECKING:
    from regard.commands.options_work import TrainRun

Listener = Callable[[dict[str, Any]], None]
FORMAT = 1


class Log:
    """Hears what the trainer tells and writes it down; `listeners` hear it too. What a run had written after the step
    it goes on from, or goes back to, is cut off, but not why a step is left out."""

    def __init__(self, folder: Path, at: Progress, listeners: Sequence[Listener]):
        self.folder, self.listeners = folder, listeners
        self.skipped = set(at.skipped)
        self.last, self.broke = at.step, False
        self._open(at.step)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.close()

    def __call__(self, event: dict[str, Any]) -> None:
        samples = event.pop("samples", [])
        if event["kind"] != "warning":
            self._follow(event["kind"], event["step"])
            put(self.metrics, event)
        for sample in samples:
            put(self.samples, {"step": event["step"], **sample})
        for listener in self.listeners:
            listener(event)
            if samples:
                listener({"kind": "samples", "step": event["step"], "samples": samples})

    def sync(self) -> None:
        """Have all lines on the disk: a checkpoint must not know of steps that the files lost with the power."""
        for file in self.files:
            os.fsync(file.fileno())

    def _open(self, step: int) -> None:
        names = ("metrics.jsonl", "samples.jsonl")
        self.files = [opened(self.folder / name, step, self.skipped) for name in names]
        self.metrics, self.samples = self.files

    def _follow(self, kind: str, step: int) -> None:
        """The first event after a step that broke tells whether the run went back."""
        if self.broke and step <= self.last:
            self.__exit__()
            self._open(step - 1)
        self.broke = kind == "broken"
        if self.broke:
            self.skipped.add(step)
        else:
            self.last = step


def opened(path: Path, step: int, skipped: Container[int]) -> Any:
    """To append to, without what came after `step`, but for the steps left out; a line that was cut off by a kill goes
    too."""
    lines = path.read_text("utf-8", "replace").split("\n") if path.is_file() else []
    kept = [line for line in lines if (said := parsed(line)) and holds(said, step, skipped)]
    new = path.with_suffix(".new")  # whole or not at all
    new.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    sync(new)
    os.replace(new, path)
    sync(path.parent)
    return path.open("a", encoding="utf-8")


def holds(said: dict[str, Any], step: int, skipped: Container[int]) -> bool:
    """Whether a line is still true of a run that stands at `step`."""
    at = said.get("step", 0)
    return at <= step or (said.get("kind") == "broken" and at in skipped)


def parsed(line: str) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def put(file: Any, event: dict[str, Any]) -> None:
    file.write(json.dumps(event, ensure_ascii=False) + "\n")
    file.flush()


class RunFile:
    """run.json: what was run, with what, and how it ended."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        options: TrainRun,
        trainer: Trainer,
        classes: list[str],
    ):
        self.path, self.trainer = folder / "run.json", trainer
        self.start = time.monotonic()
        old = parsed(self.path.read_text("utf-8", "replace")) if self.path.is_file() else None
        self.before = (old or {}).get("seconds") or 0.0
        self.said = {
            "format": FORMAT,
            "name": folder.name,
            "command": command(options),
            "task": config.task,
            "changes": options.changes,
            "classes": classes,
            "config": asdict(config),
            "metric": config.train.metric,
            "seed": config.train.seed,
            "steps": config.train.steps,
            "precision": config.train.precision,
            "began": (old or {}).get("began") or now(),
            **machine(trainer),
        }

    def write(self, status: str) -> None:
        """As it stands now; whole or not at all."""
        at = self.trainer.at
        best = None if at.best is None else {"step": at.best, "value": at.best_value}
        running = status == "running"
        said = {
            **self.said,
            "status": status,
            "step": at.step,
            "best": best,
            "averaged": self.trainer.averaged,
            "ended": None if running else now(),
            "seconds": round(self.before + time.monotonic() - self.start, 2),
        }
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(said, indent=1, ensure_ascii=False, default=str), "utf-8")
        os.replace(new, self.path)


def check_same(folder: Path, config: Config) -> None:
    """Refuse to go on with another task, model or tokenizer than run.json tells of; checkpoints know of the rest."""
    path = folder / "run.json"
    old = parsed(path.read_text("utf-8", "replace")) if path.is_file() else None
    then: dict[str, Any] = (old or {}).get("config") or {}
    now = json.loads(json.dumps(asdict(config), default=str))
    for name in ("task", "model", "tokenizer", "smoothing", "adapt") if then else ():
        a, b = (placeless(said.get(name)) for said in (then, now))
        if a != b:
            raise UsageError(
                f"{name} was {a!r:.200} when {folder} was begun, now it is {b!r:.200}; go on with the same, or train "
                "into another folder: --output-dir FOLDER"
            )


def placeless(said: Any) -> Any:
    """Settings without a folder, whose name depends on where a command is given."""
    return {k: v for k, v in said.items() if k != "folder"} if isinstance(said, dict) else said


def command(options: TrainRun) -> list[str]:
    """What begins this run anew."""
    words = ["regard", "train", options.config]
    if options.output_dir is not None:
        words += ["--output-dir", options.output_dir]
    for name, value in options.changes.items():
        words += [f"--{name}", value]
    return words


def machine(trainer: Trainer) -> dict[str, Any]:
    device = trainer.device
    cuda = device.type == "cuda"
    numbers = [p.numel() for p in trainer.model.parameters()]
    trained = [p.numel() for p in trainer.model.parameters() if p.requires_grad]
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "world": trainer.team.world,
        "regard": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "parameters": sum(numbers),
        "trained": sum(trained),
        "data": trainer.feed.describe(),
    }


def commit() -> str | None:
    """Of the folder the command was given in, if that is a git checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
