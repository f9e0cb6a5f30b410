"""Steps that raise. A step is all or nothing: after one that raised, everything is as a `Snapshot` found it.

If the device's memory was short, fewer rows are tried, until the request that needs too much is alone. If it was
anything else, halves of those that ran are tried apart, until the one at fault is alone; the others go on together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from regard.decode.sequence import Scores, Sequence
from regard.decode.settings import Request, Result

if TYPE_CHECKING:
    from regard.decode.scheduler import Scheduler


@dataclass
class Trials:
    """Who ran in the step that raised, and groups of them that run apart."""

    tried: dict[int, int] = field(default_factory=dict)  # and how far each had come
    # The first of them runs now, until all of it have come further.
    groups: list[dict[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.groups)

    def admit(self, number: int) -> bool:
        """Whether a request may run now."""
        return not self.groups or number in self.groups[0]

    def split(self, short: bool) -> int | None:
        """After a step that raised: the number of the one that ran alone; or nothing, and, if it was not memory that
        was short, halves of those that ran are tried next."""
        tried = list(self.tried.items())
        self.groups = self.groups[1:]
        if len(tried) == 1:
            return tried[0][0]
        if not short:
            half = len(tried) // 2
            self.groups = [dict(tried[:half]), dict(tried[half:]), *self.groups]
        return None

    def judge(self, progress: dict[int, int], waiting: set[int]) -> bool:
        """Who has come further than where a step raised is not at fault. Whether that is all who are on trial: then it
        is the next group's turn."""
        self.groups[0] = {
            number: mark
            for number, mark in self.groups[0].items()
            if number in waiting or progress.get(number, math.inf) <= mark
        }
        if self.groups[0]:
            return False
        self.groups.pop(0)
        return True


@dataclass
class Snapshot:
    """What a step that raises must leave as it was."""

    first: int  # the number of the next request
    waiting: list[Request]
    resumed: dict[int, list[Sequence]]
    lengths: list[tuple[Sequence, int]]  # how many tokens each had said
    running: dict[int, Request]
    progress: dict[int, int]
    finished: dict[int, dict[int, Result]]
    deadlines: dict[int, float]
    scores: dict[int, Scores]

    @staticmethod
    def of(scheduler: Scheduler) -> Snapshot:
        """Before a step."""
        scheduler.trials.tried = {}
        resumed = dict(scheduler.resumed)
        for slot in scheduler.slots():
            # A search begins anew.
            if slot.settings.beams == 1:
                resumed.setdefault(slot.request.number, []).append(slot.sequence)
        return Snapshot(
            first=scheduler.count,
            waiting=list(scheduler.waiting),
            resumed=resumed,
            lengths=[(each, len(each.ids)) for some in resumed.values() for each in some],
            running={request.number: request for request in scheduler.running()},
            progress=scheduler.progress(),
            finished={number: dict(done) for number, done in scheduler.finished.items()},
            deadlines=dict(scheduler.deadlines),
            scores=dict(scheduler.scores),
        )

    def restore(self, scheduler: Scheduler) -> None:
        """After a step that raised. It may have left pages in any state, so none is trusted: every request is in the
        queue, with what it had said before."""
        scheduler.careful = True
        new = [r for r in scheduler.waiting if r.number >= self.first]
        still = {r.number for r in scheduler.waiting}
        every = (*self.running.values(), *self.waiting)
        ran = [r.number for r in every if r.number not in still]
        scheduler.trials.tried = {number: self.progress.get(number, 0) for number in ran}
        scheduler.batches, scheduler.resumed = {}, self.resumed
        scheduler.finished = self.finished
        scheduler.waiting = sorted([*every, *new], key=lambda request: request.rank)
        scheduler.deadlines.update(self.deadlines)
        scheduler.scores.update(self.scores)
        for each, size in self.lengths:
            each.rollback(size)
