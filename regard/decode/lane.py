"""What requests have in common while they run, whichever runner computes their steps: answers in the making, rows in
slots, prompts that are read in chunks by rank and begin with pages that others left, samples that share a prompt, pages
left to later ones."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
from torch import Tensor

from regard.cache import BlockTable, Cache, PagePool, Pool
from regard.cache.base import State as Recurrent
from regard.decode.settings import Event, Request, Result, Tops
from regard.decode.speculate import Index

BROKEN = "the model gave a logit that is not a number"
NOTHING = "its mask allows no token that its other settings leave"
# Tokens of a prompt whose logits are there at once, where their log probabilities are asked for; chosen for speed.
SLICE = 64


@dataclass(eq=False)
class Row:
    """One answer in the making."""

    request: Request
    sample: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # Where the best tokens of each choice are asked for.
    tops: list[Tops] = field(default_factory=list)
    finish: str = ""
    error: str | None = None
    window: int | None = None  # the model's context
    border: int | None = None  # of longer texts every token is turned otherwise (LongRoPE)
    guess: list[int] = field(default_factory=list)
    guessed: int = -1  # tokens said when `guess` was made
    index: Index | None = None  # of the text so far, where lookup is asked for
    keys: list[bytes] = field(default_factory=list)  # of the full pages that were published

    def guesses(self) -> list[int]:
        """Tokens that may come next, found earlier in the text."""
        room = self.room(self.request.settings.lookup)
        if not room:
            return []
        if self.index is None:
            self.index = Index(self.request.ids)
        self.index.extend(self.ids[len(self.index.text) - len(self.request.ids) :])
        return self.index.after(room)

    def room(self, wish: int) -> int:
        """How many tokens can be guessed: as many as wished, but one must stay to be chosen, and none may lie outside
        the context."""
        left = self.request.settings.max_new_tokens - len(self.ids) - 1
        if self.window is not None:
            left = min(left, self.window - self.size)
        if self.border is not None and not self.far:
            left = min(left, self.border - self.size)
        return max(0, min(wish, left))

    @property
    def size(self) -> int:
        """Tokens of the text so far, the prompt included."""
        return len(self.request.ids) + len(self.ids)

    @property
    def reach(self) -> int:
        """The length that its text is read for. A search cannot be read again when it has grown, so it is read for the
        longest that it may come to."""
        s = self.request.settings
        return self.size + (s.max_new_tokens if s.beams > 1 else 0)

    @property
    def far(self) -> bool:
        return self.border is not None and self.reach > self.border

    @property
    def salt(self) -> str:
        """What the keys of its pages begin with: those of a longer text are others."""
        return self.request.salt + "\0far" * self.far

    @property
    def key(self) -> int:
        """What its random numbers depend on, besides the seed and the position."""
        request = self.request
        number = request.number if request.key is None else request.key
        return number * 1024 + self.sample

    def append_token(self, token: int, logprob: float, tops: Tops) -> list[Event]:
        """One token more, and whether the answer ends with it: an end token is no event."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        settings, stop = self.request.settings, self.request.stop
        tops = tops[: settings.top_logprobs]
        # Kept where asked for alone: the garbage collector goes through every list that there is.
        if tops:
            self.tops.append(tops)
        if token in settings.eos:
            self.finish = "eos"
            return []
        # `stop` is the user's code.
        try:
            if stop is not None and stop(self.sample, self.ids):
                self.finish = "stop"
            elif len(self.ids) >= settings.max_new_tokens:
                self.finish = "length"
        except Exception as error:
            self.finish, self.error = "error", f"its stop raised {type(error).__name__}: {error}"
        return [Event(self.request.number, self.sample, token, logprob, tops)]

    def allowed(self, words: Any, vocab: int) -> None:
        """Write what its mask allows next to words of 32 bits; where that is nothing, the answer ends."""
        assert self.request.mask is not None
        try:
            pack(self.request.mask(self.sample, list(self.ids)), words, vocab)
        except Exception as error:
            self.finish, self.error = "error", f"its mask raised {type(error).__name__}: {error}"
            return
        if not words.any():
            self.finish = "stop"

    def rollback(self, said: int) -> None:
        """As it was when it had said so many tokens."""
        del self.ids[said:], self.logprobs[said:], self.tops[said:]
        self.finish, self.error, self.index, self.keys = "", None, None, []
        self.guess, self.guessed = [], -1

    def result(self) -> Result:
        n = len(self.ids) - (self.finish == "eos")
        said = (self.ids[:n], self.logprobs[:n], sum(self.logprobs))
        return Result(*said, self.finish, error=self.error, top_logprobs=self.tops[:n])


def pack(mask: Any, words: Any, vocab: int) -> None:
    """Write a mask over the vocabulary to words of 32 bits, of numpy; what lies past its end is 0."""
    given = np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask).ravel()
    if given.dtype == bool and given.size <= vocab:
        given = np.packbits(given, bitorder="little")
        words = words.view(np.uint8)
    elif given.dtype != np.int32 or given.size > len(words):
        raise ValueError(
            f"it gave {given.dtype} of size {given.size}; give a boolean for each of {vocab} tokens, or "
            f"{len(words)} words of int32"
        )
    words[: given.size], words[given.size :] = given, 0
    if vocab % 32 and given.dtype == np.int32:
        words[-1] &= (1 << vocab % 32) - 1


def page_keys(
    text: list[int], page: int, salt: str = "", known: Sequence[bytes] = ()
) -> list[bytes]:
    """A chain of SHA-256, one for each full page of a text: equal keys mean equal tokens from the start. `known` are
    the first ones."""
    keys = list(known)
    key = keys[-1] if keys else hashlib.sha256(salt.encode()).digest()
    for end in range((len(keys) + 1) * page, len(text) + 1, page):
        key = hashlib.sha256(key + array("q", text[end - page : end]).tobytes()).digest()
        keys.append(key)
    return keys


# The log probabilities of a prompt's tokens, and the best ones at each place.
Scores = tuple[list[float | None], list[Tops]]


def unscored(request: Request, done: dict[int, Scores]) -> bool:
    """Whether a prompt must be read whole, as its log probabilities are asked for and not known."""
    return request.settings.prompt_logprobs and request.number not in done


NO_PAGES = PagePool(0, 1)  # of slots whose tokens lie in a cache


class State(Enum):
    """How far a row in a lane has come. Requests in the queue have no rows in lanes."""

    # Its prompt is read, or its first token is not in a round that the host will read.
    PREFILL = auto()
    RUNNING = auto()
    # The device was asked for all its tokens, and another may have its place.
    DRAINING = auto()
    # It has left its lane.
    FINISHED = auto()


@dataclass(eq=False)
class Slot:
    """A row and its place."""

    row: Row
    text: list[int]  # what is read before the first choice
    index: int = 0  # of its place, where places are fixed
    keys: list[bytes] = field(default_factory=list)  # of its full pages
    pages: BlockTable = field(default_factory=lambda: BlockTable(NO_PAGES))
    fed: int = 0  # tokens of the text
    asked: int = 0  # tokens the device was asked to choose
    ran: int = 0  # steps of the rounds since its prompt was read
    state: State = State.PREFILL
    memory: Any = None  # what an encoder made of its source, in a graph
    # Samples that begin where the prompt is through.
    siblings: list[Slot] = field(default_factory=list)
    # Log probabilities of its prompt that are on their way.
    scored: list[tuple[Tensor, ...]] = field(default_factory=list)
    # What a plain runner has of a text that is begun; and of a model with states: the pages after which they are
    # wanted, and what was found.
    cache: Cache | None = None
    marks: list[int] = field(default_factory=list)
    states: dict[bytes, list[Recurrent]] = field(default_factory=dict)

    @property
    def times(self) -> int:
        """Rows of a step that it has: a request with all its beams is one slot."""
        return self.row.request.settings.beams

    @property
    def over(self) -> bool:
        return bool(self.row.finish)

    def going(self) -> list[Slot]:
        """Samples that begin where its prompt is through."""
        return [s for s in self.siblings if s.state is not State.FINISHED]

    @property
    def slot_ids(self) -> list[int]:
        """The rows of a step that are its own."""
        return [self.index]

    @property
    def unread(self) -> bool:
        """Whether its source is not in its pages."""
        return self.memory is not None and not self.memory.ready

    @property
    def left(self) -> int:
        """Tokens the device has not been asked for."""
        return self.row.request.settings.max_new_tokens - self.said - self.asked

    def __post_init__(self) -> None:
        # Tokens that the row had said when it came here.
        self.said = len(self.text) - len(self.row.request.ids)
        self.far, self.salt = self.row.far, self.row.salt


class Lane:
    """Rows that advance together. A runner's lane defines `ask` and `step`, which leave what rows said in `events`,
    `_read` for prompts, and what a slot is made with and leaves behind."""

    def __init__(self, pool: Any, prefix: bool, chunk: int, scores: dict[int, Scores] | None):
        self.pool: Pool = pool
        self.prefix, self.chunk = prefix, chunk
        self.padded = chunk  # places that prompts of different lengths may be laid out in
        # Log probabilities of prompts that are through.
        self.scores = {} if scores is None else scores
        self.slots: list[Slot] = []  # in the order in which they came
        self.events: list[Event] = []
        self.waiting = False  # whether others wait for a slot
        self.paused = False  # whether the last round had no step, for the sake of a mask

    # --- membership ---

    @property
    def rows(self) -> list[Row]:
        return [slot.row for slot in self.slots]

    def requests(self) -> list[Request]:
        """Each request once, in the order of its first row."""
        return list({id(row.request): row.request for row in self.rows}.values())

    def _slot(self, row: Row) -> Slot:
        return Slot(row, row.request.ids + row.ids)

    def admit(self, rows: Sequence[Row], keys: Sequence[bytes] = ()) -> None:
        """Rows of one request, each into a slot. Samples of a prompt that nobody has read yet read it once. `keys`: of
        the pages that their texts have in common, if they are known."""
        first: Slot | None = None
        for row in rows:
            slot, row.keys = self._slot(row), []
            self.slots.append(slot)
            same = (bool(row.ids), row.far)
            if first is not None and same == (bool(first.row.ids), first.far):
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
        row = slot.row
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

    def ask(self) -> None:
        """What comes before a step, a chunk of prompts; rows may end with it."""
        self._feed()

    def step(self) -> None:
        """The next token of every row that writes."""

    # --- prompts ---

    def unread(self) -> list[Slot]:
        """Slots whose texts are to be read; of samples that share one, the one that reads it. By rank."""
        waiting = [slot for slot in self.slots if not slot.asked and slot.fed < len(slot.text)]
        readers = {id(s) for slot in waiting for s in slot.siblings}
        mine = [slot for slot in waiting if id(slot) not in readers]
        return sorted(mine, key=lambda slot: slot.row.request.rank)

    def owed(self, source: Callable[[Request], int]) -> int:
        """Pages that texts will take when they are read, and their sources, of as many pages as `source` says."""
        if self.pool is None:
            return 0
        waiting = self.unread()
        new = [s for s in waiting if s.cache is None and (s.memory is None or s.unread)]
        texts = sum(-(-(len(s.text) - s.fed) // self.pool.page) for s in waiting)
        return texts + sum(source(s.row.request) for s in new)

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
            paused = self.paused and slot.row.request.mask is not None
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
        parting = len(slot.text) - len(slot.row.ids) - slot.fed if slot.siblings else 0
        return parting if 0 < parting < size else size

    def _reserve(self, slot: Slot, tokens: int) -> None:
        """Pages for so many tokens of a slot, where they must be there before."""

    def _read(self, group: list[tuple[Slot, int]]) -> None:
        """So many tokens of each text; those that are through begin to write."""

    def _score(self, slot: Slot) -> None:
        """Log probabilities of a prompt that have arrived; the one of its samples that has read it knows them."""
        request = slot.row.request
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
        row, page = slot.row, self.pool.page
        full = (row.size - 1) // page
        if full > len(row.keys):
            # From the last page that is known on: a text may be long.
            known, ids = max(0, len(row.keys) - 1), row.request.ids
            text = ids[known * page :] + row.ids[max(0, known * page - len(ids)) :]
            text = text[: (full - known) * page]
            row.keys[known:] = page_keys(text, page, slot.salt, row.keys[known:])
            pages.publish(row.keys, known)
