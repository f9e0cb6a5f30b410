"""How the indexer of sparse attention is trained: to say where attention goes (DeepSeek-V3.2, arXiv:2512.02556, 2.1.1).
p_ts is the main attention's weight on key s, summed over heads and divided by its sum over s: a target, not trained.

1. `dense_index`, the warm-up: the model attends densely and stays as it is; L = sum_t KL(p_t || softmax(I_t)) over
   all visible keys. Only indexers get a gradient.
2. `sparse_index`: the model attends to its choice S_t and learns by its own loss; the indexers learn beside it by
   the same L, restricted to S_t. They read x without a gradient: neither loss moves the other's parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.attention import Context, Terms, weights
from regard.attention.sparse import SparseAttention, Spread, choose, dots_exact, index_scores
from regard.data.feed import IGNORE, Batch
from regard.errors import UsageError
from regard.mask import Visible
from regard.training.losses import NONE, Smoothing
from regard.training.objectives import causal_mask, vocabulary_loss

M = TypeVar("M", bound=nn.Module)
# Scores of main attention or index heads that are made at a time, chosen for speed.
ROWS = 2**24


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
    log_q = scores.masked_fill(~seen & some, -torch.inf).log_softmax(-1)
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
            layer.config = replace(layer.config, topk=sys.maxsize)
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
        b, n, _ = where.chosen.shape
        _, s = where.size
        a = weights(q, k, mask, terms)[..., terms.sinks :].sum(1)  # bn 1 k
        self.target.append(a.new_zeros(b, n, s).scatter(-1, where.chosen, a.view(b, n, -1)))

    def loss(self, counted: Tensor, sparse: bool) -> Tensor:
        """The divergences at the counted queries (b t), summed. Only the indexer's parameters are in the graph."""
        layer, x, index = self.layer, self.x, self.layer.indexer
        with torch.no_grad():
            c_q = layer.attention.query_input(x)
        index_q, index_k = index.queries(c_q, self.ctx), index.keys(x, self.ctx)
        gate = index.weights(x)
        mask = layer.visible(self.ctx.pos, self.ctx)
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
