"""regard answer: a question and a text in, the piece of the text that answers it out."""

from __future__ import annotations

import json
from dataclasses import dataclass

from regard.cli import shared as cli
from regard.cli.main import tell
from regard.errors import UsageError


@dataclass(frozen=True)
class Options:
    """Find the answer to a question in a text: the answer, a tab, its probability.

    regard answer MODEL --question "Who came?" --context "It was Ann who came."
    regard answer MODEL --question "Who came?" --json < story.txt     where it stands, too
    """

    model: cli.Folder
    question: cli.Text = None  # what is asked
    # the text that has the answer; stdin if left out or -; a long one is read in windows
    context: cli.Text = None
    longest: int = 30  # tokens of an answer at most
    # one JSON object: answer, start, end (characters of the context), score; null where it has none
    json: cli.Switch = False
    machine: cli.Machine = cli.Machine()


def run(options: Options) -> int:
    from regard.evaluate.ask import answer

    cli.check_counts(options, "longest")
    if options.question is None:
        raise UsageError('say what is asked: --question "..."')
    context = cli.read_stdin() if options.context in (None, "-") else options.context
    opened = cli.open_model(options.model, options.machine)
    found = answer(opened, options.question, str(context), longest=options.longest)
    if options.json:
        names = ("answer", "start", "end", "score")
        print(json.dumps(dict(zip(names, found)), ensure_ascii=False))
        return 0
    if found.text is None:
        tell("note", "the text has no answer to this question")
    line = " ".join((found.text or "").splitlines())
    print(f"{line}\t{found.score:.4f}")
    return 0
