"""Batches of text: a function of (seed, k) alone, nothing lost, nothing seen twice, nothing leaked."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.data.corrupt import Corrupted, DrawPrefix
from regard.data.feed import IGNORE, PACKS, Batch, Batching, TextFeed
from regard.data.image_feed import CaptionFeed, ImageFeed
from regard.data.read import DataError
from regard.data.shards import Column
from regard.errors import UsageError
from regard.mask import Causal, Documents
from regard.training.objectives import causal

ROOT = Path(__file__).resolve().parents[2]
PAD, END = 0, 99
packs = pytest.mark.parametrize("pack", PACKS)


def documents(count: int = 40, longest: int = 11) -> list[list[int]]:
    """Documents of different lengths whose tokens tell where they stand: 100 document + place; the last is END."""
    sizes = np.random.default_rng(0).integers(2, longest + 1, count)
    return [[100 * (d + 1) + i for i in range(n - 1)] + [END] for d, n in enumerate(sizes)]


def feed(docs: list[list[int]] | None = None, pack: str = "documents", **more: Any) -> TextFeed:
    settings = {"length": 10, "rows": 4, "seed": 5, "overlong": "split"}
    settings |= {k: more.pop(k) for k in list(more) if k in Batching.__dataclass_fields__}
    batching = Batching(**settings)  # type: ignore[arg-type]
    return TextFeed(Column.of(docs or documents()), batching, pack=pack, pad=PAD, **more)


def same(one: Batch, other: Batch) -> bool:
    pairs = [(getattr(one, n), getattr(other, n)) for n in Batch.__dataclass_fields__]
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def joined(parts: list[Batch]) -> Batch:
    def whole(name: str) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.cat(found)

    return Batch(**{name: whole(name) for name in Batch.__dataclass_fields__})  # type: ignore[arg-type]


def learned(batches: list[Batch]) -> Counter[tuple[int, int]]:
    """(token read, token that must follow), where that counts."""
    return Counter(
        pair
        for b in batches
        for pair in zip(b.ids[b.labels != IGNORE].tolist(), b.labels[b.labels != IGNORE].tolist())
    )


# --- batch k is a function of (seed, k) ---------------------------------------------------------------------------


@packs
def test_batch_depends_on_seed_and_number_alone(pack: str) -> None:
    one, other = feed(pack=pack), feed(pack=pack)
    numbers = [7, 0, 30, 2, 2, 1, 0, 29]
    found = {k: one.batch(k) for k in range(31)}
    assert all(same(other.batch(k), found[k]) for k in numbers)
    torch.manual_seed(9), np.random.seed(9)
    assert same(feed(pack=pack).batch(3), found[3])
    assert not same(feed(pack=pack, seed=6).batch(3), found[3])


def bits() -> str:
    """Fingerprints and contents of some batches of each feed."""
    whole = hashlib.sha256()
    for pack in PACKS:
        made = feed(pack=pack)
        batch = made.batch(17)
        whole.update(made.fingerprint.encode())
        for x in (batch.ids, batch.labels):
            whole.update(x.numpy().tobytes())
    return whole.hexdigest()


def test_batch_is_the_same_in_another_process() -> None:
    script = "from tests.train.test_feed import bits; print(bits())"
    command = [sys.executable, "-c", script]
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == bits()


@packs
def test_ranks_put_together_are_the_batch(pack: str) -> None:
    made = feed(pack=pack)
    for k in (0, 5):
        whole = made.batch(k)
        for world in (2, 3, 4):
            if world <= len(whole.ids):
                assert same(joined([made.batch(k, rank, world) for rank in range(world)]), whole)


def test_rank_without_a_row_counts_nothing() -> None:
    made = feed(rows=2)
    parts = [made.batch(0, rank, 4) for rank in range(4)]
    assert [len(p.ids) for p in parts] == [1, 1, 1, 1]
    assert sum(p.tokens for p in parts) == made.batch(0).tokens
    assert sorted(p.tokens > 0 for p in parts) == [False, False, True, True]


# --- what is learned ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
@pytest.mark.parametrize("pack", ["documents", "none"])
@pytest.mark.parametrize("what", ["all", "prompts", "turns"])
def test_header_counts_the_labels_that_are_learned(what: str, pack: str, overlong: str) -> None:
    docs, draw = documents(), np.random.default_rng(3)
    more: dict[str, Any] = {}
    if what == "prompts":
        more["prompts"] = np.array([draw.integers(0, len(doc)) for doc in docs])
    elif what == "turns":
        more["learned"] = Column.of([draw.integers(0, 2, len(doc)) for doc in docs], np.uint8)
    made = feed(docs, pack, overlong=overlong, **more)
    want = sum(int((batch.labels != IGNORE).sum()) for batch in made.everything())
    total = sum(map(len, docs))
    assert f"{want:,} of {total:,} tokens learned" in made.describe() and want > 0


def test_packed_documents_are_learned_once_and_never_across_a_border() -> None:
    docs = documents()
    want = Counter(pair for doc in docs for pair in pairwise(doc))
    made = feed(docs)
    assert learned(list(made.everything())) == want
    for number in range(3):
        assert learned(a_pass(made, number)) == want


def a_pass(made: TextFeed, number: int) -> list[Batch]:
    return [made.batch(k) for k in range(number * made.epoch, (number + 1) * made.epoch)]


@pytest.mark.parametrize(("sizes", "most"), [((2, 11), 0.1), ((2, 31), 0.1), ((40, 400), 0.35)])
def test_packed_documents_have_other_company_in_every_pass(
    sizes: tuple[int, int], most: float
) -> None:
    """120 documents; where most have a length of their own (up to 360 lengths), full rows are less free to change."""
    drawn = np.random.default_rng(1).integers(*sizes, 120)
    docs = [[1000 * (d + 1) + i for i in range(n)] for d, n in enumerate(drawn.tolist())]
    made = feed(docs, length=sizes[1] + 100)

    def company(number: int) -> set[frozenset[int]]:
        """The documents of each row that has more than one."""
        rows = [row for batch in a_pass(made, number) for row in batch.ids]
        met = [frozenset((row[row != PAD] // 1000).tolist()) for row in rows]
        return {row for row in met if len(row) > 1}

    passes = [company(number) for number in range(4)]
    assert len({sum(len(b.ids) for b in a_pass(made, number)) for number in range(4)}) == 1
    for one, other in pairwise(passes):
        assert len(one & other) < most * len(one)
    # A function of (seed, pass), whatever was asked for before.
    again = feed(docs, length=sizes[1] + 100)
    assert same(again.batch(3 * made.epoch), made.batch(3 * made.epoch))


def test_documents_of_a_row_are_numbered_and_padding_is_apart() -> None:
    for batch in feed().everything():
        assert batch.doc is not None and batch.ids.shape[1] == 10
        real = batch.doc >= 0
        lengths = batch.lengths if batch.lengths is not None else torch.full((len(real),), 10)
        assert torch.equal(real.sum(1), lengths)
        assert (batch.ids[~real] == PAD).all() and (batch.labels[~real] == IGNORE).all()
        owner = torch.where(real, batch.ids // 100, -1)
        for row, doc in zip(owner, batch.doc):
            pairs = {(int(a), int(b)) for a, b in zip(row, doc)}
            assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def test_stream_is_learned_once_a_pass_borders_and_all() -> None:
    docs = documents()
    flat = [i for doc in docs for i in doc]
    made = feed(docs, "stream", rows=3)
    want = Counter(pairwise(flat))
    assert learned(list(made.everything())) == want
    borders = []
    for number in range(4):
        batches = a_pass(made, number)
        # The last tokens too, which no whole row is left for.
        assert learned(batches) == want
        rows = [row for batch in batches for row in batch.ids]
        assert len(rows) == -(-(len(flat) - 1) // 10)
        borders.append({int(row[0]) for row in rows})
    assert len(set(map(frozenset, borders))) == 4


def test_windows_begin_anywhere_and_end_inside() -> None:
    flat = list(range(30))
    made = feed([flat], "windows", rows=64)
    starts = Counter(int(i) for k in range(40) for i in made.batch(k).ids[:, 0])
    assert set(starts) == set(range(30 - 10))  # the last label is token 29
    assert max(starts.values()) < 3 * min(starts.values())  # 128 expected of each: even enough
    batch = made.batch(3)
    assert torch.equal(batch.labels, batch.ids + 1)


def test_document_a_row_is_padded_to_the_longest() -> None:
    docs = documents()
    made = feed(docs, "none", rows=None, tokens=40, multiple=4)
    for batch in [made.batch(k) for k in range(made.epoch)]:
        assert batch.ids.numel() <= 40 and batch.ids.shape[1] % 4 == 0 and batch.doc is None
    want = Counter(pair for doc in docs for pair in pairwise(doc))
    assert learned([made.batch(k) for k in range(made.epoch)]) == want
    assert learned([made.batch(k) for k in range(made.epoch, 2 * made.epoch)]) == want


@packs
def test_labels_without_a_shift_are_the_tokens_themselves(pack: str) -> None:
    for batch in feed(pack=pack, shift=False).everything():
        real = batch.labels != IGNORE
        assert torch.equal(batch.ids[real], batch.labels[real]) and (batch.ids[~real] == PAD).all()


@packs
def test_all_tokens_are_read_where_nothing_is_shifted(pack: str) -> None:
    docs = documents()
    batches = list(feed(docs, pack, shift=False).everything())
    read = Counter(i for b in batches for i in b.labels[b.labels != IGNORE].tolist())
    assert read == Counter(i for doc in docs for i in doc)


def test_prompts_are_read_and_not_learned() -> None:
    docs = documents()
    prompts = np.array([len(doc) // 2 for doc in docs])
    want = Counter(
        pair for doc, p in zip(docs, prompts) for i, pair in enumerate(pairwise(doc)) if i + 1 >= p
    )
    for pack in ("documents", "none"):
        assert learned(list(feed(docs, pack, prompts=prompts).everything())) == want
    (batch,) = feed(docs[:1], "none", prompts=prompts, length=None).everything()
    assert batch.prefix is not None and (batch.prefix == int(prompts[0])).all()
    packed = next(feed(docs, "documents", prompts=prompts).everything())
    assert packed.doc is not None and packed.prefix is not None
    for doc, prefix, labels in zip(packed.doc, packed.prefix, packed.labels):
        for number in range(int(doc.max()) + 1):
            (end,) = set(prefix[doc == number].tolist())
            place = torch.arange(len(doc))
            assert ((labels == IGNORE) == (place < end - 1))[doc == number].all()
    with pytest.raises(UsageError, match="pack = 'stream' knows no prompts"):
        feed(pack="stream", prompts=prompts)


def test_evaluation_is_the_held_feed_in_a_fixed_order() -> None:
    held = feed(documents(7))
    made = feed(held=held)
    once, twice = list(made.evaluation()), list(made.evaluation())
    assert len(once) == len(twice) and all(same(a, b) for a, b in zip(once, twice))
    assert learned(once) == learned(list(held.everything()))
    assert list(feed().evaluation()) == []


# --- no leak through attention ------------------------------------------------------------------------------------


def model() -> Any:
    torch.manual_seed(0)
    small: dict[str, Any] = dict(layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=48)
    return regard.build("llama", vocab=200, **small).double().eval()


def small_documents() -> list[list[int]]:
    return [[(7 * i) % 190 + 1 for i in doc] for doc in documents(12)]


def test_packed_document_has_the_logits_of_the_document_alone() -> None:
    llama, docs = model(), small_documents()
    made, found = feed(docs), 0
    for batch in made.everything():
        assert batch.doc is not None
        with torch.no_grad():
            packed = llama(batch.ids, mask=Causal() & Documents(batch.doc))
            bleeding = llama(batch.ids)
        for row in range(len(batch.ids)):
            for number in range(int(batch.doc[row].max()) + 1):
                here = batch.doc[row] == number
                ids = batch.ids[row, here][None]
                with torch.no_grad():
                    alone = llama(ids)[0]
                # float64: only the rotation by other positions rounds differently
                torch.testing.assert_close(packed[row, here], alone, atol=1e-9, rtol=0)
                if number:
                    assert (bleeding[row, here] - alone).abs().max() > 1e-3
                found += 1
    assert found >= len(docs)


def test_packed_loss_is_the_loss_of_the_documents_alone() -> None:
    llama, docs = model(), small_documents()
    with torch.no_grad():
        apart = [causal(llama, b) for b in feed(docs, "none", rows=1).everything()]
        packed = [causal(llama, b) for b in feed(docs).everything()]
    totals = [sum(float(total) for total, _ in side) for side in (apart, packed)]
    assert sum(int(n) for _, n in apart) == sum(int(n) for _, n in packed)
    assert abs(totals[0] - totals[1]) < 1e-5 * totals[0]  # losses are summed in float32


# --- documents that are too long ----------------------------------------------------------------------------------


def test_overlong_document_is_refused_with_both_numbers() -> None:
    docs = [[1] * 5, [2] * 30, [3] * 14]
    for pack in ("documents", "none"):
        with pytest.raises(DataError) as caught:
            feed(docs, pack, overlong="error")
        said = str(caught.value)
        assert "the longest document has 29 tokens, a row holds 10 (2 of 3 are longer)" in said
        assert "overlong = truncate, drop or split" in said
    feed(docs, "stream", overlong="error")  # a stream has no borders that could be too far apart


@pytest.mark.parametrize(
    "policy, labels", [("drop", 4), ("truncate", 4 + 10 + 10), ("split", 4 + 29 + 13)]
)
def test_overlong_policy_is_obeyed_and_reported(policy: str, labels: int) -> None:
    docs = [[1] * 5, list(range(2, 32)), list(range(40, 54))]
    made = feed(docs, overlong=policy)
    assert sum(b.tokens for b in made.everything()) == labels
    said = {"drop": "dropped", "truncate": "truncated"}.get(policy, policy)
    assert f"2 longer than 10 tokens: {said}" in made.describe()
    kept = learned(list(made.everything()))
    assert all(b == a + 1 or a == b == 1 for a, b in kept)


def test_document_of_exactly_a_row_is_not_too_long() -> None:
    made = feed([list(range(11))], overlong="error")
    (batch,) = made.everything()
    assert batch.ids.tolist() == [list(range(10))] and batch.labels[0, -1] == 10


def test_settings_that_cannot_be_are_one_sentence() -> None:
    for wrong, sentence in (
        ({"pack": "packed"}, "pack = 'packed' is unknown"),
        ({"overlong": "cut"}, "overlong = 'cut' is unknown"),
        ({"length": 0}, "length = 0: give 1 or more"),
        ({"length": None}, "needs the length of a row"),
        ({"rows": None}, "say how large a batch is"),
        ({"seed": -1}, "seed = -1"),
    ):
        with pytest.raises(UsageError, match=sentence):
            feed(**wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no document has a token to learn"):
        feed([[1], [2]])
    assert "1 too short to learn from" in feed([[1], [2, 3]]).describe()
    with pytest.raises(DataError, match="every document is longer than 10 tokens"):
        feed([[1] * 20], overlong="drop")


def test_fingerprint_tells_data_and_settings_apart() -> None:
    base = feed().fingerprint
    others = [feed(seed=6), feed(rows=3), feed(pack="none"), feed(documents(39)), feed(shift=False)]
    others += [feed(held=feed()), feed(prompts=np.ones(40, np.int64))]
    assert len({base, *(f.fingerprint for f in others)}) == 1 + len(others)
    assert feed().fingerprint == base


def test_feeds_know_what_older_versions_called_them() -> None:
    """So that a run which was begun before the order changed can say that it did, and goes on."""
    earlier = {"documents": "663523c6521c", "stream": "28a3108546f9"}
    earlier |= {"windows": "a5b3d4e5bdc6", "none": "5b64cb7c9d69"}
    made = {pack: feed(pack=pack) for pack in PACKS}
    assert {pack: feed.earlier[:12] for pack, feed in made.items()} == earlier
    changed = {pack for pack, feed in made.items() if feed.fingerprint != feed.earlier}
    assert changed == {"documents", "stream"}
    assert Corrupted(made["documents"], DrawPrefix(), 3).earlier[:12] == "03b5f74711c2"

    def pictures(held: ImageFeed | None = None) -> ImageFeed:
        images = Column(np.zeros((5, 2, 2, 1), np.uint8))
        return ImageFeed(images, Column(np.arange(5)), Batching(rows=2), held=held)

    assert pictures().earlier[:12] == "3591e1d47f65"
    assert pictures(pictures()).earlier[:12] == "f3d00b0f8a99"
    captions = CaptionFeed(
        Column(np.zeros((2, 2, 2, 1), np.uint8)), Column(np.arange(2)), Batching(rows=2),
        texts=Column.of([[1], [2, 3]]), start=1, end=2,
    )  # fmt: skip
    assert captions.earlier[:12] == "fd0b0850943a"


def test_short_stream_is_one_padded_row() -> None:
    (batch,) = feed([[1, 2, 3, 4, 5]], "stream").everything()
    assert batch.lengths is not None and batch.lengths.tolist() == [4] and batch.tokens == 4
