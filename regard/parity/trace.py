"""What a run computed on its way: every tensor at [row, position] of the text that it reads,
however it was cut into rows, chunks, pages and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.protocol import Context
from regard.fast.watch import Step as Part
from regard.fast.watch import WatchedExperts, WatchedMechanism, Watcher
from regard.mask import Span
from regard.models import Model

# Tokens: few, so that short texts fill some pages.
PAGE = 4


@dataclass
class Given:
    """What all runs read: ids (rows, positions) or images, and a source. `common`: how many first
    tokens a row of the second half shares with the same one of the first."""

    ids: Tensor
    source: Tensor | None = None
    common: int = 0

    def times(self, count: int) -> Given:
        """All rows `count` times."""
        source = None if self.source is None else torch.cat([self.source] * count)
        return Given(torch.cat([self.ids] * count), source, self.common)

    def shared(self) -> Given:
        """All rows, and again all, which begin alike and go on as the next row does. They part
        inside a page, and a token before that are still in it."""
        common = self.ids.shape[1] // 2 + 1
        common -= (1, 2, 0, 0)[common % PAGE]
        twice = self.times(2)
        twice.ids[len(self.ids) :, common:] = self.ids.roll(-1, 0)[:, common:]
        return replace(twice, common=common)


class Cells:
    """Which token each place (b t) of a call holds, from one (row, start, size) for each row of the
    call: `size` tokens of a text, the first at position `start`. There is room for `width` of them,
    or for the longest; `flat`: they lie end to end instead. `index` (b t) has their positions."""

    def __init__(
        self, given: Sequence[tuple[int, int, int]], width: int | None = None, flat: bool = False
    ):
        self.given = list(given)
        self.flat = flat
        self.rows, starts, sizes = torch.tensor(self.given).T
        self.ends = starts + sizes
        self.index = Span.ragged(sizes, width or int(sizes.max()), starts).index
        self.at = (self.index >= 0).nonzero(as_tuple=True)
        self.to = (self.rows[self.at[0]], self.index[self.at])

    def put(self, whole: Tensor, part: Tensor) -> None:
        """A call's tensor (b t ...) to its places in (rows, positions, ...)."""
        whole[self.to] = part[self.at].to(whole)

    def tokens(self, part: Tensor) -> Tensor:
        """The tokens (n ...) of a call's tensor, which has places for them (b t ...), or has them
        end to end, and then padding: (n ...), or (1 n ...)."""
        b, t = self.index.shape
        if not self.flat and part.dim() > 2 and part.shape[:2] == (b, t):
            return part[self.at]
        if part.dim() > 2 and len(part) == 1:
            part = part[0]
        if not self.flat and len(part) == b * t:
            return part.unflatten(0, (b, t))[self.at]
        return part[: len(self.at[0])]

    def take(self, whole: Tensor) -> Tensor:
        """The reverse: zeros at padding."""
        part = whole.new_zeros(*self.index.shape, *whole.shape[2:])
        part[self.at] = whole[self.to]
        return part


@dataclass
class Attended:
    """One call of one attention: the keys it had by position, `kept` (b size+1 ...), of which the
    last place is never seen; which of them it `held` (b size+1); how many tokens there are to see,
    `lengths` (b); and the positions that a sparse one chose, `chosen` (b t k)."""

    cells: Cells
    kept: dict[str, Tensor]
    held: Tensor
    lengths: Tensor
    chosen: Tensor | None = None

    @property
    def index(self) -> Tensor:
        """Positions of the keys, -1 where there is no token."""
        at = torch.arange(self.held.shape[1])
        return torch.where(at < self.lengths[:, None], at, -1)

    def shared(self, half: int, common: int) -> list[Attended]:
        """The same, if the second half of all rows has the first `common` tokens from the first."""
        each = [(row, i, start) for i, (row, start, size) in enumerate(self.cells.given) if size]
        own = [(row, i) for row, i, start in each if row < half or start >= common]
        copied = [(row + half, i) for row, i, start in each if row < half and start < common]
        return [self.moved(some) for some in (own, copied) if some]

    def moved(self, rows: list[tuple[int, int]]) -> Attended:
        """Some of its rows, as if they were others: (which it is to be, which it is)."""
        at = [i for _, i in rows]
        cells = Cells([(row, *self.cells.given[i][1:]) for row, i in rows])
        entries = {name: x[at] for name, x in self.kept.items()}
        chosen = None if self.chosen is None else self.chosen[at]
        return Attended(cells, entries, self.held[at], self.lengths[at], chosen)


@dataclass
class Trace:
    """All that one run computed: `tensors` (rows, positions, numbers) by name, in float64, and
    which places of them are `real`. What it did not show is not there, and is neither compared nor
    guessed.

    `size`: rows and positions; `source`: positions of the source; `lengths` of both, where rows are
    cut. `int8`: linear layers round to 8 bits. `of_source`: names of what was made of the source.
    `labelled`: one answer for each row."""

    given: Given
    size: tuple[int, int]
    source: int = 0
    dtype: torch.dtype = torch.float32
    int8: bool = False
    lengths: Tensor | None = None
    source_lengths: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, list[Attended]] = field(default_factory=dict)
    real: dict[str, Tensor] = field(default_factory=dict)
    of_source: set[str] = field(default_factory=set)
    labelled: bool = False

    # An engine computes in inference mode, whose tensors cannot be changed later.
    @torch.inference_mode(False)
    @torch.no_grad()
    def put(self, name: str, x: Tensor, cells: Cells, source: bool = False) -> None:
        x = cells.tokens(x.detach().cpu()).flatten(1)
        if name not in self.tensors:
            shape = (self.size[0], self.source if source else self.size[1])
            self.tensors[name] = torch.zeros(*shape, x.shape[1], dtype=torch.float64)
            self.real[name] = torch.zeros(shape, dtype=torch.bool)
            self.of_source |= {name} if source else set()
        self.tensors[name][cells.to] = x.double()
        self.real[name][cells.to] = True

    def put_answer(self, y: Tensor, cells: Cells) -> None:
        """What the model gave; one for each row (a label) lies at the row's first place."""
        if y.dim() == 2:
            cells = Cells([(row, 0, 1) for row in cells.rows.tolist()])
            y = y[:, None]
            self.labelled = True
        self.put("logits", y, cells)

    def share(self) -> None:
        """Give the second half of the rows the tokens that it has in common with the first."""
        half = self.size[0] // 2
        common = self.given.common
        for each in (self.tensors, self.real):
            for name, x in each.items():
                size = None if name in self.of_source else common
                if not (self.labelled and name == "logits"):
                    x[half:, :size] = x[:half, :size]
        for name, calls in self.calls.items():
            self.calls[name] = [x for call in calls for x in call.shared(half, common)]

    def hidden(self, name: str) -> Tensor:
        """Which places (rows, positions) of a tensor were not seen, where there is a token."""
        real = self.real[name]
        lengths = self.source_lengths if name in self.of_source else self.lengths
        there = torch.ones_like(real)
        if lengths is not None:
            there = torch.arange(real.shape[1]) < lengths[:, None]
        return there & ~real

    @property
    def form(self) -> Any:
        """What the envelopes of runs depend on: the type, the texts, and what was seen of them."""
        seen = [(name, self.hidden(name).numpy().tobytes()) for name in self.tensors]
        texts = self.given.ids.numpy().tobytes()
        return self.dtype, self.int8, texts, tuple(sorted(seen)), tuple(sorted(self.calls))

    def as_seen(self, run: Trace) -> Trace:
        """Of what is here, which holds every row several times, as much as `run` has shown."""
        times = self.size[0] // run.size[0]
        names = [name for name in self.tensors if name in run.tensors]
        return replace(
            self,
            tensors={name: self.tensors[name] for name in names},
            real={name: ~run.hidden(name).repeat(times, 1) for name in names},
            calls={name: calls for name, calls in self.calls.items() if name in run.calls},
        )


class Recorder(Watcher):
    """Changes nothing and notes everything; `cells` and `source_cells` say which tokens the call
    under way reads."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.cells = self.source_cells = Cells([(0, 0, 1)])
        self.chosen: list[Tensor] = []

    def see(self, name: str, x: Tensor, source: bool = False) -> Tensor:
        self.trace.put(name, x, self.source_cells if source else self.cells, source)
        return x

    def all_read(self) -> None:
        """From here on every row has a source, of which only some were encoded."""
        rows = range(self.trace.size[0])
        self.source_cells = Cells([(row, 0, self.trace.source) for row in rows])

    def core_attention(self, part: WatchedMechanism, step: Part, *args: Any) -> Tensor:
        o = step(*args)
        _, kept, mask, _, _ = args
        self.attended(part, kept, mask.k.index)
        return o

    def read(self, part: WatchedMechanism, ctx: Context) -> None:
        kept, span = ({}, ctx.pos) if ctx.store is None else ctx.store.update()
        if not kept:
            return
        cells = self.cells
        if cells.flat:
            # A row of keys for each text, and padding; of a source for each token: take the first.
            sizes = [size if part.cross else 1 for *_, size in cells.given]
            first = torch.tensor([0, *sizes[:-1]]).cumsum(0)
            kept = {name: x[first.to(x.device)] for name, x in kept.items()}
        places = span.index.expand(len(cells.given), -1)
        if self.chosen:
            # Tokens end to end, and positions, at which their slots lie too; -1, where there are
            # too few keys, is one more slot, which holds none.
            places = F.pad(places, (0, 1), value=-1)
            kept = {name: torch.cat([x, torch.zeros_like(x[:, :1])], 1) for name, x in kept.items()}
            chosen = torch.cat(self.chosen).cpu()
            rows = chosen.new_zeros(*cells.index.shape, chosen.shape[-1])
            rows[cells.at] = cells.tokens(chosen)
            self.chosen = [rows % places.shape[1]]
        self.attended(part, kept, places)

    @torch.inference_mode(False)
    @torch.no_grad()
    def attended(self, part: WatchedMechanism, kept: dict[str, Tensor], index: Tensor) -> None:
        """Note the keys of a call, which lie at the positions of `index`."""
        cells = self.source_cells if part.source else self.cells
        lengths = cells.ends
        if part.cross:
            # Rows of the source, in the order of this call.
            ends = torch.zeros(self.trace.size[0], dtype=torch.long)
            ends[self.source_cells.rows] = self.source_cells.ends
            lengths = ends[cells.rows]
        entries, held, slots = by_position(kept, index.cpu(), int(lengths.max()))
        chosen = None
        if self.chosen:
            chosen = torch.cat(self.chosen, 1).cpu()
            chosen = slots.gather(1, chosen.flatten(1)).view_as(chosen)
            self.chosen = []
        if len(cells.at[0]):
            call = Attended(cells, entries, held, lengths, chosen)
            self.trace.calls.setdefault(part.name, []).append(call)

    def choice(self, step: Part, scores: Tensor, k: int, order: Tensor | None) -> Tensor:
        self.chosen.append(step(scores, k, order))
        return self.chosen[-1]

    def chose(self, positions: Tensor) -> None:
        self.chosen.append(positions)

    def choose(self, part: WatchedExperts, step: Part, scores: Tensor, k: int) -> Tensor:
        chosen = step(scores, k)
        self.see(f"{part.name} choice {part.choices}", chosen, part.source)
        return chosen


def by_position(
    kept: dict[str, Tensor], index: Tensor, size: int
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Entries (b s ...) brought to their positions (b size+1 ...), which of them were there, and
    for each slot its position; what has none goes to the last place."""
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


def trace_of(model: Model, given: Given, dtype: torch.dtype) -> Trace:
    """An empty one, of the size of what is read."""

    def size(x: Tensor | None, part: str) -> int:
        if x is None or x.dim() == 2:
            return 0 if x is None else x.shape[1]
        return getattr(model.config, part).tokens

    positions = size(given.ids, "embedding")
    return Trace(given, (len(given.ids), positions), size(given.source, "source"), dtype)
