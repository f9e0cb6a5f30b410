"""`example`: the entry that a test is named after. The test must use every right and wrong value of it."""

from collections.abc import Iterator

import pytest

from tests.worked.examples import Example, entry_of, read


@pytest.fixture
def example(request: pytest.FixtureRequest) -> Iterator[Example]:
    entries = read()
    name = entry_of(request.node.originalname, entries)
    assert name is not None, f"{request.node.originalname}: no entry of that name"
    entry = Example(entries[name])
    yield entry
    assert not entry.unused, f"values of {name} that the test never looked at: {entry.unused}"
