"""Bugs as people make them, each planted in block 1 of a small model (or in what it leans on), and the place where
parity must find it. `plant(model)` alters the model, or a class behind it for as long as the test runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention import BACKENDS
from regard.block import Block
from regard.cache import BlockTable, Contiguous, Paged, Pool
from regard.cache.base import Cache
from regard.mask import Causal, Span, Visible

Plant = Callable[[Any, pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Bug:
    model: str  # of zoo.MODELS
    where: str
    plant: Plant
    check: str = "fused against reference"  # one that must see it
    tokens: int = 7  # of a row


def block(model: Any) -> Any:
    return (model.decoder if hasattr(model, "decoder") else model.tower).blocks[1]


# --- attention ----------------------------------------------------------------------------------------------------


def override(module: Any, name: str, new: Callable[..., Any]) -> None:
    """Give one module another method: `new(self, real, *args)`. By its class, so that copies have it too."""
    kind = type(module)
    real = getattr(kind, name)
    method = lambda self, *args: new(self, partial(real, self), *args)  # noqa: E731
    module.__class__ = type(kind.__name__, (kind,), {name: method})


def mixed(change: Callable[..., tuple], part: str = "attention") -> Plant:
    """Attention of other (q, kept, mask) than it was given."""

    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        layer = getattr(block(model), part)
        override(
            layer,
            "core_attention",
            lambda self, real, q, kept, mask, *rest: real(*change(q, kept, mask), *rest),
        )

    return plant


def given(change: Callable[[Tensor], Tensor]) -> Plant:
    """What attention gives, changed."""

    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        override(
            block(model).attention, "core_attention", lambda self, real, *args: change(real(*args))
        )

    return plant


def inverted(q: Tensor, kept: dict, mask: Visible) -> tuple:
    return q, kept, ~mask.tensor()


def unmasked(q: Tensor, kept: dict, mask: Visible) -> tuple:
    return q, kept, None


def ahead(q: Tensor, kept: dict, mask: Visible) -> tuple:
    return q, kept, Visible(Causal(1), mask.q, mask.k)


def grouped(q: Tensor, kept: dict, mask: Visible) -> tuple:
    """Query head i reads group i mod g instead of i // r."""
    return q, {name: x.repeat(1, 1, q.shape[2] // x.shape[2], 1) for name, x in kept.items()}, mask


def halved(q: Tensor, kept: dict, mask: Visible) -> tuple:
    return q.half().to(q.dtype), {name: x.half().to(x.dtype) for name, x in kept.items()}, mask


def turned(**changes: Any) -> Plant:
    """Queries and keys turned by another RoPE."""

    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        layer = block(model).attention
        layer.config = replace(layer.config, rope=replace(layer.config.rope, **changes))

    return plant


def shifted(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Queries stand one place too far."""

    def queries(self: Any, real: Any, x: Tensor, ctx: Any) -> Tensor:
        return real(x, replace(ctx, pos=Span(ctx.pos.index + 1), memo={}))

    override(block(model).attention, "queries", queries)


def setting(**changes: Any) -> Plant:
    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        layer = block(model).attention
        layer.config = replace(layer.config, **changes)

    return plant


def fused_unmasked(model: Any, patch: pytest.MonkeyPatch) -> None:
    """The fused kernel is told of no mask."""
    real = BACKENDS["sdpa"]
    patch.setitem(BACKENDS, "sdpa", lambda q, k, v, seen, terms: real(q, k, v, None, terms))


def absorbed_unscaled(model: Any, patch: pytest.MonkeyPatch) -> None:
    layer = block(model).attention
    override(layer, "absorbed", lambda self, real, q, *rest: real(q * 1.01, *rest))


def second_best(model: Any, patch: pytest.MonkeyPatch) -> None:
    """The indexer's best key is left out where there are enough."""

    def choice(self: Any, real: Any, scores: Tensor, k: int, order: Tensor | None) -> Tensor:
        values, best = scores.topk(min(k + 1, scores.shape[-1]))
        return torch.where(values[..., -1:] > -torch.inf, best[..., -k:], best[..., :k])

    override(block(model).attention, "choice", choice)


def part(path: str, change: Callable[[Any], None]) -> Plant:
    """Change one thing inside block 1."""

    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        change(block(model).get_submodule(path))

    return plant


@torch.no_grad()
def transposed(linear: Any) -> None:
    linear.weight.copy_(linear.weight.T.clone())


def no_bias(linear: Any) -> None:
    linear.bias = None


def twice(norm: Any) -> None:
    override(norm, "forward", lambda self, real, x: real(real(x)))


def no_norm(norm: Any) -> None:
    override(norm, "forward", lambda self, real, x: x.clone())


def eps(norm: Any) -> None:
    norm.eps = 1e-4


def no_residual(add: Any) -> None:
    override(add, "forward", lambda self, real, y, residual: real(y))


def by_tanh(ffn: Any) -> None:
    ffn.act = partial(F.gelu, approximate="tanh")


def weighed_alike(ffn: Any) -> None:
    def route(self: Any, real: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen, weight = real(x)
        return chosen, torch.full_like(weight, 0.5)

    override(ffn, "route", route)


def next_expert(ffn: Any) -> None:
    """The third best expert instead of the second."""

    override(ffn, "choose", lambda self, real, scores, k: scores.topk(3).indices[:, [0, 2]])


# --- the rest of the model ----------------------------------------------------------------------------------------


def residual_of_the_norm(model: Any, patch: pytest.MonkeyPatch) -> None:
    class Wrong(Block):
        def forward(self, x: Tensor, ctx: Any, cross: Any = None) -> Tensor:
            y = self.norm1(x)
            x = y + self.attention(y.clone(), ctx)
            return x + self.ffn(self.norm3(x))

    block(model).__class__ = Wrong


def lost_residual(model: Any, patch: pytest.MonkeyPatch) -> None:
    class Wrong(Block):
        def forward(self, x: Tensor, ctx: Any, cross: Any = None) -> Tensor:
            x = x + self.attention(self.norm1(x), ctx)
            return self.ffn(self.norm3(x))

    block(model).__class__ = Wrong


def unscaled_head(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.head.config = replace(model.head.config, scaled=False)


def unscaled_embedding(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.embedding.scale = 1.0


def late_position(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Learned positions count from one."""
    vectors = model.embedding.position
    override(vectors, "forward", lambda self, real, pos, ids: real(pos + 1, ids))


def no_final_norm(model: Any, patch: pytest.MonkeyPatch) -> None:
    no_norm(model.tower.norm)


# --- caches -------------------------------------------------------------------------------------------------------


def stale_page(model: Any, patch: pytest.MonkeyPatch) -> None:
    """The first row reads its first page from another row's."""
    real = Paged._read

    def read(self: Paged, layer: int) -> dict[str, Tensor]:
        entries = {name: x.clone() for name, x in real(self, layer).items()}
        if layer == 1:
            for x in entries.values():
                x[0, : self.page] = x[1, : self.page]
        return entries

    patch.setattr(Paged, "_read", read)


def not_copied(model: Any, patch: pytest.MonkeyPatch) -> None:
    """A page that is partly filled goes to a second row without what is in it."""
    patch.setattr(Pool, "copy", lambda self, source, target: None)


def not_its_own(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Two rows write to a page that both hold."""
    patch.setattr(BlockTable, "own", lambda self, place: None)


def lost_too_early(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Pages that a second row holds are free when the first one is given up."""
    patch.setattr(Pool, "hold", lambda self, page, times=1: self.idle.pop(page, None))


def not_reordered(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Contiguous, "take", lambda self, rows, common=0: self)


def forgotten_token(model: Any, patch: pytest.MonkeyPatch) -> None:
    """A second chunk of tokens is written one place too early."""
    real = Contiguous._write

    def write(self: Contiguous, layer: int, entries: dict[str, Tensor]) -> None:
        start, now = self._new.start, self._new
        if layer == 1 and start:
            self._new = Span.run(start - 1, now.size)
        real(self, layer, entries)
        self._new = now

    patch.setattr(Contiguous, "_write", write)


def begins_anew(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Positions of a later call start at 0 again."""
    real = Cache.begin

    def begin(self: Cache, size: int, lengths: Tensor | None = None) -> Span:
        real(self, size, lengths)
        return Span.run(0, size)

    patch.setattr(Cache, "begin", begin)


# --- all of them --------------------------------------------------------------------------------------------------

_MIX, _READ = "block 1 attention before wo", "block 1 attention k read from the cache"
BUGS: dict[str, Bug] = {
    "inverted mask": Bug("gqa", _MIX, mixed(inverted)),
    "causal mask off by one": Bug("gqa", _MIX, mixed(ahead)),
    "window off by one": Bug("window", _MIX, setting(window=4)),
    "off-by-one position": Bug("gqa", "block 1 attention q", shifted),
    "wrong RoPE layout": Bug("gqa", "block 1 attention q", turned(layout="interleaved")),
    "wrong RoPE base": Bug("gqa", "block 1 attention q", turned(base=5e5)),
    "swapped heads": Bug("gqa", _MIX, given(lambda o: o.flip(2))),
    "wrong KV group": Bug("gqa", _MIX, mixed(grouped)),
    "missing scale": Bug("gqa", _MIX, part("attention", lambda a: setattr(a, "scale", 1.0))),
    "half-precision attention": Bug("gqa", _MIX, mixed(halved)),
    "no norm on keys": Bug("gqa", "block 1 attention k", part("attention.k_norm", no_norm)),
    "fused kernel without a mask": Bug("gqa", "block 0 attention before wo", fused_unmasked),
    "softcap forgotten": Bug("softcap", _MIX, setting(softcap=None)),
    "sinks forgotten": Bug("softcap", _MIX, part("attention", lambda a: setattr(a, "sinks", None))),
    "leaking padding": Bug("bert", _MIX, mixed(unmasked), "padded against unpadded"),
    "absorbed form off": Bug("mla", _MIX, absorbed_unscaled, "absorbed against expanded"),
    "indexer leaves the best out": Bug("dsa", "block 1 attention choice", second_best),
    "cross-attention padding ignored": Bug(
        "t5",
        "decoder block 1 cross-attention before wo",
        mixed(unmasked, "cross"),
        "padded against unpadded",
    ),
    "transposed square weight": Bug("gqa", "block 1 attention output", part("attention.wo", transposed)),
    "dropped bias": Bug("gqa", "block 1 attention v", part("attention.wv", no_bias)),
    "eps of a norm": Bug("gqa", "block 1 norm 3", part("norm3", eps)),
    "norm applied twice": Bug("gqa", "block 1 norm 1", part("norm1", twice)),
    "gelu by tanh instead of erf": Bug("gqa", "block 1 feed-forward hidden", part("ffn", by_tanh)),
    "wrong expert": Bug("experts", "block 1 feed-forward choice", part("ffn", next_expert)),
    "experts weighed alike": Bug("experts", "block 1 feed-forward", part("ffn", weighed_alike)),
    "residual of the norm": Bug("gqa", "block 1 norm 3", residual_of_the_norm),
    "residual lost": Bug("gqa", "block 1 output", lost_residual),
    "head not scaled": Bug("gpt", "logits", unscaled_head),
    "embedding not scaled": Bug("gpt", "embedding", unscaled_embedding),
    "learned positions off by one": Bug("gpt", "embedding", late_position),
    "no final norm": Bug("gqa", "final norm", no_final_norm),
    "stale cache page": Bug("gqa", _READ, stale_page, "paged against uncached"),
    "page that is not copied": Bug(
        "gqa", "block 0 attention k read from the cache", not_copied, "shared against alone"
    ),
    "page that two rows write to": Bug(
        "gqa", "block 0 attention k read from the cache", not_its_own, "shared against alone"
    ),
    "page given up too early": Bug(
        "gqa", "block 0 attention k read from the cache", lost_too_early, "shared against alone", 15
    ),
    "token written over another": Bug("gqa", _READ, forgotten_token, "cached against uncached"),
    "wrong cache row after reorder": Bug(
        "gqa", "block 0 attention k read from the cache", not_reordered, "rows reordered"
    ),
    "positions begin anew": Bug("gpt", "embedding", begins_anew, "cached against uncached"),
}  # fmt: skip
