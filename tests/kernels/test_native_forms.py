"""The tests of the C code once more for each other form of it that this CPU can run: what a smaller
machine would do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regard.kernels.c import native
from tests.wide import wide

ROOT = Path(__file__).resolve().parents[2]
FILES = [f"tests/kernels/test_native_{name}.py" for name in ("attend", "rows", "train", "linear")]


@pytest.mark.parametrize("form", wide(native.FORMS, keep=["avx2", "neon"]))
def test_native_code_in_the_form(form: str) -> None:
    if native.why():
        pytest.skip(f"no native code: {native.why()}")
    if form not in native.forms():
        pytest.skip("not on this CPU")
    if form == native.form():
        pytest.skip("all the other tests run it")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "REGARD_ISA": form, "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    # The plain forms of the same tests run no C code.
    command += ["-k", "not [plain"]
    done = subprocess.run([*command, *FILES], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("no native products: bf16" in line for line in skipped), skipped
