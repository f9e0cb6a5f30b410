"""Target cuda: parts for a step of one token per row, or for prompts laid end to end, over pages of memory that stay
where they are, as a CUDA graph must have it. Block and Stack run as they are; what flows through them is a
`ResidualStream`.

Where kernels are off, or a shape has none, everything is torch; test_graphs_give_the_engine_tokens holds both against
the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.delta import GatedDeltaRule
from regard.attention.latent import LatentAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.protocol import Context
from regard.attention.sparse import Indexer, SparseAttention, to_fp8
from regard.attention.ssd import StateSpaceDual
from regard.attention.state import StateMechanism
from regard.fast.cuda.pages import GraphContext, Pages, pages_of
from regard.fast.cuda.residual import (
    Product,
    Read,
    Residual,
    ResidualStream,
    added,
    rms,
    tensor,
)
from regard.kernels.fused import side_by_side
from regard.kernels.packed import Packed
from regard.kernels.triton import attention as gpu_attention
from regard.kernels.triton import latent as gpu_latent
from regard.kernels.triton import prompt as gpu_prompt
from regard.kernels.triton import sparse as gpu_sparse
from regard.kernels.triton.experts import Experts, choose, experts, scores, suits
from regard.kernels.triton.experts import reference as expert_reference
from regard.kernels.triton.linear import ready
from regard.kernels.triton.wide import HIGHEST, summed
from regard.layers import LM, FeedForward, LMHead
from regard.mask import Span
from regard.moe import MixtureOfExperts

SCORES = 2**25  # index scores of a prompt that are made at once


class GraphHead(LMHead):
    product: Product

    def features(self, h: Any) -> Any:
        c = self.config
        plain = isinstance(c, LM) and not c.scaled and c.logit_gain == 1.0
        return h if plain else super().features(h.tensor())

    def project(self, x: Read, weight: Tensor) -> Tensor:
        return self.product(x)

    def capped(self, logits: Tensor) -> Tensor:
        """Rows that `vocabulary` added stay at -infinity."""
        if self.softcap is None:
            return logits
        return super().capped(logits).masked_fill(logits == -torch.inf, -torch.inf)


class GraphFeedForward(FeedForward):
    first: Product
    out: Product

    def project_up(self, x: Read) -> Tensor:
        return self.first(x)

    def project_down(self, h: Tensor, residual: Residual) -> Any:
        return added(self.add, self.out, h, residual)


class GraphExperts(MixtureOfExperts):
    """Experts by grouped products; without kernels every expert reads every token, as a graph needs fixed shapes."""

    all: Experts
    fast: bool
    note: str

    def expert_input(self, x: Read) -> Tensor:
        return tensor(x)

    def logits(self, x: Tensor) -> Tensor:
        few = self.fast and ready(x) and len(x) <= HIGHEST and x.dtype == self.router.weight.dtype
        return scores(x, self.router.weight, self.router.bias) if few else super().logits(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        if c.groups > 1 or c.gains or c.score == "sqrtsoftplus" or not (self.fast and ready(x)):
            return super().route(x)
        sigmoid = c.score == "sigmoid"
        more: dict[str, Any] = {"normalized": c.normalized, "correction": self.correction}
        return choose(self.logits(x), c.active, sigmoid=sigmoid, gain=c.gain, **more)

    def mix(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        form = experts if self.fast and suits(x, self.all) else expert_reference
        return form(x, chosen, weight, self.all)

    def plus(self, out: Tensor, shared: Tensor) -> Tensor:
        return summed(shared, out)

    def add_residual(self, out: Tensor, residual: Residual) -> Any:
        return (
            residual.plus(out, self.add.norm)
            if isinstance(residual, ResidualStream)
            else self.add(out, residual)
        )


@dataclass
class Asked:
    """Of tokens whose entries are in their pages: what makes their queries (n h .), what those are made of (n m), the
    entries themselves, and what was made of the same x for others (n .)."""

    queries: Callable[[], Tensor]
    source: Read
    new: tuple[Tensor, ...] = ()
    more: Tensor | None = None


class GraphAttention(GroupedQueryAttention):
    """Grouped-query attention; its pages hold k (g d) and v (g e)."""

    first: Product
    out: Product
    note: str
    heads: dict[str, Any]  # how the kernels norm and turn them

    def fast(self, k: Tensor | Packed) -> bool:
        return (
            self.first.fast and self.d == self.e and gpu_attention.suits(self.h, self.g, self.d, k)
        )

    def attend(self, x: Read, ctx: Context) -> Tensor:
        slots = pages_of(ctx)
        fast, gate, wide = self.fast(slots.mine[0]), None, self.h * self.e
        qkv = self.first(x, split_k=fast and slots.pack is None and self.wg is None)
        if self.wg is not None:
            qkv, gate = qkv[:, :-wide].contiguous(), qkv[:, -wide:]
        bias = slots.bias(ctx.relative)
        # torch's kernels for prompts, and ours, have no bias on positions.
        if fast and (bias is None or slots.pack is None):
            o = self.by_kernels(qkv, slots, bias)
        else:
            o = self.by_torch(qkv, slots, ctx, bias)
        return o if gate is None else o * self.sigmoid(gate)

    def weigh(self, o: Tensor, x: Read) -> Tensor:
        """`attend` had its gate at hand."""
        return o

    def by_kernels(self, qkv: Tensor, slots: Pages, bias: Tensor | None) -> Tensor:
        c, (k, v), pack = self.config, slots.mine, slots.pack
        angles = None if c.rope is None else slots.angles(c.rope, self.d)
        form: dict[str, Any] = {"scale": self.scale, "window": c.window}
        form |= {"softcap": c.softcap, "sinks": self.sinks}
        if pack is None:
            form |= {"angles": angles, "table": slots.table, "bound": slots.bound, "bias": bias}
            form |= {"heads": self.h, **self.heads}
            return gpu_attention.decode(qkv, k, v, slots.now, **form).flatten(1)
        near = c.window is not None and c.window < pack.sizes.longest
        ours = near or pack.sizes.whole or c.softcap is not None or self.sinks is not None
        rows = bool(ours) or not side_by_side(k, v)
        laid = gpu_prompt.lay_qkv(qkv, pack, k, v, self.h, angles, rows=rows, **self.heads)
        if pack.single is not None:
            sizes, table = pack.single
            form |= {"heads": self.h, "table": table, "bound": pack.whole}
            # As many of each text, in order: no token is laid out elsewhere.
            q = laid[0].flatten(2).flatten(0, 1)
            return gpu_attention.decode(q, k, v, sizes, new=False, **form).flatten(1)
        if ours:
            return gpu_prompt.over_pages(laid[0], k, v, pack, **form)
        return gpu_prompt.attend(laid, pack, self.scale, None)

    def by_torch(self, qkv: Tensor, slots: Pages, ctx: Context, bias: Tensor | None) -> Tensor:
        c, pack = self.config, slots.pack
        q, *new = self.split_qkv(qkv, ctx)
        slots.store(*new)
        laid: Any
        if pack is None:
            laid, gap = (q[:, None], *slots.kept()), slots.gap
            seen = ctx.once(("seen", c.window), lambda: slots.seen(c.window))
        else:
            laid = gpu_prompt.lay(pack, q, *new)
            laid = (laid[0], *slots.kept()) if pack.sizes.whole else laid
            seen, gap = gpu_prompt.seen(laid, pack, c.window), gpu_prompt.gap(laid, pack)
        kept = dict(zip("kv", laid[1:], strict=True))
        o = (
            self.core_attention(laid[0], kept, seen, ctx, spread(bias, gap))
            .flatten(2)
            .flatten(0, 1)
        )
        return o if pack is None else o[pack.back]

    def asked(self, x: Tensor, ctx: Context) -> Asked:
        slots = pages_of(ctx)
        q, *new = self.split_qkv(self.first(x), ctx)
        slots.store(*new)
        return Asked(lambda: q, x)

    def met(self, q: Tensor) -> Tensor:
        """Queries as they meet what is kept."""
        return q

    def over(self, q: Tensor, slots: Pages, ctx: Context, spots: Tensor) -> Tensor:
        """Queries (n h d) over tokens of the pool (n k), as far as there are any: (n, h e)."""
        real = slots.chosen(spots.shape[1])
        kept = dict(zip("kv", slots.at(spots, real), strict=True))
        return self.core_attention(q[:, None], kept, real[:, None, None], ctx, None).flatten(1)

    def split_qkv(self, qkv: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q (n h d), k (n g d), v (n g e), normed and rotated."""
        sizes = [self.h * self.d, self.g * self.d, self.g * self.e]
        q, k, v = (y.view(*ctx.pos.index.shape, -1) for y in qkv.split(sizes, -1))
        new = self.as_entries(k, v, ctx)
        each = (self.as_queries(q, ctx), new["k"], new["v"])
        return tuple(y.flatten(0, 1).contiguous() for y in each)  # type: ignore[return-value]

    def project_out(self, o: Tensor, residual: Residual = None) -> Any:
        return added(self.add, self.out, o, residual)


class GraphCross(GraphAttention):
    """Attention to a source, of which every token of a step sees all; `remember` puts it into its pages."""

    wkv: Product

    def attend(self, x: Read, ctx: Context) -> Tensor:
        slots = pages_of(ctx)
        k, v = slots.mine
        q = self.as_heads(self.first(x), self.q_norm)  # n h d
        if not self.fast(k):
            seen = ctx.once("seen", lambda: slots.seen(None))
            kept = dict(zip("kv", slots.kept(), strict=True))
            return self.core_attention(q[:, None], kept, seen, ctx, None).flatten(1)
        sizes = ctx.once("sizes", lambda: slots.now + 1)
        form: dict[str, Any] = {"scale": self.scale, "softcap": self.config.softcap}
        form |= {"sinks": self.sinks, "heads": self.h, "table": slots.table, "bound": slots.bound}
        return gpu_attention.decode(q.flatten(1), k, v, sizes, new=False, **form).flatten(1)

    def remember(self, memory: Tensor, slots: Pages) -> None:
        """Keys and values of what an encoder gave, (n m)."""
        k, v = self.wkv(memory).split([self.g * self.d, self.g * self.e], -1)
        slots.store(self.as_heads(k, self.k_norm), v.unflatten(-1, (self.g, self.e)))


class GraphLatent(LatentAttention):
    """MLA, whose pages hold latents (c) and rotary keys (r). Steps are absorbed: queries meet the latents themselves.
    Most prompts are not: `heads` makes keys and values for every head."""

    first: Product  # of these widths: queries or their latent, latent, rotary key; and what others read
    first_width: tuple[int, int, int]
    second: Product | None
    out: Product
    up: tuple[Tensor, Tensor]

    def fast(self, latents: Tensor) -> bool:
        suits = self.config.window is None and gpu_latent.suits(self.c, self.r, latents)
        return self.first.fast and suits

    def attend(self, x: Read, ctx: Context) -> Tensor:
        slots = pages_of(ctx)
        asked = self.asked(x, ctx)
        q = asked.queries()
        pack = slots.pack
        # Few tokens after a long text: as `LatentAttention.core_attention` has it, but of a pack.
        sizes = pack and pack.sizes
        few = sizes and sizes.whole and sizes.longest * (self.c - self.d) < self.c * self.d
        if pack is None or (few and self.fast(slots.mine[0])):
            each = slots.each(max(1, SCORES // slots.longest))
            return joined_rows([self.over(self.met(q[rows]), step, ctx) for rows, step in each])
        # Heads of their own, from the latents: cheaper than to attend c wide.
        laid = gpu_prompt.lay(pack, q, *self.heads(asked.new))
        if pack.sizes.whole:
            laid = laid[0], *self.heads(slots.kept())
        return gpu_prompt.attend(laid, pack, self.scale, self.config.window)

    def over(self, q: Tensor, slots: Pages, ctx: Context, spots: Tensor | None = None) -> Tensor:
        """Queries (n h c+r) of a step over their texts, or over tokens of the pool (n k): (n, h e)."""
        if self.fast(slots.mine[0]):
            latents, ropes = slots.mine
            more: dict[str, Any] = {"scale": self.scale, "bound": slots.bound, "chosen": spots}
            o = gpu_latent.decode(q, latents, ropes, slots.table, slots.now, **more)
        else:
            real = slots.seen(self.config.window) if spots is None else slots.chosen(spots.shape[1])
            kept = slots.kept() if spots is None else slots.at(spots, real)
            mask = real if spots is None else real[:, None, None]
            k = torch.cat(kept, -1)[:, :, None]
            o = attend(q, k, kept[0][:, :, None], mask, self.scale)
        return each_head(o, self.up[1].mT, o.new_empty(*o.shape[:2], self.e)).flatten(1)

    def met(self, q: Tensor) -> Tensor:
        """Queries (n h d+r) as they meet latents: (n h c+r)."""
        met = q.new_empty(*q.shape[:2], self.c + self.r)
        met[..., self.c :] = q[..., self.d :]
        each_head(q[..., : self.d], self.up[0], met[..., : self.c])
        return met

    def heads(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Every head's keys (... h d+r) and values (... h e) from latents (... c) and rotary keys (... r)."""
        w_uk, w_uv = self.up
        k = torch.einsum("...c,hdc->...hd", kept[0], w_uk)
        if self.r:
            turned = kept[1].unsqueeze(-2)
            k = torch.cat([k, turned.expand(*k.shape[:-1], -1)], -1)
        return k, torch.einsum("...c,hec->...he", kept[0], w_uv)

    def asked(self, x: Read, ctx: Context) -> Asked:
        slots = pages_of(ctx)
        assert isinstance(ctx, GraphContext)
        both, rope, wide = self.first(x), self.config.rope, self.first_width
        q, latent, key, more = both.split([*wide, both.shape[-1] - sum(wide)], -1)
        new: tuple[Tensor, ...] = ()
        if slots.pack is None and self.fast(slots.mine[0]):
            assert rope is not None
            form: dict[str, Any] = {"norms": (rms(self.q_norm), rms(self.kv_norm))}
            form |= {"angles": slots.angles(rope, self.r), "paired": rope.layout != "half"}
            latents, ropes = slots.mine
            place = ((latents, ropes), slots.table, slots.now)
            low = gpu_latent.update_cache(both, wide[0], self.second is not None, *place, **form)
        else:
            low = q if self.q_norm is None else self.q_norm(q)
            latent = latent if self.kv_norm is None else self.kv_norm(latent)
            new = (latent,)
            if self.r:
                # Where it lies: nobody else reads it.
                y = key.unsqueeze(-2).unflatten(0, ctx.pos.index.shape)
                ctx.rotate(y, rope, out=y)
                new = (latent, key)
            slots.store(*new)

        def queries() -> Tensor:
            y = (q if self.second is None else self.second(low)).unflatten(-1, (self.h, -1))
            if self.r:
                turns = y[..., self.d :].unflatten(0, ctx.pos.index.shape)
                ctx.rotate(turns, rope, out=turns)
            return y

        return Asked(
            queries, x if self.second is None else low, new, more if more.numel() else None
        )

    def project_out(self, o: Tensor, residual: Residual = None) -> Any:
        return added(self.add, self.out, o, residual)


class GraphState(StateMechanism):
    """A mechanism with a state as it is, its states in the rows' places."""

    out: Product
    note: str

    def attend(self, x: Read, ctx: Context) -> Tensor:
        slots = pages_of(ctx)
        x, pack = tensor(x), slots.pack
        if pack is None:
            return super().attend(x[:, None], ctx)[:, 0]
        place = torch.arange(pack.grid.shape[1], device=x.device)
        real = place < (pack.totals - pack.starts)[:, None]
        span = Span(torch.where(real, place + pack.starts[:, None], -1))
        return super().attend(x[pack.grid], replace(ctx, pos=span)).flatten(0, 1)[pack.back]

    def weigh(self, o: Tensor, x: Read) -> Tensor:
        return super().weigh(o, tensor(x))

    def project_out(self, o: Tensor, residual: Residual = None) -> Any:
        return added(self.add, self.out, o.flatten(1), residual)


class GraphDelta(GraphState, GatedDeltaRule):
    """The gated delta rule."""


class GraphDual(GraphState, StateSpaceDual):
    """The state-space dual, whose norm is over all heads of a token."""

    def weigh(self, o: Tensor, x: Read) -> Tensor:
        return StateSpaceDual.weigh(self, o[:, None], tensor(x)[:, None])[:, 0]


class GraphIndexer(Indexer):
    """Its pages hold index keys."""

    product: Product
    kernels: bool

    def turned(self, x: Tensor, ctx: Context) -> Tensor:
        """The first features of an indexer's queries or keys rotated in place, as nobody else reads them. Steps with
        kernels do that there."""
        assert isinstance(ctx, GraphContext)
        some = x[..., : self.config.rope_dim]
        ctx.rotate(some, self.config.attention.rope, self.config.rope_layout, out=some)
        return x

    def fast(self, keys: Tensor) -> bool:
        return self.kernels and gpu_sparse.suits(self.d, self.h, keys, self.fp8)

    @property
    def fp8(self) -> bool:
        return self.config.precision == "fp8"

    def asked(
        self, x: Tensor, ctx: Context, slots: Pages, asked: Asked | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """The index keys of x (n m), into their pages; and what is `asked` for, queries (n H D) and weights (n H)."""
        c, (keys,), shape, q = self.config, slots.mine, ctx.pos.index.shape, None
        apart = c.hadamard or c.rope_layout != "half"  # the kernel turns halves
        if slots.pack is not None or apart or not self.fast(keys):
            slots.store(self.kept(self.keys(x.view(*shape, -1), ctx)).flatten(0, 1))
            if asked is None:
                return None
            source = tensor(asked.source).view(*shape, -1)
            q, weights = self.queries(source, ctx), self.weights(x)
            q = q.flatten(0, 1).contiguous()
            if self.fp8 and self.fast(keys):
                q, size = to_fp8(q)
                weights = weights * size[..., 0]
            return q, weights
        key = self.wk(x) if asked is None or asked.more is None else asked.more
        if asked is not None:
            q = self.product(asked.source).unflatten(-1, (self.h, self.d))
        norm, rope = (self.k_norm.weight, self.k_norm.bias, self.k_norm.eps), c.attention.rope
        angles = slots.angles(rope, c.rope_dim) if rope and c.rope_dim else None
        form: dict[str, Any] = {"norm": norm, "angles": angles, "fp8": self.fp8}
        found = gpu_sparse.update_cache(
            x, self.ww.weight, q, key, keys, slots.table, slots.now, **form
        )
        return None if q is None else found

    def over(self, q: Tensor, weights: Tensor, step: Pages) -> Tensor:
        """Scores (b bound) of every key so far: index queries (b H D) and weights (b H)."""
        (keys,), pos = step.mine, step.now
        if self.fast(keys):
            return gpu_sparse.index(q, keys, weights, step.table, pos, step.bound)
        dots = self.dots(q[:, None], *step.kept())
        return self.join(dots, weights[:, None].to(dots.dtype))[:, 0]

    def best(self, scores: Tensor, step: Pages) -> Tensor:
        """Where the best k tokens of each row lie in the pool (b k)."""
        (keys,), (table, pos), k = step.mine, (step.table, step.now), self.config.topk
        page = keys.shape[1]
        if self.fast(keys):
            return gpu_sparse.topk(scores, pos, k, table, page)
        at = gpu_sparse.reference(scores, pos + 1, k).long()
        return table.gather(1, at // page) * page + at % page


class GraphSparse(SparseAttention):
    """DSA: every token's index key is scored, and the attention in it looks at the best; its pages hold what that one's
    do, and index keys."""

    attention: GraphAttention | GraphLatent
    indexer: GraphIndexer

    def attend(self, x: Read, ctx: Context) -> Tensor:
        slots = pages_of(ctx)
        attention, indexer, x = self.attention, self.indexer, tensor(x)
        own, index = slots.only(slice(-1)), slots.only(slice(-1, None))
        within = replace(ctx, store=own)
        if self.dense(slots.longest):
            indexer.asked(x, ctx, index)
            return attention.attend(x, within)
        asked = attention.asked(x, within)
        found = indexer.asked(x, ctx, index, asked)
        assert found is not None
        index_q, weights = found
        q, out = asked.queries(), []
        for rows, step in index.each(max(1, SCORES // slots.longest)):
            spots = indexer.best(indexer.over(index_q[rows], weights[rows], step), step)
            met = attention.met(q[rows])
            out.append(attention.over(met, step.only(own.entries), within, spots))
        return joined_rows(out)

    def project_out(self, o: Tensor, residual: Residual = None) -> Any:
        return added(self.add, self.attention.out, o, residual)


def each_head(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """Each head's own matrix: (n h i), (h i o) -> out (n h o), where it lies."""
    torch.bmm(x.transpose(0, 1), w, out=out.transpose(0, 1))
    return out


def joined_rows(each: list[Tensor]) -> Tensor:
    return each[0] if len(each) == 1 else torch.cat(each)


def spread(bias: Tensor | None, gap: Tensor) -> Tensor | None:
    """bias (h n) of keys that are `gap` (b t s) tokens back: (b h t s)."""
    return None if bias is None else bias[:, gap.clamp(0, bias.shape[1] - 1)].transpose(0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q (b h d) over k (b s g d), v (b s g e) where mask (b 1 1 s): (b h e). A group's heads stand side by side as
    queries of one head, so that no key is copied."""
    b, g = len(q), k.shape[2]
    o = F.scaled_dot_product_attention(
        q.view(b, g, -1, q.shape[-1]), k.transpose(1, 2), v.transpose(1, 2), mask, scale=scale
    )
    return o.reshape(b, q.shape[1], -1)
