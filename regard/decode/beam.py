"""Beam search for many requests at once: a lane of groups of rows, each group the beams of one request.

A group holds `beams` running texts and the best `beams` finished ones. Each step takes the best continuations over all
running texts, files those that end, and goes on with the rest. A finished text scores log probability / length ** penalty.
A group is done when its finished texts cannot be beaten: by the bound that `early_stopping` chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.cache import Cache
from regard.decode.sample import forced
from regard.decode.settings import Event, Request, Result

WORST = -1.0e9


@dataclass
class Beams:
    """The state of g groups of w beams; texts are stored to length T. All tensors have g rows."""

    score: Tensor  # g w: log probability of the running texts
    ids: Tensor  # g w T
    logp: Tensor  # g w T: of each token
    done_score: Tensor  # g w, with length penalty; WORST where empty
    done_ids: Tensor
    done_logp: Tensor
    done_size: Tensor  # g w: tokens of the finished text, its end included
    done: Tensor  # g w bool
    improvable: Tensor  # g bool
    count: Tensor  # g: tokens produced so far

    @staticmethod
    def start(groups: int, width: int, size: int, device: torch.device) -> Beams:
        """Only the first beam counts at first, or all would say the same."""
        score = torch.full((groups, width), WORST, device=device)
        score[:, 0] = 0.0
        ids = torch.zeros(groups, width, size, dtype=torch.long, device=device)
        logp = torch.zeros(groups, width, size, device=device)
        flags = torch.zeros(groups, width, dtype=torch.bool, device=device)
        return Beams(
            score,
            ids,
            logp,
            torch.full_like(score, WORST),
            ids.clone(),
            logp.clone(),
            torch.zeros(groups, width, dtype=torch.long, device=device),
            flags,
            torch.ones(groups, dtype=torch.bool, device=device),
            torch.zeros(groups, dtype=torch.long, device=device),
        )

    def each(self, f: Any, *others: Beams) -> Beams:
        names = self.__dataclass_fields__
        return Beams(*(f(*(getattr(b, n) for b in (self, *others))) for n in names))


class BeamLane:
    """Requests with the same settings, `settings.rows` rows each, over one cache."""

    def __init__(self, cache: Cache, requests: list[Request]):
        self.cache, self.requests_ = cache, requests
        self.settings = s = requests[0].settings
        size = s.max_new_tokens
        n = len(requests) * s.groups
        self.state = Beams.start(n, s.beams // s.groups, size, cache.device)
        self.closed = [False] * len(requests)

    def step(self, model: Any, backend: str) -> list[Event]:
        last = (self.state.count - 1)[:, None, None].expand(-1, self.state.ids.shape[1], 1)
        ids = self.state.ids.gather(2, last).view(-1, 1)
        return self.choose(model.next_logits(ids, cache=self.cache, backend=backend))

    def choose(self, logits: Tensor) -> list[Event]:
        """Advance every group by logits (rows V); then put the cache's rows in the new order."""
        s, g = self.settings, len(self.requests_)
        broken = logits.isnan().view(g, -1).any(-1).tolist()
        parts = logits.float().nan_to_num(0.0).view(g, s.groups, s.beams // s.groups, -1)
        counts: Tensor | None = None
        parents, ends = [], []
        for k in range(s.groups):
            at = torch.arange(k, g * s.groups, s.groups, device=logits.device)
            state = self.state if s.groups == 1 else self.state.each(lambda x, at=at: x[at])
            penalty = None if counts is None else counts * s.diversity
            state, parent, over = advance(state, parts[:, k], penalty, s)
            if s.groups > 1:
                self.state = self.state.each(lambda x, y, at=at: x.index_copy(0, at, y), state)
                now = state.ids.gather(
                    2, (state.count - 1)[:, None, None].expand(-1, state.ids.shape[1], 1)
                )[..., 0]
                counts = (
                    torch.zeros(g, logits.shape[-1], device=logits.device)
                    if counts is None
                    else counts
                )
                counts = counts.scatter_add(1, now, torch.ones_like(now, dtype=counts.dtype))
            else:
                self.state = state
            parents.append(parent + k * (s.beams // s.groups))
            ends.append(over)
        over = torch.stack(ends).all(0).tolist()
        rows = (
            torch.arange(g, device=logits.device)[:, None] * s.beams + torch.cat(parents, 1)
        ).view(-1)
        if not torch.equal(rows, torch.arange(len(rows), device=rows.device)):
            self.cache = self.cache.take(rows)
        for i in range(g):
            self.closed[i] = self.closed[i] or over[i] or broken[i]
        self.broken = broken
        return []

    def results(self, i: int) -> list[Result]:
        """The n best finished texts of request i."""
        s = self.settings
        if self.broken[i]:
            return [
                Result([], [], 0.0, "error", error="the model gave a logit that is not a number")
            ]
        found = []
        for row in range(i * s.groups, (i + 1) * s.groups):
            for j in range(s.beams // s.groups):
                if not bool(self.state.done[row, j]):
                    continue
                size = int(self.state.done_size[row, j])
                ids = self.state.done_ids[row, j, :size].tolist()
                logp = self.state.done_logp[row, j, :size].tolist()
                ends = bool(ids) and ids[-1] in s.eos
                kept = ids[:-1] if ends else ids
                score = float(self.state.done_score[row, j])
                found.append(Result(kept, logp[: len(kept)], score, "eos" if ends else "length"))
        found.sort(key=lambda r: -r.score)
        return found[: s.n_best]

    def keep(self, index: list[int]) -> None:
        """Only these requests go on."""
        if len(index) == len(self.requests_):
            return
        s, device = self.settings, self.cache.device
        at = torch.tensor(index, dtype=torch.long, device=device)
        rows = (at[:, None] * s.beams + torch.arange(s.beams, device=device)).view(-1)
        self.cache = self.cache.take(rows)
        part = (at[:, None] * s.groups + torch.arange(s.groups, device=device)).view(-1)
        self.state = self.state.each(lambda x: x[part])
        self.requests_ = [self.requests_[i] for i in index]
        self.closed = [self.closed[i] for i in index]

    def join(self, other: BeamLane) -> None:
        self.cache = self.cache.join(other.cache)
        self.state = self.state.each(lambda a, b: torch.cat([a, b]), other.state)
        self.requests_ += other.requests_
        self.closed += other.closed

    def open(self) -> list[int]:
        return [i for i, closed in enumerate(self.closed) if not closed]

    def requests(self) -> list[Request]:
        return self.requests_


def advance(
    b: Beams, logits: Tensor, penalty: Tensor | None, s: Any
) -> tuple[Beams, Tensor, Tensor]:
    """One step of g groups from logits (g w V): the new state, each new beam's parent (g w), and which groups are done."""
    g, w, v = logits.shape
    k = min(max(2, 1 + len(s.eos)) * w, v)
    logp, token = best_tokens(logits, penalty, b.count, s, k)  # g w k
    total = (b.score[:, :, None] + logp).view(g, -1)
    value, index = total.topk(min(k, total.shape[1]))  # g k
    parent, token = index // logp.shape[2], token.view(g, -1).gather(1, index)
    plain = logp.reshape(g, -1).gather(1, index)
    texts = _append(b.ids, parent, token, b.count)
    logps = _append(b.logp, parent, plain, b.count)
    count = b.count + 1
    ends = (
        torch.isin(token, torch.tensor(s.eos, device=token.device))
        if s.eos
        else torch.zeros_like(token).bool()
    )
    ends = ends | (count >= s.max_new_tokens)[:, None]
    b = _file(b, texts, logps, value, ends, count, s)
    running, order = (value + ends * WORST).topk(w)
    wide = order[..., None].expand(-1, -1, texts.shape[-1])
    length = (
        s.max_new_tokens if s.early_stopping == "never" and s.length_penalty > 0 else count[:, None]
    )
    bound = running[:, :1] / length**s.length_penalty
    worst = torch.where(b.done, b.done_score.amin(1, keepdim=True), WORST)
    improvable = b.improvable & (bound > worst).any(-1)
    full = b.done.all(-1) & (s.early_stopping == "first")
    over = ~improvable | full | ends.all(-1)
    new = Beams(
        running,
        texts.gather(1, wide),
        logps.gather(1, wide),
        b.done_score,
        b.done_ids,
        b.done_logp,
        b.done_size,
        b.done,
        improvable,
        count,
    )
    return new, parent.gather(1, order), over


def best_tokens(
    logits: Tensor, penalty: Tensor | None, count: Tensor, s: Any, k: int
) -> tuple[Tensor, Tensor]:
    """The k best tokens of every beam and their log probabilities (g w k), after bans and forced tokens."""
    norm = logits.logsumexp(-1, keepdim=True)
    if s.banned or s.logit_bias or penalty is not None:
        logits = logits.clone()
        for id_, bias in s.logit_bias:
            logits[..., id_] += bias
        logits[..., list(s.banned)] = -torch.inf
        logits = logits if penalty is None else logits - penalty[:, None]
    early = (count < s.min_new_tokens) if s.eos and s.min_new_tokens else None
    if early is not None and bool(early.any()):
        eos = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        eos[list(s.eos)] = True
        logits = logits.masked_fill(early[:, None, None] & eos, -torch.inf)
    for i, n in (
        enumerate(count.tolist()) if s.forced_first is not None or s.forced_last is not None else ()
    ):
        must = forced(s, n)
        if must is not None:
            logits = logits.clone()
            logits[i] = -torch.inf
            logits[i, :, must] = norm[i, :, 0]
    top, token = logits.topk(k)
    return top - norm, token


def _file(
    b: Beams, texts: Tensor, logps: Tensor, value: Tensor, ends: Tensor, count: Tensor, s: Any
) -> Beams:
    """Merge the texts that just ended (among the first w) into the best finished ones."""
    w = b.score.shape[1]
    new = ends & (torch.arange(ends.shape[1], device=ends.device) < w)
    shut = ~b.improvable | (b.done.all(-1) & (s.early_stopping == "first"))
    score = value / (count[:, None].to(value.dtype) ** s.length_penalty)
    score = score + WORST * (~new).to(score.dtype) + WORST * shut[:, None].to(score.dtype)
    best, at = torch.cat([b.done_score, score], 1).topk(w)
    wide = at[..., None].expand(-1, -1, texts.shape[-1])
    size = torch.cat([b.done_size, count[:, None].expand_as(ends)], 1)
    return Beams(
        b.score,
        b.ids,
        b.logp,
        best,
        torch.cat([b.done_ids, texts], 1).gather(1, wide),
        torch.cat([b.done_logp, logps], 1).gather(1, wide),
        size.gather(1, at),
        torch.cat([b.done, new], 1).gather(1, at),
        b.improvable,
        b.count,
    )


def _append(texts: Tensor, parent: Tensor, new: Tensor, count: Tensor) -> Tensor:
    """texts (g w T) of the parents (g k), with `new` (g k) at place `count`: (g k T)."""
    grown = texts.gather(1, parent[..., None].expand(-1, -1, texts.shape[-1]))
    at = count[:, None, None].expand(-1, parent.shape[1], 1)
    return grown.scatter(2, at, new[..., None].to(grown.dtype))
