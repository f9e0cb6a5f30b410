"""Beam search in the slots of a CUDA graph: the beams of a request are neighbouring rows of one step.

Where a beam's tokens lie is named token by token. Each row writes to places of its own, and a beam that goes on from
another takes over the row of the table that names that one's tokens: nothing is copied. The search itself is `select`
of beam.py on tensors that stay where they are; the host reads them a round late, with the texts that are finished.
"""

from __future__ import annotations

from collections import abc

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.cache import BlockTable
from regard.decode.batch import Batch
from regard.decode.beam import Beams, Group, Rules, Shape, select
from regard.decode.runners.memory import by_token
from regard.decode.runners.rounds import Inflight
from regard.decode.runners.slots import GraphBatch
from regard.decode.runners.steps import SHORTEST, Copies, GraphSteps
from regard.decode.sampling import used_by
from regard.decode.sequence import BROKEN, Sequence, Slot, State
from regard.decode.settings import Request, Result, Settings
from regard.fast.cuda import Pages
from regard.fast.cuda.prompts import next_power_of_two
from regard.fast.cuda.record import arrival, send, to_host
from regard.kernels.triton.sample import best

ROOM = 64  # tokens that a text has room for at first, chosen for speed


class BeamSteps(GraphSteps):
    """The memory of `count` requests of one shape over the pool of a runner, and the graphs recorded for them."""

    def __init__(self, steps: GraphSteps, shape: Shape, count: int):
        options = {"kernels": steps.kernels, "look": steps.look, "fast": steps.fast}
        super().__init__(steps.fast, steps.pool, count * shape.beams, SHORTEST, **options)
        self.shape, self.places, device = shape, count, self.device
        nowhere = self.pool.scratch * self.pool.page
        size = (self.rows, SHORTEST + self.pool.page)
        # Where each row will write, and (in the pages' table) where its text lies.
        self.own = torch.full(size, nowhere, dtype=torch.int32, device=device)
        stores, memo = by_token(self.pool), steps.pages.memo
        self.pages = Pages(stores, self.own.clone(), steps.length, memo=memo)
        self.texts = Beams.start(count, shape.beams, ROOM, device)
        blank = Rules.of([Request([0], Settings(beams=shape.beams))] * count, shape.ends)
        self.rules = blank.each(lambda x: x.to(device))
        self.live, self.broken = torch.zeros(2, count, dtype=torch.bool, device=device)
        self.recorder.still = []

    def grow(self, length: int, room: int) -> None:
        """Make place for texts of so many tokens, `room` of them new."""
        more = max(next_power_of_two(length) - self.length, 0)
        if not more and room <= self.texts.ids.shape[-1]:
            return
        if self.graph:
            torch.cuda.synchronize(self.device)
        nowhere = self.pool.scratch * self.pool.page
        self.own, self.pages.table = (
            F.pad(x, (0, more), value=nowhere) for x in (self.own, self.pages.table)
        )
        self.length, self.texts = self.length + more, self.texts.roomy(next_power_of_two(room))
        self.recorder.clear()

    def step(self, width: int, bound: int, far: int, used: frozenset[str]) -> None:
        s, k, n = self.state, self.shape, width // self.shape.beams
        logits, columns = self.logits(width, bound, far), self.columns.at(slice(0, width), used)
        norm = best(logits)[1]
        old = self.texts.each(lambda x: x[:n])
        rules = self.rules.each(lambda x: x[:n])
        new, parents, over = select(old, rules, k, logits, norm, columns)
        live, broken, pos = self.live[:n], self.broken[:n], s.pos[:width]
        broken.logical_or_(live & ~norm.view(n, -1).isfinite().all(-1))
        for x, y in zip(old.tensors(), new.tensors(), strict=True):
            torch.where(live.view(-1, *[1] * (x.dim() - 1)), y, x, out=x)
        s.ids[:width].copy_(new.last.flatten())
        pos.add_(live.repeat_interleave(k.beams)).clamp_(max=self.length - 1)
        # A beam's text is its parent's, and what comes next lies where it writes.
        first = k.beams * torch.arange(n, device=self.device)[:, None]
        table, at = self.pages.table[:width, :bound], torch.arange(bound, device=self.device)
        taken = table[(parents + first).flatten()]
        torch.where(at < pos[:, None], taken, self.own[:width, :bound], out=table)
        live.logical_and_(~(over | broken))

    def begin(self, new: abc.Sequence[Group]) -> None:
        """Requests whose prompts are read up to their last token, which all beams feed."""
        k, device = self.shape, self.device
        requests = [g.request for g in new]
        at = send([g.index for g in new], device)
        rows = (k.beams * at[:, None] + torch.arange(k.beams, device=device)).flatten()
        fresh = Beams.start(len(new), k.beams, self.texts.ids.shape[-1], device)
        for x, y in zip(self.texts.tensors(), fresh.tensors(), strict=True):
            x[at] = y
        rules = Rules.of(requests, k.ends).each(lambda x: send(x, device))
        for name, y in vars(rules).items():
            getattr(self.rules, name)[at] = y
        ids, pos = send([(r.ids[-1], len(r.ids) - 1) for r in requests], device).T
        self.state.ids[rows] = ids.repeat_interleave(k.beams)
        self.state.pos[rows] = pos.repeat_interleave(k.beams)
        self.live.index_fill_(0, at, True)
        self.broken.index_fill_(0, at, False)

    def run(self, steps: int, width: int, bound: int, far: int, used: frozenset[str]) -> Copies:
        """Advance the first requests by `steps` tokens. Their texts, which of them go on and which are broken, on its
        way to the host; and what tells that it has arrived."""
        k = self.shape
        for _ in range(steps):
            self.recorder.play(("step", width, bound, far, used), self._step, self.changed)
        n = width // k.beams
        each = [*(x[:n] for x in self.texts.tensors()), self.live[:n], self.broken[:n]]
        return to_host(each), arrival(self.device)

    def changed(self) -> list[Tensor]:
        s = self.state
        return [s.ids, s.pos, *self.texts.tensors(), self.live, self.broken, self.pages.table]

    def place(self, edits: dict[tuple[int, int], tuple[int, int]], idle: list[int]) -> None:  # type: ignore[override]
        """Requests that are gone; then pages and how many tokens they have, by (row, first token)."""
        size, k = self.pool.page, self.shape.beams
        if idle:
            at = send([i * k + j for i in idle for j in range(k)], self.device)
            for x in (self.own, self.pages.table):
                x[at] = self.pool.scratch * size
            self.live.index_fill_(0, send(idle, self.device), False)
            self.state.pos.index_fill_(0, at, 0)
        if edits:
            each = [(*at, *page) for at, page in edits.items()]
            row, first, page, count = send(each, self.device).T
            j = torch.arange(size, device=self.device)
            # Tokens that a page does not have are written behind the table's end.
            at = torch.where(j < count[:, None], first[:, None] + j, self.own.shape[1] - 1)
            for x in (self.own, self.pages.table):
                x[row[:, None], at] = (page[:, None] * size + j).int()

    def reset(self) -> None:
        self.place({}, list(range(self.places)))


class BeamBatch(GraphBatch):
    """Requests of one shape, each by its own settings. What is read before the first step is a prompt without its last
    token."""

    steps: BeamSteps
    slots: list[Group]  # type: ignore[assignment]
    edits: dict[tuple[int, int], tuple[int, int]]  # type: ignore[assignment]

    def _slot(self, row: Sequence) -> Slot:
        pages, *own = (BlockTable(self.pool) for _ in range(1 + self.steps.shape.beams))
        return Group(row, row.request.ids[:-1], self.free.pop(0), pages=pages, own=own)

    def admit(self, rows: abc.Sequence[Sequence], keys: abc.Sequence[bytes] = ()) -> None:
        """One request. `keys`: of its prompt's pages."""
        (row,), size = rows, rows[0].request.settings.max_new_tokens
        self.steps.grow(len(row.request.ids) + size, size)
        Batch.admit(self, rows, keys)
        group = self.slots[-1]
        group.memory = self._memory(row.request, group.slot_ids)
        self.new |= dict.fromkeys(group.slot_ids, row)

    def _release(self, slot: Slot) -> None:
        assert isinstance(slot, Group)
        self._leave(slot)
        for pages in (*slot.own, slot.pages):
            pages.release()

    def _forget(self, slot: Slot) -> None:
        gone = set(slot.slot_ids)
        self.edits = {at: page for at, page in self.edits.items() if at[0] not in gone}

    def results(self, i: int, why: str = "") -> list[Result]:
        """Running ones are those of when the host last knew."""
        group = self.slots[i]
        return [] if group.found is None else group.results(group.found, why)

    def _read(self, group: list[tuple[Slot, int]]) -> None:
        self._prefill([self._part(slot, size) for slot, size in group], frozenset(), group)
        for slot, size in group:
            slot.fed += size

    def _launch(self) -> Inflight | None:
        live = [g for g in self.slots if g.fed == len(g.text) and not g.unread and g.left]
        if not live:
            self._place()
            return None
        page, steps = self.pool.page, self._steps([g.left for g in live])
        longest, used = 1, frozenset[str]()
        for g in live:
            end = g.scheduled + min(steps, g.left)
            if not g.scheduled and not g.own[0]:
                for row in g.slot_ids:
                    for i, number in enumerate(g.pages):
                        self.edits[row, i * page] = number, min(page, len(g.text) - i * page)
            for row, own in zip(g.slot_ids, g.own, strict=True):
                have = len(own)
                if have * page < end:
                    own.reserve(end)
                    for i in range(have, len(own)):
                        self.edits[row, len(g.text) + i * page] = own[i], page
            used |= used_by(g.settings, g.scheduled, end - 1)
            longest = max(longest, len(g.text) + end)
        self._place()
        new = [g for g in live if not g.scheduled]
        if new:
            self.steps.begin(new)
        for g in live:
            g.scheduled += min(steps, g.left)
        width = min(self.steps.places, 1 << max(g.index for g in live).bit_length())
        bounds = self.steps.bucket(longest), self._far(live)
        copies = self.steps.run(steps, width * self.steps.shape.beams, *bounds, used)
        return Inflight(*copies, [(g, 0, 0) for g in live])

    def _place(self) -> None:
        self.steps.place(self.edits, self.idle)
        self.edits, self.idle = {}, []

    def _collect(self) -> None:
        if self.inflight is None:
            return
        *copies, live, broken = self.inflight.wait()
        texts, groups = Beams(*copies), [slot for slot, _, _ in self.inflight.lines]
        self.inflight = None
        for g in groups:
            if g.state is State.FINISHED:
                continue
            assert isinstance(g, Group)
            rows = slice(g.index, g.index + 1)
            g.found = texts.each(lambda x, rows=rows: x[rows])
            g.sequence.error = BROKEN if bool(broken[g.index]) else None
            g.closed, g.state = not bool(live[g.index]), State.RUNNING
            self._score(g)
            if self.prefix and g.sequence.error is None:
                g.pages.publish(g.keys)


def beam_steps(steps: GraphSteps, shape: Shape, count: int) -> BeamSteps:
    """The runner of a shape, kept with that of the model if nobody has it and it is large enough."""
    kept = steps.searches.get(shape)
    if kept is None or kept.owner() is not None or kept.places < count:
        kept = steps.searches[shape] = BeamSteps(steps, shape, next_power_of_two(count))
    kept.reset()
    kept.recorder.puts_off = steps.recorder.puts_off
    return kept
