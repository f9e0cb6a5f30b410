"""Attention whose bits do not depend on the batch, on how a prompt was cut into chunks, or on padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.core import Terms, _spread, _tensor, reference, scores
from regard.mask import Visible

QUERIES, KEYS = 16, 32  # every product has these sizes, so one kernel computes them all


def ordered(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible | Tensor | None, terms: Terms
) -> Tensor:
    """`online` with fixed tiles: 16 queries at a time against keys 0-31, 32-63, ... in this order. A tile that is all
    masked changes no bit (it multiplies by 1 and adds 0), so padding and longer neighbours do not either. Keys must
    lie at their positions, as in the contiguous and paged caches. Equals `reference`: tests/laws/test_backends.py."""
    if terms.score is not None or terms.dropout:
        return reference(q, k, v, visible, terms)
    (h, t), s = q.shape[1:3], k.shape[2]
    seen = _tensor(visible)
    seen = torch.ones(1, 1, 1, s, dtype=torch.bool, device=q.device) if seen is None else seen
    k, v = (F.pad(_spread(x, h), (0, 0, 0, -s % KEYS)) for x in (k, v))
    q = F.pad(q, (0, 0, 0, -t % QUERIES))
    seen = F.pad(seen.expand(-1, -1, t, -1), (0, -s % KEYS, 0, -t % QUERIES))
    bias = (
        None
        if terms.bias is None
        else F.pad(terms.bias.expand(-1, h, t, s), (0, -s % KEYS, 0, -t % QUERIES))
    )
    rows = [_row(q, k, v, seen, bias, terms, i) for i in range(0, q.shape[2], QUERIES)]
    return torch.cat(rows, 2)[:, :, :t].to(v.dtype)


def _row(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None, terms: Terms, i: int
) -> Tensor:
    """One tile of queries against all tiles of keys: running maximum m, sum d, output o."""
    at = slice(i, i + QUERIES)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    m = torch.full((*q.shape[:2], QUERIES, 1), -torch.inf, dtype=wide, device=q.device)
    d, o = (
        torch.zeros_like(m),
        torch.zeros(*q.shape[:2], QUERIES, v.shape[-1], dtype=wide, device=q.device),
    )
    for j in range(0, k.shape[2], KEYS):
        part = slice(j, j + KEYS)
        mine = Terms(
            terms.scale, None if bias is None else bias[:, :, at, part], None, terms.softcap
        )
        x = (
            scores(q[:, :, at], k[:, :, part], mine)
            .to(wide)
            .masked_fill(~seen[:, :, at, part], -torch.inf)
        )
        new = torch.maximum(m, x.amax(-1, keepdim=True))
        safe = new.masked_fill(new == -torch.inf, 0.0)
        shrink, p = torch.exp(m - safe), torch.exp(x - safe)
        d = d * shrink + p.sum(-1, keepdim=True)
        o = o * shrink + p @ v[:, :, part].to(wide)
        m = new
    return o / d.masked_fill(d == 0, 1.0)
