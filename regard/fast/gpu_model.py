"""A model's blocks as gpu_step.py wants them. Models are known here by what their configs say, not by their classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.fast.gpu_step import Angles, Gqa, Latent, Layer, Linear, Norm
from regard.position import LongRope


def why_not(model: Any) -> str:
    """What about a model has no static step, or nothing."""
    c = model.config
    if c.kind != "transformer" or c.embedding.kind != "tokens":
        return f"{type(c).__name__} is not one tower on tokens"
    tower, position = c.tower, c.embedding.position
    if not tower.causal or tower.order != "pre" or tower.cross or tower.relative:
        return "its tower is not causal and pre-norm, or has a bias on positions"
    if tower.norm.plus_one or not (tower.norm.rms or tower.norm.bias):
        return "its norms have another form"
    if c.head is None or c.head.kind != "lm":
        return "it has no language-model head"
    if position is not None and position.kind == "learned" and position.skip is not None:
        return "its positions skip tokens"
    if any(f.kind != "mlp" or f.activation in ("tanh", "quick_gelu") for f in tower.each("ffn")):
        return "it has experts, or an activation without a kernel"
    for a in tower.each("attention"):
        if a.kind not in ("gqa", "mla") or (a.kind == "gqa" and (a.sinks or a.softcap)):
            return "its attention selects keys, keeps a state, or has sinks or a softcap"
        if a.kind == "gqa" and a.gated:
            return "its attention has a gate"
        if a.kind == "gqa" and (a.qk_norm_whole or a.qk_norm_plus_one):
            return "its queries and keys have norms of another form"
        if a.rope is not None and isinstance(a.rope.scaling, LongRope):
            return "its RoPE turns long texts otherwise"
    if getattr(model, "watched", False):
        return "a probe watches it"
    return "it is being trained; call model.eval()" if model.training else ""


def norm_of(module: Any) -> Norm | None:
    if module is None:
        return None
    return Norm(module.weight, getattr(module, "bias", None), module.eps)


def stacked(modules: list[Any], **more: Any) -> Linear:
    """Linear layers that read the same x, as one."""
    if len(modules) == 1:
        return Linear(modules[0].weight, modules[0].bias, **more)
    bias = None
    if any(m.bias is not None for m in modules):
        empty = [m.weight.new_zeros(len(m.weight)) if m.bias is None else m.bias for m in modules]
        bias = torch.cat(empty)
    return Linear(torch.cat([m.weight for m in modules]), bias, **more)


def layers_of(model: Any, rows: int, length: int, kernels: bool) -> list[Layer]:
    """Each block's matrices, fused, and its own empty cache."""
    memo: dict[Any, Angles] = {}
    weight = model.embedding.weight

    def angles(rope: Any, dim: int) -> Angles | None:
        if rope is None or not dim:
            return None
        if (rope, dim) not in memo:
            at = torch.arange(length, device=weight.device)
            cos, sin = rope.angles(at[None], dim, weight.dtype)
            memo[rope, dim] = cos[0, :, 0].contiguous(), sin[0, :, 0].contiguous()
        return memo[rope, dim]

    def empty(*shape: int) -> Tensor:
        return weight.new_zeros(rows, length, *shape)

    layers: list[Layer] = []
    for block in model.tower.blocks:
        a, f, norm = block.attention, block.ffn, norm_of(block.norm1)
        both = [f.up] if f.gate is None else [f.gate, f.up]
        gated, act = f.gate is not None, f.config.activation
        up = stacked(both, norm=norm_of(block.norm3), act=act, gated=gated, fast=kernels)
        tail = (up, stacked([f.down], fast=kernels), stacked([a.wo], fast=kernels))
        rest = (*tail, a.scale, a.config.window)
        turns = {"interleaved": a.config.rope is not None and a.config.rope.layout != "half"}
        if a.config.kind == "gqa":
            qkv = stacked([a.wq, a.wk, a.wv], norm=norm, fast=kernels)
            q_norm, k_norm = norm_of(a.q_norm), norm_of(a.k_norm)
            norms = (q_norm, k_norm) if q_norm and k_norm else None
            cache = empty(a.g, a.d), empty(a.g, a.e)
            turn = angles(a.config.rope, a.d)
            layers.append(Gqa(qkv, cache, a.h, turn, norms=norms, rest=rest, **turns))
            continue
        first = stacked([a.w_uq if a.w_dq is None else a.w_dq, a.w_dkv], norm=norm, fast=kernels)
        second = stacked([a.w_uq], norm=norm_of(a.q_norm), fast=kernels) if a.w_dq else None
        w_uk, w_uv = a.w_ukv.weight.view(a.h, -1, a.c).split([a.d, a.e], 1)
        ups = w_uk.contiguous(), w_uv.contiguous()
        turn = angles(a.config.rope, a.r)
        kv_norm = norm_of(a.kv_norm)
        cell = empty(a.c + a.r)
        layers.append(Latent(first, second, kv_norm, ups, cell, turn, rest=rest, **turns))
    return layers
