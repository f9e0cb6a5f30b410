"""A disk that fills up: what had no room is named, and the run says that it failed."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.cli.main import main
from regard.files import write_over, write_whole
from tests.faults.disk import small

TABLES: dict[str, Any] = {
    "task": "lm",
    "model": {"preset": "gpt2", "layers": 1, "dim": 16, "heads": 2},
    "tokenizer": {"kind": "bytes"},
    "train": {"steps": 6, "save": 2},
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Of eight megabytes."""
    try:
        with small(tmp_path / "disk", 8 << 20):
            yield tmp_path / "disk"
    except (PermissionError, FileNotFoundError) as error:
        pytest.skip(f"needs the right to mount a file system: {error}")


def fill(folder: Path) -> None:
    """Leave no room at all."""
    with (folder / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 8, 1):
            while True:
                try:
                    file.write(bytes(size))
                except OSError:
                    break


def tables(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    data = {"train": str(tmp_path / "a.txt"), "length": 16, "rows": 2, "pack": "stream"}
    return {**TABLES, "data": data}


@pytest.mark.parametrize("step", [1, 3])
def test_run_whose_disk_fills_up_says_so(step: int, disk: Path, tmp_path: Path) -> None:
    def callback(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == step:
            fill(disk)

    with pytest.raises((OSError, regard.UsageError)) as caught:
        regard.train(tables(tmp_path, "so it goes " * 40), disk / "run", callbacks=[callback])
    told = json.loads((disk / "run" / "run.json").read_text())
    assert told["status"] == "failed" and told["ended"]
    error = caught.value
    named = str(getattr(error, "filename", None) or error)
    assert str(disk / "run") in named
    # With room it goes on.
    (disk / "filler").unlink()
    done = regard.train(disk / "run", resume=True)
    assert done.status == "done" and done.step == 6
    assert json.loads((disk / "run" / "run.json").read_text())["status"] == "done"


def test_tokens_that_have_no_room_are_named(
    disk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = tables(tmp_path, "so it goes " * 500_000)["data"]
    data = "\n".join(f"{name} = {json.dumps(value)}" for name, value in given.items())
    model = '[model]\npreset = "gpt2"\nlayers = 1\ndim = 16\nheads = 2\n'
    (tmp_path / "a.toml").write_text(
        f'task = "lm"\n{model}[tokenizer]\nkind = "bytes"\n[data]\n{data}\n[train]\nsteps = 2\n'
    )
    assert main(["train", str(tmp_path / "a.toml"), "--output-dir", str(disk / "run")]) == 1
    said = capfd.readouterr().err
    assert "ids.bin: No space left on device" in said and str(disk / "run" / "data") in said
    assert not (disk / "run" / "data" / ".train.new").exists()


def test_file_that_cannot_be_written_anew_is_written_over(disk: Path) -> None:
    path = disk / "run.json"
    write_whole(path, "running" + " " * 400)
    fill(disk)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(path, "x" * 5000)
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(path)
    assert [p.name for p in disk.iterdir() if p.name != "filler"] == ["run.json"]
    write_over(path, "failed")
    assert path.read_text() == "failed"
