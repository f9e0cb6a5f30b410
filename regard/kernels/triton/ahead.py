"""Triton, made ready beside other work. Before its first kernel it hashes all of itself, half a gigabyte, even where
every kernel is in its cache: 0.3 s where the CPU has instructions for that, else up to 2 s; to import it takes 0.3 s.
The reading of a model, which waits for a disk and a bus, takes as long."""

from __future__ import annotations

import contextlib
import functools
import os
import threading


@functools.cache
def begin() -> threading.Thread:
    """In a thread of its own, once. A process that forks waits for it: its child would find locks that nobody opens."""
    thread = threading.Thread(target=_hash, name="triton, ahead", daemon=True)
    os.register_at_fork(before=thread.join)
    thread.start()
    return thread


def _hash() -> None:
    # Its name is no promise: where it is another, Triton does the same later.
    with contextlib.suppress(Exception):
        try:
            from triton.runtime.cache import triton_key
        except ImportError:
            from triton.compiler.compiler import triton_key
        triton_key()
