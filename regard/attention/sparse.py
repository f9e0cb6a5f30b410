"""DeepSeek's sparse attention: a small indexer scores every past token, attention reads the best k and no others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.core import Terms
from regard.attention.latent import MLA
from regard.attention.multihead import GQA
from regard.attention.protocol import Bias, Context, Entries, Mechanism, Seen
from regard.cache import CacheSpec
from regard.config import Choice, Count, Needs, Whole, settings
from regard.errors import UsageError
from regard.layers import Add
from regard.mask import Span, Visible
from regard.position import Rope

# Numbers that one chunk of queries may make, chosen for speed: what fits a processor's cache; a GPU wants more to be
# busy.
WORK = {"cpu": 2**21, "cuda": 2**27}
# Up to so many keys for each that is chosen, the others are hidden instead of the chosen gathered: chosen for speed,
# by an estimate, which was not measured by itself.
HIDE = {"cuda": 8}


@settings
class DSA:
    """Sparse attention by a lightning indexer (DeepSeek-V3.2, arXiv:2512.02556, eq. 1-2), over MLA or GQA.

    I_ts = sum_j w_tj ReLU(q_tj . k_s / sqrt(D)) / sqrt(H),  w_t = W_w x_t;  S_t = the `topk` largest I_ts of the
    visible s, ties going to the earliest;  o_t = attention of t over S_t.   topk >= s is the dense layer itself.
    Cache per token: the attention's own, and D; in fp8 D + 16 bytes.   Work per query: H D s for the index, then k
    instead of s.
    """

    attention: GQA | MLA  # over the chosen keys
    index_heads: Count  # H
    index_dim: Count  # D
    topk: Count  # keys that a query chooses
    # leading index features turned by attention.rope
    rope_dim: Annotated[Whole, Needs("attention.rope", such="Rope()")] = 0
    # Turn q and k by an orthogonal matrix: same scores, flatter numbers for fp8.
    hadamard: bool = False
    precision: Annotated[str, Choice(("exact", "fp8"))] = "exact"  # or "fp8"
    # how these turn: half-split (DeepSeek), or in pairs of neighbours (GLM)
    rope_layout: Annotated[str, Choice(("half", "interleaved"))] = "half"
    kind: str = "dsa"

    def __post_init__(self) -> None:
        if self.hadamard and self.index_dim & (self.index_dim - 1):
            given = f"attention.index_dim={self.index_dim}"
            raise UsageError(f"{given} must be a power of two for hadamard=True")

    @property
    def window(self) -> int | None:
        return self.attention.window

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope

    @property
    def heads(self) -> int:
        return self.attention.heads

    def make(self, dim: int, memory_dim: int | None = None, add: Add | None = None) -> Mechanism:
        return SparseAttention(self, dim, add)


class WideLinear(nn.Linear):
    """A linear layer that stays float32 when a model is loaded in half precision."""

    wide = ("weight",)
    same_as = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Indexer(nn.Module):
    """Its own small queries, one key per token shared by its heads, and a weight per head that depends on the token."""

    def __init__(self, config: DSA, dim: int, query_dim: int):
        super().__init__()
        c = config
        self.config, self.h, self.d = c, c.index_heads, c.index_dim
        self.wq = nn.Linear(query_dim, self.h * self.d, bias=False)
        self.wk = nn.Linear(dim, self.d, bias=False)
        self.k_norm = nn.LayerNorm(self.d, 1e-6)
        self.ww = WideLinear(dim, self.h, bias=False)

    def queries(self, c_q: Tensor, ctx: Context) -> Tensor:
        return self._place(self.wq(c_q).unflatten(-1, (self.h, self.d)), ctx)  # b t H D

    def keys(self, x: Tensor, ctx: Context) -> Tensor:
        return self._place(self.k_norm(self.wk(x))[:, :, None], ctx)[:, :, 0]  # b t D

    def _place(self, x: Tensor, ctx: Context) -> Tensor:
        x = self.turned(x, ctx) if self.config.rope_dim else x
        return hadamard(x) if self.config.hadamard else x

    def turned(self, x: Tensor, ctx: Context) -> Tensor:
        r = self.config.rope_dim
        turned = ctx.rotate(x[..., :r], self.config.attention.rope, self.config.rope_layout)
        return torch.cat([turned, x[..., r:]], -1)

    def scores(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """I (b t s) of queries (b t H D) against every key that was kept; x gives the head weights."""
        dots = self.dots(q, k)
        return self.join(dots, self.weights(x).to(dots.dtype))

    def weights(self, x: Tensor) -> Tensor:
        return self.ww(x) * (self.h * self.d) ** -0.5  # b t H

    @property
    def width(self) -> int:
        """Numbers that a cache keeps of a key."""
        size = self.k_norm.weight.element_size()
        return fp8_bytes(self.d) // size if self.config.precision == "fp8" else self.d

    def kept(self, k: Tensor) -> Tensor:
        """Keys (b t D) as a cache keeps them."""
        return packed_fp8(k) if self.config.precision == "fp8" else k

    def dots(self, q: Tensor, k: Tensor) -> Tensor:
        return (fp8_dots if self.config.precision == "fp8" else dots_exact)(q, k)

    def join(self, dots: Tensor, w: Tensor) -> Tensor:
        return index_scores(dots, w)


def index_scores(dots: Tensor, w: Tensor) -> Tensor:
    """I_ts = sum_j w_tj ReLU(dots_tjs).   dots (b t H s), w (b t H) -> (b t s)."""
    return (w[:, :, None] @ torch.relu(dots))[:, :, 0]


def dots_exact(q: Tensor, k: Tensor) -> Tensor:
    """q_tj . k_s: (b t H D), (b s D) -> (b t H s), in float32 at least."""
    return (_wide(q).flatten(1, 2) @ _wide(k).transpose(1, 2)).unflatten(1, q.shape[1:3])


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def fp8_dots(q: Tensor, k: Tensor, dots: Callable[[Tensor, Tensor], Tensor] = dots_exact) -> Tensor:
    """The same with q and k rounded to float8 e4m3, one scale per row; on the tensor cores where they have it. k comes
    from `packed_fp8`."""
    q8, q_scale = to_fp8(q)
    bits = k.contiguous().view(torch.uint8)
    assert bits.shape[-1] == fp8_bytes(q.shape[-1]), "a cache of another dtype has rounded the bits"
    k8 = bits[..., : q.shape[-1]].contiguous().view(torch.float8_e4m3fn)
    k_scale = bits[..., -16:-12].contiguous().view(torch.float32)
    modern = q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 9)
    if dots is dots_exact and modern and q.shape[-1] % 16 == k.shape[1] % 16 == 0:
        one, pairs = torch.ones((), device=q.device), zip(q8.flatten(1, 2), k8.mT, strict=True)
        rows = [torch._scaled_mm(a, b, one, one, out_dtype=torch.float32) for a, b in pairs]
        raw = torch.stack(rows).unflatten(1, q.shape[1:3])
    else:
        raw = dots(q8, k8)
    return raw * q_scale * k_scale[:, None, None, :, 0]


def fp8_bytes(d: int) -> int:
    """Of d float8 numbers and a scale, in steps of 16 bytes, which memory is read by."""
    return -(-d // 16) * 16 + 16


@torch.no_grad()
def packed_fp8(k: Tensor) -> Tensor:
    """The bits of keys (... D) in float8, and of their scales behind them, in numbers of k's type: no cache needs to
    know what they are."""
    k8, scale = to_fp8(k)
    room = k.new_zeros(*k.shape[:-1], fp8_bytes(k.shape[-1]) // k.element_size())
    bits = room.view(torch.uint8)
    bits[..., : k.shape[-1]] = k8.view(torch.uint8)
    bits[..., -16:-12] = scale.view(torch.uint8)
    return room


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / scale as e4m3, scale = max|x| / 448 of each row."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def hadamard(x: Tensor) -> Tensor:
    """x H / sqrt(D), H the Hadamard matrix of size D = 2^n, by n butterflies. Orthogonal: dot products stay."""
    y, d, size = x, x.shape[-1], 1
    while size < d:
        a, b = y.reshape(-1, 2, size).unbind(1)
        y = torch.stack([a + b, a - b], 1)
        size *= 2
    return (y / math.sqrt(d)).view_as(x)


def choose(scores: Tensor, k: int) -> Tensor:
    """Indices (... k), ascending, of the k largest of the last axis; equal scores go to the earliest index.
    (Scores tie often: ReLU makes exact zeros. torch.topk alone would pick by buffer width.)"""
    values, best = scores.topk(min(k + 1, scores.shape[-1]))
    least = values[..., k - 1 : k]
    # Unless the best that is left out ties with the last that is not, the set is unique but for hidden keys.
    if not ((values[..., k:] == least) & (least > -torch.inf)).any():
        return best[..., :k].sort(-1).values
    above, tied = scores > least, scores == least
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(-1) <= room))
    return chosen.nonzero()[:, -1].view(*scores.shape[:-1], k)


class SparseAttention(Mechanism):
    """`core_attention` gathers; with no more than `topk` keys it is the dense layer. See
    test_dsa_covering_all_keys_is_dense."""

    def __init__(self, config: DSA, dim: int, add: Add | None = None):
        super().__init__()
        self.config, self.add = config, add or Add()
        self.attention: Mechanism = config.attention.make(dim)
        rank = config.attention.query_latent if isinstance(config.attention, MLA) else None
        self.indexer = Indexer(config, dim, rank or dim)

    def cache_spec(self) -> CacheSpec:
        spec = self.attention.cache_spec()
        token = {**spec.token, "index_k": (self.indexer.width,)}
        return CacheSpec(token=token, turned=None)

    def flops(self, context: int) -> int:
        index = 2 * context * self.indexer.h * self.indexer.d
        return index + self.attention.flops(min(context, self.config.topk))

    def project_qkv(self, x: Tensor, ctx: Context) -> tuple[tuple[Tensor, Tensor, Tensor], Entries]:
        c_q = self.attention.query_input(x)
        index_k = self.indexer.kept(self.indexer.keys(x, ctx))
        new = {**self.attention.entries(x, ctx), "index_k": index_k}
        return (self.attention.queries(c_q, ctx), c_q, x), new

    def core_attention(self, q: Any, kept: Entries, mask: Seen, ctx: Context, bias: Bias) -> Tensor:
        assert isinstance(mask, Visible)
        queries, c_q, x = q
        if self.dense(mask.k.size):
            return self.attention.core_attention(queries, kept, mask, ctx, bias)
        return self.sparse(x, queries, self.indexer.queries(c_q, ctx), kept, mask, ctx, bias)

    def visible(self, k_pos: Span, ctx: Context) -> Visible:
        return self.attention.visible(k_pos, ctx)

    def weigh(self, o: Tensor, x: Tensor) -> Tensor:
        return self.attention.weigh(o, x)

    def project_out(self, o: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.add(self.attention.wo(o.flatten(2)), residual)

    def dense(self, keys: int) -> bool:
        """Whether the choice would be all keys."""
        return keys <= self.config.topk

    def sparse(
        self, x: Tensor, q: Tensor, index_q: Tensor, kept: Entries,
        mask: Visible, ctx: Context, bias: Bias
    ) -> Tensor:  # fmt: skip
        """Chunk by chunk of queries: score all keys, choose k, gather them, attend to them: (b t h e). Of few keys
        none is gathered; those that were not chosen are hidden."""
        kept = dict(kept)
        index_k, (b, t, s) = kept.pop("index_k"), (*q.shape[:2], mask.k.size)
        k = min(self.config.topk, s)
        order = None if mask.k.start is not None else mask.k.index.argsort(-1).expand(b, s)
        wide = sum(v[0, 0].numel() for v in kept.values())
        work = WORK.get(q.device.type, WORK["cpu"])
        chunk = -(-work // (b * (s * self.config.index_heads + k * wide)))
        out, hide = [], q.device.type in HIDE and s <= k * HIDE[q.device.type]
        for rows in (slice(i, min(i + chunk, t)) for i in range(0, t, chunk)):
            seen = mask.rows(rows)[:, 0].expand(b, -1, -1)  # b n s
            with torch.no_grad():
                scores = self.indexer.scores(index_q[:, rows], index_k, x[:, rows])
                chosen = self.choice(scores.masked_fill(~seen, -torch.inf), k, order)  # b n k
            if hide:
                out.append(seen & torch.zeros_like(seen).scatter(-1, chosen, True))
                continue
            added = None if bias is None else bias[:, :, rows].expand(b, -1, -1, -1)
            probe = ctx.watch()
            # A context whose probe learns which queries and keys these are.
            here = ctx if probe is None else replace(ctx, probe=Spread(probe, rows, chosen, (t, s)))
            out.append(self.attend_chosen(q[:, rows], kept, chosen, seen, added, here))
        whole = torch.cat(out, 1)
        return self.attention.core_attention(q, kept, whole[:, None], ctx, bias) if hide else whole

    def choice(self, scores: Tensor, k: int, order: Tensor | None) -> Tensor:
        """The k best slots of each query; `order` (b s) lists slots by position where they lie otherwise."""
        if order is None:
            return choose(scores, k)
        order = order[:, None].expand_as(scores)
        return order.gather(-1, choose(scores.gather(-1, order), k))

    def attend_chosen(
        self, q: Tensor, kept: Entries, chosen: Tensor, seen: Tensor, bias: Any, ctx: Context
    ) -> Tensor:
        """Each query attends to its own k keys: (b n) becomes the batch, one query per row."""
        b, n, k = chosen.shape
        row = torch.arange(b, device=q.device)[:, None, None]
        gathered = {name: x[row, chosen].flatten(0, 1) for name, x in kept.items()}  # bn k ...
        shown = seen.gather(-1, chosen).view(b * n, 1, 1, k)
        if bias is not None:
            at = chosen[:, None].expand(-1, bias.shape[1], -1, -1)
            bias = bias.gather(-1, at).transpose(1, 2).reshape(b * n, -1, 1, k)
        o = self.attention.gathered(q.reshape(b * n, 1, *q.shape[2:]), gathered, shown, ctx, bias)
        return o.reshape(b, n, *o.shape[2:])


@dataclass
class Spread:
    """A probe of gathered calls (Probe.gathered): it knows where the queries and keys belong."""

    probe: Any
    rows: slice
    chosen: Tensor  # b n k
    size: tuple[int, int]  # t, s

    def at(self, site: str) -> Spread:
        return self

    def see(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, terms: Terms) -> None:
        self.probe.gathered(q, k, v, mask, terms, self)
