"""A model made ready for running: weights packed for this machine, products that share their input joined into one.

    fast = prepare(model, "int8")
    logits = fast(ids, cache=fast.cache(1))

The prepared model is called like the model it came from, which stays as it was, and is for inference alone.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import UsageError
from regard.fast.joined import Maker
from regard.fast.lean import LeanMaker, suits
from regard.kernels.linear import PRECISIONS, packs
from regard.layers import LMHead
from regard.models import EncoderDecoder, Model
from regard.models.recurrent import Recurrent, Seq2Seq


def prepare(
    model: Model, precision: str = "fp32", *, rows: int = 1, consume: bool = False
) -> Model:
    """`model` ready to run in `precision`: fp32, bf16, int8 or int4. `rows` is how many rows a step will have (batch
    times beams): the packing that suits them is taken; any other number works too.

    fp32 is the same up to rounding. bf16 holds everything in bf16, the cache too. int8 and int4 hold linear layers in 8
    or 4 bits and the rest in bf16 (in float32 on a CPU without bf16), experts of a mixture and MLA's up-projection
    among it; the head of int4 is int8, no slower and much better. Recurrent cells keep their dtype; what is linear
    around them is packed. Logits are float32.

    `consume` gives up the weights of `model` as they are packed, so that never both are in memory: it is of no use
    afterwards. Weights that need no change are shared with `model`. A tied head becomes a packed copy of its own, vocab
    x dim numbers beside the embedding; not where nothing is packed (fp32, few rows): both stay one."""
    if precision not in PRECISIONS:
        raise UsageError(
            f"precision {precision!r} is unknown; choose one of {', '.join(PRECISIONS)}"
        )
    if rows < 1:
        raise UsageError(f"rows={rows}: a step has at least one row")
    if isinstance(model, Prepared):
        raise UsageError(
            f"this model is already prepared in {model.precision}; prepare the original"
        )
    kind = LeanMaker if suits(model, precision) else Maker
    maker = kind(precision, rows, _stream(model, precision), _spent(model) if consume else set())
    parts = {}
    if isinstance(model.head, LMHead):
        two = isinstance(model, (EncoderDecoder, Seq2Seq))
        words = model.get_submodule("target" if two else "embedding")
        parts["head"] = maker.head(model.head, words.weight)
    cls: Any = type(model)
    made = maker.twin(model, _prepared(cls), **parts)
    made.precision = precision
    return made.eval()


def _spent(model: Model) -> set[int]:
    """Weights of linear layers that nothing else holds."""
    linears = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    held = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    return {id(w) for w in linears if held[id(w)] == 1}


def _stream(model: Model, precision: str) -> torch.dtype | None:
    """The dtype of all that is not packed; None: as it is."""
    if isinstance(model, (Recurrent, Seq2Seq)):
        return None
    device = next(model.parameters()).device.type
    slow = device == "cpu" and not packs(device, torch.bfloat16)
    return (
        torch.float32 if precision == "fp32" or (slow and precision != "bf16") else torch.bfloat16
    )


class Prepared:
    """What a prepared model refuses: its weights are packed for one machine, and rounded."""

    precision: str

    def save(self, path: str | Path) -> Path:
        raise UsageError(
            f"a model prepared in {self.precision} is for running, its weights are packed for this machine; "
            "save the original"
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden).float()  # type: ignore[misc]

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
def _prepared(cls: Any) -> Any:
    return type(f"Prepared{cls.__name__}", (Prepared, cls), {})


# --- what it costs in quality -------------------------------------------------------------------------------------


class Perplexity(NamedTuple):
    before: float
    after: float


@torch.inference_mode()
def perplexity_change(
    model: Model, prepared: Model, ids: Tensor, *, source: Tensor | None = None
) -> Perplexity:
    """exp of the mean negative log-likelihood of ids (b t) from the second token on, by both models."""
    if ids.shape[-1] < 2:
        raise UsageError("perplexity needs rows of at least two tokens: the first is given")
    return Perplexity(*(_perplexity(m, ids, source) for m in (model, prepared)))


def _perplexity(model: Model, ids: Tensor, source: Tensor | None) -> float:
    total = 0.0
    for i, row in enumerate(ids):
        given = {} if source is None else {"source": source[i : i + 1]}
        logits = model(row[None], **given)[0, :-1].float()
        total += F.cross_entropy(logits, row[1:], reduction="sum").item()
    return math.exp(total / (len(ids) * (ids.shape[1] - 1)))
