"""A model whose steps are shown to a watcher, which may put other tensors in their place: how parity records a run, and
how it feeds the same model in float64 with a run's own numbers.

    twin = watch(model, watcher)     # of the same weights; the model stays as it is

A watched part is the part that was there, plain, prepared or invariant, with a class of this file before its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from regard.attention.protocol import Context, Mechanism
from regard.attention.sparse import SparseAttention
from regard.fast.specialise import Row, Specialise, mixed, share
from regard.layers import Add
from regard.models import Model
from regard.moe import MixtureOfExperts

M = TypeVar("M", bound=Model)
Step = Callable[..., Any]


class Watcher:
    """It is given tensors by their names, or a step of a part and what the part would call it with; the model goes on
    with what it returns, which here is the model's own. `source`: whether the tokens are those of the source."""

    def see(self, name: str, x: Tensor, source: bool = False) -> Tensor:
        return x

    def mix(self, part: WatchedMechanism, step: Step, *args: Any) -> Tensor:
        return step(*args)

    def dense(self, step: Step, keys: int) -> bool:
        return step(keys)

    def choice(self, step: Step, scores: Tensor, k: int, order: Tensor | None) -> Tensor:
        return step(scores, k, order)

    def choose(self, part: WatchedExperts, step: Step, scores: Tensor, k: int) -> Tensor:
        return step(scores, k)


# --- the parts ----------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """A part whose tensors are shown under its name."""

    watcher: Watcher
    name: str
    source: bool

    def see(self, x: Tensor, name: str = "", source: bool = False) -> Tensor:
        return self.watcher.see(self.name + name, x, self.source or source)


class Seen(Watched):
    """What a call gives is seen."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.see(super().__call__(*args, **kwargs))


class WatchedAdd(Watched, Add):
    """What is added to the stream is seen."""

    def __call__(self, y: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().__call__(self.see(y), residual)


class WatchedMechanism(Watched, Mechanism):
    """Queries, what each token leaves behind, and what `mix` gives are seen."""

    cross: bool

    def enter(self, x: Tensor, ctx: Context) -> tuple[Any, dict[str, Tensor]]:
        q, new = super().enter(x, ctx)
        q = (self.see(q[0], "q"), *q[1:]) if isinstance(q, tuple) else self.see(q, "q")
        return q, {key: self.see(entry, key, self.cross) for key, entry in new.items()}

    def mix(self, *args: Any) -> Tensor:
        return self.see(self.watcher.mix(self, super().mix, *args), "before wo")


class WatchedSparse(WatchedMechanism, SparseAttention):
    def dense(self, keys: int) -> bool:
        return self.watcher.dense(super().dense, keys)

    def choice(self, scores: Tensor, *rest: Any) -> Tensor:
        return self.watcher.choice(super().choice, scores, *rest)


class WatchedExperts(Watched, MixtureOfExperts):
    """Its choices: of groups, where there are any, and of experts."""

    choices: int

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.choices = 0
        return super().route(x)

    def choose(self, scores: Tensor, k: int) -> Tensor:
        chosen = self.watcher.choose(self, super().choose, scores, k)
        self.choices += 1
        return chosen


class WatchedStates(Model):
    """A model of cells, which has no blocks: its states are seen."""

    watcher: Watcher

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.watcher.see("decoder states", super().hidden(*args, **kwargs), False)

    def encode(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        memory, *rest = super().encode(*args, **kwargs)  # type: ignore[misc]
        return self.watcher.see("encoder states", memory, True), *rest


# --- where they stand ---------------------------------------------------------------------------------------------


def watch(model: M, watcher: Watcher) -> M:
    """`model` with the parts above, named by where they stand: "decoder block 1 cross-attention q"."""

    def part(kind: type[nn.Module], plain: Any, name: str, source: bool, **parts: Any) -> Any:
        if plain is None:
            return None
        new: Any = share(mixed(kind, type(plain)), plain, **parts)
        new.watcher, new.name, new.source = watcher, name, source
        return new

    def added(plain: Add, name: str, what: str, source: bool) -> Any:
        norm = part(Seen, plain.norm, f"{name}norm after {what}", source)
        label = what if what == "feed-forward" else f"{what} output"
        return part(WatchedAdd, plain, name + label, source, norm=norm)

    def mechanism(plain: Any, name: str, what: str, source: bool) -> Any:
        if plain is None:
            return None
        kind = WatchedSparse if isinstance(plain, SparseAttention) else WatchedMechanism
        add = added(plain.add, name, what, source)
        new = part(kind, plain, f"{name}{what} ", source, add=add)
        new.cross = what == "cross-attention"
        return new

    def block(plain: Any, name: str, source: bool) -> Any:
        parts: dict[str, Any] = {
            f"norm{i}": part(Seen, getattr(plain, f"norm{i}"), f"{name}norm {i}", source)
            for i in (1, 2, 3)
        }
        parts["attention"] = mechanism(plain.attention, name, "attention", source)
        parts["cross"] = mechanism(plain.cross, name, "cross-attention", source)
        kind = WatchedExperts if isinstance(plain.ffn, MixtureOfExperts) else Watched
        add = added(plain.ffn.add, name, "feed-forward", source)
        parts["ffn"] = part(kind, plain.ffn, f"{name}feed-forward", source, add=add)
        return part(Seen, plain, f"{name}output", source, **parts)

    parts: dict[str, Any] = {}
    for tower, reads in model.towers.items():
        name, source = "" if tower == "tower" else f"{tower} ", tower == "encoder"
        stack: Any = getattr(model, tower)
        blocks = {str(i): block(b, f"{name}block {i} ", source) for i, b in enumerate(stack.blocks)}
        parts[tower] = share(
            type(stack),
            stack,
            blocks=share(type(stack.blocks), stack.blocks, **blocks),
            norm=part(Seen, stack.norm, f"{name}final norm", source),
        )
        parts[reads] = part(Seen, getattr(model, reads), f"{name}embedding", source)
    if parts:
        return share(type(model), model, **parts)
    twin: Any = share(mixed(WatchedStates, type(model)), model)
    twin.watcher = watcher
    return twin


class Formed(Mechanism):
    """A mechanism that has several forms, held to one of them."""

    form: str

    def mix(self, *args: Any) -> Tensor:
        return getattr(self, self.form)(*args)


class Form(Specialise):
    """`Form("absorbed").copy(model)`: every part that has this form is held to it."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form

    def hold(self, part: Mechanism) -> nn.Module:
        if self.form not in part.forms:
            return self.copy(part)
        new = self.copy(part, mixed(Formed, type(part)))
        new.form = self.form
        return new

    table: ClassVar[dict[type, Row]] = {Mechanism: lambda maker, part: maker.hold(part)}
