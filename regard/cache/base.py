"""What decoding remembers: contents (declared by each layer) times layout (Contiguous, Ring, Paged).

A mechanism declares what one token leaves behind, such as {"k": (g, d), "v": (g, d)} or {"latent": (c,), "k_rope":
(r,)}; a recurrent layer declares a fixed `state`. Any layout stores any contents. A forward pass calls `begin` once,
which gives
the new tokens their positions, and each layer then calls `keep`, which stores its entries and returns all of them.
Slots are zero before they are written: 0 * NaN is NaN, so a masked slot must hold a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.config import UsageError
from regard.mask import Span


@dataclass(frozen=True)
class CacheSpec:
    """What one layer keeps: entries for every token, and a state of fixed size."""

    token: dict[str, tuple[int, ...]] = field(default_factory=dict)
    state: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def numbers(self) -> int:
        """Numbers kept for each token."""
        return sum(torch.Size(shape).numel() for shape in self.token.values())


class Layer:
    """One layer's view of a cache; what a Context calls `store`."""

    def __init__(self, cache: Cache, index: int):
        self.cache, self.index = cache, index

    def keep(self, **entries: Tensor) -> tuple[dict[str, Tensor], Span]:
        return self.cache.keep(self.index, entries)

    @property
    def frozen(self) -> bool:
        return self.cache.frozen

    @property
    def state(self) -> dict[str, Tensor]:
        return self.cache.states[self.index]


class Cache:
    """The operations; a layout adds where tokens lie. Rows may have different lengths."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        batch: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.specs, self.device, self.dtype = list(specs), torch.device(device or "cpu"), dtype
        self.lengths = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.even: int | None = (
            0  # the common length while all rows agree: no index tensors are needed then
        )
        self.frozen = False
        self.cross: Cache | None = None  # an encoder's keys and values, written once
        self.states = [
            {name: self._zeros(batch, *shape) for name, shape in spec.state.items()}
            for spec in self.specs
        ]
        self._rows: Tensor | None = (
            None  # (row, slot) of the tokens being written, when rows differ
        )
        self._new = Span.run(0, 0, self.device)
        self._all = self._new

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device, dtype=self.dtype)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def span(self) -> Span:
        """Positions of every slot that `keep` returns."""
        return self._all

    def layer(self, index: int) -> Layer:
        return Layer(self, index)

    def begin(self, size: int, lengths: Tensor | None = None) -> Span:
        """Make room for `size` more tokens (`lengths` of them in each row) and return their positions."""
        if self.frozen:
            raise UsageError("this cache is frozen: it is read, not written; make a new one")
        old, start = self.lengths, self.even
        added = torch.full_like(old, size) if lengths is None else lengths.to(old)
        self._reserve(old, added, size)
        self.lengths = old + added
        if start is not None and (lengths is None or bool((added == size).all())):
            self.even = start + size
            self._new = Span.run(start, size, self.device)
        else:
            self.even = None
            self._new = Span.ragged(added, size, old)
        self._all = self._positions()
        return self._new

    def rewind(self, tokens: int | Tensor) -> None:
        """Forget the last `tokens` of every row (or as many as the tensor says for each)."""
        drop = torch.as_tensor(tokens, device=self.device)
        if any(spec.state for spec in self.specs) and bool((drop > 0).any()):
            raise UsageError(
                "a recurrent state cannot be rewound: it holds only the present; fork it before"
            )
        if bool((drop > self.lengths).any()):
            raise UsageError(
                f"cannot rewind {int(drop.max())} tokens: the shortest row holds {int(self.lengths.min())}"
            )
        self._check_rewind(drop)
        self.lengths = self.lengths - drop
        first = int(self.lengths[0]) if self.batch else 0
        self.even = first if bool((self.lengths == first).all()) else None
        self._all = self._positions()

    def fork(self, rows: Tensor) -> Cache:
        """A cache whose row i continues row rows[i]: beams, samples, a shared prefix. The old one stays as it was."""
        new = self.__class__.__new__(self.__class__)
        new.__dict__.update(self.__dict__)
        rows = rows.to(self.device)
        new.lengths = self.lengths[rows]
        new.states = [{n: s[rows] for n, s in state.items()} for state in self.states]
        new.cross = None if self.cross is None else self.cross.fork(rows)
        new._fork_from(self, rows)
        new._all = new._positions()
        return new

    def freeze(self) -> None:
        """Read only from here on (an encoder's keys and values)."""
        self.frozen = True

    def free(self) -> None:
        """Give the memory back; the cache is empty afterwards."""
        self.lengths = torch.zeros_like(self.lengths)
        self.even, self.cross = 0, None
        self.states = [{n: torch.zeros_like(s) for n, s in state.items()} for state in self.states]
        self._free()
        self._all = self._positions()

    def keep(self, layer: int, entries: dict[str, Tensor]) -> tuple[dict[str, Tensor], Span]:
        """Store the entries of the tokens announced by `begin`, return all tokens' entries and positions."""
        if not self.frozen:
            self._write(layer, entries)
        return self._read(layer), self._all

    # what a layout defines
    def _reserve(self, old: Tensor, added: Tensor, size: int) -> None:
        raise NotImplementedError

    def _positions(self) -> Span:
        raise NotImplementedError

    def _write(self, layer: int, entries: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _read(self, layer: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def _fork_from(self, old: Cache, rows: Tensor) -> None:
        raise NotImplementedError

    def _free(self) -> None:
        raise NotImplementedError

    def _check_rewind(self, drop: Tensor) -> None:
        """Layouts that forget refuse what they no longer hold."""
