"""Dense decoders that are Llama with changes."""

from __future__ import annotations

from tests.checkpoint.cases import BASE, KV, LLAMA3, YARN, YARN_SCALED, Case, Settings, case, rope

_SLIDE, _FULL = "sliding_attention", "full_attention"
# transformers' fused attention forgets the cap on scores.
_GEMMA2 = dict(KV, head_dim=6, sliding_window=4, attn_implementation="eager")
_IDS = dict(pad_token_id=0, eos_token_id=2)
_MINISTRAL = dict(KV, head_dim=8, pad_token_id=0)
_GLM = dict(BASE, **_IDS, num_key_value_heads=1, head_dim=8)

CASES: list[Case] = [
    case("gemma", "GemmaForCausalLM", KV, head_dim=10),
    case("gemma-mqa", "GemmaForCausalLM", BASE, num_key_value_heads=1, head_dim=6, attention_bias=True,
         hidden_act="gelu", tie_word_embeddings=False, rms_norm_eps=1e-3),
    case("gemma2", "Gemma2ForCausalLM", _GEMMA2, num_hidden_layers=3, query_pre_attn_scalar=7,
         attn_logit_softcapping=1.5, final_logit_softcapping=2.5),
    case("gemma2-uncapped", "Gemma2ForCausalLM", _GEMMA2, num_key_value_heads=1, attention_bias=True,
         attn_logit_softcapping=None, final_logit_softcapping=None, layer_types=[_FULL, _SLIDE]),
    *(case(f"gemma2-{head}", f"Gemma2{head}", _GEMMA2, num_labels=3)
      for head in ("Model", "ForSequenceClassification", "ForTokenClassification")),
    case("glm", "GlmForCausalLM", _GLM),
    case("glm-whole", "GlmForCausalLM", _GLM, head_dim=6, attention_bias=False, tie_word_embeddings=True,
         rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=1.0)),
    case("glm4", "Glm4ForCausalLM", _GLM),
    case("glm4-unbiased", "Glm4ForCausalLM", _GLM, num_key_value_heads=3, attention_bias=False,
         rms_norm_eps=1e-3),
    case("seed-oss", "SeedOssForCausalLM", BASE, num_key_value_heads=1, head_dim=6),
    case("seed-oss-biases", "SeedOssForCausalLM", KV, head_dim=10, attention_bias=False,
         attention_out_bias=True, mlp_bias=True, attention_dropout=0.0, residual_dropout=0.0),
    case("arcee", "ArceeForCausalLM", BASE, num_key_value_heads=1),
    case("arcee-biases", "ArceeForCausalLM", BASE, LLAMA3, attention_bias=True, mlp_bias=True,
         hidden_act="silu", head_dim=6, tie_word_embeddings=True),
    case("helium", "HeliumForCausalLM", KV, head_dim=8),
    case("helium-biases", "HeliumForCausalLM", BASE, YARN, num_key_value_heads=1, head_dim=8,
         attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    case("ernie4_5", "Ernie4_5ForCausalLM", BASE, num_key_value_heads=1, head_dim=6),
    case("ernie4_5-biases", "Ernie4_5ForCausalLM", KV, rope("linear", factor=2.0), head_dim=10,
         use_bias=True, tie_word_embeddings=False),
    case("hunyuan", "HunYuanDenseV1ForCausalLM", BASE, num_key_value_heads=1, head_dim=6),
    case("hunyuan-alpha", "HunYuanDenseV1ForCausalLM", KV, rope("dynamic", alpha=100.0, factor=1.0,
         beta_fast=32, mscale=1.0), head_dim=10, attention_bias=True, tie_word_embeddings=True),
    case("hunyuan-yarn", "HunYuanDenseV1ForCausalLM", BASE, YARN, head_dim=8, rms_norm_eps=1e-3),
    case("apertus", "ApertusForCausalLM", BASE, num_key_value_heads=1),
    case("apertus-silu", "ApertusForCausalLM", BASE, rope("default"), hidden_act="silu",
         attention_bias=True, head_dim=6, tie_word_embeddings=True),
    case("smollm3", "SmolLM3ForCausalLM", BASE, num_key_value_heads=1, no_rope_layer_interval=2,
         pad_token_id=0),
    case("smollm3-window", "SmolLM3ForCausalLM", KV, num_hidden_layers=5, no_rope_layers=[0, 1, 1, 0, 0],
         use_sliding_window=True, sliding_window=4, pad_token_id=0,
         layer_types=[_SLIDE, _SLIDE, _FULL, _FULL, _SLIDE]),
    case("smollm3-slides", "SmolLM3ForCausalLM", BASE, num_hidden_layers=4, num_key_value_heads=3,
         use_sliding_window=True, sliding_window=3, pad_token_id=0, attention_bias=True, mlp_bias=True,
         tie_word_embeddings=False),
    case("exaone4", "Exaone4ForCausalLM", KV, num_hidden_layers=4, sliding_window=4),
    case("exaone4-all", "Exaone4ForCausalLM", BASE, num_key_value_heads=1, sliding_window=None,
         layer_types=[_FULL, _FULL], head_dim=6, tie_word_embeddings=True),
    case("exaone4-types", "Exaone4ForCausalLM", KV, YARN, sliding_window=3, layer_types=[_FULL, _SLIDE],
         sliding_window_pattern="GL", rms_norm_eps=1e-3),
    case("olmo", "OlmoForCausalLM", BASE, num_key_value_heads=1, eos_token_id=2),
    case("olmo-clipped", "OlmoForCausalLM", BASE, YARN, clip_qkv=0.7, attention_bias=True, head_dim=8,
         tie_word_embeddings=True),
    case("nanochat", "NanoChatForCausalLM", BASE, num_key_value_heads=1, head_dim=6),
    case("nanochat-biased", "NanoChatForCausalLM", KV, YARN, attention_bias=True, hidden_act="silu",
         final_logit_softcapping=None, rms_norm_eps=1e-2, tie_word_embeddings=True, head_dim=8),
    case("granite", "GraniteForCausalLM", KV, attention_multiplier=0.4, embedding_multiplier=3.0,
         logits_scaling=2.5, residual_multiplier=0.3),
    case("granite-biases", "GraniteForCausalLM", BASE, num_key_value_heads=1, attention_bias=True,
         mlp_bias=True, tie_word_embeddings=True, head_dim=6),
    case("cohere", "CohereForCausalLM", BASE, num_key_value_heads=1, eos_token_id=2, bos_token_id=1),
    case("cohere-norms", "CohereForCausalLM", KV, use_qk_norm=True, logit_scale=0.5, attention_bias=True,
         layer_norm_eps=1e-3, tie_word_embeddings=False),
    case("cohere2", "Cohere2ForCausalLM", BASE, num_hidden_layers=4, num_key_value_heads=1, sliding_window=4),
    case("cohere2-types", "Cohere2ForCausalLM", KV, YARN, layer_types=[_SLIDE, _FULL], sliding_window=3,
         logit_scale=1.5, tie_word_embeddings=False, attention_bias=True),
    case("ministral3", "Ministral3ForCausalLM", _MINISTRAL, rope_parameters=dict(
         YARN_SCALED["rope_parameters"], original_max_position_embeddings=3, llama_4_scaling_beta=0.6)),
    case("ministral3-answers", "Ministral3ForQuestionAnswering", _MINISTRAL),
    case("ministral3-default", "Ministral3ForCausalLM", BASE, num_key_value_heads=1, head_dim=6,
         sliding_window=4, tie_word_embeddings=True, pad_token_id=0),
]  # fmt: skip
ODD: Settings = {}
KEPT: list[str] = ["gemma2", "smollm3-window"]
