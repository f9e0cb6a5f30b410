"""Numbers of cost: bytes a cache needs, what a recurrent network forgets, what both kinds of layer work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.attention import DSA, GQA, MLA
from regard.errors import UsageError, nearest
from regard.learn.numbers import cache_numbers, multiply_adds
from regard.models import TransformerConfig
from regard.presets import PRESETS

Layers = tuple[GQA | MLA | DSA, int, int]  # the mechanism, the model's width, its layers


class CacheTable(NamedTuple):
    """Bytes by mechanism: of one token, and of every length (mechanisms lengths), all layers together."""

    names: list[str]
    lengths: list[int]
    per_token: list[int]
    totals: list[list[int]]


def cache_table(models: Mapping[str, Layers], lengths: Sequence[int], width: int = 2) -> CacheTable:
    """What one sequence keeps while it is decoded, every token of it; `width` bytes a number (2: bf16)."""
    if not models or not lengths or min(lengths) < 1:
        raise UsageError("cache bytes: give at least one mechanism and lengths of 1 token and more")
    per_token = [
        layers * cache_numbers(attention, dim) * width for attention, dim, layers in models.values()
    ]
    totals = [[length * size for length in lengths] for size in per_token]
    return CacheTable(list(models), list(lengths), per_token, totals)


def cache_variants(preset: str) -> dict[str, Layers]:
    """A preset's attention beside the others that could stand in its place: MHA, GQA and MQA of the same heads, and MLA
    or DSA where it has them."""
    if preset not in PRESETS:
        raise UsageError(f"there is no preset {preset!r}; {nearest(preset, PRESETS)}")
    config = PRESETS[preset][1]()
    if not isinstance(config, TransformerConfig):
        raise UsageError(
            f"{preset} has two towers or none; choose a preset with one, such as llama-3.1-8b"
        )
    tower = config.tower
    own = tower.attention
    if isinstance(own, GQA):
        found: dict[str, GQA | MLA | DSA] = {"MHA": replace(own, kv_heads=own.heads)}
        if own.kv_heads not in (None, 1, own.heads):
            found[f"GQA, {own.kv_heads} groups"] = own
        found["MQA"] = replace(own, kv_heads=1)
    elif isinstance(own, MLA | DSA):
        latent = own.attention if isinstance(own, DSA) else own
        heads, d = latent.heads, latent.head_dim
        found = {
            f"{name}": GQA(heads, g, d)
            for name, g in (("MHA", heads), ("GQA, 8 groups", 8), ("MQA", 1))
        }
        found["MLA"] = latent
        if isinstance(own, DSA):
            found["MLA and DSA's index"] = own
    else:
        raise UsageError(f"{preset} mixes kinds of attention; choose another preset")
    return {name: (attention, tower.dim, tower.layers) for name, attention in found.items()}


# --- recurrent networks -------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """What is left of a signal t steps back, t = 0 ... (n): lambda^t for each rate of a recurrence (rates n); and the
    steps it passes: t there, 1 in attention (0 for the token itself)."""

    steps: Tensor
    rates: list[float]
    left: Tensor
    path: Tensor
    attention_path: Tensor


def forgetting(rates: Sequence[float], steps: int) -> Memory:
    """h_t = lambda h_{t-1} + x_t passes x_0, and its gradient, on as lambda^t: below 1 it vanishes, above it explodes.

    Attention reads any token over a path of one step, whose factor is a weight and does not shrink with distance."""
    if not rates or min(rates) <= 0 or steps < 1:
        raise UsageError(
            "forgetting: give rates above 0, such as [0.5, 0.9, 0.99], and 1 step or more"
        )
    t = torch.arange(steps + 1, dtype=torch.float64)
    left = torch.tensor(list(rates), dtype=torch.float64)[:, None] ** t
    return Memory(t, list(rates), left, t, t.clamp(max=1))


def half_life(rate: float) -> float:
    """Steps after which lambda^t is a half; infinite where nothing is forgotten."""
    return math.log(0.5) / math.log(rate) if rate < 1 else math.inf


class Costs(NamedTuple):
    """Multiply-adds of one layer over n tokens (lengths), by kind, and how many steps must wait for one another."""

    dim: int
    lengths: list[int]
    work: dict[str, list[int]]
    waits: dict[str, list[int]]

    @property
    def even(self) -> int:
        """The length where scores and sums cost as much as the projections: 2 n^2 m = 4 n m^2, n = 2m."""
        return 2 * self.dim


GATES = {"Elman RNN": 1, "LSTM": 4}


def layer_costs(dim: int, lengths: Sequence[int], heads: int = 8) -> Costs:
    """A recurrent layer works gates x 2 m^2 a token, one after the other; attention 4 m^2 + 2 n m, all at once."""
    if not lengths or min(lengths) < 1:
        raise UsageError("layer costs: give lengths of 1 token and more")
    work = {name: [n * gates * 2 * dim**2 for n in lengths] for name, gates in GATES.items()}
    parts = [multiply_adds(GQA(heads), dim, n) for n in lengths]
    work["attention"] = [sum(part) for part in parts]
    work["its projections"] = [part[0] for part in parts]
    work["its scores and sums"] = [part[1] for part in parts]
    waits = {"RNN": list(lengths), "attention, training": [1 for _ in lengths]}
    return Costs(dim, list(lengths), work, waits)
