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

from regard.kernels.packed import Weight
from regard.kernels.triton import dense
from regard.kernels.triton.linear import Rms, _ahead, jit, launch, ready, triton

if triton is not None:
    import triton.language as tl

PROGRAMS = 264  # two for each of an H200's 132 multiprocessors
TILES = {
    64: (64, 4, 2),
    128: (64, 4, 2),
    256: (32, 4, 2),
}  # head width -> keys a step, warps, stages
FULL = {64: (128, 4, 2)}  # the same where rows fill the chip without parts


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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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
def _read(x, i, stride, kind, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Features i of what begins at x, or the sum of PARTS that lie `stride` apart, as `kind`; from D on zero."""
    if D == WIDTH:
        a = tl.load(x + i)
        for p in tl.static_range(1, PARTS):
            a += tl.load(x + i + p * stride)
    else:
        a = tl.load(x + i, mask=i < D, other=0.0)
        for p in tl.static_range(1, PARTS):
            a += tl.load(x + i + p * stride, mask=i < D, other=0.0)
    return a.to(kind)


@jit
def _mean_square(
    x, stride, kind, N: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of the N heads that begin at x, BLOCK a power of two from N on."""
    r, i = tl.arange(0, BLOCK)[:, None], tl.arange(0, WIDTH)[None, :]
    a = _read(x + tl.minimum(r, N - 1) * D, i, stride, kind, D, WIDTH, PARTS).to(tl.float32)
    return tl.sum(tl.sum(tl.where(r < N, a * a, 0.0), 1), 0) / (N * D)


@jit
def _heads(
    x,
    head,
    stride,
    weight,
    square,
    eps,
    shift,
    cos,
    sin,
    kind,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    WHOLE: tl.constexpr,
    TURN: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Heads `head` (r 1) of those that begin at x, normed each by itself (WHOLE: all by their mean `square`), their
    first TURN features turned by the angles at cos and sin: (r WIDTH). A feature's partner is read beside it."""
    i = tl.arange(0, WIDTH)[None, :]
    x = x + head * D
    a = _read(x, i, stride, kind, D, WIDTH, PARTS)
    if NORM:
        weight += head * D if WHOLE else head * 0
        wide = a.to(tl.float32)
        if not WHOLE:
            square = tl.sum(wide * wide, 1)[:, None] / D
        factor = tl.rsqrt(square + eps)
        gain = _read(weight, i, 0, tl.float32, D, WIDTH, 1) + shift
        a = (wide * factor * gain).to(kind)
    if TURN:
        HALF: tl.constexpr = TURN // 2
        if PAIRED:
            first, pair, j = i % 2 == 0, i // 2, i ^ 1
        else:
            # Of features that do not turn, any: their sine is 0.
            first, pair, j = i < HALF, i % HALF, (i + HALF) % TURN
        b = _read(x, j, stride, kind, D, WIDTH, PARTS)
        if NORM:
            gain = _read(weight, j, 0, tl.float32, D, WIDTH, 1) + shift
            b = (b.to(tl.float32) * factor * gain).to(kind)
        c = tl.load(cos + pair, mask=i < TURN, other=1.0).to(tl.float32)
        s = tl.load(sin + pair, mask=i < TURN, other=0.0).to(tl.float32)
        a = (a.to(tl.float32) * c + b.to(tl.float32) * tl.where(first, -s, s)).to(kind)
    return a


@jit
def _score(x, scale, cap, CAP: tl.constexpr):
    """Products become scores in powers of two; CAP: cap tanh(x scale / 2), of which scale and cap make a softcap."""
    x = x * scale
    return cap * (2.0 * tl.sigmoid(x) - 1.0) if CAP else x


@jit
def _span(
    length, split, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """The first key in the cache that a part sees, and the one after its last."""
    low = 0
    if WINDOW:
        low = tl.maximum(length + NEW - WINDOW, 0)
    each = tl.cdiv(tl.cdiv(length - low, SPLITS), BLOCK_S) * BLOCK_S
    start = low + split * each
    return start, tl.minimum(start + each, length)


@jit
def _ask(
    keys, values, table, b, first, end, row,
    G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Have 128 tokens of row b brought into the GPU's cache, for all groups: every G-th from `first` on."""
    s = first + tl.arange(0, 128) * G
    place = _place(table, b, tl.maximum(tl.minimum(s, end - 1), 0), row, G, D, PAGE)
    size = tl.where(s < end, G * D * (keys.dtype.element_ty.primitive_bitwidth // 8), 0)
    _ahead(keys + place, size)
    _ahead(values + place, size)


@jit
def _split(
    qkv,
    keys,
    values,
    table,
    pos,
    cos,
    sin,
    q_norm,
    k_norm,
    sinks,
    bias,
    part,
    stat,
    out,
    row,
    stride,
    scale,
    cap,
    eps,
    shift,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    WHOLE: tl.constexpr,
    TURN: tl.constexpr,
    PAIRED: tl.constexpr,
    SINKS: tl.constexpr,
    CAP: tl.constexpr,
    NEW: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    R: tl.constexpr = H // G
    WIDE: tl.constexpr = (H + 2 * G) * D if NEW else H * D
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    b, g, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    # Read before the kernel before this one has ended: of a step only the last one moves positions and tables.
    length = tl.load(pos + b).to(tl.int32)  # keys in the cache, the new one not among them
    start, end = _span(length, split, SPLITS, BLOCK_S, WINDOW, NEW)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        _ask(keys, values, table, b, start + g, end, row, G, D, PAGE)
        tl.extra.cuda.gdc_wait()
    full = tl.arange(0, WIDTH)
    in_head = full < D
    r = tl.arange(0, BLOCK_R)
    kind = keys.dtype.element_ty
    cos += length * (TURN // 2)
    sin += length * (TURN // 2)
    mine = qkv + b * WIDE
    head = g * R + tl.minimum(r, R - 1)
    square = 0.0
    if WHOLE:
        square = _mean_square(mine, stride, kind, H, WHOLE, D, WIDTH, PARTS)
    q = _heads(
        mine, head[:, None], stride, q_norm, square, eps, shift, cos, sin, kind,
        D, WIDTH, PARTS, NORM, WHOLE, TURN, PAIRED
    )  # fmt: skip

    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, WIDTH], tl.float32)
    if NEW:
        new_k = mine + H * D
        if WHOLE:
            square = _mean_square(new_k, stride, kind, G, WHOLE, D, WIDTH, PARTS)
        one = tl.zeros([1, 1], tl.int32) + g
        nk = _heads(
            new_k, one, stride, k_norm, square, eps, shift, cos, sin, kind,
            D, WIDTH, PARTS, NORM, WHOLE, TURN, PAIRED
        )  # fmt: skip
        nv = _read(mine + (H + G + g) * D, full, stride, kind, D, WIDTH, PARTS)
        if split == 0:
            spot = _place(table, b, length, row, G, D, PAGE) + g * D
            tl.store(keys + spot + full[None, :], nk, mask=in_head[None, :])
            tl.store(values + spot + full, nv, mask=in_head)
            top = _score(tl.sum(q.to(tl.float32) * nk.to(tl.float32), 1), scale, cap, CAP)
            if BIAS:
                top += tl.load(bias + head * BIAS).to(tl.float32) * LOG2E
            total = tl.full([BLOCK_R], 1.0, tl.float32)
            acc += nv.to(tl.float32)[None, :]
    # Not one condition: the outer one is decided when this is compiled.
    if SINKS:  # noqa: SIM102
        if split == 0:
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            new = tl.maximum(top, sink)
            shrink = tl.exp2(top - new)
            total = total * shrink + tl.exp2(sink - new)
            acc = acc * shrink[:, None]
            top = new

    for s0 in tl.range(start, end, BLOCK_S, num_stages=STAGES):
        at = s0 + tl.arange(0, BLOCK_S)
        valid = at < end
        place = _place(table, b, tl.minimum(at, length - 1), row, G, D, PAGE) + g * D
        real = valid[:, None] if D == WIDTH else valid[:, None] & in_head[None, :]
        k = tl.load(keys + place[:, None] + full[None, :], mask=real, other=0.0)
        x = _score(tl.dot(q, tl.trans(k), input_precision=precision), scale, cap, CAP)
        if BIAS:
            gap = tl.maximum(tl.minimum(length - at if NEW else length - 1 - at, BIAS - 1), 0)
            x += tl.load(bias + head[:, None] * BIAS + gap[None, :]).to(tl.float32) * LOG2E
        x = tl.where(valid[None, :], x, float("-inf"))
        new = tl.maximum(top, tl.max(x, 1))
        shrink, p = tl.exp2(top - new), tl.exp2(x - new[:, None])
        v = tl.load(values + place[:, None] + full[None, :], mask=real, other=0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(kind), v, acc * shrink[:, None], input_precision=precision)
        top = new

    if SPLITS == 1:
        to = out + (b * H + head[:, None]) * D + full[None, :]
        inside = (r < R)[:, None] & in_head[None, :]
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        to = (b * H + head) * SPLITS + split
        tl.store(part + to[:, None] * WIDTH + full[None, :], acc, mask=(r < R)[:, None])
        tl.store(stat + to * 2, top, mask=r < R)
        tl.store(stat + to * 2 + 1, total, mask=r < R)


@jit
def _merge(
    part, stat, out, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr
):
    """sum_i 2^(top_i - top) acc_i / sum_i 2^(top_i - top) total_i, one head a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    top = tl.load(stat + (head * SPLITS + i) * 2)
    total = tl.load(stat + (head * SPLITS + i) * 2 + 1)
    share = tl.exp2(top - tl.max(top, 0))
    acc = tl.load(part + (head * SPLITS + i)[:, None] * WIDTH + d[None, :])
    y = tl.sum(acc * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + head * D + d, y.to(out.dtype.element_ty), mask=d < D)


# --- calls --------------------------------------------------------------------------------------------------------


def scaled(scale: float, softcap: float | None) -> tuple[float, float]:
    """What `_score` multiplies by: (scale, nothing), or what makes it softcap tanh(x scale / softcap)."""
    if softcap is None:
        return scale * math.log2(math.e), 0.0
    return 2 * scale / softcap, softcap * math.log2(math.e)


def splits_for(groups: int, length: int, tile: int) -> int:
    """Parts of the keys: enough programs for the chip, none with less than a step of keys; a power of two <= 64."""
    most = max(1, min(64, PROGRAMS // max(groups, 1), length // tile))
    return 1 << (most.bit_length() - 1)


def rooms(like: Tensor, b: int, h: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """out (b h d); and, of n > 1 parts, their sums (b h n w), w a power of two from d on, and their maxima and totals
    (b h n 2)."""
    out = torch.empty(b, h, d, dtype=like.dtype, device=like.device)
    if n == 1:
        return out, out, out
    w = triton.next_power_of_2(d)
    both = torch.empty(b * h * n * (w + 2), dtype=torch.float32, device=like.device)
    part, stat = both.split([b * h * n * w, b * h * n * 2])
    return out, part.view(b, h, n, w), stat.view(b, h, n, 2)


def merge(part: Tensor, stat: Tensor, out: Tensor) -> None:
    """Parts (b h n w) and their maxima and sums (b h n 2) into out (b h d)."""
    (b, h, n, w), d = part.shape, out.shape[-1]
    pdl, extra = launch(part)
    warps = max(1, min(16, n * w // 2048))
    _merge[(b * h,)](part, stat, out, D=d, WIDTH=w, SPLITS=n, PDL=pdl, num_warps=warps, **extra)


def suits(q_heads: int, groups: int, d: int, x: Weight) -> bool:
    """Whether the kernel can do it: heads of 16 to 256 features, at most 64 of them a group."""
    known = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return ready(x) and known and d % 8 == 0 and 16 <= d <= 256 and q_heads // groups <= 64


def decode(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    *,
    heads: int,
    scale: float,
    angles: tuple[Tensor, Tensor] | None = None,
    paired: bool = False,
    norms: tuple[Rms, Rms] | None = None,
    whole: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
    new: bool = True,
    bound: int | None = None,
    splits: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Store the new key and value at `pos` (b) and attend to all up to it: (b h d).

    qkv (b, (h + 2g) d) = [q | k | v] before norms and RoPE, or parts (n b ..) of that sum. `norms`: of queries and of
    keys, each head by itself or all as a `whole`; `angles`: cos and sin (s r/2) of the r features that turn, as halves
    or (`paired`) neighbours. k, v (b s g d), or with a block table (b pages, int32) pools (pages page g d). new=False:
    qkv is q alone and `pos` counts the keys. `bound`, the longest row, decides the parts; `bias` is `reference`'s.
    Test: test_gpu_attention_matches_attend."""
    b, (g, d) = qkv.shape[-2], k.shape[2:]
    page, row = (0, k.shape[1]) if table is None else (k.shape[1], table.shape[1])
    parts, width = qkv if qkv.dim() == 3 else qkv[None], triton.next_power_of_2(d)
    tiles = {**TILES, **FULL} if b * g >= PROGRAMS else TILES
    tile, warps, stages = tiles.get(width, (64, 4, 3))
    n = splits or splits_for(b * g, bound or row * max(page, 1), tile)
    out, part, stat = rooms(v, b, heads, n, d)
    plain = all(x is None for x in (norms, window, softcap, sinks, bias)) and new and not paired
    if plain and n == 1 and table is not None and dense.suits(heads, k, angles):
        dense.attend(qkv, k, v, pos, table, out, scale, angles or (qkv, qkv))
        return out
    (cos, sin), (pdl, extra) = (qkv, qkv) if angles is None else angles, launch(qkv)
    _split[(b, g, n)](
        qkv,
        k,
        v,
        pos if table is None else table,
        pos,
        cos,
        sin,
        *((qkv, qkv) if norms is None else (norms[0][0], norms[1][0])),
        qkv if sinks is None else sinks,
        qkv if bias is None else bias,
        part,
        stat,
        out,
        row,
        parts[0].numel(),
        *scaled(scale, softcap),
        *((0.0, 0.0) if norms is None else norms[0][1:]),
        H=heads,
        G=g,
        D=d,
        WIDTH=width,
        BLOCK_R=max(16, 1 << (heads // g - 1).bit_length()),
        BLOCK_S=tile,
        SPLITS=n,
        STAGES=stages,
        WINDOW=window or 0,
        PAGE=page,
        PARTS=len(parts),
        NORM=norms is not None,
        WHOLE=1 << (heads - 1).bit_length() if whole else 0,
        TURN=0 if angles is None else 2 * cos.shape[1],
        PAIRED=paired,
        SINKS=sinks is not None,
        CAP=softcap is not None,
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
