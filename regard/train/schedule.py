"""The learning rate over time: pure functions of the step, so that resuming needs no state.

Steps count 1, 2, ...; each function gives the factor by which the peak rate is multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from regard.config import Count, Share, Whole, ranged
from regard.errors import UsageError, nearest


def noam(step: int, dim: int, warmup: int) -> float:
    """dim^-0.5 min(step^-0.5, step warmup^-1.5), the rate itself, largest at `warmup` (Vaswani et al. 2017, eq. 3)."""
    return dim**-0.5 * min(step**-0.5, step * warmup**-1.5)


@dataclass(frozen=True)
@ranged
class Schedule:
    """A linear warm-up to 1 over `warmup` steps, then a `shape` over the rest of `steps` (None: all steps of the
    training). The floor is reached after the last step, so that every step, the last one too, changes the weights.

    "noam": sqrt(warmup / step), the shape of 2017 with its peak at 1;  "cosine" and "linear": from 1 to `floor`;
    "wsd": 1, then linearly to `floor` over the last `decay` steps (Hu et al. 2024, arXiv:2404.06395);  "constant": 1.
    """

    shape: str = "cosine"
    steps: Count | None = None
    warmup: Whole = 0
    floor: Share = 0.0
    decay: Whole = 0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UsageError(f"schedule {self.shape!r} is unknown; {nearest(self.shape, SHAPES)}")
        if self.steps is not None and self.warmup > self.steps:
            raise UsageError(
                f"a schedule of {self.steps} steps cannot warm up for {self.warmup}; "
                f"give warmup from 0 to steps"
            )
        if self.shape == "noam" and not self.warmup:
            raise UsageError("the noam schedule falls from its warm-up: give warmup of at least 1")
        room = math.inf if self.steps is None else self.steps - self.warmup
        if (self.shape == "wsd") != (self.decay > 0) or self.decay > room:
            raise UsageError(
                f"schedule.decay is {self.decay}; the wsd schedule, and no other, needs it: "
                f"give 1 to steps - warmup{'' if self.steps is None else f' = {room}'}"
            )

    @property
    def ends(self) -> bool:
        """Whether it depends on its length."""
        return self.shape not in ("noam", "constant")

    def over(self, steps: int) -> Schedule:
        """The schedule of a training of so many steps."""
        return self if self.steps is not None else replace(self, steps=steps)

    def __call__(self, step: int) -> float:
        if step < 1:
            raise UsageError(f"steps count from 1, got {step}")
        if step < self.warmup:
            return step / self.warmup
        return SHAPES[self.shape](self, step)


def _share(s: Schedule, peak: int, step: int) -> float:
    """How far `step` has come from the last step at the peak to the one after the schedule's end, 0 to 1."""
    if s.steps is None:
        raise UsageError(f"the {s.shape} schedule needs its length: give steps")
    return min(max(0.0, (step - peak) / (s.steps + 1 - peak)), 1.0)


def _cosine(s: Schedule, step: int) -> float:
    share = _share(s, max(s.warmup, 1), step)
    return s.floor + (1 - s.floor) * (1 + math.cos(math.pi * share)) / 2


def _linear(s: Schedule, step: int) -> float:
    return 1 - (1 - s.floor) * _share(s, max(s.warmup, 1), step)


def _wsd(s: Schedule, step: int) -> float:
    return 1 - (1 - s.floor) * _share(s, (s.steps or 0) - s.decay, step)


SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "noam": lambda s, step: math.sqrt(s.warmup / step),
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _wsd,
    "constant": lambda s, step: 1.0,
}
