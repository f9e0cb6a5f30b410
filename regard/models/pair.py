"""Texts and images in one space: a model of each, and how alike their vectors are (CLIP, SigLIP)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import Real, settings
from regard.errors import UsageError
from regard.layers import Project
from regard.models.base import Lengths, Model
from regard.models.embedding import Patches, Tokens
from regard.models.pool import Pool
from regard.models.transformer import TransformerConfig


def _width(config: TransformerConfig) -> int:
    """Of the vector that `Transformer.pool` gives."""
    if isinstance(config.head, Project):
        return config.head.width
    dense = config.pooler.dense if isinstance(config.pooler, Pool) else None
    return dense or config.tower.outputs


@settings
class PairConfig:
    """A model of texts and one of images, each of which pools what it reads into a vector of the same width."""

    text: TransformerConfig  # reads tokens
    image: TransformerConfig  # reads patches
    scale: Real = 2.6592  # the logarithm of what similarities are multiplied by, at the start
    biased: bool = False  # a number added to all similarities (SigLIP)
    head: None = None  # nothing is predicted
    kind: str = "pair"

    def __post_init__(self) -> None:
        if not isinstance(self.text.embedding, Tokens) or not isinstance(
            self.image.embedding, Patches
        ):
            raise UsageError("a pair has a text that reads tokens and an image that reads patches")
        text, image = _width(self.text), _width(self.image)
        if text != image:
            widths = f"vectors of {text} numbers for texts, and of {image} for images"
            fix = "tower.dim, head.width of a projection, or pooler.dense"
            raise UsageError(f"a pair compares vectors of one width, but has {widths}; see {fix}")

    def make(self) -> Pair:
        return Pair(self)


class Pair(Model):
    """Texts and images -> how alike they are; `texts` and `images` give their vectors, of length 1."""

    writer, words = "text", "image"
    decodes = False
    head = None

    def __init__(self, config: PairConfig):
        super().__init__(config)
        self.text, self.image = config.text.make(), config.image.make()
        self.scale = nn.Parameter(torch.tensor(float(config.scale)))
        self.bias = nn.Parameter(torch.zeros(())) if config.biased else None

    def forward(  # type: ignore[override]
        self, ids: Tensor, lengths: Lengths = None, *, images: Tensor, **options: Any
    ) -> Tensor:
        """Texts (t s) and images (n c h w) -> (n t): exp(scale) times the cosine of the angle between their vectors.
        The options are those of `Transformer.hidden`."""
        read, seen = self.texts(ids, lengths, **options), self.images(images, **options)
        alike = seen @ read.T * self.scale.exp()
        return alike if self.bias is None else alike + self.bias

    def texts(self, ids: Tensor, lengths: Lengths = None, **options: Any) -> Tensor:
        """(t s) -> (t m)."""
        return F.normalize(self.text.pool(ids, lengths, **options), dim=-1)

    def images(self, images: Tensor, **options: Any) -> Tensor:
        """(n c h w) -> (n m)."""
        return F.normalize(self.image.pool(images, **options), dim=-1)

    def flops_per_token(self, context: int) -> int:
        """Of a token of a text."""
        return self.text.flops_per_token(context)
