"""A model copied for running: the same tree of modules, on shared or packed weights, products that share their input
joined into one. `Maker` copies; regard.fast.prepare says when, and what it promises."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.context import Context
from regard.attention.latent import LatentAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.block import Block
from regard.kernels.linear import THEN, Packed, gelu_tanh, pack
from regard.layers import FeedForward, LMHead, times
from regard.models.adapt import LowRank
from regard.moe import MixtureOfExperts


@functools.cache
def _direct(cls: Any) -> type:
    """`cls` without torch's hooks: a call is `forward` and nothing else, which a small model feels."""
    return type(cls.__name__, (cls,), {"__call__": cls.forward})


# --- the copy -----------------------------------------------------------------------------------------------------


class Maker:
    """Copies a model part by part: the same tree of modules, on shared or packed weights."""

    def __init__(self, precision: str, rows: int, dtype: torch.dtype | None, spent: set[int]):
        """`spent`: parameters (their ids) that may be given up when they have been packed."""
        self.precision, self.rows, self.dtype, self.spent = precision, rows, dtype, spent
        self.cast: dict[int, nn.Parameter] = {}  # a weight used twice stays one

    def make(self, module: nn.Module | None) -> Any:
        if isinstance(module, nn.Linear):
            return self.product(module)
        if isinstance(module, nn.Dropout):
            return _direct(nn.Identity)()
        if isinstance(module, FeedForward):
            return self.feed_forward(module)
        if isinstance(module, Block):
            return self.block(module)
        if isinstance(module, LatentAttention):  # whose absorbed form reads the weight itself
            return self.twin(module, w_ukv=self.unpacked(module.w_ukv))
        if isinstance(module, MixtureOfExperts):  # likewise
            return self.twin(module, router=self.unpacked(module.router))
        if isinstance(module, nn.RNNBase):  # it holds its weights twice over
            return copy.copy(module)
        return None if module is None else self.twin(module)

    def twin(self, module: nn.Module, kind: Any = None, **parts: nn.Module | None) -> Any:
        """A copy of `module`, of class `kind` if given, with `parts` instead of its own; the rest is made."""
        new, kind = copy.copy(module), kind or type(module)
        new.__class__ = _direct(kind)
        wide = getattr(module, "wide", ())
        new._parameters = {
            n: p if n in wide else self.parameter(p) for n, p in module._parameters.items()
        }
        new._buffers = dict(module._buffers)
        new._modules = {
            n: parts[n] if n in parts else self.make(m) for n, m in module._modules.items()
        } | parts
        return new

    def unpacked(self, linear: nn.Module) -> nn.Module:
        """A linear layer whose weight others read: a plain one, with what LoRA adds in it."""
        if not isinstance(linear, LowRank):
            return self.twin(linear)
        new, weight = self.twin(linear.base), linear.weight.detach()
        new.weight = nn.Parameter(weight.to(self.dtype or weight.dtype), requires_grad=False)
        return new

    def parameter(self, p: Any) -> Any:
        if p is None:
            return None
        if id(p) not in self.cast:
            x = p.detach().to(self.dtype or p.dtype)
            self.cast[id(p)] = nn.Parameter(x, requires_grad=False)
        return self.cast[id(p)]

    def product(self, *linears: nn.Linear, out: torch.dtype | None = None) -> nn.Module:
        """One layer that gives the outputs of all `linears` after each other."""
        made = pack(*joined(linears), self.precision, rows=self.rows, out=out)
        self.give_up(linears)
        return made

    def give_up(self, linears: Sequence[nn.Linear]) -> None:
        for linear in linears:
            if id(linear.weight) in self.spent:
                linear.weight.data = linear.weight.data.new_empty(0)

    def block(self, module: Block) -> nn.Module:
        own, cross = self.attention(module.attention), self.cross(module.cross)
        return self.twin(module, attention=own, cross=cross)

    def attention(self, module: nn.Module) -> nn.Module:
        if not isinstance(module, GroupedQueryAttention):
            return self.make(module)
        wqkv = self.product(module.wq, module.wk, module.wv)
        return self.twin(module, JoinedSelfAttention, wq=None, wk=None, wv=None, wqkv=wqkv)

    def cross(self, module: nn.Module | None) -> nn.Module | None:
        if not isinstance(module, GroupedQueryAttention):
            return self.make(module)
        wkv = self.product(module.wk, module.wv)
        return self.twin(module, JoinedCrossAttention, wk=None, wv=None, wkv=wkv)

    def feed_forward(self, module: FeedForward) -> nn.Module:
        """Between the products int8 stays in the float32 that it gives, and gelu_tanh is faster there."""
        name = module.config.activation
        inner = torch.float32 if self.precision == "int8" or name == "gelu_tanh" else None
        down = self.product(module.down, out=self.dtype)
        if module.gate is not None:
            both = self.product(module.gate, module.up, out=inner)
            parts = {"gate": None, "up": None, "gate_up": both, "down": down}
            new = self.twin(module, JoinedFeedForward, **parts)
        else:
            up = self.product(module.up, out=inner)
            new = self.twin(module, up=up, down=down)
            if isinstance(up, Packed) and name in THEN:
                up.then, up.out, new.act = THEN[name], None, _same
                return new
        if name == "gelu_tanh":
            new.act = gelu_tanh
        return new

    def head(self, module: LMHead, embedding: Any) -> nn.Module:
        weight = embedding if module.weight is None else module.weight
        precision = "int8" if self.precision == "int4" else self.precision
        if precision != "int8":  # a head that needs no packing shares it
            weight = self.parameter(weight)
        new = self.twin(module, PackedHead)
        new.product = self.head_product(weight, module.bias, precision)
        new.weight = new.bias = None
        return new

    def head_product(self, weight: Tensor, bias: Tensor | None, precision: str) -> nn.Module:
        return pack(weight, bias, precision, rows=self.rows, out=torch.float32, alike=True)


def joined(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of all of them, one below the other."""
    if len(linears) == 1:
        return linears[0].weight, linears[0].bias
    biases = [w.bias.detach() for w in linears if w.bias is not None]
    weight = torch.cat([w.weight.detach() for w in linears])
    return weight, torch.cat(biases) if biases else None


def _same(x: Tensor) -> Tensor:
    return x


# --- the joined parts ---------------------------------------------------------------------------------------------


class JoinedSelfAttention(GroupedQueryAttention):
    """Queries, keys and values by one product; queries and keys are turned together."""

    wqkv: nn.Module

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        h, g, d, e = self.h, self.g, self.d, self.e
        qk, v = self.wqkv(x).split(((h + g) * d, g * e), -1)
        qk = qk.unflatten(-1, (h + g, d))  # b t (h + g) d
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat([self.q_norm(qk[:, :, :h]), self.k_norm(qk[:, :, h:])], 2)
        q, k = ctx.turn(qk, self.config.rope).split((h, g), 2)
        kept, k_pos = ctx.keep(k=k, v=v.unflatten(-1, (g, e)))
        o = self.mix(q, kept, ctx.visible(k_pos, self.config.window), ctx, ctx.bias(k_pos))
        return self.wo(o.flatten(2))


class JoinedCrossAttention(GroupedQueryAttention):
    """Keys and values of the memory by one product."""

    wkv: nn.Module

    def entries(self, x: Tensor, ctx: Context) -> dict[str, Tensor]:
        if ctx.memory is None:
            return {}
        k, v = self.wkv(ctx.memory).split((self.g * self.d, self.g * self.e), -1)
        k = k.unflatten(-1, (self.g, self.d))
        v = v.unflatten(-1, (self.g, self.e))
        return {"k": k if self.k_norm is None else self.k_norm(k), "v": v}


class JoinedFeedForward(FeedForward):
    """Gate and up by one product."""

    gate_up: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(times(up, self.act(gate)))


class PackedHead(LMHead):
    """With a weight of its own."""

    product: nn.Module

    def forward(self, h: Tensor, embedding: Tensor) -> Tensor:
        return self.product(self.features(h))
