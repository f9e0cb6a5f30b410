"""The pictures of docs/mechanisms about attention, each from the library's own numbers."""

from __future__ import annotations

import torch
from drawing import QUERIES, Board, Matrix, grids, picture, series, steps

from regard.attention import GQA, MLA, Context, Terms, weights
from regard.attention.pooling import KERNELS, one_loop, regress
from regard.attention.scores import SCORES, make_score
from regard.attention.sparse import choose, index_scores
from regard.learn.explain import fill, real
from regard.learn.mechanisms import cache_numbers, dot_products, saturation, softmax_jacobian
from regard.learn.mechanisms import cross_attention as cross_topic
from regard.learn.mechanisms import self_attention as self_topic
from regard.learn.mechanisms import worked_masked as masked_topic
from regard.learn.picture import setups, sketch
from regard.learn.traffic import plain_bytes, tiled_bytes
from regard.mask import Causal, Full, Mask, Prefix, Span, Visible, Window
from regard.position import Rope, sinusoid
from regard.report import page

# --- one weighted sum ---------------------------------------------------------------------------


@picture
def pooling() -> str:
    q, k, v = steps(-0.5, 3.5, 161), real((0.0, 1.0, 2.0, 3.0)), real((0.0, 0.8, 0.9, 0.1))
    curves = [series(name, q, regress(real(q), k, v, name).tolist()) for name in KERNELS]
    return page.lines(curves, "Kernel regression through four points", "q", "f(q)")


@picture
def softmax() -> str:
    x = steps(-4, 4, 161)
    p = torch.stack([torch.softmax(real((0.0, 1.0, value)), -1) for value in x])
    names = ("weight of 0", "weight of 1", "weight of x")
    curves = [series(name, x, p[:, i].tolist()) for i, name in enumerate(names)]
    return page.lines(curves, "softmax([0, 1, x])", "x", "weight")


@picture
def scaling() -> str:
    a = steps(0, 10, 101)
    slopes = [softmax_jacobian(real((x, x, 2 * x))).abs().max().item() for x in a]
    curves = [
        series("weight of 2a", a, saturation(real(a)).tolist()),
        series("largest |dp/dx|", a, slopes),
    ]
    return page.lines(curves, "softmax([a, a, 2a]) as a grows", "a", "weight, slope")


@picture
def scores() -> str:
    q, k, sizes = real((0.5, -1.0, 2.0)), real((0.0, 1.0, 1.0)), steps(0, 4, 161)
    curves = []
    for name in SCORES:
        score = fill(make_score(name, 3, 3, 3))
        with torch.no_grad():
            found = [score((s * q)[None], k[None]).item() for s in sizes]
        curves.append(series(name, sizes, found))
    return page.lines(curves, "Four scores of a query that grows", "length of the query", "score")


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
    parts = {name: seen(rule, 6) for name, rule in rules.items()}
    return grids(parts, QUERIES, "What each of six queries may see of six keys: grey is hidden")


@picture
def objectives() -> str:
    rules: dict[str, Mask] = {
        "causal (GPT)": Causal(),
        "masked (BERT)": Full(),
        "prefix": Prefix(torch.tensor([3])),
    }
    parts = {name: seen(rule, 6) for name, rule in rules.items()}
    return grids(parts, QUERIES, "What a token may read of the text under each objective")


@picture
def attention() -> str:
    x, here = sinusoid(torch.arange(6), 8)[None, None], Span.run(0, 6)
    found = {}
    for name, rule in {"all keys": Full(), "under the look-ahead mask": Causal()}.items():
        a = weights(x, x, Visible(rule, here, here).tensor(), Terms(8**-0.5))
        found[name] = a[0, 0].tolist()
    title = "softmax(q.k / sqrt(d)) of six queries over six keys; each row sums to 1"
    return grids(found, QUERIES, title)


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
    return page.lines(curves, "Scores 1, 3, 2, 4, 0 and values 1 to 5, key by key", "key", "so far")


@picture
def flash_attention() -> str:
    n, d, sides = 1024, 64, list(range(32, 257, 16))
    found = {
        "plain": [plain_bytes(n, d)[0] for _ in sides],
        "tiles": [tiled_bytes(n, d, (b, b), causal=False)[0] for b in sides],
        "tiles, causal": [tiled_bytes(n, d, (b, b), causal=True)[0] for b in sides],
    }
    curves = [series(n, sides, [x / 1e6 for x in xs], dots=True) for n, xs in found.items()]
    title = "One head of 1,024 tokens, 64 wide, forward in float32"
    return page.lines(curves, title, "side of a tile", "MB read and written")


# --- the whole Transformer --------------------------------------------------------------------------


def architecture(title: str, *wanted: str) -> str:
    sizes = {"layers": 6, "dim": 512, "heads": 8, "width": 2048}
    board = Board(title)
    sketch(board, {name: each for name, each in setups(sizes).items() if name[:4] in wanted})
    return board.text


@picture
def transformer() -> str:
    title = "The Transformer of 2017: an encoder of six layers, and a decoder of six that reads it"
    return architecture(title, "2017")


@picture
def set_ups() -> str:
    title = "One tower alone: GPT, whose tokens see the past, and BERT, whose tokens see everything"
    return architecture(title, "GPT:", "BERT")


@picture
def self_attention() -> str:
    tables = self_topic.tables({})[:2]
    parts = {t.title: [[float(x) for x in row[1:]] for row in t.rows] for t in tables}
    return grids(parts, QUERIES, "Weights of two heads of one layer over the same three tokens")


@picture
def worked() -> str:
    tables = masked_topic.tables({})
    parts = {
        n: [list(row[1:]) for row in tables[i].rows]
        for n, i in (("divided by 2", 4), ("weights", 6))
    }
    return grids(parts, QUERIES, "Four tokens: scores, and the weights under the mask", most=1.6)


# --- layers of attention ------------------------------------------------------------------------


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
    return grids({f"head {i}": a[i].tolist() for i in range(4)}, QUERIES, title)


@picture
def cross_attention() -> str:
    table = cross_topic.tables({"k": (1.0, 0.5, -3.0, 2.0, 0.0, -4.0, 4.0, 4.0, 2.0, -1.0)})[0]
    matrix = [[float(cell or 0) for cell in row[1:]] for row in table.rows]
    title = "Weights of two target tokens over five source tokens; each row sums to 1"
    axes = "row: target token, column: source token"
    return grids({"weights": matrix}, axes, title, most=max(map(max, matrix)))


@picture
def gqa() -> str:
    rows = [(f"g = {g}", cache_numbers(GQA(32, g, 128), 4096)) for g in (32, 8, 4, 2, 1)]
    return page.bars(rows, "Cache of one token and layer, 32 query heads of 128", "numbers")


@picture
def mla() -> str:
    latent = MLA(128, 512, 128, 64, query_latent=1536, rope=Rope())
    kinds: dict[str, GQA | MLA] = {
        "MHA": GQA(128, None, 128),
        "GQA, g = 8": GQA(128, 8, 128),
        "MLA": latent,
    }
    kinds |= {"GQA, g = 2": GQA(128, 2, 128), "MQA": GQA(128, 1, 128)}
    rows = [(name, cache_numbers(kind, 7168)) for name, kind in kinds.items()]
    return page.bars(rows, "Cache of one token and layer at DeepSeek-V3's sizes", "numbers")


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
    return grids(
        parts, QUERIES, "Twelve queries score the keys before them and choose four of them"
    )


@picture
def kv_cache() -> str:
    n = [1, *range(16, 4097, 16)]
    found = {
        f"{w} cache": [dot_products(t, cached=w == "with") for t in n] for w in ("with", "without")
    }
    curves = [series(name, n, values) for name, values in found.items()]
    title = "Products of query and key to write n tokens, one head"
    return page.lines(curves, title, "tokens", "products", log=True)
