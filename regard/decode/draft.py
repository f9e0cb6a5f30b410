"""Speculation by a small model: it guesses the next tokens greedily, the large one checks them in one pass.

Which tokens are guessed never changes the text (see plain.py); a better draft only makes more guesses right.
"""

from __future__ import annotations

from typing import Any

import torch

from regard.cache import Contiguous


class Draft:
    """A draft model and its own cache, one row for each row of a lane."""

    def __init__(self, model: Any):
        self.model = model
        self.cache: Any = None

    def join(self, rows: int) -> None:
        """Room for more rows, behind those that are there."""
        weight = next(self.model.parameters())
        new = Contiguous(self.model.cache_specs(), rows, device=weight.device, dtype=weight.dtype)
        self.cache = new if self.cache is None else self.cache.join(new)

    def keep(self, rows: list[int]) -> None:
        self.cache = self.cache.take(torch.tensor(rows, dtype=torch.long, device=self.cache.device))

    def guess(self, texts: list[list[int]], room: list[int]) -> list[list[int]]:
        """For every row's text so far, what it would say next: at most `room` tokens. A row without room is not read:
        its text may be longer than the draft's context."""
        most = max(room, default=0)
        if most <= 0:
            return [[] for _ in texts]
        device = self.cache.device
        held = self.cache.lengths.tolist()
        fresh = [text[n:] if r else [] for text, n, r in zip(texts, held, room, strict=True)]
        width = max(map(len, fresh))
        lengths = torch.tensor([len(f) for f in fresh], device=device)
        ids = torch.tensor([f + [0] * (width - len(f)) for f in fresh], device=device)
        said = [self.model.next_logits(ids, lengths, cache=self.cache).argmax(-1)]
        rooms = torch.tensor(room, device=device)
        # A state takes one call back, and guessing takes several: a fork of it is led astray.
        astray = most > 1 and any(spec.state for spec in self.cache.specs)
        cache = self.cache.fork(torch.arange(len(room), device=device)) if astray else self.cache
        for n in range(1, most):
            more = (rooms > n).long()
            logits = self.model.next_logits(said[-1][:, None], more, cache=cache)
            said.append(logits.argmax(-1))
        if most > 1 and not astray:
            self.cache.rewind((rooms - 1).clamp(min=0))
        guesses = torch.stack(said, 1).tolist()
        return [g[:n] for g, n in zip(guesses, room, strict=True)]
