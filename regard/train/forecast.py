"""What the run of a config will need and how long it will take: its data looked at, its plan, a few
steps measured. Nothing is saved, and no tokenizer is learned."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from regard.attention import DSA
from regard.checkpoint import load
from regard.data.config import Survey, bytes_of, feed_of, survey
from regard.data.corrupt import Marks
from regard.data.feed import Feed
from regard.data.shards import Column
from regard.errors import DATA, UsageError, blaming
from regard.fast.train import masters
from regard.files import resolve_model
from regard.train.build import fresh, make_model
from regard.train.check import check, recipe_of
from regard.train.checkpoint import Checkpoints
from regard.train.config import Config as RunConfig
from regard.train.measure import context_of
from regard.train.parallel import Parallel
from regard.train.plan import (
    EFFICIENCY,
    Job,
    Pass,
    changes,
    free_disk,
    free_memory,
    patches,
    planned,
    probe,
)
from regard.train.tasks import TASKS
from regard.train.trainer import Trainer

MEASURED = 2.0  # seconds for which steps are measured
LONG = 10.0  # seconds that a step may take to be measured


def forecast(config: RunConfig, folder: Path, device: torch.device, keep: int) -> Forecast:
    """`folder` is the run's, whose data and tokenizer are used if they are there; `keep`
    checkpoints stay beside the best."""
    with blaming(2, files=DATA):
        check(config)
    with blaming(DATA):
        start = None
        if "folder" in config.model:
            start = load(resolve_model(config.model["folder"]), device="meta")
    with blaming(2, files=DATA):
        reads, words = TASKS[config.task].reads, config.tokenizer.get("folder")
        facts = survey(reads, config.data, recipe_of(config), words, folder, start)
    return Forecast(config, facts, start, device, folder, keep)


class Forecast:
    """All figures of a run, in the units of their names."""

    def __init__(
        self,
        config: RunConfig,
        facts: Survey,
        start: Any,
        device: torch.device,
        folder: Path,
        keep: int,
    ):
        self.facts, self.device = facts, device
        self.model = model_of(config, start, facts, "meta")
        job, filled = job_of(config, self.model, facts, device.type)
        plan = self.plan = planned(job, max(keep, config.train.average))
        self.free, self.room = free_memory(device), free_disk(folder)
        self.short = plan.memory.total > self.free
        self.full = plan.disk > self.room
        self.less = changes(job, self.free) if self.short else []
        step = job.step
        self.tokens = round(filled * step.rows * (step.length + step.source))
        shown = step.rows if not facts.tokens else self.tokens
        whole = facts.tokens or facts.examples
        epoch = max(whole * (1 - config.data.held), 1) / shown
        train = config.train.counted(epoch)
        self.config = replace(config, train=train)
        self.passes = train.steps / epoch
        self.flops = round(plan.flops * filled * train.steps)
        self.kind = f"{device.type} {train.precision}"
        bf16 = train.precision == "bf16"
        self.speed = probe(device, bf16, job.part, width(self.model)) * EFFICIENCY[self.kind]
        each = self.flops / self.speed / train.steps
        self.step = None if self.short or each > LONG else step_seconds(config, facts, device)
        each = self.step or each
        self.speed = self.flops / each / train.steps
        self.evaluations = 1 + (train.steps - 1) // train.evaluate if train.evaluate else 1
        # Of a pass over what is held out, forward alone.
        held = train.steps / max(self.passes, 1e-9) * self.held * each / 3
        self.seconds = train.steps * each + self.evaluations * held

    @property
    def held(self) -> float:
        """How much is held out, beside what is trained on."""
        data = self.config.data
        if data.valid:
            return bytes_of(data.source(valid=True)) / max(bytes_of(data.source()), 1)
        return data.held / (1 - data.held)


def model_of(config: RunConfig, start: Any, facts: Survey, device: str) -> Any:
    """The model with the head of the task, frozen as it will be; on "meta" without memory for its
    weights."""
    if start is None:
        changed = {k: v for k, v in config.model.items() if k != "preset"}
        length = config.data.length
        start = fresh(config.model["preset"], changed, facts.vocab, device, length)
        config = replace(config, model={"folder": "."})
    with torch.device(device):
        return masters(config.learning(make_model(config, start, None, [""] * facts.classes)))


def job_of(config: RunConfig, model: Any, facts: Survey, device: str) -> tuple[Job, float]:
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
        sides = tuple(min(n, limit or n) for n in facts.longest)
        masked = config.task != "lm"
        if data.tokens is None:
            filled = sum(map(min, facts.mean, sides)) / sum(sides)
    each = data.tokens // max(sides) if data.tokens is not None else math.inf
    rows = max(1, int(min(each, data.rows if data.rows is not None else math.inf)))
    source, target = (0, *sides)[-2:]
    # See Spans: a fifth is written, nine tenths are read.
    if config.task in ("spans", "infill"):
        shares = (0.9, 0.2) if config.task == "spans" else (1.0, 1.0)
        source, target = (math.ceil(share * target) for share in shares)
    step = Pass(rows, target, source, masked, device=device)
    learned = 0.15 if config.task == "mlm" else 1.0
    small = config.adapt.method == "lora"
    return Job(model, step, config.train, learned, sized, small), filled


def step_seconds(config: RunConfig, facts: Survey, device: torch.device) -> float | None:
    """Of steps of the real model on made-up examples as long as the mean one; nothing where none
    could be made."""
    start = None
    if "folder" in config.model:
        start = load(resolve_model(config.model["folder"]), device=str(device))
    model = model_of(config, start, facts, str(device)).to(device)
    times: list[float] = []

    def note(event: dict[str, Any]) -> None:
        times.extend([event["seconds"]] if event["kind"] == "step" else [])

    train = replace(config.train, nan="skip", parallel=Parallel())
    checkpoints = Checkpoints(Path(), lambda model, path: None)
    feed = imagined(config, model, facts)
    trainer = Trainer(model, feed, config.objective, train, checkpoints, lambda path: model, [note])
    trainer.model.train()
    began = time.perf_counter()
    for k in range(1, min(10, config.train.steps) + 1):
        trainer._step(k)
        if len(times) > 2 and time.perf_counter() - began > MEASURED:
            break
    # The first step prepares kernels and makes the optimiser's state.
    return statistics.median(times[1:] or times) if times else None


def imagined(config: RunConfig, model: Any, facts: Survey) -> Feed:
    """Random examples of the mean length, a batch of them or a little more."""
    data, reads, draw = config.data, TASKS[config.task].reads, np.random.default_rng(0)
    batching, classes = data.batching(config.train.seed), max(facts.classes, 1)
    if reads == "image":
        e, n = model.config.embedding, data.rows or 1
        pixels = draw.integers(0, 256, (n, e.size, e.size, e.channels), np.uint8)
        columns = {"images": Column(pixels), "labels": Column(draw.integers(0, classes, n))}
        return feed_of(reads, data, None, batching, columns, "", None)
    whole = reads in ("lm", "mlm") and data.pack in ("stream", "windows")
    # Only a stream is cut into rows; else room is left for the marks around a text.
    limit = math.inf if whole or data.length is None else data.length - 3
    sizes = [max(2, round(min(mean, limit))) for mean in facts.mean]
    need = (data.tokens or 0) + (data.rows or 0) * (data.length or max(sizes))
    sizes = [min(size, 4 * need) for size in sizes]
    n = need // min(sizes) + 2
    texts = [Column.of([draw.integers(0, facts.vocab, size) for _ in range(n)]) for size in sizes]
    shape = {"tag": texts[0].values.shape, "answer": (n, 2)}.get(reads, (n,))
    labels = Column(draw.integers(0, classes, shape), texts[0].ends if reads == "tag" else None)
    names = ("source", "target") if reads == "seq2seq" else ("ids",)
    columns = {**dict(zip(names, texts)), "labels": labels}
    coder: Any = SimpleNamespace(pad=0, before=(), after=(), start=0, end=1)
    feed = feed_of(reads, data, coder, batching, columns, "", None)
    sentinels = tuple(range(2, min(102, facts.vocab)))
    return config.fed(feed, Marks(facts.vocab, (), 0, sentinels, 0, 1))


def width(model: Any) -> int:
    c = model.config
    tower = getattr(c, "tower", None) or getattr(c, "decoder", None)
    return c.dim if tower is None else tower.dim


def cache_bytes(model: Any) -> dict[str, int] | None:
    """Bytes that a token leaves in the cache in bf16, and what they would be with keys and values
    for every head."""
    try:
        token = 2 * sum(spec.numbers() for spec in model.cache_specs())
    except UsageError:
        return None
    tower = getattr(model.config, "tower", None) or getattr(model.config, "decoder", None)
    if not token or tower is None:
        return None
    full = 0
    for config in tower.each("attention"):
        a = config.attention if isinstance(config, DSA) else config
        d = a.head_dim or tower.dim // a.heads
        full += 2 * a.heads * (d + (a.value_dim or d))
    return {"token": token, "mha": full}
