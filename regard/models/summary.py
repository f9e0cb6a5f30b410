"""What a model weighs and costs, counted from its parts: parameters, cache bytes per token, FLOPs per token."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from regard.block import Stack
from regard.moe import MixtureOfExperts


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def weight_flops(module: nn.Module) -> int:
    """2 for each weight of a matrix that a token meets, once a layer; of the experts only the chosen ones."""
    # All names of a block that layers share, not the first alone.
    weights = module.named_parameters(remove_duplicate=False)
    matrices = sum(p.numel() for n, p in weights if p.dim() > 1 and not n.endswith("_bias"))
    parts = module.named_modules(remove_duplicate=False)
    for moe in (m for _, m in parts if isinstance(m, MixtureOfExperts)):
        experts = sum(w.numel() for w in (moe.gate, moe.up, moe.down))
        matrices -= experts * (moe.config.experts - moe.config.active) // moe.config.experts
    return 2 * matrices


def pair_flops(tower: nn.Module, context: int) -> int:
    """Of the scores and sums of every attention for one query over `context` keys (a window or top-k bounds them).
    A recurrent network has none."""
    blocks: Any = tower.blocks if isinstance(tower, Stack) else ()
    parts = (part for block in blocks for part in (block.attention, block.cross))
    return sum(part.flops(context) for part in parts if part is not None)


def cache_bytes(model: Any) -> int:
    """Bytes that one more token adds to the cache, all layers together."""
    size = next(model.parameters()).element_size()
    return size * sum(spec.numbers() for spec in model.cache_specs())


def state_bytes(model: Any) -> int:
    """Bytes of a row's states in the model's type, however long the row is."""
    shapes = [s for spec in model.cache_specs() for s in spec.state.values()]
    return next(model.parameters()).element_size() * sum(map(math.prod, shapes))


def table(model: Any, context: int | None = None) -> str:
    """A plain text table; `context` is the number of keys that FLOPs are counted at (default: the longest)."""
    context = context or getattr(model.config, "max_len", None) or 1024
    rows = [(name, _layers(part), parameters(part)) for name, part in model.named_children()]
    lines = [f"{'part':<12} {'layers':>6} {'parameters':>16}"]
    lines += [f"{name:<12} {layers or '':>6} {count:>16,}" for name, layers, count in rows]
    lines += [f"{'all':<12} {'':>6} {parameters(model):>16,}"]
    try:
        lines += [f"cache per token      {cache_bytes(model):>14,} bytes"]
        states = state_bytes(model)
        lines += [f"state per row        {states:>14,} bytes"] if states else []
    except ValueError:
        lines += ["cache per token                none (it does not decode step by step)"]
    lines += [f"FLOPs per token      {model.flops_per_token(context):>14,} at {context:,} keys"]
    return "\n".join(lines)


def _layers(part: nn.Module) -> int:
    blocks = getattr(part, "blocks", None)
    return len(blocks) if isinstance(blocks, nn.ModuleList) else 0
