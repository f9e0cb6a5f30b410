"""regard train: a text file and a dozen lines of TOML become a model folder; a stop and --resume change no bit."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import regard
from regard.cli.main import main
from regard.cli.train import signals

ROOT = Path(__file__).resolve().parents[1]
TEXT = "the quick brown fox jumps over the lazy dog. " * 60
CONFIG = """
task = "lm"
[model]
preset = "gpt2"
layers = 1
dim = 16
heads = 2
max-len = 32
[data]
train = "story.txt"
held = 0.2
length = 16
rows = 4
pack = "windows"
[tokenizer]
kind = "chars"
[train]
steps = 8
evaluate = 4
save = 2
optim = { lr = 1e-2 }
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "story.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "story.toml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


def test_train_writes_a_folder_that_generates(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "story.toml", "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.out == "runs/story/checkpoints/step-00000008\n"
    assert "eval  step 4" in said.err
    run = home / "runs/story"
    # The most memory so far, in bytes: the process has torch and the model in it.
    assert 50 << 20 < json.loads((run / "run.json").read_text())["memory"] < 1 << 40
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["kind"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, 9)) and steps[-1]["loss"] < steps[0]["loss"]
    model = regard.load(run / "last")
    (result,) = regard.generate(model, ["the "], max_new_tokens=5)
    assert result.text is not None and len(result.text) == 5
    assert (run / "best" / "config.json").is_file()


def test_changed_settings_and_resume_give_the_same_bits(home: Path) -> None:
    assert main(["train", "story.toml", "--output-dir", "whole", "--train.seed", "7"]) == 0
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "regard",
        "train",
        "story.toml",
        "--output-dir",
        "parts",
        "--train.seed=7",
    ]
    process = subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    process.stderr.readline()  # the data is read, the first step begins
    process.send_signal(signal.SIGTERM)
    code, rest = process.wait(timeout=60), process.stderr.read()
    if code != 0:  # it may have been done already
        line = rest.partition("go on: ")[2]
        assert code == 143 and line == "regard train --resume parts\n", (code, rest)
        assert main(shlex.split(line)[1:]) == 0
    a, b = (load_file(home / n / "last" / "model.safetensors") for n in ("whole", "parts"))
    assert a.keys() == b.keys() and all(a[n].equal(b[n]) for n in a)


def test_smoke_saves_and_reloads(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["train", "story.toml", "--smoke"]) == 0
    assert [p.name for p in (home / "runs").iterdir()] == ["story-smoke"]
    said = capsys.readouterr()
    assert (
        "step-00000003" in said.out
        and "reloaded: Transformer" in said.err
        and "sample:" in said.err
    )


MISTAKES = {
    "no file": (["train", "no.toml"], 2, "no.toml cannot be read: No such file"),
    "unknown key": (["train", "story.toml", "--train.stpes", "3"], 2, "train.stpes is not a setting of Train"),
    "no value": (["train", "story.toml", "--train.steps"], 2, "--train.steps needs a value"),
    "both ways": (["train", "story.toml", "--changes", "task", "lmm", "--train.steps", "3"], 2, "'lmm'"),
    "bad value": (["train", "story.toml", "--train.steps", "many"], 2, "train.steps must be int, got 'many'"),
    "task": (["train", "story.toml", "--task.x", "1"], 2, "task is a value, not a table"),
    "preset": (["train", "story.toml", "--model.preset", "gtp2"], 2, "preset 'gtp2' is unknown"),
    "tokenizer": (["train", "story.toml", "--tokenizer.knid", "bpe"], 2, "tokenizer.knid is no setting"),
    "data": (["train", "story.toml", "--data.train", "gone.txt"], 4, "gone.txt"),
    "resume nothing": (["train", "story.toml", "--resume"], 2, "has nothing to go on with"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.usefixtures("home")
def test_mistake_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, code, text = MISTAKES[name]
    assert main(list(arguments)) == code
    said = capsys.readouterr()
    lines = said.err.strip().splitlines()
    assert said.out == "" and lines[-1].startswith("error: ") and text in lines[-1]


def test_folder_with_a_run_is_not_touched(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "story.toml", "--quiet", "--train.steps", "2"]) == 0
    before = (home / "runs/story/metrics.jsonl").read_bytes()
    assert main(["train", "story.toml"]) == 2
    assert "is not empty; go on (--resume), start anew (--overwrite)" in capsys.readouterr().err
    assert (home / "runs/story/metrics.jsonl").read_bytes() == before
    assert main(["train", "story.toml", "--overwrite", "--train.steps", "3", "--quiet"]) == 0


# --- the folder of a run ------------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes]:
    """All files, but for the shards, which are made of the data whenever it changes."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p): p.read_bytes() for p in files if p.parts[-3:-2] != ("data",)}


@pytest.mark.parametrize("flags", [[], ["--overwrite"], ["--resume"]])
def test_folder_of_others_is_not_touched(
    flags: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = home / "mine"
    for name in ("data/train/precious.csv", "checkpoints/mine", "tokenizer/a"):
        (mine / name).parent.mkdir(parents=True)
        (mine / name).write_text("mine")
    before = tree(mine)
    assert main(["train", "story.toml", "--output-dir", "mine", *flags]) == 2
    assert "mine is not empty, and what is in it is not a run" in capsys.readouterr().err
    assert tree(mine) == before and (mine / "data/train/precious.csv").is_file()


def test_place_that_cannot_be_written_is_named(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"story.txt": (2, "is a file"), "story.txt/run": (1, "Not a directory")}
    places |= (
        {"/proc/nothing": (1, "cannot write /proc/nothing")} if Path("/proc/self").exists() else {}
    )
    for place, (code, text) in places.items():
        assert main(["train", "story.toml", "--output-dir", place]) == code
        said = capsys.readouterr().err
        assert text in said and "--output-dir FOLDER" in said and said.count("\n") == 1
    assert (home / "story.txt").read_text() == TEXT


def test_run_is_refused_what_would_change_or_lose_it(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, short = home / "runs/story", ["--train.steps", "2", "--quiet"]
    assert main(["train", "story.toml", *short]) == 0
    before = tree(run)
    same = "or train into another folder"
    given = {
        ("--overwrite",): ["resume goes on with a run, overwrite removes it"],
        ("--train.clip", "2"): ["train.clip was 1.0, now it is 2.0", same],
        ("--train.optim.lr", "1"): ["train.optim.lr was 0.01, now it is 1.0", same],
        ("--train.schedule.steps", "9"): ["train.schedule.steps was 2, now it is 9", same],
        ("--model.heads", "4"): ["model.heads was 2, now it is 4", same],
        ("--model.dropout", "0.5"): ["model.dropout was not set, now it is 0.5", same],
        ("--tokenizer.kind", "bytes"): ["tokenizer.kind was 'chars', now it is 'bytes'", same],
        ("--data.length", "8"): ["data.length was 16, now it is 8", same],
        ("--data.rows", "5"): ["data.rows was 4, now it is 5", same],
        ("--log-to", "paper"): ["--log-to 'paper' is unknown"],
    }
    for flags, texts in given.items():
        capsys.readouterr()
        assert main(["train", "story.toml", "--resume", *short, *flags]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and tree(run) == before
        assert all(text in said for text in texts), said
    (home / "story.txt").write_text(TEXT + "more")
    assert main(["train", "story.toml", "--resume", *short]) == 2
    assert "the data changed since" in capsys.readouterr().err and tree(run) == before
    (home / "story.txt").write_text(TEXT)
    assert main(["train", "story.toml", "--resume", *short]) == 0


def test_broken_checkpoints_are_told_of(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--train.steps", "4", "--train.evaluate", "0", "--quiet"]
    assert main(["train", "story.toml", *short]) == 0
    for step, code in (("step-00000004", 0), ("step-00000002", 4)):
        for path in (home / "runs/story/checkpoints").glob("step-*"):
            if path.name >= step:
                (path / "model.safetensors").write_bytes(b"x")
        capsys.readouterr()
        before = tree(home / "runs/story")
        assert main(["train", "story.toml", "--resume", *short]) == code
        said = capsys.readouterr().err
        assert f"warning: passed over {step}: model.safetensors changed" in said
    assert "error: no checkpoint is sound (step-00000004: model" in said and "--overwrite" in said
    assert tree(home / "runs/story") == before


def test_signal_in_the_middle_of_a_line_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    """The handler must not use a stream that the signal may have interrupted."""

    class Busy:
        def write(self, text: str) -> None:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

        flush = write

    for number in (signal.SIGINT, signal.SIGTERM):
        with pytest.MonkeyPatch.context() as patch, signals() as asked:
            patch.setattr(sys, "stderr", Busy())
            signal.raise_signal(number)
            assert asked == [number]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        assert capfd.readouterr().err == "finishing this step, then saving; again to stop at once\n"
