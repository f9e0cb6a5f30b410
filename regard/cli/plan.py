"""regard plan: what a run will need, as a table. Nothing is trained, and no tokenizer is learned."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regard.attention import DSA
from regard.checkpoint import load
from regard.cli.model import blaming, context_of, pick_device, resolved
from regard.data.config import feed_of
from regard.data.corrupt import Marks
from regard.data.feed import Feed
from regard.data.shards import Column
from regard.data.survey import Survey, bytes_of, survey
from regard.errors import DATA, ENVIRONMENT, Fault, UsageError
from regard.fast.train import masters
from regard.layers import MLP
from regard.models.summary import parameters
from regard.train.check import check
from regard.train.checkpoint import Checkpoints
from regard.train.config import Config, read
from regard.train.parallel import Parallel
from regard.train.plan import (
    EFFICIENCY,
    Job,
    Pass,
    Plan,
    changes,
    duration,
    free_disk,
    free_memory,
    number,
    patches,
    planned,
    probe,
    size,
    trainable,
)
from regard.train.run import fresh, made, notices
from regard.train.tasks import TASKS
from regard.train.trainer import Trainer

if TYPE_CHECKING:
    from regard.cli.options_work import Plan as Options

MEASURED = 2.0  # seconds for which steps are measured
LONG = 10.0  # seconds that a step may take to be measured
SLOW = 3600  # seconds after which a quicker config is pointed at
OFTEN = 30  # passes over the data after which it is known by heart
Row = tuple[str, str]


def run(options: Options) -> int:
    device, _ = pick_device(options.device)
    if options.keep < 1:
        raise UsageError(f"--keep is {options.keep}; give a number from 1")
    if Path(options.config).is_dir():
        if options.changes:
            raise UsageError(f"{options.config} is a model folder, which has no settings to change")
        return show_folder(options, device)
    with blaming(2):
        config = read(Path(options.config), options.changes)
    with blaming(2, files=DATA):
        check(config)
    folder = Path(options.output_dir or Path("runs") / Path(options.config).stem)
    with blaming(DATA):
        start = None
        if "folder" in config.model:
            start = load(resolved(config.model["folder"]), device="meta")
    with blaming(2, files=DATA):
        found = survey(config, folder, start)
    model = model_of(config, start, found, "meta")
    job, filled = job_of(config, model, found, device.type)
    plan = planned(job, max(options.keep, config.train.average))
    return show(options, Facts(config, plan, found, filled, device, folder))


def model_of(config: Config, start: Any, found: Survey, device: str) -> Any:
    """The model with the head of the task, frozen as it will be; on "meta" without memory for its weights."""
    if start is None:
        changed = {k: v for k, v in config.model.items() if k != "preset"}
        length = config.data.length
        start = fresh(config.model["preset"], changed, found.vocab, device, length)
        config = replace(config, model={"folder": "."})
    with torch.device(device):
        return masters(config.learning(made(config, start, None, [""] * found.classes)))


def job_of(config: Config, model: Any, found: Survey, device: str) -> tuple[Job, float]:
    """One step, at its largest, and how full the mean step is beside it."""
    data, reads = config.data, TASKS[config.task].reads
    data.batching(config.train.seed)
    longest, limit = context_of(model), data.length
    if longest is not None and limit is not None and limit > longest:
        raise UsageError(f"data.length = {limit}, but the model's context is {longest} tokens")
    sized = "data.rows" if data.rows is not None else "data.tokens"
    sides: tuple[int, ...]
    filled, masked = 1.0, True
    if reads == "image":
        sides, masked = (patches(model),), False
    elif reads in ("lm", "mlm") and data.pack != "none":
        if limit is None:
            raise UsageError(f"pack = {data.pack!r} needs the length of a row: length = N")
        sides = (limit,)
        masked = data.pack == "documents" or config.task in ("prefix", "spans", "infill")
    else:
        sides = tuple(min(n, limit or n) for n in found.longest)
        masked = config.task != "lm"
        if data.tokens is None:
            filled = sum(map(min, found.mean, sides)) / sum(sides)
    each = data.tokens // max(sides) if data.tokens is not None else math.inf
    rows = max(1, int(min(each, data.rows if data.rows is not None else math.inf)))
    source, target = (0, *sides)[-2:]
    if config.task in ("spans", "infill"):  # see Spans: a fifth is written, nine tenths are read
        shares = (0.9, 0.2) if config.task == "spans" else (1.0, 1.0)
        source, target = (math.ceil(share * target) for share in shares)
    step = Pass(rows, target, source, masked, device=device)
    learned = 0.15 if config.task == "mlm" else 1.0
    small = config.adapt.method == "lora"
    return Job(model, step, config.train, learned, sized, small), filled


# --- the time of a step --------------------------------------------------------------------------------------------


def step_seconds(config: Config, found: Survey, device: torch.device) -> float | None:
    """Of steps of the real model on made-up examples as long as the mean one; nothing where none could be made."""
    start = None
    if "folder" in config.model:
        start = load(resolved(config.model["folder"]), device=str(device))
    model = model_of(config, start, found, str(device)).to(device)
    times: list[float] = []

    def tell(event: dict[str, Any]) -> None:
        times.extend([event["seconds"]] if event["kind"] == "step" else [])

    train = replace(config.train, nan="skip", parallel=Parallel())
    checkpoints = Checkpoints(Path(), lambda model, path: None)
    feed = imagined(config, model, found)
    trainer = Trainer(model, feed, config.objective, train, checkpoints, lambda path: model, tell)
    trainer.model.train()
    began = time.perf_counter()
    for k in range(1, min(10, config.train.steps) + 1):
        trainer._step(k)
        if len(times) > 2 and time.perf_counter() - began > MEASURED:
            break
    # the first step prepares kernels and makes the optimiser's state
    return statistics.median(times[1:] or times) if times else None


def imagined(config: Config, model: Any, found: Survey) -> Feed:
    """Random examples of the mean length, a batch of them or a little more."""
    data, reads, draw = config.data, TASKS[config.task].reads, np.random.default_rng(0)
    batching, classes = data.batching(config.train.seed), max(found.classes, 1)
    if reads == "image":
        e, n = model.config.embedding, data.rows or 1
        pixels = draw.integers(0, 256, (n, e.size, e.size, e.channels), np.uint8)
        columns = {"images": Column(pixels), "labels": Column(draw.integers(0, classes, n))}
        return feed_of(reads, data, None, batching, columns, "", None)
    whole = reads in ("lm", "mlm") and data.pack in ("stream", "windows")
    # only a stream is cut into rows; else room is left for the marks around a text
    limit = math.inf if whole or data.length is None else data.length - 3
    sizes = [max(2, round(min(mean, limit))) for mean in found.mean]
    need = (data.tokens or 0) + (data.rows or 0) * (data.length or max(sizes))
    sizes = [min(size, 4 * need) for size in sizes]
    n = need // min(sizes) + 2
    texts = [Column.of([draw.integers(0, found.vocab, size) for _ in range(n)]) for size in sizes]
    shape = {"tag": texts[0].values.shape, "answer": (n, 2)}.get(reads, (n,))
    labels = Column(draw.integers(0, classes, shape), texts[0].ends if reads == "tag" else None)
    names = ("source", "target") if reads == "seq2seq" else ("ids",)
    columns = {**dict(zip(names, texts)), "labels": labels}
    coder: Any = SimpleNamespace(pad=0, before=(), after=(), start=0, end=1)
    feed = feed_of(reads, data, coder, batching, columns, "", None)
    sentinels = tuple(range(2, min(102, found.vocab)))
    return config.fed(feed, Marks(found.vocab, (), 0, sentinels, 0, 1))


# --- the table ----------------------------------------------------------------------------------------------------


class Facts:
    """All figures of a plan, in the units of their names."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        found: Survey,
        filled: float,
        device: torch.device,
        folder: Path,
    ):
        self.plan, self.found, self.device = plan, found, device
        job = plan.job
        self.free, self.room = free_memory(device), free_disk(folder)
        self.short = plan.memory.total > self.free
        self.full = plan.disk > self.room
        self.less = changes(job, self.free) if self.short else []
        step = job.step
        self.tokens = round(filled * step.rows * (step.length + step.source))
        shown = step.rows if not found.tokens else self.tokens
        whole = found.tokens or found.examples
        epoch = max(whole * (1 - config.data.held), 1) / shown
        train = config.train.counted(epoch)
        self.config = replace(config, train=train)
        self.passes = train.steps / epoch
        self.flops = round(plan.flops * filled * train.steps)
        self.kind = f"{device.type} {train.precision}"
        bf16 = train.precision == "bf16"
        self.speed = probe(device, bf16, job.part, width(job.model)) * EFFICIENCY[self.kind]
        each = self.flops / self.speed / train.steps
        self.step = None if self.short or each > LONG else step_seconds(config, found, device)
        each = self.step or each
        self.speed = self.flops / each / train.steps
        self.evaluations = 1 + (train.steps - 1) // train.evaluate if train.evaluate else 1
        # of a pass over what is held out, forward alone
        held = train.steps / max(self.passes, 1e-9) * self.held * each / 3
        self.seconds = train.steps * each + self.evaluations * held

    @property
    def held(self) -> float:
        """How much is held out, beside what is trained on."""
        data = self.config.data
        if data.valid:
            return bytes_of(data.source(valid=True)) / max(bytes_of(data.source()), 1)
        return data.held / (1 - data.held)

    def rows(self) -> list[Row]:
        plan, train, model = self.plan, self.config.train, self.plan.job.model
        count, learns = parameters(model), trainable(model)
        only = f", {learns:,} are trained" if learns < count else ""
        kind = "AdamW" if train.optim.name == "adamw" else "Muon and AdamW"
        called = {"optimizer": kind, "copies": "bf16 copies"}
        needs = asdict(plan.memory).items()
        parts = " + ".join(f"{called.get(name, name)} {size(n)}" for name, n in needs if n)
        names = f"{train.steps:,} steps x {self.tokens:,} tokens"
        share = train.steps * self.tokens / max(count, 1)
        passes = f"{self.passes:.3g} passes over the data, {share:.3g} tokens a parameter"
        speed = f"{number(self.speed)}FLOP/s on {self.device.type}, {train.precision}"
        part = f"{EFFICIENCY[self.kind]:.0%} of what products were just measured at"
        how = f"if it runs at {speed} ({part})"
        if self.step is not None:
            how = f"{train.steps:,} steps of {short_time(self.step)}, as just measured"
        if self.held:
            how += (
                f", and {self.evaluations:,} evaluations"
                if self.evaluations > 1
                else ", and an evaluation"
            )
        keep = plan.disk // plan.checkpoint - 2
        table = [
            ("model", f"{number(count)} parameters{only}: {describe(model)}"),
            ("data", self.found.describe()),
            ("run", f"{names} ({passes}), {number(self.flops)}FLOP"),
            ("memory", f"{parts} = about {size(plan.memory.total)} of {size(self.free)} free"),
            ("disk", f"{size(plan.checkpoint)} a checkpoint; {keep} that stay, the best and a new one: "
                     f"{size(plan.disk)} of {size(self.room)} free"),
            ("time", f"about {duration(self.seconds)}: {how}; the tokenizer, samples and checkpoints not counted"),
        ]  # fmt: skip
        table += kv_row(model, self.plan.job.step.length)
        table += [("notice", text) for text in notices(self.config, model)]
        return table + [("less", str(change)) for change in self.less] + self.hint()

    def hint(self) -> list[Row]:
        data, over = self.config.data, self.found.over
        if over and data.overlong == "error" and data.pack not in ("stream", "windows"):
            longer = (
                f"{over:,} examples are longer than {data.length} tokens, so training would stop"
            )
            return [("hint", f"{longer}; say data.overlong = truncate, drop or split")]
        if self.seconds > SLOW and self.device.type == "cpu":
            return [("hint", "regard recipes list shows configs that train in minutes")]
        if self.passes > OFTEN:
            return [
                ("hint", "the data is read often: it may be learned by heart, so hold some out")
            ]
        return []

    def data(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "parameters": parameters(plan.job.model),
            "trained": trainable(plan.job.model),
            "data": asdict(self.found),
            "steps": self.config.train.steps,
            "tokens": self.tokens,
            "passes": self.passes,
            "flops": self.flops,
            "memory": {**asdict(plan.memory), "total": plan.memory.total, "free": self.free},
            "disk": {"checkpoint": plan.checkpoint, "total": plan.disk, "free": self.room},
            "seconds": self.seconds,
            "measured": self.step,
            "speed": self.speed,
            "kv": kv(plan.job.model),
            "fits": not (self.short or self.full),
            "changes": [asdict(change) for change in self.less],
        }


def show(options: Options, facts: Facts) -> int:
    if options.json:
        print(json.dumps(facts.data()))
    else:
        print("\n".join(f"{name:<8}{text}" for name, text in facts.rows()))
    if facts.short:
        enough = any(change.total <= facts.free for change in facts.less)
        what = "change what `less` names" if enough else "take a smaller model"
        need = f"about {size(facts.plan.memory.total)} of memory, {size(facts.free)} are free"
        raise Fault(f"this run does not fit: it needs {need}; {what}", ENVIRONMENT)
    if facts.full:
        need = f"{size(facts.plan.disk)}, {size(facts.room)} are free"
        raise Fault(f"its checkpoints do not fit: they need {need}; make room", ENVIRONMENT)
    return 0


def show_folder(options: Options, device: torch.device) -> int:
    """What a model needs to run: its weights, and what it keeps of each token."""
    with blaming(DATA):
        model = load(resolved(options.config), device="meta")
    weights, free = sum(p.nbytes for p in model.parameters()), free_memory(device)
    if options.json:
        told = {"parameters": parameters(model), "weights": weights, "free": free, "kv": kv(model)}
        print(json.dumps({**told, "fits": weights <= free}))
    else:
        rows = [("model", f"{number(parameters(model))} parameters: {describe(model)}")]
        rows += [("memory", f"weights {size(weights)} of {size(free)} free on {device.type}")]
        rows += kv_row(model, context_of(model) or 1024)
        print("\n".join(f"{name:<8}{text}" for name, text in rows))
    if weights > free:
        raise Fault(f"the weights need {size(weights)}, {size(free)} are free", ENVIRONMENT)
    return 0


# --- words for numbers --------------------------------------------------------------------------------------------


def short_time(seconds: float) -> str:
    """0.21 s, 3.4 ms."""
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


def width(model: Any) -> int:
    c = model.config
    tower = getattr(c, "tower", None) or getattr(c, "decoder", None)
    return c.dim if tower is None else tower.dim


def describe(model: Any) -> str:
    """The shape of a model, in a line."""
    c = model.config
    towers = [getattr(c, name, None) for name in ("tower", "encoder", "decoder")]
    found = [tower for tower in towers if tower is not None]
    if not found:
        looks = f", {c.attention} attention" if c.attention else ""
        return f"{c.layers} layers of {c.cell} x {c.dim}{looks}"
    said = " and ".join(f"{tower.layers} layers x {tower.dim}" for tower in found)
    first = found[-1].each("attention")[-1]
    inner = first.attention if isinstance(first, DSA) else first
    groups = getattr(inner, "groups", inner.heads)
    heads = (
        f"{inner.heads} heads"
        if groups == inner.heads
        else f"{inner.heads} query / {groups} kv heads"
    )
    place = "rope" if inner.rope is not None else found[-1].relative and found[-1].relative.kind
    vectors = getattr(getattr(c, "embedding", None) or getattr(c, "target", None), "position", None)
    place = place or (vectors.kind if vectors is not None else "")
    ffn = found[-1].each("ffn")[-1]
    kind = f"{'gated ' if ffn.gated else ''}{ffn.activation}" if isinstance(ffn, MLP) else "experts"
    tied = "tied embeddings" if getattr(getattr(c, "head", None), "tied", False) else ""
    return ", ".join(text for text in (said, f"{heads} ({first.kind})", place, kind, tied) if text)


def kv(model: Any) -> dict[str, int] | None:
    """Bytes that a token leaves in the cache in bf16, and what they would be with keys and values for every head."""
    try:
        kept = 2 * sum(spec.numbers() for spec in model.cache_specs())
    except UsageError:
        return None
    tower = getattr(model.config, "tower", None) or getattr(model.config, "decoder", None)
    if not kept or tower is None:
        return None
    full = 0
    for config in tower.each("attention"):
        a = config.attention if isinstance(config, DSA) else config
        d = a.head_dim or tower.dim // a.heads
        full += 2 * a.heads * (d + (a.value_dim or d))
    return {"token": kept, "mha": full}


def kv_row(model: Any, length: int) -> list[Row]:
    found = kv(model)
    if found is None:
        return []
    kept, full = found["token"], found["mha"]
    beside = "" if kept == full else f" (mha would be {size(full)}, {full / kept:.1f} x)"
    return [
        ("kv", f"{size(kept)} a token in bf16{beside}, {size(kept * length)} at {length:,} tokens")
    ]
