"""Attention whose bits do not depend on the batch, on how a prompt was cut into chunks, or on padding; and the search
for numbers of rows at which a product gives each row the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.core import Terms, _spread, _tensor, reference, scores
from regard.mask import Visible

# Keys of a tile, and its queries, fewest and most: chosen for speed.
KEYS, QUERIES = 32, ((2, 64), (4, 64), (8, 64), (16, 64), (16, 16))
# What `agrees` tries of all that it might, chosen for speed: numbers of rows, and how far apart they begin.
TRIED, APART = (2, 3, 5, 8, 12, 16, 17, 24, 31, 32, 33, 48, 64, 65, 96, 127), 5


def ordered(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible | Tensor | None, terms: Terms
) -> Tensor:
    """`reference` with sums of a fixed order: some queries at a time against keys 0-31, 32-63, ...

    Tile j has a maximum m_j, a sum d_j and an output o_j of its own; the result is sum_j e^(m_j - m) o_j over
    sum_j e^(m_j - m) d_j, m = max m_j, both added in pairs of neighbours. A tile that is all masked adds zeros, so
    padding and longer neighbours change no bit. Query heads that share keys stand side by side as queries.
    Keys must lie at their positions, as in the contiguous and paged caches. Equals `reference`:
    tests/laws/test_backends.py."""
    if terms.dropout:
        return reference(q, k, v, visible, terms)
    (h, t), s, dtype = q.shape[1:3], k.shape[2], v.dtype
    kind = _wide(dtype)
    if terms.score is not None:  # it may tell heads apart, and has a dtype of its own
        k, v = _spread(k, h), _spread(v, h)
    g, seen = k.shape[1], _tensor(visible)
    seen = torch.ones(1, 1, 1, s, dtype=torch.bool, device=q.device) if seen is None else seen
    seen = seen.expand(-1, -1, t, s) if seen.shape[1] == 1 else _folded(seen, g)
    bias = None if terms.bias is None else _folded(terms.bias.expand(-1, h, t, s), g)
    own = kind if terms.score is None else q.dtype
    q, places = _folded(q, g).to(own), list(_rows(t * h // g, q.shape[-1], v))

    def tile(rows: Tensor, k: Tensor) -> Tensor:
        mask = _cut(seen[:, :, rows % seen.shape[2]])
        n = _used(mask)
        some = None if bias is None else _cut(bias[:, :, rows])[:n]
        x = _scores(q[:, :, rows], k[:n], replace(terms, bias=some))
        return x.to(kind).masked_fill(~mask[:n], -torch.inf)

    if len(places) == 1:  # the copy of the keys goes before that of the values comes
        o = _sum(tile(places[0], _tiles(k, own)), _tiles(v, kind))
    else:
        k, v = _tiles(k, own), _tiles(v, kind)
        o = torch.cat([_sum(tile(rows, k), v) for rows in places], 2)
    return o[:, :, : q.shape[2]].unflatten(2, (-1, t)).flatten(1, 2).to(dtype)


def dots(q: Tensor, k: Tensor) -> Tensor:
    """`dots_exact` of the indexer of sparse attention in the same tiles: (b t H D), (b s D) -> (b t H s)."""
    kind, (t, h), s = _wide(q.dtype), q.shape[1:3], k.shape[1]
    q, k = q.flatten(1, 2)[:, None].to(kind), _tiles(k[:, None], kind)  # b 1 tH D
    places = _rows(t * h, q.shape[-1], k)
    parts = [_scores(q[:, :, rows], k, Terms(1.0)) for rows in places]  # n b 1 rows 32
    whole = torch.cat([x[:, :, 0].movedim(0, 2).flatten(2) for x in parts], 1)
    return whole[:, : t * h, :s].unflatten(1, (t, h))


# --- tiles --------------------------------------------------------------------------------------------------------


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _folded(x: Tensor, g: int) -> Tensor:
    """(b h t d) -> (b g rt d), h = g r."""
    return x.unflatten(1, (g, -1)).flatten(2, 3)


def _tiles(x: Tensor, kind: torch.dtype) -> Tensor:
    """(b g s d) -> (n b g 32 d), zeros behind the last key."""
    (b, g, s, d), (full, rest) = x.shape, divmod(x.shape[2], KEYS)
    out = x.new_empty(full + (rest > 0), b, g, KEYS, d, dtype=kind)
    out[:full] = x[:, :, : s - rest].unflatten(2, (full, KEYS)).movedim(2, 0)
    if rest:
        out[full, :, :, :rest], out[full, :, :, rest:] = x[:, :, s - rest :], 0.0
    return out


def _cut(x: Tensor) -> Tensor:
    """(b g t s) -> (n b g t 32)."""
    return F.pad(x, (0, -x.shape[-1] % KEYS)).unflatten(-1, (-1, KEYS)).movedim(-2, 0)


def _used(mask: Tensor) -> int:
    """How many tiles of (n b g t 32) there are up to the last that shows something; all where none does."""
    some = mask.flatten(1).any(1).nonzero()
    return int(some[-1]) + 1 if len(some) else len(mask)


def _rows(size: int, d: int, v: Tensor) -> Iterator[Tensor]:
    """Which of `size` queries of width d make a tile; the last is repeated where they are too few."""
    low, high = _heights(d, v.shape[-1], _wide(v.dtype), v.device, torch.get_num_threads())
    for i in range(0, size, high):
        last = i + min(high, max(low, size - i))
        yield torch.arange(i, last, device=v.device).clamp(max=size - 1)


def _scores(q: Tensor, k: Tensor, terms: Terms) -> Tensor:
    """`scores` of a tile of queries (b g t d) and tiles of keys (n b g 32 d): (n b g t 32)."""
    score, q = terms.score, q.expand(len(k), -1, -1, -1, -1)
    if score is None:
        return scores(q, k, terms)

    def each(q: Tensor, k: Tensor) -> Tensor:
        return score(q.flatten(0, 1), k.flatten(0, 1)).unflatten(0, q.shape[:2])

    return scores(q, k, replace(terms, score=each))


def _sum(x: Tensor, v: Tensor) -> Tensor:
    """softmax(x) v from scores (n b g t 32) and values (n or more, b g 32 e) in tiles: (b g t e)."""
    m = x.detach().amax(-1, keepdim=True)
    p = torch.exp(x - m.masked_fill(m == -torch.inf, 0.0))
    top = m.amax(0)
    share = torch.exp(m - top.masked_fill(top == -torch.inf, 0.0))  # n b g t 1
    o, d = _paired((p @ v[: len(x)]) * share), _paired(p.sum(-1, keepdim=True) * share)
    return o / d.masked_fill(d == 0, 1.0)


def _paired(x: Tensor) -> Tensor:
    """The sum over the first axis: each with its neighbour, then pair with pair."""
    while len(x) > 1:
        x = torch.cat([x, torch.zeros_like(x[:1])]) if len(x) % 2 else x
        x = x[0::2] + x[1::2]
    return x[0]


# --- how many rows a product may have -----------------------------------------------------------------------------


@functools.cache
def _heights(d: int, e: int, kind: torch.dtype, device: Any, threads: int) -> tuple[int, int]:
    """Between which numbers of queries both products of a tile give a query the same bits."""
    x, k, p, v = (y.to(device, kind) for y in (*cancelling(KEYS, d), *cancelling(e, KEYS)))

    def steady(x: Tensor, w: Tensor, low: int, high: int) -> bool:
        return agrees(lambda x: x[None] @ w, x[:high], low, high)

    k, v = k.mT[None], v.mT[None].contiguous()  # as they lie in `_scores` and in `_sum`
    found = (c for c in QUERIES if steady(x, k, *c) and steady(p, v, *c))
    return next(found, QUERIES[-1])


def agrees(run: Callable[[Tensor], Tensor], x: Tensor, low: int, high: int) -> bool:
    """Whether rows of x (high k) come out of `run` equal among many numbers of them, wherever they stand."""
    whole = run(x)
    places = [(0, n) for n in TRIED if low <= n < high] + [(high - n, n) for n in (low, high // 2)]
    places += [(i, low) for i in range(1, high - low, APART)]
    return all(torch.equal(run(x[i : i + n]), whole[..., i : i + n, :]) for i, n in places)


def cancelling(n: int, k: int) -> tuple[Tensor, Tensor]:
    """128 rows and n weights of width k whose exact products are 0: all that is left is how the sum was rounded, so
    that another order shows, after rounding to bfloat16 too."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, k // 2, generator=g) for rows in (128, n))
    order, odd = torch.randperm(k, generator=g), k % 2
    both = (torch.cat([y, sign * y, y.new_zeros(len(y), odd)], 1) for y, sign in ((x, 1), (w, -1)))
    x, w = (y[:, order] for y in both)
    return x, w
