"""How pictures of docs/mechanisms are drawn: SVG by regard/report/svg.py, and grids of cells beside each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch

from regard.report import svg

CELL = 22
QUERIES = "row: query, column: key"
Matrix = Sequence[Sequence[float]]
PICTURES: dict[str, Callable[[], str]] = {}


def draw(name: str) -> str:
    """The picture with colours for a light and a dark page of its own, as it stands alone."""
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{ color: #e6e6e6; {svg.colours(svg.DARK)} }} }}"
    style = f"<style>svg {{ color: #1c1c1c; {svg.colours(svg.LIGHT)} }} {dark}</style>"
    text = PICTURES[name]()
    size = re.sub(r'viewBox="0 0 (\d+) (\d+)"', r'width="\1" height="\2" \g<0>', text, count=1)
    return size.replace("</title>", f"</title>{style}", 1) + "\n"


def picture(make: Callable[[], str]) -> Callable[[], str]:
    PICTURES[make.__name__.replace("_", "-")] = make
    return make


def series(
    name: str, xs: Sequence[float], ys: Sequence[float], *, dots: bool = False
) -> svg.Series:
    return svg.Series(name, list(zip(xs, ys)), dots=dots)


def grids(
    parts: Mapping[str, Matrix], axes: str, title: str, *, low: float = 0.0, high: float = 1.0
) -> str:
    """Small matrices side by side under their names, cells dark to bright from low to high; below, what rows and
    columns are."""
    pieces, left, tall = [], 8.0, 0.0
    for name, matrix in parts.items():
        wide = max(CELL * len(matrix[0]), int(svg.LETTER * len(name)))
        pieces.append(svg._text(left, 16, name, "start"))
        for i, row in enumerate(matrix):
            for j, value in enumerate(row):
                red, green, blue = svg.shade((value - low) / (high - low))
                place = f'x="{left + CELL * j:.0f}" y="{24 + CELL * i}" width="{CELL - 1}" height="{CELL - 1}"'
                pieces.append(f'<rect {place} fill="#{red:02x}{green:02x}{blue:02x}"/>')
        left, tall = left + wide + 18, max(tall, 24 + CELL * len(matrix))
    pieces.append(svg._text(8, tall + 18, axes, "start"))
    return svg._svg(max(left, 16 + svg.LETTER * len(axes)), tall + 26, title, pieces)


def steps(low: float, high: float, count: int) -> list[float]:
    return torch.linspace(low, high, count, dtype=torch.float64).tolist()
