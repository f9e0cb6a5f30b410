"""The pictures of docs/mechanisms, as SVG by regard/look/svg.py: each from the library's own numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from regard.attention import GQA, MLA, Context, Terms, weights
from regard.attention.pooling import KERNELS, one_loop, regress
from regard.attention.scores import SCORES, make_score
from regard.attention.select import choose, index_scores
from regard.commands.explain_learn import bleu as bleu_topic
from regard.commands.explain_learn import resume as resume_topic
from regard.kernels.linear import GROUP, pack
from regard.layers import ACTIVATIONS, Norm
from regard.look import svg
from regard.look.numbers import cache_numbers, dot_products, saturation, softmax_jacobian
from regard.look.topics import fill, real
from regard.look.topics_heads import cross_attention as cross_topic
from regard.look.topics_parts import lora as lora_topic
from regard.look.topics_parts import rnn_path as path_topic
from regard.mask import Causal, Full, Mask, Prefix, Span, Visible, Window
from regard.models.vision import Patches
from regard.position import Rope, T5Bias, alibi_slopes, rotate, sinusoid, t5_bucket
from regard.train.schedule import Schedule

CELL = 22
Matrix = Sequence[Sequence[float]]
PICTURES: dict[str, Callable[[], str]] = {}


def draw(name: str) -> str:
    """The picture with colours for a light and a dark page of its own, as it stands alone."""
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{ color: #e6e6e6; {svg.colours(svg.DARK)} }} }}"
    style = f"<style>svg {{ color: #1c1c1c; {svg.colours(svg.LIGHT)} }} {dark}</style>"
    text = PICTURES[name]()
    return text.replace("</title>", f"</title>{style}", 1) + "\n"


def picture(make: Callable[[], str]) -> Callable[[], str]:
    PICTURES[make.__name__.replace("_", "-")] = make
    return make


def series(
    name: str, xs: Sequence[float], ys: Sequence[float], *, dots: bool = False
) -> svg.Series:
    return svg.Series(name, list(zip(xs, ys)), dots=dots)


def grids(parts: dict[str, Matrix], title: str, *, low: float = 0.0, high: float = 1.0) -> str:
    """Small matrices side by side under their names, cells dark to bright from low to high."""
    pieces, left, tall = [], 8.0, 0.0
    for name, matrix in parts.items():
        wide = max(CELL * len(matrix[0]), int(svg.LETTER * len(name)))
        pieces.append(svg._text(left, 16, name, "start"))
        for i, row in enumerate(matrix):
            for j, value in enumerate(row):
                red, green, blue = svg.shade((value - low) / (high - low))
                place = f'x="{left + CELL * j:.0f}" y="{24 + CELL * i}" width="{CELL - 1}" height="{CELL - 1}"'
                pieces.append(f'<rect {place} fill="#{red:02x}{green:02x}{blue:02x}"/>')
        left, tall = left + wide + 18, max(tall, 24 + CELL * len(matrix))
    return svg._svg(left, tall + 8, title, pieces)


def steps(low: float, high: float, count: int) -> list[float]:
    return torch.linspace(low, high, count, dtype=torch.float64).tolist()


# --- one weighted sum ---------------------------------------------------------------------------------------------


@picture
def pooling() -> str:
    q, k, v = steps(-0.5, 3.5, 161), real((0.0, 1.0, 2.0, 3.0)), real((0.0, 0.8, 0.9, 0.1))
    curves = [series(name, q, regress(real(q), k, v, name).tolist()) for name in KERNELS]
    data = series("data", k.tolist(), v.tolist(), dots=True)
    return svg.lines([*curves, data], "Kernel regression through four points", "q", "f(q)")


@picture
def softmax() -> str:
    x = steps(-4, 4, 81)
    p = torch.stack([torch.softmax(real((0.0, 1.0, value)), -1) for value in x])
    names = ("weight of 0", "weight of 1", "weight of x")
    curves = [series(name, x, p[:, i].tolist()) for i, name in enumerate(names)]
    return svg.lines(curves, "softmax([0, 1, x])", "x", "weight")


@picture
def scaling() -> str:
    a = steps(0, 10, 101)
    slopes = [softmax_jacobian(real((x, x, 2 * x))).abs().max().item() for x in a]
    curves = [
        series("weight of 2a", a, saturation(real(a)).tolist()),
        series("largest |dp/dx|", a, slopes),
    ]
    return svg.lines(curves, "softmax([a, a, 2a]) as a grows", "a")


@picture
def scores() -> str:
    q, k, sizes = real((0.5, -1.0, 2.0)), real((0.0, 1.0, 1.0)), steps(0, 4, 41)
    curves = []
    for name in SCORES:
        score = fill(make_score(name, 3, 3, 3))
        with torch.no_grad():
            found = [score((s * q)[None], k[None]).item() for s in sizes]
        curves.append(series(name, sizes, found))
    return svg.lines(curves, "Four scores of a query that grows", "length of the query", "score")


def seen(mask: Mask, n: int) -> Matrix:
    return Visible(mask, Span.run(0, n), Span.run(0, n)).tensor()[0, 0].double().tolist()


@picture
def masks() -> str:
    rules: dict[str, Mask] = {
        "full": Full(),
        "causal": Causal(),
        "window 3": Causal() & Window(3),
        "prefix 3": Prefix(torch.tensor([3])),
    }
    title = "What each of six queries (rows) may see of six keys (columns): bright is visible"
    return grids({name: seen(rule, 6) for name, rule in rules.items()}, title)


@picture
def objectives() -> str:
    rules: dict[str, Mask] = {
        "causal (GPT)": Causal(),
        "masked (BERT)": Full(),
        "prefix": Prefix(torch.tensor([3])),
    }
    title = "What a token (row) may read of the text (columns) under each objective"
    return grids({name: seen(rule, 6) for name, rule in rules.items()}, title)


@picture
def online_softmax() -> str:
    x, v = real((1.0, 3.0, 2.0, 4.0, 0.0)), real((1.0, 2.0, 3.0, 4.0, 5.0))[:, None]
    _, trace = one_loop(x, v)
    keys = list(range(1, 6))
    found = {
        "maximum m": [s.m for s in trace],
        "sum d": [s.d for s in trace],
        "output o": [s.o.item() for s in trace if s.o is not None],
    }
    curves = [series(name, keys, values, dots=True) for name, values in found.items()]
    return svg.lines(curves, "Scores 1, 3, 2, 4, 0 and values 1 to 5, key by key", "key")


# --- layers of attention ------------------------------------------------------------------------------------------


@picture
def multi_head() -> str:
    layer = fill(GQA(4).make(16))
    x = sinusoid(torch.arange(7), 16)[None]
    ctx = Context(Span.run(0, 7), Causal())
    with torch.no_grad():
        q, k = layer.queries(x, ctx), layer.entries(x, ctx)["k"]
        mask = Visible(Causal(), Span.run(0, 7), Span.run(0, 7)).tensor()
        a = weights(q.transpose(1, 2), k.transpose(1, 2), mask, Terms(layer.scale))[0]
    title = "Weights of four heads of one layer over the same seven tokens"
    return grids({f"head {i}": a[i].tolist() for i in range(4)}, title)


@picture
def cross_attention() -> str:
    table = cross_topic.tables({"k": (1.0, 0.5, -3.0, 2.0, 0.0, -4.0, 4.0, 4.0, 2.0, -1.0)})[0]
    matrix = [[float(cell or 0) for cell in row[1:]] for row in table.rows]
    title = "Two target tokens (rows) over five source tokens (columns); each row sums to 1"
    return grids({"source": matrix}, title, high=max(map(max, matrix)))


@picture
def gqa() -> str:
    rows = [(f"g = {g}", cache_numbers(GQA(32, g, 128), 4096)) for g in (32, 8, 4, 2, 1)]
    return svg.bars(rows, "Cache of one token and layer, 32 query heads of 128", "numbers")


@picture
def mla() -> str:
    latent = MLA(128, 512, 128, 64, query_latent=1536, rope=Rope())
    kinds = {"MHA": GQA(128, None, 128), "GQA, g = 8": GQA(128, 8, 128), "MLA": latent}
    kinds |= {"GQA, g = 2": GQA(128, 2, 128), "MQA": GQA(128, 1, 128)}
    rows = [(name, cache_numbers(kind, 7168)) for name, kind in kinds.items()]
    return svg.bars(rows, "Cache of one token and layer at DeepSeek-V3's sizes", "numbers")


@picture
def dsa() -> str:
    n, heads, k = 12, 2, 4
    i, j, s = torch.meshgrid(*(torch.arange(x) for x in (n, heads, n)), indexing="ij")
    dots = ((7 * i + 5 * s + 3 * j + i * s) % 13 - 6).double() / 6  # t H s
    index = index_scores(dots[None], real((0.84, 0.55)).expand(1, n, heads))[0]
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    hidden = index.masked_fill(~visible, -torch.inf)
    chosen = torch.zeros(n, n).scatter(-1, choose(hidden, k), 1.0) * visible
    parts = {
        "index score": index.masked_fill(~visible, 0.0).tolist(),
        "the 4 chosen": chosen.tolist(),
    }
    return grids(parts, "Twelve queries (rows) score the keys before them and choose four of them")


@picture
def kv_cache() -> str:
    n = [2**i for i in range(1, 13)]
    found = {
        f"{w} cache": [dot_products(t, cached=w == "with") for t in n] for w in ("with", "without")
    }
    curves = [series(name, n, values) for name, values in found.items()]
    title = "Products of query and key to write n tokens, one head"
    return svg.lines(curves, title, "tokens", "products", log=True)


# --- positions and parts ------------------------------------------------------------------------------------------


@picture
def sinusoidal() -> str:
    table = sinusoid(torch.arange(16), 16).tolist()
    title = "Sinusoidal vectors: 16 positions (rows), 16 features (columns), dark -1 to bright 1"
    return grids({"PE": table}, title, low=-1.0)


@picture
def rope() -> str:
    distance = list(range(129))
    curves = []
    for base in (10000.0, 500000.0):
        cos, _ = Rope(base).angles(torch.tensor([distance]), 64, torch.float64)
        curves.append(series(f"base {base:,.0f}", distance, cos[0, :, 0].mean(-1).tolist()))
    title = "Score of two equal vectors of width 64, over their squared length"
    return svg.lines(curves, title, "distance", "mean cosine")


@picture
def rope_turns() -> str:
    pos = list(range(25))
    kind = Rope(layout="interleaved")
    cos, sin = kind.angles(torch.tensor([pos]), 4, torch.float64)
    turned = rotate(real((1.0, 0.0, 1.0, 0.0)).expand(1, 25, 1, 4), cos, sin, kind.layout)[0, :, 0]
    names = {0: "pair 0, first", 1: "pair 0, second", 3: "pair 1, second"}
    curves = [series(name, pos, turned[:, i].tolist()) for i, name in names.items()]
    return svg.lines(curves, "The vector [1, 0, 1, 0] turned to its position", "position")


@picture
def alibi() -> str:
    distance = list(range(33))
    slopes = alibi_slopes(8).tolist()
    curves = [
        series(f"head {h}", distance, [-slopes[h - 1] * d for d in distance]) for h in (1, 3, 5, 8)
    ]
    return svg.lines(curves, "What ALiBi adds to the scores of eight heads", "distance", "bias")


@picture
def t5_buckets() -> str:
    distance = torch.arange(-160, 161)
    curves = []
    for causal in (False, True):
        found = t5_bucket(distance, T5Bias(1, causal=causal)).tolist()
        curves.append(series("causal" if causal else "both ways", distance.tolist(), found))
    return svg.lines(
        curves, "Buckets of T5's relative bias", "key position - query position", "bucket"
    )


@picture
def norms() -> str:
    x = real((1.0, 2.0, 3.0, 6.0, 4.0, 2.0))
    with torch.no_grad():
        made = {
            n: Norm(rms=r).make(6).double()(x) for n, r in (("LayerNorm", False), ("RMSNorm", True))
        }
    curves = [series(n, range(1, 7), y.tolist(), dots=True) for n, y in {"x": x, **made}.items()]
    return svg.lines(curves, "One token before and after its norm", "feature")


@picture
def feed_forward() -> str:
    x = steps(-4, 3, 141)
    curves = [series(n, x, ACTIVATIONS[n](real(x)).tolist()) for n in ("relu", "gelu", "silu")]
    return svg.lines(curves, "Activations", "x", "act(x)")


@picture
def vit() -> str:
    rows = [(f"patch {p}", Patches(224, p).count + 1) for p in (32, 16, 14, 8)]
    return svg.bars(rows, "Tokens of an image of 224 x 224, class token included", "tokens")


@picture
def rnn_path() -> str:
    n = [1.0, *(float(i) for i in range(10, 101, 10))]
    rows = path_topic.tables({"x": (0.5, 0.9, 1.0), "steps": n})[0].rows
    names = ("lambda 0.5", "lambda 0.9", "lambda 1")
    curves = [
        series(name, n, [float(row[i + 1] or 0) for row in rows]) for i, name in enumerate(names)
    ]
    return svg.lines(
        curves, "What is left of a state after t steps", "t", "d h_t / d h_0", log=True
    )


@picture
def lora() -> str:
    rank = tuple(float(r) for r in (1, 2, 4, 8, 16, 32, 64))
    rows = lora_topic.tables({"rank": rank, "dim": (4096.0,)})[0].rows
    found = [(f"rank {row[0]}", float(row[2] or 0)) for row in rows]
    return svg.bars(found, "Trained weights of a layer of 4096 x 4096, which has 16.8M", "weights")


@picture
def quantisation() -> str:
    x = steps(-1, 1, 10 * GROUP)
    row = torch.tensor(x)
    back = [pack(torch.cat([row[i::10], row[i::10]])[None], None, "int4") for i in range(10)]
    four = torch.empty_like(row)
    for i, layer in enumerate(back):
        four[i::10] = layer.dense()[:GROUP, 0].float()  # type: ignore[operator]
    curves = [series("w", x, x), series("int4", x, four.tolist())]
    return svg.lines(curves, "Weights and what comes back from 4 bits", "w", "")


# --- training and decoding ----------------------------------------------------------------------------------------


@picture
def decoding() -> str:
    logits = real([2.0 - 0.4 * i for i in range(12)])
    curves = [
        series(f"T = {t:g}", range(1, 13), (logits / t).softmax(-1).tolist(), dots=True)
        for t in (0.5, 1.0, 2.0)
    ]
    return svg.lines(
        curves, "The same logits at three temperatures", "rank of the token", "probability"
    )


@picture
def schedules() -> str:
    n = list(range(1, 1001, 3))
    plans = {
        "noam": Schedule("noam", 1000, 100),
        "cosine": Schedule("cosine", 1000, 100),
        "linear": Schedule("linear", 1000, 100),
        "wsd": Schedule("wsd", 1000, 100, decay=200),
    }
    curves = [series(name, n, [plan(step) for step in n]) for name, plan in plans.items()]
    return svg.lines(curves, "Learning rate over its peak, warm-up of 100 steps", "step", "factor")


@picture
def bleu() -> str:
    rows = bleu_topic.tables({})[0].rows
    return svg.bars([(f"{row[0]}-grams", float(row[3] or 0)) for row in rows], "Precisions", "%")


@picture
def resume() -> str:
    rows = resume_topic.tables({"steps": (12.0,)})[0].rows
    n = [float(row[0] or 0) for row in rows]
    found = {"straight": 1, "stopped after step 6": 2}
    curves = [series(name, n, [float(row[i] or 0) for row in rows]) for name, i in found.items()]
    return svg.lines(curves, "Loss of two runs, one of them stopped and resumed", "step", "loss")
