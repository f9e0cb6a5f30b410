"""Regard: the whole Transformer in one small, fast, readable system."""
