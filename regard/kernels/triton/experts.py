"""Mixtures of experts on a GPU without a word to the host: the router's choice, and the products of the chosen experts.

    python bench/gpu_kernels.py --part e      checks them and times them against the weights they must read

Few rows: a program takes some rows of one expert's matrix and all the tokens that chose it, so that each chosen expert
is read once. More than `FEW`: the device sorts the choices by expert first, and a program takes a tile of them. What an
expert gives is multiplied by its weight and left as one part (a n m) of a sum, for the norm that reads it.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.kernels.triton.linear import ACTIVATIONS, _activate, jit, launch, ready, triton

if triton is not None:
    import triton.language as tl

FEW = 16  # rows up to which nothing is sorted
SORTED = 1024  # pairs of token and choice up to which one program sorts them
# Tokens and rows of W per program, elements of K per step, stages, warps.
Blocks = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Experts:
    """The weights of all experts: gate and up (E f m), down (E m f), their biases (E f), (E f), (E m) or None."""

    gate: Tensor
    up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor, Tensor] | None = None
    act: str = "silu"
    limit: float | None = None  # the gate stays below it, up within it, and 1 is added to up


# --- the plain forms ----------------------------------------------------------------------------------------------


def reference(x: Tensor, chosen: Tensor, weight: Tensor, w: Experts) -> Tensor:
    """sum over a of weight_na E_chosen_na(x_n): x (n m) -> (n m). Every expert reads every token: fixed shapes."""
    out = torch.zeros_like(x)
    for e in range(len(w.gate)):
        gate, up = x @ w.gate[e].T, x @ w.up[e].T
        if w.biases is not None:
            gate, up = gate + w.biases[0][e], up + w.biases[1][e]
        if w.limit is not None:
            gate, up = gate.clamp(max=w.limit), up.clamp(-w.limit, w.limit) + 1
        y = (ACTIVATIONS[w.act](gate) * up) @ w.down[e].T
        if w.biases is not None:
            y = y + w.biases[2][e]
        share = (weight * (chosen == e)).sum(-1, keepdim=True)
        # Of tokens that did not choose it, nothing: not even 0 times what may be no number.
        out += torch.where(share != 0, y * share, 0).to(x.dtype)
    return out


# --- the router ---------------------------------------------------------------------------------------------------


@jit
def _scores(
    x,
    w,
    bias,
    out,
    E,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Logits of one token and BLOCK_E experts, in float32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    mine = w + tl.minimum(e, E - 1)[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_E, BLOCK_K], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K):
        real = k0 + k < K
        a = tl.load(x + row * K + k0 + k, mask=real, other=0.0).to(tl.float32)
        acc += tl.load(mine + k0, mask=real[None, :], other=0.0).to(tl.float32) * a[None, :]
    y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(bias + tl.minimum(e, E - 1)).to(tl.float32)
    tl.store(out + row * E + e, y, mask=e < E)


@jit
def _choose(
    logits,
    correction,
    chosen,
    weight,
    gain,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    A: tl.constexpr,
    ROOM: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    CORRECTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The A best of one token's E scores; of equal ones the first."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    e, j = tl.arange(0, BLOCK), tl.arange(0, ROOM)
    x = tl.load(logits + row * E + e, mask=e < E, other=float("-inf"))
    if SIGMOID:
        score = tl.sigmoid(x)
    else:
        score = tl.exp(x - tl.max(x, 0))
        score = score / tl.sum(score, 0)
    wish = score
    if CORRECTED:
        wish += tl.load(correction + e, mask=e < E, other=0.0).to(tl.float32)
    wish = tl.where(e < E, wish, float("-inf"))
    places = tl.zeros([ROOM], tl.int32)
    shares = tl.zeros([ROOM], tl.float32)
    for i in tl.static_range(A):
        # Where nothing is a number, the last one.
        place = tl.min(tl.where(wish == tl.max(wish, 0), e, E - 1), 0)
        places = tl.where(j == i, place, places)
        shares = tl.where(j == i, tl.sum(tl.where(e == place, score, 0.0), 0), shares)
        wish = tl.where(e == place, float("-inf"), wish)
    if NORMALIZED:
        shares = shares / (tl.sum(shares, 0) + 1e-20)
    tl.store(chosen + row * A + j, places.to(tl.int64), mask=j < A)
    tl.store(weight + row * A + j, shares * gain, mask=j < A)


def scores(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x (n m) w^T (E m) + bias in float32. See test_gpu_router_matches_the_plain_one."""
    (n, k), e = x.shape, len(w)
    out = torch.empty(n, e, dtype=torch.float32, device=x.device)
    pdl, extra = launch(x)
    block = min(8, triton.next_power_of_2(e))
    _scores[(n, triton.cdiv(e, block))](
        x, w, w if bias is None else bias, out, e, K=k, BLOCK_E=block, BLOCK_K=512,
        BIAS=bias is not None, PDL=pdl, num_warps=4, **extra
    )  # fmt: skip
    return out


def choose(
    logits: Tensor,
    active: int,
    *,
    sigmoid: bool,
    normalized: bool,
    gain: float,
    correction: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """logits (n E), float32 -> the chosen experts (n a) and their weights (n a)."""
    n, e = logits.shape
    chosen = torch.empty(n, active, dtype=torch.long, device=logits.device)
    weight = torch.empty(n, active, dtype=torch.float32, device=logits.device)
    pdl, extra = launch(logits)
    _choose[(n,)](
        logits, logits if correction is None else correction, chosen, weight, gain, E=e,
        BLOCK=triton.next_power_of_2(e), A=active, ROOM=triton.next_power_of_2(active), SIGMOID=sigmoid,
        NORMALIZED=normalized, CORRECTED=correction is not None, PDL=pdl, num_warps=1, **extra
    )  # fmt: skip
    return chosen, weight


# --- the products -------------------------------------------------------------------------------------------------


@jit
def _experts(
    x,
    chosen,
    weight,
    order,
    tiles,
    w,
    other,
    bias,
    other_bias,
    out,
    rows,
    N,
    limit,
    K: tl.constexpr,
    A: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FIRST: tl.constexpr,
    SORTED: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ACT: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of one expert's matrix times the tokens that chose it. FIRST: act(gate x) * up x, into (pairs f); else the
    down product of those by its weight, into (a n m). PAIRS: programs go by choice, and the first of an expert does it
    for all; 0: by expert."""
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Which expert, and the pair (token, choice) behind each column; -1: none.
    if SORTED:
        e = tl.load(tiles + t * 3)
        at = tl.load(tiles + t * 3 + 1) + m
        pair = tl.load(order + at, mask=at < tl.load(tiles + t * 3 + 2), other=-1)
    else:
        e = t.to(tl.int64)
        if PAIRS:
            e = tl.load(chosen + t)
            before = tl.arange(0, PAIRS)
            same = tl.load(chosen + before, mask=before < t, other=-1) == e
            if tl.max(same.to(tl.int32), 0) > 0:
                return
        pair = tl.full([BLOCK_M], -1, tl.int64)
        for j in tl.static_range(A):
            mine = tl.load(chosen + m * A + j, mask=m < rows, other=-1) == e
            pair = tl.where(mine, m * A + j, pair)
    if tl.max(pair, 0) < 0:
        return
    here = pair >= 0
    pair = tl.maximum(pair, 0)
    at_n = tl.minimum(n, N - 1)
    home = (e * N + at_n.to(tl.int64))[:, None] * K + k[None, :]
    home_x = x + (pair // A if FIRST else pair)[None, :] * K + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        b = tl.load(home_x + k0)
        a = tl.load(w + home + k0, eviction_policy="evict_first")
        acc = tl.dot(a, b, acc, input_precision=precision)
        if FIRST:
            a = tl.load(other + home + k0, eviction_policy="evict_first")
            up = tl.dot(a, b, up, input_precision=precision)
    if BIAS:
        acc += tl.load(bias + e * N + at_n).to(tl.float32)[:, None]
        if FIRST:
            up += tl.load(other_bias + e * N + at_n).to(tl.float32)[:, None]
    valid = here[None, :] & (n < N)[:, None]
    if FIRST:
        if LIMIT:
            acc = tl.minimum(acc, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        acc = _activate(acc, ACT) * up
        to = pair
    else:
        acc = acc * tl.load(weight + pair)[None, :]
        to = pair % A * rows + pair // A
    tl.store(out + to[None, :] * N + n[:, None], acc.to(out.dtype.element_ty), mask=valid)


def sort(chosen: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Pairs (n a) sorted by expert, and tiles (t 3) of at most `block` of one expert: expert, first, end. As many tiles
    as there may be; those that are not needed are empty."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    each = torch.arange(experts, device=flat.device)
    count = (flat[:, None] == each).sum(0)
    end, need = count.cumsum(0), (count + block - 1) // block
    last = need.cumsum(0)
    t = torch.arange(tiles_of(chosen, experts, block), device=flat.device)
    e = torch.searchsorted(last, t, right=True).clamp(max=experts - 1)
    first = end[e] - count[e] + (t - last[e] + need[e]) * block
    return order, torch.stack([e, first, end[e]], 1)


def tiles_of(chosen: Tensor, experts: int, block: int) -> int:
    return min(experts, chosen.numel()) + chosen.numel() // block


@jit
def _sort(
    chosen,
    order,
    tiles,
    pairs,
    size,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """`sort` by one program. EXPERTS, PAIRS, TILES: powers of two above their numbers; an expert has MOST tiles."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    p, e, t = tl.arange(0, PAIRS), tl.arange(0, EXPERTS), tl.arange(0, TILES)
    mine = tl.load(chosen + p, mask=p < pairs, other=E).to(tl.int32)
    ordered = tl.sort(mine * PAIRS + p) % PAIRS
    tl.store(order + p, ordered.to(tl.int64), mask=p < pairs)
    count = tl.where(e < E, tl.histogram(mine, EXPERTS), 0)
    need = (count + BLOCK - 1) // BLOCK
    end, last = tl.cumsum(count, 0), tl.cumsum(need, 0)
    for j in tl.static_range(MOST):
        to, here = tiles + (last - need + j) * 3, j < need
        tl.store(to, e.to(tl.int64), mask=here)
        tl.store(to + 1, (end - count + j * BLOCK).to(tl.int64), mask=here)
        tl.store(to + 2, end.to(tl.int64), mask=here)
    spare, none = (t >= tl.sum(need, 0)) & (t < size), tl.zeros([TILES], tl.int64)
    for j in tl.static_range(3):
        tl.store(tiles + t * 3 + j, none, mask=spare)


def sort_few(chosen: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Equals `sort` up to what empty tiles say; see test_gpu_sort_matches_the_plain_one."""
    (n, a), size = chosen.shape, tiles_of(chosen, experts, block)
    order = torch.empty(n * a, dtype=torch.long, device=chosen.device)
    tiles = torch.empty(size, 3, dtype=torch.long, device=chosen.device)
    pdl, extra = launch(chosen)
    _sort[(1,)](
        chosen,
        order,
        tiles,
        n * a,
        size,
        E=experts,
        EXPERTS=triton.next_power_of_2(experts + 1),
        PAIRS=triton.next_power_of_2(n * a),
        TILES=triton.next_power_of_2(size),
        BLOCK=block,
        MOST=-(-n // block),
        PDL=pdl,
        num_warps=4,
        **extra,
    )
    return order, tiles


def blocks_for(k: int, rows: int, pairs: int, experts: int, gated: bool) -> Blocks:
    """Measured on an H200 for 8 experts of 4096 x 14336 and 128 of 2048 x 768."""
    most = max(b for b in (16, 32, 64, 128) if k % b == 0)
    if rows <= FEW:
        return 0, 64, most, 4 if gated else 5, 4
    each = triton.next_power_of_2(max(16, min(128, 2 * pairs // experts)))
    return each, 128, min(most, 64), 4, 8 if each >= 64 else 4


def suits(x: Tensor, w: Experts) -> bool:
    same = x.dtype == w.gate.dtype and x.is_contiguous() and w.act in ACTIVATIONS
    return ready(x) and same and w.gate.shape[1] % 16 == 0 and w.gate.shape[2] % 16 == 0


def experts(
    x: Tensor,
    chosen: Tensor,
    weight: Tensor,
    w: Experts,
    blocks: tuple[Blocks, Blocks] | None = None,
) -> Tensor:
    """Equals `reference`, in parts (a n m) whose sum it is. See test_gpu_experts_match_reference."""
    (n, m), a, (count, f, _) = x.shape, chosen.shape[1], w.gate.shape
    # torch's router gives some columns of a sorted matrix.
    chosen = chosen.contiguous()
    gates, downs = blocks or (blocks_for(k, n, n * a, count, k == m) for k in (m, f))
    # One order serves both products.
    plan: tuple[Tensor, ...] = ()
    if n > FEW:
        plan = (sort_few if n * a <= SORTED else sort)(chosen, count, gates[0])
    h = torch.empty(n * a, f, dtype=x.dtype, device=x.device)
    # Parts of a step's sum are not rounded; of prompts they would take too much room.
    kind = torch.float32 if n * a <= SORTED else x.dtype
    y = torch.empty(a, n, m, dtype=kind, device=x.device)
    grouped(x, chosen, weight, w, plan, h, gates)
    grouped(h, chosen, weight, w, plan, y, (gates[0], *downs[1:]))
    return y


def grouped(
    x: Tensor,
    chosen: Tensor,
    weight: Tensor,
    w: Experts,
    plan: tuple[Tensor, ...],
    out: Tensor,
    blocks: Blocks,
) -> None:
    """One of the two products: into h (pairs f), or from h into y (a n m)."""
    (n, a), count, first = chosen.shape, len(w.gate), out.dim() == 2
    block_m, block_n, block_k, stages, warps = blocks
    stages = min(stages, 2) if x.element_size() == 4 else stages  # shared memory
    by_pair = not plan and n * a <= count
    order, tiles = plan or (chosen, chosen)
    programs = len(tiles) if plan else n * a if by_pair else count
    one, other = (w.gate, w.up) if first else (w.down, w.down)
    biases = (w.biases[:2] if first else w.biases[2:] * 2) if w.biases else (x, x)
    size, (pdl, extra) = out.shape[-1], launch(x)
    _experts[(triton.cdiv(size, block_n), programs)](
        x,
        chosen,
        weight,
        order,
        tiles,
        one,
        other,
        *biases,
        out,
        n,
        size,
        w.limit or 0.0,
        K=x.shape[1],
        A=a,
        PAIRS=triton.next_power_of_2(n * a) if by_pair else 0,
        BLOCK_M=block_m if plan else max(16, triton.next_power_of_2(n)),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages,
        FIRST=first,
        SORTED=bool(plan),
        BIAS=w.biases is not None,
        LIMIT=w.limit is not None,
        ACT=w.act,
        EXACT=x.dtype == torch.float32,
        PDL=pdl,
        num_warps=warps,
        **extra,
    )
