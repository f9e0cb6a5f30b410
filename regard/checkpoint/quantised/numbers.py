"""What all quantised formats have in common: small numbers, and a scale for each block of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.checkpoint.rules import Data, wrong
from regard.checkpoint.store import FLOATS, Source, Stored
from regard.errors import UsageError
from regard.kernels.packed import E4M3, GROUPS, Packed

ROWS = 1024  # that are unpacked at once
KEY = "quantization_config"
WHOLE = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Numbers:
    """W (... n k) in few bits: w = (q - zero) scale gain, in float32, by a scale for each block of rows and columns.

    scale and zero (... n' k'); the last blocks may be smaller. `group`: the block of each column, where they do not lie
    in order."""

    q: Tensor
    scale: Tensor
    zero: Tensor | None = None
    block: tuple[int, int] = (1, 1)
    group: Tensor | None = None
    gain: float = 1.0

    def dense(self, dtype: torch.dtype) -> Tensor:
        w = torch.empty(self.q.shape, dtype=dtype, device="cpu")
        for e in range(len(w)) if w.dim() > 2 else ():
            w[e] = replace(self, q=self.q[e], scale=self.scale[e]).dense(dtype)
        for first in range(0, len(w), ROWS) if w.dim() == 2 else ():
            rows = slice(first, min(first + ROWS, len(w)))
            part = self.q[rows].float()
            if self.zero is not None:
                part -= self.spread(self.zero, rows)
            part *= self.spread(self.scale, rows)
            w[rows] = part if self.gain == 1 else part * self.gain
        return w

    def spread(self, x: Tensor, rows: slice) -> Tensor:
        """A number of each block for some rows and all columns."""
        x = x[torch.arange(rows.start, rows.stop, device=x.device) // self.block[0]].float()
        if self.group is not None:
            return x[:, self.group]
        k = self.q.shape[1]
        return x if x.shape[1] == 1 else x.repeat_interleave(self.block[1], 1)[:, :k]

    def packed(self, kind: str, rows: slice, dtype: torch.dtype) -> Packed | None:
        """Some rows as GPU graphs read them, or None where these cannot hold such numbers."""
        if self.q.dim() != 2 or self.group is not None or self.gain != 1:
            return None
        k, many = self.q.shape[1], self.scale.shape[1]
        q, scale = self.q[rows], self.spread(self.scale, rows) if many == 1 else self.scale
        if kind == "fp8":
            one = q.dtype == E4M3 and many == 1 and self.zero is None
            return Packed(q.clone(), scale[:, 0].contiguous(), dtype) if one else None
        size = k if many == 1 else self.block[1]
        group = next((g for g in GROUPS if size % g == 0), 0)
        if q.is_floating_point() or not group or k % size or self.block[0] > 1:
            return None
        scale = self.scale[rows].float()  # n k'
        zero = torch.zeros_like(scale) if self.zero is None else self.zero[rows].float()
        # Signed numbers count from -8; those without a sign from 0.
        q = q.to(torch.int16) + (8 if q.dtype == torch.int8 else 0)
        zero = ((8 if self.q.dtype == torch.uint8 else 0) - zero) * scale
        if bool((q < 0).any() or (q > 15).any()):
            return None
        pair = torch.stack([scale, zero], -1).repeat_interleave(size // group, 1).bfloat16()
        low, high = q.to(torch.uint8).unflatten(1, (-1, 2, group // 2)).unbind(2)
        return Packed((low | high << 4).flatten(1), pair.contiguous(), dtype)


@dataclass(frozen=True)
class Held:
    """A weight as its folder holds it: `numbers` makes, of the tensors `parts`, what stands for (n k), of the given
    shape. `dtype`: in which the format's own unpacking gives it."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    numbers: Callable[..., Numbers]
    what: str
    dtype: torch.dtype = torch.float32
    # Tensors that say how the parts are read.
    beside: tuple[str, ...] = ()
    # Rows are outputs, however the family stores its weights.
    linear: bool = False
    # Stored (... k n) where it is not quantised.
    turned: bool = False
    # A block of zeros has the scale 0.
    zeros: bool = False

    def read(self, source: Source) -> Numbers:
        """In memory that is lent until the next is read."""
        found = self.numbers(*source.borrow(list(self.parts)))
        scale = found.scale.float()
        if not bool(scale.isfinite().all()) or not (self.zeros or bool((scale != 0).all())):
            some = "infinite or no numbers" if self.zeros else "0, infinite or no numbers"
            raise UsageError(
                f"tensor {self.name} has scales that are {some}; copy its folder again"
            )
        return found

    def dense(self, source: Source) -> Tensor:
        w = self.read(source).dense(self.dtype).reshape(self.shape)
        return w.mT if self.turned else w


# A format's reader: what the config says of it and all tensors -> the weights they hold. It raises a UsageError for
# what does not fit.
Reader = Callable[[Data, Source], Iterable[Held]]


def beside(source: Source, name: str, first: str) -> str:
    """A tensor that must be there, since `first` is."""
    if name not in source:
        raise UsageError(f"tensor {name} is missing from the weights: {first} is packed with it")
    return name


def fits(
    name: str, source: Source, *shapes: tuple[int, ...], what: str, kinds: Iterable[torch.dtype] = FLOATS
) -> None:  # fmt: skip
    """A tensor has one of these shapes, which `what` asks for, and one of these types."""
    shape, dtype = source[name].shape, source[name].dtype
    if shape not in shapes:
        some = " or ".join(map(str, dict.fromkeys(shapes)))
        raise UsageError(f"tensor {name} has shape {shape}, but {what} ask for {some}")
    if dtype not in kinds:
        known = " or ".join(str(kind).removeprefix("torch.") for kind in kinds)
        stored = str(dtype).removeprefix("torch.")
        raise UsageError(f"tensor {name} is stored as {stored}; here it must be {known}")


def is_matrix(x: Stored, *kinds: torch.dtype) -> bool:
    """Whether a tensor is a matrix of one of these types."""
    return x.dtype in kinds and len(x.shape) == 2 and 0 not in x.shape


def whole(settings: Data, names: str, default: Any, known: Iterable[int] = ()) -> int:
    """A whole number under the first of these names: one of those known, or more than 0 (-1: all)."""
    name = next((n for n in names.split() if settings.get(n) is not None), names.split()[0])
    value = default if settings.get(name) is None else settings[name]
    few = tuple(known)
    if type(value) is not int or (value not in few if few else value < 1 and value != -1):
        some = f"one of {', '.join(map(str, few))}" if few else "a number of inputs, or -1 for all"
        raise wrong(f"{KEY}.{name} is {value!r}; Regard reads {some}")
    return value


def out_of_order(index: Tensor, size: int, count: int, name: str) -> Tensor | None:
    """The group of each input, or None where they lie in order, `size` in each. (All -1 says that, too.)"""
    index = index.long()
    plain = torch.arange(len(index), device=index.device) // size
    if bool((index == -1).all()) or torch.equal(index, plain):
        return None
    if bool((index < 0).any() or (index >= count).any()):
        raise UsageError(f"tensor {name}: its g_idx names groups that it does not have")
    return index


def fields(words: Tensor, bits: int) -> Tensor:
    """Numbers without a sign, of so many bits, out of words of 32, the lowest first: (... words) -> (... numbers)."""
    b = words.contiguous().view(torch.uint8)
    if bits == 8:
        return b
    at = torch.arange(0, 8, bits, dtype=torch.uint8, device=b.device)
    return (b[..., None] >> at & (1 << bits) - 1).flatten(-2)


def signed(q: Tensor, bits: int) -> Tensor:
    """Numbers that were stored with half of their range added."""
    return (q.to(torch.int16) - (1 << bits - 1)).to(torch.int8)


# Lists of layers that are not quantised, by the names that formats have for them.
LEFT_OUT = ("modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules")


def matches(pattern: str, module: str) -> bool:
    """Whether a name from the config means this layer, as a whole, its end, or what it is in; * stands for anything,
    `re:` begins a regular expression."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise wrong(f"{KEY}: {pattern!r} is not a regular expression ({error})") from None
    module, parts = f".{module}.", f".{pattern}.".split("*")
    if len(parts) == 1:
        return parts[0] in module
    return re.search(".*".join(map(re.escape, parts)), module) is not None


def check_left_out(settings: Mapping[str, Any], packed: Iterable[Held]) -> None:
    """What the config leaves out must not be packed: its numbers would mean something else."""
    for key in LEFT_OUT:
        names = settings.get(key) or []
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise wrong(f"{KEY}.{key} is {names!r:.80}; it must be a list of names")
        for held in packed if names else ():
            module = held.name.removesuffix(".weight")
            if any(matches(n, module) for n in names):
                raise wrong(f"{KEY}.{key} leaves {module} out, but {held.parts[0]} is packed")
