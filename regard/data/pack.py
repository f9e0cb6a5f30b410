"""Which examples make a batch, and how they are laid into rows: arrays of numbers only.

Every order is a function of (seed, pass over the data) by a counter-based generator (Philox), so that no state has to
be saved: batch k can be made at any time, in any process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from regard.data.read import DataError
from regard.errors import UsageError, nearest

OVERLONG = ("error", "truncate", "drop", "split")
ORDER, BATCHES, WINDOWS, CHANGES, HOLES, PASTES = range(6)  # what numbers are drawn for
WIDER = 1.1  # lengths in a bucket differ at most by this factor


def draws(seed: int, purpose: int, k: int, count: int) -> np.ndarray:
    """64-bit numbers, uniform and independent, by (seed, purpose, k). Raw words of Philox, which numpy promises to keep
    from version to version."""
    return np.random.Philox(key=[seed, purpose], counter=[0, 0, 0, k]).random_raw(count)


def drawing(*key: int | str) -> torch.Generator:
    """A generator of torch that depends on these numbers and words alone."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def seed_of(seed: int, step: int) -> int:
    """The seed of torch's own numbers in a step: a function of both, and of nothing before."""
    return int(hashlib.sha256(f"{seed}:{step}".encode()).hexdigest()[:15], 16)


class Deck:
    """n examples dealt `rows` at a time, shuffled anew for each pass. A batch may end one pass and begin the next, so
    that all have the same size."""

    def __init__(self, n: int, rows: int, seed: int):
        self.n, self.rows, self.seed = n, min(rows, n), seed
        self.epoch = -(-n // self.rows)
        self._pass: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def take(self, k: int) -> np.ndarray:
        at = k * self.rows + np.arange(self.rows)
        passes, place = np.divmod(at, self.n)
        parts = [self.shuffled(int(p))[place[passes == p]] for p in np.unique(passes)]
        return np.concatenate(parts)

    def shuffled(self, number: int) -> np.ndarray:
        if self._pass[0] != number:
            keys = draws(self.seed, ORDER, number, self.n)
            self._pass = (number, np.argsort(keys, kind="stable"))
        return self._pass[1]

    def fixed(self) -> Iterator[np.ndarray]:
        """Every example once, in order."""
        for start in range(0, self.n, self.rows):
            yield np.arange(start, min(start + self.rows, self.n))


class Buckets:
    """Examples of about one length together: a batch has at most `tokens` tokens, padding included, and at most `rows`
    rows. Each pass has every example once; which ones meet, and the order of the batches, is shuffled for each pass."""

    def __init__(self, lengths: np.ndarray, tokens: int | None, rows: int | None, seed: int):
        self.n, self.seed = len(lengths), seed
        tokens = tokens or int(lengths.max()) * self.n
        if lengths.max() > tokens:
            raise DataError(
                f"an example has {lengths.max():,} tokens, a batch holds {tokens:,}; say a larger tokens, or drop or "
                "truncate such examples by length and overlong"
            )
        rows = rows or self.n
        limits = bucket_limits(lengths, tokens, rows)
        self.bucket = np.searchsorted(limits, lengths)
        sizes: list[int] = []
        for count, limit in zip(np.bincount(self.bucket, minlength=len(limits)), limits):
            batches = -(-int(count) // min(rows, tokens // int(limit)))
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
        for a, b in pairwise(self.starts):
            yield order[a:b]


class Tiles:
    """Where rows of `length` tokens begin in a stream of n tokens: side by side and shuffled, each once a pass, or
    anywhere (`random`), as nanoGPT draws them. `extra` more tokens are needed after a row."""

    def __init__(self, n: int, length: int, extra: int, rows: int, seed: int, random: bool):
        self.n, self.length, self.extra = n, length, extra
        self.seed, self.random = seed, random
        self.deck = Deck(max((n - extra) // length, 1), rows, seed)
        self.rows = rows if random else self.deck.rows
        self.epoch = self.deck.epoch

    def take(self, k: int) -> np.ndarray:
        if not self.random:
            return self.deck.take(k) * self.length
        places = max(self.n - self.extra - self.length + 1, 1)
        starts = draws(self.seed, WINDOWS, k, self.rows) % np.uint64(places)
        return starts.astype(np.int64)

    def fixed(self) -> Iterator[np.ndarray]:
        """The whole stream; its last row may be shorter."""
        starts = np.arange(0, self.n - self.extra, self.length)
        for i in range(0, len(starts), self.rows):
            yield starts[i : i + self.rows]


def bucket_limits(lengths: np.ndarray, tokens: int, rows: int) -> np.ndarray:
    """The longest length of each bucket: at most WIDER times the shortest, but enough examples for two batches, or they
    would always be the same."""
    sizes, count = np.unique(lengths, return_counts=True)
    limits: list[int] = []
    first = last = int(sizes[0])
    held = 0
    for length, more in zip(sizes.tolist(), count.tolist()):
        if held >= 2 * min(rows, tokens // length) and length > first * WIDER:
            limits.append(last)
            first, held = length, 0
        held, last = held + more, length
    return np.array([*limits, last])


# --- examples that are too long -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pieces:
    """What is kept of examples: `size` numbers of row `row` from `start` on."""

    row: np.ndarray
    start: np.ndarray
    size: np.ndarray
    over: int  # examples that were too long
    limit: int | None
    policy: str

    def note(self) -> str:
        """For people: how many were too long, and what became of them."""
        if not self.over:
            return ""
        done = {"truncate": "truncated", "drop": "dropped", "split": "split"}[self.policy]
        return f"; {self.over:,} longer than {self.limit:,} tokens: {done}"


def cut(
    lengths: np.ndarray, limit: int | None, policy: str, what: str, *, overlap: int = 0
) -> Pieces:
    """Examples cut to `limit` tokens by the policy. Pieces of a split one share `overlap` tokens: what is only a label
    in one is what the next one reads first."""
    if policy not in OVERLONG:
        raise UsageError(f"overlong = {policy!r} is unknown; {nearest(policy, OVERLONG)}")
    row, shown = np.arange(len(lengths)), None if limit is None else limit - overlap
    long = lengths > limit if limit is not None else np.zeros(len(lengths), bool)
    over = int(long.sum())
    if over and policy == "error":
        raise DataError(
            f"the longest {what} has {lengths.max() - overlap:,} tokens, a row holds {shown:,} ({over:,} of "
            f"{len(lengths):,} are longer); say a larger length, or overlong = truncate, drop or split"
        )
    size = lengths.astype(np.int64)
    start = np.zeros_like(size)
    if over and policy == "drop":
        row, start, size = row[~long], start[~long], size[~long]
    elif over and limit is not None and policy == "truncate":
        size = np.minimum(size, limit)
    elif over and limit is not None:
        step = limit - overlap
        count = np.maximum(-(-(size - overlap) // step), 1)
        row = np.repeat(row, count)
        number = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        start = number * step
        size = np.minimum(size[row] - start, limit)
    return Pieces(row, start, size, over, shown, policy)


# --- laying examples into rows ------------------------------------------------------------------------------------


def best_fit(sizes: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack things into bins: longest first, each into the fullest bin that still has room for it.

    The answer is (order, starts): bin i has order[starts[i]:starts[i + 1]]."""
    bins: list[list[int]] = []
    free: list[list[int]] = [[] for _ in range(room + 1)]  # bins by the room left in them
    some = 0  # bit r is set where free[r] is not empty
    for i in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[i])
        fits = some >> size
        if fits:
            left = size + (fits & -fits).bit_length() - 1
            box = free[left].pop()
            if not free[left]:
                some &= ~(1 << left)
        else:
            left, box = room, len(bins)
            bins.append([])
        bins[box].append(i)
        free[left - size].append(box)
        some |= 1 << (left - size)
    order = np.array([i for box in bins for i in box], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum([len(box) for box in bins])]).astype(np.int64)
    return order, starts


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... for sizes[0] numbers, then the same for the next."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)


def framed(
    values: np.ndarray,
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
