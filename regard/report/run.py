"""The report of a run, as blocks that regard.report.page turns into HTML or Markdown."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard.report.page import Block, Code, Figure, Figures, Heading, Table, Text
from regard.report.runs import Run, Summary, summary
from regard.report.show import Point, clip, ema, keep_for, number, some, span, thin, visible
from regard.report.svg import Series, heat, lines

ROWS, SOURCES, MOMENTS, WORDS = (
    40,
    5,
    12,
    24,
)  # evaluations; samples; their steps; tokens of a large map
# curve -> its title, its unit, whether its axis is logarithmic
CURVES = {
    "loss": ("loss", "loss", False),
    "lr": ("learning rate", "learning rate", False),
    "norm": ("length of the gradient", "norm", True),
    "rate": ("throughput", "tokens / s", False),
}
DRAWN = "Curves of training are smoothed; as they were, they are drawn faintly."


class Map(NamedTuple):
    """Attention weights of one head: a row for each query, a column for each key."""

    site: str
    head: int
    queries: list[str]
    keys: list[str]
    weights: list[list[float]]


def report(run: Run, maps: Sequence[Map] = (), told: str = "") -> list[Block]:
    """All that a run has to say. `told`: what the maps show, or why there are none."""
    found = summary(run)
    blocks: list[Block] = [Text(found.verdict, strong=True)]
    blocks += [Text(f"Note: {note}.") for note in run.notes]
    blocks += [Table(("", ""), list(_header(run, found)))]
    blocks += [Heading("Curves"), Text(DRAWN), Figures(curves([run]))]
    blocks += [Heading("Evaluations"), *_evaluations(run)]
    blocks += [Heading("Samples over time"), *_samples(run)]
    blocks += [Heading("Attention of the last checkpoint"), *_attention(maps, told)]
    return [*blocks, Heading("How to reproduce it"), *_again(run)]


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


# --- the parts ----------------------------------------------------------------------------------------------------


def _header(run: Run, found: Summary) -> Iterator[tuple[str, str]]:
    info = run.info
    yield "command", command(run)
    changes = info.get("changes") or {}
    yield "changed settings", "\n".join(f"{k} = {v}" for k, v in changes.items()) or "none"
    yield "task", info.get("task", "-")
    yield "data", info.get("data", "-")
    trained, all_of_them = info.get("trained"), info.get("parameters")
    part = f", {number(trained)} of them trained" if trained not in (None, all_of_them) else ""
    yield "parameters", number(all_of_them) + part
    where = [info.get("device_name") or info.get("device", "-"), info.get("precision", "-")]
    where += [f"{info[k]} {k}" for k in ("threads",) if k in info]
    where += [f"{info['world']} processes"] if info.get("world", 1) > 1 else []
    yield "device", ", ".join(where)
    yield "seed", str(info.get("seed", "-"))
    packages = [f"{k} {info[k]}" for k in ("regard", "torch", "python") if k in info]
    yield "versions", ", ".join(packages) or "-"
    yield "commit", info.get("commit") or "not known"
    yield "began", info.get("began", "-")
    took = "-" if found.seconds is None else span(found.seconds)
    yield "ended", f"{info.get('ended', 'not told')}; status {found.status}, {took}"


def curves(runs: Sequence[Run], names: Sequence[str] = ()) -> list[Figure]:
    """Loss, learning rate, gradient and throughput, and every metric of evaluations; of several runs laid over each
    other, under `names`."""
    figures, alone = [], len(runs) == 1
    for name, (title, unit, log) in CURVES.items():
        series = []
        for run, called in zip(runs, names or ("training",)):
            points = run.curve(name)
            keep = 0.0 if name == "lr" else keep_for(len(points))
            series.append(Series(called, points, keep))
        if name == "loss" and alone:
            series.append(Series("evaluation", runs[0].measured(name), dots=True))
        figures.append(_figure(title, unit, series, log))
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        if name == "loss" and alone:
            continue
        each = zip(runs, names or ("evaluation",))
        measured = [Series(called, run.measured(name), dots=True) for run, called in each]
        figures.append(_figure(f"{name}, in evaluations", name, measured, False))
    return [figure for figure in figures if figure is not None]


def _figure(title: str, unit: str, series: Sequence[Series], log: bool) -> Figure | None:
    """A picture of curves with about ten of their points as a table; none where no curve has points."""
    rows: list[tuple[object, ...]] = []
    curves, ends, many = [], [], len(series) > 1
    for each in series:
        points = [(x, y) for x, y in _smoothed(each) if math.isfinite(y)]
        if not points:
            continue
        shown = [(number(points[i][0]), number(points[i][1])) for i in some(len(points), 11)]
        rows += [(each.name, *row) if many else row for row in shown]
        curves.append((each.name, [y for _, y in thin(points, 600)]))
        (first, begin), (last, end) = shown[0], shown[-1]
        ends.append(f"{each.name} {begin} at step {first}, {end} at {last}")
    if not rows:
        return None
    table = Table(("curve", "step", unit) if many else ("step", unit), rows, folded="as a table")
    caption = f"{title}: {'; '.join(ends)}"
    return Figure(lines(series, title, y=unit, log=log), caption, table, curves)


def _smoothed(series: Series) -> list[Point]:
    means = ema([y for _, y in series.points], series.keep)
    return [(x, mean) for (x, _), mean in zip(series.points, means)]


def _evaluations(run: Run) -> list[Block]:
    if not run.evaluations:
        return [Text("The run was not evaluated.")]
    chosen = set(some(len(run.evaluations), ROWS))
    chosen |= {i for i, e in enumerate(run.evaluations) if e["step"] == summary(run).best}
    rows = []
    for i in sorted(chosen):
        event = run.evaluations[i]
        values = [number(event[m]) if m in event else "-" for m in run.metrics]
        rows.append((event["step"], *values, "best so far" if event.get("best") else ""))
    blocks: list[Block] = [Table(("step", *run.metrics, ""), rows)]
    if len(rows) < len(run.evaluations):
        blocks.append(Text(f"{len(rows)} of {len(run.evaluations)} evaluations are shown."))
    signatures: dict[str, Any] = {}
    for event in run.evaluations:
        signatures |= event.get("signatures") or {}
    if signatures:
        blocks.append(Table(("metric", "signature"), list(signatures.items())))
    return blocks


def _samples(run: Run) -> list[Block]:
    if not run.samples:
        return [Text("The run kept no samples.")]
    sources = list(dict.fromkeys(s["source"] for s in run.samples))
    shown = sources[:SOURCES]
    blocks: list[Block] = []
    for source in shown:
        mine = [s for s in run.samples if s["source"] == source]
        rows = [(mine[i]["step"], mine[i]["text"]) for i in some(len(mine), MOMENTS)]
        reference = next((s["reference"] for s in mine if s.get("reference") is not None), None)
        rows += [] if reference is None else [("reference", reference)]
        blocks.append(Table(("step", f"from: {clip(visible(source), 300)}"), rows))
    if len(sources) > len(shown):
        blocks.append(Text(f"{len(shown)} of {len(sources)} sources are shown."))
    return blocks


def _attention(maps: Sequence[Map], told: str) -> list[Block]:
    blocks: list[Block] = [Text(told)] if told else []
    if not maps:
        return blocks or [Text("No attention was looked at.")]
    last = [m for m in maps if m.site == maps[-1].site]
    mean = [
        [sum(cells) / len(last) for cells in zip(*rows)] for rows in zip(*(m.weights for m in last))
    ]
    part = [row[:WORDS] for row in mean[:WORDS]]
    queries, keys = last[0].queries[:WORDS], last[0].keys[:WORDS]
    title = f"{maps[-1].site}, mean of {len(last)} heads: rows look at columns"
    blocks.append(Figures([Figure(heat(part, title, rows=queries, across=keys), title)]))
    thumbs = []
    for m in maps:
        value, query, key = _strongest(m)
        caption = f"{m.site}, head {m.head}: most {value:.2f}, {query} → {key}"
        thumbs.append(Figure(heat(m.weights, caption), caption))
    return [*blocks, Figures(thumbs, small=True)]


def _strongest(m: Map) -> tuple[float, str, str]:
    """The largest weight and its tokens; a row that sees one key alone had no choice and does not count."""
    free = [i for i, row in enumerate(m.weights) if sum(w > 0 for w in row) > 1]
    cells = [(i, j) for i in free or range(len(m.weights)) for j in range(len(m.keys))]
    i, j = max(cells, key=lambda at: m.weights[at[0]][at[1]])
    return m.weights[i][j], clip(visible(m.queries[i]), 12), clip(visible(m.keys[j]), 12)


def _again(run: Run) -> list[Block]:
    info = run.info
    begin = [word for word in words(run) if word not in ("--resume", "--overwrite")]
    other = os.path.normpath(run.folder / ".." / f"{run.folder.resolve().name}-again")
    said = []
    if info.get("commit"):
        said += ["# the source of this version", f"git checkout {shlex.quote(info['commit'])}"]
    said += ["# from the beginning, into another folder"]
    said += [shlex.join([*_homeless(begin), "--output-dir", other])]
    said += ["# on from its newest checkpoint, to the same bits", shlex.join([*begin, "--resume"])]
    said += ["# this page", shlex.join(["regard", "report", str(run.folder)])]
    settings = Code(
        toml(info.get("config") or {}).rstrip(), "toml", folded="all settings, as resolved"
    )
    return [Code("\n".join(said), "sh"), settings]


def _homeless(given: Sequence[str]) -> list[str]:
    """A command line without --output-dir."""
    found, rest = [], iter(given)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") != "--output-dir":
            found.append(word)
        elif not equals:
            next(rest, "")
    return found


def words(run: Run) -> list[str]:
    """The command line of a run, by the name `regard` wherever that lay."""
    given = [str(word) for word in run.info.get("command") or ["train"]]
    if Path(given[0]).name in ("regard", "__main__.py", "regard.exe"):
        given = given[1:]
    return ["regard", *given]


def command(run: Run) -> str:
    return shlex.join(words(run))


# --- settings -----------------------------------------------------------------------------------------------------


def toml(config: Mapping[str, Any], path: str = "") -> str:
    """Nested settings as TOML; what is None has no line."""
    own = [f"{_key(k)} = {_value(v)}" for k, v in config.items() if not _empty(v)]
    parts = [f"[{path}]\n" if path and own else "", "".join(f"{line}\n" for line in own)]
    for key, value in config.items():
        if isinstance(value, Mapping):
            parts.append(toml(value, f"{path}.{_key(key)}" if path else _key(key)))
    return "".join(parts)


def _empty(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _key(name: str) -> str:
    plain = name and all(c.isascii() and (c.isalnum() or c in "_-") for c in name)
    return name if plain else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(each) for each in value if each is not None) + "]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return f"{{ {inside} }}"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
