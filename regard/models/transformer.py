"""Models of towers, on tokens or patches. One tower with a head: GPT, Llama, DeepSeek, BERT, ViT. Two, an encoder that
reads and a decoder that attends to it and writes: 2017, T5, BART, Marian, captioners. What differs is in the config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Context, check_backend
from regard.block import Stack, Tower
from regard.cache import Cache, CacheSpec
from regard.config import Count, settings
from regard.errors import UsageError
from regard.layers import LM, MLM, Answer, Classify, Project, Projection, Tag, activation, make_head
from regard.mask import Full, Mask, Span
from regard.models import base
from regard.models.base import Lengths, Model, positions
from regard.models.embedding import PatchEmbedding, Patches, TokenEmbedding, Tokens, context
from regard.models.mtp import MTP, MTPLayers, mtp_tower
from regard.models.pool import AttentionPool, Pool
from regard.models.sound import Sound, SoundEmbedding


def embed(
    part: TokenEmbedding | PatchEmbedding | SoundEmbedding, ids: Tensor, lengths: Lengths, max_len: int | None,
    *, name: str = "ids", types: Tensor | None = None, cache: Cache | None = None, mask: Mask | None = None
) -> tuple[Tensor, Span]:  # fmt: skip
    """ids (b t), images (b c h w) or spectrograms (b n t) as vectors (b t m), and their positions (-1 for padding).
    Positions of packed documents, which `mask` keeps apart, begin anew with each."""
    if not isinstance(part, TokenEmbedding):
        x = part(ids)
        return x, Span.run(0, x.shape[1], x.device)
    base.check_ids(ids, part.config.vocab, name)
    if types is not None:
        if not part.config.types:
            raise UsageError("this model has no segment types; leave `types` out")
        base.check_ids(types, part.config.types, "types")
    pos = positions(ids, lengths, context(max_len, part.config), cache).within(mask)
    return part(ids, pos, types), pos


@settings
class TransformerConfig:
    """Decoder-only (tower.causal) or encoder-only, on tokens or image patches. With `tower.cross` it attends to a
    memory too: features (b s m) of whatever made them, which are given with each call."""

    embedding: Tokens | Patches | Sound  # what is read: tokens, patches or sound
    tower: Tower  # the blocks
    # what is predicted; none: hidden states
    head: LM | MLM | Classify | Tag | Answer | Project | None = None
    # how a row becomes one vector; a word: the activation of a dense layer on the first token (BERT's)
    pooler: str | Pool | AttentionPool | None = None
    max_len: Count | None = None  # the longest input
    mtp: MTP | None = None  # layers that predict tokens further on
    kind: str = "transformer"

    def __post_init__(self) -> None:
        if isinstance(self.head, Project) and self.pooler is None:
            raise UsageError("a head of kind project reads the pooled vector; give a pooler too")
        vocab = getattr(self.embedding, "vocab", None)
        tables = [getattr(ffn, "hashed", 0) for ffn in self.tower.each("ffn")]
        tables += [self.tower.per_layer.vocab] if self.tower.per_layer else []
        for rows in (rows for rows in tables if rows and (vocab is None or rows < vocab)):
            why = f"a part of the tower has a table of {rows} rows, but ids below {vocab} are read"
            raise UsageError(f"{why}; give as many (tower.per_layer.vocab, tower.ffn.hashed)")
        if self.mtp is not None:
            words = self.embedding if isinstance(self.embedding, Tokens) else None
            if not isinstance(self.head, LM) or words is None or words.width:
                why = "MTP layers guess tokens by the model's own table and head"
                raise UsageError(f"{why}, an LM without embedding.width; leave mtp out")
            mtp_tower(self.mtp, self.tower)

    def make(self) -> Transformer:
        return Transformer(self)


class Transformer(Model):
    """GPT, Llama, DeepSeek, BERT, ViT."""

    towers: ClassVar[dict[str, str]] = {"tower": "embedding"}
    writer, words = "tower", "embedding"

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        c, dim = config, config.tower.outputs
        self.embedding = c.embedding.make(c.tower.dim)
        self.tower = Stack(c.tower)
        self.pooler: nn.Module | None = None
        if c.pooler is not None:
            part = c.pooler
            self.pooler = nn.Linear(dim, dim) if isinstance(part, str) else part.make(dim)
        words = c.embedding if isinstance(c.embedding, Tokens) else None
        vocab, width = (words.vocab, words.width) if words else (0, None)
        self.head = make_head(c.head, dim, vocab, width) if c.head else None
        self.mtp: MTPLayers | None = c.mtp.make(c.tower) if c.mtp else None

    def forward(self, ids: Tensor, lengths: Lengths = None, **options: Any) -> Tensor:
        """ids (b t) or images (b c h w) -> what the head gives: (b t V), (b labels), (b t labels), or hidden states.
        Of an image a Tag head labels the patches alone; a projection reads the pooled vector (b m). The options are
        those of `hidden`."""
        h, head = self.hidden(ids, lengths, **options), self.config.head
        if isinstance(head, Classify) and head.token == "last":
            h = base.last_real(h, lengths)[:, None]  # b 1 m
        if isinstance(head, Classify) and head.token == "mean":
            h = mean_real(h, lengths)[:, None]
        if isinstance(head, Classify) and head.token == "each":
            return mean_real(self.logits(h), lengths)
        if isinstance(head, Project):
            h = self.pooled(h, ids, lengths)
        if isinstance(head, Tag) and isinstance(self.embedding, PatchEmbedding):
            h = h[:, self.embedding.config.extra :]
        return self.logits(h)

    def hidden(
        self, ids: Tensor, lengths: Lengths = None, *, types: Tensor | None = None, cache: Cache | None = None,
        mask: Mask | None = None, probe: Any = None, backend: str = "sdpa",
        memory: Tensor | None = None, memory_lengths: Lengths = None
    ) -> Tensor:  # fmt: skip
        """The tower's last hidden states (b t m). `mask` replaces the tower's own (documents, prefix, ...). `memory`
        (b s m), of which `memory_lengths` are real, is what `tower.cross` attends to."""
        c = self.config
        check_backend(backend)
        other = not isinstance(self.embedding, TokenEmbedding)
        if other and not (lengths is None and types is None and cache is None):
            raise UsageError("an image has no lengths, types or cache; call model(images)")
        if cache is not None and not self.decodes:
            why = "sees both ways" if c.tower.cross is None else "reads a memory, which is not kept"
            why = "gives one vector for a whole text" if isinstance(c.head, Project) else why
            raise UsageError(f"this model {why}: it cannot run with a cache; leave it out")
        x, pos = embed(self.embedding, ids, lengths, c.max_len, types=types, cache=cache, mask=mask)
        probe = self.probe_of(ids, probe)
        ctx = Context(pos, mask or c.tower.mask, ids=ids, probe=probe, backend=backend)
        cross = self._crossed(ctx, x, memory, memory_lengths)
        return self.tower(x, ctx, cross, caches=(cache, None))

    def further(
        self, states: Tensor, ids: Tensor, pos: Span, layer: int = 0, *, cache: Cache | None = None,
        mask: Mask | None = None, backend: str = "sdpa"
    ) -> Tensor:  # fmt: skip
        """What MTP layer `layer` makes of the states before it (b t m), the tower's or its own, and the tokens (b t)
        that are `layer` + 1 places after them: states from which `logits` predicts the tokens after these."""
        if self.mtp is None:
            raise UsageError("this model has no MTP layers; mtp='mtp' gives a new one some")
        assert isinstance(self.embedding, TokenEmbedding)
        ctx = Context(pos, mask or self.config.tower.mask, ids=ids, backend=backend)
        return self.mtp(layer, states, self.embedding.vectors(ids), ctx, cache)

    def _crossed(
        self, ctx: Context, x: Tensor, memory: Tensor | None, lengths: Lengths
    ) -> Context | None:
        """The context of cross-attention, or None where the tower has none."""
        c = self.config.tower
        if c.cross is None:
            if memory is not None:
                raise UsageError("this model has no cross-attention; leave memory out")
            return None
        want = f"({len(x)}, s, {c.memory_dim or c.dim})"
        given = () if memory is None else tuple(memory.shape)
        if memory is None or (len(given), *given[::2]) != (3, len(x), c.memory_dim or c.dim):
            how = f"this model attends to one of shape {want}: model(ids, memory=features)"
            raise UsageError(f"the memory is {given or None}; {how}")
        pos = positions(memory, lengths, None)
        return replace(ctx, mask=Full(), memory=memory.to(x.dtype), memory_pos=pos, memo={})

    def pool(self, ids: Tensor, lengths: Lengths = None, **options: Any) -> Tensor:
        """One vector per row (b m): the pooler's, projected where the head is a projection, or the mean of the real
        tokens where the model has none. The options are those of `hidden`."""
        ids, lengths = self._filled(ids, lengths)
        h = self.pooled(self.hidden(ids, lengths, **options), ids, lengths)
        return self.head(h) if isinstance(self.head, Projection) else h

    def _filled(self, ids: Tensor, lengths: Lengths) -> tuple[Tensor, Lengths]:
        """Texts as long as the model reads, where its pooler says with what they are filled up."""
        c = self.config
        fill = c.pooler.fill if isinstance(c.pooler, Pool) else None
        if fill is None or c.max_len is None or ids.shape[1] > c.max_len:
            return ids, lengths
        whole = F.pad(ids, (0, c.max_len - ids.shape[1]), value=fill)
        if lengths is not None:
            n = torch.as_tensor(lengths, device=ids.device)[:, None]
            text = torch.arange(c.max_len, device=ids.device)[None] < n
            whole = torch.where(text, whole, fill)
        return whole, None

    def pooled(self, h: Tensor, ids: Tensor, lengths: Lengths) -> Tensor:
        """One vector (b m) of each row's states."""
        if self.pooler is None:
            return mean_real(h, lengths)
        if isinstance(self.config.pooler, str):
            return activation(self.config.pooler)(self.pooler(h[:, 0]))
        return self.pooler(h, ids, lengths)

    @property
    def decodes(self) -> bool:
        c = self.config
        return c.tower.causal and c.tower.cross is None and not isinstance(c.head, Project)


def mean_real(h: Tensor, lengths: Lengths) -> Tensor:
    """The mean of each row's real tokens: (b t m) -> (b m)."""
    if lengths is None:
        return h.mean(1)
    n = torch.as_tensor(lengths, device=h.device)[:, None]
    real = torch.arange(h.shape[1], device=h.device)[None] < n
    return (h * real[..., None]).sum(1) / n.clamp(min=1)


@settings
class EncoderDecoderConfig:
    """An encoder reads the source (tokens, an image, sound), a causal decoder attends to it and writes the target."""

    source: Tokens | Patches | Sound  # what the encoder reads
    encoder: Tower  # its blocks
    target: Tokens  # what the decoder reads
    decoder: Tower  # its blocks, causal and with cross
    head: LM | None = LM()  # what is predicted
    shared: bool = True  # one embedding table for source and target
    max_len: Count | None = None  # the longest input of either side
    kind: str = "encoder_decoder"

    def __post_init__(self) -> None:
        if self.encoder.reads_ids or self.decoder.reads_ids:
            raise UsageError("per_layer and ffn.hashed are for a model of one tower")
        if self.encoder.out_dim or self.decoder.out_dim:
            raise UsageError("out_dim is for a model of one tower")
        if self.encoder.causal or not self.decoder.causal or self.decoder.cross is None:
            raise UsageError("encoder.causal must be false, decoder's true, decoder.cross given")
        width = self.decoder.memory_dim or self.decoder.dim
        if width != self.encoder.dim:
            given = f"decoder reads states of width {width}, encoder.dim={self.encoder.dim}"
            raise UsageError(f"{given}; give it as decoder.memory_dim")
        if not isinstance(self.target, Tokens):
            why = "a decoder writes tokens, and target is none; give Tokens(vocab)"
            raise UsageError(f"{why}: a picture's pixels or codes as tokens, its patches as source")
        if self.shared and not isinstance(self.source, Tokens):
            what = "sound" if isinstance(self.source, Sound) else "an image"
            raise UsageError(f"{what} and a text cannot share an embedding; set shared=False")
        both = getattr(self.source, "vocab", None), self.target.vocab
        if self.shared and both[0] != both[1]:
            raise UsageError(
                f"shared=True needs one vocab for both sides, got {both[0]} and {both[1]}"
            )

    def make(self) -> EncoderDecoder:
        return EncoderDecoder(self)


class EncoderDecoder(Model):
    """The 2017 Transformer, T5, BART, Marian, captioners, Whisper."""

    reads_source = True
    towers: ClassVar[dict[str, str]] = {"encoder": "source", "decoder": "target"}
    writer, words = "decoder", "target"

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__(config)
        c, words = config, config.target
        self.source = c.source.make(c.encoder.dim)
        self.encoder = Stack(c.encoder)
        self.target = words.make(c.decoder.dim)
        self.decoder = Stack(c.decoder)
        self.head = make_head(c.head, c.decoder.dim, words.vocab, words.width) if c.head else None
        if c.shared:
            assert isinstance(self.source, TokenEmbedding)
            self.source.weight = self.target.weight

    def encode(
        self, source: Tensor, lengths: Lengths = None, *, probe: Any = None, backend: str = "sdpa"
    ) -> tuple[Tensor, Span]:
        """source ids (b s), images or spectrograms -> memory (b s m) and its positions (-1 for padding)."""
        c, probe = self.config, self.probe_of(source, probe)
        x, pos = embed(self.source, source, lengths, c.max_len, name="source")
        ctx = Context(pos, c.encoder.mask, probe=probe, backend=backend, site="encoder.")
        return self.encoder(x, ctx), pos

    def hidden(
        self, ids: Tensor, lengths: Lengths = None, *, source: Tensor | None = None, source_lengths: Lengths = None,
        cache: Cache | None = None, mask: Mask | None = None, probe: Any = None, backend: str = "sdpa"
    ) -> Tensor:  # fmt: skip
        """Target ids (b t) and source (b s) -> the decoder's last hidden states (b t m). With a cache the source is
        needed on the first call only: its keys and values are kept, frozen, in `cache.cross`."""
        c = self.config
        check_backend(backend)
        probe = self.probe_of(ids, probe)
        cross, source = None if cache is None else cache.cross, base.new_source(ids, source, cache)
        memory, memory_pos = None, None if cross is None else cross.span
        if source is not None:
            memory, memory_pos = self.encode(source, source_lengths, probe=probe, backend=backend)
        x, pos = embed(self.target, ids, lengths, c.max_len, cache=cache, mask=mask)
        if cache is not None and memory is not None and memory_pos is not None:
            cross = base.cross_cache(cache, self.source_specs(), memory, memory_pos)
            memory_pos = cross.span
        ctx = Context(pos, mask or c.decoder.mask, probe=probe, backend=backend, site="decoder.")
        cross_ctx = replace(ctx, mask=Full(), memory=memory, memory_pos=memory_pos, memo={})
        h = self.decoder(x, ctx, cross_ctx, (cache, cross))
        if cross is not None:
            cross.freeze()
        return h

    def source_specs(self) -> list[CacheSpec]:
        return self.decoder.cache_specs("cross")

    @property
    def shares_source(self) -> bool:
        blocks: Any = self.decoder.blocks
        return all(block.cross.shares_rows for block in blocks)
