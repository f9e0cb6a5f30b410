"""Pairs, labels and pictures: what is read, what must be said, and nothing lost between passes."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.data.feed import IGNORE, UNANSWERED, Base, Batch, Batching, LabelFeed, PairFeed
from regard.data.image_feed import ImageFeed
from regard.data.read import DataError
from regard.data.shards import Column
from regard.errors import UsageError
from regard.training.objectives import seq2seq
from tests.train.test_feed import joined, same

PAD, START, END = 0, 1, 2


def sides(count: int = 60) -> tuple[list[list[int]], list[list[int]]]:
    draw = np.random.default_rng(3)
    lengths = draw.integers(1, 12, (count, 2))
    return tuple(  # type: ignore[return-value]
        [(10 + draw.integers(0, 80, n[side])).tolist() for n in lengths] for side in (0, 1)
    )


def pairs(
    source: list[list[int]] | None = None, target: list[list[int]] | None = None, **more: Any
) -> PairFeed:
    settings = {k: more.pop(k) for k in list(more) if k in Batching.__dataclass_fields__}
    if not {"rows", "tokens"} & set(settings):
        settings["tokens"] = 64
    default = sides()
    columns = [Column.of(given or other) for given, other in zip((source, target), default)]
    return PairFeed(*columns, Batching(**settings), start=START, end=END, pad=PAD, **more)


def a_pass(feed: Base, number: int = 0) -> list[Batch]:
    return [feed.batch(number * feed.epoch + k) for k in range(feed.epoch)]


def rows(x: torch.Tensor, lengths: torch.Tensor | None) -> list[tuple[int, ...]]:
    sizes = [x.shape[1]] * len(x) if lengths is None else lengths.tolist()
    return [tuple(row[:n].tolist()) for row, n in zip(x, sizes)]


# --- pairs --------------------------------------------------------------------------------------------------------


def test_decoder_reads_from_the_start_and_must_say_the_end() -> None:
    feed = pairs([[11, 12, 13], [14]], [[21, 22], [23, 24, 25]], rows=2, around=((7,), (8, 9)))
    (batch,) = feed.everything()
    assert batch.source is not None and batch.source_lengths is not None
    assert batch.source.tolist() == [[7, 11, 12, 13, 8, 9], [7, 14, 8, 9, PAD, PAD]]
    assert batch.source_lengths.tolist() == [6, 4]
    assert batch.ids.tolist() == [[START, 21, 22, PAD], [START, 23, 24, 25]]
    assert batch.labels.tolist() == [[21, 22, END, IGNORE], [23, 24, 25, END]]
    assert batch.lengths is not None and batch.lengths.tolist() == [3, 4]


def test_each_pair_comes_once_a_pass_within_the_budget() -> None:
    source, target = sides()
    want = Counter((tuple(s), (START, *t)) for s, t in zip(source, target))
    feed = pairs(multiple=2)
    orders = []
    for number in range(3):
        batches = a_pass(feed, number)
        for b in batches:
            assert b.source is not None and max(b.source.numel(), b.ids.numel()) <= 64
            assert b.source.shape[1] % 2 == b.ids.shape[1] % 2 == 0
        found = [
            pair
            for b in batches
            for pair in zip(rows(b.source, b.source_lengths), rows(b.ids, b.lengths))  # type: ignore[arg-type]
        ]
        assert Counter(found) == want
        orders.append(found)
    assert orders[0] != orders[1] != orders[2]


def test_batch_of_pairs_depends_on_seed_and_number_alone() -> None:
    feed, numbers = pairs(), [13, 0, 2, 13, 1]
    found = {k: feed.batch(k) for k in range(14)}
    assert all(same(pairs().batch(k), found[k]) for k in numbers)
    assert not same(pairs(seed=1).batch(0), found[0])
    whole = feed.batch(0)
    for world in range(1, len(whole.ids) + 1):
        assert same(joined([feed.batch(0, rank, world) for rank in range(world)]), whole)


def test_padding_changes_no_loss() -> None:
    torch.manual_seed(0)
    small: dict[str, Any] = dict(layers=1, dim=16, heads=2, ffn_dim=16, dropout=0.0)
    model = regard.build("vaswani-base", vocab=90, **small).double().eval()
    with torch.no_grad():
        alone = [seq2seq(model, b) for b in pairs(rows=1).everything()]
        together = [seq2seq(model, b) for b in pairs(multiple=8).everything()]
    totals = [sum(float(total) for total, _ in side) for side in (alone, together)]
    assert sum(int(n) for _, n in alone) == sum(int(n) for _, n in together)
    assert abs(totals[0] - totals[1]) < 1e-5 * totals[0]  # losses are summed in float32


def test_overlong_pairs_are_refused_dropped_or_truncated() -> None:
    source, target = [[11] * 9, [12] * 2, [13] * 2], [[21], [22] * 9, [23] * 2]
    with pytest.raises(DataError, match=r"longest source has 9 tokens, a row holds 5 \(1 of 3"):
        pairs(source, target, length=5)
    with pytest.raises(DataError, match=r"longest target has 10 tokens, a row holds 5"):
        pairs(source[1:], target[1:], length=5)
    with pytest.raises(UsageError, match="a pair cannot be split"):
        pairs(source, target, length=5, overlong="split")
    dropped = pairs(source, target, length=5, overlong="drop")
    (batch,) = dropped.everything()
    assert batch.ids.tolist() == [[START, 23, 23]]
    assert "2 longer than 5 tokens: dropped" in dropped.describe()
    cut = pairs(source, target, length=5, overlong="truncate", around=((), (3,)))
    (batch,) = cut.everything()
    assert batch.source is not None and batch.source[0].tolist() == [11, 11, 11, 11, 3]
    assert batch.labels[1].tolist() == [22] * 5  # it does not end there, so no end is taught
    assert batch.labels[0].tolist() == [21, END, IGNORE, IGNORE, IGNORE]
    with pytest.raises(DataError, match="every pair is longer than 1 tokens"):
        pairs(source, target, length=1, overlong="drop")


def test_sides_must_agree_and_leave_room() -> None:
    with pytest.raises(DataError, match="1 sources and 2 targets"):
        pairs([[1]], [[1], [2]])
    with pytest.raises(UsageError, match="length = 2 leaves no room beside 2 special tokens"):
        pairs(length=2, around=((3,), (4,)))


# --- labels -------------------------------------------------------------------------------------------------------

TEXTS = [[11, 12, 13], [14], [15, 16]]


def labelled(labels: Column, **more: Any) -> LabelFeed:
    settings = {k: more.pop(k) for k in list(more) if k in Batching.__dataclass_fields__}
    batching = Batching(**{"rows": 3, **settings})
    around = ((7,), (8,))
    return LabelFeed(Column.of(TEXTS), labels, batching, pad=PAD, around=around, **more)


def test_text_has_one_label() -> None:
    (batch,) = labelled(Column(np.array([2, 0, 1]))).everything()
    assert batch.ids.tolist() == [[7, 11, 12, 13, 8], [7, 14, 8, PAD, PAD], [7, 15, 16, 8, PAD]]
    assert batch.labels.tolist() == [2, 0, 1] and batch.tokens == 3
    assert batch.lengths is not None and batch.lengths.tolist() == [5, 3, 4]


def test_labels_of_tokens_stand_beside_them() -> None:
    tags = Column.of([[1, IGNORE, 2], [0], [3, 4]])
    (batch,) = labelled(tags).everything()
    assert batch.labels.shape == batch.ids.shape
    no = IGNORE
    assert batch.labels.tolist() == [[no, 1, no, 2, no], [no, 0, no, no, no], [no, 3, 4, no, no]]


def test_spans_move_along_and_are_not_counted_where_cut_off() -> None:
    spans = Column(np.array([[1, 2], [IGNORE, IGNORE], [0, 1]]))
    (batch,) = labelled(spans).everything()
    assert batch.labels.tolist() == [[2, 3], [IGNORE, IGNORE], [1, 2]]
    (batch,) = labelled(spans, length=4, overlong="truncate").everything()
    assert batch.ids[0].tolist() == [7, 11, 12, 8]
    assert batch.labels.tolist() == [[IGNORE, IGNORE], [IGNORE, IGNORE], [1, 2]]


def test_span_of_no_answer_is_the_first_token() -> None:
    spans = Column(np.array([[1, 2], [UNANSWERED, UNANSWERED], [0, 1]]))
    (batch,) = labelled(spans).everything()
    assert batch.labels.tolist() == [[2, 3], [0, 0], [1, 2]]


def test_each_text_comes_once_a_pass_with_its_label() -> None:
    draw = np.random.default_rng(0)
    texts = [(10 + draw.integers(0, 9, n)).tolist() for n in draw.integers(1, 20, 50)]
    labels = Column(np.arange(50))
    feed = LabelFeed(Column.of(texts), labels, Batching(rows=8, tokens=64), pad=PAD)
    for number in range(2):
        found: dict[int, tuple[int, ...]] = {}
        for b in a_pass(feed, number):
            found |= dict(zip(b.labels.tolist(), rows(b.ids, b.lengths)))
        assert found == {i: tuple(text) for i, text in enumerate(texts)}


def test_labels_must_agree_with_texts() -> None:
    with pytest.raises(DataError, match="3 texts and 2 labels"):
        labelled(Column(np.array([0, 1])))
    with pytest.raises(UsageError, match="a labelled text cannot be split"):
        labelled(Column(np.array([0, 1, 2])), overlong="split")
    with pytest.raises(DataError, match="longest text has 5 tokens, a row holds 4"):
        labelled(Column(np.array([0, 1, 2])), length=4)


# --- pictures -----------------------------------------------------------------------------------------------------

PICTURES = np.random.default_rng(0).integers(1, 256, (9, 4, 6, 3), dtype=np.uint8)


def images(**more: Any) -> ImageFeed:
    labels = Column(np.arange(9))
    return ImageFeed(Column(PICTURES), labels, Batching(rows=4, seed=2), **more)


def test_pictures_are_scaled_channels_first_once_a_pass() -> None:
    feed = images(mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 1.0))
    x = torch.cat([feed.batch(k).ids for k in range(3)])[:9]
    y = torch.cat([feed.batch(k).labels for k in range(3)])[:9]
    assert sorted(y.tolist()) == list(range(9)) and x.shape == (9, 3, 4, 6)
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.5, 0.4, 0.3), (0.5, 0.25, 1.0)))
    want = (torch.from_numpy(PICTURES).permute(0, 3, 1, 2)[y] / 255 - mean) / std
    torch.testing.assert_close(x, want)  # float32, one rounding a step
    assert torch.equal(torch.cat([b.labels for b in feed.everything()]), torch.arange(9))


def test_changed_pictures_are_moved_or_mirrored_copies() -> None:
    feed = images(shift=1, flip=True, mean=(0.0,), std=(1.0,))
    plain = {}
    for i in range(9):
        wide = np.pad(PICTURES[i], ((1, 1), (1, 1), (0, 0)))
        plain[i] = {
            moved.tobytes(): (down, right, mirrored)
            for down in range(3)
            for right in range(3)
            for mirrored in (False, True)
            for moved in [wide[down : down + 4, right : right + 6][:, :: -1 if mirrored else 1]]
        }
    seen = set()
    for k in range(60):
        batch = feed.batch(k)
        back = (batch.ids * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        seen |= {plain[y][x.tobytes()] for x, y in zip(back, batch.labels.tolist())}
    assert len(seen) == 18  # every change occurs, and there are no others
    still = next(feed.everything())
    assert torch.equal((still.ids[0] * 255).round(), torch.from_numpy(PICTURES[0]).permute(2, 0, 1))


def test_changes_depend_on_seed_and_number_alone_whatever_the_rank() -> None:
    one, other = images(shift=2, flip=True), images(shift=2, flip=True)
    for k in (5, 0, 3):
        whole = one.batch(k)
        assert same(other.batch(k), whole)
        world = min(3, len(whole.ids))
        assert same(joined([other.batch(k, r, world) for r in range(world)]), whole)


def test_pictures_need_a_number_of_rows_and_labels() -> None:
    with pytest.raises(UsageError, match="counted in rows"):
        ImageFeed(Column(PICTURES), Column(np.arange(9)), Batching(tokens=9))
    with pytest.raises(DataError, match="9 pictures and 8 labels"):
        ImageFeed(Column(PICTURES), Column(np.arange(8)), Batching(rows=9))


@pytest.mark.parametrize(
    "make", [pairs, images, lambda **m: labelled(Column(np.array([0, 1, 1])), **m)]
)
def test_evaluation_and_fingerprint_see_the_held_feed(make: Any) -> None:
    feed = make(held=make())
    once, twice = list(feed.evaluation()), list(feed.evaluation())
    assert once and len(once) == len(twice) and all(map(same, once, twice))
    assert feed.fingerprint != make().fingerprint == make().fingerprint
    assert list(make().evaluation()) == [] and "batches a pass" in feed.describe()


def test_pieces_of_the_next_picture_are_pasted_and_weighed_by_their_area() -> None:
    shade = np.arange(50, dtype=np.uint8) * 5
    pictures = np.broadcast_to(shade[:, None, None, None], (50, 12, 10, 1)).copy()
    labels = np.arange(50)
    batching = Batching(rows=50, seed=3)

    def feed(**more: Any) -> ImageFeed:
        return ImageFeed(Column(pictures), Column(labels), batching, paste=0.6, **more)

    made = feed(held=feed()).batch(1)
    assert made.pasted_labels is not None and made.pasted_area is not None
    assert made.pasted_labels.equal(made.labels.roll(-1))
    found = (
        (made.ids[:, 0] + 1) * 0.5 * 255 / 5
    ).round()  # whose each pixel is: shade n is picture n's
    mine = (found == made.labels[:, None, None]).float().mean((1, 2))
    theirs = (found == made.pasted_labels[:, None, None]).float().mean((1, 2))
    torch.testing.assert_close(mine + theirs, torch.ones(50))
    torch.testing.assert_close(theirs, made.pasted_area)
    assert (
        20 < (made.pasted_area > 0).sum() < 40
        and 0.2 < made.pasted_area[made.pasted_area > 0].mean() < 0.6
    )
    assert all(b.pasted_labels is None for b in feed(held=feed()).evaluation())
    thirds = [feed().batch(1, rank, 3) for rank in range(3)]
    assert same(joined(thirds), feed().batch(1))
    with pytest.raises(UsageError, match="paste = 2.0: give 0 to 1"):
        ImageFeed(Column(pictures), Column(labels), batching, paste=2.0)
