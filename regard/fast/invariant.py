"""The same bits for a request, whoever its neighbours are.

What makes a row's numbers depend on the batch, and what is done here:
- matrix products choose their kernel by the number of rows: they are always made with a number of rows from one class
  whose kernels agree, found by trying on this processor, torch and number of threads;
- fused attention sums in an order that depends on lengths and chunks: the `ordered` backend has fixed tiles;
- MLA has two forms: it is always absorbed. Sparse attention is dense while all keys can be chosen: it always chooses;
- fused recurrent layers sum as they please: the cells' equations are run step by step. Images are read one by one;
- the delta rule has a form for one token and one for many: it always goes from token to token;
- sigmoid, softplus, SiLU and GELU round differently in the last few elements of a tensor: they work on padded pieces,
  and where a number's neighbours matter too, on copies of each number.
Norms, softmax, exp, tanh, sin, cos, sorting and all plain arithmetic give an element the same bits anywhere.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.compressed import (
    CompressedAttention,
    CompressedIndexer,
    Compressor,
    GroupedLinear,
)
from regard.attention.delta import CHUNK, GatedDeltaRule, recurrent
from regard.attention.latent import LatentAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.ordered import agrees, cancelling, dots
from regard.attention.scores import Additive, Bilinear, Hard
from regard.attention.sparse import Indexer, SparseAttention, fp8_dots
from regard.attention.ssd import StateSpaceDual
from regard.attention.state import StateMechanism
from regard.block import LayerInput, LayerTables, Mix
from regard.errors import UsageError
from regard.fast.cpu import Prepared
from regard.fast.cpu.join import SteadyLatent
from regard.fast.specialise import Replacement, replace, share
from regard.kernels.linear import Packed, packs
from regard.layers import (
    FeedForward,
    Gain,
    HeadNorm,
    LabelHead,
    LayerScale,
    LMHead,
    Projection,
    RMSNorm,
    Xielu,
)
from regard.models import Model
from regard.models.embedding import PatchEmbedding, TokenEmbedding
from regard.models.recurrent import Recurrence
from regard.models.sound import SoundEmbedding
from regard.moe import MixtureOfExperts
from regard.position import PositionVectors, RelativeBias

WIDE = ((2, 128), (16, 128), (16, 64), (16, 32), (32, 32))  # rows, best first; the last is one size
SHORT = ((2, 32), *WIDE[3:])  # of bfloat16, whose kernels change above
PIECE = 1 << 14  # numbers; from 1.5 times as many on torch shares some functions among threads
# On other CPUs than x86-64 torch takes a short cut where all numbers of a vector allow it, so that a
# number's last bit depends on its neighbours: there each one stands among copies of itself.
COPIES = 1 if platform.machine() in ("x86_64", "AMD64") else 16
_found: dict[tuple, tuple[int, int]] = {}


def invariant(model: Model) -> Model:
    """A model that gives every row the same bits in any batch; for inference, with backend="ordered", as
    `generate(..., invariant=True)` uses it. It holds the weights of `model`, and packed copies of those that it
    multiplies by. An invariant model is returned as it is: made once, it serves many calls."""
    if isinstance(model, Prepared):
        raise UsageError(
            f"no invariant mode for a model prepared in {model.precision}: its packed products depend on "
            "the number of rows; give the original, which packs its own, or leave invariant out"
        )
    device = next(model.parameters()).device.type
    if device != "cpu":
        raise UsageError(
            f"no invariant mode on {device}: which products agree is known for CPUs alone; "
            'call model.to("cpu"), or leave invariant out'
        )
    if any(isinstance(module, SteadyLinear) for module in model.modules()):
        return model
    # Weights, and the folder's files with their tokenizer, stay the model's own.
    new = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), model.origin)})
    replace(new, TABLE)
    known = (*STEADY, *TABLE)
    for module in new.modules():
        if module._parameters and not isinstance(module, known):
            raise UsageError(
                f"no invariant mode for {type(module).__name__}: how its bits depend on the batch is not "
                "known; leave invariant out, or build the model of Regard's own parts"
            )
    return new.eval()


# --- products -----------------------------------------------------------------------------------------------------


class Product:
    """y = x W^T + b for rows of any number, in pieces whose number of rows lies in the class found for its shape."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        weight, bias = weight.detach().contiguous(), None if bias is None else bias.detach()
        self.weight, self.bias, self.run = weight, bias, _kernel(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        low, high = find_class(self.weight, self.bias)
        flat = x.to(self.weight.dtype).reshape(-1, x.shape[-1])
        parts = []
        for rows in flat.split(high):
            short = max(0, low - len(rows))
            y = self.run(F.pad(rows, (0, 0, 0, short)) if short else rows)
            parts.append(y[: len(rows)] if short else y)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*x.shape[:-1], -1)


def _kernel(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    if packs("cpu", weight.dtype):
        return Packed(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


def find_class(weight: Tensor, bias: Tensor | None) -> tuple[int, int]:
    """The widest range of row counts in which products of this shape give a row the same bits, found by trying."""
    shape, dtype = tuple(weight.shape), weight.dtype
    key = (shape, dtype, bias is not None, torch.get_num_threads())
    if key not in _found:
        classes = SHORT if dtype == torch.bfloat16 else WIDE
        x, w = (y.to(weight) for y in cancelling(*shape))
        run = _kernel(w, None if bias is None else torch.zeros_like(bias))
        _found[key] = next((c for c in classes if agrees(run, x[: c[1]], *c)), classes[-1])
    return _found[key]


class Products:
    """F.linear by a `Product` for each weight, made when it is first met."""

    def __init__(self) -> None:
        self.made: dict[tuple, Product] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        key = (weight.data_ptr(), weight.shape, weight.stride())
        if key not in self.made:
            self.made[key] = Product(weight, bias)
        return self.made[key](x)


class SteadyLinear(nn.Linear):
    """nn.Linear whose rows have the same bits in any company."""

    products: Products

    def forward(self, x: Tensor) -> Tensor:
        return self.products(x.to(self.weight.dtype), self.weight, self.bias)


class Steady:
    """A function of single numbers, in pieces that no vector leaves a rest of and that torch gives to one thread."""

    def __init__(self, act: Callable[[Tensor], Tensor]):
        self.act = act

    def __call__(self, x: Tensor) -> Tensor:
        flat = F.pad(x.reshape(-1), (0, -x.numel() % 64))
        parts = [
            self.act(part.repeat_interleave(COPIES))[COPIES // 2 :: COPIES]
            for part in flat.split(PIECE // COPIES)
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole[: x.numel()].view(x.shape)


# --- the parts ----------------------------------------------------------------------------------------------------


class SteadyParts:
    """The products and the sigmoid that several parts call."""

    products: Products

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.products(x, weight, bias)

    def sigmoid(self, x: Tensor) -> Tensor:
        return GATE(x)


class SteadyHead(SteadyParts, LMHead):
    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.products(x, weight, self.bias)


class SteadyExperts(SteadyParts, MixtureOfExperts):
    router_product: Product

    def logits(self, x: Tensor) -> Tensor:
        return self.router_product(x)

    def softplus(self, x: Tensor) -> Tensor:
        return SOFTPLUS(x)


class SteadyMix(SteadyParts, Mix):
    pass


class SteadyGroups(SteadyParts, GroupedLinear):
    pass


class SteadyCompressed(CompressedAttention):
    """Each entry behind the tokens that it is made of: a text's keys lie in the same tiles in any company."""

    def beside(self, entries: Tensor, tokens: Tensor) -> Tensor:
        both, rate = torch.cat([tokens, entries], 1), self.config.rate or 1
        token, entry = torch.arange(tokens.shape[1]), torch.arange(entries.shape[1])
        place = torch.cat([token + token // rate, (entry + 1) * rate + entry])
        return both[:, place.argsort()]


class SteadyChooser(CompressedIndexer):
    def dots(self, q: Tensor, k: Tensor) -> Tensor:
        return dots(q, k)

    def join(self, dots: Tensor, w: Tensor) -> Tensor:
        return joined(dots, w)


class SteadyXielu(Xielu):
    def forward(self, x: Tensor) -> Tensor:
        return Steady(super().forward)(x)


class SteadyGrouped(SteadyParts, GroupedQueryAttention):
    pass


def _recall(k: Tensor, s: Tensor) -> Tensor:
    return (k[:, :, None] * s.mT).contiguous().sum(-1)


class SteadyState(SteadyParts, StateMechanism):
    """Token after token, each sum along the last axis."""

    corrects: ClassVar[bool]

    def steady(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor,
        fresh: Tensor | None, keep: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        found, befores = [], [s]
        for i in range(0, q.shape[1], CHUNK):
            at = slice(i, i + CHUNK)
            new = None if fresh is None else fresh[:, at]
            read = (q[:, at], k[:, at], v[:, at], g[:, at], beta[:, at])
            o, s = recurrent(*read, s, new, _recall, self.corrects)
            found.append(o)
            befores.append(s)
        row = torch.arange(len(s))
        return (
            torch.cat(found, 1),
            s,
            befores[0] if keep is None else torch.stack(befores)[keep, row],
        )

    def softplus(self, x: Tensor) -> Tensor:
        return SOFTPLUS(x)


class SteadyDelta(SteadyState, GatedDeltaRule):
    corrects = True

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor,
        fresh: Tensor | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return self.steady(q, k, v, g, beta, s, fresh, keep)


class SteadyDual(SteadyState, StateSpaceDual):
    corrects = False

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor,
        fresh: Tensor | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        o, s, before = self.steady(q, k, v, g, beta, s, fresh, keep)
        return o + self.skip[:, None] * v, s, before


class SteadySparse(SparseAttention):
    """It always chooses; what may not be seen lies at the end, so that the rest lies in the same tiles with any k."""

    def dense(self, keys: int) -> bool:
        return False

    def choice(self, scores: Tensor, k: int, order: Tensor | None) -> Tensor:
        chosen = super().choice(scores, k, order)
        hidden = scores.gather(-1, chosen) == -torch.inf
        return chosen.gather(-1, hidden.to(torch.uint8).argsort(dim=-1, stable=True))


def joined(dots: Tensor, w: Tensor) -> Tensor:
    """Head after head."""
    total = torch.zeros_like(dots[:, :, 0])
    for j in range(dots.shape[2]):
        total = total + w[:, :, j, None] * torch.relu(dots[:, :, j])
    return total


class SteadyIndexer(Indexer):
    def dots(self, q: Tensor, k: Tensor) -> Tensor:
        return fp8_dots(q, k, dots) if self.config.precision == "fp8" else dots(q, k)

    def join(self, dots: Tensor, w: Tensor) -> Tensor:
        return joined(dots, w)


class SteadyAdditive(Additive):
    def join(self, q: Tensor, k: Tensor) -> Tensor:
        return (torch.tanh(q[..., :, None, :] + k[..., None, :, :]) * self.wv).sum(-1)


class SteadyHard(Hard):
    def join(self, q: Tensor, k: Tensor) -> Tensor:
        return (q[..., :, None, :] * k[..., None, :, :]).sum(-1)


class SteadyBilinear(SteadyParts, Bilinear):
    def query(self, q: Tensor) -> Tensor:
        return self.products(q, self.weight.t())


class SteadyRecurrence(SteadyParts, Recurrence):
    """The cells' equations."""

    forward = Recurrence.plain


class SteadyConvolution(nn.Conv2d):
    """One image at a time."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(SteadyConvolution, self).forward(x[None]) for x in input])


class SteadyWaves(nn.Conv1d):
    """One spectrogram at a time."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(SteadyWaves, self).forward(x[None]) for x in input])


def _steady(kind: type[nn.Module]) -> Replacement:
    def row(plain: Any, _: nn.Module) -> nn.Module:
        new = share(kind, plain)
        new.products = Products()  # type: ignore[assignment]
        # An activation rounds its last few numbers otherwise.
        act = getattr(plain, "act", None)
        if callable(act) and not isinstance(act, nn.Module):
            new.act = Steady(plain.act)  # type: ignore[assignment]
        if isinstance(plain, MixtureOfExperts):
            bias = None if plain.router.bias is None else plain.router.bias.float()
            new.router_product = Product(plain.router.weight.float(), bias)  # type: ignore[assignment]
        return new

    return row


GATE, SOFTPLUS = Steady(torch.sigmoid), Steady(F.softplus)
TABLE: dict[type, Replacement] = {
    nn.Linear: _steady(SteadyLinear),
    FeedForward: _steady(FeedForward),
    Xielu: _steady(SteadyXielu),
    LMHead: _steady(SteadyHead),
    LabelHead: _steady(LabelHead),
    Projection: _steady(Projection),
    MixtureOfExperts: _steady(SteadyExperts),
    GroupedQueryAttention: _steady(SteadyGrouped),
    LatentAttention: _steady(SteadyLatent),
    GatedDeltaRule: _steady(SteadyDelta),
    StateSpaceDual: _steady(SteadyDual),
    SparseAttention: _steady(SteadySparse),
    Indexer: _steady(SteadyIndexer),
    Additive: _steady(SteadyAdditive),
    Hard: _steady(SteadyHard),
    Bilinear: _steady(SteadyBilinear),
    Recurrence: _steady(SteadyRecurrence),
    nn.Conv2d: _steady(SteadyConvolution),
    nn.Conv1d: _steady(SteadyWaves),
    SoundEmbedding: _steady(SoundEmbedding),
    LayerInput: _steady(LayerInput),
    Mix: _steady(SteadyMix),
    GroupedLinear: _steady(SteadyGroups),
    CompressedAttention: _steady(SteadyCompressed),
    CompressedIndexer: _steady(SteadyChooser),
}
# Parts with weights that need no change.
TABLES = (TokenEmbedding, PatchEmbedding, PositionVectors, RelativeBias, nn.Embedding, LayerTables)
# The cells run the weights of an RNNBase.
STEADY = (*TABLES, RMSNorm, HeadNorm, LayerScale, Gain, Compressor, nn.LayerNorm, nn.RNNBase)
