"""Greedy decoding and sampling: a lane of rows that advance together, each by its own settings.

With `lookup` a row also guesses tokens by finding its last ones earlier in the text. The guesses are checked in the
same forward pass, by choosing at each place as always: a guess that equals the choice costs nothing, the first that
does not ends the run. So speculation changes no token, greedy or drawn.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.cache import Cache, Paged
from regard.decode.draft import Draft
from regard.decode.lookup import Index
from regard.decode.sampling import draw, min_p, repeat, top_k, top_p, typical_p, uniform
from regard.decode.settings import Event, Request, Result
from regard.kernels.c.rows import choose

BROKEN = "the model gave a logit that is not a number"


@dataclass(eq=False)
class Row:
    """One answer in the making."""

    request: Request
    sample: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
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

    def back(self, said: int) -> None:
        """As it was when it had said so many tokens."""
        del self.ids[said:], self.logprobs[said:]
        self.finish, self.error, self.index, self.keys = "", None, None, []
        self.guess, self.guessed = [], -1

    def result(self) -> Result:
        ends = self.finish == "eos"
        ids = self.ids[:-1] if ends else self.ids
        return Result(
            list(ids), self.logprobs[: len(ids)], sum(self.logprobs), self.finish, error=self.error
        )


class SampleLane:
    """Rows of any settings without beams, over one cache."""

    def __init__(self, cache: Cache, rows: list[Row], draft: Draft | None = None):
        self.cache, self.rows, self.draft = cache, rows, draft
        if draft is not None:
            draft.join(len(rows))
        self._columns: dict[str, Tensor] = {}

    # --- one step ---

    def step(self, model: Any, backend: str) -> list[Event]:
        """Feed the last token (and guesses) of every row, choose, and forget the guesses that failed."""
        self.speculate()
        width = 1 + max(len(row.guess) for row in self.rows)
        fed = [[(row.ids or row.request.ids)[-1], *row.guess] for row in self.rows]
        device = self.cache.device
        if width == 1:
            logits = model.next_logits(
                torch.tensor(fed, device=device), cache=self.cache, backend=backend
            )
            return self.choose(logits)
        lengths = torch.tensor([len(f) for f in fed], device=device)
        ids = torch.tensor([f + [0] * (width - len(f)) for f in fed], device=device)
        return self.verify(model(ids, lengths, cache=self.cache, backend=backend), lengths)

    def speculate(self) -> None:
        """Guess the next tokens of every row: looked up in its text, or by the draft model."""
        if all(row.guessed == len(row.ids) for row in self.rows):
            return  # the step was tried before and found no page
        for row in self.rows:
            row.guess, row.guessed = row.guesses(), len(row.ids)
        if self.draft is not None:
            texts = [row.request.ids + row.ids for row in self.rows]
            room = [0 if row.guess else row.room(row.request.settings.draft) for row in self.rows]
            for row, guess in zip(self.rows, self.draft.guess(texts, room), strict=True):
                row.guess = row.guess or guess

    def verify(self, logits: Tensor, lengths: Tensor) -> list[Event]:
        """Choose along each row's guesses until one fails; logits (n t V)."""
        events: list[Event] = []
        going = list(range(len(self.rows)))
        right = [0] * len(self.rows)
        for j in range(logits.shape[1]):
            events += self.choose(logits[:, j], going)
            still = []
            for i in going:
                row = self.rows[i]
                if not row.finish and j < len(row.guess) and row.ids[-1] == row.guess[j]:
                    right[i] += 1
                    still.append(i)
            going = still
            if not going:
                break
        wrong = lengths - 1 - torch.tensor(right, device=lengths.device)
        if bool((wrong > 0).any()):
            self.cache.rewind(wrong)
        return events

    def choose(self, logits: Tensor, only: list[int] | None = None) -> list[Event]:
        """The next token of every row (or of some), from logits (n V)."""
        index = list(range(len(self.rows))) if only is None else only
        rows = [self.rows[i] for i in index]
        if only is not None:
            logits = logits[torch.tensor(index, device=logits.device)]
        raw = logits.float()
        norm, top, best = choose(raw, 1)  # one norm for every row, whatever its company asks for
        broken = (~norm.isfinite()).tolist()
        if self.columns(raw).keys() == {"seed", "key"} and not any(map(held, rows)):
            tokens, chosen = best[:, 0], top[:, 0] - norm
        else:
            if any(broken):
                raw = raw.masked_fill(~norm.isfinite()[:, None], 0.0)
            tokens = self.pick(raw, rows, index)
            chosen = raw.gather(-1, tokens[:, None])[:, 0] - norm
        events = []
        for row, token, logprob, bad in zip(
            rows, tokens.tolist(), chosen.tolist(), broken, strict=True
        ):
            if bad:
                row.finish, row.error = "error", BROKEN
                continue
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.finish, row.error = finish(row, token)
            if row.finish != "eos":
                events.append(Event(row.request.number, row.sample, token, logprob))
        return events

    def pick(self, logits: Tensor, rows: list[Row], index: list[int]) -> Tensor:
        """Ids (n): the most probable, or drawn from what the row's settings leave."""
        whole = columns = self.columns(logits)
        at = torch.tensor(index, device=logits.device)
        if len(index) != len(self.rows):
            columns = {name: c[at] for name, c in whole.items()}
        tokens = self._pick(adjust(logits, rows, columns), rows, columns)
        if "said" in whole:
            whole["said"][at, tokens] += 1
        return tokens

    def _pick(self, logits: Tensor, rows: list[Row], columns: dict[str, Tensor]) -> Tensor:
        if "temperature" not in columns:
            return logits.argmax(-1)
        hot = columns["temperature"]
        kept = logits / hot.clamp(min=1e-6)
        for name, filter in (
            ("top_k", top_k),
            ("top_p", top_p),
            ("min_p", min_p),
            ("typical_p", typical_p),
        ):
            if name in columns:
                kept = filter(kept, columns[name])
        position = torch.tensor([len(row.ids) for row in rows], device=logits.device)
        u = uniform(columns["seed"][:, 0], columns["key"][:, 0], position)
        return torch.where(hot[:, 0] > 0, draw(kept, u), logits.argmax(-1))

    def columns(self, logits: Tensor) -> dict[str, Tensor]:
        """Settings as columns (n 1), and what they say of single tokens (n V): only what some row uses, made anew when
        rows come or go."""
        if self._columns:
            return self._columns
        c, each, device = self._columns, [row.request.settings for row in self.rows], logits.device
        for name, idle in IDLE.items():
            values = [getattr(s, name) for s in each]
            if any(v != idle for v in values):
                c[name] = torch.tensor(values, device=device)[:, None]
        c["seed"] = torch.tensor([s.seed for s in each], device=device)[:, None]
        keys = [(r.request.number if r.request.key is None else r.request.key) for r in self.rows]
        keys = [key * 1024 + row.sample for key, row in zip(keys, self.rows, strict=True)]
        c["key"] = torch.tensor(keys, device=device)[:, None]
        blank = logits.new_zeros(len(each), logits.shape[-1])
        if any(name in c for name in PENALTIES):
            c["said"] = counts([row.ids for row in self.rows], blank)
            c["seen"] = counts([row.request.ids for row in self.rows], blank)
        if any(s.logit_bias or s.banned for s in each):
            c["bias"] = blank
            for i, s in enumerate(each):
                for token, bias in s.logit_bias:
                    blank[i, token] += bias
                blank[i, list(s.banned)] = -torch.inf
        return c

    # --- membership ---

    def publish(self, page: int) -> None:
        """Leave the pages that answers have filled to later prompts, such as the next turn of a chat."""
        assert isinstance(self.cache, Paged)
        for i, row in enumerate(self.rows):
            # The last token has been said, not fed.
            full = (row.size - 1) // page
            if full > len(row.keys) and row.error is None:
                text = (row.request.ids + row.ids)[: full * page]
                answer = row.keys[len(row.request.ids) // page :]
                row.keys = page_keys(text, page, row.request.salt, row.keys)
                self.cache.publish(i, row.keys)
                states = self.cache.state_after(i, len(text))
                if states is not None:
                    # States are large: of an answer the last are kept.
                    self.cache.pool.states.pop(answer[-1] if answer else None, None)
                    self.cache.pool.remember(row.keys[-1], states)

    def drop(self, index: list[int]) -> None:
        """These rows are over."""
        gone = set(index)
        kept = [i for i in range(len(self.rows)) if i not in gone]
        at = torch.tensor(kept, dtype=torch.long, device=self.cache.device)
        self.cache = self.cache.take(at)
        self.rows = [self.rows[i] for i in kept]
        if self.draft is not None:
            self.draft.keep(kept)
        self._columns = {}

    def join(self, other: SampleLane) -> None:
        self.cache = self.cache.join(other.cache)
        if self.draft is not None and other.draft is not None:
            self.draft.cache = self.draft.cache.join(other.draft.cache)
        self.rows += other.rows
        self._columns = {}

    def over(self) -> list[int]:
        """The places of rows that are done."""
        return [i for i, row in enumerate(self.rows) if row.finish]

    def requests(self) -> list[Request]:
        """Each request once, in the order of its first row."""
        return list({id(row.request): row.request for row in self.rows}.values())


PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
IDLE = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    **PENALTIES,
}


def adjust(logits: Tensor, rows: list[Row], columns: dict[str, Tensor]) -> Tensor:
    """Bias and bans, penalties, the least length and forced tokens."""
    if "bias" in columns:
        logits = logits + columns["bias"]
    if "repetition_penalty" in columns:
        logits = repeat(logits, columns["said"] + columns["seen"], columns["repetition_penalty"])
    if "presence_penalty" in columns:
        logits = logits - columns["presence_penalty"] * (columns["said"] > 0)
    if "frequency_penalty" in columns:
        logits = logits - columns["frequency_penalty"] * columns["said"]
    own = None
    for i, row in enumerate(rows):
        s, n = row.request.settings, len(row.ids)
        must = forced(s, n)
        if not constrained(s, n):
            continue
        own = logits.clone() if own is None else own
        own[i, list(s.eos)] = -torch.inf
        if must is not None:
            own[i], own[i, must] = -torch.inf, 0.0
    return logits if own is None else own


def constrained(settings: Any, produced: int) -> bool:
    """Whether the next token may not end the text yet, or is prescribed."""
    return produced < settings.min_new_tokens or forced(settings, produced) is not None


def held(row: Row) -> bool:
    return constrained(row.request.settings, len(row.ids))


def forced(settings: Any, produced: int) -> int | None:
    """The token that must come now, if any."""
    if produced == 0 and settings.forced_first is not None:
        return settings.forced_first
    return settings.forced_last if produced == settings.max_new_tokens - 1 else None


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


def counts(texts: list[list[int]], like: Tensor) -> Tensor:
    """How often each text has each token, (n V)."""
    found = torch.zeros_like(like)
    for i, ids in enumerate(texts):
        at = torch.tensor(ids, dtype=torch.long, device=like.device)
        found[i].scatter_add_(0, at, torch.ones_like(at, dtype=like.dtype))
    return found


def finish(row: Row, token: int) -> tuple[str, str | None]:
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
