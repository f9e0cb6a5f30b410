"""Tests that run side by side share one device: each worker takes its part of the memory, as an engine would take most
of what it finds free."""

import os

import pytest
import torch

from regard import machine
from regard.decode import engine, generate

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


@pytest.fixture(autouse=True)
def part_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(device: torch.device) -> int:
        if device.type != "cuda":
            return machine.free_memory(device)
        total = torch.cuda.mem_get_info(device)[1]
        return max(0, total // (2 * WORKERS) - torch.cuda.memory_allocated(device))

    for module in (engine, generate):
        monkeypatch.setattr(module, "free_memory", part)
