"""Where batches come from: what all feeds share, and `TextFeed` for language models. Examples with an answer:
regard.data.examples.

A feed holds arrays of numbers (mapped from disk or not) and settings; batch k is a function of them and of k. `held` is
a second feed over the data that is only measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from regard.config import Count, Seed, ranged
from regard.data.batch import IGNORE, Batch
from regard.data.files import DataError
from regard.data.pack import Buckets, Deck, Tiles, best_fit, cut, framed, ranges
from regard.data.shards import Column, digest
from regard.errors import UsageError, nearest

PACKS = ("documents", "stream", "windows", "none")


@dataclass(frozen=True)
@ranged
class Batching:
    """How examples become batches: at most `rows` rows and `tokens` tokens (of a side, padding included) in each.

    A row has at most `length` tokens; `overlong` says what happens to longer examples. Padding reaches to a multiple of
    `multiple`."""

    length: Count | None = None
    rows: Count | None = None
    tokens: Count | None = None
    overlong: str = "error"
    multiple: Count = 1
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.rows is None and self.tokens is None:
            raise UsageError("say how large a batch is: rows = N, or tokens = N")

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        return -(-lengths // self.multiple) * self.multiple


class Order(Protocol):
    epoch: int

    def take(self, k: int) -> np.ndarray: ...

    def fixed(self) -> Iterator[np.ndarray]: ...


class Base:
    """What the feeds share: a rank's part of a batch, the evaluation, the fingerprint."""

    order: Order
    epoch: int
    held: Base | None
    fingerprint: str

    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch:
        """Batch k, or the rows of it that rank `rank` of `world` computes: put together they are the batch. A rank for
        which there is no row gets one that is not counted."""
        assert 0 <= rank < world and k >= 0
        numbers = self.order.take(k)
        first, last = (len(numbers) * r // world for r in (rank, rank + 1))
        if first < last:
            return self.make(numbers, slice(first, last), k)
        batch = self.make(numbers, slice(0, 1), k)
        return replace(batch, labels=torch.full_like(batch.labels, IGNORE))

    def evaluation(self) -> Iterator[Batch]:
        return iter(()) if self.held is None else self.held.everything()

    def everything(self) -> Iterator[Batch]:
        """All examples once, in a fixed order, unchanged."""
        return (self.make(numbers, slice(None), None) for numbers in self.order.fixed())

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        """The rows `part` of the batch that these examples make."""
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError

    def sign(self, data: str, **settings: Any) -> str:
        held = None if self.held is None else self.held.fingerprint
        return digest({"kind": type(self).__name__, "data": data, "held": held, **settings})


def tensors(
    ids: np.ndarray, labels: np.ndarray, sizes: np.ndarray, whole: np.ndarray, **more: Tensor
) -> Batch:
    """Lengths are given if any row of the whole batch is padded, so that a part has them if the batch has."""
    full = bool((whole == ids.shape[1]).all())
    lengths = None if full else torch.from_numpy(sizes)
    return Batch(torch.from_numpy(ids), torch.from_numpy(labels), lengths, **more)


# --- language models ----------------------------------------------------------------------------------------------


class TextFeed(Base):
    """Documents in rows of `length` tokens.

    pack = "documents": whole documents share a row; `doc` numbers them (-1: padding) so that none sees another, and no
    label is a token of the next one. (Positions count through the row, which only absolute ones feel.) "stream": all
    text end to end, cut into rows. "windows": rows from anywhere in it. "none": a document a row.

    With `shift`, label t is the token after ids t; else it is ids t (masked models). `prompts`: how many tokens at the
    start of each document are only read, never learned."""

    def __init__(
        self,
        documents: Column,
        batching: Batching,
        *,
        pack: str = "documents",
        shift: bool = True,
        pad: int = 0,
        prompts: np.ndarray | None = None,
        held: TextFeed | None = None,
        fingerprint: str = "",
    ):
        if pack not in PACKS:
            raise UsageError(f"pack = {pack!r} is unknown; {nearest(pack, PACKS)}")
        if batching.length is None and pack != "none":
            raise UsageError(f"pack = {pack!r} needs the length of a row: length = N")
        if prompts is not None and pack in ("stream", "windows"):
            raise UsageError(f"pack = {pack!r} knows no prompts; choose documents or none")
        self.documents, self.batching, self.pack = documents, batching, pack
        self.extra, self.pad, self.prompts, self.held = int(shift), pad, prompts, held
        self.flat = pack in ("stream", "windows")
        self.values = documents.stream if self.flat else documents.values
        if len(self.values) <= self.extra:
            raise DataError(f"{len(self.values)} tokens are too few to learn from; give more text")
        self._lay()
        self.epoch = self.order.epoch
        name = fingerprint or documents.fingerprint
        settings = {**asdict(batching), "pack": pack, "shift": shift, "pad": pad}
        asked = None if prompts is None else Column(prompts).fingerprint
        self.fingerprint = self.sign(name, **settings, prompts=asked)

    def _lay(self) -> None:
        """Find the pieces of text that make a row, and the order of the rows."""
        b, lengths = self.batching, self.documents.lengths
        self.short = 0
        if self.flat:
            n, length = len(self.values), b.length or 1
            rows = b.rows or max((b.tokens or 0) // length, 1)
            drawn = self.pack == "windows"
            self.order = Tiles(n, length, self.extra, rows, b.seed, drawn)
            return
        limit = None if b.length is None else b.length + self.extra
        self.pieces = pieces = cut(lengths, limit, b.overlong, "document", overlap=self.extra)
        if not len(pieces.row):
            raise DataError(f"every document is longer than {b.length:,} tokens, and was dropped")
        kept = pieces.size > self.extra  # others have no label
        self.short = int((~kept).sum())
        if not kept.any():
            raise DataError("no document has a token to learn; give longer ones")
        assert self.documents.ends is not None
        self.row, self.inside = pieces.row[kept], pieces.start[kept]
        self.start = self.documents.ends[self.row] + self.inside
        self.size = pieces.size[kept] - self.extra
        if self.pack == "none":
            self.order = Buckets(b.padded(self.size), b.tokens, b.rows, b.seed)
            return
        length = b.length or 1
        self.packed, self.bins = best_fit(self.size, length)
        self.filled = np.add.reduceat(self.size[self.packed], self.bins[:-1])
        rows = b.rows or max((b.tokens or 0) // length, 1)
        self.order = Deck(len(self.bins) - 1, rows, b.seed)

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        if self.flat:
            return self._tiled(numbers, part)
        if self.pack == "none":
            whole = self.size[numbers]
            width = int(self.batching.padded(whole).max())
            return self._laid(numbers[part], np.ones(len(numbers[part]), np.int64), width, whole)
        whole, chosen = self.filled[numbers], numbers[part]
        counts = self.bins[chosen + 1] - self.bins[chosen]
        pieces = self.packed[ranges(self.bins[chosen], counts)]
        return self._laid(pieces, counts, self.batching.length or 1, whole)

    def _tiled(self, starts: np.ndarray, part: slice) -> Batch:
        length = self.batching.length or 1
        whole = np.minimum(length, len(self.values) - self.extra - starts)
        starts, sizes = starts[part], whole[part]
        ids = framed(self.values, starts, sizes, length, self.pad)
        labels = framed(self.values, starts + self.extra, sizes, length, IGNORE)
        return tensors(ids, labels, sizes, whole)

    def _laid(self, pieces: np.ndarray, counts: np.ndarray, width: int, whole: np.ndarray) -> Batch:
        """Rows of `width`, row i with the next counts[i] pieces side by side."""
        size, start = self.size[pieces], self.start[pieces]
        row = np.repeat(np.arange(len(counts)), counts)
        number = ranges(np.zeros_like(counts), counts)  # of a piece in its row
        ends = np.cumsum(size)
        first = np.cumsum(counts) - counts
        before = (ends - size) - np.repeat((ends - size)[first], counts)
        place = ranges(row * width + before, size)
        source = ranges(start, size)
        shape = (len(counts), width)
        ids, labels, doc = (np.full(shape, fill, np.int64) for fill in (self.pad, IGNORE, -1))
        ids.reshape(-1)[place] = self.values[source]
        learned = self.values[source + self.extra].astype(np.int64)
        if self.prompts is not None:
            learned[self._prompted(pieces, size)] = IGNORE
        labels.reshape(-1)[place] = learned
        doc.reshape(-1)[place] = np.repeat(number, size)
        more: dict[str, Tensor] = {}
        if self.pack == "documents":
            more["doc"] = torch.from_numpy(doc)
        if self.prompts is not None:
            kept = np.clip(self.prompts[self.row[pieces]] - self.inside[pieces], 0, size)
            prefix = np.zeros(shape, np.int64)
            prefix.reshape(-1)[place] = np.repeat(before + kept, size)
            more["prefix"] = torch.from_numpy(prefix)
        return tensors(ids, labels, np.add.reduceat(size, first), whole, **more)

    def _prompted(self, pieces: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Whether each label of these pieces is a token of the prompt."""
        assert self.prompts is not None
        at = ranges(self.inside[pieces] + self.extra, size)
        return at < np.repeat(self.prompts[self.row[pieces]], size)

    def describe(self) -> str:
        if self.flat:
            how = "cut into rows" if self.pack == "stream" else "read in rows from anywhere, each"
            said = f"{len(self.values):,} tokens {how} of {self.batching.length:,}"
            return f"{said}; {self.epoch:,} batches a pass"
        said = f"{int(self.size.sum()):,} labels of {len(self.documents):,} documents"
        if self.pack == "documents":
            rows = len(self.bins) - 1
            empty = 1 - self.size.sum() / (rows * (self.batching.length or 1))
            said += f", packed into {rows:,} rows of {self.batching.length:,} ({empty:.2%} padding)"
        said += f"; {self.epoch:,} batches a pass{self.pieces.said()}"
        return said + (f"; {self.short:,} too short to learn from" if self.short else "")
