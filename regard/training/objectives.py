"""Objectives: what a task minimises, as functions (model, batch) -> (sum over counted labels, how many they are). And
what the tokens of a batch see meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.config import Choice, Positive, settings
from regard.data.feed import IGNORE, Batch, Objective
from regard.errors import UsageError
from regard.layers import LMHead
from regard.mask import Causal, Documents, Mask, Prefix, Span
from regard.models.adapt import low_ranks, switched_off
from regard.models.recurrent import Recurrent
from regard.moe import MixtureOfExperts, balance_loss
from regard.training.losses import (
    NONE,
    Smoothing,
    at_least_float32,
    head_loss,
    masked_lm_loss,
    smooth,
    smoothed_loss,
)
from regard.training.scheduled import inputs

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


# --- of words -----------------------------------------------------------------------------------------------------


def vocabulary_loss(
    model: Any, hidden: Tensor, labels: Tensor, smoothing: Smoothing | None = None
) -> tuple[Tensor, Tensor]:
    """- sum over labels of sum_v q_v log softmax(model.logits(hidden))_v, and how many labels count.

    hidden (... m), labels (...)."""
    features, weight, bias = projection(model, hidden)
    cap = model.head.softcap
    return head_loss(features, weight, labels, bias=bias, smoothing=smoothing, cap=cap)


def projection(model: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, W and b for which model.logits(hidden) = x W^T + b, but for a cap."""
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


def causal(
    model: Any, batch: Batch, smoothing: Smoothing = NONE, mtp: float | None = None, tally: Tally | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """- sum_t log p(label_t | ids_<=t): the next token, packed documents not seeing each other. In training, `mtp`
    times the loss of the model's MTP layers stands beside it (None: MTP_WEIGHT); `tally` gets that loss.

    Lengths are not told to the model: padding stands behind what could see it, and the fast causal kernel stays."""
    mask = {} if batch.doc is None else {"mask": causal_mask(batch)}
    if mask and isinstance(model, Recurrent):
        raise UsageError("a recurrent model carries its state on: it cannot read packed documents")
    hidden = model.hidden(batch.ids, **mask)
    total, count = vocabulary_loss(model, hidden, batch.labels, smoothing)
    weight = MTP_WEIGHT if mtp is None else mtp
    if weight and model.training and learns_mtp(model):
        further, labels = further_loss(model, hidden, batch)
        if tally is not None:
            tally.add(mtp_loss=further, count=labels)
        total = total + weight * further
    return total, count


# The weight of the loss of MTP layers where none is set, as at first in DeepSeek-V3.
MTP_WEIGHT = 0.3


def learns_mtp(model: Any) -> bool:
    layers = getattr(model, "mtp", None)
    return layers is not None and any(p.requires_grad for p in layers.parameters())


def further_loss(model: Any, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The mean over MTP layers of - sum_t log p(label that lies further on, in the same document), and how many they
    are. hidden (b t m): the tower's."""
    mask, depth = causal_mask(batch), model.mtp.config.depth
    size = batch.ids.shape[1]
    pos = Span.run(0, size, hidden.device).within(mask)
    loss, count = hidden.new_zeros(()), torch.zeros((), device=hidden.device)
    for layer in range(depth):
        far = layer + 1
        ids = F.pad(batch.ids[:, far:], (0, far))[:, :size]
        labels = F.pad(batch.labels[:, far:], (0, far), value=IGNORE)[:, :size]
        if batch.doc is not None:
            there = F.pad(batch.doc[:, far:], (0, far), value=-1)[:, :size]
            labels = labels.masked_fill(there != batch.doc, IGNORE)
        hidden = model.further(hidden, ids, pos, layer, mask=mask)
        more, counted = vocabulary_loss(model, hidden, labels)
        loss, count = loss + more / depth, count + counted / depth
    return loss, count


def masked(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """- sum over selected tokens of log p(original | corrupted, both sides): the head sees only those tokens."""
    hidden = model.hidden(batch.ids, batch.lengths, mask=document_mask(batch))
    selected = batch.labels != IGNORE
    return vocabulary_loss(model, hidden[selected], batch.labels[selected], smoothing)


def seq2seq(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """- sum_t log p(label_t | source, ids_<=t): teacher forcing, for translation, T5's spans, BART, captions. With
    scheduled sampling some ids are the model's own."""
    ids = inputs(model, batch)
    hidden = model.hidden(ids, source=batch.source, source_lengths=batch.source_lengths)
    return vocabulary_loss(model, hidden, batch.labels, smoothing)


def prefix(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """As `causal` after a prefix that sees both ways; what stands in the prefix, and was seen, is not counted."""
    hidden = model.hidden(batch.ids, mask=prefix_mask(batch))
    assert batch.prefix is not None
    place = torch.arange(batch.labels.shape[1], device=batch.labels.device)
    # The prefix's last token predicts the first one after it.
    seen = place < batch.prefix - 1
    return vocabulary_loss(model, hidden, batch.labels.masked_fill(seen, IGNORE), smoothing)


# --- of two answers -----------------------------------------------------------------------------------------------


FORMS = ("dpo", "normalised")
REWARDS = ("reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected")


@settings
class Prefer:
    """How one answer is preferred to another: loss = -log sigmoid(beta (r_chosen - r_rejected)), where r is
    log p(answer) - log p_reference(answer), the sum over its tokens ("dpo": Rafailov et al. 2023, arXiv:2305.18290) or
    their mean ("normalised": Lambert et al. 2024, arXiv:2411.15124)."""

    beta: Positive = 0.1  # how near to the reference it stays: the larger the nearer; normalised ones take about 5
    form: Annotated[str, Choice(FORMS)] = "dpo"  # dpo or normalised
    # a model folder that is compared with; none: the model as it starts, or without its LoRA
    reference: str = ""


DPO = Prefer()


class Tally:
    """Metrics of an objective beside its loss: sums over what it counts, until `means` is called."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, **sums: Tensor) -> None:
        """Sums of this batch; `count` is what they are divided by."""
        for name, x in sums.items():
            self.sums[name] = x.detach() + self.sums.get(name, 0)

    def means(self, total: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, float]:
        """The means since the last call, of the `total` over all processes."""
        sums = {name: total(x).item() for name, x in self.sums.items()}
        self.sums = {}
        count = max(sums.pop("count", 0), 1)
        return {name: x / count for name, x in sums.items()}


def prefer(
    model: Any,
    batch: Batch,
    how: Prefer = DPO,
    reference: Any = None,
    tally: Tally | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of `Prefer`, summed over pairs, and how many they are. Without a `reference` it is the model with LoRA
    switched off; where there is no LoRA, none. `tally` gets the rewards, beta times r: of the chosen answers, of
    the rejected ones, how much larger the former are, and in how many pairs they are larger."""
    assert batch.rejected is not None and batch.rejected_labels is not None
    sides = ((batch.ids, batch.labels), (batch.rejected, batch.rejected_labels))
    rewards = []
    for ids, labels in sides:
        reward = answer_logs(model, ids, labels)
        if reference is not None or low_ranks(model):
            off = nullcontext() if reference is not None else switched_off(model)
            # Nothing in it learns, so that no graph is kept; but where gradients are on, products may be joined, and
            # the same parts give the same bits.
            with off:
                # A copy: what is measured remembers the ids it was asked for last.
                usual = answer_logs(reference or model, ids.clone(), labels).detach()
            reward = reward - usual
        if how.form == "normalised":
            reward = reward / (labels != IGNORE).sum(1).clamp(min=1)
        rewards.append(how.beta * reward)
    chosen, rejected = rewards
    margin = chosen - rejected
    counted = (batch.labels != IGNORE).any(1)
    if tally is not None:
        figures = (margin > 0, margin, chosen, rejected)
        sums = {name: (x * counted).sum() for name, x in zip(REWARDS, figures, strict=True)}
        tally.add(count=counted.sum(), **sums)
    return -(F.logsigmoid(margin) * counted).sum(), counted.sum()


def answer_logs(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """log p of the labels (b t) of each row, summed: (b). The logits are those of one row at a time."""
    features, weight, bias = projection(model, model.hidden(ids))

    def row(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return -masked_lm_loss(model.head.capped(F.linear(x, weight, bias)), y)[0]

    rows = [(x[y != IGNORE], y[y != IGNORE], weight) for x, y in zip(features, labels)]
    return torch.stack([checkpoint(row, *each, use_reentrant=False) for each in rows])


# --- of labels ----------------------------------------------------------------------------------------------------


def classify(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """- sum over rows of log p(label | text or image), labels (b); or over tokens or patches, labels (b t). An image
    with a piece of another one in it has two classes, weighed by area."""
    logits = label_logits(model, batch)
    how = (smoothing.eps, smoothing.over, smoothing.padding)
    if batch.pasted_labels is None or batch.pasted_area is None:
        if not smoothing.eps:
            return masked_lm_loss(logits, batch.labels)
        return smoothed_loss(logits, batch.labels, *how)
    labels = (batch.labels, batch.pasted_labels)
    own, guest = (smooth(y.clamp(min=0), logits.shape[-1], *how) for y in labels)
    log_p = at_least_float32(logits).log_softmax(-1)
    counted = batch.labels != IGNORE
    q = torch.lerp(own, guest, batch.pasted_area[:, None].to(own.dtype)).to(log_p.dtype)
    return -(q * log_p * counted[:, None]).sum(), counted.sum()


def answer(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """- sum over rows of log p(start) + log p(end), each a softmax over the row's tokens.   labels (b 2), each
    counted."""
    logits = label_logits(model, batch)  # b t 2
    if batch.lengths is not None:
        logits = logits.masked_fill(padding(logits, batch.lengths)[..., None], -torch.inf)
    return masked_lm_loss(logits.transpose(1, 2), batch.labels)


def label_logits(model: Any, batch: Batch) -> Tensor:
    """What a head for labels gives; segment types are for models that have them."""
    if batch.types is None or model.config.embedding.types < 2:
        return model(batch.ids, batch.lengths)
    return model(batch.ids, batch.lengths, types=batch.types)


def draw(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """sum over pixels of (drawn - wanted)^2, and how many they are: the best drawing is the mean of all pictures that
    a text may mean.   labels (b c h w)"""
    counted = batch.labels != IGNORE
    error = at_least_float32(model(batch.ids, batch.lengths)) - batch.labels
    return (error.square() * counted).sum(), counted.sum()


def padding(x: Tensor, lengths: Tensor) -> Tensor:
    """Which tokens (b t) of x (b t ...) stand behind the real ones."""
    return torch.arange(x.shape[1], device=x.device) >= lengths[:, None]


# --- beside another -----------------------------------------------------------------------------------------------


# The weight of the balance loss where none is set, as in Switch Transformers.
BALANCE = 0.01


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
    return ~padding(batch.ids, batch.lengths)
