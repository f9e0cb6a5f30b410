"""Model folders in and out."""

from regard.checkpoint.adapter import load, load_adapter, save_adapter
from regard.checkpoint.hf import from_hf, save

__all__ = ["from_hf", "load", "load_adapter", "save", "save_adapter"]
