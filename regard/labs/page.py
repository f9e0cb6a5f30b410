"""The page of an experiment, from its results alone: for each figure a plot and a table, how to repeat it, its runs."""

from __future__ import annotations

from statistics import mean
from typing import Any

from regard.report.page import Block, Figure, Series, bars, lines
from regard.see.format import number, short, span
from regard.train.config import toml

Rows = dict[str, dict[str, list[float]]]  # row -> column -> one value per seed


def blocks(results: dict[str, Any]) -> list[Block]:
    counts = {len(cases) for cases in results["runs"].values()}
    count = " to ".join(map(str, sorted({min(counts), max(counts)})))
    seeds = "one seed" if counts == {1} else f"{count} seeds: mean ± the largest distance from it"
    page = [Block("strong", results["question"]), Block("text", f"Figures of {seeds}.")]
    for name, rows in results["figures"].items():
        about, xs = results["about"][name], list(dict.fromkeys(x for r in rows.values() for x in r))
        table = [[row, *(cell(values.get(x, [])) for x in xs)] for row, values in rows.items()]
        page += [Block("heading", name), Block("text", about["text"])]
        page.append(Block("figures", figures=[drawn(name, rows, about)]))
        page.append(Block("table", head=(about.get("x", ""), *xs), rows=table))
    runs = []
    for variant, cases in results["runs"].items():
        first, took = next(iter(cases.values())), mean(case["seconds"] for case in cases.values())
        steps = " + ".join(map(str, first["steps"]))
        machines = "; ".join(dict.fromkeys(case["machine"] for case in cases.values()))
        facts = (short(first["parameters"]), ", ".join(cases), steps, span(took), machines)
        runs.append((variant, *facts))
    head = ("variant", "parameters", "seeds", "steps", "training, each", "on")
    whole = "\n\n".join(f"# {v}\n" + "\n".join(map(toml, c)) for v, c in results["config"].items())
    return [
        *page,
        Block("heading", "To repeat it"),
        Block("code", results["command"], language="sh"),
        Block(
            "text",
            f"By regard {results['regard']}. Every seed's figures: results.json, beside this page.",
        ),
        Block("table", head=head, rows=runs),
        Block("code", whole, language="toml", folded="Every run's settings"),
    ]


def drawn(name: str, rows: Rows, about: dict[str, Any]) -> Figure:
    """Curves over the columns where these are numbers, or bars of the first column."""
    if "x" not in about:
        values = [(row, mean(next(iter(cells.values())))) for row, cells in rows.items()]
        return Figure(bars(values, name), about["y"])
    series = [
        Series(row, [(float(x), mean(values)) for x, values in cells.items()], dots=True)
        for row, cells in rows.items()
    ]
    svg = lines(series, name, about["x"], about["y"], log=about.get("log", False))
    curves = [(each.name, [y for _, y in each.points]) for each in series]
    return Figure(svg, f"{about['y']} by {about['x']}", curves=curves)


def cell(values: list[float]) -> str:
    """1.234 ± 0.012; the value alone where seeds agree, or are one."""
    middle = mean(values) if values else None
    apart = max((abs(x - middle) for x in values), default=0.0) if middle is not None else 0.0
    return f"{number(middle, 4)}\u00a0±\u00a0{number(apart, 2)}" if apart else number(middle, 4)
