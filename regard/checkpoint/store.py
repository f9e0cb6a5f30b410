"""Folders and safetensors files: read tensor by tensor into private memory, write whole or not at all.

Nothing here runs code from a file: safetensors and JSON only. A file is read with plain reads, not mapped, so that it
may change or vanish afterwards and loading needs no more memory than the weights themselves.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
# The largest models have some 150,000 tensors, a few hundred bytes of table each, in many files.
TENSORS, HEADER_BYTES = 500_000, 32 * 2**20
# Called with how many tensors are done, and how many there are.
Progress = Callable[[int, int], None]
DTYPES = {f"F{n}": getattr(torch, f"float{n}") for n in (64, 32, 16)}
DTYPES |= {f"I{n}": getattr(torch, f"int{n}") for n in (64, 32, 16, 8)}
DTYPES |= {"BF16": torch.bfloat16, "U8": torch.uint8, "BOOL": torch.bool}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


class Source:
    """Where tensors come from: a folder, a module in memory, or another source under other names.
    `names` gives for each tensor what the source itself calls it."""

    def __init__(self, source: Source, names: Mapping[str, str]):
        self.source, self.names = source, names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(self.names[name])

    def dtype(self, name: str) -> torch.dtype:
        return self.source.dtype(self.names[name])

    def read(self, name: str) -> Tensor:
        """The tensor in memory of its own."""
        return self.source.read(self.names[name])

    def borrow(self, names: list[str]) -> list[Tensor]:
        """Tensors in memory that the next call may use again."""
        return self.source.borrow([self.names[name] for name in names])


class Weights(Source):
    """The tensors of a folder: names, shapes and dtypes at once, contents on request."""

    def __init__(self, folder: Path):
        self.headers: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        self.names = self.headers  # type: ignore[assignment]
        self.scratch = torch.empty(0, dtype=torch.uint8)
        for path in _files(folder):
            start, entries = header(path)
            for name, entry in entries.items():
                if name in self.headers:
                    other = self.headers[name][0].name
                    raise UsageError(f"{path} repeats the tensor {name} of {other}")
                self.headers[name] = (path, start, entry)
            if len(self.headers) > TENSORS:
                raise UsageError(f"{folder} has more than {TENSORS:,} tensors; that is not a model")
        index = folder / INDEX
        for name, file in weight_map(index).items() if index.exists() else ():
            if name not in self:
                raise UsageError(f"{index} promises {name} in {file}, but it is not there")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.headers[name][2]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.headers[name][2]["dtype"]]

    def read(self, name: str) -> Tensor:
        return self._fill(name, torch.empty(self._size(name), dtype=torch.uint8))

    def borrow(self, names: list[str]) -> list[Tensor]:
        """In a buffer that the next call uses again: buffers made and freed in turn would leave
        holes between the weights, up to their own size."""
        ends = [0, *itertools.accumulate(-(-self._size(name) // 64) * 64 for name in names)]
        if ends[-1] > len(self.scratch):
            self.scratch = torch.empty(ends[-1], dtype=torch.uint8)
        parts = zip(names, ends, strict=False)
        return [self._fill(n, self.scratch[at : at + self._size(n)]) for n, at in parts]

    def _size(self, name: str) -> int:
        begin, end = self.headers[name][2]["data_offsets"]
        return end - begin

    def _fill(self, name: str, raw: Tensor) -> Tensor:
        path, start, entry = self.headers[name]
        with path.open("rb") as file:
            file.seek(start + entry["data_offsets"][0])
            if len(raw) and file.readinto(raw.numpy()) != len(raw):  # type: ignore[arg-type]
                raise UsageError(f"{path} ended while {name} was read; copy the file again")
        return raw.view(DTYPES[entry["dtype"]]).view(entry["shape"])


class Memory(Source):
    """Tensors of a state dict as a source; copies, so that the two models do not share weights."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors = tensors
        self.names = dict.fromkeys(tensors, "")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self.tensors[name].detach().clone()

    def borrow(self, names: list[str]) -> list[Tensor]:
        return [self.tensors[name].detach() for name in names]


SCALE = "_scale_inv"


class Unpacked(Source):
    """A source whose 8-bit weights have a scale for each block (rows, columns) of them, as DeepSeek-V3's: each is read
    as the product, in `kind`, and the scales are not among the tensors."""

    def __init__(self, source: Source, block: tuple[int, int], kind: torch.dtype):
        self.block, self.kind = block, kind
        eight = (torch.float8_e4m3fn, torch.float8_e5m2)
        self.packed = {n for n in source if n + SCALE in source and source.dtype(n) in eight}
        scales = {name + SCALE for name in self.packed}
        super().__init__(source, {name: name for name in source if name not in scales})
        for name in self.packed:
            shape, scale = source.shape(name), source.shape(name + SCALE)
            if len(shape) != 2 or scale != tuple(-(-n // b) for n, b in zip(shape, block)):
                raise UsageError(
                    f"tensor {name} of shape {shape} has scales of shape {scale}, which does not fit "
                    f"blocks of {block[0]} x {block[1]}"
                )

    def dtype(self, name: str) -> torch.dtype:
        return self.kind if name in self.packed else self.source.dtype(name)

    def read(self, name: str) -> Tensor:
        if name not in self.packed:
            return self.source.read(name)
        weight, scales = self.source.borrow([name, name + SCALE])
        rows, columns = self.block
        whole = torch.empty(weight.shape, dtype=self.kind)
        for i, scale in enumerate(scales.float()):
            each = scale.repeat_interleave(columns)[: weight.shape[1]]
            at = slice(i * rows, (i + 1) * rows)
            whole[at] = weight[at].float() * each
        return whole

    def borrow(self, names: list[str]) -> list[Tensor]:
        packed = self.packed.intersection(names)
        return [self.read(name) for name in names] if packed else self.source.borrow(names)


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the index's shards, or the one file."""
    index = folder / INDEX
    if not index.exists():
        if (folder / WEIGHTS).is_file():
            return [folder / WEIGHTS]
        check_converted(folder)
        raise UsageError(f"{folder} holds no {WEIGHTS}; is it a model folder?")
    names = sorted(set(weight_map(index).values()))
    for name in names:
        if name in ("", ".", "..") or Path(name).name != name or "\\" in name:
            why = "which is not a plain file name: files outside the folder are refused"
            raise UsageError(f"{index} names {name!r}, {why}")
        if not (folder / name).is_file():
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
        x, begin, end = tensors[name], end, end + tensors[name].nbytes
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
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write {target}: {why}; it is as it was") from None


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
            raise UsageError(
                f"{file} is not read as it is: models are folders with {WEIGHTS}, and pickled weights can run code. "
                f"Convert it once: regard convert {path} {where.resolve().name}-safe"
            )
