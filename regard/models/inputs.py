"""Random inputs of a model: what it reads, whatever it means."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.models.base import Model
from regard.models.embedding import Patches, Tokens, context
from regard.models.sound import Sound


def random_inputs(
    model: Model, rows: int, tokens: int, seed: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Rows `tokens` long, or as long as the model takes, and those that its encoder reads, if it has one, a
    little shorter."""
    draw, c = torch.Generator().manual_seed(seed), model.config

    def read(part: Tokens | Patches | Sound | None, vocab: int, size: int) -> Tensor:
        if isinstance(part, (Patches, Sound)):
            return torch.randn(rows, *part.shape, generator=draw)
        most = None if part is None else context(c.max_len, part)
        size = size if most is None else min(size, most)
        return torch.randint(vocab if part is None else part.vocab, (rows, size), generator=draw)

    # Recurrent models have the sizes of their vocabularies instead of embeddings.
    vocab = getattr(c, "vocab", 0)
    if not model.reads_source:
        return read(getattr(c, "embedding", None), vocab, tokens), None
    words = getattr(c, "source_vocab", 0)
    source = read(getattr(c, "source", None), words, max(tokens - 3, 4))
    return read(getattr(c, "target", None), vocab, tokens), source
