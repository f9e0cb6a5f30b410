"""What every test gets: a fixed seed, one torch thread per xdist worker, and `shared`. A run ends
with which fast kernels were run."""

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from regard.kernels import linear
from regard.kernels.c import native
from tests.kernels.told import lines

ROOT = Path(__file__).resolve().parents[1]

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # two workers with two threads each are three times slower

# Nothing that is collected becomes garbage: without the search for it, collecting takes three quarters of the time.
gc.disable()

# What tests write need not outlive a power cut (`make faults` cuts it, in processes of its own), and each wait for the
# disk takes milliseconds. A handle that is not open is still an error.
os.fsync = lambda handle: os.fstat(handle) and None  # type: ignore[assignment]

native.build()  # tiny models do not ask for it
linear.SMALL = 0  # their layers are in 4 bits too

try:
    from hypothesis import settings
except ImportError:  # a machine without the dev extra runs the tests that need no hypothesis
    pass
else:
    # no deadline: the first call of a torch kernel may take seconds
    settings.register_profile("regard", deadline=None, derandomize=True)
    settings.load_profile("regard")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    # Where oneDNN has no bf16 product, torch's first one switches oneDNN off for the whole process.
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the repository; tests that ask for it skip without it."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(
            "needs ../shared/data, the real data beside the repository: not on this machine"
        )
    return path


def pytest_collection_finish() -> None:
    """From here on garbage is looked for among what the tests make, not among the tests and modules themselves."""
    gc.enable()
    gc.freeze()


# The outermost one speaks last, after pytest's own summary.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    yield
    for line in lines(terminalreporter.stats):
        terminalreporter.write_line(line)
