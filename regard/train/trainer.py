"""The one training loop. Step k reads batch k and draws its random numbers from (seed, k), so that a run which goes on
from any checkpoint comes to the same bits as one that was never stopped.

A loss or gradient that is not finite is noticed before it touches the weights.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from regard.config import UsageError, nearest
from regard.train.batch import Feed, Objective
from regard.train.keep import Keeper, read
from regard.train.memory import checkpointed, precision
from regard.train.optim import Optim, Optimizer, accumulate, clip, divide
from regard.train.schedule import Schedule

POLICIES = ("stop", "skip", "back")
Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Train:
    """How to train. `evaluate` and `save` are steps between evaluations and checkpoints; 0: at the end alone. `parts`:
    micro-batches of a step. `patience`: evaluations without a better one after which it ends. `nan`: what to do with a
    step whose loss or gradient is not finite: stop, skip it, or go back to the last checkpoint and leave it out."""

    steps: int = 1000
    seed: int = 42
    parts: int = 1
    clip: float | None = 1.0
    precision: str = "fp32"
    recompute: bool = False
    evaluate: int = 0
    save: int = 0
    patience: int | None = None
    nan: str = "stop"
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("parts", 1), ("evaluate", 0), ("save", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"train.{name} = {getattr(self, name)}: give {least} or more")
        if self.nan not in POLICIES:
            raise UsageError(f"train.nan = {self.nan!r} is unknown; {nearest(self.nan, POLICIES)}")


class Diverged(UsageError):
    """A loss or gradient that is not finite, where the policy is to stop; the weights are as before that step."""


@dataclass
class Progress:
    """Where a run stands; all of it is in every checkpoint."""

    step: int = 0
    best: int | None = None  # the step with the best evaluation
    best_loss: float = math.inf
    waited: int = 0  # evaluations since
    skipped: list[int] = field(default_factory=list)


class Trainer:
    """Trains `model` in place. `load(path)` gives back a model that `keeper.save` wrote; `tell` hears of every step,
    evaluation and checkpoint as a dict."""

    def __init__(
        self,
        model: Any,
        feed: Feed,
        objective: Objective,
        config: Train,
        keeper: Keeper,
        load: Callable[[Path], Any],
        tell: Tell = lambda event: None,
    ):
        self.model = checkpointed(model) if config.recompute else model
        self.feed, self.objective, self.config = feed, objective, config
        self.keeper, self.load, self.tell = keeper, load, tell
        self.device = next(model.parameters()).device
        self.optimizer = Optimizer(model, config.optim)
        self.at = Progress()

    def resume(self) -> bool:
        """Go on from the newest sound checkpoint; whether there is one."""
        path = self.keeper.latest()
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
        if state["machine"] != machine():
            text = f"trained on {state['machine']}, now {machine()}: the same up to rounding, not to the bit"
            self.tell({"kind": "warning", "text": text})
        self.model.load_state_dict(self.load(path).state_dict())
        self.optimizer.load(tensors)
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
            if self.at.step not in self.at.skipped:
                self._step(self.at.step)
            step, end = self.at.step, self.at.step == c.steps
            if end or (c.evaluate and step % c.evaluate == 0):
                self._evaluate()
                if self.at.waited >= (c.patience or math.inf):
                    why, end = "patience", True
            if asked() and not end:
                why, end = "asked", True
            if end or (c.save and step % c.save == 0):
                self.save()
            if end:
                break
        self.model.eval()
        return why

    def _step(self, step: int) -> None:
        c, start = self.config, time.perf_counter()
        torch.manual_seed(seed_of(c.seed, step))
        parts = self.feed.batch(step - 1).to(self.device).split(c.parts)
        with precision(c.precision, self.device):
            loss, count = accumulate(self.objective, self.model, parts)
        parameters = list(self.optimizer.named.values())
        divide(parameters, count)
        norm = clip(parameters, c.clip)
        mean, length = (loss / count.clamp(min=1)).item(), norm.item()
        if not (math.isfinite(mean) and math.isfinite(length)):
            self.optimizer.zero()
            return self._broken(step, mean, length)
        factor = c.schedule(step)
        self.optimizer.step(factor)
        self.optimizer.zero()
        took = time.perf_counter() - start
        told = {"loss": mean, "norm": length, "lr": factor * c.optim.lr, "tokens": int(count)}
        self.tell({"kind": "step", "step": step, **told, "seconds": took})

    def _broken(self, step: int, loss: float, norm: float) -> None:
        """By the policy; the weights have not been touched."""
        what = f"step {step}: the loss is {loss}, the gradient's length {norm}"
        self.tell({"kind": "broken", "step": step, "loss": loss, "norm": norm})
        if self.config.nan == "stop":
            raise Diverged(f"{what}; lower the learning rate, or say train.nan = skip or back")
        if self.config.nan == "back":
            skipped = [*self.at.skipped, step]
            if not self.resume():
                raise Diverged(f"{what}, and there is no checkpoint to go back to")
            self.at.skipped = skipped
            return
        self.at.skipped.append(step)

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.model.eval()
        total, count = 0.0, 0
        for batch in self.feed.evaluation():
            with precision(self.config.precision, self.device):
                part, n = self.objective(self.model, batch.to(self.device))
            total, count = total + float(part), count + int(n)
        self.model.train()
        if not count:
            return
        loss = total / count
        better = loss < self.at.best_loss
        if better:
            self.at.best, self.at.best_loss, self.at.waited = self.at.step, loss, 0
        else:
            self.at.waited += 1
        self.tell({"kind": "evaluation", "step": self.at.step, "loss": loss, "best": better})
        if better:
            self.save()

    def save(self) -> Path:
        state = {"progress": asdict(self.at), "best": self.at.best, **self._marks()}
        path = self.keeper.write(self.at.step, self.model, self.optimizer.state(), state)
        self.tell({"kind": "checkpoint", "step": self.at.step, "path": str(path)})
        return path

    def _marks(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {
            "feed": self.feed.fingerprint,
            "config": digest(repr(self.config)),
            "machine": machine(),
        }


def seed_of(seed: int, step: int) -> int:
    """The random numbers of a step: a function of both, and of nothing before."""
    return int(digest(f"{seed}:{step}")[:15], 16)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def machine() -> list[str | int]:
    """What decides the last bit: torch, the processor's instructions, threads, the GPU."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    capability = torch.backends.cpu.get_cpu_capability()
    return [torch.__version__, capability, torch.get_num_threads(), gpu]
