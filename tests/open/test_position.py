"""A stranger adds positions: a row of POSITIONS (added to embeddings), SCALINGS (of RoPE) or RELATIVE (added to
scores)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from regard.config import Count, Positive, settings
from regard.position import POSITIONS, RELATIVE, SCALINGS, Scaling
from tests.open.stranger import added, home, promised, stands


@settings
class Parity:
    """One vector for even places, one for odd ones."""

    max_len: Count
    kind: str = "parity"

    def make(self, dim: int) -> nn.Module:
        return ParityVectors(dim)


class ParityVectors(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, dim))

    def forward(self, pos: Tensor, ids: Tensor) -> Tensor:
        return self.weight[pos.clamp(min=0) % 2]


@settings
class Root(Scaling):
    """The longest waves grow the most."""

    power: Positive = 1.1
    kind: str = "root"

    def scaled(self, freq: Tensor, base: float) -> Tensor:
        return freq**self.power

    def gain(self) -> float:
        return 1.2


@settings
class Log:
    """-log(1 + |i - j|), and more for the first token: no function of the distance alone."""

    heads: Count
    kind: str = "log"

    def make(self) -> nn.Module:
        return LogBias(self.heads)


class LogBias(nn.Module):
    def __init__(self, heads: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(heads))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        far = (q[:, :, None] - k[:, None]).abs().to(self.gain.dtype)
        first = (k == 0).to(self.gain.dtype)[:, None, None]
        return first - self.gain[:, None, None] * torch.log1p(far)[:, None]


PARITY, ROOT, LOG = {"kind": "parity", "max_len": 64}, {"kind": "root"}, {"kind": "log", "heads": 4}


def test_added_vectors_train_decode_and_come_back(tmp_path: Path) -> None:
    with added(POSITIONS, "parity", Parity):
        model = stands(tmp_path, position=PARITY, **{"attention.rope": "none"})
        assert model.config.embedding.position == Parity(64)


def test_added_scaling_trains_decodes_and_comes_back(tmp_path: Path) -> None:
    with added(SCALINGS, "root", Root):
        model = stands(tmp_path, **{"attention.rope.scaling": ROOT})
        rope = model.config.tower.attention.rope
        assert rope.scaling == Root()
        cos, _ = rope.angles(torch.zeros(1, 1, dtype=torch.long), 8, torch.float32)
        assert cos.unique().item() == pytest.approx(1.2)


def test_added_bias_trains_decodes_and_comes_back(tmp_path: Path) -> None:
    with added(RELATIVE, "log", Log):
        model = stands(tmp_path, relative=LOG, **{"attention.rope": "none"})
        assert model.config.tower.relative == Log(4)


@pytest.mark.parametrize("table", [POSITIONS, SCALINGS, RELATIVE])
def test_position_costs_as_many_files_as_the_architecture_says(table: dict[str, type]) -> None:
    assert home(table) == "regard/position.py"
    assert len({home(table)}) == promised("add a position")
