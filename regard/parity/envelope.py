"""How far rounding can carry a result: the envelope that tells rounding from a bug."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from regard.kernels.linear import TILE, turned
from regard.models import Model
from regard.parity.oracle import NO_ERROR, SAFETY, Step, rms, steps, unit
from regard.parity.runs import Runner
from regard.parity.trace import Trace

# Each tensor y of a run is compared with f(x) in float64, where x is what the run itself had
# before: so only f's own rounding may part them, and no error counts twice. To know how much that
# is, f is computed again in float64 with a random relative error of at most u, the unit roundoff of
# the run's dtype, in every sum, product and function. The operands of products and norms are off
# too, so that cancellation counts; those of a sum of n products by u sqrt(n) / 8 where that is
# more, since partial sums, float32 in every dtype, are rounded too. In int8 the operands of linear
# layers are also off by half a step of their tile's scale. The spread of the results, root mean
# square over the features of a token, is what rounding does there; SAFETY times it is the envelope.
# An error outside is a bug.
SAMPLES = 4
# Half a step, in units of the largest number of a tile.
STEP = 1 / 254
EXACT = (
    *("embedding", "index", "index_select", "gather", "scatter", "cat", "stack", "clone", "copy_"),
    *("_to_copy", "masked_fill", "where", "relu", "neg", "abs", "clamp", "zeros", "ones", "full"),
    *("fill_", "zero_", "empty", "empty_like", "zeros_like", "repeat", "constant_pad_nd", "topk"),
    *("new_zeros", "new_full", "new_empty", "index_put_", "sort", "arange", "repeat_interleave"),
    *("amax", "amin", "max", "flip", "scalar_tensor", "lift_fresh"),
)
# Which operand tells how many products are summed.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "convolution": 1}
SUMS = ("sum", "mean", "_softmax", "native_layer_norm", "_fused_rms_norm", "pow")
# x times a number near 0 or 1: off by a share of x, not of the product.
CURVES = ("gelu", "silu")


class Rounding(TorchDispatchMode):
    """Every float64 operation in here is off by a relative error drawn from -u .. u. `int8`: both
    operands of matrix products have been rounded to 8 bits."""

    def __init__(self, u: float, int8: bool = False):
        super().__init__()
        self.u = u
        self.int8 = int8
        self.generator = torch.Generator().manual_seed(0)

    def noise(self, x: Tensor, u: float = 0.0) -> Tensor:
        u = max(u, self.u)
        drawn = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        return drawn.mul_(2 * u).add_(1 - u)

    def coarse(self, x: Tensor) -> Tensor:
        """x (n k) as after rounding by the scale of each tile."""
        step = turned(x).abs().amax(-1) * (STEP / 8)
        off = torch.rand(x.shape, generator=self.generator, dtype=x.dtype).mul_(2).sub_(1)
        return x + off * step.repeat_interleave(TILE, -1)[:, : x.shape[1]]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in SUMS or name in PRODUCTS:
            partial = 0.0
            if name in PRODUCTS:
                # What rounding partial sums does: of x (.. n), or of a convolution (out in h w).
                x = args[PRODUCTS[name]]
                terms = x[0].numel() if x.dim() == 4 else x.shape[-1]
                partial = unit(torch.float32) * math.sqrt(terms) / 8
            if self.int8 and name in ("mm", "addmm"):
                *bias, x, w = args
                args = (*bias, self.coarse(x), self.coarse(w.mT).mT)
            args = tuple(x * self.noise(x, partial) if _wide(x) else x for x in args)
        out = func(*args, **(kwargs or {}))
        if name in CURVES:
            out += args[0] * (self.noise(args[0]) - 1)
        if name not in EXACT and not func.is_view:
            for x in tree_iter(out):
                if _wide(x):
                    x.mul_(self.noise(x))
        return out


def _wide(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float64


class Envelope:
    """What rounding does to each tensor that a run has shown, learnt from the oracle's own run. If
    that takes all keys and the other run chooses some, nothing is known of the choice."""

    def __init__(self, model: Model, run: Trace):
        self.u = unit(run.dtype)
        self.spread: dict[str, Tensor] = {}
        # Every row several times: each is off in another way.
        trace = Runner(model, run.given.times(SAMPLES), "reference").together().as_seen(run)
        exact = steps(model, trace, compared=False)
        with Rounding(self.u, run.int8):
            drawn = steps(model, trace, compared=False)
        for a, b in zip(exact, drawn, strict=True):
            off = rms(a.value - b.value).unflatten(0, (SAMPLES, -1))
            spread = off.square().mean(0).sqrt()
            # Errors of 8 bits are so large that few draws do not show where a norm magnifies one.
            self.spread[a.key] = spread.amax().expand_as(spread) if run.int8 else spread

    def ratio(self, step: Step) -> Tensor:
        """The error in units of what rounding may do: more than 1 is outside (rows, positions)."""
        least = max(self.u, step.unit) * rms(step.value)
        allowed = SAFETY * torch.maximum(self.spread.get(step.key, NO_ERROR), least)
        ratio = torch.where(step.error != 0, step.error / allowed, 0.0)
        return ratio.nan_to_num(nan=torch.inf)


@dataclass(frozen=True)
class Check:
    """One run against another, or one alone (`judge`). `verdict`: equal, rounding, tie (an indexer
    gives keys equal scores, and the runs chose different ones: neither is wrong) or bug.
    `difference`: the largest between the answers. `worst`: the largest error in units of the
    envelope; `where`: its tensor, of a bug or a tie the first one outside. `run`: which of both has
    the bug, or chose other keys than ours."""

    name: str
    verdict: str
    difference: float
    worst: float
    where: str
    run: str = ""
    row: int = 0
    position: int = 0


def judge(steps: list[Step], envelope: Envelope, run: str = "") -> Check:
    """A run alone: "rounding" and the place nearest to its envelope, or the first one outside."""
    worst = 0.0
    where = tie = ""
    for step in steps:
        ratio = envelope.ratio(step)
        if step.tied is not None and bool((ratio[step.tied] > 1).any()):
            tie = tie or step.name
            ratio = ratio.masked_fill(step.tied, 0.0)
        most = float(ratio.max())
        if most > 1:
            row, position = divmod(int(ratio.argmax()), ratio.shape[1])
            return Check("", "bug", 0.0, most, step.name, run, row, position)
        if most >= worst:
            worst = most
            where = step.name
    return Check("", "tie" if tie else "rounding", 0.0, worst, tie or where, run)
