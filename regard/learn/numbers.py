"""The numbers behind the mechanisms: why scores are scaled, when a softmax stops learning, what a cache costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from regard.attention import DSA, GQA, MLA, softmax
from regard.attention.latent import LatentAttention
from regard.attention.pooling import one_loop
from regard.errors import UsageError

# --- softmax and the size of its scores ---------------------------------------------------------------------------


def softmax_jacobian(x: Tensor) -> Tensor:
    """d p_i / d x_j = p_i (1[i=j] - p_j), p = softmax(x).   (... n) -> (... n n). It vanishes as p saturates."""
    p = softmax(x)
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


def saturation(a: Tensor) -> Tensor:
    """The largest weight of softmax([a, a, 2a]) = 1 / (1 + 2 exp(-a)); exp(2a) itself would overflow."""
    return 1 / (1 + 2 * torch.exp(-a))


class Saturation(NamedTuple):
    """softmax([a, a, 2a]) for each a (n): its weights (n 3) and Jacobians (n 3 3)."""

    a: Tensor
    weights: Tensor
    jacobians: Tensor

    @property
    def steepest(self) -> Tensor:
        """The largest entry of each Jacobian (n): no score can move a weight faster."""
        return self.jacobians.abs().amax((-1, -2))


def saturations(a: Tensor) -> Saturation:
    """What a larger and larger a does to softmax([a, a, 2a]) and to its gradient."""
    x = torch.stack([a, a, 2 * a], -1)
    return Saturation(a, softmax(x), softmax_jacobian(x))


def dot_moments(dim: int, scale: float = 1.0, *, same: bool = False) -> tuple[float, float]:
    """Mean and variance of scale q.k over all q, k in {-1, +1}^dim, independent: 0 and scale^2 dim.

    So scale = dim^-0.5 keeps the variance 1. With `same`, k is q: independence is what makes the mean 0."""
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=dim)), dtype=torch.float64)
    dots = scale * (signs.square().sum(-1) if same else signs @ signs.T)
    return dots.mean().item(), dots.var(correction=0).item()


def dot_chances(dim: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """All values of scale q.k with q, k in {-1, +1}^dim, ascending, and how likely each is: (dim + 1), (dim + 1).

    j of the dim products are +1 in C(dim, j) of 2^dim cases, so this is exact for widths no table could list."""
    count = torch.tensor([math.comb(dim, j) / 2**dim for j in range(dim + 1)], dtype=torch.float64)
    return scale * (2.0 * torch.arange(dim + 1, dtype=torch.float64) - dim), count


class Spread(NamedTuple):
    """The variance of q.k and of q.k / sqrt(d) for each width d (n), and the chances of both by width."""

    dims: list[int]
    plain: list[float]
    scaled: list[float]
    chances: dict[int, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]  # (plain, scaled)


def dot_spread(dims: Sequence[int]) -> Spread:
    """How far scores spread as heads get wider, with and without the scale."""
    if not dims or min(dims) < 1:
        raise UsageError(f"dims={list(dims)} must be widths of 1 and more; such as [4, 16, 64]")
    chances = {d: (dot_chances(d), dot_chances(d, d**-0.5)) for d in dims}
    plain, scaled = ([_variance(*chances[d][i]) for d in dims] for i in (0, 1))
    return Spread(list(dims), plain, scaled, chances)


def _variance(values: Tensor, chance: Tensor) -> float:
    mean = (chance * values).sum()
    return (chance * (values - mean).square()).sum().item()


# --- one pass -----------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """Online attention over logits x (s) and values (s): after each key the maximum m, the sum d, the output o (s),
    and by what the old sum was multiplied, e^(m_old - m_new); the first has none to multiply: 0."""

    x: Tensor
    values: Tensor
    m: Tensor
    d: Tensor
    o: Tensor
    shrink: Tensor


def online_pass(x: Tensor, values: Tensor) -> Pass:
    """Softmax attention of one query, key by key, to values of width 1; the last o is softmax(x) . values."""
    if x.dim() != 1 or x.shape != values.shape or not len(x):
        raise UsageError(
            f"online softmax needs a row of logits and as many values; "
            f"got shapes {tuple(x.shape)} and {tuple(values.shape)}"
        )
    x, values = x.double(), values.double()
    steps = one_loop(x, values[:, None])[1]
    m, d = (x.new_tensor([step[i] for step in steps]) for i in (0, 1))
    o = torch.cat([step.o for step in steps if step.o is not None])
    before = torch.cat([x.new_tensor([-math.inf]), m[:-1]])
    return Pass(x, values, m, d, o, torch.exp(before - m))


# --- what a layer keeps and works ---------------------------------------------------------------------------------


def cache_numbers(attention: GQA | MLA | DSA, dim: int) -> int:
    """Numbers that one token leaves in one layer's cache: GQA g (d + e), MLA c + r, DSA the same and D."""
    with torch.device("meta"):
        return attention.make(dim).cache_spec().numbers()


def mla_weights(attention: MLA, dim: int) -> tuple[int, int]:
    """Weights one head needs for its scores: W_Q and W_UK apart, (n + c) d, and merged to W_Q W_UK^T, n c.

    n is the width that W_Q reads. Merging them "to save work" multiplies both storage and work."""
    with torch.device("meta"):
        layer = attention.make(dim)
    assert isinstance(layer, LatentAttention)
    n = layer.w_uq.in_features
    return (n + layer.c) * layer.d, n * layer.c


def dot_products(tokens: int, *, cached: bool) -> int:
    """q.k products of one head to write `tokens` tokens one by one: step t needs t with a cache, t^2 without one."""
    return sum(t if cached else t * t for t in range(1, tokens + 1))


def multiply_adds(attention: GQA, dim: int, tokens: int) -> tuple[int, int]:
    """Of one layer over `tokens` tokens: projections, n times the weights, and scores and sums, n^2 h (d + e)."""
    with torch.device("meta"):
        layer = attention.make(dim)
    weights = sum(w.weight.numel() for w in (layer.wq, layer.wk, layer.wv, layer.wo))
    return tokens * weights, tokens**2 * layer.h * (layer.d + layer.e)
