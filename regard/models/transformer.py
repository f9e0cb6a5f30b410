"""Encoder, decoder and encoder-decoder: embeddings, a tower of blocks, a head.

GPT, Llama, BERT, ViT and DeepSeek are one flow (`Transformer`); T5, BART, Marian, the 2017 model and captioners are the
other (`EncoderDecoder`). What differs between families is in the config.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Context, check_backend
from regard.block import Stack, Tower
from regard.cache import Cache, CacheSpec, Contiguous
from regard.config import UsageError
from regard.layers import LM, MLM, Answer, Classify, Norm, Tag, activation, make_head
from regard.mask import Full, Mask, Span
from regard.models.base import Model, check_ids, positions
from regard.models.summary import pair_flops, weight_flops
from regard.models.vision import PatchEmbedding, Patches
from regard.position import Learned, PositionVectors, Sinusoidal


@dataclass(frozen=True)
class Tokens:
    """Token embeddings, with what is added to them: positions, segment types, a norm."""

    vocab: int
    position: Learned | Sinusoidal | None = None
    types: int = 0
    scaled: bool = False  # times sqrt(dim)
    norm: Norm | None = None
    dropout: float = 0.0
    kind: str = "tokens"


def context(max_len: int | None, tokens: Tokens) -> int | None:
    """The longest input: `max_len`, and no more than there are learned positions."""
    learned = tokens.position.max_len if isinstance(tokens.position, Learned) else None
    return min((n for n in (max_len, learned) if n is not None), default=None)


class TokenEmbedding(nn.Module):
    """ids (b t) -> (b t m)."""

    def __init__(self, config: Tokens, dim: int):
        super().__init__()
        c = self.config = config
        self.weight = nn.Parameter(torch.empty(c.vocab, dim))
        nn.init.normal_(self.weight, std=0.02)
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
        return self.dropout(x if self.norm is None else self.norm(x))


# --- one tower ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TransformerConfig:
    """Decoder-only (tower.causal) or encoder-only, on tokens or image patches."""

    embedding: Tokens | Patches
    tower: Tower
    head: LM | MLM | Classify | Tag | Answer | None = None
    pooler: str | None = (
        None  # activation of a dense layer on the first token (BERT's pooled vector)
    )
    max_len: int | None = None
    kind: str = "transformer"

    def make(self) -> Transformer:
        return Transformer(self)


class Transformer(Model):
    """GPT, Llama, DeepSeek, BERT, ViT."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        c, dim = config, config.tower.dim
        if isinstance(c.embedding, Tokens):
            self.embedding: TokenEmbedding | PatchEmbedding = TokenEmbedding(c.embedding, dim)
        else:
            self.embedding = PatchEmbedding(c.embedding, dim)
        self.tower = Stack(c.tower)
        self.pooler = nn.Linear(dim, dim) if c.pooler else None
        vocab = c.embedding.vocab if isinstance(c.embedding, Tokens) else 0
        self.head = make_head(c.head, dim, vocab) if c.head else None

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
        return h if self.head is None else self.head(h, getattr(self.embedding, "weight", None))

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
        ctx = Context(pos, mask or c.tower.mask, probe=probe, backend=backend)
        return self.tower(x, ctx, caches=(cache, None))

    def pool(self, ids: Tensor, lengths: Tensor | list[int] | None = None) -> Tensor:
        """One vector a row (b m): the pooler's, or the mean of the real tokens where the model has none."""
        h = self.hidden(ids, lengths)
        if self.pooler is not None:
            return activation(self.config.pooler)(self.pooler(h[:, 0]))
        if lengths is None:
            return h.mean(1)
        n = torch.as_tensor(lengths, device=h.device)[:, None]
        real = torch.arange(h.shape[1], device=h.device)[None] < n
        return (h * real[..., None]).sum(1) / n.clamp(min=1)

    def cache_specs(self) -> list[CacheSpec]:
        return self.tower.cache_specs() if self.config.tower.causal else super().cache_specs()

    def windows(self) -> list[int | None]:
        return [a.window for a in self.config.tower.each("attention")]

    def flops_per_token(self, context: int) -> int:
        head = self.head_flops(self.head, self.embedding)
        return weight_flops(self.tower) + pair_flops(self.tower, context) + head


# --- two towers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """An encoder reads the source (tokens or an image), a causal decoder attends to it and writes the target."""

    source: Tokens | Patches
    encoder: Tower
    target: Tokens
    decoder: Tower
    head: LM = LM()
    shared: bool = True  # one embedding table for source and target
    max_len: int | None = None
    kind: str = "encoder_decoder"

    def __post_init__(self) -> None:
        if self.encoder.causal or not self.decoder.causal or self.decoder.cross is None:
            raise UsageError(
                "encoder.causal must be false, decoder.causal true, and decoder.cross given"
            )
        if self.shared and not isinstance(self.source, Tokens):
            raise UsageError("an image and a text cannot share an embedding; set shared=False")
        if (
            self.shared
            and isinstance(self.source, Tokens)
            and self.source.vocab != self.target.vocab
        ):
            raise UsageError(
                f"shared=True needs one vocabulary, got {self.source.vocab} and {self.target.vocab}"
            )

    def make(self) -> EncoderDecoder:
        return EncoderDecoder(self)


class EncoderDecoder(Model):
    """The 2017 Transformer, T5, BART, Marian, captioners."""

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__(config)
        c = config
        if isinstance(c.source, Patches):
            self.source: TokenEmbedding | PatchEmbedding = PatchEmbedding(c.source, c.encoder.dim)
        else:
            self.source = TokenEmbedding(c.source, c.encoder.dim)
        self.encoder = Stack(c.encoder)
        self.target = TokenEmbedding(c.target, c.decoder.dim)
        self.decoder = Stack(c.decoder)
        self.head = make_head(c.head, c.decoder.dim, c.target.vocab)
        if c.shared:
            assert isinstance(self.source, TokenEmbedding)
            self.source.weight = self.target.weight

    def encode(
        self,
        source: Tensor,
        lengths: Tensor | list[int] | None = None,
        *,
        probe: Any = None,
        backend: str = "sdpa",
    ) -> tuple[Tensor, Span]:
        """source ids (b s) or images -> memory (b s m) and its positions (-1 for padding)."""
        c = self.config
        if isinstance(self.source, PatchEmbedding):
            x = self.source(source)
            pos = Span.run(0, x.shape[1], x.device)
        else:
            check_ids(source, c.source.vocab, "source")
            pos = positions(source, lengths, context(c.max_len, c.source))
            x = self.source(source, pos)
        ctx = Context(pos, c.encoder.mask, probe=probe, backend=backend, site="encoder.")
        return self.encoder(x, ctx), pos

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor | list[int] | None = None,
        *,
        source: Tensor | None = None,
        source_lengths: Tensor | list[int] | None = None,
        cache: Cache | None = None,
        mask: Mask | None = None,
        probe: Any = None,
        backend: str = "sdpa",
    ) -> Tensor:
        """Target ids (b t) and source (b s) -> logits (b t V). With a cache the source is needed on the first call
        only: its keys and values are kept, frozen, in `cache.cross`."""
        c = self.config
        check_backend(backend)
        check_ids(ids, c.target.vocab)
        kept = cache is not None and cache.cross is not None
        memory, memory_pos = self._memory(ids, source, source_lengths, kept, probe, backend)
        pos = positions(ids, lengths, context(c.max_len, c.target), cache)
        cross = self._cross(cache, memory, memory_pos)
        ctx = Context(pos, mask or c.decoder.mask, probe=probe, backend=backend, site="decoder.")
        there = replace(
            ctx, mask=Full(), memory=memory, memory_pos=cross.span if cross else memory_pos, memo={}
        )
        h = self.decoder(self.target(ids, pos), ctx, there, (cache, cross))
        if cross is not None:
            cross.freeze()
        return self.head(h, self.target.weight)

    def _memory(
        self,
        ids: Tensor,
        source: Tensor | None,
        source_lengths: Tensor | list[int] | None,
        kept: bool,
        probe: Any,
        backend: str,
    ) -> tuple[Tensor | None, Span | None]:
        """The encoded source, or nothing where a cache keeps its keys and values."""
        if kept:
            if source is not None:
                raise UsageError(
                    "this cache already holds a source; leave `source` out, or make a new cache"
                )
            return None, None
        if source is None:
            raise UsageError("an encoder-decoder needs its source: model(ids, source=source_ids)")
        if len(source) != len(ids):
            raise UsageError(f"source has {len(source)} rows, ids {len(ids)}; they must agree")
        return self.encode(source, source_lengths, probe=probe, backend=backend)

    def _cross(self, cache: Cache | None, memory: Tensor | None, pos: Span | None) -> Cache | None:
        """The cache of cross-attention: made for a new memory, ready to be written once."""
        if cache is None or memory is None or pos is None:
            return cache and cache.cross
        b, size = memory.shape[:2]
        cross = Contiguous(
            self.decoder.cache_specs("cross"),
            b,
            capacity=size,
            device=memory.device,
            dtype=memory.dtype,
        )
        cross.begin(size, None if pos.start == 0 else (pos.index >= 0).sum(-1))
        cache.cross = cross
        return cross

    def cache_specs(self) -> list[CacheSpec]:
        return self.decoder.cache_specs()

    def windows(self) -> list[int | None]:
        return [a.window for a in self.config.decoder.each("attention")]

    def flops_per_token(self, context: int) -> int:
        """Of a target token over `context` target and `context` source keys; encoding is paid once a source token."""
        head = self.head_flops(self.head, self.target)
        return weight_flops(self.decoder) + pair_flops(self.decoder, context) + head
