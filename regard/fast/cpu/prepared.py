"""What a prepared model does in its own way, and what it refuses."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from regard.errors import UsageError
from regard.fast.cpu.join import PackedHead
from regard.kernels.c.linear import NativeLinear
from regard.kernels.c.rows import lse_and_topk
from regard.models.base import last_real


class Prepared:
    """What a prepared model does in its own way, and refuses: its weights are packed for one machine, and rounded."""

    precision: str
    graphs: ClassVar[bool] = False  # whether it runs in CUDA graphs

    def save(self, path: str | Path) -> Path:
        raise UsageError(
            f"a model prepared in {self.precision} is for running, its weights are packed for this machine; "
            "save the original"
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden).float()  # type: ignore[misc]

    def next_best(
        self, ids: Tensor, many: int, banned: Sequence[int], left: bool, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `lse_and_topk` finds among the logits after the last token of each row, `many` if there are as many. A
        head in C does not even write them."""
        model: Any = self
        hidden, head = last_real(model.hidden(ids, **options), None), model.head
        native = isinstance(head, PackedHead) and isinstance(head.product, NativeLinear)
        if native and head.softcap is None:
            many = min(many, head.product.n - len(banned))
            return head.product.best(head.features(hidden), many, banned, left)
        logits = self.logits(hidden)
        return lse_and_topk(logits, min(many, logits.shape[1] - len(banned)), banned, left)

    def train(self, mode: bool = True) -> Any:
        if mode:
            raise UsageError(
                "a prepared model cannot be trained; train the original and prepare it again"
            )
        return super().train(mode)  # type: ignore[misc]

    def _apply(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            "packed weights cannot be moved or cast; move the original and prepare it again"
        )


@functools.cache
def prepared(kind: type[Prepared], cls: Any) -> Any:
    """A class of models, prepared."""
    return type(f"Prepared{cls.__name__}", (kind, cls), {})
