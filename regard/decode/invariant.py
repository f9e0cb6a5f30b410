"""The same bits for a request, whoever its neighbours are.

What makes a row's numbers depend on the batch, and what is done here:
- matrix products choose their kernel by the number of rows: they are always made with a number of rows from one class
  whose kernels agree, found by trying on this processor, torch and number of threads;
- fused attention sums in an order that depends on lengths and chunks: the `ordered` backend has fixed tiles;
- exp, tanh, cos and sin round differently in the last few elements of a tensor: activations work on padded tensors,
  cos and sin of positions come from a table of fixed size;
- MLA has two forms: it is always expanded.
Norms, softmax and argmax work row by row already.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.latent import LatentAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.select import SparseAttention
from regard.config import UsageError
from regard.layers import FeedForward, LMHead
from regard.models import Model
from regard.moe import MixtureOfExperts
from regard.position import PositionVectors, Rope, Sinusoidal

CLASSES = ((16, 128), (16, 64), (16, 32), (32, 32))  # widest first; the last is one fixed size
SHORT = CLASSES[2:]  # of bfloat16: wider ones differ in so few rows that a trial may miss them
LONGEST = 1 << 17
_found: dict[tuple, tuple[int, int]] = {}


def invariant(model: Model) -> Model:
    """A model that shares its weights with this one and gives every row the same bits in any batch. Use it with
    backend="ordered"; `generate(..., invariant=True)` does both."""
    new = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    size = getattr(model.config, "max_len", None) or LONGEST
    for module in list(new.modules()):
        if isinstance(module, MixtureOfExperts | SparseAttention | nn.RNNBase):
            raise UsageError(
                f"no invariant mode for {type(module).__name__} yet: its products have as many rows as "
                "the tokens happen to need; leave invariant out"
            )
        if isinstance(module, LatentAttention):
            module.mix = module.expanded  # type: ignore[method-assign]
        if isinstance(module, LMHead):
            module.project = RowClass()
        if isinstance(module, FeedForward | LMHead) and module.act is not None:
            module.act = SteadyActivation(module.act)
        if (
            isinstance(module, GroupedQueryAttention | LatentAttention)
            and module.config.rope is not None
        ):
            rope = Table(**vars(module.config.rope), size=size)
            module.config = dataclasses.replace(module.config, rope=rope)
        if isinstance(module, PositionVectors) and isinstance(module.config, Sinusoidal):
            table = module(torch.arange(min(size, module.config.max_len))[None])[0]
            module.forward = partial(_look_up, table)  # type: ignore[method-assign]
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, SteadyLinear(child))
    return new.eval()


def _look_up(table: Tensor, pos: Tensor, ids: Tensor | None = None) -> Tensor:
    return table[pos.clamp(min=0)]


@dataclasses.dataclass(frozen=True)
class Table(Rope):
    """RoPE whose cosines and sines are looked up."""

    size: int = LONGEST

    def angles(self, pos: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = _table(self, dim, dtype)
        at = pos.clamp(min=0)
        return cos[at], sin[at]


@functools.cache
def _table(rope: Table, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return Rope.angles(rope, torch.arange(rope.size), dim, dtype)


class SteadyActivation:
    """An activation on a tensor padded to a multiple of 1024 elements: then no element is in a tail."""

    def __init__(self, act: Callable[[Tensor], Tensor]):
        self.act = act

    def __call__(self, x: Tensor) -> Tensor:
        flat = F.pad(x.reshape(-1), (0, -x.numel() % 1024))
        return self.act(flat)[: x.numel()].view(x.shape)


class SteadyLinear(nn.Module):
    """y = x W^T + b with the same bits for a row in any company."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.rows = RowClass()

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x, self.weight, self.bias)


class RowClass:
    """F.linear in pieces whose number of rows lies in the class that the weight's shape was found to have."""

    def __init__(self) -> None:
        self.sizes: tuple[int, int] | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low, high = self.sizes = self.sizes or find_class(weight, bias)
        flat = x.reshape(-1, x.shape[-1])
        parts = []
        for rows in flat.split(high):
            short = max(0, low - len(rows))
            y = F.linear(F.pad(rows, (0, 0, 0, short)) if short else rows, weight, bias)
            parts.append(y[: len(rows)] if short else y)
        return torch.cat(parts).view(*x.shape[:-1], -1)


def find_class(weight: Tensor, bias: Tensor | None) -> tuple[int, int]:
    """The widest range of row counts in which this product gives a row the same bits, found by trying it."""
    key = (tuple(weight.shape), weight.dtype, bias is not None, torch.get_num_threads())
    if key not in _found:
        classes = SHORT if weight.dtype == torch.bfloat16 else CLASSES
        _found[key] = next((c for c in classes if _agrees(weight, bias, *c)), CLASSES[-1])
    return _found[key]


def _agrees(weight: Tensor, bias: Tensor | None, low: int, high: int) -> bool:
    x = torch.randn(high, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    whole = F.linear(x, weight, bias)
    powers = {n + d for n in (16, 32, 64, 128) for d in (-1, 0, 1)}
    trials = {n for n in (*range(low, high, 7), *powers) if low <= n <= high}
    return all(torch.equal(F.linear(x[:n], weight, bias), whole[:n]) for n in sorted(trials))
