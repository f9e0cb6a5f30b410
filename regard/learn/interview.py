"""Questions of interviews on the Transformer, each with a derivation (interview.toml) and with numbers
that are computed when it is asked: `regard explain --interview 6`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import GQA, Context, Terms, softmax
from regard.attention.core import scores as dot_scores
from regard.block import Tower
from regard.decode.sampling import beam_search
from regard.errors import UsageError
from regard.layers import LM, MLP, Norm
from regard.learn.explain import Numbers, Table, Tables, Topic, fill, real, table
from regard.learn.mechanisms import (
    NUMBERS,
    dot_moments,
    dot_products,
    multiply_adds,
    saturation,
    softmax_jacobian,
)
from regard.mask import Causal, Full, Mask, Span, Visible
from regard.models import Tokens, TransformerConfig
from regard.models.recurrent import CELLS
from regard.position import sinusoid
from regard.training import losses

HEADS = "regard/attention/multihead.py::GroupedQueryAttention"
FULL = Full()
TEXTS = table("interview.toml")
QUESTIONS: list[Topic] = []
# Five tokens of width 4, no two alike.
X = (
    (1.0, 0.0, 0.5, -1.0),
    (0.0, 2.0, 0.0, 0.5),
    (0.5, 0.0, -1.0, 1.0),
    (1.5, 1.0, 0.0, 0.0),
    (-1.0, 0.5, 2.0, 0.5),
)


# What `moved` shows.
DOUBLED = "the last token doubled: how far each output moves"


def question(*code: str) -> Callable[[Callable[..., Tables]], Topic]:
    """A function as a question of interview.toml; its tables are the numbers."""

    def decorate(compute: Callable[..., Tables]) -> Topic:
        text = TEXTS[compute.__name__]
        number = str([*TEXTS].index(compute.__name__) + 1)
        QUESTIONS.append(Topic(number, text["asks"], text["derived"].strip(), code, {}, compute))
        return QUESTIONS[-1]

    return decorate


def asked(number: int) -> Topic:
    if not 1 <= number <= len(QUESTIONS):
        raise UsageError(f"--interview {number}: there are questions 1 to {len(QUESTIONS)}")
    return QUESTIONS[number - 1]


def listed(as_json: bool = False) -> str:
    """Every question, by number."""
    if as_json:
        return json.dumps([{"number": int(q.name), "question": q.question} for q in QUESTIONS])
    lines = [f"{each.name:>2}  {each.question}" for each in QUESTIONS]
    return "\n".join([*lines, "", "regard explain --interview N, for an answer with its numbers"])


def attended(x: Tensor, mask: Mask = FULL) -> Tensor:
    """One layer of self-attention over x (t m), its weights by the rule of `fill`."""
    layer = fill(GQA(2).make(x.shape[1]))
    return layer(x[None], Context(Span.run(0, len(x)), mask))[0]


def moved(f: Callable[[Tensor], Tensor], x: Tensor) -> list[float]:
    """How far each row of f(x) moves when the last row of x is doubled."""
    other = torch.cat([x[:-1], 2 * x[-1:]])
    return (f(other) - f(x)).abs().amax(-1).round(decimals=12).tolist()


@question(f"{HEADS}", f"{NUMBERS}::multiply_adds")
def recurrence() -> Tables:
    cell, rows, costs = CELLS["elman"], [], []
    for n in (4, 16, 64, 256):
        start = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        state: tuple = (start,)
        for _ in range(n):
            state = cell.gates(start.new_zeros(1), 0.9 * state[0], state)
        (slope,) = torch.autograd.grad(state[0].sum(), start)
        # Weights of one query on n keys that suit it equally: the worst case for a far one.
        weight = softmax(torch.zeros(n, dtype=torch.float64))[0].item()
        rows.append([n, n, slope.item(), 1, weight])
        projections, pairs = multiply_adds(GQA(1), 512, n)
        costs.append([n, 2 * n * 512**2, projections, pairs])
    columns = ["n", "RNN: steps", "d h_n/d h_0", "attention: steps", "d o_n/d v_1"]
    yield Table(
        "the way from the first word to the last, lambda = 0.9", columns, rows, "log d", "share"
    )
    columns = ["n", "RNN", "projections", "scores and sums"]
    yield Table("multiply-adds of a layer of width 512", columns, costs)


@question("regard/attention/core.py::scores", HEADS)
def roles() -> Tables:
    x = real(X)
    projections = fill(nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)]))
    q, k, v = (layer(x) for layer in projections)

    def scores(a: Tensor, b: Tensor) -> Tensor:
        return dot_scores(a[None, None], b[None, None], Terms(0.5))[0, 0]

    rows = []
    for name, s in (("W_Q = W_K", scores(k, k)), ("apart", scores(q, k))):
        unlike = (s - s.T).abs().max().item()
        rows.append([name, s[0, 1].item(), s[1, 0].item(), unlike])
    columns = ["scores", "token 1 at 2", "token 2 at 1", "largest |S - S^T|"]
    yield Table("one matrix or two", columns, rows, "bars largest")
    a = softmax(scores(q, k))
    rows = [[times, (a @ (times * v)).norm().item()] for times in (1, 2, 3)]
    yield Table("values so many times as large, by the same weights", ["times", "|o|"], rows)


@question(f"{NUMBERS}::dot_moments", f"{NUMBERS}::softmax_jacobian")
def scaled() -> Tables:
    rows = []
    for d in (1, 2, 4, 8):
        plain, divided = dot_moments(d), dot_moments(d, d**-0.5)
        rows.append([d, *(round(number, 12) for number in (*plain, divided[1]))])
    columns = ["d", "mean", "variance", "variance / sqrt(d)"]
    yield Table("all q, k in {-1, +1}^d", columns, rows, "lines variance", "mean, variance")
    rows, g = [], torch.Generator().manual_seed(0)
    for d in (16, 64, 256, 1024):
        q, k = (torch.randn(n, d, generator=g, dtype=torch.float64) for n in (200, 10))
        dots = q @ k.T
        found = []
        for s in (dots, dots * d**-0.5):
            slopes = softmax_jacobian(s).diagonal(dim1=-2, dim2=-1)
            found += [softmax(s).amax(-1).mean().item(), slopes.mean().item()]
        rows.append([d, *found])
    columns = ["d", "largest weight", "mean slope", "largest, scaled", "slope, scaled"]
    yield Table("10 keys, 200 queries, normal numbers", columns, rows)


@question("regard/mask.py::Causal", "regard/models/transformer.py::EncoderDecoder")
def three_kinds() -> Tables:
    n, m = 6, 4
    kinds: tuple[tuple[str, str, str, Mask, int, int], ...] = (
        ("encoder", "source", "source", Full(), n, n),
        ("decoder, masked", "target", "target", Causal(), m, m),
        ("cross", "target", "source", Full(), m, n),
    )
    rows = []
    for name, asks, gives, mask, queries, keys in kinds:
        seen = Visible(mask, Span.run(0, queries), Span.run(0, keys)).tensor()
        rows.append([name, asks, gives, int(seen.expand(1, 1, queries, keys).sum())])
    columns = ["attention", "Q from", "K, V from", "pairs"]
    yield Table(f"source of {n} tokens, target of {m}", columns, rows, "bars")
    found = [moved(partial(attended, mask=mask), real(X)) for mask in (Full(), Causal())]
    rows = [[i + 1, *pair] for i, pair in enumerate(zip(*found))]
    yield Table(DOUBLED, ["token", "encoder", "masked"], rows)


@question("regard/position.py::sinusoid", HEADS)
def order() -> Tables:
    x, places = real(X), torch.arange(len(X)).double()
    turn = torch.tensor([3, 0, 4, 1, 2])
    added = sinusoid(places, 4)
    rows = []
    for name, given in (("without positions", x[turn]), ("with", x[turn] + added)):
        usual = attended(x if name == "without positions" else x + added)
        unlike = (attended(given) - usual[turn]).abs().max().item()
        rows.append([name, round(unlike, 12)])
    yield Table("largest |f(P X) - P f(X)|", ["tokens", "difference"], rows, "bars")
    waves = sinusoid(torch.arange(200).double(), 64)
    speeds = sinusoid(real((1.0,)), 64)[0, 0::2].asin()
    rows = []
    for k in (0, 1, 5, 20):
        dots = [round(float(waves[p] @ waves[p + k]), 9) for p in (0, 50, 150)]
        rows.append([k, *dots, float((k * speeds).cos().sum())])
    columns = ["distance k", "p = 0", "p = 50", "p = 150", "sum cos k w_i"]
    yield Table("PE(p) . PE(p + k), d = 64", columns, rows)


@question("regard/layers.py::Norm", "regard/block.py::Block")
def add_and_norm() -> Tables:
    rows = []
    for layers in (1, 6, 24, 96):
        slopes = []
        for residual in (0, 1):
            x = start = torch.zeros((), dtype=torch.float64, requires_grad=True)
            for _ in range(layers):
                x = residual * x + torch.tanh(0.1 * x)
            slopes.append(torch.autograd.grad(x, start)[0].item())
        rows.append([layers, *slopes])
    columns = ["layers", "f(x)", "x + f(x)"]
    yield Table("gradient through layers with f' = 0.1", columns, rows, "log", "gradient")
    layer = Norm().make(4).double().requires_grad_(False)
    batch = nn.BatchNorm1d(4, affine=False).double()
    both = [moved(norm, real(X)) for norm in (layer, batch)]
    rows = [[i + 1, *pair] for i, pair in enumerate(zip(*both))]
    yield Table(DOUBLED, ["token", "LayerNorm", "BatchNorm"], rows)


@question(HEADS, f"{NUMBERS}::multiply_adds")
def several_heads() -> Tables:
    rows = []
    for h in (1, 2, 8):
        projections, pairs = multiply_adds(GQA(h), 512, 128)
        rows.append([h, 512 // h, projections, pairs])
    columns = ["heads", "d", "projections", "scores and sums"]
    yield Table("multiply-adds of one layer, m = 512, n = 128", columns, rows, "bars scores")
    v = real(((1.0, 0.0), (0.0, 3.0), (5.0, 5.0)))
    one = softmax(real((30.0, 30.0, 0.0)))
    first, second = (softmax(real(s)) for s in ((30.0, 0.0, 0.0), (0.0, 30.0, 0.0)))
    maps: list[list[Any]] = [["one head", *one.tolist(), " ".join(f"{x:.2f}" for x in one @ v)]]
    for name, a in (("head 1 of two", first), ("head 2 of two", second)):
        maps.append([name, *a.tolist(), " ".join(f"{x:.2f}" for x in a @ v)])
    yield Table("to look at the words 1 and 2", ["", "a_1", "a_2", "a_3", "o"], maps)


@question("regard/training/losses.py::teacher_forcing", "regard/training/losses.py::causal_lm_loss")
def true_words() -> Tables:
    ids = torch.tensor([[7, 3, 9, 4, 8]])
    reads, says = losses.teacher_forcing(ids)
    tower = Tower(8, 2, GQA(2), MLP(16))
    model = fill(TransformerConfig(Tokens(10), tower, LM(), max_len=8).make()).eval()
    whole = model(reads)
    rows, apart = [], 0.0
    for t in range(reads.shape[1]):
        alone = model(reads[:, : t + 1])[:, -1]
        loss = losses.masked_lm_loss(alone, says[:, t])[0].item()
        apart += loss
        unlike = (alone - whole[:, t]).abs().max().item()
        rows.append([t + 1, int(reads[0, t]), int(says[0, t]), loss, round(unlike, 12)])
    columns = ["t", "reads", "must say", "- log p, alone", "difference of logits"]
    yield Table("each beginning alone, against one pass", columns, rows, "bars -")
    total = losses.masked_lm_loss(whole, says)[0].item()
    yield Table("loss", ["one pass", f"{len(rows)} passes"], [[total, apart]])


@question("regard/decode/sampling.py::beam_search", f"{NUMBERS}::dot_products")
def side_by_side() -> Tables:
    tower = Tower(8, 1, GQA(2), MLP(16))
    model = fill(TransformerConfig(Tokens(3), tower, LM(), max_len=64).make()).eval()
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    rows, products = [], []
    for n in (1, 4, 16, 64):
        counts = []
        given = torch.arange(n)[None] % 3
        for whole in (True, False):
            passes.clear()
            if whole:
                model(given)
            else:
                # What is said so far, behind a first token.
                beam_search(lambda said: _next(model, said), 1, n)
            counts.append(len(passes))
        rows.append([n, *counts])
        products.append([n, *(dot_products(n, cached=cached) for cached in (True, False))])
    columns = ["n", "words given", "its own words"]
    yield Table("passes over n words", columns, rows, "log", "passes")
    yield Table("q.k products of a head to write n words", ["n", "cached", "not"], products)


@question("regard/layers.py::FeedForward", "regard/layers.py::MLP")
def by_position() -> Tables:
    x = real(X)
    ffn = fill(MLP(8, bias=False, activation="relu").make(4))
    attention = moved(attended, x)
    rows = [[i + 1, *pair] for i, pair in enumerate(zip(moved(ffn, x), attention))]
    yield Table(DOUBLED, ["token", "FFN", "attention"], rows)
    held = softmax(x @ x.T)
    parts: dict[str, Callable[[Tensor], Tensor]] = {
        "weights held": lambda z: held @ z,
        "no softmax": lambda z: (z @ z.T) @ z,
        "attention": lambda z: softmax(z @ z.T) @ z,
    }
    found = [[name, ((f(2 * x)).norm() / f(x).norm()).item()] for name, f in parts.items()]
    yield Table("|f(2X)| / |f(X)|", ["f", "ratio"], found, "bars")


@question(f"{NUMBERS}::softmax_jacobian", f"{NUMBERS}::saturation")
def gradient(a: Numbers = (0.0, 1.0, 5.0, 10.0, 20.0)) -> Tables:
    x = real((1.0, 2.0, 3.0))
    ours, theirs = softmax_jacobian(x), torch.autograd.functional.jacobian(softmax, x)
    step = 1e-6
    moves = step * torch.eye(3).double()
    measured = [(softmax(x + move) - softmax(x - move)) / (2 * step) for move in moves]
    rows = [
        ["autograd", float((ours - theirs).abs().max().round(decimals=12))],
        ["differences", float((ours - torch.stack(measured, 1)).abs().max().round(decimals=8))],
    ]
    yield Table("softmax(1, 2, 3): our formula against", ["", "largest difference"], rows)
    rows = []
    for each in a:
        largest = softmax_jacobian(real((each, each, 2 * each))).abs().max().item()
        logits = real((each, each, 2 * each)).requires_grad_()
        # The label is the first, which the model finds unlikely.
        (slope,) = torch.autograd.grad(F.cross_entropy(logits[None], torch.tensor([0])), logits)
        weight = saturation(real((each,))).item()
        rows.append([each, weight, largest, slope.abs().max().item()])
    columns = ["a", "weight of 2a", "largest |dp/dx|", "|d loss/dx|, wrong label"]
    yield Table("softmax([a, a, 2a])", columns, rows, "lines", "weight, slope", "a")


def _next(model: nn.Module, said: tuple[int, ...]) -> Tensor:
    """log p of the word that follows a first token and what is said."""
    return model(torch.tensor([[0, *said]]))[0, -1].log_softmax(-1)
