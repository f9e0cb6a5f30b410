"""Feeds of examples that have an answer: `PairFeed` for translation and its like, `LabelFeed` for classes of texts,
tokens and spans, `ImageFeed` for pictures. See regard.data.feed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import torch

from regard.data.batch import IGNORE, UNANSWERED, Batch
from regard.data.feed import Base, Batching, tensors
from regard.data.files import DataError
from regard.data.pack import CHANGES, HOLES, PASTES, Buckets, Deck, cut, draws, framed
from regard.data.shards import Column, digest
from regard.errors import UsageError

Around = tuple[Sequence[int], Sequence[int]]  # ids in front of a text and behind it


def ends_of(around: Around, batching: Batching) -> tuple[tuple[int, ...], tuple[int, ...]]:
    before, after = (tuple(side) for side in around)
    if batching.length is not None and batching.length <= len(before) + len(after):
        raise UsageError(
            f"length = {batching.length} leaves no room beside {len(before) + len(after)} special tokens"
        )
    return before, after


class PairFeed(Base):
    """A source to read and a target to write, in batches of about one length.

    The encoder reads `before` source `after`; the decoder reads `start` target and must say target `end`. A target that
    was truncated has no end."""

    def __init__(
        self,
        source: Column,
        target: Column,
        batching: Batching,
        *,
        start: int,
        end: int,
        pad: int = 0,
        around: Around = ((), ()),
        held: PairFeed | None = None,
        fingerprint: str = "",
    ):
        if len(source) != len(target):
            raise DataError(f"{len(source):,} sources and {len(target):,} targets; they must agree")
        if batching.overlong == "split":
            raise UsageError("a pair cannot be split; say overlong = error, truncate or drop")
        self.source, self.target, self.batching = source, target, batching
        self.start, self.end, self.pad = start, end, pad
        self.before, self.after = ends_of(around, batching)
        self.held = held
        self._lay()
        self.epoch = self.order.epoch
        name = fingerprint or digest([source.fingerprint, target.fingerprint])
        special = {"start": start, "end": end, "pad": pad, "around": [self.before, self.after]}
        self.fingerprint = self.sign(name, **asdict(batching), **special)

    def _lay(self) -> None:
        b, ends = self.batching, len(self.before) + len(self.after)
        read, said = self.source.lengths + ends, self.target.lengths + 1
        cuts = [
            cut(n, b.length, b.overlong, what) for n, what in ((read, "source"), (said, "target"))
        ]
        kept = self.kept = np.intersect1d(cuts[0].row, cuts[1].row)
        if not len(kept):
            raise DataError(f"every pair is longer than {b.length} tokens, and was dropped")
        limit = np.iinfo(np.int64).max if b.length is None else b.length
        over = int(((read > limit) | (said > limit)).sum())
        self.cut = replace(cuts[0], over=over)
        self.read = np.minimum(read[kept], limit)
        self.said = np.minimum(said[kept], limit)
        widest = b.padded(np.maximum(self.read, self.said))
        self.order = Buckets(widest, b.tokens, b.rows, b.seed)

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        read, said = self.read[numbers], self.said[numbers]
        widths = [int(self.batching.padded(sizes).max()) for sizes in (read, said)]
        row, sizes, steps = self.kept[numbers[part]], read[part], said[part]
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
        return tensors(ids, labels, steps, said, **more)

    def describe(self) -> str:
        real = int(self.read.sum() + self.said.sum())
        whole = sum(
            len(n) * int(self.batching.padded(x[n]).max())
            for n in self.order.fixed()
            for x in (self.read, self.said)
        )
        return (
            f"{len(self.kept):,} pairs, {self.read.sum():,} source and {self.said.sum():,} target tokens in "
            f"{self.epoch:,} batches a pass ({1 - real / whole:.1%} padding){self.cut.said()}"
        )


# --- labels -------------------------------------------------------------------------------------------------------


class LabelFeed(Base):
    """Texts with labels: one a text; one a token, as many as the text has; or first and last token of a span (n 2).

    The model reads `before` text `after`; labels of tokens and spans move along. A span that was cut off is not
    counted; one that is UNANSWERED is the row's first token, as BERT has it."""

    def __init__(
        self,
        texts: Column,
        labels: Column,
        batching: Batching,
        *,
        pad: int = 0,
        around: Around = ((), ()),
        held: LabelFeed | None = None,
        fingerprint: str = "",
    ):
        if len(texts) != len(labels):
            raise DataError(f"{len(texts):,} texts and {len(labels):,} labels; they must agree")
        if batching.overlong == "split":
            raise UsageError(
                "a labelled text cannot be split; say overlong = error, truncate, drop"
            )
        self.texts, self.labels, self.batching, self.pad = texts, labels, batching, pad
        self.before, self.after = ends_of(around, batching)
        self.held, b = held, batching
        ends = len(self.before) + len(self.after)
        self.cut = cut(texts.lengths + ends, b.length, b.overlong, "text")
        if not len(self.cut.row):
            raise DataError(f"every text is longer than {b.length} tokens, and was dropped")
        self.order = Buckets(b.padded(self.cut.size), b.tokens, b.rows, b.seed)
        self.epoch = self.order.epoch
        name = fingerprint or digest([texts.fingerprint, labels.fingerprint])
        special = {"pad": pad, "around": [self.before, self.after]}
        self.fingerprint = self.sign(name, **asdict(batching), **special)

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
        found = values[row].astype(np.int64)
        if found.ndim == 2:
            none = (found == UNANSWERED).all(1)
            lost = (found >= size[:, None]).any(1) | (found < 0).any(1)
            found = np.where(lost[:, None], IGNORE, found + len(self.before))
            found[none] = 0
        return found

    def describe(self) -> str:
        said = f"{len(self.cut.row):,} texts, {self.cut.size.sum():,} tokens"
        return f"{said}; {self.epoch:,} batches a pass{self.cut.said()}"


class ImageFeed(Base):
    """Pictures, bytes (n h w c), and a class for each: x / 255, minus `mean`, over `std`.

    While training, each is moved by at most `shift` pixels either way (black comes in) and, with `flip`, mirrored every
    other time; a square of up to `erase` pixels a side, somewhere, becomes black (DeVries and Taylor 2017);
    into the share `paste` of them a piece of the batch's next picture is pasted, of any size, and its class is counted
    by area (CutMix, Yun et al. 2019)."""

    def __init__(
        self,
        pictures: Column,
        labels: Column,
        batching: Batching,
        *,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
        shift: int = 0,
        flip: bool = False,
        erase: int = 0,
        paste: float = 0.0,
        held: ImageFeed | None = None,
        fingerprint: str = "",
    ):
        if len(pictures) != len(labels):
            raise DataError(f"{len(pictures):,} pictures, {len(labels):,} labels; they must agree")
        if batching.rows is None:
            raise UsageError("a batch of pictures is counted in rows: rows = N")
        if not 0.0 <= paste <= 1.0:
            raise UsageError(f"paste = {paste}: give a share from 0 to 1, for example 0.5")
        self.pictures, self.labels, self.batching = pictures, labels, batching
        self.mean, self.std = (np.array(x, np.float32).reshape(-1, 1, 1) for x in (mean, std))
        self.shift, self.flip, self.erase, self.paste, self.held = shift, flip, erase, paste, held
        self.order = Deck(len(pictures), batching.rows, batching.seed)
        self.epoch = self.order.epoch
        name = fingerprint or digest([pictures.fingerprint, labels.fingerprint])
        changes = {"mean": list(mean), "std": list(std), "shift": shift, "flip": flip}
        changes |= {n: x for n, x in {"erase": erase, "paste": paste}.items() if x}
        self.fingerprint = self.sign(name, **asdict(batching), **changes)

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        rows = np.arange(len(numbers))[part]
        labels, more = self.labels.values[numbers].astype(np.int64), {}
        if k is None or not self.paste:
            x = self._changed(numbers, rows, k)
        else:
            further = (rows + 1) % len(numbers)
            x = self._changed(numbers, np.append(rows, further[-1]), k)
            drawn = draws(self.batching.seed, PASTES, k, 4 * len(numbers)).reshape(-1, 4)[rows]
            x, share = self._pasted(x[:-1], x[1:], drawn)
            more = {"guests": torch.from_numpy(labels[further]), "share": torch.from_numpy(share)}
        x = (x.transpose(0, 3, 1, 2).astype(np.float32) / 255 - self.mean) / self.std
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
