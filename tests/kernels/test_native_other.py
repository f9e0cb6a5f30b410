"""Products in C for a machine of another architecture, run by an emulator where there is one: the same numbers as the
plain form here, and the same bits in any company."""

import platform
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from regard.kernels.c import native
from regard.kernels.c.linear import KINDS
from regard.kernels.linear import Int4, Int8, half_is_fast

HERE = Path(__file__).resolve().parent
COMPILER, EMULATOR, LIBRARIES = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"


def cases() -> Iterator[bytes]:
    torch.manual_seed(0)
    for m in (1, 2, 5, 7, 16, 33):
        for k, n in ((1, 16), (31, 50), (64, 257), (96, 50), (100, 1), (576, 50)):
            x = torch.randn(m, k) * (1 + 40 * (torch.rand(m, k) < 0.05))
            w, b = torch.randn(n, k) / k**0.5, torch.randn(n)
            for kind in ("int8", "int4") if k % 32 == 0 else ("int8",):
                y = (Int8 if kind == "int8" else Int4)(w, b)(x)
                yield struct.pack("4q", KINDS[kind], m, k, n)
                yield from (t.contiguous().numpy().tobytes() for t in (x, w, b, y))


@pytest.mark.parametrize(
    "form", [name for name, row in native.FORMS.items() if row[0] == "aarch64"]
)
def test_products_on_another_architecture(form: str, tmp_path: Path) -> None:
    if platform.machine() == "aarch64" or not (shutil.which(COMPILER) and shutil.which(EMULATOR)):
        pytest.skip(f"needs {COMPILER} and {EMULATOR} on another machine than aarch64")
    if half_is_fast():
        pytest.skip("int4 is bf16 here, float32 there")
    flags = [*native.FLAGS, *native.FORMS[form][2].split(), "-w", f"-I{native.SOURCES}"]
    made = tmp_path / "other"
    subprocess.run([COMPILER, *flags, str(HERE / "other.c"), "-o", str(made), "-lm"], check=True)
    (tmp_path / "cases").write_bytes(b"".join(cases()))
    command = [EMULATOR, "-L", LIBRARIES, str(made), str(tmp_path / "cases")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    count, others, worst = done.stdout.split()
    assert int(count) == 54 and int(others) == 0 and float(worst) < 1e-5
