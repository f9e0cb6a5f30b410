"""Guesses of the next tokens, which are checked in one pass (sampler.py; in a graph runners/guesses.py). Which are
guessed never changes the text; better ones only make more guesses right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.cache import Cache, CacheSpec, Contiguous
from regard.models.base import Model, border, last_real

LONGEST = (
    3  # tokens that are looked up together, chosen for speed; fewer where so many do not recur
)


class Index:
    """Guessing by looking up (Saxena 2023): where each run of 1 to LONGEST tokens was last followed by another; grows
    with the text, a few steps a token."""

    def __init__(self, text: Sequence[int]):
        self.text: list[int] = []
        self.found: dict[tuple[int, ...], int] = {}  # a run of tokens -> the place after it
        self.extend(text)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.text)  # runs that end here are followed by `token` now
            for n in range(1, min(LONGEST, end) + 1):
                self.found[tuple(self.text[end - n : end])] = end
            self.text.append(token)

    def after(self, room: int) -> list[int]:
        """Up to `room` tokens that followed the text's end the last time, by the longest run that is known."""
        for n in range(min(LONGEST, len(self.text)), 0, -1):
            place = self.found.get(tuple(self.text[-n:]))
            if place is not None:
                return self.text[place : place + room]
        return []


class Rate:
    """How many tokens a pass brings, of late: what was measured counts less with each pass since."""

    def __init__(self, tokens: float = 2.0, passes: float = 2.0):
        self.tokens, self.passes = tokens, passes

    def note(self, tokens: float, passes: int) -> None:
        kept = 0.8**passes
        self.tokens, self.passes = self.tokens * kept + tokens, self.passes * kept + passes

    @property
    def each(self) -> float:
        return self.tokens / self.passes


def padded(texts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids (n t) and lengths (n) of texts."""
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=device)
    return ids, torch.tensor([len(text) for text in texts], device=device)


Texts = list[list[int]]
Trails = list[list[Tensor]]


class Guesser:
    """Guesses greedily, with a cache of its own: one row for each row of a batch."""

    def __init__(self, model: Model, specs: list[CacheSpec]):
        self.model, self.specs = model, specs
        self.cache: Any = None

    def join(self, rows: int) -> None:
        """Room for more rows, behind those that are there."""
        weight = next(self.model.parameters())
        new = Contiguous(self.specs, rows, device=weight.device, dtype=weight.dtype)
        self.cache = new if self.cache is None else self.cache.join(new)

    def keep(self, rows: list[int]) -> None:
        self.cache = self.cache.take(torch.tensor(rows, dtype=torch.long, device=self.cache.device))

    def guess(self, texts: Texts, room: list[int], trails: Trails) -> list[list[int]]:
        """At most `room` guesses for each row's text so far. A row without room is not read: its text may be longer
        than the guesser's context, or its guesses were found elsewhere. `trails`: of each row the model's states of the
        last tokens, where they are kept; those that are read are taken out."""
        raise NotImplementedError


class Draft(Guesser):
    """A small model that guesses."""

    def __init__(self, model: Model):
        super().__init__(model, model.cache_specs())
        self.border = border(model)

    def _set_reach(self, cache: Cache, texts: list[list[int]]) -> None:
        """The length of each text, by which LongRoPE chooses its angles. Guesses are not counted: across that border
        they are only worse guesses."""
        if self.border is not None:
            cache.reach = torch.tensor([len(text) for text in texts], device=cache.device)

    def guess(self, texts: Texts, room: list[int], trails: Trails) -> list[list[int]]:
        most = max(room)
        if not most:
            return [[] for _ in texts]
        device = self.cache.device
        held = self.cache.lengths.tolist()
        fresh = [text[n:] if r else [] for text, n, r in zip(texts, held, room, strict=True)]
        ids, lengths = padded(fresh, device)
        self._set_reach(self.cache, texts)
        said = [self.model.next_logits(ids, lengths, cache=self.cache).argmax(-1)]
        rooms = torch.tensor(room, device=device)
        cache, states = self.cache, any(spec.state for spec in self.cache.specs)
        for n in range(1, most):
            # A state can be rewound by one call only, and guessing makes several: they run on a fork, which is thrown
            # away.
            if states and cache is self.cache:
                cache = self.cache.fork(torch.arange(len(room), device=device))
            more = (rooms > n).long()
            self._set_reach(cache, texts)
            logits = self.model.next_logits(said[-1][:, None], more, cache=cache)
            said.append(logits.argmax(-1))
        if cache is self.cache:
            self.cache.rewind((rooms - 1).clamp(min=0))
        guesses = torch.stack(said, 1).tolist()
        return [g[:n] for g, n in zip(guesses, room, strict=True)]


class OwnGuesses(Guesser):
    """The model's MTP layers, told the states of the text that it has read since: one guess by each. A single layer
    goes on with its own states, as if they were the tower's.

    Where a text begins with pages of another one, the layers see what comes after these."""

    def __init__(self, model: Any):
        super().__init__(model, model.mtp.tower.cache_specs())
        self.depth = model.mtp.config.depth

    def guess(self, texts: Texts, room: list[int], trails: Trails) -> list[list[int]]:
        if not max(room):
            return [[] for _ in texts]
        model: Any = self.model
        read = [torch.cat(trail) if r else None for trail, r in zip(trails, room, strict=True)]
        sizes = [0 if h is None else len(h) for h in read]
        fresh = [text[-n:] if n else [] for text, n in zip(texts, sizes, strict=True)]
        tokens, lengths = padded(fresh, self.cache.device)
        some = next(h for h in read if h is not None)
        states = some.new_zeros(*tokens.shape, some.shape[1])
        for row, h in zip(states, read, strict=True):
            if h is not None:
                row[: len(h)] = h
        pos, last = self.cache.begin(tokens.shape[1], lengths), lengths.clamp(min=1)[:, None] - 1
        said: list[Tensor] = []
        for layer in range(self.depth):
            if said:
                tokens = tokens.roll(-1, 1).scatter(1, last, said[-1][:, None])
            states = model.further(states, tokens, pos, layer, cache=self.cache)
            ends = last_real(states, lengths)
            said.append(model.logits(ends).argmax(-1))
        back = [min(n, self.depth - 1) for n in sizes]
        if self.depth == 1:
            said += self._go_on(ends, said[0], room)
            back = [max(0, r - 1) for r in room]
        if any(back):
            self.cache.rewind(torch.tensor(back, device=self.cache.device))
        # Guesses were told to later layers as if they were the text: these places are read again.
        for trail, h in zip(trails, read, strict=True):
            if h is not None:
                trail[:] = [h[max(0, len(h) - self.depth + 1) :]]
        guesses = torch.stack(said, 1).tolist()
        return [g[:n] for g, n in zip(guesses, room, strict=True)]

    def _go_on(self, state: Tensor, guess: Tensor, room: list[int]) -> list[Tensor]:
        """Guesses after the first, each by the state (b m) of the one before."""
        model: Any = self.model
        said, rooms = [], torch.tensor(room, device=guess.device)
        for n in range(1, max(room)):
            pos = self.cache.begin(1, (rooms > n).long())
            state = model.further(state[:, None], guess[:, None], pos, cache=self.cache)[:, 0]
            guess = model.logits(state).argmax(-1)
            said.append(guess)
        return said


def guesser(model: Model, draft: Model | str) -> Guesser:
    return OwnGuesses(model) if isinstance(draft, str) else Draft(draft)
