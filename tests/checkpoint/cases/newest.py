"""Gemma 4."""

from tests.checkpoint.cases import BASE, Case, Settings, case

# Heads of 8 in layers that slide, of 12 in those that see all, of which the first three of eighteen numbers turn.
_G = dict(BASE, num_attention_heads=6, num_key_value_heads=2, head_dim=8, global_head_dim=12)
_G |= dict(num_hidden_layers=4, sliding_window=4, hidden_size_per_layer_input=0, pad_token_id=0)
_SLIDES, _FULL = "sliding_attention", "full_attention"
_G |= dict(layer_types=[_SLIDES, _FULL, _SLIDES, _FULL])
_TABLES = dict(hidden_size_per_layer_input=5, vocab_size_per_layer_input=53)
_EXPERTS = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=12)
_LM = "Gemma4ForCausalLM"

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
    case("gemma4-body", "Gemma4TextModel", _G, attention_bias=True, hidden_activation="silu",
         num_kv_shared_layers=1, use_bidirectional_attention="vision"),
]  # fmt: skip
ODD: Settings = {}
KEPT: list[str] = ["gemma4", "gemma4-experts"]
