"""What a run did: its folder (run.json, metrics.jsonl, samples.jsonl) read, summed up in one line,
and told as the blocks of a page; several runs side by side; what the last checkpoint attends to."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.checkpoint import load
from regard.decode.generate import tokenizer_of
from regard.errors import UsageError
from regard.files import nearby
from regard.machine import size
from regard.report.page import Block, Figure, Point, Series, bars, heat, lines
from regard.see.format import aligned, clip, number, short, span, strict, visible
from regard.see.look import Given, names, trace, writing
from regard.text import needed
from regard.train.config import toml
from regard.train.measure import context_of
from regard.train.run import launched
from regard.train.trainer import differences, flat

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
NO_METRIC = ("kind", "step", "best", "signatures")
# Evaluations, sources of samples, their steps, tokens of a large map, columns of a value in a terminal.
ROWS, SOURCES, MOMENTS, WORDS, CELL = 40, 5, 6, 24, 44
# Tokens of a map, maps of a page, heads of a layer; tasks whose samples go on where the prompt ends.
LONGEST, MOST, HEADS = 48, 96, 12
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
# Which can be seen on a logarithmic axis, and are at first where the largest value is so many times the least.
LOGARITHMIC, WIDE = ("loss", "norm", "perplexity"), 30
SMOOTHED = "Curves of training are smoothed; as they were, they are drawn faintly."
# What a run was made in or of, beside its settings.
CIRCUMSTANCES = (
    *("task", "data", "seed", "device", "device_name", "precision", "threads", "world"),
    *("regard", "torch", "python", "commit"),
)
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
            if name not in NO_METRIC and isinstance(v, (int, float)) and not isinstance(v, bool)
        )
        return sorted(names, key=lambda name: name != "loss")

    @property
    def command(self) -> list[str]:
        """Its command line, by the name `regard` wherever that lay."""
        given = [str(word) for word in self.info.get("command") or ["train"]]
        named = Path(given[0]).name in ("regard", "__main__.py", "regard.exe")
        return ["regard", *(given[1:] if named else given)]


# --- reading --------------------------------------------------------------------------------------


def read(folder: str | Path) -> Run:
    """The run in a folder; what is missing or damaged is an Unreadable of one sentence."""
    home, notes = Path(folder), list[str]()
    if not home.is_dir():
        how = nearby(home) or "; give the folder of a run, such as runs/story"
        raise Unreadable(f"{home} is not a folder{how}")
    if not (home / "run.json").is_file():
        raise Unreadable(f"{home} has no run.json, so it is not the folder of a run")
    info = _info(home / "run.json")
    if not (home / "metrics.jsonl").is_file():
        raise Unreadable(f"{home} has no metrics.jsonl: it is gone, or the run made no step yet")
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


# --- the sum of it --------------------------------------------------------------------------------


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
    info, metric, losses = run.info, run.info.get("metric") or "loss", run.curve("loss")
    means = [y for _, y in smooth(losses)]
    best = next((e for e in reversed(run.evaluations) if _best(e, metric)), None)
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
    means, mean, weight = [], 0.0, 0.0
    for at, x in points:
        if math.isfinite(x):
            mean, weight = keep * mean + (1 - keep) * x, keep * weight + 1 - keep
        means.append((at, mean / weight if weight else math.nan))
    return means


def _best(event: dict[str, Any], metric: str) -> bool:
    """Whether an evaluation was the best so far. Older versions said so of what is not a number."""
    return bool(event.get("best")) and not math.isnan(_float(event.get(metric)))


def _float(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _rate(events: list[Event]) -> float:
    """Tokens a second over steps, evaluations and checkpoints left out."""
    tokens, seconds = (sum(_float(e.get(k)) for e in events) for k in ("tokens", "seconds"))
    return tokens / seconds if seconds > 0 else math.nan


# --- what the last checkpoint attends to ----------------------------------------------------------


class Map(NamedTuple):
    """Attention weights of one head: a row for each query, a column for each key."""

    site: str
    head: int
    queries: list[str]
    keys: list[str]
    weights: list[list[float]]


def look(run: Run) -> tuple[list[Map], str]:
    """Maps of the last sample, layer by layer, and what they show; or none, and why."""
    try:
        return _look(run)
    except (UsageError, OSError) as error:
        return [], f"No attention is shown: {error}."


def _look(run: Run) -> tuple[list[Map], str]:
    task = run.info.get("task")
    if task == "image":
        raise UsageError("the model reads pictures, of which samples hold the labels alone")
    full = [s for s in run.samples if s["source"].strip() or s["text"].strip()]
    if not full:
        raise UsageError("the run kept no samples to look at")
    if not (run.folder / "last").is_dir():
        raise UsageError("the run has no checkpoint yet")
    model = load(run.folder / "last").eval()
    tokenizer, source, text = needed(tokenizer_of(model)), full[-1]["source"], full[-1]["text"]
    longest = min(LONGEST, context_of(model) or LONGEST)
    if not model.reads_source:
        source = source + text if task in WRITES else source or text
    if not (ids := tokenizer.encode(source)[:longest]):
        raise UsageError("the last sample has no tokens to read")
    given = Given(torch.tensor([ids]), names(tokenizer, ids))
    if model.reads_source:
        written = tokenizer.encode_target(text, special=False)[:longest]
        if not written:
            raise UsageError("the last sample has an empty text")
        given = writing(model, tokenizer, given, written)
    layers = [(view, layer) for view in trace(model, given) for layer in view.layers]
    shown = layers[-max(MOST // min(len(layers[-1][1].heads), HEADS), 1) :]
    maps = [
        Map(layer.site, i, view.rows, view.columns, head.cells.tolist())
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
        *_headed(parts),
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


def _headed(parts: Mapping[str, Iterable[Block]]) -> list[Block]:
    return [block for name, each in parts.items() for block in (Block("heading", name), *each)]


def _header(run: Run, result: Summary) -> Iterator[tuple[str, str]]:
    info = run.info
    yield "command", shlex.join(run.command)
    changes = info.get("changes") or {}
    yield "changed settings", "\n".join(f"{k} = {v}" for k, v in changes.items()) or "none"
    yield "task", info.get("task", "-")
    yield "data", info.get("data", "-")
    trained, parameters = info.get("trained"), info.get("parameters")
    part = f", {number(trained)} of them trained" if trained not in (None, parameters) else ""
    yield "parameters", number(parameters) + part
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
    took = "-" if result.seconds is None else span(result.seconds)
    yield "ended", f"{info.get('ended', 'not told')}; status {result.status}, {took}"


def curves(runs: Sequence[Run], names: Sequence[str] = ()) -> list[Figure]:
    """Loss, learning rate, gradient, throughput and rewards, and every metric of evaluations; of several
    runs laid over each other, under `names`."""
    figures, alone = [], len(runs) == 1
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
    if len({x for each in series for x, y in each.points if math.isfinite(y)}) < 2:
        return None
    head = ("curve", "step", unit) if many else ("step", unit)
    table = Block("table", head=head, rows=rows, folded="as a table")
    above = [y for _, curve in values for y in curve if y > 0] if log else []
    drawn = [lines(series, title, y=unit, log=on) for on in (False, True)[: 1 + bool(above)]]
    logged = bool(above) and max(above) >= WIDE * min(above)
    return Figure(drawn[0], title, "; ".join(ends), table, values, "".join(drawn[1:]), logged)


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
        good = _best(event, run.info.get("metric") or "loss")
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


def _attention(maps: Sequence[Map], note: str) -> Iterator[Block]:
    if note or not maps:
        yield Block("text", note or "No attention was looked at.")
    if not maps:
        return
    last = [m for m in maps if m.site == maps[-1].site]
    rows = list(zip(*(m.weights for m in last)))[:WORDS]
    mean = [[sum(cells) / len(last) for cells in zip(*row)][:WORDS] for row in rows]
    title = f"{maps[-1].site}, mean of {len(last)} heads: rows look at columns"
    names = {"rows": last[0].queries[:WORDS], "across": last[0].keys[:WORDS]}
    yield Block("figures", figures=[Figure(heat(mean, title, **names), title)])
    captions = [f"{m.site}, head {m.head}: most {_strongest(m)}" for m in maps]
    figures = [Figure(heat(m.weights, caption), caption) for m, caption in zip(maps, captions)]
    yield Block("thumbnails", figures=figures)


def _strongest(m: Map) -> str:
    """The largest weight and its tokens; a row that sees one key alone had no choice and does not
    count."""
    free = [i for i, row in enumerate(m.weights) if sum(w > 0 for w in row) > 1]
    cells = [(i, j) for i in free or range(len(m.weights)) for j in range(len(m.keys))]
    i, j = max(cells, key=lambda at: m.weights[at[0]][at[1]])
    query, key = (clip(visible(token), 12) for token in (m.queries[i], m.keys[j]))
    return f"{m.weights[i][j]:.2f}, {query} → {key}"


def _again(run: Run) -> Iterator[Block]:
    other = os.path.normpath(run.folder / ".." / f"{run.folder.resolve().name}-again")
    # The run's own config has what was changed, and paths that hold from anywhere.
    begin = ["regard", "train", str(run.folder / "config.toml")]
    go_on = ["regard", "train", "--resume", str(run.folder)]
    # That of an older version lacks the changes; its command line has them.
    if "options" not in run.info:
        given = [word for word in run.command if word not in ("--resume", "--overwrite")]
        begin, go_on = _without(given, "--output-dir"), [*given, "--resume"]
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
    kept, rest = [], iter(command)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") != flag:
            kept.append(word)
        elif not equals:
            next(rest, "")
    return kept


# --- runs side by side ----------------------------------------------------------------------------


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
    rule, split = "-" * min(max(map(len, text)), 100), 1 + len(differ)
    none = [] if differ else ["(the settings are the same)"]
    return "\n".join([text[0], rule, *none, *text[1:split], rule, *text[split:]])


def comparison(runs: Sequence[Run]) -> list[Block]:
    """The page of several runs: the settings in which they differ, their figures, their curves laid
    over each other."""
    names, differ, results = labels(runs), _differing(runs), [summary(run) for run in runs]
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
    return _headed(parts)


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
        ("tokens / s", *("-" if s.rate is None else short(s.rate) for s in results)),
        ("parameters", *(number(s.parameters) for s in results)),
        ("time", *("-" if s.seconds is None else span(s.seconds) for s in results)),
        ("steps", *(f"{s.step} of {s.steps or '?'}" for s in results)),
        ("status", *("diverged" if s.diverged else s.status for s in results)),
    ]
