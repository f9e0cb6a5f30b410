"""The pages of runs, as blocks: the report of one, the comparison of several."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard.report.page import (
    Block,
    Code,
    Figure,
    Figures,
    Heading,
    Series,
    Table,
    Text,
    bars,
    heat,
    lines,
)
from regard.report.runs import Run, Summary, smooth, summary
from regard.see.format import clip, columns, number, short, span, visible
from regard.train.config import toml
from regard.train.trainer import flat

# Evaluations, sources of samples, their steps, tokens of a large map, columns of a value in a terminal.
ROWS, SOURCES, MOMENTS, WORDS, CELL = 40, 5, 12, 24, 44
# Curve -> its title, its unit, whether its axis is logarithmic.
CURVES = {
    "loss": ("loss", "loss", False),
    "lr": ("learning rate", "learning rate", False),
    "norm": ("length of the gradient", "norm", True),
    "rate": ("throughput", "tokens / s", False),
}
SMOOTHED = "Curves of training are smoothed; as they were, they are drawn faintly."
# What a run was made in or of, beside its settings.
CIRCUMSTANCES = (
    *("task", "data", "seed", "device", "device_name", "precision", "threads", "world"),
    *("regard", "torch", "python", "commit"),
)


class Map(NamedTuple):
    """Attention weights of one head: a row for each query, a column for each key."""

    site: str
    head: int
    queries: list[str]
    keys: list[str]
    weights: list[list[float]]


def report(run: Run, maps: Sequence[Map] = (), note: str = "") -> list[Block]:
    """All that a run has to say. `note`: what the maps show, or why there are none."""
    result = summary(run)
    return [
        Text(result.verdict, strong=True),
        *(Text(f"Note: {each}.") for each in run.notes),
        Table(("", ""), list(_header(run, result))),
        *(Heading("Curves"), Text(SMOOTHED), Figures(curves([run]))),
        *(Heading("Evaluations"), *_evaluations(run, result.best)),
        *(Heading("Samples over time"), *_samples(run)),
        *(Heading("Attention of the last checkpoint"), *_attention(maps, note)),
        *(Heading("How to reproduce it"), *_again(run)),
    ]


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


# --- the parts of a report ----------------------------------------------------------------------


def _header(run: Run, result: Summary) -> Iterator[tuple[str, str]]:
    info = run.info
    yield "command", command(run)
    changes = info.get("changes") or {}
    yield "changed settings", "\n".join(f"{k} = {v}" for k, v in changes.items()) or "none"
    yield "task", info.get("task", "-")
    yield "data", info.get("data", "-")
    trained, parameters = info.get("trained"), info.get("parameters")
    part = f", {number(trained)} of them trained" if trained not in (None, parameters) else ""
    yield "parameters", number(parameters) + part
    where = [info.get("device_name") or info.get("device", "-"), info.get("precision", "-")]
    where += [f"{info['threads']} threads"] if "threads" in info else []
    where += [f"{info['world']} processes"] if info.get("world", 1) > 1 else []
    yield "device", ", ".join(where)
    yield "seed", str(info.get("seed", "-"))
    packages = [f"{k} {info[k]}" for k in ("regard", "torch", "python") if k in info]
    yield "versions", ", ".join(packages) or "-"
    yield "commit", info.get("commit") or "not known"
    yield "began", info.get("began", "-")
    took = "-" if result.seconds is None else span(result.seconds)
    yield "ended", f"{info.get('ended', 'not told')}; status {result.status}, {took}"


def curves(runs: Sequence[Run], names: Sequence[str] = ()) -> list[Figure]:
    """Loss, learning rate, gradient and throughput, and every metric of evaluations; of several
    runs laid over each other, under `names`."""
    figures, alone = [], len(runs) == 1
    for name, (title, unit, log) in CURVES.items():
        series = []
        for run, run_name in zip(runs, names or ("training",)):
            raw = run.curve(name)
            series.append(Series(run_name, *((raw,) if name == "lr" else (smooth(raw), raw))))
        if name == "loss" and alone:
            series.append(Series("evaluation", runs[0].measured(name), dots=True))
        figures.append(_figure(title, unit, series, log))
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        if name == "loss" and alone:
            continue
        pairs = zip(runs, names or ("evaluation",))
        measured = [Series(run_name, run.measured(name), dots=True) for run, run_name in pairs]
        figures.append(_figure(f"{name}, in evaluations", name, measured, False))
    return [figure for figure in figures if figure is not None]


def _figure(title: str, unit: str, series: Sequence[Series], log: bool) -> Figure | None:
    """A picture of curves with about ten of their points as a table; none where no curve has
    points."""
    rows: list[tuple[object, ...]] = []
    values, ends, many = [], [], len(series) > 1
    for each in series:
        points = [(x, y) for x, y in each.points if math.isfinite(y)]
        if not points:
            continue
        shown = [(number(points[i][0]), number(points[i][1])) for i in _spaced(len(points), 11)]
        rows += [(each.name, *row) if many else row for row in shown]
        values.append((each.name, [y for _, y in points]))
        (first, begin), (last, end) = shown[0], shown[-1]
        ends.append(f"{each.name} {begin} at step {first}, {end} at {last}")
    if not rows:
        return None
    table = Table(("curve", "step", unit) if many else ("step", unit), rows, folded="as a table")
    caption = f"{title}: {'; '.join(ends)}"
    return Figure(lines(series, title, y=unit, log=log), caption, table, values)


def _spaced(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 to count - 1, evenly, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _evaluations(run: Run, best: int | None) -> Iterator[Block]:
    if not run.evaluations:
        yield Text("The run was not evaluated.")
        return
    chosen = set(_spaced(len(run.evaluations), ROWS))
    chosen |= {i for i, e in enumerate(run.evaluations) if e["step"] == best}
    rows = []
    for i in sorted(chosen):
        event = run.evaluations[i]
        values = [number(event[m]) if m in event else "-" for m in run.metrics]
        rows.append((event["step"], *values, "best so far" if event.get("best") else ""))
    yield Table(("step", *run.metrics, ""), rows)
    if len(rows) < len(run.evaluations):
        yield Text(f"{len(rows)} of {len(run.evaluations)} evaluations are shown.")
    signatures: dict[str, Any] = {}
    for event in run.evaluations:
        signatures |= event.get("signatures") or {}
    if signatures:
        yield Table(("metric", "signature"), list(signatures.items()))


def _samples(run: Run) -> Iterator[Block]:
    if not run.samples:
        yield Text("The run kept no samples.")
    sources = list(dict.fromkeys(s["source"] for s in run.samples))
    for source in sources[:SOURCES]:
        samples = [s for s in run.samples if s["source"] == source]
        rows = [(samples[i]["step"], samples[i]["text"]) for i in _spaced(len(samples), MOMENTS)]
        reference = next((s["reference"] for s in samples if s.get("reference") is not None), None)
        rows += [] if reference is None else [("reference", reference)]
        yield Table(("step", f"from: {clip(visible(source), 300)}"), rows)
    if len(sources) > SOURCES:
        yield Text(f"{SOURCES} of {len(sources)} sources are shown.")


def _attention(maps: Sequence[Map], note: str) -> Iterator[Block]:
    if note or not maps:
        yield Text(note or "No attention was looked at.")
    if not maps:
        return
    last = [m for m in maps if m.site == maps[-1].site]
    rows = list(zip(*(m.weights for m in last)))[:WORDS]
    mean = [[sum(cells) / len(last) for cells in zip(*row)][:WORDS] for row in rows]
    title = f"{maps[-1].site}, mean of {len(last)} heads: rows look at columns"
    names = {"rows": last[0].queries[:WORDS], "across": last[0].keys[:WORDS]}
    yield Figures([Figure(heat(mean, title, **names), title)])
    captions = [f"{m.site}, head {m.head}: most {_strongest(m)}" for m in maps]
    figures = [Figure(heat(m.weights, caption), caption) for m, caption in zip(maps, captions)]
    yield Figures(figures, small=True)


def _strongest(m: Map) -> str:
    """The largest weight and its tokens; a row that sees one key alone had no choice and does not
    count."""
    free = [i for i, row in enumerate(m.weights) if sum(w > 0 for w in row) > 1]
    cells = [(i, j) for i in free or range(len(m.weights)) for j in range(len(m.keys))]
    i, j = max(cells, key=lambda at: m.weights[at[0]][at[1]])
    query, key = (clip(visible(token), 12) for token in (m.queries[i], m.keys[j]))
    return f"{m.weights[i][j]:.2f}, {query} → {key}"


def _again(run: Run) -> Iterator[Block]:
    begin = [word for word in words(run) if word not in ("--resume", "--overwrite")]
    other = os.path.normpath(run.folder / ".." / f"{run.folder.resolve().name}-again")
    elsewhere, rest = [], iter(begin)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") != "--output-dir":
            elsewhere.append(word)
        elif not equals:
            next(rest, "")
    text = []
    if commit := run.info.get("commit"):
        text += ["# the source of this version", f"git checkout {shlex.quote(commit)}"]
    text += ["# from the beginning, into another folder"]
    text += [shlex.join([*elsewhere, "--output-dir", other])]
    text += ["# on from its newest checkpoint, to the same bits", shlex.join([*begin, "--resume"])]
    text += ["# this page", shlex.join(["regard", "report", str(run.folder)])]
    yield Code("\n".join(text), "sh")
    config = toml(run.info.get("config") or {})
    yield Code(config, "toml", folded="all settings, as resolved")


def words(run: Run) -> list[str]:
    """The command line of a run, by the name `regard` wherever that lay."""
    given = [str(word) for word in run.info.get("command") or ["train"]]
    if Path(given[0]).name in ("regard", "__main__.py", "regard.exe"):
        given = given[1:]
    return ["regard", *given]


def command(run: Run) -> str:
    return shlex.join(words(run))


# --- runs side by side --------------------------------------------------------------------------


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
        each.append(around | flat(run.info.get("config") or {}))
    names = dict.fromkeys(name for settings in each for name in settings)
    rows = {name: [settings.get(name) for settings in each] for name in names}
    return {name: row for name, row in rows.items() if any(v != row[0] for v in row)}


def aligned(runs: Sequence[Run]) -> str:
    """The comparison for a terminal: plain text, a column for each run."""
    differ = _differing(runs)
    rows = [("", *labels(runs)), *differ, *_figures(runs)]
    cells = [[clip(visible(cell), CELL) for cell in row] for row in rows]
    widths = [max(map(columns, column)) for column in zip(*cells)]
    text = [
        "  ".join(c + " " * (w - columns(c)) for c, w in zip(row, widths)).rstrip() for row in cells
    ]
    rule = "-" * min(sum(widths) + 2 * len(runs), 100)
    none = [] if differ else ["(the settings are the same)"]
    split = 1 + len(differ)
    return "\n".join([text[0], rule, *none, *text[1:split], rule, *text[split:]])


def comparison(runs: Sequence[Run]) -> list[Block]:
    """The page of several runs: the settings in which they differ, their figures, their curves laid
    over each other."""
    names, differ, results = labels(runs), _differing(runs), [summary(run) for run in runs]
    same = Text("The settings are the same.")
    pictures = []
    for title, unit, values in (
        ("throughput", "tok/s", [s.rate for s in results]),
        ("time", "s", [s.seconds for s in results]),
    ):
        rows = [(n, v) for n, v in zip(names, values) if v is not None and math.isfinite(v)]
        pictures += [Figure(bars(rows, title, unit), title)] if rows else []
    commands = [(name, command(run)) for name, run in zip(names, runs)]
    return [
        *(Heading("What differs"), Table(("setting", *names), differ) if differ else same),
        *(Heading("Figures"), Table(("", *names), _figures(runs)), Figures(pictures)),
        *(Heading("Curves"), Figures(curves(runs, names))),
        *(Heading("Commands"), Table(("run", "command"), commands)),
    ]


def _differing(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A row for each setting that differs."""

    def text(value: Any) -> str:
        if value is None:
            return "-"
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return [(name, *map(text, row)) for name, row in differing(runs).items()]


def _figures(runs: Sequence[Run]) -> list[tuple[str, ...]]:
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
        ("tokens / s", *("-" if s.rate is None else short(s.rate) for s in results)),
        ("parameters", *(number(s.parameters) for s in results)),
        ("time", *("-" if s.seconds is None else span(s.seconds) for s in results)),
        ("steps", *(f"{s.step} of {s.steps or '?'}" for s in results)),
        ("status", *("diverged" if s.diverged else s.status for s in results)),
    ]
