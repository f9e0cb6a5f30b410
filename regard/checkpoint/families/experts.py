"""Decoders with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import (
    ATTENTION,
    BIASED,
    EIGHT_KV,
    EXPERTS,
    GATED,
    MIXTRAL_EXPERTS,
    NORM_EPS,
    NORMS,
    ROTARY,
    SWIGLU,
    decoder_heads,
    experts_by_step,
    llama_like,
    mtp_behind,
    sizes,
    sliding,
)
from regard.checkpoint.multimodal import Multimodal
from regard.checkpoint.rules import ABSENT, ACTIVATIONS, Data, Group, Key, Keys, fixed, get, put
from regard.checkpoint.tensors import To
from regard.layers import LM, Norm
from regard.models.mtp import MTP
from regard.moe import MoE
from regard.position import Rope, Temperature

# --- Qwen ---------------------------------------------------------------------------------------------------------


def _read_window(theirs: Data, ours: Data) -> None:
    on = theirs.get("use_sliding_window")
    put(ours, "tower.attention.window", theirs.get("sliding_window", 4096) if on else None)


def _write_window(ours: Data, theirs: Data) -> None:
    window = get(ours, "tower.attention.window")
    said = theirs.get("sliding_window", 4096) if theirs.get("use_sliding_window") else None
    if window != said:
        theirs["use_sliding_window"], theirs["sliding_window"] = window is not None, window


_ROUTER_LOSS = "output_router_logits router_aux_loss_coef"
_QWEN_KEYS: Keys = dict(
    hidden_act=Key("tower.ffn.activation", "silu", ACTIVATIONS),
    norm_topk_prob=Key("tower.ffn.1.normalized", False),
)
QWEN3_MOE = llama_like(
    "qwen3_moe", decoder_heads("Qwen3Moe"), replace(ROTARY, qk_norm=1e-6), (SWIGLU, MoE(1, 1, 1)),
    keys=dict(
        **_QWEN_KEYS, rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-6),
        num_key_value_heads=Key("tower.attention.kv_heads", 4), attention_bias=BIASED,
        use_sliding_window=Group(("sliding_window", "use_sliding_window"), _read_window, _write_window),
        intermediate_size=Key("tower.ffn.0.ffn_dim", 6144),
        moe_intermediate_size=Key("tower.ffn.1.ffn_dim", 768),
        num_local_experts=Key("tower.ffn.1.experts", 128), num_experts_per_tok=Key("tower.ffn.1.active", 8),
        mlp_only_layers=experts_by_step("num_local_experts", 128),
    ),
    inert=f"{_ROUTER_LOSS} max_window_layers", aliases=dict(num_experts="num_local_experts"),
    layer={**NORMS, **ATTENTION, **GATED, **EXPERTS},
    presets={
        "qwen3-30b-a3b": sizes(
            151936, 2048, 48, 32, 6144, 40960, head_dim=128, rope_theta=1e6, norm_topk_prob=True,
        ),
        "qwen3-235b-a22b": sizes(
            151936, 4096, 94, 64, 12288, 40960, head_dim=128, rope_theta=1e6, norm_topk_prob=True,
            moe_intermediate_size=1536,
        ),
    },
)  # fmt: skip
QWEN2_MOE = llama_like(
    "qwen2_moe", decoder_heads("Qwen2Moe"), sliding(replace(ROTARY, bias=True)),
    (SWIGLU, MoE(1, 1, 1, shared=1, shared_dim=1, shared_gated=True)),
    keys=dict(
        **_QWEN_KEYS, num_key_value_heads=Key("tower.attention.kv_heads", 16),
        qkv_bias=Key("tower.attention.bias", True),
        layer_types=rules.sliding_layers(
            lambda hf, i: i % 2 == 0 and i < hf.get("max_window_layers", 28), 4096, more="max_window_layers",
            switch="use_sliding_window",
        ),
        intermediate_size=Key("tower.ffn.0.ffn_dim", 5632),
        moe_intermediate_size=Key("tower.ffn.1.ffn_dim", 1408),
        shared_expert_intermediate_size=Key("tower.ffn.1.shared_dim", 5632),
        num_experts=Key("tower.ffn.1.experts", 60), num_experts_per_tok=Key("tower.ffn.1.active", 4),
        mlp_only_layers=experts_by_step("num_experts", 60),
    ),
    inert=_ROUTER_LOSS,
    layer={
        **NORMS, **ATTENTION, **GATED, **EXPERTS,
        "mlp.shared_expert.{gate,up,down}_proj.weight": "ffn.shared.{gate,up,down}.weight",
        "mlp.shared_expert_gate.weight": "ffn.shared_gate.weight",
    },
    presets={"qwen1.5-moe-a2.7b": sizes(151936, 2048, 24, 16, 5632, 8192, rope_theta=1e6)},
)  # fmt: skip

# --- OLMoE --------------------------------------------------------------------------------------------------------

OLMOE = llama_like(
    "olmoe", decoder_heads("Olmoe", labels=False), replace(ROTARY, qk_norm=1e-5, qk_norm_whole=True), MoE(1, 1, 1),
    keys=dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-5), attention_bias=BIASED,
        clip_qkv=Key("tower.attention.clip", None), num_experts=Key("tower.ffn.experts", 64),
        num_experts_per_tok=Key("tower.ffn.active", 8), norm_topk_prob=Key("tower.ffn.normalized", False),
    ),
    inert=_ROUTER_LOSS, aliases=dict(num_local_experts="num_experts"),
    layer={**NORMS, **ATTENTION, **EXPERTS},
    presets={"olmoe-1b-7b": sizes(50304, 2048, 16, 16, 1024, 4096)},
)  # fmt: skip

# --- Granite ------------------------------------------------------------------------------------------------------

# Logits are divided by it.
_INVERSE = (lambda scale: 1 / scale, lambda gain: round(1 / gain, 12))
GRANITE_MOE = llama_like(
    "granitemoe", decoder_heads("GraniteMoe", labels=False), replace(ROTARY, scale=1.0), MoE(1, 1, 1),
    keys=dict(
        attention_bias=BIASED, attention_multiplier=Key("tower.attention.scale", 1.0, null=None),
        embedding_multiplier=Key("embedding.token_gain", 1.0), residual_multiplier=Key("tower.residual_gain", 1.0),
        logits_scaling=Key("head.logit_gain", 1.0, _INVERSE), num_local_experts=Key("tower.ffn.experts", 8),
        num_experts_per_tok=Key("tower.ffn.active", 2),
    ),
    inert=_ROUTER_LOSS,
    layer={
        **NORMS, **ATTENTION, "block_sparse_moe.router.layer.weight": "ffn.router.weight",
        "block_sparse_moe.input_linear.weight": To("ffn.{gate,up}", tensors.GATE_UP),
        "block_sparse_moe.output_linear.weight": "ffn.down",
    },
    presets={
        "granite-3.0-1b-a400m": sizes(49155, 1024, 24, 16, 512, 4096, num_key_value_heads=8, num_local_experts=32)
        | dict(num_experts_per_tok=8, embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22)
        | dict(attention_multiplier=0.015625, tie_word_embeddings=True),
    },
)  # fmt: skip

# --- a sigmoid of each expert, chosen with a bias (as DeepSeek-V3) --------------------------------------------------

_CORRECTED = MoE(1, 1, 1, shared=1, score="sigmoid", corrected=True)
_CORRECTED_KEYS: Keys = dict(
    hidden_act=Key("tower.ffn.activation", "silu", ACTIVATIONS),
    n_group=rules.expert_groups(None, (1, 1)),
    routed_scaling_factor=Key("tower.ffn.1.gain", 1.0),
)
_CORRECTED_LAYER = {
    **NORMS, **ATTENTION, **GATED, **EXPERTS, "mlp.gate.e_score_correction_bias": "ffn.correction",
    "mlp.shared_experts.{gate,up,down}_proj.*": "ffn.shared.{gate,up,down}.*",
}  # fmt: skip
DOTS1 = llama_like(
    "dots1", decoder_heads("Dots1", labels=False), sliding(replace(ROTARY, qk_norm=1e-6)), (SWIGLU, _CORRECTED),
    keys=dict(
        **_CORRECTED_KEYS, rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-6), attention_bias=BIASED,
        num_key_value_heads=Key("tower.attention.kv_heads", 32, null=lambda hf: hf["num_attention_heads"]),
        layer_types=rules.sliding_layers(
            lambda hf, i: i >= hf.get("max_window_layers", 62), 4096, more="max_window_layers",
        ),
        intermediate_size=Key("tower.ffn.0.ffn_dim", 10944),
        moe_intermediate_size=Key("tower.ffn.1.ffn_dim", 1408), n_routed_experts=Key("tower.ffn.1.experts"),
        num_experts_per_tok=Key("tower.ffn.1.active"), n_shared_experts=Key("tower.ffn.1.shared"),
        norm_topk_prob=Key("tower.ffn.1.normalized", False, null=False), mlp_layer_types=rules.experts_by_layer(0),
    ),
    aliases=dict(num_local_experts="n_routed_experts"), layer=_CORRECTED_LAYER,
    presets={
        "dots.llm1": sizes(152064, 4096, 62, 32, 10944, 32768, rope_theta=1e7, first_k_dense_replace=1)
        | dict(n_routed_experts=128, num_experts_per_tok=6, n_shared_experts=2, norm_topk_prob=True)
        | dict(routed_scaling_factor=2.5),
    },
)  # fmt: skip


def _norms(attention: str, on: bool, bare: bool = False) -> Group:
    """The eps of all norms; those of the heads of the attention at this place may be off. `on`: what a missing
    use_qk_norm means; `bare`: they have no weight."""
    place = f"{attention}.qk_norm"

    def read(theirs: Data, ours: Data) -> None:
        eps, used = theirs.get("rms_norm_eps"), bool(theirs.get("use_qk_norm", on))
        eps = 1e-5 if eps is None else eps
        put(ours, "tower.norm.eps", eps)
        put(ours, place, eps if used else None)
        if bare:
            put(ours, f"{place}_bare", used)

    def write(ours: Data, theirs: Data) -> None:
        eps, inner = get(ours, "tower.norm.eps"), get(ours, place)
        if eps != theirs.get("rms_norm_eps", 1e-5):
            theirs["rms_norm_eps"] = eps
        if inner is not ABSENT and (inner is not None) != bool(theirs.get("use_qk_norm", on)):
            theirs["use_qk_norm"] = inner is not None

    return Group(("rms_norm_eps", "use_qk_norm"), read, write)


def _glm_sizes(dim: int, layers: int, ffn: int, experts: int, width: int, dense: int) -> Data:
    body = sizes(151552, dim, layers, 96, ffn, 131072, head_dim=128, attention_bias=True)
    body |= dict(n_routed_experts=experts, moe_intermediate_size=width, rope_theta=1e6)
    return body | dict(first_k_dense_replace=dense)


GLM4_MOE = llama_like(
    "glm4_moe", decoder_heads("Glm4Moe", labels=False), replace(ROTARY, rope=Rope(partial=0.5)), (SWIGLU, _CORRECTED),
    keys=dict(
        **_CORRECTED_KEYS, rms_norm_eps=_norms("tower.attention", False),
        num_key_value_heads=Key("tower.attention.kv_heads", 8), attention_bias=Key("tower.attention.bias", False),
        rope_parameters=rules.rope_at(
            "tower.attention.rope", share="partial_rotary_factor", partial_rotary_factor=0.5,
        ),
        intermediate_size=Key("tower.ffn.0.ffn_dim", 10944),
        moe_intermediate_size=Key("tower.ffn.1.ffn_dim", 1408), n_routed_experts=Key("tower.ffn.1.experts", 128),
        num_experts_per_tok=Key("tower.ffn.1.active", 8), n_shared_experts=Key("tower.ffn.1.shared", 1),
        norm_topk_prob=Key("tower.ffn.1.normalized", True), mlp_layer_types=rules.experts_by_layer(1),
        num_nextn_predict_layers=rules.mtp_count("num_nextn_predict_layers"),
    ),
    aliases=dict(num_local_experts="n_routed_experts", num_mtp_layers="num_nextn_predict_layers"),
    layer=_CORRECTED_LAYER, mtp=MTP(), mtp_layer=mtp_behind(_CORRECTED_LAYER),
    # MTP layers, where no language model reads them; with one, their copies of its table and head.
    carried=(r"model\.layers\.{layers}\..*",),
    presets={
        "glm-4.5": _glm_sizes(5120, 92, 12288, 160, 1536, 3)
        | dict(use_qk_norm=True, routed_scaling_factor=2.5),
        "glm-4.5-air": _glm_sizes(4096, 46, 10944, 128, 1408, 1),
    },
)  # fmt: skip

# --- as Mixtral stores them: MiniMax M2 and Phi-3.5-MoE -------------------------------------------------------------


def _reworded(
    rope: Group, plain: Callable[[Data], Data], back: Callable[[Data], Data], more: str = ""
) -> Group:
    """`rope` for keys in other words: `plain` gives them in those that it knows, `back` the other way; `more`: keys
    that it has no word for."""

    def write(ours: Data, theirs: Data) -> None:
        was = plain(theirs)
        now = dict(was)
        rope.writer(ours, now)
        if now != was:
            for key in was.keys() - now.keys() | set(more.split()):
                theirs.pop(key, None)
            theirs.update(back(now))

    names = (*rope.names, *more.split())
    return Group(names, lambda theirs, ours: rope.reader(plain(theirs), ours), write)


def _turned_share(theirs: Data) -> Data:
    """With the width that turns, rotary_dim, as a share of a head where nothing else says it."""
    width = theirs.get("rotary_dim")
    said = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if width is None or "partial_rotary_factor" in {**theirs, **said}:
        return dict(theirs)
    return {**theirs, "partial_rotary_factor": width / theirs.get("head_dim", 128)}


MINIMAX_M2 = llama_like(
    "minimax_m2", decoder_heads("MiniMaxM2", labels=False),
    replace(ROTARY, rope=Rope(5e6), qk_norm=1e-6, qk_norm_whole=True),
    MoE(1, 1, 1, score="sigmoid", corrected=True),
    keys=dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm", 1e-6),
        num_key_value_heads=Key("tower.attention.kv_heads", 8), head_dim=Key("tower.attention.head_dim", 128),
        rope_parameters=_reworded(
            rules.rope_at("tower.attention.rope", share="partial_rotary_factor"), _turned_share, dict, "rotary_dim",
        ),
        num_local_experts=Key("tower.ffn.experts", 256), num_experts_per_tok=Key("tower.ffn.active", 8),
    ),
    inert=f"{_ROUTER_LOSS} router_jitter_noise", aliases=dict(num_experts="num_local_experts"),
    layer={
        **NORMS, **ATTENTION, **MIXTRAL_EXPERTS, "block_sparse_moe.e_score_correction_bias": "ffn.correction",
    },
    presets={"minimax-m2": sizes(200064, 3072, 62, 48, 1536, 196608, partial_rotary_factor=0.5)},
)  # fmt: skip
_GAINS = ("short_mscale", "long_mscale")


def _one_gain(theirs: Data) -> Data:
    """With what LongRoPE multiplies q and k by, in short texts and in long ones, as one number by its usual name."""
    found = dict(theirs)
    for key in ("rope_parameters", "rope_scaling"):
        said = theirs.get(key) or {}
        kind = said.get("rope_type") or said.get("type") or "default"
        if kind == "default":
            continue
        short, long = (said.get(name) for name in _GAINS)
        if kind != "longrope":
            raise rules.wrong(f"{key}.rope_type is {kind!r}; known: default, longrope")
        if short != long or not isinstance(short, int | float):
            raise rules.wrong(
                f"{key}.short_mscale is {short!r}, long_mscale is {long!r}; Regard can only do one number for both"
            )
        rest = {k: v for k, v in said.items() if k not in _GAINS}
        found[key] = {**rest, "attention_factor": short}
    return found


def _two_gains(theirs: Data) -> Data:
    said = theirs.get("rope_parameters") or {}
    if "attention_factor" not in said:
        return theirs
    rest = {k: v for k, v in said.items() if k != "attention_factor"}
    return {**theirs, "rope_parameters": rest | dict.fromkeys(_GAINS, said["attention_factor"])}


# In texts longer than original_max_position_embeddings transformers 5.17 turns as in short ones, as it does not tell
# the length any more; here long_factor holds there, as in the code that Microsoft publishes with the weights.
PHIMOE = llama_like(
    "phimoe", decoder_heads("Phimoe", tags=False), replace(ROTARY, rope=Rope(1e6)), MoE(2, 2, 1, mixer=0.01),
    tower=dict(norm=Norm()), last_norm="norm.*",
    keys=dict(
        rms_norm_eps=NORM_EPS, num_key_value_heads=EIGHT_KV, attention_bias=BIASED,
        lm_head_bias=Key("head.bias", False), sliding_window=Key("tower.attention.window", None),
        rope_parameters=_reworded(rules.ROPE, _one_gain, _two_gains),
        num_local_experts=Key("tower.ffn.experts", 16), router_jitter_noise=Key("tower.ffn.mixer", 0.01),
        # Whatever num_experts_per_tok says, they are two.
        **fixed(num_experts_per_tok=2),
    ),
    # As of Mixtral, noise on what experts read in training is not added.
    inert=f"{_ROUTER_LOSS} input_jitter_noise",
    layer={
        "{input,post_attention}_layernorm.*": "norm{1,3}.*", **ATTENTION, **MIXTRAL_EXPERTS,
    },
)  # fmt: skip

# --- ERNIE 4.5 ------------------------------------------------------------------------------------------------------


def _ernie_layer(theirs: Data, layer: int) -> bool:
    first, last = theirs.get("moe_layer_start_index", 1), theirs.get("moe_layer_end_index", -1)
    within = first <= layer and (last == -1 or layer <= last)
    return within and (layer + 1) % theirs.get("moe_layer_interval", 1) == 0


def _write_ernie_layers(kinds: list[str], _: Any, theirs: Data, said: bool) -> None:
    """Only a run of layers can be said."""
    if not said:
        places = [i for i, kind in enumerate(kinds) if kind == "sparse"]
        theirs["moe_layer_interval"] = 1
        theirs["moe_layer_start_index"] = places[0] if places else len(kinds)
        theirs["moe_layer_end_index"] = places[-1] if places else len(kinds)


_ERNIE_LAYERS = ["moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"]
ERNIE45_MOE = llama_like(
    "ernie4_5_moe", decoder_heads("Ernie4_5_Moe", labels=False),
    replace(ROTARY, rope=Rope(5e5, "interleaved", wide=True)),
    (SWIGLU, MoE(1, 1, 1, shared=1, corrected=True, wide_router=True)),
    keys=dict(
        rms_norm_eps=NORM_EPS, num_key_value_heads=Key("tower.attention.kv_heads", 4),
        tie_word_embeddings=Key("head.tied", True), hidden_act=Key("tower.ffn.activation", "silu", ACTIVATIONS),
        # transformers drops none of its attention.
        attention_dropout=None, classifier_dropout=None,
        use_bias=Key("tower.attention.{bias,out_bias} tower.ffn.0.bias tower.ffn.1.shared_bias head.bias", False),
        intermediate_size=Key("tower.ffn.0.ffn_dim"), moe_intermediate_size=Key("tower.ffn.1.ffn_dim", 1536),
        moe_k=Key("tower.ffn.1.active", 6), moe_num_experts=Key("tower.ffn.1.experts", 64),
        moe_num_shared_experts=Key("tower.ffn.1.shared", 2), **fixed(moe_norm_min=1e-12),
        moe_layer_start_index=rules.by_layer(
            "ffn", "", ("dense", "sparse"), _ernie_layer, rules.is_moe, _ERNIE_LAYERS, _write_ernie_layers,
        ),
    ),
    inert=_ROUTER_LOSS, aliases=dict(num_experts="moe_num_experts", num_experts_per_tok="moe_k"),
    layer={
        **NORMS, **ATTENTION, **GATED, **EXPERTS,
        "mlp.moe_statics.e_score_correction_bias": To("ffn.correction", tensors.ROW),
        "mlp.shared_experts.{gate,up,down}_proj.*": "ffn.shared.{gate,up,down}.*",
    },
    # What predicts one token more.
    carried=(r"model\.mtp_.*",),
    presets={"ernie-4.5-21b-a3b": sizes(103424, 2560, 28, 20, 12288, 131072)},
)  # fmt: skip

# --- Llama 4 --------------------------------------------------------------------------------------------------------

_FULL, _CHUNKED = "full_attention", "chunked_attention"


def _llama4_layers(theirs: Data, layers: int) -> tuple[list[bool], list[str]]:
    """Which layers turn queries and keys, and what each sees."""
    every = theirs.get("no_rope_layer_interval", 4)
    turn = theirs.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(layers)]
    seen = theirs.get("layer_types") or [_CHUNKED if one else _FULL for one in turn]
    for key, given in (("no_rope_layers", turn), ("layer_types", seen)):
        if len(given) < layers:
            raise rules.wrong(
                f"num_hidden_layers is {layers}; {key} is {given}: it must say it of each layer"
            )
    if set(seen) - {_FULL, _CHUNKED}:
        raise rules.wrong(f"layer_types is {seen}; known: {_FULL}, {_CHUNKED}")
    return [bool(one) for one in turn[:layers]], list(seen[:layers])


def _read_chunks(theirs: Data, ours: Data) -> None:
    tower, size = ours["tower"], theirs.get("attention_chunk_size", 8192)
    turn, seen = _llama4_layers(theirs, tower["layers"])
    if size is None and _CHUNKED in seen:
        raise rules.wrong(
            "attention_chunk_size is None, but layer_types has chunks; give it a number"
        )
    chunks = [size if one == _CHUNKED else None for one in seen]
    pairs = zip(turn, chunks, strict=True)
    each = [{**tower["attention"][turned], "chunk": chunk} for turned, chunk in pairs]
    tower["attention"] = each[0] if all(one == each[0] for one in each) else each


def _write_chunks(ours: Data, theirs: Data) -> None:
    tower = ours["tower"]
    each = tower["attention"]
    each = each if isinstance(each, list) else [each] * tower["layers"]
    turn = [one.get("rope") is not None for one in each]
    chunks = [one.get("chunk") for one in each]
    size = next(filter(None, chunks), theirs.get("attention_chunk_size", 8192))
    seen = [_FULL if chunk is None else _CHUNKED for chunk in chunks]
    first = dict(zip(reversed(turn), reversed(each), strict=True))
    tower["attention"] = [first.get(False), first.get(True)]
    # Of another depth their lists say nothing.
    fits = all(
        len(theirs.get(key) or each) == len(each) for key in ("no_rope_layers", "layer_types")
    )
    if not fits or _llama4_layers(theirs, len(each)) != (turn, seen):
        theirs["no_rope_layers"], theirs["layer_types"] = [int(one) for one in turn], seen
    if size != theirs.get("attention_chunk_size", 8192):
        theirs["attention_chunk_size"] = size


def _read_growth(theirs: Data, ours: Data) -> None:
    on = theirs.get("attn_temperature_tuning", True)
    grows = dict(
        length=theirs.get("floor_scale", 8192), scale=theirs.get("attn_scale", 0.1), offset=1
    )
    put(ours, "tower.attention.0.temperature", grows | dict(kind="temperature") if on else None)


def _write_growth(ours: Data, theirs: Data) -> None:
    grows = get(ours, "tower.attention.0.temperature")
    if grows is ABSENT:
        return
    if (grows is not None) != bool(theirs.get("attn_temperature_tuning", True)):
        theirs["attn_temperature_tuning"] = grows is not None
    for key, name, default in (("floor_scale", "length", 8192), ("attn_scale", "scale", 0.1)):
        if grows is not None and grows[name] != theirs.get(key, default):
            theirs[key] = grows[name]


def _write_experts(kinds: list[str], _: Any, theirs: Data, said: bool) -> None:
    if not said:
        theirs["moe_layers"] = [i for i, kind in enumerate(kinds) if kind == "sparse"]


def _llama4_sparse(theirs: Data, layer: int) -> bool:
    given, step = theirs.get("moe_layers"), theirs.get("interleave_moe_layer_step", 1)
    return (layer + 1) % step == 0 if given is None else layer in given


def _plain_turn(theirs: Data) -> Data:
    """Queries and keys are normed after they turned, which undoes what other scalings multiply them by."""
    said = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind in ("yarn", "longrope"):
        raise rules.wrong(f"rope_type is {kind!r}; known: default, dynamic, linear, llama3")
    return dict(theirs)


_LLAMA4 = replace(ROTARY, rope=Rope(5e5, "interleaved", wide=True), qk_norm=1e-5, qk_norm_bare=True)
_SCOUT_ROPE = dict(rope_type="llama3", rope_theta=5e5, factor=16.0, low_freq_factor=1.0)
_SCOUT_ROPE |= dict(high_freq_factor=1.0, original_max_position_embeddings=8192)
LLAMA4 = llama_like(
    "llama4_text", {"Llama4ForCausalLM": LM(), "Llama4TextModel": None},
    (replace(_LLAMA4, rope=None, qk_norm=None, qk_norm_bare=False, temperature=Temperature(1, 0.1, 1)), _LLAMA4),
    (SWIGLU, MoE(1, 1, 1, shared=1, score="sigmoid", normalized=False, weigh_input=True)),
    keys=dict(
        classifier_dropout=None, hidden_act=Key("tower.ffn.activation", "silu", ACTIVATIONS),
        # Chunks are read from left to right.
        is_causal=rules.Fixed(True, null=False), num_key_value_heads=EIGHT_KV, attention_bias=BIASED,
        head_dim=Key("tower.attention.head_dim", 128, null=lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
        rms_norm_eps=_norms("tower.attention.1", True, bare=True),
        rope_parameters=_reworded(rules.rope_at("tower.attention.1.rope"), _plain_turn, dict),
        intermediate_size=Key("tower.ffn.1.ffn_dim", 8192), intermediate_size_mlp=Key("tower.ffn.0.ffn_dim", 16384),
        num_local_experts=Key("tower.ffn.1.experts", 16), num_experts_per_tok=Key("tower.ffn.1.active", 1),
        moe_layers=rules.by_layer(
            "ffn", "", ("dense", "sparse"), _llama4_sparse, rules.is_moe, ["moe_layers", "interleave_moe_layer_step"],
            _write_experts,
        ),
        attn_temperature_tuning=Group(
            ("attn_temperature_tuning", "floor_scale", "attn_scale"), _read_growth, _write_growth,
        ),
        layer_types=Group(
            ("layer_types", "no_rope_layers", "no_rope_layer_interval", "attention_chunk_size"), _read_chunks,
            _write_chunks, last=True,
        ),
    ),
    inert=f"{_ROUTER_LOSS} router_jitter_noise",
    layer={
        **NORMS, **ATTENTION, "feed_forward.{gate,up,down}_proj.*": "ffn.{gate,up,down}.*",
        "feed_forward.router.weight": "ffn.router.weight",
        "feed_forward.experts.gate_up_proj": To("ffn.{gate,up}", tensors.transposed(tensors.GATE_UP)),
        "feed_forward.experts.down_proj": To("ffn.down", tensors.TRANSPOSED),
        "feed_forward.shared_expert.{gate,up,down}_proj.*": "ffn.shared.{gate,up,down}.*",
    },
    presets={"llama-4-scout": sizes(202048, 5120, 48, 40, 8192, 10485760, rope_parameters=_SCOUT_ROPE)},
)  # fmt: skip
LLAMA4_PICTURES = Multimodal("llama4", "llama4_text")
