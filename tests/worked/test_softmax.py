"""Worked examples: softmax, pooling, scores, and why scores are scaled."""

import math

import torch

from regard.attention import Terms, attend, softmax
from regard.attention.online import online
from regard.attention.pooling import KERNELS, kernel_weights, one_loop, pool, regress, two_loops
from regard.attention.scores import Additive, Bilinear, Dot, ScaledDot
from regard.learn.mechanisms import dot_moments, saturation, softmax_jacobian
from regard.training.losses import masked_lm_loss
from tests.worked.examples import Example, fill


def test_stable_softmax_shifts_numerator_and_denominator(example: Example) -> None:
    example.both(softmax(example.given.scores), "weights")
    example.both(softmax(example.given.large), "large")
    example.both(softmax(example.given.scores).sum(), "sum")


def test_attention_pooling_weighted_sum_multiplies_weights_and_values(example: Example) -> None:
    scores, values = example.given.scores[None], example.given.values
    example.right(softmax(scores)[0], "weights")
    example.both(pool(scores, values)[0], "context")
    assert not torch.allclose(pool(2 * scores, values), pool(scores, values))


def test_nadaraya_watson_estimates_with_every_kernel(example: Example) -> None:
    g = example.given
    for kernel in KERNELS:
        estimate = regress(g.queries, g.keys, g.values, kernel, g.width)
        weights = kernel_weights(g.queries, g.keys, kernel, g.width)
        undefined = weights.sum(-1, keepdim=True) == 0  # no key in the support
        example.right(estimate, f"{kernel}.estimate")
        example.right(weights.masked_fill(undefined, math.nan), f"{kernel}.weights")
    far = torch.tensor([g.far], dtype=torch.float64)
    assert KERNELS["gaussian"](far - g.keys).sum() == 0  # the plain ratio would be 0/0
    example.right(regress(far, g.keys, g.values)[0], "gaussian_far")
    filled = regress(g.queries, g.keys, g.values, "boxcar", g.width, fallback=0.5)
    assert filled[-1] == 0.5


def test_score_functions_give_four_scores(example: Example) -> None:
    g = example.given
    q, k = g.q[None], g.k[None]
    additive = fill(Additive(3, 3, 3), wq=g.w_q, wk=g.w_k, wv=g.v)
    bilinear = fill(Bilinear(3, 3), weight=g.w)
    example.right(Dot()(q, k)[0, 0], "dot")
    example.right(ScaledDot()(q, k)[0, 0], "scaled_dot")
    example.right(bilinear(q, k)[0, 0].detach(), "bilinear")
    example.right(additive(q, k)[0, 0].detach(), "additive")


@torch.no_grad()
def test_additive_attention_weights_its_values(example: Example) -> None:
    g = example.given
    score = fill(Additive(2, 3, 2), wq=g.w_q, wk=g.w_k, wv=g.v)
    q, k, v = g.q[None], g.keys, g.values
    example.right(score.query(q)[0], "q")
    example.right(score.key(k), "keys")
    example.right(torch.tanh(score.query(q) + score.key(k)), "hidden")
    example.right(score(q, k)[0], "scores")
    example.right(softmax(score(q, k))[0], "weights")
    example.both(pool(score(q, k), v)[0], "context")
    heads = [x[None, :, None] for x in (q, k, v)]  # b t h d
    torch.testing.assert_close(attend(*heads, score=score)[0, 0, 0], pool(score(q, k), v)[0])


def trace(example: Example, block: int = 1, normal: bool = True) -> None:
    x, v = example.given.scores, example.given.values
    output, steps = one_loop(x, v, block)
    example.right([step.m for step in steps], "m")
    example.right([step.d for step in steps], "d")
    example.right(torch.stack([s.o * (1 if normal else s.d) for s in steps]), "o")
    example.right(output, "output")
    q, k = torch.ones(1, 1, 1, 1).double(), x[None, None, :, None]  # q k = x
    tiled = online(q, k, v[None, None], None, Terms(scale=1.0), (1, block))
    torch.testing.assert_close(tiled[0, 0, 0], output)


def test_online_attention_trace_3_rescales_by_old_over_new_maximum(example: Example) -> None:
    trace(example)
    example.right(two_loops(example.given.scores)[0], "weights")
    example.wrong(one_loop(example.given.scores, example.given.values)[0], "output")


def test_online_attention_trace_4_rescales_when_the_last_key_is_largest(example: Example) -> None:
    trace(example)
    example.right(two_loops(example.given.scores)[0], "weights")
    example.wrong(one_loop(example.given.scores, example.given.values)[0], "output")


def test_online_attention_blockwise_equals_one_by_one(example: Example) -> None:
    trace(example, example.given.block, normal=False)


def test_softmax_saturation_a_a_2a_kills_the_jacobian(example: Example) -> None:
    a = example.given.a
    x = torch.stack([a, a, 2 * a], -1)
    example.right(softmax(x), "weights")
    example.right(saturation(a), "largest")
    example.right(softmax_jacobian(x), "jacobian")
    example.right(softmax_jacobian(x).abs().amax((-1, -2)), "jacobian_max")
    example.right(saturation(torch.tensor(example.given.overflow).double()), "overflow")


def test_cross_entropy_gradient_of_a_wrong_peak_is_large(example: Example) -> None:
    logits = example.given.logits.clone().requires_grad_()
    loss, _ = masked_lm_loss(logits[None], example.given.one_hot.argmax()[None])
    loss.backward()
    example.both(logits.grad, "gradient")
    example.right(softmax_jacobian(example.given.logits).abs().max(), "jacobian_max")


def test_dot_product_variance_enumerated_grows_with_width(example: Example) -> None:
    d = example.given.dim
    mean, variance = dot_moments(d)
    example.right(mean, "mean")
    example.right(variance, "variance")
    example.right(dot_moments(d, d**-0.5)[1], "scaled_variance")
    example.right(dot_moments(d, same=True)[0], "mean_if_same")
