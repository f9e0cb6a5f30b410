"""Speculation by a draft model changes no token, and saves passes of the large model when the draft is right."""

import pytest
import torch

import regard
from regard.config import UsageError
from regard.decode.engine import Engine
from regard.decode.settings import Request, Settings
from regard.models import Model

SIZE = {
    "dim": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn_dim": 48,
    "vocab": 40,
    "max_len": 200,
}


def model(seed: int, layers: int) -> Model:
    torch.manual_seed(seed)
    return regard.build("llama", layers=layers, **SIZE).double()


def answers(big: Model, draft: Model | None, settings: Settings, layout: str) -> tuple[list, int]:
    """Ids of every answer, and how often the large model ran."""
    engine = Engine(big, layout=layout, draft=draft, page=8)
    torch.manual_seed(0)
    for n in (5, 17, 2, 9):
        engine.submit(Request(torch.randint(0, 40, (n,)).tolist(), settings))
    found, steps = {}, 0
    while not engine.idle:
        steps += 1
        for event in engine.step():
            if event.done is not None:
                found[event.request] = [r.ids for r in event.done]
    return [found[i] for i in sorted(found)], steps


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "draft_seed", [1, 2]
)  # 1: the same weights, always right when greedy; 2: mostly wrong
def test_draft_changes_no_token(layout: str, temperature: float, draft_seed: int) -> None:
    big, small = model(1, 2), model(draft_seed, 2)
    plain = Settings(max_new_tokens=20, temperature=temperature, seed=4, eos=(3,))
    guessed = Settings(max_new_tokens=20, temperature=temperature, seed=4, eos=(3,), draft=3)
    assert answers(big, None, plain, layout)[0] == answers(big, small, guessed, layout)[0]


def test_draft_that_is_right_saves_passes() -> None:
    big = model(1, 2)
    plain, guessed = Settings(max_new_tokens=20), Settings(max_new_tokens=20, draft=4)
    slow, fast = (
        answers(big, None, plain, "contiguous")[1],
        answers(big, big, guessed, "contiguous")[1],
    )
    assert fast <= slow / 3


def test_draft_with_another_vocabulary_is_refused() -> None:
    small = regard.build("llama", layers=1, **{**SIZE, "vocab": 41}).double()
    with pytest.raises(UsageError, match="the draft model has 41 tokens, the model 40"):
        answers(model(1, 1), small, Settings(max_new_tokens=2, draft=2), "contiguous")


def test_draft_without_a_draft_model_is_refused() -> None:
    with pytest.raises(UsageError, match="give one: Engine"):
        Engine(model(1, 1)).submit(Request([1], Settings(draft=2)))
