"""overflow="crop": a text that outgrows the context goes on as if only its last tokens had been given."""

import contextlib
from typing import Any

import pytest
import torch

import regard
from regard.attention import GQA, MLA
from regard.block import Tower
from regard.decode.engine import Engine
from regard.decode.runners.outgrown import WindowBatch
from regard.decode.settings import Request, Result, Settings
from regard.layers import LM, MLP
from regard.models import EncoderDecoderConfig, Tokens, TransformerConfig
from regard.position import Learned, Rope
from tests.decode.test_steps import Fragile
from tests.decode.tiny import Counted, full, prompts, run
from tests.laws.mechanisms import VOCAB, stir

LONGEST = 9
TOWER = Tower(24, 2, GQA(3), MLP(20))
CONFIGS: dict[str, Any] = {
    "learned": TransformerConfig(Tokens(VOCAB, Learned(LONGEST)), TOWER, LM(tied=False)),
    "rope": TransformerConfig(
        Tokens(VOCAB), Tower(24, 2, GQA(3, rope=Rope()), MLP(20)), LM(), max_len=LONGEST
    ),
    "mla": TransformerConfig(
        Tokens(VOCAB), Tower(24, 1, MLA(3, 10), MLP(20)), LM(), max_len=LONGEST
    ),
    "pair": EncoderDecoderConfig(
        Tokens(VOCAB, Learned(LONGEST)),
        Tower(24, 1, GQA(3), MLP(20), causal=False),
        Tokens(VOCAB, Learned(LONGEST)),
        Tower(24, 1, GQA(3), MLP(20), cross=GQA(3)),
    ),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return stir(CONFIGS[name].make())


@torch.no_grad()
def plain(model: Any, ids: list[int], new: int, **more: Any) -> list[int]:
    """Greedy, feeding the last LONGEST tokens again for every new one."""
    text = list(ids)
    for _ in range(new):
        text.append(int(model(torch.tensor([text[-LONGEST:]]), **more)[0, -1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "contiguous"}, {"rows": 2}, {"chunk": 4}, {"page": 2, "pages": 12}],
    ids=str,
)
@pytest.mark.parametrize("name", CONFIGS)
def test_crop_is_a_plain_loop_over_the_last_tokens(name: str, options: dict) -> None:
    """Prompts below, at and above the context, together; beside one that fits."""
    model, settings = made(name), Settings(max_new_tokens=14, overflow="crop")
    sizes = (3, LONGEST - 1, LONGEST, LONGEST + 1, 30)
    engine = Engine(model, **{"page": 4, "pages": 60} | options)
    want = []
    for i, prompt in enumerate(prompts(sizes)):
        source, more = None, {}
        if name == "pair":
            source = torch.tensor(prompts((4,), seed=i)[0])
            more = {"source": source[None]}
        engine.submit(Request(prompt, settings, source))
        want.append(plain(model, prompt, 14, **more))
    source = torch.tensor([1, 2]) if name == "pair" else None
    fits = engine.submit(Request([1, 2, 3], Settings(max_new_tokens=6), source))
    found = run(engine)
    assert [found[i][0].ids for i in range(len(sizes))] == want
    assert {r.finish for r in found[0]} == {"length"} and len(found[fits][0].ids) == 6
    full(engine.pool)


def answered(model: Any, settings: Settings, prompt: list[int], **options: Any) -> list[Result]:
    engine = Engine(model, **{"page": 4} | options)
    engine.submit(Request(prompt, settings, key=0))
    (found,) = run(engine).values()
    full(engine.pool)
    return found


@pytest.mark.parametrize("extra", [{"lookup": 4}, {"draft": 3}], ids=str)
def test_crop_with_guesses_changes_no_token(extra: dict) -> None:
    """Guesses stay inside the context, and end where it ends."""
    model = made("learned")
    s = Settings(max_new_tokens=16, overflow="crop", **extra)
    for prompt in ([7, 7, 7], prompts((8,))[0]):
        (result,) = answered(model, s, prompt, draft=model)
        assert result.ids == plain(model, prompt, 16)


def test_crop_of_samples_is_each_sample_alone() -> None:
    model = made("learned")
    s = {"max_new_tokens": 15, "overflow": "crop", "temperature": 1.2, "lookup": 2}
    several = answered(model, Settings(**s, samples=3), [5, 6])
    (first,) = answered(model, Settings(**s), [5, 6], layout="contiguous")
    assert several[0].ids == first.ids
    assert len({tuple(r.ids) for r in several}) == 3


def test_crop_survives_preemption_and_cancelling() -> None:
    model = made("learned")
    s = Settings(max_new_tokens=14, overflow="crop")
    many = prompts((3, 8, 12, 2))
    engine = Engine(model, page=4)
    for prompt in many:
        engine.submit(Request(prompt, s))
    found, steps = {}, 0
    while not engine.idle:
        found |= {e.request: e.done[0] for e in engine.step() if e.done}
        steps += 1
        if steps in (2, 5, 9) and len(list(engine.scheduler.running())) > 1:
            with torch.inference_mode():
                engine.scheduler.preempt_last()
        if steps == 11:
            found |= {e.request: e.done[0] for e in engine.cancel(2)}
    assert [found[i].ids for i in (0, 1, 3)] == [plain(model, many[i], 14) for i in (0, 1, 3)]
    assert found[2].finish == "cancelled"
    assert found[2].ids == plain(model, many[2], 14)[: len(found[2].ids)]
    full(engine.pool)


@pytest.mark.parametrize("size", [2, LONGEST, LONGEST + 1])
def test_crop_runs_in_a_pool_that_holds_the_context(size: int) -> None:
    model, (prompt,) = made("learned"), prompts((size,))
    (result,) = answered(model, Settings(max_new_tokens=12, overflow="crop"), prompt, pages=3)
    assert result.ids == plain(model, prompt, 12)
    with pytest.raises(regard.UsageError, match="need 3 pages of 4, the pool has 2"):
        answered(model, Settings(max_new_tokens=12, overflow="crop"), prompt, pages=2)


@pytest.mark.parametrize("size", [2, LONGEST])
@pytest.mark.parametrize("more", [1, 2])
def test_text_is_read_anew_only_once_the_context_does_not_hold_it(
    size: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token is said, not fed: one more than the context holds is no reason."""
    engine, batches = Engine(made("learned"), page=4), list[Any]()
    real = engine.runners[0].batch

    def batch(*given: Any) -> Any:
        batches.append(real(*given))
        return batches[-1]

    monkeypatch.setattr(engine.runners[0], "batch", batch)
    settings = Settings(max_new_tokens=LONGEST - size + more, overflow="crop")
    engine.submit(Request(prompts((size,))[0], settings))
    run(engine)
    assert any(isinstance(x, WindowBatch) for x in batches) == (more == 2)


@pytest.mark.parametrize("chunk, rows", [(1, 1), (LONGEST, 1), (2 * LONGEST, 2), (512, 3)])
def test_texts_are_read_anew_a_chunk_of_tokens_at_a_time(chunk: int, rows: int) -> None:
    """One text at least."""
    read = list[int]()

    class Noted(Counted):
        def _count(self, ids: torch.Tensor, lengths: Any, logits: torch.Tensor) -> torch.Tensor:
            read.append(len(ids) if ids.shape[1] == LONGEST else 0)
            return logits

    engine = Engine(Noted(made("learned")), page=4, chunk=chunk)
    for prompt in prompts((LONGEST, LONGEST, LONGEST)):
        engine.submit(Request(prompt, Settings(max_new_tokens=40, overflow="crop")))
    run(engine)
    assert max(read) == rows


def test_generate_goes_on_past_the_context_when_asked() -> None:
    model = made("learned")
    (result,) = regard.generate(model, [[1] * LONGEST], max_new_tokens=5, overflow="crop")
    assert result.ids == plain(model, [1] * LONGEST, 5)
    with pytest.raises(regard.UsageError, match="overflow='crop'"):
        regard.generate(model, [[1] * LONGEST], max_new_tokens=5)


def test_crop_survives_steps_that_are_interrupted_one_after_the_other() -> None:
    """Each puts the rows back as they were, and none into the company of another request."""
    model, many = made("learned"), prompts((12, 10, 14))
    passes, bad = iter(range(10**6)), {4, 5, 6, 9}
    fragile = Fragile(model, lambda: KeyboardInterrupt() if next(passes) in bad else None)
    engine, done = Engine(fragile, page=4), []
    for prompt in many:
        engine.submit(Request(prompt, Settings(max_new_tokens=9, overflow="crop")))
    while not engine.idle:
        with contextlib.suppress(KeyboardInterrupt):
            done += [(e.request, e.done[0].ids) for e in engine.step() if e.done]
    assert sorted(done) == [(i, plain(model, p, 9)) for i, p in enumerate(many)]
