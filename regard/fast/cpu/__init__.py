"""Models prepared for a CPU: the table of parts that take the place of the plain ones."""

from regard.fast.cpu.model import Prepared, perplexity, prepare

__all__ = ["Prepared", "perplexity", "prepare"]
