"""A topic as a picture: its tables drawn, one below the other, or the Transformer as boxes and arrows.

A table says how it is drawn (`Table.draw`): "bars" of its last column of numbers, "lines" or "log"
lines of every column against the first, lines of "rows" against the numbers in the names of columns,
a "map" of its cells, "masks"; a word behind it names the column to begin with. Columns that are
formulas (`Table.over`) are smooth curves, computed for many numbers, with marks at those of the
table. The Transformer is laid out from the configs of models, on a board: here matplotlib's, in
docs/ one of SVG. Pictures are as narrow as a telephone can show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill
from typing import Any, NamedTuple

import torch

from regard.block import Tower
from regard.config import customize
from regard.learn.explain import Table, Topic
from regard.learn.mechanisms import SETUPS
from regard.mask import Causal, Full, Mask, Span, Visible
from regard.presets import PRESETS
from regard.see.format import clip, number, short
from regard.see.plots import AXES, DASHES, MARKS, Drawing, Sheet, ink, sheet

Point = tuple[float, float]
# Inches: at 360 pixels letters of 10 points are then 9.3 pixels high.
WIDTH = 5.4
# The width of a letter in points; of names of bars and rows, of titles of panels and of the whole in
# letters.
LETTER, NAMES, PANEL, TITLE = 0.6 * AXES, 24, 32, 48
# Points of a curve; of whole numbers at most so many.
POINTS, WHOLE = 201, 401


class Panel(NamedTuple):
    """A table to draw, and the same for many numbers if it is of formulas."""

    table: Table
    dense: Table | None = None


def drawn(topic: Topic, values: dict[str, Any]) -> Drawing:
    """The tables of a topic that are drawn; or the Transformer in these sizes. What it gives draws
    a figure of matplotlib, for light or for dark pages."""
    shown = _panels(topic, values)
    title = fill(f"{topic.name}: {topic.question}", TITLE)

    def draw(dark: bool = False) -> Any:
        if shown[0].table.draw == "figure":
            return _transformer(title, values, dark)
        tall = [_height(panel.table) for panel in shown]
        high = sum(tall) + 0.25 * title.count("\n") + 0.4
        page = sheet(WIDTH, high, rows=len(shown), dark=dark, heights=tall)
        for ax, panel in zip(page.axes, shown):
            _draw(page, ax, panel)
        page.title(title)
        return page.figure

    return draw


# --- what is drawn ----------------------------------------------------------------------------------


def _panels(topic: Topic, values: dict[str, Any]) -> list[Panel]:
    tables = list(topic.compute(**values))
    # Tables over the same numbers are computed together.
    many: dict[tuple[str, tuple[float, ...]], list[Table]] = {}
    shown = []
    for i, table in enumerate(tables):
        if table.draw == "masks":
            shown += [Panel(each) for each in _masks(table)]
        elif table.draw and table.over:
            given = [x for points in series(table).values() for x, _ in points]
            how = {"log": table.draw == "log", "whole": all(isinstance(x, int) for x in given)}
            if len({*given}) == 1:
                # One number has no range: that of the example is shown with it.
                given += topic.inputs.get(table.over, ())
            key = table.over, between(given, **how)
            if key not in many:
                many[key] = list(topic.compute(**{**values, table.over: key[1]}))
            shown.append(Panel(table, many[key][i]))
        elif table.draw:
            shown.append(Panel(table))
    return shown


def _masks(table: Table) -> list[Table]:
    """A table of masks as a map for each of them."""
    columns, found = ["query", *(str(row[0]) for row in table.rows)], []
    for at, name in enumerate(table.columns[1:], 1):
        cells = [[r[0], *(float(cell == "1") for cell in r[at].split())] for r in table.rows]
        found.append(Table(name, columns, cells, "map", "key"))
    return found


def between(given: Sequence[float], *, log: bool, whole: bool) -> tuple[float, ...]:
    """These numbers and many between them: evenly, by their logarithm on such an axis; of `whole`
    ones all, where they are few."""
    low, high = min(given), max(given)
    if whole and high - low < WHOLE:
        return tuple(float(x) for x in range(int(low), int(high) + 1))
    ends = torch.tensor([low, high], dtype=torch.float64)
    at = torch.linspace(0, 1, WHOLE if whole else POINTS, dtype=torch.float64)
    first, last = ends.log() if log else ends
    grid = first + at * (last - first)
    grid = grid.exp() if log else grid
    return tuple(sorted({*given, *(grid.round() if whole else grid).tolist()}))


def _used(table: Table) -> tuple[list[int], list[Sequence[Any]]]:
    """The columns that are drawn, and the rows."""
    column = table.draw.partition(" ")[2]
    named = [i for i, name in enumerate(table.columns) if column and name.startswith(column)]
    # A row whose first cell is a word, where others have numbers, is a sum or a figure.
    words = all(isinstance(row[0], str) for row in table.rows)
    rows = [row for row in table.rows if words or not isinstance(row[0], str)]
    texts = {i for row in rows for i, cell in enumerate(row) if isinstance(cell, str)}
    first = named[0] if named else 1
    use = [i for i in range(first, len(table.columns)) if i not in texts]
    if table.draw.startswith("bars"):
        use = use[:1] if named else use[-1:]
    return use, rows


def series(table: Table) -> dict[str, list[Point]]:
    """Curves by name, each from left to right."""
    use, rows = _used(table)
    if table.draw.startswith("rows"):
        at = [float(table.columns[i].split()[-1]) for i in use]
        names = (f"{table.columns[0]} {row[0]}" for row in rows)
        return {n: sorted(zip(at, (row[i] for i in use))) for n, row in zip(names, rows)}
    # What is 0 has no place on an axis of logarithms.
    seen = [[math.nan if table.draw.startswith("log") and not y else y for y in r] for r in rows]
    return {table.columns[i]: sorted((row[0], row[i]) for row in seen) for i in use}


def _names(table: Table) -> list[str]:
    """Of its rows: numbers and words in front of what is drawn."""
    _, rows = _used(table)
    texts = (" ".join(c for c in row if isinstance(c, str) and c) for row in rows)
    named = zip(rows, texts)
    names = (t if isinstance(row[0], str) else f"{number(row[0])} {t}".strip() for row, t in named)
    return [clip(name, NAMES) for name in names]


# --- how it is drawn --------------------------------------------------------------------------------


def _height(table: Table) -> float:
    kind = table.draw.partition(" ")[0]
    if kind in ("map", "bars"):
        return 0.34 * len(_used(table)[1]) + 1.1
    names = [*series(table)]
    return 3.0 + 0.2 * -(-len(names) // _legend_columns(names))


def _legend_columns(names: Sequence[str]) -> int:
    return max(int(60 * WIDTH / (LETTER * max(map(len, names)) + 45)), 1)


def _draw(page: Sheet, ax: Any, panel: Panel) -> None:
    table, title = panel.table, fill(panel.table.title, PANEL)
    kind = table.draw.partition(" ")[0]
    use, _ = _used(table)
    columns = [table.columns[i] for i in use]
    if kind == "map":
        _map(page, ax, table)
        page.dress(ax, table.axis, table.columns[0], title)
    elif kind == "bars":
        _bars(page, ax, table)
        page.dress(ax, table.axis or columns[0], table.columns[0], title)
    else:
        _lines(page, ax, panel)
        if kind == "log":
            _logarithmic(ax, panel)
        if kind == "rows":
            page.dress(ax, table.axis, title)
        else:
            page.dress(ax, table.columns[0], table.axis or columns[0], title)


def _map(page: Sheet, ax: Any, table: Table) -> None:
    use, rows = _used(table)
    cells = torch.tensor([[row[i] for i in use] for row in rows], dtype=torch.float64)
    share = float(cells.abs().max() <= 1)  # of 1: weights and probabilities
    image = page.image(ax, cells, share)
    ax.set_aspect("auto")
    room = 0.72 * 72 * WIDTH / len(use)
    # As many letters as a number may have.
    if room >= 6 * LETTER:
        for i, j in torch.ones_like(cells).nonzero().tolist():
            value = cells[i, j].item()
            how = {"color": ink(image, value) if value else page.text, "fontsize": AXES}
            ax.text(j, i, number(value, 2), ha="center", va="center", **how)
    names = [table.columns[i] for i in use]
    turn = 90 * (LETTER * max(map(len, names)) > room)
    ax.set_xticks(range(len(use)), names, rotation=turn)
    ax.set_yticks(range(len(rows)), _names(table))


def _bars(page: Sheet, ax: Any, table: Table) -> None:
    (at,), rows = _used(table)
    bars = ax.barh(range(len(rows)), [row[at] for row in rows], 0.7, color=page.series[0])
    values = [number(row[at]) for row in rows]
    ax.bar_label(bars, values, padding=4, color=page.text, fontsize=AXES)
    ax.margins(x=0.04 + LETTER * max(map(len, values)) / (40 * WIDTH))
    ax.locator_params(axis="x", nbins=5)
    ax.xaxis.set_major_formatter(lambda x, _: short(x) if abs(x) >= 1000 else f"{x:g}")
    ax.set_yticks(range(len(rows)), _names(table))
    ax.invert_yaxis()


def _lines(page: Sheet, ax: Any, panel: Panel) -> None:
    """Smooth curves with a mark for each number of the table, or marks joined by lines."""
    found = series(panel.table)
    smooth = series(panel.dense) if panel.dense else {}
    for i, (name, points) in enumerate(found.items()):
        how: Any = {"color": page.series[i % len(page.series)], "linewidth": 1.8}
        if name in smooth:
            ax.plot(*zip(*smooth[name]), linestyle=DASHES[i % len(DASHES)], label=name, **how)
            ax.plot(*zip(*points), "o", markersize=4, color=how["color"])
        else:
            mark = {"marker": MARKS[i % len(MARKS)], "markersize": 5}
            ax.plot(*zip(*points), label=name, **mark, **how)
    whole = all(x == int(x) for points in found.values() for x, _ in points)
    ax.locator_params(axis="x", integer=whole)
    if len(found) > 1:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 3.6}
        how = {"frameon": False, "labelcolor": page.text, "fontsize": AXES, "handlelength": 3}
        ax.legend(ncols=_legend_columns([*found]), **place, **how)


def _logarithmic(ax: Any, panel: Panel) -> None:
    """Marked where the numbers of the table lie, and without powers, whose letters are small."""
    ax.set(xscale="log", yscale="log")
    (points, *_) = series(panel.table).values()
    at = [x for x, _ in points]
    if len(at) <= 6:
        ax.set_xticks(at, [short(x) for x in at])
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0e}" if y < 1e-3 else short(y))
    ax.minorticks_off()


# --- the Transformer --------------------------------------------------------------------------------

PLAIN, FRAME, STEP, APART = -1, -2, 1.05, 4.9
# Letters of a line in a box of the Transformer.
LINE = 16
# The three kinds of attention: the number of a colour, which keys are seen, and whose.
KINDS: dict[str, tuple[int, Mask, str]] = {
    "self-attention, both ways": (2, Full(), "all of its own text"),
    "causal self-attention": (0, Causal(), "its own text up to itself"),
    "cross-attention": (1, Full(), "all of the source"),
}


def wrapped(text: str) -> str:
    return fill(text, LINE, break_on_hyphens=False)


def _transformer(title: str, values: dict[str, Any], dark: bool) -> Any:
    """The set-ups of one tower, and below them that of two."""
    towers = setups(values)
    groups = [{n: t for n, t in towers.items() if len(t) == count} for count in (1, 2)]
    page = sheet(WIDTH, 17.5, rows=2, dark=dark, heights=(14.8, 16.9))
    for ax, group in zip(page.axes, groups):
        sketch(Board(page, ax), group)
    page.title(title)
    return page.figure


class Board:
    """Boxes and arrows by matplotlib."""

    def __init__(self, page: Sheet, ax: Any):
        self.page, self.ax = page, ax

    def box(self, at: Point, size: Point, text: str, colour: int) -> None:
        from matplotlib.patches import Rectangle

        page, (x, y), (w, h), frame = self.page, at, size, colour == FRAME
        face = page.series[colour] if colour >= 0 else page.paper
        look: Any = {"facecolor": face, "linewidth": 0.9, "zorder": 0 if frame else 2}
        look["edgecolor"] = page.soft if frame else page.text
        self.ax.add_patch(Rectangle((x - w / 2, y - h / 2), w, h, **look, visible=w > 0))
        how = {"va": "center", "ha": "right" if frame else "center", "fontsize": AXES, "zorder": 3}
        shade = page.paper if colour >= 0 else page.text
        self.ax.text(x + (w / 2 - 0.1) * frame, y, wrapped(text), color=shade, **how)

    def arrow(self, *points: Point) -> None:
        self.ax.plot(*zip(*points[:-1]), color=self.page.text, linewidth=0.9, zorder=1)
        how = {"arrowstyle": "-|>", "color": self.page.text, "shrinkA": 0, "shrinkB": 0}
        self.ax.annotate("", points[-1], points[-2], arrowprops=how)

    def end(self, width: float, low: float, high: float) -> None:
        self.ax.set(xlim=(0, width), ylim=(low, high), aspect="equal")
        self.ax.axis("off")


def setups(values: dict[str, Any]) -> dict[str, list[Tower]]:
    """The towers of each set-up in these sizes."""
    sizes = {"ffn_dim" if name == "width" else name: size for name, size in values.items()}
    made = {name: customize(PRESETS[preset][1](), sizes) for name, (preset, _) in SETUPS.items()}
    roles = ("tower", "encoder", "decoder")
    return {n: [getattr(c, r) for r in roles if hasattr(c, r)] for n, c in made.items()}


def sketch(board: Any, models: dict[str, list[Tower]]) -> None:
    """A column of boxes for each tower, from the bottom up; below them what each kind of attention
    sees. A box is 3 wide."""
    at, high, words = 2.4, 0.0, [""]
    for name, towers in models.items():
        board.box((at + APART * (len(towers) - 1) / 2, -STEP), (0, 0), name, PLAIN)
        for i, tower in enumerate(towers):
            last = "states of the source" if towers[i + 1 :] else "logits"
            column = _column(board, tower, at, last)
            at, high, words = at + APART, max(high, STEP * len(column)), words + column
    used = [kind for kind in dict.fromkeys(words) if kind in KINDS]
    here, wide = Span.run(0, 5), (at - 2.4) / len(used)
    for i, kind in enumerate(used):
        left = (i + 0.5) * wide - 0.6
        colour, mask, seen = KINDS[kind]
        for row, key in Visible(mask, here, here).tensor()[0, 0].nonzero().tolist():
            board.box((left + 0.3 * key, -1.9 - 0.3 * row), (0.26, 0.26), "", colour)
        board.box((left + 0.6, -3.95), (0, 0), f"{kind}:", PLAIN)
        board.box((left + 0.6, -4.8), (0, 0), seen, PLAIN)
    board.end(at - 2.4, -5.3, high)


def _column(board: Any, tower: Tower, at: float, last: str) -> list[str]:
    pre = tower.order == "pre"
    kind = "causal self-attention" if tower.causal else "self-attention, both ways"
    subs = [kind, *(["cross-attention"] if tower.cross else []), "feed-forward"]
    stack = [w for s in subs for w in (("norm", s, "+") if pre else (s, "+", "norm"))]
    words = ["embedding + positions", *stack, *["norm"] * (pre and tower.final_norm), last]
    middle = at + 0.1, STEP * (len(stack) + 1) / 2
    board.box(middle, (4.3, STEP * len(stack) + 0.1), f"x {tower.layers}", FRAME)
    half = [0.22 if word == "+" else 0.36 for word in words]
    for i, word in enumerate(words):
        y, colour = STEP * i, KINDS[word][0] if word in KINDS else PLAIN
        board.box((at, y), (0.44 if word == "+" else 3.0, 2 * half[i]), word, colour)
        if i:
            board.arrow((at, y - STEP + half[i - 1]), (at, y - half[i]))
        if word == "+":
            low = y - STEP * (1.5 + pre)
            board.arrow((at, low), (at - 1.75, low), (at - 1.75, y), (at - 0.22, y))
        if word == "cross-attention":
            # From the last box of the encoder, whose layers have one sub-layer less.
            top, side = STEP * (len(words) - 4), at - APART / 2
            board.arrow((at - APART + 1.5, top), (side, top), (side, y), (at - 1.5, y))
    return words
