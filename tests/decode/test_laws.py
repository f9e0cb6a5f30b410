"""Laws of decoding: beam search against its plain form and against all texts there are, scores against the model, and
the mode that a model is in."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.attention import GQA
from regard.block import Tower
from regard.decode.engine import Engine
from regard.decode.generate import Job
from regard.decode.sampling import beam_search
from regard.decode.settings import Result, Settings
from regard.errors import UsageError
from regard.layers import LM, MLP
from regard.models import Tokens, TransformerConfig
from regard.position import Sinusoidal
from tests.checkpoint.test_native import tiny
from tests.decode.tiny import PAIRS, model, prompts, request, run
from tests.laws.mechanisms import stir

FEW = 4  # words: so few that all texts can be listed
CLOSE = 1e-5  # scores are summed in float32


def small(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    tower = Tower(8, 1, GQA(2), MLP(8))
    return stir(TransformerConfig(Tokens(FEW, Sinusoidal(32)), tower, LM(tied=False)).make())


def answer(m: Any, prompt: list[int], settings: Settings, name: str = "") -> list[Result]:
    engine = Engine(m, page=4, pages=2000)
    engine.submit(request(name, prompt, settings))
    (found,) = run(engine).values()
    return found


@torch.no_grad()
def after(m: Any, ids: list[int]) -> Tensor:
    return m(torch.tensor([ids]))[0, -1]


# --- beam search --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [1, 2, 3, 7, 40])
def test_lane_equals_plain_beam_search_without_an_end(width: int, seed: int) -> None:
    """No text ends before the others: then the batch keeps what the plain form keeps. The plain form's width may pass
    the number of texts; then it finds them all, and so does the batch."""
    m, prompt = small(seed), [1, 0, 2]
    plain = beam_search(lambda ids: after(m, [*prompt, *ids]), width, max_len=4)
    s = Settings(
        max_new_tokens=4, beams=width, n_best=width, length_penalty=0.0, early_stopping="never"
    )
    found = answer(m, prompt, s)
    assert [r.ids for r in found] == [list(ids) for ids, _ in plain]
    torch.testing.assert_close([r.score for r in found], [x for _, x in plain], rtol=0, atol=CLOSE)


def every_text(
    m: Any, prompt: list[int], size: int, end: int
) -> list[tuple[float, tuple[int, ...]]]:
    """All texts that end with `end` or have `size` tokens, with their log probabilities, best first."""
    words = [w for w in range(FEW) if w != end]
    texts = [(*t, end) for n in range(size) for t in itertools.product(words, repeat=n)]
    texts += list(itertools.product(words, repeat=size))
    found = []
    for text in texts:
        with torch.no_grad():
            logp = m(torch.tensor([prompt + list(text)]))[0].log_softmax(-1)
        total = sum(float(logp[len(prompt) - 1 + i, w]) for i, w in enumerate(text))
        found.append((total, text))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("early", ["never", "heuristic"])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_lane_wide_enough_finds_the_best_of_all_texts(
    seed: int, penalty: float, early: str
) -> None:
    m, prompt, end = small(seed), [2, 1], 3
    s = Settings(
        max_new_tokens=3,
        beams=64,
        n_best=5,
        length_penalty=penalty,
        early_stopping=early,
        eos=(end,),
    )
    found = answer(m, prompt, s)
    texts = every_text(m, prompt, 3, end)
    best = sorted(((x / len(t) ** penalty, t) for x, t in texts), reverse=True)[:5]
    assert [r.ids for r in found] == [[w for w in t if w != end] for _, t in best]
    torch.testing.assert_close([r.score for r in found], [x for x, _ in best], rtol=0, atol=CLOSE)


def test_plain_beam_search_wide_enough_finds_the_best_of_all_texts() -> None:
    m, prompt, end = small(), [2, 1], 3
    plain = beam_search(lambda ids: after(m, [*prompt, *ids]), 64, max_len=3, end=end)
    assert [ids for ids, _ in plain] == [t for _, t in every_text(m, prompt, 3, end)]


def test_text_that_was_stopped_is_scored_as_one_that_ended() -> None:
    """Of beams that are cancelled: log probability / length ** penalty, by the length that the text has."""
    s = Settings(max_new_tokens=9, beams=3, n_best=3, length_penalty=1.7)
    engine = Engine(small())
    number = engine.submit(request("", [1, 0, 2], s))
    for _ in range(4):
        engine.step()
    (event,) = engine.cancel(number)
    assert event.done is not None and len(event.done) == 3
    for r in event.done:
        assert 2 <= len(r.ids) <= 5
        assert r.score == pytest.approx(sum(r.logprobs) / len(r.ids) ** 1.7, abs=CLOSE)


# --- scores -------------------------------------------------------------------------------------------------------

ENDS = (3, 5, 8)
ASKED = {
    "greedy": Settings(max_new_tokens=8, eos=ENDS),
    "drawn": Settings(max_new_tokens=8, eos=ENDS, temperature=1.5, top_k=6, repetition_penalty=1.4),
    "samples": Settings(max_new_tokens=8, eos=ENDS, temperature=1.2, samples=3),
    "lookup": Settings(max_new_tokens=8, eos=ENDS, lookup=4),
    "beams": Settings(max_new_tokens=8, eos=ENDS, beams=4, n_best=4, length_penalty=0.7),
}


def forced(name: str, prompt: list[int], ids: list[int]) -> Tensor:
    """Log probabilities (t V) of what comes at each place of an answer, by one forward over all of it."""
    asked = request(name, prompt, Settings())
    more = {} if asked.source is None else {"source": asked.source[None]}
    with torch.no_grad():
        logits = model(name)(torch.tensor([asked.ids + ids]), **more)[0]
    return logits[len(asked.ids) - 1 :].log_softmax(-1)


@pytest.mark.parametrize(
    "name, kind",
    [
        (name, kind)
        for name in ("gqa_rope", "mla", "dsa_mla", "gru", *PAIRS)
        for kind in ASKED
        if kind != "lookup" or name not in ("gru", "seq2seq", "seq2seq_plain")  # they cannot
    ],
)
def test_logprobs_are_those_of_a_teacher_forced_forward(name: str, kind: str) -> None:
    for prompt in prompts((5, 3)):
        for r in answer(model(name), prompt, ASKED[kind], name):
            logp = forced(name, prompt, r.ids)
            expect = [float(logp[i, w]) for i, w in enumerate(r.ids)]
            assert r.logprobs == pytest.approx(expect, abs=CLOSE)


@pytest.mark.parametrize("kind", ["greedy", "drawn", "samples", "beams"])
@pytest.mark.parametrize("name", ["gqa_rope", "pair"])
def test_score_is_the_sum_of_logprobs_and_of_the_end(name: str, kind: str) -> None:
    """Of a sample plainly; of a beam over length ** penalty, its end token counted."""
    s, endings = ASKED[kind], set()
    for prompt in prompts((5, 3, 4, 6)):
        for r in answer(model(name), prompt, s, name):
            ends = forced(name, prompt, r.ids)[len(r.ids)]
            # which of the end tokens it was is not told: one of them accounts for the score
            totals = (
                [sum(r.logprobs) + float(ends[e]) for e in s.eos]
                if r.finish == "eos"
                else [sum(r.logprobs)]
            )
            size = len(r.ids) + (r.finish == "eos")
            scores = [x / size**s.length_penalty if s.beams > 1 else x for x in totals]
            assert any(r.score == pytest.approx(x, abs=CLOSE) for x in scores)
            endings.add(r.finish)
    assert "eos" in endings or name == "pair"


# --- the mode -----------------------------------------------------------------------------------------------------


def with_dropout(m: Any) -> Any:
    """The model with dropout wherever it has a place for it, in training mode but for its first part."""
    for module in m.modules():
        config = getattr(module, "config", None)
        if isinstance(module, nn.Dropout):
            module.p = 0.5
        elif isinstance(module, nn.RNNBase):
            module.dropout = 0.5
        elif config is not m.config and hasattr(config, "dropout"):
            module.config = replace(config, dropout=0.5)
    m.train()
    next(m.children()).eval()
    return m


def modes(m: Any) -> list[bool]:
    return [module.training for module in m.modules()]


@pytest.mark.parametrize("name", [name for name in regard.PRESETS if "whisper" not in name])
def test_generate_leaves_the_mode_as_it_was(name: str) -> None:
    """A model in training, with dropout, writes what it writes in evaluation; and each of its modules is in the mode in
    which it was, between steps too, and when something raises."""
    m = with_dropout(tiny(name))
    try:
        m.cache_specs()
    except UsageError:
        pytest.skip("it does not write")
    before, prompt = modes(m), [5, 9, 2]
    source = getattr(m.config, "source", None)
    if hasattr(source, "patch"):
        prompt = torch.randn(source.channels, source.size, source.size)
    got = regard.generate(m, [prompt], max_new_tokens=4, eos=())
    assert modes(m) == before
    engine = Engine(m)
    engine.submit(Job(m, (), {"max_new_tokens": 4}).requests([prompt])[0])
    while not engine.idle:
        engine.step()
        assert modes(m) == before
    with pytest.raises(UsageError):
        regard.generate(m, [prompt], max_new_tokens=4, eos=(10**6,))
    assert modes(m) == before
    m.next_logits = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        regard.generate(m, [prompt], max_new_tokens=4, eos=())
    assert modes(m) == before
    del m.next_logits
    assert regard.generate(m.eval(), [prompt], max_new_tokens=4, eos=()) == got
    assert not any(modes(m))
