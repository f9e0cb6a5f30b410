"""compressed-tensors (llm-compressor, vLLM): w = (q - z) s, as a group of `config_groups` says for its layers.

pack-quantized: X.weight_packed (n k/p) holds p = 32/bits numbers a word along k, the lowest bits first, half of their
range added; zeros, where there are some, lie so along n. naive-quantized, int-quantized, float-quantized: X.weight is
int8 or e4m3, and X.weight_zero_point int8. X.weight_scale: one, one for each output, for each group of inputs, or for
each block. X.weight_g_idx, where it is there, is the group of each input. The product is of the scale's type.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from regard.checkpoint.quantised.fp8 import EIGHT
from regard.checkpoint.quantised.numbers import (
    KEY,
    WHOLE,
    Held,
    Numbers,
    beside,
    fields,
    fits,
    is_matrix,
    matches,
    out_of_order,
    signed,
    whole,
)
from regard.checkpoint.rules import Data, wrong
from regard.checkpoint.store import Source
from regard.errors import UsageError

PACKED = "pack-quantized"
FORMATS = (PACKED, "naive-quantized", "int-quantized", "float-quantized")
FORMS = ("tensor", "channel", "group", "block")
CLASSES = ("Linear", "Embedding")


def held(settings: Data, source: Source) -> Iterator[Held]:
    groups = list(checked(settings))
    sparse = settings.get("sparsity_config") or {}
    form = sparse.get("format", "dense") if isinstance(sparse, dict) else sparse
    if form != "dense":
        raise wrong(f"{KEY}.sparsity_config has format {form!r:.80}; known: dense")
    for name, x in source.items():
        weight = name.removesuffix("_packed")
        packed = name.endswith(".weight_packed")
        scale = weight + "_scale"
        if packed and is_matrix(x, torch.int32):
            beside(source, scale, name)
        elif scale not in source or not is_matrix(x, torch.int8, *EIGHT):
            continue
        module = weight.removesuffix(".weight")
        group = group_of(groups, module)
        if packed != (group["format"] == PACKED):
            raise UsageError(f"tensor {name} is not {group['format']}, which {KEY} says of it")
        yield one(source, name, weight, group["weights"], packed)


def checked(settings: Data) -> Iterator[Data]:
    """Groups whose settings are what they must be."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise wrong(f"{KEY}.config_groups is {groups!r:.80}; it must say what is packed, and how")
    for group in groups.values():
        said = group if isinstance(group, dict) else {}
        weights, targets = said.get("weights"), said.get("targets")
        if not isinstance(weights, dict) or not isinstance(targets, list):
            raise wrong(f"{KEY}.config_groups has {group!r:.80}; each has targets and weights")
        form = said.get("format") or settings.get("format")
        if form not in FORMATS:
            raise wrong(f"{KEY}.format is {form!r}; Regard reads {', '.join(FORMATS)}")
        way = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
        if way not in FORMS:
            raise wrong(f"{KEY}: weights.strategy is {way!r}; Regard reads {', '.join(FORMS)}")
        whole(weights, "num_bits", 8, (2, 4, 8) if form == PACKED else (8,))
        yield {"format": form, "targets": targets, "weights": weights | {"strategy": way}}


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
    n, k = source[name].shape
    each = 32 // bits
    if packed:
        k = inputs(source, name, f"{weight}_shape", n, k * each, each)
    block, form = block_of(said, n, k)
    count = (-(-n // block[0]), -(-k // block[1]))
    scale, zero, index = (f"{weight}_{end}" for end in ("scale", "zero_point", "g_idx"))
    what = f"{bits} bits in {form} of {n} x {k}"
    sizes = (count, *((count[:1],) if count[1] == 1 else ()), *(((),) if count == (1, 1) else ()))
    fits(scale, source, *sizes, what=what)
    parts = [name, scale]
    uneven = not said.get("symmetric", True)
    if uneven:
        words = packed and way in ("group", "channel")
        beside(source, zero, name)
        sizes = ((-(-n // each), count[1]),) if words else sizes
        fits(zero, source, *sizes, what=what, kinds=[torch.int32 if words else torch.int8])
        parts.append(zero)
    if ordered := way == "group" and index in source:
        fits(index, source, (k,), what=what, kinds=WHOLE)
        parts.append(index)
    make = partial(numbers, weight, bits, packed, (n, k), block, uneven, ordered)
    kind = "fp8" if source[name].dtype in EIGHT else f"int{bits}"
    share = " x ".join(map(str, block)).removeprefix("1 x ")
    share = {"tensor": "each tensor", "channel": "each output"}.get(way, share)
    what = f"{kind}, a scale{' and a zero' * uneven} for {share}"
    return Held(weight, tuple(parts), (n, k), make, what, source[scale].dtype)


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
    group = out_of_order(more[-1], block[1], count[1], name) if ordered else None
    zero = None if zero is None else zero.reshape(count)
    return Numbers(q, scale.reshape(count), zero, block, group)
