"""Latent attention (MLA, absorbed) on Hopper's tensor cores, by Gluon: the kernel of latent.py where it is measured.

64 heads meet 64 latents a step. A tile of latents lies in shared memory once, as keys and as values; the next one is on
its way there meanwhile. Two groups of four warps share the scores by keys and the sums (64 c) by features. Gluon is not
interpreted off a GPU: tests/gpu/test_graphs.py holds the kernel against `latent.reference`.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
from torch import Tensor

from regard.kernels.triton.linear import triton

try:
    if triton is None:
        raise ImportError
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        async_copy,
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
except ImportError:  # latent.py has a kernel without it
    gluon = None

# Gluon's names change from version to version: where this was not measured, latent.py's kernel stays.
KNOWN = gluon is not None and triton.__version__.startswith("3.6.")
jit = gluon.jit if gluon is not None else lambda f: f


def suits(latent: int, rope: int, x: Tensor) -> bool:
    """Whether the kernel can do it: a Hopper GPU, 16 bits a number, and tiles of 128 bytes a row."""
    if not (KNOWN and x.is_cuda) or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    return x.element_size() == 2 and latent in (64, 128, 256, 512) and rope == 64


@jit
def _named(home, choice, at, PAGE: gl.constexpr, CHOSEN: gl.constexpr):
    """The pages of the tokens at places `at`, or the tokens of a choice."""
    if CHOSEN:
        return gl.load(choice + at)
    return gl.load(home + at // PAGE)


@jit
def _fetch(kc, kr, latents, ropes, there, at, c, r, PAGE: gl.constexpr, CHOSEN: gl.constexpr):
    """Start to copy a tile of latents and rotary keys."""
    spot = there.to(gl.int64)
    if not CHOSEN:
        spot = spot * PAGE + at % PAGE
    async_copy.async_copy_global_to_shared(kc, latents + (spot * kc.shape[1])[:, None] + c[None, :])
    async_copy.async_copy_global_to_shared(kr, ropes + (spot * kr.shape[1])[:, None] + r[None, :])
    async_copy.commit_group()


@jit
def attend(
    q,
    latents,
    ropes,
    table,
    chosen,
    pos,
    part,
    stat,
    out,
    row,
    most,
    scale,
    H: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    SPLITS: gl.constexpr,
    PAGE: gl.constexpr,
    CHOSEN: gl.constexpr,
):
    """As `latent._latent`."""
    T: gl.constexpr = 64
    kind: gl.constexpr = latents.dtype.element_ty
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, T // 2, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    # Of a tile, a thread copies 16 bytes of two rows, 128 bytes apart: it needs two places in the pool and no more.
    line: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    kc = gl.allocate_shared_memory(kind, [2, T, C], tile)
    kr = gl.allocate_shared_memory(kind, [2, T, R], tile)
    qc = gl.allocate_shared_memory(kind, [T, C], tile)
    qr = gl.allocate_shared_memory(kind, [T, R], tile)
    weights = gl.allocate_shared_memory(kind, [T, T], tile)

    b, split, first = gl.program_id(2).to(gl.int64), gl.program_id(1), gl.program_id(0) * T
    n = gl.arange(0, T, gl.SliceLayout(1, line))
    c, r = gl.arange(0, C, gl.SliceLayout(0, line)), gl.arange(0, R, gl.SliceLayout(0, line))
    keys = gl.load(pos + b).to(gl.int32) + 1
    if CHOSEN:
        keys = gl.minimum(keys, most)
    home, choice = table + b * row, chosen + b * most
    each = gl.cdiv(gl.cdiv(keys, SPLITS), T) * T
    start = split * each
    end = gl.minimum(start + each, keys)
    last = gl.maximum(end - 1, 0)

    mine = q + (b * H + gl.minimum(first + n, H - 1)) * (C + R)
    async_copy.async_copy_global_to_shared(qc, mine[:, None] + c[None, :])
    async_copy.async_copy_global_to_shared(qr, mine[:, None] + C + r[None, :])
    at = gl.minimum(start + n, last)
    there = _named(home, choice, at, PAGE, CHOSEN)
    _fetch(kc.index(0), kr.index(0), latents, ropes, there, at, c, r, PAGE, CHOSEN)
    there = _named(home, choice, gl.minimum(start + T + n, last), PAGE, CHOSEN)

    k = gl.arange(0, T, gl.SliceLayout(0, score))
    top = gl.full([T], float("-inf"), gl.float32, gl.SliceLayout(1, score))
    total = gl.zeros([T], gl.float32, gl.SliceLayout(1, score))
    acc = gl.zeros([T, C], gl.float32, sums)
    turn = 0
    for s0 in range(start, end, T):
        # The tile is there, for all warps and for the tensor cores; and nobody reads the one before it any more.
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        mc, mr = kc.index(turn), kr.index(turn)
        none = gl.zeros([T, T], gl.float32, score)
        x = warpgroup_mma(qc, mc.permute([1, 0]), none, use_acc=False, is_async=True)
        x = warpgroup_mma(qr, mr.permute([1, 0]), x, is_async=True)
        turn = turn ^ 1
        # Behind the end it is the last token again: what lies there may be no number.
        at = gl.minimum(s0 + T + n, last)
        _fetch(kc.index(turn), kr.index(turn), latents, ropes, there, at, c, r, PAGE, CHOSEN)
        there = _named(home, choice, gl.minimum(s0 + 2 * T + n, last), PAGE, CHOSEN)
        y = warpgroup_mma_wait(0, deps=[x]) * scale
        y = gl.where((s0 + k < end)[None, :], y, float("-inf"))
        new = gl.maximum(top, gl.max(y, 1))
        shrink, p = gl.exp2(top - new), gl.exp2(y - new[:, None])
        weights.store(p.to(kind))
        total = total * shrink + gl.sum(p, 1)
        top = new
        fence_async_shared()
        gl.thread_barrier()
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
        acc = warpgroup_mma(weights, mc, acc)
    async_copy.wait_group(0)

    h = first + gl.arange(0, T, gl.SliceLayout(1, sums))
    wide = gl.arange(0, C, gl.SliceLayout(0, sums))
    if SPLITS == 1:
        whole = gl.convert_layout(total, gl.SliceLayout(1, sums))
        to = out + ((b * H + h) * C)[:, None] + wide[None, :]
        gl.store(to, (acc / whole[:, None]).to(kind), mask=(h < H)[:, None])
    else:
        to = (b * H + h) * SPLITS + split
        gl.store(part + (to * C)[:, None] + wide[None, :], acc, mask=(h < H)[:, None])
        h = first + gl.arange(0, T, gl.SliceLayout(1, score))
        to = (b * H + h) * SPLITS + split
        gl.store(stat + to * 2, top, mask=h < H)
        gl.store(stat + to * 2 + 1, total, mask=h < H)
