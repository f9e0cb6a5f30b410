"""What `make test` leaves out is what tests/wide.py marks, and nothing else."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.wide import crossed, wide

ROOT = Path(__file__).resolve().parents[1]


def kept(rows: list[Any]) -> list[tuple[Any, ...]]:
    return [row.values for row in rows if not row.marks]


def test_row_that_is_not_named_is_wide() -> None:
    rows = wide(["a", "new", "b"], keep=["b", "a"])
    assert [row.values for row in rows] == [("a",), ("new",), ("b",)]
    assert kept(rows) == [("a",), ("b",)]
    assert [mark.name for mark in rows[1].marks] == ["wide"]


@pytest.mark.parametrize("keep", [[], ["c"], ["a", "c"]])
def test_nothing_to_keep_and_a_row_that_is_not_there_are_refused(keep: list[str]) -> None:
    with pytest.raises(AssertionError, match="not rows of the table"):
        wide(["a", "b"], keep)


def test_crossed_keeps_every_value_of_every_axis() -> None:
    axes = [["a", "b", "c"], [1, 2], [True, False]]
    rows = crossed(*axes)
    assert [row.values for row in rows] == list(product(*axes))
    assert kept(rows) == [
        ("a", 1, True),
        ("a", 1, False),
        ("a", 2, True),
        ("b", 1, True),
        ("c", 1, True),
    ]


def test_mark_is_given_in_one_place() -> None:
    own = {ROOT / "tests/wide.py", Path(__file__)}
    files = [path for path in (ROOT / "tests").rglob("*.py") if path not in own]
    assert [path for path in files if "mark.wide" in path.read_text(encoding="utf-8")] == []


def test_make_runs_the_wide_and_the_others() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    asked = [line.partition(" -m pytest ")[2] for line in lines if "--dist" in line]
    assert asked == ['-n 2 --dist loadfile -m "not wide"', "-n 2 --dist loadfile -m wide"]
    assert "make test\nmake test-wide\n" in (ROOT / ".ci/run").read_text(encoding="utf-8")
