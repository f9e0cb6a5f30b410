"""Text to image: an encoder reads a text, and what draws a picture attends to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from regard.attention import Context, check_backend
from regard.block import Stack, Tower
from regard.config import Count, Divides, settings
from regard.errors import UsageError
from regard.layers import LabelHead, Tag
from regard.mask import Full, Span
from regard.models.base import Lengths, Model
from regard.models.embedding import Tokens
from regard.models.transformer import embed
from regard.position import Learned


@settings
class Canvas:
    """A picture of `size` x `size` that is drawn in squares of `patch` x `patch`."""

    size: Count = 8  # side of the picture
    patch: Annotated[Count, Divides("size")] = 2  # side of a patch
    channels: Count = 1  # colours
    kind: str = "canvas"

    @property
    def count(self) -> int:
        return (self.size // self.patch) ** 2


@settings
class PainterConfig:
    """An encoder reads a text; a decoder has a learned query for each patch of a picture, attends to the text (image
    queries, text keys) and draws all patches at once."""

    embedding: Tokens  # what the encoder reads
    encoder: Tower  # its blocks
    canvas: Canvas  # what is drawn
    decoder: Tower  # its blocks, with cross; a patch sees all others
    max_len: Count | None = None  # the longest text
    kind: str = "painter"

    def __post_init__(self) -> None:
        if self.encoder.causal or self.decoder.causal or self.decoder.cross is None:
            raise UsageError("encoder.causal and decoder.causal must be false, decoder.cross given")
        if self.encoder.out_dim or self.decoder.out_dim:
            raise UsageError("out_dim is for a model of one tower")

    def make(self) -> Painter:
        return Painter(self)


class Painter(Model):
    """ids (b s) -> pictures (b c h w), as a ViT reads them: about -1 is black, 1 is white."""

    towers: ClassVar[dict[str, str]] = {"encoder": "embedding", "decoder": "canvas"}
    writer, words = "decoder", "embedding"
    decodes = False

    def __init__(self, config: PainterConfig):
        super().__init__(config)
        c = config
        self.embedding = c.embedding.make(c.encoder.dim)
        self.encoder = Stack(c.encoder)
        self.canvas = Learned(c.canvas.count).make(c.decoder.dim)  # the queries
        self.decoder = Stack(c.decoder)
        # So many numbers for each patch as a tagger has labels for each word.
        self.head = LabelHead(Tag(c.canvas.channels * c.canvas.patch**2), c.decoder.dim)

    def encode(
        self, ids: Tensor, lengths: Lengths = None, *, probe: Any = None, backend: str = "sdpa"
    ) -> tuple[Tensor, Span]:
        """ids (b s) -> memory (b s m) and its positions (-1 for padding)."""
        c = self.config
        x, pos = embed(self.embedding, ids, lengths, c.max_len)
        ctx = Context(pos, c.encoder.mask, probe=probe, backend=backend, site="encoder.")
        return self.encoder(x, ctx), pos

    def hidden(
        self, ids: Tensor, lengths: Lengths = None, *, probe: Any = None, backend: str = "sdpa"
    ) -> Tensor:
        """The decoder's last states, one for each patch: (b n m)."""
        check_backend(backend)
        probe = self.probe_of(ids, probe)
        memory, memory_pos = self.encode(ids, lengths, probe=probe, backend=backend)
        pos = Span.run(0, self.config.canvas.count, memory.device)
        x = self.canvas(pos.absolute, ids).expand(len(ids), -1, -1)  # b n m
        ctx = Context(pos, Full(), probe=probe, backend=backend, site="decoder.")
        cross = replace(ctx, memory=memory, memory_pos=memory_pos, memo={})
        return self.decoder(x, ctx, cross)

    def logits(self, hidden: Tensor) -> Tensor:
        """Patches (b n m) as pictures (b c h w)."""
        canvas = self.config.canvas
        pixels = self.head(hidden).transpose(1, 2)  # b c*p*p n
        side = canvas.size // canvas.patch
        return F.pixel_shuffle(pixels.unflatten(2, (side, side)), canvas.patch)
