"""One vector for a row, of its states: that of a token, or what a learned query reads of all."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from regard.attention import GQA, Context
from regard.config import Choice, Count, Whole, settings
from regard.errors import UsageError
from regard.layers import MLP, Norm
from regard.mask import Full, Span
from regard.models.base import Lengths, last_real, positions


@settings
class Pool:
    """The state of one token, normed and through a dense layer where there is one. "end" is the first token with that
    id, or the first of all where there is none; "highest" the one with the highest id (older CLIPs)."""

    token: Annotated[str, Choice(("first", "last", "end", "highest"))] = "first"  # whose state
    end: Whole | None = None  # the id that ends a text
    norm: Norm | None = None  # of the state (CLIP's images)
    dense: Count | None = None  # width of a dense layer (SigLIP's texts)
    # texts are filled up with this id to the model's longest, and it counts as text: as SigLIP was trained
    fill: Whole | None = None
    kind: str = "pool"

    def __post_init__(self) -> None:
        if (self.token == "end") != (self.end is not None):
            raise UsageError("pooler.end is the id of token='end': give both or neither")

    def make(self, dim: int) -> TokenPool:
        return TokenPool(self, dim)


class TokenPool(nn.Module):
    """States (b t m) of ids (b t) -> (b m)."""

    def __init__(self, config: Pool, dim: int):
        super().__init__()
        self.config = config
        self.norm = config.norm.make(dim) if config.norm else None
        self.dense = nn.Linear(dim, config.dense) if config.dense else None

    def forward(self, h: Tensor, ids: Tensor, lengths: Lengths) -> Tensor:
        token = self.config.token
        if token == "first":
            h = h[:, 0]
        elif token == "last":
            h = last_real(h, lengths)
        else:
            end = self.config.end
            found = ids if end is None else ids.eq(end).int()
            h = h[torch.arange(len(h), device=h.device), found.argmax(-1)]
        h = h if self.norm is None else self.norm(h)
        return h if self.dense is None else self.dense(h)


@settings
class AttentionPool:
    """A learned query attends to all states, and a feed-forward adds to what it read: x = attention(q, h),
    x + f(norm(x))   (Zhai et al. 2022, arXiv:2106.04560; SigLIP's images)."""

    attention: GQA  # of the query to the states
    ffn: MLP  # of what it read
    norm: Norm = Norm()  # before that
    kind: str = "attention"

    def make(self, dim: int) -> QueryPool:
        return QueryPool(self, dim)


class QueryPool(nn.Module):
    """States (b t m) -> (b m)."""

    def __init__(self, config: AttentionPool, dim: int):
        super().__init__()
        c = self.config = config
        self.query = nn.Parameter(torch.empty(1, dim).normal_(std=0.02))
        self.attention, self.norm, self.ffn = (
            c.attention.make(dim),
            c.norm.make(dim),
            c.ffn.make(dim),
        )

    def forward(self, h: Tensor, ids: Tensor, lengths: Lengths) -> Tensor:
        here, there = Span.run(0, 1, h.device), positions(h, lengths, None)
        ctx = Context(here, Full(), memory=h, memory_pos=there, site="pooler")
        x = self.attention(self.query.expand(len(h), -1, -1), ctx)  # b 1 m
        return self.ffn(self.norm(x), x)[:, 0]
