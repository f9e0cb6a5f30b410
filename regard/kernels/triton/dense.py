"""A step of many rows on Hopper, by Gluon: attention of one new token a row over pages, and products of up to 256 rows.
Weights, keys and values are brought by the copy engine into a ring of tiles in shared memory, and the first of them are
on their way before the kernel before has ended. Both are transposed: what is read, W or the keys, is the tall side of
the tensor cores' tile, and the rows, or the heads of a group, are the other side, down to 8.

Gluon is not interpreted off a GPU: tests/gpu/test_graphs.py holds both against the kernels of attention.py and wide.py.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.kernels.triton.hopper import KNOWN, jit
from regard.kernels.triton.linear import SMS, Rms, launch

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

    # Features of a head, or of a panel of one, in shared memory.
    PANEL = gl.constexpr(64)


HIGHEST = 256  # rows of a product above which torch's takes over


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
def _square(x, i, stride, kind: gl.constexpr, D: gl.constexpr, PARTS: gl.constexpr):
    """The mean square of each head that begins at x."""
    a = _read(x + i, stride, kind, PARTS)
    total = gl.sum(a * a, 1)
    for h in gl.static_range(1, D // PANEL):
        a = _read(x + i + h * PANEL, stride, kind, PARTS)
        total += gl.sum(a * a, 1)
    return total[:, None] / D


@jit
def _turned(
    x, i, stride, norm, factor, shift, cos, sin, kind: gl.constexpr,
    D: gl.constexpr, PARTS: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Features i of the heads that begin at x, normed by `factor` and turned as halves: see `attention.rotate`."""
    HALF: gl.constexpr = D // 2
    j = (i + HALF) % D
    a, b = _read(x + i, stride, kind, PARTS), _read(x + j, stride, kind, PARTS)
    if NORM:
        a = (a * factor * (gl.load(norm + i).to(gl.float32) + shift)).to(kind).to(gl.float32)
        b = (b * factor * (gl.load(norm + j).to(gl.float32) + shift)).to(kind).to(gl.float32)
    c, s = gl.load(cos + i % HALF).to(gl.float32), gl.load(sin + i % HALF).to(gl.float32)
    return (a * c + b * gl.where(i < HALF, -s, s)).to(kind)


@jit
def _named(home, first, row, PAGES: gl.constexpr):
    """Some pages of a row from the first on, its table's last where it has no more: whether they are used is decided
    later, so that nothing waits for the row's length."""
    pages = ()
    for p in gl.static_range(PAGES):
        pages = pages + (gl.load(home + gl.minimum(first + p, row - 1)),)  # type: ignore[assignment]
    return pages


@jit
def _fetch(
    kd, vd, ks, vs, slot, bar, pages, g, there,
    FIRST: gl.constexpr, T: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Start to copy a tile of keys and values, in pages from the first of `pages` on, if it is `there`."""
    PANELS: gl.constexpr = D // PANEL
    mbarrier.expect(bar, 2 * T * D * 2, pred=there)
    for p in gl.static_range(T // PAGE):
        for h in gl.static_range(PANELS):
            place, column = slot * PANELS + h, g * D + h * PANEL
            k, v = ks.index(place).slice(p * PAGE, PAGE), vs.index(place).slice(p * PAGE, PAGE)
            at = [pages[FIRST + p] * PAGE, column]
            tma.async_copy_global_to_shared(kd, at, bar, k, pred=there)
            tma.async_copy_global_to_shared(vd, at, bar, v, pred=there)


@jit
def _values(v, p, acc, shrink, real, line: gl.constexpr, ends):
    """Sums (PANEL N) of a tile's values, by weights p (N T); what lies behind the end may be no number."""
    if ends:
        old = v.load(line)
        v.store(gl.where(real[:, None], old, gl.zeros_like(old)))
        fence_async_shared()
        gl.thread_barrier()
    return warpgroup_mma(v.permute([1, 0]), p.permute([1, 0]), acc * shrink[None, :])


@jit
def _attend(
    kd, vd, qkv, keys, values, table, pos, cos, sin, q_norm, k_norm, out, part, stat,
    row, stride, scale, eps, shift,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, N: gl.constexpr, T: gl.constexpr,
    STAGES: gl.constexpr, PAGE: gl.constexpr, PARTS: gl.constexpr, NORM: gl.constexpr,
    SPLITS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One group of heads of a row over all its keys, or one of SPLITS parts of them, T at once: scores (T N) and sums
    (D N) of N >= H / G queries. Heads lie in panels of 64 features, as the copy engine and the tensor cores take them.
    The first part has the new key, as in attention.py."""
    R: gl.constexpr = H // G
    PANELS: gl.constexpr = D // PANEL
    kind: gl.constexpr = kd.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    line: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    ks = gl.allocate_shared_memory(kind, [STAGES * PANELS, T, PANEL], kd.layout)
    vs = gl.allocate_shared_memory(kind, [STAGES * PANELS, T, PANEL], kd.layout)
    qs = gl.allocate_shared_memory(kind, [PANELS, N, PANEL], kd.layout)
    ps = gl.allocate_shared_memory(kind, [N, T], kd.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Read before the kernel before this one has ended, as are the first keys: see attention.py.
    b, g, split = gl.program_id(0).to(gl.int64), gl.program_id(1), gl.program_id(2)
    length, home = gl.load(pos + b).to(gl.int32), table + b * row
    # The first tile of this part, and how many it has.
    t0, count = 0, gl.cdiv(length, T)
    if SPLITS > 1:
        each = gl.cdiv(count, SPLITS)
        t0 = split * each
        count = gl.maximum(gl.minimum(each, count - t0), 0)
    begin = _named(home, t0 * (T // PAGE), row, STAGES * T // PAGE)
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        _fetch(kd, vd, ks, vs, s, bars.index(s), begin, g, s < count, s * T // PAGE, T, PAGE, D)
    spot = (gl.load(home + length // PAGE).to(gl.int64) * PAGE + length % PAGE) * G + g
    if PDL:
        tl.extra.cuda.gdc_wait()

    r = gl.arange(0, N, gl.SliceLayout(1, line))[:, None]
    i = gl.arange(0, PANEL, gl.SliceLayout(0, line))[None, :]
    d, at = gl.arange(0, PANEL, gl.SliceLayout(1, mma)), gl.arange(0, T, gl.SliceLayout(1, mma))
    mine = qkv + b * ((H + 2 * G) * D)
    cos += length * (D // 2)
    sin += length * (D // 2)
    head, one = mine + (g * R + gl.minimum(r, R - 1)) * D, mine + (H + g) * D
    of_q, of_k = 1.0, 1.0
    if NORM:
        of_q = gl.rsqrt(_square(head, i, stride, kind, D, PARTS) + eps)
        of_k = gl.rsqrt(_square(one, i, stride, kind, D, PARTS) + eps)
    mine += (H + G + g) * D
    first = gl.zeros([N], gl.float32, gl.SliceLayout(1, line))
    for h in gl.static_range(PANELS):
        j = i + h * PANEL
        q = _turned(head, j, stride, q_norm, of_q, shift, cos, sin, kind, D, PARTS, NORM)
        new = _turned(one, j, stride, k_norm, of_k, shift, cos, sin, kind, D, PARTS, NORM)
        qs.index(h).store(q)
        own = (j < D) & (split == 0)
        gl.store(keys + spot * D + j, new, mask=own)
        gl.store(values + spot * D + j, _read(mine + j, stride, kind, PARTS).to(kind), mask=own)
        first += gl.sum(q.to(gl.float32) * new.to(gl.float32), 1)
    top = gl.convert_layout(first * scale, gl.SliceLayout(0, mma))
    none = gl.zeros([PANEL, N], gl.float32, mma)
    low = none + _read(mine + d, stride, kind, PARTS)[:, None]
    high = none
    if PANELS == 2:
        high = none + _read(mine + PANEL + d, stride, kind, PARTS)[:, None]
    # Of each key by itself, and added up at the end.
    total = gl.zeros([T, N], gl.float32, mma) + gl.where(at == 0, 1.0, 0.0)[:, None]
    if SPLITS > 1:
        top = gl.where(split == 0, top, float("-inf"))
        low, high = gl.where(split == 0, low, 0.0), gl.where(split == 0, high, 0.0)
        total = gl.where(split == 0, total, 0.0)
    fence_async_shared()
    gl.thread_barrier()

    for t in range(count):
        slot, begins = t % STAGES, (t0 + t) * T
        bar = bars.index(slot)
        # Read before they are needed.
        named = _named(home, (t0 + t + STAGES) * (T // PAGE), row, T // PAGE)
        mbarrier.wait(bar, t // STAGES & 1)
        x = gl.zeros([T, N], gl.float32, mma)
        for h in gl.static_range(PANELS):
            panel = ks.index(slot * PANELS + h)
            x = warpgroup_mma(panel, qs.index(h).permute([1, 0]), x, use_acc=h > 0, is_async=True)
        ends = begins + T > length
        real = begins + gl.arange(0, T, gl.SliceLayout(1, line)) < length
        x = warpgroup_mma_wait(0, deps=[x]) * scale
        x = gl.where((begins + at < length)[:, None], x, float("-inf"))
        best = gl.maximum(top, gl.max(x, 0))
        shrink, p = gl.exp2(top - best), gl.exp2(x - best[None, :])
        ps.store(p.to(kind).permute([1, 0]))
        total, top = total * shrink[None, :] + p, best
        fence_async_shared()
        gl.thread_barrier()
        low = _values(vs.index(slot * PANELS), ps, low, shrink, real, line, ends)
        if PANELS == 2:
            high = _values(vs.index(slot * PANELS + 1), ps, high, shrink, real, line, ends)
        gl.thread_barrier()
        there = t + STAGES < count
        _fetch(kd, vd, ks, vs, slot, bar, named, g, there, 0, T, PAGE, D)

    n = gl.arange(0, N, gl.SliceLayout(0, mma))
    whole, mine = gl.sum(total, 0), b * H + g * R + n
    if SPLITS == 1:
        to = out + mine[None, :] * D + d[:, None]
        low, high = (low / whole[None, :]).to(kind), (high / whole[None, :]).to(kind)
    else:
        mine = mine * SPLITS + split
        to = part + mine[None, :] * D + d[:, None]
        gl.store(stat + mine * 2, top, mask=n < R)
        gl.store(stat + mine * 2 + 1, whole, mask=n < R)
    gl.store(to, low, mask=(n < R)[None, :])
    if PANELS == 2:
        gl.store(to + PANEL, high, mask=(n < R)[None, :])


def suits(heads: int, k: Tensor, angles: tuple[Tensor, Tensor] | None) -> bool:
    """Whether `attend` can do it: pages (pages page g d) that fill tiles, heads of 64 or 128 features that turn as a
    whole."""
    page, g, d = k.shape[1:]
    turns = angles is not None and 2 * angles[0].shape[1] == d and d in (64, 128)
    return hopper(k) and turns and page in (8, 16, 32, 64) and heads // g <= 16


def splits_for(groups: int, length: int) -> int:
    """Parts of the keys: enough programs for the chip; and where these are few waves, parts of 512, so that a long row
    among short ones is not waited for."""
    few = 2 * SMS // groups if groups < 2 * SMS else length // 512 if groups <= 8 * SMS else 1
    most = max(1, min(16, few, length // 64))
    return 1 << (most.bit_length() - 1)


def attend(
    qkv: Tensor, k: Tensor, v: Tensor, pos: Tensor, table: Tensor, rooms: tuple[Tensor, Tensor, Tensor],
    scale: float, angles: tuple[Tensor, Tensor], norms: tuple[Rms, Rms] | None, splits: int, length: int,
) -> None:  # fmt: skip
    """`attention.decode` over pages, by heads that turn as halves; `norms` of each head by itself. `rooms` as
    attention.py has them, for parts that are still to be merged; no row is longer than `length`."""
    (b, heads, d), (page, g) = rooms[0].shape, k.shape[1:3]
    parts, (pdl, extra) = qkv if qkv.dim() == 3 else qkv[None], launch(qkv)
    kd, vd = (tiles(x.flatten(0, 1).flatten(1), page, 64) for x in (k, v))
    (q_norm, *more), (k_norm, *_) = norms or ((qkv, 0.0, 0.0),) * 2
    given = (kd, vd, qkv, k, v, table, pos, *angles, q_norm, k_norm, *rooms, table.shape[1])
    sizes = {"H": heads, "G": g, "D": d, "N": 8 if heads // g <= 8 else 16, "T": 64}
    # Fewer stages take less room: more programs run at once.
    sizes |= {"STAGES": 2 if length // splits <= 256 else 3}
    sizes |= {"SPLITS": splits, "NORM": norms is not None}
    sizes |= {"PAGE": page, "PARTS": len(parts), "num_warps": 4, **extra}
    numbers = (parts[0].numel(), scale * math.log2(math.e), *more)
    _attend[(b, g, splits)](*given, *numbers, PDL=pdl, **sizes)


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
    WARPS: gl.constexpr = gl.num_warps()
    # Eight warps share the rows of W where there are 128, else those of x.
    ACROSS: gl.constexpr = WARPS // 4 if BN == 64 else 1
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS // ACROSS, ACROSS], [16, BM // ACROSS, 16]
    )
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
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [BN // 64, WARPS * 64 // BN], [0, 1])
    final: gl.constexpr = mma if out.dtype.element_ty == gl.float32 else wide
    y = gl.convert_layout(acc.to(out.dtype.element_ty), final)
    n = n0 + gl.arange(0, BN, gl.SliceLayout(1, final))[:, None]
    m = gl.arange(0, BM, gl.SliceLayout(0, final))[None, :]
    gl.store(out + (part.to(gl.int64) * M + m) * N + n, y, mask=(m < M) & (n < N))


def parts(x: Tensor, w: Tensor, count: int = 1, gated: bool = False) -> Tensor:
    """`wide.parts`, `count` of them; a gate is silu's."""
    (m, k), n = x.shape, len(w) // 2 if gated else len(w)
    many, (pdl, extra) = max(16, 1 << (m - 1).bit_length()), launch(x)
    rows, step, stages = tile(n, many, gated)
    out = torch.empty(count, m, n, dtype=x.dtype if count == 1 else torch.float32, device=x.device)
    given = (tiles(w, rows, step), tiles(x, many, step), out, m, n, k // count)
    _product[(-(-n // rows), count)](
        *given, STAGES=stages, GATED=gated, PDL=pdl, num_warps=8 if many > 128 else 4, **extra
    )
    return out


def tile(n: int, many: int, gated: bool) -> tuple[int, int, int]:
    """Rows of W a program, elements of K a step, and steps on the way at once: as many as shared memory holds, with all
    of x beside them."""
    if gated or many > 128:
        return 128 if n > 64 * SMS and not gated else 64, 64, 4
    if n > 64 * SMS:
        return (128, 128, 2) if many <= 64 else (128, 64, 5)
    return 64, 128, 4
