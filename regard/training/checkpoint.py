"""The folder of a run: checkpoints written whole or not at all, every byte hashed, and one trainer at a time.

A checkpoint is a model folder as any other, with the trainer's state beside it in `trainer/`: tensors as safetensors
(of processes that share them out each its part, in `trainer/shards`), numbers as JSON, and a manifest with the size and
SHA-256 of every file. A folder whose bytes differ is not used; the one before it is. What becomes known of the
newest one after it was written, its evaluation, stands beside them in `progress.json`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import UsageError
from regard.files import sync, whole_folder, write_whole

STEP = re.compile(r"step-(\d{8})")
STATE, TENSORS = "trainer/state.json", "trainer/state.safetensors"
SHARDS, MANIFEST = "trainer/shards", "trainer/manifest.json"
PROGRESS = "progress.json"
SPARE = 1 << 20  # bytes beside the tensors


def whole(model: Any) -> int:
    """Bytes of all weights, tied ones counted once."""
    return sum({x.data_ptr(): x.nbytes for x in model.state_dict().values()}.values())


class Checkpoints:
    """Writes and reads the checkpoints of `folder`; `save(model, path)` writes a model folder, of about `size(model)`
    bytes. The newest `keep` stay, and the best. `every`: steps between checkpoints; one of another step, at which a run
    was stopped, stays until the next. `before` is called when something is about to count."""

    def __init__(
        self,
        folder: Path,
        save: Callable[[Any, Path], object],
        keep: int = 2,
        size: Callable[[Any], int] = whole,
    ):
        if keep < 1:
            raise UsageError(f"keep = {keep}: at least one checkpoint must stay")
        self.folder, self.save, self.keep, self.size = folder, save, keep, size
        self.every = 1
        self.before: Callable[[], None] = lambda: None
        self.broken: list[str] = []  # what `latest` passed over, and why

    def check(self, step: int, model: Any, tensors: dict[str, Tensor]) -> None:
        """Whether there is room for the checkpoint of a step."""
        need = self.size(model) + sum(x.nbytes for x in tensors.values()) + SPARE
        make(self.folder)
        free = shutil.disk_usage(self.folder).free
        if free < need:
            raise UsageError(
                f"{self.path(step).name} needs {need / 1e6:,.0f} MB, but {self.folder} has {free / 1e6:,.0f} MB free; "
                f"make room, then go on with resume=True (--resume); {self._last()}"
            )

    def shards(self, step: int) -> Path:
        """Where processes write their parts; they count once `write` has moved them into the checkpoint."""
        return self.folder / f".step-{step:08d}.shards"

    def write(self, step: int, model: Any, tensors: dict[str, Tensor], state: Any) -> Path:
        """The checkpoint of a step, with the shards that are there; `state["best"]` names the best step so far, or
        None."""
        target, shards = self.path(step), self.shards(step)
        if target.exists() and not fault(target):
            shutil.rmtree(shards, ignore_errors=True)
            return target
        try:
            with whole_folder(target, f"-{os.getpid()}") as new:
                # Which `save` makes.
                new.rmdir()
                self.save(model, new)
                (new / "trainer").mkdir()
                whole = {n: x.detach().cpu().contiguous() for n, x in tensors.items()}
                save_file(whole, new / TENSORS)
                if shards.is_dir():
                    shards.rename(new / SHARDS)
                (new / STATE).write_text(json.dumps(state), encoding="utf-8")
                (new / MANIFEST).write_bytes(manifest(new, target.name))
                self.before()
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot write {target}: {why}; {self._last()}") from None
        self._prune(target, state.get("best"))
        return target

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def latest(self) -> Path | None:
        """The newest checkpoint whose bytes are as they were written."""
        self.broken = []
        for path in reversed(self.steps()):
            why = fault(path)
            if not why:
                return path
            self.broken.append(f"{path.name}: {why}")
        return None

    def steps(self) -> list[Path]:
        """All checkpoints, oldest first."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(path for path in paths if STEP.fullmatch(path.name))

    def read(self, path: Path) -> dict[str, Any]:
        """The trainer's state of a checkpoint that `latest` gave, with what was noted of it."""
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        try:
            noted = (self.folder / PROGRESS).read_bytes()
            progress = json.loads(noted)["progress"]
            if noted == _sealed("progress", progress, path.name):
                state["progress"] = progress
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # it is found out again
        return state

    def note(self, step: int, progress: dict[str, Any]) -> None:
        """Where the run stands, after the checkpoint of this step was written; whole or not at all."""
        target = self.folder / PROGRESS
        try:
            self.before()
            write_whole(target, _sealed("progress", progress, self.path(step).name))
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror}; {self._last()}") from None
        self._prune(self.path(step), progress["best"])

    def _in_turn(self, path: Path) -> bool:
        return int(path.name.removeprefix("step-")) % self.every == 0

    def _prune(self, newest: Path, best: int | None) -> None:
        """What is newer than the newest is broken: it was passed over, and does not count."""
        old = [path for path in self.steps() if path < newest]
        stay = [path for path in reversed(old) if self._in_turn(path)][: self.keep - 1]
        for path in old:
            if path not in stay and (best is None or path != self.path(best)):
                shutil.rmtree(path, ignore_errors=True)

    def _last(self) -> str:
        steps = self.steps()
        return f"{steps[-1].name} is as it was" if steps else "there is no checkpoint yet"


def clean(folder: Path) -> None:
    """Remove what a killed trainer left half written; only with the lock held."""
    for path in folder.glob(".*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


# --- hashes -------------------------------------------------------------------------------------------------------


def manifest(folder: Path, name: str) -> bytes:
    """Size and SHA-256 of every file but the manifest itself, and a hash over these and the checkpoint's name."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        place = path.relative_to(folder).as_posix()
        if place != MANIFEST:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            files[place] = [path.stat().st_size, digest]
    return _sealed("files", files, name)


def _sealed(kind: str, content: dict[str, Any], name: str) -> bytes:
    """With a hash that tells whether it was written so, and for the checkpoint of this name."""
    seal = hashlib.sha256(json.dumps([name, content], sort_keys=True).encode()).hexdigest()
    return json.dumps({kind: content, "seal": seal}, sort_keys=True, indent=1).encode()


def fault(folder: Path) -> str:
    """What is wrong with a checkpoint; "" if nothing is."""
    try:
        written = (folder / MANIFEST).read_bytes()
        if written != _sealed("files", json.loads(written)["files"], folder.name):
            return f"{MANIFEST} has changed, or is of another step"
        present = manifest(folder, folder.name)
        if written == present:
            return ""
        then, now = json.loads(written)["files"], json.loads(present)["files"]
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{MANIFEST} has changed"
    changed = sorted(n for n in then.keys() | now.keys() if then.get(n) != now.get(n))
    return f"{', '.join(changed[:3])} changed, is missing or is new"


def make(folder: Path) -> None:
    """A folder, and those above it, that are there after the power has gone too."""
    if not folder.is_dir():
        make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


# --- one trainer --------------------------------------------------------------------------------------------------


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One trainer a folder. The system frees the lock however the process ends."""
    make(folder)
    with (folder / "lock").open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            who = (folder / "lock").read_text("utf-8").strip() or "unknown"
            raise UsageError(
                f"another trainer (process {who}) is at work in {folder}; wait for it, or train into another folder"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
