"""One server for the whole folder: the model that the package carries, invariant, so that bits can be compared."""

from collections.abc import Iterator

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("uvicorn")

from regard.serve.model_worker import Options
from tests.serve.running import Client, running


@pytest.fixture(scope="session")
def demo() -> Iterator[Client]:
    with running({"demo": "demo"}, options=Options(invariant=True, rows=16)) as client:
        yield client


@pytest.fixture(scope="session")
def plain() -> Iterator[Client]:
    """The same, as it is served by default."""
    with running({"demo": "demo"}) as client:
        yield client
