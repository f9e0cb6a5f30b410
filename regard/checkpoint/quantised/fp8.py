"""fp8: weights in e4m3 (or e5m2), with a scale that they are multiplied by: w = q s.

X.weight beside X.weight_scale_inv (DeepSeek; in spite of its name a factor) or X.weight_scale. One scale for the
tensor, one for each output (n) or (n 1), or one for each block of `weight_block_size`. Scales may be powers of two
alone (e8m0). What activations are rounded by (`activation_scheme`) belongs to its products, not to the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from regard.checkpoint.quantised.numbers import KEY, Held, Numbers, fits
from regard.checkpoint.rules import Data, wrong
from regard.checkpoint.store import FLOATS, Source
from regard.errors import UsageError

EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (*FLOATS, torch.float8_e8m0fnu, torch.uint8)


def held(settings: Data, source: Source) -> Iterator[Held]:
    block = settings.get("weight_block_size")
    valid = isinstance(block, list) and [type(n) for n in block] == [int, int] and min(block) > 0
    if block is not None and not valid:
        raise wrong(f"{KEY}.weight_block_size is {block!r}; it must be two sizes, as [128, 128]")
    size = tuple(block) if block else None
    for name, x in source.items():
        scales = (name + "_scale_inv", name + "_scale")
        scale = next((s for s in scales if s in source), "")
        if x.dtype not in EIGHT or not scale or len(x.shape) < 2 or 0 in x.shape:
            continue
        fits(scale, source, source[scale].shape, what="", kinds=SCALES)
        form, what = form_of(name, x.shape, source[scale].shape, size)
        yield Held(name, (name, scale), x.shape, partial(numbers, form), f"fp8, {what}")


def form_of(
    name: str, shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[tuple[int, int], str]:
    """The block that shares a scale, by the shape of the scales."""
    *outer, n, k = shape
    if all(size == 1 for size in scale):
        return (n, k), "a scale for each tensor"
    if scale in ((*outer, n), (*outer, n, 1)):
        return (1, k), "a scale for each output"
    if block and scale == (*outer, -(-n // block[0]), -(-k // block[1])):
        return block, f"a scale for {block[0]} x {block[1]}"
    fit = f"blocks of {block[0]} x {block[1]}" if block else "a tensor or its outputs"
    raise UsageError(
        f"tensor {name} of shape {shape} has scales of shape {scale}, which does not fit {fit}"
    )


def numbers(block: tuple[int, int], q: Tensor, scale: Tensor) -> Numbers:
    *outer, n, k = q.shape
    return Numbers(
        q, factors(scale).reshape(*outer, -(-n // block[0]), -(-k // block[1])), block=block
    )


def factors(scale: Tensor) -> Tensor:
    """Scales as numbers: bytes are exponents."""
    if scale.dtype == torch.uint8:
        # A 255 is not a number.
        return torch.where(scale == 255, torch.nan, torch.pow(2.0, scale.int() - 127))
    return scale.float()
