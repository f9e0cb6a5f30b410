"""Which rows of a large table `make test` runs: a few that differ in kind, named where the table is used. The rest has
the mark `wide`: `make test-wide` runs it, and so do CI and plain `pytest`."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def wide(rows: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """Rows for `parametrize`, marked wide unless named in `keep`: a new row is one of the rest."""
    rows = list(rows)
    unknown = [name for name in keep if name not in rows]
    assert keep and not unknown, f"not rows of the table: {unknown}"
    return [_row(row) if row in keep else _row(row, pytest.mark.wide) for row in rows]


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """Every combination. Not wide are the first of each axis together, and each other value once in its place."""
    lists = [list(axis) for axis in axes]
    first = tuple(axis[0] for axis in lists)
    keep = {(*first[:i], x, *first[i + 1 :]) for i, axis in enumerate(lists) for x in axis}
    return wide(product(*lists), keep)


def _row(row: Any, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(*row if isinstance(row, tuple) else (row,), marks=marks)
