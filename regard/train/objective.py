"""What is minimised. Every loss is (sum over counted tokens, how many they are), so that masks, packing and gradient
accumulation divide by the right number once, at the end. A label of -100 is not counted."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.config import UsageError, nearest

IGNORE = -100
SMOOTHINGS = ("V-1", "V", "V-2")


def causal_lm_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """- sum_t log p(y_{t+1} | y_<=t), p(. | y_<=t) = softmax(logits_t).   logits (b t V), labels (b t) = the ids fed.

    The shift is here and nowhere else: the caller passes labels = ids."""
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
    """The distribution q (... V) that replaces a one-hot label; three definitions are in use:

    "V-1": q_y = 1 - eps, the others eps / (V-1)   (the default);
    "V":   q_y = 1 - eps + eps / V, the others eps / V   (torch, Hugging Face);
    "V-2": q_y = 1 - eps, the others eps / (V-2), the `padding` id 0   (The Annotated Transformer)."""
    if over not in SMOOTHINGS:
        raise UsageError(f"label smoothing over {over!r} is unknown; {nearest(over, SMOOTHINGS)}")
    if (over == "V-2") != (padding is not None):
        raise UsageError('label smoothing over "V-2", and no other, needs the padding id')
    share = eps / {"V-1": vocab - 1, "V": vocab, "V-2": vocab - 2}[over]
    q = torch.full((*labels.shape, vocab), share, dtype=torch.float64, device=labels.device)
    if padding is not None:
        q[..., padding] = 0.0
    return q.scatter(-1, labels[..., None], 1 - eps + (share if over == "V" else 0.0))


def smoothed_loss(
    logits: Tensor, labels: Tensor, eps: float, over: str = "V-1", padding: int | None = None
) -> tuple[Tensor, Tensor]:
    """- sum_t sum_v q_tv log softmax(logits_t)_v with q of `smooth`; not shifted."""
    counted = labels != IGNORE
    log_p = _wide(logits).log_softmax(-1)[counted]
    q = smooth(labels[counted], logits.shape[-1], eps, over, padding)
    return -(q.to(log_p.dtype) * log_p).sum(), counted.sum()


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
