"""The gated delta rule: attention without keys to look back at, a state that forgets and corrects itself instead.

Two forms, tested equal: `recurrent` is the definition, token by token; `chunked` is parallel inside chunks of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.protocol import Mechanism
from regard.attention.state import CHUNK, StateMechanism, first_steps
from regard.config import Amount, Choice, Count, Divides, Positive, settings
from regard.layers import Add, RMSNorm

# Rows of a chunk whose decays by channel are compared one by one: chosen for memory.
TILE = 16


@settings
class DeltaRule:
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464), as in Qwen3-Next and OLMo-Hybrid; with `channels` Kimi
    delta attention (Kimi Linear 2025, arXiv:2510.26692).

    S_t = A_t S_{t-1} + k_t (b_t (v_t - (A_t S_{t-1})^T k_t))^T,  o_t = S_t^T q_t / sqrt(d).   x (b t m) -> (b t m).
    A_t = a_t in (0, 1), or diag(a_t) by channel, is how much of the state S (d e) stays, b_t in (0, `reach`) how much
    of what k_t recalls is replaced by v_t. q, k and v see the last `conv` tokens; q and k have length 1.
    Cache per row: h d e, and conv - 1 tokens.
    """

    key_heads: Annotated[Count, Divides("value_heads")]  # of queries and keys
    value_heads: Count | None = None  # default: key_heads
    key_dim: Count = 128  # d
    value_dim: Count = 128  # e
    conv: Count = 4  # tokens that q, k and v see
    eps: Amount = 1e-6  # of the norm on each head's output
    channels: bool = False  # each channel of a key forgets by itself (Kimi)
    rank: Count | None = None  # decay and gate come from so few numbers; default: from x
    gate: Annotated[str, Choice(("silu", "sigmoid"))] = "silu"  # of the output
    reach: Positive = 1.0  # of b_t; 2: what is recalled may change its sign (OLMo Hybrid)
    # Between which a new layer's steps lie; default: its dt_bias is 1
    steps: tuple[Positive, Positive] | None = None
    kind: str = "delta"

    # It knows the order of tokens by itself, and forgets by itself.
    rope: ClassVar[None] = None
    window: ClassVar[None] = None

    @property
    def heads(self) -> int:
        return self.value_heads or self.key_heads

    @property
    def head_dim(self) -> int:
        return self.key_dim

    def make(self, dim: int, memory_dim: int | None = None, add: Add | None = None) -> Mechanism:
        return GatedDeltaRule(self, dim, add)


# --- the rule: q, k (b t h d), v (b t h e), log decay g (b t h), (b t h 1) or by channel (b t h d), beta (b t h),
# --- s (b h d e) -> o (b t h e), s. Where it `corrects` nothing, beta v is written whatever the state recalls.


def recall(k: Tensor, s: Tensor) -> Tensor:
    """What a state holds for keys: (b h d), (b h d e) -> (b h e)."""
    return torch.einsum("bhd,bhde->bhe", k, s)


def by_channel(g: Tensor) -> Tensor:
    """(b t h) -> (b t h 1)"""
    return g[..., None] if g.dim() == 3 else g


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor,
    fresh: Tensor | None = None, recall: Callable[[Tensor, Tensor], Tensor] = recall,
    corrects: bool = True
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`fresh` (b t): tokens before which the state is forgotten."""
    decay, out = by_channel(g).exp(), []
    if fresh is not None:
        decay = decay.masked_fill(fresh[..., None, None], 0.0)
    for t in range(q.shape[1]):
        s = s * decay[:, t, :, :, None]
        u = beta[:, t, :, None] * (v[:, t] - recall(k[:, t], s) if corrects else v[:, t])
        s = s + k[:, t, :, :, None] * u[:, :, None]
        out.append(recall(q[:, t], s))
    return torch.stack(out, 1), s


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor,
    fresh: Tensor | None = None, keep: Tensor | None = None, corrects: bool = True
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same, and the state before chunk keep[b] of each row. With G the sum of g from the start of a chunk and u_i
    what token i writes,
        u_i + b_i sum_{j<i} e^(G_i - G_j) (k_i k_j) u_j = b_i (v_i - e^(G_i) S^T k_i),
    a triangular system; S is the state before the chunk, so all but two products per chunk are made for all at once.
    By channel e^(G_i - G_j) stands inside the product of keys (`meet`)."""
    size, c = q.shape[1], min(CHUNK, q.shape[1])
    g = by_channel(g)
    part = torch.zeros_like(g[..., 0, 0], dtype=torch.int) if fresh is None else fresh.int()

    def cut(x: Tensor) -> Tensor:
        """(b t h d) -> (b h n c d); padding neither decays nor writes."""
        x = F.pad(x, (0, 0, 0, 0, 0, -size % c))
        return x.unflatten(1, (-1, c)).movedim(3, 1)

    q, k, v, g, beta = (cut(x) for x in (q, k, v, g, beta[..., None]))
    part = cut(part[..., None, None]).cumsum(-2)  # b 1 n c 1: documents begun since the chunk's
    total = g.cumsum(-2)  # b h n c 1, or d
    apart = (part != part.mT) | torch.ones(c, c, dtype=torch.bool, device=q.device).triu(1)
    since = total.masked_fill(part > 0, -torch.inf).exp()  # of the state before
    until = (total[..., -1:, :] - total).masked_fill(part != part[..., -1:, :], -torch.inf).exp()

    write, erase = beta * v, torch.zeros_like(k)  # u = write - erase S
    if corrects:
        system = (beta * meet(k, k, total, apart)).tril(-1)
        solved = solve(system, torch.cat([write, beta * since * k], -1))
        write, erase = solved.split([v.shape[-1], k.shape[-1]], -1)
    near, far, left = meet(q, k, total, apart), q * since, (k * until).mT
    # Here alone a chunk waits for the one before: (b h) and (n) as one batch and a list of its parts.
    parts = (x.flatten(0, 1).unbind(1) for x in (write, erase, left, since[..., -1:, :].mT))
    states, written = [s.flatten(0, 1)], []
    for add, less, near_end, stay in zip(*parts):
        written.append(torch.baddbmm(add, less, states[-1], alpha=-1) if corrects else add)
        states.append(torch.baddbmm(stay * states[-1], near_end, written[-1]))
    befores, u = (torch.stack(x, 1).unflatten(0, s.shape[:2]) for x in (states, written))
    out = (far @ befores[:, :, :-1] + near @ u).flatten(2, 3).transpose(1, 2)[:, :size]
    before = s if keep is None else befores[torch.arange(len(s), device=s.device), :, keep]
    return out, befores[:, :, -1], before


def meet(a: Tensor, b: Tensor, total: Tensor, apart: Tensor) -> Tensor:
    """sum_d a_id b_jd e^(G_id - G_jd) (... c c) of a, b (... c d) and G, the sum of log decays so far; 0 where `apart`.
    By channel, rows are taken in tiles: a tile's exponents count from its first row, so that none is above 0."""
    if total.shape[-1] == 1:
        return (a @ b.mT) * (total - total.mT).masked_fill(apart, -torch.inf).exp()
    rows = []
    for i in range(0, a.shape[-2], TILE):
        at = slice(i, i + TILE)
        first, own = total[..., i : i + 1, :], total[..., at, :]
        before = (a[..., at, :] * (own - first).exp()) @ (
            b[..., :i, :] * (first - total[..., :i, :]).exp()
        ).mT
        later = torch.ones(own.shape[-2], own.shape[-2], dtype=torch.bool, device=a.device).triu(1)
        gone = (own[..., :, None, :] - own[..., None, :, :]).masked_fill(
            later[..., None], -torch.inf
        )
        inside = (a[..., at, None, :] * b[..., None, at, :] * gone.exp()).sum(-1)
        rows.append(F.pad(torch.cat([before, inside], -1), (0, a.shape[-2] - i - own.shape[-2])))
    return torch.cat(rows, -2).masked_fill(apart, 0.0)


def solve(lower: Tensor, right: Tensor) -> Tensor:
    """(I + lower)^-1 right, of strictly lower triangles (... c c). A GPU solves slowly, and multiplies fast."""
    if lower.is_cuda:
        return inverse(lower) @ right
    return torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)


def inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 by blocks: with those of width w on the diagonal inverted, X, and what stands below them inside
    blocks of width 2w, L, it is X - X L X there. (A series of the powers of `lower` would be shorter; but they can be
    far larger than their sum.)"""
    at = torch.arange(lower.shape[-1], device=lower.device)
    apart, width = at[:, None] ^ at, 1
    x = torch.eye(len(at), device=lower.device, dtype=lower.dtype)
    with torch.no_grad():
        while width < len(at):
            x, width = x - x @ (lower * (apart // width == 1)) @ x, 2 * width
    # The same number, with the derivative -X dL X.
    return x - x @ (lower - lower.detach()) @ x if lower.requires_grad else x


class GatedDeltaRule(StateMechanism):
    """x (b t m) -> (b t m), through a state of fixed size."""

    said = "the delta rule"

    def __init__(self, config: DeltaRule, dim: int, add: Add | None = None):
        super().__init__()
        c, h = config, config.heads
        self.config, self.h, self.e = c, h, c.value_dim
        self.sizes = [c.key_heads * c.key_dim] * 2 + [h * c.value_dim]
        self.wq, self.wk, self.wv = (nn.Linear(dim, size, bias=False) for size in self.sizes)
        decays = h * c.key_dim if c.channels else h
        source = c.rank or dim
        self.wz = nn.Linear(source, h * self.e, bias=False)
        self.wb, self.wa = nn.Linear(dim, h, bias=False), nn.Linear(source, decays, bias=False)
        self.low_z, self.low_a = (
            nn.Linear(dim, c.rank, bias=False) if c.rank else None for _ in "za"
        )
        self.tap(sum(self.sizes), c.conv)
        self.a_log = nn.Parameter(torch.empty(h).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(
            torch.ones(decays) if c.steps is None else first_steps(decays, *c.steps)
        )
        self.norm = RMSNorm(c.value_dim, c.eps)
        self.wo = nn.Linear(h * c.value_dim, dim, bias=False)
        self.add, self.act = add or Add(), F.silu

    def flops(self, context: int) -> int:
        """Decay, recall, write and read of the state, however long the text is."""
        return 7 * self.h * self.config.key_dim * self.config.value_dim

    def inputs(self, x: Tensor) -> Tensor:
        return torch.cat([self.wq(x), self.wk(x), self.wv(x)], -1)

    def gates(self, x: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        a = self.wa(x if self.low_a is None else self.low_a(x)).to(wide)
        step = self.softplus(a + self.dt_bias).unflatten(-1, (self.h, -1))
        beta = self.sigmoid(self.wb(x).to(wide))
        return -self.a_log.to(wide).exp()[:, None] * step, self.config.reach * beta

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor,
        fresh: Tensor | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """By the form that is faster; gives what `chunked` does."""
        if q.shape[1] > 1:
            return chunked(q, k, v, g, beta, s, fresh, keep)
        return *recurrent(q, k, v, g, beta, s, fresh), s

    def weigh(self, o: Tensor, x: Tensor) -> Tensor:
        z = self.wz(x if self.low_z is None else self.low_z(x))
        gate = self.act(z) if self.config.gate == "silu" else self.sigmoid(z)
        return self.norm(o.to(x.dtype)) * gate.view_as(o)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b t c) -> q, k (b t h d) of length 1 / sqrt(d) and 1, v (b t h e)."""
        c, (q, k, v) = self.config, x.split(self.sizes, -1)
        q, k = (y.unflatten(-1, (c.key_heads, c.key_dim)) for y in (q, k))
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q, k = (y.repeat_interleave(self.h // c.key_heads, 2) for y in (q * c.key_dim**-0.5, k))
        return q, k, v.unflatten(-1, (self.h, c.value_dim))
