"""Wrong folders get one error type and a sentence that says what was asked and what is possible."""

import json
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.checkpoint.hf import read
from regard.checkpoint.hf_tables import FAMILIES
from regard.checkpoint.store import Weights
from regard.config import UsageError
from tests.checkpoint.families import ONE_A_FAMILY, Peer

SIZES = dict(layers=2, dim=24, heads=3, ffn_dim=20, vocab=50, max_len=40)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return regard.build("gpt2", **SIZES).save(tmp_path_factory.mktemp("bad") / "gpt2")


@pytest.fixture
def folder(gpt2: Path, tmp_path: Path) -> Path:
    """A good GPT-2 folder to spoil."""
    return Path(shutil.copytree(gpt2, tmp_path / "gpt2"))


def configure(folder: Path, drop: str = "", **changes: Any) -> Path:
    path = folder / "config.json"
    data = json.loads(path.read_text()) | changes
    data.pop(drop, None)
    path.write_text(json.dumps(data))
    return folder


def refused(folder: Path, *words: str) -> str:
    """Loading is refused, and the sentence holds every one of the words."""
    with pytest.raises(UsageError) as caught:
        regard.load(folder)
    text = str(caught.value)
    assert [w for w in words if w not in text] == [], text
    assert len(text) < 2000
    return text


# --- config.json --------------------------------------------------------------------------------------------------


def test_unknown_key_names_the_nearest(folder: Path) -> None:
    refused(configure(folder, n_layers=3), "'n_layers'", "gpt2", "did you mean 'n_layer'?")


def test_unknown_key_like_no_other_lists_those_of_the_family(folder: Path) -> None:
    refused(configure(folder, quantization_config={}), "'quantization_config'", "known:", "n_embd")


@pytest.mark.parametrize("key", ["n_layer", "n_embd", "n_head", "vocab_size", "n_positions"])
def test_missing_key_is_named(key: str, folder: Path) -> None:
    refused(configure(folder, drop=key), f"{key} is missing", "gpt2")


def test_unknown_model_type_lists_the_known(folder: Path) -> None:
    refused(configure(folder, model_type="mamba"), "'mamba'", *FAMILIES, "regard")


@pytest.mark.parametrize("kind", [None, 5, [], {}, ""])
def test_model_type_that_is_none_lists_the_known(kind: object, folder: Path) -> None:
    refused(configure(folder, model_type=kind), "model_type", *FAMILIES)


def test_unknown_architecture_lists_those_of_the_family(folder: Path) -> None:
    said = ["GPT2ForSequenceClassification"]
    refused(configure(folder, architectures=said), *said, "gpt2", "GPT2LMHeadModel", "GPT2Model")


def test_auto_map_is_refused_by_name(folder: Path) -> None:
    configure(folder, auto_map={"AutoModel": "modeling.Mine"})
    (folder / "modeling.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    refused(folder, "auto_map", "run code", "delete that key")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("word", ["dynamic", "longrope", "proportional"])
def test_unknown_rope_lists_the_known(word: str, tmp_path: Path) -> None:
    regard.build("llama", **SIZES, kv_heads=1).save(tmp_path)
    configure(tmp_path, rope_parameters={"rope_type": word, "rope_theta": 1e4})
    refused(tmp_path, word, "linear", "llama3", "yarn")


@pytest.mark.parametrize("key", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_switch_that_regard_lacks_is_refused(key: str, folder: Path) -> None:
    refused(configure(folder, **{key: True}), key, "True", "can only do False")


def test_heads_that_do_not_divide_say_what_would(folder: Path) -> None:
    refused(configure(folder, n_head=5), "heads=5", "dim=24", "[1, 2, 3, 4, 6, 8, 12, 24]")


def test_number_of_layers_beyond_the_weights_is_refused_at_once(folder: Path) -> None:
    refused(configure(folder, n_layer=10**12), "n_layer", "1,000,000,000,000", "tensors")


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ('{"a": 1,}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"layer_norm_epsilon": NaN}', "NaN is no finite number"),
        ('{"layer_norm_epsilon": -Infinity}', "-Infinity is no finite number"),
        ('{"layer_norm_epsilon": 1e999}', "1e999 is no finite number"),
        ("[]", "must hold a JSON object, it holds a list"),
        ("null", "must hold a JSON object"),
        ("3", "must hold a JSON object"),
    ],
)
def test_config_that_is_no_object_says_why(text: str, why: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    refused(folder, "config.json", why)


def test_config_that_is_not_utf8_says_so(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"model_type": "\xff"}')
    refused(folder, "config.json is not valid JSON")


def test_config_that_is_a_folder_says_so(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    refused(folder, "config.json cannot be read")


@pytest.mark.parametrize("name", ONE_A_FAMILY)
def test_wrong_values_of_any_key_raise_usage_error_only(
    name: str, peer: Callable[[str], Peer]
) -> None:
    """Every key of the family, with values of every type: refused in words, or a model."""
    wrong = [None, "x", "", -1, 0, 1.5, -0.5, 10**6, True, False, [], [1], {}, {"a": 1}]
    said = json.loads((peer(name).folder / "config.json").read_text())
    weights, family = Weights(peer(name).folder), FAMILIES[said["model_type"]]
    rng = random.Random(name)
    for key in sorted({"architectures", *(n for r in family.config for n in r.names)}):
        for value in rng.sample(wrong, 6):
            try:
                read(said | {key: value}, weights, None, None)
            except UsageError as error:
                assert len(str(error)) < 3000
            except Exception as error:
                pytest.fail(f"{key} = {value!r} gives {error!r}")


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
    refused(folder, file, "pickled", "run code", "save_pretrained", "model.safetensors")
    assert not (folder / "ran").exists()


def test_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere is no folder", "config.json")


def test_file_in_place_of_a_folder_says_so(folder: Path) -> None:
    refused(folder / "config.json", "is no folder")


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
    text = refused(folder, "spare has the type", "F32", "BF16")
    assert re.search(r"type C64", text)


# --- the call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids, words",
    [
        (torch.zeros(1, 41, dtype=torch.long), ["41 tokens", "context is 40"]),
        (torch.full((1, 3), 50), ["between 0 and 49", "got 50"]),
        (torch.full((1, 3), -1), ["between 0 and 49", "got -1"]),
        (torch.zeros(0, 3, dtype=torch.long), ["empty batch"]),
        (torch.zeros(2, 0, dtype=torch.long), ["empty batch"]),
        (torch.zeros(3, dtype=torch.long), ["shape (b, t)"]),
        (torch.zeros(1, 3), ["whole numbers"]),
    ],
)
def test_wrong_ids_say_what_is_possible(ids: torch.Tensor, words: list[str], gpt2: Path) -> None:
    with pytest.raises(UsageError) as caught:
        regard.load(gpt2)(ids)
    assert [w for w in words if w not in str(caught.value)] == []


def test_missing_source_says_how_to_give_it() -> None:
    model = regard.build("t5-small", **{k: v for k, v in SIZES.items() if k != "max_len"})
    with pytest.raises(UsageError, match=r"source=source_ids"):
        model(torch.zeros(1, 3, dtype=torch.long))
