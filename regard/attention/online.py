"""The `online` backend: attention in tiles, as FlashAttention has it (Dao et al. 2022, arXiv:2205.14135; Dao 2023,
arXiv:2307.08691), written to be read.

Whole tensors lie in slow memory. Scores exist in fast memory alone, a tile of Br queries and Bc keys at a time. The
backward computes each tile again, so what is kept for it grows with the length, and not with its square.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.attention.core import Terms, _spread, scores
from regard.errors import UsageError, notice
from regard.mask import Visible

# Br and Bc: queries and keys of a tile.
TILE = (64, 64)
# Bytes between slow and fast memory, by ("read" or "written", tensor).
Traffic = Counter[tuple[str, str]]
Slices = list[slice]
Gradients = tuple[Tensor | None, ...]


def online(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible | Tensor | None, terms: Terms,
    tile: tuple[int, int] = TILE, traffic: Traffic | None = None,
) -> Tensor:  # fmt: skip
    """`reference` in tiles, forward and backward; tiles that show nothing are left out. `traffic` counts their bytes.

    Dropout is drawn for each tile, and the same again in the backward. A `score` may have weights of its own, which
    torch's autograd alone finds: with one, all tiles are kept for the backward, and a notice says so."""
    t, s = q.shape[2], k.shape[2]
    bias = None if terms.bias is None else terms.bias.expand(-1, -1, t, s)
    shown = visible.expand(-1, -1, t, s) if isinstance(visible, Tensor) else visible
    # Where there are no queries, one tile of none.
    rows = [slice(i, i + tile[0]) for i in range(0, max(t, 1), tile[0])]
    columns = [slice(i, i + tile[1]) for i in range(0, s, tile[1])]
    seed = int(torch.randint(2**31, ())) if terms.dropout else 0
    how = (shown, replace(terms, bias=None), rows, columns, seed, traffic)
    if terms.score is None:
        out: Tensor = _Online.apply(how, q, k, v, bias)
        return out
    if torch.is_grad_enabled():
        notice("backend online keeps the tiles of this score for the backward; it saves no memory")
    return _Tiles(q, k, v, bias, *how).forward()[0]


class _Online(torch.autograd.Function):
    """Keeps q, k, v, the bias, the output and a number for each query."""

    @staticmethod
    def forward(ctx: Any, how: Any, *tensors: Any) -> Tensor:
        with torch.autocast(tensors[0].device.type, enabled=False):
            o, lse = _Tiles(*tensors, *how).forward()
        ctx.how = how
        ctx.save_for_backward(*tensors, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Gradients:
        if torch.is_grad_enabled():
            raise UsageError("backend online has no second derivative; use backend reference")
        *tensors, o, lse = ctx.saved_tensors
        with torch.autocast(do.device.type, enabled=False):
            return None, *_Tiles(*tensors, *ctx.how).backward(o, lse, do, ctx.needs_input_grad[4])


class _Tiles(NamedTuple):
    """q (b h t d), k (b g s d), v (b g s e), bias (b h t s). Sums are made in float32 at least."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    visible: Visible | Tensor | None
    terms: Terms
    rows: Slices
    columns: Slices
    seed: int
    traffic: Traffic | None

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output, and for each query lse = log sum e^x over its scores x (b h t 1). One pass over the keys with a
        running maximum m, sum d and output o (Milakov and Gimelshein 2018):
        d' = d e^(m-m') + sum e^(x-m'),   o' = o e^(m-m') + e^(x-m') v,   result o / d,   lse = m + log d."""
        out, lse = [], []
        for rows in self.rows:
            q = self.load("q", self.q, rows)
            m = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=self.wide)
            d = o = torch.zeros_like(m)
            for _, columns, seen in self.tiles([rows], self.columns):
                k, v = self.load("k", self.k, columns), self.load("v", self.v, columns)
                x, _ = self.scored(q, k, rows, columns, seen)
                new = torch.maximum(m, x.amax(-1, keepdim=True).detach())
                safe = new.masked_fill(new == -torch.inf, 0.0)  # exp(-inf - -inf) counts as 0
                shrink, p = torch.exp(m - safe), torch.exp(x - safe)
                d = d * shrink + p.sum(-1, keepdim=True)
                p = p * self.kept(p, rows, columns)
                o = o * shrink + p @ _spread(v, q.shape[1]).to(p.dtype)
                m = new
            # Where something is seen, the maximum alone makes d at least 1.
            d = d.clamp(min=1.0)
            o = (o / d).to(self.v.dtype).expand(*q.shape[:3], self.v.shape[-1])
            out.append(self.store("o", o))
            lse.append(self.store("lse", m.masked_fill(m == -torch.inf, 0.0) + d.log()))
        return torch.cat(out, 2), torch.cat(lse, 2)

    def backward(self, o: Tensor, lse: Tensor, do: Tensor, learned: bool) -> Gradients:
        """The gradients of q, k, v and, if it is learned, bias. P = e^(x - lse) are the weights again; Z is
        1 / (1 - dropout) where a weight was kept, 0 elsewhere:
        dV = (P Z)^T dO,   dP = Z dO V^T,   D = rowsum(dO O),   dS = P (dP - D),   dQ = dS K,   dK = dS^T Q."""
        (h, g), wide = (self.q.shape[1], self.k.shape[1]), self.wide
        dq, rowsum = self.q.new_zeros(self.q.shape, dtype=wide), torch.zeros_like(lse)
        dk, dv = self.k.new_empty(self.k.shape), self.v.new_empty(self.v.shape)
        dbias = None if self.bias is None or not learned else self.bias.new_zeros(self.bias.shape)
        for rows in self.rows:
            both = self.load("do", do, rows).to(wide) * self.load("o", o, rows)
            rowsum[:, :, rows] = self.store("D", both.sum(-1, keepdim=True))
        for columns in self.columns:
            k = _spread(self.load("k", self.k, columns), h).to(wide)
            v = _spread(self.load("v", self.v, columns), h).to(wide)
            dk_j, dv_j = torch.zeros_like(k), torch.zeros_like(v)
            for rows, _, seen in self.tiles(self.rows, [columns]):
                q = self.load("q", self.q, rows).to(wide)
                do_i = self.load("do", do, rows).to(wide)
                x, slope = self.scored(q, k, rows, columns, seen)
                p = torch.exp(x - self.load("lse", lse, rows))
                z = self.kept(p, rows, columns)
                dv_j += (p * z).mT @ do_i
                ds = p * (z * (do_i @ v.mT) - self.load("D", rowsum, rows))
                if dbias is not None:
                    part = dbias[:, :, rows, columns]
                    part.copy_(self.store("dbias", ds.sum_to_size(part.shape)))
                ds = ds * slope
                dk_j += ds.mT @ q
                dq[:, :, rows] = self.store("dq", self.load("dq", dq, rows) + ds @ k)
            # Query heads that share a key head add up.
            for name, whole, part in (("dk", dk, dk_j), ("dv", dv, dv_j)):
                part = part.unflatten(1, (g, -1)).sum(2).to(whole.dtype)
                whole[:, :, columns] = self.store(name, part)
        return dq.to(self.q.dtype), dk, dv, dbias

    def scored(
        self, q: Tensor, k: Tensor, rows: slice, columns: slice, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | float]:
        """The scores of a tile, -inf where they are hidden; and their slope against q.k."""
        terms, own = self.terms, self.wide if self.terms.score is None else q.dtype
        x = scores(q.to(own), k.to(own), terms).to(self.wide)
        slope: Tensor | float = terms.scale
        if terms.softcap is not None:
            slope = terms.scale * (1 - (x / terms.softcap).square())
        if self.bias is not None:
            x = x + self.load("bias", self.bias, rows, columns)
        return x if seen is None else x.masked_fill(~seen, -torch.inf), slope

    def kept(self, p: Tensor, rows: slice, columns: slice) -> Tensor | float:
        """What dropout multiplies the weights of a tile by: the same at each call."""
        drop = self.terms.dropout
        if not drop:
            return 1.0
        tile = rows.start * self.k.shape[2] + columns.start
        generator = torch.Generator(p.device).manual_seed(self.seed + tile)
        drawn = torch.rand(p.shape, generator=generator, device=p.device)
        return (drawn >= drop).to(p.dtype) / (1 - drop or 1.0)

    def tiles(self, rows: Slices, columns: Slices) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Of these queries and keys the tiles that show something, and what (None: all of it)."""
        for i, j in product(rows, columns):
            seen = self.visible
            if isinstance(seen, Visible):
                part = seen.part(i, j)
                seen = None if part.everything else part.tensor()
            elif seen is not None:
                seen = self.load("mask", seen, i, j)
            if seen is None or seen.any():
                yield i, j, seen

    def load(self, name: str, x: Tensor, rows: slice, columns: slice = slice(None)) -> Tensor:
        """A part of x (b h n d), read from slow memory."""
        x = x[:, :, rows, columns]
        if self.traffic is not None:
            self.traffic["read", name] += x.nbytes
        return x

    def store(self, name: str, x: Tensor) -> Tensor:
        """A part that is written to slow memory."""
        if self.traffic is not None:
            self.traffic["written", name] += x.nbytes
        return x

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.q.dtype, torch.float32)
