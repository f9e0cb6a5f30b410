"""Short forms of `python -m tests.serve.storm`."""

from collections.abc import Iterator

import pytest

from regard.serve.edge import Limits
from tests.serve import storm
from tests.serve.running import Client, running


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with running({"demo": "demo"}, limits=Limits(queue=512)) as client:
        yield client


def test_spoilt_bodies_get_clean_statuses(client: Client) -> None:
    counts = storm.spoil(client, 300)
    assert counts[400] > 100 and counts[200] > 10


def test_many_streams_beside_clients_that_die(client: Client) -> None:
    storm.crowd(client, 40)


def test_random_schemas_are_kept(client: Client) -> None:
    counts = storm.schemas(client, storm.random_schemas(32))
    assert counts["valid"] > 20 and not counts["wrong"] + counts["refused"]
