"""Folders and safetensors files: read tensor by tensor into private memory, write whole or not at all.

Nothing here runs code from a file: safetensors and JSON only. A file is read with plain reads, so that it may change or
vanish afterwards and loading needs no more memory than the weights themselves; it is mapped for one who packs the
weights at once, and then needs no memory for them as they were.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from regard.errors import UsageError
from regard.files import inside, loads, read_json, whole_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = r"model-\d{5}-of-\d{5}\.safetensors"
SHARD_BYTES = 5_000_000_000
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
GGUF = ".gguf"
MAPPED = 2**20  # bytes of a tensor from which on mapping it is worth while
# The largest models have some 150,000 tensors, a few hundred bytes of table each, in many files.
TENSORS = 500_000
HEADER_BYTES = 32 * 2**20
# Called with how many tensors are done, and how many there are.
Progress = Callable[[int, int], None]
DTYPES = {f"F{n}": getattr(torch, f"float{n}") for n in (64, 32, 16)}
DTYPES |= {f"I{n}": getattr(torch, f"int{n}") for n in (64, 32, 16, 8)}
DTYPES |= {"BF16": torch.bfloat16, "U8": torch.uint8, "BOOL": torch.bool}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
DTYPES |= {"F8_E8M0": torch.float8_e8m0fnu}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Stored:
    """A tensor that is not read yet. `read` brings it into memory of its own, or into the `nbytes` bytes it is lent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Tensor | None], Tensor]
    nbytes: int = 0
    # Made of numbers in few bits and their scales (`quantised.Held`): its type says nothing about that of the model.
    held: Any = None
    # `read` gives memory that is the file's.
    mapped: bool = False


class Source(dict[str, Stored]):
    """Where tensors come from, by name: a folder, or a module in memory."""

    scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
    folder: Path | None = None

    def borrow(self, names: list[str]) -> list[Tensor]:
        """Tensors in a buffer that the next call uses again: buffers made and freed in turn would leave holes between
        the weights, up to their own size."""
        ends = [0, *itertools.accumulate(-(-self[name].nbytes // 64) * 64 for name in names)]
        if ends[-1] > len(self.scratch):
            self.scratch = torch.empty(ends[-1], dtype=torch.uint8, device="cpu")
        places = zip(names, ends, strict=False)
        return [self[n].read(self.scratch[at : at + self[n].nbytes]) for n, at in places]


def weights(folder: Path, mapped: bool = False) -> Source:
    """The tensors of a folder: names, shapes and dtypes at once, contents on request; `mapped` as in `load`."""
    source = Source()
    source.folder = folder.resolve()
    where = dict[str, str]()
    for path in _files(folder):
        start, entries = header(path)
        for name, entry in entries.items():
            if name in source:
                raise UsageError(f"{path} repeats the tensor {name} of {where[name]}")
            source[name], where[name] = _stored(path, name, start, entry, mapped), path.name
        if len(source) > TENSORS:
            raise UsageError(f"{folder} has more than {TENSORS:,} tensors; that is not a model")
    index = folder / INDEX
    for name, file in weight_map(index).items() if index.exists() else ():
        if name not in source:
            raise UsageError(f"{index} promises {name} in {file}, but it is not there")
    return source


def _stored(path: Path, name: str, start: int, entry: dict[str, Any], mapped: bool) -> Stored:
    shape, dtype, (begin, end) = tuple(entry["shape"]), entry["dtype"], entry["data_offsets"]

    mapped = mapped and end - begin >= MAPPED and (start + begin) % 8 == 0

    def read(raw: Tensor | None) -> Tensor:
        if raw is None and mapped:
            return _map(path, start + begin, end - begin).view(DTYPES[dtype]).view(shape)
        if raw is None:
            raw = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
        with path.open("rb") as file:
            file.seek(start + begin)
            if len(raw) and file.readinto(raw.numpy()) != len(raw):  # type: ignore[arg-type]
                raise UsageError(f"{path} ended while {name} was read; copy the file again")
        return raw.view(DTYPES[dtype]).view(shape)

    return Stored(shape, DTYPES[dtype], read, end - begin, mapped=mapped)


def _map(path: Path, at: int, size: int) -> Tensor:
    """Bytes of a file that are read when they are looked at, and leave memory with the tensor; what is written to them
    does not come to the file."""
    early = at % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        room = mmap.mmap(file.fileno(), size + early, access=mmap.ACCESS_COPY, offset=at - early)
    return torch.frombuffer(room, dtype=torch.uint8, count=size, offset=early)


def memory(tensors: Mapping[str, Tensor]) -> Source:
    """Tensors of a state dict as a source; copies, so that the two models do not share weights."""

    def stored(x: Tensor) -> Stored:
        return Stored(tuple(x.shape), x.dtype, lambda lent: x.clone() if lent is None else x)

    return Source({name: stored(x.detach()) for name, x in tensors.items()})


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the index's shards, or the one file."""
    index = folder / INDEX
    # What is there and cannot be read is refused by its own name, by the one who opens it.
    if not os.path.lexists(index):
        if os.path.lexists(folder / WEIGHTS):
            return [folder / WEIGHTS]
        check_converted(folder)
        raise UsageError(f"{folder} holds no {WEIGHTS}; is it a model folder?")
    names = sorted(set(weight_map(index).values()))
    for name in names:
        if name in ("", ".", "..") or Path(name).name != name or "\\" in name:
            why = "which is not a plain file name: files outside the folder are refused"
            raise UsageError(f"{index} names {name!r}, {why}")
        if not os.path.lexists(folder / name):
            raise UsageError(f"{index} names {name}, which is missing from {folder}")
    return [folder / name for name in names]


def weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file, as an index of shards has it."""
    files = read_json(index).get("weight_map")
    if isinstance(files, dict) and files and all(isinstance(f, str) for f in files.values()):
        return files
    raise UsageError(f"{index} has no weight_map of tensor names to file names")


def header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data starts and what the file holds; the library checks lengths, offsets and overlaps."""
    path = inside(path)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if HEADER_BYTES < size < path.stat().st_size:
                most = f"at most {HEADER_BYTES:,} are taken"
                raise UsageError(f"{path} has a table of tensors of {size:,} bytes; {most}")
            with safetensors.safe_open(path, "pt"):
                pass
            entries = loads(file.read(size))
    except UsageError:
        raise
    except (safetensors.SafetensorError, ValueError, OSError) as error:
        why = f"is not a whole safetensors file ({error}); copy or download it again"
        raise UsageError(f"{path} {why}") from None
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        if (kind := entry["dtype"]) not in DTYPES:
            raise UsageError(f"{path}: {name} has the type {kind}; known: {', '.join(DTYPES)}")
    return 8 + size, entries


# --- writing ------------------------------------------------------------------------------------------------------


def write_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    shard_bytes: int = SHARD_BYTES,
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """One file, or shards with an index when it would pass `shard_bytes`. With `read`, which gives a tensor when its
    turn comes, `tensors` need only have types and shapes (on the meta device): one at a time is in memory."""
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else WEIGHTS
        _write_file(folder / file, shard, read)
        where |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(t.nbytes for t in tensors.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _write_file(
    path: Path, tensors: dict[str, Tensor], read: Callable[[str], Tensor] | None
) -> None:
    """A safetensors file, tensor after tensor; wide types first, so that all are aligned."""
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        x = tensors[name]
        begin = end
        end = end + tensors[name].nbytes
        header[name] = {"dtype": kinds[x.dtype], "shape": [*x.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            x = tensors[name] if read is None else read(name)
            assert (x.dtype, x.shape) == (tensors[name].dtype, tensors[name].shape), name
            file.write(x.contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]


def narrowed(x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A tensor in another type; a floating-point value beyond its range is an error."""
    y = x.to(dtype)
    both = x.is_floating_point() and dtype.is_floating_point
    narrower = both and torch.finfo(dtype).max < torch.finfo(x.dtype).max
    if narrower and bool((y.isinf() & x.isfinite()).any()):
        kind = str(dtype).removeprefix("torch.")
        raise UsageError(f"{name} has values beyond the range of {kind}; say --dtype fp32")
    return y


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_carried(folder: Path, files: Mapping[str, bytes]) -> None:
    """What `files.read_files` found, in its place."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `target` when the block ends well; if it fails, `target` is as it was.
    Files of an older checkpoint that are not written anew are kept, its weights are not."""
    # Of a link, the folder behind it.
    target = target.resolve()
    other = target.exists() and not (target / "config.json").exists()
    if other and (not target.is_dir() or any(target.iterdir())):
        why = "exists and is not a model folder; choose another path, or empty it first"
        raise UsageError(f"{target} {why}")
    try:
        with whole_folder(target, f"-{os.getpid()}") as new:
            yield new
            if target.exists():
                _keep_rest(target, new)
    except (OSError, safetensors.SafetensorError) as error:
        failed = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write {target}: {failed}; it is as it was") from None


def _keep_rest(old: Path, new: Path) -> None:
    for entry in old.iterdir():
        stale = entry.name in (INDEX, WEIGHTS) or re.fullmatch(SHARD, entry.name)
        if stale or (new / entry.name).exists():
            continue
        if entry.is_dir():
            shutil.copytree(entry, new / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, new / entry.name, follow_symlinks=False)


def check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        there = f"in {folder.parent}, where {free / 1e9:,.1f} GB are free"
        raise UsageError(f"the weights need {needed / 1e9:,.1f} GB {there}; make room")


def check_converted(path: Path) -> None:
    """What is not stored as safetensors is told the way in."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.suffix in (*PICKLED, GGUF) and file.is_file():
            where = path.parent if path == file else path
            why = f"models are folders with {WEIGHTS}, and pickled weights can run code"
            once = f"Convert it once: regard convert {path} {where.resolve().name}-safe"
            raise UsageError(f"{file} is not read as it is: {why}. {once}")
