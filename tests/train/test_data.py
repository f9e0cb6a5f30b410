"""From files to feeds: every task, what is counted, what is used again, what is refused."""

import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.config import from_dict
from regard.data import tokens
from regard.data.config import Data, Loaded, load
from regard.data.feed import IGNORE
from regard.data.read import DataError, Source
from regard.data.shards import read_manifest, sha256
from regard.data.tokens import Coder
from regard.data.train_tokenizer import Recipe, train_tokenizer
from regard.errors import Notice, UsageError
from regard.text import Tokenizer, needed

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,?ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789\n"


def coder(task: str, kind: str = "chars") -> Coder:
    """Characters are ids in order, after the special tokens."""
    files = train_tokenizer([ALPHABET], Recipe(kind, task=task, vocab=300))
    return Coder(needed(Tokenizer.from_files(files)))


def put(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def text_of(coder: Coder, ids: Any) -> str:
    return "".join(coder.tokens([int(i) for i in ids]))


class Bench:
    """A folder with files, and the shards made of them."""

    def __init__(self, folder: Path):
        self.folder = folder

    def load(self, task: str, coder: Coder | None, seed: int = 0, **settings: Any) -> Loaded:
        return load(task, Data(**settings), coder, self.folder / "shards", seed)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# --- tasks --------------------------------------------------------------------------------------------------------


def test_language_model_gets_documents_with_their_ends(bench: Bench, tmp_path: Path) -> None:
    ours = coder("lm")
    path = put(tmp_path / "a.txt", "one\n\ntwo\nthree\n")
    loaded = bench.load("lm", ours, train=path, unit="line", length=8, rows=9)
    (batch,) = loaded.feed.everything()  # type: ignore[attr-defined]
    rows = {text_of(ours, row[row != IGNORE]) for row in batch.labels}
    assert rows == {"hree<|endoftext|>ne<|endoftext|>", "wo<|endoftext|>"}
    assert loaded.notes["records"] == 4 and loaded.notes["empty"] == 1
    assert loaded.notes["tokens"] == 11


def test_pairs_for_a_language_model_are_learned_from_the_answer_on(
    bench: Bench, tmp_path: Path
) -> None:
    ours = coder("lm")
    left, right = put(tmp_path / "q", "ab?\ncd?\n"), put(tmp_path / "a", "x\nyz\n")
    loaded = bench.load("lm", ours, train=left, target=right, pack="none", rows=2)
    (batch,) = loaded.feed.everything()  # type: ignore[attr-defined]
    said = [text_of(ours, row[row != IGNORE]) for row in batch.labels]
    assert said == ["x<|endoftext|>", "yz<|endoftext|>"]
    assert [text_of(ours, row[:4]) for row in batch.ids] == ["ab?x", "cd?y"]
    assert batch.prefix is not None and (batch.prefix[batch.labels != IGNORE] == 3).all()


def test_masked_model_gets_whole_texts_unshifted(bench: Bench, tmp_path: Path) -> None:
    ours = coder("mlm")
    path = put(tmp_path / "a.txt", "one\ntwo\n")
    loaded = bench.load("mlm", ours, train=path, unit="line", pack="none", rows=2)
    (batch,) = loaded.feed.everything()  # type: ignore[attr-defined]
    assert text_of(ours, batch.ids[0]) == "<s>one</s>" and batch.labels.equal(batch.ids)


def test_translation_gets_both_sides(bench: Bench, tmp_path: Path) -> None:
    ours = coder("seq2seq")
    path = put(tmp_path / "a.tsv", "ab\txyz\n\tlost\ncd\tw\n")
    columns = {"source": 0, "target": 1}
    loaded = bench.load("seq2seq", ours, train=path, columns=columns, rows=2)
    (batch,) = loaded.feed.everything()  # type: ignore[attr-defined]
    assert batch.source is not None
    assert [text_of(ours, row) for row in batch.source] == ["ab</s>", "cd</s>"]
    assert text_of(ours, batch.ids[0]) == "<s>xyz" and text_of(ours, batch.labels[0]) == "xyz</s>"
    assert loaded.notes["records"] == 3 and loaded.notes["empty"] == 1


def test_classes_are_sorted_and_known_to_the_held_data(bench: Bench, tmp_path: Path) -> None:
    ours = coder("mlm")
    path = put(tmp_path / "a.csv", "text,label\nab,pos\ncd,neg\nef,pos\n")
    valid = put(tmp_path / "v.csv", "text,label\nxy,pos\n")
    loaded = bench.load("classify", ours, train=path, valid=valid, rows=9)
    assert loaded.classes == ["neg", "pos"]
    (batch,) = loaded.feed.everything()  # type: ignore[attr-defined]
    assert batch.labels.tolist() == [1, 0, 1] and text_of(ours, batch.ids[0]) == "<s>ab</s>"
    (held,) = loaded.feed.evaluation()
    assert held.labels.tolist() == [1] and text_of(ours, held.ids[0]) == "<s>xy</s>"
    numbers = put(tmp_path / "n.tsv", "10\ta\n9\tb\n")
    columns = {"label": 0, "text": 1}
    assert bench.load("classify", ours, train=numbers, columns=columns, rows=1).classes == [
        "9",
        "10",
    ]


def test_second_text_stands_behind_the_separator(bench: Bench, tmp_path: Path) -> None:
    ours = coder("mlm")
    path = put(tmp_path / "a.tsv", "0\tab\txy\n1\tcd\tzw\n")
    columns = {"label": 0, "text": 1, "second": 2}
    loaded = bench.load("classify", ours, train=path, columns=columns, rows=2)
    (batch,) = loaded.feed.everything()  # type: ignore[attr-defined]
    assert text_of(ours, batch.ids[0]) == "<s>ab</s>xy</s>"


@pytest.mark.parametrize("kind", ["chars", "bpe"])
def test_tag_of_a_word_stands_at_its_first_token(kind: str, bench: Bench, tmp_path: Path) -> None:
    ours = coder("mlm", kind)
    rows = [{"words": ["ab", "c", "de"], "tags": ["B", "O", "B"]}, {"words": ["f"], "tags": ["O"]}]
    path = put(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    loaded = bench.load("tag", ours, train=path, rows=2)
    assert loaded.classes == ["B", "O"]
    (batch,) = loaded.feed.everything()  # type: ignore[attr-defined]
    for ids, labels, row in zip(batch.ids, batch.labels, rows):
        counted = [
            (t.strip(), loaded.classes[y])
            for t, y in zip(ours.tokens(ids.tolist()), labels)
            if y >= 0
        ]
        assert [tag for _, tag in counted] == row["tags"]
        assert all(word.startswith(token) for (token, _), word in zip(counted, row["words"]))


def test_answer_is_a_span_of_tokens(bench: Bench, tmp_path: Path) -> None:
    ours = coder("mlm")
    asked = [
        {"text": "who?", "second": "it was Ann.", "start": 7, "end": 10},
        {"text": "why?", "second": "no.", "start": 50, "end": 60},
        {"text": "how?", "second": "it was Ann.", "start": None, "end": None},
    ]
    path = put(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in asked))
    loaded = bench.load("answer", ours, train=path, rows=3)
    (batch,) = loaded.feed.everything()  # type: ignore[attr-defined]
    found = {}
    for ids, (first, last) in zip(batch.ids, batch.labels.tolist()):
        text = text_of(ours, ids)
        found[text[3:7]] = text_of(ours, ids[first : last + 1]) if first >= 0 else None
    assert found == {"who?": "Ann", "why?": None, "how?": "<s>"}


@pytest.mark.parametrize("start", ["here", None])
def test_answer_that_begins_nowhere_is_told(start: Any, bench: Bench, tmp_path: Path) -> None:
    row = {"text": "who?", "second": "Ann.", "start": start, "end": 3}
    with pytest.raises(DataError, match="start"):
        bench.load("answer", coder("mlm"), train=put(tmp_path / "a.jsonl", json.dumps(row)), rows=2)


def test_pictures_need_no_tokenizer(bench: Bench, tmp_path: Path) -> None:
    x = np.arange(5 * 4, dtype=np.uint8).reshape(5, 2, 2)
    np.savez(tmp_path / "a.npz", x=x, y=np.array(["b", "a", "b", "b", "a"]))
    loaded = bench.load("image", None, train=str(tmp_path / "a.npz"), rows=5, held=0.2)
    assert loaded.classes == ["a", "b"]
    (held,) = loaded.feed.evaluation()
    assert len(held.ids) == 1 and loaded.feed.batch(0).ids.shape == (4, 1, 2, 2)


# --- holding out --------------------------------------------------------------------------------------------------


def test_held_share_of_one_text_is_its_end(bench: Bench, tmp_path: Path) -> None:
    ours = coder("lm")
    path = put(tmp_path / "a.txt", ALPHABET)
    loaded = bench.load("lm", ours, train=path, held=0.25, pack="stream", length=4, rows=1)
    feed, at = loaded.feed, int((len(ALPHABET) + 1) * 0.75)  # the end token counts
    assert text_of(ours, feed.values) == ALPHABET[:at]  # type: ignore[attr-defined]
    labels = [b.labels[b.labels != IGNORE] for b in feed.evaluation()]
    assert "".join(text_of(ours, row) for row in labels) == ALPHABET[at + 1 :] + "<|endoftext|>"


@pytest.mark.parametrize("task", ["lm", "seq2seq"])
def test_held_examples_are_not_trained_on(task: str, bench: Bench, tmp_path: Path) -> None:
    ours = coder(task)
    path = put(tmp_path / "a.tsv", "".join(f"{c}\t{c}\n" for c in ALPHABET[:20]))
    columns = {"lm": {"text": 0}, "seq2seq": {"source": 0, "target": 1}}[task]
    loaded = bench.load(task, ours, train=path, columns=columns, held=0.2, length=2, rows=4)
    name = "ids" if task == "lm" else "source"
    ends = {ours.end, ours.pad}
    train, held = (
        {i for b in side for i in getattr(b, name).flatten().tolist()} - ends
        for side in (loaded.feed.everything(), loaded.feed.evaluation())  # type: ignore[attr-defined]
    )
    assert len(train) == 16 and len(held) == 4 and not train & held


# --- using shards again -------------------------------------------------------------------------------------------


def test_changed_data_settings_or_tokenizer_change_the_fingerprint(
    bench: Bench, tmp_path: Path
) -> None:
    ours = coder("lm")
    path = put(tmp_path / "a.txt", "one\ntwo\n")
    settings: dict[str, Any] = dict(train=path, length=8, rows=2)
    base = bench.load("lm", ours, **settings).feed.fingerprint
    assert bench.load("lm", ours, **settings).feed.fingerprint == base
    found = {base}
    found.add(bench.load("lm", ours, **settings, unit="line").feed.fingerprint)
    found.add(bench.load("lm", coder("lm", "bytes"), **settings).feed.fingerprint)
    found.add(bench.load("lm", ours, seed=1, **settings).feed.fingerprint)
    put(tmp_path / "a.txt", "one\nTwo\n")
    found.add(bench.load("lm", ours, **settings).feed.fingerprint)
    assert len(found) == 5
    put(tmp_path / "a.txt", "one\ntwo\n")
    moved = (tmp_path / "a.txt").rename(tmp_path / "b.txt")  # the name is no part of the data
    again = bench.load("lm", ours, **{**settings, "train": str(moved)})
    assert again.feed.fingerprint == base


def grown(path: Path) -> None:
    path.write_text(path.read_text()[:-1] + "more\n")


def shortened(path: Path) -> None:
    path.write_text(path.read_text()[:-3])


def replaced(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_text(path.read_text().swapcase())
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.rename(path)


def and_back(path: Path) -> None:
    """Other bytes while it is read, and the old ones again afterwards."""
    old = path.read_text()
    path.write_text(old.upper())
    LATER.append(lambda: path.write_text(old))


LATER: list[Any] = []


@pytest.mark.parametrize("change", [grown, shortened, replaced, and_back])
@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("task", ["lm", "seq2seq"])
def test_file_that_changes_while_it_is_read_makes_no_shards(
    task: str, when: str, change: Any, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash in a manifest is of the bytes that were read: after it was taken and before a file is read, while it is
    read, or before the manifest is written."""
    lines = "".join(f"line {i}\n" for i in range(9))
    train, beside = (put(tmp_path / name, lines) for name in ("a.txt", "b.txt"))
    settings: dict[str, Any] = {"train": train, "unit": "line", "length": 16, "rows": 2}
    if task == "seq2seq":
        settings = {"train": train, "target": beside, "rows": 2}
    changing, plain = Path(beside if task == "seq2seq" else train), tokens.records

    def records(source: Source, roles: Any, long: bool = False) -> Iterator[Any]:
        change(changing) if when == "before" else None
        for i, record in enumerate(plain(source, roles, long)):
            yield record
            change(changing) if (when, i) == ("between", 3) else None
        change(changing) if when == "after" else None
        while LATER:
            LATER.pop()()

    ours = coder(task)
    with monkeypatch.context() as patched:
        patched.setattr(tokens, "records", records)
        with pytest.raises(DataError, match=f"{changing.name} changed while it was read"):
            bench.load(task, ours, **settings)
    assert not (bench.folder / "shards" / "train").exists()
    bench.load(task, ours, **settings)
    made_of = read_manifest(bench.folder / "shards" / "train")["made_of"]
    assert made_of["beside" if task == "seq2seq" else "sources"] == [sha256(changing)]


def test_end_token_that_texts_spell_is_told(bench: Bench, tmp_path: Path) -> None:
    """Between stories, most likely; the marker makes ends of them."""
    story = put(tmp_path / "a.txt", "one<|endoftext|>two<|endoftext|>three")
    settings: dict[str, Any] = {"train": story, "length": 60, "rows": 2}
    ours = coder("lm", "bpe")
    for _ in range(2):  # shards that are used again say it too
        with pytest.warns(Notice, match=r"spell <\|endoftext\|>.* 2 times.* marker = '<\|endofte"):
            loaded = bench.load("lm", ours, **settings)
    assert loaded.notes["spelled"] == 2 and loaded.notes["records"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = bench.load("lm", ours, marker="<|endoftext|>", **settings)
    assert loaded.notes["records"] == 3 and "spelled" not in loaded.notes


@pytest.mark.parametrize(
    ("task", "row", "sentence"),
    [
        ("lm", {"text": None}, "text must be text, got null"),
        ("lm", {"text": 3}, "text must be text, got 3"),
        ("seq2seq", {"source": "a", "target": None}, "target must be text, got null"),
        ("classify", {"text": None, "label": "x"}, "text must be text, got null"),
        ("classify", {"text": "a", "label": 1.5}, "a label must be a name or a whole number, got 1.5"),
        ("classify", {"text": "a", "label": None}, "a label must be a name or a whole number, got null"),
        ("tag", {"words": ["a"], "tags": [0.5]}, "a label must be a name or a whole number, got 0.5"),
        ("tag", {"words": ["a"], "tags": []}, "words and tags must be lists of one length"),
        ("answer", {"text": "a", "second": None, "start": 0, "end": 1}, "second must be text, got null"),
        ("answer", {"text": "a", "second": "b", "start": "x", "end": 1}, "start and end of an answer"),
        ("prefer", {"prompt": "a", "chosen": "", "rejected": "b"}, "chosen is empty"),
        ("chat", {"messages": []}, "messages must be a list"),
    ],
)  # fmt: skip
def test_value_that_cannot_be_is_named_with_its_file_and_line(
    task: str, row: dict[str, Any], sentence: str, bench: Bench, tmp_path: Path
) -> None:
    good: dict[str, Any] = {
        "lm": [{"text": "a"}], "seq2seq": [{"source": "a", "target": "b"}],
        "classify": [{"text": "a", "label": "x"}, {"text": "a", "label": "y"}],
        "tag": [{"words": ["a", "b"], "tags": ["x", "y"]}],
        "answer": [{"text": "a", "second": "b", "start": 0, "end": 1}],
        "prefer": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
    }  # fmt: skip
    rows = [json.dumps(x) for x in (*good.get(task, []), row)]
    path = put(tmp_path / "a.jsonl", "\n\n".join(rows))
    settings: dict[str, Any] = {"length": 8} if task in ("lm", "chat") else {}
    kind = "mlm" if task in ("classify", "tag", "answer") else "seq2seq"
    with pytest.raises(DataError, match=f"^line {2 * len(rows) - 1} of .*a.jsonl: {sentence}"):
        bench.load(task, coder(kind), train=path, rows=2, **settings)


def test_file_that_is_named_twice_is_told(bench: Bench, tmp_path: Path) -> None:
    path = put(tmp_path / "a.txt", "one\ntwo\n")
    settings: dict[str, Any] = {"unit": "line", "length": 8, "rows": 2}
    with pytest.warns(Notice, match="a.txt is named 2 times in train, and its examples count"):
        bench.load("lm", coder("lm"), train=(path, str(tmp_path / "*.txt")), **settings)
    # Two translations of one file are not the same twice.
    other = put(tmp_path / "b.txt", "un\ndeux\n")
    sides: dict[str, Any] = {"train": (path, path), "target": (path, other), "rows": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bench.load("seq2seq", coder("seq2seq"), **sides)


def test_table_of_a_config_file_is_read_strictly(tmp_path: Path) -> None:
    table = {"train": "a.tsv", "columns": {"text": 1, "label": 0}, "held": 0.1, "rows": 8}
    data = from_dict(Data, table, "data").under(tmp_path)
    assert data.source().paths == (str(tmp_path / "a.tsv"),) and data.batching(3).seed == 3
    assert data.source().column("text") == "1"
    several = from_dict(Data, {"train": ["a", "b"], "rows": 1}, "data")
    assert several.source().paths == ("a", "b")
    with pytest.raises(UsageError, match=r"data.overlng is not a setting of Data"):
        from_dict(Data, {**table, "overlng": "drop"}, "data")


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task, name, text, sentence",
    [
        ("classify", "a.csv", "text,label\na,x\nb,x\n", "every label is 'x'; give data with two"),
        ("classify", "a.jsonl", '{"text": 3, "label": 1}\n{"text": "a", "label": 2}\n', "line 1 .*: text must be tex"),
        ("classify", "a.jsonl", '{"text": "a", "label": 1.5}\n', "label must be a name .* 1.5"),
        ("tag", "a.jsonl", '{"words": ["a"], "tags": ["x", "y"]}\n', "lists of one length"),
        ("lm", "a.txt", "\n\n", "every example is empty"),
        ("lm", "a.txt", "", "a.txt is empty"),
        ("seq2seq", "a.txt", "x", "plain text, which has no columns, but source, target"),
        ("talk", "a.txt", "x", "task = 'talk' is unknown"),
    ],
)  # fmt: skip
def test_mistake_is_one_sentence(
    task: str, name: str, text: str, sentence: str, bench: Bench, tmp_path: Path
) -> None:
    path = put(tmp_path / name, text)
    more = {"unit": "line"} if task == "lm" else {}
    with pytest.raises(UsageError, match=sentence):
        bench.load(task, coder("mlm"), train=path, rows=1, length=9, **more)
    assert not (tmp_path / "shards" / "train").exists()


def test_label_that_training_data_lack_is_named(bench: Bench, tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", "text,label\na,x\nb,y\n")
    valid = put(tmp_path / "v.csv", "text,label\na,z\n")
    with pytest.raises(DataError, match="label 'z' is not among .*: x, y"):
        bench.load("classify", coder("mlm"), train=path, valid=valid, rows=1)


def test_other_mistakes_are_one_sentence(bench: Bench, tmp_path: Path) -> None:
    path = put(tmp_path / "a.txt", "x")
    with pytest.raises(UsageError, match="needs a tokenizer"):
        bench.load("lm", None, train=path, rows=1, length=2)
    with pytest.raises(UsageError, match="held = 1.5"):
        bench.load("lm", coder("lm"), train=path, held=1.5)
    pair = put(tmp_path / "b.tsv", "a\tb\n")
    columns = {"source": 0, "target": 1}
    with pytest.raises(UsageError, match="an end token"):
        bench.load("seq2seq", coder("mlm"), train=pair, columns=columns, rows=1)


# --- real data ----------------------------------------------------------------------------------------------------


def test_multi30k_is_ready_in_seconds(bench: Bench, shared: Path) -> None:
    names = {side: str(shared / "multi30k" / f"train.{side}.xz") for side in ("en", "de")}
    ours = coder("seq2seq", "bytes")  # the slowest to cut: 1.8 million tokens a side
    start = time.perf_counter()
    loaded = bench.load("seq2seq", ours, train=names["en"], target=names["de"], tokens=16384)
    made = time.perf_counter() - start
    start, rows = time.perf_counter(), 0
    for k in range(20):
        rows += len(loaded.feed.batch(k).ids)
    assert loaded.notes["records"] == 29_000 and loaded.notes["empty"] == 0
    assert made < 60  # about 3 s on a free core; a slow machine with other work must pass too
    assert (time.perf_counter() - start) / rows < 1e-3  # about 5 us a row


def test_tinyshakespeare_is_split_as_is_customary(bench: Bench, shared: Path) -> None:
    path = str(shared / "lm" / "tinyshakespeare.txt.xz")
    settings: dict[str, Any] = dict(train=path, held=0.1, pack="windows", length=256, rows=64)
    characters = Recipe("chars", special={"unk": "<unk>"})
    files = train_tokenizer([ALPHABET + "!$&'-:;3"], characters)
    ours = Coder(needed(Tokenizer.from_files(files)))
    loaded = bench.load("lm", ours, **settings)
    assert len(loaded.feed.values) == 1_003_854  # type: ignore[attr-defined]
    held = sum(b.tokens for b in loaded.feed.evaluation())
    assert held == 111_540 - 1  # the first has no label
    assert loaded.notes["unknown"] == 0
