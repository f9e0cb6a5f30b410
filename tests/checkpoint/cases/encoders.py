"""Encoders."""

from __future__ import annotations

from tests.checkpoint.cases import BASE, Case, Settings, case

_ELECTRA = dict(BASE, embedding_size=10)
_ESM = dict(BASE, pad_token_id=1, mask_token_id=7)
_ROTARY = dict(_ESM, position_embedding_type="rotary", token_dropout=True)
_NOMIC = dict(BASE, pad_token_id=0)
_EURO = dict(BASE, pad_token_id=0, bos_token_id=1, eos_token_id=2)

_DEBERTA = dict(BASE, relative_attention=True, pos_att_type=["p2c", "c2p"])
_V3 = dict(_DEBERTA, position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True)
_V3 |= dict(position_biased_input=False)

_LABELS = {"ForSequenceClassification": 3, "ForTokenClassification": 5, "ForQuestionAnswering": 2}


def _labelled(label: str, settings: Settings, *heads: str) -> list[Case]:
    """A case of each head that labels, or of those named."""
    return [
        case(f"{label.lower()}-{head}", f"{label}{head}", settings, num_labels=_LABELS[head])
        for head in heads or _LABELS
    ]


CASES = [
    case("camembert", "CamembertForMaskedLM", BASE),
    *_labelled("Camembert", BASE),
    case("camembert-one-type", "CamembertModel", BASE, type_vocab_size=1, pad_token_id=0),
    case("electra", "ElectraForMaskedLM", _ELECTRA),
    case("electra-as-wide", "ElectraForMaskedLM", BASE, embedding_size=24, hidden_act="relu",
         tie_word_embeddings=False),
    case("electra-discriminator", "ElectraForPreTraining", _ELECTRA, hidden_act="silu"),
    case("electra-body", "ElectraModel", _ELECTRA, type_vocab_size=3, layer_norm_eps=1e-3),
    *_labelled("Electra", _ELECTRA),
    case("mpnet", "MPNetForMaskedLM", BASE),
    case("mpnet-untied", "MPNetForMaskedLM", BASE, tie_word_embeddings=False, hidden_act="relu",
         num_attention_heads=4, layer_norm_eps=1e-3),
    case("mpnet-no-pooler", "MPNetModel", BASE, options={"add_pooling_layer": False}),
    *_labelled("MPNet", BASE),
    case("esm", "EsmForMaskedLM", _ROTARY),
    case("esm-absolute", "EsmForMaskedLM", _ESM, emb_layer_norm_before=True, tie_word_embeddings=False,
         layer_norm_eps=1e-5),
    case("esm-theta", "EsmModel", _ROTARY, rope_theta=50.0, emb_layer_norm_before=True),
    case("esm-no-pooler", "EsmModel", _ESM, token_dropout=True, options={"add_pooling_layer": False}),
    *_labelled("Esm", _ROTARY, "ForSequenceClassification", "ForTokenClassification"),
    case("nomic-bert", "NomicBertForMaskedLM", _NOMIC),
    case("nomic-bert-untied", "NomicBertForMaskedLM", _NOMIC, tie_word_embeddings=False, hidden_act="gelu",
         type_vocab_size=1, rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=50.0)),
    case("nomic-bert-pooler", "NomicBertModel", _NOMIC, head_dim=6, options={"add_pooling_layer": True}),
    *_labelled("NomicBert", _NOMIC, "ForSequenceClassification", "ForTokenClassification"),
    case("deberta-v3", "DebertaV2Model", _V3),
    case("deberta-v3-words", "DebertaV2ForMaskedLM", _V3, max_relative_positions=9, layer_norm_eps=1e-3),
    case("deberta-v2", "DebertaV2ForMaskedLM", _DEBERTA, position_buckets=5, type_vocab_size=2,
         tie_word_embeddings=False, hidden_act="relu"),
    case("deberta-to-position", "DebertaV2Model", _DEBERTA, pos_att_type="c2p", max_relative_positions=6,
         type_vocab_size=1),
    case("deberta-of-position", "DebertaV2Model", _V3, pos_att_type=["p2c"]),
    case("deberta-absolute", "DebertaV2ForMaskedLM", _DEBERTA, relative_attention=False),
    case("deberta-no-terms", "DebertaV2Model", _V3, pos_att_type=None),
    *_labelled("DebertaV2", _V3),
    case("eurobert", "EuroBertForMaskedLM", _EURO),
    case("eurobert-biases", "EuroBertForMaskedLM", _EURO, num_key_value_heads=1, attention_bias=True,
         mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu"),
    case("eurobert-body", "EuroBertModel", _EURO, num_key_value_heads=3, rope_parameters=dict(
         rope_type="linear", factor=2.0, rope_theta=50.0)),
    *_labelled("EuroBert", _EURO, "ForSequenceClassification", "ForTokenClassification"),
    case("eurobert-mean", "EuroBertForSequenceClassification", _EURO, classifier_pooling="mean"),
    case("eurobert-first", "EuroBertForSequenceClassification", _EURO, classifier_pooling="bos"),
]  # fmt: skip
ODD: Settings = {}
KEPT = ["esm", "electra-discriminator"]
