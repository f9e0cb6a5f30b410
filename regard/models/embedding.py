"""Token embeddings, with what is added to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import Count, Fraction, Whole, ranged
from regard.layers import Norm
from regard.mask import Span
from regard.position import Learned, PositionVectors, Sinusoidal


@dataclass(frozen=True)
@ranged
class Tokens:
    """Token embeddings, with what is added to them: positions, segment types, a norm. With `width` they are so wide,
    and a linear layer makes them as wide as the tower (ALBERT)."""

    vocab: Count
    position: Learned | Sinusoidal | None = None
    types: Whole = 0
    scaled: bool = False  # times sqrt(dim)
    norm: Norm | None = None
    dropout: Fraction = 0.0
    width: Count | None = None
    kind: str = "tokens"


def context(max_len: int | None, tokens: Tokens) -> int | None:
    """The longest input: `max_len`, and no more than there are positions."""
    positions = tokens.position.max_len if tokens.position else None
    return min((n for n in (max_len, positions) if n is not None), default=None)


class TokenEmbedding(nn.Module):
    """ids (b t) -> (b t m)."""

    def __init__(self, config: Tokens, dim: int):
        super().__init__()
        c = self.config = config
        self.project = nn.Linear(c.width, dim) if c.width else None
        dim = c.width or dim
        self.weight = nn.Parameter(torch.empty(c.vocab, dim))
        nn.init.normal_(self.weight, std=dim**-0.5 if c.scaled else 0.02)  # scaled: 1 in the sum
        self.position = PositionVectors(c.position, dim) if c.position else None
        self.types = nn.Parameter(torch.empty(c.types, dim).normal_(std=0.02)) if c.types else None
        self.norm = c.norm.make(dim) if c.norm else None
        self.dropout = nn.Dropout(c.dropout)
        self.scale = dim**0.5 if c.scaled else 1.0

    def forward(self, ids: Tensor, pos: Span, types: Tensor | None = None) -> Tensor:
        x = F.embedding(ids, self.weight)
        x = x * self.scale if self.scale != 1.0 else x
        if self.types is not None:
            x = x + (self.types[0] if types is None else F.embedding(types, self.types))
        if self.position is not None:
            x = x + self.position(pos.index, ids).to(x.dtype)
        x = self.dropout(x if self.norm is None else self.norm(x))
        return x if self.project is None else self.project(x)
