"""A taste of every fault that `make faults` tries in full; in a process of its own, since it forks."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ["kills", "chains", "calls", "power", "corruptions", "disk", "nan", "rivals"]


def test_short_forms_of_all_faults() -> None:
    command = [sys.executable, "-m", "tests.faults.run", "--short", "--seed", "1", *FAMILIES]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(FAMILIES)
