"""One tokenizer for every model folder: text -> ids -> text, on the library `tokenizers`.

A folder without tokenizer files gives None: the model then works on ids (`needed` says so to whoever has text).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from regard.config import UsageError
from regard.text.build import WANTED, Parts, around, build
from regard.text.decoder import Detokenizer, Step, steps
from regard.text.folder import (
    Files,
    Settings,
    blaming,
    content,
    names,
    read_json,
    special_ids,
    style,
    templates,
)

FILES = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt
vocab.txt spiece.model sentencepiece.bpe.model tokenizer.model source.spm target.spm generation_config.json
chat_template.jinja chat_template.json config.json""".split()  # noqa: SIM905


class Tokenizer:
    """Text <-> ids as the model folder has it.

    `vocab` is one more than the highest id, `special` the ids with a meaning, `tokens` the strings of the special
    tokens by name (bos_token, ...), `templates` the chat templates by name."""

    def __init__(
        self, parts: Parts, files: Files, settings: Settings, config: Settings, kind: str | None
    ):
        self.parts, self.core = parts, parts.core
        self.tokens: dict[str, str] = names(files, settings, kind, self.core.token_to_id)
        _add_tokens(self.core, files, settings, self.tokens)
        ids = {f"{name}_id": self.core.token_to_id(text) for name, text in self.tokens.items()}
        if {"add_bos_token", "add_eos_token"} & set(settings):
            self.core.post_processor = _around(settings, self.tokens, ids)
        self.special = special_ids(files, config, ids)
        self.templates = templates(files, settings)
        self.vocab = max(self.core.get_vocab().values(), default=-1) + 1
        added = self.core.get_added_tokens_decoder().items()
        self._skipped = frozenset(index for index, token in added if token.special)
        self._steps: list[Step] = steps(self.core.decoder)
        self._plain: dict[int, tokenizers.Tokenizer] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_files(cls, files: Files, config: Settings | None = None) -> Tokenizer | None:
        """The tokenizer among the files of a folder (name -> bytes, as `model.origin.files`), or None. `config` is the
        content of config.json, where it is not among the files."""
        settings = read_json(files, "tokenizer_config.json")
        config = config or read_json(files, "config.json")
        kind, said = style(settings, config)
        parts = build(files, settings, kind, said)
        if parts is not None and parts.source is not None:
            kind = "marian"
        return None if parts is None else cls(parts, files, settings, config, kind)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer | None:
        """The same from a folder on disk."""
        folder = Path(path)
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder; give the path of a model folder")
        return cls.from_files(
            {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
        )

    def encode(self, text: str, *, special: bool = True, literal: bool = False) -> list[int]:
        """The ids of a text (a source text, where source and target differ), with the tokens that the model expects
        around it if `special`. Text that spells a special token is that token, unless `literal`."""
        return self._encode(text, self.parts.source, special, literal)

    def encode_source(self, text: str, *, special: bool = True, literal: bool = False) -> list[int]:
        """What an encoder reads; the same as `encode`."""
        return self.encode(text, special=special, literal=literal)

    def encode_target(self, text: str, *, special: bool = True, literal: bool = False) -> list[int]:
        """What a decoder writes; differs from `encode` for models with two vocabularies (Marian)."""
        return self._encode(text, self.parts.target, special, literal)

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, after: Sequence[int] = ()
    ) -> str:
        """The text of the ids. `after`: the ids that stand before them, so that a first space is kept:
        decode(a) + decode(b, after=a) == decode(a + b) wherever a ends with a whole character."""
        if after:
            text = self.detokenizer()
            text.begin(self.pieces(after, skip_special=skip_special))
            return text.push(self.pieces(ids, skip_special=skip_special)) + text.finish()
        with blaming("these ids cannot be decoded"):
            whole = self.core.decode(_checked(ids), skip_special_tokens=skip_special)
        return whole.strip() if self.parts.trim else whole

    def pieces(self, ids: Iterable[int], *, skip_special: bool = True) -> list[str]:
        """The vocabulary's own strings, one an id; special tokens left out, ids beyond the vocabulary too."""
        skipped = self._skipped if skip_special else frozenset()
        found = (self.core.id_to_token(i) for i in _checked(ids) if i not in skipped)
        return [piece for piece in found if piece is not None]

    def detokenizer(self) -> Detokenizer:
        """Pieces -> text, step by step; see regard.text.decoder."""
        return Detokenizer(self.core.decoder, self._steps, trim=self.parts.trim)

    def _encode(
        self, text: str, cutter: tokenizers.Tokenizer | None, special: bool, literal: bool
    ) -> list[int]:
        if not isinstance(text, str):
            raise UsageError(
                f"a prompt is text or a list of ids, got {type(text).__name__}: {text!r:.60}"
            )
        check_unicode(text, "the text")
        with blaming("this text cannot be encoded"):
            if cutter is None:
                return self._ways(self.core, literal).encode(text, add_special_tokens=special).ids
            return self._marian(text, self._ways(cutter, literal), special)

    def _marian(self, text: str, cutter: tokenizers.Tokenizer, special: bool) -> list[int]:
        """Pieces by SentencePiece, ids by vocab.json; a language code such as >>fr<< may come first."""
        pieces = []
        if text.startswith(">>") and "<<" in text:
            end = text.index("<<") + 2
            pieces, text = [text[:end]], text[end:]
        pieces += cutter.encode(text, add_special_tokens=False).tokens
        pieces += ["</s>"] if special else []
        unk = self.core.encode("<unk>", add_special_tokens=False).ids[0]
        ids = map(self.core.token_to_id, pieces)
        return [unk if i is None else i for i in ids]

    def _ways(self, core: tokenizers.Tokenizer, literal: bool) -> tokenizers.Tokenizer:
        """`core`, or for literal text a copy that knows no special tokens: the switch on one object is not
        thread-safe."""
        if not literal:
            return core
        with self._lock:
            if id(core) not in self._plain:
                copy = tokenizers.Tokenizer.from_str(core.to_str())
                copy.encode_special_tokens = True
                self._plain[id(core)] = copy
            return self._plain[id(core)]


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, or the error for a text given to a model that has none."""
    if tokenizer is None:
        raise UsageError(
            f"this model folder carries no tokenizer; give ids, or put tokenizer.json into it (a tokenizer is {WANTED})"
        )
    return tokenizer


def check_unicode(text: str, what: str) -> None:
    """Half a surrogate pair is a string in Python but no Unicode text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise UsageError(
            f"{what} holds half a surrogate pair (U+{ord(text[e.start]):04X} at character {e.start}), which is no "
            f"Unicode text; replace it: text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from None


def _checked(ids: Iterable[int]) -> list[int]:
    ids = [int(i) for i in ids]
    wrong = next((i for i in ids if not 0 <= i < 2**32), None)
    if wrong is not None:
        raise UsageError(f"id {wrong} is no token; ids are 0 and above")
    return ids


def _around(settings: Settings, tokens: dict[str, str], ids: dict[str, int | None]) -> Any:
    """add_bos_token and add_eos_token of tokenizer_config.json, which stand above tokenizer.json."""
    ends: list[tuple[str, int] | None] = []
    for name in ("bos", "eos"):
        index = ids.get(f"{name}_token_id")
        used = settings.get(f"add_{name}_token") and index is not None
        ends.append((tokens[f"{name}_token"], index) if used and index is not None else None)
    return around(*ends)


def _add_tokens(
    core: tokenizers.Tokenizer, files: Files, settings: Settings, tokens: dict[str, str]
) -> None:
    """Register the tokens that stand beside the vocabulary, those with an id first."""
    known = {token.content for token in core.get_added_tokens_decoder().values()}
    for index, token in _numbered(files, settings, set(tokens.values())):
        if token.content not in known:
            (core.add_special_tokens if token.special else core.add_tokens)([token])
        found = core.token_to_id(token.content)
        if found != index:
            raise UsageError(
                f"added token {token.content!r} has id {index} in tokenizer_config.json or added_tokens.json, but the "
                f"vocabulary gives it {found}; a file is missing or of another model"
            )
    more = [
        *(settings.get("additional_special_tokens") or []),
        *(settings.get("extra_special_tokens") or []),
    ]
    wanted = [*tokens.values(), *(text for text in map(content, more) if text)]
    special = {t.content for t in core.get_added_tokens_decoder().values() if t.special}
    fresh = [text for text in dict.fromkeys(wanted) if text not in special]
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in fresh])


def _numbered(files: Files, settings: Settings, named: set[str]) -> list[tuple[int, AddedToken]]:
    """(id, token) of added_tokens.json and of added_tokens_decoder, in the order of the ids."""
    found: dict[int, AddedToken] = {}
    with blaming(
        "added_tokens.json or added_tokens_decoder of tokenizer_config.json is not as it should be"
    ):
        for text, index in read_json(files, "added_tokens.json").items():
            found[int(index)] = AddedToken(text, normalized=False, special=text in named)
        for index, token in (settings.get("added_tokens_decoder") or {}).items():
            flags = {
                k: bool(token.get(k, False))
                for k in ("lstrip", "rstrip", "single_word", "normalized")
            }
            special = bool(token.get("special")) or token["content"] in named
            found[int(index)] = AddedToken(token["content"], special=special, **flags)
    return sorted(found.items(), key=lambda item: item[0])
