"""What computes: the model's own forward (torch.py; in C code, native) and CUDA graphs (graph.py).

A runner says which requests it takes and which of them run together, and makes a `Batch` for these, whose `ask` and
`step` compute. An engine asks its runners in turn; the last one takes everything.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, TypeVar

from regard.decode.batch import Batch, Reading
from regard.decode.settings import Request

Kind = TypeVar("Kind", bound=Hashable)


class Runner(Protocol[Kind]):
    name: str

    def explain(self) -> list[str]:
        """What runs, what is fast and what is not, and why: a line each."""
        ...

    def takes(self, request: Request, long: bool) -> bool:
        """Whether it serves a request. `long`: its text has outgrown the context."""
        ...

    def kind(self, request: Request, long: bool) -> Kind:
        """Requests of one kind share a batch."""
        ...

    def batch(self, kind: Kind, reading: Reading) -> Batch:
        """The batch of a kind, empty."""
        ...
