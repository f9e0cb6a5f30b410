"""Topics about one softmax and one weighted sum: scores, scale, masks, kernels, the one-pass form."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from regard.attention import Terms, attend, softmax
from regard.attention.core import scores as dot_scores
from regard.attention.pooling import KERNELS, one_loop, regress, three_loops
from regard.attention.scores import SCORES, make_score
from regard.errors import UsageError
from regard.learn.numbers import dot_moments, softmax_jacobian
from regard.learn.numbers import saturation as largest_weight
from regard.learn.topics import (
    Matrix,
    Numbers,
    Table,
    fill,
    positive,
    real,
    rows_of,
    same_count,
    spread,
    topic,
    whole,
)
from regard.mask import Causal, Documents, Full, Mask, Padding, Prefix, Span, Visible, Window
from regard.models.cells import MemoryAttention

ATTENTION, POOLING = "regard/attention/core.py", "regard/attention/pooling.py"


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


@topic("regard/learn/numbers.py::saturation", "regard/learn/numbers.py::softmax_jacobian")
def saturation(a: Numbers = (0.0, 1.0, 2.0, 5.0, 10.0)) -> list[Table]:
    """When does a softmax stop learning?

    softmax([a, a, 2a])_3 = 1 / (1 + 2 e^-a)   -> 1 as a grows
    The Jacobian p_i (1[i=j] - p_j) goes to 0 with it: no gradient gets through to the scores."""
    largest = [softmax_jacobian(real((x, x, 2 * x))).abs().max().item() for x in a]
    weights = largest_weight(real(a)).tolist()
    columns = ["a", "weight of 2a", "largest |dp/dx|"]
    return [Table("softmax([a, a, 2a])", columns, list(zip(a, weights, largest)))]


@topic("regard/learn/numbers.py::softmax_jacobian")
def jacobian(x: Numbers = (1.0, 2.0, 3.0)) -> list[Table]:
    """How does a weight move when a score moves?

    d p_i / d x_j = p_i (1[i=j] - p_j),   p = softmax(x);   as a matrix: diag(p) - p p^T
    Symmetric, and every row sums to 0: the weights share one whole."""
    p, matrix = softmax(real(x)), softmax_jacobian(real(x))
    rows = [[float(a), *spread(row), row.sum().item()] for a, row in zip(p, matrix)]
    columns = ["p_i", *(f"d/dx_{j}" for j in range(1, len(x) + 1)), "sum"]
    rows = [[round(cell, 15) for cell in row] for row in rows]
    return [Table("one row for each p_i", columns, rows)]


@topic("regard/learn/numbers.py::dot_moments", "regard/attention/scores.py::ScaledDot")
def scaling(dim: Numbers = (1.0, 2.0, 4.0, 8.0)) -> list[Table]:
    """Why are scores divided by sqrt(d)?

    q_i, k_i independent, mean 0, variance 1:   E[q.k] = 0,   Var[q.k] = d,   Var[q.k / sqrt(d)] = 1
    Enumerated below over every q and k in {-1, +1}^d. With k = q the mean is d: independence is needed."""
    rows = []
    for d in (whole("dim", x, 1, 10) for x in dim):
        (mean, variance), same = dot_moments(d), dot_moments(d, same=True)
        rows.append([d, mean, variance, dot_moments(d, d**-0.5)[1], same[0]])
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
    names = ["query", *(f"o_{i + 1}" for i in range(values.shape[1]))]
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
    half = torch.tensor([n // 2])
    rules: dict[str, Mask] = {
        "full": Full(),
        "causal": Causal(),
        f"causal & window {window}": Causal() & Window(window),
        f"prefix {n // 2}": Prefix(half),
        f"padding after {n - 1}": Padding(torch.tensor([n - 1])),
        "causal & documents": Causal() & Documents((torch.arange(n) >= half)[None].long()),
    }
    seen = [Visible(rule, Span.run(0, n), Span.run(0, n)).tensor()[0, 0] for rule in rules.values()]
    lines = [[" ".join(".1"[int(x)] for x in mask[i]) for mask in seen] for i in range(n)]
    rows = [[i, *line] for i, line in enumerate(lines)]
    title = "1: may be seen, one row a query, one column a key"
    return [Table(title, ["query", *rules], rows)]


@topic(f"{POOLING}::one_loop", f"{ATTENTION}::online")
def online_softmax(x: Numbers = (1.0, 3.0, 2.0), v: Numbers = (1.0, 2.0, 3.0)) -> list[Table]:
    """How can attention be computed in one pass, with no row of scores kept?

    m' = max(m, x_i),   d' = d e^(m - m') + e^(x_i - m'),   o' = o (d / d') e^(m - m') + (e^(x_i - m') / d') v_i
    The old sums shrink by e^(OLD maximum - NEW maximum), which is at most 1."""
    values = rows_of("v", v, count=len(x))
    last, trace = one_loop(real(x), values)
    outputs = [cast(Tensor, step.o) for step in trace]
    names = ["o"] if values.shape[1] == 1 else [f"o_{i + 1}" for i in range(values.shape[1])]
    steps = [
        [i + 1, x[i], step.m, step.d, *spread(o)] for i, (step, o) in enumerate(zip(trace, outputs))
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
    same_count("k", k, "v", v)
    positive("width", width)
    found = [regress(real(q), real(k), real(v), kernel, width).tolist() for kernel in KERNELS]
    return [Table("estimates; none: no key is near", ["q", *KERNELS], list(zip(q, *found)))]


@topic("regard/attention/scores.py::Additive", "regard/attention/scores.py::Bilinear")
def scores(
    q: Numbers = (0.5, -1.0, 2.0), k: Numbers = (1.0, 0.5, -0.5, 0.0, 1.0, 1.0)
) -> list[Table]:
    """Which ways are there to compare a query with a key?

    dot q.k;   scaled dot q.k / sqrt(d);   bilinear q^T W k;   additive w_v^T tanh(W_q q + W_k k)
    The last two have weights of their own; here ((3i + 5j + n) mod 13 - 6) / 10."""
    keys, width = rows_of("k", k, width=len(q)), len(q)
    made = [fill(make_score(name, width, width, width)) for name in SCORES]
    with torch.no_grad():
        found = [spread(score(real(q)[None], keys)[0]) for score in made]
    rows = list(zip(range(1, len(keys) + 1), *found))
    return [Table("one row for each key", ["key", *SCORES], rows)]


@topic("regard/models/cells.py::BahdanauStep", "regard/models/cells.py::MemoryAttention")
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
        kept = {"h": memory[None], "k": layer.score.key(memory)[None]}
        c = layer(real(q)[None, None], kept, backend="reference")
    rows = list(zip(range(1, tokens + 1), spread(e), spread(softmax(e))))
    names = [f"c_{i + 1}" for i in range(memory.shape[1])]
    return [
        Table("alignment", ["source", "score e", "weight a"], rows),
        Table("context", names, [spread(c.flatten())]),
    ]


TOPICS = (
    *(softmax_, saturation, jacobian, scaling, attention, masks, online_softmax),
    *(nadaraya_watson, scores, bahdanau),
)
