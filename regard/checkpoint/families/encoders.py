"""Families with an encoder as data: BERT and its kin, ALBERT, ModernBERT, ViT and DeiT, each with its heads; and with a
decoder too: T5 (v1.0 and v1.1), BART, Marian."""

from __future__ import annotations

from dataclasses import replace

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint import rules
from regard.checkpoint.families.decoders import BIASED, sizes
from regard.checkpoint.rules import ACTIVATIONS, Data, Family, Group, Key, Keys, To, Weights, fixed
from regard.layers import LM, MLM, MLP, Answer, Classify, Norm, Tag
from regard.models import EncoderDecoderConfig, Patches, Tokens, TransformerConfig
from regard.models.start import Start
from regard.position import Learned, Rope, Sinusoidal, T5Bias

_BIASED = GQA(1, bias=True, out_bias=True)
POST_NORM = Tower(1, 1, _BIASED, MLP(1, "gelu"), order="post", final_norm=False, causal=False)
LABEL_TENSORS = {"tag": {"classifier.*": "head.out.*"}, "answer": {"qa_outputs.*": "head.out.*"}}


def encoder_heads(name: str, dense: str, twice: bool = False) -> Data:
    """Their classes; `dense`: the activation before a label of the whole, `twice`: dropout before and after it."""
    return {
        f"{name}ForMaskedLM": MLM(), f"{name}Model": None,
        f"{name}ForSequenceClassification": Classify(2, dense, dropped_twice=twice),
        f"{name}ForTokenClassification": Tag(2), f"{name}ForQuestionAnswering": Answer(),
    }  # fmt: skip


# --- BERT and its kin ---------------------------------------------------------------------------------------------

# Width, depth, heads and feed-forward, as nearly all call them.
_SHAPE_KEYS: Keys = dict(
    hidden_size=Key("tower.dim"), num_hidden_layers=Key("tower.layers"),
    num_attention_heads=Key("tower.attention.heads"), intermediate_size=Key("tower.ffn.ffn_dim"),
)  # fmt: skip
BERT_KEYS: Keys = _SHAPE_KEYS | dict(
    vocab_size=Key("embedding.vocab"), type_vocab_size=Key("embedding.types", 2),
    layer_norm_eps=Key("tower.norm.eps embedding.norm.eps head.norm_eps", 1e-12),
    hidden_dropout_prob=Key("tower.dropout embedding.dropout", 0.1),
    attention_probs_dropout_prob=Key("tower.attention.dropout", 0.1),
    classifier_dropout=rules.head_dropout(
        **dict.fromkeys(("classify", "tag"), ("classifier_dropout", "hidden_dropout_prob")),
    ),
    tie_word_embeddings=Key("head.tied", True),
    **fixed(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False),
    id2label=rules.LABELS, max_position_embeddings=Key("max_len embedding.position.max_len"),
    hidden_act=Key("tower.ffn.activation head.activation", "gelu", ACTIVATIONS),
)  # fmt: skip


EMBEDDING_TENSORS = {
    "embeddings.{word,position}_embeddings.weight": "embedding.{weight,position.weight}",
    "embeddings.token_type_embeddings.weight": "embedding.types", "embeddings.LayerNorm.*": "embedding.norm.*",
}  # fmt: skip
_BERT_TENSORS = {
    **EMBEDDING_TENSORS, "pooler.dense.*": "pooler.*",
    "encoder.layer.{i}.": {
        "attention.self.{query,key,value}.*": "attention.w{q,k,v}.*",
        "attention.output.{dense,LayerNorm}.*": "{attention.wo,norm1}.*",
        "intermediate.dense.*": "ffn.up.*", "output.{dense,LayerNorm}.*": "{ffn.down,norm3}.*",
    },
}  # fmt: skip


def _mlm_tensors(base: str, before: str) -> Weights:
    """`before`: their dense layer and norm. The bias has two names, and one where the matrix is the embedding."""
    return {
        f"{base}{before}.*": "head.{dense,norm}.*", f"{base}decoder.weight": "head.weight",
        f"{base}bias": To("head.bias", unless="head.weight"),
        f"{base}decoder.bias": To("head.bias", needs="head.weight"),
    }  # fmt: skip


BERT = Family(
    name="bert", base="bert.",
    blank=TransformerConfig(Tokens(1, Learned(1), types=2, norm=Norm()), POST_NORM, max_len=1),
    heads={**encoder_heads("Bert", "tanh"), "BertForPreTraining": MLM()}, config=BERT_KEYS,
    tensors=_BERT_TENSORS,
    head_tensors={
        **LABEL_TENSORS, "mlm": _mlm_tensors("cls.predictions.", "transform.{dense,LayerNorm}"),
        "classify": {"bert.pooler.dense.*": "head.dense.*", "classifier.*": "head.out.*"},
    },
    derived=(r".*embeddings\.position_ids",),
    carried=(r"bert\.pooler\..*", r"cls\.seq_relationship\..*", r"cls\.predictions\.bias"),
    presets={
        "bert-base": sizes(30522, 768, 12, 12, 3072, 512),
        "bert-large": sizes(30522, 1024, 24, 16, 4096, 512),
    },
)  # fmt: skip


def _read_positions(theirs: Data, ours: Data) -> None:
    """Rows of the table count from the padding id + 1; the table's size includes those before."""
    pad = theirs.get("pad_token_id")
    pad = 1 if pad is None else pad
    size = theirs.get("max_position_embeddings", 512)
    ours["embedding"]["position"].update(max_len=size - pad - 1, offset=pad + 1, skip=pad)
    ours["max_len"] = size - pad - 1


def _write_positions(ours: Data, theirs: Data) -> None:
    skip, size, offset = (
        rules.need(ours, f"embedding.position.{name}") for name in ("skip", "max_len", "offset")
    )
    theirs["pad_token_id"], theirs["max_position_embeddings"] = skip, size + offset


ROBERTA = replace(
    BERT, name="roberta", base="roberta.",
    blank=TransformerConfig(Tokens(1, Learned(1, 2, 1), types=2, norm=Norm()), POST_NORM, max_len=1),
    heads=encoder_heads("Roberta", "tanh", twice=True),
    config=BERT_KEYS | dict(
        max_position_embeddings=Group(
            ("max_position_embeddings", "pad_token_id"), _read_positions, _write_positions,
        ),
        hidden_act=Key("tower.ffn.activation", "gelu", ACTIVATIONS),
    ),
    head_tensors={
        **LABEL_TENSORS, "mlm": _mlm_tensors("lm_head.", "{dense,layer_norm}"),
        "classify": {"classifier.{dense,out_proj}.*": "head.{dense,out}.*"},
    },
    carried=(r"roberta\.pooler\..*", r"lm_head\.bias"),
    presets={"roberta-base": sizes(50265, 768, 12, 12, 3072, 514, type_vocab_size=1, layer_norm_eps=1e-5)},
)  # fmt: skip
XLM_ROBERTA = replace(
    ROBERTA, name="xlm-roberta", heads=encoder_heads("XLMRoberta", "tanh", twice=True)
)
DISTILBERT = Family(
    name="distilbert", base="distilbert.",
    blank=TransformerConfig(
        Tokens(1, Learned(1), norm=Norm(1e-12)),
        replace(POST_NORM, norm=Norm(1e-12), attention_dropped=False), max_len=1,
    ),
    heads=encoder_heads("DistilBert", "relu"),
    config=dict(
        vocab_size=Key("embedding.vocab"), dim=Key("tower.dim"), n_layers=Key("tower.layers"),
        n_heads=Key("tower.attention.heads"), hidden_dim=Key("tower.ffn.ffn_dim"),
        max_position_embeddings=Key("max_len embedding.position.max_len"),
        activation=Key("tower.ffn.activation head.activation", "gelu", ACTIVATIONS),
        dropout=Key("tower.dropout embedding.dropout", 0.1),
        attention_dropout=Key("tower.attention.dropout", 0.1),
        seq_classif_dropout=rules.head_dropout(
            classify=("seq_classif_dropout", 0.2), tag=("dropout", 0.1), answer=("qa_dropout", 0.1),
        ),
        tie_word_embeddings=Key("head.tied", True), id2label=rules.LABELS,
    ),
    inert="tie_weights_",
    aliases=dict(hidden_size="dim", num_attention_heads="n_heads", num_hidden_layers="n_layers"),
    tensors={
        **EMBEDDING_TENSORS,
        "transformer.layer.{i}.": {
            "attention.{q,k,v,out}_lin.*": "attention.w{q,k,v,o}.*",
            "{sa,output}_layer_norm.*": "norm{1,3}.*", "ffn.lin{1,2}.*": "ffn.{up,down}.*",
        },
    },
    head_tensors={
        **LABEL_TENSORS, "mlm": {"vocab_{transform,layer_norm,projector}.*": "{head.dense,head.norm,head}.*"},
        "classify": {"pre_classifier.*": "head.dense.*", "classifier.*": "head.out.*"},
    },
    derived=BERT.derived,
    presets={
        "distilbert-base": dict(
            vocab_size=30522, dim=768, n_layers=6, n_heads=12, hidden_dim=3072, max_position_embeddings=512,
        ),
    },
)  # fmt: skip


def _read_groups(theirs: Data, ours: Data) -> None:
    tower, groups = ours["tower"], theirs.get("num_hidden_groups", 1)
    n = tower["layers"]
    tower["blocks"] = None if groups == n else [int(i / (n / groups)) for i in range(n)]


def _write_groups(ours: Data, theirs: Data) -> None:
    blocks, n = ours["tower"]["blocks"], ours["tower"]["layers"]
    groups = n if blocks is None else len(set(blocks))
    if groups != theirs.get("num_hidden_groups", 1):
        theirs["num_hidden_groups"] = groups


ALBERT = replace(
    BERT, name="albert", base="albert.",
    blank=TransformerConfig(
        Tokens(1, Learned(1), types=2, norm=Norm(), width=1),
        replace(POST_NORM, blocks=(0,), ffn_dropped=False), max_len=1,
    ),
    heads=encoder_heads("Albert", "tanh"),
    config=BERT_KEYS | dict(
        embedding_size=Key("embedding.width", 128),
        num_hidden_groups=Group(("num_hidden_groups",), _read_groups, _write_groups, last=True),
        **fixed(inner_group_num=1),
        hidden_act=Key("tower.ffn.activation head.activation", "gelu_new", ACTIVATIONS),
        hidden_dropout_prob=Key("tower.dropout embedding.dropout", 0.0),
        attention_probs_dropout_prob=Key("tower.attention.dropout", 0.0),
        classifier_dropout=rules.head_dropout(
            classify=("classifier_dropout_prob", 0.1), tag=("classifier_dropout_prob", "hidden_dropout_prob"),
        ),
    ),
    inert="net_structure_type gap_size num_memory_blocks down_scale_factor layers_to_keep",
    tensors={
        **EMBEDDING_TENSORS, "encoder.embedding_hidden_mapping_in.*": "embedding.project.*",
        "pooler.*": "pooler.*",
        "encoder.albert_layer_groups.{i}.albert_layers.0.": {
            "attention.{query,key,value,dense}.*": "attention.w{q,k,v,o}.*",
            "{attention.LayerNorm,full_layer_layer_norm}.*": "norm{1,3}.*",
            "{ffn,ffn_output}.*": "ffn.{up,down}.*",
        },
    },
    head_tensors={
        **LABEL_TENSORS, "mlm": _mlm_tensors("predictions.", "{dense,LayerNorm}"),
        "classify": {"albert.pooler.*": "head.dense.*", "classifier.*": "head.out.*"},
    },
    carried=(r"albert\.pooler\..*", r"sop_classifier\..*", r"predictions\.bias"),
    presets={"albert-base": sizes(30000, 768, 12, 12, 3072, 512)},
)  # fmt: skip
_LOCAL = GQA(1, rope=Rope(wide=True), window=1)
_NORM = Norm(biased=False)
MODERNBERT = Family(
    name="modernbert", base="model.",
    blank=TransformerConfig(
        Tokens(1, norm=_NORM),
        Tower(
            1, 2, (replace(_LOCAL, rope=Rope(160000.0, wide=True), window=None), _LOCAL),
            MLP(1, "gelu", gated=True, bias=False, dropout=0.0), norm=_NORM, causal=False, first_norm=False,
            ffn_dropped=False,
        ),
        max_len=1,
    ),
    heads={
        "ModernBertForMaskedLM": MLM(), "ModernBertModel": None,
        "ModernBertForSequenceClassification": Classify(2, "gelu", norm=_NORM),
    },
    config=_SHAPE_KEYS | dict(
        vocab_size=Key("embedding.vocab"), max_position_embeddings=Key("max_len"),
        hidden_activation=Key("tower.ffn.activation", "gelu", ACTIVATIONS),
        norm_eps=Key("{tower,embedding,head}.norm.eps head.norm_eps", 1e-5),
        norm_bias=Key("{tower,embedding,head}.norm.biased head.norm_bias", False), attention_bias=BIASED,
        mlp_bias=Key("tower.ffn.bias", False),
        attention_dropout=Key("tower.attention.dropout tower.dropout", 0.0),
        embedding_dropout=Key("embedding.dropout", 0.0), mlp_dropout=Key("tower.ffn.dropout", 0.0),
        rope_parameters=rules.ropes_by_layer(
            ("global_rope_theta", 160000.0), ("local_rope_theta", 1e4), "full_attention sliding_attention",
        ),
        layer_types=rules.sliding_layers(
            lambda hf, i: i % hf.get("global_attn_every_n_layers", 3) > 0, 128,
            more="global_attn_every_n_layers", key="local_attention", both_ways=True,
        ),
        tie_word_embeddings=Key("head.tied", True), decoder_bias=Key("head.vocab_bias", True),
        classifier_bias=Key("head.dense_bias", False),
        classifier_activation=Key("head.activation head.dense", "gelu", ACTIVATIONS),
        classifier_pooling=Key("head.token", "cls", {"cls": "first", "mean": "mean"}),
        classifier_dropout=rules.head_dropout(classify=("classifier_dropout", 0.0)), id2label=rules.LABELS,
        pad_token_id=rules.ids_below(50283, "pad_token_id", "eos_token_id", "bos_token_id"),
    ),
    inert="""initializer_cutoff_factor deterministic_flash_attn sparse_prediction sparse_pred_ignore_index
    reference_compile repad_logits_with_grad""",
    tensors={
        "embeddings.tok_embeddings.weight": "embedding.weight",
        "embeddings.norm.*": "embedding.norm.*", "final_norm.*": "tower.norm.*",
        "layers.{i}.": {
            "{attn,mlp}_norm.*": "norm{1,3}.*", "attn.Wqkv.*": To("attention.w{q,k,v}.*", rules.JOINED),
            "attn.Wo.*": "attention.wo.*", "mlp.Wi.*": To("ffn.{gate,up}.*", rules.JOINED),
            "mlp.Wo.*": "ffn.down.*",
        },
    },
    head_tensors={
        "mlm": {"head.{dense,norm}.*": "head.{dense,norm}.*", "decoder.*": "head.*"},
        "classify": {"head.{dense,norm}.*": "head.{dense,norm}.*", "classifier.*": "head.out.*"},
    },
    start=Start("modernbert"), presets={"modernbert-base": sizes(50368, 768, 22, 12, 1152, 8192)},
)  # fmt: skip

# --- images -------------------------------------------------------------------------------------------------------


_IMAGE_TENSORS: Weights = {
    "embeddings.cls_token": To("embedding.extra", rules.TOKENS),
    "embeddings.patch_embeddings.projection.*": "embedding.project.*",
    "embeddings.position_embeddings": To("embedding.position", rules.ROW),
    "layernorm.*": "tower.norm.*", "pooler.dense.*": "pooler.*",
    "encoder.layer.{i}.": {
        "attention.attention.{query,key,value}.*": "attention.w{q,k,v}.*",
        "attention.output.dense.*": "attention.wo.*", "layernorm_{before,after}.*": "norm{1,3}.*",
        "{intermediate,output}.dense.*": "ffn.{up,down}.*",
    },
}  # fmt: skip
_TWO_TOKENS = {
    "embeddings.cls_token embeddings.distillation_token": _IMAGE_TENSORS["embeddings.cls_token"]
}
_DEIT_TENSORS = _TWO_TOKENS | {
    n: to for n, to in _IMAGE_TENSORS.items() if n != "embeddings.cls_token"
}


def _image(dim: int, heads: int) -> Data:
    shape = dict(hidden_size=dim, num_hidden_layers=12, num_attention_heads=heads)
    return dict(**shape, intermediate_size=4 * dim, num_labels=1000)


_IMAGE_TOWER = Tower(1, 1, _BIASED, MLP(1, "gelu"), norm=Norm(1e-12), causal=False)
VIT = Family(
    name="vit", base="vit.", blank=TransformerConfig(Patches(16, 16, extra=1), _IMAGE_TOWER),
    heads={"ViTForImageClassification": Classify(2, None), "ViTModel": None},
    config=_SHAPE_KEYS | dict(
        hidden_act=Key("tower.ffn.activation", "gelu", ACTIVATIONS),
        layer_norm_eps=Key("tower.norm.eps", 1e-12), image_size=Key("embedding.size", 224),
        patch_size=Key("embedding.patch", 16), num_channels=Key("embedding.channels", 3),
        qkv_bias=Key("tower.attention.bias", True),
        hidden_dropout_prob=Key("tower.dropout embedding.dropout", 0.0),
        attention_probs_dropout_prob=Key("tower.attention.dropout", 0.0), **fixed(pooler_act="tanh"),
        id2label=rules.LABELS,
    ),
    inert="encoder_stride pooler_output_size", tensors=_IMAGE_TENSORS,
    head_tensors={
        "classify": {
            "classifier.*": To("head.out.*", unless="head.teacher.weight"),
            "cls_classifier.*": To("head.out.*", needs="head.teacher.weight"),
            "distillation_classifier.*": "head.teacher.*",
        },
    },
    carried=(r"vit\.pooler\..*",), presets={"vit-base": _image(768, 12), "vit-small": _image(384, 6)},
    modules={
        "encoder.layer.": "layers.",
        **{f"attention.attention.{n}": f"attention.{n[0]}_proj" for n in ("query", "key", "value")},
        "attention.output.dense": "attention.o_proj", "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    },
)  # fmt: skip
DEIT = replace(
    VIT, name="deit", base="deit.", blank=TransformerConfig(Patches(16, 16, extra=2), _IMAGE_TOWER),
    heads={
        "DeiTForImageClassification": Classify(2, None), "DeiTModel": None,
        "DeiTForImageClassificationWithTeacher": Classify(2, None, distilled=True),
    },
    tensors=_DEIT_TENSORS, carried=(r"deit\.pooler\..*",),
    presets={"deit-small": _image(384, 6)}, start=Start("deit"),
)  # fmt: skip

# --- an encoder and a decoder: T5 -------------------------------------------------------------------------------------


# One table for both sides, or one for each.
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
    ffn, gate = f"{last}.DenseReluDense.", "ffn.gate.weight"
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
        **rules.under(f"{tower}.block.{{i}}.layer.", f"{tower}.blocks.{{i}}.", rows),
        bias: f"{tower}.relative.weight", f"{tower}.final_layer_norm.weight": f"{tower}.norm.weight",
    }  # fmt: skip


# feed_forward_proj -> our activation, and whether it is gated; gated-gelu is the approximation.
_T5_GATED = {"gated-gelu": ("gelu_tanh", True)}
_T5_FFN = _T5_GATED | {name: (ours, False) for name, ours in ACTIVATIONS.items()}
_T5_FFN |= {f"gated-{name}": (ours, True) for name, ours in ACTIVATIONS.items()} | _T5_GATED


def _read_t5_ffn(theirs: Data, ours: Data) -> None:
    word = theirs.get("feed_forward_proj") or "relu"
    if word not in _T5_FFN:
        known = "relu, gated-gelu, gated-silu, ..."
        raise rules.wrong(f"feed_forward_proj is {word!r}; known: {known}")
    for tower in ("encoder", "decoder"):
        ours[tower]["ffn"] |= dict(zip(("activation", "gated"), _T5_FFN[word]))


def _write_t5_ffn(ours: Data, theirs: Data) -> None:
    ffn = tuple(rules.need(ours, f"encoder.ffn.{name}") for name in ("activation", "gated"))
    if _T5_FFN.get(theirs.get("feed_forward_proj", "")) != ffn:
        theirs["feed_forward_proj"] = next(word for word, of in _T5_FFN.items() if of == ffn)
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
        feed_forward_proj=Group(
            ("feed_forward_proj", "dense_act_fn", "is_gated_act"), _read_t5_ffn, _write_t5_ffn,
        ),
        scale_decoder_outputs=Group(
            ("scale_decoder_outputs", "tie_word_embeddings"),
            lambda theirs, ours: rules.put(ours, "head.scaled", _t5_scale_of(theirs)), _write_t5_scale,
        ),
        **fixed(is_decoder=False, is_causal=True),
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

# --- BART and Marian ----------------------------------------------------------------------------------------------

_BART_ENCODER = replace(POST_NORM, ffn=MLP(1, "gelu", dropout=0.0))
_BART_DECODER = replace(_BART_ENCODER, cross=_BIASED, causal=True)
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
    **fixed(is_decoder=False, is_causal=True, normalize_before=False, add_final_layer_norm=False),
)  # fmt: skip


def _bart_tower(tower: str, side: str) -> Weights:
    rows = {
        "self_attn.{q,k,v,out}_proj.*": "attention.w{q,k,v,o}.*",
        "encoder_attn.{q,k,v,out}_proj.*": "cross.w{q,k,v,o}.*",
        "{self_attn,encoder_attn,final}_layer_norm.*": "norm{1,2,3}.*", "fc{1,2}.*": "ffn.{up,down}.*",
    }  # fmt: skip
    return {
        **rules.under(f"{tower}.layers.{{i}}.", f"{tower}.blocks.{{i}}.", rows),
        f"{tower}.embed_positions.weight": f"{side}.position.weight",
        f"{tower}.layernorm_embedding.*": f"{side}.norm.*",
    }


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
    head_tensors={"lm": {"lm_head.weight": "head.weight", "final_logits_bias": To("head.bias", rules.ROW)}},
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
