"""What has no fast form runs as it is: a mechanism over rows that are gathered from the pages, a feed-forward over
tokens, a block over a stream that is added up. Slower, and right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.attention.protocol import Context
from regard.block import Block
from regard.cache.base import Past, State
from regard.fast.cuda.pages import Pages, pages_of
from regard.fast.cuda.residual import Read, Residual, ResidualStream, tensor
from regard.mask import Span
from regard.position import Rope


@dataclass
class Rows:
    """The tokens of a call in rows, as plain mechanisms read them: one token for each row of a step, or the prompts of
    a pack side by side, shorter ones with padding behind them."""

    span: Span  # positions (b t) of the tokens, -1 of padding
    kept: Span  # positions (b s) of all that their texts have left behind so far

    @classmethod
    def of(cls, slots: Pages) -> Rows:
        pack = slots.pack
        if pack is None:
            now = slots.now[:, None]
            return cls(Span(now), Span(_until(slots.bound, now)))
        place = torch.arange(pack.grid.shape[1], device=pack.grid.device)
        real = place < (pack.totals - pack.starts)[:, None]
        span = Span(torch.where(real, place + pack.starts[:, None], -1))
        if not pack.sizes.whole:
            return cls(span, span)
        return cls(span, Span(_until(pack.sizes.whole, pack.totals[:, None] - 1)))

    def laid(self, x: Tensor, slots: Pages) -> Tensor:
        """Tokens (n ...) in rows (b t ...)."""
        return x[:, None] if slots.pack is None else x[slots.pack.grid]

    def tokens(self, x: Tensor, slots: Pages) -> Tensor:
        """The way back."""
        return x[:, 0] if slots.pack is None else x.flatten(0, 1)[slots.pack.back]


def _until(size: int, last: Tensor) -> Tensor:
    """Positions 0, 1, ... up to the last one of each row (b 1), then -1: (b size)."""
    at = torch.arange(size, device=last.device)
    return torch.where(at <= last, at, -1)


class GatheredLayer:
    """One layer's pages, as a plain mechanism asks a cache."""

    # As a cache has it: nothing is forgotten.
    window: ClassVar[None] = None

    def __init__(self, slots: Pages, rows: Rows):
        self.slots, self.rows = slots, rows

    def update(self, **entries: Tensor) -> tuple[dict[str, Tensor], Span]:
        slots, names = self.slots, list(self.slots.stores[self.slots.index])
        slots.store(*(self.rows.tokens(entries[name], slots) for name in names))
        if slots.pack is not None and not slots.pack.sizes.whole:
            return entries, self.rows.kept
        return dict(zip(names, slots.kept(), strict=True)), self.rows.kept

    @property
    def state(self) -> State:
        return self.slots.state

    def put(self, state: State, past: Past) -> None:
        self.slots.put(state, past)


@dataclass
class RowsContext(Context):
    """Angles come from a table: a graph may not wait for numbers that the host makes."""

    def angles(self, rope: Rope, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        assert isinstance(self.store, GatheredLayer)
        at = self.pos.index.clamp(min=0)
        cos, sin = (x[at][:, :, None].to(dtype) for x in self.store.slots.angles(rope, dim))
        return cos, sin


class GenericMechanism(nn.Module):
    """A mechanism as it is, over rows that are gathered from the pages."""

    note: str

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, x: Read, ctx: Context, residual: Residual = None) -> Tensor | ResidualStream:
        slots = pages_of(ctx)
        rows = ctx.once("rows", lambda: Rows.of(slots))
        more: dict[str, Any] = {"mask": ctx.mask, "relative": ctx.relative, "site": ctx.site}
        # Of a step alone: a Context keeps what its layers share, by the positions that they have.
        more["memo"] = ctx.once("memo of rows", dict)
        within = RowsContext(rows.span, store=GatheredLayer(slots, rows), **more)
        added = None if residual is None else rows.laid(tensor(residual), slots)
        y = self.part(rows.laid(tensor(x), slots), within, added)
        return like(residual, rows.tokens(y, slots))


class GenericPart(nn.Module):
    """A part that looks at no other token, such as a feed-forward, as it is."""

    note: str

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, x: Read, residual: Residual = None) -> Tensor | ResidualStream:
        added = None if residual is None else tensor(residual)[None]
        return like(residual, self.part(tensor(x)[None], added)[0])


class GenericBlock(nn.Module):
    """A block whose order is not one that leaves sums and norms to others: its parts read and give tensors."""

    def __init__(self, block: Block):
        super().__init__()
        self.block, self.cross = block, block.cross

    def forward(
        self, x: ResidualStream, ctx: Context, cross: Context | None = None
    ) -> ResidualStream:
        return ResidualStream(self.block(tensor(x), ctx, cross), x.many, x.fast)


def like(residual: Residual, y: Tensor) -> Tensor | ResidualStream:
    """y, with what was added to already in it, as a stream where that was one."""
    if isinstance(residual, ResidualStream):
        return ResidualStream(y, residual.many, residual.fast)
    return y
