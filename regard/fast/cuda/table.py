"""Target cuda: the table of fast parts, by which a model is made anew for a graph, and what has no graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.attention import DSA
from regard.attention.delta import GatedDeltaRule
from regard.attention.latent import LatentAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.protocol import Mechanism, MechanismConfig
from regard.attention.sparse import Indexer, SparseAttention
from regard.attention.ssd import StateSpaceDual
from regard.attention.state import StateMechanism
from regard.block import ORDERS, Block, Stack, after, before
from regard.fast.cuda.generic import GenericBlock, GenericMechanism, GenericPart
from regard.fast.cuda.parts import (
    GraphAttention,
    GraphCross,
    GraphDelta,
    GraphDual,
    GraphExperts,
    GraphFeedForward,
    GraphHead,
    GraphIndexer,
    GraphLatent,
    GraphSparse,
    GraphState,
)
from regard.fast.cuda.quantised import PackedHead
from regard.fast.cuda.residual import (
    LeftNorm,
    Product,
    rms,
    vocabulary,
)
from regard.fast.specialise import P, Row, Specialise, direct, row_of, unlike
from regard.kernels.packed import Packed, PackedLinear
from regard.kernels.triton.experts import Experts, suits
from regard.kernels.triton.linear import ready
from regard.layers import FeedForward, LMHead
from regard.models import EncoderDecoder, Model
from regard.models.adapt import Int4Linear, LowRank
from regard.models.mtp import MTPLayers
from regard.moe import MixtureOfExperts
from regard.position import RelativeBias


def why_not(model: Model) -> str:
    """What about a model has no static step, or nothing."""
    c = model.config
    two = c.kind == "encoder_decoder"
    if not two and (c.kind != "transformer" or c.embedding.kind != "tokens"):
        return f"{type(c).__name__} is not a tower that writes tokens"
    tower, position = (c.decoder, c.target.position) if two else (c.tower, c.embedding.position)
    if not tower.causal or (tower.cross and not two):
        return "its tower is not causal, or reads what no encoder of its own makes"
    specs = model.decoder.cache_specs if isinstance(model, EncoderDecoder) else None
    if specs and specs("cross") != specs():
        return "its attention to the source keeps other shapes than that to the text"
    if tower.cross and (tower.cross.kind != "gqa" or tower.cross.gated):
        return "its attention to the source has latents, or a gate"
    if tower.out_dim is not None:
        return "its tower has a layer behind its last norm"
    if tower.reads_ids or tower.borrowing:
        return "its layers read keys of others, or tables of their own"
    if tower.streams or any(a.kind == "compressed" for a in tower.each("attention")):
        return "it has several streams, or keys that stand for many tokens"
    if c.head is None or c.head.kind != "lm":
        return "it has no language-model head"
    if position is not None and getattr(position, "skip", None) is not None:
        return "its positions skip tokens"
    if any(isinstance(m, LowRank | Int4Linear) for m in model.modules()):
        return "its linear layers are packed, or have adapters: merge them first"
    for part, kind in ((getattr(model, model.writer), Stack), (model.head, LMHead)):
        if row_of({kind: True}, type(part)) is None:
            return f"it has a {type(part).__name__}"
    blocks: Any = model.decoder.blocks if isinstance(model, EncoderDecoder) else ()
    for cross in (block.cross for block in blocks):
        own = type(cross) is not GroupedQueryAttention and f"it is a {type(cross).__name__}"
        if why := own or unlike(cross):
            return f"its attention to the source: {why}"
    if any(type(p.data) is not Tensor for p in model.parameters()):
        return "its weights are spread over several devices"
    return "a probe watches it" if model.watch is not None else ""


def inner(attention: MechanismConfig) -> MechanismConfig:
    """The attention that a sparse one chooses keys for; any other itself."""
    return attention.attention if isinstance(attention, DSA) else attention


class Cuda(Specialise):
    """`relative`: the bias on positions that attention has."""

    def __init__(self, kernels: bool, relative: nn.Module | None):
        super().__init__()
        self.kernels, self.biased = kernels, relative is not None
        relative = relative[0] if isinstance(relative, nn.ModuleList) else relative
        # Kernels are given a bias by distance alone.
        ours = relative is None or (type(relative) is RelativeBias and relative.by_distance)
        self.no_distance = "" if ours else f"it has a {type(relative).__name__}"

    def kind(self, kind: type[P]) -> type[P]:
        return direct(kind)

    def product(
        self, *modules: nn.Linear | PackedLinear, act: str = "", gated: bool = False
    ) -> Product:
        return Product.of(modules, act, gated, self.kernels)

    def note(self, weight: Tensor | Packed, why: str) -> str:
        """What `explain` adds where a part has no kernel."""
        return f", by torch's operations: {why}" if why and self.kernels and ready(weight) else ""

    def new(self, module: nn.Module) -> nn.Module:
        """What has no row runs as it is: a mechanism, what stands for a feed-forward (`feeding`), a block."""
        if isinstance(module, Block) and self.row(type(module)) is None:
            return self.over_tensors(module, "it has no fast form")
        return self.part(module) if isinstance(module, Mechanism) else super().new(module)

    def part(self, m: nn.Module) -> nn.Module:
        """A mechanism, or what stands for a feed-forward: as it is where the table has no row."""
        if self.row(type(m)) is not None:
            return super().new(m)
        new = self.generic(m, "it has no fast form")
        self.rows[type(m).__name__, f"{type(new).__name__}{new.note}"] += 1
        return new

    def generic(self, m: nn.Module, why: str) -> GenericMechanism | GenericPart:
        new = GenericMechanism(m) if isinstance(m, Mechanism) else GenericPart(m)
        new.note = f", as it is: {why}"
        return new

    def block(self, m: Block) -> nn.Module:
        # These leave sums and norms to who reads them; any other order runs over tensors.
        around = ORDERS[m.order].around
        why = "" if around in (before, after) else f"its order is {m.order}"
        why = why if m.residual else "it has no residual"
        if why := why or ("what it gives is scaled" if m.gain is not None else ""):
            return self.over_tensors(m, why)
        names = ("norm1", "norm2", "norm3")
        # Where both parts read one norm, the first of these has it.
        fed = (m.attention, m.cross, None if ORDERS[m.order].shared else m.ffn)
        norms = [n for n, part in zip(names, fed, strict=True) if part is not None]
        parts: dict[str, nn.Module] = {n: LeftNorm(getattr(m, n), around is after) for n in norms}
        if m.cross is not None:
            parts["cross"] = self.cross(m.cross)
        return self.copy(m, **self.fed(m), **parts)

    def over_tensors(self, m: Block, why: str) -> nn.Module:
        self.rows[type(m).__name__, f"GenericBlock, over tensors: {why}"] += 1
        cross = None if m.cross is None else self.cross(m.cross)
        return GenericBlock(self.copy(m, **self.fed(m), cross=cross))

    def fed(self, m: Block) -> dict[str, nn.Module]:
        return {} if m.ffn is None else {"ffn": self.feeding(m.ffn)}

    def feeding(self, m: nn.Module) -> nn.Module:
        """What stands for a feed-forward; layers may share it."""
        if id(m) not in self.made:
            self.made[id(m)] = self.part(m)
        return self.made[id(m)]

    def cross(self, m: Mechanism) -> nn.Module:
        """Cross-attention. The table has no row for it, as its class is that of self-attention: blocks call this. The
        plain model's matrices of keys and values become views of one."""
        assert isinstance(m, GroupedQueryAttention), "see `why_not`"
        new = self.copy_as(GraphCross, m)
        new.first, new.out = self.product(m.wq), self.product(m.wo)
        new.wkv = self.product(m.wk, m.wv)
        self.rows[type(m).__name__, "GraphCross"] += 1
        return new

    def attention(self, m: GroupedQueryAttention) -> nn.Module:
        if why := unlike(m) or self.no_distance:
            return self.generic(m, why)
        new, c = self.copy_as(GraphAttention, m), m.config
        gate = [] if m.wg is None else [m.wg]
        new.first, new.out = self.product(m.wq, m.wk, m.wv, *gate), self.product(m.wo)
        weight = new.first.weight
        why = "" if new.fast(weight) else f"heads of {m.d} and {m.e} features"
        new.note = self.note(weight, why)
        norms, paired = (rms(m.q_norm), rms(m.k_norm)), bool(c.rope and c.rope.layout != "half")
        new.heads = {
            "norms": norms if m.q_norm else None,
            "whole": c.qk_norm_whole,
            "paired": paired,
        }
        return new

    def experts(self, m: MixtureOfExperts) -> nn.Module:
        if why := unlike(m, FeedForward, nn.ModuleDict):
            return self.generic(m, why)
        if m.config.limit is not None and not m.config.raised:
            return self.generic(m, "nothing is added to up")
        new = self.copy_as(GraphExperts, m)
        biases = None
        if m.gate_bias is not None and m.up_bias is not None and m.down_bias is not None:
            biases = (m.gate_bias, m.up_bias, m.down_bias)
        act, limit = m.config.activation, m.config.limit
        new.all = Experts(m.gate, m.up, m.down, biases, act, limit)
        new.fast = self.kernels
        why = "" if m.config.groups == 1 else "its router, as it chooses among groups"
        why = "its router, as it has gains" if m.config.gains else why
        new.note = self.note(m.gate, why if suits(m.gate[0], new.all) else "experts of this size")
        return new

    def latent(self, m: LatentAttention) -> nn.Module:
        if why := unlike(m) or self.no_bias:
            return self.generic(m, why)
        new = self.copy_as(GraphLatent, m)
        query = m.w_uq if m.w_dq is None else m.w_dq
        new.first, new.first_width = self.product(query, m.w_dkv), (query.out_features, m.c, m.r)
        new.second = None if m.w_dq is None else self.product(m.w_uq)
        new.out = self.product(m.wo)
        new.up = tuple(
            w.contiguous() for w in m.w_ukv.weight.view(m.h, -1, m.c).split([m.d, m.e], 1)
        )
        return new

    def indexer(self, m: Indexer) -> nn.Module:
        new = self.copy_as(GraphIndexer, m)
        new.product, new.kernels = self.product(m.wq), self.kernels
        return new

    @property
    def no_bias(self) -> str:
        return "no kernel of it has a bias on positions" if self.biased else ""

    def sparse(self, m: SparseAttention) -> nn.Module:
        why = "its choice has a window" if m.config.window else self.no_bias
        why = why or (
            "its attention has a gate" if getattr(inner(m.config), "gated", False) else ""
        )
        if type(m.attention) not in self.table:
            why = why or f"it chooses keys for a {type(m.attention).__name__}"
        why = why or unlike(m, type(m.attention), Indexer)
        why = why or unlike(m.attention) or unlike(m.indexer)
        if why:
            return self.generic(m, why)
        new, attention = self.copy_as(GraphSparse, m), m.attention
        # A packed matrix and the indexer's, which is not, are not joined.
        if isinstance(attention, LatentAttention) and type(attention.w_dkv) is nn.Linear:
            query = attention.w_uq if attention.w_dq is None else attention.w_dq
            new.attention.first = self.product(query, attention.w_dkv, m.indexer.wk)
        return new

    def state(self, kind: type[GraphState], m: StateMechanism) -> nn.Module:
        if why := unlike(m):
            return self.generic(m, why)
        new: Any = self.copy_as(kind, m)
        new.out = self.product(m.wo)
        new.note = self.note(new.out.weight, "its state has no kernel")
        return new

    def feed_forward(self, m: FeedForward) -> nn.Module:
        if why := unlike(m):
            return self.generic(m, why)
        both = [m.up] if m.gate is None else [m.gate, m.up]
        new = self.copy_as(GraphFeedForward, m)
        new.first = self.product(*both, act=m.config.activation, gated=m.gate is not None)
        new.out = self.product(m.down)
        return new

    table: ClassVar[Mapping[type, Row]] = {
        nn.Dropout: lambda maker, m: direct(nn.Identity)(),
        # They guess outside of graphs.
        MTPLayers: lambda maker, m: m,
        Block: lambda maker, m: maker.block(m),
        Stack: lambda maker, m: maker.copy(m, norm=LeftNorm(m.norm)),
        GroupedQueryAttention: lambda maker, m: maker.attention(m),
        LatentAttention: lambda maker, m: maker.latent(m),
        GatedDeltaRule: lambda maker, m: maker.state(GraphDelta, m),
        StateSpaceDual: lambda maker, m: maker.state(GraphDual, m),
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
    maker, head = Cuda(kernels, getattr(plain, plain.writer).relative), plain.head
    weight = getattr(plain, plain.words).weight
    parts = {"head": maker.copy_as(GraphHead, head)}
    if plain.reads_source:
        parts |= {"source": plain.source, "encoder": plain.encoder}
        maker.rows["Stack", "plain: the encoder reads a source once"] += 1
    new = maker.copy(model, **parts)
    own = weight if head.weight is None else head.weight
    own = head.held.packed if isinstance(head, PackedHead) else own
    new.head.product = vocabulary(own, head.bias, kernels)
    new.parts = {**model.parts, **maker.rows}
    return new
