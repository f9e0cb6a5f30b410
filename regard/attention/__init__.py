"""Every mechanism, one file each. ATTENTION lists those that stand in a block; a new row is tested as soon as it exists."""

from regard.attention.core import (
    BACKENDS,
    Context,
    Terms,
    attend,
    check_backend,
    softmax,
    weights,
)
from regard.attention.latent import MLA
from regard.attention.multihead import GQA
from regard.attention.select import DSA

ATTENTION: dict[str, type] = {"gqa": GQA, "mla": MLA, "dsa": DSA}

__all__ = [
    "ATTENTION",
    "BACKENDS",
    "DSA",
    "GQA",
    "MLA",
    "Context",
    "Terms",
    "attend",
    "check_backend",
    "softmax",
    "weights",
]
