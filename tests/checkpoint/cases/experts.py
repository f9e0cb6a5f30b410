"""Decoders with experts."""

from __future__ import annotations

from tests.checkpoint.cases import (
    BASE,
    INDEX,
    KV,
    LATENT,
    LLAMA3,
    YARN,
    YARN_SCALED,
    Case,
    Settings,
    case,
    rope,
)

_FULL, _CHUNKED = "full_attention", "chunked_attention"
_QWEN = dict(BASE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
_QWEN2 = dict(_QWEN, num_key_value_heads=3, shared_expert_intermediate_size=13)
_ROUTED = dict(
    KV, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=1
)
_MLA = dict(_ROUTED, **LATENT, first_k_dense_replace=1, pad_token_id=0)
_LLAMA4 = dict(
    BASE, num_key_value_heads=1, head_dim=10, intermediate_size_mlp=22, num_local_experts=4
)
_LLAMA4 |= dict(attention_chunk_size=4, floor_scale=3)

CASES: list[Case] = [
    case("qwen3-moe", "Qwen3MoeForCausalLM", _QWEN, num_key_value_heads=1, head_dim=10),
    case("qwen3-moe-window", "Qwen3MoeForCausalLM", _QWEN, num_hidden_layers=4, num_key_value_heads=3,
         use_sliding_window=True, sliding_window=4, decoder_sparse_step=2, mlp_only_layers=[3],
         norm_topk_prob=True, attention_bias=True, num_experts=5, hidden_act="gelu"),
    case("qwen3-moe-dense", "Qwen3MoeForCausalLM", _QWEN, num_key_value_heads=1, mlp_only_layers=[0, 1],
         rms_norm_eps=1e-3, tie_word_embeddings=True),
    case("qwen2-moe", "Qwen2MoeForCausalLM", _QWEN2),
    case("qwen2-moe-window", "Qwen2MoeForCausalLM", _QWEN2, num_hidden_layers=3, num_key_value_heads=1,
         use_sliding_window=True, sliding_window=4, max_window_layers=2, decoder_sparse_step=2, qkv_bias=False,
         norm_topk_prob=True),
    case("olmoe", "OlmoeForCausalLM", KV, num_experts=4, num_experts_per_tok=2),
    case("olmoe-clipped", "OlmoeForCausalLM", BASE, YARN, num_key_value_heads=1, num_experts=3, num_experts_per_tok=1,
         clip_qkv=0.7, attention_bias=True, norm_topk_prob=True, tie_word_embeddings=True),
    case("granitemoe", "GraniteMoeForCausalLM", BASE, num_key_value_heads=1, num_local_experts=4),
    case("granitemoe-scaled", "GraniteMoeForCausalLM", KV, rope("linear", factor=2.0), num_local_experts=5,
         num_experts_per_tok=3, attention_bias=True, embedding_multiplier=3.0, attention_multiplier=0.2,
         residual_multiplier=0.4, logits_scaling=6.0, hidden_act="gelu", tie_word_embeddings=True),
    case("dots1", "Dots1ForCausalLM", _ROUTED, head_dim=6),
    case("dots1-window", "Dots1ForCausalLM", _ROUTED, num_hidden_layers=3, first_k_dense_replace=1, n_group=2,
         topk_group=1, sliding_window=4, max_window_layers=1, norm_topk_prob=True, routed_scaling_factor=1.7,
         n_shared_experts=2, attention_bias=True),
    case("glm4-moe", "Glm4MoeForCausalLM", _ROUTED, num_key_value_heads=1, head_dim=8),
    case("glm4-moe-normed", "Glm4MoeForCausalLM", _ROUTED, head_dim=10, use_qk_norm=True, attention_bias=True,
         first_k_dense_replace=0, n_group=2, norm_topk_prob=False, routed_scaling_factor=1.7, rms_norm_eps=1e-3,
         rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=1.0)),
    case("minimax-m2", "MiniMaxM2ForCausalLM", BASE, num_key_value_heads=1, head_dim=6, num_local_experts=4,
         num_experts_per_tok=2),
    case("minimax-m2-partial", "MiniMaxM2ForCausalLM", KV, head_dim=8, num_local_experts=3, num_experts_per_tok=1,
         rms_norm_eps=1e-3, tie_word_embeddings=True, hidden_act="gelu",
         rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)),
    case("minimax-m2-body", "MiniMaxM2Model", KV, head_dim=6, num_local_experts=3, num_experts_per_tok=2),
    case("phimoe", "PhimoeForCausalLM", KV, num_local_experts=5),
    case("phimoe-long", "PhimoeForCausalLM", BASE, rope("longrope", short_factor=[1.0, 1.3, 1.1, 2.0],
         long_factor=[2.0, 3.0, 2.0, 4.0], short_mscale=1.2, long_mscale=1.2, original_max_position_embeddings=40),
         num_key_value_heads=1, num_local_experts=3, sliding_window=4, router_jitter_noise=0.3,
         attention_bias=True, lm_head_bias=True, max_position_embeddings=64),
    case("ernie4_5-moe", "Ernie4_5_MoeForCausalLM", BASE, num_key_value_heads=1, head_dim=6, moe_num_experts=4, moe_k=2,
         moe_intermediate_size=12),
    case("ernie4_5-moe-biases", "Ernie4_5_MoeForCausalLM", KV, rope("linear", factor=2.0), num_hidden_layers=5,
         moe_num_experts=3, moe_k=1, moe_intermediate_size=12, moe_num_shared_experts=0, use_bias=True,
         moe_layer_interval=2, moe_layer_end_index=3, tie_word_embeddings=False),
    case("mistral4", "Mistral4ForCausalLM", _MLA, rope("yarn", factor=4.0, original_max_position_embeddings=3,
         mscale=0.7, mscale_all_dim=0.9, llama_4_scaling_beta=0.3)),
    case("mistral4-grouped", "Mistral4ForCausalLM", _MLA, rope("linear", factor=2.0, original_max_position_embeddings=4,
         llama_4_scaling_beta=0.2), n_routed_experts=8, n_group=2, topk_group=1, q_lora_rank=None, n_shared_experts=2,
         first_k_dense_replace=0, norm_topk_prob=False, rope_interleave=False, attention_bias=True),
    case("glm-moe-dsa", "GlmMoeDsaForCausalLM", _MLA, INDEX, index_topk=5),
    case("glm-moe-dsa-whole", "GlmMoeDsaForCausalLM", _MLA, INDEX, YARN_SCALED, index_topk=64, n_group=2, topk_group=1,
         attention_bias=True, mlp_layer_types=["sparse", "dense"], rms_norm_eps=1e-3),
    case("glm-moe-dsa-body", "GlmMoeDsaModel", _MLA, INDEX, index_topk=3),
    case("llama4", "Llama4ForCausalLM", _LLAMA4, num_hidden_layers=5, interleave_moe_layer_step=2),
    case("llama4-unturned", "Llama4ForCausalLM", _LLAMA4, LLAMA3, num_hidden_layers=3, num_key_value_heads=3,
         no_rope_layers=[0, 1, 1], layer_types=[_CHUNKED, _FULL, _CHUNKED], moe_layers=[0, 1], use_qk_norm=False,
         num_experts_per_tok=3, attention_bias=True, attn_scale=0.4, tie_word_embeddings=True, hidden_act="gelu"),
    # Their positions in a batch count padding: here they are too few to grow by.
    case("llama4-chunked", "Llama4ForCausalLM", _LLAMA4, num_hidden_layers=4, floor_scale=8192),
    case("llama4-body", "Llama4TextModel", _LLAMA4, attn_temperature_tuning=False, attention_chunk_size=3),
    *(case(f"mistral4-{head}", f"Mistral4{head}", _MLA, num_labels=3)
      for head in ("Model", "ForSequenceClassification", "ForTokenClassification")),
]  # fmt: skip
ODD: Settings = dict(n_shared_experts=1, moe_k=2, moe_num_experts=4)
KEPT: list[str] = []
