"""Corruption: the original comes back from what was made of it, and the rates are those of the papers."""

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor

from regard.data.corrupt import (
    Corrupted,
    Corruption,
    DrawPrefix,
    Infill,
    Marks,
    MaskTokens,
    Spans,
    infill,
    permute_sentences,
    rows,
    span_counts,
    spans,
)
from regard.data.feed import IGNORE, Batch, drawing
from regard.errors import UsageError

CLS, SEP, PAD, MASK, STOP = 0, 1, 2, 3, 9  # STOP is an ordinary word
V = 60
SENTINELS = tuple(range(V + 39, V - 1, -1))  # from the end of the vocabulary down, as in T5
MARKS = Marks(V + 40, (CLS, SEP, PAD, MASK, *SENTINELS), MASK, SENTINELS, SEP, SEP, PAD)


def text(size: int, seed: int = 0) -> Tensor:
    return torch.randint(4, V, (size,), generator=drawing("text", seed))


def batch(*sizes: int) -> Batch:
    ids = torch.full((len(sizes), max(sizes) + 2), PAD)
    labels = torch.full_like(ids, IGNORE)
    for i, size in enumerate(sizes):
        ids[i, : size + 2] = torch.cat([torch.tensor([CLS]), text(size, i), torch.tensor([SEP])])
        labels[i, : size + 2] = ids[i, : size + 2]
    return Batch(ids, labels, torch.tensor(sizes) + 2)


def sure(share: float, rate: float, count: int) -> bool:
    """Within five standard deviations of a share of `count` independent draws."""
    return abs(share - rate) < 5 * math.sqrt(rate * (1 - rate) / count)


# --- BERT ---------------------------------------------------------------------------------------------------------


def test_mask_tokens_gives_the_original_back() -> None:
    whole = batch(300, 40, 7)
    made = MaskTokens(MARKS)(whole, drawing(1))
    selected = made.labels != IGNORE
    torch.testing.assert_close(torch.where(selected, made.labels, made.ids), whole.ids)
    assert selected.any() and made.lengths is whole.lengths


def test_mask_tokens_leaves_special_tokens_and_padding_alone() -> None:
    whole = batch(300, 40, 7)
    made = MaskTokens(MARKS, rate=1.0)(whole, drawing(1))
    special = torch.isin(whole.ids, torch.tensor(MARKS.special))
    assert torch.equal(made.labels != IGNORE, ~special)
    drawn = made.ids[~special & (made.ids != MASK)]
    assert not torch.isin(drawn, torch.tensor(MARKS.special)).any() and drawn.max() < V


def test_mask_tokens_rates_are_15_and_80_10_10() -> None:
    whole = batch(*[4000] * 10)
    made = MaskTokens(MARKS)(whole, drawing(2))
    selected, n = made.labels != IGNORE, 40_000
    assert sure(int(selected.sum()) / n, 0.15, n)
    before, after = whole.ids[selected], made.ids[selected]
    hit, count = after == MASK, len(after)
    assert sure(hit.double().mean().item(), 0.8, count)
    # another token is now and then the token itself: 1 of the V - 4 that are not special
    changed = (~hit & (after != before)).double().mean().item()
    assert sure(changed, 0.1 * (1 - 1 / (V - 4)), count)


def test_mask_tokens_draws_other_tokens_evenly() -> None:
    made = MaskTokens(MARKS, rate=1.0)(batch(*[4000] * 20), drawing(2))
    drawn = made.ids[(made.labels != IGNORE) & (made.ids != MASK) & (made.ids != made.labels)]
    counts = drawn.bincount(minlength=V)[4:V].double()
    expected = counts.mean()
    chi = ((counts - expected) ** 2 / expected).sum().item()
    freedom = V - 4 - 1
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom)


def test_mask_tokens_needs_a_mask() -> None:
    with pytest.raises(UsageError, match="mask token"):
        MaskTokens(Marks(V))(batch(5), drawing(0))


# --- T5 -----------------------------------------------------------------------------------------------------------


def restored(source: list[int], target: list[int]) -> list[int]:
    """The text: each sentinel of the source replaced by what the target lists for it."""
    parts: dict[int, list[int]] = {}
    for token in target:
        if token in SENTINELS:
            parts[token] = []
        else:
            parts[next(reversed(parts))].append(token)
    assert list(parts) == list(SENTINELS[: len(parts)])  # descending from the first
    return [t for token in source for t in parts.get(token, [token])]


@given(st.integers(0, 120), st.integers(0, 10**6), st.sampled_from([0.15, 0.3, 0.5]))
def test_spans_give_the_original_back_with_exact_lengths(size: int, seed: int, rate: float) -> None:
    ids = text(size, seed)
    source, target = spans(ids, SENTINELS, drawing(seed), rate)
    assert restored(source.tolist(), target.tolist()) == ids.tolist()
    taken, count = span_counts(size, rate)
    assert (len(source), len(target)) == (size - taken + count, taken + count)
    found = torch.isin(source, torch.tensor(SENTINELS))
    assert not (found[1:] & found[:-1]).any()  # spans lie apart


def test_spans_take_15_percent_in_threes() -> None:
    assert span_counts(568) == (85, 28)
    assert span_counts(100, 0.15, 3.0) == (15, 5)
    assert span_counts(1) == (0, 0) and span_counts(0) == (0, 0)
    # One token and one span at least, never all, and spans of a token at least with one between them.
    assert [span_counts(n) for n in (2, 3, 9, 20, 30)] == [(1, 1), (1, 1), (1, 1), (3, 1), (4, 1)]
    assert span_counts(5, 1.0) == (4, 1) and span_counts(2, 0.9) == (1, 1)
    assert span_counts(10, 0.9, 1.0) == (9, 2) and span_counts(10, 0.5, 1.0) == (5, 5)
    assert span_counts(10, 0.5, 0.5) == (5, 5)


def test_spans_reach_every_token_alike() -> None:
    """T5's own code never keeps the last token; here the place in a row makes no difference but at its ends."""
    hidden = torch.zeros(20)
    for seed in range(3000):
        source, _ = spans(torch.arange(4, 24), SENTINELS, drawing(seed))
        hidden += ~torch.isin(torch.arange(4, 24), source)
    assert hidden.sum() == 3000 * 3
    middle = hidden[3:-3]
    assert middle.max() < 1.3 * middle.min() and hidden[0] > 0 and hidden[-1] < 3000


def test_spans_need_enough_sentinels() -> None:
    with pytest.raises(UsageError, match="100 tokens make 5 spans, .* has 4 sentinels"):
        spans(text(100), SENTINELS[:4], drawing(0))
    source, target = spans(text(100), SENTINELS[:5], drawing(0))
    assert restored(source.tolist(), target.tolist()) == text(100).tolist()


def test_spans_batch_reads_one_step_behind_its_labels() -> None:
    whole = batch(60, 31)
    made = Spans(MARKS)(whole, drawing(4))
    assert made.source is not None and made.source_lengths is not None
    for i, row in enumerate(rows(whole)):
        said = made.labels[i][made.labels[i] != IGNORE]
        assert made.ids[i, : len(said)].tolist() == [SEP, *said[:-1].tolist()]
        assert said[-1] == SEP and (made.lengths is None or made.lengths[i] == len(said))
        source = made.source[i, : made.source_lengths[i]].tolist()
        assert restored(source, said[:-1].tolist()) == row.tolist()


# --- BART ---------------------------------------------------------------------------------------------------------


def matches(source: Tensor, original: Tensor) -> bool:
    """Whether some text behind each mask makes the original of the source."""
    pattern = "".join("(?:,\\d+)*" if t == MASK else f",{t}" for t in source.tolist())
    return re.fullmatch(pattern, "".join(f",{t}" for t in original.tolist())) is not None


@given(st.integers(0, 60), st.integers(0, 10**6), st.sampled_from([0.0, 0.15, 0.3, 0.8]))
def test_infill_hides_spans_of_the_original(size: int, seed: int, rate: float) -> None:
    ids = text(size, seed)
    source = infill(ids, MASK, drawing(seed), rate)
    assert matches(source, ids)
    kept, wanted = int((source != MASK).sum()), size - round(size * rate)
    assert kept == wanted if rate < 0.8 else kept >= wanted  # so many spans may not lie apart


def test_infill_spans_are_poisson_and_some_are_empty() -> None:
    masks, taken = 0, 0
    for seed in range(200):
        source = infill(text(300, seed), MASK, drawing(seed))
        masks += int((source == MASK).sum())
        taken += 300 - int((source != MASK).sum())
    assert taken == 200 * 90
    # 3 tokens a mask on average; the last span of a row is cut short, which makes them a little shorter
    assert 2.7 < taken / masks < 3.05
    inserted = [s for s in range(200) if len(infill(text(3, s), MASK, drawing(s), 0.34)) == 4]
    assert inserted  # a mask came in and 1 token went: one span was empty


def test_infill_ends_with_the_span_that_takes_the_last_token() -> None:
    """One of 60 tokens goes; the empty spans before it are as many as draws of 0 before another, none stands after it:
    1 / (1 - p) masks on average with p = exp(-1), of a deviation of sqrt(p) / (1 - p)."""
    p, rows = math.exp(-1), 1000
    made = [infill(text(60), MASK, drawing(seed), 1 / 60, 1.0) for seed in range(rows)]
    assert all(int((source != MASK).sum()) == 59 for source in made)
    masks = sum(int((source == MASK).sum()) for source in made) / rows
    assert abs(masks - 1 / (1 - p)) < 5 * math.sqrt(p) / (1 - p) / math.sqrt(rows)


def test_infill_may_hide_all() -> None:
    assert infill(text(1), MASK, drawing(0), 1.0).tolist() == [MASK]
    assert (infill(text(9), MASK, drawing(0), 1.0, 99.0) == MASK).all()


def test_sentences_are_shuffled_and_stay_whole() -> None:
    """A sentence ends behind a full stop, or several; what follows the last one is a sentence too."""
    ids = torch.tensor([10, 11, STOP, 12, STOP, STOP, 13, 14, 15])
    sentences = {(10, 11, STOP), (12, STOP, STOP), (13, 14, 15)}
    orders = set()
    for seed in range(60):
        row = tuple(permute_sentences(ids, (STOP,), drawing(seed)).tolist())
        left = row
        order = []
        while left:
            (first,) = (s for s in sentences if left[: len(s)] == s)
            order.append(first)
            left = left[len(first) :]
        assert set(order) == sentences
        orders.add(tuple(order))
    assert len(orders) == 6
    assert torch.equal(permute_sentences(ids[:2], (STOP,), drawing(0)), ids[:2])


def test_infill_shuffles_sentences_if_asked() -> None:
    marks = replace(MARKS, stops=(STOP,))
    whole = batch(300)
    made = Infill(marks, rate=0.0, permute=True)(whole, drawing(5))
    assert made.source is not None and torch.equal(made.labels, whole.labels)
    assert not torch.equal(made.source, whole.ids)
    assert torch.equal(made.source.sort().values, whole.ids.sort().values)
    assert made.source[0, 0] == CLS and made.source[0, -1] == SEP


def test_settings_that_are_off_leave_the_fingerprint_as_it_was() -> None:
    feed: Any = SimpleNamespace(fingerprint="data")
    old = repr(("data", "Infill", {"marks": MARKS, "rate": 0.3, "mean": 3.0, "stops": None}, 7))
    prints = [Corrupted(feed, Infill(MARKS, permute=p), 7).fingerprint for p in (False, True)]
    assert prints[0] == hashlib.sha256(old.encode()).hexdigest() != prints[1]


def test_infill_batch_keeps_its_ends_and_asks_for_the_text() -> None:
    whole = batch(60, 31)
    made = Infill(MARKS)(whole, drawing(5))
    assert made.source is not None and made.source_lengths is not None
    for i, row in enumerate(rows(whole)):
        source = made.source[i, : made.source_lengths[i]]
        assert source[0] == CLS and source[-1] == SEP and matches(source, row)
        assert made.labels[i][made.labels[i] != IGNORE].tolist() == row.tolist()
        assert made.ids[i, 0] == SEP and made.ids[i, 1 : len(row)].tolist() == row[:-1].tolist()


def test_text_to_repair_is_not_packed() -> None:
    whole = batch(8)
    packed = Batch(whole.ids, whole.labels, doc=torch.zeros_like(whole.ids))
    with pytest.raises(UsageError, match="pack"):
        Infill(MARKS)(packed, drawing(0))


def test_draw_prefix_leaves_something_to_say() -> None:
    whole = batch(*[5] * 400, 0)
    made = DrawPrefix()(whole, drawing(6))
    assert made.prefix is not None
    assert set(made.prefix[:-1, 0].tolist()) == {1, 2, 3, 4, 5, 6} and made.prefix[-1, 0] == 1
    assert (made.prefix[:-1] == made.prefix[:-1, :1]).all()
    assert made.prefix[-1].tolist() == [1] * 2 + [0] * 5


def test_draw_prefix_of_full_rows_draws_one_for_each() -> None:
    ids = torch.arange(400 * 3).view(400, 3)
    made = DrawPrefix()(Batch(ids, ids), drawing(6))
    assert made.prefix is not None and made.prefix.shape == ids.shape
    assert set(made.prefix[:, 0].tolist()) == {1, 2}
    assert (made.prefix == made.prefix[:, :1]).all()


def test_draw_prefix_draws_one_for_each_packed_document() -> None:
    doc = torch.tensor([[0] * 4 + [1] * 3 + [-1]]).repeat(300, 1)
    made = DrawPrefix()(Batch(doc, doc, doc=doc), drawing(1))
    assert made.prefix is not None
    ends = [made.prefix[:, i : i + n] for i, n in ((0, 4), (4, 3), (7, 1))]
    assert all((each == each[:, :1]).all() for each in ends)
    assert [set(each[:, 0].tolist()) for each in ends] == [{1, 2, 3}, {5, 6}, {0}]
    assert len(set(zip(ends[0][:, 0].tolist(), ends[1][:, 0].tolist()))) == 6


def test_draw_prefix_of_the_shortest_documents_is_their_first_token() -> None:
    doc = torch.tensor([[0, 1, 1, 2]]).repeat(300, 1)
    made = DrawPrefix()(Batch(doc, doc, doc=doc), drawing(1))
    assert made.prefix is not None and (made.prefix == torch.tensor([1, 2, 2, 4])).all()


def test_draw_prefix_leaves_the_prompts_of_the_data() -> None:
    ids = torch.arange(12).view(2, 6)
    given = Batch(ids, ids, prefix=torch.full_like(ids, 5))
    assert DrawPrefix()(given, drawing(0)) is given


# --- the feed -----------------------------------------------------------------------------------------------------


class Plain:
    fingerprint, epoch = "f", 3

    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch:
        return batch(*[20 + k] * 5)

    def evaluation(self) -> Iterator[Batch]:
        return iter([batch(19), batch(19)])

    def describe(self) -> str:
        return "plain"


def read(made: Batch) -> Tensor:
    return made.ids if made.source is None else made.source


@pytest.mark.parametrize("corruption", [MaskTokens(MARKS), Spans(MARKS), Infill(MARKS)])
def test_corrupted_batch_is_a_function_of_seed_and_number(corruption: Corruption) -> None:
    feed, again, other = (Corrupted(Plain(), corruption, seed) for seed in (7, 7, 8))
    same = [feed.batch(2), again.batch(2)]
    assert torch.equal(same[0].ids, same[1].ids) and torch.equal(same[0].labels, same[1].labels)
    assert not torch.equal(read(feed.batch(2)), read(other.batch(2)))
    assert feed.fingerprint == again.fingerprint != other.fingerprint
    first, second = feed.evaluation()
    assert torch.equal(read(next(feed.evaluation())), read(first))
    assert not torch.equal(read(first), read(second))


@pytest.mark.parametrize("world", [2, 3, 7])
def test_corrupted_parts_of_ranks_are_the_batch(world: int) -> None:
    feed = Corrupted(Plain(), Spans(MARKS), 7)
    whole, parts = feed.batch(1), [feed.batch(1, rank, world) for rank in range(world)]
    real = [p for p in parts if (p.labels != IGNORE).any()]
    torch.testing.assert_close(torch.cat([p.labels for p in real]), whole.labels)
    # A rank without rows reads one that does not count.
    idle = [p for p in parts if (p.labels == IGNORE).all()]
    assert [len(p.ids) for p in idle] == [1] * max(0, world - len(whole.ids))


class Same(Plain):
    def batch(self, k: int, rank: int = 0, world: int = 1) -> Batch:
        ids = torch.tensor([[CLS, *range(10, 18), STOP, *range(20, 24), SEP]])
        return Batch(ids, ids)

    def evaluation(self) -> Iterator[Batch]:
        return iter([self.batch(0)])


# What is read of batch 3 with the seed 5, and of what is held out.
READ = [
    (
        MaskTokens(MARKS, 0.5),
        [0, 10, 11, 12, 3, 14, 15, 41, 3, 3, 3, 3, 22, 20, 1],
        [0, 10, 3, 12, 3, 3, 15, 3, 17, 9, 20, 21, 3, 23, 1],
    ),
    (
        Spans(MARKS, 0.4, 2.0),
        [0, 99, 14, 15, 98, 17, 9, 20, 21, 22, 23, 1],
        [0, 10, 11, 12, 13, 99, 16, 98, 21, 22, 23, 1],
    ),
    (
        Infill(replace(MARKS, stops=(STOP,)), 0.4, 2.0, permute=True),
        [0, 20, 21, 3, 23, 10, 11, 3, 13, 3, 15, 3, 17, 3, 1],
        [0, 3, 21, 22, 3, 11, 12, 13, 3, 15, 3, 17, 9, 1],
    ),
]


@pytest.mark.parametrize("corruption, trained, held", READ, ids=["masks", "spans", "infill"])
def test_what_a_seed_draws_stays_what_it_is(
    corruption: Corruption, trained: list[int], held: list[int]
) -> None:
    """A run goes on after an update with the text that it would have read."""
    feed = Corrupted(Same(), corruption, 5)
    assert read(feed.batch(3)).tolist() == [trained]
    assert [read(batch).tolist() for batch in feed.evaluation()] == [[held]]


def test_corrupted_fingerprint_sees_the_settings() -> None:
    made = [MaskTokens(MARKS), MaskTokens(MARKS, rate=0.2), Spans(MARKS), Infill(MARKS)]
    assert len({Corrupted(Plain(), c, 0).fingerprint for c in made}) == 4


def test_drawing_depends_on_its_key_alone() -> None:
    def draw(g: Generator) -> float:
        return torch.rand((), generator=g, dtype=torch.float64).item()

    assert draw(drawing(1, 2)) == draw(drawing(1, 2))
    assert (
        len({draw(drawing(1, k)) for k in range(100)} | {draw(drawing(12)), draw(drawing(2, 1))})
        == 102
    )
