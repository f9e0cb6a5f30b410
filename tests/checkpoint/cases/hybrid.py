"""Layers of a recurrent state between layers of attention.

Most have a large eps: where a state answers nearly nothing, the norm of it multiplies rounding.
"""

from __future__ import annotations

from tests.checkpoint.cases import DELTA, KV, LATENT, Settings, case, rope

_35, _35_MOE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
_MIXED = {k: v for k, v in (KV | DELTA).items() if "expert" not in k and not k.startswith("moe_")}
_MIXED_MOE = {k: v for k, v in (KV | DELTA).items() if k != "intermediate_size"}
_MAMBA = dict(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_heads=6, head_dim=8, state_size=7,
              n_groups=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
_GRANITE = "GraniteMoeHybridForCausalLM"
_GRANITE_MIXED = dict(KV, mamba_n_heads=6, mamba_n_groups=2, mamba_d_state=7, shared_intermediate_size=17,
                      num_local_experts=4, layer_types=["linear_attention", "full_attention"])  # fmt: skip
_FULL, _LINEAR = "full_attention", "linear_attention"

_OLMO, _KIMI = "OlmoHybridForCausalLM", "KimiLinearForCausalLM"
_OLMO_MIXED = dict(KV, pad_token_id=0, eos_token_id=2)
_NO_ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=None))
_KIMI_MIXED = dict(KV | LATENT, q_lora_rank=None, moe_intermediate_size=12, num_local_experts=4,
                   num_experts_per_tok=2, linear_head_dim=5, linear_num_heads=3, linear_conv_kernel_dim=3,
                   pad_token_id=0, bos_token_id=1, eos_token_id=2, rms_norm_eps=0.1)  # fmt: skip

CASES = [
    case("qwen3.5", _35, _MIXED, num_hidden_layers=4, num_key_value_heads=1,
         rms_norm_eps=0.3),
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
    # transformers saves the taps of q, k and v as thirds, whatever their sizes: here they are alike.
    case("olmo-hybrid", _OLMO, _OLMO_MIXED, _NO_ROPE, num_hidden_layers=2, num_key_value_heads=1,
         linear_value_head_dim=6),
    case("olmo-hybrid-rope", _OLMO, _OLMO_MIXED, rope("default"), layer_types=[_FULL, _LINEAR], attention_bias=True,
         linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=3,
         linear_conv_kernel_dim=2, linear_allow_neg_eigval=False, tie_word_embeddings=True),
    case("olmo-hybrid-body", "OlmoHybridModel", _OLMO_MIXED, num_hidden_layers=2, rms_norm_eps=0.1,
         linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=5, linear_value_head_dim=5),
    case("kimi-linear-body", "KimiLinearModel", _KIMI_MIXED, num_experts_per_tok=1,
         linear_attn_config=dict(full_attn_layers=[2], kda_layers=[1], head_dim=6, num_heads=2,
                                 short_conv_kernel_size=2)),
    case("kimi-linear", _KIMI, _KIMI_MIXED, num_hidden_layers=5),
    case("kimi-linear-odd", _KIMI, _KIMI_MIXED, layer_types=[_FULL, _LINEAR], mlp_layer_types=["sparse", "dense"],
         q_lora_rank=7, attention_bias=True, n_group=2, topk_group=1, norm_topk_prob=False, n_shared_experts=2,
         routed_scaling_factor=1.3, linear_conv_kernel_dim=1, tie_word_embeddings=False),
    case("mamba2", "Mamba2ForCausalLM", _MAMBA),
    case("mamba2-odd", "Mamba2ForCausalLM", _MAMBA, expand=1, num_heads=3, n_groups=3, conv_kernel=3, use_bias=True,
         use_conv_bias=False, time_step_limit=[0.3, 0.8], tie_word_embeddings=True, layer_norm_epsilon=1e-3),
    case("granite-hybrid", _GRANITE, _GRANITE_MIXED, num_key_value_heads=1, embedding_multiplier=3.0,
         logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.3),
    case("granite-hybrid-dense", _GRANITE, _GRANITE_MIXED, rope("default"), num_local_experts=0, mamba_d_head=4,
         mamba_expand=1, position_embedding_type="rope", attention_bias=True, mamba_proj_bias=True,
         mamba_conv_bias=False, mamba_d_conv=2, time_step_limit=[0.2, 0.9], tie_word_embeddings=True),
    case("granite-hybrid-body", "GraniteMoeHybridModel", _GRANITE_MIXED),
    case("mamba2-body", "Mamba2Model", _MAMBA, n_groups=1),
]  # fmt: skip

ODD: Settings = {}
KEPT: list[str] = ["olmo-hybrid-rope", "kimi-linear-odd"]
