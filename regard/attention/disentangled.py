"""Disentangled attention: what a token says and how far away it stands are scored apart (DeBERTa v2 and v3)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.attention.core import attend
from regard.attention.protocol import Bias, Context, Entries, Mechanism, Seen
from regard.cache import CacheSpec
from regard.config import Amount, Count, Fraction, divisors, settings
from regard.errors import UsageError
from regard.layers import Add
from regard.mask import Visible


@settings
class Disentangled:
    """Disentangled attention (He et al. 2021, arXiv:2006.03654, equation 4).

    s_ij = (q_i k_j + q_i K_r + Q_r k_j) / sqrt(n d),  K_r = W_k p_r,  Q_r = W_q p_r,  r = bucket(i - j).   x (b t m) ->
    (b t m).   Cache per token: 2 h d.   p are vectors of distances, (2 span, m), which all layers of a tower share; n
    counts the terms."""

    heads: Count  # heads of queries, keys and values
    head_dim: Count | None = None  # default: dim / heads
    span: Count = 256  # buckets of distance on either side
    # from span / 2 on distances share buckets by logarithm, up to this one; none: each has its own
    max_distance: Count | None = 512
    content_to_position: bool = True  # q_i K_r
    position_to_content: bool = True  # Q_r k_j
    shared: bool = True  # W_k and W_q are those of the tokens; False: they are others
    norm: Amount | None = 1e-7  # eps of a norm on p
    dropout: Fraction = 0.0  # of attention weights, in training
    vector_dropout: Fraction = 0.0  # of p, in training, in each layer anew
    kind: str = "disentangled"

    rope: ClassVar[None] = None
    window: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.max_distance is not None and self.max_distance - 1 <= max(self.span // 2, 1):
            asked = f"attention.max_distance={self.max_distance} leaves nothing to share"
            raise UsageError(f"{asked}; give more than {max(self.span // 2, 1) + 1}, or none")

    def width(self, dim: int) -> int:
        """d, the width of a head in a model of width `dim`."""
        if self.head_dim is None and dim % self.heads:
            given = f"attention.heads={self.heads} does not divide dim={dim}"
            raise UsageError(f"{given}; choose one of {divisors(dim)} or set attention.head_dim")
        return self.head_dim or dim // self.heads

    def bucket(self, gap: Tensor) -> Tensor:
        """Distances i - j as rows of p: each of the nearest its own, farther ones by logarithm."""
        near = self.span // 2
        if self.max_distance is not None and near:
            far = gap.abs().clamp(min=near).float() / near
            most = torch.log(torch.tensor((self.max_distance - 1) / near, device=gap.device))
            shared = torch.ceil(torch.log(far) / most * (near - 1)) + near
            gap = torch.where(gap.abs() <= near, gap, (shared * gap.sign()).long())
        return (gap + self.span).clamp(0, 2 * self.span - 1)

    def make(self, dim: int, memory_dim: int | None = None, add: Add | None = None) -> Mechanism:
        return DisentangledAttention(self, dim, add)


class DistanceVectors(nn.Module):
    """p: (2 span, m)."""

    def __init__(self, config: Disentangled, dim: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(2 * config.span, dim))
        nn.init.normal_(self.weight, std=0.02)
        self.norm = None if config.norm is None else nn.LayerNorm(dim, config.norm)

    def forward(self) -> Tensor:
        return self.weight if self.norm is None else self.norm(self.weight)


class DisentangledAttention(Mechanism):
    """x (b t m) -> residual + (b t m)."""

    def __init__(self, config: Disentangled, dim: int, add: Add | None = None):
        super().__init__()
        c, d = config, config.width(dim)
        self.config, self.h, self.d, self.e = c, c.heads, d, d
        terms = 1 + c.content_to_position + c.position_to_content
        self.scale = (terms * d) ** -0.5
        self.wq, self.wk, self.wv = (nn.Linear(dim, self.h * d) for _ in range(3))
        self.wo = nn.Linear(self.h * d, dim)
        self.distances = DistanceVectors(c, dim)
        own = not c.shared
        self.distance_k = nn.Linear(dim, self.h * d) if own and c.content_to_position else None
        self.distance_q = nn.Linear(dim, self.h * d) if own and c.position_to_content else None
        self.dropout, self.add = nn.Dropout(c.vector_dropout), add or Add()

    def join(self, first: Mechanism) -> None:
        assert isinstance(first, DisentangledAttention)
        self.distances = first.distances

    def cache_spec(self) -> CacheSpec:
        return CacheSpec(token={"k": (self.h, self.d), "v": (self.h, self.d)})

    def flops(self, context: int) -> int:
        """A query meets 2 span vectors for each term of distance."""
        c = self.config
        terms = c.content_to_position + c.position_to_content
        return 2 * self.h * self.d * (2 * context + terms * 2 * c.span)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.h, self.d))

    def queries(self, x: Tensor, ctx: Context) -> Tensor:
        return self.heads(self.wq(x))

    def entries(self, x: Tensor, ctx: Context) -> Entries:
        return {"k": self.heads(self.wk(x)), "v": self.heads(self.wv(x))}

    def core_attention(
        self, q: Tensor, kept: Entries, mask: Seen, ctx: Context, bias: Bias
    ) -> Tensor:
        assert isinstance(mask, Visible)
        apart = self.by_distance(q, kept["k"], mask, ctx)
        bias = apart if bias is None or apart is None else bias + apart
        return attend(
            q, kept["k"], kept["v"], mask, bias=bias, scale=self.scale,
            dropout=self.config.dropout if self.training else 0.0, probe=ctx.watch(), backend=ctx.backend
        )  # fmt: skip

    def by_distance(self, q: Tensor, k: Tensor, mask: Visible, ctx: Context) -> Bias:
        """The terms with p, (b h t s), if there are any."""
        c = self.config
        p = self.dropout(self.distances())

        def rows() -> Tensor:
            return c.bucket(mask.q.index[:, :, None] - mask.k.index[:, None])  # b t s

        r = ctx.bound(("bucket", c.span, c.max_distance), mask.k, rows)
        r = r.expand(len(q), -1, -1)[:, None].expand(-1, self.h, -1, -1)  # b h t s
        total = None
        if c.content_to_position:
            keys = self.heads((self.distance_k or self.wk)(p))  # n h d
            total = torch.einsum("bthd,nhd->bhtn", q, keys).gather(-1, r)
        if c.position_to_content:
            queries = self.heads((self.distance_q or self.wq)(p))
            met = torch.einsum("bshd,nhd->bhsn", k, queries).gather(-1, r.mT).mT
            total = met if total is None else total + met
        return None if total is None else total * self.scale
