"""Tiny random transformers models of every family, head and variant: what the tests of this folder run over.

Shapes are odd on purpose: three, five and seven heads, one key head, widths that are no power of two. transformers is
imported when a case is made, not when the table is read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from regard.checkpoint.families import FAMILIES
from regard.checkpoint.family import Family
from regard.layers import Tag
from tests.checkpoint import cases
from tests.checkpoint.cases import (
    ALBERT,
    BART,
    BASE,
    DEEPSEEK,
    DELTA,
    DISTIL,
    EXPERTS,
    GPT,
    IMAGE,
    INDEX,
    KV,
    LATENT,
    LLAMA3,
    LONG,
    MARIAN,
    MODERN,
    PHI,
    T5,
    YARN,
    YARN_FIXED,
    YARN_SCALED,
    Case,
    Settings,
    case,
    rope,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# --- the table ----------------------------------------------------------------------------------------------------

_GPT2, _LLAMA = "GPT2LMHeadModel", "LlamaForCausalLM"
_MISTRAL, _MIXTRAL = "MistralForCausalLM", "MixtralForCausalLM"
_QWEN2, _QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
_V2, _V3, _V32 = (f"DeepseekV{v}ForCausalLM" for v in (2, 3, 32))
_GEMMA, _OSS, _NEOX = "Gemma3ForCausalLM", "GptOssForCausalLM", "GPTNeoXForCausalLM"
_OLMO2, _OLMO3, _PHI3 = "Olmo2ForCausalLM", "Olmo3ForCausalLM", "Phi3ForCausalLM"
_NEXT = "Qwen3NextForCausalLM"
_SLIDE, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"

DECODERS = [
    case("gpt2", _GPT2, GPT),
    case("gpt2-body", "GPT2Model", GPT, n_inner=17, layer_norm_epsilon=1e-3),
    case("gpt2-untied", _GPT2, GPT, tie_word_embeddings=False),
    case("gpt2-relu", _GPT2, GPT, activation_function="relu"),
    case("gpt2-7-heads-of-3", _GPT2, GPT, n_embd=21, n_head=7, activation_function="gelu"),
    case("llama", _LLAMA, BASE),
    case("llama-mqa", _LLAMA, BASE, num_key_value_heads=1),
    case("llama-gqa-tied", _LLAMA, BASE, hidden_size=36, num_attention_heads=6,
         num_key_value_heads=2, tie_word_embeddings=True),
    case("llama-5-heads-of-6", _LLAMA, BASE, hidden_size=25, num_attention_heads=5,
         num_key_value_heads=5, head_dim=6),
    case("llama-body", "LlamaModel", BASE),
    case("llama-biases", _LLAMA, BASE, LLAMA3, num_key_value_heads=1, attention_bias=True,
         mlp_bias=True, tie_word_embeddings=True),
    case("llama-mlp-bias", _LLAMA, BASE, mlp_bias=True, hidden_act="gelu", rms_norm_eps=1e-3),
    case("llama-yarn", _LLAMA, BASE, YARN, num_key_value_heads=3, head_dim=10),
    case("llama-yarn-fixed", _LLAMA, BASE, YARN_FIXED),
    case("llama-linear", _LLAMA, BASE, rope("linear", factor=2.0)),
    case("llama-dynamic", _LLAMA, BASE, rope("dynamic", factor=2.0)),
    case("llama-relu2", _LLAMA, BASE, hidden_act="relu2"),
    case("llama-quick-gelu", _LLAMA, BASE, hidden_act="quick_gelu"),
    case("llama-base-5e5", _LLAMA, BASE, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    case("mistral", _MISTRAL, BASE, num_key_value_heads=1, sliding_window=5),
    case("mistral-no-window", _MISTRAL, BASE, num_key_value_heads=1, sliding_window=None, head_dim=6),
    case("mistral-body", "MistralModel", BASE, num_key_value_heads=3),
    case("mixtral", _MIXTRAL, BASE, num_key_value_heads=1, num_local_experts=5,
         num_experts_per_tok=3),
    case("mixtral-window", _MIXTRAL, BASE, num_key_value_heads=3, num_local_experts=3,
         num_experts_per_tok=1, sliding_window=4, hidden_act="gelu", tie_word_embeddings=True),
    case("mixtral-body", "MixtralModel", BASE, num_key_value_heads=1, num_local_experts=2),
    case("qwen2", _QWEN2, BASE, num_key_value_heads=1),
    case("qwen2-window", _QWEN2, BASE, num_key_value_heads=1, use_sliding_window=True,
         sliding_window=4, max_window_layers=1, tie_word_embeddings=True),
    case("qwen2-all-slide", _QWEN2, BASE, num_key_value_heads=3, use_sliding_window=True,
         sliding_window=3, max_window_layers=0),
    case("qwen2-layer-types", _QWEN2, BASE, num_hidden_layers=3, num_key_value_heads=3,
         use_sliding_window=True, sliding_window=4, layer_types=[_SLIDE, _FULL, _SLIDE]),
    case("qwen2-both-ways", "Qwen2Model", BASE, num_key_value_heads=1, is_causal=False),
    case("gpt2-both-ways", "GPT2Model", GPT, is_causal=False),
    case("qwen2-body", "Qwen2Model", BASE, num_key_value_heads=1),
    case("qwen3", _QWEN3, BASE, num_key_value_heads=1, head_dim=10),
    case("qwen3-biased", _QWEN3, BASE, num_key_value_heads=3, head_dim=6, attention_bias=True,
         tie_word_embeddings=True, rms_norm_eps=1e-4),
    case("qwen3-window", _QWEN3, BASE, num_key_value_heads=1, head_dim=8, use_sliding_window=True,
         sliding_window=4, max_window_layers=1),
    case("qwen3-body", "Qwen3Model", BASE, num_key_value_heads=1),
    case("deepseek-v2", _V2, DEEPSEEK, YARN_SCALED, topk_method="group_limited_greedy"),
    case("deepseek-v2-greedy", _V2, DEEPSEEK, q_lora_rank=None, topk_method="greedy",
         attention_bias=True, mlp_bias=True, routed_scaling_factor=1.7),
    case("deepseek-v2-shared", _V2, DEEPSEEK, n_shared_experts=2, first_k_dense_replace=0,
         norm_topk_prob=True),
    case("deepseek-v2-dense", "DeepseekV2Model", DEEPSEEK, first_k_dense_replace=2),
    case("deepseek-v3", _V3, DEEPSEEK, YARN_SCALED),
    case("deepseek-v3-half", _V3, DEEPSEEK, q_lora_rank=None, rope_interleave=False),
    case("deepseek-v3-free", _V3, DEEPSEEK, n_group=1, norm_topk_prob=False, attention_bias=True,
         routed_scaling_factor=1.7, first_k_dense_replace=0, n_shared_experts=3),
    case("deepseek-v3-dense", _V3, DEEPSEEK, first_k_dense_replace=2, tie_word_embeddings=True),
    case("deepseek-v3-body", "DeepseekV3Model", DEEPSEEK, num_attention_heads=5, num_key_value_heads=5),
    case("deepseek-v32-sparse", _V32, DEEPSEEK, INDEX, index_topk=5),
    case("deepseek-v32-whole", _V32, DEEPSEEK, INDEX, index_topk=64),
    case("deepseek-v32-yarn", _V32, DEEPSEEK, INDEX, YARN_SCALED, index_topk=3, n_group=1),
    case("deepseek-v32-body", "DeepseekV32Model", DEEPSEEK, INDEX, index_topk=1),
    case("gemma3", _GEMMA, KV, num_hidden_layers=3, sliding_window=4, sliding_window_pattern=3,
         head_dim=6, query_pre_attn_scalar=7),
    case("gemma3-capped", _GEMMA, KV, sliding_window=4, head_dim=6, final_logit_softcapping=1.5),
    case("gemma3-scaled", _GEMMA, KV, num_key_value_heads=1, sliding_window=5, head_dim=10,
         layer_types=[_FULL, _SLIDE], attention_bias=True, tie_word_embeddings=False,
         rope_parameters={_FULL: dict(rope_type="linear", factor=8.0, rope_theta=1e4),
                          _SLIDE: dict(rope_type="default", rope_theta=500.0)}),
    case("olmo2", _OLMO2, KV, num_key_value_heads=1),
    case("olmo2-yarn", _OLMO2, KV, YARN, attention_bias=True, tie_word_embeddings=True),
    case("olmo3", _OLMO3, KV, num_hidden_layers=5, num_key_value_heads=1, sliding_window=3),
    case("olmo3-yarn", _OLMO3, KV, layer_types=[_FULL, _SLIDE], sliding_window=4,
         rope_parameters={_FULL: YARN["rope_parameters"],
                          _SLIDE: dict(rope_type="default", rope_theta=1e4)}),
    case("phi3", _PHI3, KV, PHI, num_key_value_heads=1, sliding_window=4),
    case("phi3-partial", _PHI3, KV, PHI, rope_parameters=dict(
         rope_type="default", rope_theta=500.0, partial_rotary_factor=0.75)),
    case("phi3-short", _PHI3, KV, PHI, LONG, original_max_position_embeddings=16),
    case("phi3-long", _PHI3, KV, PHI, LONG, original_max_position_embeddings=3),
    case("gpt-oss", _OSS, KV, num_key_value_heads=1, num_hidden_layers=3, sliding_window=4,
         num_local_experts=5, num_experts_per_tok=3, head_dim=6),
    case("gpt-oss-plain", _OSS, KV, rope("default"), num_local_experts=3, num_experts_per_tok=1,
         head_dim=10, attention_bias=False, layer_types=[_FULL, _FULL], tie_word_embeddings=True),
    case("gpt-neox", _NEOX, BASE, hidden_size=48, eos_token_id=2),
    case("gpt-neox-sequential", _NEOX, BASE, rotary_pct=0.5, use_parallel_residual=False,
         attention_bias=False, hidden_act="gelu_new", tie_word_embeddings=True),
    case("qwen3-next", _NEXT, KV, DELTA, num_hidden_layers=4, num_key_value_heads=1),
    case("qwen3-next-dense", _NEXT, KV, DELTA, num_hidden_layers=3, mlp_only_layers=[1],
         layer_types=[_FULL, _LINEAR, _LINEAR], attention_bias=True, tie_word_embeddings=True,
         linear_num_value_heads=2, linear_conv_kernel_dim=1, norm_topk_prob=False, rms_norm_eps=1e-3,
         rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)),
    # transformers makes no cache for states alone.
    case("qwen3-next-states-alone", _NEXT, KV, DELTA, layer_types=[_LINEAR, _LINEAR],
         decoder_sparse_step=2, linear_num_key_heads=3, use_cache=False),
]  # fmt: skip

LABELLED = [
    case(f"{label.lower()}-{head}", f"{label}{head}", settings, num_labels=3, pad_token_id=0)
    for label, settings in {
        "GPT2": GPT, "Llama": BASE, "Mistral": KV, "Mixtral": KV, "Qwen2": KV, "Qwen3": KV,
        "DeepseekV2": DEEPSEEK, "DeepseekV3": DEEPSEEK,
    }.items()
    for head in ("ForSequenceClassification", "ForTokenClassification")
    if f"{label}{head}" != "DeepseekV2ForTokenClassification"
]  # fmt: skip

ENCODERS = [
    case(f"{family}-{head or 'body'}", f"{label}{head or 'Model'}", settings, num_labels=labels)
    for family, label, settings in (
        ("bert", "Bert", BASE),
        ("roberta", "Roberta", BASE),
        ("xlm-roberta", "XLMRoberta", BASE),
        ("distilbert", "DistilBert", DISTIL),
        ("albert", "Albert", ALBERT),
    )
    for head, labels in (
        ("", 2),
        ("ForMaskedLM", 2),
        ("ForSequenceClassification", 3),
        ("ForTokenClassification", 5),
        ("ForQuestionAnswering", 2),
    )
] + [
    case("bert-pretraining", "BertForPreTraining", BASE),
    case("bert-untied", "BertForMaskedLM", BASE, tie_word_embeddings=False),
    case("bert-relu", "BertForMaskedLM", BASE, hidden_act="relu", type_vocab_size=3),
    case("bert-gelu-new", "BertModel", BASE, hidden_act="gelu_new", layer_norm_eps=1e-3),
    case("bert-no-pooler", "BertModel", BASE, options={"add_pooling_layer": False}),
    case("bert-one-label", "BertForSequenceClassification", BASE, num_labels=1),
    case("roberta-untied", "RobertaForMaskedLM", BASE, tie_word_embeddings=False, type_vocab_size=1),
    case("roberta-pad-0", "RobertaForMaskedLM", BASE, pad_token_id=0),
    case("roberta-no-pooler", "RobertaModel", BASE, options={"add_pooling_layer": False}),
    case("xlm-roberta-one-type", "XLMRobertaForMaskedLM", BASE, type_vocab_size=1),
    case("distilbert-untied", "DistilBertForMaskedLM", DISTIL, tie_word_embeddings=False),
    case("distilbert-relu", "DistilBertForMaskedLM", DISTIL, activation="relu"),
    case("albert-groups", "AlbertForMaskedLM", ALBERT, num_hidden_layers=5, num_hidden_groups=2),
    case("albert-untied", "AlbertForMaskedLM", ALBERT, num_hidden_groups=3, hidden_act="relu",
         tie_word_embeddings=False),
    case("albert-inner", "AlbertForMaskedLM", ALBERT, num_hidden_layers=4, num_hidden_groups=2,
         inner_group_num=2),
    case("albert-inner-each", "AlbertForMaskedLM", ALBERT, num_hidden_groups=3, inner_group_num=2),
    case("albert-no-pooler", "AlbertModel", ALBERT, options={"add_pooling_layer": False}),
    case("modernbert", "ModernBertForMaskedLM", MODERN),
    case("modernbert-biases", "ModernBertForMaskedLM", MODERN, norm_bias=True, mlp_bias=True,
         attention_bias=True, classifier_bias=True, decoder_bias=False, local_attention=6,
         layer_types=[_SLIDE, _FULL, _SLIDE, _SLIDE], tie_word_embeddings=False),
    case("modernbert-body", "ModernBertModel", MODERN, global_attn_every_n_layers=2, norm_eps=1e-3,
         rope_parameters={_FULL: dict(rope_type="linear", factor=2.0, rope_theta=1e3),
                          _SLIDE: dict(rope_type="default", rope_theta=50.0)}),
    case("modernbert-first", "ModernBertForSequenceClassification", MODERN, num_labels=3),
    case("modernbert-tags", "ModernBertForTokenClassification", MODERN, num_labels=5),
    case("modernbert-answers", "ModernBertForQuestionAnswering", MODERN, classifier_bias=True),
    case("modernbert-mean", "ModernBertForSequenceClassification", MODERN, num_labels=3,
         classifier_pooling="mean", classifier_activation="silu", classifier_bias=True),
    case("distilbert-sines", "DistilBertModel", DISTIL, sinusoidal_pos_embds=True),
]  # fmt: skip

IMAGES = [
    case("vit", "ViTForImageClassification", IMAGE, num_labels=7, qkv_bias=False),
    case("vit-grey", "ViTForImageClassification", IMAGE, num_channels=1, hidden_act="relu"),
    case("vit-body", "ViTModel", IMAGE),
    case("vit-no-pooler", "ViTModel", IMAGE, options={"add_pooling_layer": False}),
    case("deit", "DeiTForImageClassification", IMAGE),
    case("deit-teacher", "DeiTForImageClassificationWithTeacher", IMAGE, num_labels=5),
    case("deit-body", "DeiTModel", IMAGE, layer_norm_eps=1e-3),
]

_T5, _BART, _MARIAN = "T5ForConditionalGeneration", "BartForConditionalGeneration", "MarianMTModel"
SEQ2SEQ = [
    case("t5", _T5, T5, num_decoder_layers=1),
    case("t5-v1.1", _T5, T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    case("t5-gated-silu", _T5, T5, feed_forward_proj="gated-silu", layer_norm_epsilon=1e-3),
    case("t5-buckets", _T5, T5, relative_attention_num_buckets=8, relative_attention_max_distance=10),
    case("bart", _BART, BART),
    case("bart-untied", _BART, BART, tie_word_embeddings=False, scale_embedding=True),
    case("bart-odd", _BART, BART, d_model=30, encoder_attention_heads=5, activation_function="relu"),
    case("marian", _MARIAN, MARIAN, scale_embedding=True, activation_function="swish"),
    case("marian-two-vocabularies", _MARIAN, MARIAN, decoder_vocab_size=44, pad_token_id=43,
         share_encoder_decoder_embeddings=False, decoder_start_token_id=43),
    case("marian-odd", _MARIAN, MARIAN, d_model=21, encoder_attention_heads=7,
         decoder_attention_heads=3),
    case("marian-untied", _MARIAN, MARIAN, tie_word_embeddings=False),
    case("t5-body", "T5Model", T5),
    case("marian-body", "MarianModel", MARIAN),
    case("bart-body", "BartModel", BART),
    case("bart-body-untied", "BartModel", BART, tie_word_embeddings=False),
]  # fmt: skip

# Sizes by their key, for what has no case above: each architecture in the table of families gets one of itself.
ODD: Settings = {
    **DELTA,
    **GPT,
    **DISTIL,
    **T5,
    **BART,
    **IMAGE,
    **LATENT,
    **EXPERTS,
    **INDEX,
    **BASE,
}
ODD |= dict(num_key_value_heads=1, head_dim=8, num_local_experts=4, num_experts=4, sliding_window=4)
ODD |= dict(full_attention_interval=2)
ODD |= dict(index_topk=5, first_k_dense_replace=1, topk_group=1, pad_token_id=0, num_labels=3)
HEADS = {name: head for family in FAMILIES.values() for name, head in family.heads.items()}


def _case_of(family: Family, architecture: str) -> Case:
    known = family.keys | {"bos_token_id", "eos_token_id", "pad_token_id", "num_labels"}
    return case(architecture, architecture, {key: ODD[key] for key in ODD if key in known})


# The files of cases/: CASES, sizes for ODD, and the names of those that KEPT has.
_KIN = [import_module(f"{cases.__name__}.{file.name}") for file in iter_modules(cases.__path__)]
for _kin in _KIN:
    ODD |= _kin.ODD
_WRITTEN = [*DECODERS, *LABELLED, *ENCODERS, *IMAGES, *SEQ2SEQ]
_WRITTEN += [each for kin in _KIN for each in kin.CASES]
_ALL = _WRITTEN + [
    _case_of(family, architecture)
    for family in FAMILIES.values()
    for architecture in family.heads
    if architecture not in {c.architecture for c in _WRITTEN}
]
CASES = {c.name: c for c in _ALL}
assert len(CASES) == len(_ALL)
# The first case of each family's first head.
ONE_PER_FAMILY = [
    next(c.name for c in _ALL if c.architecture == next(iter(family.heads)))
    for family in FAMILIES.values()
]
# What `make test` runs of a law over the families (tests/wide.py): those that differ in kind.
FEW = [
    *("gpt2", "llama", "gemma3", "gpt-oss", "deepseek-v32-sparse", "qwen3-next"),
    *("bert-ForMaskedLM", "albert-ForMaskedLM", "modernbert", "vit", "t5", "marian"),
]
# And of a law over all cases: each kind of head, a scaled rope, shared blocks, two vocabularies, and what the files of
# cases/ name.
KEPT = [
    *FEW,
    *(name for kin in _KIN for name in kin.KEPT),
    *("gpt2-body", "bert-body", "gpt2-ForSequenceClassification", "gpt2-ForTokenClassification"),
    *("bert-ForSequenceClassification", "bert-ForQuestionAnswering", "modernbert-mean"),
    *("llama-yarn", "phi3-long", "qwen2-layer-types", "albert-groups", "deit-teacher"),
    *("bart-untied", "marian-two-vocabularies"),
]

# --- a model of theirs beside its folder, and the same input for both ---------------------------------------------


@dataclass(frozen=True, eq=False)
class Peer:
    """A transformers model in memory, and the folder that it wrote."""

    case: Case
    model: Any
    folder: Path


def batch(config: Any, seed: int = 1) -> dict[str, Tensor]:
    """A ragged, right-padded batch in our words: what to give `model(**batch)`."""
    g = torch.Generator().manual_seed(seed)
    if hasattr(config, "vision_config"):
        images = batch(config.vision_config, seed)["ids"]
        return {**batch(config.text_config, seed), "images": images}
    if hasattr(config, "image_size"):
        size = (2, config.num_channels, config.image_size, config.image_size)
        return {"ids": torch.randn(size, generator=g)}
    vocab = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    words = torch.randint(3, min(vocab, 43), (3, 11), generator=g)
    lengths = torch.tensor([11, 4, 7])
    # SigLIP's texts are filled up: padding is text.
    if hasattr(config, "projection_size"):
        return {"ids": words}
    if not config.is_encoder_decoder:
        # RoBERTa counts positions by the padding id, a decoder's label is read before it
        if getattr(config, "pad_token_id", None) is not None:
            words = torch.where(real(lengths, 11), words, config.pad_token_id)
        return {"ids": words, "lengths": lengths}
    if hasattr(config, "num_mel_bins"):
        size = (3, config.num_mel_bins, 2 * config.max_source_positions)
        return {"ids": words, "lengths": lengths, "source": torch.randn(size, generator=g)}
    source = torch.randint(3, 43, (3, 9), generator=g)
    source_lengths = torch.tensor([5, 9, 3])
    return {"ids": words, "lengths": lengths, "source": source, "source_lengths": source_lengths}


def real(lengths: Tensor, size: int) -> Tensor:
    """Which places hold a token (b t)."""
    return torch.arange(size)[None] < lengths[:, None]


def theirs(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """What transformers answers to our batch: the head's output (or hidden states), and the pooled vector."""
    words = given["ids"]
    if "images" in given or (words.dim() == 2 and "lengths" not in given):
        mask = real(given["lengths"], 11).long() if "lengths" in given else None
        out = model(**pictures(given), input_ids=words, attention_mask=mask)
    elif "lengths" not in given:
        out = model(pixel_values=words)
    elif "source" in given and given["source"].is_floating_point():
        out = model(
            input_features=given["source"],
            decoder_input_ids=words,
            decoder_attention_mask=real(given["lengths"], 11).long(),
        )
    elif "source" in given:
        out = model(
            input_ids=given["source"],
            attention_mask=real(given["source_lengths"], 9).long(),
            decoder_input_ids=words,
            decoder_attention_mask=real(given["lengths"], 11).long(),
        )
    else:
        out = model(input_ids=words, attention_mask=real(given["lengths"], 11).long())
    if hasattr(out, "start_logits"):
        answer = torch.stack([out.start_logits, out.end_logits], -1)
    elif hasattr(out, "prediction_logits"):
        answer = out.prediction_logits
    else:
        names = ("logits", "logits_per_image", "text_embeds", "image_embeds", "last_hidden_state")
        answer = next(getattr(out, name) for name in names if hasattr(out, name))
    if isinstance(HEADS[type(model).__name__], Tag) and answer.dim() == 2:
        answer = answer[..., None]  # ELECTRA's one label
    return answer, getattr(out, "pooler_output", None)


def pictures(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"pixel_values": given["images"]} if "images" in given else {}


def at_tokens(answer: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The answer at real places only: what stands at padding means nothing."""
    if answer.dim() == 2 or "lengths" not in given:
        return answer
    return answer[real(given["lengths"], answer.shape[1])]


@torch.no_grad()
def error(model: Any, peer: Any) -> float:
    """The largest difference between our model and theirs at real tokens, pooled vectors included."""
    given = batch(peer.config)
    answer, pooled = theirs(peer, given)
    ours = model(**given)
    assert ours.shape == answer.shape
    worst = (at_tokens(ours, given) - at_tokens(answer, given)).abs().max().item()
    if pooled is not None:
        mine = model.pool(given["ids"], given.get("lengths"))
        worst = max(worst, (mine - pooled).abs().max().item())
    return worst


def tensors(folder: Path) -> dict[str, Tensor]:
    """All that the safetensors files of a folder hold."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return {written(name): x for name, x in found.items()}


def written(name: str) -> str:
    """Norms of ESM are stored by TensorFlow's words, which transformers reads as those of today; we write these."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )
