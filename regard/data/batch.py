"""What a training step is given: a batch of examples, whatever the task, and where batches come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORE = -100  # a label that is not counted
UNANSWERED = -1  # in data: the first and last token of an answer that is not in the text


@dataclass(frozen=True)
class Batch:
    """Examples of one size, padded on the right. What a task does not have is None.

    `labels` stand beside the model's outputs: of a language model label t is the token after ids t."""

    ids: Tensor  # b t: what the model, or the decoder, reads; images (b c h w)
    labels: Tensor  # b t, or b for one label a row
    lengths: Tensor | None = None  # b: real tokens of ids; None: all
    source: Tensor | None = None  # b s: what an encoder reads
    source_lengths: Tensor | None = None
    doc: Tensor | None = None  # b t: the document of each packed token
    prefix: Tensor | None = None  # b t: where in its row the prefix of each token's document ends
    guests: Tensor | None = None  # b: the class of what was pasted into each image
    share: Tensor | None = None  # b: how much of each image that is, from 0 to 1

    @property
    def tokens(self) -> int:
        """Labels that count."""
        return int((self.labels != IGNORE).sum())

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same with every tensor changed."""
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        made: dict[str, Any] = {n: x if x is None else change(x) for n, x in given.items()}
        return Batch(**made)

    def to(self, device: torch.device | str) -> Batch:
        return self.each(lambda x: x.to(device, non_blocking=True))

    def split(self, parts: int) -> list[Batch]:
        """At most `parts` batches with the same rows, in order."""
        size = -(-len(self.ids) // parts)
        starts = range(0, len(self.ids), size)
        return [self.each(lambda x, a=a: x[a : a + size]) for a in starts]  # type: ignore[misc]


Objective = Callable[
    [Any, Batch], tuple[Tensor, Tensor]
]  # (model, batch) -> (sum of losses, count)


class Feed(Protocol):
    """Batches by number. `batch(k)` is a function of the seed and k alone, so that going on costs one integer."""

    @property
    def fingerprint(self) -> str: ...  # of the data, the tokenizer and the settings

    @property
    def epoch(self) -> int: ...  # batches in one pass over the data

    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch: ...

    def evaluation(self) -> Iterator[Batch]: ...

    def describe(self) -> str: ...


class Ahead:
    """The batches of a feed for one process, each made in a thread while the one before it is used."""

    def __init__(self, feed: Feed, rank: int, world: int):
        self.make = lambda k: feed.batch(k, rank, world)
        self.pool = ThreadPoolExecutor(1)
        self.coming: tuple[int, Future[Batch]] = (-1, Future())

    def batch(self, k: int) -> Batch:
        number, future = self.coming
        made = (future if number == k else self.pool.submit(self.make, k)).result()
        self.coming = (k + 1, self.pool.submit(self.make, k + 1))
        return made
