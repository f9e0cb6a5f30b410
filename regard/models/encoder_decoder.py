"""Two towers: an encoder reads a source, a decoder attends to it and writes: 2017, T5, BART, Marian, captioners."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from regard.attention import GQA, Context, check_backend
from regard.block import Stack, Tower
from regard.cache import Cache, CacheSpec, Contiguous
from regard.config import Count, ranged
from regard.errors import UsageError
from regard.layers import LM, make_head
from regard.mask import Full, Mask, Span
from regard.models.base import Model, check_ids, check_source, positions
from regard.models.embedding import TokenEmbedding, Tokens, context
from regard.models.summary import pair_flops, weight_flops
from regard.models.vision import PatchEmbedding, Patches


@dataclass(frozen=True)
@ranged
class EncoderDecoderConfig:
    """An encoder reads the source (tokens or an image), a causal decoder attends to it and writes the target."""

    source: Tokens | Patches
    encoder: Tower
    target: Tokens
    decoder: Tower
    head: LM | None = LM()
    shared: bool = True  # one embedding table for source and target
    max_len: Count | None = None
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
        words = c.target
        self.head = make_head(c.head, c.decoder.dim, words.vocab, words.width) if c.head else None
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
        h = self.hidden(
            ids,
            lengths,
            source=source,
            source_lengths=source_lengths,
            cache=cache,
            mask=mask,
            probe=probe,
            backend=backend,
        )
        return self.logits(h)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden if self.head is None else self.head(hidden, self.target.weight)

    def hidden(
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
        """The decoder's last hidden states (b t m)."""
        c = self.config
        check_backend(backend)
        check_ids(ids, c.target.vocab)
        memory: Tensor | None = None
        memory_pos: Span | None = None
        if check_source(ids, source, cache):
            assert source is not None
            memory, memory_pos = self.encode(source, source_lengths, probe=probe, backend=backend)
        pos = positions(ids, lengths, context(c.max_len, c.target), cache)
        cross = self._cross(cache, memory, memory_pos)
        ctx = Context(pos, mask or c.decoder.mask, probe=probe, backend=backend, site="decoder.")
        there = replace(
            ctx, mask=Full(), memory=memory, memory_pos=cross.span if cross else memory_pos, memo={}
        )
        h = self.decoder(self.target(ids, pos), ctx, there, (cache, cross))
        if cross is not None:
            cross.freeze()
        return h

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

    @property
    def shares_source(self) -> bool:
        return isinstance(self.config.decoder.cross, GQA)

    def cache_specs(self) -> list[CacheSpec]:
        return self.decoder.cache_specs()

    def windows(self) -> list[int | None]:
        return [a.window for a in self.config.decoder.each("attention")]

    def flops_per_token(self, context: int) -> int:
        """Of a target token over `context` target and `context` source keys; encoding is paid once a source token."""
        head = self.head_flops(self.head, self.target)
        return weight_flops(self.decoder) + pair_flops(self.decoder, context) + head
