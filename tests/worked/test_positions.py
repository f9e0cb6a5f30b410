"""Worked examples: sinusoidal vectors and rotary positions."""

import torch
from torch import Tensor

from regard.mask import Span
from regard.models.transformer import TokenEmbedding, Tokens
from regard.position import Rope, Sinusoidal, rotate, sinusoid
from tests.worked.examples import Example, fill


def table(example: Example, layout: str = "interleaved") -> Tensor:
    g = example.given
    return sinusoid(torch.arange(g.positions), g.dim, g.base, layout)


def test_sinusoidal_pe_d4_slows_down_along_the_features(example: Example) -> None:
    example.both(table(example), "pe")


@torch.no_grad()
def test_embedding_plus_pe_d4_adds_positions_once(example: Example) -> None:
    g, ids, pos = example.given, torch.arange(4)[None], Span.run(0, 4)
    position = Sinusoidal(max_len=4)
    plain = fill(TokenEmbedding(Tokens(4, position), 4), weight=g.embeddings)
    scaled = fill(TokenEmbedding(Tokens(4, position, scaled=True), 4), weight=g.embeddings)
    example.right(plain(ids, pos)[0], "sum")
    example.right(scaled(ids, pos)[0], "scaled_sum")
    example.wrong(plain(ids, pos)[0, 0], "first")
    example.wrong(plain(ids, pos)[0, 1], "second")
    assert plain.scale == g.scale and scaled.scale == 2


def test_sinusoidal_pe_d6_has_one_frequency_a_pair(example: Example) -> None:
    example.right(table(example), "pe")
    example.right(table(example)[1, 0::2].asin(), "frequencies")


def test_sinusoidal_pe_odd_d5_has_one_sine_more(example: Example) -> None:
    example.right(table(example), "pe")
    assert torch.equal(table(example), table(example))  # no column is left to chance


def test_sinusoidal_pe_layouts_d6_are_three(example: Example) -> None:
    for layout in ("interleaved", "halves", "fairseq"):
        example.right(table(example, layout), layout)


def test_sinusoidal_relative_property_is_not_the_difference(example: Example) -> None:
    first, second = example.given.pairs.T
    p, q = sinusoid(first, example.given.dim), sinusoid(second, example.given.dim)
    example.right(q - p, "differences")
    for norm, dot in zip((q - p).norm(dim=-1), (p * q).sum(-1)):  # one for both pairs
        example.right(norm, "norm")
        example.right(dot, "dot")
    shift = torch.linalg.lstsq(sinusoid(torch.arange(9), 6), sinusoid(torch.arange(9) + 2, 6))
    example.right(shift.solution.T, "shift")  # PE(p + 2) = M PE(p) for every p


def turned(x: Tensor, pos: int, rope: Rope) -> Tensor:
    """x (d) at one position."""
    cos, sin = rope.angles(torch.tensor([[pos]]), len(x), x.dtype)
    return rotate(x[None, None, None], cos, sin, rope.layout)[0, 0, 0]


def test_rope_d4_turns_pairs_in_both_layouts(example: Example) -> None:
    g = example.given
    example.right(Rope(g.base).frequencies(4, torch.float64), "frequencies")
    for layout in ("interleaved", "half"):
        rope = Rope(g.base, layout)
        q, k = turned(g.q, g.q_pos, rope), turned(g.k, g.k_pos, rope)
        example.right(q, f"{layout}.q")
        example.right(k, f"{layout}.k")
        example.right(q @ k, f"{layout}.dot")
        example.right(q.norm(), "norm")
    rope = Rope(g.base, "interleaved")
    q = turned(g.q, g.q_pos, rope)
    example.right(turned(g.q, 10, rope) @ turned(g.k, 12, rope), "interleaved.dot_later")
    for key in ("exponent_positive", "exponent_halved", "backwards"):
        example.wrong(q, key)
    order = torch.tensor([0, 2, 1, 3])
    example.right(order, "permutation")
    half = turned(g.q[order], g.q_pos, Rope(g.base, "half"))
    torch.testing.assert_close(half, q[order])
    wide = Rope(100000.0, "interleaved")
    example.right(wide.frequencies(4, torch.float64), "base_100000.frequencies")
    example.right(turned(g.q, g.q_pos, wide), "base_100000.q")


def test_rope_frequencies_d8_start_at_one_and_fall(example: Example) -> None:
    d, (base, other) = example.given.head_dim, example.given.bases.tolist()
    assert Rope().base == base  # the default is the paper's
    example.both(Rope().frequencies(d, torch.float64), "frequencies")
    example.right(Rope(other).frequencies(d, torch.float64), "frequencies_100000")
    cos, sin = Rope().angles(torch.arange(3)[None], d, torch.float64)
    example.right(torch.atan2(sin, cos)[0, :, 0], "angles")
