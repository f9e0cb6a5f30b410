"""regard train: joins config, tokenizer, data, model and trainer, and keeps the run's folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from regard.checkpoint import load as load_model
from regard.checkpoint.hf import Origin
from regard.cli import DATA, RUN, Fault
from regard.commands.model import blaming, pick_device
from regard.commands.options_work import TrainRun
from regard.config import UsageError, nearest
from regard.presets import build
from regard.run import generate
from regard.text import Tokenizer, needed
from regard.text.coder import Coder
from regard.text.train_tokenizer import Recipe, train_tokenizer
from regard.train.config import TASKS, Config, read
from regard.train.corrupt import Marks
from regard.train.data import load as load_data
from regard.train.files import DataError
from regard.train.keep import Keeper, locked
from regard.train.read import records
from regard.train.trainer import Diverged, Train, Trainer

CARRIED = ("tokenizer.json", "tokenizer_config.json")
EXITS = {signal.SIGINT: 130, signal.SIGTERM: 143}
BEFORE = {"lock", "data", "tokenizer", "config.toml"}  # what is there before the first step
EVERY = 10.0  # seconds between lines


def say(text: str) -> None:
    """Talk goes to stderr, on a terminal or not: plain lines."""
    print(text, file=sys.stderr, flush=True)


def run(options: TrainRun) -> int:
    path = Path(options.config)
    with blaming(2):
        config = read(path, options.changes)
    if options.smoke:
        few = replace(config.train.schedule, steps=3, warmup=0, decay=0, shape="constant")
        config = replace(
            config, train=replace(config.train, steps=3, save=1, evaluate=3, schedule=few)
        )
    folder = Path(options.output_dir or Path("runs") / path.stem)
    prepare_folder(folder, options)
    with locked(folder), signals() as asked:
        trainer, files = made(config, folder, options)
        resumed = trainer.resume() if options.resume else False
        (folder / "config.toml").write_bytes(path.read_bytes())
        with Log(folder, trainer, options.quiet) as log:
            trainer.tell = log
            how = f"{trainer.device.type} {config.train.precision}, seed {config.train.seed}"
            say(f"{trainer.feed.describe()}; {how}, {folder}")
            if resumed:
                say(f"going on after step {trainer.at.step}")
            try:
                why = trainer.run(lambda: bool(asked))
            except Diverged as error:
                raise Fault(str(error), RUN) from None
        point(folder, trainer)
    if why == "asked":
        say(
            f"stopped after step {trainer.at.step}, saved; go on: regard train {options.config} --resume"
        )
        return EXITS[signal.Signals(asked[0])]
    if options.smoke:
        smoke(folder, files)
    print(folder / "checkpoints" / f"step-{trainer.at.step:08d}")
    return 0


# --- what a config names ------------------------------------------------------------------------------------------


def made(config: Config, folder: Path, options: TrainRun) -> tuple[Trainer, dict[str, bytes]]:
    """The trainer, and the tokenizer's files."""
    reads = TASKS[config.task][0]
    device, _ = pick_device(options.device)
    with blaming(DATA):
        start = load_model(config.model["folder"]) if "folder" in config.model else None
        files = {} if reads == "image" else tokenizer_files(config, start, folder)
        tokenizer = needed(Tokenizer.from_files(files, {})) if files else None
        coder = None if tokenizer is None else Coder(tokenizer)
        try:
            loaded = load_data(reads, config.data, coder, folder / "data", config.train.seed)
        except DataError as error:
            raise Fault(str(error), DATA) from None
    marks = None
    if coder is not None:
        marks = Marks(
            coder.vocab, coder.reserved, coder.mask, (), coder.start, coder.end, coder.pad
        )
    torch.manual_seed(config.train.seed)
    changes = {k: v for k, v in config.model.items() if k not in ("preset", "folder")}
    if start is None:
        if coder is not None:
            changes.setdefault("vocab", coder.vocab)
        if loaded.classes:
            changes.setdefault("labels", len(loaded.classes))
        model = build(config.model["preset"], **changes)
        model.origin = Origin(model.family, config=special(coder), files=files)
    elif changes:
        raise UsageError(f"[model] folder is taken as it is; leave {', '.join(changes)} out")
    else:
        model = start
    keeper = Keeper(folder / "checkpoints", lambda m, path: m.save(path), options.keep)
    feed = config.fed(loaded.feed, marks)
    trainer = Trainer(model.to(device), feed, config.objective, config.train, keeper, load_model)
    return trainer, files


def tokenizer_files(config: Config, start: Any, folder: Path) -> dict[str, bytes]:
    """The tokenizer that is named, the model's own, or one that is learned now and kept in the run's folder."""
    if "folder" in config.tokenizer:
        home = Path(config.tokenizer["folder"])
        return {n: (home / n).read_bytes() for n in CARRIED if (home / n).is_file()}
    if start is not None and "tokenizer.json" in start.origin.files:
        return {n: start.origin.files[n] for n in CARRIED if n in start.origin.files}
    home = folder / "tokenizer"
    if (home / CARRIED[0]).is_file():
        return {n: (home / n).read_bytes() for n in CARRIED}
    task = "lm" if config.task == "prefix" else TASKS[config.task][0]
    task = task if task in ("lm", "seq2seq") else "mlm"
    known = [f.name for f in fields(Recipe)]
    for name in config.tokenizer:
        if name not in known:
            raise UsageError(f"tokenizer.{name} is no setting; {nearest(name, ['folder', *known])}")
    recipe = Recipe(**{"task": task, **config.tokenizer})
    source = config.data.source()
    roles = ("source", "target") if TASKS[config.task][0] == "seq2seq" else ("text",)
    texts = (record[role] for record in records(source, roles) for role in roles)
    files = train_tokenizer(texts, recipe)
    home.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (home / name).write_bytes(content)
    return files


def special(coder: Coder | None) -> dict[str, Any]:
    """Token ids as config.json names them."""
    if coder is None:
        return {}
    found = {"eos_token_id": coder.end, "pad_token_id": coder.pad, "bos_token_id": coder.start}
    found["decoder_start_token_id"] = coder.start
    return {name: value for name, value in found.items() if value is not None}


# --- the folder ---------------------------------------------------------------------------------------------------


def prepare_folder(folder: Path, options: TrainRun) -> None:
    found = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    full = bool(found - BEFORE)
    if full and options.overwrite:
        for name in ("checkpoints", "data", "tokenizer"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    elif full and not options.resume:
        raise UsageError(
            f"{folder} is not empty; go on with --resume, start anew with --overwrite, or name another: --output-dir"
        )
    if options.resume and not full:
        raise UsageError(f"{folder} has nothing to go on with; leave --resume out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Fault(f"cannot write {folder}: {error.strerror}", RUN) from None
    for left in (folder / "checkpoints").glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def point(folder: Path, trainer: Trainer) -> None:
    """The links `last` and `best`."""
    steps = trainer.keeper.steps()
    names = {"last": steps[-1].name} if steps else {}
    if trainer.at.best is not None:
        names["best"] = f"step-{trainer.at.best:08d}"
    for name, step in names.items():
        new = folder / f".{name}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(Path("checkpoints") / step)
        os.replace(new, folder / name)


class Log:
    """metrics.jsonl, and a line now and then. What a run had told after the step it goes on from is cut off."""

    def __init__(self, folder: Path, trainer: Trainer, quiet: bool):
        self.config: Train = trainer.config
        self.quiet, self.last, self.tokens, self.began = (
            quiet,
            time.monotonic(),
            0,
            time.monotonic(),
        )
        path = folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        kept = [line for line in lines if json.loads(line).get("step", 0) <= trainer.at.step]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self.file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __call__(self, event: dict[str, Any]) -> None:
        kind, step = event["kind"], event.get("step")
        if kind == "warning":
            return say(f"note: {event['text']}")
        self.file.write(json.dumps(event) + "\n")
        self.file.flush()
        if kind == "evaluation":
            best = ", the best so far" if event["best"] else ""
            say(
                f"eval  step {step}  loss {event['loss']:.4f}  ppl {math.exp(min(event['loss'], 700)):.2f}{best}"
            )
        elif kind == "broken":
            say(
                f"step {step}: loss {event['loss']}, gradient {event['norm']}: the weights were not touched"
            )
        elif kind == "step":
            self.tokens += event["tokens"]
            now = time.monotonic()
            if not self.quiet and (now - self.last >= EVERY or step == self.config.steps):
                rate = self.tokens / max(now - self.began, 1e-9)
                say(
                    f"step {step}/{self.config.steps}  loss {event['loss']:.4f}  lr {event['lr']:.2e}  "
                    f"grad {event['norm']:.2f}  {rate:,.0f} tok/s"
                )
                self.last = now


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM lets the step end; the second ends at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        say("finishing this step, then saving; again to stop at once")

    old = {number: signal.signal(number, note) for number in EXITS}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def smoke(folder: Path, files: dict[str, bytes]) -> None:
    """Load what was saved and let it say something."""
    model = load_model(folder / "last")
    say("reloaded: " + type(model).__name__)
    if hasattr(model, "cache_specs") and files and not hasattr(model, "encode"):
        with contextlib.suppress(UsageError):
            (result,) = generate(model, [[0]], max_new_tokens=8)
            say(f"sample: {result.text!r}")
    sys.stderr.flush()
