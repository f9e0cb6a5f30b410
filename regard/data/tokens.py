"""A tokenizer as training data needs it: many texts at once, and the special tokens apart from the text.

regard.train may not import this package: it is handed a `Coder`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders

from regard.errors import UsageError
from regard.text.build import plain_copy
from regard.text.folder import blaming
from regard.text.tokenizer import Tokenizer, check_unicode

# Ids, and the characters each comes from.
Located = tuple[list[int], list[tuple[int, int]]]


class Coder:
    """Texts -> ids, without special tokens; a text that spells one is text. `other` is the target's
    tokenizer, where that is another one.

    A model that reads one text expects `before` text `after`, of two: `before` text `between` text
    `after`. A decoder begins with `start` and ends with `end`; None is what the tokenizer does not
    have. `reserved` are all special tokens."""

    def __init__(self, tokenizer: Tokenizer, other: Tokenizer | None = None):
        self.source, self.target = tokenizer, other or tokenizer
        self.vocab = max(self.source.vocab, self.target.vocab)
        self.before, self.between, self.after = _template(tokenizer)
        special = self.target.special
        self.end = special.eos[0] if special.eos else None
        starts = (special.start, special.bos, special.pad, self.end)
        self.start = next((i for i in starts if i is not None), None)
        self.pad = special.pad if special.pad is not None else self.end or 0
        self.unknown = tokenizer.special.unk
        mask = tokenizer.tokens.get("mask_token")
        self.mask = None if mask is None else tokenizer.core.token_to_id(mask)
        added = self.source.core.get_added_tokens_decoder().items()
        self.reserved = tuple(sorted(i for i, token in added if token.special))
        self._plain = {
            id(t): plain_copy(t.core) for t in (self.source, self.target) if t.parts.source is None
        }

    @property
    def fingerprint(self) -> str:
        whole = hashlib.sha256()
        for tokenizer in (self.source, self.target):
            sides = (tokenizer.core, tokenizer.parts.source, tokenizer.parts.target)
            for core in sides:
                whole.update(b"" if core is None else core.to_str().encode())
        return whole.hexdigest()

    def encode(self, texts: Sequence[str], *, target: bool = False) -> list[list[int]]:
        tokenizer = self.target if target else self.source
        plain = self._plain.get(id(tokenizer))
        # Marian cuts each side by another model.
        if plain is None:
            cut = tokenizer.encode_target if target else tokenizer.encode
            return [cut(text, special=False, literal=True) for text in texts]
        return [encoding.ids for encoding in _many(plain, texts, fast=True)]

    def located(self, texts: Sequence[str]) -> list[Located]:
        """The same with the first character of each token and the one behind its last."""
        plain = self._plain.get(id(self.source))
        if plain is None:
            raise UsageError(
                "a tokenizer of two sides does not tell which characters a token is made of"
            )
        return [(encoding.ids, encoding.offsets) for encoding in _many(plain, texts, fast=False)]

    def tokens(self, ids: Sequence[int], *, target: bool = False) -> list[str]:
        """The pieces, one per id; those of a byte-level vocabulary as the text they stand for, if it is whole."""
        core = (self.target if target else self.source).core
        pieces = [core.id_to_token(i) or f"<{i}>" for i in ids]
        if not isinstance(core.decoder, decoders.ByteLevel):
            return pieces
        texts = [core.decode([i], skip_special_tokens=False) for i in ids]
        return [text if text and "\ufffd" not in text else raw for text, raw in zip(texts, pieces)]


def _many(
    core: tokenizers.Tokenizer, texts: Sequence[str], fast: bool
) -> list[tokenizers.Encoding]:
    encode = core.encode_batch_fast if fast else core.encode_batch
    try:
        return encode(list(texts), add_special_tokens=False)
    except (TypeError, UnicodeError):
        for text in texts:
            check_unicode(text, f"the text {text!r:.40}")
        raise


def _template(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before, between and after texts."""
    if tokenizer.parts.source is not None:
        return (), (), tuple(tokenizer.special.eos[:1])
    with blaming("the tokenizer does not take two texts"):
        pair = tokenizer.core.encode("x", "x", add_special_tokens=True)
        alone = tokenizer.core.encode("x", add_special_tokens=True)
    text = [i for i, special in enumerate(alone.special_tokens_mask) if not special]
    if not text:
        return (), (), tuple(alone.ids)
    before, after = alone.ids[: text[0]], alone.ids[text[-1] + 1 :]
    inner = slice(len(before), len(pair.ids) - len(after))
    if pair.ids[: inner.start] != before or pair.ids[inner.stop :] != after:
        # It has no form for two texts.
        return tuple(before), tuple(after), tuple(after)
    marks = zip(pair.ids[inner], pair.special_tokens_mask[inner])
    return tuple(before), tuple(i for i, special in marks if special), tuple(after)
