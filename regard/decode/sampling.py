"""The choice of the next token. Filters take logits and give logits, -inf for what may not be chosen, so they chain
and the softmax at the end renormalises. Equal logits go to the lowest id. Settings are per row: numbers or columns
(n 1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import UsageError


def greedy(logits: Tensor) -> Tensor:
    """argmax_v logits_v (... V) -> (...); of equal ones the lowest id."""
    return logits.argmax(-1)


def top_k(logits: Tensor, k: int | Tensor) -> Tensor:
    """Keep the k largest (0 keeps all)."""
    if isinstance(k, int) and k < 1:
        raise UsageError(f"top_k={k} would leave no token; give 1 or more")
    order = logits.argsort(dim=-1, descending=True, stable=True)
    k = torch.where(k > 0, k, logits.shape[-1]) if isinstance(k, Tensor) else k
    return _only(logits, order, torch.arange(logits.shape[-1], device=logits.device) < k)


def top_p(logits: Tensor, p: float | Tensor) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass is >= p, one at least (Holtzman et al. 2020)."""
    if isinstance(p, float | int) and not 0 <= p <= 1:
        raise UsageError(f"top_p={p} is no probability; give a number from 0 to 1")
    order = logits.argsort(dim=-1, descending=True, stable=True)
    probs = logits.softmax(-1).gather(-1, order)
    # 1 keeps the tail.
    keep = (_before(probs) < p) | (torch.as_tensor(p, device=logits.device) >= 1)
    keep[..., 0] = True
    return _only(logits, order, keep)


def min_p(logits: Tensor, p: float | Tensor) -> Tensor:
    """Keep what is at least p times as probable as the most probable token."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -torch.inf)


def typical_p(logits: Tensor, p: float | Tensor) -> Tensor:
    """Keep the tokens whose surprise is nearest to the entropy, up to mass p (Meister et al. 2023)."""
    log_p = logits.log_softmax(-1)
    probs = log_p.exp()
    entropy = -(probs * log_p).nan_to_num(0.0).sum(-1, keepdim=True)
    order = (-log_p - entropy).abs().argsort(dim=-1, stable=True)
    keep = (_before(probs.gather(-1, order)) < p) | (torch.as_tensor(p, device=logits.device) >= 1)
    keep[..., 0] = True
    return _only(logits, order, keep)


def repeat(logits: Tensor, counts: Tensor, times: Tensor | float) -> Tensor:
    """Divide positive logits of tokens already seen by `times`, multiply negative ones (Keskar et al. 2019)."""
    return torch.where(counts > 0, torch.where(logits > 0, logits / times, logits * times), logits)


def draw(logits: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulative probability passes u in [0, 1): (n V), (n) -> (n)."""
    mass = logits.double().softmax(-1).cumsum(-1)
    at = torch.searchsorted(mass, (u.double() * mass[:, -1])[:, None], right=True)[:, 0]
    return at.clamp(max=logits.shape[-1] - 1)


def uniform(seed: Tensor, request: Tensor, position: Tensor) -> Tensor:
    """A number in [0, 1) for each (seed, request, position), all int64: the splitmix64 counter, so that a request's
    random numbers do not depend on its neighbours, on the batch or on the device."""
    x = _mix(_mix(_mix(seed) ^ request) ^ position)
    return (x >> 11).bitwise_and((1 << 53) - 1).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser; int64 multiplication wraps, and the shifts are made logical by masks."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _before(probs: Tensor) -> Tensor:
    """The mass of the tokens in front of each."""
    return F.pad(probs.cumsum(-1)[..., :-1], (1, 0))


def _only(logits: Tensor, order: Tensor, keep: Tensor) -> Tensor:
    """`keep` speaks of ranks; `order` (... V) lists the ids by rank."""
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, keep.expand_as(order))
    return logits.masked_fill(~kept, -torch.inf)


def beam_search(
    step: Callable[[tuple[int, ...]], Tensor], width: int, max_len: int, end: int | None = None
) -> list[tuple[tuple[int, ...], float]]:
    """The `width` best sequences found and their log probabilities, best first. `step(prefix)` gives logits (V).

    Each round continues every beam by its `width` best tokens and keeps the `width` best of all; a beam that said `end`
    stays as it is. width = 1 is greedy. No length penalty: this is the plain form that beam.py is held against."""
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
