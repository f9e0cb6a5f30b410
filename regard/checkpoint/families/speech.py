"""Speech: an encoder of spectrograms and a decoder of text."""

from __future__ import annotations

from dataclasses import replace

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.family import Family
from regard.checkpoint.rules import ACTIVATIONS, Data, Group, Key
from regard.checkpoint.tensors import Weights
from regard.layers import LM, MLP
from regard.models import EncoderDecoderConfig, Sound, Tokens
from regard.position import Learned

_ATTENTION = GQA(1, bias=True, out_bias=True, key_bias=False)
_ENCODER = Tower(1, 1, _ATTENTION, MLP(1, "gelu", dropout=0.0), causal=False)
_DECODER = replace(_ENCODER, cross=_ATTENTION, causal=True)


def _tower(tower: str) -> Weights:
    rows = {
        "self_attn.{q,k,v,out}_proj.*": "attention.w{q,k,v,o}.*",
        "encoder_attn.{q,k,v,out}_proj.*": "cross.w{q,k,v,o}.*",
        "{self_attn,encoder_attn,final}_layer_norm.*": "norm{1,2,3}.*", "fc{1,2}.*": "ffn.{up,down}.*",
    }  # fmt: skip
    layers = tensors.under(f"{tower}.layers.{{i}}.", f"{tower}.blocks.{{i}}.", rows)
    return {**layers, f"{tower}.layer_norm.*": f"{tower}.norm.*"}


def _no_causal(theirs: Data, _: Data) -> None:
    """Where it is said, transformers gives it to the encoder too."""
    if "is_causal" in theirs:
        raise rules.wrong(f"is_causal is {theirs['is_causal']!r}; a whisper model has no such key")


def _whisper(dim: int, layers: int, heads: int) -> Data:
    each = dict(layers=layers, attention_heads=heads, ffn_dim=4 * dim)
    towers = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in each.items()}
    return dict(vocab_size=51865, d_model=dim, **towers)


WHISPER = Family(
    name="whisper", base="model.",
    blank=EncoderDecoderConfig(Sound(), _ENCODER, Tokens(1, Learned(1)), _DECODER, shared=False),
    heads={"WhisperForConditionalGeneration": LM(), "WhisperModel": None},
    config=dict(
        vocab_size=Key("target.vocab"), d_model=Key("{encoder,decoder}.dim"),
        pad_token_id=rules.ids_below(50256, "pad_token_id", "eos_token_id", "bos_token_id", of="target"),
        num_mel_bins=Key("source.bands", 80), max_source_positions=Key("source.size", 1500),
        max_target_positions=Key("target.position.max_len", 448),
        encoder_layers=Key("encoder.layers"), decoder_layers=Key("decoder.layers"),
        encoder_attention_heads=Key("encoder.attention.heads"),
        decoder_attention_heads=Key("decoder.{attention,cross}.heads"),
        encoder_ffn_dim=Key("encoder.ffn.ffn_dim"), decoder_ffn_dim=Key("decoder.ffn.ffn_dim"),
        activation_function=Key("{encoder,decoder}.ffn.activation", "gelu", ACTIVATIONS),
        activation_dropout=Key("{encoder,decoder}.ffn.dropout", 0.0),
        dropout=Key("{encoder,decoder,source,target}.dropout", 0.0),
        attention_dropout=Key("{encoder.attention,decoder.attention,decoder.cross}.dropout", 0.0),
        encoder_layerdrop=Key("encoder.layer_drop", 0.0), decoder_layerdrop=Key("decoder.layer_drop", 0.0),
        tie_word_embeddings=Key("head.tied", True),
        is_causal=Group(("is_causal",), _no_causal, lambda *_: None),
    ),
    # Transformers never multiplies by scale_embedding, and masks spectrograms in training alone.
    inert="""scale_embedding apply_spec_augment mask_time_prob mask_time_length mask_time_min_masks
    mask_feature_prob mask_feature_length mask_feature_min_masks median_filter_width classifier_proj_size
    use_weighted_layer_sum""",
    aliases=dict(
        hidden_size="d_model", num_attention_heads="encoder_attention_heads",
        num_hidden_layers="encoder_layers", num_key_value_heads="encoder_attention_heads",
    ),
    tensors={
        "encoder.conv1.*": "source.first.*", "encoder.conv2.*": "source.second.*",
        "encoder.embed_positions.weight": "source.position", **_tower("encoder"),
        "decoder.embed_tokens.weight": "target.weight",
        "decoder.embed_positions.weight": "target.position.weight", **_tower("decoder"),
    },
    head_tensors={"lm": {"proj_out.weight": "head.weight"}},
    presets={"whisper-tiny": _whisper(384, 4, 6), "whisper-base": _whisper(512, 6, 8)},
)  # fmt: skip
