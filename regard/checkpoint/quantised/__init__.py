"""Quantised folders: weights in few bits, as `quantization_config` says, read as what they mean.

QUANTISATIONS names the formats. A reader says which tensors of a folder hold which weight (`Held`); each weight is
unpacked under its own name when its turn comes, one at a time, before the rules of a family see it. `save` writes the
folder's own tensors while the weights are still theirs, and `regard.prepare` takes its numbers where its products hold
the very same (`Kept`).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from regard.checkpoint import store
from regard.checkpoint.quantised import awq, bits, compressed, fp8, gptq, mxfp4
from regard.checkpoint.quantised.numbers import Held, Reader, check_left_out
from regard.checkpoint.rules import Data, wrong
from regard.checkpoint.store import Source, Stored
from regard.checkpoint.tensors import JOINED, SAME, Step
from regard.errors import UsageError
from regard.kernels.packed import Packed, unpacked

QUANTISATIONS: dict[str, Reader] = {
    "awq": awq.held,
    "bitsandbytes": bits.held,
    "compressed-tensors": compressed.held,
    "fbgemm_fp8": fp8.held,
    "fp8": fp8.held,
    "gptq": gptq.held,
    "mxfp4": mxfp4.held,
}
KEYS = ("quantization_config", "compression_config")
# What formats keep beside a weight, or for the products and caches of their own that round what flows.
EXTRA = re.compile(
    r"weight_(shape|zero_point|g_idx|format)|g_idx|activation_scale|"
    r"(input|output|[qkv])_(scale|zero_point|global_scale)"
)


@dataclass(frozen=True)
class Packing:
    """How a folder's weights are packed: what its config says of that, under its key, and the folder."""

    key: str
    settings: Data
    method: str
    folder: Path | None
    kinds: Counter[str]
    # The type that the config says.
    dtype: str | None = None

    def told(self, model_type: torch.dtype) -> str:
        many = "; ".join(f"{n} in {kind}" for kind, n in sorted(self.kinds.items()))
        name = str(model_type).removeprefix("torch.")
        if not self.kinds:
            return (
                f"{self.key} says {self.method}, but no tensor is packed: all are read as they are"
            )
        text = f"packed weights ({self.method}: {many}) are unpacked to {name}"
        return f"{text}; save writes them packed again while they stay as they are"


def unpack(theirs: Data, source: Source) -> tuple[Data, Source, Packing | None]:
    """Plain weights for those that the config says are packed, the config without it, and what it said."""
    key = next((key for key in KEYS if theirs.get(key)), "")
    if not key:
        return theirs, source, None
    settings = theirs[key]
    if not isinstance(settings, dict):
        raise wrong(f"{key} is {settings!r:.80}; it must be an object")
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in QUANTISATIONS:
        raise wrong(
            f"{key} has quant_method {method!r}; known: {', '.join(QUANTISATIONS)}. Bring the model as it was before, "
            "or unpack it with transformers: from_pretrained(...).dequantize(), then save_pretrained(...)"
        )
    weights = {held.name: held for held in QUANTISATIONS[method](settings, source)}
    check_left_out(settings, weights.values())
    gone = {name for held in weights.values() for name in held.parts + held.beside}
    modules = {name.removesuffix(".weight") for name in weights}
    plain = Source()
    plain.folder = source.folder
    for name, x in source.items():
        module, _, end = name.rpartition(".")
        near = module in modules or any(m.startswith(module + ".") for m in modules if end[1:2] == "_")  # fmt: skip
        if name not in gone and not (near and EXTRA.fullmatch(end)):
            plain[name] = x
    for name, held in weights.items():
        if name in plain:
            raise UsageError(f"tensor {name} is there twice: whole, and packed as {held.parts[0]}")
        shape = (*held.shape[:-2], *held.shape[:-3:-1]) if held.turned else held.shape
        read = partial(_read, held, source)
        plain[name] = Stored(shape, held.dtype, read, held=held)
    rest = {name: value for name, value in theirs.items() if name != key}
    kinds = Counter(held.what for held in weights.values())
    said = theirs.get("dtype") or theirs.get("torch_dtype")
    return rest, plain, Packing(key, settings, method, source.folder, kinds, said)


def _read(held: Held, source: Source, _: Tensor | None) -> Tensor:
    return held.dense(source)


def lay(source: Source, steps: Iterable[Step]) -> None:
    """Formats whose weights are (out in) of a layer, for a family whose weights are (in out)."""
    names = {name for step in steps if step.op.turned for name in step.theirs}
    for name in names & source.keys():
        x = source[name]
        if x.held is not None and x.held.linear:
            source[name] = replace(x, shape=x.shape[::-1], read=partial(_turned, x))


def _turned(x: Stored, lent: Tensor | None) -> Tensor:
    return x.read(lent).mT


# --- what a prepared model takes as it is --------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """Rows of a weight as the folder holds them, for one who packs it."""

    folder: Path
    held: Held
    rows: slice

    def packed(self, kind: str, weight: Tensor) -> Packed | None:
        """In `kind`, if that gives `weight` to the bit."""
        try:
            numbers = self.held.read(_source(self.folder))
        except (UsageError, OSError):
            return None
        made = numbers.packed(kind, self.rows, weight.dtype)
        if made is None or made.shape != weight.shape:
            return None
        made = Packed(made.q.to(weight.device), made.scales.to(weight.device), made.dtype)
        return made if torch.equal(unpacked(made, weight.dtype), weight) else None


@functools.lru_cache(1)
def _source(folder: Path) -> Source:
    return store.weights(folder)


def kept(step: Step, source: Source) -> list[Kept | None]:
    """For each of our tensors of a rule, whose rows of one of theirs it is."""
    held = source[step.theirs[0]].held
    if held is None or source.folder is None or step.op not in (SAME, JOINED):
        return [None] * len(step.ours)
    ends = [0]
    for shape in step.shapes:
        ends.append(ends[-1] + shape[0])
    places = itertools.pairwise(ends)
    return [Kept(source.folder, held, slice(first, last)) for first, last in places]
