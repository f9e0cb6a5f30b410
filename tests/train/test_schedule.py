"""The learning rate over time: where it begins, peaks and ends."""

import math
from itertools import pairwise

import pytest

from regard.config import UsageError
from regard.train.schedule import SHAPES, Schedule, noam

PLANS = {
    "noam": Schedule("noam", 100, 10),
    "cosine": Schedule("cosine", 100, 10, floor=0.1),
    "linear": Schedule("linear", 100, 10, floor=0.1),
    "wsd": Schedule("wsd", 100, 10, floor=0.1, decay=20),
    "constant": Schedule("constant", 100, 10),
}


def test_schedule_plans_cover_every_shape() -> None:
    assert PLANS.keys() == SHAPES.keys()


@pytest.mark.parametrize("name", PLANS)
def test_schedule_warms_up_evenly_to_its_peak(name: str) -> None:
    factors = [PLANS[name](step) for step in range(1, 101)]
    assert factors[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(factors) == factors[9] == 1
    assert all(a >= b for a, b in pairwise(factors[9:]))  # and never rises again


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_schedule_ends_at_its_floor_and_stays(name: str) -> None:
    plan = PLANS[name]
    assert plan(99) > 0.1 and plan(100) == pytest.approx(0.1) and plan(1000) == plan(100)


def test_schedule_noam_is_the_formula_of_2017_over_its_peak() -> None:
    plan = PLANS["noam"]
    for step in (1, 5, 10, 11, 99, 5000):
        assert plan(step) == pytest.approx(noam(step, 512, 10) / noam(10, 512, 10))


def test_schedule_cosine_is_half_way_in_the_middle() -> None:
    assert PLANS["cosine"](55) == pytest.approx(0.55)
    quarter = 0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2
    assert PLANS["cosine"](40) == pytest.approx(quarter)


def test_schedule_wsd_is_flat_until_its_decay() -> None:
    plan = PLANS["wsd"]
    assert {plan(step) for step in range(10, 81)} == {1.0}
    assert plan(90) == pytest.approx(0.55)


def test_schedule_without_warmup_begins_at_its_peak() -> None:
    assert Schedule("constant", 5)(1) == 1
    assert Schedule("linear", 5)(1) == pytest.approx(0.8)


@pytest.mark.parametrize(
    "settings, hint",
    [
        ({"shape": "cosin"}, "did you mean 'cosine'"),
        ({"steps": 0}, "give 1 or more"),
        ({"steps": 5, "warmup": 6}, "warmup from 0 to steps"),
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
