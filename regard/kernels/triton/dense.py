"""A step of many rows on Hopper, by Gluon: attention of one new token a row over pages, and products of up to 64 rows.
Weights, keys and values are brought by the copy engine into a ring of tiles in shared memory, and the first of them are
on their way before the kernel before has ended. Both are transposed: what is read, W or the keys, is the tall side of
the tensor cores' tile, and the few rows, or the heads of a group, are its narrow side, down to 8.

Gluon is not interpreted off a GPU: tests/gpu/test_graphs.py holds both against the kernels of attention.py and wide.py.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.kernels.triton.hopper import KNOWN, jit
from regard.kernels.triton.linear import SMS, launch

if KNOWN:
    import triton.language as tl
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def hopper(x: Tensor) -> bool:
    """Whether x lies on a Hopper GPU, 16 bits a number."""
    known = KNOWN and x.is_cuda and x.element_size() == 2
    return known and torch.cuda.get_device_capability(x.device)[0] == 9


def tiles(x: Tensor, rows: int, columns: int) -> Any:
    """A matrix as the copy engine reads it."""
    tile = gl.NVMMASharedLayout(128, 16)
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns], tile)


# --- attention ----------------------------------------------------------------------------------------------------


@jit
def _read(x, stride, kind: gl.constexpr, PARTS: gl.constexpr):
    """What lies at x, or the sum of PARTS that lie `stride` apart, rounded to `kind`, in float32."""
    a = gl.load(x).to(gl.float32)
    for p in gl.static_range(1, PARTS):
        a += gl.load(x + p * stride).to(gl.float32)
    return a.to(kind).to(gl.float32)


@jit
def _turned(x, i, stride, cos, sin, kind: gl.constexpr, D: gl.constexpr, PARTS: gl.constexpr):
    """Features i of the heads that begin at x, as halves: see `attention.rotate`."""
    HALF: gl.constexpr = D // 2
    a, b = _read(x + i, stride, kind, PARTS), _read(x + (i + HALF) % D, stride, kind, PARTS)
    c, s = gl.load(cos + i % HALF).to(gl.float32), gl.load(sin + i % HALF).to(gl.float32)
    return (a * c + b * gl.where(i < HALF, -s, s)).to(kind)


@jit
def _fetch(
    kd, vd, k, v, bar, home, t, last, g, T: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr, there
):  # fmt: skip
    """Start to copy tile t of a row's keys and values, if it is `there`; behind its last page, that page again."""
    mbarrier.expect(bar, 2 * T * D * 2, pred=there)
    for p in gl.static_range(T // PAGE):
        at = gl.load(home + gl.minimum(t * (T // PAGE) + p, last)) * PAGE
        tma.async_copy_global_to_shared(kd, [at, g * D], bar, k.slice(p * PAGE, PAGE), pred=there)
        tma.async_copy_global_to_shared(vd, [at, g * D], bar, v.slice(p * PAGE, PAGE), pred=there)


@jit
def _attend(
    kd, vd, qkv, keys, values, table, pos, cos, sin, out, row, stride, scale,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, N: gl.constexpr, T: gl.constexpr,
    STAGES: gl.constexpr, PAGE: gl.constexpr, PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One group of heads of a row over all its keys, T at once: scores (T N) and sums (D N) of N >= H / G queries."""
    R: gl.constexpr = H // G
    kind: gl.constexpr = kd.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    line: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    ks = gl.allocate_shared_memory(kind, [STAGES, T, D], kd.layout)
    vs = gl.allocate_shared_memory(kind, [STAGES, T, D], kd.layout)
    qs = gl.allocate_shared_memory(kind, [N, D], kd.layout)
    ps = gl.allocate_shared_memory(kind, [N, T], kd.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Read before the kernel before this one has ended, as are the first keys: see attention.py.
    b, g = gl.program_id(0).to(gl.int64), gl.program_id(1)
    length, home = gl.load(pos + b).to(gl.int32), table + b * row
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    fence_async_shared()
    count, last = gl.cdiv(length, T), gl.maximum(length - 1, 0) // PAGE
    for s in gl.static_range(STAGES):
        k, v = ks.index(s), vs.index(s)
        _fetch(kd, vd, k, v, bars.index(s), home, s, last, g, T, PAGE, D, s < count)
    spot = (gl.load(home + length // PAGE).to(gl.int64) * PAGE + length % PAGE) * G + g
    if PDL:
        tl.extra.cuda.gdc_wait()

    r = gl.arange(0, N, gl.SliceLayout(1, line))[:, None]
    i = gl.arange(0, D, gl.SliceLayout(0, line))[None, :]
    d, at = gl.arange(0, D, gl.SliceLayout(1, mma)), gl.arange(0, T, gl.SliceLayout(1, mma))
    mine = qkv + b * ((H + 2 * G) * D)
    cos += length * (D // 2)
    sin += length * (D // 2)
    head = mine + (g * R + gl.minimum(r, R - 1)) * D
    q = _turned(head, i, stride, cos, sin, kind, D, PARTS)
    new = _turned(mine + (H + g) * D, i, stride, cos, sin, kind, D, PARTS)
    mine += (H + G + g) * D
    qs.store(q)
    gl.store(keys + spot * D + i, new)
    gl.store(values + spot * D + i, _read(mine + i, stride, kind, PARTS).to(kind))
    top = gl.sum(q.to(gl.float32) * new.to(gl.float32), 1) * scale
    top = gl.convert_layout(top, gl.SliceLayout(0, mma))
    acc = gl.zeros([D, N], gl.float32, mma) + _read(mine + d, stride, kind, PARTS)[:, None]
    # Of each key by itself, and added up at the end.
    total = gl.zeros([T, N], gl.float32, mma) + gl.where(at == 0, 1.0, 0.0)[:, None]
    fence_async_shared()
    gl.thread_barrier()

    for t in range(count):
        slot = t % STAGES
        k, v, bar = ks.index(slot), vs.index(slot), bars.index(slot)
        mbarrier.wait(bar, t // STAGES & 1)
        none = gl.zeros([T, N], gl.float32, mma)
        x = warpgroup_mma(k, qs.permute([1, 0]), none, use_acc=False, is_async=True)
        if (t + 1) * T > length:
            # What lies behind the end may be no number.
            real = t * T + gl.arange(0, T, gl.SliceLayout(1, line)) < length
            old = v.load(line)
            v.store(gl.where(real[:, None], old, gl.zeros_like(old)))
        x = warpgroup_mma_wait(0, deps=[x]) * scale
        x = gl.where((t * T + at < length)[:, None], x, float("-inf"))
        best = gl.maximum(top, gl.max(x, 0))
        shrink, p = gl.exp2(top - best), gl.exp2(x - best[None, :])
        ps.store(p.to(kind).permute([1, 0]))
        total, top = total * shrink[None, :] + p, best
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(v.permute([1, 0]), ps.permute([1, 0]), acc * shrink[None, :])
        gl.thread_barrier()
        _fetch(kd, vd, k, v, bar, home, t + STAGES, last, g, T, PAGE, D, t + STAGES < count)

    n = gl.arange(0, N, gl.SliceLayout(0, mma))[None, :]
    y = (acc / gl.sum(total, 0)[None, :]).to(kind)
    gl.store(out + (b * H + g * R + n) * D + d[:, None], y, mask=(n < R) & (d < D)[:, None])


def suits(heads: int, k: Tensor, angles: tuple[Tensor, Tensor] | None) -> bool:
    """Whether `attend` can do it: pages (pages page g d) that fill tiles, heads of 64 features that turn as a whole."""
    page, g, d = k.shape[1:]
    turns = angles is not None and 2 * angles[0].shape[1] == d == 64
    return hopper(k) and turns and page in (8, 16, 32, 64) and heads // g <= 16


def attend(
    qkv: Tensor, k: Tensor, v: Tensor, pos: Tensor, table: Tensor, out: Tensor, scale: float,
    angles: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """`attention.decode` over pages, in one part, by heads that turn as halves."""
    (b, heads, d), (page, g) = out.shape, k.shape[1:3]
    parts, (pdl, extra) = qkv if qkv.dim() == 3 else qkv[None], launch(qkv)
    kd, vd = (tiles(x.flatten(0, 1).flatten(1), page, d) for x in (k, v))
    given = (kd, vd, qkv, k, v, table, pos, *angles, out, table.shape[1], parts[0].numel())
    sizes = {"H": heads, "G": g, "D": d, "N": 8 if heads // g <= 8 else 16, "T": 64, "STAGES": 3}
    sizes |= {"PAGE": page, "PARTS": len(parts), "num_warps": 4, **extra}
    _attend[(b, g)](*given, scale * math.log2(math.e), PDL=pdl, **sizes)


# --- products -----------------------------------------------------------------------------------------------------


@jit
def _ask(wd, ws, s, bar, n, k, N, there, SETS: gl.constexpr):
    """Start to copy rows n of W from column k on to place s, if they are `there`; of two SETS also those N below."""
    tma.async_copy_global_to_shared(wd, [n, k], bar, ws.index(s * SETS), pred=there)
    if SETS == 2:
        tma.async_copy_global_to_shared(wd, [N + n, k], bar, ws.index(s * SETS + 1), pred=there)


@jit
def _product(
    wd, xd, out, M, N, EACH, STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """As `wide._parts`, gated by silu."""
    SETS: gl.constexpr = 2 if GATED else 1
    BN: gl.constexpr = wd.block_type.shape[0]
    BK: gl.constexpr = wd.block_type.shape[1]
    BM: gl.constexpr = xd.block_type.shape[0]
    BYTES: gl.constexpr = (BN * SETS + BM) * BK * 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    ws = gl.allocate_shared_memory(wd.dtype, [STAGES * SETS, BN, BK], wd.layout)
    xs = gl.allocate_shared_memory(wd.dtype, [STAGES, BM, BK], xd.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    n0, part, steps = gl.program_id(0) * BN, gl.program_id(1), gl.cdiv(EACH, BK)
    k0 = part * EACH
    # The next kernel's weights shall come when this one's last are there: of a long product, not before.
    late = gl.where(steps > 2 * STAGES, steps - STAGES - 3, -1)
    # Not one condition: the outer one is decided when this is compiled.
    if PDL:  # noqa: SIM102
        if late < 0:
            tl.extra.cuda.gdc_launch_dependents()
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        mbarrier.expect(bars.index(s), BYTES, pred=s < steps)
        _ask(wd, ws, s, bars.index(s), n0, k0 + s * BK, N, s < steps, SETS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for s in gl.static_range(STAGES):
        k, bar = k0 + s * BK, bars.index(s)
        tma.async_copy_global_to_shared(xd, [0, k], bar, xs.index(s), pred=s < steps)
    acc = gl.zeros([BN, BM], gl.float32, mma)
    up = gl.zeros([BN, BM], gl.float32, mma)
    for i in range(steps):
        slot = i % STAGES
        x, bar = xs.index(slot), bars.index(slot)
        mbarrier.wait(bar, i // STAGES & 1)
        acc = warpgroup_mma(ws.index(slot * SETS), x.permute([1, 0]), acc, is_async=True)
        if GATED:
            up = warpgroup_mma(ws.index(slot * SETS + 1), x.permute([1, 0]), up, is_async=True)
        acc, up = warpgroup_mma_wait(0, deps=[acc, up])
        gl.thread_barrier()
        if PDL:  # noqa: SIM102
            if i == late:
                tl.extra.cuda.gdc_launch_dependents()
        k, there = k0 + (i + STAGES) * BK, i + STAGES < steps
        mbarrier.expect(bar, BYTES, pred=there)
        _ask(wd, ws, slot, bar, n0, k, N, there, SETS)
        tma.async_copy_global_to_shared(xd, [0, k], bar, x, pred=there)
    if GATED:
        acc = acc / (1.0 + gl.exp(-acc)) * up
    # Numbers of 16 bits are written with their neighbours; of 32 bits, eight threads fill a line as they are.
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [BN // 64, 256 // BN], [0, 1])
    final: gl.constexpr = mma if out.dtype.element_ty == gl.float32 else wide
    y = gl.convert_layout(acc.to(out.dtype.element_ty), final)
    n = n0 + gl.arange(0, BN, gl.SliceLayout(1, final))[:, None]
    m = gl.arange(0, BM, gl.SliceLayout(0, final))[None, :]
    gl.store(out + (part.to(gl.int64) * M + m) * N + n, y, mask=(m < M) & (n < N))


def parts(x: Tensor, w: Tensor, count: int = 1, gated: bool = False) -> Tensor:
    """`wide.parts`, `count` of them; a gate is silu's."""
    (m, k), n = x.shape, len(w) // 2 if gated else len(w)
    rows, step, stages = (64, 64, 4) if gated else (128, 128, 2) if n > 64 * SMS else (64, 128, 4)
    out = torch.empty(count, m, n, dtype=x.dtype if count == 1 else torch.float32, device=x.device)
    few, (pdl, extra) = max(16, 1 << (m - 1).bit_length()), launch(x)
    given = (tiles(w, rows, step), tiles(x, few, step), out, m, n, k // count)
    _product[(-(-n // rows), count)](
        *given, STAGES=stages, GATED=gated, PDL=pdl, num_warps=4, **extra
    )
    return out
