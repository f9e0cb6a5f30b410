"""Text in and out: tokenizers of model folders, streams that never cut a character, chat templates."""

from regard.text.build import Special, special_ids
from regard.text.chat import encode_chat, render_chat
from regard.text.tokenizer import Stream, Tokenizer, needed

__all__ = ["Tokenizer", "Stream", "encode_chat", "render_chat", "Special", "special_ids", "needed"]
