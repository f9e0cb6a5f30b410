"""Bug or rounding? One model run in every way it can be run, each held against float64.

    checks = parity(model)    # a Check each: equal, rounding, tie or bug, and where

A run (alone, together, padded, in chunks through a cache, by transformers) is recorded tensor by
tensor (`Recorder`), each number at [row, position] of the text: so any two runs can be laid side by
side, however they were cut into rows, chunks, pages and padding. The oracle is the model itself in
float64. It compares each tensor with the run's own and goes on with the run's (`Oracle`): so an
error shows where it is made and nowhere else. The `Envelope` tells rounding from a bug.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from regard.errors import UsageError
from regard.models import Model
from regard.parity.envelope import Check, Envelope, judge
from regard.parity.oracle import oracle, steps
from regard.parity.runs import Run, Runner, record, runs_of, sample
from regard.parity.trace import Given, Trace

__all__ = [
    "CHECKS",
    "Check",
    "Given",
    "Runner",
    "Trace",
    "check_weights",
    "parity",
    "record",
    "sample",
]
CHECKS = {
    "fused against reference": ("fused", "reference"),
    "batch against single": ("batch", "fused"),
    "padded against unpadded": ("padded", "fused"),
    "cached against uncached": ("contiguous", "fused"),
    "ring against uncached": ("ring", "fused"),
    "paged against uncached": ("paged", "fused"),
    "shared against alone": ("shared", "fused"),
    "prefill against decode": ("prefill", "decode"),
    "rows reordered": ("reordered", "fused"),
    "absorbed against expanded": ("absorbed", "expanded"),
    "bf16 against fp32": ("bf16", "fused"),
    "packed against plain": ("packed", "fused"),
    "packed in shared pages": ("packed pages", "fused"),
    "int8 against plain": ("int8", "fused"),
    "int8 in shared pages": ("int8 pages", "fused"),
    "unwatched against watched": ("unwatched", "packed"),
    "graph against plain": ("graph", "fused"),
    "GPU against CPU": ("GPU", "fused"),
    "ours against transformers": ("fused", "transformers"),
}


def parity(
    model: Model,
    given: Given | None = None,
    *,
    more: dict[str, Run] | None = None,
    sound: Model | None = None,
    only: Collection[str] = tuple(CHECKS),
) -> list[Check]:
    """The checks of CHECKS (or `only` some) that this model and machine allow. `more`: runs made
    elsewhere ("transformers"); `sound`: the model to compare with, if another one runs."""
    rows = sample(model) if given is None else given
    truth = sound or model
    check_weights(truth)
    runs = runs_of(model, rows) | (more or {})
    envelopes: dict[Any, Envelope] = {}

    @cache
    def exact(dtype: torch.dtype) -> Model:
        return oracle(truth, dtype)

    @cache
    @torch.no_grad()
    def judged(name: str) -> tuple[Trace, Check]:
        trace = runs[name](rows)
        wide = exact(trace.dtype)
        if trace.form not in envelopes:
            envelopes[trace.form] = Envelope(wide, trace)
        return trace, judge(steps(wide, trace), envelopes[trace.form], name)

    def check(name: str, one: str, other: str) -> Check:
        a, first = judged(one)
        b, second = judged(other)
        # Rows that were added to share the others' first tokens come last.
        count = len(rows.ids)
        x, y = (each.tensors["logits"][:count] for each in (a, b))
        both = a.real["logits"][:count] & b.real["logits"][:count]
        if a.lengths is not None and (truth.reads_source or not truth.decodes):
            # A cut text is another text to what sees all of it.
            both &= a.lengths[:, None] == x.shape[1]
        gap = float((x - y)[both].abs().max()) if both.any() else 0.0
        grave = ("rounding", "tie", "bug").index
        found = max(first, second, key=lambda one: grave(one.verdict))
        worst = found if found.verdict == "bug" else max(first, second, key=lambda one: one.worst)
        if found.verdict == "rounding":
            found = replace(worst, verdict="rounding" if gap else "equal", run="")
        return replace(found, name=name, difference=gap, worst=worst.worst)

    chosen = {name: pair for name, pair in CHECKS.items() if name in only}
    return [check(name, *pair) for name, pair in chosen.items() if set(pair) <= set(runs)]


def check_weights(model: Model) -> None:
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or not bool(weight.isfinite().all()):
            why = "has numbers that are not finite; parity needs finite ones"
            raise UsageError(f"the weight {name} {why}")
