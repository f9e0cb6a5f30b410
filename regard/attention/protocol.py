"""What a mechanism is: everything that stands in a block and looks at other tokens; and what it is told besides x.

A mechanism is a frozen config (`MechanismConfig`) and the module that it makes (`Mechanism`). `forward` is written
here, once: fast forms replace `project_qkv`, `core_attention` or `project_out` (regard/fast), and models, summaries
and caches ask for `cache_spec` and `flops`, whatever the mechanism is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from regard.attention.core import Probe
from regard.cache import CacheSpec
from regard.cache.base import Store
from regard.errors import Former, Renamed
from regard.layers import Add
from regard.mask import Chunk, Full, Mask, Span, Visible, Window, places
from regard.position import Rope, Temperature, rotate

Entries = dict[str, Tensor]  # what tokens leave behind, by the names of `cache_spec`
Seen = Visible | Tensor | None
Bias = Tensor | None  # what is added to the scores (b h t s)


@dataclass
class Context:
    """Everything a mechanism needs besides x: positions of the tokens, the mask, and (or None) the cache of this layer,
    the memory to attend to instead of x, a bias over positions, the ids, a probe. Made anew for each call; nothing is
    global."""

    pos: Span
    mask: Mask = field(default_factory=Full)
    store: Store | None = None
    memory: Tensor | None = None
    memory_pos: Span | None = None
    relative: Callable[[Tensor, Tensor], Tensor] | None = None
    probe: Any = None
    backend: str = "sdpa"
    site: str = ""
    memo: dict[Any, Any] = field(default_factory=dict)
    ids: Tensor | None = None
    layer: int = 0

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once a call for all layers."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def angles(self, rope: Rope, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key, pos = (rope, dim, dtype), self.pos
        return self.once(key, lambda: rope.angles(pos.absolute, dim, dtype, pos.reach))

    def rotate(self, x: Tensor, rope: Rope | None, layout: str | None = None) -> Tensor:
        """x (b t h d) rotated to its positions."""
        if rope is None:
            return x
        dtype = torch.promote_types(x.dtype, torch.float32) if rope.wide else x.dtype
        cos, sin = self.angles(rope, x.shape[-1], dtype)
        return rotate(x.to(dtype), cos, sin, layout or rope.layout).to(x.dtype)

    def tempered(self, q: Tensor, by: Temperature | None) -> Tensor:
        """q (b t h d) times what their positions make of them."""
        if by is None:
            return q
        wide = torch.promote_types(q.dtype, torch.float32)
        gain = self.once((by, wide), lambda: by.gain(self.pos.absolute, wide))
        return (q * gain).to(q.dtype)

    def update_cache(self, **entries: Tensor) -> tuple[Entries, Span]:
        """Every token's entries so far and their positions; without a cache, the entries as they are."""
        if self.store is None:
            return entries, self.memory_pos or self.pos
        return self.store.update(**entries)

    def visible(self, k_pos: Span, window: int | None = None, chunk: int | None = None) -> Visible:
        """The mask bound to these keys, within the window and the chunk of the layer and the window of its cache;
        layers that share positions share it."""
        limit = None if self.store is None else self.store.window
        # Not min(..., default=), at which torch.compile would cut every layer in pieces.
        if window is None or (limit is not None and limit < window):
            window = limit
        mask = self.mask if window is None else self.mask & Window(window)
        if chunk is not None:
            doc = mask.documents
            mask = mask & Chunk(chunk, None if doc is None else places(doc))
        key = ("visible", window, chunk)
        return self.bound(key, k_pos, lambda: Visible(mask, self.pos, k_pos))

    def bias(self, k_pos: Span) -> Bias:
        if self.relative is None:
            return None
        relative = self.relative
        # Of documents in a row each has places of its own.
        q = self.pos.absolute
        return self.bound(("bias", relative), k_pos, lambda: relative(q, k_pos.absolute))

    def bound(self, key: Any, k_pos: Span, make: Callable[[], Any]) -> Any:
        """What `make` gives for these very keys, made once a call for all layers that read them."""
        made = self.memo.setdefault(key, [])
        for pos, value in made:
            if pos is k_pos:
                return value
        made.append((k_pos, make()))
        return made[-1][1]

    def watch(self) -> Probe | None:
        """The probe for this place (such as `decoder.3.self`), or None if it does not want it."""
        return None if self.probe is None else self.probe.at(self.site)

    turn = Former("rotate")
    keep = Former("update_cache")


class MechanismConfig(Protocol):
    """What a tower asks of the config of a mechanism: a frozen dataclass under `regard.config.settings`."""

    @property
    def kind(self) -> str:
        """Its name in files, and in the table of mechanisms."""

    @property
    def heads(self) -> int: ...

    @property
    def rope(self) -> Rope | None:
        """The rotary positions of its queries and keys, if it has them."""

    @property
    def window(self) -> int | None:
        """How many tokens a query sees at most, itself among them; None: all."""

    def make(self, dim: int, memory_dim: int | None = None, add: Add | None = None) -> Mechanism:
        """The module, in a model of width `dim`; of cross-attention, to a memory of `memory_dim`."""


class Mechanism(Renamed, nn.Module):
    """x (b t m) -> residual + f(x) (b t m), or f(x) alone without a residual."""

    # Methods with the call of `core_attention` that compute the same, where it can be computed in more than one way.
    forms: ClassVar[tuple[str, ...]] = ()
    # Whether several rows of queries may read one row of what was kept: beams that share a source.
    shares_rows: ClassVar[bool] = False

    # Why no fast part can stand for this one, whatever it holds, or nothing.
    special: str = ""

    config: Any
    wo: Any
    e: int  # width of a value head
    add: Add

    def forward(self, x: Tensor, ctx: Context, residual: Tensor | None = None) -> Tensor:
        return self.project_out(self.weigh(self.attend(x, ctx), x), residual)

    def attend(self, x: Tensor, ctx: Context) -> Tensor:
        q, new = self.project_qkv(x, ctx)
        kept, k_pos = self.kept(new, ctx)
        mask = self.visible(k_pos, ctx)
        return self.core_attention(q, kept, mask, ctx, ctx.bias(k_pos))  # b t h e

    def kept(self, new: Entries, ctx: Context) -> tuple[Entries, Span]:
        """What every token so far left behind, and where these stand."""
        return ctx.update_cache(**new)

    def visible(self, k_pos: Span, ctx: Context) -> Visible:
        """Which of these keys each query sees."""
        return ctx.visible(k_pos, self.config.window)

    def project_qkv(self, x: Tensor, ctx: Context) -> tuple[Any, Entries]:
        """Projections, head norms, positions: queries (b t h d), and what each token leaves behind."""
        return self.queries(self.query_input(x), ctx), self.entries(x, ctx)

    def query_input(self, x: Tensor) -> Tensor:
        """What queries are made of, if it is not x itself."""
        return x

    def queries(self, x: Tensor, ctx: Context) -> Tensor:
        raise NotImplementedError

    def entries(self, x: Tensor, ctx: Context) -> Entries:
        """What each token of x, or of the memory, leaves behind, by the names of `cache_spec`; nothing when a frozen
        cache already holds it."""
        raise NotImplementedError

    def core_attention(self, q: Any, kept: Entries, mask: Seen, ctx: Context, bias: Bias) -> Tensor:
        """The mechanism itself: queries meet all that was kept. (b t h e)"""
        raise NotImplementedError

    def gathered(self, q: Tensor, kept: Entries, mask: Seen, ctx: Context, bias: Bias) -> Tensor:
        """`core_attention` where every query has keys of its own: the batch is of single queries."""
        return self.core_attention(q, kept, mask, ctx, bias)

    def weigh(self, o: Tensor, x: Tensor) -> Tensor:
        """What was seen, by how much of it x lets through, where a mechanism has such a gate."""
        return o

    def project_out(self, o: Tensor, residual: Tensor | None = None) -> Tensor:
        """Output projection, and what a block adds to its stream."""
        return self.add(self.wo(o.flatten(2)), residual)

    def join(self, first: Mechanism) -> None:
        """Shares with the first layer of a tower, which has the same config, the weights that all of them have in
        common, where a mechanism has such."""

    def cache_spec(self) -> CacheSpec:
        raise NotImplementedError

    def flops(self, context: int) -> int:
        """Of one query over `context` keys, without the weights: scores and weighted sums."""
        raise NotImplementedError

    enter = Former("project_qkv")
    look = Former("attend")
    mix = Former("core_attention")
    leave = Former("project_out")
