"""Every mechanism, one file each. ATTENTION lists those that stand in a block; the laws run over it."""

from regard.attention.core import BACKENDS, Terms, attend, check_backend, softmax, weights
from regard.attention.delta import DeltaRule
from regard.attention.latent import MLA
from regard.attention.multihead import GQA
from regard.attention.ordered import ordered
from regard.attention.protocol import Context
from regard.attention.sparse import DSA

BACKENDS["ordered"] = ordered
ATTENTION: dict[str, type] = {"gqa": GQA, "mla": MLA, "dsa": DSA, "delta": DeltaRule}

__all__ = [
    "ATTENTION", "BACKENDS", "DSA", "GQA", "MLA", "Context", "DeltaRule", "Terms", "attend", "check_backend",
    "softmax", "weights",
]  # fmt: skip
