"""Other people's trackers hear of a run too: TensorBoard, wandb, trackio. Each is imported only if
it is asked for.

A tracker that fails while the run goes on is left out from then on: it must not cost the run.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.errors import ENVIRONMENT, Fault, UsageError, nearest, notice
from regard.train.trainer import flat

TRACKERS = ("tensorboard", "wandb", "trackio")
WORDS = ("kind", "step", "best", "signatures")  # of an event, no numbers


def tracker(names: Sequence[str], folder: str | Path, info: Mapping[str, Any]) -> list[Tracker]:
    """A listener for each name; `info` is what run.json says. All packages are looked for before
    any run is begun in them."""
    modules = {}
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"--log-to {name!r:.40} is unknown; {nearest(name, TRACKERS)}")
        try:
            place = "torch.utils.tensorboard" if name == "tensorboard" else name
            modules[name] = importlib.import_module(place)
        except ImportError:
            raise Fault(
                f"--log-to {name}: its package is missing; pip install {name}", ENVIRONMENT
            ) from None
    return [_begin(name, module, Path(folder), info) for name, module in modules.items()]


def _begin(name: str, module: Any, folder: Path, info: Mapping[str, Any]) -> Tracker:
    # A missing account, say: better now than in the middle of the run.
    try:
        return (Board if name == "tensorboard" else Tracker)(name, module, folder, info)
    except Exception as error:
        raise Fault(f"--log-to {name} cannot begin: {error}", ENVIRONMENT) from None


class Tracker:
    """wandb, and trackio, which speaks as wandb does but keeps its own folder. Hears events as
    metrics.jsonl has them, and passes numbers on under train/ and eval/; the event "end" closes
    it."""

    def __init__(self, name: str, module: Any, folder: Path, info: Mapping[str, Any]):
        self.name, self.module, self.alive = name, module, True
        self.begin(folder, info)

    def __call__(self, event: dict[str, Any]) -> None:
        if not self.alive:
            return
        kind, step = event["kind"], event.get("step", 0)
        # Anything may go wrong: a service may be away, its disk full, its account closed.
        try:
            if kind in ("step", "evaluation"):
                self.log(numbers(event), step)
            elif kind == "samples":
                self.texts(event["samples"], step)
            elif kind == "end":
                self.alive = False
                self.close()
        except Exception as error:
            self.alive = False
            notice(f"{self.name} is told no more: {error}")

    def begin(self, folder: Path, info: Mapping[str, Any]) -> None:
        where = {"dir": str(folder)} if self.name == "wandb" else {}
        config, name = flat(info.get("config") or {}), info.get("name") or folder.name
        self.module.init(project="regard", name=name, config=config, **where)

    def log(self, values: dict[str, float], step: int) -> None:
        self.module.log(values, step=step)

    def texts(self, samples: list[dict[str, Any]], step: int) -> None:
        """Samples; most trackers leave them out."""

    def close(self) -> None:
        self.module.finish()


class Board(Tracker):
    """TensorBoard's event files, in the run's folder."""

    def begin(self, folder: Path, info: Mapping[str, Any]) -> None:
        self.writer = self.module.SummaryWriter(log_dir=str(folder / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def texts(self, samples: list[dict[str, Any]], step: int) -> None:
        for i, sample in enumerate(samples):
            self.writer.add_text(f"samples/{i}", f"{sample['source']}\n\n{sample['text']}", step)

    def close(self) -> None:
        self.writer.close()


def numbers(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step or an evaluation by the names that trackers show; of a step also tokens
    a second."""
    where = "eval" if event["kind"] == "evaluation" else "train"
    figures = {k: v for k, v in event.items() if k not in WORDS and isinstance(v, (int, float))}
    if figures.get("seconds"):
        figures["tokens_per_second"] = figures.get("tokens", 0) / figures["seconds"]
    return {f"{where}/{name}": value for name, value in figures.items()}
