"""The `online` backend: attention in tiles with dropout and a backward of its own, against the reference."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.attention import attend
from regard.attention.core import BACKENDS, Terms, _spread, reference, weights
from regard.attention.online import Traffic, online
from regard.attention.scores import Additive
from regard.errors import Notice, UsageError
from regard.mask import Causal, Documents, Full, Mask, Padding, Prefix, Span, Visible, Window
from tests.wide import crossed

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
TILES = [(3, 4), (4, 3), (1, 1), (64, 64)]
RULES: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "blind": Causal(-4),
    "window": Causal() & Window(3),
    "padding": Padding(torch.tensor([5, 9])),
    "documents": Causal() & Documents(torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] * 7])),
    "prefix": Prefix(torch.tensor([3, 6])),
}
# Queries and keys: as many of both, a later part of a text, one query, more queries than keys, and ragged rows.
SPANS = {
    "square": (Span.run(0, 9), Span.run(0, 9)),
    "later": (Span.run(4, 5), Span.run(0, 9)),
    "last": (Span.run(8, 1), Span.run(0, 9)),
    "cross": (Span.run(0, 9), Span.run(0, 5)),
    "ragged": (Span.ragged(torch.tensor([9, 5]), 9), Span.ragged(torch.tensor([9, 5]), 9)),
}


def operands(t: int, s: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Six query heads over three key heads; values are narrower than keys."""
    shapes = ((2, 6, t, 8), (2, 3, s, 8), (2, 3, s, 5))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def both(inputs: list[Tensor], *runs: Callable[[], Tensor]) -> None:
    """All runs have one output and one gradient for each input."""
    found = []
    for run in runs:
        out = run()
        found.append((out, *torch.autograd.grad((out * torch.arange(out.shape[-1])).sum(), inputs)))
    for other in found[1:]:
        for ours, want in zip(other, found[0]):
            close(ours, want)


@pytest.mark.parametrize("rule, spans, tile", crossed(RULES, SPANS, TILES))
def test_online_equals_the_reference_forward_and_backward(
    rule: str, spans: str, tile: tuple[int, int]
) -> None:
    """Under each mask, as a rule and as a tensor, for grouped heads and other widths of values."""
    q, k = SPANS[spans]
    inputs, visible, terms = operands(q.size, k.size), Visible(RULES[rule], q, k), Terms(0.3)
    runs = [lambda: reference(*inputs, visible, terms)]
    for seen in (visible, visible.tensor()):
        runs.append(lambda seen=seen: online(*inputs, seen, terms, tile))
    both(inputs, *runs)


BIASES = [(2, 6, 7, 9), (1, 6, 7, 9), (1, 6, 1, 9), (2, 1, 7, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape, tile", crossed(BIASES, TILES))
def test_bias_of_any_shape_learns_as_in_the_reference(
    shape: tuple[int, ...], tile: tuple[int, int]
) -> None:
    inputs = [*operands(7, 9), torch.randn(shape, dtype=torch.float64).requires_grad_()]
    visible = Visible(Causal(), Span.run(2, 7), Span.run(0, 9))
    terms = Terms(0.3, inputs[3], softcap=0.7)
    both(
        inputs,
        lambda: reference(*inputs[:3], visible, terms),
        lambda: online(*inputs[:3], visible, terms, tile),
    )


def test_sinks_and_times_learn_as_in_the_reference() -> None:
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in operands(70, 70))
    inputs = [q, k, v, torch.randn(6, dtype=torch.float64).requires_grad_()]
    inputs.append(torch.rand(2, 6, 70, 1, dtype=torch.float64).requires_grad_())
    mask = Visible(Causal(), Span.run(0, 70), Span.run(0, 70))

    def run(backend: str) -> Tensor:
        return attend(*inputs[:3], mask, sinks=inputs[3], times=inputs[4], backend=backend)

    both(inputs, partial(run, "reference"), partial(run, "online"))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_gradients_are_those_of_finite_differences(dropout: float, softcap: float | None) -> None:
    bias = torch.randn(1, 6, 5, 7, dtype=torch.float64).requires_grad_()
    visible = Visible(Causal(), Span.run(2, 5), Span.run(0, 7))

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        torch.manual_seed(0)
        terms = Terms(0.3, bias, softcap=softcap, dropout=dropout)
        return online(q, k, v, visible, terms, (2, 3))

    assert torch.autograd.gradcheck(run, (*operands(5, 7), bias), fast_mode=True)


# --- dropout ------------------------------------------------------------------------------------------------------


def dropped(terms: Terms, tile: tuple[int, int], q: Tensor, k: Tensor, seen: Any) -> Tensor:
    """What dropout multiplies the weights by, after `manual_seed(7)`: values that are the identity show the weights."""
    torch.manual_seed(7)
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(len(k), k.shape[1], -1, -1)
    with torch.no_grad():
        shown = online(q, k, eye, seen, terms, tile)
        a = weights(q, k, None if seen is None else seen.tensor(), terms)
    return torch.where(a > 0, shown / a, 0.0)


@pytest.mark.parametrize("rule, tile", crossed(["causal", "full", "padding"], TILES))
def test_dropout_equals_the_reference_with_the_same_weights_dropped(
    rule: str, tile: tuple[int, int]
) -> None:
    inputs, terms = operands(9, 9), Terms(0.3, dropout=0.4)
    visible = Visible(RULES[rule], *SPANS["square"])
    z = dropped(terms, tile, *inputs[:2], visible)
    close(z[z > 0], torch.full_like(z[z > 0], 1 / 0.6))

    def plain() -> Tensor:
        a = weights(*inputs[:2], visible.tensor(), terms) * z
        return a @ _spread(inputs[2], 6)

    def ours() -> Tensor:
        torch.manual_seed(7)
        return online(*inputs, visible, terms, tile)

    both(inputs, plain, ours)


def test_dropout_drops_its_share_of_every_tile_and_each_tile_otherwise() -> None:
    q, k, _ = (x.detach() for x in operands(128, 128))
    z = dropped(Terms(0.0, dropout=0.25), (32, 32), q, k, None)
    tiles = [x for rows in z.split(32, 2) for x in rows.split(32, 3)]
    for one in tiles:  # 12,288 draws each: 0.02 is five standard errors
        assert (one == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)
    for one, other in combinations(tiles, 2):  # 0.25^2 + 0.75^2 where they are independent
        same = ((one == 0) == (other == 0)).double().mean().item()
        assert same == pytest.approx(0.625, abs=0.03)


def test_dropout_of_everything_gives_zeros() -> None:
    inputs = operands(5, 5)
    out = online(*inputs, None, Terms(0.3, dropout=1.0))
    assert not out.any()
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), inputs))


def test_dropout_follows_the_seed_and_moves_it_on() -> None:
    inputs, terms = operands(9, 9), Terms(0.3, dropout=0.4)

    def two() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        return online(*inputs, None, terms), online(*inputs, None, terms)

    first, second = two()
    assert not torch.equal(first, second)
    assert all(map(torch.equal, (first, second), two()))


# --- what is kept, and what is read -------------------------------------------------------------------------------


@contextmanager
def kept() -> Iterator[list[Tensor]]:
    """The tensors that torch keeps for the backward, each once."""
    found: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        return found.setdefault(x.data_ptr(), x)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield (numbers := [])
        numbers.extend(found.values())


def numbers_kept(run: Callable[..., Tensor], n: int, **terms: Any) -> int:
    inputs = [torch.randn(1, 1, n, 4, requires_grad=True) for _ in range(3)]
    with kept() as tensors:
        run(*inputs, Visible(Causal(), Span.run(0, n), Span.run(0, n)), Terms(0.5, **terms))
    return sum(x.numel() for x in tensors)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_is_kept_for_the_backward_grows_with_the_length_alone(dropout: float) -> None:
    """q, k, v, o and a number for each query; the reference keeps the weights, n^2."""
    for n in (64, 200):
        assert numbers_kept(online, n, dropout=dropout) == (4 * 4 + 1) * n
        assert numbers_kept(reference, n, dropout=dropout) > n * n


def test_hidden_tiles_are_not_read() -> None:
    q, k, v = (torch.randn(1, 1, 8, 4) for _ in range(3))
    rules = {Full(): 16, Causal(): 10, Causal() & Window(3): 7, Causal(-8): 0}
    for rule, tiles in rules.items():
        traffic = Traffic()
        visible = Visible(rule, Span.run(0, 8), Span.run(0, 8))
        for seen in (visible, visible.tensor()):
            traffic.clear()
            online(q, k, v, seen, Terms(0.5), (2, 2), traffic)
            assert traffic["read", "k"] == traffic["read", "v"] == tiles * 2 * 4 * 4
            assert traffic["read", "mask"] == (0 if seen is visible else 64)


def test_traffic_of_a_whole_model_by_a_backend_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic()
    monkeypatch.setitem(BACKENDS, "counted", partial(online, traffic=traffic))
    q = torch.randn(2, 5, 3, 4, requires_grad=True)
    out = attend(q, q, q, backend="counted")
    assert traffic["read", "q"] == traffic["written", "o"] == q.nbytes
    out.sum().backward()
    assert traffic["written", "dq"] == q.nbytes


# --- beside the formula -------------------------------------------------------------------------------------------


def test_score_with_weights_of_its_own_learns_and_says_what_it_costs() -> None:
    score = Additive(8, 8, 4).double()
    inputs = [x.detach().requires_grad_() for x in operands(9, 9)]
    terms = Terms(1.0, score=score)
    with pytest.warns(Notice, match="keeps the tiles of this score"):
        both(
            [*inputs, *score.parameters()],
            lambda: reference(*inputs, None, terms),
            lambda: online(*inputs, None, terms, (3, 4)),
        )


def test_autocast_changes_no_tile() -> None:
    """Forward and backward compute the same scores: in float32, also where autocast would halve them."""
    inputs = operands(9, 9, torch.float32)
    want = online(*inputs, None, Terms(0.3))
    with torch.autocast("cpu", torch.bfloat16):
        found = online(*inputs, None, Terms(0.3))
        grads = torch.autograd.grad(found.sum(), inputs)
    assert torch.equal(found, want)
    assert all(map(torch.equal, grads, torch.autograd.grad(want.sum(), inputs)))


def test_second_derivative_is_refused() -> None:
    q, k, v = operands(3, 3)
    out = online(q, k, v, None, Terms(0.3))
    with pytest.raises(UsageError, match="no second derivative; use backend reference"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize("t, s", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend_gives_zeros(t: int, s: int) -> None:
    inputs = operands(t, s)
    out = online(*inputs, None, Terms(0.3))
    assert out.shape == (2, 6, t, 5) and not out.any()
    assert all(not x.any() for x in torch.autograd.grad(out.sum(), inputs))
