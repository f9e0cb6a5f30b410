"""Each transformers model is made and saved once a process, whichever tests ask for it."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.checkpoint.families import CASES, Peer


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Peer]:
    pytest.importorskip("transformers", reason="the peer of these tests; it is in the dev extra")

    @cache
    def make(name: str) -> Peer:
        folder = tmp_path_factory.mktemp("peer") / name
        model = CASES[name].make()
        model.save_pretrained(folder)
        return Peer(CASES[name], model, folder)

    return make
