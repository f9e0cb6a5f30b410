"""GGUF files, the format of llama.cpp: a header of metadata and tensor descriptions, then the tensors, often quantised.

Layout: github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file is not trusted: every count and offset is held against
the file's size before anything is allocated. Tensors are read a few rows at a time; the package `gguf` unpacks the
blocks of the quantised types.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.checkpoint.store import narrowed
from regard.errors import UsageError


class Kind(NamedTuple):
    """A tensor type: `size` bytes hold `block` values."""

    name: str
    block: int
    size: int


KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    30: Kind("BF16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
}
# Types that are refused, to be named in the sentence.
OTHERS = dict(
    zip(
        (15, *range(16, 30), 34, 35, 39),
        """Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M TQ1_0 TQ2_0
        MXFP4""".split(),  # noqa: SIM905
        strict=True,
    )
)
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Scalar types of metadata as struct codes; 8 is a string, 9 an array.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY, FLOAT32 = 8, 9, 6
MOST_ENTRIES = 2**24
CHUNK = 2**22  # values unpacked at once


@dataclass(frozen=True)
class Entry:
    """A tensor of the file; `shape` in the order of torch, the rows along the last axis."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    start: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.kind.block * self.kind.size

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class File:
    """The metadata and the tensors of a GGUF file; contents of tensors on request."""

    def __init__(self, path: Path):
        self.path, self.size = path, path.stat().st_size
        try:
            with path.open("rb") as file:
                self.metadata, self.tensors = _header(_Cursor(file, self.size))
        except (ValueError, struct.error) as error:
            raise UsageError(
                f"{path} is not a whole GGUF file ({error}); copy or download it again"
            ) from None

    def read(self, entry: Entry, first: int, rows: int, dtype: torch.dtype) -> Tensor:
        """Some rows of a tensor, dequantised: (rows, width)."""
        out = torch.empty(rows, entry.shape[-1], dtype=dtype)
        step = max(1, CHUNK // entry.shape[-1])
        with self.path.open("rb") as file:
            file.seek(entry.start + first * entry.row_bytes)
            for at in range(0, rows, step):
                part = out[at : at + step]
                values = _unpacked(self._bytes(file, entry, len(part)), entry.kind, len(part))
                part.copy_(narrowed(values, dtype, entry.name))
        return out

    def equal(self, one: Entry, other: Entry) -> bool:
        """Whether two tensors are stored in the same bytes."""
        if (one.kind, one.shape) != (other.kind, other.shape):
            return False
        pairs = zip(self._chunks(one), self._chunks(other), strict=True)
        return all(a == b for a, b in pairs)

    def _chunks(self, entry: Entry) -> Iterator[bytes]:
        step = max(1, CHUNK // entry.shape[-1])
        with self.path.open("rb") as file:
            file.seek(entry.start)
            for at in range(0, entry.rows, step):
                yield self._bytes(file, entry, min(step, entry.rows - at))

    def _bytes(self, file: BinaryIO, entry: Entry, rows: int) -> bytes:
        raw = file.read(rows * entry.row_bytes)
        if len(raw) != rows * entry.row_bytes:
            raise UsageError(f"{self.path} ended while {entry.name} was read; copy the file again")
        return raw


def _unpacked(raw: bytes, kind: Kind, rows: int) -> Tensor:
    if kind.name in PLAIN:
        return torch.frombuffer(bytearray(raw), dtype=PLAIN[kind.name]).view(rows, -1)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks = np.frombuffer(raw, np.uint8).reshape(rows, -1)
    # Scales that are not finite give values that are not: the file's own, not worth a warning.
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind.name]))


# --- the header ---------------------------------------------------------------------------------------------------


class _Cursor:
    """A file read from the front; what would go beyond its end is an error before it is read."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.left, self.entries = file, size, 0

    def take(self, count: int) -> bytes:
        self.need(count)
        self.left -= count
        return self.file.read(count)

    def need(self, count: int) -> None:
        if count > self.left:
            raise ValueError(f"{count:,} bytes are promised where {self.left:,} are left")

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        if kind not in SCALARS:
            raise ValueError(f"metadata of the unknown type {kind}")
        number = self.number(SCALARS[kind])
        # The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(number))) if kind == FLOAT32 else number

    def array(self, kind: int, count: int) -> list[Any]:
        self.entries += count
        if self.entries > MOST_ENTRIES:
            raise ValueError(f"its metadata has lists of more than {MOST_ENTRIES:,} entries")
        if kind == STRING:
            self.need(8 * count)
            return [self.text() for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"a list of the type {kind}")
        code = "<" + SCALARS[kind]
        return np.frombuffer(self.take(count * struct.calcsize(code)), code).tolist()


def _header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, Entry]]:
    size = cursor.left
    if cursor.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        why = "big-endian" if swapped else f"version {version}"
        raise ValueError(f"it is {why}; little-endian versions 2 and 3 are read")
    tensors, pairs = cursor.number("Q"), cursor.number("Q")
    # Of a pair: the length of its name, its type, one byte; of a tensor: length, rank, size, type, offset.
    cursor.need(13 * pairs + 32 * tensors)
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        name, kind = cursor.text(), cursor.number("I")
        if name in metadata:
            raise ValueError(f"{name} occurs twice")
        metadata[name] = cursor.value(kind)
    found = [_described(cursor) for _ in range(tensors)]
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1 or align & (align - 1):
        raise ValueError(f"general.alignment is {align!r}, not a power of two")
    begin = -(-(size - cursor.left) // align) * align
    entries: dict[str, Entry] = {}
    for name, shape, kind, offset in found:
        entry = Entry(name, shape, kind, begin + offset)
        if entry.start + entry.nbytes > size:
            raise ValueError(f"the tensor {name} reaches beyond its end")
        if name in entries:
            raise ValueError(f"the tensor {name} occurs twice")
        entries[name] = entry
    if sum(entry.nbytes for entry in entries.values()) > size:
        raise ValueError("its tensors overlap")
    return metadata, entries


def _described(cursor: _Cursor) -> tuple[str, tuple[int, ...], Kind, int]:
    name, rank = cursor.text(), cursor.number("I")
    if not 1 <= rank <= 4:
        raise ValueError(f"the tensor {name!r:.80} has {rank} axes")
    shape = tuple(reversed([cursor.number("Q") for _ in range(rank)]))
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in KINDS:
        known = ", ".join(kind.name for kind in KINDS.values())
        raise UsageError(
            f"{cursor.file.name}: the tensor {name!r:.80} has the type {OTHERS.get(number, number)}; known: {known}"
        )
    kind = KINDS[number]
    if min(shape) < 1 or shape[-1] % kind.block:
        raise ValueError(f"the tensor {name!r:.80} of type {kind.name} has the shape {shape}")
    return name, shape, kind, offset
