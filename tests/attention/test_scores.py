"""The four scores, alone and inside attend."""

import pytest
import torch
from torch.testing import assert_close

from regard.attention.core import attend
from regard.attention.scores import READS, SCORES, Additive, Bilinear, Dot, ScaledDot, make_score
from regard.errors import UsageError

H = torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64)
K = torch.tensor([[1.0, 0.5, -0.5]], dtype=torch.float64)


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_dot_and_scaled_dot_give_the_worked_numbers():
    assert Dot()(H, K).item() == pytest.approx(-1.0)
    assert ScaledDot()(H, K).item() == pytest.approx(-0.5773502692)


def test_bilinear_gives_the_worked_number():
    score = Bilinear(3, 3)
    score.weight.data = matrix([0.1, 0.2, 0.0], [-0.3, 0.4, 0.5], [0.6, 0.0, -0.2])
    assert score(H, K).item() == pytest.approx(1.85)


def test_additive_gives_the_worked_number():
    score = Additive(3, 3, 3)
    score.wq.weight.data = matrix([0.2, -0.1, 0.3], [0.0, 0.5, -0.4], [0.7, 0.1, 0.2])
    score.wk.weight.data = matrix([0.1, 0.0, -0.2], [0.3, 0.3, 0.1], [-0.5, 0.2, 0.4])
    score.wv.data = matrix(0.6, -0.4, 0.5)
    assert score(H, K).item() == pytest.approx(0.7684548291)


def test_bilinear_with_identity_is_dot():
    score = Bilinear(4, 4)
    score.weight.data = torch.eye(4)
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4)
    assert_close(score(q, k), Dot()(q, k))


def test_scaled_dot_is_what_attend_does_alone():
    q, k, v = torch.randn(2, 5, 3, 4), torch.randn(2, 6, 3, 4), torch.randn(2, 6, 3, 7)
    assert_close(attend(q, k, v, score=ScaledDot()), attend(q, k, v))


@pytest.mark.parametrize("name", SCORES)
def test_score_in_attend_weighs_the_values(name):
    q, k, v = torch.randn(2, 5, 3, 4), torch.randn(2, 6, 3, 4), torch.randn(2, 6, 3, 7)
    score = make_score(name, 4, 4, 8)
    weights = torch.softmax(score(q.transpose(1, 2), k.transpose(1, 2)), -1)
    assert_close(attend(q, k, v, score=score), torch.einsum("bhts,bshe->bthe", weights, v))


@pytest.mark.parametrize("name", SCORES)
def test_score_joins_what_its_sides_prepared(name):
    score = make_score(name, 4, 4, 8)
    q, k, v = torch.randn(2, 5, 1, 4), torch.randn(2, 6, 1, 4), torch.randn(2, 6, 1, 7)
    join = None if score.fused else score.join
    parts = attend(score.query(q), score.key(k), v, score=join, scale=score.scale)
    assert_close(parts, attend(q, k, v, score=score))


@pytest.mark.parametrize("name", ["bilinear", "additive"])
def test_score_takes_different_widths_of_query_and_key(name):
    score = make_score(name, 4, 6, 8)
    assert score(torch.randn(2, 1, 3, 4), torch.randn(2, 1, 5, 6)).shape == (2, 1, 3, 5)


@pytest.mark.parametrize("name", ["bilinear", "additive"])
def test_score_gradient_reaches_every_weight(name):
    score = make_score(name, 4, 6, 8)
    score(torch.randn(1, 3, 4), torch.randn(1, 5, 6)).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in score.parameters())


@pytest.mark.parametrize("name", ["dot", "scaled_dot"])
def test_product_of_two_widths_is_refused(name):
    with pytest.raises(UsageError, match="4 and 6; choose bilinear or additive"):
        make_score(name, 4, 6, 8)


def test_score_unknown_name_lists_the_choices():
    with pytest.raises(UsageError, match="score = 'cosine' is unknown") as told:
        make_score("cosine", 4, 4, 4)
    assert all(name in str(told.value) for name in READS)


def test_additive_score_starts_within_one_over_the_root_of_its_width():
    start = Additive(2, 2, 40_000).wv.detach()
    assert 0.999 / 200 < float(start.max()) <= 1 / 200
    assert -0.999 / 200 > float(start.min()) >= -1 / 200
