"""The numbers behind the mechanisms: why scores are scaled, when a softmax stops learning, what a
cache costs."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from regard.attention import DSA, GQA, MLA, softmax
from regard.attention.latent import LatentAttention


def softmax_jacobian(x: Tensor) -> Tensor:
    """d p_i / d x_j = p_i (1[i=j] - p_j), p = softmax(x).   (... n) -> (... n n)

    It vanishes as p saturates."""
    p = softmax(x)
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


def saturation(a: Tensor) -> Tensor:
    """The largest weight of softmax([a, a, 2a]) = 1 / (1 + 2 exp(-a)); exp(2a) itself would
    overflow."""
    return 1 / (1 + 2 * torch.exp(-a))


def dot_moments(dim: int, scale: float = 1.0, *, same: bool = False) -> tuple[float, float]:
    """Mean and variance of scale q.k over all q, k in {-1, +1}^dim, independent: 0 and scale^2 dim.

    So scale = dim^-0.5 keeps the variance 1. With `same`, k is q: independence is what makes the
    mean 0."""
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=dim)), dtype=torch.float64)
    dots = scale * (signs.square().sum(-1) if same else signs @ signs.T)
    return dots.mean().item(), dots.var(correction=0).item()


def cache_numbers(attention: GQA | MLA | DSA, dim: int) -> int:
    """Numbers that one token leaves in one layer's cache: GQA g (d + e), MLA c + r, DSA the same
    and D."""
    with torch.device("meta"):
        return attention.make(dim).cache_spec().numbers()


def mla_weights(attention: MLA, dim: int) -> tuple[int, int]:
    """Weights one head needs for its scores: W_Q and W_UK apart, (n + c) d, and merged to W_Q
    W_UK^T, n c.

    n is the width that W_Q reads. Merging them "to save work" multiplies both storage and work."""
    with torch.device("meta"):
        layer = attention.make(dim)
    assert isinstance(layer, LatentAttention)
    n = layer.w_uq.in_features
    return (n + layer.c) * layer.d, n * layer.c


def dot_products(tokens: int, *, cached: bool) -> int:
    """q.k products of one head to write `tokens` tokens one by one: step t needs t with a cache,
    t^2 without one."""
    return sum(t if cached else t * t for t in range(1, tokens + 1))


def multiply_adds(attention: GQA, dim: int, tokens: int) -> tuple[int, int]:
    """Of one layer over `tokens` tokens: projections, n times the weights, and scores and sums, n^2
    h (d + e)."""
    with torch.device("meta"):
        layer = attention.make(dim)
    weights = sum(w.weight.numel() for w in (layer.wq, layer.wk, layer.wv, layer.wo))
    return tokens * weights, tokens**2 * layer.h * (layer.d + layer.e)
