"""A topic as a picture: its tables drawn, or the Transformer as boxes and arrows.

A table says how it is drawn (`Table.draw`): "bars" of its last column of numbers, "lines" or "log"
lines of every column against the first, a "map" of its cells, "masks"; a word behind it names the
column to begin with. The Transformer is laid out from the configs of models, on a board: here
matplotlib's, in docs/ one of SVG."""

from __future__ import annotations

from itertools import zip_longest
from textwrap import fill
from typing import Any

import torch

from regard.block import Tower
from regard.config import customize
from regard.learn.explain import Table, Topic
from regard.learn.mechanisms import SETUPS
from regard.mask import Causal, Full, Mask, Span, Visible
from regard.presets import PRESETS
from regard.see.format import number
from regard.see.plots import Sheet, ink, sheet

Point = tuple[float, float]


def drawn(topic: Topic, values: dict[str, Any]) -> Any:
    """The tables of a topic that are drawn, side by side; or the Transformer in these sizes. A
    figure of matplotlib."""
    shown = [part for t in topic.compute(**values) if t.draw for part in _parts(t)]
    if shown[0].draw == "figure":
        page = sheet(14.6, 11.2)
        sketch(Board(page), setups(values))
    else:
        columns, rows = min(len(shown), 3), -(-len(shown) // 3)
        wide = max(7.0 / columns, max(1.8 + 0.6 * len(table.columns) for table in shown))
        page = sheet(wide * columns, 4.6 * rows, columns, rows)
        for ax, table in zip_longest(page.axes, shown):
            _draw(page, ax, table) if table else ax.remove()
    page.title(fill(f"{topic.name}: {topic.question}", int(9 * page.figure.get_figwidth())))
    return page.figure


def _parts(table: Table) -> list[Table]:
    """A table of masks as a map for each of them; any other as it is."""
    if table.draw != "masks":
        return [table]
    columns, found = ["query", *(str(row[0]) for row in table.rows)], []
    for at, name in enumerate(table.columns[1:], 1):
        cells = [[r[0], *(float(cell == "1") for cell in r[at].split())] for r in table.rows]
        found.append(Table(name, columns, cells, "map"))
    return found


def _draw(page: Sheet, ax: Any, table: Table) -> None:
    kind, _, column = table.draw.partition(" ")
    named = [i for i, name in enumerate(table.columns) if column and name.startswith(column)]
    # A row whose first cell is a word, where others have numbers, is a sum or a figure.
    words = all(isinstance(row[0], str) for row in table.rows)
    rows = [row for row in table.rows if words or not isinstance(row[0], str)]
    first = named[0] if named else 1
    texts = {i for row in rows for i, cell in enumerate(row) if isinstance(cell, str)}
    use = [i for i in range(first, len(table.columns)) if i not in texts]
    names = [" ".join(cell for cell in row if isinstance(cell, str) and cell) for row in rows]
    names = names if words else [f"{number(row[0])} {n}" for row, n in zip(rows, names)]
    x, y = table.columns[0], ""
    if kind == "map":
        cells = torch.tensor([[row[i] for i in use] for row in rows], dtype=torch.float64)
        share = float(cells.abs().max() <= 1)  # of 1: weights and probabilities
        image, x, y = page.image(ax, cells, share), "", table.columns[0]
        for i, j in torch.ones_like(cells).nonzero().tolist() if cells.numel() <= 144 else ():
            value = cells[i, j].item()
            how = {"color": ink(image, value) if value else page.text, "fontsize": 8}
            ax.text(j, i, number(value, 2), ha="center", va="center", **how)
        turn = 90 * (len(use) > 6)
        ax.set_xticks(range(len(use)), [table.columns[i] for i in use], rotation=turn)
        ax.set_yticks(range(len(rows)), names)
    elif kind == "bars":
        at = first if named else use[-1]
        y = table.columns[at]
        ax.bar(range(len(rows)), [row[at] for row in rows], color=page.series[0])
        ax.set_xticks(range(len(rows)), names)
    else:
        for colour, mark, at in zip(page.series * 2, "osD^vPosD^vP", use):
            how = {"color": colour, "marker": mark, "markersize": 4, "label": table.columns[at]}
            ax.plot(*zip(*sorted((row[0], row[at]) for row in rows)), **how)
        ax.legend(frameon=False, labelcolor=page.text, fontsize=9)
        if kind == "log":
            ax.set(xscale="log", yscale="log")
    page.dress(ax, x, y, table.title)


# --- the Transformer --------------------------------------------------------------------------------

PLAIN, FRAME, STEP, APART = -1, -2, 0.93, 4.9
# The three kinds of attention: the number of a colour, which keys are seen, and whose.
KINDS: dict[str, tuple[int, Mask, str]] = {
    "self-attention, both ways": (2, Full(), "all of its own text"),
    "causal self-attention": (0, Causal(), "its own text up to itself"),
    "cross-attention": (1, Full(), "all of the source"),
}


class Board:
    """Boxes and arrows by matplotlib."""

    def __init__(self, page: Sheet):
        self.page = page
        self.ax: Any = page.axes[0]

    def box(self, at: Point, size: Point, text: str, colour: int) -> None:
        from matplotlib.patches import Rectangle

        page, (x, y), (w, h), frame = self.page, at, size, colour == FRAME
        face = page.series[colour] if colour >= 0 else page.paper
        look: Any = {"facecolor": face, "linewidth": 0.9, "zorder": 0 if frame else 2}
        look["edgecolor"] = page.faint if frame else page.text
        self.ax.add_patch(Rectangle((x - w / 2, y - h / 2), w, h, **look, visible=w > 0))
        how = {"va": "center", "ha": "right" if frame else "center", "fontsize": 8.5, "zorder": 3}
        shade = page.paper if colour >= 0 else page.text
        self.ax.text(x + (w / 2 - 0.1) * frame, y, text, color=shade, **how)

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
    here, left = Span.run(0, 5), 1.8
    for kind in used:
        colour, mask, seen = KINDS[kind]
        for row, key in Visible(mask, here, here).tensor()[0, 0].nonzero().tolist():
            board.box((left + 0.3 * key, -1.9 - 0.3 * row), (0.26, 0.26), "", colour)
        board.box((left + 0.6, -3.75), (0, 0), f"{kind}:", PLAIN)
        board.box((left + 0.6, -4.1), (0, 0), seen, PLAIN)
        left += (at - 2.4) / len(used)
    board.end(at - 2.4, -4.5, high)


def _column(board: Any, tower: Tower, at: float, last: str) -> list[str]:
    pre = tower.order == "pre"
    kind = "causal self-attention" if tower.causal else "self-attention, both ways"
    subs = [kind, *(["cross-attention"] if tower.cross else []), "feed-forward"]
    stack = [w for s in subs for w in (("norm", s, "+") if pre else (s, "+", "norm"))]
    words = ["embedding + positions", *stack, *["norm"] * (pre and tower.final_norm), last]
    middle = at + 0.1, STEP * (len(stack) + 1) / 2
    board.box(middle, (4.3, STEP * len(stack) + 0.1), f"x {tower.layers}", FRAME)
    half = [0.22 if word == "+" else 0.3 for word in words]
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
