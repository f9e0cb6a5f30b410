"""Requests on their way into a cache: prompts are fed in chunks, and begin with pages that others left."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from regard.cache import FIRST, Cache, Paged
from regard.cache.base import State
from regard.decode.columns import scored
from regard.decode.rows import Row, page_keys
from regard.decode.settings import Request, Tops
from regard.models.base import last_real

SLICE = 64  # tokens of a prompt whose logits are there at once, where their log probabilities are asked for


class Scores:
    """The log probabilities of a prompt's tokens, and the best ones at each place."""

    def __init__(self) -> None:
        self.logprobs: list[float | None] = [None]
        self.tops: list[Tops] = [[]]

    def add(self, count: int, logprobs: Tensor, ids: Tensor, tops: Tensor) -> None:
        """Those of some tokens more (n), with the `count` best (n k)."""
        self.logprobs += logprobs.tolist()
        for each in zip(ids[:, :count].tolist(), tops[:, :count].tolist(), strict=True):
            self.tops.append(list(zip(*each, strict=True)))


def unscored(request: Request, done: dict[int, Scores]) -> bool:
    """Whether a prompt must be read whole, as its log probabilities are asked for and not known."""
    return request.settings.prompt_logprobs and request.number not in done


class Prefill:
    """Requests that will have `times` rows each, `chunk` tokens a step.

    `resumed` are the rows of preempted requests: what they had said is fed after the prompt. One row's is simply more
    prompt; several rows (their request is alone here) share the prompt and part after it."""

    def __init__(
        self,
        requests: list[Request],
        resumed: dict[int, list[Row]],
        cache: Cache,
        scores: dict[int, Scores] | None = None,
        window: int | None = None,
    ):
        self.requests, self.cache = requests, cache
        self.window = window  # of a cache that forgets
        # Of prompts that are through; and of those that are read.
        self.scores = {} if scores is None else scores
        self.scoring = {r.number: Scores() for r in requests}
        self.rows = [resumed.get(r.number, []) for r in requests]
        self.times = len(self.rows[0]) or requests[0].settings.rows
        self.split = self.times == 1 or not self.rows[0]  # nothing is left to part
        each = zip(requests, self.rows, strict=True)
        self._begin([first_text(r, rows, window) for r, rows in each])

    def _begin(self, texts: list[list[int]]) -> None:
        self.texts, self.fed = texts, [0] * len(texts)
        self.last: list[Tensor | None] = [None] * len(texts)
        self._keys: list[list[bytes]] | None = None
        # Of models with states: the pages of each text after which they are wanted, and what was found.
        self.marks: list[list[int]] = [[] for _ in texts]
        self.states: list[dict[bytes, list[State]]] = [{} for _ in texts]

    @property
    def through(self) -> bool:
        return self.split and all(x is not None for x in self.last)

    @property
    def logits(self) -> Tensor:
        return torch.stack([x for x in self.last if x is not None])

    def drop(self, request: Request) -> None:
        """Forget one of the requests; its pages are free."""
        index = [i for i, r in enumerate(self.requests) if r is not request]
        if not index:
            self.cache.release()
            self.requests = []
            return
        self._keep(index, self.cache.take(torch.tensor(index, device=self.cache.device)))

    def _keep(self, index: list[int], cache: Cache) -> None:
        self.cache = cache
        for name in ("requests", "rows", "texts", "fed", "last", "marks", "states"):
            setattr(self, name, [getattr(self, name)[i] for i in index])
        self._keys = None

    def ready(self) -> Prefill | None:
        """Those that are through, as a job of its own: they wait for nobody, and are not fed as padding. The rows of
        one request stay together."""
        if self.through:
            return self
        through = [i for i, x in enumerate(self.last) if x is not None]
        if not through or len(self.requests) == 1:
            return None
        done, device = copy.copy(self), self.cache.device
        done._keep(through, self.cache.fork(torch.tensor(through, device=device)))
        rest = [i for i, x in enumerate(self.last) if x is None]
        self._keep(rest, self.cache.take(torch.tensor(rest, device=device)))
        return done

    def feed(self, model: Any, chunk: int, backend: str) -> None:
        """Feed up to `chunk` tokens over all rows, padding included; one a row at least."""
        device = self.cache.device
        size = max(1, chunk // len(self.texts))
        ends = [self._end(row, n, n + size) for row, n in enumerate(self.fed)]
        parts = [text[n:m] for text, n, m in zip(self.texts, self.fed, ends, strict=True)]
        width = max(map(len, parts))
        lengths = torch.tensor([len(p) for p in parts], device=device)
        ids = torch.tensor([p + [0] * (width - len(p)) for p in parts], device=device)
        more = sources(self.requests, device) if self.cache.cross is None else {}
        given = {"cache": self.cache, "backend": backend, **more}
        wanted = [i for i, r in enumerate(self.requests) if unscored(r, self.scores)]
        if not wanted:
            logits = model.next_logits(ids, lengths, **given)
        else:
            hidden = model.hidden(ids, lengths, **given)
            logits = model.logits(last_real(hidden, lengths))
            for i in wanted:
                self._score(model, self.requests[i], hidden[i], self.fed[i], ends[i])
        for i, part in enumerate(parts):
            self.fed[i] += len(part)
            if part and self.fed[i] == len(self.texts[i]):
                self.last[i] = logits[i]
            self._mark(i, self.fed[i] - len(part))
        if not self.split and self.last[0] is not None:
            self._part(model.shares_source)

    def _score(self, model: Any, request: Request, hidden: Tensor, start: int, end: int) -> None:
        """The log probabilities of the tokens that follow those from `start` to `end`, from their states (t m)."""
        found, after = self.scoring[request.number], request.ids[start + 1 : end + 1]
        tokens = torch.tensor(after, dtype=torch.long, device=hidden.device)
        for at in range(0, len(after), SLICE):
            logits = model.logits(hidden[None, at : at + SLICE][:, : len(after) - at])[0]
            each = scored(logits, tokens[at : at + SLICE])
            found.add(request.settings.top_logprobs, *each)
        if len(found.logprobs) == len(request.ids):
            self.scores[request.number] = found

    def _part(self, shared: bool) -> None:
        """The prompt of a preempted request is through: its rows go on with what each had said."""
        (request,), (rows,) = self.requests, self.rows
        self.cache = self.cache.spread(self.times, shared)
        prompt = first_text(request, [], self.window)
        self._begin([prompt + row.ids for row in rows])
        self.fed = [len(prompt)] * len(rows)
        self.split = True

    # --- the prefix cache ---

    def keys(self) -> list[list[bytes]]:
        """Of every text: a key for each full page."""
        if self._keys is None:
            assert isinstance(self.cache, Paged)
            size, one = self.cache.page, len(self.requests) == 1
            salts = [self.requests[0 if one else i].salt for i in range(len(self.texts))]
            self._keys = [
                page_keys(t, size, salt) for t, salt in zip(self.texts, salts, strict=True)
            ]
        return self._keys

    def adopt(self) -> None:
        """Begin with pages that earlier prompts left; at least one token stays to be fed, for its logits."""
        assert isinstance(self.cache, Paged)
        for row, (text, keys) in enumerate(zip(self.texts, self.keys(), strict=True)):
            if unscored(self.requests[row], self.scores):
                continue
            keys = keys[: (len(text) - 1) // self.cache.page]
            self.fed[row] = self.cache.adopt(row, keys)
            if any(spec.state for spec in self.cache.specs):
                # Where another text parted from this one, and before its end.
                self.marks[row] = sorted({self.cache.known(keys), len(keys)} - {0})

    def _end(self, row: int, start: int, end: int) -> int:
        """A call ends where texts part, so that the states there are known; and a cache that forgets takes one token
        a call when it is full."""
        if self.window is not None:
            return start + 1 if start >= self.window else min(end, self.window)
        if len(self.marks[row]) < 2:
            return end
        assert isinstance(self.cache, Paged)
        parting = self.marks[row][0] * self.cache.page
        return parting if start < parting < end else end

    def _mark(self, row: int, start: int) -> None:
        """Take the states after the marked pages that the last call filled."""
        for mark in self.marks[row]:
            assert isinstance(self.cache, Paged)
            if start < mark * self.cache.page <= self.fed[row]:
                states = self.cache.state_after(row, mark * self.cache.page)
                if states is not None:
                    self.states[row][self.keys()[row][mark - 1]] = states

    def publish(self) -> None:
        """Leave the full pages to later prompts, if the model answered with numbers."""
        assert isinstance(self.cache, Paged)
        sound = self.logits.isfinite().any(-1) & ~self.logits.isnan().any(-1)
        for row, (good, keys) in enumerate(zip(sound.tolist(), self.keys(), strict=True)):
            if good:
                self.cache.publish(row, keys)
                for key, states in self.states[row].items():
                    self.cache.pool.remember(key, states)


def first_text(request: Request, rows: list[Row], window: int | None = None) -> list[int]:
    """What a request is fed first; `rows` are its rows if it was preempted. Of a prompt longer than a window the first
    tokens and the last."""
    ids = request.ids if window is None else shortened(request.ids, window)
    return ids + (rows[0].ids if len(rows) == 1 else [])


def shortened(ids: list[int], window: int) -> list[int]:
    """The first tokens of a text that are kept as attention sinks, and the last: as many as a window holds."""
    return ids if len(ids) <= window else ids[:FIRST] + ids[FIRST - window :]


def sources(requests: list[Request], device: torch.device) -> dict[str, Any]:
    """What encoders read, as one batch; nothing for other models."""
    found = [r.source for r in requests if r.source is not None]
    if not found:
        return {}
    if found[0].dim() > 1:
        return {"source": torch.stack(found).to(device)}
    lengths = torch.tensor([len(s) for s in found], device=device)
    ids = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    return {"source": ids.to(device), "source_lengths": lengths}
