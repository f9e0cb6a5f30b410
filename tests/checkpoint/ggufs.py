"""Tiny GGUF files, made from models of transformers as llama.cpp's convert_hf_to_gguf.py makes them: by the package
gguf, with its own table of names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint.families import BASE, GPT, Case, case, rope

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
WIDE = {**BASE, "hidden_size": 96, "intermediate_size": 64}
CASES = {
    c.name: c
    for c in (
        case("llama", "LlamaForCausalLM", WIDE, num_key_value_heads=1, rms_norm_eps=1e-5),
        case("llama-tied", "LlamaForCausalLM", WIDE, tie_word_embeddings=True, attention_bias=True),
        case("llama-head-dim", "LlamaForCausalLM", WIDE, head_dim=64, mlp_bias=True),
        case(
            "llama3",
            "LlamaForCausalLM",
            WIDE,
            rope("llama3", original_max_position_embeddings=16, **LLAMA3),
        ),
        case("llama-linear", "LlamaForCausalLM", WIDE, rope("linear", factor=4.0)),
        case(
            "llama-yarn",
            "LlamaForCausalLM",
            WIDE,
            rope("yarn", factor=4.0, original_max_position_embeddings=10),
        ),
        case("mistral", "MistralForCausalLM", WIDE, num_key_value_heads=3, sliding_window=5),
        case("mixtral", "MixtralForCausalLM", WIDE, num_key_value_heads=1, num_local_experts=4),
        case("qwen2", "Qwen2ForCausalLM", WIDE, num_key_value_heads=1, rope_theta=1e6),
        case("qwen3", "Qwen3ForCausalLM", WIDE, num_key_value_heads=3, head_dim=64),
        case("gpt2", "GPT2LMHeadModel", GPT, n_embd=96, n_inner=64),
        case("gpt2-untied", "GPT2LMHeadModel", GPT, n_embd=96, tie_word_embeddings=False),
    )
}
ARCHITECTURES = {"mistral": "llama", "mixtral": "llama"}


def saved(made: Any, folder: Path) -> dict[str, Tensor]:
    """The tensors of a model under the names of its folder."""
    made.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write(
    path: Path,
    made: Any,
    tensors: dict[str, Tensor],
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    old_experts: bool = False,
) -> dict[str, Tensor]:
    """Write a model to a GGUF file, matrices in type `kind`; the values that the file then holds, by the folder's
    names. `metadata` adds to the file's, or takes from it (None)."""
    import gguf

    config, model_type = made.config, made.config.model_type
    name = ARCHITECTURES.get(model_type, model_type)
    arch = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}[name]
    layers = config.num_hidden_layers
    names = gguf.get_tensor_name_map(arch, layers)
    said = {**_described(config, name), **(metadata or {})}
    writer = gguf.GGUFWriter(path, name)
    for key, value in said.items():
        if value is not None:
            _add(writer, key, value)
    held: dict[str, Tensor] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for hf, x in tensors.items():
        target = kind if x.dim() == 2 and "embed_positions" not in hf else "F32"
        expert = re.fullmatch(
            r"(model\.layers\.\d+\.block_sparse_moe\.experts)\.(\d+)\.(w\d\.weight)", hf
        )
        theirs = x
        if model_type == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight$", hf):
            theirs = x.T
        packed, values = _packed(theirs, target, len(held))
        held[hf] = values.T if theirs is not x else values
        if name == "llama" and re.search(r"[qk]_proj\.(weight|bias)$", hf):
            heads = config.num_attention_heads if "q_proj" in hf else config.num_key_value_heads
            packed = (
                packed.reshape(heads, 2, -1, *packed.shape[1:]).swapaxes(1, 2).reshape(packed.shape)
            )
        if expert and not old_experts:
            base = names.get_name(f"{expert[1]}.{expert[3].removesuffix('.weight')}")
            stacks.setdefault(f"{base}.weight", []).append(packed)
            continue
        if expert:
            part = {"w1": "gate", "w2": "down", "w3": "up"}[expert[3][:2]]
            new = f"blk.{hf.split('.')[2]}.ffn_{part}.{expert[2]}.weight"
        else:
            new = names.get_name(hf, try_suffixes=(".weight", ".bias"))
        assert new is not None, hf
        _tensor(writer, new, packed, target)
    for new, parts in stacks.items():
        _tensor(writer, new, np.stack(parts), kind)
    scaling = getattr(config, "rope_parameters", None) or {}
    if scaling.get("rope_type") == "llama3":
        _tensor(writer, "rope_freqs.weight", _divisors(scaling, config), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _described(config: Any, name: str) -> dict[str, Any]:
    if name == "gpt2":
        return {
            "gpt2.context_length": config.n_positions,
            "gpt2.embedding_length": config.n_embd,
            "gpt2.block_count": config.n_layer,
            "gpt2.feed_forward_length": config.n_inner or 4 * config.n_embd,
            "gpt2.attention.head_count": config.n_head,
            "gpt2.attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    said = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "rope.dimension_count": width,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if config.model_type == "mixtral":
        said |= {"expert_count": config.num_local_experts}
        said |= {"expert_used_count": config.num_experts_per_tok}
    if config.model_type == "mistral":
        said |= {"attention.sliding_window": config.sliding_window}
    kind = config.rope_parameters["rope_type"]
    if kind in ("linear", "yarn"):
        said |= {"rope.scaling.type": kind, "rope.scaling.factor": config.rope_parameters["factor"]}
    if kind == "yarn":
        length = config.rope_parameters["original_max_position_embeddings"]
        said |= {"rope.scaling.original_context_length": length}
    return {f"{name}.{key}": value for key, value in said.items()}


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def _tensor(writer: Any, name: str, packed: np.ndarray, kind: str) -> None:
    import gguf

    plain = kind in ("F32", "F16")
    raw = None if plain else gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, np.ascontiguousarray(packed), raw_dtype=raw)


def _packed(x: Tensor, kind: str, seed: int) -> tuple[np.ndarray, Tensor]:
    """In the file's type, and the values that it then has."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    values = x.contiguous().float().numpy()
    try:
        packed = gguf.quantize(values, number)
    except NotImplementedError:
        packed = blocks(kind, values.size, seed).reshape(*values.shape[:-1], -1)
    return packed, torch.from_numpy(gguf.dequantize(packed, number).reshape(values.shape).copy())


def blocks(kind: str, count: int, seed: int) -> np.ndarray:
    """Random blocks of a type that gguf can only read: any bytes will do, but for small finite scales."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(seed).integers(0, 256, (count // block, size), dtype=np.uint8)
    scales = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}
    for at in scales[kind]:
        raw[:, at : at + 2] = np.full(len(raw), 0.0005, np.float16).view(np.uint8).reshape(-1, 2)
    return raw


def _divisors(scaling: dict[str, Any], config: Any) -> np.ndarray:
    """rope_freqs.weight as convert_hf_to_gguf.py computes it, in loops."""
    import math

    width = config.hidden_size // config.num_attention_heads
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    found = []
    for i in range(0, width, 2):
        wave = 2 * math.pi * scaling["rope_theta"] ** (i / width)
        if wave < length / high:
            found.append(1.0)
        elif wave > length / low:
            found.append(factor)
        else:
            smooth = (length / wave - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def made(name: str) -> Any:
    case_: Case = CASES[name]
    return case_.make()
