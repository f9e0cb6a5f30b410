"""The greedy choice, its log probability and the step to the next token on a GPU, in two small kernels: argmax and log
sum exp of (b V), then what a decoder does with the tokens (feed them, write them down, count). `advance` of `best` is
the plain form. A row whose logits have no greatest number (NaN, infinity, or nothing but -infinity) chooses -1."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.kernels.triton.linear import jit, launch, ready, triton

if triton is not None:
    import triton.language as tl

CHUNK = 4096
PEAK = 128  # numbers of a block, of which `largest` first looks at the largest


@dataclass
class State:
    """Where each row of a decoder stands, int64 on the device."""

    ids: Tensor  # (b) the token to feed next, -1 after logits that are no numbers
    pos: Tensor  # (b) its position: the keys in the cache
    count: Tensor  # (b) tokens written so far
    tick: Tensor  # (b) the line of `log` that comes next, the same for all
    live: Tensor  # (b) 1 where a row moves on, 0 where it stays
    log: Tensor  # (n b) what was chosen
    logp: Tensor  # (n b) and its log probability, float32
    last: int  # the largest position there is room for

    def tensors(self) -> list[Tensor]:
        """What a step changes, but for the log."""
        return [self.ids, self.pos, self.count, self.tick]

    def narrow(self, width: int) -> State:
        """The first rows."""
        ids, pos, count, tick, live = (x[:width] for x in (*self.tensors(), self.live))
        log, logp = self.log[:, :width], self.logp[:, :width]
        return State(ids, pos, count, tick, live, log, logp, self.last)


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of logits (b V) the token of the greatest (b), of equals the lowest id, -1 where no number is the
    greatest; and the log sum exp (b) float32."""
    if not ready(logits):
        raw = logits.float()
        sound = raw.amax(-1).isfinite()
        return torch.where(sound, raw.argmax(-1), -1), raw.logsumexp(-1)
    each, b = chunks(logits.contiguous()), len(logits)
    token = torch.empty(b, dtype=torch.long, device=logits.device)
    norm = torch.empty(b, dtype=torch.float32, device=logits.device)
    n = each[0].shape[1]
    pdl, extra = launch(logits)
    size = triton.next_power_of_2(n)
    _whole[(b,)](*each, token, norm, n, C=size, PDL=pdl, num_warps=1, **extra)
    return token, norm


@jit
def _peaks(x, out, V, blocks, EACH: tl.constexpr, PEAK: tl.constexpr, PDL: tl.constexpr):
    """The largest number of each block of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * EACH + tl.arange(0, EACH)
    i = block[:, None] * PEAK + tl.arange(0, PEAK)[None, :]
    each = tl.load(x + b * V + i, mask=i < V, other=float("-inf")).to(tl.float32)
    tl.store(out + b * blocks + block, tl.max(each, 1), mask=block < blocks)


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of x (b V) and their places, as topk; on a GPU without a search through all of them,
    since none lies outside the k blocks with the largest numbers. See test_gpu_largest_is_topk."""
    b, size = x.shape
    blocks = -(-size // PEAK)
    if not ready(x) or not x.is_contiguous() or blocks <= 2 * k:
        return x.topk(k)
    peaks = torch.empty(b, blocks, dtype=torch.float32, device=x.device)
    pdl, extra = launch(x)
    each = CHUNK // PEAK
    _peaks[(b, -(-blocks // each))](
        x, peaks, size, blocks, EACH=each, PEAK=PEAK, PDL=pdl, num_warps=8, **extra
    )
    inside = torch.arange(PEAK, device=x.device)
    at = (peaks.topk(k, sorted=False).indices[..., None] * PEAK + inside).flatten(1)
    here = at.clamp(max=size - 1)
    top, place = x.gather(1, here).masked_fill(at >= size, -torch.inf).topk(k)
    return top, here.gather(1, place)


def advance(state: State, logits: Tensor, tokens: Tensor, greatest: Tensor, norm: Tensor) -> None:
    """Feed the chosen tokens (b) next, -1 where they or `greatest` are; `best` of logits (b V) gives it and norm."""
    s = state
    if ready(logits):
        pdl, extra = launch(logits)
        where = (s.log.stride(0), len(s.log), s.last)
        given = (logits, tokens, greatest, norm, *s.tensors(), s.live, s.log, s.logp)
        _move[(len(tokens),)](*given, logits.stride(0), *where, PDL=pdl, num_warps=1, **extra)
        return
    tokens = torch.where(greatest < 0, -1, tokens)
    own = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0].float()
    line = s.tick.clamp(max=len(s.log) - 1)[None]
    s.log.scatter_(0, line, tokens[None])
    s.logp.scatter_(0, line, torch.where(tokens < 0, 0.0, own - norm)[None])
    s.ids.copy_(tokens)
    s.pos.add_(s.live).clamp_(max=s.last)
    s.count.add_(s.live)
    s.tick.add_(1)


@jit
def _best(logits, top, at, total, V, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """The largest of a chunk of logits, the lowest id that has it, and the sum of what is left of exp without it; of
    NaN or infinity, infinity and -1."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = c * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + b * V + i, mask=i < V, other=float("-inf")).to(tl.float32)
    best = tl.max(x, 0)
    bad = (tl.max((x != x).to(tl.int32), 0) > 0) | (best == float("inf"))
    to = b * tl.num_programs(1) + c
    tl.store(top + to, tl.where(bad, float("inf"), best))
    tl.store(at + to, tl.where(bad, -1, tl.min(tl.where(x == best, i, V - 1), 0)))
    least = tl.where(best == float("-inf"), 0.0, best)
    tl.store(total + to, tl.sum(tl.exp(x - least), 0))


@jit
def _merged(top, at, total, b, chunks, C: tl.constexpr):
    """The token and the log sum exp of row b, from its chunks."""
    c = tl.arange(0, C)
    x = tl.load(top + b * chunks + c, mask=c < chunks, other=float("-inf"))
    i = tl.load(at + b * chunks + c, mask=c < chunks, other=2147483647)
    part = tl.load(total + b * chunks + c, mask=c < chunks, other=0.0)
    best = tl.max(x, 0)
    token = tl.min(tl.where(x == best, i, 2147483647), 0)
    token = tl.where(best == float("-inf"), -1, token).to(tl.int64)
    share = tl.where((token >= 0) & (x > float("-inf")), tl.exp(x - best), 0.0)
    whole = tl.where(token >= 0, tl.sum(part * share, 0), 1.0)
    return token, best, tl.log(whole)


@jit
def _whole(top, at, total, token, norm, chunks, C: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    chosen, best, log = _merged(top, at, total, b, chunks, C)
    tl.store(token + b, chosen)
    tl.store(norm + b, best + log)


@jit
def _put(token, logp, b, ids, pos, count, tick, live, log, logps, stride, lines, last):
    """`advance` of row b."""
    line = tl.load(tick + b)
    to = tl.minimum(line, lines - 1) * stride + b
    tl.store(log + to, token)
    tl.store(logps + to, logp)
    tl.store(ids + b, token)
    on = tl.load(live + b)
    tl.store(pos + b, tl.minimum(tl.load(pos + b) + on, last))
    tl.store(count + b, tl.load(count + b) + on)
    tl.store(tick + b, line + 1)


@jit
def _move(
    logits,
    tokens,
    greatest,
    norm,
    ids,
    pos,
    count,
    tick,
    live,
    log,
    logps,
    wide,
    stride,
    lines,
    last,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + b)
    sound = (tl.load(greatest + b) >= 0) & (token >= 0)
    own = tl.load(logits + b * wide + tl.maximum(token, 0)).to(tl.float32)
    logp = tl.where(sound, own - tl.load(norm + b), 0.0)
    token = tl.where(sound, token, -1)
    _put(token, logp, b, ids, pos, count, tick, live, log, logps, stride, lines, last)


@jit
def _next(
    top,
    at,
    total,
    ids,
    pos,
    count,
    tick,
    live,
    log,
    logps,
    chunks,
    stride,
    lines,
    last,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best of the chunks, and `advance`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    token, best, less = _merged(top, at, total, b, chunks, C)
    _put(token, -less, b, ids, pos, count, tick, live, log, logps, stride, lines, last)


def chunks(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each chunk of logits (b V) the greatest, its id, and the sum of exp(x - greatest): (b chunks) each."""
    b, vocab = logits.shape
    n = triton.cdiv(vocab, CHUNK)
    top, total = torch.empty(2, b, n, dtype=torch.float32, device=logits.device)
    at = torch.empty(b, n, dtype=torch.int32, device=logits.device)
    pdl, extra = launch(logits)
    _best[(b, n)](logits, top, at, total, vocab, CHUNK=CHUNK, PDL=pdl, num_warps=8, **extra)
    return top, at, total


def greedy_advance(state: State, logits: Tensor) -> None:
    """`advance` by the greedy choice from logits (b V); see test_gpu_greedy_matches_argmax."""
    if not ready(logits):
        tokens, norm = best(logits)
        return advance(state, logits, tokens, tokens, norm)
    s, each = state, chunks(logits.contiguous())
    b, n = each[0].shape
    pdl, extra = launch(logits)
    _next[(b,)](
        *each,
        *s.tensors(),
        s.live,
        s.log,
        s.logp,
        n,
        s.log.stride(0),
        len(s.log),
        s.last,
        C=triton.next_power_of_2(n),
        PDL=pdl,
        num_warps=1,
        **extra,
    )
