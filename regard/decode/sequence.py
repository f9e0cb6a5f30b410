"""An answer in the making, and its place among those that run.

A `Sequence` lasts from a request's submission to its answer. Each time it is admitted it gets a `Slot`, which is thrown
away when it leaves: by its end, or because it was preempted. What a device was asked for on behalf of a slot that has
left is dropped when it arrives, whatever its sequence does by then.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import abc
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
from torch import Tensor

from regard.cache import BlockTable, Cache, PagePool
from regard.cache.base import State as Recurrent
from regard.decode.settings import Event, Request, Result, Tops
from regard.decode.speculate import Index, Rate

BROKEN = "the model gave a logit that is not a number"
NOTHING = "its mask allows no token that its other settings leave"
# Tokens of a prompt whose logits are there at once, where their log probabilities are asked for; chosen for speed.
SLICE = 64


@dataclass(eq=False)
class Sequence:
    """One answer in the making."""

    request: Request
    sample: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # Where the best tokens of each choice are asked for.
    tops: list[Tops] = field(default_factory=list)
    finish: str = ""
    error: str | None = None
    window: int | None = None  # the model's context
    border: int | None = None  # of longer texts every token is turned otherwise (LongRoPE)
    guess: list[int] = field(default_factory=list)
    guessed: int = -1  # tokens said when `guess` was made
    index: Index | None = None  # of the text so far, where lookup is asked for
    keys: list[bytes] = field(default_factory=list)  # of the full pages that were published

    def guesses(self) -> list[int]:
        """Tokens that may come next, found earlier in the text."""
        room = self.room(self.request.settings.lookup)
        if not room:
            return []
        if self.index is None:
            self.index = Index(self.request.ids)
        self.index.extend(self.ids[len(self.index.text) - len(self.request.ids) :])
        return self.index.after(room)

    def room(self, wish: int) -> int:
        """How many tokens can be guessed: as many as wished, but one must stay to be chosen, and none may lie outside
        the context."""
        left = self.request.settings.max_new_tokens - len(self.ids) - 1
        if self.window is not None:
            left = min(left, self.window - self.size)
        if self.border is not None and not self.far:
            left = min(left, self.border - self.size)
        return max(0, min(wish, left))

    @property
    def size(self) -> int:
        """Tokens of the text so far, the prompt included."""
        return len(self.request.ids) + len(self.ids)

    @property
    def reach(self) -> int:
        """The length that its text is read for. A search cannot be read again when it has grown, so it is read for the
        longest that it may come to."""
        s = self.request.settings
        return self.size + (s.max_new_tokens if s.beams > 1 else 0)

    @property
    def far(self) -> bool:
        return self.border is not None and self.reach > self.border

    @property
    def salt(self) -> str:
        """What the keys of its pages begin with: those of a longer text are others."""
        return self.request.salt + "\0far" * self.far

    @property
    def key(self) -> int:
        """What its random numbers depend on, besides the seed and the position."""
        request = self.request
        number = request.number if request.key is None else request.key
        return number * 1024 + self.sample

    def append_token(self, token: int, logprob: float, tops: Tops) -> list[Event]:
        """One token more, and whether the answer ends with it: an end token is no event."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        settings, stop = self.request.settings, self.request.stop
        tops = tops[: settings.top_logprobs]
        # Kept where asked for alone: the garbage collector goes through every list that there is.
        if tops:
            self.tops.append(tops)
        if token in settings.eos:
            self.finish = "eos"
            return []
        # `stop` is the user's code.
        try:
            if stop is not None and stop(self.sample, self.ids):
                self.finish = "stop"
            elif len(self.ids) >= settings.max_new_tokens:
                self.finish = "length"
        except Exception as error:
            self.finish, self.error = "error", f"its stop raised {type(error).__name__}: {error}"
        return [Event(self.request.number, self.sample, token, logprob, tops)]

    def write_mask(self, words: Any, vocab: int) -> None:
        """Ask its mask what may come next, and write that to words of 32 bits; where it is nothing, the answer ends."""
        assert self.request.mask is not None
        try:
            pack(self.request.mask(self.sample, list(self.ids)), words, vocab)
        except Exception as error:
            self.finish, self.error = "error", f"its mask raised {type(error).__name__}: {error}"
            return
        if not words.any():
            self.finish = "stop"

    def rollback(self, said: int) -> None:
        """As it was when it had said so many tokens."""
        del self.ids[said:], self.logprobs[said:], self.tops[said:]
        self.finish, self.error, self.index, self.keys = "", None, None, []
        self.guess, self.guessed = [], -1

    def result(self) -> Result:
        n = len(self.ids) - (self.finish == "eos")
        said = (self.ids[:n], self.logprobs[:n], sum(self.logprobs))
        return Result(*said, self.finish, error=self.error, top_logprobs=self.tops[:n])


def pack(mask: Any, words: Any, vocab: int) -> None:
    """Write a mask over the vocabulary to words of 32 bits, of numpy; what lies past its end is 0."""
    given = np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask).ravel()
    if given.dtype == bool and given.size <= vocab:
        given = np.packbits(given, bitorder="little")
        words = words.view(np.uint8)
    elif given.dtype != np.int32 or given.size > len(words):
        raise ValueError(
            f"it gave {given.dtype} of size {given.size}; give a boolean for each of {vocab} tokens, or "
            f"{len(words)} words of int32"
        )
    words[: given.size], words[given.size :] = given, 0
    if vocab % 32 and given.dtype == np.int32:
        words[-1] &= (1 << vocab % 32) - 1


def page_keys(
    text: list[int], page: int, salt: str = "", known: abc.Sequence[bytes] = ()
) -> list[bytes]:
    """A chain of SHA-256, one for each full page of a text: equal keys mean equal tokens from the start. `known` are
    the first ones."""
    keys = list(known)
    key = keys[-1] if keys else hashlib.sha256(salt.encode()).digest()
    for end in range((len(keys) + 1) * page, len(text) + 1, page):
        key = hashlib.sha256(key + array("q", text[end - page : end]).tobytes()).digest()
        keys.append(key)
    return keys


# The log probabilities of a prompt's tokens, and the best ones at each place.
Scores = tuple[list[float | None], list[Tops]]


def unscored(request: Request, done: dict[int, Scores]) -> bool:
    """Whether a prompt must be read whole, as its log probabilities are asked for and not known."""
    return request.settings.prompt_logprobs and request.number not in done


NO_PAGES = PagePool(0, 1)  # of slots whose tokens lie in a cache


class State(Enum):
    """How far a row in a batch has come. Requests in the queue have no rows in batches."""

    # Its prompt is read, or its first token is not in a round that the host will read.
    PREFILL = auto()
    RUNNING = auto()
    # The device was asked for all its tokens, and another may have its place.
    DRAINING = auto()
    # It has left its batch.
    FINISHED = auto()


@dataclass(eq=False)
class Memory:
    """What an encoder made of a request's source, for all its rows, in a graph."""

    request: Request
    size: int
    slot_ids: list[int]  # its rows
    pages: BlockTable
    ready: bool = False


@dataclass(eq=False)
class Slot:
    """Its place among those that run."""

    sequence: Sequence
    text: list[int]  # what is read before the first choice
    index: int = 0  # of its place, where places are fixed
    keys: list[bytes] = field(default_factory=list)  # of its full pages
    pages: BlockTable = field(default_factory=lambda: BlockTable(NO_PAGES))
    fed: int = 0  # tokens of the text
    scheduled: int = 0  # tokens the device was asked to choose; 0 until the prompt is read
    ran: int = 0  # steps of the rounds since its prompt was read
    state: State = State.PREFILL
    memory: Memory | None = None
    # Samples that begin where the prompt is through.
    siblings: list[Slot] = field(default_factory=list)
    # Log probabilities of its prompt that are on their way.
    scored: list[tuple[Tensor, ...]] = field(default_factory=list)
    # In a graph: tokens of its text that the device can look up, and those that the draft model has read; and what a
    # pass over guesses brings, or would.
    noted: int = 0
    drafted: int = 0
    rate: Rate = field(default_factory=Rate)
    # What a plain runner has of a text that is begun; and of a model with states: the pages after which they are
    # wanted, and what was found.
    cache: Cache | None = None
    marks: list[int] = field(default_factory=list)
    # Where the model's own layers guess: the states (t m) of its last tokens, which these have not read.
    trail: list[Tensor] = field(default_factory=list)
    states: dict[bytes, list[Recurrent]] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return bool(self.sequence.finish)

    def going(self) -> list[Slot]:
        """Samples that begin where its prompt is through."""
        return [s for s in self.siblings if s.state is not State.FINISHED]

    @property
    def slot_ids(self) -> list[int]:
        """The rows of a step that are its own."""
        return [self.index]

    @property
    def unread(self) -> bool:
        """Whether its source is not in its pages."""
        return self.memory is not None and not self.memory.ready

    @property
    def left(self) -> int:
        """Tokens the device has not been asked for."""
        return self.settings.max_new_tokens - self.said - self.scheduled

    def __post_init__(self) -> None:
        self.request, self.settings = self.sequence.request, self.sequence.request.settings
        # Rows of a step that it has: a request with all its beams is one slot.
        self.times = self.settings.beams
        # Tokens that the sequence had said when it came here.
        self.said = len(self.text) - len(self.request.ids)
        self.far, self.salt = self.sequence.far, self.sequence.salt
