"""A loss and its gradient out of logits, in their own memory: `turn` is the dispatch, `reference` the plain form.

    python bench/loss.py      times the head's loss with it against torch's

The kernel gives each program a row. It reads the row once for the log of its sum, with a running maximum, and once more
to write the gradient where the logits were, all in float32 inside.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.kernels.triton.linear import jit, ready, triton

if triton is not None:
    import triton.language as tl

BLOCK = 4096  # logits a step
LOG2E = math.log2(math.e)
PART = 2**21  # logits that the plain form makes float32 of at a time: they should fit a cache


def reference(
    logits: Tensor,
    labels: Tensor,
    counted: Tensor,
    top: float,
    share: float = 0.0,
    padding: int | None = None,
    train: bool = True,
) -> Tensor:
    """- sum over counted rows of sum_v q_v log softmax(logits)_v, q being `top` at the label, 0 at `padding`, `share`
    elsewhere; sum_v q_v must be 1. With `train` the logits (n V) become its gradient by them: softmax(logits) - q, or
    0 in rows that are not counted. labels (n), counted (n) bool; rows of logits may lie apart."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    total = logits.new_zeros((), dtype=dtype)
    size = max(1, PART // logits.shape[-1])
    for part, y, real in zip(
        logits.split(size), labels.split(size), counted.split(size), strict=True
    ):
        at = y.clamp(min=0)[:, None]
        log_p = part.log_softmax(-1, dtype=dtype)
        mine = log_p.gather(-1, at)  # n 1
        loss = top * mine
        if share:
            others = log_p.sum(-1, keepdim=True) - mine
            others = others if padding is None else others - log_p[:, padding, None]
            loss = loss + share * others
        total -= loss.masked_fill(~real[:, None], 0.0).sum()
        if train:
            torch.exp(log_p, out=part)
            label = mine.exp() - top  # in float32: near 1 - 1 a narrow type has nothing left
            if share:
                part -= share
                if padding is not None:
                    part[:, padding] = log_p[:, padding].exp()
            part.scatter_(-1, at, label.to(part.dtype))
            if not real.all():
                part.masked_fill_(~real[:, None], 0.0)
    return total


@jit
def _turn(
    logits,
    labels,
    counted,
    losses,
    V,
    stride,
    top,
    share,
    padding,
    BLOCK: tl.constexpr,
    TRAIN: tl.constexpr,
    SMOOTH: tl.constexpr,
    LOG2E: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    label = tl.load(labels + row)
    real = tl.load(counted + row) != 0
    label = tl.where(real, label, 0)
    m = tl.full((BLOCK,), -1e30, tl.float32)  # of logits in units of log 2, as d and lse below
    d = tl.zeros((BLOCK,), tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, V, BLOCK):
        c = i + tl.arange(0, BLOCK)
        x = tl.load(at + c, mask=c < V, other=float("-inf")).to(tl.float32) * LOG2E
        new = tl.maximum(m, x)
        d = d * tl.exp2(m - new) + tl.exp2(x - new)
        if SMOOTH:
            s += tl.where((c < V) & (c != padding), x, 0.0)
        m = new
    most = tl.max(m, 0)
    lse = most + tl.log2(tl.sum(d * tl.exp2(m - most), 0))
    mine = tl.load(at + label).to(tl.float32) * LOG2E - lse
    loss = top * mine
    if SMOOTH:
        loss += share * (tl.sum(s, 0) - (V - tl.where(padding < 0, 0, 1)) * lse - mine)
    tl.store(losses + row, tl.where(real, -loss / LOG2E, 0.0))
    if TRAIN:
        for i in range(0, V, BLOCK):
            c = i + tl.arange(0, BLOCK)
            x = tl.load(at + c, mask=c < V, other=0.0).to(tl.float32) * LOG2E
            q = tl.where(c == label, top, tl.where(c == padding, 0.0, share))
            g = tl.where(real, tl.exp2(x - lse) - q, 0.0)
            tl.store(at + c, g.to(logits.dtype.element_ty), mask=c < V)


def turn(
    logits: Tensor,
    labels: Tensor,
    counted: Tensor,
    top: float,
    share: float = 0.0,
    padding: int | None = None,
    train: bool = True,
) -> Tensor:
    """`reference`, on a GPU by the kernel; see test_gpu_turn_matches_reference."""
    if not ready(logits) or logits.dtype == torch.float64:
        return reference(logits, labels, counted, top, share, padding, train)
    n, vocab = logits.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    _turn[(n,)](
        logits,
        labels,
        counted.view(torch.uint8),
        losses,
        vocab,
        logits.stride(0),
        top,
        share,
        -1 if padding is None else padding,
        BLOCK=BLOCK,
        TRAIN=train,
        SMOOTH=share != 0,
        LOG2E=LOG2E,
        num_warps=8,
    )
    return losses.sum()
