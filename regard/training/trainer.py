"""The one training loop. Step k reads batch k and draws its random numbers from (seed, k), so that a run which goes on
from any checkpoint comes to the same bits as one that was never stopped.

A loss or gradient that is not finite is noticed before it touches the weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from regard.config import (
    Amount,
    Choice,
    Count,
    Fraction,
    Positive,
    Seed,
    Whole,
    settings,
    to_dict,
)
from regard.data.feed import Feed, Objective, Prefetch, seed_of
from regard.errors import UsageError, nearest
from regard.fast import train as fast
from regard.kernels.c import native
from regard.moe import update_bias
from regard.training.checkpoint import Checkpoints
from regard.training.measure import METRICS, better
from regard.training.objectives import Tally, balanced, mixtures
from regard.training.optim import Optim, Optimizer, Schedule, StepsOrShare, accumulate, clip
from regard.training.parallel import Parallel, SingleProcess, check_norms

POLICIES = ("stop", "skip")
SKIPS = 10  # steps one after the other that are left out at most: more are no bad luck
# settings of `Train` that change no weight: a run may go on with others
FREE = ("steps", "evaluate", "save", "metric", "patience", "nan", "parallel")
# What settings of `Train` were called before -> now; config files and checkpoints may have either.
RENAMED = {"parts": "micro_batches", "recompute": "activation_checkpointing"}
# What could be said before -> what to say now; what changed nothing (train.average = 0) is passed over.
GONE = {
    "average": "the mean of the last checkpoints is no longer tried; say train.average = 0, and train.ema = 0.999 "
    "for a moving mean of the weights",
    "nan": "a run no longer goes back to a checkpoint; say train.nan = skip, which leaves the step out",
}
Callback = Callable[[dict[str, Any]], None]
Figures = tuple[dict[str, float], dict[str, Any]]  # by name; what else to tell
# (model, called between batches, which may raise Stopped) -> figures on held-out data, none where nothing is held out
Measure = Callable[[Any, Callable[[], None]], Figures]


@settings
class Train:
    """How to train. With `epochs` the steps are counted once the data is read."""

    steps: Count = 1000  # optimiser steps
    epochs: Positive | None = None  # passes over the data, instead of steps
    seed: Seed = 42  # of weights, batches, dropout and noise
    micro_batches: Count = 1  # parts that a batch is computed in: less memory
    clip: Positive | None = 1.0  # the largest norm of all gradients together
    precision: Annotated[str, Choice(fast.PRECISIONS)] = "fp32"  # fp32 or bf16
    # blocks are computed again in the backward pass: less memory. true: all, [0, 2]: these
    activation_checkpointing: bool | tuple[Whole, ...] = False
    compile: bool = False  # by torch.compile
    # steps between evaluations; below 1: their share of all steps; 0: at the end alone
    evaluate: StepsOrShare = 0
    save: Whole = 0  # steps between checkpoints; 0: at the end alone
    metric: Annotated[str, Choice(METRICS)] = "loss"  # what the best model is best at
    patience: Count | None = None  # evaluations without a better one after which it ends
    # a moving mean of the weights, such as 0.999, which is evaluated and saved instead of them
    ema: Fraction | None = None
    # weight of the loss that keeps a mixture's experts in balance; see `balanced`
    balance: Amount | None = None
    # weight of the loss of MTP layers; default: 0.3 where a model has them, 0 leaves them as they are
    mtp: Amount | None = None
    bias_speed: Amount = 0.001  # how far the correction bias of a mixture moves in a step
    # loss or gradient not finite: stop, or skip the step; ten in a row stop
    nan: Annotated[str, Choice(POLICIES)] = "stop"
    optim: Optim = field(default_factory=Optim)  # the optimiser
    schedule: Schedule = field(default_factory=Schedule)  # the learning rate over time
    parallel: Parallel = Parallel()  # several processes

    def __post_init__(self) -> None:
        if self.epochs is None:
            self.schedule.over(self.steps)

    def counted(self, epoch: float) -> Train:
        """The same with its steps, where `epoch` of them are one pass over the data."""
        if self.epochs is None:
            return self
        return replace(self, steps=max(math.ceil(self.epochs * epoch), 1), epochs=None)

    def evaluated(self, step: int) -> bool:
        """Whether an evaluation is due after step k = 1, 2, ..."""
        if not 0 < self.evaluate < 1:
            return step >= self.steps or bool(self.evaluate and step % self.evaluate == 0)
        times = round(1 / self.evaluate)
        return step * times // self.steps > (step - 1) * times // self.steps

    @property
    def evaluations(self) -> int:
        """How many there are in all."""
        if not 0 < self.evaluate < 1:
            return 1 + int((self.steps - 1) // self.evaluate if self.evaluate else 0)
        return min(round(1 / self.evaluate), self.steps)

    def rate(self, step: int) -> float:
        """The share of the peak learning rate that step k = 1, 2, ... is taken with."""
        return self.schedule.over(self.steps)(step)


class Stopped(Exception):
    """A stop was asked for in the middle of an evaluation."""


class Diverged(UsageError):
    """A loss or gradient that is not finite, where the policy is to stop; the weights are as before that step. `final`:
    going on with other settings of the same kind would not help."""

    def __init__(self, text: str, final: bool = False):
        super().__init__(text)
        self.final = final


@dataclass
class Progress:
    """Where a run stands; all of it is in every checkpoint."""

    step: int = 0
    best: int | None = None  # the step with the best evaluation
    best_value: float | None = None
    waited: int = 0  # evaluations since
    skipped: list[int] = field(default_factory=list)
    evaluated: int = 0  # the last step that was


class Trainer:
    """Trains `model` in place. `load(path)` gives back a model that `checkpoints.save` wrote. Each
    of `callbacks` is called with every step, evaluation and checkpoint as a dict, in the first
    process. `measure` gives the figures of an evaluation; without it that is the loss. `tally` is what
    the objective tells beside its loss."""

    def __init__(
        self,
        model: Any,
        feed: Feed,
        objective: Objective,
        config: Train,
        checkpoints: Checkpoints,
        load: Callable[[Path], Any],
        callbacks: Sequence[Callback] = (),
        *,
        measure: Measure | None = None,
        team: SingleProcess | None = None,
        tally: Tally | None = None,
    ):
        model = fast.masters(model)
        again = config.activation_checkpointing
        if again or config.micro_batches > 1:
            check_norms(model)
        model = fast.checkpointed(model, again) if again else model
        model = model if config.parallel.mode == "tensor" else fast.joined(model)
        self.model = fast.compiled(model) if config.compile else model
        self.feed, self.config = feed, config
        self.objective = balanced(objective, model, config.balance)
        self.checkpoints, self.load = checkpoints, load
        self.team = team or SingleProcess()
        self.measure = measure or self._loss
        self.tally = tally or Tally()
        self.callbacks = list(callbacks)
        self.device = next(model.parameters()).device
        if self.device.type == "cpu":
            fast.keep_freed()
            fast.native_code(model, config.precision)
        self.inside = self.team.wrap(self.model, config.precision)
        self.optimizer = Optimizer(model, config.optim, config.ema)
        part = Prefetch(feed, self.team.data_rank, self.team.data_size)
        # The same batches; which of both is chosen for speed: a GPU need not wait for data.
        self._batch = part.batch if self.device.type == "cuda" else part.make
        checkpoints.every = config.save or 1
        self.at = Progress()
        self.saved = 0  # the step of the newest checkpoint
        self.changes: dict[str, list[Any]] = {}  # settings since the checkpoint: before, now

    def tell(self, event: dict[str, Any]) -> None:
        for callback in self.callbacks if self.team.rank == 0 else ():
            callback(event)

    def resume(self) -> bool:
        """Go on from the newest sound checkpoint; whether there is one. What decides the bits must be as it was; what
        else changed is told."""
        newest = self.team.once(lambda: str(self.checkpoints.latest() or ""))
        for text in self.checkpoints.broken:
            self.tell({"kind": "warning", "text": f"passed over {text}"})
        if not newest:
            return False
        path = Path(newest)
        state = self.checkpoints.read(path)
        changes = self._changes(path, state)
        self._put(self.load(path).state_dict())
        self.optimizer.load(self.team.read(path, self.optimizer.named))
        # Older versions tried the mean of checkpoints too.
        state["progress"].pop("averaged", None)
        self.at = Progress(**state["progress"])
        self.saved = self.at.step
        # Older versions could take a value that is not a number for the best.
        best = self.at.best_value
        if "train.metric" in changes or (best is not None and math.isnan(best)):
            self.at.best = self.at.best_value = None
            self.at.waited = 0
        if changes and changes != self.changes:
            self.tell({"kind": "settings", "step": self.at.step, "changes": changes})
        self.changes = changes
        return True

    def _changes(self, path: Path, state: dict[str, Any]) -> dict[str, list[Any]]:
        """Settings that are not as in the checkpoint, by name; an error where one of them decides the bits."""
        if state["feed"] != self.feed.fingerprint:
            if state["feed"] != getattr(self.feed, "earlier", None):
                raise UsageError(
                    f"the data changed since {path}; go on with the same, or train into another folder"
                )
            text = f"{path.name} is of an older version, which dealt the same data in another order"
            more = "the pass that it stopped in is not the same, and packed documents begin at position 0 now"
            self.tell({"kind": "warning", "text": f"{text}: {more}"})
        if state["machine"] != (now := machine(self.team)):
            text = f"trained on {state['machine']}, now {now}: the same up to rounding"
            self.tell({"kind": "warning", "text": f"{text}, not to the bit"})
        if "settings" not in state:
            text = f"{path.name} is of an older version and does not say its settings"
            self.tell({"kind": "warning", "text": f"{text}: they are taken to be the same"})
        changes, fixed = changed(state.get("settings") or to_dict(self.config), self.config)
        if fixed:
            raise UsageError(
                f"{differences(fixed)} (since {path}); go on with the same, or train into another folder"
            )
        return changes

    def run(self, asked: Callable[[], bool] = lambda: False) -> str:
        """Train to the end, or until `asked`; why it ended: "done", "patience" or "asked". A stop is obeyed after the
        step that is under way, or between two batches of an evaluation, which is then made when the run goes on."""
        self.model.train()
        why = self._train(asked)
        if self.saved != self.at.step:
            self.save()
        self.model.eval()
        return why

    def _train(self, asked: Callable[[], bool]) -> str:
        c = self.config
        while True:
            step = self.at.step
            due = step and c.evaluated(min(step, c.steps))
            if due and self.at.evaluated != step and not self._evaluate(asked):
                return "asked"
            if self.at.waited >= (c.patience or math.inf):
                return "patience"
            if step >= c.steps:
                return "done"
            self.at.step += 1
            # Older versions went back, and left out what was skipped.
            if self.at.step not in self.at.skipped:
                self._step(self.at.step)
            if self.team.any(asked()):
                return "asked"
            if self.at.step >= c.steps or (c.save and self.at.step % c.save == 0):
                self.save()

    def _step(self, step: int) -> None:
        start = time.perf_counter()
        c, team = self.config, self.team
        torch.manual_seed(seed_of(c.seed, step) + team.data_rank)
        batches = self._batch(step - 1).to(self.device).split(c.micro_batches)
        batches = team.even(batches, c.micro_batches)
        with fast.precision(c.precision, self.device):
            loss, count = accumulate(self.inside, self.objective, batches, team.no_sync)
        loss, count = team.total(loss), team.total(count)
        parameters = list(self.optimizer.named.values())
        norm = clip(parameters, c.clip, count)
        mean = (loss / count.clamp(min=1)).item()
        length = norm.item()
        finite = math.isfinite(mean) and math.isfinite(length)
        more = self.tally.means(team.total)
        if mixtures(self.model):
            update_bias(self.model, c.bias_speed if finite else 0.0, team.total)
        if not finite:
            self.optimizer.zero()
            self._broken(step, mean, length)
            return
        factor = c.rate(step)
        self.optimizer.step(factor)
        self.optimizer.average(step)
        self.optimizer.zero()
        took = time.perf_counter() - start
        figures = {"loss": mean, "norm": length, "lr": factor * c.optim.lr, "tokens": int(count)}
        self.tell({"kind": "step", "step": step, **figures, **more, "seconds": took})

    def _broken(self, step: int, loss: float, norm: float) -> None:
        """By the policy; the weights have not been touched."""
        what = f"step {step}: the loss is {loss}, the gradient's length {norm}"
        self.tell({"kind": "broken", "step": step, "loss": loss, "norm": norm})
        if self.config.nan == "stop":
            raise Diverged(f"{what}; lower the learning rate, or say train.nan = skip")
        if all(step - i in self.at.skipped for i in range(1, SKIPS)):
            why = f"{SKIPS} steps in a row were not finite, the last of them {what}"
            raise Diverged(f"{why}; skipping more would not help", final=True)
        self.at.skipped.append(step)

    def _evaluate(self, asked: Callable[[], bool]) -> bool:
        """Figures of the model as it is; a better one than before is saved. False if a stop was asked for."""
        measured = self._figures(asked)
        if measured is None:
            return False
        figures, more = measured
        self.at.evaluated = self.at.step
        if figures:
            good = self._best(figures)
            self.at.waited = 0 if good else self.at.waited + 1
            event = {"kind": "evaluation", "step": self.at.step, **figures, "best": good}
            self.tell({**event, **more})
            if good:
                self.at.best = self.at.step
                self.at.best_value = figures[self.config.metric]
                if self.saved != self.at.step:
                    self.save()
        self._note()
        return True

    def _note(self) -> None:
        """Have the checkpoint of this step, if there is one, know what was found out since."""
        if self.saved == self.at.step:
            progress = asdict(self.at)
            self.team.once(lambda: self.checkpoints.note(self.at.step, progress))

    def _best(self, figures: dict[str, float]) -> bool:
        metric = self.config.metric
        if metric not in figures:
            raise UsageError(
                f"train.metric = {metric!r} was not measured; {nearest(metric, figures)}"
            )
        best = math.nan if self.at.best_value is None else self.at.best_value
        return better(metric, figures[metric], best)

    # Around the call too: what wraps the model must know that no backward pass follows.
    @torch.no_grad()
    def _figures(self, asked: Callable[[], bool]) -> Figures | None:
        """What is measured on held-out data; None if a stop was asked for."""

        def between() -> None:
            if self.team.stops(asked()):
                raise Stopped

        def measured(model: Any) -> Figures | None:
            try:
                return self.measure(model, between)
            except Stopped:
                return None

        figures = None
        if self.team.evaluates:
            self.model.eval()
            with self.optimizer.averaged():
                figures = self.inside(measured)
            self.model.train()
        return self.team.agree(figures)

    def _loss(self, model: Any, between: Callable[[], None]) -> Figures:
        total, count = 0.0, 0
        for batch in self.feed.evaluation():
            between()
            with fast.precision(self.config.precision, self.device):
                part, n = self.objective(model, batch.to(self.device))
            total += float(part)
            count += int(n)
        return ({"loss": total / count} if count else {}), {}

    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        """Whole weights into the model, however it is shared out."""
        self.model.load_state_dict(self.team.shard(self.model.state_dict(), weights))

    def save(self) -> Path:
        state = {
            "progress": asdict(self.at),
            "best": self.at.best,
            "feed": self.feed.fingerprint,
            "settings": to_dict(self.config),
            "machine": machine(self.team),
        }
        step, files, team = self.at.step, self.checkpoints, self.team
        path = files.path(step)
        with self.optimizer.averaged():
            tensors = self.optimizer.state()
            model = team.full_model(self.model)
            team.once(lambda: files.check(step, model, tensors))
            rest = team.write(tensors, files.shards(step))
            team.once(lambda: str(files.write(step, model, rest, state)))
        self.saved = self.at.step
        self.tell({"kind": "checkpoint", "step": self.at.step, "path": str(path)})
        return path


def changed(
    then: dict[str, Any], config: Train
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Settings that are others now, as {"train.save": [before, now]}: those that may be, and those that decide the
    bits. One that `then` does not have, of an older version, had its default.

    The length of a schedule decides the bits too, unless it follows from `steps`: then it follows the new ones."""
    then = {RENAMED.get(name, name): value for name, value in then.items()}
    old, new = {**flat(to_dict(Train())), **flat(then)}, flat(to_dict(config))
    free = set(FREE)
    if all(table["schedule.steps"] in (None, table["steps"]) for table in (old, new)):
        free.add("schedule.steps")
    for table in (old, new):
        length = table["schedule.steps"] or table["steps"]
        table["schedule.steps"] = length if config.schedule.ends else None
    may: dict[str, list[Any]] = {}
    fixed: dict[str, list[Any]] = {}
    for name in [n for n in new if old[n] != new[n]]:
        side = may if free & {name, name.partition(".")[0]} else fixed
        side[f"train.{name}"] = [old[name], new[name]]
    return may, fixed


def differences(changes: dict[str, list[Any]]) -> str:
    """train.steps was 8, now it is 12; ..."""

    def shown(x: Any) -> str:
        return "not set" if x is None else f"{x!r:.80}"

    each = ((name, *map(shown, pair)) for name, pair in changes.items())
    return "; ".join(f"{name} was {was}, now it is {now}" for name, was, now in each)


def flat(settings: dict[str, Any], where: str = "", parts: bool = False) -> dict[str, Any]:
    """Settings by dotted names. `parts`: a table with a `kind` is a whole part, and stays one."""
    named: dict[str, Any] = {}
    for name, value in settings.items():
        inner = isinstance(value, dict) and not (parts and "kind" in value)
        named |= flat(value, f"{where}{name}.", parts) if inner else {f"{where}{name}": value}
    return named


def machine(team: SingleProcess) -> list[str | int]:
    """What decides the last bit: torch, the processor's instructions, our C code, oneDNN (which torch switches off by
    itself where it lacks a product), threads, the GPU, who shares the work."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    capability = torch.backends.cpu.get_cpu_capability()
    ours = "C code" if native.library() is not None else "no C code"
    theirs = "oneDNN" if torch._C._get_mkldnn_enabled() else "no oneDNN"
    threads, shared = torch.get_num_threads(), f"{team.mode} x {team.world}"
    return [torch.__version__, capability, ours, theirs, threads, gpu, shared]
