"""How the step is taken: the learning rate over time, and the limit on a gradient's length."""

from __future__ import annotations


def noam(step: int, dim: int, warmup: int) -> float:
    """dim^-0.5 min(step^-0.5, step warmup^-1.5), step = 1, 2, ..., largest at `warmup` (Vaswani et al. 2017, eq. 3)."""
    return dim**-0.5 * min(step**-0.5, step * warmup**-1.5)


def clip_factor(norm: float, max_norm: float, eps: float = 1e-6) -> float:
    """What every gradient is multiplied by: min(1, max_norm / (norm + eps)), norm over all of them; eps as in torch."""
    return min(1.0, max_norm / (norm + eps))
