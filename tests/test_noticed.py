"""Laws that small planted mistakes once survived: see mutants.py."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard.block import Block
from regard.decode import lean
from regard.decode.engine import Engine
from regard.decode.settings import Settings
from regard.layers import LM, LMHead, Tag
from regard.models.adapt import with_head
from regard.models.start import Start, initialize
from regard.train.keep import Keeper
from tests.decode.tiny import MODELS, full, model, prompts, request, run
from tests.train.toy import trainer

# --- training ---------------------------------------------------------------------------------------------------------


def test_mean_is_of_the_checkpoints_at_their_distance_and_the_newest(tmp_path: Path) -> None:
    """The best one stays though it is not at the distance, but is no part of the mean."""
    keeper = Keeper(tmp_path, lambda m, path: path.mkdir(), keep=3, size=lambda m: 0)
    keeper.every = 5
    for step in (3, 5, 10, 12):
        keeper.write(step, None, {}, {"best": 3})
    assert keeper.steps() == [keeper.path(step) for step in (3, 5, 10, 12)]
    assert keeper.regular() == [keeper.path(step) for step in (5, 10, 12)]


def test_without_a_distance_every_checkpoint_counts(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    t = trainer(tmp_path, told.append, steps=9, save=0, evaluate=3, average=3)
    losses = iter((3.0, 2.0, 1.0, 0.5))
    t.measure = lambda model, between: ({"loss": next(losses)}, {})
    t.run()
    assert t.keeper.steps() == [t.keeper.path(step) for step in (3, 6, 9)]
    assert [event["of"] for event in told if event["kind"] == "average"] == [3]


# --- models -----------------------------------------------------------------------------------------------------------


def test_head_for_tags_drops_what_hugging_faces_does() -> None:
    transformers = pytest.importorskip("transformers")
    small = dict(n_layer=1, n_embd=16, n_head=2, vocab_size=30, num_labels=3)
    theirs = transformers.GPT2ForTokenClassification(transformers.GPT2Config(**small))
    body = regard.build("gpt2", layers=1, dim=16, heads=2, vocab=30)
    head: Any = with_head(body, Tag(3)).config.head
    assert head.dropout == theirs.dropout.p


@pytest.mark.parametrize("dim", [16, 64])
def test_untied_head_of_2017_starts_so_that_logits_have_deviation_1(dim: int) -> None:
    """Its inputs are normalised: dim of them, each of deviation 1."""
    head = LMHead(LM(tied=False), dim, 500)
    initialize(nn.Sequential(head), Start("uniform"))
    with torch.no_grad():
        logits = head(torch.randn(400, dim), head.weight)
    assert float(logits.std()) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_lean_blocks_are_for_transformers_on_the_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean, "usable", lambda precision: True)
    made = copy.deepcopy(model(name))
    blocks = [part for part in made.modules() if isinstance(part, Block)]
    assert not lean.suits(made, "fp32") or blocks
    assert not lean.suits(made.to("meta"), "fp32")


# --- the engine -------------------------------------------------------------------------------------------------------

KINDS = [
    Settings(max_new_tokens=9, frequency_penalty=0.8),
    Settings(max_new_tokens=6, temperature=1.0, samples=3),
    Settings(max_new_tokens=5, beams=2),
]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_engine_never_holds_more_rows_than_it_was_given(layout: str, seed: int) -> None:
    """Requests of one row and of several come at random steps; those that run out of pages come again."""
    rng, most = random.Random(seed), 5
    engine = Engine(model("gqa_rope"), layout=layout, rows=most, page=4, pages=16, chunk=3)
    held = []
    for prompt in prompts(rng.choices(range(1, 12), k=12), seed):
        engine.submit(request("gqa_rope", prompt, rng.choice(KINDS)))
        for _ in range(rng.randrange(3)):
            engine.step()
            held.append(rows_of(engine))
    while not engine.idle:
        engine.step()
        held.append(rows_of(engine))
    assert max(held) == most
    full(engine.pool)


def rows_of(engine: Engine) -> int:
    """Rows that write, and those that a request will have which is being read."""
    loading = engine.loading
    coming = 0 if loading is None else len(loading.requests) * loading.times
    return coming + sum(lane.cache.batch for lane in engine.lanes.values())


@pytest.mark.parametrize("seed", range(4))
def test_engine_reads_no_more_prompts_together_than_its_pages_hold(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is let in is read and says a first word: nobody is put back for that."""
    rng = random.Random(seed)
    engine = Engine(model("gqa_rope"), page=4, pages=20, prefix=False)
    for prompt in prompts(rng.choices(range(1, 20), k=12), seed):
        engine.submit(request("gqa_rope", prompt, KINDS[seed % len(KINDS)]))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_preempt", lambda: pytest.fail("a request was put back"))
        engine.step()
    assert 0 < len(engine.waiting) < 12
    assert len(run(engine)) == 12
    full(engine.pool)
