"""regard explain --interview: that each number is what another way of computing it gives."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.cli.main import main
from regard.learn.interview import QUESTIONS, TEXTS, asked

Said = pytest.CaptureFixture[str]


def rows(number: int) -> list[list[list[Any]]]:
    return [[list(row) for row in table.rows] for table in asked(number).tables({})]


def columns(table: list[list[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*table)]


def test_there_are_eleven_and_each_is_derived_and_in_numbers() -> None:
    assert len(QUESTIONS) == len(TEXTS) == 11
    for number, each in enumerate(QUESTIONS, 1):
        assert each.name == str(number) and each.question.endswith("?") and len(each.formula) > 200
        assert all(table.rows for table in each.tables({})) and each.code


def test_1_recurrence_is_a_product_and_attention_one_factor() -> None:
    way, costs = rows(1)
    for n, steps, slope, one, weight in way:
        assert (steps, one) == (n, 1)
        assert (slope, weight) == pytest.approx((0.9**n, 1 / n))
    for n, rnn, projections, pairs in costs:
        assert [rnn, projections, pairs] == [2 * n * 512**2, 4 * n * 512**2, 2 * n**2 * 512]


def test_2_one_matrix_makes_scores_symmetric_and_output_is_linear_in_values() -> None:
    (one, apart), values = rows(2)
    assert one[1] == pytest.approx(one[2]) and one[3] == pytest.approx(0, abs=1e-12)
    assert apart[3] >= abs(apart[1] - apart[2]) > 0.1
    assert [row[1] / values[0][1] for row in values] == pytest.approx([1, 2, 3])


def test_3_variance_is_d_and_scores_that_are_divided_learn_at_every_d() -> None:
    signs, drawn = rows(3)
    assert [row[1:] for row in signs] == [[0, d, 1] for d in (1, 2, 4, 8)]
    _, largest, slope, divided, kept = columns(drawn)
    assert largest == sorted(largest) and slope == sorted(slope, reverse=True)
    assert largest[-1] > 0.95 and slope[0] > 8 * slope[-1]
    assert max(divided) < 0.35 and max(kept) - min(kept) < 0.003
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 16, generator=g, dtype=torch.float64) for n in (200, 10))
    p = (q @ k.T).softmax(-1)
    assert drawn[0][1:3] == pytest.approx([p.amax(-1).mean().item(), (p * (1 - p)).mean().item()])


def test_4_pairs_of_each_attention_and_that_a_later_word_moves_nothing_behind_a_mask() -> None:
    kinds, change = rows(4)
    assert [row[3] for row in kinds] == [6 * 6, 4 * 5 // 2, 4 * 6]
    _, both, masked = columns(change)
    assert min(both) > 0 and masked[:-1] == [0] * 4
    # The last token sees all under either.
    assert masked[-1] == both[-1]


def test_5_attention_sees_a_set_and_a_product_of_positions_their_distance() -> None:
    (without, given), dots = rows(5)
    assert without[1] == 0 and given[1] > 0.1
    speeds = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    for k, *found in dots:
        assert found == pytest.approx([(k * speeds).cos().sum().item()] * 4, rel=1e-5)


def test_6_a_sum_keeps_the_gradient_and_layer_norm_keeps_tokens_apart() -> None:
    gradients, change = rows(6)
    for layers, plain, residual in gradients:
        assert (plain, residual) == pytest.approx((0.1**layers, 1.1**layers))
    _, layer, batch = columns(change)
    assert layer[:-1] == [0] * 4 and min(batch) > 0.1
    # A token and its double have the same norm, but for eps.
    assert 0 < layer[-1] < 1e-5


def test_7_heads_cost_nothing_and_two_of_them_see_two_words() -> None:
    costs, maps = rows(7)
    assert [row[2:] for row in costs] == [[4 * 128 * 512**2, 2 * 128**2 * 512]] * 3
    assert maps[0][1:3] == pytest.approx([0.5, 0.5]) and maps[0][4] == "0.50 1.50"
    assert [row[4] for row in maps[1:]] == ["1.00 0.00", "0.00 3.00"]
    assert all(sum(row[1:4]) == pytest.approx(1) for row in maps)


def test_8_one_pass_is_every_beginning_alone() -> None:
    steps, ((once, apart),) = rows(8)
    assert [row[1:3] for row in steps] == [[7, 3], [3, 9], [9, 4], [4, 8]]
    assert [row[4] for row in steps] == [0] * 4
    assert once == pytest.approx(apart) == pytest.approx(sum(row[3] for row in steps))


def test_9_words_that_are_given_take_one_pass_and_own_words_one_each() -> None:
    passes, products = rows(9)
    assert all(row[1:] == [1, row[0]] for row in passes)
    for n, cached, without in products:
        assert (cached, without) == (n * (n + 1) // 2, n * (n + 1) * (2 * n + 1) // 6)


def test_10_feed_forward_moves_no_other_token_and_attention_is_cubic_without_its_softmax() -> None:
    change, ratios = rows(10)
    _, ffn, attention = columns(change)
    assert ffn[:-1] == [0] * 4 and ffn[-1] > 0 and min(attention) > 0
    held, cubic, softened = (row[1] for row in ratios)
    assert (held, cubic) == pytest.approx((2, 8)) and 2.1 < softened < 7.9


def test_11_gradient_is_autograds_and_vanishes_with_large_scores_but_not_in_the_loss() -> None:
    unlike, vanishing = rows(11)
    assert [row[1] for row in unlike] == [0, 0]
    for a, weight, largest, loss in vanishing:
        p = 1 / (1 + 2 * math.exp(-a))
        assert weight == pytest.approx(p)
        assert largest == pytest.approx(p * (1 - p), rel=1e-6)
        assert loss == pytest.approx(max(p, 1 - (1 - p) / 2))


def test_list_and_answer_are_printed_and_as_json_and_drawn(capsys: Said, tmp_path: Path) -> None:
    assert main(["explain", "--interview"]) == 0
    out = capsys.readouterr().out
    assert all(f"{each.name:>2}  {each.question}" in out for each in QUESTIONS)
    assert main(["explain", "--interview", "--json"]) == 0
    assert [row["number"] for row in json.loads(capsys.readouterr().out)] == [*range(1, 12)]
    path = tmp_path / "six.svg"
    assert main(["explain", "--interview", "6", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("6: What are") and "1.1000" in out and path.read_bytes()[:5] == b"<?xml"
    assert main(["explain", "--interview", "6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["topic"] == "6"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--interview", "12"], "--interview 12: there are questions 1 to 11"),
        (["--interview", "0"], "--interview 0: there are questions 1 to 11"),
        (["--interview", "1", "2"], "--interview stands alone"),
        (["softmax", "--interview", "1"], "--interview stands alone"),
        (["--interview", "1", "--x", "2"], "--interview stands alone"),
        (["--interview", "--output", "x.png"], "--interview stands alone"),
    ],
)
def test_mistake_is_one_line(arguments: list[str], said: str, capsys: Said) -> None:
    assert main(["explain", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and said in err and len(err.splitlines()) == 1
