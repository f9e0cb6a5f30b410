"""Stacks whose products see no padding, and steps of one token a row that are recorded and played in C."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from regard.attention.protocol import Context
from regard.block import Stack, layer_context
from regard.cache import Contiguous, Paged
from regard.cache.base import Cache, Layer, State
from regard.fast.cpu.join import Packing
from regard.kernels.c.tape import Tape
from regard.mask import Causal, Span
from regard.position import LongRope, Rope

CAUSAL = Causal()
Recorded = Contiguous | Paged  # caches whose steps are
Key = tuple[object, ...]


class PackedStack(Stack):
    """Texts of different lengths go through the products one after the other, without their padding, at which zeros
    come out: attention alone sees rows."""

    def forward(
        self, x: Tensor, ctx: Context, cross: Context | None = None, caches: tuple = (None, None)
    ) -> Tensor:
        packing = None if ctx.probe is not None else Packing.of(ctx.pos)
        if packing is None:
            return super().forward(x, ctx, cross, caches)
        for each in (ctx, cross):
            if each is not None:
                each.memo["packing"] = packing
        return packing.spread(super().forward(packing.pack(x), ctx, cross, caches))


class NativeStack(PackedStack):
    """A step that comes again, one token per row over the same memory, is recorded and then played: the C calls of all
    blocks by one call. What another step has, positions, angles, tables, is written to where the recorded one read it.
    """

    tapes: Tapes

    def forward(
        self, x: Tensor, ctx: Context, cross: Context | None = None, caches: tuple = (None, None)
    ) -> Tensor:
        key = self.key(x, ctx, cross, caches)
        if key is None or not self.tapes.lock.acquire(blocking=False):
            return super().forward(x, ctx, cross, caches)
        try:
            step = self.tapes.found(key)
            if isinstance(step, Step):
                return step.play(x, ctx, caches)
            if step is None or not self.tapes.verified.get(tuple(map(type, caches)), True):
                return super().forward(x, ctx, cross, caches)
            fresh = Step(x, ctx, cross, caches)
            with fresh.tape.recording():
                y = super().forward(fresh.x, ctx, cross, caches)
            fresh.y = fresh.tape.settle(y)
            # Other steps of the same form are the same calls.
            form = tuple(map(type, caches))
            if form not in self.tapes.verified:
                self.tapes.verified[form] = fresh.tape.whole(fresh.y, y)
            if self.tapes.verified[form]:
                self.tapes.steps[key] = fresh
            return y
        finally:
            self.tapes.lock.release()

    def key(self, x: Tensor, ctx: Context, cross: Context | None, caches: tuple) -> Key | None:
        """What a recorded step must have in common with another; None if it cannot be recorded."""
        own, source = caches
        if self.tapes.stack() is not self or ctx.probe is not None or ctx.mask != CAUSAL:
            return None
        if own is None or step_of(layer_context(ctx, own, 0, "")) is None:
            return None
        read = cross is None or (cross.memory is None and type(source) in (Contiguous, Paged))
        if not read:
            return None
        stores, room = lain(own)
        if source is not None:
            kept, far = lain(source)
            # Pages of the same pool are there already.
            stores, room = stores if kept is stores else [*stores, *kept], (*room, *far)
        memory = tuple(t.data_ptr() for store in stores for t in store.values())
        # Where a pool of fewer pages lay there may be another one now.
        sizes = [(x.shape, x.stride()) for x in (stores[0]["k"], stores[-1]["k"])]
        # Rows at one position may share it: (1 t), where others have (b t).
        rows = (len(x), len(ctx.pos.index), torch.is_inference_mode_enabled())
        return memory, tuple(sizes), rows, room


class Step:
    """A recorded step: its input, its output, and what changes between them from step to step."""

    y: Tensor

    def __init__(self, x: Tensor, ctx: Context, cross: Context | None, caches: tuple):
        self.tape, self.x, self.memo = Tape(), x.float().contiguous().clone(), ctx.memo
        self.turns: dict[Key, list[Tensor]] = {}  # cos and sin for every position of the cache
        # Of tensors copies: those of a cache are its own.
        new = self.changing(ctx, caches).items()
        self.memo |= {key: y.clone() if isinstance(y, Tensor) else y for key, y in new}
        if cross is not None:
            cross.memo |= {"last": self.memo["last"], "place": self.memo["source"]}

    def changing(self, ctx: Context, caches: tuple) -> dict[str, Tensor | None]:
        own, source = caches
        pos = ctx.pos.index[:, 0].expand(len(self.x)).contiguous()
        found = {"rows": pos, "place": getattr(own, "table", None)}
        if source is not None:
            found |= {
                "last": last_of(source, len(self.x)),
                "source": getattr(source, "table", None),
            }
        return found

    def angles(self, key: tuple[Any, ...], pos: Span, own: Recorded) -> tuple[Tensor, ...]:
        rope, *how = key
        if isinstance(rope.scaling, LongRope):
            return rope.angles(pos.index, *how, pos.reach)
        if key not in self.turns:
            room = own.table.shape[1] * own.page if isinstance(own, Paged) else own.capacity
            self.turns[key] = [x[0] for x in rope.angles(torch.arange(room)[None], *how)]
        return tuple(x[pos.index] for x in self.turns[key])

    def play(self, x: Tensor, ctx: Context, caches: tuple) -> Tensor:
        self.x.copy_(x)
        new: dict[Any, Any] = dict(self.changing(ctx, caches))
        for key in (k for k in self.memo if isinstance(k, tuple) and isinstance(k[0], Rope)):
            new[key] = self.angles(key, ctx.pos, caches[0])
        for key, value in new.items():
            olds = self.memo[key] if isinstance(value, tuple) else (self.memo[key],)
            for old, now in zip(olds, value if isinstance(value, tuple) else (value,), strict=True):
                if now is not None:
                    old.copy_(now)
        if not self.tape.play():
            raise IndexError("a recorded step: a position lies outside of the cache, or no memory")
        return self.y.clone()


class Tapes:
    """The recorded steps of a stack, of the `MOST` keys that were met last. A step is recorded when it is met for the
    second time. A shallow copy of the stack, whose parts may be watched, has these too, and must not play them."""

    MOST = 8

    def __init__(self, stack: Stack) -> None:
        # The recorded step of a key, or True where it was met once.
        self.lock, self.steps = threading.Lock(), dict[Key, Step | bool]()
        # By the types of the caches: whether a step that was played gave what it must. It does not where part of a
        # block computes outside of the C code.
        self.verified = dict[tuple[type, ...], bool]()
        # Weak, as the stack holds us.
        self.stack = weakref.ref(stack)

    def found(self, key: Key) -> Step | bool | None:
        """The step, True if it is to be recorded now, None if not yet."""
        step = self.steps.pop(key, None)
        self.steps[key] = True if step is None else step
        while len(self.steps) > self.MOST:
            del self.steps[next(iter(self.steps))]
        return step


def step_of(ctx: Context) -> Layer | None:
    """The cache, if this is a step of one token per row over memory that lies by position, in rows or pages."""
    store = ctx.store
    if ctx.backend != "sdpa" or ctx.pos.size != 1:
        return None
    return store if isinstance(store, Layer) and type(store.cache) in (Contiguous, Paged) else None


def lain(cache: Recorded) -> tuple[list[State], tuple[int, ...]]:
    """The memory that tokens lie in, and what tells how many of how many rows fit."""
    if isinstance(cache, Paged):
        return cache.pool.stores, tuple(cache.table.shape)
    return cache.slots, (cache.batch, cache.capacity)


def last_of(cache: Cache, rows: int) -> Tensor:
    """The last token of the source of each row."""
    return (cache.lengths - 1).repeat_interleave(rows // len(cache.lengths))
