"""How the step is taken: which parameters decay, AdamW and Muon as one optimiser, clipping, accumulation, averages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from regard.attention.disentangled import DistanceVectors
from regard.config import (
    Amount,
    Choice,
    Count,
    Fraction,
    Part,
    Positive,
    Rule,
    Share,
    Whole,
    settings,
)
from regard.data.feed import Batch, Objective
from regard.errors import UsageError, nearest
from regard.layers import LabelHead, LMHead
from regard.models.adapt import chooses
from regard.models.embedding import PatchEmbedding, TokenEmbedding
from regard.position import PositionVectors, RelativeBias
from regard.training.objectives import table

# --- the learning rate over time ----------------------------------------------------------------------------------
#
# Pure functions of the step, so that resuming needs no state. Steps count 1, 2, ...; each function gives the factor by
# which the peak rate is multiplied.


SHAPES = ("noam", "cosine", "linear", "wsd", "constant")


class Steps(Rule):
    """So many steps, or below 1 their share of all steps."""

    def check(self, name: str, part: Part) -> None:
        value = part.values[name]
        if value != int(value) and not 0 < value < 1:
            give = "give whole steps, or a share below 1"
            raise UsageError(f"{part.path}.{name} = {value}: {give}")


StepsOrShare = Annotated[Amount, Steps()]


def noam(step: int, dim: int, warmup: int) -> float:
    """dim^-0.5 min(step^-0.5, step warmup^-1.5), the rate itself, largest at `warmup` (Vaswani et al. 2017, eq. 3)."""
    return dim**-0.5 * min(step**-0.5, step * warmup**-1.5)


@settings
class Schedule:
    """A linear warm-up to 1 over `warmup` steps, then a `shape` over the rest of `steps` (None: all steps of the
    training). The floor is reached after the last step, so that every step, the last one too, changes the weights.

    "noam": sqrt(warmup / step), the shape of 2017 with its peak at 1;  "cosine" and "linear": from 1 to `floor`;
    "wsd": 1, then linearly to `floor` over the last `decay` steps (Hu et al. 2024, arXiv:2404.06395);  "constant": 1.
    """

    shape: Annotated[str, Choice(SHAPES)] = "cosine"  # noam, cosine, linear, wsd or constant
    steps: Count | None = None  # its length; none: all steps of the training
    # steps of a linear rise to the peak; below 1: their share of all steps
    warmup: StepsOrShare = 0
    floor: Share = 0.0  # the last rate, as a share of the peak
    decay: Whole = 0  # the last steps of wsd, which fall

    def __post_init__(self) -> None:
        if self.steps is not None and 0 < self.warmup < 1:
            object.__setattr__(self, "warmup", max(round(self.warmup * self.steps), 1))
        if self.steps is not None and self.warmup > self.steps:
            raise UsageError(
                f"a schedule of {self.steps} steps cannot warm up for {self.warmup:g}; "
                f"give train.schedule.warmup from 0 to {self.steps}"
            )
        if self.shape == "noam" and not self.warmup:
            raise UsageError("the noam schedule falls from its warm-up: give warmup of at least 1")
        room = math.inf if self.steps is None else self.steps - self.warmup
        if (self.shape == "wsd") != (self.decay > 0) or self.decay > room:
            raise UsageError(
                f"schedule.decay is {self.decay}; the wsd schedule, and no other, needs it: "
                f"give 1 to steps - warmup{'' if self.steps is None else f' = {room}'}"
            )

    @property
    def ends(self) -> bool:
        """Whether it depends on its length."""
        return self.shape not in ("noam", "constant")

    def over(self, steps: int) -> Schedule:
        """The schedule of a training of so many steps."""
        return self if self.steps is not None else replace(self, steps=steps)

    def __call__(self, step: int) -> float:
        if step < 1:
            raise UsageError(f"steps count from 1, got {step}")
        if step < self.warmup:
            return step / self.warmup
        if not self.ends:
            return math.sqrt(self.warmup / step) if self.shape == "noam" else 1.0
        if self.steps is None:
            raise UsageError(f"the {self.shape} schedule needs its length: give steps")
        # From the last step at the peak to the one after the end, 0 to 1.
        peak = self.steps - self.decay if self.shape == "wsd" else max(self.warmup, 1)
        share = min(max(0.0, (step - peak) / (self.steps + 1 - peak)), 1.0)
        fallen = (1 - math.cos(math.pi * share)) / 2 if self.shape == "cosine" else share
        return 1 - (1 - self.floor) * fallen


# --- which parameter gets what ------------------------------------------------------------------------------------

_TABLES = (
    TokenEmbedding,
    PatchEmbedding,
    PositionVectors,
    RelativeBias,
    DistanceVectors,
    nn.Embedding,
)


def kinds(model: nn.Module) -> dict[str, str]:
    """Every trained parameter by name: "matrix", "table" or "vector".

    A table is looked up by row (embeddings, positions, types, class tokens, relative biases); a vector has one axis
    (norms, biases, sinks), or one per expert (their biases); all else multiplies: a matrix."""
    tables = {id(p) for m in model.modules() if isinstance(m, _TABLES) for p in m.parameters(False)}
    kinds = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            vector = p.dim() < 2 or name.endswith("_bias")
            kinds[name] = "vector" if vector else "table" if id(p) in tables else "matrix"
    return kinds


def decays(model: nn.Module) -> set[str]:
    """Names of the parameters that decay: matrices, and a table that is the head's matrix too. A row of any other table
    gets no gradient in most steps; decay alone would wear rare words away."""
    head = getattr(model, "head", None)
    shared = table(model) if isinstance(head, LMHead) and head.weight is None else None
    named = dict(model.named_parameters())
    return {n for n, kind in kinds(model).items() if kind == "matrix" or named[n] is shared}


def hidden(model: nn.Module) -> set[str]:
    """Names of the matrices between what a model reads and what it says, stacks of experts too. Jordan et al. take
    Muon for these alone: a row of an embedding or of the head belongs to one word, so there is no product whose
    directions could be evened out. Nor is there one in what chooses experts, in a gate of one row, in the taps of a
    convolution, which are a filter for each channel."""
    ends = [m for m in model.modules() if isinstance(m, (*_TABLES, LMHead, LabelHead))]
    outer = {id(p) for m in ends for p in m.parameters()}
    named = dict(model.named_parameters())

    def turns(name: str) -> bool:
        layer, _, last = name.rpartition(".")
        return not (last == "taps" or chooses(layer) or min(named[name].shape[-2:]) == 1)

    matrices = (n for n, kind in kinds(model).items() if kind == "matrix")
    return {n for n in matrices if id(named[n]) not in outer and turns(n)}


# --- the optimiser ------------------------------------------------------------------------------------------------

OPTIMIZERS = ("adamw", "muon")


@settings
class Optim:
    """AdamW (Loshchilov and Hutter 2019) for all; or Muon (Jordan et al. 2024) for `hidden` matrices and AdamW for the
    rest, at one rate: Muon's steps are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982)."""

    name: Annotated[str, Choice(OPTIMIZERS)] = "adamw"  # adamw or muon
    lr: Positive = 1e-3  # the peak learning rate
    decay: Amount = 0.1  # weight decay, of matrices alone
    betas: tuple[Fraction, ...] = (0.9, 0.95)  # AdamW's
    eps: Amount = 1e-8  # AdamW's
    momentum: Fraction = 0.95  # Muon's

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise UsageError(f"optim.betas = {self.betas}: give two numbers, such as 0.9, 0.95")


class Muon(torch.optim.Optimizer):
    """B <- mu B + (1 - mu) g;   W <- (1 - lr decay) W - 0.2 sqrt(max(a, b)) lr O,   O near U V^T of (1 - mu) g + mu B =
    U S V^T, by five steps of Newton and Schulz. W (a b), or a stack of such matrices (E a b), each for itself;
    torch.optim.Muon is the same, of single matrices alone."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float):
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, mu = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                mean = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - mu)
                turned = orthogonal(p.grad.lerp(mean, mu))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(turned, alpha=-0.2 * lr * max(p.shape[-2:]) ** 0.5)


def orthogonal(x: Tensor) -> Tensor:
    """About U V^T of x = U S V^T (... a b): an odd polynomial of x, five times, which takes every singular value into
    0.7 to 1.2. Its coefficients are those of Jordan et al."""
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    tall = x.shape[-2] > x.shape[-1]
    # On a GPU in bf16, which is enough; many CPUs have no such products.
    y = (x.mT if tall else x).to(torch.bfloat16 if x.is_cuda else torch.float32)
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = add(y, add(gram, gram, gram, beta=-4.7750, alpha=2.0315), y, beta=3.4445)
    return y.mT if tall else y


class Optimizer:
    """One object over AdamW and, if asked for, Muon. Its state is tensors by name and nothing else: no pickle.

    `ema`: a moving mean of the weights goes along, m <- d m + (1 - d) w after each step k, d = min(ema, (1 + k) /
    (10 + k)). Inside `averaged` the model has the mean's weights; saved there, the state has the weights of training.
    """

    def __init__(self, model: nn.Module, config: Optim, ema: float | None = None):
        self.config, self.ema = config, ema
        self.named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.means = {n: p.detach().clone() for n, p in self.named.items() if ema is not None}
        if not self.named:
            raise UsageError("nothing to train: every parameter is frozen")
        decayed = decays(model)
        turned = hidden(model) if config.name == "muon" else set()
        self.parts: list[torch.optim.Optimizer] = []
        if turned:
            self.parts.append(Muon(self._groups(turned, decayed), config.lr, config.momentum))
        if rest := self.named.keys() - turned:
            fused = all(self.named[n].device.type in ("cpu", "cuda") for n in rest)
            betas = (config.betas[0], config.betas[1])
            groups = self._groups(rest, decayed)
            self.parts.append(
                torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)
            )

    def _groups(self, names: Iterable[str], decayed: set[str]) -> list[dict[str, Any]]:
        names = [n for n in self.named if n in set(names)]  # in the model's order
        groups: dict[Any, list[nn.Parameter]] = {}
        for name in names:  # what is shared out, or among others, is stepped apart
            mesh = getattr(self.named[name], "device_mesh", None)
            groups.setdefault((name not in decayed, mesh), []).append(self.named[name])
        decay = {False: self.config.decay, True: 0.0}
        order = sorted(groups, key=lambda key: key[0])
        return [{"params": groups[key], "weight_decay": decay[key[0]]} for key in order]

    def step(self, factor: float = 1.0) -> None:
        """One step at lr times `factor`; parameters without a gradient stay, undecayed."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.config.lr * factor
            part.step()

    @torch.no_grad()
    def average(self, step: int) -> None:
        """Move the mean towards the weights of step k = 1, 2, ..."""
        if self.ema is not None:
            share = 1 - min(self.ema, (1 + step) / (10 + step))
            pairs = [(local(mean), local(self.named[n].detach())) for n, mean in self.means.items()]
            torch._foreach_lerp_([m for m, _ in pairs], [w for _, w in pairs], share)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, mean in self.means.items():
            weight = self.named[name].detach()
            kept = weight.clone()
            weight.copy_(mean)
            mean.copy_(kept)

    def zero(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """All there is to save, as "parameter:what" -> tensor: exp_avg, exp_avg_sq, step; momentum_buffer; mean, which
        inside `averaged` is the weight."""
        means = {f"{name}:mean": x for name, x in self.means.items()}
        return means | {
            f"{name}:{what}": x
            for name, parameter in self.named.items()
            for part in self.parts
            for what, x in part.state.get(parameter, {}).items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state()` of the same model and settings; anything else is refused."""
        parts = {id(p): part for part in self.parts for g in part.param_groups for p in g["params"]}
        keys: dict[str, dict[str, str]] = {}  # parameter -> what -> key of the state
        for name, parameter in self.named.items():
            muon = isinstance(parts[id(parameter)], Muon)
            whats = ("momentum_buffer",) if muon else ("exp_avg", "exp_avg_sq", "step")
            keys[name] = {what: f"{name}:{what}" for what in whats}
        for name, mean in self.means.items():
            if (key := f"{name}:mean") not in state:
                raise UsageError(
                    f"the state has no mean of {name!r}: it is of a run without train.ema"
                )
            mean.copy_(state[key])
        # The model was saved with the mean's weights.
        self._swap()
        state = {key: x for key, x in state.items() if not self.means or not key.endswith(":mean")}
        for key, x in state.items():
            name, _, what = key.rpartition(":")
            if name not in self.named:
                hint = nearest(name, self.named)
                raise UsageError(f"the optimiser's state is of another model: {name!r}; {hint}")
            shape = () if what == "step" else self.named[name].shape
            if what not in keys[name] or x.shape != shape:
                raise UsageError(
                    f"the optimiser's state does not fit: {key!r} of shape {tuple(x.shape)}; "
                    f"go on with the model and the optimiser that wrote it"
                )
        for name, parameter in self.named.items():
            part, device = parts[id(parameter)], parameter.device
            kept = {what: state[key] for what, key in keys[name].items() if key in state}
            if kept and len(kept) < len(keys[name]):
                raise UsageError(f"the optimiser's state of {name!r} is incomplete")
            part.state.pop(parameter, None)
            if kept:
                part.state[parameter] = {what: x.to(device, copy=True) for what, x in kept.items()}


# --- gradients ----------------------------------------------------------------------------------------------------


def accumulate(
    inside: Callable[..., tuple[Tensor, Tensor]],
    objective: Objective,
    batches: Sequence[Batch],
    hold: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[Tensor, Tensor]:
    """Add the gradient of the sum of losses over all batches to .grad -> (that sum, the count of labels).

    inside(objective, batch) is objective(model, batch). `clip` by the count of the whole step then gives the mean's
    gradient: any split of a batch gives the same. All batches but the last run in the context that `hold` makes."""
    losses, counts = [], []
    for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
        with hold() if left else nullcontext():
            loss, count = inside(objective, batch)
            loss.backward()
        losses.append(loss.detach())
        counts.append(count)
    return torch.stack(losses).sum(), torch.stack(counts).sum()


def clip(parameters: Iterable[Tensor], max_norm: float | None, count: Tensor | int = 1) -> Tensor:
    """Every gradient over `count`, in place (a step without a label leaves zeros) -> their length then, taken as one
    vector; if it is above `max_norm` they are multiplied by max_norm / (norm + 1e-6), as in torch, in the same pass.

    A length that is not finite is returned and nothing is changed: the caller must not take the step. Nothing here
    waits for a GPU."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    total = length(grads)
    factor = 1 / torch.as_tensor(count, device=total.device).clamp(min=1).to(total.dtype)
    norm = total * factor
    if max_norm is not None:
        factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local(g) for g in grads], torch.where(norm.isfinite(), factor, 1.0))
    return norm


def local(x: Tensor) -> Tensor:
    """This process's part of what is shared out among several (a DTensor)."""
    if type(x) is Tensor:
        return x
    from torch.distributed.tensor import DTensor  # slow to import

    return x.to_local() if isinstance(x, DTensor) else x


def length(grads: list[Tensor]) -> Tensor:
    """Of all gradients as one vector, parts that other processes have included: the same number in all."""
    if all(type(g) is Tensor for g in grads):
        return torch.nn.utils.get_total_norm(grads)
    from torch.distributed.tensor import DTensor

    lying: dict[Any, list[Tensor]] = {None: []}
    for g in grads:
        where = None
        if isinstance(g, DTensor):
            where = g.device_mesh, tuple(p.is_replicate() for p in g.placements)
        lying.setdefault(where, []).append(local(g))
    total = torch.zeros((), dtype=torch.float64, device=local(grads[0]).device)
    for where, parts in lying.items():
        square = torch.nn.utils.get_total_norm(parts).double() ** 2
        for axis, everywhere in enumerate(where[1] if where else ()):
            if not everywhere:
                torch.distributed.all_reduce(square, group=where[0].get_group(axis))
        total += square
    return total.sqrt().float()
