"""Beam search for many requests at once: among the rows of a batch each request has a group of them, its beams.

A group holds `beams` running texts and the best `beams` finished ones. Each step takes the best continuations over all
running texts, files those that end, and goes on with the rest. A finished text scores
log probability / length ** penalty. A group is done when its finished texts cannot be beaten: by the bound that
`early_stopping` chooses. A step is tensors of fixed shape, for every runner: `select`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.cache import BlockTable
from regard.decode.sampling import RENORMALIZE, RULES, SamplingTensors, adjusted, ruled, used_by
from regard.decode.sequence import BROKEN, Slot, State
from regard.decode.settings import Request, Result, Settings
from regard.kernels.c.rows import lse_and_topk
from regard.kernels.triton.sample import largest

WORST = -1.0e9
ROOM = 32  # places for tokens at first, chosen for speed; they double as texts grow


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
        done = torch.zeros_like(score, dtype=torch.bool)
        finished = (torch.full_like(score, WORST), ids.clone(), logp.clone(), done.long(), done)
        count = torch.zeros(groups, dtype=torch.long, device=device)
        return Beams(score, ids, logp, *finished, count == 0, count)

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f.name) for f in fields(self)]

    def each(self, f: Any, *others: Beams) -> Beams:
        return Beams(*map(f, self.tensors(), *(b.tensors() for b in others)))

    def roomy(self, size: int) -> Beams:
        """With room for `size` tokens in every text."""
        more = size - self.ids.shape[-1]
        return self.each(lambda x: F.pad(x, (0, more)) if x.dim() == 3 and more > 0 else x)

    @property
    def last(self) -> Tensor:
        """The newest token of every beam (g w)."""
        at = (self.count - 1).clamp(max=self.ids.shape[-1] - 1)[:, None, None]
        at = at.expand(-1, self.ids.shape[1], 1)
        return self.ids.gather(2, at)[..., 0]


@dataclass
class Rules:
    """What the settings of g requests say of their search, as columns (g 1)."""

    most: Tensor
    length_penalty: Tensor
    first: Tensor  # done when as many texts are finished as there are beams
    hopeful: Tensor  # the bound takes running texts to reach their full length
    eos: Tensor  # g e, filled up with -1

    @staticmethod
    def of(requests: Sequence[Request], ends: int) -> Rules:
        """On the host; with room for so many end tokens."""
        each = [r.settings for r in requests]
        columns = [
            [s.max_new_tokens for s in each],
            [s.length_penalty for s in each],
            [s.early_stopping == "first" for s in each],
            [s.early_stopping == "never" and s.length_penalty > 0 for s in each],
        ]
        eos = [[*s.eos, *[-1] * (ends - len(s.eos))] for s in each]
        most, penalty, first, hopeful = (torch.tensor(x)[:, None] for x in columns)
        return Rules(most, penalty, first, hopeful, torch.tensor(eos))

    def each(self, f: Any) -> Rules:
        return Rules(*(f(getattr(self, x.name)) for x in fields(self)))

    def score(self, total: Tensor, length: Tensor) -> Tensor:
        """Log probabilities (g k) of texts of some length (g 1), with the length penalty."""
        return total / length.to(total.dtype) ** self.length_penalty


@dataclass(frozen=True)
class Shape:
    """What requests of one batch have in common: beams, and how many candidates they are chosen from: should every end
    token be among these, enough are left to go on."""

    beams: int
    candidates: int

    @staticmethod
    def of(s: Settings) -> Shape:
        return Shape(s.beams, max(2, 1 + len(s.eos)) * s.beams)

    @property
    def ends(self) -> int:
        """End tokens that there is room for."""
        return self.candidates // self.beams - 1


@dataclass(eq=False)
class Group(Slot):
    """A request and its place."""

    # Pages that each beam writes to, in a graph.
    own: list[BlockTable] = field(default_factory=list)
    found: Beams | None = None  # as of the last round that was read
    closed: bool = False

    @property
    def shape(self) -> Shape:
        return Shape.of(self.settings)

    @property
    def over(self) -> bool:
        return self.closed

    @property
    def slot_ids(self) -> list[int]:
        k = len(self.own)
        return list(range(self.index * k, (self.index + 1) * k))

    @property
    def left(self) -> int:
        return self.settings.max_new_tokens - self.scheduled

    def results(self, b: Beams, why: str = "") -> list[Result]:
        """The n best finished texts of this request, from its state (of one group). `why` it was stopped before its end
        (cancelled, deadline): then running ones count too, and finish by it."""
        s = self.settings
        if self.sequence.error is not None:
            return [Result([], [], 0.0, "error", error=BROKEN) for _ in range(s.n_best)]
        columns = (b.done, b.done_score, b.done_size, b.score, b.count[:, None].expand_as(b.score))
        found: list[tuple[float, int, int, bool]] = []  # score, place, tokens, whether it runs
        for i, row in enumerate(zip(*(x.flatten().tolist() for x in columns), strict=True)):
            done, done_score, size, score, count = row
            if done:
                found.append((done_score, i, size, False))
            if why and count and score > WORST / 2:
                found.append((score / count**s.length_penalty, i, count, True))
        out = []
        for score, i, size, runs in sorted(found, key=lambda x: -x[0])[: s.n_best]:
            texts = (b.ids, b.logp) if runs else (b.done_ids, b.done_logp)
            ids, logp = (x.flatten(0, 1)[i, :size].tolist() for x in texts)
            ends = not runs and bool(ids) and ids[-1] in s.eos
            finish = why if runs else "eos" if ends else "length"
            kept = ids[:-1] if ends else ids
            out.append(Result(kept, logp[: len(kept)], score, finish))
        # As in transformers: where fewer texts were possible, the rest are empty.
        out += [Result([], [], WORST, why or "stop") for _ in range(s.n_best - len(out))]
        return out


class Search:
    """The requests of one shape among the rows of a plain batch, each by its own settings."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.groups: list[Group] = []
        self.state: Beams
        # Whose rules and columns these are: they are made anew when requests come or go.
        self.known: list[Group] = []
        self.rules: Rules
        self.columns: SamplingTensors | None = None

    def begin(self, new: list[Group], logits: Tensor) -> None:
        """Requests whose prompts are through, by logits (rows V). Their beams have read the same, so that none takes
        another's place."""
        k = self.shape
        fresh = Beams.start(len(new), k.beams, ROOM, logits.device)
        fresh, _ = self._advance(new, fresh, *self.best(new, logits))
        if self.groups:
            size = self.state.ids.shape[-1]
            fresh = self.state.each(lambda a, b: torch.cat([a, b]), fresh.roomy(size))
        self.groups, self.state = self.groups + new, fresh

    def last(self) -> Tensor:
        """What every beam feeds next (rows)."""
        size = self.state.ids.shape[-1]
        if max(g.scheduled for g in self.groups) == size:
            self.state = self.state.roomy(2 * size)
        return self.state.last.flatten()

    def step(self, norm: Tensor, logits: Tensor, token: Tensor | None) -> Tensor:
        """By what `best` gives: the beam of its request (n beams) that each goes on from."""
        self.state, parents = self._advance(self.groups, self.state, norm, logits, token)
        return parents

    def _used(self, groups: list[Group]) -> frozenset[str]:
        """What changes the logits now."""
        each = (used_by(g.settings, g.scheduled, g.scheduled) for g in groups)
        return frozenset().union(*each)

    def banned(self, groups: list[Group]) -> tuple[tuple[int, ...], bool] | None:
        """What no text may say, and whether probabilities are of what is left, if nothing but this changes the logits:
        then the largest are enough."""
        each = [g.settings for g in groups]
        bans = {(tuple(sorted(set(s.banned))), s.renormalize_logits) for s in each}
        if len(bans) > 1 or any(s.logit_bias or s.sequence_bias for s in each):
            return None
        return None if self._used(groups) - {"bias", RENORMALIZE} else next(iter(bans))

    def best(self, groups: list[Group], logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The log sum exp of every row of logits (rows V), and its largest with their tokens, or all of them."""
        logits, banned = logits.float(), self.banned(groups)
        if banned is not None:
            many = min(self.shape.candidates, logits.shape[1] - len(banned[0]))
            return lse_and_topk(logits, many, *banned)
        if self.known != groups or self.columns is None:
            rows = [g.sequence for g in groups for _ in range(self.shape.beams)]
            self.columns = SamplingTensors(len(rows), logits.shape[1], logits.device)
            self.columns.put(range(len(rows)), rows)
        return lse_and_topk(logits, 1)[0], logits, None

    def _advance(
        self, groups: list[Group], state: Beams, norm: Tensor, logits: Tensor, token: Tensor | None
    ) -> tuple[Beams, Tensor]:
        """Groups by what `best` gives: their new state, and the parent of every beam."""
        if self.known != groups:
            rules = Rules.of([g.request for g in groups], self.shape.ends)
            self.known, self.rules = list(groups), rules.each(lambda x: x.to(norm.device))
        bad = ~norm.isfinite()
        broken = bad.view(len(groups), -1).any(-1).tolist()
        if any(broken):
            norm, logits = norm.masked_fill(bad, 0.0), logits.masked_fill(bad[:, None], 0.0)
        columns = {}
        if token is None and self.columns is not None:
            used = self._used(groups)
            columns = self.columns.at(slice(None), used)
            if RULES in used:
                said = [x for g in groups for x in self._said(g, state, groups)]
                columns[RULES] = ruled(said, torch.zeros_like(logits))
        state, parents, over = select(state, self.rules, self.shape, logits, norm, columns, token)
        for g, bad_one, end in zip(groups, broken, over.tolist(), strict=True):
            g.sequence.error = BROKEN if bad_one else None
            g.closed, g.scheduled = bad_one or end, g.scheduled + 1
        return state, parents

    def _said(
        self, group: Group, state: Beams, groups: list[Group]
    ) -> list[tuple[Request, list[int]]]:
        """The texts of a request's beams, in the order of their rows."""
        texts = state.ids[groups.index(group), :, : group.scheduled].tolist()
        return [(group.request, text) for text in texts]

    def results(self, group: Group, why: str) -> list[Result]:
        at = self.groups.index(group)
        return group.results(self.state.each(lambda x: x[at : at + 1]), why)

    def keep(self) -> None:
        """Without those that are gone."""
        kept = [i for i, group in enumerate(self.groups) if group.state is not State.FINISHED]
        at = torch.tensor(kept, dtype=torch.long)
        self.groups = [self.groups[i] for i in kept]
        self.state = self.state.each(lambda x: x[at.to(x.device)])


def select(
    b: Beams, rules: Rules, shape: Shape, logits: Tensor, norm: Tensor, columns: dict[str, Tensor],
    best: Tensor | None = None
) -> tuple[Beams, Tensor, Tensor]:  # fmt: skip
    """One step of n requests from logits (r V), whose log sum exp is `norm` (r), and the columns of what changes them,
    or from the largest logits alone (r k), of the tokens `best`: the new state, the parent of every beam (n beams)
    within its request, and which requests are done (n)."""
    n, w = b.score.shape
    scale, token = norm[:, None], best
    if "seen" in columns:
        # How often each running text has each token, (n w, V).
        real = torch.arange(b.ids.shape[-1], device=b.ids.device) < b.count[:, None, None]
        said = b.score.new_zeros(n, w, logits.shape[1])
        said = said.scatter_add(2, b.ids, real.expand_as(b.ids).to(said.dtype))
        columns = {**columns, "said": said.flatten(0, 1)}
    if token is not None:
        score = logp = logits - scale
    else:
        count = b.count.repeat_interleave(w)
        score = adjusted(logits.float() - scale, columns, count) if columns else logits
        score, token = largest(score, min(shape.candidates, score.shape[1]))
        logp = logits.gather(1, token).float() - scale
        score = score if columns else logp
        if RENORMALIZE in columns:
            logp = torch.where(columns[RENORMALIZE] > 0, score, logp)
    each = (x.view(n, w, -1) for x in (score, token, logp))
    return advance(b, rules, shape.candidates, *each)


def advance(
    b: Beams, rules: Rules, many: int, score: Tensor, token: Tensor, logp: Tensor
) -> tuple[Beams, Tensor, Tensor]:
    """One step of g groups, by what may follow each running text (g w k): the new state, each new beam's parent (g w),
    and which groups are done."""
    g, w, k = score.shape
    total = (b.score[:, :, None] + score).view(g, -1)
    value, index = total.topk(min(many, total.shape[1]))  # g k
    parent, token = index // k, token.reshape(g, -1).gather(1, index)
    texts = _append(b.ids, parent, token, b.count)
    logps = _append(b.logp, parent, logp.reshape(g, -1).gather(1, index), b.count)
    count = b.count + 1
    ends = (token[..., None] == rules.eos[:, None]).any(-1) | (count[:, None] >= rules.most)
    # Merge the texts that just ended (among the first w) into the best finished ones.
    new = ends & (torch.arange(ends.shape[1], device=ends.device) < w)
    shut = ~b.improvable | (b.done.all(-1) & rules.first[:, 0])
    final = rules.score(value, count[:, None])
    final = final + WORST * (~new).to(final.dtype) + WORST * shut[:, None].to(final.dtype)
    done_score, at = torch.cat([b.done_score, final], 1).topk(w)
    wide = at[..., None].expand(-1, -1, texts.shape[-1])
    done_ids = torch.cat([b.done_ids, texts], 1).gather(1, wide)
    done_logp = torch.cat([b.done_logp, logps], 1).gather(1, wide)
    done_size = torch.cat([b.done_size, count[:, None].expand_as(ends)], 1).gather(1, at)
    done = torch.cat([b.done, new], 1).gather(1, at)
    # Go on with the best of the others.
    running, order = (value + ends * WORST).topk(w)
    wide = order[..., None].expand(-1, -1, texts.shape[-1])
    bound = rules.score(running[:, :1], torch.where(rules.hopeful, rules.most, count[:, None]))
    worst = torch.where(done, done_score.amin(1, keepdim=True), WORST)
    improvable = b.improvable & (bound > worst).any(-1)
    over = ~improvable | (done.all(-1) & rules.first[:, 0]) | ends.all(-1)
    going, finished = (texts.gather(1, wide), logps.gather(1, wide)), (done_ids, done_logp)
    state = Beams(running, *going, done_score, *finished, done_size, done, improvable, count)
    return state, parent.gather(1, order), over


def _append(texts: Tensor, parent: Tensor, new: Tensor, count: Tensor) -> Tensor:
    """texts (g w T) of the parents (g k), with `new` (g k) at place `count`: (g k T)."""
    grown = texts.gather(1, parent[..., None].expand(-1, -1, texts.shape[-1]))
    at = count.clamp(max=texts.shape[-1] - 1)[:, None, None].expand(-1, parent.shape[1], 1)
    return grown.scatter(2, at, new[..., None].to(grown.dtype))
