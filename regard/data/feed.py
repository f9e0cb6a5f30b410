"""Batches: what a training step is given, whatever the task, and the feeds that they come from. `TextFeed` is for
language models, `PairFeed` for translation and its like, `LabelFeed` for classes of texts, tokens and spans;
image_feed.py has those of pictures.

A feed holds arrays of numbers (mapped from disk or not) and settings; batch k is a function of them and of k, so that
no state has to be saved: it can be made at any time, in any process. `held` is a second feed over the data that is only
measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from regard.config import Choice, Count, Seed, settings
from regard.data.samplers import (
    OVERLONG,
    BucketSampler,
    PackSampler,
    ShuffleSampler,
    StreamSampler,
    cut,
    ranges,
)
from regard.data.shards import Column, Joined, digest
from regard.data.source import DataError
from regard.errors import UsageError, check_choice

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
    labels: Tensor  # b t, or b for one label per row
    lengths: Tensor | None = None  # b: real tokens of ids; None: all
    source: Tensor | None = None  # b s: what an encoder reads
    source_lengths: Tensor | None = None
    doc: Tensor | None = None  # b t: the document of each packed token
    prefix: Tensor | None = None  # b t: where in its row the prefix of each token's document ends
    types: Tensor | None = None  # b t: 1 in the second of two texts
    rejected: Tensor | None = None  # b t: the worse answer, beside ids, the better one
    rejected_labels: Tensor | None = None
    pasted_labels: Tensor | None = None  # b: the class of what was pasted into each image
    pasted_area: Tensor | None = None  # b: how much of each image that is, from 0 to 1
    own: Tensor | None = None  # b t: in place of these ids the model reads what it says itself

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


def drawing(*key: int | str) -> torch.Generator:
    """A generator of torch that depends on these numbers and words alone."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def seed_of(seed: int, step: int) -> int:
    """The seed of torch's own numbers in a step: a function of both, and of nothing before."""
    return int(hashlib.sha256(f"{seed}:{step}".encode()).hexdigest()[:15], 16)


def framed(
    values: np.ndarray | Joined,
    starts: np.ndarray,
    sizes: np.ndarray,
    width: int,
    pad: int,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
) -> np.ndarray:
    """Rows (b width): `before`, sizes[i] numbers of `values` from starts[i] on, `after`, then `pad`."""
    rows = np.full((len(starts), width), pad, dtype=np.int64)
    rows[:, : len(before)] = before
    place = np.arange(width) - len(before)
    rows[(place >= 0) & (place < sizes[:, None])] = values[ranges(starts, sizes)]
    for i, token in enumerate(after):
        rows[np.arange(len(rows)), len(before) + sizes + i] = token
    return rows


# --- what all feeds share ---------------------------------------------------------------------------------------


@settings
class Batching:
    """How examples become batches: at most `rows` rows and `tokens` tokens (of a side, padding included) in each.

    A row has at most `length` tokens; `overlong` says what happens to longer examples. Padding reaches to a multiple of
    `multiple`."""

    length: Count | None = None
    rows: Count | None = None
    tokens: Count | None = None
    overlong: Annotated[str, Choice(OVERLONG)] = "error"
    multiple: Count = 1
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.rows is None and self.tokens is None:
            raise UsageError("say how large a batch is: rows = N, or tokens = N")

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        return -(-lengths // self.multiple) * self.multiple

    def width(self, lengths: np.ndarray) -> int:
        """Of a batch of rows with these lengths."""
        return int(self.padded(lengths).max())


class Base:
    """What the feeds share: a rank's part of a batch, the evaluation, the fingerprint."""

    order: ShuffleSampler | BucketSampler | StreamSampler
    batching: Batching
    held: Base | None
    fingerprint: str
    # What older versions, which dealt the same data in another order, called this feed.
    earlier: str = ""
    # Tokens of each row, of its longer side; None where rows have none.
    sizes: np.ndarray | None = None

    @property
    def longest(self) -> int | None:
        """Tokens of the longest row, padding included, of a side."""
        return None if self.sizes is None else self.batching.width(self.sizes)

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

    def sign(self, columns: dict[str, Column], **settings: Any) -> None:
        """Make the fingerprint one of the data, which may have one already, and of all settings. Columns must have one
        row for each example."""
        if len({len(column) for column in columns.values()}) > 1:
            counts = " and ".join(f"{len(column):,} {name}" for name, column in columns.items())
            raise DataError(f"{counts}; they must agree")
        data: Any = self.fingerprint or [column.fingerprint for column in columns.values()]
        if not self.fingerprint:
            data = digest(data) if len(data) > 1 else data[0]
        settings |= {"kind": type(self).__name__, **asdict(self.batching)}
        older = {"data": self.earlier or data, "held": self.held and self.held.earlier}
        self.earlier = digest(settings | older)
        if version := getattr(getattr(self, "order", None), "version", None):
            settings["order"] = version
        settings |= {"data": data, "held": self.held and self.held.fingerprint}
        self.fingerprint = digest(settings)


def tensors(
    ids: np.ndarray, labels: np.ndarray, sizes: np.ndarray, whole: np.ndarray, **more: np.ndarray
) -> Batch:
    """Lengths are given if any row of the whole batch is padded, so that a part has them if the batch has."""
    if (whole < ids.shape[1]).any():
        more["lengths"] = sizes
    arrays: dict[str, Any] = {"ids": ids, "labels": labels, **more}
    return Batch(**{name: torch.from_numpy(x) for name, x in arrays.items()})


# --- language models --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TextFeed(Base):
    """Documents in rows of `length` tokens.

    pack = "documents": whole documents share a row; `doc` numbers them (-1: padding) so that none sees another, and no
    label is a token of the next one. "stream": all text end to end, cut into rows. "windows": rows from anywhere in it.
    "none": one document per row.

    With `shift`, label t is the token after ids t; else it is ids t (masked models). `prompts`: how many tokens at the
    start of each document are only read, never learned; `learned` says it of each token."""

    documents: Column
    batching: Batching
    _: KW_ONLY
    pack: str = "documents"
    shift: bool = True
    pad: int = 0
    prompts: np.ndarray | None = None
    learned: Column | None = None
    held: TextFeed | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        pack, prompts, b = self.pack, self.prompts, self.batching
        check_choice("pack", pack, PACKS)
        if b.length is None and pack != "none":
            raise UsageError(f"pack = {pack!r} needs the length of a row: length = N")
        self.extra = int(self.shift)
        self.flat = pack in ("stream", "windows")
        if (prompts is not None or self.learned is not None) and self.flat:
            what = "prompts" if self.learned is None else "turns"
            raise UsageError(f"pack = {pack!r} knows no {what}; choose documents or none")
        self.values = self.documents.stream if self.flat else self.documents.values
        if len(self.values) <= self.extra:
            raise DataError(f"{len(self.values)} tokens are too few to learn from; give more text")
        length = b.length or 1
        rows = b.rows or max((b.tokens or 0) // length, 1)
        self.sizes = np.array([length])
        if self.flat:
            random = pack == "windows"
            self.order = StreamSampler(len(self.values), length, self.extra, rows, b.seed, random)
        elif pack == "none":
            self._cut()
            self.sizes = self.size
            self.order = BucketSampler(b.padded(self.size), b.tokens, b.rows, b.seed)
        else:
            self._cut()
            self.order = PackSampler(self.size, length, rows, b.seed)
        settings = {"pack": pack, "shift": self.shift, "pad": self.pad}
        asked = None if prompts is None else Column(prompts).fingerprint
        if self.learned is not None:
            settings["learned"] = self.learned.fingerprint
        self.sign({"documents": self.documents}, **settings, prompts=asked)

    def _cut(self) -> None:
        """Find the pieces of text that lie side by side in rows."""
        b, documents = self.batching, self.documents
        limit = None if b.length is None else b.length + self.extra
        pieces = cut(documents.lengths, limit, b.overlong, "document", overlap=self.extra)
        # The others have no label.
        kept = pieces.size > self.extra
        if not kept.any():
            raise DataError("no document has a token to learn; give longer ones")
        short = int((~kept).sum())
        self.note = pieces.note + (f"; {short:,} too short to learn from" if short else "")
        self.row = pieces.row[kept]
        self.inside = pieces.start[kept]
        self.start = documents.starts(self.row) + self.inside
        self.size = pieces.size[kept] - self.extra

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        if isinstance(self.order, StreamSampler):
            return self._stretches(self.order, numbers, part, k)
        chosen = numbers[part]
        if isinstance(self.order, PackSampler):
            packed, bins = self.order.packing(k)
            counts = bins[numbers + 1] - bins[numbers]
            sizes = self.size[packed[ranges(bins[numbers], counts)]]
            whole = np.add.reduceat(sizes, np.cumsum(counts) - counts)
            width = self.batching.length or 1
            counts = counts[part]
            pieces = packed[ranges(bins[chosen], counts)]
        else:
            pieces = chosen
            counts = np.ones_like(chosen)
            whole = self.size[numbers]
            width = self.batching.width(whole)
        # Rows of `width`, row i with counts[i] pieces side by side.
        size = self.size[pieces]
        inside = self.inside[pieces]
        row = np.repeat(np.arange(len(counts)), counts)
        # Of a piece in its row: its number, and how many tokens stand before it.
        number = ranges(np.zeros_like(counts), counts)
        first = np.cumsum(counts) - counts
        starts = np.cumsum(size) - size
        before = starts - np.repeat(starts[first], counts)
        place = ranges(row * width + before, size)
        source = ranges(self.start[pieces], size)

        def rows(fill: int, values: np.ndarray) -> np.ndarray:
            array = np.full((len(counts), width), fill, np.int64)
            array.reshape(-1)[place] = values
            return array

        learned = self.values[source + self.extra].astype(np.int64)
        more = {}
        if self.pack == "documents":
            more["doc"] = rows(-1, np.repeat(number, size))
        if self.prompts is not None:
            prompts = self.prompts[self.row[pieces]]
            learned[ranges(inside + self.extra, size) < np.repeat(prompts, size)] = IGNORE
            kept = np.clip(prompts - inside, 0, size)
            more["prefix"] = rows(0, np.repeat(before + kept, size))
        if self.learned is not None:
            learned[self.learned.values[source + self.extra] == 0] = IGNORE
        ids = rows(self.pad, self.values[source])
        labels = rows(IGNORE, learned)
        return tensors(ids, labels, np.add.reduceat(size, first), whole, **more)

    def _stretches(
        self, stream: StreamSampler, numbers: np.ndarray, part: slice, k: int | None
    ) -> Batch:
        """Rows of a stream that begin at these numbers."""
        length = self.batching.length or 1
        whole = np.minimum(length, stream.n + stream.first(k) - numbers)
        sizes = whole[part]
        place = ranges(numbers[part], sizes)
        place[place >= stream.n] -= stream.n
        starts = np.cumsum(sizes) - sizes
        ids = framed(self.values[place], starts, sizes, length, self.pad)
        labels = framed(self.values[place + self.extra], starts, sizes, length, IGNORE)
        return tensors(ids, labels, sizes, whole)

    def labels(self) -> int:
        """Tokens that a pass learns: without prompts, what others say, and what was cut off."""
        size = self.size
        if self.prompts is not None:
            size = size - np.clip(self.prompts[self.row] - self.inside - self.extra, 0, size)
        if self.learned is None:
            return int(size.sum())
        count, said = 0, self.learned.values
        # A million tokens at a time.
        for part in np.array_split(np.arange(len(size)), 1 + (int(size.sum()) >> 20)):
            count += int((said[ranges(self.start[part] + self.extra, size[part])] != 0).sum())
        return count

    def describe(self) -> str:
        length, batches = self.batching.length or 1, f"; {self.epoch:,} batches a pass"
        if self.flat:
            how = "cut into rows" if self.pack == "stream" else "read in rows from anywhere, each"
            return f"{len(self.values):,} tokens {how} of {length:,}{batches}"
        text = f"{len(self.documents):,} {'documents' if self.learned is None else 'chats'}, "
        text += f"{self.labels():,} of {int(self.documents.lengths.sum()):,} tokens learned"
        if isinstance(self.order, PackSampler):
            rows = self.order.n
            empty = 1 - self.size.sum() / (rows * length)
            text += f", packed into {rows:,} rows of {length:,} ({empty:.2%} padding)"
        return text + batches + self.note


# --- examples that have an answer -------------------------------------------------------------------------------


def ends_of(around: Around, batching: Batching, what: str) -> tuple[tuple[int, ...], ...]:
    """What stands before and after a text that cannot be split."""
    if batching.overlong == "split":
        raise UsageError(f"{what} cannot be split; say overlong = error, truncate or drop")
    before, after = map(tuple, around)
    special = len(before) + len(after)
    length = batching.length
    if length is not None and length <= special:
        raise UsageError(f"length = {length} leaves no room beside {special} special tokens")
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
        b = self.batching
        self.before, self.after = ends_of(self.around, b, "a pair")
        special = {"start": self.start, "end": self.end, "pad": self.pad}
        columns = {"sources": self.source, "targets": self.target}
        self.sign(columns, **special, around=[self.before, self.after])
        self.lengths = self.target.lengths
        sizes = self.source.lengths + len(self.before) + len(self.after), self.lengths + 1
        if b.overlong == "error":
            for size, what in zip(sizes, ("source", "target")):
                cut(size, b.length, b.overlong, what)
        # A pair is as long as its longer side.
        pieces = cut(np.maximum(*sizes), b.length, b.overlong, "pair")
        self.kept, self.sizes, self.note = pieces.row, pieces.size, pieces.note
        self.source_sizes, self.target_sizes = (
            np.minimum(n[self.kept], self.sizes.max()) for n in sizes
        )
        self.order = BucketSampler(b.padded(self.sizes), b.tokens, b.rows, b.seed)

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        read = self.source_sizes[numbers]
        written = self.target_sizes[numbers]
        source_width = self.batching.width(read)
        width = self.batching.width(written)
        row = self.kept[numbers[part]]
        sizes = read[part]
        steps = written[part]
        size = sizes - len(self.before) - len(self.after)
        around = (self.pad, self.before, self.after)
        values = self.source.values
        starts = self.source.starts(row)
        more = {"source": framed(values, starts, size, source_width, *around)}
        if (read < source_width).any():
            more["source_lengths"] = sizes
        values = self.target.values
        starts = self.target.starts(row)
        whole = self.lengths[row]
        ids = framed(values, starts, steps - 1, width, self.pad, (self.start,))
        labels = framed(values, starts, np.minimum(whole, steps), width, IGNORE)
        ended = np.flatnonzero(whole < steps)
        labels[ended, whole[ended]] = self.end
        return tensors(ids, labels, steps, written, **more)

    def describe(self) -> str:
        sides = (self.source_sizes, self.target_sizes)
        real = [int(sizes.sum()) for sizes in sides]
        padded = sum(len(n) * self.batching.width(x[n]) for n in self.order.fixed() for x in sides)
        return (
            f"{len(self.kept):,} pairs, {real[0]:,} source and {real[1]:,} target tokens in "
            f"{self.epoch:,} batches a pass ({1 - sum(real) / padded:.1%} padding){self.note}"
        )


@dataclass(eq=False)
class PreferFeed(Base):
    """Pairs of a better and a worse answer, each side with its prompt (a column) and which of its tokens are the answer
    (another; None: all), in batches of about one length."""

    chosen: tuple[Column, Column | None]
    worse: tuple[Column, Column | None]
    batching: Batching
    _: KW_ONLY
    pad: int = 0
    held: PreferFeed | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        b = self.batching
        ends_of(((), ()), b, "a pair")
        lengths = np.maximum(*(side[0].lengths for side in (self.chosen, self.worse)))
        most = None if b.length is None else b.length + 1
        pieces = cut(lengths, most, b.overlong, "answer", overlap=1)
        self.note = pieces.note
        one: dict[str, Any] = {"batching": replace(b, overlong="truncate"), "pack": "none"}
        self.sides = []
        for ids, learned in (self.chosen, self.worse):
            said = None if learned is None else learned.take(pieces.row)
            self.sides.append(TextFeed(ids.take(pieces.row), pad=self.pad, learned=said, **one))
        columns = {"chosen": self.chosen[0], "rejected": self.worse[0]}
        self.sign(columns, sides=[side.fingerprint for side in self.sides])
        self.sizes = np.maximum(*(side.size for side in self.sides))
        self.order = BucketSampler(b.padded(self.sizes), b.tokens, b.rows, b.seed)

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        better, worse = (side.make(numbers, part, k) for side in self.sides)
        return replace(better, rejected=worse.ids, rejected_labels=worse.labels)

    def describe(self) -> str:
        tokens = sum(int(side.size.sum()) for side in self.sides)
        pairs = len(self.sides[0].size)
        return f"{pairs:,} pairs of answers, {tokens:,} tokens; {self.epoch:,} batches a pass{self.note}"


@dataclass(eq=False)
class LabelFeed(Base):
    """Texts with labels: one per text; one per token, as many as the text has; or first and last token of a span (n 2).

    The model reads `before` text `after`; labels of tokens and spans move along. A span that was cut off is not
    counted; one that is UNANSWERED is the row's first token, as BERT has it. Where texts hold a `divider`, what stands
    behind it is of type 1."""

    texts: Column
    labels: Column
    batching: Batching
    _: KW_ONLY
    pad: int = 0
    around: Around = ((), ())
    divider: int | None = None
    held: LabelFeed | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        b = self.batching
        self.before, self.after = ends_of(self.around, b, "a labelled text")
        columns = {"texts": self.texts, "labels": self.labels}
        if self.divider not in self.texts[0]:
            self.divider = None
        types = {} if self.divider is None else {"divider": self.divider}
        self.sign(columns, pad=self.pad, around=[self.before, self.after], **types)
        ends = len(self.before) + len(self.after)
        self.cut = cut(self.texts.lengths + ends, b.length, b.overlong, "text")
        self.sizes = self.cut.size
        self.order = BucketSampler(b.padded(self.sizes), b.tokens, b.rows, b.seed)

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        whole = self.cut.size[numbers]
        width = self.batching.width(whole)
        sizes = whole[part]
        row = self.cut.row[numbers[part]]
        size = sizes - len(self.before) - len(self.after)
        starts = self.texts.starts(row)
        ids = framed(self.texts.values, starts, size, width, self.pad, self.before, self.after)
        each = self.labels.ends is not None
        if each:
            values = self.labels.values
            starts = self.labels.starts(row)
            labels = framed(values, starts, size, width, IGNORE, (IGNORE,) * len(self.before))
        else:
            labels = self.labels.at(row).astype(np.int64)
        if not each and labels.ndim == 2:
            none = (labels == UNANSWERED).all(1)
            lost = (labels >= size[:, None]).any(1) | (labels < 0).any(1)
            labels = np.where(lost[:, None], IGNORE, labels + len(self.before))
            labels[none] = 0
        types = {} if self.divider is None else {"types": types_of(ids, self.divider)}
        return tensors(ids, labels, sizes, whole, **types)

    def describe(self) -> str:
        text = f"{len(self.cut.row):,} texts, {self.cut.size.sum():,} tokens"
        return f"{text}; {self.epoch:,} batches a pass{self.cut.note}"


def types_of(ids: Any, divider: int) -> Any:
    """1 behind the first divider of each row, else 0."""
    found = ids == divider
    return ((found.cumsum(1) - 1 * found) > 0) * 1
