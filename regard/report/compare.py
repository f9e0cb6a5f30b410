"""Runs side by side: the settings that differ, their figures, their curves laid over each other."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from typing import Any

from regard.report.folder import Run, Summary, summary
from regard.report.page import Block, Figure, bars
from regard.report.run import curves, headed
from regard.see.format import aligned, clip, number, short, span, visible
from regard.training.trainer import differences, flat

# The widest column of a value in a terminal.
CELL = 44
# What a run was made in or of, beside its settings.
CIRCUMSTANCES = (
    *("task", "data", "seed", "device", "device_name", "precision", "threads", "world"),
    *("regard", "torch", "python", "commit"),
)


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its own, or its folder's path where several have the same."""
    names = [run.name for run in runs]
    return [n if names.count(n) == 1 else str(run.folder) for n, run in zip(names, runs)]


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Settings and circumstances that are not the same in all runs, by name; None where a run has
    none."""
    each = []
    for run in runs:
        around = {name: run.info.get(name) for name in CIRCUMSTANCES}
        each.append(around | _resumed(run) | flat(run.info.get("config") or {}))
    names = dict.fromkeys(name for settings in each for name in settings)
    rows = {name: [settings.get(name) for settings in each] for name in names}
    return {name: row for name, row in rows.items() if any(v != row[0] for v in row)}


def _resumed(run: Run) -> dict[str, str]:
    """The steps after which a run was resumed, each with the settings that were changed then."""
    moments = []
    for at in run.info.get("resumed", []):
        changed = differences(at["changes"])
        moments.append(f"after step {at['step']}" + (f" ({changed})" if changed else ""))
    return {"resumed": ", ".join(moments)} if moments else {}


def table(runs: Sequence[Run]) -> str:
    """The comparison for a terminal: plain text, a column for each run."""
    differ = _differing(runs)
    rows = [("", *labels(runs)), *differ, *_results(runs)]
    text = aligned([[clip(visible(cell), CELL) for cell in row] for row in rows]).split("\n")
    rule = "-" * min(max(map(len, text)), 100)
    none = [] if differ else ["(the settings are the same)"]
    split = 1 + len(differ)
    return "\n".join([text[0], rule, *none, *text[1:split], rule, *text[split:]])


def comparison(runs: Sequence[Run]) -> list[Block]:
    """The page of several runs: the settings in which they differ, their figures, their curves laid
    over each other."""
    names = labels(runs)
    differ = _differing(runs)
    results = [summary(run) for run in runs]
    pictures = []
    for title, unit, values in (
        ("throughput", "tok/s", [s.rate for s in results]),
        ("time", "s", [s.seconds for s in results]),
    ):
        rows = [(n, v) for n, v in zip(names, values) if v is not None and math.isfinite(v)]
        pictures += [Figure(bars(rows, title, unit), title)] if rows else []
    commands = [(name, shlex.join(run.command)) for name, run in zip(names, runs)]
    table = Block("table", head=("setting", *names), rows=differ)
    parts = {
        "What differs": [table if differ else Block("text", "The settings are the same.")],
        "Figures": [
            Block("table", head=("", *names), rows=_results(runs)),
            Block("figures", figures=pictures),
        ],
        "Curves": [Block("figures", figures=curves(runs, names))],
        "Commands": [Block("table", head=("run", "command"), rows=commands)],
    }
    return headed(parts)


def _differing(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A row for each setting that differs."""

    def text(value: Any) -> str:
        if value is None:
            return "-"
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return [(name, *map(text, row)) for name, row in differing(runs).items()]


def _results(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """What came of the runs, a row for each figure."""
    results = [summary(run) for run in runs]
    metrics = {s.metric for s in results}
    metric = metrics.pop() if len(metrics) == 1 else ""

    def best(s: Summary) -> str:
        return number(s.value) if metric or s.value is None else f"{s.metric} {number(s.value)}"

    return [
        (f"best {metric}".strip(), *map(best, results)),
        ("at step", *(number(s.best) for s in results)),
        (f"last {metric}".strip(), *(number(s.last) for s in results)),
        ("final training loss", *(number(s.loss) for s in results)),
        ("tokens / s", *(short(s.rate) for s in results)),
        ("parameters", *(number(s.parameters) for s in results)),
        ("time", *(span(s.seconds) for s in results)),
        ("steps", *(f"{s.step} of {s.steps or '?'}" for s in results)),
        ("status", *("diverged" if s.diverged else s.status for s in results)),
    ]
