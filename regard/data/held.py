"""What is held out of the data: a share of each data set that is never trained on, and copies of an
example always on the same side."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from regard.data.shards import Column
from regard.data.source import DataError
from regard.errors import notice

# Columns that make an example what it is, whatever its label; numbers of a row that are looked at first.
CONTENT = ("ids", "source", "target", "chosen", "rejected", "images")
PROBES = 16


class Split(NamedTuple):
    """`columns` with rows to train on, of each data set, and rows that are `held`; `name` says how they were parted."""

    columns: dict[str, Column]
    rows: list[np.ndarray]
    held: np.ndarray
    name: str


def hold_out(columns: dict[str, Column], sizes: list[int], share: float, tail: bool) -> Split:
    """Hold out a share of each data set, of so many examples: its end (`tail`; of a single text the end of that), or
    examples here and there. Copies of an example are all on one side, that of the first of them."""
    edges = np.cumsum([0, *sizes])
    name = f"{share}"
    if tail and columns.keys() == {"ids"}:
        column = columns["ids"]
        assert column.ends is not None
        # A single text becomes two, the second of which is held.
        single = np.flatnonzero(np.diff(edges) == 1)
        lengths = column.lengths[edges[single]]
        cuts = column.starts(edges[single]) + (lengths * (1 - share)).astype(np.int64)
        ends = np.insert(column.ends, edges[single] + 1, cuts)
        columns = {"ids": Column(column.values, ends)}
        edges = np.cumsum([0, *(2 if n == 1 else n for n in sizes)])
    first = first_copies(columns)
    parts = np.split(np.arange(edges[-1]), edges[1:-1])
    picked = []
    for part in parts:
        # The examples that are not copies of earlier ones.
        own = part[first[part] == part]
        n = len(own)
        out = min(max(round(n * share), 1), n - 1)
        if out > 0:
            picked.append(own[n - out :] if tail else own[(np.arange(out) * n + n // 2) // out])
    if not picked:
        which = "a single example" if len(first) == 1 else f"{len(first):,} copies of one example"
        raise DataError(f"{which} cannot be shared out; name valid files, or say held = 0")
    held = np.isin(first, np.concatenate(picked))
    rows = [part[~held[part]] for part in parts]
    if not all(map(len, rows)):
        raise DataError(
            "every example of one of the files is a copy of one that is held out; leave that file out"
        )
    if copies := len(first) - len(np.unique(first)):
        name += " and copies"
        notice(
            f"{copies:,} of {len(first):,} examples are copies of others; all copies of one are on the same side: "
            f"{int(held.sum()):,} are held out, {int((~held).sum()):,} are trained on"
        )
    name += " of each" if len(sizes) > 1 else ""
    return Split(columns, rows, np.flatnonzero(held), name)


def first_copies(columns: dict[str, Column]) -> np.ndarray:
    """For each example the number of the first one that is the same, in all but its label."""
    content = [column for n, column in columns.items() if n in CONTENT]
    keys = np.zeros(len(content[0]), np.uint64)
    first = np.arange(len(keys))
    for column in content:
        for found in _probes(column):
            keys = keys * np.uint64(0x9E3779B97F4A7C15) + found.astype(np.uint64)
    # Only those that may be copies are compared whole.
    _, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
    seen: dict[bytes, int] = {}
    for i in np.flatnonzero(counts[group] > 1).tolist():
        whole = b"".join(_digest(row) for row in (column[i] for column in content))
        first[i] = seen.setdefault(whole, i)
    return first


def _probes(column: Column) -> Iterator[np.ndarray]:
    """Numbers (n) of all rows that tell most of them apart."""
    if column.ends is None:
        rows = (_digest(row) for block in column.blocks() for row in block)
        yield np.frombuffer(b"".join(rows), np.uint64)[::2]
        return
    every = np.arange(len(column))
    sizes = column.lengths
    yield sizes
    for i in range(PROBES):
        place = column.starts(every) + np.maximum(sizes - 1, 0) * i // (PROBES - 1)
        yield column.values[np.minimum(place, len(column.values) - 1)]


def _digest(row: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=16).digest()


def tell_shared(train: dict[str, Column], valid: dict[str, Column]) -> None:
    """Say how much of what is measured is trained on too."""
    content = [n for n in train if n in CONTENT]
    if any(train[n].values.shape[1:] != valid[n].values.shape[1:] for n in content):
        return
    both = {n: Column.join([train[n], valid[n]]) for n in content}
    n = len(next(iter(train.values())))
    shared = int((first_copies(both)[n:] < n).sum())
    if shared:
        total = len(next(iter(valid.values())))
        notice(f"{shared:,} of {total:,} examples of valid are among those of train too")
