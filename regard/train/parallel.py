"""Several processes training one model, on torch's own engine, started by torchrun; put around a finished model from
outside. `Alone` is the team of one.

The loss is a sum, so gradients are summed over the processes, never averaged, and divided by the count of the whole
step: any number of processes takes the same step, up to rounding. Checkpoints hold whole tensors, whatever wrote them:
any team goes on from any other's. `split.py` has the teams whose processes hold a part of the model each.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.attention.sparse import SparseAttention
from regard.config import Count, divisors, ranged
from regard.data.batch import Batch
from regard.errors import UsageError, nearest
from regard.train.pulse import Pulse

MODES = ("ddp", "fsdp", "tensor")
LONGEST = timedelta(
    hours=1
)  # that processes wait for the first to evaluate or save; deaths are noticed by `Pulse`
T = TypeVar("T")


@dataclass(frozen=True)
@ranged
class Parallel:
    """How processes share the work. "ddp": each has the model and a part of the batch. "fsdp": weights and optimiser
    are shared out too, and put together layer by layer. "tensor": `degree` processes (default: all) split heads and
    feed-forwards between them; groups of so many share batch and weights out, as in fsdp. `patience`: seconds without a
    sign of life from a process after which the others end.

    Evaluations give the same figures in every mode. "ddp": the first process measures, the others wait for it. "fsdp"
    and "tensor": all compute every batch together, since no process could call a layer alone."""

    mode: str = "ddp"
    degree: Count | None = None
    patience: Count = 120

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(
                f"train.parallel.mode = {self.mode!r} is unknown; {nearest(self.mode, MODES)}"
            )
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


class Alone:
    """One process: nothing to share. `share` of `shares` is the part of a batch that it computes."""

    rank, world, share, shares = 0, 1, 0, 1
    mode, evaluates = "alone", True
    pulse: Pulse | None = None

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        pass

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as `Inside`, gradients shared; before the optimiser is made."""
        return Inside(model)

    def hold(self) -> AbstractContextManager[object]:
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

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that may be shared out, put together, in the first process's memory."""
        return dict(tensors)

    def plain(self, model: Any) -> Any:
        """A model that can be saved, in the first process."""
        return model

    def part(self, named: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors cut as those in `named` are; "name:what" is cut as "name"."""
        return dict(tensors)


def team_of(config: Parallel, device: torch.device | str) -> Alone:
    """Who trains: this process alone, or those that torchrun started with it; a context to train in."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Alone()
    if config.mode == "tensor" and world % (config.degree or world):
        raise UsageError(
            f"train.parallel.degree = {config.degree} does not divide {world} processes; "
            f"choose one of {divisors(world)}"
        )
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    pulse = None
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=LONGEST)
        pulse = Pulse(dist.get_rank(), world, config.patience)
        pulse.start()
    if config.mode == "ddp":
        made = Ddp(config, kind)
    else:
        from regard.train.split import Fsdp, Split  # slow to import

        made = Fsdp(config, kind) if config.mode == "fsdp" else Split(config, kind)
    made.pulse = pulse
    return made


# --- every process has the model ----------------------------------------------------------------------------------


class Ddp(Alone):
    """torch's DistributedDataParallel."""

    def __init__(self, config: Parallel, kind: str):
        self.mode, self.kind = config.mode, kind
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.share, self.shares = self.rank, self.world
        self.group: dist.ProcessGroup | None = None  # who has other parts of the batch; None: all
        self.evaluates = self.rank == 0

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        error = rest[0]
        if lost(error):
            text = "another process has ended; go on from the last checkpoint with --resume"
            raise Lost(text) from None
        if self.pulse is not None and error is None:
            self.any(False)  # none is behind, and would be missed by those that wait for it
            self.pulse.stop()
            self.any(
                False
            )  # none goes, and its store with it, before all have said that they are through
            dist.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        if not any(p.requires_grad for p in model.parameters()):
            return Inside(model)  # the optimiser says what is wrong
        self.inside = nn.parallel.DistributedDataParallel(
            Inside(model), find_unused_parameters=idle(model)
        )
        self.inside.register_comm_hook(None, lambda state, bucket: added(bucket))
        return self.inside

    def hold(self) -> AbstractContextManager[object]:
        return self.inside.no_sync()

    def total(self, number: Tensor) -> Tensor:
        number = number.clone()
        dist.all_reduce(number, group=self.group)
        return number

    def any(self, flag: bool) -> bool:
        said = torch.tensor(int(flag))
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return bool(said)

    def agree(self, value: T) -> T:
        text = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor(len(text))
        dist.broadcast(size, 0)
        told = torch.frombuffer(bytearray(text or int(size)), dtype=torch.uint8)
        dist.broadcast(told, 0)
        return value if self.rank == 0 else json.loads(told.numpy().tobytes())

    def once(self, act: Callable[[], T]) -> T:
        if self.rank:
            told: Any = self.agree(None)
            if "error" in told:
                raise UsageError(told["error"])
            return told["value"]
        try:
            value = act()
        except Exception as error:
            self.agree({"error": str(error)})
            raise
        self.agree({"value": value})
        return value

    def first(self, act: Callable[[], T]) -> T:
        mine: list[T] = []
        self.once(lambda: mine.append(act()))
        return mine[0] if mine else act()

    def device(self, device: torch.device | str) -> torch.device:
        if self.kind == "cuda":
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        return torch.device(device)


def lost(error: object) -> bool:
    """Whether a collective failed. Gloo's errors have no class of their own, but name the file of its source that they
    come from."""
    if isinstance(error, dist.DistError):
        return True
    return (
        type(error) is RuntimeError and re.search(r"\bgloo/\S+\.(cc|h):\d", str(error)) is not None
    )


def added(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Gradients summed over all processes. One by one: the order in which a number is summed then depends on its place
    in its tensor alone, not on how DDP packs them, which changes after the first step."""
    sums = [dist.all_reduce(g, async_op=True).get_future() for g in bucket.gradients()]
    return torch.futures.collect_all(sums).then(lambda _: bucket.buffer())


def idle(model: Any) -> bool:
    """Whether some parameters get no gradient, for which DDP would wait: a pooler beside a head, an indexer."""
    pooler = getattr(model, "pooler", None) is not None and model.head is not None
    return pooler or any(isinstance(m, SparseAttention) for m in model.modules())
