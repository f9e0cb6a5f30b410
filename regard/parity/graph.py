"""A run in slots over pages, as a CUDA graph has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.decode.engine import Engine
from regard.decode.runners.steps import GraphSteps, why_plain
from regard.decode.settings import Request, Settings
from regard.fast.cuda import decoder
from regard.fast.cuda.generic import GenericBlock, GenericMechanism, GenericPart
from regard.fast.cuda.prompts import next_power_of_two, round_up
from regard.fast.watch import watch
from regard.models import Model
from regard.parity.trace import PAGE, Cells, Given, Recorder, Trace, trace_of


class Forcing(Recorder):
    """Notes the logits of the tokens `last`, and gives the engine others instead, which leave it no
    choice but the given tokens."""

    last = Cells([(0, 0, 1)])

    def answer(self, logits: Tensor) -> Tensor:
        self.trace.put("logits", logits[:, None], self.last)
        forced = torch.full_like(logits, -1e4)
        for i, (row, position, size) in enumerate(self.last.given):
            if size:
                forced[i, self.trace.given.ids[row, position + 1]] = 0.0
        return forced


def why_unseen(model: Model) -> str:
    """What keeps parity from following a model in a graph, or nothing."""
    if reason := why_plain(model, anywhere=True):
        return reason
    for part in decoder(model).modules():
        if isinstance(part, GenericMechanism | GenericPart | GenericBlock):
            plain = part.block if isinstance(part, GenericBlock) else part.part
            return (
                f"its {type(plain).__name__} runs as it is there, and shows nothing of what it does"
            )
    return ""


class GraphRun(GraphSteps):
    """The steps of an engine that is made to say the given tokens: every prompt is read once, and
    goes on as two samples. On a GPU its steps run one by one, as they do elsewhere."""

    def __init__(self, model: Model, given: Given):
        self.trace = trace_of(model, given, next(model.parameters()).dtype)
        self.watcher = Forcing(self.trace)
        rows, size = self.trace.size
        pages = rows * (-(-size // PAGE) + -(-self.trace.source // PAGE))
        # A chunk is not a whole number of prompts, so that some are read in two parts.
        how: Any = {"rows": rows, "pages": pages, "page": PAGE, "chunk": given.common + 1}
        self.engine = Engine(model, runner="graph", prefix=False, **how)
        assert self.engine.graph is not None
        self.slots = self.engine.graph.batches[None]
        made = self.slots.steps
        self.slots.steps = self.engine.graph.steps = self
        twin = watch(made.fast, self.watcher)
        super().__init__(model, made.pool, made.rows, made.length, fast=twin)
        self.graph = self.recorder.records = False

    def run_all(self) -> Trace:
        given = self.trace.given
        half = self.trace.size[0] // 2
        settings = Settings(self.trace.size[1] - given.common, samples=2, temperature=1.0)
        for row in range(half):
            source = None if given.source is None else given.source[row]
            ids = given.ids[row, : given.common].tolist()
            self.engine.submit(Request(ids, settings, source))
        for _ in self.engine.run():
            pass
        self.trace.share()
        return self.trace

    def texts(self) -> dict[int, int]:
        """Which row of the texts each slot holds."""
        half = self.trace.size[0] // 2
        each = ((slot.index, slot.sequence) for slot in self.slots.slots)
        return {i: row.request.number + half * row.sample for i, row in each}

    def hidden(self, ids: Tensor, pos: Tensor, pages: Any, *rest: Any) -> Any:
        rows = self.texts()
        pack = pages.pack
        if pack is None:
            # What was chosen last is not given, and finished rows go on with it.
            end = self.trace.size[1] - 1
            each = enumerate(zip(pages.live.tolist(), pos[:, 0].tolist(), strict=True))
            real = {i: p for i, (live, p) in each if live and i in rows and p < end}
            cells = [(rows[i], real[i], 1) if i in real else (0, 0, 0) for i in range(len(ids))]
            self.watcher.cells = self.watcher.last = Cells(cells, 1)
        else:
            three = (pack.slot_ids.tolist(), pack.starts.tolist(), pack.totals.tolist())
            # Behind the last one it comes again.
            texts = dict.fromkeys(zip(*three, strict=True))
            parts = [(rows[i], start, end - start) for i, start, end in texts]
            self.watcher.cells = Cells(parts, flat=True)
            ends = zip(pack.rows.tolist(), pack.lengths.tolist(), strict=True)
            self.watcher.last = Cells([(rows[i], end - 1, 1) for i, end in ends] or [(0, 0, 0)], 1)
        return super().hidden(ids, pos, pages, *rest)

    def remember(self, memories: Sequence[Any]) -> None:
        """Sources are encoded, some of them together."""
        source = self.trace.given.source
        rows = [m.request.number for m in memories]
        b, s = len(rows), self.trace.source
        if source is not None and source.dim() == 2:
            b, s = next_power_of_two(b), round_up(s, 16)
        cells = [(row, 0, self.trace.source) for row in rows] + [(0, 0, 0)] * (b - len(rows))
        self.watcher.source_cells = Cells(cells, s)
        super().remember(memories)
        self.watcher.all_read()
