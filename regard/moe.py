"""Mixture of experts: a router sends each token to a few of many feed-forwards (Mixtral, DeepSeek)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import Amount, AtMost, Choice, Count, Divides, Positive, Whole, settings
from regard.errors import Former, Renamed, UsageError
from regard.layers import MLP, Add, FeedForward, RMSNorm, activation


@settings
class MoE:
    """y = sum over the chosen experts e of g_e E_e(x), plus the shared experts S(x) that every token uses.

    g = softmax or sigmoid of the router's logits at the `active` best, normalised to sum 1 if `normalized`, times
    `gain`. With `groups`, only the best `active_groups` groups of experts are looked at (a group's score: its best
    expert, or the sum of its two best with sigmoid). `corrected` adds a bias to the choice, not to the weights
    (DeepSeek-V3). `bias` is on the router and inside every expert; with `limit` the gate stays below it, up within it,
    and 1 is added to up (gpt-oss). `weigh_input`: a weight is on what an expert reads, E_e(g_e x).

    `mixer`: experts are chosen one after the other (SparseMixer-v2, arXiv:2409.12136). With logits s of those that are
    left, m the largest, g is their softmax over s_e > m - 2 mixer max(|s_e|, m). Evaluation takes the best; training
    draws one by g, and a third of the weight counts where it is not the best, but for one time in four: so the gradient
    of g is one of the choice too."""

    experts: Count  # how many there are
    active: Annotated[Count, AtMost("experts")]  # how many a token uses
    ffn_dim: Count  # width inside each
    activation: str = "silu"  # inside each
    shared: Whole = 0  # experts that every token uses
    shared_bias: bool = False  # inside them
    shared_dim: Count | None = None  # of all shared experts together; default: shared * ffn_dim
    shared_gated: bool = False  # their output by a sigmoid of x (Qwen3-Next)
    # of the router's logits
    score: Annotated[str, Choice(("softmax", "sigmoid", "sqrtsoftplus"))] = "softmax"
    normalized: bool = True  # the chosen weights sum to 1
    gain: Positive = 1.0  # the weights are multiplied by it
    groups: Annotated[Count, Divides("experts")] = 1  # experts are chosen within groups
    active_groups: Annotated[Count, AtMost("groups")] = 1  # groups that are looked at
    corrected: bool = False  # a bias on the choice, which keeps the balance
    bias: bool = False  # on the router and inside every expert
    limit: Positive | None = None  # bounds of gate and up (gpt-oss)
    # experts whose scores make that of a group; default: 1, or 2 with sigmoid
    group_best: Count | None = None
    weigh_input: bool = False  # weights are on what experts read (Llama 4)
    wide_router: bool = False  # its weight stays float32 in half precision (ERNIE 4.5)
    mixer: Amount | None = None  # how near to the best a chosen expert may be (Phi-3.5-MoE)
    # eps: router, experts and shared ones read the stream by norms of their own, and the latter add by such (Gemma 4)
    normed: Amount | None = None
    gains: bool = False  # a trained number for each expert, which its weight is multiplied by
    # with limit: 1 is added to up; False: it is not, and shared experts have that limit too (DeepSeek-V4)
    raised: bool = True
    hashed: Whole = 0  # rows of a table by token, which says the experts; 0: the router chooses
    kind: str = "moe"

    def __post_init__(self) -> None:
        other = self.groups > 1 or self.corrected or self.gains or self.hashed
        if self.mixer is not None and (other or self.score != "softmax"):
            why = "ffn.mixer scores by softmax, without groups, a bias on the choice, gains or a table"
            raise UsageError(f"{why}; leave these out")
        within = self.experts // self.groups * self.active_groups
        if self.active > within:
            raise UsageError(
                f"ffn.active={self.active} experts are to be chosen, but ffn.active_groups={self.active_groups} of "
                f"ffn.groups={self.groups} hold {within}; choose fewer, or look at more groups"
            )

    @property
    def all_shared(self) -> MLP:
        """The shared experts as one wide feed-forward."""
        width = self.shared_dim or self.shared * self.ffn_dim
        limit = None if self.raised else self.limit
        return MLP(width, self.activation, gated=True, bias=self.shared_bias, limit=limit)

    def make(self, dim: int, add: Add | None = None) -> MixtureOfExperts:
        return MixtureOfExperts(self, dim, add)


class MixtureOfExperts(Renamed, nn.Module):
    """x (b t m) -> (b t m). Expert weights are stacked: gate and up (E f m), down (E m f); biases (E f), (E m)."""

    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    # Loading in half precision leaves these float32: so close that rounding them chooses other experts.
    wide: tuple[str, ...]

    def __init__(self, config: MoE, dim: int, add: Add | None = None):
        super().__init__()
        c = config
        self.config, self.act = c, activation(c.activation)
        self.router = nn.Linear(dim, c.experts, bias=c.bias)
        self.wide = ("correction", "table", *["router.weight"] * c.wide_router)
        zeros = torch.zeros(c.experts)
        self.correction = nn.Parameter(zeros, requires_grad=False) if c.corrected else None
        self.gate = nn.Parameter(torch.empty(c.experts, c.ffn_dim, dim))
        self.up = nn.Parameter(torch.empty(c.experts, c.ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(c.experts, dim, c.ffn_dim))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=0.02)
        for name, width in (("gate", c.ffn_dim), ("up", c.ffn_dim), ("down", dim)):
            bias = nn.Parameter(torch.zeros(c.experts, width)) if c.bias else None
            self.register_parameter(f"{name}_bias", bias)
        self.shared = FeedForward(c.all_shared, dim) if c.shared else None
        self.norms = None
        if c.normed is not None:
            parts = ["router", "experts", "experts_out"] + ["shared", "shared_out"] * bool(c.shared)
            eps = c.normed
            self.norms = nn.ModuleDict({part: RMSNorm(dim, eps) for part in parts})
        self.gains = nn.Parameter(torch.ones(c.experts)) if c.gains else None
        self.table = None
        if c.hashed:
            table = torch.arange(c.hashed)[:, None] * c.active + torch.arange(c.active)
            # Whole numbers, which float32 holds: parameters are cast, moved and saved as one.
            self.table = nn.Parameter((table % c.experts).float(), requires_grad=False)
        self.shared_gate = nn.Linear(dim, 1, bias=False) if c.shared and c.shared_gated else None
        self.add = add or Add()
        # Of the last forward in training: scores (n E) and choices (n a) of every token.
        self.routed: tuple[Tensor, Tensor] | None = None
        # Tokens that chose each expert (E), over the micro-batches of a step.
        self.load: Tensor | None = None

    @property
    def special(self) -> str:
        """Why no fast part can stand for this one, whatever it holds, or nothing."""
        if self.config.mixer is not None:
            return "its experts are chosen one after the other"
        return "its weights are on what experts read" if self.config.weigh_input else ""

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts with no record: tensors that carry a graph cannot be copied."""
        return {**self.__dict__, "routed": None}

    def logits(self, x: Tensor) -> Tensor:
        """The router's (n E), in float32 at least, under autocast too."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.router.bias is None else self.router.bias.to(wide)
            return F.linear(x.to(wide), self.router.weight.to(wide), bias)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (n m) -> the chosen experts (n a) and their weights (n a), in float32 at least."""
        c = self.config
        if c.mixer is not None:
            return self.mixed(self.logits(x), c.mixer)
        score = self.score(x)
        wish = score if self.correction is None else score + self.correction
        if c.groups > 1:
            grouped = wish.unflatten(-1, (c.groups, -1))  # n groups E/groups
            top = c.group_best or (1 if c.score == "softmax" else 2)
            rank = grouped.topk(min(top, grouped.shape[-1]), -1).values.sum(-1)
            kept = torch.zeros_like(rank).scatter(1, self.choose(rank, c.active_groups), 1.0).bool()
            wish = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        chosen = self.choose(wish, c.active)
        return chosen, self.weigh(score, chosen)

    def score(self, x: Tensor) -> Tensor:
        """Of every expert (n E)."""
        logits, kind = self.logits(x), self.config.score
        if kind == "sqrtsoftplus":
            return self.softplus(logits).sqrt()
        return logits.softmax(-1) if kind == "softmax" else self.sigmoid(logits)

    def by_table(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As `route`, but the table says which experts."""
        assert self.table is not None
        chosen = self.table[ids.flatten()].long()
        return chosen, self.weigh(self.score(x), chosen)

    def weigh(self, score: Tensor, chosen: Tensor) -> Tensor:
        """The chosen experts' weights (n a)."""
        c = self.config
        if self.training and torch.is_grad_enabled():
            self._record(score, chosen)
        weight = score.gather(-1, chosen)
        if c.normalized:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        if self.gains is not None:
            weight = weight * self.gains[chosen]
        return weight * c.gain

    def mixed(self, logits: Tensor, near: float) -> tuple[Tensor, Tensor]:
        """`route` by SparseMixer."""
        left = logits
        chosen: list[Tensor] = []
        weight: list[Tensor] = []
        for _ in range(self.config.active):
            most = left.detach().amax(-1, keepdim=True)
            far = (most - logits.detach()) / logits.detach().abs().clamp(min=most) > 2 * near
            left = left.masked_fill(far, -torch.inf)
            g = left.softmax(-1)
            best = self.choose(left.detach(), 1)
            e = best
            if self.training:
                # The largest logit with Gumbel noise is a draw by softmax.
                noise = torch.empty_like(g).exponential_().log()
                e = (left.detach() - noise).argmax(-1, keepdim=True)
            w = g.gather(-1, e)
            if self.training:
                whole = (e == best) | (torch.rand_like(w) > 0.75)
                w = w - w.detach() * torch.where(whole, 0.0, 2 / 3)
            chosen, weight = [*chosen, e], [*weight, w]
            left = logits.scatter(-1, torch.cat(chosen, -1), -torch.inf)
        if self.training and torch.is_grad_enabled():
            self._record(logits.softmax(-1), torch.cat(chosen, -1))
        return torch.cat(chosen, -1), torch.cat(weight, -1) * self.config.gain

    def choose(self, scores: Tensor, k: int) -> Tensor:
        """Places (n k) of the k largest of each row, the largest first; of equal ones the first."""
        return scores.argsort(dim=-1, descending=True, stable=True)[:, :k]

    # As torch.compiler.disable, but torch._dynamo, which takes seconds to import, waits for the first call.
    @torch._disable_dynamo
    def _record(self, score: Tensor, chosen: Tensor) -> None:
        """Keep what `balance_loss` reads; not in a backward pass, where activation checkpointing
        routes the same tokens again."""
        if torch._C._current_graph_task_id() == -1:
            self.routed = score, chosen

    def forward(
        self, x: Tensor, residual: Tensor | None = None, ids: Tensor | None = None
    ) -> Tensor:
        x = self.expert_input(x)
        routed = self.by_norm("router", x).flatten(0, -2)
        if self.norms is not None:
            routed = routed * routed.shape[-1] ** -0.5
        chosen = self.route(routed) if ids is None else self.by_table(routed, ids)
        out = self.mix(self.by_norm("experts", x), *chosen)
        out = self.by_norm("experts_out", out)
        if self.shared is not None:
            shared = self.by_norm("shared_out", self.shared(self.by_norm("shared", x)))
            if self.shared_gate is not None:
                shared = self.sigmoid(self.shared_gate(x)) * shared
            out = self.plus(out, shared)
        return self.add_residual(out, residual)

    def by_norm(self, name: str, x: Tensor) -> Tensor:
        """x, normed where this mixture has norms of its own."""
        return x if self.norms is None else self.norms[name](x)

    def expert_input(self, x: Tensor) -> Tensor:
        """What the router and all experts read."""
        return x

    def mix(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        """The chosen experts (n a) of each token, by their weights (n a)."""
        flat = x.flatten(0, -2)  # n m
        out = torch.zeros_like(flat)
        for e in chosen.unique().tolist():
            token, place = (chosen == e).nonzero(as_tuple=True)
            rows, g = flat[token], weight[token, place, None]
            if self.config.weigh_input:
                y = self.expert(rows * g.to(rows.dtype), e)
            else:
                y = self.expert(rows, e) * g
            out.index_add_(0, token, y.to(out.dtype))
        return out.view_as(x)

    def plus(self, out: Tensor, shared: Tensor) -> Tensor:
        return out + shared

    def add_residual(self, out: Tensor, residual: Tensor | None) -> Tensor:
        return self.add(out, residual)

    def expert(self, x: Tensor, e: int) -> Tensor:
        gate, up = self.project(x, e, "gate"), self.project(x, e, "up")
        if self.config.limit is not None:
            limit = self.config.limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + int(self.config.raised)
        return self.project(self.act(gate) * up, e, "down")

    def project(self, x: Tensor, e: int, name: str) -> Tensor:
        bias = getattr(self, f"{name}_bias")
        return self.product(x, getattr(self, name)[e], None if bias is None else bias[e])

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def softplus(self, x: Tensor) -> Tensor:
        return F.softplus(x)

    enter = Former("expert_input")
    leave = Former("add_residual")


def balance_loss(model: nn.Module, counted: Tensor | None = None) -> Tensor:
    """E sum_e f_e P_e of the last forward in training, f_e the assignments to expert e per token and P_e its mean
    probability, over all layers (Switch Transformer, eq. 4-6; transformers' `load_balancing_loss_func`). It is least,
    `active`, where every expert gets as much. A sigmoid router's probabilities are its scores, normalised.

    `counted` (b t) marks the tokens that are not padding. The record is released, and its choices are counted for
    `update_bias`: call it once after every forward. Without mixtures it is 0."""
    sums: dict[int, list[Tensor]] = {}
    for layer in _mixtures(model):
        if layer.routed is None:
            continue
        (score, chosen), layer.routed, e = layer.routed, None, layer.config.experts
        p = score / score.sum(-1, keepdim=True)
        real = p.new_ones(len(p)) if counted is None else counted.flatten().to(p)
        with torch.no_grad():
            hits = real.repeat_interleave(chosen.shape[1])
            load = p.new_zeros(e).index_add(0, chosen.flatten(), hits)
        layer.load = load if layer.load is None else layer.load + load
        now = [load, real @ p, real.sum()]
        sums[e] = [a + b for a, b in zip(sums[e], now, strict=True)] if e in sums else now
    losses = [e * (load @ p) / n.clamp(min=1) ** 2 for e, (load, p, n) in sums.items()]
    return torch.stack(losses).sum() if losses else next(model.parameters()).new_zeros(())


def update_bias(
    model: nn.Module, speed: float, total: Callable[[Tensor], Tensor] = lambda load: load
) -> None:
    """After a step: b_e += speed sign(mean load - load_e), so that the choice turns to experts that got too few tokens
    (DeepSeek-V3, arXiv:2412.19437, 2.1.2). `total` sums the loads over processes that saw other tokens. Loads start
    anew."""
    for layer in _mixtures(model):
        if layer.load is not None and layer.correction is not None:
            load = total(layer.load)
            layer.correction.data += speed * torch.sign(load.mean() - load)
        layer.load = None


def _mixtures(model: nn.Module) -> Iterator[MixtureOfExperts]:
    return (m for m in model.modules() if isinstance(m, MixtureOfExperts))
