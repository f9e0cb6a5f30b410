"""regard train: a run from a config file, its folder, and how it ends."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.checkpoint import load as load_model
from regard.cli.live import view
from regard.cli.model import blaming, pick_device
from regard.decode.generate import generate
from regard.errors import DATA, ENVIRONMENT, RUN, Fault, UsageError
from regard.train.check import check
from regard.train.checkpoint import clean, locked
from regard.train.config import Config, read
from regard.train.log import Log, RunFile, as_toml, check_same, replace_file, told
from regard.train.optim import Schedule
from regard.train.parallel import Lost, team_of
from regard.train.plan import refusal
from regard.train.run import Built, built
from regard.train.track import tracker
from regard.train.trainer import AVERAGE, Diverged, Trainer, differences

if TYPE_CHECKING:
    from regard.cli.options_work import TrainRun

EXITS = {signal.SIGINT: 130, signal.SIGTERM: 143}
OURS = {"lock", "run.json"}  # a run's folder has one of these
BEFORE = {"lock", "data", "tokenizer", ".tokenizer", "config.toml"}  # there before the first step
WRITTEN = ("checkpoints", "data")
KEEP = 2  # checkpoints that stay
FILES = ("metrics.jsonl", "samples.jsonl", "run.json", "report.html", "last", "best")


def say(text: str) -> None:
    """Talk goes to stderr, on a terminal or not: plain lines."""
    print(text, file=sys.stderr, flush=True)


def run(options: TrainRun) -> int:
    if options.resume and options.overwrite:
        raise UsageError(
            "--resume goes on with a run, --overwrite removes it; leave one of them out"
        )
    path, folder = places(options)
    options = with_defaults(options, folder)
    with blaming(2):
        config = read(path, options.changes)
    with blaming(2, files=DATA):
        check(config)
    if options.smoke:
        config = shortened(config)
    device, _ = pick_device(options.device)
    assert options.keep is not None
    with ExitStack() as stack:
        team = stack.enter_context(team_of(config.train.parallel, device))
        team.once(lambda: claim(folder, config, options, stack))
        asked = stack.enter_context(signals())
        made = built(config, folder, team.device(device), options.keep, team)
        config = replace(config, train=made.trainer.config)  # with the steps of its epochs
        why = train(made, config, folder, options, asked)
    if why == "asked":  # here, or in another process
        return EXITS[signal.Signals(asked[0])] if asked else EXITS[signal.SIGTERM]
    if team.rank == 0:
        if options.smoke:
            smoke(folder, made)
        print(folder / "checkpoints" / f"step-{made.trainer.at.step:08d}")
    return 0


def places(options: TrainRun) -> tuple[Path, Path]:
    """The config's file and the run's folder. A run goes on with the config that is in its folder."""
    path = Path(options.config)
    if not path.is_dir() or not (options.resume or (path / "run.json").is_file()):
        return path, Path(options.output_dir or Path("runs") / path.stem)
    if not options.resume:
        raise UsageError(f"{path} is the folder of a run; go on with it: {again(path)}")
    if options.output_dir is not None:
        raise UsageError(f"{path} is the run to go on with; leave --output-dir out")
    said = told(path)
    if not (path / "config.toml").is_file():
        raise UsageError(f"{path} has nothing to go on with; name a run's folder, or a config file")
    if said and "options" not in said:
        command = shlex.join(map(str, said.get("command", ["regard", "train", "CONFIG"])))
        raise UsageError(
            f"{path} was begun by an older version, whose config.toml lacks what was changed; go on with: "
            f"{command} --resume"
        )
    return path / "config.toml", path


def with_defaults(options: TrainRun, folder: Path) -> TrainRun:
    """What is not said is as in the run that goes on."""
    before = told(folder).get("options", {}) if options.resume else {}
    keep = before.get("keep", KEEP) if options.keep is None else options.keep
    device = before.get("device", "auto") if options.device == "auto" else options.device
    return replace(
        options, keep=keep, device=device, log_to=options.log_to or tuple(before.get("log_to", ()))
    )


def again(folder: Path) -> str:
    """What to type to go on with a run, by as many processes as there are here."""
    world = os.environ.get("LOCAL_WORLD_SIZE", "1")
    started = [] if world == "1" else ["torchrun", "--nproc-per-node", world, "-m"]
    return shlex.join([*started, "regard", "train", "--resume", str(folder)])


def train(made: Built, config: Config, folder: Path, options: TrainRun, asked: list[int]) -> str:
    """Run the trainer, and write down how it went; why it ended."""
    trainer = made.trainer
    resumed = going_on(trainer) if options.resume else False
    if trainer.team.rank:
        return trainer.run(lambda: bool(asked))
    if not options.force and (why := refusal(config, trainer, trainer.checkpoints.keep)):
        raise Fault(f"{why}; --force to try anyway", ENVIRONMENT)
    record = RunFile(folder, config, options, trainer, made.classes)
    listeners: list[Any] = [*tracker(options.log_to, folder, record.said)]
    replace_file(folder / "config.toml", as_toml(config))
    how = f"{trainer.device.type} {config.train.precision}, seed {config.train.seed}"
    say(f"{trainer.feed.describe()}; {how}, {folder}")
    for text in made.notices:
        say(f"note: {text}")
    if options.resume:
        other = f"; {differences(trainer.changes)}" if trainer.changes else ""
        after = f"going on after step {trainer.at.step}{other}"
        say(after if resumed else "no checkpoint yet: from the start")
    status = "failed"
    record.write("running")
    try:
        with (
            view(config.train.steps, options.quiet) as shown,
            Log(folder, trainer.at, [shown, *listeners]) as log,
        ):
            trainer.tell, trainer.checkpoints.before = log, log.sync
            if trainer.changes:
                log({"kind": "settings", "step": trainer.at.step, "changes": trainer.changes})
            status = trainer.run(lambda: bool(asked))
    except Diverged as error:
        status = "diverged"
        raise Fault(f"{error}; go on: {again(folder)} --train.nan skip", RUN) from None
    except Lost as error:
        raise Fault(f"{error}: {again(folder)}", RUN) from None
    finally:
        point(folder, trainer)
        record.write(status)
        for listener in listeners:
            listener({"kind": "end", "status": status})
    if status == "asked":
        say(f"stopped after step {trainer.at.step}, saved; go on: {again(folder)}")
    return status


def going_on(trainer: Trainer) -> bool:
    """Resume; whether there is a checkpoint to go on from. If all there are broke, nothing is begun over them."""
    if trainer.team.rank == 0:
        trainer.tell = lambda event: say(f"warning: {event['text']}") if "text" in event else None
    resumed = trainer.resume()

    def look() -> None:
        if not resumed and trainer.checkpoints.broken:
            raise Fault(
                f"no checkpoint is sound ({trainer.checkpoints.broken[0]}); put a copy back, or start anew with "
                "--overwrite",
                DATA,
            )

    trainer.team.once(look)
    return resumed


def shortened(config: Config) -> Config:
    """Three steps, an evaluation, a save."""
    few = Schedule("constant")
    short = replace(config.train, steps=3, epochs=None, save=1, evaluate=3, average=0, schedule=few)
    return replace(config, train=short)


# --- the folder ---------------------------------------------------------------------------------------------------


def claim(folder: Path, config: Config, options: TrainRun, stack: ExitStack) -> None:
    """Make the folder and lock it; only then look at what is in it, and clear what may go. Nothing is written to one
    that has files of others."""
    nothing = f"{folder} has nothing to go on with; leave --resume out"
    if folder.is_file():
        raise UsageError(f"{folder} is a file; name a folder: --output-dir FOLDER")
    if options.resume and not folder.is_dir():
        raise UsageError(nothing)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir()}
        if names and not names & OURS:
            raise UsageError(
                f"{folder} is not empty, and what is in it is no run; name another: --output-dir FOLDER"
            )
        stack.enter_context(locked(folder))
    except OSError as error:
        why = f"cannot write {folder}: {error.strerror}"
        raise Fault(f"{why}; name another: --output-dir FOLDER", RUN) from None
    full = begun(folder)
    if options.resume and not full:
        raise UsageError(nothing)
    if full and not options.resume and not options.overwrite:
        raise UsageError(
            f"{folder} is not empty; go on with --resume, start anew with --overwrite, or name another: --output-dir"
        )
    if options.resume:
        check_same(folder, config)
    else:
        clear(folder, full)
    clean(folder / "checkpoints")


def begun(folder: Path) -> bool:
    """Whether a run is there that came to its first step."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return any(not name.startswith(".") for name in names - BEFORE)


def clear(folder: Path, full: bool) -> None:
    """Remove the run, if there is one; and a tokenizer in any case, which other settings may have made."""
    shutil.rmtree(folder / ".tokenizer", ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):  # whole or not at all
        (folder / "tokenizer").rename(folder / ".tokenizer")
    if full:
        for name in WRITTEN:
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in FILES:
            remove(folder / name)


def remove(path: Path) -> None:
    """A file, a link, or a folder where one of ours should be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def point(folder: Path, trainer: Trainer) -> None:
    """The links `last` and `best`."""
    steps = trainer.checkpoints.steps()
    names = {"last": steps[-1].name} if steps else {}
    if trainer.at.averaged:
        names["best"] = AVERAGE
    elif trainer.at.best is not None:
        names["best"] = f"step-{trainer.at.best:08d}"
    for name, step in names.items():
        link, new = folder / name, folder / f".{name}.new"
        if link.is_dir() and not link.is_symlink():
            say(f"note: {link} is a folder, not a link of ours; remove it, and it will be {step}")
            continue
        new.unlink(missing_ok=True)
        new.symlink_to(Path("checkpoints") / step)
        os.replace(new, link)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM lets the step end; the second ends at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        with contextlib.suppress(OSError):  # not by print, which may be what was interrupted
            os.write(2, b"finishing this step, then saving; again to stop at once\n")

    old = {number: signal.signal(number, note) for number in EXITS}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def smoke(folder: Path, made: Built) -> None:
    """Load what was saved and let it say something."""
    model = load_model(folder / "last")
    say("reloaded: " + type(model).__name__)
    if hasattr(model, "cache_specs") and made.files and not hasattr(model, "encode"):
        with contextlib.suppress(UsageError):
            (result,) = generate(model, [[0]], max_new_tokens=8)
            say(f"sample: {result.text!r}")
    sys.stderr.flush()
