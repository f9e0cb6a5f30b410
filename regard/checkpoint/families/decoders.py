"""Decoder-only families as data: GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3. (DeepSeek: deepseek.py.)"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint.families.keys import (
    ACTIVATIONS,
    CAUSAL,
    LABELS,
    ROPE,
    head_dropout,
    sliding_layers,
)
from regard.checkpoint.rules import (
    JOINED_TRANSPOSED,
    STACKED,
    TRANSPOSED,
    Data,
    Family,
    Fixed,
    Group,
    Key,
    Keys,
    To,
    block,
    need,
)
from regard.layers import LM, MLP, Classify, Norm, Tag
from regard.models import Tokens, TransformerConfig
from regard.models.start import Start
from regard.moe import MoE
from regard.position import Learned, Rope

# --- what most decoders share --------------------------------------------------------------------------------------


def decoder_heads(
    name: str, lm: str = "ForCausalLM", *, labels: bool = True, tags: bool = True
) -> Data:
    """Their classes: the language model, the bare body, a label of the whole at the last token, one of each token."""
    heads: Data = {f"{name}{lm}": LM(), f"{name}Model": None}
    if labels:
        heads[f"{name}ForSequenceClassification"] = Classify(2, None, "last", False)
    if labels and tags:
        heads[f"{name}ForTokenClassification"] = Tag(2)
    return heads


def decoder(attention: Any, ffn: Any, **choices: Any) -> TransformerConfig:
    """A blank of Llama's form. Where layers differ, `attention` or `ffn` lists one config of each kind."""
    kinds = next((len(part) for part in (attention, ffn) if isinstance(part, tuple)), 1)
    tower = Tower(1, kinds, attention, ffn, norm=Norm(1e-6, rms=True))
    return TransformerConfig(Tokens(1), replace(tower, **choices), max_len=1)


_TAG_DROPOUT = head_dropout(tag=("classifier_dropout", 0.1))
# Keys of the frame around attention and feed-forward.
FRAME_KEYS: Keys = dict(
    vocab_size=Key("embedding.vocab"),
    hidden_size=Key("tower.dim"),
    num_hidden_layers=Key("tower.layers"),
    max_position_embeddings=Key("max_len"),
    rms_norm_eps=Key("tower.norm.eps", 1e-6),
    tie_word_embeddings=Key("head.tied", False),
    classifier_dropout=_TAG_DROPOUT,
    id2label=LABELS,
    is_causal=CAUSAL,
    token_classification_bias=Fixed(True),
    per_layer_config=Fixed(None),
)
# Grouped-query attention with RoPE, a gated feed-forward.
KEYS: Keys = FRAME_KEYS | dict(
    num_attention_heads=Key("tower.attention.heads"),
    num_key_value_heads=Key("tower.attention.kv_heads", lambda hf: hf["num_attention_heads"]),
    head_dim=Key(
        "tower.attention.head_dim", lambda hf: hf["hidden_size"] // hf["num_attention_heads"]
    ),
    attention_dropout=Key("tower.attention.dropout", 0.0),
    rope_parameters=ROPE,
    intermediate_size=Key("tower.ffn.ffn_dim"),
    hidden_act=Key("tower.ffn.activation", "silu", ACTIVATIONS),
)
EIGHT_KV = Key("tower.attention.kv_heads", 8, null=lambda hf: hf["num_attention_heads"])
BIASED = Key("tower.attention.bias tower.attention.out_bias", False)

FRAME_TENSORS = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "tower.norm.weight",
    **block(
        "model.layers.{i}.",
        {
            "input_layernorm.weight": "norm1.weight",
            "post_attention_layernorm.weight": "norm3.weight",
        },
    ),
}
ATTENTION_TENSORS = block(
    "model.layers.{i}.self_attn.",
    {f"{x}_proj.*": f"attention.w{x}.*" for x in "qkvo"}
    | {f"{x}_norm.weight": f"attention.{x}_norm.weight" for x in "qk"},
)
MLP_TENSORS = block(
    "model.layers.{i}.mlp.", {f"{x}_proj.*": f"ffn.{x}.*" for x in ("gate", "up", "down")}
)
HEAD_TENSORS = {
    "lm": {"lm_head.weight": "head.weight"},
    "classify": {"score.*": "head.out.*"},
    "tag": {"score.*": "head.out.*"},
}

# --- the families -------------------------------------------------------------------------------------------------


def _write_end(ours: Data, theirs: Data) -> None:
    """What transformers takes for GPT-2's missing ids, 50256, would lie outside a smaller vocabulary."""
    if need(ours, "embedding.vocab") <= 50256:
        theirs.setdefault("bos_token_id", None)
        theirs.setdefault("eos_token_id", None)


GPT2 = Family(
    name="gpt2",
    base="transformer.",
    blank=TransformerConfig(
        Tokens(1, Learned(1)),
        Tower(1, 1, GQA(1, bias=True, out_bias=True), MLP(1, "gelu_tanh")),
        max_len=1,
    ),
    heads=decoder_heads("GPT2", "LMHeadModel"),
    config=dict(
        vocab_size=Key("embedding.vocab"),
        n_embd=Key("tower.dim"),
        n_layer=Key("tower.layers"),
        n_head=Key("tower.attention.heads"),
        n_positions=Key("max_len embedding.position.max_len"),
        n_inner=Key("tower.ffn.ffn_dim", lambda hf: 4 * hf["n_embd"]),
        activation_function=Key("tower.ffn.activation", "gelu_new", ACTIVATIONS),
        layer_norm_epsilon=Key("tower.norm.eps", 1e-5),
        tie_word_embeddings=Key("head.tied", True),
        id2label=LABELS,
        is_causal=CAUSAL,
        bos_token_id=Group(("bos_token_id", "eos_token_id"), lambda *_: None, _write_end),
        classifier_dropout=_TAG_DROPOUT,
        resid_pdrop=Key("tower.dropout", 0.1),
        embd_pdrop=Key("embedding.dropout", 0.1),
        attn_pdrop=Key("tower.attention.dropout", 0.1),
        scale_attn_weights=Fixed(True),
        scale_attn_by_inverse_layer_idx=Fixed(False),
        add_cross_attention=Fixed(False),
    ),
    inert="""n_ctx n_special predict_special_tokens reorder_and_upcast_attn summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj""",
    aliases=dict(
        hidden_size="n_embd",
        max_position_embeddings="n_positions",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
    ),
    tensors={
        "transformer.wte.weight": "embedding.weight",
        "transformer.wpe.weight": "embedding.position.weight",
        "transformer.ln_f.*": "tower.norm.*",
        **block(
            "transformer.h.{i}.",
            {
                "ln_1.*": "norm1.*",
                "ln_2.*": "norm3.*",
                "attn.c_attn.*": To(
                    "attention.wq.* attention.wk.* attention.wv.*", JOINED_TRANSPOSED
                ),
                "attn.c_proj.*": To("attention.wo.*", TRANSPOSED),
                "mlp.c_fc.*": To("ffn.up.*", TRANSPOSED),
                "mlp.c_proj.*": To("ffn.down.*", TRANSPOSED),
            },
        ),
    },
    head_tensors={**HEAD_TENSORS, "tag": {"classifier.*": "head.out.*"}},
    twins=(("lm_head.weight", ("transformer.wte.weight",), "head.tied"),),
    derived=(r".*\.attn\.(masked_)?bias",),
    start=Start("gpt2"),
)
_GQA, SWIGLU = GQA(1, 1, 1, rope=Rope()), MLP(1, "silu", gated=True, bias=False)
LLAMA = Family(
    name="llama",
    base="model.",
    blank=decoder(_GQA, SWIGLU),
    heads=decoder_heads("Llama"),
    config=KEYS | dict(attention_bias=BIASED, mlp_bias=Key("tower.ffn.bias", False)),
    tensors={**FRAME_TENSORS, **ATTENTION_TENSORS, **MLP_TENSORS},
    head_tensors=HEAD_TENSORS,
    twins=(("lm_head.weight", ("model.embed_tokens.weight",), "head.tied"),),
    derived=(r".*rotary_emb\.inv_freq",),
)
MISTRAL = replace(
    LLAMA,
    name="mistral",
    heads=decoder_heads("Mistral"),
    config=KEYS
    | dict(
        num_key_value_heads=EIGHT_KV,
        sliding_window=Key("tower.attention.window", 4096, null=None),
    ),
)
MIXTRAL = replace(
    LLAMA,
    name="mixtral",
    blank=decoder(replace(_GQA, rope=Rope(1e6)), MoE(1, 1, 1)),
    heads=decoder_heads("Mixtral"),
    config=KEYS
    | dict(
        rms_norm_eps=Key("tower.norm.eps", 1e-5),
        num_key_value_heads=EIGHT_KV,
        num_local_experts=Key("tower.ffn.experts", 8),
        num_experts_per_tok=Key("tower.ffn.active", 2),
        sliding_window=Key("tower.attention.window", None),
    ),
    inert="output_router_logits router_aux_loss_coef router_jitter_noise",
    aliases=dict(num_experts="num_local_experts"),
    tensors={
        **FRAME_TENSORS,
        **ATTENTION_TENSORS,
        **block(
            "model.layers.{i}.block_sparse_moe.",
            {
                "gate.weight": "ffn.router.weight",
                "experts.{e}.w1.weight": To("ffn.gate", STACKED),
                "experts.{e}.w2.weight": To("ffn.down", STACKED),
                "experts.{e}.w3.weight": To("ffn.up", STACKED),
            },
        ),
    },
)
# The last layers slide, where use_sliding_window is on.
_LAST_SLIDE = sliding_layers(
    lambda hf, layers: [i >= hf.get("max_window_layers", 28) for i in range(layers)],
    window=4096,
    switch="use_sliding_window",
    more="max_window_layers",
)


def _qwen(attention: GQA) -> TransformerConfig:
    return decoder((attention, replace(attention, window=1)), SWIGLU)


QWEN2 = replace(
    LLAMA,
    name="qwen2",
    blank=_qwen(replace(_GQA, bias=True)),
    heads=decoder_heads("Qwen2"),
    config=KEYS | dict(layer_types=_LAST_SLIDE),
)
QWEN3 = replace(
    LLAMA,
    name="qwen3",
    blank=_qwen(replace(_GQA, qk_norm=1e-6)),
    heads=decoder_heads("Qwen3"),
    config=KEYS
    | dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-6),
        head_dim=Key("tower.attention.head_dim", 128),
        attention_bias=BIASED,
        layer_types=_LAST_SLIDE,
    ),
)
