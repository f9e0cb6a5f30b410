"""BERT and its kin."""

from __future__ import annotations

from dataclasses import replace

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import BIASED, POST_NORM, SHAPE_KEYS, sizes
from regard.checkpoint.rules import ACTIVATIONS, Data, Family, Group, Key, Keys, fixed
from regard.checkpoint.tensors import To, Weights
from regard.layers import MLM, MLP, Answer, Classify, Norm, Tag
from regard.models import Tokens, TransformerConfig
from regard.models.init import Start
from regard.position import Learned, Rope

# --- what most encoders share --------------------------------------------------------------------------------------

LABEL_TENSORS = {"tag": {"classifier.*": "head.out.*"}, "answer": {"qa_outputs.*": "head.out.*"}}


def encoder_heads(name: str, dense: str, twice: bool = False) -> Data:
    """Their classes; `dense`: the activation before a label of the whole, `twice`: dropout before and after it."""
    return {
        f"{name}ForMaskedLM": MLM(), f"{name}Model": None,
        f"{name}ForSequenceClassification": Classify(2, dense, dropped_twice=twice),
        f"{name}ForTokenClassification": Tag(2), f"{name}ForQuestionAnswering": Answer(),
    }  # fmt: skip


# --- BERT and its kin ---------------------------------------------------------------------------------------------

BERT_KEYS: Keys = SHAPE_KEYS | dict(
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
CAMEMBERT = replace(
    ROBERTA, name="camembert", heads=encoder_heads("Camembert", "tanh", twice=True),
    presets={"camembert-base": sizes(32005, 768, 12, 12, 3072, 514, type_vocab_size=1, layer_norm_eps=1e-5)},
)  # fmt: skip
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


def _groups_of(theirs: Data) -> tuple[int, int]:
    """Of layers that are called again, and how many of them each has."""
    groups, inner = (theirs.get(key) for key in ("num_hidden_groups", "inner_group_num"))
    return 1 if groups is None else groups, 1 if inner is None else inner


def _read_groups(theirs: Data, ours: Data) -> None:
    tower, (groups, inner) = ours["tower"], _groups_of(theirs)
    n = tower["layers"]
    apart = list(range(tower["layers"] * inner))
    calls = [int(i / (n / groups)) for i in range(n)]
    blocks = [group * inner + j for group in calls for j in range(inner)]
    tower["layers"], tower["blocks"] = len(apart), None if blocks == apart else blocks


def _write_groups(ours: Data, theirs: Data) -> None:
    """In the words that are there, where they can say it."""
    tower, (groups, inner) = ours["tower"], _groups_of(theirs)
    n = tower["layers"]
    blocks = tower["blocks"]
    kinds = n if blocks is None else len(set(blocks))
    if n % inner or kinds != groups * inner:
        groups, inner = kinds, 1
    if (groups, inner) != _groups_of(theirs):
        theirs["num_hidden_groups"], theirs["inner_group_num"] = groups, inner
    tower["layers"] = n // inner


ALBERT = replace(
    BERT, name="albert", base="albert.",
    blank=TransformerConfig(
        Tokens(1, Learned(1), types=2, norm=Norm(), width=1),
        replace(POST_NORM, blocks=(0,), ffn_dropped=False), max_len=1,
    ),
    heads=encoder_heads("Albert", "tanh"),
    config=BERT_KEYS | dict(
        embedding_size=Key("embedding.width", 128),
        num_hidden_groups=Group(
            ("num_hidden_groups", "inner_group_num"), _read_groups, _write_groups, last=True
        ),
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
        "encoder.albert_layer_groups.{i}.albert_layers.{j}.": {
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
_DENSE_TENSORS = {"head.{dense,norm}.*": "head.{dense,norm}.*", "classifier.*": "head.out.*"}
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
        "ModernBertForTokenClassification": Tag(2, dense="gelu", norm=_NORM),
        "ModernBertForQuestionAnswering": Answer(dense="gelu", norm=_NORM),
    },
    config=SHAPE_KEYS | dict(
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
        classifier_dropout=rules.head_dropout(
            **dict.fromkeys(("classify", "tag", "answer"), ("classifier_dropout", 0.0))
        ),
        id2label=rules.LABELS,
        pad_token_id=rules.ids_below(50283, "pad_token_id", "eos_token_id", "bos_token_id"),
    ),
    inert="""initializer_cutoff_factor deterministic_flash_attn sparse_prediction sparse_pred_ignore_index
    reference_compile repad_logits_with_grad""",
    tensors={
        "embeddings.tok_embeddings.weight": "embedding.weight",
        "embeddings.norm.*": "embedding.norm.*", "final_norm.*": "tower.norm.*",
        "layers.{i}.": {
            "{attn,mlp}_norm.*": "norm{1,3}.*", "attn.Wqkv.*": To("attention.w{q,k,v}.*", tensors.JOINED),
            "attn.Wo.*": "attention.wo.*", "mlp.Wi.*": To("ffn.{gate,up}.*", tensors.JOINED),
            "mlp.Wo.*": "ffn.down.*",
        },
    },
    head_tensors={
        "mlm": {"head.{dense,norm}.*": "head.{dense,norm}.*", "decoder.*": "head.*"},
        "classify": _DENSE_TENSORS, "tag": _DENSE_TENSORS, "answer": _DENSE_TENSORS,
    },
    start=Start("modernbert"), presets={"modernbert-base": sizes(50368, 768, 22, 12, 1152, 8192)},
)  # fmt: skip
