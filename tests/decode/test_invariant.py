"""Batch-invariant mode: a request's ids and log probabilities have the same bits in any company."""

import pytest
import torch

import regard
from regard.config import UsageError
from regard.decode.engine import Engine
from regard.decode.invariant import invariant
from regard.decode.settings import Request, Result, Settings
from regard.models import Model

SMALL = {"dim": 96, "layers": 2, "ffn_dim": 250, "vocab": 300, "max_len": 160}
MODELS = {
    "gqa": ("llama", {"heads": 6, "kv_heads": 2, "head_dim": 20}),  # widths that leave tails
    "learned": ("gpt2", {"heads": 4}),
    "mla": ("llama", {"attention": regard.MLA(4, 40, 24, 12, rope=regard.Rope())}),
}
each = pytest.mark.parametrize("name", MODELS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
WAYS = {
    "batched": {"layout": "contiguous"},
    "few rows": {"layout": "contiguous", "rows": 3},
    "small chunks": {"layout": "paged", "chunk": 16},
    "odd chunks and pages": {"layout": "paged", "chunk": 7, "page": 8},
    "no prefix cache": {"layout": "paged", "prefix": False},
    "preempted": {"layout": "paged", "page": 8, "pages": 18, "prefix": False},
}


def build(name: str, dtype: torch.dtype) -> Model:
    preset, changes = MODELS[name]
    return regard.build(preset, dtype=dtype, **SMALL, **changes)


def prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 300, (n,), generator=g).tolist() for n in (5, 70, 17, 33, 1, 40, 90)]
    texts[3][:20] = texts[1][:20]  # something for the prefix cache to find
    return texts


def run(model: Model, which: list[int], **options: object) -> dict[int, Result]:
    engine = Engine(model, backend="ordered", **options)  # type: ignore[arg-type]
    settings = Settings(max_new_tokens=12, temperature=0.9, top_p=0.95, seed=3)
    texts = prompts()
    number = {engine.submit(Request(texts[i], settings, key=i)): i for i in which}
    return {number[e.request]: e.done[0] for e in engine.run() if e.done is not None}


@each
@dtypes
@pytest.mark.parametrize("way", WAYS)
def test_invariant_bits_do_not_depend_on_company(name: str, dtype: torch.dtype, way: str) -> None:
    model = invariant(build(name, dtype))
    alone = {i: run(model, [i], layout="contiguous")[i] for i in range(len(prompts()))}
    for order in (list(alone), list(alone)[::-1]):
        together = run(model, order, **WAYS[way])
        assert {i: (r.ids, r.logprobs) for i, r in together.items()} == {
            i: (r.ids, r.logprobs) for i, r in alone.items()
        }


@each
def test_invariant_model_equals_the_model(name: str) -> None:
    model = build(name, torch.float32)
    ids = torch.randint(0, 300, (2, 50))
    with torch.no_grad():
        torch.testing.assert_close(
            invariant(model)(ids, backend="ordered"), model(ids), rtol=1e-4, atol=1e-5
        )


def test_invariant_model_shares_its_weights() -> None:
    model = build("gqa", torch.float32)
    theirs = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in invariant(model).parameters()} == theirs


def test_plain_batching_does_change_bits() -> None:
    """Why the mode exists. If this fails, torch has become invariant and the mode can go."""
    model = build("gqa", torch.float32)
    ids = torch.randint(0, 300, (8, 40))
    with torch.no_grad():
        assert not torch.equal(model(ids)[:1], model(ids[:1]))


def test_invariant_mode_refuses_what_it_cannot_promise() -> None:
    with pytest.raises(UsageError, match="no invariant mode for MixtureOfExperts"):
        invariant(
            regard.build(
                "mixtral-8x7b",
                dim=32,
                layers=1,
                heads=2,
                kv_heads=1,
                head_dim=16,
                ffn_dim=16,
                vocab=50,
            )
        )
