"""Pictures as inline SVG: curves, bars, attention maps. No script, no font, no other file.

Colours are CSS variables with a fallback, text and axes have the colour of the text around them, and a map is there
twice, of which `style` shows one: so a picture reads on light and dark pages. Curves differ by their dashes too.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from regard.see.format import clip, columns, level, number, short, small, visible
from regard.see.palette import SERIES, image

Point = tuple[float, float]
# LETTER: the mean width of a letter in this font size.
WIDTH, HEIGHT, FONT, LETTER = 480, 260, 13, 7.2
TOP, LEFT, RIGHT, BOTTOM = 10.0, 62.0, WIDTH - 12.0, HEIGHT - 42.0
DASHES = (None, "7 3", "2 3", "9 3 2 3", "4 2", "1 2")
# Points of a line.
MOST = 400


def style(scheme: str) -> str:
    """The declarations that a page needs for this scheme: colours of curves, and which form of a map is shown."""
    colours = " ".join(f"--s{i}: {value};" for i, value in enumerate(SERIES[scheme]))
    other = "light" if scheme == "dark" else "dark"
    return f"svg {{ {colours} }} .{scheme} {{ display: inline; }} .{other} {{ display: none; }}"


class Series(NamedTuple):
    """A curve; `raw`: drawn faintly behind it, what it was before it was smoothed; `dots`: each point is marked."""

    name: str
    points: Sequence[Point]
    raw: Sequence[Point] = ()
    dots: bool = False


def lines(
    series: Sequence[Series], title: str, x: str = "step", y: str = "", *, log: bool = False
) -> str:
    """Curves in one picture, with a legend where there are several. Points that are not finite, or on a `log` axis not
    above 0, are left out; a curve without points keeps its colour."""
    series = [s._replace(points=_usable(s.points, log), raw=_usable(s.raw, log)) for s in series]
    points = [p for s in series for p in (*s.points, *s.raw)]
    if not points:
        return svg(WIDTH, 40, f"{title}: no values", [text(10, 24, "no values")])
    parts, top = _legend(series) if len(series) > 1 else ([], TOP)
    xs, ys = (
        _range([p[axis] for p in points], log and axis == 1, ends)
        for axis, ends in enumerate(((LEFT, RIGHT), (BOTTOM, top)))
    )
    for value in log_ticks(*ys.span) if log else ticks(*ys.span):
        parts.append(_rule(LEFT, ys(value), RIGHT, ys(value)))
        parts.append(text(LEFT - 6, ys(value) + 4, _tick(value), "end"))
    for value in ticks(*xs.span):
        parts.append(_rule(xs(value), BOTTOM, xs(value), BOTTOM + 5))
        parts.append(text(xs(value), BOTTOM + 19, _tick(value), "middle"))
    parts.append(text((LEFT + RIGHT) / 2, HEIGHT - 5, x, "middle"))
    unit = y + (", log scale" if log else "")
    parts.append(text(13, (top + BOTTOM) / 2, unit, "middle", turned=True))
    sentences = []
    for i, each in enumerate(series):
        if not each.points:
            continue
        if each.raw:
            parts.append(_curve(thin(each.raw, MOST), i, xs, ys, width=1, opacity=0.35))
        drawn = thin(each.points, MOST)
        parts.append(_curve(drawn, i, xs, ys, dash=DASHES[i % 6]))
        if each.dots or len(drawn) == 1:
            parts += [tag("circle", cx=xs(a), cy=ys(b), r=3, fill=colour(i)) for a, b in drawn]
        sentences.append(_sentence(each.name, each.raw or each.points, x))
    return svg(WIDTH, HEIGHT, f"{title}: {'; '.join(sentences)}", parts)


class _Axis(NamedTuple):
    """Where values from span[0] to span[1] lie: from ends[0] to ends[1], perhaps by their logarithm."""

    span: Point
    ends: Point
    log: bool

    def __call__(self, value: float) -> float:
        low, high = (math.log10(v) for v in self.span) if self.log else self.span
        share = ((math.log10(value) if self.log else value) - low) / (high - low)
        return self.ends[0] + share * (self.ends[1] - self.ends[0])


def _range(values: Sequence[float], log: bool, ends: Point) -> _Axis:
    """An axis around the values, which is never a single point."""
    low, high = min(values), max(values)
    if log:
        room = 2 if level(low, high) else 1.05
        return _Axis((low / room, high * room), ends, log)
    air = (abs(low) / 2 or 1.0) if level(low, high) else 0.0
    return _Axis((low - air, high + air), ends, log)


def _usable(points: Sequence[Point], log: bool) -> list[Point]:
    finite = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
    return [p for p in finite if p[1] > 0] if log else finite


def _curve(
    points: Sequence[Point],
    i: int,
    xs: _Axis,
    ys: _Axis,
    width: int = 2,
    dash: str | None = None,
    opacity: float | None = None,
) -> str:
    path = " ".join(f"{xs(x):.1f},{ys(y):.1f}" for x, y in points)
    return tag("polyline", points=path, **_stroke(i, width, dash), opacity=opacity)


def _stroke(i: int, width: int, dash: str | None) -> dict[str, object]:
    return {"fill": "none", "stroke": colour(i), "stroke_width": width, "stroke_dasharray": dash}


def _sentence(name: str, points: Sequence[Point], x: str) -> str:
    """A curve in words."""
    (first, begin), (last, end) = points[0], points[-1]
    lowest, highest = (choose(y for _, y in points) for choose in (min, max))
    ends = f"{number(begin)} at {x} {number(first)} to {number(end)} at {x} {number(last)}"
    return f"{name} from {ends}, lowest {number(lowest)}, highest {number(highest)}"


def _legend(series: Sequence[Series]) -> tuple[list[str], float]:
    """Samples of the curves with their names, in as many rows as they need; and where the picture may begin."""
    parts, at, row = [], LEFT, 14.0
    for i, each in enumerate(series):
        name = clip(visible(each.name), 40)
        width = 34 + LETTER * columns(name)
        if at > LEFT and at + width > WIDTH:
            at, row = LEFT, row + 18
        parts.append(tag("path", d=f"M{at:.0f} {row - 4:.0f}h22", **_stroke(i, 2, DASHES[i % 6])))
        parts.append(text(at + 27, row, name))
        at += width + 8
    return parts, row + 12


def bars(rows: Sequence[tuple[str, float]], title: str, unit: str = "") -> str:
    """A bar from 0 for each (name, value), with the value behind it. Values are 0 or more."""
    names = [clip(visible(name), 28) for name, _ in rows]
    left = 12 + LETTER * max(map(columns, names), default=0)
    values = [f"{short(value)} {unit}".strip() for _, value in rows]
    room = WIDTH - left - 14 - LETTER * max(map(len, values), default=0)
    most = max((value for _, value in rows), default=0.0) or 1.0
    parts = []
    for i, ((_, value), name, label) in enumerate(zip(rows, names, values)):
        y, size = 6 + 26 * i, room * value / most
        parts.append(text(left - 6, y + 14, name, "end"))
        parts.append(tag("rect", x=left, y=y, width=size, height=18, fill=colour(i)))
        parts.append(text(left + size + 6, y + 14, label))
    sentence = ", ".join(f"{name} {value}" for name, value in zip(names, values))
    return svg(WIDTH, 26 * len(rows) + 10, f"{title}: {sentence}", parts)


def heat(
    weights: Sequence[Sequence[float]],
    title: str,
    *,
    rows: Sequence[str] = (),
    across: Sequence[str] = (),
) -> str:
    """An attention map. With names of the rows and of the columns (`across`) it is a picture to read, without them a
    thumbnail."""
    values, cell = np.array(weights, float), 20
    tall, wide = values.shape
    side, head = ([clip(visible(name), 14) for name in names] for names in (rows, across))
    left = 10 + LETTER * max(map(columns, side)) if rows else 0.0
    top = 10 + LETTER * max(map(columns, head)) if across else 0.0
    w, h = (cell * wide, cell * tall) if rows else (96.0, 96.0 * min(tall / wide, 4))
    place = {"x": left, "y": top, "width": w, "height": h}
    how = {"preserveAspectRatio": "none", "style": "image-rendering:pixelated"}
    parts = [
        tag("image", **place, **how, class_=scheme, href=image(values, scheme))
        for scheme in ("light", "dark")
    ]
    parts.append(tag("rect", **place, fill="none", stroke="currentColor", opacity=0.4))
    for i, name in enumerate(side):
        parts.append(text(left - 6, top + cell * i + 15, name, "end"))
    for i, name in enumerate(head):
        parts.append(text(left + cell * i + 15, top - 6, name, turned=True))
    return svg(left + w, top + h, title, parts)


# --- numbers of an axis -------------------------------------------------------------------------------------------


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points that show the same curve: of each stretch its lowest and its highest, and both ends."""
    if len(points) <= most:
        return list(points)
    inner, parts, chosen = points[1:-1], max((most - 2) // 2, 1), [points[0]]
    for i in range(parts):
        part = inner[i * len(inner) // parts : (i + 1) * len(inner) // parts]
        ends = {part.index(choose(part, key=lambda p: p[1])) for choose in (min, max)}
        chosen += [part[j] for j in sorted(ends)]
    return [*chosen, points[-1]]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between low and high, as many as fit within `most`: steps of 1, 2 or 5 times a power of ten."""
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * m for m in (1, 2, 5, 10, 20) if (high - low) / (size * m) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Powers of ten between low and high, every one or every few; 1, 2 and 5 times them where there are less than two;
    as on a plain axis where that is not enough."""
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


# --- tags ---------------------------------------------------------------------------------------------------------


def tag(name: str, *inside: str, **attributes: object) -> str:
    """An element around others, which are markup already; of its attributes None is left out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    written = "".join(f' {k}="{_attribute(v)}"' for k, v in given.items() if v is not None)
    return f"<{name}{written}>{''.join(inside)}</{name}>" if inside else f"<{name}{written}/>"


def _attribute(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}"
    return html.escape(visible(value))


def text(x: float, y: float, words: str, anchor: str = "start", *, turned: bool = False) -> str:
    """Words at a place; `turned`: read from below."""
    turn = f"rotate(-90 {x:.1f} {y:.1f})" if turned else None
    how = {"text_anchor": anchor, "transform": turn, "font_size": FONT, "fill": "currentColor"}
    return tag("text", html.escape(visible(words)), x=float(x), y=float(y), **how)


def colour(i: int) -> str:
    return f"var(--s{i % 6}, {SERIES['light'][i % 6]})"


def _rule(x: float, y: float, to_x: float, to_y: float) -> str:
    return tag("line", x1=x, y1=y, x2=to_x, y2=to_y, stroke="currentColor", opacity=0.18)


def svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """The whole picture; the title says what is in it."""
    how = {"role": "img", "aria_label": title, "font_family": "system-ui, sans-serif"}
    size = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "style": f"max-width:{1.4 * width:.0f}px"}
    name = tag("title", html.escape(visible(title)))
    return tag("svg", name, *parts, xmlns="http://www.w3.org/2000/svg", **size, **how)
