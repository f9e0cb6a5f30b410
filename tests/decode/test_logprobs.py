"""Log probabilities of the best tokens and of the prompt: those of one forward over the whole text, on every runner,
whatever is shared, chunked or put back."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.decode import sampler
from regard.decode.engine import Engine
from regard.decode.sequence import SLICE
from regard.decode.settings import Request, Result, Settings
from regard.errors import UsageError
from tests.decode.test_laws import CLOSE, forced
from tests.decode.test_window import LONGEST
from tests.decode.test_window import made as windowed
from tests.decode.tiny import VOCAB, full, model, prompts, request, run

WAYS: dict[str, dict[str, Any]] = {
    "contiguous": {"layout": "contiguous"},
    "paged": {"page": 4, "pages": 60, "chunk": 5},
    "graph": {"runner": "graph", "page": 4, "pages": 60},
    "graph in chunks": {"runner": "graph", "page": 4, "pages": 60, "chunk": 5},
}
ways = pytest.mark.parametrize("way", WAYS)


def each(*names: str) -> pytest.MarkDecorator:
    """Models and ways: two of them have a graph."""
    has = {"gqa_rope", "mla"}
    pairs = [(n, w) for n in names for w in WAYS if n in has or "runner" not in WAYS[w]]
    return pytest.mark.parametrize("name, way", pairs)


BEST = {"top_logprobs": 4}


def best_of(logp: Tensor, count: int) -> list[tuple[int, float]]:
    top, ids = logp.topk(count)
    return list(zip(ids.tolist(), [pytest.approx(x, abs=CLOSE) for x in top.tolist()]))


def served(
    name: str, asked: list[tuple[list[int], Settings]], **options: Any
) -> list[list[Result]]:
    engine = Engine(model(name), **options)
    for i, (prompt, settings) in enumerate(asked):
        engine.submit(request(name, prompt, settings, key=i))
    found = run(engine)
    full(engine.pool)
    assert not engine.scheduler.scores
    return [found[i] for i in range(len(asked))]


@pytest.mark.parametrize("asked, want", [((0, 0), 1), ((1, 0), 1), ((3, 1), 3), ((20, 0), VOCAB)])
def test_as_many_best_tokens_are_looked_for_as_somebody_asks(
    asked: tuple[int, int], want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, real = set[int](), sampler.lse_and_topk

    def noted(logits: Tensor, count: int) -> Any:
        counts.add(count)
        return real(logits, count)

    monkeypatch.setattr(sampler, "lse_and_topk", noted)
    some = [([3, 4], Settings(max_new_tokens=3, top_logprobs=n)) for n in asked]
    results = served("gqa_rope", some, layout="contiguous")
    assert counts == {want}
    for (result,), n in zip(results, asked, strict=True):
        assert [len(tops) for tops in result.top_logprobs] == [min(n, VOCAB)] * (3 if n else 0)


@each("gqa_rope", "mla", "delta", "gru", "pair")
def test_best_tokens_are_those_of_a_teacher_forced_forward(name: str, way: str) -> None:
    """Before temperature, filters, penalties and bias, beside rows that ask for fewer or for none."""
    asked = [
        (prompts((7,))[0], Settings(max_new_tokens=6, **BEST)),
        ([3, 4], Settings(max_new_tokens=6)),
        ([5, 6], Settings(max_new_tokens=6, top_logprobs=1, temperature=1.4, top_k=5, samples=2)),
        (
            [5, 9],
            Settings(max_new_tokens=6, **BEST, logit_bias=((2, 9.0),), repetition_penalty=1.5),
        ),
    ]
    for (prompt, s), results in zip(asked, served(name, asked, **WAYS[way]), strict=True):
        for r in results:
            assert len(r.top_logprobs) == (len(r.ids) if s.top_logprobs else 0)
            for logp, tops in zip(forced(name, prompt, r.ids), r.top_logprobs):
                assert tops == best_of(logp, s.top_logprobs)


def test_events_carry_the_best_tokens_and_the_end_is_left_out() -> None:
    s = Settings(max_new_tokens=9, eos=(3, 5, 8), **BEST)
    engine = Engine(model("gqa_rope"))
    engine.submit(request("gqa_rope", [1, 2], s))
    events = list(engine.run())
    (result,) = events[-1].done
    assert result.finish == "eos" and len(result.top_logprobs) == len(result.ids)
    assert [e.top_logprobs for e in events if e.token is not None] == result.top_logprobs


def test_guesses_change_no_best_token() -> None:
    (plain,) = served("gqa_rope", [([7, 7, 7], Settings(max_new_tokens=12, **BEST))])[0]
    (guessed,) = served("gqa_rope", [([7, 7, 7], Settings(max_new_tokens=12, lookup=3, **BEST))])[0]
    assert [[i for i, _ in tops] for tops in guessed.top_logprobs] == [
        [i for i, _ in tops] for tops in plain.top_logprobs
    ]


# --- of the prompt ------------------------------------------------------------------------------------------------


@each("gqa_rope", "mla", "dsa_mla", "delta", "gru", "pair")
def test_prompt_logprobs_are_those_of_one_forward(name: str, way: str) -> None:
    """Of prompts of one token, within a slice and longer than one; a prompt that others have read too."""
    size = 40 if name in ("dsa_mla", "delta") else SLICE + 9
    long = prompts((size,))[0] if name != "pair" else prompts((9,))[0]
    scored = {"max_new_tokens": 3, "prompt_logprobs": True}
    asked = [
        (long, Settings(max_new_tokens=3)),
        (long, Settings(**scored)),
        ([4], Settings(**scored, top_logprobs=2)),
        (long[:11], Settings(**scored, top_logprobs=2, temperature=1.0, samples=2)),
    ]
    options = WAYS[way] | ({"pages": 120} if "pages" in WAYS[way] else {})
    found = served(name, asked, **options)
    assert found[0][0].prompt_logprobs == [] and found[1][0].prompt_top_logprobs == []
    for (prompt, s), results in zip(asked[1:], found[1:], strict=True):
        ids = request(name, prompt, s).ids
        for r in results:
            logp = logp_of(name, prompt, ids)
            want = [None] + [
                pytest.approx(float(logp[i, t]), abs=CLOSE) for i, t in enumerate(ids[1:])
            ]
            assert r.prompt_logprobs == want
            if s.top_logprobs:
                tops = [[], *(best_of(logp[i], 2) for i in range(len(ids) - 1))]
                assert r.prompt_top_logprobs == (tops if len(ids) > 1 else [])


def logp_of(name: str, prompt: list[int], ids: list[int]) -> Tensor:
    asked = request(name, prompt, Settings())
    more = {} if asked.source is None else {"source": asked.source[None]}
    with torch.no_grad():
        return model(name)(torch.tensor([ids]), **more)[0].log_softmax(-1)


@ways
def test_prompt_logprobs_read_what_the_prefix_cache_has(way: str) -> None:
    """Pages that others left hold no logits: the prompt is read whole, and later prompts share its pages."""
    engine, (prompt,) = Engine(model("gqa_rope"), **WAYS[way]), prompts((14,))
    for asks in (False, True, False):
        engine.submit(
            request("gqa_rope", prompt, Settings(max_new_tokens=2, prompt_logprobs=asks), key=0)
        )
        ((result,),) = run(engine).values()
        assert len(result.prompt_logprobs) == (14 if asks else 0)
    full(engine.pool)


@pytest.mark.parametrize("way", ["paged", "graph in chunks"])
def test_prompt_logprobs_survive_being_put_back(way: str) -> None:
    """While the prompt is read, and afterwards: then it is not asked again."""
    (prompt,), s = prompts((17,)), Settings(max_new_tokens=9, prompt_logprobs=True)
    want = served("gqa_rope", [(prompt, s)])[0][0]
    for when in range(1, 12):
        engine = Engine(model("gqa_rope"), **WAYS[way])
        engine.submit(request("gqa_rope", [1], Settings(max_new_tokens=30), key=1))
        number = engine.submit(request("gqa_rope", prompt, s, key=0))
        done = {}
        for step in range(200):
            if step == when and len(list(engine.scheduler.running())) > 1:
                with torch.inference_mode():
                    engine.scheduler.preempt_last()
            done |= {e.request: e.done[0] for e in engine.step() if e.done}
            if engine.idle:
                break
        assert done[number].ids == want.ids
        assert done[number].prompt_logprobs == pytest.approx(want.prompt_logprobs, abs=CLOSE)


def test_prompt_logprobs_of_a_prompt_that_fills_the_context() -> None:
    """One longer is not read whole."""
    m, s = windowed("rope"), Settings(max_new_tokens=2, overflow="crop", prompt_logprobs=True)
    (prompt,) = prompts((LONGEST + 1,))
    engine = Engine(m, page=4, pages=9)
    engine.submit(Request(prompt[:-1], s))
    ((result,),) = run(engine).values()
    with torch.no_grad():
        logp = m(torch.tensor([prompt[:-1]]))[0].log_softmax(-1)
    want = [float(logp[i, token]) for i, token in enumerate(prompt[1:-1])]
    assert result.prompt_logprobs == [None, *(pytest.approx(x, abs=CLOSE) for x in want)]
    says = f"read whole, and {LONGEST + 1} tokens are more than the model's context of {LONGEST}"
    with pytest.raises(UsageError, match=says):
        engine.submit(Request(prompt, s))


def test_prompt_logprobs_of_beams_and_in_generate() -> None:
    s = Settings(max_new_tokens=3, beams=3, n_best=2, prompt_logprobs=True)
    both = served("gqa_rope", [([4, 5, 6], s)])[0]
    (one,) = regard.generate(model("gqa_rope"), [[4, 5, 6]], max_new_tokens=1, prompt_logprobs=True)
    for r in both:
        assert r.prompt_logprobs == pytest.approx(one.prompt_logprobs, abs=CLOSE)


def test_more_best_tokens_than_words_are_all_words() -> None:
    assert VOCAB < 20
    for options in ({}, {"runner": "graph", "page": 4, "pages": 9}):
        ((r,),) = served(
            "gqa_rope", [([1], Settings(max_new_tokens=2, top_logprobs=20))], **options
        )
        assert [sorted(i for i, _ in tops) for tops in r.top_logprobs] == [list(range(VOCAB))] * 2


def test_best_tokens_are_taken_back_with_the_step_that_raised() -> None:
    """Ctrl-C in a callback, after some rows of the step have said their token."""
    s, calls = Settings(max_new_tokens=8, **BEST), iter(range(100))

    def stop(sample: int, ids: list[int]) -> bool:
        if next(calls) in (2, 5):
            raise KeyboardInterrupt
        return False

    engine = Engine(model("gqa_rope"), page=4)
    engine.submit(request("gqa_rope", [4, 5], s, key=0))
    engine.submit(request("gqa_rope", [1, 2], s, key=1, stop=stop))
    done, raised = {}, 0
    while not engine.idle:
        try:
            done |= {e.request: e.done[0] for e in engine.step() if e.done}
        except KeyboardInterrupt:
            raised += 1
    want = served("gqa_rope", [([4, 5], s), ([1, 2], s)])
    assert raised == 2
    for i in (0, 1):
        pairs = zip(done[i].top_logprobs, want[i][0].top_logprobs, strict=True)
        assert all([t for t, _ in a] == [t for t, _ in b] for a, b in pairs)
