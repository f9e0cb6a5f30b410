"""compressed-tensors (llm-compressor, vLLM): w = (q - z) s, as a group of `config_groups` says for its layers.

pack-quantized: X.weight_packed (n k/p) holds p = 32/bits numbers a word along k, the lowest bits first, half of their
range added; zeros, where there are some, lie so along n. naive-quantized, int-quantized, float-quantized: X.weight is
int8 or e4m3, and X.weight_zero_point int8. X.weight_scale: one, one for each output, for each group of inputs, or for
each block. X.weight_g_idx, where it is there, is the group of each input. The product is of the scale's type.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.checkpoint.quantised.fp8 import EIGHT
from regard.checkpoint.quantised.numbers import (
    KEY,
    Held,
    Numbers,
    beside,
    fields,
    fits,
    matches,
    signed,
    whole,
)
from regard.checkpoint.rules import Data, wrong
from regard.checkpoint.store import FLOATS, Source
from regard.errors import UsageError

PACKED = "pack-quantized"
FORMATS = (PACKED, "naive-quantized", "int-quantized", "float-quantized")
FORMS = ("tensor", "channel", "group", "block")
CLASSES = ("Linear", "Embedding")


def held(settings: Data, source: Source) -> Iterator[Held]:
    groups = [checked(settings, group) for group in listed(settings)]
    sparse = settings.get("sparsity_config") or {}
    if sparse and sparse.get("format", "dense") != "dense":
        raise wrong(f"{KEY}.sparsity_config has format {sparse.get('format')!r}; known: dense")
    for name, x in source.items():
        weight = name.removesuffix("_packed")
        packed = name.endswith(".weight_packed")
        scale = weight + "_scale"
        if packed:
            beside(source, scale, name)
        elif scale not in source or x.dtype not in (torch.int8, *EIGHT) or len(x.shape) != 2:
            continue
        module = weight.removesuffix(".weight")
        group = group_of(groups, module)
        if packed != (group["format"] == PACKED):
            raise UsageError(f"tensor {name} is not {group['format']}, which {KEY} says of it")
        yield one(source, name, weight, group["weights"], packed)


def listed(settings: Data) -> list[Any]:
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise wrong(f"{KEY}.config_groups is {groups!r:.80}; it must say what is packed, and how")
    return list(groups.values())


def checked(settings: Data, group: Any) -> Data:
    """A group whose settings are what they must be."""
    group = group if isinstance(group, dict) else {}
    weights, targets = group.get("weights"), group.get("targets")
    if not isinstance(weights, dict) or not isinstance(targets, list):
        raise wrong(f"{KEY}.config_groups has {group!r:.80}; each has targets and weights")
    form = group.get("format") or settings.get("format")
    if form not in FORMATS:
        raise wrong(f"{KEY}.format is {form!r}; Regard reads {', '.join(FORMATS)}")
    way = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if way not in FORMS:
        raise wrong(f"{KEY}: weights.strategy is {way!r}; Regard reads {', '.join(FORMS)}")
    whole(weights, "num_bits", 8, (2, 4, 8) if form == PACKED else (8,))
    return {"format": form, "targets": targets, "weights": weights | {"strategy": way}}


def group_of(groups: list[Data], module: str) -> Data:
    """That which names a layer, or else its class."""
    for known in (False, True):
        for group in groups:
            for target in map(str, group["targets"]):
                if (known and target in CLASSES) or (not known and matches(target, module)):
                    return group
    raise wrong(f"{KEY}.config_groups: no targets are {module}, which is packed")


def one(source: Source, name: str, weight: str, said: Data, packed: bool) -> Held:
    bits, way = whole(said, "num_bits", 8), said["strategy"]
    n, k = source[name].shape if len(source[name].shape) == 2 else (0, 0)
    each = 32 // bits
    if packed:
        k = inputs(source, name, f"{weight}_shape", n, k * each, each)
    block, form = block_of(said, n, k)
    count = (-(-n // block[0]), -(-k // block[1]))
    scale, zero, index = (f"{weight}_{end}" for end in ("scale", "zero_point", "g_idx"))
    what = f"{bits} bits in {form} of {n} x {k}"
    sizes = (count, *((count[:1],) if count[1] == 1 else ()), *(((),) if count == (1, 1) else ()))
    fits(scale, source, *sizes, what=what)
    if (dtype := source[scale].dtype) not in FLOATS:
        raise UsageError(f"tensor {scale} is stored as {str(dtype).removeprefix('torch.')}")
    parts = [name, scale]
    uneven = not said.get("symmetric", True)
    if uneven:
        words = packed and way in ("group", "channel")
        beside(source, zero, name)
        fits(zero, source, *([(-(-n // each), count[1])] if words else sizes), what=what)
        parts.append(zero)
    if ordered := way == "group" and index in source:
        fits(index, source, (k,), what=what)
        parts.append(index)
    make = partial(numbers, weight, bits, packed, (n, k), block, uneven, ordered)
    kind = "fp8" if source[name].dtype in EIGHT else f"int{bits}"
    share = " x ".join(map(str, block)).removeprefix("1 x ")
    share = {"tensor": "each tensor", "channel": "each output"}.get(way, share)
    what = f"{kind}, a scale{' and a zero' * uneven} for {share}"
    return Held(weight, tuple(parts), (n, k), make, what, dtype)


def inputs(source: Source, name: str, shape: str, n: int, most: int, each: int) -> int:
    """How many inputs a packed weight has: the last word need not be full."""
    if shape not in source:
        return most
    said = source[shape].read(None).tolist() if source[shape].shape == (2,) else []
    if said[:1] != [n] or not most - each < said[1] <= most:
        raise UsageError(f"tensor {shape} says {said}, but {name} holds {n} x {most}")
    return int(said[1])


def block_of(said: Data, n: int, k: int) -> tuple[tuple[int, int], str]:
    """How many rows and columns share a scale, and the words for it."""
    way = said["strategy"]
    if way == "group":
        size = whole(said, "group_size", None)
        size = k if size == -1 else size
        if k % size:
            raise wrong(f"{KEY}: group_size {size} does not divide the {k} inputs of a weight")
        return (1, size), f"groups of {size}"
    if way == "block":
        block = said.get("block_structure")
        if not isinstance(block, list) or [type(b) for b in block] != [int, int] or min(block) < 1:
            raise wrong(f"{KEY}: block_structure is {block!r}; it must be as [128, 128]")
        return (block[0], block[1]), f"blocks of {block[0]} x {block[1]}"
    return ((n, k), "one tensor") if way == "tensor" else ((1, k), "outputs")


def numbers(
    name: str, bits: int, packed: bool, shape: tuple[int, int], block: tuple[int, int], uneven: bool, ordered: bool,
    q: Tensor, scale: Tensor, *more: Tensor,
) -> Numbers:  # fmt: skip
    n, k = shape
    count = -(-n // block[0]), -(-k // block[1])
    zero = more[0] if uneven else None
    if packed:
        q = signed(fields(q, bits)[:, :k], bits)
    if zero is not None and zero.dtype == torch.int32:
        zero = signed(fields(zero.t(), bits)[:, :n], bits).t()
    zero = None if zero is None else zero.reshape(count)
    group = more[-1].long() if ordered else None
    # All -1: they lie in order.
    plain = torch.arange(k, device=q.device) // block[1]
    if group is not None and (bool((group == -1).all()) or torch.equal(group, plain)):
        group = None
    if group is not None and bool((group < 0).any() or (group >= count[1]).any()):
        raise UsageError(f"tensor {name}: its g_idx names groups that it does not have")
    return Numbers(q, scale.reshape(count), zero, block, group)
