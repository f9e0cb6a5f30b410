"""Rows in fixed slots over pages, whose steps a CUDA graph computes (steps.py).

The host reads a round of up to `look` steps one round late, so that the device always has work. Where a row has a mask,
its next token depends on what the host says of the last one: then rounds have one step, and what was chosen is read,
and masks are made, while the device feeds it to the model. Prompts are read packed end to end, a chunk of them a step;
a source is encoded once, and what the decoder's layers keep of it lies in pages that a second table names. A row whose
answer has ended goes on until the host has seen that: what it writes lies behind its text, in a page of its own or in
the pool's scratch page. One that has as many tokens as it may have leaves its place to the next request at once.
"""

from __future__ import annotations

import math
import weakref
from bisect import insort
from collections import abc

from regard.cache import BlockTable, OutOfPages
from regard.decode.batch import Batch, Reading
from regard.decode.runners.guesses import PLAIN, SKIPPED, Plan
from regard.decode.runners.rounds import Inflight, measure_round, plan_round, start_round
from regard.decode.runners.steps import SHORTEST, GraphSteps
from regard.decode.sampling import (
    MASK,
    used_by,
)
from regard.decode.sequence import BROKEN, NOTHING, Memory, Sequence, Slot, State, unscored
from regard.decode.settings import Request, Tops
from regard.decode.sources import source_size
from regard.fast.cuda.prompts import (
    RECORDED,
    Part,
    next_power_of_two,
)

PADDED = 4  # places that prompts of different lengths may be laid out in, for each token of a chunk


class GraphBatch(Batch):
    """Rows of any sampling settings in the slots of a graph."""

    def __init__(self, steps: GraphSteps, reading: Reading):
        super().__init__(steps.pool, reading)
        # Pages alone do not bring back a state.
        self.prefix = reading.prefix and not steps.stateful
        self.steps, self.padded = steps, PADDED * reading.chunk
        self.free = list(range(steps.places))  # the lowest first
        self.edits: dict[tuple[int, int], int] = {}  # pages by (row, place) of the runner's table
        self.idle: list[int] = []  # places that have been left, to be still on the device
        self.new: dict[int, Sequence] = {}  # rows whose settings the runner does not know
        self.inflight: Inflight | None = None
        self.fed_early = set[
            Slot
        ]()  # whose logits wait in the runner for a mask (`GraphSteps.feed`)
        steps.owner = weakref.ref(self)

    # --- membership ---

    def _slot(self, row: Sequence) -> Slot:
        return Slot(row, row.request.ids + row.ids, self.free.pop(0), pages=BlockTable(self.pool))

    def admit(self, rows: abc.Sequence[Sequence], keys: abc.Sequence[bytes] = ()) -> None:
        memory = self._memory(rows[0].request, self.free[: len(rows)])
        super().admit(rows, keys)
        for slot in self.slots[-len(rows) :]:
            slot.memory, self.new[slot.index] = memory, slot.sequence

    def _memory(self, request: Request, slot_ids: list[int]) -> Memory | None:
        size = source_size(self.steps.fast, request)
        return Memory(request, size, slot_ids, BlockTable(self.pool)) if size else None

    def _adopt(self, slot: Slot) -> None:
        keys = self._adoptable(slot)
        slot.sequence.keys = keys[: slot.pages.adopt(keys)]
        slot.fed = len(slot.pages) * self.pool.page

    def _release(self, slot: Slot) -> None:
        if slot.state is not State.DRAINING:
            self._leave(slot)
        slot.pages.release()

    def _forget(self, slot: Slot) -> None:
        """Its pages, in the table of its place."""
        for place in range(len(slot.pages)):
            self.edits[slot.index, place] = self.pool.scratch

    def _leave(self, slot: Slot) -> None:
        """Its place is free for what is launched from now on."""
        slot.state = State.DRAINING
        self._forget(slot)
        if slot.memory is not None:
            slot.memory.slot_ids = [i for i in slot.memory.slot_ids if i not in slot.slot_ids]
            if not slot.memory.slot_ids:
                slot.memory.pages.release()
        self.idle.append(slot.index)
        insort(self.free, slot.index)

    def clear(self) -> None:
        """After a fault: no row, and nothing on its way."""
        self.free, self.slots, self.edits, self.idle = list(range(self.steps.places)), [], {}, []
        self.inflight, self.new, self.events, self.fed_early = None, {}, [], set()
        self.steps.reset()

    # --- one step ---

    def prepare(self) -> None:
        """Where rows have masks: read the round before, and call them, here, for what may come next. A row may end with
        it."""
        masked = [slot for slot in self.slots if slot.request.mask is not None]
        if not masked:
            return
        # In this order: when the round before has been read, nobody reads its masks any more.
        self._collect()
        self._upload_settings()
        room, vocab = self.steps.columns.room(), self.steps.columns.vocab
        for slot in masked:
            # What follows a first token is asked when the host has read it.
            if slot.sequence.finish or (slot.scheduled and slot.state is State.PREFILL):
                continue
            slot.sequence.write_mask(room[slot.index], vocab)

    def _upload_settings(self) -> None:
        """The settings of new rows, to the runner."""
        if self.new:
            self.steps.columns.put(list(self.new), list(self.new.values()))
            self.new = {}

    def step(self) -> None:
        """Start the next chunk of prompts and the next round; read the round before while they run."""
        self._upload_settings()
        self._encode()
        self._feed()
        launched = self._launch()
        self._collect()
        self.inflight = launched

    def _reserve(self, slot: Slot, tokens: int) -> None:
        """Pages for so many tokens of a slot in all, or OutOfPages and none."""
        have = len(slot.pages)
        if have * self.pool.page < tokens:
            slot.pages.reserve(tokens)
            if slot.scheduled:
                self.edits |= slot.pages.edits(slot.index, have)

    def _encode(self) -> None:
        """Read sources, up to a chunk of their tokens, by rank; those of about one length together."""
        fresh = {id(m): m for m in (s.memory for s in self.slots) if m is not None and not m.ready}
        room, group = self.chunk, list[Memory]()
        for m in sorted(fresh.values(), key=lambda m: m.request.rank):
            if group and m.size > room:
                break
            m.pages.reserve(m.size)
            group.append(m)
            room -= m.size
        group.sort(key=lambda m: -m.size)
        while group:
            few = len(group) * group[0].size <= RECORDED
            some = [m for m in group if few or 2 * m.size >= group[0].size]
            self.steps.remember(some)
            for m in some:
                m.ready = True
            group = group[len(some) :]

    def _read(self, group: list[tuple[Slot, int]]) -> None:
        """Prefill the next tokens of each slot's text. Where a text is through, its slot and the samples that share it
        choose their first token; they share its pages up to the end of the prompt."""
        parts, through, shares = [], [], list[tuple[Slot, Slot, int]]()
        for slot, size in group:
            end, others = slot.fed + size, slot.going()
            writers = [slot, *others] if end == len(slot.text) else []
            parts.append(self._part(slot, size, [(s.index, s.said) for s in writers]))
            through += writers
            if end in (len(slot.text), len(slot.text) - len(slot.sequence.ids)):
                shares += [(slot, s, end) for s in others]
        own = [s for _, s, size in shares if size % self.pool.page]
        if self.pool.available < len(own):
            raise OutOfPages(f"{len(own)} samples need a page each; free a row, or make more pages")
        copies = [self._share(*each) for each in shares]
        now = [(s.settings, s.said) for s in through]
        used = frozenset().union(*(used_by(s, n, n) for s, n in now))
        if any(s.request.mask is not None for s in through):
            used |= {MASK}
        self._prefill(parts, used, group)
        for source, target in filter(None, copies):
            self.pool.copy(source, target)
        for slot, size in group:
            slot.fed += size
        for slot, s, size in shares:
            s.fed, slot.siblings = size, []
        for s in through:
            s.scheduled = 1
            self.edits |= s.pages.edits(s.index)

    def _prefill(
        self, parts: abc.Sequence[Part], used: frozenset[str], group: abc.Sequence[tuple[Slot, int]]
    ) -> None:
        """Read; where a prompt's log probabilities are asked for, they are on their way."""
        wanted, owners, place = list[tuple[int, int]](), list[tuple[Slot, int]](), 0
        for slot, size in group:
            if unscored(slot.request, self.scores):
                after = slot.request.ids[slot.fed + 1 : slot.fed + size + 1]
                wanted += [(place + i, token) for i, token in enumerate(after)]
                owners.append((slot, len(after)))
            place += size
        found = self.steps.prefill(parts, used, wanted)
        each = zip(*(x.split([n for _, n in owners]) for x in found), strict=True)
        for (slot, _), mine in zip(owners, each, strict=False):
            slot.scored.append(mine)

    def _part(self, slot: Slot, size: int, ends: abc.Sequence[tuple[int, int]] = ()) -> Part:
        tokens, source = slot.text[slot.fed : slot.fed + size], slot.memory and slot.memory.size
        return Part(tokens, slot.fed, slot.pages, ends, slot.slot_ids[0], source or 0)

    def _share(self, slot: Slot, other: Slot, size: int) -> tuple[int, int] | None:
        """A sample's pages, up to so many tokens; what is to be copied, as both write to one that is not full."""
        other.pages = slot.pages.fork(size)
        return other.pages.own(-1) if size % self.pool.page else None

    def _launch(self) -> Inflight | None:
        """The next round."""
        if self.inflight is not None and self.inflight.plan.ahead:
            self._collect()
        live = self._live()
        wish = plan_round(self.steps, live, self._sizes(live, 0)) if live else PLAIN
        if wish.ahead:
            # The host is to know the texts.
            self._collect()
        live = self._live()
        fed, self.fed_early = self.fed_early, set()
        if not live:
            self._place()
            return None
        masked = [s for s in live if s.request.mask is not None]
        # What follows a first token is asked when the host has read it.
        self.paused = any(s.state is State.PREFILL for s in masked)
        # Only the choice waits for masks: what was chosen is fed while the host asks for the next.
        early = bool(masked) and self.steps.feeds_early(frozenset({MASK}))
        for plan in (wish, PLAIN):
            steps = self._steps([s.left for s in live], plan)
            if masked:
                steps = min(steps, 0 if self.paused else 1)
            most = steps * (1 + plan.ahead)
            lines, used = self._lines(live, most, early)
            self._place()
            sizes = *self._sizes(live, most), used | {MASK} if masked else used
            if not plan.ahead or self.steps.guesses.ready(*sizes, *plan[:2]):
                break
        if early and steps and not fed.issuperset(live):
            self.steps.feed(*sizes[:3])
        inflight = start_round(self.steps, steps, sizes, lines, plan)
        for slot in live:
            slot.ran += most
            # As many at least.
            slot.scheduled += min(steps, slot.left)
            slot.state = State.RUNNING
            if not slot.left:
                self._leave(slot)
        if early and any(s.left for s in live):
            self.steps.feed(*sizes[:3])
            self.fed_early = set(live)
        return inflight

    def _lines(
        self, live: abc.Sequence[Slot], most: int, early: bool
    ) -> tuple[list[tuple[Slot, int, int]], frozenset[str]]:
        """The lines of rows that say up to so many tokens, which have their pages; and what the choices depend on."""
        lines, used = [], frozenset[str]()
        for slot in live:
            took, said = min(most, slot.left), slot.said + slot.scheduled
            # What a round chooses last is fed by the next one; with masks at once, if more follows.
            last = 0 if early and took < slot.left else 1
            self._reserve(slot, len(slot.text) + slot.scheduled + took - last)
            used |= used_by(slot.settings, said, said + took - 1)
            lines.append((slot, 0 if slot.state is State.PREFILL else 1, 1 + took))
        return lines, used

    def _live(self) -> list[Slot]:
        """Rows that say something in the next round."""
        wanted = (s for s in self.slots if s.left or s.state is State.PREFILL)
        return [s for s in wanted if s.scheduled and not s.sequence.finish]

    def _sizes(self, live: abc.Sequence[Slot], most: int) -> tuple[int, int, int]:
        """Of the next round: rows, and bounds of their texts and of their sources."""
        # Rows that are through go on until the host has read it, and the kernels read as far as they are.
        on = (s for s in self.slots if s.scheduled and s.state is not State.DRAINING)
        longest = max(len(s.text) + s.ran + most + 1 for s in on)
        width = min(self.steps.rows, 1 << max(s.index for s in live).bit_length())
        return width, self.steps.bucket(longest), self._far(live)

    def _steps(self, lefts: list[int], plan: Plan = PLAIN) -> int:
        """Of a round: until an eighth of the rows are through where others wait, or `look`. Of one that guesses the
        passes, by how many tokens these bring."""
        lefts = sorted(left for left in lefts if left) or [0]
        few = max(1, len(lefts) // 8) if self.waiting else len(lefts)
        if plan.ahead:
            return min(plan.passes, math.ceil(lefts[few - 1] / plan.rate))
        return min(self.steps.look, lefts[few - 1])

    def _far(self, live: abc.Sequence[Slot]) -> int:
        """A bound of the longest source; 0 where there is none."""
        far = max(s.memory.size if s.memory else 0 for s in live)
        return far and max(SHORTEST, next_power_of_two(far))

    def _place(self) -> None:
        busy = {s.index for s in self.slots if s.scheduled and s.state is not State.DRAINING}
        self.steps.place(self.edits, [i for i in self.idle if i not in busy])
        self.edits, self.idle = {}, []

    def _collect(self) -> None:
        """Read the round before; what a row said after its end is dropped."""
        if self.inflight is None:
            return
        (log, logp, *tops), round_ = self.inflight.wait(), self.inflight
        self.inflight = None
        tokens, logprobs = log.T.tolist(), logp.T.tolist()
        for slot, first, last in round_.lines:
            row, index = slot.sequence, slot.index
            count, listed = row.request.settings.top_logprobs, list[Tops]()
            if count:
                pairs = (x[first:last, index, :count].tolist() for x in tops)
                listed = [list(zip(*pair, strict=True)) for pair in zip(*pairs, strict=True)]
            self._score(slot)
            for i, (token, logprob) in enumerate(
                zip(tokens[index][first:last], logprobs[index][first:last], strict=True)
            ):
                if slot.state is State.FINISHED or row.finish:
                    break
                if token == SKIPPED:
                    continue
                if token < 0:
                    row.finish, row.error = "error", BROKEN
                    if row.request.mask is not None:
                        row.error = f"{BROKEN}, or {NOTHING}"
                else:
                    self.events += row.append_token(token, logprob, listed[i] if count else [])
            if self.prefix and slot.state is not State.FINISHED and row.error is None:
                self._publish(slot, slot.pages)
        measure_round(self.steps, round_, tokens, self.slots)
