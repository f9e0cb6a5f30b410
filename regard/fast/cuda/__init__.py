"""Target cuda: residual.py (the stream and the products), pages.py (the memory), parts.py (the fast parts), table.py
(which of them stands for what)."""

from regard.fast.cuda.pages import GraphContext, Pages
from regard.fast.cuda.residual import Normed, ResidualStream
from regard.fast.cuda.table import decoder, inner, why_not

__all__ = ["Normed", "Pages", "GraphContext", "ResidualStream", "decoder", "inner", "why_not"]
