"""regard parity where there is a GPU: sound models are not accused, a spoilt one is. Skipped without one."""

import copy
import random
from typing import Any

import pytest
import torch

import regard
from regard.models import Model
from regard.parity import Check, Runner, parity, runs, sample
from tests.look.zoo import CLEAN, MODELS, random_model, stirred

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: there is none here"
)
GPU = "GPU against CPU"


def checked(model: Model, tokens: int = 7) -> Check:
    (check,) = parity(model, sample(model, rows=2, tokens=tokens), only=[GPU])
    return check


def small(name: str) -> Model:
    torch.manual_seed(1)
    return stirred(MODELS[name].make(), random.Random(1))


@pytest.mark.parametrize("name", MODELS)
def test_gpu_is_not_accused_of_a_bug(name: str) -> None:
    found = checked(small(name))
    assert found.verdict != "bug", found


@pytest.mark.parametrize("seed", range(CLEAN))
def test_random_model_on_the_gpu_is_not_accused(seed: int) -> None:
    found = checked(random_model(seed), tokens=6)
    assert found.verdict != "bug", found


def test_full_size_on_the_gpu_is_not_accused() -> None:
    torch.manual_seed(0)
    found = checked(regard.build("gpt2"), tokens=64)
    assert found.verdict == "rounding", found


def test_weight_that_changed_on_its_way_to_the_gpu_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoilt(model: Model, given: Any) -> Any:
        twin = copy.deepcopy(model).cuda()
        with torch.no_grad():
            next(p for n, p in twin.named_parameters() if "wv" in n).mul_(1.01)
        return Runner(twin, given).alone()

    monkeypatch.setattr(runs, "on_gpu", spoilt)
    assert checked(small(next(iter(MODELS)))).verdict == "bug"
