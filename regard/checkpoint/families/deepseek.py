"""DeepSeek-V2, V3 and V3.2 as data: latent attention, experts, the indexer of sparse attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.attention import DSA, MLA
from regard.checkpoint.families.config import ACTIVATIONS, ROPE, groups, mlp_or_experts
from regard.checkpoint.families.decoders import (
    BODY,
    FRAME,
    KEYS,
    LLAMA,
    MLP_TENSORS,
    SWIGLU,
    labelled,
    llama_like,
    lm,
)
from regard.checkpoint.rules import STACKED, Fixed, Inert, Key, rule
from regard.models import TransformerConfig
from regard.moe import MoE
from regard.position import Rope

_MLA = MLA(1, 1, 1, 2, 1, rope=Rope(layout="interleaved"))
_EXPERTS_V2 = MoE(1, 1, 1, shared=1, normalized=False)
_EXPERTS_V3 = MoE(1, 1, 1, shared=1, score="sigmoid", corrected=True)


def _deepseek_keys(at: str, shared: int, gain: float) -> tuple[Any, ...]:
    """`at`: where the MLA stands (inside DSA for V3.2); `shared`, `gain`: what a missing key means."""
    return (
        *KEYS,
        Key("num_attention_heads", f"{at}.heads"),
        Key("kv_lora_rank", f"{at}.latent"),
        Key("q_lora_rank", f"{at}.query_latent", 1536, null=None),
        Key("qk_nope_head_dim", f"{at}.head_dim"),
        Key("qk_rope_head_dim", f"{at}.rope_dim", also=("tower.attention.rope_dim",)),
        Key("v_head_dim", f"{at}.value_dim"),
        Key("attention_bias", f"{at}.bias", False, also=(f"{at}.out_bias",)),
        Key("attention_dropout", f"{at}.dropout", 0.0),
        ROPE,
        Key("intermediate_size", "tower.ffn.0.ffn_dim"),
        Key(
            "hidden_act",
            "tower.ffn.0.activation",
            "silu",
            ACTIVATIONS,
            also=("tower.ffn.1.activation",),
        ),
        Key("moe_intermediate_size", "tower.ffn.1.ffn_dim"),
        Key("n_routed_experts", "tower.ffn.1.experts"),
        Key("num_experts_per_tok", "tower.ffn.1.active"),
        Key("n_shared_experts", "tower.ffn.1.shared", shared),
        Key("routed_scaling_factor", "tower.ffn.1.gain", gain),
        Fixed("moe_layer_freq", (1,)),
        Inert(
            (
                "num_key_value_heads",
                "head_dim",
                "qk_head_dim",
                "num_nextn_predict_layers",
                "ep_size",
                "aux_loss_alpha",
                "seq_aux",
            )
        ),
    )


def _deepseek_tensors(at: str) -> tuple[Any, ...]:
    attention = tuple(
        rule(f"model.layers.{{i}}.self_attn.{a}.*", f"{BODY}{at}.{b}.*")
        for a, b in [
            ("q_a_proj", "w_dq"),
            ("q_a_layernorm", "q_norm"),
            ("kv_a_proj_with_mqa", "w_dkv"),
            ("kv_a_layernorm", "kv_norm"),
            ("kv_b_proj", "w_ukv"),
            ("o_proj", "wo"),
        ]
    )
    mlp = "model.layers.{i}.mlp."
    low, up = f"{BODY}{at}.w_dq.weight", f"{BODY}{at}.w_uq.weight"
    return (
        *FRAME,
        *attention,
        rule("model.layers.{i}.self_attn.q_b_proj.weight", up, needs=low),
        rule("model.layers.{i}.self_attn.q_proj.weight", up, unless=low),
        *MLP_TENSORS,
        rule(mlp + "gate.weight", BODY + "ffn.router.weight"),
        rule(mlp + "gate.e_score_correction_bias", BODY + "ffn.correction"),
        *(
            rule(f"{mlp}experts.{{e}}.{a}_proj.weight", f"{BODY}ffn.{a}", STACKED)
            for a in ("gate", "up", "down")
        ),
        *(
            rule(f"{mlp}shared_experts.{a}_proj.*", f"{BODY}ffn.shared.{a}.*")
            for a in ("gate", "up", "down")
        ),
    )


def _deepseek(attention: MLA | DSA, experts: MoE) -> TransformerConfig:
    blank = llama_like(attention, SWIGLU)
    return replace(blank, tower=replace(blank.tower, layers=2, ffn=(SWIGLU, experts)))


DEEPSEEK_V2 = replace(
    LLAMA,
    name="deepseek_v2",
    aliases={
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    blank=_deepseek(_MLA, _EXPERTS_V2),
    heads={
        **lm("DeepseekV2Model", "DeepseekV2ForCausalLM"),
        **labelled("DeepseekV2", tag=False),
    },
    config=(
        *_deepseek_keys("tower.attention", 2, 1.0),
        Key("mlp_bias", "tower.ffn.0.bias", False, also=("tower.ffn.1.shared_bias",)),
        groups("group_limited_greedy", (1, 1)),
        Fixed("scoring_func", ("softmax",)),
        Inert(("norm_topk_prob",)),  # transformers never normalises for V2, whatever it says
        mlp_or_experts(0),
    ),
    tensors=_deepseek_tensors("attention"),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    blank=_deepseek(_MLA, _EXPERTS_V3),
    heads={**lm("DeepseekV3Model", "DeepseekV3ForCausalLM"), **labelled("DeepseekV3")},
    config=(
        *_deepseek_keys("tower.attention", 1, 2.5),
        Key("norm_topk_prob", "tower.ffn.1.normalized", True),
        Key(
            "rope_interleave",
            "tower.attention.rope.layout",
            True,
            {True: "interleaved", False: "half"},
        ),
        groups(None, (8, 4)),
        Fixed("scoring_func", ("sigmoid",)),
        mlp_or_experts(3),
    ),
    carried=(r"model\.layers\.{layers}\..*",),  # the extra layer that predicts one token more
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    blank=_deepseek(DSA(_MLA, 1, 2, 1, rope_dim=2), _EXPERTS_V3),
    heads=lm("DeepseekV32Model", "DeepseekV32ForCausalLM"),
    config=(
        *_deepseek_keys("tower.attention.attention", 1, 2.5),
        Key("norm_topk_prob", "tower.ffn.1.normalized", True),
        Key("index_n_heads", "tower.attention.index_heads"),
        Key("index_head_dim", "tower.attention.index_dim"),
        Key("index_topk", "tower.attention.topk"),
        Key("mlp_bias", "tower.ffn.0.bias", False, also=("tower.ffn.1.shared_bias",)),
        groups(None, (8, 4)),
        Fixed("scoring_func", ("sigmoid",)),
        Inert(("layer_types",)),
        mlp_or_experts(3),
    ),
    tensors=(
        *_deepseek_tensors("attention.attention"),
        *(
            rule(f"model.layers.{{i}}.self_attn.indexer.{a}.*", f"{BODY}attention.indexer.{b}.*")
            for a, b in [("wq_b", "wq"), ("wk", "wk"), ("k_norm", "k_norm"), ("weights_proj", "ww")]
        ),
    ),
)
