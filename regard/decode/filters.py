"""The sampling filters: which tokens may be drawn. A filter is one record of FILTERS.

    FILTERS["my_filter"] = Filter(keep, (0.0, 1.0), neutral=1.0)

after which `regard.generate(..., my_filter=0.5)` and `Settings(filters=(("my_filter", 0.5),))` take it in every runner:
by its plain form, or where it has one by its form in C (kernels/c/draw.c) or Triton (kernels/triton/draw.py).

A filter takes logits and gives logits, -inf for what may not be chosen, so filters chain, in the order of the table,
and the softmax at the end renormalises. Its value is that of each row: a number or a column (n 1). Equal logits go to
the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regard.errors import UsageError

# torch is imported when a filter runs: flags are read off this table, and help does not wait for torch.
if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Filter:
    """`keep(logits, value)`, whose docstring is the help of its flag; the range of its value, and the value that keeps
    all. `fast`: where it has a form of its own, "c" or "triton"."""

    keep: Callable[[Tensor, Tensor], Tensor]
    limits: tuple[float, float]
    neutral: float
    fast: frozenset[str] = frozenset()


def top_k(logits: Tensor, k: int | Tensor) -> Tensor:
    """Keep the k largest. In a column, as settings come, 0 keeps all; a number below 1 is an error."""
    if isinstance(k, int) and k < 1:
        raise UsageError(f"top_k={k} would leave no token; give 1 or more")
    order = logits.argsort(dim=-1, descending=True, stable=True)
    k = k if isinstance(k, int | float) else k.where(k > 0, logits.shape[-1])
    return _only(logits, order, _ranks(logits) < k)


def top_p(logits: Tensor, p: float | Tensor) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass is >= p, one at least (Holtzman et al. 2020)."""
    if isinstance(p, float | int) and not 0 <= p <= 1:
        raise UsageError(f"top_p={p} is no probability; give a number from 0 to 1")
    order = logits.argsort(dim=-1, descending=True, stable=True)
    probs = logits.softmax(-1).gather(-1, order)
    # 1 keeps the tail.
    keep = (_before(probs) < p) | (p >= 1)
    keep[..., 0] = True
    return _only(logits, order, keep)


def min_p(logits: Tensor, p: float | Tensor) -> Tensor:
    """Keep what is at least p times as probable as the most probable token."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -math.inf)


def _ranks(logits: Tensor) -> Tensor:
    import torch

    return torch.arange(logits.shape[-1], device=logits.device)


def _before(probs: Tensor) -> Tensor:
    """The mass of the tokens in front of each."""
    from torch.nn.functional import pad

    return pad(probs.cumsum(-1)[..., :-1], (1, 0))


def _only(logits: Tensor, order: Tensor, keep: Tensor) -> Tensor:
    """`keep` speaks of ranks; `order` (... V) lists the ids by rank."""
    import torch

    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, keep.expand_as(order))
    return logits.masked_fill(~kept, -math.inf)


EVERYWHERE = frozenset({"c", "triton"})
FILTERS: dict[str, Filter] = {
    "top_k": Filter(top_k, (0, 10_000_000), 0, EVERYWHERE),
    "top_p": Filter(top_p, (0.0, 1.0), 1.0, EVERYWHERE),
    "min_p": Filter(min_p, (0.0, 1.0), 0.0, EVERYWHERE),
}


def has_form(names: set[str], target: str) -> bool:
    """Whether all of these filters have a form of their own there."""
    return all(target in FILTERS[name].fast for name in names)
