"""regard convert, as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import regard
from tests.checkpoint import ggufs
from tests.checkpoint.families import case
from tests.test_cli import call, folder
from tests.text.test_gguf_tokens import llama


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with a tokenizer, and what it was made from."""
    pytest.importorskip("gguf")
    home, said = tmp_path_factory.mktemp("convert"), llama()
    sizes = {**ggufs.WIDE, "vocab_size": len(said["tokenizer.ggml.tokens"])}
    model = case("told", "LlamaForCausalLM", sizes).make()
    ggufs.write(home / "model.gguf", model, ggufs.saved(model, home / "theirs"), "Q8_0", said)
    return home


def test_gguf_file_becomes_a_folder_that_generates(home: Path, tmp_path: Path) -> None:
    done = call("convert", home / "model.gguf", tmp_path / "new")
    assert (done.code, done.out) == (0, f"{tmp_path / 'new'}\n")
    told = "note: a LlamaForCausalLM; most of its weights are Q8_0, written as float16\n"
    assert done.err == told
    stored = regard.load(tmp_path / "new", dtype="stored")
    assert stored.embedding.weight.dtype == torch.float16
    said = call("generate", tmp_path / "new", "Once", "--max-new-tokens", 4, "--json")
    assert said.code == 0 and len(json.loads(said.out)["ids"]) == 4
    # A folder in which there is but one such file is as good.
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "only.gguf").hardlink_to(home / "model.gguf")
    done = call("convert", tmp_path / "folder", tmp_path / "wide", "--dtype", "fp32")
    assert done.code == 0 and "written as float32" in done.err
    assert regard.load(tmp_path / "wide").embedding.weight.dtype == torch.float32


def test_pickled_folder_becomes_one_that_generates(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    for path in folder("gpt2").iterdir():
        if path.name != "model.safetensors":
            (old / path.name).write_bytes(path.read_bytes())
    torch.save(load_file(folder("gpt2") / "model.safetensors"), old / "pytorch_model.bin")
    torch.save({"lr": 0.1}, old / "training_args.bin")
    done = call("convert", old, new)
    assert done == (0, f"{new}\n", "note: left out: training_args.bin\n")
    wanted = call("generate", folder("gpt2"), "dog", "--max-new-tokens", 5).out
    assert call("generate", new, "dog", "--max-new-tokens", 5).out == wanted


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("model_type", None, "config.json has no model_type"),
        ("model_type", "rwkv", "'rwkv', which is not known"),
        ("n_embd", None, "n_embd is missing; a gpt2 model needs it"),
    ],
)
def test_folder_that_is_not_read_afterwards_is_a_failure_that_says_what_to_add(
    key: str, value: str | None, why: str, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    torch.save(load_file(folder("gpt2") / "model.safetensors"), old / "pytorch_model.bin")
    config = json.loads((folder("gpt2") / "config.json").read_text())
    (old / "config.json").write_text(json.dumps({**config, key: value}))
    if value is None:
        (old / "config.json").write_text(json.dumps({n: x for n, x in config.items() if n != key}))
    done = call("convert", old, new)
    assert done.code == 4 and done.out == f"{new}\n" and (new / "model.safetensors").is_file()
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert why in done.err and f"add it to {new / 'config.json'}" in done.err
    # With what was missing, it is read.
    (new / "config.json").write_text(json.dumps(config))
    assert len(regard.load(new).embedding.weight) == config["vocab_size"]


def wrong(home: Path) -> dict[str, tuple[list[Any], int, str]]:
    new, file = home / "new", home / "model.gguf"
    return {
        "taken": ([file, home], 2, "is there already and not an empty folder; name another"),
        "a file": ([file, file], 2, "is there already and not an empty folder"),
        "nowhere": ([home / "nowhere", new], 4, "nowhere does not exist; give a GGUF file"),
        "safetensors": ([folder("gpt2"), new], 4, "nothing is to be converted, regard.load reads"),
        "cut": ([home / "cut.gguf", new], 4, "cut.gguf is not a whole GGUF file"),
        "named so": ([home / "text.gguf", new], 4, "text.gguf is not a whole GGUF file"),
        "text": ([home / "text.txt", new], 4, "neither a GGUF file nor pickled weights"),
        "several": ([home / "many", new], 4, "holds 2 GGUF files; name the one to convert"),
        "dtype": ([file, new, "--dtype", "int8"], 2, "'int8'"),
        "no place": ([file, "text.gguf/new"], 1, "cannot write"),
        "no folder": ([file], 2, "FOLDER"),
        "loaded": (["generate", file, "x"], 4, "Convert it once: regard convert"),
        "loaded folder": (["generate", home / "many", "x"], 4, "Convert it once: regard convert"),
    }


@pytest.mark.parametrize("what", wrong(Path()))
def test_mistake_is_one_line_and_leaves_nothing(
    what: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    (home / "many").mkdir(exist_ok=True)
    (home / "cut.gguf").write_bytes((home / "model.gguf").read_bytes()[:-1000])
    for name in ("text.gguf", "text.txt", "many/a.gguf", "many/b.gguf"):
        (home / name).write_text("not a model")
    words, code, text = wrong(home)[what]
    before = sorted(home.rglob("*"))
    done = call(*([] if words[0] == "generate" else ["convert"]), *words)
    assert done.code == code and done.out == ""
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert text in done.err
    assert sorted(home.rglob("*")) == before
