"""C code that finds no memory says so, and the process lives on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regard.kernels.c.linear import usable

ROOT = Path(__file__).resolve().parents[2]
# Inputs are addresses that nobody touches. Then only `room` more may be asked for: enough for the
# output, too little for what the C code keeps beside it.
BEGIN = """
import resource
import torch
from regard.kernels.c import native

def leave(room):
    pages = int(open("/proc/self/statm").read().split()[0])
    most = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (most, most))

torch.set_num_threads(1)
assert native.build()
"""
CAUSAL = """
from regard.kernels.c.train import attend
q, k, v = (torch.empty(1, 1, 2**22, 32, requires_grad=True) for _ in range(3))
call = lambda: attend(q, k, v, None)
leave(2**29 + 2**27)
"""
LINEAR = """
from regard.kernels.c.linear import NativeLinear
layer, x = NativeLinear(torch.randn(32, 64), None, "{}"), torch.empty(2**23, 64)
call = lambda: layer(x)
leave(2**30 + 2**27)
"""
END = """
try:
    call()
except MemoryError as error:
    print(error)
"""


def told(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    whole = BEGIN + code + END
    done = subprocess.run([sys.executable, "-c", whole], env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode} {done.stderr}"
    return done.stdout.strip()


@pytest.mark.usefixtures("in_c")
def test_attention_without_memory_is_told() -> None:
    assert told(CAUSAL) == "causal attention: no memory for a block of scores"


@pytest.mark.parametrize("precision", [p for p in ("fp32", "bf16", "int8") if usable(p)])
def test_product_without_memory_is_told(precision: str) -> None:
    want = f"linear: no memory for {2**23} rows of 64 numbers in {precision}"
    assert told(LINEAR.format(precision)) == want
