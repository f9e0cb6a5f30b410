"""A model made ready for running: weights packed for this machine, products that share their input joined into one.

    fast = prepare(model, "int8")
    logits = fast(ids, cache=fast.cache(1))

The prepared model is called like the model it came from, which stays as it was, and is for inference alone. Where the
C code is there (`usable`), products run in it, each takes its activation and residual along, norms too, and one new
token per row is turned, stored and attended to where the cache lies, in rows or in pages; the stream is float32.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.core import Terms
from regard.attention.latent import LatentAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.protocol import Context
from regard.block import Block, Stack, _at
from regard.cache import Contiguous, Paged
from regard.cache.base import Layer
from regard.errors import UsageError, notice
from regard.fast.inputs import read_by
from regard.fast.specialise import Row, Specialise, direct, share
from regard.kernels.c import native
from regard.kernels.c.linear import ACTIVATIONS, NativeLinear, usable
from regard.kernels.c.rows import attend_one, choose, enter, norm
from regard.kernels.c.tape import Tape
from regard.kernels.linear import PRECISIONS, feedback, half_is_fast, pack, possible
from regard.layers import FeedForward, LMHead, RMSNorm, times
from regard.machine import trim
from regard.mask import Causal, Span, Visible
from regard.models import Model
from regard.models.adapt import Int4Linear, LowRank
from regard.models.base import last_real
from regard.moe import MixtureOfExperts
from regard.position import LongRope, Rope

CAUSAL = Causal()
TOKENS = 16  # of a product head by head
WORTH = 10_000_000  # parameters for which the C code is compiled if it is not yet


def prepare(model: Model, precision: str = "fp32", *, consume: bool = False) -> Model:
    """`model` ready to run in `precision`: fp32, bf16, int8 or int4, at any number of rows.

    fp32 is the same up to rounding. bf16 holds everything in bf16, the cache too; a CPU that does not multiply it is
    given fp32, with a notice. int8 and int4 hold linear layers in 8 or 4 bits and the rest in bf16 (in float32 on a
    CPU without bf16), experts of a mixture and MLA's up-projection among it; the head of int4 is int8, and so are
    weights of fewer than 65,536 numbers: no slower and much better. Weights are rounded so that it matters least for
    what the layers read: the model reads 256 random tokens first. Recurrent cells keep their dtype; what is linear
    around them is packed. Logits are float32.

    `consume` gives up the weights of `model` as they are packed, so that never both are in memory: it is of no use
    afterwards. Weights that need no change are shared with `model`. A tied head becomes a packed copy of its own, vocab
    x dim numbers beside the embedding."""
    if precision not in PRECISIONS:
        raise UsageError(
            f"precision {precision!r} is unknown; choose one of {', '.join(PRECISIONS)}"
        )
    if isinstance(model, Prepared):
        raise UsageError(
            f"this model is already prepared in {model.precision}; prepare the original"
        )
    on_cpu = next(model.parameters()).is_cpu
    if precision == "bf16" and on_cpu and model.towers and not half_is_fast():
        notice(
            "this CPU does not multiply bf16: fp32, which is faster, is taken; int8 is the fastest here"
        )
        precision = "fp32"
    large = on_cpu and sum(p.numel() for p in model.parameters()) >= WORTH
    if large and not native.build():
        notice(f"no C code for this CPU, torch's slower products are used: {native.why()}")
    dtype = _stream(model, precision)
    why = why_not_native(model, precision, dtype)
    # Weights of linear layers that nothing else holds.
    held = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    linears = [id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)]
    spent = {w for w in linears if held[w] == 1} if consume else set()
    inputs = read_by(model) if precision in ("int8", "int4") and model.towers else {}
    maker = (Join if why else Native)(precision, dtype, spent, inputs)
    parts = {}
    if isinstance(model.head, LMHead):
        words = model.get_submodule("target" if model.reads_source else "embedding")
        parts["head"] = maker.head(model.head, words.weight)
    cls: Any = type(model)
    made = maker.copy(model, _prepared(cls), **parts)
    made.precision, made.parts = precision, dict(maker.rows)
    if why:
        much = "products alone" if on_cpu and usable(precision) else "none"
        made.parts["C code", f"{much}: {why}"] = 1
    return made.eval()


def why_not_native(model: Model, precision: str, dtype: torch.dtype | None) -> str:
    """Why the blocks of a model, whose other parts compute in `dtype`, cannot run in C code here, or nothing."""
    if not model.towers:
        return "recurrent cells have none"
    if not next(model.parameters()).is_cpu:
        return "it is for the CPU"
    if not usable(precision):
        return native.why() or f"no products in {precision} on this CPU"
    # In float32 parts without C code stand among the others.
    for block in (m for m in model.modules() if isinstance(m, Block) and dtype != torch.float32):
        for part in (block.attention, block.cross):
            if part is not None and type(part) is not GroupedQueryAttention:
                return f"{type(part).__name__} has none in bf16"
        if not isinstance(block.ffn, FeedForward) or block.ffn.config.activation not in ACTIVATIONS:
            return "its feed-forward has none in bf16"
    return ""


def _stream(model: Model, precision: str) -> torch.dtype | None:
    """The dtype of all that is not packed; None: as it is."""
    if not model.towers:
        return None
    slow = next(model.parameters()).is_cpu and not half_is_fast()
    wide = precision == "fp32" or (slow and precision != "bf16")
    return torch.float32 if wide else torch.bfloat16


class Prepared:
    """What a prepared model does in its own way, and refuses: its weights are packed for one machine, and rounded."""

    precision: str

    def save(self, path: str | Path) -> Path:
        raise UsageError(
            f"a model prepared in {self.precision} is for running, its weights are packed for this machine; "
            "save the original"
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden).float()  # type: ignore[misc]

    def next_best(
        self, ids: Tensor, many: int, banned: Sequence[int], left: bool, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `rows.choose` finds among the logits after the last token of each row, `many` if there are as many. A
        head in C does not even write them."""
        model: Any = self
        hidden, head = last_real(model.hidden(ids, **options), None), model.head
        native = isinstance(head, PackedHead) and isinstance(head.product, NativeLinear)
        if native and head.softcap is None:
            many = min(many, head.product.n - len(banned))
            return head.product.best(head.features(hidden), many, banned, left)
        logits = self.logits(hidden)
        return choose(logits, min(many, logits.shape[1] - len(banned)), banned, left)

    def train(self, mode: bool = True) -> Any:
        if mode:
            raise UsageError(
                "a prepared model cannot be trained; train the original and prepare it again"
            )
        return super().train(mode)  # type: ignore[misc]

    def _apply(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            "packed weights cannot be moved or cast; move the original and prepare it again"
        )


@functools.cache
def _prepared(cls: Any) -> Any:
    return type(f"Prepared{cls.__name__}", (Prepared, cls), {})


# --- joined products, by torch ------------------------------------------------------------------------------------


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

    def kind(self, kind: Any) -> Any:
        return direct(kind)

    def copy(self, module: nn.Module, kind: Any = None, **parts: nn.Module | None) -> Any:
        new, wide = super().copy(module, kind, **parts), getattr(module, "wide", ())
        new._parameters = {
            n: p if n in wide else self.parameter(p) for n, p in module._parameters.items()
        }
        return new

    def parameter(self, p: Any) -> Any:
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
        if not isinstance(linear, LowRank | Int4Linear):
            return self.copy(linear)
        new, weight = direct(nn.Linear)(1, 1, device="meta"), linear.weight.detach()
        new.out_features, new.in_features = weight.shape
        new.weight = nn.Parameter(weight.to(self.dtype or weight.dtype), requires_grad=False)
        new.bias = self.parameter(linear.bias)
        return new

    def product(self, *linears: nn.Linear, out: torch.dtype | None = None) -> nn.Module:
        """One layer that gives the outputs of all `linears` after each other."""
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
            part: Any = getattr(module, name)
            if type(part) is GroupedQueryAttention:
                parts[name] = join(part)
                self.rows[type(part).__name__, type(parts[name]).__name__] += 1
        return self.copy(module, **parts)

    def attention(self, module: GroupedQueryAttention) -> nn.Module:
        wqkv = self.product(module.wq, module.wk, module.wv)
        return self.copy(module, JoinedAttention, wq=None, wk=None, wv=None, wqkv=wqkv)

    def cross(self, module: GroupedQueryAttention) -> nn.Module:
        wkv = self.product(module.wk, module.wv)
        return self.copy(module, JoinedCrossAttention, wk=None, wv=None, wkv=wkv)

    def latent(self, module: LatentAttention) -> nn.Module:
        """int8 makes a step of a last bit: there the bits of a row are its own."""
        own = self.precision in ("int8", "int4") and module.w_ukv.weight.is_cpu
        kind = OrderedLatent if own else None
        return self.copy(module, kind, w_ukv=self.unpacked(module.w_ukv))

    def feed_forward(self, module: FeedForward) -> nn.Module:
        """Between the products int8 stays in the float32 that it gives."""
        inner = torch.float32 if self.precision == "int8" else None
        down = self.product(module.down, out=self.dtype)
        if module.gate is None:
            return self.copy(module, up=self.product(module.up, out=inner), down=down)
        both = self.product(module.gate, module.up, out=inner)
        return self.copy(module, JoinedFeedForward, gate=None, up=None, gate_up=both, down=down)

    def head(self, module: LMHead, embedding: Any) -> nn.Module:
        weight = embedding if module.weight is None else module.weight
        precision = "int8" if self.precision == "int4" else self.precision
        # A head that needs no packing shares it.
        if precision != "int8":
            weight = self.parameter(weight)
        new = self.copy(module, PackedHead)
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
        MixtureOfExperts: lambda maker, m: maker.copy(m, router=maker.unpacked(m.router)),
        # They hold their weights twice over.
        **dict.fromkeys((nn.GRU, nn.LSTM, nn.RNN), lambda maker, m: copy.copy(m)),
    }


def stacked(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of all of them, one below the other."""
    if len(linears) == 1:
        return linears[0].weight, linears[0].bias
    biases = [w.bias.detach() for w in linears if w.bias is not None]
    weight = torch.cat([w.weight.detach() for w in linears])
    return weight, torch.cat(biases) if biases else None


class JoinedAttention(GroupedQueryAttention):
    """Queries, keys and values by one product; queries and keys are turned together."""

    wqkv: nn.Module

    def enter(self, x: Tensor, ctx: Context) -> tuple[Tensor, dict[str, Tensor]]:
        h, g, d, e = self.h, self.g, self.d, self.e
        qk, v = _as_rows(self.wqkv(x), ctx).split(((h + g) * d, g * e), -1)
        if self.q_norm is None:
            qk = qk.unflatten(-1, (h + g, d))  # b t (h + g) d
        else:
            q, k = qk.split((h * d, g * d), -1)
            qk = torch.cat([self.as_heads(q, self.q_norm), self.as_heads(k, self.k_norm)], 2)
        q, k = ctx.turn(qk, self.config.rope).split((h, g), 2)
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

    mix = LatentAttention.absorbed

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

    def widen(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return times(up, self.act(gate))


class PackedHead(LMHead):
    """With a weight of its own."""

    product: nn.Module

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.product(x)


# --- the same in C code -------------------------------------------------------------------------------------------


class Native(Join):
    """Every part in C code that has one."""

    def linear(self, *linears: Any, act: str = "", gated: bool = False) -> nn.Module:
        weight, bias = stacked(linears)
        precision = possible(self.precision, weight)
        form: Any = {"act": act, "gated": gated, "back": self.back(linears[0], precision)}
        made = NativeLinear(weight, bias, precision, **form)
        self.give_up(linears)
        return made

    def attention(self, module: GroupedQueryAttention) -> nn.Module:
        parts = {"wqkv": self.linear(module.wq, module.wk, module.wv), "wo": self.linear(module.wo)}
        return self.copy(module, NativeAttention, wq=None, wk=None, wv=None, **parts)

    def cross(self, module: GroupedQueryAttention) -> nn.Module:
        parts = {"wq": self.linear(module.wq), "wkv": self.linear(module.wk, module.wv)}
        parts["wo"] = self.linear(module.wo)
        return self.copy(module, NativeCrossAttention, wk=None, wv=None, **parts)

    def stack(self, module: Stack) -> nn.Module:
        new = self.copy(module)
        parts = [part for block in new.blocks for part in (block.attention, block.cross)]
        if not all(part is None or isinstance(part, _Native) for part in parts):
            return new
        if module.relative is not None or not all(map(_recorded, new.blocks)):
            return share(self.kind(PackedStack), new)
        new = share(self.kind(NativeStack), new)
        new.tapes = Tapes(new)
        return new

    def feed_forward(self, module: FeedForward) -> nn.Module:
        act, gate = module.config.activation, module.gate
        if act not in ACTIVATIONS:
            return super().feed_forward(module)
        both = [module.up] if gate is None else [gate, module.up]
        up = self.linear(*both, act=act, gated=gate is not None)
        return self.copy(module, NativeFeedForward, gate=None, up=up, down=self.linear(module.down))

    table: ClassVar[Mapping[type, Row]] = {
        **Join.table,
        nn.LayerNorm: lambda maker, m: NativeNorm(m),
        RMSNorm: lambda maker, m: NativeNorm(m),
        Stack: lambda maker, m: maker.stack(m),
    }


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


def _as_rows(x: Tensor, ctx: Context) -> Tensor:
    """What a product gave for tokens, in rows for attention, should the stack have packed them."""
    packing = ctx.memo.get("packing")
    return x if packing is None else packing.spread(x)


class PackedStack(Stack):
    """Texts of different lengths go through the products one after the other, without their padding, at which zeros
    come out: attention alone sees rows."""

    def forward(
        self, x: Tensor, ctx: Context, cross: Context | None = None, caches: tuple = (None, None)
    ) -> Tensor:
        packing = None if ctx.probe is not None else Packing.of(ctx.pos)
        if packing is None:
            return super().forward(x, ctx, cross, caches)
        for each in (ctx, cross):
            if each is not None:
                each.memo["packing"] = packing
        return packing.spread(super().forward(packing.pack(x), ctx, cross, caches))


class NativeStack(PackedStack):
    """A step that comes again, one token per row over the same memory, is recorded and then played: the C calls of all
    blocks by one call. What another step has, positions, angles, tables, is written to where the recorded one read it.
    """

    tapes: Tapes

    def forward(
        self, x: Tensor, ctx: Context, cross: Context | None = None, caches: tuple = (None, None)
    ) -> Tensor:
        key = self.key(x, ctx, cross, caches)
        if key is None or not self.tapes.lock.acquire(blocking=False):
            return super().forward(x, ctx, cross, caches)
        try:
            step = self.tapes.found(key)
            if isinstance(step, Step):
                return step.play(x, ctx, caches)
            if step is None or not self.tapes.forms.get(tuple(map(type, caches)), True):
                return super().forward(x, ctx, cross, caches)
            fresh = Step(x, ctx, cross, caches)
            with fresh.tape.recording():
                y = super().forward(fresh.x, ctx, cross, caches)
            fresh.y = fresh.tape.settle(y)
            # Other steps of the same form are the same calls.
            form = tuple(map(type, caches))
            if form not in self.tapes.forms:
                self.tapes.forms[form] = fresh.tape.whole(fresh.y, y)
            if self.tapes.forms[form]:
                self.tapes.steps[key] = fresh
            return y
        finally:
            self.tapes.lock.release()

    def key(self, x: Tensor, ctx: Context, cross: Context | None, caches: tuple) -> Any:
        """What a recorded step must have in common with another; None if it cannot be recorded."""
        own, source = caches
        if self.tapes.stack() is not self or ctx.probe is not None or ctx.mask != CAUSAL:
            return None
        if own is None or _step(_at(ctx, own, 0, "")) is None:
            return None
        read = cross is None or (cross.memory is None and type(source) in (Contiguous, Paged))
        if not read:
            return None
        stores, room = _lain(own)
        if source is not None:
            kept, far = _lain(source)
            # Pages of the same pool are there already.
            stores, room = stores if kept is stores else [*stores, *kept], (*room, *far)
        memory = tuple(t.data_ptr() for store in stores for t in store.values())
        strides = stores[0]["k"].stride(), stores[-1]["k"].stride()
        # Rows at one position may share it: (1 t), where others have (b t).
        rows = (len(x), len(ctx.pos.index), torch.is_inference_mode_enabled())
        return memory, strides, rows, room


def _recorded(block: Any) -> bool:
    """Whether a step of a block is C calls alone, each on what another gave."""
    for part in filter(None, (block.attention, block.cross)):
        if not isinstance(part, _Native) or not part.bare or part.q_norm or part.wg:
            return False
    parts = filter(None, (block.attention, block.cross, block.ffn))
    return isinstance(block.ffn, NativeFeedForward) and all(p.add.norm is None for p in parts)


class Step:
    """A recorded step: its input, its output, and what changes between them from step to step."""

    y: Tensor

    def __init__(self, x: Tensor, ctx: Context, cross: Context | None, caches: tuple):
        self.tape, self.x, self.memo = Tape(), x.float().contiguous().clone(), ctx.memo
        self.turns: dict[Any, Any] = {}  # cos and sin for every position of the cache
        # Of tensors copies: those of a cache are its own.
        new = self.changing(ctx, caches).items()
        self.memo |= {key: y.clone() if isinstance(y, Tensor) else y for key, y in new}
        if cross is not None:
            cross.memo |= {"last": self.memo["last"], "place": self.memo["source"]}

    def changing(self, ctx: Context, caches: tuple) -> dict[Any, Any]:
        own, source = caches
        pos = ctx.pos.index[:, 0].expand(len(self.x)).contiguous()
        found = {"rows": pos, "place": getattr(own, "table", None)}
        if source is not None:
            found |= {"last": _last(source, len(self.x)), "source": getattr(source, "table", None)}
        return found

    def angles(self, key: Any, pos: Span, own: Any) -> tuple[Tensor, ...]:
        rope, *how = key
        if isinstance(rope.scaling, LongRope):
            return rope.angles(pos.index, *how, pos.reach)
        if key not in self.turns:
            room = own.table.shape[1] * own.page if isinstance(own, Paged) else own.capacity
            self.turns[key] = [x[0] for x in rope.angles(torch.arange(room)[None], *how)]
        return tuple(x[pos.index] for x in self.turns[key])

    def play(self, x: Tensor, ctx: Context, caches: tuple) -> Tensor:
        self.x.copy_(x)
        new = self.changing(ctx, caches)
        for key in (k for k in self.memo if isinstance(k, tuple) and isinstance(k[0], Rope)):
            new[key] = self.angles(key, ctx.pos, caches[0])
        for key, value in new.items():
            olds = self.memo[key] if isinstance(value, tuple) else (self.memo[key],)
            for old, now in zip(olds, value if isinstance(value, tuple) else (value,), strict=True):
                if now is not None:
                    old.copy_(now)
        if not self.tape.play():
            raise IndexError("a recorded step: a position lies outside of the cache, or no memory")
        return self.y.clone()


class Tapes:
    """The steps of a stack that were recorded last. A step is recorded when it is met for the second time. A twin of
    the stack, whose parts may be watched, has none."""

    MOST = 8

    def __init__(self, stack: Stack) -> None:
        self.lock, self.steps = threading.Lock(), dict[Any, Any]()
        # Forms of steps, and whether one that was played gave what it must: a part of an order or a norm that we do not
        # know may compute outside of the C code.
        self.forms = dict[Any, bool]()
        self.stack = weakref.ref(stack)

    def found(self, key: Any) -> Step | bool | None:
        """The step, True if it is to be recorded now, None if not yet."""
        step = self.steps.pop(key, None)
        self.steps[key] = True if step is None else step
        while len(self.steps) > self.MOST:
            del self.steps[next(iter(self.steps))]
        return step


class NativeNorm(nn.Module):
    """A layer or RMS norm on float32."""

    def __init__(self, module: Any):
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

    def widen(self, x: Tensor) -> Tensor:
        return self.up(x)

    def leave(self, h: Tensor, residual: Tensor | None) -> Tensor:
        return super().leave(h, residual) if self.add.norm else self.down(h, residual)


class _Native(GroupedQueryAttention):
    @property
    def bare(self) -> bool:
        """Whether scores are q.k * scale and a bias, nothing more."""
        return self.config.softcap is None and self.sinks is None

    def look(self, x: Tensor, ctx: Context) -> Tensor:
        o, packing = super().look(x, ctx), ctx.memo.get("packing")
        return o if packing is None else packing.pack(o)

    def queries(self, x: Tensor, ctx: Context) -> Tensor:
        return self.as_queries(_as_rows(self.wq(x), ctx), ctx)

    def mix(self, q: Tensor, kept: dict[str, Tensor], *rest: Any) -> Tensor:
        return super().mix(q.to(kept["k"].dtype), kept, *rest)

    def leave(self, o: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().leave(o, residual) if self.add.norm else self.wo(o.flatten(2), residual)


class NativeAttention(_Native, JoinedAttention):
    """One new token per row is turned, stored and attended to where the cache lies."""

    def look(self, x: Tensor, ctx: Context) -> Tensor:
        layer = _step(ctx)
        if layer is None or not self.bare or ctx.mask != CAUSAL:
            return super().look(x, ctx)
        qkv, c, cache = self.wqkv(x).squeeze(1), self.config, layer.cache
        if self.q_norm is not None:
            h, g, d = self.h, self.g, self.d
            q, k, v = qkv.split((h * d, g * d, g * self.e), -1)
            q, k = self.as_heads(q, self.q_norm), self.as_heads(k, self.k_norm)
            qkv = torch.cat([q.flatten(1), k.flatten(1), v], -1)
        k, v, place, page = _memory(layer, ctx)
        pos = ctx.once("rows", lambda: ctx.pos.index[:, 0].expand(len(qkv)).contiguous())
        cos, sin = ctx.angles(c.rope, self.d, torch.float32) if c.rope else (None, None)
        layout = c.rope.layout if c.rope else ""
        enter(qkv, self.h, self.g, self.d, self.e, cos, sin, layout, k, v, pos, place, page)
        q = qkv.narrow(1, 0, self.h * self.d).view(-1, self.h, self.d)
        bias = ctx.bias(cache.span)
        if bias is not None:
            given = bias
            bias = ctx.once("bias of rows", lambda: given[:, :, 0].float().contiguous())
        more = {"scale": self.scale, "place": place, "page": page, "window": c.window}
        o = attend_one(q, k, v, pos, **more, bias=bias)
        if ctx.probe is not None:
            terms = Terms(self.scale, None if bias is None else bias[:, :, None])
            _show(ctx, layer, q[:, None], ctx.visible(cache.span, c.window), terms)
        return o.unsqueeze(1)


class NativeCrossAttention(_Native, JoinedCrossAttention):
    """Keys and values of the memory are read where they lie."""

    def look(self, x: Tensor, ctx: Context) -> Tensor:
        layer = _step(ctx)
        if layer is None or ctx.memory is not None or not self.bare:
            return super().look(x, ctx)
        q = self.queries(x, ctx)
        k, v, place, page = _memory(layer, ctx)
        share = len(q) // layer.cache.batch
        pos = ctx.once("last", lambda: _last(layer.cache, len(q)))
        where: Any = {"place": place, "page": page, "share": share}
        o = attend_one(q[:, 0], k, v, pos, **where, scale=self.scale)
        # Beams stand side by side, as in `mix`.
        if ctx.probe is not None:
            real = (layer.cache.span.index >= 0)[:, None, None]
            _show(ctx, layer, q.reshape(-1, share, self.h, self.d), real, Terms(self.scale))
        return o[:, None]


def _step(ctx: Context) -> Layer | None:
    """The cache, if this is a step of one token per row over memory that lies by position, in rows or pages."""
    store = ctx.store
    if ctx.backend != "sdpa" or ctx.pos.size != 1:
        return None
    return store if isinstance(store, Layer) and type(store.cache) in (Contiguous, Paged) else None


def _memory(layer: Layer, ctx: Context) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Keys, values, and in pages which of them hold each row's tokens, and how many each."""
    cache: Any = layer.cache
    if isinstance(cache, Paged):
        pages = cache.pool.stores[layer.index]
        return pages["k"], pages["v"], ctx.once("place", lambda: cache.table), cache.page
    slots = cache.slots[layer.index]
    return slots["k"], slots["v"], None, 0


def _lain(cache: Any) -> tuple[Any, tuple]:
    """The memory that tokens lie in, and what tells how many of how many rows fit."""
    if isinstance(cache, Paged):
        return cache.pool.stores, tuple(cache.table.shape)
    return cache.slots, (cache.batch, cache.capacity)


def _last(cache: Any, rows: int) -> Tensor:
    """The last token of the source of each row."""
    return (cache.lengths - 1).repeat_interleave(rows // len(cache.lengths))


def _show(ctx: Context, layer: Layer, q: Tensor, mask: Visible | Tensor, terms: Terms) -> None:
    """Let a probe see queries (b t h d) and the keys and values they met, brought to their own rows."""
    watch = ctx.watch()
    if watch is not None:
        kept, _ = layer.keep()
        q, k, v = (x.transpose(1, 2) for x in (q, kept["k"], kept["v"]))
        watch.see(q, k, v, mask, terms)


@torch.inference_mode()
def perplexity(model: Model, ids: Tensor, source: Tensor | None = None) -> float:
    """exp of the mean negative log-likelihood of ids (b t) from the second token on."""
    if ids.shape[-1] < 2:
        raise UsageError("perplexity needs rows of at least two tokens: the first is given")
    total = 0.0
    for i, row in enumerate(ids):
        given = {} if source is None else {"source": source[i : i + 1]}
        logits = model(row[None], **given)[0, :-1].float()
        total += F.cross_entropy(logits, row[1:], reduction="sum").item()
    return math.exp(total / ids[:, 1:].numel())
