"""Pictures of positions: tables of vectors, RoPE's clocks, scores against distance."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from regard.learn.numbers_position import Clocks, Distances, Table
from regard.report.show import number
from regard.see.plots_style import label, sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAP = "cividis"


def position_table(table: Table, title: str = "", *, dark: bool = False) -> Figure:
    """The vectors of all positions, and how alike every two of them are."""
    page = sheet(11, 4.6, 2, dark=dark, ratios=(1.25, 1))
    far = table.vectors.abs().max().item() or 1.0
    image = page.axes[0].imshow(
        table.vectors.numpy(), MAP, aspect="auto", vmin=-far, vmax=far, interpolation="nearest"
    )
    page.dress(page.axes[0], "feature", "position", "the vector of each position")
    page.bar(image, page.axes[0], "value")
    image = page.axes[1].imshow(
        table.alike.numpy(),
        MAP,
        vmin=min(table.alike.min().item(), 0),
        vmax=1,
        interpolation="nearest",
    )
    page.dress(page.axes[1], "position", "position", "how alike two positions are")
    page.bar(image, page.axes[1], "cosine")
    page.title(title or "Position vectors")
    return page.figure


def rope_dials(clocks: Clocks, title: str = "", *, dark: bool = False) -> Figure:
    """A clock for each pair of features and each position: how far RoPE has turned the pair there, from the right,
    against the clock. The faint hand is where it stood at the position above."""
    rows, columns = clocks.angles.shape
    page = sheet(max(1.15 * columns, 4) + 1.4, 1.0 * rows + 1.5, dark=dark)
    ax, theme = page.axes[0], page.theme
    turn = [2 * math.pi * i / 48 for i in range(49)]
    for i, angles in enumerate(clocks.angles.tolist()):
        for j, angle in enumerate(angles):
            ax.plot(
                [j + 0.4 * math.cos(a) for a in turn],
                [i - 0.4 * math.sin(a) for a in turn],
                color=theme.faint,
                linewidth=1,
            )
            hands = [(clocks.angles[i - 1, j].item(), theme.faint, 1.5)] if i else []
            for a, colour, width in [*hands, (angle, theme.series[0], 2.2)]:
                tip = j + 0.4 * math.cos(a), i - 0.4 * math.sin(a)
                ax.plot([j, tip[0]], [i, tip[1]], color=colour, linewidth=width)
            ax.plot(*tip, "o", color=theme.series[0], markersize=5)
    ax.set(xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6), aspect="equal")
    page.dress(ax, "pair of features, and after how many tokens it has turned once", "position")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    page.title(title or "RoPE: every pair of features is a clock")
    names = [f"{i}\n{number(w, 3)}" for i, w in zip(clocks.pairs, clocks.wavelengths.tolist())]
    label(ax, "x", names, range(columns))
    label(ax, "y", [str(p) for p in clocks.positions], range(rows))
    return page.figure


def distance_curves(numbers: Distances, title: str = "", *, dark: bool = False) -> Figure:
    """What distance does to a score: RoPE multiplies, ALiBi takes away."""
    panels = [
        (numbers.shares, "score, as a share of that at distance 0", "RoPE, query and key alike")
    ]
    if numbers.added:
        panels.append((numbers.added, "added to the score", "ALiBi"))
    page = sheet(5.6 * len(panels) + 0.4, 4.2, len(panels), dark=dark)
    for ax, (curves, unit, name) in zip(page.axes, panels):
        ax.axhline(0, color=page.theme.faint, linewidth=0.8)
        for i, (curve, values) in enumerate(curves.items()):
            ax.plot(numbers.distances, values, label=curve, **page.line(i))
        page.dress(ax, "distance between query and key (tokens)", unit, name)
        page.grid(ax)
        page.legend(ax)
    page.title(title or "Scores against distance")
    return page.figure
