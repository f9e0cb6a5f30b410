"""DeepSeek and its kin: latent attention, experts, the indexer of sparse attention."""

from __future__ import annotations

import copy

from regard.attention import DSA, MLA
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import (
    EXPERTS,
    FRAME_KEYS,
    GATED,
    NORM_EPS,
    NORMS,
    SWIGLU,
    decoder_heads,
    llama_like,
    mtp_behind,
    sizes,
)
from regard.checkpoint.rules import ACTIVATIONS, Data, Group, Key, Keys, fixed, get, put
from regard.checkpoint.tensors import To, Weights
from regard.models.mtp import MTP
from regard.moe import MoE
from regard.position import Rope

_MLA = MLA(1, 1, 1, 2, 1, rope=Rope(layout="interleaved"))
_EXPERTS_V3 = MoE(1, 1, 1, shared=1, score="sigmoid", corrected=True)


def _latent_keys(at: str, shared: int, gain: float) -> Keys:
    """`at`: where the MLA stands (inside DSA for V3.2); `shared`, `gain`: what a missing key means."""
    return FRAME_KEYS | dict(
        num_attention_heads=Key(f"{at}.heads"), kv_lora_rank=Key(f"{at}.latent"),
        q_lora_rank=Key(f"{at}.query_latent", 1536, null=None), qk_nope_head_dim=Key(f"{at}.head_dim"),
        qk_rope_head_dim=Key(f"{at}.rope_dim tower.attention.rope_dim"), v_head_dim=Key(f"{at}.value_dim"),
        attention_bias=Key(at + ".{bias,out_bias}", False), attention_dropout=Key(f"{at}.dropout", 0.0),
        rope_parameters=rules.rope_at(f"{at}.rope"), intermediate_size=Key("tower.ffn.0.ffn_dim"),
        hidden_act=Key("tower.ffn.activation", "silu", ACTIVATIONS),
        moe_intermediate_size=Key("tower.ffn.1.ffn_dim"), n_routed_experts=Key("tower.ffn.1.experts"),
        num_experts_per_tok=Key("tower.ffn.1.active"), n_shared_experts=Key("tower.ffn.1.shared", shared),
        routed_scaling_factor=Key("tower.ffn.1.gain", gain), **fixed(moe_layer_freq=1),
    )  # fmt: skip


def _read_turned_dim(theirs: Data, ours: Data) -> None:
    """transformers turns so many features of a head."""
    width = theirs.get("head_dim")
    turned = theirs.get("qk_rope_head_dim")
    if width is not None and width != turned:
        raise rules.wrong(f"head_dim is {width!r}; it must be qk_rope_head_dim, {turned!r}")


_SHARED_BIAS = Key("tower.ffn.0.bias tower.ffn.1.shared_bias", False)
_LATENT_INERT = """num_key_value_heads qk_head_dim ep_size aux_loss_alpha seq_aux"""
_COUNT = rules.mtp_count("num_nextn_predict_layers")
_V3: Keys = dict(
    norm_topk_prob=Key("tower.ffn.1.normalized", True, null=False), n_group=rules.expert_groups(None, (8, 4)),
    **fixed(scoring_func="sigmoid"), mlp_layer_types=rules.experts_by_layer(3),
    head_dim=Group(("head_dim",), _read_turned_dim, lambda *_: None), num_nextn_predict_layers=_COUNT,
)  # fmt: skip


def _latent_layer(at: str) -> Weights:
    low = f"{at}.w_dq.weight"
    return {
        **NORMS, **GATED, **EXPERTS, "self_attn.q_a_{proj,layernorm}.*": at + ".{w_dq,q_norm}.*",
        "self_attn.kv_a_{proj_with_mqa,layernorm}.*": at + ".{w_dkv,kv_norm}.*",
        "self_attn.{kv_b,o}_proj.*": at + ".{w_ukv,wo}.*",
        "self_attn.q_b_proj.weight": To(f"{at}.w_uq.weight", needs=low),
        "self_attn.q_proj.weight": To(f"{at}.w_uq.weight", unless=low),
        "mlp.gate.e_score_correction_bias": "ffn.correction",
        "mlp.shared_experts.{gate,up,down}_proj.*": "ffn.shared.{gate,up,down}.*",
    }  # fmt: skip


def _latent_sizes(mscale: float, experts: int, active: int, expert_dim: int) -> Data:
    rope = dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096)
    return dict(
        rope_parameters={**rope, "mscale": mscale, "mscale_all_dim": mscale},
        **dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        **dict(n_routed_experts=experts, num_experts_per_tok=active), moe_intermediate_size=expert_dim,
    )  # fmt: skip


_SIZES_V3 = sizes(129280, 7168, 61, 128, 18432, 163840) | _latent_sizes(1.0, 256, 8, 2048)
_LATENT_ALIASES = dict.fromkeys(("num_experts", "num_local_experts"), "n_routed_experts")
_LATENT_ALIASES |= dict(num_mtp_layers="num_nextn_predict_layers")
# MTP layers, where no language model reads them; with one, their copies of its table and head.
_NEXT_TOKEN_LAYER = (r"model\.layers\.{layers}\..*",)
DEEPSEEK_V2 = llama_like(
    "deepseek_v2", decoder_heads("DeepseekV2", tags=False), _MLA,
    (SWIGLU, MoE(1, 1, 1, shared=1, normalized=False)), frame=_latent_keys("tower.attention", 2, 1.0),
    keys=dict(
        mlp_bias=_SHARED_BIAS, n_group=rules.expert_groups("group_limited_greedy", (1, 1)),
        **fixed(scoring_func="softmax"), mlp_layer_types=rules.experts_by_layer(0),
    ),
    # Whatever norm_topk_prob says, transformers never normalises for V2.
    inert=f"{_LATENT_INERT} num_nextn_predict_layers head_dim norm_topk_prob",
    aliases=_LATENT_ALIASES, layer=_latent_layer("attention"),
    presets={
        "deepseek-v2-lite": sizes(102400, 2048, 27, 16, 10944, 163840)
        | _latent_sizes(0.707, 64, 6, 1408)
        | dict(q_lora_rank=None, first_k_dense_replace=1),
    },
)  # fmt: skip
_INTERLEAVED = {True: "interleaved", False: "half"}
DEEPSEEK_V3 = llama_like(
    "deepseek_v3", decoder_heads("DeepseekV3"), _MLA, (SWIGLU, _EXPERTS_V3),
    frame=_latent_keys("tower.attention", 1, 2.5),
    keys=_V3 | dict(rope_interleave=Key("tower.attention.rope.layout", True, _INTERLEAVED, False)),
    inert=_LATENT_INERT, aliases=_LATENT_ALIASES, layer=_latent_layer("attention"), carried=_NEXT_TOKEN_LAYER,
    mtp=MTP(), mtp_layer=mtp_behind(_latent_layer("attention")), presets={"deepseek-v3": _SIZES_V3},
)  # fmt: skip
_SPARSE_LAYER: Weights = {
    **_latent_layer("attention.attention"),
    "self_attn.indexer.{wq_b,wk,k_norm,weights_proj}.*": "attention.indexer.{wq,wk,k_norm,ww}.*",
}
DEEPSEEK_V32 = llama_like(
    "deepseek_v32", decoder_heads("DeepseekV32", labels=False), DSA(_MLA, 1, 2, 1, rope_dim=2),
    (SWIGLU, _EXPERTS_V3), frame=_latent_keys("tower.attention.attention", 1, 2.5),
    keys=dict(
        **_V3, index_n_heads=Key("tower.attention.index_heads"),
        index_head_dim=Key("tower.attention.index_dim"), index_topk=Key("tower.attention.topk"),
    ),
    # transformers' V3.2 has a key for biases, and none.
    inert=f"{_LATENT_INERT} layer_types mlp_bias", aliases=_LATENT_ALIASES,
    layer=_SPARSE_LAYER, mtp=MTP(), mtp_layer=mtp_behind(_SPARSE_LAYER),
    carried=_NEXT_TOKEN_LAYER,
    presets={"deepseek-v3.2": _SIZES_V3 | dict(index_n_heads=64, index_head_dim=128, index_topk=2048)},
)  # fmt: skip

# --- others that have it --------------------------------------------------------------------------------------------


def _read_indexers(theirs: Data, ours: Data) -> None:
    """A shared one is that of the layer before."""
    layers, kinds = theirs["num_hidden_layers"], theirs.get("indexer_types")
    pattern = theirs.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        kinds = [{"F": "full", "S": "shared"}.get(word, word) for word in pattern]
    if kinds is None:
        every, start = (max(theirs.get(key, default), low) for key, default, low in _SCHEDULE)
        kinds = ["shared" if max(i - start + 1, 0) % every else "full" for i in range(layers)]
    if kinds != ["full"] * layers:
        raise rules.wrong(
            f"indexer_types is {kinds}; Regard can only do 'full' in all {layers} layers"
        )


# How often a layer has an indexer of its own, and from which on.
_SCHEDULE = (("index_topk_freq", 1, 1), ("index_skip_topk_offset", 2, 0))
GLM_MOE_DSA = llama_like(
    "glm_moe_dsa", decoder_heads("GlmMoeDsa", labels=False), DSA(_MLA, 1, 2, 1, rope_dim=2, rope_layout="interleaved"),
    (SWIGLU, _EXPERTS_V3), frame=_latent_keys("tower.attention.attention", 1, 2.5),
    keys=_V3 | dict(
        rms_norm_eps=NORM_EPS, head_dim=None, n_group=rules.expert_groups(None, (1, 1)),
        q_lora_rank=Key("tower.attention.attention.query_latent", 2048),
        index_n_heads=Key("tower.attention.index_heads", 32), index_head_dim=Key("tower.attention.index_dim", 128),
        index_topk=Key("tower.attention.topk", 2048),
        indexer_types=Group(
            ("indexer_types", "index_topk_pattern", *(key for key, *_ in _SCHEDULE)), _read_indexers, lambda *_: None,
        ),
    ),
    inert=f"{_LATENT_INERT} layer_types mlp_bias head_dim", aliases=_LATENT_ALIASES,
    layer=_SPARSE_LAYER, mtp=MTP(), mtp_layer=mtp_behind(_SPARSE_LAYER),
    carried=_NEXT_TOKEN_LAYER,
)  # fmt: skip


def _mistral_rope(theirs: Data) -> Data:
    """Their rope_parameters, or what missing ones mean."""
    yarn = dict(
        rope_type="yarn", rope_theta=1e4, factor=128.0, original_max_position_embeddings=8192
    )
    yarn |= dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
    return dict(theirs.get("rope_parameters") or theirs.get("rope_scaling") or yarn)


def _read_mistral(theirs: Data, ours: Data) -> None:
    """The share that turns is that of the features that do; queries grow by llama_4_scaling_beta."""
    said = _mistral_rope(theirs)
    said.pop("max_position_embeddings", None)
    turned, plain = (theirs.get(f"qk_{part}_head_dim", 64) for part in ("rope", "nope"))
    share = said.pop("partial_rotary_factor", turned / (turned + plain))
    if share != turned / (turned + plain):
        both = f"qk_rope_head_dim is {turned!r}, qk_nope_head_dim is {plain!r}"
        raise rules.wrong(f"partial_rotary_factor is {share!r}, but {both}")
    beta, length = (
        said.pop("llama_4_scaling_beta", None),
        said.get("original_max_position_embeddings"),
    )
    if beta is not None and not length:
        raise rules.wrong(
            "rope_parameters.original_max_position_embeddings is missing beside llama_4_scaling_beta"
        )
    if said.get("rope_type", said.get("type")) in (None, "default", "linear"):
        said.pop("original_max_position_embeddings", None)
    _MISTRAL_ROPE.reader({**theirs, "rope_parameters": said, "rope_scaling": None}, ours)
    grows = None if beta is None else dict(length=length, scale=beta, offset=0, kind="temperature")
    put(ours, "tower.attention.temperature", grows)


def _write_mistral(ours: Data, theirs: Data) -> None:
    again = copy.deepcopy(ours)
    _read_mistral(theirs, again)
    if again == ours:
        return
    written: Data = {}
    _MISTRAL_ROPE.writer(ours, written)
    said = written.get("rope_parameters") or dict(rope_type="default", rope_theta=1e4)
    grows = get(ours, "tower.attention.temperature")
    if isinstance(grows, dict):
        said |= dict(
            llama_4_scaling_beta=grows["scale"], original_max_position_embeddings=grows["length"]
        )
    theirs.pop("rope_scaling", None)
    theirs["rope_parameters"] = said


_MISTRAL_ROPE = rules.rope_at("tower.attention.rope")
MISTRAL4 = llama_like(
    "mistral4", decoder_heads("Mistral4"), _MLA, (SWIGLU, MoE(1, 1, 1, shared=1, group_best=2)),
    frame=_latent_keys("tower.attention", 1, 1.0),
    keys=dict(
        q_lora_rank=Key("tower.attention.query_latent", 1024, null=None),
        num_experts_per_tok=Key("tower.ffn.1.active", 4), n_group=rules.expert_groups(None, (1, 1)),
        norm_topk_prob=Key("tower.ffn.1.normalized", True, null=False), mlp_layer_types=rules.experts_by_layer(0),
        rope_interleave=Key("tower.attention.rope.layout", True, _INTERLEAVED, False),
        rope_parameters=Group(_MISTRAL_ROPE.names, _read_mistral, _write_mistral),
    ),
    inert=f"{_LATENT_INERT} num_nextn_predict_layers head_dim", aliases=dict(num_local_experts="n_routed_experts"),
    layer={
        **{key: row for key, row in _latent_layer("attention").items() if "{e}" not in key},
        "mlp.experts.gate_up_proj": To("ffn.{gate,up}", tensors.GATE_UP), "mlp.experts.down_proj": "ffn.down",
    },
)  # fmt: skip
