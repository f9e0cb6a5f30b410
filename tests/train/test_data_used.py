"""No setting of [data] is passed over: what a task or a format does not use is refused, by name."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.data.config import GONE, KINDS, USED, Data, check_used, load
from regard.data.read import DataError
from regard.errors import UsageError
from regard.training.config import configure

VALUES: dict[str, Any] = {  # another value than the default, for every setting
    "weights": (1.0,),
    "target": "b.txt",
    "valid": "a.txt",
    "valid_target": "b.txt",
    "held": 0.5,
    "format": "text",
    "unit": "line",
    "marker": "<|endoftext|>",
    "columns": {"text": 0},
    "header": True,
    "delimiter": ";",
    "encoding": "latin-1",
    "size": 8,
    "length": 16,
    "rows": 4,
    "tokens": 64,
    "overlong": "drop",
    "multiple": 8,
    "pack": "none",
    "template": "chatml",
    "shift": 1,
    "flip": True,
    "paste": 0.5,
}
ALL = {"valid", "held", "format", "rows", "weights"}
PICTURES = {"size", "shift", "flip", "paste"}
BESIDE = {"target", "valid_target"}
TEXTS = {"header", "columns", "length", "tokens", "overlong", "multiple", "delimiter", "encoding"}
READS = {  # task -> a file it reads, and the settings it uses
    "lm": ("a.txt", TEXTS | BESIDE | {"unit", "marker", "pack"}),
    "mlm": ("a.txt", TEXTS | BESIDE | {"unit", "marker", "pack"}),
    "seq2seq": ("a.tsv", TEXTS | BESIDE),
    "classify": ("a.tsv", TEXTS),
    "tag": ("a.jsonl", TEXTS),
    "answer": ("a.json", TEXTS),
    "image": ("pictures", PICTURES | BESIDE | {"columns"}),
    "segment": ("x.npz", BESIDE | {"columns"}),
    "chat": ("a.jsonl", TEXTS | {"pack", "template"}),
    "prefer": ("a.jsonl", TEXTS | {"template"}),
    "caption": ("pictures", PICTURES - {"paste"} | BESIDE | {"columns"}),
    "draw": ("pictures", PICTURES - {"paste"} | BESIDE | {"columns"}),
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "a.tsv", "a.jsonl", "a.json", "x.npz", "x.npy", "y.npy"):
        (tmp_path / name).write_text("x\ty\n")
    (tmp_path / "pictures").mkdir()


def test_every_setting_is_tried_here() -> None:
    assert VALUES.keys() == {f.name for f in fields(Data)} - {"train"}
    assert READS.keys() == set(KINDS) and USED.keys() <= VALUES.keys()
    for name in VALUES:
        assert getattr(Data("a"), name) != VALUES[name]


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("task", KINDS)
def test_setting_is_used_or_refused_by_name(task: str, name: str) -> None:
    """What is refused for another reason than the task (a format, a clash) has tests of its own."""
    path, used = READS[task]
    data = Data(path, **{name: VALUES[name]})
    try:
        check_used(data, task, f"my-{task}")
    except UsageError as error:
        text = str(error)
        assert name in text and (f"my-{task}" in text or name == "valid_target")
        refused = f"{name} is not used by the task my-{task}; leave it out" in text
        assert refused == (name not in ALL | used)
    else:
        assert name in ALL | used


CLASHES: dict[str, tuple[str, dict[str, Any], str]] = {
    "held": ("lm", {"held": 0.1, "valid": "a.txt"}, "held is not used beside valid"),
    "other side": ("seq2seq", {"train": "a.tsv", "valid_target": "b.txt"}, "name valid too"),
    "unit": ("lm", {"unit": "line", "marker": "x"}, "unit is not used beside marker"),
    "unit beside": ("lm", {"unit": "line", "target": "b.txt"}, "unit is for text files"),
    "unit of a table": ("lm", {"train": "a.tsv", "unit": "line"}, "has tsv here; leave it out"),
    "marker of a table": ("mlm", {"train": "a.jsonl", "marker": "x"}, "has jsonl here"),
    "header of text": ("lm", {"header": False}, "header is for tsv and csv files"),
    "header of JSON": ("classify", {"train": "a.jsonl", "header": True}, "has jsonl here"),
    "columns of text": ("lm", {"columns": {"text": 0}}, "columns are not used by .* for text files"),
    "columns beside": (
        "seq2seq",
        {"target": "b.txt", "columns": {"source": 0}},
        "columns are not used by the task seq2seq for parallel files",
    ),
    "role": (
        "classify",
        {"train": "a.tsv", "columns": {"source": 0}},
        "columns: source is not used by the task classify; it uses text, second, label",
    ),
    "role of a picture": ("image", {"train": "x.npz", "columns": {"text": 0}}, "uses image, label"),
    "size of an array": ("image", {"train": "x.npz", "size": 4}, "size is for images files"),
    "classes of an npz": ("image", {"train": "x.npz", "target": "y.npy"}, "for npy and idx files"),
    "tokens": ("lm", {"rows": 2, "tokens": 9, "length": 4}, "tokens is not used beside rows"),
    "multiple": ("lm", {"multiple": 8, "length": 4}, "multiple is not used beside length"),
    "overlong": ("lm", {"overlong": "drop", "pack": "stream"}, "'stream' cuts rows out of all"),
    "overlong windows": ("mlm", {"overlong": "split", "pack": "windows"}, "'windows' cuts rows"),
    "folder": ("lm", {"train": "pictures"}, "pictures is a folder, and the task lm reads text"),
    "array": ("classify", {"train": "x.npz"}, "x.npz is of format npz, and the task classify reads"),
    "array said": ("lm", {"format": "idx"}, "a.txt is of format idx, and the task lm reads text"),
    "format": ("lm", {"format": "xls"}, "format = 'xls' is unknown"),
    "nothing": ("lm", {"train": ()}, "train names no file"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASHES)
def test_setting_that_another_one_or_the_format_rules_out_is_refused(name: str) -> None:
    task, said, sentence = CLASHES[name]
    with pytest.raises(UsageError, match=sentence):
        check_used(Data(**{"train": "a.txt", **said}), task)


@pytest.mark.parametrize(
    "task, said",
    [
        ("lm", {"train": "a.tsv", "columns": {"text": 0}, "header": False}),
        ("lm", {"train": "a.tsv", "columns": {"source": 0, "target": 1}, "pack": "none"}),
        ("lm", {"pack": "none", "rows": 2, "tokens": 9, "multiple": 8, "length": 4}),
        ("lm", {"pack": "documents", "overlong": "split", "length": 4, "rows": 2}),
        ("seq2seq", {"target": "b.txt", "valid": "a.txt", "valid_target": "b.txt"}),
        ("answer", {"train": "a.jsonl", "columns": {"second": "context"}}),
        ("chat", {"train": "a.json", "columns": {"prompt": "instruction", "response": "output"}}),
        ("image", {"train": "x.npz", "columns": {"image": "pictures"}}),
        ("image", {"train": "x.npy", "target": "y.npy", "shift": 2, "flip": True}),
        ("classify", {"train": "org/set:train", "format": "hub", "columns": {"text": "review"}}),
    ],
)
def test_what_is_used_is_taken(task: str, said: dict[str, Any]) -> None:
    check_used(Data(**{"train": "a.txt", **said}), task)


def test_missing_file_is_named_first() -> None:
    with pytest.raises(DataError, match=r"gone\*.txt does not exist"):
        check_used(Data("gone*.txt"), "lm")


@pytest.mark.parametrize(
    "name, value", [("shift", -1), ("size", 0), ("overlong", "cut"), ("held", -0.1)]
)
def test_value_that_cannot_be_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name} = {value!r}"):
        Data("a.txt", **{name: value})


def test_loading_checks_too(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 2, 2), np.uint8), y=np.array([0, 1, 0, 1]))
    with pytest.raises(UsageError, match="pack is not used by the task image"):
        load("image", Data("x.npz", rows=2, pack="stream"), None, tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize("name", GONE)
def test_setting_of_before_is_passed_over_or_told(name: str) -> None:
    tables: dict[str, Any] = {"task": "image", "model": {"preset": "vit-small"}}
    tables["data"] = {"train": "x.npz", "rows": 2}
    off = {**tables, "data": {**tables["data"], name: 0}}
    assert configure(off) == configure(tables)
    with pytest.raises(UsageError, match=f"data.{name} = 1: .* no longer .*; leave it out"):
        configure(tables, {f"data.{name}": 1})
