"""Topics of `regard explain` on newer ways to know order: a state that decays, and scores that know distances."""

from __future__ import annotations

from dataclasses import replace

import torch

from regard.attention import GQA, SSD, Context, Disentangled, Terms
from regard.attention.core import scores
from regard.attention.disentangled import DisentangledAttention
from regard.attention.ssd import StateSpaceDual
from regard.errors import UsageError
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
from regard.learn.mechanisms import grid, kept_numbers
from regard.mask import Span
from regard.see.probe import Probe

DELTA = "regard/attention/delta.py"
DISTANCES = "regard/attention/disentangled.py"


@topic("regard/attention/ssd.py::StateSpaceDual", f"{DELTA}::recurrent", f"{DELTA}::chunked")
def state_space_dual(
    s: Numbers, q: Matrix, k: Matrix, v: Matrix, decay: float = 0.5, skip: float = 0.0
) -> Tables:
    """How can one layer be a recurrence when it writes, and attention when it learns?

    S_t = e^(-A s_t) S_{t-1} + B_t (s_t x_t)^T,   o_t = S_t^T C_t + D x_t;   A (--decay),   D (--skip)
    o_t = sum_{i <= t} (C_t.B_i) e^(-A (s_{i+1} + ... + s_t)) s_i x_i + D x_t;   s, C, B, x: --s, --q, --k, --v
    The same sum, read in two ways: through a state of one size, or as attention of all pairs without a softmax. A token
    chooses its own step s_t: a large one fades what was before and writes much, one near 0 passes the token over."""
    n, size, rate = len(s), real(s), positive("decay", decay)
    if bool((size < 0).any()):
        raise UsageError("--s are steps; give numbers from 0")
    queries, keys, values = (rows_of(*each, count=n) for each in (("q", q), ("k", k), ("v", v)))
    d, e = keys.shape[1], values.shape[1]
    if queries.shape[1] != d:
        raise UsageError(f"queries have {queries.shape[1]} numbers, keys {d}; give both as many")
    layer = fill(StateSpaceDual(SSD(1, e, key_dim=d), 1))
    layer.skip.fill_(skip)
    given = queries[None, :, None], keys[None, :, None], values[None, :, None]
    gates = (-rate * size)[None, :, None, None], size[None, :, None]

    # Of values that are 1 for one token each, what is read is the weights.
    one, nothing = torch.eye(n).double(), keys.new_zeros(1, 1, d, n)
    weights = layer.rule(*given[:2], one[None, :, None], *gates, nothing)[0][0, :, 0]
    yield grid("as attention: what token t reads of each", weights, "token", "token ", "map")
    state, steps = keys.new_zeros(1, 1, d, e), []
    for t in range(n):
        c, b, x, g, beta = (each[:, t : t + 1] for each in (*given, *gates))
        o, state, _ = layer.rule(c, b, x, g, beta, state)
        steps.append(o[0, 0, 0])
    both = torch.cat([torch.stack(steps), weights @ values], 1)
    names = [f"{name} o_{i + 1}" for name in ("state", "pairs") for i in range(e)]
    rows = [[t, *row] for t, row in enumerate(both.tolist(), 1)]
    yield Table("through the state, and of all pairs", ["token", *names], rows)
    kinds = SSD(128, 64, 8), GQA(32, 8, 128)
    columns = ["tokens", "state-space dual, 128 heads", "GQA, 8 key heads of 128"]
    counts = [[n, *(kept_numbers(kind, 4096, n) for kind in kinds)] for n in (128, 4096, 131072)]
    yield Table("numbers kept by one layer, as in Mamba Codestral 7B", columns, counts)


@topic(f"{DISTANCES}::DisentangledAttention", f"{DISTANCES}::Disentangled.bucket")
def disentangled(x: Matrix, pos: Numbers, span: int = 8, max_distance: int = 32) -> Tables:
    """How can a score know the distance of two tokens when no position is added to them?

    score_ij = (q_i.k_j + q_i.K_r + Q_r.k_j) / sqrt(3 d),   K_r = W_k p_r,   Q_r = W_q p_r,   r = bucket(i - j)
    Three terms, scored apart: what a token says meets what another says, and each of the two meets their distance. p
    has a trained vector for each of 2 x --span buckets: near distances have one each, far ones share by logarithm up to
    --max-distance. x: a row for each token, here with the same word twice; pos: distances i - j."""
    tokens = torch.atleast_2d(real(x))
    whole("span", span, 2, 1024)
    config = Disentangled(1, span=span, max_distance=whole("max_distance", max_distance), norm=None)
    part = fill(DisentangledAttention(config, tokens.shape[1]))
    here, probe = Span.run(0, len(tokens)), Probe()
    ctx = Context(here, probe=probe, site="0.self")
    part(tokens[None], ctx)
    q, k = part.queries(tokens[None], ctx), part.entries(tokens[None], ctx)["k"]
    said = scores(q.transpose(1, 2), k.transpose(1, 2), Terms(part.scale))
    yield grid("q_i.k_j / sqrt(3 d)", said[0, 0], "query", "key ")
    for name, to in (("q_i.K_r / sqrt(3 d)", True), ("Q_r.k_j / sqrt(3 d)", False)):
        part.config = replace(config, content_to_position=to, position_to_content=not to)
        apart = part.by_distance(q, k, ctx.visible(here), ctx)
        assert apart is not None
        yield grid(name, apart[0, 0], "query", "key ")
    weights = probe.maps["0.self"][0][0, 0]
    yield grid("weights, softmax of their sum", weights, "query", "key ", "map")
    gap = torch.tensor([whole("pos", each, -(10**6)) for each in pos])
    title = f"rows of p, 0 to {2 * span - 1}"
    yield Table.of(title, {"i - j": gap, "r": config.bucket(gap)}, "lines", "row of p", "pos")
