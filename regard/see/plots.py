"""Pictures of what a model attends to and of the numbers behind the mechanisms, as matplotlib figures.

Each function draws the numbers that a function of `numbers`, `numbers_maps`, `numbers_position` or `numbers_cost`
returns, in light or (`dark=True`) dark colours, and returns the figure: `save(head_grid(maps), "heads.png")`.
"""

from regard.learn.plots_numbers import (
    cache_bars,
    cost_curves,
    forgetting_curves,
    jacobian_tiles,
    online_steps,
    saturation_curves,
    variance_curves,
)
from regard.learn.plots_position import distance_curves, position_table, rope_dials
from regard.see.plots_maps import alignment, head_grid, one_head, selection_strip
from regard.see.plots_style import PlotsError, save

__all__ = [
    "head_grid",
    "one_head",
    "alignment",
    "selection_strip",
    "position_table",
    "rope_dials",
    "distance_curves",
    "saturation_curves",
    "jacobian_tiles",
    "variance_curves",
    "online_steps",
    "cache_bars",
    "forgetting_curves",
    "cost_curves",
    "PlotsError",
    "save",
]
