"""Batches: what a training step is given, whatever the task, and the feeds that they come from. `TextFeed` is for
language models, `PairFeed` for translation and its like, `LabelFeed` for classes of texts, tokens and spans,
`ImageFeed` for pictures.

A feed holds arrays of numbers (mapped from disk or not) and settings; batch k is a function of them and of k. `held` is
a second feed over the data that is only measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from regard.config import Count, Seed, ranged
from regard.data.pack import (
    CHANGES,
    HOLES,
    PASTES,
    Buckets,
    Deck,
    Tiles,
    best_fit,
    cut,
    draws,
    framed,
    ranges,
)
from regard.data.read import DataError
from regard.data.shards import Column, digest
from regard.errors import UsageError, nearest

# A label that is not counted; in data, the first and last token of an answer that is not in the text.
IGNORE, UNANSWERED = -100, -1
PACKS = ("documents", "stream", "windows", "none")
# Ids in front of a text and behind it.
Around = tuple[Sequence[int], Sequence[int]]


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
    pasted_labels: Tensor | None = None  # b: the class of what was pasted into each image
    pasted_area: Tensor | None = None  # b: how much of each image that is, from 0 to 1

    @property
    def tokens(self) -> int:
        """Labels that count."""
        return int((self.labels != IGNORE).sum())

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same with every tensor changed."""
        changed: dict[str, Any] = {n: x if x is None else change(x) for n, x in vars(self).items()}
        return Batch(**changed)

    def to(self, device: torch.device | str) -> Batch:
        return self.each(lambda x: x.to(device, non_blocking=True))

    def split(self, count: int) -> list[Batch]:
        """At most `count` micro-batches with the same rows, in order."""
        size = -(-len(self.ids) // count)
        starts = range(0, len(self.ids), size)
        return [self.each(lambda x, a=a: x[a : a + size]) for a in starts]  # type: ignore[misc]


# (model, batch) -> (sum of losses, count)
Objective = Callable[[Any, Batch], tuple[Tensor, Tensor]]


class Feed(Protocol):
    """Batches by number. `batch(k)` is a function of the seed and k alone, so that going on costs one integer."""

    @property
    def fingerprint(self) -> str: ...  # of the data, the tokenizer and the settings

    @property
    def epoch(self) -> int: ...  # batches in one pass over the data

    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch: ...

    def evaluation(self) -> Iterator[Batch]: ...

    def describe(self) -> str: ...


class Prefetch:
    """The batches of a feed for one process, each made in a thread while the one before it is used."""

    def __init__(self, feed: Feed, rank: int, world: int):
        self.make = lambda k: feed.batch(k, rank, world)
        self.pool = ThreadPoolExecutor(1)
        self.next: tuple[int, Future[Batch]] = (-1, Future())

    def batch(self, k: int) -> Batch:
        number, future = self.next
        batch = (future if number == k else self.pool.submit(self.make, k)).result()
        self.next = (k + 1, self.pool.submit(self.make, k + 1))
        return batch


# --- what all feeds share ---------------------------------------------------------------------------------------


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
    batching: Batching
    held: Base | None
    fingerprint: str

    @property
    def epoch(self) -> int:
        return self.order.epoch

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

    def sign(self, *columns: Column, **settings: Any) -> None:
        """Make the fingerprint one of the data, which may have one already, and of all settings."""
        data = self.fingerprint or columns[0].fingerprint
        if len(columns) > 1 and not self.fingerprint:
            data = digest([column.fingerprint for column in columns])
        held = None if self.held is None else self.held.fingerprint
        kind = type(self).__name__
        settings |= {"kind": kind, "data": data, "held": held, **asdict(self.batching)}
        self.fingerprint = digest(settings)


def tensors(
    ids: np.ndarray, labels: np.ndarray, sizes: np.ndarray, whole: np.ndarray, **more: Tensor
) -> Batch:
    """Lengths are given if any row of the whole batch is padded, so that a part has them if the batch has."""
    full = bool((whole == ids.shape[1]).all())
    lengths = None if full else torch.from_numpy(sizes)
    return Batch(torch.from_numpy(ids), torch.from_numpy(labels), lengths, **more)


# --- language models --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TextFeed(Base):
    """Documents in rows of `length` tokens.

    pack = "documents": whole documents share a row; `doc` numbers them (-1: padding) so that none sees another, and no
    label is a token of the next one. (Positions count through the row, which only absolute ones feel.) "stream": all
    text end to end, cut into rows. "windows": rows from anywhere in it. "none": a document a row.

    With `shift`, label t is the token after ids t; else it is ids t (masked models). `prompts`: how many tokens at the
    start of each document are only read, never learned."""

    documents: Column
    batching: Batching
    _: KW_ONLY
    pack: str = "documents"
    shift: bool = True
    pad: int = 0
    prompts: np.ndarray | None = None
    held: TextFeed | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        pack, prompts, length = self.pack, self.prompts, self.batching.length
        if pack not in PACKS:
            raise UsageError(f"pack = {pack!r} is unknown; {nearest(pack, PACKS)}")
        if length is None and pack != "none":
            raise UsageError(f"pack = {pack!r} needs the length of a row: length = N")
        if prompts is not None and pack in ("stream", "windows"):
            raise UsageError(f"pack = {pack!r} knows no prompts; choose documents or none")
        self.extra, self.flat = int(self.shift), pack in ("stream", "windows")
        self.values = self.documents.stream if self.flat else self.documents.values
        if len(self.values) <= self.extra:
            raise DataError(f"{len(self.values)} tokens are too few to learn from; give more text")
        self._lay()
        settings = {"pack": pack, "shift": self.shift, "pad": self.pad}
        asked = None if prompts is None else Column(prompts).fingerprint
        self.sign(self.documents, **settings, prompts=asked)

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
            text = f"{len(self.values):,} tokens {how} of {self.batching.length:,}"
            return f"{text}; {self.epoch:,} batches a pass"
        text = f"{int(self.size.sum()):,} labels of {len(self.documents):,} documents"
        if self.pack == "documents":
            rows = len(self.bins) - 1
            empty = 1 - self.size.sum() / (rows * (self.batching.length or 1))
            text += f", packed into {rows:,} rows of {self.batching.length:,} ({empty:.2%} padding)"
        text += f"; {self.epoch:,} batches a pass{self.pieces.note()}"
        return text + (f"; {self.short:,} too short to learn from" if self.short else "")


# --- examples that have an answer -------------------------------------------------------------------------------


def ends_of(around: Around, batching: Batching) -> tuple[tuple[int, ...], tuple[int, ...]]:
    before, after = (tuple(side) for side in around)
    if batching.length is not None and batching.length <= len(before) + len(after):
        raise UsageError(
            f"length = {batching.length} leaves no room beside {len(before) + len(after)} special tokens"
        )
    return before, after


@dataclass(eq=False)
class PairFeed(Base):
    """A source to read and a target to write, in batches of about one length.

    The encoder reads `before` source `after`; the decoder reads `start` target and must say target `end`. A target that
    was truncated has no end."""

    source: Column
    target: Column
    batching: Batching
    _: KW_ONLY
    start: int
    end: int
    pad: int = 0
    around: Around = ((), ())
    held: PairFeed | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        source, target, b = self.source, self.target, self.batching
        if len(source) != len(target):
            raise DataError(f"{len(source):,} sources and {len(target):,} targets; they must agree")
        if b.overlong == "split":
            raise UsageError("a pair cannot be split; say overlong = error, truncate or drop")
        self.before, self.after = ends_of(self.around, b)
        ends = len(self.before) + len(self.after)
        read, written = self.source.lengths + ends, self.target.lengths + 1
        cuts = [
            cut(n, b.length, b.overlong, what)
            for n, what in ((read, "source"), (written, "target"))
        ]
        kept = self.kept = np.intersect1d(cuts[0].row, cuts[1].row)
        if not len(kept):
            raise DataError(f"every pair is longer than {b.length} tokens, and was dropped")
        limit = np.iinfo(np.int64).max if b.length is None else b.length
        over = int(((read > limit) | (written > limit)).sum())
        self.cut = replace(cuts[0], over=over)
        self.source_sizes = np.minimum(read[kept], limit)
        self.target_sizes = np.minimum(written[kept], limit)
        widest = b.padded(np.maximum(self.source_sizes, self.target_sizes))
        self.order = Buckets(widest, b.tokens, b.rows, b.seed)
        special = {"start": self.start, "end": self.end, "pad": self.pad}
        self.sign(source, target, **special, around=[self.before, self.after])

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        read, written = self.source_sizes[numbers], self.target_sizes[numbers]
        widths = [int(self.batching.padded(sizes).max()) for sizes in (read, written)]
        row, sizes, steps = self.kept[numbers[part]], read[part], written[part]
        assert self.source.ends is not None and self.target.ends is not None
        size = sizes - len(self.before) - len(self.after)
        around = (self.pad, self.before, self.after)
        source = framed(self.source.values, self.source.ends[row], size, widths[0], *around)
        values, starts, whole = self.target.values, self.target.ends[row], self.target.lengths[row]
        ids = framed(values, starts, steps - 1, widths[1], self.pad, (self.start,))
        labels = framed(values, starts, np.minimum(whole, steps), widths[1], IGNORE)
        ended = np.flatnonzero(whole < steps)
        labels[ended, whole[ended]] = self.end
        more = {"source": torch.from_numpy(source)}
        if (read < widths[0]).any():
            more["source_lengths"] = torch.from_numpy(sizes)
        return tensors(ids, labels, steps, written, **more)

    def describe(self) -> str:
        real = int(self.source_sizes.sum() + self.target_sizes.sum())
        whole = sum(
            len(n) * int(self.batching.padded(x[n]).max())
            for n in self.order.fixed()
            for x in (self.source_sizes, self.target_sizes)
        )
        return (
            f"{len(self.kept):,} pairs, {self.source_sizes.sum():,} source and "
            f"{self.target_sizes.sum():,} target tokens in {self.epoch:,} batches a pass "
            f"({1 - real / whole:.1%} padding){self.cut.note()}"
        )


# --- labels -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class LabelFeed(Base):
    """Texts with labels: one a text; one a token, as many as the text has; or first and last token of a span (n 2).

    The model reads `before` text `after`; labels of tokens and spans move along. A span that was cut off is not
    counted; one that is UNANSWERED is the row's first token, as BERT has it."""

    texts: Column
    labels: Column
    batching: Batching
    _: KW_ONLY
    pad: int = 0
    around: Around = ((), ())
    held: LabelFeed | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        texts, labels, b = self.texts, self.labels, self.batching
        if len(texts) != len(labels):
            raise DataError(f"{len(texts):,} texts and {len(labels):,} labels; they must agree")
        if b.overlong == "split":
            raise UsageError(
                "a labelled text cannot be split; say overlong = error, truncate, drop"
            )
        self.before, self.after = ends_of(self.around, b)
        ends = len(self.before) + len(self.after)
        self.cut = cut(texts.lengths + ends, b.length, b.overlong, "text")
        if not len(self.cut.row):
            raise DataError(f"every text is longer than {b.length} tokens, and was dropped")
        self.order = Buckets(b.padded(self.cut.size), b.tokens, b.rows, b.seed)
        self.sign(texts, labels, pad=self.pad, around=[self.before, self.after])

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        whole = self.cut.size[numbers]
        width = int(self.batching.padded(whole).max())
        sizes, row = whole[part], self.cut.row[numbers[part]]
        size = sizes - len(self.before) - len(self.after)
        assert self.texts.ends is not None
        starts = self.texts.ends[row]
        ids = framed(self.texts.values, starts, size, width, self.pad, self.before, self.after)
        return tensors(ids, self._labels(row, size, width), sizes, whole)

    def _labels(self, row: np.ndarray, size: np.ndarray, width: int) -> np.ndarray:
        values, ends = self.labels.values, self.labels.ends
        if ends is not None:
            gap = (IGNORE,) * len(self.before)
            return framed(values, ends[row], size, width, IGNORE, gap)
        labels = values[row].astype(np.int64)
        if labels.ndim == 2:
            none = (labels == UNANSWERED).all(1)
            lost = (labels >= size[:, None]).any(1) | (labels < 0).any(1)
            labels = np.where(lost[:, None], IGNORE, labels + len(self.before))
            labels[none] = 0
        return labels

    def describe(self) -> str:
        text = f"{len(self.cut.row):,} texts, {self.cut.size.sum():,} tokens"
        return f"{text}; {self.epoch:,} batches a pass{self.cut.note()}"


@dataclass(eq=False)
class ImageFeed(Base):
    """Pictures, bytes (n h w c), and a class for each: x / 255, minus `mean`, over `std`.

    While training, each is moved by at most `shift` pixels either way (black comes in) and, with `flip`, mirrored every
    other time; a square of up to `erase` pixels a side, somewhere, becomes black (DeVries and Taylor 2017);
    into the share `paste` of them a piece of the batch's next picture is pasted, of any size, and its class is counted
    by area (CutMix, Yun et al. 2019)."""

    pictures: Column
    labels: Column
    batching: Batching
    _: KW_ONLY
    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.5,)
    shift: int = 0
    flip: bool = False
    erase: int = 0
    paste: float = 0.0
    held: ImageFeed | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        pictures, labels, b = self.pictures, self.labels, self.batching
        if len(pictures) != len(labels):
            raise DataError(f"{len(pictures):,} pictures, {len(labels):,} labels; they must agree")
        if b.rows is None:
            raise UsageError("a batch of pictures is counted in rows: rows = N")
        if not 0.0 <= self.paste <= 1.0:
            raise UsageError(f"paste = {self.paste}: give a share from 0 to 1, for example 0.5")
        self.order = Deck(len(pictures), b.rows, b.seed)
        changes: dict[str, Any] = {"mean": list(self.mean), "std": list(self.std)}
        changes |= {"shift": self.shift, "flip": self.flip}
        changes |= {n: x for n in ("erase", "paste") if (x := getattr(self, n))}
        self.sign(pictures, labels, **changes)

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        rows = np.arange(len(numbers))[part]
        labels, more = self.labels.values[numbers].astype(np.int64), {}
        if k is None or not self.paste:
            x = self._changed(numbers, rows, k)
        else:
            further = (rows + 1) % len(numbers)
            x = self._changed(numbers, np.append(rows, further[-1]), k)
            drawn = draws(self.batching.seed, PASTES, k, 4 * len(numbers)).reshape(-1, 4)[rows]
            x, area = self._pasted(x[:-1], x[1:], drawn)
            more = {
                "pasted_labels": torch.from_numpy(labels[further]),
                "pasted_area": torch.from_numpy(area),
            }
        mean, std = (np.array(n, np.float32).reshape(-1, 1, 1) for n in (self.mean, self.std))
        x = (x.transpose(0, 3, 1, 2).astype(np.float32) / 255 - mean) / std
        images = torch.from_numpy(np.ascontiguousarray(x))
        return Batch(images, torch.from_numpy(labels[rows]), **more)

    def _changed(self, numbers: np.ndarray, rows: np.ndarray, k: int | None) -> np.ndarray:
        """These rows of a batch: moved, mirrored and with holes, if it is the k-th of training."""
        x = self.pictures.values[numbers[rows]]
        for purpose, change, asked in (
            (CHANGES, self._moved, self.shift or self.flip),
            (HOLES, self._erased, self.erase),
        ):
            if k is not None and asked:
                drawn = draws(self.batching.seed, purpose, k, 3 * len(numbers)).reshape(-1, 3)
                x = change(x, drawn[rows])
        return x

    def _moved(self, x: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        b, height, width, _ = x.shape
        by = (drawn[:, :2] % np.uint64(2 * self.shift + 1)).astype(np.int64) - self.shift
        down, right = np.arange(height) + by[:, :1], np.arange(width) + by[:, 1:]  # b h, b w
        if self.flip:
            right = np.where(drawn[:, 2:] & np.uint64(1), right[:, ::-1], right)
        inside = ((down >= 0) & (down < height))[:, :, None] & ((right >= 0) & (right < width))[
            :, None
        ]
        row = np.arange(b)[:, None, None]
        at = down.clip(0, height - 1)[:, :, None], right.clip(0, width - 1)[:, None]
        return x[row, *at] * inside[..., None]

    def _erased(self, x: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        side = (drawn[:, 2:] % np.uint64(self.erase + 1)).astype(np.int64)
        return x * ~boxes(x.shape[1:3], drawn[:, :2], np.repeat(side, 2, 1))[..., None]

    def _pasted(
        self, x: np.ndarray, guests: np.ndarray, drawn: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """x with a box of the guest in some, and the share (b) of its area."""
        chance, area = (drawn[:, 2:] / 2.0**64).T
        ratio = np.where(chance < self.paste, np.sqrt(area), 0.0)[:, None]
        inside = boxes(x.shape[1:3], drawn[:, :2], (ratio * x.shape[1:3]).astype(np.int64))
        return np.where(inside[..., None], guests, x), inside.mean((1, 2), dtype=np.float32)

    def describe(self) -> str:
        size = "{1} x {0}".format(*self.pictures.values.shape[1:3])
        return f"{len(self.pictures):,} pictures of {size}; {self.epoch:,} batches a pass"


def boxes(size: tuple[int, ...], drawn: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Where (b h w) a box with these sides (b 2) is, its middle anywhere by two draws (b 2); the rest is cut off."""
    first = (drawn % np.array(size, np.uint64)).astype(np.int64) - sides // 2  # top, left
    rows, columns = (
        (np.arange(n) >= first[:, a, None]) & (np.arange(n) < (first + sides)[:, a, None])
        for a, n in enumerate(size)
    )
    return rows[:, :, None] & columns[:, None]
