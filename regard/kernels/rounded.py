"""Weights rounded to 8 or 4 bits for a GPU; see `Packed`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.linear import TILE, fours
from regard.kernels.packed import E4M3, Packed, group_of, possible

LARGEST = 448.0  # number of e4m3


@torch.no_grad()
def pack(weight: Tensor, kind: str, back: Tensor | None = None, group: int | None = None) -> Packed:
    """W (n k) in fewer bits. `back`: how it rounds (`feedback` of regard/kernels/linear.py), without it to the
    nearest."""
    assert possible(kind, weight.shape), (kind, weight.shape)
    if kind == "fp8":
        return Packed(*eights(weight, back), weight.dtype)
    group = group or group_of(weight.shape[1])
    q, scales = fours(weight, back, group)
    low, high = q.unflatten(1, (-1, 2, group // 2)).unbind(2)
    return Packed((low | high << 4).flatten(1), scales, weight.dtype)


def eights(w: Tensor, back: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """W (n k) in e4m3 and its scales (n)."""
    scale = (w.detach().float().abs().amax(1) / LARGEST).clamp(min=1e-30)
    wide = F.pad(w.detach().float(), (0, -w.shape[1] % TILE))
    rest = wide.view(len(w), -1, TILE).permute(2, 0, 1).contiguous()
    q = torch.empty_like(rest, dtype=E4M3)
    for i in range(TILE):
        q[i] = (rest[i] / scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3)
        if back is not None:
            off = rest[i] - q[i].float() * scale[:, None]  # n k/64
            rest[i + 1 :] -= off * back[:, i, i + 1 :].t()[:, None]
    whole = q.view(torch.uint8).permute(1, 2, 0).reshape(len(w), -1)[:, : w.shape[1]]
    return whole.contiguous().view(E4M3), scale
