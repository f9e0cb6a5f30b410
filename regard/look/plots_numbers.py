"""Pictures of the numbers behind the mechanisms: softmax, scale, the one pass, caches, forgetting, cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from regard.config import UsageError
from regard.look.numbers import Pass, Saturation, Spread
from regard.look.numbers_cost import CacheTable, Costs, Memory, half_life
from regard.look.plots_style import MARKS, Sheet, label, sheet
from regard.look.show import number, short, some

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def size(count: float) -> str:
    """70272 as 68.6 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{number(count, 3)} {unit}"
        count /= 1024
    return f"{number(count, 3)} TiB"


def length_name(tokens: float) -> str:
    """32768 as 32k."""
    return f"{tokens / 1024:g}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:g}"


# --- softmax ------------------------------------------------------------------------------------------------------


def saturation_curves(
    numbers: Saturation, show: Sequence[float] = (0, 1, 5), *, dark: bool = False
) -> Figure:
    """softmax([a, a, 2a]) as a grows, its steepest slope, and its Jacobian at some a."""
    known = numbers.a.tolist()
    missing = [a for a in show if a not in known]
    if missing or not show:
        raise UsageError(f"saturation: show={list(show)} must be values of a that were computed")
    page = sheet(4.6 * max(2, len(show)), 7.4, len(show), 2, dark=dark)
    for ax in page.axes[2 : len(show)]:
        ax.remove()
    left, right = page.axes[0], page.axes[1 if len(show) > 1 else 0]
    return page.figure
