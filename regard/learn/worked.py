"""Worked numbers, step by step: a head under the look-ahead mask, cross-attention, feed-forward,
embeddings with positions, add and norm, greedy decoding. (Two queries over two keys: the topic
attention.)"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.decode.sampling import beam_search, greedy
from regard.errors import UsageError
from regard.layers import ACTIVATIONS, Norm
from regard.learn.explain import Matrix, Numbers, Table, Tables, positive, real, rows_of, topic
from regard.learn.mechanisms import grid, steps
from regard.mask import Causal
from regard.position import sinusoid

HEADS = "regard/attention/multihead.py"


def projected(x: Tensor, **weights: Matrix) -> list[Tensor]:
    """x W^T for each W, which is stored (out, in)."""
    return [x @ rows_of(name, w, width=x.shape[1]).T for name, w in weights.items()]


def many(name: str, x: Matrix | Numbers, like: Tensor) -> Tensor:
    """Numbers in rows as those of `like`, and as many."""
    given = torch.atleast_2d(real(x))
    if given.shape != like.shape:
        size, wanted = (" x ".join(map(str, each.shape)) for each in (given, like))
        raise UsageError(f"--{name} is {size}, but {wanted} fits the rest (semicolons divide rows)")
    return given


SQUARE = (
    (0.1, 0.3, 0.5, 0.2), (0.2, 0.4, 0.6, 0.1), (0.7, 0.1, 0.8, 0.3), (0.6, 0.2, 0.4, 0.5),
)  # fmt: skip


@topic(f"{HEADS}::GroupedQueryAttention", "regard/mask.py::Causal")
def worked_masked(
    x: Matrix = ((0.5, 0.1, 0.2, 0.3), (0.4, 0.3, 0.7, 0.8), (0.6, 0.8, 0.1, 0.9), (0.2, 0.4, 0.6, 0.5)),
    wq: Matrix = SQUARE,
    wk: Matrix = SQUARE,
    wv: Matrix = SQUARE,
) -> Tables:  # fmt: skip
    """What does the look-ahead mask do to one head over four tokens, in numbers?

    Q = X W_Q^T,   K = X W_K^T,   V = X W_V^T;   weights = softmax(Q K^T / sqrt(d) + mask), mask 0 or -inf
    The first token sees itself alone, so its output is its own value. Weights are stored (out, in)."""
    q, k, v = projected(torch.atleast_2d(real(x)), wq=wq, wk=wk, wv=wv)
    for name, each in {"Q": q, "K": k, "V": v}.items():
        yield grid(name, each, "token", f"{name.lower()}_")
    yield from steps(q, many("wk", k.tolist(), q), v, Causal())


@topic(f"{HEADS}::GroupedQueryAttention.entries")
def worked_cross(
    x: Matrix = ((0.2, 0.5, 0.1), (0.7, 0.1, 0.9)),
    k: Matrix = ((0.3, 0.8, 0.5), (0.1, 0.2, 0.4)),
    v: Matrix = ((0.9, 1.2, 0.6), (0.5, 0.4, 0.9)),
    wq: Matrix = ((0.1, 0.3, 0.2), (0.2, 0.4, 0.6)),
    wk: Matrix = ((0.5, 0.1, 0.3), (0.4, 0.7, 0.2)),
    wv: Matrix = ((0.2, 0.6, 0.3), (0.8, 0.2, 0.4)),
    head: Matrix = ((0.72, 1.01), (0.65, 1.12)),
    wo: Matrix = ((0.3, 0.6, 0.4, 0.9), (0.7, 0.2, 0.5, 0.8)),
) -> Tables:
    """How does a decoder with its own W's read an encoder, in numbers?

    Q = X W_Q^T from the decoder,   K = M W_K^T and V = M' W_V^T from the encoder;   output [head_1 head_2] W_O^T
    x: decoder states; k, v: what keys and values are made from (in a model, the same states); head: the second
    head, as given. Weights are stored (out, in)."""
    states = torch.atleast_2d(real(x))
    source = rows_of("k", k, width=states.shape[1])
    (q,), (keys,) = projected(states, wq=wq), projected(source, wk=wk)
    (values,) = projected(many("v", v, source), wv=wv)
    yield grid("Q, from the decoder", q, "target", "q_")
    yield grid("K, from the encoder", keys, "source", "k_")
    yield grid("V, from the encoder", values, "source", "v_")
    found = list(steps(q, keys, values))
    yield from found
    first = real([row[1:] for row in found[-1].rows])
    joined = torch.cat([first, many("head", head, first)], -1)
    yield grid("heads joined", joined, "target", "")
    yield grid("projected by W_O", *projected(joined, wo=wo), "target", "o_")


@topic("regard/layers.py::FeedForward")
def worked_feed_forward(
    x: Matrix = ((0.5, -0.3, 0.1), (-0.2, 0.8, 0.3)),
    w1: Matrix = ((0.5, 0.4, 0.3), (0.2, -0.1, 0.7)),
    b1: Numbers = (0.1, 0.1),
    w2: Matrix = ((0.1, 0.6), (-0.3, 0.2)),
    b2: Numbers = (0.05, 0.05),
) -> Tables:
    """What does a feed-forward do to two tokens, in numbers?

    h = x W_1^T + b_1;   r = max(0, h);   output = r W_2^T + b_2
    Each token on its own. Weights are stored (out, in). In a model W_2 leads back to the width of x."""
    (before,) = projected(torch.atleast_2d(real(x)), w1=w1)
    before = before + many("b1", b1, before[:1])
    after = ACTIVATIONS["relu"](before)
    (out,) = projected(after, w2=w2)
    yield grid("h, before the ReLU", before, "token", "h_")
    yield grid("r, after it", after, "token", "r_")
    yield grid("output", out + many("b2", b2, out[:1]), "token", "o_", "map")


@topic("regard/position.py::sinusoid", "regard/position.py::PositionVectors")
def worked_embedding(
    x: Matrix = ((0.2, 0.1, 0.3, 0.4), (0.5, 0.4, 0.3, 0.2), (0.9, 0.8, 0.7, 0.6), (0.1, 0.2, 0.3, 0.4)),
    base: float = 10000.0,
) -> Tables:  # fmt: skip
    """What enters the first layer: embeddings and positions, in numbers?

    x_p = embedding_p + PE(p);   in the paper of 2017 sqrt(d) embedding_p + PE(p)
    x: one embedding for each token. Each pair of features has its own speed: only the first turns at 1."""
    given = torch.atleast_2d(real(x))
    root = given.shape[1] ** 0.5
    places = sinusoid(torch.arange(len(given)).double(), given.shape[1], positive("base", base))
    yield grid("positions PE", places, "token", "feature ", "map")
    yield grid("embedding + PE", given + places, "token", "feature ", "map")
    yield grid(f"{root:.4g} embedding + PE", root * given + places, "token", "feature ")


@topic("regard/block.py::Block.around", "regard/layers.py::Norm")
def worked_norm(x: Numbers = (2.0, 4.0), y: Numbers = (1.0, 3.0), eps: float = 1e-5) -> Tables:
    """What do add and norm do to one token, in numbers?

    z = x + f(x);   LayerNorm(z) = (z - mean) / sqrt(var + eps)
    x: what enters; y: what the sub-layer f gives. The variance is divided by n, not by n - 1."""
    if len(x) != len(y):
        raise UsageError(f"--x has {len(x)} numbers and --y {len(y)}; give as many of both")
    z = real(x) + real(y)
    with torch.no_grad():
        normed = [Norm(eps, rms=rms).make(len(x)).double()(z).tolist() for rms in (False, True)]
    mean, variance = z.mean().item(), z.var(correction=0).item()
    columns = ["x", "f(x)", "z", "LayerNorm(z)", "RMSNorm(z)"]
    title = f"mean {mean:.4g}, variance {variance:.4g}"
    yield Table(title, columns, list(zip(x, y, z.tolist(), *normed)), "lines z")


@topic("regard/decode/sampling.py::greedy", "regard/decode/sampling.py::beam_search")
def worked_greedy(
    x: Matrix = (
        (0.8, 0.05, 0.05, 0.05, 0.05),
        (0.1, 0.7, 0.1, 0.05, 0.05),
        (0.05, 0.05, 0.85, 0.03, 0.02),
        (0.02, 0.03, 0.1, 0.85, 0.01),
        (0.01, 0.01, 0.01, 0.02, 0.95),
    ),
    text: str = "the cat sat on <END>",
) -> Tables:
    """How does greedy decoding write a text of five steps, in numbers?

    y_t = argmax over v of p(v | y_<t);   p(text) = product of p(y_t | y_<t)
    x: one row of probabilities a step, each divided by its sum; text: the vocabulary, whose last word ends.
    One pass of the model for each token. Of equal ones the first is taken."""
    words = text.split()
    given = rows_of("x", x, width=max(len(words), 1))
    if bool((given < 0).any()) or not bool((given.sum(-1) > 0).all()):
        raise UsageError("--x are probabilities: numbers from 0, and a sum above 0 in each row")
    rows = given / given.sum(-1, keepdim=True)
    ((ids, total),) = beam_search(lambda done: rows[len(done)].log(), 1, len(rows), len(words) - 1)
    said = [[t, *rows[t].tolist(), words[int(greedy(rows[t]))]] for t in range(len(ids))]
    yield Table("each step", ["t", *words, "chosen"], said, "map")
    told = " ".join(words[i] for i in ids if i != len(words) - 1)
    yield Table("the whole", ["text", "log p", "p"], [[told, total, real((total,)).exp().item()]])
