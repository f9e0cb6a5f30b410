"""What is minimised. Every loss is (sum over counted labels, how many they are), so that masks, packing and gradient
accumulation divide by the right number once, at the end. A label of -100 is not counted.

First the losses of logits, straight from their formulas; then the objectives, functions (model, batch) -> (sum, count)
that a trainer takes. `index.py` has the one of the sparse indexer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.config import Fraction, Whole, ranged
from regard.data.feed import IGNORE as IGNORE
from regard.data.feed import Batch, Objective
from regard.errors import UsageError, nearest
from regard.kernels.triton.loss import turn
from regard.layers import LMHead
from regard.mask import Causal, Documents, Mask, Prefix
from regard.models.recurrent import Recurrent
from regard.moe import MixtureOfExperts, balance_loss

# --- the loss of a vocabulary head, chunk by chunk ---------------------------------------------------------------
#
# The logits (n V) never exist whole: a chunk's become its gradient in place and are used up before the next is made. So
# memory is one chunk and the gradient of the head's weight, which training needs anyway; the work is the three products
# of the plain loss.

# Logits at a time: more are no faster, fewer cost more sums of dW.
CHUNK = {"cpu": 2**24, "cuda": 2**28}
# Columns of logits come in multiples: tensor cores are several times slower on odd widths.
ALIGN = {"cuda": 64}
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


# --- losses of logits ---------------------------------------------------------------------------------------------


def causal_lm_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """- sum_t log p(y_{t+1} | y_<=t), p(. | y_<=t) = softmax(logits_t).   logits (b t V), labels (b t) = the ids fed.

    The shift is here, for labels = ids; the labels of a `Batch` have been shifted before."""
    return masked_lm_loss(logits[:, :-1], labels[:, 1:])


def masked_lm_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """- sum_t log p(y_t), p = softmax(logits_t): no shift; labels are -100 wherever no token was selected."""
    flat = _wide(logits).reshape(-1, logits.shape[-1])  # slices are not contiguous: no view
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
    log_p = _wide(logits).log_softmax(-1)[counted]
    q = smooth(labels[counted], logits.shape[-1], eps, over, padding)
    return -(q.to(log_p.dtype) * log_p).sum(), counted.sum()


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


# --- what the tokens of a batch see -------------------------------------------------------------------------------


def own_mask(batch: Batch) -> None:
    """The model's own."""


def document_mask(batch: Batch) -> Mask | None:
    return None if batch.doc is None else Documents(batch.doc)


def causal_mask(batch: Batch) -> Mask | None:
    return None if batch.doc is None else Causal() & Documents(batch.doc)


def prefix_mask(batch: Batch) -> Mask:
    if batch.prefix is None:
        raise UsageError("the prefix objective needs batch.prefix: where each token's prefix ends")
    mask = Prefix(batch.prefix)
    return mask if batch.doc is None else mask & Documents(batch.doc)


# --- objectives ---------------------------------------------------------------------------------------------------


def causal(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """- sum_t log p(label_t | ids_<=t): the next token, packed documents not seeing each other.

    Lengths are not told to the model: padding stands behind what could see it, and the fast causal kernel stays."""
    mask = causal_mask(batch)
    if mask is None:
        return vocabulary_loss(model, model.hidden(batch.ids), batch.labels, smoothing)
    if isinstance(model, Recurrent):
        raise UsageError("a recurrent model carries its state on: it cannot read packed documents")
    return vocabulary_loss(model, model.hidden(batch.ids, mask=mask), batch.labels, smoothing)


def masked(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """- sum over selected tokens of log p(original | corrupted, both sides): the head sees only those tokens."""
    hidden = model.hidden(batch.ids, batch.lengths, mask=document_mask(batch))
    selected = batch.labels != IGNORE
    return vocabulary_loss(model, hidden[selected], batch.labels[selected], smoothing)


def seq2seq(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """- sum_t log p(label_t | source, ids_<=t): teacher forcing, for translation, T5's spans, BART, captions."""
    hidden = model.hidden(batch.ids, source=batch.source, source_lengths=batch.source_lengths)
    return vocabulary_loss(model, hidden, batch.labels, smoothing)


def prefix(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """As `causal` after a prefix that sees both ways; what stands in the prefix, and was seen, is not counted."""
    hidden = model.hidden(batch.ids, mask=prefix_mask(batch))
    assert batch.prefix is not None
    place = torch.arange(batch.labels.shape[1], device=batch.labels.device)
    # The prefix's last token predicts the first one after it.
    seen = place < batch.prefix - 1
    return vocabulary_loss(model, hidden, batch.labels.masked_fill(seen, IGNORE), smoothing)


def classify(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """- sum over rows of log p(label | text or image).   labels (b). An image with a piece of another one in it has
    two classes, weighed by area."""
    logits = model(batch.ids, batch.lengths)
    if batch.pasted_labels is None or batch.pasted_area is None:
        return _label_loss(logits, batch.labels, smoothing)
    own, guest = (
        smooth(y.clamp(min=0), logits.shape[-1], smoothing.eps, smoothing.over, smoothing.padding)
        for y in (batch.labels, batch.pasted_labels)
    )
    log_p, counted = _wide(logits).log_softmax(-1), batch.labels != IGNORE
    q = torch.lerp(own, guest, batch.pasted_area[:, None].to(own.dtype)).to(log_p.dtype)
    return -(q * log_p * counted[:, None]).sum(), counted.sum()


def tag(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """- sum over tokens of log p(label_t | text).   labels (b t)."""
    return _label_loss(model(batch.ids, batch.lengths), batch.labels, smoothing)


def answer(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """- sum over rows of log p(start) + log p(end), each a softmax over the row's tokens.   labels (b 2), each
    counted."""
    logits = model(batch.ids, batch.lengths)  # b t 2
    if batch.lengths is not None:
        place = torch.arange(logits.shape[1], device=logits.device)
        padding = place >= batch.lengths[:, None]
        logits = logits.masked_fill(padding[..., None], -torch.inf)
    return masked_lm_loss(logits.transpose(1, 2), batch.labels)


def _label_loss(logits: Tensor, labels: Tensor, smoothing: Smoothing) -> tuple[Tensor, Tensor]:
    if not smoothing.eps:
        return masked_lm_loss(logits, labels)
    return smoothed_loss(logits, labels, smoothing.eps, smoothing.over, smoothing.padding)


BALANCE = 0.01  # the weight of the balance loss where none is said, as in Switch Transformers


def mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    """Those whose routers learn."""
    layers = (m for m in model.modules() if isinstance(m, MixtureOfExperts))
    return [m for m in layers if m.router.weight.requires_grad]


def balanced(objective: Objective, model: nn.Module, weight: float | None) -> Objective:
    """The objective plus `weight` times the balance loss of the model's mixtures of experts, for every label; it is 0
    in evaluation. None: BALANCE, or nothing where a correction bias keeps the balance (DeepSeek-V3)."""
    if weight is None:
        free = all(m.correction is not None for m in mixtures(model))
        weight = 0.0 if free else BALANCE
    if not mixtures(model):
        return objective

    def loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        total, count = objective(model, batch)
        return total + weight * count * balance_loss(model, _real(batch)), count

    return loss


def _real(batch: Batch) -> Tensor | None:
    """The tokens (b t) that are no padding; None: all."""
    if batch.doc is not None:
        return batch.doc >= 0
    if batch.lengths is None or batch.source is not None:
        return None
    place = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    return place < batch.lengths[:, None]
