"""What a run of a model computed on its way, tensor by tensor, taken from outside: no model knows of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard import moe
from regard.attention.sparse import SparseAttention
from regard.block import Stack
from regard.mask import Visible
from regard.models import EncoderDecoder, Model, Transformer
from regard.moe import MixtureOfExperts
from regard.parity.cells import Attended, Cells, Trace, by_position


def towers(model: Model) -> list[tuple[str, nn.Module, Stack, bool]]:
    """What stands before its blocks' names, embedding, blocks, whether it reads the source."""
    if isinstance(model, Transformer):
        return [("", model.embedding, model.tower, False)]
    if isinstance(model, EncoderDecoder):
        return [
            ("encoder ", model.source, model.encoder, True),
            ("decoder ", model.target, model.decoder, False),
        ]
    return []


class Recorder:
    """Watches a model while it runs: `with Recorder(model, trace) as recorder: recorder.cells = ...; model(ids)`.

    A module's class is replaced by one that also notes what a call gives; so it works on models without hooks."""

    def __init__(self, model: Model, trace: Trace):
        self.model, self.trace = model, trace
        self.cells, self.source_cells = Cells([0], [0], [1]), Cells([0], [0], [1])
        self.undo: list[Callable[[], None]] = []
        self.chosen: list[Tensor] = []

    def __enter__(self) -> Recorder:
        for name, embedding, stack, source in towers(self.model):
            self.watch(embedding, f"{name}embedding", source)
            for i, block in enumerate(stack.blocks):
                self.block(f"{name}block {i} ", block, source)
            if stack.norm is not None:
                self.watch(stack.norm, f"{name}final norm", source)
        if not towers(self.model):
            self.wrap(self.model, "hidden", self.noting("decoder states", False))
            if hasattr(self.model, "encode"):
                self.wrap(self.model, "encode", self.noting("encoder states", True))
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self.undo):
            undo()
        self.undo = []

    def answer(self, y: Tensor) -> None:
        """What the model gave; one for each row (a label) lies at the row's first place."""
        cells = self.cells
        if y.dim() == 2:
            first = torch.zeros_like(cells.rows).tolist()
            cells, y = Cells(cells.rows.tolist(), first, [1] * len(y)), y[:, None]
        self.trace.put("logits", y, cells)

    # --- what is watched ------------------------------------------------------------------------------------------

    def block(self, name: str, block: Any, source: bool) -> None:
        self.watch(block, f"{name}output", source)
        for part, short in (("norm1", "norm 1"), ("norm2", "norm 2"), ("norm3", "norm 3")):
            if getattr(block, part) is not None:
                self.watch(getattr(block, part), name + short, source)
        self.attention(f"{name}attention ", block.attention, source, False)
        if block.cross is not None:
            self.attention(f"{name}cross-attention ", block.cross, source, True)
        self.watch(block.ffn, f"{name}feed-forward", source, operands=1)
        if isinstance(block.ffn, MixtureOfExperts):
            self.experts(f"{name}feed-forward", block.ffn, source)

    def attention(self, name: str, layer: Any, source: bool, cross: bool) -> None:
        self.watch(layer, f"{name}output", source, operands=2)
        if isinstance(layer, SparseAttention):
            self.wrap(layer, "choice", lambda real: self.noting_choice(real))
            self.wrap(layer, "sparse", lambda real: self.noting_mix(real, name, source, cross, 1))
            self.wrap(layer.indexer, "keys", self.noting(f"{name}index_k", source))
            layer = layer.attention
        self.wrap(layer, "entries", lambda real: self.noting_entries(real, name, source or cross))
        self.wrap(layer, "mix", lambda real: self.noting_mix(real, name, source, cross, 0))

    def watch(self, module: nn.Module, name: str, source: bool, operands: int = 0) -> None:
        """Note what calls of `module` give. One that is called with more than its `operands` adds the residual too
        (a packed model's): what it gives is not the tensor of that name."""
        kind, recorder = type(module), self

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            y = kind.__call__(self, *args, **kwargs)
            if not operands or len(args) == operands:
                recorder.note(name, y, source)
            return y

        module.__class__ = type(kind.__name__, (kind,), {"__call__": call})
        self.undo.append(lambda: setattr(module, "__class__", kind))

    def wrap(self, module: nn.Module, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method of one module."""
        before = module.__dict__.get(name)
        module.__dict__[name] = make(getattr(module, name))

        def undo() -> None:
            if before is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = before

        self.undo.append(undo)

    def note(self, name: str, y: Tensor, source: bool) -> None:
        self.trace.put(name, y, self.source_cells if source else self.cells, source)

    def noting(self, name: str, source: bool) -> Callable[[Any], Any]:
        def make(real: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                y = real(*args, **kwargs)
                self.note(name, y[0] if isinstance(y, tuple) else y, source)
                return y

            return run

        return make

    def noting_entries(self, real: Any, name: str, source: bool) -> Any:
        def entries(*args: Any) -> dict[str, Tensor]:
            found = real(*args)
            for key, x in found.items():
                self.note(name + key, x, source)
            return found

        return entries

    def noting_choice(self, real: Any) -> Any:
        def choice(*args: Any) -> Tensor:
            self.chosen.append(real(*args))
            return self.chosen[-1]

        return choice

    def noting_mix(self, real: Any, name: str, source: bool, cross: bool, skip: int) -> Any:
        """Of `mix(q, kept, mask, ...)`, or `sparse(x, q, index_q, kept, mask, ...)`, which skips x and index_q."""

        def mix(*args: Any) -> Tensor:
            self.chosen = self.chosen if not skip else []
            o = real(*args)
            q, kept, mask = (args[1], args[3], args[4]) if skip else args[:3]
            if isinstance(mask, Visible):  # else a part of `sparse`
                self.note(f"{name}q", q, source)
                self.note(f"{name}before wo", o, source)
                chosen = torch.cat(self.chosen, 1) if skip else None
                self.attended(name, kept, mask.k.index, chosen, source, cross)
            return o

        return mix

    def attended(
        self,
        name: str,
        kept: dict[str, Tensor],
        index: Tensor,
        chosen: Tensor | None,
        source: bool,
        cross: bool,
    ) -> None:
        cells = self.source_cells if source else self.cells
        lengths = self.source_cells.ends if cross else cells.ends
        if cross:  # rows of the source, in the order of this call
            lengths = _by_row(self.source_cells, self.trace.size[0])[cells.rows]
        kept, held, slots = by_position(kept, index.cpu(), int(lengths.max()))
        if chosen is not None:
            chosen = slots.gather(1, chosen.cpu().flatten(1)).view_as(chosen)
        call = Attended(cells, kept, held, lengths, chosen)
        self.trace.calls.setdefault(name, []).append(call)

    def experts(self, name: str, layer: MixtureOfExperts, source: bool) -> None:
        """The router's choices: of groups, where there are any, and of experts."""

        def make(real: Any) -> Any:
            def route(x: Tensor) -> Any:
                taken: list[Tensor] = []

                def take(scores: Tensor, k: int) -> Tensor:
                    taken.append(plain_best(scores, k))
                    return taken[-1]

                with Best(take):
                    answer = real(x)
                shape = (self.source_cells if source else self.cells).index.shape
                for i, each in enumerate(taken):
                    self.note(f"{name} choice {i}", each.unflatten(0, shape), source)
                return answer

            return route

        self.wrap(layer, "route", make)


plain_best = moe.best


class Best:
    """Another rule for which experts are the best, for a while."""

    def __init__(self, rule: Callable[[Tensor, int], Tensor]):
        self.rule = rule

    def __enter__(self) -> None:
        self.before, moe.best = moe.best, self.rule  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        moe.best = self.before


def _by_row(cells: Cells, rows: int) -> Tensor:
    """How many source tokens each row has."""
    ends = torch.zeros(rows, dtype=torch.long)
    ends[cells.rows] = cells.ends
    return ends
