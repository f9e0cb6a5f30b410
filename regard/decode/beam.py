"""Beam search for many requests at once: a lane of groups of rows, each group the beams of one request.

A group holds `beams` running texts and the best `beams` finished ones. Each step takes the best continuations over all
running texts, files those that end, and goes on with the rest. A finished text scores
log probability / length ** penalty. A group is done when its finished texts cannot be beaten: by the bound that
`early_stopping` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.cache import Cache
from regard.decode.columns import PENALTIES, counts, forced, held
from regard.decode.rows import BROKEN
from regard.decode.sampling import repeat
from regard.decode.settings import Event, Request, Result, Settings
from regard.kernels.c.rows import choose

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

    @staticmethod
    def start(groups: int, width: int, size: int, device: torch.device) -> Beams:
        """Only the first beam counts at first, or all would say the same."""
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


@dataclass
class Rules:
    """The settings of g requests as columns (g 1); and what they say of single tokens (g V), where any does."""

    each: list[Settings]
    most: Tensor
    length_penalty: Tensor
    first: Tensor  # done when as many texts are finished as there are beams
    hopeful: Tensor  # the bound takes running texts to reach their full length
    diversity: Tensor
    eos: Tensor  # g e, filled up with -1
    bias: Tensor | None  # bans too
    seen: Tensor | None  # how often the prompt has each token, where some penalty asks
    penalties: list[Tensor]  # repetition, presence, frequency (g 1 1)

    @staticmethod
    def of(requests: list[Request], like: Tensor) -> Rules:
        """Like logits (... V)."""
        each, vocab, device = [r.settings for r in requests], like.shape[-1], like.device

        def column(values: Iterable[Any]) -> Tensor:
            return torch.tensor(list(values), device=device)[:, None]

        longest = max(len(s.eos) for s in each)
        eos = [[*s.eos, *[-1] * (longest - len(s.eos))] for s in each]
        bias = seen = None
        if any(s.logit_bias or s.banned for s in each):
            bias = torch.zeros(len(each), vocab, device=device)
            for i, s in enumerate(each):
                for token, value in s.logit_bias:
                    bias[i, token] += value
                bias[i, list(s.banned)] = -torch.inf
        if any(getattr(s, name) != idle for s in each for name, idle in PENALTIES.items()):
            seen = counts([r.ids for r in requests], torch.zeros(len(each), vocab, device=device))
        return Rules(
            each,
            column(s.max_new_tokens for s in each),
            column(s.length_penalty for s in each),
            column(s.early_stopping == "first" for s in each),
            column(s.early_stopping == "never" and s.length_penalty > 0 for s in each),
            column(s.diversity for s in each),
            torch.tensor(eos, dtype=torch.long, device=device).view(len(each), longest),
            bias,
            seen,
            [column(getattr(s, name) for s in each)[:, None] for name in PENALTIES],
        )

    def score(self, total: Tensor, length: Tensor) -> Tensor:
        """Log probabilities (g k) of texts of some length (g 1), with the length penalty."""
        return total / length.to(total.dtype) ** self.length_penalty


class BeamLane:
    """Requests with as many beams, groups and candidates, each by its own settings, over one cache."""

    def __init__(self, cache: Cache, requests: list[Request]):
        self.cache, self.requests_ = cache, requests
        s = requests[0].settings
        self.beams, self.groups = s.beams, s.groups
        size = min(max(r.settings.max_new_tokens for r in requests), ROOM)
        n = len(requests) * s.groups
        self.state = Beams.start(n, s.beams // s.groups, size, cache.device)
        self.rules: Rules | None = None  # made anew when requests come or go
        self.closed = [False] * len(requests)
        self.broken = [False] * len(requests)
        self.made = 0  # tokens of the longest text

    def step(self, model: Any, backend: str) -> list[Event]:
        ids = self.state.last.view(-1, 1)
        return self.choose(model.next_logits(ids, cache=self.cache, backend=backend))

    def choose(self, logits: Tensor) -> list[Event]:
        """Advance every group by logits (rows V); then put the cache's rows in the new order."""
        g, logits = len(self.requests_), logits.float()
        if self.rules is None:
            self.rules = Rules.of(self.requests_, logits)
        if self.made == self.state.ids.shape[-1]:
            self.state = self.state.roomy(min(2 * self.made, int(self.rules.most.max())))
        self.made += 1
        best = Best.of(logits, self.state, self.rules)
        bad = ~best.norm.isfinite()
        self.broken = bad.view(g, -1).any(-1).tolist()
        if any(self.broken):
            logits = logits.masked_fill(bad[:, None], 0.0)
            best = Best.of(logits, self.state, self.rules)
        shape = (g, self.groups, self.beams // self.groups, -1)
        parents, over = self._advance(logits.view(shape), best, self.rules)
        rows = (torch.arange(g, device=logits.device)[:, None] * self.beams + parents).view(-1)
        if not torch.equal(rows, torch.arange(len(rows), device=rows.device)):
            self.cache = self.cache.take(rows, min(len(r.ids) for r in self.requests_))
        ends = over.tolist()
        self.closed = [ends[i] or self.broken[i] for i in range(g)]
        return []

    def _advance(self, logits: Tensor, best: Best, rules: Rules) -> tuple[Tensor, Tensor]:
        """All groups of beams one after the other, as a later one avoids what the earlier ones just said. logits
        (g groups w V) -> the parent of every beam (g beams) within its request, and which requests are done (g)."""
        g, groups, w, v = logits.shape
        if groups == 1:
            self.state, parents, over = advance(self.state, logits[:, 0], best, None, rules)
            return parents, over
        said, norm = torch.zeros(g, v, device=logits.device), best.norm.view(g, groups, -1)
        found, ends = [], []
        for k in range(groups):
            at = torch.arange(k, g * groups, groups, device=logits.device)
            part = self.state.each(lambda x, at=at: x[at])
            mine = Best(norm[:, k].flatten())
            part, parents, over = advance(part, logits[:, k], mine, said * rules.diversity, rules)
            self.state = self.state.each(lambda x, y, at=at: x.index_copy(0, at, y), part)
            said = said.scatter_add(1, part.last, torch.ones_like(part.score))
            found.append(parents + k * w)
            ends.append(over)
        return torch.cat(found, 1), torch.stack(ends).all(0)

    def results(self, i: int, why: str = "") -> list[Result]:
        """The n best finished texts of request i; if it was stopped (`why`), running ones too."""
        s, b, found = self.requests_[i].settings, self.state, []
        if self.broken[i]:
            return [Result([], [], 0.0, "error", error=BROKEN) for _ in range(s.n_best)]
        for row in range(i * s.groups, (i + 1) * s.groups):
            size = int(b.count[row])
            for j in range(s.beams // s.groups):
                if bool(b.done[row, j]):
                    found.append(self._result(row, j, int(b.done_size[row, j]), s))
                if why and float(b.score[row, j]) > WORST / 2:
                    score = float(b.score[row, j]) / size**s.length_penalty
                    ids, logp = b.ids[row, j, :size].tolist(), b.logp[row, j, :size].tolist()
                    found.append(Result(ids, logp, score, why))
        found.sort(key=lambda r: -r.score)
        return found[: s.n_best]

    def _result(self, row: int, j: int, size: int, s: Settings) -> Result:
        ids = self.state.done_ids[row, j, :size].tolist()
        logp = self.state.done_logp[row, j, :size].tolist()
        ends = bool(ids) and ids[-1] in s.eos
        kept = ids[:-1] if ends else ids
        score = float(self.state.done_score[row, j])
        return Result(kept, logp[: len(kept)], score, "eos" if ends else "length")

    def drop(self, index: list[int]) -> None:
        """These requests are over."""
        gone = set(index)
        kept = [i for i in range(len(self.requests_)) if i not in gone]
        device = self.cache.device
        at = torch.tensor(kept, dtype=torch.long, device=device)
        rows = (at[:, None] * self.beams + torch.arange(self.beams, device=device)).view(-1)
        self.cache = self.cache.take(rows)
        part = (at[:, None] * self.groups + torch.arange(self.groups, device=device)).view(-1)
        self.state, self.rules = self.state.each(lambda x: x[part]), None
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
        self.made, self.rules = max(self.made, other.made), None

    def over(self) -> list[int]:
        """The places of requests that are done."""
        return [i for i, closed in enumerate(self.closed) if closed]

    @property
    def batch(self) -> int:
        return self.cache.batch

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
    def of(logits: Tensor, b: Beams, rules: Rules) -> Best:
        s, each = rules.each[0], rules.each
        changed = s.groups > 1 or rules.seen is not None
        changed = changed or any(x.logit_bias or x.banned != s.banned for x in each)
        if changed or any(map(held, each, b.count.tolist(), b.count.tolist())):
            return Best(choose(logits, 1)[0])
        free = logits.shape[1] - len(s.banned)
        return Best(*choose(logits, min(candidates(s), free), s.banned))


def candidates(s: Settings) -> int:
    """Of each running text: should every end token be among them, enough are left to go on."""
    return max(2, 1 + len(s.eos)) * (s.beams // s.groups)


def advance(
    b: Beams, logits: Tensor, best: Best, penalty: Tensor | None, rules: Rules
) -> tuple[Beams, Tensor, Tensor]:
    """One step of g groups from logits (g w V): the new state, each new beam's parent (g w), and which groups are
    done."""
    g, w, v = logits.shape
    k, norm = candidates(rules.each[0]), best.norm.view(g, w, 1)
    if best.top is not None and best.token is not None:
        token = best.token.view(g, w, -1)
        score = logp = best.top.view(g, w, -1) - norm
    else:
        changed = changed_scores(logits, norm, penalty, b, rules)
        score, token = changed.topk(min(k, v))  # g w k
        logp = logits.gather(-1, token) - norm
    total = (b.score[:, :, None] + score).view(g, -1)
    value, index = total.topk(min(k, total.shape[1]))  # g k
    parent, token = index // score.shape[2], token.view(g, -1).gather(1, index)
    texts = _append(b.ids, parent, token, b.count)
    logps = _append(b.logp, parent, logp.view(g, -1).gather(1, index), b.count)
    count = b.count + 1
    ends = (token[..., None] == rules.eos[:, None]).any(-1) | (count[:, None] >= rules.most)
    b = _file(b, texts, logps, value, ends, count, rules)
    running, order = (value + ends * WORST).topk(w)
    wide = order[..., None].expand(-1, -1, texts.shape[-1])
    bound = rules.score(running[:, :1], torch.where(rules.hopeful, rules.most, count[:, None]))
    worst = torch.where(b.done, b.done_score.amin(1, keepdim=True), WORST)
    improvable = b.improvable & (bound > worst).any(-1)
    full = b.done.all(-1) & rules.first[:, 0]
    over = ~improvable | full | ends.all(-1)
    going = {"score": running, "ids": texts.gather(1, wide), "logp": logps.gather(1, wide)}
    new = replace(b, **going, improvable=improvable, count=count)
    return new, parent.gather(1, order), over


def changed_scores(
    logits: Tensor, norm: Tensor, penalty: Tensor | None, b: Beams, rules: Rules
) -> Tensor:
    """Log probabilities (g w V) after bias, bans, penalties and forced tokens."""
    score = logits - norm
    if rules.bias is not None:
        score = score + rules.bias[:, None]
    if rules.seen is not None:
        score = _penalised(score, b, rules.seen, *rules.penalties)
    if penalty is not None:
        score = score - penalty[:, None]
    for i, (s, n) in enumerate(zip(rules.each, b.count.tolist(), strict=True)):
        if n < s.min_new_tokens:
            score[i, :, list(s.eos)] = -torch.inf
        must = forced(s, n)
        if must is not None:
            score[i], score[i, :, must] = -torch.inf, 0.0
    return score


def _penalised(
    score: Tensor, b: Beams, seen: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Scores (g w V) with penalties (g 1 1), by what each beam says and its prompt (g V)."""
    real = torch.arange(b.ids.shape[-1], device=score.device) < b.count[:, None, None]
    said = torch.zeros_like(score).scatter_add(2, b.ids, real.expand_as(b.ids).to(score.dtype))
    score = repeat(score, said + seen[:, None], repetition)
    return score - presence * (said > 0) - frequency * said


def _file(
    b: Beams,
    texts: Tensor,
    logps: Tensor,
    value: Tensor,
    ends: Tensor,
    count: Tensor,
    rules: Rules,
) -> Beams:
    """Merge the texts that just ended (among the first w) into the best finished ones."""
    w = b.score.shape[1]
    new = ends & (torch.arange(ends.shape[1], device=ends.device) < w) & (value > WORST / 2)
    shut = ~b.improvable | (b.done.all(-1) & rules.first[:, 0])
    score = rules.score(value, count[:, None])
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
