"""The choice of the next token, for every runner: the settings of rows as columns, and each row's next token from them.

Tensors of fixed shape, so that a CUDA graph can hold it; what the host must know (which settings are in use, whether a
token is prescribed) it knows before. Settings are per row: numbers or columns (n 1). Equal logits go to the lowest
id."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import abc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from regard.decode.filters import FILTERS, has_form
from regard.decode.sequence import Sequence
from regard.decode.settings import MOST_TOPS, Request, Settings
from regard.fast.cuda.record import send, shared
from regard.kernels.c import rows as native
from regard.kernels.triton import draw as kernels
from regard.kernels.triton.linear import ready
from regard.kernels.triton.sample import best


def greedy(logits: Tensor) -> Tensor:
    """argmax_v logits_v (... V) -> (...); of equal ones the lowest id."""
    return logits.argmax(-1)


def repeat(logits: Tensor, counts: Tensor, times: Tensor | float) -> Tensor:
    """Divide positive logits of tokens already seen by `times`, multiply negative ones (Keskar et al. 2019)."""
    return torch.where(counts > 0, torch.where(logits > 0, logits / times, logits * times), logits)


def draw(logits: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulative probability passes u in [0, 1): (n V), (n) -> (n)."""
    mass = logits.double().softmax(-1).cumsum(-1)
    at = torch.searchsorted(mass, (u.double() * mass[:, -1])[:, None], right=True)[:, 0]
    return at.clamp(max=logits.shape[-1] - 1)


def uniform(seed: Tensor, request: Tensor, position: Tensor) -> Tensor:
    """A number in [0, 1) for each (seed, request, position), all int64: the splitmix64 counter, so that a request's
    random numbers do not depend on its neighbours, on the batch or on the device."""
    x = _mix(_mix(_mix(seed) ^ request) ^ position)
    return (x >> 11).bitwise_and((1 << 53) - 1).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser; int64 multiplication wraps, and the shifts are made logical by masks."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def beam_search(
    step: Callable[[tuple[int, ...]], Tensor], width: int, max_len: int, end: int | None = None
) -> list[tuple[tuple[int, ...], float]]:
    """The `width` best sequences found and their log probabilities, best first. `step(prefix)` gives logits (V).

    Each round continues every beam by its `width` best tokens and keeps the `width` best of all; a beam that said `end`
    stays as it is. width = 1 is greedy. No length penalty: this is the plain form that beam.py is held against."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(max_len):
        grown = []
        for ids, total in beams:
            if ids and ids[-1] == end:
                grown.append((ids, total))
                continue
            log_p = step(ids).log_softmax(-1)
            best = log_p.argsort(stable=True, descending=True)[:width].tolist()
            grown += [((*ids, i), total + log_p[i].item()) for i in best]
        possible = [beam for beam in grown if beam[1] > -torch.inf]
        beams = sorted(possible, key=lambda beam: -beam[1])[:width]
        if all(ids[-1] == end for ids, _ in beams):
            break
    return beams


# --- the settings of rows, as columns -------------------------------------------------------------------------------

PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
ENCODER = "encoder_repetition_penalty"
MOST_ENDS = 16  # end tokens of a row that may have to go on, chosen for speed
MASK = "mask"  # some row has one
RULES = "rules"  # some row's next token depends on runs of tokens in its text: see `ruled`
RENORMALIZE = (
    "renormalize_logits"  # some search compares texts by what bias, bans and penalties leave
)
TOPS = "tops"  # some row asks for the best tokens of each choice; they are noted, nothing is chosen otherwise


def neutral() -> dict[str, float]:
    """The numbers that a choice may depend on, each with the value that changes nothing."""
    filters = {name: each.neutral for name, each in FILTERS.items()}
    return {"temperature": 0.0, **filters, **PENALTIES, ENCODER: 1.0}


@functools.lru_cache(4096)
def uses(s: Settings) -> frozenset[str]:
    """What a row's choice depends on besides its logits: nothing where it is simply greedy."""
    found = {name for name, idle in neutral().items() if getattr(s, name) != idle}
    if not s.temperature:
        found -= {*FILTERS}
    if s.logit_bias or s.banned or any(len(ids) == 1 for ids, _ in s.sequence_bias):
        found.add("bias")
    runs = s.no_repeat_ngram_size or s.encoder_no_repeat_ngram_size or s.begin_suppress_tokens
    if runs or any(len(ids) > 1 for ids, _ in s.sequence_bias):
        found.add(RULES)
    if s.exponential_decay_length_penalty is not None:
        found.add("decay")
    if s.renormalize_logits and s.beams > 1:
        found.add(RENORMALIZE)
    if s.min_new_tokens or s.forced_first is not None or s.forced_last is not None:
        found.add("held")
    if s.top_logprobs:
        found.add(TOPS)
    return frozenset(found)


def held(s: Settings, first: int, last: int) -> bool:
    """Whether one of the tokens from number `first` to `last` may not end the text, or is prescribed."""
    return (
        first < s.min_new_tokens
        or forced(s, first) is not None
        or (s.forced_last is not None and first < s.max_new_tokens <= last + 1)
    )


def forced(s: Settings, said: int) -> int | None:
    """The token that must come now, if any."""
    if said == 0 and s.forced_first is not None:
        return s.forced_first
    return s.forced_last if said == s.max_new_tokens - 1 else None


def used_by(s: Settings, first: int, last: int) -> frozenset[str]:
    """What the tokens from number `first` to `last` of a row depend on."""
    found = uses(s)
    return found if "held" not in found or held(s, first, last) else found - {"held"}


class SamplingTensors:
    """Settings of n rows as columns (n 1), and what they say of single tokens (n V): made when some row first uses
    them, and from then on where they are."""

    def __init__(self, rows: int, vocab: int, device: torch.device):
        self.rows, self.vocab, self.device = rows, vocab, device
        self.values: dict[str, Tensor] = {}

    def put(self, places: abc.Sequence[int], rows: abc.Sequence[Sequence]) -> None:
        """The settings of some rows, each at its place."""
        each = [row.request.settings for row in rows]
        new = frozenset().union(*map(uses, each))
        if not new and not self.values:
            return
        at = send(list(places), self.device)
        for name, idle in neutral().items():
            if name in new or name in self.values:
                self._set(name, at, [getattr(s, name) for s in each], idle)
        if "temperature" in self.values:
            self._set("seed", at, [s.seed for s in each], 0)
            self._set("key", at, [row.key for row in rows], 0)
        if new & PENALTIES.keys():
            self._count("seen", at, [row.request.ids for row in rows])
            self._count("said", at, [row.ids for row in rows])
        if ENCODER in new:
            self._count("read", at, [_known(row, self.vocab) for row in rows])
        if RENORMALIZE in new or RENORMALIZE in self.values:
            self._set(RENORMALIZE, at, [RENORMALIZE in uses(s) for s in each], 0)
        if MASK in self.values:
            self.room()[list(places)] = -1
        if "bias" in new or "bias" in self.values:
            self._put_bias(places, at, each)
        if "decay" in new or "decay" in self.values:
            self._put_decay(at, each)
        if new & {"decay", "held"} or "held" in self.values:
            self._put_held(at, each)

    def _count(self, name: str, at: Tensor, texts: list[list[int]]) -> None:
        """How often each token is in a text."""
        self._table(name)[at] = counts(
            texts, torch.zeros(len(texts), self.vocab, device=self.device)
        )

    def _put_bias(self, places: abc.Sequence[int], at: Tensor, each: list[Settings]) -> None:
        """What is added to single tokens, and which are forbidden."""
        table = self._table("bias")
        table[at] = 0.0
        both = list(zip(places, each, strict=True))
        biases = [(i, *pair) for i, s in both for pair in s.logit_bias]
        biases += [(i, *ids, x) for i, s in both for ids, x in s.sequence_bias if len(ids) == 1]
        if biases:
            row, token, bias = (send(x, self.device) for x in zip(*biases, strict=True))
            table.index_put_((row, token), bias.float(), accumulate=True)
        bans = [(i, token) for i, s in both for token in s.banned]
        if bans:
            row, token = send(bans, self.device).T
            table[row, token] = -torch.inf

    def _put_decay(self, at: Tensor, each: list[Settings]) -> None:
        """Where it begins, and its factor."""
        if "decay" not in self.values:
            self.values["decay"] = torch.ones(self.rows, 2, device=self.device)
        decays = [s.exponential_decay_length_penalty or (0, 1.0) for s in each]
        self.values["decay"][at] = send(decays, self.device).float()

    def _put_held(self, at: Tensor, each: list[Settings]) -> None:
        """The least and the most tokens, the first and the last one, and the end tokens."""
        if "held" not in self.values:
            width = 4 + max(MOST_ENDS, *(len(s.eos) for s in each))
            self.values["held"] = torch.full((self.rows, width), -1, device=self.device)
        table = self.values["held"]
        forced = [
            [-1 if token is None else token for token in (s.forced_first, s.forced_last)]
            for s in each
        ]
        lines = [
            [s.min_new_tokens, s.max_new_tokens, *both, *s.eos]
            for s, both in zip(each, forced, strict=True)
        ]
        width = table.shape[1]
        filled = [(line + [-1] * width)[:width] for line in lines]
        table[at] = send(filled, self.device)

    def _set(self, name: str, at: Tensor, values: list[float], idle: float) -> None:
        if name not in self.values:
            self.values[name] = torch.full((self.rows, 1), idle, device=self.device)
        column = self.values[name]
        column[at] = send(values, self.device).to(column.dtype)[:, None]

    def _table(self, name: str) -> Tensor:
        if name not in self.values:
            self.values[name] = torch.zeros(self.rows, self.vocab, device=self.device)
        return self.values[name]

    def room(self) -> Any:
        """Words of 32 bits (n, V / 32), of numpy: what may come next in each row, wherever the rows are."""
        if MASK not in self.values:
            words = torch.full((self.rows, -(-self.vocab // 32)), -1, dtype=torch.int32)
            self.words, self.values[MASK] = shared(words, self.device)
        return self.words

    def at(self, rows: slice | Tensor, used: frozenset[str]) -> dict[str, Tensor]:
        """What is used, of some rows."""
        names = {*(used - {TOPS, RULES}), *(("seed", "key") if "temperature" in used else ())}
        if used & PENALTIES.keys():
            names |= {"said", "seen"}
        names |= {"read"} if ENCODER in used else set()
        names |= {"held"} if "decay" in used else set()
        return {name: self.values[name][rows] for name in sorted(names)}

    def said(self, rows: slice | Tensor, tokens: Tensor, live: Tensor | int = 1) -> None:
        """Count tokens that some rows have just said, those that are live."""
        if "said" in self.values:
            at = torch.arange(self.rows, device=self.device)[rows]
            self.values["said"][at, tokens] += live


def _known(row: Sequence, vocab: int) -> list[int]:
    """What a row was given to read, of the tokens that it can say."""
    return [i for i in row.request.read if i < vocab]


def ruled(texts: abc.Sequence[tuple[Request, list[int]]], blank: Tensor) -> Tensor:
    """What the rules on runs of tokens add to the next logits of texts, which requests have said so far, to zeros
    (n V); -inf where they forbid a token."""
    found = [(i, *x) for i, each in enumerate(texts) for x in _upcoming(*each, blank.shape[1])]
    if found:
        row, token, bias = (send(x, blank.device) for x in zip(*found, strict=True))
        blank.index_put_((row, token), bias.to(blank.dtype), accumulate=True)
    return blank


def _upcoming(request: Request, said: list[int], vocab: int) -> Iterator[tuple[int, float]]:
    """Tokens that may come next, and what is added to their logits."""
    s, text = request.settings, request.ids + said
    if s.begin_suppress_tokens and len(said) == int(s.forced_first is not None):
        yield from ((token, -math.inf) for token in s.begin_suppress_tokens)
    for ids, bias in s.sequence_bias:
        if 1 < len(ids) <= len(text) and tuple(text[1 - len(ids) :]) == ids[:-1]:
            yield ids[-1], bias
    for size, where in (
        (s.no_repeat_ngram_size, text),
        (s.encoder_no_repeat_ngram_size, request.read if s.encoder_no_repeat_ngram_size else []),
    ):
        for token in followers(where, text, size) if size else ():
            if token < vocab:
                yield token, -math.inf


def followers(where: list[int], text: list[int], size: int) -> Iterator[int]:
    """Tokens that stand in `where` behind the last size - 1 tokens of a text."""
    if size == 1:
        yield from where
        return
    tail = text[1 - size :]
    at = size - 2
    # A list finds a token faster than a loop does.
    with contextlib.suppress(ValueError):
        while len(tail) == size - 1:
            at = where.index(tail[-1], at) + 1
            if where[at - size + 1 : at] == tail and at < len(where):
                yield where[at]


def counts(texts: list[list[int]], blank: Tensor) -> Tensor:
    """How often each text has each token, added to zeros (n V)."""
    for i, ids in enumerate(texts):
        at = torch.tensor(ids, dtype=torch.long, device=blank.device)
        blank[i].scatter_add_(0, at, torch.ones_like(at, dtype=blank.dtype))
    return blank


def scored(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log probabilities of tokens (n) by logits (n V); the best ones there and theirs, (n k)."""
    raw = logits.float()
    norm = raw.logsumexp(-1)
    return raw.gather(1, tokens[:, None])[:, 0] - norm, *best_n(raw, norm)


def best_n(logits: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable tokens of logits (n V) and their log probabilities, (n k) each; norm (n) is the log sum exp."""
    top, ids = logits.float().topk(min(MOST_TOPS, logits.shape[-1]))
    return ids, top - norm[:, None]


def choose(logits: Tensor, columns: dict[str, Tensor], count: Tensor) -> Tensor:
    """The next token (n) from logits (n V), of rows that have said `count` (n) tokens; -1 where their settings leave
    none."""
    logits = adjusted(logits, columns, count)
    filters = {name: columns[name] for name in FILTERS if name in columns}
    if not ready(logits) and has_form({*filters}, "c"):
        tokens = native.draw(logits, columns, count)
        if tokens is not None:
            return tokens
    if MASK in columns:
        logits = allowed(logits, columns[MASK])
    if "temperature" not in columns:
        return best(logits)[0]
    hot, which = columns["temperature"], (columns["seed"][:, 0], columns["key"][:, 0], count)
    if ready(logits) and has_form({*filters}, "triton"):
        filters["temperature"] = hot
        return kernels.draw_filtered(logits.contiguous(), kernels.uniform(*which), filters)
    kept = logits / hot.clamp(min=1e-6)
    for name, column in filters.items():
        kept = FILTERS[name].keep(kept, column)
    tokens = torch.where(hot[:, 0] > 0, draw(kept, uniform(*which)), logits.argmax(-1))
    return torch.where(logits.amax(-1) == -torch.inf, -1, tokens)


def allowed(logits: Tensor, words: Tensor) -> Tensor:
    """Logits (n V), -inf where the bit of a token in words (n, V / 32) is 0."""
    if ready(logits):
        return kernels.allow(logits.contiguous(), words)
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    found = (words[:, :, None] >> bit & 1).flatten(1)[:, : logits.shape[-1]]
    return logits.masked_fill(found == 0, -torch.inf)


def marked(ids: Tensor, vocab: int) -> Tensor:
    """Which tokens are among ids (n k), such as a row's end tokens; -1 is none: (n V) bool."""
    # What is none goes to a column behind the vocabulary.
    places = torch.where(ids < 0, vocab, ids)
    found = torch.zeros(len(ids), vocab + 1, dtype=torch.bool, device=ids.device)
    return found.scatter(1, places, True)[:, :vocab]


def adjusted(logits: Tensor, columns: dict[str, Tensor], count: Tensor) -> Tensor:
    """Bias and bans, penalties, the least length, forced tokens, and ends that become more probable: in the order of
    transformers."""
    if columns.keys() & {"bias", RULES, "decay", ENCODER, RENORMALIZE, *PENALTIES}:
        logits = logits.float()
    added = [columns[name] for name in ("bias", RULES) if name in columns]
    if added:
        logits = logits + sum(added[1:], added[0])
    if ENCODER in columns:
        logits = repeat(logits, columns["read"], 1 / columns[ENCODER])
    if "repetition_penalty" in columns:
        logits = repeat(logits, columns["said"] + columns["seen"], columns["repetition_penalty"])
    if "presence_penalty" in columns:
        logits = logits - columns["presence_penalty"] * (columns["said"] > 0)
    if "frequency_penalty" in columns:
        logits = logits - columns["frequency_penalty"] * columns["said"]
    if "held" in columns:
        least, most, first, last, *_ = columns["held"].T
        ends = columns["held"][:, 4:]
        early = (count < least)[:, None] & marked(ends, logits.shape[1])
        logits = logits.masked_fill(early, -torch.inf)
        must = torch.where(count == 0, first, -1)
        must = torch.where((must < 0) & (count == most - 1), last, must)[:, None]
        only = torch.full_like(logits, -torch.inf).scatter(1, must.clamp(min=0), 0.0)
        logits = torch.where(must >= 0, only, logits)
    if "decay" in columns:
        start, factor = columns["decay"].split(1, 1)
        grown = factor ** (count[:, None] - start).clamp(min=0) - 1
        # What is forbidden stays so.
        rises = marked(columns["held"][:, 4:], logits.shape[1]) & logits.isfinite()
        logits = torch.where(rises, logits + logits.abs() * grown, logits)
    if RENORMALIZE in columns:
        whole = logits.log_softmax(-1).masked_fill(logits == -torch.inf, -torch.inf)
        logits = torch.where(columns[RENORMALIZE] > 0, whole, logits)
    return logits
