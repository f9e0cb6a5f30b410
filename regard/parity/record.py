"""What a run computed on its way, each number at [row, position] of the text that the run reads.

However a run is cut into rows, chunks, pages and padding, any two can be laid side by side so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard.fast.watch import Step, WatchedExperts, WatchedMechanism, Watcher
from regard.mask import Span


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

    def mix(self, part: WatchedMechanism, step: Step, *args: Any) -> Tensor:
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

    def choice(self, step: Step, scores: Tensor, k: int, order: Tensor | None) -> Tensor:
        self.chosen.append(step(scores, k, order))
        return self.chosen[-1]

    def choose(self, part: WatchedExperts, step: Step, scores: Tensor, k: int) -> Tensor:
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
