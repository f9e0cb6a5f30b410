"""Numbers of attention maps as pictures need them: tiles of every head, links between words, what a selection keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.sparse import choose
from regard.errors import UsageError

Maps = Tensor | Sequence[Tensor]  # (layers heads rows keys), or a layer each: (heads rows keys)


def layered(maps: Maps) -> list[Tensor]:
    """One (heads rows keys) for each layer, in float64 on the CPU. Layers may differ in heads, rows and keys; a batch
    axis of size 1 in front, as a probe gives it, is taken off."""
    found = []
    for layer in maps:
        layer = torch.as_tensor(layer).detach().to("cpu", torch.float64)
        if layer.dim() == 4 and len(layer) > 1:
            raise UsageError(f"maps of a batch of {len(layer)}; choose one row, such as maps[0]")
        layer = layer[0] if layer.dim() == 4 else layer
        if layer.dim() != 3 or not layer.numel():
            raise UsageError(
                f"a layer's map has the shape {tuple(layer.shape)}; it must be (heads, rows, keys), none of them 0"
            )
        found.append(layer)
    if not found:
        raise UsageError("there are no maps to draw; ask the probe for at least one layer")
    return found


def single(weights: Tensor) -> Tensor:
    """One head's map (rows keys), in float64 on the CPU."""
    weights = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    if weights.dim() != 2 or not weights.numel():
        raise UsageError(
            f"one head's map is (rows, keys), none of them 0; got the shape {tuple(weights.shape)}; "
            "choose a layer and a head, or average the heads"
        )
    return weights


def pooled(weights: Tensor, most: int = 96) -> Tensor:
    """The map with at most `most` rows and keys, each cell the largest of those it stands for: peaks stay."""
    rows, keys = (min(n, most) for n in weights.shape[-2:])
    if (rows, keys) == weights.shape[-2:]:
        return weights
    return F.adaptive_max_pool2d(weights[None], (rows, keys))[0]


# --- alignment ----------------------------------------------------------------------------------------------------


class Link(NamedTuple):
    """Target word `target` looks at source word `source` with so much weight; `best`: at no other more."""

    target: int
    source: int
    weight: float
    best: bool


def links(weights: Tensor, least: float = 0.2) -> list[Link]:
    """The strongest source of every target, the earlier of equals, and others of at least `least`, by target.

    weights (targets sources). A target that looks at nothing has no link."""
    if not 0 < least <= 1:
        raise UsageError(f"least={least} must be a weight above 0 and at most 1; such as 0.2")
    found = []
    for target, row in enumerate(single(weights).tolist()):
        best = row.index(max(row))
        found += [
            Link(target, source, weight, source == best)
            for source, weight in enumerate(row)
            if weight > 0 and (source == best or weight >= least)
        ]
    return found


# --- DSA ----------------------------------------------------------------------------------------------------------


class Selection(NamedTuple):
    """One query's choice among s keys: index scores (s), -inf where hidden; which are chosen (s); the weights that
    dense attention would give (s), a mean over heads; and the share of them that the choice keeps."""

    scores: Tensor
    chosen: Tensor
    weights: Tensor
    kept: float

    @property
    def read(self) -> int:
        return int(self.chosen.sum())

    @property
    def visible(self) -> int:
        return int((self.scores > -torch.inf).sum())


def selection(scores: Tensor, weights: Tensor, topk: int) -> Selection:
    """What the indexer's `topk` best keep of dense attention. scores (s), weights (s) or (heads s).

    Ties go to the earliest key, hidden keys (-inf) are never chosen, and topk >= s keeps everything."""
    scores, weights = (
        torch.as_tensor(x).detach().to("cpu", torch.float64) for x in (scores, weights)
    )
    weights = weights.mean(0) if weights.dim() == 2 else weights
    if scores.dim() != 1 or scores.shape != weights.shape or not len(scores):
        raise UsageError(
            f"a selection is one query's: scores (keys) and weights (keys) or (heads, keys); "
            f"got {tuple(scores.shape)} and {tuple(weights.shape)}"
        )
    if topk < 1:
        raise UsageError(f"topk={topk} must be 1 or more: attention reads at least one key")
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen[choose(scores, min(topk, len(scores)))] = True
    chosen &= scores > -torch.inf
    total = weights.sum().item()
    return Selection(
        scores, chosen, weights, weights[chosen].sum().item() / total if total else 0.0
    )
