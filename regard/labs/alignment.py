"""How well attention aligns: weights of cross-attention against links that are known, on dates in many languages."""

from __future__ import annotations

import csv
import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.decode.generate import tokenizer_of
from regard.evaluation.run import evaluate
from regard.labs.measure import Case, Figures
from regard.recipes.dates import Dates, Form, Links
from regard.see.look import Given, watched, writing
from regard.see.plots import links
from regard.see.probe import Probe, number_of
from regard.text import Tokenizer, needed

HYPHENS = (4, 7)


class Pair(NamedTuple):
    """A date as it is written and in ISO, and the characters that belong together."""

    source: str
    target: str
    locale: str
    sure: Links
    possible: Links


@dataclass
class Error:
    """The alignment error rate, 1 - (|A and S| + |A and P|) / (|A| + |S|), of links A that were found, over all texts;
    S are the sure ones, P the possible ones, S among them (Och & Ney 2003)."""

    right: int = 0
    count: int = 0

    def add(self, found: Links, sure: Links, possible: Links) -> None:
        self.right += len(found & sure) + len(found & possible)
        self.count += len(found) + len(sure)

    @property
    def rate(self) -> float:
        return 1 - self.right / self.count


def pairs(case: Case) -> Iterator[Pair]:
    """The dates that are held out."""
    dates = Dates()
    with open(case.valid, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    dates.forms(sorted({row["locale"] for row in rows}))
    for row in rows:
        style, _, digits = row["form"].partition("-")
        form = Form(row["locale"], style, digits or "latn")
        known = dates.links(form, datetime.date.fromisoformat(row["target"]))
        yield Pair(row["source"], row["target"], row["locale"], *known)


@torch.inference_mode()
def weights(model: Any, tokenizer: Tokenizer, pair: Pair) -> dict[str, Tensor]:
    """Of each cross-attention the heads (h t s), while the date is written as it should be; of marks such as the end
    none."""
    device = next(model.parameters()).device
    read = Given(torch.tensor([tokenizer.encode(pair.source)], device=device), [])
    given = writing(model, tokenizer, read, tokenizer.encode_target(pair.target))
    maps = watched(model, given, Probe()).maps
    shape = (slice(len(pair.target)), slice(len(pair.source)))
    return {site: a[0][0][:, *shape].cpu() for site, a in maps.items() if site.endswith(".cross")}


def alignment(case: Case) -> Figures:
    """Alignment error rates on one half of the held-out dates; of several heads by layer that of their mean, and of
    the head that is best on the other half. And one date as it was read."""
    model = case.load()
    tokenizer, every = needed(tokenizer_of(model)), list(pairs(case))
    half = len(every) // 2
    chosen: dict[str, list[Error]] = {}
    for pair in every[:half]:
        for site, maps in weights(model, tokenizer, pair).items():
            errors = chosen.setdefault(site, [Error() for _ in maps])
            for error, head in zip(errors, maps, strict=True):
                error.add(best(head), pair.sure, pair.possible)
    heads = {site: min(range(len(e)), key=lambda i: e[i].rate) for site, e in chosen.items()}
    found: dict[str, tuple[Error, Error]] = {}
    for pair in every[half:]:
        rows = named(case.variant, weights(model, tokenizer, pair), heads)
        if case.variant == case.settings["beside"]:
            rows["the diagonal"] = diagonal(pair)
        for row, a in rows.items():
            exact, part = found.setdefault(row, (Error(), Error()))
            exact.add(best(a), pair.sure, pair.possible)
            part.add(*parts(best(a), pair))
    lowest = min(heads, key=lambda site: chosen[site][heads[site]].rate)
    one = next((p for p in every if p.locale == case.settings["shown"]), every[0])
    shown = weights(model, tokenizer, one)[lowest][heads[lowest]]
    how: Any = {"metrics": ["exact"], "beams": 1, "device": case.device}
    exact_match = evaluate(case.best, case.valid, **how).metrics["exact"]
    return {
        "Alignment error rate": {
            row: {"characters": exact.rate, "year, month, day": part.rate}
            for row, (exact, part) in found.items()
        },
        "Dates without an error": {case.variant: {"share": exact_match}},
        f"{case.variant}: one date": picture(shown, one),
    }


def best(a: Tensor) -> Links:
    """The strongest source of each digit of the target; hyphens belong to nothing."""
    return {(x.source, x.target) for x in links(a) if x.best and x.target not in HYPHENS}


def diagonal(pair: Pair) -> Tensor:
    """Weights of a model that reads evenly from the first character to the last."""
    rows, columns = len(pair.target), len(pair.source)
    at = torch.linspace(0, columns - 1, rows).round().long()
    return torch.nn.functional.one_hot(at, columns).double()


def parts(found: Links, pair: Pair) -> tuple[Links, Links, Links]:
    """Links of the year, the month and the day to what was read for them: a character belongs to the part whose
    digits it has a link to, or to none."""
    part = [1, 1, 1, 1, 0, 2, 2, 0, 3, 3]
    of = {s: part[t] for s, t in pair.possible}
    # One link for each digit, as there are links found.
    right = {(part[t], t) for t in range(len(part)) if part[t]}
    return {(of.get(s, 0), t) for s, t in found}, right, right


def named(variant: str, maps: dict[str, Tensor], heads: dict[str, int]) -> dict[str, Tensor]:
    """Each layer's mean and best head by the name of its row; a single head has the variant's own."""
    if sum(map(len, maps.values())) == 1:
        return {variant: next(iter(maps.values()))[0]}
    rows: dict[str, Tensor] = {}
    for site, a in maps.items():
        layer = f"{variant}, layer {(number_of(site) or 0) + 1}"
        rows |= {f"{layer}, mean of heads": a.mean(0), f"{layer}, best head": a[heads[site]]}
    return rows


def picture(a: Tensor, pair: Pair) -> dict[str, dict[Any, float]]:
    """Rows and columns of a map, by their places and characters."""
    columns = numbered(pair.source)
    rows = zip(numbered(pair.target), a.tolist(), strict=True)
    return {row: dict(zip(columns, (round(x, 4) for x in xs), strict=True)) for row, xs in rows}


def numbered(text: Sequence[str]) -> list[str]:
    return [f"{i} {c}" for i, c in enumerate(text)]
