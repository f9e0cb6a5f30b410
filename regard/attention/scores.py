"""Four ways to score a query against a key: what stands inside the softmax.

A score works on each side alone (`query`, `key`: once for each token), then joins the two. Where the join is a plain
product (`fused`), attend's own kernels can compute it; the additive score goes to the reference.
In `attend(q, k, v, score=Bilinear(d, d))` each is a function (b h t d), (b h s d) -> (b h t s).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.errors import UsageError


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


SCORES: dict[str, type[Dot]] = {
    "dot": Dot,
    "scaled_dot": ScaledDot,
    "bilinear": Bilinear,
    "additive": Additive,
}


def check_score(name: str, query_dim: int, key_dim: int, path: str = "score") -> None:
    """Refuse an unknown name, and a product of two widths."""
    if name not in SCORES:
        raise UsageError(f"{path}={name!r} is unknown; choose one of {', '.join(SCORES)}")
    if name in ("dot", "scaled_dot") and query_dim != key_dim:
        raise UsageError(
            f"{path}={name!r} needs queries and keys of one width, got {query_dim} and {key_dim}; "
            f"choose bilinear or additive"
        )


def make_score(name: str, query_dim: int, key_dim: int, hidden: int) -> Dot:
    """The score called `name` in SCORES; only the additive one has a `hidden` width."""
    check_score(name, query_dim, key_dim)
    if name == "additive":
        return Additive(query_dim, key_dim, hidden)
    return Bilinear(query_dim, key_dim) if name == "bilinear" else SCORES[name]()
