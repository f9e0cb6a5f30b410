"""Encoder-only families as data: BERT, RoBERTa, DistilBERT, ViT, DeiT, each with its heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint.families.config import ACTIVATIONS, LABELS, head_dropout
from regard.checkpoint.rules import (
    ROW,
    TOKENS,
    Custom,
    Data,
    Family,
    Fixed,
    Inert,
    Key,
    need,
    rule,
)
from regard.layers import MLM, MLP, Answer, Classify, Norm, Tag
from regard.models import Patches, Tokens, TransformerConfig
from regard.position import Learned

_BODY = "tower.blocks.{i}."
_BIASED = GQA(1, bias=True, out_bias=True)
_POST = Tower(1, 1, _BIASED, MLP(1, "gelu"), order="post", final_norm=False, causal=False)


_LABELS = {
    "tag": (rule("classifier.*", "head.out.*"),),
    "answer": (rule("qa_outputs.*", "head.out.*"),),
}


def _heads(name: str, dense: str, twice: bool = False) -> dict[str, Any]:
    return {
        f"{name}ForMaskedLM": MLM(),
        f"{name}Model": None,
        f"{name}ForSequenceClassification": Classify(2, dense, dropped_twice=twice),
        f"{name}ForTokenClassification": Tag(2),
        f"{name}ForQuestionAnswering": Answer(),
    }


def _blocks(layer: str, table: list[tuple[str, str]]) -> tuple[Any, ...]:
    return tuple(rule(f"{layer}.{a}.*", f"{_BODY}{b}.*") for a, b in table)


_BERT_BLOCK = [
    ("attention.self.query", "attention.wq"),
    ("attention.self.key", "attention.wk"),
    ("attention.self.value", "attention.wv"),
    ("attention.output.dense", "attention.wo"),
    ("attention.output.LayerNorm", "norm1"),
    ("intermediate.dense", "ffn.up"),
    ("output.dense", "ffn.down"),
    ("output.LayerNorm", "norm3"),
]
_BERT_KEYS = (
    Key("vocab_size", "embedding.vocab"),
    Key("hidden_size", "tower.dim"),
    Key("num_hidden_layers", "tower.layers"),
    Key("num_attention_heads", "tower.attention.heads"),
    Key("intermediate_size", "tower.ffn.ffn_dim"),
    Key("type_vocab_size", "embedding.types", 2),
    Key("layer_norm_eps", "tower.norm.eps", 1e-12, also=("embedding.norm.eps", "head.norm_eps")),
    Key("hidden_dropout_prob", "tower.dropout", 0.1, also=("embedding.dropout",)),
    Key("attention_probs_dropout_prob", "tower.attention.dropout", 0.1),
    head_dropout(
        classify=("classifier_dropout", "hidden_dropout_prob"),
        tag=("classifier_dropout", "hidden_dropout_prob"),
    ),
    Key("tie_word_embeddings", "head.tied", True),
    Fixed("position_embedding_type", ("absolute",)),
    Fixed("is_decoder", (False,)),
    Fixed("add_cross_attention", (False,)),
    LABELS,
)


def _bert_tensors(base: str) -> tuple[Any, ...]:
    return (
        rule(base + "embeddings.word_embeddings.weight", "embedding.weight"),
        rule(base + "embeddings.position_embeddings.weight", "embedding.position.weight"),
        rule(base + "embeddings.token_type_embeddings.weight", "embedding.types"),
        rule(base + "embeddings.LayerNorm.*", "embedding.norm.*"),
        *_blocks(base + "encoder.layer.{i}", _BERT_BLOCK),
        rule(base + "pooler.dense.*", "pooler.*"),
    )


BERT = Family(
    name="bert",
    base="bert.",
    blank=TransformerConfig(Tokens(1, Learned(1), types=2, norm=Norm()), _POST, max_len=1),
    heads={**_heads("Bert", "tanh"), "BertForPreTraining": MLM()},
    config=(
        *_BERT_KEYS,
        Key("max_position_embeddings", "max_len", also=("embedding.position.max_len",)),
        Key("hidden_act", "tower.ffn.activation", "gelu", ACTIVATIONS, also=("head.activation",)),
    ),
    tensors=_bert_tensors("bert."),
    head_tensors={
        **_LABELS,
        "mlm": (
            rule("cls.predictions.transform.dense.*", "head.dense.*"),
            rule("cls.predictions.transform.LayerNorm.*", "head.norm.*"),
            rule("cls.predictions.decoder.weight", "head.weight"),
            rule("cls.predictions.bias", "head.bias", unless="head.weight"),
            rule("cls.predictions.decoder.bias", "head.bias", needs="head.weight"),
        ),
        "classify": (
            rule("bert.pooler.dense.*", "head.dense.*"),
            rule("classifier.*", "head.out.*"),
        ),
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


def _read_roberta(theirs: Data, ours: Data) -> None:
    """Rows of the table count from the padding id + 1; the table's size includes those before."""
    pad = theirs.get("pad_token_id")
    pad = 1 if pad is None else pad
    size = theirs.get("max_position_embeddings", 512)
    ours["embedding"]["position"].update(max_len=size - pad - 1, offset=pad + 1, skip=pad)
    ours["max_len"] = size - pad - 1


def _write_roberta(ours: Data, theirs: Data) -> None:
    skip, size, offset = (
        need(ours, f"embedding.position.{name}") for name in ("skip", "max_len", "offset")
    )
    theirs["pad_token_id"], theirs["max_position_embeddings"] = skip, size + offset


ROBERTA_POSITIONS = Custom(
    ("max_position_embeddings", "pad_token_id"), _read_roberta, _write_roberta
)


ROBERTA = replace(
    BERT,
    name="roberta",
    base="roberta.",
    blank=TransformerConfig(Tokens(1, Learned(1, 2, 1), types=2, norm=Norm()), _POST, max_len=1),
    heads=_heads("Roberta", "tanh", twice=True),
    config=(
        *_BERT_KEYS,
        ROBERTA_POSITIONS,
        Key("hidden_act", "tower.ffn.activation", "gelu", ACTIVATIONS),
    ),
    tensors=_bert_tensors("roberta."),
    head_tensors={
        **_LABELS,
        "mlm": (
            rule("lm_head.dense.*", "head.dense.*"),
            rule("lm_head.layer_norm.*", "head.norm.*"),
            rule("lm_head.decoder.weight", "head.weight"),
            rule("lm_head.bias", "head.bias", unless="head.weight"),
            rule("lm_head.decoder.bias", "head.bias", needs="head.weight"),
        ),
        "classify": (
            rule("classifier.dense.*", "head.dense.*"),
            rule("classifier.out_proj.*", "head.out.*"),
        ),
    },
    pooler="roberta.pooler.dense.weight",
    twins=(
        ("lm_head.decoder.weight", ("roberta.embeddings.word_embeddings.weight",), "head.tied"),
        ("lm_head.decoder.bias", ("lm_head.bias",), ""),
    ),
    carried=(r"roberta\.pooler\..*", r"lm_head\.bias"),
)
XLM_ROBERTA = replace(ROBERTA, name="xlm-roberta", heads=_heads("XLMRoberta", "tanh", twice=True))
_DISTIL_TOWER = replace(_POST, norm=Norm(1e-12), attention_dropped=False)
_DISTIL = "distilbert.transformer.layer.{i}"
DISTILBERT = Family(
    name="distilbert",
    aliases={
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    base="distilbert.",
    blank=TransformerConfig(Tokens(1, Learned(1), norm=Norm(1e-12)), _DISTIL_TOWER, max_len=1),
    heads=_heads("DistilBert", "relu"),
    config=(
        Key("vocab_size", "embedding.vocab"),
        Key("dim", "tower.dim"),
        Key("n_layers", "tower.layers"),
        Key("n_heads", "tower.attention.heads"),
        Key("hidden_dim", "tower.ffn.ffn_dim"),
        Key("max_position_embeddings", "max_len", also=("embedding.position.max_len",)),
        Key("activation", "tower.ffn.activation", "gelu", ACTIVATIONS, also=("head.activation",)),
        Key("dropout", "tower.dropout", 0.1, also=("embedding.dropout",)),
        Key("attention_dropout", "tower.attention.dropout", 0.1),
        head_dropout(
            classify=("seq_classif_dropout", 0.2), tag=("dropout", 0.1), answer=("qa_dropout", 0.1)
        ),
        Key("tie_word_embeddings", "head.tied", True),
        Inert(("tie_weights_",)),
        LABELS,
    ),
    tensors=(
        rule("distilbert.embeddings.word_embeddings.weight", "embedding.weight"),
        rule("distilbert.embeddings.position_embeddings.weight", "embedding.position.weight"),
        rule("distilbert.embeddings.LayerNorm.*", "embedding.norm.*"),
        *_blocks(
            _DISTIL,
            [
                ("attention.q_lin", "attention.wq"),
                ("attention.k_lin", "attention.wk"),
                ("attention.v_lin", "attention.wv"),
                ("attention.out_lin", "attention.wo"),
                ("sa_layer_norm", "norm1"),
                ("ffn.lin1", "ffn.up"),
                ("ffn.lin2", "ffn.down"),
                ("output_layer_norm", "norm3"),
            ],
        ),
    ),
    head_tensors={
        **_LABELS,
        "mlm": (
            rule("vocab_transform.*", "head.dense.*"),
            rule("vocab_layer_norm.*", "head.norm.*"),
            rule("vocab_projector.weight", "head.weight"),
            rule("vocab_projector.bias", "head.bias"),
        ),
        "classify": (rule("pre_classifier.*", "head.dense.*"), rule("classifier.*", "head.out.*")),
    },
    twins=(
        ("vocab_projector.weight", ("distilbert.embeddings.word_embeddings.weight",), "head.tied"),
    ),
    derived=BERT.derived,
)


# --- images -------------------------------------------------------------------------------------------------------


def _vit(name: str, label: str, extra: tuple[str, ...]) -> Family:
    base = f"{name}."
    tower = Tower(1, 1, _BIASED, MLP(1, "gelu"), norm=Norm(1e-12), causal=False)
    return Family(
        name=name,
        base=base,
        blank=TransformerConfig(Patches(16, 16, extra=len(extra)), tower),
        heads={f"{label}ForImageClassification": Classify(2, None), f"{label}Model": None},
        config=(
            Key("hidden_size", "tower.dim"),
            Key("num_hidden_layers", "tower.layers"),
            Key("num_attention_heads", "tower.attention.heads"),
            Key("intermediate_size", "tower.ffn.ffn_dim"),
            Key("hidden_act", "tower.ffn.activation", "gelu", ACTIVATIONS),
            Key("layer_norm_eps", "tower.norm.eps", 1e-12),
            Key("image_size", "embedding.size", 224),
            Key("patch_size", "embedding.patch", 16),
            Key("num_channels", "embedding.channels", 3),
            Key("qkv_bias", "tower.attention.bias", True),
            Key("hidden_dropout_prob", "tower.dropout", 0.0, also=("embedding.dropout",)),
            Key("attention_probs_dropout_prob", "tower.attention.dropout", 0.0),
            Fixed("pooler_act", ("tanh",)),
            Inert(("encoder_stride", "pooler_output_size")),
            LABELS,
        ),
        tensors=(
            rule(tuple(f"{base}embeddings.{token}" for token in extra), "embedding.extra", TOKENS),
            rule(base + "embeddings.patch_embeddings.projection.*", "embedding.project.*"),
            rule(base + "embeddings.position_embeddings", "embedding.position", ROW),
            *_blocks(
                base + "encoder.layer.{i}",
                [
                    ("attention.attention.query", "attention.wq"),
                    ("attention.attention.key", "attention.wk"),
                    ("attention.attention.value", "attention.wv"),
                    ("attention.output.dense", "attention.wo"),
                    ("layernorm_before", "norm1"),
                    ("intermediate.dense", "ffn.up"),
                    ("output.dense", "ffn.down"),
                    ("layernorm_after", "norm3"),
                ],
            ),
            rule(base + "layernorm.*", "tower.norm.*"),
            rule(base + "pooler.dense.*", "pooler.*"),
        ),
        head_tensors={
            "classify": (
                rule("classifier.*", "head.out.*", unless="head.teacher.weight"),
                rule("cls_classifier.*", "head.out.*", needs="head.teacher.weight"),
                rule("distillation_classifier.*", "head.teacher.*"),
            )
        },
        pooler=base + "pooler.dense.weight",
        carried=(rf"{name}\.pooler\..*",),
    )


VIT = _vit("vit", "ViT", ("cls_token",))
_DEIT = _vit("deit", "DeiT", ("cls_token", "distillation_token"))
_TEACHER = {"DeiTForImageClassificationWithTeacher": Classify(2, None, distilled=True)}
DEIT = replace(_DEIT, heads={**_DEIT.heads, **_TEACHER})
