"""Models: three flows of data (transformer, vision, recurrent); what differs between families is their config."""

from regard.models.base import Model
from regard.models.transformer import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Tokens,
    Transformer,
    TransformerConfig,
)
from regard.models.vision import Patches

__all__ = [
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Model",
    "Patches",
    "Tokens",
    "Transformer",
    "TransformerConfig",
]
