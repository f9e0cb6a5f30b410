"""metrics.jsonl and samples.jsonl: one line a step, whatever happened on the way, and no later than the checkpoint."""

import json
import os
import pathlib
from pathlib import Path
from typing import Any

import pytest

from regard.cli.main import main
from regard.report.folder import read
from regard.train.log import Log
from regard.train.trainer import Progress
from tests.test_cli_train import home as home
from tests.train.test_trainer import Poisoned
from tests.train.toy import trainer


def step(n: int, kind: str = "step", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "step": n, "loss": float(n), **more}


def lines(folder: Path, name: str = "metrics.jsonl") -> list[tuple[str, int]]:
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [(e.get("kind", ""), e["step"]) for e in found]


def test_going_back_leaves_one_line_a_step_and_the_reason(tmp_path: Path) -> None:
    with Log(tmp_path, Progress(), []) as log:
        for n in (1, 2, 3, 4):
            log(step(n))
        log(step(4, "evaluation", samples=[{"text": "old"}]))
        log(step(5, "broken"))
        log({"kind": "warning", "text": "not in the file"})
        for n in (3, 4):  # it went back to 2
            log(step(n))
        log(step(4, "evaluation", samples=[{"text": "new"}]))
        log(step(6))
    told = [("step", 1), ("step", 2), ("broken", 5), ("step", 3), ("step", 4)]
    assert lines(tmp_path) == [*told, ("evaluation", 4), ("step", 6)]
    assert json.loads((tmp_path / "samples.jsonl").read_text())["text"] == "new"


def test_skipped_step_cuts_nothing(tmp_path: Path) -> None:
    with Log(tmp_path, Progress(), []) as log:
        for event in (step(1), step(2), step(3, "broken"), step(3, "evaluation"), step(4)):
            log(event)
    assert lines(tmp_path) == [
        ("step", 1), ("step", 2), ("broken", 3), ("evaluation", 3), ("step", 4)
    ]  # fmt: skip


def test_breaking_again_after_going_back_cuts_what_was_undone(tmp_path: Path) -> None:
    with Log(tmp_path, Progress(), []) as log:
        for event in (step(1), step(2), step(3), step(4, "broken")):
            log(event)
        log(step(2, "broken"))  # back at 1, and the next one breaks too
        log(step(3))
    assert lines(tmp_path) == [("step", 1), ("broken", 4), ("broken", 2), ("step", 3)]


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


def test_run_that_goes_back_reads_as_one_that_left_the_step_out(tmp_path: Path) -> None:
    runs = {}
    for name in ("back", "skip"):
        (tmp_path / name).mkdir()
        t = trainer(
            tmp_path / name / "checkpoints", micro_batches=1, save=4, evaluate=0, nan="back"
        )
        if name == "back":
            t.objective = Poisoned(7, "gradient")
        else:
            t.at.skipped = [7]
        with Log(tmp_path / name, t.at, []) as log:
            t.callbacks = [log]
            assert t.run() == "done"
        (tmp_path / name / "run.json").write_text('{"format": 1}')
        runs[name] = read(tmp_path / name)
        told = [n for kind, n in lines(tmp_path / name) if kind == "step"]
        assert told == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    for kind in ("loss", "norm", "lr"):
        assert runs["back"].curve(kind) == runs["skip"].curve(kind)
    assert runs["back"].measured("loss") == runs["skip"].measured("loss")
    assert [e["step"] for e in runs["back"].broken] == [7]


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
