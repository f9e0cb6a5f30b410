"""Scheduled sampling: in training a decoder reads some of its own words, as it will when it is used.

The feed marks which inputs those are, by (seed, k) alone; the objective draws them. Gradients flow through what is then
read, not through the draws. Evaluations read what is right."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from regard.config import Needs, Share, Whole, settings
from regard.data.feed import Batch, Feed, drawing
from regard.decode.sampling import draw

# Rows of logits that exist at once.
ROWS = 1024


@settings
class ScheduledSampling:
    """Each input of the decoder but the first is, with probability `share`, what the model itself draws there. A
    recurrent model draws word after word, each after its own (Bengio et al. 2015, arXiv:1506.03099). A Transformer
    draws a whole row at once, after the right words, and reads it in a second pass (Mihaylova and Martins 2019,
    arXiv:1906.07651)."""

    share: Share = 0.0  # of the decoder's inputs that the model draws itself
    warmup: Annotated[Whole, Needs("share", "0.25")] = 0  # steps in which the share rises from 0

    def at(self, step: int) -> float:
        """The share of step k = 1, 2, ..."""
        return self.share * min(step / self.warmup, 1.0) if self.warmup else self.share


TEACHER = ScheduledSampling()


class Sampled:
    """The batches of a feed with `own`: which inputs the model draws. Every batch has it, also one that marks none: so
    all processes call their models alike."""

    def __init__(self, feed: Feed, how: ScheduledSampling, seed: int):
        self.feed, self.how, self.seed, self.epoch = feed, how, seed, feed.epoch
        told = repr((feed.fingerprint, how, seed))
        self.fingerprint = hashlib.sha256(told.encode()).hexdigest()

    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch:
        batch = self.feed.batch(k, rank, world)
        chance = torch.rand(batch.ids.shape, generator=drawing(self.seed, "own", k, rank))
        own = chance < self.how.at(k + 1)
        own[:, 0] = False
        return replace(batch, own=own)

    def evaluation(self) -> Iterator[Batch]:
        return self.feed.evaluation()

    def describe(self) -> str:
        return f"{self.feed.describe()}; {self.how.share:.0%} of a decoder's inputs are its own"


@torch.no_grad()
def inputs(model: Any, batch: Batch) -> Tensor:
    """What the decoder reads (b t): batch.ids, and where batch.own says so draws of the model, by torch's own random
    numbers."""
    if batch.own is None:
        return batch.ids
    ids, own, source = batch.ids.clone(), batch.own, (batch.source, batch.source_lengths)
    if model.towers:
        hidden = model.hidden(ids, source=source[0], source_lengths=source[1])
        parts = hidden[:, :-1][own[:, 1:]].split(ROWS)
        ids[own] = torch.cat([drawn(model.logits(part)) for part in parts])
        return ids
    cache = model.cache(len(ids))
    for t in range(1, ids.shape[1]):
        last, how = ids[:, t - 1 : t], {"source": source[0], "source_lengths": source[1]}
        said = drawn(model.next_logits(last, **how, cache=cache))
        ids[:, t] = torch.where(own[:, t], said, ids[:, t])
        source = None, None
    return ids


def drawn(logits: Tensor) -> Tensor:
    """A token for each row of (n V)."""
    return draw(logits, torch.rand(len(logits), device=logits.device))
