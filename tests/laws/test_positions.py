"""RoPE, T5 buckets and ALiBi see distance alone; sinusoids shift by a rotation; without any, order is invisible."""

import math

import pytest
import torch
from torch import Tensor

from regard.position import (
    Alibi,
    Linear,
    Llama3,
    RelativeBias,
    Rope,
    T5Bias,
    Yarn,
    rotate,
    sinusoid,
)
from tests.laws.mechanisms import TIGHT, TOWERS, decoder, ids

ROPES = {
    "half": Rope(),
    "interleaved": Rope(layout="interleaved"),
    "partial": Rope(partial=0.5),
    "base": Rope(base=500.0, layout="interleaved", partial=0.25),
    "linear": Rope(scaling=Linear(4.0)),
    "llama3": Rope(scaling=Llama3(8.0, original_len=32)),
    "yarn": Rope(scaling=Yarn(4.0, 32)),
}


def turned(x: Tensor, pos: Tensor, rope: Rope) -> Tensor:
    return rotate(x, *rope.angles(pos[None], x.shape[-1], x.dtype), rope.layout)


def rope_scores(rope: Rope, shift: int, d: int = 16) -> Tensor:
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, n, 2, d, generator=g).double() for n in (5, 7))
    q = turned(q, torch.arange(4, 9) + shift, rope)
    k = turned(k, torch.arange(7) + shift, rope)
    return torch.einsum("bthd,bshd->bhts", q, k)


@pytest.mark.parametrize("name", ROPES)
def test_rope_scores_depend_on_distance_alone(name: str) -> None:
    near = rope_scores(ROPES[name], 0)
    for shift in (1, 50):
        torch.testing.assert_close(rope_scores(ROPES[name], shift), near, **TIGHT)


@pytest.mark.parametrize("name", ROPES)
def test_rope_scores_do_depend_on_distance(name: str) -> None:
    q = torch.ones(1, 4, 1, 16).double()
    k = turned(q[:, :1], torch.tensor([0]), ROPES[name])
    dots = (turned(q, torch.tensor([0, 1, 2, 3]), ROPES[name]) * k).sum(-1).flatten()
    assert (dots.diff().abs() > 1e-3).all()


@pytest.mark.parametrize("name", [n for n in ROPES if n != "yarn"])  # YaRN turns up the length
def test_rope_keeps_lengths_and_position_zero_turns_nothing(name: str) -> None:
    x = torch.randn(1, 6, 2, 16).double()
    y = turned(x, torch.arange(6), ROPES[name])
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), **TIGHT)
    assert torch.equal(y[:, 0], x[:, 0])


@pytest.mark.parametrize("width", [2, 8, 12])
def test_rope_layouts_are_related_by_a_permutation(width: int) -> None:
    x, pos = torch.randn(1, 6, 2, width).double(), torch.arange(6)
    order = [*range(0, width, 2), *range(1, width, 2)]
    half = turned(x[..., order], pos, Rope(layout="half"))
    interleaved = turned(x, pos, Rope(layout="interleaved"))
    assert torch.equal(half, interleaved[..., order])


def test_rope_pair_turns_by_its_own_frequency() -> None:
    x = torch.tensor([1.0, 0.0, 1.0, 0.0]).double().view(1, 1, 1, 4)
    y = turned(x, torch.tensor([3]), Rope(base=100.0, layout="interleaved")).flatten()
    want = [math.cos(3), math.sin(3), math.cos(0.3), math.sin(0.3)]
    torch.testing.assert_close(y, torch.tensor(want, dtype=torch.float64), **TIGHT)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_partial_rope_turns_the_leading_share_and_leaves_the_rest(layout: str) -> None:
    x, pos = torch.randn(1, 6, 2, 16).double(), torch.arange(6)
    y = turned(x, pos, Rope(layout=layout, partial=0.5))
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert torch.equal(y[..., :8], turned(x[..., :8], pos, Rope(layout=layout)))


@pytest.mark.parametrize("dim", [6, 7, 16])
@pytest.mark.parametrize("shift", [1, 10])
def test_sinusoids_shift_by_a_fixed_rotation(dim: int, shift: int) -> None:
    """PE(p + k) = R_k PE(p): each pair (sin, cos) turns by k w_i, whatever p is. An odd last sine has no partner."""
    p = torch.arange(20)
    here, there = sinusoid(p, dim), sinusoid(p + shift, dim)
    for i in range(dim // 2):
        w = 10000 ** (-2 * i / dim) * shift
        c, s = math.cos(w), math.sin(w)
        matrix = torch.tensor([[c, s], [-s, c]], dtype=torch.float64)
        pair = slice(2 * i, 2 * i + 2)
        torch.testing.assert_close(there[:, pair], here[:, pair] @ matrix.T, **TIGHT)


def test_sinusoids_dot_depends_on_distance_alone() -> None:
    table = sinusoid(torch.arange(30), 16)
    dots = table @ table.T
    for distance in (0, 3, 11):
        assert dots.diagonal(distance).std() < 1e-12


@pytest.mark.parametrize(
    "config", [T5Bias(3), T5Bias(3, 8, 20, causal=True), Alibi(3)], ids=["t5", "t5_causal", "alibi"]
)
def test_relative_bias_depends_on_distance_alone(config: T5Bias | Alibi) -> None:
    bias, q, k = RelativeBias(config), torch.arange(5)[None] + 20, torch.arange(40)[None]
    near = bias(q, k)
    assert near.shape == (1, 3, 5, 40)
    assert torch.equal(bias(q + 1000, k + 1000), near)
    assert near.std() > 0


SHIFTING = ["gqa_rope", "window", "sinks", "mla", "mqa_alibi", "mla_alibi", "gqa_t5", "dsa_mla"]


@pytest.mark.parametrize("name", SHIFTING)
@torch.no_grad()
def test_model_with_relative_positions_does_not_see_where_the_text_starts(name: str) -> None:
    """A row that starts at position 5 gives the logits of the same row at position 0."""
    from regard.attention import Context
    from regard.mask import Causal, Span

    model, x = decoder(name), ids(2, 7)
    hidden = model.embedding(x, Span.run(0, 7))
    late = model.tower(hidden, Context(Span.run(5, 7), Causal()))
    torch.testing.assert_close(late, model.hidden(x), **TIGHT)


@pytest.mark.parametrize("name", [n for n in TOWERS if not n.startswith(("dsa", "delta", "ssd"))])
@torch.no_grad()
def test_model_with_positions_is_not_permutation_equivariant(name: str) -> None:
    model, x, order = decoder(name, causal=False), ids(1, 7), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    assert (model(x[:, order]) - model(x)[:, order]).abs().max() > 1e-3
