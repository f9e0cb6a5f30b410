"""regard parity: bug or rounding, as a table, or as JSON; exit code 5 if there is a bug."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.parse import Folder, Switch
from regard.cli.shared import aligned, talk
from regard.errors import CHECK, DATA, blaming

if TYPE_CHECKING:
    from regard.models import Model
    from regard.parity.check import Check
    from regard.parity.record import Given, Trace

SCHEMA = 1
HEAD = ("check", "verdict", "difference", "error", "where the error is largest")


@dataclass(frozen=True)
class Options:
    """Bug or rounding? Run a model in every way it can be run, and hold each against float64.

    regard parity MODEL                    fused, cached, batched, padded, packed, bf16, GPU, transformers
    regard parity MODEL --tokens 100       longer rows: past a window, or what a sparse attention chooses from
    """

    model: Folder
    rows: int = 3
    """rows of random tokens (or images)"""
    tokens: int = 16
    """tokens in a row"""
    seed: int = 0
    """other tokens"""
    json: Switch = False
    """one JSON object"""


def run(options: Options) -> int:
    import torch

    from regard.checkpoint import load
    from regard.files import resolve_model
    from regard.parity.check import check_weights, parity, record, sample
    from regard.see.format import strict

    with blaming(DATA):
        folder = resolve_model(options.model)
        model = load(folder, dtype=torch.float32)
        check_weights(model)
    given = sample(model, rows=options.rows, tokens=options.tokens, seed=options.seed)
    talk(f"{options.rows} random rows, each run held against float64")
    more: dict[str, Any] = {"packed": lambda g: packed(model, g)}
    theirs, why = peer(folder, model)
    if theirs is not None:
        more["transformers"] = lambda g: record(theirs, model, g)
    left = {} if theirs is not None else {"ours against transformers": why}
    if not torch.cuda.is_available():
        left["GPU against CPU"] = "torch finds no cuda device"
    checks = parity(model, given, more=more)
    if options.json:
        head = {"schema": SCHEMA, "model": options.model, "verdict": verdict(checks)}
        print(json.dumps(strict({**head, "checks": [asdict(c) for c in checks], "left_out": left})))
    else:
        print(table(checks))
        for name, reason in left.items():
            print(f"left out: {name}: {reason}", file=sys.stderr)
        print(summary(checks), file=sys.stderr)
    return CHECK if verdict(checks) == "bug" else 0


def verdict(checks: Sequence[Check]) -> str:
    """The worst of all."""
    return max((c.verdict for c in checks), key=("equal", "rounding", "tie", "bug").index)


def packed(model: Model, given: Given) -> Trace:
    """The model as it runs here: packed, a prompt and then token by token where it can."""
    from regard.fast.cpu import prepare
    from regard.parity.check import Runner

    runner = Runner(prepare(model), given)
    if not model.decodes:
        return runner.alone()
    half = given.ids.shape[1] // 2
    return runner.cached("contiguous", [half] + [1] * (given.ids.shape[1] - half))


def peer(folder: Path, model: Model) -> tuple[Any, str]:
    """The same folder in transformers, or why not."""
    import torch

    from regard.files import read_json

    if importlib.util.find_spec("transformers") is None:
        return None, "the package transformers is not installed"
    settings = folder / "config.json"
    config = read_json(settings) if settings.is_file() else {}
    kind = next(iter(config.get("architectures") or []), None)
    import transformers

    peer_class = getattr(transformers, str(kind), None)
    if peer_class is None or not model.towers:
        return None, f"it has no model of the kind {kind or model.config.kind}"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        theirs = peer_class.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    # Whatever it is, it is theirs.
    except Exception as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        return None, f"it cannot load this folder: {first:.160}"
    return theirs.eval(), ""


# --- what is printed ------------------------------------------------------------------------------


def table(checks: Sequence[Check]) -> str:
    """The largest difference of both answers, and the largest error of either as a share of what
    rounding can do."""
    rows = ((c.name, c.verdict, f"{c.difference:.1e}", f"{c.worst:.3g}", c.where) for c in checks)
    return aligned([HEAD, *rows])


def summary(checks: Sequence[Check]) -> str:
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
