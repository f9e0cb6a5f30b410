"""Attention of one new token a row over a cache on a GPU: grouped heads, any lengths, rows of memory or pages.

    python bench/gpu_kernels.py --part k      checks and times it against torch's

A program takes all query heads of one group and a part of the keys (flash-decoding), turns its queries (RoPE), and a
second kernel merges the parts by their log-sum-exp. The first part also turns the new key, stores it and the new value
in the cache, and starts its sums with them, so that nobody reads what is being written.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.kernels.triton.linear import jit, launch, ready, triton

if triton is not None:
    import triton.language as tl

PROGRAMS = 264  # two for each of an H200's 132 multiprocessors
TILES = {
    64: (64, 4, 2),
    128: (64, 4, 2),
    256: (32, 4, 2),
}  # head width -> keys a step, warps, stages


# --- the plain form -----------------------------------------------------------------------------------------------


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale + bias) v over the first `lengths` (b) keys of each row, the last `window` of them; `bias`
    (h n) of keys so many tokens back, the last for all farther ones. q (b h d), k (b s g d), v (b s g e) -> (b h e)."""
    b, h, _ = q.shape
    s, g = k.shape[1:3]
    at = torch.arange(s, device=q.device)
    seen = at < lengths[:, None]  # b s
    if window is not None:
        seen &= at >= lengths[:, None] - window
    q = q.view(b, g, h // g, -1).float()
    scores = torch.einsum("bgrd,bsgd->bgrs", q, k.float()) * scale
    if bias is not None:
        gap = (lengths[:, None] - 1 - at).clamp(0, bias.shape[1] - 1)
        scores = scores + bias[:, gap].transpose(0, 1).float().view_as(scores)
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bgrs,bsge->bgre", weights, v.float()).flatten(1, 2).to(v.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on halves: x (b n d), cos and sin (b d/2)."""
    a, b = x.float().chunk(2, -1)
    c, s = cos[:, None].float(), sin[:, None].float()
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


# --- the kernels --------------------------------------------------------------------------------------------------


@jit
def _place(table, b, s, row, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Where token s of row b begins: `row` tokens a row, or pages named by a table with `row` entries a row."""
    if PAGE:
        page = tl.load(table + b * row + s // PAGE).to(tl.int64)
        return (page * PAGE + s % PAGE) * (G * D)
    return (b * row + s).to(tl.int64) * (G * D)


@jit
def _read(x, stride, kind, PARTS: tl.constexpr):
    """What lies at pointers x, rounded to `kind`; or the sum of PARTS that lie `stride` apart."""
    a = tl.load(x)
    if PARTS > 1:
        for p in tl.static_range(1, PARTS):
            a += tl.load(x + p * stride)
    return a.to(kind)


@jit
def _turned(x, stride, cos, sin, kind, HALF: tl.constexpr, PARTS: tl.constexpr, ROPE: tl.constexpr):
    """Heads at pointers x (r 1), turned by cos and sin (1 HALF): (r 2 HALF)."""
    half = tl.arange(0, HALF)[None, :]
    a = _read(x + half, stride, kind, PARTS)
    b = _read(x + HALF + half, stride, kind, PARTS)
    if ROPE:
        a, b = a.to(tl.float32), b.to(tl.float32)
        a, b = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (x.shape[0], 2 * HALF))


@jit
def _split(
    qkv,
    keys,
    values,
    table,
    pos,
    cos,
    sin,
    bias,
    part,
    stat,
    out,
    row,
    stride,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    ROPE: tl.constexpr,
    NEW: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    LOG2E: tl.constexpr = 1.4426950408889634
    R: tl.constexpr = H // G
    HALF: tl.constexpr = D // 2
    WIDE: tl.constexpr = (H + 2 * G) * D if NEW else H * D
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    b, g, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(pos + b).to(tl.int32)  # keys in the cache, the new one not among them
    half, full = tl.arange(0, HALF)[None, :], tl.arange(0, D)
    r = tl.arange(0, BLOCK_R)
    kind = keys.dtype.element_ty
    c, s = 1.0, 0.0
    if ROPE:
        c = tl.load(cos + length * HALF + half).to(tl.float32)
        s = tl.load(sin + length * HALF + half).to(tl.float32)
    mine = qkv + b * WIDE
    head = g * R + tl.minimum(r, R - 1)
    q = _turned(mine + head[:, None] * D, stride, c, s, kind, HALF, PARTS, ROPE)

    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, D], tl.float32)
    low = 0
    if NEW:
        one = tl.zeros([1, 1], tl.int32)
        nk = _turned(mine + (H + g) * D + one, stride, c, s, kind, HALF, PARTS, ROPE)  # 1 D
        nv = _read(mine + (H + G + g) * D + full, stride, kind, PARTS)
        if split == 0:
            spot = _place(table, b, length, row, G, D, PAGE) + g * D
            tl.store(keys + spot + full[None, :], nk)
            tl.store(values + spot + full, nv)
            top = tl.sum(q.to(tl.float32) * nk.to(tl.float32), 1) * scale
            if BIAS:
                top += tl.load(bias + head * BIAS).to(tl.float32) * LOG2E
            total = tl.full([BLOCK_R], 1.0, tl.float32)
            acc += nv.to(tl.float32)[None, :]
        if WINDOW:
            low = tl.maximum(length + 1 - WINDOW, 0)
    elif WINDOW:
        low = tl.maximum(length - WINDOW, 0)

    each = tl.cdiv(tl.cdiv(length - low, SPLITS), BLOCK_S) * BLOCK_S
    start = low + split * each
    end = tl.minimum(start + each, length)
    for s0 in tl.range(start, end, BLOCK_S, num_stages=STAGES):
        at = s0 + tl.arange(0, BLOCK_S)
        valid = at < end
        place = _place(table, b, tl.minimum(at, length - 1), row, G, D, PAGE) + g * D
        k = tl.load(keys + place[:, None] + full[None, :], mask=valid[:, None], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        if BIAS:
            gap = tl.maximum(tl.minimum(length - at if NEW else length - 1 - at, BIAS - 1), 0)
            x += tl.load(bias + head[:, None] * BIAS + gap[None, :]).to(tl.float32) * LOG2E
        x = tl.where(valid[None, :], x, float("-inf"))
        new = tl.maximum(top, tl.max(x, 1))
        shrink, p = tl.exp2(top - new), tl.exp2(x - new[:, None])
        v = tl.load(values + place[:, None] + full[None, :], mask=valid[:, None], other=0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(kind), v, acc * shrink[:, None], input_precision=precision)
        top = new

    real = (r < R)[:, None]
    if SPLITS == 1:
        to = out + (b * H + head[:, None]) * D + full[None, :]
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        to = (b * H + head) * SPLITS + split
        tl.store(part + to[:, None] * D + full[None, :], acc, mask=real)
        tl.store(stat + to * 2, top, mask=r < R)
        tl.store(stat + to * 2 + 1, total, mask=r < R)


@jit
def _merge(part, stat, out, D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """sum_i 2^(top_i - top) acc_i / sum_i 2^(top_i - top) total_i, one head a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, SPLITS), tl.arange(0, D)
    top = tl.load(stat + (head * SPLITS + i) * 2)
    total = tl.load(stat + (head * SPLITS + i) * 2 + 1)
    share = tl.exp2(top - tl.max(top, 0))
    acc = tl.load(part + (head * SPLITS + i)[:, None] * D + d[None, :])
    y = tl.sum(acc * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + head * D + d, y.to(out.dtype.element_ty))


# --- calls --------------------------------------------------------------------------------------------------------


def splits_for(groups: int, length: int, tile: int) -> int:
    """Parts of the keys: enough programs for the chip, none with less than a step of keys; a power of two <= 64."""
    most = max(1, min(64, PROGRAMS // max(groups, 1), length // tile))
    return 1 << (most.bit_length() - 1)


def rooms(like: Tensor, b: int, h: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """out (b h d); and, of n > 1 parts, their sums (b h n d) and their maxima and totals (b h n 2)."""
    out = torch.empty(b, h, d, dtype=like.dtype, device=like.device)
    if n == 1:
        return out, out, out
    both = torch.empty(b * h * n * (d + 2), dtype=torch.float32, device=like.device)
    part, stat = both.split([b * h * n * d, b * h * n * 2])
    return out, part.view(b, h, n, d), stat.view(b, h, n, 2)


def merge(part: Tensor, stat: Tensor, out: Tensor) -> None:
    """Parts (b h n d) and their maxima and sums (b h n 2) into out (b h d)."""
    b, h, n, d = part.shape
    pdl, extra = launch(part)
    warps = max(1, min(16, n * d // 2048))
    _merge[(b * h,)](part, stat, out, D=d, SPLITS=n, PDL=pdl, num_warps=warps, **extra)


def suits(q_heads: int, groups: int, d: int, x: Tensor) -> bool:
    """Whether the kernel can do it: 32, 64, 128 or 256 wide heads, at most 64 of them a group."""
    return ready(x) and d in (32, 64, 128, 256) and q_heads // groups <= 64


def decode(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    *,
    heads: int,
    scale: float,
    angles: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    table: Tensor | None = None,
    new: bool = True,
    bound: int | None = None,
    splits: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Store the new key and value at `pos` (b) and attend to all up to it: (b h d).

    qkv (b, (h + 2g) d) = [q | k | v] before RoPE, or parts (n b ..) of that sum; `angles`: cos and sin (s d/2), halves
    layout. k, v (b s g d), or with a block table (b pages, int32) pools (pages page g d). new=False: qkv is q alone and
    `pos` counts the keys. `bound`, the longest row, decides the parts. `bias` (h n): see `reference`.
    Test: test_gpu_attention_matches_attend."""
    b, (g, d) = qkv.shape[-2], k.shape[2:]
    page, row = (0, k.shape[1]) if table is None else (k.shape[1], table.shape[1])
    whole, (tile, warps, stages) = qkv if qkv.dim() == 3 else qkv[None], TILES.get(d, (64, 4, 3))
    n = splits or splits_for(b * g, bound or row * max(page, 1), tile)
    out, part, stat = rooms(v, b, heads, n, d)
    (cos, sin), (pdl, extra) = (qkv, qkv) if angles is None else angles, launch(qkv)
    _split[(b, g, n)](
        qkv,
        k,
        v,
        pos if table is None else table,
        pos,
        cos,
        sin,
        qkv if bias is None else bias,
        part,
        stat,
        out,
        row,
        whole[0].numel(),
        scale * math.log2(math.e),
        H=heads,
        G=g,
        D=d,
        BLOCK_R=max(16, 1 << (heads // g - 1).bit_length()),
        BLOCK_S=tile,
        SPLITS=n,
        STAGES=stages,
        WINDOW=window or 0,
        PAGE=page,
        PARTS=len(whole),
        ROPE=angles is not None,
        NEW=new,
        BIAS=0 if bias is None else bias.shape[1],
        EXACT=k.dtype == torch.float32,
        PDL=pdl,
        num_warps=warps,
        **extra,
    )
    if n > 1:
        merge(part, stat, out)
    return out
