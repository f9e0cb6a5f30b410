"""Latent attention (MLA, absorbed) of one new token a row over pages of latents and of rotary keys on a GPU.

    python bench/gpu_kernels.py --part k      checks it

Multi-query attention c + r wide: a program takes up to 64 heads and a part of the keys, and loads every tile of latents
once, as keys and as values. As in gpu_attention.py the first part stores the new row, and the parts are merged after.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.kernels.triton.attention import PROGRAMS, merge
from regard.kernels.triton.linear import jit, launch, ready, triton

if triton is not None:
    import triton.language as tl

# heads a program -> keys a step, warps, stages
TILES = {16: (32, 4, 3), 32: (32, 8, 3), 64: (32, 8, 2)}


def reference(q: Tensor, cache: Tensor, lengths: Tensor, latent: int, scale: float) -> Tensor:
    """softmax(q [c|r]^T * scale) c over the first `lengths` (b) rows: q (b h c+r), cache (b s c+r) -> (b h c)."""
    seen = torch.arange(cache.shape[1], device=q.device) < lengths[:, None]
    scores = torch.einsum("bhd,bsd->bhs", q.float(), cache.float()) * scale
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhs,bsc->bhc", weights, cache[..., :latent].float()).to(q.dtype)


@jit
def _latent(
    q,
    entry,
    latents,
    ropes,
    table,
    pos,
    part,
    stat,
    out,
    row,
    scale,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    W: tl.constexpr = C + R
    b, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = tl.minimum(h, H - 1)
    length = tl.load(pos + b).to(tl.int32)
    c, r = tl.arange(0, C), tl.arange(0, R)
    mine = q + (b * H + head[:, None]) * W
    qc, qr = tl.load(mine + c[None, :]), tl.load(mine + C + r[None, :])
    home = table + b * row

    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, C], tl.float32)
    if split == 0:  # the new row: stored by one program, counted by each block of heads
        nc, nr = tl.load(entry + b * W + c), tl.load(entry + b * W + C + r)
        if tl.program_id(1) == 0:
            spot = tl.load(home + length // PAGE).to(tl.int64) * PAGE + length % PAGE
            tl.store(latents + spot * C + c, nc)
            tl.store(ropes + spot * R + r, nr)
        own = tl.sum(qc.to(tl.float32) * nc.to(tl.float32)[None, :], 1)
        top = (own + tl.sum(qr.to(tl.float32) * nr.to(tl.float32)[None, :], 1)) * scale
        total = tl.full([BLOCK_H], 1.0, tl.float32)
        acc += nc.to(tl.float32)[None, :]

    each = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_S) * BLOCK_S
    start = split * each
    end = tl.minimum(start + each, length)
    for s0 in tl.range(start, end, BLOCK_S, num_stages=STAGES):
        at = s0 + tl.arange(0, BLOCK_S)
        valid = at < end
        page = tl.load(home + tl.minimum(at, length - 1) // PAGE).to(tl.int64)
        spot = (page * PAGE + at % PAGE)[:, None]
        kc = tl.load(latents + spot * C + c[None, :], mask=valid[:, None], other=0.0)
        kr = tl.load(ropes + spot * R + r[None, :], mask=valid[:, None], other=0.0)
        x = tl.dot(qc, tl.trans(kc), input_precision=precision)
        x = tl.dot(qr, tl.trans(kr), x, input_precision=precision) * scale
        x = tl.where(valid[None, :], x, float("-inf"))
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


def decode(
    q: Tensor,
    entry: Tensor,
    latents: Tensor,
    ropes: Tensor,
    table: Tensor,
    pos: Tensor,
    *,
    scale: float,
    bound: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """Store `entry` (b c+r) at `pos` (b) and attend to all up to it: q (b h c+r) -> (b h c). latents (pages page c),
    ropes (pages page r), and a block table (b places) of each row's pages. Equals `reference`; see
    test_gpu_latent_matches_attend."""
    (b, h, wide), (page, latent) = q.shape, latents.shape[1:]
    block = 16 if h <= 16 else 32 if h <= 32 else 64
    tile, warps, stages = TILES[block]
    blocks = -(-h // block)
    if splits is None:
        most = max(
            1, min(64, PROGRAMS // (b * blocks), (bound or table.shape[1] * page) // (2 * tile))
        )
        splits = 1 << (most.bit_length() - 1)
    out = torch.empty(b, h, latent, dtype=q.dtype, device=q.device)
    one = splits == 1
    part = out if one else torch.empty(b, h, splits, latent, dtype=torch.float32, device=q.device)
    stat = out if one else torch.empty(b, h, splits, 2, dtype=torch.float32, device=q.device)
    pdl, extra = launch(q)
    _latent[(b, blocks, splits)](
        q,
        entry,
        latents,
        ropes,
        table,
        pos,
        part,
        stat,
        out,
        table.shape[1],
        scale * math.log2(math.e),
        H=h,
        C=latent,
        R=wide - latent,
        BLOCK_H=block,
        BLOCK_S=tile,
        SPLITS=splits,
        STAGES=stages,
        PAGE=page,
        EXACT=q.dtype == torch.float32,
        PDL=pdl,
        num_warps=warps,
        **extra,
    )
    if not one:
        merge(part, stat, out)
    return out
