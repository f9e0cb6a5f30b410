"""A good folder to spoil, and the question whether loading it is refused in the right words."""

import json
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.errors import UsageError

SIZES = dict(layers=2, dim=24, heads=3, ffn_dim=20, vocab=50, max_len=40)


def configure(folder: Path, drop: str = "", **changes: Any) -> Path:
    path = folder / "config.json"
    data = json.loads(path.read_text()) | changes
    data.pop(drop, None)
    path.write_text(json.dumps(data))
    return folder


def refused(folder: Path, *words: str) -> str:
    """Loading is refused, and the sentence holds every one of the words."""
    with pytest.raises(UsageError) as caught:
        regard.load(folder)
    text = str(caught.value)
    assert [w for w in words if w not in text] == [], text
    assert len(text) < 2000
    return text
