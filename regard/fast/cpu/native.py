"""The parts that compute in C code, which takes activations, residuals and norms along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.attention.core import Terms
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.protocol import Context
from regard.block import ORDERS, Block, Stack, after, before
from regard.cache import Contiguous, Paged
from regard.cache.base import Layer
from regard.fast.cpu.join import (
    ADAPTED,
    Join,
    JoinedAttention,
    JoinedCrossAttention,
    as_rows,
    stacked,
)
from regard.fast.cpu.steps import CAUSAL, NativeStack, PackedStack, Tapes, last_of, step_of
from regard.fast.specialise import Row, share, unlike
from regard.kernels.c.linear import ACTIVATIONS, NativeLinear
from regard.kernels.c.rows import attend_one, norm, update_cache
from regard.kernels.linear import possible
from regard.layers import FeedForward, RMSNorm
from regard.mask import Visible


class Native(Join):
    """Every part in C code that has one."""

    def linear(self, *linears: nn.Linear, act: str = "", gated: bool = False) -> nn.Module:
        weight, bias = stacked(linears)
        precision = possible(self.precision, weight)
        back = self.back(linears[0], precision)
        made = NativeLinear(weight, bias, precision, act=act, gated=gated, back=back)
        self.give_up(linears)
        return made

    def attention(self, module: GroupedQueryAttention) -> nn.Module:
        parts = {"wqkv": self.linear(module.wq, module.wk, module.wv), "wo": self.linear(module.wo)}
        return self.copy_as(NativeAttention, module, wq=None, wk=None, wv=None, **parts)

    def cross(self, module: GroupedQueryAttention) -> nn.Module:
        parts = {"wq": self.linear(module.wq), "wkv": self.linear(module.wk, module.wv)}
        parts["wo"] = self.linear(module.wo)
        return self.copy_as(NativeCrossAttention, module, wk=None, wv=None, **parts)

    def stack(self, module: Stack) -> nn.Module:
        """Where all attention is in C a stack that records its steps, or one that leaves out padding; else as it is."""
        new = self.copy(module)
        parts = [part for block in new.blocks for part in (block.attention, block.cross)]
        if not all(part is None or isinstance(part, _Native) for part in parts):
            return new
        # Without padding tokens would no longer lie where their own vectors do.
        if module.config.reads_ids:
            return new
        recorded = isinstance(new.norm, NativeNorm | None) and all(map(_recorded, new.blocks))
        if module.relative is not None or module.out is not None or not recorded:
            return share(self.kind(PackedStack), new)
        new = share(self.kind(NativeStack), new)
        new.tapes = Tapes(new)
        return new

    def feed_forward(self, module: FeedForward) -> nn.Module | str:
        act, gate = module.config.activation, module.gate
        if act not in ACTIVATIONS or unlike(module, *ADAPTED):
            return super().feed_forward(module)
        both = [module.up] if gate is None else [gate, module.up]
        up = self.linear(*both, act=act, gated=gate is not None)
        down = self.linear(module.down)
        return self.copy_as(NativeFeedForward, module, gate=None, up=up, down=down)

    table: ClassVar[Mapping[type, Row]] = {
        **Join.table,
        nn.LayerNorm: lambda maker, m: NativeNorm(m),
        RMSNorm: lambda maker, m: NativeNorm(m),
        Stack: lambda maker, m: maker.stack(m),
    }


def _recorded(block: nn.Module) -> bool:
    """Whether a step of a block is C calls alone, each on what another gave."""
    # What another order makes of the stream would be that of the first step in all that are played.
    if not isinstance(block, Block) or type(block).around is not Block.around:
        return False
    if ORDERS[block.order].around not in (before, after):
        return False
    if block.input is not None or block.gain is not None or block.mix1 is not None:
        return False
    norms = (block.norm1, block.norm2, block.norm3)
    if not all(isinstance(norm, NativeNorm | None) for norm in norms):
        return False
    for part in filter(None, (block.attention, block.cross)):
        if not isinstance(part, _Native) or not part.bare or part.q_norm or part.wg:
            return False
    parts = filter(None, (block.attention, block.cross, block.ffn))
    return isinstance(block.ffn, NativeFeedForward) and all(p.add.norm is None for p in parts)


class NativeNorm(nn.Module):
    """A layer or RMS norm on float32."""

    def __init__(self, module: nn.LayerNorm | RMSNorm):
        super().__init__()
        self.kind = "rms" if isinstance(module, RMSNorm) else "layer"
        weight = module.gain if isinstance(module, RMSNorm) else module.weight
        self.weight, self.eps = weight.detach().float(), module.eps
        given = getattr(module, "bias", None)
        self.bias = None if given is None else given.detach().float()

    def __call__(self, x: Tensor) -> Tensor:
        return norm(x.float().contiguous(), self.weight, self.bias, self.eps, self.kind)


class NativeFeedForward(FeedForward):
    """`up` holds the gate and the activation, `down` adds the residual."""

    def project_up(self, x: Tensor) -> Tensor:
        return self.up(x)

    def project_down(self, h: Tensor, residual: Tensor | None) -> Tensor:
        return super().project_down(h, residual) if self.add.norm else self.down(h, residual)


class _Native(GroupedQueryAttention):
    @property
    def bare(self) -> bool:
        """Whether scores are q.k * scale and a bias, nothing more."""
        return self.config.softcap is None and self.sinks is None

    def attend(self, x: Tensor, ctx: Context) -> Tensor:
        o, packing = super().attend(x, ctx), ctx.memo.get("packing")
        return o if packing is None else packing.pack(o)

    def queries(self, x: Tensor, ctx: Context) -> Tensor:
        return self.as_queries(as_rows(self.wq(x), ctx), ctx)

    def core_attention(self, q: Tensor, kept: dict[str, Tensor], *rest: Any) -> Tensor:
        return super().core_attention(q.to(kept["k"].dtype), kept, *rest)

    def project_out(self, o: Tensor, residual: Tensor | None = None) -> Tensor:
        return (
            super().project_out(o, residual) if self.add.norm else self.wo(o.flatten(2), residual)
        )


class NativeAttention(_Native, JoinedAttention):
    """One new token per row is turned, stored and attended to where the cache lies."""

    def attend(self, x: Tensor, ctx: Context) -> Tensor:
        layer = step_of(ctx)
        if layer is None or not self.bare or ctx.mask != CAUSAL:
            return super().attend(x, ctx)
        qkv, c, cache = self.wqkv(x).squeeze(1), self.config, layer.cache
        if self.q_norm is not None:
            h, g, d = self.h, self.g, self.d
            q, k, v = qkv.split((h * d, g * d, g * self.e), -1)
            q, k = self.as_heads(q, self.q_norm), self.as_heads(k, self.k_norm)
            qkv = torch.cat([q.flatten(1), k.flatten(1), v], -1)
        k, v, place, page = _storage(layer, ctx)
        pos = ctx.once("rows", lambda: ctx.pos.index[:, 0].expand(len(qkv)).contiguous())
        cos, sin = ctx.angles(c.rope, self.d, torch.float32) if c.rope else (None, None)
        layout = c.rope.layout if c.rope else ""
        update_cache(qkv, self.h, self.g, self.d, self.e, cos, sin, layout, k, v, pos, place, page)
        q = qkv.narrow(1, 0, self.h * self.d).view(-1, self.h, self.d)
        bias = ctx.bias(cache.span)
        if bias is not None:
            given = bias
            key = "bias of rows", ctx.relative
            bias = ctx.once(key, lambda: given[:, :, 0].float().contiguous())
        more = {"scale": self.scale, "place": place, "page": page, "window": c.window}
        o = attend_one(q, k, v, pos, **more, bias=bias)
        if ctx.probe is not None:
            terms = Terms(self.scale, None if bias is None else bias[:, :, None])
            _show(ctx, layer, q[:, None], self.visible(cache.span, ctx), terms)
        return o.unsqueeze(1)


class NativeCrossAttention(_Native, JoinedCrossAttention):
    """Keys and values of the memory are read where they lie."""

    def attend(self, x: Tensor, ctx: Context) -> Tensor:
        layer = step_of(ctx)
        if layer is None or ctx.memory is not None or not self.bare:
            return super().attend(x, ctx)
        q = self.queries(x, ctx)
        k, v, place, page = _storage(layer, ctx)
        share = len(q) // layer.cache.batch
        pos = ctx.once("last", lambda: last_of(layer.cache, len(q)))
        o = attend_one(q[:, 0], k, v, pos, place=place, page=page, share=share, scale=self.scale)
        # Beams stand side by side, as in `core_attention`.
        if ctx.probe is not None:
            real = (layer.cache.span.index >= 0)[:, None, None]
            _show(ctx, layer, q.reshape(-1, share, self.h, self.d), real, Terms(self.scale))
        return o[:, None]


def _storage(layer: Layer, ctx: Context) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Keys, values, and in pages which of them hold each row's tokens, and how many each."""
    cache = layer.cache
    if isinstance(cache, Paged):
        pages = cache.pool.stores[layer.index]
        return pages["k"], pages["v"], ctx.once("place", lambda: cache.table), cache.page
    assert isinstance(cache, Contiguous)
    slots = cache.slots[layer.index]
    return slots["k"], slots["v"], None, 0


def _show(ctx: Context, layer: Layer, q: Tensor, mask: Visible | Tensor, terms: Terms) -> None:
    """Let a probe see queries (b t h d) and the keys and values they met, brought to their own rows."""
    watch = ctx.watch()
    if watch is not None:
        kept, _ = layer.update()
        q, k, v = (x.transpose(1, 2) for x in (q, kept["k"], kept["v"]))
        watch.see(q, k, v, mask, terms)
