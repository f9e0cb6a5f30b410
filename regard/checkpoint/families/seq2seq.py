"""An encoder and a decoder: T5, BART, Marian and their kin."""

from __future__ import annotations

from dataclasses import replace

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import BIASED_ATTENTION, POST_NORM
from regard.checkpoint.family import Family
from regard.checkpoint.rules import ACTIVATIONS, Data, Group, Key, Keys, fixed
from regard.checkpoint.tensors import To, Weights
from regard.layers import LM, MLP, Norm
from regard.models import EncoderDecoderConfig, Tokens
from regard.models.init import Start
from regard.position import Learned, Sinusoidal, T5Bias

_FRAME = {
    "shared.weight": To("source.weight", unless="target.weight"),
    "encoder.embed_tokens.weight": To("source.weight", needs="target.weight"),
    "decoder.embed_tokens.weight": "target.weight",
}
_PLAIN = GQA(1, head_dim=1, scale=1.0)
_T5_ENCODER = Tower(
    1, 1, _PLAIN, MLP(1, bias=False, dropout=0.0), norm=Norm(1e-6, rms=True), causal=False,
    relative=T5Bias(1), end_dropped=True,
)  # fmt: skip
_T5_DECODER = replace(_T5_ENCODER, cross=_PLAIN, causal=True, relative=T5Bias(1, causal=True))


def _t5_tower(tower: str, last: int) -> Weights:
    """`last`: which of the parts of a layer is the feed-forward, after self-attention and perhaps cross-attention: its
    norm is then not that of the second."""
    ffn = f"{last}.DenseReluDense."
    gate = "ffn.gate.weight"
    rows: Weights = {
        "0.SelfAttention.{q,k,v,o}.weight": "attention.w{q,k,v,o}.weight",
        "1.EncDecAttention.{q,k,v,o}.weight": "cross.w{q,k,v,o}.weight",
        "{0,1}.layer_norm.weight": "norm{1,2}.weight", f"{last}.layer_norm.weight": "norm3.weight",
        f"{ffn}wi.weight": To("ffn.up.weight", unless=gate),
        f"{ffn}wi_1.weight": To("ffn.up.weight", needs=gate), f"{ffn}wi_0.weight": gate,
        f"{ffn}wo.weight": "ffn.down.weight",
    }  # fmt: skip
    bias = f"{tower}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return {
        **tensors.under(f"{tower}.block.{{i}}.layer.", f"{tower}.blocks.{{i}}.", rows),
        bias: f"{tower}.relative.weight", f"{tower}.final_layer_norm.weight": f"{tower}.norm.weight",
    }  # fmt: skip


# feed_forward_proj -> our activation, and whether it is gated; gated-gelu is the approximation.
_T5_GATED = {"gated-gelu": ("gelu_tanh", True)}
_T5_FFN = _T5_GATED | {name: (ours, False) for name, ours in ACTIVATIONS.items()}
_T5_FFN |= {f"gated-{name}": (ours, True) for name, ours in ACTIVATIONS.items()} | _T5_GATED


def _t5_ffn(missing: str) -> Group:
    """Activation and gate of both towers: what dense_act_fn and is_gated_act say is stronger than feed_forward_proj,
    of which a missing one means `missing`."""

    def of(theirs: Data) -> tuple[str, bool]:
        word = theirs.get("feed_forward_proj")
        act = theirs.get("dense_act_fn")
        word = missing if word is None else word
        for key, value, known in (
            ("feed_forward_proj", word, _T5_FFN),
            ("dense_act_fn", act or "relu", ACTIVATIONS),
        ):
            if value not in known:
                raise rules.wrong(f"{key} is {value!r}; known: {', '.join(known)}")
        name, gated = _T5_FFN[word]
        said = theirs.get("is_gated_act")
        return ACTIVATIONS[act] if act else name, gated if said is None else said

    def read(theirs: Data, ours: Data) -> None:
        for tower in ("encoder", "decoder"):
            ours[tower]["ffn"] |= dict(zip(("activation", "gated"), of(theirs)))

    def write(ours: Data, theirs: Data) -> None:
        ffn = tuple(rules.need(ours, f"encoder.ffn.{name}") for name in ("activation", "gated"))
        if of(theirs) != ffn:
            theirs["feed_forward_proj"] = next(
                word for word, is_of in _T5_FFN.items() if is_of == ffn
            )
            for stale in ("dense_act_fn", "is_gated_act"):
                theirs.pop(stale, None)

    return Group(("feed_forward_proj", "dense_act_fn", "is_gated_act"), read, write)


def _t5_scale_of(theirs: Data) -> bool:
    """v1.0 multiplies the decoder's output by dim^-0.5; in older folders v1.1 shows by tie_word_embeddings false."""
    if "scale_decoder_outputs" in theirs:
        return bool(theirs["scale_decoder_outputs"])
    return theirs.get("tie_word_embeddings") is not False


def _write_t5_scale(ours: Data, theirs: Data) -> None:
    if ours["head"] is None:
        return
    scaled = ours["head"]["scaled"]
    if "scale_decoder_outputs" not in theirs or _t5_scale_of(theirs) != scaled:
        theirs["scale_decoder_outputs"] = theirs["tie_word_embeddings"] = scaled


def _t5(dim: int, layers: int, heads: int, ffn: int) -> Data:
    return dict(vocab_size=32128, d_model=dim, num_layers=layers, num_heads=heads, d_ff=ffn)


T5 = Family(
    name="t5", base="", blank=EncoderDecoderConfig(Tokens(1), _T5_ENCODER, Tokens(1), _T5_DECODER),
    heads={"T5ForConditionalGeneration": LM(), "T5Model": None},
    config=dict(
        vocab_size=Key("{source,target}.vocab"), d_model=Key("{encoder,decoder}.dim"),
        num_layers=Key("encoder.layers"),
        num_decoder_layers=Key("decoder.layers", lambda hf: hf["num_layers"]),
        num_heads=Key("{encoder,decoder}.{attention,relative}.heads decoder.cross.heads"),
        d_kv=Key("{encoder,decoder}.attention.head_dim decoder.cross.head_dim", 64),
        d_ff=Key("{encoder,decoder}.ffn.ffn_dim"),
        relative_attention_num_buckets=Key("{encoder,decoder}.relative.buckets", 32),
        relative_attention_max_distance=Key("{encoder,decoder}.relative.max_distance", 128),
        layer_norm_epsilon=Key("{encoder,decoder}.norm.eps", 1e-6),
        dropout_rate=Key(
            "{encoder,decoder,source,target,encoder.ffn,decoder.ffn}.dropout "
            "{encoder.attention,decoder.attention,decoder.cross}.dropout",
            0.1,
        ),
        feed_forward_proj=_t5_ffn("relu"),
        scale_decoder_outputs=Group(
            ("scale_decoder_outputs", "tie_word_embeddings"),
            lambda theirs, ours: rules.put(ours, "head.scaled", _t5_scale_of(theirs)), _write_t5_scale,
        ),
        is_causal=rules.Fixed(True, null=False), **fixed(is_decoder=False),
    ),
    inert="n_positions classifier_dropout",
    aliases=dict(hidden_size="d_model", num_attention_heads="num_heads", head_dim="d_kv") | dict(
        num_hidden_layers="num_layers",
    ),
    tensors={**_FRAME, **_t5_tower("encoder", 1), **_t5_tower("decoder", 2)},
    head_tensors={"lm": {"lm_head.weight": "head.weight"}},
    carried=(
        r"shared\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
    start=Start("t5", 1.0),
    presets={
        "t5-small": _t5(512, 6, 8, 2048), "t5-base": _t5(768, 12, 12, 3072),
        "t5-v1.1-small": _t5(512, 8, 6, 1024) | {
            "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "head.tied": False,
        },
    },
)  # fmt: skip


def _mt5(dim: int, layers: int, heads: int, ffn: int) -> Data:
    return _t5(dim, layers, heads, ffn) | {"vocab_size": 250112, "head.tied": False}


# It never scales. Its folders say that nothing is tied; whether there are two tables the tensors tell.
MT5 = replace(
    T5, name="mt5", heads={"MT5ForConditionalGeneration": LM(), "MT5Model": None},
    config={key: rule for key, rule in T5.config.items() if key != "scale_decoder_outputs"} | dict(
        feed_forward_proj=_t5_ffn("gated-gelu"),
    ),
    presets={"mt5-small": _mt5(512, 8, 6, 1024), "mt5-base": _mt5(768, 12, 12, 2048)},
)  # fmt: skip
# It has a bias for each layer, and scales where its folder does not say that nothing is tied. (Newer transformers take
# what such a folder says for the other, whether there are two tables or not, and so make its logits smaller.)
_UMT5_BIAS = "{tower}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"
UMT5 = replace(
    MT5, name="umt5", heads={"UMT5ForConditionalGeneration": LM(), "UMT5Model": None},
    blank=EncoderDecoderConfig(
        Tokens(1), replace(_T5_ENCODER, relative_shared=False), Tokens(1),
        replace(_T5_DECODER, relative_shared=False),
    ),
    config=MT5.config | dict(tie_word_embeddings=Key("head.scaled", True, quiet=True)),
    tensors={name: row for name, row in T5.tensors.items() if "relative_attention" not in name} | {
        _UMT5_BIAS.replace("{tower}", tower): tower + ".relative.{i}.weight" for tower in ("encoder", "decoder")
    },
    presets={"umt5-small": _mt5(512, 8, 6, 1024) | {"vocab_size": 256384, "tie_word_embeddings": False}},
)  # fmt: skip

# --- BART and Marian ----------------------------------------------------------------------------------------------

_BART_ENCODER = replace(POST_NORM, ffn=MLP(1, "gelu", dropout=0.0))
_BART_DECODER = replace(_BART_ENCODER, cross=BIASED_ATTENTION, causal=True)
_BART_HEAD = LM(bias=True, trained=False)


def _bart(words: Tokens) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(words, _BART_ENCODER, words, _BART_DECODER, _BART_HEAD, max_len=1)


_BART_KEYS: Keys = dict(
    d_model=Key("{encoder,decoder}.dim"), encoder_layers=Key("encoder.layers"),
    decoder_layers=Key("decoder.layers"), encoder_attention_heads=Key("encoder.attention.heads"),
    decoder_attention_heads=Key("decoder.{attention,cross}.heads"),
    encoder_ffn_dim=Key("encoder.ffn.ffn_dim"), decoder_ffn_dim=Key("decoder.ffn.ffn_dim"),
    max_position_embeddings=Key("max_len {source,target}.position.max_len"),
    activation_function=Key("{encoder,decoder}.ffn.activation", "gelu", ACTIVATIONS),
    activation_dropout=Key("{encoder,decoder}.ffn.dropout", 0.0),
    dropout=Key("{encoder,decoder,source,target}.dropout", 0.1),
    attention_dropout=Key("{encoder.attention,decoder.attention,decoder.cross}.dropout", 0.0),
    encoder_layerdrop=Key("encoder.layer_drop", 0.0), decoder_layerdrop=Key("decoder.layer_drop", 0.0),
    scale_embedding=Key("{source,target}.scaled", False), tie_word_embeddings=Key("head.tied", True),
    is_causal=rules.Fixed(True, null=False),
    **fixed(is_decoder=False, normalize_before=False, add_final_layer_norm=False),
)  # fmt: skip


def _bart_tower(tower: str, side: str) -> Weights:
    rows = {
        "self_attn.{q,k,v,out}_proj.*": "attention.w{q,k,v,o}.*",
        "encoder_attn.{q,k,v,out}_proj.*": "cross.w{q,k,v,o}.*",
        "{self_attn,encoder_attn,final}_layer_norm.*": "norm{1,2,3}.*", "fc{1,2}.*": "ffn.{up,down}.*",
    }  # fmt: skip
    return {
        **tensors.under(f"{tower}.layers.{{i}}.", f"{tower}.blocks.{{i}}.", rows),
        f"{tower}.embed_positions.weight": f"{side}.position.weight",
        f"{tower}.layernorm_embedding.*": f"{side}.norm.*", f"{tower}.layer_norm.*": f"{tower}.norm.*",
    }  # fmt: skip


def _bart_sizes(vocab: int, dim: int, layers: int, heads: int, ffn: int, context: int) -> Data:
    each = dict(layers=layers, attention_heads=heads, ffn_dim=ffn)
    towers = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in each.items()}
    return dict(vocab_size=vocab, d_model=dim, max_position_embeddings=context, **towers)


BART = Family(
    name="bart", base="model.", blank=_bart(Tokens(1, Learned(1, offset=2), norm=Norm())),
    heads={"BartForConditionalGeneration": _BART_HEAD, "BartModel": None},
    config=_BART_KEYS | dict(
        vocab_size=Key("{source,target}.vocab"),
        **fixed(normalize_embedding=True, static_position_embeddings=False),
    ),
    inert="""classifier_dropout classif_dropout add_bias_logits extra_pos_embeddings
    force_bos_token_to_be_generated""",
    aliases=dict(
        hidden_size="d_model", num_attention_heads="encoder_attention_heads",
        num_hidden_layers="encoder_layers",
    ),
    tensors={**_FRAME, **_bart_tower("encoder", "source"), **_bart_tower("decoder", "target")},
    head_tensors={"lm": {"lm_head.weight": "head.weight", "final_logits_bias": To("head.bias", tensors.ROW)}},
    apart=True, derived=(r"model\.(encoder|decoder)\.version",), carried=(r"model\.shared\.weight",),
    presets={
        "bart-base": _bart_sizes(50265, 768, 6, 12, 3072, 1024),
        "bart-large": _bart_sizes(50265, 1024, 12, 16, 4096, 1024),
    },
)  # fmt: skip


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
    BART, name="marian", blank=_bart(Tokens(1, Sinusoidal(1, layout="halves"))),
    heads={"MarianMTModel": _BART_HEAD, "MarianModel": None},
    config=dict(
        vocab_size=Key("source.vocab"), decoder_vocab_size=Key("target.vocab", lambda hf: hf["vocab_size"]),
        share_encoder_decoder_embeddings=Group(
            ("share_encoder_decoder_embeddings",), _read_shared, _write_shared,
        ),
        pad_token_id=Group(("pad_token_id", "decoder_start_token_id"), lambda *_: None, _write_padding),
        **_BART_KEYS, **fixed(normalize_embedding=False, static_position_embeddings=True),
    ),
    derived=(*BART.derived, r"model\.(encoder|decoder)\.embed_positions\.weight"),
    presets={
        "marian": _bart_sizes(58101, 512, 6, 8, 2048, 512) | dict(
            scale_embedding=True, activation_function="silu",
        ),
    },
)  # fmt: skip

# --- BART with norms before: mBART, PEGASUS, Blenderbot, M2M100 ---------------------------------------------------

_BEFORE: Data = dict(order="pre", final_norm=True)


def _pre_norm(words: Tokens, head: LM = _BART_HEAD) -> EncoderDecoderConfig:
    encoder, decoder = (replace(tower, **_BEFORE) for tower in (_BART_ENCODER, _BART_DECODER))
    return EncoderDecoderConfig(words, encoder, words, decoder, head, max_len=1)


_PRE_NORM_KEYS: Keys = BART.config | fixed(normalize_before=True, add_final_layer_norm=True)
MBART = replace(
    BART, name="mbart", blank=_pre_norm(Tokens(1, Learned(1, offset=2), norm=Norm())),
    heads={"MBartForConditionalGeneration": _BART_HEAD, "MBartModel": None}, config=_PRE_NORM_KEYS,
    presets={"mbart-large": _bart_sizes(250054, 1024, 12, 16, 4096, 1024) | dict(scale_embedding=True)},
)  # fmt: skip
PEGASUS = replace(
    BART, name="pegasus", blank=_pre_norm(Tokens(1, Sinusoidal(1, layout="halves"))),
    heads={"PegasusForConditionalGeneration": _BART_HEAD, "PegasusModel": None},
    config=_PRE_NORM_KEYS | fixed(normalize_embedding=False, static_position_embeddings=True),
    carried=(*BART.carried, r"model\.(encoder|decoder)\.embed_positions\.weight"),
    presets={
        "pegasus-large": _bart_sizes(96103, 1024, 16, 16, 4096, 1024) | dict(
            scale_embedding=True, activation_function="relu",
        ),
    },
)  # fmt: skip
BLENDERBOT = replace(
    BART, name="blenderbot", blank=_pre_norm(Tokens(1, Learned(1))),
    heads={"BlenderbotForConditionalGeneration": _BART_HEAD, "BlenderbotModel": None},
    config=_PRE_NORM_KEYS | fixed(
        normalize_embedding=False, extra_layer_norm=False, layernorm_variant="prelayernorm",
    ),
    inert=f"{BART.inert} do_blenderbot_90_layernorm",
    presets={
        "blenderbot-400m": _bart_sizes(8008, 1280, 2, 32, 5120, 128) | dict(
            decoder_layers=12, scale_embedding=True,
        ),
    },
)  # fmt: skip


def _read_start(theirs: Data, ours: Data) -> None:
    """Places count from the padding id + 1, and padding has none."""
    pad = theirs.get("pad_token_id")
    pad = 1 if pad is None else pad
    for side in ("source", "target"):
        ours[side]["position"].update(offset=pad + 1, skip=pad)


def _write_start(ours: Data, theirs: Data) -> None:
    theirs["pad_token_id"] = rules.need(ours, "target.position.skip")


M2M_100 = replace(
    BART, name="m2m_100",
    blank=_pre_norm(Tokens(1, Sinusoidal(1, layout="fairseq", offset=2, skip=1), scaled=True), LM()),
    heads={"M2M100ForConditionalGeneration": LM(), "M2M100Model": None},
    config=_PRE_NORM_KEYS | dict(
        encoder_layerdrop=Key("encoder.layer_drop", 0.05), decoder_layerdrop=Key("decoder.layer_drop", 0.05),
        activation_function=Key("{encoder,decoder}.ffn.activation", "relu", ACTIVATIONS),
        attention_dropout=Key("{encoder.attention,decoder.attention,decoder.cross}.dropout", 0.1),
        scale_embedding=Key("{source,target}.scaled", True),
        pad_token_id=Group(("pad_token_id",), _read_start, _write_start),
        **fixed(normalize_embedding=False, static_position_embeddings=True),
    ),
    derived=(*BART.derived, r"model\.(encoder|decoder)\.embed_positions\.weights?"),
    presets={
        "m2m100-418m": _bart_sizes(128112, 1024, 12, 16, 4096, 1024),
        "nllb-200-600m": _bart_sizes(256206, 1024, 12, 16, 4096, 1024),
    },
)  # fmt: skip
