"""Attention before it had layers: pooling, kernel regression, memory, and the softmax as a teacher writes it.

Everything here is the plain form, for reading and for the laws; models use `attend`. Nothing has parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.core import softmax
from regard.errors import UsageError

INF = float("inf")
Width = float | Tensor


def pool(scores: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Attention pooling: o = sum_j softmax(scores)_j v_j.   scores (... t s), v (... s e) -> (... t e).

    Any score will do, such as `pool(Additive(4, 6, 8)(q, k), v)`. A row that sees nothing gives zeros."""
    return softmax(scores, visible).to(v.dtype) @ v


# --- kernel regression --------------------------------------------------------------------------------------------

KERNELS: dict[str, Callable[[Tensor], Tensor]] = {  # of u = |q - k| / width
    "gaussian": lambda u: torch.exp(-u * u / 2),
    "boxcar": lambda u: (u <= 1).to(u.dtype),
    "epanechnikov": lambda u: 0.75 * (1 - u * u).clamp(min=0),
    "triangular": lambda u: (1 - u).clamp(min=0),
}


def kernel_weights(q: Tensor, k: Tensor, kernel: str = "gaussian", width: Width = 1.0) -> Tensor:
    """a_ij = K(u_ij) / sum_j K(u_ij),  u_ij = |q_i - k_j| / width.   q (t) or (t d), k (s) or (s d) -> (t s).

    The Gaussian is computed as softmax(-u^2 / 2): far from every key, K is 0 in floating point and the ratio 0/0, but
    the softmax is not. Of the others, a query with no key in the support gets a row of zeros."""
    if kernel not in KERNELS:
        raise UsageError(f"kernel={kernel!r} is unknown; choose one of {', '.join(KERNELS)}")
    if bool(torch.as_tensor(width <= 0).any()):
        raise UsageError(f"width={width} must be positive: it is the distance that counts as 1")
    q, k = (x[:, None] if x.dim() == 1 else x for x in (q, k))
    u = torch.linalg.vector_norm(q[:, None] - k[None], dim=-1) / width  # t s
    if kernel == "gaussian":
        return softmax(-u * u / 2)
    mass = KERNELS[kernel](u)
    total = mass.sum(-1, keepdim=True)
    return mass / total.masked_fill(total == 0, 1.0)


def regress(
    q: Tensor, k: Tensor, v: Tensor, kernel: str = "gaussian", width: Width = 1.0,
    fallback: float = math.nan
) -> Tensor:  # fmt: skip
    """Nadaraya-Watson regression (1964): f(q) = sum_j a_j(q) v_j, a = `kernel_weights`.   v (s) or (s e) -> (t ...).

    A query with no key in the support has no estimate: it gets `fallback`."""
    a = kernel_weights(q, k, kernel, width)
    empty = a.sum(-1) == 0
    return (a @ v).masked_fill(empty if v.dim() == 1 else empty[:, None], fallback)


def classify(q: Tensor, k: Tensor, labels: Tensor, classes: int, **options: Any) -> Tensor:
    """Nadaraya-Watson classification: p(c | q) = sum_j a_j(q) [label_j = c].   labels (s) -> (t classes).

    The options are those of `regress`."""
    return regress(q, k, F.one_hot(labels, classes).to(k.dtype), **options)


# --- a memory made into one vector --------------------------------------------------------------------------------


def _mean(chosen: Tensor) -> Tensor:
    """0/1 (... s) -> equal weights of sum 1; zeros where nothing is chosen."""
    return chosen / chosen.sum(-1, keepdim=True).clamp(min=1)


def _top(scores: Tensor, count: int) -> Tensor:
    """1 at the `count` highest scores, the earlier of equals."""
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(scores).scatter(-1, order, 1.0)


SELECTIONS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {  # (scores, seen as 0/1, count)
    "sum": lambda s, seen, count: seen,
    "average": lambda s, seen, count: _mean(seen),
    "one_hot": lambda s, seen, count: _top(s, 1) * seen,
    "multi_hot": lambda s, seen, count: _mean(_top(s, count) * seen),
    "soft": lambda s, seen, count: softmax(s, seen > 0),
}


def combine(
    memory: Tensor, scores: Tensor, how: str = "soft", visible: Tensor | None = None, count: int = 2
) -> Tensor:
    """c = H^T alpha.   memory H (... s m), scores (... s) -> (... m).

    alpha: sum 1; average 1/s; one_hot 1 at the highest score; multi_hot 1/count at the `count` highest, their mean;
    soft softmax(scores). The first two do not look at the scores; the hard ones have no gradient to them."""
    if how not in SELECTIONS:
        raise UsageError(f"how={how!r} is unknown; choose one of {', '.join(SELECTIONS)}")
    seen = torch.ones_like(scores) if visible is None else visible.to(scores.dtype)
    alpha = SELECTIONS[how](scores.masked_fill(seen == 0, -INF), seen, count)
    return (alpha[..., None, :].to(memory.dtype) @ memory).squeeze(-2)


# --- softmax and attention in loops -------------------------------------------------------------------------------


class Step(NamedTuple):
    """After key i: the maximum m_i, the sum d_i, and (attention only) the output o_i so far."""

    m: float
    d: float
    o: Tensor | None = None


def _exp(x: float, m: float) -> float:
    """exp(x - m), where exp(-inf - -inf) counts as 0: so far nothing was seen. The maximum itself counts 1: a sum of
    these is 0, or at least 1."""
    return 0.0 if x == -INF else math.exp(x - m)


def three_loops(x: Tensor) -> tuple[Tensor, list[Step]]:
    """Stable softmax of logits x (s): a loop for the maximum m, one for the sum d of exp(x_i - m), one to divide."""
    m, d, trace = -INF, 0.0, []
    for x_i in x.tolist():
        m = max(m, x_i)
    for x_i in x.tolist():
        d += _exp(x_i, m)
        trace.append(Step(m, d))
    return x.new_tensor([_exp(x_i, m) / max(d, 1.0) for x_i in x.tolist()]), trace


def two_loops(x: Tensor) -> tuple[Tensor, list[Step]]:
    """Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867): maximum and sum in one loop, then one to divide.

    m_i = max(m_{i-1}, x_i),   d_i = d_{i-1} e^(m_{i-1} - m_i) + e^(x_i - m_i)"""
    m, d, trace = -INF, 0.0, []
    for x_i in x.tolist():
        old, m = m, max(m, x_i)
        d = d * _exp(old, m) + _exp(x_i, m)
        trace.append(Step(m, d))
    return x.new_tensor([_exp(x_i, m) / max(d, 1.0) for x_i in x.tolist()]), trace


def one_loop(x: Tensor, v: Tensor, block: int = 1) -> tuple[Tensor, list[Step]]:
    """Online attention (Dao et al. 2022): softmax(x) v in one loop over (blocks of) keys.   x (s), v (s e) -> (e).

    o_i = o_{i-1} (d_{i-1} / d_i) e^(m_{i-1} - m_i) + (e^(x_i - m_i) / d_i) v_i;   o d is the unnormalised output."""
    m, d, o, trace = -INF, 0.0, v.new_zeros(v.shape[-1]), []
    for start in range(0, len(x), block):
        part, values = x[start : start + block].tolist(), v[start : start + block]
        old, m = m, max(m, *part)
        kept, p = d * _exp(old, m), [_exp(x_i, m) for x_i in part]
        d = kept + sum(p)
        o = (o * kept + v.new_tensor(p) @ values) / max(d, 1.0)
        trace.append(Step(m, d, o))
    return o, trace


def per_token(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """Causal attention, one equation per token; equals softmax(Q K^T / sqrt(d) + M) V.   x (t m), w (m d) -> (t e).

    q_i = W_q^T x_i, k_j = W_k^T x_j, v_j = W_v^T x_j;   o_i = sum_{j <= i} softmax_j(q_i . k_j / sqrt(d)) v_j"""
    out = []
    for i in range(len(x)):
        q = wq.T @ x[i]
        scores = torch.stack([q @ (wk.T @ x[j]) for j in range(i + 1)]) / len(q) ** 0.5
        a = softmax(scores)
        out.append(sum((a[j] * (wv.T @ x[j]) for j in range(i + 1)), torch.zeros_like(wv[0])))
    return torch.stack(out)
