"""GPTQ: 2, 4 or 8 bits, w = (q - z) s with a scale and a zero for each group of inputs and output.

X.qweight (k/p n) and X.qzeros (g n/p) hold p = 32/bits numbers a word, along k and along n, the lowest bits first;
X.scales (g n); X.g_idx (k) is the group of each input, in any order where the format's `desc_act` is on. The old format
(`checkpoint_format` "gptq") stores zeros less one, in their own bits: z = (stored + 1) mod 2^bits. gptq_v2 stores them
as they are.
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
from regard.errors import UsageError

FORMATS = {"gptq": 1, "gptq_v2": 0}  # and what is added to their zeros


def held(settings: Data, source: Source) -> Iterator[Held]:
    bits, size = whole(settings, "bits", 4, (2, 4, 8)), whole(settings, "group_size", 128)
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if form not in FORMATS:
        raise wrong(f"{KEY}.checkpoint_format is {form!r}; Regard reads {', '.join(FORMATS)}")
    each = 32 // bits
    for words, x in source.items():
        module = words.removesuffix(".qweight")
        if module == words or x.dtype != torch.int32 or len(x.shape) != 2:
            continue
        k, n = each * x.shape[0], x.shape[1]
        group, count = by_group(k, size)
        zeros, scales = (beside(source, f"{module}.{p}", words) for p in ("qzeros", "scales"))
        what = f"{bits} bits in groups of {group} of {k} x {n}"
        fits(scales, source, (count, n), what=what)
        fits(zeros, source, (count, -(-n // each)), what=what)
        parts = [words, zeros, scales]
        if (index := f"{module}.g_idx") in source:
            fits(index, source, (k,), what=what)
            parts.append(index)
        make = partial(numbers, words, bits, group, FORMATS[form])
        dtype = source[scales].dtype
        what = f"{bits} bits, a scale and a zero for {group}"
        yield Held(f"{module}.weight", tuple(parts), (n, k), make, what, dtype, linear=True)


def numbers(
    name: str, bits: int, size: int, less: int, words: Tensor, zeros: Tensor, scales: Tensor, *index: Tensor
) -> Numbers:  # fmt: skip
    q = fields(words.t(), bits)  # n k
    zero = (fields(zeros, bits)[:, : len(q)] + less & (1 << bits) - 1).t()
    group = None
    if index and not torch.equal(
        index[0].long(), torch.arange(q.shape[1], device=q.device) // size
    ):
        group = index[0].long()
        if bool((group < 0).any() or (group >= len(scales)).any()):
            raise UsageError(f"tensor {name}: its g_idx names groups that it does not have")
    return Numbers(q, scales.t(), zero, (1, size), group)
