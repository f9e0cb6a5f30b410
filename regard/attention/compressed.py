"""DeepSeek-V4's attention: the last tokens as they are, and all that came before as entries of many tokens each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.core import Probe, Terms, attend
from regard.attention.protocol import Bias, Context, Entries, Mechanism, Seen
from regard.attention.sparse import choose, dots_exact, index_scores
from regard.cache import CacheSpec
from regard.config import Amount, Count, Fraction, Needs, settings
from regard.errors import UsageError
from regard.layers import Add, RMSNorm, UnitNorm
from regard.mask import Span, Visible
from regard.position import Rope, rotate


@settings
class Compressed:
    """Compressed attention (DeepSeek-V4): o_t = attention of t over the last `local` tokens' k_s = norm(W_k x_s), and
    over C_w of every window w of `rate` tokens that has ended; keys are values, with a sink for each head.

    C_w = norm(sum_j a_j * c_j),  a = softmax over j of z_j + B_j,  c_j = W_c x_j,  z_j = W_z x_j, feature by feature,
    over the tokens j of window w; with `overlap` over those of the window before too, by features of their own. C_w is
    turned to where w begins. With `topk` a query sees the best of them by an indexer as DSA's, whose keys are
    compressed alike. The last `rope_dim` features of o_t are turned back by t; heads go out in `groups`, each through
    `rank` numbers.

    Cache per token: d, and of what windows are made of 2 d, twice that with `overlap` (and 4 D of the indexer): any
    token can be taken back, and windows are made anew for each call. Without `rate` d alone."""

    heads: Count  # query heads
    head_dim: Count  # d, of queries, keys and entries
    query_latent: Count  # rank of queries
    local: Count  # tokens that a query sees as they are, itself among them
    rope: Rope  # rotary positions
    rope_dim: Count  # how many of the last features turn
    groups: Count = 1  # of heads, on the way out
    rank: Count = 1  # of each group
    rate: Count | None = None  # tokens of an entry; none: nothing else is seen
    overlap: Annotated[bool, Needs("rate", such="4")] = (
        False  # windows reach back into the one before
    )
    topk: Annotated[Count, Needs("rate", such="4")] | None = (
        None  # entries that a query sees; none: all
    )
    index_heads: Count = 1  # H, of the indexer
    index_dim: Count = 1  # D
    eps: Amount = 1e-6  # of the norms
    dropout: Fraction = 0.0  # of attention weights, in training
    kind: str = "compressed"

    def __post_init__(self) -> None:
        if self.rope_dim > self.head_dim or (self.topk and self.rope_dim > self.index_dim):
            given = f"attention.rope_dim={self.rope_dim}"
            raise UsageError(
                f"{given} features turn; head_dim and index_dim must be as many or more"
            )
        if self.heads * self.head_dim % self.groups:
            given = f"attention.groups={self.groups}"
            raise UsageError(f"{given} must divide heads x head_dim, {self.heads * self.head_dim}")

    @property
    def window(self) -> int | None:
        return self.local if self.rate is None else None

    def make(self, dim: int, memory_dim: int | None = None, add: Add | None = None) -> Mechanism:
        return CompressedAttention(self, dim, add)


class GroupedLinear(nn.Module):
    """(... g i) -> (... g o), a matrix for each group; their rows lie one below the other, (g o, i)."""

    def __init__(self, groups: int, inputs: int, outputs: int):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups * outputs, inputs).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weight.unflatten(0, (self.groups, -1))
        pairs = zip(x.unbind(-2), weights.unbind(), strict=True)
        return torch.stack([self.product(y, w, None) for y, w in pairs], -2)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


@dataclass
class Windows:
    """The windows of all rows that have ended: where their last tokens lie among what was kept (b e), and the first
    ones' places in their texts; -1 behind the last window of a row."""

    at: Tensor
    place: Tensor
    span: Span  # of the last tokens, by which masks see them

    @staticmethod
    def of(k_pos: Span, rate: int) -> Windows:
        index, place = torch.broadcast_tensors(k_pos.index, k_pos.absolute)
        if k_pos.place is None:
            # Tokens lie by position.
            ends = torch.arange(k_pos.size // rate, device=index.device) * rate + rate - 1
            at = ends.expand(len(index), -1)
        else:
            ends = (index >= 0) & (place % rate == rate - 1)
            most = int(ends.sum(-1).max())
            at = (~ends).to(torch.uint8).argsort(dim=-1, stable=True)[:, :most]
        last, place = index.gather(-1, at), place.gather(-1, at)
        real = (last >= 0) & (place % rate == rate - 1)
        return Windows(at, torch.where(real, place - rate + 1, -1), Span(last.where(real, -1)))


class Compressor(nn.Module):
    """What each token gives to the entry of its window, and these entries."""

    wide = ("bias",)

    def __init__(self, config: Compressed, dim: int, width: int):
        super().__init__()
        c, self.config, self.d = config, config, width
        assert c.rate is not None
        self.rate, wide = c.rate, width * (2 if c.overlap else 1)
        self.wc = nn.Linear(dim, wide, bias=False)
        self.wz = nn.Linear(dim, wide, bias=False)
        self.bias = nn.Parameter(torch.zeros(c.rate, wide))
        self.norm = RMSNorm(width, c.eps)

    def forward(self, c: Tensor, z: Tensor, windows: Windows) -> Tensor:
        """c and z of every token (b s w) -> entries (b e d), turned to where their windows begin."""
        d, n = self.d, self.rate
        c, z = self.tokens(c, windows), self.tokens(z, windows)  # b e j w
        z = z + torch.cat([self.bias.to(z.dtype)] * (z.shape[2] // n))
        if self.config.overlap:
            # Of the window before its first features; there is none before the first of a text.
            none = (windows.place <= 0)[:, :, None, None]
            before = z[:, :, :n, :d].masked_fill(none, -torch.inf)
            z = torch.cat([before, z[:, :, n:, d:]], 2)
            c = torch.cat([c[:, :, :n, :d], c[:, :, n:, d:]], 2)
        wide = torch.promote_types(z.dtype, torch.float32)
        entry = self.norm((c * z.to(wide).softmax(2).to(c.dtype)).sum(2))
        return _turn(entry[:, :, None], self.config, windows.place)[:, :, 0]

    def tokens(self, x: Tensor, windows: Windows) -> Tensor:
        """Those of each window, and of the one before where it reaches there."""
        size = self.rate * (2 if self.config.overlap else 1)
        back = torch.arange(1 - size, 1, device=x.device)
        at = (windows.at[..., None] + back).clamp(min=0).expand(len(x), -1, -1)
        row = torch.arange(len(x), device=x.device)[:, None, None]
        return x[row, at]


def _turn(x: Tensor, c: Compressed, pos: Tensor) -> Tensor:
    """The last features of x (b n h d) turned to these positions (b n)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = c.rope.angles(pos, c.rope_dim, wide)
    fixed, turning = x.split([x.shape[-1] - c.rope_dim, c.rope_dim], -1)
    return torch.cat([fixed, rotate(turning.to(wide), cos, sin, c.rope.layout).to(x.dtype)], -1)


class CompressedIndexer(nn.Module):
    """Small queries, and compressed keys of its own, that say which entries a query sees."""

    def __init__(self, config: Compressed, dim: int):
        super().__init__()
        c, self.config = config, config
        self.compressor = Compressor(c, dim, c.index_dim)
        self.wq = nn.Linear(c.query_latent, c.index_heads * c.index_dim, bias=False)
        self.ww = nn.Linear(dim, c.index_heads, bias=False)

    def scores(self, q: Tensor, keys: Tensor, x: Tensor) -> Tensor:
        """Queries (b t H D), keys (b e D) -> (b t e)."""
        c, dots = self.config, self.dots(q, keys)
        return self.join(dots, self.ww(x).to(dots.dtype) * (c.index_heads * c.index_dim) ** -0.5)

    def dots(self, q: Tensor, k: Tensor) -> Tensor:
        return dots_exact(q, k)

    def join(self, dots: Tensor, w: Tensor) -> Tensor:
        return index_scores(dots, w)


class CompressedAttention(Mechanism):
    """x (b t m) -> (b t m)."""

    def __init__(self, config: Compressed, dim: int, add: Add | None = None):
        super().__init__()
        c, self.config = config, config
        self.h, self.d, self.e, inner = c.heads, c.head_dim, c.head_dim, c.heads * c.head_dim
        self.w_dq = nn.Linear(dim, c.query_latent, bias=False)
        self.q_norm, self.head_norm = RMSNorm(c.query_latent, c.eps), UnitNorm(c.eps)
        self.w_uq = nn.Linear(c.query_latent, inner, bias=False)
        self.wk, self.k_norm = nn.Linear(dim, self.d, bias=False), RMSNorm(self.d, c.eps)
        self.sinks = nn.Parameter(torch.zeros(self.h))
        self.compressor = Compressor(c, dim, self.d) if c.rate else None
        self.indexer = CompressedIndexer(c, dim) if c.topk else None
        self.w_group = GroupedLinear(c.groups, inner // c.groups, c.rank)
        self.wo = nn.Linear(c.groups * c.rank, dim, bias=False)
        self.add = add or Add()

    def cache_spec(self) -> CacheSpec:
        shapes: dict[str, tuple[int, ...]] = {"k": (1, self.d)}
        for name, part in self.compressors.items():
            shapes |= {name + key: (part.bias.shape[1],) for key in ("c", "z")}
        return CacheSpec(token=shapes, turned=None)

    @property
    def compressors(self) -> dict[str, Compressor]:
        """By what the names of their entries begin with."""
        own = {} if self.compressor is None else {"": self.compressor}
        return own if self.indexer is None else own | {"index_": self.indexer.compressor}

    def flops(self, context: int) -> int:
        c, entries = self.config, context // (self.config.rate or context + 1)
        index = 2 * entries * c.index_heads * c.index_dim if c.topk else 0
        seen = min(context, c.local) + min(entries, c.topk or entries)
        return index + 4 * seen * self.h * self.d

    def attend(self, x: Tensor, ctx: Context) -> Tensor:
        q, new = self.project_qkv(x, ctx)
        kept, k_pos = ctx.update_cache(**new)
        limit = None if ctx.store is None else ctx.store.window
        if self.config.rate and limit is not None and int(ctx.pos.index.max()) >= limit:
            why = "a ring forgets the tokens that entries are made of"
            raise UsageError(f"{why}; use layout='contiguous' or 'paged'")
        mask = ctx.visible(k_pos, self.config.local)
        o = self.core_attention(q, kept, mask, ctx, ctx.bias(k_pos))  # b t h d
        return self.turned(o, ctx, back=True)

    def project_qkv(self, x: Tensor, ctx: Context) -> tuple[tuple[Tensor, Tensor, Tensor], Entries]:
        latent = self.q_norm(self.w_dq(x))
        q = self.head_norm(self.w_uq(latent).unflatten(-1, (self.h, self.d)))
        new = {"k": self.turned(self.k_norm(self.wk(x))[:, :, None], ctx)}
        for name, part in self.compressors.items():
            new |= {name + "c": part.wc(x), name + "z": part.wz(x)}
        return (self.turned(q, ctx), latent, x), new

    def turned(self, x: Tensor, ctx: Context, back: bool = False) -> Tensor:
        """The last features of x (b t h d) turned to its positions, or back from there."""
        c, wide = self.config, torch.promote_types(x.dtype, torch.float32)
        cos, sin = ctx.angles(c.rope, c.rope_dim, wide)
        fixed, turning = x.split([x.shape[-1] - c.rope_dim, c.rope_dim], -1)
        turning = rotate(turning.to(wide), cos, -sin if back else sin, c.rope.layout)
        return torch.cat([fixed, turning.to(x.dtype)], -1)

    def core_attention(self, q: Any, kept: Entries, mask: Seen, ctx: Context, bias: Bias) -> Tensor:
        assert isinstance(mask, Visible)
        (queries, latent, x), k, probe = q, kept["k"], ctx.watch()
        seen: Seen = mask
        if self.compressor is not None:
            rate = self.compressor.rate
            windows = ctx.bound(("windows", rate), mask.k, lambda: Windows.of(mask.k, rate))
            entries = self.compressor(kept["c"], kept["z"], windows)[:, :, None]
            shown = self.shown(latent, x, kept, windows, ctx).expand(len(k), -1, -1)
            near = mask.rows(slice(None))[:, 0].expand(len(k), -1, -1)
            probe = None if probe is None else _Front(probe, entries.shape[1])
            k, seen = self.beside(entries, k), self.beside(shown.mT, near.mT).mT[:, None]
        assert bias is None, "see `Tower`"
        return attend(
            queries, k, k, seen, scale=self.d**-0.5, sinks=self.sinks,
            dropout=self.config.dropout if self.training else 0.0,
            probe=probe, backend=ctx.backend
        )  # fmt: skip

    def beside(self, entries: Tensor, tokens: Tensor) -> Tensor:
        """(b e ...) and (b s ...) -> (b e+s ...)."""
        return torch.cat([entries, tokens], 1)

    def shown(
        self, latent: Tensor, x: Tensor, kept: Entries, windows: Windows, ctx: Context
    ) -> Tensor:
        """(b t e): whether a query sees an entry: its window has ended, and it is among the best."""
        seen = Visible(ctx.mask, ctx.pos, windows.span).rows(slice(None))[:, 0]
        topk = self.config.topk
        if self.indexer is None or topk is None or windows.at.shape[1] <= topk:
            return seen
        part, shape = self.indexer, (self.config.index_heads, self.config.index_dim)
        with torch.no_grad():
            q = self.turned(part.wq(latent).unflatten(-1, shape), ctx)
            keys = part.compressor(kept["index_c"], kept["index_z"], windows)
            scores = part.scores(q, keys, x)
            seen = seen.expand_as(scores)
            chosen = choose(scores.masked_fill(~seen, -torch.inf), topk)
        return seen & torch.zeros_like(seen).scatter(-1, chosen, True)

    def project_out(self, o: Tensor, residual: Tensor | None = None) -> Tensor:
        grouped = o.flatten(2).unflatten(-1, (self.config.groups, -1))
        return self.add(self.wo(self.w_group(grouped).flatten(2)), residual)


@dataclass
class _Front:
    """A probe to which entries, that lie in front of the tokens, are shown as sinks: they stand for no single token."""

    probe: Probe
    entries: int

    def see(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, terms: Terms) -> None:
        self.probe.see(q, k, v, mask, replace(terms, sinks=terms.sinks + self.entries))
