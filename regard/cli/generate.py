"""regard generate: one prompt in; its answer, or its answers, out. regard translate: lines. regard chat: turns.

Settings of decoding have the names and the defaults of regard.decode.settings.Settings, which
checks their values; a test keeps the two alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
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

Token = Annotated[int | None, arg(metavar="ID")]
Tokens = Annotated[UseAppendAction[tuple[int, ...]], arg(metavar="ID")]
Biases = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ID=BIAS")]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, when temperature is above 0."""

    top_k: int = 0  # draw from the K most probable tokens; 0: from all
    min_p: float = 0.0  # least share of the most probable token's probability
    typical_p: float = 1.0  # draw from the most typical tokens that make up this probability
    repetition_penalty: float = 1.0  # above 1: tokens that occurred become less probable
    presence_penalty: float = 0.0  # taken from the logit of each token that occurred
    frequency_penalty: float = 0.0  # the same for each time it occurred
    samples: int = 1  # several answers to the prompt


@dataclass(frozen=True)
class Search:
    """Beam search, and speculation."""

    beams: int = 1  # above 1: beam search
    n_best: int = 1  # print the N best of the beams
    length_penalty: float = 1.0  # a text scores log probability / length ** penalty
    # when beam search may stop: by a bound, at the best bound, or with as many texts as beams
    early_stopping: Literal["heuristic", "never", "first"] = "heuristic"
    groups: int = 1  # groups of beams that avoid each other's tokens
    diversity: float = 0.0  # how much they avoid them
    # a small model of the same vocabulary that guesses tokens ahead; changes no greedy token
    draft_model: cli.FolderName = None
    draft: int = 0  # how many it guesses at once; 0: 4
    # guess this many tokens at once by looking the last ones up in the text; changes no token
    lookup: int = 0


@dataclass(frozen=True)
class Rules:
    """Rules about single tokens, by id."""

    min_new_tokens: int = 0  # no end before this many tokens
    logit_bias: Biases = ()  # add BIAS to the logit of token ID
    banned: Tokens = ()  # never this token
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
    max_new_tokens: int = 64  # end after this many tokens
    # a text longer than the model's context: an error, go on with its last tokens, or with its first four and its last
    overflow: Literal["error", "crop", "sinks"] = "error"
    # 0: always the most probable token; 1: draw by the model's probabilities
    temperature: float = 0.0
    top_p: float = 1.0  # draw from the most probable tokens that make up this probability
    seed: int = 0  # another number, another text
    stop: cli.Texts = ()  # end before this text
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
    from regard.decode.generate import Unanswered, answers, failed, stream, unread
    from regard.decode.settings import Settings
    from regard.evaluate.model import check_reads_text, notice_length
    from regard.models import Patches
    from regard.text import needed

    given, drafted = settings_of(options), options.search.draft_model
    if drafted is not None:
        given["draft"] = given["draft"] or 4
    elif given["draft"]:
        raise UsageError("--draft counts the guesses of a draft model: --draft-model FOLDER")
    # A wrong setting is told before the model is read.
    rows = Settings.of(given).rows
    if (given["top_logprobs"] or given["prompt_logprobs"]) and not options.json:
        raise UsageError(
            "--top-logprobs and --prompt-logprobs are printed with --json; give it too"
        )
    prompt = read_prompt(options)
    opened = cli.open_model(options.model, options.machine)
    model, tokenizer = opened.model, opened.tokenizer
    if model.reads_source and isinstance(wanted := getattr(model.config, "source", None), Patches):
        if options.ids:
            raise UsageError("this model reads images, not ids: name a picture and leave --ids out")
        prompt = Pictures(wanted, model.origin).file(Path(prompt))
    else:
        check_reads_text(model)
    cli.compare(opened, prompt)
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


def settings_of(options: Any) -> dict[str, Any]:
    """The options that are settings of decoding. What was not given is left to the model folder or
    the default."""
    from regard.decode.settings import Settings

    flat, known = cli.values(options), {f.name for f in dataclasses.fields(Settings)}
    given = {n: x for n, x in flat.items() if n in known and x is not None and x != ()}
    if "logit_bias" in given:
        given["logit_bias"] = tuple(map(bias, given["logit_bias"]))
    return given


def bias(text: str) -> tuple[int, float]:
    try:
        token, value = text.split("=")
        return int(token), float(value)
    except ValueError:
        example = "give ID=BIAS, for example --logit-bias 42=-5"
        raise UsageError(f"--logit-bias is {text!r}; {example}") from None


def read_prompt(options: Options) -> Any:
    text = cli.given_text(options.prompt)
    if not options.ids:
        return text
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UsageError(
            f"--ids wants whole numbers such as '5 9 2', got {text!r:.60}; leave it out for text"
        ) from None


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
    from regard.report.run import strict

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


def translate(options: TranslateOptions) -> int:
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

    def __init__(self, options: TranslateOptions, settings: dict[str, Any], rows: int):
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
    temperature: float = 0.0  # 0: always the most probable token
    top_p: float = 1.0  # draw from the most probable tokens that make up this probability
    seed: int = 0  # another number, another text
    stop: cli.Texts = ()  # end an answer before this text
    machine: cli.Machine = cli.Machine()


def chat(options: ChatOptions) -> int:
    from regard.decode.settings import Settings
    from regard.evaluate.model import check_reads_text
    from regard.text.tokenizer import check_unicode

    given = settings_of(options)
    Settings.of(given)
    check_unicode(options.system or "", "--system")
    opened = cli.open_model(options.model, options.machine)
    check_reads_text(opened.model)
    conversation = Conversation(opened, options, given)
    for line in said():
        text = line.strip()
        if text == "/quit":
            break
        if text == "/clear":
            conversation.clear()
        elif text:
            try:
                conversation.say(line)
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


class Conversation:
    """The messages so far. An answer that is interrupted stays, as far as it came."""

    def __init__(self, opened: Opened, options: ChatOptions, settings: dict[str, Any]):
        from regard.text import needed, render_chat

        self.opened, self.options, self.settings = opened, options, settings
        self.clear()
        with blaming(DATA):
            self.tokenizer = needed(opened.tokenizer)
            render_chat(self.tokenizer, [*self.messages, {"role": "user", "content": "?"}])

    def clear(self) -> None:
        system = self.options.system
        first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = first

    def say(self, text: str) -> None:
        """Write the answer to a message, and remember both."""
        from regard.decode.generate import stream
        from regard.text import encode_chat

        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = encode_chat(self.tokenizer, asked)
        cli.compare(self.opened, prompt)
        settings = {"max_new_tokens": self.room(len(prompt)), **self.settings}
        pieces = stream(self.opened.model, prompt, stop=self.options.stop, **settings)
        rate, why = cli.Rate(streaming=True), "Ctrl-C"
        answer: list[str] = []
        try:
            why = write(pieces, rate, answer).finish
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        print(flush=True)
        rate.done(f", ended by {why}")
        self.messages = [*asked, {"role": "assistant", "content": "".join(answer)}]

    def room(self, used: int) -> int:
        """Tokens that an answer may have."""
        longest = getattr(self.opened.model.config, "max_len", None)
        if longest is None:
            return LONGEST
        used = 1 if self.opened.model.reads_source else used
        if used >= longest:
            raise UsageError(
                f"the conversation has {used} tokens, the model's context is {longest}; start a new one"
            )
        return min(LONGEST, longest - used)
