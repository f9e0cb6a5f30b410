"""Model folders in and out. Importing this joins `model.save` to models."""

from regard.checkpoint.hf import from_hf, load
from regard.checkpoint.hf_save import save
from regard.models import Model

Model.writer = save

__all__ = ["from_hf", "load", "save"]
