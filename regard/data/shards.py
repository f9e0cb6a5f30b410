"""Numbers on disk, mapped into memory: the tokens of a data set, with a manifest that says what they were made of.

A folder of shards has a manifest.json and for each column NAME.bin (the rows end to end) and, where rows differ in
length, NAME.ends.bin (where each ends). The fingerprint is the SHA-256 of the sources, the tokenizer and the settings:
a folder whose fingerprint fits is used again, any other is made anew, whole or not at all. The SHA-256 of every file
is checked when the folder is opened, once a process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.source import DataError
from regard.files import naming, whole_folder

MANIFEST, VERSION = "manifest.json", 1
_checked: set[tuple[str, int, int, str]] = set()  # files whose SHA-256 this process has compared


# Numbers that are gathered at once.
BLOCK = 1 << 20


class Joined:
    """Arrays end to end. Nothing is copied but what is asked for."""

    def __init__(self, parts: Sequence[np.ndarray]):
        self.parts = parts
        self.dtype = parts[0].dtype
        self.bounds = np.cumsum([0, *map(len, parts)])

        self.shape = (int(self.bounds[-1]), *parts[0].shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        found = np.empty((len(index), *self.shape[1:]), self.dtype)
        part = np.searchsorted(self.bounds, index, side="right") - 1
        for i in np.unique(part):
            here = part == i
            found[here] = self.parts[i][index[here] - self.bounds[i]]
        return found


class ChosenStream:
    """The chosen rows of a column end to end, gathered when they are asked for."""

    def __init__(self, column: Column):
        self.column, self.dtype = column, column.values.dtype
        self.ends = np.concatenate([[0], np.cumsum(column.lengths)])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        row = np.searchsorted(self.ends, index, side="right") - 1
        return self.column.values[self.column.starts(row) + index - self.ends[row]]


Numbers = np.ndarray | Joined | ChosenStream


@dataclass(frozen=True, eq=False)
class Column:
    """Rows of numbers. With `ends` (n + 1 numbers), stored row i is values[ends[i]:ends[i + 1]]; without, values[i].
    `chosen` says which stored rows there are, in any order and as often as they are named; none: all of them."""

    values: np.ndarray | Joined
    ends: np.ndarray | None = None
    chosen: np.ndarray | None = None

    def __len__(self) -> int:
        if self.chosen is not None:
            return len(self.chosen)
        return len(self.values) if self.ends is None else len(self.ends) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        row = self.stored(np.array([i]))
        if self.ends is None:
            return self.values[row][0]
        return self.values[np.arange(self.ends[row[0]], self.ends[row[0] + 1])]

    def stored(self, index: np.ndarray) -> np.ndarray:
        """Where these rows are stored."""
        return index if self.chosen is None else self.chosen[index]

    def at(self, index: np.ndarray) -> np.ndarray:
        """These rows, all of one shape."""
        return self.values[self.stored(index)]

    def starts(self, index: np.ndarray) -> np.ndarray:
        """Where in `values` these rows begin."""
        assert self.ends is not None, "rows of one shape have no ends"
        return self.ends[self.stored(index)]

    @property
    def lengths(self) -> np.ndarray:
        assert self.ends is not None, "rows of one shape have no lengths"
        sizes = np.diff(self.ends)
        return sizes if self.chosen is None else sizes[self.chosen]

    @property
    def stream(self) -> Numbers:
        """All rows end to end."""
        assert self.ends is not None, "rows of one shape are no stream"
        if self.chosen is None and isinstance(self.values, np.ndarray):
            return self.values[self.ends[0] : self.ends[-1]]
        return ChosenStream(self)

    def blocks(self) -> Iterator[np.ndarray]:
        """All numbers in order, as many at once as memory takes without notice."""
        whole = self if self.ends is None else self.stream
        step = max(BLOCK // math.prod(self.values.shape[1:]), 1)
        for i in range(0, len(whole), step):
            index = np.arange(i, min(i + step, len(whole)))
            yield whole.at(index) if isinstance(whole, Column) else whole[index]

    @property
    def fingerprint(self) -> str:
        """The same for the same rows, however they are stored."""
        whole = hashlib.sha256()
        count = len(self) if self.ends is None else len(self.stream)
        whole.update(f"{self.values.dtype}{(count, *self.values.shape[1:])}".encode())
        for block in self.blocks():
            whole.update(np.ascontiguousarray(block).data)
        if self.ends is not None:
            lengths = self.lengths
            whole.update(f"{lengths.dtype}{lengths.shape}".encode() + lengths.tobytes())
        return whole.hexdigest()

    def take(self, index: np.ndarray) -> Column:
        """Some rows, without a copy."""
        run = len(index) and self.chosen is None and bool((np.diff(index) == 1).all())
        if run and self.ends is not None:
            return Column(self.values, self.ends[index[0] : index[-1] + 2])
        return Column(self.values, self.ends, self.stored(index))

    @staticmethod
    def join(parts: Sequence[Column]) -> Column:
        """The rows of several columns, one after the other, without a copy."""
        if len(parts) == 1:
            return parts[0]
        assert all(part.chosen is None for part in parts), "join first, then choose"
        values = Joined([part.values for part in parts])  # type: ignore[misc]
        if parts[0].ends is None:
            return Column(values)
        ends = [part.ends[1:] + first for part, first in zip(parts, values.bounds)]  # type: ignore[index]
        return Column(values, np.concatenate([parts[0].ends[:1], *ends]))

    @staticmethod
    def of(rows: Sequence[Sequence[int] | np.ndarray], dtype: Any = np.int64) -> Column:
        """Rows in memory."""
        ends = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=ends[1:])
        parts = [np.asarray(row, dtype=dtype) for row in rows]
        return Column(np.concatenate(parts) if parts else np.zeros(0, dtype), ends)


@dataclass(frozen=True, eq=False)
class Shards:
    """The columns of a folder; `notes` is what was counted while they were made."""

    columns: dict[str, Column]
    notes: dict[str, Any]
    fingerprint: str


def token_dtype(vocab: int) -> str:
    return "uint16" if vocab <= 1 << 16 else "uint32"


def digest(data: Any) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def files_of(path: Path) -> list[Path]:
    """The file, or all files of a folder in order."""
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


class SourceHashes:
    """What is read of some files: the SHA-256 of each is taken before, and `check` makes sure that these were the bytes
    which were read since: nothing wrote to a file, and nothing took its place."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = paths
        self.states = [self.state(path) for path in paths]
        self.hashes = [sha256(path) for path in paths]

    @staticmethod
    def state(path: Path) -> list[tuple[int, int, int]]:
        try:
            found = [file.stat() for file in files_of(path)]
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
        return [(file.st_ino, file.st_size, file.st_mtime_ns) for file in found]

    def check(self) -> None:
        for path, state, said in zip(self.paths, self.states, self.hashes):
            if self.state(path) != state or sha256(path) != said:
                raise DataError(
                    f"{path} changed while it was read; start again when nothing writes to it any more"
                )


def sha256(path: Path) -> str:
    """Of a file's bytes, or of the names and bytes of all files in a folder."""
    if path.is_dir():
        whole = hashlib.sha256()
        for file in files_of(path):
            whole.update(f"{file.relative_to(path).as_posix()}\0{sha256(file)}\n".encode())
        return whole.hexdigest()
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def prepare(folder: Path, made_of: dict[str, Any], fill: Callable[[Writer], None]) -> Shards:
    """The shards in `folder`, if they are made of just this; else they are made: `fill` writes the columns. A process
    that finds another one at work waits for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / MANIFEST).exists():
            if read_manifest(folder)["fingerprint"] == digest(made_of):
                return open_shards(folder)
        elif folder.exists() and any(folder.iterdir()):
            raise DataError(
                f"{folder} should hold the tokens of the data, and has files but no {MANIFEST}: it was not made whole, "
                f"or holds something else. Delete it to have it made again (rm -r {folder}), or name another folder"
            )
        with whole_folder(folder) as new:
            writer = Writer(new)
            fill(writer)
            writer.finish(made_of)
        return open_shards(folder)
    finally:
        os.close(lock)


def open_shards(folder: Path) -> Shards:
    """Map a folder's columns, after every file was compared with its SHA-256 in the manifest."""
    manifest = read_manifest(folder)
    columns = {}
    for name, entry in manifest["columns"].items():
        maps = {file: _map(folder / file, said) for file, said in entry["files"].items()}
        values = maps[f"{name}.bin"].reshape(entry["shape"])
        columns[name] = Column(values, maps.get(f"{name}.ends.bin"))
    return Shards(columns, manifest["notes"], manifest["fingerprint"])


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        check = data.pop("sha256")
        whole = digest(data) == check
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist: {folder} is not a folder of tokens that was made whole; delete it to have it made "
            "again"
        ) from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise DataError(f"{path} is damaged; delete {folder} to have it made again")
    if data["version"] != VERSION:
        raise DataError(f"{path} is of version {data['version']}; delete {folder}")
    return data


def _map(path: Path, entry: dict[str, Any]) -> np.ndarray:
    try:
        state = path.stat()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); delete {path.parent} to have it made again"
        ) from None
    key = (str(path.resolve()), state.st_size, state.st_mtime_ns, entry["sha256"])
    if key not in _checked:
        if state.st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
            raise DataError(
                f"{path} has changed: {entry['bytes']:,} bytes with another SHA-256 were written; delete "
                f"{path.parent} to have it made again"
            )
        _checked.add(key)
    if entry["bytes"] == 0:
        return np.zeros(0, entry["dtype"])
    return np.asarray(np.memmap(path, entry["dtype"], mode="r"))


# --- writing ------------------------------------------------------------------------------------------------------


class Writer:
    """Columns that grow; `notes` goes into the manifest."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.columns: dict[str, _Growing] = {}
        self.notes: dict[str, Any] = {}

    def extend(self, name: str, rows: Sequence[Sequence[int]], dtype: str) -> None:
        """More rows of a column whose rows differ in length."""
        flat = np.fromiter(chain.from_iterable(rows), np.int64)
        self._column(name, dtype).write(flat, [len(row) for row in rows])

    def long(self, name: str, parts: Iterable[Sequence[int]], dtype: str) -> None:
        """One more row, written part by part."""
        column = self._column(name, dtype)
        length = 0
        for part in parts:
            column.write(np.array(part, np.int64))
            length += len(part)
        column.write(np.zeros(0, np.int64), [length])

    def array(self, name: str, x: np.ndarray) -> None:
        """A whole column of rows of one shape."""
        column = self._column(name, str(x.dtype))
        column.shape = (-1, *x.shape[1:])
        column.write(x)

    def _column(self, name: str, dtype: str) -> _Growing:
        if name not in self.columns:
            self.columns[name] = _Growing(self.folder / name, dtype)
        return self.columns[name]

    def finish(self, made_of: dict[str, Any]) -> None:
        data = {
            "version": VERSION,
            "fingerprint": digest(made_of),
            "made_of": made_of,
            "notes": self.notes,
            "columns": {name: column.finish() for name, column in self.columns.items()},
        }
        text = json.dumps({**data, "sha256": digest(data)}, indent=1, sort_keys=True)
        with naming(self.folder / MANIFEST):
            (self.folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


class _Growing:
    """The files of one column while they are written."""

    def __init__(self, path: Path, dtype: str):
        self.path = path
        self.dtype = np.dtype(dtype)
        self.shape: tuple[int, ...] = (-1,)
        self.ends = array("q", [0])
        self.hash = hashlib.sha256()
        self.file = open(f"{path}.bin", "wb")  # noqa: SIM115  closed by finish

    def write(self, values: np.ndarray, lengths: Sequence[int] = ()) -> None:
        limits = np.iinfo(self.dtype)
        assert not values.size or limits.min <= values.min() <= values.max() <= limits.max
        data = np.ascontiguousarray(values, self.dtype).data
        with naming(Path(self.file.name)):
            self.file.write(data)
        self.hash.update(data)
        for length in lengths:
            self.ends.append(self.ends[-1] + length)

    def finish(self) -> dict[str, Any]:
        """What the manifest says of the files."""
        with naming(Path(self.file.name)):
            size = self.file.tell()
            self.file.close()
        entry = {"bytes": size, "sha256": self.hash.hexdigest(), "dtype": self.dtype.str}
        files = {f"{self.path.name}.bin": entry}
        if self.shape == (-1,) and len(self.ends) > 1:
            ends = _Growing(self.path.with_name(f"{self.path.name}.ends"), "int64")
            ends.write(np.array(self.ends))
            files |= ends.finish()["files"]
        return {"shape": self.shape, "files": files}
