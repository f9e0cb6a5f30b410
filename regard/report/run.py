"""What a run did, told as the blocks of a page; and what its last checkpoint attends to."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.checkpoint import load
from regard.decode.generate import tokenizer_of
from regard.errors import UsageError
from regard.machine import size
from regard.models import PainterConfig
from regard.report.folder import Event, Run, Summary, is_best, smooth, summary
from regard.report.page import Block, Figure, Series, heat, lines, mosaic, shades
from regard.see.format import clip, number, short, span, visible
from regard.see.look import Given, drawing, names, trace, writing
from regard.text import needed
from regard.training.config import toml
from regard.training.measure import context_of
from regard.training.run import launched

# At most so many evaluations, sources of samples, steps of each, and points of a curve's table.
ROWS, SOURCES, MOMENTS, POINTS = 40, 5, 6, 11
# Steps at which the pictures of a source are shown.
STAGES = 4
# At most so many tokens of a map, tokens of a large one, maps of a page, heads of a layer.
LONGEST, LARGE, MOST, HEADS = 48, 24, 96, 12
# Tasks whose samples go on where the prompt ends.
WRITES = ("lm", "prefix", "chat")
# Curve -> its title, its unit.
CURVES = {
    "loss": ("loss", "loss"),
    "lr": ("learning rate", "learning rate"),
    "norm": ("length of the gradient", "norm"),
    "rate": ("throughput", "tokens / s"),
    "reward_accuracy": ("share of pairs whose chosen answer has the larger reward", "share"),
    "reward_margin": ("reward of the chosen answer beyond that of the rejected one", "reward"),
}
# Curves that can be seen on a logarithmic axis too.
LOGARITHMIC = ("loss", "norm", "perplexity")
# They are at first, where the largest value is so many times the least.
WIDE = 30
SMOOTHED = "Curves of training are smoothed; as they were, they are drawn faintly."


# --- what the last checkpoint attends to ----------------------------------------------------------


class Map(NamedTuple):
    """Attention weights of one head: a row for each query, a column for each key."""

    site: str
    head: int
    queries: list[str]
    keys: list[str]
    weights: np.ndarray


def look(run: Run) -> tuple[list[Map], str]:
    """Maps of the last sample, layer by layer, and what they show; or none, and why."""
    try:
        return _look(run)
    except (UsageError, OSError) as error:
        return [], f"No attention is shown: {error}."


def _look(run: Run) -> tuple[list[Map], str]:
    task = run.info.get("task")
    if task in ("image", "segment"):
        raise UsageError("the model reads pictures, of which samples hold the labels alone")
    full = [s for s in run.samples if s["source"].strip() or s["text"].strip()]
    if not full:
        raise UsageError("the run kept no samples to look at")
    if not (run.folder / "last").is_dir():
        raise UsageError("the run has no checkpoint yet")
    model = load(run.folder / "last").eval()
    tokenizer = needed(tokenizer_of(model))
    source, text = full[-1]["source"], full[-1]["text"]
    longest = min(LONGEST, context_of(model) or LONGEST)
    if not model.reads_source:
        source = source + text if task in WRITES else source or text
    if not (ids := tokenizer.encode(source)[:longest]):
        raise UsageError("the last sample has no tokens to read")
    given = Given(torch.tensor([ids]), names(tokenizer, ids))
    if isinstance(model.config, PainterConfig):
        given = drawing(model.config, given)
    if model.reads_source:
        written = tokenizer.encode_target(text, special=False)[:longest]
        if not written:
            raise UsageError("the last sample has an empty text")
        given = writing(model, tokenizer, given, written)
    layers = [(view, layer) for view in trace(model, given) for layer in view.layers]
    shown = layers[-max(MOST // min(len(layers[-1][1].heads), HEADS), 1) :]
    maps = [
        Map(layer.site, i, view.rows, view.columns, head.cells.astype(float))
        for view, layer in shown
        for i, head in enumerate(layer.heads[:HEADS])
    ]
    note = [f"Step {full[-1]['step']}, at most {LONGEST} tokens of the last sample."]
    if len(shown) < len(layers):
        note.append(f"The last {len(shown)} of {len(layers)} layers are shown.")
    if (whole := max(len(layer.heads) for _, layer in shown)) > HEADS:
        note.append(f"The first {HEADS} of {whole} heads are shown.")
    note.append("A weight is not an explanation: it says where a head reads, not what for.")
    return maps, " ".join(note)


# --- the report of a run --------------------------------------------------------------------------


def report(run: Run, maps: Sequence[Map] = (), note: str = "") -> list[Block]:
    """All that a run has to say. `note`: what the maps show, or why there are none."""
    result = summary(run)
    parts = {
        "Curves": [Block("text", SMOOTHED), Block("figures", figures=curves([run]))],
        "Evaluations": _evaluations(run, result.best),
        "Samples, step by step": _samples(run),
        "Attention of the last checkpoint": _attention(maps, note),
        "About the run": [Block("table", head=("", ""), rows=list(_header(run, result)))],
        "How to reproduce it": _again(run),
    }
    return [
        Block("strong", result.verdict),
        *(Block("text", f"Note: {each}.") for each in run.notes),
        Block("tiles", head=("", "", ""), rows=list(_tiles(run, result))),
        *headed(parts),
    ]


def _tiles(run: Run, result: Summary) -> Iterator[tuple[str, str, str]]:
    """The figures that one wants first: a name, a value, and what must be known of it."""
    info = run.info
    if result.best is not None:
        yield f"best {result.metric}", number(result.value), f"evaluation at step {result.best:,}"
    yield "training loss", number(result.loss, 3), "at the end, smoothed"
    if result.rate is not None:
        yield "tokens / s", short(result.rate), info.get("device_name") or info.get("device", "")
    if result.seconds is not None:
        yield "time", span(result.seconds), f"{result.step:,} of {result.steps or '?'} steps"
    if "memory" in info:
        whose = "of the GPU" if info.get("device") == "cuda" else "of the process"
        yield "memory", size(info["memory"]), f"{whose}, at most"
    if result.parameters is not None:
        trained = info.get("trained", result.parameters)
        part = "all trained" if trained == result.parameters else f"{short(trained)} trained"
        yield "parameters", short(result.parameters), part


def headed(parts: Mapping[str, Iterable[Block]]) -> list[Block]:
    return [block for name, each in parts.items() for block in (Block("heading", name), *each)]


def _header(run: Run, result: Summary) -> Iterator[tuple[str, str]]:
    info = run.info
    yield "command", shlex.join(run.command)
    changes = info.get("changes") or {}
    yield "changed settings", "\n".join(f"{k} = {v}" for k, v in changes.items()) or "none"
    yield "task", info.get("task", "-")
    yield "data", info.get("data", "-")
    trained = info.get("trained", result.parameters)
    part = "" if trained == result.parameters else f", {number(trained)} of them trained"
    yield "parameters", number(result.parameters) + part
    where = [info.get("device_name") or info.get("device", "-"), info.get("precision", "-")]
    if "threads" in info:
        where.append(f"{info['threads']} thread{'s' * (info['threads'] != 1)}")
    where += [f"{info['world']} processes"] if info.get("world", 1) > 1 else []
    yield "device", ", ".join(where)
    yield "seed", str(info.get("seed", "-"))
    packages = [f"{k} {info[k]}" for k in ("regard", "torch", "python") if k in info]
    yield "versions", ", ".join(packages) or "-"
    yield "commit", info.get("commit") or "not known"
    yield "began", info.get("began", "-")
    ended = info.get("ended", "not told")
    yield "ended", f"{ended}; status {result.status}, {span(result.seconds)}"


def curves(runs: Sequence[Run], names: Sequence[str] = ()) -> list[Figure]:
    """Loss, learning rate, gradient, throughput and rewards, and every metric of evaluations; of
    several runs laid over each other, under `names`."""
    figures = []
    alone = len(runs) == 1
    for name, (title, unit) in CURVES.items():
        series = []
        for run, run_name in zip(runs, names or ("training",)):
            raw = run.curve(name)
            series.append(Series(run_name, *((raw,) if name == "lr" else (smooth(raw), raw))))
        if name == "loss" and alone:
            series.append(Series("evaluation", runs[0].measured(name), dots=True))
        figures.append(_figure(title, unit, series, name in LOGARITHMIC))
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        if name == "loss" and alone:
            continue
        pairs = zip(runs, names or ("evaluation",))
        measured = [Series(run_name, run.measured(name), dots=True) for run, run_name in pairs]
        figures.append(_figure(f"{name}, in evaluations", name, measured, name in LOGARITHMIC))
    return [figure for figure in figures if figure is not None]


def _figure(title: str, unit: str, series: Sequence[Series], log: bool) -> Figure | None:
    """A picture of curves, with `log` on both axes, and about ten of their points as a table; none
    where all points are of one step, which tables tell better."""
    finite = [(each.name, [p for p in each.points if math.isfinite(p[1])]) for each in series]
    if len({x for _, points in finite for x, _ in points}) < 2:
        return None
    many = len(series) > 1
    rows: list[tuple[object, ...]] = []
    values = []
    ends = []
    for name, points in finite:
        if not points:
            continue
        shown = [(number(points[i][0]), number(points[i][1])) for i in _spaced(len(points), POINTS)]
        rows += [(name, *row) if many else row for row in shown]
        values.append((name, [y for _, y in points]))
        (first, begin), (last, end) = shown[0], shown[-1]
        ends.append(f"{name} {begin} at step {first}, {end} at {last}")
    head = ("curve", "step", unit) if many else ("step", unit)
    table = Block("table", head=head, rows=rows, folded="as a table")
    linear = lines(series, title, y=unit)
    above = [y for _, curve in values for y in curve if y > 0] if log else []
    logarithmic = lines(series, title, y=unit, log=True) if above else ""
    logged = bool(above) and max(above) >= WIDE * min(above)
    return Figure(linear, title, "; ".join(ends), table, values, logarithmic, logged)


def _spaced(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 to count - 1, evenly, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _evaluations(run: Run, best: int | None) -> Iterator[Block]:
    if not run.evaluations:
        yield Block("text", "The run was not evaluated.")
        return
    chosen = set(_spaced(len(run.evaluations), ROWS))
    chosen |= {i for i, e in enumerate(run.evaluations) if e["step"] == best}
    rows = []
    for event in (run.evaluations[i] for i in sorted(chosen)):
        values = [number(event[m]) if m in event else "-" for m in run.metrics]
        good = is_best(event, run.info.get("metric") or "loss")
        rows.append((event["step"], *values, "best so far" if good else ""))
    yield Block("table", head=("step", *run.metrics, ""), rows=rows)
    if len(rows) < len(run.evaluations):
        yield Block("text", f"{len(rows)} of {len(run.evaluations)} evaluations are shown.")
    signatures: dict[str, Any] = {}
    for event in run.evaluations:
        signatures |= event.get("signatures") or {}
    if signatures:
        yield Block("table", head=("metric", "signature"), rows=list(signatures.items()))


def _samples(run: Run) -> Iterator[Block]:
    if not run.samples:
        yield Block("text", "The run kept no samples.")
    drawn = [s for s in run.samples if s.get("pictures")]
    if drawn:
        yield from _pictures(drawn)
        return
    sources = list(dict.fromkeys(s["source"] for s in run.samples))
    for source in sources[:SOURCES]:
        samples = [s for s in run.samples if s["source"] == source]
        rows = [(samples[i]["step"], samples[i]["text"]) for i in _spaced(len(samples), MOMENTS)]
        reference = next((s["reference"] for s in samples if s.get("reference") is not None), None)
        rows += [] if reference is None else [("reference", str(reference))]
        source = clip(visible(source.strip("\n"), "\n"), 300)
        yield Block("cards", source, head=("step", f"from: {source}"), rows=rows)
    if len(sources) > SOURCES:
        yield Block("text", f"{SOURCES} of {len(sources)} sources are shown.")


def _pictures(samples: Sequence[Event]) -> Iterator[Block]:
    """What was drawn of each source, or found in it, at some steps, and at the end all of its pictures."""
    for source in dict.fromkeys(s["source"] for s in samples):
        own = [s for s in samples if s["source"] == source]
        chosen = [own[i] for i in _spaced(len(own), STAGES)]
        figures = []
        for s in chosen:
            each = [(name, partial(mosaic, grid)) for name, grid in s.get("classes", {}).items()]
            each += [(name, partial(shades, pixels)) for name, pixels in s["pictures"].items()]
            # The first of its pictures is the answer; the others are the same at every step.
            (_, answer), *others = each
            title = f"step {s['step']}: {s['text']}"
            figures.append(Figure(answer(title), title))
        figures += [Figure(draw(name), name) for name, draw in others]
        yield Block("text", f"from: {clip(visible(source), 300)}")
        yield Block("thumbnails", figures=figures)


def _attention(maps: Sequence[Map], note: str) -> Iterator[Block]:
    if note or not maps:
        yield Block("text", note or "No attention was looked at.")
    if not maps:
        return
    last = [m for m in maps if m.site == maps[-1].site]
    mean = np.mean([m.weights for m in last], 0)[:LARGE, :LARGE]
    title = f"{maps[-1].site}, mean of {len(last)} heads: rows look at columns"
    names: Any = {"rows": last[0].queries[:LARGE], "across": last[0].keys[:LARGE]}
    yield Block("figures", figures=[Figure(heat(mean, title, **names), title)])
    captions = [f"{m.site}, head {m.head}: most {_strongest(m)}" for m in maps]
    figures = [Figure(heat(m.weights, caption), caption) for m, caption in zip(maps, captions)]
    yield Block("thumbnails", figures=figures)


def _strongest(m: Map) -> str:
    """The largest weight and its tokens; a row that sees one key alone had no choice and does not
    count."""
    free = (m.weights > 0).sum(1, keepdims=True) > 1
    i, j = divmod(int(np.where(free | ~free.any(), m.weights, -1.0).argmax()), len(m.keys))
    query, key = (clip(visible(token), 12) for token in (m.queries[i], m.keys[j]))
    return f"{m.weights[i, j]:.2f}, {query} → {key}"


def _again(run: Run) -> Iterator[Block]:
    other = os.path.normpath(run.folder / ".." / f"{run.folder.resolve().name}-again")
    # The run's own config has what was changed, and paths that hold from anywhere.
    begin = ["regard", "train", str(run.folder / "config.toml")]
    go_on = ["regard", "train", "--resume", str(run.folder)]
    # That of an older version lacks the changes; its command line has them.
    if "options" not in run.info:
        given = [word for word in run.command if word not in ("--resume", "--overwrite")]
        begin = _without(given, "--output-dir")
        go_on = [*given, "--resume"]
    world_size = run.info.get("world") or 1
    text = []
    if commit := run.info.get("commit"):
        text += ["# the source of this version", f"git checkout {shlex.quote(commit)}"]
    text += ["# from the beginning, into another folder"]
    text += [launched([*begin, "--output-dir", other], world_size)]
    text += ["# on from its newest checkpoint, to the same bits", launched(go_on, world_size)]
    text += ["# this page", shlex.join(["regard", "report", str(run.folder)])]
    yield Block("code", "\n".join(text), language="sh")
    config = toml(run.info.get("config") or {})
    yield Block("code", config, language="toml", folded="all settings, as resolved")


def _without(command: Sequence[str], flag: str) -> list[str]:
    """A command line that lacks this flag and its value."""
    kept = []
    rest = iter(command)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") != flag:
            kept.append(word)
        elif not equals:
            next(rest, "")
    return kept
