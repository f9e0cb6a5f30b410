"""The matrix of families says what is measured, and a row stands for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard.checkpoint.families import FAMILIES, MATRIX
from regard.cli.main import main
from tests.checkpoint.families import FEW, ONE_PER_FAMILY
from tests.checkpoint.matrix import COLUMNS, NO, PAGE, measured, page
from tests.wide import wide

TABLE = json.loads(MATRIX.read_text(encoding="utf-8"))
# These columns are tests of their own for every family: what is no there fails there.
TESTED = ("logits", "gradients", "saved back")


def test_every_family_has_a_row_of_every_column() -> None:
    assert list(TABLE) == list(FAMILIES)
    assert {tuple(cells) for cells in TABLE.values()} == {tuple(COLUMNS)}


def test_what_is_tested_elsewhere_is_not_no() -> None:
    assert [f for f, cells in TABLE.items() if NO in [cells[name] for name in TESTED]] == []


@pytest.mark.parametrize(
    "family, name",
    wide(
        zip(FAMILIES, ONE_PER_FAMILY, strict=True),
        keep=[(f, n) for f, n in zip(FAMILIES, ONE_PER_FAMILY, strict=True) if n in FEW[:4]],
    ),
)
def test_row_is_what_is_measured(family: str, name: str) -> None:
    pytest.importorskip("transformers", reason="the peer of this test; it is in the dev extra")
    columns = [column for column in COLUMNS if column not in TESTED]
    assert measured(name, columns) == {column: TABLE[family][column] for column in columns}


def test_page_and_command_show_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert Path(PAGE).read_text(encoding="utf-8") == page(TABLE)
    assert main(["presets", "--families", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == [{"family": family, **cells} for family, cells in TABLE.items()]
