"""regard translate: lines in, lines out; and which words of them belong together."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from regard.cli.generate import as_json, settings_of
from regard.cli.parse import Count, File, Folder, Machine, Switch, check_counts, values
from regard.cli.shared import Rate, compare, open_file, open_model, read_lines
from regard.errors import DATA, Fault, UsageError

BLOCK = 512


@dataclass(frozen=True)
class Options:
    """Translate lines with an encoder-decoder: one line in, one line out, empty ones stay empty.

    regard translate MODEL lines.de > lines.en
    echo "guten Morgen" | regard translate MODEL --align          good morning <tab> 0-0 1-1
    """

    model: Folder
    file: File = "-"
    """text file, UTF-8; - is stdin"""
    beams: int = 4
    """1 is greedy"""
    max_new_tokens: Count = None
    """default: twice the longest source line and ten"""
    length_penalty: float = 1.0
    """a text scores log probability / length ** penalty"""
    early_stopping: Literal["heuristic", "never", "first"] = "heuristic"
    """when beam search may stop"""
    align: Switch = False
    """after a tab: word pairs source-target, by the last layer's cross-attention"""
    json: Switch = False
    """one JSON object a line: text, ids, logprobs, score, finish; with --align, align"""
    rows: int = 128
    """beams in the batch at most"""
    block: Count = None
    """lines that are read before they are translated; default: 512, on a terminal 1"""
    machine: Machine = field(default_factory=Machine)


def run(options: Options) -> int:
    from regard.decode.generate import Unanswered
    from regard.decode.settings import Settings

    given = settings_of(values(options))
    if options.max_new_tokens is None:
        del given["max_new_tokens"]
    Settings.of(given)
    check_counts(options, "rows", "block")
    with open_file(options.file) as (stream, name):
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

    def __init__(self, options: Options, settings: dict[str, Any], rows: int):
        from regard.evaluate.model import check_reads_text
        from regard.see.look import cross_site
        from regard.text import needed

        self.options, self.settings = options, settings
        self.opened = open_model(options.model, options.machine, rows)
        self.model, self.tokens = self.opened.model, 0
        # A sentence for each line that ended with an error.
        self.failed: list[str] = []
        if not self.opened.encodes:
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
        from regard.decode.generate import answers, default_length

        sources = [self.read(line, f"line {number} of {name}") for number, line in numbered]
        full = [source for source in sources if source]
        results: Iterator[Any] = iter(())
        if full:
            compare(self.opened, full[0])
            limit = {"max_new_tokens": default_length(self.model, full), **self.settings}
            groups = answers(self.model, full, rows=self.options.rows, **limit)
            results = (group[0] for group in groups)
        for (number, line), source in zip(numbered, sources, strict=True):
            result = next(results) if source else None
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
        from regard.models.embedding import context

        config = self.model.config
        source = getattr(config, "source", None)
        return None if source is None else context(config.max_len, source)

    def show(self, line: str, result: Any) -> str:
        from regard.decode.settings import Result
        from regard.see.look import align

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
