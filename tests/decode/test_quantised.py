"""What int8 costs on weights that were trained, with the activations they have: the bars that it is held to."""

import lzma
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.decode.generate import tokenizer_of
from regard.kernels import linear
from regard.text import needed

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
STORIES = DATA / "weights" / "stories260K"


@pytest.mark.parametrize("native", [True, False], ids=["C", "plain"])
def test_int8_of_trained_weights_is_within_its_bars(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = DATA / "lm" / "tinystories_2mb.txt.xz"
    if not (STORIES.is_dir() and text.is_file()):
        pytest.skip(f"{DATA} has no trained weights on this machine")
    monkeypatch.syspath_prepend(ROOT / "bench")
    monkeypatch.delitem(sys.modules, "quality", raising=False)
    import quality

    model: Any = regard.load(STORIES)
    plain = regard.prepare(model, "fp32")
    if not native:
        for module in (linear, sys.modules["regard.fast.cpu.model"]):
            monkeypatch.setattr(module, "usable", lambda precision: False)
    with lzma.open(text, "rt", encoding="utf-8") as file:
        ids = needed(tokenizer_of(model)).encode(file.read(12000))[:3072]
    cost = quality.price(plain, regard.prepare(model, "int8"), torch.tensor(ids).view(-1, 512))
    assert abs(cost.after / cost.before - 1) < 0.003
    assert cost.divergence < 0.005 and cost.same >= 0.97
