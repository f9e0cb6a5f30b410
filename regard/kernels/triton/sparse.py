"""DeepSeek's sparse attention (DSA) of one token a row over pages on a GPU: index scores, and an exact top-k.

    python bench/gpu_kernels.py --part k,l      checks and times them

Nothing here sorts or waits for the host. The k-th largest score is found digit by digit (radix select): programs count
the digits of a piece of a row each, and the next pass goes on with what shares the digit of the k-th. What ties
with it is taken from the left, as `regard.attention.sparse.choose` does. `latent.decode` attends to the choice.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.kernels.triton.latent import MULTIPROCESSORS
from regard.kernels.triton.linear import jit, launch, ready, triton

if triton is not None:
    import triton.language as tl

PIECE, WARPS = 4096, 4  # scores a program of the top-k counts, and its warps
DIGITS = (7, 7, 6, 6, 6)  # bits of a score that are counted at once, up to 8
# Of the index, by whether its keys are float8: keys a step, warps, stages, programs a multiprocessor.
TILES = {False: (64, 4, 3, 6), True: (64, 4, 3, 12)}


def reference(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """Places (b k), ascending, of the k largest of the first `lengths` (b) of each row; equal ones go to the earliest.
    Where a row is shorter, all of it, and then anything."""
    at = torch.arange(scores.shape[1], device=scores.device)
    hidden = at >= lengths[:, None]
    order = (
        scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    )
    return order[:, :k].sort(-1).values.int()


@jit
def _rounded(x, AXIS: tl.constexpr):
    """x in float8, and the scales of its rows, as `to_fp8` has them."""
    size = tl.maximum(tl.max(tl.abs(x), AXIS), 1e-12) / 448.0
    return tl.div_rn(x, tl.expand_dims(size, AXIS)).to(tl.float8e4nv), size


@jit
def _turned(
    x, home, d, angle, cos, sin, mean, scale, norm, shift, HALF: tl.constexpr, NORMED: tl.constexpr
):
    """Features d of a vector at x + home, layer-normed and turned, each rounded as if it were written: float32."""
    kind = x.dtype.element_ty
    y = _scaled(x + home + d, d, mean, scale, norm, shift, NORMED)
    if HALF:
        # A feature turns with the one that is HALF away.
        low, turns = d < HALF, d < 2 * HALF
        away = tl.where(low, d + HALF, tl.where(turns, d - HALF, 0))
        other = _scaled(x + home + away, away, mean, scale, norm, shift, NORMED)
        at = angle * HALF + tl.where(low, d, d - HALF)
        u = tl.load(cos + at, mask=turns, other=1.0).to(tl.float32)
        v = tl.load(sin + at, mask=turns, other=0.0).to(tl.float32)
        y = (y * u + tl.where(low, -other, other) * v).to(kind).to(tl.float32)
    return y


@jit
def _scaled(x, d, mean, scale, norm, shift, NORMED: tl.constexpr):
    y = tl.load(x).to(tl.float32)
    if NORMED:
        y = (y - mean) * scale * tl.load(norm + d).to(tl.float32)
        y = (y + tl.load(shift + d).to(tl.float32)).to(x.dtype.element_ty).to(tl.float32)
    return y


@jit
def _update_cache(
    x, weight, out, q, asked, key, norm, shift, cos, sin, keys, sizes, table, pos, stride, row,
    gain, eps, K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_K: tl.constexpr, ROW: tl.constexpr, PAGE: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A row's key, normed and turned, into its page; by programs after the first some heads' queries, turned, and their
    weights, which the scales of float8 queries are part of."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, d = tl.load(pos + b), tl.arange(0, D)[None, :]
    if program > 0:
        h, k = (program - 1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK_K)
        head = tl.minimum(h, H - 1).to(tl.int64)[:, None]
        acc = tl.zeros([HEADS, BLOCK_K], tl.float32)
        for k0 in tl.range(0, K, BLOCK_K):
            real = k0 + k < K
            x_k = tl.load(x + b * K + k0 + k, mask=real, other=0.0).to(tl.float32)
            w = tl.load(weight + head * K + k0 + k[None, :], mask=real[None, :], other=0.0)
            acc += w.to(tl.float32) * x_k[None, :]
        each = tl.sum(acc, 1) * gain
        home = (b * H + head) * D
        query = _turned(q, home, d, at, cos, sin, 0.0, 1.0, norm, shift, HALF, False)
        if FP8:
            bits, size = _rounded(query, 1)
            tl.store(asked + home + d, bits, mask=(h < H)[:, None])
            each *= size
        else:
            tl.store(asked + home + d, query.to(asked.dtype.element_ty), mask=(h < H)[:, None])
        tl.store(out + b * H + h, each, mask=h < H)
    else:
        raw = tl.load(key + b * stride + d).to(tl.float32)
        mean = tl.sum(tl.sum(raw, 1), 0) / D
        scale = tl.rsqrt(tl.sum(tl.sum((raw - mean) * (raw - mean), 1), 0) / D + eps)
        y = _turned(key, b * stride, d, at, cos, sin, mean, scale, norm, shift, HALF, True)
        spot = tl.load(table + b * row + at // PAGE).to(tl.int64) * PAGE + at % PAGE
        if FP8:
            eights, size_k = _rounded(y, 1)
            tl.store(keys + spot * ROW + d, eights)
            tl.store(sizes + spot * (ROW // 4) + ROW // 4 - 4 + tl.arange(0, 1), size_k)
        else:
            tl.store(keys + spot * ROW + d, y.to(keys.dtype.element_ty))


@jit
def _index(
    q, keys, sizes, weights, table, pos, out, row, bound, span, H: tl.constexpr, D: tl.constexpr,
    ROW: tl.constexpr, HEADS: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
    PAGE: tl.constexpr, FP8: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out (b bound) = sum_j w_j relu(q_j . k_s) for a span of the keys of a row, which are ROW numbers apart."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    b, start = tl.program_id(1).to(tl.int64), tl.program_id(0) * span
    end = tl.minimum(tl.load(pos + b).to(tl.int32) + 1, start + span)
    h, d, k = tl.arange(0, HEADS), tl.arange(0, D), tl.arange(0, BLOCK_S)
    real = h < H
    asked = tl.load(q + (b * H + tl.where(real, h, 0))[None, :] * D + d[:, None])
    w = tl.load(weights + b * H + h, mask=real, other=0.0).to(tl.float32)
    home = table + b * row
    page = tl.load(home + tl.minimum(start + k, end - 1) // PAGE, mask=start + k < end, other=0)
    for s0 in tl.range(start, end, BLOCK_S, num_stages=STAGES):
        at = tl.minimum(s0 + k, end - 1)
        spot = page.to(tl.int64) * PAGE + at % PAGE
        x = tl.load(keys + spot[:, None] * ROW + d[None, :])
        # The next pages, so that no load of keys waits for one of the table.
        page = tl.load(home + tl.minimum(at + BLOCK_S, end - 1) // PAGE)
        size = tl.load(sizes + spot * (ROW // 4) + ROW // 4 - 4) if FP8 else 1.0
        dots = tl.dot(x, asked, input_precision=precision)
        y = tl.sum(tl.maximum(dots, 0.0) * w[None, :], 1) * size
        tl.store(out + b * bound + s0 + k, y, mask=s0 + k < end)


@jit
def _ordered(scores, at, end):
    """Bits of scores that compare, as unsigned numbers, as the scores do; and which of them there are."""
    x = tl.load(scores + at, mask=at < end, other=0.0)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True), at < end


@jit
def _found(counts, state, BITS: tl.constexpr):
    """Of the counts of a digit: the digits up to it of what is looked for, and which of those that have them it is."""
    high, need = tl.load(state).to(tl.uint32, bitcast=True), tl.load(state + 1)
    digit = tl.arange(0, 1 << BITS)
    count = tl.load(counts + digit)
    above = tl.sum(count, 0) - tl.cumsum(count, 0)
    hit = (above < need) & (above + count >= need)
    high = (high << BITS) | tl.sum(tl.where(hit, digit, 0), 0).to(tl.uint32)
    return high, need - tl.sum(tl.where(hit, above, 0), 0)


@jit
def _count(
    scores, pos, counts, state, pieces, bound, K: tl.constexpr, PASS: tl.constexpr,
    SHIFT: tl.constexpr, LAST: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    PIECES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Count a digit, BITS wide from bit SHIFT on, of the scores whose higher digits are the k-th largest's; the one
    before it was LAST wide. counts (passes b 256), of zeros; state (passes b 2): those higher digits, and which of what
    has them is looked for. The last pass leaves in pieces (b PIECES 257) what each piece counted, and how many of it
    have higher digits."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    piece, b, rows = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    end = tl.load(pos + b).to(tl.int32) + 1
    if piece * BLOCK < end:
        bits, real = _ordered(scores + b * bound, piece * BLOCK + tl.arange(0, BLOCK), end)
        here = PASS * rows + b
        if PASS == 0:
            high, need, kept = tl.zeros([], tl.uint32), tl.minimum(end, K), real
        else:
            high, need = _found(counts + (here - rows) * 256, state + (here - rows) * 2, LAST)
            kept = real & ((bits >> (SHIFT + BITS)) == high)
        if piece == 0:
            tl.store(state + here * 2, high.to(tl.int32, bitcast=True))
            tl.store(state + here * 2 + 1, need)
        digit = ((bits >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        found, at = tl.zeros([1 << BITS], tl.int32), tl.arange(0, 1 << BITS)
        # In the end few pieces have anything left.
        if PASS < 3 or tl.max(kept.to(tl.int32), 0) > 0:
            found = tl.histogram(digit, 1 << BITS, mask=kept)
            tl.atomic_add(counts + here * 256 + at, found, mask=found > 0, sem="relaxed")
        if SHIFT == 0:
            mine = pieces + (b * PIECES + piece) * 257
            tl.store(mine + at, found)
            tl.store(mine + 256, tl.sum((real & ((bits >> BITS) > high)).to(tl.int32), 0))


@jit
def _pick(
    scores, pos, counts, state, pieces, table, out, row, bound, K: tl.constexpr, PAGE: tl.constexpr,
    PASSES: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """The places of what is above the k-th largest, and from the left of what ties with it: out (b K), ascending; with
    a block table, where these tokens lie in a pool."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    piece, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end = tl.load(pos + b).to(tl.int32) + 1
    if piece * BLOCK < end:
        at = piece * BLOCK + tl.arange(0, BLOCK)
        bits, real = _ordered(scores + b * bound, at, end)
        here = (PASSES - 1) * tl.num_programs(1) + b
        least, room = _found(counts + here * 256, state + here * 2, BITS)
        # What earlier pieces have.
        p, column = tl.arange(0, PIECES)[:, None], tl.arange(0, 1 << BITS)[None, :]
        mine, digit = pieces + (b * PIECES + p) * 257, (least & ((1 << BITS) - 1)).to(tl.int32)
        each = tl.load(mine + column, mask=(p < piece) & (column >= digit), other=0)
        ties = tl.sum(tl.sum(tl.where(column == digit, each, 0), 1), 0)
        larger = tl.sum(tl.sum(each, 1), 0) - ties
        larger += tl.sum(tl.sum(tl.load(mine + 256, mask=p < piece, other=0), 1), 0)
        tied = real & (bits == least)
        order = ties + tl.cumsum(tied.to(tl.int32), 0)
        chosen = (real & (bits > least)) | (tied & (order <= room))
        to = larger + tl.minimum(ties, room) + tl.cumsum(chosen.to(tl.int32), 0) - 1
        if PAGE:
            at = tl.load(table + b * row + at // PAGE, mask=chosen, other=0) * PAGE + at % PAGE
        tl.store(out + b * K + to, at, mask=chosen)


# --- calls --------------------------------------------------------------------------------------------------------


def suits(dim: int, heads: int, x: Tensor, fp8: bool) -> bool:
    """Whether the kernels can do it: an index of 16 to 256 (a power of two) wide, up to 128 heads; float8 on a GPU that
    multiplies it, 32 wide at least."""
    if fp8 and not (x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)):
        return False
    least = 32 if fp8 else 16
    return ready(x) and dim & (dim - 1) == 0 and least <= dim <= 256 and heads <= 128


def fp8_parts(keys: Tensor) -> tuple[Tensor, Tensor, int]:
    """Keys of `packed_fp8` (pages page .) as float8 and, for their scales, as float32 numbers; and bytes a key."""
    bits = keys.view(torch.float8_e4m3fn)
    return bits, keys.view(torch.float32), bits.shape[-1]


def update_cache(
    x: Tensor, weight: Tensor, q: Tensor | None, key: Tensor, keys: Tensor, table: Tensor, pos: Tensor,
    *, norm: tuple[Tensor, Tensor, float], angles: tuple[Tensor, Tensor] | None, fp8: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What an indexer makes of tokens at `pos` (b): key (b D), layer-normed and turned, goes into its page, with `fp8`
    as `packed_fp8` has it. Of queries q (b H D), if they are given: turned, in float8 too, and the weights of heads
    (b H) by a matrix (H m) from x (b m), as `index` takes them. See
    test_gpu_sparse_update_cache_matches_the_indexer."""
    (b, d), h, (cos, sin), (pdl, extra) = key.shape, len(weight), angles or (x, x), launch(x)
    bits, sizes, row = fp8_parts(keys) if fp8 else (keys, keys, d)
    out = torch.empty(b, h, dtype=torch.float32, device=x.device)
    asked = torch.empty(b, h, d, dtype=bits.dtype, device=x.device)
    heads = min(8, triton.next_power_of_2(h))
    place = (bits, sizes, table, pos, key.stride(0), table.shape[1])
    given = (x, weight, out, x if q is None else q, asked, key, *norm[:2], cos, sin, *place)
    _update_cache[(b, 1 if q is None else 1 + triton.cdiv(h, heads))](
        *given, (h * d) ** -0.5, norm[2], K=x.shape[1], H=h, D=d,
        HALF=0 if angles is None else cos.shape[1], HEADS=heads, BLOCK_K=512, ROW=row,
        PAGE=keys.shape[1], FP8=fp8, PDL=pdl, **extra
    )  # fmt: skip
    return asked, out


def index(
    q: Tensor, keys: Tensor, weights: Tensor, table: Tensor, pos: Tensor, bound: int
) -> Tensor:
    """Scores (b bound) of the keys up to `pos` (b), what is behind unwritten: q (b H D), weights (b H), keys (pages
    page D) by a block table (b places). Queries in float8: keys are those of `packed_fp8`, weights hold q's scales."""
    (b, h, d), fp8 = q.shape, q.dtype == torch.float8_e4m3fn
    tile, warps, stages, programs = TILES[fp8]
    # Each multiprocessor has as many programs as it holds, and those as much to do.
    spans = max(1, min(programs * MULTIPROCESSORS // b, triton.cdiv(bound, tile)))
    span = triton.cdiv(triton.cdiv(bound, spans), tile) * tile
    out = torch.empty(b, bound, dtype=torch.float32, device=q.device)
    pdl, extra = launch(q)
    bits, sizes, row = fp8_parts(keys) if fp8 else (keys, keys, d)
    _index[(spans, b)](
        q, bits, sizes, weights, table, pos, out, table.shape[1], bound, span, H=h, D=d, ROW=row,
        HEADS=max(16, triton.next_power_of_2(h)), BLOCK_S=tile, STAGES=stages, PAGE=keys.shape[1],
        FP8=fp8, EXACT=q.dtype == torch.float32, PDL=pdl, num_warps=warps, **extra
    )  # fmt: skip
    return out


def topk(scores: Tensor, pos: Tensor, k: int, table: Tensor | None = None, page: int = 0) -> Tensor:
    """`reference` of rows that end at `pos` (b), without a sort; what is behind a shorter row's end is unwritten. With
    a block table, the tokens' places in the pool instead. See test_gpu_topk_is_choose."""
    b, bound = scores.shape
    n = triton.next_power_of_2(triton.cdiv(bound, PIECE))
    like: dict[str, Any] = {"dtype": torch.int32, "device": scores.device}
    passes = len(DIGITS)
    counts, state = torch.zeros(passes, b, 256, **like), torch.empty(passes, b, 2, **like)
    pieces, out = torch.empty(b, n, 257, **like), torch.empty(b, k, **like)
    pdl, extra = launch(scores)
    same = (scores, pos, counts, state, pieces)
    sizes = {"K": k, "BLOCK": PIECE, "PIECES": n, "PDL": pdl, "num_warps": WARPS, **extra}
    last = 0
    for i, bits in enumerate(DIGITS):
        shift = sum(DIGITS[i + 1 :])
        _count[(n, b)](*same, bound, PASS=i, SHIFT=shift, LAST=last, BITS=bits, **sizes)
        last = bits
    table = out if table is None else table
    place = (table, out, table.shape[1], bound)
    sizes["num_warps"] = 2 * WARPS
    _pick[(n, b)](*same, *place, PAGE=page, PASSES=passes, BITS=last, **sizes)
    return out
