"""AWQ: 4 bits, w = (q - z) s with a scale and a zero for each group of inputs and output.

X.qweight (k n/8) and X.qzeros (g n/8) hold the numbers of eight outputs a word: from the lowest bits up outputs 0, 2,
4, 6, 1, 3, 5, 7 ("gemm"); X.scales (g n).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from regard.checkpoint.quantised.numbers import (
    KEY,
    Held,
    Numbers,
    beside,
    by_group,
    fields,
    fits,
    whole,
)
from regard.checkpoint.rules import Data, wrong
from regard.checkpoint.store import Source

# Where outputs 0, 1, 2, ... of a word lie.
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def held(settings: Data, source: Source) -> Iterator[Held]:
    whole(settings, "bits w_bit", 4, (4,))
    size = whole(settings, "group_size q_group_size", 128)
    form = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if form != "gemm":
        raise wrong(f"{KEY}.version is {form!r}; Regard reads AWQ's gemm")
    for words, x in source.items():
        module = words.removesuffix(".qweight")
        if module == words or x.dtype != torch.int32 or len(x.shape) != 2:
            continue
        k, n = x.shape[0], 8 * x.shape[1]
        group, count = by_group(k, size)
        zeros, scales = (beside(source, f"{module}.{p}", words) for p in ("qzeros", "scales"))
        what = f"4 bits in groups of {group} of {k} x {n}"
        fits(scales, source, (count, n), what=what)
        fits(zeros, source, (count, n // 8), what=what)
        make, dtype = partial(numbers, group), source[scales].dtype
        what = f"4 bits, a scale and a zero for {group}"
        parts = (words, zeros, scales)
        yield Held(f"{module}.weight", parts, (n, k), make, what, dtype, linear=True)


def numbers(size: int, words: Tensor, zeros: Tensor, scales: Tensor) -> Numbers:
    return Numbers(outputs(words), scales.t(), outputs(zeros), (1, size))


def outputs(words: Tensor) -> Tensor:
    """(r n/8) words -> (n r) numbers."""
    return fields(words, 4).unflatten(1, (-1, 8))[..., PLACES].flatten(1).t()
