"""Every head of a forward as a thumbnail: a probe whose memory is bounded by one head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.see.probe import Probe, Recorder


@dataclass(frozen=True)
class Pooled:
    """The largest weight of each block of cells (t' s'); `first` (t'): of the first blocks, without the first token."""

    cells: np.ndarray
    first: np.ndarray


class Pools(Probe):
    """A probe that keeps of each head, and of the mean of a layer's heads, no more than a thumbnail of `side` cells;
    without a side, every weight."""

    def __init__(self, side: int | None = None) -> None:
        super().__init__(reduce=self._pool)
        self.side = side
        self.sizes: dict[str, tuple[int, int]] = {}
        self._means: dict[str, Tensor] = {}
        self.site, self.sum = "", torch.empty(0)

    def at(self, site: str) -> Recorder | None:
        if site != self.site:
            self._close()
            self.site, self.sum = site, torch.empty(0)
        return super().at(site)

    def _close(self) -> None:
        """The layer that was watched is complete."""
        if self.sum.numel():
            self._means[self.site] = self._small(self.sum.div_(self.count(self.site)))
            self.sum = torch.empty(0)

    @property
    def means(self) -> dict[str, Tensor]:
        self._close()
        return self._means

    @property
    def cells(self) -> int:
        return sum(self.count(site) * rows * keys for site, (rows, keys) in self.sizes.items())

    def count(self, site: str) -> int:
        return self.maps[site][0].shape[1]

    def step(self, site: str) -> tuple[int, int]:
        """Tokens down and across that a cell stands for."""
        rows, keys = (-(-n // (self.side or n)) for n in self.sizes[site])
        return rows, keys

    def _pool(self, a: Tensor) -> Tensor:
        self.sizes[self.site] = (a.shape[2], a.shape[3])
        small = self._small(a)
        self.sum = self.sum.add_(a) if self.sum.numel() else a
        return small

    def _small(self, a: Tensor) -> Tensor:
        return _thumbs(a, *self.step(self.site)).float()


def _thumbs(a: Tensor, down: int, across: int) -> Tensor:
    """(b h t s) -> (b h t' 1 + s'): pooled, behind the first column of blocks without the first token."""
    small, rest = _largest(a, down, across), a[..., 1:across]
    first = _largest(rest, down, across) if rest.shape[3] else torch.zeros_like(small[..., :1])
    return torch.cat([first, small], 3)


def _largest(a: Tensor, down: int, across: int) -> Tensor:
    return a if down == across == 1 else F.max_pool2d(a, (down, across), ceil_mode=True)


def smaller(a: Tensor, step: int) -> Pooled:
    """(t' 1 + s') of a head, pooled once more."""
    bare = torch.cat([a[:, :1], a[:, 2 : step + 1]], 1)  # the first blocks without the first token
    cells = _largest(a[None, None, :, 1:], step, step)[0, 0]
    first = _largest(bare[None, None], step, bare.shape[1])[0, 0, :, 0]
    return Pooled(cells.cpu().numpy(), first.cpu().numpy())
