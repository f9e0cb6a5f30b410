"""What the tests of the row operations share: the C forms without a way back, both forms in turn, threads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from regard.kernels.c import native
from regard.kernels.c import rows as native_rows


@pytest.fixture
def in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """C code that works, and nothing to fall back on."""
    if not native.build():
        pytest.skip(f"no native code: {native.why()}")

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the plain form was taken")

    for name in ("plain_attend_one", "plain_update_cache", "plain_norm", "plain_lse_and_topk"):
        monkeypatch.setattr(native_rows, name, refuse)


@pytest.fixture(params=["plain", "native"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms under the public names."""
    if request.param == "plain":
        monkeypatch.setattr(native_rows, "call_of", lambda name: None)
    elif not native.build():
        pytest.skip(f"no native code: {native.why()}")
    return request.param


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
