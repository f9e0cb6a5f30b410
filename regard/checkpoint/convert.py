"""Models that are not stored as safetensors, brought into folders that are: pickled weights and GGUF files.

A folder appears whole or not at all, and what is read is never trusted: pickles are read by another process
(unpickle.py), GGUF files with every number held against the size of the file (gguf_file.py).
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.checkpoint import hf
from regard.checkpoint.gguf_file import PLAIN, File
from regard.checkpoint.gguf_models import Described
from regard.checkpoint.store import (
    GGUF,
    INDEX,
    PICKLED,
    WEIGHTS,
    Memory,
    Weights,
    read_json,
    replacing,
    weight_map,
    write_json,
    write_weights,
)
from regard.errors import UsageError
from regard.files import inside

PICKLED_INDEX = "pytorch_model.bin.index.json"
UNREADABLE = (".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".mlmodel")
# How long the process that reads pickles may say nothing: files of the old format are read whole before a word comes.
QUIET_SECONDS, SLOW_DISK = 600, 20e6
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Found:
    """What there is to convert: a GGUF file, or the pickled files of a folder and the others, which are copied."""

    weights: tuple[Path, ...]
    others: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def pickled(self) -> bool:
        # A state dict says nothing without the config.json beside it.
        return bool(self.others)


def find(source: Path) -> Found:
    """What a path means: a file of weights, or a folder with them."""
    if source.is_file():
        if source.suffix == GGUF or _begins(source, b"GGUF"):
            return Found((source,))
        if source.suffix == ".safetensors":
            raise UsageError(_nothing(source.parent))
        if source.suffix not in PICKLED:
            known = ", ".join((GGUF, *PICKLED))
            raise UsageError(f"{source} is neither a GGUF file nor pickled weights ({known})")
        return _folder(source.parent, source.name)
    if not source.is_dir():
        raise UsageError(
            f"{source} does not exist; give a GGUF file, or a folder with config.json and pickled weights"
        )
    return _folder(source)


def _folder(folder: Path, named: str = "") -> Found:
    files, left_out = _files(folder)
    names = [path.name for path in files]
    if not named and any(name in names for name in (WEIGHTS, INDEX)):
        raise UsageError(_nothing(folder))
    ggufs = [path for path in files if path.suffix == GGUF]
    pickled = [path for path in files if path.suffix in PICKLED]
    if not named and ggufs and not pickled:
        if len(ggufs) > 1:
            raise UsageError(
                f"{folder} holds {len(ggufs)} GGUF files; name the one to convert, as {folder / ggufs[0].name}"
            )
        return Found((ggufs[0],))
    if not pickled:
        raise UsageError(
            f"{folder} holds nothing to convert: no GGUF file, no pickled weights ({', '.join(PICKLED)}); "
            "TensorFlow's and Flax's are not read"
        )
    if "config.json" not in names:
        raise UsageError(
            f"{folder} holds no config.json, which says what the pickled weights are; put it there"
        )
    weights = _pickled(folder, pickled, named)
    foreign = (*PICKLED, GGUF, ".safetensors", *UNREADABLE)
    others = [p for p in files if p.suffix not in foreign and p.name != PICKLED_INDEX]
    rest = [p.name for p in files if p not in weights and p.suffix in foreign]
    return Found(tuple(weights), tuple(others), (*left_out, *rest))


def _nothing(folder: Path) -> str:
    return f"{folder} holds safetensors: nothing is to be converted, regard.load reads it as it is"


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _files(folder: Path) -> tuple[list[Path], list[str]]:
    """The files of a folder, and the names of links that lead out of it, which are not followed."""
    kept, left_out = [], []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not os.path.isfile(os.path.realpath(path)):
            continue
        try:
            inside(path)
            kept.append(path)
        except UsageError:
            left_out.append(path.name)
    return kept, left_out


def _pickled(folder: Path, pickled: list[Path], named: str) -> list[Path]:
    """The files of one state dict: the one named, the index's, or the only one."""
    by_name = {path.name: path for path in pickled}
    index = folder / PICKLED_INDEX
    if named:
        wanted = [named]
    elif index.is_file():
        wanted = sorted(set(weight_map(index).values()))
    elif "pytorch_model.bin" in by_name:
        wanted = ["pytorch_model.bin"]
    else:
        wanted = list(by_name)
        if len(wanted) > 1:
            raise UsageError(
                f"{folder} holds several pickled files ({', '.join(wanted)}); name the one to convert, as "
                f"{folder / wanted[0]}"
            )
    for name in wanted:
        if name not in by_name:
            raise UsageError(f"{name} is missing from {folder}, or a link that leads out of it")
    return [by_name[name] for name in wanted]


# --- pickled weights ----------------------------------------------------------------------------------------------


def pickled(
    found: Found,
    target: Path,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda done, total: None,
) -> str:
    """Write the folder; why Regard cannot read the model in it, or nothing. Names and, without `dtype`, types are kept;
    tensors that share memory become tensors of their own."""
    with replacing(target) as folder:
        for path in found.others:
            shutil.copyfile(path, folder / path.name)
        promised = _unpickled(found.weights, folder, dtype, progress)
        there = len(list(Weights(folder)))
        if there != promised:
            raise UsageError(f"{there} tensors were written where {promised} were read")
        if dtype is not None:
            config = read_json(folder / "config.json")
            config.pop("torch_dtype", None)
            config["dtype"] = _name(dtype)
            write_json(folder / "config.json", config)
        try:
            hf.load(folder, device="meta")
        except UsageError as error:
            return str(error).replace(str(folder), str(target))
    return ""


def _unpickled(
    files: tuple[Path, ...],
    folder: Path,
    dtype: torch.dtype | None,
    progress: Progress,
) -> int:
    """Have another process read the files and write safetensors; the number of tensors."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    kind = "" if dtype is None else _name(dtype)
    # -P: no module is taken from the folder that the user happens to be in.
    command = [sys.executable, "-P", "-m", "regard.checkpoint.unpickle", str(folder), kind]
    reader = subprocess.Popen(
        [*command, *(str(file.resolve()) for file in files)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    names = ", ".join(file.name for file in files[:3])
    try:
        total, done = 0, itertools.count(1)
        quiet = QUIET_SECONDS + sum(file.stat().st_size for file in files) / SLOW_DISK
        for line in _lines(reader, names, quiet):
            if "error" in line:
                raise UsageError(line["error"])
            if "bytes" in line:
                _check_room(folder, line["bytes"])
                total = line["tensors"]
            elif "read" in line:
                progress(next(done), total)
            elif "done" in line:
                return total
        code = reader.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise UsageError(
            f"the process that reads {names} ended with {how} before it was done; the file may be damaged, or memory "
            "ran out"
        )
    finally:
        reader.kill()
        reader.wait()


def _lines(reader: subprocess.Popen[bytes], names: str, quiet: float) -> Iterator[dict[str, Any]]:
    """What the process says, line by line, while it says something."""
    assert reader.stdout is not None
    with reader.stdout as stream:
        rest = b""
        while True:
            if not select.select([stream], [], [], quiet)[0]:
                raise UsageError(
                    f"the process that reads {names} has not moved for {quiet:.0f} seconds, and was ended"
                )
            more = os.read(stream.fileno(), 65536)
            if not more:
                return
            *lines, rest = (rest + more).split(b"\n")
            yield from (json.loads(line) for line in lines if line.startswith(b"{"))


# --- GGUF ---------------------------------------------------------------------------------------------------------


def describe(path: Path) -> Described:
    """A GGUF file whose metadata and tensors make a model that Regard knows."""
    described = Described(File(path))
    if any(part.entry.kind.name not in PLAIN for part in described.parts.values()):
        # Missing, it is missed before anything is written.
        import gguf  # noqa: F401
    try:
        hf.read(described.config, Memory(_blank(described, torch.float32)), "meta", None)
    except UsageError as error:
        raise UsageError(f"{path} cannot become a model folder: {error}") from None
    return described


def gguf_dtype(file: File) -> tuple[torch.dtype, str]:
    """The type to write where none is asked for, and the one that most of the weights have: a plain type stays, and
    float16 holds a quantised one best, whose scales are float16."""
    counts: Counter[str] = Counter()
    for entry in file.tensors.values():
        counts[entry.kind.name] += entry.rows * entry.shape[-1]
    most = counts.most_common(1)[0][0]
    return PLAIN.get(most, torch.float16), most


def from_gguf(
    described: Described,
    target: Path,
    dtype: torch.dtype,
    files: Mapping[str, bytes],
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the folder: the model, and `files` (the tokenizer's)."""
    blank, done = _blank(described, dtype), itertools.count(1)

    def read(name: str) -> torch.Tensor:
        progress(next(done), len(blank))
        return described.read(name, dtype)

    with replacing(target) as folder:
        _check_room(folder, sum(x.nbytes for x in blank.values()))
        write_json(folder / "config.json", {**described.config, "dtype": _name(dtype)})
        for name, content in files.items():
            (folder / name).write_bytes(content)
        write_weights(folder, blank, read=read)


def _blank(described: Described, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Types and shapes of the folder's tensors."""
    return {
        name: torch.empty(part.shape, dtype=dtype, device="meta")
        for name, part in described.parts.items()
    }


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UsageError(
            f"the weights need {needed / 1e9:,.1f} GB in {folder.parent}, where {free / 1e9:,.1f} GB are free; "
            "make room"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
