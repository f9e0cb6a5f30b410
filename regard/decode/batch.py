"""What requests have in common while they run, whichever runner computes their steps: rows in slots, prompts that are
read in chunks by rank and begin with pages that others left, samples that share a prompt, pages left to later ones."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from regard.cache import BlockTable, PagePool, Pool
from regard.decode.sequence import Scores, Sequence, Slot, State, page_keys, unscored
from regard.decode.settings import Event, Request, Result


@dataclass
class Reading:
    """How prompts are read."""

    prefix: bool = False  # whether they begin with pages that others left
    chunk: int = 512  # tokens of a step
    # Log probabilities of those that are through.
    scores: dict[int, Scores] = field(default_factory=dict)


class Batch:
    """Rows that advance together. A runner's batch defines `ask` and `step`, which leave what rows said in `events`,
    `_read` for prompts, and what a slot is made with and leaves behind."""

    def __init__(self, pool: PagePool | None, reading: Reading):
        # Where nothing lies in pages, nobody asks for it.
        self.pool = cast(Pool, pool)
        self.prefix, self.chunk, self.scores = reading.prefix, reading.chunk, reading.scores
        self.padded = reading.chunk  # places that prompts of different lengths may be laid out in
        self.slots: list[Slot] = []  # in the order in which they came
        self.events: list[Event] = []
        self.waiting = False  # whether others wait for a slot
        self.paused = False  # whether the last round had no step, for the sake of a mask

    # --- membership ---

    @property
    def rows(self) -> list[Sequence]:
        return [slot.sequence for slot in self.slots]

    def requests(self) -> list[Request]:
        """Each request once, in the order of its first row."""
        return list({id(row.request): row.request for row in self.rows}.values())

    def outgrown(self, longest: float) -> list[Request]:
        """Each request of which a text is longer than that."""
        texts = ((s.request, len(s.request.ids) + len(s.sequence.ids)) for s in self.slots)
        return list(dict.fromkeys(request for request, size in texts if size > longest))

    def _slot(self, row: Sequence) -> Slot:
        return Slot(row, row.request.ids + row.ids)

    def admit(self, rows: abc.Sequence[Sequence], keys: abc.Sequence[bytes] = ()) -> None:
        """Rows of one request, each into a slot. Samples of a prompt that nobody has read yet read it once. `keys`: of
        the pages that their texts have in common, if they are known."""
        first: Slot | None = None
        for row in rows:
            slot, row.keys = self._slot(row), []
            self.slots.append(slot)
            same = (bool(row.ids), row.far)
            if first is not None and same == (bool(first.sequence.ids), first.far):
                first.siblings.append(slot)
                continue
            first = first or slot
            if self.prefix:
                page = self.pool.page
                known = keys[: len(slot.text) // page] if row.far == rows[0].far else ()
                slot.keys = page_keys(slot.text, page, slot.salt, known)
                if not unscored(row.request, self.scores):
                    self._adopt(slot)
            # When it is put back, it finds its own.
            if row.request.cached is None:
                row.request.cached = slot.fed

    def _adopt(self, slot: Slot) -> None:
        """Begin with pages that others left."""

    def _adoptable(self, slot: Slot) -> list[bytes]:
        """Keys of the pages that it may begin with. The last token of a text is fed, for its logits; and samples must
        come by the end of their prompt, where they part."""
        row = slot.sequence
        size = row.size if row.request.settings.samples == 1 else len(row.request.ids)
        return slot.keys[: (size - 1) // self.pool.page]

    def drop(self, index: list[int]) -> None:
        """These rows are over."""
        for slot in [self.slots[i] for i in index]:
            self.slots.remove(slot)
            self._release(slot)
            slot.state = State.FINISHED
            # Another sample reads the prompt instead.
            if slot.fed < len(slot.text) and slot.siblings:
                heir, *rest = slot.going() or [slot]
                heir.siblings = rest

    def _release(self, slot: Slot) -> None:
        """Free what a slot holds."""

    def over(self) -> list[int]:
        """The places of rows that are done."""
        return [i for i, slot in enumerate(self.slots) if slot.over]

    def results(self, i: int, why: str = "") -> list[Result]:
        """Of beams: the n best finished texts of request i; if it was stopped (`why`), running ones too."""
        raise NotImplementedError

    def prepare(self) -> None:
        """What comes before a step, a chunk of prompts; rows may end with it."""
        self._feed()

    def step(self) -> None:
        """The next token of every row that writes."""

    # --- prompts ---

    def unread(self) -> list[Slot]:
        """Slots whose texts are to be read; of samples that share one, the one that reads it. By rank."""
        waiting = [slot for slot in self.slots if not slot.scheduled and slot.fed < len(slot.text)]
        readers = {id(s) for slot in waiting for s in slot.siblings}
        mine = [slot for slot in waiting if id(slot) not in readers]
        return sorted(mine, key=lambda slot: slot.request.rank)

    def owed(self, source: Callable[[Request], int]) -> int:
        """Pages that texts will take when they are read, and their sources, of as many pages as `source` says."""
        if self.pool is None:
            return 0
        waiting = self.unread()
        new = [s for s in waiting if s.cache is None and (s.memory is None or s.unread)]
        texts = sum(-(-(len(s.text) - s.fed) // self.pool.page) for s in waiting)
        return texts + sum(source(s.request) for s in new)

    def _feed(self) -> None:
        """Up to a chunk of tokens of the prompts that are not through, by the rank of their requests. Where that is not
        all, the first has half of it, and the rest goes to those that are through the soonest: short ones do not wait
        for long ones."""
        room, longest = self.chunk, 0
        group: list[tuple[Slot, int]] = []
        waiting, most = self.unread(), room
        if len(waiting) > 1 and sum(len(slot.text) - slot.fed for slot in waiting) > room:
            waiting[1:] = sorted(waiting[1:], key=lambda slot: len(slot.text) - slot.fed)
            most = -(-room // 2)
        for slot in waiting:
            size = self._size(slot, most if slot is waiting[0] else room)
            # The others go on in between, however many prompts with masks come.
            paused = self.paused and slot.request.mask is not None
            if not size or slot.unread or paused:
                continue
            source = self._source(slot)
            if group and size + source > room:
                continue
            self._reserve(slot, slot.fed + size)
            if group and max(longest, size + source) * (len(group) + 1) > self.padded:
                self._read(group)
                group, longest = [], 0
            group.append((slot, size))
            longest, room = max(longest, size + source), max(0, room - size - source)
        if group:
            self._read(group)

    def _source(self, slot: Slot) -> int:
        """Tokens of a source that are read with the first of a text."""
        return 0

    def _size(self, slot: Slot, room: int) -> int:
        """Tokens of a text that are read now; of samples that go on after they were put back, to where they part."""
        size = min(room, len(slot.text) - slot.fed)
        parting = len(slot.text) - len(slot.sequence.ids) - slot.fed if slot.siblings else 0
        return parting if 0 < parting < size else size

    def _reserve(self, slot: Slot, tokens: int) -> None:
        """Pages for so many tokens of a slot in all, where they must be there before."""

    def _read(self, group: list[tuple[Slot, int]]) -> None:
        """So many tokens of each text; those that are through begin to write."""

    def _score(self, slot: Slot) -> None:
        """Log probabilities of a prompt that have arrived; the one of its samples that has read it knows them."""
        request = slot.request
        if slot.state is not State.FINISHED and unscored(request, self.scores):
            scores: Scores = [None], [[]]
            (logprobs, tops), count = scores, request.settings.top_logprobs
            for some, ids, best in slot.scored:  # (n), (n k), (n k)
                logprobs += some.tolist()
                pairs = zip(ids[:, :count].tolist(), best[:, :count].tolist(), strict=True)
                tops += [list(zip(*pair, strict=True)) for pair in pairs]
            if len(logprobs) == len(request.ids):
                self.scores[request.number] = scores

    # --- the prefix cache ---

    def _publish(self, slot: Slot, pages: BlockTable) -> None:
        """Leave the pages that a text has filled to later prompts. The last token has been said, not fed."""
        row, page = slot.sequence, self.pool.page
        full = (row.size - 1) // page
        if full > len(row.keys):
            # From the last page that is known on: a text may be long.
            known, ids = max(0, len(row.keys) - 1), row.request.ids
            text = ids[known * page :] + row.ids[max(0, known * page - len(ids)) :]
            text = text[: (full - known) * page]
            row.keys[known:] = page_keys(text, page, slot.salt, row.keys[known:])
            pages.publish(row.keys, known)
