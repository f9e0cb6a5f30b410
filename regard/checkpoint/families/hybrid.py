"""Layers of a recurrent state between layers of attention."""

from __future__ import annotations

from typing import Any

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
    llama_like,
    sizes,
)
from regard.checkpoint.rules import Data, Key, fixed
from regard.checkpoint.tensors import To
from regard.moe import MoE
from regard.position import Rope


def _sparse(theirs: Data, layer: int) -> bool:
    dense = theirs.get("mlp_only_layers") or []
    step = theirs.get("decoder_sparse_step", 1)
    return theirs.get("num_experts", 512) > 0 and layer not in dense and (layer + 1) % step == 0


def _write_sparse(kinds: list[str], _: Any, theirs: Data, said: bool) -> None:
    if not said:
        theirs["decoder_sparse_step"] = 1
        theirs["mlp_only_layers"] = [i for i, kind in enumerate(kinds) if kind == "dense"]


# What the layers of attention have, and the others do not.
_GATE = "attention.wg.weight"
_BY_KEY_HEAD = tensors.by_head("delta", "key_heads")
QWEN3_NEXT = llama_like(
    "qwen3_next", decoder_heads("Qwen3Next"),
    (GQA(1, 1, 1, rope=Rope(partial=0.25), qk_norm=1e-6, qk_norm_plus_one=True, gated=True), DeltaRule(1, 1, 1, 1)),
    (SWIGLU, MoE(1, 1, 1, shared=1, shared_dim=1, shared_gated=True)), tower=dict(norm=PLUS_ONE),
    keys=dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm tower.attention.eps", 1e-6),
        num_key_value_heads=Key("tower.attention.kv_heads", 2), head_dim=Key("tower.attention.head_dim", 256),
        # A recurrent state reads from left to right.
        attention_bias=BIASED, is_causal=rules.Fixed(True, null=False),
        rope_parameters=rules.rope_at(
            "tower.attention.rope", share="partial_rotary_factor", partial_rotary_factor=0.25,
        ),
        linear_num_key_heads=Key("tower.attention.key_heads", 16),
        linear_num_value_heads=Key("tower.attention.value_heads", 32),
        linear_key_head_dim=Key("tower.attention.key_dim", 128),
        linear_value_head_dim=Key("tower.attention.1.value_dim", 128),
        linear_conv_kernel_dim=Key("tower.attention.conv", 4),
        layer_types=rules.by_layer(
            "attention", "layer_types", ("full_attention", "linear_attention"),
            lambda hf, i: (i + 1) % hf.get("full_attention_interval", 4) > 0,
            lambda attention: attention["kind"] == "delta", ["full_attention_interval"],
        ),
        # The convolution's too.
        **fixed(hidden_act="silu"), intermediate_size=Key("tower.ffn.0.ffn_dim", 5632),
        moe_intermediate_size=Key("tower.ffn.1.ffn_dim", 512), num_experts=Key("tower.ffn.1.experts", 512),
        num_experts_per_tok=Key("tower.ffn.1.active", 10),
        shared_expert_intermediate_size=Key("tower.ffn.1.shared_dim", 512),
        norm_topk_prob=Key("tower.ffn.1.normalized", True),
        mlp_only_layers=rules.by_layer(
            "ffn", "", ("dense", "sparse"), _sparse, rules.is_moe, ["mlp_only_layers", "decoder_sparse_step"],
            _write_sparse,
        ),
    ),
    inert="output_router_logits router_aux_loss_coef",
    layer={
        **NORMS, **GATED, **EXPERTS,
        "self_attn.q_proj.*": To("attention.w{q,g}.*", tensors.by_head("gqa", "heads"), needs=_GATE),
        "self_attn.{k,v,o}_proj.*": To("attention.w{k,v,o}.*", needs=_GATE),
        "self_attn.{q,k}_norm.weight": "attention.{q,k}_norm.weight",
        "linear_attn.in_proj_qkvz.weight": To("attention.w{q,k,v,z}.weight", _BY_KEY_HEAD, unless=_GATE),
        "linear_attn.in_proj_ba.weight": To("attention.w{b,a}.weight", _BY_KEY_HEAD),
        "linear_attn.conv1d.weight": To("attention.taps", tensors.TAPS),
        "linear_attn.{A_log,dt_bias,norm.weight}": "attention.{a_log,dt_bias,norm.weight}",
        "linear_attn.out_proj.weight": To("attention.wo.weight", unless=_GATE),
        "mlp.shared_expert.{gate,up,down}_proj.weight": "ffn.shared.{gate,up,down}.weight",
        "mlp.shared_expert_gate.weight": "ffn.shared_gate.weight",
    },
    # What predicts one token more.
    carried=(r"mtp\..*",),
    presets={"qwen3-next-80b": sizes(151936, 2048, 48, 16, 5632, 262144, rope_theta=10000000.0)},
)  # fmt: skip
