"""A model made ready for running: weights packed for this machine, products that share their input joined into one.

    fast = prepare(model, "int8")
    logits = fast(ids, cache=fast.cache(1))

The prepared model is called like the model it came from, which stays as it was, and is for inference alone.
"""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.context import Context
from regard.attention.latent import LatentAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.block import Block
from regard.config import UsageError
from regard.kernels.linear import PRECISIONS, THEN, Packed, gelu_tanh, pack, packs
from regard.layers import LM, FeedForward, LMHead, times
from regard.models import EncoderDecoder, Model
from regard.models.recurrent import Recurrent, Seq2Seq
from regard.moe import MixtureOfExperts


def prepare(model: Model, precision: str = "fp32", *, rows: int = 1) -> Model:
    """`model` ready to run in `precision`: fp32, bf16, int8 or int4. `rows` is how many rows a step will have (batch
    times beams): the packing that suits them is taken; any other number works too.

    fp32 is the same up to rounding. bf16 holds everything in bf16, the cache too. int8 and int4 hold linear layers in 8
    or 4 bits and the rest in bf16 (in float32 on a CPU without bf16), experts of a mixture and MLA's up-projection
    among it; the head of int4 is int8, no slower and much better. Recurrent cells keep their dtype; what is linear
    around them is packed. Logits are float32.

    Weights that need no change are shared with `model`. A tied head becomes a packed copy of its own, vocab x dim
    numbers beside the embedding; not where nothing is packed (fp32 up to two rows, bf16 for one): both stay one."""
    if precision not in PRECISIONS:
        raise UsageError(
            f"precision {precision!r} is unknown; choose one of {', '.join(PRECISIONS)}"
        )
    if rows < 1:
        raise UsageError(f"rows={rows}: a step has at least one row")
    if isinstance(model, Prepared):
        raise UsageError(
            f"this model is already prepared in {model.precision}; prepare the original"
        )
    maker = Maker(precision, rows, _stream(model, precision))
    parts = {}
    if isinstance(model.head, LMHead):
        two = isinstance(model, (EncoderDecoder, Seq2Seq))
        words = model.get_submodule("target" if two else "embedding")
        parts["head"] = maker.head(model.head, words.weight)
    kind: Any = type(model)
    made = maker.twin(model, _prepared(kind), **parts)
    made.precision = precision
    return made.eval()


def _stream(model: Model, precision: str) -> torch.dtype | None:
    """The dtype of all that is not packed; None: as it is."""
    if isinstance(model, (Recurrent, Seq2Seq)):
        return None
    device = next(model.parameters()).device.type
    slow = device == "cpu" and not packs(device, torch.bfloat16)
    return (
        torch.float32 if precision == "fp32" or (slow and precision != "bf16") else torch.bfloat16
    )


class Prepared:
    """What a prepared model refuses: its weights are packed for one machine, and rounded."""

    precision: str

    def save(self, path: str | Path) -> Path:
        raise UsageError(
            f"a model prepared in {self.precision} is for running, its weights are packed for this machine; "
            "save the original"
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden).float()  # type: ignore[misc]

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


@functools.cache
def _direct(cls: Any) -> type:
    """`cls` without torch's hooks: a call is `forward` and nothing else, which a small model feels."""
    return type(cls.__name__, (cls,), {"__call__": cls.forward})


# --- the copy -----------------------------------------------------------------------------------------------------


class Maker:
    """Copies a model part by part: the same tree of modules, on shared or packed weights."""

    def __init__(self, precision: str, rows: int, dtype: torch.dtype | None):
        self.precision, self.rows, self.dtype = precision, rows, dtype
        self.cast: dict[int, nn.Parameter] = {}  # a weight used twice stays one

    def make(self, module: nn.Module | None) -> Any:
        if isinstance(module, nn.Linear):
            return self.product(module)
        if isinstance(module, nn.Dropout):
            return _direct(nn.Identity)()
        if isinstance(module, FeedForward):
            return self.feed_forward(module)
        if isinstance(module, Block):
            own, cross = self.attention(module.attention), self.cross(module.cross)
            return self.twin(module, attention=own, cross=cross)
        if isinstance(module, LatentAttention):  # whose absorbed form reads the weight itself
            return self.twin(module, w_ukv=self.twin(module.w_ukv))
        if isinstance(module, MixtureOfExperts):  # likewise
            return self.twin(module, router=self.twin(module.router))
        if isinstance(module, nn.RNNBase):  # it holds its weights twice over
            return copy.copy(module)
        return None if module is None else self.twin(module)

    def twin(self, module: nn.Module, kind: Any = None, **parts: nn.Module | None) -> Any:
        """A copy of `module`, of class `kind` if given, with `parts` instead of its own; the rest is made."""
        new, kind = copy.copy(module), kind or type(module)
        new.__class__ = _direct(kind)
        new._parameters = {n: self.parameter(p) for n, p in module._parameters.items()}
        new._buffers = dict(module._buffers)
        new._modules = {
            n: parts[n] if n in parts else self.make(m) for n, m in module._modules.items()
        } | parts
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
        weight: Tensor = linears[0].weight
        bias: Tensor | None = linears[0].bias
        if len(linears) > 1:
            weight = torch.cat([w.weight.detach() for w in linears])
            biases = [w.bias.detach() for w in linears if w.bias is not None]
            bias = torch.cat(biases) if biases else None
        return pack(weight, bias, self.precision, rows=self.rows, out=out)

    def attention(self, module: nn.Module) -> nn.Module:
        if not isinstance(module, GroupedQueryAttention):
            return self.make(module)
        joined = self.product(module.wq, module.wk, module.wv)
        return self.twin(module, JoinedSelfAttention, wq=None, wk=None, wv=None, wqkv=joined)

    def cross(self, module: nn.Module | None) -> nn.Module | None:
        if not isinstance(module, GroupedQueryAttention):
            return self.make(module)
        joined = self.product(module.wk, module.wv)
        return self.twin(module, JoinedCrossAttention, wk=None, wv=None, wkv=joined)

    def feed_forward(self, module: FeedForward) -> nn.Module:
        """Between the products int8 stays in the float32 that it gives, and gelu_tanh is faster there."""
        name = module.config.activation
        inner = torch.float32 if self.precision == "int8" or name == "gelu_tanh" else None
        down = self.product(module.down, out=self.dtype)
        if module.gate is not None:
            joined = self.product(module.gate, module.up, out=inner)
            parts = {"gate": None, "up": None, "gate_up": joined, "down": down}
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
        new.product = pack(
            weight, module.bias, precision, rows=self.rows, out=torch.float32, alike=True
        )
        new.weight = new.bias = None
        return new


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
        if self.dense is not None and self.act is not None and self.norm is not None:
            h = self.norm(self.act(self.dense(h)))
        elif isinstance(self.config, LM) and self.config.scaled:
            h = h * h.shape[-1] ** -0.5
        return self.product(h)


# --- what it costs in quality -------------------------------------------------------------------------------------


class Perplexity(NamedTuple):
    before: float
    after: float


@torch.inference_mode()
def perplexity_change(
    model: Model, prepared: Model, ids: Tensor, *, source: Tensor | None = None
) -> Perplexity:
    """exp of the mean negative log-likelihood of ids (b t) from the second token on, by both models."""
    if ids.shape[-1] < 2:
        raise UsageError("perplexity needs rows of at least two tokens: the first is given")
    return Perplexity(*(_perplexity(m, ids, source) for m in (model, prepared)))


def _perplexity(model: Model, ids: Tensor, source: Tensor | None) -> float:
    total = 0.0
    for i, row in enumerate(ids):
        given = {} if source is None else {"source": source[i : i + 1]}
        logits = model(row[None], **given)[0, :-1].float()
        total += F.cross_entropy(logits, row[1:], reduction="sum").item()
    return math.exp(total / (len(ids) * (ids.shape[1] - 1)))
