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
from regard.fast.cuda.pages import Pages
from regard.fast.cuda.parts import GraphIndexer
from regard.fast.cuda.residual import Normed, ResidualStream, tensor
from regard.fast.specialise import Row, Specialise, mixed, share
from regard.layers import Add, FeedForward
from regard.mask import Visible
from regard.models import Model
from regard.moe import MixtureOfExperts

M = TypeVar("M", bound=Model)
Shown = TypeVar("Shown", Tensor, ResidualStream, Normed)
Step = Callable[..., Any]


class Watcher:
    """It is given tensors by their names, or a step of a part and what the part would call it with; the model goes on
    with what it returns, which here is the model's own. `source`: whether the tokens are those of the source."""

    def see(self, name: str, x: Tensor, source: bool = False) -> Tensor:
        return x

    def answer(self, logits: Tensor) -> Tensor:
        return logits

    def core_attention(self, part: WatchedMechanism, step: Step, *args: Any) -> Tensor:
        return step(*args)

    def read(self, part: WatchedMechanism, ctx: Context) -> None:
        """A part looked at what lies in the cache of `ctx` by a way of its own, not by `core_attention`."""

    def dense(self, step: Step, keys: int) -> bool:
        return step(keys)

    def choice(self, step: Step, scores: Tensor, k: int, order: Tensor | None) -> Tensor:
        return step(scores, k, order)

    def choose(self, part: WatchedExperts, step: Step, scores: Tensor, k: int) -> Tensor:
        return step(scores, k)

    def chose(self, positions: Tensor) -> None:
        """The keys (n k) of each token that an indexer chose in pages; -1 for those that there are too few of."""


# --- the parts ----------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """A part whose tensors are shown under its name."""

    watcher: Watcher
    name: str
    source: bool

    def see(self, x: Shown, name: str = "", source: bool = False) -> Shown:
        if isinstance(x, ResidualStream | Normed):
            # Of a graph's parts, which are recorded and never fed.
            self.watcher.see(self.name + name, tensor(x), self.source or source)
            return x
        return self.watcher.see(self.name + name, x, self.source or source)


W = TypeVar("W", bound=Watched)


class Seen(Watched):
    """What a call gives is seen."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.see(super().__call__(*args, **kwargs))


class WatchedAdd(Watched, Add):
    """What is added to the stream is seen."""

    def __call__(self, y: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().__call__(self.see(y), residual)


class WatchedMechanism(Watched, Mechanism):
    """Queries, what each token leaves behind, what is read of it, and what `wo` is given are seen, as far as this form
    of the mechanism has them: C code and a graph make queries and look at the cache in one."""

    cross: bool
    attended: bool

    def attend(self, x: Any, ctx: Context) -> Tensor:
        self.attended = False
        o = super().attend(x, ctx)
        if not self.attended:
            self.watcher.read(self, ctx)
        return o

    def project_qkv(self, x: Tensor, ctx: Context) -> tuple[Any, dict[str, Tensor]]:
        q, new = super().project_qkv(x, ctx)
        q = (self.see(q[0], "q"), *q[1:]) if isinstance(q, tuple) else self.see(q, "q")
        return q, {key: self.see(entry, key, self.cross) for key, entry in new.items()}

    def core_attention(self, q: Any, kept: Any, mask: Any, *rest: Any) -> Tensor:
        if self.attended or not isinstance(mask, Visible):
            return super().core_attention(q, kept, mask, *rest)
        self.attended = True
        return self.watcher.core_attention(self, super().core_attention, q, kept, mask, *rest)

    def project_out(self, o: Tensor, residual: Any = None) -> Any:
        return super().project_out(self.see(o, "before wo"), residual)


class WatchedSparse(WatchedMechanism, SparseAttention):
    def dense(self, keys: int) -> bool:
        return self.watcher.dense(super().dense, keys)

    def choice(self, scores: Tensor, *rest: Any) -> Tensor:
        return self.watcher.choice(super().choice, scores, *rest)


class WatchedIndexer(Watched, GraphIndexer):
    def best(self, scores: Tensor, step: Pages) -> Tensor:
        spots, (keys,) = super().best(scores, step), step.mine
        page, there = keys.shape[1], step.chosen(spots.shape[1])
        place = (step.table[:, None] == spots[..., None] // page).int().argmax(-1)
        self.watcher.chose((place * page + spots % page).where(there, -1))
        return spots


class WatchedFeedForward(Watched, FeedForward):
    """What lies between its two products is seen."""

    def project_up(self, x: Any) -> Tensor:
        return self.see(super().project_up(x), " hidden")


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


class WatchedModel(Model):
    """What the head gives is seen."""

    watcher: Watcher

    def logits(self, hidden: Any) -> Tensor:
        return self.watcher.answer(super().logits(hidden))


class WatchedStates(WatchedModel):
    """A model of cells, which has no blocks: its states are seen."""

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.watcher.see("decoder states", super().hidden(*args, **kwargs), False)

    def encode(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        memory, *rest = super().encode(*args, **kwargs)  # type: ignore[misc]
        return self.watcher.see("encoder states", memory, True), *rest


# --- where they stand ---------------------------------------------------------------------------------------------


class _Parts:
    """The parts above for the parts of a model, named by where they stand."""

    def __init__(self, watcher: Watcher):
        self.watcher = watcher

    def part(
        self, kind: type[W], plain: nn.Module, name: str, source: bool, **parts: nn.Module | None
    ) -> W:
        new = share(mixed(kind, type(plain)), plain, **parts)
        new.watcher, new.name, new.source = self.watcher, name, source
        return new

    def seen(self, plain: nn.Module | None, name: str, source: bool) -> Seen | None:
        return None if plain is None else self.part(Seen, plain, name, source)

    def added(self, plain: Add, name: str, what: str, source: bool) -> WatchedAdd:
        norm = self.seen(plain.norm, f"{name}norm after {what}", source)
        label = what if what == "feed-forward" else f"{what} output"
        return self.part(WatchedAdd, plain, name + label, source, norm=norm)

    def mechanism(
        self, plain: Mechanism | None, name: str, what: str, source: bool
    ) -> WatchedMechanism | None:
        if plain is None:
            return None
        kind = WatchedSparse if isinstance(plain, SparseAttention) else WatchedMechanism
        parts: dict[str, nn.Module] = {"add": self.added(plain.add, name, what, source)}
        indexer = getattr(plain, "indexer", None)
        if isinstance(indexer, GraphIndexer):
            parts["indexer"] = self.part(WatchedIndexer, indexer, name, source)
        new = self.part(kind, plain, f"{name}{what} ", source, **parts)
        new.cross = what == "cross-attention"
        return new

    def block(self, plain: Any, name: str, source: bool) -> Seen:
        parts: dict[str, nn.Module | None] = {
            f"norm{i}": self.seen(getattr(plain, f"norm{i}"), f"{name}norm {i}", source)
            for i in (1, 2, 3)
        }
        parts["attention"] = self.mechanism(plain.attention, name, "attention", source)
        parts["cross"] = self.mechanism(plain.cross, name, "cross-attention", source)
        if plain.ffn is None:
            return self.part(Seen, plain, f"{name}output", source, **parts)
        kind = WatchedExperts if isinstance(plain.ffn, MixtureOfExperts) else WatchedFeedForward
        inside: dict[str, nn.Module] = {
            "add": self.added(plain.ffn.add, name, "feed-forward", source)
        }
        shared = getattr(plain.ffn, "shared", None)
        if shared is not None:
            inside["shared"] = self.part(WatchedFeedForward, shared, f"{name}shared expert", source)
        parts["ffn"] = self.part(kind, plain.ffn, f"{name}feed-forward", source, **inside)
        return self.part(Seen, plain, f"{name}output", source, **parts)


def watch(model: M, watcher: Watcher) -> M:
    """`model` with the parts above, named by where they stand: "decoder block 1 cross-attention q"."""
    each = _Parts(watcher)
    parts: dict[str, nn.Module] = {}
    for tower, reads in model.towers.items():
        name, source = "" if tower == "tower" else f"{tower} ", tower == "encoder"
        stack: Any = getattr(model, tower)
        blocks = {
            str(i): each.block(b, f"{name}block {i} ", source) for i, b in enumerate(stack.blocks)
        }
        parts[tower] = share(
            type(stack),
            stack,
            blocks=share(type(stack.blocks), stack.blocks, **blocks),
            norm=each.seen(stack.norm, f"{name}final norm", source),
        )
        parts[reads] = each.part(Seen, getattr(model, reads), f"{name}embedding", source)
    kind = WatchedModel if parts else WatchedStates
    twin: Any = share(mixed(kind, type(model)), model, **parts)
    twin.watcher = watcher
    return twin


class Formed(Mechanism):
    """A mechanism that has several forms, held to one of them."""

    form: str

    def core_attention(self, *args: Any) -> Tensor:
        return getattr(self, self.form)(*args)


class Form(Specialise):
    """`Form("absorbed").copy(model)`: every part that has this form is held to it."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form

    def row(self, kind: type) -> Row | None:
        return self.table[Mechanism] if issubclass(kind, Mechanism) else None

    def hold(self, part: Mechanism) -> nn.Module:
        if self.form not in part.forms:
            return self.copy(part)
        new = self.copy_as(mixed(Formed, type(part)), part)
        new.form = self.form
        return new

    table: ClassVar[dict[type, Row]] = {Mechanism: lambda maker, part: maker.hold(part)}
