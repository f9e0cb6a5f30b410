"""The one residual block, and a tower of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor, nn

from regard.attention import Attention, Context, CrossAttention
from regard.attention.protocol import Mechanism
from regard.cache import CacheSpec
from regard.config import Choice, Count, Excludes, Fraction, Kinds, Whole, settings
from regard.errors import UsageError
from regard.layers import MLP, Add, Norm, Norms
from regard.mask import Causal, Full, Mask
from regard.moe import MoE
from regard.position import Relative


class FeedForwardConfig(Protocol):
    """What a tower asks of the config of a feed-forward: a module f(x, residual), which adds itself by `add`."""

    def make(self, dim: int, add: Add | None = None) -> nn.Module: ...


FEED_FORWARDS: dict[str, type[FeedForwardConfig]] = {"mlp": MLP, "moe": MoE}
FeedForwards = Annotated[FeedForwardConfig, Kinds(FEED_FORWARDS)]


# --- orders of a block --------------------------------------------------------------------------------------------

Normed = Callable[[Tensor], Tensor]
Stream = Tensor | None  # None: a part replaces the stream


def before(norm: Normed, part: nn.Module, x: Tensor, stream: Stream, *ctx: Any) -> Tensor:
    """x + f(norm(x)): a part is called with what it reads, contexts, and the stream that it adds itself to."""
    return part(norm(x), *ctx, stream)


def after(norm: Normed, part: nn.Module, x: Tensor, stream: Stream, *ctx: Any) -> Tensor:
    """norm(x + f(x))."""
    return norm(part(x, *ctx, stream))


@dataclass(frozen=True)
class Order:
    """Where norms stand in a block. `around` gives the stream after a part of it."""

    around: Callable[..., Tensor] = before
    outer: bool = True  # a norm for each part, which `around` is given
    added: bool = False  # a norm of what a part adds, before it is added
    parallel: bool = False  # attention and feed-forward read the same stream


ORDERS: dict[str, Order] = {
    "pre": Order(),
    "post": Order(after),
    "sandwich": Order(added=True),
    "inner": Order(outer=False, added=True),
    "parallel": Order(parallel=True),
}

APART = "source and target have no common positions"


@settings
class Tower:
    """`layers` blocks of width `dim`. `attention` and `ffn` are one config for all layers, or one per layer.

    order "pre": x + f(norm(x)), with a norm at the end; "post": norm(x + f(x)), as in 2017; "sandwich": x +
    norm(f(norm(x))) (Gemma); "inner": x + norm(f(x)) (OLMo 2); "parallel": x + f(norm(x)) + g(norm'(x)) (GPT-NeoX).
    `dropout` falls on what each part adds to the stream. `layer_drop`: the share of layers that a step of training
    leaves out (Fan et al. 2020, arXiv:1909.11556)."""

    dim: Count  # width of the stream
    layers: Count  # blocks
    attention: Attention | tuple[Attention, ...]  # of each block
    ffn: FeedForwards | tuple[FeedForwards, ...]  # of each block
    # attention to an encoder's states
    cross: (
        Annotated[CrossAttention, Excludes("cross.rope", APART), Excludes("cross.window", APART)]
        | None
    ) = None
    memory_dim: Count | None = None  # width of what `cross` attends to; default: dim
    norm: Norms = Norm()  # of each part; "batch": BatchNorm
    # where it stands: pre, post, sandwich, inner, parallel
    order: Annotated[str, Choice(ORDERS)] = "pre"
    final_norm: bool = True  # one more at the end (pre)
    causal: bool = True  # a token sees those before it alone
    relative: Relative | None = None  # a bias on scores by distance
    relative_shared: bool = True  # False: each layer has a bias of its own (UMT5)
    dropout: Fraction = 0.0  # on what each part adds, in training
    attention_dropped: bool = True  # False: only on what feed-forwards add (DistilBERT)
    ffn_dropped: bool = True  # False: only on what attention adds (ALBERT, ModernBERT)
    end_dropped: bool = False  # True: on what leaves the tower too (T5)
    layer_drop: Fraction = 0.0  # share of layers that a step of training leaves out
    # False: a part replaces the stream instead of adding to it, to see what the sum is for
    residual: bool = True
    first_norm: bool = True  # False: the first attention reads the embedding as it is (ModernBERT)
    # Which block each layer is, counted from 0, where layers share them (ALBERT); None: each its own.
    blocks: tuple[Whole, ...] | None = None
    kind: str = "tower"

    def __post_init__(self) -> None:
        if ORDERS[self.order].parallel and self.cross is not None:
            raise UsageError(f"order {self.order!r} has no cross-attention; choose pre or post")
        for name in ("attention", "ffn"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != self.layers:
                given = f"{name} lists {len(value)} layers, layers={self.layers}"
                raise UsageError(f"{given}; give one, or one per layer")
        if not self.first_norm and (self.order != "pre" or self.blocks is not None):
            raise UsageError("first_norm=False is for order 'pre' and layers that share no block")
        if self.blocks is not None:
            used = sorted(set(self.blocks))
            if len(self.blocks) != self.layers or used != list(range(len(used))):
                given = f"blocks={list(self.blocks)} must give each of {self.layers} layers"
                raise UsageError(f"{given} its block, from 0 on without a gap")
            parts = set(zip(self.blocks, self.each("attention"), self.each("ffn"), strict=True))
            if len(parts) != len(used):
                raise UsageError("layers that share a block must have one attention and one ffn")
        heads = {a.heads for a in self.each("attention")}
        if self.relative is not None and heads != {self.relative.heads}:
            given = f"relative.heads={self.relative.heads}"
            raise UsageError(f"{given}, but attention has {sorted(heads)} heads")

    def each(self, name: str) -> tuple[Any, ...]:
        """The config of `name` ("attention" or "ffn") for every layer."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,) * self.layers

    @property
    def mask(self) -> Mask:
        return Causal() if self.causal else Full()


class Block(nn.Module):
    """Self-attention, optional cross-attention, feed-forward; each adds itself to the stream."""

    def __init__(self, config: Tower, attention: Attention, ffn: FeedForwards):
        super().__init__()
        c, dim, order = config, config.dim, ORDERS[config.order]
        self.order, self.residual = c.order, c.residual

        def norm() -> nn.Module | None:
            return c.norm.make(dim) if order.outer else None

        def add(dropped: bool) -> Add:
            return Add(c.dropout if dropped else 0.0, c.norm.make(dim) if order.added else None)

        self.attention, self.norm1 = attention.make(dim, add=add(c.attention_dropped)), norm()
        self.cross, self.norm2 = None, None
        if c.cross is not None:
            self.cross = c.cross.make(dim, c.memory_dim, add(c.attention_dropped))
            self.norm2 = norm()
        self.ffn, self.norm3 = ffn.make(dim, add(c.ffn_dropped)), norm()

    def forward(self, x: Tensor, ctx: Context, cross: Context | None = None) -> Tensor:
        if ORDERS[self.order].parallel:
            assert self.norm3 is not None
            return self.ffn(self.norm3(x), self.around(self.norm1, self.attention, x, ctx))
        x = self.around(self.norm1, self.attention, x, ctx)
        if self.cross is not None:
            x = self.around(self.norm2, self.cross, x, cross)
        return self.around(self.norm3, self.ffn, x)

    def around(self, norm: nn.Module | None, part: nn.Module, x: Tensor, *ctx: Any) -> Tensor:
        """The stream after a part, which adds x itself, where there is a residual."""
        normed = _same if norm is None else norm
        return ORDERS[self.order].around(normed, part, x, x if self.residual else None, *ctx)


def _same(x: Tensor) -> Tensor:
    return x


def _at(ctx: Context, cache: Any, layer: int, site: str) -> Context:
    """The context of one layer. In a small model's step dataclasses.replace, twice as slow, would be felt."""
    store = None if cache is None else cache.layer(layer)
    return type(ctx)(**{**vars(ctx), "store": store, "site": site})


class Stack(nn.Module):
    """The blocks of a tower, its relative bias and its last norm. (b t m) -> (b t m)."""

    def __init__(self, config: Tower):
        super().__init__()
        c = self.config = config
        layers = zip(c.blocks or range(c.layers), c.each("attention"), c.each("ffn"), strict=True)
        blocks: dict[int, Block] = {}
        self.blocks = nn.ModuleList(
            blocks[i] if i in blocks else blocks.setdefault(i, Block(c, a, f)) for i, a, f in layers
        )
        if not c.first_norm:
            blocks[0].norm1 = None
        first: dict[Any, Mechanism] = {}
        for block in blocks.values():
            block.attention.join(first.setdefault(block.attention.config, block.attention))
        self.relative: nn.Module | None = None
        if c.relative is not None and c.relative_shared:
            self.relative = c.relative.make()
        elif c.relative is not None:
            self.relative = nn.ModuleList(c.relative.make() for _ in range(c.layers))
        self.norm = c.norm.make(c.dim) if c.final_norm else None
        self.dropout = nn.Dropout(c.dropout if c.end_dropped else 0.0)

    def cache_specs(self, part: str = "attention") -> list[CacheSpec]:
        """What each layer's self-attention keeps, or its "cross" attention."""
        return [getattr(block, part).cache_spec() for block in self.blocks]

    def forward(
        self,
        x: Tensor,
        ctx: Context,
        cross: Context | None = None,
        caches: tuple[Any, Any] = (None, None),
    ) -> Tensor:
        """`caches`: of self-attention and of cross-attention; each block gets its layer of them."""
        self_cache, cross_cache = caches
        ctx = replace(ctx, relative=self.relative)
        for i, block in enumerate(self.blocks):
            drop = self.config.layer_drop
            if drop and self.training and drop > torch.rand([]):
                continue
            self_ctx = _at(ctx, self_cache, i, f"{ctx.site}{i}.self")
            if isinstance(self.relative, nn.ModuleList):
                self_ctx.relative = self.relative[i]
            cross_ctx = cross and _at(cross, cross_cache, i, f"{ctx.site}{i}.cross")
            x = block(x, self_ctx, cross_ctx)
        return self.dropout(x if self.norm is None else self.norm(x))
