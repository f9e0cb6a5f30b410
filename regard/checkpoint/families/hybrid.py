"""Layers of a recurrent state between layers of attention."""

from __future__ import annotations

from regard.attention import GQA, DeltaRule
from regard.checkpoint import rules, tensors
from regard.checkpoint.families.common import (
    BIASED,
    EXPERTS,
    GATED,
    NORMS,
    PLUS_ONE,
    SWIGLU,
    decoder_heads,
    experts_by_step,
    llama_like,
    sizes,
)
from regard.checkpoint.rules import Data, Key, Keys, fixed
from regard.checkpoint.tensors import To, Weights
from regard.layers import LM, Classify
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
# What predicts one token more.
_MORE = (r"mtp\..*",)
QWEN3_NEXT = llama_like(
    "qwen3_next", decoder_heads("Qwen3Next"), _QWEN_MIXED, (SWIGLU, _QWEN_EXPERTS), tower=dict(norm=PLUS_ONE),
    keys=dict(
        **_qwen_keys(2), **_expert_keys("tower.ffn.1", 512, 10),
        intermediate_size=Key("tower.ffn.0.ffn_dim", 5632), norm_topk_prob=Key("tower.ffn.1.normalized", True),
        mlp_only_layers=experts_by_step("num_experts", 512),
    ),
    inert="output_router_logits router_aux_loss_coef",
    layer={
        **NORMS, **GATED, **EXPERTS, **_QWEN_ATTENTION, **_LINEAR, **_SHARED_EXPERT,
        "linear_attn.in_proj_qkvz.weight": To("attention.w{q,k,v,z}.weight", _BY_KEY_HEAD, unless=_GATE),
        "linear_attn.in_proj_ba.weight": To("attention.w{b,a}.weight", _BY_KEY_HEAD),
    },
    carried=_MORE,
    presets={"qwen3-next-80b": sizes(151936, 2048, 48, 16, 5632, 262144, rope_theta=10000000.0)},
)  # fmt: skip

# --- Qwen3.5: what Qwen3-Next has, its projections stored apart -----------------------------------------------------

# How positions of images are woven into those of text, which are plain where there are no images.
_IMAGE_PLACES = "mrope_section mrope_interleaved"
_QWEN35_LAYER: Weights = {
    **NORMS, **_QWEN_ATTENTION, **_LINEAR,
    "linear_attn.in_proj_qkv.weight": To("attention.w{q,k,v}.weight", tensors.JOINED, unless=_GATE),
    "linear_attn.in_proj_{z,b,a}.weight": "attention.w{z,b,a}.weight",
}  # fmt: skip
QWEN3_5 = llama_like(
    "qwen3_5_text",
    {"Qwen3_5ForCausalLM": LM(), "Qwen3_5TextModel": None,
     "Qwen3_5TextForSequenceClassification": Classify(2, None, "last", False)},
    _QWEN_MIXED, tower=dict(norm=PLUS_ONE), keys=_qwen_keys(4, _IMAGE_PLACES),
    layer={**_QWEN35_LAYER, **GATED}, carried=_MORE,
)  # fmt: skip
QWEN3_5_MOE = llama_like(
    "qwen3_5_moe_text", {"Qwen3_5MoeForCausalLM": LM(), "Qwen3_5MoeTextModel": None},
    _QWEN_MIXED, _QWEN_EXPERTS, tower=dict(norm=PLUS_ONE),
    keys={**_qwen_keys(2, _IMAGE_PLACES), **_expert_keys("tower.ffn", 256, 8), "intermediate_size": None},
    inert="output_router_logits router_aux_loss_coef",
    layer={**_QWEN35_LAYER, **EXPERTS, **_SHARED_EXPERT}, carried=_MORE,
)  # fmt: skip
