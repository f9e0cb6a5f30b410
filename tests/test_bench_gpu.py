"""The GPU benches where there is no GPU: they need nothing installed but torch, and say what they miss."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[1] / "bench"


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Python in an empty environment, from another folder."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, env={}
    )


def test_gpu_benches_need_no_package_of_the_commands(tmp_path: Path) -> None:
    script = f"""
import sys


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tyro", "rich", "msgspec", "sacrebleu", "tokenizers", "transformers"):
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Block())
sys.path.insert(0, {str(BENCH)!r})
import gpu_kernels, public, user
"""
    done = run("-c", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a cuda device")
def test_gpu_bench_without_a_device_is_one_line(tmp_path: Path) -> None:
    done = run(str(BENCH / "user.py"), "--quick", folder=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "error: this bench needs a CUDA device, and torch finds none here\n"


def test_gpu_bench_names_its_parts(tmp_path: Path) -> None:
    done = run(str(BENCH / "user.py"), "--part", "k", folder=tmp_path)
    assert done.returncode == 2 and "there is no part 'k'; choose from a, b, c, d, e" in done.stderr


def test_public_protocols_run_in_small_with_their_gates(tmp_path: Path) -> None:
    done = run(str(BENCH / "public.py"), "--quick", "--rounds", "1", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    rows = [*found["steps"]["rows"], *found["gpt2"], *found["8b"], *found["nano"]["rows"]]
    assert len(rows) == 11 and all(row["valid"] for row in rows)
    assert {"card", "date", "torch", "triton", "transformers"} <= found.keys()


def test_a_figure_that_rounds_worse_than_transformers_is_not_valid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    import public

    assert public.Gate(100, 0.0110, 0.05, 0.0100, 0.05).valid
    assert "NOT VALID" in str(public.Gate(100, 0.0112, 0.05, 0.0100, 0.05))
    assert not public.Gate(100, 0.0100, 0.08, 0.0100, 0.05).valid
    assert not public.Gate(100, 0.5, 2.0, 0.5, 2.0).valid
