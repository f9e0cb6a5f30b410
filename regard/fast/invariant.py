"""The same bits for a request, whoever its neighbours are.

What makes a row's numbers depend on the batch, and what is done here:
- matrix products choose their kernel by the number of rows: they are always made with a number of rows from one class
  whose kernels agree, found by trying on this processor, torch and number of threads;
- fused attention sums in an order that depends on lengths and chunks: the `ordered` backend has fixed tiles;
- MLA has two forms: it is always absorbed. Sparse attention is dense while all keys can be chosen: it always chooses;
- fused recurrent layers sum as they please: the cells' equations are run step by step. Images are read one by one;
- sigmoid, SiLU and GELU round differently in the last few elements of a tensor: they work on padded pieces, and
  where a number's neighbours matter too, on copies of each number.
Norms, softmax, exp, tanh, sin, cos, sorting and all plain arithmetic give an element the same bits anywhere.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Context, attend
from regard.attention.latent import LatentAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.scores import Additive, Bilinear
from regard.attention.sparse import SparseAttention
from regard.errors import UsageError
from regard.fast.ordered import agrees, cancelling, dots
from regard.fast.prepare import Prepared
from regard.kernels.linear import Packed, packs
from regard.layers import FeedForward, LabelHead, LMHead, RMSNorm
from regard.mask import Visible
from regard.models import Model
from regard.models.cells import Recurrence, State, hold
from regard.models.embedding import TokenEmbedding
from regard.models.vision import PatchEmbedding
from regard.moe import MixtureOfExperts
from regard.position import PositionVectors, RelativeBias

WIDE = ((2, 128), (16, 128), (16, 64), (16, 32), (32, 32))  # rows, best first; the last is one size
SHORT = ((2, 32), *WIDE[3:])  # of bfloat16, whose kernels change above
TOKENS = 16  # of a product head by head
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
    new = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    for module in list(new.modules()):
        for kind, change in CHANGES.items():
            if isinstance(module, kind):
                change(module)
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, SteadyLinear(child))
    for module in new.modules():
        if module._parameters and not isinstance(module, (*CHANGES, *STEADY)):
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


class SteadyLinear(nn.Module):
    """nn.Linear whose rows have the same bits in any company."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias, self.project = linear.weight, linear.bias, Products()

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x.to(self.weight.dtype), self.weight, self.bias)


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


# --- what is changed in each part ---------------------------------------------------------------------------------


def _feed_forward(module: FeedForward | LMHead | LabelHead) -> None:
    if module.act is not None:
        module.act = Steady(module.act)
    if isinstance(module, LMHead):
        module.project = Products()


def _experts(module: MixtureOfExperts) -> None:
    module.act, module.sigmoid = Steady(module.act), Steady(torch.sigmoid)
    module.project = Products()
    module.logits = Product(module.router.weight.float(), None)  # type: ignore[method-assign]


def _latent(module: LatentAttention) -> None:
    module.mix = module.absorbed = partial(_absorbed, module)  # type: ignore[method-assign]


def _absorbed(
    self: LatentAttention,
    q: Tensor,
    kept: dict[str, Tensor],
    mask: Visible | Tensor,
    ctx: Context,
    bias: Tensor | None = None,
) -> Tensor:
    """LatentAttention.absorbed with the products of its heads in tiles."""
    up = self.w_ukv.weight.view(self.h, self.d + self.e, self.c)
    w_uk, w_uv = up.split([self.d, self.e], 1)  # h d c, h e c
    nope, rope = q.split([self.d, self.r], -1)
    q = torch.cat([_each_head(nope, w_uk), rope], -1)
    latent = kept["latent"][:, :, None]  # b s 1 c
    k = torch.cat([latent, kept["k_rope"][:, :, None]], -1) if self.r else latent
    o = attend(q, k, latent, mask, bias=bias, **self.terms(ctx, w_uv))
    return _each_head(o, w_uv.transpose(1, 2))


def _each_head(x: Tensor, w: Tensor) -> Tensor:
    """(b t h i), (h i o) -> (b t h o), 16 tokens at a time."""
    rows = x.flatten(0, 1).transpose(0, 1)  # h n i
    n = rows.shape[1]
    rows = F.pad(rows, (0, 0, 0, -n % TOKENS))
    y = torch.cat([part @ w for part in rows.split(TOKENS, 1)], 1)[:, :n]
    return y.transpose(0, 1).unflatten(0, x.shape[:2])


def _sparse(module: SparseAttention) -> None:
    module.dense = lambda keys: False  # type: ignore[method-assign]
    module.choice = partial(_seen_first, module.choice)  # type: ignore[method-assign]
    module.indexer.dots, module.indexer.join = dots, _index_scores


def _index_scores(dots: Tensor, w: Tensor) -> Tensor:
    """`index_scores`, head after head."""
    total = torch.zeros_like(dots[:, :, 0])
    for j in range(dots.shape[2]):
        total = total + w[:, :, j, None] * torch.relu(dots[:, :, j])
    return total


def _seen_first(
    choice: Callable[[Tensor, int, Tensor | None], Tensor],
    scores: Tensor,
    k: int,
    order: Tensor | None,
) -> Tensor:
    """The choice with what may not be seen at its end, so that the rest lies in the same tiles with any k."""
    chosen = choice(scores, k, order)
    hidden = scores.gather(-1, chosen) == -torch.inf
    return chosen.gather(-1, hidden.to(torch.uint8).argsort(dim=-1, stable=True))


def _additive(module: Additive) -> None:
    def join(q: Tensor, k: Tensor) -> Tensor:
        return (torch.tanh(q[..., :, None, :] + k[..., None, :, :]) * module.wv).sum(-1)

    module.join = join  # type: ignore[method-assign]


def _bilinear(module: Bilinear) -> None:
    products = Products()
    module.query = lambda q: products(q, module.weight.t())  # type: ignore[method-assign]


def _recurrence(module: Recurrence) -> None:
    module.forward = partial(_recur, module, Products())  # type: ignore[method-assign]


def _recur(
    self: Recurrence, project: Products, x: Tensor, state: State, lengths: Tensor | None = None
) -> tuple[Tensor, State]:
    """`Recurrence.plain`, in both directions where there are two; padding never moves a state."""
    ends: list[State] = []
    sides = ("", "_reverse") if self.rnn.bidirectional else ("",)
    for i in range(self.layers):
        outs = []
        for side in sides:
            names = ("weight_ih_l", "weight_hh_l", "bias_ih_l", "bias_hh_l")
            w, u, b, d = (getattr(self.rnn, f"{name}{i}{side}") for name in names)
            now, inputs = tuple(s[len(ends)] for s in state), project(x, w, b).unbind(1)
            out = {}
            for t in reversed(range(len(inputs))) if side else range(len(inputs)):
                new = self.cell.gates(inputs[t], project(now[0], u, d), now, GATE)
                now = new if lengths is None else hold(new, now, lengths > t)
                out[t] = now[0]
            outs.append(torch.stack([out[t] for t in range(len(inputs))], 1))
            ends.append(now)
        x = torch.cat(outs, -1)
    return x, tuple(torch.stack(parts) for parts in zip(*ends, strict=True))


def _convolution(module: nn.Conv2d) -> None:
    whole = module.forward
    module.forward = lambda input: torch.cat([whole(x[None]) for x in input])  # type: ignore[method-assign]


GATE = Steady(torch.sigmoid)
CHANGES: dict[type, Callable] = {
    FeedForward: _feed_forward,
    LMHead: _feed_forward,
    LabelHead: _feed_forward,
    MixtureOfExperts: _experts,
    LatentAttention: _latent,
    SparseAttention: _sparse,
    Additive: _additive,
    Bilinear: _bilinear,
    Recurrence: _recurrence,
    nn.Conv2d: _convolution,
}
STEADY = (  # parts with weights that need no change
    SteadyLinear,
    GroupedQueryAttention,
    TokenEmbedding,
    PatchEmbedding,
    PositionVectors,
    RelativeBias,
    RMSNorm,
    nn.LayerNorm,
    nn.Embedding,
    nn.RNNBase,  # whose weights are run by the cells
)
