"""Greedy decoding and sampling: a lane of rows that advance together, each by its own settings.

With `lookup` a row also guesses tokens by finding its last ones earlier in the text. The guesses are checked in the same
forward pass, by choosing at each place as always: a guess that equals the choice costs nothing, the first that does not
ends the run. So speculation changes no token, greedy or drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.cache import Cache
from regard.decode.sampling import draw, min_p, repeat, top_k, top_p, typical_p, uniform
from regard.decode.settings import Event, Request, Result


@dataclass
class Row:
    """One answer in the making."""

    request: Request
    sample: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    error: str | None = None
    guess: list[int] = field(default_factory=list)

    def result(self) -> Result:
        ends = self.finish == "eos"
        ids = self.ids[:-1] if ends else self.ids
        return Result(
            list(ids), self.logprobs[: len(ids)], sum(self.logprobs), self.finish, error=self.error
        )


class SampleLane:
    """Rows of any settings without beams, over one cache."""

    def __init__(self, cache: Cache, rows: list[Row]):
        self.cache, self.rows = cache, rows
        self._columns: dict[str, Tensor] = {}

    # --- one step ---

    def step(self, model: Any, backend: str) -> list[Event]:
        """Feed the last token (and guesses) of every row, choose, and forget the guesses that failed."""
        for row in self.rows:
            row.guess = look_up(row)
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
        broken = raw.isnan().any(-1).tolist()
        tokens = self.pick(raw, rows, index)
        chosen = raw.gather(-1, tokens[:, None])[:, 0] - raw.logsumexp(-1)
        events = []
        for row, token, logprob, bad in zip(
            rows, tokens.tolist(), chosen.tolist(), broken, strict=True
        ):
            if bad:
                row.finish, row.error = "error", "the model gave a logit that is not a number"
                continue
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.finish = finish(row, token)
            if row.finish != "eos":
                events.append(Event(row.request.number, row.sample, token, logprob))
        return events

    def pick(self, logits: Tensor, rows: list[Row], index: list[int]) -> Tensor:
        """Ids (n): the most probable, or drawn from what the row's settings leave."""
        columns = self.columns(logits.device)
        if len(index) != len(self.rows):
            at = torch.tensor(index, device=logits.device)
            columns = {name: c[at] for name, c in columns.items()}
        logits = adjust(logits, rows, columns)
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
        return torch.where(
            hot[:, 0] > 0, draw(kept.nan_to_num(0.0, neginf=-torch.inf), u), logits.argmax(-1)
        )

    def columns(self, device: torch.device) -> dict[str, Tensor]:
        """Settings as columns (n 1), those only that some row uses."""
        if not self._columns:
            each = [row.request.settings for row in self.rows]
            for name, idle in IDLE.items():
                values = [getattr(s, name) for s in each]
                if any(v != idle for v in values):
                    self._columns[name] = torch.tensor(values, device=device)[:, None]
            self._columns["seed"] = torch.tensor([s.seed for s in each], device=device)[:, None]
            keys = [
                row.request.number if row.request.key is None else row.request.key
                for row in self.rows
            ]
            keys = [key * 1024 + row.sample for key, row in zip(keys, self.rows, strict=True)]
            self._columns["key"] = torch.tensor(keys, device=device)[:, None]
        return self._columns

    # --- membership ---

    def keep(self, index: list[int]) -> None:
        """Only these rows go on."""
        if len(index) != len(self.rows):
            self.cache = self.cache.take(
                torch.tensor(index, dtype=torch.long, device=self.cache.device)
            )
            self.rows = [self.rows[i] for i in index]
            self._columns = {}

    def join(self, other: SampleLane) -> None:
        self.cache = self.cache.join(other.cache)
        self.rows += other.rows
        self._columns = {}

    def open(self) -> list[int]:
        return [i for i, row in enumerate(self.rows) if not row.finish]

    def requests(self) -> list[Request]:
        """Each request once, in the order of its first row."""
        return list({id(row.request): row.request for row in self.rows}.values())


IDLE = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def adjust(logits: Tensor, rows: list[Row], columns: dict[str, Tensor]) -> Tensor:
    """Penalties, bias, bans, the least length and forced tokens."""
    if any(
        name in columns for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    ):
        said, seen = counts(rows, logits)
        if "repetition_penalty" in columns:
            logits = repeat(logits, said + seen, columns["repetition_penalty"])
        if "presence_penalty" in columns:
            logits = logits - columns["presence_penalty"] * (said > 0)
        if "frequency_penalty" in columns:
            logits = logits - columns["frequency_penalty"] * said
    for i, row in enumerate(rows):
        s, n = row.request.settings, len(row.ids)
        if not (s.logit_bias or s.banned or n < s.min_new_tokens or forced(s, n) is not None):
            continue
        logits = logits.clone()
        for token, bias in s.logit_bias:
            logits[i, token] += bias
        ban = [*s.banned, *(s.eos if n < s.min_new_tokens else ())]
        logits[i, ban] = -torch.inf
        must = forced(s, n)
        if must is not None:
            logits[i], logits[i, must] = -torch.inf, 0.0
    return logits


def forced(settings: Any, produced: int) -> int | None:
    """The token that must come now, if any."""
    if produced == 0 and settings.forced_first is not None:
        return settings.forced_first
    return settings.forced_last if produced == settings.max_new_tokens - 1 else None


def counts(rows: list[Row], like: Tensor) -> tuple[Tensor, Tensor]:
    """How often each token was said in the answer and seen in the prompt, (n V) each."""
    said, seen = torch.zeros_like(like), torch.zeros_like(like)
    for i, row in enumerate(rows):
        for into, ids in ((said, row.ids), (seen, row.request.ids)):
            if ids:
                at = torch.tensor(ids, device=like.device)
                into[i].scatter_add_(0, at, torch.ones_like(at, dtype=like.dtype))
    return said, seen


def finish(row: Row, token: int) -> str:
    settings = row.request.settings
    if token in settings.eos:
        return "eos"
    if row.request.stop is not None and row.request.stop(row.sample, row.ids):
        return "stop"
    return "length" if len(row.ids) >= settings.max_new_tokens else ""


def look_up(row: Row, longest: int = 3) -> list[int]:
    """What followed the last few tokens when they last occurred, up to `lookup` tokens."""
    settings = row.request.settings
    room = min(settings.lookup, settings.max_new_tokens - len(row.ids) - 1)
    if room <= 0:
        return []
    text = row.request.ids + row.ids
    for n in range(min(longest, len(text) - 1), 0, -1):
        tail = text[-n:]
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == tail:
                return text[start + n : start + n + room]
    return []
