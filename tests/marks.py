"""A cache whose entries tell their position, so that a test sees at once what lies where."""

import pytest
import torch
from torch import Tensor

from regard.cache import LAYOUTS, Cache, CacheSpec
from regard.mask import Span

SPECS = [CacheSpec(token={"k": (2, 3), "v": (4,)}), CacheSpec(token={"latent": (5,)})]
OPTIONS: dict[str, dict] = {
    "contiguous": {"capacity": 2},
    "ring": {"window": 12, "chunk": 4},
    "paged": {"pages": 20, "page": 3},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def make(layout: str, batch: int = 2, **more: object) -> Cache:
    return LAYOUTS[layout](SPECS, batch, **OPTIONS.get(layout, {}) | more)


def entries(batch: int, size: int, start: int = 0) -> list[dict[str, Tensor]]:
    """Entries that tell their position: the first number of token p is p + 1 + row / 10."""
    mark = torch.arange(start, start + size) + 1 + torch.arange(batch)[:, None] / 10
    return [
        {
            name: mark.view(batch, size, *[1] * len(s)).expand(-1, -1, *s)
            for name, s in spec.token.items()
        }
        for spec in SPECS
    ]


def append(cache: Cache, size: int, lengths: list[int] | None = None) -> Span:
    start = int(cache.lengths[0])
    span = cache.begin(size, None if lengths is None else torch.tensor(lengths))
    for i, each in enumerate(entries(cache.batch, size, start)):
        cache.layer(i).update(**each)
    return span


def held(cache: Cache) -> list[dict[int, float]]:
    """For each row: position -> the mark found there, from the last entry of the last layer."""
    stored, span = cache.update(1, {}) if cache.frozen else (cache._read(1), cache.span)
    pos = span.index.expand(cache.batch, -1)
    mark = stored["latent"][..., 0]
    return [
        {p: round(float(m), 4) for p, m in sorted(zip(pos[r].tolist(), mark[r])) if p >= 0}
        for r in range(cache.batch)
    ]


def marks(row: int, size: int) -> dict[int, float]:
    return {p: round(p + 1 + row / 10, 4) for p in range(size)}
