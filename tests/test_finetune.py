"""regard finetune: the file's columns and the kind of model decide the task; the run is as any other."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.cli.main import main
from regard.errors import UsageError
from regard.train.finetune import decide

LINES: dict[str, str] = {
    "chat.jsonl": json.dumps({"messages": [{"role": "user", "content": "a"}]}),
    "shared.jsonl": json.dumps({"id": 1, "conversations": []}),
    "prefer.jsonl": json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}),
    "pairs.jsonl": json.dumps({"prompt": "a cat", "completion": "a mat"}),
    "texts.jsonl": json.dumps({"content": "a cat"}),
    "tags.jsonl": json.dumps({"tokens": ["a"], "ner_tags": ["O"]}),
    "labels.csv": "label,sentence\ngood,a fine cat",
    "pairs.tsv": "a cat\teine Katze",
    "story.txt": "Once upon a time",
}
SIZES: dict[str, Any] = dict(dim=16, layers=1, heads=2, ffn_dim=16)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    for name, line in LINES.items():
        (folder / name).write_text(line + "\n")
    presets = {"gpt2": dict(max_len=64), "bert-base": dict(max_len=64), "t5-small": {}}
    for preset, more in presets.items():
        regard.build(preset, **SIZES, vocab=50, **more).save(folder / preset)
    images = dict(dim=24, layers=1, heads=3, ffn_dim=20, size=12, patch=4)
    regard.build("vit-small", **images).save(folder / "vit")
    return folder


@pytest.mark.parametrize(
    "model, file, task, columns",
    [
        ("gpt2", "chat.jsonl", "chat", {}),
        ("gpt2", "shared.jsonl", "chat", {"messages": "conversations"}),
        ("gpt2", "prefer.jsonl", "prefer", {}),
        ("gpt2", "pairs.jsonl", "lm", {"source": "prompt", "target": "completion"}),
        ("t5-small", "pairs.jsonl", "seq2seq", {"source": "prompt", "target": "completion"}),
        ("t5-small", "pairs.tsv", "seq2seq", {"source": "0", "target": "1"}),
        ("gpt2", "texts.jsonl", "lm", {"text": "content"}),
        ("gpt2", "story.txt", "lm", {}),
        ("bert-base", "story.txt", "mlm", {}),
        ("t5-small", "story.txt", "spans", {}),
        ("bert-base", "tags.jsonl", "tag", {"words": "tokens", "tags": "ner_tags"}),
        ("bert-base", "labels.csv", "classify", {"text": "sentence"}),
        ("gpt2", "labels.csv", "classify", {"text": "sentence"}),
        ("vit", "story.txt", "image", {}),
    ],
)
def test_task_is_what_the_columns_say(
    model: str, file: str, task: str, columns: dict[str, str], home: Path
) -> None:
    tables = decide(home / model, home / file, None, "full")
    assert tables["task"] == task and tables["data"].get("columns", {}) == columns
    assert tables["data"].get("length", 64) <= 1024 and "held" in tables["data"]


def test_settings_suit_the_method(home: Path) -> None:
    full, lora = (decide(home / "gpt2", home / "chat.jsonl", None, m) for m in ("full", "qlora"))
    gently = decide(home / "gpt2", home / "prefer.jsonl", None, "full")
    rates = [t["train"]["optim"]["lr"] for t in (gently, full, lora)]
    assert rates == sorted(rates) and full["data"]["length"] == 64
    assert lora["adapt"] == {"method": "qlora", "rank": 16, "alpha": 32.0, "targets": "all"}
    assert (
        decide(home / "gpt2", home / "story.txt", "lm", "full", "v.txt")["data"]["valid"] == "v.txt"
    )


def test_command_trains_and_its_run_goes_on(home: Path, tmp_path: Path, capsys: Any) -> None:
    (home / "cats.txt").write_text("Once upon a time there was a cat. " * 60)
    config = {
        "task": "lm",
        "model": {"preset": "gpt2", **SIZES, "dim": 32},
        "data": {"train": str(home / "cats.txt"), "length": 32, "rows": 2, "pack": "windows"},
        "tokenizer": {"kind": "chars"},
        "train": {"steps": 1},
    }
    base, run = regard.train(config, folder=tmp_path / "base").last, tmp_path / "run"
    words = ["finetune", str(base), "--data", str(home / "cats.txt"), "--method", "qlora"]
    more = ["--output-dir", str(run), "--quiet", "--train.epochs", "0.5", "--data.rows", "4"]
    assert main([*words, *more]) == 0
    written = tomllib.loads((run / "config.toml").read_text())
    assert written["task"] == "lm" and written["adapt"]["method"] == "qlora"
    assert written["data"]["rows"] == 4 and (run / "last" / "adapter_config.json").is_file()
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    assert main([*words, *more]) == 2
    assert "is not empty; go on (--resume), start anew (--overwrite)" in capsys.readouterr().err


def test_what_cannot_be_is_said_in_one_sentence(home: Path, tmp_path: Path) -> None:
    (home / "odd.csv").write_text("a,b,c\n1,2,3\n")
    (home / "none.jsonl").write_text("")
    (home / "list.jsonl").write_text("[1]\n")
    wrong: dict[str, tuple[Any, str]] = {
        "odd.csv": (None, "has the columns 'a', 'b', 'c', which no task for .* reads"),
        "none.jsonl": (None, "is empty"),
        "list.jsonl": (None, "is no JSON object but list"),
        "gone.txt": (None, "does not exist"),
        "chat.jsonl": ("chats", "task .*chats.*chat"),
    }
    for file, (task, words) in wrong.items():
        with pytest.raises(UsageError, match=words):
            decide(home / "gpt2", home / file, task, "full")
    with pytest.raises(UsageError, match="method .*lore.*lora"):
        regard.finetune(home / "gpt2", home / "story.txt", tmp_path / "x", method="lore")
    with pytest.raises(UsageError, match="config.json"):
        regard.finetune(home / "nowhere", home / "story.txt", tmp_path / "x")
    assert not (tmp_path / "x").exists()
