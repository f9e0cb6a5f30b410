"""Pictures of attention: all heads, one head, an alignment with links, what a sparse selection keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.see.numbers_maps import Maps, Selection, layered, links, pooled, single
from regard.see.plots_style import Sheet, check_tokens, label, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAP = "viridis"
NUMBERS = 12  # rows and keys up to which each weight is written out
PEAKS = 64  # and up to which each row's largest is marked
GAP = 0.08  # between the tiles of a grid


def head_grid(
    maps: Maps, title: str = "", *, names: Sequence[str] | None = None, dark: bool = False
) -> Figure:
    """Every head as a tile, a row of tiles for each layer (`names`: what they are called). Queries go down and keys
    across in a tile; a weight of exactly 0, such as of a later token, stays empty."""
    layers = layered(maps)
    rows, columns = len(layers), max(len(layer) for layer in layers)
    side = min(1.1, 11 / columns, 9 / rows)
    page = sheet(max(side * columns, 2.5) + 1.9, max(side * rows, 1.2) + 1.2, dark=dark)
    ax, most = page.axes[0], max(layer.max().item() for layer in layers)
    for i, layer in enumerate(layers):
        for j, tile in enumerate(pooled(layer)):
            place = (j + GAP / 2, j + 1 - GAP / 2, i + 1 - GAP / 2, i + GAP / 2)
            image = _image(ax, tile, page, most, place)
            _frame(ax, place, page)
    ax.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal")
    page.dress(ax, "head   (in each tile: keys across)", "layer   (queries down)")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    page.bar(image, ax, "attention weight (root scale)")
    page.title(title or f"Attention of {rows} layers, {columns} heads")
    label(ax, "x", check_tokens(None, columns, "heads"), [j + 0.5 for j in range(columns)])
    label(ax, "y", check_tokens(names, rows, "layers"), [i + 0.5 for i in range(rows)])
    return page.figure


def _frame(ax: Axes, place: tuple[float, float, float, float], page: Sheet) -> None:
    left, right, bottom, top = place
    xs, ys = [left, right, right, left, left], [bottom, bottom, top, top, bottom]
    ax.plot(xs, ys, color=page.theme.faint, linewidth=0.8)


def _image(
    ax: Axes,
    weights: Tensor,
    page: Sheet,
    most: float | None = None,
    place: tuple[float, float, float, float] | None = None,
) -> Any:
    """Weights in colours on a root scale, so that small ones show; zeros stay paper."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import PowerNorm

    cells = np.ma.masked_equal(weights.numpy(), 0.0)
    colours = colormaps[MAP].with_extremes(bad=page.theme.paper)
    scale = PowerNorm(0.5, 0.0, (most if most is not None else weights.max().item()) or 1.0)
    return ax.imshow(cells, colours, scale, extent=place, interpolation="nearest", aspect="equal")


# --- one head -----------------------------------------------------------------------------------------------------


def one_head(
    weights: Tensor,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str = "",
    *,
    dark: bool = False,
) -> Figure:
    """One head's weights (rows keys) with its tokens. Small maps have their numbers written in, larger ones a ring at
    the largest weight of each row."""
    weights = single(weights)
    rows, columns = weights.shape
    side = 0.52 if max(rows, columns) <= NUMBERS else min(0.3, 9 / max(rows, columns))
    page = sheet(max(side * columns, 2) + 2.6, max(side * rows, 1.5) + 1.9, dark=dark)
    _head(page, page.axes[0], weights, queries, keys)
    page.title(title or "Attention of one head")
    return page.figure


def _head(
    page: Sheet,
    ax: Axes,
    weights: Tensor,
    queries: Sequence[str] | None,
    keys: Sequence[str] | None,
    names: tuple[str, str] = ("key: the token that is read", "query: the token that reads"),
) -> None:
    rows, columns = weights.shape
    image = _image(ax, weights, page)
    page.dress(ax, *names)
    ax.xaxis.set_label_position("top")
    ax.xaxis.tick_top()
    ax.xaxis.labelpad = 10
    page.bar(image, ax, "attention weight (root scale)")
    if max(rows, columns) <= NUMBERS:
        _write(ax, weights, image)
    elif max(rows, columns) <= PEAKS:
        some = [i for i in range(rows) if weights[i].max() > 0]
        best = [weights[i].argmax().item() for i in some]
        ink = [_ink(image, weights[i].max().item()) for i in some]
        ax.scatter(best, some, 20, facecolors="none", edgecolors=ink, linewidths=1.2)
    sides = {
        "y": (check_tokens(queries, rows, "queries"), range(rows)),
        "x": (check_tokens(keys, columns, "keys"), range(columns)),
    }
    for side in "yxy":  # each takes room from the other
        label(ax, side, *sides[side])


def _write(ax: Axes, weights: Tensor, image: Any) -> None:
    """Each weight in its cell."""
    for (i, j), weight in _cells(weights):
        if weight:
            text = f"{weight:.2f}".lstrip("0") if weight < 0.995 else "1"
            ax.text(j, i, text, ha="center", va="center", color=_ink(image, weight), fontsize=8)


def _ink(image: Any, weight: float) -> str:
    """What can be read on a weight's colour: black on light ones, white on dark ones."""
    red, green, blue, _ = image.cmap(image.norm(weight))
    return "#000000" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "#ffffff"


def _cells(weights: Tensor) -> list[tuple[tuple[int, int], float]]:
    return [((i, j), w) for i, row in enumerate(weights.tolist()) for j, w in enumerate(row)]


# --- source and target --------------------------------------------------------------------------------------------


def alignment(
    weights: Tensor,
    source: Sequence[str] | None = None,
    target: Sequence[str] | None = None,
    title: str = "",
    *,
    least: float = 0.2,
    dark: bool = False,
) -> Figure:
    """Cross-attention (targets sources) as a map, and as links: each target's strongest source drawn through, others of
    at least `least` dashed; the thicker a link, the more weight."""
    weights = single(weights)
    rows, columns = weights.shape
    high = min(max(0.34 * max(rows, columns), 2.6), 11)
    page = sheet(2 * high * 0.75 + 5.2, high + 1.4, 2, dark=dark, ratios=(1.5, 1))
    ax, right = page.axes[1], page.axes[1].twinx()
    sources = [(i + 0.5) / columns for i in range(columns)]
    targets = [(i + 0.5) / rows for i in range(rows)]
    for link in links(weights, least):
        ax.plot(
            [0, 1],
            [sources[link.source], targets[link.target]],
            color=page.theme.series[0 if link.best else 1],
            linestyle="-" if link.best else "--",
            linewidth=0.6 + 3.4 * link.weight,
            alpha=0.9,
            solid_capstyle="round",
        )
    page.dress(
        ax, f"solid: the largest weight of a target\ndashed: others of {least:g} and more", "source"
    )
    page.dress(right, "", "target")
    for each in (ax, right):
        each.set(xlim=(-0.02, 1.02), ylim=(1, 0), xticks=[])
        each.spines[["top", "bottom"]].set_visible(False)
    label(ax, "y", check_tokens(source, columns, "sources"), sources)
    label(right, "y", check_tokens(target, rows, "targets"), targets)
    _head(page, page.axes[0], weights, target, source, ("source", "target"))
    page.title(title or "What each target word looks at")
    return page.figure


# --- sparse selection ---------------------------------------------------------------------------------------------


def selection_strip(
    numbers: Selection, tokens: Sequence[str] | None = None, title: str = "", *, dark: bool = False
) -> Figure:
    """One query's index scores and dense weights over its keys; the chosen are lit and carry a dot, hidden keys have a
    cross."""
    count = len(numbers.scores)
    page = sheet(min(max(0.27 * count, 7), 13), 5.2, rows=2, dark=dark)
    seen = numbers.scores.isfinite()
    width = max(0.8, min(14.0, 0.62 * 72 * (page.figure.get_figwidth() - 1) / count))
    for ax, values in zip(page.axes, (numbers.scores, numbers.weights)):
        for lit in (False, True):
            at = (seen & (numbers.chosen == lit)).nonzero().flatten()
            colour = page.theme.series[0] if lit else page.theme.faint
            ax.vlines(at, 0, values[at], colors=colour, linewidth=width, capstyle="butt")
            if lit:
                ax.plot(
                    at, values[at], "o", color=page.theme.text, markersize=min(4.5, width + 1.5)
                )
        hidden = (~seen).nonzero().flatten()
        ax.plot(hidden, hidden * 0, "x", color=page.theme.text, markersize=min(5, width + 1.5))
        ax.axhline(0, color=page.theme.faint, linewidth=0.8)
        ax.set_xlim(-0.7, count - 0.3)
        page.grid(ax, "y")
    page.dress(page.axes[0], "", "index score", "the indexer's scores (dot: chosen, cross: hidden)")
    page.dress(page.axes[1], "key", "dense weight", "what dense attention gives the same keys")
    page.axes[0].tick_params(labelbottom=False)
    kept = (
        f"reads {numbers.read} of {numbers.visible} keys, keeps {numbers.kept:.1%} of the attention"
    )
    page.title(f"{title}: {kept}" if title else f"Sparse selection {kept}")
    label(page.axes[1], "x", check_tokens(tokens, count, "keys"), range(count))
    return page.figure
