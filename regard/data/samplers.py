"""Samplers: which examples make a batch, and in what order: shuffled, packed into rows, in buckets
of about one length, or cut out of a stream. And how examples that are too long are cut.

Every order is a function of (seed, pass over the data) by a counter-based generator (Philox), so
that no state has to be saved: batch k can be made at any time, in any process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from regard.data.source import DataError

OVERLONG = ("error", "truncate", "drop", "split")
# What numbers are drawn for; a number that was given once keeps its meaning.
ORDER, BATCHES, WINDOWS, CHANGES, PASTES, COMPANY, BORDERS = 0, 1, 2, 3, 5, 6, 7
# Lengths in a bucket differ at most by this factor.
WIDER = 1.1
# How often pieces of about one size may trade places before a pass: with the next one, the second next, the fourth,
# and so on, REACH powers of two. Of MANY pieces more have one size, and less often will do.
SWEEPS = 64
FEWER = 16
MANY = 1 << 16
REACH = 8


def draws(seed: int, purpose: int, k: int, count: int) -> np.ndarray:
    """64-bit numbers, uniform and independent, by (seed, purpose, k). Raw words of Philox, which numpy promises to keep
    from version to version."""
    return np.random.Philox(key=[seed, purpose], counter=[0, 0, 0, k]).random_raw(count)


class ShuffleSampler:
    """n examples dealt `rows` at a time, each once per pass, shuffled anew for each pass. The last batch of a pass has
    those that are left."""

    # Of the order: before, a batch could end one pass and begin the next.
    version: ClassVar[int] = 2

    def __init__(self, n: int, rows: int, seed: int):
        self.n = n
        self.rows = min(rows, n)
        self.seed = seed
        self.epoch = -(-n // self.rows)
        self._pass: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def take(self, k: int) -> np.ndarray:
        number, i = divmod(k, self.epoch)
        if self._pass[0] != number:
            keys = draws(self.seed, ORDER, number, self.n)
            self._pass = (number, np.argsort(keys, kind="stable"))
        return self._pass[1][i * self.rows : (i + 1) * self.rows]

    def fixed(self) -> Iterator[np.ndarray]:
        """Every example once, in order."""
        return (np.arange(self.n)[i : i + self.rows] for i in range(0, self.n, self.rows))


class PackSampler(ShuffleSampler):
    """Pieces of text packed into rows of `room` tokens, which are dealt. In every pass a piece has other company:
    pieces of one size trade places, and so do those of about one size where there is room for the longer one. So all
    passes have as many rows."""

    def __init__(self, sizes: np.ndarray, room: int, rows: int, seed: int):
        self.sizes = sizes
        order, starts = best_fit(sizes, room)
        counts = np.diff(starts)
        super().__init__(len(counts), rows, seed)
        self.base = order, starts
        # The row of each piece, the longest piece first; and the room that is left in each row.
        place = np.empty_like(order)
        place[order] = np.repeat(np.arange(len(counts)), counts)
        self.row = place[np.argsort(-sizes, kind="stable")]
        self.spare = room - np.bincount(place, sizes).astype(np.int64)
        self._packing: tuple[int, tuple[np.ndarray, np.ndarray]] = (-1, self.base)

    def packing(self, k: int | None) -> tuple[np.ndarray, np.ndarray]:
        """(pieces, starts) for the pass of batch k: row i has pieces[starts[i]:starts[i + 1]]."""
        if k is None:
            return self.base
        number = k // self.epoch
        if self._packing[0] != number:
            self._packing = (number, self._packed(number))
        return self._packing[1]

    def _packed(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        keys = draws(self.seed, COMPANY, number, len(self.sizes))
        pieces = np.lexsort((keys, -self.sizes))
        size = self.sizes[pieces]
        coins = keys[pieces]
        row = self.row.copy()
        spare = self.spare.copy()
        for sweep in range(SWEEPS if len(row) < MANY else FEWER):
            step = sweep % REACH
            longer = np.arange(max(len(row) - (1 << step), 0))
            longer = longer[(longer >> step) % 2 == 0]
            drawn = (coins[longer] >> np.uint64(sweep)) % np.uint64(2) == 1
            longer = longer[drawn]
            other = longer + (1 << step)
            more = size[longer] - size[other]
            # A row takes all that it is offered, or nothing.
            fits = (np.bincount(row[other], more, len(spare)) <= spare)[row[other]]
            longer = longer[fits]
            other = other[fits]
            more = more[fits]
            gains = [np.bincount(row[side], more, len(spare)) for side in (longer, other)]
            spare = spare + (gains[0] - gains[1]).astype(np.int64)
            row[longer], row[other] = row[other], row[longer]
        counts = np.bincount(row, minlength=len(spare))
        return pieces[np.argsort(row, kind="stable")], np.cumsum([0, *counts])


class BucketSampler:
    """Examples of about one length together: a batch has at most `tokens` tokens, padding included, and at most `rows`
    rows. Each pass has every example once; which ones meet, and the order of the batches, is shuffled for each pass."""

    def __init__(self, lengths: np.ndarray, tokens: int | None, rows: int | None, seed: int):
        self.n = len(lengths)
        self.seed = seed
        tokens = tokens or int(lengths.max()) * self.n
        if lengths.max() > tokens:
            raise DataError(
                f"an example has {lengths.max():,} tokens, a batch holds {tokens:,}; say a larger tokens, or drop or "
                "truncate such examples by length and overlong"
            )
        rows = rows or self.n
        # The longest length of each bucket: at most WIDER times the shortest, but enough examples
        # for two batches, or they would always be the same.
        limits: list[int] = []
        first = last = int(lengths.min())
        held = 0
        for length, more in zip(*(x.tolist() for x in np.unique(lengths, return_counts=True))):
            if held >= 2 * min(rows, tokens // length) and length > first * WIDER:
                limits.append(last)
                first, held = length, 0
            held = held + more
            last = length
        limits.append(last)
        self.bucket = np.searchsorted(limits, lengths)
        sizes: list[int] = []
        for count, limit in zip(np.bincount(self.bucket, minlength=len(limits)), limits):
            batches = -(-int(count) // min(rows, tokens // limit))
            sizes += [len(part) for part in np.array_split(np.arange(count), batches)]
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.epoch = len(sizes)
        self._pass: tuple[int, np.ndarray, np.ndarray] = (-1, self.starts, self.starts)

    def take(self, k: int) -> np.ndarray:
        number, i = divmod(k, self.epoch)
        if self._pass[0] != number:
            keys = draws(self.seed, ORDER, number, self.n)
            batches = np.argsort(draws(self.seed, BATCHES, number, self.epoch), kind="stable")
            self._pass = (number, np.lexsort((keys, self.bucket)), batches)
        _, order, batches = self._pass
        return order[self.starts[batches[i]] : self.starts[batches[i] + 1]]

    def fixed(self) -> Iterator[np.ndarray]:
        order = np.argsort(self.bucket, kind="stable")
        return (order[a:b] for a, b in pairwise(self.starts))


class StreamSampler:
    """Where rows of `length` tokens begin in a stream of n tokens, of which the last `extra` are labels alone. Rows lie
    side by side and each token is read once per pass; where the first row begins is drawn for each pass, and behind the
    last token comes the first. Or rows begin anywhere (`random`), as nanoGPT draws them."""

    def __init__(self, n: int, length: int, extra: int, rows: int, seed: int, random: bool):
        self.n = n - extra
        self.length = length
        self.seed = seed
        self.random = random
        count = max(self.n // length, 1) if random else -(-self.n // length)
        self.shuffle = ShuffleSampler(count, rows, seed)
        self.rows = rows if random else self.shuffle.rows
        self.epoch = self.shuffle.epoch
        self.version = None if random else ShuffleSampler.version

    def first(self, k: int | None) -> int:
        """Where the first row of the pass of batch k begins."""
        if k is None or self.random or self.n <= self.length:
            return 0
        return int(draws(self.seed, BORDERS, k // self.epoch, 1)[0] % np.uint64(self.n))

    def take(self, k: int) -> np.ndarray:
        if not self.random:
            return self.shuffle.take(k) * self.length + self.first(k)
        places = max(self.n - self.length + 1, 1)
        return (draws(self.seed, WINDOWS, k, self.rows) % np.uint64(places)).astype(np.int64)

    def fixed(self) -> Iterator[np.ndarray]:
        """The whole stream; its last row may be shorter."""
        starts = np.arange(0, self.n, self.length)
        return (starts[i : i + self.rows] for i in range(0, len(starts), self.rows))


# --- laying examples into rows ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pieces:
    """What is kept of examples: `size` numbers of row `row` from `start` on; `note` says how many were too long, and
    what became of them."""

    row: np.ndarray
    start: np.ndarray
    size: np.ndarray
    note: str


def cut(
    lengths: np.ndarray, limit: int | None, policy: str, what: str, *, overlap: int = 0
) -> Pieces:
    """Examples cut to `limit` tokens by the policy. Pieces of a split one share `overlap` tokens: what is only a label
    in one is what the next one reads first."""
    row = np.arange(len(lengths))
    size = lengths.astype(np.int64)
    start = np.zeros_like(size)
    long = size > (np.iinfo(np.int64).max if limit is None else limit)
    if limit is None or not long.any():
        return Pieces(row, start, size, "")
    over = f"{long.sum():,}"
    step = limit - overlap
    if policy == "error":
        raise DataError(
            f"the longest {what} has {size.max() - overlap:,} tokens, a row holds {step:,} ({over} of "
            f"{len(size):,} are longer); say a larger length, or overlong = truncate, drop or split"
        )
    if policy == "drop":
        if long.all():
            raise DataError(f"every {what} is longer than {step:,} tokens, and was dropped")
        row = row[~long]
        start = start[~long]
        size = size[~long]
    elif policy == "truncate":
        size = np.minimum(size, limit)
    else:
        count = np.maximum(-(-(size - overlap) // step), 1)
        row = np.repeat(row, count)
        start = ranges(np.zeros_like(count), count) * step
        size = np.minimum(size[row] - start, limit)
    done = {"truncate": "truncated", "drop": "dropped", "split": "split"}[policy]
    return Pieces(row, start, size, f"; {over} longer than {step:,} tokens: {done}")


def best_fit(sizes: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack things into bins: longest first, each into the fullest bin that still has room for it.

    The answer is (order, starts): bin i has order[starts[i]:starts[i + 1]]."""
    bins: list[list[int]] = []
    # Bins by the room left in them; bit r of `some` is set where free[r] is not empty.
    free: list[list[int]] = [[] for _ in range(room + 1)]
    some = 0
    for i in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[i])
        fits = some >> size
        if fits:
            left = size + (fits & -fits).bit_length() - 1
            box = free[left].pop()
            if not free[left]:
                some &= ~(1 << left)
        else:
            left = room
            box = len(bins)
            bins.append([])
        bins[box].append(i)
        free[left - size].append(box)
        some |= 1 << (left - size)
    order = np.array([i for box in bins for i in box], dtype=np.int64)
    return order, np.cumsum([0, *map(len, bins)])


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... for sizes[0] numbers, then the same for the next."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)
