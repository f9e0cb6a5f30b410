"""The folder of a run, read from run.json, metrics.jsonl and samples.jsonl alone, and what it comes
to in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.see.format import number, short, span

FORMAT = 1
TEXTS = "name task device device_name precision regard torch python commit data metric began ended"
# What run.json holds; a run that was stopped early may lack any of it.
KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys((*TEXTS.split(), "status"), str),
    **dict.fromkeys(["seed", "threads", "world", "parameters", "trained", "step", "steps"], int),
    **dict.fromkeys(("command", "classes"), list),
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
NO_METRIC = ("kind", "step", "best", "signatures")


class Unreadable(UsageError):
    """A run's folder that cannot be read; commands end with this code."""

    code = 4


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it. Of a step that was made twice the later one counts."""

    folder: Path
    info: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    broken: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    notes: list[str]

    @property
    def name(self) -> str:
        return self.info.get("name") or self.folder.resolve().name

    def curve(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of training: loss, norm, lr, or rate in tokens a second."""
        if name == "rate":
            return [(e["step"], _rate([e])) for e in self.steps]
        return [(e["step"], _float(e.get(name))) for e in self.steps]

    def measured(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of the evaluations that have it."""
        return [(e["step"], _float(e[name])) for e in self.evaluations if name in e]

    @property
    def metrics(self) -> list[str]:
        """What evaluations measured, the loss first."""
        names = dict.fromkeys(
            name
            for event in self.evaluations
            for name, v in event.items()
            if name not in NO_METRIC and isinstance(v, (int, float)) and not isinstance(v, bool)
        )
        return sorted(names, key=lambda name: name != "loss")


@dataclass(frozen=True)
class Summary:
    """A run in a few figures. `loss` is the training loss at the end, smoothed; `value` that of the
    deciding metric in the best evaluation, at step `best`."""

    verdict: str
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

    def json(self) -> dict[str, Any]:
        """With null for numbers that JSON does not have."""
        return strict(asdict(self))


# --- reading ------------------------------------------------------------------------------------


def read(folder: str | Path) -> Run:
    """The run in a folder; what is missing or damaged is an Unreadable of one sentence."""
    home = Path(folder)
    if not home.is_dir():
        raise Unreadable(f"{home} is not a folder; give the folder of a run, such as runs/story")
    path = home / "run.json"
    if not path.is_file():
        raise Unreadable(f"{home} has no run.json, so it is not the folder of a run")
    info, notes = _info(path), list[str]()
    if not (home / "metrics.jsonl").is_file():
        raise Unreadable(f"{home} has no metrics.jsonl: it is gone, or the run made no step yet")
    events = _lines(home / "metrics.jsonl", notes)
    samples = _lines(home / "samples.jsonl", notes) if (home / "samples.jsonl").is_file() else []
    for sample in samples:
        sample.update({k: str(sample.get(k) or "") for k in ("source", "text")})
    kinds: dict[str, dict[int, dict[str, Any]]] = {"step": {}, "evaluation": {}, "broken": {}}
    for event in events:
        if event.get("kind") in kinds:
            kinds[event["kind"]][event["step"]] = event
    steps, evaluations, broken = ([each[k] for k in sorted(each)] for each in kinds.values())
    return Run(home, info, steps, evaluations, broken, samples, notes)


def _info(path: Path) -> dict[str, Any]:
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
            raise Unreadable(
                f"{path}: {name} is {info[name]!r:.60}, which is not what a run writes"
            )
    return info


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The objects of a file, one a line, each with a step. A last line that was cut is left out
    with a note."""
    events: list[dict[str, Any]] = []
    lines = _bytes(path).split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for i, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            if i < len(lines):
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


def _float(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _rate(events: list[dict[str, Any]]) -> float:
    """Tokens a second over steps, evaluations and checkpoints left out."""
    tokens, seconds = (sum(_float(e.get(k)) for e in events) for k in ("tokens", "seconds"))
    return tokens / seconds if seconds > 0 else math.nan


# --- the sum of it ------------------------------------------------------------------------------


def summary(run: Run) -> Summary:
    info, metric = run.info, run.info.get("metric") or "loss"
    losses = [y for _, y in run.curve("loss")]
    means = [y for _, y in smooth(run.curve("loss"))]
    best = next((e for e in reversed(run.evaluations) if e.get("best")), None)
    last = run.evaluations[-1] if run.evaluations else {}
    step = max([e["step"] for e in (*run.steps, *run.evaluations)], default=0)
    diverged = info.get("status") == "diverged" or _risen(losses, means)
    # A killed run has not written its own time.
    stepping = sum(t for e in run.steps if math.isfinite(t := _float(e.get("seconds"))))
    seconds = max(info.get("seconds") or 0.0, stepping) or None
    result = Summary(
        verdict="",
        status=info.get("status") or "running",
        step=step,
        steps=info.get("steps"),
        metric=metric,
        best=None if best is None else best["step"],
        value=None if best is None else _float(best.get(metric)),
        last=_float(last[metric]) if metric in last else None,
        loss=means[-1] if means else None,
        diverged=diverged,
        broken=len(run.broken),
        rate=_rate(run.steps) if run.steps else None,
        seconds=seconds,
        parameters=info.get("parameters"),
    )
    return replace(result, verdict=_verdict(result))


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A curve smoothed over a fiftieth of it: m_t = keep m_{t-1} + (1 - keep) x_t, divided by 1 -
    keep^t so that the beginning is not drawn to 0. Values that are not finite leave it as it is."""
    keep = 1 - 2 / (max(len(points) / 50, 1) + 1)
    means, mean, weight = [], 0.0, 0.0
    for at, x in points:
        if math.isfinite(x):
            mean, weight = keep * mean + (1 - keep) * x, keep * weight + 1 - keep
        means.append((at, mean / weight if weight else math.nan))
    return means


def _risen(losses: list[float], means: list[float]) -> bool:
    if not means or not math.isfinite(losses[-1]):
        return bool(means)
    return means[-1] > WORSE * min(means) and means[-1] > losses[0]


def _verdict(s: Summary) -> str:
    """loss 3.04, best at 250, not diverged, 3.6k tok/s, 5 min 44 s"""
    if not s.step:
        return "no step was made"
    parts = [f"training loss {number(s.loss, 3)}", "never evaluated"]
    if s.best is not None:
        parts = [f"{s.metric} {number(s.value, 3)}", f"best at {s.best}"]
    parts.append("diverged" if s.diverged else "not diverged")
    if s.broken:
        parts.append(f"{s.broken} step{'s' * (s.broken > 1)} not finite")
    if s.rate is not None and math.isfinite(s.rate):
        parts.append(f"{short(s.rate)} tok/s")
    if s.seconds is not None and math.isfinite(s.seconds):
        parts.append(span(s.seconds))
    if s.status != "done":
        parts.append(f"{ENDS.get(s.status, s.status)} at step {s.step} of {s.steps or '?'}")
    return ", ".join(parts)


def strict(value: Any) -> Any:
    """The same with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: strict(each) for key, each in value.items()}
    return [strict(each) for each in value] if isinstance(value, (list, tuple)) else value
