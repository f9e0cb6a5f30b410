"""Model folders in and out. Importing this joins `model.save` to models."""

from regard.checkpoint.adapter import load, load_adapter, save_adapter
from regard.checkpoint.hf import from_hf
from regard.checkpoint.hf_save import save
from regard.models import Model

Model.writer = save

__all__ = ["from_hf", "load", "load_adapter", "save", "save_adapter"]
