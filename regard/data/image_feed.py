"""Batches of pictures: with a class each, with a text that a decoder writes, or with a text of which each is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch

from regard.config import Share, ranged
from regard.data.feed import IGNORE, Base, Batch, Batching, framed, tensors
from regard.data.samplers import CHANGES, PASTES, ShuffleSampler, draws
from regard.data.shards import Column
from regard.errors import UsageError


@dataclass(eq=False)
@ranged
class ImageFeed(Base):
    """Pictures, bytes (n h w c), and a class for each: x / 255, minus `mean`, over `std`.

    While training, each is moved by at most `shift` pixels either way (black comes in) and, with `flip`, mirrored every
    other time; into the share `paste` of them a piece of the batch's next picture is pasted, of any size, and its class
    is counted by area (CutMix, Yun et al. 2019)."""

    pictures: Column
    labels: Column
    batching: Batching
    _: KW_ONLY
    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.5,)
    shift: int = 0
    flip: bool = False
    paste: Share = 0.0
    held: ImageFeed | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.batching.rows is None:
            raise UsageError("a batch of pictures is counted in rows: rows = N")
        self.order = ShuffleSampler(len(self.pictures), self.batching.rows, self.batching.seed)
        changes: dict[str, Any] = {"mean": list(self.mean), "std": list(self.std)}
        changes |= {"shift": self.shift, "flip": self.flip}
        changes |= {"paste": self.paste} if self.paste else {}
        self.sign({"pictures": self.pictures, "labels": self.labels}, **changes)

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        rows = np.arange(len(numbers))[part]
        labels = self.labels.at(numbers).astype(np.int64)
        more = {}
        if k is None or not self.paste:
            x = self._changed(numbers, rows, k)
        else:
            further = (rows + 1) % len(numbers)
            x = self._changed(numbers, np.append(rows, further[-1]), k)
            # A box of the next picture in some, of any size and anywhere; 0 pixels in the others.
            drawn = self._draws(PASTES, k, len(numbers), 4)[rows]
            chance, area = (drawn[:, 2:] / 2.0**64).T
            ratio = np.where(chance < self.paste, np.sqrt(area), 0.0)[:, None]
            inside = boxes(x.shape[1:3], drawn[:, :2], (ratio * x.shape[1:3]).astype(np.int64))
            x = np.where(inside[..., None], x[1:], x[:-1])
            area = inside.mean((1, 2), dtype=np.float32)
            more = {"pasted_labels": labels[further], "pasted_area": area}
        mean, std = (np.array(n, np.float32).reshape(-1, 1, 1) for n in (self.mean, self.std))
        x = (x.transpose(0, 3, 1, 2).astype(np.float32) / 255 - mean) / std
        more |= {"ids": np.ascontiguousarray(x), "labels": labels[rows]}
        return Batch(**{name: torch.from_numpy(x) for name, x in more.items()})

    def _draws(self, purpose: int, k: int, n: int, each: int) -> np.ndarray:
        return draws(self.batching.seed, purpose, k, each * n).reshape(-1, each)

    def _changed(self, numbers: np.ndarray, rows: np.ndarray, k: int | None) -> np.ndarray:
        """These rows of a batch: moved and mirrored, if it is the k-th of training."""
        x = self.pictures.at(numbers[rows])
        height, width = x.shape[1:3]
        if k is not None and (self.shift or self.flip):
            drawn = self._draws(CHANGES, k, len(numbers), 3)[rows]
            by = self.shift
            black = np.pad(x, ((0, 0), (by, by), (by, by), (0, 0)))
            from_ = (drawn[:, :2] % np.uint64(2 * by + 1)).astype(np.int64)
            down = np.arange(height) + from_[:, :1]
            right = np.arange(width) + from_[:, 1:]
            if self.flip:
                right = np.where(drawn[:, 2:] & np.uint64(1), right[:, ::-1], right)
            x = black[np.arange(len(x))[:, None, None], down[:, :, None], right[:, None]]
        return x

    def describe(self) -> str:
        size = "{1} x {0}".format(*self.pictures.values.shape[1:3])
        return f"{len(self.pictures):,} pictures of {size}; {self.epoch:,} batches a pass"


@dataclass(eq=False)
class CaptionFeed(ImageFeed):
    """Pictures as an ImageFeed has them, for an encoder, and a text for each: a decoder reads `start` text and must say
    text `end`."""

    _: KW_ONLY
    texts: Column
    start: int
    end: int
    pad: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sizes = self.texts.lengths + 1
        special = {"start": self.start, "end": self.end, "pad": self.pad}
        self.sign({"texts": self.texts}, texts=self.texts.fingerprint, **special)

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        assert self.sizes is not None
        pictures = super().make(numbers, part, k).ids
        whole = self.sizes[numbers]
        steps = whole[part]
        width = self.batching.width(whole)
        text = (self.texts.values, self.texts.starts(numbers[part]), steps - 1, width)
        ids = framed(*text, self.pad, (self.start,))
        labels = framed(*text, IGNORE, (), (self.end,))
        return tensors(ids, labels, steps, whole, source=pictures.numpy())


@dataclass(eq=False)
class DrawingFeed(ImageFeed):
    """Texts for an encoder, between the tokens `around`, and the picture that is to be drawn of each, as an ImageFeed
    has it: its pixels are the labels."""

    _: KW_ONLY
    texts: Column
    around: tuple[Sequence[int], Sequence[int]] = ((), ())
    pad: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sizes = self.texts.lengths + sum(map(len, self.around))
        special = {"around": [list(side) for side in self.around], "pad": self.pad}
        self.sign({"texts": self.texts}, texts=self.texts.fingerprint, **special)

    def make(self, numbers: np.ndarray, part: slice, k: int | None) -> Batch:
        assert self.sizes is not None
        pictures = super().make(numbers, part, k).ids
        whole, own = self.sizes[numbers], self.texts.lengths[numbers[part]]
        text = (
            self.texts.values,
            self.texts.starts(numbers[part]),
            own,
            self.batching.width(whole),
        )
        ids = framed(*text, self.pad, *self.around)
        return tensors(ids, pictures.numpy(), whole[part], whole)


def boxes(size: tuple[int, ...], drawn: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Where (b h w) a box with these sides (b 2) is, its middle anywhere by two draws (b 2); the rest is cut off."""
    first = (drawn % np.array(size, np.uint64)).astype(np.int64) - sides // 2
    rows, columns = (
        (np.arange(n) >= first[:, a, None]) & (np.arange(n) < (first + sides)[:, a, None])
        for a, n in enumerate(size)
    )
    return rows[:, :, None] & columns[:, None]
