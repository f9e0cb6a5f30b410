"""Products that share their input joined into one, by torch; packed weights behind all of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.latent import LatentAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.protocol import Context
from regard.block import Block
from regard.fast.specialise import P, Row, Specialise, direct, unlike
from regard.kernels.linear import feedback, pack, possible
from regard.layers import FeedForward, LMHead, times
from regard.machine import trim
from regard.mask import Span
from regard.models.adapt import Int4Linear, LowRank
from regard.moe import MixtureOfExperts

# Linear layers that have the weight a product needs.
ADAPTED = (LowRank, Int4Linear)
TOKENS = 16  # of a product head by head


class Join(Specialise):
    """Parts on shared or packed weights, products that share their input joined into one."""

    def __init__(
        self, precision: str, dtype: torch.dtype | None, spent: set[int], inputs: Mapping[int, Tensor]
    ):  # fmt: skip
        """`spent`: parameters (their ids) that may be given up when they have been packed; `inputs`: what `read_by`
        found."""
        super().__init__()
        self.precision, self.dtype, self.spent, self.inputs = precision, dtype, spent, inputs
        self.cast: dict[int, nn.Parameter] = {}  # a weight used twice stays one

    def row(self, kind: type) -> Row | None:
        # These read weights, and a stranger's class inherits that.
        readers = (LatentAttention, MixtureOfExperts)
        return super().row(next((each for each in readers if issubclass(kind, each)), kind))

    def kind(self, kind: type[P]) -> type[P]:
        return direct(kind)

    def copy_as(self, kind: type[P], module: nn.Module, /, **parts: nn.Module | None) -> P:
        new, wide = super().copy_as(kind, module, **parts), getattr(module, "wide", ())
        new._parameters = {
            n: p if n in wide else self.parameter(p) for n, p in module._parameters.items()
        }
        return new

    def parameter(self, p: Tensor | None) -> Any:
        if p is None:
            return None
        if id(p) not in self.cast:
            x = p.detach().to(self.dtype or p.dtype)
            # What stays is no longer a part of its file, which may change.
            x = x.clone() if getattr(p, "mapped", False) and x.data_ptr() == p.data_ptr() else x
            self.cast[id(p)] = nn.Parameter(x, requires_grad=False)
        return self.cast[id(p)]

    def unpacked(self, linear: nn.Module) -> nn.Module:
        """A linear layer whose weight others read: a plain one, with what LoRA adds in it."""
        if not isinstance(linear, ADAPTED):
            return self.copy(linear)
        new, weight = direct(nn.Linear)(1, 1, device="meta"), linear.weight.detach()
        new.out_features, new.in_features = weight.shape
        new.weight = nn.Parameter(weight.to(self.dtype or weight.dtype), requires_grad=False)
        new.bias = self.parameter(linear.bias)
        return new

    def product(self, *linears: nn.Linear, out: torch.dtype | None = None) -> nn.Module:
        """One layer that gives the outputs of all `linears` after each other. It empties the weights of those in
        `spent`, so that a model is not held twice."""
        weight, bias = stacked(linears)
        precision = possible(self.precision, weight)
        made = pack(weight, bias, precision, out, self.back(linears[0], precision))
        self.give_up(linears)
        return made

    def back(self, module: nn.Module, precision: str) -> Tensor | None:
        found = self.inputs.get(id(module))
        # Numbers that no dtype holds (float16 has few) say nothing: such weights are rounded to the nearest.
        if found is None or not bool(found.isfinite().all()):
            return None
        return feedback(found, precision)

    def give_up(self, linears: Sequence[nn.Linear]) -> None:
        gone = [linear for linear in linears if id(linear.weight) in self.spent]
        for linear in gone:
            linear.weight.data = linear.weight.data.new_empty(0)
        # What is freed is not found again for memory that must be aligned.
        if gone:
            trim()

    def block(self, module: Block) -> nn.Module:
        """Products are joined where a block holds them; a sparse attention calls those of its inner one singly."""
        parts = {}
        for name, join in (("attention", self.attention), ("cross", self.cross)):
            part = getattr(module, name)
            if type(part) is not GroupedQueryAttention:
                continue
            if why := unlike(part, *ADAPTED):
                self.rows[type(part).__name__, f"plain: {why}"] += 1
            else:
                parts[name] = join(part)
                self.rows[type(part).__name__, type(parts[name]).__name__] += 1
        return self.copy(module, **parts)

    def attention(self, module: GroupedQueryAttention) -> nn.Module:
        wqkv = self.product(module.wq, module.wk, module.wv)
        return self.copy_as(JoinedAttention, module, wq=None, wk=None, wv=None, wqkv=wqkv)

    def cross(self, module: GroupedQueryAttention) -> nn.Module:
        wkv = self.product(module.wk, module.wv)
        return self.copy_as(JoinedCrossAttention, module, wk=None, wv=None, wkv=wkv)

    def latent(self, module: LatentAttention) -> nn.Module:
        """int8 makes a step of a last bit: there the bits of a row are its own."""
        own = self.precision in ("int8", "int4") and module.w_ukv.weight.is_cpu
        kind = OrderedLatent if own and type(module) is LatentAttention else type(module)
        return self.copy_as(kind, module, w_ukv=self.unpacked(module.w_ukv))

    def router(self, module: MixtureOfExperts) -> nn.Module:
        stays = module.config.wide_router and not isinstance(module.router, ADAPTED)
        return copy.copy(module.router) if stays else self.unpacked(module.router)

    def feed_forward(self, module: FeedForward) -> nn.Module | str:
        """Between the products int8 stays in the float32 that it gives."""
        if why := unlike(module, *ADAPTED):
            return why
        inner = torch.float32 if self.precision == "int8" else None
        down = self.product(module.down, out=self.dtype)
        if module.gate is None:
            return self.copy(module, up=self.product(module.up, out=inner), down=down)
        both = self.product(module.gate, module.up, out=inner)
        return self.copy_as(JoinedFeedForward, module, gate=None, up=None, gate_up=both, down=down)

    def head(self, module: LMHead, embedding: Tensor) -> nn.Module:
        weight = embedding if module.weight is None else module.weight
        precision = "int8" if self.precision == "int4" else self.precision
        # A head that needs no packing shares it.
        if precision != "int8":
            weight = self.parameter(weight)
        new = self.copy_as(PackedHead, module)
        new.product = pack(
            weight, module.bias, precision, torch.float32, self.back(module, precision)
        )
        new.weight = new.bias = None
        return new

    table: ClassVar[Mapping[type, Row]] = {
        nn.Linear: lambda maker, m: maker.product(m),
        nn.Dropout: lambda maker, m: direct(nn.Identity)(),
        FeedForward: lambda maker, m: maker.feed_forward(m),
        Block: lambda maker, m: maker.block(m),
        # Whose absorbed form reads the weight itself.
        LatentAttention: lambda maker, m: maker.latent(m),
        MixtureOfExperts: lambda maker, m: maker.copy(m, router=maker.router(m)),
        # They hold their weights twice over.
        **dict.fromkeys((nn.GRU, nn.LSTM, nn.RNN), lambda maker, m: copy.copy(m)),
    }


def stacked(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of all of them, one below the other."""
    if len(linears) == 1:
        return linears[0].weight, linears[0].bias
    weight = torch.cat([w.weight.detach() for w in linears])
    return weight, biases(linears)


def biases(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The biases of all of them, zeros for one that has none; None where none has."""
    if all(w.bias is None for w in linears):
        return None
    each = [w.weight.new_zeros(len(w.weight)) if w.bias is None else w.bias for w in linears]
    return torch.cat([bias.detach() for bias in each])


class JoinedAttention(GroupedQueryAttention):
    """Queries, keys and values by one product; queries and keys are turned together."""

    wqkv: nn.Module

    def project_qkv(self, x: Tensor, ctx: Context) -> tuple[Tensor, dict[str, Tensor]]:
        h, g, d, e = self.h, self.g, self.d, self.e
        qk, v = as_rows(self.wqkv(x), ctx).split(((h + g) * d, g * e), -1)
        if self.q_norm is None:
            qk = qk.unflatten(-1, (h + g, d))  # b t (h + g) d
        else:
            q, k = qk.split((h * d, g * d), -1)
            qk = torch.cat([self.as_heads(q, self.q_norm), self.as_heads(k, self.k_norm)], 2)
        q, k = ctx.rotate(qk, self.config.rope).split((h, g), 2)
        return q, {"k": k, "v": v.unflatten(-1, (g, e))}


class JoinedCrossAttention(GroupedQueryAttention):
    """Keys and values of the memory by one product."""

    wkv: nn.Module

    def entries(self, x: Tensor, ctx: Context) -> dict[str, Tensor]:
        if ctx.memory is None:
            return {}
        real = ctx.once("memory", lambda: Packing.of(ctx.memory_pos))
        kv = self.wkv(ctx.memory if real is None else real.pack(ctx.memory))
        kv = kv if real is None else real.spread(kv)
        k, v = kv.split((self.g * self.d, self.g * self.e), -1)
        return self.as_entries(k, v, ctx)


class SteadyLatent(LatentAttention):
    """Always absorbed, the products of its heads in tiles."""

    core_attention = LatentAttention.absorbed

    def by_head(self, x: Tensor, w: Tensor) -> Tensor:
        rows = x.flatten(0, 1).transpose(0, 1)  # h n i
        n = rows.shape[1]
        rows = F.pad(rows, (0, 0, 0, -n % TOKENS))
        y = torch.cat([part @ w for part in rows.split(TOKENS, 1)], 1)[:, :n]
        return y.transpose(0, 1).unflatten(0, x.shape[:2])


class OrderedLatent(SteadyLatent):
    """With attention in tiles as well: in any company and any chunks a row has the same bits."""

    def terms(self, ctx: Context, w_uv: Tensor | None = None) -> dict[str, Any]:
        found = super().terms(ctx, w_uv)
        return found | {"backend": "ordered"} if ctx.backend == "sdpa" else found


class JoinedFeedForward(FeedForward):
    """Gate and up by one product."""

    gate_up: nn.Module

    def project_up(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return times(up, self.act(gate))


class PackedHead(LMHead):
    """With a weight of its own."""

    product: nn.Module

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.product(x)


class Packing(NamedTuple):
    """Where the tokens of padded rows (b t) lie, and these one after the other as a single row."""

    shape: torch.Size
    real: Tensor  # of all places, those that hold a token

    @staticmethod
    def of(pos: Span | None) -> Packing | None:
        """None where there is no padding."""
        if pos is None or pos.start is not None or pos.size == 1:
            return None
        real = (pos.index >= 0).flatten().nonzero()[:, 0]
        return None if len(real) == pos.index.numel() else Packing(pos.index.shape, real)

    def pack(self, x: Tensor) -> Tensor:
        """(b t ...) -> (1 n ...)."""
        return x.flatten(0, 1).index_select(0, self.real)[None]

    def spread(self, x: Tensor) -> Tensor:
        """The way back, with zeros between."""
        rows = x.new_zeros(self.shape.numel(), *x.shape[2:]).index_copy_(0, self.real, x[0])
        return rows.unflatten(0, self.shape)


def as_rows(x: Tensor, ctx: Context) -> Tensor:
    """What a product gave for tokens, in rows for attention, should the stack have packed them."""
    packing = ctx.memo.get("packing")
    return x if packing is None else packing.spread(x)
