"""What all pictures share: sheets in light and dark, labelled axes, tokens that do not overlap, saving.

Figures are made without pyplot, so that no display is needed and nothing global changes. matplotlib is imported when
the first picture is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regard.errors import UsageError
from regard.report.show import clip, visible
from regard.report.svg import DARK, LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
MARKS = "osD^vP"
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Arabic", "Noto Sans")
LONGEST = 14  # columns of a token
MOST = 80  # tokens that get a label
FORMATS = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


class PlotsError(UsageError):
    """matplotlib is missing."""

    code = 3


@dataclass(frozen=True)
class Theme:
    """Colours of a sheet: the paper, text, what stays behind, and the series one by one."""

    paper: str
    text: str
    faint: str
    series: tuple[str, ...]


PAGES = {
    False: Theme("#ffffff", "#1a1a1a", "#c4c9d0", LIGHT),
    True: Theme("#14171c", "#e8eaed", "#4a525d", DARK),
}


@dataclass(frozen=True)
class Sheet:
    """A figure, its axes row by row, and its colours."""

    figure: Figure
    axes: list[Axes]
    theme: Theme

    def line(self, i: int) -> dict[str, Any]:
        """How curve i looks: colour, dashes and marks all differ."""
        at = i % len(self.theme.series)
        dashes = LINES[i % len(LINES)]
        return {"color": self.theme.series[at], "linestyle": dashes, "linewidth": 1.8}

    def dress(self, ax: Axes, x: str, y: str, title: str = "") -> None:
        """Names of the axes and all colours of a panel."""
        theme = self.theme
        ax.set_facecolor(theme.paper)
        ax.set_xlabel(x, color=theme.text)
        ax.set_ylabel(y, color=theme.text)
        if title:
            ax.set_title(title, color=theme.text, fontsize=11)
        ax.tick_params(which="both", colors=theme.text, labelsize=9)
        for spine in ax.spines.values():
            spine.set_color(theme.faint)

    def grid(self, ax: Axes, which: Literal["both", "x", "y"] = "both") -> None:
        ax.grid(axis=which, color=self.theme.faint, linewidth=0.5, alpha=0.6)
        ax.set_axisbelow(True)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)

    def legend(self, ax: Axes, where: Any = "best", **how: Any) -> None:
        ax.legend(
            loc=where, frameon=False, labelcolor=self.theme.text, fontsize=9, handlelength=3, **how
        )

    def bar(self, image: Any, ax: Axes, label: str) -> None:
        """The scale of a heat map's colours, as high as the map."""
        inches = ax.get_window_extent().width / self.figure.dpi
        place = ax.inset_axes((1 + 0.1 / inches, 0, 0.16 / inches, 1))
        bar = self.figure.colorbar(image, cax=place)
        bar.set_label(label, color=self.theme.text)
        bar.ax.tick_params(colors=self.theme.text, labelsize=9)
        bar.outline.set_edgecolor(self.theme.faint)

    def title(self, text: str) -> None:
        self.figure.suptitle(text, color=self.theme.text, fontsize=12, parse_math=False)


def sheet(
    width: float,
    height: float,
    columns: int = 1,
    rows: int = 1,
    *,
    dark: bool = False,
    ratios: Sequence[float] | None = None,
) -> Sheet:
    """An empty figure of so many inches. `ratios`: the widths of its columns."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PlotsError("pictures need matplotlib; pip install 'regard[plots]'") from error
    theme = PAGES[dark]
    figure = Figure((width, height), dpi=130, facecolor=theme.paper)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.06)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, width_ratios=ratios)
    return Sheet(figure, list(axes.flat), theme)


def save(figure: Figure, path: str | Path) -> Path:
    """Write the picture as .png, .svg or .pdf; the file is whole or not there."""
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise UsageError(f"{path}: a picture's name ends in {', '.join(FORMATS)}; such as map.png")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind[1:], facecolor=figure.get_facecolor(), metadata=FORMATS[kind])
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}; make it, or name another")
    try:
        path.write_bytes(drawn.getvalue())
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{path} cannot be written: {why}; name another file") from error
    return path


# --- tokens -------------------------------------------------------------------------------------------------------


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
    """A token as a label: without spaces around it, line ends and tabs as arrows, short; letters that no font here
    has as □."""
    token = token.translate({10: "↵", 13: "↵", 9: "⇥"})
    text = token.strip(" ") or "␣" * len(token) or "∅"
    fonts = _fonts()[1]
    letters = [c if any(f.get_char_index(ord(c)) for f in fonts) else "□" for c in visible(text)]
    return clip("".join(letters), LONGEST)


def check_tokens(tokens: Sequence[str] | None, count: int, what: str) -> list[str]:
    """Labels of all tokens; numbers where there are none."""
    if tokens is None:
        return [str(i) for i in range(count)]
    if len(tokens) != count:
        raise UsageError(f"{len(tokens)} tokens were given for {count} {what}; give one for each")
    return [shown(token) for token in tokens]


def label(ax: Axes, which: str, labels: Sequence[str], places: Sequence[float]) -> None:
    """Ticks that can be read: upright if all fit, else (below or above) turned by 90 degrees, else every second, ..."""
    step = -(-len(labels) // MOST)
    turns = (0, 90) if which == "x" else (0,)
    while True:
        for turn in turns:
            _set(ax, which, labels[::step], places[::step], turn)
            if not crowded(ax, which):
                return
        if step >= len(labels):
            return
        step, turns = 2 * step, turns[-1:]


def _set(ax: Axes, which: str, labels: Sequence[str], places: Sequence[float], turn: float) -> None:
    how: dict[str, Any] = {"parse_math": False, "fontfamily": list(_fonts()[0]), "rotation": turn}
    if which == "x":
        ax.set_xticks(places, labels, **how)
    else:
        ax.set_yticks(places, labels, **how)


def crowded(ax: Axes, which: str) -> bool:
    """Whether labels of the axis touch one another as the figure stands."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.execute(figure)  # places panels and labels without drawing them
    ax.apply_aspect()
    side = 0 if which == "x" else 1
    axis = ax.xaxis if which == "x" else ax.yaxis
    boxes = [text.get_window_extent() for text in axis.get_ticklabels() if text.get_text()]
    spans = sorted((box.min[side], box.max[side]) for box in boxes)
    return any(b[0] < a[1] + (3 if which == "x" else 0) for a, b in pairwise(spans))
