"""Texts that are longer than the context.

overflow="crop": the next token is conditioned on the last tokens that the context holds, as if there had been no
others. Every position moves with the window, so nothing can be kept from one step to the next: it is read anew.

overflow="sinks": on the first four tokens and the last ones (Xiao et al. 2023, arXiv:2309.17453). Where positions are
distances (RoPE, ALiBi, T5's biases) the tokens are kept as they were read, each by what it saw then, and stand at
their places in the window (`Sinks` in regard/cache/rows.py). A prompt longer than the context is read as its first
four and its last tokens. Where positions are vectors that are added to the tokens, or attention chooses its keys by
an index, tokens cannot be moved: there the first four and the last tokens are read anew, as for crop.
"""

from __future__ import annotations

import torch

from regard.cache import FIRST, Cache, Contiguous, Sinks
from regard.decode.batch import Reading
from regard.decode.check import written
from regard.decode.runners.rows import Forward, PlainBatch
from regard.decode.sequence import Sequence, Slot
from regard.decode.sources import sources
from regard.decode.speculate import padded
from regard.models.base import Model


def streams(model: Model) -> bool:
    """Whether what a model keeps of a token can be brought to another position."""
    still = getattr(written(model), "position", None)
    return still is None and all(spec.turned is not None for spec in model.cache_specs())


def shortened(ids: list[int], window: int) -> list[int]:
    """The first tokens of a text that are kept as attention sinks, and the last: as many as a window holds."""
    return ids if len(ids) <= window else ids[:FIRST] + ids[FIRST - window :]


class WindowBatch(PlainBatch):
    """Rows that go on with `longest` tokens of their texts; the cache is empty."""

    def __init__(self, forward: Forward, reading: Reading):
        super().__init__(forward, reading)
        self.longest = forward.longest

    def prepare(self) -> None:
        """Nothing is read before a step."""
        new = [slot for slot in self.slots if not slot.scheduled]
        if new:
            self._join(new, Contiguous([], len(new), **self.where))

    def step(self) -> None:
        texts = [
            self.window(slot.request.ids + slot.sequence.ids, slot.sequence) for slot in self.live
        ]
        few, logits = max(1, self.chunk // max(map(len, texts))), []
        for start in range(0, len(texts), few):
            part = slice(start, start + few)
            ids, lengths = padded(texts[part], self.where["device"])
            given = sources([slot.request for slot in self.live[part]], ids.device)
            logits.append(self.model.next_logits(ids, lengths, backend=self.backend, **given))
        self.events += self.sampler.choose(torch.cat(logits))

    def window(self, text: list[int], row: Sequence) -> list[int]:
        if row.request.settings.overflow == "sinks":
            return shortened(text, self.longest)
        return text[-self.longest :]


class SinksBatch(PlainBatch):
    """Rows in a cache that forgets. A text that is longer than its window has been read before."""

    def __init__(self, forward: Forward, reading: Reading):
        super().__init__(forward, reading)
        self.longest = forward.longest

    def _slot(self, row: Sequence) -> Slot:
        return Slot(row, shortened(row.request.ids, self.longest) + row.ids)

    def _cache(self, slots: list[Slot]) -> Cache:
        return Sinks(self.specs, len(slots), window=self.longest, **self.where)

    def _size(self, slot: Slot, room: int) -> int:
        """When the window is full it takes one token a call."""
        return min(super()._size(slot, room), max(1, self.longest - slot.fed))
