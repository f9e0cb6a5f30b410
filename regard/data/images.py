"""Pictures and their classes: npz, pairs of npy or idx files, folders of PNG or JPEG files with a folder per class.

Pictures become one array of bytes (n h w c); no pickle is ever read.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.read import ARRAYS, DataError, Source, format_of, needed, opened
from regard.errors import UsageError

SUFFIXES = (".png", ".jpg", ".jpeg")
IDX = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def pictures(source: Source) -> tuple[np.ndarray, list[str]]:
    """Bytes (n h w c) and the class of each, by name or by number."""
    parts = [_read(path, source, i) for i, path in enumerate(source.files())]
    shapes = {x.shape[1:] for x, _ in parts}
    if len(shapes) > 1:
        listed = " and ".join(map(str, sorted(shapes)))
        raise DataError(f"pictures of different sizes: {listed} (height, width, channels)")
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
        x, y = (_load(path, kind, source, r, n) for r, n in (("image", "x"), ("label", "y")))
    else:
        beside = source.beside_files()
        if number >= len(beside):
            raise UsageError(f"{path} holds pictures only; name the file with their classes too")
        x, y = (_load(file, kind) for file in (path, beside[number]))
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


def _load(
    path: Path, kind: str, source: Source | None = None, role: str = "", default: str = ""
) -> np.ndarray:
    """The array of an npy or idx file, or the one of an npz file that has this role."""
    with opened(path) as stream:
        data = stream.read()
    if kind == "idx":
        return _idx(data, path)
    try:
        loaded = np.load(io.BytesIO(data), allow_pickle=False)
        if source is None:
            return loaded
        name = str(source.columns.get(role, default))
        if name in loaded:
            return loaded[name]
        known = ", ".join(loaded)
    # A damaged header raises almost anything.
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise DataError(f"{path} is not an {kind} file of numbers: {why:.200}") from None
    raise UsageError(f"{path} has no array {name!r} for the role {role}; it has: {known}")


def _idx(data: bytes, path: Path) -> np.ndarray:
    """The format of MNIST: two zero bytes, type, number of axes, their sizes, the numbers."""
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in IDX or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{path} is not an idx file")
    kind, axes = np.dtype(IDX[data[2]]), data[3]
    shape = np.frombuffer(data, ">u4", axes, 4).tolist()
    size = 4 + 4 * axes + math.prod(shape) * kind.itemsize
    if len(data) != size:
        raise DataError(f"{path} is cut off: it has {len(data):,} bytes, its head says {size:,}")
    return np.frombuffer(data, kind, offset=4 + 4 * axes).reshape(shape)


def _folder(path: Path, size: int | None) -> tuple[np.ndarray, list[str]]:
    library = needed("PIL.Image", "reading PNG and JPEG pictures", "pillow")
    classes = sorted(p for p in path.iterdir() if p.is_dir())
    files = [f for p in classes for f in sorted(p.iterdir()) if f.suffix.lower() in SUFFIXES]
    if not files:
        raise DataError(
            f"{path} has no pictures: make a folder in it for each class, with PNG or JPEG"
        )
    images: list[np.ndarray] = []
    mode = ""
    for file in files:
        image, mode = _picture(library, file, size, mode)
        if images and image.shape != images[0].shape:
            (height, width, _), first = image.shape, images[0].shape
            raise DataError(
                f"{file} is {width} x {height}, {files[0].name} {first[1]} x {first[0]}; "
                f"say size = {min(first[:2])} to scale them"
            )
        images.append(image)
    return np.stack(images), [file.parent.name for file in files]


def _picture(library: Any, file: Path, size: int | None, mode: str) -> tuple[np.ndarray, str]:
    """One picture (h w c), and whether it is grey or coloured: as the first one, if `mode` says that."""
    try:
        with library.open(file) as picture:
            mode = mode or ("L" if picture.mode in ("1", "L") else "RGB")
            picture = picture.convert(mode)
            picture = picture if size is None else picture.resize((size, size))
            x = np.asarray(picture, dtype=np.uint8)
    # A broken picture raises almost anything.
    except Exception as error:
        raise DataError(f"{file} is no picture that can be read: {error}") from None
    return (x[..., None] if x.ndim == 2 else x), mode
