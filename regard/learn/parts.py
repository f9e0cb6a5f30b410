"""Topics about positions, norms, feed-forward, images, recurrent networks and weights made smaller."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from regard.attention.sparse import to_fp8
from regard.kernels.linear import GROUP, Int4, pack
from regard.layers import ACTIVATIONS, MLP, Norm
from regard.learn.topics import Numbers, Table, positive, real, spread, topic, whole
from regard.models.adapt import LoRA, LowRank
from regard.models.cells import CELLS
from regard.models.summary import parameters
from regard.models.vision import Patches
from regard.position import Rope, T5Bias, alibi_slopes, rotate, sinusoid, t5_bucket

POSITION = "regard/position.py"


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
    places = torch.tensor([whole("pos", p, 0) for p in pos])[None]
    turned = {}
    for layout in ("half", "interleaved"):
        kind = Rope(base, layout)
        cos, sin = kind.angles(places, len(x), torch.float64)
        turned[layout] = rotate(real(x).expand(1, len(pos), 1, -1), cos, sin, layout)[0, :, 0]
    names = [f"x_{i}" for i in range(len(x))]
    speeds = Rope(base).frequencies(len(x), torch.float64)
    tables = [Table("speeds", [f"w_{i}" for i in range(len(speeds))], [spread(speeds)])]
    for layout, rows in turned.items():
        shown = [[p, *spread(row)] for p, row in zip(pos, rows)]
        tables.append(Table(f"turned, {layout}", ["position", *names], shown))
    return [*tables, _by_distance(x, base)]


def _by_distance(x: Numbers, base: float) -> Table:
    """q.k of x with itself, one key two places further, whatever the place."""
    kind, rows = Rope(base), []
    for start in (0, 10, 1000):
        places = torch.tensor([[start, start + 2]])
        cos, sin = kind.angles(places, len(x), torch.float64)
        q, k = rotate(real(x).expand(1, 2, 1, -1), cos, sin, kind.layout)[0, :, 0]
        rows.append([start, start + 2, float(q @ k)])
    return Table("the score depends on the distance alone", ["query at", "key at", "q.k"], rows)


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
    ends = [
        ["mean", *(float(y.mean()) for y in (layer, rms))],
        ["variance", *(float(y.var(correction=0)) for y in (layer, rms))],
    ]
    return [Table("one token", ["x", "LayerNorm", "RMSNorm"], [*rows, *_rounded(ends)])]


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
            made = MLP(whole("width", width), gated=gated, bias=False).make(dim)
        sizes.append(["gated" if gated else "plain", parameters(made), 2 * parameters(made)])
    return [
        Table("activations", ["x", *names], list(zip(x, *curves))),
        Table(f"m = {dim}, f = {width}", ["kind", "weights", "FLOP a token"], sizes),
    ]


@topic("regard/models/vision.py::PatchEmbedding", "regard/models/vision.py::Patches")
def vit(patch: Numbers = (8.0, 14.0, 16.0, 32.0), size: int = 224, dim: int = 768) -> list[Table]:
    """How does an image become a sentence?

    x_i = W patch_i + b + position_i,   i = 1 .. (size / patch)^2;   class token in front
    Then the encoder of any text model, with nothing masked."""
    rows = []
    for side in (whole("patch", p) for p in patch):
        config = Patches(size, side)
        n = config.count + config.extra
        weights = dim * (
            config.channels * side**2 + 1 + n + config.extra
        )  # map, bias, places, extra
        rows.append([side, config.count, n, weights, n * n])
    columns = ["patch", "patches", "tokens", "weights", "pairs a head"]
    return [Table(f"images of {size} x {size}", columns, rows)]


@topic("regard/models/cells.py::elman", "regard/models/cells.py::Cell")
def rnn_path(
    x: Numbers = (0.5, 0.9, 1.0, 1.1), steps: Numbers = (1.0, 10.0, 50.0, 100.0)
) -> list[Table]:
    """What does a recurrent network still know of a word t steps back?

    h_t = tanh(W x_t + U h_{t-1});   d h_t / d h_0 = prod of diag(tanh') U  ~  lambda^t
    Attention reaches every token in one step. x: lambda, the factor of one step; by autograd through the cell at 0."""
    cell, zero = CELLS["elman"], real((0.0,))
    rows = []
    for n in (whole("steps", t, 1, 1000) for t in steps):
        found = []
        for factor in x:
            start = zero.clone()[None].requires_grad_()
            state: tuple = (start,)
            for _ in range(n):
                state = cell.step(zero[None], state, zero[None], real((factor,))[None], zero, zero)
            (slope,) = torch.autograd.grad(state[0].sum(), start)
            found.append(slope.item())
        rows.append([n, *found, n, 1])
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
    wide = F.pad(
        row, (0, -len(x) % GROUP), value=float(row[0, -1])
    )  # a weight again changes no range
    eight = pack(row, None, "int8")(torch.eye(len(x)))[:, 0]
    four = cast(Int4, pack(wide, None, "int4")).dense()[: len(x), 0].float()
    q, scale = to_fp8(row)
    eighth = (q.float() * scale)[0]
    rows = [*zip(x, spread(eight), spread(four), spread(eighth))]
    worst = ["worst error", *(float((row[0] - y).abs().max()) for y in (eight, four, eighth))]
    bits = ["bits a weight", "8", f"{4 + 32 / GROUP:g}", "8"]
    return [Table("one output's weights", ["w", "int8", "int4", "fp8"], [*rows, worst, bits])]


def _rounded(rows: list[list]) -> list[list]:
    """Without the last bits, which another machine may have otherwise."""
    return [[round(c, 12) if isinstance(c, float) else c for c in row] for row in rows]


TOPICS = (
    *(sinusoidal, rope, alibi, t5_bias, norms, feed_forward, vit, rnn_path),
    *(lora, quantisation),
)
