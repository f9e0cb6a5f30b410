"""A run, from a config to its end: the folder it is written to, how it goes on after a stop, what
it tells.

Who wants to know how it goes gives `callbacks`: each is called with every event, a dict whose
"kind" is begin, step, evaluation, samples, checkpoint, settings, broken, warning or end.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from regard.config import to_dict
from regard.data.config import Data
from regard.errors import DATA, ENVIRONMENT, RUN, VERSION, Fault, UsageError, blaming, notice
from regard.files import write_over, write_whole
from regard.machine import pick_device
from regard.training.build import assemble
from regard.training.checkpoint import clean, locked
from regard.training.config import Config as RunConfig
from regard.training.config import as_toml, check, configure, read, rooted
from regard.training.log import Log, parse, tracker
from regard.training.optim import Schedule
from regard.training.parallel import Lost, team_of
from regard.training.plan import refusal
from regard.training.trainer import Callback, Diverged, Trainer, differences, flat

OURS = {"lock", "run.json"}  # a run's folder has one of these
BEFORE = {"lock", "data", "tokenizer", ".tokenizer", "config.toml"}  # there before the first step
KEEP = 2  # checkpoints that stay
ROOM = 400  # bytes that run.json may grow by
WRITTEN = ("checkpoints", "data", "metrics.jsonl", "samples.jsonl", "run.json", "report.html")
# What a run goes on with, of run.json and of its options, with their types.
OPTIONS = {"keep": int, "device": str, "log_to": list}
INFO: dict[str, Any] = {"config": dict, "options": dict, "resumed": list, "command": list}
INFO |= {"began": str, "wandb": str, "status": str, "seconds": (int, float)}
# Where files lie, which may change.
PLACES = {"model.folder", "tokenizer.folder"}
PLACES |= {f"data.{name}" for name in ("train", "target", "valid", "valid_target")}


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
    """Train as `regard train` does, and give back how it ended.

    `config` is a TOML file, its tables, a RunConfig, or with `resume` a run's folder. `folder` is the run's, by default
    runs/ and the file's name. `changes` are settings by dotted names: {"train.optim.lr": 3e-4}.

    `resume` goes on from the newest sound checkpoint, `overwrite` starts anew in a folder that has a run, `smoke` makes
    three steps, in runs/NAME-smoke unless `folder` is said. `keep` checkpoints stay beside the best. `device` is auto,
    cpu, cuda or cuda:N; `log_to` names trackers. `force` starts although memory or disk will not do. Each of
    `callbacks` is called with every event. `stop` is asked after each step; if it says so, the run saves and ends."""
    if resume and overwrite:
        raise UsageError("resume goes on with a run, overwrite removes it; leave one of them out")
    path, home = _places(config, folder, resume)
    # A try must not stand in the way of the run itself, nor of the next try.
    if smoke and folder is None and not resume:
        home = home.with_name(f"{home.name}-smoke")
        overwrite = True
    # Options that are not said are as in the run that goes on.
    before = read_run(home).get("options", {}) if resume else {}
    options: dict[str, Any] = {
        "keep": before.get("keep", KEEP) if keep is None else keep,
        "device": before.get("device", "auto") if device == "auto" else device,
        "log_to": list(log_to) or before.get("log_to", []),
    }
    changes = dict(changes or {})
    settings = _settings(config, path, changes, smoke)
    chosen, _ = pick_device(options["device"])
    with ExitStack() as stack:
        team = stack.enter_context(team_of(settings.train.parallel, chosen))
        team.once(lambda: _claim(settings, home, resume, overwrite, stack))
        device_here = team.device(chosen)
        trainer, classes, notices = assemble(settings, home, device_here, options["keep"], team)
        # Now the steps of its epochs are known.
        settings = replace(settings, train=trainer.config)
        begin: dict[str, Any] = {"notices": notices}
        if resume:
            begin["resumed"] = _go_on(trainer, callbacks)
        if team.rank:
            return _result(trainer.run(stop), trainer, home, {})
        if not force and (why := refusal(settings, trainer, trainer.checkpoints.keep)):
            raise Fault(f"{why}; force=True (--force) tries it anyway", ENVIRONMENT)
        info = run_info(settings, trainer, home, options, resume)
        info |= {"command": _command(path, folder, changes), "changes": changes, "classes": classes}
        return _run(trainer, settings, home, info, begin, callbacks, stop)


def _settings(config: Any, path: Path | None, changes: dict[str, Any], smoke: bool) -> RunConfig:
    """The settings of a run, checked; `path` is the config's file, if it is one."""
    with blaming(2):
        if path is not None:
            settings = read(path, changes)
        elif not isinstance(config, RunConfig):
            settings = configure(config, changes)
        elif changes:
            raise UsageError(
                "a RunConfig is taken as it is; give its tables as a dict to change some"
            )
        else:
            settings = config
    with blaming(2, files=DATA):
        check(settings)
    if not smoke:
        return settings
    short: dict[str, Any] = {"steps": 3, "epochs": None, "save": 1, "evaluate": 3}
    return replace(settings, train=replace(settings.train, **short, schedule=Schedule("constant")))


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


def _command(path: Path | None, folder: str | Path | None, changes: Mapping[str, Any]) -> list[str]:
    """What begins this run anew on a command line."""
    if path is None:
        return ["regard", "train", str(Path(folder or "") / "config.toml")]
    place = [] if folder is None else ["--output-dir", str(folder)]
    flags = [word for name, x in changes.items() for word in (f"--{name}", str(x))]
    return ["regard", "train", str(path), *place, *flags]


def again(folder: Path) -> str:
    """What to type to go on with a run, by as many processes as there are here."""
    world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return launched(["regard", "train", "--resume", str(folder)], world_size)


def launched(command: Sequence[str], world_size: int) -> str:
    """A command line that starts so many processes."""
    started = [] if world_size == 1 else ["torchrun", "--nproc-per-node", str(world_size), "-m"]
    return shlex.join([*started, *command])


def _go_on(trainer: Trainer, callbacks: Sequence[Callback]) -> str:
    """Resume; where it goes on. If all checkpoints there are broke, nothing is begun over them."""
    trainer.callbacks = list(callbacks)
    if trainer.resume():
        other = f"; {differences(trainer.changes)}" if trainer.changes else ""
        return f"going on after step {trainer.at.step}{other}"
    if broken := trainer.team.agree("".join(trainer.checkpoints.broken[:1])):
        text = f"no checkpoint is sound ({broken}); put a copy back, or start anew with --overwrite"
        raise Fault(text, DATA)
    return "no checkpoint yet: from the start"


def _run(
    trainer: Trainer,
    config: RunConfig,
    folder: Path,
    info: dict[str, Any],
    begin: dict[str, Any],
    callbacks: Sequence[Callback],
    stop: Callable[[], bool],
) -> RunResult:
    """Run the trainer, and write down how it went."""
    record = partial(_record, trainer, folder, info, time.monotonic())
    listeners: list[Callback] = [*tracker(info["options"]["log_to"], folder, info), *callbacks]
    write_whole(folder / "config.toml", as_toml(config))
    figures: dict[str, float] = {}

    def note(event: dict[str, Any]) -> None:
        if event["kind"] == "evaluation":
            figures.clear()
            figures.update({n: x for n, x in event.items() if isinstance(x, float)})

    how = f"{trainer.device.type} {config.train.precision}, seed {config.train.seed}"
    about = f"{trainer.feed.describe()}; {how}, {folder}"
    begin = {"kind": "begin", "steps": config.train.steps, "about": about, **begin}
    status = "failed"
    record("running")
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
        how = f"go on: {again(folder)} --train.nan skip"
        if error.final:
            how = "start anew with --overwrite --train.optim.lr and a lower rate"
        raise Fault(f"{error}; {how}", RUN) from None
    except Lost as error:
        raise Fault(f"{error}: {again(folder)}", RUN) from None
    finally:
        try:
            _link(folder, trainer)
        finally:
            record(status)
        for listener in listeners:
            listener({"kind": "end", "step": trainer.at.step, "status": status})
    return _result(status, trainer, folder, figures)


def _record(
    trainer: Trainer, folder: Path, info: dict[str, Any], start: float, status: str
) -> None:
    """Write run.json: how the run stands, which began at the time `start`."""
    at = trainer.at
    state = {
        "status": status,
        "step": at.step,
        "best": None if at.best is None else {"step": at.best, "value": at.best_value},
        "ended": None if status == "running" else now(),
        "seconds": round(info["seconds"] + time.monotonic() - start, 2),
        "memory": peak_memory(trainer.device),
    }
    text = json.dumps({**info, **state}, indent=1, ensure_ascii=False, default=str)
    # With room for what is known at the end: it is written, whatever is left on the disk.
    write_over(folder / "run.json", text + "\n" + " " * (ROOM if status == "running" else 0))


def _result(status: str, trainer: Trainer, folder: Path, metrics: dict[str, float]) -> RunResult:
    at = trainer.at
    best = None if at.best is None else folder / "best"
    last = trainer.checkpoints.path(at.step)
    return RunResult(folder, status, at.step, metrics, last, best, at.best, at.best_value)


# --- the folder -----------------------------------------------------------------------------------


def _claim(
    config: RunConfig, folder: Path, resume: bool, overwrite: bool, stack: ExitStack
) -> None:
    """Make the folder and lock it; only then look at what is in it, and clear what may go. Nothing
    is written to one that has files of others."""
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
    if full and not resume and not overwrite:
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


def finished(folder: Path) -> bool:
    """Whether a run is there that came to its end."""
    return read_run(folder).get("status") in ("done", "patience")


def _clear(folder: Path, full: bool) -> None:
    """Remove the run, if there is one; and a tokenizer in any case, which other settings may have
    made."""
    old = folder / ".tokenizer"
    shutil.rmtree(old, ignore_errors=True)
    # Whole or not at all.
    with contextlib.suppress(FileNotFoundError):
        (folder / "tokenizer").rename(old)
    shutil.rmtree(old, ignore_errors=True)
    for path in (folder / name for name in (*WRITTEN, "last", "best") if full):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _link(folder: Path, trainer: Trainer) -> None:
    """The links `last` and `best`."""
    steps = trainer.checkpoints.steps()
    names = {"last": steps[-1].name} if steps else {}
    if trainer.at.best is not None:
        names["best"] = f"step-{trainer.at.best:08d}"
    for name, step in names.items():
        link, new = folder / name, folder / f".{name}.new"
        if link.is_dir() and not link.is_symlink():
            notice(f"{link} is a folder, not a link of ours; remove it, and it will be {step}")
            continue
        new.unlink(missing_ok=True)
        new.symlink_to(Path("checkpoints") / step)
        os.replace(new, link)


# --- run.json: what was run, with what, and how it ended ------------------------------------------


def run_info(
    config: RunConfig, trainer: Trainer, folder: Path, options: dict[str, Any], resume: bool
) -> dict[str, Any]:
    """What does not change while it runs; `seconds` are those before."""
    device, old, team = trainer.device, read_run(folder), trainer.team
    cuda, parameters = device.type == "cuda", list(trainer.model.parameters())
    was = old.get("options", {})
    other = {n: [was[n], x] for n, x in options.items() if n in was and was[n] != x}
    again = {"step": trainer.at.step, "at": now(), "changes": {**trainer.changes, **other}}
    return {
        "format": 1,
        "name": folder.name,
        "task": config.task,
        "config": asdict(rooted(config)),
        **{n: getattr(config.train, n) for n in ("metric", "seed", "steps", "precision")},
        "options": options,
        "resumed": [*old.get("resumed", []), *([again] if resume else [])],
        "began": old.get("began") or now(),
        "wandb": old.get("wandb") or uuid4().hex[:8],
        "seconds": old.get("seconds", 0.0),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "world": team.world,
        "regard": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "data": trainer.feed.describe(),
    }


def peak_memory(device: torch.device) -> int:
    """Bytes at most so far: of a GPU what torch held, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def commit() -> str | None:
    """Of the folder the command was given in, if that is a git checkout."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_run(folder: Path) -> dict[str, Any]:
    """What run.json says that a run goes on with; what is not there, or damaged, is left out."""

    def typed(table: dict[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in table.items() if isinstance(x, types.get(name, ()))}

    path = folder / "run.json"
    whole = parse(path.read_text("utf-8", "replace")) if path.is_file() else None
    info = typed(whole or {}, INFO)
    return {n: typed(x, OPTIONS) if n == "options" else x for n, x in info.items()}


def check_same(folder: Path, config: RunConfig) -> None:
    """Refuse to go on with another task, model, tokenizer or data than run.json tells of, setting by setting; one that
    it does not have, of an older version, had its default. Where files lie may change: what is in them is known to the
    checkpoints, and so are the settings of training."""
    then = read_run(folder).get("config")
    if then is None:
        return
    usual = flat(to_dict(RunConfig(config.task, Data(()), {"preset": ""})))
    was = {n: x for n, x in usual.items() if n != "model.preset"} | flat(then)
    now = flat(json.loads(json.dumps(to_dict(config), default=str)))
    names = [n for n in dict.fromkeys([*now, *was]) if n not in PLACES]
    differ = [n for n in names if was.get(n) != now.get(n) and not n.startswith("train.")]
    if differ:
        listed = differences({n: [was.get(n), now.get(n)] for n in differ})
        raise UsageError(
            f"{listed} (since {folder} was begun); go on with the same, or train into another folder: "
            "--output-dir FOLDER"
        )
