"""Pictures: files and folders of them as one array of bytes (n h w c) with a label for each, and
one picture as a trained model reads it. No pickle is ever read, and what somebody sent is looked
at before it is unpacked."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.data.source import ARRAYS, DataError, Source, format_of, needed, opened
from regard.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from regard.models import Patches

SUFFIXES = (".png", ".jpg", ".jpeg")
# Number types of idx files.
IDX = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def pictures(source: Source) -> tuple[np.ndarray, list[str]]:
    """Bytes (n h w c) and the class of each, by name or by number: of npz files, pairs of npy or idx files, or folders
    of PNG or JPEG files with a folder per class."""
    images, labels = _joined(source, 1)
    return images, labels.tolist()


def segmented(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """Bytes (n h w c), and the class of each patch (n rows columns), by name or by number: of npz files, or pairs of
    npy or idx files."""
    return _joined(source, 3)


def _joined(source: Source, axes: int) -> tuple[np.ndarray, np.ndarray]:
    """The pictures of all files, and the names of their classes, an array with so many axes."""
    beside = source.beside_files()
    files = enumerate(source.files())
    parts = [_arrays(path, source, beside[i : i + 1], axes) for i, path in files]
    for what, sizes in zip(("pictures", "classes"), zip(*parts, strict=True), strict=True):
        shapes = {x.shape[1:] for x in sizes}
        if len(shapes) > 1:
            listed = " and ".join(map(str, sorted(shapes)))
            axis = "height, width, channels" if what == "pictures" else "rows, columns"
            raise DataError(f"{what} of different sizes: {listed} ({axis})")
    images, labels = (np.concatenate(side) for side in zip(*parts, strict=True))
    return images, labels


def _arrays(
    path: Path, source: Source, beside: list[Path], axes: int
) -> tuple[np.ndarray, np.ndarray]:
    kind = format_of(path, source.format)
    if axes > 1 and kind == "images":
        raise UsageError(
            f"{path} is a folder, which has a class for each picture; give an npz file with one for each patch"
        )
    if kind not in ARRAYS:
        raise UsageError(
            f"{path} holds no pictures; give a folder with one folder for each class, an npz file, or two npy or idx "
            "files"
        )
    if kind == "images":
        return _folder(path, source)
    if kind == "npz":
        stored = load_arrays(path)
        x, y = (_named(stored, source, *role, path) for role in (("image", "x"), ("label", "y")))
    elif not beside:
        raise UsageError(f"{path} holds pictures only; name the file with their classes too")
    else:
        x, y = map(_idx if kind == "idx" else load_arrays, (path, *beside))
    x = x[..., None] if x.ndim == 3 else x
    if x.ndim != 4 or x.dtype != np.uint8 or x.shape[-1] > 4:
        raise DataError(
            f"{path} must hold bytes of shape (n, height, width) or (n, height, width, channels), it holds {x.dtype} "
            f"{x.shape}"
        )
    if y.ndim != axes or y.dtype.kind not in "iuU":
        want = "n" if axes == 1 else "(n, rows, columns)"
        raise DataError(
            f"classes of {path} must be {want} numbers or names, got {y.dtype} {y.shape}"
        )
    if len(x) != len(y):
        raise DataError(f"{path} has {len(x):,} pictures and {len(y):,} classes")
    if len(x) == 0:
        raise DataError(f"{path} is empty: it holds no examples")
    return x, y.astype(str)


def load_arrays(path: Path) -> Any:
    """The array of an npy file, the arrays of an npz file by name."""
    with opened(path) as stream:
        data = stream.read()
    try:
        stored = np.load(io.BytesIO(data), allow_pickle=False)
        return stored if isinstance(stored, np.ndarray) else dict(stored)
    # A damaged header raises almost anything.
    except Exception as error:
        kind = "npz" if ".npz" in path.suffixes else "npy"
        why = str(error).partition("\n")[0]
        raise DataError(f"{path} is not an {kind} file of numbers: {why:.200}") from None


def _named(stored: Any, source: Source, role: str, default: str, path: Path) -> np.ndarray:
    name = str(source.columns.get(role, default))
    if name not in stored:
        known = ", ".join(stored)
        raise UsageError(f"{path} has no array {name!r} for the role {role}; it has: {known}")
    return stored[name]


def _idx(path: Path) -> np.ndarray:
    """The format of MNIST: two zero bytes, type, number of axes, their sizes, the numbers."""
    with opened(path) as stream:
        data = stream.read()
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in IDX or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{path} is not an idx file")
    kind = np.dtype(IDX[data[2]])
    axes = data[3]
    shape = np.frombuffer(data, ">u4", axes, 4).tolist()
    size = 4 + 4 * axes + math.prod(shape) * kind.itemsize
    if len(data) != size:
        raise DataError(f"{path} is cut off: it has {len(data):,} bytes, its head says {size:,}")
    return np.frombuffer(data, kind, offset=4 + 4 * axes).reshape(shape)


def _folder(path: Path, source: Source) -> tuple[np.ndarray, np.ndarray]:
    needed("PIL.Image", "reading PNG and JPEG pictures", "pillow")
    classes = sorted(p for p in path.iterdir() if p.is_dir())
    found = ([f for f in sorted(p.iterdir()) if f.suffix.lower() in SUFFIXES] for p in classes)
    files = [f for each in found for f in each[: source.sample]]
    if not files:
        raise DataError(f"{path} has no pictures: make a folder for each class, with PNG or JPEG")
    images: list[np.ndarray] = []
    for file in files:
        # All are grey or coloured as the first one is.
        image = read_picture(file, source.size, images[0].shape[2] if images else None)
        if images and image.shape != images[0].shape:
            (height, width, _), first = image.shape, images[0].shape
            raise DataError(
                f"{file} is {width} x {height}, {files[0].name} {first[1]} x {first[0]}; "
                f"say size = {min(first[:2])} to scale them"
            )
        images.append(image)
    return np.stack(images), np.array([file.parent.name for file in files])


# Of pictures that somebody sent: what kinds, and how many pixels.
SENT = ("PNG", "JPEG")
MOST_PIXELS = 1 << 24


def read_picture(
    file: Path | bytes,
    size: int | None,
    channels: int | None,
    resample: int | None = None,
    edge: int | None = None,
) -> np.ndarray:
    """Bytes (h w c) of a PNG or JPEG; c is 1 or 3, by the file unless `channels` says it. `resample` is the number of
    Pillow's filter for scaling. With `edge` the shorter side is made so long, and the middle is cut out. A file's
    content is a stranger's: its kind and its size are looked at first."""
    library = needed("PIL.Image", "reading PNG and JPEG pictures", "pillow")
    sent = isinstance(file, bytes)
    opened: Any = io.BytesIO(file) if isinstance(file, bytes) else file
    try:
        with library.open(opened, formats=SENT if sent else None) as picture:
            if sent and picture.width * picture.height > MOST_PIXELS:
                raise ValueError(f"{picture.width} x {picture.height} pixels are too many")
            grey = picture.mode in ("1", "L") if channels is None else channels == 1
            picture = picture.convert("L" if grey else "RGB")
            if size is not None and edge is not None:
                short = min(picture.size)
                sides = tuple(int(edge * side / short) for side in picture.size)
                left, top = ((side - size) // 2 for side in sides)
                picture = picture.resize(sides, resample)
                picture = picture.crop((left, top, left + size, top + size))
            elif size is not None:
                picture = picture.resize((size, size), resample)
            return np.atleast_3d(np.asarray(picture, dtype=np.uint8))
    # A broken picture raises almost anything.
    except Exception as error:
        why = getattr(error, "strerror", None) or error
        name = "this" if sent else str(file)
        raise DataError(
            f"{name} is not a picture that can be read: {why}; give a PNG or JPEG"
        ) from None


class Pictures:
    """Pictures as a trained model reads them: scaled to its size, x / 255 minus mean over std. Those are 0.5, as in
    training, unless preprocessor_config.json of the model's folder (`origin`) says otherwise. Where it says so (CLIP,
    DINOv2) the shorter side is scaled and the middle cut out, as large a part of the picture at any size."""

    def __init__(self, wanted: Patches, origin: Any):
        self.wanted = wanted
        self.mean, self.std, self.filter = normal_of(origin)
        self.edge = edge_of(origin, wanted.size)

    def file(self, file: Path | bytes) -> Tensor:
        """(c h w) of a PNG or JPEG, or of its content."""
        wanted = self.wanted
        return self.tensor(read_picture(file, wanted.size, wanted.channels, self.filter, self.edge))

    def array(self, file: Path) -> list[Tensor]:
        """Of bytes (n h w c) in an npy file; of an npz its array x, or the only one."""
        x = load_arrays(file)
        if isinstance(x, dict):
            name = next(iter(x)) if len(x) == 1 else "x"
            if name not in x:
                raise DataError(f"{file} has no array x of pictures; it has: {', '.join(x)}")
            x = x[name]
        x = x[..., None] if x.ndim == 3 else x
        want = (self.wanted.size, self.wanted.size, self.wanted.channels)
        if x.dtype != np.uint8 or x.shape[1:] != want:
            raise DataError(
                f"{file} holds {x.dtype} {x.shape}; the model reads bytes (n, {', '.join(map(str, want))})"
            )
        return [self.tensor(each) for each in x]

    def tensor(self, x: np.ndarray) -> Tensor:
        import torch

        scaled = (x.astype(np.float32) / 255 - self.mean) / self.std
        return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))


def normal_of(origin: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean and standard deviation of the channels, and the number of Pillow's filter for scaling."""
    try:
        settings = json.loads(origin.files.get("preprocessor_config.json", b"{}"))
        mean = settings.get("image_mean") or 0.5
        std = settings.get("image_std") or 0.5
        if not settings.get("do_normalize", True):
            mean, std = 0.0, 1.0
        sides = [np.atleast_1d(np.array(side, np.float32)) for side in (mean, std)]
        return sides[0], sides[1], int(settings.get("resample", 3))
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"preprocessor_config.json is not as it should be: {error}") from None


def edge_of(origin: Any, size: int) -> int | None:
    """How long the shorter side is made before the middle of size x size is cut out; None where nothing is cut."""
    try:
        settings = json.loads(origin.files.get("preprocessor_config.json", b"{}"))
        if not settings.get("do_center_crop"):
            return None
        short, crop = settings.get("size"), settings.get("crop_size", size)
        short = short.get("shortest_edge") if isinstance(short, dict) else short
        crop = crop["height"] if isinstance(crop, dict) else crop
        return None if short is None else max(size, round(short * size / crop))
    except (ValueError, TypeError, AttributeError, KeyError, ArithmeticError) as error:
        raise DataError(f"preprocessor_config.json is not as it should be: {error}") from None
