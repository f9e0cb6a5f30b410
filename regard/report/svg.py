"""Pictures as inline SVG, written by hand: lines, bars, heat maps. No script, no font, no other file.

Colours are CSS variables with a fallback, text and axes have the colour of the text around them, so that a picture
reads on light and dark pages. Series differ by their dashes too, and a heat map's colours by their lightness.
"""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from regard.report.show import (
    Point,
    clip,
    columns,
    ema,
    level,
    log_ticks,
    number,
    short,
    small,
    thin,
    ticks,
    visible,
)

WIDTH, HEIGHT, FONT, LETTER = 480, 260, 13, 7.2  # LETTER: the mean width of one, in this font size
LIGHT = ("#0b62a8", "#b34700", "#007556", "#8f3f8f", "#7a6200", "#444c56")
DARK = ("#6cb6ff", "#ffa05c", "#4fd1a5", "#e0a3e0", "#e3c84b", "#b6bec8")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")
STOPS = ((26, 16, 62), (44, 74, 142), (24, 134, 142), (116, 192, 92), (250, 236, 120))
MOST = 400  # points of a line


def colours(values: Sequence[str]) -> str:
    """The CSS variables of a palette."""
    return " ".join(f"--s{i}: {value};" for i, value in enumerate(values))


def escape(text: object) -> str:
    return html.escape(visible(text))


# --- lines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """A curve. `keep` above 0: drawn faintly as it is, and boldly smoothed by an `ema` that keeps so much. `dots`: each
    point is marked."""

    name: str
    points: Sequence[Point]
    keep: float = 0.0
    dots: bool = False


@dataclass(frozen=True)
class Frame:
    """Where data lies in the picture: x from `left` to `right`, y from `bottom` up to `top`, perhaps logarithmic."""

    xs: Point
    ys: Point
    log: bool
    top: float
    left: float = 62
    right: float = WIDTH - 12
    bottom: float = HEIGHT - 42

    @classmethod
    def around(cls, points: Sequence[Point], log: bool, top: float) -> Frame:
        xs = _wider(min(x for x, _ in points), max(x for x, _ in points), False)
        ys = _wider(min(y for _, y in points), max(y for _, y in points), log)
        return cls(xs, ys, log, top)

    def x(self, value: float) -> float:
        low, high = self.xs
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = (math.log10(v) for v in self.ys) if self.log else self.ys
        value = math.log10(value) if self.log else value
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def axes(self, x: str, y: str) -> str:
        """Lines across the picture, their numbers, and what the axes mean."""
        parts = []
        for value in log_ticks(*self.ys) if self.log else ticks(*self.ys):
            at = self.y(value)
            parts.append(_rule(self.left, at, self.right, at))
            parts.append(_text(self.left - 6, at + 4, _tick(value), "end"))
        for value in ticks(*self.xs):
            at = self.x(value)
            parts.append(_rule(at, self.bottom, at, self.bottom + 5))
            parts.append(_text(at, self.bottom + 19, _tick(value), "middle"))
        middle = (self.left + self.right) / 2
        parts.append(_text(middle, HEIGHT - 5, x, "middle"))
        side = (self.top + self.bottom) / 2
        turn = f' transform="rotate(-90 13 {side:.0f})"'
        return "".join([*parts, _text(13, side, y, "middle", turn)])


def lines(
    series: Sequence[Series], title: str, x: str = "step", y: str = "", *, log: bool = False
) -> str:
    """Curves in one picture, with a legend where there are several. Points that are not finite, or on a `log` axis not
    above 0, are left out; a curve without points leaves its colour to itself."""
    real = [Series(s.name, _real(s.points, log), s.keep, s.dots) for s in series]
    points = [p for s in real for p in s.points]
    if not points:
        return _nothing(title)
    legend, top = _legend(real) if len(real) > 1 else ("", 10.0)
    frame = Frame.around(points, log, top)
    parts = [frame.axes(x, y + (", log scale" if log else "")), legend]
    drawn = [(i, each) for i, each in enumerate(real) if each.points]
    for i, each in drawn:
        parts += _curve(each, i, frame)
    said = "; ".join(_said(each, x) for _, each in drawn)
    return _svg(WIDTH, HEIGHT, f"{title}: {said}", parts)


def _real(points: Sequence[Point], log: bool) -> list[Point]:
    finite = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
    return [p for p in finite if p[1] > 0] if log else finite


def _curve(series: Series, i: int, frame: Frame) -> list[str]:
    points, parts = list(series.points), []
    if series.keep > 0:
        raw = frame.path(thin(points, MOST))
        parts.append(f'<polyline points="{raw}" {_stroke(i, 1)} opacity=".35"/>')
        means = ema([y for _, y in points], series.keep)
        points = [(x, mean) for (x, _), mean in zip(points, means)]
    points = thin(points, MOST)
    parts.append(f'<polyline points="{frame.path(points)}" {_stroke(i, 2, DASHES[i % 6])}/>')
    if series.dots or len(points) == 1:
        places = [(frame.x(x), frame.y(y)) for x, y in points]
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour(i)}"/>' for x, y in places
        ]
    return parts


def _said(series: Series, x: str) -> str:
    """A curve in words."""
    (first, begin), (last, end) = series.points[0], series.points[-1]
    lowest, highest = (choose(y for _, y in series.points) for choose in (min, max))
    ends = f"{number(begin)} at {x} {number(first)} to {number(end)} at {x} {number(last)}"
    return f"{series.name} from {ends}, lowest {number(lowest)}, highest {number(highest)}"


def _legend(series: Sequence[Series]) -> tuple[str, float]:
    """Samples of the curves with their names, in as many rows as they need; and where the picture may begin."""
    parts, at, row = [], 62.0, 14.0
    for i, each in enumerate(series):
        name = clip(visible(each.name), 40)
        width = 34 + LETTER * columns(name)
        if at > 62 and at + width > WIDTH:
            at, row = 62.0, row + 18
        mark = f'M{at:.0f} {row - 4:.0f}h22"'
        parts.append(f'<path d="{mark} {_stroke(i, 2, DASHES[i % 6])}/>')
        parts.append(_text(at + 27, row, name, "start"))
        at += width + 8
    return "".join(parts), row + 12


def _wider(low: float, high: float, log: bool) -> Point:
    """A range that is no single point."""
    flat = level(low, high)
    if log:
        return (low / 2, high * 2) if flat else (low / 1.05, high * 1.05)
    air = (abs(low) / 2 or 1.0) if flat else 0.0
    return low - air, high + air


# --- bars ---------------------------------------------------------------------------------------------------------


def bars(rows: Sequence[tuple[str, float]], title: str, unit: str = "") -> str:
    """A bar from 0 for each (name, value), with the value behind it. Values are 0 or more."""
    names = [clip(visible(name), 28) for name, _ in rows]
    left = 12 + LETTER * max(map(columns, names), default=0)
    values = [f"{short(value)} {unit}".strip() for _, value in rows]
    room = WIDTH - left - 14 - LETTER * max(map(len, values), default=0)
    most = max((value for _, value in rows if math.isfinite(value)), default=0.0) or 1.0
    parts = []
    for i, ((_, value), name, text) in enumerate(zip(rows, names, values)):
        y, size = 6 + 26 * i, room * value / most if math.isfinite(value) else 0.0
        parts.append(_text(left - 6, y + 14, name, "end"))
        parts.append(
            f'<rect x="{left:.1f}" y="{y}" width="{size:.1f}" height="18" fill="{colour(i)}"/>'
        )
        parts.append(_text(left + size + 6, y + 14, text, "start"))
    said = ", ".join(f"{name} {value}" for name, value in zip(names, values))
    return _svg(WIDTH, 26 * len(rows) + 10, f"{title}: {said}", parts)


# --- heat maps ----------------------------------------------------------------------------------------------------


def heat(
    matrix: Sequence[Sequence[float]],
    title: str,
    *,
    rows: Sequence[str] = (),
    across: Sequence[str] = (),
) -> str:
    """Values from 0 as colours from dark to bright, the largest the brightest. With names of the rows and of the
    columns (`across`) it is a picture to read, without them a thumbnail."""
    named, cell = bool(rows and across), 20
    tall, wide = len(matrix), max(map(len, matrix), default=0)
    if not tall or not wide:
        return _nothing(title)
    side, head = ([clip(visible(name), 14) for name in names] for names in (rows, across))
    left = 10 + LETTER * max(map(columns, side)) if named else 0.0
    top = 10 + LETTER * max(map(columns, head)) if named else 0.0
    w, h = (cell * wide, cell * tall) if named else (96.0, 96.0 * min(tall / wide, 4))
    place = f'x="{left:.1f}" y="{top:.1f}" width="{w:.1f}" height="{h:.1f}"'
    parts = [
        f'<image {place} preserveAspectRatio="none" style="image-rendering:pixelated" href="{_png(matrix)}"/>',
        f'<rect {place} fill="none" stroke="currentColor" opacity=".4"/>',
    ]
    if named:
        for i, name in enumerate(side[:tall]):
            parts.append(_text(left - 6, top + cell * i + 15, name, "end"))
        for i, name in enumerate(head[:wide]):
            x = left + cell * i + 15
            turn = f' transform="rotate(-90 {x:.1f} {top - 6:.1f})"'
            parts.append(_text(x, top - 6, name, "start", turn))
    return _svg(left + w, top + h, title, parts)


def shade(value: float) -> tuple[int, int, int]:
    """The colour of a value from 0 to 1; a larger one is lighter."""
    at = min(max(value, 0.0), 1.0) * (len(STOPS) - 1)
    i = min(int(at), len(STOPS) - 2)
    red, green, blue = (round(a + (b - a) * (at - i)) for a, b in zip(STOPS[i], STOPS[i + 1]))
    return red, green, blue


def _png(matrix: Sequence[Sequence[float]]) -> str:
    """The matrix as a data address of an image with a palette: thousands of cells cost a browser nothing so."""
    wide = max(map(len, matrix))
    most = max((v for row in matrix for v in row if math.isfinite(v)), default=0.0) or 1.0
    pixels = b""
    for row in matrix:
        levels = [round(255 * min(max(v / most, 0.0), 1.0)) if math.isfinite(v) else 0 for v in row]
        pixels += bytes([0, *levels, *[0] * (wide - len(row))])
    table = bytes(part for level in range(256) for part in shade(level / 255))
    header = struct.pack(">IIBBBBB", wide, len(matrix), 8, 3, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"PLTE", table), (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in chunks:
        data += struct.pack(">I", len(body)) + kind + body
        data += struct.pack(">I", zlib.crc32(kind + body))
    return "data:image/png;base64," + base64.b64encode(data).decode()


# --- pieces -------------------------------------------------------------------------------------------------------


def colour(i: int) -> str:
    return f"var(--s{i % 6}, {LIGHT[i % 6]})"


def _stroke(i: int, width: int, dash: str = "") -> str:
    more = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{colour(i)}" stroke-width="{width}" stroke-linejoin="round"{more}'


def _tick(value: float) -> str:
    """Short enough to stand beside an axis: 3e-4, 0.25, 4,000, 20k."""
    if 0 < abs(value) < 1e-3:
        return small(f"{value:.1e}").replace(".0e", "e")
    return short(value) if abs(value) >= 10_000 else number(value, 5)


def _rule(x: float, y: float, to_x: float, to_y: float) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="currentColor" opacity=".18"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more} font-size="{FONT}" '
        f'fill="currentColor">{escape(text)}</text>'
    )


def _nothing(title: str) -> str:
    return _svg(WIDTH, 40, f"{title}: no values", [_text(10, 24, "no values", "start")])


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    said = escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{said}" font-family="system-ui, sans-serif" style="max-width:{1.4 * width:.0f}px">'
        f"<title>{said}</title>{''.join(parts)}</svg>"
    )
