"""What a model weighs and costs, counted from its parts: parameters, cache bytes per token, FLOPs per token."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.attention.latent import LatentAttention
from regard.attention.multihead import GroupedQueryAttention
from regard.attention.sparse import SparseAttention
from regard.moe import MixtureOfExperts


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def weight_flops(module: nn.Module) -> int:
    """2 for each weight of a matrix that a token meets; of the experts only the chosen ones."""
    matrices = sum(p.numel() for p in module.parameters() if p.dim() > 1)
    for moe in (m for m in module.modules() if isinstance(m, MixtureOfExperts)):
        experts = sum(w.numel() for w in (moe.gate, moe.up, moe.down))
        matrices -= experts * (moe.config.experts - moe.config.active) // moe.config.experts
    return 2 * matrices


def pair_flops(module: nn.Module, context: int) -> int:
    """Of the scores and sums of every attention for one query over `context` keys (a window or top-k bounds them)."""
    total = 0
    for m in module.modules():
        if isinstance(m, SparseAttention):
            total += 2 * context * m.indexer.h * m.indexer.d
            total -= 2 * max(context - m.config.topk, 0) * _pair(m.attention)
        elif isinstance(m, (GroupedQueryAttention, LatentAttention)):
            keys = min(context, m.config.window or context)
            total += 2 * keys * _pair(m)
    return total


def _pair(m: GroupedQueryAttention | LatentAttention) -> int:
    """Multiply-adds of one query-key pair: the score's width and the value's, for every head."""
    if isinstance(m, LatentAttention):
        return m.h * (m.d + m.r + m.e)
    return m.h * (m.d + m.e)


def cache_bytes(model: Any) -> int:
    """Bytes that one more token adds to the cache, all layers together."""
    size = next(model.parameters()).element_size()
    return size * sum(spec.numbers() for spec in model.cache_specs())


def table(model: Any, context: int | None = None) -> str:
    """A plain text table; `context` is the number of keys that FLOPs are counted at (default: the longest)."""
    context = context or getattr(model.config, "max_len", None) or 1024
    rows = [(name, _layers(part), parameters(part)) for name, part in model.named_children()]
    lines = [f"{'part':<12} {'layers':>6} {'parameters':>16}"]
    lines += [f"{name:<12} {layers or '':>6} {count:>16,}" for name, layers, count in rows]
    lines += [f"{'all':<12} {'':>6} {parameters(model):>16,}"]
    try:
        lines += [f"cache per token      {cache_bytes(model):>14,} bytes"]
    except ValueError:
        lines += ["cache per token                none (it does not decode step by step)"]
    lines += [f"FLOPs per token      {model.flops_per_token(context):>14,} at {context:,} keys"]
    return "\n".join(lines)


def _layers(part: nn.Module) -> int:
    blocks = getattr(part, "blocks", None)
    return len(blocks) if isinstance(blocks, nn.ModuleList) else 0
