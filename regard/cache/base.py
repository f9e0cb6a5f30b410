"""What decoding remembers: contents (declared by each layer) times layout (Contiguous, Ring, Paged).

A mechanism declares what one token leaves behind, such as {"k": (g, d), "v": (g, d)} or {"latent": (c,)}; a recurrent
layer declares a fixed `state`. Any layout stores any contents. A forward pass calls `begin` once, which gives the new
tokens their positions, and each layer then calls `update`, which stores its entries and returns all of them. Slots are
zero before they are written: 0 * NaN is NaN, so a masked slot must hold a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from regard.errors import Former, Renamed, UsageError
from regard.mask import Span
from regard.position import Rope

State = dict[str, Tensor]
# Of some rows (r) the state after the first n (r) tokens of the last call.
Past = Callable[[Tensor, Tensor], State]


@dataclass(frozen=True)
class CacheSpec:
    """What one layer keeps: entries for every token, and a state of fixed size, of which the last `back` tokens can be
    taken back right after the call that fed them. `turned`: the entries that RoPE has turned to their positions; None
    where what is kept cannot be brought to other positions."""

    token: dict[str, tuple[int, ...]] = field(default_factory=dict)
    state: dict[str, tuple[int, ...]] = field(default_factory=dict)
    back: int = 0
    turned: dict[str, Rope] | None = field(default_factory=dict)

    def numbers(self) -> int:
        """Numbers kept for each token."""
        return sum(torch.Size(shape).numel() for shape in self.token.values())


def alike(specs: Sequence[CacheSpec], others: Sequence[CacheSpec]) -> bool:
    """Whether tokens of layers with these specs can lie where those of the others do."""
    pairs = zip(specs, others, strict=False)
    return len(specs) <= len(others) and all(a.token == b.token for a, b in pairs)


def taken_back(specs: Sequence[CacheSpec]) -> float:
    """How many of the last tokens all layers can take back: any number, but for states."""
    return min((spec.back for spec in specs if spec.state), default=float("inf"))


class Store(Protocol):
    """What a Context calls `store`: one layer's memory, whoever has it."""

    @property
    def window(self) -> int | None: ...

    @property
    def state(self) -> State: ...

    def update(self, **entries: Tensor) -> tuple[dict[str, Tensor], Span]: ...

    def put(self, state: State, past: Past) -> None: ...


class Layer:
    """One layer's view of a cache."""

    def __init__(self, cache: Cache, index: int):
        self.cache, self.index = cache, index

    def update(self, **entries: Tensor) -> tuple[dict[str, Tensor], Span]:
        return self.cache.update(self.index, entries)

    @property
    def window(self) -> int | None:
        return self.cache.window

    @property
    def state(self) -> State:
        return self.cache.states[self.index]

    def put(self, state: State, past: Past) -> None:
        self.cache.states[self.index], self.cache.pasts[self.index] = state, past

    keep = Former("update")


class Cache(Renamed):
    """The operations; a layout adds where tokens lie. Rows may have different lengths."""

    # How far back a token may look; a layout that forgets says it.
    window: int | None = None
    # Whether texts may go on past the model's context, as nothing is shown farther away than that.
    endless = False

    def __init__(
        self, specs: Sequence[CacheSpec], batch: int, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None
    ):  # fmt: skip
        self.specs, self.device, self.dtype = list(specs), torch.device(device or "cpu"), dtype
        self.lengths = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.even: int | None = 0  # the common length while all rows agree: then no index is needed
        self.frozen = False
        # An encoder's keys and values, written once: this cache's own, given up with it.
        self.cross: Cache | None = None
        self.states = [
            {name: self._zeros(batch, *shape) for name, shape in spec.state.items()}
            for spec in self.specs
        ]
        # How to take tokens of the last call back: a function of each layer with a state; how many
        # of its tokens each row still has; and which row of the call it was, if not the same.
        self.pasts: dict[int, Past] = {}
        self._fed = self.lengths
        self._was: Tensor | None = None
        # Of the next call: how long each text is that its tokens are a part of (b).
        self.reach: Tensor | None = None
        self._new = self._all = Span.run(0, 0, self.device)
        self._where: tuple[Tensor, Tensor, Tensor] | None = None

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device, dtype=self.dtype)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def span(self) -> Span:
        """Positions of every slot that `update` returns."""
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
        self.pasts, self._fed, self._was = {}, added, None
        if start is not None and (lengths is None or bool((added == size).all())):
            self.even = start + size
            span = Span.run(start, size, self.device)
        else:
            self.even = None
            span = Span.ragged(added, size, old)
        self._new = span if self.reach is None else replace(span, reach=self.reach)
        self.reach = None
        self._where = None
        self._all = self._positions()
        return self._new

    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and position of every real token announced by `begin`; made once for all layers."""
        if self._where is None:
            pos = self._new.index.expand(self.batch, -1)
            row, column = (pos >= 0).nonzero(as_tuple=True)
            self._where = (row, column, pos[row, column])
        return self._where

    def rewind(self, tokens: int | Tensor) -> None:
        """Forget the last `tokens` of every row (or as many as the tensor says for each)."""
        drop = torch.as_tensor(tokens, device=self.device)
        if bool((drop < 0).any()):
            raise UsageError(
                f"cannot rewind {int(drop.min())} tokens: give how many of the last to forget, 0 or more"
            )
        if bool((drop > self.lengths).any()):
            raise UsageError(
                f"cannot rewind {int(drop.max())} tokens: the shortest row holds {int(self.lengths.min())}"
            )
        self._check_rewind(drop)
        if any(spec.state for spec in self.specs) and bool((drop > 0).any()):
            rows = torch.arange(self.batch, device=self.device)
            self.states = self.past(rows, drop.expand_as(rows))
            self._fed = self._fed - drop
        self.lengths = self.lengths - drop
        self.even = _common(self.lengths)
        self._all = self._positions()

    def past(self, rows: Tensor, drop: Tensor) -> list[State]:
        """The states of some rows as they were before their last `drop` tokens, which the last call fed."""
        back = taken_back(self.specs)
        if not back:
            raise UsageError(
                "a recurrent state cannot be rewound: it holds only the present; fork it before"
            )
        if not self.pasts or bool((drop > self._fed[rows].clamp(max=int(back))).any()):
            raise UsageError(
                f"a recurrent state cannot be rewound by {int(drop.max())} tokens: it takes back what "
                f"the last call fed, {back} tokens at most; fork it before"
            )
        n, row = self._fed[rows] - drop, rows if self._was is None else self._was[rows]
        each = enumerate(self.specs)
        return [self.pasts[i](row, n) if spec.state else {} for i, spec in each]

    def fork(self, rows: Tensor) -> Cache:
        """A cache whose row i continues row rows[i]: beams, samples, a shared prefix. The old one stays as it was."""
        return self._branch(rows, self._fork_cross(rows))

    def _branch(self, rows: Tensor, cross: Cache | None) -> Cache:
        new = self._shell(rows, cross)
        new._fork_from(self, rows.to(self.device))
        new._all = new._positions()
        return new

    def _shell(self, rows: Tensor, cross: Cache | None) -> Cache:
        """All of a fork but the stored tokens."""
        new = self.__class__.__new__(self.__class__)
        new.__dict__.update(self.__dict__)
        rows = rows.to(self.device)
        new.lengths = self.lengths[rows]
        if self.even is None:
            new.even = _common(new.lengths)
        new.states = [{n: s[rows] for n, s in state.items()} for state in self.states]
        if self.pasts:
            new._fed, new._was = self._fed[rows], rows if self._was is None else self._was[rows]
        new.cross = cross
        return new

    def _fork_cross(self, rows: Tensor, moved: bool = False) -> Cache | None:
        """The source of a fork. Rows may share one in equal groups (beams): it follows the first of each new group.
        `moved`: this cache gives it up, and where the same sources go on nothing is done to them."""
        cross = self.cross
        if cross is None:
            return None
        share = self.batch // cross.batch
        which = rows.to(self.device) // share
        if len(rows) % share == 0:
            groups = which.view(-1, share)
            if bool((groups == groups[:, :1]).all()):
                which = groups[:, 0]
        if not moved:
            return cross.fork(which)
        self.cross = None
        same = which.tolist() == list(range(cross.batch))
        return cross if same else cross.take(which)

    def _own_cross(self) -> Cache:
        """A source for each row, where rows shared one."""
        assert self.cross is not None
        share = self.batch // self.cross.batch
        return self.cross.take(torch.arange(self.batch, device=self.device) // share)

    def spread(self, times: int, shared: bool) -> Cache:
        """Every row `times` in a row (beams, samples); they share their source, or get a copy each."""
        rows = torch.arange(self.batch, device=self.device).repeat_interleave(times)
        cross, self.cross = self.cross, None
        new = self.take(rows)
        if cross is not None:
            new.cross = cross if shared else cross.take(rows)
        return new

    def take(self, rows: Tensor, common: int = 0) -> Cache:
        """`fork`, after which this cache is given up: what the rows leave behind is free. Where as many rows trade
        places with others that came of the same one (beams), `common` tells how many first tokens they share."""
        new = self._branch(rows, self._fork_cross(rows, moved=True))
        self.release()
        return new

    def release(self) -> None:
        """Give up the rows and their source: memory of their own goes with them, pages go back to the pool."""
        if self.cross is not None:
            self.cross.release()
            self.cross = None

    def join(self, other: Cache) -> Cache:
        """A cache with the rows of both, in this order; both are given up."""
        new = self.__class__.__new__(self.__class__)
        new.__dict__.update(self.__dict__)
        new.lengths = torch.cat([self.lengths, other.lengths])
        new.even = self.even if self.even == other.even else None
        new.states = [
            {n: torch.cat([s, b[n]]) for n, s in a.items()}
            for a, b in zip(self.states, other.states, strict=True)
        ]
        new.pasts = {}
        if self.cross is not None and other.cross is not None:
            a, b = self.cross, other.cross
            # From here on a source for each row.
            if self.batch // a.batch != other.batch // b.batch:
                a, b = self._own_cross(), other._own_cross()
            new.cross = a.join(b)
        new._join_from(self, other)
        new._all = new._positions()
        return new

    def freeze(self) -> None:
        """Read only from here on (an encoder's keys and values)."""
        self.frozen = True

    def free(self) -> None:
        """Forget every token: the cache is empty afterwards. Pages go back to their pool; rows keep
        their memory for the next tokens."""
        if self.cross is not None:
            self.cross.release()
        self.lengths = torch.zeros_like(self.lengths)
        self.even, self.cross = 0, None
        self.pasts = {}
        self.states = [{n: torch.zeros_like(s) for n, s in state.items()} for state in self.states]
        self._free()
        self._all = self._positions()

    def update(self, layer: int, entries: dict[str, Tensor]) -> tuple[dict[str, Tensor], Span]:
        """Store the entries of the tokens announced by `begin`, return all tokens' entries and positions."""
        if not self.frozen:
            self._write(layer, entries)
        return self._read(layer), self._all

    # what a layout defines
    def _reserve(self, old: Tensor, added: Tensor, size: int) -> None:
        raise NotImplementedError

    def _positions(self) -> Span:
        """Of every slot: tokens lie in order, unless a layout says otherwise."""
        if self.even is not None:
            return Span.run(0, self.even, self.device)
        return Span.ragged(self.lengths, int(self.lengths.max()))

    def _write(self, layer: int, entries: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _read(self, layer: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def _fork_from(self, old: Cache, rows: Tensor) -> None:
        raise NotImplementedError

    def _join_from(self, a: Cache, b: Cache) -> None:
        raise NotImplementedError

    def _free(self) -> None:
        raise NotImplementedError

    def _check_rewind(self, drop: Tensor) -> None:
        """Layouts that forget refuse what they no longer hold."""

    keep = Former("update")


def _common(lengths: Tensor) -> int | None:
    """The length that all rows have, or None."""
    each = set(lengths.tolist())
    return each.pop() if len(each) == 1 else (None if each else 0)


def check_sizes(**sizes: int) -> None:
    """What a layout is made with must be counts."""
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"a cache with {name}={size} holds nothing; give {name}=1 or more")
