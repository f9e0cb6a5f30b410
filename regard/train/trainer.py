"""The one training loop. Step k reads batch k and draws its random numbers from (seed, k), so that a run which goes on
from any checkpoint comes to the same bits as one that was never stopped.

A loss or gradient that is not finite is noticed before it touches the weights.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from regard.config import UsageError, nearest
from regard.kernels import native
from regard.train.batch import Ahead, Feed, Objective
from regard.train.evaluate import METRICS, better
from regard.train.keep import Keeper, read
from regard.train.memory import (
    checkpointed,
    compiled,
    joined,
    keep_freed,
    native_code,
    precision,
)
from regard.train.optim import Optim, Optimizer, accumulate, average, clip
from regard.train.parallel import Alone, Parallel
from regard.train.schedule import Schedule

AVERAGE = "average"  # the folder of the checkpoints' mean
POLICIES = ("stop", "skip", "back")
Tell = Callable[[dict[str, Any]], None]
Measure = Callable[
    [Any], tuple[dict[str, float], dict[str, Any]]
]  # model -> figures by name, what else to tell


@dataclass(frozen=True)
class Train:
    """How to train. `evaluate` and `save` are steps between evaluations and checkpoints; 0: at the end alone. `parts`:
    micro-batches of a step. `metric`: what the best model is best at; `patience`: evaluations without a better one
    after which it ends. `average`: the mean of this many last checkpoints is tried at the end, and kept if it is the
    best. `nan`: what to do with a step whose loss or gradient is not finite: stop, skip it, or go back to the last
    checkpoint and leave it out."""

    steps: int = 1000
    seed: int = 42
    parts: int = 1
    clip: float | None = 1.0
    precision: str = "fp32"
    recompute: bool = False
    compile: bool = False
    evaluate: int = 0
    save: int = 0
    metric: str = "loss"
    patience: int | None = None
    average: int = 0
    nan: str = "stop"
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    parallel: Parallel = Parallel()

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1),
            ("parts", 1),
            ("evaluate", 0),
            ("save", 0),
            ("average", 0),
        ):
            if getattr(self, name) < least:
                raise UsageError(f"train.{name} = {getattr(self, name)}: give {least} or more")
        if self.metric not in METRICS:
            raise UsageError(
                f"train.metric = {self.metric!r} is unknown; {nearest(self.metric, METRICS)}"
            )
        if self.nan not in POLICIES:
            raise UsageError(f"train.nan = {self.nan!r} is unknown; {nearest(self.nan, POLICIES)}")
        self.schedule.over(self.steps)

    def rate(self, step: int) -> float:
        """The share of the peak learning rate that step k = 1, 2, ... is taken with."""
        return self.schedule.over(self.steps)(step)


class Diverged(UsageError):
    """A loss or gradient that is not finite, where the policy is to stop; the weights are as before that step."""


@dataclass
class Progress:
    """Where a run stands; all of it is in every checkpoint."""

    step: int = 0
    best: int | None = None  # the step with the best evaluation
    best_value: float | None = None
    waited: int = 0  # evaluations since
    skipped: list[int] = field(default_factory=list)


class Trainer:
    """Trains `model` in place. `load(path)` gives back a model that `keeper.save` wrote; `tell` hears of every step,
    evaluation and checkpoint as a dict. `measure` gives figures beside the loss at each evaluation."""

    def __init__(
        self,
        model: Any,
        feed: Feed,
        objective: Objective,
        config: Train,
        keeper: Keeper,
        load: Callable[[Path], Any],
        tell: Tell = lambda event: None,
        *,
        measure: Measure | None = None,
        team: Alone | None = None,
    ):
        model = checkpointed(model) if config.recompute else model
        model = model if config.parallel.mode == "tensor" else joined(model)
        self.model = compiled(model) if config.compile else model
        self.feed, self.objective, self.config = feed, objective, config
        self.keeper, self.load, self.measure, self.team = keeper, load, measure, team or Alone()
        self.tell = tell if self.team.rank == 0 else lambda event: None
        self.device = next(model.parameters()).device
        if self.device.type == "cpu":
            keep_freed()
            native_code(model, config.precision)
        self.inside = self.team.wrap(self.model)
        self.optimizer = Optimizer(model, config.optim)
        ahead = Ahead(feed, self.team.share, self.team.shares)  # a GPU need not wait for data
        alone = partial(feed.batch, rank=self.team.share, world=self.team.shares)
        self._batch = ahead.batch if self.device.type == "cuda" else alone
        keeper.keep = max(keeper.keep, config.average)
        self.at = Progress()
        self.averaged = False  # whether the mean of the last checkpoints is the best

    def resume(self) -> bool:
        """Go on from the newest sound checkpoint; whether there is one."""
        found = self.team.once(lambda: str(self.keeper.latest() or ""))
        path = Path(found) if found else None
        for text in self.keeper.broken:
            self.tell({"kind": "warning", "text": f"passed over {text}"})
        if path is None:
            return False
        tensors, state = read(path)
        for name, what in (("feed", "the data"), ("config", "the settings of training")):
            if state[name] != self._marks()[name]:
                raise UsageError(
                    f"{what} changed since {path}; go on with the same, or train into another folder"
                )
        now = self._marks()["machine"]
        if state["machine"] != now:
            text = (
                f"trained on {state['machine']}, now {now}: the same up to rounding, not to the bit"
            )
            self.tell({"kind": "warning", "text": text})
        self._put(self.load(path).state_dict())
        self.optimizer.load(self.team.part(self.optimizer.named, tensors))
        self.at = Progress(**state["progress"])
        return True

    def run(self, asked: Callable[[], bool] = lambda: False) -> str:
        """Train to the end, or until `asked`; why it ended: "done", "patience" or "asked"."""
        self.model.train()
        c, why = self.config, "done"
        if self.at.waited >= (c.patience or math.inf):
            return "patience"
        while self.at.step < c.steps:
            self.at.step += 1
            if self.at.step not in self.at.skipped and not self._step(self.at.step):
                continue
            step, end = self.at.step, self.at.step == c.steps
            if end or (c.evaluate and step % c.evaluate == 0):
                self._evaluate()
                if self.at.waited >= (c.patience or math.inf):
                    why, end = "patience", True
            if self.team.any(asked()) and not end:
                why, end = "asked", True
            if end or (c.save and step % c.save == 0):
                self.save()
            if end:
                break
        if c.average and why != "asked":
            self._average()
        self.model.eval()
        return why

    def _step(self, step: int) -> bool:
        """Take the step; False if the run went back instead."""
        c, team, start = self.config, self.team, time.perf_counter()
        torch.manual_seed(seed_of(c.seed, step) + team.share)
        parts = team.even(self._batch(step - 1).to(self.device).split(c.parts), c.parts)
        with precision(c.precision, self.device):
            loss, count = accumulate(self.inside, self.objective, parts, team.hold)
        loss, count = team.total(loss), team.total(count)
        parameters = list(self.optimizer.named.values())
        norm = clip(parameters, c.clip, count)
        mean, length, tokens = (loss / count.clamp(min=1)).item(), norm.item(), int(count)
        if not (math.isfinite(mean) and math.isfinite(length)):
            self.optimizer.zero()
            return self._broken(step, mean, length)
        factor = c.rate(step)
        self.optimizer.step(factor)
        self.optimizer.zero()
        took = time.perf_counter() - start
        told = {"loss": mean, "norm": length, "lr": factor * c.optim.lr, "tokens": tokens}
        self.tell({"kind": "step", "step": step, **told, "seconds": took})
        return True

    def _broken(self, step: int, loss: float, norm: float) -> bool:
        """By the policy; the weights have not been touched. False if the run went back."""
        what = f"step {step}: the loss is {loss}, the gradient's length {norm}"
        self.tell({"kind": "broken", "step": step, "loss": loss, "norm": norm})
        if self.config.nan == "stop":
            raise Diverged(f"{what}; lower the learning rate, or say train.nan = skip or back")
        if self.config.nan == "back":
            skipped = [*self.at.skipped, step]
            if not self.resume():
                raise Diverged(f"{what}, and there is no checkpoint to go back to")
            self.at.skipped = skipped
            return False
        self.at.skipped.append(step)
        return True

    def _evaluate(self) -> None:
        """Figures of the model as it is; a better one than before is saved."""
        found = self._figures()
        if found is None:
            return
        figures, more = found
        good = self._best(figures)
        self.at.waited = 0 if good else self.at.waited + 1
        told = {"kind": "evaluation", "step": self.at.step, **figures, "best": good, **more}
        self.tell(told)
        if good:
            self.at.best, self.at.best_value = self.at.step, figures[self.config.metric]
            self.save()

    def _best(self, figures: dict[str, float]) -> bool:
        metric = self.config.metric
        if metric not in figures:
            raise UsageError(
                f"train.metric = {metric!r} was not measured; {nearest(metric, figures)}"
            )
        return self.at.best_value is None or better(metric, figures[metric], self.at.best_value)

    @torch.no_grad()
    def _figures(self) -> tuple[dict[str, float], dict[str, Any]] | None:
        """The loss on held-out data and what `measure` adds; nothing where none is held out."""
        if not self.team.evaluates:
            return self.team.agree(None)
        self.model.eval()
        total, count = 0.0, 0
        for batch in self.feed.evaluation():
            with precision(self.config.precision, self.device):
                part, n = self.inside(self.objective, batch.to(self.device))
            total, count = total + float(part), count + int(n)
        found = None
        if count:
            figures, more = {"loss": total / count}, {}
            if self.measure is not None:
                others, more = self.inside(self.measure)
                figures |= others
            found = figures, more
        self.model.train()
        return self.team.agree(found)

    def _average(self) -> None:
        """Try the mean of the last checkpoints."""
        paths = self.keeper.steps()[-self.config.average :]
        mine = {n: x.clone() for n, x in self.model.state_dict().items()}
        self._put(average(self.load(path).state_dict() for path in paths))
        found = self._figures()
        figures, more = found or ({}, {})
        good = found is None or self._best(figures)
        told = {"kind": "average", "step": self.at.step, "of": len(paths), **figures, "best": good}
        self.tell({**told, **more})
        self.averaged = good
        if good:
            model, path = self.team.plain(self.model), self.keeper.folder / AVERAGE
            self.team.once(lambda: self.keeper.save(model, path) and None)
        self.model.load_state_dict(mine)

    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        """Whole weights into the model, however it is shared out."""
        self.model.load_state_dict(self.team.part(self.model.state_dict(), weights))

    def save(self) -> Path:
        state = {"progress": asdict(self.at), "best": self.at.best, **self._marks()}
        tensors, model = self.team.whole(self.optimizer.state()), self.team.plain(self.model)
        path = self.keeper.path(self.at.step)
        self.team.once(lambda: str(self.keeper.write(self.at.step, model, tensors, state)))
        self.tell({"kind": "checkpoint", "step": self.at.step, "path": str(path)})
        return path

    def _marks(self) -> dict[str, Any]:
        """What must be the same for a run to go on; to the same bits, the machine and the team as well."""
        return {
            "feed": self.feed.fingerprint,
            "config": digest(repr(replace(self.config, parallel=Parallel()))),
            "machine": [*machine(), f"{self.team.mode} x {self.team.world}"],
        }


def seed_of(seed: int, step: int) -> int:
    """The random numbers of a step: a function of both, and of nothing before."""
    return int(digest(f"{seed}:{step}")[:15], 16)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def machine() -> list[str | int]:
    """What decides the last bit: torch, the processor's instructions, our C code, threads, the GPU."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    capability = torch.backends.cpu.get_cpu_capability()
    ours = "C code" if native.library() is not None else "no C code"
    return [torch.__version__, capability, ours, torch.get_num_threads(), gpu]
