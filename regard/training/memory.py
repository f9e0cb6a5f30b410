"""What training keeps in memory, by what it is for: weights, gradients, the optimiser's state, activations, logits.

What a backward pass needs for a moment is not counted, but all gradients are taken to be there together with all
activations, which is so from the second micro-batch of a step on."""

from __future__ import annotations

import functools
import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from regard.attention import sparse
from regard.block import Block
from regard.layers import LMHead
from regard.mask import Span
from regard.models import EncoderDecoderConfig, Patches, TransformerConfig
from regard.models.embedding import context
from regard.moe import MixtureOfExperts
from regard.training.losses import CHUNK
from regard.training.objectives import learns_mtp, table
from regard.training.optim import hidden
from regard.training.trainer import Train

# Bytes of libraries, and what the allocator keeps.
OTHER = 300 << 20
# Tokens of a row up to which recurrent models are run as they are.
SHORT = 128
# The number of no block.
AROUND = -1
aten = torch.ops.aten


@dataclass(frozen=True)
class Pass:
    """One forward pass: `rows` of `length` tokens each, and of `source` tokens where an encoder reads them. `masked`:
    attention gets its mask as a tensor (packed documents, padding); of two towers, that to the source. `further`: MTP
    layers learn beside it."""

    rows: int
    length: int
    source: int = 0
    masked: bool = False
    bf16: bool = False
    device: str = "cpu"
    further: bool = False


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


def memory(job: Job) -> Memory:
    model, run = job.model, replace(job.part, further=learns_mtp(job.model))
    learns = any(p.requires_grad for n, p in model.named_parameters() if not n.startswith("head."))
    saved = activations(model.config, run) if learns else Activations((), (), 0)
    linear = (nn.Linear, MixtureOfExperts)
    matrices = (p for m in model.modules() if isinstance(m, linear) for p in m.parameters(False))
    return Memory(
        weights=sum(x.nbytes for x in [*model.parameters(), *model.buffers()]),
        gradients=4 * trainable(model),
        optimizer=optimizer_bytes(model, job.train),
        activations=saved.total(job.train.activation_checkpointing),
        logits=head_bytes(model, run, job.learned),
        copies=2 * sum(p.numel() for p in matrices if p.dim() > 1) if run.bf16 else 0,
    )


def trainable(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def optimizer_bytes(model: nn.Module, train: Train) -> int:
    """AdamW keeps two numbers for each, Muon one for each number of a hidden matrix, a moving mean one more."""
    turned = 0
    if train.optim.name == "muon":
        named = dict(model.named_parameters())
        turned = sum(named[name].numel() for name in hidden(model))
    return (8 if train.ema is None else 12) * trainable(model) - 4 * turned


def head_bytes(model: Any, run: Pass, learned: float = 1.0) -> int:
    """The vocabulary's head, see regard.training.losses: logits of a chunk, the gradients of what comes in and of the
    weight; a tied weight gets a second one from the embedding."""
    head = getattr(model, "head", None)
    if not isinstance(head, LMHead):
        return 0
    weight = table(model) if head.weight is None else head.weight
    vocab, dim = weight.shape
    n = int(run.rows * run.length * learned)
    room = min(n, -(-CHUNK.get(run.device, CHUNK["cpu"]) // vocab)) * vocab
    gradients = (8 if head.weight is None else 4) * vocab * dim
    if run.bf16:
        return 2 * (room + n * dim + vocab * dim) + gradients
    return 4 * (room + n * dim) + gradients


# --- activations: what a forward pass keeps for the backward pass --------------------------------------------------


@dataclass(frozen=True)
class Activations:
    """Bytes kept: of each block, of its input alone, and around the blocks."""

    blocks: tuple[int, ...]
    inputs: tuple[int, ...]
    around: int

    def total(self, checkpointing: bool | tuple[int, ...] = False) -> int:
        """With activation checkpointing blocks keep their input, and one at a time all the rest."""
        every = range(len(self.blocks))
        again = (
            checkpointing if isinstance(checkpointing, tuple) else every if checkpointing else ()
        )
        kept = sum(self.inputs[i] if i in again else self.blocks[i] for i in every)
        return self.around + kept + max((self.blocks[i] for i in every if i in again), default=0)


def activations(config: Any, run: Pass) -> Activations:
    """Of a model's `hidden`, the head is not in it: measured on one and on two rows, as long as they are."""
    one, two = (_measured(config, replace(run, rows=rows)) for rows in (1, 2))

    def scaled(a: int, b: int) -> int:
        return a + (run.rows - 1) * (b - a)

    blocks = tuple(map(scaled, one.blocks, two.blocks))
    inputs = tuple(map(scaled, one.inputs, two.inputs))
    return Activations(blocks, inputs, scaled(one.around, two.around))


@functools.cache
def _measured(config: Any, run: Pass) -> Activations:
    towers = isinstance(config, TransformerConfig | EncoderDecoderConfig)
    with torch.random.fork_rng(devices=[]):
        return (_of_towers if towers else _of_states)(config, run)


def _of_towers(config: Any, run: Pass) -> Activations:
    """As the second of two blocks of each kind tells: what the first saves beyond it, such as an encoder's memory, all
    blocks share."""
    short: dict[str, Any] = {}
    kinds: list[Any] = []
    layers: list[Any] = []
    for name in ("tower", "encoder", "decoder"):
        tower = getattr(config, name, None)
        if tower is None:
            continue
        parts = ("attention", "ffn", "order")
        every = [(name, *kind) for kind in zip(*map(tower.each, parts))]
        pairs = [kind for kind in dict.fromkeys(every) for _ in range(2)]
        few = dict(zip(parts, list(zip(*pairs))[1:])) | {"layers": len(pairs), "blocks": None}
        short[name] = replace(tower, **few, layer_drop=0.0)
        kinds += pairs
        layers += every
    kept = _kept(replace(config, **short), run, fake=True)
    blocks = dict(zip(kinds, kept.blocks))
    inputs = dict(zip(kinds, kept.inputs))
    around = kept.total() - 2 * sum(blocks.values())
    each = tuple(blocks[kind] for kind in layers)
    return Activations(each, tuple(inputs[kind] for kind in layers), around)


def _of_states(config: Any, run: Pass) -> Activations:
    """Of a recurrent model, whose fused layers keep what they like: real tensors, without padding. Long rows are told
    by shorter ones: what is kept grows with the length and, by attention, with its square."""
    small = replace(config, **{n: 2 for n in ("vocab", "source_vocab") if hasattr(config, n)})
    x = max(run.length, run.source, SHORT) / SHORT

    def kept(part: float) -> int:
        length, source = (math.ceil(n / part) for n in (run.length, run.source))
        return _kept(small, Pass(run.rows, length, source), fake=False).around

    whole = kept(x)
    # a x + b x^2 through SHORT tokens and half as many.
    b = max(2 * (whole - 2 * kept(2 * x)), 0) if x > 1 else 0
    return Activations((), (), round((whole - b) * x + b * x * x))


def _kept(config: Any, run: Pass, fake: bool) -> Activations:
    """What autograd saves of `hidden`: each storage once, where it is saved first, without parameters and their copies
    in bf16. Fake tensors take no memory."""
    device = run.device if fake and torch.cuda.is_available() else "cpu"
    fakes = Fakes()
    inputs: list[int] = []
    inside = [AROUND]
    saved: dict[int, tuple[Tensor, int]] = {}

    def save(x: Tensor) -> Tensor:
        saved.setdefault(_storage(x), (x, inside[-1]))
        return x

    def enter(block: nn.Module, args: Any) -> None:
        inside.append(len(inputs))
        inputs.append(args[0].nbytes)

    with ExitStack() as stack:
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            # Sparse attention need not go through its queries in parts: fake ones fit any cache.
            stack.enter_context(mock.patch.dict(sparse.WORK, dict.fromkeys(sparse.WORK, 1 << 62)))
            stack.enter_context(fakes)
        stack.enter_context(torch.device(device))
        model = config.make().train()
        for block in (m for m in model.modules() if isinstance(m, Block)):
            block.register_forward_pre_hook(enter)
            block.register_forward_hook(lambda *_: inside.append(AROUND))
        fakes.weights |= {_storage(p): p for p in model.parameters()}
        ids, more = _inputs(model, run)
        stack.enter_context(torch.autocast(device, torch.bfloat16, enabled=run.bf16))
        stack.enter_context(saved_tensors_hooks(save, lambda x: x))
        states = model.hidden(ids, **more)
        for layer in range(model.mtp.config.depth if run.further else 0):
            states = model.further(states, ids, Span.run(0, ids.shape[1], ids.device), layer)
    sizes = [0] * (len(inputs) + 1)
    for place, (x, i) in saved.items():
        sizes[i] += 0 if place in fakes.weights else x.untyped_storage().nbytes()
    return Activations(tuple(sizes[:AROUND]), tuple(inputs), sizes[AROUND])


class Fakes(TorchDispatchMode):
    """Lets a model run on tensors that have a size and no numbers: what it asks of numbers is answered with 0 or no;
    all choices of a mixture fall on one expert, which takes as much as if they fell on several. `weights` are the
    storages of parameters and, once they are made, of their copies."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, Tensor] = {}

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


def _inputs(model: Any, run: Pass) -> tuple[Tensor, dict[str, Any]]:
    """What a model is given in such a pass, with nothing in it; no more tokens than it can read."""

    def read(embedding: Any, length: int) -> Tensor:
        if isinstance(embedding, Patches):
            return torch.zeros(run.rows, *embedding.shape)
        most = None if embedding is None else context(model.config.max_len, embedding)
        return torch.zeros(run.rows, min(length, most or length), dtype=torch.long)

    sides = [getattr(model.config, name) for name in model.towers.values()] or [None]
    lengths = torch.ones(run.rows, dtype=torch.long) if run.masked else None
    if run.source:
        source = {"source": read(sides[0], run.source), "source_lengths": lengths}
        return read(sides[-1], run.length), source
    return read(sides[0], run.length), {} if lengths is None else {"lengths": lengths}
