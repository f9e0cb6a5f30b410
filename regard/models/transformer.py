"""One tower on tokens or patches, with a head: GPT, Llama, DeepSeek, BERT, ViT. What differs is in the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.attention import Context, check_backend
from regard.block import Stack, Tower
from regard.cache import Cache, CacheSpec
from regard.config import Count, ranged
from regard.errors import UsageError
from regard.layers import LM, MLM, Answer, Classify, Tag, activation, make_head
from regard.mask import Mask, Span
from regard.models.base import Model, check_ids, positions
from regard.models.embedding import TokenEmbedding, Tokens, context
from regard.models.summary import pair_flops, weight_flops
from regard.models.vision import PatchEmbedding, Patches


@dataclass(frozen=True)
@ranged
class TransformerConfig:
    """Decoder-only (tower.causal) or encoder-only, on tokens or image patches."""

    embedding: Tokens | Patches
    tower: Tower
    head: LM | MLM | Classify | Tag | Answer | None = None
    pooler: str | None = (
        None  # activation of a dense layer on the first token (BERT's pooled vector)
    )
    max_len: Count | None = None
    kind: str = "transformer"

    def make(self) -> Transformer:
        return Transformer(self)


class Transformer(Model):
    """GPT, Llama, DeepSeek, BERT, ViT."""

    towers: ClassVar[dict[str, str]] = {"tower": "embedding"}

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        c, dim = config, config.tower.dim
        if isinstance(c.embedding, Tokens):
            self.embedding: TokenEmbedding | PatchEmbedding = TokenEmbedding(c.embedding, dim)
        else:
            self.embedding = PatchEmbedding(c.embedding, dim)
        self.tower = Stack(c.tower)
        self.pooler = nn.Linear(dim, dim) if c.pooler else None
        words = c.embedding if isinstance(c.embedding, Tokens) else None
        vocab, width = (words.vocab, words.width) if words else (0, None)
        self.head = make_head(c.head, dim, vocab, width) if c.head else None

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor | list[int] | None = None,
        *,
        types: Tensor | None = None,
        cache: Cache | None = None,
        mask: Mask | None = None,
        probe: Any = None,
        backend: str = "sdpa",
    ) -> Tensor:
        """ids (b t) or images (b c h w) -> what the head gives: (b t V), (b labels), (b t labels), or hidden states."""
        h = self.hidden(
            ids, lengths, types=types, cache=cache, mask=mask, probe=probe, backend=backend
        )
        head = self.config.head
        if isinstance(head, Classify) and head.token == "last" and lengths is not None:
            last = torch.as_tensor(lengths, device=h.device).clamp(min=1) - 1
            h = h[torch.arange(len(h), device=h.device), last][:, None]  # b 1 m
        if isinstance(head, Classify) and head.token == "mean":
            h = mean_real(h, lengths)[:, None]
        return self.logits(h)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.head is None:
            return hidden
        return self.head(hidden, getattr(self.embedding, "weight", None))

    def hidden(
        self,
        ids: Tensor,
        lengths: Tensor | list[int] | None = None,
        *,
        types: Tensor | None = None,
        cache: Cache | None = None,
        mask: Mask | None = None,
        probe: Any = None,
        backend: str = "sdpa",
    ) -> Tensor:
        """The tower's last hidden states (b t m). `mask` replaces the tower's own (documents, prefix, ...)."""
        c = self.config
        check_backend(backend)
        if isinstance(self.embedding, PatchEmbedding):
            if lengths is not None or types is not None or cache is not None:
                raise UsageError("an image has no lengths, types or cache; call model(images)")
            x = self.embedding(ids)
            pos = Span.run(0, x.shape[1], x.device)
        else:
            check_ids(ids, c.embedding.vocab)
            if types is not None:
                if not c.embedding.types:
                    raise UsageError("this model has no segment types; leave `types` out")
                check_ids(types, c.embedding.types, "types")
            if cache is not None and not c.tower.causal:
                raise UsageError(
                    "an encoder sees both ways: it cannot run with a cache; leave `cache` out"
                )
            pos = positions(ids, lengths, context(c.max_len, c.embedding), cache)
            x = self.embedding(ids, pos, types)
        probe = self.probe_of(ids, probe)
        ctx = Context(pos, mask or c.tower.mask, probe=probe, backend=backend)
        return self.tower(x, ctx, caches=(cache, None))

    def pool(
        self,
        ids: Tensor,
        lengths: Tensor | list[int] | None = None,
        *,
        types: Tensor | None = None,
    ) -> Tensor:
        """One vector per row (b m): the pooler's, or the mean of the real tokens where the model has
        none."""
        h = self.hidden(ids, lengths, types=types)
        if self.pooler is not None:
            return activation(self.config.pooler)(self.pooler(h[:, 0]))
        return mean_real(h, lengths)

    @property
    def decodes(self) -> bool:
        return self.config.tower.causal

    def cache_specs(self) -> list[CacheSpec]:
        return self.tower.cache_specs() if self.decodes else super().cache_specs()

    def windows(self) -> list[int | None]:
        return [a.window for a in self.config.tower.each("attention")]

    def flops_per_token(self, context: int) -> int:
        head = self.head_flops(self.head, self.embedding)
        return weight_flops(self.tower) + pair_flops(self.tower, context) + head


def mean_real(h: Tensor, lengths: Tensor | list[int] | None) -> Tensor:
    """Of the real tokens: (b t m) -> (b m)."""
    if lengths is None:
        return h.mean(1)
    n = torch.as_tensor(lengths, device=h.device)[:, None]
    real = torch.arange(h.shape[1], device=h.device)[None] < n
    return (h * real[..., None]).sum(1) / n.clamp(min=1)
