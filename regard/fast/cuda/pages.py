"""The caches of all layers as pages that stay where they are, and what one call asks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.attention.protocol import Context
from regard.cache.base import Past, State
from regard.fast.cuda.prompts import Pack
from regard.kernels.triton import latent as gpu_latent
from regard.kernels.triton.linear import ready
from regard.mask import Span
from regard.position import RelativeBias, Rope


@dataclass
class Pages:
    """The caches of all layers, pages that are named by a block table (b places), and what is asked now: a step at
    positions `pos` (b), no row that counts longer than `bound`, or the prompts of a `pack`. States of fixed size have a
    place for every row; those of rows that are not `live` stay as they are."""

    stores: list[dict[str, Tensor]]  # of each layer: (pages page ...)
    table: Tensor
    length: int
    pos: Tensor | None = None
    live: Tensor | None = None
    bound: int = 0
    pack: Pack | None = None
    index: int = 0
    entries: slice = field(default_factory=lambda: slice(None))
    states: list[dict[str, Tensor]] = field(default_factory=list)  # of each layer: (rows ...)
    memo: dict[Any, Any] = field(default_factory=dict)

    def layer(self, index: int) -> Pages:
        return replace(self, index=index)

    def only(self, entries: slice) -> Pages:
        """Some of what a layer's tokens leave behind."""
        return replace(self, entries=entries)

    @property
    def mine(self) -> tuple[Tensor, ...]:
        return tuple(self.stores[self.index].values())[self.entries]

    @property
    def now(self) -> Tensor:
        """The positions (b) of a step."""
        assert self.pos is not None
        return self.pos

    @property
    def longest(self) -> int:
        """No text that counts is longer."""
        return self.bound if self.pack is None else self.pack.sizes.whole or self.pack.sizes.longest

    def each(self, most: int) -> Iterator[tuple[slice, Pages]]:
        """A step as it is, or the tokens of a pack, up to `most` at once, as rows of steps."""
        if (pack := self.pack) is None:
            yield slice(None), self
            return
        for i in range(0, len(pack.pos), most):
            rows = slice(i, i + most)
            table = pack.table[pack.row[rows]].int()
            yield (
                rows,
                replace(self, pack=None, table=table, pos=pack.pos[rows], bound=self.longest),
            )

    def at(self, spots: Tensor, real: Tensor) -> tuple[Tensor, ...]:
        """What tokens of the pool (n k) left behind, (n k ...); zero where one is not `real`."""
        spots = spots.long().where(real, 0)
        each = (memory.flatten(0, 1)[spots] for memory in self.mine)
        return tuple(x.masked_fill(~real.view(*real.shape, *[1] * (x.dim() - 2)), 0) for x in each)

    def store(self, *new: Tensor) -> None:
        """What each token (n ...) leaves behind, in its page."""
        if self.pos is not None and self.pack is None and ready(self.mine[0]):
            for memory, x in zip(self.mine, new, strict=True):
                gpu_latent.put(x.flatten(1), memory.flatten(2), self.table, self.pos)
            return
        pack, size = self.pack, self.mine[0].shape[1]
        if pack is not None:
            table, row, pos = pack.table, pack.row, pack.pos
        else:
            table, pos = self.table, self.now
            row = torch.arange(len(pos), device=pos.device)
        page = table[row, pos // size].long()
        for memory, x in zip(self.mine, new, strict=True):
            memory[page, pos % size] = x

    def kept(self) -> tuple[Tensor, ...]:
        """What every token so far left behind, (b s ...): of the first `bound` places in a step, of whole texts in a
        pack. Zero where no token is: what others left there may be no number."""
        pack, size = self.pack, self.mine[0].shape[1]
        if pack is not None:
            table, s, lengths = pack.table, pack.sizes.whole, pack.totals
        else:
            table, s, lengths = self.table, self.bound, self.now + 1
        pages = table[:, : -(-s // size)].long()
        real = torch.arange(s, device=lengths.device) < lengths[:, None]
        each = (memory[pages].flatten(1, 2)[:, :s] for memory in self.mine)
        return tuple(x.masked_fill(~real.view(*real.shape, *[1] * (x.dim() - 2)), 0) for x in each)

    def update(self, **entries: Tensor) -> tuple[dict[str, Tensor], Span]:
        """All that lies in the pages of a step's rows, or of a pack's texts, and their positions, as a cache gives
        them; past the end of a text what others left there."""
        assert not entries, "parts put theirs there by `store`"
        table = (self.table if self.pack is None else self.pack.table).long()
        stores = self.stores[self.index]
        each = {name: x[table].flatten(1, 2) for name, x in stores.items()}
        size = next((x.shape[1] for x in each.values()), 0)
        return each, Span.run(0, size, table.device)

    # As a cache has it: nothing is forgotten.
    window: ClassVar[None] = None

    @property
    def state(self) -> State:
        """Of every row of the step, or of every prompt: nothing where a text begins."""
        mine, pack = self.states[self.index], self.pack
        if pack is None:
            return {name: x[: len(self.now)] for name, x in mine.items()}
        new = pack.starts == 0
        return {name: x[pack.slot_ids].masked_fill(_as(new, x), 0) for name, x in mine.items()}

    def put(self, state: State, past: Past) -> None:
        """`past`, what takes tokens back, is not asked for here."""
        for name, x in self.states[self.index].items():
            if self.pack is not None:
                x[self.pack.slot_ids] = state[name].to(x.dtype)
            else:
                assert self.live is not None
                old = x[: len(self.live)]
                old.copy_(torch.where(_as(self.live > 0, x), state[name].to(x.dtype), old))

    def part(self, pack: Pack) -> None:
        """The prompts' last states, to every row that goes on from them."""
        source = pack.slot_ids[pack.row[pack.last]]
        for states in self.states:
            for x in states.values():
                x[pack.rows] = x[source]

    def chosen(self, k: int) -> Tensor:
        """Which of k chosen tokens there are: (b k)."""
        return torch.arange(k, device=self.now.device) <= self.now[:, None]

    @property
    def gap(self) -> Tensor:
        """How many tokens back each of the first `bound` places is in a step: (b 1 bound)."""
        return self.now[:, None, None] - torch.arange(self.bound, device=self.now.device)

    def seen(self, window: int | None) -> Tensor:
        """Which of the first `bound` places a step may see: (b 1 1 bound)."""
        gap = self.gap
        near = (gap >= 0) if window is None else (gap >= 0) & (gap < window)
        return near[:, None]

    def bias(self, relative: Callable[[Tensor, Tensor], Tensor] | None) -> Tensor | None:
        """What is added to the score of a key so many tokens back, (h n); the last counts for all farther ones."""
        if relative is not None and relative not in self.memo:
            assert isinstance(relative, RelativeBias)
            far = getattr(relative.config, "max_distance", self.length)
            at = torch.arange(min(far + 1, self.length), device=self.table.device)
            self.memo[relative] = relative(at[-1:, None], at[None])[0, :, 0].flip(-1).contiguous()
        return self.memo.get(relative)

    def angles(self, rope: Rope, dim: int) -> tuple[Tensor, Tensor]:
        """cos and sin for every position, (length r/2) each. No text of a graph is as long as LongRoPE's border."""
        if (rope, dim) not in self.memo:
            like = self.mine[0]
            at = torch.arange(self.length, device=like.device)
            wide = torch.promote_types(like.dtype, torch.float32)
            cos, sin = rope.angles(at[None], dim, wide if rope.wide else like.dtype)
            self.memo[rope, dim] = cos[0, :, 0].contiguous(), sin[0, :, 0].contiguous()
        return self.memo[rope, dim]


def _as(rows: Tensor, x: Tensor) -> Tensor:
    """(b) as (b 1 ...), as many axes as x has."""
    return rows.view(-1, *[1] * (x.dim() - 1))


def pages_of(ctx: Context) -> Pages:
    """What a call has for a cache, with this target's parts."""
    assert isinstance(ctx.store, Pages)
    return ctx.store


@dataclass
class GraphContext(Context):
    """Angles come from a table: a graph may not wait for numbers that the host makes."""

    def angles(self, rope: Rope, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        slots = pages_of(self)
        cos, sin = (x[self.pos.index][:, :, None] for x in slots.angles(rope, dim))
        return cos, sin

    def rotate(
        self, x: Tensor, rope: Rope | None, layout: str | None = None, out: Tensor | None = None
    ) -> Tensor:
        """By one kernel in a step, where there is one; into `out`, which may be x."""
        slots = pages_of(self)
        if rope is None or slots.pack is not None or not ready(x) or x.stride(-1) != 1:
            y = super().rotate(x, rope, layout)
            return y if out is None else out.copy_(y)
        paired, at = (layout or rope.layout) != "half", self.pos.index.flatten()
        to = None if out is None else out.flatten(0, 1)
        y = gpu_latent.rotate(x.flatten(0, 1), slots.angles(rope, x.shape[-1]), at, paired, to)
        return y.view(x.shape) if out is None else out
