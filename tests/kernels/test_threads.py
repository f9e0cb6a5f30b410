"""Threads: what was asked for, OMP_NUM_THREADS, or the physical cores."""

import os
from collections.abc import Iterator

import pytest
import torch

from regard.kernels import threads
from regard.kernels.threads import cores, use_threads


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_that_are_asked_for_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert use_threads(2) == 2 == torch.get_num_threads()


def test_threads_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert use_threads() == 3 == torch.get_num_threads()


@pytest.mark.parametrize("wrong", ["", "0", "many", "2,1"])
def test_threads_without_a_number_are_the_cores(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", wrong)
    assert use_threads() == cores() == torch.get_num_threads()


def test_cores_count_siblings_once_and_keep_to_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"cpu{i}/": f"{i % 4},{i % 4 + 4}" for i in range(8)}

    def read(path: str) -> str:
        return next((text for name, text in files.items() if name in path), "")

    monkeypatch.setattr(threads, "_read", read)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(threads.sys, "platform", "linux")
    assert cores() == 4
    files["cpu.max"] = "250000 100000"
    assert cores() == 2
    files["cpu.max"] = "50000 100000"
    assert cores() == 1
    files["cpu.max"] = "max 100000"
    assert cores() == 4
