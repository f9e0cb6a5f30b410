"""Encoders with rotary positions: ESM, NomicBERT, EuroBERT."""

from __future__ import annotations

from dataclasses import replace

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import BIASED, POST_NORM, SHAPE_KEYS, llama_like, sizes
from regard.checkpoint.families.encoders import (
    AS_ELSEWHERE,
    BERT,
    BERT_KEYS,
    LABEL_TENSORS,
    mlm_tensors,
)
from regard.checkpoint.rules import ACTIVATIONS, Data, Group, Key, fixed
from regard.checkpoint.tensors import To
from regard.layers import MLM, MLP, Classify, Norm, Tag
from regard.models import Tokens, TransformerConfig
from regard.position import Learned, Rope

# --- ESM ----------------------------------------------------------------------------------------------------------


def _read_esm_places(theirs: Data, ours: Data) -> None:
    """Rotary, or a table whose rows count from the padding id + 1."""
    kind = theirs.get("position_embedding_type")
    pad, size = theirs.get("pad_token_id"), theirs.get("max_position_embeddings")
    size, pad = 1026 if size is None else size, 1 if pad is None else pad
    if kind not in (None, "absolute", "rotary"):
        raise rules.wrong(f"position_embedding_type is {kind!r}; known: absolute, rotary")
    if kind == "rotary":
        base = theirs.get("rope_theta")
        ours["embedding"]["position"] = None
        ours["tower"]["attention"]["rope"]["base"] = 10000.0 if base is None else base
    else:
        size -= pad + 1
        ours["embedding"]["position"].update(max_len=size, offset=pad + 1, skip=pad)
        ours["tower"]["attention"]["rope"] = None
    ours["max_len"] = size


def _write_esm_places(ours: Data, theirs: Data) -> None:
    place, rope = rules.need(ours, "embedding.position"), rules.need(ours, "tower.attention.rope")
    theirs["position_embedding_type"] = "rotary" if place is None else "absolute"
    if rope is not None and (theirs.get("rope_theta") or 10000.0) != rope["base"]:
        theirs["rope_theta"] = rope["base"]
    if place is None:
        theirs["max_position_embeddings"] = ours["max_len"]
        # transformers counts positions from it even where they turn, and has no default for it.
        theirs.setdefault("pad_token_id", 1)
    else:
        theirs["pad_token_id"] = rules.need(place, "skip")
        theirs["max_position_embeddings"] = place["max_len"] + place["offset"]


def _read_esm_words(theirs: Data, ours: Data) -> None:
    if not theirs.get("emb_layer_norm_before"):
        ours["embedding"]["norm"] = None
    if theirs.get("token_dropout"):
        mask = theirs.get("mask_token_id")
        if type(mask) is not int or mask < 0:
            raise rules.wrong(f"mask_token_id is {mask!r}; token_dropout needs the id of a token")
        ours["embedding"]["dropped_id"] = mask


def _write_esm_words(ours: Data, theirs: Data) -> None:
    norm, dropped_id = (rules.need(ours, f"embedding.{name}") for name in ("norm", "dropped_id"))
    for key, on in (
        ("emb_layer_norm_before", norm is not None),
        ("token_dropout", dropped_id is not None),
    ):
        if bool(theirs.get(key)) != on:
            theirs[key] = on
    if dropped_id is not None:
        theirs["mask_token_id"] = dropped_id


_ESM2: Data = dict(
    position_embedding_type="rotary", token_dropout=True, mask_token_id=32, pad_token_id=1
)
_ESM2 |= dict(layer_norm_eps=1e-5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
ESM = replace(
    BERT, name="esm", base="esm.",
    blank=TransformerConfig(
        Tokens(1, Learned(1, 2, 1), norm=Norm()),
        Tower(
            1, 1, GQA(1, rope=Rope(wide=True), bias=True, out_bias=True), MLP(1, "gelu"), causal=False,
        ),
        max_len=1,
    ),
    heads={
        "EsmForMaskedLM": MLM(), "EsmModel": None,
        "EsmForSequenceClassification": Classify(2, "tanh", dropped_twice=True),
        "EsmForTokenClassification": Tag(2),
    },
    config=SHAPE_KEYS | dict(
        vocab_size=Key("embedding.vocab"),
        layer_norm_eps=Key("tower.norm.eps embedding.norm.eps head.norm_eps", 1e-12),
        # Embeddings have none.
        hidden_dropout_prob=Key("tower.dropout", 0.1),
        attention_probs_dropout_prob=Key("tower.attention.dropout", 0.1),
        classifier_dropout=rules.head_dropout(**AS_ELSEWHERE), id2label=rules.LABELS,
        tie_word_embeddings=Key("head.tied", True),
        max_position_embeddings=Group(
            ("max_position_embeddings", "position_embedding_type", "rope_theta", "pad_token_id"),
            _read_esm_places, _write_esm_places,
        ),
        token_dropout=Group(
            ("token_dropout", "mask_token_id", "emb_layer_norm_before"), _read_esm_words, _write_esm_words,
            last=True,
        ),
        **fixed(is_decoder=False, add_cross_attention=False, is_folding_model=False),
    ),
    inert="esmfold_config vocab_list",
    tensors={
        "embeddings.{word,position}_embeddings.weight": "embedding.{weight,position.weight}",
        "embeddings.layer_norm.*": "embedding.norm.*", "pooler.dense.*": "pooler.*",
        "encoder.emb_layer_norm_after.*": "tower.norm.*",
        "encoder.layer.{i}.": {
            "attention.self.{query,key,value}.*": "attention.w{q,k,v}.*",
            "attention.{output.dense,LayerNorm}.*": "{attention.wo,norm1}.*",
            "intermediate.dense.*": "ffn.up.*", "{output.dense,LayerNorm}.*": "{ffn.down,norm3}.*",
        },
    },
    head_tensors={
        "mlm": {
            "lm_head.{dense,layer_norm}.*": "head.{dense,norm}.*", "lm_head.decoder.weight": "head.weight",
            "lm_head.bias": "head.bias",
        },
        "classify": {"classifier.{dense,out_proj}.*": "head.{dense,out}.*"},
        "tag": LABEL_TENSORS["tag"],
    },
    carried=(
        r"esm\.pooler\..*", r"esm\.contact_head\..*", r"esm\.(encoder.*\.)?rotary_embeddings\.inv_freq",
    ),
    derived=BERT.derived,
    presets={
        "esm2-8m": sizes(33, 320, 6, 20, 1280, 1026, **_ESM2),
        "esm2-650m": sizes(33, 1280, 33, 20, 5120, 1026, **_ESM2),
    },
)  # fmt: skip

# --- NomicBERT and EuroBERT ---------------------------------------------------------------------------------------


def _as_blocks(theirs: Data) -> float:
    """The dropout of the blocks."""
    return theirs.get("hidden_dropout_prob") or 0.0


_DEEP_TANH = {"nomic_bert.pooler.dense.*": "head.dense.*", "classifier.*": "head.out.*"}
NOMIC_BERT = replace(
    BERT, name="nomic_bert", base="nomic_bert.",
    blank=TransformerConfig(
        Tokens(1, types=2, norm=Norm()),
        replace(POST_NORM, attention=GQA(1, rope=Rope(1000.0)), ffn=MLP(1, "silu", gated=True, bias=False)),
        max_len=1,
    ),
    heads={
        "NomicBertForMaskedLM": MLM(), "NomicBertModel": None,
        "NomicBertForSequenceClassification": Classify(2, "tanh"), "NomicBertForTokenClassification": Tag(2),
    },
    config=BERT_KEYS | dict(
        max_position_embeddings=Key("max_len", 2048), rope_parameters=rules.ROPE,
        head_dim=Key("tower.attention.head_dim", lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
        hidden_act=Key("tower.ffn.activation head.activation", "silu", ACTIVATIONS),
        hidden_dropout_prob=Key("tower.dropout embedding.dropout", 0.0),
        attention_probs_dropout_prob=Key("tower.attention.dropout", 0.0),
        classifier_dropout=rules.head_dropout(
            **dict.fromkeys(("classify", "tag"), ("classifier_dropout", _as_blocks)),
        ),
        tie_word_embeddings=Key("head.tied", True, quiet=True),
        # Words of the code that came with its first folders.
        **fixed(
            activation_function="swiglu", prenorm=False, parallel_block=False, causal=False, use_rms_norm=False,
            qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, rotary_emb_fraction=1.0,
            rotary_emb_interleaved=False, rotary_scaling_factor=None, rotary_emb_scale_base=None,
        ),
    ),
    aliases=dict(
        n_embd="hidden_size", n_head="num_attention_heads", n_inner="intermediate_size",
        n_layer="num_hidden_layers", n_positions="max_position_embeddings", rotary_emb_base="rope_theta",
        layer_norm_epsilon="layer_norm_eps", resid_pdrop="hidden_dropout_prob",
        attn_pdrop="attention_probs_dropout_prob",
    ),
    tensors={
        "embeddings.word_embeddings.weight": "embedding.weight",
        "embeddings.token_type_embeddings.weight": "embedding.types", "emb_ln.*": "embedding.norm.*",
        "pooler.dense.*": "pooler.*",
        "encoder.layers.{i}.": {
            "attn.Wqkv.*": To("attention.w{q,k,v}.*", tensors.JOINED), "attn.out_proj.*": "attention.wo.*",
            "norm{1,2}.*": "norm{1,3}.*", "mlp.{fc11,fc12,fc2}.*": "ffn.{up,gate,down}.*",
        },
    },
    head_tensors={
        "mlm": mlm_tensors("cls.predictions.", "transform.{dense,layer_norm}"), "classify": _DEEP_TANH,
        "tag": LABEL_TENSORS["tag"],
    },
    modules={
        "encoder.layers": "layers", "attn.Wqkv": "self_attn.{q,k,v}_proj", "attn.out_proj": "self_attn.o_proj",
        "mlp.fc11": "mlp.up_proj", "mlp.fc12": "mlp.gate_proj", "mlp.fc2": "mlp.down_proj",
    },
    derived=(r".*inv_freq", *BERT.derived), carried=(r"nomic_bert\.pooler\..*", r"cls\.predictions\.bias"),
    presets={"nomic-bert": sizes(30528, 768, 12, 12, 3072, 2048)},
)  # fmt: skip
_DENSE_LABELS = {"dense.*": "head.dense.*", "classifier.*": "head.out.*"}
EUROBERT = replace(
    llama_like(
        "eurobert",
        {
            "EuroBertForMaskedLM": MLM(False, transformed=False), "EuroBertModel": None,
            "EuroBertForSequenceClassification": Classify(2, "gelu", "each"), "EuroBertForTokenClassification": Tag(2),
        },
        tower=dict(causal=False),
        keys=dict(
            rms_norm_eps=Key("tower.norm.eps", 1e-5), attention_bias=BIASED,
            mlp_bias=Key("tower.ffn.bias head.vocab_bias", False),
            classifier_pooling=Key("head.token", "late", {"bos": "first", "mean": "mean", "late": "each"}),
            classifier_dropout=None, token_classification_bias=None, **fixed(is_causal=False),
            pad_token_id=rules.ids_below(128001, "pad_token_id", "eos_token_id", "bos_token_id"),
        ),
        aliases=dict(clf_pooling="classifier_pooling"),
        presets={
            "eurobert-210m": sizes(
                128256, 768, 12, 12, 3072, 8192, rope_parameters=dict(rope_type="default", rope_theta=250000.0),
            ),
        },
    ),
    head_tensors={
        "mlm": {"lm_head.*": "head.*"}, "classify": _DENSE_LABELS, "tag": LABEL_TENSORS["tag"],
    },
)  # fmt: skip
