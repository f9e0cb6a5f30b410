"""How pictures of docs/mechanisms are drawn: SVG by regard/report/page.py, and grids of cells
beside each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from markupsafe import Markup

from regard.learn.picture import FRAME, wrapped
from regard.report import page
from regard.see.page import PAPER, SANS, SERIES, levels, table

CELL = 22
QUERIES = "row: query, column: key"
Matrix = Sequence[Sequence[float]]
GRIDS = """
{%- from "pictures.svg" import picture, text -%}
{%- call picture(width, tall + 26, title) -%}
{%- for name, left, top, matrix in panels %}{{ text(left, top + 16, name) }}{% endfor -%}
{%- for scheme, colours in tables.items() %}<g class="{{ scheme }}">
{%- for name, left, top, matrix in panels %}
{%- for row in matrix %}{% set y = top + 24 + cell * loop.index0 %}
{%- for level in row -%}
<rect x="{{ (left + cell * loop.index0)|int }}" y="{{ y }}" {{ size }} fill="{{ colours[level] }}"/>
{%- endfor %}{% endfor %}{% endfor %}</g>{% endfor -%}
{{ text(8, tall + 18, axes) }}
{%- endcall -%}
"""
PICTURES: dict[str, Callable[[], str]] = {}


def draw(name: str) -> str:
    # A template gives Markup, which would escape what is put into it.
    return alone(str(PICTURES[name]()))


def alone(svg: str) -> str:
    """A picture as a file: its size, where there is room for it, its letters, and colours for a light
    and a dark page of its own. They need no variables, which only browsers know."""
    svg = re.sub(r"var\(--s\d, (#\w+)\)", r"\1", svg)
    light, dark = (PAPER[scheme]["ink"] for scheme in ("light", "dark"))
    rules = f"svg {{ color: {light}; font-family: {SANS}; }} .dark {{ display: none; }}"
    swap = f"svg {{ color: {dark}; }} .light {{ display: none; }} .dark {{ display: inline; }}"
    for one, other in zip(SERIES["light"], SERIES["dark"]):
        for name in ("stroke", "fill"):
            swap += f' [{name}="{one}"] {{ {name}: {other}; }}' * (f'{name}="{one}"' in svg)
    sheet = f"<style>{rules} @media (prefers-color-scheme: dark) {{ {swap} }}</style>"
    size = re.sub(r'viewBox="0 0 (\d+) (\d+)"', r'width="\1" height="\2" \g<0>', svg, count=1)
    fluid = re.sub(r'style="max-width:\d+px"', 'style="max-width:100%;height:auto"', size, count=1)
    return fluid.replace("</title>", f"</title>{sheet}", 1) + "\n"


def picture(make: Callable[[], str]) -> Callable[[], str]:
    PICTURES[make.__name__.replace("_", "-")] = make
    return make


def series(
    name: str, xs: Sequence[float], ys: Sequence[float], *, dots: bool = False
) -> page.Series:
    return page.Series(name, list(zip(xs, ys)), dots=dots)


def grids(
    parts: Mapping[str, Matrix], axes: str, title: str, *, most: float = 1.0, signed: bool = False
) -> str:
    """Small matrices under their names, side by side and in as many rows as they need, in the colours
    of attention maps; below, what rows and columns are."""
    panels, left, top, width = [], 8.0, 0, 16 + page.LETTER * len(axes)
    tall = 24 + CELL * max(len(matrix) for matrix in parts.values())
    for name, matrix in parts.items():
        wide = max(CELL * len(matrix[0]), int(page.LETTER * len(name))) + 18
        if left + wide > page.BOX["width"] + 18:
            left, top = 8.0, top + tall + 12
        panels.append((name, left, top, levels(np.array(matrix), most, signed).tolist()))
        left += wide
        width = max(width, left)
    tables = {
        scheme: ["#" + colour.tobytes().hex() for colour in table(scheme, signed)]
        for scheme in ("light", "dark")
    }
    size = Markup(f'width="{CELL - 1}" height="{CELL - 1}"')
    values = {
        "title": title,
        "axes": axes,
        "width": width,
        "tall": top + tall,
        "cell": CELL,
        "size": size,
    }
    template = page.templates().from_string(GRIDS)
    return template.render(**values, panels=panels, tables=tables)


BOARD = """
{%- from "pictures.svg" import picture, text -%}
{%- call picture(width, height, title) -%}
{%- for points, tip in arrows -%}
<polyline points="{{ points }}" fill="none" stroke="currentColor"/><polygon points="{{ tip }}" fill="currentColor"/>
{%- endfor %}
{%- for left, top, wide, tall, colour in boxes %}
{%- set edge = colour|colour if colour >= 0 else "currentColor" -%}
<rect x="{{ left|c }}" y="{{ top|c }}" width="{{ wide|c }}" height="{{ tall|c }}" stroke="{{ edge }}"
{%- if colour >= 0 %} fill="{{ edge }}" fill-opacity=".25" stroke-width="2"
{%- else %} fill="none"{% if colour == -2 %} opacity=".6"{% endif %}{% endif %}/>
{%- endfor %}
{%- for x, y, words, anchor in texts %}{{ text(x, y, words, anchor) }}{% endfor -%}
{%- endcall -%}
"""


class Board:
    """The boxes and arrows of learn/picture.py as SVG."""

    unit = 50.0

    def __init__(self, title: str):
        self.title = title
        self.boxes: list[tuple[tuple[float, float], tuple[float, float], str, int]] = []
        self.arrows: list[tuple[tuple[float, float], ...]] = []

    def box(
        self, at: tuple[float, float], size: tuple[float, float], text: str, colour: int
    ) -> None:
        self.boxes.append((at, size, text, colour))

    def arrow(self, *points: tuple[float, float]) -> None:
        self.arrows.append(points)

    def end(self, width: float, low: float, high: float) -> None:
        u = self.unit
        boxes, texts, arrows = [], [], []
        for (x, y), (w, h), text, colour in self.boxes:
            middle = u * x, u * (high - y)
            if w:
                boxes.append((middle[0] - u * w / 2, middle[1] - u * h / 2, u * w, u * h, colour))
            at, anchor = middle[0], "middle"
            if colour == FRAME:
                at, anchor = at + u * w / 2 - 5, "end"
            lines = wrapped(text).splitlines()
            for i, line in enumerate(lines):
                down = page.FONT * (0.35 + 1.1 * (i - (len(lines) - 1) / 2))
                texts.append((at, middle[1] + down, line, anchor))
        for points in self.arrows:
            *_, (a, b), (x, y) = placed = [(u * x, u * (high - y)) for x, y in points]
            along, across = ((x > a) - (x < a), (y > b) - (y < b)), 3.5
            base = x - 8 * along[0], y - 8 * along[1]
            side = across * along[1], across * along[0]
            tip = [
                (x, y),
                (base[0] + side[0], base[1] + side[1]),
                (base[0] - side[0], base[1] - side[1]),
            ]
            arrows.append([" ".join(f"{p:.1f},{q:.1f}" for p, q in line) for line in (placed, tip)])
        size = {"width": u * width, "height": u * (high - low)}
        parts = {"boxes": boxes, "texts": texts, "arrows": arrows, "title": self.title}
        self.text = page.templates().from_string(BOARD).render(**parts, **size)


def steps(low: float, high: float, count: int) -> list[float]:
    return torch.linspace(low, high, count, dtype=torch.float64).tolist()
