"""Losses of logits: functions on tensors. Each gives (sum over counted labels, how many they are), so that masks,
packing and gradient accumulation divide by the right number once, at the end. A label of -100 is not counted."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.config import Choice, Fraction, Whole, settings
from regard.data.feed import IGNORE as IGNORE
from regard.errors import UsageError
from regard.kernels.triton.loss import turn

SMOOTHINGS = ("V-1", "V", "V-2")


@settings
class Smoothing:
    """q of the label is `top`, of every other word `share`, of `padding` 0: three definitions are in use.

    "V-1": top = 1 - eps, share = eps / (V-1)   (the default);
    "V":   top = 1 - eps + eps / V, share = eps / V   (torch, Hugging Face);
    "V-2": top = 1 - eps, share = eps / (V-2), with a padding id, which is no label   (The Annotated Transformer)."""

    eps: Fraction  # what the label gives away
    over: Annotated[str, Choice(SMOOTHINGS)] = "V-1"  # to V-1, V or V-2 words
    padding: Whole | None = None  # the id that gets nothing (V-2)

    def __post_init__(self) -> None:
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


def causal_lm_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """- sum_t log p(y_{t+1} | y_<=t), p(. | y_<=t) = softmax(logits_t).   logits (b t V), labels (b t) = the ids fed.

    The shift is here, for labels = ids; the labels of a `Batch` have been shifted before."""
    return masked_lm_loss(logits[:, :-1], labels[:, 1:])


def masked_lm_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """- sum_t log p(y_t), p = softmax(logits_t): no shift; labels are -100 wherever no token was selected."""
    # Slices are not contiguous: no view.
    flat = at_least_float32(logits).reshape(-1, logits.shape[-1])
    loss = F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORE, reduction="sum")
    return loss, (labels != IGNORE).sum()


def teacher_forcing(target: Tensor) -> tuple[Tensor, Tensor]:
    """target (b n), start and end token included -> what the decoder reads (b n-1) and what it must say (b n-1)."""
    return target[:, :-1], target[:, 1:]


def smooth(
    labels: Tensor, vocab: int, eps: float, over: str = "V-1", padding: int | None = None
) -> Tensor:
    """The distribution q (... V) that replaces a one-hot label, by one of the definitions of `Smoothing`."""
    smoothing = Smoothing(eps, over, padding)
    shape = (*labels.shape, vocab)
    q = torch.full(shape, smoothing.share(vocab), dtype=torch.float64, device=labels.device)
    if padding is not None:
        q[..., padding] = 0.0
    return q.scatter(-1, labels[..., None], smoothing.top(vocab))


def smoothed_loss(
    logits: Tensor, labels: Tensor, eps: float, over: str = "V-1", padding: int | None = None
) -> tuple[Tensor, Tensor]:
    """- sum_t sum_v q_tv log softmax(logits_t)_v with q of `smooth`; not shifted."""
    counted = Smoothing(eps, over, padding).counted(labels)
    log_p = at_least_float32(logits).log_softmax(-1)[counted]
    q = smooth(labels[counted], logits.shape[-1], eps, over, padding)
    return -(q.to(log_p.dtype) * log_p).sum(), counted.sum()


def at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


# --- the loss of a vocabulary head, chunk by chunk ---------------------------------------------------------------
#
# The logits (n V) never exist whole: a chunk's become its gradient in place and are used up before the next is made. So
# memory is one chunk and the gradient of the head's weight, which training needs anyway; the work is the three products
# of the plain loss.

# Logits at a time, chosen for speed: more are no faster, fewer cost more sums of dW.
CHUNK = {"cpu": 2**24, "cuda": 2**28}
# Columns of logits come in multiples, chosen for speed: tensor cores are several times slower on odd widths.
ALIGN = {"cuda": 64}


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    smoothing: Smoothing | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of logits = hidden weight^T + bias, with a `cap` c tanh(logits / c); see
    test_head_loss_equals_the_plain_loss.

    hidden (... m), weight (V m), bias (V), labels (...) -> (sum of losses, count), float32 at least. Under autocast the
    products are made in its dtype; the softmax and the sum over chunks of the weight's gradient are not."""
    device = hidden.device.type
    narrow = torch.is_autocast_enabled(device)
    hidden = hidden.to(torch.get_autocast_dtype(device)) if narrow else hidden
    smoothing = smoothing or NONE
    labels = labels.flatten()
    train = torch.is_grad_enabled()
    loss = _Chunks.apply(hidden.flatten(0, -2), weight, bias, labels, smoothing, train, cap)
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
        cap: float | None,
    ) -> Tensor:
        needs = [train and need for need in ctx.needs_input_grad]
        total = torch.promote_types(weight.dtype, torch.float32)
        counted = smoothing.counted(labels)
        ctx.shape, ctx.rows = h.shape, None
        if h.device.type == "cpu" and not counted.all():  # on a GPU, looking would mean waiting
            ctx.rows = counted.nonzero()[:, 0]
            h, labels, counted = h[ctx.rows], labels[ctx.rows], counted[ctx.rows]
        loss = h.new_zeros((), dtype=total)
        with torch.autocast(h.device.type, enabled=False):
            w = weight.to(h.dtype)
            b = None if bias is None else bias.to(h.dtype)
            # Rows of zeros up to a multiple of ALIGN.
            lacking = -len(w) % ALIGN.get(w.device.type, 1)
            w = F.pad(w, (0, 0, 0, lacking)) if lacking else w
            dh = torch.empty_like(h) if needs[0] else None
            dw = torch.zeros_like(w, dtype=total) if needs[1] else None
            db = torch.zeros_like(bias, dtype=total) if bias is not None and needs[2] else None
            size = -(-CHUNK.get(h.device.type, CHUNK["cpu"]) // len(w))
            room = h.new_empty(min(size, len(h)), len(w))  # logits, then the gradient by them
            vocab = len(weight)
            q = smoothing.top(vocab), smoothing.share(vocab), smoothing.padding
            for i in range(0, len(h), size):
                here = slice(i, i + size)
                x = h[here]
                g = torch.mm(x, w.t(), out=room[: len(x)])
                real = g[:, :vocab]  # what is beyond is 0 and stays so
                real = real if b is None else real.add_(b)
                # With t = tanh(z / c) the slope of c t is 1 - t^2.
                t = None
                if cap is not None:
                    t = (real / cap).tanh_()
                    real = torch.mul(t, cap, out=real)
                loss += turn(real, labels[here], counted[here], *q, train=any(needs))
                if t is not None:
                    real.mul_(1 - t.square_())
                if dh is not None:
                    torch.mm(g, w, out=dh[here])
                if dw is not None:
                    _add_product(dw, g, x)
                if db is not None:
                    db += real.sum(0, dtype=total)
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
        return dh, dw, db, None, None, None, None


def _add_product(total: Tensor, g: Tensor, x: Tensor) -> None:
    """total += g^T x, the sum in the total's type."""
    if total.dtype == g.dtype:
        total.addmm_(g.t(), x)
    elif g.is_cuda:
        torch.addmm(total, g.t(), x, out_dtype=total.dtype, out=total)
    else:
        total += g.t() @ x
