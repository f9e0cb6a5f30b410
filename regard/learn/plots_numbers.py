"""Pictures of the numbers behind the mechanisms: softmax, scale, the one pass, caches, forgetting, cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regard.learn.numbers import Pass, Saturation, Spread
from regard.learn.numbers_cost import CacheTable, Costs, Memory, half_life
from regard.report.show import number, some
from regard.see.plots_style import MARKS, Sheet, label, sheet

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


def saturation_curves(numbers: Saturation, *, dark: bool = False) -> Figure:
    """softmax([a, a, 2a]) as a grows: its weights, and how fast any of them can still move."""
    page = sheet(10.4, 4.2, 2, dark=dark)
    left, right = page.axes
    for i, (at, name) in enumerate(((2, "of 2a"), (0, "of each a"))):
        left.plot(numbers.a, numbers.weights[:, at], label=name, **page.line(i))
    page.dress(left, "a", "softmax weight", "weights of softmax([a, a, 2a])")
    left.set_ylim(-0.03, 1.03)
    page.legend(left, "center right")
    right.semilogy(numbers.a, numbers.steepest, **{**page.line(2), "linestyle": "-"})
    page.dress(right, "a", "largest |dp / dx| (log scale)", "the steepest entry of the Jacobian")
    for ax in page.axes:
        page.grid(ax)
    page.title("A softmax that is sure of itself stops learning")
    return page.figure


def jacobian_tiles(numbers: Saturation, *, dark: bool = False) -> Figure:
    """The Jacobian of softmax([a, a, 2a]) for each a, numbers written in."""
    count = len(numbers.a)
    page = sheet(2.5 * count + 1.4, 3.2, count, dark=dark)
    most = numbers.jacobians.abs().max().item()
    for ax, a, cells in zip(page.axes, numbers.a.tolist(), numbers.jacobians.tolist()):
        image = ax.imshow(cells, "cividis", vmin=-most, vmax=most)
        for i, row in enumerate(cells):
            for j, value in enumerate(row):
                ink = "#000000" if value > 0 else "#ffffff"
                text = number(value, 2)
                ax.text(j, i, text, ha="center", va="center", color=ink, fontsize=8.5)
        page.dress(ax, "score", "weight", f"a = {a:g}")
        ax.set_xticks(range(3), ["a", "a", "2a"])
        ax.set_yticks(range(3), ["a", "a", "2a"])
    page.bar(image, page.axes[-1], "dp / dx")
    page.title("The Jacobian of softmax([a, a, 2a]): it fades as a grows")
    return page.figure


def variance_curves(numbers: Spread, *, dark: bool = False) -> Figure:
    """The variance of q.k by head width, with and without the scale, and how likely each score is at three widths."""
    page = sheet(13.2, 4.2, 3, dark=dark)
    first = page.axes[0]
    for i, (name, values) in enumerate({"q·k": numbers.plain, "q·k / √d": numbers.scaled}.items()):
        first.loglog(numbers.dims, values, marker=MARKS[i], label=name, **page.line(i))
    first.set_xticks(numbers.dims, [str(d) for d in numbers.dims])
    first.minorticks_off()
    page.dress(
        first, "width of a head, d (log scale)", "variance (log scale)", "variance of a score"
    )
    page.legend(first)
    for ax, which, name in zip(page.axes[1:], (0, 1), ("q·k", "q·k / √d")):
        for i, at in enumerate(some(len(numbers.dims), 3)):
            dim = numbers.dims[at]
            score, chance = numbers.chances[dim][which]
            ax.plot(
                score,
                chance / (score[1] - score[0]),
                label=f"d = {dim}",
                marker=MARKS[i],
                markersize=3 if dim < 32 else 0,
                **page.line(i),
            )
        spread = 3.2 * max((numbers.plain, numbers.scaled)[which]) ** 0.5
        ax.set_xlim(-spread, spread)
        page.dress(ax, f"score {name}", "density", f"where {name} falls")
        page.legend(ax, "upper right")
    for ax in page.axes:
        page.grid(ax)
    page.title("Why scores are divided by √d: entries of q and k are ±1, independent")
    return page.figure


def online_steps(numbers: Pass, *, dark: bool = False) -> Figure:
    """Key by key: logits with the maximum so far, the sum so far, the output so far."""
    page = sheet(min(max(1.1 * len(numbers.x), 6.5), 13), 6.8, rows=3, dark=dark)
    steps = list(range(1, len(numbers.x) + 1))
    rows = (
        (numbers.m, "logit", "m: the largest logit so far (bars: the logits)"),
        (numbers.d, "sum", "d: the sum so far, of e to the (logit − m)"),
        (numbers.o, "output", "o: the output so far (bars: the values; dashes: softmax attention)"),
    )
    page.axes[0].bar(steps, numbers.x.tolist(), 0.5, color=page.theme.faint)
    page.axes[2].bar(steps, numbers.values.tolist(), 0.5, color=page.theme.faint)
    final = numbers.o[-1].item()
    page.axes[2].axhline(final, color=page.theme.text, linewidth=1, linestyle=(0, (4, 3)))
    for i, (ax, (values, unit, title)) in enumerate(zip(page.axes, rows)):
        line = {**page.line(i), "linestyle": "-"}
        ax.plot(steps, values, marker=MARKS[i], **line)
        for step, value in zip(steps, values.tolist()):
            _above(ax, step, value, number(value, 4), page)
        page.dress(ax, "", unit, title)
        ax.margins(y=0.28)
        ax.set(xlim=(0.4, len(steps) + 0.6), xticks=steps)
        page.grid(ax)
    for ax in page.axes[:2]:
        ax.tick_params(labelbottom=False)
    page.dress(
        page.axes[2], "key (under it: by what the old sum was multiplied)", "output", rows[2][2]
    )
    page.title("Online softmax: one pass, nothing stored but m, d and o")
    names = [f"{i}\n× {number(s, 3)}" for i, s in zip(steps, numbers.shrink.tolist())]
    label(page.axes[2], "x", [f"{steps[0]}\n-", *names[1:]], steps)
    return page.figure


def _above(ax: Axes, x: float, y: float, text: str, page: Sheet, **how: Any) -> None:
    """A number over its point."""
    place: dict[str, Any] = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
    ax.annotate(text, (x, y), color=page.theme.text, fontsize=9, **{**place, **how})


# --- caches -------------------------------------------------------------------------------------------------------


def cache_bars(table: CacheTable, title: str = "", *, dark: bool = False) -> Figure:
    """Bytes of one token by mechanism, and of whole sequences by their length."""
    count = len(table.names)
    page = sheet(12, max(3.8, 0.5 * count + 2), 2, dark=dark)
    left, right = page.axes
    for i, bytes_ in enumerate(table.per_token):
        left.barh(i, bytes_, 0.6, color=page.theme.series[i % len(page.theme.series)])
        side = {"xytext": (5, 0), "ha": "left", "va": "center"}
        _above(left, bytes_, i, size(bytes_), page, **side)
        line = page.line(i)
        right.plot(
            table.lengths, table.totals[i], marker=MARKS[i % 6], label=table.names[i], **line
        )
    left.set_xlim(0, 1.2 * max(table.per_token))
    left.invert_yaxis()
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    for ax in page.axes:
        page.grid(ax)
    left.xaxis.set_major_locator(_even_sizes(max(table.per_token)))
    left.xaxis.set_major_formatter(lambda x, _: size(x))
    right.yaxis.set_major_formatter(lambda y, _: size(y))
    page.dress(left, "bytes", "mechanism", "for one token")
    page.dress(right, "tokens (log scale)", "bytes (log scale)", "for a sequence")
    page.legend(right)
    right.minorticks_off()
    page.title(title or "What a cache needs, all layers")
    label(left, "y", table.names, range(count))
    label(right, "x", [length_name(n) for n in table.lengths], table.lengths)
    return page.figure


def _even_sizes(most: float) -> Any:
    """Ticks at powers of two, at most four of them."""
    from matplotlib.ticker import MultipleLocator

    return MultipleLocator(max(2 ** ((int(most).bit_length() - 1) - 1), 1))


# --- recurrence ---------------------------------------------------------------------------------------------------


def forgetting_curves(numbers: Memory, *, dark: bool = False) -> Figure:
    """What a recurrence leaves of a token t steps back, and the steps between, against attention's path of one."""
    page = sheet(11, 4.8, 2, dark=dark)
    left, right = page.axes
    for i, (rate, curve) in enumerate(zip(numbers.rates, numbers.left)):
        name = f"RNN, λ = {rate:g}"
        if rate < 1:
            name += f" (half after {number(half_life(rate), 3)})"
        left.semilogy(numbers.steps, curve, label=name, **page.line(i + 1))
    left.semilogy(
        numbers.steps, numbers.steps * 0 + 1, label="attention: path of one", **page.line(0)
    )
    left.set_ylim(1e-6, max(10.0, 2 * min(numbers.left.max().item(), 1e4)))
    page.dress(left, "steps back, t", "factor λᵗ (log scale)", "what is left of a token")
    right.plot(numbers.steps, numbers.path, label="RNN", **page.line(1))
    right.plot(numbers.steps, numbers.attention_path, label="attention", **page.line(0))
    page.dress(right, "steps back, t", "steps on the path", "how far its gradient travels")
    for ax in page.axes:
        page.grid(ax)
    page.legend(left, "upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    page.legend(right)
    page.title("A recurrence forgets as λᵗ; attention reaches every token in one step")
    return page.figure


def cost_curves(numbers: Costs, *, dark: bool = False) -> Figure:
    """Work of a recurrent and of an attention layer by length, and the steps that must wait for one another."""
    page = sheet(11.6, 4.6, 2, dark=dark)
    left, right = page.axes
    for i, (name, work) in enumerate(numbers.work.items()):
        left.loglog(
            numbers.lengths, work, marker=MARKS[i], markersize=4, label=name, **page.line(i)
        )
    left.axvline(numbers.even, color=page.theme.faint, linewidth=1)
    page.dress(
        left,
        "tokens, n (log scale)",
        "multiply-adds (log scale)",
        f"work of one layer, width {numbers.dim}",
    )
    for i, (name, waits) in enumerate(numbers.waits.items()):
        right.loglog(
            numbers.lengths, waits, marker=MARKS[i], markersize=4, label=name, **page.line(2 * i)
        )
    page.dress(
        right, "tokens, n (log scale)", "steps (log scale)", "steps that wait for one another"
    )
    for ax in page.axes:
        page.grid(ax)
        ax.minorticks_off()
        page.legend(ax, "upper left")
        label(ax, "x", [length_name(n) for n in numbers.lengths], numbers.lengths)
    foot = {"xytext": (4, 4), "ha": "left", "va": "bottom", "xycoords": ("data", "axes fraction")}
    _above(left, numbers.even, 0, f"n = 2 × width = {numbers.even:,}", page, **foot)
    page.title("A recurrent layer against an attention layer")
    return page.figure
