"""regard generate: one prompt in; its answer, or its answers, out. regard translate: lines. regard chat: turns.

Settings of decoding have the names of regard.decode.settings.Settings, which checks their values; a test keeps the two
alike. What is not given is as the model's folder says, and else Settings' default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from regard.cli import shared as cli
from regard.cli.main import tell
from regard.errors import DATA, Fault, UsageError, blaming

if TYPE_CHECKING:
    from regard.decode.settings import Result
    from regard.evaluate.model import Opened

Number = Annotated[float | None, arg(metavar="X")]
Early = Literal["heuristic", "never", "first"]
Token = Annotated[int | None, arg(metavar="ID")]
Tokens = Annotated[UseAppendAction[tuple[int, ...]], arg(metavar="ID")]
Biases = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ID=BIAS")]
Runs = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ID,ID=BIAS")]
Decay = Annotated[tuple[int, float] | None, arg(metavar="N FACTOR")]
Defaults = Literal["model", "plain"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, when temperature is above 0."""

    top_k: cli.Count = None  # draw from the K most probable tokens; 0: from all
    min_p: Number = None  # least share of the most probable token's probability
    repetition_penalty: Number = None  # above 1: tokens that occurred become less probable
    encoder_repetition_penalty: Number = None  # above 1: tokens of the source, more probable
    presence_penalty: Number = None  # taken from the logit of each token that occurred
    frequency_penalty: Number = None  # the same for each time it occurred
    samples: cli.Count = None  # several answers to the prompt


@dataclass(frozen=True)
class Search:
    """Beam search, and speculation."""

    beams: cli.Count = None  # above 1: beam search
    n_best: cli.Count = None  # print the N best of the beams
    length_penalty: Number = None  # a text scores log probability / length ** penalty
    # when beam search may stop: by a bound, at the best bound, or with as many texts as beams
    early_stopping: Early | None = None
    # compare beams by what bias, bans and penalties leave of the probabilities
    renormalize_logits: bool | None = None
    # a small model of the same vocabulary that guesses tokens ahead; changes no greedy token
    draft_model: cli.FolderName = None
    draft: cli.Count = None  # how many it guesses at once; default: 4
    # guess this many tokens at once by looking the last ones up in the text; changes no token
    lookup: cli.Count = None


@dataclass(frozen=True)
class Rules:
    """Rules about tokens, by id."""

    min_new_tokens: cli.Count = None  # no end before this many tokens
    logit_bias: Biases = ()  # add BIAS to the logit of token ID
    sequence_bias: Runs = ()  # the same of the last of several tokens, where it would follow the others
    banned: Tokens = ()  # never this token
    begin_suppress_tokens: Tokens = ()  # not as the first
    no_repeat_ngram_size: cli.Count = None  # no run of N tokens twice
    encoder_no_repeat_ngram_size: cli.Count = None  # no run of N tokens that the source has
    # after N tokens, ends become more probable by FACTOR ** tokens since
    exponential_decay_length_penalty: Decay = None
    eos: Tokens = ()  # tokens that end the text, instead of the folder's
    forced_first: Token = None  # the first token
    forced_last: Token = None  # the last token of a text that reaches the limit


@dataclass(frozen=True)
class Options:
    """Answer a prompt.

    regard generate MODEL "Once upon a time"                      the most probable text, as it is made
    regard generate MODEL photo.png                               a model of pictures: what it says of one
    regard generate MODEL "Once" --temperature 0.8 --top-p 0.9    drawn; --seed N for another one
    echo "Once" | regard generate MODEL --json                    prompt from stdin; ids, log-probabilities, score
    """

    model: cli.Folder
    # the text, or the name of a picture; stdin if left out or -
    prompt: Annotated[Positional[str | None], arg(metavar="[PROMPT]")] = None
    max_new_tokens: cli.Count = None  # end after this many tokens; default: the folder's, or 64
    # a text longer than the model's context: an error, go on with its last tokens, or with its first four and its last
    overflow: Literal["error", "crop", "sinks"] = "error"
    # 0: always the most probable token; 1: draw by the model's probabilities; default: the folder's, or 0
    temperature: Number = None
    top_p: Number = None  # draw from the most probable tokens that make up this probability
    seed: int = 0  # another number, another text
    stop: cli.Texts = ()  # end before this text
    # what is not given: as the folder's generation_config.json says, or (plain) its end tokens alone
    defaults: Defaults = "model"
    ids: cli.Switch = False  # the prompt is token ids: "5 9 2"
    json: cli.Switch = False  # one JSON object for each answer: text, ids, logprobs, score, finish
    top_logprobs: int = 0  # with --json: the N most probable tokens beside each one
    prompt_logprobs: cli.Switch = False  # with --json: log probabilities of the prompt's tokens too
    sampling: Sampling = Sampling()
    search: Search = Search()
    tokens: Rules = Rules()
    machine: cli.Machine = cli.Machine()


def run(options: Options) -> int:
    from regard.data.read import Pictures
    from regard.decode.defaults import check_given, settings_of
    from regard.decode.generate import Unanswered, answers, failed, stream, unread
    from regard.evaluate.model import check_reads_text, notice_length
    from regard.models import Patches
    from regard.text import needed

    given, drafted = settings_in(options), options.search.draft_model
    if drafted is not None:
        given["draft"] = given.get("draft") or 4
    elif given.get("draft"):
        raise UsageError("--draft counts the guesses of a draft model: --draft-model FOLDER")
    # A wrong setting is told before the model is read.
    check_given(given)
    if (options.top_logprobs or options.prompt_logprobs) and not options.json:
        raise UsageError(
            "--top-logprobs and --prompt-logprobs are printed with --json; give it too"
        )
    prompt: Any = cli.given_text(options.prompt)
    if options.ids:
        try:
            prompt = [int(word) for word in prompt.replace(",", " ").split()]
        except ValueError:
            raise UsageError(
                f"--ids wants whole numbers such as '5 9 2', got {prompt!r:.60}; leave it out for text"
            ) from None
    opened = cli.open_model(options.model, options.machine)
    model, tokenizer = opened.plain, opened.tokenizer
    if model.reads_source and isinstance(wanted := getattr(model.config, "source", None), Patches):
        if options.ids:
            raise UsageError("this model reads images, not ids: name a picture and leave --ids out")
        prompt = Pictures(wanted, model.origin).file(Path(prompt))
    else:
        check_reads_text(model)
        if options.prompt and options.prompt == prompt:
            check_not_a_file(prompt, options.model)
    cli.compare(opened, prompt)
    model = opened.model
    say_defaults(model, options.defaults)
    single = "stop" if options.stop else ""
    rows = settings_of(model, given, options.defaults, single)(1).rows
    given["defaults"] = options.defaults
    ids = prompt
    if isinstance(prompt, str):
        ids = needed(tokenizer).encode(prompt)
        if lost := unread(needed(tokenizer), prompt):
            tell("note", lost)
    if drafted is not None:
        given["draft_model"] = cli.open_model(drafted, options.machine).model
    given["stop"] = options.stop
    as_it_comes = rows == 1 and not options.json and tokenizer is not None
    rate = cli.Rate(streaming=as_it_comes)
    if as_it_comes:
        results = [write(stream(model, prompt, **given), rate, [])]
        print()
    else:
        (results,) = answers(model, [prompt], rows=rows, **given)
        rate.add(sum(len(r.ids) for r in results))
        for result in results:
            plain = " ".join(map(str, result.ids)) if result.text is None else result.text
            print(as_json(result) if options.json else plain)
    written = max((len(result.ids) for result in results), default=0)
    notice_length(model, max(len(ids), written) if model.reads_source else len(ids) + written)
    rate.done(f", ended by {', '.join(dict.fromkeys(r.finish for r in results))}")
    if failed(results):
        raise Unanswered(failed(results))
    return 0


def check_not_a_file(prompt: str, model: str) -> None:
    """A prompt that is the name of a file was hardly meant as text."""
    from regard.data.read import SUFFIXES

    if not os.path.isfile(prompt):
        return
    if Path(prompt).suffix.lower() in SUFFIXES:
        raise UsageError(
            f"{prompt} is a picture, and {model} reads text; the name itself as a prompt comes from stdin: "
            f"echo {shlex.quote(prompt)} | regard generate {shlex.quote(model)}"
        )
    how = f"regard generate {shlex.quote(model)} < {shlex.quote(prompt)} reads the file"
    tell("note", f"the prompt is the text {prompt!r}, which is also the name of a file; {how}")


def settings_in(options: Any) -> dict[str, Any]:
    """The options that are settings of decoding. What was not given is left to the model folder or
    the default."""
    from regard.decode.settings import Settings

    flat, known = cli.values(options), {f.name for f in dataclasses.fields(Settings)}
    given = {n: x for n, x in flat.items() if n in known and x is not None and x != ()}
    for name, many in (("logit_bias", False), ("sequence_bias", True)):
        for text in given.pop(name, ()):
            flag = f"--{name.replace('_', '-')}"
            try:
                tokens, value = text.split("=")
                ids = tuple(int(token) for token in tokens.split(",")) if many else int(tokens)
                given[name] = (*given.get(name, ()), (ids, float(value)))
            except ValueError:
                example = f"{flag} {'42,7=-inf' if many else '42=-5'}"
                raise UsageError(
                    f"{flag} is {text!r}; give {'ID,ID' if many else 'ID'}=BIAS, for example {example}"
                ) from None
    return given


def say_defaults(model: Any, defaults: str) -> None:
    """Tell people which settings the model's folder names."""
    from regard.decode.defaults import described

    if defaults == "model" and (line := described(model)):
        cli.talk(line)


def write(pieces: Generator[str, None, Result], rate: cli.Rate, written: list[str]) -> Result:
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


def as_json(result: Result, **more: Any) -> str:
    """One line of JSON; a log-probability that is not finite is null."""
    from regard.see.format import strict

    answer = {n: getattr(result, n) for n in ("text", "ids", "logprobs", "score", "finish")}
    asked = ("top_logprobs", "prompt_logprobs", "prompt_top_logprobs")
    answer |= {n: found for n in asked if (found := getattr(result, n))}
    error = {} if result.error is None else {"error": result.error}
    return json.dumps({**strict(answer), **error, **more}, ensure_ascii=False)


@dataclass(frozen=True)
class TranslateOptions:
    """Translate lines with an encoder-decoder: one line in, one line out, empty ones stay empty.

    regard translate MODEL lines.de > lines.en
    echo "guten Morgen" | regard translate MODEL --align          good morning <tab> 0-0 1-1
    """

    model: cli.Folder
    file: cli.File = "-"  # text file, UTF-8; - is stdin
    beams: cli.Count = None  # 1 is greedy; default: the folder's, or 4
    # default: the folder's, or twice the longest source line and ten
    max_new_tokens: cli.Count = None
    length_penalty: Number = None  # a text scores log probability / length ** penalty
    # when beam search may stop
    early_stopping: Early | None = None
    # what is not given: as the folder's generation_config.json says, or (plain) its end tokens alone
    defaults: Defaults = "model"
    # after a tab: word pairs source-target, by the last layer's cross-attention
    align: cli.Switch = False
    # one JSON object per line: text, ids, logprobs, score, finish; with --align, align
    json: cli.Switch = False
    # lines that are read before they are translated; default: 512, on a terminal 1
    block: cli.Count = None
    rows: int = 128  # beams in the batch at most
    machine: cli.Machine = cli.Machine()


def translate(options: TranslateOptions) -> int:
    from regard.decode.defaults import check_given
    from regard.decode.generate import Unanswered, answers, translating
    from regard.decode.settings import Result
    from regard.evaluate.model import check_reads_text
    from regard.models.embedding import context
    from regard.see.align import align, cross_site
    from regard.text import needed

    given = settings_in(options)
    check_given(given)
    cli.check_counts(options, "rows", "block")
    cli.check_file(options.file)
    opened = cli.open_model(options.model, options.machine)
    model: Any = opened.plain
    if not model.reads_source:
        raise UsageError(
            "translate needs an encoder-decoder (T5, BART, Marian, ...); for others use regard generate"
        )
    check_reads_text(model)
    say_defaults(model, options.defaults)
    tokenizer, site = needed(opened.tokenizer), cross_site(model) if options.align else ""
    source = getattr(model.config, "source", None)
    longest = None if source is None else context(model.config.max_len, source)

    def read(line: str, where: str) -> list[int]:
        """The ids of a line; none if it is empty."""
        ids = tokenizer.encode(line) if line.strip() else []
        if longest is not None and len(ids) > longest:
            limit = f"the model's context is {longest}"
            raise Fault(f"{where} has {len(ids)} tokens, {limit}; split the line", DATA)
        return ids

    def shown(line: str, result: Result) -> str:
        pairs = align(model, tokenizer, site, line, result) if site else []
        if options.json:
            return as_json(result, **({"align": [list(p) for p in pairs]} if site else {}))
        text = re.sub(r"[\r\n]+", " ", result.text or "")
        return text + "\t" + " ".join(f"{s}-{t}" for s, t in pairs) if site else text

    done, rate = 0, cli.Rate(streaming=False)
    # A sentence for each line that ended with an error.
    failed: list[str] = []
    block = options.block or (1 if cli.is_typed(options.file) else 512)
    for lines, before, name in cli.line_blocks(options.file, block):
        done, tokens = before + len(lines), 0
        places = [f"line {number} of {name}" for number in range(before + 1, done + 1)]
        sources = [read(line, where) for line, where in zip(lines, places)]
        results: Iterator[Result] = iter(())
        if full := [ids for ids in sources if ids]:
            cli.compare(opened, full[0])
            model = opened.model
            how = translating(model, full, given, options.defaults)
            how |= {"rows": options.rows, "defaults": options.defaults}
            results = (group[0] for group in answers(model, full, **how))
        for line, ids, where in zip(lines, sources, places):
            result = next(results) if ids else Result([], [], 0.0, "eos", text="")
            if result.finish == "error":
                failed.append(f"{where} was not translated: {result.error}")
            tokens += len(result.ids)
            sys.stdout.write((shown(line, result) if ids or options.json else "") + "\n")
        sys.stdout.flush()
        rate.add(tokens, f", {done} lines")
    rate.done(f", {done} lines")
    if failed:
        more = len(failed) - 1
        raise Unanswered(failed[0] + (f" (and {more} more lines)" if more else ""))
    return 0


LONGEST = 1024  # tokens of an answer, where the context is longer


@dataclass(frozen=True)
class ChatOptions:
    """A conversation, with the folder's chat template. Ctrl-C stops an answer, Ctrl-D or /quit ends, /clear forgets.

    regard chat MODEL
    regard chat MODEL --system "Answer in one sentence." --temperature 0.7
    """

    model: cli.Folder
    system: cli.Text = None  # what the model is told first
    max_new_tokens: cli.Count = None  # of an answer; default: what the context leaves, at most 1024
    temperature: Number = None  # 0: always the most probable token; default: the folder's, or 0
    top_p: Number = None  # draw from the most probable tokens that make up this probability
    seed: int = 0  # another number, another text
    # what is not given: as the folder's generation_config.json says, or (plain) its end tokens alone
    defaults: Defaults = "model"
    stop: cli.Texts = ()  # end an answer before this text
    machine: cli.Machine = cli.Machine()


def chat(options: ChatOptions) -> int:
    from regard.decode.defaults import check_given
    from regard.evaluate.model import check_reads_text
    from regard.text import needed, render_chat
    from regard.text.tokenizer import check_unicode

    given = settings_in(options)
    check_given(given)
    given["defaults"] = options.defaults
    check_unicode(options.system or "", "--system")
    opened = cli.open_model(options.model, options.machine)
    check_reads_text(opened.plain)
    say_defaults(opened.plain, options.defaults)
    begin = [] if options.system is None else [{"role": "system", "content": options.system}]
    with blaming(DATA):
        render_chat(needed(opened.tokenizer), [*begin, {"role": "user", "content": "?"}])
    messages = begin
    for line in said():
        text = line.strip()
        if text == "/quit":
            break
        if text == "/clear":
            messages = begin
        elif text:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                reply = answer(opened, asked, options.stop, given)
                messages = [*asked, {"role": "assistant", "content": reply}]
            except UsageError as error:
                if not sys.stdin.isatty():
                    raise
                tell("error", f"{error} (/clear forgets the conversation)")
    return 0


def said() -> Iterator[str]:
    """What the user says, line by line, until Ctrl-D."""
    from regard.data.read import lines_of

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from lines_of(sys.stdin.buffer, Path("stdin"))
        return
    with contextlib.suppress(ImportError):
        # input() then has a history and can be edited.
        import readline  # noqa: F401
    # What is not UTF-8 is then told as a mistake in the message.
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")
    print()


def answer(
    opened: Opened, messages: list[dict[str, str]], stop: tuple[str, ...], given: dict[str, Any]
) -> str:
    """Write the answer to the last message; one that is interrupted stays, as far as it came."""
    from regard.decode.defaults import folder_settings
    from regard.decode.generate import stream
    from regard.text import encode_chat, needed

    prompt = encode_chat(needed(opened.tokenizer), messages)
    cli.compare(opened, prompt)
    longest = getattr(opened.model.config, "max_len", None) or math.inf
    used = 1 if opened.model.reads_source else len(prompt)
    if used >= longest:
        raise UsageError(
            f"the conversation has {used} tokens, the model's context is {longest}; start a new one"
        )
    named = folder_settings(opened.model)[0] if given["defaults"] == "model" else {}
    settings = dict(given)
    if not {"max_new_tokens", "max_length"} & (named | given).keys():
        settings["max_new_tokens"] = int(min(LONGEST, longest - used))
    rate, why = cli.Rate(streaming=True), "Ctrl-C"
    written: list[str] = []
    try:
        why = write(stream(opened.model, prompt, stop=stop, **settings), rate, written).finish
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    print(flush=True)
    rate.done(f", ended by {why}")
    return "".join(written)
