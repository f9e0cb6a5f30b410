"""What a run needs, before it is begun: memory, disk, work, time; whether that is there; and what would make it less.

What a backward pass needs for a moment is not counted, but all gradients are taken to be there together with all
activations, which is so from the second part of a step on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from regard.data.batch import IGNORE, Feed
from regard.layers import LMHead
from regard.models.summary import pair_flops, weight_flops
from regard.moe import MixtureOfExperts
from regard.train.activations import Pass, kept
from regard.train.head import CHUNK, table
from regard.train.keep import SPARE
from regard.train.optim import Optim, hidden
from regard.train.room import free_disk, free_memory, size
from regard.train.trainer import Train

# how much of the speed of plain products training reaches
EFFICIENCY = {"cpu fp32": 0.6, "cpu bf16": 0.3, "cuda fp32": 0.6, "cuda bf16": 0.4}
PROBED = 0.5  # seconds for measuring that speed
OTHER = 300 << 20  # bytes of libraries, and what the allocator keeps
LESS = 0.97  # a change after which more than this share is needed is not worth a line


@dataclass(frozen=True, eq=False)
class Job:
    """A model (it may be empty, on the meta device), one step of its training, and how it is trained. `learned`: the
    share of tokens that have a label; `sized`: the setting that says how large a batch is; `small`: checkpoints hold
    only what is trained."""

    model: Any
    step: Pass
    train: Train
    learned: float = 1.0
    sized: str = "data.rows"
    small: bool = False

    @property
    def part(self) -> Pass:
        """What is computed at once."""
        rows = -(-self.step.rows // self.train.parts)
        return replace(self.step, rows=rows, bf16=self.train.precision == "bf16")


@dataclass(frozen=True)
class Memory:
    """Bytes, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int = 0  # of a head over a vocabulary: a chunk of them, and the gradient of its weight
    copies: int = 0  # of weights, in bf16
    other: int = OTHER

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, eq=False)
class Plan:
    """What a job needs. `disk` is all checkpoints that stay, and one that is being written."""

    job: Job
    memory: Memory
    checkpoint: int
    disk: int
    flops: int  # of a step


def planned(job: Job, keep: int = 2) -> Plan:
    """`keep`: checkpoints that stay beside the best."""
    model = job.model
    held = 4 * trainable(model) if job.small else sum(p.nbytes for p in model.parameters())
    checkpoint = held + optimizer_bytes(model, job.train.optim) + SPARE
    return Plan(job, memory(job), checkpoint, (keep + 2) * checkpoint, step_flops(job))


# --- memory -------------------------------------------------------------------------------------------------------


def memory(job: Job) -> Memory:
    model, run = job.model, job.part
    body = (p for name, p in model.named_parameters() if not name.startswith("head."))
    saved = kept(model.config, run).total(job.train.recompute)
    linear = (nn.Linear, MixtureOfExperts)
    matrices = (p for m in model.modules() if isinstance(m, linear) for p in m.parameters(False))
    return Memory(
        weights=sum(p.nbytes for p in model.parameters()),
        gradients=4 * trainable(model),
        optimizer=optimizer_bytes(model, job.train.optim),
        activations=saved if any(p.requires_grad for p in body) else 0,
        logits=head_bytes(model, run, job.learned),
        copies=2 * sum(p.numel() for p in matrices if p.dim() > 1) if run.bf16 else 0,
    )


def trainable(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def optimizer_bytes(model: nn.Module, optim: Optim) -> int:
    """AdamW keeps two numbers for each, Muon one for each number of a hidden matrix."""
    turned = 0
    if optim.name == "muon":
        named = dict(model.named_parameters())
        turned = sum(named[name].numel() for name in hidden(model))
    return 8 * trainable(model) - 4 * turned


def head_bytes(model: Any, run: Pass, learned: float = 1.0) -> int:
    """The vocabulary's head, see regard.train.head: logits of a chunk, the gradients of what comes in and of the
    weight; a tied weight gets a second one from the embedding."""
    head = getattr(model, "head", None)
    if not isinstance(head, LMHead):
        return 0
    weight = table(model) if head.weight is None else head.weight
    vocab, dim = weight.shape
    n = int(run.rows * run.length * learned)
    room = min(n, max(1, CHUNK.get(run.device, CHUNK["cpu"]) // vocab)) * vocab
    gradients = (8 if head.weight is None else 4) * vocab * dim
    return run.w * (room + n * dim) + gradients + (2 * vocab * dim if run.bf16 else 0)


# --- work and time ------------------------------------------------------------------------------------------------


def step_flops(job: Job) -> int:
    """Of one step: forward once, backward twice that, and forward again where blocks are recomputed. A causal token
    sees half of the row on average; only tokens with a label meet the vocabulary."""
    model, run = job.model, job.step
    tower = getattr(model.config, "tower", None)
    seen = run.length if tower is not None and not tower.causal else -(-run.length // 2)
    table_ = getattr(model, "embedding", None) or getattr(model, "target", None)
    is_lm = isinstance(getattr(model, "head", None), LMHead)
    head = model.head_flops(model.head, table_) if is_lm else 0
    body = model.flops_per_token(seen) - head
    forward = run.rows * run.length * (body + int(head * job.learned))
    encoder = getattr(model, "encoder", None)
    if encoder is not None:
        each = weight_flops(encoder) + pair_flops(encoder, run.source)
        forward += run.rows * run.source * each
    return forward * (4 if job.train.recompute else 3)


def probe(device: torch.device, bf16: bool, run: Pass, width: int) -> float:
    """FLOP/s of products as large as the model's own, measured for a moment."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    most = 4096 if device.type == "cuda" else 1024
    n, m = min(run.rows * run.length, most), min(width, most)
    x, w = (torch.rand(*shape, device=device, dtype=dtype) for shape in ((n, m), (m, 4 * m)))
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.mm(x[:1], w)  # the first product of a kind prepares it
    start = time.perf_counter()
    torch.mm(x[:64], w)
    wait()
    took = time.perf_counter() - start
    # A CPU without products of this kind would take minutes over a whole one.
    if took * n / 64 > 10 * PROBED:
        return 8 * min(n, 64) * m * m / took
    best, times, began = 0.0, 1, time.perf_counter()
    while not best or time.perf_counter() - began < PROBED:
        wait()
        start = time.perf_counter()
        for _ in range(times):
            torch.mm(x, w)
        wait()
        took = time.perf_counter() - start
        best = max(best, 8 * n * m * m * times / took)
        times = times * 2 if took < PROBED / 20 else times
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


def changes(job: Job, free: int) -> list[Change]:
    """What lowers the memory, the cheapest first; if none is enough alone, several together come last."""
    found = [change for change, _ in _tried(job, free)]
    if any(change.total <= free for change in found):
        return found
    settings: dict[str, str] = {}
    for _ in range(4):
        best = next(
            (pair for pair in _tried(job, free) if not {*pair[0].settings} & {*settings}), None
        )
        if best is None:
            break
        settings, job = settings | best[0].settings, best[1]
        if best[0].total <= free:
            return [*found, Change(settings, "together", best[0].total)]
    return found


def _tried(job: Job, free: int) -> Iterator[tuple[Change, Job]]:
    """Each change alone, if it helps: more parts, recomputing, bf16, smaller batches."""
    train, step, now = job.train, job.step, memory(job).total
    halves = [2**i for i in range(1, step.rows.bit_length())]
    more = [train.parts * 2**i for i in range(1, 20) if train.parts * 2**i <= step.rows]
    split = [replace(job, train=replace(train, parts=n)) for n in more]
    smaller = [replace(job, step=replace(step, rows=step.rows // n)) for n in halves]
    tried: list[tuple[str, str, list[Job]]] = [("train.parts", "the same result", split)]
    if not train.recompute:
        other = replace(job, train=replace(train, recompute=True))
        tried.append(("train.recompute", "the same result, a third slower", [other]))
    if train.precision == "fp32":
        other = replace(job, train=replace(train, precision="bf16"))
        tried.append(("train.precision", "rounded products", [other]))
    tried.append((job.sized, "smaller batches", smaller))
    for name, cost, jobs in tried:
        needs = [(memory(other).total, other) for other in jobs]
        if not needs or min(need for need, _ in needs) > LESS * now:
            continue
        need, best = next((pair for pair in needs if pair[0] <= free), needs[-1])
        yield Change({name: _value(name, best)}, cost, need), best


def _value(name: str, job: Job) -> str:
    values = {
        "train.parts": job.train.parts,
        "train.recompute": "true",
        "train.precision": job.train.precision,
        "data.tokens": job.step.rows * job.step.length,
    }
    return str(values.get(name, job.step.rows))


def shortage(plan: Plan, free_memory: int, free_disk: int) -> str | None:
    """Why a run cannot be begun and what to change, as one sentence; None if it can."""
    need = plan.memory.total
    if need > free_memory:
        parts = sorted(asdict(plan.memory).items(), key=lambda pair: -pair[1])
        most = ", ".join(f"{name} {size(count)}" for name, count in parts[:3])
        text = f"it needs about {size(need)} of memory ({most}), {size(free_memory)} are free"
        found = changes(plan.job, free_memory)
        listed = "; ".join(map(str, found)) or "a smaller model"
        enough = any(change.total <= free_memory for change in found)
        more = "" if enough or not found else "; even that is too much: take a smaller model"
        return f"{text}; cheapest first: {listed}{more}"
    if plan.disk > free_disk:
        return (
            f"its checkpoints need {size(plan.disk)} of disk ({size(plan.checkpoint)} each), {size(free_disk)} are "
            "free; make room, keep fewer with --keep 1, or write elsewhere with --output-dir"
        )
    return None


def refusal(config: Any, trainer: Any, keep: int = 2) -> str | None:
    """The shortage of a run that is about to begin. What its model and optimiser hold already counts as free. Of
    several processes each has only a share, which no formula here knows: then nothing is refused."""
    if trainer.team.world > 1:
        return None
    model, device = trainer.model, trainer.device
    step, learned = drawn(trainer.feed, model, device.type)
    small = config.adapt.method == "lora"
    sized = "data.rows" if config.data.rows is not None else "data.tokens"
    plan = planned(Job(model, step, config.train, learned, sized, small), keep)
    mine = [*model.parameters(), *trainer.optimizer.state().values()]
    held = sum(x.nbytes for x in mine)
    return shortage(plan, free_memory(device) + held, free_disk(trainer.keeper.folder))


def drawn(feed: Feed, model: Any, device: str, batches: int = 4) -> tuple[Pass, float]:
    """The largest of a feed's first batches, and the share of its tokens that have a label."""
    tower = getattr(model.config, "tower", None)
    causal = tower is not None and tower.causal  # then padding stands behind all that could see it
    found = []
    for k in range(min(batches, feed.epoch)):
        batch = feed.batch(k)
        pictures = batch.ids.dim() > 2
        rows, length = len(batch.ids), patches(model) if pictures else batch.ids.shape[1]
        source = 0 if batch.source is None else batch.source.shape[1]
        told = (batch.doc, batch.prefix, batch.source_lengths if source else batch.lengths)
        masked = any(x is not None for x in told[: 2 if causal else 3])
        learned = float((batch.labels != IGNORE).sum()) / (rows * length)
        found.append((Pass(rows, length, source, masked, device=device), min(learned, 1.0)))
    return max(found, key=lambda pair: pair[0].rows * (pair[0].length + pair[0].source))


def patches(model: Any) -> int:
    """Tokens that a picture becomes."""
    return model.config.embedding.extra + model.config.embedding.count
