"""Layers of a recurrent state between layers of attention."""

from __future__ import annotations

import math
from dataclasses import replace

from regard.attention import GQA, MLA, SSD, DeltaRule
from regard.block import Tower
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import (
    BIASED,
    EXPERTS,
    FRAME_KEYS,
    GATED,
    NORMS,
    PLUS_ONE,
    SWIGLU,
    decoder_heads,
    experts_by_step,
    llama_like,
    mtp_tensors,
    sizes,
)
from regard.checkpoint.family import Family
from regard.checkpoint.multimodal import Multimodal
from regard.checkpoint.rules import Data, Group, Key, Keys, fixed
from regard.checkpoint.tensors import To, Weights
from regard.layers import LM, Classify, Norm
from regard.models import Tokens, TransformerConfig
from regard.models.init import Start
from regard.models.mtp import MTP
from regard.moe import MoE
from regard.position import Rope

# What the layers of attention have, and the others do not.
_GATE = "attention.wg.weight"
_BY_KEY_HEAD = tensors.by_head("delta", "key_heads")
_QWEN_MIXED = (
    GQA(1, 1, 1, rope=Rope(partial=0.25), qk_norm=1e-6, qk_norm_plus_one=True, gated=True),
    DeltaRule(1, 1, 1, 1),
)
_QWEN_EXPERTS = MoE(1, 1, 1, shared=1, shared_dim=1, shared_gated=True)
# Sizes of the delta rule.
_DELTA_KEYS: Keys = dict(
    linear_num_key_heads=Key("tower.attention.key_heads", 16),
    linear_num_value_heads=Key("tower.attention.value_heads", 32),
    linear_key_head_dim=Key("tower.attention.key_dim", 128),
    linear_value_head_dim=Key("tower.attention.1.value_dim", 128),
    linear_conv_kernel_dim=Key("tower.attention.conv", 4),
)  # fmt: skip
_WORDS = ("full_attention", "linear_attention")


def _is_delta(attention: Data) -> bool:
    return attention["kind"] == "delta"


def _qwen_keys(kv_heads: int, idle: str = "") -> Keys:
    """`kv_heads`: what a missing key means; `idle`: as of `rope_at`."""
    return _DELTA_KEYS | dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm tower.attention.eps", 1e-6),
        num_key_value_heads=Key("tower.attention.kv_heads", kv_heads),
        head_dim=Key("tower.attention.head_dim", 256),
        # A recurrent state reads from left to right.
        attention_bias=BIASED, is_causal=rules.Fixed(True, null=False),
        rope_parameters=rules.rope_at(
            "tower.attention.rope", share="partial_rotary_factor", idle=idle, partial_rotary_factor=0.25,
        ),
        layer_types=rules.by_layer(
            "attention", "layer_types", _WORDS, lambda hf, i: (i + 1) % hf.get("full_attention_interval", 4) > 0,
            _is_delta, ["full_attention_interval"],
        ),
        # The convolution's too.
        **fixed(hidden_act="silu"),
    )  # fmt: skip


def _expert_keys(at: str, experts: int, active: int) -> Keys:
    """`at`: where they stand; what missing keys mean."""
    return dict(
        moe_intermediate_size=Key(f"{at}.ffn_dim", 512), num_experts=Key(f"{at}.experts", experts),
        num_experts_per_tok=Key(f"{at}.active", active),
        shared_expert_intermediate_size=Key(f"{at}.shared_dim", 512),
    )  # fmt: skip


_QWEN_ATTENTION: Weights = {
    "self_attn.q_proj.*": To("attention.w{q,g}.*", tensors.by_head("gqa", "heads"), needs=_GATE),
    "self_attn.{k,v,o}_proj.*": To("attention.w{k,v,o}.*", needs=_GATE),
    "self_attn.{q,k}_norm.weight": "attention.{q,k}_norm.weight",
}
_LINEAR: Weights = {
    "linear_attn.conv1d.weight": To("attention.taps", tensors.TAPS),
    "linear_attn.{A_log,dt_bias,norm.weight}": "attention.{a_log,dt_bias,norm.weight}",
    "linear_attn.out_proj.weight": To("attention.wo.weight", unless=_GATE),
}
_SHARED_EXPERT: Weights = {
    "mlp.shared_expert.{gate,up,down}_proj.weight": "ffn.shared.{gate,up,down}.weight",
    "mlp.shared_expert_gate.weight": "ffn.shared_gate.weight",
}
_TAPS_APART: dict[str, Weights] = {
    at: {" ".join(f"{at}{part}_conv1d.weight" for part in "qkv"): To("attention.taps", tensors.TAPS_APART)}
    for at in ("linear_attn.", "self_attn.")
}  # fmt: skip
# MTP layers, where no language model reads them.
_MORE = (r"mtp\..*",)
_MTP_AROUND: Weights = {
    "mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc,norm}.weight":
    "mtp.{token_norms,state_norms,maps,norms}.0.weight",
}  # fmt: skip


def _mtp(layer: Weights) -> Weights:
    return mtp_tensors(layer, "mtp.layers.{i}.", _MTP_AROUND)


_QWEN_NEXT_LAYER: Weights = {
    **NORMS, **GATED, **EXPERTS, **_QWEN_ATTENTION, **_LINEAR, **_SHARED_EXPERT,
    "linear_attn.in_proj_qkvz.weight": To("attention.w{q,k,v,z}.weight", _BY_KEY_HEAD, unless=_GATE),
    "linear_attn.in_proj_ba.weight": To("attention.w{b,a}.weight", _BY_KEY_HEAD),
}  # fmt: skip
QWEN3_NEXT = llama_like(
    "qwen3_next", decoder_heads("Qwen3Next"), _QWEN_MIXED, (SWIGLU, _QWEN_EXPERTS), tower=dict(norm=PLUS_ONE),
    keys=dict(
        **_qwen_keys(2), **_expert_keys("tower.ffn.1", 512, 10),
        intermediate_size=Key("tower.ffn.0.ffn_dim", 5632), norm_topk_prob=Key("tower.ffn.1.normalized", True),
        mlp_only_layers=experts_by_step("num_experts", 512),
        num_nextn_predict_layers=rules.mtp_count("num_nextn_predict_layers"),
    ),
    inert="output_router_logits router_aux_loss_coef",
    layer=_QWEN_NEXT_LAYER, carried=_MORE, mtp=MTP(shared=True), mtp_layer=_mtp(_QWEN_NEXT_LAYER),
    presets={"qwen3-next-80b": sizes(151936, 2048, 48, 16, 5632, 262144, rope_theta=10000000.0)},
)  # fmt: skip

# --- Qwen3.5: what Qwen3-Next has, its projections stored apart -----------------------------------------------------

# How positions of images are woven into those of text, which are plain where there are no images.
_IMAGE_PLACES = "mrope_section mrope_interleaved"
_QWEN35_COUNT: Keys = dict(mtp_num_hidden_layers=rules.mtp_count("mtp_num_hidden_layers"))
_QWEN35_LAYER: Weights = {
    **NORMS, **_QWEN_ATTENTION, **_LINEAR,
    "linear_attn.in_proj_qkv.weight": To("attention.w{q,k,v}.weight", tensors.JOINED, unless=_GATE),
    "linear_attn.in_proj_{z,b,a}.weight": "attention.w{z,b,a}.weight",
}  # fmt: skip
QWEN3_5 = llama_like(
    "qwen3_5_text",
    {"Qwen3_5ForCausalLM": LM(), "Qwen3_5TextModel": None,
     "Qwen3_5TextForSequenceClassification": Classify(2, None, "last", False)},
    _QWEN_MIXED, tower=dict(norm=PLUS_ONE), keys=_qwen_keys(4, _IMAGE_PLACES) | _QWEN35_COUNT,
    layer={**_QWEN35_LAYER, **GATED}, carried=_MORE,
    mtp=MTP(shared=True), mtp_layer=_mtp({**_QWEN35_LAYER, **GATED}), inert="mtp_use_dedicated_embeddings",
)  # fmt: skip
QWEN3_5_MOE = llama_like(
    "qwen3_5_moe_text", {"Qwen3_5MoeForCausalLM": LM(), "Qwen3_5MoeTextModel": None},
    _QWEN_MIXED, _QWEN_EXPERTS, tower=dict(norm=PLUS_ONE),
    keys={
        **_qwen_keys(2, _IMAGE_PLACES), **_expert_keys("tower.ffn", 256, 8), **_QWEN35_COUNT,
        "intermediate_size": None,
    },
    inert="output_router_logits router_aux_loss_coef mtp_use_dedicated_embeddings",
    layer={**_QWEN35_LAYER, **EXPERTS, **_SHARED_EXPERT}, carried=_MORE, mtp=MTP(shared=True),
    mtp_layer=_mtp({**_QWEN35_LAYER, **EXPERTS, **_SHARED_EXPERT}),
)  # fmt: skip

QWEN3_5_PICTURES = Multimodal("qwen3_5", "qwen3_5_text")
QWEN3_5_MOE_PICTURES = Multimodal("qwen3_5_moe", "qwen3_5_moe_text")

# --- OLMo Hybrid: attention of OLMo 3 that needs no positions, and norms that stand where a layer's kind has them ---


def _rope_or_none(at: str) -> Group:
    """The RoPE at a place of ours; a null for its base means that there is none."""
    group = rules.rope_at(at)

    def none(theirs: Data) -> bool:
        said = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
        return said.get("rope_theta", theirs.get("rope_theta", 0)) is None

    def read(theirs: Data, ours: Data) -> None:
        if none(theirs):
            rules.put(ours, at, None)
        else:
            group.reader(theirs, ours)

    def write(ours: Data, theirs: Data) -> None:
        if rules.get(ours, at) is not None:
            group.writer(ours, theirs)
        elif not none(theirs):
            theirs["rope_parameters"] = {"rope_theta": None, "rope_type": "default"}

    return replace(group, reader=read, writer=write)


def _read_orders(_: Data, ours: Data) -> None:
    """Layers of a state have norms before their parts, those of attention after them."""
    each = ours["tower"]["attention"]
    kinds = [_is_delta(one) for one in (each if isinstance(each, list) else [each])]
    orders = ["pre" if delta else "inner" for delta in kinds]
    ours["tower"]["order"] = orders if len(set(orders)) > 1 else orders[0]


def _their_heads(hf: Data) -> int:
    return hf["num_attention_heads"]


def _olmo_key_dim(hf: Data) -> int:
    heads = hf.get("linear_num_key_heads")
    return int(0.75 * hf["hidden_size"] / (_their_heads(hf) if heads is None else heads))


def _olmo_value_dim(hf: Data) -> int:
    width = hf.get("linear_key_head_dim")
    return 2 * (_olmo_key_dim(hf) if width is None else width)


def _olmo_linear(hf: Data, layer: int) -> bool:
    last = hf.get("num_hidden_layers", 0) - 1
    return layer % 4 < 3 and not (layer == last < 3)


OLMO_HYBRID = llama_like(
    "olmo_hybrid", decoder_heads("OlmoHybrid", labels=False),
    (GQA(1, 1, 1, rope=Rope(wide=True), qk_norm=1e-6, qk_norm_whole=True),
     DeltaRule(1, 1, 1, 1, eps=1e-5, reach=2.0, steps=(1e-3, 0.1))),
    keys=dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-6), attention_bias=BIASED,
        pad_token_id=rules.ids_below(100277, "pad_token_id", "eos_token_id"),
        # The convolution's too.
        **fixed(hidden_act="silu"), is_causal=rules.Fixed(True, null=False),
        rope_parameters=_rope_or_none("tower.attention.0.rope"),
        linear_num_key_heads=Key("tower.attention.key_heads", _their_heads),
        linear_num_value_heads=Key("tower.attention.value_heads", _their_heads),
        linear_key_head_dim=Key("tower.attention.key_dim", _olmo_key_dim),
        linear_value_head_dim=Key("tower.attention.1.value_dim", _olmo_value_dim),
        linear_conv_kernel_dim=Key("tower.attention.conv", 4),
        linear_allow_neg_eigval=Key("tower.attention.reach", True, {True: 2.0, False: 1.0}),
        layer_types=rules.by_layer("attention", "layer_types", _WORDS, _olmo_linear, _is_delta),
        order=Group(("order",), _read_orders, lambda *_: None, last=True),
    ),
    # How new layers start.
    inert="linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor",
    layer={
        **GATED, "attention_layer_norm.weight": "norm1.weight", "feedforward_layer_norm.weight": "norm3.weight",
        "feedforward_layer_norm.*": "attention.add.norm.*", "post_feedforward_layernorm.weight": "ffn.add.norm.weight",
        "self_attn.{q,k}_norm.weight": "attention.{q,k}_norm.weight",
        "self_attn.{q,k,v,o}_proj.*": To("attention.w{q,k,v,o}.*", needs="attention.q_norm.weight"),
        "linear_attn.{q,k,v,o}_proj.weight": To("attention.w{q,k,v,o}.weight", unless="attention.q_norm.weight"),
        "linear_attn.{a,b,g}_proj.weight": "attention.w{a,b,z}.weight", **_TAPS_APART["linear_attn."],
        "linear_attn.{A_log,dt_bias,o_norm.weight}": "attention.{a_log,dt_bias,norm.weight}",
    },
    # The names of their code.
    spellings={
        r"\.input_layernorm\.": ".attention_layer_norm.",
        r"\.post_attention_layernorm\.": ".feedforward_layer_norm.",
    },
    presets={"olmo-hybrid-7b": sizes(100352, 3840, 32, 30, 11008, 65536, rope_theta=None)},
)  # fmt: skip

# --- Kimi Linear: a decay for every channel, latent attention without positions, experts ----------------------------

# Their older keys for the delta rule, inside linear_attn_config.
_KIMI_NESTED = dict(
    linear_head_dim="head_dim",
    linear_num_heads="num_heads",
    linear_conv_kernel_dim="short_conv_kernel_size",
)
_KIMI_PLACES = dict(
    linear_head_dim="tower.attention.1.{key_dim,value_dim,rank}",
    linear_num_heads="tower.attention.1.{key_heads,value_heads}", linear_conv_kernel_dim="tower.attention.1.conv",
)  # fmt: skip
_KIMI_MISSING = dict(linear_head_dim=128, linear_num_heads=32, linear_conv_kernel_dim=4)


def _nested(theirs: Data) -> Data:
    given = theirs.get("linear_attn_config") or {}
    if not isinstance(given, dict):
        raise rules.wrong(f"linear_attn_config is {given!r}; it must be an object")
    return given


def _kimi_said(theirs: Data) -> Data:
    """What they say of the delta rule: linear_attn_config before the keys."""
    nested = _nested(theirs)
    keys = {key: theirs.get(key, default) for key, default in _KIMI_MISSING.items()}
    return {key: nested.get(_KIMI_NESTED[key], value) for key, value in keys.items()}


def _read_kimi_delta(theirs: Data, ours: Data) -> None:
    for key, value in _kimi_said(theirs).items():
        for place in tensors.choices(_KIMI_PLACES[key]):
            rules.put(ours, place, value)


def _write_kimi_delta(ours: Data, theirs: Data) -> None:
    if ours["tower"]["attention"][1] is None:
        return
    for key, said in _kimi_said(theirs).items():
        value = rules.get(ours, tensors.choices(_KIMI_PLACES[key])[0])
        if value != said:
            theirs[key] = value
            theirs["linear_attn_config"] = {**_nested(theirs), _KIMI_NESTED[key]: value}


def _kimi_linear(hf: Data, layer: int) -> bool:
    nested = _nested(hf)
    if "full_attn_layers" in nested and "kda_layers" in nested:
        # Counted from 1.
        return layer + 1 in nested["kda_layers"]
    return layer == 0 or layer % 4 > 0


_KIMI_AT = "tower.attention.0"
_KIMI_SIZES = sizes(163840, 2304, 27, 32, 9216, 0, model_max_length=1048576)
del _KIMI_SIZES["max_position_embeddings"]
_LOW = "attention.w_dq.weight"
KIMI_LINEAR = llama_like(
    "kimi_linear", decoder_heads("KimiLinear", labels=False),
    (MLA(1, 1, 1, 2, 1),
     DeltaRule(1, 1, 1, 1, eps=1e-5, channels=True, rank=1, gate="sigmoid", steps=(1e-3, 0.1))),
    (SWIGLU, MoE(1, 1, 1, shared=1, score="sigmoid", corrected=True)),
    frame=FRAME_KEYS,
    keys=dict(
        max_position_embeddings=None, model_max_length=Key("max_len", 1048576),
        rms_norm_eps=Key("tower.norm.eps tower.attention.eps", 1e-5), is_causal=rules.Fixed(True, null=False),
        pad_token_id=rules.ids_below(163839, "pad_token_id", "bos_token_id", "eos_token_id"),
        num_attention_heads=Key(f"{_KIMI_AT}.heads"), kv_lora_rank=Key(f"{_KIMI_AT}.latent", 512),
        q_lora_rank=Key(f"{_KIMI_AT}.query_latent", None), qk_nope_head_dim=Key(f"{_KIMI_AT}.head_dim", 128),
        qk_rope_head_dim=Key(f"{_KIMI_AT}.rope_dim", 64), v_head_dim=Key(f"{_KIMI_AT}.value_dim", 128),
        attention_bias=Key(_KIMI_AT + ".{bias,out_bias}", False),
        attention_dropout=Key(f"{_KIMI_AT}.dropout", 0.0),
        linear_attn_config=Group(("linear_attn_config", *_KIMI_PLACES), _read_kimi_delta, _write_kimi_delta),
        layer_types=rules.by_layer("attention", "layer_types", _WORDS, _kimi_linear, _is_delta),
        intermediate_size=Key("tower.ffn.0.ffn_dim"), moe_intermediate_size=Key("tower.ffn.1.ffn_dim", 1024),
        num_experts=Key("tower.ffn.1.experts", 256), num_experts_per_token=Key("tower.ffn.1.active", 8),
        num_shared_experts=Key("tower.ffn.1.shared", 1), routed_scaling_factor=Key("tower.ffn.1.gain", 2.446),
        moe_renormalize=Key("tower.ffn.1.normalized", True, null=False),
        num_expert_group=Key("tower.ffn.1.groups", 1), topk_group=Key("tower.ffn.1.active_groups", 1),
        mlp_layer_types=rules.by_layer(
            "ffn", "mlp_layer_types", ("dense", "sparse"),
            lambda hf, i: i >= hf.get("first_k_dense_replace", 1), rules.is_moe, ["first_k_dense_replace"],
        ),
        **fixed(hidden_act="silu", moe_layer_freq=1, mla_use_nope=True, moe_router_activation_func="sigmoid"),
    ),
    # Keys that their code had once, and that say nothing now.
    inert="""num_key_value_heads pretraining_tp qk_head_dim head_dim rope_theta rope_scaling rope_parameters
    use_grouped_topk num_nextn_predict_layers""",
    aliases=dict(
        max_position_embeddings="model_max_length", norm_topk_prob="moe_renormalize", n_group="num_expert_group",
        num_local_experts="num_experts", num_experts_per_tok="num_experts_per_token",
        n_shared_experts="num_shared_experts",
    ),
    layer={
        **NORMS, "self_attn.{q,k,v}_proj.weight": "attention.w{q,k,v}.weight", "self_attn.o_proj.*": "attention.wo.*",
        "self_attn.b_proj.weight": "attention.wb.weight",
        "self_attn.{f,g}_a_proj.weight": "attention.low_{a,z}.weight",
        "self_attn.{f,g}_b_proj.weight": "attention.w{a,z}.weight",
        "self_attn.A_log": To("attention.a_log", tensors.BY_HEAD),
        "self_attn.{dt_bias,o_norm.weight}": "attention.{dt_bias,norm.weight}", **_TAPS_APART["self_attn."],
        "self_attn.q_a_{proj,layernorm}.*": "attention.{w_dq,q_norm}.*",
        "self_attn.kv_a_{proj_with_mqa,layernorm}.*": "attention.{w_dkv,kv_norm}.*",
        "self_attn.kv_b_proj.weight": "attention.w_ukv.weight",
        "self_attn.q_b_proj.weight": To("attention.w_uq.weight", needs=_LOW),
        "self_attn.q_proj.*": To("attention.w_uq.*", unless=_LOW),
        "block_sparse_moe.{gate,up,down}_proj.*": "ffn.{gate,up,down}.*",
        "block_sparse_moe.experts.{e}.{w1,w3,w2}.weight": To("ffn.{gate,up,down}", tensors.STACKED),
        "block_sparse_moe.gate.{weight,e_score_correction_bias}": "ffn.{router.weight,correction}",
        "block_sparse_moe.shared_experts.{gate,up,down}_proj.*": "ffn.shared.{gate,up,down}.*",
    },
    # Dense layers among the experts.
    spellings={r"\.mlp\.": ".block_sparse_moe."},
    modules={
        ".block_sparse_moe.": ".mlp.", "self_attn.f_": "self_attn.forget_gate.f_",
    },
    presets={"kimi-linear-48b": _KIMI_SIZES},
)  # fmt: skip

# --- Mamba 2: states alone, in blocks without a feed-forward --------------------------------------------------------


def _check_expand(theirs: Data, _: Data) -> None:
    """transformers makes the heads of expand * hidden_size numbers."""
    wide, each = (
        theirs.get("expand", 2) * theirs.get("hidden_size", 4096),
        theirs.get("head_dim", 64),
    )
    if wide != theirs.get("num_heads", 128) * each:
        raise rules.wrong(f"expand * hidden_size is {wide}; it must be num_heads * head_dim")


def _write_expand(ours: Data, theirs: Data) -> None:
    if rules.need(ours, "tower.attention.kind") != "ssd":
        raise rules.wrong("a mamba2 model has states alone")
    dim, *both = (
        rules.need(ours, f"tower.{at}") for at in ("dim", "attention.heads", "attention.head_dim")
    )
    wide = math.prod(both)
    if wide % dim:
        raise rules.wrong(f"heads * head_dim is {wide}; it must be a multiple of dim={dim}")
    if theirs.get("expand", 2) != wide // dim:
        theirs["expand"] = wide // dim


def _limit(theirs: Data) -> tuple[float, float]:
    """The steps between which they are, as numbers or as JSON writes what is endless."""
    given = theirs.get("time_step_limit") or (0.0, math.inf)
    least, most = (float(x["__float__"]) if isinstance(x, dict) else float(x) for x in given)
    return least, most


def _read_limit(theirs: Data, ours: Data) -> None:
    least, most = _limit(theirs)
    rules.put(ours, "tower.attention.least", least)
    rules.put(ours, "tower.attention.most", None if most == math.inf else most)


def _write_limit(ours: Data, theirs: Data) -> None:
    least, most = (rules.get(ours, f"tower.attention.{end}") for end in ("least", "most"))
    wanted = (least, math.inf if most is None else most)
    if wanted != _limit(theirs):
        theirs["time_step_limit"] = list(wanted)


MAMBA2 = Family(
    name="mamba2", base="backbone.",
    blank=TransformerConfig(Tokens(1), Tower(1, 1, SSD(1, steps=(1e-3, 0.1)), None, norm=Norm(1e-5, rms=True))),
    heads={"Mamba2ForCausalLM": LM(), "Mamba2Model": None},
    config=dict(
        vocab_size=Key("embedding.vocab"), hidden_size=Key("tower.dim"), num_hidden_layers=Key("tower.layers"),
        layer_norm_epsilon=Key("tower.norm.eps tower.attention.eps", 1e-5),
        tie_word_embeddings=Key("head.tied", False), num_heads=Key("tower.attention.heads", 128),
        head_dim=Key("tower.attention.head_dim", 64), state_size=Key("tower.attention.key_dim", 128),
        n_groups=Key("tower.attention.groups", 8), conv_kernel=Key("tower.attention.conv", 4),
        use_bias=Key("tower.attention.bias", False), use_conv_bias=Key("tower.attention.conv_bias", True),
        expand=Group(("expand",), _check_expand, _write_expand), **fixed(hidden_act="silu"),
        time_step_limit=Group(("time_step_limit",), _read_limit, _write_limit),
    ),
    # How new layers start, how many tokens are read at once, and the stream's type in half precision.
    inert="""time_step_rank time_step_min time_step_max time_step_floor rescale_prenorm_residual chunk_size
    residual_in_fp32""",
    tensors={
        "embeddings.weight": "embedding.weight", "norm_f.weight": "tower.norm.weight",
        "layers.{i}.": {
            "norm.weight": "norm1.weight", "mixer.{A_log,D,dt_bias}": "attention.{a_log,skip,dt_bias}",
            "mixer.conv1d.weight": To("attention.taps", tensors.TAPS), "mixer.conv1d.bias": "attention.tap_bias",
            "mixer.in_proj.*": To("attention.w{z,v,k,q,a}.*", tensors.JOINED),
            "mixer.{norm.weight,out_proj.*}": "attention.{norm.weight,wo.*}",
        },
    },
    head_tensors={"lm": {"lm_head.weight": "head.weight"}}, spellings={r"\.embedding\.": ".embeddings."},
    start=Start("mamba", 0.1),
    presets={"mamba-codestral-7b": dict(vocab_size=32768, hidden_size=4096, num_hidden_layers=64)},
)  # fmt: skip

# --- Granite 4: Mamba 2 and attention by turns, experts beside what all tokens use ----------------------------------


def _granite_head(theirs: Data) -> int:
    width = theirs.get("mamba_d_head", "auto")
    inner = (theirs.get("mamba_expand") or 2) * theirs["hidden_size"]
    return inner // theirs.get("mamba_n_heads", 128) if width in ("auto", None) else width


def _read_granite_states(theirs: Data, ours: Data) -> None:
    heads, width = theirs.get("mamba_n_heads", 128), _granite_head(theirs)
    wide = (theirs.get("mamba_expand") or 2) * theirs["hidden_size"]
    if heads * width != wide:
        raise rules.wrong(
            f"mamba_expand * hidden_size is {wide}; it must be mamba_n_heads * mamba_d_head"
        )
    rules.put(ours, "tower.attention.1.heads", heads)
    rules.put(ours, "tower.attention.1.head_dim", width)


def _write_granite_states(ours: Data, theirs: Data) -> None:
    dual, dim = ours["tower"]["attention"][1], ours["tower"]["dim"]
    if dual is None:
        return
    wide = dual["heads"] * dual["head_dim"]
    if wide % dim:
        raise rules.wrong(f"heads * head_dim is {wide}; it must be a multiple of dim={dim}")
    theirs.setdefault("hidden_size", dim)
    for key, value, missing in (
        ("mamba_n_heads", dual["heads"], 128),
        ("mamba_expand", wide // dim, 2),
    ):
        if theirs.get(key, missing) != value:
            theirs[key] = value
    if _granite_head(theirs) != dual["head_dim"]:
        theirs["mamba_d_head"] = dual["head_dim"]


def _granite_rope() -> Group:
    """position_embedding_type says whether there is a RoPE."""
    at = "tower.attention.0.rope"
    group = rules.rope_at(at)

    def read(theirs: Data, ours: Data) -> None:
        kind = theirs.get("position_embedding_type")
        if kind == "rope":
            group.reader(theirs, ours)
        else:
            rules.put(ours, at, None)

    def write(ours: Data, theirs: Data) -> None:
        turns = rules.get(ours, at)
        if turns is rules.ABSENT:
            return
        if turns is not None:
            group.writer(ours, theirs)
        if (turns is not None) != (theirs.get("position_embedding_type") == "rope"):
            theirs["position_embedding_type"] = None if turns is None else "rope"

    return replace(
        group, names=(*group.names, "position_embedding_type"), reader=read, writer=write
    )


def _write_granite_experts(kinds: list[str], sparse: Data | None, theirs: Data, said: bool) -> None:
    if len(set(kinds)) > 1:
        raise rules.wrong("all layers have experts, or none")
    if sparse is None and not said:
        theirs["num_local_experts"] = 0


_STATES = "attention.a_log"
_DIVIDED = (lambda n: 1 / n, lambda gain: round(1 / gain, 12))
GRANITE_MOE_HYBRID = llama_like(
    "granitemoehybrid", decoder_heads("GraniteMoeHybrid", labels=False),
    (GQA(1, 1, 1, rope=Rope(), scale=1.0), SSD(1)), (SWIGLU, MoE(1, 1, 1, shared=1, shared_dim=1)),
    keys=dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.eps", 1e-6), is_causal=rules.Fixed(True, null=False),
        num_attention_heads=Key("tower.attention.0.heads"), attention_bias=BIASED,
        head_dim=Key("tower.attention.0.head_dim", lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
        attention_multiplier=Key("tower.attention.scale", 1.0),
        embedding_multiplier=Key("embedding.token_gain", 1.0), residual_multiplier=Key("tower.residual_gain", 1.0),
        logits_scaling=Key("head.logit_gain", 1.0, _DIVIDED), rope_parameters=_granite_rope(),
        intermediate_size=Key("tower.ffn.1.ffn_dim"), num_experts_per_tok=Key("tower.ffn.1.active", 2),
        shared_intermediate_size=Key("tower.ffn.0.ffn_dim tower.ffn.1.shared_dim", 1024),
        num_local_experts=Key("tower.ffn.1.experts", 8),
        mamba_n_heads=Group(
            ("mamba_n_heads", "mamba_d_head", "mamba_expand"), _read_granite_states, _write_granite_states,
        ),
        mamba_n_groups=Key("tower.attention.groups", 1), mamba_d_state=Key("tower.attention.key_dim", 256),
        mamba_d_conv=Key("tower.attention.conv", 4), mamba_conv_bias=Key("tower.attention.conv_bias", True),
        mamba_proj_bias=Key("tower.attention.1.bias", False),
        time_step_limit=Group(("time_step_limit",), _read_limit, _write_limit),
        layer_types=rules.by_layer(
            "attention", "layer_types", _WORDS, lambda *_: True, lambda one: one["kind"] == "ssd"
        ),
        kinds=rules.by_layer(
            "ffn", "", ("dense", "sparse"), lambda hf, _: hf.get("num_local_experts", 8) > 0, rules.is_moe,
            ["num_local_experts"], _write_granite_experts,
        ),
        # The convolution's too.
        **fixed(hidden_act="silu"),
    ),
    inert="mamba_chunk_size output_router_logits router_aux_loss_coef", aliases=dict(layers_block_type="layer_types"),
    layer={
        **NORMS, "self_attn.{q,k,v,o}_proj.*": To("attention.w{q,k,v,o}.*", unless=_STATES),
        "mamba.{A_log,D,dt_bias,norm.weight}": "attention.{a_log,skip,dt_bias,norm.weight}",
        "mamba.conv1d.weight": To("attention.taps", tensors.TAPS), "mamba.conv1d.bias": "attention.tap_bias",
        "mamba.in_proj.*": To("attention.w{z,v,k,q,a}.*", tensors.JOINED),
        "mamba.out_proj.*": To("attention.wo.*", needs=_STATES),
        "shared_mlp.input_linear.weight": To("ffn.{gate,up}.weight", tensors.JOINED),
        "shared_mlp.input_linear.*": To("ffn.shared.{gate,up}.*", tensors.JOINED),
        "shared_mlp.output_linear.weight": "ffn.down.weight",
        "shared_mlp.output_linear.*": "ffn.shared.down.*",
        "block_sparse_moe.router.layer.weight": "ffn.router.weight",
        "block_sparse_moe.input_linear.weight": To("ffn.{gate,up}", tensors.GATE_UP),
        "block_sparse_moe.output_linear.weight": "ffn.down",
    },
)  # fmt: skip
