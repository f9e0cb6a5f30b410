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
    """Of each row of logits (b V) float32 the token of the greatest (b), of equals the lowest id, -1 where no number is
    the greatest; and the log sum exp (b)."""
    if ready(logits):
        top, at, total = chunks(logits.contiguous())
        most = top.amax(1, keepdim=True)
        token = torch.where(top == most, at.long(), 2**31 - 1).amin(1)
        token = torch.where(most[:, 0] == -torch.inf, -1, token)
        return token, most[:, 0] + (total * (top - most).exp()).sum(1).log()
    most = logits.amax(-1)
    return torch.where(most.isfinite(), logits.argmax(-1), -1), logits.logsumexp(-1)


def advance(state: State, tokens: Tensor, logp: Tensor) -> None:
    """Feed the chosen tokens (b) next."""
    s, line = state, state.tick.clamp(max=len(state.log) - 1)[None]
    s.log.scatter_(0, line, tokens[None])
    s.logp.scatter_(0, line, logp[None])
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
    logp,
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
    b, c = tl.program_id(0), tl.arange(0, C)
    x = tl.load(top + b * chunks + c, mask=c < chunks, other=float("-inf"))
    i = tl.load(at + b * chunks + c, mask=c < chunks, other=2147483647)
    part = tl.load(total + b * chunks + c, mask=c < chunks, other=0.0)
    best = tl.max(x, 0)
    token = tl.min(tl.where(x == best, i, 2147483647), 0)
    token = tl.where(best == float("-inf"), -1, token).to(tl.int64)
    sound = token >= 0
    # exp(x - best), 0 where there is no number to compare with.
    share = tl.where(sound & (x > float("-inf")), tl.exp(x - best), 0.0)
    whole = tl.where(sound, tl.sum(part * share, 0), 1.0)
    line = tl.load(tick + b)
    to = tl.minimum(line, lines - 1) * stride + b
    tl.store(log + to, token)
    tl.store(logp + to, -tl.log(whole))
    tl.store(ids + b, token)
    on = tl.load(live + b)
    tl.store(pos + b, tl.minimum(tl.load(pos + b) + on, last))
    tl.store(count + b, tl.load(count + b) + on)
    tl.store(tick + b, line + 1)


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
        raw = logits.float()
        tokens, norm = best(raw)
        logp = torch.where(tokens >= 0, raw.amax(-1) - norm, 0.0)
        return advance(state, tokens, logp)
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
