"""Attention over prompts that are laid end to end, (t ...); only attention lays them out in rows (n s).

One kernel turns queries and keys, stores keys and values in the pages of a cache, and lays all three out for torch's
attention; `lay` is that in torch. What that has no form for (windows, sinks, a softcap, a text whose beginning is in
the cache already) attends to the pages instead, by a kernel of ours.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from regard.kernels.fused import by_document, fused
from regard.kernels.triton.attention import _heads, _mean_square, _score, scaled
from regard.kernels.triton.linear import Rms, jit, triton

if triton is not None:
    import triton.language as tl

# q (n s h d), k and v (n s g d); or end to end: (t h d) and (t g d).
Laid = tuple[Tensor, Tensor, Tensor]


class Prompts(Protocol):
    """n prompts that lie end to end, t tokens in all, s the most of one."""

    pos: Tensor  # (t) their positions,
    row: Tensor  # (t) their prompts,
    back: Tensor  # (t) their places in (n s)
    order: Tensor  # (t) and end to end
    grid: Tensor  # (n s) the token at each place
    table: Tensor  # (n places) each prompt's pages,
    starts: Tensor  # (n) how much of its text the cache has
    totals: Tensor  # (n) and will have
    ends: Tensor  # (n + 1) where each begins, and the last ends

    @property
    def longest(self) -> int: ...  # tokens of a prompt

    @property
    def whole(self) -> int: ...  # tokens of a text, where the cache has some of one

    def rooms(self, like: Tensor, heads: int, groups: int, d: int, rows: bool) -> Laid: ...


# --- queries, keys and values in rows -------------------------------------------------------------------------------


def lay(pack: Prompts, q: Tensor, k: Tensor, v: Tensor) -> Laid:
    """Tokens (t h d) in rows (n s h d)."""
    return q[pack.grid], k[pack.grid], v[pack.grid]


@jit
def _lay(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
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
    eps,
    shift,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    WHOLE: tl.constexpr,
    TURN: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """The queries of a token, its keys, or its values."""
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.load(pos + t)
    page = tl.load(table + tl.load(row + t) * places + at // PAGE)
    to = tl.load(back + t)
    spot = (page * PAGE + at % PAGE) * G * D
    mine = qkv + t * ((H + 2 * G) * D)
    kind = q.dtype.element_ty
    i = tl.arange(0, WIDTH)[None, :]
    cos += at * (TURN // 2)
    sin += at * (TURN // 2)
    square = 0.0
    if part == 0:
        each = tl.arange(0, HEADS)[:, None]
        if WHOLE:
            square = _mean_square(mine, 0, kind, H, HEADS, D, WIDTH, 1)
        queries = _heads(
            mine, tl.minimum(each, H - 1), 0, q_norm, square, eps, shift, cos, sin, kind,
            D, WIDTH, 1, NORM, WHOLE, TURN, PAIRED
        )  # fmt: skip
        tl.store(q + (to * H + each) * D + i, queries, mask=(each < H) & (i < D))
    else:
        r = tl.arange(0, GROUPS)[:, None]
        head, place, real = tl.minimum(r, G - 1), r * D + i, (r < G) & (i < D)
        if part == 1:
            if WHOLE:
                square = _mean_square(mine + H * D, 0, kind, G, GROUPS, D, WIDTH, 1)
            a = _heads(
                mine + H * D, head, 0, k_norm, square, eps, shift, cos, sin, kind,
                D, WIDTH, 1, NORM, WHOLE, TURN, PAIRED
            )  # fmt: skip
            tl.store(k + to * G * D + place, a, mask=real)
            tl.store(keys + spot + place, a, mask=real)
        else:
            a = tl.load(mine + (H + G) * D + place, mask=real).to(kind)
            tl.store(v + to * G * D + place, a, mask=real)
            tl.store(values + spot + place, a, mask=real)


def lay_qkv(
    qkv: Tensor,
    pack: Prompts,
    keys: Tensor,
    values: Tensor,
    heads: int,
    angles: tuple[Tensor, Tensor] | None,
    *,
    paired: bool = False,
    norms: tuple[Rms, Rms] | None = None,
    whole: bool = False,
    rows: bool = True,
) -> Laid:
    """qkv (t, (h + 2g) d) before norms and RoPE, which are as in `decode`: keys and values into their pages (pages page
    g d), and q, k, v in rows (n s . d), or end to end (t . d). Equals `rotate`, indexing and `lay`; see
    test_gpu_lay_matches_indexing."""
    page, g, d = keys.shape[1:]
    rooms = pack.rooms(qkv, heads, g, d, rows)
    cos, sin = (qkv, qkv) if angles is None else angles
    _lay[(len(qkv), 3)](
        qkv,
        cos,
        sin,
        *((qkv, qkv) if norms is None else (norms[0][0], norms[1][0])),
        pack.pos,
        pack.row,
        pack.back if rows else pack.order,
        pack.table,
        *rooms,
        keys,
        values,
        pack.table.shape[1],
        *((0.0, 0.0) if norms is None else norms[0][1:]),
        H=heads,
        G=g,
        D=d,
        WIDTH=triton.next_power_of_2(d),
        HEADS=triton.next_power_of_2(heads),
        GROUPS=triton.next_power_of_2(g),
        PAGE=page,
        NORM=norms is not None,
        WHOLE=whole,
        TURN=0 if angles is None else 2 * cos.shape[1],
        PAIRED=paired,
        num_warps=4,
    )
    return rooms


def gap(laid: Laid, pack: Prompts) -> Tensor:
    """How many tokens back each key is from each query: (n s S)."""
    q, k, _ = laid
    at = torch.arange(q.shape[1], device=q.device)[None]
    if pack.whole:
        at = at + pack.starts[:, None]
    return at[:, :, None] - torch.arange(k.shape[1], device=q.device)


def seen(laid: Laid, pack: Prompts, window: int | None) -> Tensor:
    """Which keys each query may see: (n 1 s S)."""
    back = gap(laid, pack)
    mask = (back >= 0) if window is None else (back >= 0) & (back < window)
    return mask[:, None]


def attend(laid: Laid, pack: Prompts, scale: float, window: int | None) -> Tensor:
    """Causal attention of q (n s h d) over k, v of the same tokens, or of whole texts (n S g d) where some of them was
    in the cache; or of prompts that lie end to end. Back as tokens (t, h e)."""
    if laid[0].dim() == 3:
        q, k, v = (x.transpose(0, 1)[None] for x in laid)
        o = by_document(q, k, v, pack.ends.int(), pack.longest, True, scale)
        # Spare tokens are of no prompt: they have what the last token has.
        return o[0].transpose(0, 1).flatten(1)[pack.order]
    q, k, v = (x.transpose(1, 2) for x in laid)
    mask = seen(laid, pack, window) if pack.whole or window is not None else None
    o = fused(q, k, v, mask, causal=mask is None, scale=scale)
    return o.transpose(1, 2).flatten(2).flatten(0, 1)[pack.back]


@jit
def _pages(
    q,
    keys,
    values,
    table,
    starts,
    totals,
    sinks,
    out,
    size,
    places,
    scale,
    cap,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    CAP: tl.constexpr,
    EXACT: tl.constexpr,
):
    """BLOCK_Q tokens of a prompt and one head over the pages of its text, with a running maximum and sum."""
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    n, first, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_Q, tl.program_id(2)
    start, end = tl.load(starts + n).to(tl.int32), tl.load(totals + n).to(tl.int32)
    i, full = first + tl.arange(0, BLOCK_Q), tl.arange(0, WIDTH)[None, :]
    pos = start + i
    home = ((n * size + i)[:, None] * H + head) * D + full
    real = (i < size)[:, None] & (full < D)
    x_q = tl.load(q + home, mask=real, other=0.0)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    if SINKS:
        top = total + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    low = 0
    if WINDOW:
        low = tl.maximum(start + first + 1 - WINDOW, 0) // BLOCK_S * BLOCK_S
    high = tl.minimum(end, start + first + BLOCK_Q)
    for s0 in tl.range(low, high, BLOCK_S):
        at = s0 + tl.arange(0, BLOCK_S)
        page = tl.load(table + n * places + tl.minimum(at, end - 1) // PAGE)
        place = ((page * PAGE + at % PAGE) * G + head // (H // G)) * D
        there = (at < high)[:, None] & (full < D)
        k = tl.load(keys + place[:, None] + full, mask=there, other=0.0)
        x = _score(tl.dot(x_q, tl.trans(k), input_precision=precision), scale, cap, CAP)
        gap = pos[:, None] - at[None, :]
        seen = (gap >= 0) & (gap < WINDOW) if WINDOW else gap >= 0
        x = tl.where(seen, x, float("-inf"))
        new = tl.maximum(top, tl.max(x, 1))
        # Of a row that has seen nothing yet, exp(-inf - -inf) counts as 0.
        safe = tl.where(new == float("-inf"), 0.0, new)
        shrink, p = tl.exp2(top - safe), tl.exp2(x - safe[:, None])
        v = tl.load(values + place[:, None] + full, mask=there, other=0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=precision)
        top = new
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + home, acc.to(out.dtype.element_ty), mask=real)


def over_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pack: Prompts,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` of q (n s h d) over pages (pages page g d) that hold the texts, whatever torch's kernels have no form
    for: windows that are not read as a mask, a softcap, sinks, texts that began before. Back as tokens (t, h d)."""
    (n, s, h, d), (_, page, g, _) = q.shape, keys.shape
    exact, out = q.element_size() == 4, torch.empty_like(q)
    block = 32 if exact or d > 128 else 64
    _pages[(n, triton.cdiv(s, block), h)](
        q,
        keys,
        values,
        pack.table,
        pack.starts,
        pack.totals,
        q if sinks is None else sinks,
        out,
        s,
        pack.table.shape[1],
        *scaled(scale, softcap),
        H=h,
        G=g,
        D=d,
        WIDTH=triton.next_power_of_2(d),
        PAGE=page,
        BLOCK_Q=block,
        BLOCK_S=block,
        WINDOW=window or 0,
        SINKS=sinks is not None,
        CAP=softcap is not None,
        EXACT=q.dtype == torch.float32,
        num_warps=4,
    )
    return out.flatten(2).flatten(0, 1)[pack.back]
