"""BERT and its kin."""

from __future__ import annotations

from dataclasses import replace

from regard.attention import GQA, Disentangled
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import BIASED, POST_NORM, SHAPE_KEYS, sizes
from regard.checkpoint.family import Family
from regard.checkpoint.rules import ACTIVATIONS, Data, Group, Key, Keys, fixed
from regard.checkpoint.tensors import To, Weights
from regard.config import to_dict
from regard.layers import MLM, MLP, Answer, Classify, Norm, Tag
from regard.models import Tokens, TransformerConfig
from regard.models.init import Start
from regard.position import Learned, Rope, T5Bias

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


def mlm_tensors(base: str, before: str) -> Weights:
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
        **LABEL_TENSORS, "mlm": mlm_tensors("cls.predictions.", "transform.{dense,LayerNorm}"),
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
        **LABEL_TENSORS, "mlm": mlm_tensors("lm_head.", "{dense,layer_norm}"),
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
        **LABEL_TENSORS, "mlm": mlm_tensors("predictions.", "{dense,LayerNorm}"),
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
            more="global_attn_every_n_layers", key="local_attention", sides=2,
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


# --- ELECTRA and MPNet --------------------------------------------------------------------------------------------


def _read_width(theirs: Data, ours: Data) -> None:
    """A table as wide as the tower has no layer behind it."""
    width = theirs.get("embedding_size")
    width = 128 if width is None else width
    ours["embedding"]["width"] = None if width == theirs.get("hidden_size") else width


def _write_width(ours: Data, theirs: Data) -> None:
    theirs["embedding_size"] = rules.need(ours, "embedding.width") or ours["tower"]["dim"]


def _read_discriminator(theirs: Data, ours: Data) -> None:
    """What tells tokens that a generator put in has one label, and the tower's activation."""
    if rules.get(ours, "head.kind") == "tag" and ours["head"]["dense"]:
        ours["head"] |= dict(labels=1, dropout=None, dense=ours["tower"]["ffn"]["activation"])


def _write_discriminator(ours: Data, theirs: Data) -> None:
    """Without what other rules would say of it."""
    if rules.get(ours, "head.kind") == "tag" and ours["head"]["dense"]:
        ours["head"] |= dict(kind="discriminator", labels=2, dropout=None)


ELECTRA = replace(
    BERT, name="electra", base="electra.",
    heads={
        **encoder_heads("Electra", "gelu", twice=True), "ElectraForPreTraining": Tag(1, dense="gelu"),
    },
    config=BERT_KEYS | dict(
        embedding_size=Group(("embedding_size",), _read_width, _write_width),
        hidden_act=Key("tower.ffn.activation", "gelu", ACTIVATIONS),
        discriminator=Group((), _read_discriminator, _write_discriminator, last=True),
    ),
    inert="summary_type summary_use_proj summary_activation summary_last_dropout",
    tensors={**_BERT_TENSORS, "embeddings_project.*": "embedding.project.*"},
    head_tensors={
        "mlm": {
            "generator_predictions.{dense,LayerNorm}.*": "head.{dense,norm}.*", "generator_lm_head.*": "head.*",
        },
        "classify": {"classifier.{dense,out_proj}.*": "head.{dense,out}.*"},
        "tag": {
            "discriminator_predictions.dense.*": "head.dense.*",
            "discriminator_predictions.dense_prediction.*": To("head.out.*", needs="head.dense.weight"),
            "classifier.*": To("head.out.*", unless="head.dense.weight"),
        },
        "answer": LABEL_TENSORS["answer"],
    },
    carried=(),
    presets={
        "electra-small": sizes(30522, 256, 12, 4, 1024, 512),
        "electra-base": sizes(30522, 768, 12, 12, 3072, 512, embedding_size=768),
    },
)  # fmt: skip
# Their labels have the dropout of their blocks.
AS_ELSEWHERE = dict.fromkeys(("classify", "tag"), ("hidden_dropout_prob", 0.1))
_TYPELESS: Keys = {key: rule for key, rule in BERT_KEYS.items() if key != "type_vocab_size"}
MPNET = replace(
    ROBERTA, name="mpnet", base="mpnet.",
    blank=TransformerConfig(
        Tokens(1, Learned(1, 2, 1), norm=Norm()), replace(POST_NORM, relative=T5Bias(1)), max_len=1,
    ),
    heads=encoder_heads("MPNet", "tanh", twice=True),
    config=_TYPELESS | dict(
        num_attention_heads=Key("tower.{attention,relative}.heads"),
        # Two rows stand before place 0, whatever the padding id.
        max_position_embeddings=Key(
            "max_len embedding.position.max_len", 512, (lambda n: n - 2, lambda n: n + 2),
        ),
        hidden_act=Key("tower.ffn.activation", "gelu", ACTIVATIONS),
        classifier_dropout=rules.head_dropout(**AS_ELSEWHERE),
        # It looks no further into a larger table.
        **fixed(relative_attention_num_buckets=32),
    ),
    tensors={
        **EMBEDDING_TENSORS, "pooler.dense.*": "pooler.*",
        "encoder.relative_attention_bias.weight": "tower.relative.weight",
        "encoder.layer.{i}.": {
            "attention.attn.{q,k,v,o}.*": "attention.w{q,k,v,o}.*", "attention.LayerNorm.*": "norm1.*",
            "intermediate.dense.*": "ffn.up.*", "output.{dense,LayerNorm}.*": "{ffn.down,norm3}.*",
        },
    },
    carried=(r"mpnet\.pooler\..*", r"lm_head\.bias"),
    presets={"mpnet-base": sizes(30527, 768, 12, 12, 3072, 514, layer_norm_eps=1e-5)},
)  # fmt: skip


# --- DeBERTa v2 and v3 --------------------------------------------------------------------------------------------


def _terms(theirs: Data) -> list[str]:
    said = theirs.get("pos_att_type") or []
    said = said.lower().split("|") if isinstance(said, str) else said
    return [word.strip() for word in said]


def _read_distances(theirs: Data, ours: Data) -> None:
    attention, terms, norm = ours["tower"]["attention"], _terms(theirs), theirs.get("norm_rel_ebd")
    if set(terms) - {"c2p", "p2c"}:
        raise rules.wrong(f"pos_att_type is {theirs['pos_att_type']!r}; known: c2p, p2c")
    if norm not in (None, "none", "layer_norm"):
        raise rules.wrong(f"norm_rel_ebd is {norm!r}; known: none, layer_norm")
    if not theirs.get("relative_attention"):
        # The scale counts terms that are not there.
        plain = to_dict(GQA(1, bias=True, out_bias=True))
        plain |= {key: attention[key] for key in ("heads", "head_dim", "dropout")}
        width = plain["head_dim"] or ours["tower"]["dim"] // plain["heads"]
        plain["scale"] = ((1 + len(set(terms))) * width) ** -0.5 if terms else None
        ours["tower"]["attention"] = plain
        return
    places = theirs.get("max_position_embeddings")
    buckets, most = (
        theirs.get(key) or -1 for key in ("position_buckets", "max_relative_positions")
    )
    most = most if most > 0 else 512 if places is None else places
    attention |= dict(
        span=buckets if buckets > 0 else most, max_distance=most if buckets > 0 else None,
        content_to_position="c2p" in terms, position_to_content="p2c" in terms,
        shared=bool(theirs.get("share_att_key")),
    )  # fmt: skip
    if norm != "layer_norm":
        attention["norm"] = None


def _write_distances(ours: Data, theirs: Data) -> None:
    relative = rules.need(ours, "tower.attention.kind") == "disentangled"
    if relative != bool(theirs.get("relative_attention")):
        theirs["relative_attention"] = relative
    if not relative:
        _write_scale(ours, theirs)
        return
    words = ("content_to_position", "position_to_content", "span", "max_distance", "shared", "norm")
    to, of, span, most, shared, norm = (
        rules.need(ours, f"tower.attention.{word}") for word in words
    )
    terms = [*(["p2c"] if of else []), *(["c2p"] if to else [])]
    if sorted(_terms(theirs)) != sorted(terms):
        theirs["pos_att_type"] = terms
    for key, value in (
        ("share_att_key", shared), ("position_buckets", span if most else -1),
        ("max_relative_positions", most or span), ("norm_rel_ebd", "none" if norm is None else "layer_norm"),
    ):  # fmt: skip
        given = theirs.get(key)
        silent = dict(share_att_key=False, norm_rel_ebd="none", position_buckets=-1)
        places = key == "max_relative_positions" and (given or -1) < 1
        given = ours["max_len"] if places else silent.get(key) if given is None else given
        if given != value:
            theirs[key] = value


def _write_scale(ours: Data, theirs: Data) -> None:
    """By as many terms as it counts."""
    scale, heads = (rules.need(ours, f"tower.attention.{word}") for word in ("scale", "heads"))
    width = rules.need(ours, "tower.attention.head_dim") or ours["tower"]["dim"] // heads
    count = round(scale**-2 / width) - 1 if scale else 0
    if len(set(_terms(theirs))) != count:
        theirs["pos_att_type"] = ["p2c", "c2p"][: max(count, 0)]
    if width == ours["tower"]["dim"] // heads:
        rules.put(ours, "tower.attention.head_dim", theirs.get("attention_head_size"))


def _read_places(theirs: Data, ours: Data) -> None:
    if theirs.get("position_biased_input") is False:
        ours["embedding"]["position"] = None


def _write_places(ours: Data, theirs: Data) -> None:
    learned = rules.need(ours, "embedding.position") is not None
    if learned != (theirs.get("position_biased_input") is not False):
        theirs["position_biased_input"] = learned


_POOLER = Key("head.dense", "gelu", ACTIVATIONS)


def _read_pooler(theirs: Data, ours: Data) -> None:
    """Of a label of the whole; the other heads have no such layer."""
    if rules.get(ours, "head.kind") == "classify":
        _POOLER.read("pooler_hidden_act", theirs, ours)


def _write_pooler(ours: Data, theirs: Data) -> None:
    if rules.get(ours, "head.kind") == "classify":
        _POOLER.write("pooler_hidden_act", ours, theirs)


_DEBERTA_V3: Data = dict(
    relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True
)
_DEBERTA_V3 |= dict(pos_att_type=["p2c", "c2p"], position_biased_input=False)
DEBERTA_V2 = replace(
    BERT, name="deberta-v2", base="deberta.",
    blank=TransformerConfig(
        Tokens(1, Learned(1), norm=Norm()), replace(POST_NORM, attention=Disentangled(1)), max_len=1,
    ),
    # A folder of the first models does not say what it is, and has the body.
    heads={"DebertaV2Model": None, **encoder_heads("DebertaV2", "gelu")},
    config=BERT_KEYS | dict(
        layer_norm_eps=Key("tower.norm.eps tower.attention.norm embedding.norm.eps head.norm_eps", 1e-7),
        type_vocab_size=Key("embedding.types", 0),
        hidden_act=Key("tower.ffn.activation head.activation", "gelu", ACTIVATIONS),
        hidden_dropout_prob=Key("tower.dropout tower.attention.vector_dropout embedding.dropout", 0.1),
        attention_head_size=Key("tower.attention.head_dim", None, quiet=True),
        max_position_embeddings=Key("max_len embedding.position.max_len", 512),
        classifier_dropout=rules.head_dropout(
            classify=("cls_dropout", "hidden_dropout_prob"), tag=("hidden_dropout_prob", 0.1),
        ),
        pooler_dropout=Key("head.dense_dropout", 0.0),
        pooler_hidden_act=Group(("pooler_hidden_act",), _read_pooler, _write_pooler),
        relative_attention=Group(
            (
                "relative_attention", "pos_att_type", "position_buckets", "max_relative_positions", "share_att_key",
                "norm_rel_ebd",
            ),
            _read_distances, _write_distances, last=True,
        ),
        position_biased_input=Group(("position_biased_input",), _read_places, _write_places, last=True),
        **fixed(legacy=True, conv_kernel_size=0),
    ),
    inert="pooler_hidden_size conv_act conv_groups",
    tensors={
        **EMBEDDING_TENSORS, "encoder.rel_embeddings.weight": "tower.blocks.0.attention.distances.weight",
        "encoder.LayerNorm.*": "tower.blocks.0.attention.distances.norm.*",
        "encoder.layer.{i}.": {
            "attention.self.{query,key,value}_proj.*": "attention.w{q,k,v}.*",
            "attention.self.pos_{key,query}_proj.*": "attention.distance_{k,q}.*",
            "attention.output.{dense,LayerNorm}.*": "{attention.wo,norm1}.*",
            "intermediate.dense.*": "ffn.up.*", "output.{dense,LayerNorm}.*": "{ffn.down,norm3}.*",
        },
    },
    head_tensors={
        **LABEL_TENSORS, "mlm": mlm_tensors("cls.predictions.", "transform.{dense,LayerNorm}"),
        "classify": {"pooler.dense.*": "head.dense.*", "classifier.*": "head.out.*"},
    },
    derived=BERT.derived,
    carried=(
        r"cls\.predictions\.bias", r"(lm|mask)_predictions\..*", r"deberta\.embeddings\.position_embeddings\.weight",
    ),
    presets={
        "deberta-v3-small": sizes(128100, 768, 6, 12, 3072, 512, **_DEBERTA_V3),
        "deberta-v3-base": sizes(128100, 768, 12, 12, 3072, 512, **_DEBERTA_V3),
    },
)  # fmt: skip
