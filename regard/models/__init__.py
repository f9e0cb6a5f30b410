"""Models: three flows of data (transformer, vision, recurrent); what differs between families is their config."""

from regard.models.base import Model
from regard.models.embedding import Tokens
from regard.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from regard.models.recurrent import Recurrent, RecurrentConfig, Seq2Seq, Seq2SeqConfig
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.vision import Patches

CONFIGS: dict[str, type] = {
    "transformer": TransformerConfig,
    "encoder_decoder": EncoderDecoderConfig,
    "recurrent": RecurrentConfig,
    "recurrent_seq2seq": Seq2SeqConfig,
}

__all__ = [
    "CONFIGS",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Model",
    "Patches",
    "Recurrent",
    "RecurrentConfig",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Tokens",
    "Transformer",
    "TransformerConfig",
]
