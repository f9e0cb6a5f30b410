"""Target cuda: parts for a step of one token per row, or for prompts laid end to end, over pages of memory that stay
where they are, as a CUDA graph must have it. Block and Stack run as they are; what flows through them is a `Stream`.

Matrices that read the same input are one matrix (q|k|v, gate|up, and MLA's two down-projections), of which the plain
model's are views from then on: nothing is held twice. A norm is left to the product that reads it, and of many rows a
sum is left to the norm that reads it. Where kernels are off, or a shape has none, everything is torch;
test_graphs_give_the_engine_tokens holds both against the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.delta import GatedDeltaRule
from regard.attention.latent import LatentAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.protocol import Context
from regard.attention.sparse import Indexer, SparseAttention, to_fp8
from regard.block import Block, Stack
from regard.fast.specialise import Row, Specialise, direct
from regard.kernels.fused import side_by_side
from regard.kernels.triton import attention as gpu_attention
from regard.kernels.triton import latent as gpu_latent
from regard.kernels.triton import prompt as gpu_prompt
from regard.kernels.triton import sparse as gpu_sparse
from regard.kernels.triton.experts import Experts, choose, experts, scores, suits
from regard.kernels.triton.experts import reference as expert_reference
from regard.kernels.triton.linear import ACTIVATIONS, MOST, Rms, linear, ready, reference
from regard.kernels.triton.prompt import Pack
from regard.kernels.triton.wide import HIGHEST, add_norm, gated, product, summed
from regard.layers import FeedForward, LMHead, RMSNorm
from regard.mask import Span
from regard.models import Model
from regard.moe import MixtureOfExperts
from regard.position import Rope

SCORES = 2**25  # index scores of a prompt that are made at once


def why_not(model: Any) -> str:
    """What about a model has no static step, or nothing."""
    c = model.config
    two = c.kind == "encoder_decoder"
    if not two and (c.kind != "transformer" or c.embedding.kind != "tokens"):
        return f"{type(c).__name__} is not a tower that writes tokens"
    tower, position = (c.decoder, c.target.position) if two else (c.tower, c.embedding.position)
    if not tower.causal or (tower.cross and not two):
        return "its tower is not causal, or reads what no encoder of its own makes"
    if not tower.residual:
        return "its blocks have no residual"
    if two and model.decoder.cache_specs("cross") != model.decoder.cache_specs():
        return "its attention to the source keeps other shapes than that to the text"
    if tower.cross and (tower.cross.kind != "gqa" or tower.cross.gated):
        return "its attention to the source has latents, or a gate"
    if tower.relative and any(a.kind != "gqa" for a in tower.each("attention")):
        return "its attention has no kernel with a bias on positions"
    if c.head is None or c.head.kind != "lm":
        return "it has no language-model head"
    if position is not None and position.kind == "learned" and position.skip is not None:
        return "its positions skip tokens"
    if any(
        a.kind == "dsa" and (a.window or getattr(inner(a), "gated", False))
        for a in tower.each("attention")
    ):
        return "its sparse attention has a window or a gate"
    if any(type(m) is not nn.Linear for m in _products(getattr(model, model.writer))):
        return "its linear layers are packed, or have adapters: merge them first"
    if any(type(p.data) is not Tensor for p in model.parameters()):
        return "its weights are spread over several devices"
    return "a probe watches it" if model.watch is not None else ""


def inner(attention: Any) -> Any:
    """The attention that a sparse one chooses keys for; any other itself."""
    return attention.attention if attention.kind == "dsa" else attention


def _products(tower: nn.Module) -> list[nn.Module]:
    names = {f"w{x}" for x in ("q", "k", "v", "g", "z", "o", "_dq", "_uq", "_dkv", "_ukv")}
    names |= {"router", "gate", "up", "down"}
    return [m for name, m in tower.named_modules() if name.rpartition(".")[2] in names]


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
        return tensor(self)


@dataclass
class Normed:
    """A stream whose norm is left to the product that reads it."""

    stream: Stream
    norm: Any
    made: Tensor | None = None

    def take(self, rows: Tensor) -> Normed:
        s = self.stream
        more = None if s.more is None else s.more[..., rows, :]
        return Normed(Stream(s.value[rows], s.wide, s.fast, more, s.norm), self.norm)

    def tensor(self) -> Tensor:
        """The sum made, in the stream too, and normed."""
        if self.made is not None:
            return self.made
        s, norm = self.stream, self.norm
        if s.more is not None and s.norm is not None and rms(s.norm) is None:
            plus = s.more.sum(0).to(s.value.dtype) if s.more.dim() == 3 else s.more
            s.more, s.norm = s.norm(plus), None
        s.value, y = add_norm(s.value, s.more, rms(norm), rms(s.norm), s.fast)
        s.more = s.norm = None
        self.made = y if norm is None or rms(norm) is not None else norm(y)
        return self.made


def tensor(x: Stream | Normed) -> Tensor:
    return (x if isinstance(x, Normed) else Normed(x, None)).tensor()


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
    positions `pos` (b), no row that counts longer than `bound`, or the prompts of a `pack`. States of fixed size have a
    place for every row; those of rows that are not `live` stay as they are."""

    stores: list[dict[str, Tensor]]  # of each layer: (pages page ...)
    table: Tensor
    length: int
    pos: Tensor | None = None
    live: Tensor | None = None
    bound: int = 0
    pack: Pack | None = None
    index: int = 0
    entries: slice = field(default_factory=lambda: slice(None))
    states: list[dict[str, Tensor]] = field(default_factory=list)  # of each layer: (rows ...)
    memo: dict[Any, Any] = field(default_factory=dict)

    def layer(self, index: int) -> Pages:
        return replace(self, index=index)

    def only(self, entries: slice) -> Pages:
        """Some of what a layer's tokens leave behind."""
        return replace(self, entries=entries)

    @property
    def mine(self) -> tuple[Tensor, ...]:
        return tuple(self.stores[self.index].values())[self.entries]

    @property
    def longest(self) -> int:
        """No text that counts is longer."""
        return self.bound if self.pack is None else self.pack.sizes.whole or self.pack.sizes.longest

    def each(self, most: int) -> Iterator[tuple[slice, Pages]]:
        """A step as it is, or the tokens of a pack, up to `most` at once, as rows of steps."""
        if (pack := self.pack) is None:
            yield slice(None), self
            return
        for i in range(0, len(pack.pos), most):
            rows = slice(i, i + most)
            table = pack.table[pack.row[rows]].int()
            yield (
                rows,
                replace(self, pack=None, table=table, pos=pack.pos[rows], bound=self.longest),
            )

    def at(self, spots: Tensor, real: Tensor) -> tuple[Tensor, ...]:
        """What tokens of the pool (n k) left behind, (n k ...); zero where one is not `real`."""
        spots = spots.long().where(real, 0)
        each = (memory.flatten(0, 1)[spots] for memory in self.mine)
        return tuple(x.masked_fill(~real.view(*real.shape, *[1] * (x.dim() - 2)), 0) for x in each)

    def store(self, *new: Tensor) -> None:
        """What each token (n ...) leaves behind, in its page."""
        if self.pos is not None and self.pack is None and ready(self.mine[0]):
            for memory, x in zip(self.mine, new, strict=True):
                gpu_latent.put(x.flatten(1), memory.flatten(2), self.table, self.pos)
            return
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

    def keep(self) -> tuple[dict[str, Tensor], Span]:
        """All that lies in the pages of a step's rows, or of a pack's texts, and their positions, as a cache gives
        them; past the end of a text what others left there."""
        table = (self.table if self.pack is None else self.pack.table).long()
        stores = self.stores[self.index]
        each = {name: x[table].flatten(1, 2) for name, x in stores.items()}
        size = next((x.shape[1] for x in each.values()), 0)
        return each, Span.run(0, size, table.device)

    # As a cache has it: nothing is forgotten.
    window: ClassVar[None] = None

    @property
    def state(self) -> dict[str, Tensor]:
        """Of every row of the step, or of every prompt: nothing where a text begins."""
        mine, pack = self.states[self.index], self.pack
        if pack is None:
            assert self.pos is not None
            return {name: x[: len(self.pos)] for name, x in mine.items()}
        new = pack.starts == 0
        return {name: x[pack.homes].masked_fill(_as(new, x), 0) for name, x in mine.items()}

    def put(self, state: dict[str, Tensor], past: Any) -> None:
        """`past`, what takes tokens back, is not asked for here."""
        for name, x in self.states[self.index].items():
            if self.pack is not None:
                x[self.pack.homes] = state[name].to(x.dtype)
            else:
                assert self.live is not None
                old = x[: len(self.live)]
                old.copy_(torch.where(_as(self.live > 0, x), state[name].to(x.dtype), old))

    def part(self) -> None:
        """The prompts' last states, to every row that goes on from them."""
        assert self.pack is not None
        source = self.pack.homes[self.pack.row[self.pack.last]]
        for states in self.states:
            for x in states.values():
                x[self.pack.rows] = x[source]

    def chosen(self, k: int) -> Tensor:
        """Which of k chosen tokens there are: (b k)."""
        assert self.pos is not None
        return torch.arange(k, device=self.pos.device) <= self.pos[:, None]

    @property
    def gap(self) -> Tensor:
        """How many tokens back each of the first `bound` places is in a step: (b 1 bound)."""
        assert self.pos is not None
        return self.pos[:, None, None] - torch.arange(self.bound, device=self.pos.device)

    def seen(self, window: int | None) -> Tensor:
        """Which of the first `bound` places a step may see: (b 1 1 bound)."""
        gap = self.gap
        near = (gap >= 0) if window is None else (gap >= 0) & (gap < window)
        return near[:, None]

    def bias(self, relative: Any) -> Tensor | None:
        """What is added to the score of a key so many tokens back, (h n); the last counts for all farther ones."""
        if relative is not None and relative not in self.memo:
            far = getattr(relative.config, "max_distance", self.length)
            at = torch.arange(min(far + 1, self.length), device=self.table.device)
            self.memo[relative] = relative(at[-1:, None], at[None])[0, :, 0].flip(-1).contiguous()
        return self.memo.get(relative)

    def angles(self, rope: Rope, dim: int) -> tuple[Tensor, Tensor]:
        """cos and sin for every position, (length r/2) each."""
        if (rope, dim) not in self.memo:
            like = self.mine[0]
            at = torch.arange(self.length, device=like.device)
            wide = torch.promote_types(like.dtype, torch.float32)
            cos, sin = rope.angles(at[None], dim, wide if rope.wide else like.dtype)
            self.memo[rope, dim] = cos[0, :, 0].contiguous(), sin[0, :, 0].contiguous()
        return self.memo[rope, dim]


def _as(rows: Tensor, x: Tensor) -> Tensor:
    """(b) as (b 1 ...), as many axes as x has."""
    return rows.view(-1, *[1] * (x.dim() - 1))


@dataclass
class SlotContext(Context):
    """Angles come from a table: a graph may not wait for numbers that the host makes."""

    def angles(self, rope: Rope, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        slots: Any = self.store
        cos, sin = (x[self.pos.index][:, :, None] for x in slots.angles(rope, dim))
        return cos, sin

    def turn(
        self, x: Tensor, rope: Rope | None, layout: str | None = None, out: Tensor | None = None
    ) -> Tensor:
        """By one kernel in a step, where there is one; into `out`, which may be x."""
        slots: Any = self.store
        if rope is None or slots.pack is not None or not ready(x) or x.stride(-1) != 1:
            y = super().turn(x, rope, layout)
            return y if out is None else out.copy_(y)
        paired, at = (layout or rope.layout) != "half", self.pos.index.flatten()
        to = None if out is None else out.flatten(0, 1)
        y = gpu_latent.turn(x.flatten(0, 1), slots.angles(rope, x.shape[-1]), at, paired, to)
        return y.view(x.shape) if out is None else out


# --- the parts ----------------------------------------------------------------------------------------------------


class Cuda(Specialise):
    def __init__(self, kernels: bool):
        super().__init__()
        self.kernels = kernels

    def kind(self, kind: Any) -> Any:
        return direct(kind)

    def product(self, *modules: Any, **more: Any) -> Product:
        return Product.of(list(modules), fast=self.kernels, **more)

    def note(self, weight: Tensor, why: str) -> str:
        """What `explain` adds where a part has no kernel."""
        return f", by torch's operations: {why}" if why and self.kernels and ready(weight) else ""

    def block(self, m: Block) -> nn.Module:
        names = ("norm1", "norm3") if m.cross is None else ("norm1", "norm2", "norm3")
        parts: dict[str, Any] = {n: LeftNorm(getattr(m, n), m.order == "post") for n in names}
        if m.cross is not None:
            parts["cross"] = self.cross(m.cross)
        return self.copy(m, **parts)

    def cross(self, m: Any) -> nn.Module:
        new = self.copy(m, SlotCross)
        new.first, new.out = self.product(m.wq), self.product(m.wo)
        new.both = self.product(m.wk, m.wv)
        self.rows[type(m).__name__, "SlotCross"] += 1
        return new

    def attention(self, m: Any) -> nn.Module:
        new, c = self.copy(m, SlotAttention), m.config
        gate = [] if m.wg is None else [m.wg]
        new.first, new.out = self.product(m.wq, m.wk, m.wv, *gate), self.product(m.wo)
        why = "" if new.fast(m.wk.weight) else f"heads of {m.d} and {m.e} features"
        new.note = self.note(m.wk.weight, why)
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
        why = "" if m.config.groups == 1 else "its router, as it chooses among groups"
        new.note = self.note(m.gate, why if suits(m.gate[0], new.all) else "experts of this size")
        return new

    def latent(self, m: Any) -> nn.Module:
        new = self.copy(m, SlotLatent)
        query = m.w_uq if m.w_dq is None else m.w_dq
        new.first, new.first_width = self.product(query, m.w_dkv), (len(query.weight), m.c, m.r)
        new.second = None if m.w_dq is None else self.product(m.w_uq)
        new.out = self.product(m.wo)
        new.up = tuple(
            w.contiguous() for w in m.w_ukv.weight.view(m.h, -1, m.c).split([m.d, m.e], 1)
        )
        return new

    def indexer(self, m: Any) -> nn.Module:
        new = self.copy(m, SlotIndexer)
        new.product, new.kernels = self.product(m.wq), self.kernels
        return new

    def sparse(self, m: Any) -> nn.Module:
        new, inner = self.copy(m, SlotSparse), m.attention
        if isinstance(inner, LatentAttention):
            query = inner.w_uq if inner.w_dq is None else inner.w_dq
            new.attention.first = self.product(query, inner.w_dkv, m.indexer.wk)
        return new

    def delta(self, m: Any) -> nn.Module:
        new = self.copy(m, SlotDelta)
        new.out, new.note = self.product(m.wo), self.note(m.wo.weight, "its state has no kernel")
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
        GatedDeltaRule: lambda maker, m: maker.delta(m),
        SparseAttention: lambda maker, m: maker.sparse(m),
        Indexer: lambda maker, m: maker.indexer(m),
        FeedForward: lambda maker, m: maker.feed_forward(m),
        MixtureOfExperts: lambda maker, m: maker.experts(m),
    }


@torch.inference_mode(False)
@torch.no_grad()
def decoder(model: Model, kernels: bool = True) -> Any:
    """The model out of these parts. It shares the model's weights, but for MLA's, which are laid out anew by head."""
    plain: Any = model
    maker, head, weight = Cuda(kernels), plain.head, getattr(plain, plain.words).weight
    parts = {"head": maker.copy(head, SlotHead)}
    if plain.reads_source:
        parts |= {"source": plain.source, "encoder": plain.encoder}
        maker.rows["Stack", "plain: the encoder reads a source once"] += 1
    new = maker.copy(model, **parts)
    own = weight if head.weight is None else head.weight
    new.head.product = vocabulary(own, head.bias, kernels)
    new.parts = dict(maker.rows)
    return new


def vocabulary(weight: Tensor, bias: Tensor | None, kernels: bool) -> Product:
    """The head's product. On a GPU it has rows for a multiple of 8 tokens, without which matrix products there are
    several times slower; those added have a logit of -infinity."""
    if weight.is_cuda and len(weight) % 8:
        bias = lengthened(weight.new_zeros(len(weight)) if bias is None else bias, -torch.inf)
        weight = lengthened(weight, 0.0)
    return Product(weight.detach(), bias, fast=kernels)


def lengthened(x: Tensor, value: float) -> Tensor:
    """x with rows up to a multiple of 8, of which x itself is a view from then on."""
    more = x.new_full((-len(x) % 8, *x.shape[1:]), value)
    if x.storage_offset() or x.untyped_storage().nbytes() != x.nbytes + more.nbytes:
        return joined([x, more], [x, None])
    # It was before.
    return x.detach().as_strided((len(x) + len(more), *x.shape[1:]), x.stride())


class SlotHead(LMHead):
    product: Product

    def features(self, h: Any) -> Any:
        scaled = getattr(self.config, "scaled", False)
        return super().features(h.tensor()) if scaled else h

    def project(self, x: Any, weight: Tensor) -> Tensor:
        return self.product(x)

    def capped(self, logits: Tensor) -> Tensor:
        """Rows that `vocabulary` added stay at -infinity."""
        if self.softcap is None:
            return logits
        return super().capped(logits).masked_fill(logits == -torch.inf, -torch.inf)


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
        return tensor(x)

    def logits(self, x: Tensor) -> Tensor:
        few = self.fast and ready(x) and len(x) <= HIGHEST and x.dtype == self.router.weight.dtype
        return scores(x, self.router.weight, self.router.bias) if few else super().logits(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        if c.groups > 1 or not (self.fast and ready(x)):
            return super().route(x)
        sigmoid = c.score == "sigmoid"
        more: dict[str, Any] = {"normalized": c.normalized, "correction": self.correction}
        return choose(self.logits(x), c.active, sigmoid=sigmoid, gain=c.gain, **more)

    def mix(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        form = experts if self.fast and suits(x, self.all) else expert_reference
        return form(x, chosen, weight, self.all)

    def plus(self, out: Tensor, shared: Tensor) -> Tensor:
        return summed(shared, out)

    def leave(self, out: Tensor, residual: Any) -> Any:
        return residual.plus(out, self.add.norm)


@dataclass
class Asked:
    """Of tokens whose entries are in their pages: what makes their queries (n h .), what those are made of (n m), the
    entries themselves, and what was made of the same x for others (n .)."""

    queries: Callable[[], Tensor]
    source: Tensor
    new: tuple[Tensor, ...] = ()
    more: Tensor | None = None


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
        fast, gate, wide = self.fast(slots.mine[0]), None, self.h * self.e
        qkv = self.first(x, split=fast and slots.pack is None and self.wg is None)
        if self.wg is not None:
            qkv, gate = qkv[:, :-wide].contiguous(), qkv[:, -wide:]
        bias = slots.bias(ctx.relative)
        # torch's kernels for prompts, and ours, have no bias on positions.
        if fast and (bias is None or slots.pack is None):
            o = self.by_kernels(qkv, slots, bias)
        else:
            o = self.by_torch(qkv, slots, ctx, bias)
        return o if gate is None else o * self.sigmoid(gate)

    def weigh(self, o: Tensor, x: Any) -> Tensor:
        """`look` had its gate at hand."""
        return o

    def by_kernels(self, qkv: Tensor, slots: Any, bias: Tensor | None) -> Tensor:
        c, (k, v), pack = self.config, slots.mine, slots.pack
        angles = None if c.rope is None else slots.angles(c.rope, self.d)
        form: dict[str, Any] = {"scale": self.scale, "window": c.window}
        form |= {"softcap": c.softcap, "sinks": self.sinks}
        if pack is None:
            form |= {"angles": angles, "table": slots.table, "bound": slots.bound, "bias": bias}
            form |= {"heads": self.h, **self.heads}
            return gpu_attention.decode(qkv, k, v, slots.pos, **form).flatten(1)
        near = c.window is not None and c.window < pack.sizes.longest
        ours = near or pack.sizes.whole or c.softcap is not None or self.sinks is not None
        rows = bool(ours) or not side_by_side(k, v)
        laid = gpu_prompt.lay_qkv(qkv, pack, k, v, self.h, angles, rows=rows, **self.heads)
        if ours:
            return gpu_prompt.over_pages(laid[0], k, v, pack, **form)
        return gpu_prompt.attend(laid, pack, self.scale, None)

    def by_torch(self, qkv: Tensor, slots: Pages, ctx: Context, bias: Tensor | None) -> Tensor:
        c, pack = self.config, slots.pack
        q, *new = self.turned(qkv, ctx)
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
        o = self.mix(laid[0], kept, seen, ctx, spread(bias, gap)).flatten(2).flatten(0, 1)
        return o if pack is None else o[pack.back]

    def asked(self, x: Tensor, ctx: Context) -> Asked:
        slots: Any = ctx.store
        q, *new = self.turned(self.first(x), ctx)
        slots.store(*new)
        return Asked(lambda: q, x)

    def met(self, q: Tensor) -> Tensor:
        """Queries as they meet what is kept."""
        return q

    def over(self, q: Tensor, slots: Pages, ctx: Context, spots: Tensor) -> Tensor:
        """Queries (n h d) over tokens of the pool (n k), as far as there are any: (n, h e)."""
        real = slots.chosen(spots.shape[1])
        kept = dict(zip("kv", slots.at(spots, real), strict=True))
        return self.mix(q[:, None], kept, real[:, None, None], ctx, None).flatten(1)

    def turned(self, qkv: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q (n h d), k (n g d), v (n g e), normed and turned."""
        sizes = [self.h * self.d, self.g * self.d, self.g * self.e]
        q, k, v = (y.view(*ctx.pos.index.shape, -1) for y in qkv.split(sizes, -1))
        new = self.as_entries(k, v, ctx)
        each = (self.as_queries(q, ctx), new["k"], new["v"])
        return tuple(y.flatten(0, 1).contiguous() for y in each)  # type: ignore[return-value]

    def leave(self, o: Tensor, residual: Any = None) -> Any:
        return residual.add(self.out, o, self.add.norm)


class SlotCross(SlotAttention):
    """Attention to a source, of which every token of a step sees all; `remember` puts it into its pages."""

    both: Product

    def look(self, x: Any, ctx: Context) -> Tensor:
        slots: Any = ctx.store
        k, v = slots.mine
        q = self.as_heads(self.first(x), self.q_norm)  # n h d
        if not self.fast(k):
            seen = ctx.once("seen", lambda: slots.seen(None))
            kept = dict(zip("kv", slots.kept(), strict=True))
            return self.mix(q[:, None], kept, seen, ctx, None).flatten(1)
        sizes = ctx.once("sizes", lambda: slots.pos + 1)
        form: dict[str, Any] = {"scale": self.scale, "softcap": self.config.softcap}
        form |= {"sinks": self.sinks, "heads": self.h, "table": slots.table, "bound": slots.bound}
        return gpu_attention.decode(q.flatten(1), k, v, sizes, new=False, **form).flatten(1)

    def remember(self, memory: Tensor, slots: Pages) -> None:
        """Keys and values of what an encoder gave, (n m)."""
        k, v = self.both(memory).split([self.g * self.d, self.g * self.e], -1)
        slots.store(self.as_heads(k, self.k_norm), v.unflatten(-1, (self.g, self.e)))


class SlotLatent(LatentAttention):
    """MLA, absorbed: queries meet the latents themselves; its pages hold latents (c) and rotary keys (r)."""

    first: Product  # of these widths: queries or their latent, latent, rotary key; and what others read
    first_width: tuple[int, int, int]
    second: Product | None
    out: Product
    up: tuple[Tensor, Tensor]

    def fast(self, latents: Tensor) -> bool:
        suits = self.config.window is None and gpu_latent.suits(self.c, self.r, latents)
        return self.first.fast and suits

    def look(self, x: Any, ctx: Context) -> Tensor:
        slots: Any = ctx.store
        asked = self.asked(x, ctx)
        q = asked.queries()
        sizes = None if slots.pack is None else slots.pack.sizes
        # Few tokens after a long text: as `LatentAttention.mix` has it, but of a pack.
        few = sizes and sizes.whole and sizes.longest * (self.c - self.d) < self.c * self.d
        if sizes is None or (few and self.fast(slots.mine[0])):
            each = slots.each(max(1, SCORES // slots.longest))
            return joined_rows([self.over(self.met(q[rows]), step, ctx) for rows, step in each])
        # Heads of their own, from the latents: cheaper than to attend c wide.
        laid = gpu_prompt.lay(slots.pack, q, *self.heads(asked.new))
        if sizes.whole:
            laid = laid[0], *self.heads(slots.kept())
        return gpu_prompt.attend(laid, slots.pack, self.scale, self.config.window)

    def over(self, q: Tensor, slots: Any, ctx: Context, spots: Tensor | None = None) -> Tensor:
        """Queries (n h c+r) of a step over their texts, or over tokens of the pool (n k): (n, h e)."""
        if self.fast(slots.mine[0]):
            latents, ropes = slots.mine
            more: dict[str, Any] = {"scale": self.scale, "bound": slots.bound, "chosen": spots}
            o = gpu_latent.decode(q, latents, ropes, slots.table, slots.pos, **more)
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

    def asked(self, x: Any, ctx: Context) -> Asked:
        slots: Any = ctx.store
        here: Any = ctx
        both, rope, wide = self.first(x), self.config.rope, self.first_width
        q, latent, key, more = both.split([*wide, both.shape[-1] - sum(wide)], -1)
        new: tuple[Tensor, ...] = ()
        if slots.pack is None and self.fast(slots.mine[0]):
            assert rope is not None
            form: dict[str, Any] = {"norms": (rms(self.q_norm), rms(self.kv_norm))}
            form |= {"angles": slots.angles(rope, self.r), "paired": rope.layout != "half"}
            place = (slots.mine, slots.table, slots.pos)
            low = gpu_latent.keep(both, wide[0], self.second is not None, *place, **form)
        else:
            low = q if self.q_norm is None else self.q_norm(q)
            latent = latent if self.kv_norm is None else self.kv_norm(latent)
            new = (latent,)
            if self.r:
                # Where it lies: nobody else reads it.
                y = key.unsqueeze(-2).unflatten(0, ctx.pos.index.shape)
                here.turn(y, rope, out=y)
                new = (latent, key)
            slots.store(*new)

        def queries() -> Tensor:
            y = (q if self.second is None else self.second(low)).unflatten(-1, (self.h, -1))
            if self.r:
                turns = y[..., self.d :].unflatten(0, ctx.pos.index.shape)
                here.turn(turns, rope, out=turns)
            return y

        return Asked(queries, x if self.second is None else low, new, more)

    def leave(self, o: Tensor, residual: Any = None) -> Any:
        return residual.add(self.out, o, self.add.norm)


class SlotDelta(GatedDeltaRule):
    """The gated delta rule as it is, its states in the rows' places."""

    out: Product

    def look(self, x: Any, ctx: Context) -> Tensor:
        slots: Any = ctx.store
        x, pack = tensor(x), slots.pack
        if pack is None:
            return super().look(x[:, None], ctx)[:, 0]
        place = torch.arange(pack.grid.shape[1], device=x.device)
        real = place < (pack.totals - pack.starts)[:, None]
        span = Span(torch.where(real, place + pack.starts[:, None], -1))
        return super().look(x[pack.grid], replace(ctx, pos=span)).flatten(0, 1)[pack.back]

    def weigh(self, o: Tensor, x: Any) -> Tensor:
        return super().weigh(o, tensor(x))

    def leave(self, o: Tensor, residual: Any = None) -> Any:
        return residual.add(self.out, o.flatten(1), self.add.norm)


class SlotIndexer(Indexer):
    """Its pages hold index keys."""

    product: Product
    kernels: bool

    def turned(self, x: Tensor, ctx: Context) -> Tensor:
        """Where they lie: nobody else reads them."""
        here: Any = ctx
        some = x[..., : self.config.rope_dim]
        here.turn(some, self.config.attention.rope, "half", out=some)
        return x

    def fast(self, keys: Tensor) -> bool:
        return self.kernels and gpu_sparse.suits(self.d, self.h, keys, self.fp8)

    @property
    def fp8(self) -> bool:
        return self.config.precision == "fp8"

    def asked(
        self, x: Tensor, ctx: Context, slots: Any, asked: Asked | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """The index keys of x (n m), into their pages; and what is `asked` for, queries (n H D) and weights (n H)."""
        c, (keys,), shape, q = self.config, slots.mine, ctx.pos.index.shape, None
        if slots.pack is not None or c.hadamard or not self.fast(keys):
            slots.store(self.kept(self.keys(x.view(*shape, -1), ctx)).flatten(0, 1))
            if asked is None:
                return None
            q, weights = self.queries(asked.source.view(*shape, -1), ctx), self.weights(x)
            q = q.flatten(0, 1).contiguous()
            if self.fp8 and self.fast(keys):
                q, size = to_fp8(q)
                weights = weights * size[..., 0]
            return q, weights
        key = self.wk(x) if asked is None or asked.more is None else asked.more
        if asked is not None:
            q = self.product(asked.source).unflatten(-1, (self.h, self.d))
        norm, rope = (self.k_norm.weight, self.k_norm.bias, self.k_norm.eps), c.attention.rope
        angles = slots.angles(rope, c.rope_dim) if c.rope_dim else None
        form: dict[str, Any] = {"norm": norm, "angles": angles, "fp8": self.fp8}
        found = gpu_sparse.enter(x, self.ww.weight, q, key, keys, slots.table, slots.pos, **form)
        return None if q is None else found

    def over(self, q: Tensor, weights: Tensor, step: Pages) -> Tensor:
        """Scores (b bound) of every key so far: index queries (b H D) and weights (b H)."""
        (keys,), pos = step.mine, step.pos
        assert pos is not None
        if self.fast(keys):
            return gpu_sparse.index(q, keys, weights, step.table, pos, step.bound)
        dots = self.dots(q[:, None], *step.kept())
        return self.join(dots, weights[:, None].to(dots.dtype))[:, 0]

    def best(self, scores: Tensor, step: Pages) -> Tensor:
        """Where the best k tokens of each row lie in the pool (b k)."""
        (keys,), (table, pos), k = step.mine, (step.table, step.pos), self.config.topk
        assert pos is not None
        page = keys.shape[1]
        if self.fast(keys):
            return gpu_sparse.topk(scores, pos, k, table, page)
        at = gpu_sparse.reference(scores, pos + 1, k).long()
        return table.gather(1, at // page) * page + at % page


class SlotSparse(SparseAttention):
    """DSA: every token's index key is scored, and the attention in it looks at the best; its pages hold what that one's
    do, and index keys."""

    def look(self, x: Any, ctx: Context) -> Tensor:
        slots: Any = ctx.store
        attention: Any = self.attention
        indexer: Any = self.indexer
        x = tensor(x)
        own, index = slots.only(slice(-1)), slots.only(slice(-1, None))
        within = replace(ctx, store=own)
        if self.dense(slots.longest):
            indexer.asked(x, ctx, index)
            return attention.look(x, within)
        asked = attention.asked(x, within)
        index_q, weights = indexer.asked(x, ctx, index, asked)
        q, out = asked.queries(), []
        for rows, step in index.each(max(1, SCORES // slots.longest)):
            spots = indexer.best(indexer.over(index_q[rows], weights[rows], step), step)
            met = attention.met(q[rows])
            out.append(attention.over(met, step.only(own.entries), within, spots))
        return joined_rows(out)

    def leave(self, o: Tensor, residual: Any = None) -> Any:
        attention: Any = self.attention
        return residual.add(attention.out, o, self.add.norm)


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
