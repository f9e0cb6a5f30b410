"""Pictures and their classes: folders of PNG or JPEG files, npz, pairs of npy or idx files.

Pictures become one array of bytes (n h w c); no pickle is ever read.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.files import DataError, needed, opened
from regard.data.read import ARRAYS, Source, format_of
from regard.errors import UsageError

SUFFIXES = (".png", ".jpg", ".jpeg")
IDX = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def pictures(source: Source) -> tuple[np.ndarray, list[str]]:
    """Bytes (n h w c) and the class of each, by name or by number."""
    parts = [_read(path, source, i) for i, path in enumerate(source.files())]
    shapes = {x.shape[1:] for x, _ in parts}
    if len(shapes) > 1:
        said = " and ".join(map(str, sorted(shapes)))
        raise DataError(f"pictures of different sizes: {said} (height, width, channels)")
    return np.concatenate([x for x, _ in parts]), [label for _, y in parts for label in y]


def _read(path: Path, source: Source, number: int) -> tuple[np.ndarray, list[str]]:
    kind = format_of(path, source.format)
    if kind not in ARRAYS:
        raise UsageError(
            f"{path} holds no pictures; give a folder with one folder for each class, an npz file, or two npy or idx "
            "files"
        )
    if kind == "images":
        return _folder(path, source.size)
    if kind == "npz":
        x, y = (_entry(path, source, role, name) for role, name in (("image", "x"), ("label", "y")))
    else:
        beside = source.beside_files()
        if number >= len(beside):
            raise UsageError(f"{path} holds pictures only; name the file with their classes too")
        load = _idx if kind == "idx" else _npy
        x, y = load(path), load(beside[number])
    return _checked(x, y, path)


def _checked(x: np.ndarray, y: np.ndarray, path: Path) -> tuple[np.ndarray, list[str]]:
    x = x[..., None] if x.ndim == 3 else x
    if x.ndim != 4 or x.dtype != np.uint8 or x.shape[-1] > 4:
        raise DataError(
            f"{path} must hold bytes of shape (n, height, width) or (n, height, width, channels), it holds {x.dtype} "
            f"{x.shape}"
        )
    if y.ndim != 1 or y.dtype.kind not in "iuU":
        raise DataError(
            f"the classes of {path} must be n numbers or names, got {y.dtype} {y.shape}"
        )
    if len(x) != len(y):
        raise DataError(f"{path} has {len(x):,} pictures and {len(y):,} classes")
    if len(x) == 0:
        raise DataError(f"{path} is empty: it holds no examples")
    return x, [str(label) for label in y.tolist()]


# --- arrays -------------------------------------------------------------------------------------------------------


def _npy(path: Path) -> np.ndarray:
    with opened(path) as stream:
        data = stream.read()
    try:
        return np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # a damaged header raises almost anything
        why = str(error).partition("\n")[0]
        raise DataError(f"{path} is not an npy file of numbers: {why:.200}") from None


def _entry(path: Path, source: Source, role: str, default: str) -> np.ndarray:
    name = str(source.columns.get(role, default))
    with opened(path) as stream:
        data = stream.read()
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as table:
            if name in table:
                return table[name]
            known = ", ".join(table)
    except Exception as error:  # zipfile and numpy have many
        raise DataError(f"{path} is no npz file of numbers: {error}") from None
    raise UsageError(f"{path} has no array {name!r} for the role {role}; it has: {known}")


def _idx(path: Path) -> np.ndarray:
    """The format of MNIST: two zero bytes, type, number of axes, their sizes, the numbers."""
    with opened(path) as stream:
        data = stream.read()
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in IDX or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{path} is no idx file")
    kind, axes = np.dtype(IDX[data[2]]), data[3]
    shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(axes)]
    want = 4 + 4 * axes + math.prod(shape) * kind.itemsize
    if len(data) != want:
        raise DataError(f"{path} is cut off: it has {len(data):,} bytes, its head says {want:,}")
    return np.frombuffer(data, kind, offset=4 + 4 * axes).reshape(shape)


# --- a folder for each class --------------------------------------------------------------------------------------


def _folder(path: Path, size: int | None) -> tuple[np.ndarray, list[str]]:
    library = needed("PIL.Image", "reading PNG and JPEG pictures", "pillow")
    files = [
        (file, folder.name)
        for folder in sorted(p for p in path.iterdir() if p.is_dir())
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise DataError(
            f"{path} has no pictures: make a folder in it for each class, with PNG or JPEG"
        )
    found: list[np.ndarray] = []
    mode = ""
    for file, _ in files:
        picture, mode = _picture(library, file, size, mode)
        if found and picture.shape != found[0].shape:
            raise DataError(
                f"{file} is {picture.shape[1]} x {picture.shape[0]}, {files[0][0].name} {found[0].shape[1]} x "
                f"{found[0].shape[0]}; say size = {min(found[0].shape[:2])} to scale them"
            )
        found.append(picture)
    return np.stack(found), [label for _, label in files]


def _picture(library: Any, file: Path, size: int | None, mode: str) -> tuple[np.ndarray, str]:
    """One picture (h w c), and whether it is grey or coloured: as the first one, if `mode` says that."""
    try:
        with library.open(file) as picture:
            mode = mode or ("L" if picture.mode in ("1", "L") else "RGB")
            picture = picture.convert(mode)
            picture = picture if size is None else picture.resize((size, size))
            x = np.asarray(picture, dtype=np.uint8)
    except Exception as error:  # a broken picture raises almost anything
        raise DataError(f"{file} is no picture that can be read: {error}") from None
    return (x[..., None] if x.ndim == 2 else x), mode
