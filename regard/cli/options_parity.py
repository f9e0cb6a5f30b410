"""What `regard parity` can be told."""

from __future__ import annotations

from dataclasses import dataclass

from regard.cli.parse import Folder, Switch


@dataclass(frozen=True)
class Parity:
    """Bug or rounding? Run a model in every way it can be run, and hold each against float64.

    regard parity MODEL                    fused, cached, batched, padded, packed, bf16, GPU, transformers
    regard parity MODEL --tokens 100       longer rows: past a window, or what a sparse attention chooses from
    """

    model: Folder
    rows: int = 3
    """rows of random tokens (or images)"""
    tokens: int = 16
    """tokens in a row"""
    seed: int = 0
    """other tokens"""
    json: Switch = False
    """one JSON object"""
