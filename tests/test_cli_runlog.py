"""metrics.jsonl and samples.jsonl: one line a step, whatever happened on the way, and no later than the checkpoint."""

import json
import os
import pathlib
from pathlib import Path
from typing import Any

import pytest

from regard.cli.main import main
from regard.training.log import Log
from regard.training.trainer import Progress
from tests.test_cli_train import home as home


def step(n: int, kind: str = "step", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "step": n, "loss": float(n), **more}


def lines(folder: Path, name: str = "metrics.jsonl") -> list[tuple[str, int]]:
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [(e.get("kind", ""), e["step"]) for e in found]


def test_skipped_step_cuts_nothing(tmp_path: Path) -> None:
    with Log(tmp_path, Progress(), []) as log:
        for event in (step(1), step(2), step(3, "broken"), step(3, "evaluation"), step(4)):
            log(event)
    assert lines(tmp_path) == [
        ("step", 1), ("step", 2), ("broken", 3), ("evaluation", 3), ("step", 4)
    ]  # fmt: skip


def test_resuming_keeps_why_a_later_step_is_left_out(tmp_path: Path) -> None:
    with Log(tmp_path, Progress(), []) as log:
        for event in (step(1), step(2), step(5, "broken"), step(3), step(4)):
            log(event)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # killed here
    Log(tmp_path, Progress(step=3, skipped=[5]), []).__exit__()
    assert lines(tmp_path) == [("step", 1), ("step", 2), ("broken", 5), ("step", 3)]
    Log(tmp_path, Progress(step=3), []).__exit__()
    assert lines(tmp_path) == [("step", 1), ("step", 2), ("step", 3)]


@pytest.mark.usefixtures("home")
def test_log_is_on_the_disk_before_the_checkpoint_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("run/metrics.jsonl")
    synced: dict[int, int] = {}  # inode -> bytes
    counted: list[int] = []
    fsync, rename = os.fsync, pathlib.Path.rename

    def record(handle: int) -> None:
        fsync(handle)
        synced[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def watch(self: Path, target: Any) -> Any:
        if Path(target).name.startswith("step-"):
            there = path.read_bytes()[: synced.get(path.stat().st_ino, 0)]
            said = [json.loads(line) for line in there.splitlines()]
            counted.append(int(Path(target).name.removeprefix("step-")))
            assert max(e["step"] for e in said if e["kind"] == "step") == counted[-1]
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(pathlib.Path, "rename", watch)
    assert main(["train", "story.toml", "--output-dir", "run", "--quiet"]) == 0
    assert counted == [2, 4, 6, 8]
