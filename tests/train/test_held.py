"""Two laws of data: what is held out is never trained on, and each example is learned once a pass. They hold whatever
mixes, weights, packing, passes, copies and processes do.

Every text here is made of one character of its own, so that any token tells what text it is of, wherever it lies."""

import json
import mmap
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data.config import Data, Loaded, load
from regard.data.feed import IGNORE, PACKS, Base, Batch
from regard.data.held import first_copies
from regard.data.shards import Column
from regard.data.tokens import Coder
from regard.data.train_tokenizer import Recipe, train_tokenizer
from regard.errors import Notice
from regard.text import Tokenizer, needed

LETTERS = [chr(0x4E00 + i) for i in range(60)]
# Task -> the record of a text, with a label that other copies of it may not have.
RECORDS: dict[str, Any] = {
    "lm": lambda x, i: {"text": x},
    "mlm": lambda x, i: {"text": x},
    "classify": lambda x, i: {"text": x, "label": str(i % 2)},
    "tag": lambda x, i: {"words": [x], "tags": [str(i % 2)]},
    "answer": lambda x, i: {"text": x, "second": x, "start": i % 2, "end": 2},
    "seq2seq": lambda x, i: {"source": x, "target": x},
    "prefer": lambda x, i: {"prompt": x, "chosen": x, "rejected": x + x},
}
CODERS: dict[str, Coder] = {}


def coder(task: str) -> Coder:
    if task not in CODERS:
        kind = task if task in ("lm", "seq2seq") else "mlm"
        files = train_tokenizer(["".join(LETTERS)], Recipe("chars", task=kind))
        CODERS[task] = Coder(needed(Tokenizer.from_files(files)))
    return CODERS[task]


def loaded(task: str, sets: list[list[int]], folder: Path, **settings: Any) -> Loaded:
    """`sets` are files of texts, each text a letter that stands in it two or three times."""
    folder.mkdir()
    names = []
    for number, letters in enumerate(sets):
        path = folder / f"{number}.jsonl"
        rows = [RECORDS[task](LETTERS[x] * (2 + x % 2), i) for i, x in enumerate(letters)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        names.append(str(path))
    made = {"rows": 3, **({"length": 6} if task in ("lm", "mlm") else {}), **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        return load(task, Data(tuple(names), **made), coder(task), folder / "shards", 7)


def tokens(batches: list[Batch], ours: Coder) -> Counter[int]:
    """Every token that is read or learned anywhere in the batches, but for special ones."""
    sides = ("ids", "source", "rejected", "rejected_labels")
    found: Counter[int] = Counter()
    for batch in batches:
        tensors = [getattr(batch, side) for side in sides]
        if batch.labels.shape == batch.ids.shape:
            tensors.append(batch.labels)
        for x in tensors:
            found.update([] if x is None else x.flatten().tolist())
    return Counter({i: n for i, n in found.items() if i != IGNORE and i not in ours.reserved})


def passes(feed: Base, count: int, world: int) -> list[list[Batch]]:
    batches = [[feed.batch(k, r, world) for r in range(world)] for k in range(count * feed.epoch)]
    size = feed.epoch
    return [[b for each in batches[p * size : (p + 1) * size] for b in each] for p in range(count)]


sets = st.lists(st.lists(st.integers(0, 19), min_size=4, max_size=12), min_size=1, max_size=3)


@given(
    st.sampled_from(sorted(RECORDS)),
    sets,
    st.sampled_from([0.1, 0.3, 0.5, 0.9]),
    st.sampled_from([(), (1.0, 1.0, 1.0), (3.0, 1.0, 0.3), (1.0, 7.0, 2.0)]),
    st.sampled_from(PACKS),
    st.sampled_from([1, 2, 3]),
)
def test_what_is_held_is_never_trained_on(
    tmp_path_factory: pytest.TempPathFactory, task: str, sets: list[list[int]], held: float,
    weights: tuple[float, ...], pack: str, world: int
) -> None:  # fmt: skip
    # Enough different texts that something is left of each file, and more of them in several files than in one.
    sets = [[*letters, 20 + 4 * i, 21 + 4 * i, 22 + 4 * i] for i, letters in enumerate(sets)]
    settings: dict[str, Any] = {"held": held, "weights": weights[: len(sets)]}
    if task in ("lm", "mlm"):
        settings["pack"] = pack
    made = loaded(task, sets, tmp_path_factory.mktemp("held") / "data", **settings)
    feed, ours = made.feed, coder(task)
    evaluated = tokens(list(feed.evaluation()), ours)
    trained = [tokens(batches, ours) for batches in passes(feed, 3, world)]
    assert evaluated and all(trained)
    assert not evaluated.keys() & set().union(*trained)
    if (task in ("lm", "mlm") and pack == "windows") or world > 1:
        return
    # Each example once a pass, as often as it is there: as `everything` has it.
    assert trained == [tokens(list(feed.everything()), ours)] * 3
    if not weights and (task, pack) != ("lm", "stream"):
        alone = Counter(i for letters in sets for i in letters)
        first = ours.encode([LETTERS[0]])[0][-1]
        assert {i - first for i in evaluated | trained[0]} == alone.keys()
        each = tokens(list(feed.everything()), ours)
        twins = [i for i in alone if each[i + first]]
        assert all(each[i + first] % alone[i] == 0 for i in twins)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("weights", [(), (1.0, 4.0)])
def test_end_of_a_single_text_is_held_whatever_it_is_mixed_with(
    tmp_path: Path, pack: str, weights: tuple[float, ...]
) -> None:
    sides = [LETTERS[:30], LETTERS[30:]][: 2 if weights else 1]
    names = []
    for i, side in enumerate(sides):
        (tmp_path / f"{i}.txt").write_text("".join(side), encoding="utf-8")
        names.append(str(tmp_path / f"{i}.txt"))
    more: dict[str, Any] = {} if pack in ("stream", "windows") else {"overlong": "split"}
    if pack == "none":
        return  # a document a row: a single one cannot be shared out
    data = Data(tuple(names), held=0.2, weights=weights, pack=pack, rows=2, length=5, **more)
    made = load("lm", data, coder("lm"), tmp_path / "shards", 7)
    held = tokens(list(made.feed.evaluation()), coder("lm"))
    trained = [tokens(batches, coder("lm")) for batches in passes(made.feed, 3, 1)]
    assert len(held) >= 5 * len(sides) and not held.keys() & set().union(*trained)


def test_split_of_data_without_copies_is_what_it_was(tmp_path: Path) -> None:
    """Runs go on that were begun before copies were looked for."""
    made = loaded("classify", [list(range(20))], tmp_path / "data", held=0.2)
    first = coder("classify").encode([LETTERS[0]])[0][-1]
    held = {i - first for i in tokens(list(made.feed.evaluation()), coder("classify"))}
    assert held == {2, 7, 12, 17}


def test_copies_are_told_and_all_on_one_side(tmp_path: Path) -> None:
    letters = [*range(10), *range(10), 3, 3, 3]
    rows = [{"text": LETTERS[x] * 2, "label": str(i % 2)} for i, x in enumerate(letters)]
    path = tmp_path / "0.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.warns(Notice, match="13 of 23 examples are copies of others; all copies of one"):
        made = load(
            "classify", Data(str(path), held=0.2, rows=4), coder("classify"), tmp_path / "s"
        )
    assert made.feed.held is not None
    held = tokens(list(made.feed.evaluation()), coder("classify"))
    assert len(held) == 2 and sum(held.values()) >= 8  # two texts, each twice at least


def test_examples_of_valid_that_are_trained_on_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(LETTERS[:9]), encoding="utf-8")
    (tmp_path / "b.txt").write_text("\n".join(LETTERS[6:12]), encoding="utf-8")
    more: dict[str, Any] = {"unit": "line", "rows": 2, "length": 8}
    data = Data(str(tmp_path / "a.txt"), valid=str(tmp_path / "b.txt"), **more)
    with pytest.warns(Notice, match="3 of 6 examples of valid are among those of train too"):
        load("lm", data, coder("lm"), tmp_path / "shards", 0)


def test_copies_are_found_by_the_whole_text(tmp_path: Path) -> None:
    """Long texts that differ in one place are two, wherever it is; pictures too."""
    one = np.arange(1000)
    rows = [one, *(np.where(one == i, -1, one) for i in range(0, 1000, 37)), one, one[:-1]]
    first = first_copies({"ids": Column.of(rows), "labels": Column(np.arange(len(rows)))})
    assert first.tolist() == [*range(len(rows) - 2), 0, len(rows) - 1]
    pictures = np.zeros((4, 5, 5, 1), np.uint8)
    pictures[1, 3, 2] = 1
    pictures[3, 3, 2] = 1
    assert first_copies({"images": Column(pictures)}).tolist() == [0, 1, 0, 1]


def test_choosing_rows_copies_none_of_them(tmp_path: Path) -> None:
    """Held-out shares and mixes are numbers of rows: the tokens stay where they are mapped from disk."""
    sets = [list(range(20)), list(range(20, 40))]
    made = loaded("classify", sets, tmp_path / "data", held=0.2, weights=(1.0, 3.0))
    texts, held = made.feed.texts, made.feed.held.texts  # type: ignore[attr-defined, union-attr]
    assert texts.values is held.values and len(texts.values.parts) == 2
    for whole in texts.values.parts:
        while not isinstance(whole, mmap.mmap):
            whole = whole.base
