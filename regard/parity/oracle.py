"""What a run should have computed: the model in float64, fed with the run's own tensors, so that an
error shows where it is made and nowhere else."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.fast.watch import Step as Part
from regard.fast.watch import WatchedExperts, WatchedMechanism, Watcher, watch
from regard.mask import Mask, Span, Visible
from regard.models import Model
from regard.parity.trace import Attended, Trace

NO_ERROR = torch.zeros(1, 1)
# The unit roundoff of float8 e4m3.
FP8 = 2.0**-4
# How much more than its spread rounding may do: see envelope.py.
SAFETY = 12.0


@dataclass
class Step:
    """One tensor of a run: its name, what it should be, how far it is off (rows, positions), and
    the `key` of its spread. `unit`: a coarser rounding than the run's own. `tied` (rows,
    positions): where scores of an indexer tie, so that another choice is as right as ours."""

    name: str
    value: Tensor
    error: Tensor
    key: str
    unit: float = 0.0
    tied: Tensor | None = None


def oracle(model: Model, dtype: torch.dtype) -> Model:
    """The model in float64, with the weights that it has in `dtype`."""
    return copy.deepcopy(model).to(device="cpu", dtype=dtype).double().eval()


def steps(model: Model, trace: Trace, compared: bool = True) -> list[Step]:
    """Every step of the run that `trace` recorded, in the order of the computation; `model` is its
    oracle. Where nothing is `compared`, they hold values alone."""
    watcher = Oracle(trace, compared)
    given = trace.given
    more = {}
    if given.source is not None:
        more = {"source": given.source, "source_lengths": trace.source_lengths}
    y = watch(model, watcher)(given.ids, trace.lengths, **more, backend="reference")
    watcher.see("logits", F.pad(y[:, None], (0, 0, 0, trace.size[1] - 1)) if y.dim() == 2 else y)
    return watcher.steps


def rms(x: Tensor) -> Tensor:
    """Root mean square of each token's numbers: (rows, positions, ...) -> (rows, positions)."""
    return x.flatten(2).square().mean(-1).sqrt()


class Oracle(Watcher):
    """Notes how far a run's tensors are off, and goes on with them."""

    def __init__(self, trace: Trace, compared: bool):
        self.trace = trace
        self.compared = compared
        self.steps: list[Step] = []
        # The call whose attention is being computed, and the scores by which it chose its keys.
        self.call: Attended | None = None
        self.scores: list[Tensor] = []
        # Where scores tie, since the last tensor that is known, and what was chosen is not known.
        self.tied: Tensor | None = None
        self.near: list[Tensor] = []

    def see(self, name: str, x: Tensor, source: bool = False) -> Tensor:
        """Compare with what was recorded, and go on with that, or else with what it should be."""
        if name not in self.trace.tensors:
            return x
        got = self.trace.tensors[name].view_as(x)
        real = self.trace.real[name]
        error = torch.where(real, rms(got - x), 0.0) if self.compared else NO_ERROR
        tied, self.tied = self.tied, None
        if tied is not None and (name == "logits" or tied.shape != real.shape):
            # Other tokens than those whose blocks chose otherwise have seen what they gave.
            tied = tied.any(1, keepdim=True).expand_as(real)
        # Copies, because a model adds in place.
        self.steps.append(Step(name, x.clone(), error, name, tied=tied))
        return torch.where(real.view(*real.shape, *[1] * (x.dim() - 2)), got, x)

    def core_attention(self, part: WatchedMechanism, step: Part, *args: Any) -> Tensor:
        """Call by call as the run made them, each with the keys that it had."""
        q, kept, mask, ctx, _ = args
        calls = self.trace.calls.get(part.name)
        if calls is None:
            return self.alone(step, args, torch.ones(()))
        for key, value in kept.items():
            name = f"{part.name}{key}"
            if self.compared:
                self.compare(name, key, value, calls, mask.mask)
            elif name not in self.trace.tensors:
                self.steps.append(Step(name, value.clone(), NO_ERROR, name))
        parts = q if isinstance(q, tuple) else (q,)
        outputs = []
        choices = []
        for call in calls:
            self.call = call
            self.scores = []
            here = replace(ctx, pos=Span(call.cells.index), memory=None, memo={})
            seen = Visible(mask.mask, here.pos, Span(call.index))
            each = tuple(call.cells.take(x) for x in parts)
            few = each if isinstance(q, tuple) else each[0]
            outputs.append(step(few, call.kept, seen, here, here.bias(seen.k)))
            if call.chosen is not None:
                choices.append((call, torch.cat(self.scores, 1)))
        self.call = None
        if choices:
            self.chosen(part, choices, parts[0].shape[:2])
        left = torch.ones(parts[0].shape[:2], dtype=torch.bool)
        for call in calls:
            left[call.cells.to] = False
        if bool((left & (ctx.pos.index >= 0)).any()):
            o = self.alone(step, args, left)
        else:
            o = outputs[0].new_zeros(*parts[0].shape[:2], *outputs[0].shape[2:])
        for call, y in zip(calls, outputs, strict=True):
            call.cells.put(o, y)
        return o

    def alone(self, step: Part, args: tuple, where: Tensor) -> Tensor:
        """A step on what the oracle has itself, which counts `where` the run's own is not known."""
        self.near = []
        o = step(*args)
        if self.near:
            self.tie(torch.cat(self.near, 1) & where.bool())
        return o

    def tie(self, tied: Tensor) -> None:
        old = self.tied
        if old is not None and old.shape != tied.shape:
            # One is of the source, which all see.
            old, tied = (x.any(1, keepdim=True) for x in (old, tied))
        self.tied = tied if old is None else old | tied

    def compare(
        self, name: str, key: str, value: Tensor, calls: list[Attended], mask: Mask
    ) -> None:
        """Keys (or values, or latents) as attention had them: with a cache, as they were read."""
        error = torch.zeros(value.shape[:2])
        for call in calls:
            rows = call.cells.rows
            size = call.held.shape[1] - 1
            off = rms(call.kept[key][:, :size] - value[rows, :size])
            off = torch.where(call.held[:, :size], off, torch.inf)
            seen = Visible(mask, Span(call.cells.index), Span(call.index)).tensor()
            real = (call.cells.index >= 0)[:, None, :, None]
            needed = (seen & real).any(2)[:, 0, :size].expand_as(off)
            here = torch.where(needed, off, 0.0).float()
            error[rows, :size] = error[rows, :size].maximum(here)
        self.steps.append(Step(f"{name} read from the cache", value, error, name))

    # --- choices: what was chosen is taken over, if it was the best up to rounding --------------

    def dense(self, step: Part, keys: int) -> bool:
        return step(keys) if self.call is None else self.call.chosen is None

    def choice(self, step: Part, scores: Tensor, k: int, order: Tensor | None) -> Tensor:
        if self.call is None:
            self.near.append(self.close(scores, k))
            return step(scores, k, order)
        done = sum(each.shape[1] for each in self.scores)
        self.scores.append(scores)
        assert self.call.chosen is not None
        return self.call.chosen[:, done : done + scores.shape[1]]

    def chosen(self, part: WatchedMechanism, choices: list[Any], shape: torch.Size) -> None:
        """The step of an indexer's choices, from the scores of each call."""
        value = torch.zeros(*shape, shape[1] + 1, dtype=torch.float64)
        error = torch.zeros(shape, dtype=torch.float64)
        for call, scores in choices:
            call.cells.put(error, regret(scores, call.chosen, part.config.topk))
            finite = scores.masked_fill(scores == -torch.inf, 0.0)
            call.cells.put(value, F.pad(finite, (0, value.shape[-1] - finite.shape[-1])))
        unit = FP8 if part.config.precision == "fp8" else 0.0
        name = f"{part.name}choice"
        self.steps.append(Step(name, value, error, name, unit))

    def choose(self, part: WatchedExperts, step: Part, scores: Tensor, k: int) -> Tensor:
        name = f"{part.name} choice {part.choices}"
        if name not in self.trace.tensors:
            size = self.trace.source if part.source else self.trace.size[1]
            self.tie(self.close(scores.unflatten(0, (-1, size)), k))
            return step(scores, k)
        real = self.trace.real[name]
        value = scores.unflatten(0, real.shape)
        chosen = self.trace.tensors[name].long()
        chosen = torch.where(real[..., None], chosen, step(scores, k).view_as(chosen))
        error = torch.where(real, regret(value, chosen, k), 0.0)
        value = value.masked_fill(value == -torch.inf, 0.0)
        self.steps.append(Step(f"{part.name} choice", value, error, name))
        return chosen.flatten(0, 1)

    def close(self, scores: Tensor, k: int) -> Tensor:
        """(... n) -> (...): where the best score left is the worst chosen one, up to rounding."""
        best = scores.topk(min(k + 1, scores.shape[-1])).values
        there = best > -torch.inf
        much = SAFETY * unit(self.trace.dtype) * best.masked_fill(~there, 0.0).abs().amax(-1)
        near = best[..., k:] >= best[..., k - 1 : k] - much[..., None]
        return (near & there[..., k:]).any(-1)


def regret(scores: Tensor, chosen: Tensor, k: int) -> Tensor:
    """(... n), (... k) -> (...): how much better the best that was left is than the worst that was
    taken, or 0. Too few or too many are infinitely wrong; scores of -inf count as none."""
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    there = scores > -torch.inf
    worst = scores.masked_fill(~(taken & there), torch.inf).amin(-1)
    left = scores.masked_fill(taken, -torch.inf).amax(-1)
    right = (taken & there).sum(-1) == there.sum(-1).clamp(max=k)
    return torch.where(right, (left - worst).clamp(min=0.0), torch.inf)


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of rounding once."""
    return torch.finfo(dtype).eps / 2
