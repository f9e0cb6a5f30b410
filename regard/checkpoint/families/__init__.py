"""Hugging Face's families as tables."""
