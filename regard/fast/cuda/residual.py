"""What flows through the blocks of a step: a stream whose sums and norms are left to who reads it, and the products.

Matrices that read the same input are one matrix (q|k|v, gate|up, and MLA's two down-projections), of which the plain
model's are views from then on: nothing is held twice. A norm is left to the product that reads it, and of many rows a
sum is left to the norm that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.fast.specialise import row_of
from regard.kernels.packed import Packed, PackedLinear
from regard.kernels.triton.linear import ACTIVATIONS, MOST, Rms, linear, reference
from regard.kernels.triton.wide import add_norm, gated, product
from regard.layers import Add, RMSNorm


def rms(norm: nn.Module | None) -> Rms | None:
    """An RMS norm as the kernels take it; a stranger's, which may compute something else, is none."""
    if not isinstance(norm, RMSNorm) or row_of({RMSNorm: True}, type(norm)) is None:
        return None
    return norm.weight, norm.eps, float(norm.plus_one)


@dataclass
class ResidualStream:
    """The residual stream (n m). What is added last may be left to the norm that reads it: always of many rows
    (`many`), and where it has a norm of its own or comes in parts."""

    value: Tensor
    many: bool
    fast: bool = True
    more: Tensor | None = None  # to be added, perhaps in parts (s n m),
    norm: nn.Module | None = None  # after this norm

    def add(self, product: Product, o: Tensor, norm: nn.Module | None = None) -> ResidualStream:
        """The stream with what `product` makes of o."""
        if self.many:
            return self.plus(product.of_many(o, split_k=True), norm)
        if norm is not None:
            return self.plus(product(o), norm)
        return ResidualStream(product(o, residual=self.whole()), False, self.fast)

    def plus(self, y: Tensor, norm: nn.Module | None = None) -> ResidualStream:
        """The stream with y (n m), or parts of it (s n m)."""
        return ResidualStream(self.whole(), self.many, self.fast, y, norm)

    def whole(self) -> Tensor:
        """All of it added up."""
        return tensor(self)


@dataclass
class Normed:
    """A stream whose norm is left to the product that reads it."""

    stream: ResidualStream
    norm: nn.Module | None
    made: Tensor | None = None

    def take(self, rows: Tensor) -> Normed:
        s = self.stream
        more = None if s.more is None else s.more[..., rows, :]
        return Normed(ResidualStream(s.value[rows], s.many, s.fast, more, s.norm), self.norm)

    def tensor(self) -> Tensor:
        """The sum made, in the stream too, and normed."""
        if self.made is not None:
            return self.made
        s, norm = self.stream, self.norm
        if s.more is not None and s.norm is not None and rms(s.norm) is None:
            plus = s.more.sum(0).to(s.value.dtype) if s.more.dim() == 3 else s.more
            s.more, s.norm = s.norm(plus), None
        s.value, y = add_norm(s.value, s.more, rms(norm), rms(s.norm), s.fast)
        s.more = s.norm = None
        self.made = y if norm is None or rms(norm) is not None else norm(y)
        return self.made


# What parts read: in a block over tensors these alone.
Read = Tensor | ResidualStream | Normed
# What they add themselves to, or nothing.
Residual = Tensor | ResidualStream | None


def tensor(x: Read) -> Tensor:
    """What a part reads, made; in a block over tensors it is one already."""
    if isinstance(x, Tensor):
        return x
    return (x if isinstance(x, Normed) else Normed(x, None)).tensor()


def added(add: Add, product: Product, o: Tensor, residual: Residual) -> Tensor | ResidualStream:
    """What `product` makes of o, onto a stream; or as a plain part adds it, to a tensor or to nothing."""
    if isinstance(residual, ResidualStream):
        return residual.add(product, o, add.norm)
    return add(product(o), residual)


class LeftNorm(nn.Module):
    """A norm of the stream, for the product that reads it; `made` at once where the stream itself is normed."""

    def __init__(self, norm: nn.Module | None, made: bool = False):
        super().__init__()
        self.norm, self.made = norm, made

    def forward(self, x: ResidualStream) -> Normed | ResidualStream:
        left = Normed(x, self.norm)
        return ResidualStream(left.tensor(), x.many, x.fast) if self.made else left


@dataclass
class Product:
    """Linear layers of one input as one product: act(x W^T + b) + residual, x perhaps still to be normed; W perhaps
    packed. `fast` is whether kernels may be used."""

    weight: Tensor | Packed
    bias: Tensor | None = None
    act: str = ""
    gated: bool = False
    fast: bool = True

    @classmethod
    def of(
        cls,
        modules: Sequence[nn.Linear | PackedLinear],
        act: str = "",
        gated: bool = False,
        fast: bool = True,
    ) -> Product:
        """Linear layers that read the same x, as one."""
        bias = None
        if (like := next((m.bias for m in modules if m.bias is not None), None)) is not None:
            each = [like.new_zeros(m.out_features) if m.bias is None else m.bias for m in modules]
            bias = joined(each, [m.bias for m in modules])
        return cls(weight_of(modules), bias, act, gated, fast)

    def __call__(
        self,
        x: Read,
        split_k: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """x, perhaps with a sum or a norm still to be made: few rows by `linear`, whose kernel has norm and residual;
        many by `of_many`. `split_k`: of many rows perhaps in parts (s n o), which the reader adds up; nothing else for
        few. `residual` only of a plain tensor."""
        norm = None
        if isinstance(x, ResidualStream):
            x = Normed(x, None)
        if isinstance(x, Normed):
            assert residual is None
            if x.stream.many:
                return self.of_many(x.tensor(), split_k)
            norm = rms(x.norm) if x.stream.more is None else None
            x = x.tensor() if norm is None else x.stream.value
        elif len(x) > MOST and residual is None:
            return self.of_many(x, split_k)
        form = linear if self.fast else reference
        return form(
            x,
            self.weight,
            self.bias,
            norm=norm,
            act=self.act,
            gated=self.gated,
            residual=residual,
        )

    def of_many(self, x: Tensor, split_k: bool = False) -> Tensor:
        """Of many rows; with `split_k` perhaps in parts (s n o)."""
        if self.gated:
            return gated(x, self.weight, self.bias, self.act, self.fast)
        return ACTIVATIONS[self.act](product(x, self.weight, self.bias, self.fast, split_k))


def weight_of(modules: Sequence[nn.Linear | PackedLinear]) -> Tensor | Packed:
    """The matrices of linear layers, one under the other: all of them packed, or none."""
    packed = [m for m in modules if isinstance(m, PackedLinear)]
    if not packed:
        weights = [m.weight for m in modules]
        return joined(weights, weights)
    assert len(packed) == len(modules)
    q, scales = [m.q for m in packed], [m.scales for m in packed]
    return Packed(joined(q, q), joined(scales, scales), packed[0].dtype)


def joined(parts: Sequence[Tensor], owners: Sequence[Tensor | None]) -> Tensor:
    """Matrices, or biases, one under the other. What owns them owns a view of the whole from now on."""
    first = parts[0].detach()
    if len(parts) == 1:
        return first
    size = (sum(map(len, parts)), *first.shape[1:])
    ends = [part.data_ptr() + part.nbytes for part in parts]
    if all(end == part.data_ptr() for end, part in zip(ends, parts[1:], strict=False)) and all(
        part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for part in parts
    ):
        # They were joined before.
        return first.as_strided(size, first.stride())
    whole = torch.cat([part.detach() for part in parts])
    views = whole.split([len(part) for part in parts])
    for owner, view in zip(owners, views, strict=True):
        if owner is not None:
            owner.data = view
    return whole


def vocabulary(weight: Tensor | Packed, bias: Tensor | None, kernels: bool) -> Product:
    """The head's product. On a GPU it has rows for a multiple of 8 tokens, without which matrix products there are
    several times slower; those added have a logit of -infinity. A packed one has as many."""
    if isinstance(weight, Packed):
        return Product(weight, bias, fast=kernels)
    if weight.is_cuda and len(weight) % 8:
        bias = lengthened(weight.new_zeros(len(weight)) if bias is None else bias, -torch.inf)
        weight = lengthened(weight, 0.0)
    return Product(weight.detach(), bias, fast=kernels)


def lengthened(x: Tensor, value: float) -> Tensor:
    """x with rows up to a multiple of 8, of which x itself is a view from then on."""
    more = x.new_full((-len(x) % 8, *x.shape[1:]), value)
    if x.storage_offset() or x.untyped_storage().nbytes() != x.nbytes + more.nbytes:
        return joined([x, more], [x, None])
    # It was before.
    return x.detach().as_strided((len(x) + len(more), *x.shape[1:]), x.stride())
