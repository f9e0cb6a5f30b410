"""Kernel regression, the scores and the loops are attention in other words."""

import pytest
import torch
from torch import Tensor

from regard.attention import GQA, attend
from regard.attention.core import Terms
from regard.attention.online import online
from regard.attention.pooling import (
    kernel_weights,
    one_loop,
    per_token,
    pool,
    regress,
    three_loops,
    two_loops,
)
from regard.attention.scores import SCORES, Bilinear, Dot, ScaledDot, make_score
from tests.laws.mechanisms import DIM, TIGHT, context, layer


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, **TIGHT)


@pytest.mark.parametrize("width", [1.0, 0.3])
def test_nadaraya_watson_with_the_gaussian_kernel_is_softmax_of_squared_distance(
    width: float,
) -> None:
    q, k, v = (torch.randn(n, d).double() for n, d in ((5, 3), (7, 3), (7, 2)))
    u = torch.cdist(q, k) / width
    mass = torch.exp(-u.square() / 2)
    close(kernel_weights(q, k, width=width), mass / mass.sum(-1, keepdim=True))
    close(regress(q, k, v, width=width), (-u.square() / 2).softmax(-1) @ v)


def test_nadaraya_watson_is_attend_with_a_distance_score() -> None:
    q, k, v = (torch.randn(n, d).double() for n, d in ((5, 3), (7, 3), (7, 2)))

    def score(q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / 2

    ours = attend(q[None, :, None], k[None, :, None], v[None, :, None], score=score)
    close(ours[0, :, 0], regress(q, k, v))


def test_nadaraya_watson_on_keys_of_one_length_is_dot_attention() -> None:
    """-|q - k|^2 / 2 = q.k - (|q|^2 + |k|^2) / 2, and the softmax does not see what all keys share."""
    q, k, v = (torch.randn(n, d).double() for n, d in ((5, 3), (7, 3), (7, 2)))
    k = torch.nn.functional.normalize(k, dim=-1)
    close(regress(q, k, v), pool(Dot()(q, k), v))


def test_bilinear_with_the_identity_is_dot() -> None:
    bilinear, (q, k) = Bilinear(4, 4).double(), (torch.randn(2, 3, n, 4).double() for n in (5, 6))
    with torch.no_grad():
        bilinear.weight.copy_(torch.eye(4))
    assert torch.equal(bilinear(q, k), Dot()(q, k))


def test_scaled_dot_is_what_attend_does_without_a_score() -> None:
    q, k, v = (torch.randn(2, n, 3, 4).double() for n in (5, 6, 6))
    close(attend(q, k, v, score=ScaledDot()), attend(q, k, v))


@pytest.mark.parametrize("name", SCORES)
def test_score_inside_attend_is_pooling_by_it(name: str) -> None:
    score = make_score(name, 4, 4, 8).double()
    q, k, v = (torch.randn(2, n, 3, 4).double() for n in (5, 6, 6))
    want = pool(score(*(x.transpose(1, 2) for x in (q, k))), v.transpose(1, 2))
    close(attend(q, k, v, score=score).transpose(1, 2), want)


@pytest.mark.parametrize("block", [1, 3, 8])
def test_loops_are_all_the_stable_softmax(block: int) -> None:
    x, v = torch.randn(8).double() * 30, torch.randn(8, 3).double()
    want = x.softmax(-1)
    close(three_loops(x)[0], want)
    close(two_loops(x)[0], want)
    close(one_loop(x, v, block)[0], want @ v)
    q, keys = torch.ones(1, 1, 1, 1).double(), x[None, None, :, None]
    close(online(q, keys, v[None, None], None, Terms(1.0), (1, block))[0, 0, 0], want @ v)


def test_per_token_equations_equal_the_layer() -> None:
    """One head, output projection the identity."""
    head, x = layer(GQA(1)), torch.randn(1, 6, DIM).double()
    with torch.no_grad():
        head.wo.weight.copy_(torch.eye(DIM))
    w = [p.weight.T for p in (head.wq, head.wk, head.wv)]
    close(head(x, context(6))[0], per_token(x[0], *w))
