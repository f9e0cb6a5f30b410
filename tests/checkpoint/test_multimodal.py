"""Folders that read pictures too: their language model is read as one of its family, and the rest is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.checkpoint.families import FAMILIES, MULTIMODAL
from regard.errors import Notice, UsageError
from regard.models.mtp import MTP
from tests.checkpoint.cases import KV

TEXT = dict(KV, num_hidden_layers=3, head_dim=6, pad_token_id=0)
PICTURES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20)
PICTURES |= dict(image_size=14, patch_size=7)
PIXTRAL = dict(PICTURES, model_type="pixtral", head_dim=8)
_TILES = dict(PICTURES, intermediate_size=64, image_size=28, vision_output_dim=32)
_TILES |= dict(projector_input_dim=32, projector_output_dim=32)
_CHUNKS = dict(num_local_experts=4, intermediate_size_mlp=22, attention_chunk_size=4)
_MERGED = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=20, patch_size=7)
_MERGED |= dict(out_hidden_size=24, num_position_embeddings=16)
_STATES = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=5)
_STATES |= dict(linear_value_head_dim=7, linear_conv_kernel_dim=3, full_attention_interval=3)
_STATES |= dict(rms_norm_eps=0.1, head_dim=8)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
_EXPERTS |= dict(shared_expert_intermediate_size=13)
LM = "ForConditionalGeneration"
_LATER = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=3)
_LATER |= dict(llama_4_scaling_beta=0.6)
# A class of theirs, perhaps with a word behind it -> what its language model is, both settings, the class that we save.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    f"Gemma3{LM}": (dict(TEXT, sliding_window=4), PICTURES, "Gemma3ForCausalLM"),
    "Gemma3ForSequenceClassification": (
        dict(TEXT, sliding_window=4), PICTURES, "Gemma3TextForSequenceClassification",
    ),
    "Gemma3Model": (dict(TEXT, sliding_window=4), PICTURES, "Gemma3TextModel"),
    f"Mistral3{LM}": (dict(TEXT, model_type="mistral"), PIXTRAL, "MistralForCausalLM"),
    f"Mistral3{LM} newer": (
        dict(TEXT, model_type="ministral3", rope_parameters=_LATER), PIXTRAL, "Ministral3ForCausalLM",
    ),
    f"Llama4{LM}": (dict(TEXT, **_CHUNKS), _TILES, "Llama4ForCausalLM"),
    f"Qwen3_5{LM}": ({**TEXT, **_STATES}, _MERGED, "Qwen3_5ForCausalLM"),
    f"Qwen3_5Moe{LM}": ({**TEXT, **_STATES, **_EXPERTS}, _MERGED, "Qwen3_5MoeForCausalLM"),
    f"Gemma4{LM}": (
        dict(TEXT, sliding_window=4, global_head_dim=6, hidden_size_per_layer_input=0),
        dict(PICTURES, num_key_value_heads=2, head_dim=8), "Gemma4ForCausalLM",
    ),
}  # fmt: skip


def make(name: str, tied: bool = False) -> Any:
    """A tiny random model of theirs."""
    transformers = pytest.importorskip("transformers")
    cls, (text, pictures, _) = getattr(transformers, name.split()[0]), CASES[name]
    more = dict(tie_word_embeddings=tied, image_token_index=49, num_labels=3)
    torch.manual_seed(0)
    module = cls(cls.config_class(text_config=dict(text), vision_config=dict(pictures), **more))
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return module.eval()


@torch.no_grad()
def assert_answers_as(module: Any, model: regard.Model) -> None:
    ids = torch.randint(3, 43, (2, 9), generator=torch.Generator().manual_seed(1))
    out = module(input_ids=ids, attention_mask=torch.ones_like(ids))
    wanted = out.logits if hasattr(out, "logits") else out.last_hidden_state
    torch.testing.assert_close(model(ids), wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_language_model_answers_as_the_whole_does(name: str, tied: bool, tmp_path: Path) -> None:
    """And is saved as a plain folder of its family, which transformers reads."""
    import transformers

    module = make(name, tied)
    module.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "preprocessor_config.json").write_text("{}")
    part = r"(embed_vision|multi_modal_projector|vision_\w+|visual) \(\d+ tensors\)"
    left = rf"left out: {part}(, {part})*\. save"
    with pytest.warns(Notice, match=left):
        model = regard.load(tmp_path / "theirs")
    assert_answers_as(module, model)
    with pytest.warns(Notice, match="plain"):
        assert_answers_as(module, regard.from_hf(module))
    folder = model.save(tmp_path / "ours")
    assert not (folder / "preprocessor_config.json").exists()
    again = getattr(transformers, CASES[name][2]).from_pretrained(folder).eval()
    assert_answers_as(again, model)
    assert_answers_as(module, regard.load(folder))


@pytest.mark.parametrize("name", [f"Gemma3{LM}", f"Mistral3{LM}"])
@pytest.mark.parametrize("first", ["language_model.model.", "model.language_model."])
def test_language_model_has_either_name_of_its_body(name: str, first: str, tmp_path: Path) -> None:
    """Published folders have both."""
    module = make(name)
    module.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    old = {"language_model.lm_head.": "lm_head."} if first.startswith("l") else {}
    old |= {first: "language_model.model."}
    stored = {}
    for n, x in load_file(file).items():
        new = next((a + n.removeprefix(b) for a, b in old.items() if n.startswith(b)), n)
        stored[new] = x
    save_file(stored, file)
    assert any(n.startswith(first) for n in stored)
    with pytest.warns(Notice):
        assert_answers_as(module, regard.load(tmp_path))


def test_missing_keys_of_gemma_3_are_what_transformers_takes() -> None:
    """The published ones say little of their language model."""
    transformers = pytest.importorskip("transformers")
    missing = MULTIMODAL["gemma3"].missing
    config = transformers.Gemma3TextConfig()
    assert missing == {key: getattr(config, key) for key in missing}
    needed = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"}
    assert {*needed, "intermediate_size", "max_position_embeddings"} == missing.keys()


def test_every_row_names_a_family() -> None:
    assert {row.text for row in MULTIMODAL.values()} <= FAMILIES.keys()
    assert not MULTIMODAL.keys() & FAMILIES.keys()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"text_config": {"model_type": "mamba"}}, "text_config has model_type 'mamba', which is"),
        ({"text_config": [1]}, "text_config is .1.; it must be an object"),
        ({"architectures": ["Gemma3Poet"]}, "'Gemma3Poet'; of gemma3, known: ...ForConditional"),
    ],
)
def test_what_is_not_known_of_it_is_named(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make(f"Gemma3{LM}").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UsageError, match=said):
        regard.load(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("name", [f"Qwen3_5{LM}", f"Qwen3_5Moe{LM}"])
def test_mtp_layers_beside_pictures_are_read(name: str, tmp_path: Path) -> None:
    """They stand at the top of the folder, not inside the language model."""
    make(name).save_pretrained(tmp_path / "whole")
    with pytest.warns(Notice, match="language model alone"):
        plain = regard.load(tmp_path / "whole")
    made = replace(plain.config, mtp=MTP(shared=True)).make()
    made.load_state_dict(plain.state_dict(), strict=False)
    made.origin = plain.origin
    made.save(tmp_path / "text")
    layers = {
        k: x for k, x in load_file(tmp_path / "text/model.safetensors").items() if "mtp." in k
    }
    file = tmp_path / "whole/model.safetensors"
    save_file(load_file(file) | layers, file, {"format": "pt"})
    with pytest.warns(Notice, match="language model alone"):
        model = regard.load(tmp_path / "whole")
    assert model.config == made.config
    for key, x in made.state_dict().items():
        assert torch.equal(model.state_dict()[key], x), key
