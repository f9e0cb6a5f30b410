"""Options of our own parts that no fast form knows: whoever runs the model computes them, and says why it is slower."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import regard
from regard.attention import GQA, Compressed
from regard.attention.compressed import CompressedIndexer
from regard.block import PerLayer, Streams, Tower
from regard.fast.cuda.table import why_not
from regard.fast.invariant import invariant
from regard.fast.train import checkpointed, joined
from regard.layers import LM, MLP, Norm
from regard.models import Tokens, TransformerConfig
from regard.moe import MixtureOfExperts, MoE
from regard.position import Proportional, Rope, Temperature
from tests.open.stranger import PROMPTS, greedy

_GROUPED = GQA(4, 2, head_dim=8, rope=Rope())
_LATE = GQA(4, 2, head_dim=8, rope=Rope(), qk_norm=1e-6, qk_norm_last=True)
_BARE = Norm(1e-6, rms=True, weighted=False)
_CENTRED = Norm(1e-6, biased=False, weighted=False)
_FFN = MLP(24, "silu", gated=True, bias=False)
_TIED = GQA(4, 2, head_dim=8, rope=Rope(), qk_norm=1e-6, value_is_key=True)
_NORMED = MoE(4, 2, 12, shared=1, normed=1e-6, gains=True)
_LIMITED = MoE(4, 2, 12, shared=1, limit=0.4, raised=False)
_SPARSE = Compressed(
    4, 8, 12, 3, Rope(), 4, 2, 8, 2, overlap=True, topk=2, index_heads=5, index_dim=6
)
OPTIONS: dict[str, dict[str, Any]] = {
    "value is key": {"attention": _TIED},
    "values are normed": {"attention": GQA(4, 2, head_dim=8, rope=Rope(), v_norm=1e-6)},
    "some pairs turn": {"attention": GQA(4, rope=Rope(scaling=Proportional(0.5)))},
    "norms after turning": {"attention": _LATE},
    "bare norms after turning": {"attention": replace(_LATE, qk_norm_bare=True)},
    "norms of each head": {"attention": GQA(4, 2, rope=Rope(), qk_norm=1e-6, qk_norm_by_head=True)},
    "clipped": {"attention": GQA(4, 2, rope=Rope(), clip=0.5)},
    "temperature": {"attention": GQA(4, 2, rope=Rope(), temperature=Temperature(3, 0.9))},
    "trained activation": {"ffn": MLP(24, "xielu", bias=False)},
    "residual gain": {"residual_gain": 0.3},
    "norms without weights": {"norm": _BARE},
    "centred norms without weights": {"norm": _CENTRED, "order": "shared"},
    "gained": {"gained": True},
    "experts with norms": {"ffn": _NORMED},
    "limits": {"ffn": MLP(24, "silu", gated=True, bias=False, limit=0.4)},
    "experts with limits": {"ffn": _LIMITED},
    "another score": {"ffn": MoE(4, 2, 12, score="sqrtsoftplus")},
    "experts with gains": {"ffn": MoE(4, 2, 12, gains=True)},
    "all of these": {"attention": _TIED, "ffn": _NORMED, "gained": True, "order": "sandwich"},
}
# They have no graph.
APART: dict[str, dict[str, Any]] = {
    "keys of others": {"borrowing": 1},
    "per layer": {"per_layer": PerLayer(6, 60)},
    "experts by token": {"ffn": MoE(4, 2, 12, hashed=60, score="sqrtsoftplus")},
    "streams": {"streams": Streams(3, rounds=4)},
    "compressed": {"attention": _SPARSE},
    "latest": {"attention": _SPARSE, "ffn": _LIMITED, "streams": Streams(2, rounds=3)},
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    norm = Norm(1e-6, rms=True)
    more = {"attention": _GROUPED, "ffn": _FFN, "norm": norm, **(OPTIONS | APART)[name]}
    tower = Tower(32, 2, **more)
    model = TransformerConfig(Tokens(60), tower, LM(tied=False), max_len=64).make().eval()
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.2 + (1 if p.dim() == 1 else 0)
    return model


def served(model: Any, runner: str, count: int = 12) -> list[list[int]]:
    model = regard.prepare(model) if runner == "native" else model
    engine = regard.Engine(model, runner="graph" if runner == "graph" else "torch")
    settings = regard.Settings(max_new_tokens=count, eos=())
    numbers = [engine.submit(regard.Request(prompt, settings)) for prompt in PROMPTS]
    done = {event.request: event.done for event in engine.run() if event.done is not None}
    return [done[number][0].ids for number in numbers]


@pytest.mark.parametrize("runner", ["torch", "native", "graph"])
@pytest.mark.parametrize("name", [*OPTIONS, *APART])
def test_option_decodes_in_every_runner(name: str, runner: str) -> None:
    model = build(name)
    if runner == "graph" and name in APART:
        assert "its layers read" in why_not(model) or "it has several streams" in why_not(model)
        with pytest.raises(regard.UsageError, match="no CUDA graph: it"):
            served(model, runner)
    else:
        assert served(model, runner) == [greedy(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("name", [*OPTIONS, *APART])
@torch.inference_mode()
def test_option_is_computed_by_packed_weights(name: str) -> None:
    """Ragged rows too. What int8 rounds may choose other experts, or entries: such are left out."""
    model, ids = build(name), torch.tensor([[5, 9, 2, 7, 1], [3, 8, 11, 4, 6]])
    want, real = model(ids, [5, 3]), torch.arange(5) < torch.tensor([[5], [3]])
    chooses = any(isinstance(m, MixtureOfExperts | CompressedIndexer) for m in model.modules())
    for precision, bound in (("fp32", 1e-5), ("int8", 0.1))[: 1 if chooses else 2]:
        got = regard.prepare(model, precision)(ids, [5, 3])
        off = (got - want)[real].abs().max() / want[real].abs().max()
        assert off < bound


@pytest.mark.parametrize("name", [*OPTIONS, *APART])
@torch.inference_mode()
def test_option_has_its_bits_in_any_company(name: str) -> None:
    model, ids = invariant(build(name)), torch.tensor([[5, 9, 2, 7, 1], [3, 8, 11, 4, 6]])
    for lengths in ([5, 5], [5, 3]):
        whole = model(ids, lengths, backend="ordered")
        for row, x, n in zip(ids, whole, lengths, strict=True):
            assert torch.equal(model(row[None, :n], backend="ordered")[0], x[:n])


@pytest.mark.parametrize("name", [*OPTIONS, *APART])
def test_option_trains_in_joined_products(name: str) -> None:
    plain, fast, ids = (
        build(name),
        checkpointed(joined(build(name))),
        torch.tensor([[5, 9, 2, 7, 1]]),
    )
    for model in (plain, fast):
        model.train()(ids).square().mean().backward()
    pairs = zip(plain.named_parameters(), fast.parameters(), strict=True)
    for (n, a), b in pairs:
        assert (a.grad is None) == (not a.requires_grad or "indexer" in n), n
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=n)
