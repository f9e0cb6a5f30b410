"""Shards: written whole or not at all, used again only if made of the same, damage always found."""

import json
import multiprocessing
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from regard.data.read import DataError
from regard.data.shards import (
    MANIFEST,
    Column,
    Shards,
    Writer,
    open_shards,
    prepare,
    token_dtype,
)

ROWS = [[1, 2, 3], [], [65535, 0], [7]]
IMAGES = np.arange(24, dtype=np.uint8).reshape(4, 2, 3, 1)


def fill(writer: Writer) -> None:
    writer.extend("ids", ROWS[:2], "uint16")
    writer.extend("ids", ROWS[2:], "uint16")
    writer.array("images", IMAGES)
    writer.array("labels", np.array([3, -100, 1, 0], np.int64))
    writer.notes = {"classes": ["a", "ü"]}


def never(writer: Writer) -> None:
    raise AssertionError("shards that fit were made again")


def check(shards: Shards) -> None:
    assert [shards.columns["ids"][i].tolist() for i in range(4)] == ROWS
    assert shards.columns["ids"].values.dtype == np.uint16
    assert np.array_equal(shards.columns["images"].values, IMAGES)
    assert shards.columns["labels"].values.tolist() == [3, -100, 1, 0]
    assert shards.notes == {"classes": ["a", "ü"]}


def test_shards_give_back_what_was_written(tmp_path: Path) -> None:
    check(prepare(tmp_path / "s", {"a": 1}, fill))
    check(open_shards(tmp_path / "s"))
    assert os.listdir(tmp_path) == ["s"]  # nothing is left beside it


def test_shards_are_used_again_if_made_of_the_same(tmp_path: Path) -> None:
    made = prepare(tmp_path / "s", {"a": 1}, fill)
    check(prepare(tmp_path / "s", {"a": 1}, never))
    other = prepare(tmp_path / "s", {"a": 2}, lambda w: w.extend("ids", [[9]], "uint32"))
    assert other.columns["ids"][0].tolist() == [9] and "images" not in other.columns
    assert other.fingerprint != made.fingerprint
    check(made)  # who still has the old ones may go on


def test_ids_take_two_bytes_where_the_vocabulary_fits() -> None:
    assert token_dtype(65536) == "uint16" and token_dtype(65537) == "uint32"


def test_failed_writing_leaves_what_was_there(tmp_path: Path) -> None:
    prepare(tmp_path / "s", {"a": 1}, fill)

    def broken(writer: Writer) -> None:
        writer.extend("ids", ROWS, "uint16")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        prepare(tmp_path / "s", {"a": 2}, broken)
    assert os.listdir(tmp_path) == ["s"]
    check(prepare(tmp_path / "s", {"a": 1}, never))


def _killed(folder: Path, at: str) -> None:
    """A process that dies while it makes shards: inside `fill`, or before one of the renames."""
    rename = Path.rename

    def dying(self: Path, target: Path) -> Path:
        if at == target.name:
            os._exit(9)
        return rename(self, target)

    Path.rename = dying  # type: ignore[method-assign,assignment]
    prepare(folder, {"a": 2}, lambda w: (fill(w), os._exit(9)) if at == "fill" else fill(w))  # type: ignore[func-returns-value,arg-type]


@pytest.mark.parametrize("at", ["fill", ".s.old", "s"])
def test_killed_writing_leaves_old_shards_or_none(at: str, tmp_path: Path) -> None:
    prepare(tmp_path / "s", {"a": 1}, fill)
    child = multiprocessing.get_context("fork").Process(target=_killed, args=(tmp_path / "s", at))
    child.start()
    child.join()
    assert child.exitcode == 9
    if at != "s":  # between the two renames there are none
        check(open_shards(tmp_path / "s"))
    check(prepare(tmp_path / "s", {"a": 2}, fill))
    assert os.listdir(tmp_path) == ["s"]


def _slow(folder: Path, log: Path) -> None:
    def counted(writer: Writer) -> None:
        with open(log, "a") as stream:
            stream.write("x")
        time.sleep(0.2)
        fill(writer)

    check(prepare(folder, {"a": 1}, counted))


def test_processes_that_start_together_make_shards_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    target = (tmp_path / "in" / "s", tmp_path / "log")
    children = [context.Process(target=_slow, args=target) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "x"


def test_foreign_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match=r"no manifest.json: it was not made whole.* \(rm -r .*s\)"):
        prepare(tmp_path / "s", {"a": 1}, fill)
    assert (tmp_path / "s" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["ids.bin", "ids.ends.bin", "images.bin", "labels.bin"])
@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "gone"])
def test_damaged_file_is_named(name: str, damage: str, tmp_path: Path) -> None:
    prepare(tmp_path / "s", {"a": 1}, fill)
    path = tmp_path / "s" / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 4
    path.write_bytes({"cut": data[:-1], "longer": data + b"\0"}.get(damage, data))
    if damage == "gone":
        path.unlink()
    with pytest.raises(DataError, match=f"{name} .*delete .*s to have it made again"):
        prepare(tmp_path / "s", {"a": 1}, never)
    with pytest.raises(DataError, match=name):
        open_shards(tmp_path / "s")


def test_no_mutation_of_any_file_goes_unseen(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    prepare(folder, {"a": 1}, fill)
    draw = random.Random(0)
    for _ in range(300):
        path = draw.choice(sorted(folder.iterdir()))
        before = path.read_bytes()
        after = bytearray(before)
        for _ in range(draw.randint(1, 3)):
            after[draw.randrange(len(after))] = draw.randrange(256)
        after = after[: draw.choice([len(after), draw.randrange(len(after))])]
        path.write_bytes(after)
        if bytes(after) != before and not _says_the_same(before, bytes(after), path):
            with pytest.raises(DataError, match=path.name):
                open_shards(folder)
        path.write_bytes(before)
        check(open_shards(folder))


def _says_the_same(before: bytes, after: bytes, path: Path) -> bool:
    """White space between the words of a JSON file may change."""
    try:
        return path.name == MANIFEST and json.loads(before) == json.loads(after)
    except ValueError:
        return False


def test_columns_can_be_parted() -> None:
    column = Column.of(ROWS, np.uint32)
    assert column.lengths.tolist() == [3, 0, 2, 1] and len(column) == 4
    assert column.take(np.arange(1, 3)).stream.tolist() == [65535, 0]
    rows = np.array([3, 0, 0])
    picked, copied = column.take(rows), Column.of([ROWS[i] for i in rows], np.uint32)
    assert picked.values is column.values
    assert [picked[i].tolist() for i in range(3)] == [ROWS[i] for i in rows]
    assert picked.fingerprint == copied.fingerprint
    assert picked.take(np.array([1])).fingerprint == Column.of(ROWS[:1], np.uint32).fingerprint
    assert column.take(np.arange(1, 3)).fingerprint == Column.of(ROWS[1:3], np.uint32).fingerprint
    assert column.fingerprint != Column.of([*ROWS[:1], *ROWS[2:], []], np.uint32).fingerprint


def test_columns_are_joined_and_chosen_from_without_a_copy() -> None:
    parts = [ROWS, [[9], [8, 8]], [[], [5]]]
    whole, every = (
        Column.join([Column.of(part) for part in parts]),
        [row for p in parts for row in p],
    )
    assert len(whole) == 8 and whole.lengths.tolist() == list(map(len, every))
    assert whole.fingerprint == Column.of(every).fingerprint
    index = np.array([5, 0, 7, 1, 5])
    chosen, flat = whole.take(index), [x for i in index for x in every[i]]
    assert chosen.stream[np.arange(len(flat))].tolist() == flat
    assert chosen.fingerprint == Column.of([every[i] for i in index]).fingerprint
    shapes = [np.arange(6).reshape(3, 2), np.arange(4).reshape(2, 2)]
    fixed = Column.join([Column(x) for x in shapes]).take(np.array([4, 1]))
    assert fixed.at(np.arange(2)).tolist() == [[2, 3], [2, 3]] and fixed[0].tolist() == [2, 3]
    assert fixed.fingerprint == Column(np.array([[2, 3], [2, 3]])).fingerprint
