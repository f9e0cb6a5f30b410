"""Numbers of positions: tables of vectors, how alike they are, RoPE's clocks, and how scores fall with distance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import UsageError
from regard.position import Rope, alibi_slopes, rotate, sinusoid


class Table(NamedTuple):
    """A vector for each position (p m), and the cosine of every two (p p)."""

    vectors: Tensor
    alike: Tensor


def sinusoidal_table(
    positions: int, dim: int, base: float = 10000.0, layout: str = "interleaved"
) -> Table:
    """The sinusoids of positions 0, 1, ...; their likeness depends on the distance alone."""
    return learned_table(sinusoid(torch.arange(positions), dim, base, layout))


def learned_table(vectors: Tensor) -> Table:
    """Position vectors (p m) that a model has learned, such as `model.embedding.position.weight`."""
    vectors = torch.as_tensor(vectors).detach().to("cpu", torch.float64)
    if vectors.dim() != 2 or not vectors.numel():
        raise UsageError(
            f"position vectors are (positions, features), none of them 0; got {tuple(vectors.shape)}"
        )
    unit = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    return Table(vectors, unit @ unit.T)


class Clocks(NamedTuple):
    """RoPE's pairs as hands of clocks: the angle of each at each position (p pairs), in [0, 2 pi), and after how many
    tokens each pair has turned once (pairs)."""

    positions: list[int]
    pairs: list[int]
    angles: Tensor
    wavelengths: Tensor


def rope_clocks(rope: Rope, dim: int, positions: list[int], pairs: list[int]) -> Clocks:
    """Angles p w_i of chosen pairs i at chosen positions p of a head of width `dim`."""
    freq = rope.frequencies(dim, torch.float64)
    wrong = [i for i in pairs if not 0 <= i < len(freq)]
    if wrong or not pairs or not positions:
        raise UsageError(
            f"rope clocks: pairs {pairs} at positions {positions}; "
            f"give at least one of each, pairs from 0 to {len(freq) - 1}"
        )
    freq = freq[pairs]
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * freq
    return Clocks(positions, pairs, angles.remainder(2 * math.pi), 2 * math.pi / freq)


class Distances(NamedTuple):
    """Scores by distance 0, 1, ... (n): as shares of the score at distance 0, and as what is added to the score."""

    distances: Tensor
    shares: dict[str, Tensor]
    added: dict[str, Tensor]


def rope_score(rope: Rope, dim: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """q.k / |q|^2 where query and key are the same vector of ones before they turn, at positions (n) and (n): (n)."""
    ones = torch.ones(1, len(q_pos), 1, dim, dtype=torch.float64)  # b t h d
    q, k = (
        rotate(ones, *rope.angles(pos[None], dim, torch.float64), rope.layout)
        for pos in (q_pos, k_pos)
    )
    return ((q * k).sum(-1) / (ones * ones).sum(-1)).flatten()


def distance_scores(ropes: Mapping[str, Rope], dim: int, length: int, alibi: int = 0) -> Distances:
    """What is left of a score when a key is d tokens away, d < length, for each RoPE; and for `alibi` heads what ALiBi
    takes away, head by head."""
    if length < 2:
        raise UsageError(f"length={length} must be 2 or more: there is no distance in one token")
    far = torch.arange(length)
    shares = {
        name: rope_score(rope, dim, far, torch.zeros_like(far)) for name, rope in ropes.items()
    }
    slopes = alibi_slopes(alibi).double() if alibi else torch.zeros(0)
    added = {f"head {i}": -slope * far for i, slope in enumerate(slopes)}
    return Distances(far, shares, added)
