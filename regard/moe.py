"""Mixture of experts: a router sends each token to a few of many feed-forwards (Mixtral, DeepSeek)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import Count, Positive, UsageError, Whole, ranged
from regard.layers import MLP, FeedForward, activation


@dataclass(frozen=True)
@ranged
class MoE:
    """y = sum over the chosen experts e of g_e E_e(x), plus the shared experts S(x) that every token uses.

    g = softmax or sigmoid of the router's logits at the `active` best, normalised to sum 1 if `normalized`, times
    `gain`.
    With `groups`, only the best `active_groups` groups of experts are looked at (a group's score: its best expert,
    or the
    sum of its two best with sigmoid). `corrected` adds a bias to the choice, not to the weights (DeepSeek-V3)."""

    experts: Count
    active: Count
    ffn_dim: Count
    activation: str = "silu"
    shared: Whole = 0
    shared_bias: bool = False
    score: str = "softmax"
    normalized: bool = True
    gain: Positive = 1.0
    groups: Count = 1
    active_groups: Count = 1
    corrected: bool = False
    kind: str = "moe"

    def __post_init__(self) -> None:
        if self.score not in ("softmax", "sigmoid"):
            raise UsageError(f"ffn.score is {self.score!r}; choose softmax or sigmoid")
        if not 1 <= self.active <= self.experts:
            raise UsageError(
                f"ffn.active={self.active} must be between 1 and ffn.experts={self.experts}"
            )
        if self.experts % self.groups or not 1 <= self.active_groups <= self.groups:
            raise UsageError(
                f"ffn.groups={self.groups} must divide ffn.experts={self.experts} and "
                f"ffn.active_groups={self.active_groups} be between 1 and ffn.groups"
            )

    @property
    def all_shared(self) -> MLP:
        """The shared experts as one wide feed-forward."""
        return MLP(self.shared * self.ffn_dim, self.activation, gated=True, bias=self.shared_bias)

    def make(self, dim: int) -> MixtureOfExperts:
        return MixtureOfExperts(self, dim)


class MixtureOfExperts(nn.Module):
    """x (b t m) -> (b t m). Expert weights are stacked: gate and up (E f m), down (E m f)."""

    def __init__(self, config: MoE, dim: int):
        super().__init__()
        c = config
        self.config, self.act = c, activation(c.activation)
        self.router = nn.Linear(dim, c.experts, bias=False)
        self.correction = (
            nn.Parameter(torch.zeros(c.experts), requires_grad=False) if c.corrected else None
        )
        self.gate = nn.Parameter(torch.empty(c.experts, c.ffn_dim, dim))
        self.up = nn.Parameter(torch.empty(c.experts, c.ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(c.experts, dim, c.ffn_dim))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=0.02)
        self.shared = FeedForward(c.all_shared, dim) if c.shared else None
        self.project: Callable[[Tensor, Tensor], Tensor] = F.linear
        self.sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid

    def logits(self, x: Tensor) -> Tensor:
        """The router's (n E), in float32."""
        return F.linear(x.float(), self.router.weight.float())

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (n m) -> the chosen experts (n a) and their weights (n a), in float32."""
        c, logits = self.config, self.logits(x)
        score = logits.softmax(-1) if c.score == "softmax" else self.sigmoid(logits)
        wish = score if self.correction is None else score + self.correction
        if c.groups > 1:
            grouped = wish.unflatten(-1, (c.groups, -1))  # n groups E/groups
            top = 1 if c.score == "softmax" else min(2, grouped.shape[-1])
            rank = grouped.topk(top, -1).values.sum(-1)
            kept = torch.zeros_like(rank).scatter(1, best(rank, c.active_groups), 1.0).bool()
            wish = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        chosen = best(wish, c.active)
        weight = score.gather(-1, chosen)
        if c.normalized:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return chosen, weight * c.gain

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # n m
        chosen, weight = self.route(flat)
        out = torch.zeros_like(flat)
        for e in chosen.unique().tolist():
            token, place = (chosen == e).nonzero(as_tuple=True)
            mine = flat[token]
            h = self.act(self.project(mine, self.gate[e])) * self.project(mine, self.up[e])
            y = self.project(h, self.down[e]) * weight[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        out = out.view_as(x)
        return out if self.shared is None else out + self.shared(x)


def best(x: Tensor, k: int) -> Tensor:
    """Places (n k) of the k largest of each row, the largest first; of equal ones the first."""
    return x.argsort(dim=-1, descending=True, stable=True)[:, :k]
