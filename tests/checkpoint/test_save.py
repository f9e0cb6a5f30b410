"""Saving is whole or not at all: a save that fails leaves the old folder as it was and nothing beside it."""

import errno
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.checkpoint import save, store
from regard.errors import UsageError
from tests.checkpoint.spoil import SIZES

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}  # fmt: skip


def other() -> regard.Model:
    """A model unlike the one in the folder."""
    torch.manual_seed(1)
    return regard.build("gpt2", **SIZES | {"layers": 1})


def fails(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, error: BaseException, at: int = 1
) -> None:
    """The call number `at` of a function raises; the others work."""
    real, calls = getattr(where, name), iter(range(1, 1000))

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(where, name, fail)


FULL = OSError(errno.ENOSPC, "No space left on device")
FAILURES = [
    (store, "_write_file", FULL, 1),
    (store, "_write_file", FULL, 2),  # the second shard
    (store, "write_json", FULL, 1),
    (store, "write_json", FULL, 2),  # the index
    (os, "fsync", OSError(errno.EIO, "Input/output error"), 3),
    (store.shutil, "copy2", FULL, 1),  # a file that was there before
    (Path, "rename", OSError(errno.EACCES, "Permission denied"), 1),  # the old folder aside
    (Path, "rename", OSError(errno.EACCES, "Permission denied"), 2),  # the new one in its place
]


@pytest.mark.parametrize("where, name, error, at", FAILURES)
def test_failed_save_leaves_the_old_folder_whole(
    where: Any, name: str, error: OSError, at: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "notes.md").write_text("mine")
    before, model = snapshot(folder), other()
    fails(monkeypatch, where, name, error, at)
    with pytest.raises(UsageError, match="it is as it was") as caught:
        save(model, folder, shard_bytes=4000)
    monkeypatch.undo()
    assert str(error.args[-1]) in str(caught.value)
    assert snapshot(folder) == before
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_interrupted_save_leaves_the_old_folder_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(folder)
    fails(monkeypatch, store, "_write_file", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        other().save(folder)
    assert snapshot(folder) == before
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_failed_first_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, store, "_write_file", FULL)
    with pytest.raises(UsageError, match="No space left"):
        other().save(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_save_onto_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(UsageError, match="taken exists and is not a model folder; choose another"):
        other().save(tmp_path / "taken")
    assert snapshot(tmp_path) == {"taken": b"mine"}


def test_save_onto_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("mine")
    with pytest.raises(UsageError, match="thesis exists and is not a model folder; choose another"):
        other().save(tmp_path / "thesis")
    assert snapshot(tmp_path) == {"thesis/chapter1.txt": b"mine"}


def test_save_into_an_empty_folder_is_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert regard.load(other().save(tmp_path / "empty")).config.tower.layers == 1


def test_save_makes_the_folders_above(tmp_path: Path) -> None:
    assert regard.load(other().save(tmp_path / "a" / "b" / "c")).config.tower.layers == 1


def test_save_below_a_file_says_why_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="cannot write .*file"):
        other().save(tmp_path / "file" / "model")
    assert snapshot(tmp_path) == {"file": b"mine"}


def test_save_where_nothing_may_be_written_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, Path, "mkdir", PermissionError(errno.EACCES, "Permission denied"), 1)
    with pytest.raises(UsageError, match="cannot write .*model: Permission denied"):
        other().save(tmp_path / "model")


def test_save_over_a_model_keeps_files_that_are_not_its_own(folder: Path) -> None:
    mine = {"notes.md": b"mine", "logs/run.txt": b"loss", "model-ema.safetensors": b"x"}
    for name, content in mine.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    other().save(folder)
    after = snapshot(folder)
    assert {name: after.get(name) for name in mine} == mine
    assert regard.load(folder).config.tower.layers == 1


def test_save_over_shards_removes_them(folder: Path) -> None:
    save(other(), folder, shard_bytes=4000)
    assert (folder / INDEX).exists() and not (folder / WEIGHTS).exists()
    other().save(folder)
    assert sorted(snapshot(folder)) == ["config.json", WEIGHTS]


def test_save_of_fewer_shards_leaves_no_old_one(folder: Path) -> None:
    save(other(), folder, shard_bytes=4000)
    save(other(), folder, shard_bytes=12000)
    shards = sorted(p.name for p in folder.glob("model-*.safetensors"))
    assert len(shards) == int(shards[0][-17:-12])
    assert regard.load(folder).config.tower.layers == 1


def test_save_through_a_link_changes_the_folder_behind_it(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder, target_is_directory=True)
    other().save(link)
    assert link.is_symlink() and regard.load(folder).config.tower.layers == 1
    assert sorted(p.name for p in folder.parent.iterdir()) == sorted([folder.name, "link"])


def test_save_onto_the_folder_it_came_from_is_the_identity(folder: Path) -> None:
    before = snapshot(folder)
    regard.load(folder).save(folder)
    assert snapshot(folder) == before


def test_loaded_weights_do_not_depend_on_the_file(folder: Path) -> None:
    """The file is read, not mapped: truncating a mapped one would kill the process."""
    model = regard.load(folder)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    (folder / WEIGHTS).write_bytes(b"")
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("shard_bytes", [store.SHARD_BYTES, 400])
def test_weights_are_written_with_one_tensor_in_memory(shard_bytes: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    kinds = [*store.DTYPES.values()] * 2
    made = {f"tensor é {i}": torch.randn(7, i + 1).to(kind) for i, kind in enumerate(kinds)}
    blank = {name: torch.empty_like(x, device="meta") for name, x in made.items()}
    alive: list[weakref.ref] = []

    def read(name: str) -> torch.Tensor:
        assert all(ref() is None for ref in alive[:-1])
        alive.append(weakref.ref(x := made[name].clone()))
        return x

    store.write_weights(tmp_path, blank, shard_bytes, read)
    files = sorted(tmp_path.glob("*.safetensors"))
    index = tmp_path / store.INDEX
    names = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    assert len(files) == len(set(names.values()) or {1})
    found = {name: x for path in files for name, x in load_file(path).items()}
    assert found.keys() == made.keys()
    for name, x in made.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name].view(torch.uint8), x.view(torch.uint8)), name
    for start, entries in map(store.header, files):
        for entry in entries.values():
            width = store.DTYPES[entry["dtype"]].itemsize
            assert (start + entry["data_offsets"][0]) % width == 0
