"""Text in and out: tokenizers of model folders, streams that never cut a character, chat templates."""

from regard.text.build import Special, special_ids
from regard.text.chat import CHATML, encode_chat, learned_chat, render_chat
from regard.text.tokenizer import Stream, Tokenizer, needed

__all__ = [
    "CHATML", "Special", "Stream", "Tokenizer", "encode_chat", "learned_chat", "needed", "render_chat",
    "special_ids",
]  # fmt: skip
