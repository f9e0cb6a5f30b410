"""mxfp4 (gpt-oss): experts in e2m1, sixteen numbers v, with a power of two for each 32 of them: w = v(q) 2^(s - 127).

X_blocks (e n k/32 16): two numbers a byte, the lower half first; X_scales (e n k/32). X is their (e k n). The format is
that of the Open Compute Project's microscaling formats 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.checkpoint.quantised.fp8 import factors
from regard.checkpoint.quantised.numbers import Held, Numbers, beside, fields, fits
from regard.checkpoint.rules import Data
from regard.checkpoint.store import Source

# One bit for the sign, two for the exponent, one after the point.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TABLE = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.bfloat16, device="cpu")
SHARED, BYTES = 32, 16  # numbers with a scale, and their bytes


def held(settings: Data, source: Source) -> Iterator[Held]:
    for blocks, x in source.items():
        name = blocks.removesuffix("_blocks")
        if name == blocks or x.dtype != torch.uint8:
            continue
        scales = beside(source, name + "_scales", blocks)
        *outer, count = shape = source[scales].shape or (0,)
        what = f"its scales {shape}"
        fits(blocks, source, (*outer, count, BYTES), what=what, kinds=[torch.uint8])
        fits(scales, source, shape, what=what, kinds=[torch.uint8])
        yield Held(
            name, (blocks, scales), (*outer, SHARED * count), numbers,
            f"mxfp4, a scale for {SHARED}", torch.bfloat16, turned=True,
        )  # fmt: skip


def numbers(blocks: Tensor, scales: Tensor) -> Numbers:
    q = TABLE[fields(blocks, 4).flatten(-2).int()]
    return Numbers(q, factors(scales), block=(1, SHARED))
