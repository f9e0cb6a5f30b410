"""Triton where it is of use: `triton` is None elsewhere, and `jit` then leaves functions as they are."""

from __future__ import annotations

import os

import torch

try:
    # Half a second of imports, for nothing where there is no GPU and nobody interprets kernels.
    if not torch.cuda.device_count() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ImportError
    import triton
except ImportError:  # the plain forms need none
    triton = None

jit = triton.jit if triton is not None else lambda f: f
