"""SentencePiece model files: a protobuf reader for the fields that decide how text becomes pieces.

The schema is sentencepiece_model.proto of github.com/google/sentencepiece; the other fields are skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from regard.errors import UsageError

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

Value = int | bytes


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePiece:
    """What a SentencePiece file says: the pieces in the order of their ids, and how text is prepared for them."""

    pieces: tuple[Piece, ...]
    model: int = UNIGRAM
    unk: int = 0
    charsmap: bytes = b""
    # A space is put before the text; runs of spaces become one, those at the ends go.
    prefix: bool = True
    squeeze: bool = True

    @property
    def bytes(self) -> bool:
        """Characters without a piece are spelt in byte pieces <0x00> ... <0xFF>."""
        return any(piece.kind == BYTE for piece in self.pieces)


def read(data: bytes, name: str) -> SentencePiece:
    """The content of a .model or .spm file."""
    try:
        return _model(data)
    except (ValueError, IndexError, struct.error) as e:
        raise UsageError(
            f"{name} is not a SentencePiece model ({e}); put a tokenizer.json into the folder instead"
        ) from None


def _model(data: bytes) -> SentencePiece:
    pieces, trainer, normalizer = [], b"", b""
    for field, value in _fields(data):
        if field == 1:
            pieces.append(_piece(_bytes(value)))
        elif field == 2:
            # A message in two parts means the parts joined.
            trainer += _bytes(value)
        elif field == 3:
            normalizer += _bytes(value)
    if not pieces:
        raise ValueError("it holds no pieces")
    spec, norm = dict(_fields(trainer)), dict(_fields(normalizer))
    model = spec.get(3, UNIGRAM)
    if model not in (UNIGRAM, BPE):
        raise ValueError(f"model type {model!r}, known are unigram (1) and BPE (2)")
    unk = next((i for i, piece in enumerate(pieces) if piece.kind == UNKNOWN), None)
    if unk is None:
        raise ValueError("it has no piece for the unknown")
    return SentencePiece(
        pieces=tuple(pieces),
        model=int(model),
        unk=unk,
        charsmap=_bytes(norm.get(2, b"")),
        prefix=bool(norm.get(3, 1)),
        squeeze=bool(norm.get(4, 1)),
    )


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for field, value in _fields(data):
        if field == 1:
            text = _bytes(value).decode("utf-8")
        elif field == 2:
            (score,) = struct.unpack("<f", _bytes(value))
        elif field == 3 and isinstance(value, int):
            kind = value
    return Piece(text, score, kind)


def _bytes(value: Value) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number stands where text should")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """(field number, value) of a protobuf message: varints as int, everything else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire}")
        if at + size > len(data):
            raise ValueError("it ends early")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")
