"""Wrong weights get one error type: tensors that do not fit, files that are broken, files that would run code."""

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.errors import UsageError
from tests.checkpoint.spoil import configure, refused

# --- tensors ------------------------------------------------------------------------------------------------------

NAME = "transformer.h.1.attn.c_proj.weight"


def retensor(folder: Path, change: Callable[[dict], None]) -> Path:
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors")
    return folder


def test_missing_tensor_is_named(folder: Path) -> None:
    refused(retensor(folder, lambda t: t.pop(NAME)), NAME, "missing", "0 are left over")


def test_misspelt_tensor_is_named_with_the_nearest(folder: Path) -> None:
    retensor(folder, lambda t: t.update({"transformer.h.1.attn.proj.weight": t.pop(NAME)}))
    refused(folder, f"{NAME} is missing", "did you mean 'transformer.h.1.attn.proj.weight'?")


def test_tensor_left_over_is_named_with_the_nearest(folder: Path) -> None:
    extra = "transformer.h.2.attn.c_proj.weight"
    retensor(folder, lambda t: t.update({extra: t[NAME].clone()}))
    refused(folder, extra, "GPT2LMHeadModel", f"did you mean '{NAME}'?")


def test_tensor_of_the_wrong_shape_says_both_shapes(folder: Path) -> None:
    retensor(folder, lambda t: t.update({NAME: t[NAME][:, :20].contiguous()}))
    refused(folder, NAME, "(24, 20)", "(24, 24)")


def test_native_tensor_left_over_is_named(tmp_path: Path) -> None:
    regard.build("gru-lm", dim=8, vocab=20).save(tmp_path)
    retensor(tmp_path, lambda t: t.update({"embedding.weights": t["embedding.weight"].clone()}))
    refused(tmp_path, "embedding.weights", "did you mean 'embedding.weight'?")


def test_native_config_with_a_wrong_key_names_the_nearest(tmp_path: Path) -> None:
    regard.build("gru-lm", dim=8, vocab=20).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["config"]
    refused(configure(tmp_path, config=config | {"layer": 2}), "layer", "did you mean 'layers'?")
    refused(configure(tmp_path, config=config | {"kind": "mamba"}), "'mamba'", "recurrent")


# --- files --------------------------------------------------------------------------------------------------------


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("part", ["nothing", "length", "half", "header", "first", "last", "more"])
def test_truncated_file_says_to_copy_it_again(part: str, folder: Path) -> None:
    path = folder / "model.safetensors"
    whole, header = path.read_bytes(), header_bytes(path)
    sizes = {"nothing": 0, "length": 7, "half": header // 2, "header": header - 1, "first": header}
    size = sizes.get(part, len(whole) - 1)
    path.write_bytes(whole + b"\0" if part == "more" else whole[:size])
    refused(folder, "model.safetensors", "not a whole safetensors file", "again")


def test_flipped_header_bit_raises_or_changes_nothing(folder: Path) -> None:
    path, rng = folder / "model.safetensors", random.Random(0)
    whole, size = path.read_bytes(), header_bytes(path)
    good = regard.load(folder).state_dict()
    bits = {*range(64), *rng.sample(range(64, 8 * size), 300)}
    refusals = 0
    for bit in sorted(bits):
        spoilt = bytearray(whole)
        spoilt[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoilt)
        try:
            model = regard.load(folder)
        except UsageError:
            refusals += 1
        else:
            state = model.state_dict()
            assert all(torch.equal(state[n], t) for n, t in good.items()), bit
    assert refusals > 0.9 * len(bits)  # what is left stood in the metadata


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "..", ".", "", "..\\x"]
)
def test_index_that_names_files_outside_its_folder_is_refused(name: str, folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "x.safetensors")
    index = {"weight_map": {NAME: name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "index.json", repr(name), "refused")


@pytest.mark.parametrize(
    "index, why",
    [
        ({"weight_map": {NAME: "gone.safetensors"}}, "gone.safetensors, which is missing"),
        ({"weight_map": {"no.such": "model.safetensors"}}, "promises no.such in model.safetensors"),
        ({"weight_map": [NAME]}, "no weight_map"),
        ({"weight_map": {NAME: 3}}, "no weight_map"),
        ({}, "no weight_map"),
    ],
)
def test_index_that_lies_is_named(index: dict, why: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "index.json", why)


def test_two_shards_with_one_tensor_are_refused(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "again.safetensors")
    index = {"weight_map": {NAME: "model.safetensors", "x": "again.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "repeats the tensor")


class Canary:
    """Pickled, this is an order to write a file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "weights.pkl", "model.ckpt"])
def test_pickled_weights_are_refused_and_not_run(file: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(pickle.dumps(Canary(folder / "ran")))
    refused(folder, file, "pickled", "run code", "regard convert", "model.safetensors")
    assert not (folder / "ran").exists()


def test_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere is not a folder", "config.json")


def test_file_in_place_of_a_folder_says_so(folder: Path) -> None:
    refused(folder / "config.json", "is not a folder")


def test_empty_folder_says_what_it_lacks(tmp_path: Path) -> None:
    refused(tmp_path, "config.json does not exist", "model.safetensors")


def test_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "holds no model.safetensors")


def test_unknown_tensor_type_lists_the_known(folder: Path) -> None:
    path = folder / "model.safetensors"
    found = load_file(path)
    found["spare"] = torch.zeros(8, dtype=torch.complex64)
    save_file(found, path)
    refused(folder, "spare has the type C64", "F32", "BF16")
