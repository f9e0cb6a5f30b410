"""Triton is made ready beside the reading of a model: hashed once, and done before anybody forks."""

import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

import regard
from regard.kernels.triton import ahead


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead.os, "register_at_fork", lambda before: None)
    ahead.begin.cache_clear()
    yield
    ahead.begin.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_it_is_begun_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    monkeypatch.setattr(ahead, "_hash", lambda: hashed.append(threading.current_thread().name))
    assert ahead.begin() is ahead.begin()
    ahead.begin().join()
    assert hashed == ["triton, ahead"]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_triton_has_nothing_left_to_hash_and_a_child_can_import_it() -> None:
    """In a process of its own, which forks at once."""
    script = """
import os
from regard.kernels.triton import ahead
ahead.begin()
if os.fork() == 0:
    from triton.runtime.cache import triton_key
    import triton.language
    os._exit(triton_key.cache_info().currsize != 1)
assert os.wait()[1] == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("fresh")
def test_a_triton_that_has_no_such_function_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    ahead._hash()


def test_a_model_for_a_cpu_does_not_begin_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "begin", lambda: pytest.fail("nobody needs it"))
    regard.build("gpt2", layers=1, dim=16, heads=2, vocab=20).save(tmp_path / "m")
    regard.generate(regard.load(tmp_path / "m"), [[1, 2]], max_new_tokens=1)
