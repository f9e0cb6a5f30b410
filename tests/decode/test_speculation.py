"""Speculation by looking up: fewer passes, the same text."""

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from regard.decode.engine import Engine
from regard.decode.sequence import Sequence
from regard.decode.settings import Request, Settings
from regard.decode.speculate import LONGEST, Index
from tests.decode.tiny import (
    DECODERS,
    Counted,
    answers,
    full,
    model,
    prompts,
    request,
    run,
    tokens_of,
)
from tests.wide import crossed

ENDS = (3, 5)
REPETITIVE = [4, 9, 2, 11, 4, 9, 2, 11, 4, 9, 2]


KINDS: list[dict[str, Any]] = [
    {"max_new_tokens": 25, "eos": ENDS},
    {"max_new_tokens": 25, "temperature": 0.5, "top_k": 4},
    {"max_new_tokens": 20, "frequency_penalty": 0.5},
    {"max_new_tokens": 20, "temperature": 0.6, "samples": 2, "min_new_tokens": 9, "eos": ENDS},
]
TEXTS = [REPETITIVE, *prompts((6,)), [1] * 7, prompts((9,), 2)[0]]


@cache
def plain(name: str, layout: str) -> list[list[list[int]]]:
    asked = [(p, Settings(**k)) for p, k in zip(TEXTS, KINDS, strict=True)]
    return answers(name, asked, layout=layout)


@pytest.mark.parametrize(
    "name, layout, lookup",
    crossed([*DECODERS, "pair", "captioner"], ["contiguous", "paged"], [1, 3, 8]),
)
def test_lookup_changes_no_token(name: str, layout: str, lookup: int) -> None:
    """Greedy or drawn, with neighbours that do not speculate."""
    quick = [
        (p, Settings(**k, lookup=lookup if i != 1 else 0))
        for i, (p, k) in enumerate(zip(TEXTS, KINDS))
    ]
    assert answers(name, quick, layout=layout) == plain(name, layout)


def test_lookup_saves_passes_on_a_repetitive_text() -> None:
    passes, texts = {}, {}
    for lookup in (0, 6):
        counted = Counted(model("window"))  # it falls into a loop
        engine = Engine(counted)
        engine.submit(request("window", REPETITIVE, Settings(max_new_tokens=60, lookup=lookup)))
        (texts[lookup],) = (r.ids for (r,) in run(engine).values())
        passes[lookup] = counted.passes
    assert texts[0] == texts[6]
    assert passes[0] == 60
    assert passes[6] < 40


def test_lookup_emits_events_in_order() -> None:
    engine = Engine(model("window"))
    engine.submit(request("window", REPETITIVE, Settings(max_new_tokens=30, lookup=5)))
    events = list(engine.run())
    ((result,),) = (e.done for e in events if e.done)
    assert tokens_of(events, 0) == result.ids
    assert len(result.logprobs) == 30


def test_lookup_finds_the_latest_longest_run() -> None:
    """Held against a plain search through the whole text."""

    def plainly(text: list[int], room: int) -> list[int]:
        for n in range(min(LONGEST, len(text) - 1), 0, -1):
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == text[-n:]:
                    return text[start + n : start + n + room]
        return []

    g = torch.Generator().manual_seed(0)
    for words in (2, 4, 30):
        text = torch.randint(words, (80,), generator=g).tolist()
        index = Index(text[:5])
        for end in range(5, 80):
            index.extend(text[len(index.text) : end])
            assert index.after(4) == plainly(text[:end], 4)


def test_row_looks_up_all_that_it_has_said() -> None:
    row = Sequence(Request([5, 6, 7], Settings(max_new_tokens=20, lookup=3)), 0)
    for said in ([5], [5, 8, 9], [5, 8, 9, 2, 8]):
        row.ids = list(said)
        assert row.guesses() == Index([5, 6, 7, *said]).after(3) and row.index is not None
        assert row.index.text == [5, 6, 7, *said]


def test_a_row_guesses_no_more_than_it_may_say() -> None:
    """One token is chosen; none lies outside the context, nor past the border of LongRoPE."""
    for prompt, said, most, window, border in itertools.product(
        (1, 6), (0, 3), (4, 9), (None, 9, 10), (None, 7, 9, 10)
    ):
        s = Settings(max_new_tokens=most)
        row = Sequence(Request([1] * prompt, s), 0, [2] * said, window=window, border=border)
        bounds = [most - said - 1]
        bounds += [] if window is None else [window - prompt - said]
        far = border is not None and prompt + said > border
        bounds += [] if border is None or far else [border - prompt - said]
        assert row.far == far and row.size == prompt + said
        for wish in (0, 2, 20):
            assert row.room(wish) == max(0, min(wish, *bounds))


@pytest.mark.parametrize("setting", ["lookup", "draft"])
def test_speculation_changes_no_token_when_pages_run_out(setting: str) -> None:
    """A step that finds no page is tried again after a request was put back: its guesses stand."""
    texts = {}
    for guesses in (0, 3):
        s = Settings(max_new_tokens=40, temperature=0.7, **{setting: guesses})
        engine = Engine(model("gqa_rope"), page=4, pages=12, draft=model("window"))
        for i, prompt in enumerate(prompts((2, 2, 3))):
            engine.submit(request("gqa_rope", prompt, s, key=i))
        texts[guesses] = {n: r.ids for n, (r,) in run(engine).items()}
        full(engine.pool)
    assert texts[0] == texts[3]
