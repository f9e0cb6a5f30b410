"""Four ways to score a query against a key: what stands inside the softmax; and three that need none.

A score works on each side alone (`query`, `key`: once for each token), then joins the two. Where the join is a plain
product (`fused`), attend's own kernels can compute it; the additive score goes to the reference.
In `attend(q, k, v, score=Bilinear(d, d))` each is a function (b h t d), (b h s d) -> (b h t s).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.attention.pooling import SELECTIONS
from regard.attention.protocol import Seen
from regard.errors import UsageError, check_choice
from regard.mask import Visible


class Dot(nn.Module):
    """q . k; query and key have one width (Luong et al. 2015, arXiv:1508.04025, "dot")."""

    fused: ClassVar[bool] = True
    scale: ClassVar[float | None] = 1.0  # of the product; None: 1 / sqrt(d), as in attend

    def query(self, q: Tensor) -> Tensor:
        return q

    def key(self, k: Tensor) -> Tensor:
        return k

    def join(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.join(self.query(q), self.key(k))  # ... t s

    def read(self, q: Tensor, k: Tensor, mask: Seen) -> tuple[Seen, Tensor | None]:
        """Which of the visible keys get weight, and what the weights are multiplied by: `mask` and `times` of attend.
        q (b h t d), k (b h s d), both prepared."""
        return mask, None


class ScaledDot(Dot):
    """q . k / sqrt(d): entries of variance 1 give scores of variance 1 (Vaswani et al. 2017, eq. 1)."""

    scale = None


class Bilinear(Dot):
    """q^T W k, with W (query_dim, key_dim) (Luong et al. 2015, "general"). W = I is `Dot`."""

    def __init__(self, query_dim: int, key_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(query_dim, key_dim))
        nn.init.xavier_uniform_(self.weight)

    def query(self, q: Tensor) -> Tensor:
        return q @ self.weight  # ... t key_dim


class Additive(Dot):
    """w_v^T tanh(W_q q + W_k k) (Bahdanau et al. 2015, arXiv:1409.0473, A.1.2); the two widths may differ."""

    fused = False

    def __init__(self, query_dim: int, key_dim: int, hidden: int):
        super().__init__()
        self.wq = nn.Linear(query_dim, hidden, bias=False)
        self.wk = nn.Linear(key_dim, hidden, bias=False)
        self.wv = nn.Parameter(torch.empty(hidden).uniform_(-1, 1) * hidden**-0.5)

    def query(self, q: Tensor) -> Tensor:
        return self.wq(q)  # ... t hidden

    def key(self, k: Tensor) -> Tensor:
        return self.wk(k)  # ... s hidden

    def join(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(q[..., :, None, :] + k[..., None, :, :]) @ self.wv


class Average(Dot):
    """All keys weigh the same, 1 / n: the query is left unread."""

    def __init__(self, key_dim: int):
        super().__init__()
        self.key_dim = key_dim

    def query(self, q: Tensor) -> Tensor:
        return q.new_zeros(*q.shape[:-1], self.key_dim)


class Sum(Average):
    """All keys weigh 1: n times the average."""

    def read(self, q: Tensor, k: Tensor, mask: Seen) -> tuple[Seen, Tensor | None]:
        return mask, _seen(q, k, mask).sum(-1, keepdim=True, dtype=torch.float32)


class Hard(Dot):
    """The key with the highest q . k, the earlier of equals, weighs exactly 1. The choice has no gradient: the query
    and what made it learn nothing from having chosen, only the chosen value learns."""

    def read(self, q: Tensor, k: Tensor, mask: Seen) -> tuple[Seen, Tensor | None]:
        seen, x = _seen(q, k, mask), self.join(q, k)
        x = x.masked_fill(~seen, -torch.inf)
        return SELECTIONS["one_hot"](x, seen.to(x.dtype), 1) > 0, None


def _seen(q: Tensor, k: Tensor, mask: Seen) -> Tensor:
    """(b 1 t s)"""
    mask = mask.tensor() if isinstance(mask, Visible) else mask
    return k.new_ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool) if mask is None else mask


SCORES: dict[str, type[Dot]] = {
    "dot": Dot,
    "scaled_dot": ScaledDot,
    "bilinear": Bilinear,
    "additive": Additive,
}
# what a memory is read by
READS: dict[str, type[Dot]] = {**SCORES, "average": Average, "sum": Sum, "hard": Hard}


def check_score(name: str, query_dim: int, key_dim: int, path: str = "score") -> None:
    """Refuse an unknown name, and a product of two widths."""
    check_choice(path, name, READS)
    if name in ("dot", "scaled_dot", "hard") and query_dim != key_dim:
        raise UsageError(
            f"{path}={name!r} needs queries and keys of one width, got {query_dim} and {key_dim}; "
            f"choose bilinear or additive"
        )


def make_score(name: str, query_dim: int, key_dim: int, hidden: int) -> Dot:
    """The one called `name` in READS; only the additive one has a `hidden` width."""
    check_score(name, query_dim, key_dim)
    if name == "additive":
        return Additive(query_dim, key_dim, hidden)
    sizes = {"bilinear": (query_dim, key_dim), "average": (key_dim,), "sum": (key_dim,)}
    return READS[name](*sizes.get(name, ()))
