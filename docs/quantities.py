"""The numbers behind the pictures of plots.py, by the library's own functions: softmax, scale, one
pass, positions, caches, recurrent networks, what a sparse selection keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.attention import DSA, GQA, MLA, softmax
from regard.attention.pooling import one_loop
from regard.attention.sparse import choose
from regard.learn.mechanisms import cache_numbers, multiply_adds, softmax_jacobian
from regard.position import Rope, alibi_slopes, rotate, sinusoid
from regard.presets import PRESETS

# --- softmax ------------------------------------------------------------------------------------


class Saturation(NamedTuple):
    """softmax([a, a, 2a]) for each a (n): its weights (n 3) and Jacobians (n 3 3)."""

    a: Tensor
    weights: Tensor
    jacobians: Tensor

    @property
    def steepest(self) -> Tensor:
        """The largest entry of each Jacobian (n): no score can move a weight faster."""
        return self.jacobians.abs().amax((-1, -2))


def saturations(a: Tensor) -> Saturation:
    """What a larger and larger a does to softmax([a, a, 2a]) and to its gradient."""
    x = torch.stack([a, a, 2 * a], -1)
    return Saturation(a, softmax(x), softmax_jacobian(x))


def dot_chances(dim: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """All values of scale q.k with q, k in {-1, +1}^dim, ascending, and how likely each is: (dim +
    1), (dim + 1).

    j of the dim products are +1 in C(dim, j) of 2^dim cases, so this is exact for widths no table
    could list."""
    count = torch.tensor([math.comb(dim, j) / 2**dim for j in range(dim + 1)], dtype=torch.float64)
    return scale * (2.0 * torch.arange(dim + 1, dtype=torch.float64) - dim), count


class Spread(NamedTuple):
    """The variance of q.k and of q.k / sqrt(d) for each width d (n), and the chances of both by
    width."""

    dims: list[int]
    plain: list[float]
    scaled: list[float]
    chances: dict[int, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]  # (plain, scaled)


def dot_spread(dims: Sequence[int]) -> Spread:
    """How far scores spread as heads get wider, with and without the scale."""
    chances = {d: (dot_chances(d), dot_chances(d, d**-0.5)) for d in dims}
    plain, scaled = ([_variance(*chances[d][i]) for d in dims] for i in (0, 1))
    return Spread(list(dims), plain, scaled, chances)


def _variance(values: Tensor, chance: Tensor) -> float:
    mean = (chance * values).sum()
    return (chance * (values - mean).square()).sum().item()


class Pass(NamedTuple):
    """Online attention over logits x (s) and values (s): after each key the maximum m, the sum d,
    the output o (s), and by what the old sum was multiplied, e^(m_old - m_new); the first has none
    to multiply: 0."""

    x: Tensor
    values: Tensor
    m: Tensor
    d: Tensor
    o: Tensor
    shrink: Tensor


def online_pass(x: Tensor, values: Tensor) -> Pass:
    """Softmax attention of one query, key by key, to values of width 1; the last o is softmax(x) .
    values."""
    x, values = x.double(), values.double()
    steps = one_loop(x, values[:, None])[1]
    m, d = (x.new_tensor([step[i] for step in steps]) for i in (0, 1))
    o = torch.cat([step.o for step in steps if step.o is not None])
    before = torch.cat([x.new_tensor([-math.inf]), m[:-1]])
    return Pass(x, values, m, d, o, torch.exp(before - m))


# --- positions ----------------------------------------------------------------------------------


class Table(NamedTuple):
    """A vector for each position (p m), and the cosine of every two (p p)."""

    vectors: Tensor
    alike: Tensor


def sinusoidal_table(
    positions: int, dim: int, base: float = 10000.0, layout: str = "interleaved"
) -> Table:
    """The sinusoids of positions 0, 1, ...; their likeness depends on the distance alone."""
    return learned_table(sinusoid(torch.arange(positions), dim, base, layout))


def learned_table(vectors: Tensor) -> Table:
    """Position vectors (p m) that a model has learned, such as `model.embedding.position.weight`."""
    vectors = torch.as_tensor(vectors).detach().to("cpu", torch.float64)
    unit = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    return Table(vectors, unit @ unit.T)


class Clocks(NamedTuple):
    """RoPE's pairs as hands of clocks: the angle of each at each position (p pairs), in [0, 2 pi),
    and after how many tokens each pair has turned once (pairs)."""

    positions: list[int]
    pairs: list[int]
    angles: Tensor
    wavelengths: Tensor


def rope_clocks(rope: Rope, dim: int, positions: list[int], pairs: list[int]) -> Clocks:
    """Angles p w_i of chosen pairs i at chosen positions p of a head of width `dim`."""
    freq = rope.frequencies(dim, torch.float64)[pairs]
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * freq
    return Clocks(positions, pairs, angles.remainder(2 * math.pi), 2 * math.pi / freq)


class Distances(NamedTuple):
    """Scores by distance 0, 1, ... (n): as shares of the score at distance 0, and as what is added
    to the score."""

    distances: Tensor
    shares: dict[str, Tensor]
    added: dict[str, Tensor]


def rope_score(rope: Rope, dim: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """q.k / |q|^2 where query and key are the same vector of ones before they turn, at positions
    (n) and (n): (n)."""
    ones = torch.ones(1, len(q_pos), 1, dim, dtype=torch.float64)  # b t h d
    q, k = (
        rotate(ones, *rope.angles(pos[None], dim, torch.float64), rope.layout)
        for pos in (q_pos, k_pos)
    )
    return ((q * k).sum(-1) / (ones * ones).sum(-1)).flatten()


def distance_scores(ropes: Mapping[str, Rope], dim: int, length: int, alibi: int = 0) -> Distances:
    """What is left of a score when a key is d tokens away, d < length, for each RoPE; and for
    `alibi` heads what ALiBi takes away, head by head."""
    far = torch.arange(length)
    shares = {
        name: rope_score(rope, dim, far, torch.zeros_like(far)) for name, rope in ropes.items()
    }
    slopes = alibi_slopes(alibi).double() if alibi else torch.zeros(0)
    added = {f"head {i}": -slope * far for i, slope in enumerate(slopes)}
    return Distances(far, shares, added)


# --- caches and cost ----------------------------------------------------------------------------


# The mechanism, the model's width, its layers.
Layers = tuple[GQA | MLA | DSA, int, int]


class CacheTable(NamedTuple):
    """Bytes by mechanism: of one token, and of every length (mechanisms lengths), all layers
    together."""

    names: list[str]
    lengths: list[int]
    per_token: list[int]
    totals: list[list[int]]


def cache_table(models: Mapping[str, Layers], lengths: Sequence[int], width: int = 2) -> CacheTable:
    """What one sequence keeps while it is decoded, every token of it; `width` bytes a number (2:
    bf16)."""
    per_token = [
        layers * cache_numbers(attention, dim) * width for attention, dim, layers in models.values()
    ]
    totals = [[length * size for length in lengths] for size in per_token]
    return CacheTable(list(models), list(lengths), per_token, totals)


def cache_variants(preset: str) -> dict[str, Layers]:
    """A preset's attention beside the others that could stand in its place: MHA, GQA and MQA of the
    same heads, and MLA or DSA where it has them."""
    tower = PRESETS[preset][1]().tower
    own = tower.attention
    kinds: dict[str, GQA | MLA | DSA] = {}
    if isinstance(own, GQA):
        kinds["MHA"] = replace(own, kv_heads=own.heads)
        if own.kv_heads not in (None, 1, own.heads):
            kinds[f"GQA, {own.kv_heads} groups"] = own
        kinds["MQA"] = replace(own, kv_heads=1)
    else:
        latent = own.attention if isinstance(own, DSA) else own
        for name, groups in (("MHA", latent.heads), ("GQA, 8 groups", 8), ("MQA", 1)):
            kinds[name] = GQA(latent.heads, groups, latent.head_dim)
        kinds["MLA"] = latent
        if isinstance(own, DSA):
            kinds["MLA and DSA's index"] = own
    return {name: (attention, tower.dim, tower.layers) for name, attention in kinds.items()}


# --- recurrent networks -------------------------------------------------------------------------


class Memory(NamedTuple):
    """What is left of a signal t steps back, t = 0 ... (n): lambda^t for each rate of a recurrence
    (rates n); and the steps it passes: t there, 1 in attention (0 for the token itself)."""

    steps: Tensor
    rates: list[float]
    left: Tensor
    path: Tensor
    attention_path: Tensor


def forgetting(rates: Sequence[float], steps: int) -> Memory:
    """h_t = lambda h_{t-1} + x_t passes x_0, and its gradient, on as lambda^t: below 1 it vanishes,
    above it explodes.

    Attention reads any token over a path of one step, whose factor is a weight and does not shrink
    with distance."""
    t = torch.arange(steps + 1, dtype=torch.float64)
    left = torch.tensor(list(rates), dtype=torch.float64)[:, None] ** t
    return Memory(t, list(rates), left, t, t.clamp(max=1))


def half_life(rate: float) -> float:
    """Steps after which lambda^t is a half; infinite where nothing is forgotten."""
    return math.log(0.5) / math.log(rate) if rate < 1 else math.inf


class Costs(NamedTuple):
    """Multiply-adds of one layer over n tokens (lengths), by kind, and how many steps must wait for
    one another."""

    dim: int
    lengths: list[int]
    work: dict[str, list[int]]
    waits: dict[str, list[int]]

    @property
    def even(self) -> int:
        """The length where scores and sums cost as much as the projections: 2 n^2 m = 4 n m^2, n =
        2m."""
        return 2 * self.dim


GATES = {"Elman RNN": 1, "LSTM": 4}


def layer_costs(dim: int, lengths: Sequence[int], heads: int = 8) -> Costs:
    """A recurrent layer works gates x 2 m^2 a token, one after the other; attention 4 m^2 + 2 n m,
    all at once."""
    work = {name: [n * gates * 2 * dim**2 for n in lengths] for name, gates in GATES.items()}
    parts = [multiply_adds(GQA(heads), dim, n) for n in lengths]
    work["attention"] = [sum(part) for part in parts]
    work["its projections"] = [part[0] for part in parts]
    work["its scores and sums"] = [part[1] for part in parts]
    waits = {"RNN": list(lengths), "attention, training": [1 for _ in lengths]}
    return Costs(dim, list(lengths), work, waits)


# --- sparse selection ---------------------------------------------------------------------------


class Selection(NamedTuple):
    """One query's choice among s keys: index scores (s), -inf where hidden; which are chosen (s);
    the weights that dense attention would give (s), a mean over heads; and the share of them that
    the choice keeps."""

    scores: Tensor
    chosen: Tensor
    weights: Tensor
    share: float

    @property
    def read(self) -> int:
        return int(self.chosen.sum())

    @property
    def visible(self) -> int:
        return int((self.scores > -torch.inf).sum())


def selection(scores: Tensor, weights: Tensor, topk: int) -> Selection:
    """What the indexer's `topk` best keep of dense attention. scores (s), weights (s) or (heads s).

    Ties go to the earliest key, hidden keys (-inf) are never chosen, and topk >= s keeps
    everything."""
    scores, weights = scores.double(), weights.double()
    weights = weights.mean(0) if weights.dim() == 2 else weights
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen[choose(scores, min(topk, len(scores)))] = True
    chosen &= scores > -torch.inf
    return Selection(scores, chosen, weights, (weights[chosen].sum() / weights.sum()).item())
