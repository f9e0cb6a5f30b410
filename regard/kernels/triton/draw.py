"""The next token drawn on a GPU without sorting the vocabulary: temperature, top-k, top-p and min-p in this order,
then the inverse of the cumulative probability. decode/sampling.py has the plain form.

Each token has a rank in its row, an int64 with the bits of its score above those of its id, so that no two are equal
and of equal scores the lowest id comes first. A filter keeps the ranks from one number per row upwards, the threshold:
the largest rank at which the probability (top-k: the number) of the tokens from there upwards reaches the goal. It is
found in four launches: two rounds of `_count` count the tokens in 127 equal parts of a range of scores, which bounds
what lies above each of them; `_gather` lists the tokens where the threshold may lie, some hundreds; `_settle` bisects
them.

Shapes are static, nothing waits for the host, and sums have a fixed order: equal inputs give equal tokens, in a CUDA
graph or outside.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from regard.kernels.triton.linear import jit, launch, triton

if triton is not None:
    import triton.language as tl

    STAT = tl.constexpr(6)  # numbers that a search keeps of a row

CHUNK = 4096  # tokens per program
TILE = 2048  # listed tokens at a time in `_settle`
BINS = 128  # of scores, in each of two rounds
KINDS = ("top_k", "top_p", "min_p")  # the filters, in this order


# --- what a program reads -----------------------------------------------------------------------------------------


@jit
def _wait(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@jit
def _rank(score, i):
    """Sorts as the score; of equal scores the lowest id is highest."""
    # -0.0 equals 0.0.
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 24) + (0xFFFFFF - i)


@jit
def _kept(logits, temperature, thresholds, b, i, V, THRESHOLD: tl.constexpr):
    """Logits over the temperature at the ids i of row b, -inf where a filter has dropped them. NaN counts as dropped;
    the temperature 0 counts as 1, see `_pick`."""
    x = tl.load(logits + b * V + i, mask=i < V, other=float("-inf")).to(tl.float32)
    t = tl.load(temperature + b).to(tl.float32)
    t = tl.where(t > 0, tl.maximum(t, 1e-6), 1.0)
    x = tl.minimum(tl.div_rn(tl.where(x == x, x, float("-inf")), t), 3e38)
    if THRESHOLD:
        x = tl.where(_rank(x, i) >= tl.load(thresholds + b), x, float("-inf"))
    return x


@jit
def _stat(stat, b):
    """What a search knows of row b: the largest x, the goal; then the range of the bins."""
    at = stat + STAT * b
    return tl.load(at), tl.load(at + 1)


@jit
def _active(temperature, target, b, V, KIND: tl.constexpr):
    """Whether row b is drawn, and by a filter that can drop something."""
    w = tl.load(target + b)
    if KIND == "top_k":
        active = (w > 0) & (w < V)
    else:
        active = w < 1
    return active & (tl.load(temperature + b) > 0)


@jit
def _allow(logits, words, out, V, W, CHUNK: tl.constexpr, PDL: tl.constexpr):
    _wait(PDL)
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(words + b * W + i // 32, mask=i < V, other=0)
    x = tl.load(logits + b * V + i, mask=i < V)
    x = tl.where((word >> (i % 32)) & 1 == 1, x, float("-inf"))
    tl.store(out + b * V + i, x, mask=i < V)


# --- the mass of what is kept -------------------------------------------------------------------------------------


@jit
def _mass(
    logits,
    temperature,
    thresholds,
    parts,
    counts,
    V,
    FIRST: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of a chunk: the largest x, sum exp(x - largest), the smallest x. And no bin has a token yet."""
    _wait(PDL)
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    i = c * CHUNK + tl.arange(0, CHUNK)
    x = _kept(logits, temperature, thresholds, b, i, V, THRESHOLD)
    top = tl.max(x, 0)
    to = parts + b * 4 * chunks + c
    tl.store(to, top)
    tl.store(to + chunks, tl.sum(tl.exp(x - tl.maximum(top, -3e38)), 0))
    tl.store(to + 3 * chunks, tl.min(tl.where(x == float("-inf"), 3e38, x), 0))
    if c == 0:
        tl.store(counts + 2 * BINS * b + tl.arange(0, 2 * BINS), tl.zeros([2 * BINS], tl.int32))
        if FIRST:
            # Nothing is dropped yet.
            tl.store(thresholds + b, -9223372036854775807)


@jit
def _part(parts, b, chunks, which, other, C: tl.constexpr):
    c = tl.arange(0, C)
    return tl.load(parts + (b * 4 + which) * chunks + c, mask=c < chunks, other=other)


@jit
def _floor(target, thresholds, parts, chunks, C: tl.constexpr, PDL: tl.constexpr):
    """min_p: x >= largest + log p."""
    _wait(PDL)
    b = tl.program_id(0).to(tl.int64)
    top = tl.max(_part(parts, b, chunks, 0, float("-inf"), C), 0)
    p = tl.load(target + b).to(tl.float32)
    if p > 0:
        # The lowest rank with that score.
        rank = _rank(top + tl.log(tl.minimum(p, 1.0)), 0xFFFFFF)
        tl.store(thresholds + b, tl.maximum(tl.load(thresholds + b), rank))


# --- the search for a threshold -----------------------------------------------------------------------------------


@jit
def _start(parts, target, b, V, chunks, KIND: tl.constexpr, C: tl.constexpr):
    """The range of scores in which the threshold lies, and `_stat`."""
    tops = _part(parts, b, chunks, 0, float("-inf"), C)
    mass = _part(parts, b, chunks, 1, 0.0, C)
    low = tl.min(_part(parts, b, chunks, 3, 3e38, C), 0)
    top = tl.maximum(tl.max(tops, 0), -3e38)
    whole = tl.sum((mass * tl.exp(tops - top)).to(tl.float64), 0)
    goal = tl.load(target + b).to(tl.float32)
    if KIND == "top_p":
        # Tokens less probable than (1 - p) / V have less than 1 - p in sum, so the threshold lies above them.
        rare = tl.log((1 - goal) / V) - 0.01
        low = tl.maximum(low, top + tl.log(whole.to(tl.float32)) + rare)
        # One token at least.
        goal = (tl.maximum(goal, 1e-12) * whole).to(tl.float32)
    # Just above the largest.
    high = top + (tl.abs(top) + 1) * 1e-6
    return low, high, top, goal


@jit
def _bin(score, low, high, BINS: tl.constexpr):
    """From 1 on, which of the equal parts from low to high a score lies in; 0 below, BINS above."""
    at = tl.minimum(tl.maximum((score - low) * ((BINS - 1) / (high - low)), 0.0), BINS - 2.0)
    return tl.where(score >= high, BINS, tl.where(score >= low, 1 + at.to(tl.int32), 0))


@jit
def _count(
    logits,
    temperature,
    target,
    thresholds,
    stat,
    parts,
    counts,
    V,
    KIND: tl.constexpr,
    ROUND: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BINS: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the tokens of each bin: in the whole range of scores, or in what the round before has left of it. Then what
    lies above is weighed."""
    _wait(PDL)
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    if _active(temperature, target, b, V, KIND):
        x = _kept(logits, temperature, thresholds, b, c * CHUNK + tl.arange(0, CHUNK), V, THRESHOLD)
        at = stat + STAT * b
        if ROUND == 0:
            low, high, top, goal = _start(parts, target, b, V, chunks, KIND, C)
            if c == 0:
                tl.store(at, top)
                tl.store(at + 1, goal)
        else:
            top, _ = _stat(stat, b)
            first, last, low, high = _between(stat, parts, counts, b, chunks, KIND, 0, BINS, C)
            # A little more on both sides, for rounding.
            wide, small = (high - low) / (BINS - 1), 2.4e-7 * (tl.abs(low) + tl.abs(high))
            high = low + (last + 0.02) * wide + small
            low = low + (first - 1.02) * wide - small
        if c == 0:
            tl.store(at + 2 + 2 * ROUND, low)
            tl.store(at + 3 + 2 * ROUND, high)
        bin = _bin(x, low, high, BINS)
        if ROUND == 1:
            weight = tl.where(bin == BINS, _weight(x, top, KIND), 0.0)
            tl.store(parts + (b * 4 + 2) * chunks + c, tl.sum(weight, 0))
        n = tl.histogram(tl.where(bin == BINS, 0, bin), BINS)
        to = counts + (2 * b + ROUND) * BINS + tl.arange(0, BINS)
        tl.atomic_add(to, n, mask=n > 0, sem="relaxed")


@jit
def _weight(x, top, KIND: tl.constexpr):
    """What a token counts for: its mass, or of top_k as one."""
    mass = tl.exp(x - top)
    return (x > float("-inf")).to(tl.float32) if KIND == "top_k" else mass


@jit
def _between(
    stat,
    parts,
    counts,
    b,
    chunks,
    KIND: tl.constexpr,
    ROUND: tl.constexpr,
    BINS: tl.constexpr,
    C: tl.constexpr,
):
    """The lowest and the highest bin of a round in which the threshold may lie, and its range: a token weighs no less
    than the lower end of its bin, no more than the upper one. Bins are taken to be wider by a hundredth, for
    rounding."""
    top, goal = _stat(stat, b)
    low = tl.load(stat + STAT * b + 2 + 2 * ROUND)
    high = tl.load(stat + STAT * b + 3 + 2 * ROUND)
    j, wide = tl.arange(0, BINS), (high - low) / (BINS - 1)
    at = counts + (2 * b + ROUND) * BINS + j
    n = tl.where(j > 0, tl.load(at), 0).to(tl.float32)
    less, more = n, n
    if KIND == "top_p":
        less = _times(n, low - top + (j - 1.01) * wide)
        more = _times(n, low - top + (j + 0.01) * wide)
    least = tl.cumsum(less, 0, reverse=True) * (1 - 1e-4)
    most = tl.cumsum(more, 0, reverse=True) * (1 + 1e-4)
    if ROUND == 1:
        above = tl.sum(_part(parts, b, chunks, 2, 0.0, C).to(tl.float64), 0).to(tl.float32)
        least, most = least + above * (1 - 1e-6), most + above * (1 + 1e-6)
    # The threshold does not lie below the range.
    first = tl.max(tl.where(least >= goal, j, 1), 0)
    return first, tl.max(tl.where(most >= goal, j, 1), 0), low, high


@jit
def _times(n, exponent):
    return tl.where(n > 0, n * tl.exp(exponent), 0.0)


@jit
def _gather(
    logits,
    temperature,
    target,
    thresholds,
    stat,
    parts,
    counts,
    sizes,
    ranks,
    masses,
    V,
    KIND: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BINS: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the tokens of a chunk among which the threshold lies; of those above, the mass and what they weigh."""
    _wait(PDL)
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    if _active(temperature, target, b, V, KIND):
        i = c * CHUNK + tl.arange(0, CHUNK)
        x = _kept(logits, temperature, thresholds, b, i, V, THRESHOLD)
        top, _ = _stat(stat, b)
        first, last, low, high = _between(stat, parts, counts, b, chunks, KIND, 1, BINS, C)
        bin, mass = _bin(x, low, high, BINS), tl.exp(x - top)
        found = (x > float("-inf")) & (bin >= first) & (bin <= last)
        size = tl.sum(found.to(tl.int32), 0)
        tl.store(sizes + b * chunks + c, size)
        part = parts + b * 4 * chunks + c
        tl.store(part, top)
        tl.store(part + chunks, tl.sum(tl.where(bin > last, mass, 0.0), 0))
        weight = tl.where(bin > last, _weight(x, top, KIND), 0.0)
        tl.store(part + 3 * chunks, tl.sum(weight, 0))
        if size > 0:
            to = (b * chunks + c) * CHUNK + tl.cumsum(found.to(tl.int32), 0) - 1
            tl.store(ranks + to, _rank(x, i), mask=found)
            tl.store(masses + to, mass, mask=found)


@jit
def _settle(
    temperature,
    target,
    thresholds,
    stat,
    parts,
    sizes,
    ranks,
    masses,
    V,
    chunks,
    KIND: tl.constexpr,
    C: tl.constexpr,
    EACH: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Bisect the listed tokens, EACH of every chunk at a time, for the largest rank that reaches the goal; then add
    what is kept of them to the mass of their chunks."""
    _wait(PDL)
    b = tl.program_id(0).to(tl.int64)
    if _active(temperature, target, b, V, KIND):
        _, goal = _stat(stat, b)
        above = tl.sum(_part(parts, b, chunks, 3, 0.0, C).to(tl.float64), 0)
        c, slot = tl.arange(0, C)[:, None], tl.arange(0, EACH)[None, :]
        size = tl.load(sizes + b * chunks + c, mask=c < chunks, other=0)
        at = (b * chunks + c) * CHUNK + slot
        most = tl.max(size)
        low = tl.full([], 9223372036854775807, tl.int64)
        high = tl.full([], -9223372036854775807, tl.int64)
        for start in range(0, most, EACH):
            here = slot + start < size
            rank = tl.load(ranks + at + start, mask=here, other=0)
            low = tl.minimum(low, tl.min(tl.where(here, rank, 9223372036854775807)))
            high = tl.maximum(high, tl.max(tl.where(here, rank, -9223372036854775807)))
        # The ranks low <= high are listed, and the threshold is one of those from low to high.
        while low < high:
            middle = low + (high - low) // 2 + 1
            weight = tl.full([], 0.0, tl.float64)
            next_low, next_high = high, low
            for start in range(0, most, EACH):
                here = slot + start < size
                rank = tl.load(ranks + at + start, mask=here, other=0)
                w = tl.load(masses + at + start, mask=here, other=0.0)
                upper = here & (rank >= middle)
                if KIND == "top_k":
                    w = upper.to(tl.float32)
                weight += tl.sum(tl.where(upper, w, 0.0)).to(tl.float64)
                next_low = tl.minimum(next_low, tl.min(tl.where(upper, rank, high)))
                next_high = tl.maximum(next_high, tl.max(tl.where(here & ~upper, rank, low)))
            enough = above + weight >= goal
            low, high = tl.where(enough, next_low, low), tl.where(enough, high, next_high)
        if most > 0:
            tl.store(thresholds + b, low)
        kept = tl.zeros([C], tl.float32)
        for start in range(0, most, EACH):
            here = slot + start < size
            rank = tl.load(ranks + at + start, mask=here, other=0)
            w = tl.load(masses + at + start, mask=here, other=0.0)
            kept += tl.sum(tl.where(here & (rank >= low), w, 0.0), 1)
        c = tl.arange(0, C)
        mass = parts + (b * 4 + 1) * chunks + c
        tl.store(mass, tl.load(mass, mask=c < chunks) + kept, mask=c < chunks)


# --- the draw -----------------------------------------------------------------------------------------------------


@jit
def _pick(
    logits,
    temperature,
    thresholds,
    parts,
    u,
    tokens,
    V,
    chunks,
    THRESHOLD: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token at which the cumulative mass passes u times the whole: first the chunk, then the place in it. With the
    temperature 0 the largest; -1 where all is -inf."""
    _wait(PDL)
    b = tl.program_id(0).to(tl.int64)
    greedy = (tl.load(temperature + b) > 0) == 0
    c = tl.arange(0, C)
    tops = _part(parts, b, chunks, 0, float("-inf"), C)
    top = tl.maximum(tl.max(tops, 0), -3e38)
    mass = (_part(parts, b, chunks, 1, 0.0, C) * tl.exp(tops - top)).to(tl.float64)
    upto = tl.cumsum(mass, 0)
    goal = tl.load(u + b) * tl.max(upto, 0)
    # Rounding must not lead behind the last that has any mass.
    chunk = tl.minimum(tl.sum((upto <= goal).to(tl.int32), 0), tl.max(tl.where(mass > 0, c, 0), 0))
    chunk = tl.where(greedy, tl.min(tl.where(tops == top, c, chunks - 1), 0), chunk)
    i = tl.arange(0, CHUNK)
    x = _kept(logits, temperature, thresholds, b, chunk * CHUNK + i, V, THRESHOLD)
    here = tl.maximum(tl.max(x, 0), -3e38)
    goal = (goal - tl.sum(tl.where(c < chunk, mass, 0.0), 0)) / tl.exp(here - top)
    mass = tl.exp(x - here).to(tl.float64)
    upto = tl.cumsum(mass, 0)
    place = tl.minimum(tl.sum((upto <= goal).to(tl.int32), 0), tl.max(tl.where(mass > 0, i, 0), 0))
    place = tl.where(greedy, tl.min(tl.where(x == here, i, CHUNK - 1), 0), place)
    token = tl.minimum(chunk * CHUNK + place, V - 1).to(tl.int64)
    tl.store(tokens + b, tl.where(tl.max(tops, 0) > -3e38, token, -1))


@jit
def _mix(x):
    """splitmix64's finaliser."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def _uniform(seed, key, count, u, PDL: tl.constexpr):
    _wait(PDL)
    b = tl.program_id(0)
    x = _mix(tl.load(seed + b).to(tl.uint64)) ^ tl.load(key + b).to(tl.uint64)
    x = _mix(_mix(x) ^ tl.load(count + b).to(tl.uint64))
    tl.store(u + b, (x >> 11).to(tl.float64) * 1.1102230246251565e-16)


def uniform(seed: Tensor, key: Tensor, count: Tensor) -> Tensor:
    """A number (n) float64 in [0, 1) for each (seed, key, count), as decode/sampling.py has it."""
    u = torch.empty(len(seed), dtype=torch.float64, device=seed.device)
    pdl, extra = launch(seed)
    _uniform[(len(seed),)](seed, key, count, u, PDL=pdl, num_warps=1, **extra)
    return u


def allow(logits: Tensor, words: Tensor) -> Tensor:
    """Logits (n V), contiguous, -inf where the bit of a token in words (n, V / 32) int32 is 0."""
    n, vocab = logits.shape
    out = torch.empty_like(logits)
    pdl, extra = launch(logits)
    grid = (n, triton.cdiv(vocab, CHUNK))
    _allow[grid](
        logits, words, out, vocab, words.stride(0), CHUNK=CHUNK, PDL=pdl, num_warps=8, **extra
    )
    return out


def draw_filtered(logits: Tensor, u: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """Tokens (n) int64 from logits (n V), contiguous, and u (n) float64 in [0, 1). `columns` (n 1): "temperature", and
    those of KINDS that some row uses; a row with the temperature 0 takes its largest logit.
    A row with NaN or infinity gets some token, one whose logits are all -inf -1. See
    test_gpu_draw_matches_sampling."""
    n, vocab = logits.shape
    assert logits.is_contiguous() and u.dtype is torch.float64 and vocab <= 1 << 24
    chunks = triton.cdiv(vocab, CHUNK)
    padded = triton.next_power_of_2(chunks)
    pdl, extra = launch(logits)
    per_chunk = {"CHUNK": CHUNK, "PDL": pdl, "num_warps": 8, **extra}
    new = partial(torch.empty, device=logits.device)
    temperature = columns["temperature"]
    thresholds, stat = new(n, dtype=torch.int64), new(n, STAT.value)
    parts, tokens = new(n, 4, chunks), new(n, dtype=torch.int64)
    counts = new(n, 2, BINS, dtype=torch.int32)
    shared = (logits, temperature, thresholds)
    mass = partial(_mass[n, chunks], *shared, parts, counts, vocab, BINS=BINS, **per_chunk)
    mass(FIRST=True, THRESHOLD=False)
    kinds = [kind for kind in KINDS if kind in columns]
    for i, kind in enumerate(kinds):
        target = columns[kind]
        if kind == "min_p":
            _floor[(n,)](target, thresholds, parts, chunks, C=padded, PDL=pdl, num_warps=1, **extra)
        else:
            search = {"KIND": kind, "C": padded, **per_chunk}
            found = (temperature, target, thresholds, stat, parts)
            listed = (
                new(n, chunks, dtype=torch.int32),
                new(n, chunks, CHUNK, dtype=torch.int64),
                new(n, chunks, CHUNK),
            )
            bins = {"THRESHOLD": i > 0, "BINS": BINS, **search}
            for round in range(2):
                _count[n, chunks](logits, *found, counts, vocab, ROUND=round, **bins)
            _gather[n, chunks](logits, *found, counts, *listed, vocab, **bins)
            each = max(1, TILE // padded)
            _settle[(n,)](*found, *listed, vocab, chunks, EACH=each, **search)
        # The draw needs the mass of each chunk alone, and a search leaves that behind.
        if kind == "min_p" or kind != kinds[-1]:
            mass(FIRST=False, THRESHOLD=True)
    _pick[(n,)](
        *shared, parts, u, tokens, vocab, chunks, THRESHOLD=bool(kinds), C=padded, **per_chunk
    )
    return tokens
