"""bench/train.py: on a GPU, where one side may fill the memory, it is gone before the next begins."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.mark.parametrize("gpu, most", [(True, 1), (False, 2)], ids=["gpu", "cpu"])
def test_sides_are_in_memory_one_by_one_on_a_gpu(
    gpu: bool, most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    import train

    running: set[str] = set()
    together: list[int] = []

    class Process:
        def __init__(self, target: Any, args: tuple, daemon: bool):
            self.side = args[0]

        def start(self) -> None:
            running.add(self.side)
            together.append(len(running))

        def join(self) -> None:
            running.remove(self.side)

    ends = SimpleNamespace(send=lambda _: None, recv=lambda: 1.0, close=lambda: None)
    context = SimpleNamespace(Process=Process, Pipe=lambda: (ends, ends))
    monkeypatch.setattr(train.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(train, "GPU", gpu)
    sides = list(train.sides(Path()))[:2]
    train.speed(1, 2, sides)
    assert max(together) == most and not running
    out = capsys.readouterr().out
    assert all(side in out for side in sides)
