"""What the commands of decoding can be told, as dataclasses that tyro turns into flags.

Settings of decoding have the names and the defaults of regard.decode.settings.Settings, which checks their values; a
test keeps the two alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Positional, arg
from tyro.conf import UseAppendAction as Many

from regard.cli.options_explain import Explain
from regard.cli.options_look import Look
from regard.cli.options_parity import Parity
from regard.cli.options_work import WORK
from regard.cli.parse import Count, Folder, Machine, Switch


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


OPTIONS: dict[str, type] = {
    "generate": Generate,
    "translate": Translate,
    "chat": Chat,
    "parity": Parity,
    "look": Look,
    **WORK,
    "explain": Explain,
}
