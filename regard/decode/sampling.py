"""The choice of the next token. Filters take logits and give logits, -inf for what may not be chosen, so they chain in
any order and the softmax at the end renormalises. Equal logits go to the lowest id."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.config import UsageError


def greedy(logits: Tensor) -> Tensor:
    """argmax_v logits_v (... V) -> (...); of equal ones the lowest id."""
    return logits.argmax(-1)


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k largest."""
    if k < 1:
        raise UsageError(f"top_k={k} would leave no token; give 1 or more")
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return _only(logits, order, torch.arange(logits.shape[-1], device=logits.device) < k)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass is >= p, one at least (Holtzman et al. 2020)."""
    if not 0 <= p <= 1:
        raise UsageError(f"top_p={p} is no probability; give a number from 0 to 1")
    if p == 1:  # rounding must not cost the tail
        return logits
    order = logits.argsort(dim=-1, descending=True, stable=True)
    probs = logits.softmax(-1).gather(-1, order)
    before = F.pad(probs.cumsum(-1)[..., :-1], (1, 0))  # the mass of the tokens above
    keep = before < p
    keep[..., 0] = True
    return _only(logits, order, keep)


def _only(logits: Tensor, order: Tensor, keep: Tensor) -> Tensor:
    """`keep` speaks of ranks; `order` (... V) lists the ids by rank."""
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, keep.expand_as(order))
    return logits.masked_fill(~kept, -torch.inf)


def beam_search(
    step: Callable[[tuple[int, ...]], Tensor], width: int, max_len: int, end: int | None = None
) -> list[tuple[tuple[int, ...], float]]:
    """The `width` best sequences found and their log probabilities, best first. `step(prefix)` gives logits (V).

    Each round continues every beam by its `width` best tokens and keeps the `width` best of all; a beam that said `end`
    stays as it is. width = 1 is greedy. No length penalty."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(max_len):
        grown = []
        for ids, total in beams:
            if ids and ids[-1] == end:
                grown.append((ids, total))
                continue
            log_p = step(ids).log_softmax(-1)
            best = log_p.argsort(stable=True, descending=True)[:width].tolist()
            grown += [((*ids, i), total + log_p[i].item()) for i in best]
        possible = [beam for beam in grown if beam[1] > -torch.inf]
        beams = sorted(possible, key=lambda beam: -beam[1])[:width]
        if all(ids[-1] == end for ids, _ in beams):
            break
    return beams
