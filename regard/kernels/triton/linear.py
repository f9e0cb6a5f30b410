"""Linear layers for few rows on a GPU, y = act(norm(x) W^T + b) + residual: reading W is all that counts.

    python bench/gpu_kernels.py --part t      times them against torch's

`linear` is the dispatch, `reference` the plain form. The kernel gives each program a few rows of W over the whole of K,
all of it on the way from memory at once; the norm's factor is applied to the sum, 1/rms(x) sum_k x_k g_k w_nk, so that
x is read once and no kernel is spent on the norm.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.packed import Packed, Weight
from regard.kernels.triton.measured import Form, fastest
from regard.kernels.triton.packed import _halves, _pair, as_read, jit, triton

if triton is not None:
    import triton.language as tl

SMS = 132  # an H200's multiprocessors
MOST = 4  # rows of x above which torch's matrix product takes over
LONGEST = 16384  # largest K: its loop is unrolled
SWITCH = {
    "triton": True,  # False: plain torch everywhere
    "pdl": True,  # programmatic dependent launch where there is: a kernel is set up while the last one ends
    "wide": True,  # more than MOST rows by wide.py; False: by torch's matrix product
    "interpreted": False,  # kernels off the GPU too: for tests under TRITON_INTERPRET=1
}
# (K, N, gated) -> rows of W a program, elements of K a step, warps; measured on an H200. Others: see `shape`.
SHAPES: dict[tuple[int, int, bool], tuple[int, int, int]] = {}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
}
# An RMS norm: its weight, eps, and what is added to the weight (1 in Gemma).
Rms = tuple[Tensor, float, float]


# --- the plain form -----------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, norm: Rms) -> Tensor:
    weight, eps, shift = norm
    if not shift:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide) + shift, eps).to(x.dtype)


def product(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    """x w^T + bias by torch; a packed w is brought back first."""
    return F.linear(x, w if isinstance(w, Tensor) else w.dense(), bias)


def reference(
    x: Tensor,
    w: Weight,
    bias: Tensor | None = None,
    *,
    norm: Rms | None = None,
    act: str = "",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """x (m k), w (n k) -> act(norm(x) w^T + bias) + residual (m n). `gated`: w is [gate ; up] (2n k) and the result
    act(gate x) * up x."""
    if norm is not None:
        x = rms_norm(x, norm)
    y = product(x, w, bias)
    if gated:
        gate, up = y.chunk(2, -1)
        y = ACTIVATIONS[act](gate) * up
    else:
        y = ACTIVATIONS[act](y)
    return y if residual is None else residual + y


# --- the kernel ---------------------------------------------------------------------------------------------------


@jit
def _activate(x, ACT: tl.constexpr):
    if ACT == "silu":
        x = x * tl.sigmoid(x)
    elif ACT == "relu":
        x = tl.maximum(x, 0.0)
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":  # 0.5 (1 + tanh z) = sigmoid(2z)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "tanh":
        x = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    elif ACT == "quick_gelu":
        x = x * tl.sigmoid(1.702 * x)
    elif ACT == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return x


@jit
def _ahead(at, size):
    """Ask for `size` bytes from each place on, a multiple of 16, to be brought into the GPU's cache; of 0 for none. It
    is a hint: it may come before `gdc_wait`, whoever is writing there."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [at, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _columns(k0, BLOCK_K: tl.constexpr, BYTES: tl.constexpr):
    """From k0 on: (1 K). Of bytes by eights (K/8 8), which a thread has, as it has eight numbers of x."""
    if BYTES:
        return (k0 + 8 * tl.arange(0, BLOCK_K // 8))[:, None] + tl.arange(0, 8)[None, :]
    else:
        return (k0 + tl.arange(0, BLOCK_K))[None, :]


@jit
def _laid(first, end, k0, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows from `first` on and eights of columns from k0 on, end to end, (N K/8) each: were they two axes, it would be
    the compiler's choice whether a thread's neighbours have the next columns, as they should, or the next row."""
    EACH: tl.constexpr = BLOCK_K // 8
    each = tl.arange(0, BLOCK_N * EACH)
    return tl.minimum(first + each // EACH, end - 1).to(tl.int64), k0 + 8 * (each % EACH)


@jit
def _eights(w, n, c, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Bytes of what is `_laid`, (N K/8 8)."""
    at = (n * COLUMNS + c)[:, None] + tl.arange(0, 8)[None, :]
    if COLUMNS % BLOCK_K == 0:
        tile = tl.load(w + at, eviction_policy="evict_first")
    else:
        here = (c < COLUMNS)[:, None]
        tile = tl.load(w + at, mask=here, other=0.0, eviction_policy="evict_first")
    return tl.reshape(tile, [BLOCK_N, BLOCK_K // 8, 8])


@jit
def _scales(
    scales,
    n,
    c,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF: tl.constexpr,
):
    """Scales and zeros of the same, (N K/8); HALF: bytes of a group."""
    scale, zero = _pair(scales, n * (COLUMNS // HALF) + c // HALF, c < COLUMNS)
    SIZE: tl.constexpr = [BLOCK_N, BLOCK_K // 8]
    return tl.reshape(scale, SIZE), tl.reshape(zero, SIZE)


@jit
def _tile(w, n, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows n (N 1) and columns k (1 K) of w."""
    if K % BLOCK_K == 0:
        return tl.load(w + n * K + k, eviction_policy="evict_first")
    else:
        return tl.load(w + n * K + k, mask=k < K, other=0.0, eviction_policy="evict_first")


@jit
def _read(x, k, c, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Numbers k of a row, in float32, where columns c are."""
    if COLUMNS % BLOCK_K == 0:
        return tl.load(x + k).to(tl.float32)
    else:
        return tl.load(x + k, mask=c < COLUMNS, other=0.0).to(tl.float32)


@jit
def _dots(
    tile, x, other, scale, zero, total, GROUP: tl.constexpr, BYTES: tl.constexpr, ASM: tl.constexpr
):
    """Rows of a tile times x. In groups, halves of its bytes times x and `other`, whose sum is `total`: sums of eight
    have a scale and a zero."""
    if GROUP:
        # Two sums, of which each product is a part as it is made.
        both = tl.sum(_halves(tile, 0, ASM) * x, 2) + tl.sum(_halves(tile, 1, ASM) * other, 2)
        # 128 (1 + q / 128) is 136 more than q - 8.
        return tl.sum(both * (scale * 128.0) + total * (zero - scale * 136.0), 1)
    elif BYTES:
        return tl.sum(tl.sum(tile.to(tl.float32) * x, 2), 1)
    else:
        return tl.sum(tile.to(tl.float32) * x, 1)


@jit
def _rows(
    x,
    w,
    scales,
    bias,
    norm,
    residual,
    y,
    n_out,
    eps,
    shift,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BYTES: tl.constexpr,
    ASM: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """BYTES: numbers of W have 8 bits, and each row a scale; GROUP: 4 bits, and as many share a scale and a zero."""
    COLUMNS: tl.constexpr = K // 2 if GROUP else K
    HALF: tl.constexpr = GROUP // 2  # bytes of a group
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.minimum(n, n_out - 1).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    for k0 in tl.static_range(0, COLUMNS, BLOCK_K):
        scale, zero, more, nothing, total, rest = 1.0, 0.0, 1.0, 0.0, 0.0, 0.0
        if BYTES:
            first = tl.program_id(0) * BLOCK_N
            row, column = _laid(first, n_out, k0, BLOCK_N, BLOCK_K)
            a = _eights(w, row, column, COLUMNS, BLOCK_N, BLOCK_K)
            if GROUP:
                scale, zero = _scales(scales, row, column, COLUMNS, BLOCK_N, BLOCK_K, HALF)
            if GATED:
                b = _eights(w, row + n_out, column, COLUMNS, BLOCK_N, BLOCK_K)
                if GROUP:
                    more, nothing = _scales(
                        scales, row + n_out, column, COLUMNS, BLOCK_N, BLOCK_K, HALF
                    )
            c = (k0 + 8 * tl.arange(0, BLOCK_K // 8))[:, None] + tl.arange(0, 8)[None, :]
        else:
            c = (k0 + tl.arange(0, BLOCK_K))[None, :]
            a = _tile(w, at[:, None], c, K, BLOCK_K)
            if GATED:
                b = _tile(w, (at + n_out)[:, None], c, K, BLOCK_K)
        k = c // HALF * GROUP + c % HALF if GROUP else c
        if NORM:
            g = _read(norm, k, c, COLUMNS, BLOCK_K) + shift
            if GROUP:
                h = _read(norm + HALF, k, c, COLUMNS, BLOCK_K) + shift
        if PDL and k0 == 0:
            tl.extra.cuda.gdc_wait()  # only now x must be there
        for i in tl.static_range(M):
            xi = _read(x + i * K, k, c, COLUMNS, BLOCK_K)
            if GROUP:
                rest = _read(x + i * K + HALF, k, c, COLUMNS, BLOCK_K)
            mine = m == i
            if NORM:
                both = xi * xi
                if GROUP:
                    both += rest * rest
                    rest = rest * h
                square += tl.where(mine, tl.sum(both), 0.0)
                xi = xi * g
            if GROUP:
                total = tl.sum(xi + rest, 1)[None, :]
                rest = tl.expand_dims(rest, 0)
            if BYTES:
                xi = tl.expand_dims(xi, 0)
            dots = _dots(a, xi, rest, scale, zero, total, GROUP, BYTES, ASM)
            acc += tl.where(mine[:, None], dots[None, :], 0.0)
            if GATED:
                dots = _dots(b, xi, rest, more, nothing, total, GROUP, BYTES, ASM)
                up += tl.where(mine[:, None], dots[None, :], 0.0)
    if BYTES and not GROUP:
        acc *= tl.load(scales + at)[None, :]
        if GATED:
            up *= tl.load(scales + at + n_out)[None, :]
    if NORM:
        by = tl.rsqrt(square / K + eps)[:, None]
        acc, up = acc * by, up * by
    if BIAS:
        acc += tl.load(bias + at).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + at + n_out).to(tl.float32)[None, :]
    acc = _activate(acc, ACT)
    if GATED:
        acc = acc * up
    place = m[:, None] * n_out + n[None, :]
    valid = (m < M)[:, None] & (n < n_out)[None, :]
    if RESIDUAL:
        acc += tl.load(residual + place, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + place, acc.to(y.dtype.element_ty), mask=valid)


@functools.cache
def dependent(index: int) -> bool:
    """Whether kernels can be launched early there: capability 9.0 and a Triton that knows how."""
    try:
        from triton.backends.nvidia.compiler import CUDAOptions

        known = hasattr(CUDAOptions, "launch_pdl") and hasattr(tl.extra.cuda, "gdc_wait")
    except (ImportError, AttributeError):
        return False
    return known and torch.cuda.get_device_capability(index) >= (9, 0)


def launch(x: Tensor) -> tuple[bool, dict[str, bool]]:
    """Whether a kernel on x's device starts early (its PDL), and what its launch needs for that."""
    pdl = SWITCH["pdl"] and x.is_cuda and dependent(x.device.index or 0)
    return pdl, {"launch_pdl": True} if pdl else {}


def shape(k: int, n: int, gated: bool) -> tuple[int, int, int]:
    """Rows of W a program, elements of K a step, warps: 64 numbers of W a thread on the way at once; where the last
    step would be mostly empty, smaller ones."""
    if (k, n, gated) in SHAPES:
        return SHAPES[k, n, gated]
    block_k = min(1 << (k - 1).bit_length(), 8192)
    if k > 1024 and -k % block_k > k // 4:
        block_k = next(b for b in (4096, 2048, 1024) if -k % b <= k // 4 or b == 1024)
        return 4096 // block_k, block_k, 4
    warps = 8 if n >= 16384 or block_k == 8192 else 4
    block_n = max(1, 2048 * warps // block_k // (2 if gated else 1))
    return block_n, block_k, warps


def packed_shape(w: Packed, rows: int, gated: bool, many: bool = False) -> tuple[int, int, int]:
    """The same for a packed W: elements are bytes, for one row twice as many. `many`: twice as many rows of W for what
    a program makes of x, in twice the registers."""
    block_n, block_k, warps = shape(w.q.shape[1], len(w) // (1 + gated), gated)
    return block_n * (2 if rows == 1 else 1) * (2 if many else 1), block_k, warps


def fused(
    x: Tensor,
    w: Weight,
    bias: Tensor | None = None,
    *,
    norm: Rms | None = None,
    act: str = "",
    gated: bool = False,
    residual: Tensor | None = None,
    blocks: tuple[int, int, int] | None = None,
) -> Tensor:
    """Equals `reference`; x, w and residual contiguous. See test_gpu_linear_matches_reference."""
    rows, k = x.shape
    n = len(w) // 2 if gated else len(w)
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    matrix, scales, group = as_read(w)
    if isinstance(w, Packed):
        blocks = blocks or packed_shape(w, rows, gated)
    block_n, block_k, warps = blocks or shape(k, n, gated)
    pdl, extra = launch(x)
    _rows[(triton.cdiv(n, block_n),)](
        x,
        matrix,
        scales,
        x if bias is None else bias,
        x if norm is None else norm[0],
        x if residual is None else residual,
        y,
        n,
        *((0.0, 0.0) if norm is None else norm[1:]),
        K=k,
        M=rows,
        BLOCK_M=1 << (rows - 1).bit_length(),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP=group,
        BYTES=isinstance(w, Packed),
        ASM=x.is_cuda,
        NORM=norm is not None,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        ACT=act,
        PDL=pdl,
        num_warps=warps,
        **extra,
    )
    return y


# --- dispatch -----------------------------------------------------------------------------------------------------


def ready(x: Weight) -> bool:
    """Whether kernels can run where x is."""
    return triton is not None and SWITCH["triton"] and (x.is_cuda or SWITCH["interpreted"])


def said(w: Weight) -> str:
    """What a key says of a packed weight."""
    return f" {w.kind} {w.group}" if isinstance(w, Packed) else ""


def linear(
    x: Tensor,
    w: Weight,
    bias: Tensor | None = None,
    *,
    norm: Rms | None = None,
    act: str = "",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`reference`, by the kernel where that is faster: few rows on a GPU."""
    few = len(x) <= MOST and w.shape[1] <= LONGEST and x.dtype == w.dtype
    whole = x.is_contiguous() and w.is_contiguous() and w.shape[1] % 8 == 0
    more: Any = {"bias": bias, "norm": norm, "act": act, "gated": gated, "residual": residual}
    ours, plain = (lambda w, f=f: f(x, w, **more) for f in (fused, reference))
    if not (few and whole and ready(x)):
        return plain(w)
    key = f"linear {tuple(x.shape)} {len(w)} {norm is not None} {act} {gated} {x.dtype}{said(w)}"
    forms: dict[str, Form] = {"ours": ours, "torch": plain}
    if isinstance(w, Packed):
        blocks = packed_shape(w, len(x), gated, many=True)
        forms["ours, many"] = lambda w: fused(x, w, blocks=blocks, **more)
    return forms[fastest(key, w, forms)](w)
