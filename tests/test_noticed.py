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
from regard.cache import Contiguous, Paged
from regard.data.feed import Batch
from regard.decode.engine import Engine
from regard.decode.settings import Settings
from regard.fast.cpu import model as lean
from regard.kernels.c import native
from regard.layers import LM, Classify, LMHead, Norm, Tag
from regard.mask import Span
from regard.models import Patches, Tokens
from regard.models.adapt import LoRA, LowRank, with_head
from regard.models.init import Start, initialize
from regard.moe import MoE
from regard.position import Learned, RelativeBias, T5Bias
from regard.training.checkpoint import Checkpoints
from regard.training.objectives import balanced, causal
from regard.training.parallel import SingleProcess
from regard.training.trainer import machine
from tests.decode.tiny import MODELS, answers, full, model, prompts, request, run
from tests.train.toy import trainer

# --- training ---------------------------------------------------------------------------------------------------------


def test_mean_is_of_the_checkpoints_at_their_distance_and_the_newest(tmp_path: Path) -> None:
    """The best one stays though it is not at the distance, but is no part of the mean."""
    checkpoints = Checkpoints(tmp_path, lambda m, path: path.mkdir(), keep=3, size=lambda m: 0)
    checkpoints.every = 5
    for step in (3, 5, 10, 12):
        checkpoints.write(step, None, {}, {"best": 3})
    assert checkpoints.steps() == [checkpoints.path(step) for step in (3, 5, 10, 12)]


def test_without_a_distance_every_checkpoint_counts(tmp_path: Path) -> None:
    t = trainer(tmp_path, steps=9, save=0, evaluate=3)
    t.checkpoints.keep = 3
    losses = iter((3.0, 2.0, 1.0, 0.5))
    t.measure = lambda model, between: ({"loss": next(losses)}, {})
    t.run()
    assert t.checkpoints.steps() == [t.checkpoints.path(step) for step in (3, 6, 9)]


def test_balance_of_experts_weighs_as_in_switch_transformers() -> None:
    made = regard.build("mixtral-8x7b", layers=1, dim=16, heads=2, kv_heads=1, vocab=30).train()
    batch = Batch(torch.arange(12).view(2, 6), torch.arange(1, 13).view(2, 6))
    (default, _), (said, _) = (balanced(causal, made, w)(made, batch) for w in (None, 0.01))
    assert torch.equal(default, said)


@pytest.mark.parametrize("there", [True, False])
def test_what_decides_the_last_bit_names_the_c_code(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda: object() if there else None)
    assert machine(SingleProcess())[2] == ("C code" if there else "no C code")


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


@pytest.mark.parametrize("layers", [2, 8])
def test_head_on_a_modernbert_starts_as_one_of_its_depth(layers: int) -> None:
    """As in transformers: 0.02 / sqrt(2 layers), and the labels by the width."""
    sizes = dict(layers=layers, dim=96, heads=2, ffn_dim=24, vocab=50)
    head: Any = with_head(
        regard.build("modernbert-base", **sizes), Classify(200, "gelu", "mean", norm=Norm())
    ).head
    assert float(head.dense.weight.detach().std()) == pytest.approx(
        0.02 / (2 * layers) ** 0.5, rel=0.05
    )
    assert float(head.out.weight.detach().std()) == pytest.approx(96**-0.5, rel=0.05)


PARTS: dict[str, Any] = {
    "tokens": Tokens(400, Learned(500), types=300),
    "patches": Patches(64, 2),
    "head": LM(tied=False),
    "experts": MoE(8, 2, 24),
    "relative": T5Bias(8, 500),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_no_model_draws_anew_start_with_deviation_a_fiftieth(name: str) -> None:
    """As GPT-2's; but an embedding that is scaled up by sqrt(dim) starts so that it is 1 in the sum."""
    part = PARTS[name]
    made = (
        LMHead(part, 48, 500) if name == "head"
        else RelativeBias(part) if name == "relative"
        else part.make(48)
    )  # fmt: skip
    # Linear layers and convolutions start as torch has them.
    own = {n: p for n, p in made.named_parameters() if "project" not in n and "router" not in n}
    large = {n: p for n, p in own.items() if p.numel() > 3000}
    assert large
    for n, p in large.items():
        assert float(p.detach().std()) == pytest.approx(0.02, rel=0.05), n
    if name == "tokens":
        scaled = Tokens(400, scaled=True).make(48)
        x = scaled(torch.arange(400)[None], Span.run(0, 400))
        assert float(x.detach().std()) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("inputs", [16, 400])
def test_lora_starts_as_a_linear_layer_of_torch_does(inputs: int) -> None:
    """And as PEFT: uniform within 1 / sqrt(inputs)."""
    a = LowRank(nn.Linear(inputs, 8), LoRA(rank=64)).a
    plain = nn.Linear(inputs, 64).weight
    assert float(a.abs().max()) <= inputs**-0.5
    assert float(a.std()) == pytest.approx(float(plain.std()), rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_lean_blocks_are_for_transformers_on_the_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean, "usable", lambda precision: True)
    made = copy.deepcopy(model(name))
    blocks = [part for part in made.modules() if isinstance(part, Block)]
    assert lean.why_not_native(made, "fp32", torch.float32) or blocks
    assert lean.why_not_native(made.to("meta"), "fp32", torch.float32)


@pytest.mark.parametrize("layout", [Contiguous, Paged])
def test_cache_of_no_rows_holds_no_token(layout: Any) -> None:
    writer = model("gqa_rope")
    cache = layout(writer.cache_specs(), 2, dtype=torch.float64)
    writer(torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([3, 2]), cache=cache)
    none = cache.take(torch.empty(0, dtype=torch.long))
    assert none.batch == none.even == 0


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
    return sum(slot.times for batch in engine.scheduler.batches.values() for slot in batch.slots)


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
        patch.setattr(
            engine.scheduler, "preempt_last", lambda: pytest.fail("a request was put back")
        )
        engine.step()
    assert 0 < len(engine.waiting) < 12
    assert len(run(engine)) == 12
    full(engine.pool)


def test_request_that_never_began_has_no_score() -> None:
    engine = Engine(model("gqa_rope"), rows=1)
    engine.submit(request("gqa_rope", prompts((3,))[0], Settings(max_new_tokens=9)))
    second = engine.submit(request("gqa_rope", prompts((3,))[0], Settings(max_new_tokens=9)))
    engine.step()
    (event,) = engine.cancel(second)
    assert event.done is not None
    assert [(r.ids, r.score, r.finish) for r in event.done] == [([], 0.0, "cancelled")]


@pytest.mark.parametrize("samples", [2, 3])
def test_samples_put_back_together_say_what_they_would_have(samples: int) -> None:
    """Both requests run out of pages and are read again, each with several begun texts."""
    s = Settings(max_new_tokens=14, temperature=1.0, samples=samples)
    asked = [(p, s) for p in prompts((5, 5, 5, 6), seed=3)]
    tight = answers("gqa_rope", asked, page=2, pages=16 * samples, rows=64, prefix=False)
    assert tight == answers("gqa_rope", asked, page=2, pages=1000, rows=64)
