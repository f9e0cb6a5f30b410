"""The pictures of docs/mechanisms about positions, parts, training and decoding, each from the
library's numbers."""

from __future__ import annotations

import torch
from drawing import grids, picture, series, steps

from regard.kernels.linear import GROUP, Int4
from regard.layers import ACTIVATIONS, Norm
from regard.learn.explain import real
from regard.learn.mechanisms import batch_norm as norm_topic
from regard.learn.mechanisms import bleu as bleu_topic
from regard.learn.mechanisms import delta_rule as delta_topic
from regard.learn.mechanisms import lora as lora_topic
from regard.learn.mechanisms import mixture_of_experts as experts_topic
from regard.learn.mechanisms import multi_token_prediction as further_topic
from regard.learn.mechanisms import paged_cache as pages_topic
from regard.learn.mechanisms import resume as resume_topic
from regard.learn.mechanisms import rnn_path as path_topic
from regard.learn.mechanisms import speculation as guess_topic
from regard.learn.mechanisms import tokenizers as tokens_topic
from regard.learn.states import disentangled as distances_topic
from regard.learn.states import state_space_dual as dual_topic
from regard.models.embedding import Patches
from regard.position import Rope, T5Bias, alibi_slopes, rotate, sinusoid, t5_bucket
from regard.report import page
from regard.training.optim import Schedule

# --- positions and parts ------------------------------------------------------------------------


@picture
def sinusoidal() -> str:
    table = sinusoid(torch.arange(16), 16).tolist()
    title = "Sinusoidal vectors of 16 positions and 16 features"
    axes = "row: position, column: feature; blue -1, orange 1"
    return grids({"PE": table}, axes, title, signed=True)


@picture
def rope() -> str:
    distance = list(range(129))
    curves = []
    for base in (10000.0, 500000.0):
        cos, _ = Rope(base).angles(torch.tensor([distance]), 64, torch.float64)
        curves.append(series(f"base {base:,.0f}", distance, cos[0, :, 0].mean(-1).tolist()))
    title = "Score of two equal vectors of width 64, over their squared length"
    return page.lines(curves, title, "distance", "mean cosine")


@picture
def rope_turns() -> str:
    pos = steps(0, 24, 241)
    kind = Rope(layout="interleaved")
    cos, sin = kind.angles(torch.tensor([pos]), 4, torch.float64)
    turned = rotate(real((1.0, 0.0, 1.0, 0.0)).expand(1, len(pos), 1, 4), cos, sin, kind.layout)[
        0, :, 0
    ]
    names = {0: "pair 0, first", 1: "pair 0, second", 3: "pair 1, second"}
    curves = [series(name, pos, turned[:, i].tolist()) for i, name in names.items()]
    return page.lines(
        curves, "The vector [1, 0, 1, 0] turned to its position", "position", "number"
    )


@picture
def alibi() -> str:
    distance = list(range(129))
    slopes = alibi_slopes(8).tolist()
    curves = [
        series(f"head {h}", distance, [-slopes[h - 1] * d for d in distance]) for h in (1, 3, 5, 8)
    ]
    return page.lines(curves, "What ALiBi adds to the scores of eight heads", "distance", "bias")


@picture
def t5_buckets() -> str:
    distance = torch.arange(-160, 161)
    curves = []
    for causal in (False, True):
        found = t5_bucket(distance, T5Bias(1, causal=causal)).tolist()
        curves.append(series("causal" if causal else "both ways", distance.tolist(), found))
    return page.lines(
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
    return page.lines(curves, "One token before and after its norm", "feature", "value")


@picture
def batch_norm() -> str:
    tables = norm_topic.tables({})[:2]
    parts = {t.title: [[float(x) for x in row[1:]] for row in t.rows] for t in tables}
    axes = "row: token, column: feature; blue below 0, orange above"
    title = "The same three tokens under LayerNorm and under BatchNorm"
    return grids(parts, axes, title, most=1.7, signed=True)


@picture
def feed_forward() -> str:
    x = steps(-4, 3, 141)
    curves = [series(n, x, ACTIVATIONS[n](real(x)).tolist()) for n in ("relu", "gelu", "silu")]
    return page.lines(curves, "Activations", "x", "act(x)")


@picture
def mixture_of_experts() -> str:
    x = (0.3, 2.1, -0.4, 1.2, 0.0, -1.5, 0.9, 0.5)
    rows = experts_topic.tables({"x": x})[0].rows
    return page.bars(
        [(f"expert {row[0]}", float(row[3] or 0)) for row in rows], "Weights of one token", "weight"
    )


@picture
def delta_rule() -> str:
    given = {"k": "1 0; 0.6 0.8; 1 0; 0 1; 1 0", "v": "1; 0.5; -1; 0.5; 1"}
    rows = delta_topic.tables(given)[0].rows
    n = [float(row[0] or 0) for row in rows]
    curves = [
        series(name, n, [float(row[i] or 0) for row in rows], dots=True)
        for i, name in ((1, "delta rule"), (2, "linear attention"))
    ]
    title = "What the first key recalls; tokens 1, 3 and 5 have it, with values 1, -1, 1"
    return page.lines(curves, title, "token", "recalled")


@picture
def delta_channels() -> str:
    curves = []
    for name, key, decay in (
        ("channel 1 by itself", "1 0 0", "1 0.7 0.7"),
        ("channel 2 by itself", "0 1 0", "1 0.7 0.7"),
        ("either, one decay for the head", "1 0 0", "0.79"),
    ):
        given = {"k": f"{key}{'; 0 0 1' * 9}", "v": "1" + "; 0" * 9, "decay": decay}
        rows = delta_topic.tables(given)[0].rows
        points = [row[1] for row in rows]
        curves.append(series(name, [row[0] for row in rows], points, dots=True))
    title = "What the first key recalls: channels decay by 1, 0.7 and 0.7, or all by their mean"
    return page.lines(curves, title, "token", "recalled")


@picture
def state_space_dual() -> str:
    parts = {}
    ones = {name: "1; 1; 1; 1; 1; 1" for name in "qkv"}
    for name, step in (("steps of 1", "1"), ("step 3: 0.02", "0.02"), ("step 3: 3", "3")):
        rows = dual_topic.tables({**ones, "s": f"1 1 {step} 1 1 1"})[0].rows
        parts[name] = [[float(x) for x in row[1:]] for row in rows]
    axes = "row: reader, column: what it reads; full colour: 1 or more"
    title = "What six tokens read where all keys are alike: steps alone make the weights"
    return grids(parts, axes, title)


@picture
def disentangled() -> str:
    *terms, weights = distances_topic.tables({})[:4]
    names = ("content, content", "content, distance", "distance, content")
    parts = {
        name: [[float(x) for x in row[1:]] for row in table.rows]
        for name, table in zip((*names, "weights"), (*terms, weights))
    }
    axes = "row: query, column: key; blue below 0, orange above"
    title = "Three terms of the scores of four tokens, of which 1 and 3 are the same word"
    return grids(parts, axes, title, most=0.8, signed=True)


@picture
def paged_cache() -> str:
    apart, pages, empty = (float(x or 0) for x in pages_topic.tables({})[1].rows[0])
    rows = [("contiguous, 2,048 a row", apart), ("in pages of 16", pages), ("of them empty", empty)]
    return page.bars(rows, "Slots for texts of 40, 100 and 70 tokens, 32 of them shared", "slots")


@picture
def vit() -> str:
    rows = [(f"patch {p}", Patches(224, p).count + 1) for p in (32, 16, 14, 8)]
    return page.bars(rows, "Tokens of an image of 224 x 224, class token included", "tokens")


@picture
def rnn_path() -> str:
    n = [float(i) for i in range(1, 101)]
    rows = path_topic.tables({"x": (0.5, 0.9, 1.0), "steps": n})[0].rows
    names = ("lambda 0.5", "lambda 0.9", "lambda 1")
    curves = [
        series(name, n, [float(row[i + 1] or 0) for row in rows]) for i, name in enumerate(names)
    ]
    return page.lines(
        curves, "What is left of a state after t steps", "t", "d h_t / d h_0", log=True
    )


@picture
def lora() -> str:
    rank = tuple(float(r) for r in (1, 2, 4, 8, 16, 32, 64))
    rows = lora_topic.tables({"rank": rank, "dim": (4096.0,)})[0].rows
    found = [(f"rank {row[0]}", float(row[2] or 0)) for row in rows]
    return page.bars(found, "Trained weights of a layer of 4096 x 4096, which has 16.8M", "weights")


@picture
def quantisation() -> str:
    inner = real(steps(-1, 1, 10 * (GROUP - 2)))
    groups = [torch.cat([real((-1.0, 1.0)), inner[i::10]]).float() for i in range(10)]  # one range
    four = torch.empty(len(inner))
    for i, group in enumerate(groups):
        four[i::10] = Int4(group[None], None).dense()[2:, 0].float()
    curves = [
        series(name, inner.tolist(), y.tolist()) for name, y in (("w", inner), ("int4", four))
    ]
    return page.lines(curves, "Weights and what comes back from 4 bits", "w", "what comes back")


# --- training and decoding ----------------------------------------------------------------------


@picture
def decoding() -> str:
    logits = real([2.0 - 0.4 * i for i in range(12)])
    curves = [
        series(f"T = {t:g}", range(1, 13), (logits / t).softmax(-1).tolist(), dots=True)
        for t in (0.5, 1.0, 2.0)
    ]
    return page.lines(
        curves, "The same logits at three temperatures", "rank of the token", "probability"
    )


@picture
def speculation() -> str:
    x = tuple(steps(0, 1, 161))
    curves = []
    for k in (2, 4, 8):
        rows = guess_topic.tables({"x": x, "guesses": (k,)})[0].rows
        curves.append(series(f"{k} guesses", x, [float(row[1] or 0) for row in rows]))
    title = "Tokens that one pass writes"
    return page.lines(curves, title, "share of guesses that are right", "tokens a pass")


@picture
def multi_token_prediction() -> str:
    table = further_topic.tables({"steps": (60,)})[0]
    n = [int(row[0]) for row in table.rows]
    names = zip(table.columns[1:], zip(*(row[1:] for row in table.rows), strict=True), strict=True)
    curves = [series(name, n, [float(y) for y in ys], dots=True) for name, ys in names]
    return page.lines(curves, "A small model learns a short text", "step", "loss a token")


@picture
def tokenizers() -> str:
    rows = tokens_topic.tables({})[0].rows
    title = "Tokens of a text of 51 characters, each kind trained on it"
    return page.bars([(str(row[0]), float(row[2] or 0)) for row in rows], title, "tokens")


@picture
def schedules() -> str:
    n = list(range(1, 901, 3))
    plans = {
        "noam": Schedule("noam", 900, 100),
        "cosine": Schedule("cosine", 900, 100),
        "linear": Schedule("linear", 900, 100),
        "wsd": Schedule("wsd", 900, 100, decay=200),
    }
    curves = [series(name, n, [plan(step) for step in n]) for name, plan in plans.items()]
    return page.lines(curves, "Learning rate over its peak, warm-up of 100 steps", "step", "factor")


@picture
def bleu() -> str:
    rows = bleu_topic.tables({})[0].rows
    return page.bars([(f"{row[0]}-grams", float(row[3] or 0)) for row in rows], "Precisions", "%")


@picture
def resume() -> str:
    rows = resume_topic.tables({"steps": (12.0,)})[0].rows
    n = [float(row[0] or 0) for row in rows]
    found = {"straight": 1, "stopped after step 6": 2}
    curves = [
        series(name, n, [float(row[i] or 0) for row in rows], dots=True)
        for name, i in found.items()
    ]
    return page.lines(curves, "Loss of two runs, one of them stopped and resumed", "step", "loss")
