"""What the linear layers of a model read, found by giving it random tokens.

    read_by(model)      second moments of turned inputs, by the id of a linear layer or a head

int8 rounds the weights so that its errors are small where inputs are large (`feedback` in regard/kernels/linear.py).
In a trained model a few directions of the inputs are much larger than the others, whatever it reads.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.fast.specialise import Row, Specialise, mixed
from regard.kernels.linear import is_fast, turned
from regard.layers import LMHead
from regard.models import Model
from regard.models.adapt import Int4Linear, LowRank
from regard.models.inputs import random_inputs

ROWS, TOKENS = 8, 32  # more tell no more
PAGEOUT = 21  # Linux's MADV_PAGEOUT


@torch.inference_mode()
def read_by(model: Model) -> dict[int, Tensor]:
    maker = Reading()
    copy: Any = maker.copy(model).eval()
    device = next(model.parameters()).device
    ids, source = random_inputs(model, ROWS, TOKENS)
    given = {} if source is None else {"source": source.to(device)}
    hidden = copy.hidden(ids.to(device), **given)
    if isinstance(model.head, LMHead):
        maker.note(id(model.head), model.head.features(hidden))
    return maker.found


class Reading(Specialise):
    """A copy of a model, its weights shared, whose linear layers note what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self.last: tuple[Tensor, Tensor] | None = None

    def note(self, key: int, x: Tensor) -> None:
        # Layers that read the same thing do so one after the other.
        if self.last is None or self.last[0] is not x:
            h = turned(x.float()).flatten(0, -3)  # tokens k/64 64
            self.last = x, torch.einsum("nti,ntj->tij", h, h)
        self.found[key] = self.found.get(key, 0) + self.last[1]

    def linear(self, module: nn.Module) -> nn.Module:
        new = self.copy_as(mixed(Noting, type(module)), module)
        new.key, new.maker = id(module), self
        return new

    table: ClassVar[Mapping[type, Row]] = dict.fromkeys(
        (nn.Linear, LowRank, Int4Linear), lambda maker, m: maker.linear(m)
    )


class Noting(nn.Module):
    """A linear layer that notes what it reads."""

    key: int
    maker: Reading
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        self.maker.note(self.key, x)
        if not isinstance(self, nn.Linear) or is_fast(self.weight.dtype):
            y = super().forward(x)
        else:
            bias = None if self.bias is None else self.bias.float()
            y = F.linear(x.float(), self.weight.float(), bias).to(x.dtype)
        if getattr(self.weight, "mapped", False):
            leave(self.weight)
        return y


def leave(weight: Tensor) -> None:
    """The pages of a file that a weight lies in are not held in memory for it: they are read again when they are
    packed. Where the system does not do that, they stay."""
    size = os.sysconf("SC_PAGESIZE")
    first = -(-weight.data_ptr() // size) * size
    length = (weight.data_ptr() + weight.nbytes) // size * size - first
    if sys.platform == "linux" and length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), PAGEOUT)
