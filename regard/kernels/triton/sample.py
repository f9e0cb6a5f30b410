"""The greedy choice and the step to the next token on a GPU, in two small kernels: argmax of (b V), then what a decoder
does with the tokens (feed them, write them and their log probabilities down, count). `advance` of `greedy` is the plain
form. A row whose logits have no greatest number (NaN, infinity, or nothing but -infinity) chooses -1."""

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
    """Where each row of a decoder stands, on the device, int64 but for `logp`."""

    ids: Tensor  # (b) the token to feed next, -1 after logits that are no numbers
    pos: Tensor  # (b) its position: the keys in the cache
    count: Tensor  # (b) tokens written so far
    tick: Tensor  # (b) the line of `log` that comes next, the same for all
    live: Tensor  # (b) 1 where a row goes on, 0 where it stays
    log: Tensor  # (n b) what was chosen
    logp: Tensor  # (n b) float32, the log probability of what was chosen
    last: int  # the largest position there is room for

    def tensors(self) -> list[Tensor]:
        """What a step changes, but for the log."""
        return [self.ids, self.pos, self.count, self.tick]


def greedy(logits: Tensor) -> Tensor:
    """The token (b) of the greatest of logits (b V), of equals the lowest id; -1 where no number is the greatest."""
    return torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), -1)


def norm(logits: Tensor) -> Tensor:
    """log sum exp of logits (b V), float32; not finite where `greedy` gives -1."""
    if not ready(logits):
        return logits.float().logsumexp(-1)
    top, _, mass = best_of_chunks(logits.contiguous())
    b, chunks = top.shape
    to = torch.empty(b, dtype=torch.float32, device=logits.device)
    pdl, extra = launch(logits)
    _norm[(b,)](
        top, mass, to, chunks, C=triton.next_power_of_2(chunks), PDL=pdl, num_warps=1, **extra
    )
    return to


def log_prob(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of tokens (b) under logits (b V), float32; 0 where the token is -1."""
    own = logits.gather(-1, tokens.clamp(min=0)[:, None])[:, 0].float()
    return torch.where(tokens >= 0, own - norm(logits), 0.0)


def advance(state: State, tokens: Tensor, logp: Tensor) -> None:
    """Feed the chosen tokens (b) next; `logp` (b) are their log probabilities."""
    s = state
    line = s.tick.clamp(max=len(s.log) - 1)[None]
    s.log.scatter_(0, line, tokens[None])
    s.logp.scatter_(0, line, logp[None])
    s.ids.copy_(tokens)
    s.pos.add_(s.live).clamp_(max=s.last)
    s.count.add_(s.live)
    s.tick.add_(1)


@jit
def _best(logits, top, at, mass, V, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """The largest of a chunk of logits, the lowest id that has it, and sum exp(x - largest); where there is NaN or
    infinity: infinity, -1 and 1."""
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
    total = tl.sum(tl.exp(x - tl.maximum(best, -3e38)), 0)
    tl.store(mass + to, tl.where(bad, 1.0, total))


@jit
def _log_sum(x, mass, c, chunks):
    """log sum exp(logits - largest) from the chunks' largest logits x and masses at `mass`."""
    share = tl.exp(x - tl.maximum(tl.max(x, 0), -3e38))
    return tl.log(tl.sum(share * tl.load(mass + c, mask=c < chunks, other=0.0), 0))


@jit
def _norm(top, mass, out, chunks, C: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, c = tl.program_id(0), tl.arange(0, C)
    x = tl.load(top + b * chunks + c, mask=c < chunks, other=float("-inf"))
    best = tl.max(x, 0)
    log_sum = _log_sum(x, mass + b * chunks, c, chunks)
    tl.store(out + b, tl.where(best == float("inf"), best, best + log_sum))


@jit
def _next(
    top,
    at,
    mass,
    ids,
    pos,
    count,
    tick,
    live,
    log,
    logp,
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
    log_sum = _log_sum(x, mass + b * chunks, c, chunks)
    line, goes = tl.load(tick + b), tl.load(live + b)
    to = tl.minimum(line, lines - 1) * rows + b
    tl.store(log + to, token)
    tl.store(logp + to, tl.where(token < 0, 0.0, -log_sum))
    tl.store(ids + b, token)
    tl.store(pos + b, tl.minimum(tl.load(pos + b) + goes, last))
    tl.store(count + b, tl.load(count + b) + goes)
    tl.store(tick + b, line + 1)


def greedy_advance(state: State, logits: Tensor) -> None:
    """`advance` with the greedy choice from logits (b V)."""
    if not ready(logits):
        tokens = greedy(logits)
        advance(state, tokens, log_prob(logits, tokens))
    else:
        kernels(state, logits.contiguous())


def best_of_chunks(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `_best` gives for each chunk of logits (b V)."""
    b, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    top, mass = torch.empty(2, b, chunks, dtype=torch.float32, device=logits.device)
    at = torch.empty(b, chunks, dtype=torch.int32, device=logits.device)
    pdl, extra = launch(logits)
    _best[(b, chunks)](logits, top, at, mass, vocab, CHUNK=CHUNK, PDL=pdl, num_warps=8, **extra)
    return top, at, mass


def kernels(state: State, logits: Tensor) -> None:
    """Equals `advance` of `greedy`; see test_gpu_greedy_matches_argmax."""
    s = state
    found = best_of_chunks(logits)
    b, chunks = found[0].shape
    pdl, extra = launch(logits)
    _next[(b,)](
        *found,
        *s.tensors(),
        s.live,
        s.log,
        s.logp,
        chunks,
        b,
        len(s.log),
        s.last,
        C=triton.next_power_of_2(chunks),
        PDL=pdl,
        num_warps=1,
        **extra,
    )
