"""A topic as a picture: its tables drawn, or the Transformer as a figure of boxes and arrows.

A table says how it is drawn (`Table.draw`): "bars" of its last column of numbers, "lines" or
"log" lines of every column against the first, a "map" of its cells, "masks"; a word behind it names
the column to begin with. The figure is laid out from the configs of models, as shapes, which
matplotlib draws here and docs/ as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from regard.block import Tower
from regard.config import customize
from regard.errors import UsageError
from regard.learn.explain import Table, Topic
from regard.learn.mechanisms import SETUPS
from regard.mask import Causal, Full, Mask, Span, Visible
from regard.presets import PRESETS
from regard.see.format import number
from regard.see.plots import Sheet, ink, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS = "osD^vP"


def drawn(topic: Topic, tables: Sequence[Table], values: dict[str, Any]) -> Figure:
    """The tables that are drawn, side by side; or the figure."""
    shown = [part for table in tables if table.draw for part in _parts(table)]
    if not shown:
        raise UsageError(f"{topic.name} has no picture; leave --output out")
    if shown[0].draw == "figure":
        return figure(setups(values), topic.question)
    wide = max(2.2 + 0.75 * len(table.rows[0]) for table in shown) if len(shown) > 1 else 7.0
    page = sheet(min(wide * len(shown), 24), 4.6, len(shown))
    for ax, table in zip(page.axes, shown):
        kind, _, column = table.draw.partition(" ")
        named = [i for i, name in enumerate(table.columns) if column and name.startswith(column)]
        # Rows whose first cell is a word, where others have numbers, are sums and figures.
        words = all(isinstance(row[0], str) for row in table.rows)
        rows = [row for row in table.rows if words or not isinstance(row[0], str)]
        of = range(named[0] if named else 1, len(table.columns))
        use = [i for i in of if all(isinstance(row[i], (int, float)) for row in rows)]
        _DRAW[kind](page, ax, table, rows, use[:1] if named and kind == "bars" else use)
        page.dress(ax, ax.get_xlabel() or table.columns[0], ax.get_ylabel(), table.title)
    page.title(f"{topic.name}: {topic.question}")
    return page.figure


def _parts(table: Table) -> Iterator[Table]:
    """A table of masks as a map for each of them."""
    if table.draw != "masks":
        yield table
        return
    for i, name in enumerate(table.columns[1:], 1):
        cells = [[float(cell == "1") for cell in row[i].split()] for row in table.rows]
        rows = [[row[0], *each] for row, each in zip(table.rows, cells)]
        yield Table(name, ["query", *map(str, range(len(cells[0])))], rows, "map")


def _bars(page: Sheet, ax: Axes, table: Table, rows: Sequence[Any], use: list[int]) -> None:
    texts = [[cell for cell in row if isinstance(cell, str) and cell.strip()] for row in rows]
    names = [
        " ".join(t if isinstance(r[0], str) else [number(r[0]), *t]) for r, t in zip(rows, texts)
    ]
    ax.bar(range(len(rows)), [row[use[-1]] for row in rows], color=page.series[0])
    ax.set_xticks(range(len(rows)), names)
    ax.set_ylabel(table.columns[use[-1]])


def _lines(page: Sheet, ax: Axes, table: Table, rows: Sequence[Any], use: list[int]) -> None:
    for i, at in enumerate(use):
        how = {"color": page.series[i % 6], "marker": MARKS[i % 6], "markersize": 4}
        ax.plot(*zip(*((row[0], row[at]) for row in rows)), label=table.columns[at], **how)
    ax.legend(frameon=False, labelcolor=page.text, fontsize=9)


def _log(page: Sheet, ax: Axes, table: Table, rows: Sequence[Any], use: list[int]) -> None:
    _lines(page, ax, table, rows, use)
    ax.set(xscale="log", yscale="log")


def _map(page: Sheet, ax: Axes, table: Table, rows: Sequence[Any], use: list[int]) -> None:
    cells = torch.tensor([[row[i] for i in use] for row in rows], dtype=torch.float64)
    image = page.image(ax, cells)
    for i, j in torch.ones_like(cells).nonzero().tolist() if cells.numel() <= 144 else ():
        value = cells[i, j].item()
        colour = {"color": ink(image, value) if value else page.text}
        ax.text(j, i, number(value, 2), ha="center", va="center", fontsize=8, **colour)
    ax.set_yticks(
        range(len(rows)), [number(r[0]) if not isinstance(r[0], str) else r[0] for r in rows]
    )
    ax.set_xticks(
        range(len(use)), [table.columns[i] for i in use], rotation=90 if len(use) > 6 else 0
    )
    ax.set(xlabel=" ", ylabel=table.columns[0])


_DRAW = {"bars": _bars, "lines": _lines, "log": _log, "map": _map}

# --- the Transformer as a figure ------------------------------------------------------------------


class Shape(NamedTuple):
    """A box around (x, y) with a text, or, of several points, a line with an arrow at its end.
    `colour`: the number of a series, NONE, or FRAME around other boxes."""

    points: tuple[tuple[float, float], ...]
    text: str = ""
    size: tuple[float, float] = (0.0, 0.0)
    colour: int = -1


NONE, FRAME, STEP, APART = -1, -2, 0.93, 4.6
# The three kinds of attention: colour, what is seen of the keys, and of whose.
KINDS: dict[str, tuple[int, Mask, str]] = {
    "self-attention, both ways": (2, Full(), "all of its own text"),
    "causal self-attention": (0, Causal(), "its own text up to itself"),
    "cross-attention": (1, Full(), "all of the source"),
}


def setups(values: dict[str, Any]) -> dict[str, list[Tower]]:
    """The towers of each set-up in these sizes."""
    sizes = {"ffn_dim" if name == "width" else name: size for name, size in values.items()}
    made = {name: customize(PRESETS[preset][1](), sizes) for name, (preset, _) in SETUPS.items()}
    names = ("tower", "encoder", "decoder")
    return {n: [getattr(c, t) for t in names if hasattr(c, t)] for n, c in made.items()}


def shapes(models: dict[str, list[Tower]]) -> tuple[list[Shape], float]:
    """A column of boxes for each tower, from the bottom up; below them what each kind of attention
    sees. Also how wide they are, in units of which a box is 3 wide."""
    found: list[Shape] = []
    at = 2.4
    for name, towers in models.items():
        middle = at + APART * (len(towers) - 1) / 2
        found.append(Shape(((middle, -STEP),), name))
        for i, tower in enumerate(towers):
            found += _column(tower, at, "states of the source" if towers[i + 1 :] else "logits")
            at += APART
    used = [kind for kind in KINDS if any(shape.text == kind for shape in found)]
    here = Span.run(0, 5)
    for i, kind in enumerate(used):
        left = 1.2 + i * max((at - 2.4) / len(used), 3.6)
        colour, mask, seen = KINDS[kind]
        found.append(Shape(((left + 0.6, -3.9),), f"{kind}:\n{seen}"))
        for row, column in Visible(mask, here, here).tensor()[0, 0].nonzero().tolist():
            cell = left + 0.3 * column, -1.9 - 0.3 * row
            found.append(Shape((cell,), "", (0.26, 0.26), colour))
    return found, at - 2.4


def _column(tower: Tower, at: float, last: str) -> Iterator[Shape]:
    pre = tower.order == "pre"
    kind = "causal self-attention" if tower.causal else "self-attention, both ways"
    subs = [kind, *(["cross-attention"] if tower.cross else []), "feed-forward"]
    stack = [w for s in subs for w in (("norm", s, "+") if pre else (s, "+", "norm"))]
    ends = ["norm"] * (pre and tower.final_norm)
    middle, tall = STEP * (len(stack) + 1) / 2, STEP * len(stack) + 0.1
    yield Shape(((at - 0.15, middle),), f"x {tower.layers}", (3.9, tall), FRAME)
    for i, word in enumerate(["embedding + positions", *stack, *ends, last]):
        y, colour = STEP * i, KINDS[word][0] if word in KINDS else NONE
        yield Shape(((at, y),), word, (0.44, 0.44) if word == "+" else (3.0, 0.6), colour)
        if i:
            yield Shape(((at, y - STEP + 0.3), (at, y - 0.3)))
        if word == "+":
            below = y - STEP * (1.5 + pre)
            yield Shape(((at, below), (at - 1.75, below), (at - 1.75, y), (at - 0.22, y)))
        if word == "cross-attention":
            # From the last box of the tower before it, whose layers have one sub-layer less.
            top, side = STEP * (len(stack) - 2 + len(ends)), at - APART / 2
            yield Shape(((at - APART + 1.5, top), (side, top), (side, y), (at - 1.5, y)))


def figure(models: dict[str, list[Tower]], title: str) -> Figure:
    from matplotlib.patches import Rectangle

    found, wide = shapes(models)
    high = max(y for shape in found for _, y in shape.points)
    page = sheet(0.72 * wide + 0.6, 0.72 * (high + 6))
    ax = page.axes[0]
    ax.set(xlim=(0, wide), ylim=(-4.6, high + 0.7), aspect="equal")
    ax.axis("off")
    for points, text, (w, h), colour in found:
        x, y = points[0]
        if len(points) > 1:
            ax.plot(*zip(*points[:-1]), color=page.text, linewidth=0.9)
            how = {
                "arrowstyle": "-|>",
                "color": page.text,
                "linewidth": 0.9,
                "shrinkA": 0,
                "shrinkB": 0,
            }
            ax.annotate("", points[-1], points[-2], arrowprops=how)
            continue
        if w:
            fill = page.series[colour] if colour >= 0 else page.paper
            edge = page.faint if colour == FRAME else page.text
            box = {
                "facecolor": fill,
                "edgecolor": edge,
                "linewidth": 0.9,
                "zorder": colour == FRAME and -1 or 2,
            }
            ax.add_patch(Rectangle((x - w / 2, y - h / 2), w, h, **box))
        place = (x + w / 2 - 0.1, y + h / 2 - 0.1) if colour == FRAME else (x, y)
        align = (
            {"ha": "right", "va": "top"} if colour == FRAME else {"ha": "center", "va": "center"}
        )
        ink = page.paper if colour >= 0 else page.text
        ax.text(*place, text, color=ink, fontsize=8.5, zorder=3, **align)
    page.title(title)
    return page.figure
