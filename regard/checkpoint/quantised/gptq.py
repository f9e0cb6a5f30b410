"""GPTQ: 2, 4 or 8 bits, w = (q - z) s with a scale and a zero for each group of inputs and output.

X.qweight (k/p n) and X.qzeros (g n/p) hold p = 32/bits numbers a word, along k and along n, the lowest bits first;
X.scales (g n); X.g_idx (k) is the group of each input, in any order where the format's `desc_act` is on. The old format
(`checkpoint_format` "gptq") stores zeros less one, in their own bits: z = (stored + 1) mod 2^bits. gptq_v2 stores them
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from regard.checkpoint.quantised.numbers import (
    KEY,
    WHOLE,
    Held,
    Numbers,
    beside,
    fields,
    fits,
    is_matrix,
    out_of_order,
    whole,
)
from regard.checkpoint.rules import Data, wrong
from regard.checkpoint.store import Source

FORMATS = {"gptq": 1, "gptq_v2": 0}  # and what is added to their zeros


def held(settings: Data, source: Source) -> Iterator[Held]:
    bits, size = whole(settings, "bits", 4, (2, 4, 8)), whole(settings, "group_size", 128)
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if not isinstance(form, str) or form not in FORMATS:
        raise wrong(f"{KEY}.checkpoint_format is {form!r}; Regard reads {', '.join(FORMATS)}")
    yield from triples(source, size, bits, (32 // bits, 1), partial(numbers, bits, FORMATS[form]))


def triples(
    source: Source, size: int, bits: int, each: tuple[int, int], make: Callable[..., Numbers]
) -> Iterator[Held]:
    """Weights in words that hold `each` rows and columns of W^T, their zeros in words along n, and scales."""
    for words, x in source.items():
        module = words.removesuffix(".qweight")
        if module == words or not is_matrix(x, torch.int32):
            continue
        k, n = (count * many for count, many in zip(x.shape, each, strict=True))
        group = k if size == -1 else size
        count = -(-k // group)
        zeros, scales = (beside(source, f"{module}.{p}", words) for p in ("qzeros", "scales"))
        what = f"{bits} bits in groups of {group} of {k} x {n}"
        fits(scales, source, (count, n), what=what)
        fits(zeros, source, (count, -(-n * bits // 32)), what=what, kinds=WHOLE[:1])
        parts = [words, zeros, scales]
        if (index := f"{module}.g_idx") in source:
            fits(index, source, (k,), what=what, kinds=WHOLE)
            parts.append(index)
        what, dtype = f"{bits} bits, a scale and a zero for {group}", source[scales].dtype
        read = partial(make, group, words)
        yield Held(f"{module}.weight", tuple(parts), (n, k), read, what, dtype, linear=True)


def numbers(
    bits: int, less: int, size: int, name: str, words: Tensor, zeros: Tensor, scales: Tensor, *index: Tensor
) -> Numbers:  # fmt: skip
    q = fields(words.t(), bits)  # n k
    zero = (fields(zeros, bits)[:, : len(q)] + less & (1 << bits) - 1).t()
    group = out_of_order(index[0], size, len(scales), name) if index else None
    return Numbers(q, scales.t(), zero, (1, size), group)
