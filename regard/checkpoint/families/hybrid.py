"""Families that mix layers of a recurrent state with layers of attention, as data: Qwen3-Next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.attention import GQA, DeltaRule
from regard.checkpoint.families.decoders import (
    BIASED,
    FRAME_TENSORS,
    KEYS,
    LLAMA,
    MLP_TENSORS,
    SWIGLU,
    decoder,
    decoder_heads,
)
from regard.checkpoint.families.keys import by_layer, rope_at
from regard.checkpoint.rules import STACKED, Data, Fixed, Key, Op, To, block
from regard.errors import UsageError
from regard.layers import Norm
from regard.moe import MoE
from regard.position import Rope

# --- which layer is which -----------------------------------------------------------------------------------------

_ATTENTION, _FFN = ("full_attention", "linear_attention"), ("dense", "sparse")


def _attention_kinds(theirs: Data, layers: int) -> list[str]:
    every = theirs.get("full_attention_interval", 4)
    kinds = theirs.get("layer_types") or [_ATTENTION[(i + 1) % every > 0] for i in range(layers)]
    if len(kinds) != layers or set(kinds) - set(_ATTENTION):
        raise UsageError(
            f"config.json: layer_types must list {layers} times {' or '.join(_ATTENTION)}, got {kinds}"
        )
    return kinds


def _write_attention(kinds: list[str], _: Any, theirs: Data) -> None:
    if len(theirs.get("layer_types") or kinds) != len(kinds) or (
        _attention_kinds(theirs, len(kinds)) != kinds
    ):
        theirs["layer_types"] = kinds


def _ffn_kinds(theirs: Data, layers: int) -> list[str]:
    dense, step = theirs.get("mlp_only_layers") or [], theirs.get("decoder_sparse_step", 1)
    some = theirs.get("num_experts", 512) > 0
    return [_FFN[some and i not in dense and (i + 1) % step == 0] for i in range(layers)]


def _write_ffn(kinds: list[str], _: Any, theirs: Data) -> None:
    if _ffn_kinds(theirs, len(kinds)) != kinds:
        theirs["decoder_sparse_step"] = 1
        theirs["mlp_only_layers"] = [i for i, kind in enumerate(kinds) if kind == "dense"]


# --- tensors ------------------------------------------------------------------------------------------------------


def by_head(kind: str, field: str) -> Op:
    """Several of ours in one of theirs, the rows of each head together; `field` of the attention of this kind tells how
    many heads."""

    def heads(config: Any) -> int:
        return next(getattr(a, field) for a in config.tower.each("attention") if a.kind == kind)

    def load(theirs: list[Tensor], sizes: list[torch.Size], config: Any) -> list[Tensor]:
        h = heads(config)
        rows = theirs[0].unflatten(0, (h, -1)).split([size[0] // h for size in sizes], 1)
        return [x.flatten(0, 1) for x in rows]

    def save(ours: list[Tensor], _: int, config: Any) -> list[Tensor]:
        rows = [x.unflatten(0, (heads(config), -1)) for x in ours]
        return [torch.cat(rows, 1).flatten(0, 1)]

    return Op(load, save)


# A convolution of every channel by itself: theirs (c 1 width).
_TAPS = Op(lambda theirs, *_: [theirs[0][:, 0]], lambda ours, *_: [ours[0][:, None]])
_GATE = "attention.wg.weight"  # which layers of attention have
_BY_KEY_HEAD = by_head("delta", "key_heads")

# --- Qwen3-Next ---------------------------------------------------------------------------------------------------

_FULL = GQA(1, 1, 1, rope=Rope(partial=0.25), qk_norm=1e-6, qk_norm_plus_one=True, gated=True)
QWEN3_NEXT = replace(
    LLAMA,
    name="qwen3_next",
    blank=decoder(
        (_FULL, DeltaRule(1, 1, 1, 1)),
        (SWIGLU, MoE(1, 1, 1, shared=1, shared_dim=1, shared_gated=True)),
        norm=Norm(1e-6, rms=True, plus_one=True),
    ),
    heads=decoder_heads("Qwen3Next"),
    config={name: rule for name, rule in KEYS.items() if name != "hidden_act"}
    | dict(
        rms_norm_eps=Key("tower.norm.eps tower.attention.qk_norm tower.attention.eps", 1e-6),
        num_key_value_heads=Key("tower.attention.kv_heads", 2),
        head_dim=Key("tower.attention.head_dim", 256),
        attention_bias=BIASED,
        rope_parameters=rope_at(
            "tower.attention.rope", share="partial_rotary_factor", partial_rotary_factor=0.25
        ),
        linear_num_key_heads=Key("tower.attention.key_heads", 16),
        linear_num_value_heads=Key("tower.attention.value_heads", 32),
        linear_key_head_dim=Key("tower.attention.key_dim", 128),
        linear_value_head_dim=Key("tower.attention.1.value_dim", 128),
        linear_conv_kernel_dim=Key("tower.attention.conv", 4),
        layer_types=by_layer(
            "attention",
            ("layer_types", "full_attention_interval"),
            _ATTENTION,
            _attention_kinds,
            lambda attention: attention["kind"] == "delta",
            _write_attention,
        ),
        # The convolution's too.
        hidden_act=Fixed("silu"),
        intermediate_size=Key("tower.ffn.0.ffn_dim", 5632),
        moe_intermediate_size=Key("tower.ffn.1.ffn_dim", 512),
        num_experts=Key("tower.ffn.1.experts", 512),
        num_experts_per_tok=Key("tower.ffn.1.active", 10),
        shared_expert_intermediate_size=Key("tower.ffn.1.shared_dim", 512),
        norm_topk_prob=Key("tower.ffn.1.normalized", True),
        mlp_only_layers=by_layer(
            "ffn",
            ("mlp_only_layers", "decoder_sparse_step"),
            _FFN,
            _ffn_kinds,
            lambda ffn: ffn["kind"] == "moe",
            _write_ffn,
        ),
    ),
    inert="output_router_logits router_aux_loss_coef",
    tensors={
        **FRAME_TENSORS,
        **MLP_TENSORS,
        **block(
            "model.layers.{i}.",
            {
                "self_attn.q_proj.*": To(
                    "attention.wq.* attention.wg.*", by_head("gqa", "heads"), needs=_GATE
                ),
                **{f"self_attn.{x}_proj.*": To(f"attention.w{x}.*", needs=_GATE) for x in "kvo"},
                **{f"self_attn.{x}_norm.weight": f"attention.{x}_norm.weight" for x in "qk"},
                "linear_attn.in_proj_qkvz.weight": To(
                    " ".join(f"attention.w{x}.weight" for x in "qkvz"), _BY_KEY_HEAD, unless=_GATE
                ),
                "linear_attn.in_proj_ba.weight": To(
                    "attention.wb.weight attention.wa.weight", _BY_KEY_HEAD
                ),
                "linear_attn.conv1d.weight": To("attention.taps", _TAPS),
                "linear_attn.A_log": "attention.a_log",
                "linear_attn.dt_bias": "attention.dt_bias",
                "linear_attn.norm.weight": "attention.norm.weight",
                "linear_attn.out_proj.weight": To("attention.wo.weight", unless=_GATE),
                "mlp.gate.weight": "ffn.router.weight",
                **{
                    f"mlp.experts.{{e}}.{x}_proj.weight": To(f"ffn.{x}", STACKED)
                    for x in ("gate", "up", "down")
                },
                **{
                    f"mlp.shared_expert.{x}_proj.weight": f"ffn.shared.{x}.weight"
                    for x in ("gate", "up", "down")
                },
                "mlp.shared_expert_gate.weight": "ffn.shared_gate.weight",
            },
        ),
    },
    # What predicts one token more.
    carried=(r"mtp\..*",),
    presets={
        "qwen3-next-80b": dict(
            vocab_size=151936,
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=16,
            max_position_embeddings=262144,
            rope_theta=10000000.0,
        )
    },
)
