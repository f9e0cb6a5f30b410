"""regard explain: what it prints, as text and as JSON, and how each mistake ends."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.cli.main import main
from regard.errors import UsageError
from regard.evaluation.run import Shots
from regard.learn.explain import CHAPTERS, TOPICS, Table, Topic, called, find
from regard.learn.interview import QUESTIONS
from regard.learn.picture import between, drawn, series, setups, sketch
from regard.training.objectives import Prefer, answer_logs, prefer
from tests.train.test_prefer import moved
from tests.train.test_tasks import feed_for, model_for

Said = pytest.CaptureFixture[str]


def test_list_has_every_topic_with_its_question_by_chapter(capsys: Said) -> None:
    assert main(["explain"]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    assert [block.splitlines()[0] for block in blocks[:-1]] == list(CHAPTERS)
    lines = {x.split()[0]: x for block in blocks[:-1] for x in block.splitlines()[1:]}
    assert lines.keys() == {t.name for t in TOPICS}
    assert all(t.question in lines[t.name] for t in TOPICS)
    assert main(["explain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == len(TOPICS)
    assert {"chapter", "topic", "question", "words"} == set(found[0])


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
    weights, out = (table["rows"] for table in found["tables"][-2:])
    assert [row[1:] for row in weights] == [
        pytest.approx([0.5070705964, 0.4929294036]),
        pytest.approx([0.503535475, 0.496464525]),
    ]
    assert [row[1:] for row in out] == [
        pytest.approx([1.0028282386, 0.9985858807]),
        pytest.approx([1.00141419, 0.999292905]),
    ]
    assert main(["explain", "attention", *TWO]) == 0
    assert 'given: --q "0.1 0.4; 0.3 0.7"' in capsys.readouterr().out


def test_matrices_may_have_one_row_and_negative_numbers(capsys: Said) -> None:
    assert main(["explain", "attention", "--q", "-1 0;", "--k", "-2 1;", "--v", "-3 -4"]) == 0
    said = capsys.readouterr().out.split("weights times values")[1].split()
    assert said[:6] == ["query", "o_1", "o_2", "1", "-3", "-4"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["sofmax"],
            "there is no topic 'sofmax'; the nearest are softmax, masks and online-softmax",
        ),
        (["no", "such", "thing"], "there is no topic 'no such thing'; the nearest are"),
        (
            ["softmax", "--output", "softmax"],
            "--output softmax: give a name that ends in .png, .svg",
        ),
        (["softmax", "--output", "softmax.jpg"], "give a name that ends in .png, .svg or .pdf"),
        (["softmax", "--output", "nowhere/x.png"], "there is no folder nowhere; make it first"),
        (["--output", "x.png"], "say which topic"),
        (["softmax", "--v", "1"], "softmax has no --v; it takes --x"),
        (["softmax", "1", "one"], "'one' is no number"),
        (["softmax", "one"], "there is no topic 'softmax one'; the nearest are softmax, "),
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
        (["attention", "--v", "1; 2; 3"], "are not 2 rows; rows are divided by semicolons"),
        (["softmax", "1; 2"], "'1;' is no number"),
    ],
)
def test_mistake_is_one_line_and_code_two(arguments: list[str], said: str, capsys: Said) -> None:
    assert main(["explain", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and said.removeprefix("it ") in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("more", ["", "mechanism", "of the model", "gone astray"])
def test_words_without_quotes_are_the_words_in_quotes(more: str) -> None:
    """Of every word for a topic, whatever follows: the same topic, or the same sentence."""

    def found(*said: str) -> str:
        try:
            return called(said[0], said[1:], {})[0].name
        except UsageError as error:
            return str(error)

    words = [
        n
        for topics in CHAPTERS.values()
        for ts in topics.items()
        for n in (ts[0], *ts[1].split(","))
    ]
    assert len(words) > 200
    # Where there is no such topic the nearest are looked for, which takes a while.
    for each in words if more in ("", "mechanism") else words[::20]:
        quoted = f"{each} {more}".strip()
        assert found(*quoted.split()) == found(quoted), quoted
        assert "is no number" not in found(*quoted.split())


def test_words_may_stand_without_quotes(capsys: Said) -> None:
    assert main(["explain", "layer", "norm", "1", "2", "6"]) == 0
    assert "norms: What" in (out := capsys.readouterr().out) and "--x 1 2 6" in out


# One of each kind: bars, lines, a log scale, a map with a sign, several maps, the figure.
PICTURES = ("softmax", "decoding", "cost", "jacobian", "masks", "transformer")


@pytest.mark.parametrize("name", PICTURES)
def test_picture_of_a_topic_is_written(name: str, tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "picture.png"
    assert main(["explain", name, "--output", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert find(name).question in capsys.readouterr().out


def test_picture_may_be_svg_or_pdf(tmp_path: Path, capsys: Said) -> None:
    for ending, first in ((".svg", b"<?xml"), (".pdf", b"%PDF")):
        path = tmp_path / f"picture{ending}"
        assert main(["explain", "softmax", "1", "2", "--output", str(path)]) == 0
        assert path.read_bytes().startswith(first)


# Topics and questions whose lines join what can be counted: widths, keys, tokens, tiles, words, layers, steps; or the
# numbers of one vector.
COUNTED = {
    "scaling",
    "online-softmax",
    "flash-attention",
    "delta-rule",
    "decoding",
    "exposure-bias",
    "multi-token-prediction",
}
COUNTED |= {"resume", "1", "3", "6", "9"}
VECTORS = {"norms", "quantisation", "clipping"}


def figure_of(topic: Topic, **given: tuple[str, ...]) -> Any:
    return drawn(topic, topic.read(given))()


@pytest.mark.parametrize("topic", [*TOPICS, *QUESTIONS], ids=lambda t: t.name)
def test_picture_of_a_formula_is_smooth_and_its_axes_have_names(topic: Topic) -> None:
    """A curve of a formula has a hundred points or more, or every whole number of its range, and a
    mark at each number of the table; what is counted or measured has marks."""
    from tests.look.test_plots import check_readable

    tables = [t for t in topic.tables({}) if t.draw]
    figure = figure_of(topic)
    if tables[0].draw == "figure":
        return
    check_readable(figure)
    panels = [t for t in tables for _ in range(len(t.columns) - 1 if t.draw == "masks" else 1)]
    for ax, table in zip(figure.axes, panels, strict=True):
        assert ax.get_xlabel() and ax.get_ylabel()
        if table.draw.partition(" ")[0] not in ("lines", "log", "rows"):
            continue
        curves = [line for line in ax.lines if line.get_linestyle() != "None"]
        marks = [line for line in ax.lines if line.get_linestyle() == "None"]
        assert curves and all(line.get_label() in series(table) for line in curves)
        if table.over:
            assert len(marks) == len(curves)
            assert min(len(line.get_xdata()) for line in curves) >= 100
            found = marks
        else:
            assert topic.name in COUNTED | VECTORS and not marks
            assert topic.name in VECTORS or all(isinstance(row[0], int) for row in table.rows)
            assert all(line.get_marker() != "None" for line in curves)
            found = curves
        for line, points in zip(found, series(table).values(), strict=True):
            assert line.get_xdata() == pytest.approx([x for x, _ in points])
            assert line.get_ydata() == pytest.approx([y for _, y in points], nan_ok=True)


def test_curve_goes_through_the_numbers_of_the_table() -> None:
    (axes,) = figure_of(find("saturation"), a=("1", "7")).axes
    curve, marks = axes.lines[:2]
    x, y = curve.get_xdata(), curve.get_ydata()
    assert (x[0], x[-1]) == (1, 7) and list(x) == sorted(x)
    assert y == pytest.approx([1 / (1 + 2 * math.exp(-a)) for a in x])
    assert list(marks.get_xdata()) == [1, 7]


def test_one_number_is_shown_in_the_range_of_the_example() -> None:
    (axes,) = figure_of(find("nadaraya-watson"), q=("2",)).axes
    curve, mark = axes.lines[:2]
    assert (min(curve.get_xdata()), max(curve.get_xdata())) == (0, 10)
    assert list(mark.get_xdata()) == [2]


def test_numbers_between_are_whole_for_what_is_counted() -> None:
    assert between([1, 150], log=False, whole=True) == tuple(range(1, 151))
    far = between([10, 10000], log=True, whole=True)
    assert 100 <= len(far) <= 401 and all(x == int(x) for x in far)
    near = between([0, 3], log=False, whole=False)
    assert len(near) >= 100 and 1.5 in near
    (axes,) = figure_of(find("schedules"), steps=("1", "9"), warmup=("3",)).axes
    assert list(axes.lines[0].get_xdata()) == [*range(1, 10)]


def test_every_topic_has_a_picture_of_a_known_kind() -> None:
    kinds = {"bars", "lines", "log", "rows", "map", "masks", "figure"}
    for each in TOPICS:
        found = [table for table in each.tables({}) if table.draw]
        assert found, each.name
        for table in found:
            kind, _, column = table.draw.partition(" ")
            assert kind in kinds
            assert not column or any(name.startswith(column) for name in table.columns)


# Topic -> its tables with axes of logarithms: the quantity that all columns are of, and how many they are.
AXES = {
    "flash-attention": [("bytes kept for the backward, by torch's own hooks", 4)],
    "kv-cache": [("q.k products", 2), ("1,536 numbers per token and layer, 12 layers", 1)],
    "cost": [
        ("multiply-adds of one layer of width 512", 4),
        ("steps that wait for one another", 2),
    ],
    "rnn-path": [
        ("d h_t / d h_0", 4),
        ("steps on the path", 2),
        ("|h_t - h'_t| / |h_0 - h'_0|", 3),
    ],
}


def test_lines_of_one_axis_are_of_one_quantity() -> None:
    """What has another unit is in a table of its own, named after what it counts."""
    found = {
        each.name: [(t.title, len(t.columns) - 1) for t in each.tables({}) if t.draw == "log"]
        for each in TOPICS
    }
    assert {name: tables for name, tables in found.items() if tables} == AXES


def test_picture_shows_the_numbers_of_the_call() -> None:
    (axes,) = figure_of(find("softmax"), x=("0", "0", "0", "0")).axes
    assert [bar.get_width() for bar in axes.patches] == [0.25] * 4
    (axes,) = figure_of(find("jacobian")).axes
    shown = torch.tensor(axes.images[0].get_array().tolist())[:, :3]
    p = torch.tensor([1.0, 2.0, 3.0]).softmax(-1)
    torch.testing.assert_close(shown, torch.diag(p) - p[:, None] * p)


class Notes:
    """A board that keeps what is drawn."""

    def __init__(self) -> None:
        self.boxes: list[tuple[tuple[float, float], str, int]] = []
        self.arrows: list[tuple[tuple[float, float], ...]] = []

    def box(self, at: Any, size: Any, text: str, colour: int) -> None:
        self.boxes.append((at, text, colour))

    def arrow(self, *points: Any) -> None:
        self.arrows.append(points)

    def end(self, *sizes: float) -> None:
        self.sizes = sizes


def test_figure_of_the_transformer_is_that_of_the_models() -> None:
    board = Notes()
    towers = setups({"layers": 3, "dim": 64, "heads": 4, "width": 128})
    sketch(board, towers)
    texts = [text for _, text, _ in board.boxes]
    assert texts.count("x 3") == texts.count("feed-forward") == 4
    assert texts.count("causal self-attention") == 2 == texts.count("self-attention, both ways")
    assert texts.count("cross-attention") == 1 and texts.count("states of the source") == 1
    # one norm before each of two sub-layers and one at the end; one after each of 2, 2 and 3
    assert texts.count("norm") == 3 + 2 + 2 + 3 and texts.count("+") == 2 + 2 + 2 + 3
    # the encoder's last box is where the decoder's second attention gets its arrow from
    (across,) = [
        a
        for a in board.arrows
        if len(a) == 4 and a[0][0] < a[-1][0] and a[0][1] != a[-1][1] and a[1][0] > a[0][0]
    ]
    (source,) = [at for at, text, _ in board.boxes if text == "states of the source"]
    (cross,) = [at for at, text, _ in board.boxes if text == "cross-attention"]
    assert across[0] == pytest.approx((source[0] + 1.5, source[1]))
    assert across[-1] == pytest.approx((cross[0] - 1.5, cross[1]))


def rows(name: str, **given: str) -> list[list[list[Any]]]:
    return [[list(row) for row in table.rows] for table in find(name).tables(given)]


def test_mixture_uses_the_best_experts_by_shares_of_their_softmax() -> None:
    token, ((experts, active, each, every, used),) = rows("moe", x="1 3 2 0")
    p = torch.tensor([1.0, 3.0, 2.0, 0.0], dtype=torch.float64).softmax(0).tolist()
    assert [row[3] for row in token] == pytest.approx(
        [0, p[1] / (p[1] + p[2]), p[2] / (p[1] + p[2]), 0]
    )
    assert each == 3 * 4096 * 14336 and every == 4 * each + 4 * 4096
    assert (experts, active, used) == (4, 2, every - 2 * each)


def test_a_key_that_comes_again_replaces_its_value() -> None:
    recalled, kept = rows("gated delta rule", k="1 0; 0 1; 1 0", v="2; 5; 7")
    assert [row[1:] for row in recalled] == [pytest.approx(x) for x in ([2, 2], [2, 2], [7, 9])]
    faded, _ = rows("delta rule", k="1 0; 0 1", v="2; 5", decay="0.5")
    assert faded[1][1] == pytest.approx(1.0)
    # heads * d * e, and three tokens of q, k and v for the convolution; as long as the text may be
    assert {row[1] for row in kept} == {32 * 128 * 128 + 3 * (2 * 16 + 32) * 128}


def test_a_channel_forgets_by_itself() -> None:
    """Beside the geometric mean of the decays for all of them."""
    keys, values = "1 0 0; 0 1 0; 0 0 1", "1; 2; 4"
    recalled, every, _ = rows("kimi delta attention", k=keys, v=values, decay="1 0.5 0.25")
    assert [row[1] for row in recalled] == [1, 1, 1]
    assert [row[1] for row in every] == pytest.approx([1, 1, 4])
    assert [row[2] for row in every] == pytest.approx([0.25, 1, 4])


def test_state_space_dual_is_attention_whose_scores_decay() -> None:
    given = {"q": "1 2; 0 1; 1 1; -1 3", "k": "1 0; 0.5 1; 2 -1; 1 1", "v": "1; -2; 3; 5"}
    steps = (0.5, 2.0, 0.0, 1.0)
    found, both, kept = rows("mamba 2", **given, s="0.5 2 0 1", decay="0.3", skip="0.7")
    queries, keys = (
        torch.tensor([[float(x) for x in row.split()] for row in given[n].split(";")]) for n in "qk"
    )
    for t, row in enumerate(found):
        for i, weight in enumerate(row[1:]):
            fades = math.exp(-0.3 * sum(steps[i + 1 : t + 1])) * steps[i]
            want = float(queries[t] @ keys[i]) * fades * (i <= t) + 0.7 * (i == t)
            assert weight == pytest.approx(want, abs=1e-6)
    assert [row[1] for row in both] == pytest.approx([row[2] for row in both])
    # heads * d * e, and three tokens of x, B and C for the convolution
    assert {row[1] for row in kept} == {128 * 128 * 64 + 3 * (128 * 64 + 2 * 8 * 128)}


def test_three_terms_of_disentangled_scores_make_the_weights() -> None:
    *terms, weights, buckets = (
        torch.tensor([row[1:] for row in table], dtype=torch.float64)
        for table in rows("deberta", pos="-40 -1 0 3 40")
    )
    torch.testing.assert_close(sum(terms).softmax(-1), weights)
    content, *distances = terms
    assert torch.equal(content[0], content[2]) and torch.equal(content[:, 0], content[:, 2])
    assert all(not torch.allclose(each[0], each[2]) for each in distances)
    assert buckets.flatten().tolist() == [0, 7, 8, 11, 15]


def test_pages_of_a_shared_beginning_are_held_once() -> None:
    table, ((contiguous, slots, empty),) = rows(
        "paged attention", tokens="20 20", page="8", shared="16"
    )
    assert [row[3:] for row in table] == [["0 1 2", 0], ["0 1 3", 16]]
    assert (contiguous, slots, empty) == (4096, 32, 8)
    assert [row[3] for row in rows("prefix cache", tokens="20 20", page="8", shared="7")[0]] == [
        "0 1 2",
        "3 4 5",
    ]


def test_guesses_make_fewer_passes_and_no_other_text() -> None:
    gains, passes = rows("speculative decoding", x="0 1 0.5", guesses="3", text="a b a b a b c")
    assert [row[1] for row in gains] == [1, 4, 1.875]
    assert " ".join(row[2] for row in passes) == "b a b a b c" and len(passes) < 6
    assert all(row[1].split()[: row[3]] == row[2].split()[: row[3]] for row in passes)


def test_tokenizers_cut_the_text_they_learned() -> None:
    text = "low lower lowest new newer newest"
    found = {row[0]: row[1:] for row in rows("byte pair encoding", text=text)[0]}
    assert set(found) == {"bpe", "wordpiece", "unigram", "chars", "bytes"}
    assert found["bytes"][1] == found["chars"][1] == len(text) > found["bpe"][1]


def test_prompts_are_those_of_eval_and_the_answer_alone_is_counted() -> None:
    prompts, counted, _ = rows("few-shot learning", text="a = b; c = d; e = f", shots="2")
    assert [row[0] for row in prompts] == ["zero-shot", "one-shot", "few-shot"]
    assert prompts[0][1] == "e = " and prompts[1][1].endswith("; e = ")
    assert sorted(prompts[2][1].split("; ")) == ["a = b", "c = d", "e = "]
    assert prompts[2][1] == Shots(2, "{source} = {target}; ").prompt(
        [("a", "b"), ("c", "d")], 0, ("e", "f")
    )
    assert [row[1] for row in counted] == [9, 1]
    assert [row[2] for row in counted] == pytest.approx([9 * math.log(9), math.log(9)])


def test_dpo_in_numbers_is_the_loss_that_is_trained() -> None:
    start, batch = model_for("prefer"), feed_for("prefer").batch(0)
    batch = batch.split(len(batch.ids))[0]
    model, logs = moved(start), []
    for ids, labels in ((batch.ids, batch.labels), (batch.rejected, batch.rejected_labels)):
        assert ids is not None and labels is not None
        logs += [answer_logs(each, ids, labels).item() for each in (model, start)]
    *_, ((_, loss, _), (_, before, pull)) = rows("dpo", x=" ".join(map(repr, logs)), beta="0.7")
    assert loss == pytest.approx(prefer(model, batch, Prefer(0.7), start)[0].item(), rel=1e-5)
    assert (before, pull) == pytest.approx((math.log(2), 0.35))


def test_errors_pile_up_on_own_words_and_not_on_true_ones() -> None:
    wrong, marked = rows("scheduled sampling", x="0.1 0.5", steps="10 40", share="0.5")
    # By hand: 0.1, 0.9 x 0.1 + 0.1 x 0.5; in the long run e / (1 - f + e)
    assert [row[2] for row in wrong[:2]] == pytest.approx([0.1, 0.14])
    assert wrong[-1][2] == pytest.approx(0.1 / 0.6) and {row[1] for row in wrong} == {0.1}
    assert wrong[1][3] == pytest.approx(0.81)
    assert [row[1] for row in marked] == [0.125, 0.5]
    assert all(row[2].startswith(". ") for row in marked) and marked[0][3] < marked[1][3]


def test_sentence_pairs_are_half_neighbours_and_their_loss_is_that_of_two_classes() -> None:
    (pairs,) = rows("nsp", text="a b. b c; d e. e f", x="0 0; 0 0; 3 0; 0 3")
    assert [row[:3] for row in pairs] == [
        ["a b", "b c", 1],
        ["a b", "e f", 0],
        ["d e", "e f", 1],
        ["d e", "b c", 0],
    ]
    assert [row[4] for row in pairs] == [0, 1, 0, 1]
    sure = math.log1p(math.exp(-3))
    assert [row[5] for row in pairs] == pytest.approx([math.log(2)] * 2 + [sure] * 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["moe", "--active", "9"], "--active is 9; give a whole number from 1 to 8"),
        (["delta-rule", "--beta", "2"], "--beta is 2; give a share above 0, 1 at most"),
        (["kda", "--decay", "1", "1", "1"], "--decay has 3 numbers; give 1, or 2, one for each"),
        (["ssd", "--s", "1", "1"], "are not 2 rows; rows are divided by semicolons"),
        (["ssd", "--s", "-1", "1", "1", "1", "1", "1"], "--s are steps; give numbers from 0"),
        (["ssd", "--q", "1; 1; 1; 1; 1; 1"], "queries have 1 numbers, keys 2; give both as many"),
        (["deberta", "--span", "80"], "max_distance=32 leaves nothing to share; give more than 41"),
        (
            ["prompting", "--shots", "4"],
            "--text needs 5 pairs such as sea = mer; or more, --x four",
        ),
        (["exposure-bias", "--x", "2"], "--x are two chances of a wrong word"),
        (["exposure-bias", "--share", "2"], "--share is 2; give a share from 0 to 1"),
        (["nsp", "--text", "one. two"], "--text gives 2 pairs of two texts or more, --x 4"),
        (["speculation", "--x", "2"], "numbers from 0 to 1"),
        (["tokenizers", "--vocab", "6"], "vocab leaves 4 pieces for 11 characters; give more"),
    ],
)
def test_what_a_new_topic_cannot_do_is_one_line(
    arguments: list[str], said: str, capsys: Said
) -> None:
    assert main(["explain", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("tie", [0.78635, 1.01575, -2.00005])
def test_a_last_digit_does_not_depend_on_the_processor(tie: float) -> None:
    """A sum in another order may lie on the other side of a half."""
    below, above = tie - 2e-7, tie + 2e-7
    table = Table("sums", ["x"], [[below], [above]])
    *_, one, other = table.text().split()
    assert one == other
