"""What a user asks of decoding, checked once; what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from regard.decode.filters import FILTERS
from regard.errors import UsageError, nearest, notice

if TYPE_CHECKING:
    from torch import Tensor

EARLY = ("heuristic", "never", "first")
OVERFLOW = ("error", "crop", "sinks")
OWN = "mtp"  # the draft of a model that guesses by its own MTP layers
MOST_TOPS = 20  # tokens listed beside each one that was chosen
# What transformers and others call our settings.
FOREIGN_NAMES = {
    "assistant_model": "draft_model",
    "bad_words_ids": "banned, and sequence_bias={(5, 6): -inf} for words of several tokens",
    "best_of": "samples",
    "do_sample": "temperature (0 is greedy, above 0 draws)",
    "eos_token_id": "eos",
    "echo": "prompt_logprobs",
    "forced_bos_token_id": "forced_first",
    "forced_eos_token_id": "forced_last",
    "logprobs": "top_logprobs (the log probability of the choice itself is always given)",
    "max_length": "max_new_tokens, which does not count the prompt",
    "max_tokens": "max_new_tokens",
    "min_length": "min_new_tokens, which does not count the prompt",
    "n": "samples",
    "num_beams": "beams",
    "num_return_sequences": "samples when drawing, n_best of beams",
    "prompt_lookup_num_tokens": "lookup",
    "stop_strings": "stop",
    "suppress_tokens": "banned",
    "use_mtp": "draft_model (mtp: the model's own layers)",
}

# What we had once.
GONE = {
    "typical_p": "give top_p or min_p",
    **dict.fromkeys(
        ("groups", "diversity", "num_beam_groups", "diversity_penalty"),
        "beams do not avoid each other; draw samples, with a temperature",
    ),
}

Tops = list[tuple[int, float]]  # tokens and their log probabilities, best first


def _within(default: float, low: float, high: float) -> Any:
    """A number from `low` to `high`."""
    return field(default=default, metadata={"limits": (low, high)})


def _filter(name: str) -> Any:
    """The value of a filter."""
    return _within(FILTERS[name].neutral, *FILTERS[name].limits)


@dataclass(frozen=True)
class Settings:
    """How one request is decoded. temperature 0 is greedy; beams > 1 is beam search; samples > 1 draws several answers
    from one prompt."""

    max_new_tokens: int = _within(64, 1, 1_000_000)  # tokens of the answer at most
    min_new_tokens: int = _within(0, 0, 1_000_000)  # no end before this many tokens
    temperature: float = _within(0.0, 0.0, 100.0)  # 0: greedy; logits are divided by it
    top_k: int = _filter("top_k")  # draw from the K most probable tokens; 0: from all
    # Draw from the most probable tokens that make up this probability.
    top_p: float = _filter("top_p")
    min_p: float = _filter("min_p")  # least share of the most probable token's probability
    # (name, value) of filters that were added to FILTERS.
    filters: tuple[tuple[str, float], ...] = ()
    # Above 1: tokens that occurred become less probable. The prompt counts.
    repetition_penalty: float = _within(1.0, 0.01, 100.0)
    # Taken from the logit of each token that occurred. The prompt does not count.
    presence_penalty: float = _within(0.0, -100.0, 100.0)
    frequency_penalty: float = _within(0.0, -100.0, 100.0)  # the same for each time it occurred
    # Above 1: tokens of the source, more probable. Where there is none: of the prompt.
    encoder_repetition_penalty: float = _within(1.0, 0.01, 100.0)
    # No run of N tokens twice. 0: any may be; a decoder's prompt counts.
    no_repeat_ngram_size: int = _within(0, 0, 1_000_000)
    # No run of N tokens that the source has. Where there is none: the prompt.
    encoder_no_repeat_ngram_size: int = _within(0, 0, 1_000_000)
    # Add BIAS to the logit of token ID. (id, bias) of each.
    logit_bias: tuple[tuple[int, float], ...] = ()
    # The same of the last of several tokens, where it would follow the others. (ids, bias) of each; -inf bans them.
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    banned: tuple[int, ...] = ()  # never this token
    # Not as the first. After a forced first token: not as the second.
    begin_suppress_tokens: tuple[int, ...] = ()
    # Tokens that end the text, instead of the folder's. None: the model's.
    eos: tuple[int, ...] = ()
    forced_first: int | None = None  # the first token
    forced_last: int | None = None  # the last token of a text that reaches the limit
    # After N tokens, ends become more probable by FACTOR ** tokens since. (N, FACTOR)
    exponential_decay_length_penalty: tuple[int, float] | None = None
    # Of the draws; they depend on (seed, request, position) alone.
    seed: int = _within(0, -(2**63), 2**63 - 1)
    samples: int = _within(1, 1, 1024)  # several answers to the prompt
    beams: int = _within(1, 1, 1024)  # above 1: beam search
    # A text scores log probability / length ** penalty.
    length_penalty: float = _within(1.0, -100.0, 100.0)
    # When beam search may stop: by a bound, at the best bound, or with as many texts as beams. heuristic, never, first;
    # of these transformers calls the first False, the last True.
    early_stopping: str = "heuristic"
    n_best: int = _within(1, 1, 1024)  # texts of a beam search that are given back
    # Compare beams by what bias, bans and penalties leave of the probabilities. Their log probabilities are of these.
    renormalize_logits: bool = False
    draft: int = _within(0, 0, 64)  # speculate this many tokens by the engine's draft
    # Guess this many tokens at once by looking the last ones up in the text; changes no token.
    lookup: int = _within(0, 0, 64)
    # A text longer than the model's context: an error; or it goes on with its last tokens (crop), or with its first
    # four and its last ones (sinks; see regard/decode/runners/outgrown.py).
    overflow: str = "error"
    # Beside each token that is chosen, the n most probable ones with the model's log probabilities,
    # before temperature, filters, penalties and masks, as those of the choice are.
    top_logprobs: int = _within(0, 0, MOST_TOPS)
    # The model's log probability of every token of the prompt too, and the `top_logprobs` best there.
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        for name, low, high in LIMITS:
            _check_number(name, getattr(self, name), low, high)
        _check_filters(self.filters)
        for name in ("prompt_logprobs", "renormalize_logits"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is {getattr(self, name)!r}; give True or False")
        _check_tokens(self)
        for name, known in (("early_stopping", EARLY), ("overflow", OVERFLOW)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is {getattr(self, name)!r}; choose {', '.join(known)}")
        if self.min_new_tokens > self.max_new_tokens:
            raise UsageError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}; "
                f"give a number from 0 to {self.max_new_tokens}"
            )
        if self.beams > 1:
            for name in (*DRAWING, "filters"):
                if getattr(self, name) != DEFAULTS[name]:
                    raise UsageError(
                        f"beam search does not draw: leave {name}={getattr(self, name)} out, or beams"
                    )
            if self.lookup or self.draft:
                raise UsageError(
                    "beam search does not guess ahead: leave lookup and draft out, or beams"
                )
            for name in ("overflow", "top_logprobs"):
                if (value := getattr(self, name)) != DEFAULTS[name]:
                    raise UsageError(
                        f"beam search compares whole texts: leave {name}={value!r} out, or beams"
                    )
        if self.n_best > self.beams:
            raise UsageError(
                f"n_best={self.n_best} of {self.beams} beams; give a number from 1 to {self.beams}"
            )
        if self.samples > 1 and self.temperature == 0:
            raise UsageError(
                f"samples={self.samples} would all be the same at temperature 0; raise temperature"
            )

    def __getattr__(self, name: str) -> Any:
        """The value of a filter that was added."""
        if name in FILTERS:
            return dict(self.filters).get(name, FILTERS[name].neutral)
        raise AttributeError(f"Settings has no {name}")

    @property
    def rows(self) -> int:
        """Rows of the batch that one request takes."""
        return max(self.beams, self.samples)

    @staticmethod
    def of(values: dict[str, Any]) -> Settings:
        """From keyword arguments: lists become tuples, whole numbers reals where a real is meant."""
        added = {
            name: float(x) for name, x in values.items() if name in FILTERS.keys() - DEFAULTS.keys()
        }
        clean: dict[str, Any] = {"filters": tuple(added.items())} if added else {}
        for name, value in values.items():
            if name in added:
                continue
            if name not in DEFAULTS:
                raise UsageError(f"generate has no setting {name!r}; {hint(name)}")
            if name == "early_stopping" and isinstance(value, bool):
                value = "first" if value else "heuristic"
            if name == "overflow" and value == "refuse":
                notice("overflow='refuse' is called overflow='error' now")
                value = "error"
            if isinstance(value, dict):
                value = tuple(sorted(value.items()))
            value = _tuples(value)
            if isinstance(DEFAULTS[name], float) and type(value) is int:
                value = float(value)
            clean[name] = value
        return Settings(**clean)


def _tuples(x: Any) -> Any:
    """Lists in lists as tuples in tuples."""
    return tuple(map(_tuples, x)) if isinstance(x, list | tuple) else x


DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Settings)}
LIMITS = [(f.name, *f.metadata["limits"]) for f in fields(Settings) if f.metadata]


def hint(name: str) -> str:
    """What a setting that we do not have is called here."""
    if name in FOREIGN_NAMES:
        return f"here it is {FOREIGN_NAMES[name]}"
    if name in GONE:
        return f"it is gone: {GONE[name]}"
    return nearest(name, DEFAULTS)


DRAWING = ("temperature", "samples", *FILTERS)


def _check_filters(given: tuple[tuple[str, float], ...]) -> None:
    for name, value in given:
        if name not in FILTERS or name in DEFAULTS:
            raise UsageError(f"there is no filter {name!r}; {nearest(name, FILTERS)}")
        low, high = FILTERS[name].limits
        if not low <= value <= high:  # NaN is not
            raise UsageError(f"{name} is {value}; give a number from {low} to {high}")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    whole = isinstance(DEFAULTS[name], int)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        kind = "whole number" if whole else "number"
        raise UsageError(f"{name} is {value!r}; give a {kind} from {low} to {high}")
    if not low <= value <= high:  # NaN is not
        raise UsageError(f"{name} is {value}; give a number from {low} to {high}")


def _check_tokens(s: Settings) -> None:
    """Token ids are whole numbers; whether the vocabulary has them is known when a request comes."""
    for name in ("eos", "banned", "logit_bias", "sequence_bias", "begin_suppress_tokens"):
        if not isinstance(getattr(s, name), tuple):
            raise UsageError(f"{name} is {getattr(s, name)!r}; give a list of token ids")
    pairs = [pair for pair in s.logit_bias if isinstance(pair, tuple) and len(pair) == 2]
    if len(pairs) < len(s.logit_bias) or not all(_bias(bias) for _, bias in pairs):
        raise UsageError("logit_bias is {token: bias, ...}, each bias a number from -1e9 to 1e9")
    for entry in s.sequence_bias:
        whole = (
            isinstance(entry, tuple)
            and len(entry) == 2
            and isinstance(entry[0], tuple)
            and entry[0]
        )
        if not whole or not (_bias(entry[1]) or entry[1] == -math.inf):
            raise UsageError(
                f"sequence_bias has {entry!r:.60}; give {{(id, id, ...): bias, ...}}, each bias a number from "
                "-1e9 to 1e9, or -inf, which bans the sequence"
            )
    for token in named(s):
        if isinstance(token, bool) or not isinstance(token, int):
            raise UsageError(f"{token!r} is not a token id; give a whole number from 0 on")
    decay = s.exponential_decay_length_penalty
    if decay is not None and not (
        isinstance(decay, tuple)
        and len(decay) == 2
        and type(decay[0]) is int
        and 0 <= decay[0] <= 1_000_000
        and isinstance(decay[1], int | float)
        and 0 < decay[1] <= 100
    ):
        raise UsageError(
            f"exponential_decay_length_penalty is {decay!r}; give (tokens before it begins, factor), the factor a "
            "number above 0, up to 100"
        )


def named(s: Settings) -> list[int]:
    """Every token id that settings name."""
    forced = [token for token in (s.forced_first, s.forced_last) if token is not None]
    biased = [token for token, _ in s.logit_bias] + [i for ids, _ in s.sequence_bias for i in ids]
    return [*s.eos, *s.banned, *s.begin_suppress_tokens, *forced, *biased]


def _bias(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and -1e9 <= x <= 1e9


@dataclass(eq=False)  # two requests with the same words are two
class Request:
    """One prompt. `ids` is what the decoder has been given (a prompt, or the start of an encoder-decoder's answer);
    `source` is what its encoder reads. `stop` is asked after every token of a sample whether its text is complete (if
    it raises, that sample ends with an error; after a step that failed it is asked about the same token again);
    `deadline` is a time on the monotonic clock. Requests share prompt pages only with others of the same `salt`. Those
    of a higher `priority` are served first, and put lower ones back into the queue where there is no room; and so do
    those of an earlier `turn`, which is how the many prompts of one client come after the first ones of others.

    `mask` says which tokens may come next, as a grammar does: it is called before every choice with the number of the
    sample and the ids said so far, and gives a boolean for each token of the vocabulary, or a bitmask (int32, token i
    is bit i % 32 of word i // 32, as llguidance and xgrammar fill them; tokens past its end are forbidden). No other
    token is ever said, whatever bias, bans and forced tokens say. If it allows none the text is complete ("stop"); if
    it raises, that sample ends with an error. What it gives may depend on its arguments alone: a text may be asked
    about twice, and one that was put back into the queue from its beginning."""

    ids: list[int]
    settings: Settings = field(default_factory=Settings)
    source: Tensor | None = None  # ids (s) or an image (c h w)
    stop: Callable[[int, list[int]], bool] | None = None
    deadline: float | None = None
    number: int = -1  # given by the engine; also keys its random numbers unless `key` is set
    key: int | None = None
    salt: str = ""
    priority: int = 0
    turn: int = 0
    mask: Callable[[int, list[int]], Any] | None = None
    # Once it is admitted: tokens of the prompt whose pages others had left.
    cached: int | None = None
    # Of the engine: since when it waits or runs, the tokens that it had then, and how often it has yielded its row.
    since: float = field(default=0.0, init=False)
    had: int = field(default=0, init=False)
    yielded: int = field(default=0, init=False)

    @property
    def read(self) -> list[int]:
        """Ids that an encoder reads; of other models the prompt; nothing of an image."""
        if self.source is None:
            return self.ids
        return self.source.tolist() if self.source.dim() == 1 else []

    @property
    def rank(self) -> tuple[int, int, int]:
        """The order in which requests are served: by priority, by turn, the oldest first. Who yields its row has a
        later turn."""
        return -self.priority, self.turn + self.yielded, self.number


@dataclass
class Result:
    """One answer: its new ids without prompt, start and end token, and the model's log probability of each, before
    temperature, filters and penalties. `score` is their sum, the end token's included, or the beam's score. finish:
    eos, length, stop, cancelled, deadline, error. Where they were asked for: `top_logprobs` has for each of the ids the
    most probable tokens, best first; `prompt_logprobs` is of the prompt's tokens (None of the first, which follows
    nothing), `prompt_top_logprobs` of what else was probable there."""

    ids: list[int]
    logprobs: list[float]
    score: float
    finish: str
    text: str | None = None
    error: str | None = None
    top_logprobs: list[Tops] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[Tops] = field(default_factory=list)


@dataclass
class Event:
    """What a step did for one request: a new token of sample `row`, or (done) all its results."""

    request: int
    row: int = 0
    token: int | None = None
    logprob: float = 0.0
    top_logprobs: Tops = field(default_factory=list)
    done: list[Result] | None = None
    cause: Exception | None = None  # what a step raised, where that ended the request
