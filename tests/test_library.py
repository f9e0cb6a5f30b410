"""What the commands do, from Python: regard.train, regard.evaluate, regard.classify, regard.embed."""

import inspect
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard.cli.main import main
from regard.errors import Notice, UsageError

ROOT = Path(__file__).resolve().parents[1]
WORDS = itertools.product(("dog", "cat", "king"), ("sees", "hears"), ("park", "sea"))
TEXT = "".join(f"the {a} {b} the {c}\n" for a, b, c in WORDS) * 4
MODEL = {"layers": 1, "dim": 16, "heads": 2, "ffn_dim": 32}
LM: dict[str, Any] = {
    "task": "lm",
    "model": {"preset": "gpt2", **MODEL},
    "data": {"train": "story.txt", "held": 0.2, "length": 32, "rows": 4, "unit": "line"},
    "tokenizer": {"kind": "chars"},
    "train": {"steps": 4, "evaluate": 2, "save": 2},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "story.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        "import regard\nregard.train; from regard.train.trainer import Trainer",
        "import regard.train.run\nimport regard.evaluate.run",
        "from regard import train, evaluate\nimport regard",
        "import regard\nfrom regard.train import trainer as old\n"
        "assert old.__name__ == old.__spec__.name == 'regard.training.trainer'",
    ],
)
def test_functions_keep_their_names_in_any_order_of_imports(lines: str) -> None:
    """Former names of the packages that they live in among them."""
    script = f"""
{lines}
import inspect
from regard.training.trainer import Trainer
from regard.evaluation.run import Evaluation
assert regard.Trainer is Trainer and regard.training.trainer.Trainer is Trainer
assert "callbacks" in inspect.signature(regard.train).parameters
assert "metrics" in inspect.signature(regard.evaluate).parameters
for call in (lambda: regard.train({{}}), lambda: regard.evaluate("nowhere", [])):
    try:
        call()
    except regard.UsageError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        'say where the run is written: folder="runs/NAME"',
        "name the data to measure on (--data FILE)",
    ]


def test_functions_say_what_they_take() -> None:
    assert str(inspect.signature(regard.train)).startswith("(config: ")
    assert str(inspect.signature(regard.evaluate)).startswith("(model: ")


# --- train --------------------------------------------------------------------------------------------------------


def without_times(path: Path) -> list[dict[str, Any]]:
    events = map(json.loads, path.read_text().splitlines())
    return [{n: x for n, x in event.items() if n != "seconds"} for event in events]


def test_a_dict_a_file_and_the_command_train_alike(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = regard.train(LM, "by-dict")
    assert capsys.readouterr() == ("", "")
    file = home / "by-dict" / "config.toml"
    by_file = regard.train(file, "by-file", changes={"train.save": 4})
    assert main(["train", str(file), "--output-dir", "by-command", "--quiet"]) == 0
    assert result.status == by_file.status == "done" and result.step == 4
    assert result.metrics == by_file.metrics and result.metrics["loss"] > 0
    logs = [without_times(home / name / "metrics.jsonl") for name in ("by-dict", "by-file", "by-command")]  # fmt: skip
    assert logs[0] == logs[1] == logs[2]
    assert result.folder == Path("by-dict") and result.last == Path("by-dict/checkpoints/step-00000004")  # fmt: skip
    assert result.best is not None and regard.load(result.best) is not None
    assert result.best_step in (2, 4) and result.best_value is not None
    info = json.loads((home / "by-dict" / "run.json").read_text())
    assert info["command"] == ["regard", "train", "by-dict/config.toml"]


def test_callbacks_hear_every_event_and_a_run_goes_on(home: Path) -> None:
    events: list[dict[str, Any]] = []
    stopped = regard.train(
        LM, "run", callbacks=[events.append], stop=lambda: events[-1].get("step", 0) >= 1
    )
    assert stopped.status == "asked" and stopped.step == 1
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "begin" and kinds[-1] == "end" and "step" in kinds and "checkpoint" in kinds
    assert events[0]["steps"] == 4 and events[-1]["status"] == "asked"
    again: list[dict[str, Any]] = []
    done = regard.train("run", resume=True, callbacks=[again.append])
    assert done.status == "done" and again[0]["resumed"] == "going on after step 1"
    assert [event["step"] for event in again if event["kind"] == "step"] == [2, 3, 4]
    whole = regard.train(LM, "whole")
    logs = [without_times(home / name / "metrics.jsonl") for name in ("run", "whole")]
    assert logs[0] == logs[1] and done.metrics == whole.metrics


def test_a_run_config_is_taken_as_it_is(home: Path) -> None:
    config = regard.training.config.configure(LM)
    assert isinstance(config, regard.RunConfig)
    assert regard.train(config, "run", smoke=True).step == 3
    with pytest.raises(UsageError, match="is taken as it is"):
        regard.train(config, "other", changes={"train.steps": 2})


@pytest.mark.parametrize(
    "change, text",
    [
        ({"train": {"stps": 1}}, "stps"),
        ({"task": "nothing"}, "task = 'nothing' is unknown"),
        ({"data": {"train": "nowhere.txt", "rows": 1, "length": 8}}, "nowhere.txt"),
    ],
)
def test_mistakes_are_usage_errors(change: dict[str, Any], text: str, home: Path) -> None:
    with pytest.raises(UsageError, match=text):
        regard.train({**LM, **change}, "run")
    with pytest.raises(UsageError, match="leave one of them out"):
        regard.train(LM, "run", resume=True, overwrite=True)


def test_a_folder_of_ours_is_noticed_not_printed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regard.train(LM, "run", smoke=True)
    (home / "run" / "last").unlink()
    (home / "run" / "last").mkdir()
    with pytest.warns(Notice, match="is a folder, not a link of ours"):
        regard.train("run", resume=True, changes={"train.steps": 4})
    assert capsys.readouterr() == ("", "")


# --- evaluate, classify, embed ------------------------------------------------------------------------------------


def test_evaluate_gives_what_the_command_prints(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = regard.train(LM, "run").folder
    found = regard.evaluate(folder, "story.txt")
    assert (found.task, [*found.metrics]) == ("lm", ["loss", "perplexity"])
    assert capsys.readouterr() == ("", "")
    assert main(["eval", str(folder), "--data", "story.txt", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"task": "lm", "metrics": found.metrics, "signatures": {}, "data": found.data}
    model = regard.load(folder / "best")
    loaded = regard.evaluate(model, "story.txt", length=32, reading={"unit": "line"})
    assert loaded.metrics == pytest.approx(found.metrics)
    with pytest.raises(UsageError, match="there is no metric 'blue'"):
        regard.evaluate(folder, "story.txt", metrics=["blue"])


def test_classify_and_embed_give_what_the_commands_print(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{'up' if i % 2 else 'down'}\tgo {'high' if i % 2 else 'low'} {i}\n" for i in range(24)]  # fmt: skip
    (home / "table.tsv").write_text("".join(lines), encoding="utf-8")
    config = {
        **LM,
        "task": "classify",
        "model": {"preset": "bert-base", **MODEL, "max_len": 32},
        "data": {"train": "table.tsv", "columns": {"label": 0, "text": 1}, "rows": 4},
        "train": {"steps": 2},
    }
    folder = regard.train(config, "run").folder
    texts = ["go high 7", "", "go low"]
    rankings = regard.classify(folder, texts, rows=2)
    assert [len(ranking) for ranking in rankings] == [2, 0, 2]
    assert {label for label, _ in rankings[0]} == {"up", "down"}
    assert rankings[0][0][1] >= rankings[0][1][1] > 0
    vectors = regard.embed(regard.load(folder / "last"), texts, normalize=True)
    assert vectors.shape == (3, 16) and np.isnan(vectors[1]).all()
    assert np.linalg.norm(vectors[::2], axis=1) == pytest.approx([1, 1], rel=1e-5)
    assert capsys.readouterr() == ("", "")
    (home / "lines.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    assert main(["classify", str(folder), "lines.txt", "--json", "--rows", "2"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["probabilities"] for line in printed] == [dict(ranking) for ranking in rankings]
    assert main(["embed", str(folder), "lines.txt", "--normalize"]) == 0
    printed = [json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines()]
    assert printed[1] is None and np.allclose(printed[0], vectors[0], atol=1e-6)
    with pytest.raises(UsageError, match="has no classification head"):
        regard.classify(regard.build("gpt2", vocab=9, **MODEL), ["x"])
