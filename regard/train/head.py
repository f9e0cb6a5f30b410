"""The loss of a vocabulary head, chunk by chunk: the logits (n V) never exist whole.

A chunk's logits become its gradient in place and are used up before the next chunk is made. So memory is one chunk and
the gradient of the head's weight, which training needs anyway; the work is the three products of the plain loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.config import Fraction, Whole, ranged
from regard.data.batch import IGNORE
from regard.errors import UsageError, nearest
from regard.kernels.triton.loss import turn
from regard.layers import LMHead

CHUNK = {
    "cpu": 2**24,
    "cuda": 2**28,
}  # logits at a time: more are no faster, fewer cost more sums of dW
ALIGN = {
    "cuda": 64
}  # columns of logits come in multiples: tensor cores are several times slower on odd widths
SMOOTHINGS = ("V-1", "V", "V-2")


@dataclass(frozen=True)
@ranged
class Smoothing:
    """q of the label is `top`, of every other word `share`, of `padding` 0: three definitions are in use.

    "V-1": top = 1 - eps, share = eps / (V-1)   (the default);
    "V":   top = 1 - eps + eps / V, share = eps / V   (torch, Hugging Face);
    "V-2": top = 1 - eps, share = eps / (V-2), with a padding id, which is no label   (The Annotated Transformer)."""

    eps: Fraction
    over: str = "V-1"
    padding: Whole | None = None

    def __post_init__(self) -> None:
        if self.over not in SMOOTHINGS:
            hint = nearest(self.over, SMOOTHINGS)
            raise UsageError(f"label smoothing over {self.over!r} is unknown; {hint}")
        if (self.over == "V-2") != (self.padding is not None):
            raise UsageError('label smoothing over "V-2", and no other, needs the padding id')

    def share(self, vocab: int) -> float:
        return self.eps / {"V-1": vocab - 1, "V": vocab, "V-2": vocab - 2}[self.over]

    def top(self, vocab: int) -> float:
        return 1 - self.eps + (self.share(vocab) if self.over == "V" else 0.0)

    def counted(self, labels: Tensor) -> Tensor:
        """Which labels count."""
        real = labels != IGNORE
        return real if self.padding is None else real & (labels != self.padding)


NONE = Smoothing(0.0)


def vocabulary_loss(
    model: Any, hidden: Tensor, labels: Tensor, smoothing: Smoothing | None = None
) -> tuple[Tensor, Tensor]:
    """- sum over labels of sum_v q_v log softmax(model.logits(hidden))_v, and how many labels count.

    hidden (... m), labels (...)."""
    features, weight, bias = projection(model, hidden)
    return head_loss(features, weight, labels, bias=bias, smoothing=smoothing)


def projection(model: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, W and b for which model.logits(hidden) = x W^T + b."""
    head = model.head
    if type(head) is not LMHead:
        raise UsageError(
            "this objective predicts words: it needs a model with an LM or MLM head that has not been prepared"
        )
    weight = table(model) if head.weight is None else head.weight
    return head.features(hidden), weight, head.bias


def table(model: Any) -> Tensor:
    """The embedding (V m) that a tied head multiplies by: the target's, where there are two."""
    return (getattr(model, "target", None) or model.embedding).weight


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    smoothing: Smoothing | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of logits = hidden weight^T + bias; see test_head_loss_equals_the_plain_loss.

    hidden (... m), weight (V m), bias (V), labels (...) -> (sum of losses, count), float32 at least. Under autocast the
    products are made in its dtype; the softmax and the sum over chunks of the weight's gradient are not."""
    device = hidden.device.type
    narrow = torch.is_autocast_enabled(device)
    hidden = hidden.to(torch.get_autocast_dtype(device)) if narrow else hidden
    smoothing, labels = smoothing or NONE, labels.flatten()
    train = torch.is_grad_enabled()
    loss = _Chunks.apply(hidden.flatten(0, -2), weight, bias, labels, smoothing, train)
    return loss, smoothing.counted(labels).sum()


class _Chunks(torch.autograd.Function):
    """The gradient is made on the way forward, while a chunk's logits are there; backward only scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: Smoothing,
        train: bool,
    ) -> Tensor:
        needs = [train and need for need in ctx.needs_input_grad[:3]]
        wide = torch.promote_types(weight.dtype, torch.float32)
        counted, ctx.shape, ctx.rows = smoothing.counted(labels), h.shape, None
        if h.device.type == "cpu" and not counted.all():  # on a GPU, looking would mean waiting
            ctx.rows = counted.nonzero()[:, 0]
            h, labels, counted = h[ctx.rows], labels[ctx.rows], counted[ctx.rows]
        loss = h.new_zeros((), dtype=wide)
        with torch.autocast(h.device.type, enabled=False):
            w, b = _aligned(weight, h.dtype), None if bias is None else bias.to(h.dtype)
            dh = torch.empty_like(h) if needs[0] else None
            dw = torch.zeros_like(w, dtype=wide) if needs[1] else None
            db = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None
            size = max(1, CHUNK.get(h.device.type, CHUNK["cpu"]) // len(w))
            room = h.new_empty(min(size, len(h)), len(w))  # logits, then the gradient by them
            vocab = len(weight)
            q = smoothing.top(vocab), smoothing.share(vocab), smoothing.padding
            for i in range(0, len(h), size):
                x, here = h[i : i + size], slice(i, i + size)
                g = torch.mm(x, w.t(), out=room[: len(x)])
                real = g[:, :vocab]  # what is beyond is 0 and stays so
                real = real if b is None else real.add_(b)
                loss += turn(real, labels[here], counted[here], *q, train=any(needs))
                if dh is not None:
                    torch.mm(g, w, out=dh[here])
                if dw is not None:
                    _add_product(dw, g, x)
                if db is not None:
                    db += real.sum(0, dtype=wide)
        ctx.ready = [dh, None if dw is None else dw[:vocab].to(weight.dtype), db]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        if ctx.ready is None:
            raise RuntimeError("the loss in chunks goes backward once: its gradient has been used")
        ready, ctx.ready = ctx.ready, None
        dh, dw, db = (x if x is None else x.mul_(scale.to(x.dtype)) for x in ready)
        if dh is not None and ctx.rows is not None:
            dh = dh.new_zeros(ctx.shape).index_copy_(0, ctx.rows, dh)
        return dh, dw, db, None, None, None


def _aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in this type, with rows of zeros up to a multiple of ALIGN."""
    lacking = -len(weight) % ALIGN.get(weight.device.type, 1)
    return F.pad(weight.to(dtype), (0, 0, 0, lacking)) if lacking else weight.to(dtype)


def _add_product(total: Tensor, g: Tensor, x: Tensor) -> None:
    """total += g^T x, the sum in the total's type."""
    if total.dtype == g.dtype:
        total.addmm_(g.t(), x)
    elif g.is_cuda:
        torch.addmm(total, g.t(), x, out_dtype=total.dtype, out=total)
    else:
        total += g.t() @ x
