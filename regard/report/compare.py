"""Runs side by side: the settings in which they differ, their figures, and their curves laid over each other."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from regard.report.page import Block, Figure, Figures, Heading, Table, Text
from regard.report.run import command, curves
from regard.report.runs import Run, Summary, summary
from regard.report.show import clip, columns, number, short, span, visible
from regard.report.svg import bars

# what a run was made in or of, beside its settings
CIRCUMSTANCES = (
    *("task", "data", "seed", "device", "device_name", "precision", "threads", "world"),
    *("regard", "torch", "python", "commit"),
)
CELL = 44  # columns of a terminal that a value may take


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its own, or its folder's path where two have the same."""
    names = [run.name for run in runs]
    return [n if names.count(n) == 1 else str(run.folder) for n, run in zip(names, runs)]


def flat(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """{"train": {"optim": {"lr": 1}}} as {"train.optim.lr": 1}."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{path}.{key}" if path else key
        found |= flat(value, name) if isinstance(value, Mapping) and value else {name: value}
    return found


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Settings and circumstances that are not the same in all runs, by name; None where a run has none."""
    each = []
    for run in runs:
        around = {name: run.info.get(name) for name in CIRCUMSTANCES}
        each.append(around | flat(run.info.get("config") or {}))
    names = dict.fromkeys(name for settings in each for name in settings)
    rows = {name: [settings.get(name) for settings in each] for name in names}
    return {name: row for name, row in rows.items() if any(v != row[0] for v in row)}


def figures(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """What came of the runs, a row for each figure."""
    found = [summary(run) for run in runs]
    metrics = {s.metric for s in found}
    one = next(iter(metrics)) if len(metrics) == 1 else ""

    def best(s: Summary) -> str:
        return number(s.value) if one or s.value is None else f"{s.metric} {number(s.value)}"

    return [
        (f"best {one}".strip(), [best(s) for s in found]),
        ("at step", [number(s.best) for s in found]),
        (f"last {one}".strip(), [number(s.last) for s in found]),
        ("final training loss", [number(s.loss) for s in found]),
        ("tokens / s", ["-" if s.rate is None else short(s.rate) for s in found]),
        ("parameters", [number(s.parameters) for s in found]),
        ("time", ["-" if s.seconds is None else span(s.seconds) for s in found]),
        ("steps", [f"{s.step} of {s.steps or '?'}" for s in found]),
        ("status", ["diverged" if s.diverged else s.status for s in found]),
    ]


def said(value: Any) -> str:
    """A setting as text."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def aligned(runs: Sequence[Run]) -> str:
    """The comparison for a terminal: plain text, a column for each run."""
    settings = [(name, [said(v) for v in row]) for name, row in differing(runs).items()]
    head, results = ("", labels(runs)), figures(runs)
    rows = [[visible(name), *map(visible, cells)] for name, cells in (head, *settings, *results)]
    rows = [[clip(cell, CELL) for cell in row] for row in rows]
    widths = [max(columns(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = [
        "  ".join(c + " " * (w - columns(c)) for c, w in zip(row, widths)).rstrip() for row in rows
    ]
    rule = "-" * min(sum(widths) + 2 * len(runs), 100)
    none = [] if settings else ["(the settings are the same)"]
    split = 1 + len(settings)
    return "\n".join([text[0], rule, *none, *text[1:split], rule, *text[split:]])


def comparison(runs: Sequence[Run]) -> list[Block]:
    """The page of several runs."""
    names = labels(runs)
    differs = [(name, *map(said, row)) for name, row in differing(runs).items()]
    blocks: list[Block] = [Heading("What differs")]
    if differs:
        blocks.append(Table(("setting", *names), differs))
    else:
        blocks.append(Text("The settings are the same."))
    blocks += [Heading("Figures"), Table(("", *names), [(n, *row) for n, row in figures(runs)])]
    blocks.append(Figures(_bars(runs, names)))
    blocks += [Heading("Curves"), Figures(curves(runs, names))]
    lines = [(name, command(run)) for name, run in zip(names, runs)]
    return [*blocks, Heading("Commands"), Table(("run", "command"), lines)]


def _bars(runs: Sequence[Run], names: Sequence[str]) -> list[Figure]:
    found = [summary(run) for run in runs]
    wanted = (
        ("throughput", "tok/s", [s.rate for s in found]),
        ("time", "s", [s.seconds for s in found]),
    )
    pictures = []
    for title, unit, values in wanted:
        rows = [(n, v) for n, v in zip(names, values) if v is not None and math.isfinite(v)]
        if rows:
            pictures.append(Figure(bars(rows, title, unit), title))
    return pictures
