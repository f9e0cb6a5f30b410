"""Pictures as a trained model reads them: scaled to its size, x / 255 minus mean over std. Those
are 0.5, as in training, unless the folder's preprocessor_config.json says otherwise."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.read import needed
from regard.errors import DATA, Fault
from regard.models import Patches


class Pictures:
    """Reads pictures for a model; `origin` is the model's."""

    def __init__(self, wanted: Patches, origin: Any):
        self.wanted = wanted
        self.mean, self.std, self.filter = normal_of(origin)

    def file(self, file: Path) -> Tensor:
        """(c h w) of a PNG or JPEG."""
        library = needed("PIL.Image", "reading PNG and JPEG pictures", "pillow")
        size = (self.wanted.size, self.wanted.size)
        try:
            with library.open(file) as picture:
                picture = picture.convert("L" if self.wanted.channels == 1 else "RGB")
                x = np.asarray(picture.resize(size, self.filter), dtype=np.uint8)
        # A broken picture raises almost anything.
        except Exception as error:
            raise Fault(f"{file} is no picture that can be read: {error}", DATA) from None
        return self.tensor(x[..., None] if x.ndim == 2 else x)

    def array(self, file: Path) -> list[Tensor]:
        """Of bytes (n h w c) in an npy file; of an npz its array x, or the only one."""
        try:
            stored = np.load(io.BytesIO(file.read_bytes()), allow_pickle=False)
            names = [] if isinstance(stored, np.ndarray) else list(stored)
            x = stored[names[0] if len(names) == 1 else "x"] if names else stored
        # zipfile and numpy have many.
        except Exception as error:
            raise Fault(
                f"{file} holds no array of pictures, in npz named x: {error}", DATA
            ) from None
        x = x[..., None] if x.ndim == 3 else x
        want = (self.wanted.size, self.wanted.size, self.wanted.channels)
        if x.dtype != np.uint8 or x.shape[1:] != want:
            raise Fault(
                f"{file} holds {x.dtype} {x.shape}; the model reads bytes (n, {', '.join(map(str, want))})",
                DATA,
            )
        return [self.tensor(each) for each in x]

    def tensor(self, x: np.ndarray) -> Tensor:
        scaled = (x.astype(np.float32) / 255 - self.mean) / self.std
        return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))


def normal_of(origin: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Mean and standard deviation of the channels, and the number of Pillow's filter for
    scaling."""
    try:
        settings = json.loads(origin.files.get("preprocessor_config.json", b"{}"))
        mean, std = settings.get("image_mean") or 0.5, settings.get("image_std") or 0.5
        if not settings.get("do_normalize", True):
            mean, std = 0.0, 1.0
        sides = [np.atleast_1d(np.array(side, np.float32)) for side in (mean, std)]
        return sides[0], sides[1], int(settings.get("resample", 3))
    except (ValueError, TypeError, AttributeError) as error:
        raise Fault(f"preprocessor_config.json is not as it should be: {error}", DATA) from None
