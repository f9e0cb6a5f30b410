"""A model made ready for running: weights packed for this machine, products that share their input joined into one.

    fast = prepare(model, "int8")
    logits = fast(ids, cache=fast.cache(1))

The prepared model is called like the model it came from, which stays as it was, and is for inference alone. Where the
C code is there (`usable`), products run in it, each takes its activation and residual along, norms too, and one new
token per row is turned, stored and attended to where the cache lies, in rows or in pages; the stream is float32.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.multihead import GroupedQueryAttention
from regard.block import Block
from regard.errors import UsageError, notice
from regard.fast.cpu.join import ADAPTED, Join
from regard.fast.cpu.native import Native
from regard.fast.cpu.prepared import Prepared, prepared
from regard.fast.inputs import read_by
from regard.fast.specialise import unlike
from regard.kernels.c import native
from regard.kernels.c.linear import ACTIVATIONS, usable
from regard.kernels.linear import PRECISIONS, half_is_fast
from regard.kernels.packed import KINDS
from regard.layers import FeedForward, LMHead
from regard.models import Model

WORTH = 10_000_000  # parameters for which the C code is compiled if it is not yet


def prepare(model: Model, precision: str = "fp32", *, consume: bool = False) -> Model:
    """`model` ready to run in `precision`: fp32, bf16, int8 or int4 (on a GPU fp8 too), at any number
    of rows.

    fp32 is the same up to rounding. bf16 holds everything in bf16, the cache too; a CPU that does not multiply it is
    given fp32, with a notice. int8 and int4 hold linear layers in 8 or 4 bits and the rest in bf16 (in float32 on a
    CPU without bf16), experts of a mixture and MLA's up-projection among it; the head of int4 is int8, and so are
    weights of fewer than 65,536 numbers: no slower and much better. Weights are rounded so that it matters least for
    what the layers read: the model reads 256 random tokens first. Recurrent cells keep their dtype; what is linear
    around them is packed. Logits are float32.

    On a GPU fp8 and int4 are for CUDA graphs: the weights of the products in e4m3, with a scale for each output, or in
    4 bits, with a scale and a zero for each output and group of inputs; an untied head has fp8 in both. All else stays
    as it is.

    `consume` gives up the weights of `model` as they are packed, so that never both are in memory: it is of no use
    afterwards. Weights that need no change are shared with `model`. A tied head becomes a packed copy of its own, vocab
    x dim numbers beside the embedding."""
    device = next(model.parameters()).device
    if _for_a_graph(model, precision, device):
        from regard.fast.cuda.quantised import quantised  # slow to import

        return quantised(model, precision, consume)
    on_cpu = device.type == "cpu"
    if precision == "bf16" and on_cpu and model.towers and not half_is_fast():
        notice(
            "this CPU does not multiply bf16: fp32, which is faster, is taken; int8 is the fastest here"
        )
        precision = "fp32"
    large = on_cpu and sum(p.numel() for p in model.parameters()) >= WORTH
    if large and not native.build():
        notice(f"no C code for this CPU, torch's slower products are used: {native.why()}")
    dtype = _stream(model, precision)
    why = why_not_native(model, precision, dtype)
    # Weights of linear layers that nothing else holds.
    held = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    linears = [id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)]
    spent = {w for w in linears if held[w] == 1} if consume else set()
    inputs = read_by(model) if precision in ("int8", "int4") and model.towers else {}
    maker = (Join if why else Native)(precision, dtype, spent, inputs)
    parts = {}
    if type(model.head) is LMHead:
        words = "target" if model.reads_source else "embedding"
        parts["head"] = maker.head(model.head, model.get_parameter(f"{words}.weight"))
    cls: Any = type(model)
    made = maker.copy_as(prepared(Prepared, cls), model, **parts)
    made.precision, made.parts = precision, dict(maker.rows)
    if why:
        much = "products alone" if on_cpu and usable(precision) else "none"
        made.parts["C code", f"{much}: {why}"] = 1
    return made.eval()


def _for_a_graph(model: Model, precision: str, device: torch.device) -> bool:
    """Whether a model on a GPU is packed for CUDA graphs. What no precision there is is refused."""
    if precision not in (*PRECISIONS, *KINDS):
        words = ", ".join(dict.fromkeys([*PRECISIONS, *(KINDS if device.type == "cuda" else ())]))
        raise UsageError(f"precision {precision!r} is unknown; choose one of {words}")
    if isinstance(model, Prepared):
        raise UsageError(
            f"this model is already prepared in {model.precision}; prepare the original"
        )
    if precision in KINDS and device.type == "cuda" and (model.towers or precision == "fp8"):
        return True
    if precision not in PRECISIONS:
        raise UsageError(
            f"{precision} is for a model on a GPU, this one is on {device}; "
            f'here choose one of {", ".join(PRECISIONS)}: regard.prepare(model, "int8")'
        )
    return False


def why_not_native(model: Model, precision: str, dtype: torch.dtype | None) -> str:
    """Why the blocks of a model, whose other parts compute in `dtype`, cannot run in C code here, or nothing."""
    if not model.towers:
        return "recurrent cells have none"
    if not next(model.parameters()).is_cpu:
        return "it is for the CPU"
    if not usable(precision):
        return native.why() or f"no products in {precision} on this CPU"
    # In float32 parts without C code stand among the others.
    for block in (m for m in model.modules() if isinstance(m, Block) and dtype != torch.float32):
        for part in filter(None, (block.attention, block.cross)):
            if type(part) is not GroupedQueryAttention or unlike(part, *ADAPTED):
                return f"{type(part).__name__} has none in bf16"
        ffn: Any = block.ffn
        if ffn is None:
            continue
        ours = type(ffn) is FeedForward and ffn.config.activation in ACTIVATIONS
        if not ours or unlike(ffn, *ADAPTED):
            return "its feed-forward has none in bf16"
    return ""


def _stream(model: Model, precision: str) -> torch.dtype | None:
    """The dtype of all that is not packed; None: as it is."""
    if not model.towers:
        return None
    slow = next(model.parameters()).is_cpu and not half_is_fast()
    wide = precision == "fp32" or (slow and precision != "bf16")
    return torch.float32 if wide else torch.bfloat16


@torch.inference_mode()
def perplexity(model: Model, ids: Tensor, source: Tensor | None = None) -> float:
    """exp of the mean negative log-likelihood of ids (b t) from the second token on."""
    if ids.shape[-1] < 2:
        raise UsageError("perplexity needs rows of at least two tokens: the first is given")
    total = 0.0
    for i, row in enumerate(ids):
        given = {} if source is None else {"source": source[i : i + 1]}
        logits = model(row[None], **given)[0, :-1].float()
        total += F.cross_entropy(logits, row[1:], reduction="sum").item()
    return math.exp(total / ids[:, 1:].numel())
