"""Blocks of a prepared model that run in native code: each product takes its activation and residual along, and one new
token a row is turned, stored and attended to where the cache lies.

The residual stream is float32; weights and cache have the prepared precision. Anything else than one token a row over
a plain cache (prompts, encoders, pages) takes the joined form of regard.fast.prepare's attention. A probe is shown
what the native code read, and changes no bit. Equals `Block`; see test_lean_blocks_give_the_models_logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.context import Context
from regard.attention.core import Terms
from regard.attention.multihead import GroupedQueryAttention
from regard.block import Block
from regard.cache import Contiguous
from regard.cache.base import Layer
from regard.fast.joined import JoinedCrossAttention, Maker, joined
from regard.kernels.c import native
from regard.kernels.c.linear import ACTIVATIONS, MOST, NativeLinear, usable
from regard.kernels.c.rows import attend_one, enter, norm
from regard.kernels.linear import Fused
from regard.layers import FeedForward, RMSNorm
from regard.mask import Causal, Visible
from regard.models import EncoderDecoder, Model, Transformer

WORTH = 10_000_000  # parameters for which the native code is compiled if it is not yet


def suits(model: Model, precision: str) -> bool:
    """Whether every block of the model has a lean form here."""
    if not isinstance(model, (Transformer, EncoderDecoder)) or not next(model.parameters()).is_cpu:
        return False
    if not all(_plain(m) for m in model.modules() if isinstance(m, Block)):
        return False
    if sum(p.numel() for p in model.parameters()) >= WORTH:
        native.build()
    return usable(precision)


def _plain(block: Block) -> bool:
    crossed = block.cross is None or type(block.cross) is GroupedQueryAttention
    own = type(block.attention) is GroupedQueryAttention
    ffn = block.ffn
    return own and crossed and isinstance(ffn, FeedForward) and ffn.config.activation in ACTIVATIONS


class LeanMaker(Maker):
    """Copies a model whose blocks are all plain."""

    def make(self, module: nn.Module | None) -> Any:
        if isinstance(module, (nn.LayerNorm, RMSNorm)):
            return LeanNorm(module)
        if isinstance(module, FeedForward):
            return self.feed_forward(module)
        return super().make(module)

    def block(self, module: Block) -> nn.Module:
        own, cross = self.attention(module.attention), self.cross(module.cross)
        return self.twin(module, LeanBlock, attention=own, cross=cross)

    def linear(self, *linears: nn.Linear, act: str = "", gated: bool = False) -> nn.Module:
        made = self.pack(*joined(linears), self.precision, act, gated)
        self.give_up(linears)
        return made

    def pack(
        self,
        weight: Tensor,
        bias: Tensor | None,
        precision: str,
        act: str = "",
        gated: bool = False,
    ) -> nn.Module:
        if precision == "fp32" and self.rows > MOST:
            return Fused(weight, bias, act, gated)
        return NativeLinear(weight, bias, precision, act=act, gated=gated)

    def attention(self, module: Any) -> nn.Module:
        parts = {"wqkv": self.linear(module.wq, module.wk, module.wv), "wo": self.linear(module.wo)}
        return self.twin(module, LeanSelfAttention, wq=None, wk=None, wv=None, **parts)

    def cross(self, module: Any) -> nn.Module | None:
        if module is None:
            return None
        parts = {"wq": self.linear(module.wq), "wkv": self.linear(module.wk, module.wv)}
        parts["wo"] = self.linear(module.wo)
        return self.twin(module, LeanCrossAttention, wk=None, wv=None, **parts)

    def feed_forward(self, module: FeedForward) -> nn.Module:
        act, gate = module.config.activation, module.gate
        both = [module.up] if gate is None else [gate, module.up]
        up = self.linear(*both, act=act, gated=gate is not None)
        return self.twin(module, LeanFeedForward, gate=None, up=up, down=self.linear(module.down))

    def head_product(self, weight: Tensor, bias: Tensor | None, precision: str) -> nn.Module:
        return self.pack(weight, bias, precision)


class LeanNorm(nn.Module):
    """A layer or RMS norm on float32."""

    def __init__(self, module: Any):
        super().__init__()
        self.kind = "rms" if isinstance(module, RMSNorm) else "layer"
        self.weight, self.eps = module.weight.detach().float(), module.eps
        given = getattr(module, "bias", None)
        self.bias = None if given is None else given.detach().float()

    def __call__(self, x: Tensor) -> Tensor:
        return norm(x.float(), self.weight, self.bias, self.eps, self.kind)


class LeanBlock(Block):
    """`Block`, each part adding the residual on its way out."""

    attention: LeanSelfAttention
    cross: LeanCrossAttention | None
    ffn: LeanFeedForward

    def forward(self, x: Tensor, ctx: Context, cross: Context | None = None) -> Tensor:
        x = x.float()
        if self.post:
            x = self.norm1(self.attention(x, ctx, x))
            if self.cross is not None and cross is not None and self.norm2 is not None:
                x = self.norm2(self.cross(x, cross, x))
            return self.norm3(self.ffn(x, x))
        x = self.attention(self.norm1(x), ctx, x)
        if self.cross is not None and cross is not None and self.norm2 is not None:
            x = self.cross(self.norm2(x), cross, x)
        return self.ffn(self.norm3(x), x)


class LeanFeedForward(FeedForward):
    """`up` holds the gate and the activation."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return self.down(self.up(x), residual)


class LeanAttention(GroupedQueryAttention):
    @property
    def bare(self) -> bool:
        """Whether scores are q.k * scale and a bias, nothing more."""
        return self.config.softcap is None and self.sinks is None

    def out(self, o: Tensor, residual: Tensor) -> Tensor:
        return self.wo(o.flatten(2), residual)


class LeanSelfAttention(LeanAttention):
    """Queries, keys and values by one product."""

    wqkv: nn.Module

    def forward(self, x: Tensor, ctx: Context, residual: Tensor) -> Tensor:  # type: ignore[override]
        qkv = self.wqkv(x)  # b t (h + g) d + g e
        cache = _cache(ctx)
        if cache is not None and self.bare and self.q_norm is None and ctx.mask == Causal():
            return self.out(self.one(qkv[:, 0], ctx, cache), residual)
        h, g, d, e = self.h, self.g, self.d, self.e
        qk, v = qkv.split(((h + g) * d, g * e), -1)
        qk = qk.unflatten(-1, (h + g, d))
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat([self.q_norm(qk[:, :, :h]), self.k_norm(qk[:, :, h:])], 2)
        q, k = ctx.turn(qk, self.config.rope).split((h, g), 2)
        kept, k_pos = ctx.keep(k=k, v=v.unflatten(-1, (g, e)))
        seen, bias = ctx.visible(k_pos, self.config.window), ctx.bias(k_pos)
        return self.out(self.mix(q.to(kept["k"].dtype), kept, seen, ctx, bias), residual)

    def one(self, qkv: Tensor, ctx: Context, layer: Layer) -> Tensor:
        """One token a row: (b 1 h e)."""
        c, cache = self.config, layer.cache
        k, v, place = _memory(layer)
        pos = ctx.once("rows", lambda: ctx.pos.index[:, 0].expand(len(qkv)).contiguous())
        cos, sin = ctx.angles(c.rope, self.d, torch.float32) if c.rope else (None, None)
        layout = c.rope.layout if c.rope else ""
        enter(qkv, self.h, self.g, self.d, self.e, cos, sin, layout, k, v, pos)
        q, bias = qkv[:, : self.h * self.d].unflatten(-1, (self.h, self.d)), ctx.bias(cache.span)
        if bias is not None:
            given = bias
            bias = ctx.once("bias of rows", lambda: given[:, :, 0].float().contiguous())
        o = attend_one(q, k, v, pos, scale=self.scale, place=place, window=c.window, bias=bias)
        if ctx.probe is not None:
            terms = Terms(self.scale, None if bias is None else bias[:, :, None])
            _show(ctx, layer, q[:, None], ctx.visible(cache.span, c.window), terms)
        return o[:, None]


class LeanCrossAttention(LeanAttention, JoinedCrossAttention):
    """Keys and values of the memory by one product, read where they lie."""

    def forward(self, x: Tensor, ctx: Context, residual: Tensor) -> Tensor:  # type: ignore[override]
        q = self.wq(x).unflatten(-1, (self.h, self.d))
        if self.q_norm is not None:
            q = self.q_norm(q)
        layer = _cache(ctx)
        if layer is not None and ctx.memory is None and self.bare:
            (k, v, _), lengths = _memory(layer), layer.cache.lengths
            share = len(q) // len(lengths)
            pos = ctx.once("last", lambda: (lengths - 1).repeat_interleave(share))
            o = attend_one(q[:, 0], k, v, pos, share=share, scale=self.scale)
            if ctx.probe is not None:  # beams stand side by side, as in `mix`
                real = (layer.cache.span.index >= 0)[:, None, None]
                _show(ctx, layer, q.reshape(-1, share, self.h, self.d), real, Terms(self.scale))
            return self.out(o[:, None], residual)
        kept, k_pos = ctx.keep(**self.entries(x, ctx))
        seen, bias = ctx.visible(k_pos), ctx.bias(k_pos)
        return self.out(self.mix(q.to(kept["k"].dtype), kept, seen, ctx, bias), residual)


def _cache(ctx: Context) -> Layer | None:
    """The cache, if this is a step of one token a row over memory that lies by position."""
    store = ctx.store
    if ctx.backend != "sdpa" or ctx.pos.size != 1:
        return None
    return store if isinstance(store, Layer) and type(store.cache) is Contiguous else None


def _memory(layer: Layer) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values, and which row holds each token if not its own."""
    assert isinstance(layer.cache, Contiguous)
    slots = layer.cache.slots[layer.index]
    return slots["k"], slots["v"], layer.cache.place


def _show(ctx: Context, layer: Layer, q: Tensor, mask: Visible | Tensor, terms: Terms) -> None:
    """Let a probe see queries (b t h d) and the keys and values they met, brought to their own rows."""
    watch = ctx.watch()
    if watch is not None:
        kept, _ = layer.keep()
        q, k, v = (x.transpose(1, 2) for x in (q, kept["k"], kept["v"]))
        watch.see(q, k, v, mask, terms)
