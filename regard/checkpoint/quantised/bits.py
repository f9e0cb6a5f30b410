"""bitsandbytes: nf4 and fp4, w = table[q] absmax of its block; and int8, w = q SCB / 127 of its output.

4 bits: X.weight holds two numbers a byte, the upper half first, row after row, and blocks go on from row to row;
X.weight.quant_map is the table, X.weight.absmax the blocks' largest numbers, and X.weight.quant_state.bitsandbytes__nf4
(or fp4) JSON with shape, block size and type. Quantised twice: absmax = nested_quant_map[absmax] nested_absmax +
offset. 8 bits: X.weight (n k) and X.SCB (n). A block of zeros has the largest number 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from regard.checkpoint.quantised.numbers import Held, Numbers, beside, fits
from regard.checkpoint.rules import Data
from regard.checkpoint.store import FLOATS, Source
from regard.errors import UsageError
from regard.files import loads

STATE = ".quant_state.bitsandbytes__"
STATE_BYTES = 4096


def held(settings: Data, source: Source) -> Iterator[Held]:
    for name in source:
        weight, mark, kind = name.partition(STATE)
        if mark:
            yield four(source, beside(source, weight, name), kind, name)
        module = name.removesuffix(".SCB")
        if module != name:
            weight = beside(source, f"{module}.weight", name)
            shape = source[weight].shape
            fits(weight, source, (*shape[:1], *shape[-1:]), what="matrices", kinds=[torch.int8])
            fits(name, source, shape[:1], (1, *shape[:1]), what=f"{weight}'s outputs")
            order = f"{module}.weight_format"
            if order in source and source[order].read(None).any():
                raise UsageError(f"tensor {weight} is int8 in the order of one GPU, not by rows")
            what, parts = "int8, a scale for each output", (weight, name)
            yield Held(weight, parts, shape, eight, what, linear=True, zeros=True)


def four(source: Source, weight: str, kind: str, state: str) -> Held:
    said = state_of(source, state)
    shape, size = tuple(said["shape"]), said["blocksize"]
    parts = [beside(source, f"{weight}.{p}", state) for p in ("quant_map", "absmax")]
    nested, offset = said.get("nested_blocksize", 0), said.get("nested_offset", 0.0)
    if nested:
        more = ("nested_quant_map", "nested_absmax")
        parts += [beside(source, f"{weight}.{p}", state) for p in more]
    blocks = -(-prod(shape) // size)
    held = source[weight].dtype.itemsize * prod(source[weight].shape)
    if held != -(-prod(shape) // 2):
        raise UsageError(f"tensor {weight} has {held} bytes, but {state} says {shape} in 4 bits")
    fits(parts[0], source, (16,), what="4 bits")
    kinds = [torch.uint8] if nested else FLOATS
    fits(parts[1], source, (blocks,), what=f"blocks of {size} of {shape}", kinds=kinds)
    if nested:
        fits(parts[2], source, (256,), what="largest numbers in 8 bits")
        fits(parts[3], source, (-(-blocks // nested),), what=f"blocks of {nested} of {blocks}")
    make = partial(numbers, prod(shape), size, nested, offset)
    what, dtype = f"{kind}, a scale for {size}", getattr(torch, said["dtype"])
    return Held(
        weight, (weight, *parts), shape, make, what, dtype,
        beside=(state,), linear=True, zeros=True,
    )  # fmt: skip


def state_of(source: Source, name: str) -> dict[str, Any]:
    """The JSON of a tensor of bytes, whose every setting is what it must be."""
    said: Any = None
    if source[name].dtype == torch.uint8 and prod(source[name].shape) <= STATE_BYTES:
        try:
            said = loads(bytes(source[name].read(None).tolist()))
        except (ValueError, RecursionError):
            said = None
    sizes = said.get("shape") if isinstance(said, dict) else None
    if isinstance(sizes, list) and all(type(n) is int and 0 < n < 2**40 for n in sizes):
        counts = [said.get("blocksize"), said.get("nested_blocksize", 1)]
        sound = all(type(n) is int and n > 0 for n in counts)
        sound &= type(said.get("nested_offset", 0.0)) in (int, float)
        if sound and said.get("dtype") in [str(kind).removeprefix("torch.") for kind in FLOATS]:
            return dict(said)
    raise UsageError(
        f"tensor {name} does not say shape, blocksize and dtype; copy its folder again"
    )


def numbers(
    count: int, size: int, nested: int, offset: float, words: Tensor, table: Tensor, largest: Tensor, *twice: Tensor
) -> Numbers:  # fmt: skip
    b = words.contiguous().flatten().view(torch.uint8)
    q = torch.stack([b >> 4, b & 15], 1).flatten()[:count]
    if twice:
        scale = twice[0].float()[largest.int()]
        largest = scale * twice[1].float().repeat_interleave(nested)[: len(scale)] + offset
    return Numbers(table.float()[q.int()][None], largest.float()[None], block=(1, size))


def eight(q: Tensor, largest: Tensor) -> Numbers:
    return Numbers(q, largest.float().reshape(-1, 1), block=(1, q.shape[1]), gain=1 / 127)
