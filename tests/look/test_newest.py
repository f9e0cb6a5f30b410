"""Topics of what the newest models brought: their numbers are those of the definitions, and of the models' parts."""

import math
from typing import Any

import pytest
import torch

from regard.attention import GQA, Context
from regard.block import Stack, Streams, Tower
from regard.cli.main import main
from regard.layers import MLP, Norm
from regard.learn.explain import find
from regard.mask import Causal, Span


def rows(name: str, **given: Any) -> list[list[list[Any]]]:
    return [[list(row) for row in table.rows] for table in find(name).tables(given)]


# --- compressed attention -----------------------------------------------------------------------------------------


def test_an_entry_is_the_sum_of_its_window_by_the_softmax_of_its_tokens() -> None:
    z, c = (0.5, -1.0, 2.0, 1.0, 0.0, 3.0, 9.0), (1.0, -2.0, 4.0, 0.5, 3.0, 7.0, 9.0)
    tokens, entries, _, _ = rows("compressed", x=z, v=c, rate=(3,))
    first, second = (torch.tensor(z[i : i + 3], dtype=torch.float64).softmax(0) for i in (0, 3))
    # The last token's window has not ended.
    assert [row[4] for row in tokens] == pytest.approx([*first.tolist(), *second.tolist()])
    values = torch.tensor(c[:6], dtype=torch.float64).view(2, 3)
    want = [float(first @ values[0]), float(second @ values[1])]
    assert [row[2] for row in entries] == pytest.approx(want)
    assert [row[1] for row in entries] == [0, 3]


def test_entries_are_seen_once_their_window_has_ended() -> None:
    _, entries, seen, _ = rows("compressed", rate=(3,), local=(2,))
    assert [row[3] for row in entries] == [2, 5, 8]
    for t, near, shown in seen:
        assert [s for s, mark in enumerate(near.split()) if mark == "1"] == [*range(t + 1)][-2:]
        assert [w for w, mark in enumerate(shown.split()) if mark == "1"] == [*range((t + 1) // 3)]


def test_work_of_compressed_layers_is_that_of_what_a_query_sees() -> None:
    size, each = 100_000, 4 * 64 * 512
    *_, sizes = rows("compressed", longest=(size,))
    found = {row[0]: row[1:] for row in sizes}
    assert found["all tokens"] == [0, size * each, 1024]
    assert found["sliding"] == [0, 128 * each, 512]
    index = 2 * (size // 4) * 64 * 128
    assert found["sparse, rate 4"] == [25_000, (128 + 512) * each + index, 5 * 512 + 4 * 128]
    assert found["heavy, rate 128"] == [781, (128 + 781) * each, 3 * 512]


# --- several streams ----------------------------------------------------------------------------------------------


def test_mixing_matrix_is_doubly_stochastic_after_enough_rounds() -> None:
    off, matrix, kept, costs = rows("hyper-connections", x="2 0 -1; 1 3 0; 0 0 1", rounds=(1, 30))
    assert off[0][2] > 0.05 and max(off[1][1:]) < 3e-6
    # By the definition: e^N, its rows and its columns divided by their sums by turns.
    m = torch.tensor([[2.0, 0, -1], [1, 3, 0], [0, 0, 1]], dtype=torch.float64).exp()
    for _ in range(30):
        m = m / m.sum(1, keepdim=True)
        m = m / m.sum(0, keepdim=True)
    assert [row[1:] for row in matrix] == [pytest.approx(row, abs=1e-5) for row in m.tolist()]
    assert kept[-1][0] == 60 and kept[-1][2] == pytest.approx(1, abs=1e-3) != kept[-1][1]
    assert costs[2][1:] == [4 * 4096, 24 * 4 * 4096 + 24 + 3]


@torch.no_grad()
def test_streams_whose_numbers_are_zero_are_one_stream() -> None:
    torch.manual_seed(0)
    sizes: Any = dict(dim=12, layers=3, attention=GQA(3), ffn=MLP(20), norm=Norm(1e-12, rms=True))
    one = Stack(Tower(**sizes)).double()
    many = Stack(Tower(**sizes, streams=Streams(3, eps=0.0))).double()
    for name, weight in many.named_parameters():
        weight.zero_() if "mix" in name else weight.copy_(one.state_dict()[name])
    x, ctx = torch.randn(2, 5, 12, dtype=torch.float64), Context(Span.run(0, 5), Causal())
    torch.testing.assert_close(many(x, ctx), one(x, ctx), atol=1e-9, rtol=0)
    many.blocks[0].mix1.bias[2 * 3] = 1.0
    assert torch.allclose(many(x, ctx), one(x, ctx), atol=1e-9), "streams that are equal stay equal"
    many.blocks[0].mix1.bias[3] = 1.0
    assert not torch.allclose(many(x, ctx), one(x, ctx), atol=1e-3)


# --- chunks and temperature ---------------------------------------------------------------------------------------


def test_chunks_are_blocks_of_the_triangle() -> None:
    seen, *_ = rows("chunked-attention", tokens=(7,), window=(3,))
    for i, _, chunk, window in seen:
        assert [j for j, x in enumerate(chunk.split()) if x == "1"] == [*range(i // 3 * 3, i + 1)]
        assert [j for j, x in enumerate(window.split()) if x == "1"] == [*range(i + 1)][-3:]


def test_temperature_is_the_formula_and_keeps_a_weight_up() -> None:
    places = (100, 8190, 8191, 200_000)
    _, factors, weights, layers = rows("chunked-attention", pos=places, scale=(0.2,), x=(5,))
    want = [1 + 0.2 * math.log(1 + (p + 1) // 8192) for p in places]
    assert [row[1] for row in factors] == pytest.approx(want) and want[:2] == [1, 1] != want[2:]
    for (p, plain, warm), factor in zip(weights, want):
        assert plain == pytest.approx(math.exp(5) / (math.exp(5) + p))
        assert warm == pytest.approx(math.exp(5 * factor) / (math.exp(5 * factor) + p))
    chunks, whole = layers
    assert chunks[1:3] == [36, "rotary"] and whole[1:3] == [12, "none"]
    assert chunks[3:6] == [4 * 8192 * 40 * 128] * 3 and whole[5] == 4 * 2**20 * 40 * 128
    assert chunks[6] == whole[6] == 2 * 8 * 128


# --- sound --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hertz", [300.0, 1500.0, 4500.0])
def test_a_tone_is_loudest_in_the_band_that_holds_it(hertz: float) -> None:
    levels, bands, whisper = rows("spectrogram", x=(hertz,))
    middle = [row[6] for row in levels]
    loudest = 1 + middle.index(max(middle))
    (held,) = (row for row in bands if row[0] == loudest)
    assert held[1] <= hertz <= held[3]
    # Eight powers of ten lie between the loudest and the floor, and four make 1.
    every = [x for row in levels for x in row[1:]]
    assert max(every) - min(every) == pytest.approx(2, abs=0.011)
    assert [row[1] for row in whisper] == ["480,000", "80 x 3000", "512 x 3000", "1500 x 512"]
    assert [row[2] for row in whisper] == [0, 0, 3 * 512 * 80 + 512, 3 * 512 * 512 + 512]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compressed", "1 2 3"], "--x has 3 numbers, --v 10; give 4 to 20, as many of both"),
        (["compressed", "--rate", "12"], "give 12 to 20, as many of both"),
        (["compressed", "--rate", "0"], "--rate is 0; give a whole number from 1"),
        (["hyper-connections", "1 2; 3 4; 5 6"], "--x is 3 x 2; give as many rows as columns"),
        (["chunked attention", "--tokens", "1"], "--tokens is 1; give a whole number from 2 to 20"),
        (["chunked attention", "--scale", "0"], "--scale is 0; give a number above 0"),
        (["spectrogram", "9000"], "--x are tones in hertz, above 0 and below 8,000"),
        (["spectrogram", "--size", "9"], "--size is 9; give a whole number from 2 to 6"),
    ],
)
def test_what_these_topics_cannot_do_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1
