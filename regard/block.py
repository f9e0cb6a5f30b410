"""The one residual block, and a tower of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Attention, Context, CrossAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.protocol import Mechanism
from regard.cache import CacheSpec
from regard.config import (
    Amount,
    Choice,
    Count,
    Excludes,
    Fraction,
    Kinds,
    Positive,
    Whole,
    settings,
)
from regard.errors import UsageError
from regard.layers import (
    MLP,
    Add,
    Gain,
    LayerScale,
    Norm,
    Norms,
    RMSNorm,
    ScaledAdd,
    UnitNorm,
    activation,
)
from regard.mask import Causal, Full, Mask
from regard.moe import MoE
from regard.position import Relative


class FeedForwardConfig(Protocol):
    """What a tower asks of the config of a feed-forward: a module f(x, residual), which adds itself by `add`."""

    def make(self, dim: int, add: Add | None = None) -> nn.Module: ...


FEED_FORWARDS: dict[str, type[FeedForwardConfig]] = {"mlp": MLP, "moe": MoE}
FeedForwards = Annotated[FeedForwardConfig, Kinds(FEED_FORWARDS)]


def own_norms(ffn: FeedForwardConfig | None) -> bool:
    """Whether a feed-forward reads the stream by norms of its own."""
    return getattr(ffn, "normed", None) is not None


def by_id(ffn: FeedForwardConfig | None) -> bool:
    """Whether a feed-forward is told the tokens' ids."""
    return bool(getattr(ffn, "hashed", 0))


# --- a vector of its own for each layer and token ------------------------------------------------------------------


@settings
class PerLayer:
    """Beside the stream each layer i is given e_i = (E_i[token] sqrt(width) + norm(W_i x dim^-1/2)) / sqrt(2), x the
    embedding, and adds norm(P (act(G stream) * e_i)) to the stream at its end (Gemma 4)."""

    width: Count  # of these vectors
    vocab: Count  # rows of the tables
    eps: Amount = 1e-6  # of the norms
    activation: str = "gelu_tanh"  # of the gate
    kind: str = "per_layer"


class LayerTables(nn.Module):
    """ids (b t) and the embedding (b t m) -> what each layer is given (b t l width)."""

    def __init__(self, config: PerLayer, dim: int, layers: int):
        super().__init__()
        c, self.config = config, config
        self.weight = nn.Parameter(torch.empty(c.vocab, layers * c.width).normal_(std=0.02))
        self.project = nn.Linear(dim, layers * c.width, bias=False)
        self.norm = RMSNorm(c.width, c.eps)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        width = self.config.width
        token = F.embedding(ids, self.weight).unflatten(-1, (-1, width)) * width**0.5
        seen = (self.project(x) * x.shape[-1] ** -0.5).unflatten(-1, (-1, width))
        return (self.norm(seen) + token) * 2**-0.5


class LayerInput(nn.Module):
    """What a layer makes of its vector (b t width), added to the stream."""

    def __init__(self, config: PerLayer, dim: int):
        super().__init__()
        c = config
        self.act = activation(c.activation)
        self.gate = nn.Linear(dim, c.width, bias=False)
        self.project = nn.Linear(c.width, dim, bias=False)
        self.norm = RMSNorm(dim, c.eps)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        return x + self.norm(self.project(self.act(self.gate(x)) * given))


# --- several streams ----------------------------------------------------------------------------------------------


@settings
class Streams:
    """Hyper-connections (Zhu et al. 2024, arXiv:2409.19606), held to doubly stochastic matrices (DeepSeek-V4): `count`
    streams X (n m) instead of one. A part f reads p X and gives X' = M^T X + w f(norm(p X)).

    The numbers p, w and M are made of X for each token: (s_1 u, s_2 v, s_3 N) + b of a linear layer on all streams,
    normed without weights; p = sigmoid(u) + eps, w = 2 sigmoid(v), M = softmax(N) + eps, whose columns and rows are
    then divided by their sums, `rounds` times by turns. At the end the streams are summed by such a p."""

    count: Count = 4  # n
    rounds: Count = 20  # of Sinkhorn and Knopp
    eps: Amount = 1e-6  # added to what is divided by
    norm_eps: Amount = 1e-6  # of the norm
    kind: str = "streams"


class Mix(nn.Module):
    """The numbers that streams are mixed by, in float32 at least."""

    wide = ("weight", "bias", "scale")

    def __init__(self, config: Streams, dim: int, last: bool = False):
        super().__init__()
        c, self.config, n = config, config, config.count
        size = n if last else (2 + n) * n
        self.weight = nn.Parameter(torch.empty(size, n * dim).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(size))
        self.scale = nn.Parameter(torch.ones(1 if last else 3))
        self.norm = UnitNorm(c.norm_eps)

    def numbers(self, x: Tensor) -> Tensor:
        """(b t n m) -> (b t size), before scale and bias."""
        kind = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return self.product(self.norm(x.flatten(2).to(kind)), self.weight.to(kind), None)

    def read(self, x: Tensor, u: Tensor) -> Tensor:
        """p X."""
        p = self.sigmoid(u) + self.config.eps
        return (p[..., None] * x).sum(2).to(x.dtype)

    def end(self, x: Tensor) -> Tensor:
        """One stream of all."""
        return self.read(x, self.numbers(x) * self.scale + self.bias)

    def forward(self, x: Tensor, part: Normed) -> Tensor:
        n, eps = self.config.count, self.config.eps
        each = self.numbers(x).split([n, n, n * n], -1)
        pairs = zip(each, self.scale, self.bias.split([n, n, n * n]), strict=True)
        u, v, m = (y * s + b for y, s, b in pairs)
        mix = m.unflatten(-1, (n, n)).softmax(-1) + eps
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
        for _ in range(self.config.rounds - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + eps)
            mix = mix / (mix.sum(-2, keepdim=True) + eps)
        y = part(self.read(x, u))
        # Row after row: a product of matrices so small would sum otherwise in other company.
        moved = (mix.to(x.dtype)[..., None] * x[..., None, :]).sum(2)
        return 2 * self.sigmoid(v).to(x.dtype)[..., None] * y[:, :, None] + moved

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


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
    shared: bool = False  # parallel: through one norm


ORDERS: dict[str, Order] = {
    "pre": Order(),
    "post": Order(after),
    "sandwich": Order(added=True),
    "inner": Order(outer=False, added=True),
    "parallel": Order(parallel=True),
    "shared": Order(parallel=True, shared=True),
}

APART = "source and target have no common positions"


@settings
class Tower:
    """`layers` blocks of width `dim`. `attention` and `ffn` are one config for all layers, or one per layer.

    order "pre": x + f(norm(x)), with a norm at the end; "post": norm(x + f(x)), as in 2017; "sandwich": x +
    norm(f(norm(x))) (Gemma); "inner": x + norm(f(x)) (OLMo 2); "parallel": x + f(norm(x)) + g(norm'(x)) (GPT-NeoX);
    "shared": the same with one norm for both (GPT-J, Phi).
    `dropout` falls on what each part adds to the stream. `layer_drop`: the share of layers that a step of training
    leaves out (Fan et al. 2020, arXiv:1909.11556)."""

    dim: Count  # width of the stream
    layers: Count  # blocks
    attention: Attention | tuple[Attention, ...]  # of each block
    # of each block; None: a block has none (Mamba)
    ffn: FeedForwards | tuple[FeedForwards | None, ...] | None
    # attention to an encoder's states
    cross: (
        Annotated[CrossAttention, Excludes("cross.rope", APART), Excludes("cross.window", APART)]
        | None
    ) = None
    memory_dim: Count | None = None  # width of what `cross` attends to; default: dim
    norm: Norms = Norm()  # of each part; "batch": BatchNorm
    # where it stands: pre, post, sandwich, inner, parallel, shared; one for all layers, or one per layer
    order: Annotated[str, Choice(ORDERS)] | tuple[Annotated[str, Choice(ORDERS)], ...] = "pre"
    final_norm: bool = True  # one more at the end (pre)
    causal: bool = True  # a token sees those before it alone
    relative: Relative | None = None  # a bias on scores by distance
    dropout: Fraction = 0.0  # on what each part adds, in training
    attention_dropped: bool = True  # False: only on what feed-forwards add (DistilBERT)
    ffn_dropped: bool = True  # False: only on what attention adds (ALBERT, ModernBERT)
    end_dropped: bool = False  # True: on what leaves the tower too (T5)
    layer_drop: Fraction = 0.0  # share of layers that a step of training leaves out
    path_drop: Fraction = 0.0  # share of rows to which a part adds nothing in a step of training
    # what parts add, each feature times a trained number that starts at this (DINOv2)
    layer_scale: Amount | None = None
    residual_gain: Positive = 1.0  # what each part adds is multiplied by it (Granite)
    # False: a part replaces the stream instead of adding to it, to see what the sum is for
    residual: bool = True
    first_norm: bool = True  # False: the first attention reads the embedding as it is (ModernBERT)
    # Which block each layer is, counted from 0, where layers share them (ALBERT); None: each its own.
    blocks: tuple[Whole, ...] | None = None
    # The last so many layers read the keys and values of the last one before them with the same attention (Gemma 4).
    borrowing: Whole = 0
    per_layer: PerLayer | None = None  # a vector for each layer and token, beside the stream
    gained: bool = False  # what a block gives is multiplied by a number (Gemma 4)
    streams: Streams | None = None  # several, mixed around each part (DeepSeek-V4)
    # width of what leaves it, by a linear layer without a bias (OPT 350M); default: dim
    out_dim: Count | None = None
    relative_shared: bool = True  # False: each layer has a bias of its own (UMT5)
    kind: str = "tower"

    def __post_init__(self) -> None:
        for name in ("attention", "ffn", "order"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != self.layers:
                given = f"{name} lists {len(value)} layers, layers={self.layers}"
                raise UsageError(f"{given}; give one, or one per layer")
        self._check_orders()
        if not self.first_norm and (self.order != "pre" or self.blocks is not None):
            raise UsageError("first_norm=False is for order 'pre' and layers that share no block")
        if self.blocks is not None:
            used = sorted(set(self.blocks))
            if len(self.blocks) != self.layers or used != list(range(len(used))):
                given = f"blocks={list(self.blocks)} must give each of {self.layers} layers"
                raise UsageError(f"{given} its block, from 0 on without a gap")
            kinds = (self.each(name) for name in ("attention", "ffn", "order"))
            if len(set(zip(self.blocks, *kinds, strict=True))) != len(used):
                raise UsageError("layers that share a block must have one attention and one ffn")
        for name in ("chunk", "temperature"):
            if getattr(self.cross, name, None) is not None:
                raise UsageError(f"cross.{name}: {APART}; leave it out")
        self._check_streams()
        self._check_borrowing()
        heads = {a.heads for a in self.each("attention")}
        if self.relative and any(a.kind == "compressed" for a in self.each("attention")):
            raise UsageError("entries of compressed attention have no distance; leave relative out")
        if self.relative is not None and heads != {self.relative.heads}:
            given = f"relative.heads={self.relative.heads}"
            raise UsageError(f"{given}, but attention has {sorted(heads)} heads")

    def _check_orders(self) -> None:
        for order, ffn in zip(self.each("order"), self.each("ffn"), strict=True):
            if self.layer_scale is not None and ORDERS[order].added:
                raise UsageError(f"order {order!r} norms what is added; leave layer_scale out")
            if ORDERS[order].parallel and self.cross is not None:
                raise UsageError(f"order {order!r} has no cross-attention; choose pre or post")
            if order in ("post", "parallel", "shared") and own_norms(ffn):
                raise UsageError(f"ffn.normed: order {order!r} has another norm; choose sandwich")

    def _check_streams(self) -> None:
        if self.streams is None:
            return
        if self.order != "pre" or self.cross or self.per_layer or self.gained:
            raise UsageError("streams are for order 'pre' alone: no cross, per_layer or gained")
        if not self.residual:
            raise UsageError("streams are sums; leave residual out")
        if None in self.each("ffn"):
            raise UsageError("streams are mixed around attention and feed-forward; give an ffn")

    def _check_borrowing(self) -> None:
        attentions, own = self.each("attention"), self.layers - self.borrowing
        if not self.borrowing:
            return
        if self.blocks is not None or self.layer_drop:
            raise UsageError("borrowing is for layers that share no block, and are not left out")
        if any(a.kind != "gqa" for a in attentions) or set(attentions[own:]) - set(
            attentions[:own]
        ):
            why = f"borrowing={self.borrowing} of {self.layers} layers"
            raise UsageError(f"{why}: each must find the same attention, a gqa, in one before them")

    @property
    def reads_ids(self) -> bool:
        """Whether a part of it is told which tokens the stream is made of."""
        return self.per_layer is not None or any(map(by_id, self.each("ffn")))

    def lender(self, layer: int) -> int | None:
        """The layer whose keys and values this one reads, or None if it has its own."""
        attentions, own = self.each("attention"), self.layers - self.borrowing
        same = (i for i in reversed(range(own)) if attentions[i] == attentions[layer])
        return next(same) if layer >= own else None

    @property
    def outputs(self) -> int:
        """The width of what leaves it."""
        return self.out_dim or self.dim

    def each(self, name: str) -> tuple[Any, ...]:
        """What `name` ("attention", "ffn" or "order") is for every layer."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,) * self.layers

    @property
    def mask(self) -> Mask:
        return Causal() if self.causal else Full()


class Block(nn.Module):
    """Self-attention, optional cross-attention, feed-forward; each adds itself to the stream."""

    def __init__(
        self,
        config: Tower,
        attention: Attention,
        ffn: FeedForwards | None,
        name: str = "",
    ):
        """`name`: of its order, where the tower has one for each layer."""
        super().__init__()
        name = name or config.each("order")[0]
        c, dim, order = config, config.dim, ORDERS[name]
        self.order, self.residual = name, c.residual

        def norm() -> nn.Module | None:
            return c.norm.make(dim) if order.outer else None

        def add(dropped: bool) -> Add:
            scale = None if c.layer_scale is None else LayerScale(dim, c.layer_scale)
            normed = c.norm.make(dim) if order.added else scale
            how = (c.dropout if dropped else 0.0, normed, c.path_drop)
            return Add(*how) if c.residual_gain == 1.0 else ScaledAdd(c.residual_gain, *how)

        self.attention, self.norm1 = attention.make(dim, add=add(c.attention_dropped)), norm()
        self.cross, self.norm2 = None, None
        if c.cross is not None:
            self.cross = c.cross.make(dim, c.memory_dim, add(c.attention_dropped))
            self.norm2 = norm()
        self.ffn, self.norm3 = None, None
        if ffn is not None:
            self.ffn = ffn.make(dim, add(c.ffn_dropped))
            self.norm3 = None if order.shared or own_norms(ffn) else norm()
        self.hashed = by_id(ffn)
        self.input = None if c.per_layer is None else LayerInput(c.per_layer, dim)
        self.gain = Gain() if c.gained else None
        mixed = c.streams
        self.mix1 = None if mixed is None else Mix(mixed, dim)
        self.mix3 = None if mixed is None else Mix(mixed, dim)

    def forward(self, x: Tensor, ctx: Context, cross: Context | None = None) -> Tensor:
        feed: Any = self.ffn
        if self.hashed:
            feed = partial(feed, ids=ctx.ids)
        if ORDERS[self.order].parallel and feed is not None:
            return self.end(self.both(x, feed, ctx), ctx)
        if self.mix1 is not None and self.mix3 is not None:
            x = self.mix1(x, lambda y: self.attention(_normed(self.norm1, y), ctx))
            return self.mix3(x, lambda y: feed(_normed(self.norm3, y)))
        x = self.around(self.norm1, self.attention, x, ctx)
        if self.cross is not None:
            x = self.around(self.norm2, self.cross, x, cross)
        return self.end(x if feed is None else self.around(self.norm3, feed, x), ctx)

    def both(self, x: Tensor, feed: Any, ctx: Context) -> Tensor:
        """Attention and feed-forward of one stream, by norms of their own or by one."""
        if self.norm3 is not None:
            return feed(self.norm3(x), self.around(self.norm1, self.attention, x, ctx))
        normed = x if self.norm1 is None else self.norm1(x)
        return feed(normed, self.around(lambda _: normed, self.attention, x, ctx))

    def end(self, x: Tensor, ctx: Context) -> Tensor:
        """The stream after both parts, as this block gives it."""
        if self.input is not None:
            x = self.input(x, ctx.memo["per layer"][:, :, ctx.layer])
        return x if self.gain is None else self.gain(x)

    def around(self, norm: Normed | None, part: Any, x: Tensor, *ctx: Any) -> Tensor:
        """The stream after a part, which adds x itself, where there is a residual."""
        normed = _same if norm is None else norm
        return ORDERS[self.order].around(normed, part, x, x if self.residual else None, *ctx)


def _same(x: Tensor) -> Tensor:
    return x


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def layer_context(ctx: Context, cache: Any, layer: int, site: str) -> Context:
    """The context of one layer. In a small model's step dataclasses.replace, twice as slow, would be felt."""
    store = None if cache is None else cache.layer(layer)
    return type(ctx)(**{**vars(ctx), "store": store, "site": site, "layer": layer})


class Stack(nn.Module):
    """The blocks of a tower, its relative bias and its last norm. (b t m) -> (b t m)."""

    def __init__(self, config: Tower):
        super().__init__()
        c = self.config = config
        kinds = zip(c.each("attention"), c.each("ffn"), c.each("order"), strict=True)
        layers = zip(c.blocks or range(c.layers), kinds, strict=True)
        blocks: dict[int, Block] = {}
        self.blocks = nn.ModuleList(
            blocks[i] if i in blocks else blocks.setdefault(i, Block(c, *kind))
            for i, kind in layers
        )
        if not c.first_norm:
            blocks[0].norm1 = None
        first: dict[Any, Mechanism] = {}
        for block in blocks.values():
            block.attention.join(first.setdefault(block.attention.config, block.attention))
        for i in range(c.layers - c.borrowing, c.layers):
            lender = c.lender(i)
            assert lender is not None
            reader, source = blocks[i].attention, blocks[lender].attention
            assert isinstance(reader, GroupedQueryAttention)
            assert isinstance(source, GroupedQueryAttention)
            reader.borrow(lender)
            source.lends = lender
        tables = c.per_layer
        self.mix = None if c.streams is None else Mix(c.streams, c.dim, last=True)
        self.tables = None if tables is None else LayerTables(tables, c.dim, c.layers)
        self.relative: nn.Module | None = None
        if c.relative is not None and c.relative_shared:
            self.relative = c.relative.make()
        elif c.relative is not None:
            self.relative = nn.ModuleList(c.relative.make() for _ in range(c.layers))
        self.norm = c.norm.make(c.dim) if c.final_norm else None
        self.out = nn.Linear(c.dim, c.out_dim, bias=False) if c.out_dim else None
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
        if self.tables is not None:
            assert ctx.ids is not None
            ctx.memo["per layer"] = self.tables(ctx.ids, x)
        if self.config.streams is not None:
            x = x[:, :, None].expand(-1, -1, self.config.streams.count, -1)
        for i, block in enumerate(self.blocks):
            drop = self.config.layer_drop
            if drop and self.training and drop > torch.rand([]):
                continue
            self_ctx = layer_context(ctx, self_cache, i, f"{ctx.site}{i}.self")
            if isinstance(self.relative, nn.ModuleList):
                self_ctx.relative = self.relative[i]
            cross_ctx = cross and layer_context(cross, cross_cache, i, f"{ctx.site}{i}.cross")
            x = block(x, self_ctx, cross_ctx)
        x = x if self.mix is None else self.mix.end(x)
        x = x if self.norm is None else self.norm(x)
        return self.dropout(x if self.out is None else self.out(x))
