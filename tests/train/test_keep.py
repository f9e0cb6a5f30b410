"""What a checkpoint's checkpoints counts before it writes, and the order in which things become true."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import regard
from regard.errors import UsageError
from regard.training.checkpoint import (
    SHARDS,
    SPARE,
    Checkpoints,
    clean,
    fault,
    make,
    manifest,
    whole,
)
from tests.train.toy import model

STATE = {"progress": {}, "best": None}


def written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    usage = shutil._ntuple_diskusage(1 << 40, 0, count)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


@pytest.mark.parametrize("preset", ["gpt2", "t5-small", "vaswani-base", "bahdanau"])
def test_whole_is_what_a_model_takes_on_disk(preset: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab": 2000, "dim": 64}
    sizes |= {"source_vocab": 500} if preset == "bahdanau" else {"layers": 1, "heads": 2}
    made = regard.build(preset, **sizes)
    made.save(tmp_path / "m")
    assert 0 <= written(tmp_path / "m") - whole(made) < 20_000  # config.json and a header


def test_room_is_asked_for_by_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small part is saved where the whole model would find no room."""
    made = model()
    need = 100 + SPARE

    def save(_: Any, path: Path) -> None:
        path.mkdir()
        (path / "part").write_bytes(b"x" * 100)

    free(monkeypatch, need)
    small = Checkpoints(tmp_path, save, size=lambda m: 100)
    small.check(1, made, {})
    assert not fault(small.write(1, made, {}, STATE))
    free(monkeypatch, need - 1)
    with pytest.raises(UsageError, match="step-00000002 needs 1 MB, but .* step-00000001 is as it"):
        small.check(2, made, {})
    free(monkeypatch, need + 40)
    small.check(2, made, {"x": torch.zeros(9), "y": torch.zeros(1)})
    with pytest.raises(UsageError, match="make room"):
        small.check(2, made, {"x": torch.zeros(9), "y": torch.zeros(2)})
    free(monkeypatch, need)
    with pytest.raises(UsageError, match="make room"):
        Checkpoints(tmp_path, save).check(3, made, {"x": torch.zeros(9)})


def test_checkpoint_that_cannot_be_removed_stops_nobody(tmp_path: Path) -> None:
    """One that was moved to another disk, say, with a link in its place."""
    checkpoints = Checkpoints(tmp_path / "run", lambda m, path: m.save(path), keep=1)
    for step in (1, 2, 3):
        path = checkpoints.write(step, model(), {}, STATE)
        if step == 1:
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        checkpoints.note(step, STATE)
    assert [path.name for path in checkpoints.steps()] == ["step-00000001", "step-00000003"]
    assert not fault(checkpoints.path(1)) and not fault(checkpoints.path(3))


def test_every_checkpoint_is_in_turn_where_no_distance_is_said(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, lambda m, path: path.mkdir(), size=lambda m: 0)
    for step in (1, 2, 3, 4):
        checkpoints.write(step, None, {}, STATE)
    assert checkpoints.steps() == [checkpoints.path(3), checkpoints.path(4)]


def test_shards_count_once_they_are_in_the_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, lambda m, path: path.mkdir(), size=lambda m: 0)
    for step in (1, 2):
        checkpoints.shards(step).mkdir()
        (checkpoints.shards(step) / "part").touch()
    assert checkpoints.steps() == []
    path = checkpoints.write(1, None, {}, STATE)
    assert (path / SHARDS / "part").is_file() and not fault(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".step-00000002.shards", path.name]
    # What a killed team wrote for a step that never counted.
    clean(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left")]
)
def test_checkpoint_that_cannot_be_written_says_why_and_what_there_is(
    error: Exception, tmp_path: Path
) -> None:
    def save(_: Any, path: Path) -> None:
        path.mkdir()
        if path.name.startswith(".step-00000002"):
            raise error

    checkpoints = Checkpoints(tmp_path, save)
    checkpoints.write(1, None, {}, STATE)
    why = "cannot write .*step-00000002: No space left( on device)?; step-00000001 is as it was"
    with pytest.raises(UsageError, match=why):
        checkpoints.write(2, None, {}, STATE)
    assert checkpoints.steps() == [checkpoints.path(1)]


def test_manifest_is_the_one_that_other_versions_read(tmp_path: Path) -> None:
    """A checkpoint is whole if its manifest is this, byte for byte."""
    (tmp_path / "b").mkdir()
    (tmp_path / "trainer").mkdir()
    for name, text in (("b.json", "{}"), ("b/x", "12345"), ("trainer/manifest.json", "?")):
        (tmp_path / name).write_text(text)
    sizes = {"b.json": 2, "b/x": 5}
    digests = {n: hashlib.sha256((tmp_path / n).read_bytes()).hexdigest() for n in sizes}
    files = ",\n".join(
        f'  "{name}": [\n   {size},\n   "{digests[name]}"\n  ]' for name, size in sizes.items()
    )
    content = {name: [size, digests[name]] for name, size in sizes.items()}
    seal = hashlib.sha256(json.dumps(["step-00000001", content]).encode()).hexdigest()
    want = f'{{\n "files": {{\n{files}\n }},\n "seal": "{seal}"\n}}'
    assert manifest(tmp_path, "step-00000001").decode() == want


def test_folder_that_another_process_makes_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.mkdir

    def second(path: Path, *args: Any, **how: Any) -> None:
        real(path)
        real(path, *args, **how)

    monkeypatch.setattr(Path, "mkdir", second)
    make(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_before_is_called_when_all_is_written_and_nothing_counts_yet(tmp_path: Path) -> None:
    seen: list[tuple[bool, list[str]]] = []
    checkpoints = Checkpoints(tmp_path, lambda m, path: m.save(path))

    def look() -> None:
        (new,) = tmp_path.glob(".step-00000004.new-*")
        seen.append((checkpoints.path(4).exists(), sorted(os.listdir(new / "trainer"))))

    checkpoints.before = look
    checkpoints.write(4, model(), {}, STATE)
    assert seen == [(False, ["manifest.json", "state.json", "state.safetensors"])]
    checkpoints.write(4, model(), {}, STATE)  # it is there
    assert len(seen) == 1 and checkpoints.latest() == checkpoints.path(4)
