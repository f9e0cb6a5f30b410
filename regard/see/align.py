"""Which words of a translation belong together, by the last layer's cross-attention."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from regard.decode.generate import special_of
from regard.decode.settings import Result
from regard.errors import UsageError
from regard.see.probe import Probe
from regard.text import Tokenizer


def cross_site(model: Any) -> str:
    """The place of the last cross-attention, by the name a probe gives it."""
    probe = Probe()
    with torch.inference_mode():
        one = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
        model(one, source=one, probe=probe)
    sites = [site for site in probe.maps if site.endswith(".cross")]
    if not sites:
        raise UsageError(
            "--align reads cross-attention, and this model has none; leave --align out"
        )
    return sites[-1]


@torch.inference_mode()
def align(
    model: Any, tokenizer: Tokenizer, site: str, line: str, result: Result
) -> list[tuple[int, int]]:
    """Pairs (source word, target word), both counted from 0 between spaces.

    The finished target is fed once more; each of its tokens belongs to the source token that the
    heads of the last cross-attention, on average, weigh most where that token is predicted. What is
    outside words takes no part."""
    if not result.ids:
        return []
    source, theirs = source_words(tokenizer, line)
    ours = target_words(tokenizer, result.ids)
    probe, device = Probe(layers=[site]), next(model.parameters()).device
    fed = torch.tensor([[special_of(model).start or 0, *result.ids[:-1]]], device=device)
    model(fed, source=torch.tensor([source], device=device), probe=probe)
    weights = probe.maps[site][0][0].float().mean(0)  # t s
    words = torch.tensor([-1 if w is None else w for w in theirs], device=weights.device)
    if bool((words < 0).all()):
        return []
    best = words[weights.masked_fill(words < 0, -1.0).argmax(-1)].tolist()
    return sorted({(s, t) for s, t in zip(best, ours, strict=True) if t is not None})


def source_words(tokenizer: Tokenizer, line: str) -> tuple[list[int], list[int | None]]:
    """The ids of a line, and for each the number of the word it comes from."""
    ids, cutter = tokenizer.encode(line), tokenizer.parts.source or tokenizer.core
    code = re.match(r">>.*?<<", line) if tokenizer.parts.source else None
    start = code.end() if code else 0
    encoding = cutter.encode(line[start:], add_special_tokens=tokenizer.parts.source is None)
    numbers, spans = word_numbers(line), [(a + start, b + start) for a, b in encoding.offsets]
    special = encoding.special_tokens_mask
    words: list[int | None] = [None] if code else []
    for (a, b), odd in zip(spans, special, strict=True):
        words.append(None if odd else last(numbers[a:b]))
    return ids, words + [None] * (len(ids) - len(words))  # Marian's end is added apart


def target_words(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int | None]:
    """The same for the ids of a text that the model wrote: a token that completes no character
    belongs to the word of the next one that does."""
    text, ends = tokenizer.detokenizer(), [0]
    pieces = [text.push(tokenizer.pieces([i])) for i in ids]
    pieces[-1] += text.finish()
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    numbers = word_numbers("".join(pieces))
    words: list[int | None] = []
    for i, piece in zip(ids, pieces, strict=True):
        at = len(words)
        if tokenizer.pieces([i]) and not piece:
            words.append(numbers[ends[at]] if ends[at] < len(numbers) else last(numbers))
        else:
            words.append(last(numbers[ends[at] : ends[at + 1]]))
    return words


def word_numbers(text: str) -> list[int | None]:
    """For each character the number of its word, None for spaces."""
    numbers: list[int | None] = [None] * len(text)
    for number, word in enumerate(re.finditer(r"\S+", text)):
        numbers[word.start() : word.end()] = [number] * (word.end() - word.start())
    return numbers


def last(numbers: Sequence[int | None]) -> int | None:
    return next((n for n in reversed(numbers) if n is not None), None)
