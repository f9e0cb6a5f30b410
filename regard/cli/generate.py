"""regard generate: one prompt in, its answer or answers out; regard translate: line by line; regard
chat: turn by turn.

Flags that set settings of decoding have their names; `Settings` checks the values. What is not given
is as the model's folder says, else the setting's default.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from regard.cli import shared as cli
from regard.cli.flags import Early, setting_flags
from regard.cli.main import tell
from regard.decode.filters import FILTERS
from regard.decode.settings import DEFAULTS, OWN, Result
from regard.errors import DATA, Fault, UsageError, blaming

if TYPE_CHECKING:
    from regard.evaluation.model import Opened

Number = Annotated[float | None, arg(metavar="X")]
Defaults = Literal["model", "plain"]


@setting_flags(
    "top_k min_p filters repetition_penalty encoder_repetition_penalty presence_penalty "
    "frequency_penalty samples"
)
class Sampling:
    """How tokens are drawn, when temperature is above 0."""


@setting_flags(
    "beams n_best length_penalty early_stopping renormalize_logits draft_model draft lookup",
    n_best="print the N best of the beams",
    draft="how many it guesses at once; default: 4, or as many as there are MTP layers",
)
class Search:
    """Beam search, and speculation."""

    # a small model of the same vocabulary that guesses tokens ahead, or mtp: the model's own layers; changes no token
    draft_model: cli.FolderName = None


@setting_flags(
    "min_new_tokens logit_bias sequence_bias banned begin_suppress_tokens no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty eos forced_first forced_last"
)
class Rules:
    """Rules about tokens, by id."""


@dataclass(frozen=True)
class Options:
    """Answer a prompt.

    regard generate MODEL "Once upon a time"                      the most probable text, as it is made
    regard generate MODEL photo.png                               a model of pictures: what it says of one, or
                                                                  which class it gives each of the patches
    regard generate MODEL "a bold seven"                          a painter: the picture, in characters
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
    from regard.cli.data import picture
    from regard.decode.defaults import settings_of
    from regard.decode.generate import Unanswered, answers, failed, stream
    from regard.evaluation.model import draw, notice_length, segmented, segments
    from regard.models import Painter

    given = settings_in(options)
    if (options.top_logprobs or options.prompt_logprobs) and not options.json:
        raise UsageError(
            "--top-logprobs and --prompt-logprobs are printed with --json; give it too"
        )
    text = cli.given_text(options.prompt)
    prompt = ids_in(text) if options.ids else text
    opened = cli.open_model(options.model, options.machine)
    unset = replace(options, prompt=None, machine=cli.Machine()) == Options(options.model)
    if segments(opened.plain):
        if not unset:
            raise UsageError("this model labels a picture's patches; leave all other settings out")
        patches = segmented(opened, Path(text))
        wide = max(len(name) for row in patches for name in row)
        for row in patches:
            print(" ".join(name.ljust(wide) for name in row).rstrip())
        return 0
    if isinstance(opened.plain, Painter):
        if not unset:
            raise UsageError("this model draws a picture of a text; leave all other settings out")
        # Every second line is left out.
        twice = draw(opened, [text])[0].repeat_interleave(2, 1).repeat_interleave(2, 2)
        print("\n".join(picture(twice)))
        return 0
    prompt = read_prompt(opened, prompt, options)
    cli.compare(opened, prompt)
    model = opened.model
    say_defaults(model, options.defaults)
    single = "stop" if options.stop else ""
    rows = settings_of(model, given, options.defaults, single)(1).rows
    ids = as_ids(opened, prompt)
    if (draft := options.search.draft_model) is not None:
        other = draft != OWN
        given["draft_model"] = cli.open_model(draft, options.machine).model if other else OWN
    given |= {"defaults": options.defaults, "stop": options.stop}
    as_it_comes = rows == 1 and not options.json and opened.tokenizer is not None
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


def ids_in(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        wanted = "whole numbers such as '5 9 2'"
        why = f"--ids wants {wanted}, got {text!r:.60}; leave it out for text"
        raise UsageError(why) from None


def read_prompt(opened: Opened, prompt: Any, options: Options) -> Any:
    """The prompt as the model reads it: of a model of pictures the one that it names."""
    from regard.data.read import Pictures
    from regard.evaluation.model import check_reads_text
    from regard.models import Patches

    model = opened.plain
    if model.reads_source and isinstance(wanted := getattr(model.config, "source", None), Patches):
        if options.ids:
            raise UsageError("this model reads images, not ids: name a picture and leave --ids out")
        return Pictures(wanted, model.origin).file(Path(prompt))
    check_reads_text(model)
    if options.prompt and options.prompt == prompt:
        check_not_a_file(prompt, options.model)
    return prompt


def as_ids(opened: Opened, prompt: Any) -> Any:
    """The ids of a text, and a note on what of it the tokenizer has no token for."""
    from regard.decode.generate import unread
    from regard.text import needed

    if not isinstance(prompt, str):
        return prompt
    tokenizer = needed(opened.tokenizer)
    ids = tokenizer.encode(prompt)
    if lost := unread(tokenizer, prompt):
        tell("note", lost)
    return ids


def check_not_a_file(prompt: str, model: str) -> None:
    """A prompt that names a file was hardly meant as text."""
    from regard.data.read import SUFFIXES

    if not os.path.isfile(prompt):
        return
    if Path(prompt).suffix.lower() in SUFFIXES:
        raise UsageError(
            f"{prompt} is a picture, and {model} reads text; "
            "the name itself as a prompt comes from stdin: "
            f"echo {shlex.quote(prompt)} | regard generate {shlex.quote(model)}"
        )
    how = f"regard generate {shlex.quote(model)} < {shlex.quote(prompt)} reads the file"
    tell("note", f"the prompt is the text {prompt!r}, which is also the name of a file; {how}")


def settings_in(options: Any) -> dict[str, Any]:
    """The options that are settings of decoding, checked before a model is read. What was not given is
    left out."""
    from regard.decode.defaults import check_given

    flat = cli.values(options)
    known = {*DEFAULTS, *FILTERS}
    given = {n: x for n, x in flat.items() if n in known and x is not None and x != ()}
    for name, many in (("logit_bias", False), ("sequence_bias", True)):
        if texts := given.pop(name, ()):
            given[name] = tuple(bias(text, name.replace("_", "-"), many) for text in texts)
    # Of MTP layers as many as there are, which the model tells.
    if flat.get("draft_model") not in (None, OWN):
        given["draft"] = given.get("draft") or 4
    elif given.get("draft") and flat["draft_model"] is None:
        raise UsageError(
            "--draft counts the guesses of a draft model: --draft-model FOLDER, or mtp"
        )
    check_given(given)
    return given


def bias(text: str, flag: str, many: bool) -> tuple[Any, float]:
    """ID=BIAS, or ID,ID=BIAS."""
    tokens, _, value = text.partition("=")
    try:
        ids = tuple(map(int, tokens.split(","))) if many else int(tokens)
        return ids, float(value)
    except ValueError:
        form, example = ("ID,ID=BIAS", "42,7=-inf") if many else ("ID=BIAS", "42=-5")
        how = f"give {form}, for example --{flag} {example}"
        raise UsageError(f"--{flag} is {text!r}; {how}") from None


def say_defaults(model: Any, defaults: str) -> None:
    """Name the settings that come from the model's folder."""
    from regard.decode.defaults import described

    if defaults == "model" and (line := described(model)):
        cli.talk(line)


def write(pieces: Generator[str, None, Result], rate: cli.Rate, written: list[str]) -> Result:
    """Write an answer to stdout while it is made, and into `written`, in case it is interrupted."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            # A piece may hold several tokens.
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
    from regard.decode.generate import Unanswered

    given = settings_in(options)
    cli.check_counts(options, "rows", "block")
    cli.check_file(options.file)
    opened = cli.open_model(options.model, options.machine)
    translated = Translator(opened, options, given)
    done, rate = 0, cli.Rate(streaming=False)
    # A sentence about each line that could not be translated.
    failed: list[str] = []
    block = options.block or (1 if cli.is_typed(options.file) else 512)
    for lines, before, name in cli.line_blocks(options.file, block):
        done, tokens = before + len(lines), 0
        places = [f"line {number} of {name}" for number in range(before + 1, done + 1)]
        for (text, result), where in zip(translated(lines, places), places):
            if result.finish == "error":
                failed.append(f"{where} was not translated: {result.error}")
            tokens += len(result.ids)
            sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        rate.add(tokens, f", {done} lines")
    rate.done(f", {done} lines")
    if failed:
        more = len(failed) - 1
        raise Unanswered(failed[0] + (f" (and {more} more lines)" if more else ""))
    return 0


class Translator:
    """Lines in; what is printed for each, and its result, out."""

    def __init__(self, opened: Opened, options: TranslateOptions, given: dict[str, Any]):
        from regard.evaluation.model import check_reads_text
        from regard.models.embedding import context
        from regard.see.align import cross_site
        from regard.text import needed

        model: Any = opened.plain
        if not model.reads_source:
            families = "(T5, BART, Marian, ...); for others use regard generate"
            raise UsageError(f"translate needs an encoder-decoder {families}")
        check_reads_text(model)
        say_defaults(model, options.defaults)
        self.opened, self.options, self.given = opened, options, given
        self.tokenizer = needed(opened.tokenizer)
        self.site = cross_site(model) if options.align else ""
        source = getattr(model.config, "source", None)
        self.longest = None if source is None else context(model.config.max_len, source)

    def __call__(self, lines: list[str], places: list[str]) -> Iterator[tuple[str, Result]]:
        from regard.decode.generate import answers, translating

        sources = [self.read(line, where) for line, where in zip(lines, places)]
        results: Iterator[Result] = iter(())
        if full := [ids for ids in sources if ids]:
            cli.compare(self.opened, full[0])
            model, options = self.opened.model, self.options
            how = translating(model, full, self.given, options.defaults)
            how |= {"rows": options.rows, "defaults": options.defaults}
            results = (group[0] for group in answers(model, full, **how))
        for line, ids in zip(lines, sources):
            result = next(results) if ids else Result([], [], 0.0, "eos", text="")
            yield self.shown(line, result) if ids or self.options.json else "", result

    def read(self, line: str, where: str) -> list[int]:
        """The ids of a line; none if it is empty."""
        ids = self.tokenizer.encode(line) if line.strip() else []
        if self.longest is not None and len(ids) > self.longest:
            limit = f"the model's context is {self.longest}"
            raise Fault(f"{where} has {len(ids)} tokens, {limit}; split the line", DATA)
        return ids

    def shown(self, line: str, result: Result) -> str:
        from regard.see.align import align

        pairs: list[tuple[int, int]] = []
        if self.site:
            pairs = align(self.opened.model, self.tokenizer, self.site, line, result)
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
    temperature: Number = None  # 0: always the most probable token; default: the folder's, or 0
    top_p: Number = None  # draw from the most probable tokens that make up this probability
    seed: int = 0  # another number, another text
    # what is not given: as the folder's generation_config.json says, or (plain) its end tokens alone
    defaults: Defaults = "model"
    stop: cli.Texts = ()  # end an answer before this text
    machine: cli.Machine = cli.Machine()


def chat(options: ChatOptions) -> int:
    from regard.evaluation.model import check_reads_text
    from regard.text import needed, render_chat
    from regard.text.tokenizer import check_unicode

    given = settings_in(options) | {"defaults": options.defaults}
    check_unicode(options.system or "", "--system")
    opened = cli.open_model(options.model, options.machine)
    check_reads_text(opened.plain)
    say_defaults(opened.plain, options.defaults)
    begin = [] if options.system is None else [{"role": "system", "content": options.system}]
    with blaming(DATA):
        render_chat(needed(opened.tokenizer), [*begin, {"role": "user", "content": "?"}])
    messages = begin
    for line in typed_lines():
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


def typed_lines() -> Iterator[str]:
    """What the user types, line by line, until Ctrl-D."""
    from regard.data.read import lines_of

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from lines_of(sys.stdin.buffer, Path("stdin"))
        return
    with contextlib.suppress(ImportError):
        # input() then has a history and can be edited.
        import readline  # noqa: F401
    # Bytes that are not UTF-8 are then refused as a mistake in the message.
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")
    print()


def answer(
    opened: Opened, messages: list[dict[str, str]], stop: tuple[str, ...], given: dict[str, Any]
) -> str:
    """Write the answer to the last message. An interrupted one stays, as far as it came."""
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
