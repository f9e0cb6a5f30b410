"""Beam search for many requests at once: a lane of groups of rows, each group the beams of one request.

A group holds `beams` running texts and the best `beams` finished ones. Each step takes the best continuations over all
running texts, files those that end, and goes on with the rest. A finished text scores
log probability / length ** penalty. A group is done when its finished texts cannot be beaten: by the bound that
`early_stopping` chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.cache import Cache
from regard.decode.sample import BROKEN, constrained, forced
from regard.decode.sampling import repeat
from regard.decode.settings import Event, Request, Result, Settings
from regard.kernels.native_rows import choose

WORST = -1.0e9
ROOM = 32  # places for tokens at first; they double as texts grow


@dataclass
class Beams:
    """The state of g groups of w beams; texts have room for T tokens. All tensors have g rows."""

    score: Tensor  # g w: log probability of the running texts, with bias and penalties
    ids: Tensor  # g w T
    logp: Tensor  # g w T: the model's, of each token
    done_score: Tensor  # g w, with length penalty; WORST where empty
    done_ids: Tensor
    done_logp: Tensor
    done_size: Tensor  # g w: tokens of the finished text, its end included
    done: Tensor  # g w bool
    improvable: Tensor  # g bool
    count: Tensor  # g: tokens produced so far
    seen: Tensor  # g V: how often the prompt has each token; g 0 where no penalty asks

    @staticmethod
    def start(groups: int, width: int, size: int, seen: Tensor) -> Beams:
        """Only the first beam counts at first, or all would say the same."""
        device = seen.device
        score = torch.full((groups, width), WORST, device=device)
        score[:, 0] = 0.0
        ids = torch.zeros(groups, width, size, dtype=torch.long, device=device)
        logp = torch.zeros(groups, width, size, device=device)
        return Beams(
            score,
            ids,
            logp,
            torch.full_like(score, WORST),
            ids.clone(),
            logp.clone(),
            torch.zeros(groups, width, dtype=torch.long, device=device),
            torch.zeros(groups, width, dtype=torch.bool, device=device),
            torch.ones(groups, dtype=torch.bool, device=device),
            torch.zeros(groups, dtype=torch.long, device=device),
            seen,
        )

    def each(self, f: Any, *others: Beams) -> Beams:
        names = self.__dataclass_fields__
        return Beams(*(f(*(getattr(b, n) for b in (self, *others))) for n in names))

    def roomy(self, size: int) -> Beams:
        """With room for `size` tokens in every text."""
        more = size - self.ids.shape[-1]
        return self.each(lambda x: F.pad(x, (0, more)) if x.dim() == 3 and more > 0 else x)

    @property
    def last(self) -> Tensor:
        """The newest token of every beam (g w)."""
        at = (self.count - 1)[:, None, None].expand(-1, self.ids.shape[1], 1)
        return self.ids.gather(2, at)[..., 0]


class BeamLane:
    """Requests with the same settings, `settings.rows` rows each, over one cache."""

    def __init__(self, cache: Cache, requests: list[Request], vocab: int):
        self.cache, self.requests_ = cache, requests
        self.settings = s = requests[0].settings
        penalised = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) != (1, 0, 0)
        seen = torch.zeros(len(requests), vocab if penalised else 0, device=cache.device)
        for i, request in enumerate(requests if penalised else ()):
            seen[i] = torch.bincount(torch.tensor(request.ids), minlength=vocab)
        n, size = len(requests) * s.groups, min(s.max_new_tokens, ROOM)
        self.state = Beams.start(n, s.beams // s.groups, size, seen.repeat_interleave(s.groups, 0))
        self.closed = [False] * len(requests)
        self.broken = [False] * len(requests)
        self.made = 0  # tokens of the longest text

    def step(self, model: Any, backend: str) -> list[Event]:
        ids = self.state.last.view(-1, 1)
        return self.choose(model.next_logits(ids, cache=self.cache, backend=backend))

    def choose(self, logits: Tensor) -> list[Event]:
        """Advance every group by logits (rows V); then put the cache's rows in the new order."""
        s, g = self.settings, len(self.requests_)
        if self.made == self.state.ids.shape[-1]:
            self.state = self.state.roomy(min(2 * self.made, s.max_new_tokens))
        self.made += 1
        logits = logits.float()
        best = Best.of(logits, self.state, s)
        bad = ~best.norm.isfinite()
        self.broken = bad.view(g, -1).any(-1).tolist()
        if any(self.broken):
            logits = logits.masked_fill(bad[:, None], 0.0)
            best = Best.of(logits, self.state, s)
        shape = (g, s.groups, s.beams // s.groups, -1)
        parents, over = self._advance(logits.view(shape), best)
        rows = (torch.arange(g, device=logits.device)[:, None] * s.beams + parents).view(-1)
        if not torch.equal(rows, torch.arange(len(rows), device=rows.device)):
            self.cache = self.cache.take(rows, min(len(r.ids) for r in self.requests_))
        ends = over.tolist()
        self.closed = [ends[i] or self.broken[i] for i in range(g)]
        return []

    def _advance(self, logits: Tensor, best: Best) -> tuple[Tensor, Tensor]:
        """All groups of beams one after the other, as a later one avoids what the earlier ones just said. logits
        (g groups w V) -> the parent of every beam (g beams) within its request, and which requests are done (g)."""
        s, (g, groups, w, v) = self.settings, logits.shape
        if groups == 1:
            self.state, parents, over = advance(self.state, logits[:, 0], best, None, s)
            return parents, over
        said, norm = torch.zeros(g, v, device=logits.device), best.norm.view(g, groups, -1)
        found, ends = [], []
        for k in range(groups):
            at = torch.arange(k, g * groups, groups, device=logits.device)
            part = self.state.each(lambda x, at=at: x[at])
            mine = Best(norm[:, k].flatten())
            part, parents, over = advance(part, logits[:, k], mine, said * s.diversity, s)
            self.state = self.state.each(lambda x, y, at=at: x.index_copy(0, at, y), part)
            said = said.scatter_add(1, part.last, torch.ones_like(part.score))
            found.append(parents + k * w)
            ends.append(over)
        return torch.cat(found, 1), torch.stack(ends).all(0)

    def results(self, i: int, why: str = "") -> list[Result]:
        """The n best finished texts of request i; if it was stopped (`why`), running ones too."""
        s, b, found = self.settings, self.state, []
        if self.broken[i]:
            return [Result([], [], 0.0, "error", error=BROKEN) for _ in range(s.n_best)]
        for row in range(i * s.groups, (i + 1) * s.groups):
            size = int(b.count[row])
            for j in range(s.beams // s.groups):
                if bool(b.done[row, j]):
                    found.append(self._result(row, j, int(b.done_size[row, j])))
                if why and float(b.score[row, j]) > WORST / 2:
                    score = float(b.score[row, j]) / size**s.length_penalty
                    ids, logp = b.ids[row, j, :size].tolist(), b.logp[row, j, :size].tolist()
                    found.append(Result(ids, logp, score, why))
        found.sort(key=lambda r: -r.score)
        return found[: s.n_best]

    def _result(self, row: int, j: int, size: int) -> Result:
        ids = self.state.done_ids[row, j, :size].tolist()
        logp = self.state.done_logp[row, j, :size].tolist()
        ends = bool(ids) and ids[-1] in self.settings.eos
        kept = ids[:-1] if ends else ids
        score = float(self.state.done_score[row, j])
        return Result(kept, logp[: len(kept)], score, "eos" if ends else "length")

    def drop(self, index: list[int]) -> None:
        """These requests are over."""
        gone = set(index)
        kept = [i for i in range(len(self.requests_)) if i not in gone]
        s, device = self.settings, self.cache.device
        at = torch.tensor(kept, dtype=torch.long, device=device)
        rows = (at[:, None] * s.beams + torch.arange(s.beams, device=device)).view(-1)
        self.cache = self.cache.take(rows)
        part = (at[:, None] * s.groups + torch.arange(s.groups, device=device)).view(-1)
        self.state = self.state.each(lambda x: x[part])
        self.requests_ = [self.requests_[i] for i in kept]
        self.closed = [self.closed[i] for i in kept]
        self.broken = [self.broken[i] for i in kept]

    def join(self, other: BeamLane) -> None:
        self.cache = self.cache.join(other.cache)
        size = max(self.state.ids.shape[-1], other.state.ids.shape[-1])
        self.state = self.state.roomy(size).each(
            lambda a, b: torch.cat([a, b]), other.state.roomy(size)
        )
        self.requests_ += other.requests_
        self.closed += other.closed
        self.broken += other.broken
        self.made = max(self.made, other.made)

    def over(self) -> list[int]:
        """The places of requests that are done."""
        return [i for i, closed in enumerate(self.closed) if closed]

    def requests(self) -> list[Request]:
        return self.requests_


@dataclass
class Best:
    """The log sum exp of every row's logits (r); and, where nothing changes them but bans, the largest ones and their
    tokens (r k)."""

    norm: Tensor
    top: Tensor | None = None
    token: Tensor | None = None

    @staticmethod
    def of(logits: Tensor, b: Beams, s: Settings) -> Best:
        changes = s.logit_bias or b.seen.shape[1] or s.groups > 1
        if changes or any(constrained(s, n) for n in b.count.tolist()):
            return Best(choose(logits, 1)[0])
        free = logits.shape[1] - len(s.banned)
        return Best(*choose(logits, min(candidates(s), free), s.banned))


def candidates(s: Settings) -> int:
    """Of each running text: should every end token be among them, enough are left to go on."""
    return max(2, 1 + len(s.eos)) * (s.beams // s.groups)


def advance(
    b: Beams, logits: Tensor, best: Best, penalty: Tensor | None, s: Settings
) -> tuple[Beams, Tensor, Tensor]:
    """One step of g groups from logits (g w V): the new state, each new beam's parent (g w), and which groups are
    done."""
    g, w, v = logits.shape
    k, norm = candidates(s), best.norm.view(g, w, 1)
    if best.top is not None and best.token is not None:
        token = best.token.view(g, w, -1)
        score = logp = best.top.view(g, w, -1) - norm
    else:
        changed = changed_scores(logits, norm, penalty, b, s)
        score, token = changed.topk(min(k, v))  # g w k
        logp = logits.gather(-1, token) - norm
    total = (b.score[:, :, None] + score).view(g, -1)
    value, index = total.topk(min(k, total.shape[1]))  # g k
    parent, token = index // score.shape[2], token.view(g, -1).gather(1, index)
    texts = _append(b.ids, parent, token, b.count)
    logps = _append(b.logp, parent, logp.view(g, -1).gather(1, index), b.count)
    count = b.count + 1
    ends = torch.isin(token, torch.tensor(s.eos, dtype=token.dtype, device=token.device))
    ends = ends | (count >= s.max_new_tokens)[:, None]
    b = _file(b, texts, logps, value, ends, count, s)
    running, order = (value + ends * WORST).topk(w)
    wide = order[..., None].expand(-1, -1, texts.shape[-1])
    hopeful = s.early_stopping == "never" and s.length_penalty > 0
    length = s.max_new_tokens if hopeful else count[:, None]
    bound = running[:, :1] / length**s.length_penalty
    worst = torch.where(b.done, b.done_score.amin(1, keepdim=True), WORST)
    improvable = b.improvable & (bound > worst).any(-1)
    full = b.done.all(-1) & (s.early_stopping == "first")
    over = ~improvable | full | ends.all(-1)
    going = {"score": running, "ids": texts.gather(1, wide), "logp": logps.gather(1, wide)}
    new = replace(b, **going, improvable=improvable, count=count)
    return new, parent.gather(1, order), over


def changed_scores(
    logits: Tensor, norm: Tensor, penalty: Tensor | None, b: Beams, s: Settings
) -> Tensor:
    """Log probabilities (g w V) after bias, bans, penalties and forced tokens."""
    score = logits - norm
    for id_, bias in s.logit_bias:
        score[..., id_] += bias
    score[..., list(s.banned)] = -torch.inf
    if b.seen.shape[1]:
        score = _penalised(score, b, s)
    if penalty is not None:
        score = score - penalty[:, None]
    for i, n in enumerate(b.count.tolist()):
        if n < s.min_new_tokens:
            score[i, :, list(s.eos)] = -torch.inf
        must = forced(s, n)
        if must is not None:
            score[i], score[i, :, must] = -torch.inf, 0.0
    return score


def _penalised(score: Tensor, b: Beams, s: Settings) -> Tensor:
    """Repetition, presence and frequency penalties: scores (g w V) by what each beam and its prompt say."""
    real = torch.arange(b.ids.shape[-1], device=score.device) < b.count[:, None, None]
    said = torch.zeros_like(score).scatter_add(2, b.ids, real.expand_as(b.ids).to(score.dtype))
    score = repeat(score, said + b.seen[:, None], s.repetition_penalty)
    return score - s.presence_penalty * (said > 0) - s.frequency_penalty * said


def _file(
    b: Beams, texts: Tensor, logps: Tensor, value: Tensor, ends: Tensor, count: Tensor, s: Settings
) -> Beams:
    """Merge the texts that just ended (among the first w) into the best finished ones."""
    w = b.score.shape[1]
    new = ends & (torch.arange(ends.shape[1], device=ends.device) < w) & (value > WORST / 2)
    shut = ~b.improvable | (b.done.all(-1) & (s.early_stopping == "first"))
    score = value / (count[:, None].to(value.dtype) ** s.length_penalty)
    score = score + WORST * (~new).to(score.dtype) + WORST * shut[:, None].to(score.dtype)
    best, at = torch.cat([b.done_score, score], 1).topk(w)
    wide = at[..., None].expand(-1, -1, texts.shape[-1])
    size = torch.cat([b.done_size, count[:, None].expand_as(ends)], 1)
    return replace(
        b,
        done_score=best,
        done_ids=torch.cat([b.done_ids, texts], 1).gather(1, wide),
        done_logp=torch.cat([b.done_logp, logps], 1).gather(1, wide),
        done_size=size.gather(1, at),
        done=torch.cat([b.done, new], 1).gather(1, at),
    )


def _append(texts: Tensor, parent: Tensor, new: Tensor, count: Tensor) -> Tensor:
    """texts (g w T) of the parents (g k), with `new` (g k) at place `count`: (g k T)."""
    grown = texts.gather(1, parent[..., None].expand(-1, -1, texts.shape[-1]))
    at = count[:, None, None].expand(-1, parent.shape[1], 1)
    return grown.scatter(2, at, new[..., None].to(grown.dtype))
