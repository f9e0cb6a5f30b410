"""Several answers to one prompt: samples, beams, groups; and what rows share."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from regard.decode.beam import Group, Search, Shape
from regard.decode.engine import Engine
from regard.decode.runners.rows import PlainBatch
from regard.decode.sequence import BROKEN, Sequence
from regard.decode.settings import Result, Settings
from regard.decode.sources import sources
from tests.decode.tiny import (
    VOCAB,
    Counted,
    answers,
    model,
    prompts,
    request,
    run,
)

ENDS = (3, 5)
GREEDY = Settings(max_new_tokens=12, eos=ENDS, frequency_penalty=0.8)
SEEDED = Settings(max_new_tokens=12, eos=ENDS, temperature=0.9, top_p=0.97, seed=4)
SAMPLES = Settings(max_new_tokens=10, eos=ENDS, temperature=1.1, samples=3, seed=2)
BEAMS = Settings(max_new_tokens=12, eos=ENDS, beams=3, n_best=3, length_penalty=0.8)
SHORT = Settings(max_new_tokens=4, eos=ENDS, beams=2, early_stopping="first")


def test_samples_share_the_prefill() -> None:
    counted = Counted(model("gqa_rope"))
    engine = Engine(counted, page=4, pages=100)
    s = Settings(max_new_tokens=1, temperature=1.0, samples=8)
    (prompt,) = prompts((30,))
    engine.submit(request("gqa_rope", prompt, s))
    engine.step()
    assert counted.fed == 30


def test_samples_share_pages_of_the_prompt() -> None:
    engine = Engine(model("gqa_rope"), page=4, pages=100)
    s = Settings(max_new_tokens=8, temperature=1.0, samples=8)
    engine.submit(request("gqa_rope", prompts((30,))[0], s))
    engine.step()  # 31 tokens: 7 full pages together, and an eighth each
    assert sum(n > 0 for n in engine.pool.users) == 7 + 8


def test_samples_differ_and_each_equals_a_lone_request_with_its_key() -> None:
    """Sample k of key i draws by the counter 1024 i + k."""
    s = Settings(max_new_tokens=10, temperature=1.2, samples=4, seed=3)
    ((prompt),) = prompts((5,))
    ((first, *others),) = answers("mla", [(prompt, s)])
    assert len({tuple(x) for x in (first, *others)}) == 4
    one = Settings(max_new_tokens=10, temperature=1.2, seed=3)
    assert answers("mla", [(prompt, one)]) == [[first]]


def test_seed_and_key_choose_the_text() -> None:
    (prompt,) = prompts((5,))
    texts = set()
    for seed in (0, 1):
        s = Settings(max_new_tokens=12, temperature=1.5, seed=seed)
        found = answers("gqa_rope", [(prompt, s), (prompt, s)])
        assert found == answers("gqa_rope", [(prompt, s), (prompt, s)])
        texts |= {tuple(found[0][0]), tuple(found[1][0])}
    assert len(texts) == 4


@pytest.mark.parametrize("name", ["gqa_rope", "pair"])
def test_beam_width_one_is_greedy(name: str) -> None:
    """By the search itself; the engine takes such a request for a greedy one."""
    s, m = Settings(max_new_tokens=12, eos=ENDS), model(name)
    for prompt in prompts((4, 7)):
        search, cache, asked = Search(Shape.of(s)), m.cache(1), request(name, prompt, s)
        group = Group(Sequence(asked, 0), asked.ids)
        with torch.inference_mode():
            given = sources([asked], torch.device("cpu"))
            ids = torch.tensor([asked.ids])
            search.begin([group], m.next_logits(ids, cache=cache, **given))
            while not group.over:
                logits = m.next_logits(search.last()[:, None], cache=cache)
                search.step(*search.best([group], logits))
        ((greedy,),) = answers(name, [(prompt, s)])
        assert [r.ids for r in search.results(group, "")] == [greedy]


def test_n_best_is_sorted_and_without_repeats() -> None:
    for early in ("heuristic", "never", "first"):
        s = Settings(max_new_tokens=8, beams=6, n_best=6, eos=ENDS, early_stopping=early)
        engine = Engine(model("gqa_rope"))
        engine.submit(request("gqa_rope", prompts((4,))[0], s))
        (found,) = run(engine).values()
        scores = [r.score for r in found]
        assert scores == sorted(scores, reverse=True)
        assert len({(tuple(r.ids), r.finish) for r in found}) == 6


def test_n_best_of_so_few_texts_begins_with_what_there_is() -> None:
    """One new token and nineteen words: of twenty-five texts the first are these nineteen; the rest have scores that
    say that they are none."""
    s = Settings(max_new_tokens=1, beams=25, n_best=25)
    engine = Engine(model("gqa_rope"), page=4, pages=200)
    engine.submit(request("gqa_rope", [4, 2], s))
    (found,) = run(engine).values()
    assert sorted(r.ids for r in found[:19]) == [[i] for i in range(19)]
    assert len(found) == 25 and all(r.score < -1e8 for r in found[19:])


# --- encoders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pair", "twin", "captioner"])
def test_beams_share_one_row_of_the_source(name: str) -> None:
    engine = Engine(model(name), page=4, pages=100)
    for i, prompt in enumerate(prompts((5, 3, 6))):
        engine.submit(request(name, prompt, Settings(max_new_tokens=9, beams=4), key=i))
    for _ in range(5):
        engine.step()
        (batch,) = engine.scheduler.batches.values()
        assert batch.cache.batch == 12
        assert batch.cache.cross.batch == 3
        # Its pages are counted once.
        held = [page for table in getattr(batch.cache.cross, "tables", []) for page in table]
        assert [engine.pool.users[page] for page in held] == [1] * (5 if name == "twin" else 0)


@pytest.mark.parametrize("name", ["pair", "twin"])
def test_rows_that_share_a_source_join_rows_that_do_not(name: str) -> None:
    asked = [(p, s) for p, s in zip(prompts((5, 3, 6)), (SAMPLES, GREEDY, SAMPLES), strict=True)]
    engine = Engine(model(name), page=4, pages=100, chunk=4)
    for i, (prompt, settings) in enumerate(asked):
        engine.submit(request(name, prompt, settings, key=i))
    found = run(engine)
    for i, (prompt, settings) in enumerate(asked):
        one = Engine(model(name))
        one.submit(request(name, prompt, settings, key=i))
        assert [r.ids for r in found[i]] == [r.ids for r in run(one)[0]]


def test_beams_of_different_settings_share_their_passes() -> None:
    """And each says what it says alone."""
    kinds = [
        {},
        {"max_new_tokens": 9},
        {"length_penalty": 2.0, "early_stopping": "never"},
        {"length_penalty": -0.5, "n_best": 1},
        {"early_stopping": "first", "eos": (4,)},
        {"banned": (7, 8, 2), "min_new_tokens": 5},
        {"logit_bias": ((6, 3.0),), "repetition_penalty": 1.5},
        {"frequency_penalty": 1.0, "forced_first": 9, "forced_last": 3},
        {"presence_penalty": 0.7, "max_new_tokens": 3},
    ]
    common = {"max_new_tokens": 7, "beams": 3, "n_best": 3, "eos": (3,)}
    asked = [(p, Settings(**common | kind)) for p, kind in zip(prompts([4] * 9), kinds)]
    for late in (0, 2):
        counted = Counted(model("gqa_rope"))
        engine, found = Engine(counted), {}
        for i, (prompt, settings) in enumerate(asked):
            engine.submit(request("gqa_rope", prompt, settings, key=i))
            for _ in range(late if i == 4 else 0):
                found |= {e.request: e.done for e in engine.step() if e.done}
        found |= run(engine)
        # one pass for the prompts, and one for each token after the first; late ones have their own
        assert counted.passes <= 9 + (late + 1 if late else 0)
        alone = [answers("gqa_rope", [one])[0] for one in asked]
        assert [[r.ids for r in found[i]] for i in range(9)] == alone


@pytest.mark.parametrize("runner", ["torch", "graph"])
def test_log_probabilities_of_beams_are_each_requests_own(runner: str) -> None:
    """Renormalised or the model's, beside each other; bias and bans change the score of a text alone."""
    common = {"max_new_tokens": 6, "beams": 3, "n_best": 3, "banned": (7, 8), "eos": (3,)}
    kinds = [{}, {"renormalize_logits": True}, {"logit_bias": ((6, 3.0), (2, -1.0))}]
    kinds.append(kinds[1] | kinds[2])
    asked = [(p, Settings(**common | kind)) for p, kind in zip(prompts([4] * 4), kinds)]

    def found(some: list[tuple[list[int], Settings]]) -> list[list[Result]]:
        engine = Engine(model("gqa_rope"), page=4, pages=200, runner=runner)
        for prompt, settings in some:
            engine.submit(request("gqa_rope", prompt, settings))
        return list(run(engine).values())

    for (prompt, s), together in zip(asked, found(asked), strict=True):
        for r, alone in zip(together, found([(prompt, s)])[0], strict=True):
            with torch.no_grad():
                logits = model("gqa_rope")(torch.tensor([prompt + r.ids]))[0, len(prompt) - 1 :]
            logits = logits[: len(r.ids)]
            logp = logits.log_softmax(-1)
            if s.renormalize_logits:
                for token, bias in (*s.logit_bias, *((i, -torch.inf) for i in s.banned)):
                    logp[:, token] += bias
                logp = logp.log_softmax(-1)
            want = [float(logp[i, token]) for i, token in enumerate(r.ids)]
            assert r.logprobs == pytest.approx(want, abs=1e-6)
            assert (r.ids, r.logprobs) == (alone.ids, pytest.approx(alone.logprobs, abs=1e-6))
            assert r.score == pytest.approx(alone.score, abs=1e-6)


@pytest.mark.parametrize("size", [200, 256, 300])
def test_beams_of_a_long_prompt_have_places_in_a_graph(size: int) -> None:
    """A runner's first table is of 256 tokens, and a search's too."""
    (prompt,) = prompts((size,))
    long, short = Settings(max_new_tokens=70, beams=2), Settings(max_new_tokens=3, beams=2)
    asked = [([1, 2], short), (prompt, long)]
    how: dict[str, Any] = {"page": 16, "pages": 100}
    assert answers("gqa_rope", asked, runner="graph", **how) == answers("gqa_rope", asked, **how)


def test_samples_and_beams_are_rows_of_one_lane() -> None:
    engine = Engine(model("gqa_rope"))
    for settings in (GREEDY, SEEDED, SAMPLES, BEAMS, SHORT, BEAMS):
        engine.submit(request("gqa_rope", [1, 2], settings))
    for _ in range(5):
        engine.step()
        assert [type(batch) for batch in engine.scheduler.batches.values()] == [PlainBatch]


# --- as many texts as were asked for ------------------------------------------------------------------------------

VOCABULARY = range(VOCAB)
NARROW: dict[str, dict[str, Any]] = {
    "one token may begin, and it ends": {"forced_first": 3, "max_new_tokens": 1},
    "one token may come": {"banned": [i for i in VOCABULARY if i != 4]},
    "two tokens may come, one is an end": {"banned": list(VOCABULARY[2:]), "eos": [1]},
    "nothing is likely": {"logit_bias": dict.fromkeys(VOCABULARY, -1e9)},
    "forced from first to last": {"forced_first": 3, "forced_last": 5, "max_new_tokens": 2},
}


def test_beams_that_are_stopped_give_the_texts_that_there_are() -> None:
    """Two words that may come, and two tokens: four texts of the eight that were asked for, the best first."""
    engine, prompt = Engine(model("gqa_rope")), prompts((4,))[0]
    s = Settings(
        max_new_tokens=9, beams=8, n_best=8, banned=tuple(VOCABULARY[2:]), length_penalty=0.5
    )
    number = engine.submit(request("gqa_rope", prompt, s))
    engine.step()
    (event,) = engine.cancel(number)
    assert event.done is not None
    found, rest = event.done[:4], event.done[4:]
    assert {tuple(r.ids) for r in found} == {*itertools.product((0, 1), repeat=2)}
    for r in found:
        with torch.no_grad():
            logp = model("gqa_rope")(torch.tensor([prompt + r.ids]))[0, len(prompt) - 1 :]
        want = logp.log_softmax(-1)[range(2), r.ids]
        assert r.logprobs == pytest.approx(want.tolist(), abs=1e-6)
        assert r.score == pytest.approx(float(want.sum()) / 2**0.5, abs=1e-6)
    assert [r.score for r in found] == sorted((r.score for r in found), reverse=True)
    assert {r.finish for r in event.done} == {"cancelled"}
    # Their score is transformers' for what is none.
    assert [(r.ids, r.logprobs, r.score) for r in rest] == [([], [], -1e9)] * 4


@pytest.mark.parametrize("when", [1, 3])
def test_beams_whose_logits_are_no_numbers_have_no_texts(when: int) -> None:
    counted = Counted(model("gqa_rope"))
    counted.spoil = lambda ids, logits: logits + (torch.nan if counted.passes >= when else 0.0)
    engine = Engine(counted)
    engine.submit(request("gqa_rope", [1, 2], Settings(max_new_tokens=5, beams=3, n_best=2)))
    (found,) = run(engine).values()
    assert [(r.ids, r.logprobs, r.score, r.finish) for r in found] == [([], [], 0.0, "error")] * 2
    assert {r.error for r in found} == {BROKEN}


@pytest.mark.parametrize("what", NARROW)
@pytest.mark.parametrize("runner", ["torch", "graph"])
def test_every_prompt_has_n_best_texts(what: str, runner: str) -> None:
    """So that who slices the results by n_best has each prompt's own."""
    narrow = Settings.of({"max_new_tokens": 5, "beams": 4, "n_best": 4} | NARROW[what])
    wide = Settings(max_new_tokens=5, beams=4, n_best=4)
    asked = list(zip(prompts((3, 5, 4)), (wide, narrow, wide), strict=True))
    found = answers("gqa_rope", asked, runner=runner)
    assert [len(each) for each in found] == [4, 4, 4]
    assert found[::2] == answers("gqa_rope", asked[::2], runner=runner)
    # The first is the one that is possible, however few others are.
    if what == "one token may come":
        assert found[1][0] == [4] * 5
    if "forced" in what or "begin" in what:
        assert found[1][0] == [3, 5][: narrow.max_new_tokens]


@pytest.mark.parametrize("runner", ["torch", "graph"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_forced_last_token_is_no_end_token(runner: str, beams: int) -> None:
    """Where a request names no end, min_new_tokens holds nothing back."""
    prompt = prompts((4,))[0]
    s = Settings(max_new_tokens=8, min_new_tokens=8, beams=beams)
    (((*said, _),),) = answers("gqa_rope", [(prompt, s)], runner=runner)
    forced = replace(s, forced_last=said[2])
    ((text,),) = answers("gqa_rope", [(prompt, forced)], runner=runner)
    # Of beams the best text may be another, by its last token.
    assert (beams > 1 and said[2] in text[:-1]) or text == [*said, said[2]]


def test_an_end_token_of_number_0_is_held_back_too() -> None:
    prompt = prompts((4,))[0]
    pull = {"logit_bias": {0: 1e6}, "max_new_tokens": 6, "eos": [0]}
    for least in (0, 3):
        ((text,),) = answers("gqa_rope", [(prompt, Settings.of(pull | {"min_new_tokens": least}))])
        assert len(text) == least and 0 not in text


@pytest.mark.parametrize(
    "kind, candidates",
    [
        ({"beams": 4}, 8),
        ({"beams": 4, "eos": (1,)}, 8),
        ({"beams": 4, "eos": (1, 2)}, 12),
        ({"beams": 4, "eos": (1, 2, 3)}, 16),
    ],
)
def test_candidates_leave_enough_where_every_beam_ends(kind: Any, candidates: int) -> None:
    """As in transformers: twice the beams, or one more for a beam than there are ends."""
    s = Settings(**kind)
    assert Shape.of(s) == Shape(4, candidates)
