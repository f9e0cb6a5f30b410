"""The folder of a run (run.json, metrics.jsonl, samples.jsonl): read, and summed up in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.files import nearby
from regard.report.page import Point
from regard.see.format import number, short, span, strict
from regard.training.log import WORDS

FORMAT = 1
TEXTS = "name task device device_name precision regard torch python commit data metric began ended"
# What run.json holds; a run that was stopped early may lack any of it.
KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys((*TEXTS.split(), "status"), str),
    **dict.fromkeys(["seed", "threads", "world", "parameters", "trained", "step", "steps"], int),
    "memory": int,
    **dict.fromkeys(("command", "classes", "resumed"), list),
    **dict.fromkeys(("config", "changes", "best"), dict),
    "seconds": (int, float),
}
ENDS = {
    "asked": "stopped on request",
    "patience": "ended by patience",
    "diverged": "ended",
    "failed": "failed",
    "running": "still running or killed",
}
# A smoothed loss so many times the lowest, and above the first, has diverged.
WORSE = 1.5
Event = dict[str, Any]


class Unreadable(UsageError):
    """A run's folder that cannot be read; commands end with this code."""

    code = 4


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it. Of a step that was made twice the later one counts."""

    folder: Path
    info: Event
    steps: list[Event]
    evaluations: list[Event]
    broken: list[Event]
    samples: list[Event]
    notes: list[str]

    @property
    def name(self) -> str:
        return self.info.get("name") or self.folder.resolve().name

    def curve(self, name: str) -> list[Point]:
        """(step, value) of training: loss, norm, lr, or rate in tokens a second."""
        value = (lambda e: _rate([e])) if name == "rate" else (lambda e: _float(e.get(name)))
        return [(e["step"], value(e)) for e in self.steps]

    def measured(self, name: str) -> list[Point]:
        """(step, value) of the evaluations that have it."""
        return [(e["step"], _float(e[name])) for e in self.evaluations if name in e]

    @property
    def metrics(self) -> list[str]:
        """What evaluations measured, the loss first."""
        names = dict.fromkeys(
            name
            for event in self.evaluations
            for name, v in event.items()
            if name not in WORDS and isinstance(v, (int, float)) and not isinstance(v, bool)
        )
        return sorted(names, key=lambda name: name != "loss")

    @property
    def command(self) -> list[str]:
        """Its command line, by the name `regard` wherever that lay."""
        given = [str(word) for word in self.info.get("command") or ["train"]]
        named = Path(given[0]).name in ("regard", "__main__.py", "regard.exe")
        return ["regard", *(given[1:] if named else given)]


def read(folder: str | Path) -> Run:
    """The run in a folder; what is missing or damaged is an Unreadable of one sentence."""
    home = Path(folder)
    if not home.is_dir():
        how = nearby(home) or "; give the folder of a run, such as runs/story"
        raise Unreadable(f"{home} is not a folder{how}")
    if not (home / "run.json").is_file():
        raise Unreadable(f"{home} has no run.json, so it is not the folder of a run")
    info = _info(home / "run.json")
    if not (home / "metrics.jsonl").is_file():
        raise Unreadable(f"{home} has no metrics.jsonl: it is gone, or the run made no step yet")
    notes: list[str] = []
    events = _lines(home / "metrics.jsonl", notes)
    samples = _lines(home / "samples.jsonl", notes) if (home / "samples.jsonl").is_file() else []
    for sample in samples:
        sample.update({k: str(sample.get(k) or "") for k in ("source", "text")})
    kinds: dict[str, dict[int, Event]] = {"step": {}, "evaluation": {}, "broken": {}}
    for event in events:
        if event.get("kind") in kinds:
            kinds[event["kind"]][event["step"]] = event
    steps, evaluations, broken = ([each[k] for k in sorted(each)] for each in kinds.values())
    return Run(home, info, steps, evaluations, broken, samples, notes)


def _info(path: Path) -> Event:
    try:
        info = json.loads(_bytes(path))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path} is no JSON: {error}") from None
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        other = info.get("format") if isinstance(info, dict) else type(info).__name__
        raise Unreadable(f"{path} is of format {other!r:.40}; this version reads format {FORMAT}")
    info = {name: value for name, value in info.items() if value is not None}
    for name, kind in KINDS.items():
        if name in info and not isinstance(info[name], kind):
            said = f"{name} is {info[name]!r:.60}"
            raise Unreadable(f"{path}: {said}, which is not what a run writes")
    for at in info.get("resumed", []):
        changes = at.get("changes") if isinstance(at, dict) and "step" in at else None
        pairs = changes.values() if isinstance(changes, dict) else [None]
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise Unreadable(f"{path}: resumed has {at!r:.60}, which is not what a run writes")
    return info


def _lines(path: Path, notes: list[str]) -> list[Event]:
    """The objects of a file, one a line, each with a step. A last line that was cut is left out
    with a note."""
    events: list[Event] = []
    rows = _bytes(path).rstrip().split(b"\n")
    for i, line in enumerate(rows if rows != [b""] else (), 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            if i < len(rows):
                raise Unreadable(f"line {i} of {path} is no JSON: {line!r:.60}") from None
            notes.append(f"{path.name} ends in the middle of line {i}, which is left out")
            break
        if not isinstance(event, dict) or type(event.get("step")) is not int:
            raise Unreadable(f"line {i} of {path} is not an object with a step: {line!r:.60}")
        events.append(event)
    return events


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror or error}") from None


@dataclass(frozen=True)
class Summary:
    """A run in a few figures. `loss` is the training loss at the end, smoothed; `value` that of the
    deciding metric in the best evaluation, at step `best`."""

    status: str
    step: int
    steps: int | None
    metric: str
    best: int | None
    value: float | None
    last: float | None
    loss: float | None
    diverged: bool
    broken: int
    rate: float | None
    seconds: float | None
    parameters: int | None

    @property
    def verdict(self) -> str:
        """loss 3.04, best at 250, not diverged, 3.6k tok/s, 5 min 44 s"""
        if not self.step:
            return "no step was made"
        parts = [f"training loss {number(self.loss, 3)}", "never evaluated"]
        if self.best is not None:
            parts = [f"{self.metric} {number(self.value, 3)}", f"best at {self.best}"]
        parts.append("diverged" if self.diverged else "not diverged")
        if self.broken:
            parts.append(f"{self.broken} step{'s' * (self.broken > 1)} not finite")
        if self.rate is not None and math.isfinite(self.rate):
            parts.append(f"{short(self.rate)} tok/s")
        if self.seconds is not None and math.isfinite(self.seconds):
            parts.append(span(self.seconds))
        if self.status != "done":
            end = ENDS.get(self.status, self.status)
            parts.append(f"{end} at step {self.step} of {self.steps or '?'}")
        return ", ".join(parts)

    def json(self) -> dict[str, Any]:
        """With null for numbers that JSON does not have."""
        return strict({"verdict": self.verdict, **asdict(self)})


def summary(run: Run) -> Summary:
    info = run.info
    metric = info.get("metric") or "loss"
    losses = run.curve("loss")
    means = [y for _, y in smooth(losses)]
    best = next((e for e in reversed(run.evaluations) if is_best(e, metric)), None)
    last = run.evaluations[-1] if run.evaluations else {}
    diverged = info.get("status") == "diverged"
    if means and not diverged:
        risen = means[-1] > WORSE * min(means) and means[-1] > losses[0][1]
        diverged = risen or not math.isfinite(losses[-1][1])
    # A killed run has not written its own time.
    stepping = sum(t for e in run.steps if math.isfinite(t := _float(e.get("seconds"))))
    return Summary(
        status=info.get("status") or "running",
        step=max([e["step"] for e in (*run.steps, *run.evaluations)], default=0),
        steps=info.get("steps"),
        metric=metric,
        best=None if best is None else best["step"],
        value=None if best is None else _float(best.get(metric)),
        last=_float(last[metric]) if metric in last else None,
        loss=means[-1] if means else None,
        diverged=diverged,
        broken=len(run.broken),
        rate=_rate(run.steps) if run.steps else None,
        seconds=max(info.get("seconds") or 0.0, stepping) or None,
        parameters=info.get("parameters"),
    )


def smooth(points: Sequence[Point]) -> list[Point]:
    """A curve smoothed over a fiftieth of it: m_t = keep m_{t-1} + (1 - keep) x_t, divided by 1 -
    keep^t so that the beginning is not drawn to 0. Values that are not finite leave it as it is."""
    keep = 1 - 2 / (max(len(points) / 50, 1) + 1)
    means = []
    mean = weight = 0.0
    for at, x in points:
        if math.isfinite(x):
            mean = keep * mean + (1 - keep) * x
            weight = keep * weight + 1 - keep
        means.append((at, mean / weight if weight else math.nan))
    return means


def is_best(event: Event, metric: str) -> bool:
    """Whether an evaluation was the best so far. Older versions said so of what is not a number."""
    return bool(event.get("best")) and not math.isnan(_float(event.get(metric)))


def _float(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _rate(events: Sequence[Event]) -> float:
    """Tokens a second over steps, evaluations and checkpoints left out."""
    tokens, seconds = (sum(_float(e.get(k)) for e in events) for k in ("tokens", "seconds"))
    return tokens / seconds if seconds > 0 else math.nan
