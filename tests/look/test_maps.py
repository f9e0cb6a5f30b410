"""The numbers about attention maps, against cases worked out by hand."""

import math

import pytest
import torch

from regard.errors import UsageError
from regard.see.maps import (
    Link,
    average,
    best,
    cross,
    distance,
    entropy,
    links,
    rollout,
    summary,
    thumbnail,
)

ONE = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]])  # t s


def test_entropy_of_one_key_is_zero_and_of_n_even_ones_log2_n() -> None:
    assert entropy(ONE).tolist() == [0.0, 1.0, 1.5]
    assert entropy(torch.full((1, 8), 1 / 8)).item() == pytest.approx(3.0)


def test_entropy_of_a_row_with_a_sink_is_that_of_its_rest() -> None:
    torch.testing.assert_close(entropy(ONE * 0.3), entropy(ONE))


def test_entropy_of_an_empty_row_is_nan() -> None:
    assert entropy(torch.zeros(1, 3)).isnan().all()


def test_distance_is_the_mean_number_of_tokens_back() -> None:
    assert distance(ONE).tolist() == [0.0, 0.5, 0.75]  # 0.25 * 2 + 0.25 * 1


def test_distance_of_one_decoding_step_counts_from_the_last_key() -> None:
    assert distance(torch.tensor([[1.0, 0, 0, 0]])).item() == 3.0


def test_rollout_of_two_layers_by_hand() -> None:
    """A = [[1, 0], [1/2, 1/2]]: A/2 + I/2 = [[1, 0], [1/4, 3/4]], squared [[1, 0], [7/16, 9/16]]."""
    a = torch.tensor([[[[1.0, 0], [0.5, 0.5]]]])
    torch.testing.assert_close(rollout([a, a]), torch.tensor([[[1, 0], [7 / 16, 9 / 16]]]))


def test_rollout_multiplies_later_layers_from_the_left() -> None:
    """First everything looks at token 0, then row 1 looks at itself only; in the other order the result differs."""
    first = torch.tensor([[[[1.0, 0], [1.0, 0]]]])
    then = torch.eye(2)[None, None]
    torch.testing.assert_close(rollout([first, then])[0], torch.tensor([[1, 0], [0.5, 0.5]]))
    swap = torch.tensor([[[[0, 1.0], [1.0, 0]]]])
    want = torch.tensor([[0.75, 0.25], [0.75, 0.25]])  # swap/2 + I/2 = 1/2 everywhere
    torch.testing.assert_close(rollout([first, swap])[0], want)
    want = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    torch.testing.assert_close(rollout([swap, first])[0], want)


def test_rollout_rows_sum_to_one_with_sinks_and_padding() -> None:
    layers = [torch.rand(2, 3, 5, 5).tril() for _ in range(4)]
    layers[1][0, :, 4] = 0  # a row that sees nothing keeps itself
    total = rollout(layers).sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))


def test_rollout_of_maps_that_are_not_whole_is_refused() -> None:
    with pytest.raises(UsageError, match="all rows of one forward"):
        rollout([torch.rand(1, 2, 1, 5)])
    with pytest.raises(UsageError, match="every layer"):
        rollout([])


def test_average_counts_layers_alike_whatever_their_heads() -> None:
    layers = [torch.ones(1, 2, 1, 1), torch.zeros(1, 4, 1, 1)]
    assert average(layers).item() == 0.5


def test_maps_of_different_texts_have_no_rollout_and_no_average() -> None:
    source, target = torch.rand(1, 2, 5, 5), torch.rand(1, 2, 3, 3)
    with pytest.raises(UsageError, match="rollout needs layers that read the same tokens"):
        rollout([source, target])
    with pytest.raises(UsageError, match="an average needs layers that read the same tokens"):
        average([source, target])


def test_best_source_of_each_target_and_links() -> None:
    a = torch.tensor([[0.1, 0.7, 0.2], [0.45, 0.1, 0.45], [0.0, 0.0, 0.0]])
    assert best(a).tolist() == [1, 0, -1]
    found = links(a)
    assert [(x.source, x.target) for x in found] == [(1, 0), (0, 1)]
    assert found[0] == Link(1, 0, a[0, 1].item(), True)


def test_links_name_the_strongest_and_the_strong() -> None:
    a = torch.tensor([[0.7, 0.3, 0], [0.25, 0.25, 0.5], [0, 0, 0], [0.4, 0.4, 0.2]]).double()
    assert [(x.target, x.source, x.best) for x in links(a, least=0.3)] == [
        (0, 0, True),
        (0, 1, False),
        (1, 2, True),
        (3, 0, True),
        (3, 1, False),
    ]
    with pytest.raises(UsageError, match="least=0.0"):
        links(a, 0.0)


def test_cross_picks_the_maps_between_two_texts_or_says_there_are_none() -> None:
    maps = {"encoder.0.self": [ONE], "decoder.0.cross": [ONE]}
    assert list(cross(maps)) == ["decoder.0.cross"]
    with pytest.raises(UsageError, match="cross-attention.*this one has 0.self"):
        cross({"0.self": [ONE]})


def test_summary_of_heads_by_hand() -> None:
    previous = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0]])
    (a, b) = summary({"0.self": [torch.stack([ONE, previous])[None]]})
    assert (a.site, a.head, b.head) == ("0.self", 0, 1)
    assert a.entropy == pytest.approx(2.5 / 3) and b.entropy == 0
    assert a.distance == pytest.approx(1.25 / 3) and b.distance == pytest.approx(2 / 3)
    assert a.largest == pytest.approx(2 / 3) and b.largest == 1
    assert a.own == pytest.approx(2 / 3) and b.own == pytest.approx(1 / 3)
    assert a.before == pytest.approx(0.75 / 3) and b.before == pytest.approx(2 / 3)
    assert a.first == pytest.approx(1.75 / 3) and b.first == pytest.approx(2 / 3)


def test_summary_joins_decoding_steps_and_leaves_empty_rows_out() -> None:
    whole = summary({"0.self": [ONE[None, None]]})[0]
    steps = [ONE[None, None, :2, :2], ONE[None, None, 2:]]
    assert summary({"0.self": steps})[0][2:] == pytest.approx(whole[2:])
    padded = torch.cat([ONE, torch.zeros(3, 3)]).view(2, 1, 3, 3)
    assert summary({"0.self": [padded]})[0][2:] == pytest.approx(whole[2:])


def test_summary_of_cross_attention_has_no_distance() -> None:
    (line,) = summary({"decoder.0.cross": [torch.full((1, 1, 2, 4), 0.25)]}, heads=[5])
    assert line.head == 5 and line.entropy == 2 and line.largest == line.first == 0.25
    assert all(math.isnan(x) for x in (line.distance, line.own, line.before))


def test_thumbnail_keeps_the_largest_weight_of_each_field() -> None:
    a = torch.eye(8)[None, None]
    assert torch.equal(thumbnail(4)(a)[0, 0], torch.eye(4))
    assert torch.equal(thumbnail(9)(a), a)
