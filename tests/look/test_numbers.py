"""The numbers behind the pictures of docs/plots.py, against oracles."""

import math

import pytest
import torch
from torch import Tensor

from regard.attention import GQA, softmax
from regard.learn.mechanisms import dot_moments
from regard.position import Rope
from tests.docs import quantities

GIB = 2**30


def exact(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def near(found: Tensor, expected: object, atol: float = 1e-9) -> None:
    torch.testing.assert_close(found, exact(expected), rtol=0, atol=atol)


# --- softmax and scale --------------------------------------------------------------------------------------------


def test_saturations_go_from_a_third_to_one() -> None:
    found = quantities.saturations(exact([0.0, 1, 2, 5, 10]))
    near(found.weights[:, 2], [0.3333, 0.5761, 0.7870, 0.9867, 0.9999], 5e-5)
    near(found.weights.sum(-1), [1.0] * 5)
    largest = [0.2222222222, 0.2442062199, 0.1676390116, 0.0131199065, 9.078337254e-05]
    near(found.steepest, largest)


def test_saturations_jacobian_is_what_autograd_gives() -> None:
    x = exact([2.0, 2, 4])
    jacobian = torch.autograd.functional.jacobian(softmax, x)
    torch.testing.assert_close(quantities.saturations(exact([2.0])).jacobians[0], jacobian)


@pytest.mark.parametrize("dim", [1, 3, 6])
@pytest.mark.parametrize("scaled", [False, True])
def test_dot_chances_are_those_of_every_case_listed(dim: int, scaled: bool) -> None:
    scale = dim**-0.5 if scaled else 1.0
    values, chance = quantities.dot_chances(dim, scale)
    mean = (values * chance).sum()
    variance = (values.square() * chance).sum() - mean**2
    assert chance.sum().item() == pytest.approx(1)
    assert (mean.item(), variance.item()) == pytest.approx(dot_moments(dim, scale))


def test_dot_spread_grows_with_width_unless_scaled() -> None:
    found = quantities.dot_spread([4, 64, 512])
    assert found.plain == pytest.approx([4, 64, 512])
    assert found.scaled == pytest.approx([1, 1, 1])


def test_online_pass_follows_the_worked_numbers() -> None:
    found = quantities.online_pass(exact([1.0, 3, 2]), exact([1.0, 2, 3]))
    near(found.m, [1.0, 3, 3])
    near(found.d, [1, 1.1353352832, 1.5032147244])
    near(found.shrink, [0, math.exp(-2), 1])
    near(found.o[-1:], [2.1546979], 1e-6)
    near(found.o[-1], (softmax(found.x) @ found.values).item())


# --- positions ----------------------------------------------------------------------------------------------------


def test_sinusoidal_table_has_a_frequency_for_each_pair() -> None:
    table = quantities.sinusoidal_table(4, 4)
    near(table.vectors[1], [0.8414709848, 0.5403023059, 0.0099998333, 0.9999500004])
    assert table.alike[0, 2] == pytest.approx(table.alike[1, 3].item())  # the distance alone


def test_learned_table_compares_directions() -> None:
    table = quantities.learned_table(exact([[1.0, 0], [0, 2], [-3, 0], [0, 0]]))
    near(table.alike, [[1.0, 0, -1, 0], [0, 1, 0, 0], [-1, 0, 1, 0], [0, 0, 0, 0]])


def test_rope_clocks_turn_by_position_times_frequency() -> None:
    found = quantities.rope_clocks(Rope(), 8, [0, 1, 7], [0, 1, 3])
    near(found.angles, [[0, 0, 0], [1, 0.1, 0.001], [7 - 2 * math.pi, 0.7, 0.007]])
    near(found.wavelengths / (2 * math.pi), [1.0, 10, 1000])


def test_rope_score_depends_on_distance_alone() -> None:
    q, k = torch.tensor([3, 10, 500]), torch.tensor([1, 8, 498])
    for layout in ("half", "interleaved"):
        score = quantities.rope_score(Rope(layout=layout), 16, q, k)
        near(score, [score[0].item()] * 3, 1e-12)
    frequencies = Rope().frequencies(16, torch.float64)
    near(score[0], torch.cos(2 * frequencies).mean().item(), 1e-12)


def test_distance_scores_start_whole_and_alibi_falls_straight() -> None:
    found = quantities.distance_scores({"plain": Rope(), "slow": Rope(500000.0)}, 32, 9, alibi=2)
    assert all(curve[0] == pytest.approx(1.0) for curve in found.shares.values())
    assert found.shares["slow"][8] > found.shares["plain"][8]
    near(found.added["head 0"], [-d / 16 for d in range(9)])
    near(found.added["head 1"], [-d / 256 for d in range(9)])


# --- cost ---------------------------------------------------------------------------------------------------------


def test_cache_table_of_llama_3_is_128_kib_a_token() -> None:
    found = quantities.cache_table(quantities.cache_variants("llama-3.1-8b"), [32768])
    rows = dict(zip(found.names, zip(found.per_token, (t[0] / GIB for t in found.totals))))
    assert rows == {
        "MHA": (512 * 1024, 16.0),
        "GQA, 8 groups": (128 * 1024, 4.0),
        "MQA": (16 * 1024, 0.5),
    }


def test_cache_table_of_deepseek_v3_is_its_latent() -> None:
    found = quantities.cache_table(quantities.cache_variants("deepseek-v3"), [32768])
    sizes = dict(zip(found.names, found.per_token))
    assert sizes["MLA"] == 70272
    assert sizes["MHA"] / sizes["MLA"] == pytest.approx(56.9, abs=0.05)
    assert found.totals[found.names.index("MLA")][0] / GIB == pytest.approx(2.14, abs=0.005)
    sparse = quantities.cache_table(quantities.cache_variants("deepseek-v3.2"), [1])
    assert dict(zip(sparse.names, sparse.per_token))["MLA and DSA's index"] == 70272 + 61 * 128 * 2


def test_cache_table_counts_the_bytes_of_a_number() -> None:
    half, full = (quantities.cache_table({"a": (GQA(4), 64, 3)}, [10], width) for width in (2, 4))
    assert half.totals == [[10 * 3 * 128 * 2]]
    assert full.per_token[0] == 2 * half.per_token[0]


def test_forgetting_is_the_gradient_of_a_recurrence() -> None:
    found = quantities.forgetting([0.5, 1.1], 6)
    for rate, left in zip(found.rates, found.left):
        first = h = torch.ones((), dtype=torch.float64, requires_grad=True)
        for _ in range(6):
            h = rate * h
        h.backward()
        assert left[6].item() == pytest.approx(first.grad.item())
    assert found.path.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert found.attention_path.tolist() == [0, 1, 1, 1, 1, 1, 1]


def test_half_life_is_when_a_half_is_left() -> None:
    assert 0.9 ** quantities.half_life(0.9) == pytest.approx(0.5)
    assert quantities.half_life(1.0) == math.inf


def test_layer_costs_are_even_at_twice_the_width() -> None:
    found = quantities.layer_costs(512, [128, 1024])
    assert found.work["its scores and sums"][0] == 16_777_216
    assert found.work["its projections"][0] == 134_217_728
    assert found.work["its scores and sums"][1] == found.work["its projections"][1]
    assert found.even == 1024
    assert found.work["LSTM"][1] == 1024 * 8 * 512**2 == found.work["attention"][1]
    assert found.waits == {"RNN": [128, 1024], "attention, training": [1, 1]}


# --- sparse selection ---------------------------------------------------------------------------------------------


def test_selection_follows_the_worked_indexer() -> None:
    dense = softmax(exact([0.4, -0.1, 0.6, 0.3]))
    found = quantities.selection(exact([0.0756, 0.374, 0.0, 0.308]), dense, 2)
    assert found.chosen.tolist() == [False, True, False, True]
    assert found.share == pytest.approx((dense[1] + dense[3]).item())
    assert (found.read, found.visible) == (2, 4)


def test_selection_of_all_keys_keeps_all_and_never_reads_hidden_ones() -> None:
    hidden = exact([1.0, -math.inf, 0, 0])
    found = quantities.selection(hidden, exact([[0.5, 0, 0.25, 0.25], [1, 0, 0, 0]]), 9)
    assert found.share == 1.0 and found.chosen.tolist() == [True, False, True, True]
    tied = quantities.selection(hidden, exact([0.5, 0, 0.25, 0.25]), 2)
    assert tied.chosen.tolist() == [True, False, True, False]  # the earliest of equals
    assert tied.share == pytest.approx(0.75)
