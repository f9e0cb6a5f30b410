"""Llama and its kin: dense and with experts, with windows, with norms in other places."""

from __future__ import annotations

from dataclasses import replace

from regard.attention import GQA
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import (
    ADDED_NORMS,
    ATTENTION,
    BIASED,
    EIGHT_KV,
    GATED,
    MIXTRAL_EXPERTS,
    NORM_EPS,
    NORMS,
    PLUS_ONE,
    ROTARY,
    decoder_heads,
    llama_like,
    sizes,
    sliding,
)
from regard.checkpoint.multimodal import Multimodal
from regard.checkpoint.rules import ACTIVATIONS, Data, Key, Keys, fixed
from regard.checkpoint.tensors import To
from regard.layers import LM, MLP, Classify
from regard.moe import MoE
from regard.position import Rope


def _llama3(factor: float) -> Data:
    rope = dict(rope_type="llama3", rope_theta=5e5, factor=factor)
    rope |= dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    return dict(num_key_value_heads=8, rms_norm_eps=1e-5, rope_parameters=rope)


LLAMA = llama_like(
    "llama", decoder_heads("Llama"), keys=dict(attention_bias=BIASED, mlp_bias=Key("tower.ffn.bias", False)),
    presets={
        "llama": sizes(32000, 768, 12, 12, 2048, 2048, num_key_value_heads=4, rms_norm_eps=1e-5),
        "llama-2-7b": sizes(32000, 4096, 32, 32, 11008, 4096, rms_norm_eps=1e-5),
        "llama-3.1-8b": sizes(128256, 4096, 32, 32, 14336, 131072, **_llama3(8.0)),
        "llama-3.2-1b": sizes(128256, 2048, 16, 32, 8192, 131072, tie_word_embeddings=True, **_llama3(32.0)),
    },
)  # fmt: skip
MISTRAL = llama_like(
    "mistral", decoder_heads("Mistral"),
    keys=dict(num_key_value_heads=EIGHT_KV, sliding_window=Key("tower.attention.window", 4096, null=None)),
    presets={"mistral-7b": sizes(32000, 4096, 32, 32, 14336, 32768, rms_norm_eps=1e-5)},
)  # fmt: skip
MISTRAL3 = Multimodal("mistral3", "mistral", missing=dict(tie_word_embeddings=True))
MIXTRAL = llama_like(
    "mixtral", decoder_heads("Mixtral"), replace(ROTARY, rope=Rope(1e6)), MoE(1, 1, 1),
    keys=dict(
        rms_norm_eps=NORM_EPS, num_key_value_heads=EIGHT_KV, num_local_experts=Key("tower.ffn.experts", 8),
        num_experts_per_tok=Key("tower.ffn.active", 2), sliding_window=Key("tower.attention.window", None),
    ),
    inert="output_router_logits router_aux_loss_coef router_jitter_noise",
    aliases=dict(num_experts="num_local_experts"),
    layer={
        **NORMS, **ATTENTION, **MIXTRAL_EXPERTS,
    },
    presets={"mixtral-8x7b": sizes(32000, 4096, 32, 32, 14336, 32768)},
)  # fmt: skip
# The last layers slide, where use_sliding_window is on.
_LAST_SLIDE = rules.sliding_layers(
    lambda hf, i: i >= hf.get("max_window_layers", 28), 4096, more="max_window_layers",
    switch="use_sliding_window",
)  # fmt: skip
_SMALL_QWEN = dict(rope_theta=1e6, tie_word_embeddings=True)
QWEN2 = llama_like(
    "qwen2", decoder_heads("Qwen2"), sliding(replace(ROTARY, bias=True)), keys=dict(layer_types=_LAST_SLIDE),
    presets={"qwen2-0.5b": sizes(151936, 896, 24, 14, 4864, 32768, num_key_value_heads=2, **_SMALL_QWEN)},
)  # fmt: skip
QWEN3 = llama_like(
    "qwen3", decoder_heads("Qwen3"), sliding(replace(ROTARY, qk_norm=1e-6)),
    keys=dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-6),
        head_dim=Key("tower.attention.head_dim", 128), attention_bias=BIASED, layer_types=_LAST_SLIDE,
    ),
    presets={"qwen3-0.6b": sizes(151936, 1024, 28, 16, 3072, 40960, num_key_value_heads=8, **_SMALL_QWEN)},
)  # fmt: skip
PHI3 = llama_like(
    "phi3", decoder_heads("Phi3"),
    keys=dict(
        rms_norm_eps=NORM_EPS, resid_pdrop=Key("tower.dropout", 0.0),
        sliding_window=Key("tower.attention.window", None),
        pad_token_id=rules.ids_below(32000, "pad_token_id", "eos_token_id"),
        rope_parameters=rules.rope_at(
            "tower.attention.rope", share="partial_rotary_factor",
            renamed={"su": "longrope", "yarn": "longrope"}, original_max_position_embeddings=4096,
        ),
    ),
    # transformers' Phi-3 drops nothing of its embedding.
    inert="embd_pdrop",
    layer={
        **NORMS, "self_attn.qkv_proj.*": To("attention.w{q,k,v}.*", tensors.JOINED),
        "self_attn.o_proj.*": "attention.wo.*", "mlp.gate_up_proj.*": To("ffn.{gate,up}.*", tensors.JOINED),
        "mlp.down_proj.*": "ffn.down.*",
    },
    presets={"phi-3-mini": sizes(32064, 3072, 32, 32, 8192, 4096, sliding_window=2047)},
)  # fmt: skip

# --- other places for the norms: Gemma 3 and OLMo -----------------------------------------------------------------

_GEMMA = GQA(1, 1, 1, rope=Rope(1e6), qk_norm=1e-6, qk_norm_plus_one=True, scale=1.0)
GEMMA3 = llama_like(
    "gemma3_text",
    {
        "Gemma3ForCausalLM": LM(), "Gemma3TextModel": None,
        "Gemma3TextForSequenceClassification": Classify(2, None, "last", False),
    },
    sliding(_GEMMA, rope=Rope()), MLP(1, "gelu_tanh", gated=True, bias=False), scaled=True,
    tower=dict(order="sandwich", norm=PLUS_ONE),
    keys=dict(
        hidden_act=None, rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-6),
        tie_word_embeddings=Key("head.tied", True), num_key_value_heads=Key("tower.attention.kv_heads", 4),
        head_dim=Key("tower.attention.head_dim", 256),
        query_pre_attn_scalar=Key("tower.attention.scale", 256, rules.ROOT),
        attention_bias=BIASED,
        hidden_activation=Key("tower.ffn.activation", "gelu_pytorch_tanh", ACTIVATIONS),
        rope_parameters=rules.ropes_by_layer(("rope_theta", 1e6), ("rope_local_base_freq", 1e4)),
        layer_types=rules.sliding_layers(
            lambda hf, i: (i + 1) % hf.get("sliding_window_pattern", 6) > 0, 4096,
            more="sliding_window_pattern",
        ),
        final_logit_softcapping=Key("head.logit_softcap", None), **fixed(use_bidirectional_attention=False),
    ),
    # transformers' Gemma 3 reads no cap on scores.
    inert="attn_logit_softcapping _sliding_window_pattern",
    layer={
        **ATTENTION, **GATED, **ADDED_NORMS, "{input,pre_feedforward}_layernorm.weight": "norm{1,3}.weight",
    },
    presets={
        "gemma-3-1b": sizes(262144, 1152, 26, 4, 6912, 32768, num_key_value_heads=1, sliding_window=512),
    },
)  # fmt: skip
GEMMA3_PICTURES = Multimodal(
    "gemma3", "gemma3_text",
    missing=sizes(262208, 2304, 26, 8, 9216, 131072),
)  # fmt: skip
_OLMO = GQA(1, 1, 1, rope=Rope(wide=True), qk_norm=1e-5, qk_norm_whole=True)
_OLMO_LAYER = ATTENTION | GATED | ADDED_NORMS
_OLMO_KEYS: Keys = dict(
    rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-5), attention_bias=BIASED
)
OLMO2 = llama_like(
    "olmo2", decoder_heads("Olmo2", tags=False), _OLMO, tower=dict(order="inner"), keys=_OLMO_KEYS,
    layer=_OLMO_LAYER,
    presets={"olmo-2-1b": sizes(100352, 2048, 16, 16, 8192, 4096, rms_norm_eps=1e-6, rope_theta=500000.0)},
)  # fmt: skip
OLMO3 = llama_like(
    "olmo3", decoder_heads("Olmo3", tags=False), sliding(replace(_OLMO, rope=Rope(5e5, wide=True))),
    tower=dict(order="inner"),
    keys=dict(
        **_OLMO_KEYS,
        # Their older rope_theta is of the layers that see all.
        rope_parameters=rules.ropes_by_layer(("rope_theta", 5e5), ("", 5e5)),
        layer_types=rules.sliding_layers(lambda hf, i: (i + 1) % 4 != 0, 4096),
    ),
    layer=_OLMO_LAYER, presets={"olmo-3-7b": sizes(100278, 4096, 32, 32, 11008, 65536, rms_norm_eps=1e-6)},
)  # fmt: skip

# --- gpt-oss ------------------------------------------------------------------------------------------------------

_YARN = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
_YARN |= dict(original_max_position_embeddings=4096)
GPT_OSS = llama_like(
    "gpt_oss", decoder_heads("GptOss"), sliding(GQA(1, 1, 1, rope=Rope(150000.0), sinks=True)),
    MoE(1, 1, 1, "quick_gelu", bias=True, limit=7.0),
    keys=dict(
        rms_norm_eps=NORM_EPS, num_key_value_heads=EIGHT_KV, head_dim=Key("tower.attention.head_dim", 64),
        attention_bias=replace(BIASED, default=True), num_local_experts=Key("tower.ffn.experts", 128),
        num_experts_per_tok=Key("tower.ffn.active", 4), **fixed(hidden_act="silu"),
        # transformers has no word for it, and computes with 7.
        swiglu_limit=Key("tower.ffn.limit", 7.0, quiet=True),
        rope_parameters=rules.rope_at("tower.attention.rope", rope_scaling=_YARN),
        layer_types=rules.sliding_layers(lambda hf, i: i % 2 == 0, 128),
    ),
    inert="output_router_logits router_aux_loss_coef experts_per_token initial_context_length",
    aliases=dict(num_experts="num_local_experts"),
    layer={
        **NORMS, **ATTENTION, "self_attn.sinks": "attention.sinks", "mlp.router.*": "ffn.router.*",
        "mlp.experts.gate_up_proj": To("ffn.{gate,up}", tensors.transposed(tensors.BY_TURNS)),
        "mlp.experts.gate_up_proj_bias": To("ffn.{gate,up}_bias", tensors.BY_TURNS),
        "mlp.experts.down_proj": To("ffn.down", tensors.TRANSPOSED),
        "mlp.experts.down_proj_bias": "ffn.down_bias",
    },
    presets={"gpt-oss-20b": sizes(201088, 2880, 24, 64, 2880, 131072, num_local_experts=32)},
)  # fmt: skip
