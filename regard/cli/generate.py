"""regard generate: one prompt in; its answer, or its answers, out.

Settings of decoding have the names and the defaults of regard.decode.settings.Settings, which
checks their values; a test keeps the two alike.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg
from tyro.conf import UseAppendAction as Many

from regard.cli.parse import Folder, Machine, Switch, values
from regard.cli.shared import Rate, compare, open_model, read_text
from regard.errors import UsageError

if TYPE_CHECKING:
    from regard.decode.settings import Result


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, when temperature is above 0."""

    top_k: int = 0
    """draw from the K most probable tokens; 0: from all"""
    min_p: float = 0.0
    """least share of the most probable token's probability"""
    typical_p: float = 1.0
    """draw from the most typical tokens that make up this probability"""
    repetition_penalty: float = 1.0
    """above 1: tokens that occurred become less probable"""
    presence_penalty: float = 0.0
    """taken from the logit of each token that occurred"""
    frequency_penalty: float = 0.0
    """the same for each time it occurred"""
    samples: int = 1
    """several answers to the prompt"""


@dataclass(frozen=True)
class Search:
    """Beam search, and speculation."""

    beams: int = 1
    """above 1: beam search"""
    n_best: int = 1
    """print the N best of the beams"""
    length_penalty: float = 1.0
    """a text scores log probability / length ** penalty"""
    early_stopping: Literal["heuristic", "never", "first"] = "heuristic"
    """when beam search may stop: by a bound, at the best bound, or with as many texts as beams"""
    groups: int = 1
    """groups of beams that avoid each other's tokens"""
    diversity: float = 0.0
    """how much they avoid them"""
    draft_model: Annotated[str | None, arg(metavar="FOLDER")] = None
    """a small model of the same vocabulary that guesses tokens ahead; changes no greedy token"""
    draft: int = 0
    """how many it guesses at once; 0: 4"""
    lookup: int = 0
    """guess this many tokens at once by looking the last ones up in the text; changes no token"""


@dataclass(frozen=True)
class Tokens:
    """Rules about single tokens, by id."""

    min_new_tokens: int = 0
    """no end before this many tokens"""
    logit_bias: Annotated[Many[tuple[str, ...]], arg(metavar="ID=BIAS")] = ()
    """add BIAS to the logit of token ID"""
    banned: Annotated[Many[tuple[int, ...]], arg(metavar="ID")] = ()
    """never this token"""
    eos: Annotated[Many[tuple[int, ...]], arg(metavar="ID")] = ()
    """tokens that end the text, instead of the folder's"""
    forced_first: Annotated[int | None, arg(metavar="ID")] = None
    """the first token"""
    forced_last: Annotated[int | None, arg(metavar="ID")] = None
    """the last token of a text that reaches the limit"""


@dataclass(frozen=True)
class Options:
    """Answer a prompt.

    regard generate MODEL "Once upon a time"                      the most probable text, as it is made
    regard generate MODEL "Once" --temperature 0.8 --top-p 0.9    drawn; --seed N for another one
    echo "Once" | regard generate MODEL --json                    prompt from stdin; ids, log-probabilities, score
    """

    model: Folder
    prompt: Annotated[Positional[str | None], arg(metavar="[PROMPT]")] = None
    """the text; stdin if left out or -"""
    max_new_tokens: int = 64
    """end after this many tokens"""
    overflow: Literal["refuse", "crop"] = "refuse"
    """a text longer than the model's context: an error, or go on with its last tokens"""
    temperature: float = 0.0
    """0: always the most probable token; 1: draw by the model's probabilities"""
    top_p: float = 1.0
    """draw from the most probable tokens that make up this probability"""
    seed: int = 0
    """another number, another text"""
    stop: Annotated[Many[tuple[str, ...]], arg(metavar="TEXT")] = ()
    """end before this text"""
    ids: Switch = False
    """the prompt is token ids: "5 9 2" """
    json: Switch = False
    """one JSON object for each answer: text, ids, logprobs, score, finish"""
    sampling: Sampling = field(default_factory=Sampling)
    search: Search = field(default_factory=Search)
    tokens: Tokens = field(default_factory=Tokens)
    machine: Machine = field(default_factory=Machine)


def run(options: Options) -> int:
    from regard.decode.generate import Unanswered, answers, failed, stream, unread
    from regard.decode.settings import Settings
    from regard.evaluate.model import check_reads_text, notice_length
    from regard.text import needed

    given = settings_of(values(options))
    # A wrong setting is told before the model is read.
    rows = Settings.of(given).rows
    check_guesses(options.search)
    prompt, drafted = read_prompt(options), options.search.draft_model
    opened = open_model(options.model, options.machine, rows)
    check_reads_text(opened.model)
    compare(opened, prompt)
    tokenizer, ids = opened.tokenizer, prompt
    if isinstance(prompt, str):
        ids = needed(tokenizer).encode(prompt)
        if lost := unread(needed(tokenizer), prompt):
            print(f"note: {lost}", file=sys.stderr)
    model, given["stop"] = opened.model, options.stop
    if drafted is not None:
        given["draft_model"] = open_model(drafted, options.machine, rows).model
        given["draft"] = given["draft"] or 4
    text = rows == 1 and not options.json and tokenizer is not None
    rate = Rate(streaming=text)
    if text:
        results = [write(stream(model, prompt, **given), rate, [])]
        print()
    else:
        (results,) = answers(model, [prompt], rows=rows, **given)
        rate.add(sum(len(r.ids) for r in results))
        for result in results:
            print(as_json(result) if options.json else as_text(result))
    written = max((len(result.ids) for result in results), default=0)
    notice_length(model, max(len(ids), written) if opened.encodes else len(ids) + written)
    rate.done(f", ended by {', '.join(dict.fromkeys(r.finish for r in results))}")
    if failed(results):
        raise Unanswered(failed(results))
    return 0


def check_guesses(search: Search) -> None:
    if search.draft and search.draft_model is None:
        raise UsageError(
            "--draft counts the guesses of a draft model; name it: --draft-model FOLDER"
        )
    if search.beams > 1 and (search.lookup or search.draft_model is not None):
        raise UsageError(
            "beam search does not guess ahead: leave --lookup and --draft-model out, or --beams"
        )


def settings_of(given: dict[str, Any]) -> dict[str, Any]:
    """The options that are settings of decoding. Token rules that were not given are left to the
    model folder."""
    from regard.decode.settings import Settings

    known = {f.name for f in dataclasses.fields(Settings)}
    settings = {name: value for name, value in given.items() if name in known}
    for name in ("banned", "eos", "forced_first", "forced_last"):
        if not settings.get(name) and settings.get(name) != 0:
            settings.pop(name, None)
    if "logit_bias" in settings:
        settings["logit_bias"] = tuple(bias(text) for text in settings["logit_bias"])
    return settings


def bias(text: str) -> tuple[int, float]:
    try:
        token, value = text.split("=")
        return int(token), float(value)
    except ValueError:
        raise UsageError(
            f"--logit-bias is {text!r}; give ID=BIAS, for example --logit-bias 42=-5"
        ) from None


def read_prompt(options: Options) -> Any:
    text = options.prompt
    if text is None or text == "-":
        text = read_text("-")
    if not options.ids:
        return text
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UsageError(
            f"--ids wants whole numbers such as '5 9 2', got {text!r:.60}; leave it out for text"
        ) from None


def write(pieces: Generator[str, None, Result], rate: Rate, written: list[str]) -> Result:
    """Write an answer to stdout while it is made; `written` gets it too, should it be
    interrupted."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            # The last piece may be the rest of others.
            rate.tokens = len(end.value.ids)
            return end.value
        rate.add(1)
        if piece:
            written.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()


def as_text(result: Result) -> str:
    return " ".join(map(str, result.ids)) if result.text is None else result.text


def as_json(result: Result, **more: Any) -> str:
    """One line of JSON; a log-probability that is no finite number is null."""
    answer = {
        "text": result.text,
        "ids": result.ids,
        "logprobs": [finite(x) for x in result.logprobs],
        "score": finite(result.score),
        "finish": result.finish,
        **({} if result.error is None else {"error": result.error}),
        **more,
    }
    return json.dumps(answer, ensure_ascii=False, allow_nan=False)


def finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
