"""Speech: encoders of spectrograms and decoders of text."""

from __future__ import annotations

from tests.checkpoint.cases import Settings, case

_WHISPER: Settings = dict(
    vocab_size=50, d_model=24, num_mel_bins=7, encoder_layers=2, decoder_layers=1
)
_WHISPER |= dict(encoder_attention_heads=3, decoder_attention_heads=2, encoder_ffn_dim=20)
_WHISPER |= dict(decoder_ffn_dim=22, max_source_positions=9, max_target_positions=40)
_WHISPER |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3)
_WHISPER |= dict(begin_suppress_tokens=None)

CASES = [
    case("whisper", "WhisperForConditionalGeneration", _WHISPER),
    case("whisper-untied", "WhisperForConditionalGeneration", _WHISPER, tie_word_embeddings=False,
         activation_function="relu", scale_embedding=True),
    case("whisper-body", "WhisperModel", _WHISPER, num_mel_bins=5),
]  # fmt: skip
ODD: Settings = {}
KEPT = ["whisper"]
