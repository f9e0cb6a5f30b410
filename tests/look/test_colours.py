"""Pictures look alike: one palette and one list of fonts, readable on a telephone, on light pages and on dark ones."""

import re
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from regard.learn.explain import find
from regard.learn.picture import drawn
from regard.report.page import Series, as_html, coordinate, lines
from regard.see.page import PAPER, SANS, SERIES, both, table
from regard.see.plots import save
from tests.look.test_svg import light

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docs").rglob("*.svg"))
# A topic for each way to draw.
TOPICS = ("softmax", "saturation", "decoding", "cost", "alibi", "jacobian", "masks", "transformer")
SCHEMES = ("light", "dark")
# The width of a telephone, and the least size of letters on it.
PHONE, LEAST = 360, 9.0


def hexes(colours: np.ndarray) -> set[str]:
    return {"#" + colour.tobytes().hex() for colour in colours}


@cache
def palette() -> set[str]:
    named = {c for scheme in SCHEMES for c in (*PAPER[scheme].values(), *SERIES[scheme])}
    ramps = [hexes(table(scheme, signed)) for scheme, signed in product(SCHEMES, (False, True))]
    # Numbers in the cells of a map are black or white.
    return named.union(*ramps, {"#000000", "#ffffff"})


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every picture of the documentation, and some of `regard explain --output`."""
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    folder = tmp_path_factory.mktemp("pictures")
    paths = {path.relative_to(ROOT).as_posix(): path for path in FILES}
    for name in TOPICS:
        topic = find(name)
        paths[name] = save(drawn(topic, topic.read({})), folder / f"{name}.svg")
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}


def test_every_picture_has_colours_of_the_palette_and_no_others(pictures: dict[str, str]) -> None:
    assert len(pictures) > 55
    for name, svg in pictures.items():
        # Addresses of parts and of maps are no colours.
        plain = re.sub(r'url\(#[^)]*\)|href="[^"]*"', "", svg)
        assert {c.lower() for c in re.findall(r"#[0-9a-fA-F]{3,8}\b", plain)} <= palette(), name
        used = re.findall(r'(?:[ "{;])(?:fill|stroke|color)(?:=|: ?)"?([^;"}]+)', plain)
        # No variables, so that programs other than browsers show them.
        words = {"none", "currentColor"} | palette()
        assert used and {word.strip() for word in used} <= words, name


def test_every_picture_has_the_fonts_of_the_pages(pictures: dict[str, str]) -> None:
    for name, svg in pictures.items():
        said = re.findall(r'font-family(?:="([^"]+)"|: ([^;]+);)', svg)
        assert ["".join(each) for each in said] == [SANS], name
        assert not re.search(r"font: ", svg), name
    assert f"--sans: {SANS};" in both()


def size(svg: str) -> tuple[float, float]:
    (found,) = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    return float(found[0]), float(found[1])


def test_every_picture_can_be_read_on_a_telephone(pictures: dict[str, str]) -> None:
    for name, svg in pictures.items():
        width = size(svg)[0]
        assert 'style="max-width:100%;height:auto"' in svg.partition("<title>")[0], name
        letters = re.findall(r'font-size(?:=|: )"?([\d.]+)', svg)
        assert len(letters) >= svg.count("<text") > 0, name
        assert min(map(float, letters)) * min(PHONE / width, 1) >= LEAST, name


def test_no_letter_of_the_documentation_is_cut_off() -> None:
    """By the width of letters that are narrow: six tenths of those that places are reckoned with."""
    for path in FILES:
        svg = path.read_text(encoding="utf-8")
        width = size(svg)[0]
        pattern = (
            r'<text x="([\d.-]+)" y="[\d.-]+" text-anchor="(\w+)" font-size="(\d+)"[^>]*>([^<]*)'
        )
        for x, anchor, high, words in re.findall(pattern, svg):
            long = 0.5 * float(high) * len(words)
            left = float(x) - long * {"start": 0, "middle": 0.5, "end": 1}[anchor]
            assert left >= -1 and left + long <= width + 1, (path.name, words)


def test_every_picture_and_page_answers_a_dark_scheme(pictures: dict[str, str]) -> None:
    page = as_html("a run", [])
    for name, text in {**pictures, "page": page}.items():
        ((dark, *_), *more) = [
            part.split("</style>") for part in text.split("@media (prefers-color-scheme: dark)")[1:]
        ]
        assert not more or name == "page"
        assert ".light { display: none" in dark, name
    for name in pictures.keys() - {*TOPICS}:
        sheet, _, drawn = pictures[name].partition("</style>")
        dark = sheet.partition("@media")[2]
        assert f"svg {{ color: {PAPER['dark']['ink']}; }}" in dark
        for one, other in zip(SERIES["light"], SERIES["dark"]):
            for kind in ("stroke", "fill"):
                rule = f'[{kind}="{one}"] {{ {kind}: {other}; }}'
                assert (rule in dark) == (f'{kind}="{one}"' in drawn), (name, rule)


def test_curves_of_the_documentation_are_smooth_or_have_a_mark_at_each_point() -> None:
    for path in FILES:
        svg = path.read_text(encoding="utf-8")
        curves = re.findall(r'<polyline points="([^"]*)" fill="none" stroke="#', svg)
        points = [len(curve.split()) for curve in curves]
        marked = sum(count for count in points if count < 100)
        assert svg.count("<circle") >= marked, path.name


def contrast(one: str, other: str) -> float:
    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(one: str, other: str, share: float) -> str:
    """What is seen of one colour over another."""
    pairs = zip(bytes.fromhex(one[1:]), bytes.fromhex(other[1:]))
    return "#" + bytes(round(share * a + (1 - share) * b) for a, b in pairs).hex()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_and_lines_stand_out(scheme: str) -> None:
    """4.5 for text, 3 for lines, as WCAG 2 asks."""
    paper = PAPER[scheme]
    back = paper["back"]
    for text, ground in product(("ink", "soft", "mark"), ("back", "fill")):
        assert contrast(paper[text], paper[ground]) >= 4.5, (text, ground)
    for colour in SERIES[scheme]:
        assert contrast(colour, back) >= 4.5 and contrast(colour, paper["fill"]) >= 3
        # Words in a box that is filled with a quarter of it.
        assert contrast(paper["ink"], mixed(colour, back, 0.25)) >= 4.5
        # Words on a box of it.
        assert contrast(back, colour) >= 4.5
    assert contrast(paper["soft"], back) >= 3  # axes
    assert contrast(mixed(paper["ink"], back, 0.6), back) >= 3  # frames
    for signed in (False, True):
        for cell in hexes(table(scheme, signed)):
            assert max(contrast(cell, each) for each in ("#000000", "#ffffff")) >= 4.5


def test_numbers_in_a_map_are_the_better_of_black_and_white() -> None:
    plots = pytest.importorskip("regard.see.plots")
    for scheme in SCHEMES:
        for colour in table(scheme)[::16]:
            shown = plots.ink(Shade(colour / 255), 0.5)
            cell = "#" + colour.tobytes().hex()
            assert contrast(shown, cell) == max(contrast(x, cell) for x in ("#000000", "#ffffff"))


class Shade:
    """A map of one colour, as `ink` asks it."""

    def __init__(self, colour: np.ndarray):
        self.colour = colour

    def norm(self, weight: float) -> float:
        return weight

    def cmap(self, _: float) -> tuple[float, ...]:
        return (*self.colour, 1.0)


def test_links_of_the_documentation_stand_out() -> None:
    sheet = (ROOT / "docs" / "theme" / "site.css").read_text(encoding="utf-8")
    found = re.findall(r"--link: (#\w+); --found: (#\w+);", sheet)
    for scheme, (link, marked) in zip(SCHEMES, found, strict=True):
        paper = PAPER[scheme]
        assert contrast(link, paper["back"]) >= 4.5 and contrast(link, paper["fill"]) >= 4.5
        assert contrast(paper["ink"], marked) >= 4.5


def test_a_curve_is_drawn_alike_on_every_machine() -> None:
    """A sum in another order may lie on the other side of a half."""
    assert coordinate(48.35 - 1e-9) == coordinate(48.35 + 1e-9) == "48.4"
    assert coordinate(-0.04) == "0.0"
    one, other = (lines([Series("a", [(0, 0), (1, 1 / 3 + d)])], "t") for d in (0, 1e-12))
    assert one == other
