"""What works with each family: every cell is measured on a tiny model of it.

    python -m tests.checkpoint.matrix [FAMILY ...]

writes the rows of these families, or of all, into regard/checkpoint/families/matrix.json, which `regard presets
--families` prints, and docs/families.md; test_matrix.py holds both to what is measured. Cells: "yes"; "part",
where some parts run as they are, by torch; "no"; "-" where there is nothing to ask for.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import regard
from regard.checkpoint.families import FAMILIES, MATRIX
from regard.errors import UsageError
from regard.fast.cpu.steps import NativeStack, PackedStack
from regard.fast.cuda.table import decoder, why_not
from regard.models.adapt import low_ranks
from regard.parity import parity, sample
from regard.training.config import Adapt, adapted
from tests.checkpoint.families import CASES, ONE_PER_FAMILY, Peer, at_tokens, batch
from tests.checkpoint.test_family_laws import test_gradients_of_every_parameter_match
from tests.checkpoint.test_hf import (
    test_hf_family_logits_match,
    test_hf_saved_folder_loads_in_transformers,
    test_hf_tensors_are_written_back_bit_equal,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
YES, PART, NO, NONE = "yes", "part", "no", "-"


def holds(test: Callable[..., None], *given: Any) -> str:
    """A law that is a test, as a cell."""
    try:
        test(*given)
    except AssertionError:
        return NO
    return YES


class Row:
    """One family: a model of transformers, ours of it, and the folders of both."""

    def __init__(self, name: str, home: Path):
        self.name = name
        theirs = CASES[name].make()
        theirs.save_pretrained(home / "theirs")
        self.peer = Peer(CASES[name], theirs, home / "theirs")
        self.model = regard.load(home / "theirs")
        self.saved = self.model.save(home / "ours")
        self.given = batch(theirs.config)

    def theirs(self, _: str) -> Peer:
        return self.peer

    def ours(self, _: str) -> tuple[regard.Model, Path]:
        return self.model, self.saved

    @property
    def writes(self) -> bool:
        return getattr(self.model.config.head, "kind", "") == "lm"


def read(row: Row) -> str:
    return holds(test_hf_family_logits_match, row.name, row.theirs, row.ours)


def gradients(row: Row) -> str:
    return holds(test_gradients_of_every_parameter_match, row.name, row.theirs)


def written(row: Row) -> str:
    tests = (test_hf_tensors_are_written_back_bit_equal, test_hf_saved_folder_loads_in_transformers)
    cells = {holds(test, row.name, row.theirs, row.ours) for test in tests}
    return NO if NO in cells else YES


@torch.no_grad()
def native(row: Row) -> str:
    """C code from one end of a block to the other, or in parts of it."""
    fast = regard.prepare(copy.copy(row.model), "fp32")
    found, wanted = (at_tokens(model(**row.given), row.given) for model in (fast, row.model))
    assert (found - wanted).abs().max() < 1e-4 * max(1.0, wanted.abs().max().item())
    stack = getattr(fast, fast.writer)
    if isinstance(stack, NativeStack | PackedStack):
        return YES
    return PART if "Native" in fast.explain() else NO


@torch.no_grad()
def graph(row: Row) -> str:
    """Kernels for every part, or for some; whether its steps are right is for the tests of graphs."""
    if not row.writes:
        return NONE
    if why_not(row.model):
        return NO
    parts = [fast for _, fast in decoder(copy.deepcopy(row.model), kernels=False).parts]
    return PART if any("Generic" in fast for fast in parts) else YES


@torch.no_grad()
def packed(precision: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        try:
            fast = regard.prepare(copy.copy(row.model), precision)
        except UsageError:
            return NO
        return YES if fast(**row.given).isfinite().all() else NO

    return cell


def lora(row: Row) -> str:
    """Every matrix of an adapter gets a gradient."""
    model = adapted(copy.deepcopy(row.model), Adapt(method="lora", rank=2))
    added = low_ranks(model)
    for layer in added.values():
        torch.nn.init.normal_(layer.b)
    model(**row.given).float().square().mean().backward()
    grads = [p.grad for layer in added.values() for p in (layer.a, layer.b)]
    return YES if added and all(g is not None and g.isfinite().all() for g in grads) else NO


@torch.no_grad()
def look(row: Row) -> str:
    """Weights of every place that has them, and the same output with them as without."""
    probe = regard.Probe()
    seen = row.model(**row.given, probe=probe)
    if not torch.equal(seen, row.model(**row.given)):
        return NO
    if not probe.maps:
        return NONE
    sums = [call.sum(-1) for calls in probe.maps.values() for call in calls]
    return YES if all(bool(((s <= 1 + 1e-4) & (s >= 0)).all()) for s in sums) else NO


def sound(row: Row) -> str:
    """Every run of it that there is, held against float64, is rounding."""
    try:
        checks = parity(row.model, sample(row.model, rows=2, tokens=9))
    except UsageError:
        return NONE
    return NO if any(check.verdict == "bug" for check in checks) else YES


@torch.no_grad()
def mtp(row: Row) -> str:
    """Layers that the hub has are read, written and guess, and no text changes."""
    family = FAMILIES[row.model.origin.family]
    if family.mtp is None:
        return NO if any("mtp" in pattern for pattern in family.carried) else NONE
    made = replace(row.model.config, mtp=family.mtp).make()
    made.load_state_dict(row.model.state_dict(), strict=False)
    made.origin = row.model.origin
    with tempfile.TemporaryDirectory() as home:
        model = regard.load(made.save(home))
    both: dict[str, Any] = {"max_new_tokens": 9, "defaults": "plain"}
    found, wanted = (
        regard.generate(model, [[5, 9, 7]], draft_model=draft, **both)[0].ids
        for draft in ("mtp", None)
    )
    return YES if model.config == made.config and found == wanted else NO


COLUMNS: dict[str, Callable[[Row], str]] = {
    "logits": read,
    "gradients": gradients,
    "saved back": written,
    "C code": native,
    "graph": graph,
    "int8": packed("int8"),
    "int4": packed("int4"),
    "LoRA": lora,
    "look": look,
    "parity": sound,
    "MTP": mtp,
}


def measured(name: str, columns: list[str]) -> dict[str, str]:
    """The row of a family, by one of its cases."""
    with tempfile.TemporaryDirectory() as home, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = Row(name, Path(home))
        return {column: COLUMNS[column](row) for column in columns}


LEGEND = """# Families

The families of Hugging Face that Regard reads, by their `model_type`, and what works with each: `regard presets
--families` on a terminal. The rows are measured on a tiny model of each, beside transformers
(`python -m tests.checkpoint.matrix`); a test holds this page to them.

- *logits*, *gradients*: equal to those of transformers. *saved back*: every tensor as it was, bit for bit, and
  transformers loads it.
- *C code*: on a CPU, `regard.prepare` computes whole blocks in C (yes), or parts of them (part).
- *graph*: on a GPU, a step of decoding is one CUDA graph of kernels (yes), or of kernels and torch's operations (part).
- *int8*, *int4*: weights packed in so many bits. *LoRA*: trained on every matrix. *look*: attention weights, exactly.
  *parity*: each way to run it differs from float64 by rounding alone.
- *MTP*: layers that predict more tokens are read, trained, written and guess (yes), or kept and written back (no).
- "-": there is nothing to ask for.
"""


def page(table: dict[str, dict[str, str]]) -> str:
    columns = list(next(iter(table.values())))
    lines = [f"| {' | '.join(['family', *columns])} |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {' | '.join([f'`{family}`', *cells.values()])} |" for family, cells in table.items()
    ]
    return "\n".join([LEGEND, *lines, ""])


def main(wanted: list[str]) -> int:
    table = json.loads(MATRIX.read_text(encoding="utf-8")) if MATRIX.exists() else {}
    for family, name in zip(FAMILIES, ONE_PER_FAMILY, strict=True):
        if not wanted or family in wanted:
            table[family] = measured(name, list(COLUMNS))
            print(family, *table[family].values(), flush=True)
    kept = {family: table[family] for family in FAMILIES if family in table}
    MATRIX.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(kept), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
