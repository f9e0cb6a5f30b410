"""What pages of runs are made of: blocks of text and tables, and pictures as inline SVG.

A page is one self-contained HTML file without script or network, or the same in Markdown. The
markup is in report.html, report.md and pictures.svg. Colours of a picture are CSS variables with a
fallback, text and axes have the colour of the text around them, and a map is there twice, of which
`style` shows one: so it reads on light and dark pages. Curves differ by their dashes too. No picture
to read is wider than BOX, so that a telephone shows letters of 9 pixels and more. The letters are
those of the page.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2.sandbox import SandboxedEnvironment

from regard.see.format import clip, columns, level, number, short, small, spark, visible
from regard.see.page import SERIES, document, environment, hues, image, png

Point = tuple[float, float]
Row = Sequence[object]
# A number, perhaps with how far it may be off.
NUMBER = re.compile(r"-|-?[\d,.]+(e-?\d+)?[kMBT]?(\u00a0±\u00a0[\d,.]+(e-?\d+)?)?|nan|inf|-inf")
# Sizes of pictures are attributes of theirs.
POLICY = "style-src-attr 'unsafe-inline'"
# The size of letters, and their mean width.
FONT = 14
LETTER = 0.6 * FONT
# At most so many points of a line.
POINTS = 400
# Where curves lie in their picture.
BOX = {"left": 66.0, "right": 458.0, "bottom": 218.0, "width": 480.0, "height": 260.0}


@dataclass(frozen=True)
class Block:
    """A part of a page: heading, text, strong (what matters most), table, code, figures beside each
    other, or thumbnails of them; and tables that HTML shows otherwise: tiles (a name, its value,
    more about it) and cards (what was made of `text` at each step). `folded`: HTML shows it on
    request, under this name."""

    kind: str
    text: str = ""
    head: Row = ()
    rows: Sequence[Row] = ()
    figures: Sequence[Figure] = ()
    language: str = ""
    folded: str = ""

    @cached_property
    def numeric(self) -> list[bool]:
        """Which columns of a table hold numbers and nothing else."""
        columns = [[str(row[i]) for row in self.rows] for i in range(len(self.head))]
        return [bool(cells) and all(map(NUMBER.fullmatch, cells)) for cells in columns]

    @property
    def fence(self) -> str:
        """More backticks than any run of them inside."""
        return "`" * max(3, *(len(run) + 1 for run in re.findall("`+", self.text)), 0)


class Figure(NamedTuple):
    """A picture, what it is, and the same in numbers: a table for HTML, for Markdown curves by
    name, drawn in letters. `log`: the same on a logarithmic axis, shown at first if `logged`."""

    svg: str
    title: str
    caption: str = ""
    table: Block | None = None
    curves: Sequence[tuple[str, Sequence[float]]] = ()
    log: str = ""
    logged: bool = False


def as_html(title: str, blocks: Sequence[Block]) -> str:
    return document(templates(), "report", title, policy=POLICY, blocks=blocks)


def as_markdown(title: str, blocks: Sequence[Block]) -> str:
    return templates().get_template("report.md").render(title=title, blocks=blocks)


@cache
def templates() -> SandboxedEnvironment:
    """With filters for a coordinate, the colour of series i, a curve in letters, and text in
    Markdown."""
    env = environment(Path(__file__).parent)
    env.filters["c"] = coordinate
    env.filters["colour"] = lambda i: f"var(--s{i % 6}, {SERIES['light'][i % 6]})"
    env.filters |= {"spark": spark, "plain": _plain}
    env.globals["font"] = FONT
    return env


def coordinate(value: float) -> str:
    """With a decimal; halves are rounded up, however a processor has rounded the sum behind them."""
    return f"{math.floor(round(value, 4) * 10 + 0.5) / 10:.1f}"


def _plain(text: object) -> str:
    """Text that Markdown takes as nothing but text, on one line."""
    marked = re.sub(r"([\\`*_\[\]|#~])", r"\\\1", visible(str(text).replace("\n", " ⏎ "), "\t"))
    return html.escape(marked, quote=False)


# --- pictures -------------------------------------------------------------------------------------


class Series(NamedTuple):
    """A curve; `raw`: what it was before it was smoothed, drawn faintly behind it; `dots`: each
    point is marked."""

    name: str
    points: Sequence[Point]
    raw: Sequence[Point] = ()
    dots: bool = False


class Axis(NamedTuple):
    """Where values from span[0] to span[1] lie: from ends[0] to ends[1], perhaps by logarithm."""

    span: Point
    ends: Point
    log: bool

    def __call__(self, value: float) -> float:
        low, high = (math.log10(v) for v in self.span) if self.log else self.span
        share = ((math.log10(value) if self.log else value) - low) / (high - low)
        return self.ends[0] + share * (self.ends[1] - self.ends[0])

    @classmethod
    def around(
        cls, values: Sequence[float], ends: Point, log: bool = False, reach: Sequence[float] = ()
    ) -> Axis:
        """With the values of `reach` on it too; never a single point."""
        both = [*values, *reach]
        low, high = min(both), max(both)
        if log:
            room = 2 if level(low, high) else 1.05
            return cls((low / room, high * room), ends, log)
        air = (abs(low) / 2 or 1.0) if level(low, high) else 0.0
        return cls((low - air, high + air), ends, log)

    def ticks(self) -> list[tuple[float, str]]:
        return [(x, _tick(x)) for x in (log_ticks if self.log else ticks)(*self.span)]


def _draw(kind: str, *values: Any) -> str:
    module: Any = templates().get_template("pictures.svg").module
    return getattr(module, kind)(*values)


def lines(
    series: Sequence[Series],
    title: str,
    x: str = "step",
    y: str = "",
    *,
    log: bool = False,
    reach: Sequence[float] = (),
) -> str:
    """Curves in one picture, with a legend where there are several. Points that are not finite, or
    on a `log` axis not above 0, are left out; a curve without points keeps its colour. The axis has
    the values of `reach`, whatever the curves have: 0 and 1 of a share."""

    def usable(points: Sequence[Point]) -> list[Point]:
        finite = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
        return [p for p in finite if p[1] > 0] if log else finite

    series = [s._replace(points=usable(s.points), raw=usable(s.raw)) for s in series]
    points = [p for s in series for p in (*s.points, *s.raw)]
    if not points:
        return _draw("nothing", f"{title}: no values")
    legend, top = _legend([s.name for s in series]) if len(series) > 1 else ([], 10.0)
    xs = Axis.around([x for x, _ in points], (BOX["left"], BOX["right"]))
    ys = Axis.around([y for _, y in points], (BOX["bottom"], top), log, reach)

    def path(points: Sequence[Point]) -> str:
        return " ".join(f"{coordinate(xs(a))},{coordinate(ys(b))}" for a, b in points)

    curves = []
    sentences = []
    for i, each in enumerate(series):
        if each.points:
            raw, drawn = thin(each.raw, POINTS), thin(each.points, POINTS)
            dots = drawn if each.dots or len(drawn) == 1 else ()
            curves.append((i, path(raw), path(drawn), dots))
            sentences.append(_sentence(each.name, each.raw or each.points, x))
    title = f"{title}: {'; '.join(sentences)}"
    unit = y + (", log scale" if log else "")
    return _draw("lines", title, x, unit, {**BOX, "top": top}, xs, ys, legend, curves)


def _sentence(name: str, points: Sequence[Point], x: str) -> str:
    """A curve in words."""
    (first, begin), (last, end) = points[0], points[-1]
    lowest, highest = (choose(y for _, y in points) for choose in (min, max))
    ends = f"{number(begin)} at {x} {number(first)} to {number(end)} at {x} {number(last)}"
    return f"{name} from {ends}, lowest {number(lowest)}, highest {number(highest)}"


def _legend(names: Sequence[str]) -> tuple[list[tuple[int, float, float, str]], float]:
    """Where the names of the curves stand, in as many rows as they need; and where the picture may
    begin."""
    places = []
    at, row = BOX["left"], 14.0
    for i, name in enumerate(clip(visible(name), 40) for name in names):
        width = 34 + LETTER * columns(name)
        if at > BOX["left"] and at + width > BOX["width"]:
            at = BOX["left"]
            row += 18
        places.append((i, at, row, name))
        at += width + 8
    return places, row + 12


def bars(rows: Sequence[tuple[str, float]], title: str, unit: str = "") -> str:
    """A bar from 0 for each (name, value), with the value behind it. Values are 0 or more."""
    names = [clip(visible(name), 28) for name, _ in rows]
    values = [f"{short(value)} {unit}".strip() for _, value in rows]
    left = 12 + LETTER * max(map(columns, names), default=0)
    room = BOX["width"] - left - 14 - LETTER * max(map(len, values), default=0)
    most = max((value for _, value in rows), default=0.0) or 1.0
    sizes = [room * value / most for _, value in rows]
    title = f"{title}: {', '.join(f'{name} {value}' for name, value in zip(names, values))}"
    return _draw("bars", title, BOX["width"], left, list(zip(names, sizes, values)))


def heat(
    weights: Sequence[Sequence[float]] | np.ndarray,
    title: str,
    *,
    rows: Sequence[str] = (),
    across: Sequence[str] = (),
    most: float | None = None,
) -> str:
    """An attention map. With names of the rows and of the columns (`across`) it is a picture to
    read, without them a thumbnail. `most`: the value that is darkest; none: the largest there is."""
    values = np.array(weights, float)
    cell = 20
    tall, wide = values.shape
    side, head = ([clip(visible(name), 14) for name in names] for names in (rows, across))
    left, top = (14 + LETTER * max(map(columns, x)) if x else 0.0 for x in (side, head))
    size = (cell * wide, cell * tall) if rows else (96.0, 96.0 * min(tall / wide, 1.5))
    images = {scheme: image(values, scheme, most) for scheme in ("light", "dark")}
    return _draw("heat", title, cell, left, top, *size, images, side, head)


def shades(pixels: Sequence[Sequence[int]], title: str) -> str:
    """A picture of bytes as a thumbnail; what is bright is ink."""
    # Maps take roots, and what is 0 is masked in them.
    return heat(np.square((np.array(pixels, float) + 1) / 256), title, most=1.0)


def mosaic(classes: Sequence[Sequence[int]], title: str) -> str:
    """Classes of patches as a thumbnail, a colour for each but the first, which is grey."""
    numbers = np.array(classes)
    # One colour of a PNG's 256 is that of the first.
    numbers = np.where(numbers > 0, 1 + (numbers - 1) % 255, 0).astype(np.uint8)
    size = (96.0, 96.0 * numbers.shape[0] / numbers.shape[1])
    images = {scheme: png(numbers, hues(scheme)) for scheme in ("light", "dark")}
    return _draw("heat", title, 0, 0.0, 0.0, *size, images, (), ())


# --- numbers of an axis ---------------------------------------------------------------------------


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points that show the same curve: of each stretch its lowest and its highest,
    and both ends."""
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    parts = max((most - 2) // 2, 1)
    chosen = [points[0]]
    for i in range(parts):
        part = inner[i * len(inner) // parts : (i + 1) * len(inner) // parts]
        ends = {part.index(choose(part, key=lambda p: p[1])) for choose in (min, max)}
        chosen += [part[j] for j in sorted(ends)]
    return [*chosen, points[-1]]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between low and high, as many as fit within `most`: steps of 1, 2 or 5 times a
    power of ten."""
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * m for m in (1, 2, 5, 10, 20) if (high - low) / (size * m) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Powers of ten between low and high, every one or every few; 1, 2 and 5 times them where there
    are less than two; as on a plain axis where that is not enough."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(math.ceil((last - first) / most), 1)
    for factors in ((1,), (1, 2, 5)):
        values = [m * 10.0**e for e in range(first, last + 1, stride) for m in factors]
        values = [x for x in values if low * (1 - 1e-9) <= x <= high * (1 + 1e-9)]
        if len(values) > 1:
            return values
    return ticks(low, high, most)


def _tick(value: float) -> str:
    """Short enough to stand beside an axis: 3e-4, 0.25, 4,000, 20k."""
    if 0 < abs(value) < 1e-3:
        return small(f"{value:.1e}").replace(".0e", "e")
    return short(value) if abs(value) >= 10_000 else number(value, 5)
