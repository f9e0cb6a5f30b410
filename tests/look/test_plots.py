"""The pictures: each can be drawn, named, read and saved; mistakes are one sentence."""

import builtins
import io
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.errors import Fault, UsageError
from regard.see import plots
from regard.see.page import levels, table
from regard.see.plots import shown
from tests import docs

matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib")
NAMES = [
    *("head-grid", "one-head", "one-head-numbers", "alignment", "selection"),
    *("sinusoidal", "learned", "rope-clocks", "distance", "saturation", "jacobian", "variance"),
    *("online-softmax", "cache-llama", "cache-deepseek", "forgetting", "cost"),
]
WORDS = ["<script>", "$x^2", "_{", "", "   ", "\n", "Donaudampfschifffahrt", "naïve", "日本", "é"]


@pytest.fixture(scope="module")
def drawn() -> dict:
    return docs.plots.pictures()


def tick_boxes(axis: object) -> list:
    """Where the labels lie that are shown on an axis."""
    low, high = sorted(axis.get_view_interval())
    ticks = [t for t in axis.get_major_ticks() if low - 1e-9 <= t.get_loc() <= high + 1e-9]
    texts = [text for tick in ticks for text in (tick.label1, tick.label2)]
    return [t.get_window_extent() for t in texts if t.get_visible() and t.get_text()]


def check_readable(figure: object) -> None:
    """All panels have names on their axes, no two labels of an axis touch, nothing is cut off."""
    figure.draw_without_rendering()
    for ax in figure.axes:
        assert ax.get_xlabel() or ax.get_ylabel(), ax
        for axis in (ax.xaxis, ax.yaxis):
            pairs = combinations(tick_boxes(axis), 2)
            assert not any(a.overlaps(b) for a, b in pairs), axis.get_label().get_text()
    inside = figure.get_tightbbox()
    wide, high = figure.get_size_inches()
    assert inside.x0 >= -0.01 and inside.y0 >= -0.01
    assert inside.x1 <= wide + 0.01 and inside.y1 <= high + 0.01


def test_every_picture_of_the_docs_is_tried(drawn: dict) -> None:
    assert sorted(drawn) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_picture_is_readable_and_saved(drawn: dict, name: str, tmp_path: Path) -> None:
    figure = drawn[name](False)
    check_readable(figure)
    assert figure.get_suptitle()
    figure.set_layout_engine("none")  # it is laid out already
    path = plots.save(figure, tmp_path / f"{name}.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def corner(figure: object) -> np.ndarray:
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[0, 0, :3]


def test_dark_pictures_have_light_text_on_dark_paper(drawn: dict) -> None:
    light, dark = (drawn["one-head-numbers"](dark) for dark in (False, True))
    check_readable(dark)
    assert (corner(light) == 255).all() and (corner(dark) < 30).all()  # paper
    for figure, bright in ((light, False), (dark, True)):
        ax = figure.axes[0]
        texts = [ax.xaxis.label, ax.yaxis.label, *ax.get_xticklabels(), *ax.get_yticklabels()]
        for text in texts:
            shade = sum(matplotlib.colors.to_rgb(text.get_color())) / 3
            assert shade > 0.8 if bright else shade < 0.2


def test_one_head_writes_small_weights_out_and_leaves_zeros_empty() -> None:
    ax = plots.one_head(torch.tensor([[1.0, 0.0], [0.25, 0.75]])).axes[0]
    assert [text.get_text() for text in ax.texts] == ["1", ".25", ".75"]
    assert ax.images[0].get_array().mask.tolist() == [[False, True], [False, False]]


def test_one_head_marks_the_largest_of_each_row() -> None:
    figure = plots.one_head(torch.eye(20).flip(0) * 0.9 + 0.005)
    marks = figure.axes[0].collections[0].get_offsets().tolist()
    assert marks == [[19 - i, i] for i in range(20)]
    check_readable(figure)


def test_tokens_are_shown_as_they_are_and_never_overlap() -> None:
    tokens = WORDS * 10
    figure = plots.one_head(torch.rand(20, 100), tokens[:20], tokens[:100])
    check_readable(figure)
    labels = {text.get_text() for text in figure.axes[0].get_xticklabels()}
    assert labels and labels <= {shown(word) for word in WORDS}
    figure.savefig(io.BytesIO(), format="png")  # no formula is read into $


def test_shown_names_spaces_and_cuts_long_tokens() -> None:
    found = [shown(word) for word in WORDS[:6]]
    assert found == ["<script>", "$x^2", "_{", "∅", "␣␣␣", "↵"]
    assert shown(" Donaudampfschifffahrt") == "␣Donaudampfsc…"
    assert shown(" a") == "␣a" and shown("a ") == "a␣" and shown(" a b ") == "␣a b␣"


def test_head_grid_takes_layers_of_any_size_and_their_names() -> None:
    maps = [torch.rand(1, 2, 5, 5, dtype=torch.bfloat16), torch.rand(3, 5, 300)]
    figure = plots.head_grid(maps, "two", names=["encoder 0", "cross 0"])
    check_readable(figure)
    assert len(figure.axes[0].images) == 5
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["encoder 0", "cross 0"]


def test_alignment_draws_a_link_for_each_target() -> None:
    figure = plots.alignment(torch.eye(3)[[2, 0, 1]], ["a", "b", "c"], ["x", "y", "z"])
    ends = [line.get_ydata() for line in figure.axes[1].lines]
    assert [list(end) for end in ends] == [
        pytest.approx([(s + 0.5) / 3, (t + 0.5) / 3]) for t, s in enumerate([2, 0, 1])
    ]


def test_selection_strip_lights_the_chosen_and_says_what_is_kept() -> None:
    scores = torch.tensor([0.1, 3.0, 2.0, -torch.inf])
    numbers = docs.quantities.selection(scores, torch.tensor([0.2, 0.5, 0.3, 0.0]), 2)
    figure = docs.plots.selection_strip(numbers)
    assert "reads 2 of 3 keys, keeps 80.0% of the attention" in figure.get_suptitle()
    dots, crosses = figure.axes[0].lines[:2]
    assert dots.get_xdata().tolist() == [1, 2] and crosses.get_xdata().tolist() == [3]


def test_pictures_leave_pyplot_and_settings_alone(drawn: dict) -> None:
    before = dict(matplotlib.rcParams)
    drawn["saturation"](True)
    assert dict(matplotlib.rcParams) == before
    if "matplotlib.pyplot" in sys.modules:
        assert not sys.modules["matplotlib.pyplot"].get_fignums()


@pytest.mark.parametrize("kind, begins", [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_save_writes_other_formats(kind: str, begins: bytes, tmp_path: Path) -> None:
    path = plots.save(plots.one_head(torch.eye(2)), tmp_path / f"a.{kind}")
    assert path.read_bytes().startswith(begins)


@pytest.mark.parametrize(
    "name, says",
    [("map", "ends in .png"), ("map.bmp", "ends in .png"), ("no/map.png", "there is no folder")],
)
def test_save_says_why_it_cannot(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        plots.save(plots.one_head(torch.eye(2)), tmp_path / name)


def test_save_onto_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "map.png").mkdir()
    with pytest.raises(UsageError, match="map.png cannot be written: Is a directory"):
        plots.save(plots.one_head(torch.eye(2)), tmp_path / "map.png")


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: plots.head_grid([]), "no maps"),
        (lambda: plots.head_grid(torch.ones(3, 4, 5)), r"\(heads, rows, keys\)"),
        (lambda: plots.head_grid([torch.ones(2, 3, 4, 4)]), "batch of 2"),
        (lambda: plots.one_head(torch.ones(2, 3, 4)), "choose a layer and a head"),
        (lambda: plots.alignment(torch.eye(2), least=0.0), "least=0.0"),
    ],
)
def test_maps_that_cannot_be_drawn_are_refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call()


def test_colours_are_those_of_every_map() -> None:
    image = plots.one_head(torch.tensor([[0.0, 0.25], [1.0, 0.5]]), dark=True).axes[0].images[0]
    found = image.cmap(image.norm(image.get_array()), bytes=True)[..., :3]
    expected = table("dark")[levels(np.array([[0.0, 0.25], [1.0, 0.5]]))]
    assert np.abs(found.astype(int) - expected).max() <= 2


def test_tokens_of_another_count_are_refused() -> None:
    with pytest.raises(UsageError, match="3 tokens were given for 2 keys"):
        plots.one_head(torch.eye(2), None, ["a", "b", "c"])


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: object) -> object:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(Fault, match=r"pip install 'regard\[plots\]'") as caught:
        plots.one_head(torch.eye(2))
    assert caught.value.code == 3


def test_docs_script_asks_for_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plots.py"])
    assert docs.plots.main() == 2
    assert capsys.readouterr().err.startswith("usage:")
