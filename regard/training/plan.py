"""What a run needs, before it begins: memory, disk, work, time; whether that is there; what would make it less."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from regard.attention import DSA
from regard.data.config import PAIRS, PICTURED, ROWED, feed_of
from regard.data.corrupt import Marks
from regard.data.feed import IGNORE, Feed
from regard.data.shards import Column
from regard.data.survey import Survey, bytes_of, survey
from regard.errors import DATA, UsageError, blaming
from regard.fast.train import masters
from regard.kernels.linear import is_fast
from regard.layers import LMHead
from regard.machine import free_disk, free_memory, size
from regard.models.base import pair_flops, weight_flops
from regard.training.build import fresh, make_model, start_of
from regard.training.checkpoint import SPARE, Checkpoints
from regard.training.config import Config as RunConfig
from regard.training.config import check, recipe_of
from regard.training.measure import context_of
from regard.training.memory import Job, Pass, memory, optimizer_bytes, trainable
from regard.training.objectives import learns_mtp
from regard.training.parallel import Parallel
from regard.training.tasks import TASKS
from regard.training.trainer import SKIPS, Trainer

# How much of the speed of plain products training reaches.
EFFICIENCY = {"cpu fp32": 0.6, "cpu bf16": 0.3, "cuda fp32": 0.6, "cuda bf16": 0.4}
# Seconds for measuring that speed; for measuring steps; that a step may take to be measured.
PROBED, MEASURED, LONG = 0.5, 2.0, 10.0
# A change after which more than this share is needed is not worth a line.
LESS = 0.97
# Rows of an imagined batch that tell how long the rows of any are.
FEW = 8


class Plan:
    """What a job needs. `disk` is all checkpoints that stay, `keep` of them beside the best, and one that is being
    written; `flops` are those of a step."""

    def __init__(self, job: Job, keep: int = 2):
        self.job = job
        self.memory = memory(job)
        self.flops = step_flops(job)
        held = sum(p.nbytes for p in job.model.parameters())
        held = 4 * trainable(job.model) if job.small else held
        self.checkpoint = held + optimizer_bytes(job.model, job.train) + SPARE
        self.disk = (keep + 2) * self.checkpoint


# --- work and time ------------------------------------------------------------------------------------------------


def step_flops(job: Job) -> int:
    """Of one step: forward once, backward twice that, and forward again where blocks are recomputed. A causal token
    sees half of the row on average; only tokens with a label meet the vocabulary."""
    model, run = job.model, job.step
    tower = getattr(model.config, "tower", None)
    seen = run.length if tower is not None and not tower.causal else -(-run.length // 2)
    words = getattr(model, "embedding", None) or getattr(model, "target", None)
    is_lm = isinstance(getattr(model, "head", None), LMHead)
    head = model.head_flops(model.head, words) if is_lm else 0
    body = model.flops_per_token(seen) - head
    forward = run.rows * run.length * (body + int(head * job.learned))
    if learns_mtp(model):
        layers = weight_flops(model.mtp) + pair_flops(model.mtp.tower, seen)
        layers += int(head * job.learned) * model.mtp.config.depth
        forward += run.rows * run.length * layers
    encoder = getattr(model, "encoder", None)
    if encoder is not None:
        each = weight_flops(encoder) + pair_flops(encoder, run.source)
        forward += run.rows * run.source * each
    return forward * (4 if job.train.activation_checkpointing else 3)


def reached(job: Job, precision: str, device: torch.device) -> float:
    """FLOP/s that training the job in a precision reaches on a device, by the speed of products."""
    speed = probe(device, precision == "bf16", job.part, width(job.model))
    return speed * EFFICIENCY[f"{device.type} {precision}"]


def probe(device: torch.device, bf16: bool, run: Pass, width: int) -> float:
    """FLOP/s of products as large as the model's own, measured for a moment."""
    cuda = device.type == "cuda"
    most = 4096 if cuda else 1024
    n, m = min(run.rows * run.length, most), min(width, most)
    how: Any = {"device": device, "dtype": torch.bfloat16 if bf16 else torch.float32}
    x, w = torch.rand(n, m, **how), torch.rand(m, 4 * m, **how)

    def speed(rows: int, times: int = 1) -> tuple[float, float]:
        """FLOP/s, and seconds, of some products of the first rows."""
        start = time.perf_counter()
        for _ in range(times):
            torch.mm(x[:rows], w)
        if cuda:
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        return 8 * min(n, rows) * m * m * times / took, took

    speed(1)  # the first product of a kind prepares it
    best, took = speed(64)
    # A CPU without products of this kind would take minutes over a whole one.
    if took * n / 64 > 10 * PROBED:
        return best
    best, times = 0.0, 1
    end = time.perf_counter() + PROBED
    while not best or time.perf_counter() < end:
        now, took = speed(n, times)
        best = max(best, now)
        times *= 2 if took < PROBED / 20 else 1
    return best


# --- does it fit --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Settings that lower the need, what they cost, and the need then."""

    settings: dict[str, str]
    cost: str
    total: int

    def __str__(self) -> str:
        flags = " ".join(f"--{name} {value}" for name, value in self.settings.items())
        return f"{flags} ({self.cost}, about {size(self.total)})"


def changes(job: Job, free: int, tunings: Mapping[str, Job] | None = None) -> list[Change]:
    """What makes the job fit, the cheapest first: each alone, or, where none is enough, as few together as will do.
    `tunings`: the job with other values of adapt.method. Nothing where nothing helps enough."""
    methods = [
        (Change({"adapt.method": name}, "a small part learns", memory(other).total), other)
        for name, other in (tunings or {}).items()
    ]
    alone = [change for change, _ in (*_tried(job, free), *methods)]
    if fit := [change for change in (*alone, *_shared(job, free)) if change.total <= free]:
        return fit
    starts = [(dict[str, str](), job), *((change.settings, other) for change, other in methods)]
    return [many for start in starts if (many := _together(*start, free)) is not None][:1]


def _together(settings: dict[str, str], job: Job, free: int) -> Change | None:
    """Further changes, the cheapest first, until it fits."""
    steps = [(settings, job)]
    while memory(steps[-1][1]).total > free:
        before, job = steps[-1]
        others = (pair for pair in _tried(job, free) if not {*pair[0].settings} & {*before})
        change, job = next(others, (None, job))
        if change is None:
            return None
        steps.append((before | change.settings, job))
    return Change(steps[-1][0], "together", memory(job).total)


def _shared(job: Job, free: int) -> Iterator[Change]:
    """Weights, gradients, the optimiser and rows, shared by as many GPUs as are needed."""
    parts = asdict(memory(job))
    other = parts.pop("other")
    for count in (2, 4, 8, 16, 32, 64) if job.step.device == "cuda" and not job.small else ():
        need = sum(parts.values()) // count + other
        if need <= free:
            cost = f"on {count} such GPUs, by torchrun --nproc-per-node {count} -m regard train"
            yield Change({"train.parallel.mode": "fsdp"}, cost, need)
            return


def _tried(job: Job, free: int) -> Iterator[tuple[Change, Job]]:
    """Each change alone, if it helps: more micro-batches, activation checkpointing, bf16 where it is no slower, smaller
    batches."""
    train, step = job.train, job.step
    now = memory(job).total
    halves = [2**i for i in range(1, step.rows.bit_length())]
    more = [train.micro_batches * n for n in halves if train.micro_batches * n <= step.rows]
    row = 1 if job.sized == "data.rows" else step.length

    def trained(**settings: Any) -> Job:
        return replace(job, train=replace(train, **settings))

    split = {n: trained(micro_batches=n) for n in more}
    smaller = [replace(step, rows=step.rows // n) for n in halves]
    again = {"true": trained(activation_checkpointing=True)}
    rounded = step.device == "cuda" or is_fast(torch.bfloat16)
    narrow = {"bf16": trained(precision="bf16")} if rounded else {}
    tried: list[tuple[str, str, dict[Any, Job]]] = [
        ("train.micro_batches", "the same result", split),
        ("train.activation_checkpointing", "the same result, a third slower", again),
        ("train.precision", "rounded products", narrow),
        (job.sized, "smaller batches", {x.rows * row: replace(job, step=x) for x in smaller}),
    ]
    for name, cost, jobs in tried:
        needs = [(memory(other).total, str(value), other) for value, other in jobs.items()]
        if not needs or min(need for need, _, _ in needs) > LESS * now:
            continue
        need, value, best = next((each for each in needs if each[0] <= free), needs[-1])
        yield Change({name: value}, cost, need), best


def tunings(config: RunConfig, job: Job) -> dict[str, Job]:
    """The job with LoRA instead, and with LoRA on 4 bits, where its model is a folder's."""
    if config.adapt.method != "full" or "folder" not in config.model or TASKS[config.task].indexed:
        return {}
    dtype = next(start_of(config, device="meta").parameters()).dtype
    dtype = dtype if job.step.device == "cuda" or is_fast(dtype) else torch.float32
    jobs = {}
    for method in ("lora", "qlora"):
        other = replace(config, adapt=replace(config.adapt, method=method))
        with torch.device("meta"):
            model = other.learning(job.model.config.make().to(dtype), "meta")
        jobs[method] = replace(job, model=model, small=True)
    return jobs


def shortage(
    plan: Plan,
    free_memory: int,
    free_disk: int,
    others: Callable[[], Mapping[str, Job]] = dict,
) -> str | None:
    """Why a run cannot begin and what to change, as one sentence; None if it can."""
    need = plan.memory.total
    if need > free_memory:
        parts = sorted(asdict(plan.memory).items(), key=lambda pair: -pair[1])
        most = ", ".join(f"{name} {size(count)}" for name, count in parts[:3])
        text = f"it needs about {size(need)} of memory ({most}), {size(free_memory)} are free"
        helps = changes(plan.job, free_memory, others())
        return f"{text}; cheapest first: {'; '.join(map(str, helps)) or 'a smaller model'}"
    if plan.disk > free_disk:
        return (
            f"its checkpoints need {size(plan.disk)} of disk ({size(plan.checkpoint)} each), {size(free_disk)} are "
            "free; make room, keep fewer (keep=1, --keep 1), or write elsewhere (folder, --output-dir)"
        )
    return None


def refusal(config: Any, trainer: Trainer, keep: int = 2) -> str | None:
    """The shortage of a run that is about to begin. What its model and optimiser hold already counts as free. Of
    several processes each has only a share, which no formula here knows: then nothing is refused."""
    if trainer.team.world > 1:
        return None
    model, device = trainer.model, trainer.device
    plan = Plan(job_of(config, model, *drawn(trainer.feed, model, device.type)), keep)
    tensors = [*model.parameters(), *model.buffers(), *trainer.optimizer.state().values()]
    held = sum(x.nbytes for x in tensors)
    room = free_memory(device) + held, free_disk(trainer.checkpoints.folder)
    return shortage(plan, *room, lambda: tunings(config, plan.job))


def job_of(config: RunConfig, model: Any, step: Pass, learned: float) -> Job:
    sized = "data.rows" if config.data.rows is not None else "data.tokens"
    return Job(model, step, config.train, learned, sized, config.adapt.low_rank)


def drawn(feed: Feed, model: Any, device: str, batches: int = 4) -> tuple[Pass, float]:
    """The largest of a feed's first batches, and the share of its tokens that have a label."""
    # Padding then stands behind all that could see it.
    causal = not model.reads_source and bool(model.towers) and model.decodes
    passes = []
    for k in range(min(batches, feed.epoch)):
        batch = feed.batch(k)
        pictures = batch.ids.dim() > 2
        rows, length = len(batch.ids), patches(model) if pictures else batch.ids.shape[1]
        read = batch.source
        source = 0 if read is None else patches(model) if read.dim() > 2 else read.shape[1]
        masks = (batch.doc, batch.prefix, batch.source_lengths if source else batch.lengths)
        masked = any(x is not None for x in masks[: 2 if causal else 3])
        learned = float((batch.labels != IGNORE).sum()) / (rows * length)
        rows *= 1 if batch.rejected is None else 2
        passes.append((Pass(rows, length, source, masked, device=device), min(learned, 1.0)))
    return max(passes, key=lambda pair: pair[0].rows * (pair[0].length + pair[0].source))


def patches(model: Any) -> int:
    """Tokens that a picture becomes."""
    first = getattr(model.config, next(iter(model.towers.values())))
    return first.extra + first.count


# --- the run of a config ----------------------------------------------------------------------------


class Forecast:
    """All figures of a run, in the units of their names: its data looked at, its plan, a few steps measured. Nothing
    is saved, and no tokenizer is learned. `folder` is the run's, whose data and tokenizer are used if they are there;
    `keep` checkpoints stay beside the best; `in_fp32` are the seconds in float32 of a run in bf16 on a CPU that does
    not multiply it."""

    def __init__(self, config: RunConfig, folder: Path, device: torch.device, keep: int):
        with blaming(2, files=DATA):
            check(config)
        start = start_of(config, device="meta")
        with blaming(2, files=DATA):
            reads = TASKS[config.task].reads
            tokenizer = config.tokenizer.get("folder")
            self.facts = survey(reads, config.data, recipe_of(config), tokenizer, folder, start)
        self.device = device
        self.model = model_of(config, start, self.facts, "meta", device)
        job, filled = imagined_job(config, self.model, self.facts, device.type)
        self.plan = Plan(job, keep)
        self.free = free_memory(device)
        self.room = free_disk(folder)
        self.short = self.plan.memory.total > self.free
        self.full = self.plan.disk > self.room
        self.less = changes(job, self.free, tunings(config, job)) if self.short else []
        self._count(config, filled)
        self._measure(job)

    def _count(self, config: RunConfig, filled: float) -> None:
        """Steps, tokens, passes over the data, and work; the mean step is `filled` so far."""
        step, facts = self.plan.job.step, self.facts
        self.tokens = round(filled * step.rows * (step.length + step.source))
        # Of one step, and of all data: tokens, or pictures.
        seen, whole = (self.tokens, facts.tokens) if facts.tokens else (step.rows, facts.examples)
        epoch = max(whole * (1 - config.data.held), 1) / seen
        train = config.train.counted(epoch)
        self.config = replace(config, train=train)
        self.passes = train.steps / epoch
        self.flops = round(self.plan.flops * filled * train.steps)

    def _measure(self, job: Job) -> None:
        """Seconds, by steps that are measured; where one is too long or does not fit, by the speed of products."""
        train, data = self.config.train, self.config.data
        each = self.flops / reached(job, train.precision, self.device) / train.steps
        measurable = not self.short and each <= LONG
        self.step = step_seconds(self.config, self.facts, self.device) if measurable else None
        each = self.step or each
        self.speed = self.flops / each / train.steps
        self.evaluations = train.evaluations
        # How much is held out, beside what is trained on.
        self.held = data.held / (1 - data.held)
        if data.valid:
            self.held = bytes_of(data.source(valid=True)) / max(bytes_of(data.source()), 1)
        # Of a pass over what is held out, forward alone.
        forward = train.steps / max(self.passes, 1e-9) * self.held * each / 3
        self.seconds = train.steps * each + self.evaluations * forward
        self.in_fp32 = None
        bf16 = train.precision == "bf16"
        if bf16 and self.device.type == "cpu" and not is_fast(torch.bfloat16):
            self.in_fp32 = self.seconds * self._fp32_step(job) / each

    def _fp32_step(self, job: Job) -> float:
        """Seconds of a step in float32."""
        if self.step is None:
            return self.flops / reached(job, "fp32", self.device) / self.config.train.steps
        plain = replace(self.config, train=replace(self.config.train, precision="fp32"))
        return step_seconds(plain, self.facts, self.device) or self.step


def model_of(config: RunConfig, start: Any, facts: Survey, device: str, on: torch.device) -> Any:
    """The model with the head of the task, frozen as it will be `on` its device; on "meta" without memory for its
    weights."""
    if start is None:
        start = fresh(config, facts.vocab, device)
        config = replace(config, model={"folder": "."})
    with torch.device(device):
        model = make_model(config, start, None, [""] * facts.classes)
        return masters(config.learning(model, on=on))


def imagined_job(config: RunConfig, model: Any, facts: Survey, device: str) -> tuple[Job, float]:
    """One step, at its largest, and how full the mean step is beside it."""
    data, longest = config.data, context_of(model)
    data.batching(config.train.seed)
    if longest is not None and data.length is not None and data.length > longest:
        why = f"the model's context is {longest} tokens"
        raise UsageError(f"data.length = {data.length}, but {why}")
    few = replace(config, data=replace(data, rows=FEW, tokens=None))
    feeds = (imagined(few, model, facts, sizes) for sizes in (facts.longest, facts.mean))
    (step, mean), learned = zip(*(drawn(feed, model, device) for feed in feeds))
    each = data.tokens // max(step.length, step.source) if data.tokens else math.inf
    rows = max(1, int(min(each, data.rows or math.inf)))
    rows *= 2 if TASKS[config.task].reads == "prefer" else 1
    filled = 1.0 if data.tokens else (mean.length + mean.source) / (step.length + step.source)
    return job_of(config, model, replace(step, rows=rows), max(learned)), filled


def step_seconds(config: RunConfig, facts: Survey, device: torch.device) -> float | None:
    """Of steps of the real model on made-up examples as long as the mean one; nothing where none
    could be made."""
    start = start_of(config, device=str(device))
    model = model_of(config, start, facts, str(device), device).to(device)
    times: list[float] = []

    def note(event: dict[str, Any]) -> None:
        times.extend([event["seconds"]] if event["kind"] == "step" else [])

    train = replace(config.train, nan="skip", parallel=Parallel())
    checkpoints = Checkpoints(Path(), lambda model, path: None)
    feed = imagined(config, model, facts, facts.mean)
    trainer = Trainer(model, feed, config.objective, train, checkpoints, lambda path: model, [note])
    trainer.model.train()
    began = time.perf_counter()
    for k in range(1, min(SKIPS, config.train.steps + 1)):
        trainer._step(k)
        if len(times) > 2 and time.perf_counter() - began > MEASURED:
            break
    # The first step prepares kernels and makes the optimiser's state.
    return statistics.median(times[1:] or times) if times else None


def imagined(config: RunConfig, model: Any, facts: Survey, tokens: tuple[float, ...]) -> Feed:
    """Random examples of so many tokens, or one less; a batch of them or a little more."""
    data, reads, draw = config.data, TASKS[config.task].reads, np.random.default_rng(0)
    batching, classes = data.batching(config.train.seed), max(facts.classes, 1)
    coder: Any = SimpleNamespace(pad=0, before=(), after=(), start=0, end=1, divider=None)
    if reads in PICTURED:
        e, n = (
            getattr(model.config, [*model.towers.values()][-1 if reads == "draw" else 0]),
            data.rows or 1,
        )
        pixels = draw.integers(0, 256, (n, e.size, e.size, e.channels), np.uint8)
        labelled = (n, e.count) if reads == "segment" else n
        columns = {"images": Column(pixels), "labels": Column(draw.integers(0, classes, labelled))}
        size = max(1, round(tokens[0])) if tokens else 1
        columns["target"] = Column.of([np.zeros(size, np.int64)] * n)
        return feed_of(reads, data, coder, batching, columns, "", None)
    whole = reads in ROWED and data.pack in ("stream", "windows")
    # Only a stream is cut into rows; else room is left for the marks around a text.
    limit = math.inf if whole or data.length is None else data.length - 3
    sizes = [max(2, round(min(size, limit))) for size in tokens]
    need = (data.tokens or 0) + (data.rows or 0) * (data.length or max(sizes))
    sizes = [min(size, 4 * need) for size in sizes]
    n = need // min(sizes) + 2
    several = ([draw.integers(0, facts.vocab, size - i % 2) for i in range(n)] for size in sizes)
    texts = [Column.of(rows) for rows in several]
    shape = {"tag": texts[0].values.shape, "answer": (n, 2)}.get(reads, (n,))
    labels = Column(draw.integers(0, classes, shape), texts[0].ends if reads == "tag" else None)
    names = PAIRS.get(reads, ("ids",))
    columns = {**dict(zip(names, texts)), "labels": labels}
    feed = feed_of(reads, data, coder, batching, columns, "", None)
    sentinels = tuple(range(2, min(102, facts.vocab)))
    return config.fed(feed, Marks(facts.vocab, (), 0, sentinels, 0, 1, stops=(1,)))


def width(model: Any) -> int:
    last = [getattr(model.config, name) for name in model.towers][-1:]
    return (last or [model.config])[0].dim


def cache_bytes(model: Any) -> dict[str, int] | None:
    """Bytes that a token leaves in the cache in bf16, and what they would be with keys and values
    for every head."""
    towers = [getattr(model.config, name) for name in model.towers]
    token = 2 * sum(spec.numbers() for spec in model.cache_specs()) if model.decodes else 0
    if not token or not towers:
        return None
    tower, full = towers[-1], 0
    for config in tower.each("attention"):
        a = config.attention if isinstance(config, DSA) else config
        d = a.head_dim or tower.dim // a.heads
        full += 2 * a.heads * (d + (getattr(a, "value_dim", None) or d))
    return {"token": token, "mha": full}
