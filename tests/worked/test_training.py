"""Worked examples: losses, smoothing, the learning rate, clipping; greedy choice, filters and beams."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.decode.filters import top_k, top_p
from regard.decode.sampling import beam_search, greedy
from regard.mask import Causal, Span, Visible
from regard.training.losses import (
    IGNORE,
    causal_lm_loss,
    masked_lm_loss,
    smooth,
    smoothed_loss,
    teacher_forcing,
)
from regard.training.optim import clip, noam
from tests.worked.examples import Example


def test_causal_and_masked_lm_loss_pair_logits_with_next_or_same_label(example: Example) -> None:
    g = example.given
    assert g.ignore == IGNORE
    total, count = causal_lm_loss(g.logits, g.labels)
    example.both(total / count, "causal")
    example.right(count, "causal_count")
    total, count = masked_lm_loss(g.logits, g.labels)
    example.right(total / count, "masked")
    example.right(count, "masked_count")


def test_teacher_forcing_alignment_shifts_by_one(example: Example) -> None:
    words = example.given.target
    ids = torch.arange(len(words))[None]
    read, said = ([words[i] for i in part[0]] for part in teacher_forcing(ids))
    example.right(read, "input")
    example.right(said, "labels")
    at = read.index("are")
    seen = Visible(Causal(), Span.run(0, 4), Span.run(0, 4)).tensor()[0, 0, at]
    example.right([word for word, shown in zip(read, seen) if shown], "visible_at_are")
    example.right(said[at], "said_at_are")


def test_label_smoothing_has_named_definitions(example: Example) -> None:
    g = example.given
    logits, label = g.logits[None], torch.tensor([g.label])
    for over in ("V-1", "V"):
        example.right(smooth(label, g.vocab, g.eps, over)[0], f"q_{over}")
        total, count = smoothed_loss(logits, label, g.eps, over)
        example.right(total / count, f"loss_{over}")
    torch.testing.assert_close(
        smoothed_loss(logits, label, g.eps, "V")[0],
        cross_entropy(logits, label, label_smoothing=g.eps),
    )
    example.right(smoothed_loss(logits, label, 0.0)[0], "loss")
    example.right(g.eps * g.vocab / (g.vocab - 1), "equal_eps_V")
    default, as_torch = smooth(label, g.vocab, g.eps), smooth(label, g.vocab, 0.125, "V")
    torch.testing.assert_close(default, as_torch)


def test_noam_lr_rises_to_its_peak_at_the_warmup(example: Example) -> None:
    g = example.given
    example.right([noam(step, g.dim, g.warmup) for step in g.steps.tolist()], "rates")
    rates = [noam(step, g.dim, g.warmup) for step in range(1, 2 * g.warmup)]
    example.right(1 + rates.index(max(rates)), "peak_step")
    example.right(max(rates), "peak")


def test_gradient_clipping_shortens_to_the_limit(example: Example) -> None:
    g = example.given
    norm = g.gradient.norm().item()
    assert g.limits.tolist() == [1, 10]
    for limit in (1, 10):
        weight = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        weight.grad = g.gradient.clone()
        assert clip([weight], limit).item() == pytest.approx(norm)
        example.right(weight.grad, f"limit_{limit}")
    example.right(g.gradient / norm, "limit_1_no_eps")
    weight = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    weight.grad = g.gradient.clone()
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    example.right(weight.grad, "limit_1")


def test_greedy_decoding_takes_the_largest_of_each_step(example: Example) -> None:
    g = example.given
    example.right(greedy(g.rows), "ids")
    example.both(g.rows.sum(-1), "row_sums")
    example.right(g.rows.log().softmax(-1), "rows")
    calls = []

    def step(prefix: tuple[int, ...]) -> Tensor:
        calls.append(prefix)
        return g.rows[len(prefix)].log()

    ((ids, log_p),) = beam_search(step, width=1, max_len=9, end=g.end)
    example.right([g.vocabulary[i] for i in ids[:-1]], "tokens")
    example.right(log_p, "log_probability")
    example.both(math.exp(log_p), "probability")
    assert len(calls) == 5  # one pass a token
    assert greedy(torch.tensor([1.0, 3.0, 3.0])) == 1  # ties: the lowest id


def test_top_k_top_p_filter_keeps_and_renormalises(example: Example) -> None:
    g = example.given
    logits = g.probabilities.log()
    for name, kept in (("p", top_p(logits, g.p)), ("k", top_k(logits, g.k))):
        example.right(kept.isfinite().nonzero()[:, 0], f"{name}_ids")
        example.right(kept.softmax(-1), f"{name}_probabilities")


def test_greedy_vs_beam_finds_what_greedy_misses(example: Example) -> None:
    words = ["A", "B", "x", "y", "z"]
    tree = {key: vars(branch) for key, branch in vars(example.given.tree).items()}

    def step(prefix: tuple[int, ...]) -> Tensor:
        branch = tree["".join(words[i] for i in prefix)]
        return torch.tensor([branch.get(word, 0.0) for word in words], dtype=torch.float64).log()

    for name, width in (("greedy", 1), ("beam", example.given.width)):
        ids, log_p = beam_search(step, width, max_len=2)[0]
        example.right([words[i] for i in ids], name)
        example.right(log_p, f"{name}_log_probability")
