"""A few rounds of tests/decode/storm.py, which says what they are and how to run thousands."""

import pytest

from tests.decode.storm import FAMILIES, play


# Both kinds of equality, and runners, layouts and families as they come.
@pytest.mark.parametrize(
    "seed", [0, 9, len(FAMILIES) + 2, len(FAMILIES) + 16, 2 * len(FAMILIES) + 2]
)
def test_random_requests_are_answered_as_alone(seed: int) -> None:
    counts = play(seed, requests=8)
    assert counts["length"] + counts["eos"] + counts["stop"] >= 2


@pytest.mark.parametrize("seed", [1, 6, len(FAMILIES) + 6])
def test_faults_anywhere_in_a_step_change_no_answer(seed: int) -> None:
    assert play(seed, faults=True, requests=8)["faults"] >= 1


@pytest.mark.parametrize("seed", [4, len(FAMILIES) + 12])
def test_too_little_memory_changes_no_other_answer(seed: int) -> None:
    assert play(seed, starved=True, requests=8)["out of memory"] >= 1
