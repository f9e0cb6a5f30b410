"""Folders that may come from anyone: what is no plain file of the folder is refused at once, in one sentence."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.checkpoint import store
from regard.cli.main import main as command
from regard.errors import UsageError
from regard.files import FILE_BYTES, JSON_BYTES, loads, model_folder, read_files
from regard.kernels.linear import half_is_fast
from regard.text import Tokenizer
from tests.checkpoint.spoil import SIZES, configure, refused

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# config.json, one that the tokenizer reads, one that is only carried
FILES = [CONFIG, "tokenizer_config.json", "vocab.txt", "chat_template.jinja"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "gpt2"
    regard.build("gpt2", **SIZES).save(home)
    for name in FILES[1:]:
        (home / name).write_text("{}")
    return home


# --- what is no regular file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, "model.safetensors.index.json"])
def test_pipe_is_refused_and_not_waited_for(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused(folder, name, "not a regular file")


@pytest.mark.parametrize("name", [CONFIG, "vocab.txt"])
def test_huge_sparse_file_is_refused_by_its_size(name: str, folder: Path) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(4 * 2**30)
    limit = JSON_BYTES if name == CONFIG else FILE_BYTES
    refused(folder, name, "4,294,967,296 bytes", f"{limit:,}")


# --- links --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["file", "device", "nothing"])
@pytest.mark.parametrize("name", [*FILES, WEIGHTS])
def test_link_out_of_the_folder_is_refused(name: str, target: str, folder: Path) -> None:
    """Its content would be written into what is saved, and perhaps shared."""
    secret = folder.parent / "secret"
    if target == "file":
        (folder / name).rename(secret)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero" if target == "device" else secret)
    if (name, target) != (WEIGHTS, "nothing"):
        refused(
            folder, name, "link out of its folder" if name != WEIGHTS or target == "file" else ""
        )


def test_link_inside_the_folder_is_followed(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "here.safetensors")
    (folder / WEIGHTS).symlink_to("here.safetensors")
    assert regard.load(folder).config.tower.layers == 2


def _dangling(path: Path) -> None:
    path.symlink_to("gone")


ODD = {
    "dangling link": (_dangling, "does not exist"),
    "directory": (Path.mkdir, "not a regular file"),
    "pipe": (os.mkfifo, "not a regular file"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", [*FILES, WEIGHTS, store.INDEX])
def test_odd_entry_of_a_folder_is_named_in_one_sentence(
    name: str, kind: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """Whoever reads the folder: a model, its tokenizer, a command."""
    make, why = ODD[kind]
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    refused(folder, name, why)
    if name not in (CONFIG, WEIGHTS, store.INDEX):
        with pytest.raises(UsageError, match=why):
            Tokenizer.from_folder(folder)
    code = command(["generate", str(folder), "once"])
    said = capsys.readouterr().err
    assert code and name in said and "Traceback" not in said


def test_link_to_itself_is_refused(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to(CONFIG)
    refused(folder, CONFIG)


def snapshot(folder: Path, home: Path) -> Path:
    """The folder as huggingface_hub keeps it: links into the blobs beside."""
    blobs, here = home / "blobs", home / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    here.mkdir(parents=True)
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{i:040x}")
        (here / path.name).symlink_to(f"../../blobs/{i:040x}")
    return here


def test_snapshot_of_a_hub_s_cache_loads(folder: Path, tmp_path: Path) -> None:
    here = snapshot(folder, tmp_path / "models--org--name")
    model = regard.load(here)
    assert model.config.tower.layers == 2 and "vocab.txt" in model.origin.files
    # The folder itself may be a link, as `last` and `best` of a run are.
    (tmp_path / "link").symlink_to(here)
    assert regard.load(tmp_path / "link").config == model.config


def test_snapshot_with_a_link_out_of_its_cache_is_refused(folder: Path, tmp_path: Path) -> None:
    here = snapshot(folder, tmp_path / "models--org--name")
    (tmp_path / "secret").write_text("mine")
    blob = (here / "vocab.txt").resolve()
    blob.unlink()
    blob.symlink_to(tmp_path / "secret")
    refused(here, "vocab.txt", "link out of its folder")


def test_tokenizer_reads_its_folder_as_safely(folder: Path) -> None:
    (folder.parent / "secret").write_text("mine")
    (folder / "vocab.txt").unlink()
    (folder / "vocab.txt").symlink_to(folder.parent / "secret")
    with pytest.raises(UsageError, match="link out of its folder"):
        Tokenizer.from_folder(folder)


def test_files_that_are_not_there_are_left_out(folder: Path) -> None:
    assert read_files(folder, ["vocab.txt", "merges.txt"]) == {"vocab.txt": b"{}"}


# --- JSON ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"x": [{"b": 1, "c": 2, "b": 3}]}'])
def test_key_that_stands_twice_is_an_error(text: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="stands twice"):
        loads(text)
    (folder / CONFIG).write_text(text)
    refused(folder, CONFIG, "stands twice in one object")
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(UsageError, match="stands twice"):
        Tokenizer.from_files(read_files(folder, ["tokenizer_config.json"]))


# --- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.int32, torch.int8, torch.uint8, torch.float8_e4m3fn]
)
def test_weights_that_are_no_floats_are_refused(dtype: torch.dtype, folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = "transformer.h.0.attn.c_attn.weight"
    save_file({**tensors, name: tensors[name].to(dtype)}, folder / WEIGHTS)
    refused(folder, name, f"stored as {str(dtype)[6:]}", "float32, bfloat16, float16, float64")
    with pytest.raises(UsageError, match="stored as"):
        regard.load(folder, dtype=torch.float32)


def test_weights_of_several_types_become_the_one_that_the_config_says(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    mixed = {n: x if "ln_" in n else x.bfloat16() for n, x in tensors.items()}
    save_file(mixed, folder / WEIGHTS)
    # Where a CPU does not multiply it, bf16 is computed with in float32.
    half = torch.bfloat16 if half_is_fast() else torch.float32
    for said, kind in (("bfloat16", half), (None, torch.float32)):
        model = regard.load(configure(folder, dtype=said))
        assert {p.dtype for p in model.parameters()} == {kind}
        assert model(torch.zeros(1, 3, dtype=torch.long)).isfinite().all()


def empties(path: Path, count: int, start: str = "x") -> None:
    entry = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    entries = (f'"{start}{i}": {entry}' for i in range(count))
    header = ("{" + ", ".join(entries) + "}").encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def test_million_empty_tensors_are_refused_at_once(folder: Path) -> None:
    empties(folder / WEIGHTS, 1_000_000)
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"\0" * 8)
    text = refused(folder, "table of tensors", f"{store.HEADER_BYTES:,}")
    assert "missing" not in text


def test_tensors_of_all_files_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "TENSORS", 50)
    names = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    for i, name in enumerate(names):
        empties(folder / name, 20, f"file{i}.")
    index = {"weight_map": {f"file{i}.0": name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "more than 50 tensors")


# --- names on the hub ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.2-1B", "org/name@v1.0"])
@pytest.mark.parametrize("opening", [regard.load, Tokenizer.from_folder, model_folder])
def test_name_on_the_hub_is_told_how_to_be_brought(
    opening: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        opening(name)
    assert str(caught.value).endswith(f": regard pull {name}")


@pytest.mark.parametrize("name", ["./gpt2", "a/b/c", "../x", "-x", "/nowhere/at/all", "runs/x"])
def test_path_that_is_no_name_on_the_hub_is_told_of_no_download(name: str) -> None:
    with pytest.raises(UsageError, match="is not a folder") as caught:
        model_folder(name)
    assert "regard pull" not in str(caught.value)


# --- saving -------------------------------------------------------------------------------------------------------


def test_model_of_presets_alone_can_be_saved(tmp_path: Path) -> None:
    script = f"""
from regard.presets import build
build("gpt2", layers=1, dim=8, heads=1, ffn_dim=8, vocab=9, max_len=8).save({str(tmp_path / "m")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert regard.load(tmp_path / "m").config.tower.layers == 1


def test_link_that_leads_nowhere_is_named_and_not_suggested(tmp_path: Path) -> None:
    link = tmp_path / "best"
    link.symlink_to("step-610")
    with pytest.raises(UsageError, match="is a link to step-610, which is not there") as error:
        model_folder(link)
    assert "did you mean" not in str(error.value)
