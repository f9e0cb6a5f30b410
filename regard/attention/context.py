"""What a layer is told besides x: positions, mask, cache, memory, bias, probe, backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.attention.core import Probe
from regard.cache.base import Past
from regard.mask import Full, Mask, Span, Visible, Window
from regard.position import Rope, rotate


class Store(Protocol):
    """One layer's view of a cache: keeps the new tokens' entries, gives all of them back with their
    positions. `window`: how far back a token may look, whatever the layer says. `state`: what a recurrent
    layer left behind, until it puts another; `past` (rows, n) gives it as it was after n tokens of the call."""

    @property
    def window(self) -> int | None: ...

    @property
    def state(self) -> dict[str, Tensor]: ...

    def put(self, state: dict[str, Tensor], past: Past) -> None: ...

    def keep(self, **entries: Tensor) -> tuple[dict[str, Tensor], Span]: ...


@dataclass
class Context:
    """Everything a mechanism needs besides x: positions of the tokens, the mask, and (or None) the cache of this layer,
    the memory to attend to instead of x, a bias over positions, a probe. Made anew for each call; nothing is global."""

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

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once a call for all layers."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def angles(self, rope: Rope, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = (rope, dim, dtype)
        return self.once(key, lambda: rope.angles(self.pos.index, dim, dtype))

    def turn(self, x: Tensor, rope: Rope | None, layout: str | None = None) -> Tensor:
        """x (b t h d) rotated to its positions."""
        if rope is None:
            return x
        dtype = torch.promote_types(x.dtype, torch.float32) if rope.wide else x.dtype
        cos, sin = self.angles(rope, x.shape[-1], dtype)
        return rotate(x.to(dtype), cos, sin, layout or rope.layout).to(x.dtype)

    def keep(self, **entries: Tensor) -> tuple[dict[str, Tensor], Span]:
        """Every token's entries so far and their positions; without a cache, the entries as they are."""
        if self.store is None:
            return entries, self.memory_pos or self.pos
        return self.store.keep(**entries)

    def visible(self, k_pos: Span, window: int | None = None) -> Visible:
        """The mask bound to these keys, within the window of the layer and of its cache; layers that
        share positions share it."""
        limit = None if self.store is None else self.store.window
        window = min((w for w in (window, limit) if w is not None), default=None)
        mask = self.mask if window is None else self.mask & Window(window)
        return self.bound(("visible", window), k_pos, lambda: Visible(mask, self.pos, k_pos))

    def bias(self, k_pos: Span) -> Tensor | None:
        if self.relative is None:
            return None
        relative = self.relative
        return self.bound("bias", k_pos, lambda: relative(self.pos.index, k_pos.index))

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
