"""A stranger adds a family of Hugging Face's: a row of FAMILIES, and its presets with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.checkpoint import rules, tensors
from regard.checkpoint.families import FAMILIES
from regard.checkpoint.families.common import GATED, SWIGLU, decoder_heads, llama_like, sizes
from regard.checkpoint.rules import ACTIVATIONS, Key
from regard.checkpoint.tensors import To
from regard.presets import PRESETS, presets_of
from tests.open.stranger import added, decodes, home, promised

CAT = llama_like(
    "catlm", decoder_heads("Cat"), regard.GQA(1, 1, 1, rope=regard.Rope(), qk_norm=1e-6), SWIGLU,
    keys=dict(
        num_hidden_layers=None, depth=Key("tower.layers"), hidden_act=None,
        whiskers=Key("tower.ffn.activation", "silu", ACTIVATIONS), **rules.fixed(tail=True),
    ),
    inert="fur",
    layer={
        "purr.{before,after}.weight": "norm{1,3}.weight",
        "paw.qkv.*": To("attention.w{q,k,v}.*", tensors.JOINED), "paw.out.*": "attention.wo.*",
        "paw.{q,k}_norm.weight": "attention.{q,k}_norm.weight", **GATED,
    },
    presets={"cat-tiny": sizes(60, 32, 2, 4, 48, 64, depth=2, num_key_value_heads=2)},
)  # fmt: skip
CONFIG = dict(
    architectures=["CatForCausalLM"], model_type="catlm", vocab_size=60, hidden_size=32, depth=2,
    num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64,
    whiskers="gelu_new", fur="long",
)  # fmt: skip


@pytest.fixture(autouse=True)
def cat() -> Iterator[None]:
    with added(FAMILIES, "catlm", CAT):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As another program would have written it."""
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (60, 32), "model.norm.weight": (32,)}
    for i in range(2):
        layer = {"purr.before.weight": (32,), "purr.after.weight": (32,)}
        layer |= {"paw.qkv.weight": (64, 32), "paw.out.weight": (32, 32)}
        layer |= {"paw.q_norm.weight": (8,), "paw.k_norm.weight": (8,)}
        layer |= {"mlp.gate_proj.weight": (48, 32), "mlp.up_proj.weight": (48, 32)}
        layer |= {"mlp.down_proj.weight": (32, 48)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["lm_head.weight"] = (60, 32)
    path = tmp_path / "cat"
    path.mkdir()
    save_file({n: torch.randn(*s) * 0.3 for n, s in shapes.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_added_family_is_read_and_written_back(folder: Path, tmp_path: Path) -> None:
    model = regard.load(folder)
    assert model.config.tower.ffn.activation == "gelu_tanh" and len(model.tower.blocks) == 2
    back = model.save(tmp_path / "back")
    one, two = (load_file(path / "model.safetensors") for path in (folder, back))
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    theirs = json.loads((back / "config.json").read_text())
    assert theirs == theirs | CONFIG
    decodes(model)


def test_wrong_folder_of_an_added_family_is_refused_in_its_words(folder: Path) -> None:
    def spoilt(**changes: object) -> str:
        config = {k: v for k, v in (CONFIG | changes).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(regard.UsageError) as error:
            regard.load(folder)
        return str(error.value)

    assert "depth is missing; a catlm model needs it" in spoilt(depth=None)
    assert "tail is False, Regard can only do True" in spoilt(tail=False)
    assert "whiskers is 'short'; known: relu" in spoilt(whiskers="short")
    assert "num_key_value_heads is 3" in spoilt(num_key_value_heads=3)
    assert "architectures has 'DogForCausalLM'" in spoilt(architectures=["DogForCausalLM"])


def test_preset_of_an_added_family_is_built_changed_and_written_in_its_words(
    tmp_path: Path,
) -> None:
    (name,) = rows = presets_of(CAT)
    with added(PRESETS, name, rows[name]):
        model = regard.build(name, layers=3, ffn_dim=40)
    theirs = json.loads((model.save(tmp_path / "new") / "config.json").read_text())
    assert (theirs["model_type"], theirs["depth"], theirs["intermediate_size"]) == ("catlm", 3, 40)
    assert regard.load(tmp_path / "new").config == regard.load(model.save(tmp_path / "b")).config


def test_family_costs_as_many_files_as_the_architecture_says() -> None:
    assert home(FAMILIES) == "regard/checkpoint/families/__init__.py"
    assert len({home(FAMILIES)}) == promised("add a Hugging Face family")
