"""Gemma 4 and DeepSeek-V4."""

from tests.checkpoint.cases import BASE, Case, Settings, case

# Heads of 8 in layers that slide, of 12 in those that see all, of which the first three of eighteen numbers turn.
_G = dict(BASE, num_attention_heads=6, num_key_value_heads=2, head_dim=8, global_head_dim=12)
_G |= dict(num_hidden_layers=4, sliding_window=4, hidden_size_per_layer_input=0, pad_token_id=0)
_SLIDES, _FULL = "sliding_attention", "full_attention"
_G |= dict(layer_types=[_SLIDES, _FULL, _SLIDES, _FULL])
_TABLES = dict(hidden_size_per_layer_input=5, vocab_size_per_layer_input=53)
_EXPERTS = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=12)
_LM = "Gemma4ForCausalLM"

# Texts of eleven tokens have five entries of a rate of 2, three of 3.
_RATES = dict(compressed_sparse_attention=2, heavily_compressed_attention=3)
_D = dict(vocab_size=50, hidden_size=24, num_hidden_layers=4, num_attention_heads=6, head_dim=8)
_D |= dict(q_lora_rank=12, partial_rotary_factor=0.5, moe_intermediate_size=12, n_routed_experts=4)
_D |= dict(num_experts_per_tok=2, o_groups=3, o_lora_rank=5, index_n_heads=7, index_head_dim=6)
_D |= dict(index_topk=2, sliding_window=4, max_position_embeddings=40, num_hash_layers=1, hc_mult=3)
_D |= dict(compress_rates=_RATES, hc_sinkhorn_iters=3, num_nextn_predict_layers=0)
_D |= dict(layer_types=["sliding_attention", *_RATES, "compressed_sparse_attention"])
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=10)
_D_MORE = dict(
    mlp_layer_types=["moe", "hash_moe", "moe", "hash_moe"], layer_types=None, index_topk=9, o_groups=2,
    rope_parameters=_YARN, mlp_bias=True, swiglu_limit=0.3, scoring_func="sigmoid", hc_mult=2, hc_sinkhorn_iters=2,
    compress_rope_theta=100.0, tie_word_embeddings=True, sliding_window=3,
)  # fmt: skip
_V4 = "DeepseekV4ForCausalLM"

CASES: list[Case] = [
    case("gemma4-experts", _LM, _G, _EXPERTS, attention_k_eq_v=True, num_global_key_value_heads=3,
         final_logit_softcapping=7.0),
    case("gemma4", _LM, _G, _TABLES, num_kv_shared_layers=2, use_double_wide_mlp=True),
    case("gemma4-all", _LM, _G, _EXPERTS, _TABLES, num_kv_shared_layers=2, use_double_wide_mlp=True,
         tie_word_embeddings=False, attention_k_eq_v=True,
         rope_parameters={
             _FULL: dict(rope_type="proportional", rope_theta=1e3, partial_rotary_factor=0.5, factor=2.0),
             _SLIDES: dict(rope_type="linear", rope_theta=1e2, factor=3.0),
         }),
    case("deepseek-v4", _V4, _D),
    case("deepseek-v4-latest", _V4, _D, _D_MORE),
    case("gemma4-body", "Gemma4TextModel", _G, attention_bias=True, hidden_activation="silu",
         num_kv_shared_layers=1, use_bidirectional_attention="vision"),
]  # fmt: skip
ODD: Settings = {}
KEPT: list[str] = ["gemma4", "gemma4-experts"]
