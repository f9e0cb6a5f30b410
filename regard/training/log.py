"""What hears a run: metrics.jsonl and samples.jsonl in its folder, and other people's trackers
(TensorBoard, wandb, trackio), each imported only if it is asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from regard.data.read import needed
from regard.errors import ENVIRONMENT, Fault, UsageError, nearest, notice
from regard.files import naming, write_whole
from regard.training.trainer import Callback, Progress, flat

UNWRITTEN = ("warning", "checkpoint")  # of what is told: it depends on where a run was stopped
TRACKERS = ("tensorboard", "wandb", "trackio")
WORDS = ("kind", "step", "best", "signatures")  # of an event, no numbers


class Log(AbstractContextManager["Log"]):
    """Hears what the trainer tells and writes it down; `listeners` hear it too. What a run had written after the step
    it goes on from is cut off: however often it was stopped or killed, the files are those of a run that never was."""

    def __init__(self, folder: Path, at: Progress, listeners: Sequence[Callback]):
        self.listeners = listeners
        # Files without what came after the progress `at`; a line that was cut off by a kill goes too.
        self.files: list[Any] = []
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = folder / name
            lines = path.read_text("utf-8", "replace").split("\n") if path.is_file() else []
            true = [x for x in lines if (event := parse(x)) and holds(event, at)]
            write_whole(path, "".join(f"{line}\n" for line in true))
            self.files.append(path.open("a", encoding="utf-8"))

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            with naming(Path(file.name)):
                file.close()

    def __call__(self, event: dict[str, Any]) -> None:
        samples = event.pop("samples", [])
        if event["kind"] not in UNWRITTEN:
            self._put(self.files[0], event)
        for sample in samples:
            self._put(self.files[1], {"step": event["step"], "kind": event["kind"], **sample})
        for listener in self.listeners:
            listener(event)
            if samples:
                listener({"kind": "samples", "step": event["step"], "samples": samples})

    def sync(self) -> None:
        """Have all lines on the disk: a checkpoint must not know of steps that the files lost with the power."""
        for file in self.files:
            os.fsync(file.fileno())

    def _put(self, file: Any, event: dict[str, Any]) -> None:
        with naming(Path(file.name)):
            file.write(json.dumps(event, ensure_ascii=False) + "\n")
            file.flush()


def holds(event: dict[str, Any], at: Progress) -> bool:
    """Whether a line is still true of a run that stands there. Changed settings and an evaluation are told after the
    checkpoint of their step: they come again if it does not know of them."""
    step, kind = event.get("step", 0), event.get("kind", "evaluation")
    if kind == "broken" and step in at.skipped:
        return True
    if step != at.step:
        return bool(step < at.step)
    if kind == "evaluation":
        return at.evaluated == step
    return bool(kind != "settings")


def parse(text: str) -> dict[str, Any] | None:
    """A JSON object; None if it is none."""
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


# --- trackers -------------------------------------------------------------------------------------


def tracker(names: Sequence[str], folder: str | Path, info: Mapping[str, Any]) -> list[Tracker]:
    """A listener for each name; `info` is what run.json says. All packages are looked for before
    any run is begun in them."""
    modules = {}
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"--log-to {name!r:.40} is unknown; {nearest(name, TRACKERS)}")
        place = "torch.utils.tensorboard" if name == "tensorboard" else name
        modules[name] = needed(place, f"--log-to {name}", name)
    return [Tracker(name, module, Path(folder), info) for name, module in modules.items()]


class Tracker:
    """Hears events as metrics.jsonl has them, and passes numbers on under train/ and eval/; the
    event "end" closes it. One that fails while the run goes on is left out from then on: it must
    not cost the run. trackio speaks as wandb does, but keeps its own folder."""

    def __init__(self, name: str, module: Any, folder: Path, info: Mapping[str, Any]):
        self.name, self.module, self.alive, self.board = name, module, True, None
        # A missing account, say: better now than in the middle of the run.
        try:
            if name == "tensorboard":
                self.board = module.SummaryWriter(log_dir=str(folder / "tensorboard"))
                return
            # A run that goes on is the same one there: by the id of run.json, or by its name.
            where: dict[str, Any] = {"resume": "allow" if info.get("resumed") else "never"}
            if name == "wandb":
                where = {"dir": str(folder), "id": info.get("wandb"), "resume": "allow"}
            config, title = flat(info.get("config") or {}), info.get("name") or folder.name
            module.init(project="regard", name=title, config=config, **where)
        except Exception as error:
            raise Fault(f"--log-to {name} cannot begin: {error}", ENVIRONMENT) from None

    def __call__(self, event: dict[str, Any]) -> None:
        # Anything may go wrong: a service may be away, its disk full, its account closed.
        try:
            if self.alive:
                self._pass_on(event, event["kind"], event.get("step", 0))
        except Exception as error:
            self.alive = False
            notice(f"{self.name} is told no more: {error}")

    def _pass_on(self, event: dict[str, Any], kind: str, step: int) -> None:
        board: Any = self.board
        if kind in ("step", "evaluation"):
            values = numbers(event)
            for name, value in values.items() if board else ():
                board.add_scalar(name, value, step)
            if not board:
                self.module.log(values, step=step)
        elif kind == "samples" and board:
            for i, sample in enumerate(event["samples"]):
                board.add_text(f"samples/{i}", f"{sample['source']}\n\n{sample['text']}", step)
        elif kind == "end":
            self.alive = False
            board.close() if board else self.module.finish()


def numbers(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step or an evaluation by the names that trackers show; of a step also tokens
    a second."""
    where = "eval" if event["kind"] == "evaluation" else "train"
    figures = {k: v for k, v in event.items() if k not in WORDS and isinstance(v, (int, float))}
    if figures.get("seconds"):
        figures["tokens_per_second"] = figures.get("tokens", 0) / figures["seconds"]
    return {f"{where}/{name}": value for name, value in figures.items()}
