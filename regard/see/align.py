"""Which words of a translation belong together, by the weights of cross-attention."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from regard.decode.settings import Result
from regard.errors import UsageError
from regard.see.look import Given, watched, writing
from regard.see.probe import Probe
from regard.text import Tokenizer


@torch.inference_mode()
def cross_site(model: Any) -> str:
    """The place of the last cross-attention, by the name a probe gives it."""
    one = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    probe = watched(model, Given(one, [], one), Probe())
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
    device = next(model.parameters()).device
    read = Given(torch.tensor([source], device=device), [])
    probe = watched(model, writing(model, None, read, result.ids), Probe(layers=[site]))
    # t s.
    weights = probe.maps[site][0][0].float().mean(0)
    words = torch.tensor([-1 if w is None else w for w in theirs], device=weights.device)
    if bool((words < 0).all()):
        return []
    best = words[weights.masked_fill(words < 0, -1.0).argmax(-1)].tolist()
    return sorted({(s, t) for s, t in zip(best, ours, strict=True) if t is not None})


def source_words(tokenizer: Tokenizer, line: str) -> tuple[list[int], list[int | None]]:
    """The ids of a line, and for each the number of the word it comes from."""
    ids = tokenizer.encode(line)
    cutter = tokenizer.parts.source or tokenizer.core
    code = re.match(r">>.*?<<", line) if tokenizer.parts.source else None
    start = code.end() if code else 0
    encoding = cutter.encode(line[start:], add_special_tokens=tokenizer.parts.source is None)
    numbers = word_numbers(line)
    words: list[int | None] = [None] if code else []
    for (a, b), special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
        words.append(None if special else _last(numbers[a + start : b + start]))
    # Marian's end is added apart.
    return ids, words + [None] * (len(ids) - len(words))


def target_words(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int | None]:
    """The same for the ids of a text that the model wrote: a token that completes no character
    belongs to the word of the next one that does."""
    text = tokenizer.detokenizer()
    pieces = [text.push(tokenizer.pieces([i])) for i in ids]
    pieces[-1] += text.finish()
    numbers = word_numbers("".join(pieces))
    words: list[int | None] = []
    at = 0
    for i, piece in zip(ids, pieces, strict=True):
        end = at + len(piece)
        if tokenizer.pieces([i]) and not piece:
            words.append(numbers[at] if at < len(numbers) else _last(numbers))
        else:
            words.append(_last(numbers[at:end]))
        at = end
    return words


def word_numbers(text: str) -> list[int | None]:
    """For each character the number of its word, None for spaces."""
    numbers: list[int | None] = [None] * len(text)
    for number, word in enumerate(re.finditer(r"\S+", text)):
        numbers[word.start() : word.end()] = [number] * (word.end() - word.start())
    return numbers


def _last(numbers: Sequence[int | None]) -> int | None:
    return next((n for n in reversed(numbers) if n is not None), None)
