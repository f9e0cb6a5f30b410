"""Pieces -> text while they come: the steps of a `tokenizers` decoder, each told one list of pieces at a time.

Text that was given never changes, and all of it joined is what the decoder makes of all pieces at once. A stage keeps
only what may still change: bytes of an unfinished character, a run of byte pieces, a space that may be cut off. A
decoder with a step that needs the whole text gives it all at the end.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tokenizers import decoders

from regard.text.build import blaming

# Its settings, the library's object.
Step = tuple[dict[str, Any], Any]


def steps(decoder: Any) -> list[Step]:
    """The steps of a decoder, each as an object of its own."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    each = state["decoders"] if state["type"] == "Sequence" else [state]
    alone = [(settings, decoders.Fuse()) for settings in each]
    for settings, step in alone:
        step.__setstate__(json.dumps(settings).encode())
    return alone


class Detokenizer:
    """Text of pieces, step by step: `push` gives what is certain, `finish` the rest."""

    def __init__(self, decoder: Any, steps: Sequence[Step], *, trim: bool = False):
        self.stages = _stages(decoder, steps)
        if trim:
            self.stages.append(Trim())

    def begin(self, pieces: list[str]) -> None:
        """Pieces that stand before the text: they are no part of it, but decide how it begins."""
        self.push(pieces)
        for stage in self.stages:
            stage.begun()

    def push(self, pieces: list[str]) -> str:
        try:
            for stage in self.stages:
                pieces = stage.push(pieces)
        # `blaming` around it would cost as much again, for each token.
        except BaseException as e:
            with blaming("these tokens cannot be decoded"):
                raise e
        return "".join(pieces)

    def finish(self) -> str:
        left: list[str] = []
        with blaming("these tokens cannot be decoded"):
            for stage in self.stages:
                left = stage.push(left) + stage.finish()
        return "".join(left)


class Stage:
    """Pieces in, pieces out, now or later."""

    def push(self, pieces: list[str]) -> list[str]:
        raise NotImplementedError

    def begun(self) -> None:
        """What is kept now belongs to text that was shown before."""

    def finish(self) -> list[str]:
        return []


def _stages(decoder: Any, steps: Sequence[Step]) -> list[Stage]:
    """A stage for each step; behind `Fuse` (or ByteLevel, which joins too) all text is one piece."""
    # Without a decoder pieces have spaces between them.
    stages: list[Stage] = [] if steps else [Apart(SimpleNamespace(decode=" ".join))]
    fused = False
    for settings, step in steps:
        kind = settings["type"]
        by_character = kind == "Replace" and len(settings["pattern"].get("String", "")) == 1
        if kind == "Fuse" or (kind == "ByteLevel" and not fused):
            stages += [Bytes()] if kind == "ByteLevel" else []
            fused = True
        elif fused and kind == "Strip" and not settings["stop"]:
            stages.append(Start(settings["content"], settings["start"]))
        elif kind in ("Replace", "Strip") and (not fused or by_character):
            stages.append(Apart(step, any_place=True))
        elif kind in ("Metaspace", "WordPiece") and not fused:
            stages.append(Apart(step))
        elif kind in _KEEPING and not fused:
            stages.append(_KEEPING[kind](step))
        else:
            return [Whole(decoder)]
    return stages


class Apart(Stage):
    """A step that looks at one piece (and at whether it is the first): the library's own, asked piece by piece."""

    def __init__(self, decoder: Any, any_place: bool = False):
        self.decoder = decoder
        self.before: list[str] = []
        self.later = [] if any_place else [""]

    def push(self, pieces: list[str]) -> list[str]:
        out = []
        for piece in pieces:
            out.append(self.decoder.decode([*self.before, piece]))
            self.before = self.later
        return out


class Bytes(Stage):
    """Byte-level BPE: each character of a piece stands for a byte. An unfinished character waits; bytes that are no
    UTF-8 become U+FFFD, one for each longest part that could have begun a character (as the library does)."""

    errors = "replace"

    def __init__(self, decoder: Any = None) -> None:
        self.text = codecs.getincrementaldecoder("utf-8")(self.errors)

    def push(self, pieces: list[str]) -> list[str]:
        return [self.text.decode(b"".join(map(piece_bytes, pieces)))]

    def finish(self) -> list[str]:
        return [self.text.decode(b"", final=True)]


# GPT-2's printable stand-ins: Latin-1's visible characters for themselves, U+0100 onwards for the others.
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [b for b in range(256) if b not in _VISIBLE]
_BYTES = {chr(b): b for b in _VISIBLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


def piece_bytes(piece: str) -> bytes:
    """The bytes of a byte-level piece."""
    try:
        return bytes([_BYTES[c] for c in piece])
    except KeyError:
        # An added token, as it is.
        return piece.encode("utf-8")


class ByteRuns(Bytes):
    """Byte fallback: pieces <0x..> are the bytes of a text. A character is given as soon as it is whole; each byte that
    belongs to none is U+FFFD, as SentencePiece has it. (The library makes a whole run of bytes U+FFFD for a single
    wrong one: a stream would wait for the run's end.)"""

    errors = "regard.each_byte"

    def push(self, pieces: list[str]) -> list[str]:
        out = []
        for piece in pieces:
            if re.fullmatch(r"<0x(?:[0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>", piece):
                out.append(self.text.decode(bytes([int(piece[3:5], 16)])))
            else:
                out += [*self.finish(), piece]
        return [piece for piece in out if piece]


codecs.register_error(ByteRuns.errors, lambda e: ("\ufffd" * (e.end - e.start), e.end))  # type: ignore[attr-defined]


class Suffixes(Stage):
    """BPE with an end-of-word suffix: it becomes a space, but nothing at the end of the text."""

    def __init__(self, decoder: Any):
        self.decoder = decoder
        # What is left to say of the last piece, if more follows and if none does.
        self.inside = self.at_end = ""

    def push(self, pieces: list[str]) -> list[str]:
        out = []
        for piece in pieces:
            inside, at_end = self.decoder.decode([piece, ""]), self.decoder.decode([piece])
            same = len(at_end) if inside.startswith(at_end) else 0
            out.append(self.inside + inside[:same])
            self.inside, self.at_end = inside[same:], at_end[same:]
        return out

    def finish(self) -> list[str]:
        return [self.at_end]


_KEEPING = {"ByteFallback": ByteRuns, "BPEDecoder": Suffixes}


class Start(Stage):
    """Up to `count` characters cut from the beginning of the whole text."""

    def __init__(self, character: str, count: int):
        self.character, self.count = character, count

    def push(self, pieces: list[str]) -> list[str]:
        text = "".join(pieces)
        while text and self.count:
            self.count = self.count - 1 if text[0] == self.character else 0
            text = text[1:] if text[0] == self.character else text
        return [text]


class Trim(Stage):
    """No white space at the ends of the text."""

    def __init__(self) -> None:
        self.started, self.held = False, ""

    def push(self, pieces: list[str]) -> list[str]:
        text = self.held + "".join(pieces)
        text = text if self.started else text.lstrip()
        ready = text.rstrip()
        self.started |= bool(ready)
        self.held = text[len(ready) :]
        return [ready]


class Whole(Stage):
    """Any other decoder: nothing is certain before the end."""

    def __init__(self, decoder: Any):
        self.decoder, self.cut = decoder, 0
        self.pieces: list[str] = []

    def push(self, pieces: list[str]) -> list[str]:
        self.pieces += pieces
        return []

    def begun(self) -> None:
        self.cut = len(self.decoder.decode(self.pieces))

    def finish(self) -> list[str]:
        return [self.decoder.decode(self.pieces)[self.cut :]]
