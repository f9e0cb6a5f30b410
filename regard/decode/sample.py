"""Greedy decoding and sampling: a lane of rows that advance together, each by its own settings.

With `lookup` a row also guesses tokens by finding its last ones earlier in the text. The guesses are checked in the
same forward pass, by choosing at each place as always: a guess that equals the choice costs nothing, the first that
does not ends the run. So speculation changes no token, greedy or drawn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.cache import Cache, Paged
from regard.decode.columns import MASK, TOPS, Columns, choose, used_by
from regard.decode.draft import Draft
from regard.decode.rows import BROKEN, NOTHING, Row, page_keys
from regard.decode.settings import Event, Request
from regard.kernels.c.rows import choose as best_of


class SampleLane:
    """Rows of any settings without beams, over one cache."""

    def __init__(self, cache: Cache, rows: list[Row], draft: Draft | None = None):
        self.cache, self.rows, self.draft = cache, list(rows), draft
        if draft is not None:
            draft.join(len(rows))
        self._columns: Columns | None = None

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
        index, vocab = list(range(len(self.rows))) if only is None else only, logits.shape[-1]
        masks = {i: r.allowed(vocab) for i in index if (r := self.rows[i]).request.mask is not None}
        index = [i for i in index if not self.rows[i].finish]
        if not index:
            return []
        rows = [self.rows[i] for i in index]
        if len(index) < len(self.rows):
            logits = logits[torch.tensor(index, device=logits.device)]
        raw, listed = logits.float(), max(row.request.settings.top_logprobs for row in rows)
        # One norm for every row, whatever its company asks for.
        norm, top, best = best_of(raw, max(1, min(listed, vocab)))
        broken = (~norm.isfinite()).tolist()
        used = self.used(rows)
        if not used:
            tokens, chosen = best[:, 0], top[:, 0] - norm
        else:
            if any(broken):
                raw = raw.masked_fill(~norm.isfinite()[:, None], 0.0)
            tokens = self.pick(raw, rows, index, used, masks)
            chosen = raw.gather(-1, tokens.clamp(min=0)[:, None])[:, 0] - norm
        events = []
        tops: list[Any] = [[]] * len(rows)
        if listed:
            pairs = zip(best.tolist(), (top - norm[:, None]).tolist(), strict=True)
            tops = [list(zip(*pair, strict=True)) for pair in pairs]
        for row, token, logprob, best_ones, bad in zip(
            rows, tokens.tolist(), chosen.tolist(), tops, broken, strict=True
        ):
            if bad or token < 0:
                row.finish, row.error = "error", BROKEN if bad else NOTHING
            else:
                events.append(row.say(token, logprob, best_ones))
        return [event for event in events if event is not None]

    def used(self, rows: list[Row]) -> frozenset[str]:
        """What the choice of these rows depends on now."""
        each = (used_by(row.request.settings, len(row.ids), len(row.ids)) for row in rows)
        masked = {MASK} if any(row.request.mask is not None for row in rows) else set()
        return frozenset().union(*each, masked) - {TOPS}

    def pick(
        self,
        logits: Tensor,
        rows: list[Row],
        index: list[int],
        used: frozenset[str],
        masks: dict[int, Tensor | None] | None = None,
    ) -> Tensor:
        """Ids (n): the most probable, or drawn from what the row's settings and its mask leave."""
        if self._columns is None:
            self._columns = Columns(len(self.rows), logits.shape[-1], logits.device)
            self._columns.put(range(len(self.rows)), self.rows)
        words = {i: mask for i, mask in (masks or {}).items() if mask is not None}
        if words:
            self._columns.allow([*words], [*words.values()])
        every = len(index) == len(self.rows)
        at = slice(None) if every else torch.tensor(index, device=logits.device)
        count = torch.tensor([len(row.ids) for row in rows], device=logits.device)
        tokens = choose(logits, self._columns.at(at, used), count)
        self._columns.said(at, tokens)
        return tokens

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
        self._columns = None

    def join(self, other: SampleLane) -> None:
        self.cache = self.cache.join(other.cache)
        if self.draft is not None and other.draft is not None:
            self.draft.cache = self.draft.cache.join(other.draft.cache)
        self.rows += other.rows
        self._columns = None

    def over(self) -> list[int]:
        """The places of rows that are done."""
        return [i for i, row in enumerate(self.rows) if row.finish]

    @property
    def batch(self) -> int:
        return len(self.rows)

    def requests(self) -> list[Request]:
        """Each request once, in the order of its first row."""
        return list({id(row.request): row.request for row in self.rows}.values())
