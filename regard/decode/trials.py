"""Who is at fault when a step raises.

If the device's memory was short, fewer rows are tried, until the request that needs too much is alone. If it was
anything else, halves of those that ran are tried apart, until the one at fault is alone; the others go on together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Trials:
    """Who ran in the step that raised, and groups of them that run apart."""

    tried: dict[int, int] = field(default_factory=dict)  # and how far each had come
    # The first of them runs now, until all of it have come further.
    groups: list[dict[int, int]] = field(default_factory=list)

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
