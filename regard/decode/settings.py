"""What a user asks of decoding, checked once; what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from regard.config import UsageError

EARLY = ("heuristic", "never", "first")


@dataclass(frozen=True)
class Settings:
    """How one request is decoded. temperature 0 is greedy; beams > 1 is beam search; samples > 1 draws several answers
    from one prompt."""

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # least share of the most probable token's probability
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    forced_first: int | None = None  # the first token must be this
    forced_last: int | None = None  # a text that reaches max_new_tokens must end with this
    seed: int = 0
    samples: int = 1
    beams: int = 1
    length_penalty: float = (
        1.0  # a finished beam's score: log probability / length ** length_penalty
    )
    early_stopping: str = "heuristic"
    n_best: int = 1
    groups: int = 1  # diverse beam search: groups of beams that avoid each other's tokens
    diversity: float = 0.0
    lookup: int = 0  # speculate this many tokens by looking the last ones up in the text so far

    def __post_init__(self) -> None:
        for name, low, high in LIMITS:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{name} is {value}; give a finite number")
            if not low <= value <= high:
                raise UsageError(f"{name} is {value}; give a number from {low} to {high}")
        if self.early_stopping not in EARLY:
            raise UsageError(
                f"early_stopping is {self.early_stopping!r}; choose {', '.join(EARLY)}"
            )
        if self.beams > 1 and (self.temperature > 0 or self.samples > 1):
            raise UsageError(
                "beam search does not draw: leave temperature and samples out, or beams"
            )
        if self.n_best > max(self.beams, self.samples):
            raise UsageError(
                f"n_best={self.n_best} of {self.beams} beams; ask for at most that many"
            )
        if self.beams % self.groups:
            raise UsageError(f"groups={self.groups} must divide beams={self.beams}")
        if self.samples > 1 and self.temperature == 0:
            raise UsageError(
                f"samples={self.samples} would all be the same at temperature 0; raise temperature"
            )

    @property
    def rows(self) -> int:
        """Rows of the batch that one request takes."""
        return max(self.beams, self.samples)

    @staticmethod
    def of(values: dict[str, Any]) -> Settings:
        """From keyword arguments: lists become tuples, types are checked."""
        known = {f.name: f for f in fields(Settings)}
        clean = {}
        for name, value in values.items():
            if isinstance(value, dict):
                value = tuple(sorted(value.items()))
            elif isinstance(value, list):
                value = tuple(value)
            default = known[name].default
            if (
                isinstance(default, float)
                and isinstance(value, int)
                and not isinstance(value, bool)
            ):
                value = float(value)
            if default is not None and type(value) is not type(default):
                raise UsageError(f"{name} is {value!r}; it must be {type(default).__name__}")
            clean[name] = value
        return Settings(**clean)


LIMITS: tuple[tuple[str, float, float], ...] = (
    ("max_new_tokens", 1, 1_000_000),
    ("min_new_tokens", 0, 1_000_000),
    ("temperature", 0.0, 100.0),
    ("top_k", 0, 10_000_000),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
    ("samples", 1, 1024),
    ("beams", 1, 1024),
    ("length_penalty", -100.0, 100.0),
    ("n_best", 1, 1024),
    ("groups", 1, 1024),
    ("diversity", 0.0, 100.0),
    ("lookup", 0, 64),
)


@dataclass
class Request:
    """One prompt. `ids` is what the decoder has been given (a prompt, or the start of an encoder-decoder's answer);
    `source` is what its encoder reads. `stop` is asked after every token of a sample whether its text is complete;
    `deadline` is a time on the monotonic clock."""

    ids: list[int]
    settings: Settings = field(default_factory=Settings)
    source: Tensor | None = None  # ids (s) or an image (c h w)
    stop: Callable[[int, list[int]], bool] | None = None
    deadline: float | None = None
    number: int = -1  # given by the engine; also keys its random numbers unless `key` is set
    key: int | None = None


@dataclass
class Result:
    """One answer: its new ids without prompt, start and end token. `score` is the sum of the log probabilities, or
    the beam's score. finish: eos, length, stop, cancelled, deadline, error."""

    ids: list[int]
    logprobs: list[float]
    score: float
    finish: str
    text: str | None = None
    error: str | None = None


@dataclass
class Event:
    """What a step did for one request: a new token of sample `row`, or (done) all its results."""

    request: int
    row: int = 0
    token: int | None = None
    logprob: float = 0.0
    done: list[Result] | None = None
