"""Other people's trackers hear of a run too: TensorBoard, wandb, trackio. Each is imported only if it is asked for.

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
TOLD = ("kind", "step", "best", "signatures")  # of an event, no numbers


def tracker(
    names: Sequence[str], run_folder: str | Path, run_info: Mapping[str, Any]
) -> list[Tracker]:
    """A listener for each name. All packages are looked for before any run is begun in them."""
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"--log-to {name!r:.40} is unknown; {nearest(name, TRACKERS)}")
    modules = {name: _module(name) for name in dict.fromkeys(names)}
    return [_begun(name, module, Path(run_folder), run_info) for name, module in modules.items()]


def _begun(name: str, module: Any, folder: Path, info: Mapping[str, Any]) -> Tracker:
    kind = Board if name == "tensorboard" else Service
    try:
        return kind(name, module, folder, info)
    except Exception as error:  # a missing account, say: better now than in the middle of the run
        raise Fault(f"--log-to {name} cannot begin: {error}", ENVIRONMENT) from None


def _module(name: str) -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError:
        raise Fault(
            f"--log-to {name}: its package is missing; pip install {name}", ENVIRONMENT
        ) from None


class Tracker:
    """Hears events as metrics.jsonl has them, and passes numbers on under train/ and eval/. The event "end", or the end
    of a `with`, closes it."""

    def __init__(self, name: str):
        self.name, self.alive = name, True

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self({"kind": "end"})

    def __call__(self, event: dict[str, Any]) -> None:
        self._guarded(lambda: self._hear(event))

    def _hear(self, event: dict[str, Any]) -> None:
        kind, step = event["kind"], event.get("step", 0)
        if kind in ("step", "evaluation"):
            self.log(numbers(event), step)
        elif kind == "samples":
            self.texts(event["samples"], step)
        elif kind == "end":
            self.alive = False
            self.close()

    def _guarded(self, act: Any) -> None:
        if not self.alive:
            return
        try:
            act()
        # Anything: a service may be away, its disk full, its account closed.
        except Exception as error:
            self.alive = False
            notice(f"{self.name} is told no more: {error}")

    def log(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def texts(self, samples: list[dict[str, Any]], step: int) -> None:
        """Samples; most trackers leave them out."""

    def close(self) -> None:
        raise NotImplementedError


class Board(Tracker):
    """TensorBoard's event files, in the run's folder."""

    def __init__(self, name: str, module: Any, folder: Path, info: Mapping[str, Any]):
        super().__init__(name)
        self.writer = module.SummaryWriter(log_dir=str(folder / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def texts(self, samples: list[dict[str, Any]], step: int) -> None:
        for i, sample in enumerate(samples):
            self.writer.add_text(f"samples/{i}", f"{sample['source']}\n\n{sample['text']}", step)

    def close(self) -> None:
        self.writer.close()


class Service(Tracker):
    """wandb, and trackio, which speaks as wandb does but keeps its own folder."""

    def __init__(self, name: str, module: Any, folder: Path, info: Mapping[str, Any]):
        super().__init__(name)
        self.module = module
        where = {"dir": str(folder)} if name == "wandb" else {}
        config = flat(info.get("config") or {})
        module.init(project="regard", name=info.get("name") or folder.name, config=config, **where)

    def log(self, values: dict[str, float], step: int) -> None:
        self.module.log(values, step=step)

    def close(self) -> None:
        self.module.finish()


def numbers(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step or an evaluation by the names that trackers show; of a step also tokens a second."""
    where = "eval" if event["kind"] == "evaluation" else "train"
    found = {k: v for k, v in event.items() if k not in TOLD and isinstance(v, (int, float))}
    if found.get("seconds"):
        found["tokens_per_second"] = found.get("tokens", 0) / found["seconds"]
    return {f"{where}/{name}": value for name, value in found.items()}
