"""DeepSeek-V2, V3 and V3.2 as data: latent attention, experts, the indexer of sparse attention."""

from __future__ import annotations

from dataclasses import replace

from regard.attention import DSA, MLA
from regard.checkpoint.families.decoders import (
    FRAME_KEYS,
    FRAME_TENSORS,
    LLAMA,
    MLP_TENSORS,
    SWIGLU,
    decoder,
    decoder_heads,
)
from regard.checkpoint.families.keys import ACTIVATIONS, expert_groups, experts_by_layer, rope_at
from regard.checkpoint.rules import STACKED, Fixed, Key, Keys, To, Weights, block
from regard.moe import MoE
from regard.position import Rope

_MLA = MLA(1, 1, 1, 2, 1, rope=Rope(layout="interleaved"))
_EXPERTS_V2 = MoE(1, 1, 1, shared=1, normalized=False)
_EXPERTS_V3 = MoE(1, 1, 1, shared=1, score="sigmoid", corrected=True)


def _keys(at: str, shared: int, gain: float) -> Keys:
    """`at`: where the MLA stands (inside DSA for V3.2); `shared`, `gain`: what a missing key means."""
    return FRAME_KEYS | dict(
        num_attention_heads=Key(f"{at}.heads"),
        kv_lora_rank=Key(f"{at}.latent"),
        q_lora_rank=Key(f"{at}.query_latent", 1536, null=None),
        qk_nope_head_dim=Key(f"{at}.head_dim"),
        qk_rope_head_dim=Key(f"{at}.rope_dim tower.attention.rope_dim"),
        v_head_dim=Key(f"{at}.value_dim"),
        attention_bias=Key(f"{at}.bias {at}.out_bias", False),
        attention_dropout=Key(f"{at}.dropout", 0.0),
        rope_parameters=rope_at(f"{at}.rope"),
        intermediate_size=Key("tower.ffn.0.ffn_dim"),
        hidden_act=Key("tower.ffn.activation", "silu", ACTIVATIONS),
        moe_intermediate_size=Key("tower.ffn.1.ffn_dim"),
        n_routed_experts=Key("tower.ffn.1.experts"),
        num_experts_per_tok=Key("tower.ffn.1.active"),
        n_shared_experts=Key("tower.ffn.1.shared", shared),
        routed_scaling_factor=Key("tower.ffn.1.gain", gain),
        moe_layer_freq=Fixed(1),
    )


_MLP_BIAS = Key("tower.ffn.0.bias tower.ffn.1.shared_bias", False)
_INERT = """num_key_value_heads head_dim qk_head_dim num_nextn_predict_layers ep_size aux_loss_alpha
seq_aux"""
_V3: Keys = dict(
    norm_topk_prob=Key("tower.ffn.1.normalized", True),
    n_group=expert_groups(None, (8, 4)),
    scoring_func=Fixed("sigmoid"),
    mlp_layer_types=experts_by_layer(3),
)


def _tensors(at: str) -> Weights:
    parts, low = ("gate", "up", "down"), f"{at}.w_dq.weight"
    return {
        **FRAME_TENSORS,
        **MLP_TENSORS,
        **block(
            "model.layers.{i}.self_attn.",
            {
                "q_a_proj.*": f"{at}.w_dq.*",
                "q_a_layernorm.*": f"{at}.q_norm.*",
                "kv_a_proj_with_mqa.*": f"{at}.w_dkv.*",
                "kv_a_layernorm.*": f"{at}.kv_norm.*",
                "kv_b_proj.*": f"{at}.w_ukv.*",
                "o_proj.*": f"{at}.wo.*",
                "q_b_proj.weight": To(f"{at}.w_uq.weight", needs=low),
                "q_proj.weight": To(f"{at}.w_uq.weight", unless=low),
            },
        ),
        **block(
            "model.layers.{i}.mlp.",
            {
                "gate.weight": "ffn.router.weight",
                "gate.e_score_correction_bias": "ffn.correction",
                **{f"experts.{{e}}.{x}_proj.weight": To(f"ffn.{x}", STACKED) for x in parts},
                **{f"shared_experts.{x}_proj.*": f"ffn.shared.{x}.*" for x in parts},
            },
        ),
    }


DEEPSEEK_V2 = replace(
    LLAMA,
    name="deepseek_v2",
    blank=decoder(_MLA, (SWIGLU, _EXPERTS_V2)),
    heads=decoder_heads("DeepseekV2", tags=False),
    config=_keys("tower.attention", 2, 1.0)
    | dict(
        mlp_bias=_MLP_BIAS,
        n_group=expert_groups("group_limited_greedy", (1, 1)),
        scoring_func=Fixed("softmax"),
        mlp_layer_types=experts_by_layer(0),
    ),
    # Whatever norm_topk_prob says, transformers never normalises for V2.
    inert=f"{_INERT} norm_topk_prob",
    aliases=dict(
        num_experts="n_routed_experts",
        num_local_experts="n_routed_experts",
        num_mtp_layers="num_nextn_predict_layers",
    ),
    tensors=_tensors("attention"),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    blank=decoder(_MLA, (SWIGLU, _EXPERTS_V3)),
    heads=decoder_heads("DeepseekV3"),
    config=_keys("tower.attention", 1, 2.5)
    | _V3
    | dict(
        rope_interleave=Key(
            "tower.attention.rope.layout", True, {True: "interleaved", False: "half"}
        ),
    ),
    inert=_INERT,
    # The extra layer that predicts one token more.
    carried=(r"model\.layers\.{layers}\..*",),
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    blank=decoder(DSA(_MLA, 1, 2, 1, rope_dim=2), (SWIGLU, _EXPERTS_V3)),
    heads=decoder_heads("DeepseekV32", labels=False),
    config=_keys("tower.attention.attention", 1, 2.5)
    | _V3
    | dict(
        mlp_bias=_MLP_BIAS,
        index_n_heads=Key("tower.attention.index_heads"),
        index_head_dim=Key("tower.attention.index_dim"),
        index_topk=Key("tower.attention.topk"),
    ),
    inert=f"{_INERT} layer_types",
    tensors={
        **_tensors("attention.attention"),
        **block(
            "model.layers.{i}.self_attn.indexer.",
            {
                "wq_b.*": "attention.indexer.wq.*",
                "wk.*": "attention.indexer.wk.*",
                "k_norm.*": "attention.indexer.k_norm.*",
                "weights_proj.*": "attention.indexer.ww.*",
            },
        ),
    },
)
