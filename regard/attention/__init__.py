"""Every mechanism, one file each. ATTENTION lists those that stand in a block, by the `kind` of their configs, and
CROSS those of them that can attend to an encoder's states; the laws run over them.

Both tables are open: a config and its module in a file of their own, and a row in ATTENTION, are a mechanism that is
read from files, trained, decoded, saved and loaded (tests/open/test_mechanism.py adds one).
"""

from typing import Annotated

from regard.attention.compressed import Compressed
from regard.attention.core import BACKENDS, Terms, attend, check_backend, softmax, weights
from regard.attention.delta import DeltaRule
from regard.attention.disentangled import Disentangled
from regard.attention.latent import MLA
from regard.attention.multihead import GQA
from regard.attention.online import online
from regard.attention.ordered import ordered
from regard.attention.protocol import Context, MechanismConfig
from regard.attention.sparse import DSA
from regard.attention.ssd import SSD
from regard.config import Kinds

BACKENDS |= {"online": online, "ordered": ordered}
Mechanisms = dict[str, type[MechanismConfig]]
ATTENTION: Mechanisms = {
    "gqa": GQA,
    "mla": MLA,
    "dsa": DSA,
    "delta": DeltaRule,
    "ssd": SSD,
    "compressed": Compressed,
    "disentangled": Disentangled,
}
CROSS: Mechanisms = {"gqa": GQA, "mla": MLA}

# As fields of configs name them.
Attention = Annotated[MechanismConfig, Kinds(ATTENTION)]
CrossAttention = Annotated[MechanismConfig, Kinds(CROSS)]

__all__ = [
    "ATTENTION", "BACKENDS", "CROSS", "DSA", "GQA", "MLA", "SSD", "Attention", "Compressed", "Context",
    "CrossAttention", "DeltaRule", "Disentangled", "Terms", "attend", "check_backend", "softmax", "weights",
]  # fmt: skip
