"""Texts longer than the model's context: each new token is conditioned on the last tokens that the context holds.

Every position moves with the window, so nothing can be kept from one step to the next: the window is read anew.
"""

from __future__ import annotations

from typing import Any

import torch

from regard.cache import Cache
from regard.decode.prefill import sources
from regard.decode.rows import Row
from regard.decode.sample import SampleLane
from regard.decode.settings import Event


class WindowLane(SampleLane):
    """Rows that go on with the last `longest` tokens of their texts; the cache is empty."""

    def __init__(self, cache: Cache, rows: list[Row], longest: int, chunk: int):
        super().__init__(cache, rows)
        self.longest, self.chunk = longest, chunk

    def step(self, model: Any, backend: str) -> list[Event]:
        texts = [(row.request.ids + row.ids)[-self.longest :] for row in self.rows]
        few = max(1, self.chunk // max(map(len, texts)))
        logits = []
        for start in range(0, len(texts), few):
            part, device = texts[start : start + few], self.cache.device
            width, lengths = max(map(len, part)), torch.tensor([len(t) for t in part])
            ids = torch.tensor([t + [0] * (width - len(t)) for t in part], device=device)
            given = sources([row.request for row in self.rows[start : start + few]], device)
            logits.append(model.next_logits(ids, lengths.to(device), backend=backend, **given))
        return self.choose(torch.cat(logits))
