"""Encoder-only families as data: BERT, RoBERTa, DistilBERT, ViT, DeiT, each with its heads."""

from __future__ import annotations

from dataclasses import replace

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint.families.keys import ACTIVATIONS, LABELS, head_dropout
from regard.checkpoint.rules import (
    ROW,
    TOKENS,
    Data,
    Family,
    Fixed,
    Group,
    Key,
    Keys,
    To,
    Weights,
    block,
    need,
    under,
)
from regard.layers import MLM, MLP, Answer, Classify, Norm, Tag
from regard.models import Patches, Tokens, TransformerConfig
from regard.models.start import Start
from regard.position import Learned

_BIASED = GQA(1, bias=True, out_bias=True)
POST_NORM = Tower(1, 1, _BIASED, MLP(1, "gelu"), order="post", final_norm=False, causal=False)
LABEL_TENSORS = {"tag": {"classifier.*": "head.out.*"}, "answer": {"qa_outputs.*": "head.out.*"}}


def encoder_heads(name: str, dense: str, twice: bool = False) -> Data:
    """Their classes; `dense`: the activation before a label of the whole, `twice`: dropout before and after it."""
    return {
        f"{name}ForMaskedLM": MLM(),
        f"{name}Model": None,
        f"{name}ForSequenceClassification": Classify(2, dense, dropped_twice=twice),
        f"{name}ForTokenClassification": Tag(2),
        f"{name}ForQuestionAnswering": Answer(),
    }


# --- BERT and its kin ---------------------------------------------------------------------------------------------

BERT_KEYS: Keys = dict(
    vocab_size=Key("embedding.vocab"),
    hidden_size=Key("tower.dim"),
    num_hidden_layers=Key("tower.layers"),
    num_attention_heads=Key("tower.attention.heads"),
    intermediate_size=Key("tower.ffn.ffn_dim"),
    type_vocab_size=Key("embedding.types", 2),
    layer_norm_eps=Key("tower.norm.eps embedding.norm.eps head.norm_eps", 1e-12),
    hidden_dropout_prob=Key("tower.dropout embedding.dropout", 0.1),
    attention_probs_dropout_prob=Key("tower.attention.dropout", 0.1),
    classifier_dropout=head_dropout(
        classify=("classifier_dropout", "hidden_dropout_prob"),
        tag=("classifier_dropout", "hidden_dropout_prob"),
    ),
    tie_word_embeddings=Key("head.tied", True),
    position_embedding_type=Fixed("absolute"),
    is_decoder=Fixed(False),
    add_cross_attention=Fixed(False),
    id2label=LABELS,
    max_position_embeddings=Key("max_len embedding.position.max_len"),
    hidden_act=Key("tower.ffn.activation head.activation", "gelu", ACTIVATIONS),
)


EMBEDDING_TENSORS = {
    "word_embeddings.weight": "weight",
    "position_embeddings.weight": "position.weight",
    "token_type_embeddings.weight": "types",
    "LayerNorm.*": "norm.*",
}


def _bert_tensors(base: str) -> Weights:
    return {
        **under(base + "embeddings.", "embedding.", EMBEDDING_TENSORS),
        base + "pooler.dense.*": "pooler.*",
        **block(
            base + "encoder.layer.{i}.",
            {
                "attention.self.query.*": "attention.wq.*",
                "attention.self.key.*": "attention.wk.*",
                "attention.self.value.*": "attention.wv.*",
                "attention.output.dense.*": "attention.wo.*",
                "attention.output.LayerNorm.*": "norm1.*",
                "intermediate.dense.*": "ffn.up.*",
                "output.dense.*": "ffn.down.*",
                "output.LayerNorm.*": "norm3.*",
            },
        ),
    }


BERT = Family(
    name="bert",
    base="bert.",
    blank=TransformerConfig(Tokens(1, Learned(1), types=2, norm=Norm()), POST_NORM, max_len=1),
    heads={**encoder_heads("Bert", "tanh"), "BertForPreTraining": MLM()},
    config=BERT_KEYS,
    tensors=_bert_tensors("bert."),
    head_tensors={
        **LABEL_TENSORS,
        "mlm": {
            "cls.predictions.transform.dense.*": "head.dense.*",
            "cls.predictions.transform.LayerNorm.*": "head.norm.*",
            "cls.predictions.decoder.weight": "head.weight",
            "cls.predictions.bias": To("head.bias", unless="head.weight"),
            "cls.predictions.decoder.bias": To("head.bias", needs="head.weight"),
        },
        "classify": {"bert.pooler.dense.*": "head.dense.*", "classifier.*": "head.out.*"},
    },
    pooler="bert.pooler.dense.weight",
    twins=(
        (
            "cls.predictions.decoder.weight",
            ("bert.embeddings.word_embeddings.weight",),
            "head.tied",
        ),
        ("cls.predictions.decoder.bias", ("cls.predictions.bias",), ""),
    ),
    derived=(r".*embeddings\.position_ids",),
    carried=(r"bert\.pooler\..*", r"cls\.seq_relationship\..*", r"cls\.predictions\.bias"),
)


def _read_positions(theirs: Data, ours: Data) -> None:
    """Rows of the table count from the padding id + 1; the table's size includes those before."""
    pad = theirs.get("pad_token_id")
    pad = 1 if pad is None else pad
    size = theirs.get("max_position_embeddings", 512)
    ours["embedding"]["position"].update(max_len=size - pad - 1, offset=pad + 1, skip=pad)
    ours["max_len"] = size - pad - 1


def _write_positions(ours: Data, theirs: Data) -> None:
    skip, size, offset = (
        need(ours, f"embedding.position.{name}") for name in ("skip", "max_len", "offset")
    )
    theirs["pad_token_id"], theirs["max_position_embeddings"] = skip, size + offset


ROBERTA = replace(
    BERT,
    name="roberta",
    base="roberta.",
    blank=TransformerConfig(
        Tokens(1, Learned(1, 2, 1), types=2, norm=Norm()), POST_NORM, max_len=1
    ),
    heads=encoder_heads("Roberta", "tanh", twice=True),
    config=BERT_KEYS
    | dict(
        max_position_embeddings=Group(
            ("max_position_embeddings", "pad_token_id"), _read_positions, _write_positions
        ),
        hidden_act=Key("tower.ffn.activation", "gelu", ACTIVATIONS),
    ),
    tensors=_bert_tensors("roberta."),
    head_tensors={
        **LABEL_TENSORS,
        "mlm": {
            "lm_head.dense.*": "head.dense.*",
            "lm_head.layer_norm.*": "head.norm.*",
            "lm_head.decoder.weight": "head.weight",
            "lm_head.bias": To("head.bias", unless="head.weight"),
            "lm_head.decoder.bias": To("head.bias", needs="head.weight"),
        },
        "classify": {"classifier.dense.*": "head.dense.*", "classifier.out_proj.*": "head.out.*"},
    },
    pooler="roberta.pooler.dense.weight",
    twins=(
        ("lm_head.decoder.weight", ("roberta.embeddings.word_embeddings.weight",), "head.tied"),
        ("lm_head.decoder.bias", ("lm_head.bias",), ""),
    ),
    carried=(r"roberta\.pooler\..*", r"lm_head\.bias"),
)
XLM_ROBERTA = replace(
    ROBERTA, name="xlm-roberta", heads=encoder_heads("XLMRoberta", "tanh", twice=True)
)
DISTILBERT = Family(
    name="distilbert",
    base="distilbert.",
    blank=TransformerConfig(
        Tokens(1, Learned(1), norm=Norm(1e-12)),
        replace(POST_NORM, norm=Norm(1e-12), attention_dropped=False),
        max_len=1,
    ),
    heads=encoder_heads("DistilBert", "relu"),
    config=dict(
        vocab_size=Key("embedding.vocab"),
        dim=Key("tower.dim"),
        n_layers=Key("tower.layers"),
        n_heads=Key("tower.attention.heads"),
        hidden_dim=Key("tower.ffn.ffn_dim"),
        max_position_embeddings=Key("max_len embedding.position.max_len"),
        activation=Key("tower.ffn.activation head.activation", "gelu", ACTIVATIONS),
        dropout=Key("tower.dropout embedding.dropout", 0.1),
        attention_dropout=Key("tower.attention.dropout", 0.1),
        seq_classif_dropout=head_dropout(
            classify=("seq_classif_dropout", 0.2), tag=("dropout", 0.1), answer=("qa_dropout", 0.1)
        ),
        tie_word_embeddings=Key("head.tied", True),
        id2label=LABELS,
    ),
    inert="tie_weights_",
    aliases=dict(hidden_size="dim", num_attention_heads="n_heads", num_hidden_layers="n_layers"),
    tensors={
        "distilbert.embeddings.word_embeddings.weight": "embedding.weight",
        "distilbert.embeddings.position_embeddings.weight": "embedding.position.weight",
        "distilbert.embeddings.LayerNorm.*": "embedding.norm.*",
        **block(
            "distilbert.transformer.layer.{i}.",
            {
                "attention.q_lin.*": "attention.wq.*",
                "attention.k_lin.*": "attention.wk.*",
                "attention.v_lin.*": "attention.wv.*",
                "attention.out_lin.*": "attention.wo.*",
                "sa_layer_norm.*": "norm1.*",
                "ffn.lin1.*": "ffn.up.*",
                "ffn.lin2.*": "ffn.down.*",
                "output_layer_norm.*": "norm3.*",
            },
        ),
    },
    head_tensors={
        **LABEL_TENSORS,
        "mlm": {
            "vocab_transform.*": "head.dense.*",
            "vocab_layer_norm.*": "head.norm.*",
            "vocab_projector.*": "head.*",
        },
        "classify": {"pre_classifier.*": "head.dense.*", "classifier.*": "head.out.*"},
    },
    twins=(
        ("vocab_projector.weight", ("distilbert.embeddings.word_embeddings.weight",), "head.tied"),
    ),
    derived=BERT.derived,
)


# --- images -------------------------------------------------------------------------------------------------------


def _image_tensors(base: str, extra: list[str]) -> Weights:
    return {
        " ".join(f"{base}embeddings.{token}" for token in extra): To("embedding.extra", TOKENS),
        base + "embeddings.patch_embeddings.projection.*": "embedding.project.*",
        base + "embeddings.position_embeddings": To("embedding.position", ROW),
        base + "layernorm.*": "tower.norm.*",
        base + "pooler.dense.*": "pooler.*",
        **block(
            base + "encoder.layer.{i}.",
            {
                "attention.attention.query.*": "attention.wq.*",
                "attention.attention.key.*": "attention.wk.*",
                "attention.attention.value.*": "attention.wv.*",
                "attention.output.dense.*": "attention.wo.*",
                "layernorm_before.*": "norm1.*",
                "intermediate.dense.*": "ffn.up.*",
                "output.dense.*": "ffn.down.*",
                "layernorm_after.*": "norm3.*",
            },
        ),
    }


_IMAGE_TOWER = Tower(1, 1, _BIASED, MLP(1, "gelu"), norm=Norm(1e-12), causal=False)
VIT = Family(
    name="vit",
    base="vit.",
    blank=TransformerConfig(Patches(16, 16, extra=1), _IMAGE_TOWER),
    heads={"ViTForImageClassification": Classify(2, None), "ViTModel": None},
    config=dict(
        hidden_size=Key("tower.dim"),
        num_hidden_layers=Key("tower.layers"),
        num_attention_heads=Key("tower.attention.heads"),
        intermediate_size=Key("tower.ffn.ffn_dim"),
        hidden_act=Key("tower.ffn.activation", "gelu", ACTIVATIONS),
        layer_norm_eps=Key("tower.norm.eps", 1e-12),
        image_size=Key("embedding.size", 224),
        patch_size=Key("embedding.patch", 16),
        num_channels=Key("embedding.channels", 3),
        qkv_bias=Key("tower.attention.bias", True),
        hidden_dropout_prob=Key("tower.dropout embedding.dropout", 0.0),
        attention_probs_dropout_prob=Key("tower.attention.dropout", 0.0),
        pooler_act=Fixed("tanh"),
        id2label=LABELS,
    ),
    inert="encoder_stride pooler_output_size",
    tensors=_image_tensors("vit.", ["cls_token"]),
    head_tensors={
        "classify": {
            "classifier.*": To("head.out.*", unless="head.teacher.weight"),
            "cls_classifier.*": To("head.out.*", needs="head.teacher.weight"),
            "distillation_classifier.*": "head.teacher.*",
        }
    },
    pooler="vit.pooler.dense.weight",
    carried=(r"vit\.pooler\..*",),
)
DEIT = replace(
    VIT,
    name="deit",
    base="deit.",
    blank=TransformerConfig(Patches(16, 16, extra=2), _IMAGE_TOWER),
    heads={
        "DeiTForImageClassification": Classify(2, None),
        "DeiTModel": None,
        "DeiTForImageClassificationWithTeacher": Classify(2, None, distilled=True),
    },
    tensors=_image_tensors("deit.", ["cls_token", "distillation_token"]),
    pooler="deit.pooler.dense.weight",
    carried=(r"deit\.pooler\..*",),
    start=Start("deit"),
)
