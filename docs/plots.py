"""Draw every picture of the textbook, and those of regard/see/plots.py: python docs/plots.py
FOLDER. Each comes in light and in dark.

The attention maps are made by rule, so that the pictures need no trained model: heads that look at
the token before, at the first, at themselves, or near."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import quantities as q  # noqa: E402

from regard.attention import softmax  # noqa: E402
from regard.errors import UsageError  # noqa: E402
from regard.position import Linear, Rope  # noqa: E402
from regard.see import plots  # noqa: E402
from regard.see.format import number  # noqa: E402
from regard.see.plots import DASHES, MARKS, Sheet, ink, label, sheet, token_labels  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def line(page: Sheet, i: int) -> dict[str, Any]:
    """How curve i looks: colour, dashes and marks all differ."""
    colour, dashes = page.series[i % len(page.series)], DASHES[i % len(DASHES)]
    return {"color": colour, "linestyle": dashes, "linewidth": 1.8}


def grid(page: Sheet, ax: Axes, which: Literal["both", "x", "y"] = "both") -> None:
    ax.grid(axis=which, color=page.faint, linewidth=0.5, alpha=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def legend(page: Sheet, ax: Axes, where: Any = "best", **how: Any) -> None:
    how = {"frameon": False, "labelcolor": page.text, "fontsize": 9, "handlelength": 3, **how}
    ax.legend(loc=where, **how)


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


# --- softmax ------------------------------------------------------------------------------------


def saturation_curves(numbers: q.Saturation, *, dark: bool = False) -> Figure:
    """softmax([a, a, 2a]) as a grows: its weights, and how fast any of them can still move."""
    page = sheet(10.4, 4.2, 2, dark=dark)
    left, right = page.axes
    for i, (at, name) in enumerate(((2, "of 2a"), (0, "of each a"))):
        left.plot(numbers.a, numbers.weights[:, at], label=name, **line(page, i))
    page.dress(left, "a", "softmax weight", "weights of softmax([a, a, 2a])")
    left.set_ylim(-0.03, 1.03)
    legend(page, left, "center right")
    right.semilogy(numbers.a, numbers.steepest, **{**line(page, 2), "linestyle": "-"})
    page.dress(right, "a", "largest |dp / dx| (log scale)", "the steepest entry of the Jacobian")
    for ax in page.axes:
        grid(page, ax)
    page.title("A softmax that is sure of itself stops learning")
    return page.figure


def jacobian_tiles(numbers: q.Saturation, *, dark: bool = False) -> Figure:
    """The Jacobian of softmax([a, a, 2a]) for each a, numbers written in."""
    count = len(numbers.a)
    page = sheet(2.5 * count + 1.4, 3.2, count, dark=dark)
    most = numbers.jacobians.abs().max().item()
    for ax, a, cells in zip(page.axes, numbers.a.tolist(), numbers.jacobians):
        image = page.image(ax, cells, most)
        for i, row in enumerate(cells.tolist()):
            for j, value in enumerate(row):
                how = {"color": ink(image, value), "fontsize": 8.5}
                ax.text(j, i, number(value, 2), ha="center", va="center", **how)
        page.dress(ax, "score", "weight", f"a = {a:g}")
        ax.set_xticks(range(3), ["a", "a", "2a"])
        ax.set_yticks(range(3), ["a", "a", "2a"])
    page.bar(image, page.axes[-1], "dp / dx")
    page.title("The Jacobian of softmax([a, a, 2a]): it fades as a grows")
    return page.figure


def variance_curves(numbers: q.Spread, *, dark: bool = False) -> Figure:
    """The variance of q.k by head width, with and without the scale, and how likely each score is
    at three widths."""
    page = sheet(13.2, 4.2, 3, dark=dark)
    first = page.axes[0]
    for i, (name, values) in enumerate({"q·k": numbers.plain, "q·k / √d": numbers.scaled}.items()):
        first.loglog(numbers.dims, values, marker=MARKS[i], label=name, **line(page, i))
    first.set_xticks(numbers.dims, [str(d) for d in numbers.dims])
    first.minorticks_off()
    page.dress(
        first, "width of a head, d (log scale)", "variance (log scale)", "variance of a score"
    )
    legend(page, first)
    for ax, which, name in zip(page.axes[1:], (0, 1), ("q·k", "q·k / √d")):
        for i, at in enumerate((0, len(numbers.dims) // 2, len(numbers.dims) - 1)):
            dim = numbers.dims[at]
            score, chance = numbers.chances[dim][which]
            ax.plot(
                score,
                chance / (score[1] - score[0]),
                label=f"d = {dim}",
                marker=MARKS[i],
                markersize=3 if dim < 32 else 0,
                **line(page, i),
            )
        spread = 3.2 * max((numbers.plain, numbers.scaled)[which]) ** 0.5
        ax.set_xlim(-spread, spread)
        page.dress(ax, f"score {name}", "density", f"where {name} falls")
        legend(page, ax, "upper right")
    for ax in page.axes:
        grid(page, ax)
    page.title("Why scores are divided by √d: entries of q and k are ±1, independent")
    return page.figure


def online_steps(numbers: q.Pass, *, dark: bool = False) -> Figure:
    """Key by key: logits with the maximum so far, the sum so far, the output so far."""
    page = sheet(min(max(1.1 * len(numbers.x), 6.5), 13), 6.8, rows=3, dark=dark)
    steps = list(range(1, len(numbers.x) + 1))
    rows = (
        (numbers.m, "logit", "m: the largest logit so far (bars: the logits)"),
        (numbers.d, "sum", "d: the sum so far, of e to the (logit − m)"),
        (numbers.o, "output", "o: the output so far (bars: the values; dashes: softmax attention)"),
    )
    page.axes[0].bar(steps, numbers.x.tolist(), 0.5, color=page.faint)
    page.axes[2].bar(steps, numbers.values.tolist(), 0.5, color=page.faint)
    final = numbers.o[-1].item()
    page.axes[2].axhline(final, color=page.text, linewidth=1, linestyle=(0, (4, 3)))
    for i, (ax, (values, unit, title)) in enumerate(zip(page.axes, rows)):
        ax.plot(steps, values, marker=MARKS[i], **{**line(page, i), "linestyle": "-"})
        for step, value in zip(steps, values.tolist()):
            _above(ax, step, value, number(value, 4), page)
        page.dress(ax, "", unit, title)
        ax.margins(y=0.28)
        ax.set(xlim=(0.4, len(steps) + 0.6), xticks=steps)
        grid(page, ax)
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
    ax.annotate(text, (x, y), color=page.text, fontsize=9, **{**place, **how})


# --- caches -------------------------------------------------------------------------------------


def cache_bars(table: q.CacheTable, title: str = "", *, dark: bool = False) -> Figure:
    """Bytes of one token by mechanism, and of whole sequences by their length."""
    count = len(table.names)
    page = sheet(12, max(3.8, 0.5 * count + 2), 2, dark=dark)
    left, right = page.axes
    for i, bytes_ in enumerate(table.per_token):
        left.barh(i, bytes_, 0.6, color=page.series[i % len(page.series)])
        side = {"xytext": (5, 0), "ha": "left", "va": "center"}
        _above(left, bytes_, i, size(bytes_), page, **side)
        how = {"marker": MARKS[i % 6], "label": table.names[i], **line(page, i)}
        right.plot(table.lengths, table.totals[i], **how)
    left.set_xlim(0, 1.2 * max(table.per_token))
    left.invert_yaxis()
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    for ax in page.axes:
        grid(page, ax)
    left.xaxis.set_major_locator(_even_sizes(max(table.per_token)))
    left.xaxis.set_major_formatter(lambda x, _: size(x))
    right.yaxis.set_major_formatter(lambda y, _: size(y))
    page.dress(left, "bytes", "mechanism", "for one token")
    page.dress(right, "tokens (log scale)", "bytes (log scale)", "for a sequence")
    legend(page, right)
    right.minorticks_off()
    page.title(title or "What a cache needs, all layers")
    label(left, "y", table.names, range(count))
    label(right, "x", [length_name(n) for n in table.lengths], table.lengths)
    return page.figure


def _even_sizes(most: float) -> Any:
    """Ticks at powers of two, at most four of them."""
    from matplotlib.ticker import MultipleLocator

    return MultipleLocator(max(2 ** ((int(most).bit_length() - 1) - 1), 1))


# --- recurrence ---------------------------------------------------------------------------------


def forgetting_curves(numbers: q.Memory, *, dark: bool = False) -> Figure:
    """What a recurrence leaves of a token t steps back, and the steps between, against attention's
    path of one."""
    page = sheet(11, 4.8, 2, dark=dark)
    left, right = page.axes
    for i, (rate, curve) in enumerate(zip(numbers.rates, numbers.left)):
        name = f"RNN, λ = {rate:g}"
        if rate < 1:
            name += f" (half after {number(q.half_life(rate), 3)})"
        left.semilogy(numbers.steps, curve, label=name, **line(page, i + 1))
    left.semilogy(
        numbers.steps, numbers.steps * 0 + 1, label="attention: path of one", **line(page, 0)
    )
    left.set_ylim(1e-6, max(10.0, 2 * min(numbers.left.max().item(), 1e4)))
    page.dress(left, "steps back, t", "factor λᵗ (log scale)", "what is left of a token")
    right.plot(numbers.steps, numbers.path, label="RNN", **line(page, 1))
    right.plot(numbers.steps, numbers.attention_path, label="attention", **line(page, 0))
    page.dress(right, "steps back, t", "steps on the path", "how far its gradient travels")
    for ax in page.axes:
        grid(page, ax)
    legend(page, left, "upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    legend(page, right)
    page.title("A recurrence forgets as λᵗ; attention reaches every token in one step")
    return page.figure


def cost_curves(numbers: q.Costs, *, dark: bool = False) -> Figure:
    """Work of a recurrent and of an attention layer by length, and the steps that must wait for one
    another."""
    page = sheet(11.6, 4.6, 2, dark=dark)
    left, right = page.axes
    for i, (name, work) in enumerate(numbers.work.items()):
        left.loglog(
            numbers.lengths, work, marker=MARKS[i], markersize=4, label=name, **line(page, i)
        )
    left.axvline(numbers.even, color=page.faint, linewidth=1)
    page.dress(
        left,
        "tokens, n (log scale)",
        "multiply-adds (log scale)",
        f"work of one layer, width {numbers.dim}",
    )
    for i, (name, waits) in enumerate(numbers.waits.items()):
        right.loglog(
            numbers.lengths, waits, marker=MARKS[i], markersize=4, label=name, **line(page, 2 * i)
        )
    page.dress(
        right, "tokens, n (log scale)", "steps (log scale)", "steps that wait for one another"
    )
    for ax in page.axes:
        grid(page, ax)
        ax.minorticks_off()
        legend(page, ax, "upper left")
        label(ax, "x", [length_name(n) for n in numbers.lengths], numbers.lengths)
    foot = {"xytext": (4, 4), "ha": "left", "va": "bottom", "xycoords": ("data", "axes fraction")}
    _above(left, numbers.even, 0, f"n = 2 × width = {numbers.even:,}", page, **foot)
    page.title("A recurrent layer against an attention layer")
    return page.figure


# --- positions ----------------------------------------------------------------------------------


def position_table(table: q.Table, title: str = "", *, dark: bool = False) -> Figure:
    """The vectors of all positions, and how alike every two of them are."""
    page = sheet(11, 4.6, 2, dark=dark, ratios=(1.25, 1))
    image = page.image(page.axes[0], table.vectors)
    page.axes[0].set_aspect("auto")
    page.dress(page.axes[0], "feature", "position", "the vector of each position")
    page.bar(image, page.axes[0], "value")
    image = page.image(page.axes[1], table.alike, 1.0)
    page.dress(page.axes[1], "position", "position", "how alike two positions are")
    page.bar(image, page.axes[1], "cosine")
    page.title(title or "Position vectors")
    return page.figure


def rope_dials(clocks: q.Clocks, title: str = "", *, dark: bool = False) -> Figure:
    """A clock for each pair of features and each position: how far RoPE has turned the pair there,
    from the right, against the clock. The faint hand is where it stood at the position above."""
    rows, columns = clocks.angles.shape
    page = sheet(max(1.15 * columns, 4) + 1.4, 1.0 * rows + 1.5, dark=dark)
    ax = page.axes[0]
    turn = [2 * math.pi * i / 48 for i in range(49)]
    for i, angles in enumerate(clocks.angles.tolist()):
        for j, angle in enumerate(angles):
            ax.plot(
                [j + 0.4 * math.cos(a) for a in turn],
                [i - 0.4 * math.sin(a) for a in turn],
                color=page.faint,
                linewidth=1,
            )
            hands = [(clocks.angles[i - 1, j].item(), page.faint, 1.5)] if i else []
            for a, colour, width in [*hands, (angle, page.series[0], 2.2)]:
                tip = j + 0.4 * math.cos(a), i - 0.4 * math.sin(a)
                ax.plot([j, tip[0]], [i, tip[1]], color=colour, linewidth=width)
            ax.plot(*tip, "o", color=page.series[0], markersize=5)
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


def distance_curves(numbers: q.Distances, title: str = "", *, dark: bool = False) -> Figure:
    """What distance does to a score: RoPE multiplies, ALiBi takes away."""
    panels = [
        (numbers.shares, "score, as a share of that at distance 0", "RoPE, query and key alike")
    ]
    if numbers.added:
        panels.append((numbers.added, "added to the score", "ALiBi"))
    page = sheet(5.6 * len(panels) + 0.4, 4.2, len(panels), dark=dark)
    for ax, (curves, unit, name) in zip(page.axes, panels):
        ax.axhline(0, color=page.faint, linewidth=0.8)
        for i, (curve, values) in enumerate(curves.items()):
            ax.plot(numbers.distances, values, label=curve, **line(page, i))
        page.dress(ax, "distance between query and key (tokens)", unit, name)
        grid(page, ax)
        legend(page, ax)
    page.title(title or "Scores against distance")
    return page.figure


# --- sparse selection ---------------------------------------------------------------------------


def selection_strip(
    numbers: q.Selection,
    tokens: Sequence[str] | None = None,
    title: str = "",
    *,
    dark: bool = False,
) -> Figure:
    """One query's index scores and dense weights over its keys; the chosen are lit and carry a dot,
    hidden keys have a cross."""
    count = len(numbers.scores)
    page = sheet(min(max(0.27 * count, 7), 13), 5.2, rows=2, dark=dark)
    seen = numbers.scores.isfinite()
    width = max(0.8, min(14.0, 0.62 * 72 * (page.figure.get_figwidth() - 1) / count))
    for ax, values in zip(page.axes, (numbers.scores, numbers.weights)):
        for lit in (False, True):
            at = (seen & (numbers.chosen == lit)).nonzero().flatten()
            colour = page.series[0] if lit else page.faint
            ax.vlines(at, 0, values[at], colors=colour, linewidth=width, capstyle="butt")
            if lit:
                ax.plot(at, values[at], "o", color=page.text, markersize=min(4.5, width + 1.5))
        hidden = (~seen).nonzero().flatten()
        ax.plot(hidden, hidden * 0, "x", color=page.text, markersize=min(5, width + 1.5))
        ax.axhline(0, color=page.faint, linewidth=0.8)
        ax.set_xlim(-0.7, count - 0.3)
        grid(page, ax, "y")
    page.dress(page.axes[0], "", "index score", "the indexer's scores (dot: chosen, cross: hidden)")
    page.dress(page.axes[1], "key", "dense weight", "what dense attention gives the same keys")
    page.axes[0].tick_params(labelbottom=False)
    kept = f"reads {numbers.read} of {numbers.visible} keys, keeps {numbers.share:.1%} of the attention"
    page.title(f"{title}: {kept}" if title else f"Sparse selection {kept}")
    label(page.axes[1], "x", token_labels(tokens, count, "keys"), range(count))
    return page.figure


# --- the gallery --------------------------------------------------------------------------------


TEXT = "the old king said to his daughter that the sea had taken all his ships"
SENTENCE = TEXT.split()
SOURCE = ["ein", "kleiner", "Hund", "läuft", "schnell", "durch", "den", "hohen", "Schnee", "."]
TARGET = ["a", "little", "dog", "runs", "through", "the", "deep", "snow", "quickly", "."]
ORDER = (0, 1, 2, 3, 5, 6, 7, 8, 4, 9)  # the source word of each target word


def rule_maps(layers: int, heads: int, tokens: int) -> Tensor:
    """Causal weights (layers heads tokens tokens) of four kinds of head, the sharper the deeper."""
    at = torch.arange(tokens, dtype=torch.float64)
    back = at[:, None] - at
    kinds = (
        -(back - 1).abs(),
        -at.expand(tokens, -1),
        -back.abs(),
        torch.cos(back * 0.9) - back / 40,
    )
    noise = torch.randn(layers, heads, tokens, tokens, generator=torch.Generator().manual_seed(0))
    scores = torch.stack(
        [torch.stack([kinds[(i + j) % 4] for j in range(heads)]) for i in range(layers)]
    )
    scores = scores * torch.arange(1, layers + 1)[:, None, None, None] + 0.8 * noise
    return softmax(scores, back >= 0)


def aligned() -> Tensor:
    """Cross-attention (targets sources) that mostly follows ORDER."""
    near = -0.7 * (torch.tensor(ORDER)[:, None] - torch.arange(len(SOURCE))).abs().double()
    return softmax(near + 1.2 * (near == 0))


def chosen(keys: int = 40, topk: int = 8) -> q.Selection:
    """An indexer that mostly agrees with the attention it chooses for; the last keys are hidden."""
    draw = torch.Generator().manual_seed(1)
    dense = 2.2 * torch.randn(keys, generator=draw, dtype=torch.float64)
    index = (dense + 0.6 * torch.randn(keys, generator=draw, dtype=torch.float64)).clamp(min=0)
    seen = torch.arange(keys) < keys - 4
    return q.selection(index.masked_fill(~seen, -torch.inf), softmax(dense, seen), topk)


def pictures() -> dict[str, Callable[[bool], Figure]]:
    """Every picture by the name of its file; it takes whether it is dark."""
    maps = rule_maps(4, 8, len(SENTENCE))
    lengths = [2**i for i in range(10, 18)]
    learned = q.sinusoidal_table(64, 48).vectors @ rotation(48) + 0.2 * rotation(64)[:, :48]
    ropes = {
        "base 10,000": Rope(),
        "base 500,000": Rope(500000.0),
        "base 10,000, stretched by 4": Rope(scaling=Linear(4.0)),
    }
    x, v = torch.tensor([1.0, 3.0, 2.0, 4.0, 0.5]), torch.tensor([1.0, 2.0, 3.0, 1.5, 4.0])
    a = torch.linspace(0, 15, 151, dtype=torch.float64)
    few = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=torch.float64)
    caches = {
        name: q.cache_table(q.cache_variants(name), lengths)
        for name in ("llama-3.1-8b", "deepseek-v3.2")
    }
    return {
        "head-grid": lambda dark: plots.head_grid(maps, dark=dark),
        "one-head": lambda dark: plots.one_head(
            maps[2, 0], SENTENCE, SENTENCE, "Layer 2, head 0", dark=dark
        ),
        "one-head-numbers": lambda dark: plots.one_head(
            maps[1, 3, :7, :7], SENTENCE[:7], SENTENCE[:7], "Layer 1, head 3", dark=dark
        ),
        "alignment": lambda dark: plots.alignment(aligned(), SOURCE, TARGET, least=0.09, dark=dark),
        "selection": lambda dark: selection_strip(chosen(), dark=dark),
        "sinusoidal": lambda dark: position_table(
            q.sinusoidal_table(96, 64), "Sinusoidal positions", dark=dark
        ),
        "learned": lambda dark: position_table(
            q.learned_table(learned), "Learned positions (an example made by rule)", dark=dark
        ),
        "rope-clocks": lambda dark: rope_dials(
            q.rope_clocks(Rope(), 16, [0, 1, 2, 5, 10], [0, 1, 2, 3, 4, 6]), dark=dark
        ),
        "distance": lambda dark: distance_curves(
            q.distance_scores(ropes, 64, 129, alibi=4), dark=dark
        ),
        "saturation": lambda dark: saturation_curves(q.saturations(a), dark=dark),
        "jacobian": lambda dark: jacobian_tiles(q.saturations(few), dark=dark),
        "variance": lambda dark: variance_curves(q.dot_spread([4, 8, 16, 32, 64, 128]), dark=dark),
        "online-softmax": lambda dark: online_steps(q.online_pass(x, v), dark=dark),
        "cache-llama": lambda dark: cache_bars(
            caches["llama-3.1-8b"], "Cache of Llama 3.1 8B in bf16, 32 layers", dark=dark
        ),
        "cache-deepseek": lambda dark: cache_bars(
            caches["deepseek-v3.2"], "Cache of DeepSeek-V3.2 in bf16, 61 layers", dark=dark
        ),
        "forgetting": lambda dark: forgetting_curves(
            q.forgetting([1.05, 0.99, 0.9, 0.5], 100), dark=dark
        ),
        "cost": lambda dark: cost_curves(
            q.layer_costs(512, [2**i for i in range(6, 16)]), dark=dark
        ),
    }


def rotation(size: int) -> Tensor:
    """A fixed orthogonal matrix: what training does to features, it does in no order one could see."""
    draw = torch.Generator().manual_seed(2)
    return torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))[0]


def draw(folder: Path) -> Iterator[Path]:
    """Write NAME.png and NAME-dark.png for every picture."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures().items():
        for dark in (False, True):
            yield plots.save(picture(dark), folder / f"{name}{'-dark' if dark else ''}.png")


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python docs/plots.py FOLDER", file=sys.stderr)
        return 2
    try:
        for path in draw(Path(sys.argv[1])):
            print(path)
    except (UsageError, OSError) as error:
        print("error:", error, file=sys.stderr)
        return getattr(error, "code", 2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
