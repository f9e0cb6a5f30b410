"""Cases of families/older.py."""

from tests.checkpoint.cases import BASE, GPT, KV, Settings, case

_GPTJ = dict(vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=40, rotary_dim=4)
_GPTJ |= dict(bos_token_id=1, eos_token_id=2)
_CODEGEN = dict(_GPTJ, n_head=4, n_embd=32)
_SMALL_IDS = dict(bos_token_id=1, eos_token_id=2)

_NEO = dict(vocab_size=50, hidden_size=24, num_layers=2, num_heads=3, max_position_embeddings=40)
_NEO |= dict(_SMALL_IDS, attention_types=[[["global", "local"], 1]], window_size=4)
_FRAME = {key: value for key, value in BASE.items() if key != "intermediate_size"}
_OPT = dict(_FRAME, ffn_dim=20, pad_token_id=0)
_FALCON = dict(_FRAME, **_SMALL_IDS)
_BLOOM = dict(vocab_size=50, hidden_size=24, n_layer=2, n_head=3)
_MPT = dict(vocab_size=50, d_model=24, n_layers=2, n_heads=3, max_seq_len=40)
_XGLM = dict(vocab_size=50, d_model=24, num_layers=2, attention_heads=3, ffn_dim=20, pad_token_id=0)
_XGLM |= dict(max_position_embeddings=40)

CASES = [
    case("starcoder2", "Starcoder2ForCausalLM", KV, _SMALL_IDS, num_key_value_heads=1, sliding_window=4),
    case("starcoder2-unbiased", "Starcoder2ForCausalLM", KV, _SMALL_IDS, use_bias=False, hidden_act="relu",
         tie_word_embeddings=False, norm_epsilon=1e-3),
    case("phi", "PhiForCausalLM", KV),
    case("phi-gqa", "PhiForCausalLM", KV, num_key_value_heads=1, hidden_act="relu", layer_norm_eps=1e-3,
         rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.75)),
    case("stablelm", "StableLmForCausalLM", KV, num_key_value_heads=1),
    case("stablelm-parallel", "StableLmForCausalLM", KV, use_parallel_residual=True, use_qkv_bias=True,
         qk_layernorm=True, tie_word_embeddings=True, rope_parameters=dict(
             rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)),
    case("gptj", "GPTJForCausalLM", _GPTJ),
    case("gptj-tied", "GPTJForCausalLM", _GPTJ, n_embd=35, n_head=5, rotary_dim=6, n_inner=17,
         tie_word_embeddings=True, activation_function="relu"),
    case("gptj-answers", "GPTJForQuestionAnswering", _GPTJ, num_labels=2),
    case("codegen", "CodeGenForCausalLM", _CODEGEN),
    case("codegen-8-heads", "CodeGenForCausalLM", _CODEGEN, n_head=8, n_embd=48, n_inner=19, rotary_dim=6),
    case("codegen-body", "CodeGenModel", _CODEGEN),
    case("nemotron", "NemotronForCausalLM", KV, num_key_value_heads=1, head_dim=8),
    case("nemotron-biased", "NemotronForCausalLM", KV, attention_bias=True, mlp_bias=True, norm_eps=1e-3,
         hidden_act="gelu", tie_word_embeddings=True, head_dim=10, rope_parameters=dict(
             rope_type="default", rope_theta=500.0, partial_rotary_factor=1.0)),
    case("gpt-neo", "GPTNeoForCausalLM", _NEO),
    case("gpt-neo-mixed", "GPTNeoForCausalLM", _NEO, num_layers=3, hidden_size=35, num_heads=5, window_size=3,
         attention_types=[[["local"], 2], [["global"], 1]], intermediate_size=17, activation_function="relu",
         tie_word_embeddings=False),
    case("gpt-neo-all-local", "GPTNeoModel", _NEO, attention_types=[[["local"], 2]], layer_norm_epsilon=1e-3),
    case("gpt-neo-tags", "GPTNeoForTokenClassification", _NEO, num_labels=3, pad_token_id=0),
    case("gpt-neo-answers", "GPTNeoForQuestionAnswering", _NEO),
    case("gpt-neo-labels", "GPTNeoForSequenceClassification", _NEO, num_labels=3, pad_token_id=0),
    case("gpt-bigcode", "GPTBigCodeForCausalLM", GPT),
    case("gpt-bigcode-every-head", "GPTBigCodeForCausalLM", GPT, multi_query=False, n_inner=17,
         scale_attn_weights=False, activation_function="gelu", tie_word_embeddings=False),
    case("opt", "OPTForCausalLM", _OPT),
    case("opt-after", "OPTForCausalLM", _OPT, do_layer_norm_before=False, enable_bias=False,
         activation_function="gelu", tie_word_embeddings=False),
    case("opt-no-last-norm", "OPTModel", _OPT, _remove_final_layer_norm=True),
    case("opt-narrow-words", "OPTForCausalLM", _OPT, do_layer_norm_before=False, word_embed_proj_dim=10),
    case("opt-narrow-words-labels", "OPTForSequenceClassification", _OPT, word_embed_proj_dim=10, num_labels=3),
    case("opt-narrow-words-body", "OPTModel", _OPT, word_embed_proj_dim=10),
    case("opt-answers", "OPTForQuestionAnswering", _OPT),
    case("bloom", "BloomForCausalLM", _BLOOM),
    case("bloom-7-heads", "BloomForCausalLM", _BLOOM, hidden_size=42, n_head=7, layer_norm_epsilon=1e-3,
         tie_word_embeddings=False),
    case("falcon", "FalconForCausalLM", _FALCON),
    case("falcon-alibi", "FalconForCausalLM", _FALCON, alibi=True, multi_query=False, parallel_attn=False,
         bias=True, ffn_hidden_size=17, hidden_size=80, num_attention_heads=20, activation="relu"),
    case("falcon-new", "FalconForCausalLM", _FALCON, new_decoder_architecture=True, hidden_size=36,
         num_attention_heads=6, num_kv_heads=2, layer_norm_epsilon=1e-3, tie_word_embeddings=False),
    case("falcon-new-one-norm", "FalconForCausalLM", _FALCON, new_decoder_architecture=True,
         num_kv_heads=3, num_ln_in_parallel_attn=1, alibi=True),
    case("falcon-answers", "FalconForQuestionAnswering", _FALCON),
    case("falcon-every-head", "FalconModel", _FALCON, multi_query=False,
         rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=500.0)),
    case("mpt", "MptForCausalLM", _MPT),
    case("mpt-odd", "MptForCausalLM", _MPT, d_model=35, n_heads=5, layer_norm_epsilon=1e-3, tie_word_embeddings=False,
         attn_config=dict(softmax_scale=0.3, clip_qkv=0.4)),
    case("mpt-body", "MptModel", _MPT),
    case("mpt-answers", "MptForQuestionAnswering", _MPT),
    case("mpt-labels", "MptForSequenceClassification", _MPT, num_labels=3, pad_token_id=0),
    case("mpt-tags", "MptForTokenClassification", _MPT, num_labels=3, pad_token_id=0),
    case("xglm", "XGLMForCausalLM", _XGLM),
    case("xglm-unscaled", "XGLMForCausalLM", _XGLM, d_model=35, attention_heads=5, scale_embedding=False,
         activation_function="relu", tie_word_embeddings=False),
    case("xglm-body", "XGLMModel", _XGLM),
    case("biogpt", "BioGptForCausalLM", BASE),
    case("biogpt-unscaled", "BioGptForCausalLM", BASE, scale_embedding=False, hidden_act="relu",
         tie_word_embeddings=False),
    case("bloom-answers", "BloomForQuestionAnswering", _BLOOM),
]  # fmt: skip

# A head of the others has 8 features.
ODD: Settings = dict(rotary_dim=4, ffn_dim=20)
KEPT = ["phi", "codegen"]
