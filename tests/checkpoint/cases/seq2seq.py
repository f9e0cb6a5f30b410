"""Encoders with decoders."""

from __future__ import annotations

from tests.checkpoint.cases import BART, BASE, T5, Settings, case

_MT5, _UMT5 = "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration"
_MBART, _PEGASUS = "MBartForConditionalGeneration", "PegasusForConditionalGeneration"
_BLENDER, _M2M = "BlenderbotForConditionalGeneration", "M2M100ForConditionalGeneration"
_T5GEMMA = "T5GemmaForConditionalGeneration"
_STARTS = dict(BART, decoder_start_token_id=2)
_PART = dict(BASE, num_key_value_heads=1, head_dim=8, sliding_window=3)
_WRITER = dict(_PART, num_hidden_layers=3, query_pre_attn_scalar=7, attn_logit_softcapping=1.5,
               final_logit_softcapping=2.5)  # fmt: skip
# transformers' fused attention forgets the cap on scores.
_PARTS = dict(vocab_size=50, encoder=_PART, decoder=_WRITER, attn_implementation="eager")

CASES = [
    case("mt5", _MT5, T5, num_decoder_layers=1),
    case("mt5-relu", _MT5, T5, feed_forward_proj="relu", relative_attention_num_buckets=8,
         relative_attention_max_distance=10),
    case("mt5-body", "MT5Model", T5),
    case("umt5", _UMT5, T5, num_decoder_layers=1),
    case("umt5-relu", _UMT5, T5, feed_forward_proj="relu", num_layers=3, relative_attention_num_buckets=8,
         relative_attention_max_distance=10),
    case("umt5-body", "UMT5Model", T5),
    case("mbart", _MBART, _STARTS, scale_embedding=True),
    case("mbart-untied", _MBART, _STARTS, tie_word_embeddings=False, d_model=30, encoder_attention_heads=5,
         activation_function="relu"),
    case("mbart-body", "MBartModel", _STARTS),
    case("pegasus", _PEGASUS, BART, scale_embedding=True, activation_function="relu"),
    case("pegasus-odd", _PEGASUS, BART, d_model=21, encoder_attention_heads=7, decoder_attention_heads=3,
         tie_word_embeddings=False),
    case("blenderbot", _BLENDER, BART, scale_embedding=True),
    case("blenderbot-untied", _BLENDER, BART, tie_word_embeddings=False, activation_function="silu"),
    case("m2m-100", _M2M, BART, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    case("m2m-100-body", "M2M100Model", BART, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    case("m2m-100-pad-0", _M2M, BART, pad_token_id=0, scale_embedding=False, activation_function="gelu"),
    case("m2m-100-odd", _M2M, BART, d_model=21, encoder_attention_heads=7, decoder_attention_heads=3,
         tie_word_embeddings=False),
    case("t5gemma", _T5GEMMA, _PARTS),
    case("t5gemma-body", "T5GemmaModel", _PARTS),
    case("t5gemma-odd", _T5GEMMA, _PARTS, tie_word_embeddings=False,
         encoder=dict(_PART, hidden_size=21, num_attention_heads=7, attn_logit_softcapping=2.0,
                      layer_types=["full_attention"] * 2, attention_bias=True, max_position_embeddings=30),
         decoder=dict(_WRITER, num_key_value_heads=3, head_dim=6, attn_logit_softcapping=None, vocab_size=47,
                      final_logit_softcapping=None, hidden_activation="silu", rms_norm_eps=1e-3)),
]  # fmt: skip
ODD: Settings = {}
KEPT = ["m2m-100", "umt5"]
