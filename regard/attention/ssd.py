"""The state-space dual (Mamba 2): a state that decays, is written to and read, and nothing else."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.delta import chunked, recurrent
from regard.attention.protocol import Mechanism
from regard.attention.state import StateMechanism, first_steps
from regard.config import Amount, Count, Divides, Positive, settings
from regard.layers import Add, RMSNorm


@settings
class SSD:
    """State-space dual (Mamba 2: Dao and Gu 2024, arXiv:2405.21060).

    S_t = a_t S_{t-1} + B_t (s_t x_t)^T,  o_t = S_t^T C_t + D x_t,  a_t = e^(-A s_t),  y = norm(o * silu(z)) W.
    As attention: o_t = sum_{i <= t} (C_t B_i) e^(-A (s_{i+1} + ... + s_t)) s_i x_i + D x_t. x (b t m) -> (b t m).
    Queries C and keys B (d) are shared by heads of a group; values x (e), the step s_t and the decay A are each head's.
    x, B and C see the last `conv` tokens. Cache per row: h d e, and conv - 1 tokens.
    """

    heads: Count  # of values, steps and decays
    head_dim: Count = 64  # e, width of a value head
    groups: Annotated[Count, Divides("heads")] = 1  # of heads with one B and C
    key_dim: Count = 128  # d, width of B and C
    conv: Count = 4  # tokens that x, B and C see
    conv_bias: bool = True  # on what they see
    bias: bool = False  # on the projections
    eps: Amount = 1e-5  # of the norm
    least: Amount = 0.0  # step
    most: Positive | None = None  # step; default: any
    # Between which a new layer's steps lie; default: its dt_bias is 1
    steps: tuple[Positive, Positive] | None = None
    kind: str = "ssd"

    # It knows the order of tokens by itself, and forgets by itself.
    rope: ClassVar[None] = None
    window: ClassVar[None] = None

    def make(self, dim: int, memory_dim: int | None = None, add: Add | None = None) -> Mechanism:
        return StateSpaceDual(self, dim, add)


class StateSpaceDual(StateMechanism):
    """x (b t m) -> (b t m), through a state of fixed size."""

    said = "a state-space layer"

    def __init__(self, config: SSD, dim: int, add: Add | None = None):
        super().__init__()
        c, h = config, config.heads
        self.config, self.h, self.e = c, h, c.head_dim
        inner, keys = h * c.head_dim, c.groups * c.key_dim
        self.sizes = [inner, keys, keys]
        self.wz, self.wv, self.wk, self.wq, self.wa = (
            nn.Linear(dim, size, bias=c.bias) for size in (inner, *self.sizes, h)
        )
        self.tap(sum(self.sizes), c.conv, c.conv_bias)
        self.a_log = nn.Parameter(torch.arange(1.0, h + 1).log())
        self.dt_bias = nn.Parameter(torch.ones(h) if c.steps is None else first_steps(h, *c.steps))
        self.skip = nn.Parameter(torch.ones(h))
        self.norm = RMSNorm(inner, c.eps)
        self.wo = nn.Linear(inner, dim, bias=c.bias)
        self.add, self.act = add or Add(), F.silu

    def flops(self, context: int) -> int:
        """Decay, write and read of the state, however long the text is."""
        return 5 * self.h * self.config.key_dim * self.e

    def inputs(self, x: Tensor) -> Tensor:
        return torch.cat([self.wv(x), self.wk(x), self.wq(x)], -1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, (v, k, q) = self.config, x.split(self.sizes, -1)
        q, k = (y.unflatten(-1, (c.groups, c.key_dim)) for y in (q, k))
        q, k = (y.repeat_interleave(self.h // c.groups, 2) for y in (q, k))
        return q, k, v.unflatten(-1, (self.h, self.e))

    def gates(self, x: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        step = self.softplus(self.wa(x).to(wide) + self.dt_bias)
        step = step.clamp(self.config.least, self.config.most)
        return (-self.a_log.to(wide).exp() * step)[..., None], step

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor,
        fresh: Tensor | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if q.shape[1] > 1:
            o, s, before = chunked(q, k, v, g, beta, s, fresh, keep, corrects=False)
        else:
            before = s
            o, s = recurrent(q, k, v, g, beta, s, fresh, corrects=False)
        return o + self.skip[:, None] * v, s, before

    def weigh(self, o: Tensor, x: Tensor) -> Tensor:
        y = o.flatten(2).to(x.dtype) * self.act(self.wz(x))
        return self.norm(y).view_as(o)
