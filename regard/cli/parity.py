"""regard parity: bug or rounding, as a table, or as JSON; exit code 5 if there is a bug."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.shared import Folder, Switch, say, talk
from regard.errors import CHECK, DATA, blaming
from regard.see.format import aligned, strict

if TYPE_CHECKING:
    from regard.models import Model
    from regard.parity import Check

SCHEMA = 1
HEAD = ("check", "verdict", "difference", "error", "where the error is largest")


@dataclass(frozen=True)
class Options:
    """Bug or rounding? Run a model in every way it can be run, and hold each against float64.

    regard parity MODEL                    fused, cached, shared, batched, packed, int8, graph, bf16, GPU, transformers
    regard parity MODEL --tokens 100       longer rows: past a window, or what a sparse attention chooses from
    """

    model: Folder
    rows: int = 3  # rows of random tokens (or images)
    tokens: int = 16  # tokens in a row
    seed: int = 0  # other tokens
    json: Switch = False  # one JSON object


def run(options: Options) -> int:
    import torch

    from regard.checkpoint import load
    from regard.files import resolve_model
    from regard.parity import check_weights, parity, record, sample
    from regard.parity.graph import why_unseen

    with blaming(DATA):
        folder = resolve_model(options.model)
        model = load(folder, dtype=torch.float32)
        check_weights(model)
    given = sample(model, rows=options.rows, tokens=options.tokens, seed=options.seed)
    talk(f"{options.rows} random rows, each run held against float64")
    more: dict[str, Any] = {}
    left_out = {}
    try:
        with peers_faults("read these rows"):
            trace = record(open_peer(folder, model), model, given)
        more["transformers"] = lambda _: trace
    except LookupError as why:
        left_out["ours against transformers"] = str(why.args[0])
    if not torch.cuda.is_available():
        left_out["GPU against CPU"] = "torch finds no cuda device"
    if model.decodes and (reason := why_unseen(model)):
        left_out["graph against plain"] = reason
    checks = parity(model, given, more=more)
    if options.json:
        facts: dict[str, Any] = {
            "schema": SCHEMA,
            "model": options.model,
            "verdict": verdict(checks),
        }
        facts |= {"checks": [asdict(c) for c in checks], "left_out": left_out}
        print(json.dumps(strict(facts)))
    else:
        print(table(checks))
        for name, reason in left_out.items():
            say(f"left out: {name}: {reason}")
        say(summary(checks))
    return CHECK if verdict(checks) == "bug" else 0


def open_peer(folder: Path, model: Model) -> Any:
    """The same folder in transformers; a LookupError says why not."""
    import torch

    from regard.files import read_json

    if importlib.util.find_spec("transformers") is None:
        raise LookupError("the package transformers is not installed")
    import transformers

    settings = folder / "config.json"
    config = read_json(settings) if settings.is_file() else {}
    kind = next(iter(config.get("architectures") or []), None)
    peer_class = getattr(transformers, str(kind), None)
    if peer_class is None or not model.towers:
        raise LookupError(f"it has no model of the kind {kind or model.config.kind}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with peers_faults("load this folder"):
        peer = peer_class.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return peer.eval()


@contextlib.contextmanager
def peers_faults(what: str) -> Iterator[None]:
    """Whatever transformers raises is a LookupError that says what it could not do, as ours are."""
    try:
        yield
    except Exception as error:
        if type(error) is LookupError:
            raise
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise LookupError(f"it cannot {what}: {first:.160}") from None


def verdict(checks: Sequence[Check]) -> str:
    """The worst verdict of all checks."""
    return max((c.verdict for c in checks), key=("equal", "rounding", "tie", "bug").index)


def table(checks: Sequence[Check]) -> str:
    """The largest difference of both runs, and the largest error over what rounding can do."""
    rows = ((c.name, c.verdict, f"{c.difference:.1e}", f"{c.worst:.3g}", c.where) for c in checks)
    return aligned([HEAD, *rows])


def summary(checks: Sequence[Check]) -> str:
    near = "is as near to float64 as rounding lets it be (error below 1)"
    worst = verdict(checks)
    first = next(c for c in checks if c.verdict == worst)
    if worst == "bug":
        return (
            f"bug: the {first.run} run leaves what rounding can do at {first.where} "
            f"(row {first.row}, token {first.position}), by {first.worst:.3g} times; "
            f"{[c.verdict for c in checks].count('bug')} of {len(checks)} checks see a bug"
        )
    if worst == "tie":
        return (
            f"no bug, but a tie: in {first.where} the indexer scores several keys the same "
            f"(ReLU gives exact zeros), we take the earliest of them, the {first.run} run took "
            f"others, and neither is wrong; every other tensor of every run {near}"
        )
    return f"no bug: every tensor of every run {near}"
