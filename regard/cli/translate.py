"""regard translate: lines in, lines out; and which words of them belong together."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from regard.cli import shared as cli
from regard.cli.generate import as_json, settings_of
from regard.errors import DATA, Fault, UsageError


@dataclass(frozen=True)
class Options:
    """Translate lines with an encoder-decoder: one line in, one line out, empty ones stay empty.

    regard translate MODEL lines.de > lines.en
    echo "guten Morgen" | regard translate MODEL --align          good morning <tab> 0-0 1-1
    """

    model: cli.Folder
    file: cli.File = "-"  # text file, UTF-8; - is stdin
    beams: int = 4  # 1 is greedy
    max_new_tokens: cli.Count = None  # default: twice the longest source line and ten
    length_penalty: float = 1.0  # a text scores log probability / length ** penalty
    # when beam search may stop
    early_stopping: Literal["heuristic", "never", "first"] = "heuristic"
    # after a tab: word pairs source-target, by the last layer's cross-attention
    align: cli.Switch = False
    # one JSON object per line: text, ids, logprobs, score, finish; with --align, align
    json: cli.Switch = False
    # lines that are read before they are translated; default: 512, on a terminal 1
    block: cli.Count = None
    rows: int = 128  # beams in the batch at most
    machine: cli.Machine = cli.Machine()


def run(options: Options) -> int:
    from regard.decode.generate import Unanswered
    from regard.decode.settings import Settings

    given = settings_of(options)
    Settings.of(given)
    cli.check_counts(options, "rows", "block")
    cli.check_file(options.file)
    block = options.block or (1 if cli.is_typed(options.file) else 512)
    translator = Translator(options, given, min(options.rows, block * options.beams))
    done, rate = 0, cli.Rate(streaming=False)
    for lines, before, name in cli.line_blocks(options.file, block):
        for text in translator(lines, before, name):
            sys.stdout.write(text + "\n")
        sys.stdout.flush()
        done = before + len(lines)
        rate.add(translator.tokens - rate.tokens, f", {done} lines")
    rate.done(f", {done} lines")
    if failed := translator.failed:
        more = len(failed) - 1
        raise Unanswered(failed[0] + (f" (and {more} more lines)" if more else ""))
    return 0


class Translator:
    """A model that translates, and how it was asked to; `rows` is what a step will have."""

    def __init__(self, options: Options, settings: dict[str, Any], rows: int):
        from regard.evaluate.model import check_reads_text
        from regard.models.embedding import context
        from regard.see.look import cross_site
        from regard.text import needed

        self.options, self.settings, self.tokens = options, settings, 0
        # A sentence for each line that ended with an error.
        self.failed: list[str] = []
        self.opened = cli.open_model(options.model, options.machine)
        self.model = self.opened.model
        if not self.model.reads_source:
            raise UsageError(
                "translate needs an encoder-decoder (T5, BART, Marian, ...); for others use regard generate"
            )
        check_reads_text(self.model)
        self.tokenizer = needed(self.opened.tokenizer)
        self.site = cross_site(self.model) if options.align else ""
        source = getattr(self.model.config, "source", None)
        self.longest = None if source is None else context(self.model.config.max_len, source)

    def __call__(self, lines: list[str], before: int, name: str) -> Iterator[str]:
        """One line of output for each line."""
        from regard.decode.generate import answers, default_length

        places = [
            f"line {number} of {name}" for number in range(before + 1, before + 1 + len(lines))
        ]
        sources = [self.read(line, where) for line, where in zip(lines, places)]
        results: Iterator[Any] = iter(())
        if full := [source for source in sources if source]:
            cli.compare(self.opened, full[0])
            limit = {"max_new_tokens": default_length(self.model, full), **self.settings}
            groups = answers(self.model, full, rows=self.options.rows, **limit)
            results = (group[0] for group in groups)
        for line, source, where in zip(lines, sources, places):
            result = next(results) if source else None
            if result is not None and result.finish == "error":
                self.failed.append(f"{where} was not translated: {result.error}")
            yield self.show(line, result)

    def read(self, line: str, where: str) -> list[int]:
        """The ids of a line; none if it is empty."""
        ids = self.tokenizer.encode(line) if line.strip() else []
        if self.longest is not None and len(ids) > self.longest:
            context = f"the model's context is {self.longest}"
            raise Fault(f"{where} has {len(ids)} tokens, {context}; split the line", DATA)
        return ids

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
        return text + "\t" + " ".join(f"{s}-{t}" for s, t in pairs) if self.site else text
