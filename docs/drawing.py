"""How pictures of docs/mechanisms are drawn: SVG by regard/report/svg.py, and grids of cells beside each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from regard.report import svg
from regard.see.palette import levels, table

CELL = 22
QUERIES = "row: query, column: key"
Matrix = Sequence[Sequence[float]]
PICTURES: dict[str, Callable[[], str]] = {}


def draw(name: str) -> str:
    """The picture with colours for a light and a dark page of its own, as it stands alone."""
    light, dark = (
        f"svg {{ color: {ink}; }} {svg.style(scheme)}"
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
) -> svg.Series:
    return svg.Series(name, list(zip(xs, ys)), dots=dots)


def grids(
    parts: Mapping[str, Matrix], axes: str, title: str, *, most: float = 1.0, signed: bool = False
) -> str:
    """Small matrices side by side under their names, in the colours of attention maps; below, what rows and columns
    are."""
    pieces, left, tall = [], 8.0, 0.0
    cells: dict[str, list[str]] = {"light": [], "dark": []}
    for name, matrix in parts.items():
        wide = max(CELL * len(matrix[0]), int(svg.LETTER * len(name)))
        pieces.append(svg.text(left, 16, name))
        for (i, j), level in np.ndenumerate(levels(np.array(matrix), most, signed)):
            place = {"x": round(left + CELL * j), "y": 24 + CELL * i}
            for scheme, drawn in cells.items():
                fill = "#" + table(scheme, signed)[level].tobytes().hex()
                drawn.append(svg.tag("rect", **place, width=CELL - 1, height=CELL - 1, fill=fill))
        left, tall = left + wide + 18, max(tall, 24 + CELL * len(matrix))
    pieces += [svg.tag("g", *drawn, class_=scheme) for scheme, drawn in cells.items()]
    pieces.append(svg.text(8, tall + 18, axes))
    return svg.svg(max(left, 16 + svg.LETTER * len(axes)), tall + 26, title, pieces)


def steps(low: float, high: float, count: int) -> list[float]:
    return torch.linspace(low, high, count, dtype=torch.float64).tolist()
