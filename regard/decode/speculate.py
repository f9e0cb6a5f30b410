"""Guesses of the next tokens, which are checked in one pass (sampler.py; in a graph runners/guesses.py). Which are
guessed never changes the text; better ones only make more guesses right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.cache import Cache, Contiguous
from regard.models.base import Model, border

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


class Draft:
    """A small model that guesses greedily, and its own cache, one row for each row of a batch."""

    def __init__(self, model: Model):
        self.model, self.border = model, border(model)
        self.cache: Any = None

    def join(self, rows: int) -> None:
        """Room for more rows, behind those that are there."""
        weight = next(self.model.parameters())
        new = Contiguous(self.model.cache_specs(), rows, device=weight.device, dtype=weight.dtype)
        self.cache = new if self.cache is None else self.cache.join(new)

    def keep(self, rows: list[int]) -> None:
        self.cache = self.cache.take(torch.tensor(rows, dtype=torch.long, device=self.cache.device))

    def _set_reach(self, cache: Cache, texts: list[list[int]]) -> None:
        """The length of each text, by which LongRoPE chooses its angles. Guesses are not counted: across that border
        they are only worse guesses."""
        if self.border is not None:
            cache.reach = torch.tensor([len(text) for text in texts], device=cache.device)

    def guess(self, texts: list[list[int]], room: list[int]) -> list[list[int]]:
        """At most `room` greedy guesses for each row's text so far. A row without room is not read: its text may be
        longer than the draft's context, or its guesses were found elsewhere."""
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
