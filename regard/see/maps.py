"""What attention maps say, in numbers: plain formulas over the weights (b h t s) that a probe
gives.

A row is what one query does. Where a sink takes a part of it, the rest is scaled up to 1 first; a
row that sees nothing has no entropy and no distance, and is left out of means. Queries are taken to
be the last t of the s keys, which lie in the order of their positions: so they are in
self-attention, with a contiguous or paged cache or without."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import UsageError


def entropy(a: Tensor) -> Tensor:
    """-sum_s a_s log2 a_s of every row, in bits: 0 where one key has it all, log2 n where n keys
    share it evenly. a (... t s) -> (... t), nan where a row is empty."""
    return torch.special.entr(_rows(a)).sum(-1) / math.log(2)


def distance(a: Tensor) -> Tensor:
    """sum_s a_ts |position of t - s|: how many tokens away a row looks, on average. a (... t s) ->
    (... t)."""
    t, s = a.shape[-2:]
    q, k = torch.arange(s - t, s, device=a.device), torch.arange(s, device=a.device)
    return (_rows(a) * (q[:, None] - k).abs()).sum(-1)


def rollout(layers: Sequence[Tensor], residual: float = 0.5) -> Tensor:
    """How much of each input token is in each output token (Abnar and Zuidema 2020,
    arXiv:2005.00928, eq. 1):

    R_0 = I,   R_l = (r I + (1 - r) A_l) R_{l-1},   A_l the mean of a layer's heads, r the share of
    the residual stream. Layers (b h t t) from the lowest up -> (b t t), rows sum to 1."""
    if not layers or any(a.shape[-1] != a.shape[-2] for a in layers):
        raise UsageError(
            "rollout needs the whole self-attention of every layer, (b h t t); "
            "probe all rows of one forward"
        )
    _alike(layers, "rollout")
    size = layers[0].shape[-1]
    eye = torch.eye(size, dtype=layers[0].dtype, device=layers[0].device)
    total = eye.expand(len(layers[0]), size, size)
    for a in layers:
        mixed = residual * eye + (1 - residual) * _rows(a.mean(1)).nan_to_num(0.0)
        total = _rows(mixed) @ total
    return total


def average(layers: Sequence[Tensor]) -> Tensor:
    """The mean over heads and layers, all layers counting the same: (b h t s) each -> (b t s)."""
    if not layers:
        raise UsageError("there is no map to average; probe at least one layer")
    _alike(layers, "an average")
    return torch.stack([a.mean(1) for a in layers]).mean(0)


def thumbnail(size: int = 64) -> Callable[[Tensor], Tensor]:
    """A small picture of a map, for Probe(reduce=thumbnail()): the largest weight of each of at
    most size x size fields. The mean would wash out a line one token wide."""

    return lambda a: F.adaptive_max_pool2d(a, [min(size, n) for n in a.shape[-2:]])


# --- alignment ----------------------------------------------------------------------------------


class Link(NamedTuple):
    """Target word `target` reads source word `source` with so much weight; `best`: no other with
    more."""

    source: int
    target: int
    weight: float
    best: bool


def cross(maps: Mapping[str, Sequence[Tensor]]) -> dict[str, Sequence[Tensor]]:
    """The maps between target and source."""
    chosen = {site: calls for site, calls in maps.items() if site.endswith(".cross")}
    if not chosen:
        raise UsageError(
            f"alignment needs a model with cross-attention, an encoder-decoder; this one has "
            f"{', '.join(maps) or 'no attention'}"
        )
    return chosen


def best(a: Tensor) -> Tensor:
    """The source token that each target token weighs most, the first of equals: (... t s) -> (...
    t); -1 where a row is empty."""
    top, at = a.max(-1)
    return torch.where(top > 0, at, -1)


def links(a: Tensor, least: float | None = None) -> list[Link]:
    """Which source belongs to which target, (t s): the best one of each target, and all that weigh
    at least `least`."""
    if least is not None and not 0 < least <= 1:
        raise UsageError(f"least={least} must be a weight above 0 and at most 1; such as 0.2")
    top = best(a)[:, None] == torch.arange(a.shape[-1], device=a.device)
    strong = top if least is None else top | (a >= least)
    return [Link(s, t, float(a[t, s]), bool(top[t, s])) for t, s in strong.nonzero().tolist()]


# --- every head in a line -----------------------------------------------------------------------


class Head(NamedTuple):
    """Means over all rows of one head. `own`, `before` and `first` are shares of weight: on the
    token itself, on the one before, on the first key. Between two texts `distance`, `own` and
    `before` mean nothing and are nan."""

    site: str
    head: int
    entropy: float  # bits
    distance: float  # tokens
    largest: float  # the largest weight of a row
    own: float
    before: float
    first: float


def summary(maps: Mapping[str, Sequence[Tensor]], heads: Sequence[int] | None = None) -> list[Head]:
    """One line for each head of each place, over every call. `heads` names them if the probe chose
    some."""
    table = []
    for site, calls in maps.items():
        if not calls:
            continue
        rows = torch.cat([_figures(a, site.endswith(".cross")) for a in calls], 1)  # h n 6
        real = rows[..., :1].isfinite()
        count = real.sum(1).clamp(min=1)
        means = rows.masked_fill(~real, 0.0).sum(1) / count
        names = range(len(means)) if heads is None else heads
        table += [Head(site, i, *m.tolist()) for i, m in zip(names, means, strict=True)]
    return table


def _figures(a: Tensor, cross: bool) -> Tensor:
    """The numbers of a `Head` for every row, batch and queries in one: (b h t s) -> (h bt 6)."""
    p = _rows(a)
    none = p.new_full(p.shape[:3], torch.nan)
    away, own, before = (none,) * 3 if cross else (distance(a), _back(p, 0), _back(p, 1))
    figures = (entropy(a), away, p.amax(-1), own, before, p[..., 0])
    return torch.stack(figures, -1).transpose(0, 1).flatten(1, 2)


def _back(p: Tensor, steps: int) -> Tensor:
    """Weight on the key this many positions before the query's own, 0 where there is none: (... t
    s) -> (... t)."""
    t, s = p.shape[-2:]
    rows = torch.arange(t, device=p.device)
    keys = rows + s - t - steps
    return p[..., rows, keys.clamp(min=0)] * (keys >= 0)


def _alike(layers: Sequence[Tensor], what: str) -> None:
    sizes = {(len(a), *a.shape[-2:]) for a in layers}
    if len(sizes) > 1:
        raise UsageError(
            f"{what} needs layers that read the same tokens, got maps of {len(sizes)} sizes; "
            "give one tower's at a time"
        )


def _rows(a: Tensor) -> Tensor:
    """Rows scaled to sum to 1; nan where there is nothing to scale."""
    a = a if a.dtype == torch.float64 else a.float()
    total = a.sum(-1, keepdim=True)
    return a / total.masked_fill(total == 0, torch.nan)
