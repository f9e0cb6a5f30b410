"""Encoder-decoder families as data: T5 (v1.0 and v1.1), BART, Marian."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint.hf_config import ACTIVATIONS, SHARED, T5_FFN, T5_SCALE
from regard.checkpoint.rules import REQUIRED, ROW, Family, Fixed, Inert, Key, rule
from regard.layers import LM, MLP, Norm
from regard.models import EncoderDecoderConfig, Tokens
from regard.position import Learned, Sinusoidal, T5Bias

# --- T5 -----------------------------------------------------------------------------------------------------------

_PLAIN = GQA(1, head_dim=1, scale=1.0)
_T5_ENCODER = Tower(
    1, 1, _PLAIN, MLP(1, bias=False), norm=Norm(1e-6, rms=True), causal=False, relative=T5Bias(1)
)
_T5_DECODER = replace(_T5_ENCODER, cross=_PLAIN, causal=True, relative=T5Bias(1, causal=True))


def _both(field: str) -> tuple[str, tuple[str, ...]]:
    return f"encoder.{field}", (f"decoder.{field}",)


def _shared(name: str, field: str, default: Any, words: dict[Any, Any] | None = None) -> Key:
    """One key of theirs that rules both towers."""
    path, also = _both(field)
    return Key(name, path, default, words, also)


def _t5_block(tower: str, last: int) -> tuple[Any, ...]:
    theirs, ours = f"{tower}.block.{{i}}.layer.", f"{tower}.blocks.{{i}}."
    self_attention = [(f"0.SelfAttention.{a}", f"attention.w{a}") for a in "qkvo"]
    cross = [(f"1.EncDecAttention.{a}", f"cross.w{a}") for a in "qkvo"] if last == 2 else []
    norms = [("0.layer_norm", "norm1"), (f"{last}.layer_norm", "norm3")]
    norms += [("1.layer_norm", "norm2")] if last == 2 else []
    ffn = f"{last}.DenseReluDense."
    rows = [*self_attention, *cross, *norms, (ffn + "wo", "ffn.down"), (ffn + "wi_0", "ffn.gate")]
    up, gate = ours + "ffn.up.weight", ours + "ffn.gate.weight"
    return (
        rule(f"{theirs}{ffn}wi.weight", up, unless=gate),
        rule(f"{theirs}{ffn}wi_1.weight", up, needs=gate),
        *(rule(f"{theirs}{a}.weight", f"{ours}{b}.weight") for a, b in rows),
        rule(
            f"{tower}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            f"{tower}.relative.weight",
        ),
        rule(f"{tower}.final_layer_norm.weight", f"{tower}.norm.weight"),
    )


T5 = Family(
    name="t5",
    base="",
    blank=EncoderDecoderConfig(Tokens(1), _T5_ENCODER, Tokens(1), _T5_DECODER),
    heads={"T5ForConditionalGeneration": LM()},
    config=(
        Key("vocab_size", "source.vocab", also=("target.vocab",)),
        _shared("d_model", "dim", REQUIRED),
        Key("num_layers", "encoder.layers"),
        Key("num_decoder_layers", "decoder.layers", lambda hf: hf["num_layers"]),
        Key(
            "num_heads",
            "encoder.attention.heads",
            also=(
                "decoder.attention.heads",
                "decoder.cross.heads",
                "encoder.relative.heads",
                "decoder.relative.heads",
            ),
        ),
        Key(
            "d_kv",
            "encoder.attention.head_dim",
            64,
            also=("decoder.attention.head_dim", "decoder.cross.head_dim"),
        ),
        _shared("d_ff", "ffn.ffn_dim", REQUIRED),
        _shared("relative_attention_num_buckets", "relative.buckets", 32),
        _shared("relative_attention_max_distance", "relative.max_distance", 128),
        _shared("layer_norm_epsilon", "norm.eps", 1e-6),
        Key(
            "dropout_rate",
            "encoder.dropout",
            0.1,
            also=("decoder.dropout", "source.dropout", "target.dropout"),
        ),
        T5_FFN,
        T5_SCALE,
        Fixed("is_decoder", (False,)),
        Inert(("n_positions",)),
    ),
    tensors=(
        rule("shared.weight", "source.weight", unless="target.weight"),
        rule("encoder.embed_tokens.weight", "source.weight", needs="target.weight"),
        rule("decoder.embed_tokens.weight", "target.weight"),
        *_t5_block("encoder", 1),
        *_t5_block("decoder", 2),
    ),
    head_tensors={"lm": (rule("lm_head.weight", "head.weight"),)},
    twins=(
        ("lm_head.weight", ("shared.weight", "decoder.embed_tokens.weight"), "head.tied"),
        ("encoder.embed_tokens.weight", ("shared.weight",), "shared"),
        ("decoder.embed_tokens.weight", ("shared.weight",), "shared"),
    ),
    carried=(
        r"shared\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
)

# --- BART and Marian ----------------------------------------------------------------------------------------------

_BIASED = GQA(1, bias=True, out_bias=True)
_BART_ENCODER = Tower(1, 1, _BIASED, MLP(1, "gelu"), order="post", final_norm=False, causal=False)
_BART_DECODER = replace(_BART_ENCODER, cross=_BIASED, causal=True)
_BART_TOKENS = Tokens(1, Learned(1, offset=2), norm=Norm())
_MARIAN_TOKENS = Tokens(1, Sinusoidal(1, layout="halves"))
_BART_KEYS = (
    Key("d_model", "encoder.dim", also=("decoder.dim",)),
    Key("encoder_layers", "encoder.layers"),
    Key("decoder_layers", "decoder.layers"),
    Key("encoder_attention_heads", "encoder.attention.heads"),
    Key("decoder_attention_heads", "decoder.attention.heads", also=("decoder.cross.heads",)),
    Key("encoder_ffn_dim", "encoder.ffn.ffn_dim"),
    Key("decoder_ffn_dim", "decoder.ffn.ffn_dim"),
    Key(
        "max_position_embeddings",
        "max_len",
        also=("source.position.max_len", "target.position.max_len"),
    ),
    _shared("activation_function", "ffn.activation", "gelu", ACTIVATIONS),
    _shared("activation_dropout", "ffn.dropout", 0.0),
    Key(
        "dropout",
        "encoder.dropout",
        0.1,
        also=("decoder.dropout", "source.dropout", "target.dropout"),
    ),
    Key(
        "attention_dropout",
        "encoder.attention.dropout",
        0.0,
        also=("decoder.attention.dropout", "decoder.cross.dropout"),
    ),
    Key("scale_embedding", "source.scaled", False, also=("target.scaled",)),
    Key("tie_word_embeddings", "head.tied", True),
    Fixed("is_decoder", (False,)),
    Fixed("normalize_before", (False,)),
    Fixed("add_final_layer_norm", (False,)),
    Inert(
        (
            "num_hidden_layers",
            "add_bias_logits",
            "extra_pos_embeddings",
            "force_bos_token_to_be_generated",
        )
    ),
)


def _bart_block(tower: str) -> tuple[Any, ...]:
    theirs, ours = f"model.{tower}.layers.{{i}}.", f"{tower}.blocks.{{i}}."
    rows = [
        ("self_attn_layer_norm", "norm1"),
        ("fc1", "ffn.up"),
        ("fc2", "ffn.down"),
        ("final_layer_norm", "norm3"),
    ]
    rows += [("encoder_attn_layer_norm", "norm2")]
    rows += [(f"self_attn.{a}_proj", f"attention.w{a}") for a in "qkv"] + [
        ("self_attn.out_proj", "attention.wo")
    ]
    rows += [(f"encoder_attn.{a}_proj", f"cross.w{a}") for a in "qkv"] + [
        ("encoder_attn.out_proj", "cross.wo")
    ]
    side = "source" if tower == "encoder" else "target"
    return (
        *(rule(f"{theirs}{a}.*", f"{ours}{b}.*") for a, b in rows),
        rule(f"model.{tower}.embed_positions.weight", f"{side}.position.weight"),
        rule(f"model.{tower}.layernorm_embedding.*", f"{side}.norm.*"),
    )


BART = Family(
    name="bart",
    base="",
    blank=EncoderDecoderConfig(
        _BART_TOKENS, _BART_ENCODER, _BART_TOKENS, _BART_DECODER, LM(bias=True), max_len=1
    ),
    heads={"BartForConditionalGeneration": LM(bias=True)},
    config=(
        Key("vocab_size", "source.vocab", also=("target.vocab",)),
        *_BART_KEYS,
        Fixed("normalize_embedding", (True,)),
        Fixed("static_position_embeddings", (False,)),
    ),
    tensors=(
        rule("model.shared.weight", "source.weight", unless="target.weight"),
        rule("model.encoder.embed_tokens.weight", "source.weight", needs="target.weight"),
        rule("model.decoder.embed_tokens.weight", "target.weight"),
        *_bart_block("encoder"),
        *_bart_block("decoder"),
    ),
    head_tensors={
        "lm": (rule("lm_head.weight", "head.weight"), rule("final_logits_bias", "head.bias", ROW))
    },
    twins=(
        (
            "lm_head.weight",
            ("model.shared.weight", "model.decoder.embed_tokens.weight"),
            "head.tied",
        ),
        ("model.encoder.embed_tokens.weight", ("model.shared.weight",), "shared"),
        ("model.decoder.embed_tokens.weight", ("model.shared.weight",), "shared"),
    ),
    derived=(r"model\.(encoder|decoder)\.version",),
    carried=(r"model\.shared\.weight",),
)
MARIAN = replace(
    BART,
    name="marian",
    blank=EncoderDecoderConfig(
        _MARIAN_TOKENS, _BART_ENCODER, _MARIAN_TOKENS, _BART_DECODER, LM(bias=True), max_len=1
    ),
    heads={"MarianMTModel": LM(bias=True)},
    config=(
        Key("vocab_size", "source.vocab"),
        Key("decoder_vocab_size", "target.vocab", lambda hf: hf["vocab_size"]),
        SHARED,
        *_BART_KEYS,
        Fixed("normalize_embedding", (False,)),
        Fixed("static_position_embeddings", (True,)),
    ),
    derived=(*BART.derived, r"model\.(encoder|decoder)\.embed_positions\.weight"),
)
