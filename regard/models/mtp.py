"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437): layers behind the tower, each guessing one token more.

The tower's last state h of the token at t predicts the token at t + 1. Layer k = 0, 1, ... is told that one, and
predicts the next:

    h_0(t) = h(t)
    h_(k+1)(t) = norm(block_k(W_k [norm(e(x_(t+1+k))); norm(h_k(t))]))        p(x_(t+2+k)) = softmax(head(h_(k+1)(t)))

with the model's own embedding e and head. In training they are a second loss; in decoding they guess for a model that
checks its own guesses in one pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Context
from regard.block import Stack, Tower, layer_context
from regard.config import Count, settings
from regard.errors import UsageError


@settings
class MTP:
    """Layers that predict tokens further on. They are like the tower's last layer, with the attention of the last one
    that sees tokens."""

    depth: Count = 1  # how many layers: tokens that are predicted beside the next one
    shared: bool = False  # one map and one set of norms for all layers (Qwen3-Next)
    kind: str = "mtp"

    def make(self, tower: Tower) -> MTPLayers:
        return MTPLayers(self, tower)


def mtp_tower(config: MTP, tower: Tower) -> Tower:
    """The blocks of MTP layers: what a tower has at its end."""
    named = ("cross", "per_layer", "streams", "out_dim", "borrowing")
    given = [name for name in named if getattr(tower, name)]
    given += [] if tower.causal else ["causal=False"]
    given += [] if tower.relative is None or tower.relative_shared else ["relative_shared=False"]
    given += ["ffn.hashed"] if tower.reads_ids and not tower.per_layer else []
    if given:
        why = f"MTP layers guess for a plain decoder; this tower has {', '.join(given)}"
        raise UsageError(f"{why}: leave mtp out")
    with torch.device("meta"):
        seen = [a for a in tower.each("attention") if not a.make(tower.dim).cache_spec().state]
    if not seen:
        raise UsageError("MTP layers attend to tokens, and no layer here does; leave mtp out")
    last = {name: tower.each(name)[-1] for name in ("ffn", "order")}
    how: dict[str, Any] = {"blocks": None, "first_norm": True, "final_norm": False}
    return replace(tower, layers=config.depth, attention=seen[-1], layer_drop=0.0, **last, **how)


class MTPLayers(nn.Module):
    """States (b t m) and the vectors of the tokens that follow them -> states of the tokens after these."""

    def __init__(self, config: MTP, tower: Tower):
        super().__init__()
        self.config, dim = config, tower.dim
        self.tower = Stack(mtp_tower(config, tower))
        sets = 1 if config.shared else config.depth

        def each(make: Any) -> nn.ModuleList:
            parts = [make() for _ in range(sets)]
            return nn.ModuleList(parts[k % sets] for k in range(config.depth))

        self.token_norms = each(lambda: tower.norm.make(dim))
        self.state_norms = each(lambda: tower.norm.make(dim))
        self.maps = each(lambda: nn.Linear(2 * dim, dim, bias=False))
        self.norms = each(lambda: tower.norm.make(dim))

    def forward(
        self, layer: int, states: Tensor, tokens: Tensor, ctx: Context, cache: Any = None
    ) -> Tensor:
        both = [self.token_norms[layer](tokens), self.state_norms[layer](states)]
        ctx = layer_context(ctx, cache, layer, f"mtp.{layer}.self")
        ctx.relative = self.tower.relative
        x = self.maps[layer](torch.cat(both, -1))
        return self.norms[layer](self.tower.blocks[layer](x, ctx))
