"""Mechanisms that look back at a state of fixed size: what the delta rule and the state-space dual share.

A state S (d e) of each head forgets, and a key writes a value into it: S_t = diag(a_t) S_{t-1} + k_t u_t^T, which a
query reads, o_t = S_t^T q_t. What a mechanism makes of a token, and what it writes, is its own. All see the last
tokens through a short convolution.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.protocol import Context, Entries, Mechanism
from regard.cache import CacheSpec
from regard.errors import UsageError
from regard.mask import Causal, Documents

# Tokens that are read at once, and so many of the last can be taken back: chosen for speed.
CHUNK = 64
# Longer than any text, so that every rule of a mask binds.
FAR = range(sys.maxsize)


def first_steps(heads: int, least: float, most: float) -> Tensor:
    """What softplus takes to steps between `least` and `most`, whose logarithms are drawn evenly."""
    step = torch.empty(heads).uniform_(math.log(least), math.log(most)).exp().clamp(min=1e-4)
    return step + torch.log(-torch.expm1(-step))


class StateMechanism(Mechanism):
    """x (b t m) -> (b t m), through a state of fixed size. `sizes`: of the channels that the convolution reads, part by
    part; `taps` (c width) are its weights, `tap_bias` (c) what it adds."""

    # As errors call it.
    said: ClassVar[str]

    config: Any
    h: int
    sizes: list[int]
    taps: nn.Parameter
    tap_bias: nn.Parameter | None
    act: Callable[[Tensor], Tensor]

    def inputs(self, x: Tensor) -> Tensor:
        """What the convolution reads (b t c)."""
        raise NotImplementedError

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What it gave (b t c) -> q, k (b t h d), v (b t h e)."""
        raise NotImplementedError

    def gates(self, x: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """The logarithm of how much stays (b t h 1), or of each channel (b t h d); how much is written (b t h)."""
        raise NotImplementedError

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor,
        fresh: Tensor | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """What queries read (b t h e), the state after, and that before chunk keep[b] of each row."""
        raise NotImplementedError

    def tap(self, channels: int, width: int, bias: bool = False) -> None:
        """The weights of the convolution, as torch draws them."""
        reach = width**-0.5
        self.taps = nn.Parameter(torch.empty(channels, width).uniform_(-reach, reach))
        self.tap_bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def cache_spec(self) -> CacheSpec:
        c, channels = self.config, sum(self.sizes)
        state = {"s": (self.h, c.key_dim, self.e), "conv": (c.conv - 1, channels)}
        return CacheSpec(state=state, back=CHUNK)

    def attend(self, x: Tensor, ctx: Context) -> Tensor:
        fresh, store, spec = self.borders(ctx, len(x)), ctx.store, self.cache_spec()
        empty = {name: x.new_zeros(len(x), *shape) for name, shape in spec.state.items()}
        state = empty if store is None else store.state
        wide = torch.promote_types(x.dtype, torch.float32)
        inputs = self.inputs(x)
        inputs = torch.cat([state["conv"].to(inputs), inputs], 1)
        count = (ctx.pos.index >= 0).sum(1).expand(len(x))
        real = torch.arange(x.shape[1], device=x.device) < count[:, None]
        q, k, v = self.split(self.convolve(inputs, fresh))
        g, beta = self.gates(x, wide)
        g, beta = g * real[..., None, None], beta * real[..., None]
        before, keep = state["s"].to(wide), ((count - 1) // CHUNK - 1).clamp(min=0)
        with torch.autocast(x.device.type, enabled=False):
            mark = None if store is None else keep
            o, s, before = self.rule(q, k, v, g, beta, before, fresh, mark)
        if store is not None:
            past = self.past(k, v, g, beta, inputs, before, keep)
            store.put({"s": s, "conv": self.ends(inputs, count)}, past)
        return o

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def softplus(self, x: Tensor) -> Tensor:
        return F.softplus(x)

    def borders(self, ctx: Context, rows: int) -> Tensor | None:
        """(b t): whether a token is the first of another document than the token before it."""
        rules, limit = ctx.mask.binding(FAR, FAR), None if ctx.store is None else ctx.store.window
        packed = [rule for rule in rules if isinstance(rule, Documents)]
        if {rule for rule in rules if rule not in packed} != {Causal()}:
            order = f"{self.said} reads from left to right"
            raise UsageError(f"{order}: its mask is Causal(), alone or with Documents")
        if packed and ctx.store is not None:
            raise UsageError(f"{self.said} reads packed documents without a cache; leave one out")
        if limit is not None and int(ctx.pos.index.max()) >= limit:
            why = "a ring forgets old tokens, a state does not"
            raise UsageError(f"{why}; use layout='contiguous' or 'paged'")
        row, pos = torch.arange(rows, device=ctx.pos.index.device)[:, None], ctx.pos.index
        new = [~rule.see(row, pos, pos - 1) & (pos > 0) for rule in packed]
        return torch.stack(new).any(0) if new else None

    def convolve(self, inputs: Tensor, fresh: Tensor | None) -> Tensor:
        """silu(sum_i w_i x_{t - conv + 1 + i} + bias) of every channel by itself, inside its document; in float32 at
        least."""
        width, size = self.config.conv, inputs.shape[1] - self.config.conv + 1
        taps = self.taps.to(torch.promote_types(inputs.dtype, torch.float32))
        terms = [inputs[:, i : i + size] * taps[:, i] for i in range(width)]
        if fresh is not None:
            column = torch.arange(size, device=inputs.device)
            age = column - torch.where(fresh, column, -width).cummax(1).values
            terms = [x * (age >= width - 1 - i)[..., None] for i, x in enumerate(terms)]
        total = sum(terms[1:], terms[0])
        return self.act(total if self.tap_bias is None else total + self.tap_bias)

    def ends(self, inputs: Tensor, count: Tensor) -> Tensor:
        """What the convolution of the next token reads, after `count` tokens of each row."""
        at = count[:, None] + torch.arange(self.config.conv - 1, device=inputs.device)
        return inputs.gather(1, at[..., None].expand(-1, -1, inputs.shape[-1]))

    def past(
        self, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, inputs: Tensor, s: Tensor, keep: Tensor
    ) -> Callable[[Tensor, Tensor], Entries]:
        """A function (rows, n): their states after n tokens of this call. It holds what the last tokens wrote, one or
        two chunks of them, and the state `s` before these, and writes it once more."""
        start = torch.zeros_like(keep)
        if k.shape[1] > 2 * CHUNK:
            start, row = keep * CHUNK, torch.arange(len(k), device=k.device)[:, None]
            at = start[:, None] + torch.arange(2 * CHUNK + self.config.conv, device=k.device)
            every = (k, v, g, beta, inputs)
            k, v, g, beta, inputs = (x[row, at.clamp(max=x.shape[1] - 1)] for x in every)

        def state(rows: Tensor, n: Tensor) -> Entries:
            n = n - start[rows]
            stay = (torch.arange(k.shape[1], device=k.device) < n[:, None])[..., None]
            # Keys stand in for queries: what those find is not asked for.
            kept = (g[rows] * stay[..., None], beta[rows] * stay, s[rows])
            last = self.rule(k[rows], k[rows], v[rows], *kept)[1]
            return {"s": last, "conv": self.ends(inputs[rows], n)}

        return state
