"""Pictures: the numbers in them are the numbers given, and anyone can see them."""

import base64
import math
import struct
import xml.etree.ElementTree as ET
import zlib

import pytest

from regard.report import page as drawing
from regard.report.folder import smooth
from regard.report.page import Series, bars, heat, lines
from regard.see import format as show
from regard.see.page import RAMPS, SERIES, table

NAME = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    found = []
    for line in parsed(svg).iter(NAME + "polyline"):
        pairs = [pair.split(",") for pair in line.attrib["points"].split()]
        found.append([(float(x), float(y)) for x, y in pairs])
    return found


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in parsed(svg).iter(NAME + "text")]


# --- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "low, high, expected",
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (3.0, 5.0, [3, 3.5, 4, 4.5, 5]),
        (0.0, 3e-4, [0, 1e-4, 2e-4, 3e-4]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (1, 300, [100, 200, 300]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert drawing.ticks(low, high) == pytest.approx(expected)


def test_log_ticks_are_powers_of_ten_or_finer() -> None:
    assert drawing.log_ticks(0.9, 1100) == pytest.approx([1, 10, 100, 1000])
    assert drawing.log_ticks(0.4, 2.5) == pytest.approx([0.5, 1, 2])
    assert drawing.log_ticks(1e-12, 1) == pytest.approx([1e-12, 1e-9, 1e-6, 1e-3, 1])
    assert len(drawing.log_ticks(3.1, 3.9)) > 1


def test_smooth_is_the_mean_of_a_constant_and_passes_over_nan() -> None:
    assert [y for _, y in smooth([(i, 2.0) for i in range(200)])] == pytest.approx([2.0] * 200)
    keep = 1 - 2 / (150 / 50 + 1)  # of 150 points
    values = smooth([(0, 1.0), (1, math.nan), (2, 3.0), *((i, 3.0) for i in range(3, 150))])
    second = (keep * (1 - keep) * 1 + (1 - keep) * 3) / (1 - keep**2)
    assert [y for _, y in values[:3]] == pytest.approx([1.0, 1.0, second])


def test_thin_keeps_ends_and_spikes() -> None:
    points = [(float(i), 0.0) for i in range(10_000)]
    points[6_543] = (6543.0, 9.0)
    found = drawing.thin(points, 400)
    assert len(found) <= 400 and (6543.0, 9.0) in found
    assert found[0] == points[0] and found[-1] == points[-1]
    assert found == sorted(found)


@pytest.mark.parametrize(
    "made, expected",
    [
        (show.short(3570), "3.6k"),
        (show.short(26_400_000), "26.4M"),
        (show.short(999.6), "1,000"),
        (show.span(344), "5 min 44 s"),
        (show.span(0.84), "0.8 s"),
        (show.span(3 * 3600 + 125), "3 h 2 min"),
        (show.clock(275), "00:04:35"),
        (show.small("6.0e-04"), "6.0e-4"),
        (show.small("1.0e+05"), "1.0e5"),
        (show.number(None), "-"),
        (show.number(0.123456), "0.1235"),
        (show.number(1234567), "1,234,567"),
        (show.number(math.nan), "nan"),
        (show.spark([0, 1, 2, 3, 4, 5, 6, 7], 8), "▁▂▃▄▅▆▇█"),
        (show.spark([5.0] * 9, 3), "▁▁▁"),
        (show.spark([math.nan], 3), ""),
        (show.visible("a\x1b[31m\nb\u202ec\ud800"), "a␛[31m␊b\ufffdc?"),
        (show.clip("the king", 5), "the …"),
        (show.clip("日本語", 5), "日本…"),
        (show.clip("the king", 0), ""),
    ],
)
def test_shown_as(made: str, expected: str) -> None:
    assert made == expected


# --- lines --------------------------------------------------------------------------------------------------------


def test_line_lies_where_its_numbers_say() -> None:
    svg = lines([Series("a", [(0, 0), (5, 50), (10, 100)])], "t")
    ((x0, y0), (x1, y1), (x2, y2)) = polylines(svg)[0]
    assert x0 < x1 < x2 and x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y0 > y1 > y2 and y1 == pytest.approx((y0 + y2) / 2, abs=0.1)  # up is less
    assert (x0, y0, x2, y2) == (66, 218, 458, 10)
    assert {"0", "20", "100"} <= set(texts(svg))


def test_log_axis_spaces_factors_evenly_and_leaves_zero_out() -> None:
    svg = lines([Series("a", [(0, 0), (1, 1), (2, 10), (3, 100)])], "t", y="norm", log=True)
    ys = [y for _, y in polylines(svg)[0]]
    assert len(ys) == 3 and ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert "norm, log scale" in texts(svg)


def test_smoothed_series_is_drawn_twice_the_raw_one_faintly() -> None:
    points = [(float(i), float(i % 2)) for i in range(100)]
    svg = lines([Series("loss", smooth(points * 9)[-100:], points)], "t")
    raw, bold = parsed(svg).iter(NAME + "polyline")
    assert raw.attrib["opacity"] == ".35" and "opacity" not in bold.attrib
    rough, calm = polylines(svg)
    assert max(y for _, y in rough) - min(y for _, y in rough) > 150
    assert max(y for _, y in calm[50:]) - min(y for _, y in calm[50:]) < 30


def test_values_that_are_not_finite_are_left_out() -> None:
    svg = lines([Series("a", [(1, 2), (2, math.nan), (3, math.inf), (4, 3)])], "t")
    assert len(polylines(svg)[0]) == 2 and "nan" not in svg and "inf" not in svg


@pytest.mark.parametrize("points", [[(3, 7.0)], [(1, 7.0), (2, 7.0)], [(1, 0.0), (2, 0.0)]])
def test_one_point_and_flat_curves_are_drawn(points: list[tuple[float, float]]) -> None:
    svg = lines([Series("a", points)], "t")
    assert len(polylines(svg)[0]) == len(points) and len(texts(svg)) > 4
    assert ("<circle" in svg) == (len(points) == 1)


def test_no_values_are_said() -> None:
    for svg in (lines([], "t"), lines([Series("a", [(1, math.nan)])], "t")):
        assert "no values" in texts(svg)


def test_series_differ_by_dash_and_have_a_legend() -> None:
    points = [(0.0, 1.0), (1.0, 2.0)]
    svg = lines([Series(f"run {i}", points) for i in range(6)], "t")
    dashes = [
        line.attrib.get("stroke-dasharray", "") for line in parsed(svg).iter(NAME + "polyline")
    ]
    assert len(set(dashes)) == 6
    assert {f"run {i}" for i in range(6)} <= set(texts(svg))


def test_curve_keeps_its_colour_where_another_has_no_points() -> None:
    svg = lines([Series("a", []), Series("b", [(0, 1), (1, 2)])], "t")
    (line,) = parsed(svg).iter(NAME + "polyline")
    assert SERIES["light"][1] in line.attrib["stroke"]


def test_picture_is_said_in_words() -> None:
    root = parsed(lines([Series("training", [(1, 5.0), (9, 3.0)])], "loss"))
    said = "loss: training from 5 at step 1 to 3 at step 9, lowest 3, highest 5"
    assert root.attrib["aria-label"] == said and root.attrib["role"] == "img"
    title = root.find(NAME + "title")
    assert title is not None and title.text == said


def test_names_cannot_break_out() -> None:
    evil = '"><script>alert(1)</script>'
    pictures = [
        lines([Series(evil, [(0, 1), (1, 2)]), Series(evil, [(0, 1)])], evil, evil, evil),
        bars([(evil, 1.0)], evil, evil),
        heat([[1.0]], evil, rows=[evil], across=[evil]),
    ]
    for svg in pictures:
        assert not [e for e in parsed(svg).iter() if e.tag.endswith("script")]


# --- bars and heat maps -------------------------------------------------------------------------------------------


def test_bars_are_as_long_as_their_values() -> None:
    svg = bars([("a", 50.0), ("b", 100.0), ("c", 0.0)], "t", "tok/s")
    a, b, c = (float(rect.attrib["width"]) for rect in parsed(svg).iter(NAME + "rect"))
    assert a == pytest.approx(b / 2, abs=0.1) and c == 0
    assert "100 tok/s" in texts(svg)


def pixels(address: str) -> list[list[tuple[int, ...]]]:
    """The colours of a heat map's image, read by the rules of PNG."""
    data, at, chunks = base64.b64decode(address.partition("base64,")[2]), 8, {}
    while at < len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        (crc,) = struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert crc == zlib.crc32(kind + body)
        chunks[kind], at = body, at + 12 + size
    wide, tall = struct.unpack(">II", chunks[b"IHDR"][:8])
    raw, table = zlib.decompress(chunks[b"IDAT"]), chunks[b"PLTE"]
    rows = [raw[i * (wide + 1) + 1 : (i + 1) * (wide + 1)] for i in range(tall)]
    return [[tuple(table[3 * v : 3 * v + 3]) for v in row] for row in rows]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_heat_map_has_the_colour_of_each_value(scheme: str) -> None:
    matrix = [[0.0, 0.25], [0.5, 0.125], [math.nan, 0.5]]
    (image,) = (
        each
        for each in parsed(heat(matrix, "t")).iter(NAME + "image")
        if each.attrib["class"] == scheme
    )
    found = pixels(image.attrib["href"])
    ramp, masked = RAMPS[scheme]["plain"], tuple(RAMPS[scheme]["masked"][0])
    assert [len(row) for row in found] == [2, 2, 2]
    assert found[1][0] == found[2][1] == tuple(ramp[-1])  # the largest
    assert found[0][0] == found[2][0] == masked
    assert found[1][1] == pytest.approx(tuple(ramp[2]), abs=2)  # the root of a quarter: the middle


def test_heat_map_names_rows_and_columns() -> None:
    found = texts(heat([[1.0, 0.0], [0.5, 0.5]], "t", rows=["he", "said"], across=["er", "sagte"]))
    assert found == ["he", "said", "er", "sagte"]
    assert texts(heat([[1.0]], "t")) == []


# --- eyes ---------------------------------------------------------------------------------------------------------


def light(colour: str | tuple[int, int, int]) -> float:
    """Relative luminance, as WCAG defines it."""
    if isinstance(colour, str):
        colour = tuple(bytes.fromhex(colour[1:]))  # type: ignore[assignment]
    parts = [c / 255 for c in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]  # type: ignore[operator]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme, back", [("light", "#ffffff"), ("dark", "#14171a")])
def test_colours_stand_out_from_the_page(scheme: str, back: str) -> None:
    for colour in SERIES[scheme]:
        low, high = sorted((light(colour), light(back)))
        assert (high + 0.05) / (low + 0.05) > 4.5, colour


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_heat_colours_run_one_way_from_the_page(scheme: str) -> None:
    values = [light(tuple(colour)) for colour in table(scheme)[1::5].tolist()]
    values = values if scheme == "dark" else values[::-1]
    assert values == sorted(values) and values[-1] > 20 * values[0]
