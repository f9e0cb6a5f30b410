"""Encoder-decoder families as data: T5 (v1.0 and v1.1), BART, Marian."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint.families.config import ACTIVATIONS
from regard.checkpoint.rules import (
    REQUIRED,
    ROW,
    Custom,
    Data,
    Family,
    Fixed,
    Inert,
    Key,
    need,
    put,
    rule,
)
from regard.errors import UsageError
from regard.layers import LM, MLP, Norm
from regard.models import EncoderDecoderConfig, Tokens
from regard.position import Learned, Sinusoidal, T5Bias

# --- T5 -----------------------------------------------------------------------------------------------------------

_PLAIN = GQA(1, head_dim=1, scale=1.0)
_T5_ENCODER = Tower(
    1,
    1,
    _PLAIN,
    MLP(1, bias=False, dropout=0.0),
    norm=Norm(1e-6, rms=True),
    causal=False,
    relative=T5Bias(1),
    end_dropped=True,
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


def _read_t5_ffn(theirs: Data, ours: Data) -> None:
    activation, gated = _t5_ffn_of(theirs)
    for tower in ("encoder", "decoder"):
        ours[tower]["ffn"].update(activation=activation, gated=gated)


def _t5_ffn_of(theirs: Data) -> tuple[str, bool]:
    word = theirs.get("feed_forward_proj") or "relu"
    name = word.removeprefix("gated-")
    name = "gelu_new" if word == "gated-gelu" else name
    if name not in ACTIVATIONS:
        raise UsageError(
            f"config.json: feed_forward_proj is {word!r}; known: relu, gated-gelu, gated-silu, ..."
        )
    return ACTIVATIONS[name], word.startswith("gated-")


def _write_t5_ffn(ours: Data, theirs: Data) -> None:
    activation, gated = (need(ours, f"encoder.ffn.{name}") for name in ("activation", "gated"))
    if "feed_forward_proj" in theirs and _t5_ffn_of(theirs) == (activation, gated):
        return
    name = next(k for k, v in ACTIVATIONS.items() if v == activation)
    if not gated:
        theirs["feed_forward_proj"] = name
    else:
        theirs["feed_forward_proj"] = "gated-gelu" if name == "gelu_new" else f"gated-{name}"
    for stale in ("dense_act_fn", "is_gated_act"):
        theirs.pop(stale, None)


T5_FFN = Custom(("feed_forward_proj", "dense_act_fn", "is_gated_act"), _read_t5_ffn, _write_t5_ffn)


def _read_t5_scale(theirs: Data, ours: Data) -> None:
    """v1.0 multiplies the decoder's output by dim^-0.5; v1.1 is told by tie_word_embeddings false in older folders."""
    put(ours, "head.scaled", _t5_scale_of(theirs))


def _t5_scale_of(theirs: Data) -> bool:
    scaled = theirs.get("scale_decoder_outputs")
    return theirs.get("tie_word_embeddings") is not False if scaled is None else scaled


def _write_t5_scale(ours: Data, theirs: Data) -> None:
    if ours["head"] is None:
        return
    scaled = ours["head"]["scaled"]
    if "scale_decoder_outputs" not in theirs or _t5_scale_of(theirs) != scaled:
        theirs["scale_decoder_outputs"] = theirs["tie_word_embeddings"] = scaled


T5_SCALE = Custom(("scale_decoder_outputs", "tie_word_embeddings"), _read_t5_scale, _write_t5_scale)


T5 = Family(
    name="t5",
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    base="",
    blank=EncoderDecoderConfig(Tokens(1), _T5_ENCODER, Tokens(1), _T5_DECODER),
    heads={"T5ForConditionalGeneration": LM(), "T5Model": None},
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
            also=(
                "decoder.dropout",
                "source.dropout",
                "target.dropout",
                "encoder.ffn.dropout",
                "decoder.ffn.dropout",
                "encoder.attention.dropout",
                "decoder.attention.dropout",
                "decoder.cross.dropout",
            ),
        ),
        T5_FFN,
        T5_SCALE,
        Fixed("is_decoder", (False,)),
        Fixed("is_causal", (True,)),
        Inert(("n_positions", "classifier_dropout")),
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
_BART_FFN = MLP(1, "gelu", dropout=0.0)
_BART_ENCODER = Tower(1, 1, _BIASED, _BART_FFN, order="post", final_norm=False, causal=False)
_BART_HEAD = LM(bias=True, trained=False)
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
    Key("encoder_layerdrop", "encoder.layer_drop", 0.0),
    Key("decoder_layerdrop", "decoder.layer_drop", 0.0),
    Key("scale_embedding", "source.scaled", False, also=("target.scaled",)),
    Key("tie_word_embeddings", "head.tied", True),
    Fixed("is_decoder", (False,)),
    Fixed("is_causal", (True,)),
    Fixed("normalize_before", (False,)),
    Fixed("add_final_layer_norm", (False,)),
    Inert(
        (
            "classifier_dropout",
            "classif_dropout",
            "add_bias_logits",
            "extra_pos_embeddings",
            "force_bos_token_to_be_generated",
        )
    ),
)


def _bart_block(tower: str) -> tuple[Any, ...]:
    theirs, ours = f"model.{tower}.layers.{{i}}.", f"{tower}.blocks.{{i}}."
    rows = [("fc1", "ffn.up"), ("fc2", "ffn.down"), ("final_layer_norm", "norm3")]
    for a, b, norm in (("self_attn", "attention", "norm1"), ("encoder_attn", "cross", "norm2")):
        rows += [(f"{a}.{x}_proj", f"{b}.w{x}") for x in "qkv"]
        rows += [(f"{a}.out_proj", f"{b}.wo"), (f"{a}_layer_norm", norm)]
    side = "source" if tower == "encoder" else "target"
    return (
        *(rule(f"{theirs}{a}.*", f"{ours}{b}.*") for a, b in rows),
        rule(f"model.{tower}.embed_positions.weight", f"{side}.position.weight"),
        rule(f"model.{tower}.layernorm_embedding.*", f"{side}.norm.*"),
    )


BART = Family(
    name="bart",
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    },
    base="model.",
    blank=EncoderDecoderConfig(
        _BART_TOKENS, _BART_ENCODER, _BART_TOKENS, _BART_DECODER, _BART_HEAD, max_len=1
    ),
    heads={"BartForConditionalGeneration": _BART_HEAD, "BartModel": None},
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
    apart=True,
    derived=(r"model\.(encoder|decoder)\.version",),
    carried=(r"model\.shared\.weight",),
)


def _read_shared(theirs: Data, ours: Data) -> None:
    ours["shared"] = theirs.get("share_encoder_decoder_embeddings") is not False


def _write_shared(ours: Data, theirs: Data) -> None:
    """A folder may say that the tables are shared and yet, with nothing tied, hold one each: the tensors tell."""
    told = theirs.get("share_encoder_decoder_embeddings") and not theirs["tie_word_embeddings"]
    if not told:
        theirs["share_encoder_decoder_embeddings"] = ours["shared"]


SHARED = Custom(("share_encoder_decoder_embeddings",), _read_shared, _write_shared)


def _write_padding(ours: Data, theirs: Data) -> None:
    """Marian pads, and starts its output, with the last id; transformers must find it inside the vocabulary."""
    for key in LAST_IS_PADDING.names:
        theirs.setdefault(key, ours["target"]["vocab"] - 1)


LAST_IS_PADDING = Custom(
    ("pad_token_id", "decoder_start_token_id"), lambda theirs, ours: None, _write_padding
)


MARIAN = replace(
    BART,
    name="marian",
    blank=EncoderDecoderConfig(
        _MARIAN_TOKENS, _BART_ENCODER, _MARIAN_TOKENS, _BART_DECODER, _BART_HEAD, max_len=1
    ),
    heads={"MarianMTModel": _BART_HEAD, "MarianModel": None},
    config=(
        Key("vocab_size", "source.vocab"),
        Key("decoder_vocab_size", "target.vocab", lambda hf: hf["vocab_size"]),
        SHARED,
        LAST_IS_PADDING,
        *_BART_KEYS,
        Fixed("normalize_embedding", (False,)),
        Fixed("static_position_embeddings", (True,)),
    ),
    derived=(*BART.derived, r"model\.(encoder|decoder)\.embed_positions\.weight"),
)
