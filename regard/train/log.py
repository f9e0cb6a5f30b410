"""What a run writes about itself beside its checkpoints: run.json, metrics.jsonl, samples.jsonl."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from regard.config import to_dict
from regard.data.config import Data
from regard.data.shards import sync
from regard.errors import VERSION, UsageError
from regard.train.config import Config
from regard.train.trainer import Callback, Progress, Trainer, differences, flat

FORMAT = 1
# What a run goes on with, of run.json and of its options, with their types.
OPTIONS = {"keep": int, "device": str, "log_to": list}
INFO: dict[str, Any] = {
    **{"config": dict, "options": dict, "resumed": list, "command": list, "began": str},
    "seconds": (int, float),
}
PLACES = (
    *(f"data.{name}" for name in ("train", "target", "valid", "valid_target")),
    *(f"{name}.folder" for name in ("model", "tokenizer")),
)
UNWRITTEN = ("warning", "checkpoint")  # of what is told: it depends on where a run was stopped


class Log:
    """Hears what the trainer tells and writes it down; `listeners` hear it too. What a run had written after the step
    it goes on from, or goes back to, is cut off, but not why a step is left out: however often it was stopped or
    killed, the files are those of a run that never was."""

    def __init__(self, folder: Path, at: Progress, listeners: Sequence[Callback]):
        self.folder, self.listeners = folder, listeners
        self.skipped = set(at.skipped)
        self.last, self.broke = at.step, False
        self._open(at)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.close()

    def __call__(self, event: dict[str, Any]) -> None:
        samples = event.pop("samples", [])
        if event["kind"] not in UNWRITTEN:
            self._follow(event["kind"], event["step"])
            put(self.metrics, event)
        for sample in samples:
            put(self.samples, {"step": event["step"], "kind": event["kind"], **sample})
        for listener in self.listeners:
            listener(event)
            if samples:
                listener({"kind": "samples", "step": event["step"], "samples": samples})

    def sync(self) -> None:
        """Have all lines on the disk: a checkpoint must not know of steps that the files lost with the power."""
        for file in self.files:
            os.fsync(file.fileno())

    def _open(self, at: Progress) -> None:
        names = ("metrics.jsonl", "samples.jsonl")
        self.files = [open_log(self.folder / name, at, self.skipped) for name in names]
        self.metrics, self.samples = self.files

    def _follow(self, kind: str, step: int) -> None:
        """The first event after a step that broke tells whether the run went back."""
        if self.broke and step <= self.last:
            self.__exit__()
            done = step if kind == "evaluation" else step - 1
            self._open(Progress(done, evaluated=step - 1))
        self.broke = kind == "broken"
        if self.broke:
            self.skipped.add(step)
        else:
            self.last = step


def open_log(path: Path, at: Progress, skipped: Container[int]) -> Any:
    """To append to, without what came after the progress `at`, but for the steps left out; a line that was cut off by a
    kill goes too."""
    lines = path.read_text("utf-8", "replace").split("\n") if path.is_file() else []
    true = [line for line in lines if (event := parse(line)) and holds(event, at, skipped)]
    replace_file(path, "".join(f"{line}\n" for line in true))
    return path.open("a", encoding="utf-8")


def holds(event: dict[str, Any], at: Progress, skipped: Container[int]) -> bool:
    """Whether a line is still true of a run that stands there. Changed settings, an evaluation and an average are told
    after the checkpoint of their step: they come again if it does not know of them."""
    step, kind = event.get("step", 0), event.get("kind", "evaluation")
    if kind == "broken" and step in skipped:
        return True
    if step != at.step:
        return bool(step < at.step)
    if kind == "evaluation":
        return at.evaluated == step
    return kind != "settings" and (kind != "average" or at.averaged is not None)


def replace_file(path: Path, text: str) -> None:
    """Whole or not at all, also when the power goes."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8", errors="replace")
    sync(new)
    os.replace(new, path)
    sync(path.parent)


def parse(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def put(file: Any, event: dict[str, Any]) -> None:
    file.write(json.dumps(event, ensure_ascii=False) + "\n")
    file.flush()


@dataclass(frozen=True)
class Launch:
    """How a run is begun. `keep`, `device` and `log_to` that are not said are as in the run that
    goes on."""

    folder: Path
    command: list[str]
    changes: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    overwrite: bool = False
    force: bool = False
    keep: int = 2
    device: str = "auto"
    log_to: tuple[str, ...] = ()


class RunFile:
    """run.json: what was run, with what, and how it ended."""

    def __init__(self, launch: Launch, config: Config, trainer: Trainer, classes: list[str]):
        folder = launch.folder
        self.path, self.trainer = folder / "run.json", trainer
        self.start = time.monotonic()
        old = read_run(folder)
        self.before = old.get("seconds", 0.0)
        options = {"keep": launch.keep, "device": launch.device, "log_to": list(launch.log_to)}
        was = old.get("options", {})
        other = {n: [was[n], x] for n, x in options.items() if n in was and was[n] != x}
        changes = {**trainer.changes, **other}
        again = {"step": trainer.at.step, "at": now(), "changes": changes}
        self.info = {
            "format": FORMAT,
            "name": folder.name,
            "command": launch.command,
            "task": config.task,
            "changes": dict(launch.changes),
            "classes": classes,
            "config": asdict(config),
            "metric": config.train.metric,
            "seed": config.train.seed,
            "steps": config.train.steps,
            "precision": config.train.precision,
            "options": options,
            "resumed": [*old.get("resumed", []), *([again] if launch.resume else [])],
            "began": old.get("began") or now(),
            **machine(trainer),
        }

    def write(self, status: str) -> None:
        """As it stands now; whole or not at all."""
        at = self.trainer.at
        best = None if at.best is None else {"step": at.best, "value": at.best_value}
        running = status == "running"
        info = {
            **self.info,
            "status": status,
            "step": at.step,
            "best": best,
            "averaged": bool(self.trainer.at.averaged),
            "ended": None if running else now(),
            "seconds": round(self.before + time.monotonic() - self.start, 2),
        }
        replace_file(self.path, json.dumps(info, indent=1, ensure_ascii=False, default=str))


def read_run(folder: Path) -> dict[str, Any]:
    """What run.json says that a run goes on with; what is not there, or damaged, is left out."""
    path = folder / "run.json"
    whole = (parse(path.read_text("utf-8", "replace")) if path.is_file() else None) or {}
    info = {name: x for name, x in whole.items() if isinstance(x, INFO.get(name, ()))}
    if "options" in info:
        each = info["options"].items()
        info["options"] = {n: x for n, x in each if isinstance(x, OPTIONS.get(n, ()))}
    return info


def check_same(folder: Path, config: Config) -> None:
    """Refuse to go on with another task, model, tokenizer or data than run.json tells of, setting by setting; one that
    it does not have, of an older version, had its default. Where files lie may change: what is in them is known to the
    checkpoints, and so are the settings of training."""
    then = read_run(folder).get("config")
    if then is None:
        return
    usual = flat(to_dict(Config(config.task, Data(()), {"preset": ""})))
    was = {n: x for n, x in usual.items() if n != "model.preset"} | flat(then)
    now = flat(json.loads(json.dumps(to_dict(config), default=str)))
    names = [n for n in dict.fromkeys([*now, *was]) if n not in PLACES]
    differ = [n for n in names if was.get(n) != now.get(n) and not n.startswith("train.")]
    if differ:
        listed = differences({n: [was.get(n), now.get(n)] for n in differ})
        raise UsageError(
            f"{listed} (since {folder} was begun); go on with the same, or train into another folder: "
            "--output-dir FOLDER"
        )


# --- config.toml ----------------------------------------------------------------------------------


def as_toml(config: Config) -> str:
    """Every setting of a run as a file that can be trained from anywhere: paths begin at the root."""
    here = Path.cwd()

    def placed(table: dict[str, Any]) -> dict[str, Any]:
        return {n: str(here / x) if n == "folder" else x for n, x in table.items()}

    model, tokenizer = placed(config.model), placed(config.tokenizer)
    whole = replace(config, data=config.data.under(here), model=model, tokenizer=tokenizer)
    lines = [f"# regard {VERSION}: the settings of this run", f"task = {value(config.task)}"]
    for name, table in to_dict(whole).items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]"]
            lines += settings(table)
    return "\n".join(lines) + "\n"


def settings(table: dict[str, Any]) -> list[str]:
    """name = value; what is None is not set."""
    bare = {n: n if re.fullmatch("[A-Za-z0-9_-]+", n) else value(n) for n in table}
    return [f"{bare[n]} = {value(x)}" for n, x in table.items() if x is not None]


def value(x: Any) -> str:
    """As TOML writes it."""
    if isinstance(x, bool | str):
        return json.dumps(x, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(x, dict):
        return f"{{ {', '.join(settings(x))} }}" if x else "{}"
    return f"[{', '.join(map(value, x))}]" if isinstance(x, list) else repr(x)


# --- what run.json says of it ---------------------------------------------------------------------


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
        "regard": VERSION,
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
