"""regard explain: what it prints, as text and as JSON, and how each mistake ends."""

import json

import pytest

from regard.cli.main import main
from regard.learn.explain import TOPICS

Said = pytest.CaptureFixture[str]


def test_list_has_every_topic_with_its_question(capsys: Said) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(TOPICS)]] == [t.name for t in TOPICS]
    assert all(t.question in line for t, line in zip(TOPICS, lines))
    assert main(["explain", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(TOPICS)


def test_topic_prints_question_formula_numbers_and_code(capsys: Said) -> None:
    assert main(["explain", "online-softmax", "--x", "1", "3", "2", "--v", "1", "2", "3"]) == 0
    out = capsys.readouterr().out
    order = [
        "online-softmax: How",
        "m' = max(m, x_i)",
        "given: --x 1 3 2",
        "1.5032  2.1547",
        "code: ",
    ]
    places = [out.index(text) for text in order]
    assert places == sorted(places)
    assert "code: regard/attention/pooling.py::one_loop" in out.splitlines()


def test_numbers_go_to_the_first_input(capsys: Said) -> None:
    assert main(["explain", "saturation", "0", "1", "2", "5", "10"]) == 0
    out = capsys.readouterr().out
    assert all(value in out for value in ("0.3333", "0.5761", "0.7870", "0.9867", "0.9999"))
    assert main(["explain", "softmax", "-1", "-2.5"]) == 0
    assert "--x -1 -2.5" in capsys.readouterr().out


def test_json_holds_the_same_numbers(capsys: Said) -> None:
    assert main(["explain", "nadaraya-watson", "--q", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["topic"] == "nadaraya-watson" and found["given"]["q"] == [10.0]
    (table,) = found["tables"]
    row = dict(zip(table["columns"], table["rows"][0]))
    assert row["boxcar"] is None and row["gaussian"] == pytest.approx(0.1004423016)


FOUR = ["1", "0", "0", "1"]
TWO = ["--q", "0.1 0.4; 0.3 0.7", "--k", "0.2 0.5; 0.6 0.3", "--v", "1.2 0.9; 0.8 1.1"]


def test_matrices_are_rows_divided_by_semicolons(capsys: Said) -> None:
    """The 2 x 2 example of the worked numbers."""
    assert main(["explain", "scaled dot-product attention", *TWO, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    weights, out = (table["rows"] for table in found["tables"])
    assert [row[-1] for row in weights] == pytest.approx(
        [0.5070705964, 0.4929294036, 0.503535475, 0.496464525]
    )
    assert [row[1:] for row in out] == [
        pytest.approx([1.0028282386, 0.9985858807]),
        pytest.approx([1.00141419, 0.999292905]),
    ]
    assert main(["explain", "attention", *TWO]) == 0
    assert 'given: --q "0.1 0.4; 0.3 0.7"' in capsys.readouterr().out


def test_matrices_may_have_one_row_and_negative_numbers(capsys: Said) -> None:
    assert main(["explain", "attention", "--q", "-1 0;", "--k", "-2 1;", "--v", "-3 -4"]) == 0
    assert capsys.readouterr().out.split("output")[1].split()[:4] == ["o_1", "o_2", "-3", "-4"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sofmax"], "did you mean 'softmax'?"),
        (["softmax", "--v", "1"], "softmax has no --v; it takes --x"),
        (["softmax", "one"], "'one' is no number"),
        (["softmax", "--x"], "--x needs numbers"),
        (["softmax", "1", "--x", "2"], "say each number once"),
        (["bleu", "3"], "it takes --text"),
        (["--x", "3"], "say which topic"),
        (["softmax", "--xs", "3"], "there is no option"),
        (
            ["attention", "--q", *FOUR, "--k", *FOUR, "--v", *FOUR],
            '--k has 4 numbers, as many as --q: is it one key? Divide rows by semicolons, such as --q "1',
        ),
        (["attention", "--q", "1 0; 1"], "--q needs rows of as many numbers each"),
        (["attention", "--q", "1 0 2;"], "are not rows of 3; rows are divided by semicolons"),
        (["attention", "--v", "1; 2"], "are not 3 rows; rows are divided by semicolons"),
        (["softmax", "1; 2"], "'1;' is no number"),
    ],
)
def test_mistake_is_one_line_and_code_two(arguments: list[str], said: str, capsys: Said) -> None:
    assert main(["explain", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and said.removeprefix("it ") in err and len(err.splitlines()) == 1
