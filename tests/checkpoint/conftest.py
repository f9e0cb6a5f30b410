"""Each transformers model is made and saved once a process, whichever tests ask for it."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import regard
from tests.checkpoint.families import CASES, Peer
from tests.checkpoint.spoil import SIZES


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


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return regard.build("gpt2", **SIZES).save(tmp_path_factory.mktemp("bad") / "gpt2")


@pytest.fixture
def folder(gpt2: Path, tmp_path: Path) -> Path:
    """A good GPT-2 folder to spoil."""
    return Path(shutil.copytree(gpt2, tmp_path / "gpt2"))
