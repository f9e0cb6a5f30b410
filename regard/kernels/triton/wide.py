"""What stands between the matrix products of many rows on a GPU, each as one kernel: residual + RMS norm, act(gate) *
up, and products split along K whose parts the next residual adds up.

    python bench/gpu_kernels.py --part w      times the products against torch's

Plain forms beside each; `fast=False`, or no GPU, takes those.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.kernels.packed import Packed, Weight
from regard.kernels.triton import dense, linear
from regard.kernels.triton.linear import (
    ACTIVATIONS,
    SMS,
    SWITCH,
    Rms,
    _activate,
    _ahead,
    jit,
    launch,
    ready,
    rms_norm,
    said,
    triton,
)
from regard.kernels.triton.measured import Form, fastest
from regard.kernels.triton.packed import _both, _eight, _pair, as_read

if triton is not None:
    import triton.language as tl

HIGHEST = 64  # rows above which torch's matrix product takes over
HIGHEST_PACKED = 256  # the same of packed weights, which torch's product has brought back first


# --- residual + norm ----------------------------------------------------------------------------------------------


@jit
def _add_norm(
    x,
    more,
    weight,
    post,
    total,
    y,
    stride,
    eps,
    shift,
    post_eps,
    post_shift,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    POST: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.arange(0, BLOCK)
    valid = n < N
    kind = total.dtype.element_ty
    if NORM:
        g = tl.load(weight + n, mask=valid, other=0.0).to(tl.float32) + shift
    if POST:
        p = tl.load(post + n, mask=valid, other=0.0).to(tl.float32) + post_shift
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * N + n
    a = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
    if PARTS:
        plus = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(PARTS):
            plus += tl.load(more + i * stride + at, mask=valid, other=0.0).to(tl.float32)
        if POST:
            plus = plus.to(kind).to(tl.float32)
            plus = plus * tl.rsqrt(tl.sum(plus * plus, 0) / N + post_eps) * p
            plus = plus.to(kind).to(tl.float32)
        rounded = (a + plus).to(kind)
        tl.store(total + at, rounded, mask=valid)
        a = rounded.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a, 0) / N + eps)
        tl.store(y + at, (a * scale * g).to(kind), mask=valid)


def summed(x: Tensor, more: Tensor | None, post: Rms | None = None) -> Tensor:
    """x (m n) + more (m n), or the sum of its parts (s m n), normed first by `post`."""
    if more is None:
        return x
    plus = more.sum(0).to(x.dtype) if more.dim() == 3 else more
    return x + (plus if post is None else rms_norm(plus, post))


def add_norm(
    x: Tensor, more: Tensor | None, norm: Rms | None, post: Rms | None = None, fast: bool = True
) -> tuple[Tensor, Tensor]:
    """s = `summed(x, more, post)` and its RMS norm. See test_gpu_add_norm_matches_torch."""
    if not (fast and ready(x) and x.is_contiguous() and (more is None or more.is_contiguous())):
        s = summed(x, more, post)
        return s, s if norm is None else rms_norm(s, norm)
    if more is None and norm is None:
        return x, x
    m, n = x.shape
    total = x if more is None else torch.empty_like(x)
    y = total if norm is None else torch.empty_like(x)
    parts = 0 if more is None else (len(more) if more.dim() == 3 else 1)
    block = triton.next_power_of_2(n)
    warps = max(1, min(16, block // 256))
    pdl, extra = launch(x)
    (weight, *one), (after, *two) = (each or (x, 0.0, 0.0) for each in (norm, post))
    _add_norm[(m,)](
        x,
        x if more is None else more,
        weight,
        after,
        total,
        y,
        m * n,
        *one,
        *two,
        N=n,
        BLOCK=block,
        PARTS=parts,
        NORM=norm is not None,
        POST=post is not None,
        PDL=pdl,
        num_warps=warps,
        **extra,
    )
    return total, y


# --- act(gate) * up -----------------------------------------------------------------------------------------------


@jit
def _gate(x, y, N, BLOCK: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = n < N
    a = tl.load(x + m * 2 * N + n, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(x + m * 2 * N + N + n, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + m * N + n, (_activate(a, ACT) * b).to(y.dtype.element_ty), mask=valid)


def gate(x: Tensor, act: str, fast: bool = True) -> Tensor:
    """act(a) * b for x = [a | b] (m 2n). See test_gpu_gate_matches_torch."""
    if not (fast and ready(x) and x.is_contiguous()):
        a, b = x.chunk(2, -1)
        return ACTIVATIONS[act](a) * b
    m, n = len(x), x.shape[1] // 2
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    block = min(2048, triton.next_power_of_2(n))
    pdl, extra = launch(x)
    _gate[(m, triton.cdiv(n, block))](x, y, n, BLOCK=block, ACT=act, PDL=pdl, num_warps=4, **extra)
    return y


# --- products -----------------------------------------------------------------------------------------------------


@jit
def _weights(
    p,
    scales,
    n,
    group,
    COUNT: tl.constexpr,
    kind: tl.constexpr,
    BYTES: tl.constexpr,
    ASM: tl.constexpr,
):
    """A tile of W as x is; twice. Of bytes of one group of rows n, of which each has COUNT, low and high halves."""
    if COUNT:
        scale, zero = _pair(scales, n * COUNT + group, n >= 0)
        return _both(p, scale[:, None], zero[:, None], kind, ASM)
    elif BYTES:
        p = _eight(p, kind, ASM)
        return p, p
    else:
        return p, p


@jit
def _parts(
    x,
    w,
    scales,
    out,
    M,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of W times all of x^T over a part of K, on tensor cores. GATED: W is [gate ; up], act(gate x) * up x. BYTES:
    of 8 bits, and each row has a scale; GROUP: of 4 bits, BLOCK_K bytes hold so many numbers."""
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    kind: tl.constexpr = x.dtype.element_ty
    HALVES: tl.constexpr = 2 if GROUP else 1
    COUNT: tl.constexpr = K // GROUP if GROUP else 0
    COLUMNS: tl.constexpr = K // HALVES
    EACH: tl.constexpr = COLUMNS // PARTS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.minimum(n, N - 1).to(tl.int64)
    part = tl.program_id(1)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    mine = w + at[:, None] * COLUMNS + part * EACH
    other = mine + N.to(tl.int64) * COLUMNS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if AHEAD:
            # The first AHEAD numbers of each row, in four pieces, while the kernel before this one ends.
            size = tl.zeros([BLOCK_N, 4], tl.int32) + AHEAD // 4 * (
                w.dtype.element_ty.primitive_bitwidth // 8
            )
            ahead = tl.arange(0, 4)[None, :] * (AHEAD // 4)
            _ahead(mine + ahead, size)
            if GATED:
                _ahead(other + ahead, size)
        tl.extra.cuda.gdc_wait()
    home_x = x + tl.minimum(m, M - 1)[None, :] * K + part * (EACH * HALVES) + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k0 in tl.range(0, EACH, BLOCK_K, num_stages=STAGES):
        b = tl.load(home_x + k0 * HALVES)
        a = tl.load(mine + k0 + k[None, :], eviction_policy="evict_first")
        group = part * (EACH // BLOCK_K) + k0 // BLOCK_K
        a, high = _weights(a, scales, at, group, COUNT, kind, BYTES, ASM)
        acc = tl.dot(a, b, acc, input_precision=precision)
        if GROUP:
            rest = tl.load(home_x + k0 * HALVES + BLOCK_K)
            acc = tl.dot(high, rest, acc, input_precision=precision)
        if GATED:
            a = tl.load(other + k0 + k[None, :], eviction_policy="evict_first")
            a, high = _weights(a, scales, at + N, group, COUNT, kind, BYTES, ASM)
            up = tl.dot(a, b, up, input_precision=precision)
            if GROUP:
                up = tl.dot(high, rest, up, input_precision=precision)
    if BYTES and not GROUP:
        acc *= tl.load(scales + at)[:, None]
        if GATED:
            up *= tl.load(scales + at + N)[:, None]
    if GATED:
        acc = _activate(acc, ACT) * up
    to = out + part.to(tl.int64) * M * N + m[None, :].to(tl.int64) * N + n[:, None]
    valid = (m < M)[None, :] & (n < N)[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=valid)


# Rows of W a program, elements of K a step, parts of K, stages, warps, elements of a row that are asked for ahead.
Blocks = tuple[int, int, int, int, int, int]


def blocks_for(k: int, n: int, split: bool, gated: bool = False) -> Blocks:
    """Rows of W a program, elements of K a step, parts of K, stages, warps, and the elements of each row that are asked
    for ahead: with `split` one wave of programs."""
    block_k = 128 if k % 128 == 0 else 32 if k % 32 == 0 else 16
    if not split and not gated and n > 64 * SMS and k % 64 == 0:
        # Programs twice as large, rather than a few in a second wave.
        return 128, 64, 1, 4, 8, 0
    block_n = 64 if split or gated or n >= 8192 else 32
    parts = 1
    while split and parts < 8 and -(-n // block_n) * parts * 2 <= SMS:
        if k % (parts * 2 * block_k):
            break
        parts *= 2
    return block_n, block_k, parts, 4, 4, 512 if split else 0


def packed_blocks(w: Packed, rows: int, split: bool, gated: bool, deep: bool = False) -> Blocks:
    """The same for a packed W: elements are bytes, of 4 bits those of a group. Weights are widened between two
    products, so that programs must stand in for each other: three or four fit, unless they are `deep`."""
    n, columns = len(w) // (1 + gated), w.q.shape[1]
    block_k = w.group // 2 or (128 if columns % 128 == 0 else 16)
    block_n = 128 if rows > 16 and not gated and n >= 64 * SMS else 64
    count = 1
    while split and count < 8 and -(-n // block_n) * count * 2 <= 3 * SMS:
        if columns % (count * 2 * block_k):
            break
        count *= 2
    room = block_k * (block_n * (1 + gated) + max(16, rows) * (4 if w.group else 2))
    stages = max(3 if rows <= 128 else 2, min(8, 56_000 // room)) * (2 if deep else 1)
    return block_n, block_k, count, stages, 8 if rows > 64 else 4, 512


def parts(
    x: Tensor,
    w: Weight,
    split: bool = True,
    blocks: Blocks | None = None,
    *,
    act: str = "",
    gated: bool = False,
) -> Tensor:
    """x (m k) w^T (n k) in parts (s m n), float32, whose sum is the product; without `split` one, as x is, which may be
    `gated`: act(gate) * up of w = [gate ; up]. See test_gpu_parts_sum_to_the_product."""
    (m, k), n = x.shape, len(w) // 2 if gated else len(w)
    matrix, scales, group = as_read(w)
    if isinstance(w, Packed):
        blocks = blocks or packed_blocks(w, m, split, gated)
    block_n, block_k, count, stages, warps, ahead = blocks or blocks_for(k, n, split, gated)
    stages = min(stages, 2) if x.element_size() == 4 else stages  # shared memory
    kind = x.dtype if count == 1 else torch.float32
    out = torch.empty(count, m, n, dtype=kind, device=x.device)
    pdl, extra = launch(x)
    _parts[(triton.cdiv(n, block_n), count)](
        x,
        matrix,
        scales,
        out,
        m,
        n,
        K=k,
        BLOCK_M=max(16, triton.next_power_of_2(m)),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PARTS=count,
        STAGES=stages,
        AHEAD=min(ahead, matrix.shape[1] // count // 64 * 64),
        GATED=gated,
        ACT=act,
        BYTES=isinstance(w, Packed),
        GROUP=group,
        ASM=x.dtype == torch.bfloat16 and x.is_cuda,
        EXACT=x.dtype == torch.float32,
        PDL=pdl,
        num_warps=warps,
        **extra,
    )
    return out


def chosen(
    x: Tensor, w: Weight, plain: Form, may: bool, split: bool = False, act: str | None = None
) -> Tensor:
    """x by w as `plain` has it, or where it `may` be by `parts`, of Hopper its own: whichever is faster here. `act` is
    that of a gate."""
    most = HIGHEST_PACKED if isinstance(w, Packed) else HIGHEST
    fits = len(x) <= most and w.shape[1] % 16 == 0 and x.dtype == w.dtype and SWITCH["wide"]
    if not (may and fits and ready(x) and x.is_contiguous() and w.is_contiguous()):
        return plain(w)
    more: Any = {"act": act or "", "gated": act is not None}
    forms: dict[str, Form] = {"ours": partial(parts, x, split=split, **more), "torch": plain}
    if isinstance(w, Packed) and len(x) <= 64:
        blocks = packed_blocks(w, len(x), split, act is not None, deep=True)
        forms["ours, deep"] = partial(parts, x, split=split, blocks=blocks, **more)
    full = isinstance(w, Tensor) and x.data_ptr() % 16 == w.data_ptr() % 16 == 0
    if full and act in (None, "silu") and dense.hopper(x):
        count = blocks_for(w.shape[1], len(w) // (1 + more["gated"]), split, more["gated"])[2]
        forms = {"hopper": partial(dense.parts, x, count=count, gated=more["gated"]), **forms}
    key = f"rows {tuple(x.shape)} {len(w)} {split} {act} {x.dtype}{said(w)}"
    name = fastest(key, w, forms)
    y = forms[name](w)
    return y if split or name == "torch" else y[0]


def product(
    x: Tensor, w: Weight, bias: Tensor | None, fast: bool = True, split: bool = False
) -> Tensor:
    """x w^T + bias (m n); with `split` perhaps as parts (s m n)."""
    return chosen(x, w, lambda w: linear.product(x, w, bias), fast and bias is None, split)


def gated(x: Tensor, w: Weight, bias: Tensor | None, act: str, fast: bool = True) -> Tensor:
    """act(gate) * up of x by w = [gate ; up] (2n k)."""
    plain = lambda w: gate(linear.product(x, w, bias), act, fast)  # noqa: E731
    return chosen(x, w, plain, fast and bias is None, act=act)
