"""Handwritten digits, 1,797 pictures of 8 x 8 pixels: scikit-learn carries them (from the UCI repository)."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from regard.data.read import needed


def make(folder: Path, seed: int = 0, held: int = 360) -> str:
    """Write train.npz and valid.npz: x (n 8 8) bytes and y (n); what was made."""
    load = needed("sklearn.datasets", "the recipe's data (pictures of digits)", "scikit-learn")
    data = load.load_digits()
    x = (data.images * 255 / 16).round().astype(np.uint8)
    rng = random.Random(seed)
    order = sorted(range(len(x)), key=lambda _: rng.random())
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("valid.npz", order[:held]), ("train.npz", order[held:])):
        np.savez(folder / name, x=x[part], y=data.target[part])
    return f"{len(x) - held:,} pictures of digits to learn from, and {held:,} others"
