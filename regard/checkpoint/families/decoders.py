"""Decoder-only families as data: GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3. (DeepSeek: hf_deepseek.py.)"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint.families.config import (
    ACTIVATIONS,
    CAUSAL,
    LABELS,
    ROPE,
    WINDOWS,
    head_dropout,
)
from regard.checkpoint.rules import (
    JOINED_TRANSPOSED,
    STACKED,
    TRANSPOSED,
    Custom,
    Data,
    Family,
    Fixed,
    Inert,
    Key,
    need,
    rule,
)
from regard.layers import LM, MLP, Classify, Norm, Tag
from regard.models import Tokens, TransformerConfig
from regard.moe import MoE
from regard.position import Learned, Rope


def lm(*names: str) -> dict[str, Any]:
    body, head = names
    return {head: LM(), body: None}


def labelled(name: str, *, tag: bool = True) -> dict[str, Any]:
    """Their classes for labels: of the whole, at the last token, and of each token."""
    heads: dict[str, Any] = {f"{name}ForSequenceClassification": Classify(2, None, "last", False)}
    return {**heads, f"{name}ForTokenClassification": Tag(2)} if tag else heads


BODY = "tower.blocks.{i}."
_TIED = (("lm_head.weight", ("model.embed_tokens.weight",), "head.tied"),)
_LM_HEAD = {"lm": (rule("lm_head.weight", "head.weight"),)}
_SCORE = (rule("score.*", "head.out.*"),)
_HEADS = {**_LM_HEAD, "classify": _SCORE, "tag": _SCORE}
_LLAMA_ATTENTION = tuple(
    rule(f"model.layers.{{i}}.self_attn.{a}", f"{BODY}attention.{b}")
    for a, b in [
        ("q_proj.*", "wq.*"),
        ("k_proj.*", "wk.*"),
        ("v_proj.*", "wv.*"),
        ("o_proj.*", "wo.*"),
        ("q_norm.weight", "q_norm.weight"),
        ("k_norm.weight", "k_norm.weight"),
    ]
)
MLP_TENSORS = tuple(
    rule(f"model.layers.{{i}}.mlp.{a}_proj.*", f"{BODY}ffn.{a}.*") for a in ("gate", "up", "down")
)
FRAME = (
    rule("model.embed_tokens.weight", "embedding.weight"),
    rule("model.layers.{i}.input_layernorm.weight", BODY + "norm1.weight"),
    rule("model.layers.{i}.post_attention_layernorm.weight", BODY + "norm3.weight"),
    rule("model.norm.weight", "tower.norm.weight"),
)
TAG_DROPOUT = head_dropout(tag=("classifier_dropout", 0.1))
KEYS = (
    Key("vocab_size", "embedding.vocab"),
    Key("hidden_size", "tower.dim"),
    Key("num_hidden_layers", "tower.layers"),
    Key("max_position_embeddings", "max_len"),
    Key("rms_norm_eps", "tower.norm.eps", 1e-6),
    Key("tie_word_embeddings", "head.tied", False),
    TAG_DROPOUT,
    LABELS,
    CAUSAL,
    Fixed("token_classification_bias", (True,)),
    Fixed("per_layer_config", (None,)),
)


def _all_heads(hf: Any) -> Any:
    return hf["num_attention_heads"]


_LLAMA_HEADS = (
    Key("num_attention_heads", "tower.attention.heads"),
    Key("num_key_value_heads", "tower.attention.kv_heads", _all_heads),
    Key(
        "head_dim",
        "tower.attention.head_dim",
        lambda hf: hf["hidden_size"] // hf["num_attention_heads"],
    ),
    Key("attention_dropout", "tower.attention.dropout", 0.0),
    ROPE,
)
_GATED = (
    Key("intermediate_size", "tower.ffn.ffn_dim"),
    Key("hidden_act", "tower.ffn.activation", "silu", ACTIVATIONS),
)


_EIGHT_KV = Key("num_key_value_heads", "tower.attention.kv_heads", 8, null=_all_heads)


def _but(rules: tuple[Any, ...], *other: Key) -> tuple[Any, ...]:
    """`rules` with those of the same name replaced."""
    new = {key.name: key for key in other}
    return tuple(new.get(r.names[0], r) for r in rules)


def llama_like(attention: Any, ffn: Any) -> TransformerConfig:
    tower = Tower(1, 1, attention, ffn, norm=Norm(1e-6, rms=True))
    return TransformerConfig(Tokens(1), tower, max_len=1)


_GQA, SWIGLU = GQA(1, 1, 1, rope=Rope()), MLP(1, "silu", gated=True, bias=False)

LLAMA = Family(
    name="llama",
    base="model.",
    blank=llama_like(_GQA, SWIGLU),
    heads={**lm("LlamaModel", "LlamaForCausalLM"), **labelled("Llama")},
    config=(
        *KEYS,
        *_LLAMA_HEADS,
        *_GATED,
        Key("attention_bias", "tower.attention.bias", False, also=("tower.attention.out_bias",)),
        Key("mlp_bias", "tower.ffn.bias", False),
    ),
    tensors=(*FRAME, *_LLAMA_ATTENTION, *MLP_TENSORS),
    head_tensors=_HEADS,
    twins=_TIED,
    derived=(r".*rotary_emb\.inv_freq",),
)
MISTRAL = replace(
    LLAMA,
    name="mistral",
    heads={**lm("MistralModel", "MistralForCausalLM"), **labelled("Mistral")},
    config=(
        *KEYS,
        *_but(_LLAMA_HEADS, _EIGHT_KV),
        *_GATED,
        Key("sliding_window", "tower.attention.window", 4096, null=None),
    ),
)
QWEN2 = replace(
    LLAMA,
    name="qwen2",
    blank=llama_like(replace(_GQA, bias=True), SWIGLU),
    heads={**lm("Qwen2Model", "Qwen2ForCausalLM"), **labelled("Qwen2")},
    config=(*KEYS, *_LLAMA_HEADS, *_GATED, WINDOWS),
)
QWEN3 = replace(
    LLAMA,
    name="qwen3",
    blank=llama_like(replace(_GQA, qk_norm=1e-6), SWIGLU),
    heads={**lm("Qwen3Model", "Qwen3ForCausalLM"), **labelled("Qwen3")},
    config=(
        *_but(
            KEYS,
            Key("rms_norm_eps", "tower.norm.eps", 1e-6, also=("tower.attention.qk_norm",)),
        ),
        *_but(_LLAMA_HEADS, Key("head_dim", "tower.attention.head_dim", 128)),
        *_GATED,
        Key("attention_bias", "tower.attention.bias", False, also=("tower.attention.out_bias",)),
        WINDOWS,
    ),
)
MIXTRAL = replace(
    LLAMA,
    name="mixtral",
    aliases={"num_experts": "num_local_experts"},
    blank=llama_like(replace(_GQA, rope=Rope(1e6)), MoE(1, 1, 1)),
    heads={**lm("MixtralModel", "MixtralForCausalLM"), **labelled("Mixtral")},
    config=(
        *_but(KEYS, Key("rms_norm_eps", "tower.norm.eps", 1e-5)),
        *_but(_LLAMA_HEADS, _EIGHT_KV),
        *_GATED,
        Key("num_local_experts", "tower.ffn.experts", 8),
        Key("num_experts_per_tok", "tower.ffn.active", 2),
        Key("sliding_window", "tower.attention.window", None),
        Inert(("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")),
    ),
    tensors=(
        *FRAME,
        *_LLAMA_ATTENTION,
        rule("model.layers.{i}.block_sparse_moe.gate.weight", BODY + "ffn.router.weight"),
        rule("model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight", BODY + "ffn.gate", STACKED),
        rule("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight", BODY + "ffn.down", STACKED),
        rule("model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight", BODY + "ffn.up", STACKED),
    ),
)


def _write_end(ours: Data, theirs: Data) -> None:
    """What transformers takes for GPT-2's missing ids, 50256, would lie outside a smaller vocabulary."""
    if need(ours, "embedding.vocab") <= 50256:
        for key in END.names:
            theirs.setdefault(key, None)


END = Custom(("bos_token_id", "eos_token_id"), lambda theirs, ours: None, _write_end)

GPT2 = Family(
    name="gpt2",
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    base="transformer.",
    blank=TransformerConfig(
        Tokens(1, Learned(1)),
        Tower(1, 1, GQA(1, bias=True, out_bias=True), MLP(1, "gelu_tanh")),
        max_len=1,
    ),
    heads={**lm("GPT2Model", "GPT2LMHeadModel"), **labelled("GPT2")},
    config=(
        Key("vocab_size", "embedding.vocab"),
        Key("n_embd", "tower.dim"),
        Key("n_layer", "tower.layers"),
        Key("n_head", "tower.attention.heads"),
        Key("n_positions", "max_len", also=("embedding.position.max_len",)),
        Key("n_inner", "tower.ffn.ffn_dim", lambda hf: 4 * hf["n_embd"]),
        Key("activation_function", "tower.ffn.activation", "gelu_new", ACTIVATIONS),
        Key("layer_norm_epsilon", "tower.norm.eps", 1e-5),
        Key("tie_word_embeddings", "head.tied", True),
        LABELS,
        CAUSAL,
        END,
        TAG_DROPOUT,
        Key("resid_pdrop", "tower.dropout", 0.1),
        Key("embd_pdrop", "embedding.dropout", 0.1),
        Key("attn_pdrop", "tower.attention.dropout", 0.1),
        Fixed("scale_attn_weights", (True,)),
        Fixed("scale_attn_by_inverse_layer_idx", (False,)),
        Fixed("add_cross_attention", (False,)),
        Inert(
            (
                "n_ctx",
                "n_special",
                "predict_special_tokens",
                "reorder_and_upcast_attn",
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
            )
        ),
    ),
    tensors=(
        rule("transformer.wte.weight", "embedding.weight"),
        rule("transformer.wpe.weight", "embedding.position.weight"),
        rule("transformer.h.{i}.ln_1.*", BODY + "norm1.*"),
        rule("transformer.h.{i}.ln_2.*", BODY + "norm3.*"),
        rule(
            "transformer.h.{i}.attn.c_attn.*",
            tuple(f"{BODY}attention.{w}.*" for w in ("wq", "wk", "wv")),
            JOINED_TRANSPOSED,
        ),
        rule("transformer.h.{i}.attn.c_proj.*", BODY + "attention.wo.*", TRANSPOSED),
        rule("transformer.h.{i}.mlp.c_fc.*", BODY + "ffn.up.*", TRANSPOSED),
        rule("transformer.h.{i}.mlp.c_proj.*", BODY + "ffn.down.*", TRANSPOSED),
        rule("transformer.ln_f.*", "tower.norm.*"),
    ),
    head_tensors={**_HEADS, "tag": (rule("classifier.*", "head.out.*"),)},
    twins=(("lm_head.weight", ("transformer.wte.weight",), "head.tied"),),
    derived=(r".*\.attn\.(masked_)?bias",),
)
