"""Threads: what was asked for, OMP_NUM_THREADS, or the physical cores; and they wait asleep."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import regard
from regard.kernels.c import threads
from regard.kernels.c.threads import cores, use_threads, wait_asleep


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


def test_waiting_asleep_is_set_before_torch_and_gives_way_to_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = (
        "from regard.kernels.c.threads import wait_asleep as w; import os; "
        "print(w(), os.environ['OMP_WAIT_POLICY'])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("OMP_WAIT_POLICY", None)
    out = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert out.stdout.split() == ["True", "passive"], out.stderr
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert not wait_asleep()  # torch is here already
    assert os.environ["OMP_WAIT_POLICY"] == "active"


def test_small_model_decodes_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model = regard.build("gpt2", layers=1, dim=16, heads=2, vocab=20, max_len=32)
    seen, step = [], model.next_logits

    def counted(*given: Any, **more: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return step(*given, **more)

    monkeypatch.setattr(model, "next_logits", counted)
    torch.set_num_threads(2)
    regard.generate(model, [[1, 2]], max_new_tokens=3)
    assert set(seen) == {1} and torch.get_num_threads() == 2
    monkeypatch.setattr(threads, "SHARED", 0)
    seen.clear()
    regard.generate(model, [[1, 2]], max_new_tokens=3)
    assert set(seen) == {2}
