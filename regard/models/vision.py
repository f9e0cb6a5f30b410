"""Images as tokens: patches, class tokens and positions in front of an encoder (ViT, DeiT)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.config import Count, Fraction, Whole, ranged
from regard.errors import UsageError


@dataclass(frozen=True)
@ranged
class Patches:
    """An image of `size` x `size` cut into `patch` x `patch` squares, each a token; `extra` learned tokens stand
    in front (1: the class token; 2: DeiT's distillation token as well)."""

    size: Count = 224
    patch: Count = 16
    channels: Count = 3
    extra: Whole = 1
    bias: bool = True
    dropout: Fraction = 0.0
    kind: str = "patches"

    def __post_init__(self) -> None:
        if self.size % self.patch:
            raise UsageError(f"patch={self.patch} must divide the image size={self.size}")

    @property
    def count(self) -> int:
        return (self.size // self.patch) ** 2


class PatchEmbedding(nn.Module):
    """images (b c h w) -> (b n m): x_i = W patch_i + b, class tokens in front, a learned vector for each place."""

    def __init__(self, config: Patches, dim: int):
        super().__init__()
        c = self.config = config
        self.project = nn.Conv2d(c.channels, dim, c.patch, stride=c.patch, bias=c.bias)
        self.extra = nn.Parameter(torch.zeros(c.extra, dim))
        self.position = nn.Parameter(torch.empty(c.extra + c.count, dim).normal_(std=0.02))
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, images: Tensor) -> Tensor:
        c = self.config
        want = (c.channels, c.size, c.size)
        if images.dim() != 4 or images.shape[1:] != want or not images.is_floating_point():
            raise UsageError(
                f"images must be real numbers of shape (b, {', '.join(map(str, want))}), "
                f"got {images.dtype} {tuple(images.shape)}"
            )
        if len(images) == 0:
            raise UsageError("empty batch: give at least one image")
        x = self.project(images.to(self.project.weight.dtype)).flatten(2).transpose(1, 2)  # b n m
        x = torch.cat([self.extra.expand(len(x), -1, -1), x], 1) + self.position
        return self.dropout(x)
