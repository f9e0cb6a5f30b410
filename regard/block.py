"""The one residual block, and a tower of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from regard.attention import DSA, GQA, MLA, Context
from regard.cache import CacheSpec
from regard.config import Count, Fraction, ranged
from regard.errors import UsageError
from regard.layers import MLP, Norm, plus
from regard.mask import Causal, Full, Mask
from regard.moe import MoE
from regard.position import Alibi, RelativeBias, T5Bias

Attention = GQA | MLA | DSA


@dataclass(frozen=True)
@ranged
class Tower:
    """`layers` blocks of width `dim`. `attention` and `ffn` are one config for all layers, or a tuple with one a layer.

    order "pre": x + f(norm(x)), with a norm at the end; "post": norm(x + f(x)), as in 2017.
    `dropout` falls on what each part adds to the stream. `layer_drop`: the share of layers that a step of training
    leaves out (Fan et al. 2020, arXiv:1909.11556)."""

    dim: Count
    layers: Count
    attention: GQA | MLA | DSA | tuple[GQA | MLA | DSA, ...]
    ffn: MLP | MoE | tuple[MLP | MoE, ...]
    cross: GQA | MLA | None = None
    memory_dim: Count | None = None  # width of what `cross` attends to; default: dim
    norm: Norm = Norm()
    order: str = "pre"
    final_norm: bool = True
    causal: bool = True
    relative: T5Bias | Alibi | None = None
    dropout: Fraction = 0.0
    attention_dropped: bool = True  # False: only on what feed-forwards add (DistilBERT)
    end_dropped: bool = False  # True: on what leaves the tower too (T5)
    layer_drop: Fraction = 0.0
    kind: str = "tower"

    def __post_init__(self) -> None:
        if self.order not in ("pre", "post"):
            raise UsageError(f"order is {self.order!r}; choose pre or post")
        for name in ("attention", "ffn"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != self.layers:
                raise UsageError(
                    f"{name} lists {len(value)} layers, layers={self.layers}; give one, or one a layer"
                )
        for name in ("rope", "window"):
            if self.cross is not None and getattr(self.cross, name) is not None:
                raise UsageError(
                    f"source and target have no common positions: give cross without {name}"
                )
        heads = {a.heads for a in map(_inner, self.each("attention"))}
        if self.relative is not None and heads != {self.relative.heads}:
            raise UsageError(
                f"relative.heads={self.relative.heads}, but attention has {sorted(heads)} heads"
            )

    def each(self, name: str) -> tuple:
        """The config of `name` ("attention" or "ffn") for every layer."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,) * self.layers

    @property
    def mask(self) -> Mask:
        return Causal() if self.causal else Full()


def _inner(attention: Attention) -> GQA | MLA:
    return attention.attention if isinstance(attention, DSA) else attention


class Block(nn.Module):
    """Self-attention, optional cross-attention, feed-forward; each x + f(norm x), or norm(x + f x)."""

    def __init__(self, config: Tower, attention: Attention, ffn: MLP | MoE):
        super().__init__()
        c, dim = config, config.dim
        self.post = c.order == "post"
        self.attention, self.norm1 = attention.make(dim), c.norm.make(dim)
        self.cross = c.cross.make(dim, c.memory_dim) if c.cross else None
        self.norm2 = c.norm.make(dim) if c.cross else None
        self.ffn, self.norm3 = ffn.make(dim), c.norm.make(dim)
        self.dropout = nn.Dropout(c.dropout)
        self.attention_dropout = nn.Dropout(c.dropout if c.attention_dropped else 0.0)

    def forward(self, x: Tensor, ctx: Context, cross: Context | None = None) -> Tensor:
        if self.post:
            x = self.norm1(plus(x, self.attention_dropout(self.attention(x, ctx))))
            if self.cross is not None and self.norm2 is not None:
                x = self.norm2(plus(x, self.attention_dropout(self.cross(x, cross))))
            return self.norm3(plus(x, self.dropout(self.ffn(x))))
        x = plus(x, self.attention_dropout(self.attention(self.norm1(x), ctx)))
        if self.cross is not None and self.norm2 is not None:
            x = plus(x, self.attention_dropout(self.cross(self.norm2(x), cross)))
        return plus(x, self.dropout(self.ffn(self.norm3(x))))


class Stack(nn.Module):
    """The blocks of a tower, its shared relative bias and its last norm. (b t m) -> (b t m)."""

    def __init__(self, config: Tower):
        super().__init__()
        c = self.config = config
        self.blocks = nn.ModuleList(
            Block(c, a, f) for a, f in zip(c.each("attention"), c.each("ffn"), strict=True)
        )
        self.relative = RelativeBias(c.relative) if c.relative else None
        self.norm = c.norm.make(c.dim) if c.final_norm else None
        self.dropout = nn.Dropout(c.dropout if c.end_dropped else 0.0)

    def cache_specs(self, part: str = "attention") -> list[CacheSpec]:
        """What each layer's self-attention keeps, or its "cross" attention."""
        return [getattr(block, part).cache_spec() for block in self.blocks]

    def forward(
        self, x: Tensor, ctx: Context, cross: Context | None = None, caches: tuple = (None, None)
    ) -> Tensor:
        """`caches`: of self-attention and of cross-attention; each block gets its layer of them."""
        own, other = caches
        ctx = replace(ctx, relative=self.relative)
        for i, block in enumerate(self.blocks):
            if self.training and self.config.layer_drop > torch.rand([]):
                continue
            here = replace(ctx, store=own and own.layer(i), site=f"{ctx.site}{i}.self")
            there = cross and replace(
                cross, store=other and other.layer(i), site=f"{ctx.site}{i}.cross"
            )
            x = block(x, here, there)
        return self.dropout(x if self.norm is None else self.norm(x))
