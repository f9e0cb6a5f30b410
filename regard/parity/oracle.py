"""What every tensor of a run should have been: each computed in float64 from what the run itself had before it.

`Walk` goes through a model as `Block.forward` does, but hands on what was recorded instead of what it computed. So an
error shows where it is made and nowhere else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import DSA, Context
from regard.attention.sparse import SparseAttention
from regard.block import Block, Stack
from regard.layers import Classify
from regard.mask import Full, Mask, Span, Visible, Window
from regard.models import Model
from regard.models.embedding import TokenEmbedding
from regard.moe import MixtureOfExperts
from regard.parity.cells import Attended, Trace
from regard.parity.record import Best, towers

NOTHING = torch.zeros(1, 1)  # no error
FP8 = 2.0**-4  # of float8 e4m3


@dataclass
class Given:
    """What all runs read: ids (rows, positions) or images, and a source."""

    ids: Tensor
    source: Tensor | None = None

    def times(self, count: int) -> Given:
        """All rows `count` times."""
        each = [x if x is None else torch.cat([x] * count) for x in (self.ids, self.source)]
        assert each[0] is not None
        return Given(each[0], each[1])


@dataclass
class Step:
    """One tensor of a run: its name, what it should be, how far it is off (rows, positions), and what
    it is measured by (`key`). A tensor that the run did not show is off by nothing. `tied` (rows,
    positions): where scores of an indexer tie, so that another choice of keys is as right as ours."""

    name: str
    value: Tensor
    error: Tensor
    key: str
    unit: float = 0.0  # a coarser rounding than the run's own
    tied: Tensor | None = None


def oracle(model: Model, dtype: torch.dtype) -> Model:
    """The model in float64, with the weights that it has in `dtype`."""
    return copy.deepcopy(model).to(device="cpu", dtype=dtype).double().eval()


def rms(x: Tensor) -> Tensor:
    """Root mean square of each token's numbers: (rows, positions, ...) -> (rows, positions)."""
    return x.flatten(2).square().mean(-1).sqrt()


class Walk:
    """`Walk(oracle, given, trace).steps`: every step of the run, in the order of the computation. Where nothing is
    to be `compared`, they hold values alone."""

    def __init__(self, model: Any, given: Given, trace: Trace, compared: bool = True):
        self.model, self.given, self.trace, self.compared = model, given, trace, compared
        self.steps: list[Step] = []
        self.ctx: Any = None
        self.cross: Any = None
        states = self.recurrent() if not towers(model) else self.transformer()
        self.logits(states)

    def see(self, name: str, value: Tensor, tied: Tensor | None = None) -> Tensor:
        """Compare with what was recorded, and go on with that."""
        got = self.trace.tensors.get(name)
        error = NOTHING
        if got is not None and self.compared:
            error = torch.where(self.trace.real[name], rms(got - value), 0.0)
        self.steps.append(Step(name, value, error, name, tied=tied))
        return value if got is None else got

    def span(self, source: bool) -> Span:
        t = self.trace
        size, lengths = (t.source, t.source_lengths) if source else (t.size[1], t.lengths)
        return Span.run(0, size) if lengths is None else Span.ragged(lengths, size)

    # --- the flows of data ----------------------------------------------------------------------------------------

    def transformer(self) -> Tensor:
        x = memory = None
        for name, embedding, stack, source in towers(self.model):
            pos, ids = self.span(source), self.given.source if source else self.given.ids
            words = isinstance(embedding, TokenEmbedding)
            x = self.see(f"{name}embedding", embedding(ids, pos) if words else embedding(ids))
            mask = stack.config.mask
            self.ctx = Context(pos, mask, relative=stack.relative, backend="reference")
            if memory is not None:
                there = self.span(True)
                self.cross = Context(
                    pos, Full(), memory=memory, memory_pos=there, backend="reference"
                )
            memory = x = self.tower(name, stack, x)
        assert x is not None
        return x

    def tower(self, name: str, stack: Stack, x: Tensor) -> Tensor:
        for i, block in enumerate(stack.blocks):
            assert isinstance(block, Block)
            here = f"{name}block {i} "
            if self.trace.whole:
                with ties(block.attention) as tied:
                    y = block(x, self.ctx, self.cross)
                x = self.see(f"{here}output", y, torch.cat(tied, 1) if tied else None)
            else:
                x = self.block(here, block, x)
        return x if stack.norm is None else self.see(f"{name}final norm", stack.norm(x))

    def recurrent(self) -> Tensor:
        """States of cells depend on all before them: the whole row is one step."""
        t, more = self.trace, {}
        if self.given.source is not None:
            more = {"source": self.given.source, "source_lengths": t.source_lengths}
            self.see("encoder states", self.model.encode(self.given.source, t.source_lengths)[0])
        states = self.model.hidden(self.given.ids, t.lengths, **more, backend="reference")
        return self.see("decoder states", states)

    def logits(self, h: Tensor) -> None:
        head, lengths = getattr(self.model.config, "head", None), self.trace.lengths
        if isinstance(head, Classify):
            if head.token == "last" and lengths is not None:
                h = h[torch.arange(len(h)), lengths - 1][:, None]
            label = self.model.logits(h)[:, None]
            empty = label.new_zeros(len(h), self.trace.size[1] - 1, label.shape[-1])
            self.see("logits", torch.cat([label, empty], 1))
        else:
            self.see("logits", self.model.logits(h))

    # --- inside a block -------------------------------------------------------------------------------------------

    def block(self, name: str, b: Any, x: Tensor) -> Tensor:
        """As `Block.forward`."""
        own, cross = f"{name}attention ", f"{name}cross-attention "
        if b.post:
            x = self.see(f"{name}norm 1", b.norm1(x + self.attention(own, b.attention, x)))
            if b.cross is not None:
                x = self.see(f"{name}norm 2", b.norm2(x + self.attention(cross, b.cross, x)))
            last = self.see(f"{name}norm 3", b.norm3(x + self.ffn(name, b.ffn, x)))
            return self.see(f"{name}output", last)
        y = self.see(f"{name}norm 1", b.norm1(x))
        x = x + self.attention(own, b.attention, y)
        if b.cross is not None:
            x = x + self.attention(cross, b.cross, self.see(f"{name}norm 2", b.norm2(x)))
        y = self.see(f"{name}norm 3", b.norm3(x))
        return self.see(f"{name}output", x + self.ffn(name, b.ffn, y))

    def attention(self, name: str, layer: Any, x: Tensor) -> Tensor:
        ctx = self.cross if "cross" in name else self.ctx
        inner = layer.attention if isinstance(layer, SparseAttention) else layer
        c_q = inner.query_input(x)
        q = self.see(f"{name}q", inner.queries(c_q, ctx))
        entries = inner.entries(x, ctx)
        if isinstance(layer, SparseAttention):
            entries["index_k"] = layer.indexer.keys(x, ctx)
        calls = self.trace.calls.get(name, [])
        for key, value in entries.items():
            self.kept(f"{name}{key}", key, value, calls, self.mask(layer, ctx))
        parts = []
        o = q.new_zeros(*q.shape[:3], inner.e)
        for call in calls:
            here = replace(ctx, pos=Span(call.cells.index), memory=None, memo={})
            k_pos = Span(call.index)
            seen, bias = Visible(self.mask(layer, ctx), here.pos, k_pos), here.bias(k_pos)
            if call.chosen is None:
                part = inner.mix(call.cells.take(q), call.kept, seen, here, bias)
            else:
                given = call.cells.take(x), call.cells.take(q), call.cells.take(c_q)
                part, scores = self.sparse(layer, given, call, (seen, here, bias))
                parts.append((call, scores))
            call.cells.put(o, part)
        if parts:
            self.choices(f"{name}choice", layer, parts, q)
        return self.see(f"{name}output", inner.wo(self.see(f"{name}before wo", o).flatten(2)))

    def mask(self, layer: Any, ctx: Context) -> Mask:
        window = None if ctx is self.cross else layer.config.window
        return ctx.mask if window is None else ctx.mask & Window(window)

    def kept(self, name: str, key: str, value: Tensor, calls: list[Attended], mask: Mask) -> None:
        """Keys (or values, or latents) as they were computed, then as attention had them, which with a cache is as they
        were read; where only the latter is known, that."""
        if name in self.trace.tensors:
            value, label = self.see(name, value), f"{name} read from the cache"
        else:
            label = name
        if not self.compared:
            if label == name:
                self.steps.append(Step(name, value, NOTHING, name))
            return
        error = torch.zeros(value.shape[:2])
        for call in calls:
            rows, size = call.cells.rows, call.held.shape[1] - 1
            off = rms(call.kept[key][:, :size] - value[rows, :size])
            off = torch.where(call.held[:, :size], off, torch.inf)
            seen = Visible(mask, Span(call.cells.index), Span(call.index)).tensor()
            real = (call.cells.index >= 0)[:, None, :, None]
            needed = (seen & real).any(2)[:, 0, :size].expand_as(off)
            here = torch.where(needed, off, 0.0).float()
            error[rows, :size] = error[rows, :size].maximum(here)
        self.steps.append(Step(label, value, error, name))

    # --- choices: what was chosen is taken over, if it was the best up to rounding ----------------------------------

    def sparse(
        self, layer: Any, given: tuple[Tensor, ...], call: Attended, rest: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        """The attention over the keys that the run chose, and the scores by which it had to."""
        x, q, c_q = given
        seen, here, bias = rest
        found: list[Tensor] = []

        def choice(scores: Tensor, k: int, order: Tensor | None) -> Tensor:
            done = sum(each.shape[1] for each in found)
            found.append(scores)
            assert call.chosen is not None
            return call.chosen[:, done : done + scores.shape[1]]

        layer.__dict__["choice"] = choice
        try:
            index_q = layer.indexer.queries(c_q, here)
            o = layer.sparse(x, q, index_q, call.kept, seen, here, bias)
        finally:
            del layer.__dict__["choice"]
        return o, torch.cat(found, 1)

    def choices(
        self, name: str, layer: Any, parts: list[tuple[Attended, Tensor]], q: Tensor
    ) -> None:
        rows, positions = q.shape[:2]
        value = q.new_zeros(rows, positions, self.trace.size[1] + 1)
        error = q.new_zeros(rows, positions)
        for call, scores in parts:
            assert call.chosen is not None
            cells = call.cells
            cells.put(error, regret(scores, call.chosen, layer.config.topk))
            finite = scores.masked_fill(scores == -torch.inf, 0.0)
            cells.put(value, F.pad(finite, (0, value.shape[-1] - finite.shape[-1])))
        fp8 = isinstance(layer.config, DSA) and layer.config.precision == "fp8"
        self.steps.append(Step(name, value, error, name, FP8 if fp8 else 0.0))

    def ffn(self, name: str, layer: Any, x: Tensor) -> Tensor:
        here = f"{name}feed-forward"
        if not isinstance(layer, MixtureOfExperts) or f"{here} choice 0" not in self.trace.tensors:
            return self.see(here, layer(x))
        with self.routed(here):
            y = layer(x)
        return self.see(here, y)

    @contextmanager
    def routed(self, name: str) -> Iterator[None]:
        """Experts as the run chose them."""
        made: list[Step] = []

        def take(scores: Tensor, k: int) -> Tensor:
            here = f"{name} choice {len(made)}"
            real, chosen = self.trace.real[here], self.trace.tensors[here].long()
            value = scores.unflatten(0, real.shape)
            off = torch.where(real, regret(value, chosen, k), 0.0)
            value = value.masked_fill(value == -torch.inf, 0.0)
            made.append(Step(f"{name} choice", value, off, here))
            return chosen.flatten(0, 1)

        with Best(take):
            yield
        self.steps += made


@contextmanager
def ties(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Fills a list with where (rows, some positions) the best key that is left scores as much as the
    worst that is chosen."""
    found: list[Tensor] = []
    if not isinstance(layer, SparseAttention):
        yield found
        return
    plain = layer.choice

    def choice(scores: Tensor, k: int, order: Tensor | None) -> Tensor:
        best = scores.topk(min(k + 1, scores.shape[-1])).values
        found.append(
            ((best[..., k:] == best[..., k - 1 : k]) & (best[..., k:] > -torch.inf)).any(-1)
        )
        return plain(scores, k, order)

    layer.__dict__["choice"] = choice
    try:
        yield found
    finally:
        del layer.__dict__["choice"]


def regret(scores: Tensor, chosen: Tensor, k: int) -> Tensor:
    """How much better the best that was left is than the worst that was taken, or 0: (... n), (... k) -> (...).
    Too few or too many are infinitely wrong; scores of -inf count as none."""
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    there = scores > -torch.inf
    worst = scores.masked_fill(~(taken & there), torch.inf).amin(-1)
    left = scores.masked_fill(taken, -torch.inf).amax(-1)
    right = (taken & there).sum(-1) == there.sum(-1).clamp(max=k)
    return torch.where(right, (left - worst).clamp(min=0.0), torch.inf)
