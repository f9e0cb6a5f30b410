"""What a tower reads: tokens as vectors, and images as tokens (ViT, DeiT)."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import Count, Divides, Fraction, Needs, Positive, Whole, settings
from regard.errors import UsageError
from regard.layers import Norm
from regard.mask import Span
from regard.position import Positions


@settings
class Tokens:
    """Token embeddings, with what is added to them: positions, segment types, a norm. With `width` they are so wide,
    and a linear layer makes them as wide as the tower (ALBERT)."""

    vocab: Count  # rows of the table
    position: Positions | None = None  # what is added for the place
    types: Whole = 0  # segment types (BERT: 2)
    scaled: bool = False  # times sqrt(dim)
    norm: Norm | None = None  # of the sum
    dropout: Fraction = 0.0  # of the sum, in training
    width: Count | None = None  # of the table, where it is not the tower's
    # made as wide as the tower before anything is added, and without a bias (OPT 350M)
    widened_first: Annotated[bool, Needs("width", such="512")] = False
    token_gain: Positive = 1.0  # of a token's row alone (Granite)
    # id of a mask whose tokens count as dropped (ESM): see `spread`
    dropped_id: Whole | None = None
    kind: str = "tokens"

    def make(self, dim: int) -> TokenEmbedding:
        return TokenEmbedding(self, dim)


def context(max_len: int | None, tokens: Tokens) -> int | None:
    """The longest input: `max_len`, and no more than there are positions."""
    positions = tokens.position.max_len if tokens.position else None
    return min((n for n in (max_len, positions) if n is not None), default=None)


class TokenEmbedding(nn.Module):
    """ids (b t) -> (b t m)."""

    def __init__(self, config: Tokens, dim: int):
        super().__init__()
        c = self.config = config
        first = c.widened_first
        self.project = nn.Linear(c.width, dim, bias=not first) if c.width else None
        added, dim = dim if first else c.width or dim, c.width or dim
        self.weight = nn.Parameter(torch.empty(c.vocab, dim))
        nn.init.normal_(self.weight, std=dim**-0.5 if c.scaled else 0.02)  # scaled: 1 in the sum
        self.position = c.position.make(added) if c.position else None
        types = torch.empty(c.types, added).normal_(std=0.02) if c.types else None
        self.types = None if types is None else nn.Parameter(types)
        self.norm = c.norm.make(added) if c.norm else None
        self.dropout = nn.Dropout(c.dropout)
        self.scale = (dim**0.5 if c.scaled else 1.0) * c.token_gain

    def forward(self, ids: Tensor, pos: Span, types: Tensor | None = None) -> Tensor:
        x = self.vectors(ids)
        if self.config.dropped_id is not None:
            x = self.spread(x, ids, pos)
        first = self.config.widened_first
        if self.project is not None and first:
            x = self.project(x)
        if self.types is not None:
            x = x + (self.types[0] if types is None else F.embedding(types, self.types))
        if self.position is not None:
            x = x + self.position(pos.absolute, ids).to(x.dtype)
        x = self.dropout(x if self.norm is None else self.norm(x))
        return x if self.project is None or first else self.project(x)

    def vectors(self, ids: Tensor) -> Tensor:
        """The rows of the table alone."""
        x = F.embedding(ids, self.weight)
        return x * self.scale if self.scale != 1.0 else x

    def spread(self, x: Tensor, ids: Tensor, pos: Span) -> Tensor:
        """Masked tokens are 0, and all others are multiplied by the share that was left in ESM's training (0.88), over
        that which is left in their text: as dropout does it."""
        places = pos.absolute.expand(ids.shape)
        masked = (ids == self.config.dropped_id) & (places >= 0)
        # Packed documents, which begin at 0 each, are texts of their own.
        text = (places == 0).long().cumsum(-1)
        none = torch.zeros(len(ids), ids.shape[1] + 1, device=ids.device)
        gone, real = (none.scatter_add(1, text, m.float()) for m in (masked, places >= 0))
        share = (1 - gone / real.clamp(min=1)).gather(1, text)[..., None]  # b t 1
        return (x * torch.where(masked[..., None], 0, 0.88 / share)).to(x.dtype)


@settings
class Patches:
    """An image of `size` x `size` cut into `patch` x `patch` squares, each a token; `extra` learned tokens stand
    in front (1: the class token; 2: DeiT's distillation token as well). `norm` is of the sum with the positions."""

    size: Count = 224  # side of the image
    patch: Annotated[Count, Divides("size")] = 16  # side of a patch
    channels: Count = 3  # colours
    extra: Whole = 1  # learned tokens in front
    bias: bool = True  # of the map
    dropout: Fraction = 0.0  # in training
    norm: Norm | None = None  # of what comes out (CLIP)
    kind: str = "patches"

    def make(self, dim: int) -> PatchEmbedding:
        return PatchEmbedding(self, dim)

    @property
    def count(self) -> int:
        return (self.size // self.patch) ** 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return self.channels, self.size, self.size

    @property
    def tokens(self) -> int:
        return self.extra + self.count


class PatchEmbedding(nn.Module):
    """images (b c h w) -> (b n m): x_i = W patch_i + b, class tokens in front, a learned vector for each place."""

    def __init__(self, config: Patches, dim: int):
        super().__init__()
        c = self.config = config
        self.project = nn.Conv2d(c.channels, dim, c.patch, stride=c.patch, bias=c.bias)
        self.extra = nn.Parameter(torch.zeros(c.extra, dim)) if c.extra else None
        self.position = nn.Parameter(torch.empty(c.extra + c.count, dim).normal_(std=0.02))
        self.norm = c.norm.make(dim) if c.norm else None
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, images: Tensor) -> Tensor:
        c = self.config
        want = (c.channels, c.size, c.size)
        if images.dim() != 4 or images.shape[1:] != want or not images.is_floating_point():
            shape, given = ", ".join(map(str, want)), f"{images.dtype} {tuple(images.shape)}"
            raise UsageError(f"images must be real numbers of shape (b, {shape}), got {given}")
        if len(images) == 0:
            raise UsageError("empty batch: give at least one image")
        x = self.project(images.to(self.project.weight.dtype)).flatten(2).transpose(1, 2)  # b n m
        if self.extra is not None:
            x = torch.cat([self.extra.expand(len(x), -1, -1), x], 1)
        x = x + self.position
        return self.dropout(x if self.norm is None else self.norm(x))
