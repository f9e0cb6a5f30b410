"""The greedy choice and the step to the next token on a GPU, in two small kernels: argmax of (b V), then what a decoder
does with the tokens (feed them, write them down, count). `advance` of `greedy` is the plain form. A row whose logits
have no greatest number (NaN, infinity, or nothing but -infinity) chooses -1."""

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
    log: Tensor  # (n b) what was chosen
    last: int  # the largest position there is room for

    def tensors(self) -> list[Tensor]:
        return [self.ids, self.pos, self.count, self.tick]


def greedy(logits: Tensor) -> Tensor:
    """The token (b) of the greatest of logits (b V), of equals the lowest id; -1 where no number is the greatest."""
    return torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), -1)


def advance(state: State, tokens: Tensor) -> None:
    """Feed the chosen tokens (b) next."""
    s = state
    s.log.scatter_(0, s.tick.clamp(max=len(s.log) - 1)[None], tokens[None])
    s.ids.copy_(tokens)
    s.pos.add_(1).clamp_(max=s.last)
    s.count.add_(1)
    s.tick.add_(1)


@jit
def _best(logits, top, at, V, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """The largest of a chunk of logits and the lowest id that has it; of NaN or infinity, infinity and -1."""
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


@jit
def _next(
    top,
    at,
    ids,
    pos,
    count,
    tick,
    log,
    chunks,
    rows,
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
    best = tl.max(x, 0)
    token = tl.min(tl.where(x == best, i, 2147483647), 0)
    token = tl.where(best == float("-inf"), -1, token).to(tl.int64)
    line = tl.load(tick + b)
    tl.store(log + tl.minimum(line, lines - 1) * rows + b, token)
    tl.store(ids + b, token)
    tl.store(pos + b, tl.minimum(tl.load(pos + b) + 1, last))
    tl.store(count + b, tl.load(count + b) + 1)
    tl.store(tick + b, line + 1)


def greedy_advance(state: State, logits: Tensor) -> None:
    """`advance` with the greedy choice from logits (b V)."""
    if not ready(logits):
        advance(state, greedy(logits))
    else:
        kernels(state, logits.contiguous())


def kernels(state: State, logits: Tensor) -> None:
    """Equals `advance` of `greedy`; see test_gpu_greedy_matches_argmax."""
    s, (b, vocab) = state, logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    top = torch.empty(b, chunks, dtype=torch.float32, device=logits.device)
    at = torch.empty(b, chunks, dtype=torch.int32, device=logits.device)
    pdl, extra = launch(logits)
    _best[(b, chunks)](logits, top, at, vocab, CHUNK=CHUNK, PDL=pdl, num_warps=8, **extra)
    _next[(b,)](
        top,
        at,
        *s.tensors(),
        s.log,
        chunks,
        b,
        len(s.log),
        s.last,
        C=triton.next_power_of_2(chunks),
        PDL=pdl,
        num_warps=1,
        **extra,
    )
