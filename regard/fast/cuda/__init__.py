"""Target cuda: residual.py (the stream and the products), pages.py (the memory), parts.py (the table of fast parts)."""

from regard.fast.cuda.pages import GraphContext, Pages
from regard.fast.cuda.parts import decoder, inner, why_not
from regard.fast.cuda.residual import Normed, ResidualStream

__all__ = ["Normed", "Pages", "GraphContext", "ResidualStream", "decoder", "inner", "why_not"]
