"""The runners `torch` and `native`: the model's own forward, which serves every request; native where
`regard.prepare` has made its parts C code."""

from __future__ import annotations

from dataclasses import replace

from regard.decode.batch import Batch, Reading
from regard.decode.runners.outgrown import SinksBatch, WindowBatch, streams
from regard.decode.runners.rows import Forward, PlainBatch
from regard.decode.settings import Request
from regard.fast.cpu import Prepared

# Kinds of batches besides the usual one: of rows that have outgrown the context and are read anew for each token, or go
# on in a cache that forgets.
WINDOW, SINKS = "window", "sinks"


class TorchRunner:
    def __init__(self, forward: Forward, why: str):
        self.forward, self.why = forward, why
        native = isinstance(forward.model, Prepared) and not forward.model.graphs
        self.name = "native" if native else "torch"
        self.streams = bool(forward.longest) and streams(forward.model)

    def explain(self) -> list[str]:
        return [f"runner {self.name}: no CUDA graph, as {self.why}", self.forward.model.explain()]

    def takes(self, request: Request, long: bool) -> bool:
        return True

    def kind(self, request: Request, long: bool) -> str | None:
        """`long`: where its text has outgrown the context."""
        if not long:
            return None
        return SINKS if self.streams and request.settings.overflow == "sinks" else WINDOW

    def batch(self, kind: str | None, reading: Reading) -> Batch:
        if kind is None:
            return PlainBatch(self.forward, reading)
        # What moves with a window is left to nobody.
        alone = Reading(chunk=reading.chunk, scores=reading.scores)
        made = WindowBatch if kind == WINDOW else SinksBatch
        return made(replace(self.forward, pool=None, draft=None), alone)
