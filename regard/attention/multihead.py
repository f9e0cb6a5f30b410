"""Multi-head, grouped-query and multi-query attention: one layer, one knob."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from regard.attention.core import attend
from regard.attention.protocol import Bias, Context, Entries, Mechanism, Seen
from regard.cache import CacheSpec
from regard.config import (
    Amount,
    Count,
    Divides,
    Excludes,
    Fraction,
    Needs,
    Positive,
    Real,
    divisors,
    settings,
)
from regard.errors import UsageError
from regard.layers import Add, HeadNorm, RMSNorm, UnitNorm
from regard.mask import Span, Visible
from regard.position import Rope, Temperature, turned

EPS = Needs("qk_norm", such="1e-6")
ALONE = (
    Excludes("qk_norm_whole", "what is turned is normed head by head"),
    Excludes("temperature", "a norm takes it away"),
)


@settings
class GQA:
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245).

    o_i = softmax(q_i k_j^T / sqrt(d)) v_j,  j = i // (h / g).   x (b t m) -> (b t m).   Cache per token: g (d + e).
    kv_heads == heads (the default) is MHA (Vaswani et al. 2017), kv_heads == 1 is MQA (Shazeer 2019).
    """

    heads: Count  # query heads
    # key and value heads; default: heads
    kv_heads: Annotated[Count, Divides("heads")] | None = None
    head_dim: Count | None = None  # default: dim / heads
    value_dim: Count | None = None  # width of a value head; default: head_dim
    rope: Rope | None = None  # rotary positions
    bias: bool = False  # on q, k, v
    out_bias: bool = False  # on the output
    qk_norm: Amount | None = None  # eps of an RMS norm on each query and key head
    qk_norm_whole: Annotated[bool, EPS] = False  # on all heads at once (OLMo 2)
    qk_norm_plus_one: Annotated[bool, EPS] = False  # by 1 + w (Gemma 3)
    window: Count | None = None  # a query sees this many tokens at most, itself among them
    dropout: Fraction = 0.0  # of attention weights, in training
    scale: Real | None = None  # default: 1 / sqrt(head_dim)
    softcap: Positive | None = None  # scores are c tanh(s / c)
    sinks: bool = False  # one trained score per head for a key without a value
    gated: bool = False  # each head's output by a sigmoid of x (Qwen3-Next)
    key_bias: bool = True  # on k too, where q and v have one (Whisper: no)
    qk_norm_last: Annotated[bool, EPS, *ALONE] = False  # after they are turned (HunYuan)
    qk_norm_bare: Annotated[bool, EPS] = False  # without a weight (Llama 4)
    v_norm: Amount | None = None  # eps of an RMS norm without weights on each value head (Gemma 4)
    value_is_key: bool = False  # a value is its key, before norms and positions (Gemma 4)
    chunk: Count | None = None  # a query sees its own run of this many positions alone (Llama 4)
    clip: Positive | None = None  # q, k and v are kept between it and -it before they turn (OLMoE)
    temperature: Temperature | None = None  # queries grow with their positions (Llama 4)
    # a LayerNorm, by weights of its own for each head (Cohere)
    qk_norm_by_head: Annotated[bool, EPS] = False
    kind: str = "gqa"

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    def width(self, dim: int) -> int:
        """d, the width of a query or key head in a model of width `dim`."""
        if self.head_dim is None and dim % self.heads:
            given = f"attention.heads={self.heads} does not divide dim={dim}"
            raise UsageError(f"{given}; choose one of {divisors(dim)} or set attention.head_dim")
        return self.head_dim or dim // self.heads

    def make(self, dim: int, memory_dim: int | None = None, add: Add | None = None) -> Mechanism:
        kind = NormedLast if self.qk_norm_last else GroupedQueryAttention
        return kind(self, dim, memory_dim, add)


class GroupedQueryAttention(Mechanism):
    """Self-attention, or cross-attention when the context carries a memory (of width `memory_dim`)."""

    shares_rows = True
    # The number of this layer, where later ones read its keys and values, and of the one whose it reads.
    lends: int | None = None
    reads: int | None = None

    # None where another layer's, or the keys themselves, are meant.
    wk: Any
    wv: Any

    def __init__(
        self, config: GQA, dim: int, memory_dim: int | None = None, add: Add | None = None
    ):
        super().__init__()
        c, d = config, config.width(dim)
        e, source = c.value_dim or d, memory_dim or dim
        if c.value_is_key and e != d:
            raise UsageError(
                f"attention.value_dim={e}, but a value is its key, of {d}: leave it out"
            )
        self.config, self.h, self.g, self.d, self.e = c, c.heads, c.groups, d, e
        self.scale = d**-0.5 if c.scale is None else c.scale
        self.wq = nn.Linear(dim, self.h * d, bias=c.bias)
        self.wk = nn.Linear(source, self.g * d, bias=c.bias and c.key_bias)
        self.wv = None if c.value_is_key else nn.Linear(source, self.g * e, bias=c.bias)
        self.wg = nn.Linear(dim, self.h * e, bias=c.bias) if c.gated else None
        self.wo = nn.Linear(self.h * e, dim, bias=c.out_bias)
        self.q_norm, self.k_norm = self._norm(self.h), self._norm(self.g)
        self.v_norm = None if c.v_norm is None else UnitNorm(c.v_norm)
        self.sinks = nn.Parameter(torch.zeros(self.h)) if c.sinks else None
        self.add = add or Add()

    def _norm(self, heads: int) -> RMSNorm | UnitNorm | HeadNorm | None:
        c = self.config
        width = heads * self.d if c.qk_norm_whole else self.d
        if c.qk_norm is None:
            return None
        if c.qk_norm_by_head:
            return HeadNorm(heads, self.d, c.qk_norm)
        if c.qk_norm_bare:
            return UnitNorm(c.qk_norm)
        return RMSNorm(width, c.qk_norm, c.qk_norm_plus_one)

    @property
    def special(self) -> str:  # type: ignore[override]
        c = self.config
        if self.reads is not None:
            return "it reads the keys of another layer"
        if self.lends is not None:
            return "other layers read its keys"
        if c.value_is_key:
            return "its values are its keys"
        settings = dict(clip=c.clip, chunk=c.chunk, temperature=c.temperature)
        return next((f"it has a {name}" for name, value in settings.items() if value), "")

    def borrow(self, layer: int) -> None:
        """Have no keys and values from here on, and read those of an earlier layer."""
        self.reads, self.wk, self.wv = layer, None, None
        self.k_norm = self.v_norm = None

    def cache_spec(self) -> CacheSpec:
        if self.reads is not None:
            return CacheSpec()
        turns = turned("k", self.config.rope)
        return CacheSpec(token={"k": (self.g, self.d), "v": (self.g, self.e)}, turned=turns)

    def flops(self, context: int) -> int:
        keys = min(context, self.config.window or context, self.config.chunk or context)
        return 2 * keys * self.h * (self.d + self.e)

    def visible(self, k_pos: Span, ctx: Context) -> Visible:
        return ctx.visible(k_pos, self.config.window, self.config.chunk)

    def queries(self, x: Tensor, ctx: Context) -> Tensor:
        return self.as_queries(self.wq(x), ctx)

    def as_queries(self, q: Tensor, ctx: Context) -> Tensor:
        """(b t hd) -> (b t h d), normed and turned."""
        q = ctx.rotate(self.as_heads(q, self.q_norm), self.config.rope)
        return ctx.tempered(q, self.config.temperature)

    def as_heads(self, x: Tensor, norm: RMSNorm | UnitNorm | HeadNorm | None) -> Tensor:
        """(b t nd) -> (b t n d), normed and clipped."""
        if norm is not None and self.config.qk_norm_whole:
            return self.clipped(norm(x).unflatten(-1, (-1, self.d)))
        x = x.unflatten(-1, (-1, self.d))
        return self.clipped(x if norm is None else norm(x))

    def clipped(self, x: Tensor) -> Tensor:
        clip = self.config.clip
        return x if clip is None else x.clamp(-clip, clip)

    def entries(self, x: Tensor, ctx: Context) -> Entries:
        if ctx.memory_pos is not None and ctx.memory is None:
            return {}
        if self.wk is None:
            return {}
        source = x if ctx.memory is None else ctx.memory
        k = self.wk(source)
        return self.as_entries(k, k if self.wv is None else self.wv(source), ctx)

    def as_entries(self, k: Tensor, v: Tensor, ctx: Context) -> Entries:
        k = ctx.rotate(self.as_heads(k, self.k_norm), self.config.rope)
        v = self.clipped(v.unflatten(-1, (self.g, self.e)))
        return {"k": k, "v": v if self.v_norm is None else self.v_norm(v)}

    def kept(self, new: Entries, ctx: Context) -> tuple[Entries, Span]:
        if self.reads is not None:
            return ctx.memo["kept", self.reads]
        found = super().kept(new, ctx)
        if self.lends is not None:
            ctx.memo["kept", self.lends] = found
        return found

    def core_attention(
        self, q: Tensor, kept: Entries, mask: Seen, ctx: Context, bias: Bias
    ) -> Tensor:
        share = len(q) // len(kept["k"])
        if share > 1 and isinstance(mask, Visible):
            # Beams stand side by side as their source's queries.
            pos = mask.q.index.expand(len(q), -1).reshape(len(q) // share, -1)
            seen = None if mask.everything else Visible(mask.mask, Span(pos), mask.k)
            o = self.core_attention(
                q.unflatten(0, (-1, share)).flatten(1, 2), kept, seen, ctx, None
            )
            return o.unflatten(1, (share, -1)).flatten(0, 1)
        return attend(
            q, kept["k"], kept["v"], mask, bias=bias, scale=self.scale, softcap=self.config.softcap,
            sinks=self.sinks, dropout=self.config.dropout if self.training else 0.0,
            probe=ctx.watch(), backend=ctx.backend
        )  # fmt: skip

    def weigh(self, o: Tensor, x: Tensor) -> Tensor:
        return o if self.wg is None else o * self.sigmoid(self.wg(x)).view_as(o)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class NormedLast(GroupedQueryAttention):
    """Queries and keys are turned, then normed."""

    def as_heads(self, x: Tensor, norm: RMSNorm | UnitNorm | HeadNorm | None) -> Tensor:
        return super().as_heads(x, None)

    def as_queries(self, q: Tensor, ctx: Context) -> Tensor:
        assert self.q_norm is not None
        return self.q_norm(super().as_queries(q, ctx))

    def as_entries(self, k: Tensor, v: Tensor, ctx: Context) -> Entries:
        assert self.k_norm is not None
        entries = super().as_entries(k, v, ctx)
        return {**entries, "k": self.k_norm(entries["k"])}
