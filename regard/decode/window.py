"""Texts longer than the model's context: what of them the next token is conditioned on.

overflow="crop": on the last tokens that the context holds, as if there had been no others. Every position moves with
the window, so nothing can be kept from one step to the next: the window is read anew.

overflow="sinks": on the first four tokens and the last ones (Xiao et al. 2023, arXiv:2309.17453). Where positions are
distances (RoPE, ALiBi, T5's biases) the tokens are kept as they were read, each by what it saw then, and stand at their
places in the window: regard/cache/sinks.py. A prompt longer than the context is read as its first four and its last
tokens. Where positions are vectors that are added to the tokens, or attention chooses its keys by an index, tokens
cannot be moved: there the first four and the last tokens are read anew, as for crop.
"""

from __future__ import annotations

from typing import Any

import torch

from regard.cache import Cache
from regard.decode.check import written
from regard.decode.prefill import shortened, sources
from regard.decode.rows import Row
from regard.decode.sample import SampleLane
from regard.decode.settings import Event


def streams(model: Any) -> bool:
    """Whether what a model keeps of a token can be brought to another position."""
    still = getattr(written(model), "position", None)
    return still is None and all(spec.turned is not None for spec in model.cache_specs())


class WindowLane(SampleLane):
    """Rows that go on with `longest` tokens of their texts; the cache is empty."""

    def __init__(self, cache: Cache, rows: list[Row], longest: int, chunk: int):
        super().__init__(cache, rows)
        self.longest, self.chunk = longest, chunk

    def step(self, model: Any, backend: str) -> list[Event]:
        texts = [self.window(row.request.ids + row.ids, row) for row in self.rows]
        few = max(1, self.chunk // max(map(len, texts)))
        logits = []
        for start in range(0, len(texts), few):
            part, device = texts[start : start + few], self.cache.device
            width, lengths = max(map(len, part)), torch.tensor([len(t) for t in part])
            ids = torch.tensor([t + [0] * (width - len(t)) for t in part], device=device)
            given = sources([row.request for row in self.rows[start : start + few]], device)
            logits.append(model.next_logits(ids, lengths.to(device), backend=backend, **given))
        return self.choose(torch.cat(logits))

    def window(self, text: list[int], row: Row) -> list[int]:
        if row.request.settings.overflow == "sinks":
            return shortened(text, self.longest)
        return text[-self.longest :]
