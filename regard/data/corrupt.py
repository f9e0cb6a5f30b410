"""Plain text made into something to repair: BERT's masks, T5's spans, BART's infilling.

A `Corruption` turns a batch of plain ids into one with inputs and labels, by a generator that is handed in; `Corrupted`
is a feed of such batches, batch k being a function of the seed and k. Rows of ids (t) go through the functions at the
end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.config import Amount, Positive, Share, settings
from regard.data.feed import IGNORE, Batch, Feed, drawing
from regard.errors import UsageError

Corruption = Callable[[Batch, Generator], Batch]
# Settings that there were, and nobody used; they are part of the fingerprints of runs that go on.
GONE = {"MaskTokens": ("begins",), "Infill": ("stops",)}


@dataclass(frozen=True)
class Marks:
    """The ids that corruption puts in, and those it leaves alone."""

    vocab: int
    special: tuple[int, ...] = ()  # never masked, never drawn at random
    mask: int | None = None
    sentinels: tuple[int, ...] = ()  # T5: the first span's first, <extra_id_0>, <extra_id_1>, ...
    start: int | None = None  # what a decoder reads first
    end: int | None = None
    padding: int = 0
    # Tokens that end a sentence; no part of a run's fingerprint, for they are the tokenizer's.
    stops: tuple[int, ...] = field(default=(), repr=False)

    def need(self, name: str) -> int:
        value = getattr(self, name)
        if value is None:
            raise UsageError(
                f"this corruption needs a {name} token; train a tokenizer that has one"
            )
        return int(value)


@settings
class Noise:
    """How text is damaged that a model learns to repair; None: as the task has it."""

    rate: Share | None = None  # share of tokens that are masked or taken out
    mean: Positive | None = None  # tokens of a span, on average
    permute: bool | None = None  # sentences are shuffled too (BART)

    @property
    def given(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if x is not None}


# --- corruptions of batches ---------------------------------------------------------------------------------------


@settings
class MaskTokens:
    """BERT (Devlin et al. 2019, 3.1): each token is selected with probability `rate`; of the selected 80 % become the
    mask, 10 % another token, 10 % stay. Only the selected have a label."""

    marks: Marks
    rate: Share = 0.15

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        ids, marks = batch.ids, self.marks
        chosen = torch.rand(ids.shape, generator=generator) < self.rate
        chosen &= (batch.labels != IGNORE) & ~torch.isin(ids, _tensor(marks.special))
        fate = torch.rand(ids.shape, generator=generator)
        # Drawn evenly from the tokens that are not special.
        special = _tensor(sorted(set(marks.special)))
        other = torch.randint(marks.vocab - len(special), ids.shape, generator=generator)
        gaps = special - torch.arange(len(special))
        other = other + torch.searchsorted(gaps, other, right=True)
        changed = torch.where(fate < 0.8, marks.need("mask"), torch.where(fate < 0.9, other, ids))
        labels = torch.where(chosen, ids, IGNORE)
        return replace(batch, ids=torch.where(chosen, changed, ids), labels=labels)


@settings
class Spans:
    """T5 (Raffel et al. 2020, 3.1.4): spans of `mean` tokens on average, `rate` of all, each become one sentinel; the
    target lists every sentinel with what it stands for."""

    marks: Marks
    rate: Share = 0.15
    mean: Positive = 3.0

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        end = self.marks.need("end")

        def pair(row: Tensor) -> tuple[Tensor, Tensor]:
            front, text, back = ends(row, self.marks)
            source, target = spans(text, self.marks.sentinels, generator, self.rate, self.mean)
            back = back if len(back) else _tensor((end,))
            return torch.cat([front, source, back]), torch.cat([target, _tensor((end,))])

        return _pairs(batch, pair, self.marks)


@settings
class Infill:
    """BART (Lewis et al. 2020, 2.2): spans of Poisson(`mean`) tokens, `rate` of all, each become one mask, and a span
    of none puts a mask in; with `permute` its sentences are shuffled first. The target is the text."""

    marks: Marks
    rate: Share = 0.3
    mean: Amount = 3.0
    permute: bool = False

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        mask = self.marks.need("mask")

        def pair(row: Tensor) -> tuple[Tensor, Tensor]:
            front, text, back = ends(row, self.marks)
            if self.permute:
                text = permute_sentences(text, self.marks.stops, generator)
            filled = infill(text, mask, generator, self.rate, self.mean)
            return torch.cat([front, filled, back]), row

        return _pairs(batch, pair, self.marks)


@dataclass(frozen=True)
class DrawPrefix:
    """A prefix language model's split: from 1 to n - 1 of a document's n tokens, all equally likely, are the prefix. A
    batch that has prefixes, the prompts of its data, is left as it is."""

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if batch.prefix is not None:
            return batch
        (b, t), place = batch.ids.shape, torch.arange(batch.ids.shape[1])
        if batch.doc is not None:
            doc = batch.doc
        elif batch.lengths is not None:
            # 0, and -1 of padding.
            doc = (place < batch.lengths[:, None]).long() - 1
        else:
            doc = torch.zeros(b, t, dtype=torch.long)
        begins = torch.cat([torch.ones(b, 1, dtype=torch.bool), doc[:, 1:] != doc[:, :-1]], 1)
        # Of each token's document in the batch.
        number = begins.flatten().cumsum(0) - 1
        size = number.bincount()
        start = place.repeat(b)[begins.flatten()]
        drawn = torch.rand(size.shape, generator=generator, dtype=torch.float64)
        end = start + 1 + (drawn * (size - 1).clamp(min=1)).long()
        return replace(batch, prefix=end[number].view(b, t).masked_fill(doc < 0, 0))


def rows(batch: Batch) -> list[Tensor]:
    """Each row without its padding."""
    if batch.lengths is None:
        return list(batch.ids)
    return [row[:n] for row, n in zip(batch.ids, batch.lengths.tolist(), strict=True)]


def _pairs(batch: Batch, pair: Callable[[Tensor], tuple[Tensor, Tensor]], marks: Marks) -> Batch:
    """What an encoder reads and a decoder must say, row by row; the decoder reads the same one step later."""
    if batch.doc is not None:
        raise UsageError('text to repair cannot be packed as documents; pack = "none" or "stream"')
    start = _tensor((marks.need("start"),))
    source, target = zip(*(pair(row) for row in rows(batch)), strict=True)
    read = [torch.cat([start, row[:-1]]) for row in target]
    ids, lengths = _pad(read, marks.padding)
    encoded, source_lengths = _pad(source, marks.padding)
    return Batch(ids, _pad(target, IGNORE)[0], lengths, encoded, source_lengths)


def _pad(parts: Sequence[Tensor], fill: int) -> tuple[Tensor, Tensor | None]:
    sizes = {len(part) for part in parts}
    lengths = None if len(sizes) == 1 else torch.tensor([len(part) for part in parts])
    return pad_sequence(list(parts), batch_first=True, padding_value=fill), lengths


# --- a feed of them -----------------------------------------------------------------------------------------------


class Corrupted:
    """The batches of a feed, corrupted. The whole batch is, and a rank takes its rows of it: ranks put together are the
    batch, however many they are."""

    def __init__(self, feed: Feed, corruption: Corruption, seed: int):
        self.feed, self.corruption, self.seed = feed, corruption, seed
        name = type(corruption).__name__
        # A setting that is off is no part of it: runs go on that were begun before there was one.
        settings = {n: x for n, x in vars(corruption).items() if x is not False}
        settings |= dict.fromkeys(GONE.get(name, ()))
        self.fingerprint, self.earlier = (
            hashlib.sha256(repr((of, name, settings, seed)).encode()).hexdigest()
            for of in (feed.fingerprint, getattr(feed, "earlier", ""))
        )

    @property
    def epoch(self) -> int:
        return self.feed.epoch

    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch:
        whole = self.corruption(self.feed.batch(k), drawing(self.seed, "train", k))
        first, last = (len(whole.ids) * r // world for r in (rank, rank + 1))
        if first < last:
            return whole.each(lambda x: x[first:last])
        one = whole.each(lambda x: x[:1])
        return replace(one, labels=torch.full_like(one.labels, IGNORE))

    def evaluation(self) -> Iterator[Batch]:
        for k, batch in enumerate(self.feed.evaluation()):
            yield self.corruption(batch, drawing(self.seed, "evaluation", k))

    def describe(self) -> str:
        return f"{self.feed.describe()}; corrupted by {type(self.corruption).__name__}"


# --- one row (t) --------------------------------------------------------------------------------------------------


def ends(ids: Tensor, marks: Marks) -> tuple[Tensor, Tensor, Tensor]:
    """The special tokens in front, the text, the special tokens behind."""
    text = (~torch.isin(ids, _tensor(marks.special))).nonzero()[:, 0]
    first, last = (int(text[0]), int(text[-1]) + 1) if len(text) else (len(ids), len(ids))
    return ids[:first], ids[first:last], ids[last:]


def span_counts(size: int, rate: float = 0.15, mean: float = 3.0) -> tuple[int, int]:
    """(tokens taken out, spans they make) of `size` tokens: round(size rate), at least 1 and not all; in spans of
    `mean`, at least 1. The input then has size - taken + spans tokens, the target taken + spans."""
    taken = min(max(round(size * rate), 1), size - 1) if size else 0
    return taken, min(max(round(taken / mean), 1), taken, size - taken + 1)


def spans(
    ids: Tensor,
    sentinels: Sequence[int],
    generator: Generator,
    rate: float = 0.15,
    mean: float = 3.0,
) -> tuple[Tensor, Tensor]:
    """(source, target) of T5 without end tokens. Where spans lie is drawn evenly from all ways to keep them apart (in
    T5's own code a row always ends with one)."""
    taken, count = span_counts(len(ids), rate, mean)
    if count > len(sentinels):
        raise UsageError(
            f"{len(ids)} tokens make {count} spans, and the tokenizer has {len(sentinels)} sentinels; "
            f"shorten the rows or add sentinels"
        )
    # Every way to share `taken` tokens out is equally likely.
    drawn = torch.randperm(max(taken - 1, 0), generator=generator)[: count - 1]
    edges = torch.cat([_tensor((0,)), drawn.sort().values + 1, _tensor((taken,))])
    sizes = edges.diff()[:count]
    marks = _tensor(sentinels[:count])
    source, noise = _replace(ids, sizes, marks, generator)
    target = ids.new_empty(taken + count)
    at = edges[:count] + torch.arange(count)
    target[at] = marks
    target[_others(at, len(target))] = ids[noise]
    return source, target


def infill(
    ids: Tensor, mask: int, generator: Generator, rate: float = 0.3, mean: float = 3.0
) -> Tensor:
    """The text with about `rate` of it behind masks, one a span."""
    wanted = round(len(ids) * rate)
    sizes = _tensor(())
    while int(sizes.sum()) < wanted:
        more = torch.poisson(torch.full((wanted + 1,), mean), generator=generator).long()
        sizes = torch.cat([sizes, more])
    if wanted:
        sizes = sizes[: int((sizes.cumsum(0) < wanted).sum()) + 1]
        sizes[-1] -= sizes.sum() - wanted
    # No two side by side.
    sizes = sizes[: len(ids) - wanted + 1]
    return _replace(ids, sizes, torch.full_like(sizes, mask), generator)[0]


def permute_sentences(ids: Tensor, stops: Sequence[int], generator: Generator) -> Tensor:
    """The sentences in another order, all orders equally likely; one ends behind a stop, or several in a row."""
    stop = torch.isin(ids, _tensor(stops))
    ends = (stop[:-1] & ~stop[1:]).nonzero()[:, 0] + 1
    sentences = ids.tensor_split(ends.tolist())
    order = torch.randperm(len(sentences), generator=generator)
    return torch.cat([sentences[i] for i in order.tolist()])


def _replace(
    ids: Tensor, sizes: Tensor, marks: Tensor, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Spans of these sizes, apart from each other, each replaced by its mark; and which tokens they took, in order."""
    kept = len(ids) - int(sizes.sum())
    gaps = torch.randperm(kept + 1, generator=generator)[: len(sizes)].sort().values
    noise = torch.arange(len(ids) - kept) + gaps.repeat_interleave(sizes)
    out = ids.new_empty(kept + len(sizes))
    at = gaps + torch.arange(len(sizes))
    out[at] = marks
    out[_others(at, len(out))] = ids[_others(noise, len(ids))]
    return out, noise


def _others(index: Tensor, size: int) -> Tensor:
    """A mask of the places that `index` does not name."""
    mask = torch.ones(size, dtype=torch.bool)
    mask[index] = False
    return mask


def _tensor(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.long)
