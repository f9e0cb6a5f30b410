"""Fine-tuning: which weights of a trained model learn. All of them, the head alone, or the head and LoRA."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from regard.config import Count, Fraction, Positive, ranged
from regard.errors import UsageError, nearest
from regard.layers import LMHead
from regard.models import Model
from regard.models.adapt import LoRA, inject

METHODS = ("full", "frozen", "lora")
QUERIES_AND_VALUES = ("wq", "wv", "w_uq", "w_ukv")  # of GQA, and of MLA


@dataclass(frozen=True)
@ranged
class Adapt:
    """Method "full": everything learns; "frozen": the head alone; "lora": LoRA on the linear layers that `targets`
    name, and the head, unless it is a vocabulary's that came with the model.

    `targets` are last names (wq wk wv wo, w_dq w_uq w_dkv w_ukv, gate up down), or "all": every linear layer of the
    body. Experts, which are no linear layers of their own, and the indexer of sparse attention, which no loss of the
    model reaches, are left as they are."""

    method: str = "full"
    rank: Count = 8
    alpha: Positive = 16.0
    dropout: Fraction = 0.0
    targets: tuple[str, ...] | str = QUERIES_AND_VALUES

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(
                f"adapt.method = {self.method!r} is unknown; {nearest(self.method, METHODS)}"
            )
        if not self.targets:
            raise UsageError('adapt.targets is empty; name layers such as wq, or say "all"')

    @property
    def lora(self) -> LoRA:
        return LoRA(self.rank, self.alpha, self.dropout)


def adapted(model: Model, adapt: Adapt) -> Model:
    """Freeze the model and add LoRA, as `adapt` says, in place. Its outputs do not change.

    Names of all other parameters stay; a layer `wq` with LoRA has `wq.base.weight`, `wq.a` and `wq.b`. The random
    numbers of A are torch's on the CPU: torch.manual_seed decides them."""
    if adapt.method == "full":
        return model
    model.requires_grad_(False)
    if adapt.method == "lora":
        inject(model, _chosen(model, adapt.targets), adapt.lora)
    head: nn.Module | None = getattr(model, "head", None)
    if head is not None:
        given = isinstance(head, LMHead) and not head.fresh
        head.requires_grad_(adapt.method == "frozen" or not given)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            'adapt.method = "frozen" trains the head alone, and this model has none with weights of its own; '
            'give it a head, or say "lora"'
        )
    return model


def _chosen(model: nn.Module, targets: tuple[str, ...] | str) -> list[str]:
    """Full names of the layers that get LoRA, in the model's order."""
    linears = {
        name: name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not {"head", "indexer"} & set(name.split("."))
    }
    wanted = {targets} if isinstance(targets, str) else set(targets)
    if wanted == {"all"}:
        return list(linears)
    known = set(linears.values())
    unknown = sorted(wanted - known - set(QUERIES_AND_VALUES))
    if unknown or not wanted & known:
        name = unknown[0] if unknown else ", ".join(sorted(wanted))
        raise UsageError(
            f"adapt.targets: the body has no linear layer {name}; known: all, {', '.join(sorted(known))}"
        )
    return [name for name, last in linears.items() if last in wanted]
