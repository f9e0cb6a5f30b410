"""Prompts laid end to end, (t ...), so that no matrix product sees padding; only attention lays them out in rows (n s).

Sizes are rounded up, so that a few CUDA graphs hold every pass: spare tokens repeat the last one, spare prompts the
last prompt, and both write again what it wrote. One kernel turns queries and keys, stores keys and values in the cache,
and lays all three out for torch's attention; `lay` is that in torch.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.kernels.fused import fused
from regard.kernels.triton.linear import jit, triton

if triton is not None:
    import triton.language as tl

Laid = tuple[Tensor, Tensor, Tensor]  # q, k, v in rows (n s . d)
Sizes = tuple[int, int, int]  # tokens, prompts, tokens of the longest


def up(n: int, least: int = 64) -> int:
    """n rounded up to a multiple of `least`, in steps of a quarter above 4 `least`."""
    step = max(least, 1 << max(0, (n - 1).bit_length() - 3))
    return -(-n // step) * step


def sizes_of(texts: Sequence[Sequence[int]]) -> Sizes:
    longest = max(map(len, texts))
    return up(sum(map(len, texts))), 1 << (len(texts) - 1).bit_length(), up(longest, 32)


def flat(texts: Sequence[Sequence[int]], rows: Sequence[int], sizes: Sizes) -> list[int]:
    """All the numbers of a Pack, in its order, for one copy to the device."""
    t, n, s = sizes
    ids: list[int] = []
    pos: list[int] = []
    row: list[int] = []
    back: list[int] = []
    grid: list[int] = []
    last: list[int] = []
    for i, (text, r) in enumerate(zip(texts, rows, strict=True)):
        first, size = len(ids), len(text)
        ids += text
        pos += range(size)
        row += [r] * size
        back += range(i * s, i * s + size)
        last.append(first + size - 1)
        grid += range(first, first + size)
        grid += [first + size - 1] * (s - size)
    for x in (ids, pos, row, back):
        x += x[-1:] * (t - len(x))
    spare = n - len(texts)
    grid += grid[-1:] * (spare * s)
    lengths = [len(text) for text in texts]
    ends = [x + x[-1:] * spare for x in (last, list(rows), lengths)]
    return [*ids, *pos, *row, *back, *grid, *ends[0], *ends[1], *ends[2]]


@dataclass
class Pack:
    """Prompts on the device, int64."""

    ids: Tensor  # (t) tokens,
    pos: Tensor  # (t) their positions,
    row: Tensor  # (t) the rows of the cache they go to
    back: Tensor  # (t) and their places in (n s)
    grid: Tensor  # (n s) the token at each place
    last: Tensor  # (n) where each prompt ends,
    rows: Tensor  # (n) its row of the cache
    lengths: Tensor  # (n) and its length
    laid: dict[tuple[int, ...], Laid] = field(default_factory=dict)

    @classmethod
    def of(cls, numbers: Tensor, sizes: Sizes) -> Pack:
        t, n, s = sizes
        ids, pos, row, back, grid, *ends = numbers.split([t, t, t, t, n * s, n, n, n])
        return cls(ids, pos, row, back, grid.view(n, s), *ends)

    def rooms(self, like: Tensor, heads: int, groups: int, d: int) -> Laid:
        """Zeros for q, k and v, the same for every layer: what no token is written to stays zero."""
        key = (heads, groups, d)
        if key not in self.laid:
            n, s = self.grid.shape
            q, k, v = (like.new_zeros(n, s, count, d) for count in (heads, groups, groups))
            self.laid[key] = q, k, v
        return self.laid[key]


# --- queries, keys and values in rows -------------------------------------------------------------------------------


def lay(pack: Pack, q: Tensor, k: Tensor, v: Tensor) -> Laid:
    """Tokens (t h d) in rows (n s h d)."""
    return q[pack.grid], k[pack.grid], v[pack.grid]


@jit
def _lay(
    qkv,
    cos,
    sin,
    pos,
    row,
    back,
    q,
    k,
    v,
    keys,
    values,
    length,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    ROPE: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    t = tl.program_id(0).to(tl.int64)
    r, half = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    at, home = tl.load(pos + t), tl.load(row + t)
    to = tl.load(back + t)
    mine = qkv + t * ((H + 2 * G) * D) + r * D + half
    a = tl.load(mine, mask=r < H + 2 * G, other=0.0).to(tl.float32)
    b = tl.load(mine + HALF, mask=r < H + 2 * G, other=0.0).to(tl.float32)
    if ROPE:
        c = tl.where(r < H + G, tl.load(cos + at * HALF + half).to(tl.float32), 1.0)
        s = tl.where(r < H + G, tl.load(sin + at * HALF + half).to(tl.float32), 0.0)
        a, b = a * c - b * s, b * c + a * s
    a, b = a.to(q.dtype.element_ty), b.to(q.dtype.element_ty)
    spot = (home * length + at) * G
    is_q, is_k, is_v = r < H, (r >= H) & (r < H + G), (r >= H + G) & (r < H + 2 * G)
    to_q = q + (to * H + r) * D + half
    tl.store(to_q, a, mask=is_q)
    tl.store(to_q + HALF, b, mask=is_q)
    to_k = (r - H) * D + half
    tl.store(k + to * G * D + to_k, a, mask=is_k)
    tl.store(k + to * G * D + to_k + HALF, b, mask=is_k)
    tl.store(keys + spot * D + to_k, a, mask=is_k)
    tl.store(keys + spot * D + to_k + HALF, b, mask=is_k)
    to_v = (r - H - G) * D + half
    tl.store(v + to * G * D + to_v, a, mask=is_v)
    tl.store(v + to * G * D + to_v + HALF, b, mask=is_v)
    tl.store(values + spot * D + to_v, a, mask=is_v)
    tl.store(values + spot * D + to_v + HALF, b, mask=is_v)


def lay_qkv(
    qkv: Tensor,
    pack: Pack,
    keys: Tensor,
    values: Tensor,
    heads: int,
    angles: tuple[Tensor, Tensor] | None,
) -> Laid:
    """qkv (t, (h + 2g) d) before RoPE: keys and values into the caches (b s g d), and q, k, v in rows (n s . d).
    Equals `turn`, indexing and `lay`; see test_gpu_lay_matches_indexing."""
    length, g, d = keys.shape[1:]
    rooms = pack.rooms(qkv, heads, g, d)
    cos, sin = (qkv, qkv) if angles is None else angles
    _lay[(len(qkv),)](
        qkv,
        cos,
        sin,
        pack.pos,
        pack.row,
        pack.back,
        *rooms,
        keys,
        values,
        length,
        H=heads,
        G=g,
        D=d,
        HEADS=triton.next_power_of_2(heads + 2 * g),
        ROPE=angles is not None,
        num_warps=4,
    )
    return rooms


def attend(laid: Laid, pack: Pack, scale: float, window: int | None) -> Tensor:
    """Causal attention of q (n s h d) over k (n s g d), v (n s g e), back as tokens (t, h e)."""
    q, k, v = laid
    mask = None
    if window is not None:
        at = torch.arange(q.shape[1], device=q.device)
        gap = at[:, None] - at
        mask = (gap >= 0) & (gap < window)
    o = fused(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask,
        causal=mask is None,
        scale=scale,
    )
    return o.transpose(1, 2).flatten(2).flatten(0, 1)[pack.back]
