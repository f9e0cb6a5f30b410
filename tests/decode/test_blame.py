"""A request whose step raises alone is ended with an error; its neighbours go on, with the texts they have without it:
in every runner, while prompts are read and while texts are written, whoever raises."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.decode import sampling
from regard.decode.engine import Engine
from regard.decode.settings import Result, Settings
from regard.errors import UsageError
from regard.fast.cpu import prepare
from regard.mask import Span
from tests.decode.tiny import Counted, answers, full, model, prompts, request, run

FAR = 44  # the position that raises; a prompt of 40 tokens comes there after some steps
RUNNERS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "contiguous"},
    "paged": {"page": 4, "pages": 200},
    "native": {"page": 4, "pages": 200},
    "graph": {"page": 4, "pages": 200, "runner": "graph"},
}
KINDS = {
    "greedy": Settings(max_new_tokens=8),
    "drawn": Settings(max_new_tokens=8, temperature=1.0, top_p=0.9),
    "samples": Settings(max_new_tokens=8, temperature=1.0, samples=3),
    "beams": Settings(max_new_tokens=8, beams=3, n_best=2),
    "lookup": Settings(max_new_tokens=8, lookup=3),
    "draft": Settings(max_new_tokens=8, draft=2),
}


@functools.cache
def of(runner: str) -> Any:
    whole = model("gqa_rope")
    return prepare(copy.deepcopy(whole).float(), "fp32") if runner == "native" else whole


def engine_of(runner: str, kind: str) -> Engine:
    draft = model("mla") if kind == "draft" else None
    return Engine(of(runner), rows=16, chunk=16, draft=draft, **RUNNERS[runner])


def answered(engine: Engine, asked: Sequence[tuple[list[int], Settings]]) -> list[list[Result]]:
    for prompt, settings in asked:
        # What is drawn depends on the prompt, not on its place in the queue.
        engine.submit(request("gqa_rope", prompt, settings, key=sum(prompt)))
    found = run(engine)
    full(engine.pool)
    assert engine.idle and not (
        engine.scheduler.finished or engine.scheduler.resumed or engine.scheduler.deadlines
    )
    return [found[i] for i in range(len(asked))]


Guilty = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def raising(engine: Engine, guilty: Guilty, fault: Exception) -> Iterator[None]:
    """Every forward of every runner embeds its tokens: it raises where some (ids, positions) are `guilty`."""

    models = [engine.model, *([engine.graph.steps.fast] if engine.graph else [])]
    kinds = {type(getattr(m, m.words)) for m in models}
    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds:

            def call(
                self: Any, ids: Tensor, pos: Span, *rest: Any, real: Any = kind.__call__
            ) -> Any:
                if bool(guilty(ids, pos.index).any()):
                    raise fault
                return real(self, ids, pos, *rest)

            patch.setattr(kind, "__call__", call)
        yield


@pytest.mark.parametrize(
    "runner, kind, place",
    [
        (runner, kind, (0, 2, 5)[(i + j) % 3])
        for i, runner in enumerate(RUNNERS)
        for j, kind in enumerate(KINDS)
    ],
)
def test_a_position_that_raises_ends_its_own_answer(runner: str, kind: str, place: int) -> None:
    asked = [(prompt, KINDS[kind]) for prompt in prompts((3, 7, 5, 2, 9))]
    alone = answered(engine_of(runner, kind), asked)
    (long,) = prompts((40,), seed=1)
    want = answered(engine_of(runner, kind), [(long, KINDS[kind])])[0]
    engine = engine_of(runner, kind)
    with raising(engine, lambda ids, pos: pos >= FAR, UsageError("no place behind 43")):
        found = answered(engine, [*asked[:place], (long, KINDS[kind]), *asked[place:]])
    broken = found.pop(place)
    for mine, theirs in zip(found, alone, strict=True):
        assert [(r.ids, r.finish) for r in mine] == [(r.ids, r.finish) for r in theirs]
    assert [r.finish for r in broken] == ["error"] * len(want)
    assert {r.error for r in broken} == {"no place behind 43"}
    # What it had said stays, unless it was a search.
    if kind != "beams":
        assert all(r.ids == w.ids[: len(r.ids)] for r, w in zip(broken, want, strict=True))
        assert all(r.ids for r in broken) or runner == "graph"


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("guilty", [(1,), (0, 3, 4)])
def test_prompts_that_raise_end_alone(runner: str, guilty: tuple[int, ...]) -> None:
    """While they are read, in chunks and beside others."""
    bad, kinds = 7, ["greedy", "samples", "beams", "greedy", "drawn", "beams"]
    texts = [[x if x != bad else 0 for x in p] for p in prompts((3, 30, 5, 40, 9, 2))]
    # Whoever is innocent never says what the guilty are given.
    asked = [
        (p, Settings(**{**vars(KINDS[k]), "banned": (bad,)}))
        for p, k in zip(texts, kinds, strict=True)
    ]
    alone = answered(engine_of(runner, "greedy"), asked)
    asked = [([*p[:-1], bad], s) if i in guilty else (p, s) for i, (p, s) in enumerate(asked)]
    engine = engine_of(runner, "greedy")
    with raising(engine, lambda ids, pos: (ids == bad) & (pos >= 0), AssertionError("ours")):
        found = answered(engine, asked)
    for i, (mine, theirs) in enumerate(zip(found, alone, strict=True)):
        if i in guilty:
            assert {r.error for r in mine} == {"the model failed: AssertionError"}
            assert len(mine) == len(theirs)
        else:
            assert [r.ids for r in mine] == [r.ids for r in theirs]


def test_a_choice_that_raises_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own assertion, where tokens are chosen."""
    asked = [(p, KINDS["drawn"]) for p in prompts((3, 5, 4, 6))]
    asked[2] = (asked[2][0], Settings(max_new_tokens=8, temperature=0.5, min_p=0.5))
    want = [[r.ids for r in each] for each in answered(engine_of("paged", "drawn"), asked)]
    real = sampling.choose

    def choose(logits: Tensor, columns: dict[str, Tensor], count: Tensor) -> Tensor:
        at = columns["min_p"][:, 0] > 0 if "min_p" in columns else torch.zeros(1)
        assert not (at.bool() & (count == 3)).any()
        return real(logits, columns, count)

    monkeypatch.setattr("regard.decode.sampler.choose", choose)
    found = answered(engine_of("paged", "drawn"), asked)
    assert [found[i][0].ids for i in (0, 1, 3)] == [want[i][0] for i in (0, 1, 3)]
    assert found[2][0].finish == "error" and found[2][0].ids == want[2][0][:3]


@pytest.mark.parametrize("most, often", [(1, 10), (2, 2), (3, 1)])
def test_faults_that_take_several_end_nobody_who_is_alone(most: int, often: int) -> None:
    """A forward of more rows than so many raises: nobody is at fault alone, so from then on fewer meet, and it does not
    raise for every token again."""

    class Lonely(Counted):
        raised = 0

        def _count(self, ids: Tensor, lengths: Any, logits: Tensor) -> Tensor:
            if len(ids) > most:
                self.raised += 1
                raise RuntimeError("too many")
            return super()._count(ids, lengths, logits)

    asked = [(p, Settings(max_new_tokens=24)) for p in prompts((3, 5, 4, 6, 2))]
    lonely = Lonely(model("gqa_rope"))
    found = answered(Engine(lonely, page=4, pages=200), asked)
    assert lonely.raised <= often
    assert [[r.ids for r in each] for each in found] == answers("gqa_rope", asked)


def test_neighbours_of_a_fault_are_soon_together_again() -> None:
    """Who is at fault is found by halves: of 16 requests in few more passes, not one by one to the end."""

    class Fragile(Counted):
        def _count(self, ids: Tensor, lengths: Any, logits: Tensor) -> Tensor:
            if bool((ids == 7).any()):
                raise RuntimeError("no sevens")
            return super()._count(ids, lengths, logits)

    s = Settings(max_new_tokens=24, banned=(7,))
    asked = [([i % 6, 3], s) for i in range(15)] + [([7, 3], s)]
    fragile = Fragile(model("gqa_rope"))
    engine = Engine(fragile, rows=16, page=4, pages=400)
    found = answered(engine, asked)
    assert [r.finish for (r,) in found] == ["length"] * 15 + ["error"]
    assert engine.scheduler.cap == 16 and not engine.scheduler.careful
    # 24 steps, and four halves with a prompt and a step each; one by one it would be 15 * 24.
    assert fragile.passes <= 24 + 4 * 2


def test_repeats_among_banned_tokens_count_once() -> None:
    vocab = model("gqa_rope").config.embedding.vocab
    few = tuple(range(4, vocab))
    asked = [
        (p, Settings(max_new_tokens=6, beams=3, n_best=3, banned=few)) for p in prompts((3, 5))
    ]
    many = [(p, Settings(max_new_tokens=6, beams=3, n_best=3, banned=few * 3)) for p, _ in asked]
    plain = answers("gqa_rope", asked)
    assert answers("gqa_rope", many) == plain
    assert answers("gqa_rope", [asked[0], many[1]]) == plain


def test_generate_raises_what_is_raised_for_every_prompt() -> None:
    """With one good answer among them it is a warning, and the answer is given."""

    class Fragile(Counted):
        def _count(self, ids: Tensor, lengths: Any, logits: Tensor) -> Tensor:
            if bool((ids == 7).any()):
                raise ZeroDivisionError("no sevens")
            return super()._count(ids, lengths, logits)

    fragile = Fragile(model("gqa_rope"))
    how: dict[str, Any] = {"max_new_tokens": 4, "banned": (7,), "eos": ()}
    with pytest.raises(ZeroDivisionError, match="no sevens"):
        regard.generate(fragile, [[7, 1], [7, 2]], **how)
    with pytest.raises(ZeroDivisionError, match="no sevens"):
        list(regard.stream(fragile, [7, 1], **how))
    (want,) = regard.generate(fragile, [[3, 1]], **how)
    with pytest.warns(RuntimeWarning, match="2 of 3 answers"):
        found = regard.generate(fragile, [[7, 1], [3, 1], [7, 2]], **how)
    assert [r.finish for r in found] == ["error", "length", "error"] and found[1].ids == want.ids
