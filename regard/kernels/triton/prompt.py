"""Prompts laid end to end, (t ...), so that no matrix product sees padding; only attention lays them out in rows (n s).

Sizes are rounded up, so that a few CUDA graphs hold every pass: spare tokens repeat the last one, spare prompts the
last prompt, and both write again what it wrote. One kernel turns queries and keys, stores keys and values in the pages
of a cache, and lays all three out for torch's attention; `lay` is that in torch. A prompt whose beginning is in the
cache already attends to its pages instead.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.fused import fused
from regard.kernels.triton.linear import jit, triton

if triton is not None:
    import triton.language as tl

Laid = tuple[Tensor, Tensor, Tensor]  # q (n s h d), k and v (n s g d)


@dataclass
class Part:
    """Tokens of a prompt that are read now, after `start` that the cache has, into the pages of the whole text."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    # What begins to write when the prompt is through: rows of the decoder, and how many tokens each has said.
    ends: Sequence[tuple[int, int]] = ()
    # Of an encoder-decoder: a row that knows the source's pages, and the source's tokens.
    home: int = 0
    source: int = 0


class Sizes(NamedTuple):
    tokens: int
    prompts: int
    longest: int  # tokens of a prompt
    whole: int  # tokens of a text, what is in the cache among them; 0 where nothing is
    places: int  # pages of a text
    ends: int
    source: int  # tokens of the longest source


def up(n: int, least: int = 64) -> int:
    """n rounded up to a multiple of `least`, in steps of a quarter above 4 `least`."""
    step = max(least, 1 << max(0, (n - 1).bit_length() - 3))
    return -(-n // step) * step


def two(n: int) -> int:
    """The smallest power of two from n on; 0 of 0."""
    return 1 << (n - 1).bit_length() if n else 0


def sizes_of(parts: Sequence[Part], page: int) -> Sizes:
    longest = up(max(len(p.tokens) for p in parts), 32)
    whole = up(max(p.start + len(p.tokens) for p in parts)) if any(p.start for p in parts) else 0
    return Sizes(
        up(sum(len(p.tokens) for p in parts)),
        two(len(parts)),
        longest,
        whole,
        -(-max(whole, longest) // page),
        two(sum(len(p.ends) for p in parts)),
        two(max(p.source for p in parts)),
    )


def flat(parts: Sequence[Part], sizes: Sizes) -> Tensor:
    """All the numbers of a Pack, in its order, for one copy to the device."""
    count = torch.tensor([len(p.tokens) for p in parts])
    start, home = torch.tensor([(p.start, p.home) for p in parts]).T
    first = count.cumsum(0) - count
    row = torch.arange(len(parts)).repeat_interleave(count)
    ids = torch.tensor([token for p in parts for token in p.tokens])
    place = torch.arange(len(ids)) - first[row]
    # A spare place of a prompt has its last token, a spare page its last page.
    grid = first[:, None] + torch.arange(sizes.longest).minimum(count[:, None] - 1)
    pages = [[*p.pages[: sizes.places]] for p in parts]
    table = torch.tensor([each + each[-1:] * (sizes.places - len(each)) for each in pages])
    ends = [
        (end - 1, *writer, size)
        for p, end, size in zip(
            parts, (first + count).tolist(), (start + count).tolist(), strict=True
        )
        for writer in p.ends
    ]
    columns = torch.tensor(ends, dtype=torch.long).view(-1, 4).T
    by_token = (ids, start[row] + place, row, row * sizes.longest + place)
    each = [
        *(_filled(x, sizes.tokens) for x in by_token),
        *(_filled(x, sizes.prompts) for x in (grid, table, start, start + count, home)),
        *(_filled(x, sizes.ends) for x in columns),
    ]
    return torch.cat([x.flatten() for x in each])


def _filled(x: Tensor, size: int) -> Tensor:
    """The last of x repeated up to a size."""
    return torch.cat([x, x[-1:].expand(size - len(x), *x.shape[1:])])


@dataclass
class Pack:
    """Prompts on the device, int64."""

    sizes: Sizes
    ids: Tensor  # (t) tokens,
    pos: Tensor  # (t) their positions,
    row: Tensor  # (t) their prompts
    back: Tensor  # (t) and their places in (n s)
    grid: Tensor  # (n s) the token at each place
    table: Tensor  # (n places) each prompt's pages,
    starts: Tensor  # (n) how much of its text the cache has
    totals: Tensor  # (n) and will have
    homes: Tensor  # (n) and a row that knows its source
    last: Tensor  # (e) the last token of those that are through,
    rows: Tensor  # (e) where each goes on,
    said: Tensor  # (e) what it has said
    lengths: Tensor  # (e) and the length of its text
    laid: dict[tuple[int, ...], Laid] = field(default_factory=dict)

    @classmethod
    def of(cls, numbers: Tensor, sizes: Sizes) -> Pack:
        t, n, s, _, places, e, _ = sizes
        each = numbers.split([t, t, t, t, n * s, n * places, n, n, n, e, e, e, e])
        ids, pos, row, back, grid, table, *rest = each
        return cls(sizes, ids, pos, row, back, grid.view(n, s), table.view(n, places), *rest)

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
    table,
    q,
    k,
    v,
    keys,
    values,
    places,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    ROPE: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    t = tl.program_id(0).to(tl.int64)
    r, half = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    at = tl.load(pos + t)
    page = tl.load(table + tl.load(row + t) * places + at // PAGE)
    to = tl.load(back + t)
    mine = qkv + t * ((H + 2 * G) * D) + r * D + half
    a = tl.load(mine, mask=r < H + 2 * G, other=0.0).to(tl.float32)
    b = tl.load(mine + HALF, mask=r < H + 2 * G, other=0.0).to(tl.float32)
    if ROPE:
        c = tl.where(r < H + G, tl.load(cos + at * HALF + half).to(tl.float32), 1.0)
        s = tl.where(r < H + G, tl.load(sin + at * HALF + half).to(tl.float32), 0.0)
        a, b = a * c - b * s, b * c + a * s
    a, b = a.to(q.dtype.element_ty), b.to(q.dtype.element_ty)
    spot = (page * PAGE + at % PAGE) * G
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
    """qkv (t, (h + 2g) d) before RoPE: keys and values into their pages (pages page g d), and q, k, v in rows
    (n s . d). Equals `turn`, indexing and `lay`; see test_gpu_lay_matches_indexing."""
    page, g, d = keys.shape[1:]
    rooms = pack.rooms(qkv, heads, g, d)
    cos, sin = (qkv, qkv) if angles is None else angles
    _lay[(len(qkv),)](
        qkv,
        cos,
        sin,
        pack.pos,
        pack.row,
        pack.back,
        pack.table,
        *rooms,
        keys,
        values,
        pack.table.shape[1],
        H=heads,
        G=g,
        D=d,
        HEADS=triton.next_power_of_2(heads + 2 * g),
        PAGE=page,
        ROPE=angles is not None,
        num_warps=4,
    )
    return rooms


def biased(bias: Tensor, gap: Tensor, seen: Tensor) -> Tensor:
    """bias (h n) of keys that are `gap` (b ...) tokens back, -inf where they are not seen: (b h ...)."""
    more = bias[:, gap.clamp(0, bias.shape[1] - 1)].transpose(0, 1)
    return more.masked_fill(~seen[:, None], -torch.inf)


def attend(
    laid: Laid, pack: Pack, scale: float, window: int | None, bias: Tensor | None = None
) -> Tensor:
    """Causal attention of q (n s h d) over k, v of the same tokens, or of whole texts (n S g d) where some of them was
    in the cache; back as tokens (t, h e). `bias` (h n): on the score of a key so many tokens back."""
    q, k, v = laid
    mask = None
    if pack.sizes.whole or window is not None or bias is not None:
        at = torch.arange(q.shape[1], device=q.device)[None]
        if pack.sizes.whole:
            at = at + pack.starts[:, None]
        gap = at[:, :, None] - torch.arange(k.shape[1], device=q.device)
        mask = (gap >= 0) if window is None else (gap >= 0) & (gap < window)
        mask = mask[:, None] if bias is None else biased(bias, gap, mask).to(q.dtype)
    o = fused(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask,
        causal=mask is None,
        scale=scale,
    )
    return o.transpose(1, 2).flatten(2).flatten(0, 1)[pack.back]
