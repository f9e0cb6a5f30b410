"""One tokenizer for every model folder: text -> ids -> text, on the library `tokenizers`; and text while it is
generated.

A folder without tokenizer files gives None: the model then works on ids (`needed` says so to whoever has text).

Ids become text by the bytes that each piece adds to it. Text that was given never changes, and all of it joined is
what the library's decoder makes of all pieces at once; only what may still change is kept. (The library's own
DecodeStream has no end, so that an unfinished character is lost; it raises on a wrong byte of a run of byte pieces,
and each wrong byte costs it all those before.)
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from regard.errors import UsageError
from regard.files import TOKENIZER_FILES, model_folder, read_files
from regard.text import build
from regard.text.build import Files, Parts, Settings, blaming, check_unicode, content, read_json

# Ids, and the characters each comes from.
Located = tuple[list[int], list[tuple[int, int]]]


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
        self._spelling = Spelling(self.core.decoder)
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
        # The library is faster where it gives the same.
        if not after and not self._spelling.fallback:
            with blaming("these ids cannot be decoded"):
                return self.core.decode(_checked(ids), skip_special_tokens=skip_special)
        text = self.detokenizer()
        text.begin(self.pieces(after, skip_special=skip_special))
        return text.push(self.pieces(ids, skip_special=skip_special)) + text.finish()

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
        if self._spelling.adds_up and self._spelling.suffix is None:
            return self._spelling(piece)
        return self.decode([index], after=[index]).encode()

    def detokenizer(self) -> Detokenizer:
        """Pieces -> text, step by step."""
        if not self._spelling.adds_up:
            return Whole(self._spelling)
        # Marian's text has no white space at its ends.
        return Detokenizer(self._spelling, trim=self.parts.source is not None)

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
            unk = self.core.token_to_id("<unk>")
            ids = map(self.core.token_to_id, pieces)
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
        texts = []
        pieces = self.tokenizer.pieces
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
    """As a batch of one: `core.encode` keeps Python's lock until it is done, so that other threads stand still."""
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


# --- pieces -> text while they come ---------------------------------------------------------------

# Characters that no vocabulary should have: stands for the text before a piece.
BEFORE = "\ue000"
# Steps of a decoder that look at one piece, and at whether it is the first.
BY_PIECE = {"Replace", "Strip", "Metaspace", "WordPiece"}
# GPT-2's printable stand-ins for bytes: Latin-1's visible characters for themselves, U+0100 onwards
# for the others.
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [b for b in range(256) if b not in _VISIBLE]
_BYTES = {chr(b): b for b in _VISIBLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
# How bytes that are not UTF-8 are shown: U+FFFD for each of them.
EACH_BYTE = "regard.each_byte"
codecs.register_error(EACH_BYTE, lambda e: ("\ufffd" * (e.end - e.start), e.end))  # type: ignore[attr-defined]


class Spelling:
    """The bytes that each piece adds to a text: what the library's decoder makes of it behind another piece.

    `adds_up` says whether the text of many pieces is that of each, end to end. `suffix` ends a
    word: a space, but nothing at the end of the text."""

    def __init__(self, decoder: Any):
        state = {"decoders": []} if decoder is None else json.loads(decoder.__getstate__())
        steps = state.get("decoders", [state])
        kinds = [step["type"] for step in steps]
        # Without a decoder pieces have spaces between them.
        self.decode: Callable[[list[str]], str] = " ".join if decoder is None else decoder.decode
        self.adds_up = _adds_up(steps)
        self.characters = kinds == ["ByteLevel"]
        self.fallback = "ByteFallback" in kinds
        self.suffix = steps[0]["suffix"] if kinds == ["BPEDecoder"] else None
        # As the library shows bytes that are not UTF-8: those of a character that was begun as one.
        # (With byte fallback it gives up a whole run of bytes for one that is wrong; here each stands
        # for itself, as in SentencePiece.)
        self.errors = EACH_BYTE if self.fallback else "replace"
        self._known: dict[str, bytes] = {}

    def __call__(self, piece: str, first: bool = False) -> bytes:
        known = None if first else self._known.get(piece)
        if known is None:
            with blaming("these tokens cannot be decoded"):
                known = self._bytes(piece, first)
            if not first:
                self._known[piece] = known
        return known

    def _bytes(self, piece: str, first: bool) -> bytes:
        if self.characters:
            return _byte_level(piece)
        byte = _BYTE_PIECE.fullmatch(piece) if self.fallback else None
        value = int(byte[1], 16) if byte else 0
        if value > 127:
            return bytes([value])
        if first:
            return self.decode([piece]).encode()
        return self.decode([BEFORE, piece])[1:].encode()


def _adds_up(steps: Sequence[Settings]) -> bool:
    """Whether each piece adds a text of its own, whatever stands around it."""
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["BPEDecoder"]):
        return True
    if "WordPiece" in kinds and "ByteFallback" in kinds:
        return False
    # Behind `Fuse` all text is one piece, of whose beginning a space may be cut off.
    end = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    cuts = [step for step in steps[end:] if step["type"] != "Fuse"]
    short = all(c["type"] == "Strip" and (c["start"], c["stop"]) in ((0, 0), (1, 0)) for c in cuts)
    return {*kinds[:end]} <= {*BY_PIECE, "ByteFallback"} and short and len(cuts) < 2


def _byte_level(piece: str) -> bytes:
    """The bytes of a byte-level piece; an added token is as it is."""
    try:
        return bytes([_BYTES[c] for c in piece])
    except KeyError:
        return piece.encode()


class Detokenizer:
    """Text of pieces, step by step: `push` gives what is certain, `finish` the rest.

    An unfinished character waits for its other bytes; with `trim`, white space for what follows."""

    def __init__(self, spelling: Spelling, *, trim: bool = False):
        self.spelling, self.trim = spelling, trim
        self.text = codecs.getincrementaldecoder("utf-8")(spelling.errors)
        self.begun = self.shown = False
        self.space, self.held = b"", ""

    def begin(self, pieces: list[str]) -> None:
        """Pieces that stand before the text: they are no part of it, but decide how it begins."""
        self.push(pieces)

    def push(self, pieces: list[str]) -> str:
        data = []
        suffix = self.spelling.suffix
        for piece in pieces:
            data += [self.space, self.spelling(piece, first=not self.begun)]
            self.space = b" " if suffix and piece.endswith(suffix) else b""
            self.begun = self.begun or bool(piece)
        return self._trimmed(self.text.decode(b"".join(data)))

    def finish(self) -> str:
        return self._trimmed(self.text.decode(b"", final=True))

    def _trimmed(self, text: str) -> str:
        if not self.trim:
            return text
        text = self.held + (text if self.shown else text.lstrip())
        ready = text.rstrip()
        self.shown = self.shown or bool(ready)
        self.held = text[len(ready) :]
        return ready


class Whole(Detokenizer):
    """A decoder whose pieces do not add up: nothing is certain before the end."""

    def __init__(self, spelling: Spelling):
        super().__init__(spelling)
        self.pieces: list[str] = []
        self.before = ""

    def begin(self, pieces: list[str]) -> None:
        self.push(pieces)
        self.before = self._decoded() if pieces else ""

    def push(self, pieces: list[str]) -> str:
        self.pieces += pieces
        return ""

    def finish(self) -> str:
        return self._decoded()[len(self.before) :]

    def _decoded(self) -> str:
        with blaming("these tokens cannot be decoded"):
            return self.spelling.decode(self.pieces)
