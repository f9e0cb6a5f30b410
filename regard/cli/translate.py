"""regard translate: lines in, lines out; and which words of them belong together."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from regard.cli.generate import as_json, check_reads_text, settings_of
from regard.cli.model import Opened, Rate, opened, read_lines, start_of
from regard.cli.options import Translate
from regard.cli.parse import values
from regard.decode.generate import Unanswered, answers, default_length
from regard.decode.settings import Result, Settings
from regard.errors import DATA, Fault, UsageError
from regard.models.embedding import context
from regard.see.probe import Probe
from regard.text import Tokenizer, needed

BLOCK = 512


def run(options: Translate) -> int:
    given = settings_of(values(options))
    if options.max_new_tokens is None:
        del given["max_new_tokens"]
    Settings.of(given)
    for name in ("rows", "block"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise UsageError(f"--{name} is {getattr(options, name)}; give a number from 1")
    with opened(options.file) as (stream, name):
        alone = options.file == "-" and sys.stdin.isatty()
        block = min(options.block or (1 if alone else BLOCK), sys.maxsize)
        translator = Translator(options, given, min(options.rows, block * options.beams))
        lines = enumerate(read_lines(stream, name), 1)
        done, rate = 0, Rate(streaming=False)
        while part := list(itertools.islice(lines, block)):
            for text in translator.translate(part, name):
                sys.stdout.write(text + "\n")
            sys.stdout.flush()
            done += len(part)
            rate.add(translator.take(), f", {done} lines")
        rate.done(f", {done} lines")
    if translator.failed:
        more = len(translator.failed) - 1
        raise Unanswered(translator.failed[0] + (f" (and {more} more lines)" if more else ""))
    return 0


class Translator:
    """A model that translates, and how it was asked to; `rows` is what a step will have."""

    def __init__(self, options: Translate, settings: dict[str, Any], rows: int):
        self.options, self.settings = options, settings
        self.opened = Opened(options.model, options.machine, rows)
        self.model, self.tokens = self.opened.model, 0
        self.failed: list[str] = []  # a sentence for each line that ended with an error
        if not self.opened.two:
            raise UsageError(
                "translate needs an encoder-decoder (T5, BART, Marian, ...); for others use regard generate"
            )
        check_reads_text(self.model)
        self.tokenizer = needed(self.opened.tokenizer)
        self.site = cross_site(self.model) if options.align else ""

    def take(self) -> int:
        """Tokens made since the last call."""
        count, self.tokens = self.tokens, 0
        return count

    def translate(self, numbered: list[tuple[int, str]], name: str) -> Iterator[str]:
        """One line of output for each (number, line)."""
        sources = [self.read(line, f"line {number} of {name}") for number, line in numbered]
        full = [source for source in sources if source]
        found: Iterator[Result] = iter(())
        if full:
            self.opened.compare(full[0])
            limit = {"max_new_tokens": default_length(self.model, full), **self.settings}
            groups = answers(self.model, full, rows=self.options.rows, **limit)
            found = (group[0] for group in groups)
        for (number, line), source in zip(numbered, sources, strict=True):
            result = next(found) if source else None
            if result is not None and result.finish == "error":
                self.failed.append(f"line {number} of {name} was not translated: {result.error}")
            yield self.show(line, result)

    def read(self, line: str, where: str) -> list[int]:
        """The ids of a line; none if it is empty."""
        ids, longest = self.tokenizer.encode(line) if line.strip() else [], self.longest
        if longest is not None and len(ids) > longest:
            raise Fault(
                f"{where} has {len(ids)} tokens, the model's context is {longest}; split the line",
                DATA,
            )
        return ids

    @property
    def longest(self) -> int | None:
        """Tokens that the encoder can read."""
        config = self.model.config
        source = getattr(config, "source", None)
        return None if source is None else context(config.max_len, source)

    def show(self, line: str, result: Result | None) -> str:
        if result is None and not self.options.json:
            return ""
        result = result or Result([], [], 0.0, "eos", text="")
        self.tokens += len(result.ids)
        pairs = align(self.model, self.tokenizer, self.site, line, result) if self.site else []
        if self.options.json:
            return as_json(result, **({"align": [list(p) for p in pairs]} if self.site else {}))
        text = re.sub(r"[\r\n]+", " ", result.text or "")
        if not self.site:
            return text
        return text + "\t" + " ".join(f"{s}-{t}" for s, t in pairs)


# --- alignment ----------------------------------------------------------------------------------------------------


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

    The finished target is fed once more; each of its tokens belongs to the source token that the heads of the last
    cross-attention, on average, weigh most where that token is predicted. What is outside words takes no part."""
    if not result.ids:
        return []
    source, theirs = source_words(tokenizer, line)
    ours = target_words(tokenizer, result.ids)
    probe, device = Probe(layers=[site]), next(model.parameters()).device
    fed = torch.tensor([[start_of(model), *result.ids[:-1]]], device=device)
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
    found = cutter.encode(line[start:], add_special_tokens=tokenizer.parts.source is None)
    numbers, spans = word_numbers(line), [(a + start, b + start) for a, b in found.offsets]
    special = found.special_tokens_mask
    words: list[int | None] = [None] if code else []
    for (a, b), odd in zip(spans, special, strict=True):
        words.append(None if odd else last(numbers[a:b]))
    return ids, words + [None] * (len(ids) - len(words))  # Marian's end is added apart


def target_words(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int | None]:
    """The same for the ids of a text that the model wrote: a token that completes no character belongs to the word of
    the next one that does."""
    text, ends = tokenizer.detokenizer(), [0]
    pieces = [text.push(tokenizer.pieces([i])) for i in ids]
    pieces[-1] += text.finish()
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    numbers = word_numbers("".join(pieces))
    found: list[int | None] = []
    for i, piece in zip(ids, pieces, strict=True):
        at = len(found)
        if tokenizer.pieces([i]) and not piece:
            found.append(numbers[ends[at]] if ends[at] < len(numbers) else last(numbers))
        else:
            found.append(last(numbers[ends[at] : ends[at + 1]]))
    return found


def word_numbers(text: str) -> list[int | None]:
    """For each character the number of its word, None for spaces."""
    found: list[int | None] = [None] * len(text)
    for number, word in enumerate(re.finditer(r"\S+", text)):
        found[word.start() : word.end()] = [number] * (word.end() - word.start())
    return found


def last(numbers: Sequence[int | None]) -> int | None:
    return next((n for n in reversed(numbers) if n is not None), None)
