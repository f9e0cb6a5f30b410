"""Encoder-decoder families as data: T5 (v1.0 and v1.1), BART, Marian."""

from __future__ import annotations

from dataclasses import replace

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint.families.keys import ACTIVATIONS
from regard.checkpoint.rules import (
    ROW,
    Data,
    Family,
    Fixed,
    Group,
    Key,
    Keys,
    To,
    Weights,
    need,
    put,
    under,
)
from regard.errors import UsageError
from regard.layers import LM, MLP, Norm
from regard.models import EncoderDecoderConfig, Tokens
from regard.models.start import Start
from regard.position import Learned, Sinusoidal, T5Bias


def both(field: str) -> str:
    """The places of a setting that rules both towers."""
    return f"encoder.{field} decoder.{field}"


def _frame(base: str) -> Weights:
    """One table for both sides, or one for each."""
    return {
        f"{base}shared.weight": To("source.weight", unless="target.weight"),
        f"{base}encoder.embed_tokens.weight": To("source.weight", needs="target.weight"),
        f"{base}decoder.embed_tokens.weight": "target.weight",
    }


def _twins(base: str) -> tuple[tuple[str, tuple[str, ...], str], ...]:
    shared, decoder = f"{base}shared.weight", f"{base}decoder.embed_tokens.weight"
    return (
        ("lm_head.weight", (shared, decoder), "head.tied"),
        (f"{base}encoder.embed_tokens.weight", (shared,), "shared"),
        (decoder, (shared,), "shared"),
    )


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


def _t5_tower(tower: str, last: int) -> Weights:
    """`last`: which of the parts of a layer is the feed-forward, after self-attention and perhaps cross-attention."""
    ffn, gate = f"{last}.DenseReluDense.", "ffn.gate.weight"
    rows: Weights = {
        f"{ffn}wi.weight": To("ffn.up.weight", unless=gate),
        f"{ffn}wi_1.weight": To("ffn.up.weight", needs=gate),
        f"{ffn}wi_0.weight": gate,
        f"{ffn}wo.weight": "ffn.down.weight",
        "0.layer_norm.weight": "norm1.weight",
        f"{last}.layer_norm.weight": "norm3.weight",
        **{f"0.SelfAttention.{x}.weight": f"attention.w{x}.weight" for x in "qkvo"},
    }
    if last == 2:
        cross = {f"1.EncDecAttention.{x}.weight": f"cross.w{x}.weight" for x in "qkvo"}
        rows = {**rows, **cross, "1.layer_norm.weight": "norm2.weight"}
    bias = f"{tower}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return {
        **under(f"{tower}.block.{{i}}.layer.", f"{tower}.blocks.{{i}}.", rows),
        bias: f"{tower}.relative.weight",
        f"{tower}.final_layer_norm.weight": f"{tower}.norm.weight",
    }


def _t5_ffn_of(theirs: Data) -> tuple[str, bool]:
    word = theirs.get("feed_forward_proj") or "relu"
    name = word.removeprefix("gated-")
    name = "gelu_new" if word == "gated-gelu" else name
    if name not in ACTIVATIONS:
        raise UsageError(
            f"config.json: feed_forward_proj is {word!r}; known: relu, gated-gelu, gated-silu, ..."
        )
    return ACTIVATIONS[name], word.startswith("gated-")


def _read_t5_ffn(theirs: Data, ours: Data) -> None:
    activation, gated = _t5_ffn_of(theirs)
    for tower in ("encoder", "decoder"):
        ours[tower]["ffn"].update(activation=activation, gated=gated)


def _write_t5_ffn(ours: Data, theirs: Data) -> None:
    activation, gated = (need(ours, f"encoder.ffn.{name}") for name in ("activation", "gated"))
    if "feed_forward_proj" in theirs and _t5_ffn_of(theirs) == (activation, gated):
        return
    name = next(k for k, v in ACTIVATIONS.items() if v == activation)
    if gated:
        name = "gated-gelu" if name == "gelu_new" else f"gated-{name}"
    theirs["feed_forward_proj"] = name
    for stale in ("dense_act_fn", "is_gated_act"):
        theirs.pop(stale, None)


def _t5_scale_of(theirs: Data) -> bool:
    """v1.0 multiplies the decoder's output by dim^-0.5; in older folders v1.1 shows by tie_word_embeddings false."""
    scaled = theirs.get("scale_decoder_outputs")
    return theirs.get("tie_word_embeddings") is not False if scaled is None else scaled


def _write_t5_scale(ours: Data, theirs: Data) -> None:
    if ours["head"] is None:
        return
    scaled = ours["head"]["scaled"]
    if "scale_decoder_outputs" not in theirs or _t5_scale_of(theirs) != scaled:
        theirs["scale_decoder_outputs"] = theirs["tie_word_embeddings"] = scaled


T5 = Family(
    name="t5",
    base="",
    blank=EncoderDecoderConfig(Tokens(1), _T5_ENCODER, Tokens(1), _T5_DECODER),
    heads={"T5ForConditionalGeneration": LM(), "T5Model": None},
    config=dict(
        vocab_size=Key("source.vocab target.vocab"),
        d_model=Key(both("dim")),
        num_layers=Key("encoder.layers"),
        num_decoder_layers=Key("decoder.layers", lambda hf: hf["num_layers"]),
        num_heads=Key(f"{both('attention.heads')} decoder.cross.heads {both('relative.heads')}"),
        d_kv=Key(f"{both('attention.head_dim')} decoder.cross.head_dim", 64),
        d_ff=Key(both("ffn.ffn_dim")),
        relative_attention_num_buckets=Key(both("relative.buckets"), 32),
        relative_attention_max_distance=Key(both("relative.max_distance"), 128),
        layer_norm_epsilon=Key(both("norm.eps"), 1e-6),
        dropout_rate=Key(
            f"{both('dropout')} source.dropout target.dropout {both('ffn.dropout')} "
            f"{both('attention.dropout')} decoder.cross.dropout",
            0.1,
        ),
        feed_forward_proj=Group(
            ("feed_forward_proj", "dense_act_fn", "is_gated_act"), _read_t5_ffn, _write_t5_ffn
        ),
        scale_decoder_outputs=Group(
            ("scale_decoder_outputs", "tie_word_embeddings"),
            lambda theirs, ours: put(ours, "head.scaled", _t5_scale_of(theirs)),
            _write_t5_scale,
        ),
        is_decoder=Fixed(False),
        is_causal=Fixed(True),
    ),
    inert="n_positions classifier_dropout",
    aliases=dict(
        hidden_size="d_model",
        num_attention_heads="num_heads",
        num_hidden_layers="num_layers",
        head_dim="d_kv",
    ),
    tensors={**_frame(""), **_t5_tower("encoder", 1), **_t5_tower("decoder", 2)},
    head_tensors={"lm": {"lm_head.weight": "head.weight"}},
    twins=_twins(""),
    carried=(
        r"shared\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
    start=Start("t5", 1.0),
)

# --- BART and Marian ----------------------------------------------------------------------------------------------

_BIASED = GQA(1, bias=True, out_bias=True)
_BART_ENCODER = Tower(
    1, 1, _BIASED, MLP(1, "gelu", dropout=0.0), order="post", final_norm=False, causal=False
)
_BART_DECODER = replace(_BART_ENCODER, cross=_BIASED, causal=True)
_BART_HEAD = LM(bias=True, trained=False)


def _bart(words: Tokens) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(words, _BART_ENCODER, words, _BART_DECODER, _BART_HEAD, max_len=1)


_BART_KEYS: Keys = dict(
    d_model=Key(both("dim")),
    encoder_layers=Key("encoder.layers"),
    decoder_layers=Key("decoder.layers"),
    encoder_attention_heads=Key("encoder.attention.heads"),
    decoder_attention_heads=Key("decoder.attention.heads decoder.cross.heads"),
    encoder_ffn_dim=Key("encoder.ffn.ffn_dim"),
    decoder_ffn_dim=Key("decoder.ffn.ffn_dim"),
    max_position_embeddings=Key("max_len source.position.max_len target.position.max_len"),
    activation_function=Key(both("ffn.activation"), "gelu", ACTIVATIONS),
    activation_dropout=Key(both("ffn.dropout"), 0.0),
    dropout=Key(f"{both('dropout')} source.dropout target.dropout", 0.1),
    attention_dropout=Key(f"{both('attention.dropout')} decoder.cross.dropout", 0.0),
    encoder_layerdrop=Key("encoder.layer_drop", 0.0),
    decoder_layerdrop=Key("decoder.layer_drop", 0.0),
    scale_embedding=Key("source.scaled target.scaled", False),
    tie_word_embeddings=Key("head.tied", True),
    is_decoder=Fixed(False),
    is_causal=Fixed(True),
    normalize_before=Fixed(False),
    add_final_layer_norm=Fixed(False),
)


def _bart_tower(tower: str, side: str) -> Weights:
    rows = {"fc1.*": "ffn.up.*", "fc2.*": "ffn.down.*", "final_layer_norm.*": "norm3.*"}
    for theirs, ours, norm in (
        ("self_attn", "attention", "norm1"),
        ("encoder_attn", "cross", "norm2"),
    ):
        rows |= {f"{theirs}.{x}_proj.*": f"{ours}.w{x}.*" for x in "qkv"}
        rows |= {f"{theirs}.out_proj.*": f"{ours}.wo.*", f"{theirs}_layer_norm.*": f"{norm}.*"}
    return {
        **under(f"model.{tower}.layers.{{i}}.", f"{tower}.blocks.{{i}}.", rows),
        f"model.{tower}.embed_positions.weight": f"{side}.position.weight",
        f"model.{tower}.layernorm_embedding.*": f"{side}.norm.*",
    }


BART = Family(
    name="bart",
    base="model.",
    blank=_bart(Tokens(1, Learned(1, offset=2), norm=Norm())),
    heads={"BartForConditionalGeneration": _BART_HEAD, "BartModel": None},
    config=_BART_KEYS
    | dict(
        vocab_size=Key("source.vocab target.vocab"),
        normalize_embedding=Fixed(True),
        static_position_embeddings=Fixed(False),
    ),
    inert="""classifier_dropout classif_dropout add_bias_logits extra_pos_embeddings
    force_bos_token_to_be_generated""",
    aliases=dict(
        hidden_size="d_model",
        num_attention_heads="encoder_attention_heads",
        num_hidden_layers="encoder_layers",
    ),
    tensors={
        **_frame("model."),
        **_bart_tower("encoder", "source"),
        **_bart_tower("decoder", "target"),
    },
    head_tensors={
        "lm": {"lm_head.weight": "head.weight", "final_logits_bias": To("head.bias", ROW)}
    },
    twins=_twins("model."),
    apart=True,
    derived=(r"model\.(encoder|decoder)\.version",),
    carried=(r"model\.shared\.weight",),
)


def _read_shared(theirs: Data, ours: Data) -> None:
    ours["shared"] = theirs.get("share_encoder_decoder_embeddings") is not False


def _write_shared(ours: Data, theirs: Data) -> None:
    """A folder may say that the tables are shared and yet, with nothing tied, hold one each: the tensors tell."""
    if not theirs.get("share_encoder_decoder_embeddings") or theirs["tie_word_embeddings"]:
        theirs["share_encoder_decoder_embeddings"] = ours["shared"]


def _write_padding(ours: Data, theirs: Data) -> None:
    """Marian pads, and starts its output, with the last id; transformers must find it inside the vocabulary."""
    for key in ("pad_token_id", "decoder_start_token_id"):
        theirs.setdefault(key, ours["target"]["vocab"] - 1)


MARIAN = replace(
    BART,
    name="marian",
    blank=_bart(Tokens(1, Sinusoidal(1, layout="halves"))),
    heads={"MarianMTModel": _BART_HEAD, "MarianModel": None},
    config=dict(
        vocab_size=Key("source.vocab"),
        decoder_vocab_size=Key("target.vocab", lambda hf: hf["vocab_size"]),
        share_encoder_decoder_embeddings=Group(
            ("share_encoder_decoder_embeddings",), _read_shared, _write_shared
        ),
        pad_token_id=Group(
            ("pad_token_id", "decoder_start_token_id"), lambda *_: None, _write_padding
        ),
        **_BART_KEYS,
        normalize_embedding=Fixed(False),
        static_position_embeddings=Fixed(True),
    ),
    derived=(*BART.derived, r"model\.(encoder|decoder)\.embed_positions\.weight"),
)
