"""What is minimised. Every loss is (sum over counted labels, how many they are), so that masks, packing and gradient
accumulation divide by the right number once, at the end. A label of -100 is not counted.

First the losses of logits, straight from their formulas; then the objectives, functions (model, batch) -> (sum, count)
that a trainer takes; at the end those of the sparse indexer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from regard.attention import Context, Terms, weights
from regard.attention.sparse import SparseAttention, Spread, choose, dots_exact, index_scores
from regard.config import Fraction, Positive, Whole, settings
from regard.data.feed import IGNORE as IGNORE
from regard.data.feed import Batch, Objective
from regard.errors import UsageError, check_choice
from regard.kernels.triton.loss import turn
from regard.layers import LMHead
from regard.mask import Causal, Documents, Mask, Prefix, Visible
from regard.models.adapt import low_ranks, switched_off
from regard.models.recurrent import Recurrent
from regard.moe import MixtureOfExperts, balance_loss

M = TypeVar("M", bound=nn.Module)

# --- the loss of a vocabulary head, chunk by chunk ---------------------------------------------------------------
#
# The logits (n V) never exist whole: a chunk's become its gradient in place and are used up before the next is made. So
# memory is one chunk and the gradient of the head's weight, which training needs anyway; the work is the three products
# of the plain loss.

# Logits at a time, chosen for speed: more are no faster, fewer cost more sums of dW.
CHUNK = {"cpu": 2**24, "cuda": 2**28}
# Columns of logits come in multiples, chosen for speed: tensor cores are several times slower on odd widths.
ALIGN = {"cuda": 64}
SMOOTHINGS = ("V-1", "V", "V-2")


@settings
class Smoothing:
    """q of the label is `top`, of every other word `share`, of `padding` 0: three definitions are in use.

    "V-1": top = 1 - eps, share = eps / (V-1)   (the default);
    "V":   top = 1 - eps + eps / V, share = eps / V   (torch, Hugging Face);
    "V-2": top = 1 - eps, share = eps / (V-2), with a padding id, which is no label   (The Annotated Transformer)."""

    eps: Fraction  # what the label gives away
    over: str = "V-1"  # to V-1, V or V-2 words
    padding: Whole | None = None  # the id that gets nothing (V-2)

    def __post_init__(self) -> None:
        check_choice("smoothing.over", self.over, SMOOTHINGS)
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
    smoothing, labels = smoothing or NONE, labels.flatten()
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
        needs = [train and need for need in ctx.needs_input_grad[:3]]
        wide = torch.promote_types(weight.dtype, torch.float32)
        counted, ctx.shape, ctx.rows = smoothing.counted(labels), h.shape, None
        if h.device.type == "cpu" and not counted.all():  # on a GPU, looking would mean waiting
            ctx.rows = counted.nonzero()[:, 0]
            h, labels, counted = h[ctx.rows], labels[ctx.rows], counted[ctx.rows]
        loss = h.new_zeros((), dtype=wide)
        with torch.autocast(h.device.type, enabled=False):
            w, b = weight.to(h.dtype), None if bias is None else bias.to(h.dtype)
            # Rows of zeros up to a multiple of ALIGN.
            lacking = -len(w) % ALIGN.get(w.device.type, 1)
            w = F.pad(w, (0, 0, 0, lacking)) if lacking else w
            dh = torch.empty_like(h) if needs[0] else None
            dw = torch.zeros_like(w, dtype=wide) if needs[1] else None
            db = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None
            size = -(-CHUNK.get(h.device.type, CHUNK["cpu"]) // len(w))
            room = h.new_empty(min(size, len(h)), len(w))  # logits, then the gradient by them
            vocab = len(weight)
            q = smoothing.top(vocab), smoothing.share(vocab), smoothing.padding
            for i in range(0, len(h), size):
                x, here = h[i : i + size], slice(i, i + size)
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
        return dh, dw, db, None, None, None, None


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
    mask = {} if batch.doc is None else {"mask": causal_mask(batch)}
    if mask and isinstance(model, Recurrent):
        raise UsageError("a recurrent model carries its state on: it cannot read packed documents")
    return vocabulary_loss(model, model.hidden(batch.ids, **mask), batch.labels, smoothing)


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


FORMS = ("dpo", "normalised")
REWARDS = ("reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected")


@settings
class Prefer:
    """How one answer is preferred to another: loss = -log sigmoid(beta (r_chosen - r_rejected)), where r is
    log p(answer) - log p_reference(answer), the sum over its tokens ("dpo": Rafailov et al. 2023, arXiv:2305.18290) or
    their mean ("normalised": Lambert et al. 2024, arXiv:2411.15124)."""

    beta: Positive = 0.1  # how near to the reference it stays: the larger the nearer; normalised ones take about 5
    form: str = "dpo"  # dpo or normalised
    # a model folder that is compared with; none: the model as it starts, or without its LoRA
    reference: str = ""

    def __post_init__(self) -> None:
        check_choice("prefer.form", self.form, FORMS)


DPO = Prefer()


class Tally:
    """What an objective finds out beside its loss: sums over what it counts, until `means` is asked for."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, **sums: Tensor) -> None:
        """Sums of this batch; `count` is what they are divided by."""
        for name, x in sums.items():
            self.sums[name] = x.detach() + self.sums.get(name, 0)

    def means(self, total: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, float]:
        """The means since the last call, of the `total` over all processes."""
        sums, self.sums = {name: total(x).item() for name, x in self.sums.items()}, {}
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
    switched off; where there is no LoRA, none. `tally` is told the rewards, beta times r: of the chosen answers, of
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
    margin, counted = chosen - rejected, (batch.labels != IGNORE).any(1)
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


def classify(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """- sum over rows of log p(label | text or image), labels (b); or over tokens, labels (b t). An image with a piece
    of another one in it has two classes, weighed by area."""
    logits, how = label_logits(model, batch), (smoothing.eps, smoothing.over, smoothing.padding)
    if batch.pasted_labels is None or batch.pasted_area is None:
        if not smoothing.eps:
            return masked_lm_loss(logits, batch.labels)
        return smoothed_loss(logits, batch.labels, *how)
    labels = (batch.labels, batch.pasted_labels)
    own, guest = (smooth(y.clamp(min=0), logits.shape[-1], *how) for y in labels)
    log_p, counted = _wide(logits).log_softmax(-1), batch.labels != IGNORE
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
    return ~padding(batch.ids, batch.lengths)


def padding(x: Tensor, lengths: Tensor) -> Tensor:
    """Which tokens (b t) of x (b t ...) stand behind the real ones."""
    return torch.arange(x.shape[1], device=x.device) >= lengths[:, None]


# --- how the indexer of sparse attention is trained -----------------------------------------------
#
# To say where attention goes (DeepSeek-V3.2, arXiv:2512.02556, 2.1.1). p_ts is the main attention's weight on key s,
# summed over heads and divided by its sum over s: a target, not trained.
#
# 1. `dense_index`, the warm-up: the model attends densely and stays as it is; L = sum_t KL(p_t || softmax(I_t)) over
#    all visible keys. Only indexers get a gradient.
# 2. `sparse_index`: the model attends to its choice S_t and learns by its own loss; the indexers learn beside it by
#    the same L, restricted to S_t. They read x without a gradient: neither loss moves the other's parameters.

ROWS = 2**24  # scores of main attention or index heads that are made at a time, chosen for speed


def dense_index(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Stage 1: the sum of the divergences of all sparse layers at tokens with a label, and how many tokens they are."""
    with torch.no_grad(), densely(model), watching(model) as seen:
        model.hidden(batch.ids, mask=causal_mask(batch), probe=seen)
    return seen.loss(batch.labels != IGNORE, sparse=False), (batch.labels != IGNORE).sum()


def sparse_index(model: Any, batch: Batch, smoothing: Smoothing = NONE) -> tuple[Tensor, Tensor]:
    """Stage 2: the causal loss plus the divergences within the choice, over the same tokens."""
    with watching(model) as seen:
        hidden = model.hidden(batch.ids, mask=causal_mask(batch), probe=seen)
    loss, count = vocabulary_loss(model, hidden, batch.labels, smoothing)
    return loss + seen.loss(batch.labels != IGNORE, sparse=True), count


def indexers(model: M) -> M:
    """The model with all but its indexers frozen, in place: what stage 1 trains."""
    model.requires_grad_(False)
    for layer in sparse_layers(model):
        layer.indexer.requires_grad_(True)
    return model


def sparse_layers(model: nn.Module, needed: bool = False) -> list[SparseAttention]:
    layers = [m for m in model.modules() if isinstance(m, SparseAttention)]
    if needed and not layers:
        raise UsageError("this model has no indexer to train: its attention is not sparse (DSA)")
    return layers


def divergence(scores: Tensor, target: Tensor, seen: Tensor) -> Tensor:
    """KL(p || softmax(scores)) over the keys in `seen`, p the target there over its sum.   All (b t s) -> (b t).

    A row that sees nothing, or whose target is zero, gives 0."""
    some = seen.any(-1, keepdim=True)
    log_q = scores.masked_fill(~seen, -torch.inf).masked_fill(~some, 0.0).log_softmax(-1)
    p = target.masked_fill(~seen, 0.0)
    p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return (torch.xlogy(p, p) - p * log_q.masked_fill(~seen, 0.0)).sum(-1)


@contextmanager
def densely(model: nn.Module) -> Iterator[None]:
    """Inside, sparse layers may choose every key: they are the dense layers they came from."""
    layers = sparse_layers(model, needed=True)
    configs = [layer.config for layer in layers]
    try:
        for layer in layers:
            layer.config = replace(layer.config, topk=2**62)
        yield
    finally:
        for layer, config in zip(layers, configs, strict=True):
            layer.config = config


@contextmanager
def watching(model: nn.Module) -> Iterator[Watch]:
    """A probe to pass to the model's call inside: it keeps what sparse layers read and where their attention went."""
    watch = Watch({})
    hooks = [layer.register_forward_pre_hook(watch.enter) for layer in sparse_layers(model, True)]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Seen:
    """One layer's call: what it read, and its attention summed over heads, (b n s) for one run of queries after
    another."""

    layer: SparseAttention
    x: Tensor
    ctx: Context
    target: list[Tensor]

    @torch.no_grad()
    def see(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Visible | Tensor | None, terms: Terms
    ) -> None:
        """A dense call, q (b h t d): its weights, some queries at a time."""
        b, h, t, s = *q.shape[:3], k.shape[2]
        for rows in _runs(t, b * h * s):
            if isinstance(mask, Visible):
                shown: Tensor | None = mask.rows(rows)
            else:
                shown = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
            bias = terms.bias if terms.bias is None else terms.bias[:, :, rows]
            a = weights(q[:, :, rows], k, shown, replace(terms, bias=bias))
            self.target.append(a[..., terms.sinks :].sum(1))

    @torch.no_grad()
    def gathered(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, terms: Terms, where: Spread
    ) -> None:
        """A sparse call, a run of queries with the keys chosen for each: zero but for the choice."""
        (b, n, _), (_, s) = where.chosen.shape, where.size
        a = weights(q, k, mask, terms)[..., terms.sinks :].sum(1)  # bn 1 k
        self.target.append(a.new_zeros(b, n, s).scatter(-1, where.chosen, a.view(b, n, -1)))

    def loss(self, counted: Tensor, sparse: bool) -> Tensor:
        """The divergences at the counted queries (b t), summed. Only the indexer's parameters are in the graph."""
        layer, x, index = self.layer, self.x, self.layer.indexer
        with torch.no_grad():
            c_q = layer.attention.query_input(x)
        index_q, index_k = index.queries(c_q, self.ctx), index.keys(x, self.ctx)
        gate = index.weights(x)
        mask = self.ctx.visible(self.ctx.pos, layer.config.window)
        target = torch.cat(self.target, 1)

        def part(rows: slice, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
            seen = mask.rows(rows)[:, 0].expand(len(q), -1, -1)  # b n s
            dots = dots_exact(q, k)  # not in fp8, which has no useful gradient
            scores = index_scores(dots, w.to(dots.dtype))
            if sparse:
                hidden = scores.detach().masked_fill(~seen, -torch.inf)
                chosen = choose(hidden, min(layer.config.topk, hidden.shape[-1]))
                seen = seen & torch.zeros_like(seen).scatter(-1, chosen, True)
            return (divergence(scores, target[:, rows], seen) * counted[:, rows]).sum()

        b, t = x.shape[:2]
        runs = _runs(t, b * index.h * mask.k.size)
        parts = [(rows, index_q[:, rows], index_k, gate[:, rows]) for rows in runs]
        return sum(checkpoint(part, *p, use_reentrant=False) for p in parts)


@dataclass
class Watch:
    """The probe: a `Seen` for every sparse layer, found by the place of its call."""

    calls: dict[str, Seen]

    def enter(self, layer: Any, args: tuple[Any, ...]) -> None:
        x, ctx = args[:2]
        self.calls[ctx.site] = Seen(layer, x.detach(), ctx, [])

    def at(self, site: str) -> Seen | None:
        return self.calls.get(site)

    def loss(self, counted: Tensor, sparse: bool) -> Tensor:
        return torch.stack([seen.loss(counted, sparse) for seen in self.calls.values()]).sum()


def _runs(count: int, cost: int) -> list[slice]:
    """`count` queries in runs of ROWS / cost, rounded up."""
    size = -(-ROWS // cost)
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]
