"""One tokenizer for every model folder: text -> ids -> text, on the library `tokenizers`; and text while it is
generated.

A folder without tokenizer files gives None: the model then works on ids (`needed` says so to whoever has text).

While ids come, each step of the library's decoder is told one list of pieces at a time. Text that was given never
changes, and all of it joined is what the decoder makes of all pieces at once. A stage keeps only what may still change:
bytes of an unfinished character, a run of byte pieces, a space that may be cut off. A decoder with a step that needs
the whole text gives it all at the end.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders

from regard.errors import UsageError
from regard.files import TOKENIZER_FILES, model_folder, read_files
from regard.text import build
from regard.text.build import Files, Parts, Settings, blaming, check_unicode, content, read_json

# Ids, and the characters each comes from.
Located = tuple[list[int], list[tuple[int, int]]]
# A step of a decoder: its settings, the library's object.
Step = tuple[dict[str, Any], Any]


class Tokenizer:
    """Text <-> ids as the model folder has it.

    `vocab` is one more than the highest id, `special` the ids with a meaning, `tokens` the strings
    of the special tokens by name (bos_token, ...), `templates` the chat templates by name."""

    def __init__(self, parts: Parts, files: Files, settings: Settings, config: Settings):
        self.parts, self.core = parts, parts.core
        self.tokens: dict[str, str] = build.names(
            files, settings, parts.kind, self.core.token_to_id
        )
        _add_tokens(self.core, files, settings, self.tokens)
        ids = {f"{name}_id": self.core.token_to_id(text) for name, text in self.tokens.items()}
        if {"add_bos_token", "add_eos_token"} & set(settings):

            def end(name: str) -> Any:
                index = ids.get(f"{name}_token_id") if settings.get(f"add_{name}_token") else None
                return None if index is None else (self.tokens[f"{name}_token"], index)

            # These stand above tokenizer.json.
            self.core.post_processor = build.around(end("bos"), end("eos"))
        self.special = build.special_ids(files, config, ids)
        self.templates = build.templates(files, settings)
        known = self.core.get_vocab()
        self.vocab = max(known.values(), default=-1) + 1
        self.longest = max(map(len, known), default=1)  # characters of a token
        added = self.core.get_added_tokens_decoder().items()
        self._skipped = frozenset(index for index, token in added if token.special)
        self._steps = steps(self.core.decoder)
        self._copies: dict[int, tokenizers.Tokenizer] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_files(cls, files: Files, config: Settings | None = None) -> Tokenizer | None:
        """The tokenizer among the files of a folder (name -> bytes, as `model.origin.files`), or
        None. `config` is the content of config.json, where it is not among the files."""
        settings = read_json(files, "tokenizer_config.json")
        config = config or read_json(files, "config.json")
        kind, class_name = build.style(settings, config)
        parts = build.build(files, settings, kind, class_name)
        return None if parts is None else cls(parts, files, settings, config)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer | None:
        """The same from a folder on disk."""
        return cls.from_files(read_files(model_folder(path), [*TOKENIZER_FILES, "config.json"]))

    def encode(self, text: str, *, special: bool = True, literal: bool = False) -> list[int]:
        """The ids of a text (a source text, where source and target differ), with the tokens that the model expects
        around it if `special`. Text that spells a special token is that token, unless `literal`."""
        return self._encode(text, self.parts.source, special, literal)

    def encode_target(self, text: str, *, special: bool = True, literal: bool = False) -> list[int]:
        """What a decoder writes; differs from `encode` for models with two vocabularies (Marian)."""
        return self._encode(text, self.parts.target, special, literal)

    def located(self, text: str, *, literal: bool = False) -> Located:
        """The ids of a text, without tokens around it, and the first character of each and the one behind its last."""
        (found,) = self.located_all([text], literal=literal)
        return found

    def located_all(self, texts: Sequence[str], *, literal: bool = False) -> list[Located]:
        """The same of many texts, which are encoded together: on every core."""
        for text in texts:
            check_unicode(text, "the text")
        with blaming("this text cannot be encoded"):
            core = self.literal(self.core) if literal else self.core
            encodings = core.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def unknown(self, text: str) -> list[str]:
        """The parts of a text that have no token and become the unknown one, each once: what the model cannot read."""
        if self.special.unk is None:
            return []
        encoding = _read(self.parts.source or self.core, text)
        ids: list[Any] = encoding.ids
        if self.parts.source is not None:
            ids = [self.core.token_to_id(piece) for piece in encoding.tokens]
        spans = zip(ids, encoding.offsets)
        lost = (text[a:b] for i, (a, b) in spans if i is None or i == self.special.unk)
        return list(dict.fromkeys(lost))

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, after: Sequence[int] = ()
    ) -> str:
        """The text of the ids. `after`: the ids that stand before them, so that a first space is kept:
        decode(a) + decode(b, after=a) == decode(a + b) wherever a ends with a whole character."""
        # The library gives up a whole run of bytes for one that is wrong; a stream cannot wait for that.
        if after or any(settings["type"] == "ByteFallback" for settings, _ in self._steps):
            text = self.detokenizer()
            text.begin(self.pieces(after, skip_special=skip_special))
            return text.push(self.pieces(ids, skip_special=skip_special)) + text.finish()
        with blaming("these ids cannot be decoded"):
            whole = self.core.decode(_checked(ids), skip_special_tokens=skip_special)
        # Marian's text has no white space at its ends.
        return whole.strip() if self.parts.source else whole

    def pieces(self, ids: Iterable[int], *, skip_special: bool = True) -> list[str]:
        """The vocabulary's own strings, one per id; special tokens left out, ids beyond the vocabulary too."""
        skipped = self._skipped if skip_special else frozenset()
        pieces = (self.core.id_to_token(i) for i in _checked(ids) if i not in skipped)
        return [piece for piece in pieces if piece is not None]

    def token_bytes(self, index: int) -> bytes:
        """What one token adds to a text that has begun; a special token is its own name."""
        piece = self.core.id_to_token(index)
        if piece is None or index in self._skipped:
            return (piece or "").encode()
        kinds = {settings["type"] for settings, _ in self._steps}
        if "ByteLevel" in kinds:
            return piece_bytes(piece)
        if "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return self.decode([index], after=[index]).encode()

    def detokenizer(self) -> Detokenizer:
        """Pieces -> text, step by step."""
        return Detokenizer(self.core.decoder, self._steps, trim=self.parts.source is not None)

    def _encode(
        self, text: str, cutter: tokenizers.Tokenizer | None, special: bool, literal: bool
    ) -> list[int]:
        if not isinstance(text, str):
            raise UsageError(f"a prompt is text or a list of ids, got {text!r:.60}")
        check_unicode(text, "the text")
        with blaming("this text cannot be encoded"):
            core = self.literal(cutter or self.core) if literal else cutter or self.core
            if cutter is None:
                return _read(core, text, special).ids
            # Marian: pieces by SentencePiece, ids by vocab.json; a language code such as >>fr<< may come first.
            code = None if literal else re.match(">>.*?<<", text, re.DOTALL)
            first, text = (code[0], text[code.end() :]) if code else ("", text)
            pieces = [first] if first else []
            pieces += _read(core, text).tokens
            unk, ids = self.core.token_to_id("<unk>"), map(self.core.token_to_id, pieces)
            known = [unk if i is None or (literal and i in self._skipped) else i for i in ids]
            eos = [self.core.token_to_id("</s>")] if special else []
            return [i for i in (*known, *eos) if i is not None]

    def literal(self, core: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """A copy, made once, that knows no special tokens (a switch on the one object would not be thread-safe)."""
        with self._lock:
            if id(core) not in self._copies:
                self._copies[id(core)] = build.plain_copy(core)
            return self._copies[id(core)]


class Stream:
    """Ids in, text out.    "".join(push(ids) ...) + finish() == tokenizer.decode(all ids), cut before a stop string

    Each push costs the same, however long the text is: only what may still change is kept. With `stop`, text that may
    be the beginning of a stop string is kept too. The stop string that is complete first ends the stream (of two that
    are complete together, the longer one): `stopped` is that string, `consumed` the number of ids up to it.
    `after` are the ids before the text (the prompt), so that a first space is kept."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: str | Sequence[str] = (),
        *,
        after: Sequence[int] = (),
        skip_special: bool = True,
    ):
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self.stop = check_stop(stop)
        self.stopped: str | None = None
        self.consumed = 0
        self._text = tokenizer.detokenizer()
        self._held = ""
        self._beginnings = {s[:n] for s in self.stop for n in range(1, len(s))}
        self._firsts = {s[0] for s in self.stop}
        self._longest = max(map(len, self.stop), default=0)
        if after:
            self._text.begin(tokenizer.pieces(after, skip_special=skip_special))

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids make certain; nothing once the stream has stopped."""
        texts, pieces = [], self.tokenizer.pieces
        for chunk in [[i] for i in ids] if self.stop else [list(ids)]:
            if self.stopped is not None:
                break
            self.consumed += len(chunk)
            texts.append(
                self._until_stop(self._text.push(pieces(chunk, skip_special=self.skip_special)))
            )
        return "".join(texts)

    def finish(self) -> str:
        """The rest of the text: no id follows."""
        if self.stopped is not None:
            return ""
        text = self._until_stop(self._text.finish())
        held, self._held = self._held, ""
        return text + held

    def _until_stop(self, text: str) -> str:
        """What can be shown of the kept text and `text`."""
        if not self.stop or not text:
            return text
        text = self._held + text
        stops = [(at + len(s), at, s) for s in self.stop if (at := text.find(s)) >= 0]
        if stops:
            _, at, self.stopped = min(stops)
            self._held = ""
            return text[:at]
        first = max(0, len(text) - self._longest + 1)
        ends = (k for k in range(first, len(text)) if text[k] in self._firsts)
        end = next((k for k in ends if text[k:] in self._beginnings), len(text))
        self._held = text[end:]
        return text[:end]


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings as they are given -> a tuple of them."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for s in strings:
        if not isinstance(s, str) or not s:
            raise UsageError(f"stop must be texts of one character or more, got {s!r}")
        check_unicode(s, "stop")
    return strings


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, or the error for a text given to a model that has none."""
    if tokenizer is None:
        raise UsageError(
            "this model folder carries no tokenizer; give ids, or put tokenizer.json into it (a tokenizer is "
            f"{build.WANTED})"
        )
    return tokenizer


def _read(core: tokenizers.Tokenizer, text: str, special: bool = False) -> tokenizers.Encoding:
    """As a batch of one: `core.encode` keeps Python's lock until it is through, so that other threads stand still."""
    return core.encode_batch([text], add_special_tokens=special)[0]


def _checked(ids: Iterable[int]) -> list[int]:
    ids = [int(i) for i in ids]
    if ids and not 0 <= min(ids) <= max(ids) < 2**32:
        wrong = next(i for i in ids if not 0 <= i < 2**32)
        raise UsageError(f"id {wrong} is not a token; ids are 0 and above")
    return ids


def _add_tokens(
    core: tokenizers.Tokenizer, files: Files, settings: Settings, tokens: dict[str, str]
) -> None:
    """Register the tokens that stand beside the vocabulary, those with an id first, in the order of the ids."""
    numbered: dict[int, AddedToken] = {}
    named = set(tokens.values())
    with blaming("added_tokens.json or added_tokens_decoder of tokenizer_config.json is odd"):
        for text, index in read_json(files, "added_tokens.json").items():
            numbered[int(index)] = AddedToken(text, normalized=False, special=text in named)
        for index, token in (settings.get("added_tokens_decoder") or {}).items():
            marked = bool(token.get("special")) or token["content"] in named
            numbered[int(index)] = AddedToken(token["content"], special=marked, **_flags(token))
    known = {token.content for token in core.get_added_tokens_decoder().values()}
    for index, token in sorted(numbered.items(), key=lambda item: item[0]):
        if token.content not in known:
            (core.add_special_tokens if token.special else core.add_tokens)([token])
        known_id = core.token_to_id(token.content)
        if known_id != index:
            raise UsageError(
                f"added token {token.content!r} has id {index} in tokenizer_config.json or added_tokens.json, but the "
                f"vocabulary gives it {known_id}; a file is missing or of another model"
            )
    special = {t.content for t in core.get_added_tokens_decoder().values() if t.special}
    with blaming("a special token in tokenizer_config.json or special_tokens_map.json is odd"):
        # Those that have no name: a list, or a table.
        more: list[Any] = []
        for key in ("additional_special_tokens", "extra_special_tokens"):
            each = settings.get(key) or []
            more += each.values() if isinstance(each, dict) else each
        tables = (read_json(files, "special_tokens_map.json"), settings)
        declared = [*(token for table in tables for token in table.values()), *more]
        flags = {content(t): _flags(t) for t in declared if isinstance(t, dict)}
        wanted = [*tokens.values(), *(text for text in map(content, more) if text)]
        for text in dict.fromkeys(wanted):
            if text not in special:
                token = AddedToken(text, special=True, **flags.get(text, _flags({})))
                core.add_special_tokens([token])


def _flags(token: Settings) -> dict[str, bool]:
    return {k: bool(token.get(k)) for k in ("lstrip", "rstrip", "single_word", "normalized")}


# --- pieces -> text while they come ---------------------------------------------------------------------------------


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
        elif kind in ("ByteFallback", "BPEDecoder") and not fused:
            stages.append(ByteRuns() if kind == "ByteFallback" else Suffixes(step))
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

    def __init__(self) -> None:
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
