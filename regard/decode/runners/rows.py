"""The runners torch and native: the model's own forward over a cache, in rows or pages, a row for each answer.

Prompts are fed in chunks, each into a cache of its own, which joins that of the rows that write. With `lookup` or a
draft model a row also guesses tokens. The guesses are checked in the same forward pass, by choosing at each place as
always: a guess that equals the choice costs nothing, the first that does not ends the run. So speculation changes no
token, greedy or drawn.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any, TypedDict

import torch
from torch import Tensor

from regard.cache import Cache, CacheSpec, Contiguous, OutOfPages, Paged, Pool
from regard.decode.batch import Batch, Reading
from regard.decode.beam import Group, Search, Shape
from regard.decode.sampler import Sampler, some
from regard.decode.sampling import scored
from regard.decode.sequence import SLICE, Sequence, Slot, State, unscored
from regard.decode.settings import Result
from regard.decode.sources import source_size, sources
from regard.decode.speculate import OwnGuesses, guesser, padded
from regard.fast.cpu import Prepared
from regard.models.base import Model, last_real

ROOM = 128  # tokens a row has room for at first, chosen for speed; it doubles as texts grow


class Where(TypedDict):
    device: torch.device
    dtype: torch.dtype


@dataclass
class Forward:
    """A model, and how it is called."""

    model: Model
    specs: list[CacheSpec]
    where: Where  # its caches are
    backend: str = "sdpa"
    pool: Pool | None = None
    draft: Model | str | None = None  # a model that guesses ahead; a word: its own layers do
    longest: int = 0  # tokens that a text past the context goes on with


class PlainBatch(Batch):
    """Rows of any settings, samples and beams, in one step."""

    def __init__(self, forward: Forward, reading: Reading):
        super().__init__(forward.pool, reading)
        self.model, self.specs, self.where = forward.model, forward.specs, forward.where
        self.backend = forward.backend
        self.draft = None if forward.draft is None else guesser(forward.model, forward.draft)
        self.live: list[Slot] = []  # whose rows the cache holds, in this order
        self.samples: list[Slot] = []  # those of them that are not beams
        self.single: list[int] = []  # their rows
        self.cache: Any = None
        self.searches: dict[Shape, Search] = {}
        self.sampler = Sampler([])

    def caches(self) -> list[Cache]:
        """Of the rows that write, and of texts that are begun."""
        mine = [self.cache] if self.live else []
        return mine + [slot.cache for slot in self.slots if slot.cache is not None]

    def _slot(self, row: Sequence) -> Slot:
        kind = Group if row.request.settings.beams > 1 else Slot
        return kind(row, row.request.ids + row.ids)

    def _seat(self, live: list[Slot]) -> None:
        self.live, self.samples = live, [slot for slot in live if slot.times == 1]
        self.sampler = Sampler([slot.sequence for slot in self.samples])
        self.single = places(live, self.samples)

    def results(self, i: int, why: str = "") -> list[Result]:
        group = self.slots[i]
        assert isinstance(group, Group)
        return self.searches[group.shape].results(group, why) if group.scheduled else []

    # --- prompts ---

    def _cache(self, slots: list[Slot]) -> Cache:
        if self.pool is not None:
            return Paged(self.specs, len(slots), pool=self.pool, **self.where)
        size = max(len(slot.text) + slot.left for slot in slots)
        return Contiguous(self.specs, len(slots), capacity=min(size, ROOM), **self.where)

    def _adopt(self, slot: Slot) -> None:
        cache, keys = self._cache([slot]), self._adoptable(slot)
        assert isinstance(cache, Paged)
        slot.fed = cache.adopt(0, keys)
        slot.sequence.keys = keys[: slot.fed // self.pool.page]
        if slot.fed:
            slot.cache = cache
        if any(spec.state for spec in self.specs):
            # Where another text parted from this one, and before its end.
            slot.marks = sorted({cache.known(keys), len(keys)} - {0})

    def _size(self, slot: Slot, room: int) -> int:
        """A call ends where texts part, so that the states there are known."""
        size = super()._size(slot, room)
        if len(slot.marks) > 1:
            parting = slot.marks[0] * self.pool.page - slot.fed
            return parting if 0 < parting < size else size
        return size

    def _source(self, slot: Slot) -> int:
        return 0 if slot.cache is not None else source_size(self.model, slot.request)

    def _read(self, group: list[tuple[Slot, int]]) -> None:
        begun = [each for each in group if each[0].cache is not None]
        for part in (begun, [each for each in group if each not in begun]):
            if part:
                self._pass(part)

    def _pass(self, group: list[tuple[Slot, int]]) -> None:
        """Texts that are all begun, or none of them."""
        slots = [slot for slot, _ in group]
        begun = [slot.cache for slot in slots if slot.cache is not None]
        cache = reduce(Cache.join, begun) if begun else self._cache(slots)
        ids, lengths = padded([s.text[s.fed : s.fed + n] for s, n in group], self.where["device"])
        given: dict[str, Any] = {"cache": cache, "backend": self.backend}
        set_reach(cache, [slot.sequence for slot in slots])
        if cache.cross is None:
            given |= sources([slot.request for slot in slots], self.where["device"])
        wanted = [unscored(slot.request, self.scores) for slot in slots]
        try:
            if any(wanted) or any(map(self._keeps, slots)):
                hidden = self.model.hidden(ids, lengths, **given)
                logits = self.model.logits(last_real(hidden, lengths))
            else:
                logits = self.model.next_logits(ids, lengths, **given)
        except OutOfPages:
            self._part(slots, cache, range(len(slots)) if begun else ())
            raise
        for i, (slot, size) in enumerate(group):
            if wanted[i]:
                self._look_up(slot, hidden[i], size)
            if self._keeps(slot):
                slot.trail.append(hidden[i, :size])
            slot.fed += size
            self._mark(slot, cache, i, size)
            if slot.fed == len(slot.text) - len(slot.sequence.ids) < len(slot.text):
                for other in slot.going():
                    other.cache, other.fed = cache.fork(torch.tensor([i])), slot.fed
                    other.trail = list(slot.trail)
                slot.siblings = []
        through = [i for i, slot in enumerate(slots) if slot.fed == len(slot.text)]
        if len(through) < len(slots):
            if len(slots) == 1:
                slots[0].cache = cache
                return
            kept = cache.fork(torch.tensor(through, dtype=torch.long, device=cache.device))
            self._part(slots, cache, [i for i in range(len(slots)) if i not in through])
            if not through:
                return
            cache = kept
        writers = [[slots[i], *slots[i].going()] for i in through]
        for reader, *others in writers:
            for other in others:
                other.trail = list(reader.trail)
        counts = [sum(s.times for s in each) for each in writers]
        rows = [i for i, n in enumerate(counts) for _ in range(n)]
        if len(set(counts)) > 1:
            cache = cache.take(torch.tensor(rows, device=cache.device))
        elif counts[0] > 1:
            cache = cache.spread(counts[0], self.model.shares_source)
        self._begin([s for each in writers for s in each], cache, logits[through][rows])

    def _keeps(self, slot: Slot) -> bool:
        """Whether the states of its text are kept, for layers that guess."""
        return isinstance(self.draft, OwnGuesses) and slot.settings.draft > 0

    def _read_again(self) -> None:
        """Texts that have come past the border of LongRoPE: of a longer text every token is turned otherwise."""
        index = [
            i for i, s in enumerate(self.slots) if s.scheduled and s.sequence.far and not s.far
        ]
        rows = [self.slots[i].sequence for i in index]
        if rows:
            self.drop(index)
        for row in rows:
            self.admit([row])

    def _part(self, slots: list[Slot], cache: Cache, rows: abc.Sequence[int]) -> None:
        """A cache is given up; some of its rows become caches of their slots."""
        for i in rows:
            slots[i].cache = cache.fork(torch.tensor([i], device=cache.device))
        cache.release()

    def _look_up(self, slot: Slot, hidden: Tensor, size: int) -> None:
        """The log probabilities of the tokens that follow the next `size`, from their states (t m)."""
        after = slot.request.ids[slot.fed + 1 : slot.fed + size + 1]
        tokens = torch.tensor(after, dtype=torch.long, device=hidden.device)
        for at in range(0, len(after), SLICE):
            logits = self.model.logits(hidden[None, at : at + SLICE][:, : len(after) - at])[0]
            slot.scored.append(scored(logits, tokens[at : at + SLICE]))

    def _mark(self, slot: Slot, cache: Cache, row: int, size: int) -> None:
        """Take the states after the marked pages that the last call filled."""
        for mark in slot.marks:
            assert isinstance(cache, Paged)
            if slot.fed - size < mark * cache.page <= slot.fed:
                states = cache.state_after(row, mark * cache.page)
                if states is not None:
                    slot.states[slot.keys[mark - 1]] = states

    def _begin(self, slots: list[Slot], cache: Cache, logits: Tensor) -> None:
        """Slots whose prompts are through begin to write, by logits (rows V)."""
        shapes = dict.fromkeys(slot.shape for slot in slots if isinstance(slot, Group))
        for shape in shapes:
            search = self.searches.setdefault(shape, Search(shape))
            new = [s for s in slots if isinstance(s, Group) and s.shape == shape]
            search.begin(new, some(logits, places(slots, new)))
        self._join(slots, cache)
        fresh = [slot for slot in slots if slot.times == 1]
        many = len(self.samples)
        self.events += self.sampler.choose(
            some(logits, places(slots, fresh)), list(range(many - len(fresh), many))
        )
        # Leave the full pages of prompts to later ones, and the states after those that were marked.
        for slot in (s for s in slots if self.prefix and s.sequence.error is None):
            self.cache.publish(places(self.live, [slot])[0], slot.keys)
            for key, states in slot.states.items():
                self.pool.remember(key, states)
            slot.sequence.keys, slot.states = list(slot.keys), {}

    def _join(self, slots: list[Slot], cache: Cache) -> None:
        for slot in slots:
            self._score(slot)
            slot.fed, slot.scheduled = len(slot.text), 1
            slot.state, slot.cache = State.RUNNING, None
        self.cache = self.cache.join(cache) if self.live else cache
        self._seat(self.live + slots)
        if self.draft is not None:
            self.draft.join(sum(slot.times == 1 for slot in slots))

    def drop(self, index: list[int]) -> None:
        super().drop(index)
        live = [slot for slot in self.live if slot.state is not State.FINISHED]
        if len(live) == len(self.live):
            return
        rows = torch.tensor(places(self.live, live), dtype=torch.long, device=self.cache.device)
        self.cache = self.cache.take(rows)
        if self.draft is not None:
            every = enumerate(self.samples)
            self.draft.keep([i for i, slot in every if slot.state is not State.FINISHED])
        for search in self.searches.values():
            search.keep()
        self.searches = {shape: search for shape, search in self.searches.items() if search.groups}
        self._seat(live)

    def _release(self, slot: Slot) -> None:
        if slot.cache is not None:
            slot.cache.release()
            slot.cache = None

    def _leave_answers(self) -> None:
        """Leave the full pages of answers to later prompts. States are large: of an answer the last are kept."""
        page = self.pool.page
        for i, slot in zip(self.single, self.samples, strict=True):
            row, known = slot.sequence, len(slot.sequence.keys)
            if row.error is not None or row.size - 1 < (known + 1) * page:
                continue
            self._publish(slot, self.cache.tables[i])
            states = self.cache.state_after(i, len(row.keys) * page)
            if states is not None:
                if known > len(row.request.ids) // page:
                    self.pool.states.pop(row.keys[known - 1], None)
                self.pool.remember(row.keys[-1], states)

    # --- one step ---

    def step(self) -> None:
        """Feed the last token (and guesses) of every row, choose, and forget the guesses that failed."""
        self._read_again()
        if not self.live:
            return
        self._speculate()
        samples, single, fed = self.samples, self.single, [[0]] * self.cache.batch
        for i, slot in zip(single, samples, strict=True):
            fed[i] = [(slot.sequence.ids or slot.request.ids)[-1], *slot.sequence.guess]
        beams = {search: places(self.live, search.groups) for search in self.searches.values()}
        for search, rows in beams.items():
            for i, token in zip(rows, search.last().tolist(), strict=True):
                fed[i] = [token]
        given: dict[str, Any] = {"cache": self.cache, "backend": self.backend}
        set_reach(self.cache, [slot.sequence for slot in self.live for _ in range(slot.times)])
        (ids, lengths), guesses = padded(fed, self.cache.device), max(map(len, fed)) > 1
        only = None if samples or len(beams) > 1 else next(iter(beams))
        banned = None if only is None else only.banned(only.groups)
        if only is not None and banned is not None and isinstance(self.model, Prepared):
            found = self.model.next_best(ids, only.shape.candidates, *banned, **given)
            self._trade({only: (beams[only], found)})
            return
        kept = [(i, s) for i, s in zip(single, samples, strict=True) if self._keeps(s)]
        logits, hidden = read(self.model, ids, lengths if guesses else None, bool(kept), given)
        if guesses:
            wrong = torch.zeros_like(lengths)
            wrong[single], events = self.sampler.verify(some(logits, single), lengths[single])
            self.events += events
            if bool((wrong > 0).any()):
                self.cache.rewind(wrong)
            logits, lengths = logits[:, 0], lengths - wrong
        else:
            self.events += self.sampler.choose(some(logits, single))
        for (i, slot), size in zip(kept, lengths[[i for i, _ in kept]].tolist(), strict=True):
            slot.trail.append(hidden[i, :size])
        if self.prefix:
            self._leave_answers()
        self._trade({s: (rows, s.best(s.groups, some(logits, rows))) for s, rows in beams.items()})

    def _trade(self, found: dict[Search, tuple[list[int], Any]]) -> None:
        """Searches with their rows, by what `Search.best` gave: beams go on from others."""
        every = torch.arange(self.cache.batch, device=self.cache.device)
        order = every.clone()
        for search, (rows, best) in found.items():
            first = torch.tensor(rows[:: search.shape.beams], device=order.device)[:, None]
            order[rows] = (first + search.step(*best)).view(-1)
        if not torch.equal(order, every):
            common = min(len(g.text) for search in found for g in search.groups)
            self.cache = self.cache.take(order, common)

    def _speculate(self) -> None:
        """Guess the next tokens of every row: looked up in its text, or by the draft model."""
        rows = [slot.sequence for slot in self.samples]
        if self.draft is None and not any(row.request.settings.lookup for row in rows):
            return
        if all(row.guessed == len(row.ids) for row in rows):
            return  # the step was tried before and found no page
        for row in rows:
            row.guess, row.guessed = row.guesses(), len(row.ids)
        if self.draft is not None:
            texts = [row.request.ids + row.ids for row in rows]
            trails = [slot.trail for slot in self.samples]
            room = [0 if row.guess else row.room(row.request.settings.draft) for row in rows]
            for row, guess in zip(rows, self.draft.guess(texts, room, trails), strict=True):
                row.guess = row.guess or guess


def read(
    model: Model, ids: Tensor, lengths: Tensor | None, keep: bool, given: dict[str, Any]
) -> tuple[Tensor, Any]:
    """Logits at every place, of texts without guesses at the last alone; and the states, if they are kept."""
    if keep:
        hidden = model.hidden(ids, lengths, **given)
        return model.logits(hidden[:, -1] if lengths is None else hidden), hidden
    if lengths is None:
        return model.next_logits(ids, **given), None
    return model(ids, lengths, **given), None


def set_reach(cache: Cache, rows: abc.Sequence[Sequence]) -> None:
    """The length of the texts that the next call is about, where LongRoPE chooses its angles by it."""
    if any(row.border is not None for row in rows):
        cache.reach = torch.tensor([row.reach for row in rows], device=cache.device)


def places(slots: abc.Sequence[Slot], of: abc.Sequence[Slot]) -> list[int]:
    """Which rows some of the slots have, where all of them have theirs one after the other."""
    ends = accumulate(slot.times for slot in slots)
    rows = {id(s): range(end - s.times, end) for s, end in zip(slots, ends, strict=True)}
    return [row for slot in of for row in rows[id(slot)]]
