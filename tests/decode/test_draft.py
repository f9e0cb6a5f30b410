"""Speculation by a draft model changes no token, and saves passes of the large model when the draft is right."""

import pytest
import torch

import regard
from regard.decode.engine import Engine
from regard.decode.settings import Request, Settings
from regard.errors import UsageError
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


def test_generate_and_stream_guess_four_tokens_if_nobody_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    big, small = model(1, 2), model(2, 1)
    asked, real = list[Settings](), Engine.submit

    def submit(self: Engine, request: Request) -> int:
        asked.append(request.settings)
        assert self.draft is small
        return real(self, request)

    monkeypatch.setattr(Engine, "submit", submit)
    for more in ({}, {"draft": 2}, {"invariant": True}):
        regard.generate(big, [[5, 6]], draft_model=small, max_new_tokens=3, **more)
    for more in ({}, {"draft": 2}):
        list(regard.stream(big, [5, 6], draft_model=small, max_new_tokens=3, **more))
    assert [s.draft for s in asked] == [4, 2, 4, 4, 2]


def test_draft_that_is_right_saves_passes() -> None:
    big = model(1, 2)
    plain, guessed = Settings(max_new_tokens=20), Settings(max_new_tokens=20, draft=4)
    slow, fast = (
        answers(big, None, plain, "contiguous")[1],
        answers(big, big, guessed, "contiguous")[1],
    )
    assert fast <= slow / 3


@pytest.mark.parametrize(
    "preset, sizes, says",
    [
        ("llama", {**SIZE, "vocab": 41}, "the draft model has 41 tokens, the model 40"),
        ("t5-small", {"vocab": 40}, "an encoder-decoder cannot draft"),
        ("luong", {"vocab": 40}, "cannot draft"),
    ],
)
def test_draft_that_cannot_guess_is_refused_before_a_request_comes(
    preset: str, sizes: dict, says: str
) -> None:
    small = regard.build(preset, layers=1, **sizes)
    with pytest.raises(UsageError, match=says):
        Engine(model(1, 1), draft=small)


def test_draft_with_a_shorter_context_is_told_before_a_request_is_queued() -> None:
    small = regard.build("llama", layers=1, **{**SIZE, "max_len": 16}).double()
    engine = Engine(model(1, 2), draft=small, page=8)
    says = "12 tokens of prompt and 5 new ones are more than the draft model's context of 16"
    with pytest.raises(UsageError, match=says):
        engine.submit(Request([1] * 12, Settings(max_new_tokens=5, draft=3)))
    assert engine.idle


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_draft_of_a_shorter_context_serves_beside_longer_texts(layout: str) -> None:
    """What asks for no guesses is not read by the draft, and no guess lies outside its context."""
    big = model(1, 2)
    small = regard.build("llama", layers=1, **{**SIZE, "max_len": 16}).double()
    asked = [([1] * 20, 12, 0), ([2, 3], 14, 3), ([4] * 9, 7, 4), ([5], 15, 1)]
    found = []
    for draft in (small, None):
        engine = Engine(big, draft=draft, layout=layout, page=8)
        for ids, most, ahead in asked:
            s = Settings(max_new_tokens=most, draft=ahead if draft is not None else 0)
            engine.submit(Request(ids, s))
        found.append({e.request: e.done[0].ids for e in engine.run() if e.done})
    assert found[0] == found[1]


def test_draft_without_a_draft_model_is_refused() -> None:
    with pytest.raises(UsageError, match="give one: Engine"):
        Engine(model(1, 1)).submit(Request([1], Settings(draft=2)))
