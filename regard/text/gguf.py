"""The metadata of a GGUF file -> the tokenizer files that a model folder has.

Two kinds are read: "gpt2", byte-level BPE, whose way of cutting text into words is known by name
(`tokenizer.ggml.pre`), and "llama", BPE as SentencePiece does it, by scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import normalizers

from regard.errors import UsageError
from regard.text.build import (
    BPE,
    NORMAL,
    QWEN_WORDS,
    SPACE,
    UNUSED,
    SentencePiece,
    around,
    byte_level,
    cutter,
    declared,
    piece_decoder,
)

KEY = "tokenizer.ggml."
_LLAMA3_WORDS = QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> how byte-level BPE cuts text into words (`byte_level`), and whether a text
# begins with the bos token if the file does not say.
_LLAMA3: dict[str, Any] = dict(pattern=_LLAMA3_WORDS, whole=True, bos=True)
_QWEN2: dict[str, Any] = dict(pattern=QWEN_WORDS, composed=True)
PRE: dict[str, dict[str, Any]] = {
    "gpt-2": {},
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **{name: dict(digits=True) for name in ("smollm", "starcoder", "refact")},
    "tekken": dict(pattern=_TEKKEN_WORDS, whole=True, bos=True),
}
# What a file means that names none: by architecture.
UNNAMED = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2", "llama": "llama-bpe"}


def tokenizer_files(metadata: Mapping[str, Any]) -> tuple[dict[str, bytes], list[str]]:
    """Files by name, and sentences about what is not certain. Without files the model works on ids."""
    kind = metadata.get(KEY + "model")
    notices = []
    if kind is None or kind in ("none", "no_vocab"):
        without = "the file has no tokenizer, nor has the folder"
        return {}, [f"{without}: give ids, or put tokenizer.json into it"]
    if kind not in ("gpt2", "llama"):
        return {}, [_unknown("model", kind, ("gpt2", "llama"))]
    vocab = Vocabulary(metadata)
    if kind == "llama":
        core = _pieces_of(vocab)
        bos = True
    else:
        name = metadata.get(KEY + "pre")
        if name in (None, "default"):
            name = UNNAMED.get(str(metadata.get("general.architecture")), "gpt-2")
            notices.append(f"the file does not name how text is cut into words; {name} is assumed")
        if name not in PRE:
            return {}, [_unknown("pre", name, PRE)]
        merges = [tuple(merge.split(" ")) for merge in vocab.entries("merges", str)]
        options = {"bos": False, **PRE[name]}
        bos = options.pop("bos")
        core = byte_level(vocab.numbers, merges, f"{KEY}tokens and {KEY}merges", **options)
    named = {index for name, index in vocab.ids.items() if name != "unknown"}
    core.add_tokens(declared(vocab.tokens, vocab.kinds, named))
    first = vocab.named("bos") if metadata.get(KEY + "add_bos_token", bos) else None
    last = vocab.named("eos") if metadata.get(KEY + "add_eos_token", False) else None
    if first or last:
        core.post_processor = around(first, last)
    # Every token that ends an answer, not only the text's end.
    ids = vocab.ids
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if name in ids))
    end = ends[0] if len(ends) == 1 else ends or None
    table = dict(bos_token_id=ids.get("bos"), eos_token_id=end, pad_token_id=ids.get("padding"))
    table = {name: value for name, value in table.items() if value is not None}
    tables = {"tokenizer_config.json": _settings(vocab), "generation_config.json": table}
    files = {n: json.dumps(table, indent=2, ensure_ascii=False) for n, table in tables.items()}
    files["tokenizer.json"] = core.to_str(pretty=True)
    return {name: text.encode() for name, text in files.items()}, notices


def _unknown(key: str, value: Any, known: Any) -> str:
    return (
        f"{KEY}{key} is {value!r:.60}, which cannot be built (known: {', '.join(known)}): the folder has no tokenizer; "
        "put the tokenizer.json of the original model into it"
    )


class Vocabulary:
    """The lists and ids below tokenizer.ggml, checked. Ids at the end that only fill the embedding up are left out."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata
        tokens = self.entries("tokens", str)
        kinds = self.entries("token_type", int) or [NORMAL] * len(tokens)
        if not tokens or len(kinds) != len(tokens):
            raise UsageError(f"{KEY}tokens has {len(tokens)} entries, token_type {len(kinds)}")
        names = ("bos", "eos", "eot", "eom", "padding", "unknown")
        ids = {name: self.id(name, len(tokens)) for name in names}
        self.ids = {name: index for name, index in ids.items() if index is not None}
        while kinds and kinds[-1] == UNUSED:
            kinds.pop()
        self.tokens = tokens[: len(kinds)]
        self.kinds = kinds
        self.numbers = {token: i for i, token in enumerate(self.tokens)}
        if len(self.numbers) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.numbers[t] != i)
            raise UsageError(f"{KEY}tokens has {twice!r:.60} twice")

    def entries(self, key: str, kind: type) -> list[Any]:
        values = self.metadata.get(KEY + key, [])
        if not isinstance(values, list) or not all(isinstance(entry, kind) for entry in values):
            raise UsageError(f"{KEY}{key} must be a list of {kind.__name__}, got {values!r:.60}")
        return list(values)

    def id(self, name: str, count: int) -> int | None:
        index = self.metadata.get(f"{KEY}{name}_token_id")
        if index is not None and (not isinstance(index, int) or not 0 <= index < count):
            raise UsageError(f"{KEY}{name}_token_id is {index!r:.60}, but there are {count} tokens")
        return index

    def named(self, name: str) -> tuple[str, int] | None:
        index = self.ids.get(name)
        return None if index is None or index >= len(self.tokens) else (self.tokens[index], index)


def _pieces_of(vocab: Vocabulary) -> tokenizers.Tokenizer:
    scores = vocab.entries("scores", float)[: len(vocab.tokens)]
    if len(scores) != len(vocab.tokens):
        raise UsageError(f"{KEY}scores has {len(scores)} entries for {len(vocab.tokens)} tokens")
    unk = vocab.ids.get("unknown", 0)
    model = SentencePiece(vocab.tokens, scores, vocab.kinds, BPE, unk)
    core = cutter(model, list(zip(vocab.tokens, scores)), unk, f"{KEY}tokens")
    prefix = bool(vocab.metadata.get(KEY + "add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    core.decoder = piece_decoder(prefix)
    return core


def _settings(vocab: Vocabulary) -> dict[str, Any]:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings["clean_up_tokenization_spaces"] = False
    for theirs, ours in {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}.items():
        settings[f"{ours}_token"] = (vocab.named(theirs) or (None,))[0]
    # The usual template, and others with a name behind a dot.
    key = "tokenizer.chat_template"
    templates = {
        k[len(key) + 1 :]: v for k, v in vocab.metadata.items() if f"{k}.".startswith(f"{key}.")
    }
    if templates:
        each = [{"name": name or "default", "template": text} for name, text in templates.items()]
        settings["chat_template"] = templates[""] if list(templates) == [""] else each
    return settings
