"""How pictures of docs/mechanisms are drawn: SVG by regard/report/page.py, and grids of cells
beside each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from markupsafe import Markup

from regard.report import page
from regard.see.page import levels, table

CELL = 22
QUERIES = "row: query, column: key"
Matrix = Sequence[Sequence[float]]
GRIDS = """
{%- from "pictures.svg" import picture, text -%}
{%- call picture(width, tall + 26, title) -%}
{%- for name, left, matrix in panels %}{{ text(left, 16, name) }}{% endfor -%}
{%- for scheme, colours in tables.items() %}<g class="{{ scheme }}">
{%- for name, left, matrix in panels %}
{%- for row in matrix %}{% set y = 24 + cell * loop.index0 %}
{%- for level in row -%}
<rect x="{{ (left + cell * loop.index0)|int }}" y="{{ y }}" {{ size }} fill="{{ colours[level] }}"/>
{%- endfor %}{% endfor %}{% endfor %}</g>{% endfor -%}
{{ text(8, tall + 18, axes) }}
{%- endcall -%}
"""
PICTURES: dict[str, Callable[[], str]] = {}


def draw(name: str) -> str:
    """The picture with colours for a light and a dark page of its own, as it stands alone."""
    light, dark = (
        f"svg {{ color: {ink}; }} {page.style(scheme)}"
        for scheme, ink in (("light", "#1c1c1c"), ("dark", "#e6e6e6"))
    )
    style = f"<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>"
    text = PICTURES[name]()
    size = re.sub(r'viewBox="0 0 (\d+) (\d+)"', r'width="\1" height="\2" \g<0>', text, count=1)
    return size.replace("</title>", f"</title>{style}", 1) + "\n"


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
    """Small matrices side by side under their names, in the colours of attention maps; below, what
    rows and columns are."""
    panels, left = [], 8.0
    for name, matrix in parts.items():
        panels.append((name, left, levels(np.array(matrix), most, signed).tolist()))
        left += max(CELL * len(matrix[0]), int(page.LETTER * len(name))) + 18
    tables = {
        scheme: ["#" + colour.tobytes().hex() for colour in table(scheme, signed)]
        for scheme in ("light", "dark")
    }
    tall = 24 + CELL * max(len(matrix) for matrix in parts.values())
    width = max(left, 16 + page.LETTER * len(axes))
    size = Markup(f'width="{CELL - 1}" height="{CELL - 1}"')
    values = {
        "title": title,
        "axes": axes,
        "width": width,
        "tall": tall,
        "cell": CELL,
        "size": size,
    }
    template = page.templates().from_string(GRIDS)
    return template.render(**values, panels=panels, tables=tables)


def steps(low: float, high: float, count: int) -> list[float]:
    return torch.linspace(low, high, count, dtype=torch.float64).tolist()
