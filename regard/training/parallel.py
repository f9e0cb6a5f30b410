"""Several processes training one model, on torch's own engine, started by torchrun; put around a finished model from
outside. `SingleProcess` is the team of one.

The loss is a sum, so gradients are summed over the processes, never averaged, and divided by the count of the whole
step: any number of processes takes the same step, up to rounding. A checkpoint is a whole model folder, whatever wrote
it, and the optimiser's tensors, or the part of them that each process has: any team goes on from any other's.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from regard.attention.multihead import GroupedQueryAttention
from regard.block import Block, Stack
from regard.config import Choice, Count, divisors, settings
from regard.data.feed import IGNORE, Batch
from regard.errors import UsageError
from regard.layers import FeedForward, TokenBatchNorm
from regard.models.adapt import low_ranks
from regard.training.checkpoint import SHARDS, TENSORS
from regard.training.index_losses import sparse_layers

MODES = ("ddp", "fsdp", "tensor")
# That processes wait for the first to evaluate or save; deaths are noticed by `Heartbeat`.
LONGEST = timedelta(hours=1)
# Between two heartbeats, in seconds; and the last one of a process that is through.
BEAT, DONE = 1.0, "done"
T = TypeVar("T")
Tensors = Mapping[str, Tensor]


@settings
class Parallel:
    """How processes share the work. "ddp": each has the model and a part of the batch. "fsdp": weights and optimiser
    are shared out too, and put together layer by layer. "tensor": `degree` processes (default: all) split heads and
    feed-forwards between them; groups of so many share batch and weights out, as in fsdp.

    Evaluations give the same figures in every mode. "ddp": the first process measures, the others wait for it. "fsdp"
    and "tensor": all compute every batch together, since no process could call a layer alone."""

    mode: Annotated[str, Choice(MODES)] = "ddp"  # ddp, fsdp or tensor
    degree: Count | None = None  # processes that split a layer (tensor); none: all
    patience: Count = 120  # seconds without a sign of life after which the others end

    def __post_init__(self) -> None:
        if self.degree is not None and self.mode != "tensor":
            raise UsageError(f"train.parallel.degree = {self.degree}: it is for mode tensor alone")


class Lost(UsageError):
    """Another process of the team is gone, and this one could not go on."""


class Inside(nn.Module):
    """A model as a place to compute in: inside(act, x) = act(model, x).

    What wraps a module (DDP, FSDP) hooks its call, but objectives and decoders call parts of a model. So the wrapped
    module is this one, and they are called inside it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, act: Callable[..., T], *args: Any) -> T:
        return act(self.model, *args)


class SingleProcess(AbstractContextManager["SingleProcess"]):
    """One process: nothing to share. It computes the part `data_rank` of `data_size` of a batch."""

    rank, world, data_rank, data_size = 0, 1, 0, 1
    mode, evaluates = "alone", True
    heartbeat: Heartbeat | None = None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        pass

    def wrap(self, model: nn.Module, precision: str = "fp32") -> nn.Module:
        """The model as `Inside`, gradients shared; before the optimiser is made."""
        return Inside(model)

    def no_sync(self) -> AbstractContextManager[object]:
        """Around a part of a batch that another part follows: its gradients are not shared yet."""
        return nullcontext()

    def even(self, parts: list[Batch], count: int) -> list[Batch]:
        """The same number of parts on every process."""
        return parts

    def total(self, number: Tensor) -> Tensor:
        """The sum over all processes that have different parts of the batch."""
        return number

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return flag

    def stops(self, flag: bool) -> bool:
        """`any`, in the middle of an evaluation, of those that evaluate."""
        return flag

    def agree(self, value: T) -> T:
        """What the first process has, something that JSON can say."""
        return value

    def once(self, act: Callable[[], T]) -> T:
        """`act` in the first process alone: what it gives, to all; what stops it there stops all."""
        return act()

    def first(self, act: Callable[[], T]) -> T:
        """`act` in the first process, then in the others, which find what it left on disk."""
        return act()

    def device(self, device: torch.device | str) -> torch.device:
        """This process's own."""
        return torch.device(device)

    def write(self, tensors: Tensors, folder: Path) -> dict[str, Tensor]:
        """Have each process write its part of tensors that are shared out; those that are left, for the first one."""
        return dict(tensors)

    def read(self, path: Path, named: Tensors) -> dict[str, Tensor]:
        """The optimiser's tensors of a checkpoint, cut as those in `named` are: "name:what" as "name"."""
        if not (path / SHARDS).is_dir():
            return self.shard(named, load_file(path / TENSORS))
        from torch.distributed import checkpoint as dcp  # slow to import

        # Written by any number of processes.
        reader = dcp.HuggingFaceStorageReader(str(path / SHARDS))
        tensors: dict[str, Tensor] = {}
        known: dict[str, Any] = reader.read_metadata().state_dict_metadata
        for key, about in known.items():
            like = named.get(key.partition(":")[0])
            dtype = about.properties.dtype
            if like is not None and like.shape == about.size:
                tensors[key] = torch.empty_like(like, dtype=dtype)
            else:
                tensors[key] = torch.empty(about.size, dtype=dtype)
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
        return tensors

    def full_model(self, model: Any) -> Any:
        """A model that can be saved, in the first process."""
        return model

    def shard(self, named: Tensors, tensors: Tensors) -> dict[str, Tensor]:
        """Whole tensors cut as those in `named` are; "name:what" is cut as "name"."""
        return dict(tensors)


def team_of(config: Parallel, device: torch.device | str) -> SingleProcess:
    """Who trains: this process alone, or those that torchrun started with it; a context to train in."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return SingleProcess()
    if config.mode == "tensor" and world % (config.degree or world):
        raise UsageError(
            f"train.parallel.degree = {config.degree} does not divide {world} processes; "
            f"choose one of {divisors(world)}"
        )
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    heartbeat = None
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=LONGEST)
        heartbeat = Heartbeat(dist.get_rank(), world, config.patience)
        heartbeat.start()
    kinds = {"ddp": DataParallel, "fsdp": ShardedDataParallel, "tensor": TensorParallel}
    team = kinds[config.mode](config, kind)
    team.heartbeat = heartbeat
    return team


# --- every process has the model ----------------------------------------------------------------------------------


class DataParallel(SingleProcess):
    """torch's DistributedDataParallel."""

    def __init__(self, config: Parallel, kind: str):
        self.mode, self.kind = config.mode, kind
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.data_rank, self.data_size = self.rank, self.world
        self.group: dist.ProcessGroup | None = None  # who has other parts of the batch; None: all
        self.evaluates = self.rank == 0

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        error = rest[0]
        if lost(error):
            text = "another process has ended; go on from the last checkpoint with --resume"
            raise Lost(text) from None
        if self.heartbeat is not None and error is None:
            self.any(False)  # none is behind, and would be missed by those that wait for it
            self.heartbeat.stop()
            # None goes, and its store with it, before all have said that they are through.
            self.any(False)
            dist.destroy_process_group()

    def wrap(self, model: nn.Module, precision: str = "fp32") -> nn.Module:
        check_norms(model)
        if not any(p.requires_grad for p in model.parameters()):
            return Inside(model)  # the optimiser says what is wrong
        # Some parameters get no gradient, for which DDP would wait: a pooler beside a head, an indexer.
        pooler = getattr(model, "pooler", None) is not None and model.head is not None
        idle = pooler or bool(sparse_layers(model))
        wrapper = nn.parallel.DistributedDataParallel
        self.inside = wrapper(Inside(model), find_unused_parameters=idle)
        self.inside.register_comm_hook(None, lambda state, bucket: added(bucket))
        return self.inside

    def no_sync(self) -> AbstractContextManager[object]:
        return self.inside.no_sync()

    def total(self, number: Tensor) -> Tensor:
        number = number.clone()
        dist.all_reduce(number, group=self.group)
        return number

    def any(self, flag: bool) -> bool:
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def agree(self, value: T) -> T:
        text = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor(len(text))
        dist.broadcast(size, 0)
        data = torch.frombuffer(bytearray(text or int(size)), dtype=torch.uint8)
        dist.broadcast(data, 0)
        return value if self.rank == 0 else json.loads(data.numpy().tobytes())

    def once(self, act: Callable[[], T]) -> T:
        if self.rank:
            answer: Any = self.agree(None)
            if "error" in answer:
                raise UsageError(answer["error"])
            return answer["value"]
        try:
            value = act()
        except Exception as error:
            self.agree({"error": str(error)})
            raise
        self.agree({"value": value})
        return value

    def first(self, act: Callable[[], T]) -> T:
        values: list[T] = []
        self.once(lambda: values.append(act()))
        return values[0] if values else act()

    def device(self, device: torch.device | str) -> torch.device:
        if self.kind == "cuda":
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        return torch.device(device)


def lost(error: object) -> bool:
    """Whether a collective failed. Gloo's errors have no class of their own, but name the file of its source that they
    come from."""
    gloo = type(error) is RuntimeError and re.search(r"\bgloo/\S+\.(cc|h):\d", str(error))
    return isinstance(error, dist.DistError) or bool(gloo)


def added(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Gradients summed over all processes. One by one: the order in which a number is summed then depends on its place
    in its tensor alone, not on how DDP packs them, which changes after the first step."""
    sums = [dist.all_reduce(g, async_op=True).get_future() for g in bucket.gradients()]
    return torch.futures.collect_all(sums).then(lambda _: bucket.buffer())


# --- every process has a part of the model ----------------------------------------------------------------------------


def check_norms(model: nn.Module) -> None:
    """Refuse what gives a norm a part of the batch, or reads it twice."""
    if any(isinstance(part, TokenBatchNorm) for part in model.modules()):
        how = "train.micro_batches = 1 and train.activation_checkpointing = false"
        raise UsageError(
            f"BatchNorm is of a whole batch, read once; train in one process with {how}, or with another norm"
        )


class ShardedDataParallel(DataParallel):
    """FSDP2: each parameter is cut along its first axis; blocks are put together when they are called."""

    def __init__(self, config: Parallel, kind: str):
        super().__init__(config, kind)
        self.evaluates = True  # a block is put together by all
        self.mesh = dist.init_device_mesh(kind, (self.world,))

    def wrap(self, model: nn.Module, precision: str = "fp32") -> nn.Module:
        self.keep(model)
        return self.sharded(model, precision)

    def keep(self, model: nn.Module) -> None:
        """What the model was before it was cut, without its weights."""
        check_norms(model)
        if low_ranks(model):
            raise UsageError("LoRA is not shared out; train it with train.parallel.mode = ddp")
        self.empty = copied(model, {n: p.detach().to("meta") for n, p in model.named_parameters()})

    def sharded(self, model: nn.Module, precision: str) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # slow to import

        # What travels is half as wide; the parts, and sums of gradients, stay fp32. Inputs are autocast's.
        half = torch.bfloat16 if precision == "bf16" else None
        policy = MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False)
        root = Inside(model)
        shards = [m for m in model.modules() if isinstance(m, Block)] + [root]
        for module in shards:
            shard = fully_shard(module, mesh=self.mesh, mp_policy=policy)
            shard.set_gradient_divide_factor(1.0)
            shard.set_force_sum_reduction_for_comms(True)  # gloo knows no other

        # Without a backward pass, which does so, the root's parameters would stay whole.
        def cut_again(root: Any, args: Any, out: Any) -> None:
            if not torch.is_grad_enabled():
                root.reshard()

        root.register_forward_hook(cut_again)
        return root

    def no_sync(self) -> AbstractContextManager[object]:
        return nullcontext()  # whole gradients would fill the memory that sharing saves

    def stops(self, flag: bool) -> bool:
        return self.any(flag)

    def even(self, parts: list[Batch], count: int) -> list[Batch]:
        """Where there are fewer, a row that is not counted stands for a part: no process may call a block alone."""
        row = parts[0].each(lambda x: x[:1])
        spare = replace(row, labels=torch.full_like(row.labels, IGNORE))
        return parts + [spare] * (count - len(parts))

    def write(self, tensors: Tensors, folder: Path) -> dict[str, Tensor]:
        from torch.distributed import checkpoint as dcp  # slow to import

        # As safetensors: each process the parts that it has, what all have once.
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer)
        return {}

    def full_model(self, model: Any) -> Any:
        # One at a time is whole beside the parts.
        whole = ((name, gathered(x.detach())) for name, x in model.named_parameters())
        named = {name: x.cpu() for name, x in whole if self.rank == 0}
        return copied(self.empty, named) if self.rank == 0 else None

    def shard(self, named: Tensors, tensors: Tensors) -> dict[str, Tensor]:
        from torch.distributed.tensor import DTensor, distribute_tensor

        def cut(x: Tensor, like: Tensor | None) -> Tensor:
            if not isinstance(like, DTensor) or x.shape != like.shape:
                return x
            x, mesh = x.to(like.device), like.device_mesh
            return distribute_tensor(x, mesh, like.placements, src_data_rank=None)

        return {key: cut(x, named.get(key.partition(":")[0])) for key, x in tensors.items()}


def gathered(x: Tensor) -> Tensor:
    """A tensor put together, the parts of parts first."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(x, DTensor):
        return x
    for axis in range(x.device_mesh.ndim):
        x = x.redistribute(placements=[Replicate()] * (axis + 1) + list(x.placements[axis + 1 :]))
    return x.to_local()


def copied(model: Any, tensors: Tensors) -> Any:
    """The model with other tensors as its parameters, which are not copied; tied ones stay tied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(tensors[n], requires_grad=p.requires_grad)
        for n, p in model.named_parameters()
    }
    memo[id(model.origin)] = model.origin
    return copy.deepcopy(model, memo)


class TensorParallel(ShardedDataParallel):
    """`degree` processes split the layers (Shoeybi et al. 2019, arXiv:1909.08053); `world` / `degree` such groups share
    batch and weights as in FSDP.

        wq wk wv, up gate: cut by their outputs; each process computes its heads and its columns of the middle;
        wo, down: cut by their inputs; their products are summed over the group.

    All else (embeddings, norms, the model's head) every process of the group has whole and computes alike, with the
    same random numbers. (So dropout inside a layer falls alike on each process's part of it.)"""

    def __init__(self, config: Parallel, kind: str):
        super().__init__(config, kind)
        self.degree = config.degree or self.world
        shape = (self.world // self.degree, self.degree)
        both = dist.init_device_mesh(kind, shape, mesh_dim_names=("data", "tensor"))
        self.mesh, self.layers = both["data"], both["tensor"]
        self.data_rank, self.data_size = self.mesh.get_local_rank(), self.mesh.size()
        self.group = self.mesh.get_group()

    def wrap(self, model: nn.Module, precision: str = "fp32") -> nn.Module:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import parallelize_module

        self.keep(model)
        check(model, self.degree)
        for block in (m for m in model.modules() if isinstance(m, Block)):
            parallelize_module(block, self.layers, plan(block))
            for attention in attentions(block):
                attention.h, attention.g = attention.h // self.degree, attention.g // self.degree
        if self.data_size > 1:
            return self.sharded(model, precision)
        for p in model.parameters():
            if isinstance(p, DTensor) and p.requires_grad:  # norms of heads have a gradient of each
                p.register_hook(partial(DTensor.redistribute, placements=p.placements))
        return Inside(model)


def attentions(block: Block) -> list[Any]:
    return [part for part in (block.attention, block.cross) if part is not None]


def plan(block: Block) -> dict[str, Any]:
    """How torch is to cut the block's layers, by name."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    outputs, inputs = ("wq", "wk", "wv", "up", "gate"), ("wo", "down")
    heads = SequenceParallel(sequence_dim=2, use_local_output=True)  # b t h d
    styles: dict[str, Any] = {"q_norm": heads, "k_norm": heads}
    styles |= {n: ColwiseParallel() for n in outputs} | {n: RowwiseParallel() for n in inputs}
    names = [name for name, _ in block.named_modules()]
    return {n: styles[n.split(".")[-1]] for n in names if n.split(".")[-1] in styles}


def check(model: nn.Module, degree: int) -> None:
    """Whether the model's layers can be split so."""
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    looks = [a for block in blocks for a in attentions(block)]
    grouped = [a for a in looks if type(a) is GroupedQueryAttention]
    mixed = [block for block in blocks if type(block.ffn) not in (FeedForward, type(None))]
    stacks = [m for m in model.modules() if isinstance(m, Stack)]
    reasons = {
        "it has no blocks": not blocks,
        "its attention is not multi-head or grouped-query": len(grouped) < len(looks),
        "its feed-forward is a mixture of experts": bool(mixed),
        "its attention has sinks": any(a.sinks is not None for a in grouped),
        "its queries have a norm over all heads": any(a.config.qk_norm_whole for a in grouped),
        "it has relative position biases": any(stack.relative is not None for stack in stacks),
    }
    why = [reason for reason, holds in reasons.items() if holds]
    if why:
        raise UsageError(
            f"train.parallel.mode = tensor cannot split this model: {why[0]}; choose ddp or fsdp"
        )
    feeds = [block.ffn for block in blocks if isinstance(block.ffn, FeedForward)]
    counts = {n for a in grouped for n in (a.h, a.g)} | {ffn.config.ffn_dim for ffn in feeds}
    if any(n % degree for n in counts):
        fit = divisors(math.gcd(*counts))
        raise UsageError(
            f"{degree} processes cannot split this model's heads, key/value heads and feed-forward "
            f"({', '.join(map(str, sorted(counts)))}) evenly; set train.parallel.degree to one of {fit}, "
            f"or the mode to ddp or fsdp"
        )


# --- whether the other processes live --------------------------------------------------------------------------------


class Heartbeat:
    """Whether the other processes live, between `start`, which all call together, and `stop`. A process that waits for
    another inside a collective cannot look for itself: a thread beside it does.

    torchrun ends the rest when a process dies, but what waits on a GPU does not hear it; a process that is stopped
    (SIGSTOP, a machine that hangs) does not die; and nobody ends the rest when torchrun itself is killed. So every
    process says each second that it lives, in torchrun's store, and ends when another is silent for `patience` of its
    own beats (so that all may be stopped together, and go on), or the store is gone and torchrun with it: no orphans.
    To end at any time is safe: checkpoints are written whole or not at all.

    The thread needs Python's lock, which writing a large checkpoint holds for as long as the disk takes: the patience
    must be longer than that."""

    def __init__(self, rank: int, world: int, patience: int):
        self.rank, self.patience = rank, patience
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.keys = [f"regard/pulse/{again}/{r}" for r in range(world)]
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = timedelta(seconds=BEAT * patience)
        # a connection of its own: in torch's one, it would wait behind what waits for other processes
        self.store = dist.TCPStore(address, port, is_master=False, timeout=wait)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.store.set(self.keys[self.rank], "0")
        self.store.wait(self.keys, timedelta(minutes=5))
        self.thread.start()

    def stop(self) -> None:
        """This process is through; the others need not miss it."""
        self.ended.set()
        self.thread.join()
        self.store.set(self.keys[self.rank], DONE)

    def _watch(self) -> None:
        beats = [b""] * len(self.keys)
        silent = [0] * len(self.keys)
        count = 0
        while not self.ended.wait(BEAT):
            count += 1
            try:
                self.store.set(self.keys[self.rank], str(count))
                now = self.store.multi_get(self.keys)
            except (RuntimeError, ValueError):
                return self._end("torchrun is gone")
            for other, beat in enumerate(now):
                lives = beat != beats[other] or beat == DONE.encode()
                silent[other] = 0 if lives else silent[other] + 1
                if silent[other] == self.patience:
                    return self._end(f"process {other} gave no sign for {self.patience} seconds")
            beats = now

    def _end(self, why: str) -> None:
        if not self.ended.is_set():
            print(f"{why}: process {self.rank} ends", file=sys.stderr, flush=True)
            os._exit(1)
