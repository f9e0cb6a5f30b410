"""Multi-head latent attention: one small vector per token instead of keys and values for every head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from regard.attention.core import Probe, Terms, attend
from regard.attention.protocol import Bias, Context, Entries, Mechanism, Seen
from regard.cache import CacheSpec
from regard.config import Amount, Count, Fraction, Needs, Whole, settings
from regard.errors import UsageError
from regard.layers import Add, RMSNorm
from regard.position import Rope, Temperature, turned


@settings
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, eq. 9-19).

    c_s = norm(W_DKV x_s),  k_s = [W_UK c_s ; RoPE(W_KR x_s)],  v_s = W_UV c_s,  q_t = [q_nope ; RoPE(q_rope)];
    o_t = softmax(q_t k_s^T / sqrt(d + r)) v_s per head; the rotary key is one for all heads.
    x (b t m) -> (b t m).   Cache per token: c + r, whatever the number of heads.
    """

    heads: Count  # query heads
    latent: Count  # c
    head_dim: Count | None = None  # d, the part of a head without positions; default: dim / heads
    # r, the part of a key that all heads share: turned where there is a rope (Kimi Linear has none)
    rope_dim: Whole = 0
    value_dim: Count | None = None  # e; default: head_dim
    query_latent: Count | None = None  # rank of the queries; default: they are not compressed
    # rotary positions of the r features
    rope: Annotated[Rope, Needs("rope_dim", such="32")] | None = None
    normed: bool = True  # RMS norm on both latents
    norm_eps: Amount = 1e-6  # of both norms
    bias: bool = False  # on the down-projections
    out_bias: bool = False  # on the output
    window: Count | None = None  # as of GQA
    dropout: Fraction = 0.0  # of attention weights, in training
    temperature: Temperature | None = None  # as of GQA
    kind: str = "mla"

    def make(self, dim: int, memory_dim: int | None = None, add: Add | None = None) -> Mechanism:
        return LatentAttention(self, dim, memory_dim, add)


class LatentAttention(Mechanism):
    """`expanded` is the definition; `absorbed` never builds keys or values. See test_mla_absorbed_equals_expanded."""

    forms = ("absorbed", "expanded")

    def __init__(
        self, config: MLA, dim: int, memory_dim: int | None = None, add: Add | None = None
    ):
        super().__init__()
        c, source = config, memory_dim or dim
        if c.head_dim is None and dim % c.heads:
            given = f"attention.heads={c.heads} does not divide dim={dim}"
            raise UsageError(f"{given}; set attention.head_dim")
        self.config, self.h, self.c, self.r = c, c.heads, c.latent, c.rope_dim
        self.d = c.head_dim or dim // c.heads
        self.e = c.value_dim or self.d
        self.scale = (self.d + self.r) ** -0.5 * (c.rope.softmax_gain() if c.rope else 1.0)
        rank = c.query_latent
        self.w_dq = nn.Linear(dim, rank, bias=c.bias) if rank else None
        self.q_norm = RMSNorm(rank, c.norm_eps) if rank and c.normed else None
        self.w_uq = nn.Linear(rank or dim, self.h * (self.d + self.r), bias=False)
        self.w_dkv = nn.Linear(source, self.c + self.r, bias=c.bias)
        self.kv_norm = RMSNorm(self.c, c.norm_eps) if c.normed else None
        self.w_ukv = nn.Linear(self.c, self.h * (self.d + self.e), bias=False)
        self.wo = nn.Linear(self.h * self.e, dim, bias=c.out_bias)
        self.add = add or Add()

    @property
    def special(self) -> str:  # type: ignore[override]
        return "it has a temperature" if self.config.temperature else ""

    def cache_spec(self) -> CacheSpec:
        rope = {"k_rope": (self.r,)} if self.r else {}
        turns = turned("k_rope", self.config.rope if self.r else None)
        return CacheSpec(token={"latent": (self.c,), **rope}, turned=turns)

    def flops(self, context: int) -> int:
        keys = min(context, self.config.window or context)
        return 2 * keys * self.h * (self.d + self.r + self.e)

    def core_attention(
        self, q: Tensor, kept: Entries, mask: Seen, ctx: Context, bias: Bias
    ) -> Tensor:
        """Expanding s keys costs s c d per head; absorbing t queries saves that, but attends c wide instead of d."""
        few = ctx.store is not None and q.shape[1] * (self.c - self.d) < self.c * self.d
        return (self.absorbed if few else self.expanded)(q, kept, mask, ctx, bias)

    def query_input(self, x: Tensor) -> Tensor:
        """x, or its low-rank query latent."""
        if self.w_dq is None:
            return x
        c = self.w_dq(x)
        return c if self.q_norm is None else self.q_norm(c)

    def queries(self, c_q: Tensor, ctx: Context) -> Tensor:
        """b t h (d + r), the last r turned to their positions."""
        q = self.w_uq(c_q).unflatten(-1, (self.h, self.d + self.r))
        if self.r:
            nope, rope = q.split([self.d, self.r], -1)
            q = torch.cat([nope, ctx.rotate(rope, self.config.rope)], -1)
        return ctx.tempered(q, self.config.temperature)

    def entries(self, x: Tensor, ctx: Context) -> Entries:
        """What a token leaves behind: its normalised latent (b t c) and its turned rotary key (b t r)."""
        if ctx.memory_pos is not None and ctx.memory is None:
            return {}
        source = x if ctx.memory is None else ctx.memory
        latent, rope = self.w_dkv(source).split([self.c, self.r], -1)
        latent = latent if self.kv_norm is None else self.kv_norm(latent)
        if not self.r:
            return {"latent": latent}
        return {"latent": latent, "k_rope": ctx.rotate(rope[:, :, None], self.config.rope)[:, :, 0]}

    def terms(self, ctx: Context, w_uv: Tensor | None = None) -> dict[str, Any]:
        drop, probe = self.config.dropout if self.training else 0.0, ctx.watch()
        if probe is not None and w_uv is not None:
            probe = _Lifted(probe, w_uv)
        return {"scale": self.scale, "dropout": drop, "probe": probe, "backend": ctx.backend}

    def expanded(
        self, q: Tensor, kept: Entries, mask: Seen, ctx: Context, bias: Bias = None
    ) -> Tensor:
        """Keys and values of every head, then ordinary attention: (b t h e)."""
        k, v = self.w_ukv(kept["latent"]).unflatten(-1, (self.h, -1)).split([self.d, self.e], -1)
        if self.r:
            k = torch.cat([k, kept["k_rope"][:, :, None].expand(-1, -1, self.h, -1)], -1)
        return attend(q, k, v, mask, bias=bias, **self.terms(ctx))

    def absorbed(
        self, q: Tensor, kept: Entries, mask: Seen, ctx: Context, bias: Bias = None
    ) -> Tensor:
        """q W_UK^T meets the latents themselves, as multi-query attention of width c + r; W_UV comes after the sum."""
        up = self.w_ukv.weight.view(self.h, self.d + self.e, self.c)
        w_uk, w_uv = up.split([self.d, self.e], 1)  # h d c, h e c
        nope, rope = q.split([self.d, self.r], -1)
        q = torch.cat([self.by_head(nope, w_uk), rope], -1)
        latent = kept["latent"][:, :, None]  # b s 1 c
        k = torch.cat([latent, kept["k_rope"][:, :, None]], -1) if self.r else latent
        o = attend(q, k, latent, mask, bias=bias, **self.terms(ctx, w_uv))
        return self.by_head(o, w_uv.transpose(1, 2))

    gathered = absorbed

    def by_head(self, x: Tensor, w: Tensor) -> Tensor:
        """Each head's own matrix: (b t h i), (h i o) -> (b t h o)."""
        return torch.einsum("bthi,hio->btho", x, w)


@dataclass
class _Lifted:
    """A probe of latents that is told how each head's values come from them."""

    probe: Probe
    w_uv: Tensor  # h e c

    def see(self, q: Tensor, k: Tensor, v: Tensor, mask: Seen, terms: Terms) -> None:
        self.probe.see(q, k, v, mask, replace(terms, up=self.w_uv))
