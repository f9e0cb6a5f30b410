"""Linear layers for few rows on a GPU, y = act(norm(x) W^T + b) + residual: reading W is all that counts.

    python bench/gpu_kernels.py --part t      times them against torch's

`linear` is the dispatch, `reference` the plain form. The kernel gives each program a few rows of W over the whole of K,
all of it on the way from memory at once; the norm's factor is applied to the sum, 1/rms(x) sum_k x_k g_k w_nk, so that
x is read once and no kernel is spent on the norm.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.triton.measured import fastest

try:
    # Half a second of imports, for nothing where there is no GPU and nobody interprets kernels.
    if not torch.cuda.device_count() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ImportError
    import triton
    import triton.language as tl
except ImportError:  # the plain forms need none
    triton = None

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


def reference(
    x: Tensor,
    w: Tensor,
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
    y = F.linear(x, w, bias)
    if gated:
        gate, up = y.chunk(2, -1)
        y = ACTIVATIONS[act](gate) * up
    else:
        y = ACTIVATIONS[act](y)
    return y if residual is None else residual + y


# --- the kernel ---------------------------------------------------------------------------------------------------

jit = triton.jit if triton is not None else lambda f: f


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
def _tile(w, n, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows n (N 1) and columns k (1 K) of w, float32."""
    if K % BLOCK_K == 0:
        tile = tl.load(w + n * K + k, eviction_policy="evict_first")
    else:
        tile = tl.load(w + n * K + k, mask=k < K, other=0.0, eviction_policy="evict_first")
    return tile.to(tl.float32)


@jit
def _rows(
    x,
    w,
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
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.minimum(n, n_out - 1).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    for k0 in tl.static_range(0, K, BLOCK_K):
        k = (k0 + tl.arange(0, BLOCK_K))[None, :]
        a = _tile(w, at[:, None], k, K, BLOCK_K)
        if GATED:
            b = _tile(w, (at + n_out)[:, None], k, K, BLOCK_K)
        if NORM:
            if K % BLOCK_K == 0:
                g = tl.load(norm + k).to(tl.float32) + shift
            else:
                g = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32) + shift
        if PDL and k0 == 0:
            tl.extra.cuda.gdc_wait()  # only now x must be there
        for i in tl.static_range(M):
            if K % BLOCK_K == 0:
                xi = tl.load(x + i * K + k).to(tl.float32)
            else:
                xi = tl.load(x + i * K + k, mask=k < K, other=0.0).to(tl.float32)
            mine = m == i
            if NORM:
                square += tl.where(mine, tl.sum(tl.sum(xi * xi, 1), 0), 0.0)
                xi = xi * g
            acc += tl.where(mine[:, None], tl.sum(a * xi, 1)[None, :], 0.0)
            if GATED:
                up += tl.where(mine[:, None], tl.sum(b * xi, 1)[None, :], 0.0)
    if NORM:
        scale = tl.rsqrt(square / K + eps)[:, None]
        acc, up = acc * scale, up * scale
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


def fused(
    x: Tensor,
    w: Tensor,
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
    block_n, block_k, warps = blocks or shape(k, n, gated)
    pdl, extra = launch(x)
    _rows[(triton.cdiv(n, block_n),)](
        x,
        w,
        w if bias is None else bias,
        w if norm is None else norm[0],
        x if residual is None else residual,
        y,
        n,
        *((0.0, 0.0) if norm is None else norm[1:]),
        K=k,
        M=rows,
        BLOCK_M=1 << (rows - 1).bit_length(),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
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


def ready(x: Tensor) -> bool:
    """Whether kernels can run where x is."""
    return triton is not None and SWITCH["triton"] and (x.is_cuda or SWITCH["interpreted"])


def linear(
    x: Tensor,
    w: Tensor,
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
    key = f"linear {tuple(x.shape)} {len(w)} {norm is not None} {act} {gated} {x.dtype}"
    return ours(w) if fastest(key, w, {"ours": ours, "torch": plain}) == "ours" else plain(w)
