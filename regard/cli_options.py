"""What each command can be told, as dataclasses that tyro turns into flags; and reading a command line into one.

Importing this needs tyro but not torch, so that help is quick. Settings of decoding have the names and the defaults of
regard.decode.settings.Settings, which checks their values; a test keeps the two alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.conf import Positional, arg
from tyro.conf import UseAppendAction as Many

from regard.config import UsageError

T = TypeVar("T")
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Folder = Annotated[Positional[str], arg(metavar="MODEL", help="model folder")]
Count = Annotated[int | None, arg(metavar="N")]
ALIASES = {"dtype": ["--precision"]}


@dataclass(frozen=True)
class Machine:
    """Where and how precisely the model runs."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ...; auto takes cuda where there is one"""
    dtype: Annotated[Literal["auto", "fp32", "bf16"], arg(aliases=ALIASES["dtype"])] = "auto"
    """auto: as the weights are stored; on a CPU half precision is bf16, or fp32 if it has no bf16"""
    quantize: Literal["none", "int8", "int4"] = "none"
    """hold weights in 8 or 4 bits; the change of perplexity is printed"""


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
class Generate:
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


@dataclass(frozen=True)
class Translate:
    """Translate lines with an encoder-decoder: one line in, one line out, empty ones stay empty.

    regard translate MODEL lines.de > lines.en
    echo "guten Morgen" | regard translate MODEL --align          good morning <tab> 0-0 1-1
    """

    model: Folder
    file: Annotated[Positional[str], arg(metavar="[FILE]")] = "-"
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


@dataclass(frozen=True)
class Chat:
    """A conversation, with the folder's chat template. Ctrl-C stops an answer, Ctrl-D or /quit ends, /clear forgets.

    regard chat MODEL
    regard chat MODEL --system "Answer in one sentence." --temperature 0.7
    """

    model: Folder
    system: Annotated[str | None, arg(metavar="TEXT")] = None
    """what the model is told first"""
    max_new_tokens: Count = None
    """of an answer; default: what the context leaves, at most 1024"""
    temperature: float = 0.0
    """0: always the most probable token"""
    top_p: float = 1.0
    """draw from the most probable tokens that make up this probability"""
    seed: int = 0
    """another number, another text"""
    stop: Annotated[Many[tuple[str, ...]], arg(metavar="TEXT")] = ()
    """end an answer before this text"""
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True)
class TrainRun:
    """Train a model from a TOML file; stop it any way you like, and go on with --resume.

    regard train story.toml                          into runs/story
    regard train story.toml --resume                 go on after a stop, to the same bits
    regard train story.toml --train.optim.lr 3e-4    change one setting
    regard train story.toml --smoke --output-dir try      three steps, an evaluation, a save, a reload
    """

    config: Annotated[Positional[str], arg(metavar="CONFIG")]
    """a TOML file with task, [model], [data], [tokenizer], [train]"""
    output_dir: Annotated[str | None, arg(metavar="FOLDER")] = None
    """the run's folder; default: runs/ and the config's name"""
    resume: Switch = False
    """go on from the newest sound checkpoint of the folder"""
    overwrite: Switch = False
    """start anew in a folder that has a run"""
    smoke: Switch = False
    """three steps, to find at once what would fail later"""
    keep: int = 2
    """checkpoints that stay, beside the best"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    quiet: Switch = False
    """no progress lines"""
    changes: Annotated[dict[str, str], arg(metavar="NAME VALUE")] = field(default_factory=dict)
    """settings of the config, changed: the same as --NAME VALUE with a dot in NAME"""


OPTIONS: dict[str, type] = {
    "generate": Generate,
    "translate": Translate,
    "chat": Chat,
    "train": TrainRun,
}


# --- reading a command line ---------------------------------------------------------------------------------------


def parse(cls: type[T], name: str, arguments: list[str]) -> T | None:
    """The command line as a `cls`; nothing where it asks for --help, which is printed. What is wrong is a UsageError of
    one line."""
    known = {f"--{flag.replace('_', '-')}" for flag in names(cls)} | {"--help"}
    known |= {flag for flags in ALIASES.values() for flag in flags}
    for text in arguments[: arguments.index("--")] if "--" in arguments else arguments:
        flag = text.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in known:
            close = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
            hint = f"did you mean {close[0]}?" if close else f"see regard {name} --help"
            raise UsageError(
                f"there is no option {flag!r:.60}; {hint} (text that begins so: after --)"
            )
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return tyro.cli(
                cls,
                args=arguments,
                prog=f"regard {name}",
                description="",
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as end:
        if end.code:
            raise UsageError(one_line(err.getvalue())) from None
    head, *examples = inspect.cleandoc(cls.__doc__ or "").splitlines()
    print("\n".join([head, *(f"  {line}" if line else "" for line in examples)]).rstrip())
    print("\n".join(["", *(line.rstrip() for line in out.getvalue().strip().splitlines())]))
    return None


def folded(arguments: list[str]) -> list[str]:
    """Flags with a dot in their name (--train.seed 7) as pairs of --changes."""
    rest, changes, given = [], [], iter(arguments)
    for text in given:
        name, equals, value = text.partition("=")
        if not (name.startswith("--") and "." in name):
            rest.append(text)
            continue
        value = value if equals else next(given, "")
        if not value or value.startswith("--"):
            raise UsageError(f"{name} needs a value: {name} VALUE")
        changes += [name.removeprefix("--"), value]
    return [*rest, "--changes", *changes] if changes else rest


def one_line(box: str) -> str:
    """What the box says that tyro draws around an error: the paragraph between its first two rules."""
    lines = [line.strip("│|╭╮╰╯ ") for line in box.splitlines()]
    rules = [i for i, line in enumerate(lines) if line and not line.strip("-─")]
    text = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    return re.sub(r" +", " ", " ".join(text)).strip().removesuffix(".")


def names(cls: Any) -> list[str]:
    """The fields of a dataclass and of the dataclasses in it, which are groups of flags."""
    found = []
    for f in dataclasses.fields(cls):
        group = f.default_factory
        found += names(group) if dataclasses.is_dataclass(group) else [f.name]
    return found


def values(options: Any) -> dict[str, Any]:
    """All options by name, groups flattened."""
    found: dict[str, Any] = {}
    for f in dataclasses.fields(options):
        value = getattr(options, f.name)
        found |= values(value) if dataclasses.is_dataclass(value) else {f.name: value}
    return found
