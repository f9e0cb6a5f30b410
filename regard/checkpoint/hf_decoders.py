"""Decoder-only families as data: GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3, DeepSeek-V2, V3, V3.2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.attention import DSA, GQA, MLA
from regard.block import Tower
from regard.checkpoint.hf_config import ACTIVATIONS, MLP_OR_EXPERTS, ROPE, WINDOWS, groups
from regard.checkpoint.rules import (
    JOINED_TRANSPOSED,
    REQUIRED,
    STACKED,
    TRANSPOSED,
    Family,
    Fixed,
    Inert,
    Key,
    rule,
)
from regard.layers import LM, MLP, Norm
from regard.models import Tokens, TransformerConfig
from regard.moe import MoE
from regard.position import Learned, Rope


def _lm(*names: str) -> dict[str, Any]:
    body, head = names
    return {head: LM(), body: None}


_BODY = "tower.blocks.{i}."
_TIED = (("lm_head.weight", ("model.embed_tokens.weight",), "head.tied"),)
_LM_HEAD = {"lm": (rule("lm_head.weight", "head.weight"),)}
_LLAMA_ATTENTION = tuple(
    rule(f"model.layers.{{i}}.self_attn.{a}", f"{_BODY}attention.{b}")
    for a, b in [
        ("q_proj.*", "wq.*"),
        ("k_proj.*", "wk.*"),
        ("v_proj.*", "wv.*"),
        ("o_proj.*", "wo.*"),
        ("q_norm.weight", "q_norm.weight"),
        ("k_norm.weight", "k_norm.weight"),
    ]
)
_LLAMA_MLP = tuple(
    rule(f"model.layers.{{i}}.mlp.{a}_proj.*", f"{_BODY}ffn.{a}.*") for a in ("gate", "up", "down")
)
_LLAMA_FRAME = (
    rule("model.embed_tokens.weight", "embedding.weight"),
    rule("model.layers.{i}.input_layernorm.weight", _BODY + "norm1.weight"),
    rule("model.layers.{i}.post_attention_layernorm.weight", _BODY + "norm3.weight"),
    rule("model.norm.weight", "tower.norm.weight"),
)
_LLAMA_KEYS = (
    Key("vocab_size", "embedding.vocab"),
    Key("hidden_size", "tower.dim"),
    Key("num_hidden_layers", "tower.layers"),
    Key("max_position_embeddings", "max_len"),
    Key("rms_norm_eps", "tower.norm.eps", 1e-6),
    Key("tie_word_embeddings", "head.tied", False),
)


def _all_heads(hf: Any) -> Any:
    return hf["num_attention_heads"]


_LLAMA_HEADS = (
    Key("num_attention_heads", "tower.attention.heads"),
    Key("num_key_value_heads", "tower.attention.kv_heads", _all_heads),
    Key(
        "head_dim",
        "tower.attention.head_dim",
        lambda hf: hf["hidden_size"] // hf["num_attention_heads"],
    ),
    Key("attention_dropout", "tower.attention.dropout", 0.0),
    ROPE,
)
_GATED = (
    Key("intermediate_size", "tower.ffn.ffn_dim"),
    Key("hidden_act", "tower.ffn.activation", "silu", ACTIVATIONS),
)


_EIGHT_KV = Key("num_key_value_heads", "tower.attention.kv_heads", 8, null=_all_heads)


def _but(rules: tuple[Any, ...], *other: Key) -> tuple[Any, ...]:
    """`rules` with those of the same name replaced."""
    new = {key.name: key for key in other}
    return tuple(new.get(r.names[0], r) for r in rules)


def _llama_like(attention: Any, ffn: Any) -> TransformerConfig:
    tower = Tower(1, 1, attention, ffn, norm=Norm(1e-6, rms=True))
    return TransformerConfig(Tokens(1), tower, max_len=1)


_GQA, _SWIGLU = GQA(1, 1, 1, rope=Rope()), MLP(1, "silu", gated=True, bias=False)

LLAMA = Family(
    name="llama",
    base="model.",
    blank=_llama_like(_GQA, _SWIGLU),
    heads=_lm("LlamaModel", "LlamaForCausalLM"),
    config=(
        *_LLAMA_KEYS,
        *_LLAMA_HEADS,
        *_GATED,
        Key("attention_bias", "tower.attention.bias", False, also=("tower.attention.out_bias",)),
        Key("mlp_bias", "tower.ffn.bias", False),
    ),
    tensors=(*_LLAMA_FRAME, *_LLAMA_ATTENTION, *_LLAMA_MLP),
    head_tensors=_LM_HEAD,
    twins=_TIED,
    derived=(r".*rotary_emb\.inv_freq",),
)
MISTRAL = replace(
    LLAMA,
    name="mistral",
    heads=_lm("MistralModel", "MistralForCausalLM"),
    config=(
        *_LLAMA_KEYS,
        *_but(_LLAMA_HEADS, _EIGHT_KV),
        *_GATED,
        Key("sliding_window", "tower.attention.window", 4096, null=None),
    ),
)
QWEN2 = replace(
    LLAMA,
    name="qwen2",
    blank=_llama_like(replace(_GQA, bias=True), _SWIGLU),
    heads=_lm("Qwen2Model", "Qwen2ForCausalLM"),
    config=(*_LLAMA_KEYS, *_LLAMA_HEADS, *_GATED, WINDOWS),
)
QWEN3 = replace(
    LLAMA,
    name="qwen3",
    blank=_llama_like(replace(_GQA, qk_norm=1e-6), _SWIGLU),
    heads=_lm("Qwen3Model", "Qwen3ForCausalLM"),
    config=(
        *_but(
            _LLAMA_KEYS,
            Key("rms_norm_eps", "tower.norm.eps", 1e-6, also=("tower.attention.qk_norm",)),
        ),
        *_but(_LLAMA_HEADS, Key("head_dim", "tower.attention.head_dim", 128)),
        *_GATED,
        Key("attention_bias", "tower.attention.bias", False, also=("tower.attention.out_bias",)),
        WINDOWS,
    ),
)
MIXTRAL = replace(
    LLAMA,
    name="mixtral",
    blank=_llama_like(replace(_GQA, rope=Rope(1e6)), MoE(1, 1, 1)),
    heads=_lm("MixtralModel", "MixtralForCausalLM"),
    config=(
        *_but(_LLAMA_KEYS, Key("rms_norm_eps", "tower.norm.eps", 1e-5)),
        *_but(_LLAMA_HEADS, _EIGHT_KV),
        *_GATED,
        Key("num_local_experts", "tower.ffn.experts", 8),
        Key("num_experts_per_tok", "tower.ffn.active", 2),
        Key("sliding_window", "tower.attention.window", None),
        Inert(("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")),
    ),
    tensors=(
        *_LLAMA_FRAME,
        *_LLAMA_ATTENTION,
        rule("model.layers.{i}.block_sparse_moe.gate.weight", _BODY + "ffn.router.weight"),
        rule(
            "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight", _BODY + "ffn.gate", STACKED
        ),
        rule(
            "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight", _BODY + "ffn.down", STACKED
        ),
        rule("model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight", _BODY + "ffn.up", STACKED),
    ),
)

GPT2 = Family(
    name="gpt2",
    base="transformer.",
    blank=TransformerConfig(
        Tokens(1, Learned(1)),
        Tower(1, 1, GQA(1, bias=True, out_bias=True), MLP(1, "gelu_tanh")),
        max_len=1,
    ),
    heads=_lm("GPT2Model", "GPT2LMHeadModel"),
    config=(
        Key("vocab_size", "embedding.vocab"),
        Key("n_embd", "tower.dim"),
        Key("n_layer", "tower.layers"),
        Key("n_head", "tower.attention.heads"),
        Key("n_positions", "max_len", also=("embedding.position.max_len",)),
        Key("n_inner", "tower.ffn.ffn_dim", lambda hf: 4 * hf["n_embd"]),
        Key("activation_function", "tower.ffn.activation", "gelu_new", ACTIVATIONS),
        Key("layer_norm_epsilon", "tower.norm.eps", 1e-5),
        Key("tie_word_embeddings", "head.tied", True),
        Key("resid_pdrop", "tower.dropout", 0.1),
        Key("embd_pdrop", "embedding.dropout", 0.1),
        Key("attn_pdrop", "tower.attention.dropout", 0.1),
        Fixed("scale_attn_weights", (True,)),
        Fixed("scale_attn_by_inverse_layer_idx", (False,)),
        Fixed("add_cross_attention", (False,)),
        Inert(
            (
                "n_ctx",
                "n_special",
                "predict_special_tokens",
                "reorder_and_upcast_attn",
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
            )
        ),
    ),
    tensors=(
        rule("transformer.wte.weight", "embedding.weight"),
        rule("transformer.wpe.weight", "embedding.position.weight"),
        rule("transformer.h.{i}.ln_1.*", _BODY + "norm1.*"),
        rule("transformer.h.{i}.ln_2.*", _BODY + "norm3.*"),
        rule(
            "transformer.h.{i}.attn.c_attn.*",
            tuple(f"{_BODY}attention.{w}.*" for w in ("wq", "wk", "wv")),
            JOINED_TRANSPOSED,
        ),
        rule("transformer.h.{i}.attn.c_proj.*", _BODY + "attention.wo.*", TRANSPOSED),
        rule("transformer.h.{i}.mlp.c_fc.*", _BODY + "ffn.up.*", TRANSPOSED),
        rule("transformer.h.{i}.mlp.c_proj.*", _BODY + "ffn.down.*", TRANSPOSED),
        rule("transformer.ln_f.*", "tower.norm.*"),
    ),
    head_tensors=_LM_HEAD,
    twins=(("lm_head.weight", ("transformer.wte.weight",), "head.tied"),),
    derived=(r".*\.attn\.(masked_)?bias",),
)

# --- DeepSeek -----------------------------------------------------------------------------------------------------

_MLA = MLA(1, 1, 1, 2, 1, rope=Rope(layout="interleaved"))
_EXPERTS_V2 = MoE(1, 1, 1, shared=1, normalized=False)
_EXPERTS_V3 = MoE(1, 1, 1, shared=1, score="sigmoid", corrected=True)


def _deepseek_keys(at: str) -> tuple[Any, ...]:
    """`at`: where the MLA stands (inside DSA for V3.2)."""
    return (
        *_LLAMA_KEYS,
        Key("num_attention_heads", f"{at}.heads"),
        Key("kv_lora_rank", f"{at}.latent"),
        Key("q_lora_rank", f"{at}.query_latent", None),
        Key("qk_nope_head_dim", f"{at}.head_dim"),
        Key("qk_rope_head_dim", f"{at}.rope_dim", also=("tower.attention.rope_dim",)),
        Key("v_head_dim", f"{at}.value_dim"),
        Key("attention_bias", f"{at}.bias", False, also=(f"{at}.out_bias",)),
        Key("attention_dropout", f"{at}.dropout", 0.0),
        ROPE,
        Key("intermediate_size", "tower.ffn.0.ffn_dim"),
        Key(
            "hidden_act",
            "tower.ffn.0.activation",
            "silu",
            ACTIVATIONS,
            also=("tower.ffn.1.activation",),
        ),
        Key("moe_intermediate_size", "tower.ffn.1.ffn_dim"),
        Key(
            "n_routed_experts",
            "tower.ffn.1.experts",
            lambda hf: hf.get("num_local_experts") or hf.get("num_experts") or REQUIRED,
        ),
        Key("num_experts_per_tok", "tower.ffn.1.active"),
        Key("n_shared_experts", "tower.ffn.1.shared", 1),
        Key("routed_scaling_factor", "tower.ffn.1.gain", 1.0),
        Fixed("moe_layer_freq", (1,)),
        Inert(
            (
                "num_key_value_heads",
                "head_dim",
                "qk_head_dim",
                "num_local_experts",
                "num_experts",
                "num_nextn_predict_layers",
                "num_mtp_layers",
                "ep_size",
                "aux_loss_alpha",
                "seq_aux",
            )
        ),
    )


def _deepseek_tensors(at: str) -> tuple[Any, ...]:
    attention = tuple(
        rule(f"model.layers.{{i}}.self_attn.{a}.*", f"{_BODY}{at}.{b}.*")
        for a, b in [
            ("q_a_proj", "w_dq"),
            ("q_a_layernorm", "q_norm"),
            ("kv_a_proj_with_mqa", "w_dkv"),
            ("kv_a_layernorm", "kv_norm"),
            ("kv_b_proj", "w_ukv"),
            ("o_proj", "wo"),
        ]
    )
    mlp = "model.layers.{i}.mlp."
    low, up = f"{_BODY}{at}.w_dq.weight", f"{_BODY}{at}.w_uq.weight"
    return (
        *_LLAMA_FRAME,
        *attention,
        rule("model.layers.{i}.self_attn.q_b_proj.weight", up, needs=low),
        rule("model.layers.{i}.self_attn.q_proj.weight", up, unless=low),
        *_LLAMA_MLP,
        rule(mlp + "gate.weight", _BODY + "ffn.router.weight"),
        rule(mlp + "gate.e_score_correction_bias", _BODY + "ffn.correction"),
        *(
            rule(f"{mlp}experts.{{e}}.{a}_proj.weight", f"{_BODY}ffn.{a}", STACKED)
            for a in ("gate", "up", "down")
        ),
        *(
            rule(f"{mlp}shared_experts.{a}_proj.*", f"{_BODY}ffn.shared.{a}.*")
            for a in ("gate", "up", "down")
        ),
    )


def _deepseek(attention: MLA | DSA, experts: MoE) -> TransformerConfig:
    blank = _llama_like(attention, _SWIGLU)
    return replace(blank, tower=replace(blank.tower, layers=2, ffn=(_SWIGLU, experts)))


DEEPSEEK_V2 = replace(
    LLAMA,
    name="deepseek_v2",
    blank=_deepseek(_MLA, _EXPERTS_V2),
    heads=_lm("DeepseekV2Model", "DeepseekV2ForCausalLM"),
    config=(
        *_deepseek_keys("tower.attention"),
        Key("mlp_bias", "tower.ffn.0.bias", False, also=("tower.ffn.1.shared_bias",)),
        groups("group_limited_greedy"),
        Fixed("scoring_func", ("softmax",)),
        Inert(("norm_topk_prob",)),  # transformers never normalises for V2, whatever it says
        MLP_OR_EXPERTS,
    ),
    tensors=_deepseek_tensors("attention"),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    blank=_deepseek(_MLA, _EXPERTS_V3),
    heads=_lm("DeepseekV3Model", "DeepseekV3ForCausalLM"),
    config=(
        *_deepseek_keys("tower.attention"),
        Key("norm_topk_prob", "tower.ffn.1.normalized", True),
        Key(
            "rope_interleave",
            "tower.attention.rope.layout",
            True,
            {True: "interleaved", False: "half"},
        ),
        groups(None),
        Fixed("scoring_func", ("sigmoid",)),
        MLP_OR_EXPERTS,
    ),
    carried=(r"model\.layers\.{layers}\..*",),  # the extra layer that predicts one token more
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    blank=_deepseek(DSA(_MLA, 1, 2, 1, rope_dim=2), _EXPERTS_V3),
    heads=_lm("DeepseekV32Model", "DeepseekV32ForCausalLM"),
    config=(
        *_deepseek_keys("tower.attention.attention"),
        Key("norm_topk_prob", "tower.ffn.1.normalized", True),
        Key("index_n_heads", "tower.attention.index_heads"),
        Key("index_head_dim", "tower.attention.index_dim"),
        Key("index_topk", "tower.attention.topk"),
        Key("mlp_bias", "tower.ffn.0.bias", False, also=("tower.ffn.1.shared_bias",)),
        groups(None),
        Fixed("scoring_func", ("sigmoid",)),
        Inert(("layer_types",)),
        MLP_OR_EXPERTS,
    ),
    tensors=(
        *_deepseek_tensors("attention.attention"),
        *(
            rule(f"model.layers.{{i}}.self_attn.indexer.{a}.*", f"{_BODY}attention.indexer.{b}.*")
            for a, b in [("wq_b", "wq"), ("wk", "wk"), ("k_norm", "k_norm"), ("weights_proj", "ww")]
        ),
    ),
)
