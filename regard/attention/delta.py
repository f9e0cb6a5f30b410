"""The gated delta rule: attention without keys to look back at, a state that forgets and corrects itself instead.

Two forms, tested equal: `recurrent` is the definition, token by token; `chunked` is parallel inside chunks of tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.protocol import Context, Entries, Mechanism
from regard.cache import CacheSpec
from regard.config import Amount, Count, Divides, settings
from regard.errors import UsageError
from regard.layers import Add, RMSNorm
from regard.mask import Causal, Documents

# Tokens that are read at once, and so many of the last can be taken back: chosen for speed.
CHUNK = 64
# Longer than any text, so that every rule of a mask binds.
FAR = range(sys.maxsize)


@settings
class DeltaRule:
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464), as in Qwen3-Next and OLMo-Hybrid.

    S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}^T k_t))^T,  o_t = S_t^T q_t / sqrt(d).   x (b t m) -> (b t m).
    a_t in (0, 1) is how much of the state S (d e) stays, b_t in (0, 1) how much of what k_t recalls is replaced by v_t.
    q, k and v see the last `conv` tokens; q and k have length 1. Cache per row: h d e, and conv - 1 tokens.
    """

    key_heads: Annotated[Count, Divides("value_heads")]  # of queries and keys
    value_heads: Count | None = None  # default: key_heads
    key_dim: Count = 128  # d
    value_dim: Count = 128  # e
    conv: Count = 4  # tokens that q, k and v see
    eps: Amount = 1e-6  # of the norm on each head's output
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


# --- the rule: q, k (b t h d), v (b t h e), log decay g and beta (b t h), s (b h d e) -> o (b t h e), s --------------


def recall(k: Tensor, s: Tensor) -> Tensor:
    """What a state holds for keys: (b h d), (b h d e) -> (b h e)."""
    return torch.einsum("bhd,bhde->bhe", k, s)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor,
    fresh: Tensor | None = None, recall: Callable[[Tensor, Tensor], Tensor] = recall
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`fresh` (b t): tokens before which the state is forgotten."""
    decay, out = g.exp(), []
    if fresh is not None:
        decay = decay.masked_fill(fresh[..., None], 0.0)
    for t in range(q.shape[1]):
        s = s * decay[:, t, :, None, None]
        u = beta[:, t, :, None] * (v[:, t] - recall(k[:, t], s))
        s = s + k[:, t, :, :, None] * u[:, :, None]
        out.append(recall(q[:, t], s))
    return torch.stack(out, 1), s


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor,
    fresh: Tensor | None = None, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same, and the state before chunk keep[b] of each row. With G the sum of g from the start of a chunk and u_i
    what token i writes,
        u_i + b_i sum_{j<i} e^(G_i - G_j) (k_i k_j) u_j = b_i (v_i - e^(G_i) S^T k_i),
    a triangular system; S is the state before the chunk, so all but two products per chunk are made for all at once."""
    size, c = q.shape[1], min(CHUNK, q.shape[1])
    part = torch.zeros_like(g[..., 0], dtype=torch.int) if fresh is None else fresh.int()

    def cut(x: Tensor) -> Tensor:
        """(b t h d) -> (b h n c d); padding neither decays nor writes."""
        x = F.pad(x, (0, 0, 0, 0, 0, -size % c))
        return x.unflatten(1, (-1, c)).movedim(3, 1)

    q, k, v, g, beta = (cut(x) for x in (q, k, v, g[..., None], beta[..., None]))
    part = cut(part[..., None, None]).cumsum(-2)  # b 1 n c 1: documents begun since the chunk's
    total = g.cumsum(-2)  # b h n c 1
    apart = (part != part.mT) | torch.ones(c, c, dtype=torch.bool, device=q.device).triu(1)
    between = (total - total.mT).masked_fill(apart, -torch.inf).exp()  # b h n c c
    since = total.masked_fill(part > 0, -torch.inf).exp()  # b h n c 1: of the state before
    until = (total[..., -1:, :] - total).masked_fill(part != part[..., -1:, :], -torch.inf).exp()

    system = (beta * (k @ k.mT) * between).tril(-1)
    solved = solve(system, torch.cat([beta * v, beta * since * k], -1))
    write, erase = solved.split([v.shape[-1], k.shape[-1]], -1)  # u = write - erase S
    near, far, left = (q @ k.mT) * between, q * since, (k * until).mT
    # Here alone a chunk waits for the one before: (b h) and (n) as one batch and a list of its parts.
    parts = (x.flatten(0, 1).unbind(1) for x in (write, erase, left, since[..., -1:, :]))
    states, written = [s.flatten(0, 1)], []
    for add, less, near_end, stay in zip(*parts):
        written.append(torch.baddbmm(add, less, states[-1], alpha=-1))
        states.append(torch.baddbmm(stay * states[-1], near_end, written[-1]))
    befores, u = (torch.stack(x, 1).unflatten(0, s.shape[:2]) for x in (states, written))
    out = (far @ befores[:, :, :-1] + near @ u).flatten(2, 3).transpose(1, 2)[:, :size]
    before = s if keep is None else befores[torch.arange(len(s), device=s.device), :, keep]
    return out, befores[:, :, -1], before


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


class GatedDeltaRule(Mechanism):
    """x (b t m) -> (b t m), through a state of fixed size."""

    def __init__(self, config: DeltaRule, dim: int, add: Add | None = None):
        super().__init__()
        c, h = config, config.heads
        self.config, self.h, self.e = c, h, c.value_dim
        self.sizes = [c.key_heads * c.key_dim] * 2 + [h * c.value_dim]
        self.wq, self.wk, self.wv = (nn.Linear(dim, size, bias=False) for size in self.sizes)
        self.wz, self.wb, self.wa = (nn.Linear(dim, n, bias=False) for n in (h * self.e, h, h))
        reach = c.conv**-0.5
        self.taps = nn.Parameter(torch.empty(sum(self.sizes), c.conv).uniform_(-reach, reach))
        self.a_log = nn.Parameter(torch.empty(h).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(h))
        self.norm = RMSNorm(c.value_dim, c.eps)
        self.wo = nn.Linear(h * c.value_dim, dim, bias=False)
        self.add, self.act = add or Add(), F.silu

    def cache_spec(self) -> CacheSpec:
        s, conv = (self.h, self.config.key_dim, self.e), (self.config.conv - 1, sum(self.sizes))
        return CacheSpec(state={"s": s, "conv": conv}, back=CHUNK)

    def flops(self, context: int) -> int:
        """Decay, recall, write and read of the state, however long the text is."""
        return 7 * self.h * self.config.key_dim * self.config.value_dim

    def attend(self, x: Tensor, ctx: Context) -> Tensor:
        fresh, store, spec = self.borders(ctx, len(x)), ctx.store, self.cache_spec()
        empty = {name: x.new_zeros(len(x), *shape) for name, shape in spec.state.items()}
        state = empty if store is None else store.state
        wide = torch.promote_types(x.dtype, torch.float32)
        inputs = torch.cat([self.wq(x), self.wk(x), self.wv(x)], -1)
        inputs = torch.cat([state["conv"].to(inputs), inputs], 1)
        count = (ctx.pos.index >= 0).sum(1).expand(len(x))
        real = torch.arange(x.shape[1], device=x.device) < count[:, None]
        q, k, v = self.split(self.convolve(inputs, fresh).to(wide))
        beta = self.sigmoid(self.wb(x).to(wide)) * real[..., None]
        step = self.softplus(self.wa(x).to(wide) + self.dt_bias)
        g = -self.a_log.to(wide).exp() * step * real[..., None]
        before, keep = state["s"].to(wide), ((count - 1) // CHUNK - 1).clamp(min=0)
        with torch.autocast(x.device.type, enabled=False):
            mark = None if store is None else keep
            o, s, before = self.rule(q, k, v, g, beta, before, fresh, mark)
        if store is not None:
            past = self.past(k, v, g, beta, inputs, before, keep)
            store.put({"s": s, "conv": self.ends(inputs, count)}, past)
        return o

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor,
        fresh: Tensor | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """By the form that is faster; gives what `chunked` does."""
        if q.shape[1] > 1:
            return chunked(q, k, v, g, beta, s, fresh, keep)
        return *recurrent(q, k, v, g, beta, s, fresh), s

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def softplus(self, x: Tensor) -> Tensor:
        return F.softplus(x)

    def weigh(self, o: Tensor, x: Tensor) -> Tensor:
        return self.norm(o.to(x.dtype)) * self.act(self.wz(x)).view_as(o)

    def borders(self, ctx: Context, rows: int) -> Tensor | None:
        """(b t): whether a token is the first of another document than the token before it."""
        rules, limit = ctx.mask.binding(FAR, FAR), None if ctx.store is None else ctx.store.window
        packed = [rule for rule in rules if isinstance(rule, Documents)]
        if {rule for rule in rules if rule not in packed} != {Causal()}:
            order = "the delta rule reads from left to right"
            raise UsageError(f"{order}: its mask is Causal(), alone or with Documents")
        if packed and ctx.store is not None:
            raise UsageError("the delta rule reads packed documents without a cache; leave one out")
        if limit is not None and int(ctx.pos.index.max()) >= limit:
            why = "a ring forgets old tokens, a state does not"
            raise UsageError(f"{why}; use layout='contiguous' or 'paged'")
        row, pos = torch.arange(rows, device=ctx.pos.index.device)[:, None], ctx.pos.index
        new = [~rule.see(row, pos, pos - 1) & (pos > 0) for rule in packed]
        return torch.stack(new).any(0) if new else None

    def convolve(self, inputs: Tensor, fresh: Tensor | None) -> Tensor:
        """silu(sum_i w_i x_{t - conv + 1 + i}) of every channel by itself, inside its document."""
        width, size = self.config.conv, inputs.shape[1] - self.config.conv + 1
        terms = [inputs[:, i : i + size] * self.taps[:, i] for i in range(width)]
        if fresh is not None:
            column = torch.arange(size, device=inputs.device)
            age = column - torch.where(fresh, column, -width).cummax(1).values
            terms = [x * (age >= width - 1 - i)[..., None] for i, x in enumerate(terms)]
        return self.act(sum(terms[1:], terms[0]))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b t c) -> q, k (b t h d) of length 1 / sqrt(d) and 1, v (b t h e)."""
        c, (q, k, v) = self.config, x.split(self.sizes, -1)
        q, k = (y.unflatten(-1, (c.key_heads, c.key_dim)) for y in (q, k))
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q, k = (y.repeat_interleave(self.h // c.key_heads, 2) for y in (q * c.key_dim**-0.5, k))
        return q, k, v.unflatten(-1, (self.h, c.value_dim))

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
            kept = (g[rows] * stay, beta[rows] * stay, s[rows])
            last = self.rule(k[rows], k[rows], v[rows], *kept)[1]
            return {"s": last, "conv": self.ends(inputs[rows], n)}

        return state
