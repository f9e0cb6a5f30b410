"""The topics of `regard explain`, and the numbers behind them: one softmax and one weighted sum,
layers of attention, positions, parts, smaller weights, training and decoding."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import DSA, GQA, MLA, SSD, Context, DeltaRule, Terms, softmax
from regard.attention.core import reference
from regard.attention.core import scores as dot_scores
from regard.attention.delta import recall, recurrent
from regard.attention.latent import LatentAttention
from regard.attention.online import online
from regard.attention.pooling import KERNELS, combine, one_loop, regress, three_loops
from regard.attention.scores import SCORES, make_score
from regard.attention.sparse import choose, index_scores, to_fp8
from regard.block import Tower
from regard.cache import CacheSpec, Paged
from regard.cache.paged import Pool
from regard.checkpoint import load
from regard.config import divisors
from regard.data.feed import Batch
from regard.data.read import needed
from regard.data.train_tokenizer import KINDS as TOKENIZERS
from regard.data.train_tokenizer import Recipe, train_tokenizer
from regard.decode.filters import min_p, top_k, top_p
from regard.decode.sampling import beam_search, greedy
from regard.decode.speculate import Index
from regard.errors import Notice, UsageError
from regard.evaluation.run import Shots
from regard.kernels.linear import GROUP, TILE, Int4, pack
from regard.layers import ACTIVATIONS, LM, MLP, Norm
from regard.learn.explain import (
    Matrix,
    Numbers,
    Table,
    Tables,
    fill,
    positive,
    real,
    rows_of,
    topic,
    whole,
)
from regard.learn.traffic import kept, plain, plain_bytes, tiled, tiled_bytes
from regard.mask import Causal, Documents, Full, Mask, Padding, Prefix, Span, Visible, Window
from regard.models import Patches, Tokens, TransformerConfig
from regard.models.adapt import LoRA, LowRank
from regard.models.base import parameters
from regard.models.mtp import MTP
from regard.models.recurrent import CELLS, MemoryAttention, Recurrence
from regard.moe import MoE
from regard.position import Rope, T5Bias, alibi_slopes, rotate, sinusoid, t5_bucket
from regard.presets import build
from regard.see.probe import Probe
from regard.text import Tokenizer
from regard.text import needed as at_hand
from regard.training import losses
from regard.training.checkpoint import Checkpoints
from regard.training.measure import text_scores
from regard.training.objectives import Tally, causal
from regard.training.optim import SHAPES, Optim, Schedule, clip, noam
from regard.training.scheduled import Sampled, ScheduledSampling
from regard.training.trainer import Train, Trainer

ATTENTION, POOLING = "regard/attention/core.py", "regard/attention/pooling.py"
HEADS, POSITION = "regard/attention/multihead.py", "regard/position.py"
ONLINE, TRAFFIC = "regard/attention/online.py", "regard/learn/traffic.py"
NUMBERS = "regard/learn/mechanisms.py"
# Bytes of a number in half precision.
HALF = 2
FILTERS, LOSSES = "regard/decode/filters.py", "regard/training/losses.py"
SAMPLING = "regard/decode/sampling.py"

# --- numbers --------------------------------------------------------------------------------------


def softmax_jacobian(x: Tensor) -> Tensor:
    """d p_i / d x_j = p_i (1[i=j] - p_j), p = softmax(x).   (... n) -> (... n n)

    It vanishes as p saturates."""
    p = softmax(x)
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


def saturation(a: Tensor) -> Tensor:
    """The largest weight of softmax([a, a, 2a]) = 1 / (1 + 2 exp(-a)); exp(2a) itself would
    overflow."""
    return 1 / (1 + 2 * torch.exp(-a))


def dot_moments(dim: int, scale: float = 1.0, *, same: bool = False) -> tuple[float, float]:
    """Mean and variance of scale q.k over all q, k in {-1, +1}^dim, independent: 0 and scale^2 dim.

    So scale = dim^-0.5 keeps the variance 1. With `same`, k is q: independence is what makes the
    mean 0."""
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=dim)), dtype=torch.float64)
    dots = scale * (signs.square().sum(-1) if same else signs @ signs.T)
    return dots.mean().item(), dots.var(correction=0).item()


def weightless(config: Any, dim: int) -> Any:
    """A layer of this width whose weights take no memory."""
    with torch.device("meta"):
        return config.make(dim)


def cache_numbers(attention: GQA | MLA | DSA, dim: int) -> int:
    """Numbers that one token leaves in one layer's cache: GQA g (d + e), MLA c + r, DSA the same
    and D."""
    return weightless(attention, dim).cache_spec().numbers()


def kept_numbers(attention: GQA | DeltaRule | SSD, dim: int, tokens: int) -> int:
    """Numbers that one layer keeps of so many tokens: of a cache as often, of a state once."""
    spec = weightless(attention, dim).cache_spec()
    state = sum(torch.Size(shape).numel() for shape in spec.state.values())
    return state + tokens * spec.numbers()


def mla_weights(attention: MLA, dim: int) -> tuple[int, int]:
    """Weights one head needs for its scores: W_Q and W_UK apart, (n + c) d, and merged to W_Q
    W_UK^T, n c.

    n is the width that W_Q reads. Merging them "to save work" multiplies both storage and work."""
    layer: LatentAttention = weightless(attention, dim)
    n = layer.w_uq.in_features
    return (n + layer.c) * layer.d, n * layer.c


def dot_products(tokens: int, *, cached: bool) -> int:
    """q.k products of one head to write `tokens` tokens one by one: step t needs t with a cache,
    t^2 without one."""
    return sum(t if cached else t * t for t in range(1, tokens + 1))


def multiply_adds(attention: GQA, dim: int, tokens: int) -> tuple[int, int]:
    """Of one layer over `tokens` tokens: projections, n times the weights, and scores and sums, n^2
    h (d + e)."""
    layer = weightless(attention, dim)
    weights = sum(w.weight.numel() for w in (layer.wq, layer.wk, layer.wv, layer.wo))
    return tokens * weights, tokens**2 * layer.h * (layer.d + layer.e)


def grid(title: str, x: Tensor, row: str = "token", column: str = "o_", draw: str = "") -> Table:
    """A matrix as a table: row 1, row 2, ... under column1, column2, ..."""
    columns = [row, *(f"{column}{j + 1}" for j in range(x.shape[1]))]
    rows = [[i, *each.tolist()] for i, each in enumerate(x, 1)]
    return Table(title, columns, rows, draw, column.strip(" _"))


def times(x: Tensor, **weights: Matrix) -> list[Tensor]:
    """x W^T for each W, which is stored (out, in)."""
    return [x @ rows_of(name, w, width=x.shape[1]).T for name, w in weights.items()]


def like(name: str, x: Matrix | Numbers, other: Tensor) -> Tensor:
    """Numbers in as many rows of as many as `other` has."""
    given = torch.atleast_2d(real(x))
    if given.shape != other.shape:
        size, wanted = (" x ".join(map(str, each.shape)) for each in (given, other))
        raise UsageError(f"--{name} is {size}, but {wanted} fits the rest (semicolons divide rows)")
    return given


def steps_of(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tables:
    """softmax(q k^T / sqrt(d)) v of one head (t d), (s d), (s e), one table for each step."""
    spans, scale = (Span.run(0, len(q)), Span.run(0, len(k))), q.shape[1] ** -0.5
    if q.shape[1] != k.shape[1]:
        raise UsageError(f"queries have {q.shape[1]} numbers, keys {k.shape[1]}; give both as many")
    plain, scaled = (dot_scores(q[None, None], k[None, None], Terms(s))[0, 0] for s in (1.0, scale))
    yield grid("scores q.k", plain, "query", "key ")
    yield grid(f"divided by sqrt({q.shape[1]})", scaled, "query", "key ")
    seen = Visible(mask or Full(), *spans).tensor()[0, 0]
    if mask is not None:
        yield grid("masked", scaled.masked_fill(~seen, -torch.inf), "query", "key ")
    a = softmax(scaled, seen)
    yield grid("weights, softmax of each row", a, "query", "key ", "map")
    yield grid("output, weights times values", a @ v, "query")


def sight(rules: dict[str, Mask], n: int) -> Table:
    """What each of n queries may see of n keys under each rule."""
    here = Span.run(0, n)
    seen = [Visible(rule, here, here).tensor()[0, 0] for rule in rules.values()]
    rows = [[i, *(" ".join(".1"[int(x)] for x in mask[i]) for mask in seen)] for i in range(n)]
    return Table("1: seen (row: query, column: key)", ["query", *rules], rows, "masks")


def _numbered(letter: str, rows: Tensor) -> list[str]:
    return [f"{letter}_{i + 1}" for i in range(rows.shape[1])]


# --- one softmax, one weighted sum ----------------------------------------------------------------


@topic(f"{ATTENTION}::softmax", f"{POOLING}::three_loops")
def softmax_(x: Numbers = (1.0, 2.0, 3.0)) -> Tables:
    """How do scores become weights that sum to 1, without overflow?

    p_i = e^(x_i - m) / d,   m = max_j x_j,   d = sum_j e^(x_j - m)
    The same m above and below the line: it cancels, and no exponent is above 0."""
    weights, trace = three_loops(real(x))
    m, d = trace[-1].m, trace[-1].d
    rows = [[a, a - m, p * d, p] for a, p in zip(x, weights.tolist())]
    total = ["sum", "", d, weights.sum().item()]
    yield Table(f"m = {m:g}", ["x", "x - m", "e^(x - m)", "softmax"], [*rows, total], "bars")


@topic(f"{NUMBERS}::saturation", f"{NUMBERS}::softmax_jacobian")
def saturation_(a: Numbers = (0.0, 1.0, 2.0, 5.0, 10.0)) -> Tables:
    """When does a softmax stop learning?

    softmax([a, a, 2a])_3 = 1 / (1 + 2 e^-a)   -> 1 as a grows
    The Jacobian p_i (1[i=j] - p_j) goes to 0 with it: no gradient gets through to the scores."""
    largest = [softmax_jacobian(real((x, x, 2 * x))).abs().max().item() for x in a]
    columns = {"a": a, "weight of 2a": saturation(real(a)), "largest |dp/dx|": largest}
    yield Table.of("softmax([a, a, 2a])", columns, "lines", "weight, slope", "a")


@topic(f"{NUMBERS}::softmax_jacobian")
def jacobian(x: Numbers = (1.0, 2.0, 3.0)) -> Tables:
    """How does a weight move when a score moves?

    d p_i / d x_j = p_i (1[i=j] - p_j),   p = softmax(x);   as a matrix: diag(p) - p p^T
    Symmetric, and every row sums to 0: the weights share one whole."""
    p, matrix = softmax(real(x)), softmax_jacobian(real(x))
    rows = torch.cat([p[:, None], matrix, matrix.sum(-1, keepdim=True)], -1)
    columns = ["p_i", *(f"d/dx_{j}" for j in range(1, len(x) + 1)), "sum"]
    yield Table(
        "one row for each p_i", columns, rows.round(decimals=15).tolist(), "map d/dx_1", "score"
    )


@topic(f"{NUMBERS}::dot_moments", "regard/attention/scores.py::ScaledDot")
def scaling(dim: Numbers = (1.0, 2.0, 4.0, 8.0)) -> Tables:
    """Why are scores divided by sqrt(d)?

    q_i, k_i independent, mean 0, variance 1:   E[q.k] = 0,   Var[q.k] = d,   Var[q.k / sqrt(d)] = 1
    Enumerated below over every q and k in {-1, +1}^d. With k = q the mean is d: independence is needed."""
    rows = []
    for d in (whole("dim", x, 1, 10) for x in dim):
        moments = *dot_moments(d), dot_moments(d, d**-0.5)[1], dot_moments(d, same=True)[0]
        rows.append([d, *(round(x, 12) for x in moments)])
    columns = ["d", "mean q.k", "variance", "variance of q.k/sqrt(d)", "mean q.q"]
    yield Table("all q, k in {-1, +1}^d", columns, rows, "lines variance", "mean, variance")


@topic(f"{ATTENTION}::reference", f"{ATTENTION}::attend")
def attention(q: Matrix, k: Matrix, v: Matrix) -> Tables:
    """What does a query get from keys and values?

    o = sum_j a_j v_j,   a = softmax(q.k_j / sqrt(d));   of all queries: softmax(Q K^T / sqrt(d)) V
    This is scaled dot-product attention.
    Each weight MULTIPLIES its value. Rows are divided by semicolons: --q "1 0; 0 1" is two queries."""
    queries = torch.atleast_2d(real(q))
    if len(k) == queries.numel() > 1 and not isinstance(k[0], tuple):
        raise UsageError(
            f"--k has {len(k)} numbers, as many as --q: is it one key? Divide rows by semicolons, "
            f'such as --q "1 0; 0 1" --k "1 0; 0 1" --v "1 2; 3 4"; --k "1 0;" is one key'
        )
    keys = rows_of("k", k, width=queries.shape[1])
    values = rows_of("v", v, count=len(keys))
    return steps_of(queries, keys, values)


@topic("regard/mask.py::Causal", "regard/mask.py::Visible")
def masks(tokens: int = 5, window: int = 3) -> Tables:
    """Which keys may a query see?

    a_ij = softmax_j(x_ij) over the visible j alone;   causal (the look-ahead mask): j <= i
    window: |i - j| < w,   prefix: j <= i or j < n
    Rules are joined with &. A row that sees nothing gives zeros."""
    n = whole("tokens", tokens, 2, 20)
    half = torch.tensor([n // 2])
    rules: dict[str, Mask] = {
        "full": Full(),
        "causal": Causal(),
        f"causal & window {window}": Causal() & Window(window),
        f"prefix {n // 2}": Prefix(half),
        f"padding after {n - 1}": Padding(torch.tensor([n - 1])),
        "causal & documents": Causal() & Documents((torch.arange(n) >= half)[None].long()),
    }
    yield sight(rules, n)


@topic(f"{POOLING}::one_loop", f"{ONLINE}::online")
def online_softmax(x: Numbers = (1.0, 3.0, 2.0), v: Numbers = (1.0, 2.0, 3.0)) -> Tables:
    """How can attention be computed in one pass, with no row of scores kept?

    m' = max(m, x_i),   d' = d e^(m - m') + e^(x_i - m'),   o' = o (d / d') e^(m - m') + (e^(x_i - m') / d') v_i
    The old sums shrink by e^(OLD maximum - NEW maximum), which is at most 1."""
    values = rows_of("v", v, count=len(x))
    last, trace = one_loop(real(x), values)
    names = ["o"] if values.shape[1] == 1 else _numbered("o", values)
    found = [
        [i, score, step.m, step.d, *cast(Tensor, step.o).tolist()]
        for i, (score, step) in enumerate(zip(x, trace), 1)
    ]
    yield Table("after each key", ["key", "x", "m", "d", *names], found, "lines", "so far")
    yield Table("softmax(x) v, in three passes", names, [(softmax(real(x)) @ values).tolist()])


@topic(f"{ONLINE}::online", f"{TRAFFIC}::plain", f"{TRAFFIC}::tiled_bytes")
def flash_attention(
    block: Numbers = (32.0, 64.0, 128.0, 256.0), tokens: int = 512, dim: int = 64
) -> Tables:
    """Why is attention in tiles fast, and how little does its backward need?

    forward: plain attention moves 4 N d + 4 N^2 numbers, tiles of Br x Bc 2 N d + N + 2 (N / Br) N d
    backward: plain 8 N d + 7 N^2, tiles 6 N d + N + (N / Bc) N (4 d + 2);   kept for it: N^2 + 3 N d, 4 N d + N
    Scores exist in fast memory (SRAM) alone, a tile at a time; slow memory (HBM) has Q, K, V, O and a log-sum-exp for
    each query, and recomputation gives the rest. Below, tiles of B x B, N / B rounded up, and 4 bytes a number."""
    n, d = whole("tokens", tokens, 2, 2048), whole("dim", dim, 1, 1024)
    here, scale = Span.run(0, n), d**-0.5
    memory = {name: torch.ones(1, 1, n, d) for name in ("q", "k", "v", "do")}
    masks: dict[str, Visible | None] = {"tiles": None, "causal": Visible(Causal(), here, here)}
    # At most 64 x 64 tiles.
    sides = [whole("block", each, -(-n // 64), 4096) for each in block]
    counted, formula = [], []
    for b in sides:
        runs = [plain(memory, scale), *(tiled(memory, scale, m, (b, b)) for m in masks.values())]
        known = [plain_bytes(n, d), *(tiled_bytes(n, d, (b, b), m != "tiles") for m in masks)]
        # Q, O, K, V, scores, and a maximum and a sum for each query.
        size = 4 * (4 * b * d + b * b + 2 * b)
        counted.append([b, size, *(traffic.total() for way in zip(*runs) for traffic in way)])
        formula.append([b, size, *(total for way in zip(*known) for total in way)])
    ways = product(("forward", "backward"), ("plain", *masks))
    columns = ["B", "fast memory", *(", ".join(words) for words in ways)]
    yield Table(
        f"bytes of {n} tokens of width {d}, counted", columns, counted, "log forward", "bytes"
    )
    yield Table("the same by formula", columns, formula)
    both = tiled(memory, scale, None, (sides[0], sides[0]))
    names = dict.fromkeys(name for traffic in both for _, name in traffic)
    found = product(both, ("read", "written"))
    cells = [[traffic[how, name] for name in names] for traffic, how in found]
    columns = ["tensor", "forward, read", "written", "backward, read", "written"]
    yield Table(f"tiles of {sides[0]} x {sides[0]}, by tensor", columns, [*zip(names, *cells)])
    rows = []
    for m in (n // 2, n, 2 * n):
        ours = (kept(backend, m, d) for backend in (reference, online))
        rows.append([m, *ours, 4 * (m * m + 3 * m * d), 4 * (4 * m * d + m)])
    columns = ["N", "plain", "tiles", "4 (N^2 + 3 N d)", "4 (4 N d + N)"]
    yield Table("bytes kept for the backward, by torch's own hooks", columns, rows, "log", "bytes")


@topic(f"{POOLING}::regress", f"{POOLING}::kernel_weights")
def nadaraya_watson(q: Numbers, k: Numbers, v: Numbers, width: float = 1.0) -> Tables:
    """What was attention before it had weights to learn?

    f(q) = sum_j a_j(q) v_j,   a_j(q) = K(u_j) / sum_i K(u_i),   u_j = |q - k_j| / width
    With the Gaussian K(u) = e^(-u^2/2) this is softmax(-u^2/2): attention with a distance as score."""
    if len(k) != len(v):
        raise UsageError(f"--k has {len(k)} numbers and --v {len(v)}; give as many of both")
    positive("width", width)
    estimates = {name: regress(real(q), real(k), real(v), name, width) for name in KERNELS}
    yield Table.of("estimates; none: no key is near", {"q": q, **estimates}, "lines", "f(q)", "q")


@topic("regard/attention/scores.py::Additive", "regard/attention/scores.py::Bilinear")
def scores(q: Numbers = (0.5, -1.0, 2.0), k: Numbers = (1.0, 0.5, -0.5, 0.0, 1.0, 1.0)) -> Tables:
    """Which ways are there to compare a query with a key?

    dot q.k;   scaled dot q.k / sqrt(d);   bilinear q^T W k;   additive w_v^T tanh(W_q q + W_k k)
    The last two have weights of their own; here ((3i + 5j + n) mod 13 - 6) / 10."""
    keys, width = rows_of("k", k, width=len(q)), len(q)
    layers = {name: fill(make_score(name, width, width, width)) for name in SCORES}
    values = {name: score(real(q)[None], keys)[0] for name, score in layers.items()}
    yield Table.of(
        "one row for each key", {"key": range(1, len(keys) + 1), **values}, "map", "score"
    )


@topic("regard/models/recurrent.py::BahdanauStep", "regard/models/recurrent.py::MemoryAttention")
def bahdanau(q: Numbers, k: Numbers, tokens: int = 3) -> Tables:
    """How did the first attention look back at the source?

    e_s = w_v^T tanh(W_q h_{t-1} + W_k m_s),   a = softmax(e),   c_t = sum_s a_s m_s
    The decoder's PREVIOUS state asks. q: that state; k: the encoder's states, one for each of the tokens.
    Without a softmax: all a_s = 1/n (average), 1 (sum), or 1 at the highest score alone (hard), which has no gradient
    to the choice. In a model: attention = "average", "sum" or "hard" (by q . k)."""
    if len(k) % tokens:
        raise UsageError(f"--k has {len(k)} numbers, which are no {tokens} states (--tokens)")
    memory = rows_of("k", k, count=tokens)
    layer = fill(MemoryAttention("additive", len(q), memory.shape[1]))
    e = layer.score(real(q)[None], memory)[0]
    cached = {"h": memory[None], "k": layer.score.key(memory)[None]}
    c = layer(real(q)[None, None], cached, backend="reference")
    columns = {"source": range(1, tokens + 1), "score e": e, "weight a": softmax(e)}
    yield Table.of("alignment", columns, "bars")
    yield Table("context", _numbered("c", memory), [c.flatten().tolist()])
    ways = {"average": "average", "sum": "sum", "hard": "one_hot"}
    other = [(name, *combine(memory, e, how).tolist()) for name, how in ways.items()]
    yield Table("the same states without a softmax", ["a", *_numbered("c", memory)], other)


# --- layers of attention ------------------------------------------------------------------------


@topic(f"{HEADS}::GroupedQueryAttention", "regard/see/probe.py::Probe")
def self_attention(x: Matrix, heads: int = 2) -> Tables:
    """How does every token of a text read the others?

    Q = X W_Q,   K = X W_K,   V = X W_V, all of one text X;   O = softmax(Q K^T / sqrt(d) + mask) V W_O
    One layer, called alone, under the look-ahead mask; its weights by a probe. x: a row for each token.
    Without positions permuted tokens give permuted outputs: it sees a set."""
    given, probe = torch.atleast_2d(real(x)), Probe()
    layer = fill(GQA(whole("heads", heads)).make(given.shape[1]))
    ctx = Context(Span.run(0, len(given)), Causal(), probe=probe, site="0.self")
    out = layer(given[None], ctx)[0]
    for i, a in enumerate(probe.maps["0.self"][0][0], 1):
        yield grid(f"weights of head {i}", a, "query", "key ", "map")
    yield grid("output", out)


@topic(f"{HEADS}::GroupedQueryAttention", f"{NUMBERS}::multiply_adds")
def multi_head(dim: int = 512, heads: int = 8, tokens: int = 128) -> Tables:
    """Why several heads instead of one wide one?

    head_i = softmax(Q_i K_i^T / sqrt(d)) V_i,   d = m / h;   output [head_1 .. head_h] W_O
    As many weights and multiplications as one head of width m, but h different maps of who looks at whom."""
    if dim % heads:
        raise UsageError(f"--heads {heads} does not divide --dim {dim}; try one of {divisors(dim)}")
    rows = []
    for h in divisors(heads):
        projections, pairs = multiply_adds(GQA(h), dim, tokens)
        rows.append([h, dim // h, projections // tokens, projections, pairs, h * tokens**2])
    columns = ["heads", "d", "weights", "n weights", "scores and sums", "weights a, all heads"]
    yield Table(f"multiply-adds of one layer over {tokens} tokens", columns, rows, "bars")


@topic(f"{HEADS}::GroupedQueryAttention.entries", "regard/block.py::Block")
def cross_attention(x: Numbers, k: Numbers) -> Tables:
    """How does a decoder read the source?

    Q = X W_Q,   K = M W_K,   V = M W_V;   O = softmax(Q K^T / sqrt(d)) V W_O
    Queries come from the decoder, keys and values from the encoder's output M, by two projections.
    x: two decoder states; k: source states of the same width. No causal mask: the whole source is there."""
    states = rows_of("x", x, count=2)
    memory = rows_of("k", k, width=states.shape[1])
    layer = fill(GQA(1).make(states.shape[1]))
    spans, probe = (Span.run(0, len(states)), Span.run(0, len(memory))), Probe()
    ctx = Context(spans[0], memory=memory[None], memory_pos=spans[1], probe=probe, site="cross")
    out = layer(states[None], ctx)[0]
    yield grid("weights", probe.maps["cross"][0][0, 0], "target", "source ", "map")
    yield grid("output", out, "target")


@topic(f"{HEADS}::GQA", f"{HEADS}::GroupedQueryAttention.core_attention")
def gqa(heads: int = 8, kv_heads: int = 2, head_dim: int = 64) -> Tables:
    """How many key and value heads does a model need?

    o_i = softmax(q_i k_j^T / sqrt(d)) v_j,   j = i // (h / g)
    g = h is multi-head, g = 1 multi-query. Cache per token and layer: g (d + d)."""
    chosen, dim = GQA(heads, kv_heads, head_dim), heads * head_dim
    full = cache_numbers(GQA(heads, head_dim=head_dim), dim)
    rows = []
    for g in divisors(heads):
        size = cache_numbers(GQA(heads, g, head_dim), dim)
        name = "MHA" if g == heads else "MQA" if g == 1 else "GQA"
        rows.append([g, name, size, f"1/{full // size}" if size < full else "1"])
    share = heads // chosen.groups
    members = [range(j * share, (j + 1) * share) for j in range(chosen.groups)]
    groups = [[j, " ".join(map(str, each))] for j, each in enumerate(members)]
    yield Table("numbers in the cache", ["g", "name", "per token", "of MHA"], rows, "bars")
    yield Table(f"g = {chosen.groups}: who shares", ["key head", "query heads"], groups)


@topic("regard/attention/latent.py::LatentAttention.absorbed", "regard/attention/latent.py::MLA")
def mla(dim: int, heads: int, head_dim: int, latent: int, rope_dim: int, rank: int) -> Tables:
    """How can every head keep keys of its own while the cache stays small?

    c = norm(W_DKV x),   k = [W_UK c ; RoPE(W_KR x)],   v = W_UV c;   cached: c and the one rotary key
    Absorbed: q^T W_UK c = (W_UK^T q)^T c, so the latents themselves are attended to and no key is ever built.
    latent: c; rope_dim: r; rank: of the queries' latent."""
    if rope_dim % 2:
        raise UsageError(f"--rope-dim is {rope_dim}, and RoPE turns pairs; give an even number")
    config = MLA(heads, latent, head_dim, rope_dim, query_latent=rank, rope=Rope())
    plain = {f"GQA, g = {g}": GQA(heads, g, head_dim) for g in (8, 2) if heads % g == 0}
    kinds = {"MHA": GQA(heads, head_dim=head_dim), **plain, "MQA": GQA(heads, 1, head_dim)}
    counts = {name: cache_numbers(kind, dim) for name, kind in kinds.items()}
    counts["MLA"] = cache_numbers(config, dim)
    weights = mla_weights(config, dim)
    title = "numbers in the cache, per token and layer"
    yield Table(title, ["kind", "numbers"], [*counts.items()], "bars")
    yield Table("weights of one head's scores", ["W_Q and W_UK", "merged into one"], [[*weights]])


@topic("regard/attention/sparse.py::index_scores", "regard/attention/sparse.py::choose")
def dsa(x: Numbers, w: Numbers, topk: int = 2) -> Tables:
    """Which k of all past tokens are worth attending to?

    I_ts = sum_j w_tj ReLU(q_tj . k_s);   S_t = the k largest I_ts of the visible s, ties to the earliest
    The layer multiplies by (H D)^-0.5 too, which changes no choice.
    x: q_tj . k_s, one row for each index head j; w: the heads' weights for this token, w_t = W_w x_t."""
    dots = rows_of("x", x, count=len(w))
    index = index_scores(dots[None, None], real(w)[None, None])[0, 0]
    k = whole("topk", topk, 1, len(index))
    best = choose(index, k).tolist() if k < len(index) else range(k)
    columns: dict[str, Any] = {"key": range(len(index))}
    columns |= {f"q.k head {j}": row for j, row in enumerate(dots, 1)}
    columns |= {"I": index, "chosen": ["yes" if s in best else "" for s in range(len(index))]}
    yield Table.of(f"the {k} best of {len(index)} keys", columns, "bars")


@topic("regard/cache/base.py::CacheSpec", f"{NUMBERS}::dot_products")
def kv_cache(
    tokens: Numbers, layers: int = 12, heads: int = 12, kv_heads: int = 12, head_dim: int = 64
) -> Tables:
    """What does decoding save by remembering keys and values, and what does the memory cost?

    q.k products to write n tokens: n(n+1)/2 with a cache, n(n+1)(2n+1)/6 without
    bytes = n L g (d + d) 2 in half precision. Old queries are never needed again."""
    each = cache_numbers(GQA(heads, kv_heads, head_dim), heads * head_dim)
    counts = [whole("tokens", x) for x in tokens]
    rows = [[n, *(dot_products(n, cached=cached) for cached in (True, False))] for n in counts]
    yield Table(
        "q.k products", ["tokens", "with cache", "without"], rows, "log", "products", "tokens"
    )
    rows = [[n, n * layers * each * HALF] for n in counts]
    title = f"{each:,} numbers per token and layer, {layers} layers"
    yield Table(title, ["tokens", "bytes of cache"], rows, "log", "", "tokens")


# --- the whole ------------------------------------------------------------------------------------

# What the three set-ups are called -> a preset, and what it learns.
SETUPS = {
    "GPT: decoder alone": ("gpt2", "the next token"),
    "BERT: encoder alone": ("bert-base", "hidden tokens"),
    "2017: both": ("vaswani-base", "the target's next token"),
}
KINDS = """kind|queries from|keys and values from|hidden|in
self-attention, both ways|the text|the same text|padding|BERT, the encoder
causal self-attention|the text|the same text|later tokens|GPT, the decoder
cross-attention|the target|the encoder's output|padding|the decoder"""


@topic("regard/block.py::Block", "regard/models/transformer.py::EncoderDecoder")
def transformer(layers: int = 6, dim: int = 512, heads: int = 8, width: int = 2048) -> Tables:
    """What is a Transformer made of, and how do GPT, BERT and the full one differ?

    x_0 = embedding + positions;   each layer: x + attention(x), then x + FFN(x), with norms;   logits = x_L E^T
    GPT: one tower, each token sees the past.   BERT: one tower, sees all.   2017: an encoder that sees all of the
    source, and a decoder that sees the past of the target and, by a second attention, all of the source."""
    n, rows, parts = whole("layers", layers, 1, 200), [], ("attention", "cross", "ffn")
    for setup, (preset, learns) in SETUPS.items():
        model = build(preset, device="meta", layers=n, dim=dim, heads=heads, ffn_dim=width)
        blocks = [block for tower in model.towers for block in getattr(model, tower).blocks]
        sizes = [sum(parameters(p) for b in blocks if (p := getattr(b, part))) for part in parts]
        rows.append([setup, preset, blocks[0].order, learns, *sizes, parameters(model)])
    columns = ["set-up", "preset", "norm", "learns", *parts, "all weights"]
    yield Table("three set-ups, and the weights of their parts", columns, rows, "figure")
    names, *kinds = (row.split("|") for row in KINDS.splitlines())
    yield Table("three kinds of attention", names, kinds)


@topic("regard/attention/delta.py::recurrent", "regard/attention/delta.py::chunked")
def delta_rule(k: Matrix, v: Matrix, decay: Numbers = (1.0,), beta: float = 1.0) -> Tables:
    """How can a layer look back at a text of any length through a state of one size?

    S_t = a S_{t-1} + b k_t (v_t - (a S_{t-1})^T k_t)^T,   o_t = S_t^T q_t;   a (--decay): what stays,   b (--beta)
    Before it writes, a key recalls what the state says of it, and only the DIFFERENCE is added: a key that comes again
    replaces its value. Linear attention, S_t = S_{t-1} + k_t v_t^T, adds up both. Keys have length 1.
    By channel (Kimi delta attention, KDA) a is diag(a_1 .. a_d): --decay has a number for each channel of a key."""
    keys = F.normalize(torch.atleast_2d(real(k)), dim=-1)
    values = rows_of("v", v, count=len(keys))
    for name, share in (*(("decay", a) for a in decay), ("beta", beta)):
        if not 0 < share <= 1:
            raise UsageError(f"--{name} is {share:g}; give a share above 0, 1 at most")
    (n, d), e, ones = keys.shape, values.shape[1], keys.new_ones(1, len(keys), 1)
    if len(decay) not in (1, d):
        raise UsageError(f"--decay has {len(decay)} numbers; give 1, or {d}, one for each channel")
    asked = keys[:1].expand(n, -1)[None, :, None]
    written = keys[None, :, None], values[None, :, None]
    state = keys.new_zeros(1, 1, d, e)
    logs, rate = ones[..., None] * real(decay).log(), ones * beta
    told, last = recurrent(asked, *written, logs, rate, state)
    added = torch.cumsum(keys[:, :, None] * values[:, None], 0).transpose(1, 2) @ keys[0]
    rows = [[t + 1, *told[0, t, 0].tolist(), *added[t].tolist()] for t in range(n)]
    columns = [f"{name} {x}" for name in ("delta rule", "linear") for x in _numbered("o", values)]
    yield Table("what the first key recalls", ["after token", *columns], rows, "lines", "recalled")
    if len(decay) > 1:
        # As much is forgotten in all, but of every channel alike.
        _, alike = recurrent(asked, *written, logs.mean(-1, keepdim=True), rate, state)
        both = torch.cat([last, alike], -1).expand(n, -1, -1, -1)
        rows = [
            [t, *found] for t, found in enumerate(recall(keys[:, None], both)[:, 0].tolist(), 1)
        ]
        names = "by channel:", f"{logs.mean().exp():.4g} for all:"
        columns = [f"{name} {x}" for name in names for x in _numbered("o", values)]
        yield Table("what each key recalls at the end", ["key of token", *columns], rows)
    kinds = DeltaRule(16, 32), GQA(16, 2, 256)
    columns = ["delta rule, 32 heads", "GQA, 2 key heads of 256"]
    kept = [[n, *(kept_numbers(kind, 2048, n) for kind in kinds)] for n in (128, 4096, 131072)]
    yield Table("numbers kept by one layer, as in Qwen3-Next", ["tokens", *columns], kept)


@topic("regard/cache/paged.py::Paged", "regard/cache/blocks.py::BlockTable")
def paged_cache(
    tokens: Numbers = (40.0, 100.0, 70.0), page: int = 16, shared: int = 32, longest: int = 2048
) -> Tables:
    """How do many requests share the memory of one cache?

    place of token t of a row: slot t mod p of page table[t // p];   pages of a row: ceil(n / p)
    Memory is taken a page at a time, not for the longest text there may be; the full pages of a beginning that requests
    share (a system prompt: --shared tokens) are held once. This is paged attention, with a prefix cache."""
    sizes = [whole("tokens", n) for n in tokens]
    prefix = whole("shared", shared) // whole("page", page, 1, 4096)
    specs = [CacheSpec(token={"k": (1,)})]
    pool = Pool(specs, sum(-(-n // page) for n in sizes), page)
    rows: list[list[Any]] = []
    for i, n in enumerate(sizes, 1):
        # A prompt is not taken over whole: its last token must be read.
        cache, keys = Paged(specs, 1, pool=pool), range(min(prefix, (n - 1) // page))
        known = cache.adopt(0, keys)
        cache.begin(n - known)
        cache.publish(0, keys)
        table = " ".join(map(str, cache.tables[0]))
        rows.append([i, n, max(longest, n), table if len(table) < 40 else "...", known])
    columns = ["request", "tokens", "slots, contiguous", "its pages", "tokens found in them"]
    yield Table(f"pages of {page} slots", columns, rows, "bars tokens")
    used = sum(users > 0 for users in pool.users)
    reserved, found = (sum(row[at] for row in rows) for at in (2, 4))
    totals = [reserved, used * page, used * page - sum(sizes) + found]
    yield Table("slots", ["contiguous", "in pages", "of them empty"], [totals])


# --- positions and parts ------------------------------------------------------------------------


@topic(f"{POSITION}::sinusoid", f"{POSITION}::PositionVectors")
def sinusoidal(pos: Numbers = (0.0, 1.0, 2.0, 3.0), dim: int = 4, base: float = 10000.0) -> Tables:
    """How does a model that sees a set of tokens learn their order?

    PE(p, 2i) = sin(p w_i),   PE(p, 2i+1) = cos(p w_i),   w_i = base^(-2i/d)
    i counts PAIRS. Added once, before the first layer. PE(p + n) is a fixed rotation of PE(p)."""
    whole("dim", dim, 1, 16)
    table = sinusoid(real(pos), dim, positive("base", base))
    columns = ["position", *(f"{('sin', 'cos')[i % 2]} w_{i // 2}" for i in range(dim))]
    rows = [[p, *row.tolist()] for p, row in zip(pos, table)]
    yield Table("what is added", columns, rows, "lines", "added to the feature", "pos")


@topic(f"{POSITION}::rotate", f"{POSITION}::Rope")
def rope(x: Numbers, pos: Numbers, base: float = 10000.0) -> Tables:
    """How can a score know the distance of two tokens, and nothing else of their places?

    (a, b) -> (a cos pw - b sin pw, b cos pw + a sin pw) for each pair,   w_i = base^(-2i/d)
    Turning q by p and k by s leaves q.k as a function of p - s. Pairs: (i, i + d/2) half, (2i, 2i+1) interleaved."""
    positive("base", base)

    def turned(places: list[int], layout: str = "half") -> Tensor:
        angles = Rope(base, layout).angles(torch.tensor([places]), len(x), torch.float64)
        return rotate(real(x).expand(1, len(places), 1, -1), *angles, layout)[0, :, 0]

    speeds = Rope(base).frequencies(len(x), torch.float64)
    yield Table("speeds", [f"w_{i}" for i in range(len(speeds))], [speeds.tolist()])
    columns = ["position", *(f"x_{i}" for i in range(len(x)))]
    for layout in ("half", "interleaved"):
        vectors = turned([whole("pos", p, 0) for p in pos], layout).tolist()
        rows = [[p, *row] for p, row in zip(pos, vectors)]
        yield Table(f"turned, {layout}", columns, rows, "map", "feature")
    # x with itself, one key two places further.
    dots = [[p, p + 2, float(torch.dot(*turned([p, p + 2])))] for p in (0, 10, 1000)]
    yield Table("the score depends on the distance alone", ["query at", "key at", "q.k"], dots)


@topic(f"{POSITION}::alibi_slopes", f"{POSITION}::RelativeBias")
def alibi(pos: Numbers = (0.0, 1.0, 4.0, 16.0), heads: int = 8) -> Tables:
    """Can a score simply fall with distance?

    score_ij = q_i.k_j / sqrt(d) - slope_h |i - j|,   slope_h = 2^(-8h/n) for head h = 1 .. n
    Nothing is learned; each head looks a different way back. pos: distances."""
    slopes = alibi_slopes(whole("heads", heads, 1, 128)).double()
    rows = [[h + 1, float(s), *(-float(s) * abs(p) for p in pos)] for h, s in enumerate(slopes)]
    columns = ["head", "slope", *(f"at {p:g}" for p in pos)]
    yield Table("what is added to the scores", columns, rows, "rows at", "distance", "pos")


@topic(f"{POSITION}::t5_bucket", f"{POSITION}::T5Bias")
def t5_bias(pos: Numbers, buckets: int = 32) -> Tables:
    """How can distances share a few trained numbers?

    score_ij = q_i.k_j + table[bucket(j - i), head];   no 1/sqrt(d)
    Near distances have a bucket each, far ones share by logarithm. pos: key position - query position."""
    whole("buckets", buckets, 4, 1024)
    distance = torch.tensor([whole("pos", p, -(10**6)) for p in pos])
    both, causal = (t5_bucket(distance, T5Bias(1, buckets, causal=c)) for c in (False, True))
    columns = {"key - query": distance, "both ways": both, "causal": causal}
    yield Table.of("buckets", columns, "lines", "bucket", "pos")


@topic("regard/layers.py::RMSNorm", "regard/layers.py::Norm", "regard/block.py::Block")
def norms(x: Numbers = (1.0, 2.0, 3.0, 6.0), eps: float = 1e-5) -> Tables:
    """What do norms do to a token, and where do they stand?

    LayerNorm (x - mean) / sqrt(var + eps) * w + b,   RMSNorm x / sqrt(mean(x^2) + eps) * w
    pre: x + f(norm(x)), with one norm at the end;   post (2017): norm(x + f(x))
    Over the features of each token, with the biased variance. Here w = 1 and b = 0."""
    kinds = (Norm(positive("eps", eps), rms=r).make(len(x)) for r in (False, True))
    layer, rms = (norm.double()(real(x)).detach() for norm in kinds)
    rows = [*zip(x, layer.tolist(), rms.tolist())]
    # Without the last bits, which another machine may have otherwise.
    mean = ["mean", *(round(y.mean().item(), 12) for y in (layer, rms))]
    variance = ["variance", *(round(y.var(correction=0).item(), 12) for y in (layer, rms))]
    yield Table(
        "one token", ["x", "LayerNorm", "RMSNorm"], [*rows, mean, variance], "lines", "normed"
    )


@topic("regard/layers.py::Norm")
def batch_norm(x: Matrix, eps: float = 1e-5) -> Tables:
    """Why is each token normed, and not each feature over the batch?

    LayerNorm: mean and variance over the features of ONE token;   BatchNorm: of one feature over ALL tokens
    With BatchNorm a token depends on later ones, on other texts and on padding; alone it could not be normed.
    x: a row for each token."""
    if len(given := torch.atleast_2d(real(x))) < 2:
        raise UsageError("--x needs two tokens or more: rows are divided by semicolons")
    other = torch.cat([given[:-1], 10 * given[-1:]])
    layer = Norm(positive("eps", eps)).make(given.shape[1]).double()
    batch = nn.BatchNorm1d(given.shape[1], eps, affine=False).double()
    moved = []
    for norm, over in ((layer, "row"), (batch, "column")):
        y, moves = norm(given).detach(), (norm(other) - norm(given))[:1]
        name = type(norm).__name__.removesuffix("1d")
        yield grid(f"{name}: each {over} has mean 0", y, "token", "feature ", "map")
        moved.append([name, moves.abs().max().item()])
    title = "how far the first token moves when the last one is ten times as large"
    yield Table(title, ["norm", "largest change"], moved)


@topic("regard/layers.py::Add", "regard/layers.py::FeedForward")
def dropout(x: Numbers = (1.0, 2.0, -1.0, 0.5, 3.0, -2.0), p: float = 0.1) -> Tables:
    """Why are some activations dropped in training, and the others made larger?

    y_i = x_i m_i / (1 - p),   m_i = 0 with probability p, else 1;   E[y] = x,   Var[y] = x^2 p / (1 - p)
    p is the share that is DROPPED, as in torch; texts also write p for the share that is kept.
    It falls on what attention and feed-forward add, on embeddings, on attention weights; never in evaluation."""
    if not 0 <= p < 1:
        raise UsageError(f"--p is {p:g}; give the share to drop, from 0 to below 1")
    kept, variance = real(x) / (1 - p), real(x).square() * p / (1 - p)
    rows = [[v, a, 0.0, (1 - p) * a, b, v] for v, a, b in zip(x, kept.tolist(), variance.tolist())]
    columns = ["x", "kept", "dropped", "mean", "variance", "in evaluation"]
    yield Table(f"p = {p:g}", columns, rows, "lines", "y", "x")


@topic("regard/layers.py::FeedForward", "regard/layers.py::MLP")
def feed_forward(x: Numbers, dim: int = 512, width: int = 2048) -> Tables:
    """What happens to a token between two attentions?

    FFN(x) = W_2 act(W_1 x + b_1) + b_2;   gated: W_2 (act(W_g x) * W_1 x)
    The same for every position; wider inside (width f), and no token sees another.
    Dropout falls on what W_2 makes (tower.dropout: GPT-2, BERT), in T5 and many blocks written from scratch also on
    act(...), before W_2 (ffn.dropout): build("gpt2", dropout=0.1, **{"ffn.dropout": 0.1}) has both."""
    curves = {name: act(real(x)) for name, act in ACTIVATIONS.items() if name != "tanh"}
    sizes = []
    for kind, gated in (("plain", False), ("gated", True)):
        layer = MLP(whole("width", width), gated=gated, bias=False)
        count = parameters(weightless(layer, dim))
        sizes.append([kind, count, 2 * count])
    yield Table.of("activations", {"x": x, **curves}, "lines", "act(x)", "x")
    yield Table(f"m = {dim}, f = {width}", ["kind", "weights", "FLOP a token"], sizes)


@topic("regard/moe.py::MixtureOfExperts.route", "regard/moe.py::balance_loss")
def mixture_of_experts(x: Numbers, active: int = 2, dim: int = 4096, width: int = 14336) -> Tables:
    """How can a model have many weights and use few of them for a token?

    y = sum over the k best experts e of g_e E_e(x),   g = softmax(W_r x) at these, divided by their sum
    Each expert is a gated feed-forward. A loss, or a bias on the choice, keeps all experts in use.
    x: the router's logits of one token, one for each expert. As in Mixtral unless you say otherwise."""
    logits, k = real(x), whole("active", active, 1, len(x))
    layer = MoE(len(x), k, 1).make(len(x)).double().eval()
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(len(x)))
        (chosen,), (gains,) = layer.route(logits[None])
    used = torch.zeros_like(logits).scatter(0, chosen, gains)
    one = {"expert": range(len(x)), "logit": x, "softmax": softmax(logits), "weight": used}
    yield Table.of("one token", one, "bars")
    layer = weightless(MoE(len(x), k, whole("width", width)), whole("dim", dim))
    expert = sum(w[0].numel() for w in (layer.gate, layer.up, layer.down))
    sizes = [[len(x), k, expert, (every := parameters(layer)), every - (len(x) - k) * expert]]
    columns = ["experts", "active", "weights of an expert", "of the layer", "used by a token"]
    yield Table(f"m = {dim}, f = {width}", columns, sizes)


@topic("regard/models/embedding.py::PatchEmbedding", "regard/models/embedding.py::Patches")
def vit(patch: Numbers = (8.0, 14.0, 16.0, 32.0), size: int = 224, dim: int = 768) -> Tables:
    """How does an image become a sentence?

    x_i = W patch_i + b + position_i,   i = 1 .. (size / patch)^2;   class token in front
    Then the encoder of any text model, with nothing masked."""
    rows = []
    for side in (whole("patch", p) for p in patch):
        config = Patches(size, side)
        n = config.count + config.extra
        # Map, bias, places, extra tokens.
        weights = dim * (config.channels * side**2 + 1 + n + config.extra)
        rows.append([side, config.count, n, weights, n * n])
    columns = ["patch", "patches", "tokens", "weights", "pairs a head"]
    yield Table(f"images of {size} x {size}", columns, rows, "bars tokens")


@topic("regard/models/recurrent.py::elman", "regard/models/recurrent.py::Cell")
def rnn_path(x: Numbers, steps: Numbers) -> Tables:
    """What does a recurrent network still know of a word t steps back?

    h_t = tanh(W x_t + U h_{t-1});   d h_t / d h_0 = prod of diag(tanh') U  ~  lambda^t
    Attention reaches every token in one step. x: lambda, the factor of one step; by autograd through the cell at 0.
    h, h': new cells of width 32 after texts that differ in their first word alone; 0 is below 1e-12."""
    cell, zero = CELLS["elman"], real((0.0,))
    rows = []
    for n in (whole("steps", t, 1, 1000) for t in steps):
        slopes = []
        for factor in x:
            start = zero.clone()[None].requires_grad_()
            state: tuple = (start,)
            for _ in range(n):
                state = cell.gates(zero[None], factor * state[0], state)
            (slope,) = torch.autograd.grad(state[0].sum(), start)
            slopes.append(slope.item())
        rows.append([n, *slopes])
    yield Table(
        "d h_t / d h_0", ["steps", *(f"lambda {v:g}" for v in x)], rows, "log", "slope", "steps"
    )
    paths = [[row[0], row[0], 1] for row in rows]
    yield Table("steps on the path", ["steps", "RNN", "attention"], paths, "log", "path", "steps")
    length, apart = max(int(row[0]) for row in rows), []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = torch.randn(1, length + 1, 32, dtype=torch.float64).repeat(2, 1, 1)
        tokens[1, 0] = torch.randn(32, dtype=torch.float64)
        for name in CELLS:
            network = Recurrence(name, 32, 32, 1, 0.0).double()
            h = network(tokens, network.start(tokens))[0].detach()
            distance = (h[0] - h[1]).norm(dim=-1)
            apart.append(torch.where(distance > 1e-12, distance / distance[0], 0.0))
    rows = [[row[0], *(float(d[int(row[0])]) for d in apart)] for row in rows]
    yield Table(
        "|h_t - h'_t| / |h_0 - h'_0|", ["steps", *CELLS], rows, "log", "share left", "steps"
    )


@topic(f"{NUMBERS}::multiply_adds", "regard/models/recurrent.py::elman")
def cost(tokens: Numbers = (64.0, 512.0, 1024.0, 8192.0), dim: int = 512) -> Tables:
    """What does a layer of attention cost against a recurrent one?

    attention: 4 n m^2 for projections and 2 n^2 m for scores and sums;   RNN: 2 n m^2;   GRU: 6 n m^2
    The recurrence is not dearer, but its n steps wait for one another; attention's path is one step long."""
    rows = []
    for n in (whole("tokens", value) for value in tokens):
        projections, pairs = multiply_adds(GQA(1), dim, n)
        rows.append([n, projections, pairs, 2 * n * dim**2, 6 * n * dim**2])
    columns = ["n", "projections", "scores and sums", "RNN", "GRU"]
    yield Table(
        f"multiply-adds of one layer of width {dim}",
        columns,
        rows,
        "log",
        "multiply-adds",
        "tokens",
    )
    steps = [[row[0], row[0], 1] for row in rows]
    yield Table(
        "steps that wait for one another",
        ["n", "RNN, GRU", "attention"],
        steps,
        "log",
        "steps",
        "tokens",
    )


@topic("regard/models/adapt.py::LowRank", "regard/models/adapt.py::LoRA")
def lora(rank: Numbers = (1.0, 4.0, 8.0, 64.0), dim: int = 768, alpha: float = 16.0) -> Tables:
    """How can a model be fine-tuned with a hundredth of its weights?

    y = W x + (alpha / r) B A x,   A (r, in) random, B (out, r) = 0 at first
    W stays as it is. Merged, W + (alpha / r) B A costs nothing more to run."""
    rows = []
    positive("alpha", alpha)
    for r in (whole("rank", value) for value in rank):
        config = LoRA(r, alpha)
        with torch.device("meta"):
            layer = LowRank(nn.Linear(dim, dim, bias=False), config)
        full, low = dim * dim, layer.a.numel() + layer.b.numel()
        rows.append([r, full, low, f"{100 * low / full:.2f} %", config.scale])
    columns = ["rank", "weights of W", "of A and B", "share", "alpha / r"]
    yield Table(f"one square layer of width {dim}", columns, rows, "bars of A and B")


@topic("regard/kernels/linear.py::Int8", "regard/kernels/linear.py::Int4")
def quantisation(x: Numbers = (0.02, -0.75, 0.31, 1.4, -0.9, 0.004)) -> Tables:
    """What is lost when weights are held in 8 or 4 bits?

    int8: H w ~ q s, s = max|H w| / 127 of 64 inputs, H orthogonal
    int4: w ~ (q - 8) s + z, s = (max - min) / 15 of 32 inputs, or of the best part of their range
    fp8 (e4m3): w ~ q s, s = max|w| / 448, three bits after the point. Shown: what comes back."""
    row = torch.tensor(x)[None]
    # The last weight again, which changes no range.
    wide = F.pad(row, (0, -len(x) % GROUP), value=float(row[0, -1]))
    eight = pack(row, None, "int8")(torch.eye(len(x)))[:, 0]
    four = Int4(wide, None).dense()[: len(x), 0].float()
    q, scale = to_fp8(row)
    eighth = (q.float() * scale)[0]
    rows = [*zip(x, eight.tolist(), four.tolist(), eighth.tolist())]
    worst = ["worst error", *(float((row[0] - y).abs().max()) for y in (eight, four, eighth))]
    bits = ["bits a weight", f"{8 + 16 / TILE:g}", f"{4 + 32 / GROUP:g}", "8"]
    yield Table(
        "one output's weights",
        ["w", "int8", "int4", "fp8"],
        [*rows, worst, bits],
        "lines",
        "what comes back",
    )


# --- training and decoding ------------------------------------------------------------------------


@topic(f"{FILTERS}::top_p", f"{FILTERS}::top_k", f"{FILTERS}::min_p")
def decoding(x: Numbers, topk: int = 3, p: float = 0.7, temperature: float = 0.7) -> Tables:
    """How is the next token chosen?

    greedy: argmax_v x_v;   drawn: v ~ softmax(x / T) after a filter
    top-k: the k largest;   top-p: the fewest whose mass is >= p, one at least;   min-p: p times the largest
    What is left is renormalised. x: logits of the next token."""
    logits = real(x)
    if not 0 <= p <= 1:
        raise UsageError(f"--p is {p:g}; give a probability from 0 to 1")
    ways = {
        "softmax": logits,
        f"T = {temperature:g}": logits / positive("temperature", temperature),
        f"top-k {topk}": top_k(logits, topk),
        f"top-p {p:g}": top_p(logits, p),
        "min-p 0.1": min_p(logits, 0.1),
    }
    columns: dict[str, Any] = {"token": range(len(x)), "logit": x}
    columns |= {name: way.softmax(-1) for name, way in ways.items()}
    yield Table.of("probabilities", columns, "lines softmax", "probability")


@topic(f"{SAMPLING}::beam_search", "regard/decode/beam.py::advance")
def beam(w: Numbers, x: Numbers, beams: int = 2) -> Tables:
    """What does greedy decoding miss?

    keep the `beams` prefixes with the largest sum_t log p(y_t | y_<t); at the end divide by length^penalty
    w: probabilities of the first token; x: of the second, one row for each first."""
    first, second = real(w), rows_of("x", x, count=len(w))
    size = max(first.numel(), second.shape[1])
    if bool((first <= 0).any() | (second <= 0).any()):
        raise UsageError("--w and --x are probabilities; give numbers above 0")

    def step(prefix: tuple[int, ...]) -> Tensor:
        row = second[prefix[0]] if prefix else first
        return torch.cat([(row / row.sum()).log(), row.new_full((size - len(row),), -torch.inf)])

    rows = []
    for width in sorted({1, whole("beams", beams, 1, 100)}):
        for rank, (ids, total) in enumerate(beam_search(step, width, 2)):
            text = " ".join(map(str, ids))
            rows.append([width, rank + 1, text, total, math.exp(total)])
    yield Table("what is found", ["beams", "rank", "tokens", "log p", "p"], rows, "bars")


@topic("regard/decode/speculate.py::Index", "regard/decode/speculate.py::Draft")
def speculation(
    x: Numbers = (0.5, 0.7, 0.8, 0.9), guesses: int = 4, text: str = "a b c d e a b c d e a b c d f"
) -> Tables:
    """How can one pass of a model write several tokens?

    guess k tokens, read them all in one pass, keep those up to the first that is wrong, and the model's own there
    E[tokens a pass] = 1 + p + ... + p^k = (1 - p^(k+1)) / (1 - p),   p: share of guesses that are right
    The text does not change, only the number of passes. Guesses come from a small draft model, or are looked up in the
    text so far (Index), as below with its words as tokens. x: p."""
    k = whole("guesses", guesses, 1, 64)
    if not all(0 <= p <= 1 for p in x):
        raise UsageError("--x are shares of guesses that are right: numbers from 0 to 1")
    gains = [[p, sum(p**i for i in range(k + 1))] for p in x]
    yield Table(f"{k} guesses a pass", ["right", "tokens a pass"], gains, "lines", "", "x")
    names = dict.fromkeys(text.split())
    ids, words = [list(names).index(word) for word in text.split()], list(names)
    rows: list[list[Any]] = []
    index, at = Index(ids[:1]), 1
    while at < len(ids):
        said = index.after(k)
        right = next((i for i, g in enumerate(said) if ids[at + i : at + i + 1] != [g]), len(said))
        new = ids[at : at + right + 1]
        row = (" ".join(words[i] for i in part) for part in (said, new))
        rows.append([len(rows) + 1, *row, right])
        index.extend(new)
        at += len(new)
    title = f"{len(ids) - 1} tokens in {len(rows)} passes"
    yield Table(title, ["pass", "guessed", "written", "right"], rows)


@topic("regard/models/mtp.py::MTPLayers", "regard/training/objectives.py::further_loss")
def multi_token_prediction(
    text: str = "a b c d e a b c d e a b c d e", depth: int = 2, steps: int = 60
) -> Tables:
    """How does a model predict more than the next token?

    h_0(t): the tower's state, which predicts x_(t+1);   e: the model's own embedding, head: its own head
    h_(k+1)(t) = norm(block_k(W_k [norm(e(x_(t+1+k))); norm(h_k(t))]))   predicts x_(t+2+k)
    loss = L(next token) + 0.3 mean_k L_k,   and in decoding the layers guess what the tower checks in one pass
    A small model learns the text, its words as tokens, in `steps` steps."""
    whole("depth", depth, 1, 8)
    whole("steps", steps, 0, 500)
    words = list(dict.fromkeys(text.split()))
    ids = torch.tensor([[words.index(word) for word in text.split()]])
    if ids.shape[1] < depth + 3:
        raise UsageError(f"--text has {ids.shape[1]} words; {depth} layers need {depth + 3}")
    torch.manual_seed(0)
    tower = Tower(16, 1, GQA(2, rope=Rope()), MLP(32))
    config = TransformerConfig(Tokens(len(words)), tower, LM(), mtp=MTP(depth))
    # In float64 its losses are the same on every CPU, but for digits that nobody sees.
    model, batch = config.make().double(), Batch(ids[:, :-1], ids[:, 1:].clone())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    rows: list[list[Any]] = []
    tally = Tally()
    for step in range(steps + 1):
        total, count = causal(model.train(), batch, tally=tally)
        further = tally.means()["mtp_loss"]
        if step % max(1, steps // 6) == 0:
            rows.append([step, (causal(model.eval(), batch)[0] / count).item(), further])
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    yield Table(
        "while it learns", ["step", "next token", "MTP layers"], rows, "lines", "loss a token"
    )
    with torch.no_grad():
        states = [model.hidden(batch.ids)]
        for k in range(depth):
            told = F.pad(ids[:, 1 + k :], (0, k))
            pos = Span.run(0, told.shape[1], ids.device)
            states.append(model.further(states[-1], told, pos, k))
        said = [model.logits(h)[0].argmax(-1).tolist() for h in states]
    seen = ids.shape[1] - 1 - depth
    columns = ["token", "the tower", *(f"layer {k}" for k in range(depth))]
    table = [[words[i] for i in (ids[0, t], *(each[t] for each in said))] for t in range(seen)]
    yield Table("what each predicts from there", columns, table)


@topic("regard/data/train_tokenizer.py::train_tokenizer", "regard/text/tokenizer.py::Tokenizer")
def tokenizers(
    text: str = "low lower lowest new newer newest wide wider widest", vocab: int = 24
) -> Tables:
    """How does a text become numbers?

    BPE: begin with bytes, join the most frequent pair, again and again;   WordPiece: so with characters, ## inside a
    word, and the longest piece first;   unigram: the pieces whose product of probabilities is largest (Viterbi)
    Learned here from the text itself; vocab: pieces beside the bytes of BPE. Characters and bytes make longer rows."""
    rows = []
    for kind in TOKENIZERS:
        least = 258 if kind == "bpe" else 0
        recipe = Recipe(kind, whole("vocab", vocab, 4, 10000) + least)
        coder = at_hand(Tokenizer.from_files(train_tokenizer([text] * 4, recipe)))
        ids = coder.encode(text, special=False)
        rows.append([kind, coder.vocab, len(ids), " ".join(coder.pieces(ids[:12]))])
    columns = ["kind", "vocabulary", "tokens", "the first pieces"]
    yield Table("one text", columns, rows, "bars tokens")


@topic(f"{LOSSES}::smooth", f"{LOSSES}::Smoothing")
def label_smoothing(x: Numbers, label: int = 2, eps: float = 0.1) -> Tables:
    """Why not ask for the right word with certainty?

    loss = - sum_v q_v log softmax(x)_v;   V-1: q = 1 - eps, the others eps / (V-1)
    V: q = 1 - eps + eps / V, the others eps / V (torch);   V-2: as V-1, and nothing on padding
    A logit need no longer grow without end. x: logits; label: counted from 0."""
    if len(x) < 3:
        raise UsageError("--x needs three logits or more: one word, another and padding")
    given, target = real(x)[None], torch.tensor([whole("label", label, 0, len(x) - 1)])
    columns, ends = {}, ["loss", ""]
    ways = [("one-hot", 0.0, "V"), *((f"over {o}", eps, o) for o in losses.SMOOTHINGS)]
    for name, share, over in ways:
        padding = (0 if label else len(x) - 1) if over == "V-2" else None
        columns[f"q {name}"] = losses.smooth(target, len(x), share, over, padding)[0].tolist()
        total = losses.smoothed_loss(given, target, share, over, padding)[0]
        ends.append(f"{total.item():.4f}")
    rows = [*zip(range(len(x)), x, *columns.values()), ends]
    yield Table(
        f"eps = {eps:g}, label {label}", ["word", "logit", *columns], rows, "map q", "target q"
    )


@topic("regard/training/optim.py::Schedule", "regard/training/optim.py::noam")
def schedules(steps: Numbers, dim: int = 512, warmup: int = 4000) -> Tables:
    """How large should a step be, and when?

    2017: lr = dim^-0.5 min(step^-0.5, step warmup^-1.5), largest at warmup; steps count from 1
    cosine: (1 + cos(pi share)) / 2;   linear: 1 - share;   wsd: 1, then down at the end. All after a warm-up."""
    at = [whole("steps", step) for step in steps]
    last = max(*at, warmup + 2)
    decay = {"wsd": (last - warmup) // 2}
    plans = [Schedule(shape, last, warmup, decay=decay.get(shape, 0)) for shape in SHAPES]
    rows = [[step, noam(step, dim, warmup), *(plan(step) for plan in plans)] for step in at]
    columns = ["step", "lr of 2017", *(f"{shape} / peak" for shape in SHAPES)]
    title = f"warm-up {warmup:,}, end at {last:,}"
    yield Table(title, columns, rows, f"lines {columns[2]}", "lr / peak", "steps")


@topic("regard/training/optim.py::clip")
def clipping(x: Numbers = (3.0, 4.0, -12.0), size: float = 1.0) -> Tables:
    """What keeps one bad batch from throwing a model off?

    g <- g min(1, c / (|g| + 1e-6)),   |g| the length of ALL gradients taken as one vector
    The direction stays. It is against exploding gradients; against vanishing ones it does nothing. size: c."""
    weight = nn.Parameter(real(x))
    weight.grad = real(x)
    length = clip([weight], positive("size", size))
    title = f"length {float(length):.4g} before, {float(weight.grad.norm()):.4g} after"
    yield Table.of(title, {"g": x, "clipped": weight.grad}, "lines")


@topic("regard/training/measure.py::text_scores")
def bleu(text: str = "the cat sat on a mat", reference: str = "the cat sat on the mat") -> Tables:
    """How near is a translation to a human one?

    BLEU = 100 BP exp(1/4 sum_n log p_n),   p_n: share of n-grams that the reference has
    BP = min(1, e^(1 - r/c)): too short a text c pays. A figure of a whole corpus; of one sentence it is rough."""
    names = ("bleu", "bleu_lc", "chrf", "exact")
    values, _ = text_scores(names, [text], [reference])
    metric = needed("sacrebleu.metrics", "BLEU", "sacrebleu").BLEU(force=True)
    score = metric.corpus_score([text], [[reference]])
    rows = [[n + 1, score.counts[n], score.totals[n], p] for n, p in enumerate(score.precisions)]
    figures: list[list[Any]] = [[name, float(values[name])] for name in names]
    yield Table(f"n-grams, BP = {score.bp:.4f}", ["n", "right", "of", "percent"], rows, "bars")
    yield Table("figures", ["name", "value"], figures)


@topic(f"{LOSSES}::teacher_forcing", f"{LOSSES}::causal_lm_loss")
def objectives(x: Numbers = (1.0, 5.0, 3.0, 4.0, 2.0)) -> Tables:
    """What does a model learn from a text?

    causal: - sum_t log p(y_{t+1} | y_<=t);   masked: - sum over selected t of log p(y_t | the rest)
    seq2seq: - sum_t log p(y_t | source, y_<t), all t at once: the decoder reads the TRUE words, shifted by one
    x: ids of a target, start and end included. A loss is a sum and a count."""
    ids = torch.tensor([[whole("x", i, 0, 9999) for i in x]])
    if ids.shape[1] < 2:
        raise UsageError("--x needs two ids or more: one to read and one to say")
    reads, says = losses.teacher_forcing(ids)
    places = {"place": range(reads.shape[1]), "reads": reads[0], "must say": says[0]}
    vocab = int(ids.max()) + 1
    logits = torch.zeros(1, ids.shape[1], vocab, dtype=torch.float64)
    hidden = torch.where(torch.arange(ids.shape[1]) % 3 == 1, ids, -100)
    kinds = {
        "causal": losses.causal_lm_loss(logits, ids),
        "masked, every third": losses.masked_lm_loss(logits, hidden),
    }
    rows = [
        [name, float(total), int(count), float(total) / max(int(count), 1)]
        for name, (total, count) in kinds.items()
    ]
    title = f"of a model that knows nothing: log {vocab} each"
    half = Prefix(torch.tensor([len(x) // 2]))
    yield Table.of("teacher forcing", places)
    rules = {"causal (GPT)": Causal(), "masked (BERT)": Full(), "prefix": half}
    yield sight(rules, min(len(x), 20))
    yield Table(title, ["objective", "sum", "count", "mean"], rows)


class Count:
    """Rows that count up; batch k is a function of k."""

    fingerprint, epoch, vocab = "count", 10, 11

    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch:
        ids = (torch.arange(9) + torch.arange(k, k + 6)[:, None]) % self.vocab
        return Batch(ids[:, :-1], ids[:, 1:])

    def evaluation(self) -> Iterator[Batch]:
        return iter([self.batch(10**6)])

    def describe(self) -> str:
        return "counting"


@topic("regard/training/scheduled.py::ScheduledSampling", "regard/training/scheduled.py::inputs")
def exposure_bias(
    x: Numbers = (0.02, 0.3), steps: Numbers = (1.0, 50.0, 100.0), share: float = 0.25
) -> Tables:
    """What goes wrong when a model that has only read true words reads its own?

    teacher forcing: p(y_t | true y_<t);   in use: p(y_t | its own y_<t)     w_t = e + (f - e) w_{t-1},  w_0 = 0
    Exposure bias: after a wrong word it is in texts that training never showed, and errs more often. w_t: chance that
    word t is wrong. Scheduled sampling: in training a share of the inputs are the model's own draws, but not the first.
    x: e, chance of a wrong word after a right one; f, after a wrong one. steps: of training."""
    if len(x) != 2 or not all(0 <= chance <= 1 for chance in x):
        raise UsageError(
            "--x are two chances of a wrong word: after a right one, after a wrong one"
        )
    e, f = x
    rows: list[list[Any]] = []
    wrong, words = 0.0, [1, 2, 5, 10, 20, 50]
    for t in range(1, max(words) + 1):
        wrong = e + (f - e) * wrong
        if t in words:
            rows.append([t, e, wrong, (1 - e) ** t])
    columns = ["word", "after true words", "after its own", "all right so far"]
    yield Table("chance that a word is wrong", columns, rows, "lines", "chance")
    if not 0 <= share <= 1:
        raise UsageError(f"--share is {share:g}; give a share from 0 to 1")
    at = [whole("steps", step) for step in steps]
    how = ScheduledSampling(share, max(at) if share else 0)
    marked = Sampled(Count(), how, seed=0)
    rows = []
    for k in at:
        own = cast(Tensor, marked.batch(k - 1).own)
        marks = " ".join(".o"[int(mark)] for mark in own[0])
        rows.append([k, how.at(k), marks, int(own.sum()), own.numel()])
    columns = ["step", "share", "inputs of a row, o: its own", "own in the batch", "of"]
    yield Table(f"scheduled sampling, the share rises for {how.warmup} steps", columns, rows)


@topic("regard/training/objectives.py::classify", f"{LOSSES}::masked_lm_loss")
def next_sentence_prediction(
    x: Matrix = ((2.0, -1.0), (-1.0, 2.0), (0.5, 0.0), (1.0, 0.5)),
    text: str = "a cat sat on the mat. the cat left its mat; rain fell all day. then the rain froze",
) -> Tables:
    """What did BERT learn from two sentences, and why was it dropped?

    [CLS] A [SEP] B [SEP],   loss = - log softmax(W h_CLS)_label;   label 0: B follows A, 1: B is from another text
    Half of each. The words that A and B share often tell them apart, without reading on: RoBERTa left this loss out
    and lost nothing (Liu et al. 2019), ALBERT asks for the order of two neighbours. Here it is a task like any other on
    pairs of texts: classify. text: sentences end with a dot, texts with a semicolon; x: two logits for each pair."""
    parts = [[part.split() for part in each.split(".") if part.strip()] for each in text.split(";")]
    pairs = []
    for at, sentences in enumerate(parts):
        for first, second in pairwise(sentences):
            pairs += [(first, second, 0), (first, parts[at - 1][-1], 1)]
    logits = rows_of("x", x, width=2)
    if len(parts) < 2 or not all(parts) or len(pairs) != len(logits):
        raise UsageError(f"--text gives {len(pairs)} pairs of two texts or more, --x {len(logits)}")
    rows, total = [], 0.0
    for (first, second, label), row in zip(pairs, logits):
        loss = losses.masked_lm_loss(row[None], torch.tensor([label]))[0].item()
        total += loss
        types = f"{len(first) + 2} x 0, {len(second) + 1} x 1"
        shared = len({*first} & {*second})
        rows.append([" ".join(first), " ".join(second), shared, types, label, loss])
    columns = ["A", "B", "words in common", "token types", "label", "loss"]
    mean = f"mean loss {total / len(rows):.4f}; log 2 = {math.log(2):.4f} for who knows nothing"
    yield Table(mean, columns, rows, "bars")


@topic(
    "regard/evaluation/run.py::Shots.prompt",
    "regard/training/objectives.py::Prefer",
    "regard/training/objectives.py::prefer",
)
def prompting(
    x: Numbers = (-12.0, -14.0, -11.0, -10.0),
    beta: float = 0.1,
    shots: int = 2,
    text: str = "sea = mer; tree = arbre; water = eau; house = maison",
) -> Tables:
    """How is a language model asked for something, and how does it learn to answer?

    zero-shot: p(answer | question);   few-shot: p(answer | examples, question), in-context, and no weight moves
    instruction tuning: - sum over the answer alone of log p(y_t | question, y_<t)
    DPO: - log sigmoid(r_chosen - r_rejected),   r = beta (log p(answer) - log p_reference(answer))
    The first two are regard eval --shots N, the others regard finetune, on chats and on preferences.
    text: pairs, the last one asks; x: log p and log p_reference of the chosen answer, then of the rejected one."""
    pool = [tuple(map(str.strip, pair.split("=", 1))) for pair in text.split(";") if "=" in pair]
    if len(x) != 4 or len(pool) <= shots:
        wanted = f"--text needs {shots + 1} pairs such as sea = mer; or more, --x four numbers"
        raise UsageError(f"{wanted}, not {len(pool)} and {len(x)}")
    *examples, asked = ((source, target) for source, target in pool)
    rows: list[list[Any]] = []
    for count in range(whole("shots", shots, 0, 20) + 1):
        prompt = Shots(count, "{source} = {target}; ").prompt(examples, 0, asked)
        name = {0: "zero-shot", 1: "one-shot"}.get(count, "few-shot")
        rows.append([name, prompt, asked[1], len(prompt.split())])
    yield Table("prompts, as eval --shots writes them", ["", "prompt", "answer", "words"], rows)
    words = [*prompt.split(), *asked[1].split()]
    at = torch.arange(len(words))
    labels = torch.where(at < len(prompt.split()), losses.IGNORE, at)
    logits = torch.zeros(len(words), len(words), dtype=torch.float64)
    kinds = {"every word": at, "the answer alone": labels}
    found = {name: losses.masked_lm_loss(logits, each) for name, each in kinds.items()}
    rows = [[name, int(count), float(total)] for name, (total, count) in found.items()]
    title = (
        f"instruction data: what is counted, by a model that knows nothing of {len(words)} words"
    )
    yield Table(title, ["loss over", "words", "sum"], rows, "bars")
    chosen, rejected = (positive("beta", beta) * (a - b) for a, b in (x[:2], x[2:]))
    margin = real((chosen - rejected, 0.0))
    rows = [
        [name, float(-F.logsigmoid(m)), float(torch.sigmoid(-m)) * beta]
        for name, m in zip(("given", "at the start: both as the reference"), margin)
    ]
    rewards = f"rewards {chosen:.4f} and {rejected:.4f}, margin {chosen - rejected:.4f}"
    columns = ["DPO", "loss", "pull on log p"]
    yield Table(rewards, columns, rows, "bars loss")


@topic("regard/training/trainer.py::Trainer.resume", "regard/training/trainer.py::Trainer")
def resume(steps: int = 6) -> Tables:
    """Does a run that was stopped come to the same bits?

    batch = f(seed, k),   random numbers = f(seed, k),   lr = f(k);   state = weights, moments, k
    A checkpoint holds the state; all else is a function of the step. Here a small model is trained twice."""
    half = whole("steps", steps, 2, 100) // 2
    with tempfile.TemporaryDirectory(prefix="regard-") as home:
        straight, end = _trained(Path(home, "one"), steps, steps)
        begun, _ = _trained(Path(home, "two"), steps, half)
        resumed, other = _trained(Path(home, "two"), steps, steps)
    equal = end.keys() == other.keys() and all(torch.equal(x, other[n]) for n, x in end.items())
    pairs = enumerate(zip(straight, begun + resumed, strict=True), 1)
    rows = [[k, round(a, 2), round(b, 2), "yes" if a == b else "no"] for k, (a, b) in pairs]
    columns = ["step", "loss, straight", f"loss, stopped after {half}", "equal"]
    result = "equal to the bit" if equal else "different"
    yield Table(f"weights and moments at the end: {result}", columns, rows, "lines", "loss")


def _trained(folder: Path, steps: int, stop: int) -> tuple[list[float], dict[str, Tensor]]:
    """A small model trained up to step `stop`, from its last checkpoint if it has one: the losses,
    and the state at the end."""
    torch.manual_seed(0)
    tower = Tower(16, 1, GQA(2, dropout=0.1), MLP(32), dropout=0.1)
    model = TransformerConfig(Tokens(Count.vocab), tower, LM(), max_len=16).make()
    events: list[dict[str, Any]] = []
    checkpoints = Checkpoints(folder, lambda m, path: m.save(path))
    plan = Train(steps, optim=Optim(lr=1e-2))
    trainer = Trainer(model, Count(), causal, plan, checkpoints, load, [events.append])
    trainer.resume()
    with warnings.catch_warnings():
        # The format of a checkpoint that nobody sees.
        warnings.simplefilter("ignore", Notice)
        trainer.run(lambda: trainer.at.step >= stop)
    values = [event["loss"] for event in events if event["kind"] == "step"]
    return values, {**trainer.model.state_dict(), **trainer.optimizer.state()}


# --- worked numbers, step by step -----------------------------------------------------------------


@topic(f"{HEADS}::GroupedQueryAttention", "regard/mask.py::Causal")
def worked_masked(x: Matrix, wq: Matrix, wk: Matrix, wv: Matrix) -> Tables:
    """What does the look-ahead mask do to one head over four tokens, in numbers?

    Q = X W_Q^T,   K = X W_K^T,   V = X W_V^T;   weights = softmax(Q K^T / sqrt(d) + mask), mask 0 or -inf
    The first token sees itself alone, so its output is its own value. Weights are stored (out, in)."""
    q, k, v = times(torch.atleast_2d(real(x)), wq=wq, wk=wk, wv=wv)
    for name, each in {"Q": q, "K": k, "V": v}.items():
        yield grid(name, each, "token", f"{name.lower()}_")
    yield from steps_of(q, k, v, Causal())


@topic(f"{HEADS}::GroupedQueryAttention.entries", "regard/block.py::Block")
def worked_cross(
    x: Matrix, k: Matrix, v: Matrix, wq: Matrix, wk: Matrix, wv: Matrix, head: Matrix, wo: Matrix
) -> Tables:
    """How does a decoder with its own W's read an encoder, in numbers?

    Q = X W_Q^T from the decoder,   K = M W_K^T and V = M' W_V^T from the encoder;   output [head_1 head_2] W_O^T
    x: decoder states; k, v: what keys and values are made from (in a model the same states); head: the second
    head, as given. Weights are stored (out, in)."""
    states = torch.atleast_2d(real(x))
    source = rows_of("k", k, width=states.shape[1])
    q, keys = times(states, wq=wq)[0], times(source, wk=wk)[0]
    values = times(like("v", v, source), wv=wv)[0]
    yield grid("Q, from the decoder", q, "target", "q_")
    yield grid("K, from the encoder", keys, "source", "k_")
    yield grid("V, from the encoder", values, "source", "v_")
    yield from (found := list(steps_of(q, keys, values)))
    first = real(tuple(tuple(row[1:]) for row in found[-1].rows))
    joined = torch.cat([first, like("head", head, first)], -1)
    yield grid("heads joined", joined, "target", "")
    yield grid("projected by W_O", times(joined, wo=wo)[0], "target")


@topic("regard/layers.py::FeedForward")
def worked_feed_forward(x: Matrix, w1: Matrix, b1: Numbers, w2: Matrix, b2: Numbers) -> Tables:
    """What does a feed-forward do to two tokens, in numbers?

    h = x W_1^T + b_1;   r = max(0, h);   output = r W_2^T + b_2
    Each token on its own. Weights are stored (out, in). In a model W_2 leads back to the width of x."""
    h = times(torch.atleast_2d(real(x)), w1=w1)[0]
    h = h + like("b1", b1, h[:1])
    r = ACTIVATIONS["relu"](h)
    out = times(r, w2=w2)[0]
    yield grid("h, before the ReLU", h, "token", "h_", "map")
    yield grid("r, after it", r, "token", "r_", "map")
    yield grid("output", out + like("b2", b2, out[:1]), "token", "o_", "map")


@topic(f"{POSITION}::sinusoid", f"{POSITION}::PositionVectors")
def worked_embedding(x: Matrix, base: float = 10000.0) -> Tables:
    """What enters the first layer: embeddings and positions, in numbers?

    x_p = embedding_p + PE(p);   in the paper of 2017 sqrt(d) embedding_p + PE(p)
    x: one embedding for each token. Each pair of features has its own speed: only the first turns at 1."""
    given = torch.atleast_2d(real(x))
    root, places = given.shape[1] ** 0.5, torch.arange(len(given)).double()
    added = sinusoid(places, given.shape[1], positive("base", base))
    yield grid("positions PE", added, "token", "feature ", "map")
    yield grid("embedding + PE", given + added, "token", "feature ", "map")
    yield grid(f"{root:.4g} embedding + PE", root * given + added, "token", "feature ")


@topic(f"{SAMPLING}::greedy", f"{SAMPLING}::beam_search")
def worked_greedy(x: Matrix, text: str = "the cat sat on <END>") -> Tables:
    """How does greedy decoding write a text of five steps, in numbers?

    y_t = argmax over v of p(v | y_<t);   p(text) = product of p(y_t | y_<t);   one pass of the model a token
    x: one row of probabilities a step, each divided by its sum; text: the vocabulary, whose last word ends."""
    words = text.split() or ["<END>"]
    given = rows_of("x", x, width=len(words))
    if bool((given < 0).any()) or not bool((given.sum(-1) > 0).all()):
        raise UsageError("--x are probabilities: numbers from 0, and a sum above 0 in each row")
    rows = given / given.sum(-1, keepdim=True)
    ((ids, total),) = beam_search(lambda done: rows[len(done)].log(), 1, len(rows), len(words) - 1)
    said = [[t, *rows[t].tolist(), words[int(greedy(rows[t]))]] for t in range(len(ids))]
    yield Table("each step", ["t", *words, "chosen"], said, "map", "next word")
    told = " ".join(words[i] for i in ids if i != len(words) - 1)
    yield Table("the whole", ["text", "log p", "p"], [[told, total, math.exp(total)]])
