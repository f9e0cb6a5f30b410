"""The runner `graph`: CUDA graphs over slots of fixed memory, for what fits into the context."""

from __future__ import annotations

from collections import abc
from dataclasses import replace

from regard.decode.batch import Reading
from regard.decode.beam import Shape
from regard.decode.runners.beams import BeamBatch, beam_steps
from regard.decode.runners.slots import GraphBatch
from regard.decode.runners.steps import GraphSteps
from regard.decode.sampling import MOST_ENDS, RULES, uses
from regard.decode.settings import Request, Settings
from regard.fast.cuda.record import Recorder


class GraphRunner:
    """`rows` of an engine: beams of one shape have as many."""

    name = "graph"

    def __init__(self, steps: GraphSteps, rows: int):
        self.steps, self.rows = steps, rows
        self.batches: dict[Shape | None, GraphBatch] = {}  # their memory stays

    def explain(self) -> list[str]:
        steps, pool = self.steps, self.steps.pool
        how = "CUDA graphs" if steps.graph else "steps as in a CUDA graph"
        size = f"{len(pool.users):,} pages of {pool.page} tokens, {pool.nbytes / 2**30:.2f} GiB"
        more = "rules on runs of tokens and texts past the context: runner torch"
        guesses = "guesses, looked up or by a draft model: several tokens of a row in a pass, where that is faster"
        if steps.stateful:
            more = f"beam search, guesses, {more}; no prefix is found again, as pages hold no state"
            guesses = ""
        lines = [
            f"runner graph: {how} of {steps.rows} slots over {size}",
            steps.fast.explain(),
            more,
            guesses,
            "rows with a mask: rounds of one step and no guesses, for all that run beside them",
        ]
        return [line for line in lines if line]

    def takes(self, request: Request, long: bool) -> bool:
        s = request.settings
        # A state is not taken over by another beam, and takes no guess back.
        plain = not (self.steps.stateful and (s.lookup or s.draft or s.beams > 1))
        fits = len(request.ids) + s.max_new_tokens <= self.steps.length
        fits = fits and s.samples <= self.steps.rows
        # What depends on the text so far is asked of the host.
        used = uses(s)
        ends = len(s.eos) <= MOST_ENDS or not used & {"held", "decay"}
        return plain and fits and ends and RULES not in used and not long

    def stepped(self, kinds: abc.Sequence[Settings]) -> list[Settings]:
        """Those of some settings that steps of one token a row serve."""
        plain = [s for s in kinds if not (s.beams > 1 or s.lookup or s.draft)]
        one = [Request([0], replace(s, max_new_tokens=1, min_new_tokens=0)) for s in plain]
        return [r.settings for r in one if self.takes(r, long=False)]

    def kind(self, request: Request, long: bool) -> Shape | None:
        return Shape.of(request.settings) if request.settings.beams > 1 else None

    def batch(self, kind: Shape | None, reading: Reading) -> GraphBatch:
        if kind not in self.batches:
            if kind is None:
                self.batches[kind] = GraphBatch(self.steps, reading)
            else:
                steps = beam_steps(self.steps, kind, max(1, self.rows // kind.beams))
                self.batches[kind] = BeamBatch(steps, reading)
        return self.batches[kind]

    def recorders(self) -> list[Recorder]:
        return [each for batch in self.batches.values() for each in batch.steps.recorders()]

    def clear(self) -> None:
        """After a fault."""
        for batch in self.batches.values():
            batch.clear()
