"""What a run needs, before it is begun: memory, disk, work, time; whether that is there; and what would make it less.

What a backward pass needs for a moment is not counted, but all gradients are taken to be there together with all
activations, which is so from the second micro-batch of a step on."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from regard.attention import sparse
from regard.block import Block, Tower
from regard.data.feed import IGNORE, Feed
from regard.errors import ENVIRONMENT, Fault, UsageError
from regard.layers import LMHead
from regard.models import EncoderDecoderConfig, Patches, TransformerConfig
from regard.models.embedding import context
from regard.models.summary import pair_flops, weight_flops
from regard.moe import MixtureOfExperts
from regard.train.checkpoint import SPARE
from regard.train.loss import CHUNK, table
from regard.train.optim import Optim, hidden
from regard.train.trainer import Train

# How much of the speed of plain products training reaches.
EFFICIENCY = {"cpu fp32": 0.6, "cpu bf16": 0.3, "cuda fp32": 0.6, "cuda bf16": 0.4}
# Seconds for measuring that speed.
PROBED = 0.5
# Bytes of libraries, and what the allocator keeps.
OTHER = 300 << 20
# A change after which more than this share is needed is not worth a line.
LESS = 0.97
# Tokens of a row up to which recurrent models are run as they are.
SHORT = 128
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
POWERS = ("", "k", "M", "G", "T", "P", "E")
aten = torch.ops.aten


@dataclass(frozen=True)
class Pass:
    """One forward pass: `rows` of `length` tokens each, and of `source` tokens where an encoder reads them. `masked`:
    attention gets its mask as a tensor (packed documents, padding); of two towers, that to the source."""

    rows: int
    length: int
    source: int = 0
    masked: bool = False
    bf16: bool = False
    device: str = "cpu"


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
        rows = -(-self.step.rows // self.train.micro_batches)
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


# --- activations: what a forward pass keeps for the backward pass --------------------------------------------------


@dataclass(frozen=True)
class Activations:
    """Bytes kept: of each block, of its input alone, and around the blocks."""

    blocks: tuple[int, ...]
    inputs: tuple[int, ...]
    around: int

    def total(self, checkpointing: bool = False) -> int:
        """With activation checkpointing blocks keep their input, and one at a time all the rest."""
        if checkpointing and self.blocks:
            return self.around + sum(self.inputs) + max(self.blocks)
        return self.around + sum(self.blocks)


_measured: dict[tuple[str, Pass], Activations] = {}


def activations(config: Any, run: Pass) -> Activations:
    """Of a model's `hidden`, the head is not in it: measured on one and on two rows, as long as they are."""
    for rows in (1, 2):
        key = repr(config), replace(run, rows=rows)
        if key not in _measured:
            with torch.random.fork_rng(devices=[]):
                towers = isinstance(config, TransformerConfig | EncoderDecoderConfig)
                _measured[key] = (_of_towers if towers else _of_states)(config, key[1])
    one, two = (_measured[repr(config), replace(run, rows=rows)] for rows in (1, 2))

    def scaled(a: int, b: int) -> int:
        return a + (run.rows - 1) * (b - a)

    blocks = tuple(map(scaled, one.blocks, two.blocks))
    inputs = tuple(map(scaled, one.inputs, two.inputs))
    return Activations(blocks, inputs, scaled(one.around, two.around))


class Watch(TorchDispatchMode):
    """Counts what autograd saves, each storage once, by the place in which it is saved first; parameters and their
    copies in bf16 are not counted.

    Tensors under it may be fake, which have a size and no numbers. What a model asks of numbers is answered with 0 or
    no; all choices of a mixture fall on one expert, which takes as much as if they fell on several."""

    def __init__(self) -> None:
        super().__init__()
        self.place = -1
        self.saved: dict[int, tuple[int, Tensor]] = {}
        self.weights: dict[int, Tensor] = {}

    def add(self, model: nn.Module) -> None:
        self.weights |= {_storage(p): p for p in model.parameters()}

    def hear(self, x: Tensor) -> Tensor:
        if _storage(x) not in self.weights:
            self.saved.setdefault(_storage(x), (self.place, x))
        return x

    def size(self, place: int) -> int:
        return sum(x.untyped_storage().nbytes() for at, x in self.saved.values() if at == place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x: Any = args[0] if args else None
        if func is aten._local_scalar_dense.default:
            return 0.0 if x.dtype.is_floating_point else False if x.dtype == torch.bool else 0
        if func is aten._unique2.default:
            return x.new_empty(1), x.new_empty(0), x.new_empty(0)
        if func is aten.nonzero.default:
            return x.new_empty(x.numel(), x.dim(), dtype=torch.long)
        out = func(*args, **(kwargs or {}))
        if func is aten._to_copy.default and _storage(x) in self.weights:
            self.weights[_storage(out)] = out
        return out


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _of_towers(config: Any, run: Pass) -> Activations:
    """Of fake tensors, which take no memory. Each kind of block stands there twice: what all share,
    such as an encoder's memory, is saved by the first alone, and is counted around the blocks."""
    towers = ("tower",) if isinstance(config, TransformerConfig) else ("encoder", "decoder")
    short = {name: _shortened(getattr(config, name)) for name in towers}
    device = run.device if torch.cuda.is_available() else "cpu"
    watch, inputs = Watch(), []
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.device(device),
        # Sparse attention need not go through its queries in parts: fake ones fit any cache.
        mock.patch.object(sparse, "WORK", 1 << 62),
        watch,
    ):
        model = replace(config, **{name: tower for name, (tower, _) in short.items()}).make()
        watch.add(model.train())
        blocks = [m for m in model.modules() if isinstance(m, Block)]

        def enter(block: Any, args: Any) -> None:
            watch.place = blocks.index(block)
            inputs.append(args[0].nbytes)

        def leave(block: Any, args: Any, out: Any) -> None:
            watch.place = -1

        for block in blocks:
            block.register_forward_pre_hook(enter)
            block.register_forward_hook(leave)
        ids, more = _inputs(config, run)
        with (
            saved_tensors_hooks(watch.hear, lambda x: x),
            torch.autocast(device, torch.bfloat16, enabled=run.bf16),
        ):
            model.hidden(ids, **more)
        sizes = [watch.size(i) for i in range(len(blocks))]
        around = watch.size(-1) + sum(sizes[::2]) - sum(sizes[1::2])
        first, order = 0, []
        for tower, kinds in short.values():
            order += [first + 2 * kind + 1 for kind in kinds]
            first += tower.layers
        return Activations(tuple(sizes[i] for i in order), tuple(inputs[i] for i in order), around)


def _shortened(tower: Tower) -> tuple[Tower, list[int]]:
    """A tower with every kind of layer twice, and the kind of each layer."""
    pairs = list(zip(tower.each("attention"), tower.each("ffn"), strict=True))
    kinds: list[Any] = []
    for pair in pairs:
        kinds += [] if pair in kinds else [pair]
    attention, ffn = zip(*(pair for pair in kinds for _ in range(2)), strict=True)
    short = replace(tower, layers=2 * len(kinds), attention=attention, ffn=ffn)
    return short, [kinds.index(pair) for pair in pairs]


def _inputs(config: Any, run: Pass) -> tuple[Tensor, dict[str, Any]]:
    """What a model is given in such a pass, with nothing in it; no more tokens than it can read."""

    def read(embedding: Any, length: int) -> Tensor:
        if isinstance(embedding, Patches):
            return torch.zeros(run.rows, embedding.channels, embedding.size, embedding.size)
        most = None if embedding is None else context(config.max_len, embedding)
        return torch.zeros(run.rows, min(length, most or length), dtype=torch.long)

    lengths = torch.ones(run.rows, dtype=torch.long) if run.masked else None
    sides = [getattr(config, name, None) for name in ("embedding", "source", "target")]
    if not run.source:
        return read(sides[0], run.length), {} if lengths is None else {"lengths": lengths}
    source = {"source": read(sides[1], run.source), "source_lengths": lengths}
    return read(sides[2], run.length), source


def _of_states(config: Any, run: Pass) -> Activations:
    """Of a recurrent model, whose fused layers keep what they like: real tensors, without padding. Long rows are told
    by shorter ones: what is kept grows with the length and, by attention, with its square."""
    small = {n: 2 for n in ("vocab", "source_vocab") if hasattr(config, n)}
    model = replace(config, **small).make().train()
    longest = max(run.length, run.source)

    def kept(share: float) -> int:
        watch = Watch()
        watch.add(model)
        length, source = (max(1, round(n * share)) if n else 0 for n in (run.length, run.source))
        ids, more = _inputs(config, Pass(run.rows, length, source))
        with saved_tensors_hooks(watch.hear, lambda x: x):
            model.hidden(ids, **more)
        return watch.size(-1)

    if longest <= SHORT:
        return Activations((), (), kept(1.0))
    half, whole = (kept(n / longest) for n in (SHORT / 2, SHORT))
    # a x + b x^2 through both.
    b = 2 * (whole - 2 * half)
    x = longest / SHORT
    return Activations((), (), round((whole - b) * x + b * x * x) if b > 0 else round(whole * x))


# --- memory -------------------------------------------------------------------------------------------------------


def memory(job: Job) -> Memory:
    model, run = job.model, job.part
    learns = any(p.requires_grad for n, p in model.named_parameters() if not n.startswith("head."))
    saved = activations(model.config, run) if learns else Activations((), (), 0)
    linear = (nn.Linear, MixtureOfExperts)
    matrices = (p for m in model.modules() if isinstance(m, linear) for p in m.parameters(False))
    return Memory(
        weights=sum(p.nbytes for p in model.parameters()),
        gradients=4 * trainable(model),
        optimizer=optimizer_bytes(model, job.train.optim),
        activations=saved.total(job.train.activation_checkpointing),
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
    """The vocabulary's head, see regard.train.loss: logits of a chunk, the gradients of what comes in and of the
    weight; a tied weight gets a second one from the embedding."""
    head = getattr(model, "head", None)
    if not isinstance(head, LMHead):
        return 0
    weight = table(model) if head.weight is None else head.weight
    vocab, dim = weight.shape
    n = int(run.rows * run.length * learned)
    room = min(n, max(1, CHUNK.get(run.device, CHUNK["cpu"]) // vocab)) * vocab
    gradients = (8 if head.weight is None else 4) * vocab * dim
    if run.bf16:
        return 2 * (room + n * dim + vocab * dim) + gradients
    return 4 * (room + n * dim) + gradients


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
    return forward * (4 if job.train.activation_checkpointing else 3)


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
    alone = [change for change, _ in _tried(job, free)]
    if any(change.total <= free for change in alone):
        return alone
    settings: dict[str, str] = {}
    for _ in range(4):
        best = next(
            (pair for pair in _tried(job, free) if not {*pair[0].settings} & {*settings}), None
        )
        if best is None:
            break
        settings, job = settings | best[0].settings, best[1]
        if best[0].total <= free:
            return [*alone, Change(settings, "together", best[0].total)]
    return alone


def _tried(job: Job, free: int) -> Iterator[tuple[Change, Job]]:
    """Each change alone, if it helps: more micro-batches, activation checkpointing, bf16, smaller batches."""
    train, step, now = job.train, job.step, memory(job).total
    halves = [2**i for i in range(1, step.rows.bit_length())]
    more = [n for n in (train.micro_batches * half for half in halves) if n <= step.rows]
    split = [replace(job, train=replace(train, micro_batches=n)) for n in more]
    smaller = [replace(job, step=replace(step, rows=step.rows // n)) for n in halves]
    tried: list[tuple[str, str, list[Job]]] = [("train.micro_batches", "the same result", split)]
    if not train.activation_checkpointing:
        other = replace(job, train=replace(train, activation_checkpointing=True))
        tried.append(("train.activation_checkpointing", "the same result, a third slower", [other]))
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
        "train.micro_batches": job.train.micro_batches,
        "train.activation_checkpointing": "true",
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
        helps = changes(plan.job, free_memory)
        listed = "; ".join(map(str, helps)) or "a smaller model"
        enough = any(change.total <= free_memory for change in helps)
        more = "" if enough or not helps else "; even that is too much: take a smaller model"
        return f"{text}; cheapest first: {listed}{more}"
    if plan.disk > free_disk:
        return (
            f"its checkpoints need {size(plan.disk)} of disk ({size(plan.checkpoint)} each), {size(free_disk)} are "
            "free; make room, keep fewer (keep=1, --keep 1), or write elsewhere (folder, --output-dir)"
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
    tensors = [*model.parameters(), *trainer.optimizer.state().values()]
    held = sum(x.nbytes for x in tensors)
    return shortage(plan, free_memory(device) + held, free_disk(trainer.checkpoints.folder))


def drawn(feed: Feed, model: Any, device: str, batches: int = 4) -> tuple[Pass, float]:
    """The largest of a feed's first batches, and the share of its tokens that have a label."""
    tower = getattr(model.config, "tower", None)
    causal = tower is not None and tower.causal  # then padding stands behind all that could see it
    passes = []
    for k in range(min(batches, feed.epoch)):
        batch = feed.batch(k)
        pictures = batch.ids.dim() > 2
        rows, length = len(batch.ids), patches(model) if pictures else batch.ids.shape[1]
        source = 0 if batch.source is None else batch.source.shape[1]
        masks = (batch.doc, batch.prefix, batch.source_lengths if source else batch.lengths)
        masked = any(x is not None for x in masks[: 2 if causal else 3])
        learned = float((batch.labels != IGNORE).sum()) / (rows * length)
        passes.append((Pass(rows, length, source, masked, device=device), min(learned, 1.0)))
    return max(passes, key=lambda pair: pair[0].rows * (pair[0].length + pair[0].source))


def patches(model: Any) -> int:
    """Tokens that a picture becomes."""
    return model.config.embedding.extra + model.config.embedding.count


# --- what this machine has left, and how it is written for people ---------------------------------------------------


def pick_device(name: str) -> tuple[torch.device, str]:
    """The device, and why it is that one."""
    if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,4})?", name):
        raise UsageError(f"device is {name!r:.60}; choose auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return (torch.device("cuda"), "auto") if count else (torch.device("cpu"), "no cuda device")
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= count:
        raise Fault(
            f"device {name}: this machine has {count} cuda devices that torch can use; take device cpu",
            ENVIRONMENT,
        )
    return torch.device(name), "as asked"


def free_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes: of a GPU, or of this machine within the limits of the process's control groups."""
    if device.type == "cuda":
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + spare
    lines = _read(root / "proc/meminfo").splitlines()
    available = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")]
    if not available:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([*available, *_groups(root)]))


def _groups(root: Path) -> Iterator[int]:
    """What each control group, and those above it, leave; files that are only cached can go."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, kind, path = line.split(":", 2)
        if kind not in ("", "memory"):
            continue
        home, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        if kind:
            home = home / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        inside = Path(path.lstrip("/"))
        for folder in (home / part for part in (inside, *inside.parents)):
            limit, used = _read(folder / names[0]).strip(), _read(folder / names[1]).strip()
            if limit.isdigit() and used.isdigit():
                stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                yield int(limit) - int(used) + int(stat.get(names[2], 0))


def free_disk(folder: Path) -> int:
    """Bytes where a folder is, or will be."""
    while not folder.exists():
        folder = folder.absolute().parent
    return shutil.disk_usage(folder).free


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def size(count: float) -> str:
    """Bytes for people: 512 B, 4.0 KiB, 1.2 GiB."""
    power = 0
    while count >= 1000 and power < len(UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:,.{0 if not power or count >= 100 else 1}f} {UNITS[power]}"


def number(count: float) -> str:
    """A count, to go before its unit: 837 k, 26.4 M, 1.3 T."""
    power = 0
    while count >= 1000 and power < len(POWERS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {POWERS[power]}"


def duration(seconds: float) -> str:
    """40 s, 6.5 min, 8 h, 12 days."""
    for name, length in (("days", 86400), ("h", 3600), ("min", 60)):
        count = seconds / length
        if count >= 1.5:
            return f"{count:,.0f} {name}" if count >= 10 else f"{count:.2g} {name}"
    return f"{max(seconds, 1):.0f} s"
