"""MTP layers guess for their own model: the text is as without them, the guesses are those of the formula, and layers
that have learned save passes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.cache import taken_back
from regard.decode import speculate
from regard.decode.engine import Engine
from regard.decode.settings import Request, Settings
from regard.errors import UsageError
from regard.mask import Span
from regard.models.mtp import MTP
from tests.look.walk import preset
from tests.wide import crossed

# One with keys and values, one with latents and experts, one with states beside them.
NAMES = ["llama", "deepseek-v3", "qwen3-next-80b"]
PROMPTS = [[7, 2, 7, 9, 30], list(range(4, 30)), [5], [11, 12, 13, 11, 12]]


def model(name: str, depth: int = 1) -> Any:
    plain = preset(name)
    torch.manual_seed(3)
    made = replace(plain.config, mtp=MTP(depth)).make()
    with torch.no_grad():
        for p in made.mtp.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    made.load_state_dict(plain.state_dict(), strict=False)
    return made.eval()


def formula(m: Any, text: list[int], most: int) -> list[int]:
    """The guesses after a text, each pass over all of it and without a cache."""
    alone, said = m.mtp.config.depth == 1, list[int]()
    h = states = m.hidden(torch.tensor([text[:-1]]))
    for k in range(most if alone else min(most, m.mtp.config.depth)):
        # A single layer goes on with its own states, at the places that follow; others read those before them.
        h = torch.cat([h, states[:, -1:]], 1) if alone and k else h if alone else states
        told = torch.tensor([(text + said)[1 if alone else 1 + k :]])
        states = m.further(h, told, Span.run(0, told.shape[1], h.device), 0 if alone else k)
        said.append(int(m.logits(states[:, -1]).argmax()))
    return said


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_those_of_the_formula(
    name: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, seen = model(name, depth), list[int]()
    real = speculate.OwnGuesses.guess

    def guess(self: Any, texts: Any, room: list[int], trails: Any) -> list[list[int]]:
        found = real(self, texts, room, trails)
        for text, most, guesses in zip(texts, room, found, strict=True):
            assert guesses == formula(m, text, most)
            seen.append(len(guesses))
        return found

    monkeypatch.setattr(speculate.OwnGuesses, "guess", guess)
    how: dict[str, Any] = {"draft": 3, "max_new_tokens": 9, "defaults": "plain"}
    assert all(r.error is None for r in regard.generate(m, PROMPTS, draft_model="mtp", **how))
    assert max(seen) == (3 if depth == 1 else depth)


HOWS: dict[str, dict[str, Any]] = {
    "plain": {}, "paged": {"layout": "paged"}, "four": {"draft": 4}, "drawn": {"temperature": 0.8, "samples": 3},
    "lookup": {"lookup": 2}, "penalty": {"repetition_penalty": 1.4}, "invariant": {"invariant": True},
    "scored": {"prompt_logprobs": True, "top_logprobs": 2}, "few": {"rows": 2, "layout": "paged"},
}  # fmt: skip


@pytest.mark.parametrize("name, depth, way", crossed(NAMES, [1, 2], HOWS))
def test_guesses_change_no_token(name: str, depth: int, way: str) -> None:
    m, how = model(name, depth), HOWS[way]
    both: dict[str, Any] = {"max_new_tokens": 15, "eos": (3,), "seed": 4, "defaults": "plain"}
    without = {k: x for k, x in how.items() if k not in ("draft", "lookup")}
    plain = regard.generate(m, PROMPTS, **both, **without)
    found = regard.generate(m, PROMPTS, draft_model="mtp", **both, **how)
    assert [(r.ids, r.finish) for r in found] == [(r.ids, r.finish) for r in plain]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_prepared_models_guess_too(name: str, precision: str) -> None:
    fast = regard.prepare(model(name), precision)
    both: dict[str, Any] = {"max_new_tokens": 12, "defaults": "plain"}
    plain = regard.generate(fast, PROMPTS, **both)
    found = regard.generate(fast, PROMPTS, draft_model="mtp", **both)
    assert [r.ids for r in found] == [r.ids for r in plain]


@pytest.mark.parametrize("name", NAMES)
def test_model_that_has_them_runs_in_a_graph_without_them(name: str) -> None:
    m, found = model(name), []
    for runner in ("graph", "torch"):
        engine = Engine(m, runner=runner, rows=4, pages=60)
        numbers = [engine.submit(Request(ids, Settings(max_new_tokens=8))) for ids in PROMPTS]
        done = {event.request: event.done[0].ids for event in engine.run() if event.done}
        found.append([done[i] for i in numbers])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", NAMES)
def test_storm_of_requests_that_come_and_go(name: str) -> None:
    """Few pages, prefixes that others left, rows put back, some without guesses."""
    m, g = model(name), random.Random(5)
    known = [g.randrange(4, 99) for _ in range(20)]
    asked = []
    for i in range(14):
        ids = known[: g.randrange(1, 20)] + [g.randrange(4, 99) for _ in range(g.randrange(1, 9))]
        s = Settings(max_new_tokens=g.randrange(1, 14), draft=g.choice([0, 1, 2, 5]), seed=i)
        asked.append(Request(ids, replace(s, temperature=g.choice([0.0, 0.9])), key=i))
    found = []
    for draft in ("mtp", None):
        engine, done = Engine(m, draft=draft, rows=5, page=4, pages=30, chunk=16), {}
        waiting = list(asked)
        while waiting or not engine.idle:
            if waiting:
                request = waiting.pop()
                if draft is None:
                    request = replace(request, settings=replace(request.settings, draft=0))
                engine.submit(replace(request, number=-1))
            for event in engine.step():
                if event.done is not None:
                    done[event.request] = [r.ids for r in event.done]
        found.append([done[i] for i in sorted(done)])
    assert found[0] == found[1]


def learned() -> Any:
    """A model that counts in a circle, and an MTP layer that has learned with it."""
    torch.manual_seed(0)
    m = regard.build(
        "llama", dim=32, heads=4, kv_heads=4, layers=2, ffn_dim=64, vocab=12, max_len=64, mtp="mtp"
    )
    from regard.data.feed import Batch
    from regard.training.objectives import causal

    optimizer, starts = torch.optim.Adam(m.parameters(), 3e-3), torch.arange(12)[:, None]
    text: Tensor = (starts + torch.arange(33)) % 12
    batch = Batch(text[:, :-1], text[:, 1:])
    m.train()
    for _ in range(120):
        total, count = causal(m, batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return m.eval()


def test_layer_that_has_learned_halves_the_passes() -> None:
    m = learned()
    passes = {}
    for draft, guesses in ((None, 0), ("mtp", 1), ("mtp", 3)):
        engine = Engine(m, draft=draft)
        engine.submit(Request([3, 4, 5], Settings(max_new_tokens=40, draft=guesses)))
        steps = 0
        while not engine.idle:
            steps += 1
            for event in engine.step():
                if event.done is not None:
                    assert event.done[0].ids == [(6 + i) % 12 for i in range(40)]
        passes[guesses] = steps
    assert passes[1] <= passes[0] / 2 + 2 and passes[3] < passes[1]


def test_engine_says_what_guesses_and_what_it_leaves() -> None:
    m = model("llama")
    assert "draft='mtp' was asked for" in Engine(m, draft="mtp").explain()
    with pytest.raises(UsageError, match="draft='mtp' was asked for; leave runner out"):
        Engine(m, draft="mtp", runner="graph")
    with pytest.raises(UsageError, match="draft is 'own'; give a small model, or 'mtp'"):
        Engine(m, draft="own")
    with pytest.raises(UsageError, match="beam search does not guess ahead"):
        regard.generate(m, [[5]], draft_model="mtp", beams=2)


def test_states_take_back_as_many_as_are_guessed() -> None:
    """A recurrent layer beside them bounds the guesses no more than it bounds a draft model's."""
    m = model("qwen3-next-80b")
    assert 4 <= taken_back(m.cache_specs()) < float("inf")
