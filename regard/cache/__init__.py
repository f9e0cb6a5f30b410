"""What decoding remembers: contents (declared by each layer) times layout. LAYOUTS lists the layouts."""

from regard.cache.base import Cache, CacheSpec, alike, taken_back
from regard.cache.blocks import BlockTable, OutOfPages, PagePool
from regard.cache.paged import Paged, Pool
from regard.cache.rows import FIRST, Contiguous, Ring, Sinks

LAYOUTS: dict[str, type[Cache]] = {"contiguous": Contiguous, "ring": Ring, "paged": Paged}

__all__ = [
    "FIRST", "LAYOUTS", "BlockTable", "Cache", "CacheSpec", "Contiguous", "OutOfPages", "PagePool", "Paged", "Pool",
    "Ring", "Sinks", "alike", "taken_back",
]  # fmt: skip
