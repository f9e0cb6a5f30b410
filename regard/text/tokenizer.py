"""One tokenizer for every model folder: text -> ids -> text, on the library `tokenizers`; and text while it is
generated.

A folder without tokenizer files gives None: the model then works on ids (`needed` says so to whoever has text).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from regard.errors import UsageError
from regard.files import TOKENIZER_FILES, model_folder, read_files
from regard.text import build
from regard.text.build import Files, Parts, Settings, blaming, check_unicode, content, read_json
from regard.text.decoder import Detokenizer, piece_bytes, steps

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
        self.vocab = max(self.core.get_vocab().values(), default=-1) + 1
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
        check_unicode(text, "the text")
        with blaming("this text cannot be encoded"):
            core = self._plain(self.core) if literal else self.core
            encoding = core.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def unknown(self, text: str) -> list[str]:
        """The parts of a text that have no token and become the unknown one, each once: what the model cannot read."""
        if self.special.unk is None:
            return []
        encoding = (self.parts.source or self.core).encode(text, add_special_tokens=False)
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
        return whole.strip() if self.parts.trim else whole

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
        """Pieces -> text, step by step; see regard.text.decoder."""
        return Detokenizer(self.core.decoder, self._steps, trim=self.parts.trim)

    def _encode(
        self, text: str, cutter: tokenizers.Tokenizer | None, special: bool, literal: bool
    ) -> list[int]:
        if not isinstance(text, str):
            raise UsageError(f"a prompt is text or a list of ids, got {text!r:.60}")
        check_unicode(text, "the text")
        with blaming("this text cannot be encoded"):
            core = self._plain(cutter or self.core) if literal else cutter or self.core
            if cutter is None:
                return core.encode(text, add_special_tokens=special).ids
            # Marian: pieces by SentencePiece, ids by vocab.json; a language code such as >>fr<< may come first.
            code = None if literal else re.match(">>.*?<<", text, re.DOTALL)
            first, text = (code[0], text[code.end() :]) if code else ("", text)
            pieces = [first] if first else []
            pieces += core.encode(text, add_special_tokens=False).tokens
            unk, ids = self.core.token_to_id("<unk>"), map(self.core.token_to_id, pieces)
            known = [unk if i is None or (literal and i in self._skipped) else i for i in ids]
            eos = [self.core.token_to_id("</s>")] if special else []
            return [i for i in (*known, *eos) if i is not None]

    def _plain(self, core: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """A copy that knows no special tokens (a switch on the one object would not be thread-safe)."""
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


def _checked(ids: Iterable[int]) -> list[int]:
    ids = [int(i) for i in ids]
    if ids and not 0 <= min(ids) <= max(ids) < 2**32:
        wrong = next(i for i in ids if not 0 <= i < 2**32)
        raise UsageError(f"id {wrong} is not a token; ids are 0 and above")
    return ids


def _add_tokens(
    core: tokenizers.Tokenizer, files: Files, settings: Settings, tokens: dict[str, str]
) -> None:
    """Register the tokens that stand beside the vocabulary, those with an id first."""
    known = {token.content for token in core.get_added_tokens_decoder().values()}
    for index, token in _numbered(files, settings, set(tokens.values())):
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


def _numbered(files: Files, settings: Settings, named: set[str]) -> list[tuple[int, AddedToken]]:
    """(id, token) of added_tokens.json and of added_tokens_decoder, in the order of the ids."""
    tokens: dict[int, AddedToken] = {}
    with blaming("added_tokens.json or added_tokens_decoder of tokenizer_config.json is odd"):
        for text, index in read_json(files, "added_tokens.json").items():
            tokens[int(index)] = AddedToken(text, normalized=False, special=text in named)
        for index, token in (settings.get("added_tokens_decoder") or {}).items():
            special = bool(token.get("special")) or token["content"] in named
            tokens[int(index)] = AddedToken(token["content"], special=special, **_flags(token))
    return sorted(tokens.items(), key=lambda item: item[0])
