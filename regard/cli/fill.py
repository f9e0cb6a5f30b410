"""regard fill: a text with masks in, the most probable tokens behind each out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from regard.cli import shared as cli


@dataclass(frozen=True)
class Options:
    """The most probable tokens behind each mask of a text: the token, a tab, its probability.

    regard fill MODEL "Paris is the [MASK] of France."
    regard fill MODEL "[MASK] is the [MASK] of France." --top 3    an empty line between two masks
    """

    model: cli.Folder
    # text with one [MASK] or several (<mask>, or the tokenizer's own); stdin if left out or -
    text: Annotated[Positional[str | None], arg(metavar="[TEXT]")] = None
    top: int = 5  # this many tokens for each mask
    json: cli.Switch = False  # one JSON object for each mask: the tokens and their probabilities
    machine: cli.Machine = cli.Machine()


def run(options: Options) -> int:
    from regard.evaluate.ask import fill

    cli.check_counts(options, "top")
    text = cli.read_stdin() if options.text in (None, "-") else options.text
    opened = cli.open_model(options.model, options.machine)
    for number, ranking in enumerate(fill(opened, str(text), top=options.top)):
        if options.json:
            tokens = [{"token": token, "probability": p} for token, p in ranking]
            print(json.dumps({"mask": number, "tokens": tokens}, ensure_ascii=False))
            continue
        lines = [f"{token}\t{p:.4f}" for token, p in ranking]
        print("\n".join(["", *lines] if number else lines))
    return 0
