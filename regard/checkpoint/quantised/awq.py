"""AWQ: 4 bits, w = (q - z) s with a scale and a zero for each group of inputs and output.

X.qweight (k n/8) and X.qzeros (g n/8) hold the numbers of eight outputs a word: from the lowest bits up outputs 0, 2,
4, 6, 1, 3, 5, 7 ("gemm"); X.scales (g n).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from regard.checkpoint.quantised.gptq import triples
from regard.checkpoint.quantised.numbers import KEY, Held, Numbers, fields, out_of_order, whole
from regard.checkpoint.rules import Data, wrong
from regard.checkpoint.store import Source

# Where outputs 0, 1, 2, ... of a word lie.
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def held(settings: Data, source: Source) -> Iterator[Held]:
    bits, size = (
        whole(settings, "bits w_bit", 4, (4,)),
        whole(settings, "group_size q_group_size", 128),
    )
    form = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if form != "gemm":
        raise wrong(f"{KEY}.version is {form!r}; Regard reads AWQ's gemm")
    yield from triples(source, size, bits, (1, 8), numbers)


def numbers(
    size: int, name: str, words: Tensor, zeros: Tensor, scales: Tensor, *index: Tensor
) -> Numbers:
    group = out_of_order(index[0], size, len(scales), name) if index else None
    return Numbers(outputs(words), scales.t(), outputs(zeros), (1, size), group)


def outputs(words: Tensor) -> Tensor:
    """(r n/8) words -> (n r) numbers."""
    return fields(words, 4).unflatten(1, (-1, 8))[..., PLACES].flatten(1).t()
