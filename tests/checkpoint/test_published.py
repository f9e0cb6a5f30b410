"""Configs as they are published: each is read, at a small size gives transformers' numbers, and is written back."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import regard
from regard.checkpoint.families import FAMILIES, INERT
from regard.checkpoint.hf import express, read
from regard.checkpoint.store import Source, memory
from regard.errors import Notice
from tests.checkpoint.families import Peer, error
from tests.checkpoint.spoil import configure, refused

Peers = Callable[[str], Peer]
PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))

# What a size becomes where a config has it; what it leaves open stays open.
WIDTH, HEADS, LAYERS = 48, 6, 2
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_decoder_layers", "encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "d_ff", "n_inner"), 40),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 40),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), 50),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 40),
    **dict(head_dim=8, d_kv=8, sliding_window=4, max_window_layers=1, image_size=12, patch_size=4),
    **dict(kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6),
    **dict(n_routed_experts=16, num_local_experts=4, num_experts_per_tok=2),
    **dict(moe_intermediate_size=12, first_k_dense_replace=1),
    **dict(embedding_size=20, local_attention=4, original_max_position_embeddings=16),
    **dict(index_head_dim=16, index_n_heads=7, index_topk=5),
}


def small(published: dict[str, Any]) -> dict[str, Any]:
    data = {k: SMALL[k] if k in SMALL and v is not None else v for k, v in published.items()}
    heads = next((published[k] for k in ("num_attention_heads", "n_head") if k in published), 0)
    if "num_key_value_heads" in data:
        data["num_key_value_heads"] = HEADS if published["num_key_value_heads"] == heads else 2
    if (data.get("n_group") or 1) > 1:
        data |= {"n_group": 2, "topk_group": 1}
    turned = int(8 * data.get("partial_rotary_factor", 1)) // 2
    for key, value in data.items():
        if key == "layer_types":
            data[key] = value[-LAYERS:]
        if key == "rope_scaling" and value and "long_factor" in value:
            factors = {k: v[:turned] for k, v in value.items() if k.endswith("_factor")}
            data[key] = value | factors
        if key.endswith("_token_id") and isinstance(value, int) and value >= 50:
            data[key] = 49
        if key == "rope_scaling" and value and "original_max_position_embeddings" in value:
            data[key] = value | {"original_max_position_embeddings": 16}
    return data


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_numbers_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.core_model_loading import revert_weight_conversion

    said = small(PUBLISHED[name])
    said.pop("quantization_config", None)
    cls = getattr(transformers, said["architectures"][0])
    torch.manual_seed(0)
    module = cls(cls.config_class(**said)).eval()
    with torch.no_grad():
        for n, p in module.named_parameters():
            if said["model_type"] != "marian" or "embed_positions" not in n:
                p.add_(torch.randn_like(p) * 0.1)
    tensors = revert_weight_conversion(module, module.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Notice)
        model = read(said, memory(tensors), None, None)
    assert error(model, module) < 2e-4

    # What transformers' class does not define is named, in one notice; all is written back.
    notices = [str(w.message) for w in caught if w.category is Notice]
    defined = set(json.loads(cls.config_class().to_json_string(use_diff=False)))
    unknown = {k for k in said if k not in defined | INERT and k not in rules(said["model_type"])}
    assert len(notices) == bool(unknown)
    assert [key for key in unknown if key not in notices[0]] == []
    _, written, _ = express(model, model.origin)
    assert {key: written.get(key) for key in said} == said


def rules(family: str) -> frozenset[str]:
    return FAMILIES[family].keys | set(FAMILIES[family].aliases)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_and_alias_of_transformers_class_has_a_rule(name: str) -> None:
    """So a key without one is a key that transformers does not define."""
    config = pytest.importorskip("transformers").AutoConfig.for_model(name)
    keys = set(json.loads(config.to_json_string(use_diff=False)))
    assert keys - rules(name) - INERT == set()
    assert config.attribute_map.items() <= FAMILIES[name].aliases.items()


@pytest.mark.parametrize("name", ["gpt2", "distilbert-ForMaskedLM", "t5", "bart", "mixtral"])
def test_other_names_of_keys_mean_the_same(name: str, peer: Peers, tmp_path: Path) -> None:
    said = json.loads((peer(name).folder / "config.json").read_text())
    aliases = FAMILIES[said["model_type"]].aliases
    other = {new: old for old, new in aliases.items()}
    folder = regard.load(peer(name).folder).save(tmp_path)
    (folder / "config.json").write_text(json.dumps({other.get(k, k): v for k, v in said.items()}))
    assert regard.load(folder).config == regard.load(peer(name).folder).config


def test_code_of_the_folder_is_named_and_never_run(folder: Path) -> None:
    extra = ["unsloth_fixed", "eos_token_ids", "_model_name_or_path", "condition_on_chain"]
    configure(folder, auto_map={"AutoModel": "modeling.Mine"}, **dict.fromkeys(extra, True))
    (folder / "modeling.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.warns(Notice, match="unsloth_fixed.*Regard runs its own, never that") as caught:
        regard.load(folder)
    text = str(caught[0].message)
    assert len(caught) == 1 and not [key for key in extra if key not in text]
    assert not (folder / "ran").exists()


def test_key_that_looks_like_another_is_named_with_it(folder: Path) -> None:
    with pytest.warns(Notice, match=r"n_layers \(did you mean n_layer\?\)"):
        regard.load(configure(folder, n_layers=3))


@pytest.mark.parametrize("key, value", [("is_causal", False), ("per_layer_config", {"0": {}})])
def test_key_that_changes_the_forward_pass_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    sizes = dict(layers=1, dim=24, heads=3, kv_heads=3, ffn_dim=20, vocab=50, max_len=40)
    regard.build("mistral-7b", **sizes).save(tmp_path)
    refused(configure(tmp_path, **{key: value}), key, str(value), "can only do")


# --- fp8 in blocks ------------------------------------------------------------------------------------------------

BLOCK = (16, 8)
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit numbers and a scale for each block, the last ones smaller."""
    scales = torch.empty(*(-(-n // b) for n, b in zip(x.shape, BLOCK)))
    packed = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    for i, rows in enumerate(x.split(BLOCK[0])):
        for j, part in enumerate(rows.split(BLOCK[1], 1)):
            scales[i, j] = part.abs().max() / 448
            at = slice(i * BLOCK[0], i * BLOCK[0] + len(part))
            packed[at, j * BLOCK[1] : j * BLOCK[1] + part.shape[1]] = (part / scales[i, j]).to(
                packed.dtype
            )
    return packed, scales


def wide(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Their product, number by number."""
    at = [torch.arange(n) // b for n, b in zip(packed.shape, BLOCK)]
    return packed.float() * scales[at[0]][:, at[1]]


@pytest.fixture
def packed(peer: Peers, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A DeepSeek-V3 folder in 8 bits, and what its weights mean."""
    from tests.checkpoint.families import tensors

    found, meant = tensors(peer("deepseek-v3").folder), {}
    stored: dict[str, torch.Tensor] = {}
    for name, x in found.items():
        if x.dim() == 2 and "_proj" in name:
            stored[name], stored[name + "_scale_inv"] = quantized(x)
            meant[name] = wide(stored[name], stored[name + "_scale_inv"])
        else:
            stored[name] = meant[name] = x if "e_score" in name else x.bfloat16()
    said = json.loads((peer("deepseek-v3").folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"quantization_config": FP8}))
    save_file(stored, tmp_path / "model.safetensors")
    return tmp_path, meant


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_fp8_blocks_are_the_products_with_their_scales(
    dtype: torch.dtype | None,
    packed: tuple[Path, dict[str, torch.Tensor]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    from tests.checkpoint.families import tensors

    folder, meant = packed
    model = regard.load(folder, dtype=dtype)
    # Written whole, though its weights are what the folder packs.
    model.origin.packing = None
    again = model.save(tmp_path_factory.mktemp("plain"))
    assert "quantization_config" not in json.loads((again / "config.json").read_text())
    found = tensors(again)
    assert sorted(found) == sorted(meant)
    for name, x in found.items():
        kind = torch.float32 if "e_score" in name else dtype or torch.bfloat16
        assert x.dtype == kind and torch.equal(x, meant[name].to(kind)), name


def test_fp8_beside_float32_is_never_rounded_to_half(packed: tuple[Path, Any]) -> None:
    """One norm in float32 makes the whole model float32: no weight may have gone through bfloat16 on its way."""
    from tests.checkpoint.families import tensors

    folder = packed[0]
    stored = tensors(folder)
    norms = [name for name in stored if name.endswith("norm.weight")]
    save_file(stored | {norms[0]: stored[norms[0]].float()}, folder / "model.safetensors")
    configure(folder, dtype="float32")
    found, exact = regard.load(folder), regard.load(folder, dtype=torch.float32)
    for (name, x), y in zip(found.named_parameters(), exact.parameters(), strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, y), name


def test_fp8_is_unpacked_tensor_by_tensor(
    packed: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts, which are stacked, too: never more than one is there in 8 bits and unpacked at once."""
    calls: list[list[str]] = []
    real = Source.borrow

    def borrow(self: Source, names: list[str]) -> list[torch.Tensor]:
        calls.append(names)
        return real(self, names)

    monkeypatch.setattr(Source, "borrow", borrow)
    regard.load(packed[0])
    scaled = [names for names in calls if any("_scale_inv" in name for name in names)]
    assert scaled and all(len(names) == 2 for names in scaled)


def test_fp8_without_scales_is_refused(packed: tuple[Path, Any]) -> None:
    refused(configure(packed[0], drop="quantization_config"), "stored as float8_e4m3fn")


def test_fp8_with_scales_of_another_shape_is_refused(packed: tuple[Path, Any]) -> None:
    block = {"quantization_config": FP8 | {"weight_block_size": [128, 128]}}
    refused(configure(packed[0], **block), "scales of shape", "blocks of 128 x 128")
