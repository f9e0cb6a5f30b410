"""What families of several kinds share: keys, names of tensors, and the frame of Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.family import Family
from regard.checkpoint.rules import ACTIVATIONS, Data, Group, Key, Keys, fixed
from regard.checkpoint.tensors import To, Weights
from regard.layers import LM, MLP, Classify, Norm, Tag
from regard.models import Tokens, TransformerConfig
from regard.position import Rope


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


def sizes(
    vocab: int, dim: int, layers: int, heads: int, ffn: int, context: int, **more: Any
) -> Data:
    """The keys of a preset."""
    body = dict(hidden_size=dim, num_hidden_layers=layers, num_attention_heads=heads)
    ends = dict(vocab_size=vocab, intermediate_size=ffn, max_position_embeddings=context)
    return body | ends | more


# Keys of the frame around attention and feed-forward.
FRAME_KEYS: Keys = dict(
    vocab_size=Key("embedding.vocab"), hidden_size=Key("tower.dim"), num_hidden_layers=Key("tower.layers"),
    max_position_embeddings=Key("max_len"), rms_norm_eps=Key("tower.norm.eps", 1e-6),
    tie_word_embeddings=Key("head.tied", False),
    classifier_dropout=rules.head_dropout(tag=("classifier_dropout", 0.1)), id2label=rules.LABELS,
    is_causal=rules.CAUSAL, **fixed(token_classification_bias=True, per_layer_config=None),
)  # fmt: skip
# Grouped-query attention with RoPE, a gated feed-forward.
KEYS: Keys = FRAME_KEYS | dict(
    num_attention_heads=Key("tower.attention.heads"),
    num_key_value_heads=Key("tower.attention.kv_heads", lambda hf: hf["num_attention_heads"]),
    head_dim=Key("tower.attention.head_dim", lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
    attention_dropout=Key("tower.attention.dropout", 0.0), rope_parameters=rules.ROPE,
    intermediate_size=Key("tower.ffn.ffn_dim"), hidden_act=Key("tower.ffn.activation", "silu", ACTIVATIONS),
)  # fmt: skip
EIGHT_KV = Key("tower.attention.kv_heads", 8, null=lambda hf: hf["num_attention_heads"])
BIASED = Key("tower.attention.{bias,out_bias}", False)
NORM_EPS = Key("tower.norm.eps", 1e-5)


def experts_by_step(key: str, default: int) -> Group:
    """Experts in every decoder_sparse_step-th layer but those of mlp_only_layers, where there are any: `key` says how
    many, `default` what it means where it is missing."""

    def sparse(theirs: Data, layer: int) -> bool:
        dense = theirs.get("mlp_only_layers") or []
        step = theirs.get("decoder_sparse_step", 1)
        return theirs.get(key, default) > 0 and layer not in dense and (layer + 1) % step == 0

    def write(kinds: list[str], _: Any, theirs: Data, said: bool) -> None:
        if not said:
            theirs["decoder_sparse_step"] = 1
            theirs["mlp_only_layers"] = [i for i, kind in enumerate(kinds) if kind == "dense"]

    more = ["mlp_only_layers", "decoder_sparse_step"]
    return rules.by_layer("ffn", "", ("dense", "sparse"), sparse, rules.is_moe, more, write)


# Rows of a layer.
NORMS = {"{input,post_attention}_layernorm.weight": "norm{1,3}.weight"}
ATTENTION = {
    "self_attn.{q,k,v,o}_proj.*": "attention.w{q,k,v,o}.*",
    "self_attn.{q,k}_norm.weight": "attention.{q,k}_norm.weight",
}
GATED = {"mlp.{gate,up,down}_proj.*": "ffn.{gate,up,down}.*"}
EXPERTS = {
    "mlp.gate.weight": "ffn.router.weight",
    "mlp.experts.{e}.{gate,up,down}_proj.weight": To("ffn.{gate,up,down}", tensors.STACKED),
}
MIXTRAL_EXPERTS = {
    "block_sparse_moe.gate.weight": "ffn.router.weight",
    "block_sparse_moe.experts.{e}.{w1,w2,w3}.weight": To("ffn.{gate,down,up}", tensors.STACKED),
}
# Norms of what attention and feed-forward add, before it is added.
ADDED_NORMS = {"post_{attention,feedforward}_layernorm.weight": "{attention,ffn}.add.norm.weight"}
SCORE = {"score.*": "head.out.*"}
HEAD_TENSORS = {
    "lm": {"lm_head.{weight,bias}": "head.{weight,bias}"},
    "classify": SCORE,
    "tag": SCORE,
    "answer": {"qa_outputs.*": "head.out.*"},
}


def mtp_tensors(layer: Weights, at: str, parts: Weights) -> Weights:
    """Of MTP layers: those of their blocks, each of which begins with `at`, and what stands around them."""
    return tensors.under(at, "mtp.tower.blocks.{i}.", layer) | dict(parts)


def mtp_behind(layer: Weights) -> Weights:
    """The same as DeepSeek stores them: layers behind the tower's, each with maps and norms of its own."""
    at = "model.layers.{n}."
    around = {
        at + "{enorm,hnorm,eh_proj}.weight": "mtp.{token_norms,state_norms,maps}.{i}.weight",
        at + "shared_head.norm.weight": "mtp.norms.{i}.weight",
    }
    return mtp_tensors(layer, at, around)


ROTARY = GQA(1, 1, 1, rope=Rope())
PLUS_ONE = Norm(1e-6, rms=True, plus_one=True)
SWIGLU = MLP(1, "silu", gated=True, bias=False)

# Of encoders.
BIASED_ATTENTION = GQA(1, bias=True, out_bias=True)
POST_NORM = Tower(
    1, 1, BIASED_ATTENTION, MLP(1, "gelu"), order="post", final_norm=False, causal=False
)
# Width, depth, heads and feed-forward, as nearly all call them.
SHAPE_KEYS: Keys = dict(
    hidden_size=Key("tower.dim"), num_hidden_layers=Key("tower.layers"),
    num_attention_heads=Key("tower.attention.heads"), intermediate_size=Key("tower.ffn.ffn_dim"),
)  # fmt: skip


def llama_like(
    name: str,
    heads: Data,
    attention: Any = ROTARY,
    ffn: Any = SWIGLU,
    *,
    frame: Keys = KEYS,
    keys: Mapping[str, rules.ConfigRule | None] | None = None,
    layer: Weights = NORMS | ATTENTION | GATED,
    scaled: bool = False,
    tower: Data | None = None,
    last_norm: str = "norm.weight",
    mtp_layer: Weights | None = None,
    **more: Any,
) -> Family:
    """A family with Llama's frame. Where layers differ, `attention` or `ffn` lists one config for each kind. `keys`:
    what is not as in `frame` (None: no such key); `layer`: its tensors; `scaled`: of the embedding; `tower`: what else
    is chosen; `last_norm`: their tensors of the norm at the end; `mtp_layer`: those of MTP layers."""
    kinds = next((len(part) for part in (attention, ffn) if isinstance(part, tuple)), 1)
    body = Tower(1, kinds, attention, ffn, **{"norm": Norm(1e-6, rms=True), **(tower or {})})
    config = {**frame, **(keys or {})}
    head_tensors = HEAD_TENSORS | {"lm": HEAD_TENSORS["lm"] | dict(mtp_layer or {})}
    return Family(
        name=name, base="model.", blank=TransformerConfig(Tokens(1, scaled=scaled), body, max_len=1),
        heads=heads, config={key: rule for key, rule in config.items() if rule is not None},
        tensors={
            "embed_tokens.weight": "embedding.weight", last_norm: f"tower.norm.{last_norm.rpartition('.')[2]}",
            "layers.{i}.": layer,
        },
        head_tensors=head_tensors, derived=(r".*rotary_emb\.inv_freq",), **more,
    )  # fmt: skip


def sliding(attention: GQA, **changes: Any) -> tuple[GQA, GQA]:
    """Attention of the layers that see all, and of those that slide."""
    return attention, replace(attention, window=1, **changes)
