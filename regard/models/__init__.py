"""Models: towers of blocks (transformer) or of cells (recurrent); what differs between families is their config."""

from regard.models.base import Model
from regard.models.embedding import Patches, Tokens
from regard.models.painter import Canvas, Painter, PainterConfig
from regard.models.pair import Pair, PairConfig
from regard.models.pool import AttentionPool, Pool
from regard.models.recurrent import Recurrent, RecurrentConfig, Seq2Seq, Seq2SeqConfig
from regard.models.sound import Sound
from regard.models.transformer import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Transformer,
    TransformerConfig,
)

CONFIGS: dict[str, type] = {
    "transformer": TransformerConfig,
    "encoder_decoder": EncoderDecoderConfig,
    "painter": PainterConfig,
    "pair": PairConfig,
    "recurrent": RecurrentConfig,
    "recurrent_seq2seq": Seq2SeqConfig,
}

__all__ = [
    "CONFIGS", "AttentionPool", "Canvas", "EncoderDecoder", "EncoderDecoderConfig", "Model", "Painter", "PainterConfig",
    "Pair", "PairConfig", "Patches", "Pool", "Recurrent", "RecurrentConfig", "Seq2Seq", "Seq2SeqConfig", "Sound",
    "Tokens", "Transformer", "TransformerConfig",
]  # fmt: skip
