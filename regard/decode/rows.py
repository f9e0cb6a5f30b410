"""One answer in the making: what it has said, what it may guess, and why it ends."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.decode.lookup import Index
from regard.decode.settings import Event, Request, Result, Tops

BROKEN = "the model gave a logit that is not a number"
NOTHING = "its mask allows no token that its other settings leave"


@dataclass(eq=False)
class Row:
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
        return max(0, min(wish, left))

    @property
    def size(self) -> int:
        """Tokens of the text so far, the prompt included."""
        return len(self.request.ids) + len(self.ids)

    @property
    def key(self) -> int:
        """What its random numbers depend on, besides the seed and the position."""
        request = self.request
        number = request.number if request.key is None else request.key
        return number * 1024 + self.sample

    def say(self, token: int, logprob: float, tops: Tops) -> list[Event]:
        """One token more, and whether the answer ends with it: an end token is no event."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.tops.append(tops[: self.request.settings.top_logprobs])
        self.finish, self.error = _finish(self, token)
        if self.finish == "eos":
            return []
        return [Event(self.request.number, self.sample, token, logprob, self.tops[-1])]

    def allowed(self, vocab: int) -> Tensor | None:
        """What its mask allows next, as words of 32 bits; None where the answer ends instead."""
        assert self.request.mask is not None
        try:
            words = packed(self.request.mask(self.sample, list(self.ids)), vocab)
        except Exception as error:
            self.finish, self.error = "error", f"its mask raised {type(error).__name__}: {error}"
            return None
        if not words.any():
            self.finish = "stop"
            return None
        return words

    def back(self, said: int) -> None:
        """As it was when it had said so many tokens."""
        del self.ids[said:], self.logprobs[said:], self.tops[said:]
        self.finish, self.error, self.index, self.keys = "", None, None, []
        self.guess, self.guessed = [], -1

    def result(self) -> Result:
        ends = self.finish == "eos"
        ids = self.ids[:-1] if ends else self.ids
        return Result(
            list(ids),
            self.logprobs[: len(ids)],
            sum(self.logprobs),
            self.finish,
            error=self.error,
            top_logprobs=self.tops[: len(ids)] if self.request.settings.top_logprobs else [],
        )


def packed(mask: Any, vocab: int) -> Tensor:
    """A mask over the vocabulary as words of 32 bits; what lies past its end is 0."""
    given = np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask).reshape(-1)
    words = np.zeros(-(-vocab // 32), np.int32)
    if given.dtype == bool and given.size <= vocab:
        bits = np.packbits(given, bitorder="little")
        words.view(np.uint8)[: len(bits)] = bits
    elif given.dtype == np.int32 and given.size <= len(words):
        words[: given.size] = given
    else:
        raise ValueError(
            f"it gave {given.dtype} of size {given.size}; give a boolean for each of {vocab} tokens, or "
            f"{len(words)} words of int32"
        )
    if vocab % 32:
        words[-1] &= (1 << vocab % 32) - 1
    return torch.from_numpy(words)


def page_keys(
    text: list[int], page: int, salt: str = "", known: Sequence[bytes] = ()
) -> list[bytes]:
    """A chain of SHA-256, one for each full page of a text: equal keys mean equal tokens from the start. `known` are
    the first ones."""
    keys = list(known)
    key = keys[-1] if keys else hashlib.sha256(salt.encode()).digest()
    for end in range((len(keys) + 1) * page, len(text) + 1, page):
        key = hashlib.sha256(key + array("q", text[end - page : end]).tobytes()).digest()
        keys.append(key)
    return keys


def _finish(row: Row, token: int) -> tuple[str, str | None]:
    """Why a row ends with this token, if it does; and what was wrong with its `stop`, which is the user's code."""
    settings, stop = row.request.settings, row.request.stop
    if token in settings.eos:
        return "eos", None
    try:
        if stop is not None and stop(row.sample, row.ids):
            return "stop", None
    except Exception as error:
        return "error", f"its stop raised {type(error).__name__}: {error}"
    return ("length" if len(row.ids) >= settings.max_new_tokens else ""), None
