"""A model for a GPU whose products read weights in fp8 or in 4 bits: `regard.prepare(model, "int4")`.

What flows through it and what is kept of tokens is as before, and so is every forward: a `PackedLinear` stands for each
linear layer that table.py makes a `Product` of. The others (a router, an indexer, MLA's up-projection), experts,
embeddings and a tied head stay whole; so do products of fewer than SMALL numbers: no slower, and much better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.attention.delta import GatedDeltaRule
from regard.attention.latent import LatentAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.ssd import StateSpaceDual
from regard.errors import UsageError
from regard.fast.cpu.prepared import Prepared, prepared
from regard.fast.inputs import read_by
from regard.fast.specialise import Row, Specialise
from regard.kernels.linear import SMALL, feedback
from regard.kernels.packed import Packed, PackedLinear, pack, possible
from regard.layers import FeedForward, LMHead
from regard.models import Model
from regard.models.adapt import Int4Linear, LowRank
from regard.moe import MixtureOfExperts


class Quantised(Prepared):
    """It has CUDA graphs, and logits of its own type."""

    graphs = True

    def logits(self, hidden: Tensor) -> Tensor:
        return super(Prepared, self).logits(hidden)  # type: ignore[misc]


class PackedHead(LMHead):
    """An untied head in fp8, with a weight of its own."""

    same_as = LMHead
    held: PackedLinear

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        y = self.held(x)
        return y if self.bias is None else y + self.bias


def quantised(model: Model, kind: str, consume: bool = False) -> Model:
    """`model` with its products' weights in `kind`, fp8 or int4; see `regard.prepare`."""
    if not model.towers:
        raise UsageError(f"no {kind} for recurrent cells on a GPU; run the model as it is")
    device = next(model.parameters()).device
    if (
        kind == "fp8"
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) < (8, 9)
    ):
        name = torch.cuda.get_device_name(device)
        raise UsageError(f'{name} has no fp8 (Ada and Hopper do): regard.prepare(model, "int4")')
    held = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    maker = Quantise(
        kind, {w for w, n in held.items() if n == 1} if consume else set(), read_by(model)
    )
    parts = {}
    if type(model.head) is LMHead:
        parts["head"] = maker.head(model.head)
    cls: Any = type(model)
    made = maker.copy_as(prepared(Quantised, cls), model, **parts)
    made.precision, made.parts = kind, dict(maker.rows)
    size = f"{maker.after / 2**30:.2f} GiB, {maker.before / 2**30:.2f} as they were"
    made.parts["weights", f"{kind}: {size}"] = maker.count
    if maker.kept:
        made.parts["weights", "as the folder packs them, not rounded again"] = maker.kept
    return made.eval()


class Quantise(Specialise):
    """`spent`: parameters (their ids) that may be given up when they have been packed; `inputs`: what `read_by`
    found."""

    def __init__(self, kind_: str, spent: set[int], inputs: Mapping[int, Tensor]):
        super().__init__()
        self.precision, self.spent, self.inputs = kind_, spent, inputs
        self.count = self.before = self.after = self.kept = 0

    def pack(self, module: nn.Module, kind: str) -> Packed:
        """The weight of a layer or a head: as its folder packs it, where that is the same (`Kept` of
        checkpoint/quantised), or else rounded so that it matters least for what it reads."""
        weight: Any = module.weight
        held = getattr(weight, "held", None)
        made = None if held is None else held.packed(kind, weight.detach())
        self.kept += made is not None
        made = self.rounded(module, kind) if made is None else made
        self.count, self.before = self.count + 1, self.before + weight.nbytes
        self.after += made.nbytes
        if id(weight) in self.spent:
            weight.data = weight.data.new_empty(0)
        return made

    def rounded(self, module: Any, kind: str) -> Packed:
        found, back = self.inputs.get(id(module)), None
        if found is not None and bool(found.isfinite().all()):
            back = feedback(found, "int4")
        return pack(module.weight.detach(), kind, back)

    def linear(self, module: Any) -> nn.Module:
        if id(module) not in self.made:
            self.made[id(module)] = PackedLinear(self.pack(module, self.precision), module.bias)
        return self.made[id(module)]

    def head(self, head: LMHead) -> nn.Module:
        """A head of its own has 8 bits: 4 would cost more than the rest of the model."""
        weight = head.weight
        why = "it is the embedding's" if weight is None else ""
        if weight is not None and not possible("fp8", weight.shape):
            why = f"{weight.shape[1]} inputs are no multiple of 16"
        if weight is not None and weight.is_cuda and len(weight) % 8:
            why = f"{len(weight)} tokens are no multiple of 8"  # see `vocabulary`
        if why:
            self.rows["LMHead", f"whole: {why}"] += 1
            return self.copy(head)
        new = self.copy_as(PackedHead, head)
        new.held = PackedLinear(self.pack(head, "fp8"), None)
        new.weight = None
        self.rows["LMHead", "fp8"] += 1
        return new

    def products(self, m: nn.Module, *each: Sequence[str]) -> nn.Module:
        """A part with its linear layers packed, by the names of those that read the same input: all of them or none."""
        parts: dict[str, nn.Module | None] = {}
        for names in each:
            layers: list[Any] = [x for n in names if (x := getattr(m, n)) is not None]
            known = all(isinstance(x, nn.Linear | LowRank | Int4Linear) for x in layers)
            fits = known and all(possible(self.precision, x.weight.shape) for x in layers)
            if fits and sum(x.weight.numel() for x in layers) >= SMALL:
                parts |= {n: self.linear(x) for n in names if (x := getattr(m, n)) is not None}
        return self.copy(m, **parts)

    def latent(self, m: LatentAttention) -> nn.Module:
        if m.w_dq is None:
            return self.products(m, ("w_uq", "w_dkv"), ("wo",))
        return self.products(m, ("w_dq", "w_dkv"), ("w_uq",), ("wo",))

    def experts(self, m: MixtureOfExperts) -> nn.Module:
        self.rows["MixtureOfExperts", "its experts whole: they have no packed form"] += 1
        return self.copy(m)

    table: ClassVar[Mapping[type, Row]] = {
        GroupedQueryAttention: lambda maker, m: maker.products(
            m, ("wq", "wk", "wv", "wg"), ("wo",)
        ),
        LatentAttention: lambda maker, m: maker.latent(m),
        GatedDeltaRule: lambda maker, m: maker.products(m, ("wo",)),
        StateSpaceDual: lambda maker, m: maker.products(m, ("wo",)),
        FeedForward: lambda maker, m: maker.products(m, ("gate", "up"), ("down",)),
        MixtureOfExperts: lambda maker, m: maker.experts(m),
    }
