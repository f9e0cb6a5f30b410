"""What a model of speech reads: a spectrogram as tokens (Whisper)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import Count, Fraction, settings
from regard.errors import UsageError
from regard.layers import activation
from regard.position import sinusoid


@settings
class Sound:
    """A log-mel spectrogram of `bands` x 2 `size`, made `size` tokens by two convolutions, the second of which takes
    every other frame. Positions are waves that are stored and not trained."""

    bands: Count = 80  # of frequencies
    size: Count = 1500  # tokens
    dropout: Fraction = 0.0  # in training
    kind: str = "sound"

    def make(self, dim: int) -> SoundEmbedding:
        return SoundEmbedding(self, dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one spectrogram."""
        return self.bands, 2 * self.size

    @property
    def tokens(self) -> int:
        return self.size


class SoundEmbedding(nn.Module):
    """Spectrograms (b n 2t) -> (b t m): gelu(conv(gelu(conv x))) + waves."""

    def __init__(self, config: Sound, dim: int):
        super().__init__()
        c = self.config = config
        self.first = nn.Conv1d(c.bands, dim, 3, padding=1)
        self.second = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.act, self.dropout = activation("gelu"), nn.Dropout(c.dropout)
        self.position = nn.Parameter(waves(c.size, dim), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        want = self.config.shape
        if x.dim() != 3 or x.shape[1:] != want or not x.is_floating_point():
            shape, given = ", ".join(map(str, want)), f"{x.dtype} {tuple(x.shape)}"
            raise UsageError(
                f"spectrograms must be real numbers of shape (b, {shape}), got {given}"
            )
        if len(x) == 0:
            raise UsageError("empty batch: give at least one spectrogram")
        x = self.act(self.second(self.act(self.first(x.to(self.first.weight.dtype)))))
        return self.dropout(x.transpose(1, 2) + self.position)


def waves(size: int, dim: int) -> Tensor:
    return sinusoid(torch.arange(size), dim, layout="fairseq").float()
