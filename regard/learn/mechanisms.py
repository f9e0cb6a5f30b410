"""Topics about models: one softmax and one weighted sum, layers of attention, positions, parts, smaller weights."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import GQA, MLA, Context, Terms, attend, softmax, weights
from regard.attention.core import scores as dot_scores
from regard.attention.pooling import KERNELS, one_loop, regress, three_loops
from regard.attention.scores import SCORES, make_score
from regard.attention.sparse import choose, index_scores, to_fp8
from regard.config import divisors
from regard.errors import UsageError
from regard.kernels.linear import GROUP, Int4, pack
from regard.layers import ACTIVATIONS, MLP, Norm
from regard.learn import numbers
from regard.learn.topics import (
    Matrix,
    Numbers,
    Table,
    fill,
    positive,
    real,
    rows_of,
    spread,
    topic,
    whole,
)
from regard.mask import Causal, Documents, Full, Mask, Padding, Prefix, Span, Visible, Window
from regard.models.adapt import LoRA, LowRank
from regard.models.base import parameters
from regard.models.embedding import Patches
from regard.models.recurrent import CELLS, MemoryAttention
from regard.position import Rope, T5Bias, alibi_slopes, rotate, sinusoid, t5_bucket

ATTENTION, POOLING = "regard/attention/core.py", "regard/attention/pooling.py"
HEADS, POSITION = "regard/attention/multihead.py", "regard/position.py"
NUMBERS = "regard/learn/numbers.py"
# Bytes of a number in half precision.
HALF = 2

# --- one softmax, one weighted sum --------------------------------------------------------------


@topic(f"{ATTENTION}::softmax", f"{POOLING}::three_loops")
def softmax_(x: Numbers = (1.0, 2.0, 3.0)) -> list[Table]:
    """How do scores become weights that sum to 1, without overflow?

    p_i = e^(x_i - m) / d,   m = max_j x_j,   d = sum_j e^(x_j - m)
    The same m above and below the line: it cancels, and no exponent is above 0."""
    weights, trace = three_loops(real(x))
    m, d = trace[-1].m, trace[-1].d
    rows = [[a, a - m, p * d, p] for a, p in zip(x, weights.tolist())]
    total = ["sum", "", d, weights.sum().item()]
    return [Table(f"m = {m:g}", ["x", "x - m", "e^(x - m)", "softmax"], [*rows, total])]


@topic(f"{NUMBERS}::saturation", f"{NUMBERS}::softmax_jacobian")
def saturation(a: Numbers = (0.0, 1.0, 2.0, 5.0, 10.0)) -> list[Table]:
    """When does a softmax stop learning?

    softmax([a, a, 2a])_3 = 1 / (1 + 2 e^-a)   -> 1 as a grows
    The Jacobian p_i (1[i=j] - p_j) goes to 0 with it: no gradient gets through to the scores."""
    largest = [numbers.softmax_jacobian(real((x, x, 2 * x))).abs().max().item() for x in a]
    weights = numbers.saturation(real(a)).tolist()
    columns = ["a", "weight of 2a", "largest |dp/dx|"]
    return [Table("softmax([a, a, 2a])", columns, list(zip(a, weights, largest)))]


@topic(f"{NUMBERS}::softmax_jacobian")
def jacobian(x: Numbers = (1.0, 2.0, 3.0)) -> list[Table]:
    """How does a weight move when a score moves?

    d p_i / d x_j = p_i (1[i=j] - p_j),   p = softmax(x);   as a matrix: diag(p) - p p^T
    Symmetric, and every row sums to 0: the weights share one whole."""
    p, matrix = softmax(real(x)), numbers.softmax_jacobian(real(x))
    rows = [[float(a), *spread(row), row.sum().item()] for a, row in zip(p, matrix)]
    columns = ["p_i", *(f"d/dx_{j}" for j in range(1, len(x) + 1)), "sum"]
    rows = [[round(cell, 15) for cell in row] for row in rows]
    return [Table("one row for each p_i", columns, rows)]


@topic(f"{NUMBERS}::dot_moments", "regard/attention/scores.py::ScaledDot")
def scaling(dim: Numbers = (1.0, 2.0, 4.0, 8.0)) -> list[Table]:
    """Why are scores divided by sqrt(d)?

    q_i, k_i independent, mean 0, variance 1:   E[q.k] = 0,   Var[q.k] = d,   Var[q.k / sqrt(d)] = 1
    Enumerated below over every q and k in {-1, +1}^d. With k = q the mean is d: independence is needed."""
    rows = []
    for d in (whole("dim", x, 1, 10) for x in dim):
        (mean, variance), same = numbers.dot_moments(d), numbers.dot_moments(d, same=True)
        rows.append([d, mean, variance, numbers.dot_moments(d, d**-0.5)[1], same[0]])
    rows = [[round(cell, 12) for cell in row] for row in rows]
    columns = ["d", "mean q.k", "variance", "variance of q.k/sqrt(d)", "mean q.q"]
    return [Table("all q, k in {-1, +1}^d", columns, rows)]


@topic(f"{ATTENTION}::reference", f"{ATTENTION}::attend")
def attention(
    q: Matrix = ((1.0, 0.0),),
    k: Matrix = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)),
    v: Matrix = ((1.0,), (2.0,), (4.0,)),
) -> list[Table]:
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
    heads = queries[None, None], keys[None, None]
    scaled = dot_scores(*heads, Terms(queries.shape[1] ** -0.5))[0, 0]
    plain = dot_scores(*heads, Terms(1.0))[0, 0]
    out = attend(*(x[None, :, None] for x in (queries, keys, values)), backend="reference")
    steps = torch.stack([plain, scaled, softmax(scaled)], -1).flatten(0, 1)
    pairs = [(i + 1, j + 1) for i in range(len(queries)) for j in range(len(keys))]
    weights = [[*pair, *spread(step)] for pair, step in zip(pairs, steps)]
    outputs = [[i + 1, *spread(o)] for i, o in enumerate(out[0, :, 0])]
    columns = ["query", "key", "q.k", "q.k/sqrt(d)", "softmax"]
    names = ["query", *_numbered("o", values)]
    first = 1 if len(queries) == 1 else 0
    return [
        Table("weights", columns[first:], [row[first:] for row in weights]),
        Table("output", names[first:], [row[first:] for row in outputs]),
    ]


@topic("regard/mask.py::Causal", "regard/mask.py::Visible")
def masks(tokens: int = 5, window: int = 3) -> list[Table]:
    """Which keys may a query see?

    a_ij = softmax_j(x_ij) over the visible j alone;   causal (the look-ahead mask): j <= i
    window: |i - j| < w,   prefix: j <= i or j < n
    Rules are joined with &. A row that sees nothing gives zeros."""
    n = whole("tokens", tokens, 2, 20)
    here, half = Span.run(0, n), torch.tensor([n // 2])
    rules: dict[str, Mask] = {
        "full": Full(),
        "causal": Causal(),
        f"causal & window {window}": Causal() & Window(window),
        f"prefix {n // 2}": Prefix(half),
        f"padding after {n - 1}": Padding(torch.tensor([n - 1])),
        "causal & documents": Causal() & Documents((torch.arange(n) >= half)[None].long()),
    }
    seen = [Visible(rule, here, here).tensor()[0, 0] for rule in rules.values()]
    rows = [[i, *(" ".join(".1"[int(x)] for x in mask[i]) for mask in seen)] for i in range(n)]
    title = "1: may be seen, one row a query, one column a key"
    return [Table(title, ["query", *rules], rows)]


@topic(f"{POOLING}::one_loop", f"{ATTENTION}::online")
def online_softmax(x: Numbers = (1.0, 3.0, 2.0), v: Numbers = (1.0, 2.0, 3.0)) -> list[Table]:
    """How can attention be computed in one pass, with no row of scores kept?

    m' = max(m, x_i),   d' = d e^(m - m') + e^(x_i - m'),   o' = o (d / d') e^(m - m') + (e^(x_i - m') / d') v_i
    The old sums shrink by e^(OLD maximum - NEW maximum), which is at most 1."""
    values = rows_of("v", v, count=len(x))
    last, trace = one_loop(real(x), values)
    names = ["o"] if values.shape[1] == 1 else _numbered("o", values)
    steps = [
        [i, score, step.m, step.d, *spread(cast(Tensor, step.o))]
        for i, (score, step) in enumerate(zip(x, trace), 1)
    ]
    return [
        Table("after each key", ["key", "x", "m", "d", *names], steps),
        Table("softmax(x) v, in three passes", names, [spread(softmax(real(x)) @ values)]),
    ]


@topic(f"{POOLING}::regress", f"{POOLING}::kernel_weights")
def nadaraya_watson(
    q: Numbers = (0.0, 0.5, 1.5, 2.9, 10.0),
    k: Numbers = (0.0, 1.0, 2.0, 3.0),
    v: Numbers = (0.0, 0.8, 0.9, 0.1),
    width: float = 1.0,
) -> list[Table]:
    """What was attention before it had weights to learn?

    f(q) = sum_j a_j(q) v_j,   a_j(q) = K(u_j) / sum_i K(u_i),   u_j = |q - k_j| / width
    With the Gaussian K(u) = e^(-u^2/2) this is softmax(-u^2/2): attention with a distance as score."""
    if len(k) != len(v):
        raise UsageError(f"--k has {len(k)} numbers and --v {len(v)}; give as many of both")
    positive("width", width)
    estimates = [regress(real(q), real(k), real(v), kernel, width).tolist() for kernel in KERNELS]
    return [Table("estimates; none: no key is near", ["q", *KERNELS], list(zip(q, *estimates)))]


@topic("regard/attention/scores.py::Additive", "regard/attention/scores.py::Bilinear")
def scores(
    q: Numbers = (0.5, -1.0, 2.0), k: Numbers = (1.0, 0.5, -0.5, 0.0, 1.0, 1.0)
) -> list[Table]:
    """Which ways are there to compare a query with a key?

    dot q.k;   scaled dot q.k / sqrt(d);   bilinear q^T W k;   additive w_v^T tanh(W_q q + W_k k)
    The last two have weights of their own; here ((3i + 5j + n) mod 13 - 6) / 10."""
    keys, width = rows_of("k", k, width=len(q)), len(q)
    layers = [fill(make_score(name, width, width, width)) for name in SCORES]
    with torch.no_grad():
        values = [spread(score(real(q)[None], keys)[0]) for score in layers]
    rows = list(zip(range(1, len(keys) + 1), *values))
    return [Table("one row for each key", ["key", *SCORES], rows)]


@topic("regard/models/recurrent.py::BahdanauStep", "regard/models/recurrent.py::MemoryAttention")
def bahdanau(
    q: Numbers = (1.0, -0.5),
    k: Numbers = (0.2, 0.4, -0.1, 0.5, -0.3, 0.8, -0.6, 0.1, 0.3),
    tokens: int = 3,
) -> list[Table]:
    """How did the first attention look back at the source?

    e_s = w_v^T tanh(W_q h_{t-1} + W_k m_s),   a = softmax(e),   c_t = sum_s a_s m_s
    The decoder's PREVIOUS state asks. q: that state; k: the encoder's states, one for each of the tokens."""
    if len(k) % tokens:
        raise UsageError(f"--k has {len(k)} numbers, which are no {tokens} states (--tokens)")
    memory = rows_of("k", k, count=tokens)
    layer = fill(MemoryAttention("additive", len(q), memory.shape[1]))
    with torch.no_grad():
        e = layer.score(real(q)[None], memory)[0]
        cached = {"h": memory[None], "k": layer.score.key(memory)[None]}
        c = layer(real(q)[None, None], cached, backend="reference")
    rows = list(zip(range(1, tokens + 1), spread(e), spread(softmax(e))))
    return [
        Table("alignment", ["source", "score e", "weight a"], rows),
        Table("context", _numbered("c", memory), [spread(c.flatten())]),
    ]


# --- layers of attention ------------------------------------------------------------------------


@topic(f"{HEADS}::GroupedQueryAttention", f"{NUMBERS}::multiply_adds")
def multi_head(dim: int = 512, heads: int = 8, tokens: int = 128) -> list[Table]:
    """Why several heads instead of one wide one?

    head_i = softmax(Q_i K_i^T / sqrt(d)) V_i,   d = m / h;   output [head_1 .. head_h] W_O
    As many weights and multiplications as one head of width m, but h different maps of who looks at whom."""
    if dim % heads:
        raise UsageError(f"--heads {heads} does not divide --dim {dim}; try one of {divisors(dim)}")
    rows = []
    for h in divisors(heads):
        projections, pairs = numbers.multiply_adds(GQA(h), dim, tokens)
        rows.append([h, dim // h, projections // tokens, projections, pairs, h * tokens**2])
    columns = ["heads", "d", "weights", "n weights", "scores and sums", "weights a, all heads"]
    return [Table(f"multiply-adds of one layer over {tokens} tokens", columns, rows)]


@topic(f"{HEADS}::GroupedQueryAttention.entries", "regard/block.py::Block")
def cross_attention(
    x: Numbers = (1.0, 0.0, 0.0, 1.0), k: Numbers = (1.0, 0.5, -0.5, 1.0, 0.0, -1.0)
) -> list[Table]:
    """How does a decoder read the source?

    Q = X W_Q,   K = M W_K,   V = M W_V;   O = softmax(Q K^T / sqrt(d)) V W_O
    Queries come from the decoder, keys and values from the encoder's output M, by two projections.
    x: two decoder states; k: source states of the same width. No causal mask: the whole source is there."""
    states = rows_of("x", x, count=2)
    memory = rows_of("k", k, width=states.shape[1])
    layer = fill(GQA(1).make(states.shape[1]))
    spans = Span.run(0, len(states)), Span.run(0, len(memory))
    ctx = Context(spans[0], memory=memory[None], memory_pos=spans[1])
    with torch.no_grad():
        q, k_heads = layer.queries(states[None], ctx), layer.entries(states[None], ctx)["k"]
        a = weights(q.transpose(1, 2), k_heads.transpose(1, 2), None, Terms(layer.scale))[0, 0]
        out = layer(states[None], ctx)[0]
    sources = [f"source {i + 1}" for i in range(len(memory))]
    read, outputs = ([[i, *spread(row)] for i, row in enumerate(x, 1)] for x in (a, out))
    return [
        Table("weights", ["target", *sources], read),
        Table("output", ["target", *_numbered("o", out)], outputs),
    ]


@topic(f"{HEADS}::GQA", f"{HEADS}::GroupedQueryAttention.mix")
def gqa(heads: int = 8, kv_heads: int = 2, head_dim: int = 64) -> list[Table]:
    """How many key and value heads does a model need?

    o_i = softmax(q_i k_j^T / sqrt(d)) v_j,   j = i // (h / g)
    g = h is multi-head, g = 1 multi-query. Cache per token and layer: g (d + d)."""
    chosen, dim = GQA(heads, kv_heads, head_dim), heads * head_dim
    full = numbers.cache_numbers(GQA(heads, head_dim=head_dim), dim)
    rows = []
    for g in divisors(heads):
        size = numbers.cache_numbers(GQA(heads, g, head_dim), dim)
        name = "MHA" if g == heads else "MQA" if g == 1 else "GQA"
        rows.append([g, name, size, f"1/{full // size}" if size < full else "1"])
    share = heads // chosen.groups
    members = [range(j * share, (j + 1) * share) for j in range(chosen.groups)]
    groups = [[j, " ".join(map(str, each))] for j, each in enumerate(members)]
    return [
        Table("numbers in the cache", ["g", "name", "per token", "of MHA"], rows),
        Table(f"g = {chosen.groups}: who shares", ["key head", "query heads"], groups),
    ]


@topic("regard/attention/latent.py::LatentAttention.absorbed", "regard/attention/latent.py::MLA")
def mla(
    dim: int = 7168,
    heads: int = 128,
    head_dim: int = 128,
    latent: int = 512,
    rope_dim: int = 64,
    rank: int = 1536,
) -> list[Table]:
    """How can every head keep keys of its own while the cache stays small?

    c = norm(W_DKV x),   k = [W_UK c ; RoPE(W_KR x)],   v = W_UV c;   cached: c and the one rotary key
    Absorbed: q^T W_UK c = (W_UK^T q)^T c, so the latents themselves are attended to and no key is ever built.
    latent: c; rope_dim: r; rank: of the queries' latent."""
    if rope_dim % 2:
        raise UsageError(f"--rope-dim is {rope_dim}, and RoPE turns pairs; give an even number")
    config = MLA(heads, latent, head_dim, rope_dim, query_latent=rank, rope=Rope())
    plain = {f"GQA, g = {g}": GQA(heads, g, head_dim) for g in (8, 2) if heads % g == 0}
    kinds = {"MHA": GQA(heads, head_dim=head_dim), **plain, "MQA": GQA(heads, 1, head_dim)}
    counts = {name: numbers.cache_numbers(kind, dim) for name, kind in kinds.items()}
    counts["MLA"] = numbers.cache_numbers(config, dim)
    weights = numbers.mla_weights(config, dim)
    return [
        Table("numbers in the cache, per token and layer", ["kind", "numbers"], [*counts.items()]),
        Table("weights of one head's scores", ["W_Q and W_UK", "merged into one"], [[*weights]]),
    ]


@topic("regard/attention/sparse.py::index_scores", "regard/attention/sparse.py::choose")
def dsa(
    x: Numbers = (0.09, -0.66, -1.26, -0.39, -0.33, 0.68, -0.31, 0.56),
    w: Numbers = (0.84, 0.55),
    topk: int = 2,
) -> list[Table]:
    """Which k of all past tokens are worth attending to?

    I_ts = sum_j w_tj ReLU(q_tj . k_s);   S_t = the k largest I_ts of the visible s, ties to the earliest
    The layer multiplies by (H D)^-0.5 too, which changes no choice.
    x: q_tj . k_s, one row for each index head j; w: the heads' weights for this token, w_t = W_w x_t."""
    dots = rows_of("x", x, count=len(w))
    index = index_scores(dots[None, None], real(w)[None, None])[0, 0]
    k = whole("topk", topk, 1, len(index))
    best = set(choose(index, k).tolist()) if k < len(index) else set(range(len(index)))
    rows = [
        [s, *spread(dots[:, s]), float(value), "yes" if s in best else ""]
        for s, value in enumerate(index)
    ]
    heads = [f"q.k head {j + 1}" for j in range(len(w))]
    return [Table(f"the {k} best of {len(index)} keys", ["key", *heads, "I", "chosen"], rows)]


@topic("regard/cache/base.py::CacheSpec", f"{NUMBERS}::dot_products")
def kv_cache(
    tokens: Numbers = (10.0, 100.0, 1000.0, 10000.0),
    layers: int = 12,
    heads: int = 12,
    kv_heads: int = 12,
    head_dim: int = 64,
) -> list[Table]:
    """What does decoding save by remembering keys and values, and what does the memory cost?

    q.k products to write n tokens: n(n+1)/2 with a cache, n(n+1)(2n+1)/6 without
    bytes = n L g (d + d) 2 in half precision. Old queries are never needed again."""
    each = numbers.cache_numbers(GQA(heads, kv_heads, head_dim), heads * head_dim)
    rows = []
    for n in (whole("tokens", x) for x in tokens):
        products = (numbers.dot_products(n, cached=cached) for cached in (True, False))
        rows.append([n, *products, n * layers * each * HALF])
    columns = ["tokens", "q.k with cache", "without", "bytes of cache"]
    return [Table(f"{each:,} numbers a token and layer, {layers} layers", columns, rows)]


# --- positions and parts ------------------------------------------------------------------------


@topic(f"{POSITION}::sinusoid", f"{POSITION}::PositionVectors")
def sinusoidal(
    pos: Numbers = (0.0, 1.0, 2.0, 3.0), dim: int = 4, base: float = 10000.0
) -> list[Table]:
    """How does a model that sees a set of tokens learn their order?

    PE(p, 2i) = sin(p w_i),   PE(p, 2i+1) = cos(p w_i),   w_i = base^(-2i/d)
    i counts PAIRS. Added once, before the first layer. PE(p + n) is a fixed rotation of PE(p)."""
    whole("dim", dim, 1, 16)
    table = sinusoid(real(pos), dim, positive("base", base))
    columns = ["position", *(f"{('sin', 'cos')[i % 2]} w_{i // 2}" for i in range(dim))]
    return [Table("what is added", columns, [[p, *spread(row)] for p, row in zip(pos, table)])]


@topic(f"{POSITION}::rotate", f"{POSITION}::Rope")
def rope(
    x: Numbers = (1.0, 2.0, 3.0, 4.0), pos: Numbers = (0.0, 1.0, 3.0), base: float = 10000.0
) -> list[Table]:
    """How can a score know the distance of two tokens, and nothing else of their places?

    (a, b) -> (a cos pw - b sin pw, b cos pw + a sin pw) for each pair,   w_i = base^(-2i/d)
    Turning q by p and k by s leaves q.k as a function of p - s. Pairs: (i, i + d/2) half, (2i, 2i+1) interleaved."""
    positive("base", base)

    def turned(places: list[int], layout: str = "half") -> Tensor:
        angles = Rope(base, layout).angles(torch.tensor([places]), len(x), torch.float64)
        return rotate(real(x).expand(1, len(places), 1, -1), *angles, layout)[0, :, 0]

    speeds = Rope(base).frequencies(len(x), torch.float64)
    tables = [Table("speeds", [f"w_{i}" for i in range(len(speeds))], [spread(speeds)])]
    columns = ["position", *(f"x_{i}" for i in range(len(x)))]
    for layout in ("half", "interleaved"):
        vectors = turned([whole("pos", p, 0) for p in pos], layout)
        rows = [[p, *spread(row)] for p, row in zip(pos, vectors)]
        tables.append(Table(f"turned, {layout}", columns, rows))
    # x with itself, one key two places further.
    pairs = [(start, start + 2) for start in (0, 10, 1000)]
    rows = [[*pair, float(torch.dot(*turned([*pair])))] for pair in pairs]
    title = "the score depends on the distance alone"
    return [*tables, Table(title, ["query at", "key at", "q.k"], rows)]


@topic(f"{POSITION}::alibi_slopes", f"{POSITION}::RelativeBias")
def alibi(pos: Numbers = (0.0, 1.0, 4.0, 16.0), heads: int = 8) -> list[Table]:
    """Can a score simply fall with distance?

    score_ij = q_i.k_j / sqrt(d) - slope_h |i - j|,   slope_h = 2^(-8h/n) for head h = 1 .. n
    Nothing is learned; each head looks a different way back. pos: distances."""
    slopes = alibi_slopes(whole("heads", heads, 1, 128)).double()
    rows = [[h + 1, float(s), *(-float(s) * abs(p) for p in pos)] for h, s in enumerate(slopes)]
    columns = ["head", "slope", *(f"at {p:g}" for p in pos)]
    return [Table("what is added to the scores", columns, rows)]


@topic(f"{POSITION}::t5_bucket", f"{POSITION}::T5Bias")
def t5_bias(
    pos: Numbers = (-128.0, -20.0, -8.0, -1.0, 0.0, 1.0, 8.0, 20.0, 128.0), buckets: int = 32
) -> list[Table]:
    """How can distances share a few trained numbers?

    score_ij = q_i.k_j + table[bucket(j - i), head];   no 1/sqrt(d)
    Near distances have a bucket each, far ones share by logarithm. pos: key position - query position."""
    whole("buckets", buckets, 4, 1024)
    distance = torch.tensor([whole("pos", p, -(10**6)) for p in pos])
    both, causal = (t5_bucket(distance, T5Bias(1, buckets, causal=c)) for c in (False, True))
    rows = list(zip(distance.tolist(), both.tolist(), causal.tolist()))
    return [Table("buckets", ["key - query", "both ways", "causal"], rows)]


@topic("regard/layers.py::RMSNorm", "regard/layers.py::Norm", "regard/block.py::Block")
def norms(x: Numbers = (1.0, 2.0, 3.0, 6.0), eps: float = 1e-5) -> list[Table]:
    """What do norms do to a token, and where do they stand?

    LayerNorm (x - mean) / sqrt(var + eps) * w + b,   RMSNorm x / sqrt(mean(x^2) + eps) * w
    pre: x + f(norm(x)), with one norm at the end;   post (2017): norm(x + f(x))
    Over the features of each token, with the biased variance. Here w = 1 and b = 0."""
    given, dim = real(x), len(x)
    positive("eps", eps)
    with torch.no_grad():
        layer, rms = (Norm(eps, rms=r).make(dim).double()(given) for r in (False, True))
    rows = [*zip(x, spread(layer), spread(rms))]
    # Without the last bits, which another machine may have otherwise.
    mean = ["mean", *(round(y.mean().item(), 12) for y in (layer, rms))]
    variance = ["variance", *(round(y.var(correction=0).item(), 12) for y in (layer, rms))]
    return [Table("one token", ["x", "LayerNorm", "RMSNorm"], [*rows, mean, variance])]


@topic("regard/layers.py::FeedForward", "regard/layers.py::MLP")
def feed_forward(
    x: Numbers = (-2.0, -1.0, 0.0, 1.0, 2.0), dim: int = 512, width: int = 2048
) -> list[Table]:
    """What happens to a token between two attentions?

    FFN(x) = W_2 act(W_1 x + b_1) + b_2;   gated: W_2 (act(W_g x) * W_1 x)
    The same for every position; wider inside (width f), and no token sees another."""
    names = [name for name in ACTIVATIONS if name != "tanh"]
    given = real(x)
    curves = [spread(ACTIVATIONS[name](given)) for name in names]
    sizes = []
    for gated in (False, True):
        with torch.device("meta"):
            count = parameters(MLP(whole("width", width), gated=gated, bias=False).make(dim))
        sizes.append(["gated" if gated else "plain", count, 2 * count])
    return [
        Table("activations", ["x", *names], list(zip(x, *curves))),
        Table(f"m = {dim}, f = {width}", ["kind", "weights", "FLOP a token"], sizes),
    ]


@topic("regard/models/embedding.py::PatchEmbedding", "regard/models/embedding.py::Patches")
def vit(patch: Numbers = (8.0, 14.0, 16.0, 32.0), size: int = 224, dim: int = 768) -> list[Table]:
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
    return [Table(f"images of {size} x {size}", columns, rows)]


@topic("regard/models/recurrent.py::elman", "regard/models/recurrent.py::Cell")
def rnn_path(
    x: Numbers = (0.5, 0.9, 1.0, 1.1), steps: Numbers = (1.0, 10.0, 50.0, 100.0)
) -> list[Table]:
    """What does a recurrent network still know of a word t steps back?

    h_t = tanh(W x_t + U h_{t-1});   d h_t / d h_0 = prod of diag(tanh') U  ~  lambda^t
    Attention reaches every token in one step. x: lambda, the factor of one step; by autograd through the cell at 0."""
    cell, zero = CELLS["elman"], real((0.0,))
    rows = []
    for n in (whole("steps", t, 1, 1000) for t in steps):
        slopes = []
        for factor in x:
            start = zero.clone()[None].requires_grad_()
            state: tuple = (start,)
            for _ in range(n):
                state = cell.step(zero[None], state, zero[None], real((factor,))[None], zero, zero)
            (slope,) = torch.autograd.grad(state[0].sum(), start)
            slopes.append(slope.item())
        rows.append([n, *slopes, n, 1])
    columns = ["steps", *(f"lambda {v:g}" for v in x), "path of the RNN", "of attention"]
    return [Table("d h_t / d h_0", columns, rows)]


@topic("regard/models/adapt.py::LowRank", "regard/models/adapt.py::LoRA")
def lora(rank: Numbers = (1.0, 4.0, 8.0, 64.0), dim: int = 768, alpha: float = 16.0) -> list[Table]:
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
    return [Table(f"one square layer of width {dim}", columns, rows)]


@topic("regard/kernels/linear.py::Int8", "regard/kernels/linear.py::Int4")
def quantisation(x: Numbers = (0.02, -0.75, 0.31, 1.4, -0.9, 0.004)) -> list[Table]:
    """What is lost when weights are held in 8 or 4 bits?

    int8: w ~ q s, s = max|w| / 127 of each output;   int4: w ~ (q - 8) s + z, s = (max - min) / 15 of 32 inputs
    fp8 (e4m3): w ~ q s, s = max|w| / 448, three bits after the point. Shown: what comes back."""
    row = torch.tensor(x)[None]
    # The last weight again, which changes no range.
    wide = F.pad(row, (0, -len(x) % GROUP), value=float(row[0, -1]))
    eight = pack(row, None, "int8")(torch.eye(len(x)))[:, 0]
    four = cast(Int4, pack(wide, None, "int4")).dense()[: len(x), 0].float()
    q, scale = to_fp8(row)
    eighth = (q.float() * scale)[0]
    rows = [*zip(x, spread(eight), spread(four), spread(eighth))]
    worst = ["worst error", *(float((row[0] - y).abs().max()) for y in (eight, four, eighth))]
    bits = ["bits a weight", "8", f"{4 + 32 / GROUP:g}", "8"]
    return [Table("one output's weights", ["w", "int8", "int4", "fp8"], [*rows, worst, bits])]


def _numbered(letter: str, rows: Tensor) -> list[str]:
    return [f"{letter}_{i + 1}" for i in range(rows.shape[1])]


TOPICS = (
    *(softmax_, saturation, jacobian, scaling, attention, masks, online_softmax),
    *(nadaraya_watson, scores, bahdanau),
    *(multi_head, cross_attention, gqa, mla, dsa, kv_cache),
    *(sinusoidal, rope, alibi, t5_bias, norms, feed_forward, vit, rnn_path),
    *(lora, quantisation),
)
