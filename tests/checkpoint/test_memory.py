"""Loading takes the memory of the weights and little more: tensors are read one by one into their place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODELS = ["gpt2", "llama"]  # transposed and cut on the way; taken as they are


@pytest.fixture(scope="module")
def table() -> dict[str, list[float]]:
    """Folder and peak in megabytes, and their ratio, for folders of about 200 MB."""
    if sys.platform != "linux":
        pytest.skip("the peak of resident memory is read from Linux's /proc")
    command = [sys.executable, str(ROOT / "bench" / "load.py"), "--megabytes", "200"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([*command, "--models", *MODELS], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()]
    return {row[0]: [float(x) for x in row[1:4]] for row in rows if row[0] in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_load_takes_at_most_1_3_times_the_folder(name: str, table: dict[str, list[float]]) -> None:
    folder, _, ratio = table[name]
    assert folder > 100
    assert 0.9 < ratio <= 1.3  # less would mean that the weights are not there
