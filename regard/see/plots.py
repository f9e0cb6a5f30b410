"""Pictures of what a model attends to, as matplotlib figures: `save(head_grid(maps), "heads.png")`.

All heads, one head, or an alignment with links, in light or (`dark=True`) dark colours. Figures are
made without pyplot, so that no display is needed and nothing global changes; matplotlib is imported
when the first one is drawn."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import ENVIRONMENT, Fault, UsageError, notice
from regard.see.format import clip, visible
from regard.see.look import Full, Panel, telling
from regard.see.page import PAPER, SANS, SERIES, contrast, light, table
from regard.see.probe import thumbnail

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A picture for light or for dark pages: drawing(dark=True).
Drawing = Callable[..., "Figure"]
# (layers heads rows keys), or a layer each: (heads rows keys); tokens, or numbers instead.
Maps = Tensor | Sequence[Tensor]
Names = Sequence[str] | None
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Arabic", "Noto Sans")
FORMATS = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
# Columns of a token's label, labels of an axis, cells of a tile, and the gap between tiles.
LONGEST, LABELS, TILE, GAP = 14, 80, 96, 0.08
# How curves and their points differ, beside their colours.
DASHES: tuple[Any, ...] = (
    *("-", (0, (5, 2)), (0, (1, 1.5))),
    *((0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 3))),
)
MARKS = "osD^vP"
# Sizes of letters in points: of axes, of the names of panels, of a token beside a tile.
AXES, NAME, SMALL = 10, 11, 7
# Rows and keys up to which each weight is written out, and each row's largest is marked.
NUMBERS, PEAKS = 12, 64


def pictures(path: Path, panel: Panel, what: str) -> list[Path]:
    """All heads, or those of the layer that was asked for, or one head with its numbers; where
    there is cross-attention, beside it the alignment by the layer that tells most."""
    view = max(panel.views, key=lambda view: view.name == "cross")
    at, which, *_ = telling(view, panel.layer, panel.head)
    layer = view.layers[at]
    title = f"{panel.name}, {view.title.lower()}, layer {layer.number}"
    # Where a cell is a token, no head is pooled; of a long text the asked head alone is in full.
    exact = (each for each in layer.heads if view.step == (1, 1) or isinstance(each, Full))
    full = [torch.from_numpy(each.cells) for each in exact]
    single = full[min(which, len(full) - 1)] if full else None
    if single is None and (panel.head is not None or view.name == "cross"):
        notice("the text is too long for pictures of single heads")
    if panel.head is not None and single is not None:
        names = (view.rows, view.columns, f"{title}, head {which}")
        paths = [save(partial(one_head, single, *names), path)]
    else:
        paths = [save(partial(_grid, panel, f"{panel.name}: “{what}”"), path)]
    if view.name == "cross" and single is not None:
        of = f"head {which}"
        if panel.head is None and len(full) == len(layer.heads):
            single = torch.stack(full).mean(0)
            of = f"mean of {len(full)} heads"
        drawn = partial(alignment, single, view.columns, view.rows, f"{title}, {of}")
        paths.append(save(drawn, path.with_name(f"{path.stem}-alignment{path.suffix}")))
    return paths


def _grid(panel: Panel, title: str, dark: bool = False) -> Figure:
    """The heads of every view, or of the layer that was asked for."""
    maps = []
    names = []
    tokens = []
    for view in panel.views:
        whole = view.step == (1, 1)
        for layer in view.layers:
            if panel.layer in (None, layer.number):
                maps.append(torch.stack([view.small(head) for head in layer.heads]))
                number = str(layer.number)
                names.append(f"{view.name} {number}" if panel.views[1:] else number)
                tokens.append((view.rows, view.columns) if whole else (None, None))
    return head_grid(maps, title, names=names, tokens=tokens, dark=dark)


class Link(NamedTuple):
    """Target word `target` reads source word `source` with so much weight; `best`: no other with
    more."""

    source: int
    target: int
    weight: float
    best: bool


def links(a: Tensor, least: float | None = None) -> list[Link]:
    """Which source belongs to which target, (t s): the one that each target weighs most, the first
    of equals, and all that weigh at least `least`."""
    if least is not None and not 0 < least <= 1:
        raise UsageError(f"least={least} must be a weight above 0 and at most 1; such as 0.2")
    best = torch.zeros_like(a, dtype=torch.bool).scatter(1, a.argmax(1, keepdim=True), True)
    best &= a > 0
    strong = best if least is None else best | (a >= least)
    return [Link(s, t, float(a[t, s]), bool(best[t, s])) for t, s in strong.nonzero().tolist()]


# --- attention ----------------------------------------------------------------------------------


def head_grid(
    maps: Maps,
    title: str = "",
    *,
    names: Names = None,
    tokens: Sequence[tuple[Names, Names]] = (),
    dark: bool = False,
) -> Figure:
    """Every head as a tile, a row of tiles for each layer (`names`: what they are called; `tokens`:
    the queries and keys of each). Queries go down and keys across in a tile; a weight of exactly 0,
    such as of a later token, is grey."""
    layers = [_checked(layer, 3) for layer in maps]
    if not layers:
        raise UsageError("there are no maps to draw; ask the probe for at least one layer")
    columns = max(map(len, layers))
    tokens = tokens or [(None, None)] * len(layers)
    texts = [shown(token) for pair in tokens for side in pair for token in side or ()]
    side = min(2.2 if texts else 1.1, 11 / columns, 9 / len(layers))
    # What the longest token takes, in tiles; keys stand below the last row of tiles that has them.
    room = max(map(len, texts), default=0) * SMALL * 0.65 / 72 / side
    below = [*(pair[1] for pair in tokens[1:]), None]
    last = [i for i, pair in enumerate(tokens) if pair[1] and pair[1] != below[i]]
    tops = [i + room * sum(at < i for at in last) for i in range(len(layers))]
    rows = len(layers) + room * len(last)
    width = max(side * (columns + room), 2.5) + 1.9
    height = max(side * rows, 1.2) + 1.2
    page = sheet(width, height, dark=dark)
    ax = page.axes[0]
    most = max(layer.max().item() for layer in layers)
    for i, layer in enumerate(layers):
        top, bottom = tops[i] + GAP / 2, tops[i] + 1 - GAP / 2
        for j, tile in enumerate(thumbnail(TILE)(layer)):
            left, right = j + GAP / 2, j + 1 - GAP / 2
            image = page.image(ax, tile, most, (left, right, bottom, top))
            corners = [left, right, right, left, left], [bottom, bottom, top, top, bottom]
            ax.plot(*corners, color=page.faint, linewidth=0.8)
            if i in last:
                page.tokens(ax, tokens[i][1] or (), (left, bottom), side, down=False)
        page.tokens(ax, tokens[i][0] or (), (GAP / 2, top), side, down=True)
    ax.set(xlim=(-room, columns), ylim=(rows, 0), aspect="equal")
    page.dress(ax, "head   (in each tile: keys across)", "layer   (queries down)")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    page.bar(image, ax, "attention weight (root scale)")
    page.title(title or f"Attention of {len(layers)} layers, {columns} heads")
    label(ax, "x", token_labels(None, columns, "heads"), [j + 0.5 for j in range(columns)])
    label(ax, "y", token_labels(names, len(layers), "layers"), [top + 0.5 for top in tops])
    return page.figure


def one_head(
    weights: Tensor, queries: Names = None, keys: Names = None, title: str = "", dark: bool = False
) -> Figure:
    """One head's weights (rows keys) with its tokens. Small maps have their numbers written in,
    larger ones a ring at the largest weight of each row."""
    weights = _checked(weights, 2)
    rows, columns = weights.shape
    side = 0.52 if max(rows, columns) <= NUMBERS else min(0.3, 9 / max(rows, columns))
    page = sheet(max(side * columns, 2) + 2.7, max(side * rows, 1.5) + 2.1, dark=dark)
    names = ("key: the token that is read", "query: the token that reads")
    _head(page, weights, (queries, keys), names)
    page.title(title or "Attention of one head")
    return page.figure


def alignment(
    weights: Tensor,
    source: Names = None,
    target: Names = None,
    title: str = "",
    *,
    least: float = 0.2,
    dark: bool = False,
) -> Figure:
    """Cross-attention (targets sources) as a map, and as links: each target's strongest source
    drawn through, others of at least `least` dashed; the thicker a link, the more weight."""
    weights = _checked(weights, 2)
    rows, columns = weights.shape
    high = min(max(0.34 * max(rows, columns), 2.6), 11)
    page = sheet(2 * high * 0.75 + 5.2, high + 1.4, 2, dark=dark, ratios=(1.5, 1))
    ax = page.axes[1]
    right = ax.twinx()
    sources = [(i + 0.5) / columns for i in range(columns)]
    targets = [(i + 0.5) / rows for i in range(rows)]
    for link in links(weights, least):
        ax.plot(
            [0, 1],
            [sources[link.source], targets[link.target]],
            color=page.series[0 if link.best else 1],
            linestyle="-" if link.best else "--",
            linewidth=0.6 + 3.4 * link.weight,
            alpha=0.9,
            solid_capstyle="round",
        )
    legend = f"solid: the largest weight of a target\ndashed: others of {least:g} and more"
    page.dress(ax, legend, "source")
    page.dress(right, "", "target")
    for each in (ax, right):
        each.set(xlim=(-0.02, 1.02), ylim=(1, 0), xticks=[])
        each.spines[["top", "bottom"]].set_visible(False)
    label(ax, "y", token_labels(source, columns, "sources"), sources)
    label(right, "y", token_labels(target, rows, "targets"), targets)
    _head(page, weights, (target, source), ("source", "target"))
    page.title(title or "What each target word looks at")
    return page.figure


def _head(page: Sheet, weights: Tensor, tokens: Sequence[Names], names: tuple[str, str]) -> None:
    """A map in the first panel, with its queries and keys."""
    ax = page.axes[0]
    rows, columns = weights.shape
    image = page.image(ax, weights)
    page.dress(ax, *names)
    ax.xaxis.set_label_position("top")
    ax.xaxis.tick_top()
    ax.xaxis.labelpad = 10
    page.bar(image, ax, "attention weight (root scale)")
    if max(rows, columns) <= NUMBERS:
        for i, j in weights.nonzero().tolist():
            weight = weights[i, j].item()
            text = f"{weight:.2f}".lstrip("0") if weight < 0.995 else "1"
            ax.text(j, i, text, ha="center", va="center", color=ink(image, weight), fontsize=8)
    elif max(rows, columns) <= PEAKS:
        peaks = [link for link in links(weights) if link.best]
        at = [link.source for link in peaks], [link.target for link in peaks]
        inks = [ink(image, link.weight) for link in peaks]
        ax.scatter(*at, 20, facecolors="none", edgecolors=inks, linewidths=1.2)
    sides = {
        "y": (token_labels(tokens[0], rows, "queries"), range(rows)),
        "x": (token_labels(tokens[1], columns, "keys"), range(columns)),
    }
    # Each takes room from the other.
    for side in "yxy":
        label(ax, side, *sides[side])


def ink(image: Any, weight: float) -> str:
    """What can be read on a weight's colour, black or white: the one with more contrast."""
    back = light(image.cmap(image.norm(weight))[:3])
    return "#000000" if contrast(back, 0.0) > contrast(back, 1.0) else "#ffffff"


def _checked(weights: Tensor, axes: int) -> Tensor:
    """A layer's heads (heads rows keys) or one head (rows keys), in float64 on the CPU. A batch
    axis of size 1 in front of a layer, as a probe gives it, is taken off."""
    weights = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    if axes == 3 and weights.dim() == 4:
        if len(weights) > 1:
            raise UsageError(f"maps of a batch of {len(weights)}; choose one row, such as maps[0]")
        weights = weights[0]
    if weights.dim() != axes or not weights.numel():
        wanted = "a layer's map is (heads, rows, keys)"
        if axes == 2:
            wanted = "choose a layer and a head, or average the heads: a map is (rows, keys)"
        raise UsageError(f"{wanted}, none of them 0; got the shape {tuple(weights.shape)}")
    return weights


# --- sheets -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sheet:
    """A figure, its axes row by row, and its colours: the paper, text, axes, what stays behind, the
    series one by one."""

    figure: Figure
    axes: list[Axes]
    dark: bool
    paper: str
    text: str
    soft: str
    faint: str
    series: tuple[str, ...]

    def dress(self, ax: Axes, x: str, y: str, title: str = "") -> None:
        """Names of the axes and all colours of a panel."""
        ax.set_facecolor(self.paper)
        ax.set_xlabel(x, color=self.text)
        ax.set_ylabel(y, color=self.text)
        if title:
            ax.set_title(title, color=self.text, fontsize=NAME)
        ax.tick_params(which="both", colors=self.text, labelsize=AXES)
        ax.spines[:].set_color(self.soft)

    def image(self, ax: Axes, weights: Tensor, most: float = 0.0, place: Any = None) -> Any:
        """A map in the colours of every map, those with a sign where it has numbers below 0;
        `place`: left, right, bottom, top."""
        from matplotlib.colors import ListedColormap, Normalize, PowerNorm

        scheme = "dark" if self.dark else "light"
        most = most or weights.abs().max().item() or 1.0
        how = {"extent": place, "interpolation": "nearest", "aspect": "equal"}
        if bool((weights < 0).any()):
            colours = ListedColormap(table(scheme, True)[1:] / 255)
            return ax.imshow(weights.numpy(), colours, Normalize(-most, most), **how)
        masked, *ramp = table(scheme) / 255
        ramps = ListedColormap(ramp).with_extremes(bad=tuple(masked))
        cells = np.ma.masked_equal(weights.numpy(), 0.0)
        return ax.imshow(cells, ramps, PowerNorm(0.5, 0.0, most), **how)

    def tokens(
        self, ax: Axes, tokens: Sequence[str], at: tuple[float, float], side: float, down: bool
    ) -> None:
        """The tokens of a tile whose left upper (`down`) or left lower corner is there, beside or
        below it; as many as have room where a tile is `side` inches wide."""
        each = (1 - GAP) / max(len(tokens), 1)
        step = math.ceil(1.2 * SMALL / 72 / (each * side))
        turned = {"ha": "center", "va": "top", "rotation": 90}
        how: dict[str, Any] = {"ha": "right", "va": "center"} if down else turned
        how |= {"fontsize": SMALL, "color": self.text, "parse_math": False}
        for i in range(0, len(tokens), step):
            x, y = (0.0, (i + 0.5) * each) if down else ((i + 0.5) * each, GAP / 4)
            ax.text(at[0] + x, at[1] + y, shown(tokens[i]), fontfamily=list(_fonts()[0]), **how)

    def bar(self, image: Any, ax: Axes, label: str) -> None:
        """The scale of a heat map's colours, as high as the map."""
        inches = ax.get_window_extent().width / self.figure.dpi
        place = ax.inset_axes((1 + 0.1 / inches, 0, 0.16 / inches, 1))
        bar = self.figure.colorbar(image, cax=place)
        bar.set_label(label, color=self.text)
        bar.ax.tick_params(colors=self.text, labelsize=AXES)
        bar.outline.set_edgecolor(self.soft)

    def title(self, text: str) -> None:
        self.figure.suptitle(text, color=self.text, fontsize=NAME + 1, parse_math=False)


def sheet(
    width: float,
    height: float,
    columns: int = 1,
    rows: int = 1,
    *,
    dark: bool = False,
    ratios: Sequence[float] | None = None,
    heights: Sequence[float] | None = None,
) -> Sheet:
    """An empty figure of so many inches. `ratios`: the widths of its columns, `heights`: of its rows."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise Fault("pictures need matplotlib; pip install 'regard[plots]'", ENVIRONMENT) from error
    scheme = "dark" if dark else "light"
    paper = PAPER[scheme]
    figure = Figure((width, height), dpi=130, facecolor=paper["back"])
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.06)
    FigureCanvasAgg(figure)
    sizes: dict[str, Any] = {"width_ratios": ratios, "height_ratios": heights}
    axes = figure.subplots(rows, columns, squeeze=False, **sizes)
    colours = (paper["back"], paper["ink"], paper["soft"], paper["line"])
    return Sheet(figure, list(axes.flat), dark, *colours, SERIES[scheme])


def save(figure: Figure | Drawing, path: str | Path) -> Path:
    """Write the picture as .png, .svg or .pdf; the file is whole or not there. Of a function that
    draws it (`dark`: for dark pages) an .svg has both forms, and shows that of the reader's scheme."""
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise UsageError(f"{path}: a picture's name ends in {', '.join(FORMATS)}; such as map.png")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}; make it, or name another")
    made = figure(dark=False) if callable(figure) else figure
    data = _written(made, kind)
    if kind == ".svg":
        forms = [data, _written(figure(dark=True), kind)] if callable(figure) else [data]
        data = _responsive([form.decode() for form in forms], made.get_suptitle()).encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{path} cannot be written: {why}; name another file") from error
    return path


def _written(figure: Figure, kind: str) -> bytes:
    """Letters of an .svg stay letters, and its names are the same in every run."""
    from matplotlib import rc_context

    data = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "regard"}):
        paper = figure.get_facecolor()
        figure.savefig(data, format=kind[1:], facecolor=paper, metadata=FORMATS[kind])
    return data.getvalue()


def _responsive(forms: Sequence[str], title: str) -> str:
    """The same picture for light pages and perhaps for dark ones as one that is never wider than its
    place and has the fonts of every page."""
    (size,) = re.findall(r'<svg [^>]*?(width="[^"]+" height="[^"]+" viewBox="[^"]+")', forms[0])
    groups = []
    for scheme, form in zip(("light", "dark"), forms):
        drawn = form[form.index("<g id=") : form.rindex("</svg>")]
        # Letters keep their size and leave their fonts to the whole; old releases write both in one.
        drawn = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", drawn)
        drawn = re.sub(r" ?font-family: [^;\"]+;?", "", drawn)
        drawn = re.sub(r'( id="|url\(#|href="#)', rf"\1{scheme}-", drawn)
        groups.append(f'<g class="{scheme}">\n{drawn}</g>')
    sheet = "* { stroke-linejoin: round; stroke-linecap: butt } .dark { display: none }"
    if forms[1:]:
        swap = ".light { display: none } .dark { display: inline }"
        sheet += f" @media (prefers-color-scheme: dark) {{ {swap} }}"
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    name = html.escape(" ".join(title.split()))
    return f"""<?xml version="1.0" encoding="utf-8"?>
<svg {spaces} {size} role="img" font-family="{SANS}" style="max-width:100%;height:auto">
<title>{name}</title><style>{sheet}</style>
{"".join(groups)}</svg>
"""


# --- tokens -------------------------------------------------------------------------------------


@cache
def _fonts() -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Installed fonts, the first that has a letter draws it: names, and the files."""
    from matplotlib import font_manager

    known = {font.name for font in font_manager.fontManager.ttflist}
    names = tuple(name for name in FONTS if name in known)
    return names, tuple(
        font_manager.get_font(font_manager.findfont(font_manager.FontProperties(family=name)))
        for name in names
    )


def shown(token: str) -> str:
    """A token as a label: spaces around it as ␣, line ends and tabs as arrows, short; letters that
    no font here has as □."""
    token = token.translate({10: "↵", 13: "↵", 9: "⇥"})
    bare = token.strip(" ")
    before, after = token.split(bare, 1) if bare else (token, "")
    text = "␣" * len(before) + bare + "␣" * len(after) or "∅"
    fonts = _fonts()[1]
    letters = [c if any(f.get_char_index(ord(c)) for f in fonts) else "□" for c in visible(text)]
    return clip("".join(letters), LONGEST)


def token_labels(tokens: Names, count: int, what: str) -> list[str]:
    """Labels of all tokens; numbers where there are none."""
    if tokens is None:
        return [str(i) for i in range(count)]
    if len(tokens) != count:
        raise UsageError(f"{len(tokens)} tokens were given for {count} {what}; give one for each")
    return [shown(token) for token in tokens]


def label(ax: Axes, which: str, labels: Sequence[str], places: Sequence[float]) -> None:
    """Ticks that can be read: upright if all fit, else (below or above) turned by 90 degrees, else
    every second, ..."""
    step = -(-len(labels) // LABELS)
    turns = (0, 90) if which == "x" else (0,)
    put = ax.set_xticks if which == "x" else ax.set_yticks
    how: dict[str, Any] = {"parse_math": False, "fontfamily": list(_fonts()[0])}
    while True:
        for turn in turns:
            put(places[::step], labels[::step], rotation=turn, **how)
            if step >= len(labels) or not _crowded(ax, which):
                return
        step *= 2
        turns = turns[-1:]


def _crowded(ax: Axes, which: str) -> bool:
    """Whether labels of the axis touch one another as the figure stands."""
    figure = ax.get_figure(root=True)
    layout = figure.get_layout_engine() if figure else None
    assert figure is not None and layout is not None
    # Places panels and labels without drawing them.
    layout.execute(figure)
    ax.apply_aspect()
    side = 0 if which == "x" else 1
    axis = ax.xaxis if which == "x" else ax.yaxis
    boxes = [text.get_window_extent() for text in axis.get_ticklabels() if text.get_text()]
    spans = sorted((box.min[side], box.max[side]) for box in boxes)
    return any(b[0] < a[1] + (3 if which == "x" else 0) for a, b in pairwise(spans))
