"""Topics about layers of attention: heads, groups, latents, sparse choice, cross-attention and what they cache."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.attention import GQA, MLA, Context, Terms, weights
from regard.attention.sparse import choose, index_scores
from regard.config import divisors
from regard.errors import UsageError
from regard.learn.numbers import cache_numbers, dot_products, mla_weights, multiply_adds
from regard.learn.topics import Numbers, Table, fill, real, rows_of, spread, topic, whole
from regard.mask import Span
from regard.position import Rope

HEADS = "regard/attention/multihead.py"
HALF = 2  # bytes of a number in half precision


@topic(f"{HEADS}::GroupedQueryAttention", "regard/learn/numbers.py::multiply_adds")
def multi_head(dim: int = 512, heads: int = 8, tokens: int = 128) -> list[Table]:
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
    targets = range(1, len(states) + 1)
    return [
        Table("weights", ["target", *sources], [[i, *spread(row)] for i, row in zip(targets, a)]),
        Table(
            "output",
            ["target", *_names("o", out)],
            [[i, *spread(row)] for i, row in zip(targets, out)],
        ),
    ]


@topic(f"{HEADS}::GQA", f"{HEADS}::GroupedQueryAttention.mix")
def gqa(heads: int = 8, kv_heads: int = 2, head_dim: int = 64) -> list[Table]:
    """How many key and value heads does a model need?

    o_i = softmax(q_i k_j^T / sqrt(d)) v_j,   j = i // (h / g)
    g = h is multi-head, g = 1 multi-query. Cache per token and layer: g (d + d)."""
    chosen, dim = GQA(heads, kv_heads, head_dim), heads * head_dim
    full = cache_numbers(GQA(heads, head_dim=head_dim), dim)
    rows = []
    for g in divisors(heads):
        kept = cache_numbers(GQA(heads, g, head_dim), dim)
        name = "MHA" if g == heads else "MQA" if g == 1 else "GQA"
        rows.append([g, name, kept, f"1/{full // kept}" if kept < full else "1"])
    share = heads // chosen.groups
    groups = [
        [j, " ".join(map(str, range(j * share, (j + 1) * share)))] for j in range(chosen.groups)
    ]
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
    counts = {name: cache_numbers(kind, dim) for name, kind in kinds.items()}
    counts["MLA"] = cache_numbers(config, dim)
    apart, merged = mla_weights(config, dim)
    return [
        Table(
            "numbers in the cache, per token and layer", ["kind", "numbers"], list(counts.items())
        ),
        Table(
            "weights of one head's scores", ["W_Q and W_UK", "merged into one"], [[apart, merged]]
        ),
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


@topic("regard/cache/base.py::CacheSpec", "regard/learn/numbers.py::dot_products")
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
    each = cache_numbers(GQA(heads, kv_heads, head_dim), heads * head_dim)
    rows = []
    for n in (whole("tokens", x) for x in tokens):
        products = (dot_products(n, cached=cached) for cached in (True, False))
        rows.append([n, *products, n * layers * each * HALF])
    columns = ["tokens", "q.k with cache", "without", "bytes of cache"]
    return [Table(f"{each:,} numbers a token and layer, {layers} layers", columns, rows)]


def _names(letter: str, rows: Tensor) -> list[str]:
    return [f"{letter}_{i + 1}" for i in range(rows.shape[1])]


TOPICS = (multi_head, cross_attention, gqa, mla, dsa, kv_cache)
