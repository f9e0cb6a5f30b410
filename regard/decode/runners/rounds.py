"""Rounds of a graph: several steps, or passes over guesses, which the host asks for at once and reads later."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.decode.runners.guesses import PLAIN, SKIPPED, Guesses, Plan
from regard.decode.runners.steps import GraphSteps
from regard.decode.sequence import Slot

# Rows of a step, bounds of their texts and of their sources, and what the choices depend on.
Sized = tuple[int, int, int, frozenset[str]]


@dataclass
class Inflight:
    """A round that is on its way to the host."""

    # Tokens, their log probabilities, and where asked for the best ones and theirs; of beams their state.
    copies: list[Tensor]
    arrival: torch.cuda.Event | None
    # Which lines of them are whose, from the first to the last.
    lines: list[tuple[Slot, int, int]]
    plan: Plan = PLAIN  # what it guesses,
    steps: int = 0  # in how many passes; or its steps
    key: Any = None  # under which its time is kept

    def wait(self) -> list[Tensor]:
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.copies


def plan_round(steps: GraphSteps, live: abc.Sequence[Slot], sizes: tuple[int, int, int]) -> Plan:
    """What the next round of these rows guesses, if anything."""
    if not any(s.settings.lookup or s.settings.draft for s in live):
        return PLAIN
    if steps.guesses is None:
        steps.guesses = Guesses(steps)
    guesses: Guesses = steps.guesses
    plan = guesses.plan(live, *sizes[:2])
    # For what a round may say it has pages before it begins: nobody is put back for that.
    each = 1 + plan.passes * (1 + plan.ahead) // steps.pool.page
    return plan if len(live) * each <= steps.pool.available else PLAIN


def start_round(
    steps: GraphSteps, count: int, sizes: Sized, lines: list[tuple[Slot, int, int]], plan: Plan
) -> Inflight:
    """So many steps, or passes over guesses; no round has both."""
    if not plan.ahead:
        known = steps.recorder.has("step", *sizes)
        copies = steps.run(count, *sizes)
        return Inflight(*copies, lines, plan, count, sizes[:2] if known else None)
    guesses: Guesses = steps.guesses
    guesses.prepare([slot for slot, _, _ in lines], plan.drafts)
    lines = [(slot, first, 1 + count * (1 + plan.ahead)) for slot, first, _ in lines]
    known = steps.recorder.has("guess", *sizes, *plan[:2])
    key = (*sizes[:2], *plan[:2]) if known else None
    copies = guesses.run(count, *sizes, *plan[:2])
    return Inflight(*copies, lines, plan, count, key)


def measure_round(
    steps: GraphSteps, done: Inflight, tokens: list[list[int]], slots: abc.Sequence[Slot]
) -> None:
    """What a round has brought, by the tokens of each row. After one with guesses it is known how many each row was
    asked for."""
    if steps.guesses is None:
        return
    guesses: Guesses = steps.guesses
    guesses.measure(done.key, done.steps, done.arrival)
    if not done.plan.ahead:
        for slot in slots:
            if slot.settings.lookup and slot.scheduled and not slot.sequence.finish:
                guesses.watch(slot)
        return
    said = []
    for slot, _, last in done.lines:
        n = sum(token != SKIPPED for token in tokens[slot.index][1:last])
        slot.ran -= last - 1 - n
        slot.scheduled += min(n - done.steps, slot.left)
        said.append(n)
    guesses.landed([slot for slot, _, _ in done.lines], said, done.plan, done.steps)
