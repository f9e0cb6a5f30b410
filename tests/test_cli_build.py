"""From a config to a trainer: what is taken from the tokenizer and the data where the config does not say it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.checkpoint.adapter import save_adapter
from regard.checkpoint.hf import Origin
from regard.cli.main import main
from regard.data.config import Data
from regard.errors import UsageError
from regard.layers import Classify
from regard.models.adapt import with_head
from regard.training.build import fresh, written
from regard.training.config import Adapt, Config, adapted
from regard.training.trainer import flat
from tests.test_cli_train import CONFIG

PAIRS = """
task = "seq2seq"
[model]
preset = "bahdanau"
dim = 16
[data]
train = "pairs.tsv"
rows = 4
[tokenizer]
kind = "chars"
[train]
steps = 2
"""
LINES = """
task = "{}"
[model]
preset = "t5-small"
layers = 1
dim = 16
heads = 2
ffn-dim = 32
[data]
train = "lines.txt"
unit = "line"
rows = 4
pack = "none"
[tokenizer]
kind = "chars"
[train]
steps = 2
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.tsv").write_text("source\ttarget\n" + "äöü ß\tabc\nxyz\tdef\n" * 8)
    (tmp_path / "lines.txt").write_text("the quick brown fox\njumps over it\n" * 10)
    (tmp_path / "pairs.toml").write_text(PAIRS)
    return tmp_path


# --- sizes of tables ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("home")
def test_recurrent_translator_takes_both_vocabularies_from_the_tokenizer() -> None:
    assert main(["train", "pairs.toml", "--quiet"]) == 0
    config = regard.load("runs/pairs/last").config
    letters = set("äöü ßxyzabcdef")
    special = 4  # pad, unknown, beginning, end
    assert config.vocab == config.source_vocab == len(letters) + special


@pytest.mark.usefixtures("home")
def test_memory_without_softmax_is_trained_from_a_config_and_written_out() -> None:
    text = (
        Path("pairs.toml")
        .read_text()
        .replace('"bahdanau"', '"luong"\nlayers = 1\nattention = "hard"')
    )
    Path("hard.toml").write_text(text.replace("dim = 16", 'dim = 16\ncombine = "linear"'))
    assert main(["train", "hard.toml", "--train.steps", "1", "--quiet"]) == 0
    config = regard.load("runs/hard/last").config
    assert (config.attention, config.combine) == ("hard", "linear")


@pytest.mark.usefixtures("home")
def test_size_that_the_config_says_stays() -> None:
    said = ["--model.source-vocab", "64", "--train.steps", "1", "--quiet"]
    assert main(["train", "pairs.toml", *said]) == 0
    config = regard.load("runs/pairs/last").config
    assert (config.vocab, config.source_vocab) == (18, 64)


def made_of(preset: str, changes: dict[str, Any], vocab: int) -> Any:
    return fresh(Config("lm", Data("x"), {"preset": preset, **changes}), vocab, "meta")


@pytest.mark.parametrize("preset", ["bahdanau", "gpt2", "vaswani-base", "vit-small"])
def test_tables_are_sized_where_there_are_any(preset: str) -> None:
    config = made_of(preset, {"dropout": 0.25}, 77).config
    parts = [config, *(getattr(config, n, None) for n in ("embedding", "source", "target"))]
    sizes = {getattr(part, "vocab", 77) for part in parts} | {getattr(config, "source_vocab", 77)}
    assert sizes == {77}


def test_settings_of_a_part_are_changed_inside_it() -> None:
    """As a table, or by a flag with dots."""
    small = {"dim": 16, "heads": 4, "layers": 1}
    made = made_of("vaswani-base", {**small, "attention": {"kv_heads": 2}}, 9)
    towers = (made.config.encoder, made.config.decoder)
    assert [(t.attention.heads, t.attention.kv_heads) for t in towers] == [(4, 2), (4, 2)]
    made = made_of("vaswani-base", {**small, "decoder": {"attention": {"kv_heads": 1}}}, 9)
    assert made.config.encoder.attention.kv_heads != made.config.decoder.attention.kv_heads == 1
    with pytest.raises(UsageError, match="no setting 'kvheads' of encoder.attention; did you mean"):
        made_of("vaswani-base", {"attention": {"kvheads": 2}}, 9)
    whole = {"attention": {"kind": "gqa", "heads": 2}}
    assert flat(whole, parts=True) == whole


@pytest.mark.parametrize("wrong", [{"dim": -4}, {"dim": 0}, {"dropout": 2.0}, {"vocab": -1}])
def test_model_that_cannot_be_is_a_sentence(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=rf"\.{name} = .*: give "):
        made_of("gpt2", wrong, 0)


# --- what a checkpoint takes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["full", "frozen", "lora"])
def test_bytes_are_counted_as_they_are_written(method: str, tmp_path: Path) -> None:
    regard.build("bert-base", layers=1, dim=64, heads=2, vocab=3000, max_len=32).save(
        tmp_path / "b"
    )
    model = with_head(regard.load(tmp_path / "b"), Classify(3))
    model.origin.files = {"tokenizer.json": b" " * 50_000}
    model = adapted(model, Adapt(method))
    small = method == "lora"
    count = written(model, small)
    if small:
        save_adapter(model, tmp_path / "m")
    else:
        model.save(tmp_path / "m")
    real = sum(path.stat().st_size for path in (tmp_path / "m").iterdir())
    assert 0 <= real - count < 10_000  # JSON, and the header of the tensors
    assert (count < 200_000) == small


def test_tensors_that_are_carried_along_are_counted() -> None:
    model = regard.build("gpt2", layers=1, dim=16, heads=2, vocab=30)
    model.origin = Origin("gpt2")
    before = written(model, False)
    model.origin.tensors = {"more": torch.zeros(100)}
    assert written(model, False) == before + 400


# --- tokenizers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["spans", "infill"])
def test_text_to_repair_gets_the_tokens_it_needs(task: str, home: Path) -> None:
    (home / "a.toml").write_text(LINES.format(task))
    assert main(["train", "a.toml", "--quiet"]) == 0
    said = json.loads((home / "runs/a/tokenizer/tokenizer.json").read_text())
    special = {t["content"] for t in said["added_tokens"]}
    assert {"<s>", "</s>"} <= special
    assert ("<extra_id_99>" in special, "<mask>" in special) == (task == "spans", task == "infill")


@pytest.mark.parametrize("task", ["tag", "answer"])
def test_tokenizer_is_learned_from_every_text(task: str, home: Path) -> None:
    rows = {
        "tag": {"words": ["quiz", "vex"], "tags": ["A", "B"]},
        "answer": {"text": "quiz", "second": "vex", "start": 0, "end": 3},
    }
    (home / "x.jsonl").write_text((json.dumps(rows[task]) + "\n") * 8)
    text = LINES.format(task).replace("lines.txt", "x.jsonl").replace("t5-small", "bert-base")
    (home / "a.toml").write_text(re.sub(r"(unit|pack) = .*\n", "", text))
    assert main(["train", "a.toml", "--quiet"]) == 0
    said = json.loads((home / "runs/a/tokenizer/tokenizer.json").read_text())
    assert set("quizvex") <= said["model"]["vocab"].keys()


def test_tokenizer_of_a_start_that_failed_is_not_used(home: Path) -> None:
    (home / "story.txt").write_text("the quick brown fox jumps over the lazy dog. " * 30)
    (home / "a.toml").write_text(CONFIG)
    assert main(["train", "a.toml", "--model.vocab", "3", "--quiet"]) == 2
    assert (home / "runs/a/tokenizer/tokenizer.json").is_file()
    said = ["--tokenizer.kind", "bytes", "--train.steps", "1", "--quiet"]
    assert main(["train", "a.toml", *said]) == 0
    assert regard.load("runs/a/last").config.embedding.vocab == 257
