"""What a run computed on its way, and what it should have been.

Each number stands at [row, position] of the text that the run reads: however a run is cut into rows, chunks, pages and
padding, any two can be laid side by side. The oracle is the model itself in float64. Of each tensor that it computes it
notes how far the run's own is off, and goes on with the run's (regard.fast.watch): so an error shows where it is made
and nowhere else.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.fast.watch import Step as Part
from regard.fast.watch import WatchedExperts, WatchedMechanism, Watcher, watch
from regard.mask import Mask, Span, Visible
from regard.models import Model

NOTHING = torch.zeros(1, 1)  # no error
FP8 = 2.0**-4  # of float8 e4m3


@dataclass
class Given:
    """What all runs read: ids (rows, positions) or images, and a source."""

    ids: Tensor
    source: Tensor | None = None

    def times(self, count: int) -> Given:
        """All rows `count` times."""
        source = None if self.source is None else torch.cat([self.source] * count)
        return Given(torch.cat([self.ids] * count), source)


class Cells:
    """Which token each place (b t) of a call holds: row i of the call is `sizes[i]` tokens of row `rows[i]`, the
    first at position `starts[i]`."""

    def __init__(self, rows: list[int], starts: list[int], sizes: list[int]):
        self.rows, self.ends = torch.tensor(rows), torch.tensor(starts) + torch.tensor(sizes)
        self.index = Span.ragged(torch.tensor(sizes), max(sizes), torch.tensor(starts)).index  # b t
        self.at = (self.index >= 0).nonzero(as_tuple=True)
        self.to = (self.rows[self.at[0]], self.index[self.at])

    def put(self, whole: Tensor, part: Tensor) -> None:
        """A call's tensor (b t ...) to its places in (rows, positions, ...)."""
        whole[self.to] = part[self.at].to(whole)

    def take(self, whole: Tensor) -> Tensor:
        """The reverse: zeros at padding."""
        part = whole.new_zeros(*self.index.shape, *whole.shape[2:])
        part[self.at] = whole[self.to]
        return part


@dataclass
class Attended:
    """One call of one attention: what it had as keys, by position, and what a sparse one chose."""

    cells: Cells
    kept: dict[str, Tensor]  # b (size + 1) ...; the last place is never seen
    held: Tensor  # b (size + 1)
    lengths: Tensor  # b: how many tokens there are to see
    chosen: Tensor | None = None  # b t k, positions

    @property
    def index(self) -> Tensor:
        """Positions of the keys, -1 where there is no token."""
        at = torch.arange(self.held.shape[1])
        return torch.where(at < self.lengths[:, None], at, -1)


@dataclass
class Trace:
    """All that one run computed: `tensors` (rows, positions, ...) by name, in float64."""

    size: tuple[int, int]  # rows, positions
    source: int = 0  # positions of the source
    dtype: torch.dtype = torch.float32
    lengths: Tensor | None = None  # of the rows, where they are cut
    source_lengths: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, list[Attended]] = field(default_factory=dict)
    real: dict[str, Tensor] = field(default_factory=dict)  # which places were computed

    @property
    def whole(self) -> bool:
        """Whether blocks are known by their outputs alone: those of other libraries, and of C code that adds to the
        stream as it multiplies."""
        return not any(name.endswith("attention output") for name in self.tensors)

    def blocks(self) -> Trace:
        """The same, known by what its blocks give alone."""
        inside = re.compile(r"block \d+ (?!output)")
        tensors = {name: x for name, x in self.tensors.items() if not inside.search(name)}
        return replace(self, tensors=tensors, calls={})

    def put(self, name: str, x: Tensor, cells: Cells, source: bool = False) -> None:
        if name not in self.tensors:
            shape = (self.size[0], self.source if source else self.size[1])
            self.tensors[name] = torch.zeros(*shape, *x.shape[2:], dtype=torch.float64)
            self.real[name] = torch.zeros(shape, dtype=torch.bool)
        cells.put(self.tensors[name], x.detach().cpu())
        self.real[name][cells.to] = True

    def put_answer(self, y: Tensor, cells: Cells) -> None:
        """What the model gave; one for each row (a label) lies at the row's first place."""
        if y.dim() == 2:
            cells, y = Cells(cells.rows.tolist(), [0] * len(y), [1] * len(y)), y[:, None]
        self.put("logits", y, cells)


class Recorder(Watcher):
    """Changes nothing and notes everything; `cells` and `source_cells` say which tokens the call under way reads."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.cells = self.source_cells = Cells([0], [0], [1])
        self.chosen: list[Tensor] = []

    def see(self, name: str, x: Tensor, source: bool = False) -> Tensor:
        self.trace.put(name, x, self.source_cells if source else self.cells, source)
        return x

    def mix(self, part: WatchedMechanism, step: Part, *args: Any) -> Tensor:
        self.chosen = []
        o, (_, kept, mask, _, _) = step(*args), args
        cells = self.source_cells if part.source else self.cells
        lengths = cells.ends
        if part.cross:
            # Rows of the source, in the order of this call.
            ends = torch.zeros(self.trace.size[0], dtype=torch.long)
            ends[self.source_cells.rows] = self.source_cells.ends
            lengths = ends[cells.rows]
        entries, held, slots = by_position(kept, mask.k.index.cpu(), int(lengths.max()))
        chosen = torch.cat(self.chosen, 1).cpu() if self.chosen else None
        if chosen is not None:
            chosen = slots.gather(1, chosen.flatten(1)).view_as(chosen)
        call = Attended(cells, entries, held, lengths, chosen)
        self.trace.calls.setdefault(part.name, []).append(call)
        return o

    def choice(self, step: Part, scores: Tensor, k: int, order: Tensor | None) -> Tensor:
        self.chosen.append(step(scores, k, order))
        return self.chosen[-1]

    def choose(self, part: WatchedExperts, step: Part, scores: Tensor, k: int) -> Tensor:
        chosen = step(scores, k)
        cells = self.source_cells if part.source else self.cells
        self.see(
            f"{part.name} choice {part.choices}",
            chosen.unflatten(0, cells.index.shape),
            part.source,
        )
        return chosen


def by_position(
    kept: dict[str, Tensor], index: Tensor, size: int
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Entries (b s ...) brought to their positions (b size + 1 ...), which of them were there, and for each slot its
    position; what has none goes to the last place."""
    b, s = next(iter(kept.values())).shape[:2]
    index = index.expand(b, s)
    place = torch.where((index >= 0) & (index < size), index, size)
    slot = torch.full((b, size + 1), -1).scatter(1, place, torch.arange(s).expand(b, s))
    slot[:, size] = -1
    held = slot >= 0
    row = torch.arange(b)[:, None]
    entries = {}
    for name, x in kept.items():
        y = x.detach().cpu().double()[row, slot.clamp(min=0)]
        entries[name] = y.masked_fill(~held.view(b, -1, *[1] * (y.dim() - 2)), 0.0)
    return entries, held, place


# --- what it should have been -------------------------------------------------------------------------------------


@dataclass
class Step:
    """One tensor of a run: its name, what it should be, how far it is off (rows, positions), and what it is measured by
    (`key`). `tied` (rows, positions): where scores of an indexer tie, so that another choice is as right as ours."""

    name: str
    value: Tensor
    error: Tensor
    key: str
    unit: float = 0.0  # a coarser rounding than the run's own
    tied: Tensor | None = None


def oracle(model: Model, dtype: torch.dtype) -> Model:
    """The model in float64, with the weights that it has in `dtype`."""
    return copy.deepcopy(model).to(device="cpu", dtype=dtype).double().eval()


def steps(model: Model, given: Given, trace: Trace, compared: bool = True) -> list[Step]:
    """Every step of the run that `trace` recorded, in the order of the computation; `model` is its oracle. Where
    nothing is to be `compared`, they hold values alone."""
    watcher, more = Oracle(trace, compared), {}
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
        self.trace, self.compared = trace.blocks() if trace.whole else trace, compared
        self.steps: list[Step] = []
        # The call whose attention is being computed, and the scores by which it had to choose its keys.
        self.call: Attended | None = None
        self.scores: list[Tensor] = []
        # Where scores tie, of the block that is being computed, when its choices are not known.
        self.tied: list[Tensor] = []

    def see(self, name: str, x: Tensor, source: bool = False) -> Tensor:
        """Compare with what was recorded, and go on with that."""
        got = self.trace.tensors.get(name)
        if got is None:
            return x
        error = NOTHING
        if self.compared:
            error = torch.where(self.trace.real[name], rms(got - x), 0.0)
        tied, self.tied = torch.cat(self.tied, 1) if self.tied else None, []
        # Copies, because a model adds in place.
        self.steps.append(Step(name, x.clone(), error, name, tied=tied))
        return got.clone()

    def mix(self, part: WatchedMechanism, step: Part, *args: Any) -> Tensor:
        """Call by call as the run made them, each with the keys that it had."""
        calls, (q, kept, mask, ctx, _) = self.trace.calls.get(part.name), args
        if calls is None:
            return step(*args)
        if self.compared:
            for key, value in kept.items():
                self.read(f"{part.name}{key}", key, value, calls, mask.mask)
        parts, outputs, choices = q if isinstance(q, tuple) else (q,), [], []
        for call in calls:
            self.call, self.scores = call, []
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
        o = outputs[0].new_zeros(*parts[0].shape[:2], *outputs[0].shape[2:])
        for call, y in zip(calls, outputs, strict=True):
            call.cells.put(o, y)
        return o

    def read(self, name: str, key: str, value: Tensor, calls: list[Attended], mask: Mask) -> None:
        """Keys (or values, or latents) as attention had them, which with a cache is as they were read."""
        error = torch.zeros(value.shape[:2])
        for call in calls:
            rows, size = call.cells.rows, call.held.shape[1] - 1
            off = rms(call.kept[key][:, :size] - value[rows, :size])
            off = torch.where(call.held[:, :size], off, torch.inf)
            seen = Visible(mask, Span(call.cells.index), Span(call.index)).tensor()
            real = (call.cells.index >= 0)[:, None, :, None]
            needed = (seen & real).any(2)[:, 0, :size].expand_as(off)
            here = torch.where(needed, off, 0.0).float()
            error[rows, :size] = error[rows, :size].maximum(here)
        self.steps.append(Step(f"{name} read from the cache", value, error, name))

    # --- choices: what was chosen is taken over, if it was the best up to rounding ----------------------------------

    def dense(self, step: Part, keys: int) -> bool:
        return step(keys) if self.call is None else self.call.chosen is None

    def choice(self, step: Part, scores: Tensor, k: int, order: Tensor | None) -> Tensor:
        if self.call is None:
            # Where the best key that is left scores as much as the worst that is chosen.
            best = scores.topk(min(k + 1, scores.shape[-1])).values
            tied = (best[..., k:] == best[..., k - 1 : k]) & (best[..., k:] > -torch.inf)
            self.tied.append(tied.any(-1))
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
            return step(scores, k)
        real, chosen = self.trace.real[name], self.trace.tensors[name].long()
        value = scores.unflatten(0, real.shape)
        error = torch.where(real, regret(value, chosen, k), 0.0)
        value = value.masked_fill(value == -torch.inf, 0.0)
        self.steps.append(Step(f"{part.name} choice", value, error, name))
        return chosen.flatten(0, 1)


def regret(scores: Tensor, chosen: Tensor, k: int) -> Tensor:
    """How much better the best that was left is than the worst that was taken, or 0: (... n), (... k) -> (...).
    Too few or too many are infinitely wrong; scores of -inf count as none."""
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    there = scores > -torch.inf
    worst = scores.masked_fill(~(taken & there), torch.inf).amin(-1)
    left = scores.masked_fill(taken, -torch.inf).amax(-1)
    right = (taken & there).sum(-1) == there.sum(-1).clamp(max=k)
    return torch.where(right, (left - worst).clamp(min=0.0), torch.inf)
