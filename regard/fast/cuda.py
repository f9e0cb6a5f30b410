"""Target cuda: parts for a step of one token per row, or for prompts laid end to end, over pages of memory that stay
where they are, as a CUDA graph must have it. Block and Stack run as they are; what flows through them is a `Stream`.

Matrices that read the same input are one matrix (q|k|v, gate|up, and MLA's two down-projections), of which the plain
model's are views from then on: nothing is held twice. A norm is left to the product that reads it, and of many rows a
sum is left to the norm that reads it. Where kernels are off, or a shape has none, everything is torch;
test_graphs_give_the_engine_tokens holds both against the model itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.latent import LatentAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.protocol import Context
from regard.block import Block, Stack
from regard.fast.specialise import Row, Specialise, direct
from regard.kernels.triton import attention as gpu_attention
from regard.kernels.triton import latent as gpu_latent
from regard.kernels.triton import prompt as gpu_prompt
from regard.kernels.triton.experts import FEW, Experts, choose, experts, scores, suits
from regard.kernels.triton.experts import reference as expert_reference
from regard.kernels.triton.linear import ACTIVATIONS, MOST, Rms, linear, ready, reference
from regard.kernels.triton.prompt import Pack
from regard.kernels.triton.wide import add_norm, gated, product, summed
from regard.layers import FeedForward, LMHead, RMSNorm
from regard.models import Model
from regard.moe import MixtureOfExperts
from regard.position import LongRope, Rope


def why_not(model: Any) -> str:
    """What about a model has no static step, or nothing."""
    c = model.config
    if c.kind != "transformer" or c.embedding.kind != "tokens":
        return f"{type(c).__name__} is not one tower on tokens"
    tower, position = c.tower, c.embedding.position
    if not tower.causal or tower.cross or tower.relative:
        return "its tower is not causal, or has a bias on positions"
    if c.head is None or c.head.kind != "lm":
        return "it has no language-model head"
    if position is not None and position.kind == "learned" and position.skip is not None:
        return "its positions skip tokens"
    if any(a.kind not in ("gqa", "mla") for a in tower.each("attention")):
        return "its attention selects keys, or keeps a state"
    if any(type(m) is not nn.Linear for m in _products(model.tower)):
        return "its linear layers are packed, or have adapters: merge them first"
    if any(type(p.data) is not Tensor for p in model.parameters()):
        return "its weights are spread over several devices"
    return "a probe watches it" if model.watch is not None else ""


def longest(model: Any) -> int | None:
    """How long texts may be in a graph, where it is less than the model's context: LongRoPE turns every token of a
    longer text otherwise."""
    ropes = [a.rope for a in model.config.tower.each("attention") if a.rope is not None]
    return min(
        (r.scaling.original_len for r in ropes if isinstance(r.scaling, LongRope)), default=None
    )


def _products(tower: nn.Module) -> list[nn.Module]:
    names = (
        "wq",
        "wk",
        "wv",
        "wg",
        "wo",
        "router",
        "w_dq",
        "w_uq",
        "w_dkv",
        "w_ukv",
        "gate",
        "up",
        "down",
    )
    each = tower.named_modules()
    return [m for name, m in each if name.rpartition(".")[2] in names]


# --- what flows through the blocks --------------------------------------------------------------------------------


def rms(norm: Any) -> Rms | None:
    """An RMS norm as the kernels take it."""
    return (norm.weight, norm.eps, float(norm.plus_one)) if isinstance(norm, RMSNorm) else None


@dataclass
class Stream:
    """The residual stream (n m). What is added last may be left to the norm that reads it: always of many rows
    (`wide`), and where it has a norm of its own or comes in parts."""

    value: Tensor
    wide: bool
    fast: bool = True
    more: Tensor | None = None  # to be added, perhaps in parts (s n m),
    norm: Any = None  # after this norm

    def add(self, product: Product, o: Tensor, norm: Any = None) -> Stream:
        """The stream with what `product` makes of o."""
        if self.wide:
            return self.plus(product.wide(o, split=True), norm)
        if norm is not None:
            return self.plus(product(o), norm)
        return Stream(product(o, residual=self.whole()), False, self.fast)

    def plus(self, y: Tensor, norm: Any = None) -> Stream:
        """The stream with y (n m), or parts of it (s n m)."""
        return Stream(self.whole(), self.wide, self.fast, y, norm)

    def whole(self) -> Tensor:
        """All of it added up."""
        return Normed(self, None).tensor()


@dataclass
class Normed:
    """A stream whose norm is left to the product that reads it."""

    stream: Stream
    norm: Any

    def take(self, rows: Tensor) -> Normed:
        s = self.stream
        more = None if s.more is None else s.more[..., rows, :]
        return Normed(Stream(s.value[rows], s.wide, s.fast, more, s.norm), self.norm)

    def tensor(self) -> Tensor:
        """The sum made, in the stream too, and normed."""
        s, norm = self.stream, self.norm
        if s.more is not None and s.norm is not None and rms(s.norm) is None:
            plus = s.more.sum(0).to(s.value.dtype) if s.more.dim() == 3 else s.more
            s.more, s.norm = s.norm(plus), None
        s.value, y = add_norm(s.value, s.more, rms(norm), rms(s.norm), s.fast)
        s.more = s.norm = None
        return y if norm is None or rms(norm) is not None else norm(y)


class LeftNorm(nn.Module):
    """A norm of the stream, for the product that reads it; `made` at once where the stream itself is normed."""

    def __init__(self, norm: Any, made: bool = False):
        super().__init__()
        self.norm, self.made = norm, made

    def forward(self, x: Stream) -> Any:
        left = Normed(x, self.norm)
        return Stream(left.tensor(), x.wide, x.fast) if self.made else left


@dataclass
class Product:
    """act(x W^T + b) + residual, x perhaps still to be normed. `fast` is whether kernels may be used."""

    weight: Tensor
    bias: Tensor | None = None
    act: str = ""
    gated: bool = False
    fast: bool = True

    @classmethod
    def of(cls, modules: list[Any], **more: Any) -> Product:
        """Linear layers that read the same x, as one."""
        bias = None
        if any(m.bias is not None for m in modules):
            each = [
                m.weight.new_zeros(len(m.weight)) if m.bias is None else m.bias for m in modules
            ]
            bias = joined(each, [m.bias for m in modules])
        weights = [m.weight for m in modules]
        return cls(joined(weights, weights), bias, **more)

    def __call__(
        self, x: Tensor | Normed | Stream, split: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        norm = None
        if isinstance(x, Stream):
            x = Normed(x, None)
        if isinstance(x, Normed):
            if x.stream.wide:
                return self.wide(x.tensor(), split)
            norm = rms(x.norm) if x.stream.more is None else None
            x = x.tensor() if norm is None else x.stream.value
        elif len(x) > MOST and residual is None:
            return self.wide(x, split)
        form = linear if self.fast else reference
        return form(
            x,
            self.weight,
            self.bias,
            norm=norm,
            act=self.act,
            gated=self.gated,
            residual=residual,
        )

    def wide(self, x: Tensor, split: bool = False) -> Tensor:
        """Of many rows; with `split` perhaps in parts (s n o)."""
        if self.gated:
            return gated(x, self.weight, self.bias, self.act, self.fast)
        return ACTIVATIONS[self.act](product(x, self.weight, self.bias, self.fast, split))


def joined(parts: Sequence[Tensor], owners: Sequence[Tensor | None]) -> Tensor:
    """Matrices, or biases, one under the other. What owns them owns a view of the whole from now on."""
    first = parts[0].detach()
    if len(parts) == 1:
        return first
    size = (sum(map(len, parts)), *first.shape[1:])
    ends = [part.data_ptr() + part.nbytes for part in parts]
    if all(end == part.data_ptr() for end, part in zip(ends, parts[1:], strict=False)) and all(
        part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for part in parts
    ):
        # They were joined before.
        return first.as_strided(size, first.stride())
    whole = torch.cat([part.detach() for part in parts])
    views = whole.split([len(part) for part in parts])
    for owner, view in zip(owners, views, strict=True):
        if owner is not None:
            owner.data = view
    return whole


@dataclass
class Pages:
    """The caches of all layers, pages that are named by a block table (b places), and what is asked now: a step at
    positions `pos` (b), no row that counts longer than `bound`, or the prompts of a `pack`."""

    stores: list[dict[str, Tensor]]  # of each layer: (pages page ...)
    table: Tensor
    length: int
    pos: Tensor | None = None
    bound: int = 0
    pack: Pack | None = None
    index: int = 0
    memo: dict[Any, Any] = field(default_factory=dict)

    def layer(self, index: int) -> Pages:
        return replace(self, index=index)

    @property
    def mine(self) -> tuple[Tensor, ...]:
        return tuple(self.stores[self.index].values())

    def store(self, *new: Tensor) -> None:
        """What each token (n ...) leaves behind, in its page."""
        pack, size = self.pack, self.mine[0].shape[1]
        if pack is not None:
            table, row, pos = pack.table, pack.row, pack.pos
        else:
            assert self.pos is not None
            table, pos = self.table, self.pos
            row = torch.arange(len(pos), device=pos.device)
        page = table[row, pos // size].long()
        for memory, x in zip(self.mine, new, strict=True):
            memory[page, pos % size] = x

    def kept(self) -> tuple[Tensor, ...]:
        """What every token so far left behind, (b s ...): of the first `bound` places in a step, of whole texts in a
        pack. Zero where no token is: what others left there may be no number."""
        pack, size = self.pack, self.mine[0].shape[1]
        if pack is not None:
            table, s, lengths = pack.table, pack.sizes.whole, pack.totals
        else:
            assert self.pos is not None
            table, s, lengths = self.table, self.bound, self.pos + 1
        pages = table[:, : -(-s // size)].long()
        real = torch.arange(s, device=lengths.device) < lengths[:, None]
        each = (memory[pages].flatten(1, 2)[:, :s] for memory in self.mine)
        return tuple(x.masked_fill(~real.view(*real.shape, *[1] * (x.dim() - 2)), 0) for x in each)

    def seen(self, window: int | None) -> Tensor:
        """Which of the first `bound` places a step may see: (b 1 1 bound)."""
        assert self.pos is not None
        at = torch.arange(self.bound, device=self.pos.device)
        gap = self.pos[:, None] - at
        near = (gap >= 0) if window is None else (gap >= 0) & (gap < window)
        return near[:, None, None]

    def angles(self, rope: Rope, dim: int) -> tuple[Tensor, Tensor]:
        """cos and sin for every position, (length r/2) each."""
        if (rope, dim) not in self.memo:
            like = self.mine[0]
            at = torch.arange(self.length, device=like.device)
            wide = torch.promote_types(like.dtype, torch.float32)
            cos, sin = rope.angles(at[None], dim, wide if rope.wide else like.dtype)
            self.memo[rope, dim] = cos[0, :, 0].contiguous(), sin[0, :, 0].contiguous()
        return self.memo[rope, dim]


@dataclass
class SlotContext(Context):
    """Angles come from a table: a graph may not wait for numbers that the host makes."""

    def angles(self, rope: Rope, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        slots: Any = self.store
        cos, sin = (x[self.pos.index][:, :, None] for x in slots.angles(rope, dim))
        return cos, sin


# --- the parts ----------------------------------------------------------------------------------------------------


class Cuda(Specialise):
    def __init__(self, kernels: bool):
        super().__init__()
        self.kernels = kernels

    def kind(self, kind: Any) -> Any:
        return direct(kind)

    def product(self, *modules: Any, **more: Any) -> Product:
        return Product.of(list(modules), fast=self.kernels, **more)

    def block(self, m: Block) -> nn.Module:
        norms = {name: LeftNorm(getattr(m, name), m.order == "post") for name in ("norm1", "norm3")}
        return self.copy(m, **norms)

    def attention(self, m: Any) -> nn.Module:
        new, c = self.copy(m, SlotAttention), m.config
        gate = [] if m.wg is None else [m.wg]
        new.first, new.out = self.product(m.wq, m.wk, m.wv, *gate), self.product(m.wo)
        norms, paired = (rms(m.q_norm), rms(m.k_norm)), bool(c.rope and c.rope.layout != "half")
        new.heads = {
            "norms": norms if m.q_norm else None,
            "whole": c.qk_norm_whole,
            "paired": paired,
        }
        return new

    def experts(self, m: Any) -> nn.Module:
        new = self.copy(m, SlotExperts)
        biases = None if m.gate_bias is None else (m.gate_bias, m.up_bias, m.down_bias)
        act, limit = m.config.activation, m.config.limit
        new.all = Experts(m.gate, m.up, m.down, biases, act, limit)
        new.fast = self.kernels
        return new

    def latent(self, m: Any) -> nn.Module:
        new = self.copy(m, SlotLatent)
        new.first = self.product(m.w_uq if m.w_dq is None else m.w_dq, m.w_dkv)
        new.second = None if m.w_dq is None else self.product(m.w_uq)
        new.out = self.product(m.wo)
        new.up = tuple(
            w.contiguous() for w in m.w_ukv.weight.view(m.h, -1, m.c).split([m.d, m.e], 1)
        )
        return new

    def feed_forward(self, m: Any) -> nn.Module:
        both = [m.up] if m.gate is None else [m.gate, m.up]
        new = self.copy(m, SlotFeedForward)
        new.first = self.product(*both, act=m.config.activation, gated=m.gate is not None)
        new.out = self.product(m.down)
        return new

    table: ClassVar[Mapping[type, Row]] = {
        nn.Dropout: lambda maker, m: direct(nn.Identity)(),
        Block: lambda maker, m: maker.block(m),
        Stack: lambda maker, m: maker.copy(m, norm=LeftNorm(m.norm)),
        GroupedQueryAttention: lambda maker, m: maker.attention(m),
        LatentAttention: lambda maker, m: maker.latent(m),
        FeedForward: lambda maker, m: maker.feed_forward(m),
        MixtureOfExperts: lambda maker, m: maker.experts(m),
    }


@torch.inference_mode(False)
@torch.no_grad()
def decoder(model: Model, kernels: bool = True) -> Any:
    """The model out of these parts. It shares the model's weights, but for MLA's, which are laid out anew by head."""
    plain: Any = model
    maker, head, weight = Cuda(kernels), plain.head, plain.embedding.weight
    new = maker.copy(model, head=maker.copy(head, SlotHead))
    own = weight if head.weight is None else head.weight
    new.head.product = Product(own, head.bias, fast=kernels)
    new.parts = dict(maker.rows)
    return new


class SlotHead(LMHead):
    product: Product

    def features(self, h: Any) -> Any:
        scaled = getattr(self.config, "scaled", False)
        return super().features(h.tensor()) if scaled else h

    def project(self, x: Any, weight: Tensor) -> Tensor:
        return self.product(x)


class SlotFeedForward(FeedForward):
    first: Product
    out: Product

    def widen(self, x: Any) -> Tensor:
        return self.first(x)

    def leave(self, h: Tensor, residual: Any) -> Any:
        return self.out(h) if residual is None else residual.add(self.out, h, self.add.norm)


class SlotExperts(MixtureOfExperts):
    """Experts by grouped products; without kernels every expert reads every token, as a graph needs fixed shapes."""

    all: Experts
    fast: bool

    def enter(self, x: Any) -> Tensor:
        return (x if isinstance(x, Normed) else Normed(x, None)).tensor()

    def logits(self, x: Tensor) -> Tensor:
        few = self.fast and ready(x) and len(x) <= FEW and x.dtype == self.router.weight.dtype
        return scores(x, self.router.weight, self.router.bias) if few else super().logits(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        if c.groups > 1 or not (self.fast and ready(x)):
            return super().route(x)
        sigmoid = c.score == "sigmoid"
        more = {"normalized": c.normalized, "gain": c.gain, "correction": self.correction}
        return choose(self.logits(x), c.active, sigmoid=sigmoid, **more)

    def mix(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        form = experts if self.fast and suits(x, self.all) else expert_reference
        return form(x, chosen, weight, self.all)

    def plus(self, out: Tensor, shared: Tensor) -> Tensor:
        return summed(shared, out)

    def leave(self, out: Tensor, residual: Any) -> Any:
        return residual.plus(out, self.add.norm)


class SlotAttention(GroupedQueryAttention):
    """Grouped-query attention; its pages hold k (g d) and v (g e)."""

    first: Product
    out: Product
    heads: dict[str, Any]  # how the kernels norm and turn them

    def fast(self, k: Tensor) -> bool:
        return (
            self.first.fast and self.d == self.e and gpu_attention.suits(self.h, self.g, self.d, k)
        )

    def look(self, x: Any, ctx: Context) -> Tensor:
        slots: Any = ctx.store
        k, v = slots.mine
        fast, c = self.fast(k), self.config
        qkv, gate = self.first(x, split=fast and slots.pack is None and self.wg is None), None
        if self.wg is not None:
            gate = qkv[:, -self.h * self.e :]
            qkv = qkv[:, : -self.h * self.e].contiguous()
        form = {"scale": self.scale, "window": c.window, "softcap": c.softcap, "sinks": self.sinks}
        angles = slots.angles(c.rope, self.d) if fast and c.rope is not None else None
        pack = slots.pack
        if pack is not None and fast:
            laid = gpu_prompt.lay_qkv(qkv, pack, k, v, self.h, angles, **self.heads)
            near = c.window is not None and c.window < pack.sizes.longest
            if near or pack.sizes.whole or c.softcap is not None or self.sinks is not None:
                o = gpu_prompt.over_pages(laid[0], k, v, pack, **form)
            else:
                o = gpu_prompt.attend(laid, pack, self.scale, None)
        elif pack is not None:
            q, *new = self.turned(qkv, ctx)
            slots.store(*new)
            laid = gpu_prompt.lay(pack, q, *new)
            if pack.sizes.whole:
                laid = laid[0], *slots.kept()
            seen = gpu_prompt.seen(laid, pack, c.window)
            o = self.mix(laid[0], dict(zip("kv", laid[1:], strict=True)), seen, ctx, None)
            o = o.flatten(2).flatten(0, 1)[pack.back]
        elif fast:
            more = {"angles": angles, "table": slots.table, "bound": slots.bound, **self.heads}
            o = gpu_attention.decode(qkv, k, v, slots.pos, heads=self.h, **form, **more).flatten(1)
        else:
            q, *new = self.turned(qkv, ctx)
            slots.store(*new)
            seen = ctx.once(("seen", c.window), lambda: slots.seen(c.window))
            o = self.mix(q[:, None], dict(zip("kv", slots.kept(), strict=True)), seen, ctx, None)
            o = o.flatten(1)
        return o if gate is None else o * self.sigmoid(gate)

    def weigh(self, o: Tensor, x: Any) -> Tensor:
        return o

    def turned(self, qkv: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q (n h d), k (n g d), v (n g e), normed and turned."""
        sizes = [self.h * self.d, self.g * self.d, self.g * self.e]
        q, k, v = (y.view(*ctx.pos.index.shape, -1) for y in qkv.split(sizes, -1))
        new = self.as_entries(k, v, ctx)
        each = (self.as_queries(q, ctx), new["k"], new["v"])
        return tuple(y.flatten(0, 1).contiguous() for y in each)  # type: ignore[return-value]

    def leave(self, o: Tensor, residual: Any = None) -> Any:
        return residual.add(self.out, o, self.add.norm)


class SlotLatent(LatentAttention):
    """MLA, absorbed: queries meet the latents themselves; its pages hold latents (c) and rotary keys (r)."""

    first: Product
    second: Product | None
    out: Product
    up: tuple[Tensor, Tensor]

    def fast(self, latents: Tensor) -> bool:
        suits = self.config.window is None and gpu_latent.suits(self.c, self.r, latents)
        return self.first.fast and suits

    def look(self, x: Any, ctx: Context) -> Tensor:
        slots: Any = ctx.store
        nope, rope, entry = self.parts(self.first(x), ctx)
        w_uk, w_uv = self.up
        new = entry.split([self.c, self.r], -1)[: len(slots.mine)]
        if slots.pack is not None:
            # Heads of their own, from the latents: cheaper than to attend c wide.
            slots.store(*new)
            q = torch.cat([nope, rope], -1)
            laid = gpu_prompt.lay(slots.pack, q, *self.heads(new))
            if slots.pack.sizes.whole:
                laid = laid[0], *self.heads(slots.kept())
            return gpu_prompt.attend(laid, slots.pack, self.scale, self.config.window)
        q = torch.cat([torch.einsum("bhd,hdc->bhc", nope, w_uk), rope], -1)
        if self.fast(slots.mine[0]):
            latents, ropes = slots.mine
            table, pos, bound = slots.table, slots.pos, slots.bound
            o = gpu_latent.decode(
                q, entry, latents, ropes, table, pos, scale=self.scale, bound=bound
            )
        else:
            slots.store(*new)
            kept = slots.kept()
            seen = ctx.once(("seen", self.config.window), lambda: slots.seen(self.config.window))
            k = torch.cat(kept, -1)[:, :, None]
            o = attend(q, k, kept[0][:, :, None], seen, self.scale)
        return torch.einsum("bhc,hec->bhe", o, w_uv).flatten(1)

    def heads(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Every head's keys (... h d+r) and values (... h e) from latents (... c) and rotary keys (... r)."""
        w_uk, w_uv = self.up
        k = torch.einsum("...c,hdc->...hd", kept[0], w_uk)
        if self.r:
            turned = kept[1].unsqueeze(-2)
            k = torch.cat([k, turned.expand(*k.shape[:-1], -1)], -1)
        return k, torch.einsum("...c,hec->...he", kept[0], w_uv)

    def parts(self, both: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Of each token the heads' (n h d) and turned (n h r) features, and [latent | rotary key] (n c+r)."""
        q, latent, key = both.split([both.shape[-1] - self.c - self.r, self.c, self.r], -1)
        if self.second is not None:
            q = self.second(Normed(Stream(q.contiguous(), False), self.q_norm))
        latent = latent if self.kv_norm is None else self.kv_norm(latent)
        nope, rope = q.unflatten(-1, (self.h, -1)).split([self.d, self.r], -1)
        if self.r:
            shape = ctx.pos.index.shape
            rope = ctx.turn(rope.unflatten(0, shape), self.config.rope).flatten(0, 1)
            key = ctx.turn(key.view(*shape, 1, self.r), self.config.rope).view(-1, self.r)
        return nope, rope, torch.cat([latent, key], -1)

    def leave(self, o: Tensor, residual: Any = None) -> Any:
        return residual.add(self.out, o, self.add.norm)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q (b h d) over k (b s g d), v (b s g e) where mask (b 1 1 s): (b h e). A group's heads stand side by side as
    queries of one head, so that no key is copied."""
    b, g = len(q), k.shape[2]
    o = F.scaled_dot_product_attention(
        q.view(b, g, -1, q.shape[-1]), k.transpose(1, 2), v.transpose(1, 2), mask, scale=scale
    )
    return o.reshape(b, q.shape[1], -1)
