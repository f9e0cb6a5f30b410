"""The end of a test run says which fast kernels were run."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.kernels.c import native
from tests.kernels import told
from tests.kernels.told import lines


def reports(*nodeids: str) -> list[Any]:
    return [SimpleNamespace(nodeid=f"tests/{n}", when="call") for n in nodeids]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with AVX-512, without triton and without a GPU."""
    monkeypatch.setattr(native, "why", lambda: "")
    monkeypatch.setattr(native, "forms", lambda: ["avx512", "avx2", "sse"])
    monkeypatch.setattr(native, "form", lambda: "avx512")
    monkeypatch.setattr(told, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def forms(*names: str) -> Sequence[str]:
    return [f"kernels/test_native_forms.py::test_native_code_in_the_form[{n}]" for n in names]


@pytest.mark.usefixtures("small")
def test_what_was_run_and_what_was_not_is_told() -> None:
    stats = {
        "passed": reports("kernels/test_native_rows.py::test_a", *forms("avx2")),
        "failed": reports(*forms("sse")),
        "skipped": reports(
            *("gpu/test_cuda.py::test_a", "gpu/test_cuda.py::test_b"),
            *("kernels/test_gpu_kernels.py::test_a", *forms("amx", "avx512", "neon")),
        ),
    }
    assert lines(stats) == [
        "native C: avx512, avx2 run; amx, avx512bf16, avx512f, avx2vnni, dotprod, neon: not on this CPU; sse: FAILED",
        "Triton kernels: not run here (triton is not installed; make test-kernels)",
        "GPU: no CUDA device; 2 tests skipped",
    ]
    stats["passed"] += reports("kernels/test_gpu_kernels.py::test_b")
    assert lines(stats)[1] == "Triton kernels: 1 tests, interpreted"


@pytest.mark.usefixtures("small")
def test_nothing_is_told_of_tests_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines({"passed": reports("train/test_trainer.py::test_a")}) == []
    monkeypatch.setattr(native, "why", lambda: "no C compiler")
    stats = {"skipped": reports("kernels/test_native_rows.py::test_a")}
    assert lines(stats) == ["native C: not run here (no C compiler)"]
