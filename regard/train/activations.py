"""How many bytes a forward pass keeps for the backward pass, by formula: what autograd saves in each part of a block.

Symbols as everywhere: b rows, t queries, s keys, h and g heads, d and e their widths, m the model's width, f the
feed-forward's. `w` is the size of a product's number: 4 bytes in fp32, 2 under bf16 autocast. The stream and what norms
keep are 4 bytes wide in both. Tests compare the sums with what `saved_tensors_hooks` sees.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from regard.attention import DSA, GQA, MLA
from regard.block import Tower
from regard.layers import MLP, Norm
from regard.models import (
    EncoderDecoderConfig,
    Patches,
    RecurrentConfig,
    Seq2SeqConfig,
    Tokens,
    TransformerConfig,
)
from regard.moe import MoE


@dataclass(frozen=True)
class Pass:
    """One forward pass: `rows` of `length` tokens each, and of `source` tokens where an encoder reads them. `masked`:
    attention gets its mask as a tensor (packed documents, padding); of two towers, that to the source."""

    rows: int
    length: int
    source: int = 0
    masked: bool = False
    bf16: bool = False
    device: str = "cpu"

    @property
    def w(self) -> int:
        return 2 if self.bf16 else 4

    @property
    def dropped(self) -> int:
        """Bytes of what dropout remembers of a number: a bool, but on a CPU the factor."""
        return self.w if self.device == "cpu" else 1


@dataclass(frozen=True)
class Kept:
    """Bytes kept: of each block, of its input alone, and around the blocks."""

    blocks: tuple[int, ...]
    inputs: tuple[int, ...]
    around: int

    def total(self, recompute: bool = False) -> int:
        """With `recompute` blocks keep their input, and one at a time all the rest."""
        if recompute and self.blocks:
            return self.around + sum(self.inputs) + max(self.blocks)
        return self.around + sum(self.blocks)

    def __add__(self, other: Kept) -> Kept:
        blocks, inputs = self.blocks + other.blocks, self.inputs + other.inputs
        return Kept(blocks, inputs, self.around + other.around)


def kept(config: Any, run: Pass) -> Kept:
    """Of a model's `hidden`; the head is not in it."""
    b, t, s = run.rows, run.length, run.source
    match config:
        case TransformerConfig():
            front = b * t * _embedding(config.embedding, config.tower, run)
            return _tower(config.tower, run, t, t, run.masked) + Kept((), (), front)
        case EncoderDecoderConfig():
            encoder, decoder = config.encoder, config.decoder
            front = b * t * _embedding(config.target, decoder, run)
            front += b * s * _embedding(config.source, encoder, run)
            front += 0 if run.bf16 else b * s * 4 * encoder.dim  # the memory that every layer reads
            both = _tower(encoder, run, s, s, run.masked) + _tower(decoder, run, t, s, False)
            return both + Kept((), (), front)
        case RecurrentConfig() | Seq2SeqConfig():
            return Kept((), (), _recurrent(config, run))
    raise AssertionError(f"no formula for {type(config).__name__}")


def _embedding(config: Tokens | Patches, tower: Tower, run: Pass) -> int:
    """A token, on its way into a tower of this width."""
    m = tower.dim
    if isinstance(config, Patches):
        return 4 * config.channels * config.patch**2 + (4 * m if config.dropout else 0)
    norm = _norm(config.norm, m, run) if config.norm else 0
    return 8 + norm + (4 * m if config.dropout else 0)


def _norm(norm: Norm, width: int, run: Pass) -> int:
    """A token's: the input and its statistics; the CPU's RMSNorm, which is not fused, also x / rms."""
    if norm.rms:
        return (8 if run.device == "cpu" else 4) * width + 4
    return 4 * width + 8


# --- blocks -------------------------------------------------------------------------------------------------------


def _tower(tower: Tower, run: Pass, t: int, s: int, masked: bool) -> Kept:
    """`s` is what cross-attention reads, where there is one."""
    n, m = run.rows * t, tower.dim
    site = Site(run, t, t, m, masked, tower.relative is not None)
    same = n * (_norm(tower.norm, m, run) * (3 if tower.cross else 2))
    if tower.dropout:
        parts = (3 if tower.cross else 2) if tower.attention_dropped else 1
        same += n * m * run.dropped * parts
    if tower.cross is not None:
        there = replace(site, s=s, memory=tower.memory_dim or m, masked=run.masked, bias=False)
        same += attention(tower.cross, there)
    layers = zip(tower.each("attention"), tower.each("ffn"), strict=True)
    blocks = tuple(same + attention(a, site) + n * _ffn(f, m, run) for a, f in layers)
    around = n * _norm(tower.norm, m, run) if tower.final_norm else 0
    around += n * 4 * m if tower.dropout and tower.end_dropped else 0
    if tower.relative is not None:
        around += 8 * t * t * (run.rows if masked else 1)
    return Kept(blocks, (4 * n * m,) * len(blocks), around)


def _ffn(ffn: MLP | MoE, m: int, run: Pass) -> int:
    """A token's: what the products read, and what is inside."""
    shared = 2 * m if run.bf16 else 4 * m  # autocast makes a copy for each product that reads
    if isinstance(ffn, MLP):
        return shared * (2 if ffn.gated and run.bf16 else 1) + _inside(ffn, run)
    more = MLP(ffn.shared * ffn.ffn_dim, ffn.activation, gated=True)
    inside = _inside(more, run) if ffn.shared else 0
    copies = (1 + 2 * bool(ffn.shared)) if run.bf16 else 1
    each = (10 if run.bf16 else 12) * m + 4 * run.w * ffn.ffn_dim + 24
    return shared * copies + inside + ffn.active * each + run.w * ffn.experts + 8 * ffn.active


def _inside(ffn: MLP, run: Pass) -> int:
    """A token's: of a gate, what goes in and out of the activation, the other factor, the product; ReLU and tanh need
    only what comes out."""
    out_only = ffn.activation in ("relu", "tanh")
    if ffn.gated:
        count = 3 if out_only else 4
    else:
        count = 1 if out_only and not ffn.dropout else 2
    return ffn.ffn_dim * (count * run.w + (run.dropped if ffn.dropout else 0))


# --- attention ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """Where attention stands: t queries, s keys a row; `memory` is the width of what is read instead of x."""

    run: Pass
    t: int
    s: int
    dim: int
    masked: bool
    bias: bool = False
    memory: int = 0

    @property
    def queries(self) -> int:
        return self.run.rows * self.t

    @property
    def keys(self) -> int:
        return self.run.rows * self.s

    def read(self, query: int, key: int) -> int:
        """x for so many products of queries and of keys; autocast makes a copy for each. A memory is shared by all."""
        if not self.run.bf16:
            return 4 * self.dim * self.queries
        return 2 * (self.dim * query * self.queries + (self.memory or self.dim) * key * self.keys)


def attention(config: GQA | MLA | DSA, site: Site) -> int:
    """Bytes of one attention in all rows."""
    if isinstance(config, DSA):
        inner = config.attention
        if site.s <= config.topk:
            return attention(inner, site)
        h, g, d, e = _heads(inner, site.dim, absorbed=True)
        rows = replace(site.run, rows=site.queries)
        near = replace(site, run=rows, t=1, s=config.topk, masked=True)
        mixed = _mix(h, g, d, e, near, inner) + 8 * config.topk * site.queries
        absorbed = site.run.w * h * (d + e) * site.queries if isinstance(inner, MLA) else 0
        return _entries(inner, site) + mixed + absorbed
    return _entries(config, site) + _mix(*_heads(config, site.dim), site, config)


def _heads(config: GQA | MLA, dim: int, absorbed: bool = False) -> tuple[int, int, int, int]:
    """h, g, d, e of what is attended to."""
    h = config.heads
    if isinstance(config, GQA):
        d = config.width(dim)
        return h, config.groups, d, config.value_dim or d
    if absorbed:
        return h, 1, config.latent + config.rope_dim, config.latent
    d = config.head_dim or dim // h
    return h, h, d + config.rope_dim, config.value_dim or d


def _entries(config: GQA | MLA, site: Site) -> int:
    """What the projections read, and what norms between them and the scores keep."""
    run = site.run
    rms = 8 if run.device == "cpu" else 4
    if isinstance(config, MLA):
        rank = config.query_latent or 0
        normed = rms if config.normed else 0
        latent = (normed + run.w) * config.latent + (0 if run.bf16 else 4 * config.rope_dim)
        ranked = (normed + run.w) * rank * site.queries
        return site.read(1, 1) + latent * site.keys + ranked
    h, g, d, _ = _heads(config, site.dim)
    norms = 0 if config.qk_norm is None else d * (rms - 4 + run.w)
    return site.read(1, 2) + norms * (h * site.queries + g * site.keys)


def _mix(h: int, g: int, d: int, e: int, site: Site, config: GQA | MLA) -> int:
    """q, k, v and o; a fused kernel keeps the log of each row's sum, the plain form the weights (b h t s)."""
    run, w = site.run, site.run.w
    cap = isinstance(config, GQA) and config.softcap is not None
    sinks = isinstance(config, GQA) and config.sinks
    bias = site.bias or sinks
    masked = site.masked or bias or (config.window is not None and not site.memory)
    grid = site.t * site.s * (run.rows if site.masked else 1)
    sizes = (h, g, d, e, masked, bias, config.dropout)
    if not cap and fused(*sizes, run.bf16, run.device):
        both = w * (h * d + h * e) * site.queries + w * g * (d + e) * site.keys
        both += 4 * h * site.queries
        return both + (w * grid + w * h * e * site.queries if masked else 0)
    wide = w if cap else 4  # torch's plain form computes in fp32
    both = (wide * h * d + w * h * e) * site.queries + wide * h * (d + e) * site.keys
    each = 4 + 2 * w if cap else 12 if config.dropout else 4
    return both + each * run.rows * h * site.t * site.s + (grid if masked and bias else 0)


@functools.cache
def fused(
    h: int,
    g: int,
    d: int,
    e: int,
    masked: bool,
    bias: bool,
    dropout: float,
    bf16: bool,
    device: str,
) -> bool:
    """Whether torch has a kernel for such an attention that keeps no weights: torch itself is asked."""
    if device == "cuda" and not torch.cuda.is_available():
        device = "cpu"  # a plan for another machine: the CPU's kernels can do less
    dtype = torch.bfloat16 if bf16 else torch.float32
    q, k, v = (
        torch.zeros(1, heads, 16, width, device=device, dtype=dtype, requires_grad=True)
        for heads, width in ((h, d), (g, d), (g, e))
    )
    mask = None
    if masked:
        kind = dtype if bias else torch.bool
        mask = torch.zeros(1, h if bias else 1, 16, 16, device=device, dtype=kind)
        mask.requires_grad_(bias)
    choice = torch._fused_sdp_choice(q, k, v, mask, dropout, mask is None, enable_gqa=h != g)
    return choice > 0


# --- recurrent models ---------------------------------------------------------------------------------------------

CELLS = {"elman": 2, "gru": 8, "lstm": 17}  # numbers of width m that a layer keeps of a token


def _recurrent(config: RecurrentConfig | Seq2SeqConfig, run: Pass) -> int:
    """Rougher than the rest: torch's fused layers, and attention by Luong or Bahdanau, which keeps tanh (t s m)."""
    c, m = config, config.dim
    n, source = run.rows * run.length, run.rows * run.source
    dropout = 3 * m * 4 if c.dropout else 0
    total = n * (8 + c.layers * CELLS[c.cell] * m * 4 + dropout)
    if isinstance(c, Seq2SeqConfig):
        directions = 2 if c.bidirectional else 1
        total += source * (8 + directions * c.layers * CELLS[c.cell] * m * 4 + dropout)
        total += source * 4 * c.memory_dim
    if c.attention is None:
        return total
    keys = run.source or run.length
    if c.attention == "additive":
        return total + n * 4 * (keys * (m + 2) + 3 * m)
    return total + n * 4 * (5 * m + keys)
