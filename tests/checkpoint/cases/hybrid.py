"""Layers of a recurrent state between layers of attention.

Most have a large eps: where a state answers nearly nothing, the norm of it multiplies rounding.
"""

from __future__ import annotations

from tests.checkpoint.cases import DELTA, KV, Settings, case

_35, _35_MOE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
_MIXED = {k: v for k, v in (KV | DELTA).items() if "expert" not in k and not k.startswith("moe_")}
_MIXED_MOE = {k: v for k, v in (KV | DELTA).items() if k != "intermediate_size"}
_FULL, _LINEAR = "full_attention", "linear_attention"

CASES = [
    case("qwen3.5", _35, _MIXED, num_hidden_layers=4, num_key_value_heads=1,
         rms_norm_eps=0.1),
    case("qwen3.5-odd", _35, _MIXED, layer_types=[_FULL, _LINEAR], attention_bias=True, head_dim=16,
         tie_word_embeddings=True, linear_num_key_heads=3, linear_conv_kernel_dim=1, rms_norm_eps=1e-3,
         rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5,
                              mrope_section=[1, 1, 2], mrope_interleaved=True)),
    case("qwen3.5-body", "Qwen3_5TextModel", _MIXED, full_attention_interval=2, rms_norm_eps=0.1),
    case("qwen3.5-label", "Qwen3_5TextForSequenceClassification", _MIXED, full_attention_interval=2,
         num_labels=3, pad_token_id=0),
    case("qwen3.5-moe", _35_MOE, _MIXED_MOE, num_hidden_layers=4, num_key_value_heads=1,
         rms_norm_eps=0.1),
    case("qwen3.5-moe-odd", _35_MOE, _MIXED_MOE, layer_types=[_LINEAR, _FULL], num_experts=3,
         num_experts_per_tok=1, linear_num_value_heads=2, tie_word_embeddings=True),
    case("qwen3.5-moe-body", "Qwen3_5MoeTextModel", _MIXED_MOE, full_attention_interval=2, rms_norm_eps=0.1),
]  # fmt: skip

ODD: Settings = {}
KEPT: list[str] = ["qwen3.5-odd"]
