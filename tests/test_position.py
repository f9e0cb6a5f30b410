"""Sinusoids, RoPE's scalings, T5's buckets and ALiBi's slopes, against known values and transformers."""

import math
from typing import Any

import pytest
import torch

from regard.attention import MLA
from regard.errors import UsageError
from regard.position import (
    Alibi,
    Learned,
    Linear,
    Llama3,
    LongRope,
    PositionVectors,
    RelativeBias,
    Rope,
    Sinusoidal,
    T5Bias,
    Yarn,
    alibi_slopes,
    sinusoid,
    t5_bucket,
)

# --- vectors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 5, 6, 7])
def test_sinusoid_of_any_width_is_the_formula(dim: int) -> None:
    table = sinusoid(torch.arange(4), dim)
    assert table.shape == (4, dim)
    for p in range(4):
        for j in range(dim):
            angle = p * 10000 ** (-2 * (j // 2) / dim)
            want = math.cos(angle) if j % 2 else math.sin(angle)
            assert float(table[p, j]) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("dim", [6, 7])
def test_sinusoid_halves_are_the_interleaved_columns_reordered(dim: int) -> None:
    pos = torch.arange(9)
    halves, interleaved = sinusoid(pos, dim, layout="halves"), sinusoid(pos, dim)
    assert torch.equal(halves, interleaved[:, [*range(0, dim, 2), *range(1, dim, 2)]])


@pytest.mark.parametrize("dim, waves", [(2, [1]), (3, [1]), (4, [1, 1e4]), (6, [1, 1e2, 1e4])])
def test_sinusoid_fairseq_of_few_features_ends_at_the_base(dim: int, waves: list[float]) -> None:
    table = sinusoid(torch.tensor([3]), dim, layout="fairseq")[0]
    angles = [3 / wave for wave in waves]
    want = [*map(math.sin, angles), *map(math.cos, angles), 0.0][:dim]
    torch.testing.assert_close(table, torch.tensor(want, dtype=torch.float64))


def test_sinusoid_fairseq_spaces_frequencies_to_the_end() -> None:
    table = sinusoid(torch.tensor([1]), 8, layout="fairseq")[0]
    want = [10000 ** (-i / 3) for i in range(4)]
    torch.testing.assert_close(table[:4].asin(), torch.tensor(want).double())


def test_sinusoid_of_an_unknown_layout_lists_the_known() -> None:
    with pytest.raises(UsageError, match="choose interleaved, halves or fairseq"):
        sinusoid(torch.arange(2), 4, layout="sideways")


def test_sinusoid_stays_exact_far_out() -> None:
    far = sinusoid(torch.tensor([1_000_000]), 4)[0, 0]
    assert float(far) == pytest.approx(math.sin(1_000_000), abs=1e-9)


def test_marian_positions_are_halves() -> None:
    marian = pytest.importorskip("transformers.models.marian.modeling_marian")
    table = marian.MarianSinusoidalPositionalEmbedding(12, 10)
    weight = table.create_weight()
    ours = PositionVectors(Sinusoidal(12, layout="halves"), 10)(torch.arange(12)[None])[0]
    torch.testing.assert_close(ours.float(), weight.detach().float())


def test_learned_offset_rows_stand_before_position_zero() -> None:
    vectors = PositionVectors(Learned(4, offset=2), 3)
    assert vectors.weight.shape == (6, 3)
    assert torch.equal(vectors(torch.tensor([[0, 3]]))[0], vectors.weight[[2, 5]])


def test_learned_with_skip_counts_only_other_tokens() -> None:
    """RoBERTa: padding (id 1) gets row 1, the others 2, 3, ... whatever stands between."""
    vectors, ids = PositionVectors(Learned(6, offset=2, skip=1), 3), torch.tensor([[5, 7, 1, 9, 1]])
    assert torch.equal(vectors(torch.arange(5)[None], ids)[0], vectors.weight[[2, 3, 1, 4, 1]])


def test_learned_with_skip_goes_on_where_a_cache_stands() -> None:
    """As transformers' RoBERTa with past_key_values_length; rows of a ragged batch stay in range."""
    vectors = PositionVectors(Learned(6, offset=2, skip=1), 3)
    pos, ids = torch.tensor([[3, 4, 5], [5, -1, -1]]), torch.tensor([[5, 1, 9], [7, 8, 9]])
    rows = torch.tensor([[5, 1, 6], [7, 1, 1]])
    assert torch.equal(vectors(pos, ids), vectors.weight[rows])


# --- RoPE ---------------------------------------------------------------------------------------------------------


def hf_frequencies(d: int, base: float, **scaling: object) -> tuple[torch.Tensor, float]:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=4 * d,
        num_attention_heads=4,
        head_dim=d,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": base, **scaling},
    )
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))


SCALINGS = {
    "linear": (Linear(4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        Llama3(8.0, 1.0, 4.0, 256),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
    "yarn": (
        Yarn(8.0, 512),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    ),
    "yarn_deepseek": (
        Yarn(40.0, 256, fast=16.0, slow=2.0, mscale=0.8, mscale_all=1.2),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.8,
            "mscale_all_dim": 1.2,
        },
    ),
    "yarn_factor_given": (
        Yarn(4.0, 64, attention_factor=1.3, truncated=False),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.3,
            "truncate": False,
        },
    ),
}


@pytest.mark.parametrize("base", [10000.0, 500.0])
@pytest.mark.parametrize("d", [6, 32])
@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling_is_that_of_transformers(name: str, d: int, base: float) -> None:
    ours, theirs = SCALINGS[name]
    freq, gain = hf_frequencies(d, base, **theirs)
    torch.testing.assert_close(Rope(base, scaling=ours).frequencies(d), freq)
    if isinstance(ours, Yarn):
        assert ours.gain() == pytest.approx(gain)


@pytest.mark.parametrize("truncated", [True, False])
def test_yarn_between_borders_that_meet_is_a_step(truncated: bool) -> None:
    """One number of turns for both: pairs that turn more often are kept, the others are divided."""
    theirs = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    more = {"beta_fast": 9.0, "beta_slow": 9.0, "truncate": truncated}
    ours = Rope(500.0, scaling=Yarn(8.0, 512, fast=9.0, slow=9.0, truncated=truncated))
    freq, _ = hf_frequencies(32, 500.0, **theirs, **more)
    torch.testing.assert_close(ours.frequencies(32), freq)
    if not truncated:
        kept = Rope(500.0).frequencies(32) * 512 / (2 * math.pi) > 9
        want = torch.where(kept, Rope(500.0).frequencies(32), Rope(500.0).frequencies(32) / 8)
        torch.testing.assert_close(ours.frequencies(32), want)


def test_softmax_of_latent_attention_is_turned_up_by_mscale_all_alone() -> None:
    for scaling in (None, *(ours for ours, _ in SCALINGS.values()), LONG):
        rope, gain = Rope(scaling=scaling), 1.0
        if isinstance(scaling, Yarn) and scaling.mscale_all:
            gain = (0.1 * 1.2 * math.log(40.0) + 1) ** 2
        assert rope.softmax_gain() == pytest.approx(gain)
        module: Any = MLA(2, 8, head_dim=6, rope_dim=3 * 2, rope=rope).make(12)
        assert module.scale == pytest.approx(gain / math.sqrt(12))


LONG = LongRope((1.0, 1.2, 1.5), (2.0, 3.0, 4.0), original_len=5, factor=4.0)


@pytest.mark.parametrize("length", [5, 6])
def test_longrope_is_that_of_transformers(length: int) -> None:
    pytest.importorskip("transformers")
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    given = dict(rope_type="longrope", short_factor=list(LONG.short), long_factor=list(LONG.long))
    sizes = dict(hidden_size=12, num_attention_heads=2, pad_token_id=0)
    config = Phi3Config(
        **sizes,
        max_position_embeddings=20,
        original_max_position_embeddings=5,
        rope_parameters={**given, "rope_theta": 500.0},
    )
    pos = torch.arange(length)[None]
    want = Phi3RotaryEmbedding(config)(torch.zeros(1), pos)
    got = Rope(500.0, scaling=LONG).angles(pos, 6, torch.float32)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours[:, :, 0], theirs[..., :3])


def test_gains_grow_with_the_factor_from_one_on() -> None:
    """0.1 ln s + 1 of YaRN, sqrt(1 + ln s / ln L) of LongRoPE; 1 where nothing grows."""
    for factor in (0.5, 1.0, 1.5, 4.0):
        grown = math.log(max(1.0, factor))
        assert Yarn(factor, 64).gain() == pytest.approx(1 + 0.1 * grown)
        both = Yarn(factor, 64, mscale=0.7, mscale_all=0.3).gain()
        assert both == pytest.approx((1 + 0.07 * grown) / (1 + 0.03 * grown))
        assert Yarn(factor, 64, mscale=0.7).gain() == pytest.approx(1 + 0.1 * grown)
        assert Yarn(factor, 64, attention_factor=3.0).gain() == 3.0
        long = LongRope((1.0,), (2.0,), 64, factor)
        assert long.gain() == pytest.approx(math.sqrt(1 + grown / math.log(64)))
        assert LongRope((1.0,), (2.0,), 64, factor, attention_factor=3.0).gain() == 3.0
    with pytest.raises(UsageError, match="YaRN needs waves that grow: more than 1"):
        Rope(1.0, scaling=Yarn(2.0, 64))
    assert Rope(1.5, scaling=Yarn(2.0, 64)) and Rope(1.0)


def test_longrope_turns_each_row_by_its_own_length() -> None:
    rope = Rope(scaling=LONG)
    long, short = torch.arange(7)[None], torch.tensor([[0, 1, 2, 3, -1, -1, -1]])
    both = rope.angles(torch.cat([long, short]), 6, torch.float32)
    for i, alone in enumerate((long, short)):
        for a, b in zip(both, rope.angles(alone, 6, torch.float32), strict=True):
            assert torch.equal(a[i : i + 1], b)


def test_longrope_refuses_a_text_that_grows_past_its_border_in_a_cache() -> None:
    rope = Rope(scaling=LONG)
    for grown in (torch.tensor([[5]]), torch.tensor([[3, 4, 5]]), torch.tensor([[7], [5]])):
        with pytest.raises(UsageError, match="grows past 5 tokens"):
            rope.angles(grown, 6, torch.float32)
    for whole in (torch.tensor([[4]]), torch.tensor([[6]]), torch.arange(9)[None]):
        rope.angles(whole, 6, torch.float32)
    # Of rows that hold their beginnings, one that is long already; and padding alone, which begins nowhere.
    for rows in (torch.tensor([[0, 1], [6, 7]]), torch.tensor([[-1, -1], [3, 4]])):
        rope.angles(rows, 6, torch.float32)
    with pytest.raises(UsageError, match="3 numbers for 4 pairs"):
        rope.angles(torch.tensor([[4]]), 8, torch.float32)


def test_longrope_turns_a_part_by_the_length_of_its_text() -> None:
    """The context of the training is 5 tokens; a text of as many is short, whichever of it are read."""
    pos, reach = (
        torch.tensor([[0, 1], [3, 4], [0, 1], [3, 4], [5, 6]]),
        torch.tensor([5, 5, 6, 6, 7]),
    )
    found = LONG.divisors(pos, torch.float32, reach)[:, :, 0]
    for row, want in enumerate((LONG.short, LONG.short, LONG.long, LONG.long, LONG.long)):
        assert torch.equal(found[row], torch.tensor([want, want]))
    # A length that is less than what is read decides nothing.
    assert torch.equal(
        LONG.divisors(pos[4:], torch.float32, torch.tensor([1]))[0, 0, 0], torch.tensor(LONG.long)
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling_by_one_changes_nothing(name: str) -> None:
    from dataclasses import replace

    scaling = replace(SCALINGS[name][0], factor=1.0)
    torch.testing.assert_close(Rope(scaling=scaling).frequencies(16), Rope().frequencies(16))


def test_rope_partial_turns_the_frequencies_of_the_smaller_width() -> None:
    assert torch.equal(Rope(partial=0.25).frequencies(32), Rope().frequencies(8))


def test_rope_refuses_an_odd_width_and_an_unknown_layout() -> None:
    with pytest.raises(UsageError, match="turns pairs, but 7 of 7"):
        Rope().frequencies(7)
    with pytest.raises(UsageError, match="known: half, interleaved"):
        Rope(layout="neox")


def test_rope_angles_of_half_precision_are_made_in_float32() -> None:
    """bfloat16 positions beyond 256 would be rounded: 1001 and 1002 must turn differently."""
    cos, _ = Rope().angles(torch.tensor([[1001, 1002]]), 8, torch.bfloat16)
    want = torch.tensor([math.cos(1001), math.cos(1002)]).bfloat16()
    assert torch.equal(cos[0, :, 0, 0], want)


# --- biases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("buckets, far", [(32, 128), (8, 20), (15, 40), (11, 40)])
def test_t5_buckets_are_those_of_transformers(causal: bool, buckets: int, far: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(-300, 301)
    theirs = t5.T5Attention._relative_position_bucket(distance, not causal, buckets, far)
    assert torch.equal(t5_bucket(distance, T5Bias(4, buckets, far, causal)), theirs)


def test_t5_bias_reads_its_table() -> None:
    bias = RelativeBias(T5Bias(3, 8, 16, causal=True))
    out = bias(torch.tensor([[2]]), torch.tensor([[0, 1, 2]]))
    assert torch.equal(out[0, :, 0], bias.weight[[2, 1, 0]].T)


def test_alibi_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]
    sixteen = [2 ** (-i / 2) for i in range(1, 17)]
    torch.testing.assert_close(alibi_slopes(16), torch.tensor(sixteen))
    # 12 heads: 8 slopes of the series of 8, then every second one of the series of 16
    torch.testing.assert_close(
        alibi_slopes(12), torch.tensor([2.0**-i for i in range(1, 9)] + sixteen[:8:2])
    )


def test_alibi_falls_with_distance_on_both_sides() -> None:
    out = RelativeBias(Alibi(8))(torch.tensor([[1]]), torch.tensor([[0, 1, 2, 3]]))
    assert out[0, 0, 0].tolist() == [-0.5, 0.0, -0.5, -1.0]


def test_coarse_alibi_is_rounded_by_the_key_s_position_and_scaled() -> None:
    """Slopes of 16 heads are no bfloat16, and neither are most products with positions above 256."""
    keys, slopes = torch.arange(700), alibi_slopes(16)
    out = RelativeBias(Alibi(16, scale=0.5, coarse=True))(torch.tensor([[600]]), keys[None])
    heights = (slopes.bfloat16()[:, None] * keys).double()
    torch.testing.assert_close(
        (out - out[..., :1])[0, :, 0].double(), 0.5 * heights, atol=1e-4, rtol=0
    )
    exact = 0.5 * slopes[:, None].double() * keys
    assert (0.5 * heights - exact)[:, 257:].abs().max() > 0.4


def test_coarse_alibi_does_not_see_distance_alone() -> None:
    bias, q, k = RelativeBias(Alibi(16, coarse=True)), torch.tensor([[40]]), torch.arange(41)[None]
    assert not torch.equal(bias(q, k), bias(q + 301, k + 301))
    assert not bias.by_distance and RelativeBias(Alibi(16)).by_distance
