"""Latent attention (MLA, absorbed) of one new token a row over pages of latents and of rotary keys on a GPU.

    python bench/gpu_kernels.py --part k,l      checks and times it

Multi-query attention c + r wide: a program takes up to 64 heads and a part of the keys, and loads every tile of latents
once, as keys and as values; the parts are merged after, by their log-sum-exp.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.kernels.triton import hopper
from regard.kernels.triton.attention import PROGRAMS, merge, rooms
from regard.kernels.triton.linear import Rms, jit, launch, ready, triton

if triton is not None:
    import triton.language as tl

# heads a program -> keys a step, warps, stages
TILES = {16: (32, 4, 3), 32: (32, 8, 3), 64: (32, 8, 2)}
MULTIPROCESSORS = PROGRAMS // 2  # a program has one to itself: its sums fill the registers


def reference(q: Tensor, cache: Tensor, lengths: Tensor, latent: int, scale: float) -> Tensor:
    """softmax(q [c|r]^T * scale) c over the first `lengths` (b) rows: q (b h c+r), cache (b s c+r) -> (b h c)."""
    seen = torch.arange(cache.shape[1], device=q.device) < lengths[:, None]
    scores = torch.einsum("bhd,bsd->bhs", q.float(), cache.float()) * scale
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhs,bsc->bhc", weights, cache[..., :latent].float()).to(q.dtype)


@jit
def _put(
    x, pool, stride, table, pos, row, W: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """What a row's new token leaves behind, x (b W), into its page of a pool (pages page W)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    at = tl.load(pos + b)
    spot = tl.load(table + b * row + at // PAGE).to(tl.int64) * PAGE + at % PAGE
    tl.store(pool + spot * W + i, tl.load(x + b * stride + i, mask=i < W), mask=i < W)


@jit
def _normed(x, i, norm, eps, shift, N: tl.constexpr, NORMED: tl.constexpr):
    """N numbers at x, their RMS norm where there is one."""
    y = tl.load(x + i, mask=i < N, other=0.0).to(tl.float32)
    if NORMED:
        gain = tl.load(norm + i, mask=i < N, other=0.0).to(tl.float32) + shift
        y = y * tl.rsqrt(tl.sum(y * y, 0) / N + eps) * gain
    return y


@jit
def _update_cache(
    both, out, latents, ropes, q_norm, kv_norm, cos, sin, table, pos, stride, row, q_eps, q_shift,
    kv_eps, kv_shift, A: tl.constexpr, C: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr,
    PAGE: tl.constexpr, Q_NORMED: tl.constexpr, KV_NORMED: tl.constexpr, PAIRED: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """Of a row's [query latent | latent | rotary key | .] the last two into their page by one program, the first into
    out (b A) by another."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    kind = out.dtype.element_ty
    mine = both + b * stride
    if tl.program_id(1) == 1:
        a = tl.arange(0, SIZE)
        query = _normed(mine, a, q_norm, q_eps, q_shift, A, Q_NORMED)
        tl.store(out + b * A + a, query.to(kind), mask=a < A)
    else:
        c, i, at = tl.arange(0, C), tl.arange(0, R // 2), tl.load(pos + b)
        spot = tl.load(table + b * row + at // PAGE).to(tl.int64) * PAGE + at % PAGE
        latent = _normed(mine + A, c, kv_norm, kv_eps, kv_shift, C, KV_NORMED)
        tl.store(latents + spot * C + c, latent.to(kind))
        first, second = (2 * i, 2 * i + 1) if PAIRED else (i, R // 2 + i)
        x = tl.load(mine + A + C + first).to(tl.float32)
        y = tl.load(mine + A + C + second).to(tl.float32)
        u = tl.load(cos + at * (R // 2) + i).to(tl.float32)
        v = tl.load(sin + at * (R // 2) + i).to(tl.float32)
        tl.store(ropes + spot * R + first, (x * u - y * v).to(kind))
        tl.store(ropes + spot * R + second, (y * u + x * v).to(kind))


@jit
def _rotate(
    x, out, cos, sin, pos, stride, head, to_stride, to_head, H: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, PAIRED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """RoPE of one token's heads; the tables (s HALF) are read at its position. out may be x."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    h, i = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    real, at = (h < H) & (i < HALF), tl.load(pos + n) * HALF + i
    c = tl.load(cos + at, mask=i < HALF).to(tl.float32)
    s = tl.load(sin + at, mask=i < HALF).to(tl.float32)
    first, second = (2 * i, 2 * i + 1) if PAIRED else (i, HALF + i)
    mine, to = x + n * stride + h * head, out + n * to_stride + h * to_head
    a = tl.load(mine + first, mask=real).to(tl.float32)
    b = tl.load(mine + second, mask=real).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(to + first, (a * c - b * s).to(kind), mask=real)
    tl.store(to + second, (b * c + a * s).to(kind), mask=real)
    for j in tl.static_range(2 * HALF, D, WIDTH):  # what does not turn
        rest = (h < H) & (j + i < D)
        tl.store(to + j + i, tl.load(mine + j + i, mask=rest), mask=rest)


@jit
def _named(table, chosen, at, PAGE: tl.constexpr, CHOSEN: tl.constexpr):
    """The pages of the tokens at places `at`, or the tokens of a choice."""
    if CHOSEN:
        return tl.load(chosen + at)
    return tl.load(table + at // PAGE)


@jit
def _latent(
    q, latents, ropes, table, chosen, pos, part, stat, out, row, most, scale, H: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr, CHOSEN: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Of up to BLOCK_H heads of a row the sums over a part of the keys, and their maxima and totals."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    W: tl.constexpr = C + R
    # Programs that read the same latents run side by side.
    b, split = tl.program_id(2).to(tl.int64), tl.program_id(1)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = tl.minimum(h, H - 1)
    keys = tl.load(pos + b).to(tl.int32) + 1
    if CHOSEN:
        keys = tl.minimum(keys, most)
    c, r, k = tl.arange(0, C), tl.arange(0, R), tl.arange(0, BLOCK_S)
    mine = q + (b * H + head[:, None]) * W
    qc, qr = tl.load(mine + c[None, :]), tl.load(mine + C + r[None, :])
    home, choice = table + b * row, chosen + b * most
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, C], tl.float32)
    each = tl.cdiv(tl.cdiv(keys, SPLITS), BLOCK_S) * BLOCK_S
    start = split * each
    end = tl.minimum(start + each, keys)
    # A step asks for the pages of the next one, so that no load of latents waits for one of pages. Behind the end it
    # reads the last token again, since what lies there may be no number.
    last = tl.maximum(end - 1, 0)
    there = _named(home, choice, tl.minimum(start + k, last), PAGE, CHOSEN)
    for s0 in tl.range(start, end, BLOCK_S, num_stages=STAGES):
        spot = there.to(tl.int64)[:, None]
        if not CHOSEN:
            spot = spot * PAGE + (tl.minimum(s0 + k, last) % PAGE)[:, None]
        kc = tl.load(latents + spot * C + c[None, :])
        kr = tl.load(ropes + spot * R + r[None, :])
        there = _named(home, choice, tl.minimum(s0 + BLOCK_S + k, last), PAGE, CHOSEN)
        x = tl.dot(qc, tl.trans(kc), input_precision=precision)
        x = tl.dot(qr, tl.trans(kr), x, input_precision=precision) * scale
        x = tl.where((s0 + k < end)[None, :], x, float("-inf"))
        new = tl.maximum(top, tl.max(x, 1))
        shrink, p = tl.exp2(top - new), tl.exp2(x - new[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(kc.dtype), kc, acc * shrink[:, None], input_precision=precision)
        top = new

    real = h < H
    if SPLITS == 1:
        to = out + (b * H + head[:, None]) * C + c[None, :]
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    else:
        to = (b * H + head) * SPLITS + split
        tl.store(part + to[:, None] * C + c[None, :], acc, mask=real[:, None])
        tl.store(stat + to * 2, top, mask=real)
        tl.store(stat + to * 2 + 1, total, mask=real)


def suits(latent: int, rope: int, x: Tensor) -> bool:
    """Whether the kernel can do it: powers of two, latents of up to 512 (of 128 in float32, for shared memory)."""
    two = latent & (latent - 1) == 0 and rope & (rope - 1) == 0
    most = 512 if x.element_size() == 2 else 128
    return ready(x) and two and 16 <= latent <= most and 16 <= rope <= 64


def splits_for(groups: int, keys: int) -> int:
    """Parts of the keys, a power of two: those with which the last programs end first. One more costs as much as 128
    keys do, to write its sums and to merge them."""
    return min(
        (1 << i for i in range(8)),
        key=lambda n: -(-groups * n // MULTIPROCESSORS) * (-(-keys // n) + 128),
    )


def put(x: Tensor, pool: Tensor, table: Tensor, pos: Tensor) -> None:
    """x (b w), what each row's token at `pos` (b) leaves behind, into its page of a pool (pages page w)."""
    (page, wide), (pdl, extra) = pool.shape[1:], launch(x)
    sizes = {"W": wide, "PAGE": page, "SIZE": triton.next_power_of_2(wide)}
    _put[(len(x),)](
        x, pool, x.stride(0), table, pos, table.shape[1], **sizes, PDL=pdl, num_warps=1, **extra
    )


def update_cache(
    both: Tensor, width: int, low: bool, pools: tuple[Tensor, Tensor], table: Tensor, pos: Tensor,
    *, norms: tuple[Rms | None, Rms | None], angles: tuple[Tensor, Tensor], paired: bool
) -> Tensor:  # fmt: skip
    """Of both (b .) = [width numbers | latent | rotary key | .]: the latent normed and the rotary key turned into their
    pages; if the first are a latent of `low` rank, that one normed (b width). See
    test_gpu_update_cache_matches_the_parts."""
    (latents, ropes), (pdl, extra) = pools, launch(both)
    out = torch.empty(len(both), width if low else 0, dtype=both.dtype, device=both.device)
    (one, *first), (two, *second) = (norm or (both, 0.0, 0.0) for norm in norms)
    given = (both, out, latents, ropes, one, two, *angles, table, pos)
    _update_cache[(len(both), 1 + low)](
        *given, both.stride(0), table.shape[1], *first, *second, A=width, C=latents.shape[2],
        R=ropes.shape[2], SIZE=triton.next_power_of_2(width) if low else 1, PAGE=latents.shape[1],
        Q_NORMED=norms[0] is not None, KV_NORMED=norms[1] is not None, PAIRED=paired, PDL=pdl, **extra
    )  # fmt: skip
    return out


def rotate(
    x: Tensor, angles: tuple[Tensor, Tensor], pos: Tensor, paired: bool, out: Tensor | None = None
) -> Tensor:
    """x (n h d), its first features turned by cos and sin (s r/2) at `pos` (n); into `out`, which may be x. Equals
    `position.rotate`; see test_gpu_rotate_matches_position."""
    (n, h, d), (cos, sin), (pdl, extra) = x.shape, angles, launch(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    half = cos.shape[1]
    sizes = {"HEADS": triton.next_power_of_2(h), "WIDTH": triton.next_power_of_2(half)}
    strides = (*x.stride()[:2], *out.stride()[:2])
    _rotate[(n,)](
        x, out, cos, sin, pos, *strides, H=h, D=d, HALF=half, PAIRED=paired, PDL=pdl, **sizes,
        **extra
    )  # fmt: skip
    return out


def decode(
    q: Tensor,
    latents: Tensor,
    ropes: Tensor,
    table: Tensor,
    pos: Tensor,
    *,
    scale: float,
    bound: int | None = None,
    chosen: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attend to all up to `pos` (b): q (b h c+r) -> (b h c). latents (pages page c), ropes (pages page r), and a block
    table (b places) of each row's pages. `chosen` (b k): only to these tokens of the pool, of a row that is shorter to
    the first pos + 1 of them. Equals `reference`; see test_gpu_latent_matches_attend."""
    (b, h, wide), (page, latent) = q.shape, latents.shape[1:]
    rope, fast = wide - latent, hopper.suits(latent, wide - latent, latents)
    block = 64 if fast or h > 32 else 32 if h > 16 else 16
    blocks = -(-h // block)
    keys = (bound or table.shape[1] * page) if chosen is None else chosen.shape[1]
    n = splits or splits_for(b * blocks, keys)
    out, part, stat = rooms(q, b, h, n, latent)
    place = table if chosen is None else chosen, pos, part, stat, out, table.shape[1], keys
    given = (q, latents, ropes, table, *place, scale * math.log2(math.e))
    sizes = {"H": h, "C": latent, "R": rope, "SPLITS": n, "PAGE": page}
    sizes["CHOSEN"] = chosen is not None
    if fast:
        hopper.attend[(blocks, n, b)](*given, **sizes, num_warps=8)
    else:
        (tile, warps, stages), (pdl, extra) = TILES[block], launch(q)
        sizes |= {"BLOCK_H": block, "BLOCK_S": tile, "STAGES": stages, "num_warps": warps, **extra}
        _latent[(blocks, n, b)](*given, **sizes, EXACT=q.dtype == torch.float32, PDL=pdl)
    if n > 1:
        merge(part, stat, out)
    return out
