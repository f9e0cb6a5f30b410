"""What is minimised. Every loss is (sum over counted labels, how many they are), so that masks, packing and gradient
accumulation divide by the right number once, at the end. A label of -100 is not counted.

First the losses of logits, straight from their formulas; then the objectives, functions (model, batch) -> (sum, count)
that a trainer takes. `index.py` has the one of the sparse indexer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import IGNORE as IGNORE
from regard.data.batch import Batch, Objective
from regard.errors import UsageError
from regard.mask import Causal, Documents, Mask, Prefix
from regard.models.recurrent import Recurrent
from regard.moe import MixtureOfExperts, balance_loss
from regard.train.head import NONE, Smoothing, vocabulary_loss
from regard.train.head import SMOOTHINGS as SMOOTHINGS
from regard.train.index import dense_index, sparse_index

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


# --- objectives ---------------------------------------------------------------------------------------------------


def causal(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """- sum_t log p(label_t | ids_<=t): the next token, packed documents not seeing each other.

    Lengths are not told to the model: padding stands behind what could see it, and the fast causal kernel stays."""
    if batch.doc is None:
        return vocabulary_loss(model, model.hidden(batch.ids), batch.labels, smoothing)
    if isinstance(model, Recurrent):
        raise UsageError("a recurrent model carries its state on: it cannot read packed documents")
    mask = Causal() & Documents(batch.doc)
    return vocabulary_loss(model, model.hidden(batch.ids, mask=mask), batch.labels, smoothing)


def masked(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """- sum over selected tokens of log p(original | corrupted, both sides): the head sees only those tokens."""
    mask: Mask | None = None if batch.doc is None else Documents(batch.doc)
    hidden = model.hidden(batch.ids, batch.lengths, mask=mask)
    selected = batch.labels != IGNORE
    return vocabulary_loss(model, hidden[selected], batch.labels[selected], smoothing)


def seq2seq(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """- sum_t log p(label_t | source, ids_<=t): teacher forcing, for translation, T5's spans, BART, captions."""
    hidden = model.hidden(batch.ids, source=batch.source, source_lengths=batch.source_lengths)
    return vocabulary_loss(model, hidden, batch.labels, smoothing)


def prefix(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """As `causal` after a prefix that sees both ways; what stands in the prefix, and was seen, is not counted."""
    if batch.prefix is None:
        raise UsageError("the prefix objective needs batch.prefix: where each token's prefix ends")
    mask: Mask = Prefix(batch.prefix)
    if batch.doc is not None:
        mask = mask & Documents(batch.doc)
    hidden = model.hidden(batch.ids, mask=mask)
    place = torch.arange(batch.labels.shape[1], device=batch.labels.device)
    # The prefix's last token predicts the first one after it.
    seen = place < batch.prefix - 1
    return vocabulary_loss(model, hidden, batch.labels.masked_fill(seen, IGNORE), smoothing)


def classify(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """- sum over rows of log p(label | text or image).   labels (b). An image with a piece of another one in it has
    two classes, weighed by area."""
    logits = model(batch.ids, batch.lengths)
    if batch.guests is None or batch.share is None:
        return _label_loss(logits, batch.labels, smoothing)
    own, guest = (
        smooth(y.clamp(min=0), logits.shape[-1], smoothing.eps, smoothing.over, smoothing.padding)
        for y in (batch.labels, batch.guests)
    )
    log_p, counted = _wide(logits).log_softmax(-1), batch.labels != IGNORE
    q = torch.lerp(own, guest, batch.share[:, None].to(own.dtype)).to(log_p.dtype)
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
    found = (m for m in model.modules() if isinstance(m, MixtureOfExperts))
    return [m for m in found if m.router.weight.requires_grad]


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


OBJECTIVES: dict[str, Objective] = {
    "causal": causal,
    "masked": masked,
    "seq2seq": seq2seq,
    "prefix": prefix,
    "classify": classify,
    "tag": tag,
    "answer": answer,
    "dense_index": dense_index,
    "sparse_index": sparse_index,
}
