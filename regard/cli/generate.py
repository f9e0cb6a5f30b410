"""regard generate: one prompt in; its answer, or its answers, out."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Generator
from dataclasses import fields
from typing import Any

from regard.cli.model import Opened, Rate, decoded, opened, past_training
from regard.cli.options import Generate, Search
from regard.cli.parse import values
from regard.decode.generate import Prompt, Unanswered, answers, failed, stream, unread
from regard.decode.settings import Result, Settings
from regard.errors import UsageError
from regard.models import Patches
from regard.text import needed


def run(options: Generate) -> int:
    given = settings_of(values(options))
    rows = Settings.of(given).rows  # a wrong setting is told before the model is read
    check_guesses(options.search)
    prompt, drafted = read_prompt(options), options.search.draft_model
    opened_model = Opened(options.model, options.machine, rows)
    check_reads_text(opened_model.model)
    opened_model.compare(prompt)
    tokenizer, ids = opened_model.tokenizer, prompt
    if isinstance(prompt, str):
        ids = needed(tokenizer).encode(prompt)
        if lost := unread(needed(tokenizer), prompt):
            print(f"note: {lost}", file=sys.stderr)
    model, given["stop"] = opened_model.model, options.stop
    if drafted is not None:
        given["draft_model"] = Opened(drafted, options.machine, rows).model
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
    past_training(model, max(len(ids), written) if opened_model.two else len(ids) + written)
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
    """The options that are settings of decoding. Token rules that were not given are left to the model folder."""
    known = {f.name for f in fields(Settings)}
    found = {name: value for name, value in given.items() if name in known}
    for name in ("banned", "eos", "forced_first", "forced_last"):
        if not found.get(name) and found.get(name) != 0:
            found.pop(name, None)
    if "logit_bias" in found:
        found["logit_bias"] = tuple(bias(text) for text in found["logit_bias"])
    return found


def bias(text: str) -> tuple[int, float]:
    try:
        token, value = text.split("=")
        return int(token), float(value)
    except ValueError:
        raise UsageError(
            f"--logit-bias is {text!r}; give ID=BIAS, for example --logit-bias 42=-5"
        ) from None


def read_prompt(options: Generate) -> Prompt:
    text = options.prompt
    if text is None or text == "-":
        with opened("-") as (stream, name):
            text = decoded(stream.read(), name).removesuffix("\n").removesuffix("\r")
    if not options.ids:
        return text
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UsageError(
            f"--ids wants whole numbers such as '5 9 2', got {text!r:.60}; leave it out for text"
        ) from None


def check_reads_text(model: Any) -> None:
    first = getattr(model.config, "source", None) or getattr(model.config, "embedding", None)
    if isinstance(first, Patches):
        raise UsageError(
            "this model reads images; in Python: regard.generate(regard.load(folder), image)"
        )


def write(pieces: Generator[str, None, Result], rate: Rate, said: list[str]) -> Result:
    """Write an answer to stdout while it is made; `said` gets what was written, should it be interrupted."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            rate.tokens = len(end.value.ids)  # the last piece may be the rest of others
            return end.value
        rate.add(1)
        if piece:
            said.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()


def as_text(result: Result) -> str:
    return " ".join(map(str, result.ids)) if result.text is None else result.text


def as_json(result: Result, **more: Any) -> str:
    """One line of JSON; a log-probability that is no finite number is null."""
    found = {
        "text": result.text,
        "ids": result.ids,
        "logprobs": [finite(x) for x in result.logprobs],
        "score": finite(result.score),
        "finish": result.finish,
        **({} if result.error is None else {"error": result.error}),
        **more,
    }
    return json.dumps(found, ensure_ascii=False, allow_nan=False)


def finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
