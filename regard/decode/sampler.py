"""The next tokens of samples, chosen on the host from the logits of a step; guesses are checked in the same way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.decode.sampling import (
    MASK,
    RULES,
    TOPS,
    SamplingTensors,
    choose,
    ruled,
    used_by,
)
from regard.decode.sequence import BROKEN, NOTHING, Sequence
from regard.decode.settings import Event
from regard.kernels.c.rows import lse_and_topk


class Sampler:
    """Chooses for these sequences, each by its own settings, until others come or go."""

    def __init__(self, sequences: list[Sequence]):
        self.sequences = sequences
        self._columns: SamplingTensors | None = None

    def choose(self, logits: Tensor, index: list[int] | None = None) -> list[Event]:
        """Choose the next token of every sequence, or of those at `index`, from their logits (n V), and append it. An
        event for each, but for end tokens; a sequence that nothing is left for ends with an error."""
        index = list(range(len(self.sequences))) if index is None else index
        vocab, given = logits.shape[-1], [self.sequences[i] for i in index]
        for i, row in zip(index, given, strict=True):
            if row.request.mask is not None:
                row.write_mask(self.columns(vocab, logits.device).room()[i], vocab)
        on = [k for k, row in enumerate(given) if not row.finish]
        if not on:
            return []
        logits, index = some(logits, on), [index[k] for k in on]
        rows = [given[k] for k in on]
        raw, listed = logits.float(), max(row.request.settings.top_logprobs for row in rows)
        # The same for every row, whatever others ask for.
        lse, top, best = lse_and_topk(raw, max(1, min(listed, vocab)))
        broken = (~lse.isfinite()).tolist()
        # What the choice of these rows depends on now.
        each = (used_by(row.request.settings, len(row.ids), len(row.ids)) for row in rows)
        masked = {MASK} if any(row.request.mask is not None for row in rows) else set()
        used = frozenset().union(*each, masked) - {TOPS}
        if not used:
            tokens, chosen = best[:, 0], top[:, 0] - lse
        else:
            if any(broken):
                raw = raw.masked_fill(~lse.isfinite()[:, None], 0.0)
            tokens = self.pick(raw, rows, index, used)
            chosen = raw.gather(-1, tokens.clamp(min=0)[:, None])[:, 0] - lse
        tops: list[Any] = [[]] * len(rows)
        if listed:
            pairs = zip(best.tolist(), (top - lse[:, None]).tolist(), strict=True)
            tops = [list(zip(*pair, strict=True)) for pair in pairs]
        events = list[Event]()
        for row, token, logprob, best_ones, bad in zip(
            rows, tokens.tolist(), chosen.tolist(), tops, broken, strict=True
        ):
            if bad or token < 0:
                row.finish, row.error = "error", BROKEN if bad else NOTHING
            else:
                events += row.append_token(token, logprob, best_ones)
        return events

    def verify(self, logits: Tensor, lengths: Tensor) -> tuple[Tensor, list[Event]]:
        """Choose along the guesses of each until one fails; logits (n t V). How many of them failed (n), and events."""
        rows, events = self.sequences, list[Event]()
        going, right = list(range(len(rows))), [0] * len(rows)
        for j in range(logits.shape[1]):
            events += self.choose(some(logits[:, j], going), going)
            still = []
            for i in going:
                row = rows[i]
                if not row.finish and j < len(row.guess) and row.ids[-1] == row.guess[j]:
                    right[i] += 1
                    still.append(i)
            going = still
            if not going:
                break
        return lengths - 1 - torch.tensor(right, device=lengths.device), events

    def columns(self, vocab: int, device: torch.device) -> SamplingTensors:
        """Their settings."""
        if self._columns is None:
            self._columns = SamplingTensors(len(self.sequences), vocab, device)
            self._columns.put(range(len(self.sequences)), self.sequences)
        return self._columns

    def pick(
        self, logits: Tensor, rows: list[Sequence], index: list[int], used: frozenset[str]
    ) -> Tensor:
        """Ids (n): the most probable, or drawn from what the row's settings and its mask leave."""
        columns = self.columns(logits.shape[-1], logits.device)
        every = len(index) == columns.rows
        at = slice(None) if every else torch.tensor(index, device=logits.device)
        count = torch.tensor([len(row.ids) for row in rows], device=logits.device)
        given = columns.at(at, used)
        if RULES in used:
            texts = [(row.request, row.ids) for row in rows]
            given[RULES] = ruled(texts, torch.zeros_like(logits))
        tokens = choose(logits, given, count)
        columns.said(at, tokens)
        return tokens


def some(x: Tensor, rows: list[int]) -> Tensor:
    """Rows of x, in order; x itself where they are all."""
    return x if len(rows) == len(x) else x[rows]
