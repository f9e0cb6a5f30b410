"""Pooling, kernel regression, memory selection and the loops, against worked numbers and the plain formula."""

import math

import pytest
import torch
from torch.testing import assert_close

from regard.attention.core import attend
from regard.attention.pooling import (
    KERNELS,
    SELECTIONS,
    classify,
    combine,
    kernel_weights,
    one_loop,
    per_token,
    pool,
    regress,
    three_loops,
    two_loops,
)
from regard.errors import UsageError
from regard.mask import Causal, Span, Visible

KEYS = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
VALUES = torch.tensor([0.0, 0.8, 0.9, 0.1], dtype=torch.float64)
QUERIES = torch.tensor([0.0, 0.5, 1.5, 2.9, 10.0], dtype=torch.float64)
NAN = math.nan


def test_pool_multiplies_weight_and_value():
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    assert_close(
        pool(torch.tensor([[1.0, 2.0, 3.0]]), v), torch.tensor([[1.4205124847, 1.5752103826]])
    )


def test_pool_row_that_sees_nothing_is_zero():
    visible = torch.tensor([[True, True], [False, False]])
    out = pool(torch.randn(2, 2), torch.ones(2, 3), visible)
    assert_close(out, torch.tensor([[1.0] * 3, [0.0] * 3]))


@pytest.mark.parametrize(
    "kernel, expected",
    [
        ("gaussian", [0.3469172141, 0.4699036031, 0.6348468629, 0.451486329, 0.1004423016]),
        ("boxcar", [0.4, 0.4, 0.85, 0.5, NAN]),
        ("epanechnikov", [0.0, 0.4, 0.85, 0.2288135593, NAN]),
        ("triangular", [0.0, 0.4, 0.85, 0.18, NAN]),
    ],
)
def test_regress_gives_the_worked_numbers(kernel, expected):
    out = regress(QUERIES, KEYS, VALUES, kernel)
    assert_close(
        out, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0, equal_nan=True
    )


def test_regress_far_query_stays_finite_with_the_gaussian():
    far = torch.tensor([50.0, 1e4])
    assert_close(regress(far, KEYS.float(), VALUES.float()), torch.tensor([0.1, 0.1]))


def test_regress_fallback_replaces_an_empty_support():
    out = regress(torch.tensor([99.0]), KEYS.float(), VALUES.float(), "boxcar", fallback=7.0)
    assert out.item() == 7.0


def test_regress_empty_support_leaves_the_gradient_of_width_finite():
    width = torch.tensor(1.0, requires_grad=True)
    regress(QUERIES.float(), KEYS.float(), VALUES.float(), "triangular", width).nansum().backward()
    assert width.grad is not None and width.grad.isfinite()


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_width_is_a_unit_of_length(kernel):
    assert_close(
        kernel_weights(QUERIES * 3, KEYS * 3, kernel, 3.0), kernel_weights(QUERIES, KEYS, kernel)
    )


def test_kernel_gaussian_is_softmax_of_half_squared_distance():
    q, k = torch.randn(3, 2), torch.randn(5, 2)
    assert_close(kernel_weights(q, k), torch.softmax(-(torch.cdist(q, k) ** 2) / 2, -1))


def test_classify_gives_the_share_of_weight_of_each_label():
    labels = torch.tensor([0, 1, 1, 2])
    p = classify(QUERIES, KEYS, labels, 3, width=0.7)
    assert_close(p.sum(-1), torch.ones(5, dtype=torch.float64))
    assert p.argmax(-1).tolist() == [0, 1, 1, 2, 2]


def test_kernel_unknown_name_lists_the_choices():
    with pytest.raises(UsageError, match="gaussian, boxcar, epanechnikov, triangular"):
        regress(QUERIES, KEYS, VALUES, "cosine")


def test_kernel_width_must_be_positive():
    with pytest.raises(UsageError, match="width=0"):
        regress(QUERIES, KEYS, VALUES, width=0.0)


@pytest.mark.parametrize(
    "how, expected",
    [
        ("sum", [9.0, 12.0]),
        ("average", [3.0, 4.0]),
        ("one_hot", [3.0, 4.0]),
        ("multi_hot", [4.0, 5.0]),
        ("soft", [3.8, 4.8]),
    ],
)
def test_combine_gives_each_selection(how, expected):
    memory = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    scores = (
        torch.log(torch.tensor([0.1, 0.4, 0.5])) if how == "soft" else torch.tensor([0, 2.0, 1])
    )
    assert_close(combine(memory, scores, how), torch.tensor(expected))


@pytest.mark.parametrize("seen, expected", [(1, [1.0, 2.0]), (0, [0.0, 0.0])])
def test_combine_multi_hot_is_the_mean_of_what_it_may_choose(seen, expected):
    memory, visible = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.arange(2) < seen
    assert_close(combine(memory, torch.zeros(2), "multi_hot", visible), torch.tensor(expected))


@pytest.mark.parametrize("how, expected", [("one_hot", 7.0), ("multi_hot", 7.5)])
def test_combine_chooses_the_earlier_of_equal_scores(how, expected):
    memory, scores = torch.arange(100.0)[:, None], (torch.arange(100) >= 7).float()
    assert combine(memory, scores, how).item() == expected


@pytest.mark.parametrize("how", SELECTIONS)
def test_combine_of_one_state_is_that_state(how):
    memory = torch.randn(2, 1, 3)
    assert_close(combine(memory, torch.randn(2, 1), how), memory[:, 0])


@pytest.mark.parametrize("how", SELECTIONS)
def test_combine_never_reads_what_is_hidden(how):
    memory, scores = torch.randn(4, 3), torch.randn(4)
    visible = torch.tensor([True, True, True, False])
    assert_close(combine(memory, scores, how, visible), combine(memory[:3], scores[:3], how))


def test_combine_unknown_name_lists_the_choices():
    with pytest.raises(UsageError, match="one_hot, multi_hot, soft"):
        combine(torch.ones(2, 2), torch.ones(2), "hard")


LOGITS = [[1.0, 3.0, 2.0], [2.0, -1.0, 0.5, 3.0], [-math.inf, 1.0, 2.0], [900.0, -900.0, 901.0]]


@pytest.mark.parametrize("logits", LOGITS)
def test_softmax_in_loops_is_softmax(logits):
    x = torch.tensor(logits, dtype=torch.float64)
    for loops in (three_loops, two_loops):
        assert_close(loops(x)[0], torch.softmax(x, -1))


@pytest.mark.parametrize("block", [1, 2, 5])
@pytest.mark.parametrize("logits", LOGITS)
def test_attention_in_one_loop_is_softmax_times_values(logits, block):
    x = torch.tensor(logits, dtype=torch.float64)
    v = torch.randn(len(x), 2, dtype=torch.float64)
    assert_close(one_loop(x, v, block)[0], torch.softmax(x, -1) @ v)


def test_loops_of_hidden_keys_alone_give_zeros():
    x = torch.tensor([-math.inf, -math.inf])
    assert two_loops(x)[0].tolist() == three_loops(x)[0].tolist() == [0.0, 0.0]
    assert one_loop(x, torch.ones(2, 2))[0].tolist() == [0.0, 0.0]


def test_kernels_are_their_formulas():
    u = torch.tensor([0.0, 0.5, 1.0, 1.5], dtype=torch.float64)
    want = {
        "gaussian": [1.0, math.exp(-0.125), math.exp(-0.5), math.exp(-1.125)],
        "boxcar": [1.0, 1.0, 1.0, 0.0],
        "epanechnikov": [0.75, 0.5625, 0.0, 0.0],
        "triangular": [1.0, 0.5, 0.0, 0.0],
    }
    assert want.keys() == KERNELS.keys()
    for name, values in want.items():
        assert KERNELS[name](u).tolist() == pytest.approx(values, abs=1e-15)


def test_regress_of_vectors_leaves_those_without_a_key_alone():
    """Rows of two numbers, of which the second query has none; a label of each key likewise."""
    q, v = torch.tensor([0.5, 9.0]), torch.tensor([[0.0, 2.0], [1.0, 4.0], [5.0, 5.0], [7.0, 7.0]])
    out = regress(q, KEYS.float(), v, "boxcar", fallback=-1.0)
    assert_close(out, torch.tensor([[0.5, 3.0], [-1.0, -1.0]]))
    p = classify(q, KEYS.float(), torch.tensor([2, 0, 1, 1]), 3, kernel="boxcar", fallback=0.0)
    assert_close(p, torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]))


def test_softmax_traces_tell_maximum_and_sum_so_far():
    """Three loops know the maximum before the sum begins; two correct the sum when it rises."""
    x = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    e = math.exp(-1)
    (_, late), (_, early) = three_loops(x), two_loops(x)
    assert [step.m for step in early] == [1.0, 3.0, 3.0]
    assert [step.d for step in early] == pytest.approx([1.0, e**2 + 1, e**2 + 1 + e])
    assert [step.m for step in late] == [3.0, 3.0, 3.0]
    assert [step.d for step in late] == pytest.approx([e**2, e**2 + 1, e**2 + 1 + e])
    assert all(step.o is None for step in (*late, *early))


def test_one_loop_trace_rescales_when_the_maximum_rises():
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    _, trace = one_loop(torch.tensor([1.0, 3.0, 2.0]), v)
    assert [step.m for step in trace] == [1.0, 3.0, 3.0]
    assert [step.d for step in trace] == pytest.approx([1.0, 1.1353352832, 1.5032147244])
    assert trace[1].o.tolist() == pytest.approx([0.119202922, 0.880797078])
    assert trace[2].o.tolist() == pytest.approx([0.3347590442, 0.9099694268])


def test_per_token_equals_matrix_form():
    x, wq, wk = torch.randn(5, 6), torch.randn(6, 4), torch.randn(6, 4)
    wv = torch.randn(6, 3)
    matrix = torch.softmax(
        (x @ wq @ (x @ wk).T / 2).masked_fill(torch.ones(5, 5).triu(1) > 0, -math.inf), -1
    ) @ (x @ wv)
    assert_close(per_token(x, wq, wk, wv), matrix)


def test_per_token_equals_attend():
    x, wq, wk, wv = torch.randn(5, 6), torch.randn(6, 4), torch.randn(6, 4), torch.randn(6, 3)
    q, k, v = ((x @ w)[None, :, None] for w in (wq, wk, wv))
    out = attend(q, k, v, Visible(Causal(), Span.run(0, 5), Span.run(0, 5)))
    assert_close(per_token(x, wq, wk, wv), out[0, :, 0])
