"""A run, from a config to its end: the folder it is written to, how it goes on after a stop, what
it tells.

Who wants to know how it goes gives `callbacks`: each is called with every event, a dict whose
"kind" is begin, step, evaluation, samples, average, checkpoint, settings, broken, warning or end.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regard.errors import DATA, ENVIRONMENT, RUN, Fault, UsageError, blaming, notice
from regard.train.build import Assembly, assemble
from regard.train.check import check
from regard.train.checkpoint import clean, locked
from regard.train.config import Config as RunConfig
from regard.train.config import configure, read
from regard.train.log import Launch, Log, RunFile, as_toml, check_same, read_run, replace_file
from regard.train.optim import Schedule
from regard.train.parallel import Lost, team_of
from regard.train.plan import pick_device, refusal
from regard.train.track import tracker
from regard.train.trainer import AVERAGE, Callback, Diverged, Trainer, differences

OURS = {"lock", "run.json"}  # a run's folder has one of these
BEFORE = {"lock", "data", "tokenizer", ".tokenizer", "config.toml"}  # there before the first step
WRITTEN = ("checkpoints", "data")
KEEP = 2  # checkpoints that stay
FILES = ("metrics.jsonl", "samples.jsonl", "run.json", "report.html", "last", "best")


@dataclass(frozen=True)
class RunResult:
    """How a run ended: `status` is "done", "patience" or "asked". `metrics` are those of the last
    evaluation of this call, {} where there was none; `best` is the folder of the best model, `last`
    that of the last checkpoint."""

    folder: Path
    status: str
    step: int
    metrics: dict[str, float]
    last: Path
    best: Path | None = None
    best_step: int | None = None
    best_value: float | None = None


def train(
    config: str | Path | Mapping[str, Any] | RunConfig,
    folder: str | Path | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    smoke: bool = False,
    keep: int | None = None,
    device: str = "auto",
    force: bool = False,
    log_to: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    stop: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Train as `regard train` does. `config` is a TOML file, its tables, a RunConfig, or with
    `resume` a run's folder; `folder` the run's, by default runs/ and the file's name; `changes`
    settings by dotted names: {"train.optim.lr": 3e-4}.

    `resume` goes on from the newest sound checkpoint, `overwrite` starts anew in a folder that has
    a run, `smoke` makes three steps. `keep` checkpoints stay beside the best. `force` starts
    although memory or disk will not do. `stop` is asked after each step; then the run saves and
    ends."""
    if resume and overwrite:
        raise UsageError("resume goes on with a run, overwrite removes it; leave one of them out")
    path, home = _places(config, folder, resume)
    before = read_run(home).get("options", {}) if resume else {}
    launch = Launch(
        home,
        _command(path, folder, changes or {}),
        changes or {},
        resume,
        overwrite,
        force,
        keep=before.get("keep", KEEP) if keep is None else keep,
        device=before.get("device", "auto") if device == "auto" else device,
        log_to=tuple(log_to) or tuple(before.get("log_to", ())),
    )
    with blaming(2):
        settings = _read(path or config, changes)
    with blaming(2, files=DATA):
        check(settings)
    if smoke:
        flat = Schedule("constant")
        short = replace(
            settings.train, steps=3, epochs=None, save=1, evaluate=3, average=0, schedule=flat
        )
        settings = replace(settings, train=short)
    chosen, _ = pick_device(launch.device)
    with ExitStack() as stack:
        team = stack.enter_context(team_of(settings.train.parallel, chosen))
        team.once(lambda: _claim(settings, launch, stack))
        parts = assemble(settings, home, team.device(chosen), launch.keep, team)
        # Now the steps of its epochs are known.
        settings = replace(settings, train=parts.trainer.config)
        return _run(parts, settings, launch, callbacks, stop)


def _places(config: Any, folder: str | Path | None, resume: bool) -> tuple[Path | None, Path]:
    """The config's file, if it is one, and the run's folder. A run goes on with the config that is
    in its folder."""
    if not isinstance(config, str | Path):
        if folder is None:
            raise UsageError('say where the run is written: folder="runs/NAME"')
        return None, Path(folder)
    path = Path(config)
    if not path.is_dir() or not (resume or (path / "run.json").is_file()):
        return path, Path(folder or Path("runs") / path.stem)
    if not resume:
        raise UsageError(f"{path} is the folder of a run; go on with it: {again(path)}")
    if folder is not None:
        raise UsageError(f"{path} is the run to go on with; leave folder (--output-dir) out")
    info = read_run(path)
    if not (path / "config.toml").is_file():
        raise UsageError(f"{path} has nothing to go on with; name a run's folder, or a config file")
    if info and "options" not in info:
        command = shlex.join(map(str, info.get("command", ["regard", "train", "CONFIG"])))
        raise UsageError(
            f"{path} was begun by an older version, whose config.toml lacks what was changed; go on with: "
            f"{command} --resume"
        )
    return path / "config.toml", path


def _read(config: Any, changes: Mapping[str, Any] | None) -> RunConfig:
    if isinstance(config, Path):
        return read(config, changes)
    if isinstance(config, RunConfig):
        if changes:
            raise UsageError(
                "a RunConfig is taken as it is; give its tables as a dict to change some"
            )
        return config
    return configure(config, changes)


def _command(path: Path | None, folder: str | Path | None, changes: Mapping[str, Any]) -> list[str]:
    """What begins this run anew on a command line."""
    if path is None:
        return ["regard", "train", str(Path(folder or "") / "config.toml")]
    words = ["regard", "train", str(path)]
    if folder is not None:
        words += ["--output-dir", str(folder)]
    return [*words, *(word for name, x in changes.items() for word in (f"--{name}", str(x)))]


def again(folder: Path) -> str:
    """What to type to go on with a run, by as many processes as there are here."""
    world = os.environ.get("LOCAL_WORLD_SIZE", "1")
    started = [] if world == "1" else ["torchrun", "--nproc-per-node", world, "-m"]
    return shlex.join([*started, "regard", "train", "--resume", str(folder)])


def _run(
    parts: Assembly,
    config: RunConfig,
    launch: Launch,
    callbacks: Sequence[Callback],
    stop: Callable[[], bool],
) -> RunResult:
    """Run the trainer, and write down how it went."""
    trainer, folder = parts.trainer, launch.folder
    resumed = _resume(trainer, callbacks) if launch.resume else False
    if trainer.team.rank:
        return _result(trainer.run(stop), trainer, folder, {})
    if not launch.force and (why := refusal(config, trainer, trainer.checkpoints.keep)):
        raise Fault(f"{why}; force=True (--force) tries it anyway", ENVIRONMENT)
    record = RunFile(launch, config, trainer, parts.classes)
    listeners: list[Callback] = [*tracker(launch.log_to, folder, record.info), *callbacks]
    replace_file(folder / "config.toml", as_toml(config))
    figures: dict[str, float] = {}

    def note(event: dict[str, Any]) -> None:
        if event["kind"] in ("evaluation", "average"):
            numbers = {n: x for n, x in event.items() if isinstance(x, float)}
            figures.clear()
            figures.update(numbers)

    how = f"{trainer.device.type} {config.train.precision}, seed {config.train.seed}"
    begin = {
        "kind": "begin",
        "steps": config.train.steps,
        "about": f"{trainer.feed.describe()}; {how}, {folder}",
        "notices": parts.notices,
    }
    if launch.resume:
        other = f"; {differences(trainer.changes)}" if trainer.changes else ""
        after = f"going on after step {trainer.at.step}{other}"
        begin["resumed"] = after if resumed else "no checkpoint yet: from the start"
    status = "failed"
    record.write("running")
    try:
        for listener in listeners:
            listener(begin)
        with Log(folder, trainer.at, [note, *listeners]) as log:
            trainer.callbacks, trainer.checkpoints.before = [log], log.sync
            if trainer.changes:
                log({"kind": "settings", "step": trainer.at.step, "changes": trainer.changes})
            status = trainer.run(stop)
    except Diverged as error:
        status = "diverged"
        raise Fault(f"{error}; go on: {again(folder)} --train.nan skip", RUN) from None
    except Lost as error:
        raise Fault(f"{error}: {again(folder)}", RUN) from None
    finally:
        _link(folder, trainer)
        record.write(status)
        for listener in listeners:
            listener({"kind": "end", "step": trainer.at.step, "status": status})
    return _result(status, trainer, folder, figures)


def _result(status: str, trainer: Trainer, folder: Path, metrics: dict[str, float]) -> RunResult:
    at = trainer.at
    best = folder / "best" if at.averaged or at.best is not None else None
    last = trainer.checkpoints.path(at.step)
    return RunResult(folder, status, at.step, metrics, last, best, at.best, at.best_value)


def _resume(trainer: Trainer, callbacks: Sequence[Callback]) -> bool:
    """Resume; whether there is a checkpoint to go on from. If all there are broke, nothing is begun
    over them."""
    trainer.callbacks = list(callbacks)
    resumed = trainer.resume()

    def look() -> None:
        if not resumed and trainer.checkpoints.broken:
            raise Fault(
                f"no checkpoint is sound ({trainer.checkpoints.broken[0]}); put a copy back, or start anew "
                "with --overwrite",
                DATA,
            )

    trainer.team.once(look)
    return resumed


# --- the folder -----------------------------------------------------------------------------------


def _claim(config: RunConfig, launch: Launch, stack: ExitStack) -> None:
    """Make the folder and lock it; only then look at what is in it, and clear what may go. Nothing
    is written to one that has files of others."""
    folder, resume = launch.folder, launch.resume
    nothing = f"{folder} has nothing to go on with; leave resume (--resume) out"
    if folder.is_file():
        raise UsageError(f"{folder} is a file; name a folder (--output-dir FOLDER)")
    if resume and not folder.is_dir():
        raise UsageError(nothing)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir()}
        if names and not names & OURS:
            raise UsageError(
                f"{folder} is not empty, and what is in it is not a run; name another (--output-dir FOLDER)"
            )
        stack.enter_context(locked(folder))
    except OSError as error:
        why = f"cannot write {folder}: {error.strerror}"
        raise Fault(f"{why}; name another (--output-dir FOLDER)", RUN) from None
    full = begun(folder)
    if resume and not full:
        raise UsageError(nothing)
    if full and not resume and not launch.overwrite:
        raise UsageError(
            f"{folder} is not empty; go on (--resume), start anew (--overwrite), or name another (--output-dir)"
        )
    if resume:
        check_same(folder, config)
    else:
        _clear(folder, full)
    clean(folder / "checkpoints")


def begun(folder: Path) -> bool:
    """Whether a run is there that came to its first step."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return any(not name.startswith(".") for name in names - BEFORE)


def _clear(folder: Path, full: bool) -> None:
    """Remove the run, if there is one; and a tokenizer in any case, which other settings may have
    made."""
    shutil.rmtree(folder / ".tokenizer", ignore_errors=True)
    # Whole or not at all.
    with contextlib.suppress(FileNotFoundError):
        (folder / "tokenizer").rename(folder / ".tokenizer")
    if not full:
        return
    for name in WRITTEN:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in FILES:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _link(folder: Path, trainer: Trainer) -> None:
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
            notice(f"{link} is a folder, not a link of ours; remove it, and it will be {step}")
            continue
        new.unlink(missing_ok=True)
        new.symlink_to(Path("checkpoints") / step)
        os.replace(new, link)
