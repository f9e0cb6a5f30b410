"""regard parity: bug or rounding, as a table, or as JSON; exit code 5 if there is a bug."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from regard.checkpoint import load
from regard.cli.model import blaming, resolved, talk
from regard.cli.options_parity import Parity
from regard.errors import DATA
from regard.fast.cpu import prepare
from regard.files import read_json
from regard.models import Model
from regard.parity.check import Check, Run, check_weights, parity
from regard.parity.record import Given, Trace
from regard.parity.ways import Runner, record, sample
from regard.report.runs import strict

BUG, SCHEMA = 5, 1
HEAD = ("check", "verdict", "difference", "error", "where the error is largest")


def run(options: Parity) -> int:
    with blaming(DATA):
        folder = resolved(options.model)
        model = load(folder, dtype=torch.float32)
        check_weights(model)
    given = sample(model, rows=options.rows, tokens=options.tokens, seed=options.seed)
    talk(f"{options.rows} random rows, each run held against float64")
    more: dict[str, Run] = {"packed": lambda g: packed(model, g)}
    theirs, why = peer(Path(folder), model)
    if theirs is not None:
        more["transformers"] = lambda g: record(theirs, model, g)
    left = {} if theirs is not None else {"ours against transformers": why}
    if not torch.cuda.is_available():
        left["GPU against CPU"] = "torch finds no cuda device"
    checks = parity(model, given, more=more)
    if options.json:
        told = {"schema": SCHEMA, "model": options.model, "verdict": verdict(checks)}
        print(json.dumps(strict({**told, "checks": [asdict(c) for c in checks], "left_out": left})))
    else:
        print(table(checks))
        for name, reason in left.items():
            print(f"left out: {name}: {reason}", file=sys.stderr)
        print(said(checks), file=sys.stderr)
    return BUG if verdict(checks) == "bug" else 0


def verdict(checks: Sequence[Check]) -> str:
    """The worst of all."""
    return max((c.verdict for c in checks), key=("equal", "rounding", "tie", "bug").index)


def packed(model: Model, given: Given) -> Trace:
    """The model as it runs here: packed, a prompt and then token by token where it can."""
    runner = Runner(prepare(model), given)
    if not model.decodes:
        return runner.alone()
    half = given.ids.shape[1] // 2
    return runner.cached("contiguous", [half] + [1] * (given.ids.shape[1] - half))


def peer(folder: Path, model: Model) -> tuple[Any, str]:
    """The same folder in transformers, or why not."""
    if importlib.util.find_spec("transformers") is None:
        return None, "the package transformers is not installed"
    settings = folder / "config.json"
    config = read_json(settings) if settings.is_file() else {}
    kind = next(iter(config.get("architectures") or []), None)
    import transformers

    found = getattr(transformers, str(kind), None)
    if found is None or not model.towers:
        return None, f"it has no model of the kind {kind or model.config.kind}"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        theirs = found.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except Exception as error:  # whatever it is, it is theirs
        first = (str(error) or type(error).__name__).splitlines()[0]
        return None, f"it cannot load this folder: {first:.160}"
    return theirs.eval(), ""


# --- what is printed ----------------------------------------------------------------------------------------------


def table(checks: Sequence[Check]) -> str:
    """The largest difference of both answers, and the largest error of either as a share of what rounding can do."""
    rows = [HEAD]
    for c in checks:
        rows.append((c.name, c.verdict, f"{c.difference:.1e}", f"{c.worst:.3g}", c.where))
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def said(checks: Sequence[Check]) -> str:
    bugs = [c for c in checks if c.verdict == "bug"]
    if not bugs:
        return _sound(checks)
    c = bugs[0]
    return (
        f"bug: the {c.run} run leaves what rounding can do at {c.where} (row {c.row}, token {c.position}), "
        f"by {c.worst:.3g} times; {len(bugs)} of {len(checks)} checks see a bug"
    )


def _sound(checks: Sequence[Check]) -> str:
    near = "is as near to float64 as rounding lets it be (error below 1)"
    tie = next((c for c in checks if c.verdict == "tie"), None)
    if tie is None:
        return f"no bug: every tensor of every run {near}"
    return (
        f"no bug, but a tie: in {tie.where} the indexer scores several keys the same (ReLU gives exact "
        f"zeros), we take the earliest of them, the {tie.run} run took others, and neither is wrong; "
        f"every other tensor of every run {near}"
    )
