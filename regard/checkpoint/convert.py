"""Models that are not stored as safetensors, brought into folders that are: pickled weights and GGUF files.

A folder appears whole or not at all, and what is read is never trusted: GGUF files are read with every number held
against the size of the file (gguf.py), pickles by another process, for which this file is the program (`main`). There
torch.load with weights_only builds tensors and plain containers and calls nothing else; should that ever fail to hold,
the process has a limit on its memory and may open no connection and start no program. It answers in lines of JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoint import hf, store
from regard.errors import UsageError
from regard.files import inside, read_json

PICKLED_INDEX = "pytorch_model.bin.index.json"
UNREADABLE = (".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".mlmodel")
# How long the process that reads pickles may say nothing: files of the old format are read whole
# before a word comes.
QUIET_SECONDS, SLOW_DISK = 600, 20e6
# Keys under which files hold a state dict, the memory that reading may take, what is forbidden to it.
NESTED = ("state_dict", "model_state_dict", "model")
SPARE = 2**32
FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn")


@dataclass(frozen=True)
class Originals:
    """What there is to convert: a GGUF file, or the pickled files of a folder and the others, which are copied."""

    weights: tuple[Path, ...]
    others: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def pickled(self) -> bool:
        # A state dict says nothing without the config.json beside it.
        return bool(self.others)


def find(source: Path) -> Originals:
    """What a path means: a file of weights, or a folder with them."""
    folder, named = (source.parent, source.name) if source.is_file() else (source, "")
    if not folder.is_dir():
        give = "give a GGUF file, or a folder with config.json and pickled weights"
        raise UsageError(f"{source} does not exist; {give}")
    if named:
        with source.open("rb") as file:
            if source.suffix == store.GGUF or file.read(4) == b"GGUF":
                return Originals((source,))
        if source.suffix not in (*store.PICKLED, ".safetensors"):
            known = ", ".join((store.GGUF, *store.PICKLED))
            raise UsageError(f"{source} is neither a GGUF file nor pickled weights ({known})")
    files, left_out = _files(folder)
    safe = any(path.name in (store.WEIGHTS, store.INDEX) for path in files)
    if source.suffix == ".safetensors" or (safe and not named):
        why = "nothing is to be converted, regard.load reads it as it is"
        raise UsageError(f"{folder} holds safetensors: {why}")
    ggufs = [path for path in files if path.suffix == store.GGUF]
    pickled = {path.name: path for path in files if path.suffix in store.PICKLED}
    choose = "name the one to convert, as"
    if len(ggufs) > 1 and not pickled:
        raise UsageError(f"{folder} holds {len(ggufs)} GGUF files; {choose} {ggufs[0]}")
    if ggufs and not pickled:
        return Originals((ggufs[0],))
    if not pickled:
        none = f"no GGUF file, no pickled weights ({', '.join(store.PICKLED)})"
        other = "TensorFlow's and Flax's are not read"
        raise UsageError(f"{folder} holds nothing to convert: {none}; {other}")
    if not any(path.name == "config.json" for path in files):
        why = "which says what the pickled weights are; put it there"
        raise UsageError(f"{folder} holds no config.json, {why}")
    # The files of one state dict: the one named, the index's, or the only one.
    index = folder / PICKLED_INDEX
    if named:
        wanted = [named]
    elif index.is_file():
        wanted = sorted(set(store.weight_map(index).values()))
    else:
        wanted = [n for n in pickled if n == "pytorch_model.bin"] or list(pickled)
        if len(wanted) > 1:
            several = f"several pickled files ({', '.join(wanted)})"
            raise UsageError(f"{folder} holds {several}; {choose} {folder / wanted[0]}")
    for name in wanted:
        if name not in pickled:
            raise UsageError(f"{name} is missing from {folder}, or a link that leads out of it")
    foreign = (*store.PICKLED, store.GGUF, ".safetensors", *UNREADABLE)
    others = [p for p in files if p.suffix not in foreign and p.name != PICKLED_INDEX]
    rest = [p.name for p in files if p.suffix in foreign and p.name not in wanted]
    weights = tuple(pickled[name] for name in wanted)
    return Originals(weights, tuple(others), (*left_out, *rest))


def _files(folder: Path) -> tuple[list[Path], list[str]]:
    """The files of a folder, and the names of links that lead out of it, which are not followed."""
    files = []
    left_out = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not os.path.isfile(os.path.realpath(path)):
            continue
        try:
            inside(path)
            files.append(path)
        except UsageError:
            left_out.append(path.name)
    return files, left_out


# --- pickled weights ----------------------------------------------------------------------------------------------


def pickled(
    source: Originals,
    target: Path,
    dtype: torch.dtype | None = None,
    progress: store.Progress = lambda done, total: None,
) -> str:
    """Write the folder; why Regard cannot read the model in it, or nothing. Names and, without
    `dtype`, types are kept; tensors that share memory become tensors of their own."""
    with store.replacing(target) as folder:
        for path in source.others:
            shutil.copyfile(path, folder / path.name)
        promised = _unpickled(source.weights, folder, dtype, progress)
        written = len(store.weights(folder))
        if written != promised:
            raise UsageError(f"{written} tensors were written where {promised} were read")
        if dtype is not None:
            config = read_json(folder / "config.json")
            config.pop("torch_dtype", None)
            config["dtype"] = hf.dtype_name(dtype)
            store.write_json(folder / "config.json", config)
        try:
            hf.load(folder, device="meta")
        except UsageError as error:
            return str(error).replace(str(folder), str(target))
    return ""


def _unpickled(
    files: tuple[Path, ...], folder: Path, dtype: torch.dtype | None, progress: store.Progress
) -> int:
    """Have another process read the files and write safetensors; the number of tensors."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    kind = "" if dtype is None else hf.dtype_name(dtype)
    # -P: no module is taken from the folder that the user happens to be in.
    command = [sys.executable, "-P", "-m", "regard.checkpoint.convert", str(folder), kind]
    reader = subprocess.Popen(
        [*command, *(str(file.resolve()) for file in files)],
        bufsize=0,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    names = ", ".join(file.name for file in files[:3])
    quiet = QUIET_SECONDS + sum(file.stat().st_size for file in files) / SLOW_DISK
    total = 0
    done = itertools.count(1)
    assert reader.stdout is not None
    try:
        while select.select([reader.stdout], [], [], quiet)[0]:
            text = reader.stdout.readline()
            if not text:
                code = reader.wait()
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                why = "before it was done; the file may be damaged, or memory ran out"
                raise UsageError(f"the process that reads {names} ended with {how} {why}")
            line = json.loads(text) if text.startswith(b"{") else {}
            if "error" in line:
                raise UsageError(line["error"])
            if "bytes" in line:
                store.check_room(folder, line["bytes"])
                total = line["tensors"]
            elif "read" in line:
                progress(next(done), total)
            elif "done" in line:
                return total
        still = f"has not moved for {quiet:.0f} seconds, and was ended"
        raise UsageError(f"the process that reads {names} {still}")
    finally:
        reader.kill()
        reader.wait()
        reader.stdout.close()


# --- the process that reads pickles --------------------------------------------------------------------------------


def main(folder: str, dtype: str, *files: str) -> None:
    confine(sum(os.path.getsize(file) for file in files))
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in tensors_of(file).items():
            if name in tensors:
                raise UsageError(f"{file} repeats the tensor {name} of another file")
            tensors[name] = tensor
    kind = getattr(torch, dtype) if dtype else None
    planned = {
        name: torch.empty_like(x, device="meta", dtype=kind if x.is_floating_point() else None)
        for name, x in tensors.items()
    }

    def read(name: str) -> Tensor:
        say(read=name)
        return store.narrowed(tensors[name].detach(), planned[name].dtype, name)

    say(bytes=sum(x.nbytes for x in planned.values()), tensors=len(planned))
    try:
        store.write_weights(Path(folder), planned, read=read)
    except OSError as error:
        raise UsageError(f"the weights cannot be written: {error.strerror}") from None
    say(done=True)


def confine(size: int) -> None:
    """No more memory than files of this size need, no connections, no programs."""
    # The allocator reserves address space ahead, a gigabyte at the first tensor: counted before.
    torch.empty(1)
    # A system without /proc has no such limit either.
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 2 * size + SPARE
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def refuse(event: str, _: Any) -> None:
        if event.startswith(FORBIDDEN):
            raise RuntimeError(f"{event} is forbidden here")

    sys.addaudithook(refuse)


def tensors_of(file: str) -> dict[str, Tensor]:
    """The state dict in a file, mapped rather than read where its format allows that."""
    with open(file, "rb") as opened:
        zipped = opened.read(4) == b"PK\x03\x04"
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:
        raise UsageError(refusal(file, error)) from None
    for name in NESTED:
        if isinstance(state, dict) and isinstance(state.get(name), dict):
            state = state[name]
    if not isinstance(state, dict) or not state:
        raise UsageError(f"{file} holds a {type(state).__name__}, not a state dict with tensors")
    for name, x in state.items():
        plain = isinstance(name, str) and isinstance(x, Tensor) and x.layout == torch.strided
        if not plain or x.dtype not in store.DTYPES.values():
            what = f"{x.layout} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise UsageError(f"{file} holds under {name!r:.80} a {what}, not a plain tensor")
    return state


def refusal(file: str, error: Exception) -> str:
    text = str(error)
    named = re.search(r"GLOBAL (\S+)", text)
    if type(error).__name__ == "UnpicklingError" and named:
        return (
            f"{file} is refused: it asks for {named[1]}, and to read that could run code. Get the model as "
            "safetensors, or save its state_dict() alone where you trust it"
        )
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return f"{file} asks for more memory than a file of its size can need"
    why = text.rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
    return f"{file} is not a whole file of pickled weights ({why:.200}); copy or download it again"


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UsageError as error:
        say(error=str(error))
        sys.exit(1)
