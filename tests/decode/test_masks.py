"""A mask says which tokens may come next: a handwritten grammar of lists such as [1,[2,3]], on every runner."""

import contextlib
import gc
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.decode.engine import Engine
from regard.decode.sequence import pack
from regard.decode.settings import Settings
from regard.errors import UsageError
from tests.decode.test_steps import Fragile
from tests.decode.tiny import VOCAB, full, model, prompts, request, run

OPEN, CLOSE, COMMA, END = 0, 1, 2, 3
DIGITS = range(4, 10)
WAYS: dict[str, dict[str, Any]] = {
    "contiguous": {"layout": "contiguous"},
    "paged": {"page": 4, "pages": 60, "chunk": 5},
    "graph": {"runner": "graph", "page": 4, "pages": 60},
}
ways = pytest.mark.parametrize("way", WAYS)


def each(*names: str) -> pytest.MarkDecorator:
    """Models and ways: two of them have a graph."""
    has = {"gqa_rope", "mla"}
    pairs = [(n, w) for n in names for w in WAYS if n in has or "runner" not in WAYS[w]]
    return pytest.mark.parametrize("name, way", pairs)


def allowed(ids: list[int]) -> set[int]:
    """What may follow in a list of digits and lists, at most three deep; END when it is closed."""
    depth = ids.count(OPEN) - ids.count(CLOSE)
    last = ids[-1] if ids else None
    if last is None:
        return {OPEN}
    if depth == 0:
        return {END}
    deeper = {OPEN} if depth < 3 else set()
    if last in (OPEN, COMMA):
        return {*DIGITS, *deeper, *({CLOSE} if last == OPEN else ())}
    return {COMMA, CLOSE}


def booleans(sample: int, ids: list[int]) -> torch.Tensor:
    return torch.tensor([i in allowed(ids) for i in range(VOCAB)])


def bits(sample: int, ids: list[int]) -> np.ndarray:
    return np.array([[sum(1 << i for i in allowed(ids))]], np.int32)


def in_grammar(ids: list[int]) -> bool:
    return all(token in allowed(ids[:i]) for i, token in enumerate(ids))


SETTINGS = [
    Settings(max_new_tokens=30, eos=(END,)),
    Settings(max_new_tokens=30, eos=(END,), temperature=1.5, seed=3, samples=3),
    Settings(max_new_tokens=30, eos=(END,), temperature=1.5, top_p=0.5, top_k=3, seed=1),
    Settings(max_new_tokens=12, eos=(END,), temperature=1.2, lookup=4, top_logprobs=2),
    Settings(max_new_tokens=30, eos=(END,), frequency_penalty=1.0, logit_bias=((18, 50.0),)),
]


def masked(name: str, mask: Callable) -> list[tuple[list[int], Settings, Callable | None]]:
    """Requests with this mask, in company of rows without one."""
    settings = [s for s in SETTINGS if not (s.lookup and name == "gru")]
    asked: list[Any] = [(p, s, mask) for p, s in zip(prompts((3, 5, 4, 6, 2)), settings)]
    asked[2:2] = [
        ([5, 6], Settings(max_new_tokens=25), None),
        ([1], Settings(max_new_tokens=9), None),
    ]
    return asked


def answered(
    name: str, mask: Callable, some: Iterable[int] | None = None, **options: Any
) -> list[list[list[int]]]:
    """The answers to some of them, or to all."""
    engine, asked = Engine(model(name), **options), masked(name, mask)
    for i in range(len(asked)) if some is None else some:
        prompt, s, its = asked[i]
        engine.submit(request(name, prompt, s, key=i, mask=its))
    done = run(engine)
    full(engine.pool)
    return [[r.ids for r in done[n]] for n in sorted(done)]


@cache
def each_alone(name: str, mask: Callable) -> list[list[list[int]]]:
    return [answered(name, mask, [i])[0] for i in range(len(masked(name, mask)))]


@pytest.mark.parametrize("mask", [booleans, bits])
@each("gqa_rope", "mla", "gru", "pair")
def test_only_allowed_tokens_are_said(name: str, mask: Callable, way: str) -> None:
    """In company of rows without a mask, whose texts are as ever; and as each is alone."""
    asked, together = masked(name, mask), answered(name, mask, **WAYS[way])
    assert together == each_alone(name, mask)
    for texts, (_, _, its) in zip(together, asked, strict=True):
        assert its is None or all(in_grammar(ids) for ids in texts)
    complete = [ids for i, (_, _, its) in enumerate(asked) if its for ids in together[i]]
    assert any(ids.count(OPEN) == ids.count(CLOSE) for ids in complete)


@ways
def test_mask_that_allows_nothing_ends_a_complete_text(way: str) -> None:
    def mask(sample: int, ids: list[int]) -> torch.Tensor:
        return torch.arange(VOCAB) < (5 if len(ids) < 3 else 0)

    engine = Engine(model("gqa_rope"), **WAYS[way])
    engine.submit(request("gqa_rope", [7, 8], Settings(max_new_tokens=9), mask=mask))
    engine.submit(request("gqa_rope", [7, 8], Settings(max_new_tokens=9)))
    found = run(engine)
    assert found[0][0].finish == "stop" and len(found[0][0].ids) == 3 and found[0][0].error is None
    assert set(found[0][0].ids) <= set(range(5))
    assert found[1][0].finish == "length"
    full(engine.pool)


@ways
@pytest.mark.parametrize("when", [0, 1, 4])
def test_mask_that_raises_ends_its_sample_alone(when: int, way: str) -> None:
    def mask(sample: int, ids: list[int]) -> torch.Tensor:
        return torch.ones(VOCAB + (len(ids) == when and sample == 1)).bool()

    s = Settings(max_new_tokens=6, temperature=1.0, samples=3)
    engine = Engine(model("gqa_rope"), **WAYS[way])
    engine.submit(request("gqa_rope", [7, 8], s, key=0, mask=mask))
    engine.submit(request("gqa_rope", [7, 8], s, key=0))
    found = run(engine)
    want = [r.ids for r in found[1]]
    assert [r.ids for r in found[0]] == [want[0], want[1][:when], want[2]]
    assert [r.finish for r in found[0]] == ["length", "error", "length"]
    assert found[0][1].error == (
        f"its mask raised ValueError: it gave bool of size {VOCAB + 1}; give a boolean for each of {VOCAB} tokens, or "
        "1 words of int32"
    )
    full(engine.pool)


@ways
def test_mask_and_settings_that_leave_nothing_are_an_error(way: str) -> None:
    """Not a token that one of them forbids."""

    def mask(sample: int, ids: list[int]) -> torch.Tensor:
        return torch.arange(VOCAB) == 4

    engine = Engine(model("gqa_rope"), **WAYS[way])
    drawn = {"banned": (4,), "temperature": 1.0}
    cases = [{"banned": (4,)}, {"forced_first": 5}, drawn, {**drawn, "top_k": 3, "top_p": 0.5}]
    for more in cases:
        engine.submit(request("gqa_rope", [7], Settings(max_new_tokens=4, **more), mask=mask))
    for (result,) in run(engine).values():
        assert (result.ids, result.finish) == ([], "error")
        assert "its mask allows no token that its other settings leave" in result.error
    full(engine.pool)


@ways
def test_masks_survive_interrupts_and_being_put_back(way: str) -> None:
    """A text that is read again is asked about again from its own words."""
    asked = [(p, SETTINGS[i % 3]) for i, p in enumerate(prompts((3, 9, 4, 6, 2, 5)))]

    def found(**options: Any) -> list[list[list[int]]]:
        rng, done = random.Random(1), {}
        faulty = lambda: KeyboardInterrupt() if rng.random() < 0.1 else None  # noqa: E731
        kind = model("gqa_rope") if "runner" in options else Fragile(model("gqa_rope"), faulty)
        engine = Engine(kind, **options)
        for i, (prompt, s) in enumerate(asked):
            engine.submit(request("gqa_rope", prompt, s, key=i, mask=bits))
        while not engine.idle:
            if rng.random() < 0.2 and len(list(engine.scheduler.running())) > 1:
                with torch.inference_mode():
                    engine.scheduler.preempt_last()
            with contextlib.suppress(KeyboardInterrupt):
                done |= {e.request: [r.ids for r in e.done] for e in engine.step() if e.done}
        full(engine.pool)
        return [done[i] for i in range(len(asked))]

    assert found(**WAYS[way]) == found(rows=1)


def packed(mask: Any, vocab: int) -> np.ndarray:
    words = np.full(-(-vocab // 32), 12345, np.int32)
    pack(mask, words, vocab)
    return words


def test_packed_is_one_bit_a_token() -> None:
    for vocab in (19, 32, 70):
        want = torch.rand(vocab, generator=torch.Generator().manual_seed(0)) < 0.5
        words = packed(want, vocab)
        got = [bool(words[i // 32] >> i % 32 & 1) for i in range(vocab)]
        assert got == want.tolist() and len(words) == -(-vocab // 32)
        assert packed(words, vocab).tolist() == words.tolist()
        full = torch.full((len(words),), -1, dtype=torch.int32)
        assert packed(full, vocab).tolist() == packed([True] * vocab, vocab).tolist()
    assert packed(torch.tensor([-1], dtype=torch.int32), 70).tolist() == [-1, 0, 0]
    assert packed([True], 70).tolist() == [1, 0, 0]


def test_mask_is_told_what_it_cannot_do() -> None:
    engine = Engine(model("gqa_rope"))
    with pytest.raises(UsageError, match="beam search has many: leave one out"):
        engine.submit(request("gqa_rope", [1], Settings(beams=2), mask=bits))
    with pytest.raises(UsageError, match="a mask is called with .* got 3"):
        engine.submit(request("gqa_rope", [1], Settings(), mask=3))


def test_generate_and_stream_take_a_mask() -> None:
    (result,) = regard.generate(model("gqa_rope"), [[5]], max_new_tokens=20, eos=(END,), mask=bits)
    assert in_grammar(result.ids) and len(result.ids) > 1


def test_slot_that_had_a_mask_has_none() -> None:
    """Rows with and without masks take turns in few slots, always beside each other."""
    asked = [(p, bits if i % 3 else None) for i, p in enumerate(prompts((3,) * 12))]

    def found(**options: Any) -> list[list[int]]:
        engine = Engine(model("gqa_rope"), runner="graph", page=4, pages=60, **options)
        for i, (prompt, mask) in enumerate(asked):
            s = Settings(max_new_tokens=3 + i % 4, eos=(END,), frequency_penalty=0.5)
            engine.submit(request("gqa_rope", prompt, s, key=i, mask=mask))
        done = run(engine)
        return [done[i][0].ids for i in range(len(asked))]

    assert found(rows=2) == found(rows=12)


@pytest.mark.parametrize("name", ["gqa_rope", "mla", "delta"])
def test_token_is_fed_before_its_follower_has_a_mask(name: str) -> None:
    """In a graph; and once, also where others come and go beside it. A state is fed with the choice."""
    engine = Engine(model(name), runner="graph", page=4, pages=60, rows=4)
    assert engine.graph is not None
    runner, order = engine.graph.steps, list[str]()

    def noted(part: str, call: Any) -> Any:
        def new(first: int, *rest: Any) -> Any:
            order.append(part if part == "feed" else f"{part} {first}")
            return call(first, *rest)

        return new

    for part in ("feed", "run"):
        setattr(runner, part, noted(part, getattr(runner, part)))

    def mask(sample: int, ids: list[int]) -> np.ndarray:
        order.append(f"mask {len(ids)}")
        return bits(sample, ids)

    s = Settings(max_new_tokens=4)
    first = engine.submit(request(name, [5, 7], s, mask=mask))
    alone = run(engine)[first][0].ids
    fed = [] if name == "delta" else ["feed"]
    later = [part for i in (1, 2, 3) for part in (*fed, f"mask {i}", "run 1")]
    assert order == ["mask 0", "run 0", *later]
    order.clear()
    long = engine.submit(request(name, [5, 7], replace(s, max_new_tokens=6), mask=mask))
    events = engine.step() + engine.step()
    free = engine.submit(request(name, [5, 7], s))
    done = {e.request: e.done[0].ids for e in [*events, *engine.run()] if e.done}
    # With the other's first step, what had been fed is fed again.
    assert done[long][:4] == alone and order.count("feed") == 6 * len(fed)
    plain = Engine(model(name), runner="torch")
    number = plain.submit(request(name, [5, 7], s))
    assert run(plain)[number][0].ids == done[free]


def test_garbage_is_not_collected_inside_a_step() -> None:
    """And afterwards, as its user has it."""
    seen = []

    def mask(sample: int, ids: list[int]) -> torch.Tensor:
        seen.append(gc.isenabled())
        return torch.ones(VOCAB).bool()

    for on in (True, False):
        gc.enable() if on else gc.disable()
        try:
            engine = Engine(model("gqa_rope"))
            engine.submit(request("gqa_rope", [1, 2], Settings(max_new_tokens=3), mask=mask))
            run(engine)
            assert gc.isenabled() is on
        finally:
            gc.enable()
    assert seen == [False] * 6
