"""The learning rate over time: where it begins, peaks and ends."""

import math
from itertools import pairwise

import pytest

from regard.errors import UsageError
from regard.training.optim import SHAPES, Schedule, noam
from regard.training.trainer import Train

PLANS = {
    "noam": Schedule("noam", 100, 10),
    "cosine": Schedule("cosine", 100, 10, floor=0.1),
    "linear": Schedule("linear", 100, 10, floor=0.1),
    "wsd": Schedule("wsd", 100, 10, floor=0.1, decay=20),
    "constant": Schedule("constant", 100, 10),
}


def test_schedule_plans_cover_every_shape() -> None:
    assert PLANS.keys() == set(SHAPES)


@pytest.mark.parametrize("name", PLANS)
def test_schedule_warms_up_evenly_to_its_peak(name: str) -> None:
    factors = [PLANS[name](step) for step in range(1, 101)]
    assert factors[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(factors) == factors[9] == 1
    assert all(a >= b for a, b in pairwise(factors[9:]))  # and never rises again


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_schedule_ends_at_its_floor_and_stays(name: str) -> None:
    """After the last step: a floor of 0 before it would make that step change nothing."""
    plan = PLANS[name]
    assert plan(100) > 0.1 and plan(101) == pytest.approx(0.1) and plan(1000) == plan(101)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_schedule_moves_the_weights_at_every_step(name: str, steps: int) -> None:
    settings = {"decay": steps} if name == "wsd" else {"warmup": 1}
    plan = Schedule(name, steps, **settings)
    assert all(plan(step) > 0 for step in range(1, steps + 1))


def test_schedule_is_as_long_as_the_training_unless_it_says_a_length() -> None:
    train = Train(steps=5000)
    assert train.rate(1) == 1 and train.rate(3000) > 0.3 and 0 < train.rate(5000) < 1e-6
    said = Train(steps=50, schedule=Schedule(steps=10, floor=0.1))
    assert said.rate(10) > 0.1 and said.rate(11) == said.rate(50) == pytest.approx(0.1)
    with pytest.raises(UsageError, match="a schedule of 3 steps cannot warm up for 4"):
        Train(steps=3, schedule=Schedule(warmup=4))
    with pytest.raises(UsageError, match="the linear schedule needs its length: give steps"):
        Schedule("linear")(1)
    rising = Schedule("cosine", warmup=4)
    assert [rising(step) for step in (1, 2, 3)] == [0.25, 0.5, 0.75]
    with pytest.raises(UsageError, match="the cosine schedule needs its length: give steps"):
        rising(4)


def test_schedule_noam_is_the_formula_of_2017_over_its_peak() -> None:
    plan = PLANS["noam"]
    for step in (1, 5, 10, 11, 99, 5000):
        assert plan(step) == pytest.approx(noam(step, 512, 10) / noam(10, 512, 10))


def test_schedule_cosine_is_half_way_in_the_middle() -> None:
    plan = Schedule("cosine", 99, 10, floor=0.1)
    assert plan(55) == pytest.approx(0.55)
    assert plan(40) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2)


def test_schedule_wsd_is_flat_until_its_decay() -> None:
    plan = PLANS["wsd"]
    assert {plan(step) for step in range(10, 81)} == {1.0}
    assert plan(91) == pytest.approx(1 - 0.9 * 11 / 21)


def test_schedule_without_warmup_begins_at_its_peak() -> None:
    assert Schedule("constant", 5)(1) == Schedule("cosine", 5)(1) == 1
    assert [Schedule("linear", 5)(k) for k in range(1, 7)] == pytest.approx(
        [1, 0.8, 0.6, 0.4, 0.2, 0]
    )


@pytest.mark.parametrize(
    "settings, hint",
    [
        ({"shape": "cosin"}, "did you mean 'cosine'"),
        ({"steps": 0}, "give 1 or more"),
        ({"steps": 5, "warmup": 6}, "give train.schedule.warmup from 0 to 5"),
        ({"floor": 1.5}, "0 to 1"),
        ({"shape": "noam"}, "warmup of at least 1"),
        ({"shape": "wsd"}, "decay"),
        ({"decay": 3}, "decay"),
        ({"shape": "wsd", "steps": 9, "warmup": 5, "decay": 5}, "1 to steps - warmup = 4"),
    ],
)
def test_schedule_refuses_what_does_not_fit(settings: dict, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        Schedule(**settings)


def test_schedule_counts_from_one() -> None:
    with pytest.raises(UsageError, match="count from 1"):
        Schedule()(0)


def test_warmup_may_be_a_share_of_the_steps() -> None:
    share, steps = Schedule("linear", warmup=0.1), Schedule("linear", warmup=20)
    assert [share.over(200)(k) for k in range(1, 201)] == [
        steps.over(200)(k) for k in range(1, 201)
    ]
    assert Schedule("constant", warmup=0.001).over(10)(1) == 1.0
    # One is a step, and not all of them.
    assert Schedule("constant", warmup=1).over(10).warmup == 1
    with pytest.raises(UsageError, match="^schedule.warmup = 2.5: give whole steps, or a share"):
        Schedule(warmup=2.5)
    assert Schedule(warmup=2.0).over(4)(1) == 0.5


def test_passes_over_the_data_are_steps_once_it_is_counted() -> None:
    assert Train(epochs=2.5).counted(3.2).steps == 8
    assert Train(epochs=0.5).counted(0.3).steps == 1
    assert Train(epochs=2.5).counted(3.2).epochs is None
    assert Train(steps=7).counted(3.2) == Train(steps=7)
    # A warm-up longer than the default number of steps may fit then.
    long = Train(epochs=2, schedule=Schedule(warmup=3000))
    assert long.counted(2000).rate(1500) == 0.5


@pytest.mark.parametrize("steps", [1, 3, 10, 11, 24, 99, 100, 1001])
@pytest.mark.parametrize("evaluate", [0, 0.1, 0.25, 0.34, 1, 7, 2000])
def test_evaluations_are_as_many_as_is_said(steps: int, evaluate: float) -> None:
    """A share of all steps gives so many of them, evenly, and the last step's is one of them."""
    train = Train(steps=steps, evaluate=evaluate)
    due = [k for k in range(1, steps + 1) if train.evaluated(k)]
    assert due[-1] == steps and len(due) == train.evaluations
    if 0 < evaluate < 1:
        gaps = {b - a for a, b in zip([0, *due], due)}
        assert len(due) == min(round(1 / evaluate), steps) and max(gaps) - min(gaps) <= 1
    elif evaluate:
        assert due == sorted({*range(int(evaluate), steps + 1, int(evaluate)), steps})
    with pytest.raises(UsageError, match="^train.evaluate = 1.5: give whole steps, or a share"):
        Train(evaluate=1.5)
