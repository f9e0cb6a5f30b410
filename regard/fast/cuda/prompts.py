"""Prompts laid end to end, (t ...), so that no matrix product sees padding.

Sizes are rounded up, so that a few CUDA graphs hold every pass: spare tokens repeat the last one, spare prompts the
last prompt, and both write again what it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.triton.prompt import Laid

RECORDED = 4096  # tokens of a pass over prompts that is recorded as a CUDA graph


@dataclass
class Part:
    """Tokens of a prompt that are read now, after `start` that the cache has, into the pages of the whole text."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    # What begins to write when the prompt is through: rows of the decoder, and how many tokens each has said.
    ends: Sequence[tuple[int, int]] = ()
    # A row that has its state or knows its source's pages; and the source's tokens.
    home: int = 0
    source: int = 0


class Sizes(NamedTuple):
    tokens: int
    prompts: int
    longest: int  # tokens of a prompt
    whole: int  # tokens of a text, what is in the cache among them; 0 where nothing is
    places: int  # pages of a text
    ends: int
    source: int  # tokens of the longest source


def round_up(n: int, least: int = 64) -> int:
    """n rounded up to a multiple of `least`, in steps of a quarter above 4 `least`."""
    step = max(least, 1 << max(0, (n - 1).bit_length() - 3))
    return -(-n // step) * step


def next_power_of_two(n: int) -> int:
    """The smallest power of two from n on; 0 of 0."""
    return 1 << (n - 1).bit_length() if n else 0


def sizes_of(parts: Sequence[Part], page: int) -> Sizes:
    longest, tokens = (
        round_up(max(len(p.tokens) for p in parts), 32),
        sum(len(p.tokens) for p in parts),
    )
    whole = (
        round_up(max(p.start + len(p.tokens) for p in parts)) if any(p.start for p in parts) else 0
    )
    return Sizes(
        # What no graph will hold is padded no further than a block.
        round_up(tokens) if tokens <= RECORDED and not whole else -(-tokens // 64) * 64,
        next_power_of_two(len(parts)),
        longest,
        whole,
        -(-max(whole, longest) // page),
        next_power_of_two(sum(len(p.ends) for p in parts)),
        next_power_of_two(max(p.source for p in parts)),
    )


def flat(parts: Sequence[Part], sizes: Sizes) -> Tensor:
    """All the numbers of a Pack, in its order, for one copy to the device."""
    count = torch.tensor([len(p.tokens) for p in parts])
    start, home = torch.tensor([(p.start, p.home) for p in parts]).T
    first = count.cumsum(0) - count
    row = torch.arange(len(parts)).repeat_interleave(count)
    ids = torch.tensor([token for p in parts for token in p.tokens])
    place = (every := torch.arange(len(ids))) - first[row]
    # A spare place of a prompt has its last token, a spare page its last page.
    grid = first[:, None] + torch.arange(sizes.longest).minimum(count[:, None] - 1)
    pages = [[*p.pages[: sizes.places]] for p in parts]
    table = torch.tensor([each + each[-1:] * (sizes.places - len(each)) for each in pages])
    ends = [
        (end - 1, *writer, size)
        for p, end, size in zip(
            parts, (first + count).tolist(), (start + count).tolist(), strict=True
        )
        for writer in p.ends
    ]
    columns = torch.tensor(ends, dtype=torch.long).view(-1, 4).T
    by_token = (ids, start[row] + place, row, row * sizes.longest + place, every)
    each = [
        *(_filled(x, sizes.tokens) for x in by_token),
        *(_filled(x, sizes.prompts) for x in (grid, table, start, start + count, home)),
        _filled(torch.cat([first, count.sum()[None]]), sizes.prompts + 1),
        *(_filled(x, sizes.ends) for x in columns),
    ]
    return torch.cat([x.flatten() for x in each])


def _filled(x: Tensor, size: int) -> Tensor:
    """The last of x repeated up to a size."""
    return torch.cat([x, x[-1:].expand(size - len(x), *x.shape[1:])])


@dataclass
class Pack:
    """Prompts on the device, int64."""

    sizes: Sizes
    ids: Tensor  # (t) tokens,
    pos: Tensor  # (t) their positions,
    row: Tensor  # (t) their prompts
    back: Tensor  # (t) their places in (n s),
    order: Tensor  # (t) and end to end
    grid: Tensor  # (n s) the token at each place
    table: Tensor  # (n places) each prompt's pages,
    starts: Tensor  # (n) how much of its text the cache has
    totals: Tensor  # (n) and will have,
    slot_ids: Tensor  # (n) and a row that has its state or knows its source
    ends: Tensor  # (n + 1) where each begins end to end, and the last ends
    last: Tensor  # (e) the last token of those that are through,
    rows: Tensor  # (e) where each goes on,
    said: Tensor  # (e) what it has said
    lengths: Tensor  # (e) and the length of its text
    # Of a few tokens of long texts: how many keys each sees (t), and its pages (t places), int32. As rows of a step,
    # these are read by more programs.
    single: tuple[Tensor, Tensor] | None = None
    laid: dict[tuple[int, ...], Laid] = field(default_factory=dict)

    @classmethod
    def of(cls, numbers: Tensor, sizes: Sizes) -> Pack:
        t, n, s, _, places, e, _ = sizes
        each = numbers.split([*[t] * 5, n * s, n * places, n, n, n, n + 1, e, e, e, e])
        ids, pos, row, back, order, grid, table, *rest = each
        grid, table = grid.view(n, s), table.view(n, places)
        return cls(sizes, ids, pos, row, back, order, grid, table, *rest)

    @property
    def longest(self) -> int:
        return self.sizes.longest

    @property
    def whole(self) -> int:
        return self.sizes.whole

    def rooms(self, like: Tensor, heads: int, groups: int, d: int, rows: bool) -> Laid:
        """Zeros for q, k and v, the same for every layer: what no token is written to stays zero."""
        key = (heads, groups, d, rows)
        if key not in self.laid:
            shape = self.grid.shape if rows else self.order.shape
            q, k, v = (like.new_zeros(*shape, count, d) for count in (heads, groups, groups))
            self.laid[key] = q, k, v
        return self.laid[key]
