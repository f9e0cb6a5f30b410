"""The page of an experiment, from its results alone: for each figure a plot and a table, how to repeat it, its runs."""

from __future__ import annotations

from statistics import mean
from typing import Any

from regard.report.page import Block, Figure, Series, bars, lines
from regard.see.format import number, short, span
from regard.train.config import toml


def blocks(results: dict[str, Any]) -> list[Block]:
    runs, count = results["runs"], max(map(len, results["runs"].values()))
    seeds = "one seed" if count == 1 else f"{count} seeds: mean ± the largest distance from it"
    page = [Block("strong", results["question"]), Block("text", f"Figures of {seeds}.")]
    for name, rows in results["figures"].items():
        about = results["about"][name]
        page += [Block("heading", name), Block("text", about["text"])]
        if about.get("plot", True):
            page.append(Block("figures", figures=[drawn(name, rows, about)]))
        page.append(tabled(rows, about))
    table = [
        [variant, short(next(iter(cases.values()))["parameters"]), ", ".join(sorted(cases, key=int)),
         " + ".join(map(str, next(iter(cases.values()))["steps"])),
         span(sum(case["seconds"] for case in cases.values()) / len(cases)),
         ", ".join(sorted({case["device"] for case in cases.values()}))]
        for variant, cases in runs.items()
    ]  # fmt: skip
    head = ("variant", "parameters", "seeds", "steps", "training, each", "on")
    machine = f"regard {results['regard']}, torch {results['torch']}, {results['processor']}"
    whole = "\n\n".join(f"# {v}\n" + "\n".join(map(toml, c)) for v, c in results["config"].items())
    return [
        *page,
        Block("heading", "To repeat it"),
        Block("code", results["command"], language="sh"),
        Block("text", f"{machine}. All figures, seed by seed: results.json, beside this page."),
        Block("table", head=head, rows=table),
        Block("code", whole, language="toml", folded="Every run's settings"),
    ]


def columns(rows: dict[str, dict[str, list[float]]]) -> list[str]:
    return list(dict.fromkeys(x for row in rows.values() for x in row))


def drawn(name: str, rows: dict[str, dict[str, list[float]]], about: dict[str, Any]) -> Figure:
    """Curves over numbers, or bars of the first column."""
    caption = f"{about['y']} by {about['x']}" if "x" in about else about["y"]
    if "x" not in about:
        first = columns(rows)[0]
        return Figure(bars([(row, mean(x[first])) for row, x in rows.items()], name), caption)
    curves = [
        Series(row, [(float(x), mean(v)) for x, v in xs.items()], dots=True)
        for row, xs in rows.items()
    ]
    svg = lines(curves, name, about["x"], about["y"], log=about.get("log", False))
    return Figure(svg, caption, curves=[(s.name, [y for _, y in s.points]) for s in curves])


def tabled(rows: dict[str, dict[str, list[float]]], about: dict[str, Any]) -> Block:
    xs = columns(rows)
    cells = [[row, *(cell(values.get(x, [])) for x in xs)] for row, values in rows.items()]
    return Block("table", head=(about.get("x", ""), *xs), rows=cells)


def cell(values: list[float]) -> str:
    """1.234 ± 0.012; of one seed the value alone."""
    if not values:
        return "-"
    middle = mean(values)
    apart = max(abs(x - middle) for x in values)
    if middle == int(middle) and not apart:
        return f"{middle:,.0f}"
    return number(middle, 4) if len(values) == 1 else f"{number(middle, 4)} ± {number(apart, 2)}"
